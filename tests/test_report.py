"""report.html says what a run logged, and no text of a policy becomes a part of it: Chromium
reads it."""
import dataclasses
import io
import json
import os
import re
import shlex
import sys

import pytest
from conftest import ROOT

import gspo
import plumbing
import report
from report import formats
from report.logs import read_log
from report.page import command, import_script, main, read_run, write_report
from report.trainers import answers_of

HOSTILE = ("</script></text><script>alert(1)</script><!--<script> & <img src=x onerror=alert(2)>"
           " \u2028\u2029 {{DATA}} \ud800")
SUMMARY = {"base": {"greedy": 0.1, "problems": 64}, "trained": {"greedy": 0.9, "problems": 64},
           "steps": 2, "seconds_warm_start": 1.0, "seconds_total": 3.0}
COMPLETION = {"text": "<answer>2", "reward": 1.0, "advantage": 0.5, "length": 2.0,
              "tokens": ["<answer>", "2"], "shade": [1.5, None], "mask": [1, 0]}
GROUP = {"step": 1, "prompt": "1+1=", "answer": "2", "shade": "ratio",
         "completions": [COMPLETION]}
PAIR = {"prompt": "1+1=", "answer": "2", "base": {"text": "3", "right": False},
        "trained": {"text": "2", "right": True}}
LOGS = ("summary.json", "metrics.jsonl", "samples.jsonl", "evaluation.jsonl")


def write_log(folder, name, *records):
    """Write these records as the log NAME.jsonl."""
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / f"{name}.jsonl").write_text(text)


@pytest.fixture
def run(tmp_path):
    """run(name, **flags): a new run folder, whole."""
    def make(name="run", **flags):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        config = {"script": "grpo.py", "torch": "2.6",
                  "config": {"task": "arithmetic", "seed": 0} | flags}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "summary.json").write_text(json.dumps(SUMMARY))
        write_log(folder, "metrics", {"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.75})
        write_log(folder, "samples", GROUP)
        write_log(folder, "evaluation", PAIR)
        return folder
    return make


@pytest.mark.parametrize("kind", ["verl", "TRL"])
def test_completions_of_other_trainers_are_shown_without_a_log(kind, tmp_path):
    """verl logs scores and no advantages; TRL's log may be missing, because nothing was saved."""
    folder = tmp_path / "completions"
    folder.mkdir()
    for step in (1, 2, 10):
        rows = [{"prompt": f"{HOSTILE}{n // 2}", "completion": f"text {n}", "right": n % 2 * 1.0,
                 "advantage": n % 2 - 0.5} for n in range(12)]
        if kind == "verl":
            rows = [{"input": row["prompt"], "output": row["completion"], "score": row["right"],
                     "gts": "2", "step": step} for row in rows]
            write_log(folder, str(step), *rows)
        else:
            pyarrow = pytest.importorskip("pyarrow", reason="needs engines/requirements.txt")
            parquet = pytest.importorskip("pyarrow.parquet")
            chats = [row | {"step": step, "prompt": [{"role": "user", "content": "a"}],
                            "completion": [{"role": "assistant", "content": row["completion"]}]}
                     for row in rows[:2]]
            parquet.write_table(pyarrow.Table.from_pylist(chats),
                                folder / f"completions_{step:05}.parquet")
    run = folder if kind == "verl" else tmp_path
    data = json.loads(data_of(run))["runs"][0]
    assert data["metrics"] == [{"step": step, "reward": 0.5} for step in (1, 2, 10)]
    assert data["config"] == {"script": kind} and "There is no log" in data["note"]
    assert [one["step"] for one in data["samples"]] == ([1] * 4 + [2] * 4 + [10] * 4
                                                        if kind == "verl" else [1, 2, 10])
    [_, second] = data["samples"][0]["completions"]
    assert second == {"text": "text 1", "reward": 1.0, "remark": "",
                      "advantage": None if kind == "verl" else 0.5}


def test_the_first_answers_of_the_first_and_the_last_evaluation_are_compared():
    evaluations = {step: [{"prompt": prompt, "text": f"{prompt}{step}{n}", "reward": n}
                          for n in range(2) for prompt in "ab"] for step in (2, 10, 9)}
    [pair] = answers_of(evaluations, {"b", "c"})
    assert [pair[name]["text"] for name in ("base", "trained")] == ["b20", "b100"]
    assert pair["trained"]["label"] == "evaluation at step 10, reward 0" and pair["prompt"] == "b"


def test_a_run_of_trl_without_completions_names_the_flag(tmp_path, refused):
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2/trainer_state.json").write_text(
        json.dumps({"log_history": [{"step": 1, "reward": 0.5}]}))
    refused("has no completions of TRL; train with --log_completions True", main, [str(tmp_path)])


def data_of(*folders):
    """Write a report. -> the data that is embedded in it, as text"""
    return re.search('json">(.*)</script>', write_report(*folders).read_text("utf-8"))[1]


def shown_of(*folders):
    """Write a report. -> what it shows: {"runs": ..., "groups": ..., "config": ...}"""
    return json.loads(data_of(*folders))


def test_the_page_has_what_the_run_logged_and_does_without_any_of_it(run):
    folder = run("first")
    [shown] = shown_of(folder)["runs"]
    assert shown["name"] == "first" and shown["metrics"][1]["reward"] == 0.75
    assert (shown["summary"], shown["samples"], shown["evaluation"]) == (SUMMARY, [GROUP], [PAIR])
    for name in LOGS:
        (folder / name).unlink()
        [shown] = shown_of(folder)["runs"]
    assert shown["command"] and "after step 0" in shown_of(folder)["groups"][0]["sentence"]
    assert not any(shown[log] for log in ("summary", "metrics", "samples", "evaluation"))


@pytest.mark.parametrize("before, after, change", [
    ({"greedy": 0.5, "problems": 20, "think_share": 0.0}, {},
     "greedy accuracy went from 0.500 to 0.500."),
    ({"greedy": 0.5, "problems": 19}, {}, "the mean reward of a step went from 0.500 to 0.750."),
    ({"problems": 20}, {}, "the mean reward of a step went from 0.500 to 0.750."),
    ({"greedy": 0.1, "think_share": 0.2, "accuracy_given_think": 0.6},
     {"greedy": 0.9, "think_share": 1.0, "accuracy_given_think": 0.95},
     "greedy accuracy went from 0.100 to 0.900, the share of samples that think went from 0.200 to "
     "1.000 and the accuracy of these samples went from 0.600 to 0.950."),
    ({"greedy": 0.1, "think_share": 0.0, "accuracy_given_think": None},
     {"greedy": 0.9, "think_share": 1.0, "accuracy_given_think": 0.95},
     "greedy accuracy went from 0.100 to 0.900 and the share of samples that think went from 0.000 "
     "to 1.000.")])
def test_a_run_is_summed_up_by_its_scores_or_by_its_reward_if_it_has_none_of_twenty_problems(
        run, before, after, change):
    folder = run()
    (folder / "summary.json").write_text(json.dumps(SUMMARY | {
        "base": before, "trained": before | after}))
    [group] = shown_of(folder)["groups"]
    assert group["sentence"] == f"In 2 steps (3 s in all), {change}"


@pytest.mark.parametrize("text", ["", '{"base": {"greedy": 0.1}, "tra', "[1, 2]", '{"base": {}}'])
def test_a_damaged_summary_gets_one_line_that_names_the_file(run, refused, text):
    folder = run()
    (folder / "summary.json").write_text(text)
    refused(f"{folder / 'summary.json'}: is damaged; if you remove it", main, [str(folder)])


def test_several_runs_are_compared_on_a_page_of_their_own_and_a_full_disk_keeps_the_old_one(
        run, monkeypatch):
    first, second = run("a"), run("b")
    report = write_report(first)
    before = report.read_text()
    assert write_report(first, second) == first / "comparison.html"
    assert report.read_text() == before
    monkeypatch.setattr(plumbing.os, "fsync", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(first)
    assert report.read_text() == before and not list(first.glob("*.tmp"))


def test_runs_that_differ_only_in_their_seed_are_one_group_whose_legend_names_what_differs(run):
    folders = [run(name, loss_type=name[:-2], seed=seed, output_dir=name, beta=0.1)
               for name, seed in (("grpo-0", 0), ("grpo-1", 1), ("cispo-0", 0), ("cispo-1", 1))]
    (folders[2] / "summary.json").write_text(json.dumps(SUMMARY | {
        "base": {"greedy": 0.3, "think_share": 0.0}, "trained": {"greedy": 0.5, "think_share": 1}}))
    shown = shown_of(*folders)
    groups = shown["groups"]
    assert [group["label"] for group in groups] == ["loss_type grpo (2 seeds)",
                                                    "loss_type cispo (2 seeds)"]
    assert [group["runs"] for group in groups] == [[0, 1], [2, 3]]
    assert [flag for flag, differs, _ in shown["config"] if differs] == ["loss_type"]
    assert groups[1]["sentence"] == (
        "In 2 steps (mean of 2 seeds), greedy accuracy went from 0.200 to 0.700.")
    (folders[3] / "summary.json").unlink()
    assert shown_of(*folders)["groups"][1]["sentence"].startswith(
        "1 of 2 runs have ended. In 2 steps (3 s in all), greedy accuracy went from 0.300 to")
    (folders[3] / "grpo.py").write_text("an edited script")
    (folders[1] / "config.json").write_text((folders[0] / "config.json").read_text())
    assert [group["label"] for group in shown_of(*folders)["groups"]] == [
        "grpo-0", "grpo-1", "cispo-0", "cispo-1"]       # the same seed, or another script
    del folders[1]
    assert [group["label"] for group in shown_of(*folders[:2])["groups"]] == [
        "grpo-0 (loss_type grpo)", "cispo-0 (loss_type cispo)"]


def test_a_long_run_has_a_page_that_is_not_longer_and_says_what_it_shows(run):
    folder = run()
    (folder / "summary.json").unlink()
    write_log(folder, "metrics", {"step": 0, "eval/greedy": 0.1}, *(
        {"step": step, "reward": 0.5} | ({"eval/greedy": 0.2} if step % 3 == 0 else {})
        for step in range(1, 2_010)))
    write_log(folder, "samples", *(GROUP | {"step": step} for step in range(1, 2_010, 10)
                                   for _ in range(4)))
    shown = shown_of(folder)
    [one] = shown["runs"]
    assert [line["step"] for line in one["metrics"]] == sorted(
        {*range(0, 2_010, 5), *range(0, 2_010, 6), 2_009})
    assert [group["step"] for group in one["samples"]] == [
        step for step in (*range(1, 2_010, 110), 2_001) for _ in range(4)]
    assert shown["groups"][0]["sentence"].endswith(
        "after step 2009, or it continues. The curves show one step in 5. The samples show one "
        "logged step in 11.")


def test_a_run_of_somebody_imports_only_scripts_and_shows_no_half_command(
        run, tmp_path, monkeypatch):
    monkeypatch.setattr("common.HERE", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "deploy.py").write_text("raise SystemExit('it has run')\n\ndef main():\n    pass")
    for name in ("deploy.py", "../deploy.py", "missing.py", ["deploy.py"], "os.py"):
        assert command(name, {}) == ""
        with pytest.raises(ValueError, match="is not a script of this repository"):
            import_script(name)


def test_the_command_starts_the_same_run_again():
    cfg = plumbing.parse_flags(gspo.Config, ["--task", "arithmetic:3-7", "--beta", "0.1",
                                           "--curriculum", "--output_dir", "it's <b>"])
    words = shlex.split(command("gspo.py", dataclasses.asdict(cfg)))
    assert words[:2] == ["python", "gspo.py"]
    assert plumbing.parse_flags(gspo.Config, words[2:]) == cfg


def hostile_run(run):
    """A run in whose name and logs all texts are hostile."""
    folder = run("<img src=x onerror=alert(1)>&amp;{{DATA}}<\u2028title>", task=HOSTILE)
    write_log(folder, "samples", GROUP | {"prompt": HOSTILE, "completions": [{"text": HOSTILE}]})
    write_log(folder, "evaluation", PAIR | {"base": {"text": HOSTILE, "right": False}})
    write_log(folder, "metrics", {"step": 1, HOSTILE: 1.0})
    return folder


def test_hostile_texts_stay_texts(run):
    folder = hostile_run(run)
    data = data_of(folder)
    assert data.isascii() and not set("<>&") & set(data)
    [shown] = json.loads(data)["runs"]
    assert shown["samples"][0]["completions"][0]["text"] == HOSTILE
    pages = [path.read_text("utf-8") for path in (folder / "report.html", write_report(run()))]
    assert pages[0].count("<") == pages[1].count("<")


def test_damaged_lines_are_skipped_and_numbers_that_a_browser_lacks_become_null(run, tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(b'{"step": 1, "a": NaN, "b": [Infinity, -Infinity, 1e999, 0.5]}\n\xff\xfe\n\n'
                    b'[1]\n7\n{"other": 1}\n{"step": "a"}\n{"step": 2}\n{"step": 3, "rew')
    assert read_log(tmp_path, "metrics", "step") == [
        {"step": 1, "a": None, "b": [None, None, None, 0.5]}, {"step": 2}]
    folder = run()
    write_log(folder, "samples", {"step": 1}, GROUP)
    assert shown_of(folder)["runs"][0]["samples"] == formats.read(folder).samples == [GROUP]


@pytest.fixture
def page(browser):
    """A page of Chromium, on which no script may fail."""
    faults = []
    page = browser.new_page()
    page.on("pageerror", lambda error: faults.append(error))
    page.on("dialog", lambda dialog: faults.append(dialog.message))
    yield page
    assert not faults


def test_chromium_draws_whatever_there_is_and_shows_a_group_with_signal(run, page):
    whole = run()
    lost = COMPLETION | {"reward": 0.0}
    write_log(whole, "samples", GROUP | {"prompt": "2+2=", "completions": [lost, lost]},
              GROUP | {"completions": [COMPLETION, lost]})
    bare = run("bare")
    for name in LOGS:
        (bare / name).unlink()
    seeds = [run(f"seed{seed}", seed=seed) for seed in (1, 2)]
    write_log(seeds[1], "metrics", *({"step": step, "reward": 0.9} for step in (1, 2, 3)))
    page.goto(write_report(*seeds, whole, run("other", beta=0.5)).as_uri())
    assert page.locator("h1 span").all_text_contents() == [
        "seed1, seed2, run (3 seeds)", "other (beta 0.5)"]
    [band] = page.locator("path[style]").evaluate_all("all => all.map(one => one.outerHTML)")
    assert "var(--one)" in band and band.count("L") == 3        # two steps, which all have logged
    assert page.locator("small").first.text_content() == "0.900 to 0.900"       # of the seeds
    page.get_by_label("run of the answers").select_option("3")
    for folders in ([bare], [hostile_run(run)], [whole, bare], [whole]):
        page.goto(write_report(*folders).as_uri())
    assert page.locator("[aria-label=prompt] :checked").text_content() == "1+1="
    assert page.title() == "grpo.py on arithmetic: run"
    page.get_by_text("docs/metrics.md").click()
    assert page.url == (ROOT / "docs/metrics.md").as_uri()


# ---- the steps of thoughts -------------------------------------------------------------------

BEFORE = {"8+5": [10, 2], "13-9": [4, 4], "0*9": [0, 0], "3+4": [2, 1], "99+1": [5, 5]}
AFTER = {"8+5": [20, 19], "2*2": [3, 1], "13-9": [4, 4], "3+4": [2, 2]}


def add_steps(folder, before=BEFORE, after=AFTER):
    """Add the steps of samples to the summary of a run. -> the folder"""
    summary = SUMMARY | {"base": SUMMARY["base"] | {"steps": before},
                         "trained": SUMMARY["trained"] | {"steps": after}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def cells_of(page, step):
    """Read the cells of a step, before and after. -> list of (class, wrong share, mark)"""
    return page.locator(f'[data-step="{step}"]').evaluate_all(
        "all => all.map(one => [one.className, one.style.getPropertyValue('--share'), "
        "one.textContent])")


def test_the_page_shows_how_often_each_step_was_right_before_and_after(run, page):
    page.goto(write_report(add_steps(run())).as_uri())
    assert page.locator("[data-step]").count() == 2 * 351       # none has a result outside 0..20
    assert cells_of(page, "8+5") == [
        ["step written", "80.0%", "\u00d7"], ["step written", "5.0%", ""]]
    assert cells_of(page, "2*2") == [["step never", "", ""], ["step written", "66.7%", "\u00d7"]]
    assert cells_of(page, "3+4") == [["step written", "50.0%", ""], ["step written", "0.0%", ""]]
    assert cells_of(page, "0*9") == [["step never", "", ""]] * 2
    # a cell is in the row of its value and in the column of its operand
    place = page.locator('[data-step="8+5"]').first.evaluate(
        "one => [...one.parentNode.children].indexOf(one)")
    assert (place // 10 - 1, place % 10) == (8, 5)
    page.locator('[data-step="8+5"]').first.hover()
    assert page.get_by_text("8+5=13: right 2 of 10 before, 19 of 20 after").count() == 1


def test_a_page_without_steps_has_no_grids_and_one_of_several_runs_shows_those_of_one(run, page):
    plain = run("plain")
    first = add_steps(run("a", seed=1))
    second = add_steps(run("b"), AFTER, BEFORE)
    untrained = add_steps(run("untrained"))
    summary = json.loads((untrained / "summary.json").read_text())
    (untrained / "summary.json").write_text(json.dumps(summary | {"steps": 0}))
    for folder in (plain, untrained):
        page.goto(write_report(folder).as_uri())
        assert page.get_by_text("What RL mended").count() == 0
    page.goto(write_report(plain, first, second).as_uri())
    assert [share for _, share, _ in cells_of(page, "8+5")] == ["80.0%", "5.0%"]
    page.get_by_label("run of the steps").select_option("2")
    assert [share for _, share, _ in cells_of(page, "8+5")] == ["5.0%", "80.0%"]
    assert page.get_by_label("run of the steps").locator("option").count() == 2


@pytest.mark.parametrize("steps", [
    {"8+5": HOSTILE, "1+1": [None, 3], "2+2": [1], "3+3": [[1], 1], HOSTILE: [1, 1]},
    {"8+5": {}, "1+1": None, "__proto__": [1, 1]}, [1, 2]])
def test_steps_that_a_damaged_summary_contains_are_never_written(run, page, steps):
    page.goto(write_report(add_steps(run(), steps, {"8+5": [1, -5]})).as_uri())
    assert page.locator("[data-step].written").count() == 1
    assert cells_of(page, "8+5")[0] == ["step never", "", ""]


def test_a_prompt_of_verl_may_be_a_list_and_each_score_is_shown(tmp_path):
    """verl also shuffles a batch."""
    rows = [{"input": [{"role": "user", "content": [{"type": "text", "text": prompt}]}, "?", None],
             "output": prompt, "score": 1.0, "acc": True, "note": "x"} for prompt in "abab"]
    write_log(tmp_path, "1", *rows)
    run = read_run(tmp_path)
    assert [(group["prompt"], [one["text"] for one in group["completions"]])
            for group in run["samples"]] == [("a\n?\n", ["a", "a"]), ("b\n?\n", ["b", "b"])]
    assert run["samples"][0]["completions"][0]["remark"] == "acc 1"
    assert [one["reward"] for one in run["metrics"]] == [1.0]


def write_trl(folder, history, steps, **columns):
    """Write the completions of TRL. history: its log; columns: of two rows, or functions of a step.
    -> what the page shows"""
    parquet = pytest.importorskip("pyarrow.parquet", reason="the completions of TRL are parquet")
    (folder / "completions").mkdir()
    if history:
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    for step in steps:
        rows = {"step": [step] * 2, "prompt": ["1+1="] * 2, "completion": ["3", "2"], **{
            name: some(step) if callable(some) else some for name, some in columns.items()}}
        rows["advantage"] = [-1.0, 1.0]
        parquet.write_table(sys.modules["pyarrow"].table(rows),
                            folder / f"completions/completions_{step:05}.parquet")
    return read_run(folder)


def log_of(steps, *names, **more):
    return [{"step": step, "reward": 0.5, **{f"rewards/{name}/mean": 0.5 for name in names}, **more}
            for step in steps]


RIGHT, PARSED = {"right": [0.0, 1.0]}, {"right": [0.0, 1.0], "parsed": [144.0, 145.0]}


@pytest.mark.parametrize("history, columns, rewards, remark, note", [
    (log_of([1, 2], "right"), RIGHT, [0.0, 1.0], "", ""),
    (log_of([1, 2], "right"), PARSED, [0.0, 1.0], "right 0, parsed 144", ""),
    ([], RIGHT, [0.0, 1.0], "", "so the curve is the mean reward"),
    ([], PARSED, [None, None], "right 0, parsed 144", "does not know which columns are rewards"),
    (log_of([1, 2], "right", "short"), RIGHT | {"short": [0.5, 0.5]}, [0.5, 1.5],
     "right 0, short 0.5", "the plain sum of its rewards, without weights")])
def test_a_sample_of_trl_has_its_rewards_and_no_other_number_counts(
        history, columns, rewards, remark, note, tmp_path):
    run = write_trl(tmp_path, history, [1, 2], **columns)
    group = run["samples"][0]["completions"]
    assert [one["reward"] for one in group] == rewards and group[0]["remark"] == remark
    assert note in run["note"] and bool(note) == bool(run["note"])
    assert [one.get("reward") for one in run["metrics"]] == [0.5] * 2 * (rewards != [None] * 2)


def test_completions_after_the_log_of_a_resumed_run_are_left_out(tmp_path):
    run = write_trl(tmp_path, log_of(range(2, 102, 2), "right"), range(1, 103), **RIGHT)
    assert [group["step"] for group in run["samples"]] == [*range(2, 100, 6), 100]
    assert "52 of 102 files of samples are left out" in run["note"]


@pytest.mark.parametrize("steps, shown, answers", [([2], [1, 3], 0), ([2, 3], [1, 2, 3], 1)])
def test_the_page_says_that_an_evaluation_replaces_the_completions_of_its_step(
        steps, shown, answers, tmp_path):
    found = [{"step": step, "eval_a_reward": 0.5} for step in (0, *steps)]      # step 0: no file
    run = write_trl(
        tmp_path, found[:1] + log_of([1, 2, 3], train_runtime=7.0) + found[1:], [1, 2, 3], **RIGHT,
        prompt=lambda step: ["held out" if step in steps else "1+1=", f"{step}+1="])
    assert sorted({one["step"] for one in run["samples"]}) == shown and run["summary"]["steps"] == 3
    assert f"Evaluations have replaced the samples of {len(steps)} of 3" in run["note"]
    assert [(one["base"]["text"], one["base"]["label"]) for one in run["evaluation"]] == [
        ("3", f"evaluation at step {steps[0]}, reward 0.0")] * answers      # the first answers
    assert ("after a second evaluation" in run["note"]) == (not answers)


def test_a_file_that_a_kill_has_cut_off_is_named_and_the_newest_whole_state_is_read(tmp_path):
    run = write_trl(tmp_path, log_of([1, 2], "right"), [1], **RIGHT)
    (tmp_path / "completions/completions_00002.parquet").write_bytes(b"PAR1")
    for name, text in (("1", json.dumps({"log_history": log_of([1, 2])})), ("2", '{"log_hist')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text(text)
    os.utime(tmp_path / "trainer_state.json", (1, 1))
    again = read_run(tmp_path)
    assert (run["metrics"], again["metrics"]) == (log_of([1, 2], "right"), log_of([1, 2]))
    assert again["note"] == " These files cannot be read: completions_00002.parquet."


def test_ctrl_c_ends_a_command_with_one_line(stops, monkeypatch):
    def main():
        raise KeyboardInterrupt
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    stops("interrupted", report.start, main, code=130)
