"""Test-time compute: thinking longer, voting, and choosing by a reward model, at equal tokens.

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
budget is N times the mean tokens of an output. One thought that may have at most T tokens is right
if it has come to its end within T; it costs the tokens it takes.
"""
import dataclasses
import functools
import math
import statistics
from typing import NamedTuple

import torch

import common
import grpo
from lab.entry import compared, mean_and_spread, mean_curve, minus
from lab.sharpen import THINK
from lab.training import continued, side_by_side
from tasks import preferences
from tools.runs import make_base
from tools.scores import votes

SEEDS = [0, 1, 2, 3, 4]
TASKS = {"arithmetic": [], "countdown": ["--task", "countdown"]}
PROBLEMS, PART = 128, 8                         # of each task and seed, and in a batch
FEW, SAMPLES, THOUGHTS = 8, 64, 16              # of each problem
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)         # N
SHARES_OF_T = [part / 16 for part in range(4, 17)]          # of the longest thought
MAJORITY, WEIGHTED, BEST, ANY = ("majority", "weighted vote", "best of N", "any of N (pass@N)")
THOUGHT_VOTE = "majority of thoughts"


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


def mean(values):
    return round(statistics.mean(values), 5)


def spend(name, seed, weights):
    """All ways to spend tokens on one task. -> dict"""
    torch.set_num_threads(1)
    cfg = common.parse_flags(grpo.Config, ["--seed", str(seed), *TASKS[name]])
    task = common.load_task(cfg, grpo.verify)
    policy = grpo.GPT(cfg)
    policy.load_state_dict(weights)
    model = preferences.RewardModel(policy)
    sample = functools.partial(grpo.sample_batch, policy, task, cfg)
    in_order = preferences.fit(model, sample, seed)

    parts = range(PROBLEMS // PART)
    sampled = sum((outputs(policy, task, cfg, model, part) for part in parts), [])
    thought = sum((thoughts(policy, task, cfg, part) for part in parts), [])
    found = {"in order": round(in_order, 5), "tokens": mean_tokens(sampled),
             "thought tokens": mean_tokens(thought), "curves": curves(sampled, COUNTS)}
    few = [N for N in COUNTS if N <= THOUGHTS]
    found["curves"][THOUGHT_VOTE] = curves(thought, few)[MAJORITY]
    prompts = {problem.prompt for part in parts for problem in asked(task, cfg, part)}
    found["problems"] = len(prompts)
    limits = [share * cfg.max_completion_length for share in SHARES_OF_T]
    found["one thought"] = [limited(thought, T) for T in limits]
    return found


def mean_tokens(problems):
    return mean(length for problem in problems for length in problem.lengths)


def curves(problems, counts):
    """How often each way to choose is right, for each number of outputs. -> {way: list}"""
    found = {}
    for N in counts:
        scores = [ways(N, problem) for problem in problems]
        for way in scores[0]:
            found.setdefault(way, []).append(mean(score[way] for score in scores))
    return found


def limited(problems, T):
    """What becomes of outputs that are stopped after T tokens: the mean number of tokens, and the
    share that is right. -> list"""
    tokens = []
    right = []
    for problem in problems:
        for is_right, length in zip(problem.right, problem.lengths):
            tokens.append(min(length, T))
            right.append(float(is_right and length <= T))
    return [mean(tokens), mean(right)]


def measure(seeds):
    jobs = [(name, seed, make_base(["grpo.py", *flags]))
            for name, flags in reversed(TASKS.items()) for seed in seeds]
    found = {name: [] for name in TASKS}
    for (name, *_), result in zip(jobs, side_by_side(spend, jobs)):
        found[name].append(result)
    return found


# ---- 3. what was found -----------------------------------------------------------------------

def at(found, task, way, N):
    """How often a way to choose among N outputs is right, for each seed. -> list"""
    return [curves[way][COUNTS.index(N)] for curves in of(found, task, "curves")]


def of(found, task, name):
    """A number for each seed. -> list"""
    return [result[name] for result in found[task]]


def tokens(found, task, name="tokens"):
    """The mean tokens of an output, or of a thought. -> float"""
    return statistics.mean(of(found, task, name))


def as_many_tokens(found, task, num_thoughts):
    """The least N whose outputs of the base have, on average, at least the tokens of so many
    thoughts. -> int"""
    budget = num_thoughts * tokens(found, task, "thought tokens")
    enough = [N for N in COUNTS if N * tokens(found, task) >= budget]
    return enough[0]


def tables(found):
    heads = ["task", "N", *found["arithmetic"][0]["curves"]]
    rows = []
    for task in TASKS:
        for N in (1, 4, 16, 64):
            ways_of_N = heads[2:] if N <= THOUGHTS else heads[2:-1]     # without that of thoughts
            cells = [mean_and_spread(at(found, task, way, N)) for way in ways_of_N]
            rows.append([task, N, *cells, *[""] * (len(heads) - 2 - len(cells))])
    names = {"tokens": "tokens of an output", "thought tokens": "of a thought",
             "in order": "pairs that the reward model has in order"}
    costs = []
    for task in TASKS:
        costs.append([task, *(mean_and_spread(of(found, task, name)) for name in names)])
    return [(heads, rows), (["task", *names.values()], costs)]


def claims(found):
    listed = []
    for task in TASKS:
        one = as_many_tokens(found, task, 1)
        four = as_many_tokens(found, task, 4)
        listed += [
            compared(f"{task}: the majority of {SAMPLES} is right more often than one output",
                     minus(at(found, task, MAJORITY, SAMPLES), at(found, task, MAJORITY, 1))),
            compared(f"{task}: one thought is right more often than the majority of {one} outputs, "
                     "which take as many tokens",
                     minus(at(found, task, THOUGHT_VOTE, 1), at(found, task, MAJORITY, one))),
            compared(f"{task}: the majority of 4 thoughts is right more often than the weighted "
                     f"vote of {four} outputs, which take as many tokens",
                     minus(at(found, task, THOUGHT_VOTE, 4), at(found, task, WEIGHTED, four)))]
        for N in (FEW, SAMPLES):
            best = at(found, task, BEST, N)
            listed += [
                compared(f"{task}: the best of {N} by the reward model is right more often than "
                         "their majority", minus(best, at(found, task, MAJORITY, N))),
                compared(f"{task}: the weighted vote of {N} is right more often than the best",
                         minus(at(found, task, WEIGHTED, N), best))]
        listed.append(
            compared(f"{task}: the best of {SAMPLES} is right less often than the best of {FEW}",
                     minus(at(found, task, BEST, FEW), at(found, task, BEST, SAMPLES))))
    return listed


def note(found):
    different = [number for task in TASKS for number in of(found, task, "problems")]
    return (f"{PROBLEMS} held-out problems for each task and seed, of them {min(different)} to "
            f"{max(different)} different ones; {SAMPLES} outputs and {THOUGHTS} thoughts of each; "
            "one base for each task")


def panels(found):
    def by_tokens(task):
        def fill(axis):
            for way in (BEST, WEIGHTED, MAJORITY, ANY, THOUGHT_VOTE):
                means = mean_curve([curves[way] for curves in of(found, task, "curves")])
                name = "thought tokens" if way == THOUGHT_VOTE else "tokens"
                cost = tokens(found, task, name)
                budgets = [N * cost for N in COUNTS[:len(means)]]
                axis.plot(budgets, means, ":" if way == ANY else "-", label=way)
            by_limit = zip(*of(found, task, "one thought"))
            limits = [mean_curve(pairs) for pairs in by_limit]
            axis.plot(*zip(*limits), "k.", markersize=4, label="one thought, stopped after T")
            axis.set(title=task, xlabel="tokens for a problem", xscale="log", ylim=(0, 1.03),
                     ylabel="share right, mean of the seeds")
            if task == "arithmetic":                    # where there is room
                axis.legend(frameon=False, fontsize=8, loc="lower right")
        return fill
    return [by_tokens(task) for task in TASKS]
