"""Test-time compute: thinking longer, voting, and choosing by a reward model, at equal tokens

Claim. The majority of several samples is right more often than one (self-consistency, Wang and
others, 2203.11171). With as many samples, the one that a trained verifier rates highest is better
than a majority (Lightman and others, 2305.20050). Tokens may also go into one longer thought; which
use of them is best depends on the problem (Snell and others, 2408.03314).

Prediction. The base mostly guesses, and a guess takes few tokens. For the tokens of one thought
there are three outputs of the base on arithmetic and four on countdown. One thought is right 98 of
100 times on arithmetic and one in three times on countdown, so it beats the majority of as many
tokens on both. The reward model has seen that outputs that think are right more often, and rates
them higher. So best of 8 beats the majority. Best of 64 does not: on arithmetic this majority is
always right (docs/passk.json at commit 0516fa1), and on countdown the highest rating is of a
thought that may be wrong, while several thoughts have to agree in a vote. A pilot of 8 problems had
been seen; in it best of 64 was worse than best of 8 on arithmetic.

Method. Outputs of the base to held-out problems: 64 as it samples them, and 16 that are made to
begin with a thought. The reward model is tasks/preferences.py's, trained on 20 batches of other
problems for each seed. Best of N is its mean over all choices of N of the 64; votes are those of
disjoint blocks. A budget is N times the mean tokens of an output.

Outcome. As predicted, but for two things on countdown: one thought is right every second time, not
every third, and the best of 64 by the reward model beats their majority, in which guesses, most of
the outputs, seldom agree on what is right. On arithmetic the best of N gets worse beyond 16
outputs, as some please the model and are wrong.
"""
import dataclasses
import functools
import math
import statistics
from typing import NamedTuple

import numpy
import torch

import common
import grpo
from lab.draw import BLUE, GREEN, GREY, RED, curves
from lab.experiment import Experiment, numbers
from lab.sharpen import THINK
from lab.training import continued, load_base
from lab.verdict import OURS, Claim
from tasks import preferences
from tools.scores import pass_at_k, votes

WANG = "[Wang and others](https://arxiv.org/abs/2203.11171)"
LIGHTMAN = "[Lightman and others](https://arxiv.org/abs/2305.20050)"
TASKS = {"arithmetic": "", "countdown": "--task countdown"}
PARTS = 16                                      # batches of each task and seed
PART = 8                                        # problems in one
FEW = 8                                         # outputs to a problem
SAMPLES = 64
THOUGHTS = 16                                   # those that are made to think
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)         # N
MAJORITY = "majority"
BEST = "best of N"
ANY = "any of N (pass@N)"
THOUGHT_VOTE = "majority of thoughts"
GAIN = 0.02                                     # of accuracy, what counts as one
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5))


# ---- 1. ways to choose among the outputs to a problem ----------------------------------------

class Outputs(NamedTuple):
    """The n outputs to a problem: answers as tools.scores.votes has them, ratings, and so on."""
    answers: list
    ratings: list
    right: list             # True or False
    lengths: list           # tokens


def best_of(N, ratings, right):
    """The chance that of N outputs, drawn from n without putting back, the one with the highest
    rating is right. -> float"""
    n = len(ratings)
    order = sorted(range(n), key=lambda i: ratings[i], reverse=True)
    chances = [math.comb(lower, N - 1) / math.comb(n, N) for lower in reversed(range(n))]
    return sum(chance * right[i] for chance, i in zip(chances, order))


def vote(N, answers, right):
    """How often the most frequent answer of N outputs, the first of those that tie, is right, over
    the disjoint blocks of N. -> float"""
    right_answers = {answer for answer, is_right in zip(answers, right) if is_right}
    found = []
    for start in range(0, len(answers) - N + 1, N):
        given = [answer for answer in answers[start:start + N] if answer is not None]
        found.append(statistics.mode(given or [None]) in right_answers)
    return statistics.mean(found)


def ways(N, problems):
    """How often each way to choose among N outputs is right, in the mean of problems; Outputs of
    each. -> {way: float}"""
    voted = [vote(N, one.answers, one.right) for one in problems]
    best = [best_of(N, one.ratings, one.right) for one in problems]
    either = [pass_at_k(len(one.right), sum(one.right), N) for one in problems]
    return {MAJORITY: statistics.mean(voted), BEST: statistics.mean(best),
            ANY: statistics.mean(either)}


# ---- 2. samples ------------------------------------------------------------------------------

def split(n, *columns):
    """Lists of all outputs to several problems, of n each. -> list of Outputs, one a problem"""
    starts = range(0, len(columns[0]), n)
    return [Outputs(*(column[start:start + n] for column in columns)) for start in starts]


def outputs(policy, task, cfg, model, part):
    """Samples of the base for some held-out problems. -> list of Outputs"""
    cfg = dataclasses.replace(cfg, num_prompts=PART, num_generations=SAMPLES)
    batch = grpo.sample_batch(policy, task, cfg, ("part", part), "test")
    answers = votes(task, batch.problems, batch.texts, SAMPLES)
    ratings = model.rewards(batch).flatten().tolist()
    lengths = batch.mask.sum(dim=1).tolist()
    return split(SAMPLES, answers, ratings, batch.is_correct.flatten().tolist(), lengths)


def thoughts(policy, task, cfg, part):
    """The same problems with outputs that begin with <think>, all rated alike. -> list of
    Outputs"""
    asked = common.sample_problems(task, PART, (cfg.seed, ("part", part)), "test")
    problems = [problem for problem in asked for _ in range(THOUGHTS)]                        # B
    generator = common.generator(cfg.seed, "thoughts", part)
    uniforms = torch.rand(len(problems), cfg.max_completion_length, generator=generator)
    first = torch.full((len(problems), 1), THINK)
    prompts = grpo.encode_prompts(problems, task, cfg.device)
    _, _, mask, texts = continued(grpo, policy, cfg, problems, prompts, first, uniforms)
    answers = votes(task, problems, texts, THOUGHTS)
    right = [task.verify(problem, text) == 1 for problem, text in zip(problems, texts)]
    lengths = (mask.sum(dim=1) + 1).tolist()                                # with <think>
    return split(THOUGHTS, answers, [0.0] * len(right), right, lengths)


def mean_tokens(problems):
    """Of all outputs to all problems. -> float"""
    return statistics.mean(length for problem in problems for length in problem.lengths)


@EXPERIMENT.measure(reversed(TASKS))            # the longer ones first
def spent(seed, name):
    """All ways to spend tokens on a task."""
    cfg, task, policy = load_base(grpo, f"--seed {seed} {TASKS[name]}")
    model = preferences.RewardModel(policy)
    sample = functools.partial(grpo.sample_batch, policy, task, cfg)
    in_order = preferences.fit(model, sample, seed)
    sampled = sum((outputs(policy, task, cfg, model, part) for part in range(PARTS)), [])
    thought = sum((thoughts(policy, task, cfg, part) for part in range(PARTS)), [])
    chosen = [ways(N, sampled) for N in COUNTS]
    return {way: [one[way] for one in chosen] for way in chosen[0]} | {
        THOUGHT_VOTE: [ways(N, thought)[MAJORITY] for N in COUNTS if N <= THOUGHTS],
        "in order": in_order, "tokens": mean_tokens(sampled),
        "thought tokens": mean_tokens(thought)}


# ---- 3. what was found -----------------------------------------------------------------------

def page(spent):
    rows = {}
    for task in TASKS:
        found = spent[task]
        tokens = {way: found["tokens"].mean() for way in (BEST, MAJORITY, ANY)}
        tokens[THOUGHT_VOTE] = found["thought tokens"].mean()
        right = {way: dict(zip(COUNTS, found[way].T)) for way in tokens}    # of each N, (S,)
        # the least N whose outputs have, on average, at least the tokens of a thought
        equal = min(N for N in COUNTS if N * tokens[MAJORITY] >= tokens[THOUGHT_VOTE])
        voted = right[MAJORITY][equal]
        thought = right[THOUGHT_VOTE][1]
        said = (f"{task.capitalize()}: one output that thinks is right {thought.mean():.0%} of the "
                f"time, a vote of {equal} outputs, of as many tokens, {voted.mean():.0%}")
        yield Claim(f"{task}: one thought is right more often than the majority of {equal} "
                    "outputs, which take as many tokens", OURS, thought - voted, at_least=GAIN,
                    shown=said)
        yield Claim(f"{task}: the majority of {SAMPLES} is right more often than one output", WANG,
                    right[MAJORITY][SAMPLES] - right[MAJORITY][1], at_least=GAIN)
        for N in (FEW, SAMPLES):
            yield Claim(f"{task}: the best of {N} by the reward model is right more often than "
                        "their majority", LIGHTMAN, right[BEST][N] - right[MAJORITY][N],
                        at_least=GAIN)
        x = {way: mean * numpy.array([*right[way]]) for way, mean in tokens.items()}
        yield curves({way: found[way] for way in tokens}, said, x=x, height=3.2, xscale="log",
                     given=dict(zip(tokens, (RED, BLUE, GREY, GREEN))), ylabel="share right",
                     xlabel="tokens for a problem", xlim=(9, None), ylim=(0, 1.03))
        rows |= {f"{task}, N = {N}": {way: right[way][N] for way in (BEST, MAJORITY, ANY)}
                 for N in (1, FEW, SAMPLES)}
    yield numbers(rows, {way: way for way in (BEST, MAJORITY, ANY)}, by="outputs")
    yield numbers(spent, {"tokens": "tokens of an output", "thought tokens": "tokens of a thought",
                          "in order": "pairs that the reward model has in order"}, by="task")
