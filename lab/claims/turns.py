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
from lab.bench import OURS, Claim, numbers, steps_to
from lab.claims.masking import unmask
from lab.training import load_base, training
from report import chart
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
LONG, LONGER = f"longer, {GIGPO}, 5e-4", 320    # the runs in the chart, and their steps
CASES = [*POLICIES, *(f"{side}, {rate}" for side in SIDES for rate in RATES), LONG]
SEEDS, ONE_BASE = range(8), True
# the first three seeds choose a rate for each side, and the others judge at these rates
JUDGED = [f"{WHOLE}, 5e-4", f"{TO_GO}, 1e-3", f"{GIGPO}, 5e-4", f"{LEARNED}, 2.5e-4"]
FEWER = {case: SEEDS[:3] for case in CASES[2:] if case not in JUDGED} | {LONG: SEEDS[3:6]}


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


def correlations(policy, seed):
    """Correlate each estimate with the exact advantages of a policy's turns."""
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


def measure(case, seed):
    """Train like examples/turns.py. -> accuracy of each batch, and the first guesses in the first
    and in the last four batches; or the correlations of one of POLICIES"""
    if case in POLICIES:
        return correlations(case, seed)
    side, rate = case.removeprefix("longer, ").rsplit(", ", 1)
    cfg, task, policy = load_base(grpo, f"{FLAGS} --seed {seed} --learning_rate {rate}")
    cfg = turns.Config(**vars(cfg), adv_estimator=SIDES[side])
    if side == LEARNED:
        unmask(task)
    steps = training(grpo, cfg, task, policy,
                     advantages=lambda batch: turns.advantages(task, batch, cfg)[0])
    batches = [batch for batch, _ in itertools.islice(steps, LONGER if case == LONG else STEPS)]
    return {"accuracy": [batch.is_correct.double().mean().item() for batch in batches],
            "before": first_guesses(batches[:4]), "after": first_guesses(batches[-4:])}


def page(x):
    for policy in POLICIES:
        found = x[policy]
        finding = (f"With the exact advantages, those of {GIGPO} have a correlation of "
                   f"{found[GIGPO].mean():.2f} {policy}, and one reward for all turns of "
                   f"{found[WHOLE].mean():.2f}")
        for one, source in ((GIGPO, "GiGPO"), (TO_GO, OURS)):
            yield Claim(f"{policy}, the advantages of {one} correlate more with the exact ones "
                        "than one reward for all turns does", source, found[one] - found[WHOLE],
                        at_least=0.05, finding=finding * (one == GIGPO))
    accuracy = {case: x[case]["accuracy"] for case in CASES[2:]}
    steps = {case: steps_to(rows, LEVEL, WINDOW) for case, rows in accuracy.items()}
    best = {side: min((f"{side}, {rate}" for rate in RATES),
                      key=lambda case: steps[case][:3].clip(max=STEPS).mean()) for side in SIDES}
    outputs = {side: 128 * steps[case][3:] for side, case in best.items()}
    for one, other, source in ((WHOLE, GIGPO, "GiGPO"), (WHOLE, TO_GO, OURS),
                               (LEARNED, WHOLE, "Search-R1")):
        yield Claim(f"an accuracy of {LEVEL} takes more outputs with {one} than with {other} (at "
                    "the best rate of each)", source, outputs[one] / outputs[other], at_least=1.1,
                    ratio=True, finding=f"In turns, an accuracy of {LEVEL} takes "
                    f"{outputs[one].mean():.0f} outputs with {one}, and "
                    f"{outputs[other].mean():.0f} with {other}")
    yield lambda axis: chart.curves(
        axis, {f"{when} RL": x[LONG][when] for when in ("before", "after")}, range(number.SIZE),
        xlabel="first guess minus the lowest number", ylabel="fraction of the episodes")
    yield numbers({f"{policy}: {one}": {"correlation": x[policy][one],
                                        "turns in shared states": x[policy]["shared"]}
                   for policy in POLICIES for one in ESTIMATORS}, "policy and advantages", ".2f")
    ends = best | {f"{GIGPO}, {LONGER} steps": LONG}
    yield numbers({name: {f"outputs to an accuracy of {LEVEL}": 128 * steps[case][-5:],
                          "accuracy, last 10 steps": accuracy[case][-5:, -10:].mean(axis=1)}
                   for name, case in ends.items()}, "at the best rate of each", ".4g")
