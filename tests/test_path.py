"""Test the path: its patches apply, one rung equals nano.py, and its pages show the numbers of the
stored runs."""
import contextlib
import functools
import io
import random
import re

import pytest
import torch

import nano
from learn.path import __main__ as path
from learn.path import measure, page, runs
from learn.path.rungs import BASE, CHAPTERS, LAST, NANO, ROOT, RUNGS, script, sides


def test_a_watched_run_prints_what_the_file_prints(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(runs, "CACHE", tmp_path)
    monkeypatch.setattr(nano, "P", 4)
    monkeypatch.setattr(nano, "HELD_OUT", 9)
    source = NANO.replace("P = 32 ", "P = 4 ").replace("HELD_OUT = 500 ", "HELD_OUT = 9 ")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        nano.main(seed=3, base_steps=4, steps=2)
    kinds = ("greedy answers", "samples", "samples", "greedy answers")
    wanted = [f"mine: {kind}: {line}" for kind, line in zip(kinds, out.getvalue().split("\n")[-5:])]
    for _ in range(2):                                      # the second run reads the stored base
        seen = runs.run(source, 3, "mine: ", base_steps=4, steps=2)
        assert [step["samples"] for step in seen["steps"]] == [4 * nano.G] * 2
        printed = capsys.readouterr().out.splitlines()[-4:]
        assert [line.partition(", right ")[0] for line in printed] == wanted
    for _ in range(2):                                      # also what it draws before its main
        runs.run(source + "\nprint('drawn', torch.rand(1), random.random())", 3, "", base_steps=4,
                 steps=0)
    drawn = re.findall("^drawn.*", capsys.readouterr().out, re.M)
    assert len(drawn) == 2 and len({*drawn}) == 1


def test_a_step_is_summed_up_by_what_it_says():
    watch = runs.Watch(NANO.replace("G = 8 ", "G = 2 "), seed=0)
    rung = watch.module
    question, answer, *_ = rung.sample_problem(random.Random(0))
    right = f"<think><answer>{answer}</answer>"
    last = "<answer>" + "1" * (rung.T - 2)              # its end is in the last slot
    rows = [question + text for text in (right, last, last + "1", right)]
    policy = rung.GPT()
    tokens = rung.encode(rows, rung.W + rung.T)
    with torch.no_grad():
        logps, mask = watch.real["logprobs"](policy, tokens)
    watch.batches = [(policy, tokens, logps + 0.25, mask)] * 2
    watch.start = rung.GPT()
    found = watch.summary()
    assert found["text"] == question + last
    assert (found["right"], found["think"], found["cut"]) == (0.5, 0.5, 0.25)
    assert (found["silent"], found["samples"]) == (0.0, 8)
    assert found["wrong_tokens"] == rung.T + 0.5 and found["step_kl"] == pytest.approx(0.25)
    start_logps, _ = watch.real["logprobs"](watch.start, tokens)
    kl = ((logps + 0.25 - start_logps) * mask).sum() / mask.sum()
    assert found["kl"] == pytest.approx(kl.item())


def test_where_a_number_is_hidden_a_question_mark_is_right_and_a_wrong_number_made_up():
    watch = runs.Watch(script("reinforce", "reinforce"), seed=0, has_kl=False)
    rung, rng = watch.module, random.Random(0)
    problems = [rung.sample_problem(rng) for _ in range(99)]
    hides, shows = (next(one for one in problems if ("x" in one[0]) == hidden)
                    for hidden in (True, False))
    said = [(hides, "?"), (hides, hides[1]), (hides, hides[1] + 1), (shows, shows[1]), (shows, "?")]
    texts = [f"<answer>{answer}</answer>" for _, answer in said]
    rows = [question + text for ((question, *_), _), text in zip(said, texts)]
    watch.batches = [(None, rung.encode(rows, rung.W + rung.T))]
    found = watch.summary()
    assert (found["right"], found["made_up"]) == pytest.approx((2 / 5, 1 / 3))
    marks = [rung.marks(problem[1], text) for (problem, _), text in zip(said, texts)]
    assert marks == [0, 1, -1, 1, 0]


@functools.cache                # two chapters may compare the same script
def run_a_little(source, steps):
    """Run a script with few questions from a base that has learned little. -> number of steps that
    were seen"""
    for old, new in ((r"^P = \d+ ", "P = 4 "), (r"^T = 38 ", "T = 12 "), (r"^T = 62 ", "T = 30 "),
                     (r"\* 8:", "* 1:"), ("HELD_OUT = 500", "HELD_OUT = 4"), ("n=2048", "n=16"),
                     (r"\(20, 64\)", "(2, 8)"), ("steps=(150|60)", "steps=1"),
                     (r"range\(20\)", "range(2)"), ("^ROUND = 12 ", "ROUND = 1 "),
                     ("step >= 10", "step >= 0")):
        source = re.sub(old, new, source, flags=re.M)
    torch.manual_seed(0)
    watch = runs.Watch(source, 0)
    watch.module.verify = lambda answer, text: float(len(text) % 2)         # some are right
    watch.module.hint = lambda question, output: "07;" + question           # without an answer
    watch.module.main(seed=0, base_steps=2, steps=steps)
    return len(watch.steps)


@pytest.mark.parametrize("name", RUNGS)
def test_every_script_of_a_chapter_runs_and_one_is_nano(name, monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "CACHE", tmp_path)
    assert script(CHAPTERS[LAST].on) == NANO
    for source in sides(name).values():
        n = 1 + ("if step == 0" in source)              # others have no state between steps
        assert run_a_little(source, n) == (0 if source == script(BASE) else n)


@pytest.mark.parametrize("name", RUNGS)
def test_claims_hold_on_the_stored_seeds(name):
    """A claim that ends with `on 4` is about at least 4 seeds, and one that begins with `best:`
    about the best rate of each side."""
    assert measure.is_measured(name), "python -m learn.path measure"
    for line in CHAPTERS[name].fields.get("claim", "").splitlines():
        claim, _, least = line.removeprefix("best: ").partition(" on ")
        runs = measure.runs_of(name, at_best=line.startswith("best: "))
        (low, metric), *others = (part.split(" ", 1) for part in claim.split(" < "))
        holds = [measure.value(b, of_high) > measure.value(a, metric) for high, of_high in others
                 for a, b in zip(runs[low], runs[high], strict=True)]
        assert sum(holds) >= int(least or len(holds)), line


def test_a_run_is_stored_with_three_digits_but_all_of_its_outputs():
    steps = [{"text": "a", "samples": 2056, "right": 0.12345}]
    stored = measure.rounded({"accuracy": [], "seconds": 1.0, "steps": steps})["steps"]
    assert stored == {"samples": [2056], "right": [0.123]}


def test_the_pages_have_the_stored_numbers_and_no_placeholder_is_left():
    made = page.made()
    assert {file.name for file in page.FOLDER.iterdir()} == made.keys()
    for name, text in made.items():
        assert text == (page.FOLDER / name).read_text("utf-8"), f"{name}: python -m learn.path page"
        if name.endswith(".md"):
            text = re.sub(r"```.*?```|`.*?`", "", text, flags=re.S)
            assert re.findall(r"\{[a-z]+( [^}]*)?\}", text) == [], name


# ---- the command -----------------------------------------------------------------------------

@pytest.fixture
def call(monkeypatch, own_folder, capsys):
    """call(*words): run a command in an empty folder, where a run takes no time. -> text"""
    steps = [{"right": right} for right in (0.0, 0.25, 0.25, 0.4)]
    monkeypatch.setattr(runs, "run", lambda source, seed, label, **_: print(
        f"{label}seed {seed}") or dict(steps=steps * (source != script(BASE))))

    def call(*words):
        monkeypatch.setattr("sys.argv", ["path", *map(str, words)])
        path.main()
        return capsys.readouterr().out
    return call


@pytest.mark.parametrize("words", ["write", "write gspo", "gspo", "write gspo --real"])
def test_a_file_that_the_reader_has_changed_is_kept_and_the_original_goes_elsewhere(
        call, stops, words):
    call(*words.split())
    file = next(path.FOLDER.glob(f"{CHAPTERS['gspo'].stem}*"))
    original = file.read_text()
    file.write_text("mine")
    said = stops(f"{file}: differs from the original", call, *words.split())
    assert (f"learn.path run {file}" in said) == ("--real" not in words)
    call(*said.rpartition("learn.path ")[2].split())                # the command that it offers
    assert file.read_text() == "mine"
    assert (path.FOLDER / "original" / file.name).read_text() == original


def test_rungs_are_written_for_a_real_model_if_they_fit(call, refused, tmp_path):
    file = call("write", "--real", "gspo").strip()                      # flags may come first
    assert "expand_as" in (tmp_path / file).read_text()
    for key in ("tool", "99"):
        refused(f"{key}: choose one of these rungs: reinforce", call, "write", key, "--real")


@pytest.mark.parametrize("words, message", [
    ("99", "99: choose one of these rungs: imitation"), ("run", "run: choose one of these rungs"),
    ("wirte 6", "unknown command wirte 6"), ("run path/mine.py", "write all scripts: ")])
def test_wrong_words_get_one_line(call, refused, words, message):
    refused(message, call, *words.split())


def test_each_link_with_the_number_of_a_rung_has_the_number_that_the_rung_has():
    """A new rung in the middle moves the numbers of all rungs after it."""
    links = [link for path in ROOT.glob("docs/**/*.md") for link in re.findall(
        r"\[(?:[Rr]ung )?(\d+)\]\((?:\.\./)?(?:path/)?(\d\d)-\w+\.md\)", path.read_text("utf-8"))]
    assert len(links) > 20 and all(int(name) == int(number) for number, name in links)
