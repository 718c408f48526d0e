"""Test the path: its patches apply, one rung equals nano.py, and its page shows the numbers of the
stored runs."""
import argparse
import contextlib
import functools
import html
import importlib
import io
import math
import re
import shlex
import sys

import pytest
import torch

import nano
from learn.path import __main__ as path
from learn.path import measure, page, runs
from learn.path.rungs import BASE, CHAPTERS, LAST, NANO, RUNGS, script, sides


def test_a_watched_run_prints_what_the_file_prints(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(runs, "CACHE", tmp_path)
    monkeypatch.setattr(nano, "P", 4)
    monkeypatch.setattr(nano, "HELD_OUT", 50)
    source = NANO.replace("P = 32 ", "P = 4 ").replace("HELD_OUT = 500 ", "HELD_OUT = 50 ")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        nano.main(seed=3, base_steps=20, steps=2)
    for _ in range(2):                                      # the second run reads the stored base
        watch = runs.Watch(source, seed=3, base_steps=20)
        watch.run(3, base_steps=20, steps=2)
        assert watch.printed[-4:] == out.getvalue().splitlines()[-4:]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A folder for the bases of all runs of this module, so that each is made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "CACHE", tmp_path_factory.mktemp("bases"))
        yield


@functools.cache                # two chapters may compare the same script
def run_a_little(source, steps):
    """Run a script with few questions from a base that has learned little. -> number of steps that
    were seen"""
    for old, new in (("P = 256 ", "P = 8 "), ("P = 80 ", "P = 3 "), ("P = 32 ", "P = 2 "),
                     ("* 8:", "* 1:"), ("HELD_OUT = 500", "HELD_OUT = 4"), ("n=2048", "n=64"),
                     ("steps=150", "steps=1"), ("steps=60", "steps=1"), ("range(20)", "range(2)")):
        source = source.replace(old, new)
    torch.manual_seed(0)
    watch = runs.Watch(source, 0, base_steps=20)
    watch.module.verify = lambda answer, text: float(len(text) % 2)         # some are right
    watch.run(0, base_steps=20, steps=steps)
    return len(watch.steps)


@pytest.mark.parametrize("name", RUNGS)
def test_every_script_of_a_chapter_runs_two_steps_and_one_is_nano(name, bases):
    assert script(CHAPTERS[LAST].on) == NANO
    for source in sides(name).values():
        assert run_a_little(source, 2) == (0 if source == script(BASE) else 2)


# What the chapters ask you to change: the rung, a text of its script, and the text to write instead
CHANGES = """
    reinforce   | A = rewards.view(-1, 1)           | A = rewards.view(-1, 1) - 1
    reuse       | (P * G).chunk(2)                  | (P * G).chunk(4)
    reuse       | (P * G).chunk(2)                  | (P * G).chunk(16)
    ratio       | token_loss = -ratio * A           | token_loss = -ratio.detach() * logps * A
    clip        | = ratio.clamp                     | = print((ratio * mask).max()) or ratio.clamp
    rewardmodel | step == 0                         | step % 2 == 0
    drgrpo      | / T                               | / (T / 10)
    dynamic     | range(20)                         | range(2)
    longer      | / mask.sum(1)                     | / T
    overlong    | return A / (                      | return A # (
    critic      | [*torch.randperm(P).chunk(4)] * 4 | [*torch.randperm(P).chunk(4)]
    gae         | , lam=0.95)                       | , lam=0.0)
    dpo         | (logps - base_logps) * mask       | logps * mask
    tool        | ({torch.randint(1000, ()):03})    | (000)
    toolmask    | mask *= wrote(tokens)             | mask *= 1 - wrote(tokens)
    distill     | RATE = 5e-4                       | RATE = 2e-3"""
CHANGES = [[part.strip() for part in line.split(" | ")] for line in CHANGES.split("\n")[1:]]


@pytest.mark.parametrize("name", RUNGS)
def test_what_a_chapter_asks_you_to_try_can_be_pasted(name, bases, monkeypatch, tmp_path):
    """Spans of code on the page are commands, names, lines of the script, or changes that run."""
    asked = re.search("<h3>Try it</h3>(.*?)</div>", page.chapter(name, measure.load()), re.S)[1]
    spans = [html.unescape(span) for span in re.findall("<code>(.*?)</code>", asked)]
    source = sides(name)["with"]
    changes = [(old, new) for rung, old, new in CHANGES if rung == name]
    monkeypatch.chdir(tmp_path)
    for old, new in changes:
        before, found, after = source.rpartition(old)
        assert found and any(span in f"{old} | {new}" for span in spans), (spans, old, new)
        assert run_a_little(before + new + after, 1) == 1
    for span in spans:
        words = shlex.split(span)
        if words[:2] == ["python", "-m"]:
            monkeypatch.setattr(sys, "argv", words[2:])
            importlib.import_module(f"{words[2]}.__main__").main()
            assert [*tmp_path.rglob("*.py")]
        else:
            assert span in source or any(span in new for _, new in changes), span


def test_claims_hold_on_the_stored_seeds_and_a_wrong_sign_is_seen(monkeypatch):
    assert measure.check(RUNGS, measure.load())
    monkeypatch.setitem(CHAPTERS["clip"].fields, "claim", "with last < without last")
    assert not measure.check(["clip"], measure.load())


def test_the_page_has_the_stored_numbers(monkeypatch, tmp_path):
    monkeypatch.setattr(page, "DOCS", tmp_path)
    page.write(measure.load())
    for file in tmp_path.iterdir():
        assert file.read_text("utf-8") == (page.ROOT / "docs" / file.name).read_text("utf-8"), file


def test_rungs_are_written_and_run_on_a_real_model(monkeypatch, tmp_path, capsys):
    commands = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(path.subprocess, "run", lambda words: commands.append(words) or
                        argparse.Namespace(returncode=3))
    monkeypatch.setattr(path.sys, "argv", ["path", "write", "gspo", "--real"])
    path.main()
    file = capsys.readouterr().out.strip()
    assert "expand_as" in (tmp_path / file).read_text()
    for words, status in ((["run", "gspo", "--real", "model", "data"], 3),
                          (["run", file, "--real", "model"], 3), (["run", "gspo", "--real"], 2),
                          (["write", "tool", "--real"], 2), (["run", "99", "--real", "model"], 2)):
        monkeypatch.setattr(path.sys, "argv", ["path", *words])
        with pytest.raises(SystemExit) as stopped:
            path.main()
        assert stopped.value.code == status
    assert [[str(word) for word in words[1:]] for words in commands] == [
        [file, "model", "data"], [file, "model"]]


def test_a_file_that_the_reader_has_changed_is_not_written_over(monkeypatch, tmp_path, refused):
    monkeypatch.chdir(tmp_path)
    for end, *words in (("", "write"), ("_with", "write", "gspo"),
                        ("_real", "write", "gspo", "--real"),
                        ("_real", "run", "gspo", "--real", "model")):
        monkeypatch.setattr(path.sys, "argv", ["path", *words])
        if words[0] == "write":
            path.main()
        file = path.FOLDER / CHAPTERS["gspo"].file.replace(".py", f"{end}.py")
        file.write_text("mine")
        refused(f"{file}: differs from the script that would replace it", path.main)
        file.unlink()


def test_each_side_is_judged_at_the_rate_that_is_best_on_other_seeds(monkeypatch, tmp_path):
    """With the seeds of CHOICE, a run is right most often at 1/8 of RATE, or at twice RATE with the
    clip. With SEEDS, the clip is ahead at RATE and behind at these two rates."""
    ran = []

    def run(source, seed, steps):
        clips, rate = "clipped_ratio" in source, float(re.search("\nRATE = (.*?) ", source)[1])
        right = 1 - abs(math.log2(rate / (1e-3 if clips else 5e-4 / 8))) / 10
        if seed in measure.SEEDS:
            right = 0.6 if clips == (rate == 5e-4) else 0.4
        ran.append((source, seed))
        step = dict(right=right, kl=0.0, step_kl=0.0, cut=0.0, samples=256, text="")
        return dict(steps=[step] * steps, seconds=1, accuracy=[0.1, 0.2])
    monkeypatch.setattr(runs, "run", run)
    monkeypatch.setattr(measure, "STORED", tmp_path / "path.json")
    monkeypatch.setattr(measure, "RUNGS", ["clip"])
    monkeypatch.setitem(CHAPTERS["clip"].fields, "claim",
                        "without last < with last\nbest: with last < without last")
    for _ in range(2):                                  # the second time, nothing is left to run
        measure.measure(["clip"])
        measure.sweep(["clip"])
    assert len({*ran}) == len(ran)
    assert measure.best("clip", measure.load()) == {"without": 1 / 8, "with": 2, "also": 2}
    assert measure.highest({0.25: 0.0, 1: 0.0, 2: 0.0}) == 1            # if nothing is ever learned
    assert measure.check(["clip"], measure.load())
