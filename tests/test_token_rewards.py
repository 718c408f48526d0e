"""What each token earned: rewards, returns and advantages of reinforce.py and ppo.py."""
import math

import pytest
import torch
from conftest import f64, scripts
from update_scenes import made_batch, shift

import common

pytestmark = pytest.mark.quick

HALF = math.log(2)              # log pi / pi_ref where the base finds a token half as likely
with_token_rewards = scripts("reinforce", "ppo")


def close(found, expected, tolerance=1e-10):
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


def random_bigram(script, bigram):
    """A policy that finds no two tokens equally likely."""
    V = script.VOCAB_SIZE
    return bigram(torch.randn(V, V, generator=torch.Generator().manual_seed(0)).double())


def advantages_of(script, reference, batch, cfg, policy=None):
    """What reinforce.py makes of a batch that the verifier rewards."""
    rewards = script.token_rewards(None, batch, cfg)
    return script.compute_advantages(policy or reference, reference, batch, rewards, cfg)


# ---- the token that a reward is paid with ----------------------------------------------------

MOVES = [0.5, -1.0, 0, 0, 2.0, 0.25]        # a verdict for each of six characters
TOOL_MASK = [1, 1, 0, 0, 1, 1]              # characters 2 and 3 were inserted


@with_token_rewards
@pytest.mark.parametrize("verdict, reward, mask, expected", [
    # a number is paid with the last token that was sampled, a bonus with it
    (1.0, 1.0, TOOL_MASK, [0, 0, 0, 0, 0, 1]),
    (1.0, 1.1, TOOL_MASK, [0, 0, 0, 0, 0, 1.1]),
    (0.0, 0.5, [1, 1, 1, 1, 0, 0], [0, 0, 0, 0.5, 0, 0]),
    # a list character by character, what is left of the reward with the last token
    (MOVES, 1.75, TOOL_MASK, MOVES),
    (MOVES, 2.0, TOOL_MASK, [0.5, -1.0, 0, 0, 2.0, 0.5]),
    ([0.5, -1.0, 0, 0, 0, 0], -0.5, [1, 1, 0, 0, 0, 0], [0.5, -1.0, 0, 0, 0, 0]),
    # what an inserted character would have earned is not lost
    ([0.5, -1.0, 3, 0, 2.0, 0.25], 4.75, TOOL_MASK, [0.5, -1.0, 0, 0, 2.0, 3.25])])
def test_rewards_are_paid_with_sampled_tokens(
        script, config, bigram, verdict, reward, mask, expected):
    mask = f64([mask])
    batch = made_batch(script, [[1]], [[*b"abxxcd"]], mask, 0 * mask, rewards=f64([[reward]]))
    batch.lengths = torch.tensor([6])
    batch.verdicts = [verdict]
    close(common.token_rewards(batch, script.decode), f64([expected]))

    # and what comes after a token is what it is worth, without a critic
    to_go = f64([expected]).flip(1).cumsum(dim=1).flip(1) * mask
    policy = bigram(torch.zeros(script.VOCAB_SIZE, script.VOCAB_SIZE, dtype=torch.float64))
    if script.__name__ == "reinforce":
        A = advantages_of(script, policy, batch, config(view="token", num_prompts=1))
        close(A, to_go)
    else:
        found = script.compute_advantages(
            constant_critic(0 * mask), policy, batch, config(gamma=1.0), 0.0, 1.0)
        close(found.returns, to_go)


@scripts("reinforce")
def test_a_reward_for_each_move_belongs_to_the_token_that_makes_it(script, config, bigram):
    policy = bigram(torch.zeros(script.VOCAB_SIZE, script.VOCAB_SIZE, dtype=torch.float64))
    # n, then an e with accent of two bytes, an arrow of three, a tag of seven characters
    think = script.TOKENIZER.encode_single_token("<think>")
    first = [*"n\u00e9\u2191".encode(), think, script.EOS]
    second = [*b"ab", script.EOS, *[script.PAD] * 5]
    mask = f64([[1.0] * 8, [1.0] * 3 + [0.0] * 5])
    batch = made_batch(
        script, [[1]] * 2, [first, second], mask, mask, 2, f64([[31.0, 0.75]]))
    batch.verdicts = [[1.0, 2.0, 4.0, 8.0, 16.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.5, 0.25]]
    assert [len(text) for text in batch.texts] == [10, 2]
    A = advantages_of(script, policy, batch, config(view="token", num_prompts=1))
    assert A[:, 0].tolist() == pytest.approx([31.0, 0.75])
    assert A[0, [0, 1, 3, 6, 7]].tolist() == pytest.approx([31, 30, 28, 24, 0])
    assert A[1].tolist() == pytest.approx([0.75, 0.25, 0, 0, 0, 0, 0, 0])


# ---- reinforce.py: returns and baselines -----------------------------------------------------

@pytest.fixture
def reinforce_case(script, config, bigram):
    """reinforce_case(**changes) -> a batch and its advantages, with these flags. Of four answers,
    the third is right. The base finds every token half as likely as the policy that sampled."""
    EOS = script.EOS
    PAD = script.PAD
    reference = random_bigram(script, bigram)
    tokens = [[7, 8, EOS], [EOS, PAD, PAD], [5, 6, 7], [7, EOS, PAD]]
    mask = f64([[1, 1, 1], [1, 0, 0], [1, 1, 1], [1, 1, 0]])
    batch = made_batch(script, [[1]] * 4, tokens, mask, mask, 4, f64([[0, 0, 1, 0]]))
    ref_logps, _ = script.score(reference, batch.prompts, batch.tokens)
    batch.logps = (ref_logps.detach() + HALF) * mask

    def advantages(**changes):
        cfg = config(num_prompts=1, **changes)
        return advantages_of(script, reference, batch, cfg)
    return batch, advantages


PRICE = 0.1 * HALF              # of a token, with beta = 0.1
RETURNS_WITH_KL = [[-3 * PRICE] * 3, [-PRICE, 0, 0], [1 - 3 * PRICE] * 3, [-2 * PRICE] * 2 + [0]]
TO_GO_WITH_KL = [[-3 * PRICE, -2 * PRICE, -PRICE], [-PRICE, 0, 0],
                 [1 - 3 * PRICE, 1 - 2 * PRICE, 1 - PRICE], [-2 * PRICE, -PRICE, 0]]


@scripts("reinforce")
@pytest.mark.parametrize("view, beta, gamma, expected", [
    ("sequence", 0.0, 1.0, [[0, 0, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]]),
    ("token", 0.0, 0.5, [[0, 0, 0], [0, 0, 0], [0.25, 0.5, 1], [0, 0, 0]]),
    ("sequence", 0.0, 0.5, [[0, 0, 0], [0, 0, 0], [0.25, 0.25, 0.25], [0, 0, 0]]),
    ("sequence", 0.1, 1.0, RETURNS_WITH_KL),
    ("token", 0.1, 1.0, TO_GO_WITH_KL)])
def test_a_token_is_worth_what_comes_after_it_or_all_that_came_of_its_row(
        reinforce_case, view, beta, gamma, expected):
    _, advantages = reinforce_case
    close(advantages(view=view, beta=beta, gamma=gamma), f64(expected))


@scripts("reinforce")
def test_a_baseline_is_taken_off_every_token(reinforce_case):
    batch, advantages = reinforce_case
    close(advantages(baseline="rloo"), f64([[-1], [-1], [3], [-1]]) / 3 * batch.mask)


@scripts("reinforce")
def test_rejection_sampling_takes_what_is_right_whatever_it_earned(reinforce_case):
    batch, advantages = reinforce_case
    expected = f64([[0], [0], [4], [0]]) * batch.mask       # one of four
    close(advantages(method="rejection"), expected)
    batch.rewards = f64([[0.1, 0.0, 1.3, 1.0]])         # a bonus makes no answer right
    close(advantages(method="rejection"), expected)
    batch.verdicts = [[-1.0] * 2, [], [-1.0] * 3, [-1.0]]       # a price for each move, none wrong
    close(advantages(method="rejection", view="token"), expected)
    num_tokens = batch.mask.sum(dim=1, keepdim=True)
    close(advantages(method="rejection", beta=0.1), expected - PRICE * num_tokens * batch.mask)


@pytest.fixture
def random_scene(script, scene):
    """random_scene(**changes): a scene whose rewards are random, with the policy that sampled."""
    def make(**changes):
        one = scene(**changes)
        one.policy = type(one.policy)(one.cfg).double()
        generator = torch.Generator().manual_seed(0)
        shift(one.policy, 0.01, generator)
        one.batch.rewards = torch.randn(7, 2, generator=generator).double()
        one.batch.verdicts = one.batch.rewards.flatten().tolist()
        return one
    return make


@scripts("reinforce")
def test_squared_norms_are_those_of_the_gradient_of_each_completion(script, random_scene):
    scene = random_scene(micro_batch_size=3)
    batch = scene.batch
    norms = script.squared_gradient_norms(scene.policy, batch, scene.cfg)
    assert norms.shape == (14,)
    for row, norm in enumerate(norms):
        one = slice(row, row + 1)
        logps, _ = script.score(scene.policy, batch.prompts[one], batch.tokens[one], 0.7)
        sequence_logp = (logps * batch.mask[one]).sum()
        gradients = torch.autograd.grad(sequence_logp, list(scene.policy.parameters()))
        expected = sum((gradient ** 2).sum() for gradient in gradients)
        torch.testing.assert_close(norm, expected, atol=0, rtol=1e-9)
    assert norms.max() > 1.1 * norms.min()
    assert norms.min() > 0


@scripts("reinforce")
@pytest.mark.parametrize("baseline", ["none", "mean", "rloo", "batch", "optimal"])
def test_the_baseline_of_the_returns_is_taken_off_every_reward_to_go(
        script, random_scene, baseline):
    scene = random_scene(view="token", baseline=baseline, beta=0.1, gamma=0.9)
    batch = scene.batch
    mask = batch.mask
    verdicts = script.token_rewards(None, batch, scene.cfg)
    A = script.compute_advantages(scene.policy, scene.reference, batch, verdicts, scene.cfg)
    assert not A.requires_grad                  # a loss has no gradient through a reward
    assert (A[mask == 0] == 0).all()

    rewards = -0.1 * (batch.logps - scene.ref_logps()) * mask
    last = batch.lengths - 1
    rewards[range(14), last] += batch.rewards.flatten()
    to_go = script.rewards_to_go(rewards, mask, 0.9)
    R = to_go[:, 0].view(7, 2)
    norms = script.squared_gradient_norms(scene.policy, batch, scene.cfg).view(7, 2)
    b = R - script.advantages(R, baseline, norms)
    close(A, (to_go - b.view(14, 1)) * mask, 1e-9)


# ---- ppo.py: rewards, the base and the critic ------------------------------------------------

def constant_critic(values):
    """A critic that always says these values (B, T)."""
    def critic(prompts, completions):
        return values
    return critic


@pytest.fixture
def ppo_case(script, config, bigram):
    """ppo_case(beta, critic_lam, **changes) -> Advantages of two rows of three tokens and one. The
    first is right. The base finds every token half as likely as the policy that sampled."""
    reference = random_bigram(script, bigram)
    tokens = [[5, 6, 7], [script.EOS, script.PAD, script.PAD]]
    batch = made_batch(
        script, [[1]] * 2, tokens, PPO_MASK, PPO_MASK, 2, torch.tensor([[1.0, 0.0]]))
    ref_logps, _ = script.score(reference, batch.prompts, batch.tokens)
    batch.logps = (ref_logps.detach() + HALF) * PPO_MASK
    critic = constant_critic(PPO_VALUES)

    def advantages(beta=0.0, critic_lam=None, **changes):
        cfg = config(**changes)
        return script.compute_advantages(critic, reference, batch, cfg, beta, critic_lam)
    return advantages


PPO_MASK = f64([[1, 1, 1], [1, 0, 0]])
PPO_VALUES = f64([[0.2, 0.5, 0.8], [0.4, 9.0, 9.0]])
PPO_A = f64([[0.5, 0.4, 0.2], [-0.4, 0, 0]])    # with lam = 0.5: MATH's table, and 0 - 0.4


@scripts("ppo")
def test_advantages_are_whitened_and_returns_are_not(script, ppo_case):
    found = ppo_case(gamma=1.0, lam=0.5)
    close(found.advantages, script.whiten(PPO_A, PPO_MASK))
    close(found.returns, (PPO_A + PPO_VALUES) * PPO_MASK)
    close(found.values, PPO_VALUES * PPO_MASK)
    assert found.kl == pytest.approx(HALF)


@scripts("ppo")
def test_the_critic_may_have_a_lambda_of_its_own(ppo_case):
    found = ppo_case(lam=0.5, critic_lam=1.0)
    close(found.returns, f64([[1, 1, 1], [0, 0, 0]]))
    close(ppo_case(lam=0.5, critic_lam=0.0).returns, f64([[0.5, 0.8, 1], [0, 0, 0]]))
    close(found.advantages, ppo_case(lam=0.5).advantages)


@scripts("ppo")
def test_the_kl_to_the_base_lowers_the_rewards(ppo_case):
    found = ppo_case(beta=0.1, lam=1.0)
    close(found.returns, f64([[1 - 3 * PRICE, 1 - 2 * PRICE, 1 - PRICE], [-PRICE, 0, 0]]))


@scripts("ppo")
def test_lambda_may_adapt_to_the_length(ppo_case):
    adaptive = ppo_case(length_adaptive=True, alpha=2 / 3)      # lambda is 0.5, then 0
    close(adaptive.advantages, ppo_case(lam=0.5).advantages, 1e-6)


@pytest.fixture
def judged_critic(script, scene):
    """judged_critic(values, beta=0.0, **changes) -> the Advantages that a critic that says `values`
    finds in a scene in which every other answer is right."""
    def judge(values, beta=0.0, **changes):
        one = scene(**changes)
        one.batch.rewards = (torch.arange(14) % 2).double().view(7, 2)
        one.batch.verdicts = one.batch.rewards.flatten().tolist()
        return script.compute_advantages(
            constant_critic(values), one.reference, one.batch, one.cfg, beta, None)
    return judge


@scripts("ppo")
@pytest.mark.parametrize("lam", [0.0, 0.1, 0.95])
def test_a_random_critic_explains_nothing_even_where_it_makes_up_its_own_target(
        judged_critic, lam):
    values = torch.randn(14, 8, generator=torch.Generator().manual_seed(0)).double()
    for size in (0.2, 1.0):
        found = judged_critic(size * values, lam=lam)
        assert found.explained_variance < 0.1
    lengths = {"length_adaptive": True, "alpha": 1 / 8}         # lambda is 0
    assert judged_critic(values, **lengths).explained_variance < 0.1


@scripts("ppo")
def test_a_critic_that_says_what_comes_explains_everything_whatever_lambda_is(judged_critic):
    """And the explained variance of a worse one does not depend on lambda, either."""
    shape = torch.zeros(14, 8, dtype=torch.float64)
    exact = judged_critic(shape, beta=0.1, gamma=0.9, lam=1.0).returns
    for lam in (0.0, 0.5, 1.0):
        found = judged_critic(exact, beta=0.1, gamma=0.9, lam=lam)
        assert found.explained_variance == pytest.approx(1.0)
        found = judged_critic(exact / 2, beta=0.1, gamma=0.9, lam=lam)
        assert found.explained_variance == pytest.approx(0.75)


@scripts("ppo")
def test_estimates_carry_no_gradient_to_the_critic(script, scene):
    scene = scene()
    critic = script.Critic(scene.policy)
    found = script.compute_advantages(critic, scene.reference, scene.batch, scene.cfg, 0.1, None)
    for values in (found.advantages, found.returns, found.values):
        assert not values.requires_grad
