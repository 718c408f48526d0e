"""Test that code which the scripts share has one text, that the files which a reader has to read
stay short, and that no folder grows unseen."""
import importlib
import inspect
import subprocess
import sys

import pytest
from conftest import ROOT

import grpo
import gspo
from learn import sync

pytestmark = pytest.mark.quick

SOURCES = {name: (ROOT / name).read_text("utf-8") for name in sync.SCRIPTS}
# What does not fit needs a simpler idea or another file.
MOST_LINES = {"common.py": 400, "plumbing.py": 505, "machinery": 235, "lesson": 310, "ppo.py": 380,
              "grpo.py as a whole": 545, "nano.py": 200, "real.py": 312}
MOST_DIFFERENT = 45                     # lines of make diff A=grpo B=gspo
# Python that git tracks in a folder, with the folders in it; "." has only its files. If your change
# needs more, look for what can go, and if nothing can, raise the number here, so that a reader of
# the change sees what it costs.
MOST_OF_A_FOLDER = {".": 3990, "tasks": 1545, "kernels": 710, "examples": 1260, "vectors": 1370,
                    "report": 1180, "engines": 1010, "learn": 3330, "lab": 3530, "tests": 11650}


# The scripts are written to show these, so they may differ. kl has the estimators that each needs.
LESSONS = {"Config", "advantages", "kl", "log_ratio", "policy_loss", "compute_advantages",
           "backward", "update", "main"}


def test_the_machinery_has_one_text():
    for name, source in SOURCES.items():
        assert sync.sync(SOURCES["grpo.py"], source) == source, f"{name}: make sync FROM=..."


def test_a_script_without_one_marker_line_is_not_copied():
    source = SOURCES["grpo.py"]
    for text in (source + sync.MARKER, source.replace(sync.MARKER, "")):
        with pytest.raises(ValueError, match="but exactly one must"):
            sync.sync(text, source)


@pytest.mark.parametrize("words, message", [
    ([], "run: make sync FROM=grpo.py"), (["nano"], "'nano': unknown script; choose one of"),
    (["--diff", "grpo", "grpoo"], "'grpoo': unknown script")])
def test_wrong_words_get_one_line(words, message):
    done = subprocess.run([sys.executable, "learn/sync.py", *words], cwd=ROOT, text=True,
                          capture_output=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"error: {message}")


def test_a_function_of_several_lessons_has_one_text():
    texts = {}
    for name in SOURCES:
        module = importlib.import_module(name.removesuffix(".py"))
        for word, value in vars(module).items():
            if getattr(value, "__module__", "") == module.__name__ and word not in LESSONS:
                text = inspect.getsource(value)
                comment = inspect.getcomments(value)
                first = texts.setdefault(word, (name, text, comment))
                assert first[1:] == (text, comment), f"{word} of {name} is not that of {first[0]}"


def test_files_lessons_and_the_machinery_are_short():
    texts = {name: (ROOT / name).read_text("utf-8") for name in MOST_LINES if name.endswith(".py")}
    texts |= {name: sync.split(source)[0] for name, source in SOURCES.items()}
    texts["machinery"] = sync.split(SOURCES["grpo.py"])[1]
    texts["grpo.py as a whole"] = SOURCES["grpo.py"]
    for name, text in texts.items():
        assert len(text.splitlines()) <= MOST_LINES.get(name, MOST_LINES["lesson"]), name
    difference = sync.difference(SOURCES["grpo.py"], SOURCES["gspo.py"])
    assert 0 < len(difference) <= MOST_DIFFERENT


@pytest.mark.parametrize("folder", MOST_OF_A_FOLDER)
def test_a_folder_does_not_grow_unseen(folder):
    tracked = subprocess.run(["git", "ls-files", folder], cwd=ROOT, text=True, capture_output=True)
    if tracked.returncode != 0:
        pytest.skip("needs the files that git tracks")
    paths = [ROOT / name for name in tracked.stdout.split() if name.endswith(".py")
             and (folder != "." or "/" not in name)]
    lines = [len(path.read_text("utf-8").splitlines()) for path in paths if path.exists()]
    assert sum(lines) <= MOST_OF_A_FOLDER[folder]


def test_grpo_and_gspo_have_the_same_estimators_of_the_kl_and_the_same_losses():
    assert inspect.getsource(grpo.kl) == inspect.getsource(gspo.kl)
    assert grpo.LOSS_TYPES == gspo.LOSS_TYPES
