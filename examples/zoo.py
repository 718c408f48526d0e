"""The zoo: more losses and advantages of TRL and verl, each as one function.

--loss_type names what replaces L_t in grpo.py. While pi = pi_old, each loss except Clip-Cov has the
gradient of -A log pi. They differ in what happens to a token once its ratio has moved (pictures:
docs/methods.md). rho_t, A and L are those of grpo.py; sg is stop-gradient.

A ratio misleads about rare and about likely tokens: a rare one may well become ten times as likely,
but one of 0.99 should not fall to 0.8. So DPPO (2602.04879) bounds how far the probability p of a
token moves. D_t is the distance between two Bernoulli distributions, with p_old and with p: their
total variation (dppo_tv) or their KL (dppo_kl):

  L_t   = -M_t rho_t A,        M_t = 0 if D_t > delta and (rho_t - 1) A > 0, else 1      (1)
  D_t   = |p - p_old|                                                                    (2)
  D_t   = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))                  (3)

A reward is for a whole output, so three losses look at whole outputs. One extreme ratio spoils an
arithmetic mean, so GMPO (gmpo, 2507.20673) takes the geometric mean of the ratios, as GSPO does,
but clips each ratio first. A clip is only a makeshift for the weight of a stale output, which is
the product W of its ratios, so VESPO (vespo, 2602.10693) weighs by W, on a curve that fades on both
sides: k, lambda = 2, 3 if A >= 0, else 3, 2. Bad outputs that the policy would hardly sample now
mislead it, so DeepSeek-V3.2 (off_policy_mask, 2512.02556) leaves them out:

  L_t   = -A exp(1/|o_i| sum_t x_t),   x_t = min(log rho_t, eps), max(.., -eps) if A < 0 (4)
  L_t   = -sg(W^k e^(lambda (1 - W))) A log pi                                           (5)
  L_t   = M_i times (3) of grpo.py,    M_i = 0 if A < 0 and -1/|o_i| sum_t log rho_t > C (6)

Entropy collapses because of tokens that are likely and good, or unlikely and bad: their c_t is high
(2505.22617). So two losses choose a few tokens. clip_cov chooses at random among those whose c_t is
in a range, and gives them no gradient. kl_cov chooses those with the highest c_t, and pulls them
back to ratio 1:

  c_t   = (A - mean(A)) (log pi - mean(log pi))                                          (7)
  L_t   = 0 if t is chosen, else (3) of grpo.py                                          (8)
  L_t   = -rho_t A + c_KL |log rho_t| if t is chosen, else -rho_t A                      (9)

Pairs of answers are scarce, but single ratings are not, so DRO (dro, 2405.19107) learns from those.
By tokens, as in verl, it is REINFORCE's loss with a penalty that keeps pi near pi_old:

  L_t   = -A log pi + beta/2 (log rho_t)^2                                               (10)

--advantage names what replaces A, (1) of grpo.py. If several rewards are added, one may drown the
others, so GDPO (gdpo, 2601.05242) scales each reward r_k by itself, with flags such as
--reward accuracy+format. If only the best answer of a group counts, only what raises it should get
credit, and so Pass@k (passk, 2503.19595) credits the best answer alone. The std of a few outputs is
noisy, so REINFORCE++ (2501.03262) takes mean and std of all tokens of the batch, either directly
(rpp) or after subtracting the group's mean (rpp_baseline):

  A_i   = whiten(sum_k (r_ki - mean(r_k)) / std(r_k))                                    (11)
  A_i   = max(r) - max(r without r_i)                                                    (12)
  A_i   = whiten(r_i), or whiten(r_i - mean(r))                                          (13)

Two more are r - b with a baseline b. The b of least variance weighs outputs by their squared
gradients. OPO (opo, 2505.23585) weighs them by length, as if the gradients of all tokens had the
same size and were uncorrelated. A critic is large, so ReMax (remax, 2310.10505) takes the reward of
the greedy output. Use these two with --loss_type dr_grpo: if the loss sums over tokens, ReMax
leaves the mean of the gradient unchanged. OPO does so only in the limit of large groups, because
its b contains r_i, with a weight that depends on the output. If the loss divides by |o_i|, both
change it (docs/methods.md).

  b     = sum_i |o_i| r_i / sum_i |o_i|                                                  (14)
  b     = r(greedy output)                                                               (15)

Most tokens continue what was begun, and only a few, of high entropy H_t, decide how an output goes
on. So --top_entropy_quantile learns from these alone (2506.01939); tau is a quantile of all H_t:

  A_t   = A if H_t >= tau, else 0                                                        (16)

Departures: the means in (7) are over a micro-batch, as in verl. They leave out the outputs whose A
is 0, because grpo.py does; such outputs have no penalty in (10). REINFORCE++ has no KL in
r. ReMax has several outputs per prompt. H_t is the entropy when the output was sampled, instead of
in each update. The flags that come from grpo.py name its equations. Other methods, such as LUSPO,
are flags of the scripts: docs/methods.md has their names.

Usage: python examples/zoo.py --loss_type dppo_tv        --help lists the constants of each loss
"""
import dataclasses
import functools
import inspect
import sys
from pathlib import Path
from typing import Literal

if not __package__:     # started as a file: the scripts are in the folder above
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # isort: split

import torch
from torch import nn

import grpo
import plumbing
import ppo

# Shapes: as in grpo.py.


# ---- 1. losses: log pi, log pi_old, A, mask (B, T) and their own flags -> L_t (B, T) ----------

def dppo_tv(logps, old_logps, A, mask, dppo_tv_delta=0.15):
    divergence = (logps.exp() - old_logps.exp()).abs()                          # (B, T)  eq. (2)
    return bounded(logps, old_logps, A, mask, divergence > dppo_tv_delta)


def dppo_kl(logps, old_logps, A, mask, dppo_kl_delta=0.05):
    others = (1 - logps.exp()).clamp(min=1e-8)
    old_others = (1 - old_logps.exp()).clamp(min=1e-8)
    divergence = old_logps.exp() * (old_logps - logps) + old_others * (old_others / others).log()
    return bounded(logps, old_logps, A, mask, divergence > dppo_kl_delta)       # eq. (3)


def bounded(logps, old_logps, A, mask, is_outside):
    """-rho_t A, but 0 for a token that is outside its bound and moves away. -> (B, T)"""
    log_rho = grpo.log_ratio(logps, old_logps, mask)
    is_zero = is_outside & ((log_rho.exp() - 1) * A > 0)
    ratio = torch.where(is_zero, 0.0, log_rho).exp()    # so the gradient is 0, and not inf * 0
    return torch.where(is_zero, 0.0, -ratio * A)                                # eq. (1)


def gmpo(logps, old_logps, A, mask, gmpo_epsilon=0.4):
    if gmpo_epsilon <= 0:
        raise ValueError("gmpo_epsilon: must be above 0, else no token learns")
    log_rho = grpo.log_ratio(logps, old_logps, mask)
    above = log_rho.clamp(max=gmpo_epsilon)
    below = log_rho.clamp(min=-gmpo_epsilon)
    log_s = mean_of_output(torch.where(A > 0, above, below), mask)              # (B, 1)
    return -A * log_s.exp()                                                     # eq. (4)


def vespo(logps, old_logps, A, mask, vespo_k_pos=2.0, vespo_k_neg=3.0, vespo_lambda_pos=3.0,
          vespo_lambda_neg=2.0):
    log_W = grpo.log_ratio(logps, old_logps, mask).detach().sum(dim=1, keepdim=True)    # (B, 1)
    k = torch.where(A >= 0, vespo_k_pos, vespo_k_neg)
    lam = torch.where(A >= 0, vespo_lambda_pos, vespo_lambda_neg)
    weight = (k * log_W + lam * (1 - log_W.exp())).exp()
    return -weight * A * logps                                                  # eq. (5)


def off_policy_mask(logps, old_logps, A, mask, epsilon=0.2, epsilon_high=0.28, delta=0.0,
                    off_policy_mask_threshold=0.5):
    log_rho = grpo.log_ratio(logps, old_logps, mask).detach()
    is_stale = -mean_of_output(log_rho, mask) > off_policy_mask_threshold       # (B, 1)
    is_zero = (A < 0) & is_stale
    clipped = grpo.policy_loss(logps, old_logps, A, mask, "grpo", epsilon, epsilon_high, delta)
    return torch.where(is_zero, 0.0, clipped)                                   # eq. (6)


def clip_cov(logps, old_logps, A, mask, epsilon=0.2, epsilon_high=0.28, delta=0.0,
             clip_cov_ratio=0.002, clip_cov_lb=1.0, clip_cov_ub=5.0):
    c = covariance(logps, A, mask)
    log_rho = grpo.log_ratio(logps, old_logps, mask)
    is_clipped = grpo.is_clipped(log_rho, A, epsilon, epsilon_high)
    in_range = (c > clip_cov_lb) & (c < clip_cov_ub) & (mask > 0) & ~is_clipped
    candidates = in_range.flatten().nonzero()[:, 0]
    generator = common.generator("clip_cov", c.sum().item())    # seeded by the covariances
    order = torch.randperm(len(candidates), generator=generator).to(candidates)
    chosen = candidates[order[:num_chosen(mask, clip_cov_ratio)]]
    is_zero = is_among(chosen, mask)
    clipped = grpo.policy_loss(logps, old_logps, A, mask, "grpo", epsilon, epsilon_high, delta)
    return torch.where(is_zero, 0.0, clipped)                                   # eq. (8)


def kl_cov(logps, old_logps, A, mask, kl_cov_ratio=0.002, kl_cov_coef=1.0):
    log_rho = grpo.log_ratio(logps, old_logps, mask)
    c = torch.where(mask > 0, covariance(logps, A, mask), -torch.inf)
    chosen = c.flatten().topk(num_chosen(mask, kl_cov_ratio)).indices
    penalty = torch.where(is_among(chosen, mask), kl_cov_coef * log_rho.abs(), 0.0)
    return -log_rho.exp() * A + penalty                                         # eq. (9)


def dro(logps, old_logps, A, mask, dro_beta=1.0):
    log_rho = grpo.log_ratio(logps, old_logps, mask)
    return -A * logps + dro_beta / 2 * log_rho.square()                         # eq. (10)


def mean_of_output(x, mask):
    """The mean over the tokens of each output. (B, T) each -> (B, 1)"""
    return (x * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def covariance(logps, A, mask):
    """What each token contributes to the covariance of A and log pi. (B, T) each -> (B, T)"""
    logps = torch.where(mask > 0, logps.detach(), 0.0)
    num_tokens = mask.sum().clamp(min=1)
    mean_A = (A * mask).sum() / num_tokens
    mean_logp = (logps * mask).sum() / num_tokens
    return (A - mean_A) * (logps - mean_logp)                                   # eq. (7)


def num_chosen(mask, ratio):
    """The number of tokens in the fraction `ratio` of all tokens, at least one. -> int"""
    return max(1, int(ratio * mask.sum()))


def is_among(chosen, mask):
    """Mark the tokens with the flat indices `chosen`. -> bool (B, T)"""
    is_chosen = torch.zeros_like(mask, dtype=torch.bool)
    is_chosen.view(-1)[chosen] = True
    return is_chosen


LOSS_TYPES = {                              # replaces (3) of grpo.py, and the average in its (5)
    name: (functools.partial(grpo.policy_loss, loss_type=name), average)
    for name, (_, average) in grpo.LOSS_TYPES.items()} | {
    "dppo_tv": (dppo_tv, "token_mean"),
    "dppo_kl": (dppo_kl, "token_mean"),
    "gmpo": (gmpo, "sequence_mean"),        # all L_t of an output are equal
    "vespo": (vespo, "token_mean"),
    "off_policy_mask": (off_policy_mask, "sequence_mean"),
    "clip_cov": (clip_cov, "token_mean"),
    "kl_cov": (kl_cov, "token_mean"),
    "dro": (dro, "token_mean")}
CLIPPED = {"grpo", "dr_grpo", "dapo", "off_policy_mask", "clip_cov"}    # those that contain (3)


def policy_loss(logps, old_logps, advantages, mask, loss_type="dppo_tv", **flags):
    """Compute L_t with the function of a row of LOSS_TYPES, 0 in masked slots. advantages: (B,),
    (B, 1) or (B, T); flags: those that this function takes. -> (B, T)"""
    A = advantages if advantages.dim() == 2 else advantages[:, None]            # (B, 1) or (B, T)
    grpo.check_shapes(logps, old_logps, mask, A.expand(-1, logps.shape[-1]))
    loss, _ = LOSS_TYPES[loss_type]
    token_loss = loss(logps, old_logps.detach(), A.expand_as(mask), mask, **flags)
    return torch.where(mask > 0, token_loss, 0.0)


def flags_of(loss_type):
    """List the flags that the function of a row takes, after its four tensors. -> list of str"""
    loss, _ = LOSS_TYPES[loss_type]
    return [name for name in [*inspect.signature(loss).parameters][4:] if name != "loss_type"]


def chosen_loss(cfg):
    """Look up --loss_type. -> function of log pi, log pi_old, A and mask; name of the average"""
    _, average = LOSS_TYPES[cfg.loss_type]
    flags = {name: getattr(cfg, name) for name in flags_of(cfg.loss_type)}
    return functools.partial(policy_loss, loss_type=cfg.loss_type, **flags), average


def objective(policy, batch, ref_logps, A, part, cfg, loss):
    """Compute the terms of (5) of grpo.py for the rows `part`. -> (b, T), log pi (b, T)"""
    T = int(batch.lengths[part].max())
    tokens = batch.tokens[part, :T]                                             # (b, T)
    mask = batch.mask[part, :T]
    old_logps = batch.logps[part, :T]
    logps, entropy = grpo.score(policy, batch.prompts[part], tokens, cfg.temperature)
    token_loss = loss(logps, old_logps, A[part, :T], mask)
    if cfg.beta > 0:
        log_rho = grpo.log_ratio(logps, old_logps, mask)
        token_kl = grpo.kl(logps * mask, ref_logps[part, :T] * mask, cfg.kl_estimator, log_rho)
        token_loss = token_loss + cfg.beta * token_kl
    token_loss = token_loss - cfg.entropy_coef * entropy
    return token_loss, logps.detach()


def backward(policy, batch, ref_logps, A, rows, cfg, loss, average):
    """Accumulate the gradient of (5) of grpo.py over `rows`, in micro-batches, with this loss for
    L_t and this average. -> metrics"""
    if cfg.mask_truncated_completions:
        rows = rows[~batch.is_truncated[rows]]
    num_sequences = len(rows)                           # in the whole optimizer step
    num_tokens = batch.mask[rows].sum().clamp(min=1)
    if cfg.beta == 0 and cfg.entropy_coef == 0:
        rows = rows[A[rows].any(dim=1)]                 # other rows have no gradient
    loss_sum = clipped_sum = max_log_ratio = 0.0
    for part in common.micro_batches(rows, batch.lengths, cfg.micro_batch_size):
        token_loss, logps = objective(                                          # (b, T) each
            policy, batch, ref_logps, A, part, cfg, loss)
        T = token_loss.shape[1]
        mask = batch.mask[part, :T]
        mean_loss = grpo.aggregate(
            token_loss, mask, average, num_sequences, num_tokens, cfg.max_completion_length)
        mean_loss.backward()

        log_rho = grpo.log_ratio(logps, batch.logps[part, :T], mask)
        clipped = grpo.is_clipped(log_rho, A[part, :T], cfg.epsilon, cfg.epsilon_high)
        loss_sum += mean_loss.item()
        clipped_sum += (clipped * mask).sum().item()
        max_log_ratio = max(max_log_ratio, log_rho.abs().max().item())
    metrics = {"loss": loss_sum, "max_log_ratio": max_log_ratio}
    if cfg.loss_type in CLIPPED:
        metrics["clip_ratio/region_mean"] = clipped_sum / num_tokens.item()
    return metrics


def update(policy, ref_logps, optimizer, batch, A, cfg, step, loss, average):
    """Pass over the batch num_iterations times, in num_mini_batches steps each. -> metrics"""
    history = []
    for rows in common.mini_batches(batch, cfg, "shuffle", step):
        optimizer.zero_grad(set_to_none=False)          # zeros: Adam also steps without signal
        metrics = backward(policy, batch, ref_logps, A, rows, cfg, loss, average)
        grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm or torch.inf)
        optimizer.step()
        history.append(metrics | {"grad_norm": grad_norm.item()})
    return common.mean_metrics(history) | {
        "sampling/sampling_logp_difference/max": history[0]["max_log_ratio"]}


# ---- 2. advantages: rewards (P, G) and other inputs -> (P, G) or (B, T) ----------------------

def gdpo(terms, eps=1e-4):
    """Combine several rewards, (P, G) each."""
    A = sum(grpo.advantages(rewards) for rewards in terms)
    return (A - A.mean()) / (A.std() + eps)                                     # (P, G)  eq. (11)


def passk(rewards):
    best = rewards.topk(2, dim=1)                                               # (P, 2) each
    gain = best.values[:, :1] - best.values[:, 1:]                              # 0 if two are best
    return torch.zeros_like(rewards).scatter(1, best.indices[:, :1], gain)      # (P, G)  eq. (12)


def rpp(rewards, mask, has_baseline=False):
    is_mixed = common.has_signal(rewards if has_baseline else rewards.reshape(1, -1))
    if has_baseline:
        rewards = rewards - rewards.mean(dim=1, keepdim=True)
    rewards = torch.where(is_mixed, rewards, 0.0)   # whitening turns an error of 1e-7 into 1e-3
    return ppo.whiten(rewards.reshape(-1, 1) * mask, mask)                      # (B, T)  eq. (13)


def opo(rewards, lengths):
    b = (lengths * rewards).sum(dim=1) / lengths.sum(dim=1)                     # (P,)    eq. (14)
    return torch.where(common.has_signal(rewards), rewards - b[:, None], 0.0)


def greedy_rewards(policy, task, batch, cfg, step):
    """Compute the reward of the greedy output for each problem. -> (P, 1)"""
    problems = batch.problems[::cfg.num_generations]
    greedy = grpo.complete(policy, task, cfg, problems)
    return task.judge(greedy, 1, step, grpo.reward).rewards


WITHIN_GROUPS = ("group", "passk", "opo")   # give 0 if all rewards of a group are equal


def advantages(policy, task, batch, cfg, step):
    """Compute A, which may be 0 for the tokens of low entropy. -> (B, 1) or (B, T)"""
    A = estimate(policy, task, batch, cfg, step)
    if cfg.top_entropy_quantile == 1:
        return A
    tau = batch.entropy[batch.mask > 0].quantile(1 - cfg.top_entropy_quantile)
    return A * (batch.entropy >= tau) * batch.mask                              # (B, T)  eq. (16)


def estimate(policy, task, batch, cfg, step):
    """Compute A with the estimator --advantage; group is (1) of grpo.py. -> (B, 1) or (B, T)"""
    rewards = batch.rewards.to(cfg.device)
    name = cfg.advantage
    if name in ("rpp", "rpp_baseline"):
        return rpp(rewards, batch.mask, has_baseline=name == "rpp_baseline")
    if name == "group":
        A = grpo.advantages(rewards, cfg.scale_rewards)
    elif name == "gdpo":
        A = gdpo([terms.to(cfg.device) for terms in task.rows(batch, step).values()])
    elif name == "passk":
        A = passk(rewards)
    elif name == "opo":
        A = opo(rewards, batch.mask.sum(dim=1).view_as(rewards))
    elif name == "remax":
        A = rewards - greedy_rewards(policy, task, batch, cfg, step).to(cfg.device)     # eq. (15)
    else:
        raise ValueError(f"advantage={name!r}: unknown")
    return A.view(-1, 1)


# ---- 3. training: as in grpo.py, with another loss or other advantages -----------------------

@dataclasses.dataclass(frozen=True)
class Config(grpo.Config):
    loss_type: Literal[tuple(LOSS_TYPES)] = common.flag(
        "dppo_tv", "row of LOSS_TYPES; Dr. GRPO also needs --scale_rewards none")
    advantage: Literal[
        "group", "gdpo", "passk", "rpp", "rpp_baseline", "opo", "remax"] = common.flag(
            "group", "estimator of A; group: (1) of grpo.py")
    top_entropy_quantile: float = common.flag(
        1.0, "share of the tokens that A is not 0 for in (16)")
    dppo_tv_delta: float = common.flag(0.15, "bound of D_t in (1), with (2) (delta)")
    dppo_kl_delta: float = common.flag(0.05, "bound of D_t in (1), with (3) (delta)")
    gmpo_epsilon: float = common.flag(0.4, "bound of log rho_t in (4) (eps)")
    vespo_k_pos: float = common.flag(2.0, "k in (5) if A >= 0")
    vespo_k_neg: float = common.flag(3.0, "k in (5) if A < 0")
    vespo_lambda_pos: float = common.flag(3.0, "lambda in (5) if A >= 0")
    vespo_lambda_neg: float = common.flag(2.0, "lambda in (5) if A < 0")
    off_policy_mask_threshold: float = common.flag(0.5, "bound in (6), in nats per token (C)")
    clip_cov_ratio: float = common.flag(0.002, "fraction of the tokens whose loss is 0 in (8)")
    clip_cov_lb: float = common.flag(1.0, "lower end of the range of c_t in (8)")
    clip_cov_ub: float = common.flag(5.0, "upper end of the range of c_t in (8)")
    kl_cov_ratio: float = common.flag(0.002, "fraction of the tokens with a penalty in (9)")
    kl_cov_coef: float = common.flag(1.0, "weight of the penalty in (9) (c_KL)")
    dro_beta: float = common.flag(1.0, "weight of the penalty in (10) (beta)")

    def rules(self):
        yield from super().rules()
        own = flags_of(self.loss_type)
        for loss_type in LOSS_TYPES:
            for name in flags_of(loss_type):
                works = name in own or getattr(self, name) == getattr(Config, name)
                yield works, f"--{name}: works with --loss_type {loss_type}, not {self.loss_type}"
        yield self.gmpo_epsilon > 0, "--gmpo_epsilon: must be above 0, else no token learns"
        has_tokens = 0 < self.top_entropy_quantile <= 1
        yield has_tokens, "--top_entropy_quantile: must be above 0, and at most 1"
        is_group = self.advantage == "group" or self.scale_rewards == "group"
        yield is_group, "--scale_rewards: only works with --advantage group"
        has_terms = self.advantage != "gdpo" or "+" in self.reward
        yield has_terms, "--advantage gdpo: needs several rewards: --reward accuracy+format"
        has_group = self.advantage != "remax" or "majority" not in self.reward
        yield has_group, "--advantage remax: its one greedy output is always the --reward majority"
        has_all = self.advantage in WITHIN_GROUPS or self.dynamic_sampling == 0
        yield has_all, f"--dynamic_sampling: drops groups that --advantage {self.advantage} may use"
        is_whole = self.advantage not in ("gdpo", "remax") or self.overlong_buffer == 0
        yield is_whole, f"--overlong_buffer: --advantage {self.advantage} ignores its penalty"


def main(argv=None):
    cfg = plumbing.parse_flags(Config, argv)
    loss, average = chosen_loss(cfg)
    task = common.load_task(cfg, grpo.verify)
    policy = grpo.GPT(cfg).to(cfg.device)
    with plumbing.Run(cfg, task, policy, grpo.COLUMNS, grpo.observers(cfg)) as run:
        reference = run.begin(grpo.sample_batch)
        optimizer = plumbing.AdamW(policy.parameters(), lr=cfg.learning_rate)

        run.start(grpo.evaluate, policy=policy, optimizer=optimizer)
        for step in range(run.step, cfg.max_steps):
            batch = grpo.sample_with_signal(policy, task, cfg, step)
            A = advantages(policy, task, batch, cfg, step)                  # (B, 1) or (B, T)
            ref_logps, mean_kl = grpo.score_reference(reference, batch, cfg)
            metrics = update(policy, ref_logps, optimizer, batch, A, cfg, step, loss, average)
            run.log(batch, A, metrics | {"kl": mean_kl})
        return run.finish()


if __name__ == "__main__":
    main()
