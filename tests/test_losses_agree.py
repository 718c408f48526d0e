"""How the losses of this project are related, as a family tree: each test is one branch of it.

All of them use the scripts' own functions, in float64. `slope` is the gradient in log pi.
"""
import inspect

import pytest
import torch
from conftest import ROOT, close, gradient, ones, randn

import dpo
import grpo
import gspo
import nano
import ppo
import reinforce

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).double()        # three outputs
OLD = -1 - randn(3, 4).abs()                            # log pi_old
LOGPS = (OLD + 0.3 * randn(3, 4, seed=1)).requires_grad_()      # log pi; some ratios are clipped
A = randn(3, 1, seed=2)


def slope(token_loss, logps=LOGPS):
    return gradient(token_loss, logps)


@pytest.mark.parametrize("loss_type", grpo.LOSS_TYPES)
@pytest.mark.parametrize("script", [grpo, gspo])
def test_at_ratio_1_every_surrogate_has_the_gradient_of_reinforce(script, loss_type):
    logps = OLD.clone().requires_grad_()
    surrogate = slope(script.policy_loss(logps, OLD, A, MASK, loss_type), logps)
    close(surrogate, slope(reinforce.policy_loss(logps, A.expand(3, 4), MASK), logps))


def test_ppo_has_the_loss_of_grpo_and_gspo_too_if_an_output_has_one_token():
    given = LOGPS, OLD, A, MASK
    clip = {"epsilon": 0.2, "epsilon_high": 0.28}
    close(ppo.policy_loss(*given, **clip), grpo.policy_loss(*given, **clip))
    one = LOGPS[:, :1], OLD[:, :1], A, ones(3, 1)
    close(gspo.policy_loss(*one, **clip), grpo.policy_loss(*one, **clip))


def test_gspo_token_has_the_value_of_gspo():
    whole, tokens = (gspo.policy_loss(LOGPS, OLD, A, MASK, level=level)
                     for level in ("sequence", "sequence_token"))
    close(whole, tokens)


def test_averages_agree_if_all_outputs_are_equally_long_and_dr_grpos_if_none_is_shorter_than_T():
    x = grpo.policy_loss(LOGPS, OLD, A, ones(3, 4))
    outputs, tokens, constant = (grpo.aggregate(x, ones(3, 4), grpo.LOSS_TYPES[name][1])
                                 for name in ("grpo", "dapo", "dr_grpo"))
    close(torch.stack([tokens, constant]), outputs.expand(2))
    by_output, by_token = (grpo.aggregate(x, MASK, how) for how in ("sequence_mean", "token_mean"))
    assert not torch.isclose(by_output, by_token)


def test_rloo_is_the_group_mean_times_G_over_G_minus_1():
    rewards = randn(5, 4)
    close(reinforce.advantages(rewards, "rloo"), 4 / 3 * grpo.advantages(rewards, "none"))


def test_inside_its_bounds_cispo_has_the_gradient_of_grpo_but_another_value():
    near = (OLD + 0.1 * randn(3, 4, seed=1).clamp(-1, 1)).requires_grad_()
    clip, cispo = (grpo.policy_loss(near, OLD, A, MASK, name) for name in ("grpo", "cispo"))
    close(slope(clip, near), slope(cispo, near))
    assert not torch.allclose(clip, cispo)


def test_dpos_gradient_is_a_weighted_reinforce_of_its_pair():
    logps = dpo.sequence_logps(LOGPS, MASK)
    chosen, rejected, ref_chosen, ref_rejected = logps[0], logps[1], *OLD[:2].sum(dim=1)
    loss = dpo.dpo_loss(*(x[None] for x in (chosen, rejected, ref_chosen, ref_rejected)), 0.1)
    margin = 0.1 * (chosen - rejected - ref_chosen + ref_rejected)
    weight = 0.1 * torch.sigmoid(-margin).detach()      # larger if the pair is in the wrong order
    A_pair = weight * torch.tensor([[1], [-1], [0]]).expand(3, 4)
    close(slope(loss), slope(reinforce.policy_loss(LOGPS, A_pair, MASK)))


# ---- the KL as a loss: all outputs of two tokens are enumerated ------------------------------

def two_tokens(theta):
    """Compute the log-probabilities of the tokens of all outputs; row 0 of theta has the logits of
    the first token, row 1 + i those of the second token after token i. (1 + V, V) -> (V * V, 2)"""
    first, second = theta[0].log_softmax(dim=-1), theta[1:].log_softmax(dim=-1)
    V = len(first)
    return torch.stack([first[:, None].expand(V, V), second], dim=-1).view(-1, 2)


def kls_of_tokens(theta, ref, old):
    """Compute the mean of KL(pi || pi_ref) at each token, exactly, over prefixes of pi_old."""
    log_p, log_ref = theta.log_softmax(dim=-1), ref.log_softmax(dim=-1)
    kl = (log_p.exp() * (log_p - log_ref)).sum(dim=-1)                          # (1 + V,)
    return kl[0] + (old[0].softmax(dim=-1) * kl[1:]).sum()


def kl_of_outputs(theta, ref):
    logps = two_tokens(theta).sum(dim=1)
    return (logps.exp() * (logps - two_tokens(ref).sum(dim=1))).sum()


def mean_of_loss(estimator, theta, ref, old):
    """Average the sum over tokens of an estimate, as a loss, over all outputs of pi_old."""
    logps, ref_logps, old_logps = map(two_tokens, (theta, ref, old))
    log_rho = grpo.log_ratio(logps, old_logps, torch.ones_like(logps))
    p = old_logps.sum(dim=1, keepdim=True).exp()
    return (p * grpo.kl(logps, ref_logps, estimator, log_rho)).sum()


def policies(seed):
    """Draw pi, pi_ref and pi_old. -> three tables of logits"""
    torch.manual_seed(seed)
    theta, ref, old = (2 * torch.randn(4, 3, dtype=torch.float64) for _ in range(3))
    return theta.requires_grad_(), ref, old


def test_k3_ratio_has_the_gradient_of_the_kl_at_each_token_with_the_tokens_before_it_fixed():
    theta, ref, old = policies(0)
    exact = slope(kls_of_tokens(theta, ref, old), theta)
    close(slope(mean_of_loss("k3_ratio", theta, ref, old), theta), exact)
    on_policy = slope(kls_of_tokens(theta, ref, theta.detach()), theta)
    close(slope(mean_of_loss("k2", theta, ref, theta.detach()), theta), on_policy)
    assert not torch.allclose(slope(mean_of_loss("k3", theta, ref, theta.detach()), theta),
                              on_policy, rtol=0.1)


def test_only_the_kl_in_the_reward_has_the_gradient_of_the_kl_between_whole_outputs():
    cosines = []
    for seed in range(300):
        theta, ref, _ = policies(seed)
        exact = slope(kl_of_outputs(theta, ref), theta)
        found = slope(mean_of_loss("k3_ratio", theta, ref, theta.detach()), theta)
        cosines.append(torch.cosine_similarity(found.flatten(), exact.flatten(), dim=0))
    logps = two_tokens(theta)
    mask = torch.ones_like(logps)
    rewards = -reinforce.kl(logps, two_tokens(ref)).detach()
    A = reinforce.rewards_to_go(rewards, mask, 1.0)
    p = logps.detach().sum(dim=1, keepdim=True).exp()
    close(slope((p * reinforce.policy_loss(logps, A, mask)).sum(), theta), exact)
    low, median = torch.stack(cosines).quantile(torch.tensor([0.0, 0.5]).double()).tolist()
    page = (ROOT / "docs/methods.md").read_text("utf-8")
    assert f"is {median:.3f} in the median, and {low:.2f} in the worst case" in page


def test_nano_and_real_have_the_loss_of_grpo():
    token_loss = grpo.policy_loss(LOGPS, OLD, A, MASK, "grpo", 0.2, 0.28)
    theirs = grpo.aggregate(token_loss, MASK, "sequence_mean")
    close(slope(nano.surrogate_loss(LOGPS, OLD, A, MASK)), slope(theirs))
    # real.py needs transformers, so its text is compared
    assert inspect.getsource(nano.surrogate_loss) in (ROOT / "real.py").read_text("utf-8")
