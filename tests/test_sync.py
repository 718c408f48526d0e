"""Test that learn/sync.py finds and repairs drift in the code that the scripts share, that the
files which a reader has to read stay short, and that no folder grows unseen."""
import inspect

import pytest
from conftest import ROOT

import grpo
import gspo
from learn import sync

pytestmark = pytest.mark.quick

SOURCES = {name: (ROOT / name).read_text("utf-8") for name in sync.SCRIPTS}
# A change of a dozen lines fits. What does not fit needs a simpler idea or another file.
MOST_LINES = {"common.py": 357, "plumbing.py": 450, "machinery": 225, "lesson": 300, "ppo.py": 374,
              "grpo.py as a whole": 525, "nano.py": 215, "real.py": 255}
MOST_DIFFERENT = 45                     # lines of make diff A=grpo B=gspo
# Python in a folder, with the folders in it; "." has only its files. If your change needs more,
# look for what can go, and if nothing can, raise the number here, so that a reader of the change
# sees what it costs.
MOST_OF_A_FOLDER = {".": 3815, "tasks": 1740, "kernels": 730, "examples": 1193, "vectors": 1160,
                    "report": 875, "pretrained": 1930, "learn": 3325, "lab": 3395, "tests": 10630}


@pytest.mark.parametrize("name", SOURCES)
def test_what_scripts_share_has_one_text(name):
    drifted = sync.drifted(SOURCES["grpo.py"], SOURCES[name])
    for other, source in SOURCES.items():
        drifted += [f"{piece} of {other}" for piece in sync.drifted(SOURCES[name], source)]
    assert not drifted, "run make sync FROM=NAME.py with the script whose text is right"


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
    paths = (ROOT / folder).glob("*.py" if folder == "." else "**/*.py")
    assert sum(len(path.read_text("utf-8").splitlines()) for path in paths) \
        <= MOST_OF_A_FOLDER[folder]


# ---- two small scripts -----------------------------------------------------------------------

FULL = f'''"""A small script."""
LOSSES = {{"plain": "sum"}}


# Positive numbers only.
def root(x):
    return x ** 0.5


def policy_loss(x):
    return -x


{sync.MARKER}

def verify(text):
    return text == "4"
'''
SHORT = FULL.replace("return -x", "return -2 * x").replace('"sum"', '"mean"')


@pytest.mark.parametrize("old, new, names", [
    ("x ** 0.5", "x ** 0.25", ["root"]),
    ("# Positive", "# Negative", ["root"]),                     # the comment above it
    ("\ndef root(", "\n@cached\ndef root(", ["root"]),
    ('== "4"', '== "5"', [sync.MACHINERY]),
    ("return -x", "return x", []),                              # a lesson may differ
    ('"plain"', '"gated"', [])])                                # and so may a table
def test_drift_of_a_script_is_named_and_repaired(old, new, names):
    changed = FULL.replace(old, new)
    assert changed != FULL
    assert sync.drifted(SHORT, changed) == sync.drifted(changed, SHORT) == names
    assert sync.sync(SHORT, changed) == (FULL if names else changed)


def test_grpo_and_gspo_have_the_same_estimators_of_the_kl_and_the_same_losses():
    assert inspect.getsource(grpo.kl) == inspect.getsource(gspo.kl)
    assert grpo.LOSS_TYPES == gspo.LOSS_TYPES
