"""A run of a task in which luck decides: it has returns, and nothing that is right or wrong."""

import pytest
import torch
from conftest import every_script
from small_runs import INSTANT, arguments, contents, lines, read_summary, resume, steps

import common
import grpo

OF_ONE = {"greedy_return", "best_return"}
OF_SAMPLES = {"return", "best_return"}
JUDGING = ("accuracy", "pass@", "maj@", "greedy/", "frontier", "eval/greedy/", "eval/accuracy")


def judging(names):
    """The names that speak of right answers."""
    return [name for name in names if name.startswith(JUDGING) or name in ("greedy", "eval/greedy")]


class Luck(common.Arithmetic):
    """Arithmetic in which each character earns a half, two being the best one can expect."""
    is_judged = False

    def __init__(self, cfg, verify):
        super().__init__(cfg, verify)
        self.verify = self.moves

    def moves(self, problem, text):
        return [0.5] * len(text)

    def best_return(self, problem):
        return 1.0


@pytest.fixture
def luck(monkeypatch, tmp_path, restored_ctrl_c):
    """Makes the task arithmetic one in which luck decides; the test is in a folder of its own."""
    monkeypatch.setattr(common, "Arithmetic", Luck)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


@every_script
def test_a_run_in_which_luck_decides_has_returns_and_no_accuracy(script, luck, capsys):
    flags = INSTANT | {"operands": "2-3", "output_dir": "run", "max_steps": 7}
    script.main(arguments(flags))
    assert len(steps(luck)) == 7                        # nothing stops it before
    for line in steps(luck):
        assert not judging(line)
        assert {f"eval/{name}" for name in OF_ONE} <= line.keys()
        assert line["eval/best_return"] == 1.0
    summary = read_summary(luck)
    for scores in (summary["base"], summary["trained"]):
        assert not judging(scores)
        assert scores.keys() >= OF_ONE | OF_SAMPLES
        assert scores["greedy_return"] >= 0 and scores["return"] > 0
    assert summary["trained"]["greedy_return"] == steps(luck)[-1]["eval/greedy_return"]
    for record in lines(luck / "evaluation.jsonl"):
        assert record["base"]["right"] is record["trained"]["right"] is None
    assert not judging(capsys.readouterr().out.replace("\n", " ").split())
    resume(luck, max_steps=8)
    assert len(steps(luck)) == 8


def test_the_plain_console_prints_no_column_that_luck_has_not(luck, monkeypatch, capsys):
    monkeypatch.setattr(common, "make_console", common.Console)
    monkeypatch.setattr(grpo, "COLUMNS", {"right": "accuracy"} | grpo.COLUMNS)
    grpo.main(arguments(INSTANT | {"max_steps": 2}))
    said = capsys.readouterr().out.splitlines()
    [heading] = [line.split() for line in said if line.startswith("step ")]
    assert heading == ["step", *(name for name in grpo.COLUMNS if name not in ("right", "capped"))]
    rows = [line.split() for line in said if line.startswith(("1 ", "2 "))]
    assert [len(row) for row in rows[:2]] == [len(heading)] * 2


@pytest.mark.parametrize("flags, name", [
    ("--stop_at 0.5", "stop_at"), ("--stop_at 0", "stop_at"),
    ("--operands 2-3 --curriculum", "curriculum")])
def test_a_flag_that_looks_at_right_answers_is_refused(luck, flags, name, capsys):
    with pytest.raises(SystemExit) as stop:
        grpo.main([*arguments(INSTANT), *flags.split()])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --{name} ") and error.count("\n") == 1
    assert "luck decides" in error
    assert contents() == {}


def test_never_to_stop_is_no_look_at_right_answers(luck):
    summary = grpo.main([*arguments(INSTANT | {"max_steps": 1}), "--stop_at", "2"])
    assert summary["steps"] == 1


# ---- batches ---------------------------------------------------------------------------------

class HalfLuck(Luck):
    """Luck decides with two operands; with three the first character has to be a capital."""

    def moves(self, problem, text):
        if problem.difficulty == 2:
            return [0.5] * len(text)
        return float(text[:1].isupper())

    def is_correct(self, problem, verdict):
        return None if problem.difficulty == 2 else verdict == 1


@pytest.fixture
def batches(config, talker, monkeypatch):
    """batches(task_class, **flags): a batch of such a task."""
    def make(task_class, **flags):
        cfg = config(num_prompts=12, operands="2-3", **flags)
        return grpo.sample_batch(talker(cfg), task_class(cfg, grpo.verify), cfg, 0)
    return make


@pytest.mark.parametrize("dynamic_sampling", [0, 3])
def test_where_luck_decides_no_completion_is_right_and_there_are_no_pass_rates(
        batches, dynamic_sampling):
    batch = batches(Luck, dynamic_sampling=dynamic_sampling)
    assert batch.pass_rates == {}
    assert batch.is_correct.dtype == torch.bool and not batch.is_correct.any()
    assert batch.rewards.mean() > 0
    assert not judging(common.describe(batch))
    assert {"reward", "signal", "entropy"} <= common.describe(batch).keys()


@pytest.mark.parametrize("dynamic_sampling", [0, 3])
def test_of_a_mix_the_accuracy_is_that_of_what_is_judged(batches, dynamic_sampling):
    batch = batches(HalfLuck, dynamic_sampling=dynamic_sampling)
    assert list(batch.pass_rates) == ["arithmetic-3"]
    rates = batch.pass_rates["arithmetic-3"]
    accuracy = common.describe(batch)["accuracy"]
    assert accuracy == pytest.approx(sum(rates) / len(rates)) and accuracy > 0
    if dynamic_sampling == 0:
        of_three = [problem.difficulty == 3 for problem in batch.problems[::4]]
        assert sum(of_three) == len(rates) < 12
        assert batch.is_correct[of_three].double().mean(dim=1).tolist() == rates
        assert not batch.is_correct[[not judged for judged in of_three]].any()
