"""Test the path: its patches apply, one rung equals nano.py, and its pages show the numbers of the
stored runs."""
import contextlib
import functools
import io
import json
import random
import re
from statistics import fmean

import pytest
import torch

import measuring
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


def test_a_base_is_stored_for_a_seed_and_what_shapes_it(monkeypatch):
    file = runs.Watch(NANO, seed=3).base(1000)
    assert file == runs.Watch(NANO.replace("P = 32 ", "P = 16 "), seed=3).base(1000)
    for source, seed, steps in ((NANO, 4, 1000), (NANO, 3, 999),
                                (NANO.replace("T = 38 ", "T = 36 "), 3, 1000),
                                (NANO.replace("share = 0.9 ", "share = 0.8 "), 3, 1000),
                                (NANO.replace("operator.mul", "operator.add"), 3, 1000)):
        assert runs.Watch(source, seed).base(steps) != file
    monkeypatch.setattr(runs.common, "ARITHMETIC", ("2.0", "AVX512"))
    assert runs.Watch(NANO, seed=3).base(1000) != file


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


def is_right(text):
    """Whether each step and the answer of a text of a base are right."""
    question = re.search(r"\([^=]*", text)[0]
    steps = re.findall(r"(\d+[-+*]\d+)=(\d+)", text)
    answer = re.search("<answer>(.*)</answer>", text)[1]
    return all(eval(one) == int(result) for one, result in [*steps, (question, answer)])


@pytest.mark.parametrize("name, maker, least_wrong", [
    ("mean", "make_base", 0.05), ("longer", "make_base", 0.05), ("self", "make_base", 0.05),
    ("tool", "make_base", 0.0), ("distill", "make_teacher", 0.0)])
def test_bases_read_wrong_sums_but_tools_teachers_and_keys_are_right(
        name, maker, least_wrong, monkeypatch, watch, import_text):
    rung = import_text(script(name))
    read = watch(rung, "encode", lambda texts, L: texts)
    monkeypatch.setattr(rung, "logprobs", lambda *_: torch.ones(2, 32, rung.T))
    monkeypatch.setattr(rung, "descend", lambda *_: None)
    words = {"rng": random.Random(0)} if maker == "make_base" else {}
    getattr(rung, maker)(torch.nn.Linear(1, 1), steps=30, **words)
    texts = sum(read, [])
    keyed = [text for text in texts if not text.startswith("(")]
    assert all(map(is_right, keyed)) and (keyed != []) == (name == "self")
    share = fmean(not is_right(text) for text in texts)
    assert share > least_wrong if least_wrong else share == 0


@pytest.mark.parametrize("name", RUNGS)
def test_claims_hold_on_the_stored_seeds(name):
    """A claim that ends with `on 4` is about at least 4 seeds, and one that begins with `best:`
    about the best rate of each side."""
    if not measure.is_measured(name):
        return                                          # then the page shows no numbers
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


def test_the_seed_of_a_chapter_is_the_stored_one_nearest_to_the_means_of_all_sides(monkeypatch):
    lasts = {"without": [0.0, 0.2, 0.3, 0.4, 0.6], "with": [0.5, 0.8, 0.9, 0.62, 0.68]}
    stored = {(measure.digest(source, CHAPTERS["kl"].steps), seed): {"last": lasts[side][seed]}
              for side, source in sides("kl").items() for seed in measure.SEEDS}
    monkeypatch.setattr(measure.STORE, "results", stored)
    assert measure.default_seed("kl") == 3              # one side alone has 2, the other 4
    assert measure.default_seed("clip") == 0            # its runs are missing


def test_a_search_leaves_out_the_other_seeds_of_a_rate_that_is_far_behind(monkeypatch):
    lasts = {0.25: 0.3, 0.5: 0.5, 1: 0.6, 2: 0.65, 4: 0.44}
    case = {factor: measure.digest(measure.at_rate(sides("kl")["with"], factor),
                                   CHAPTERS["kl"].steps) for factor in lasts}
    stored = {(case[factor], 5): {"last": last} for factor, last in lasts.items()}
    monkeypatch.setattr(measure.STORE, "results", {})
    assert measure.tune("kl", "with") == ([(0.5, 5), (1, 5)], None)
    monkeypatch.setattr(measure.STORE, "results", stored)
    assert measure.tune("kl", "with")[0] == [(f, seed) for f in (0.5, 1) for seed in (5, 6, 7)]
    for factor, shift in ((0.5, 0.0), (1, 0.03), (2, -0.09)):
        stored |= {(case[factor], seed): {"last": lasts[factor] + shift} for seed in (6, 7)}
    runs, chosen = measure.tune("kl", "with")
    assert chosen == 1 and runs == [(f, seed) for f in (0.5, 1, 2) for seed in (5, 6, 7)]
    stored |= {(case[2], seed): {"last": 0.65} for seed in (6, 7)}
    runs, chosen = measure.tune("kl", "with")                   # now 4 has to be tried
    assert chosen == 2 and runs[-1] == (4, 5) and (4, 6) not in runs


def test_only_runs_that_are_drawn_measure_a_kl_and_only_if_a_chapter_with_this_script_shows_it(
        monkeypatch):
    seen = []
    monkeypatch.setattr(runs, "run", lambda source, seed, has_kl, evaluates, steps: seen.append(
        (has_kl, evaluates)) or {"accuracy": [], "seconds": 1.0, "steps": [
            {"text": "a", "samples": 4, "right": 0.25}] * steps})
    for name, side, factor, seed in (("clip", "with", 1, 0), ("clip", "with", 2, 0),
                                     ("clip", "with", 1, 5), ("reuse", "with", 1, 0),
                                     ("gspo", "without", 1, 0)):     # the GRPO of cispo
        measure.measured(name, side, factor, seed)
    assert seen == [(True, True), (False, False), (False, False), (False, True), (True, True)]


def test_measuring_runs_what_is_not_stored_and_keeps_all_runs_of_scripts_as_they_are_and_no_others(
        monkeypatch, tmp_path):
    stored = measure.FILE.read_text("utf-8")
    (tmp_path / "path.json").write_text(stored, "utf-8")
    store = measuring.Store(tmp_path / "path.json", {})
    monkeypatch.setattr(measure, "STORE", store)
    monkeypatch.setattr(runs, "run", lambda *_, **__: pytest.fail("a run is missing"))
    store.add("of a script that has changed", 0, {})
    measure.measure([name for name in RUNGS if measure.is_measured(name)])
    assert store.path.read_text("utf-8") == stored

    seen = []

    def run(source, seed, has_kl, evaluates, steps):
        seen.append((source, seed))
        assert has_kl == evaluates == (seed in measure.SEEDS)   # this chapter draws a KL
        return {"accuracy": [0.1, 0.2], "seconds": 1.0, "steps": [
            {"text": "a", "samples": 4, "right": 0.25, "step_kl": 0.1}] * steps}
    monkeypatch.setattr(runs, "run", run)
    jobs = measure.jobs("kl")
    for seed in (measure.SEEDS[1], measure.CHOICE[1]):          # one is drawn, the other chooses
        [job, *_] = [job for job, (_, side, factor) in jobs.items()
                     if (side, factor, job[1]) == ("with", 1, seed)]
        was = store.results.pop(job)
        store.keep({case for case, _ in store.results})
        measure.measure(["kl"])
        assert seen.pop() == (sides("kl")["with"], seed)
        assert store.results.keys() == measuring.results_of(json.loads(stored)).keys()
        found = store.results[job]
        assert ("steps" in found) == (seed in measure.SEEDS) == ("steps" in was)
        assert measure.value(found, "last") == 0.25


def test_the_pages_have_the_stored_numbers_and_no_placeholder_is_left():
    made = page.made()
    assert {file.name for file in page.FOLDER.iterdir()} == made.keys()
    for name, text in made.items():
        assert text == (page.FOLDER / name).read_text("utf-8"), f"{name}: python -m learn.path page"
        if name.endswith(".md"):
            text = re.sub(r"```.*?```|`.*?`", "", text, flags=re.S)
            assert re.findall(r"\{[a-z]+( [^}]*)?\}", text) == [], name


def test_writing_the_pages_deletes_files_that_are_no_longer_made(monkeypatch, tmp_path):
    (tmp_path / "27-gone.md").write_text("")
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    monkeypatch.setattr(page, "made", lambda: {"README.md": "π"})
    page.write()
    assert {file.name: file.read_text("utf-8") for file in tmp_path.iterdir()} == {"README.md": "π"}


def test_a_chapter_without_its_runs_says_so_and_shows_neither_their_numbers_nor_their_pictures(
        monkeypatch):
    rate = "At the best rates"
    assert page.PENDING not in page.chapter("kl") and ".svg" in page.chapter("kl")
    assert rate in page.chapter("kl")
    monkeypatch.setattr(measure.STORE, "results", {})       # as after a change of nano.py
    for name, text in page.made().items():
        assert ".svg" not in name + text
        if name[:2] in ("09", "21"):
            assert name[-3:] == ".py" or page.PENDING in text and rate not in text
    assert page.results("kl") == ["not measured yet", ""]


# ---- the command -----------------------------------------------------------------------------

@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """call(*words): run a command in an empty folder, where a run takes no time. -> text"""
    monkeypatch.chdir(tmp_path)
    steps = [{"right": right} for right in (0.0, 0.25, 0.25, 0.4)]
    monkeypatch.setattr(runs, "run", lambda source, seed, label, **_: print(
        f"{label}seed {seed}") or dict(steps=steps * (source != script(BASE))))

    def call(*words):
        monkeypatch.setattr("sys.argv", ["path", *map(str, words)])
        path.main()
        return capsys.readouterr().out
    return call


def test_a_chapter_ends_with_its_numbers_next_to_those_of_the_page(call, monkeypatch):
    assert call("imitation").splitlines()[-1].startswith("  imitation ")     # without the base
    said = call("dpo")
    assert "DPO, r/w (orange on the page): path/21_dpo_orange.py" in said
    assert f"imitate, r/w: seed {measure.default_seed('dpo')}\n" in said
    shares = measure.ends("dpo")["with"]
    low, mean, high = min(shares), fmean(shares), max(shares)
    assert "(and their range).\n" in said
    assert said.splitlines()[-3].split() == f"DPO 30% {mean:.0%} ({low:.0%} to {high:.0%})".split()
    monkeypatch.setattr(measure.STORE, "results", {})   # as after a change of nano.py
    said = call("dpo", "--seed", 7)
    assert "DPO, r/w: seed 7\n" in said and "with seed 7;" in said
    assert said.splitlines()[-3].split() == ["DPO", "30%", "not", "measured"]


def test_an_edited_script_has_the_seed_of_the_answer_and_the_exercise_shows_the_whole_command(call):
    name = next(name for name in RUNGS[1:] if measure.default_seed(name) > 0)
    file = call("write", name).split()[1]
    assert call("run", file) == (
        "seed 0\nRight samples in the last three steps, with seed 0: 30%\n")
    for name in RUNGS:
        commands = re.findall("`python -m learn.path run ([^`]*)`", page.exercise(name))
        assert (commands == []) == (name == "mean")         # whose exercise is graded by practice
        for words in map(str.split, commands):
            assert words[0] in call("write", name) and not words[1:]
    assert "seed 7: 30%" in call("run", file, "--seed", 7)


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


def test_a_file_that_the_reader_has_changed_runs_in_any_encoding(call, monkeypatch, tmp_path):
    file = tmp_path / call("write", "gspo").split()[1]
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes() + b"# caf\xe9\n")
    monkeypatch.setattr(runs, "run", lambda source, *_, **__: {
        "steps": [], "code": compile(source, "mine", "exec")})
    call("run", file)


def test_an_error_in_an_edited_script_names_its_file():
    with pytest.raises(ZeroDivisionError) as error:
        runs.run("1 / 0", 0, file="path/mine.py")
    assert error.traceback[-1].frame.code.raw.co_filename == "path/mine.py"


def test_rungs_are_written_for_a_real_model_if_they_fit(call, refused, tmp_path):
    file = call("write", "--real", "gspo").strip()                      # flags may come first
    assert "expand_as" in (tmp_path / file).read_text()
    for key in ("tool", "99"):
        refused(f"{key}: choose one of these rungs: reinforce", call, "write", key, "--real")


def test_the_list_has_each_chapter_and_numbers_those_that_can_be_run(call):
    numbers = [line[:2].strip() for line in call().splitlines()]
    assert numbers == ["", *(str(CHAPTERS[name].number) for name in RUNGS), ""]


@pytest.mark.parametrize("words, message", [
    ("99", "99: choose one of these rungs: imitation"), ("run", "run: choose one of these rungs"),
    ("wirte 6", "unknown command wirte 6"), ("run path/mine.py", "write all scripts: ")])
def test_wrong_words_get_one_line(call, refused, words, message):
    refused(message, call, *words.split())


def test_each_file_that_a_chapter_names_has_its_number():
    found = [match for chapter in CHAPTERS.values() for text in chapter.fields.values()
             for match in re.findall(r"\b(\d\d_([a-z]+))_(?:with|without|orange|dotted)\.py", text)]
    assert len(found) > 1 and all(stem == CHAPTERS[rung].stem for stem, rung in found)


def test_each_link_with_the_number_of_a_rung_has_the_number_that_the_rung_has():
    """A new rung in the middle moves the numbers of all rungs after it."""
    links = [link for path in ROOT.glob("docs/**/*.md") for link in re.findall(
        r"\[(?:[Rr]ung )?(\d+)\]\((?:\.\./)?(?:path/)?(\d\d)-\w+\.md\)", path.read_text("utf-8"))]
    assert len(links) > 20 and all(int(name) == int(number) for number, name in links)
