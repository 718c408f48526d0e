"""The tools that measure: what they say below a table and on which page they write it, how they
count calls of a tool, and that a closed pipe ends a tool without a traceback. Nothing is trained
here."""
import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

import common
import grpo
from kernels import bench
from tools import compare, console, r1, rlhf, runs, seeds, tasks

FILES = [*sorted(ROOT.glob("tools/*.py")), ROOT / "kernels/bench.py"]
COMMANDS = [path for path in FILES if "__main__" in path.read_text()]


def summary(problems=112, steps=60, **trained):
    """What a run leaves in summary.json, as far as tables need it."""
    scores = {"problems": problems, "greedy": 0.5, "pass@1": 0.25, "calls": 0.125}
    return {"base": dict(scores), "trained": scores | trained, "steps": steps,
            "seconds_total": 9.0, "seconds_warm_start": 4.0}


# ---- below a table ---------------------------------------------------------------------------

def test_below_a_table_stand_the_problems_the_seeds_the_steps_and_the_machine():
    said = runs.note([summary(steps=39), summary(steps=58)], [0, 1], "each with its own base")
    assert said == ("Held-out problems, all different: 112; seeds 0, 1, each with its own base; "
                    f"39 - 58 steps; {runs.MACHINE}.\n")


def test_numbers_of_problems_that_differ_are_all_said():
    differing = [summary(problems=112), summary(problems=130)]
    assert "all different: 112 - 130; seed 0, " in runs.note(differing, [0], "from one base")
    said = runs.note(differing, [0], "from one base", "112 of gridworld, 130 of lookup")
    assert "all different: 112 of gridworld, 130 of lookup; seed 0, " in said


def test_a_run_that_only_evaluates_has_no_part_in_the_steps():
    said = runs.note([summary(steps=0), summary(steps=20)], [0], "from one base")
    assert "; 20 steps; " in said


def test_the_numbers_of_r1_are_those_of_the_problems_that_its_stages_are_evaluated_on():
    said = dict(reversed(part.split(" of ")) for part in r1.problems_by_task().split(", "))
    cfg = common.parse_flags(grpo.Config, ["--task", ",".join(r1.TASKS)])
    problems = common.held_out_problems(common.load_task(cfg, grpo.verify), cfg.num_eval_problems)
    assert list(said) == list(r1.TASKS)
    assert sum(int(number) for number in said.values()) == len(problems)
    assert int(said["lookup"]) == sum(problem.prompt.startswith("boss") for problem in problems)


def test_the_bench_says_how_often_it_measured_and_that_nothing_is_evaluated():
    machine = {"device": "cpu", "cpu": "x", "threads": 1, "versions": {}, "copy_GB_per_s": 1.0,
               "matmul_TFLOP_per_s": 1.0, "matmul_dtype": "float32"}
    record = {"machine": machine, "repeats": 3, "remarks": [], "logits": [], "linear": [],
              "rollout": [], "step": [], "shape": [1, 2, 3, 4]}
    said = bench.tables(record).replace("\n", " ")
    assert "Rollouts and steps: 3 of each" in said and "seed 0" in said
    assert "No policy is evaluated" in said


def test_every_row_has_as_many_cells_as_its_head():
    lines = {name: [0.1, 0.3, 0.2] for name in rlhf.LINES}
    assert len(rlhf.row("no penalty", 0, lines, summary())) == len(rlhf.HEAD)
    scores = {f"pass@1/{task}": 0.5 for task in r1.TASKS} | {"mean_length": 9.0}
    assert len(r1.row("base", summary(**scores))) == len(r1.HEAD)
    result = summary(think_share=0.5) | {"curve": [{"samples": 0, "seconds": 0.0}]}
    assert len(compare.row("grpo.py", [result])) == len(compare.HEAD)
    for line in tasks.lookup_table({"accuracy": [summary()]}).splitlines():
        assert line.count("|") == 8


# ---- pages -----------------------------------------------------------------------------------

BLOCK = "<!-- made by make seeds: table -->\nold\n<!-- end of table -->\n"


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """pages(**texts): write these pages, README.md and docs/NAME.md. -> the folder"""
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setattr(runs, "DOCS", tmp_path / "docs")

    def write(readme, **others):
        (tmp_path / "docs").mkdir()
        (tmp_path / "README.md").write_text(readme)
        for name, text in others.items():
            (tmp_path / f"docs/{name}.md").write_text(text)
        return tmp_path
    return write


def test_a_text_goes_between_its_marks_on_the_first_page(pages):
    folder = pages(f"before\n{BLOCK}after\n", lab="nothing\n")
    runs.put("table", "new\n", "seeds")
    assert (folder / "README.md").read_text() == f"before\n{BLOCK}after\n".replace("old", "new")
    assert (folder / "docs/lab.md").read_text() == "nothing\n"


def test_a_text_goes_between_its_marks_on_the_page_in_docs_that_has_them(pages):
    other = BLOCK.replace("table", "example")
    folder = pages(f"{other}", lab=f"before\n{BLOCK}after\n", speed="nothing\n")
    runs.put("table", "new\n", "seeds")
    assert (folder / "README.md").read_text() == other
    assert (folder / "docs/lab.md").read_text() == f"before\n{BLOCK}after\n".replace("old", "new")


@pytest.mark.parametrize("texts, words", [
    ({"readme": "", "lab": BLOCK.replace("seeds", "compare")}, "on none"),
    ({"readme": BLOCK, "lab": BLOCK}, "on README.md, lab.md"),
    ({"readme": BLOCK.replace("end of table", "end of it")}, "lacks the mark"),
    ({"readme": BLOCK + BLOCK}, "twice"),
    ({"readme": BLOCK.replace("<!-- end of table -->\n", "") + BLOCK}, "lacks the mark")])
def test_marks_that_are_not_on_exactly_one_page_are_an_error(pages, texts, words):
    folder = pages(**texts)
    with pytest.raises(ValueError, match=words):
        runs.put("table", "new\n", "seeds")
    assert (folder / "README.md").read_text() == texts["readme"]


# ---- calls of a tool -------------------------------------------------------------------------

def test_what_calls_the_tool_is_counted_and_not_what_thinks(tmp_path):
    base = ["<answer>ka</answer>", "<think>ka</think>", "<search>ka", "</search>"]
    trained = ["<think><search>ka</search><information>mi</information></think>",
               "<search>ka</search>", "<search></search>", "<search>mi</search><search>to</search>"]
    with open(tmp_path / "evaluation.jsonl", "w") as log:
        for one, other in zip(base, trained):
            log.write(json.dumps({"base": {"text": one}, "trained": {"text": other}}) + "\n")
    found = tasks.count_calls(tmp_path, {"base": {}, "trained": {"greedy": 1.0}})
    assert found == {"base": {"calls": 0.0}, "trained": {"greedy": 1.0, "calls": 0.75}}


def test_below_the_table_of_lookup_stands_what_calls_are_a_share_of():
    said = tasks.section("lookup", {"accuracy": [summary(steps=25)] * 3})
    assert "| calls the tool |" in said and "| 0.12, 0.12, 0.12 | 25, 25, 25 |" in said
    assert "share of the first 64 greedy answers" in said
    assert "seeds 0, 1, 2, each with its own base; 25 steps; " in said


def test_a_policy_that_was_only_evaluated_has_no_base_in_the_table():
    evaluated = [summary(steps=0)] * 2
    assert tasks.scores(evaluated, "base", "pass@1") == "-"
    assert tasks.scores(evaluated, "trained", "pass@1") == "0.250, 0.250"
    assert tasks.scores([summary()] * 2, "base", "pass@1") == "0.250, 0.250"


# ---- the example of README.md ----------------------------------------------------------------

def test_the_example_is_what_the_console_printed_of_base_first_and_last_step_and_end(capsys):
    print("grpo.py: arithmetic on cpu, run folder runs/grpo-arithmetic-s0")
    print(console.listed("base, 512 held-out problems:", {"greedy": 0.088, "pass@1": 0.347}))
    print(" step   reward  secs  left")
    print("    1    0.375  0.22   13s")
    print("       1.00 +1.21 (1+1)=best\n       0.00 -0.72 (1+1)=worst")
    print("    2    0.500  0.22   12s\n      held out: greedy 0.990\n    3    0.984  1.15   24s")
    print(f"{'base':>32} trained\n{'greedy':>24}   0.088   0.998")
    print("3 steps, 77 s, folder runs/x. Ask the policy:\n  python -m tools.ask runs/x '1+1='")
    shown = seeds.example(capsys.readouterr().out).splitlines()
    assert shown == [
        "```", "base, 512 held-out problems: greedy 0.088, pass@1 0.347",
        " step   reward  secs  left", "    1    0.375  0.22   13s",
        "       1.00 +1.21 (1+1)=best", "       0.00 -0.72 (1+1)=worst", "  ...",
        "    3    0.984  1.15   24s", f"{'base':>32} trained", f"{'greedy':>24}   0.088   0.998",
        "3 steps, 77 s, folder runs/x. Ask the policy:", "  python -m tools.ask runs/x '1+1='",
        "```"]


# ---- a closed pipe ---------------------------------------------------------------------------

@pytest.mark.parametrize("command", [
    "-m tools.report --help", "-m tools.ask --help", "tools/sync.py --diff grpo ppo"])
def test_a_pipe_that_nobody_reads_ends_a_tool_without_a_word(command):
    read_end, write_end = os.pipe()
    os.close(read_end)
    environment = os.environ | {"PYTHONUNBUFFERED": ""}     # what is printed waits in a buffer
    done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, stdout=write_end,
                          stderr=subprocess.PIPE, text=True, env=environment)
    os.close(write_end)
    assert done.returncode != 0 and done.stderr == ""


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_every_tool_starts_so_that_a_closed_pipe_ends_it(path):
    start = path.read_text().partition('if __name__ == "__main__":\n')[2]
    assert re.match(r"    common\.start\(main\)\n\Z|    if hasattr\(signal, .SIGPIPE.\):", start)
