"""report.check names what is wrong in a run, and nothing in a correct one, and reads anybody's log.
tests/trainer is from a run of TRL 1.16 with a constant reward and a model of random weights; what
tests/logs contains is in its README."""
import contextlib
import csv
import gzip
import json
import math
import re
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT
from small_runs import SMALL, arguments, at_work
from test_pages import PAGES

from learn.practice import hunt
from report import formats
from report.check import PARTS, check, decided, described, main, parts, summary, warnings
from report.formats import NAMES, Run, own_names_in, read

FLAGS = {"num_iterations": 1, "num_mini_batches": 2}
GOOD = {"frac_reward_zero_std": 0.2, "grad_norm": 1.0, "max_log_ratio": 0.5, "entropy": 0.2,
        "sampling/surprise": 0.21}
LOGS = ROOT / "tests/logs"
# Runs in which nobody can find more in so few steps; the check says how large a rise would show
UNDECIDED = {"broken-real-off-by-one", "broken-trl-real-sign", "broken-trl-real-wrong-answers"}
VERDICTS = [*csv.DictReader((LOGS / "verdicts.tsv").open(encoding="utf-8"), delimiter="\t")]


def run_of(n=20, trainer="ours", flags=FLAGS, samples=(), **changes):
    """Make a run whose reward rises. changes: the first and the last value of a metric, or a
    function of the step; None leaves it out"""
    at = lambda change, i: change(i) if callable(change) else (change or [None] * 2)[i >= n // 2]
    steps = [GOOD | {"reward": 0.3 + 0.02 * i, "kl": 0.01 * i, "step": i + 1}
             | {name: at(change, i) for name, change in changes.items()} for i in range(n)]
    steps = [{name: x for name, x in one.items() if x is not None} for one in steps]
    names = dict.fromkeys(name for one in steps for name in one)
    sets = [name for name in names if name.startswith("eval/")]
    added = [name for name in names if name.startswith("rewards/right")]
    return Run(trainer, SimpleNamespace(**flags), steps, {
        name: name for name in names if name not in ("step", *sets, *added)}, sets, samples,
        "a run", added)


def test_a_reward_of_the_tests_that_a_policy_sees_is_named(tmp_path):
    """The share of programs that pass all tests is read, and the line says what rises."""
    falls = [0.3, 0.8, 0.8, 0.0]
    steps = [GOOD | {"step": i, "reward": 0.3 + 0.02 * i, "eval/greedy": 0.9,
                     "eval/greedy_all_tests": falls[i // 10]} for i in range(40)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    (tmp_path / "config.json").write_text('{"script": "grpo.py", "config": {}}')
    assert check(read(tmp_path)) == ["held-out falls: eval/greedy_all_tests from 0.8 to 0, but the "
                                     "reward rises: it pays for something else (#held-out)"]


def anchors(**changes):
    return [part for text in check(run_of(**changes)) for part in re.findall(r"\(#(.*?)\)", text)]


def differing(difference, trainer):
    """The metrics of a run whose sampler and trainer differ by so much, which is corrected."""
    return {"sampling/sampling_logp_difference/mean": [difference] * 2, "trainer": trainer,
            "sampling/importance_sampling_ratio/mean": [1.0, 1.0]}


def noise(i):
    return 0.25 * (-1) ** (i * i // 3)


def dropped(size, slope):
    """Rewards that rise, fall by a size from one step to the next, and go on with a slope."""
    return lambda i: 0.4 + 0.008 * i if i < 30 else 0.64 - size + slope * (i - 30)


def again(rate):
    """A learning rate that decays, and begins again at another one in step 30."""
    return lambda i: 1e-6 * (1 - i / 60) if i < 30 else rate


def evaluated(score, name="eval/a"):
    """Rewards that rise, and an evaluation in each fifth step."""
    return {"n": 40, "reward": lambda i: 0.3 + 0.012 * i,
            name: lambda i: score(i) if i % 5 == 0 else None}


@pytest.mark.parametrize("anchor, changes", [
    ("", {}), ("", {"reward": [0.5, 0.48], "n": 18}), ("", {"eval/greedy": [0.8, 0.9]}),
    ("", {"reward": [-5.0, -5.06], "n": 18}), ("", {"max_log_ratio": [0.0, 0.0]}),
    ("", {"reward": lambda i: 0.6 - 0.02 * i + noise(i), "n": 18}),
    ("flat", {"reward": lambda i: 0.6 - 0.02 * i, "n": 18}),
    ("rate", {"reward": lambda i: 0.2 + 0.05 * i if i < 12 else 0.2, "n": 18}),
    ("flat", {"reward": [-0.5, -0.8], "n": 18}),
    ("rate", {"reward": lambda i: 0.1 + 0.05 * i if i < 15 else 0.2}),
    ("flat", {"reward": [0.5, 0.49]}),
    ("", {"reward": lambda i: 0.5 + noise(i), "n": 40}),            # noise may hide a rise
    ("flat", {"reward": lambda i: 0.5 + noise(i) / 5, "n": 40}),
    ("", {"reward": lambda i: 0.6 + 0.0003 * i + noise(i) / 6, "n": 200}),
    ("", {"reward": [0.5, 0.5], "eval/greedy": [0.3, 0.5]}),        # problems may get harder
    ("", {"reward": [0.9, 0.9], "accuracy": [0.9, 0.9]}),
    ("flat", {"reward": lambda i: 0.95 - 0.001 * i, "n": 200}),     # it is solved, but gets worse
    ("", {"reward": lambda i: 0.95 - 0.0001 * i, "n": 200}),
    ("", {"reward": [0.5, 0.5], "teacher_kl": [0.3, 0.1]}),
    ("", {"reward": [0.0, 0.0], "filtered": [2.0, 3.0]}),
    ("flat", {"reward": [0.5, 0.5], "frac_reward_zero_std": [0.6, 0.6]}),
    ("groups flat", {"reward": [0.05, 0.05], "frac_reward_zero_std": [0.75, 0.75]}),
    ("", {"frac_reward_zero_std": [1.0, 1.0], "accuracy": [1.0, 1.0]}),
    ("", {"frac_reward_zero_std": None, "reward": [1.0, 1.0], "grad_norm": [0.0, 0.0]}),
    ("", {"reward": lambda i: 0.95 - 2 * (i == 3), "n": 60}),               # +1 and -1
    ("", {"rewards/chosen": [0.0, -1.0]}),
    ("", {"sampling/surprise": lambda i: 0.21 if i % 2 else None,
          "entropy": lambda i: 0.2 if i % 2 else 0.9}),
    ("no-gradient", {"grad_norm": [0.0, 0.0]}), ("no-gradient", {"grad_norm": [1.0, 0.0]}),
    ("no-gradient", {"learning_rate": [0.0, 0.0]}), ("", {"learning_rate": [1e-6, 0.0]}),
    ("no-gradient", {"max_log_ratio": [0.0, 0.0], "reward": [0.5, 0.5]}),
    ("no-gradient", {"max_log_ratio": [0.0, 0.0], "n": 18,
                     "reward": lambda i: 0.5 + 0.25 * (-1) ** (i + 1) + 0.05 * (i > 9)}),
    ("groups", {"frac_reward_zero_std": None, "signal": [0.0, 0.0], "grad_norm": [0.0, 0.0],
                "reward": [0.0, 0.0]}),
    ("unused", {"kl": [-1e-9, 1e-9]}), ("", {"kl": [0.0, 0.0], "trainer": "OpenRLHF"}),
    ("", {"old_kl": [0.0, 0.0], "kl": None}),
    ("", {"kl": [0.0, 0.0], "kl_coef": [0.0, 0.0], "trainer": "an own loop"}),
    ("unused", {"kl": [0.0, 0.0], "kl_coef": [0.1, 0.0], "trainer": "an own loop"}),
    ("unused", {"kl": lambda i: -0.04 * i}), ("", {"kl": lambda i: -0.2 + noise(i), "n": 40}),
    ("", {"kl": lambda i: 0.002 * (-1) ** i - 0.001}),
    ("unused flat", {"kl": [0.0, 0.0], "reward": lambda i: 0.9 - 0.04 * i}),
    ("temperature", {"sampling/surprise": [0.15, 0.15]}),
    ("stale", {"sampling/sampling_logp_difference/mean": [0.0, 0.1]}),
    ("groups", {"frac_reward_zero_std": [0.5, 1.0], "reward": [0.5, 0.5], "n": 18}),
    ("groups", {"frac_reward_zero_std": [0.5, 1.0], "accuracy": [0.3, 0.28]}),
    ("held-out", {"accuracy": [0.6, 0.3]}), ("", {"accuracy": [0.6, 0.55]}),
    ("flat", {"grad_norm": lambda i: 33.0 + 0.1 * (-1) ** i}), ("", {"grad_norm": [0.5, 0.5]}),
    ("", {"grad_norm": lambda i: min(1.0, 0.99 + 0.004 * (i % 9)), "n": 60}),    # after clipping
    ("", {"frac_reward_zero_std": [0.5, 1.0], "reward": [0.3, 1.0]}),
    ("groups", {"completions/clipped_ratio": [0.1, 0.7]}),
    ("groups", {"completions/clipped_ratio": [0.8, 0.75]}),
    ("", {"completions/clipped_ratio": [0.7, 0.1]}),
    ("", {"completions/clipped_ratio": [0.9, 0.6]}),
    ("jump", {"reward": [0.5, 0.2]}),
    ("rate", {"reward": [0.5, 0.2], "kl": None, "entropy": None}),      # the policy may have moved
    ("", {"entropy": [0.2, 0.004], "sampling/surprise": [0.2, 0.004]}),
    ("rate", {"entropy": [0.2, 0.004], "sampling/surprise": [0.2, 0.004],
              "accuracy": [0.5, 0.89]}),
    ("", {"entropy": [0.2, 0.004], "sampling/surprise": [0.2, 0.004], "accuracy": [0.5, 0.91]}),
    ("rate", {"entropy": [0.2, 0.5], "sampling/surprise": [0.2, 0.5], "reward": [0.5, 0.5],
              "n": 18}),
    ("rate", {"entropy": [0.2, 0.004], "sampling/surprise": None, "n": 18,
              "reward": lambda i: 0.3 + 0.01 * min(i, 9)}),
    ("", {"entropy": [0.2, 0.004], "sampling/surprise": None, "reward": [0.3, 0.95]}),
    ("rate", {"grad_norm": [1.0, 12.0], "reward": [0.5, 0.5], "n": 18}),
    ("rate", {"grad_norm": lambda i: 2e4 if i == 15 else 1.0}), ("", {"grad_norm": [1.0, 12.0]}),
    ("rate", {"kl": [0.1, 38.0]}), ("thoughts rate", {"completions/mean_length": [300.0, 2.0]}),
    ("rate", {"rewards/chosen": [0.0, -1.0], "reward": [0.9, 0.8], "n": 18}),
    ("flat", {"rewards/margins": [0.0, 0.0]}), ("", {"rewards/margins": [0.0, 0.5]}),
    ("held-out", {"eval/greedy": [0.8, 0.5]}),
    ("held-out", {"eval/greedy": [0.8, 0.5], "eval/greedy/b": [0.1, 0.9], "reward": [0.4, 0.6]}),
    ("held-out", {"eval/a": [0.1, 0.9], "eval/b": [0.3, 0.2]}),
    ("held-out", {"eval/greedy": lambda i: 0.3 if i % 6 == 0 else None}),
    ("held-out", {"eval/a": lambda i: 0.3 if i in (0, 5, 9) else None,
                  "eval/b": lambda i: 0.4 if i in (0, 19) else None}),
    ("", {"eval/greedy": lambda i: 0.3 if i % 9 == 0 else None}),           # may be by chance
    ("", {"eval/greedy": lambda i: 0.0 if i % 6 == 0 else None}),           # too hard
    ("", {"eval/greedy": lambda i: 1.0 if i % 6 == 0 else None}),
    ("", {"eval/a": lambda i: 0.3 if i % 6 == 0 else None,
          "eval/b": lambda i: 0.3 + i / 99 if i in (0, 19) else None}),
    ("", {"eval/greedy": [0.3, 0.3]}),                  # a program has filled the rows between
    ("", {"eval/greedy": lambda i: 0.3 if i % 6 == 0 else None, "reward": [0.8, 0.8]}),
    ("flat", {"eval/greedy": [0.1, 0.12], "rewards/margins": [0.0, 2.0]}),
    ("", {"eval/greedy": [0.1, 0.12], "rewards/margins": [0.0, 0.3]}),          # has hardly begun
    ("", {"eval/greedy": [0.6, 0.62], "rewards/margins": [0.0, 2.0]}),
    ("", {"rewards/margins": lambda i: 0.01 * i + noise(i)}),                   # noise may hide it
    ("", {"rewards/chosen": [0.0, -1.0], "reward": lambda i: 0.3 - 0.003 * i + noise(i) / 10,
          "rewards/margins": [0.0, 0.3]}),
    ("", {"eval/greedy": [0.8, 0.5], "flags": {"num_eval_problems": 16}}),      # by chance
    ("not-finite", {"grad_norm": [1.0, math.nan]}), ("not-finite", {"kl": [0.1, math.inf]}),
    ("not-finite", {"eval/greedy": [0.8, math.nan]}), ("not-finite", {"grad_norm": [1.0, None]}),
    ("not-finite", {"reward": lambda i: 0.3 + 0.02 * i if i < 13 else None}),
    ("not-finite", {"reward": lambda i: math.nan if i == 19 else 0.3 + 0.02 * i}),
    ("not-finite", {"grad_norm": lambda i: math.nan if i % 3 == 0 and i < 14 else 1.0}),
    ("", {"grad_norm": lambda i: math.inf if i < 3 else 1.0}),      # the scaler of fp16 skips them
    ("", {"kl": lambda i: 0.01 * i if i else math.nan}), ("", {"kl": [0.0, 0.0], "n": 4}),
    ("", {"entropy": [0.0, 0.0], "sampling/surprise": None, "n": 18,        # was not computed
          "reward": lambda i: 0.3 + 0.01 * min(i, 9)}),
    ("", {"entropy": [-0.9, -0.3], "sampling/surprise": None, "n": 18,      # minus the entropy
          "reward": lambda i: 0.3 + 0.01 * min(i, 9)}),
    ("rate", {"entropy": [-0.2, -0.004], "sampling/surprise": None, "n": 18,
              "reward": lambda i: 0.3 + 0.01 * min(i, 9)}),
    ("", {"sampling/surprise": lambda i: 0.24 + noise(i) / 2, "n": 4}),
    ("", differing(0.01, "ours")), ("temperature rounding", differing(0.05, "ours")),
    ("", differing(0.05, "TRL")),                                   # may use bfloat16
    ("temperature rounding", differing(0.2, "TRL")),
    ("", {"probability_difference": [0.005, 0.01], "trainer": "verl"}),
    ("rounding", {"probability_difference": [0.005, 0.1], "trainer": "verl"}),  # it has learned,
    ("adapter stale flat", {"reward": [0.5, 0.5],                   # so the sampler gets weights
                    "probability_difference": [0.005, 0.1], "trainer": "verl"}),
    ("temperature rounding", {"probability_difference": [0.03, 0.1], "trainer": "verl"}),
    ("rounding", {"probability_difference": [0.01, 0.025], "trainer": "verl"}),
    ("rounding", {"probability_ratio": [1.02, 1.3], "trainer": "NeMo-RL"}),
    ("stale stale rate", {"n": 40, "staleness": lambda i: 1 + i, "sampler_kl": [0.0, 0.2],
                    "reward": lambda i: 0.2 + 0.02 * min(i, 40 - i), "trainer": "prime-rl"}),
    # ---- lengths, evaluations of other weights, a reward that is gone
    ("average", {"length/wrong": [400.0, 2900.0], "length/right": [380.0, 390.0]}),
    ("", {"length/wrong": [400.0, 900.0], "length/right": [380.0, 800.0]}),     # thoughts grow
    ("", {"length/wrong": [400.0, 600.0], "length/right": [380.0, 390.0]}),
    ("", {"length/wrong": lambda i: 150.0 + 20 * i, "length/right": lambda i: 100.0 + 12 * i}),
    ("not-finite stale", {"reward": lambda i: math.nan, "n": 40,
                          "sampling/sampling_logp_difference/mean": lambda i: 0.001 + 0.01 * i}),
    ("flat", {"reward": [1.1, 1.1], "rewards/right": [0.98, 0.98], "rewards/right2": [0.1, 0.1]}),
    ("flat", {"reward": [0.5, 0.5], "n": 100,                   # an estimate around 0
              "kl": lambda i: 0.001 * (-1) ** (i * i // 3)}),
    ("average groups flat", {"reward": lambda i: 0.5 - 0.005 * i,
                             "completions/clipped_ratio": [0.0, 0.9],
                             "completions/mean_length": [500.0, 4000.0]}),
    ("", {"completions/clipped_ratio": [0.0, 0.4], "completions/mean_length": [500.0, 4000.0]}),
    ("merging", {**evaluated(lambda i: 0.3 + 0.01 * i), "eval/a_merged": [0.3, 0.35]}),
    ("merging", {**evaluated(lambda i: 0.3 + 0.01 * i), "eval/merged_a": [0.3, 0.35]}),
    ("", {**evaluated(lambda i: 0.3 + 0.01 * i), "eval/a_merged": lambda i: 0.3 + 0.008 * i}),
    ("", {**evaluated(lambda i: 0.3 + 0.01 * i), "eval/a_hard": [0.3, 0.35]}),  # other problems
    ("", {**evaluated(lambda i: 0.5 + 0.01 * i), "eval/a_merged": [0.3, 0.32]}),
    ("groups", {"reward": [0.97, 0.97], "frac_reward_zero_std": [0.9, 0.9],
                "eval/a": [0.6, 0.6]}),
    ("", {"reward": [0.97, 0.97], "frac_reward_zero_std": [0.9, 0.9], "eval/a": [0.6, 0.7]}),
    ("", {"reward": [1.98, 1.98], "frac_reward_zero_std": [0.9, 0.9],
          "rewards/right": [0.98, 0.98]}),
    ("jump", {"n": 60, "reward": lambda i: 0.0 if 20 <= i < 30 else 0.3 + 0.005 * i}),
    ("", {"n": 60, "reward": lambda i: 0.0 if 20 <= i < 23 else 0.3 + 0.005 * i}),
    ("", {"n": 60, "reward": lambda i: 0.0 if i < 10 else 0.3 + 0.005 * i}),
    ("rate", {"kl": [0.1, 9.0]}), ("", {"kl": [0.1, 9.0], "trainer": "OpenRLHF"}),  # may be a sum
    ("merging jump flat", {"n": 99, "kl": lambda i: 0.002 * (i % 25), "reward": [0.5, 0.5]}),
    ("", {"n": 99, "kl": lambda i: 0.002 * (i % 25)}),              # the reference is replaced
    ("jump", {"n": 200, "kl": lambda i: 0.001 * (i % 100),          # less than noise in ten steps
              "reward": lambda i: 0.3 + 0.002 * (i % 100) + noise(i) / 5}),
    ("", {"n": 200, "kl": lambda i: 0.001 * (i % 100),
          "reward": lambda i: 0.3 + 0.002 * i + noise(i) / 5}),
    ("turns rate", {"n": 40, "reward": lambda i: 0.3 + 0.02 * min(i, 30 - i),
                    "calls": [2.0, 0.1]}),
    ("", {"calls": [2.0, 0.5]}),                            # it needs fewer
    ("rate", {"n": 120, "reward": lambda i: 0.4 + 0.0002 * i, "kl": [1e-5, 1e-5],
              "completions/mean_length": [100.0, 100.0]}),
    ("rate", {"n": 60, "calls": lambda i: 2.0 + 0.2 * i, "completions/clipped_ratio": [0.1, 0.1],
              "reward": lambda i: 0.4 - 0.006 * i + 0.02 * min(i, 10)}),
    ("groups rate", {"n": 60, "completions/clipped_ratio": [0.95, 0.95],
                     "grad_norm": lambda i: 1 - i / 60,
                     "reward": lambda i: 0.4 - 0.006 * i + 0.02 * min(i, 10)}),
    ("", {"n": 60, "tools/failure_frequency": [0.1, 0.8]}),
    ("", {"n": 60, "frac_reward_zero_std": [0.5, 0.5], "reward": [0.5, 0.96],
          "eval/math": [0.4, 0.42]}),
    ("", {"n": 60, "frac_reward_zero_std": [0.5, 0.95], "reward": [0.5, 0.96],
          "eval/math": lambda i: 0.4 if i in (5, 50) else None}),
    ("", {"n": 10, "calls": [0.0, 0.0], "reward": [0.5, 0.5]}),
    ("", {"n": 60, "trainer": "verl", "eval/math": lambda i: 0.4 + 0.003 * i,   # what comes new
          "prompts/mean_length": lambda i: 140.0 + i % 2 if i < 30 else 800.0,  # is learned
          "completions/mean_length": lambda i: 300.0 + i % 2 if i < 30 else 900.0,
          "reward": lambda i: 0.3 + 0.01 * i if i < 30 else 0.1}),
    ("", {"n": 80, "entropy": [0.7, 0.02], "sampling/surprise": None, "trainer": "verl",
          "reward": lambda i: 0.4 + 0.001 * i}),
    ("turns", {"tokens/loss": [9.0, 8.0], "tokens/model": [6.0, 6.0], "tokens/tool": [3.0, 2.0]}),
    ("", {"tokens/loss": [6.0, 6.0], "tokens/model": [6.0, 6.0], "tokens/tool": [3.0, 2.0]}),
    ("rate", {"n": 80, "entropy": [0.7, 0.01], "sampling/surprise": None, "trainer": "verl",
              "reward": lambda i: 0.4 + 0.001 * i}),
    ("merging flat", {"n": 80, "kl": lambda i: 0.001 * i + 0.1 * (i // 20), "reward": [0.5, 0.5]}),
    ("", {"n": 80, "kl": lambda i: 0.001 * i + 0.1 * (i // 20)}),          # and it learns
    ("flat", {"n": 80, "kl": lambda i: 0.001 * i + 0.1 * (i // 35), "reward": [0.5, 0.5]}),
    ("flat", {"n": 80, "kl": lambda i: 0.001 * i + 0.1 * ((i > 15) + (i > 40) + (i > 60)),
              "reward": [0.5, 0.5]}),
    ("groups flat", {"frac_reward_zero_std": None, "reward": [0.4, 0.4],
                     "grad_norm": lambda i: 0.1 * (i % 3 > 0)}),
    ("flat", {"frac_reward_zero_std": None, "reward": [0.4, 0.4],
              "grad_norm": lambda i: 0.1 * (i % 8 > 0)}),
    ("", {"frac_reward_zero_std": None, "grad_norm": lambda i: 0.1 * (i % 3 > 0)}),
    ("", {"frac_reward_zero_std": None, "reward": [0.9, 0.9],
          "grad_norm": lambda i: 0.1 * (i % 3 > 0)}),
    ("turns rate", {"n": 60, "calls": lambda i: 2.0 + 0.2 * i,
                    "reward": lambda i: 0.4 - 0.006 * i + 0.02 * min(i, 10)}),
    ("", {"n": 60, "calls": lambda i: 2.0 + 0.2 * i}),
    ("no-gradient groups rate", {
        "n": 60, "completions/clipped_ratio": lambda i: i / 59, "grad_norm": lambda i: 1 - i / 60,
        "reward": lambda i: 0.4 - 0.006 * i + 0.02 * min(i, 10)}),
    ("turns rate", {"n": 60, "tools/failure_frequency": [0.1, 0.8],
                    "reward": lambda i: 0.4 - 0.006 * i + 0.02 * min(i, 10)}),
    ("turns flat", {"calls": [0.0, 0.0], "reward": [0.5, 0.5]}), ("", {"calls": [0.0, 0.0]}),
    ("flat", {"calls": [0.0, 0.1], "reward": [0.5, 0.5]}),
    ("", {"calls": [0.0, 0.0], "reward": [0.9, 0.95]}),     # and none
    ("groups", {"n": 60, "frac_reward_zero_std": [0.5, 0.95], "reward": [0.5, 0.96],
                "eval/math": [0.4, 0.42]}),
    ("", {"n": 60, "frac_reward_zero_std": [0.5, 0.95], "reward": [0.5, 0.96],
          "eval/math": [0.4, 0.6]}),
    ("", {"n": 60, "frac_reward_zero_std": [0.5, 0.95], "reward": [0.5, 0.96],
          "eval/math": [0.8, 0.85]}),
    ("jump", {"n": 60, "trainer": "verl", "eval/math": [0.4, 0.6],
              "prompts/mean_length": lambda i: 140.0 + i % 2 if i < 30 else 800.0,
              "completions/mean_length": lambda i: 300.0 + i % 2 if i < 30 else 900.0,
              "reward": lambda i: 0.3 + 0.01 * i if i < 30 else 0.1}),
    ("", {"n": 60, "trainer": "verl", "eval/math": [0.4, 0.6],     # and it learns from that
          "prompts/mean_length": lambda i: 140.0 + i % 2 if i < 30 else 800.0,
          "completions/mean_length": lambda i: 300.0 + i % 2 if i < 30 else 900.0,
          "reward": lambda i: 0.3 + 0.01 * i if i < 30 else 0.01 * i - 0.2}),
    ("stale", {"n": 60, "sampler_kl": lambda i: 0.001 * max(1, 5 * (i - 20)), "trainer": "prime-rl",
               "reward": lambda i: 0.3 + 0.01 * min(i, 20)}),
    ("rounding", {"n": 60, "sampler_kl": lambda i: 0.001 * max(1, 5 * (i - 20)),
                  "reward": lambda i: 0.3 + 0.01 * i, "trainer": "prime-rl"}),
    ("jump", {"rewards/right": lambda i: 0.3 + 0.005 * i if i < 20 else 0.0, "n": 40}),
    ("held-out", {"rewards/right": lambda i: 0.3 + 0.005 * i if i < 20 else 0.1, "n": 40}),
    ("rounding", {"probability_ratio": [1.09, 1.25], "trainer": "NeMo-RL"}),
    ("", {"probability_ratio": [1.02, 1.04], "trainer": "NeMo-RL"}),
    # ---- the learning rate
    ("rate", {"learning_rate": lambda i: 1e-6 * (i < 12),
              "reward": lambda i: 0.3 + 0.02 * min(i, 12)}),
    ("rate", {"learning_rate": lambda i: 1e-6 * (i < 30), "n": 60,          # noise rises, too
              "reward": lambda i: 0.3 + 0.01 * min(i, 30) + 0.04 * (i > 50) + noise(i) / 10}),
    ("", {"learning_rate": lambda i: 1e-6 * (i < 12), "accuracy": [0.9, 0.9],
          "reward": lambda i: 0.3 + 0.02 * min(i, 12)}),
    ("", {"learning_rate": lambda i: 1e-6 * (1 + math.cos(math.pi * i / 100)), "n": 100,
          "reward": lambda i: 0.3 + 0.005 * i}),
    ("", {"learning_rate": lambda i: 1e-6 * (1 - i / 100), "n": 100,
          "reward": lambda i: 0.3 + 0.01 * min(i, 40)}),
    ("rate flat", {"learning_rate": lambda i: 1e-9 * (i + 1), "reward": [0.5, 0.5]}),
    ("", {"learning_rate": lambda i: 1e-9 * (i + 1)}),
    ("", {"learning_rate": lambda i: 1e-9 * (i + 1), "n": 18, "reward": [0.5, 0.5]}),
    ("flat", {"learning_rate": lambda i: 1e-9 * min(i + 1, 5), "reward": [0.5, 0.5]}),
    ("rate flat", {"reward": [0.5, 0.5], "kl": [1e-5, 2e-5],
                   "completions/mean_length": [300.0, 300.0]}),
    ("flat", {"reward": [0.5, 0.5], "kl": [1e-4, 1e-4],
              "completions/mean_length": [300.0, 300.0]}),
    ("no-gradient", {"max_log_ratio": [0.5, 2e-6]}),
    ("", {"max_log_ratio": [2e-6, 2e-6], "flags": {"num_iterations": 1}}),
    ("", {"max_log_ratio": [0.5, 0.01]}),
    # ---- rewards that are added, and penalties
    ("flat", {"rewards/right": [0.3, 0.1], "reward": [0.5, 0.5]}),
    ("unused groups", {"rewards/right": [0.0, 0.0]}), ("", {"rewards/right": [0.0, 0.1]}),
    ("", {"rewards/right": [0.0, 0.0], "n": 18}),
    ("held-out", {"rewards/right": [0.3, 0.1]}), ("", {"rewards/right": [0.3, 0.28]}),
    ("", {"rewards/right": lambda i: 0.5 - 0.01 * i + noise(i)}),               # noise explains it
    ("held-out flat", {"reward": [0.5, 0.5], "accuracy": [0.2, 0.6]}),
    ("flat", {"reward": [0.5, 0.5], "accuracy": [0.2, 0.25]}),
    ("rate flat", {"reward": [0.5, 0.5], "after_penalties": lambda i: 0.5 - 0.02 * i}),
    ("", {"after_penalties": lambda i: 0.3}),
    ("rate", {"after_penalties": lambda i: 0.3 - 0.02 * i}),
    ("", {"after_penalties": lambda i: 0.3 - 0.01 * i + noise(i)}),
    ("", {"after_penalties": lambda i: {3: math.inf, 5: -math.inf}.get(i, 0.3)}),
    ("groups flat", {"reward": [0.5, 0.5], "prompts/clipped_ratio": [0.9, 0.9]}),
    ("", {"prompts/clipped_ratio": [0.9, 0.9]}),
    ("flat", {"reward": [0.5, 0.5], "after_penalties": [0.45, 0.45]}),
    ("groups flat", {"reward": [0.99, 0.99], "accuracy": [0.2, 0.2],
                     "frac_reward_zero_std": [0.97, 0.97]}),
    ("", {"reward": [0.99, 0.99], "frac_reward_zero_std": [0.97, 0.97]}),
    # ---- the critic, the old log-probs, old samples, tools, one sample
    ("critic flat", {"reward": [0.5, 0.5], "value_loss": [0.1, 3.0]}),
    ("", {"value_loss": [0.1, 3.0]}), ("flat", {"reward": [0.5, 0.5], "value_loss": [3.0, 0.1]}),
    ("critic flat", {"reward": [0.5, 0.5], "explained_variance": [0.2, -4.0]}),
    ("flat", {"reward": [0.5, 0.5], "explained_variance": [-9.0, -2.0]}),       # it learns
    ("", {"explained_variance": lambda i: math.nan}),
    ("rounding flat", {"reward": [0.5, 0.5], "clip_ratio/region_mean": [0.4, 0.4]}),
    ("flat", {"reward": [0.5, 0.5], "clip_ratio/region_mean": [0.01, 0.4]}),
    ("", {"clip_ratio/region_mean": [0.4, 0.4]}),       # as GSPO's small bounds have it
    ("rounding flat", {"reward": [0.5, 0.5], "old_kl": [0.3, 0.3]}),
    ("flat", {"reward": [0.5, 0.5], "old_kl": [0.01, 0.3]}),
    ("stale flat", {"reward": [0.5, 0.5], "staleness": lambda i: 1 + i}),
    ("", {"staleness": lambda i: 1 + i}), ("flat", {"reward": [0.5, 0.5], "staleness": [8.0, 8.0]}),
    ("turns flat", {"reward": [0.5, 0.5], "tools/failure_frequency": [0.5, 1.0]}),
    ("flat", {"reward": [0.5, 0.5], "tools/failure_frequency": [1.0, 0.5]}),
    ("", {"tools/failure_frequency": [0.5, 1.0]}),
    ("groups", {"lowest_advantage": [0.0, 0.0], "signal": [1.0, 1.0]}),
    ("", {"lowest_advantage": [-0.8, 0.0], "signal": [1.0, 1.0]}),
    ("", {"lowest_advantage": [0.0, 0.0], "signal": [0.0, 0.0], "reward": [1.0, 1.0],
          "frac_reward_zero_std": [1.0, 1.0]}),
    # ---- a critic that learns nothing, and a schedule that begins again
    ("critic", {"n": 70, "explained_variance": [-0.02, -0.02]}),
    ("", {"n": 70, "explained_variance": lambda i: min(0.4, -0.3 + 0.02 * i)}),
    ("", {"n": 50, "explained_variance": [-0.02, -0.02]}),
    ("", {"n": 70, "explained_variance": [0.1, 0.1]}),
    ("jump", {"n": 60, "learning_rate": again(1e-5), "reward": dropped(0.1, -0.004)}),
    ("", {"n": 60, "learning_rate": again(1.5e-6), "reward": dropped(0.01, -0.004)}),
    ("jump", {"n": 60, "learning_rate": [1e-6, 1e-5], "reward": dropped(0.1, -0.004)}),
    ("", {"n": 60, "learning_rate": again(1e-5)}),              # it goes on to learn
    ("", {"n": 60, "learning_rate": lambda i: 1e-7 * min(30, i)}),          # a warm-up
    ("rate", {"n": 60, "reward": dropped(0.1, -0.004),          # a warm-up in stairs
              "learning_rate": lambda i: 1e-7 * (1 + i // 2) if i < 30 else 1e-5}),
    # ---- what falls at once: who rewards, the problems, or the policy
    ("jump", {"n": 60, "reward": dropped(0.3, 0.0), "kl": lambda i: 0.01 * i}),
    ("groups jump", {"n": 60, "reward": lambda i: 0.4 + 0.008 * i if i < 30 else 0.0,
                     "kl": lambda i: 0.01 * i, "frac_reward_zero_std": [0.2, 1.0]}),
    ("", {"n": 60, "reward": dropped(0.5, 0.01), "kl": lambda i: 0.01 * i}),
    ("", {"n": 60, "reward": dropped(0.3, 0.01), "kl": lambda i: 0.01 * i}),    # it rises again
    ("rate", {"n": 60, "reward": dropped(0.3, 0.0), "kl": lambda i: 0.01 * i + 3 * (i > 29),
              "entropy": [0.2, 0.2]}),
    ("", {"n": 60, "reward": dropped(0.3, 0.0), "kl": lambda i: 0.01 * i,
          "eval/greedy": lambda i: 0.3 + 0.005 * i}),
    ("jump", {"n": 60, "reward": dropped(0.3, 0.01), "kl": lambda i: 0.01 * (i % 30)}),
    ("", {"n": 60, "reward": lambda i: 0.9 - 0.005 * i, "kl": lambda i: 0.01 * i,
          "eval/greedy": lambda i: 0.3 + 0.005 * i}),                           # it gets harder
    ("rate", {"n": 60, "reward": lambda i: 0.3 + 0.01 * i if i < 45 else 0.1, "kl": None,
              "entropy": None, "eval/greedy": lambda i: 0.3 + 0.005 * i if i < 40 else None}),
    ("rate", {"n": 60, "reward": lambda i: 0.3 + 0.01 * min(i, 9 * (60 - i)), "kl": None,
              "entropy": None, "eval/a": lambda i: 0.3 + 0.01 * i if i % 9 == 0 else None}),
    ("rate", {"n": 60, "reward": lambda i: (0.3 + 0.01 * i) * (i < 50), "kl": None,
              "entropy": None, "eval/a": lambda i: 0.3 + 0.01 * i}),    # nothing learns from 0
    ("", {"n": 60, "reward": lambda i: 0.8 - 0.01 * max(0, i - 20), "kl": None,
          "entropy": None, "eval/a": lambda i: 0.3 + 0.01 * i if i % 9 == 0 else None}),
    ("flat", {"n": 200, "reward": noise}),      # a mean of 0 has no scale, but the steps have one
    # ---- held-out
    ("held-out", evaluated(lambda i: 0.2 + noise(i) / 20)), ("held-out", evaluated(lambda i: 0.0)),
    ("", evaluated(lambda i: 0.2 + 0.002 * i)), ("", evaluated(lambda i: 0.2 + noise(i) / 2)),
    ("", evaluated(lambda i: 0.9 + noise(i) / 20)),
    ("", evaluated(lambda i: 0.2 + noise(i) / 20) | evaluated(lambda i: 0.2 + 0.01 * i, "eval/b")),
    ("", evaluated(lambda i: 0.2 + noise(i) / 20) | {"reward": lambda i: 0.3 + 0.004 * i}),
    ("held-out", {"reward": None, "rewards/accuracies": lambda i: 0.5 + 0.02 * i,
                  "eval_loss": [0.6, 0.9]}),
    ("", {"reward": None, "rewards/accuracies": lambda i: 0.5 + 0.02 * i,
          "eval_loss": [0.6, 0.62]}),
    ("", {"reward": None, "rewards/accuracies": lambda i: 0.5 + 0.02 * i, "eval_loss": [0.6, 0.9],
          "eval/accuracies": [0.6, 0.7]})])
def test_what_is_wrong_is_named_and_nothing_else(anchor, changes):
    assert anchors(**changes) == anchor.split()


@pytest.mark.parametrize("mask, calls, found", [
    ([1, 0, 1], 1.0, []), ([1, 1, 1], 1.0, ["turns"]), ([1, 1, 0], 0.0, ["rounding"])])
def test_masks_show_an_end_that_is_not_learned_or_a_tool_that_is(mask, calls, found):
    samples = [{"completions": [{"tokens": ["a", "b", "<|eos|>"], "mask": mask}]}]
    assert anchors(samples=samples, **{"tools/call_frequency": [calls, calls]}) == found


def test_a_planted_mistake_is_found_in_its_run(tmp_path):
    with at_work(tmp_path):
        flags = SMALL | {"max_steps": 4, "num_mini_batches": 2, "output_dir": "run"}
        hunt.run("old not detached", *arguments(flags))
        assert "logps - logps" in (tmp_path / "run/grpo.py").read_text("utf-8")
        assert any("no-gradient" in text for text in check(read("run")))


def test_a_run_of_trl_is_read_and_each_anchor_is_on_the_page():
    found = [text.partition(":")[0] for text in check(read(ROOT / "tests/trainer"))]
    assert found == ["no group has signal, because all its rewards are equal",
                     "most completions are truncated (100%)"]
    named = set(re.findall(r"\(#([\w-]+)\)", (ROOT / "report/check.py").read_text("utf-8")))
    assert named == {*PARTS}
    headings = re.findall("^## (.*)", PAGES["docs/why.md"], re.M)
    assert named <= {heading.lower().replace(" ", "-") for heading in headings}


def test_a_step_of_ours_is_judged_at_once():
    metrics = {"reward": 0.0, "accuracy": 0.0, "frac_reward_zero_std": 1.0, "entropy": 0.001,
               "completions/clipped_ratio": 0.9, "sampling/sampling_logp_difference/max": 0.5}
    found = [*warnings(metrics, SimpleNamespace(sampler_lag=0))]
    assert [re.search(r"\(#(.*)\)", text)[1] for text in found] == [
        "groups", "groups", "rate", "rounding"]
    assert not [*warnings({"reward": 1.0, "accuracy": 1.0, "entropy": 0.001}, SimpleNamespace())]


# ---- logs of other trainers ------------------------------------------------------------------

@pytest.mark.parametrize("row", VERDICTS, ids=lambda row: row["file"])
def test_an_expert_would_say_the_same_of_a_log(row, capsys):
    if any((LOGS / row["file"]).rglob("events.out.tfevents*")):
        pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    with contextlib.ExitStack() as stack:
        if row["verdict"] == "choose":
            stack.enter_context(pytest.raises(SystemExit))
        run = read(LOGS / row["file"])
        found = parts(check(run))
    if row["verdict"] == "choose":
        assert "choose one with --run" in capsys.readouterr().err
    elif row["verdict"] == "broken" and row["file"] not in UNDECIDED:
        assert found & set(row["parts"].split(",")), found
    else:
        assert not found
        assert ("too short" in decided(run)) == (row["verdict"] in ("short", "broken"))


def test_there_are_as_many_logs_as_the_page_says():
    healthy = sum(row["verdict"] in ("healthy", "short") for row in VERDICTS)
    broken = sum(row["verdict"] == "broken" for row in VERDICTS)
    assert healthy >= 60 and broken >= 60
    size = sum(path.stat().st_size for path in LOGS.rglob("*") if path.is_file())
    assert size < 2e6
    files = {path.relative_to(LOGS).parts[0] for path in LOGS.rglob("*") if path.is_file()}
    assert files == {row["file"] for row in VERDICTS} | {"README.md", "verdicts.tsv"}


@pytest.mark.parametrize("names, quantity, values", [
    ("step,avg_r,gn", "reward", [0.25, 0.5]), ("it,rm_score,em", "reward", [0.25, 0.5]),
    ("it,rm_score,em", "accuracy", [0.2, -0.1]), ("update,acc,lr", "reward", [0.25, 0.5]),
    ("step,mean_reward,kl_sampler_policy", "sampler_kl", [0.2, -0.1]),
    ("iter,env/reward_mean,kl_ref", "kl", [0.2, -0.1]),
    ("iter,trainer_version,rollout_version,r", "staleness", [0.05, 0.6]),
    ("step,ref_reward,mean_reward", "reward", [0.2, -0.1]),
    ("step,reward_1,mean_reward", "reward", [0.2, -0.1]), ("step,r,score", "reward", [0.2, -0.1]),
    ("it,logprob_sampler,logp_trainer,rew", "sampling/sampling_logp_difference/mean", [0.05, 0.6]),
    ("it,sampler_trainer_logp_absdiff,success", "reward", [0.2, -0.1]),
    ("it,sampler_trainer_logp_absdiff,r", "sampling/sampling_logp_difference/mean", [0.25, 0.5]),
    ("it,train_acc_pct,equal_groups_pct", "reward", [0.25, 0.5]),
    ("it,train_acc_pct,equal_groups_frac", "frac_reward_zero_std", [0.2, -0.1]),
    ("it,reward_mean_logp,reward_std_in_group", "reward", [0.25, 0.5]),
    ("it,acc_val,acc", "reward", [0.2, -0.1]), ("it,all_tests_passed,kl", "reward", [0.25, 0.5]),
    ("it,mixed_groups,r", "signal", [0.25, 0.5]),
    ("it,tokens_in_loss,r", "tokens/loss", [0.25, 0.5]),
    ("it,success,tool_error_rate", "tools/failure_frequency", [0.2, -0.1])])
def test_the_words_of_a_name_show_what_an_own_loop_logs(names, quantity, values, tmp_path):
    more = ",9" * (names.count(",") - 2)
    (tmp_path / "log.csv").write_text(f"{names}\n0,0.25,0.2{more}\n1,0.5,-0.1{more}\n")
    run = read(tmp_path / "log.csv")
    assert run.trainer == "an own loop"
    assert [round(one[quantity], 9) for one in run.records] == values


@pytest.mark.parametrize("training, held_out, found", [
    (0.1, 0.9, 1), (0.1, 0.4, 0), (0.4, 0.9, 0), (0.25, 0.9, 0), (None, 0.9, 0)])
def test_an_evaluation_that_truncates_what_training_does_not_is_named(
        training, held_out, found, tmp_path):
    run = of_lines(tmp_path, *({
        "step": i, "reward": 0.3 + 0.01 * i, "kl": 0.01, "completions/clipped_ratio": training,
        "eval/math": 0.3 + 0.01 * i, "eval/math-truncated_ratio": held_out,
        "eval/acc_non_truncated": 0.9, "eval/acc_truncated": 0.9} for i in range(30)))
    assert run.truncated == ["eval/math-truncated_ratio"]
    assert sum("evaluations be as long (#held-out)" in text for text in check(run)) == found


def test_words_that_say_how_a_reward_was_averaged_are_left_out_and_others_make_it_no_reward():
    for word in formats.FILLER:
        assert own_names_in({f"{word}_reward": 0.5})["reward"] == [f"{word}_reward"], word
    for word in {*formats.NO_REWARD, "entropy", "length"} - {"h"}:
        assert "reward" not in own_names_in({f"my_{word}_reward": 0.5}), word
    assert own_names_in({"my_reward": 0.5})["reward"] == ["my_reward"]
    assert "reward" not in own_names_in({"my_reward": 0.5, "his_reward": 0.5})
    used = own_names_in({"reward_tags": 0.5, "reward_correctness": 0.5})
    assert used["reward"] == ["reward_correctness"]


def test_only_in_an_own_loop_a_score_may_end_with_the_word_for_held_out_problems():
    assert formats.is_score("acc/test", "an own loop") and not formats.is_score("acc/test", "TRL")
    assert not formats.is_score("reward/test", "an own loop")       # whether its tests pass


def test_a_count_is_no_fraction_and_a_percentage_is_one_if_a_value_is_above_1(tmp_path):
    used = own_names_in({"truncated": 3.0, "tool_errors": 2.0, "n_correct": 60.0, "reward": 0.5})
    assert used == {"reward": ["reward"]}
    assert own_names_in({"truncated_pct": 30.0})["completions/clipped_ratio"] == ["truncated_pct"]
    rows = [{"step": i, "acc_pct": x, "truncated_pct": 0.5, "eval_acc_pct": x}
            for i, x in enumerate((0.5, 60.0))]
    first, last = of_lines(tmp_path, *rows).records
    assert (first["reward"], last["reward"], last["eval_acc_pct"]) == (0.005, 0.6, 0.6)
    assert last["completions/clipped_ratio"] == 0.005


def test_without_a_value_above_1_nobody_knows_what_is_a_percentage(tmp_path):
    run = of_lines(tmp_path, {"step": 1, "acc_pct": 0.5, "truncated_pct": 0.7,
                              "eval_acc_pct": 0.7, "dead_groups_pct": 0})
    assert run.records == [{"step": 1, "reward": 0.5, "frac_reward_zero_std": 0}] and not run.sets


@pytest.mark.parametrize("names, quantity", [
    ("ppo_kl", "old_kl"), ("rollout/kl", "kl"), ("kl_rollout_trainer", "sampler_kl"),
    ("rollout/entropy", "entropy"), ("kl", "kl"), ("vllm_kl", "sampler_kl")])
def test_each_kl_of_an_own_loop_is_what_its_words_say(names, quantity):
    assert own_names_in({names: 0.1}) == {quantity: [names]}


def test_log_probabilities_that_an_own_loop_sums_over_completions_are_divided_by_their_length(
        tmp_path):
    one = {"step": 1, "reward": 0.5, "logp_rollout": -60.0, "logp_train": -57.0}
    name = "sampling/sampling_logp_difference/mean"
    assert of_lines(tmp_path, one | {"length": 100}).records[0][name] == 0.03
    assert name not in of_lines(tmp_path, one).records[0]
    certain = {"length": 100, "logp_rollout": -2.0, "logp_train": -1.5}
    assert of_lines(tmp_path, one | certain).records[0][name] == 0.5
    run = of_lines(tmp_path, one | {"length": 100}, one | certain | {"step": 2})
    assert run.records[1][name] == 0.005
    assert of_lines(tmp_path, one | certain | {"entropy": 0.1}).records[0][name] == 0.005


def test_each_name_that_is_read_is_on_the_page():
    page = PAGES["docs/why.md"].partition("## Anybody's log")[2]
    for trainer, quantities in NAMES.items():
        for names in quantities.values():
            for name in names:
                for part in name.replace("[^/]+", "AGENT").split(" + "):
                    assert f"`{part}`" in page, (trainer, part)


VERL = {"reward": "critic/score/mean", "grad_norm": "actor/grad_norm", "entropy": "actor/entropy"}


def log_of(kind, folder, **changes):
    """Write a run whose gradient is 0 as another program writes it. -> Path"""
    steps = [{name: one[name] for name in VERL}
             for one in run_of(**{"grad_norm": [0.0, 0.0]} | changes).records]
    file = folder / {"trl": "trainer_state.json", "csv": "log.csv"}.get(kind, "log.jsonl")
    if kind == "tensorboard":
        pytest.importorskip("tensorboard", reason="tensorboard is not installed")
        from torch.utils.tensorboard import SummaryWriter
        with SummaryWriter(folder) as writer:
            for i, one in enumerate(steps):
                for name, value in one.items():
                    writer.add_scalar(f"train/{name}", value, i)
        return folder
    if kind == "trl":
        evaluations = [{"step": i, "eval_reward": 0.5} for i in range(20)]
        log = [{"step": i, **one} for i, one in enumerate(steps)]
        text = json.dumps({"log_history": log + evaluations})
    elif kind == "csv":
        head = ",".join(f'"my run - train/{name}","my run - train/{name}__MIN"' for name in VERL)
        rows = [",".join(f"{one[name]},7" for name in VERL) for one in steps]
        text = "\n".join([f'"Step",{head}', *(f"{i},{row}" for i, row in enumerate(rows))])
    else:
        named = [{VERL[name]: x for name, x in one.items()} for one in steps]
        lines = [json.dumps({"step": i, "data": one} if kind == "verl" else one)
                 for i, one in enumerate(named if kind == "verl" else steps)]
        text = "\n".join(lines) + '\n{"step": 21, "da'          # the run still writes
    file.write_text(text, "utf-8")
    return folder if kind == "trl" else file


KINDS = ["trl", "verl", "lines", "csv", "tensorboard"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_run_is_read_from_each_kind_of_log(kind, tmp_path):
    run = read(log_of(kind, tmp_path))
    assert [one["reward"] for one in run.records] == pytest.approx(
        [0.3 + 0.02 * i for i in range(20)])
    assert check(run) == ["the policy gets no gradient (#no-gradient)"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_step_that_is_not_finite_is_named_in_each_kind_of_log(kind, tmp_path):
    path = log_of(kind, tmp_path, grad_norm=[1.0, math.nan], entropy=[0.3, math.inf])
    [found] = check(read(path))
    step = 10
    names = ("actor/grad_norm", "actor/entropy") if kind == "verl" else ("grad_norm", "entropy")
    assert f"{names[0]}, {names[1]}: nan in step {step}, the first of 10" in found


@pytest.mark.parametrize("kind", ["trl", "verl", "lines", "csv"])
def test_the_mark_with_which_some_programs_begin_a_text_file_belongs_to_no_line(kind, tmp_path):
    log = log_of(kind, tmp_path)
    log = log / "trainer_state.json" if kind == "trl" else log
    records = read(log).records
    log.write_text(f"\ufeff{log.read_text('utf-8')}", "utf-8")
    assert read(log).records == records and len(records) == 20


def of_lines(tmp_path, *records):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records), "utf-8")
    return read(path)


def test_a_name_belongs_to_one_trainer_and_the_first_that_the_log_has_is_used(tmp_path):
    verl = {"step": 1, "critic/score/mean": 2.0, "critic/rewards/mean": 3.0, "actor/ppo_kl": 0.0,
            "actor/kl_loss": 0.5, "val-core/a/acc/mean@1": 4.0, "val-core/b/acc/best@4/mean": 1.0}
    run = of_lines(tmp_path, verl)
    assert (run.trainer, run.sets) == ("verl", ["val-core/a/acc/mean@1"])
    assert {name: run.records[0][name] for name in ("reward", "kl", "old_kl")} == {
        "reward": 2.0, "kl": 0.5, "old_kl": 0.0}
    assert of_lines(tmp_path, verl | {"critic/score/mean": None}).records[0]["reward"] == 3.0
    assert "filtered" in of_lines(tmp_path, verl | {"train/num_gen_batches": 2}).names
    assert of_lines(tmp_path, {"reward_mean": 0.5, "policy_loss": 0.1}).trainer == "an own loop"
    run = of_lines(tmp_path, {"step": 1, "train/agg/all/solver/reward/mean": 0.5, "optim/lr": 1e-6,
                              "train/agg/all/solver/solved_none": 0.5, "x": 1,
                              "train/agg/all/solver/solved_all": 0.25, "entropy/all/mean": 0.1})
    assert (run.trainer, run.records[0]["frac_reward_zero_std"]) == ("prime-rl", 0.75)
    for shared in ({"reward": 0.5}, {"reward": 0.5, "kl": 9.0, "loss": 0.1, "grad_norm": 1.0}):
        assert of_lines(tmp_path, shared).trainer == "an own loop"
        assert of_lines(tmp_path, shared | {"frac_reward_zero_std": 0.5}).trainer == "TRL"


@pytest.mark.parametrize("name, is_set", [
    ("eval_reward", True), ("eval/reward", True), ("eval_math_reward", True),
    ("eval/gsm8k/avg_score", True), ("eval/eval_math_pass1", True), ("eval_math_pass4", False),
    ("val-core/openai/gsm8k/acc/mean@8", True), ("val-aux/gsm8k/score/mean@8", False),
    ("val/test_score/openai/gsm8k", True), ("eval/aime/all/solver/avg@16", True),
    ("eval/all/mean_positive_reward", False), ("eval_reward_std", False), ("eval_loss", False),
    ("eval/math500", True), ("eval_rewards/format/mean", False), ("eval_runtime", False),
    ("eval/returns", True), ("eval/task_completion_rate", True), ("eval/grade_school_math", True),
    ("val/multistep_acc", True), ("heldout_acc", True), ("dev_acc", True), ("eval_secs", False),
    ("eval/wer", False), ("eval_fail_rate", False), ("val/ratio_var", False), ("eval_cost", False),
    ("eval_num_turns", False), ("test_nll", False), ("eval_response_len", False),
    ("eval/klue", True), ("eval/kl", False), ("eval/a/all/solver/reward/p10", False),
    *((f"eval/{part}{name}", False) for part in ("", "math/") for name in (
        "refusal_rate", "repetition_rate", "no_answer_rate", "overlong_frac", "unparsed",
        "mistakes", "format_issues", "attack_success_rate", "hack_rate", "rmse", "bpb",
        "lose_rate", "tool_calls", "avg_thinking", "throughput", "temp", "top_p", "budget",
        "difficulty")),
    ("eval/search_depth", False), ("eval/window", False), ("eval/AIME24", True),
    ("eval/win_rate", True), ("val/solve_rate", True), ("eval/math/maj@8", True),
    ("eval/exact_match", True), ("eval/pass@1", True), ("eval_f1", True), ("eval/pass@16", False),
    ("eval_completions/mean_length", False), ("evaluation_time", False), ("reward", False)])
def test_scores_on_held_out_problems_are_known_by_their_names(name, is_set, tmp_path):
    run = of_lines(tmp_path, {"step": 1, "reward": 0.5, name: 0.25})
    assert run.sets == [name] * is_set


def test_lines_without_a_number_as_their_step_are_steps_in_their_order(tmp_path):
    run = of_lines(tmp_path, *({"step": step, "reward": i}
                               for i, step in enumerate((None, "b", math.nan, "b"))))
    assert [one["reward"] for one in run.records] == [0, 1, 2, 3]


def test_of_several_rewards_those_for_right_answers_are_known_by_their_names(tmp_path):
    """Penalties and forms may be 0 in all steps, and one reward alone is the reward."""
    names = ("accuracy_reward/mean", "correctness_reward_func", "answer_format/mean", "xml/mean",
             "chosen", "accuracies", "short_answer_bonus", "accuracy_reward/std")
    added = {f"rewards/{name}": 0.5 for name in names}
    run = of_lines(tmp_path, {"step": 1, "reward": 1.0} | added)
    assert run.components == ["rewards/accuracy_reward/mean", "rewards/correctness_reward_func"]
    assert not of_lines(tmp_path, {"step": 1, "reward": 1.0, "rewards/accuracy/mean": 1}).components
    part = "reward/evaluate_response/avg_{}_reward"
    run = of_lines(tmp_path, {"step": 1} | {
        part.format(name): 1.0 for name in ("total", "MathReward", "ThinkingReward")})
    assert (run.trainer, run.components) == ("torchforge", [part.format("MathReward")])
    run = of_lines(tmp_path, {"step": 1, "reward": 0.5, "reward_math": 0.5,
                              "reward_math_std": 0.5, "reward_format": 0.5})
    assert run.components == ["reward_math"]
    run = run_of(**{"rewards/right": [0.3, 0.3]})
    assert decided(run).endswith("; but rewards/right does not: 0.3, then 0.3")


def test_a_jump_is_told_from_a_fall_in_several_steps():
    def falling(steps):
        return run_of(n=60, entropy=None, kl=lambda i: 0.01 * i, reward=lambda i: 0.8 - 0.4 * min(
            1, max(0, (i - 30) / steps)) + noise(i) / 20)
    assert [parts(check(falling(steps))) for steps in (0.1, 9, 25)] == [
        {"jump"}, {"rate"}, {"rate"}]
    assert "in step 32, although" in check(falling(0.1))[0]
    assert decided(falling(0.1)).endswith("before and after it falls at once in step 32")


@pytest.mark.parametrize("name", ["log.jsonl", "log.csv", "log.json"])
def test_a_log_may_be_packed(name, tmp_path, capsys):
    lines = [{"step": i, "reward": 0.5 + i} for i in range(9)]
    text = {"log.csv": "step,reward\n" + "".join(f"{i},{0.5 + i}\n" for i in range(9)),
            "log.json": json.dumps(lines)}.get(name, "\n".join(map(json.dumps, lines)))
    path = tmp_path / f"{name}.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert [one["reward"] for one in read(path).records] == [0.5 + i for i in range(9)]
    path.write_bytes(gzip.compress(text.encode())[:-30])                # it was cut off
    with pytest.raises(SystemExit):
        read(path)
    assert f"{name}.gz: is not a log that can be read" in capsys.readouterr().err


def steps(*numbers, reward=0.5):
    return [{"step": i, "reward": reward + i} for i in numbers]


@pytest.mark.parametrize("records, is_one", [
    (steps(1, 2, 3) + steps(3, 4, reward=7), True), (steps(3, 2, 1), True),
    (steps(1, 10, 11, 2, 20, 3), True), (steps(1, 2, 3) + steps(1, 2), False),
    (steps(2, 4, 6) + steps(1, 2), False), (steps(1, 2) + steps(1, 2), False),
    (steps(1, 2) + [{"step": 1, "eval_reward": 1}], True)])
def test_a_resumed_run_is_joined_and_a_second_one_is_not(records, is_one, tmp_path, capsys):
    with contextlib.ExitStack() as stack:
        if not is_one:
            stack.enter_context(pytest.raises(SystemExit))
        run = of_lines(tmp_path, *records)
        assert [one["step"] for one in run.records] == sorted({one["step"] for one in records})
        last = {one["step"]: one["reward"] for one in records if "reward" in one}
        assert [one["reward"] for one in run.records] == [last[i] for i in sorted(last)]
    assert is_one or "contains 2 runs; choose one with --run: 1, 2" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["iter", "epoch"])
@pytest.mark.parametrize("inner", [range(3), [0]])
def test_a_step_that_counts_within_an_iteration_is_none(name, inner, tmp_path):
    rows = [{name: i, "step": j, "reward": 10 * i + j} for i in range(4) for j in inner]
    run = of_lines(tmp_path, *rows, {name: 3, "eval_reward": 0.5})
    rewards = [one["reward"] for one in run.records if "reward" in one]
    assert rewards == [one["reward"] for one in rows] and run.sets == ["eval_reward"]
    one = [{name: i, "step": i, "reward": i} for i in range(3)]
    with pytest.raises(SystemExit):             # another run begins
        of_lines(tmp_path, *one, *one)


def test_the_scores_of_the_base_belong_to_the_run_that_begins_with_them(tmp_path):
    path = tmp_path / "log.jsonl"
    one = [{"step": 0, "eval_reward": 0.2}, *steps(1, 2, 3)]
    two = [{"step": 0, "eval_reward": 0.6}, *steps(1, 2)]
    path.write_text("".join(json.dumps(record) + "\n" for record in one + two), "utf-8")
    assert [read(path, name).records[0]["eval_reward"] for name in "12"] == [0.2, 0.6]


def test_what_was_skipped_is_printed_but_no_finding():
    run = run_of(grad_norm=lambda i: math.inf if i < 2 else 1.0)
    assert "grad_norm: inf in step 1, the first of 2 such steps, and finite later" in described(run)
    assert not check(run)


def test_a_run_of_several_is_chosen_by_its_name(tmp_path, capsys):
    table = LOGS / "choose-wandb.csv"
    assert described(read(table, "b")).startswith(f"read {table}, run b: names of TRL, 40 steps")
    assert parts(check(read(table, "b"))) and not check(read(table, "a"))
    assert check(read(LOGS / "choose-trl-folder", "b")) and not check(
        read(LOGS / "choose-trl-folder/a"))
    with pytest.raises(SystemExit):
        read(table, "c")
    assert "choose one with --run: a, b" in capsys.readouterr().err
    table = tmp_path / "long.csv"
    table.write_text("run_name,step,reward\n1.5B,1,0.5\n1.5B,2,0.6\nb,1,0.7\n", "utf-8")
    assert [one["reward"] for one in read(table, "1.5B").records] == [0.5, 0.6]


@pytest.mark.parametrize("name", ["run", "rank", "run_name"])
@pytest.mark.parametrize("ending", ["jsonl", "json", "csv"])
def test_lines_that_name_several_runs_have_to_be_chosen_from(name, ending, tmp_path, capsys):
    """Lines without a name belong to the run if there is only one."""
    path = tmp_path / f"log.{ending}"

    def write(*runs):
        rows = [{name: run, "step": i, "reward": 0.1 * i + run} for i in range(3) for run in runs]
        lines = [*map(json.dumps, rows)]
        cells = [f"{name},step,reward", *(",".join(map(str, one.values())) for one in rows)]
        path.write_text({"jsonl": "\n".join([*lines, '{"note": 1}']), "csv": "\n".join(cells),
                         "json": f"[{','.join(lines)}]"}[ending], "utf-8")

    write(0, 1)
    with pytest.raises(SystemExit):
        read(path)
    assert "contains 2 runs; choose one with --run: 0, 1" in capsys.readouterr().err
    assert [one["reward"] for one in read(path, "1").records] == [1.0, 1.1, 1.2]
    for runs in ((0,), (0.25, 0.5)):            # the second are numbers, and no names
        write(*runs)
        assert [one["step"] for one in read(path).records[:3]] == [0, 1, 2]


def test_of_headings_that_repeat_one_has_to_be_chosen(tmp_path, capsys):
    path = tmp_path / "log.csv"
    twice = "a - train/reward,a - train/reward,a - x"
    for names in (twice, "reward,reward,a - x", "reward,reward,"):
        path.write_text(f"Step,{names}\n1,0.25,0.75,\n2,0.5,0.5,\n", "utf-8")
        with pytest.raises(SystemExit):
            read(path)
        runs = ("a 1", "a 2") if names.startswith("a") else ("1", "2")
        assert f"choose one with --run: {', '.join(runs)}" in capsys.readouterr().err
        assert [[one["reward"] for one in read(path, run).records] for run in runs] == [
            [0.25, 0.5], [0.75, 0.5]]


def test_a_folder_is_a_run_of_ours_only_if_its_configuration_names_a_script(tmp_path):
    lines = "".join(f"{json.dumps(one)}\n" for one in steps(1, 2, 3))
    (tmp_path / "metrics.jsonl").write_text(lines)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert read(tmp_path).trainer != "ours"
    (tmp_path / "config.json").write_text('{"script": "grpo.py", "config": {}}')
    assert read(tmp_path).trainer == "ours"


def test_the_checkpoint_with_the_last_step_counts_and_not_the_newest_file(tmp_path):
    for number in (20, 100, 60):
        path = tmp_path / f"checkpoint-{number}/trainer_state.json"
        path.parent.mkdir()
        path.write_text(json.dumps({"log_history": steps(*range(number))}))
    assert len(read(tmp_path).records) == 100


def test_numbers_of_tables_may_have_commas_and_cells_may_be_empty(tmp_path):
    table = tmp_path / "x.csv"
    for text in ("step;reward;loss\n1;0,5;\n2;nan;1e-3\n", "step\treward\n1\t0,5\n2\tNaN\n",
                 'step,reward\n1,"0,5"\n2,NaN\n', "step, reward\n1, 0.5\n2, nan\n"):
        table.write_text(text, "utf-8")
        first, second = read(table).records
        assert first["reward"] == 0.5 and "loss" not in first and math.isnan(second["reward"])
    table.write_text('step,reward,loss\n"1,002","1,234,567.5","-1,5"\n', "utf-8")
    assert read(table).records == [{"step": 1002, "reward": 1234567.5, "loss": -1.5}]
    table.write_text("step;reward\n1;1,002\n", "utf-8")
    assert read(table).records[0]["reward"] == 1.002


@pytest.mark.parametrize("name, content", [
    ("empty.jsonl", b""), ("cut.json", b'{"log_history": [{"rew'), ("other.json", b"[1, 2]"),
    ("number.json", b"5"), ("text.jsonl", b'{"step": 1, "reward": "high"}'), ("x.csv", b'a,"\n'),
    ("noise.jsonl", bytes(range(256))), ("noise.csv", bytes(range(256))), ("none.jsonl", None)])
def test_a_file_that_is_no_log_gets_one_line(name, content, tmp_path, capsys):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as end:
        read(tmp_path / name)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and name in error


# ---- the command -----------------------------------------------------------------------------

@pytest.mark.parametrize("words, code", [
    ([], 0), (["--fail-on", "any"], 1), (["--fail-on", "rate,no-gradient"], 1),
    (["--fail-on", "rate"], 0), (["--fail-on", "rates"], 2)])
def test_a_job_that_watches_ends_with_1_for_what_it_asks_for_and_with_2_for_an_unknown_name(
        words, code, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check", str(log_of("verl", tmp_path)), *words])
    with pytest.raises(SystemExit) as end:
        main()
        raise SystemExit(0)
    assert end.value.code == code
    assert ("docs/why.md#no-gradient" in capsys.readouterr().out) == (code != 2)


def test_what_was_read_comes_first_then_what_was_looked_at_then_what_it_can_decide(
        tmp_path, monkeypatch, capsys):
    path = log_of("verl", tmp_path, grad_norm=[1.0, 1.0])
    monkeypatch.setattr(sys, "argv", ["check", str(path)])
    main()
    assert capsys.readouterr().out.splitlines() == [
        f"read {path}: names of verl, 20 steps from 0 to 19",
        "  reward = critic/score/mean, grad_norm = actor/grad_norm, entropy = actor/entropy",
        "nothing found; looked at reward, grad_norm, entropy; the log lacks frac_reward_zero_std, "
        "kl, completions/clipped_ratio, completions/mean_length, sampling/surprise",
        "the reward rises: 0.35, then 0.63"]
    assert summary(run_of()).startswith("nothing found; looked at reward, frac_reward_zero_std")
    assert summary(run_of(n=1)).startswith("looked at reward, frac_reward_zero_std")


@pytest.mark.parametrize("text, changes", [
    ("too short to judge: one step decides nothing", {"n": 1}),
    ("too short to judge: a rise below 0.2 would not show in 12 steps", {
        "n": 12, "reward": lambda i: 0.5 + 0.1 * (-1) ** i}),
    ("the reward stays: 0.5, then 0.5", {"reward": [0.5, 0.5]}),
    ("the reward falls: 0.475, then 0.335", {"reward": lambda i: 0.5 - 0.01 * i}),
    ("the reward stays before and after it falls at once in step 11", {"reward": [0.5, 0.3]}),
    ("the rewards are of groups that differ only", {"filtered": [2.0, 2.0]})])
def test_what_the_rewards_can_decide_is_said(text, changes):
    assert decided(run_of(**changes)).startswith(text)


def test_advice_has_the_names_of_the_trainer():
    for trainer, name in (("ours", "--learning_rate"), ("TRL", " learning_rate"),
                          ("verl", "actor_rollout_ref.actor.optim.lr"),
                          ("SkyRL", "the learning rate")):
        [text] = check(run_of(trainer=trainer, kl=[0.1, 38.0]))
        assert name in text and ("--" in text) == (trainer == "ours")


def test_the_probe_of_the_page_runs(capsys):
    part = PAGES["docs/why.md"].partition("## Is my reward hackable?")[2]
    define, use = re.findall(r"```python\n(.*?)```", part, re.S)
    exec(define + use, {})
    assert {line[:6] for line in capsys.readouterr().out.splitlines()} == {"  0.00"}
