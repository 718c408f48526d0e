"""A reader pays for every line: how long files, lines and sections may be."""
import re

import pytest
from conftest import ROOT, SCRIPTS

BUDGETS = {"common.py": 400, "kernels/logprob.py": 300, "tasks/*.py": 120, "README.md": 450,
           **{f"{name}.py": 500 for name in SCRIPTS}, "ppo.py": 650}
WIDE = {"README.md"}                                    # whose tables and commands stand on one line
ALGORITHM = 80                                          # lines of a script's section 2; TRPO has its own


def written(source):
    """A text without the blocks that make targets write into it."""
    return re.sub(r"<!-- made by make .*?<!-- end of \w+ -->\n", "", source, flags=re.S)


def algorithm(source):
    """The lines of section 2 of a script, without the rule above it."""
    return re.search(r"^# ---- 2\. [^\n]*\n(.*?)^# ---- ", source, re.S | re.M)[1].strip().splitlines()


def is_task(path):
    """Whether a file of tasks/ is a task, not what the tasks share."""
    return re.search(r"^def sample\(", path.read_text(), re.M)


def broken(name, source, budget):
    """What is wrong with the length of a file, as a list of sentences."""
    lines = written(source).splitlines()
    found = [f"{name}: {len(lines)} lines, {budget} at most"] * (len(lines) > budget)
    if name not in WIDE:
        found += [f"{name}:{n}: {len(line)} columns" for n, line in enumerate(lines, 1) if len(line) > 110]
    if name.removesuffix(".py") in SCRIPTS and len(algorithm(source)) > ALGORITHM:
        found.append(f"{name}: its algorithm has {len(algorithm(source))} lines, {ALGORITHM} at most")
    return found


@pytest.mark.parametrize("pattern", BUDGETS)
def test_a_file_keeps_within_its_budget(pattern):
    paths = [path for path in sorted(ROOT.glob(pattern)) if is_task(path) or pattern != "tasks/*.py"]
    assert paths
    problems = [problem for path in paths for problem in
                broken(path.relative_to(ROOT).as_posix(), path.read_text(), BUDGETS[pattern])]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", [f"{name}.py" for name in SCRIPTS])
@pytest.mark.parametrize("excess", ["lines,", "columns", "its algorithm"])
def test_a_broken_budget_is_seen(name, excess):
    source = (ROOT / name).read_text()
    if excess == "lines,":
        source += "#\n" * (BUDGETS[name] + 1 - len(source.splitlines()))
    elif excess == "columns":
        source = source.replace("import math\n", "import math" + " " * 100 + "\n", 1)
    else:
        need = ALGORITHM + 1 - len(algorithm(source))
        source = source.replace("def has_signal", "X = 1\n" * need + "def has_signal", 1)
    assert any(excess in problem for problem in broken(name, source, BUDGETS[name]))


def test_what_make_targets_write_costs_the_readme_nothing():
    block = "<!-- made by make x: y -->\n" + "1\n" * 9 + "<!-- end of y -->\n"
    assert broken("README.md", "a\n" * 3 + block, 3) == []
    assert broken("README.md", "a\n" * 4 + block, 3) == ["README.md: 4 lines, 3 at most"]
