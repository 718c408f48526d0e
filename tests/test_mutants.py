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


def test_the_tests_of_what_changed_run_before_mistakes_are_planted(monkeypatch):
    said = {"rev-parse": "a commit", "ls-files": "tests/test_ask.py", "show": "",
            "diff": "docs/nano.md\ntests/test_gone.py\nkernels/logprob.py"}
    monkeypatch.setattr(mutants.changes, "git", lambda command, *_: said[command])
    monkeypatch.chdir(ROOT)
    of_kernel = [one.files for one in ALL if one.file == "kernels/logprob.py"]
    _, first = mutants.changes.choose(ALL, "mistakes.txt")
    assert first == ["tests/test_ask.py", *dict.fromkeys(sum(of_kernel, []))]
