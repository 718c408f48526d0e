"""report.html holds what a run logged, and no text of a policy becomes a part of the page: it is
read by html.parser. curve.png is drawn whatever is missing."""
import dataclasses
import html.parser
import json
import math
import shlex

import pytest

import common
import gspo
from tools.report import (
    command,
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
        config = {"script": "grpo.py", "torch": "2.6",
                  "config": {"task": "arithmetic", "seed": 0} | flags}
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
        self.names = [tag for tag, _ in self.tags]
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


def test_the_page_embeds_what_the_run_logged(run):
    page = Page(write_report(run("first", output_dir="a b", beta=0.1, curriculum=True)))
    [shown] = page.data["runs"]
    assert shown["command"] == "python grpo.py --curriculum --output_dir 'a b' --beta 0.1"
    assert (shown["name"], page.title) == ("first", "first")
    assert (shown["summary"], shown["samples"], shown["evaluation"]) == (SUMMARY, [GROUP], [PAIR])
    assert [line["reward"] for line in shown["metrics"]] == [0.5, 0.75]


@pytest.mark.parametrize("flags", [
    [], ["--beta", "0.1", "--no-mask_tool_tokens"],
    ["--task", "arithmetic:3-7", "--curriculum", "--output_dir", "it's <b>"]])
def test_the_command_starts_the_same_run_again(flags):
    cfg = common.parse_flags(gspo.Config, flags)
    words = shlex.split(command("gspo.py", dataclasses.asdict(cfg)))
    assert words[:2] == ["python", "gspo.py"]
    assert common.parse_flags(gspo.Config, words[2:]) == cfg


def test_hostile_texts_stay_texts(run):
    ordinary = Page(write_report(run("plain")))
    hostile = run("<img src=x onerror=alert(1)>&amp;{{DATA}}<\u2028title>", task=HOSTILE)
    group = {"prompt": HOSTILE, "completions": [{"text": HOSTILE}]}
    write_log(hostile, "samples", GROUP | group)
    write_log(hostile, "evaluation", PAIR | {"base": {"text": HOSTILE, "right": False}})
    write_log(hostile, "metrics", {"step": 1, HOSTILE: 1.0})
    page = Page(write_report(hostile))
    assert page.names == ordinary.names and page.title == hostile.name
    [shown] = page.data["runs"]
    assert shown["samples"][0]["completions"][0]["text"] == HOSTILE
    assert shown["evaluation"][0]["base"]["text"] == HOSTILE
    assert ["task", False, [HOSTILE]] in page.data["config"]
    embedded = page.texts[("script", "data")]
    assert embedded.isascii() and not set("<>&") & set(embedded)
    page = render([read_run(hostile) | {"name": "run \udcff"}])     # a name that is no unicode
    assert b"<title>run &#56575;</title>" in page.encode()


def test_a_run_that_was_killed_or_made_only_the_base_has_a_report(run):
    folder = run()
    for name in ("summary.json", "metrics.jsonl", "samples.jsonl", "evaluation.jsonl"):
        (folder / name).unlink()
        assert Page(write_report(folder)).data["runs"][0]["command"]
    [shown] = Page(write_report(folder)).data["runs"]
    assert shown["summary"] is None
    assert shown["metrics"] == shown["samples"] == shown["evaluation"] == []


def test_damaged_lines_are_skipped_and_numbers_that_a_browser_lacks_become_null(run, tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(b'{"step": 1, "a": NaN, "b": [Infinity, -Infinity, 1e999, 0.5]}\n\xff\xfe\n\n'
                    b'[1]\n7\n{"other": 1}\n{"step": 2}\n{"step": 3, "rew')
    assert read_log(log, "step") == [
        {"step": 1, "a": None, "b": [None, None, None, 0.5]}, {"step": 2}]
    folder = run()                          # samples of an older run need no tokens
    completion = {"text": "2", "reward": math.nan}
    write_log(folder, "samples", {"step": 1, "prompt": "1+1=", "completions": [completion]})
    assert read_run(folder)["samples"][0]["completions"] == [{"text": "2", "reward": None}]


@pytest.mark.parametrize("config", [
    None, "", "{", "[]", "{}", '{"script": "a.py"}', '{"script": "a.py", "config": 1}'])
def test_a_folder_that_is_no_run_gets_one_line_and_exit_code_2(run, tmp_path, capsys, config):
    folder = tmp_path / "none"
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(config)
    with pytest.raises(SystemExit) as exit:
        main([str(run()), str(folder)])
    printed = capsys.readouterr()
    assert exit.value.code == 2 and not printed.out
    assert printed.err.startswith(f"error: {folder}: ") and printed.err.count("\n") == 1
    assert not (tmp_path / "run" / "report.html").exists()


# ---- curve.png -------------------------------------------------------------------------------

@pytest.mark.parametrize("base", [
    {"greedy": 0.1}, {"greedy_return": -0.5, "best_return": 1.5}, {}],
    ids=["right or wrong", "returns", "no score"])
def test_curves_are_drawn_with_gaps_where_a_number_is_missing(run, base):
    pytest.importorskip("matplotlib")
    folder = run()
    (folder / "summary.json").write_text(json.dumps(SUMMARY | {"base": base}))
    write_log(folder, "metrics", {"step": 1, "accuracy": 0.5, "entropy": None, "reward": -0.5},
              {"step": 2, "accuracy": 0.75, "entropy": 0.1, "eval/greedy": 0.7})
    draw_curve(folder)
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
