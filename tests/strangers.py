"""Losses as strangers write them, for tests/test_vectors.py: twenty that are right, and forty
mistakes in them, which the command has to name.
"""
import torch
import torch.nn.functional as F


def recipe(name):
    """Mark a function with its recipe."""
    def mark(function):
        function.recipe = name
        return function
    return mark


# ---- right -----------------------------------------------------------------------------------

@recipe("grpo")
def textbook(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    ratio = torch.exp(logps - old_logps)
    A = advantages[:, None]
    x = -torch.min(ratio * A, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * A)
    return ((x * mask).sum(1) / mask.sum(1)).mean()


@recipe("grpo")
def detached_textbook(logps, old_logps, advantages, mask, epsilon_low=0.2, epsilon_high=0.2):
    ratio = (logps - old_logps.detach()).exp()
    A = advantages.unsqueeze(-1)
    x = torch.max(-ratio * A, -torch.clamp(ratio, 1 - epsilon_low, 1 + epsilon_high) * A)
    return ((x * mask).sum(-1) / mask.sum(-1)).mean()


@recipe("grpo")
def columns(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    """advantages: (B, 1)"""
    ratio = (logps - old_logps).exp()
    x = torch.min(ratio * advantages, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages)
    return -((x * mask).sum(1) / mask.sum(1)).mean()


@recipe("grpo")
def of_tokens(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    ratio = (logps - old_logps).exp()
    A = advantages[:, None].expand_as(ratio)
    return -torch.minimum(ratio * A, ratio.clip(1 - epsilon_low, 1 + epsilon_high) * A)


@recipe("grpo")
def chosen_by_bool(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    """mask: bool"""
    losses = []
    for x, old, A, m in zip(logps, old_logps, advantages, mask):
        ratio = (x[m] - old[m]).exp()
        clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
        losses.append(-torch.min(ratio * A, clipped * A).mean())
    return torch.stack(losses).mean()


@recipe("grpo")
def other_names(log_probs, old_log_probs, adv, response_mask, clip_eps_low, clip_eps_high):
    ratio = torch.exp(log_probs - old_log_probs)
    adv = adv.view(-1, 1)
    loss = -torch.min(ratio * adv, ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high) * adv)
    return ((loss * response_mask).sum(1) / response_mask.sum(1)).mean()


@recipe("dr_grpo")
def constant(logps, old_logps, advantages, mask, epsilon_low, epsilon_high, max_length=None):
    ratio = (logps - old_logps).exp()
    A = advantages[:, None]
    x = -torch.min(ratio * A, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * A) * mask
    return x.sum() / (len(x) * (max_length or x.shape[1]))


@recipe("dapo")
def pooled(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    r = torch.exp(logps - old_logps)
    A = advantages.reshape(-1, 1)
    x = torch.min(r * A, torch.clamp(r, 1 - epsilon_low, 1 + epsilon_high) * A)
    return -(x * mask).sum() / mask.sum()


@recipe("dapo")
def pooled_where(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    log_ratio = torch.where(mask > 0, logps - old_logps.detach(), 0.0)
    r = log_ratio.exp()
    A = advantages[:, None] if advantages.dim() == 1 else advantages
    x = torch.min(r * A, r.clamp(1 - epsilon_low, 1 + epsilon_high) * A)
    return torch.where(mask > 0, -x, 0.0).sum() / mask.sum().clamp(min=1)


@recipe("gspo")
def whole_outputs(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    s = (((logps - old_logps) * mask).sum(1) / mask.sum(1)).exp()
    A = advantages
    return -torch.min(s * A, s.clamp(1 - epsilon_low, 1 + epsilon_high) * A).mean()


@recipe("gspo")
def whole_outputs_as_tokens(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    s = (((logps - old_logps) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)).exp()
    A = advantages[:, None]
    return -torch.min(s * A, s.clamp(1 - epsilon_low, 1 + epsilon_high) * A).expand_as(mask)


@recipe("cispo")
def weighted(logps, old_logps, advantages, mask, epsilon_high):
    weight = (logps - old_logps).exp().clamp(max=1 + epsilon_high).detach()
    return -(weight * advantages[:, None] * logps * mask).sum() / mask.sum()


@recipe("cispo")
def weighted_no_grad(logps, old_logps, advantages, mask, epsilon_high):
    with torch.no_grad():
        weight = torch.exp(logps - old_logps).clamp(max=1 + epsilon_high)
    return (-weight * advantages.unsqueeze(1) * logps * mask).sum() / mask.sum()


@recipe("ppo")
def clipped(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    """advantages: (B, T)"""
    ratio = (logps - old_logps).exp()
    A = advantages if advantages.dim() == 2 else advantages[:, None]
    x = torch.min(ratio * A, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * A)
    return -(x * mask).sum() / mask.sum()


@recipe("ppo")
def clipped_of_tokens(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    """advantages: (B, 1) or (B, T)"""
    ratio = (logps - old_logps).exp()
    return torch.max(-ratio * advantages,
                     -ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages)


@recipe("rloo")
def plain(logps, advantages, mask):
    return -(advantages * (logps * mask).sum(1)).mean()


@recipe("rloo")
def plain_of_tokens(logps, advantages, mask):
    return -advantages[:, None] * logps


@recipe("dpo")
def sigmoid(chosen, rejected, ref_chosen, ref_rejected, beta):
    return -F.logsigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected)))


@recipe("dpo")
def sigmoid_mean(chosen, rejected, ref_chosen, ref_rejected, beta=0.1):
    margin = (chosen - rejected) - (ref_chosen - ref_rejected)
    return F.softplus(-beta * margin).mean()


@recipe("dpo")
def sigmoid_other_names(policy_chosen_logps, policy_rejected_logps, reference_chosen_logps,
                        reference_rejected_logps, beta):
    pi = policy_chosen_logps - policy_rejected_logps
    ref = reference_chosen_logps - reference_rejected_logps
    return -F.logsigmoid(beta * (pi - ref)).mean()


# ---- wrong -----------------------------------------------------------------------------------

CLIPPED = "ratio.clamp(1 - epsilon_low, 1 + epsilon_high)"
MEAN = "((x * mask).sum(1) / mask.sum(1)).mean()"
POOLED = "(x * mask).sum() / mask.sum()"
LONGEST = "(len(x) * (max_length or x.shape[1]))"
MARGIN = "(chosen - ref_chosen) - (rejected - ref_rejected)"
MISTAKES = [            # the mistake, a function above, a part of it, and what stands there instead
    ("min_max", textbook, "torch.min", "torch.max"),
    ("alike", textbook, "torch.min(ratio * A, ", "("),
    ("not_clipped", textbook, CLIPPED, "ratio"),
    ("sign", textbook, "-torch.min", "torch.min"),
    ("inverse", textbook, "logps - old_logps", "old_logps - logps"),
    ("own_old", textbook, "logps - old_logps", "logps - logps.detach()"),
    ("shifted", textbook, "logps - old_logps", "logps - old_logps.roll(1, dims=1)"),
    ("pessimism", textbook, f"ratio * A, {CLIPPED} * A)", f"ratio, {CLIPPED}) * A"),
    ("bounds_swapped", textbook, "1 - epsilon_low, 1 + epsilon_high",
     "1 - epsilon_high, 1 + epsilon_low"),
    ("other_mean", textbook, MEAN, POOLED),
    ("over_slots", textbook, MEAN, "(x * mask).mean()"),
    ("no_mask", textbook, MEAN, "x.mean()"),
    ("prefix", textbook, "    ratio =", "    mask = (torch.arange(mask.shape[1]) < mask.sum(1, "
     "keepdim=True)).to(mask)\n    ratio ="),
    ("no_B", textbook, ".mean()", ".sum()"),
    ("detached", textbook, "torch.exp(logps - old_logps)", "torch.exp(logps - old_logps).detach()"),
    ("log_clip", textbook, CLIPPED, "ratio.log().clamp(-epsilon_low, epsilon_high).exp()"),
    ("constant", constant, "(max_length or x.shape[1])", "mask.sum(1).max()"),
    ("no_B", constant, LONGEST, "(max_length or x.shape[1])"),
    ("other_mean", constant, LONGEST, "mask.sum()"),
    ("one_epsilon", pooled, "1 + epsilon_high", "1 + epsilon_low"),
    ("other_mean", pooled, POOLED, MEAN),
    ("over_slots", pooled, POOLED, "(x * mask).mean()"),
    ("product", whole_outputs, " / mask.sum(1)", ""),
    ("arithmetic", whole_outputs, "(((logps - old_logps) * mask).sum(1) / mask.sum(1)).exp()",
     "((logps - old_logps).exp() * mask).sum(1) / mask.sum(1)"),
    ("level", whole_outputs, "(((logps - old_logps) * mask).sum(1) / mask.sum(1)).exp()\n"
     "    A = advantages", "(logps - old_logps).exp()\n"
     "    A = (advantages * mask.shape[1] / mask.sum(1))[:, None] * mask"),
    ("ratio_slots", whole_outputs, "((logps - old_logps) * mask)", "(logps - old_logps)"),
    ("min_max", whole_outputs, "torch.min", "torch.max"),
    ("weight_grad", weighted, ".detach()", ""),
    ("no_cap", weighted, ".clamp(max=1 + epsilon_high)", ""),
    ("no_log", weighted, " * logps * mask", " * mask"),
    ("drops_clipped", weighted, ".clamp(max=1 + epsilon_high).detach()",
     ".detach()\n    weight = torch.where(weight > 1 + epsilon_high, 0.0, weight)"),
    ("min_max", clipped, "torch.min", "torch.max"),
    ("token_advantages", clipped, "A = advantages if", "A = advantages.mean(1)[:, None] if"),
    ("sign", plain, "-(advantages", "(advantages"),
    ("other_mean", plain, "(advantages * (logps * mask).sum(1)).mean()",
     "(advantages[:, None] * logps * mask).sum() / mask.sum()"),
    ("mask_ignored", plain, "(logps * mask)", "logps"),
    ("beta_outside", sigmoid, "F.logsigmoid(beta * (", "beta * F.logsigmoid(("),
    ("reference_added", sigmoid, MARGIN, "(chosen + ref_chosen) - (rejected + ref_rejected)"),
    ("swapped", sigmoid, MARGIN, "(rejected - ref_rejected) - (chosen - ref_chosen)"),
    ("reference", sigmoid, MARGIN, "chosen - rejected")]
