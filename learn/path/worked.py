"""Work out the gradient of REINFORCE with numbers, for the page before rung 1.

A policy with one parameter, theta, answers one question. It writes one of eight outputs: with the
probability sigmoid(theta) it thinks first, and what it writes then does not depend on theta. So the
expected reward J and its gradient can be computed exactly.
"""
import functools
import math
import random
from statistics import fmean
from typing import NamedTuple

QUESTION, ANSWER = "((3+4)*2)=", 14
THETA = -1.0            # then a share of 0.27 thinks, as of the outputs of the base
STEP = 0.01             # of the gradient by differences
BATCH = 8               # outputs in the sample
SEED = 2
MANY = 10_000             # samples, whose mean shows that one is right on average


class Output(NamedTuple):
    text: str
    thinks: bool
    share: float        # of the outputs that think, or of those that do not
    reward: float


OUTPUTS = [
    Output("<think>3+4=7;7*2=14</think><answer>14</answer>", True, 0.69, 1.0),
    Output("<think>3+4=7;7*2=15</think><answer>15</answer>", True, 0.16, 0.0),
    Output("<think>3+4=8;8*2=16</think><answer>16</answer>", True, 0.10, 0.0),
    Output("<think>3+4=7;7*2=14</think><answer>41</answer>", True, 0.05, 0.0),
    Output("<answer>14</answer>", False, 0.08, 1.0),
    Output("<answer>12</answer>", False, 0.40, 0.0),
    Output("<answer>16</answer>", False, 0.30, 0.0),
    Output("<answer>10</answer>", False, 0.22, 0.0)]


def sigmoid(x):
    """Compute the share that thinks if theta is x. -> float"""
    return 1 / (1 + math.exp(-x))


def logp(output, theta=THETA):
    """Compute log pi(o). -> float"""
    return math.log(output.share * sigmoid(theta if output.thinks else -theta))


def slope(output, theta=THETA):
    """Compute the derivative of log pi(o) with respect to theta. -> float"""
    return output.thinks - sigmoid(theta)


def expected_reward(theta=THETA):
    """Compute J, the sum of pi(o) r(o). -> float"""
    return sum(math.exp(logp(o, theta)) * o.reward for o in OUTPUTS)


def exact_gradient():
    """Compute the sum of pi(o) r(o) times the derivative of log pi(o). -> float"""
    return sum(math.exp(logp(o)) * o.reward * slope(o) for o in OUTPUTS)


def sample(rng):
    """Sample a batch of outputs. -> list of Output"""
    return rng.choices(OUTPUTS, [math.exp(logp(o)) for o in OUTPUTS], k=BATCH)


SAMPLE = sample(random.Random(SEED))


def weights(batch):
    """Compute the rewards, a fair judge's points, and both minus their means. -> four lists"""
    rewards = [o.reward for o in batch]
    points = [5 + 2 * reward for reward in rewards]
    return rewards, points, *([one - fmean(x) for one in x] for x in (points, rewards))


def sampled_gradient(batch, A):
    """Compute minus the gradient of the loss of rung 1, in which A_i is r_i: the mean of A_i times
    the derivative of log pi(o_i). -> float"""
    return fmean(a * slope(o) for a, o in zip(A, batch))


@functools.cache
def estimates():
    """Estimate the gradient from MANY samples. -> a list for each kind of weights"""
    batches = [sample(random.Random(seed)) for seed in range(MANY)]
    return [[*map(sampled_gradient, batches, A)] for A in zip(*map(weights, batches))]


def after(size):
    """Compute the share that thinks after a step along the gradient of SAMPLE's points. -> float"""
    return sigmoid(THETA + size * sampled_gradient(SAMPLE, weights(SAMPLE)[2]))


def pairs():
    """Write the loss of DPO, of a right thought and a wrong guess, for some theta. -> rows"""
    found = [(x, logp(OUTPUTS[0], x), logp(OUTPUTS[5], x), x - THETA) for x in (THETA, 0, 2, 5)]
    return [[signed(y, 2) for y in (*row, -math.log(sigmoid(row[3] / 2)))] for row in found]


def rows():
    """Write the eight outputs with their numbers. -> rows of cells"""
    return [[f"`{o.text}`", f"{o.reward:.0f}", signed(logp(o), 2),
             f"{math.exp(logp(o)):.3f}", signed(slope(o), 2),
             signed(math.exp(logp(o)) * o.reward * slope(o), 4) if o.reward else "0"]
            for o in OUTPUTS]


def signed(x, digits):
    """Write a number with a minus sign. -> str"""
    return f"{x:.{digits}f}".replace("-", "−")
