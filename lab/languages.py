"""Languages: why thoughts mix them, and what a reward for one of them costs

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
import copy
import functools
import itertools
import math
from collections import Counter

import numpy
import torch

import common
import grpo
from lab.draw import BLUE, GREEN, GREY, ORANGE, curves, dots
from lab.experiment import Experiment, numbers, steps_to_level
from lab.training import training
from lab.verdict import OURS, Claim
from tasks import Wrapper, block
from tools.runs import table

R1 = "[DeepSeek-R1](https://arxiv.org/abs/2501.12948)"
STEPS = 30
LAST = 5                                        # steps at the end that are compared
RARE, CHANGES = 0.25, 0.1                       # thoughts with capital letters; changes after steps
LETTERS = str.maketrans("0123456789", "abcdefghij")
ALONE, EITHER, COMMON, RARER = "accuracy alone", "+ either", "+ common", "+ rarer"
TARGETS = {ALONE: [], EITHER: ["common", "rarer"], COMMON: ["common"], RARER: ["rarer"]}
KINDS = ("common", "rarer", "mixed", "no thought")
OUTPUTS = 256                                   # groups of the base, to look at
STOPPED = 0.01                                  # of the thoughts, what still may mix
MIXES = 0.05                                    # of the thoughts, what counts as mixing
GAIN = 0.01                                     # of pass@1, what counts as one
RATES = (0.3, 0.6, 0.9)                         # of the exact part
SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(8))


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

def setting(name, flags):
    """-> Config, task of a run"""
    cfg = common.parse_flags(grpo.Config, f"--num_eval_problems 256 {flags}".split())
    return cfg, TwoNotations(common.load_task(cfg, grpo.verify), TARGETS[name])


@functools.cache
def make_base():
    """-> the policy that has learned from both notations"""
    cfg, task = setting(ALONE, "")
    base = grpo.GPT(cfg)
    grpo.warm_start(base, task, cfg)
    return base


def look(batch):
    """Of the outputs, the share that is right, that thinks, of each of KINDS, and right in it; of
    the thoughts those that mix, of their steps those in each notation. -> {name: float}"""
    is_correct = batch.is_correct.flatten().tolist()
    kinds = [kind(text) for text in batch.texts]
    number = Counter(kinds)
    right = Counter(name for name, is_right in zip(kinds, is_correct) if is_right)
    steps = [name for text in batch.texts for name in notations(text)]
    thoughts = len(kinds) - number["no thought"]
    found = {"accuracy": sum(is_correct) / len(kinds), "thinks": thoughts / len(kinds),
             "mixes": number["mixed"] / max(1, thoughts)}
    for name in KINDS:
        found[f"{name}: share"] = number[name] / len(kinds)
        found[f"{name}: right"] = right[name] / max(1, number[name])
    return found | {name: steps.count(name) / max(1, len(steps)) for name in KINDS[:2]}


@EXPERIMENT.measure(["the base"], seeds=[0])
def base(seed, case):
    cfg, task = setting(ALONE, f"--num_prompts {OUTPUTS}")
    found = look(grpo.sample_batch(make_base(), task, cfg, "base"))
    return found | {"pass@1": grpo.evaluate(make_base(), task, cfg, 4)["pass@1"]}


@EXPERIMENT.measure(TARGETS)
def learned(seed, name):
    """Train with a reward: what batches are like, and pass@1 on held-out problems."""
    cfg, task = setting(name, f"--seed {seed}")
    policy = copy.deepcopy(make_base())
    steps = itertools.islice(training(grpo, cfg, task, policy), STEPS)
    looks = [look(batch) for batch, _ in steps]
    found = {word: [seen[word] for seen in looks]
             for word in ("accuracy", "thinks", "mixes", *KINDS[:2])}
    return found | {"pass@1": grpo.evaluate(policy, task, cfg, 4)["pass@1"]}


# ---- 3. what the sum of rewards does, exactly ------------------------------------------------

def mean_advantage(own, chances, G=8):
    """The mean advantage of an output with the reward `own`, if the G - 1 others of its group have
    each reward with a chance, {reward: chance}. -> float"""
    groups = list(itertools.combinations_with_replacement(chances, G - 1))
    weights = []
    for others in groups:
        weight = math.factorial(G - 1)
        for reward, count in Counter(others).items():
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

def page(base, learned):
    [before] = base.values()
    mixes = {name: found["mixes"][:, -LAST:].mean(axis=1) for name, found in learned.items()}
    score = {name: found["pass@1"] for name, found in learned.items()}
    thinks = {name: found["thinks"].mean(axis=1) for name, found in learned.items()}
    said = (f"Rewarded for right answers alone, {mixes[ALONE].mean():.0%} of the thoughts mix "
            f"notations; with a reward for one of them, {mixes[COMMON].mean():.1%}")
    yield Claim("with accuracy alone, thoughts mix", R1, mixes[ALONE], at_least=MIXES,
                unit="of thoughts", shown=said)
    yield Claim("with accuracy alone, they mix less than those of the base", OURS,
                mixes[ALONE] - before["mixes"], at_most=-0.02, unit="of thoughts")
    for name in (COMMON, RARER):
        yield Claim(f"{name}: at most {STOPPED:.0%} of thoughts mix", R1, mixes[name],
                    at_most=STOPPED, unit="of thoughts")
        yield Claim(f"{name} costs accuracy: pass@1 is higher with accuracy alone", R1,
                    score[ALONE] - score[name], at_least=GAIN)
    yield Claim(f"next to {EITHER}, {COMMON} costs no pass@1", OURS, score[EITHER] - score[COMMON],
                at_most=GAIN)
    yield Claim(f"next to {EITHER}, {RARER} costs pass@1", OURS, score[EITHER] - score[RARER],
                at_least=GAIN)
    steps = {}
    for name in (COMMON, RARER):
        [target] = TARGETS[name]
        steps[name] = numpy.array([steps_to_level(row, 0.95) for row in learned[name][target]])
    yield Claim(f"95% of the steps are in the target later with {RARER} than with {COMMON}", OURS,
                steps[RARER] - steps[COMMON], at_least=1, unit="steps of training")
    yield Claim(f"more outputs think with {EITHER} than with accuracy alone, mean of all steps",
                OURS, thinks[EITHER] - thinks[ALONE], at_least=0.02, unit="of outputs")
    yield Claim("a right answer in the other notation is pushed down if pass rate and share of the "
                "target exceed 1 together, and else up: in all cases", OURS, pushed_down(),
                at_least=1, exact=True)

    given = dict(zip(TARGETS, (GREY, BLUE, GREEN, ORANGE)))
    yield curves({name: found["mixes"] for name, found in learned.items()}, said, given=given,
                 ylabel="share of thoughts that mix", ylim=(0, 0.5))
    yield dots(score, f"One notation costs little: pass@1 of {score[COMMON].mean():.3f} with the "
               f"common one, {score[RARER].mean():.3f} with the rarer, {score[ALONE].mean():.3f} "
               "without", form=".3f", given=given, xlabel="pass@1, held out; a dot for each seed")
    rows = {"the base": before}
    for name, found in learned.items():
        late = {word: found[word][:, -LAST:].mean(axis=1) for word in ("mixes", "rarer", "thinks")}
        rows[name] = late | {"pass@1": score[name]}
    yield numbers(rows, {"mixes": "thoughts that mix", "rarer": "steps in the rarer notation",
                         "thinks": "outputs that think", "pass@1": "pass@1"}, by="reward")
    yield numbers({name: {word: before[f"{name}: {word}"] for word in ("share", "right")}
                   for name in KINDS}, {"share": "share of outputs", "right": "of these right"},
                  by="the base")
    yield table(["a right answer in the other notation: mean advantage (exact)",
                 *(f"{share:.0%} in the target" for share in SHARES)],
                [[f"pass rate {p}", *(f"{in_the_other(p, share):+.2f}" for share in SHARES)]
                 for p in RATES])
