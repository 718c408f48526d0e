"""make mutants: every mistake of learn/practice/mistakes.txt can be planted, and has tests."""
from collections import Counter

import mutants
from conftest import ROOT

ALL = mutants.parse(mutants.MISTAKES.read_text("utf-8"))


def test_every_mistake_can_be_made_where_it_says_and_has_its_tests():
    wrong = []
    for mutant in ALL:
        count = (ROOT / mutant.file).read_text("utf-8").count("\n".join(mutant.old))
        is_tested = all((ROOT / file).is_file() for file in mutant.files)
        if count != 1 or not is_tested:
            wrong.append(f"{mutant.file}: {mutant.name}: {count} times, {mutant.files}")
    assert not wrong, "\n".join(wrong)
    count = Counter((mutant.file, *mutant.old, "", *mutant.new) for mutant in ALL)
    assert [mistake for mistake, times in count.items() if times > 1] == []
