"""R1-Zero: why answers get longer when nothing rewards length

Claim. With rewards for right answers alone, a policy learns to think longer and longer, and checks
itself more often (DeepSeek-R1-Zero, 2501.12948). A part of this length comes of GRPO's 1/|o|, and
the checks are in the base before (Dr. GRPO, 2503.20783).

Prediction. A worked answer has as many tokens as its problem asks for. With five operands the
length grows because more outputs think, and stops when all do. With 3 to 7 operands and a
curriculum, it goes on as long as problems get harder. Outputs of the same kind to problems of the
same difficulty do not get longer, with 1/|o| or without. RL brings no self-checks, for the base
samples hardly any: the forum, which it read last, has none. Pilots were seen before: 40 steps of
one seed with the curriculum and 2048 samples of the base, all without a self-check.

Method. grpo.py, rewarded for right answers alone, from the base of lab/claims/signal.py, which
mostly guesses; dr_grpo has a constant for 1/|o|. The growth of the mean length is taken apart
exactly. One after the other, three factors become those of the end: the shares that think, for each
number of operands (more thinking); the shares of 3 to 7 operands (harder problems); the lengths of
those that think and of those that do not, for each number (longer answers of the same kind). A part
depends on what changed before it, so it is the mean over all six orders. That thoughts of a kind do
not get longer says nothing of R1-Zero: all that our base has read are thoughts of one form, whose
length follows from the problem. A self-check is a "wait,".

Outcome. As predicted, answers get longer because more of them think, which all do in the end, and
with the curriculum as problems get harder. Not as predicted: with 1/|o| there is a third part; but
it hangs on the few outputs without a thought that are left at the end, at most 11 of 2560, so it is
not judged. Nothing checks itself, as predicted: that is at the floor.
"""
import dataclasses
import itertools

import numpy

import common
import grpo
from lab.claims.signal import BASE
from lab.draw import curves
from lab.experiment import Experiment, numbers
from lab.training import load_base, training
from lab.verdict import Claim

R1 = "[DeepSeek-R1](https://arxiv.org/abs/2501.12948)"
DR_GRPO = "[Dr. GRPO](https://arxiv.org/abs/2503.20783)"
FIXED = "5 operands"
MOVING = "3-7, curriculum"
CONSTANT = "3-7, dr_grpo"
TO_7 = "--task arithmetic:3-7 --curriculum"
RUNS = {FIXED: "", MOVING: TO_7, CONSTANT: f"{TO_7} --loss_type dr_grpo"}
LEVELS = range(3, 8)                            # operands
STEPS, WINDOW = 60, 10
PARTS = ("more thinking", "harder problems", "longer answers of the same kind")
ORDERS = list(itertools.permutations(range(len(PARTS))))
LONGER = 1                                      # token, what counts as longer
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(8))
EXPERIMENT.commands += [f"grpo.py {flags}" for flags in RUNS.values()]


# ---- 1. training -----------------------------------------------------------------------------

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
    return {column: [one[column] for one in found] for column in found[0]}


# ---- 2. where length comes from --------------------------------------------------------------

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
    last = factors(found, -1)
    now = numpy.nan_to_num(numpy.where(numpy.isnan(first), last, first))    # as if not changed
    last = numpy.nan_to_num(numpy.where(numpy.isnan(last), first, last))
    added = numpy.zeros(now.shape[:2])
    for which in order:
        length = now.prod(axis=0).sum(axis=(1, 2))
        now[which] = last[which]
        added[which] = now.prod(axis=0).sum(axis=(1, 2)) - length
    return added


# ---- 3. what was found -----------------------------------------------------------------------

def page(learned):
    length = {name: found["tokens"].sum(axis=(2, 3)) / found["number"].sum(axis=(2, 3))
              for name, found in learned.items()}                               # (S, W)
    part = {}
    for name, found in learned.items():
        added = numpy.mean([parts(found, order) for order in ORDERS], axis=0)   # (3, S)
        part[name] = dict(zip(PARTS, added))
    longer = {name: added[PARTS[-1]] for name, added in part.items()}
    by_part = ", ".join(f"{added.mean():+.1f} from {word}" for word, added in part[MOVING].items())
    first, *_, last = length[MOVING].mean(axis=0)
    said = (f"R1-Zero, 3 to 7 operands: answers grow from {first:.0f} to {last:.0f} tokens: "
            f"{by_part}")
    yield Claim("answers get longer, though only right ones are rewarded", R1,
                length[MOVING][:, -1] - length[MOVING][:, 0], at_least=LONGER, unit="tokens",
                shown=said, contradicted=said, undecided=said)
    yield Claim("answers of a kind get longer by more with GRPO's 1/length than without", DR_GRPO,
                longer[MOVING] - longer[CONSTANT], at_least=LONGER, unit="tokens")
    checks = learned[MOVING]["checks"]
    yield Claim(f"more outputs check themselves in the last {WINDOW} steps than in the first", R1,
                (checks[:, -1], checks[:, 1]), at_least=0.01, unit="of outputs")

    shown = {"5 operands": length[FIXED], "3 to 7 operands": length[MOVING]}
    yield curves(shown, said, x=WINDOW * numpy.arange(1 + STEPS // WINDOW), ylim=(0, None),
                 ylabel="tokens of an answer", xlabel=f"step, mean of {WINDOW} steps; 0: the base")
    ends = {}
    for name, found in learned.items():
        kinds = found["number"].sum(axis=2)                                     # (S, W, 2)
        columns = {"thinks": kinds[..., 1] / kinds.sum(axis=2), "tokens": length[name]}
        ends[name] = {f"{word} {when}": values[:, place] for word, values in columns.items()
                      for when, place in (("at first", 0), ("late", -1))}
    yield numbers(ends, {column: column for column in ends[FIXED]}, ".2f", by="run")
    yield numbers(part, {word: word for word in PARTS}, "+.1f", by="tokens added")
