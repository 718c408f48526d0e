"""Losses as strangers write them, for tests/test_vectors.py: right ones, and mistakes in them, that
the command has to name.
"""
import functools
from types import SimpleNamespace

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


@recipe("dapo")
def new_and_plain(new_logprobs, logprobs, mb_advantages, masks, cliprange):
    """As in CleanRL, logprobs are the old ones."""
    logratio = new_logprobs - logprobs
    ratio = logratio.exp()
    with torch.no_grad():
        approx_kl = ((ratio - 1) - logratio)[masks > 0].mean()
    A = mb_advantages[:, None]
    x = torch.max(-A * ratio, -A * ratio.clamp(1 - cliprange, 1 + cliprange))
    return x[masks > 0].mean(), approx_kl


@recipe("ppo")
def verl_order(old_log_prob, log_prob, advantages, response_mask, cliprange=0.2, clip_ratio_c=3.0):
    ratio = (log_prob - old_log_prob).exp()
    clipped = ratio.clamp(1 - cliprange, 1 + cliprange)
    x = torch.maximum(-advantages * ratio, -advantages * clipped)
    x = torch.where(advantages < 0, torch.min(x, -clip_ratio_c * advantages), x)
    return (x * response_mask).sum() / response_mask.sum(), ratio.detach().mean()


@recipe("dapo")
def under_a_key(logps, old_logps, advantages, mask, /, clip_low, clip_high):
    """old_logps must be detached by the caller."""
    r = (logps - old_logps).exp()
    A = advantages[:, None]
    x = torch.min(r * A, r.clamp(1 - clip_low, 1 + clip_high) * A)
    return {"policy_loss": -(x * mask).sum() / mask.sum(), "ratio": r.mean()}


@recipe("dapo")
def in_a_list(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    return [pooled(logps, old_logps, advantages, mask, epsilon_low, epsilon_high), {"kl": 0.0}]


@recipe("dapo")
def in_an_object(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    return dict(vars(SimpleNamespace(loss=pooled(
        logps, old_logps, advantages, mask, epsilon_low, epsilon_high), metrics=None)))


@recipe("grpo")
def of_outputs(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    """A loss of each output."""
    x = of_tokens(logps, old_logps, advantages, mask, epsilon_low, epsilon_high)
    return (x * mask).sum(1) / mask.sum(1)


@recipe("grpo")
def constants_of_its_own(logps, old_logps, advantages, mask):
    return textbook(logps, old_logps, advantages, mask, 0.2, 0.28)


partly = recipe("grpo")(functools.partial(textbook, epsilon_high=0.28))


@recipe("gspo")
def float32_bounds(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    log_s = ((logps - old_logps) * mask).sum(1) / mask.sum(1)
    low, high = torch.log1p(torch.tensor([-epsilon_low, epsilon_high])).to(log_s)
    s = torch.where(advantages > 0, log_s.minimum(high), log_s.maximum(low)).exp()
    return -(s * advantages).mean()


@recipe("grpo")
def with_kl(logps, old_logps, ref_logps, advantages, mask, epsilon_low, epsilon_high, beta=0.04):
    d = ref_logps - logps
    x = of_tokens(logps, old_logps, advantages, mask, epsilon_low, epsilon_high)
    x = x + beta * (d.exp() - d - 1)
    return ((x * mask).sum(1) / mask.sum(1)).mean()


@recipe("grpo")
def whole_step(rewards, logps, old_logps, ref_logps, response_mask, kl_coef, clip_eps, eps=1e-4):
    A = ((rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + eps)).view(-1)
    return with_kl(logps, old_logps, ref_logps, A, response_mask, clip_eps, clip_eps, kl_coef)


@recipe("grpo")
def normalized(scores, epsilon=1e-6):
    mean = scores.mean(dim=1, keepdim=True)
    std = scores.std(dim=1, keepdim=True)
    return (scores - mean) / (std + epsilon)


@recipe("dr_grpo")
def centered(rewards):
    A = rewards - rewards.mean(1, keepdim=True)
    return A


@recipe("grpo")
def normalized_flat(rewards, num_generations):
    rewards = rewards.flatten()
    mean = rewards.view(-1, num_generations).mean(1).repeat_interleave(num_generations)
    std = rewards.view(-1, num_generations).std(1).repeat_interleave(num_generations)
    return {"adv": (rewards - mean) / (std + 1e-4), "std": std}


@recipe("dpo")
def of_the_paper(policy_chosen_logps, policy_rejected_logps, reference_chosen_logps,
                 reference_rejected_logps, beta, label_smoothing=0.0, reference_free=False):
    pi = policy_chosen_logps - policy_rejected_logps
    ref = 0 if reference_free else reference_chosen_logps - reference_rejected_logps
    x = beta * (pi - ref)
    losses = -F.logsigmoid(x) * (1 - label_smoothing) - F.logsigmoid(-x) * label_smoothing
    rewards = beta * (policy_chosen_logps - reference_chosen_logps).detach()
    return losses, rewards, rewards


@recipe("dpo")
def of_pairs(chosen, rejected, ref_chosen, ref_rejected, mask_chosen, mask_rejected, beta):
    w = ((chosen - ref_chosen) * mask_chosen).sum(1)
    r = ((rejected - ref_rejected) * mask_rejected).sum(1)
    return -F.logsigmoid(beta * (w - r)).mean()


@recipe("ppo")
def gae(rewards, values, mask, gamma, gae_lambda):
    A = torch.zeros_like(values)
    after, next_value = 0.0, values[:, 0] * 0
    for t in reversed(range(values.shape[1])):
        m = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        after = torch.where(m > 0, delta + gamma * gae_lambda * after, after)
        next_value = torch.where(m > 0, values[:, t], next_value)
        A[:, t] = after * m
    return A, (A + values) * mask


# ---- wrong -----------------------------------------------------------------------------------

CLIPPED = "ratio.clamp(1 - epsilon_low, 1 + epsilon_high)"
MEAN = "((x * mask).sum(1) / mask.sum(1)).mean()"
POOLED = "(x * mask).sum() / mask.sum()"
LONGEST = "(len(x) * (max_length or x.shape[1]))"
MARGIN = "(chosen - ref_chosen) - (rejected - ref_rejected)"
NO_EOS = "mask = mask * (mask.cumsum(1) < mask.sum(1, True))"
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
    ("reference", sigmoid, MARGIN, "chosen - rejected"),

    ("mask_inverted", textbook, "    ratio =", "    mask = 1 - mask\n    ratio ="),
    ("mask_inverted", pooled, "    r =", "    mask = 1 - mask\n    r ="),
    ("mask_shifted", textbook, "    ratio =",
     "    mask = F.pad(mask[:, :-1], (1, 0))\n    ratio ="),
    ("mask_shifted_back", textbook, "    ratio =",
     "    mask = F.pad(mask[:, 1:], (0, 1))\n    ratio ="),
    ("mask_rolled", textbook, "    ratio =", "    mask = mask.roll(1, 1)\n    ratio ="),
    ("mask_rolled_back", pooled, "    r =", "    mask = mask.roll(-1, 1)\n    r ="),
    ("mask_longer", textbook, "    ratio =",
     "    mask = F.pad(mask[:, :-1], (1, 0), value=1.0)\n    ratio ="),
    ("no_eos", textbook, "    ratio =", f"    {NO_EOS}\n    ratio ="),
    ("no_eos", pooled, "    r =", f"    {NO_EOS}\n    r ="),
    ("micro_batches", pooled, f"-{POOLED}", "-sum((a * m).sum() / m.sum() for a, m in "
     "zip(x.split(2), mask.split(2))) / len(x.split(2))"),
    ("sum", pooled, " / mask.sum()", ""), ("sum", textbook, MEAN, "(x * mask).sum()"),
    ("no_length", textbook, " / mask.sum(1)", ""),
    ("no_length", constant, LONGEST, "len(x)"),
    ("plus_one", textbook, "/ mask.sum(1)", "/ (mask.sum(1) + 1)"),
    ("straight_through", textbook, CLIPPED, f"(ratio + ({CLIPPED} - ratio).detach())"),
    ("trl_cap", weighted, "max=1 + epsilon_high", "max=epsilon_high"),
    ("whitened", textbook, "A = advantages[:, None]",
     "A = ((advantages - advantages.mean()) / (advantages.std() + 1e-8))[:, None]"),
    ("own_delta", textbook, "    return",
     "    x = torch.where(A < 0, torch.min(x, -3 * A), x)\n    return"),
    ("outside_dropped", textbook, "    return", "    x = torch.where((ratio > 1 + epsilon_high) | "
     "(ratio < 1 - epsilon_low), 0.0, x)\n    return"),
    ("zero_rows", constant, "(len(x)", "((advantages != 0).sum()"),
    ("zero_rows", textbook, MEAN, MEAN.replace("mean()", "sum() / (advantages != 0).sum()")),
    ("k1", with_kl, "(d.exp() - d - 1)", "-d"), ("kl_sign", with_kl, "x + beta", "x - beta"),
    ("kl_swapped", with_kl, "ref_logps - logps", "logps - ref_logps"),
    ("kl_missing", with_kl, "x + beta", "x + 0"),
    ("rows", whole_step, ".view(-1)", ".t().flatten()"),
    ("kl_swapped", whole_step, "old_logps, ref_logps, A", "old_logps, 2 * logps - ref_logps, A"),
    ("variance", normalized, "scores.std", "scores.var"),
    ("whole_batch", normalized, "scores.mean(dim=1, keepdim=True)\n    std = scores.std(dim=1, "
     "keepdim=True)", "scores.mean()\n    std = scores.std()"),
    ("batch_mean", normalized, "scores.mean(dim=1, keepdim=True)", "scores.mean()"),
    ("summed", sigmoid_mean, ".mean()", ".sum()"),
    ("chosen_mask", of_pairs, "* mask_rejected)", "* mask_chosen)"),
    ("rejected_mask", of_pairs, "* mask_chosen)", "* mask_rejected)"),
    ("padding", of_pairs, "w = ((chosen - ref_chosen) * mask_chosen).sum(1)\n    r = "
     "((rejected - ref_rejected) * mask_rejected)", "w = (chosen - ref_chosen).sum(1)\n    r = "
     "(rejected - ref_rejected)"),
    ("bootstrapped", gae, "values[:, 0] * 0",
     "values.gather(1, (mask * torch.arange(1, 1 + mask.shape[1])).argmax(1)[:, None])[:, 0]"),
    ("no_gamma", gae, "    A =", "    gamma = 1.0\n    A ="),
    ("no_lam", gae, "gamma * gae_lambda", "gamma"),

    ("scaled", centered, "return A", "return A / (rewards.std(1, keepdim=True) + 1e-4)"),
    ("scaled_8", centered, "return A", "return A / (rewards.std(1, keepdim=True) + 1e-6)"),
    ("other_length", plain, ".sum(1)", ".sum(1) / mask.sum(1)"),
    ("other_length", constant, f"x.sum() / {LONGEST}", "(x.sum(1) / mask.sum(1)).mean()"),
    ("over_slots", plain, "(logps * mask).sum(1)", "(logps * mask).mean(1)"),
    ("k2", with_kl, "(d.exp() - d - 1)", "d.square() / 2"),
    ("k2", whole_step, "A, response_mask, clip_eps, clip_eps, kl_coef)", "A, response_mask, "
     "clip_eps, clip_eps, 0) + kl_coef / 2 * (((logps - ref_logps).square() * response_mask).sum(1)"
     " / response_mask.sum(1)).mean()"),
    ("whole_batch", whole_step, "rewards.mean(1, True)) / (rewards.std(1, keepdim=True)",
     "rewards.mean()) / (rewards.std()"),
    ("cut_1", textbook, "logps - old_logps", "(logps - old_logps).clamp(-1, 1)"),
    ("cut_2", pooled, "logps - old_logps", "(logps - old_logps).clamp(-2, 2)"),
    ("tokens_mean", clipped, "A = advantages if",
     "A = ((advantages * mask).sum(-1) / mask.sum(1))[:, None] if"),
    ("A_rolled", clipped, "A = advantages if", "A = advantages.roll(1, 1) if"),
    ("A_rolled_back", clipped, "A = advantages if", "A = advantages.roll(-1, 1) if"),
    ("tokens_shifted", clipped, "A = advantages if", "A = F.pad(advantages[:, :-1], (1, 0)) if"),
    ("tokens_shifted_back", clipped, "A = advantages if",
     "A = F.pad(advantages[:, 1:], (0, 1)) if"),
    ("A_shifted", clipped_of_tokens, "    ratio =",
     "    advantages = F.pad(advantages[:, :-1] + 0 * mask[:, 1:], (1, 0))\n    ratio ="),
    ("A_shifted_back", clipped_of_tokens, "    ratio =",
     "    advantages = F.pad(advantages[:, 1:] + 0 * mask[:, 1:], (0, 1))\n    ratio =")]
