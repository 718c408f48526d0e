"""The base policy: which runs share one, what makes another, and that a damaged one is made
again."""
import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SCRIPTS, every_script
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
    shuffle_the_global_generators,
    steps,
)

import common

pytestmark = pytest.mark.usefixtures("at_work_folder")


def bases():
    """The cached bases, with the times they were made."""
    return {path.name: path.stat().st_mtime_ns for path in Path("runs/base").iterdir()}


@pytest.fixture(scope="module")
def of_grpo(work):
    """The folder of a run of four steps of grpo.py."""
    import grpo
    with at_work(work):
        grpo.main(arguments(SMALL | {"output_dir": "of-grpo", "max_steps": 4}))
    return work / "of-grpo"


# ---- one base for all ------------------------------------------------------------------------

@every_script
def test_all_scripts_share_a_base(new_run, of_grpo):
    """Whoever comes first makes it: what it is made of has the same text in all of them."""
    before = bases()
    folder = new_run(max_steps=0)
    assert bases() == before
    assert not changed_weights(load(folder / "base.pt"), load(of_grpo / "base.pt"))


def test_a_run_that_makes_the_base_equals_one_that_reads_it(new_run, whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)                     # a runs/base of its own
    shuffle_the_global_generators(5)
    assert not difference(outcome(new_run()), outcome(whole))
    assert len(bases()) == 1


@pytest.mark.parametrize("flags", [
    {"reward": "accuracy+format"}, {"curriculum": True}, {"seed": 3}, {"temperature": 0.5},
    {"max_completion_length": 9}, {"dynamic_sampling": 1}], ids=lambda flags: list(flags)[0])
def test_what_does_not_shape_the_base_makes_no_other(new_run, tmp_path, monkeypatch, flags):
    few = {"base_steps": 5, "max_steps": 0, "operands": "2-3"}
    plain = new_run(**few)
    before = bases()
    shared = new_run(**few, **flags)
    assert bases() == before
    monkeypatch.chdir(tmp_path)                     # where the other run has to make it
    made = new_run(**few, **flags)
    for folder in (shared, made):
        assert not changed_weights(load(folder / "base.pt"), load(plain / "base.pt"))


@every_script
def test_a_run_may_begin_with_the_policy_of_another_script(new_run, of_grpo):
    folder = new_run(init_from=of_grpo, max_steps=2)
    assert not changed_weights(load(folder / "base.pt"), policy_of(of_grpo))
    trained = read_summary(of_grpo)["trained"]
    assert read_summary(folder)["base"] | trained == read_summary(folder)["base"]
    assert len(steps(folder)) == 2


# ---- what makes another ----------------------------------------------------------------------

SHAPES_A_BASE = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 16, "base_seed": 1, "base_steps": 4, "base_batch_size": 8,
    "base_learning_rate": 0.01, "textbook_share": 0.9, "operands": "3"}


@pytest.mark.parametrize("name", SHAPES_A_BASE)
def test_each_base_flag_makes_another_base(new_run, name):
    few = {"base_steps": 3, "max_steps": 0}
    plain = new_run(**few)
    count = len(bases())
    other = new_run(**few | {name: SHAPES_A_BASE[name]})
    assert len(bases()) == count + 1
    assert changed_weights(load(plain / "base.pt"), load(other / "base.pt"))


def test_every_flag_of_the_base_policy_is_in_the_test_above():
    fields = dataclasses.fields(common.Config)
    names = {field.name for field in fields if field.metadata["group"] == common.BASE_GROUP}
    assert names | {"operands"} == SHAPES_A_BASE.keys()


@pytest.mark.parametrize("task, flags", [
    ("countdown", {"numbers": "3"}), ("gridworld", {"slip": 0.5})])
def test_a_flag_of_the_task_makes_another_base(script, task, flags):
    plain = script.Config(task=task)
    other = dataclasses.replace(plain, **flags)
    path = Path(script.__file__)
    assert common.base_path(plain, path) != common.base_path(other, path)


def base_after(path, old, new, task="arithmetic"):
    """Where the base of an edited file is kept: of a script, of common.py or of a task."""
    import grpo
    cfg = grpo.Config(device="cpu", task=task)
    script = Path("grpo.py")
    before = common.base_path(cfg, script)
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    after = common.base_path(cfg, script)
    path.write_text(text)
    assert common.base_path(cfg, script) == before
    return before, after


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """The repository's files in the folder of the test, in place of those that a base is keyed
    by."""
    for name in [f"{script}.py" for script in SCRIPTS] + ["common.py"]:
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "tasks", tmp_path / "tasks")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "__file__", str(tmp_path / "common.py"))
    monkeypatch.setattr(common, "HERE", tmp_path)
    getfile = common.inspect.getfile
    monkeypatch.setattr(common.inspect, "getfile", lambda thing: getfile(thing).replace(
        str(ROOT / "tasks"), str(tmp_path / "tasks")))


def test_an_edit_of_the_lesson_keeps_the_base(copies):
    before, after = base_after(
        Path("grpo.py"), "A = rewards - rewards.mean(", "A = rewards - rewards.amin(")
    assert after == before


def test_an_edit_of_the_machinery_makes_another_base(copies):
    before, after = base_after(Path("grpo.py"), '"<|eos|>", "<|pad|>"]', '"<|pad|>", "<|eos|>"]')
    assert after != before


@pytest.mark.parametrize("task", ["arithmetic", "lookup"])
def test_an_edit_of_common_makes_another_base(copies, task):
    before, after = base_after(Path("common.py"), "SHORTER = 0.2", "SHORTER = 0.3", task)
    assert after != before


@pytest.mark.parametrize("task, is_new", [
    ("lookup", True), ("arithmetic", False), ("countdown", False), ("arithmetic,lookup", True)])
def test_an_edit_of_a_task_makes_another_base_of_this_task(copies, task, is_new):
    before, after = base_after(
        Path("tasks/lookup.py"), "CALL_LIMIT = 4", "CALL_LIMIT = 5", task)
    assert (after != before) == is_new


@pytest.mark.parametrize("task, is_new", [("arithmetic,lookup", True), ("lookup", False)])
def test_an_edit_of_how_tasks_are_mixed_makes_another_base_of_a_mix(copies, task, is_new):
    before, after = base_after(
        Path("tasks/mix.py"), "rng.choice(self.names)", "self.names[0]", task)
    assert (after != before) == is_new


def test_another_version_of_torch_makes_another_base(script, monkeypatch):
    cfg = script.Config()
    path = Path(script.__file__)
    before = common.base_path(cfg, path)
    monkeypatch.setattr(torch, "__version__", "2.99")
    assert common.base_path(cfg, path) != before


# ---- damage ----------------------------------------------------------------------------------

def cut_off(path):
    path.write_bytes(path.read_bytes()[:1000])


def emptied(path):
    path.write_bytes(b"")


def text(path):
    path.write_text("hello")


def a_list(path):
    torch.save([1], path)


def one_bit_flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 64
    path.write_bytes(data)


def half_the_weights(path):
    """The first one changed, the others missing."""
    torch.save({"embed.weight": load(path)["embed.weight"] + 1}, path)


@pytest.mark.parametrize("damage", [
    cut_off, emptied, text, a_list, one_bit_flipped, half_the_weights],
    ids=lambda damage: damage.__name__)
def test_a_damaged_cached_base_is_made_again(new_run, damage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)                     # a runs/base of its own
    few = {"base_steps": 5, "max_steps": 0}
    first = new_run(**few)
    [path] = Path("runs/base").iterdir()
    good = path.read_bytes()
    damage(path)
    again = new_run(**few)
    assert not changed_weights(load(again / "base.pt"), load(first / "base.pt"))
    assert path.read_bytes() == good
