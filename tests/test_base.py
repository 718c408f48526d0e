"""The base policy: which runs share one, what makes another, and what is said of a damaged one."""
from pathlib import Path

import pytest
import torch
from conftest import ROOT, every_script
from small_runs import (
    SMALL,
    arguments,
    at_work,
    changed_weights,
    difference,
    load,
    outcome,
    policy_of,
    read_summary,
)

import common
import grpo

FEW = {"base_steps": 3, "base_batch_size": 4, "max_steps": 0}


def bases():
    """The cached bases, with the times they were made."""
    return {path.name: path.stat().st_mtime_ns for path in Path("runs/base").iterdir()}


@pytest.fixture(scope="module")
def of_grpo(tmp_path_factory):
    """The folder of a run of two steps of grpo.py, beside the base that it made."""
    folder = tmp_path_factory.mktemp("bases")
    with at_work(folder):
        grpo.main(arguments(SMALL | FEW | {"output_dir": "of-grpo", "max_steps": 2}))
    return folder / "of-grpo"


@pytest.fixture
def beside(of_grpo, monkeypatch):
    """The test is at work where this base is. -> the folder of its run"""
    monkeypatch.chdir(of_grpo.parent)
    return of_grpo


# ---- one base for all ------------------------------------------------------------------------

@every_script
def test_all_scripts_share_a_base_and_begin_with_the_policy_of_another_if_told(new_run, beside):
    """Whoever comes first makes it: what it is made of has the same text in all of them."""
    before = bases()
    assert not changed_weights(
        load(new_run(**FEW) / "base.pt"), load(beside / "base.pt"))
    folder = new_run(**FEW, init_from=beside)
    assert bases() == before
    assert not changed_weights(load(folder / "base.pt")["policy"], policy_of(beside))
    trained = read_summary(beside)["trained"]
    assert read_summary(folder)["base"] | trained == read_summary(folder)["base"]


def test_a_run_that_makes_the_base_equals_one_that_reads_it(new_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcomes = []
    for seed in (1, 2):                                 # of other processes
        torch.manual_seed(seed)
        outcomes.append(outcome(new_run(base_steps=20, max_steps=3)))
    assert not difference(*outcomes)
    assert len(bases()) == 1


@pytest.mark.parametrize("flags", [
    {"reward": "accuracy+format"}, {"num_generations": 4}, {"seed": 3}, {"temperature": 0.5},
    {"max_completion_length": 9}, {"loss_type": "dapo"}], ids=str)
def test_what_does_not_shape_the_base_makes_no_other(new_run, beside, flags):
    before = bases()
    assert not changed_weights(
        load(new_run(**FEW, **flags) / "base.pt"), load(beside / "base.pt"))
    assert bases() == before


# ---- what makes another ----------------------------------------------------------------------

SHAPES_A_BASE = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 16, "base_seed": 1, "base_steps": 4, "base_batch_size": 8,
    "base_learning_rate": 0.01, "textbook_share": 0.9, "task": "arithmetic:3"}


@pytest.mark.parametrize("name", SHAPES_A_BASE)
def test_each_flag_of_the_base_and_the_task_make_another_base(new_run, beside, name):
    before = bases()
    other = new_run(**(FEW | {name: SHAPES_A_BASE[name]}))
    assert len(bases()) == len(before) + 1
    assert changed_weights(load(other / "base.pt"), load(beside / "base.pt"))
    assert common.Base.__annotations__.keys() | {"task"} == SHAPES_A_BASE.keys()


def test_another_version_of_torch_makes_another_base(new_run, beside, monkeypatch):
    before = bases()
    monkeypatch.setattr(torch, "__version__", "2.99")
    new_run(**FEW)
    assert len(bases()) == len(before) + 1


@pytest.fixture
def edited(monkeypatch):
    """edited(old, new): code is read as if it had another text. -> the files that are read"""
    read_text = Path.read_text
    read = []

    def edit(old="", new=""):
        def other_text(path, *args, **options):
            text = read_text(path, *args, **options)
            if path.suffix != ".py":
                return text
            read.append(path)
            return text.replace(old, new) if old else text
        monkeypatch.setattr(Path, "read_text", other_text)
        return read
    return edit


def test_the_base_is_keyed_by_the_code_of_the_machinery_of_common_and_of_all_tasks(
        new_run, tmp_path, monkeypatch, edited):
    monkeypatch.chdir(tmp_path)
    read = edited()
    new_run(**FEW | {"base_steps": 0})
    keyed = read[1:]                                    # the first is copied into the run folder
    assert keyed == [ROOT / "grpo.py", ROOT / "common.py", *sorted(ROOT.glob("tasks/*.py"))]


@pytest.mark.parametrize("old, new, is_same", [
    ("LOSS_TYPES", "KINDS", True),                      # of the lesson
    ("GRPO: group", "GRPO: a group", True),
    ("VOCAB_SIZE = 320", "VOCAB_SIZE = 384", False),    # of the machinery
    ("whose query heads share", "in which query heads share", False),
    ("rng.randint(1, 9)", "rng.randint(1, 8)", False)], ids=range(5))       # of common.py
def test_the_lesson_does_not_count_and_the_rest_does_with_its_comments(
        new_run, tmp_path, monkeypatch, edited, old, new, is_same):
    monkeypatch.chdir(tmp_path)
    new_run(**FEW | {"base_steps": 0})
    before = bases()
    edited(old, new)
    new_run(**FEW | {"base_steps": 0})
    assert (bases() == before) == is_same


# ---- damage ----------------------------------------------------------------------------------

def one_bit_flipped(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 64]) + content[middle + 1:]


@pytest.mark.parametrize("damage", [
    one_bit_flipped, lambda content: content[:1000], lambda content: b"",
    lambda content: b"hello"], ids=["one bit", "cut off", "empty", "text"])
def test_a_damaged_base_is_named_and_nothing_learns_from_it(
        new_run, tmp_path, monkeypatch, capsys, damage):
    monkeypatch.chdir(tmp_path)
    new_run(**FEW)
    [path] = Path("runs/base").iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SystemExit) as stop:
        new_run(**FEW)
    assert stop.value.code == 2
    assert str(path) in capsys.readouterr().err
