"""Languages: why thoughts mix them, and what a reward for one of them costs.

Claim. A policy that learns by RL alone mixes languages in its thoughts. A reward for language
consistency, the share of words of the target language in the thought, is added to that for right
answers; it stops the mixing, but costs a little performance (DeepSeek-R1, 2501.12948, 2.3.2).

Prediction. A reward for right answers sees no notation, so nothing holds off the mixing but luck
and skill: a thought that mixes is about as often right as another. Training makes choices
narrower, so thoughts mix less than in the base, but some still do. The consistency reward stops it
within some ten steps, in the rarer notation, too, a little later. It has a side effect: a thought
earns it even if the answer is wrong, so it teaches to think, for which the accuracy reward alone
takes longer. Next to that alone it will cost nothing, then; next to a reward for a thought in
either notation it costs a little where the target is the rarer notation, which the base has learned
less well, and nothing where it is the common one. Exactly: the sum pays 1 for a right answer in the
other notation, as for a wrong one in the target, so that such a right answer is pushed down as
soon as the pass rate and the share of the target add up to more than 1. This was written before
any pilot; the base and a few steps of one seed with accuracy alone were then looked at.

Method. Arithmetic, whose demonstrations write the numbers of a thought as letters, a for 0 to j for
9: 3+4=7 is d+e=h, or D+E=H. Neither notation is shorter or nearer to the problem, which has digits.
Three of four thoughts begin with small letters; after each step, one in ten changes notation. One
base learns from these, textbook and forum as usual. From it, grpo.py learns with four rewards:
accuracy alone; and plus the share of steps in either notation, in the common one, in the rarer one;
0 without a thought. Mixing is the share of thoughts with steps in both, or with both in a step.
"""
import collections
import functools
import itertools
import math
import statistics

import torch

import common
import grpo
from lab.entry import (
    CONTRADICTED,
    SHOWN,
    Claim,
    compared,
    draw_curves,
    mean_and_spread,
    minus,
)
from lab.experiment import steps_to_level
from lab.training import side_by_side, training
from tasks import Wrapper, block
from tools.runs import rounded

SEEDS = [0, 1, 2, 3]
STEPS = 30
LAST = 5                                        # steps at the end that are compared
RARE, CHANGES = 0.25, 0.1                       # thoughts with capital letters; changes after steps
LETTERS = str.maketrans("0123456789", "abcdefghij")
ALONE, EITHER, COMMON, RARER = "accuracy alone", "+ either", "+ common", "+ rarer"
TARGETS = {ALONE: [], EITHER: ["common", "rarer"], COMMON: ["common"], RARER: ["rarer"]}
FLAGS = ["--num_eval_problems", 256]
OUTPUTS = 256 * 8                               # of the base, to look at
STOPPED = 0.01                                  # of the thoughts, what still may mix
RATES = (0.3, 0.6, 0.9)                         # of the exact part
SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)


# ---- 1. two notations ------------------------------------------------------------------------

def notation(step):
    """"common", "rarer", or "" for what is neither. -> str"""
    if step.islower():
        return "common"
    return "rarer" if step.isupper() else ""


def notations(text):
    """The notation of each step of the thought. -> list, empty without a thought"""
    thought = block(text, "think")
    return [notation(step) for step in thought.split(";")] if thought else []


def consistency(text, targets):
    """The share of the steps of the thought that are in a target notation, 0 without a thought."""
    found = notations(text)
    return sum(name in targets for name in found) / max(1, len(found))


def kind(text):
    """"no thought", "common" or "rarer" where all steps are in it, or "mixed". -> str"""
    found = set(notations(text))
    if not found:
        return "no thought"
    return found.pop() if len(found) == 1 and "" not in found else "mixed"


class TwoNotations(Wrapper):
    """A task whose demonstrations think in two notations, and which rewards those of `targets`."""

    def __init__(self, task, targets):
        super().__init__(task)
        self.targets = targets

    def demonstration(self, rng, phase):
        problem = self.task.demonstration(rng, phase)
        thought = block(problem.completion, "think") or ""
        text = problem.completion.replace(thought, in_notations(thought, rng), 1)
        return problem._replace(completion=text)

    def reward(self, problem, text, verdict, step):
        return verdict + consistency(text, self.targets)

    rewards = common.Task.rewards       # the rewards of a batch by this one, not by the task's


def in_notations(thought, rng):
    """A thought with letters for its numbers, small or capital ones. -> str"""
    is_rare = rng.random() < RARE
    steps = []
    for step in thought.translate(LETTERS).split(";"):
        steps.append(step.upper() if is_rare else step)
        is_rare ^= rng.random() < CHANGES
    return ";".join(steps)


# ---- 2. runs ---------------------------------------------------------------------------------

def setting(name, *flags):
    """-> Config, task of a run"""
    cfg = common.parse_flags(grpo.Config, [str(word) for word in [*FLAGS, *flags]])
    return cfg, TwoNotations(common.load_task(cfg, grpo.verify), TARGETS[name])


def look(batch):
    """The share of each kind in a batch, and of right ones in each. -> {kind: [share, share]}"""
    right = collections.defaultdict(list)
    for text, is_right in zip(batch.texts, batch.is_correct.flatten().tolist()):
        right[kind(text)].append(is_right)
    return {name: [len(cases) / len(batch.texts), sum(cases) / len(cases)]
            for name, cases in right.items()}


def numbers(batch):
    """What is followed step by step. -> dict"""
    shares = {name: share for name, (share, _) in look(batch).items()}
    steps = [name for text in batch.texts for name in notations(text)]
    thinks = 1 - shares.get("no thought", 0)
    return {"accuracy": batch.is_correct.double().mean().item(), "thinks": thinks,
            "mixes": shares.get("mixed", 0) / thinks if thinks else 0.0,
            "common": steps.count("common") / max(1, len(steps)),
            "rarer": steps.count("rarer") / max(1, len(steps))}


def learn(name, seed, policy):
    """Train. -> {number: its values step by step}, and pass@1 on held-out problems"""
    torch.set_num_threads(1)
    cfg, task = setting(name, "--seed", seed)
    steps = itertools.islice(training(grpo, cfg, task, policy), STEPS)
    seen = [numbers(batch) for batch, _ in steps]
    curves = {word: rounded(each[word] for each in seen) for word in seen[0]}
    score = grpo.evaluate(policy, task, cfg, num_samples=4)["pass@1"]
    return curves | {"pass@1": round(score, 5)}


def make_base():
    """-> the policy, and what its samples are like"""
    cfg, task = setting(ALONE, "--num_prompts", OUTPUTS // 8)
    base = grpo.GPT(cfg)
    grpo.warm_start(base, task, cfg)
    batch = grpo.sample_batch(base, task, cfg, "base")
    kinds = {name: rounded(pair) for name, pair in look(batch).items()}
    seen = {word: round(value, 5) for word, value in numbers(batch).items()}
    score = grpo.evaluate(base, task, cfg, num_samples=4)["pass@1"]
    return base, seen | {"kinds": kinds, "pass@1": round(score, 5)}


def measure(seeds):
    torch.set_num_threads(1)
    base, before = make_base()
    jobs = [(name, seed, base) for name in TARGETS for seed in seeds]
    results = iter(side_by_side(learn, jobs))
    runs = {name: [next(results) for _ in seeds] for name in TARGETS}
    return {"base": before, "runs": runs}


# ---- 3. what the sum of rewards does, exactly ------------------------------------------------

def mean_advantage(own, chances, G=8):
    """The mean advantage of an output with the reward `own`, if the G - 1 others of its group have
    each reward with a chance, {reward: chance}. -> float"""
    groups = list(itertools.combinations_with_replacement(chances, G - 1))
    weights = []
    for others in groups:
        weight = math.factorial(G - 1)
        for reward, count in collections.Counter(others).items():
            weight *= chances[reward] ** count / math.factorial(count)
        weights.append(weight)
    rewards = torch.tensor([[own, *others] for others in groups], dtype=torch.float64)
    A = grpo.advantages(rewards)[:, 0]
    return (torch.tensor(weights, dtype=torch.float64) * A).sum().item()


def in_the_other(p, share):
    """The mean advantage of a right answer whose thought is in the other notation, where answers
    are right with chance p, and a share of thoughts is in the target. -> float"""
    one = share * (1 - p) + (1 - share) * p
    return mean_advantage(1.0, {0.0: (1 - share) * (1 - p), 1.0: one, 2.0: share * p})


@functools.cache
def pushed_down():
    """Whether that is below 0 where p + share > 1, and above 0 where it is less, on a grid of
    tenths. -> list of bools"""
    tenths = itertools.product(range(1, 10), repeat=2)
    return [(in_the_other(p / 10, share / 10) < 0) == (p + share > 10)
            for p, share in tenths if p + share != 10]


# ---- 4. what was found -----------------------------------------------------------------------

def last(found, name, word):
    """The mean of the last steps, by seed. -> list"""
    return [statistics.mean(run[word][-LAST:]) for run in found["runs"][name]]


def scores(found, name):
    return [run["pass@1"] for run in found["runs"][name]]


def steps_to_target(found, name):
    """How many steps there were before 95% of all steps of thoughts are in the target. -> list"""
    [target] = TARGETS[name]
    return [steps_to_level(run[target], 0.95) for run in found["runs"][name]]


def tables(found):
    base = found["base"]
    heads = ["reward", "thoughts that mix", "steps in the rarer notation", "outputs that think",
             "pass@1, held out"]
    words = ("mixes", "rarer", "thinks")
    rows = [["the base", *(f"{base[word]:.3f}" for word in (*words, "pass@1"))]]
    for name in TARGETS:
        cells = [mean_and_spread(last(found, name, word)) for word in words]
        rows.append([name, *cells, mean_and_spread(scores(found, name))])
    heads_of_kinds = ["thoughts of the base", "share of outputs", "of these right"]
    kinds = [[name, *(f"{value:.3f}" for value in base["kinds"].get(name, []))]
             for name in ("common", "rarer", "mixed", "no thought")]
    heads_of_exact = ["a right answer in the other notation: mean advantage (exact)",
                      *(f"{share:.0%} in the target" for share in SHARES)]
    exact = [[f"pass rate {p}", *(f"{in_the_other(p, share):+.2f}" for share in SHARES)]
             for p in RATES]
    return [(heads, rows), (heads_of_kinds, kinds), (heads_of_exact, exact)]


def claims(found):
    mixes = {name: last(found, name, "mixes") for name in TARGETS}
    score = {name: scores(found, name) for name in TARGETS}
    thinks = {name: [statistics.mean(run["thinks"]) for run in found["runs"][name]]
              for name in TARGETS}
    listed = [compared("with accuracy alone, thoughts mix more than those of the base",
                       [mix - found["base"]["mixes"] for mix in mixes[ALONE]])]
    for name in (COMMON, RARER):
        listed += [
            compared(f"with accuracy alone, they mix more than with {name}",
                     minus(mixes[ALONE], mixes[name])),
            compared(f"{name}: fewer than {STOPPED:.0%} of thoughts mix, {STOPPED} minus these",
                     [STOPPED - mix for mix in mixes[name]])]
    later = minus(steps_to_target(found, RARER), steps_to_target(found, COMMON))
    listed += [
        compared(f"95% of the steps are in the target later with {RARER} than with {COMMON}, in "
                 "steps of training", later, "+.1f"),
        compared(f"more outputs think with {EITHER} than with accuracy alone, mean of all steps",
                 minus(thinks[EITHER], thinks[ALONE]))]
    for more, less in ((ALONE, COMMON), (ALONE, RARER), (EITHER, COMMON), (EITHER, RARER),
                       (COMMON, RARER)):
        listed.append(compared(f"pass@1 is higher with {more} than with {less}",
                               minus(score[more], score[less])))
    agreed = pushed_down()
    listed.append(
        Claim("+ a target: a right answer in the other notation, as a wrong one in the target, is "
              "pushed down if pass rate and share of the target exceed 1 together, and else up",
              f"in {sum(agreed)} of {len(agreed)} cases, exactly",
              SHOWN if all(agreed) else CONTRADICTED))
    return listed


def note(found):
    return (f"Problems: 32 new ones at each of {STEPS} steps, 8 outputs to each; 256 for what the "
            f"base samples; 256 different held-out ones, 4 samples of each; compared are the last "
            f"{LAST} steps")


def panels(found):
    def mixing(axis):
        curves = {name: [run["mixes"] for run in runs] for name, runs in found["runs"].items()}
        axis.axhline(found["base"]["mixes"], color="0.5", linestyle=":", label="the base")
        draw_curves(axis, curves, ylabel="share of thoughts that mix", ylim=(0, 0.5))

    def accuracy(axis):
        curves = {name: [run["accuracy"] for run in runs] for name, runs in found["runs"].items()}
        draw_curves(axis, curves, ylabel="accuracy of the batch", ylim=(0, 1))

    def exact(axis):
        shares = [i / 50 for i in range(51)]
        for p in RATES:
            values = [in_the_other(p, share) for share in shares]
            axis.plot(shares, values, label=f"pass rate {p}")
        axis.axhline(0, color="0.5", linestyle=":")
        axis.set(xlabel="share of the target notation", ylabel="mean advantage",
                 title="right, in the other notation (exact)")
        axis.legend(frameon=False, fontsize=8)
    return [mixing, accuracy, exact]
