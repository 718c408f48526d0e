"""The lab: verdicts, measurements, charts and pages, which all experiments share; that the pages
tell what their files hold; and that the scripts accept what the lab asks of them."""
import concurrent.futures
import contextlib
import functools
import importlib
import inspect
import json
import math
import re
import shlex
import shutil
import sys
import types
from xml.etree import ElementTree

import numpy
import pytest
import torch
from conftest import ROOT
from matplotlib.figure import Figure
from small_runs import INSTANT, SMALL, arguments, at_work, changed_weights, load

import common
import grpo
import plumbing
from lab import bench, training
from lab import docs as runs
from lab.__main__ import main
from report import chart

# ---- verdicts --------------------------------------------------------------------------------


@pytest.mark.parametrize("n, quantile", [(2, math.tan(0.475 * math.pi)), (3, 0.95 / 0.04875 ** 0.5),
                                         (5, 2.776445), (12, 2.200985), (101, 1.983972)])
def test_the_interval_is_students(n, quantile):
    values = torch.randn(n, generator=torch.Generator().manual_seed(n)).double()
    low, high = bench.student(values.numpy())
    assert (low + high) / 2 == pytest.approx(values.mean().item())
    half = quantile * values.std().item() / n ** 0.5
    assert (high - low) / 2 == pytest.approx(half, rel=1e-3)
    low, high = bench.student([0.0, 1.0, 2.0], comparisons=5)       # of 99%: 9.925 / sqrt(3)
    assert (low, high) == pytest.approx((1 - 5.7301, 1 + 5.7301), rel=1e-3)


FIVE = [0.09, 0.1, 0.1, 0.1, 0.11]      # 0.1, from 0.091 to 0.109


@pytest.mark.parametrize("effect, region, verdict, measured", [
    (FIVE, {"at_least": 0.095}, "undecided", "0.1 (0.0912 to 0.109)"),
    (FIVE, {"at_least": 0.0912}, "shown", "0.1 (0.0912 to 0.109)"),
    (FIVE, {"at_least": 0.11}, "contradicted", "0.1 (0.0912 to 0.109)"),
    (FIVE, {"at_most": 0.11}, "shown", "0.1 (0.0912 to 0.109)"),
    (FIVE, {"at_least": -0.1, "at_most": 0.1}, "undecided", "0.1 (0.0912 to 0.109)"),
    (FIVE, {"at_least": 0.0912, "comparisons": 2}, "undecided", "0.1 (0.0889 to 0.111)"),
    ([1.9, 2, 2.1, 2.2], {"at_least": 1.87, "ratio": True}, "undecided",
     "2.05 times (1.85 to 2.26)"),
    (([2, 9, 9], [1, 3, 2]), {"at_least": 1, "ratio": True}, "shown", "3 times (1.1 to 8.21)"),
    (([0.5, 0.6], [0.3, 0.1]), {"at_least": 0.6}, "undecided", "0.35 (-1.56 to 2.26)"),
    ([2, 8], {"at_least": 1.5, "ratio": True, "exact": True}, "shown", "2 to 8 times"),
    ([0.5, 0.5], {"at_least": 0.5, "exact": True}, "shown", "0.5"),
    ([0.5, 0.4], {"at_least": 0.45, "exact": True}, "contradicted", "0.4 to 0.5")])
def test_a_claim_is_shown_if_its_interval_lies_where_it_says(effect, region, verdict, measured):
    claim = bench.Claim("so", "after VinePPO", effect, finding="It is so", **region)
    assert claim.cells()[:3] == ["so", f"**{verdict}**", measured]
    assert claim.cells()[4] == "after [VinePPO](https://arxiv.org/abs/2410.01679)"
    assert claim.title == "It is so" + " (undecided)" * (verdict == "undecided")


def test_a_claim_names_its_region_and_its_verdict_if_it_has_no_finding():
    for region, written in (((1, 9), "1 to 9"), ((1, math.inf), "≥ 1"), ((-math.inf, 0), "≤ 0")):
        claim = bench.Claim("so", bench.OURS, FIVE, *region)
        assert claim.title == "So: contradicted" and claim.cells()[3:] == [written, "ours"]


@pytest.mark.parametrize("effect, region, why", [
    (([0.9, 0.7], [0.995, 0.985]), {"at_least": 0.02}, "at the ceiling"),
    (([0.9, 0.7], [0.985, 0.985]), {"at_most": 0.02}, "at the ceiling"),
    (([1.0, 0.99], [1.0, 0.998]), {"at_least": -0.02}, "at the ceiling"),
    (([0.001, 0.5], [0.01, 0.02]), {"at_most": -0.02}, "at the floor"),
    (([0.0, 0.01], [0.0, 0.002]), {"at_least": 0.005}, "at the floor"),
    (([0.3, 0.2, 0.4], [0.2, 0.1, 0.3]), {"at_least": 0.02}, "all seeds have the same effect"),
    (([math.inf] * 3, [20, 20, 21]), {"at_least": 1.2, "ratio": True},
     "with 3 of 3 seeds, a run never reached the level"),
    (([30, math.inf], [math.inf, math.inf]), {"at_least": 1.2, "ratio": True},
     "with 2 of 2 seeds, a run never reached the level"),
    ([1, 2, math.inf], {"at_least": 0.5}, "with 1 of 3 seeds, a run never reached the level")])
def test_there_is_no_verdict_where_the_set_up_decides(effect, region, why):
    claim = bench.Claim("so", bench.OURS, effect, finding="So it is", **region)
    assert claim.verdict == bench.NO_VERDICT and claim.cells()[1] == f"**no verdict**: {why}"
    assert claim.title == "So: no verdict"


def test_steps_are_counted_to_where_the_mean_crosses_the_level():
    rows = numpy.array([[0.3, 0.8, 0.5, 0.7, 0.7, 0.9], [0.3, 0.3, 0.4, 0.5, 0.5, 0.5]])
    assert bench.steps_to(rows, 0.675, 2).tolist() == pytest.approx([3.75, math.inf])
    assert bench.steps_to(rows, 0.2, 2).tolist() == [1, 1]          # from the first mean on
    assert bench.steps_to(rows, 0.4, 1).tolist() == pytest.approx([0.2, 2])
    cells = {"a": {"x": numpy.array([3, math.inf])}, "b": {"x": numpy.array([0.5, 0.5])}}
    table = "| by | x |\n| --- | --- |\n| a | never (3 to never) |\n| b | 0.5 |\n"
    assert bench.numbers(cells, "by") == table


# ---- charts ----------------------------------------------------------------------------------

def test_a_logarithmic_axis_shows_geometric_means():
    for scale, means in ("log", [2, 4]), ("linear", [2.5, 8.5]):
        axis = Figure().subplots()
        chart.curves(axis, {"x": [[1, 1], [4, 16]]}, yscale=scale)
        [mean] = [line for line in axis.lines if line.get_label() == "x"]
        assert mean.get_ydata() == pytest.approx(means)
        axis = Figure().subplots()
        chart.dots(axis, {"x": [1, 4]}, xscale=scale)
        assert [text.get_text() for text in axis.texts] == [f"x: {means[0]:g}"]


def test_a_chart_is_readable_on_light_and_on_dark_pages(tmp_path):
    with chart.figure(tmp_path / "a.svg") as axis:
        rows = {"some": [1, math.inf], "all": [0.12, 0.13], "none": [math.inf]}
        chart.dots(axis, rows, end=2, xlabel="far")
    text = (tmp_path / "a.svg").read_text("utf-8")
    ElementTree.fromstring(text)
    assert "prefers-color-scheme: dark" in text
    for label in ("some: not all arrive", "all: 0.125", "none: never", "far"):
        assert f">{label}<" in text
    letters = re.findall(r'<text style="([^"]*)', text)
    assert letters and all(f"fill: {chart.INK}" in style for style in letters)


# ---- an experiment, from its runs to its page ------------------------------------------------

def measured(case, seed):
    """A measure whose second seed has one number more."""
    return {"value": 2 * seed, "steps": [seed, 1 / 3][:seed - 2]}


def page(x):
    assert x["a"]["reward"].shape == (1, 1) and x["a"]["greedy"].shape == (1,)
    yield bench.Claim("twice is more", "Somebody", x["x"]["value"], at_least=1)
    yield lambda axis: chart.curves(axis, {"x": x["x"]["steps"]})
    yield bench.numbers({"x": {"twice": x["x"]["value"]}}, "what")


@pytest.fixture
def docs(tmp_path, monkeypatch):
    """A folder docs/ with the page of an experiment, whose runs are in this process, and of the
    lab."""
    def run(script, folder, *flags):
        assert script == "grpo.py" and flags[-4:] == ("--base_seed", "3", "--seed", 3)
        return grpo.main([*map(str, flags), "--output_dir", str(folder)])
    (tmp_path / "docs/lab").mkdir(parents=True)
    for name in ("README.md", "docs/lab.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "docs/lab/made_up.md").write_text(
        "# Made up\n\n<!-- made by make lab-made_up: made_up -->\n<!-- end of made_up -->\n\nBy me")
    flags = " ".join(arguments(INSTANT | {"max_steps": 1}))
    monkeypatch.setitem(sys.modules, "lab.claims.made_up", types.SimpleNamespace(
        SEEDS=(3, 4), RUNS={"a": f"grpo.py {flags}"}, METRICS=["reward"], SCORES=["greedy"],
        CASES=["x"], FEWER={"a": (3,)}, measure=measured, page=page))
    here = contextlib.nullcontext(types.SimpleNamespace(map=map))       # instead of processes
    for where, name, value in (
            (runs, "ROOT", tmp_path), (bench, "ROOT", tmp_path), (runs, "run", run),
            (runs, "DOCS", tmp_path / "docs"), (bench, "DOCS", tmp_path / "docs"),
            (bench, "NAMES", ("made_up",)), (bench, "FINDINGS", ("made_up",)),
            (bench, "QUESTIONS", {"Rewards": ("made_up",)}),
            (bench, "first_steps", lambda name: [0.1]),
            (concurrent.futures, "ProcessPoolExecutor", lambda *_: here),
            (bench.subprocess, "run", lambda *_, **__: types.SimpleNamespace(stdout="c"))):
        monkeypatch.setattr(where, name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "docs"


def test_an_experiment_measures_judges_draws_and_tells(docs):
    main(["made_up", "--processes", "2"])
    stored = json.loads((docs / "lab/made_up.json").read_text())
    assert stored["x"] == {"value": [6, 8], "steps": [[3], [4, 0.333333]]}
    assert stored["about"]["processes"] == 2 and stored["about"]["commit"] == "c"
    text = (docs / "lab/made_up.md").read_text()
    assert text.startswith("# Made up\n\n") and text.endswith("\n\nBy me")
    assert "**Twice is more: undecided.**\n\n![chart](made_up.svg)\n" in text
    assert "| twice is more | **undecided** | 7 (-5.71 to 19.7) | ≥ 1 | Somebody |" in text
    assert "| x | 7 (6 to 8) |" in text and "seeds 3 to 4, each with its own base" in text
    lab = (docs / "lab.md").read_text()
    assert "**Twice is more: undecided** ([made_up](lab/made_up.md)).\n\n![chart](lab/made" in lab
    assert "Of 1 claims, 0 shown, 0 contradicted, 1 undecided, and 0 without a verdict." in lab
    assert "| Twice is more: undecided | **undecided** | Somebody: twice is more | [made" in lab
    assert (docs / "lab/made_up.svg").exists()
    assert not (docs.parent / "runs/lab-made_up.json").exists()


def test_a_measurement_that_was_interrupted_continues_unless_the_code_is_new(docs, monkeypatch):
    jobs = []

    def perform(name, case, seed):
        jobs.append((case, seed))
        if len(jobs) in (2, 4):
            raise KeyboardInterrupt
        return {"value": seed}
    monkeypatch.setattr(bench, "perform", perform)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            bench.measure("made_up", 1)
        monkeypatch.setattr(bench, "MACHINE", "another machine")
    bench.measure("made_up", 1)
    assert jobs == [("a", 3), ("x", 3), ("a", 3), ("x", 3), ("x", 3), ("x", 4)]
    stored, about = bench.load("made_up")
    assert stored["a"]["value"].tolist() == [3] and stored["x"]["value"].tolist() == [3, 4]
    assert about["machine"] == "another machine"


@pytest.mark.parametrize("name", bench.NAMES)
def test_the_page_follows_from_the_stored_numbers(name):
    *_, text = bench.page(name)
    assert f"make lab-{name}: {name} -->\n{text}<!-- end" in (
        ROOT / f"docs/lab/{name}.md").read_text("utf-8")


def test_the_findings_are_those_of_the_experiments():
    for name, text in zip(("findings", "experiments"), bench.overview()):
        assert f"make lab: {name} -->\n{text}<!-- end" in (ROOT / "docs/lab.md").read_text("utf-8")


# ---- runs ------------------------------------------------------------------------------------

def test_training_begins_with_the_base_and_is_the_loop_of_the_script(tmp_path):
    flags = SMALL | {"task": "arithmetic:2-3", "num_prompts": 16, "max_steps": 3,
                     "curriculum": True, "dynamic_sampling": 2, "num_eval_problems": 1}
    with at_work(tmp_path):
        grpo.main(arguments(flags | {"output_dir": "run"}))
        cfg, task, policy = training.load_base(grpo, shlex.join(arguments(flags)))
    base = load(tmp_path / "run/base.pt")["policy"]
    assert changed_weights(policy.state_dict(), base) == []
    for _ in zip(range(3), training.training(cfg, task, policy)):
        pass
    after = load(tmp_path / "run/checkpoint.pt")
    assert changed_weights(policy.state_dict(), after["policy"]) == []
    assert changed_weights(base, after["policy"]), "nothing was learned"
    assert task.state == after["task"]


def test_the_scripts_accept_what_experiments_ask_for_and_learn_at_the_rates_of_their_pages(
        monkeypatch):
    monkeypatch.setattr(inspect, "getsource", functools.cache(inspect.getsource))   # it is slow
    for name in bench.NAMES:
        page = (ROOT / f"docs/lab/{name}.md").read_text("utf-8")
        stated = re.search("Tuned: (.*)", page)
        for script, *flags in map(shlex.split, getattr(bench.module(name), "RUNS", {}).values()):
            module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
            cfg = plumbing.parse_flags(module.Config, flags)
            common.load_task(cfg, grpo.verify)
            assert name == "rates" or cfg.learning_rate in map(
                float, re.findall(r"\d[\d.]*e-\d", stated[1])), f"{name}: {cfg}"
