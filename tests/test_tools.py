"""The tools that measure: their tables, what they say below them and on which page they write it;
nothing is trained here."""
import json

import pytest
from conftest import ROOT

import common
import grpo
from tools import compare, passk, r1, rlhf, runs, seeds, tasks, zero


def summary(problems=112, steps=60, **trained):
    """What a run leaves in summary.json, as far as tables need it."""
    scores = {"problems": problems, "greedy": 0.5, "pass@1": 0.25, "calls": 0.125,
              "think_share": 0.5, "mean_length": 9.0}
    return {"base": dict(scores), "trained": scores | trained, "steps": steps,
            "seconds_total": 9.0, "seconds_warm_start": 4.0}


# ---- tables ----------------------------------------------------------------------------------

def test_the_numbers_of_r1_are_those_of_the_problems_that_its_stages_are_evaluated_on():
    said = dict(reversed(part.split(" of ")) for part in r1.problems_by_task().split(", "))
    cfg = common.parse_flags(grpo.Config, ["--task", ",".join(r1.TASKS)])
    problems = common.held_out_problems(common.load_task(cfg, grpo.verify), cfg.num_eval_problems)
    assert list(said) == list(r1.TASKS)
    assert sum(int(number) for number in said.values()) == len(problems)
    assert int(said["lookup"]) == sum(problem.prompt.startswith("boss") for problem in problems)


def test_every_row_has_as_many_cells_as_its_head():
    curves = [0.1, 0.3, 0.2]
    metrics = dict.fromkeys([*rlhf.LINES.values(), *zero.LINES.values()], curves)
    result = {"summary": summary(**{"pass@k": [0.5] * 64, "maj@k": [0.5] * 64})} | metrics
    assert len(rlhf.row("no penalty", 0, result)) == len(rlhf.HEAD)
    assert len(zero.row(0, result)) == len(zero.HEAD)
    assert len(passk.row("a", "trained", result["summary"]["trained"])) == len(passk.HEAD)
    by_task = {f"pass@1/{task}": 0.5 for task in r1.TASKS}
    assert len(r1.row("base", summary(**by_task))) == len(r1.HEAD)
    assert len(seeds.row(0, summary())) == len(seeds.HEAD)
    assert len(compare.row("a", [summary() | {"curve": [{"samples": 0, "seconds": 0.0}]}])) == len(
        compare.HEAD)


def test_an_accuracy_is_drawn_where_it_was_measured_and_at_the_end():
    result = {"summary": summary(greedy=0.9), "step_time": [1.0, 2.0, 4.0],
              "eval/greedy": [None, 0.5, None]}
    assert compare.accuracy_curve(result, 8) == [
        {"step": 2, "samples": 16, "seconds": 3.0, "greedy": 0.5},
        {"step": 3, "samples": 24, "seconds": 7.0, "greedy": 0.9}]


def test_the_tables_of_tasks_follow_from_their_file():
    results = json.loads((ROOT / "docs/tasks.json").read_text())["results"]
    page = (ROOT / "docs/tasks.md").read_text()
    assert all(tasks.section(task, results[task]) in page for task in tasks.RUNS)


def test_what_calls_the_tool_is_counted_and_not_what_thinks(tmp_path):
    base = ["<answer>ka</answer>", "<think>ka</think>", "<search>ka", "</search>"]
    trained = ["<think><search>ka</search><information>mi</information></think>",
               "<search>ka</search>", "<search></search>", "<search>mi</search><search>to</search>"]
    with open(tmp_path / "evaluation.jsonl", "w") as log:
        for one, other in zip(base, trained):
            log.write(json.dumps({"base": {"text": one}, "trained": {"text": other}}) + "\n")
    (tmp_path / "summary.json").write_text('{"base": {}, "trained": {"greedy": 1.0}}')
    found = tasks.count_calls(tmp_path)
    assert found == {"base": {"calls": 0.0}, "trained": {"greedy": 1.0, "calls": 0.75}}


# ---- pages -----------------------------------------------------------------------------------

BLOCK = "<!-- made by make seeds: table -->\nold\n<!-- end of table -->\n"


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """pages(readme, lab): write README.md and docs/lab.md. -> the folder"""
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setattr(runs, "DOCS", tmp_path / "docs")

    def write(readme, lab):
        (tmp_path / "docs").mkdir()
        (tmp_path / "README.md").write_text(readme)
        (tmp_path / "docs/lab.md").write_text(lab)
        return tmp_path
    return write


def test_a_text_goes_between_its_marks_on_the_one_page_that_has_them(pages):
    other = BLOCK.replace("table", "example")
    folder = pages(other, f"before\n{BLOCK}after\n")
    runs.put("table", "new\n", "seeds")
    assert (folder / "README.md").read_text() == other
    assert (folder / "docs/lab.md").read_text() == f"before\n{BLOCK}after\n".replace("old", "new")


@pytest.mark.parametrize("readme, lab, words", [
    ("", BLOCK.replace("seeds", "compare"), "on none"),
    (BLOCK, BLOCK, "on README.md, lab.md"),
    (BLOCK.replace("end of table", "end of it"), "", "lacks the mark"),
    (BLOCK + BLOCK, "", "twice"),
    (BLOCK.replace("<!-- end of table -->\n", "") + BLOCK, "", "lacks the mark")])
def test_marks_that_are_not_on_exactly_one_page_are_an_error(pages, readme, lab, words):
    folder = pages(readme, lab)
    with pytest.raises(ValueError, match=words):
        runs.put("table", "new\n", "seeds")
    assert (folder / "README.md").read_text() == readme
