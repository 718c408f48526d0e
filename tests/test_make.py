"""The Makefile: make alone is make run, and make help lists every target, each in a group."""
import os
import re
import subprocess

from conftest import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
GROUPS = {
    "To start": "run read film play report help",
    "To check": "test quick lint mutants",
    "To keep the scripts in step": "sync diff",
    "To measure": "seeds compare tasks r1 zero rlhf passk lab bench real gpu",
    "Housekeeping": "screenshot clean"}

def make(*words):
    """What make prints, also where make itself runs the tests."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True, check=True,
                          timeout=60, env=outside).stdout


def listed():
    """The targets that make help lists: group -> {target: what is said of it}."""
    found = {}
    targets = {}
    for line in make("help").splitlines():
        target = re.fullmatch(r"  make (\w+) +(\S.*)", line)
        if target:
            targets[target[1]] = target[2]
        elif line:
            targets = found[line] = {}
    return found


def test_make_help_lists_every_target_in_its_group():
    phony = re.search(r"^\.PHONY: (.*)", MAKEFILE.replace("\\\n", " "), re.M)[1].split()
    found = listed()
    targets = [target for group in found.values() for target in group]
    assert sorted(targets) == sorted(phony)
    for (head, names), (said, group) in zip(GROUPS.items(), found.items(), strict=True):
        assert said.startswith(head)
        assert list(group) == names.split()


def test_no_line_of_make_help_is_wider_than_a_page_of_text():
    assert max(len(line) for line in make("help").splitlines()) <= 100


def test_every_target_but_those_of_the_packages_and_of_an_experiment_is_phony():
    phony = re.search(r"^\.PHONY: (.*)", MAKEFILE.replace("\\\n", " "), re.M)[1].split()
    targets = re.findall(r"^([^\s:#=]+):(?!=)", MAKEFILE, re.M)
    assert sorted(targets) == sorted([".PHONY", "$(VENV)/installed", "lab-%", *phony])


def test_each_experiment_of_the_lab_has_its_target():
    assert make("--dry-run", "VENV=none", "lab-seeds").endswith(" -m lab.seeds\n")


def test_make_alone_is_make_run():
    options = ("--dry-run", "VENV=none")
    assert make(*options) == make(*options, "run")
    assert "grpo.py" in make(*options)
