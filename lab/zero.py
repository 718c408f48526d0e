"""R1-Zero: why answers get longer when nothing rewards length, and what a cold start saves.

Claim. With rewards for right answers alone, a policy learns to think longer and longer, and checks
itself more often (DeepSeek-R1-Zero, 2501.12948). A part of this length comes of GRPO's 1/|o|, and
the checks are in the base before (Dr. GRPO, 2503.20783). A cold start, fine-tuning the base on a
few good thoughts, such as R1-Zero's own, makes RL faster and better (DeepSeek-R1, 2501.12948).

Prediction. A worked answer has as many tokens as its problem asks for. With five operands the
length grows because more outputs think, and stops when all do. With 3 to 7 operands and a
curriculum, it goes on as long as problems get harder. Outputs of the same kind to problems of the
same difficulty do not get longer, with 1/|o| or without. RL brings no self-checks, for the base
samples hardly any: the forum, which it read last, has none. The cold start saves what RL needs to
find that thinking pays, about ten steps, so it is ahead after as many RL steps; not when the steps
count in which R1-Zero learned to write the examples. Pilots were seen before: 40 steps of one seed
with the curriculum and 2048 samples of the base, all without a self-check, and a cold start.

Method. grpo.py, rewarded for right answers alone, from the base of lab/signal.py, which mostly
guesses; dr_grpo has a constant for 1/|o|. The growth of the mean length is taken apart exactly. One
after the other, three factors become those of the end: the shares that think, for each number of
operands (more thinking); the shares of 3 to 7 operands (harder problems); the lengths of those that
think and of those that do not, for each number (longer outputs). At first we weighted each part by
the means of before and after. Then "longer outputs" came to 8 tokens with five operands, because of
three or four of 2560 late outputs: long ones that did not think, which weighed as much as a third
of all. After seeing this we chose one after the other. A self-check is a "wait,". "At last" is
steps 51-60, or 31-40 with the cold start: after 20 steps R1-Zero writes right answers that think,
and the base learns from 160 of them, as in make r1; then 40 steps of RL. All from one base.
"""
import copy
import dataclasses
import itertools
import math
import statistics

import torch

import common
import grpo
from lab.entry import compared, load_base, mean_and_spread, mean_curve, minus
from lab.signal import BASE
from lab.training import side_by_side, training
from tasks import Wrapper

FLAGS = BASE.split()
SEEDS = [0, 1, 2]
FIXED = "5 operands"
MOVING = "3-7, curriculum"
CONSTANT = "3-7, dr_grpo"
COLD = "3-7, cold start"
TO_7 = ["--task", "arithmetic:3-7", "--curriculum"]
VARIANTS = {FIXED: [], MOVING: TO_7, CONSTANT: [*TO_7, "--loss_type", "dr_grpo"],
            COLD: TO_7}
SAME = ["--max_completion_length", 64, "--num_eval_problems", 256]
STEPS, WINDOW = 60, 10
WRITES_AT, COLD_STEPS = 20, 40                  # when R1-Zero writes examples; the RL behind them
LATE = 4                                        # the window of steps 31 to 40
EXAMPLES = 160
COLD_START = {"base_steps": 40, "base_batch_size": 4, "base_learning_rate": 1e-3}
PARTS = ("more thinking", "harder problems", "longer outputs")


# ---- 1. runs ---------------------------------------------------------------------------------

class OwnAnswers(Wrapper):
    """A task whose demonstrations are given: {problem: completion}."""

    def __init__(self, task, texts):
        super().__init__(task)
        self.texts = texts

    def demonstration(self, rng, phase):
        problem = rng.choice(list(self.texts))
        return problem._replace(completion=self.texts[problem])


def setting(name, seed, prompt_width):
    """-> Config, task of a variant"""
    words = [*VARIANTS[name], *SAME, "--seed", seed]
    cfg = common.parse_flags(grpo.Config, [str(word) for word in words])
    task = common.load_task(cfg, grpo.verify)
    task.prompt_width = prompt_width            # five operands are padded as the base knows them
    return cfg, task


def thinks(text):
    return text.startswith("<think>")


def right_thoughts(policy, task, cfg, number):
    """Right answers of a policy that think, to different problems. -> {problem: completion}"""
    found = {}
    for attempt in itertools.count():
        batch = grpo.sample_batch(policy, task, cfg, ("examples", attempt))
        is_correct = batch.is_correct.flatten().tolist()
        for problem, text, is_right in zip(batch.problems, batch.texts, is_correct):
            if is_right and thinks(text):
                found.setdefault(problem, text)
            if len(found) == number:
                return found


def start_cold(policy, seed, prompt_width):
    """Teach the base, `policy`, what R1-Zero writes, which starts from it, too."""
    cfg, task = setting(MOVING, seed, prompt_width)
    writer = copy.deepcopy(policy)
    for _ in itertools.islice(training(grpo, cfg, task, writer), WRITES_AT):
        pass
    texts = right_thoughts(writer, task, cfg, EXAMPLES)
    supervised = dataclasses.replace(cfg, **COLD_START)
    grpo.warm_start(policy, OwnAnswers(task.task, texts), supervised)


def look(batches, policy, task, cfg):
    """What some batches are like: the cells {"5 thinks": [number of outputs, tokens]}, by operands
    and by whether outputs think; those that check themselves. And pass@1 on held-out problems."""
    cells = {}
    num_checks = 0
    for batch in batches:
        lengths = batch.mask.sum(dim=1).int().tolist()
        for problem, text, length in zip(batch.problems, batch.texts, lengths):
            kind = "thinks" if thinks(text) else "guesses"
            cell = cells.setdefault(f"{problem.difficulty} {kind}", [0, 0])
            cell[0] += 1
            cell[1] += length
            num_checks += ";wait," in text
    pass_at_1 = grpo.evaluate(policy, task, cfg, num_samples=2)["pass@1"]
    return {"cells": cells, "checks": num_checks, "pass@1": round(pass_at_1, 5)}


def learn(name, seed, policy, prompt_width):
    """Train. -> what is seen before and then in each window of steps, and after it on held-out
    problems: list of dicts"""
    torch.set_num_threads(1)
    cfg, task = setting(name, seed, prompt_width)
    num_steps = STEPS
    if name == COLD:
        start_cold(policy, seed, prompt_width)
        num_steps = COLD_STEPS
    large = dataclasses.replace(cfg, num_prompts=4 * cfg.num_prompts)
    before = grpo.sample_batch(policy, task, large, "before")
    found = [look([before], policy, task, cfg)]
    steps = training(grpo, cfg, task, policy)
    for _ in range(num_steps // WINDOW):
        batches = [batch for batch, _ in itertools.islice(steps, WINDOW)]
        found.append(look(batches, policy, task, cfg))
    return found


def measure(seeds):
    _, task, base = load_base(grpo, *FLAGS)
    jobs = [(name, seed, base, task.prompt_width) for name in VARIANTS for seed in seeds]
    results = iter(side_by_side(learn, jobs))
    return {"runs": {name: [next(results) for _ in seeds] for name in VARIANTS}}


# ---- 2. where length comes from --------------------------------------------------------------

def factors(cells, name):
    """Of a cell, such as "5 thinks": the share of outputs that think among those to five operands,
    the share of five operands, and the tokens of an output; None where there is none. -> list"""
    level = name.split()[0]
    number, tokens = cells.get(name, [0, 0])
    total = sum(pair[0] for pair in cells.values())
    of_level = sum(pair[0] for other, pair in cells.items() if other.split()[0] == level)
    share_of_kind = number / of_level if of_level else None
    return [share_of_kind, of_level / total, tokens / number if number else None]


def parts(before, after):
    """What is added to the mean length when one factor after the other becomes that of `after`.
    -> {part: tokens}"""
    found = dict.fromkeys(PARTS, 0.0)
    for name in before | after:
        pairs = list(zip(factors(before, name), factors(after, name)))
        now = [new if old is None else old for old, new in pairs]       # as if it had not changed
        last = [old if new is None else new for old, new in pairs]
        for i, which in enumerate(PARTS):
            changed = [*now[:i], last[i], *now[i + 1:]]
            found[which] += math.prod(changed) - math.prod(now)
            now = changed
    return found


def mean_length(cells):
    """The mean length of the outputs. -> float"""
    number = sum(pair[0] for pair in cells.values())
    return sum(pair[1] for pair in cells.values()) / max(1, number)


def guess_length(cells):
    """The mean length of the outputs that do not think. -> float"""
    return mean_length({name: pair for name, pair in cells.items() if name.endswith("guesses")})


def share_that_thinks(cells):
    thinking = sum(number for name, (number, _) in cells.items() if name.endswith("thinks"))
    return thinking / sum(number for number, _ in cells.values())


def at(found, name, window, function):
    """A function of the cells of a window of steps, by seed; 0 is before the first. -> list"""
    return [function(run[window]["cells"]) for run in found["runs"][name]]


def growth(found, name, first=0):
    """How much longer the last outputs are than those of another window, by seed. -> list"""
    return minus(at(found, name, -1, mean_length), at(found, name, first, mean_length))


def part(found, name, which):
    """What a part adds to the length from before to the last steps, by seed. -> list"""
    return [parts(run[0]["cells"], run[-1]["cells"])[which] for run in found["runs"][name]]


def held_out(found, name, step):
    """pass@1 after some steps, by seed. -> list"""
    return [run[step // WINDOW]["pass@1"] for run in found["runs"][name]]


# ---- 3. what was found -----------------------------------------------------------------------

def tables(found):
    heads = ["RL", "share that thinks, at first", "at last", "tokens, at first", "at last", *PARTS]
    rows = []
    for name in VARIANTS:
        row = [name]
        for function, form in ((share_that_thinks, ".2f"), (mean_length, ".1f")):
            row += [mean_and_spread(at(found, name, i, function), form) for i in (0, -1)]
        row += [mean_and_spread(part(found, name, which), "+.1f") for which in PARTS]
        rows.append(row)
    moments = (0, 20, COLD_STEPS, STEPS)
    heads_of_scores = ["pass@1, held out, 3-7 operands", *(f"{step} RL steps" for step in moments)]
    scores = []
    for name, steps in ((MOVING, moments), (COLD, moments[:-1])):
        row = [name, *(mean_and_spread(held_out(found, name, step)) for step in steps), ""]
        scores.append(row[:len(heads_of_scores)])
    return [(heads, rows), (heads_of_scores, scores)]


def claims(found):
    longer = {name: part(found, name, "longer outputs") for name in VARIANTS}
    checks = [run[-1]["checks"] - run[1]["checks"] for run in found["runs"][MOVING]]
    cold = held_out(found, COLD, COLD_STEPS)
    listed = []
    for name in (FIXED, MOVING):
        late = growth(found, name, LATE)
        listed += [
            compared(f"{name}: the length grows, in tokens", growth(found, name), "+.1f"),
            compared(f"{name}: it still grows from steps 31-40 to 51-60", late, "+.1f"),
            compared(f"{name}: outputs of a kind get longer at a given difficulty", longer[name],
                     "+.1f")]
    return listed + [
        compared("from steps 31-40 to 51-60, the length grows more with the curriculum",
                 minus(growth(found, MOVING, LATE), growth(found, FIXED, LATE)), "+.1f"),
        compared("with 1/length, outputs of a kind grow more at a given difficulty than without",
                 minus(longer[MOVING], longer[CONSTANT]), "+.2f"),
        compared("outputs of the last steps that do not think are longer with 1/length (looked at "
                 "only after the runs)",
                 minus(at(found, MOVING, -1, guess_length), at(found, CONSTANT, -1, guess_length)),
                 "+.1f"),
        compared(f"more outputs check themselves in the last {WINDOW} steps than in the first",
                 checks, "+.0f"),
        compared(f"after {COLD_STEPS} RL steps, pass@1 is higher with the cold start",
                 minus(cold, held_out(found, MOVING, COLD_STEPS))),
        compared(f"it is higher, too, than without one after {STEPS}: the steps behind the "
                 "examples count",
                 minus(cold, held_out(found, MOVING, STEPS)))]


def note(found):
    checks = [sum(look["checks"] for look in run) for run in found["runs"][MOVING]]
    return ("Problems: 32 new ones at each step, 8 outputs to each; 128 before the first step; 256 "
            f"different held-out ones, 2 samples of each; self-checks among all outputs of "
            f"{MOVING}: {sum(checks)}")


def panels(found):
    shown = (FIXED, MOVING, CONSTANT)
    steps = range(0, STEPS + 1, WINDOW)

    def lengths(axis):
        for name in shown:
            values = [at(found, name, i, mean_length) for i in range(len(steps))]
            means = [statistics.mean(lengths) for lengths in values]
            axis.plot(steps, means, ".-", label=name)
        axis.set(xlabel=f"step, the last of {WINDOW}", ylabel="tokens of an output", ylim=(0, None))
        axis.legend(frameon=False, fontsize=8, loc="lower right")

    def sources(axis):
        left = [0] * len(shown)
        for color, which in enumerate(PARTS, start=3):
            added = [statistics.mean(part(found, name, which)) for name in shown]
            axis.barh(shown, added, left=left, color=f"C{color}", label=which)
            left = [a + b for a, b in zip(left, added)]
        axis.set(xlabel="growth of the length, in tokens", ylim=(4, -0.6))
        axis.legend(frameon=False, fontsize=8, loc="lower right")

    def scores(axis):
        for name, first, style, label in (
                (MOVING, 0, "C1.-", "R1-Zero"), (COLD, 0, "C2.-", "cold start, then RL"),
                (COLD, WRITES_AT, "C2.:", "its examples' steps counted")):
            means = mean_curve([[look["pass@1"] for look in run] for run in found["runs"][name]])
            axis.plot([first + step for step, _ in zip(steps, means)], means, style, label=label)
        axis.set(xlabel="RL steps", ylabel="pass@1, held out", ylim=(0, 1))
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    return [lengths, sources, scores]
