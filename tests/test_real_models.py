"""docs/real-models.md: its commands lead to transformers and back, and its arithmetic is right."""
import re
import shlex

import pytest
import test_pages
from conftest import ROOT
from small_models import LIKE_SMALL, NEEDS, load_example
from small_runs import SMALL, arguments, steps

import common
import grpo
from tools import export

pytest.importorskip("transformers", reason=NEEDS)
PAGE = "docs/real-models.md"
TEXT = " ".join((ROOT / PAGE).read_text().split())


def test_the_commands_lead_to_transformers_and_back(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base = {name: value for name, value in SMALL.items() if name != "max_steps"}
    small = {"grpo.py": base, "examples/pretrained.py": LIKE_SMALL | {"max_steps": 2}}
    for command in test_pages.THERE_AND_BACK:
        words = shlex.split(command)[1:]
        if words[0] == "-m":
            export.main(words[2:])
            continue
        flags = dict(small[words[0]])
        if "--init_from" in words:
            flags = {name: value for name, value in flags.items() if "base" not in name}
            flags["max_steps"] = 2
        script = grpo if words[0] == "grpo.py" else load_example()
        script.main([*arguments(flags), *words[1:]])
    assert len(test_pages.THERE_AND_BACK) == 5
    assert len(steps(tmp_path / "runs/grpo-arithmetic-s0")) == 2
    assert (tmp_path / "runs/llama/README.md").is_file()


def test_every_flag_on_the_page_is_one_of_the_example():
    pretrained = load_example()
    known = {field.name for field in common.flags_of(pretrained.Config)}
    rows = test_pages.table(PAGE, "A pretrained model")
    named = set()
    for row in rows:
        named |= set(re.findall(r"`--(\w+)", row["flag"]))
    own = {name for name in pretrained.Config.__annotations__
           if not hasattr(grpo.Config, name)}
    assert own - named == {"method", "baseline"}        # the first of them is in a sentence
    assert named <= known


def test_the_defaults_that_differ_are_those_that_the_page_names():
    said = re.search(r"defaults are other than those of the scripts: (.*?)\.(?= )", TEXT)[1]
    for name, value in re.findall(r"`--(\w+) (\S+)`", said):
        assert getattr(load_example().Config, name) == float(value)
        assert getattr(grpo.Config, name) != float(value)
    assert len(re.findall("`", said)) == 6


def test_the_memory_of_each_model_is_its_parameters_times_bytes():
    *_, table = re.findall(r"(?:^\|.*\n)+", test_pages.section(PAGE, "What fits where"), re.M)
    rows = test_pages.first_table(table)
    assert len(rows) == 6
    for row in rows:
        model, parameters, *memory = row.values()
        billions = float(parameters.removesuffix(" billion"))
        expected = [18 * billions, 22 * billions, (16 / 8 + 2) * billions]
        assert memory == [f"{number:.1f} GB" for number in expected], model
    assert 2 * 28 * 2 * 128 * 4 == 57_344 and "= 57,344 bytes a token" in TEXT
    assert f"256 rows of 512 tokens {57_344 * 256 * 512 / 1e9:.1f} GB" in TEXT
    assert f"8 rows of 256 that is {8 * 256 * 151_936 * 4 / 1e9:.1f} GB each" in TEXT
