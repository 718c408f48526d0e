"""The lab: verdicts, runs and pages, which all experiments share; that the pages tell what their
files hold; and that the scripts accept what the lab asks of them."""
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
from lab import bench, choices, draw, experiment, training, verdict
from lab import docs as runs

EXPERIMENTS = {name: bench.module(name).EXPERIMENT for name in bench.NAMES if bench.is_old(name)}
NEW = [name for name in bench.NAMES if not bench.is_old(name)]


# ---- verdicts --------------------------------------------------------------------------------

@pytest.mark.parametrize("n, quantile", [(2, math.tan(0.475 * math.pi)), (3, 0.95 / 0.04875 ** 0.5),
                                         (5, 2.776445), (12, 2.200985), (101, 1.983972)])
def test_the_interval_is_students(n, quantile):
    values = torch.randn(n, generator=torch.Generator().manual_seed(n)).double()
    low, high = verdict.student(values.tolist())
    assert (low + high) / 2 == pytest.approx(values.mean().item())
    half = quantile * values.std().item() / n ** 0.5
    assert (high - low) / 2 == pytest.approx(half, rel=1e-3)
    assert verdict.student([3.0]) == (-math.inf, math.inf)
    low, high = verdict.student([0.0, 1.0, 2.0], comparisons=5)     # of 99%: 9.925 / sqrt(3)
    assert (low, high) == pytest.approx((1 - 5.7301, 1 + 5.7301), rel=1e-3)


FIVE = [0.09, 0.1, 0.1, 0.1, 0.11]      # 0.1, from 0.091 to 0.109


@pytest.mark.parametrize("values, region, judged, seen", [
    (FIVE, {"at_least": 0.095}, "**undecided**", "+0.1000 (+0.0912 to +0.1088)"),
    (FIVE, {"at_least": 0.09121}, "**shown**", "+0.10000 (+0.09122 to +0.10878)"),
    ([1.9, 2, 2.1, 2.2], {"at_least": 1.87, "times": True}, "**undecided**",
     "2.05 times (1.85 to 2.26)"),
    (FIVE, {"at_least": 0.11, "unit": "nats"}, "**contradicted**",
     "+0.1000 nats (+0.0912 to +0.1088)"),
    ([0.1, -0.1, 0], {"at_least": 0.5}, "**contradicted**: no difference",
     "+0.00 (-0.25 to +0.25)"),
    (FIVE, {"at_most": 0.11}, "**shown**", "+0.1000 (+0.0912 to +0.1088)"),
    (FIVE, {"at_least": -0.1, "at_most": 0.1}, "**undecided**", "+0.1000 (+0.0912 to +0.1088)"),
    ([0.5], {"at_least": 0}, "**undecided**", "+0.500 (-inf to +inf)"),
    ([2, 8], {"at_least": 1.5, "times": True, "exact": True}, "**shown**", "2 to 8 times"),
    ([0.5, 0.5], {"at_least": 0.5, "exact": True}, "**shown**", "0.5"),
    ([0.5, 0.4], {"at_least": 0.5, "exact": True}, "**contradicted**", "0.4 to 0.5")])
def test_a_claim_is_shown_if_its_interval_lies_where_it_says(values, region, judged, seen):
    claim = verdict.Claim("so", verdict.OURS, values, said="It is so", **region)
    assert (claim.judged, claim.effect) == (judged, seen)
    assert claim.finding == "It is so" + " (undecided)" * ("undecided" in judged)


NEVER = experiment.ratio([math.inf] * 3, [20, 20, 21], 40, 10) | {"at_least": 1.2}
ONCE = experiment.ratio([30, 30, 30], [20, math.inf, 21], 40) | {"at_least": 1.2}
NEITHER = experiment.ratio([30, math.inf], [20, math.inf], 40) | {"at_least": 1.2}


@pytest.mark.parametrize("values, region, why, seen", [
    (([8, 9], [3, 4]), {"at_least": 2, "times": True, "smallest": 3},
     "one side has its smallest possible value", ""),
    (([8, 9], [3, 3]), {"at_least": 2, "times": True}, "one side is the same for all seeds", ""),
    (([0.9, 0.7], [0.995, 0.985]), {"at_least": 0.02}, "at the ceiling", ""),
    (([0.001, 0.5], [0.01, 0.02]), {"at_most": -0.02}, "at the floor", ""),
    (([0.3, 0.2, 0.4], [0.2, 0.1, 0.3]), {"at_least": 0.02}, "all seeds have the same effect", ""),
    (([0.9, 0.7], [0.985, 0.985]), {"at_most": 0.02}, "at the ceiling", ""),
    (([0.0, 0.01], [0.0, 0.002]), {"at_least": 0.005}, "at the floor", ""),
    (([1.0, 0.99], [1.0, 0.998]), {"at_least": -0.02}, "at the ceiling", ""),
    (NEVER["values"], NEVER, "with every seed, a run never reached the level",
     "more than 4.0 times"),
    (ONCE["values"], ONCE, "with 1 of 3 seeds, a run never reached the level",
     "less than 1.2 times"),
    (NEITHER["values"], NEITHER, "with 1 of 2 seeds, a run never reached the level", "unknown")])
def test_there_is_no_verdict_where_the_set_up_decides(values, region, why, seen):
    claim = verdict.Claim("so", verdict.OURS, **region | {"values": values}, said="So it is")
    assert (claim.verdict, claim.judged) == (verdict.NO_VERDICT, f"**no verdict**: {why}")
    assert seen in ("", claim.effect) and claim.finding == "So: no verdict"


@pytest.mark.parametrize("values, times", [([1, float("nan")], False), ([1, 0], True)])
def test_a_number_that_is_missing_is_no_effect(values, times):
    with pytest.raises(ValueError, match="^so: "):
        _ = verdict.Claim("so", verdict.OURS, values, at_least=1, times=times).verdict


def test_other_rules_and_choices_are_judged_and_leave_the_claims_as_they_were():
    assert choices.signed_ranks([1, 2, 3, 4, 5]) == (-math.inf, math.inf)
    # of six values, of 64 ways one has the lowest sum of ranks, two the lowest or the next
    assert choices.signed_ranks([1, 2, 3, 4, 5, 6]) == (1, 6)
    low, high = choices.bootstrap([0.0, 1.0])           # 0, 1/2 and 1: 1/4, 1/2, 1/4 of the time
    assert (low, high) == (0, 1)
    claim = verdict.Claim("so", verdict.OURS, FIVE, at_least=0.095)
    assert claim.verdict == choices.with_bound(claim, 1) == verdict.UNDECIDED
    assert choices.with_bound(claim, 0.5) == verdict.SHOWN
    assert choices.with_bound(claim, 2) == verdict.CONTRADICTED
    assert choices.with_interval(claim, lambda values, _: (0.1, 0.2)) == verdict.SHOWN
    assert claim.verdict == verdict.UNDECIDED and claim.at_least == 0.095


def test_a_logarithmic_axis_shows_geometric_means():
    for scale, means in ("log", [2, 4]), ("linear", [2.5, 8.5]):
        axis = Figure().subplots()
        draw.curves({"x": [[1, 1], [4, 16]]}, yscale=scale).fill(axis, False)
        [mean] = [line for line in axis.lines if line.get_linewidth() > 2]
        assert mean.get_ydata() == pytest.approx(means)
        axis = Figure().subplots()
        draw.dots({"x": [1, 4]}, xscale=scale).fill(axis, False)
        assert [text.get_text() for text in axis.texts] == [f"{means[0]:.2f}"]


# ---- an experiment, from its runs to its page ------------------------------------------------

@pytest.fixture
def docs(tmp_path, monkeypatch):
    """A folder docs/ with the page of the lab alone."""
    (tmp_path / "docs/lab").mkdir(parents=True)
    for page in ("README.md", "docs/lab.md"):
        shutil.copy(ROOT / page, tmp_path / page)
    for where in (runs, experiment):
        monkeypatch.setattr(where, "DOCS", tmp_path / "docs")
    here = contextlib.nullcontext(types.SimpleNamespace(map=map))       # instead of processes
    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", lambda *_: here)
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "docs"


def test_an_experiment_measures_judges_draws_and_tells(docs, monkeypatch):
    def run(script, folder, *flags):             # in this process, which is quicker
        assert flags[-4::2] == ("--base_seed", "--seed") and flags[-3] == str(flags[-1])
        return grpo.main([*map(str, flags), "--output_dir", str(folder)])

    def page(ends, twice):
        assert ends["a"]["reward"].shape == (2, 1) and ends["a"]["greedy"].shape == (2,)
        yield verdict.Claim("twice is more", "Somebody", twice["x"]["value"], at_least=1)
        rows = {"some": [1.0, math.inf], "all": [1.24, 1.26], "none": [math.inf]}
        draw.dots(rows, level=(2, "end")).save(docs / "lab/dots.svg")
        yield draw.curves({"x": twice["x"]["steps"]})
        yield experiment.numbers({"x": {"twice": twice["x"]["value"]}}, by="what")

    module = types.ModuleType("lab.claims.made_up")
    made_up = module.EXPERIMENT = experiment.Experiment(
        "lab/made_up.py", seeds=[3, 4])
    (docs / "lab/made_up.md").write_text("# Made up: nothing\n\n## Claim\n\nIt is so.\n")
    flags = " ".join(arguments(INSTANT | {"max_steps": 1}))
    made_up.runs("ends", {"a": f"grpo.py {flags}"}, ["reward"], ["greedy"])

    @made_up.measure(["x"], seeds=[1, 2])
    def twice(seed, case):
        return {"value": 2 * seed, "steps": [seed, 1 / 3][:seed]}       # one is shorter

    module.page = page
    monkeypatch.setitem(sys.modules, "lab.claims.made_up", module)
    monkeypatch.setattr(runs, "run", run)
    for name, value in (("NAMES", ["made_up"]), ("FINDINGS", ["made_up"]), ("DOCS", docs),
                        ("QUESTIONS", {"Rewards": ["made_up"]})):
        monkeypatch.setattr(bench, name, value)
    made_up.perform(processes=2)
    made_up.publish()
    found = json.loads((docs / "lab/made_up.json").read_text())
    assert found["twice"] == {"x": {"value": [2, 4], "steps": [[1], [2, 0.333333]]}}
    text = (docs / "lab/made_up.md").read_text()
    assert ("\nClaim by Somebody: twice is more. Verdict: **undecided**. "
            "Effect: +3 (-10 to +16); the claim needs ≥ 1.\n") in text
    assert text.count("twice is more") == 1         # the table does not repeat the first claim
    assert 'alt="Twice is more: undecided">' in text
    for drawn in ((docs / f"lab/dots{kind}.svg").read_text() for kind in ("", "-phone")):
        assert all(f">{label}<" in drawn for label in ("&gt; 1.50", "1.25", "never"))
        parts = ElementTree.fromstring(drawn).iter()
        styles = " ".join(part.get("style", "") for part in parts)
        for paint in re.findall(r"(?:fill|stroke): #\w+", styles):
            assert f'[style*="{paint}"]' in drawn, "it has no colour for dark pages"


@pytest.mark.parametrize("name", experiment.measured())
def test_the_page_follows_from_the_experiment_and_its_file(name):
    made = EXPERIMENTS[name]
    assert made.path(".md").read_text() == made.text()


@pytest.mark.parametrize("name", NEW)
def test_the_page_follows_from_the_stored_numbers(name):
    *_, text = bench.page(name)
    assert f"make lab-{name}: {name} -->\n{text}<!-- end" in (
        ROOT / f"docs/lab/{name}.md").read_text("utf-8")


def test_the_findings_are_those_of_the_experiments():
    for name, text in zip(("findings", "experiments"), bench.overview()):
        assert f"make lab: {name} -->\n{text}<!-- end" in (ROOT / "docs/lab.md").read_text()


def test_steps_are_counted_to_where_the_mean_of_two_crosses_the_level():
    rows = numpy.array([[0.3, 0.8, 0.5, 0.7, 0.7, 0.9], [0.3, 0.3, 0.4, 0.5, 0.5, 0.5]])
    assert experiment.steps_to_level(rows, 0.675).tolist() == pytest.approx([3.75, math.inf])
    assert experiment.steps_to_level(rows, 0.2).tolist() == [1, 1]      # from the first mean on
    assert experiment.steps_to_level(rows, 0.4, window=1).tolist() == pytest.approx([0.2, 2])
    never = experiment.numbers({"a": {"x": [3, math.inf]}, "b": {"x": [math.inf]}}, form=".0f")
    assert "| a | 3 or more; never in 1 of 2 runs |\n| b | never |" in never


# ---- runs ------------------------------------------------------------------------------------

def test_training_begins_with_the_base_and_is_the_loop_of_the_script(tmp_path):
    flags = SMALL | {"task": "arithmetic:2-3", "num_prompts": 16, "max_steps": 3,
                     "curriculum": True, "dynamic_sampling": 2, "num_eval_problems": 1}
    with at_work(tmp_path):
        grpo.main(arguments(flags | {"output_dir": "run"}))
        cfg, task, policy = training.load_base(grpo, shlex.join(arguments(flags)))
    base = load(tmp_path / "run/base.pt")["policy"]
    assert changed_weights(policy.state_dict(), base) == []
    for _ in zip(range(3), training.training(grpo, cfg, task, policy)):
        pass
    after = load(tmp_path / "run/checkpoint.pt")
    assert changed_weights(policy.state_dict(), after["policy"]) == []
    assert changed_weights(base, after["policy"]), "nothing was learned"
    assert task.state == after["task"]


# ---- what is asked of the scripts ------------------------------------------------------------

def test_the_scripts_accept_what_experiments_ask_for_and_learn_at_their_rates(monkeypatch):
    monkeypatch.setattr(inspect, "getsource", functools.cache(inspect.getsource))   # it is slow
    for made in EXPERIMENTS.values():
        known = {0, *map(float, re.findall(r"[\d.]+e-\d", made.rate))}
        for script, *flags in map(shlex.split, made.commands):
            module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
            cfg = plumbing.parse_flags(module.Config, flags)
            common.load_task(cfg, grpo.verify)
            assert made.rate == "" or cfg.learning_rate in known, f"{made.name}: {cfg}"
