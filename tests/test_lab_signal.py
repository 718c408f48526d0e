"""The lab's experiment about groups that teach nothing."""
import math
import types

import pytest
import torch
from small_runs import INSTANT, SMALL, arguments, at_work, changed_weights, load

import common
import grpo
from lab import signal
from lab.entry import CONTRADICTED, NOT_SHOWN, SHOWN

# ---- how many groups are silent --------------------------------------------------------------

@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.8, 1.0])
def test_the_prediction_is_right_on_average_over_the_outputs_that_it_is_made_from(p):
    n, G = 9, 4
    chances = [math.comb(n, c) * p ** c * (1 - p) ** (n - c) for c in range(n + 1)]
    mean = sum(chance * signal.predicted(c, n, G) for c, chance in enumerate(chances))
    assert mean == pytest.approx(p ** G + (1 - p) ** G)


def test_one_half_of_the_outputs_predicts_and_the_other_is_measured():
    is_correct = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0, 1, 1]]).bool()
    found = signal.silence(is_correct, G=2)
    # of four outputs with two right ones, one pair in three is alike
    assert found["predicted"] == pytest.approx((1 + 1 / 3) / 2)
    assert found["measured"] == pytest.approx(3 / 4)
    assert found["from the mean"] == pytest.approx(0.75 ** 2 + 0.25 ** 2)


def test_problems_that_differ_have_more_silent_groups_than_their_mean_says():
    alike = torch.arange(128).remainder(2).bool().expand(2, -1)
    differing = torch.stack([torch.ones(128), torch.zeros(128)]).bool()
    assert signal.silence(differing, 4)["predicted"] == 1
    assert signal.silence(alike, 4)["predicted"] < signal.silence(alike, 4)["from the mean"]
    assert signal.silence(differing, 4)["from the mean"] == 2 / 16


# ---- training --------------------------------------------------------------------------------

def test_training_is_the_loop_of_the_script(tmp_path):
    flags = SMALL | {"operands": "2-3", "num_prompts": 16, "max_steps": 3, "dynamic_sampling": 2,
                     "curriculum": True, "num_mini_batches": 2, "num_eval_problems": 1}
    with at_work(tmp_path):
        grpo.main(arguments(flags | {"output_dir": "run"}))
    cfg = common.parse_flags(grpo.Config, arguments(flags))
    task = common.load_task(cfg, grpo.verify)
    policy = grpo.GPT(cfg)
    base = load(tmp_path / "run" / "base.pt")
    policy.load_state_dict(base)
    for _ in zip(range(3), signal.training(grpo, cfg, task, policy)):
        pass
    after = load(tmp_path / "run" / "checkpoint.pt")
    assert all(torch.equal(weight, after["policy"][name])
               for name, weight in policy.state_dict().items())
    assert changed_weights(base, after["policy"]), "nothing was learned"
    assert task.state == after["task"]


def test_groups_that_dynamic_sampling_leaves_out_are_counted():
    flags = {name: INSTANT[name] for name in INSTANT if name != "max_steps"}
    words = arguments(flags | {"dynamic_sampling": 2})
    policy = grpo.GPT(common.parse_flags(grpo.Config, words))       # untrained: always wrong
    curves = signal.learn(words, policy, budget=25)
    assert curves["samples"] == [12, 24, 36]                        # three times 2 groups of 2
    assert curves["all wrong"] == [1, 1, 1] and curves["all right"] == [0, 0, 0]
    assert curves["pass@1"] == [None, None, 0]


# ---- what was found --------------------------------------------------------------------------

def run_of(samples, scores, silent=(0.2, 0.6)):
    half = len(samples) // 2
    return {"samples": samples, "pass@1": scores, "all wrong": [0.1] * len(samples),
            "all right": [silent[0] - 0.1] * half + [silent[1] - 0.1] * half}


def test_scores_at_equal_samples_lie_between_two_evaluations():
    half = signal.BUDGET / 2
    run = run_of([half, 1.5 * half, 2.5 * half, 3 * half], [0.2, None, 0.5, 0.9])
    assert signal.at_equal_samples(run) == pytest.approx(0.4)


def test_scores_at_equal_steps_are_those_of_the_last_evaluation_that_both_runs_had():
    short = run_of([1, 2, 3, 4], [None, 0.2, None, 0.4])
    long = run_of([1, 2, 3, 4, 5, 6], [None, 0.1, None, None, None, 0.6])
    assert signal.at_equal_steps(short, long) == (0.2, 0.1)


def made_up(error=0.0, scores=(0.5, 0.6, 0.7), silent=(0.2, 0.6), shift=0.1):
    """What could be found: pass@1 of the variants in equal samples, silence early and late."""
    n = 12
    samples = [signal.BUDGET * (step + 1) / n for step in range(n)]
    runs = {}
    for name, score in zip(signal.VARIANTS, scores):
        runs[name] = [run_of(samples, [None] * (n - 1) + [score], silent)] * 3
    shares = {}
    for number, temperature in enumerate(signal.TEMPERATURES):
        measured = 0.5 + shift * number
        cell = {"predicted": measured - error, "from the mean": measured - 0.1,
                "measured": measured}
        shares[f"temperature {temperature}"] = {str(G): cell for G in signal.SIZES}
    return {"silence": shares, "runs": runs}


def verdicts(found):
    return [claim.verdict for claim in signal.claims(found)]


def test_verdicts_follow_what_was_found():
    assert verdicts(made_up()) == [SHOWN] * 7
    assert verdicts(made_up(error=0.06))[0] == NOT_SHOWN
    assert verdicts(made_up(error=-0.06))[0] == NOT_SHOWN
    assert verdicts(made_up(shift=-0.1))[2] == CONTRADICTED
    assert verdicts(made_up(silent=(0.6, 0.2)))[3] == CONTRADICTED
    worse = verdicts(made_up(scores=(0.6, 0.5, 0.6)))
    assert worse[4:] == [CONTRADICTED, CONTRADICTED, NOT_SHOWN]


def test_runs_are_sorted_by_variant_and_seed(monkeypatch):
    shares = (lambda seed: ({}, "policy"))
    monkeypatch.setattr(signal, "measure_silence", shares)
    monkeypatch.setattr(signal, "side_by_side", lambda function, jobs: [flags for flags, _ in jobs])
    runs = signal.measure([3, 5])["runs"]
    assert [flags[flags.index("--seed") + 1] for flags in runs["dynamic"]] == [3, 5]
    assert [name for name in runs if "--dynamic_sampling" in runs[name][1]] == ["dynamic"]
    assert [name for name in runs if "--curriculum" in runs[name][0]] == ["curriculum"]


def test_each_difficulty_is_measured_apart(monkeypatch):
    problems = [common.Problem("", "", difficulty=2 + row // signal.OUTPUTS % 2)
                for row in range(4 * signal.OUTPUTS)]
    outcomes = torch.tensor([1, 0, 1, 0])[:, None].expand(4, signal.OUTPUTS).bool()
    batch = types.SimpleNamespace(problems=problems, is_correct=outcomes)
    monkeypatch.setattr(signal, "load_base", lambda *_: (grpo.Config(), None, None))
    monkeypatch.setattr(grpo, "sample_batch", lambda *_: batch)
    shares, _ = signal.measure_silence(0)
    assert shares["operands 2"]["pass rate"] == 1 and shares["operands 3"]["pass rate"] == 0
    assert shares["temperature 0.1"]["4"]["measured"] == 1
    assert len(shares) == 2 + len(signal.TEMPERATURES)
