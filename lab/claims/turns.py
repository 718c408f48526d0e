"""Turns: which turn of an episode deserves the reward, and who wrote the tokens

For policies of which we know everything, we compare the advantages of examples/turns.py in the task
number with the exact ones. Then a real policy learns from each, and once also from the tokens that
the environment wrote. docs/lab/turns.md explains the claims and the outcome.
"""
import functools
import random
from types import SimpleNamespace

import numpy
import torch

import common
import grpo
from examples import turns
from lab.claims.masking import unmask
from lab.draw import BLUE, GREY, curves
from lab.experiment import Experiment, numbers, ratio, steps_to_level
from lab.training import clear_gradient, load_base
from lab.verdict import OURS, Claim
from tasks import number

ESTIMATORS = {"one reward (GRPO)": {"adv_estimator": "grpo"},
              "reward to go": {"adv_estimator": "reward_to_go"},
              "reward to go, gamma 1": {"adv_estimator": "reward_to_go", "gamma": 1.0},
              "GiGPO": {"adv_estimator": "gigpo"},
              "GiGPO, gamma 1": {"adv_estimator": "gigpo", "gamma": 1.0}}
WHOLE, TO_GO, _, GIGPO, _ = ESTIMATORS
# probability of a guess in the middle of what is left, and of another guess within the hints; all
# other guesses are numbers of the whole range
POLICIES = {"before RL": (0.0, 0.5), "after RL": (0.8, 0.15)}
GROUPS = 256                            # groups of 8 episodes for each seed
GAIN = 0.05                             # smallest difference of two correlations that matters
FLAGS = "--task number --num_prompts 16"
STEPS = 60
LEVEL, WINDOW = 0.6, 4                  # accuracy to reach, as a mean over this many batches
LEARNED = "one reward, environment learned"
SIDES = ESTIMATORS | {LEARNED: ESTIMATORS[WHOLE]}
TRAINED = (WHOLE, TO_GO, GIGPO, LEARNED)
RATES = ("5e-4", "1e-3", "2e-3")
SEEDS = range(8)
TUNING, HELD_OUT = SEEDS[:3], SEEDS[3:]
CASES = [f"{side}, {rate}" for side in TRAINED for rate in RATES]
JUDGED = ()                             # the cases at the best rates, which run on other seeds
EXPERIMENT = Experiment(__file__, SEEDS, one_base=True, rate="")


# ---- exact advantages ------------------------------------------------------------------------

@functools.cache
def chances(policy, low, high):
    """Compute the probability of each guess 0..31 if the secret is in low..high. -> (32,)"""
    in_middle, within = POLICIES[policy]
    p = numpy.full(number.SIZE, (1 - in_middle - within) / number.SIZE)
    p[low:high + 1] += within / (high + 1 - low)
    p[(low + high) // 2] += in_middle
    return p


@functools.cache
def value(policy, low, high, left):
    """Compute the probability of finding a secret that is anywhere in low..high with equal
    probabilities, in `left` guesses. -> float"""
    if left == 0 or low > high:
        return 0.0
    return float(chances(policy, low, high) @ values(policy, low, high, left))


@functools.cache
def values(policy, low, high, left):
    """Compute the value of a state after each guess 0..31, averaged over the secrets. -> (32,)"""
    found = numpy.full(number.SIZE, value(policy, low, high, left - 1))
    for guess in range(low, high + 1):
        below = (guess - low) * value(policy, low, guess - 1, left - 1)
        above = (high - guess) * value(policy, guess + 1, high, left - 1)
        found[guess] = (1 + below + above) / (high + 1 - low)
    return found


def sample_groups(task, policy, seed, num_groups, G=8):
    """Let a policy play, with one token for each turn and one for each response. -> a batch for
    turns.advantages, and the exact advantages (B, T)"""
    problems = common.sample_problems(task, num_groups, ("turns", seed))
    problems = [problem for problem in problems for _ in range(G)]
    rng = random.Random(f"{policy} {seed}")
    texts, rows = [], []
    for problem in problems:
        state = task.open(problem)
        lowest = state.low
        text, row = "", []
        while state is not None:
            place = state.low - lowest, state.high - lowest
            [guess] = rng.choices(range(number.SIZE), chances(policy, *place))
            left = number.LIMIT - state.guesses
            row += [values(policy, *place, left)[guess] - value(policy, *place, left), 0.0]
            action = f"<search>{guess + lowest}</search>"
            state, response, _ = task.step(state, action)
            text += action + response
        texts.append(text)
        rows.append(torch.tensor(row))
    exact = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)             # (B, T)
    mask = torch.zeros_like(exact)
    for one, row in zip(mask, rows):
        one[:len(row):2] = 1.0
    rewards = [task.verify(*pair) for pair in zip(problems, texts)]
    return SimpleNamespace(problems=problems, texts=texts, mask=mask,
                           rewards=torch.tensor(rewards).view(-1, G)), exact


@EXPERIMENT.measure(POLICIES)
def estimates(seed, policy):
    """Compare each estimate with the exact advantages. Noise is the variance of an estimate about
    the best multiple of the exact advantage, divided by the variance of this multiple."""
    cfg, task, _ = load_base(grpo, FLAGS)
    batch, exact = sample_groups(task, policy, seed, GROUPS)
    columns = {}
    for name, flags in ESTIMATORS.items():
        chosen = turns.Config(**vars(cfg) | flags)
        A, metrics = turns.advantages(task, batch, chosen)
        pair = torch.stack([A, exact])[:, batch.mask > 0]
        columns[name] = torch.corrcoef(pair)[0, 1].item()
        columns[f"noise: {name}"] = 1 / columns[name] ** 2 - 1
    return columns | {"shared": metrics["turns/shared_states"]}


# ---- training --------------------------------------------------------------------------------

def first_guesses(batches):
    """Count the first guesses by their places in the range. -> fractions of all outputs, (32,)"""
    counts = [0] * number.SIZE
    total = 0
    for batch in batches:
        for problem, text in zip(batch.problems, batch.texts):
            guess = text.partition("<search>")[2].partition("<")[0]
            place = int(guess) - int(problem.prompt[:2]) if guess.isdecimal() else -1
            total += 1
            if 0 <= place < number.SIZE:
                counts[place] += 1
    return [count / total for count in counts]


def learn(seed, case):
    """Train like examples/turns.py, from the base. -> accuracy of each batch, and the first guesses
    in the first and the last four batches"""
    side, _, rate = case.rpartition(", ")
    cfg, task, policy = load_base(grpo, f"{FLAGS} --seed {seed} --learning_rate {rate}")
    cfg = turns.Config(**vars(cfg) | SIDES[side])
    if side == LEARNED:
        unmask(task)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.learning_rate, weight_decay=0.0)
    clear_gradient(policy)
    batches = []
    for step in range(STEPS):
        batch = grpo.sample_with_signal(policy, task, cfg, step)
        A, _ = turns.advantages(task, batch, cfg)
        grpo.update(policy, None, optimizer, batch, A, cfg, step)
        batches.append(batch)
    accuracy = [batch.is_correct.double().mean().item() for batch in batches]
    return {"accuracy": accuracy, "before": first_guesses(batches[:4]),
            "after": first_guesses(batches[-4:])}


@EXPERIMENT.measure(CASES, TUNING)
def tuning(seed, case):
    return learn(seed, case)


@EXPERIMENT.measure(JUDGED, HELD_OUT)
def judging(seed, case):
    return learn(seed, case)


def page(estimates, tuning, judging):
    steps = {case: steps_to_level(columns["accuracy"], LEVEL, WINDOW)
             for case, columns in (tuning | judging).items()}
    best = {side: min((f"{side}, {rate}" for rate in RATES),
                      key=lambda case: numpy.minimum(steps[case], STEPS).mean())
            for side in TRAINED}
    last = {side: judging[best[side]]["accuracy"][:, -10:].mean(axis=1) for side in TRAINED}
    before, after = (judging[best[GIGPO]][name] for name in ("before", "after"))
    middle = after[:, 12:20].sum(axis=1).mean()
    title = ("Before RL the first guess may be any number; after RL with GiGPO, "
             f"{middle:.0%} of the first guesses are among the eight in the middle")
    for name, columns in estimates.items():
        for one in (GIGPO, TO_GO):
            yield Claim(f"{name}, the advantages of {one} correlate more with the exact ones than "
                        "one reward for all turns does", "GiGPO" if one == GIGPO else OURS,
                        columns[one] - columns[WHOLE], at_least=GAIN)
    for one, other, source, words in (
            (WHOLE, GIGPO, "GiGPO", "one reward for all turns than with GiGPO"),
            (WHOLE, TO_GO, OURS, "one reward for all turns than with the reward to go"),
            (LEARNED, WHOLE, "Search-R1", "the environment's tokens learned than with them masked")
            ):
        yield Claim(f"an accuracy of {LEVEL} takes more outputs with {words}", source,
                    **ratio(steps[best[one]], steps[best[other]], STEPS, smallest=WINDOW - 1),
                    at_least=1.1)
    yield curves({"before RL": before, "after RL": after}, title, range(number.SIZE),
                 given={"before RL": GREY, "after RL": BLUE}, xlabel="first guess minus the lowest "
                 "number of the range", ylabel="fraction of the episodes")
    yield numbers({f"{name}: {one}": {"correlation": columns[one],
                                      "noise": columns[f"noise: {one}"]}
                   for name, columns in estimates.items() for one in ESTIMATORS}, form=".2f",
                  by="advantages of each turn")
    yield numbers({name: {"turns whose state another turn of the group shares": columns["shared"]}
                   for name, columns in estimates.items()}, form=".2f", by="policy")
    yield numbers({side: {f"outputs to an accuracy of {LEVEL}": 128 * steps[best[side]],
                          "accuracy, last 10 steps": last[side]}
                   for side in TRAINED}, form=".3g", by="learning, at the best rate of each")
