"""nano.py without each of its lines: the rows run, are measured one after the other, and are shown
when they are complete. And the mathematics before rung 1 agrees with PyTorch."""
from statistics import fmean

import pytest
import torch

from learn.path import lines, measure, runs
from learn.path.rungs import NANO

SMALL = (("P = 32 ", "P = 4 "), ("HELD_OUT = 500 ", "HELD_OUT = 4 "), ("T = 38 ", "T = 8 "))


def small(source):
    for old, new in SMALL:
        source = source.replace(old, new)
    return source


def store(monkeypatch, levels, judged=()):
    """Pretend that these rows are measured: levels has the share of right outputs that a row
    reaches at each factor of the rate, to which each seed adds a thousandth. judged: rows that are
    also measured under a judge's points, and end 0.1 lower there."""
    results = {}
    for name, by_factor in levels.items():
        for factor, level in by_factor.items():
            for seed in (*measure.SEEDS, *measure.CHOICE):
                right = [level + seed / 1000] * lines.ROWS[name].steps
                results[lines.case(name, factor), seed] = {"right": right, "accuracy": 0.9}
                if name in judged:
                    results[lines.case(name, factor, True), seed] = {
                        "right": [x - 0.1 for x in right], "accuracy": 0.8}
    monkeypatch.setattr(lines.STORE, "results", results)


@pytest.mark.parametrize("name", lines.ROWS)
def test_each_row_runs_and_only_nano_is_nano(name, monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "CACHE", tmp_path)
    both = (False, 0, 1), (True, 1, 17)
    for is_judged, low, high in both[:len(lines.predicted(name)) - 1]:
        source = lines.source(name, is_judged)
        one = runs.run(small(source), 0, has_kl=False, base_steps=2, steps=2)
        assert len(one["steps"]) == 2
        assert all(low <= step["reward"] <= high for step in one["steps"])
        assert (source == NANO) == (name in ("nano", "quarter") and not is_judged)


@pytest.mark.parametrize("text, fair, spread", [
    ("<think>3+4=7</think><answer>7</answer>", 7, 1), ("<answer>7</answer>", 7, 3),
    ("<answer>8</answer>", 5, 3), ("<answer></answer>", 5, 3), ("", 1, 3), ("<think>7", 1, 1),
    ("<answer>7</answer><answer>7</answer>", 1, 3)])
def test_a_judge_gives_points_with_mistakes_and_likes_some_questions_more(
        text, fair, spread, import_text):
    """Its mistakes are three times as large if it sees no thought."""
    module = import_text(lines.source("nano", is_judged=True))
    for question, liked in (("2=", 0), ("4=", 10)):
        points = torch.tensor([module.judge(question, 7, text) for _ in range(3000)])
        assert points.mean().item() == pytest.approx(fair + liked, abs=0.2)
        assert points.std().item() == pytest.approx(spread, rel=0.08)


def test_a_row_is_compared_at_the_best_rate_of_each_side(monkeypatch):
    rates = {"nano": {0.5: 0.5, 1: 0.6, 2: 0.7, 4: 0.1},
             "raw": {0.25: 0.1, 0.5: 0.75, 1: 0.5, 2: 0.2}}
    store(monkeypatch, rates)
    shared, own = lines.effects("raw")
    assert (shared.factor, own.factor) == (1, 0.5)
    assert shared.difference == pytest.approx(-10) and own.difference == pytest.approx(5)
    assert shared.interval == pytest.approx((-10, -10))
    assert shared.predicted == (-10, 0) and own.predicted == (-5, 0)
    outside = [shared._replace(predicted=ends).is_contradicted() for ends in (
        (-20, -9.9), (-10.1, 0), (0, 5), (-20, -10.1))]
    assert outside == [False, False, True, True]
    assert lines.predicted("single") + lines.predicted("tokens")[:1] == [(-6, 0), (-2, 2), (0, 3)]
    store(monkeypatch, rates, judged=["raw"])
    assert lines.complete() == ["nano", "raw"] and len(lines.effects("raw")) == 2   # nano has none
    store(monkeypatch, rates, judged=["nano", "raw"])
    *_, judged = lines.effects("raw")
    assert (judged.factor, judged.predicted) == (0.5, (-90, 0))
    assert judged.shares[0] == pytest.approx(0.65) and judged.difference == pytest.approx(5)
    for seed in measure.SEEDS:                          # of one seed, the difference is 12 points
        lines.STORE.results[lines.case("raw", 1), seed]["right"] = [0.5 + seed / 1000 - (
            0.02 if seed == 4 else 0)] * 80
    shared, *_ = lines.effects("raw")
    assert shared.difference == pytest.approx(-10.4)
    assert shared.interval == pytest.approx((-11.511, -9.289), abs=0.001)   # 0.4 * 2.776


def test_what_the_table_of_pieces_says_is_so():
    found = {name: lines.effects(name)[:2] for name in lines.complete()}
    assert all(len(lines.effects(name)) == len(lines.predicted(name)) for name in lines.ROWS)
    for name in ("raw", "tokens", "constant", "batch", "unscaled"):     # within the noise
        assert all(low < 0 < high for low, high in (one.interval for one in found[name])), name
    assert all(abs(one.difference) < 2 for name in ("tokens", "constant") for one in found[name])
    for name in ("unclipped", "penalty"):                               # about a point
        assert all(-1.6 < one.difference < -0.5 for one in found[name]), name
    assert found["single"][1].factor == 2 and -2 < found["single"][1].difference < 0
    best, above = (lines.effects(name)[-1] for name in ("imitation", "above"))  # the judge
    assert best.interval[1] < -50 and above.interval[0] < 0 < above.interval[1]     # 31% and 91%
    assert round(100 * fmean(above.shares)) == 91
    sums, eight = ([one.interval for one in found[x]] for x in ("raw_sums", "eight_unclipped"))
    assert all(low > 0 for low, _ in sums) and all(high < 0 for _, high in eight)


# ---- before rung 1 ---------------------------------------------------------------------------
