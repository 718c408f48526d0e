"""R1-Zero: why answers get longer when nothing rewards length"""
import dataclasses
import itertools

import numpy

import common
import grpo
import plumbing
from lab.claims.signal import BASE
from lab.draw import curves
from lab.experiment import Experiment, numbers, transposed
from lab.training import load_base, training
from lab.verdict import Claim

FIXED = "5 operands"
MOVING = "3 to 7 operands, curriculum"
CONSTANT = f"{MOVING}, dr_grpo"
TO_7 = "--task arithmetic:3-7 --curriculum"
RUNS = {FIXED: "", MOVING: TO_7, CONSTANT: f"{TO_7} --loss_type dr_grpo"}
LEVELS = range(3, 8)                            # operands
STEPS, WINDOW = 60, 10
PARTS = ("tokens from more thinking", "tokens from harder problems",
         "tokens from longer answers of the same kind")
ORDERS = list(itertools.permutations(range(len(PARTS))))
END = -1                                        # the window that is compared with the base
LONGER = 1                                      # smallest growth that matters, in tokens
EXPERIMENT = Experiment(__file__, seeds=range(8))
EXPERIMENT.commands += [f"grpo.py {flags}" for flags in RUNS.values()]


def look(batches):
    """Count outputs and their tokens, by the number of operands and by whether they think, as lists
    (5, 2). Also compute the fraction of all outputs that check themselves. -> dict"""
    number = numpy.zeros((len(LEVELS), 2))
    tokens = numpy.zeros((len(LEVELS), 2))
    checks = 0
    for batch in batches:
        lengths = batch.mask.sum(dim=1).tolist()
        for problem, text, length in zip(batch.problems, batch.texts, lengths):
            cell = problem.difficulty - LEVELS[0], int(text.startswith("<think>"))
            number[cell] += 1
            tokens[cell] += length
            checks += ";wait," in text
    return {"number": number.tolist(), "tokens": tokens.tolist(), "checks": checks / number.sum()}


@EXPERIMENT.measure(RUNS)
def learned(seed, name):
    """Train, and look at the outputs of the base and then of each window of steps."""
    _, known, policy = load_base(grpo, f"{BASE} --base_seed {seed}")
    flags = f"{RUNS[name]} --max_completion_length 64 --seed {seed}"
    cfg = plumbing.parse_flags(grpo.Config, flags.split())
    task = common.load_task(cfg, grpo.verify)
    task.prompt_width = known.prompt_width      # pads prompts to the width that the base knows
    large = dataclasses.replace(cfg, num_prompts=4 * cfg.num_prompts)
    steps = training(grpo, cfg, task, policy)
    windows = []
    for window in range(1 + STEPS // WINDOW):
        batches = [grpo.sample_batch(policy, task, large, "before")]
        if window > 0:
            batches = [batch for batch, _ in itertools.islice(steps, WINDOW)]
        windows.append(look(batches))
    return transposed(windows)


def factors(columns, window):
    """Compute three factors of each cell (5, 2): its fraction of the outputs of its level, the
    fraction of the level, and the mean length; nan where there is no output. -> (3, S, 5, 2)"""
    number = columns["number"][:, window]                                       # (S, 5, 2)
    of_level = number.sum(axis=2, keepdims=True)
    levels = of_level / number.sum(axis=(1, 2), keepdims=True)
    with numpy.errstate(invalid="ignore"):
        return numpy.array([number / of_level, numpy.broadcast_to(levels, number.shape),
                            columns["tokens"][:, window] / number])


def parts(columns, order):
    """Change the factors from the first window's to the last one's, one after the other in this
    order, and compute how much each adds to the mean length. -> (3, S), in the order of PARTS"""
    first = factors(columns, 0)
    last = factors(columns, END)
    # a factor that is missing in one window counts as unchanged
    now = numpy.nan_to_num(numpy.where(numpy.isnan(first), last, first))
    last = numpy.nan_to_num(numpy.where(numpy.isnan(last), first, last))
    added = numpy.zeros(now.shape[:2])
    for which in order:
        length = now.prod(axis=0).sum(axis=(1, 2))
        now[which] = last[which]
        added[which] = now.prod(axis=0).sum(axis=(1, 2)) - length
    return added


def page(learned):
    length = {name: columns["tokens"].sum(axis=(2, 3)) / columns["number"].sum(axis=(2, 3))
              for name, columns in learned.items()}                             # (S, W)
    part = {name: dict(zip(PARTS, numpy.mean([parts(columns, order) for order in ORDERS], axis=0)))
            for name, columns in learned.items()}                               # (S,) each
    longer = {name: added[PARTS[-1]] for name, added in part.items()}
    growth = length[MOVING][:, END] - length[MOVING][:, 0]                      # (S,)
    yield Claim("answers get longer, although only right ones are rewarded", "DeepSeek-R1", growth,
                at_least=LONGER, unit="tokens", said="With a curriculum, answers grow by "
                f"{growth.mean():.1f} tokens although only right ones are rewarded; "
                f"{part[MOVING][PARTS[0]].mean():.1f} of these tokens come from more thinking")
    yield curves({FIXED: length[FIXED], "3 to 7 operands,\ncurriculum": length[MOVING]},
                 WINDOW * numpy.arange(1 + STEPS // WINDOW), ylim=(0, None),
                 ylabel="tokens of an answer",
                 xlabel=f"step of training (mean of {WINDOW} steps; 0 is the base)")
    yield Claim("answers of the same kind grow more with GRPO's 1/length than without it",
                "Dr. GRPO", longer[MOVING] - longer[CONSTANT], at_least=LONGER, unit="tokens")
    checks = learned[MOVING]["checks"]
    yield Claim(f"more outputs check themselves in the last {WINDOW} steps than in the first "
                f"{WINDOW}", "DeepSeek-R1", (checks[:, END], checks[:, 1]), at_least=0.01,
                unit="of outputs")
    ends = {}
    for name, columns in learned.items():
        kinds = columns["number"].sum(axis=2)                                   # (S, W, 2)
        scores = {"fraction that thinks": kinds[..., 1] / kinds.sum(axis=2),
                  "mean tokens": length[name]}
        ends[name] = {f"{score}, {when}": values[:, place] for score, values in scores.items()
                      for when, place in (("before RL", 0), ("at the end", -1))}
    yield numbers(ends, ".2f", by="run")
    yield numbers(part, "+.1f", by="run")
