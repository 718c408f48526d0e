"""R1-Zero: why answers get longer when nothing rewards length

grpo.py rewards right answers alone. We take the growth of their mean length apart: into more
thinking, harder problems, and longer answers of the same kind. docs/lab/zero.md says more.
"""
import dataclasses
import itertools

import numpy

import common
import grpo
from lab.claims.signal import BASE
from lab.draw import curves
from lab.experiment import Experiment, numbers, transposed
from lab.training import load_base, training
from lab.verdict import Claim

FIXED = "5 operands"
MOVING = "3-7, curriculum"
CONSTANT = "3-7, dr_grpo"
TO_7 = "--task arithmetic:3-7 --curriculum"
RUNS = {FIXED: "", MOVING: TO_7, CONSTANT: f"{TO_7} --loss_type dr_grpo"}
LEVELS = range(3, 8)                            # operands
STEPS, WINDOW = 60, 10
PARTS = ("more thinking", "harder problems", "longer answers of the same kind")
ORDERS = list(itertools.permutations(range(len(PARTS))))
END = -1                                        # the window that is compared with the base
LONGER = 1                                      # token, what counts as longer
EXPERIMENT = Experiment(__file__, seeds=range(8))
EXPERIMENT.commands += [f"grpo.py {flags}" for flags in RUNS.values()]


def look(batches):
    """Of outputs, by operands and by whether they think: how many there are, and their tokens, as
    lists (5, 2); and the share of all that check themselves."""
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
    """Train: what outputs are like before and then in each window of steps."""
    _, known, policy = load_base(grpo, f"{BASE} --base_seed {seed}")
    flags = f"{RUNS[name]} --max_completion_length 64 --seed {seed}"
    cfg = common.parse_flags(grpo.Config, flags.split())
    task = common.load_task(cfg, grpo.verify)
    task.prompt_width = known.prompt_width      # five operands are padded as the base knows them
    large = dataclasses.replace(cfg, num_prompts=4 * cfg.num_prompts)
    steps = training(grpo, cfg, task, policy)
    found = []
    for window in range(1 + STEPS // WINDOW):
        batches = [grpo.sample_batch(policy, task, large, "before")]
        if window > 0:
            batches = [batch for batch, _ in itertools.islice(steps, WINDOW)]
        found.append(look(batches))
    return transposed(found)


def factors(found, window):
    """Of each cell (5, 2): its share among those of its level, the share of the level, and the mean
    length; nan where there is none. -> (3, S, 5, 2)"""
    number = found["number"][:, window]                                         # (S, 5, 2)
    of_level = number.sum(axis=2, keepdims=True)
    levels = of_level / number.sum(axis=(1, 2), keepdims=True)
    with numpy.errstate(invalid="ignore"):
        return numpy.array([number / of_level, numpy.broadcast_to(levels, number.shape),
                            found["tokens"][:, window] / number])


def parts(found, order):
    """What is added to the mean length when one factor after the other, in an order, becomes that
    of the last window instead of that of the first. -> (3, S), as PARTS"""
    first = factors(found, 0)
    last = factors(found, END)
    now = numpy.nan_to_num(numpy.where(numpy.isnan(first), last, first))    # as if not changed
    last = numpy.nan_to_num(numpy.where(numpy.isnan(last), first, last))
    added = numpy.zeros(now.shape[:2])
    for which in order:
        length = now.prod(axis=0).sum(axis=(1, 2))
        now[which] = last[which]
        added[which] = now.prod(axis=0).sum(axis=(1, 2)) - length
    return added


def page(learned):
    length = {name: found["tokens"].sum(axis=(2, 3)) / found["number"].sum(axis=(2, 3))
              for name, found in learned.items()}                               # (S, W)
    part = {name: dict(zip(PARTS, numpy.mean([parts(found, order) for order in ORDERS], axis=0)))
            for name, found in learned.items()}                                 # (S,) each
    longer = {name: added[PARTS[-1]] for name, added in part.items()}
    by_part = ", ".join(f"{added.mean():+.1f} from {word}" for word, added in part[MOVING].items())
    first, *_, last = length[MOVING].mean(axis=0)
    said = (f"R1-Zero, 3 to 7 operands: answers grow from {first:.0f} to {last:.0f} tokens: "
            f"{by_part}")
    yield Claim("answers get longer, though only right ones are rewarded", "DeepSeek-R1",
                length[MOVING][:, END] - length[MOVING][:, 0], at_least=LONGER, unit="tokens",
                said=said)
    shown = {"5 operands": length[FIXED], "3 to 7 operands": length[MOVING]}
    yield curves(shown, said, x=WINDOW * numpy.arange(1 + STEPS // WINDOW), ylim=(0, None),
                 ylabel="tokens of an answer", xlabel=f"step, mean of {WINDOW} steps; 0: the base")
    yield Claim("answers of a kind get longer by more with GRPO's 1/length than without",
                "Dr. GRPO", longer[MOVING] - longer[CONSTANT], at_least=LONGER, unit="tokens")
    checks = learned[MOVING]["checks"]
    yield Claim(f"more outputs check themselves in the last {WINDOW} steps than in the first",
                "DeepSeek-R1", (checks[:, END], checks[:, 1]), at_least=0.01, unit="of outputs")
    ends = {}
    for name, found in learned.items():
        kinds = found["number"].sum(axis=2)                                     # (S, W, 2)
        columns = {"thinks": kinds[..., 1] / kinds.sum(axis=2), "tokens": length[name]}
        ends[name] = {f"{word} {when}": values[:, place] for word, values in columns.items()
                      for when, place in (("at first", 0), ("late", -1))}
    yield numbers(ends, form=".2f", by="run")
    yield numbers(part, form="+.1f", by="tokens added")
