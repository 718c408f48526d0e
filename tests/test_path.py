"""Test the path: its patches apply, one rung equals nano.py, and its page shows the numbers of the
stored runs."""
import contextlib
import functools
import io
import math
import random
import statistics

import pytest
import torch

import nano
from learn.path import __main__ as path
from learn.path import measure, page, runs
from learn.path.rungs import BASE, CHAPTERS, LAST, NANO, RUNGS, script, sides


def test_a_watched_run_prints_what_the_file_prints(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(runs, "CACHE", tmp_path)
    monkeypatch.setattr(nano, "P", 4)
    monkeypatch.setattr(nano, "HELD_OUT", 9)
    source = NANO.replace("P = 32 ", "P = 4 ").replace("HELD_OUT = 500 ", "HELD_OUT = 9 ")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        nano.main(seed=3, base_steps=4, steps=2)
    for _ in range(2):                                      # the second run reads the stored base
        watch = runs.Watch(source, seed=3, base_steps=4, label="mine: ")
        watch.run(3, base_steps=4, steps=2)
        assert watch.printed[-4:] == out.getvalue().splitlines()[-4:]
    before, *steps, after = capsys.readouterr().out.splitlines()[-4:]
    assert {before[:31], after[:31]} == {"mine: greedy answers: held-out "}
    assert [line[:21] for line in steps] == ["mine: samples: step 0", "mine: samples: step 1"]


def test_a_base_is_stored_for_a_seed_and_what_shapes_it():
    file = runs.Watch(NANO, seed=3).file
    assert file == runs.Watch(NANO.replace("P = 32 ", "P = 16 "), seed=3).file
    for source, seed in ((NANO, 4), (NANO.replace("T = 38 ", "T = 36 "), 3),
                         (NANO.replace("share = 0.9 ", "share = 0.8 "), 3)):
        assert runs.Watch(source, seed).file != file


def test_a_step_is_summed_up_by_what_it_says():
    watch = runs.Watch(NANO.replace("G = 8 ", "G = 2 "), seed=0)
    rung = watch.module
    question, answer, _ = rung.sample_problem(random.Random(0))
    right = f"<think><answer>{answer}</answer>"
    last = "<answer>" + "1" * (rung.T - 2)              # its end is in the last slot
    rows = [question + text for text in (right, last, last + "1", right)]
    policy = rung.GPT()
    tokens = rung.encode(rows, rung.W + rung.T)
    with torch.no_grad():
        logps, mask = watch.real["logprobs"](policy, tokens)
    watch.batches = [(policy, tokens, logps + 0.25, mask, kl) for kl in (0.5, 1.5)]
    found = watch.summary()
    assert found["text"] == question + last
    assert (found["right"], found["think"], found["cut"], found["kl"]) == (0.5, 0.5, 0.25, 1.0)
    assert (found["silent"], found["samples"]) == (0.0, 8)
    assert found["wrong_tokens"] == rung.T + 0.5 and found["step_kl"] == pytest.approx(0.25)


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
                     ("T = 38 ", "T = 12 "), ("T = 62 ", "T = 30 "),
                     ("* 8:", "* 1:"), ("HELD_OUT = 500", "HELD_OUT = 4"), ("n=2048", "n=16"),
                     ("(20, 64)", "(2, 8)"),
                     ("steps=150", "steps=1"), ("steps=60", "steps=1"), ("range(20)", "range(2)")):
        source = source.replace(old, new)
    torch.manual_seed(0)
    watch = runs.Watch(source, 0, base_steps=2)
    watch.module.verify = lambda answer, text: float(len(text) % 2)         # some are right
    watch.module.hint = lambda question, output: "07;" + question           # without an answer
    watch.run(0, base_steps=2, steps=steps)
    return len(watch.steps)


@pytest.mark.parametrize("name", RUNGS)
def test_every_script_of_a_chapter_runs_and_one_is_nano(name, bases):
    assert script(CHAPTERS[LAST].on) == NANO
    for source in sides(name).values():
        n = 1 + ("if step == 0" in source)              # others have no state between steps
        assert run_a_little(source, n) == (0 if source == script(BASE) else n)


@pytest.mark.parametrize("name", RUNGS)
def test_claims_hold_on_the_stored_seeds(name):
    """A claim that ends with `on 4` is about at least 4 seeds, and one that begins with `best:`
    about the best rate of each side."""
    stored = measure.load()
    for line in CHAPTERS[name].fields.get("claim", "").splitlines():
        claim, _, least = line.removeprefix("best: ").partition(" on ")
        factors = measure.best(name, stored) if line.startswith("best: ") else None
        runs = measure.runs_of(name, stored, factors)
        (low, metric), *others = (part.split(" ", 1) for part in claim.split(" < "))
        holds = [measure.value(b, of_high) > measure.value(a, metric) for high, of_high in others
                 for a, b in zip(runs[low], runs[high], strict=True)]
        assert sum(holds) >= int(least or len(holds)), line


def test_a_level_is_reached_by_the_mean_of_three_steps_even_of_the_last_three():
    one = {"steps": {"right": [0.75, 0.0, 0.0, 0.75, 0.75], "samples": [10, 20, 30, 40, 50]}}
    for level, samples in ((0.25, 60), (0.5, 150), (0.6, math.inf)):
        assert measure.value(one, f"samples_to {level}") == samples


def test_the_seed_of_a_chapter_is_the_stored_one_nearest_to_the_means_of_all_sides():
    lasts = {"without": [0.0, 0.2, 0.3, 0.4, 0.6], "with": [0.5, 0.8, 0.9, 0.62, 0.68]}
    stored = {measure.digest(source, seed, measure.steps_of("kl")): {"last": lasts[side][seed]}
              for side, source in sides("kl").items() for seed in measure.SEEDS}
    assert measure.default_seed("kl", stored) == 3      # one side alone has 2, the other 4
    assert measure.default_seed("kl", {}) == 0
    assert measure.default_seed("reinforce", measure.load()) in measure.SEEDS


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """call(*words): run a command in an empty folder, where a run takes no time. -> text"""
    monkeypatch.chdir(tmp_path)
    steps = [{"right": right, "text": ""} for right in (0.0, 0.25, 0.25, 0.4)]
    monkeypatch.setattr(runs, "run", lambda source, seed, number=0, label=None, **_: print(
        f"{label}seed {seed}") or dict(steps=steps * (source != script(BASE)), seconds=0.0,
                                       accuracy=[0.5]))

    def call(*words):
        monkeypatch.setattr("sys.argv", ["path", *map(str, words)])
        path.main()
        return capsys.readouterr().out
    return call


def test_a_chapter_ends_with_its_numbers_next_to_those_of_the_page(call):
    stored = measure.load()
    said = call("dpo")
    assert "DPO, r/w (orange on the page): path/20_dpo_orange.py" in said
    assert f"imitate, r/w: seed {measure.default_seed('dpo', stored)}\n" in said
    assert "also" not in said and "fourth" not in said and "nan" not in call("reinforce")
    shares = [measure.value(one, "last") for one in measure.runs_at("dpo", "with", stored)]
    low, mean, high = min(shares), statistics.fmean(shares), max(shares)
    assert said.splitlines()[-3].split() == f"DPO 30% {mean:.0%} ({low:.0%} to {high:.0%})".split()
    assert "seed 7" in call("dpo", "--seed", 7)


def test_an_edited_script_has_the_seed_of_its_chapter(call):
    name, seed = next((name, seed) for name in RUNGS[1:]
                      if (seed := measure.default_seed(name, measure.load())) > 0)
    file = f"path/{CHAPTERS[name].file.replace('.py', '_with.py')}"
    call("write", name)
    assert call("run", file) == (
        f"seed {seed}\nRight samples in the last three steps, with seed {seed}: 30%\n")
    assert "seed 7: 30%" in call("run", file, "--seed", 7)


def test_an_edited_script_may_have_a_mark_or_bytes_of_another_encoding(
        call, refused, monkeypatch):
    call("write", "--real", "gspo")                             # flags may come first
    call("write", "gspo")
    file = path.FOLDER / CHAPTERS["gspo"].file.replace(".py", "_with.py")
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes() + b"# caf\xe9\n")
    monkeypatch.setattr(runs, "run", lambda source, *_, **__: {
        "steps": [], "code": compile(source, "mine", "exec")})
    call("run", file)
    refused("differs from the original", call, "write", "gspo")


def test_an_error_in_an_edited_script_names_its_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ZeroDivisionError) as error:
        runs.run("1 / 0", 0, file="path/mine.py")
    assert error.traceback[-1].frame.code.raw.co_filename == "path/mine.py"


def test_the_list_has_a_number_for_each_rung_that_can_be_run_and_help_for_the_rest(call, refused):
    lines = call().splitlines()
    numbers = [line.split()[0] for line in lines if line.strip()[0].isdigit()]
    rest = [line for line in lines if line[:2] == "  "]
    assert path.rungs([word for word in numbers if not word.endswith(".py")]) == RUNGS
    for number, line in zip((0, 1 + len(RUNGS)), rest, strict=True):
        assert "-m learn.path " in line
        refused(line.split(maxsplit=1)[1], call, number)


def test_storing_a_run_keeps_all_runs_of_scripts_as_they_are_and_no_others(monkeypatch, tmp_path):
    stored = measure.load()
    monkeypatch.setattr(measure, "STORED", tmp_path / "path.json")
    measure.save(stored | {"of a script that has changed": {}})
    assert measure.load() == stored


def test_the_page_has_the_stored_numbers(monkeypatch, tmp_path):
    monkeypatch.setattr(page, "DOCS", tmp_path)
    page.write(measure.load())
    for file in tmp_path.iterdir():
        assert file.read_text("utf-8") == (page.ROOT / "docs" / file.name).read_text("utf-8"), file


def test_rungs_are_written_for_a_real_model(monkeypatch, tmp_path, capsys, refused):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["path", "write", "gspo", "--real"])
    path.main()
    assert "expand_as" in (tmp_path / capsys.readouterr().out.strip()).read_text()
    for key, message in (("tool", "does not run on a real model"), ("99", "is not a rung")):
        monkeypatch.setattr("sys.argv", ["path", "write", key, "--real"])
        refused(message, path.main)


def test_a_file_that_the_reader_has_changed_is_kept_and_the_original_goes_elsewhere(call, stops):
    for end, *words in (("", "write"), ("_with", "write", "gspo"), ("_with", "gspo"),
                        ("_real", "write", "gspo", "--real")):
        call(*words)
        file = path.FOLDER / CHAPTERS["gspo"].file.replace(".py", f"{end}.py")
        original = file.read_text()
        file.write_text("mine")
        said = stops(f"{file}: differs from the original", call, *words)
        assert (f"learn.path run {file}" in said) == (end != "_real")
        call(*said.rpartition("learn.path ")[2].split())            # the command that it offers
        assert file.read_text() == "mine"
        assert (file.parent / "original" / file.name).read_text() == original
        file.unlink()
