"""Test that learn/sync.py finds and repairs drift in the code that the scripts share, and that the
files which a reader has to read stay short."""
import pytest
from conftest import ROOT

from learn import sync

pytestmark = pytest.mark.quick

SOURCES = {name: (ROOT / name).read_text() for name in sync.SCRIPTS}
# Code may only get shorter; a budget grows only for sentences that a reader needs.
MOST_LINES = {"common.py": 334, "plumbing.py": 387, "machinery": 215, "lesson": 288, "ppo.py": 362,
              "nano.py": 200, "real.py": 215}


@pytest.mark.parametrize("name", SOURCES)
def test_what_scripts_share_has_one_text(name):
    drifted = sync.drifted(SOURCES["grpo.py"], SOURCES[name])
    for other, source in SOURCES.items():
        drifted += [f"{piece} of {other}" for piece in sync.drifted(SOURCES[name], source)]
    assert not drifted, "run make sync FROM=NAME.py with the script whose text is right"


def test_files_lessons_and_the_machinery_are_short():
    texts = {name: (ROOT / name).read_text() for name in MOST_LINES if name.endswith(".py")}
    texts |= {name: sync.split(source)[0] for name, source in SOURCES.items()}
    texts["machinery"] = sync.split(SOURCES["grpo.py"])[1]
    for name, text in texts.items():
        assert len(text.splitlines()) <= MOST_LINES.get(name, MOST_LINES["lesson"]), name
    assert 0 < len(sync.difference(SOURCES["grpo.py"], SOURCES["gspo.py"])) <= 45


@pytest.mark.parametrize("old, new, name", [
    ("    A = rewards - means\n", "    A = rewards\n", ""),           # a lesson may differ
    ("return x.sum() / num_tokens ", "return x.mean() ", "aggregate"),
    ("10_000.0 **", "20_000.0 **", sync.MACHINERY),
    ("\ndef kl(", "\n@torch.no_grad()\ndef kl(", "kl"),
    ("ratio < 1 - ", "ratio < 1 + ", "is_clipped")])
def test_drift_of_a_script_is_named_and_repaired(old, new, name):
    changed = SOURCES["grpo.py"].replace(old, new)
    assert sync.drifted(SOURCES["gspo.py"], changed) == ([name] if name else [])
    if name:
        assert changed != SOURCES["grpo.py"] == sync.sync(SOURCES["gspo.py"], changed)
