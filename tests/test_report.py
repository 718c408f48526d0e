"""report.html says what a run logged, and no text of a policy becomes a part of it: Chromium
reads it."""
import json
import re
import sys

import pytest
from conftest import ROOT

from report import formats
from report.logs import read_log, thinned
from report.page import command, import_script, main, read_run, write_report

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


def test_completions_of_verl_are_shown_without_a_log(tmp_path):
    """verl logs scores and no advantages."""
    for step in (1, 2, 10):
        write_log(tmp_path, str(step), *(
            {"input": f"{HOSTILE}{n // 2}", "output": f"text {n}", "score": n % 2 * 1.0, "gts": "2",
             "step": step} for n in range(12)))
    data = shown_of(tmp_path)["runs"][0]
    assert data["metrics"] == [{"step": step, "reward": 0.5} for step in (1, 2, 10)]
    assert data["config"] == {"script": "verl"} and "There is no log" in data["note"]
    assert [one["step"] for one in data["samples"]] == [1] * 4 + [2] * 4 + [10] * 4
    [_, second] = data["samples"][0]["completions"]
    assert second == {"text": "text 1", "reward": 1.0, "remark": "", "advantage": None}


def shown_of(*folders):
    """Write a report. -> what it shows: {"runs": ..., "groups": ..., "config": ...}"""
    page = write_report(*folders).read_text("utf-8")
    return json.loads(re.search(r'json">([ -%\'-;=?-~]*)</script>', page)[1])      # no < > &


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


def test_a_run_without_a_score_is_summed_up_by_its_reward(run):
    folder = run()
    (folder / "summary.json").write_text(json.dumps(SUMMARY | {
        "base": {"problems": 20}, "trained": {"problems": 20}}))
    [group] = shown_of(folder)["groups"]
    assert "the mean reward of a step went from 0.500 to 0.750" in group["sentence"]


@pytest.mark.parametrize("text", ["", '{"base": {"greedy": 0.1}, "tra', "[1, 2]", '{"base": {}}'])
def test_a_damaged_summary_gets_one_line_that_names_the_file(run, refused, text):
    folder = run()
    (folder / "summary.json").write_text(text)
    refused(f"{folder / 'summary.json'}: is damaged; if you remove it", main, [str(folder)])


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


def test_a_run_of_somebody_imports_only_scripts_and_shows_no_half_command(
        run, tmp_path, monkeypatch):
    monkeypatch.setattr("common.HERE", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "deploy.py").write_text("raise SystemExit('it has run')\n\ndef main():\n    pass")
    for name in ("deploy.py", "../deploy.py", "missing.py", ["deploy.py"], "os.py"):
        assert command(name, {}) == ""
        with pytest.raises(ValueError, match="is not a script of this repository"):
            import_script(name)


def hostile_run(run):
    """A run in whose name and logs all texts are hostile."""
    folder = run("<img src=x onerror=alert(1)>&amp;{{DATA}}<\u2028title>", task=HOSTILE)
    write_log(folder, "samples", GROUP | {"prompt": HOSTILE, "completions": [{"text": HOSTILE}]})
    write_log(folder, "evaluation", PAIR | {"base": {"text": HOSTILE, "right": False}})
    write_log(folder, "metrics", {"step": 1, HOSTILE: 1.0})
    return folder


def test_hostile_texts_stay_texts(run):
    folder = hostile_run(run)
    [shown] = shown_of(folder)["runs"]
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


def test_a_long_log_is_read_in_part_with_its_evaluations_and_its_last_step(tmp_path):
    write_log(tmp_path, "metrics", *({"step": i, "eval/a" if i % 4 == 0 else "reward": 0.5}
                                     for i in range(1, 12)))
    found, stride = thinned(tmp_path, "metrics", 4)
    assert [one["step"] for one in found] == [1, 4, 7, 8, 10, 11] and stride == 3
    found, _ = thinned(tmp_path, "metrics", 1)
    assert [one["step"] for one in found] == [1, 4, 11]


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


# ---- the completions of TRL -------------------------------------------------------------------

def write_trl(folder, history, steps, **columns):
    """Write the completions of TRL. history: its log; columns: of the rows, or functions of a step.
    -> what the page shows"""
    parquet = pytest.importorskip("pyarrow.parquet", reason="the completions of TRL are parquet")
    (folder / "completions").mkdir()
    if history:
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    for step in steps:
        rows = {"step": [step] * 2, "prompt": ["1+1="] * 2, "completion": ["3", "2"], **{
            name: some(step) if callable(some) else some for name, some in columns.items()}}
        rows["advantage"] = [-1.0, 1.0, 0.0][:len(rows["prompt"])]
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
