"""Choose the planted mistakes that a change could hide from the tests, for mutants.py --changed.

A mistake is chosen if the change touches the mistake, the file in which it is planted, or the file
with the test that killed it last time. If the change touches what all tests share, all mistakes are
chosen. tests/all-killed.txt names the last commit at which all mistakes were killed, and the test
that killed each of them.
"""
import os
import re
import subprocess
from pathlib import Path

from mistakes import parse

KILLED = "tests/all-killed.txt"
# Versions of packages, and the helpers of the tests
SHARED = re.compile(r"requirements\.txt|pyproject\.toml|tests/(?!test_)\w+\.py")


def git(*words):
    """Run git. -> what it prints; None if it fails"""
    done = subprocess.run(["git", *words], text=True, capture_output=True)
    return done.stdout if done.returncode == 0 else None


def read_killed():
    """Read tests/all-killed.txt. -> the commit, {mistake: the test that killed it}"""
    commit, *rows = (Path(KILLED).read_text().splitlines() if Path(KILLED).exists() else [""])
    return commit, dict(row.split(" | ", 1) for row in rows)


def write_killed(killed):
    """Store the tests that killed all mistakes, {mistake: test}, unless files are not committed."""
    if git("status", "--porcelain", "--", ".", f":!{KILLED}") != "":
        return print(f"{KILLED} is not written, because some changes are not committed")
    rows = [f"{mistake} | {test}" for mistake, test in killed.items()]
    Path(KILLED).write_text("\n".join([git("rev-parse", "HEAD").strip(), *rows, ""]))


def choose(mutants, mistakes):
    """Choose the mistakes that the change since a commit could hide, and print how many. The commit
    is that of BASE or of tests/all-killed.txt. mistakes: the file that contains them. -> list"""
    commit, killed = read_killed()
    name = os.environ.get("BASE") or commit
    base = (name and git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}") or "").strip()
    if not base:
        print(f"all {len(mutants)} mistakes are planted, because the history lacks the commit")
        return mutants
    changed = set(git("diff", "--name-only", "--no-renames", base, "--").splitlines())
    changed |= set(git("ls-files", "--others", "--exclude-standard").splitlines())
    old = [] if any(map(SHARED.fullmatch, changed)) else parse(
        git("show", f"{base}:{mistakes}") or "")
    chosen = []
    for mutant in mutants:
        killer, _, _ = killed.get(f"{mutant.file}: {mutant.name}", "").partition("::")
        of_mutant = {mutant.file, *([killer] if killer else mutant.files)}
        if mutant not in old or changed & of_mutant:
            chosen.append(mutant)
    print(f"{len(chosen)} of {len(mutants)} mistakes are planted for the change since {base[:9]}",
          flush=True)
    return chosen
