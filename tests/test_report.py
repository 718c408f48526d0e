"""report.html: what it holds of a run folder, and that no text of a policy becomes a part of the
page. How it looks was seen in a browser; here it is read by html.parser."""
import html.parser
import json
import math
import subprocess
import sys
from typing import NamedTuple

import pytest
from conftest import ROOT

from tools.report import (
    TEMPLATE,
    compare_configs,
    draw_curve,
    main,
    read_log,
    read_run,
    render,
    write_report,
)

HOSTILE = ("</script><script>alert(1)</script><!--<script> & <img src=x onerror=alert(2)>"
           " \u2028\u2029 {{TITLE}} \ud800")
SUMMARY = {"base": {"greedy": 0.1, "problems": 8}, "trained": {"greedy": 0.9, "problems": 8},
           "steps": 2, "seconds_warm_start": 1.0, "seconds_total": 3.0}
COMPLETION = {"text": "<answer>2", "reward": 1.0, "advantage": 0.5, "length": 2.0,
              "tokens": ["<answer>", "2"], "shade": [1.5, None], "mask": [1, 0]}
GROUP = {"step": 1, "prompt": "1+1=", "answer": "2", "shade": "ratio",
         "completions": [COMPLETION]}
PAIR = {"prompt": "1+1=", "answer": "2", "base": {"text": "3", "right": False},
        "trained": {"text": "2", "right": True}}


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
        config = {"script": "grpo.py", "argv": ["--output_dir", "a b"], "python": "3.11.2 (main)",
                  "torch": "2.6", "config": {"task": "arithmetic", "seed": 0} | flags}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "summary.json").write_text(json.dumps(SUMMARY))
        write_log(folder, "metrics", {"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.75})
        write_log(folder, "samples", GROUP)
        write_log(folder, "evaluation", PAIR)
        return folder
    return make


class Page(html.parser.HTMLParser):
    """All start tags of a page with their attributes, its title, and the data embedded in it."""

    def __init__(self, path):
        super().__init__()
        self.tags = []
        self.texts = {}             # (tag, id) -> text
        self.inside = None
        self.page = path.read_text(encoding="utf-8")
        self.feed(self.page)
        self.close()
        self.title = self.texts[("title", None)]
        self.data = json.loads(self.texts[("script", "data")])

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        self.inside = (tag, attributes.get("id"))

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        self.texts[self.inside] = self.texts.get(self.inside, "") + data


def names(page):
    return [tag for tag, _ in page.tags]


def test_the_page_embeds_what_the_run_logged(run):
    page = Page(write_report(run("first")))
    [shown] = page.data["runs"]
    assert shown["name"] == "first"
    assert shown["command"] == "python grpo.py --output_dir 'a b'"
    assert shown["summary"] == SUMMARY
    assert shown["samples"] == [GROUP]
    assert shown["evaluation"] == [PAIR]
    assert [line["reward"] for line in shown["metrics"]] == [0.5, 0.75]
    assert page.title == "first"


def test_a_hostile_completion_stays_a_text(run):
    folder = run("plain")
    ordinary = Page(write_report(folder))
    hostile = run("hostile")
    group = {"prompt": HOSTILE, "completions": [{"text": HOSTILE}]}
    write_log(hostile, "samples", GROUP | group)
    write_log(hostile, "evaluation", PAIR | {"base": {"text": HOSTILE, "right": False}})
    write_log(hostile, "metrics", {"step": 1, HOSTILE: 1.0})
    page = Page(write_report(hostile))
    assert names(page) == names(ordinary)
    [shown] = page.data["runs"]
    assert shown["samples"][0]["completions"][0]["text"] == HOSTILE
    assert shown["evaluation"][0]["base"]["text"] == HOSTILE
    embedded = page.texts[("script", "data")]
    assert embedded.isascii() and not set("<>&") & set(embedded)


def test_a_hostile_folder_name_and_flag_stay_texts(run):
    name = "<img src=x onerror=alert(1)>&amp;{{DATA}}</title>".replace("/", "\u2028")
    page = Page(write_report(run(name, task=HOSTILE)))
    assert page.title == name
    assert names(page) == names(Page(write_report(run("plain"))))
    assert ["task", False, [HOSTILE]] in page.data["config"]


def test_a_folder_name_that_is_no_unicode_can_be_written(run):
    page = render([read_run(run()) | {"name": "run \udcff"}])
    assert b"<title>run &#56575;</title>" in page.encode()


def test_the_page_puts_no_logged_text_into_markup():
    template = TEMPLATE.read_text()
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                 "Function("):
        assert sink not in template


def test_the_page_needs_no_network(run):
    page = Page(write_report(run()))
    assert not {"link", "img", "iframe", "base", "object"} & set(names(page))
    assert not any({"src", "href"} & attributes.keys() for _, attributes in page.tags)
    [policy] = [attributes["content"] for _, attributes in page.tags
                if attributes.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy and "http" not in policy
    for call in ("fetch(", "import(", "XMLHttpRequest", "url(", "@import"):
        assert call not in page.page


def test_of_several_runs_the_flags_that_differ_are_marked(run):
    folders = [run("a", seed=0, beta=0.1), run("b", seed=1), run("c", seed=0)]
    data = Page(write_report(*folders)).data
    rows = {flag: (differs, values) for flag, differs, values in data["config"]}
    assert rows["seed"] == (True, [0, 1, 0])
    assert rows["task"] == (False, ["arithmetic"] * 3)
    assert rows["beta"] == (True, [0.1, None, None])
    assert [shown["name"] for shown in data["runs"]] == ["a", "b", "c"]
    assert (folders[0] / "report.html").exists()
    assert not (folders[1] / "report.html").exists()


def test_a_difference_between_the_later_runs_counts():
    configs = [{"seed": 1}, {"seed": 1}, {"seed": 2}]
    assert compare_configs(configs) == [["seed", True, [1, 1, 2]]]


def test_runs_of_one_name_are_told_apart_by_their_paths(run):
    folders = [run("x/same"), run("y/same")]
    shown = Page(write_report(*folders)).data["runs"]
    assert [each["name"] for each in shown] == [str(folder) for folder in folders]


def test_a_run_that_was_killed_or_made_only_the_base_has_a_report(run):
    folder = run()
    for name in ("summary.json", "metrics.jsonl", "samples.jsonl", "evaluation.jsonl"):
        (folder / name).unlink()
        assert Page(write_report(folder)).data["runs"][0]["command"]
    (folder / "metrics.jsonl").write_text("")
    [shown] = Page(write_report(folder)).data["runs"]
    assert shown["summary"] is None
    assert shown["metrics"] == shown["samples"] == shown["evaluation"] == []


def test_a_damaged_line_is_skipped_and_the_rest_is_kept(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(b'{"step": 1}\n\xff\xfe\n\n[1]\n7\n{"other": 1}\n{"step": 2}\n{"step": 3, "rew')
    assert read_log(log, "step") == [{"step": 1}, {"step": 2}]


def test_numbers_that_are_none_in_a_browser_become_null(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1, "a": NaN, "b": [Infinity, -Infinity, 1e999, 0.5]}\n')
    assert read_log(log) == [{"step": 1, "a": None, "b": [None, None, None, 0.5]}]


def test_samples_of_an_older_run_need_no_tokens(run):
    folder = run()
    completion = {"text": "2", "reward": math.nan}
    write_log(folder, "samples", {"step": 1, "prompt": "1+1=", "completions": [completion]})
    assert read_run(folder)["samples"][0]["completions"] == [{"text": "2", "reward": None}]


@pytest.mark.parametrize("config", [
    None, "", "{", "[]", "{}", '{"script": "a.py"}', '{"script": 1}',
    '{"script": "a.py", "argv": [], "python": "", "torch": "", "config": {}}'])
def test_a_folder_that_is_no_run_gets_one_line_and_exit_code_2(run, tmp_path, capsys, config):
    folder = tmp_path / "none"
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(config)
    with pytest.raises(SystemExit) as exit:
        main([str(run()), str(folder)])
    printed = capsys.readouterr()
    assert exit.value.code == 2 and not printed.out
    assert printed.err == (f"error: {folder}: has no readable config.json; "
                           "name the folder of a run\n")
    assert not (tmp_path / "run" / "report.html").exists()


def test_the_command_writes_into_the_first_run_or_where_output_says(run, tmp_path, capsys):
    first = run("first")
    second = run("second")
    main([str(first), str(second)])
    assert capsys.readouterr().out == f"{first / 'report.html'}\n"
    main([str(second), "--output", str(tmp_path / "elsewhere.html")])
    assert Page(tmp_path / "elsewhere.html").title == "second"
    assert not (second / "report.html").exists()
    with pytest.raises(SystemExit) as exit:
        main([str(first), "--output", str(tmp_path / "no" / "folder.html")])
    assert exit.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_the_command_loads_nothing_that_takes_long(run):
    """torch and matplotlib take seconds, where the report itself takes a moment."""
    program = ("import sys; sys.modules |= {'torch': None, 'matplotlib': None, 'common': None}; "
               "from tools import report; report.main()")
    done = subprocess.run([sys.executable, "-c", program, run()], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.returncode == 0 and done.stdout.endswith("report.html\n"), done.stderr


def test_a_completion_that_nobody_judges_is_embedded_as_neither_right_nor_wrong(run):
    folder = run()
    unjudged = {"base": {"text": "3", "right": None}, "trained": {"text": "2", "right": None}}
    write_log(folder, "evaluation", PAIR | unjudged)
    [shown] = Page(write_report(folder)).data["runs"][0]["evaluation"]
    assert shown["base"]["right"] is None
    assert 'right === null ? ""' in TEMPLATE.read_text()


# ---- curve.png -------------------------------------------------------------------------------

class Panel(NamedTuple):
    labels: list
    bottom: float


@pytest.fixture
def drawn(monkeypatch):
    """drawn(folder): the panels of curve.png by title, with the labels of their lines."""
    pyplot = pytest.importorskip("matplotlib.pyplot")

    def draw(folder):
        panels = {}

        def close(figure):
            for axis in figure.axes:
                _, labels = axis.get_legend_handles_labels()
                panels[axis.get_title()] = Panel(labels, axis.get_ylim()[0])
        with monkeypatch.context() as patch:
            patch.setattr(pyplot, "close", close)
            draw_curve(folder)
        pyplot.close()
        return panels
    return draw


def test_accuracy_is_drawn_from_0_on_beside_that_of_the_base(run, drawn):
    folder = run()
    write_log(folder, "metrics", {"step": 1, "accuracy": 0.5, "reward": 0.5, "eval/greedy": 0.7,
                                  "eval/kl": 0.1})
    panels = drawn(folder)
    assert panels["accuracy"].labels == [
        "of the samples trained on", "greedy, held out", "base, greedy"]
    assert panels["accuracy"].bottom == 0
    assert panels["update"].labels == ["KL to the base (nats), held out"]
    assert panels["exploration"].labels == []           # there is nothing to show


def test_where_nothing_is_right_or_wrong_returns_are_drawn_below_0_too(run, drawn):
    folder = run()
    base = {"greedy_return": -0.5, "best_return": 1.5, "return": 0.1}
    (folder / "summary.json").write_text(json.dumps(SUMMARY | {"base": base, "trained": base}))
    write_log(folder, "metrics", {"step": 1, "reward": -0.5, "eval/greedy_return": 0.7})
    panels = drawn(folder)
    assert "accuracy" not in panels
    labels = ["reward of the samples trained on", "greedy, held out", "base, greedy"]
    assert panels["return"].labels == labels
    assert panels["return"].bottom < -0.5


def test_a_base_without_any_of_these_scores_has_no_line(run, drawn):
    folder = run()
    (folder / "summary.json").write_text(json.dumps(SUMMARY | {"base": {}, "trained": {}}))
    assert drawn(folder)["return"].labels == ["reward of the samples trained on"]


def test_the_curves_of_a_run_are_drawn_with_gaps_where_a_number_is_missing(run):
    folder = run()
    write_log(folder, "metrics", {"step": 1, "accuracy": 0.5, "entropy": None},
              {"step": 2, "accuracy": 0.75, "entropy": 0.1, "eval/greedy": 0.7})
    draw_curve(folder)
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        draw_curve(run())


def test_a_run_without_a_summary_has_no_curve(run):
    folder = run()
    (folder / "summary.json").unlink()
    with pytest.raises(OSError):
        draw_curve(folder)
    assert not (folder / "curve.png").exists()
