"""Test-time compute: thinking longer, voting, and choosing by a reward model, at equal tokens

Claim. The majority of several samples is right more often than one (self-consistency, Wang and
others, 2203.11171). With as many samples, the one that a trained verifier rates highest is better
than a majority (Lightman and others, 2305.20050), and where samples are so many that some fool the
verifier it gets worse again (Cobbe and others, 2110.14168). Tokens may also go into one longer
thought; which use of them is best depends on the problem (Snell and others, 2408.03314).

Prediction. The base mostly guesses, and a guess takes few tokens. For the tokens of one thought
there are three outputs of the base on arithmetic and four on countdown. One thought is right 98 of
100 times on arithmetic and one in three times on countdown, so it beats the majority of as many
tokens on both, and the majority of thoughts beats what can be made of outputs of the base. The
reward model has seen that outputs that think are right more often, and rates them higher. So best
of 8 beats the majority, and the weighted vote, which counts guesses less, does, too. Best of 64
does not: on arithmetic this majority is always right (docs/passk.json), and on countdown the
highest rating is of a thought that may be wrong, while several thoughts have to agree in a vote. A
pilot of 8 problems had been seen; in it best of 64 was worse than best of 8 on arithmetic.

Method. Outputs of the base to held-out problems: 64 as it samples them, and 16 that are made to
begin with a thought. The reward model is tasks/preferences.py's, trained on 20 batches of other
problems for each seed. A weighted vote adds up the ratings of the outputs with an answer, cut to
0..1. Best of N is its mean over all choices of N of the 64; votes are those of disjoint blocks. A
budget is N times the mean tokens of an output. How a best of some 400
samples does, which is where it got worse (Cobbe and others), is not looked at.
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
from lab.draw import BLUE, GREEN, GREY, ORANGE, RED, curves
from lab.experiment import Experiment, numbers
from lab.sharpen import THINK
from lab.training import continued, load_base
from lab.verdict import OURS, Claim
from tasks import preferences
from tools.scores import votes

WANG = "[Wang and others](https://arxiv.org/abs/2203.11171)"
LIGHTMAN = "[Lightman and others](https://arxiv.org/abs/2305.20050)"
TASKS = {"arithmetic": "", "countdown": "--task countdown"}
PROBLEMS, PART = 128, 8                         # of each task and seed, and in a batch
FEW, SAMPLES, THOUGHTS = 8, 64, 16              # of each problem
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)         # N
MAJORITY, WEIGHTED, BEST, ANY = ("majority", "weighted vote", "best of N", "any of N (pass@N)")
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
    chances = [math.comb(n - 1 - place, N - 1) / math.comb(n, N) for place in range(n)]
    return sum(chance * right[i] for chance, i in zip(chances, order))


def winner(answers, weights):
    """The answer with the most weight, the first of those that tie. None is no vote. -> str or
    None"""
    totals = {}
    for answer, weight in zip(answers, weights):
        if answer is not None:
            totals[answer] = totals.get(answer, 0.0) + weight
    return max(totals, key=totals.get, default=None)


def vote(N, answers, weights, right_answers):
    """How often the winner among N outputs is right, over the disjoint blocks of N. -> float"""
    winners = [winner(answers[start:start + N], weights[start:start + N])
               for start in range(0, len(answers) - N + 1, N)]
    return statistics.mean(answer in right_answers for answer in winners)


def ways(N, outputs):
    """How often each way to choose among N outputs to a problem is right. -> {way: float}"""
    answers, ratings, right, _ = outputs
    right_answers = {answer for answer, is_right in zip(answers, right) if is_right}
    equal = [1.0] * len(answers)
    cut = [min(max(rating, 0.0), 1.0) for rating in ratings]
    return {MAJORITY: vote(N, answers, equal, right_answers),
            WEIGHTED: vote(N, answers, cut, right_answers),
            BEST: best_of(N, ratings, right),
            ANY: common.pass_at_k(len(right), sum(right), N)}


# ---- 2. samples ------------------------------------------------------------------------------

def split(n, *columns):
    """Lists of all outputs to several problems, of n each. -> list of Outputs, one a problem"""
    return [Outputs(*(column[start:start + n] for column in columns))
            for start in range(0, len(columns[0]), n)]


def outputs(policy, task, cfg, model, part):
    """Samples of the base for some held-out problems. -> list of Outputs"""
    cfg = dataclasses.replace(cfg, num_prompts=PART, num_generations=SAMPLES)
    batch = grpo.sample_batch(policy, task, cfg, ("part", part), "test")
    answers = votes(task, batch.problems, batch.texts, SAMPLES)
    ratings = model.rewards(batch).flatten().tolist()
    lengths = batch.mask.sum(dim=1).tolist()
    return split(SAMPLES, answers, ratings, batch.is_correct.flatten().tolist(), lengths)


def asked(task, cfg, part):
    """The problems that sample_batch draws for `outputs`. -> list"""
    return common.sample_problems(task, PART, (cfg.seed, ("part", part)), "test")


def thoughts(policy, task, cfg, part):
    """The same problems with outputs that begin with <think>, all rated alike. -> list of
    Outputs"""
    problems = [problem for problem in asked(task, cfg, part) for _ in range(THOUGHTS)]       # B
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


def by_number(problems, counts):
    """How often each way to choose is right, for each number of outputs. -> {way: list}"""
    found = {}
    for N in counts:
        scores = [ways(N, problem) for problem in problems]
        for way in scores[0]:
            found.setdefault(way, []).append(statistics.mean(score[way] for score in scores))
    return found


@EXPERIMENT.measure(reversed(TASKS))            # the longer ones first
def spent(seed, name):
    """All ways to spend tokens on a task."""
    cfg, task, policy = load_base(grpo, f"--seed {seed} {TASKS[name]}")
    model = preferences.RewardModel(policy)
    sample = functools.partial(grpo.sample_batch, policy, task, cfg)
    in_order = preferences.fit(model, sample, seed)
    parts = range(PROBLEMS // PART)
    sampled = sum((outputs(policy, task, cfg, model, part) for part in parts), [])
    thought = sum((thoughts(policy, task, cfg, part) for part in parts), [])
    few = [N for N in COUNTS if N <= THOUGHTS]
    return by_number(sampled, COUNTS) | {
        THOUGHT_VOTE: by_number(thought, few)[MAJORITY], "in order": in_order,
        "tokens": mean_tokens(sampled), "thought tokens": mean_tokens(thought)}


# ---- 3. what was found -----------------------------------------------------------------------

def as_many(found, num_thoughts):
    """The least N whose outputs have, on average, at least the tokens of so many thoughts."""
    wanted = num_thoughts * found["thought tokens"].mean() / found["tokens"].mean()
    return min(N for N in COUNTS if wanted <= N)


def page(spent):
    for task in TASKS:
        found = spent[task]
        lines = {way: found[way] for way in (BEST, WEIGHTED, MAJORITY, ANY, THOUGHT_VOTE)}
        right = {way: dict(zip(COUNTS, rows.T)) for way, rows in lines.items()}     # way, N: (S,)
        one = as_many(found, 1)
        four = as_many(found, 4)
        voted = right[MAJORITY][one]
        thought = right[THOUGHT_VOTE][1]
        said = (f"{task.capitalize()}: with the tokens of one thought, {one} outputs, a vote is "
                f"right {voted.mean():.0%} of the time, the thought {thought.mean():.0%}")
        yield Claim(f"{task}: one thought is right more often than the majority of {one} outputs, "
                    "which take as many tokens", OURS, thought - voted, at_least=GAIN, shown=said)
        yield Claim(f"{task}: the majority of 4 thoughts is right more often than the weighted "
                    f"vote of {four} outputs, which take as many", OURS,
                    right[THOUGHT_VOTE][4] - right[WEIGHTED][four], at_least=GAIN)
        yield Claim(f"{task}: the majority of {SAMPLES} is right more often than one output", WANG,
                    right[MAJORITY][SAMPLES] - right[MAJORITY][1], at_least=GAIN)
        for N in (FEW, SAMPLES):
            yield Claim(f"{task}: the best of {N} by the reward model is right more often than "
                        "their majority", LIGHTMAN, right[BEST][N] - right[MAJORITY][N],
                        at_least=GAIN)
            yield Claim(f"{task}: the weighted vote of {N} is right more often than the best", OURS,
                        right[WEIGHTED][N] - right[BEST][N], at_least=GAIN)
        yield Claim(f"{task}: the best of {SAMPLES} is right less often than the best of {FEW}",
                    OURS, right[BEST][SAMPLES] - right[BEST][FEW], at_most=-GAIN)

        x = {}
        for way, rows in lines.items():
            unit = "thought tokens" if way == THOUGHT_VOTE else "tokens"
            x[way] = found[unit].mean() * numpy.array(COUNTS[:rows.shape[1]])
        yield curves(lines, said, x=x, given=dict(zip(lines, (RED, ORANGE, BLUE, GREY, GREEN))),
                     xscale="log", xlabel="tokens for a problem", ylim=(0, 1.03), height=3.2,
                     ylabel="share right")
        for counts, shown in (((1, 4, 16), list(lines)), ((SAMPLES,), list(lines)[:-1])):
            rows = {f"N = {N}": {way: right[way][N] for way in shown} for N in counts}
            yield numbers(rows, dict(zip(shown, shown)), by=task)
    yield numbers(spent, {"tokens": "tokens of an output", "thought tokens": "of a thought",
                          "in order": "pairs that the reward model has in order"}, by="task")
