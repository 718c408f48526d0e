"""Test how a baseline and a discount change the advantages of reinforce.py, against numbers worked
out on paper. The formulas of the baselines are among the test vectors."""
import math

import pytest
import torch
from conftest import TINY, close, f64, ones, randn, scripts
from update_scenes import gradient_of, made_batch

import common
import reinforce

pytestmark = pytest.mark.quick

# ---- from a batch to its advantages ----------------------------------------------------------

HALF = math.log(2)              # log(pi / pi_ref) if the base finds a token half as likely
PRICE = 0.1 * HALF              # penalty for such a token with beta = 0.1


@pytest.fixture
def four_answers(bigram):
    """four_answers(**flags): compute the advantages of four answers, of which the third is right.
    The base finds each token half as likely as the policy that sampled it. -> (4, 3)"""
    EOS, PAD = reinforce.EOS, reinforce.PAD
    reference = bigram(randn(320, 320))
    mask = f64([[1, 1, 1], [1, 0, 0], [1, 1, 1], [1, 1, 0]])
    tokens = [[7, 8, EOS], [EOS, PAD, PAD], [5, 6, 7], [7, EOS, PAD]]
    batch = made_batch(reinforce, [[1]] * 4, tokens, mask, mask, 4, f64([[0, 0, 1, 0]]))
    logps, _ = reinforce.score(reference, batch.prompts, batch.tokens)
    batch.logps = (logps.detach() + HALF) * mask

    def advantages(rewards=None, **flags):
        batch.rewards = batch.rewards if rewards is None else f64(rewards)
        cfg = reinforce.Config(**(TINY | flags))
        task = common.load_task(cfg, reinforce.verify)
        r = reinforce.token_rewards(task, batch, cfg)
        ref_logps, mean_kl = reinforce.score_reference(reference, batch, cfg)
        assert mean_kl == pytest.approx(HALF)
        A = reinforce.compute_advantages(reference, ref_logps, batch, r, cfg)
        assert not A.requires_grad
        return A
    return advantages


@pytest.mark.parametrize("flags, expected", [
    ({}, [[0, 0, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]]),
    ({"baseline": "rloo"},
     [[-1 / 3] * 3, [-1 / 3, 0, 0], [1, 1, 1], [-1 / 3, -1 / 3, 0]]),
    ({"view": "token", "gamma": 0.5}, [[0, 0, 0], [0, 0, 0], [0.25, 0.5, 1], [0, 0, 0]]),
    ({"gamma": 0.5}, [[0, 0, 0], [0, 0, 0], [0.25, 0.25, 0.25], [0, 0, 0]]),
    ({"view": "token", "gamma": 0.5, "baseline": "mean"},
     [[-1 / 16] * 3, [-1 / 16, 0, 0], [3 / 16, 7 / 16, 15 / 16], [-1 / 16, -1 / 16, 0]]),
    ({"beta": 0.1},
     [[-3 * PRICE] * 3, [-PRICE, 0, 0], [1 - 3 * PRICE] * 3, [-2 * PRICE] * 2 + [0]]),
    ({"beta": 0.1, "view": "token"},
     [[-3 * PRICE, -2 * PRICE, -PRICE], [-PRICE, 0, 0],
      [1 - 3 * PRICE, 1 - 2 * PRICE, 1 - PRICE], [-2 * PRICE, -PRICE, 0]]),
    ({"method": "rejection", "rewards": [[0, 0, 1, 0]]}, [[0] * 3, [0] * 3, [4] * 3, [0] * 3]),
    ({"method": "rejection", "rewards": [[5, 9, 9, 7]]},
     [[0] * 3, [2, 0, 0], [2] * 3, [0] * 3]),
    ({"method": "rejection", "rewards": [[0, -1], [1, 0]]}, [[2] * 3, [0] * 3, [2] * 3, [0] * 3]),
    ({"method": "rejection", "rewards": [[0, 0], [-1, -1]]}, [[0] * 3] * 4),
    ({"method": "rejection", "rewards": [[-1, -2], [1, 1]]},
     [[0] * 3, [0] * 3, [2] * 3, [2, 2, 0]])], ids=str)
def test_a_token_is_worth_what_comes_after_it_or_all_that_came_of_its_row(
        four_answers, flags, expected):
    close(four_answers(**flags), f64(expected))


@pytest.mark.parametrize("task", ["gridworld", "gridworld,arithmetic"])
def test_rejection_pays_a_right_row_even_where_a_task_pays_each_move(task):
    cfg = reinforce.Config(**(TINY | {"task": task, "method": "rejection"}))
    task = common.load_task(cfg, reinforce.verify)
    batch = made_batch(reinforce, [[1]] * 4, [[7, 8]] * 4, ones(4, 2), ones(4, 2), 2,
                       f64([[1, 0], [0, 0]]))
    batch.problems = [common.Problem("A b3 7", "", task="gridworld")] * 4
    batch.verified = [[-1.0, 5.0]] * 4
    close(reinforce.token_rewards(task, batch, cfg), f64([[0, 4], [0, 0], [0, 0], [0, 0]]))


@scripts("reinforce")
def test_squared_norms_are_those_of_the_gradient_of_each_completion(scene, watch):
    """The gradients of three completions at a time are in memory."""
    scene = scene(micro_batch_size=3)
    chunks = watch(torch.func, "vmap", lambda function, chunk_size=None: chunk_size)
    batch = scene.batch
    norms = reinforce.squared_gradient_norms(scene.policy, batch, scene.cfg)
    assert norms.shape == (7, 2)
    for row, norm in enumerate(norms.flatten()):
        logps, _ = reinforce.score(scene.policy, batch.prompts[[row]], batch.tokens[[row]], 0.7)
        gradient = gradient_of((logps * batch.mask[row]).sum(), scene.policy)
        close(norm, gradient.square().sum(), atol=0, rtol=1e-9)
    assert chunks == [3]
    assert norms.max() > 1.1 * norms.min() > 0
