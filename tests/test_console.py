"""What a run prints: 80 columns, colour for a terminal only, nothing that a pipe would choke on;
and what it prints where there is only common.py."""
import contextlib
import io
import itertools
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import every_script
from small_runs import EVERYTHING, SMALL, arguments, lines, read_summary, resume

import common
import tools.report
from tools import ask, console

ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-9;]*[mK]")
SAMPLE = re.compile(r"^ +(-?\d\.\d\d) ([+-]\d\.\d\d) (\(.*)", re.MULTILINE)     # of arithmetic
STEP = re.compile(r" +(\d+) +-?\d")

pytestmark = pytest.mark.usefixtures("at_work_folder")


class Screen:
    """What was printed since the test began."""

    def __init__(self, capsys):
        self.capsys = capsys
        self.printed = ""

    def text(self):
        self.printed += self.capsys.readouterr().out
        return self.printed

    def lines(self):
        return self.text().splitlines()

    def frames(self):
        """All that was ever a line on the screen, without colour."""
        return [ESCAPE_SEQUENCE.sub("", frame) for frame in re.split("[\r\n]", self.text())]


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
def rich():
    return console.RichConsole()


@pytest.fixture
def each_takes(monkeypatch):
    """each_takes(seconds): each step of a progress line, by the clock that it looks at."""
    def slow_down(seconds):
        ticks = itertools.count(0, seconds)
        monkeypatch.setattr(console.time, "perf_counter", lambda: next(ticks))
    return slow_down


# ---- progress --------------------------------------------------------------------------------

@pytest.mark.parametrize("stdout", ["terminal", "pipe"])
@pytest.mark.parametrize("steps", [range(7), [], [3], ["a", "b"]])
@pytest.mark.parametrize("make", [console.RichConsole, common.Console])
def test_progress_passes_on_each_item(request, stdout, make, steps):
    request.getfixturevalue(stdout)
    assert list(make().progress("label", steps)) == list(steps)


def test_a_pipe_gets_plain_lines_with_the_time_left(pipe, rich, each_takes):
    each_takes(seconds=2)
    list(rich.progress("warm start", range(10)))
    assert pipe.lines() == [
        "warm start  20%, 16 s left", "warm start  40%, 12 s left", "warm start  60%, 8 s left",
        "warm start  80%, 4 s left", "warm start 100%, 0 s left"]


def test_a_pipe_gets_nothing_of_what_is_soon_over(pipe, rich, each_takes):
    each_takes(seconds=0.5)
    list(rich.progress("evaluation", range(10)))
    assert pipe.text() == ""


def test_on_a_terminal_a_line_is_overwritten_and_wiped_at_the_end(terminal, rich, each_takes):
    each_takes(seconds=2)
    list(rich.progress("warm start", range(10)))
    said = terminal.text()
    assert "\n" not in said
    assert said.endswith("\r\x1b[K")
    found = [re.search("(\\d+)%, +(\\d+) s left", frame).groups()
             for frame in terminal.frames()[1:11]]
    assert found == [(str(10 * done), str(20 - 2 * done)) for done in range(1, 11)]
    assert max(len(frame) for frame in terminal.frames()) <= 80


def test_on_a_terminal_quick_steps_do_not_flicker(terminal, rich, each_takes):
    each_takes(seconds=0.01)
    list(rich.progress("warm start", range(1000)))
    assert terminal.text().count("\r") < 60


def test_a_dumb_terminal_is_a_pipe(terminal, rich, monkeypatch, each_takes):
    monkeypatch.setenv("TERM", "dumb")
    each_takes(seconds=2)
    list(rich.progress("warm start", range(10)))
    console.say("best", "green")
    assert terminal.text().endswith("warm start 100%, 0 s left\nbest\n")
    assert terminal.text().isascii()
    assert not re.search("[\r\x1b]", terminal.text())


# ---- colour ----------------------------------------------------------------------------------

def test_colour_is_for_a_terminal(terminal):
    console.say("best", "green")
    console.say("plain")
    assert terminal.text() == "\x1b[32mbest\x1b[0m\nplain\n"


def test_no_color_is_respected_and_means_nothing_when_empty(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    console.say("best", "green")
    assert terminal.text() == "best\n"
    monkeypatch.setenv("NO_COLOR", "")                      # so says no-color.org
    console.say("best", "green")
    assert terminal.text() == "best\n\x1b[32mbest\x1b[0m\n"


def test_a_pipe_has_no_colour(pipe):
    console.say("best", "green")
    assert pipe.text() == "best\n"


def test_a_coloured_line_is_cut_before_it_is_coloured(terminal):
    console.say("x" * 200, "red")
    assert terminal.text() == f"\x1b[31m{'x' * 80}\x1b[0m\n"


def test_the_best_completion_is_green_and_the_worst_red(terminal, rich):
    one = common.Problem("1+1=", "2")
    other = common.Problem("2+2=", "4")
    batch = SimpleNamespace(
        rewards=torch.tensor([[0.5, 0.5], [0.0, 1.0]]),     # the second group differs most
        problems=[one, one, other, other], texts=["a", "b", "worst", "best"])
    rich.samples(batch, advantages=torch.tensor([0.0, 0.0, -1.0, 1.0]))
    assert terminal.lines() == [
        "\x1b[32m       1.00 +1.00 2+2=best\x1b[0m", "\x1b[31m       0.00 -1.00 2+2=worst\x1b[0m"]


# ---- before and after the steps --------------------------------------------------------------

@pytest.fixture
def made_run(script, tmp_path, load_task):
    """made_run(**base): what a console looks at in a run of seven steps."""
    def make(**base):
        cfg = script.Config(device="cpu", max_steps=7)
        state = {"base": {"problems": 512} | base, "steps": 7, "seconds_total": 8.9,
                 "recent": [0.9, 1.0, 1.0, 1.0, 1.0]}
        columns = {"reward": "reward", "clip": "clip_ratio/region_mean",
                   "capped": "clip_ratio/capped_mean"}
        run = SimpleNamespace(folder=tmp_path, cfg=cfg, script=tmp_path / "grpo.py", state=state,
                              columns=columns, task=load_task(cfg))
        run.question = lambda: common.Run.question(run)
        return run
    return make


def test_the_base_is_shown_by_the_scores_that_fit_in_80_columns_and_how_many_problems_it_solved(
        pipe, rich, made_run):
    found = {"greedy": 0.125, "think_share": 0.5, "pass@1": 0.25, "pass@k": [0.25] * 64,
             "greedy/lookup": 0.2, "problems": 112, "maj@1": None}
    found |= {f"{name}@{k}": 0.5 for k in (8, 64) for name in ("pass", "maj")}
    rich.start(made_run(**found))
    assert pipe.lines() == [
        "32 prompts x 8 completions = 256 per step, log-probs by torch",
        "base, 112 held-out problems: greedy 0.125, pass@1 0.250, pass@8 0.500"]


def test_as_many_scores_are_listed_as_fit_in_80_columns():
    scores = {"a" * 20: 0.1, "b" * 20: 0.2, "c" * 10: 0.25}
    line = f"head: {'a' * 20} 0.100, {'b' * 20} 0.200, {'c' * 10} 0.250"
    assert console.listed("head:", scores) == line
    longer = "x" * (80 - len(line))
    assert console.listed(longer + "head:", scores) == longer + line
    assert console.listed(longer + "xhead:", scores).endswith(" 0.200")
    assert console.listed("head:", {}) == "head:"


# What a run logs of a task that luck decides: no accuracy, pass@k or greedy, but returns.
RETURNS = {"problems": 112, "greedy_return": -0.5, "best_return": 1.5, "think_share": 0.0,
           "return": 0.25}
STEP_OF_RETURNS = {"reward": 0.25, "frac_reward_zero_std": 0.0, "entropy": 0.001, "step_time": 1.0,
                   "completions/clipped_ratio": 0.1, "eval/greedy_return": 0.5,
                   "eval/best_return": 1.5}


def test_where_nothing_is_right_or_wrong_returns_are_shown_and_nothing_is_warned_of(
        pipe, rich, made_run):
    run = made_run(**RETURNS)
    run.state |= {"recent": [], "steps": 3}
    rich.start(run)
    rich.step(run, STEP_OF_RETURNS)
    rich.finish(run, {"base": run.state["base"], "trained": run.state["base"]})
    said = pipe.lines()
    assert said[1] == "base, 112 held-out problems: greedy_return -0.500, return 0.250"
    assert said[4] == "      held out: greedy_return 0.500, best_return 1.500"
    assert "accurate" not in pipe.text() and "warning" not in pipe.text()
    assert ["greedy_return", "-0.500", "-0.500"] in [line.split() for line in said]


def test_the_heading_comes_with_the_first_step_and_has_the_columns_whose_metric_it_has(
        pipe, rich, made_run):
    run = made_run()
    rich.start(run)
    metrics = HEALTHY | {"step_time": 1.0, "clip_ratio/capped_mean": 0.25}
    run.state["steps"] = 6                              # that of a resumed run, too
    rich.step(run, metrics)
    run.state["steps"] = 7
    rich.step(run, metrics | {"clip_ratio/region_mean": 0.125})
    assert pipe.lines()[2:] == [
        " step   reward   capped  secs  left",
        "    6    0.500    0.250  1.00    1s",
        "    7    0.500    0.250  1.00    0s"]


def test_a_base_that_is_never_right_is_warned_of_with_a_remedy(terminal, rich, made_run):
    rich.start(made_run(**{"greedy": 0.0, "pass@1": 0.0, "pass@8": 0.0}))
    said = terminal.frames()[-2]
    assert said.startswith("warning: no sample of the base is right")
    assert "--base_steps" in said
    assert len(said) <= 80
    assert "\x1b[33m" in terminal.text()


def test_the_table_at_the_end_has_numbers_side_by_side_and_a_dash_for_none(pipe, rich, made_run):
    run = made_run()
    base = {"greedy": 0.5, "pass@k": [0.5], "examples": [], "pairs/rewards/accuracies": None,
            "problems": 512, "pairs/logps/chosen": -12345.678, "maj@8": 0.25}
    trained = base | {"greedy": 1.0, "problems": 9}
    del trained["maj@8"]                            # no sample gave an answer
    rich.finish(run, {"base": base, "trained": trained})
    table = [line.split() for line in pipe.lines()]
    assert table[:6] == [
        ["base", "trained"], ["greedy", "0.500", "1.000"], ["pairs/rewards/accuracies", "-", "-"],
        ["problems", "512", "9"], ["pairs/logps/chosen", "-12345.678", "-12345.678"],
        ["maj@8", "0.250", "-"]]
    *others, last, command = pipe.lines()
    assert max(len(line) for line in others) <= 80
    assert last == f"7 steps, 9 s, folder {run.folder}. Ask the policy:"
    assert command.startswith(f"  python -m tools.ask {run.folder} '((((")


def test_a_run_that_stops_early_says_why(pipe, rich, made_run):
    run = made_run()
    why = "The last 5 batches are 0.980 accurate: --stop_at 0.98"
    rich.finish(run, {"base": {}, "trained": {}})
    assert why not in pipe.text()
    run.state["steps"] = 6
    rich.finish(run, {"base": {}, "trained": {}})
    assert pipe.lines()[-3] == why


def test_what_cannot_be_drawn_is_said_in_a_line_each_and_the_run_goes_on(
        pipe, rich, made_run, monkeypatch):
    def disk_full(folder):
        raise OSError("disk full\x1b[2J\n")

    def no_matplotlib(folder):
        raise ImportError("pip install matplotlib")
    report = SimpleNamespace(write_report=disk_full, draw_curve=no_matplotlib)
    monkeypatch.setitem(sys.modules, "tools.report", report)
    rich.finish(made_run(), {"base": {}, "trained": {}})
    assert pipe.lines()[1:3] == [
        "no report.html: disk full\\x1b[2J\\n", "no curve.png: pip install matplotlib"]


def test_without_matplotlib_the_report_is_still_written(pipe, new_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "tools.report", tools.report)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = new_run(max_steps=1)
    assert "no curve.png: pictures need matplotlib: pip install matplotlib" in pipe.lines()
    assert (folder / "report.html").exists()
    assert not (folder / "curve.png").exists()


# ---- a run -----------------------------------------------------------------------------------

@every_script
def test_the_console_shows_base_then_steps_then_what_changed_and_how_to_ask(
        script, new_run, pipe):
    folder = new_run(max_steps=4)
    text = pipe.text()
    summary = read_summary(folder)
    assert "4 prompts x 8 completions = 32 per step" in text
    numbers = [STEP.match(line)[1] for line in pipe.lines() if STEP.match(line)]
    assert numbers == ["1", "2", "3", "4"]
    [headings] = [line for line in pipe.lines() if line.startswith(" step ")]
    logged = lines(folder / "metrics.jsonl")[0]
    for heading, name in script.COLUMNS.items():
        assert (f" {heading} " in headings) == (name in logged), name
    table = {line.split()[0]: line.split()[1:] for line in pipe.lines() if len(line.split()) == 3}
    lengths = [summary[when]["mean_length"] for when in ("base", "trained")]
    assert table["mean_length"] == [f"{length:.3f}" for length in lengths]
    problems = summary["base"]["problems"]
    order = [f"base, {problems} held-out problems: greedy {summary['base']['greedy']:.3f}",
             "\n step ", "held out: greedy ", "mean_length  ", f"folder {folder}.",
             "python -m tools.ask"]
    places = [text.index(words) for words in order]
    assert places == sorted(places)


@every_script
def test_best_and_worst_sample_are_shown_at_the_first_step_and_at_evaluations(new_run, pipe):
    folder = new_run(max_steps=4, dynamic_sampling=8)       # with signal in every step
    samples = SAMPLE.findall(pipe.text())
    assert len(samples) == 2 * 3
    for i in range(0, 6, 2):
        best_reward, _, best = samples[i]
        worst_reward, _, worst = samples[i + 1]
        assert float(best_reward) > float(worst_reward)
        assert best[:6] == worst[:6]                        # they have one prompt
    logged = set()
    for group in lines(folder / "samples.jsonl"):
        for made in group["completions"]:
            text = group["prompt"] + console.escape(made["text"])
            logged.add(f"      {made['reward']:5.2f} {made['advantage']:+5.2f} {text}"[:79])
    assert logged >= {line for line in pipe.lines() if SAMPLE.match(line)}


@every_script
def test_the_command_at_the_end_of_a_run_asks_the_policy(script, tmp_path, pipe):
    folder = tmp_path / "it's a run; $HOME"
    script.main(arguments(SMALL | {"output_dir": folder, "max_steps": 1}))
    command = shlex.split(pipe.lines()[-1])
    assert command[:4] == ["python", "-m", "tools.ask", str(folder)]
    count = len(pipe.lines())
    ask.main(command[3:])
    assert len(pipe.lines()) == count + 1


@every_script
def test_no_line_of_the_console_is_wider_than_80_columns(script, tmp_path, monkeypatch, pipe):
    monkeypatch.chdir(tmp_path)                             # for a folder with a default name
    monkeypatch.setattr(script, "verify", lambda problem, text: float(len(text) % 2))
    flags = {"base_steps": 10, "num_generations": 2, "max_steps": 3}
    for everything in EVERYTHING[script.__name__]:
        script.main(arguments(SMALL | everything | flags))
    assert "warning: " in pipe.text()
    assert f"run folder runs/{script.__name__}-arithmetic-s0" in pipe.lines()[0]
    command = "  python -m tools.ask"                       # is copied and pasted as a whole
    assert not [line for line in pipe.lines() if len(line) > 80 and not line.startswith(command)]


@every_script
def test_on_a_terminal_warm_start_and_evaluations_have_a_progress_line(
        script, terminal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script.main(arguments(SMALL | {
        "base_steps": 20, "max_steps": 2, "eval_steps": 1, "num_eval_problems": 80}))
    frames = terminal.frames()
    for label in ("warm start", "evaluation"):
        assert any(re.match(f"{label} [# ]* 100%, +0 s left", frame) for frame in frames), label
    assert max(len(frame) for frame in frames if "tools.ask" not in frame) <= 80
    last_frames = [line.split("\r")[-1] for line in terminal.text().split("\n")]
    left = [ESCAPE_SEQUENCE.sub("", frame) for frame in last_frames]
    assert not [line for line in left if "%, " in line]     # they are all gone in the end
    assert [line.split()[0] for line in left if STEP.match(line)] == ["1", "2"]


def test_lines_of_held_out_scores_fit_where_tasks_are_mixed(new_run, pipe):
    """Each task has a score of its own there, which metrics.jsonl and the table have room for."""
    folder = new_run(task="arithmetic,lookup", base_steps=0, eval_steps=1, max_steps=1)
    (scores,) = [line for line in pipe.lines() if line.startswith("      held out: greedy 0.")]
    assert "think_share" in scores
    assert "greedy/" not in scores
    too_long = [line for line in pipe.lines() if len(line) > 80]
    assert all(str(folder) in line for line in too_long)
    assert "eval/greedy/lookup" in (folder / "metrics.jsonl").read_text()


def test_a_run_that_luck_decides_shows_returns_from_beginning_to_end(new_run, pipe):
    folder = new_run(task="gridworld", slip=0.3, operands="5", base_steps=0, eval_steps=1,
                     max_steps=2)
    logged = lines(folder / "metrics.jsonl")
    assert not any("accuracy" in line or "eval/greedy" in line for line in logged)
    text = pipe.text()
    places = [text.index(words) for words in (
        " held-out problems: greedy_return ", "\n step ", "held out: greedy_return ",
        "           greedy_return ", "2 steps, ")]
    assert places == sorted(places)
    assert "pass@" not in text and "accurate" not in text and "is right" not in text


def test_hostile_completions_reach_the_console_escaped_and_cut_and_the_log_whole(
        script, new_run, monkeypatch, pipe):
    evil = ["\x1b[2J\x1b]0;owned\x07" + "x" * 100_000, "", "<script>alert(1)</script>", "\\x1b[2J",
            "\u202e\ufeff", "a\nb\r\tc\x00", "\ud800\U0001f4a9", "\x9b31m\n\r\x00" * 20]
    monkeypatch.setattr(script, "completion_texts", lambda completions: list(
        itertools.islice(itertools.cycle(evil), len(completions.tokens))))
    folder = new_run(max_steps=2)
    for line in pipe.lines():
        assert line.isprintable() and line.isascii()
        assert len(line) <= 80 or str(folder) in line
    for group in lines(folder / "samples.jsonl"):
        assert [made["text"] for made in group["completions"]] == evil


def test_main_can_be_called_where_the_output_is_no_terminal_and_no_file(new_run):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        new_run(max_steps=1)
    assert "trained" in out.getvalue()


# ---- warnings --------------------------------------------------------------------------------

HEALTHY = {"reward": 0.5, "accuracy": 0.5, "frac_reward_zero_std": 0.2, "entropy": 0.5,
           "completions/clipped_ratio": 0.1, "sampling/sampling_logp_difference/max": 1e-6,
           "rewards/chosen": 0.1}
SICK = {                                    # a word of the warning: the metrics that it is about
    "signal": {"frac_reward_zero_std": 1.0, "accuracy": 0.1},
    "truncated": {"completions/clipped_ratio": 0.9},
    "collapsed": {"entropy": 0.001},
    "chosen": {"rewards/chosen": -0.1},
    "ratio": {"sampling/sampling_logp_difference/max": 0.5},
    "differ": {"sampling/sampling_logp_difference/mean": 0.5}}


@every_script
def test_what_makes_learning_impossible_is_warned_of_once(script, new_run, monkeypatch, pipe):
    sick = HEALTHY
    for metrics in SICK.values():
        sick = sick | metrics
    log = common.Run.log

    def log_sick(run, batch, advantages, metrics, *rest, **more):
        log(run, batch, advantages, metrics | sick, *rest, **more)
    monkeypatch.setattr(common.Run, "log", log_sick)
    folder = new_run(max_steps=2)
    resume(folder, max_steps=3)             # which is a run of its own, in which they come again
    said = re.findall("^warning: (.*)", pipe.text(), re.MULTILINE)
    assert len(said) == 2 * len(SICK)
    assert said[:len(SICK)] == said[len(SICK):]
    for word, message in zip(SICK, said):
        assert word in message


@pytest.mark.parametrize("word", SICK)
def test_a_warning_is_about_one_thing_and_names_a_flag_to_turn(word):
    [message] = console.warnings(HEALTHY | SICK[word])
    assert word in message
    assert " --" in message
    assert len(f"warning: {message}") <= 80


@pytest.mark.parametrize("metrics", [
    HEALTHY,
    HEALTHY | {"frac_reward_zero_std": 1.0, "accuracy": 1.0, "entropy": 0.001},
    HEALTHY | {"sampling/sampling_logp_difference/max": 1.0,
               "sampling/sampling_logp_difference/mean": 1.0,
               "sampling/importance_sampling_ratio/mean": 1.0},
    HEALTHY | {"sampling/sampling_logp_difference/mean": 0.005},
    HEALTHY | {"frac_reward_zero_std": 1.0, "accuracy": 0.0, "teacher_kl": 0.1}],
    ids=["healthy", "solved", "sampled by older weights", "in bfloat16", "rewarded by a teacher"])
def test_a_healthy_run_is_not_warned_of(metrics):
    assert list(console.warnings(metrics)) == []


def test_no_signal_is_warned_of_where_nothing_is_right_or_wrong_too():
    [message] = console.warnings(STEP_OF_RETURNS | {"frac_reward_zero_std": 1.0})
    assert "signal" in message


def test_a_base_that_no_reward_can_teach_is_warned_of_before_it_is_trained(new_run, pipe):
    new_run(max_steps=0)
    assert "warning" not in pipe.text()
    new_run(max_steps=0, base_steps=0)
    [said] = [line for line in pipe.lines() if line.startswith("warning: ")]
    assert "no sample of the base is right" in said and "--base_steps" in said


# ---- the plain console -----------------------------------------------------------------------

@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setattr(common, "make_console", common.Console)


@every_script
def test_the_plain_console_prints_a_line_a_step_and_what_has_changed(
        script, plain, whole, new_run, pipe):
    folder = new_run(max_steps=2)
    summary = read_summary(folder)
    metrics = lines(folder / "metrics.jsonl")
    first, _, base, headings, *rest = pipe.lines()          # the second is the file of the base
    assert str(folder) in first
    assert base.startswith("base: ") and str(summary["base"]["greedy"]) in base
    columns = [heading for heading, name in script.COLUMNS.items() if name in metrics[0]]
    assert headings == " ".join(["step", *columns])
    for number, line in enumerate(rest[:2]):
        words = line.split()
        assert len(words) == 1 + len(columns)
        assert words[:2] == [str(number + 1), str(round(metrics[number]["reward"], 3))]
    changed = [f"{name}: {summary['base'][name]} -> {summary['trained'][name]}"
               for name in summary["base"]]
    assert rest[2:] == [*changed, f"2 steps, folder {folder}"]


def test_the_plain_console_ends_a_run_of_which_only_the_base_gave_answers(pipe, made_run):
    run = made_run()
    base = {"greedy": 0.5, "maj@8": 0.25, "examples": []}
    common.Console().finish(run, {"base": base, "trained": {"greedy": 0.0, "examples": []}})
    assert pipe.lines() == ["greedy: 0.5 -> 0.0", "maj@8: 0.25 -> None",
                            f"7 steps, folder {run.folder}"]


def test_the_console_is_that_of_tools_where_it_is_there(monkeypatch):
    assert type(common.make_console()) is console.RichConsole
    monkeypatch.setattr(common, "HERE", Path("nowhere"))
    assert type(common.make_console()) is common.Console
