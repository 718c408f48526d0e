"""Turns: which turn of an episode deserves the reward, and who wrote the tokens"""
import functools
import itertools
import random
from types import SimpleNamespace

import numpy
import torch

import common
import grpo
import plumbing
from examples import turns
from lab.claims.masking import unmask
from lab.draw import BLUE, GREY, curves
from lab.experiment import Experiment, at_best_rates, numbers, ratio, steps_to_level
from lab.training import load_base, training
from lab.verdict import OURS, Claim
from tasks import number

WHOLE, TO_GO, GIGPO = "one reward (GRPO)", "reward to go", "GiGPO"
LEARNED = "one reward, environment learned"
ESTIMATORS = {WHOLE: "grpo", TO_GO: "reward_to_go", GIGPO: "gigpo"}
SIDES = ESTIMATORS | {LEARNED: "grpo"}
# probability of a guess in the middle of what is left, and of another guess within the hints; all
# other guesses are numbers of the whole range
POLICIES = {"before RL": (0.0, 0.5), "after RL": (0.8, 0.15)}
GROUPS = 256                            # groups of 8 episodes for each seed
FLAGS = "--task number --num_prompts 16"
STEPS = 80
LEVEL, WINDOW = 0.4, 4                  # accuracy to reach, as a mean over this many batches
RATES = ("2.5e-4", "5e-4", "1e-3", "2e-3", "4e-3")
CASES = [f"{side}, {rate}" for side in SIDES for rate in RATES]
# the cases at the best rates that `tuning` finds, for other seeds
JUDGED = [f"{WHOLE}, 5e-4", f"{TO_GO}, 1e-3", f"{GIGPO}, 5e-4", f"{LEARNED}, 2.5e-4"]
LONGER = 320                            # steps of the runs in the picture
SEEDS = range(8)
EXPERIMENT = Experiment(__file__, SEEDS, one_base=True, rate="")


@functools.cache
def chances(policy, low, high):
    """Compute the probability of each guess 0..31 if the secret is in low..high. -> (32,)"""
    in_middle, within = POLICIES[policy]
    p = numpy.full(number.SIZE, (1 - in_middle - within) / number.SIZE)
    p[low:high + 1] += within / (high + 1 - low)
    p[(low + high) // 2] += in_middle
    return p


@functools.cache
def values(policy, low, high, left):
    """Compute the probability of success after each guess 0..31, with `left` guesses including this
    one, averaged over secrets in low..high. -> (32,)"""
    found = numpy.full(number.SIZE, value(policy, low, high, left - 1))
    for guess in range(low, high + 1):
        below = (guess - low) * value(policy, low, guess - 1, left - 1)
        above = (high - guess) * value(policy, guess + 1, high, left - 1)
        found[guess] = (1 + below + above) / (high + 1 - low)
    return found


@functools.cache
def value(policy, low, high, left):
    """Compute the same before the guess. -> float"""
    if left == 0 or low > high:
        return 0.0
    return float(chances(policy, low, high) @ values(policy, low, high, left))


def play(task, problem, policy, rng):
    """Play an episode. -> its text, the exact advantages of its turns"""
    lowest = task.open(problem).low
    exact = []

    def guess(state):
        place = state.low - lowest, state.high - lowest, number.LIMIT - state.guesses
        [guess] = rng.choices(range(number.SIZE), chances(policy, *place[:2]))
        exact.append(values(policy, *place)[guess] - value(policy, *place))
        return f"<search>{guess + lowest}</search>"
    return task.written(problem, guess).completion, exact


@EXPERIMENT.measure(POLICIES)
def estimates(seed, policy):
    """Correlate each estimate with the exact advantages."""
    cfg = plumbing.parse_flags(grpo.Config, FLAGS.split())
    task = common.load_task(cfg, grpo.verify)
    problems = common.sample_problems(task, GROUPS, ("turns", seed))
    problems = [problem for problem in problems for _ in range(8)]
    rng = random.Random(f"{policy} {seed}")
    texts, exact = zip(*(play(task, problem, policy, rng) for problem in problems))
    rows = [torch.tensor([1.0, 0.0] * len(row)) for row in exact]   # a turn, a response, a turn ..
    mask = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)              # (B, T)
    exact = torch.tensor([advantage for row in exact for advantage in row])
    rewards = torch.tensor([task.verify(*pair) for pair in zip(problems, texts)]).view(-1, 8)
    batch = SimpleNamespace(problems=problems, texts=texts, mask=mask, rewards=rewards)
    columns = {}
    for name, estimator in ESTIMATORS.items():
        chosen = turns.Config(**vars(cfg), adv_estimator=estimator)
        A, metrics = turns.advantages(task, batch, chosen)
        columns[name] = torch.corrcoef(torch.stack([A[mask > 0], exact]))[0, 1].item()
    return columns | {"shared": metrics["turns/shared_states"]}


def first_guesses(batches):
    """Count the first guesses by their places in the range. -> fractions of all outputs, (32,)"""
    pairs = [pair for batch in batches for pair in zip(batch.problems, batch.texts)]
    guesses = [text.partition("<search>")[2].partition("<")[0] for _, text in pairs]
    places = [int(guess) - int(problem.prompt[:2]) for (problem, _), guess in zip(pairs, guesses)
              if guess.isdecimal()]
    return [places.count(place) / len(pairs) for place in range(number.SIZE)]


def learn(seed, case, steps=None):
    """Train like examples/turns.py. -> accuracy of each batch, and the first guesses in the first
    and in the last four batches"""
    side, _, rate = case.rpartition(", ")
    cfg, task, policy = load_base(grpo, f"{FLAGS} --seed {seed} --learning_rate {rate}")
    cfg = turns.Config(**vars(cfg), adv_estimator=SIDES[side])
    if side == LEARNED:
        unmask(task)
    training_steps = training(grpo, cfg, task, policy,
                              advantages=lambda batch: turns.advantages(task, batch, cfg)[0])
    batches = [batch for batch, _ in itertools.islice(training_steps, steps or STEPS)]
    return {"accuracy": [batch.is_correct.double().mean().item() for batch in batches],
            "before": first_guesses(batches[:4]), "after": first_guesses(batches[-4:])}


EXPERIMENT.measure(CASES, SEEDS[:3], "tuning")(learn)
EXPERIMENT.measure(JUDGED, SEEDS[3:], "judging")(learn)
EXPERIMENT.measure([f"{GIGPO}, 5e-4"], SEEDS[3:6], "longer")(functools.partial(learn, steps=LONGER))


def page(estimates, tuning, judging, longer):
    def counted(columns):
        return numpy.minimum(steps_to_level(columns["accuracy"], LEVEL, WINDOW), STEPS)
    best = at_best_rates(tuning, judging, SIDES, RATES, counted)
    steps = {side: steps_to_level(best[side]["accuracy"], LEVEL, WINDOW) for side in SIDES}
    [long] = longer.values()
    before, after = long["before"], long["after"]
    title = (f"Before RL {before[:, 12:20].sum(axis=1).mean():.0%} of the first guesses are among "
             f"the eight numbers in the middle, and {after[:, 12:20].sum(axis=1).mean():.0%} after "
             f"{LONGER} steps with GiGPO")
    for name, columns in estimates.items():
        for one, source in ((GIGPO, "GiGPO"), (TO_GO, OURS)):
            found = (f"With the exact advantages, those of {one} have a correlation of "
                     f"{columns[one].mean():.2f} {name}, and one reward for all turns of "
                     f"{columns[WHOLE].mean():.2f}")
            yield Claim(f"{name}, the advantages of {one} correlate more with the exact ones than "
                        "one reward for all turns does", source, columns[one] - columns[WHOLE],
                        at_least=0.05, said=found * (one == GIGPO))
    for one, other, source in ((WHOLE, GIGPO, "GiGPO"), (WHOLE, TO_GO, OURS),
                               (LEARNED, WHOLE, "Search-R1")):
        yield Claim(f"an accuracy of {LEVEL} takes more outputs with {one} than with {other} (at "
                    "the best rate of each)", source, at_least=1.1,
                    said=f"In turns, an accuracy of {LEVEL} takes {128 * steps[one].mean():.0f} "
                          f"outputs with {one}, and {128 * steps[other].mean():.0f} with {other}",
                    **ratio(steps[one], steps[other], STEPS, smallest=WINDOW - 1))
    yield curves({"before RL": before, "after RL": after}, range(number.SIZE), title,
                 given={"before RL": GREY, "after RL": BLUE}, xlabel="first guess minus the lowest "
                 "number of the range", ylabel="fraction of the episodes")
    yield numbers({f"{name}: {one}": {"correlation": columns[one],
                                      "noise": columns[one] ** -2 - 1,
                                      "turns in shared states": columns["shared"]}
                   for name, columns in estimates.items() for one in ESTIMATORS}, form=".2f",
                  by="policy and advantages")
    yield numbers({side: {f"outputs to an accuracy of {LEVEL}": 128 * steps[side],
                          "accuracy, last 10 steps": columns["accuracy"][:, -10:].mean(axis=1)}
                   for side, columns in best.items()}, form=".4g", by="at the best rate of each")
    yield numbers({GIGPO: {"accuracy, first 4 steps": long["accuracy"][:, :4].mean(axis=1),
                           "accuracy, last 10 steps": long["accuracy"][:, -10:].mean(axis=1)}},
                  form=".2f", by=f"in {LONGER} steps")
