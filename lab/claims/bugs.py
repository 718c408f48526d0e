"""Bugs: what ten mistakes look like from outside

Claim. How the code does it decides as much as the algorithm (Engstrom and others, 2005.12729), and
mistakes in it are silent: nothing crashes, and the reward still rises.

Prediction. The reward alone tells of two: with the advantage of the row before it falls, because
those of a group add up to 0, so that the neighbour's has more often the other sign; with old
log-probabilities that are not detached it stays. The KL is 0 where the reference is the policy.
Without the EOS completions are one token shorter, with a cold sampler the first rewards are higher,
with tiled prompts nearly all groups have signal, and k3 upside down pulls more, so that the KL is
lower. Means of means, the std of the batch and a KL that counts twice are seen nowhere.

Method. Each mistake is a replacement in the text of a copy of grpo.py. All runs begin with one base
and have the flags --loss_type dapo --beta 0.05 --num_iterations 2: without them some mistakes would
do nothing. The reward rises if the interval of its rise, from the first five steps to the last, is
above 0.05. A metric tells of a mistake if its mean over the first five steps, or over the last
five, lies with every seed outside the span of the right runs, widened by its own width at both
ends; with four of five seeds it is as good as seen. Right runs with other seeds show how often this
is a false alarm. The tests that are named fail with the mistake, and pass without it.

Outcome. Right: what was said of the reward, the frozen reference, the EOS, the std of the batch and
the KL that counts twice. k3 upside down is seen, though not by its KL: with four of five seeds the
gradient is huge at the end, with norms of 3 to 291 instead of 0.1. Wrong: no metric tells of tiled
prompts; the cold sampler shows in the signal at the end, means of means in the norm of the
gradient.
"""
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from lab.docs import ROOT, table
from lab.draw import GREY, dots
from lab.experiment import Block, Experiment, numbers, run_once
from lab.training import make_base
from lab.verdict import OURS, Claim, student

FLAGS = ("--loss_type dapo --beta 0.05 --num_iterations 2 --num_prompts 16 --micro_batch_size 16 "
         "--max_steps 20 --stop_at 2 --num_eval_problems 1 --num_eval_samples 1 --eval_steps 1000")
METRICS = ("reward", "signal", "completions/mean_length", "entropy", "kl",
           "clip_ratio/region_mean", "max_log_ratio", "grad_norm")
WINDOWS = {"the first 5 steps": slice(5), "the last 5 steps": slice(-5, None)}
MOST = 0.8                                      # of the seeds
RISE = 0.05                                     # of the reward, what counts as one
RIGHT = "no mistake"
CONTROL = "no mistake, other seeds"


class Mistake(NamedTuple):
    words: str
    old: str            # text of grpo.py
    new: str
    test: str           # fails with it


TEXT = """
k3 upside down: the ratio in the estimate of the KL is pi / pi_ref
torch.expm1(-x) + x
torch.expm1(x) - x
test_kl.py::test_k1_and_k3_average_to_the_kl_of_the_policy_from_the_reference_and_k2_does_not

no EOS in the mask: the token that ends a completion is not trained
return tokens, mask, logps, entropy, mask.sum(dim=1).long()
return tokens, mask * (tokens != EOS), logps, entropy, mask.sum(dim=1).long()
test_update.py::test_the_eos_that_ends_a_completion_has_a_gradient_and_the_padding_behind_it_none

prompts tiled: prompts come as 1 2 3 1 2 3, not 1 1 2 2 3 3, so a group mixes several problems
[problem for problem in problems for _ in range(cfg.num_generations)]
problems * cfg.num_generations
test_batches.py::test_each_completion_is_verified_and_scored_against_its_own_problem

cold sampler: sampled with temperature 0.7, scored with 1
cdf = F.softmax(logits / temperature, dim=-1)
cdf = F.softmax(logits / 0.7 / temperature, dim=-1)
test_rollout.py::test_first_tokens_are_as_frequent_as_the_softmax_says

means of means: each micro-batch is divided by its own tokens
token_loss, mask, average, num_sequences, num_tokens, cfg.max_completion_length)
token_loss, mask, average) * len(part) / num_sequences
test_update.py::test_the_gradient_is_that_of_equation_5_in_any_number_of_micro_batches

std of the batch: all groups are divided by one standard deviation
A / (rewards.std(dim=1, keepdim=True) + eps)
A / (rewards.std() + eps)
test_grpo.py::test_a_group_is_scaled_by_its_own_spread_or_mean

advantage off by one: each row has the advantage of the row before it
logps, old_logps, A[part, :T], mask
logps, old_logps, A[part - 1, :T], mask
test_update.py::test_the_gradient_is_that_of_equation_5_in_any_number_of_micro_batches

reference not frozen: the reference is the policy itself
reference = copy.deepcopy(policy)
reference = policy
test_update.py::test_the_reference_of_a_run_stays_where_the_policy_began

old not detached: the old log-probs are the new ones: the ratio is 1, and its gradient 0
logps - old_logps.detach(), 0.0
logps - logps, 0.0
test_family.py::test_on_fresh_samples_the_ratio_is_one_and_the_gradient_that_of_reinforce

KL twice: the KL is added a second time
token_loss = token_loss + cfg.beta * token_kl
token_loss = token_loss + 2 * cfg.beta * token_kl
test_update.py::test_the_gradient_is_that_of_equation_5_in_any_number_of_micro_batches
"""
MISTAKES = {name: Mistake(*rest)
            for name, *rest in re.findall(r"(.*?): (.*)\n(.*)\n(.*)\n(.*)\n", TEXT)}
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5), one_base=True)


def plant(name, folder):
    """Make a folder with common.py and a grpo.py that has the mistake. -> path of the latter"""
    source = (ROOT / "grpo.py").read_text()
    if name in MISTAKES:
        assert source.count(MISTAKES[name].old) == 1, name
        source = source.replace(MISTAKES[name].old, MISTAKES[name].new)
    folder.mkdir()
    (folder / "common.py").write_text((ROOT / "common.py").read_text())
    (folder / "grpo.py").write_text(source)
    return folder / "grpo.py"


@EXPERIMENT.measure([RIGHT, *MISTAKES, CONTROL])
def runs(seed, name):
    """Runs from the base of the right code."""
    base = make_base(["grpo.py"])
    with tempfile.TemporaryDirectory() as work:
        torch.save({"policy": base}, Path(work, "checkpoint.pt"))
        script = plant(name, Path(work, "copy"))
        return run_once(f"{script} {FLAGS} --init_from {work}", seed + 100 * (name == CONTROL),
                        METRICS, ())


def side(values, right, share=1.0):
    """On which side of the widened span of the right values this share of the others lies, or more.
    -> str, "" if none"""
    width = max(right) - min(right)
    if (values > max(right) + width).mean() >= share:
        return "high"
    if (values < min(right) - width).mean() >= share:
        return "low"
    return ""


def means(found):
    """The mean of each metric over each window. -> {(metric, window): (S,)}"""
    return {(metric, window): found[metric][:, steps].mean(axis=1)
            for metric in METRICS for window, steps in WINDOWS.items()}


def signs(wrong, right, share=1.0):
    """Where the means of a mistake are too high or too low. -> {(metric, window): which}"""
    sides = {place: side(wrong[place], right[place], share) for place in right}
    return {place: which for place, which in sides.items() if which}


def page(runs):
    of_runs = {name: means(found) for name, found in runs.items()}
    told = {name: signs(found, of_runs[RIGHT]) for name, found in of_runs.items()}
    first, last = WINDOWS
    rise = {name: of["reward", last] - of["reward", first] for name, of in of_runs.items()}
    learning = [name for name in MISTAKES if student(rise[name])[0] > RISE]
    hinted = {name: signs(found, of_runs[RIGHT], MOST) for name, found in of_runs.items()}
    unseen = [name for name in MISTAKES if not hinted[name]]
    silent = Claim("with most of ten bugs, one at a time, the reward still rises", OURS,
                   len(learning), at_least=6, exact=True, unit="of 10", shown="Of 10 bugs planted "
                   f"in grpo.py, one at a time, {len(learning)} let the reward rise all the same")
    yield silent
    yield Claim("some bugs show in no metric with most seeds, only in a test", OURS, len(unseen),
                at_least=1, exact=True, unit="of 10", shown=f"{len(unseen)} of these 10 bugs show "
                f"in no metric with most seeds, only in a test: {', '.join(unseen)}")
    yield Claim("right code with other seeds raises a false alarm at most once", OURS,
                len(hinted[CONTROL]), at_most=1, exact=True, unit="of 16 numbers")

    yield dots(rise, silent.finding, given={RIGHT: GREY, CONTROL: GREY}, level=(0, "no rise"),
               xlabel="rise of the reward in 20 steps; a dot for each seed")
    rows = []
    for name, mistake in MISTAKES.items():
        shows = [dict.fromkeys(f"`{metric}`" for metric, _ in found[name])
                 for found in (told, hinted)]
        rows.append([name, mistake.words, *(", ".join(metrics) or "nothing" for metrics in shows),
                     f"`{mistake.test}`"])
    yield table(["bug", "what is wrong", "metrics that show it with every seed", "with most",
                 "the test that fails"], rows)
    rows = {name: {metric: found[metric, last].mean() for metric in METRICS}
            for name, found in of_runs.items()}
    yield numbers(rows, {metric: f"`{metric}`" for metric in METRICS}, by=last)

    looks = {}
    for name in MISTAKES:
        for (metric, window), which in told[name].items():
            looks.setdefault((f"`{metric}` too {which}", window), []).append(name)
    rows = [[*look, ", ".join(names)] for look, names in sorted(looks.items())]
    yield Block("symptoms", table(["what you see", "when", "mistakes that look like that"], rows))
