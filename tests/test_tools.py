"""The tools that measure: their tables, what they say below them and on which page they write it;
nothing is trained here."""
import json

import pytest
from conftest import ROOT

import common
import grpo
from tools import r1, runs, seeds, tables


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
    by_task = {f"pass@1/{task}": 0.5 for task in r1.TASKS}
    assert len(r1.row("base", summary(**by_task))) == len(r1.HEAD)
    assert len(seeds.row(0, summary())) == len(seeds.HEAD)


def test_the_tables_of_tasks_follow_from_their_file():
    results = json.loads((ROOT / "docs/tasks.json").read_text())["results"]
    page = (ROOT / "docs/tasks.md").read_text()
    for task, made in tables.TABLES["tasks"].items():
        assert tables.section(made, results[task]) in page


@pytest.mark.parametrize("name", tables.PICTURES)
def test_a_table_says_how_a_run_began_and_how_it_was_at_its_best_and_at_the_end(name, tmp_path):
    [made] = tables.TABLES[name].values()
    result = summary(**{"pass@k": [0.5] * 64, "maj@k": [0.5] * 64})
    result["base"] |= {"pass@k": [0.25] * 64, "maj@k": [0.125] * 64}
    curves = dict.fromkeys(made.metrics, [5.0, 7.0, 6.0]) | {"accuracy": [0.1, 0.3, 0.2]}
    results = {row: [result | curves] for row in made.rows}
    text = tables.section(made, results)
    told = {"zero": "| 60 | 0.10 -> 0.20 | 5.00 -> 6.00 | 5 -> 6 | 0.500 |",
            "rlhf": "| 0.10 -> 0.20 | 0.30 | 5.00 -> 6.00 | 7.00 | 5.00 -> 6.00 | 0.500 |",
            "passk": f"|{' 0.250 |' * 3}{' 0.125 |' * 3}{' 0.500 |' * 6}"}
    assert told[name] in text
    tables.PICTURES[name](results).save(tmp_path / "picture.png")


def test_what_calls_the_tool_is_counted_and_not_what_thinks(tmp_path):
    base = ["<answer>ka</answer>", "<think>ka</think>", "<search>ka", "</search>"]
    trained = ["<think><search>ka</search><information>mi</information></think>",
               "<search>ka</search>", "<search></search>", "<search>mi</search><search>to</search>"]
    with open(tmp_path / "evaluation.jsonl", "w") as log:
        for one, other in zip(base, trained):
            log.write(json.dumps({"base": {"text": one}, "trained": {"text": other}}) + "\n")
    (tmp_path / "summary.json").write_text('{"base": {}, "trained": {"greedy": 1.0}}')
    found = tables.count_calls(tmp_path)
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
