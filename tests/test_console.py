"""What a run shows: 80 columns, colour for a terminal only, and nothing that a pipe would choke on."""
import itertools
import re
import shlex
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import every_script

import common
import tools.report
from tools import console

SMALL = shlex.split("""
    --device cpu --operands 2 --hidden_size 16 --num_attention_heads 2 --num_hidden_layers 1
    --intermediate_size 16 --base_steps 20 --num_prompts 2 --num_generations 2 --max_completion_length 8
    --num_eval_problems 80 --num_eval_samples 2 --eval_steps 1 --max_steps 2 --output_dir run""")
ESCAPE = re.compile(r"\x1b\[[0-9;]*[mK]")


class Screen:
    """What was printed since the test began."""

    def __init__(self, capsys):
        self.capsys, self.text = capsys, ""

    def getvalue(self):
        self.text += self.capsys.readouterr().out
        return self.text

    def frames(self):
        """All that was ever a line on the screen, without colour."""
        return [ESCAPE.sub("", frame) for frame in re.split("[\r\n]", self.getvalue())]


@pytest.fixture
def pipe(capsys):
    return Screen(capsys)


@pytest.fixture
def terminal(capsys, monkeypatch):
    """A terminal with colour, wherever the tests themselves run."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    return Screen(capsys)


@pytest.fixture
def seconds(monkeypatch):
    """seconds(n): each step of a progress line takes so long, by the clock that it looks at."""
    def each(n):
        ticks = itertools.count(0, n)
        monkeypatch.setattr(console.time, "perf_counter", lambda: next(ticks))
    return each


# ---- progress --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stdout", ["terminal", "pipe"])
@pytest.mark.parametrize("steps", [range(7), [], [3], ["a", "b"]])
def test_progress_passes_on_each_item(request, stdout, steps):
    request.getfixturevalue(stdout)
    assert list(console.progress("label", steps)) == list(steps)


def test_a_pipe_gets_plain_lines_with_the_time_left(pipe, seconds):
    seconds(2)
    list(console.progress("warm start", range(10)))
    assert pipe.getvalue().splitlines() == [
        "warm start  20%, 16 s left", "warm start  40%, 12 s left", "warm start  60%, 8 s left",
        "warm start  80%, 4 s left", "warm start 100%, 0 s left"]


def test_a_pipe_gets_nothing_of_what_is_soon_over(pipe, seconds):
    seconds(0.5)
    list(console.progress("evaluation", range(10)))
    assert pipe.getvalue() == ""


def test_on_a_terminal_a_line_is_overwritten_and_wiped_at_the_end(terminal, seconds):
    seconds(2)
    list(console.progress("warm start", range(10)))
    said = terminal.getvalue()
    assert "\n" not in said and said.endswith("\r\x1b[K")
    assert [re.search("(\\d+)%, +(\\d+) s left", frame).groups() for frame in terminal.frames()[1:11]] == [
        (str(10 * done), str(20 - 2 * done)) for done in range(1, 11)]
    assert max(map(len, terminal.frames())) <= 80


def test_on_a_terminal_quick_steps_do_not_flicker(terminal, seconds):
    seconds(0.01)
    list(console.progress("warm start", range(1000)))
    assert terminal.getvalue().count("\r") < 60


def test_a_dumb_terminal_is_a_pipe(terminal, monkeypatch, seconds):
    monkeypatch.setenv("TERM", "dumb")
    seconds(2)
    list(console.progress("warm start", range(10)))
    console.say("best", "green")
    assert terminal.getvalue().endswith("warm start 100%, 0 s left\nbest\n")
    assert terminal.getvalue().isascii() and not re.search("[\r\x1b]", terminal.getvalue())


# ---- colour ----------------------------------------------------------------------------------------------


def test_colour_is_for_a_terminal(terminal):
    console.say("best", "green")
    console.say("plain")
    assert terminal.getvalue() == "\x1b[32mbest\x1b[0m\nplain\n"


def test_no_color_is_respected_and_means_nothing_when_empty(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    console.say("best", "green")
    assert terminal.getvalue() == "best\n"
    monkeypatch.setenv("NO_COLOR", "")                      # so says no-color.org
    console.say("best", "green")
    assert terminal.getvalue() == "best\n\x1b[32mbest\x1b[0m\n"


def test_a_pipe_has_no_colour(pipe):
    console.say("best", "green")
    assert pipe.getvalue() == "best\n"


def test_a_coloured_line_is_cut_before_it_is_coloured(terminal):
    console.say("x" * 200, "red")
    assert terminal.getvalue() == f"\x1b[31m{'x' * 80}\x1b[0m\n"


# ---- lines -----------------------------------------------------------------------------------------------


def a_run(folder, **base):
    cfg = SimpleNamespace(num_prompts=32, num_generations=8, kernel="auto", device="cpu", eval_steps=10,
                          task="arithmetic", options={}, max_steps=7, stop_at=0.98)
    return SimpleNamespace(folder=folder, cfg=cfg, script=folder / "grpo.py", columns={"reward": "reward"},
                           state={"base": base, "steps": 7, "seconds_total": 8.9,
                                  "recent": [0.9, 1.0, 1.0, 1.0, 1.0]})


def test_the_base_is_shown_by_its_first_scores_in_80_columns(pipe, tmp_path):
    found = {"greedy": 0.125, "think_share": 0.5, "pass@1": 0.25, "pass@k": [0.25] * 64, "greedy/lookup": 0.2}
    found |= {f"{name}@{k}": 0.5 for k in (8, 64) for name in ("pass", "maj")}
    console.start(a_run(tmp_path, **found))
    assert pipe.getvalue().splitlines() == [
        "32 prompts x 8 completions = 256 per step, log-probs by torch",
        "base: greedy 0.125, pass@1 0.250, pass@8 0.500, maj@8 0.500, pass@64 0.500",
        " step  reward  secs  left"]


def test_a_base_that_is_never_right_is_warned_of_with_a_remedy(terminal, tmp_path):
    console.start(a_run(tmp_path, **{"greedy": 0.0, "pass@1": 0.0, "pass@8": 0.0}))
    said = terminal.frames()[2]
    assert said.startswith("warning: no sample of the base is right") and "--base_steps" in said
    assert len(said) <= 80 and "\x1b[33m" in terminal.getvalue()


def test_the_table_at_the_end_has_numbers_side_by_side_and_a_dash_for_none(pipe, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tools.report", None)
    base = {"greedy": 0.5, "pass@k": [0.5], "examples": [], "pairs/rewards/accuracies": None, "problems": 512,
            "pairs/logps/chosen": -12345.678}
    console.finish(a_run(tmp_path), {"base": base, "trained": base | {"greedy": 1.0, "problems": 9}})
    table = [line.split() for line in pipe.getvalue().splitlines()]
    assert table[:5] == [["base", "trained"], ["greedy", "0.500", "1.000"],
                         ["pairs/rewards/accuracies", "-", "-"], ["problems", "512", "9"],
                         ["pairs/logps/chosen", "-12345.678", "-12345.678"]]
    *lines, last, command = pipe.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and last == f"7 steps, 9 s, folder {tmp_path}. Ask the policy:"
    assert command.startswith(f"  python grpo.py --resume_from_checkpoint {tmp_path} --prompt '((((")


def test_a_run_that_stops_early_says_why(pipe, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tools.report", None)
    run, why = a_run(tmp_path), "The last 5 batches are 0.980 accurate: --stop_at 0.98"
    console.finish(run, {"base": {}, "trained": {}})
    assert why not in pipe.getvalue()
    run.cfg.max_steps = 8
    console.finish(run, {"base": {}, "trained": {}})
    assert pipe.getvalue().splitlines()[-3] == why


def test_what_cannot_be_drawn_is_said_in_a_line_each_and_the_run_goes_on(pipe, tmp_path, monkeypatch):
    def fails(error):
        def draw(folder):
            raise error
        return draw
    monkeypatch.setattr(tools.report, "write_report", fails(OSError("disk full\x1b[2J\n")))
    monkeypatch.setattr(tools.report, "draw_curve", fails(ImportError("pip install matplotlib")))
    console.finish(a_run(tmp_path), {"base": {}, "trained": {}})
    assert pipe.getvalue().splitlines()[1:3] == [
        "no report.html: disk full\\x1b[2J\\n", "no curve.png: pip install matplotlib"]


def test_without_matplotlib_the_report_is_still_written(pipe, monkeypatch, tmp_path):
    import grpo
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    grpo.main(SMALL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert "no curve.png: pictures need matplotlib: pip install matplotlib" in pipe.getvalue().splitlines()
    assert (tmp_path / "run/report.html").exists() and not (tmp_path / "run/curve.png").exists()


def test_the_best_completion_is_green_and_the_worst_red(terminal):
    rewards = torch.tensor([[0.5, 0.5], [0.0, 1.0]])        # the second group differs most
    texts = ["a", "b", "worst", "best"]
    batch = SimpleNamespace(rewards=rewards, texts=texts,
                            problems=[SimpleNamespace(prompt="1+1="), SimpleNamespace(prompt="2+2=")])
    console.best_and_worst(batch, torch.tensor([0.0, 0.0, -1.0, 1.0]))
    assert terminal.getvalue().splitlines() == [
        "\x1b[32m       1.00 +1.00 2+2=best\x1b[0m", "\x1b[31m       0.00 -1.00 2+2=worst\x1b[0m"]


@every_script
def test_on_a_terminal_warm_start_and_evaluations_have_a_progress_line(
        script, terminal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tools.report, "draw_curve", lambda folder: None)
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    script.main(SMALL)
    signal.signal(signal.SIGINT, on_ctrl_c)
    frames = terminal.frames()
    for label in ("warm start", "evaluation"):
        assert any(re.match(f"{label} [# ]* 100%, +0 s left", frame) for frame in frames), label
    assert max(len(frame) for frame in frames if "--prompt" not in frame) <= 80
    left = [ESCAPE.sub("", line.split("\r")[-1]) for line in terminal.getvalue().split("\n")]
    assert not [line for line in left if "%, " in line]     # they are all gone in the end
    assert [line.split()[0] for line in left if re.match(" +[12] ", line)] == ["1", "2"]


def test_lines_of_held_out_scores_fit_where_tasks_are_mixed(pipe, tmp_path, monkeypatch):
    """Each task has a score of its own there, which metrics.jsonl and the table have room for."""
    import grpo
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tools.report, "draw_curve", lambda folder: None)
    grpo.main([*SMALL, "--task", "arithmetic,lookup", "--base_steps", "0"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    lines = pipe.getvalue().splitlines()
    assert [line for line in lines if line.startswith("      eval/greedy 0.")]
    assert not [line for line in lines if len(line) > 80 and "python grpo.py" not in line]
    assert "eval/greedy/lookup" in (tmp_path / "run/metrics.jsonl").read_text()
    assert common.tools is console
