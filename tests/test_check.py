"""report.check names what is wrong in a run, and nothing in a correct one, and reads anybody's log.
tests/trainer is from a run of TRL 1.16 with a constant reward and a model of random weights."""
import json
import math
import os
import re
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT
from small_runs import SMALL, arguments, at_work
from test_pages import PAGES

from learn.practice import hunt
from report.check import PARTS, check, main, read, summary
from report.formats import renamed

FLAGS = {"num_iterations": 1, "num_mini_batches": 2}
GOOD = {"frac_reward_zero_std": 0.2, "grad_norm": 1.0, "max_log_ratio": 0.5, "entropy": 0.2,
        "sampling/surprise": 0.21}


def run_of(n=20, **changes):
    """Make a run whose reward rises. changes: the first and the last value of a metric, or a
    function of the step; None leaves it out"""
    at = lambda change, i: change(i) if callable(change) else change[i >= n // 2]
    steps = [GOOD | {"reward": 0.3 + 0.02 * i, "kl": 0.01 * i}
             | {name: at(change, i) for name, change in changes.items()} for i in range(n)]
    return [{name: x for name, x in one.items() if x is not None} for one in steps]


def anchors(samples=(), flags=FLAGS, **changes):
    return [re.search(r"\(#(.*)\)", text)[1]
            for text in check(SimpleNamespace(**flags), run_of(**changes), samples)]


def differing(difference):
    """The metrics of a run whose sampler and trainer differ by so much, which is corrected."""
    return {"sampling/sampling_logp_difference/mean": [difference] * 2,
            "sampling/importance_sampling_ratio/mean": [1.0, 1.0]}


def noise(i):
    return 0.25 * (-1) ** (i * i // 3)


@pytest.mark.parametrize("anchor, changes", [
    ("", {}), ("", {"reward": [0.5, 0.48], "n": 18}), ("", {"eval/greedy": [0.8, 0.9]}),
    ("", {"reward": [-5.0, -5.06], "n": 18}), ("", {"max_log_ratio": [0.0, 0.0]}),
    ("", {"reward": lambda i: 0.6 - 0.02 * i + noise(i), "n": 18}),
    ("flat", {"reward": lambda i: 0.6 - 0.02 * i, "n": 18}),
    ("rate", {"reward": lambda i: 0.2 + 0.05 * i if i < 12 else 0.2, "n": 18}),
    ("flat", {"reward": [-0.5, -0.8], "n": 18}),
    ("rate", {"reward": lambda i: 0.1 + 0.05 * i if i < 15 else 0.2}),
    ("flat", {"reward": [0.5, 0.49]}), ("flat", {"reward": lambda i: 0.5 + noise(i), "n": 40}),
    ("", {"reward": [0.9, 0.9], "accuracy": [0.9, 0.9]}),
    ("", {"reward": [0.5, 0.5], "teacher_kl": [0.3, 0.1]}),
    ("", {"reward": [0.5, 0.5], "frac_reward_zero_std": [0.6, 0.6]}),
    ("", {"frac_reward_zero_std": [1.0, 1.0], "accuracy": [1.0, 1.0]}),
    ("", {"rewards/chosen": [0.0, -1.0]}),
    ("", {"sampling/surprise": lambda i: 0.21 if i % 2 else None,
          "entropy": lambda i: 0.2 if i % 2 else 0.9}),
    ("no-gradient", {"grad_norm": [0.0, 0.0]}),
    ("no-gradient", {"max_log_ratio": [0.0, 0.0], "reward": [0.5, 0.5]}),
    ("no-gradient", {"max_log_ratio": [0.0, 0.0], "n": 18,
                     "reward": lambda i: 0.5 + 0.25 * (-1) ** (i + 1) + 0.05 * (i > 9)}),
    ("unused", {"kl": [-1e-9, 1e-9]}), ("temperature", {"sampling/surprise": [0.15, 0.15]}),
    ("stale", {"sampling/sampling_logp_difference/mean": [0.0, 0.1]}),
    ("groups", {"frac_reward_zero_std": [0.5, 1.0], "reward": [0.5, 0.5], "n": 18}),
    ("groups", {"frac_reward_zero_std": [0.5, 1.0], "accuracy": [0.3, 0.2]}),
    ("", {"frac_reward_zero_std": [0.5, 1.0], "reward": [0.3, 1.0]}),
    ("rate", {"reward": [0.5, 0.2]}),
    ("", {"entropy": [0.2, 0.004], "sampling/surprise": [0.2, 0.004]}),
    ("rate", {"entropy": [0.2, 0.004], "sampling/surprise": [0.2, 0.004],
              "accuracy": [0.5, 0.89]}),
    ("", {"entropy": [0.2, 0.004], "sampling/surprise": [0.2, 0.004], "accuracy": [0.5, 0.91]}),
    ("rate", {"entropy": [0.2, 0.5], "sampling/surprise": [0.2, 0.5], "reward": [0.5, 0.5],
              "n": 18}),
    ("rate", {"grad_norm": [1.0, 12.0], "reward": [0.5, 0.5], "n": 18}),
    ("rate", {"rewards/chosen": [0.0, -1.0], "reward": [0.9, 0.8], "n": 18}),
    ("held-out", {"eval/greedy": [0.8, 0.5]}),
    ("", {"eval/greedy": [0.8, 0.5], "flags": {"num_eval_problems": 16}}),      # by chance
    ("", differing(0.01) | {"flags": {"num_prompts": 4}}),
    ("rounding", differing(0.05) | {"flags": {"num_prompts": 4}}),
    ("", differing(0.05)), ("rounding", differing(0.2))])       # of TRL, which may use bfloat16
def test_what_is_wrong_is_named_and_nothing_else(anchor, changes):
    assert anchors(**changes) == ([anchor] if anchor else [])


@pytest.mark.parametrize("mask, calls, found", [
    ([1, 0, 1], 1.0, []), ([1, 1, 1], 1.0, ["turns"]), ([1, 1, 0], 0.0, ["rounding"])])
def test_masks_show_an_end_that_is_not_learned_or_a_tool_that_is(mask, calls, found):
    samples = [{"completions": [{"tokens": ["a", "b", "<|eos|>"], "mask": mask}]}]
    assert anchors(samples, **{"tools/call_frequency": [calls, calls]}) == found


def test_a_planted_mistake_is_found_in_its_run(tmp_path):
    with at_work(tmp_path):
        flags = SMALL | {"max_steps": 4, "num_mini_batches": 2, "output_dir": "run"}
        hunt.run("old not detached", *arguments(flags))
        assert "logps - logps" in (tmp_path / "run/grpo.py").read_text("utf-8")
        assert any("no-gradient" in text for text in check(*read("run")))


def test_a_run_of_trl_is_read_and_each_anchor_is_on_the_page():
    found = [text.partition(":")[0] for text in check(*read(ROOT / "tests/trainer"))]
    assert found == ["no group has signal, because all its rewards are equal",
                     "most completions are truncated"]
    named = set(re.findall(r"\(#([\w-]+)\)", (ROOT / "report/check.py").read_text("utf-8")))
    assert named == {*PARTS}
    headings = re.findall("^## (.*)", PAGES["docs/why.md"], re.M)
    assert named <= {heading.lower().replace(" ", "-") for heading in headings}


# ---- logs of other trainers ------------------------------------------------------------------

VERL = {"reward": "critic/score/mean", "grad_norm": "actor/grad_norm", "entropy": "actor/entropy"}


def log_of(kind, folder):
    """Write a run whose gradient is 0 as another program writes it. -> Path"""
    steps = [{name: one[name] for name in VERL} for one in run_of(grad_norm=[0.0, 0.0])]
    file = folder / {"trl": "trainer_state.json", "csv": "log.csv"}.get(kind, "log.jsonl")
    if kind == "tensorboard":
        pytest.importorskip("tensorboard", reason="tensorboard is not installed")
        from torch.utils.tensorboard import SummaryWriter
        with SummaryWriter(folder) as writer:
            for i, one in enumerate(steps):
                for name, value in one.items():
                    writer.add_scalar(f"train/{name}", value, i)
        return folder
    if kind == "trl":
        evaluations = [{"step": i, "eval_reward": 0.5} for i in range(20)]
        log = [{"step": i, **one} for i, one in enumerate(steps)]
        text = json.dumps({"log_history": log + evaluations})
    elif kind == "csv":
        head = ",".join(f'"my run - train/{name}","my run - train/{name}__MIN"' for name in VERL)
        rows = [",".join(f"{one[name]},7" for name in VERL) for one in steps]
        text = "\n".join([f'"Step",{head}', *(f"{i},{row}" for i, row in enumerate(rows))])
    else:
        named = [{VERL[name]: x for name, x in one.items()} for one in steps]
        lines = [json.dumps({"step": i, "data": one} if kind == "verl" else one)
                 for i, one in enumerate(named if kind == "verl" else steps)]
        text = "\n".join(lines) + '\n{"step": 21, "da'          # the run still writes
    file.write_text(text, "utf-8")
    return folder if kind == "trl" else file


@pytest.mark.parametrize("kind", ["trl", "verl", "lines", "csv", "tensorboard"])
def test_the_same_run_is_read_from_each_kind_of_log(kind, tmp_path):
    flags, records, samples = read(log_of(kind, tmp_path))
    assert [one["reward"] for one in records] == pytest.approx([0.3 + 0.02 * i for i in range(20)])
    assert check(flags, records, samples) == [
        "groups differ, but the policy gets no gradient (#no-gradient)"]


@pytest.mark.parametrize("kind", ["trl", "verl", "lines", "csv"])
def test_the_mark_with_which_some_programs_begin_a_text_file_belongs_to_no_line(kind, tmp_path):
    log = log_of(kind, tmp_path)
    log = log / "trainer_state.json" if kind == "trl" else log
    records = read(log)[1]
    log.write_text(f"\ufeff{log.read_text('utf-8')}", "utf-8")
    assert read(log)[1] == records and len(records) == 20


def test_the_newest_checkpoint_of_a_folder_is_read(tmp_path):
    for name, time, reward in (("checkpoint-20", 100, 2.0), ("checkpoint-100", 300, 3.0),
                               ("checkpoint-60", 200, 1.0)):
        state = tmp_path / name / "trainer_state.json"
        state.parent.mkdir()
        state.write_text(json.dumps({"log_history": [{"step": 1, "reward": reward}]}))
        os.utime(state, (time, time))
    assert [one["reward"] for one in read(tmp_path)[1]] == [3.0]


def test_the_name_of_trl_comes_first_then_verls_and_validation_is_an_evaluation():
    record = {"critic/score/mean": 2.0, "critic/rewards/mean": 3.0, "val-core/acc": 4.0}
    assert (renamed(record)["reward"], renamed(record)["eval_reward"]) == (2.0, 4.0)
    assert renamed(record | {"reward": 1.0})["reward"] == 1.0
    assert renamed(record | {"critic/score/mean": None})["reward"] == 3.0


def test_lines_without_a_number_as_their_step_are_steps_in_their_order(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"step": step, "reward": i}) + "\n"
                           for i, step in enumerate((None, "b", math.nan, "b"))), "utf-8")
    assert [one["reward"] for one in read(log)[1]] == [0, 1, 2, 3]


@pytest.mark.parametrize("name, content", [
    ("empty.jsonl", b""), ("cut.json", b'{"log_history": [{"rew'), ("other.json", b"[1, 2]"),
    ("number.json", b"5"), ("text.jsonl", b'{"step": 1, "reward": "high"}'), ("x.csv", b'a,"\n'),
    ("noise.jsonl", bytes(range(256))), ("noise.csv", bytes(range(256))), ("none.jsonl", None)])
def test_a_file_that_is_no_log_gets_one_line(name, content, tmp_path, capsys):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as end:
        read(tmp_path / name)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and name in error


@pytest.mark.parametrize("words, code", [
    ([], 0), (["--fail-on", "any"], 1), (["--fail-on", "rate,no-gradient"], 1),
    (["--fail-on", "rate"], 0), (["--fail-on", "rates"], 2)])
def test_a_job_that_watches_ends_with_1_for_what_it_asks_for_and_with_2_for_an_unknown_name(
        words, code, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check", str(log_of("verl", tmp_path)), *words])
    with pytest.raises(SystemExit) as end:
        main()
        raise SystemExit(0)
    assert end.value.code == code
    assert ("docs/why.md#no-gradient" in capsys.readouterr().out) == (code != 2)


def test_a_correct_run_gets_one_line_with_what_was_read_and_what_lacks():
    assert summary([{"reward": one["reward"], "grad_norm": 1.0} for one in run_of()]) == (
        "steps: 20; nothing found; looked at reward, grad_norm; the log lacks "
        "frac_reward_zero_std, entropy, kl, completions/clipped_ratio, sampling/surprise")


def test_the_probe_of_the_page_runs(capsys):
    part = PAGES["docs/why.md"].partition("## Is my reward hackable?")[2]
    define, use = re.findall(r"```python\n(.*?)```", part, re.S)
    exec(define + use, {})
    assert {line[:6] for line in capsys.readouterr().out.splitlines()} == {"  0.00"}
