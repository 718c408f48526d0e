"""Losses as strangers write them, for tests/test_vectors.py: twenty are right, and each of forty
others has a mistake, which the command has to name.
"""
import torch
import torch.nn.functional as F


def case(recipe, mistake=""):
    """Mark a function with its recipe and its mistake; without one, it is right."""
    def mark(function):
        function.recipe, function.mistake = recipe, mistake
        return function
    return mark


# ---- right -----------------------------------------------------------------------------------

@case("grpo")
def textbook(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    ratio = torch.exp(logps - old_logps)
    A = advantages[:, None]
    x = -torch.min(ratio * A, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * A)
    return ((x * mask).sum(1) / mask.sum(1)).mean()


@case("grpo")
def detached_textbook(logps, old_logps, advantages, mask, epsilon_low=0.2, epsilon_high=0.2):
    ratio = (logps - old_logps.detach()).exp()
    A = advantages.unsqueeze(-1)
    x = torch.max(-ratio * A, -torch.clamp(ratio, 1 - epsilon_low, 1 + epsilon_high) * A)
    return ((x * mask).sum(-1) / mask.sum(-1)).mean()


@case("grpo")
def columns(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    """advantages: (B, 1)"""
    ratio = (logps - old_logps).exp()
    x = torch.min(ratio * advantages, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages)
    return -((x * mask).sum(1) / mask.sum(1)).mean()


@case("grpo")
def of_tokens(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    ratio = (logps - old_logps).exp()
    A = advantages[:, None].expand_as(ratio)
    return -torch.minimum(ratio * A, ratio.clip(1 - epsilon_low, 1 + epsilon_high) * A)


@case("grpo")
def chosen_by_bool(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    """mask: bool"""
    losses = []
    for x, old, A, m in zip(logps, old_logps, advantages, mask):
        ratio = (x[m] - old[m]).exp()
        clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
        losses.append(-torch.min(ratio * A, clipped * A).mean())
    return torch.stack(losses).mean()


@case("grpo")
def other_names(log_probs, old_log_probs, adv, response_mask, clip_eps_low, clip_eps_high):
    ratio = torch.exp(log_probs - old_log_probs)
    adv = adv.view(-1, 1)
    loss = -torch.min(ratio * adv, ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high) * adv)
    return ((loss * response_mask).sum(1) / response_mask.sum(1)).mean()


@case("dr_grpo")
def constant(logps, old_logps, advantages, mask, epsilon_low, epsilon_high, max_length=None):
    ratio = (logps - old_logps).exp()
    A = advantages[:, None]
    x = -torch.min(ratio * A, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * A) * mask
    return x.sum() / (len(x) * (max_length or x.shape[1]))


@case("dapo")
def pooled(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    r = torch.exp(logps - old_logps)
    A = advantages.reshape(-1, 1)
    x = torch.min(r * A, torch.clamp(r, 1 - epsilon_low, 1 + epsilon_high) * A)
    return -(x * mask).sum() / mask.sum()


@case("dapo")
def pooled_where(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    log_ratio = torch.where(mask > 0, logps - old_logps.detach(), 0.0)
    r = log_ratio.exp()
    A = advantages[:, None] if advantages.dim() == 1 else advantages
    x = torch.min(r * A, r.clamp(1 - epsilon_low, 1 + epsilon_high) * A)
    return torch.where(mask > 0, -x, 0.0).sum() / mask.sum().clamp(min=1)


@case("gspo")
def whole_outputs(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    s = (((logps - old_logps) * mask).sum(1) / mask.sum(1)).exp()
    A = advantages
    return -torch.min(s * A, s.clamp(1 - epsilon_low, 1 + epsilon_high) * A).mean()


@case("gspo")
def whole_outputs_as_tokens(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    s = (((logps - old_logps) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)).exp()
    A = advantages[:, None]
    return -torch.min(s * A, s.clamp(1 - epsilon_low, 1 + epsilon_high) * A).expand_as(mask)


@case("cispo")
def weighted(logps, old_logps, advantages, mask, epsilon_high):
    weight = (logps - old_logps).exp().clamp(max=1 + epsilon_high).detach()
    return -(weight * advantages[:, None] * logps * mask).sum() / mask.sum()


@case("cispo")
def weighted_no_grad(logps, old_logps, advantages, mask, epsilon_high):
    with torch.no_grad():
        weight = torch.exp(logps - old_logps).clamp(max=1 + epsilon_high)
    return (-weight * advantages.unsqueeze(1) * logps * mask).sum() / mask.sum()


@case("ppo")
def clipped(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    """advantages: (B, T)"""
    ratio = (logps - old_logps).exp()
    A = advantages if advantages.dim() == 2 else advantages[:, None]
    x = torch.min(ratio * A, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * A)
    return -(x * mask).sum() / mask.sum()


@case("ppo")
def clipped_of_tokens(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    """advantages: (B, 1) or (B, T)"""
    ratio = (logps - old_logps).exp()
    return torch.max(-ratio * advantages,
                     -ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages)


@case("rloo")
def plain(logps, advantages, mask):
    return -(advantages * (logps * mask).sum(1)).mean()


@case("rloo")
def plain_of_tokens(logps, advantages, mask):
    return -advantages[:, None] * logps


@case("dpo")
def sigmoid(chosen, rejected, ref_chosen, ref_rejected, beta):
    return -F.logsigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected)))


@case("dpo")
def sigmoid_mean(chosen, rejected, ref_chosen, ref_rejected, beta=0.1):
    margin = (chosen - rejected) - (ref_chosen - ref_rejected)
    return F.softplus(-beta * margin).mean()


@case("dpo")
def sigmoid_other_names(policy_chosen_logps, policy_rejected_logps, reference_chosen_logps,
                        reference_rejected_logps, beta):
    pi = policy_chosen_logps - policy_rejected_logps
    ref = reference_chosen_logps - reference_rejected_logps
    return -F.logsigmoid(beta * (pi - ref)).mean()


# ---- wrong -----------------------------------------------------------------------------------

def grpo_like(logps, old_logps, advantages, mask, low, high, ratio=None, both=None, average=None):
    """GRPO's loss, of which the functions below replace a part."""
    r = (logps - old_logps).exp() if ratio is None else ratio
    A = advantages[:, None] if advantages.dim() == 1 else advantages
    x = -torch.min(r * A, r.clamp(1 - low, 1 + high) * A) if both is None else -both(r, A)
    return ((x * mask).sum(1) / mask.sum(1)).mean() if average is None else average(x)


@case("grpo", "min_max")
def g_max(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    return grpo_like(logps, old_logps, advantages, mask, epsilon_low, epsilon_high,
                     both=lambda r, A: torch.max(
                         r * A, r.clamp(1 - epsilon_low, 1 + epsilon_high) * A))


@case("grpo", "alike")
def g_only_clip(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    return grpo_like(logps, old_logps, advantages, mask, epsilon_low, epsilon_high,
                     both=lambda r, A: r.clamp(1 - epsilon_low, 1 + epsilon_high) * A)


@case("grpo", "not_clipped")
def g_no_clip(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    return grpo_like(logps, old_logps, advantages, mask, epsilon_low, epsilon_high,
                     both=lambda r, A: r * A)


@case("grpo", "sign")
def g_sign(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    return -grpo_like(logps, old_logps, advantages, mask, epsilon_low, epsilon_high)


@case("grpo", "inverse")
def g_inverse(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    return grpo_like(logps, old_logps, advantages, mask, epsilon_low, epsilon_high,
                     ratio=(old_logps - logps).exp())


@case("grpo", "own_old")
def g_own_old(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    return grpo_like(logps, logps.detach(), advantages, mask, epsilon_low, epsilon_high)


@case("grpo", "shifted")
def g_shifted(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    return grpo_like(logps, old_logps.roll(1, dims=1), advantages, mask, epsilon_low, epsilon_high)


@case("grpo", "pessimism")
def g_min_of_ratios(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    return grpo_like(logps, old_logps, advantages, mask, epsilon_low, epsilon_high,
                     both=lambda r, A: torch.min(r, r.clamp(1 - epsilon_low, 1 + epsilon_high)) * A)


@case("grpo", "bounds_swapped")
def g_bounds(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    return grpo_like(logps, old_logps, advantages, mask, epsilon_high, epsilon_low)


@case("grpo", "other_mean")
def g_pooled(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    return grpo_like(logps, old_logps, advantages, mask, epsilon_low, epsilon_high,
                     average=lambda x: (x * mask).sum() / mask.sum())


@case("grpo", "over_slots")
def g_slots(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    return grpo_like(logps, old_logps, advantages, mask, epsilon_low, epsilon_high,
                     average=lambda x: (x * mask).mean())


@case("grpo", "no_mask")
def g_no_mask(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    return grpo_like(logps, old_logps, advantages, mask, epsilon_low, epsilon_high,
                     average=lambda x: x.mean(1).mean())


@case("grpo", "prefix")
def g_prefix(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    prefix = (torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True)).to(mask)
    return grpo_like(logps, old_logps, advantages, prefix, epsilon_low, epsilon_high)


@case("grpo", "no_B")
def g_sum(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    return grpo_like(logps, old_logps, advantages, mask, epsilon_low, epsilon_high,
                     average=lambda x: ((x * mask).sum(1) / mask.sum(1)).sum())


@case("grpo", "detached")
def g_detached(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    return grpo_like(logps, old_logps, advantages, mask, epsilon_low, epsilon_high,
                     ratio=(logps - old_logps).exp().detach())


@case("grpo", "log_clip")
def g_log_clip(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    return grpo_like(logps, old_logps, advantages, mask, epsilon_low, epsilon_high,
                     both=lambda r, A: torch.min(
                         r * A, r.log().clamp(-epsilon_low, epsilon_high).exp() * A))


@case("dr_grpo", "constant")
def d_longest(logps, old_logps, advantages, mask, epsilon_low, epsilon_high, max_length=None):
    return grpo_like(logps, old_logps, advantages, mask, epsilon_low, epsilon_high,
                     average=lambda x: (x * mask).sum() / (len(x) * mask.sum(1).max()))


@case("dr_grpo", "no_B")
def d_no_B(logps, old_logps, advantages, mask, epsilon_low, epsilon_high, max_length=None):
    return grpo_like(logps, old_logps, advantages, mask, epsilon_low, epsilon_high,
                     average=lambda x: (x * mask).sum() / (max_length or x.shape[1]))


@case("dr_grpo", "other_mean")
def d_pooled(logps, old_logps, advantages, mask, epsilon_low, epsilon_high, max_length=None):
    return pooled(logps, old_logps, advantages, mask, epsilon_low, epsilon_high)


@case("dapo", "one_epsilon")
def a_one_epsilon(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    return pooled(logps, old_logps, advantages, mask, epsilon_low, epsilon_low)


@case("dapo", "other_mean")
def a_of_outputs(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    return textbook(logps, old_logps, advantages, mask, epsilon_low, epsilon_high)


@case("dapo", "over_slots")
def a_slots(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    return grpo_like(logps, old_logps, advantages, mask, epsilon_low, epsilon_high,
                     average=lambda x: (x * mask).sum() / x.numel())


@case("gspo", "product")
def s_product(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    s = ((logps - old_logps) * mask).sum(1).exp()
    A = advantages
    return -torch.min(s * A, s.clamp(1 - epsilon_low, 1 + epsilon_high) * A).mean()


@case("gspo", "arithmetic")
def s_arithmetic(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    s = ((logps - old_logps).exp() * mask).sum(1) / mask.sum(1)
    A = advantages
    return -torch.min(s * A, s.clamp(1 - epsilon_low, 1 + epsilon_high) * A).mean()


@case("gspo", "level")
def s_tokens(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    return textbook(logps, old_logps, advantages, mask, epsilon_low, epsilon_high)


@case("gspo", "ratio_slots")
def s_all_slots(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    s = ((logps - old_logps).sum(1) / mask.sum(1)).exp()
    A = advantages
    return -torch.min(s * A, s.clamp(1 - epsilon_low, 1 + epsilon_high) * A).mean()


@case("gspo", "min_max")
def s_max(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    s = (((logps - old_logps) * mask).sum(1) / mask.sum(1)).exp()
    A = advantages
    return -torch.max(s * A, s.clamp(1 - epsilon_low, 1 + epsilon_high) * A).mean()


@case("cispo", "weight_grad")
def c_weight(logps, old_logps, advantages, mask, epsilon_high):
    weight = (logps - old_logps).exp().clamp(max=1 + epsilon_high)
    return -(weight * advantages[:, None] * logps * mask).sum() / mask.sum()


@case("cispo", "no_cap")
def c_no_cap(logps, old_logps, advantages, mask, epsilon_high):
    weight = (logps - old_logps).exp().detach()
    return -(weight * advantages[:, None] * logps * mask).sum() / mask.sum()


@case("cispo", "no_log")
def c_no_log(logps, old_logps, advantages, mask, epsilon_high):
    weight = (logps - old_logps).exp().clamp(max=1 + epsilon_high).detach()
    return -(weight * advantages[:, None] * mask).sum() / mask.sum()


@case("cispo", "drops_clipped")
def c_drops(logps, old_logps, advantages, mask, epsilon_high):
    ratio = (logps - old_logps).exp().detach()
    weight = torch.where(ratio > 1 + epsilon_high, 0.0, ratio)
    return -(weight * advantages[:, None] * logps * mask).sum() / mask.sum()


@case("ppo", "min_max")
def p_min_of_losses(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    ratio = (logps - old_logps).exp()
    A = advantages if advantages.dim() == 2 else advantages[:, None]
    x = torch.min(-ratio * A, -ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * A)
    return (x * mask).sum() / mask.sum()


@case("ppo", "token_advantages")
def p_mean_advantage(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    A = advantages.mean(1) if advantages.dim() == 2 else advantages
    return pooled(logps, old_logps, A, mask, epsilon_low, epsilon_high)


@case("rloo", "sign")
def l_sign(logps, advantages, mask):
    return (advantages * (logps * mask).sum(1)).mean()


@case("rloo", "other_mean")
def l_pooled(logps, advantages, mask):
    return -(advantages[:, None] * logps * mask).sum() / mask.sum()


@case("rloo", "mask_ignored")
def l_no_mask(logps, advantages, mask):
    return -(advantages * logps.sum(1)).mean()


@case("dpo", "beta_outside")
def o_beta(chosen, rejected, ref_chosen, ref_rejected, beta):
    return -beta * F.logsigmoid(chosen - ref_chosen - rejected + ref_rejected)


@case("dpo", "reference_added")
def o_added(chosen, rejected, ref_chosen, ref_rejected, beta):
    return -F.logsigmoid(beta * (chosen + ref_chosen - rejected - ref_rejected))


@case("dpo", "swapped")
def o_swapped(chosen, rejected, ref_chosen, ref_rejected, beta):
    return sigmoid(rejected, chosen, ref_rejected, ref_chosen, beta)


@case("dpo", "reference")
def o_reference_free(chosen, rejected, ref_chosen, ref_rejected, beta):
    return -F.logsigmoid(beta * (chosen - rejected))
