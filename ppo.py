"""PPO: proximal policy optimization (1707.06347), with TRPO (1502.05477) and VAPO (2504.05118).

A critic predicts the reward of an output o to a question q while it is written. By GAE (1506.02438)
each token then has an advantage of its own: how much better than predicted things went from there.
Several optimizer steps are taken on the same outputs; a trust region keeps pi near pi_old.

  A_t   = delta_t + gamma lam A_t+1,       delta_t = r_t + gamma V_t+1 - V_t         (1)
  rho_t = pi(o_t | q, o_<t) / pi_old(o_t | q, o_<t)                                  (2)
  L_t   = -min(rho_t A_t, clip(rho_t, 1 - eps_low, 1 + eps_high) A_t)                (3)
  KL_t  = pi_ref / pi - log(pi_ref / pi) - 1                                         (4)
  L     = 1/N sum_t (L_t - c_H H_t - mu m_t log pi(o_t | q, o_<t))                   (5)
  R_t   = A_t + V_t                                                                  (6)
  LV_t  = 1/2 max((V_t - R_t)^2, (V_old + clip(V_t - V_old, -c, c) - R_t)^2)         (7)
  r_t   = r(o_t) - beta log(pi_old / pi_ref)                                         (8)

The policy descends L, the critic the mean of LV_t, over the N tokens of an optimizer step. V_t is
predicted before o_t is read, V_old by the critic before the update, as in (1) and (6). After the
last token V and A are 0. In L the A_t are whitened: mean 0, variance 1. The reward r comes with
the last token, unless the task rewards each move. H_t is the entropy of pi; m_t is N / M at the M
tokens of correct outputs, else 0. pi_ref is the base. (4) from pi_old to pi is how far pi moved.

VAPO has a lam for each output of n tokens. PPO's other form has the penalty (10) for the clip. TRPO
steps along s; g is the gradient of mean rho_t A_t, F (Fisher's matrix) the second derivative of the
mean of KL(pi_old || pi), plus --damping on its diagonal:

  lam   = max(0, 1 - 1 / (alpha n))                                                  (9)
  L_t   = -rho_t A_t + c_KL (rho_t - 1 - log rho_t)                                  (10)
  theta - theta_old = sqrt(2 max_kl / (s^T F s)) s,       F s = g                    (11)

Departures from the papers: means, clips, KLs are per token; by default a verifier rewards; V is a
model of its own.
Usage: python ppo.py --task arithmetic     50 seconds on a CPU, once there is a base
"""
import copy
import dataclasses
import re
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import tiktoken
import torch
import torch.nn.functional as F
from torch import nn

import common
from common import flag

# Shapes: P prompts, G completions of each, B = P * G rows (row p * G + g is completion g of prompt
# p), b some of them; W prompt tokens, T completion tokens, L any number of tokens, V vocabulary,
# D width, H heads, KV key/value heads, hd head size; n weights of the policy.


# ---- 1. configuration ------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Config(common.Config):
    gamma: float = flag(1.0, "discount in (1)", low=0, high=1)
    lam: float = flag(0.95, "lambda in (1): 0 trusts the critic, 1 the rewards", low=0, high=1)
    critic_lam: float = flag(None, "lambda for (6), else that of (1) (VAPO: 1)", low=0, high=1)
    length_adaptive: bool = flag(False, "lambda in (1) by (9) (VAPO: true)")
    alpha: float = flag(1.0, "of (9) (VAPO, long texts: 0.05)", low=1e-9, needs="length_adaptive")
    trust_region: str = flag("clip", "(3), (10) or (11)", choices=("clip", "penalty", "trpo"))
    epsilon: float = flag(0.2, "lower clip range (eps_low)", low=0, needs="trust_region clip")
    epsilon_high: float = flag(0.2, "upper clip range (eps_high) (VAPO: 0.28)", low=0,
                               needs="trust_region clip")
    cliprange_value: float = flag(0.2, "clip range of the critic (c)", low=0)
    penalty_coef: float = flag(1.0, "c_KL at first", low=0, needs="trust_region penalty")
    target_kl: float = flag(0.0, "KL that c_KL adapts to; clip: stop at 1.5 times; 0: off", low=0,
                            needs="trust_region clip|penalty")
    max_kl: float = flag(0.01, "the trust region of (11)", low=1e-9, needs="trust_region trpo")
    damping: float = flag(0.1, "added to the diagonal of F", low=0, needs="trust_region trpo")
    num_iterations: int = flag(1, "passes over a batch (paper: 3 to 15); trpo: the critic's", low=1)
    critic_learning_rate: float = flag(2e-3, "of the critic's Adam", low=0)
    critic_pretrain_steps: int = flag(0, "batches for the critic alone, first (VAPO: 50)", low=0)
    beta: float = flag(0.0, "weight of the KL to the base, at first", low=0)
    kl_target: float = flag(0.0, "KL per token that beta adapts to; 0: off", low=0, needs="beta")
    nll_coef: float = flag(0.0, "weight of correct outputs' likelihood (mu) (VAPO: 0.1)", low=0)
    entropy_coef: float = flag(0.0, "weight of the entropy bonus (c_H)", low=0)
    entropy_decay_steps: int = flag(0, "steps in which c_H falls to 0; 0: it stays", low=0,
                                     needs="entropy_coef")
    judged_flags = common.Config.judged_flags | {"nll_coef"}
    does_nothing_with = {"lam": "length_adaptive"} | dict.fromkeys(
        ("learning_rate", "warmup_steps", "weight_decay"), "trust_region trpo")


# ---- 2. the algorithm ------------------------------------------------------------------------

def gae(rewards, values, mask, gamma, lam):
    """A_t and R_t; masked slots are no steps in time, and 0 in both. lam is a float or (B, 1).
    (B, T) each -> (B, T), (B, T)"""
    advantages = torch.zeros_like(values)
    next_A = next_V = torch.zeros_like(values[:, :1])                           # (B, 1)
    for t in reversed(range(values.shape[1])):
        V = values[:, t, None]                                                  # (B, 1)
        delta = rewards[:, t, None] + gamma * next_V - V
        A = delta + gamma * lam * next_A                                        # (B, 1)  eq. (1)
        is_step = mask[:, t, None] > 0
        next_A = torch.where(is_step, A, next_A)
        next_V = torch.where(is_step, V, next_V)
        advantages[:, t, None] = torch.where(is_step, A, 0.0)
    returns = torch.where(mask > 0, advantages + values, 0.0)                   # (B, T)  eq. (6)
    return advantages, returns


def whiten(x, mask):
    """x with mean 0 and variance 1 over the valid slots, 0 in the others. (B, T) each -> (B, T)"""
    n = mask.sum()
    x = (x - (x * mask).sum() / n.clamp(min=1)) * mask
    variance = x.square().sum() / (n - 1).clamp(min=1)
    return x / (variance + 1e-8).sqrt()


def length_adaptive_lambda(lengths, alpha):
    """lam of rows of these lengths. (B,) -> (B, 1)"""
    return (1 - 1 / (alpha * lengths[:, None])).clamp(min=0)                    # (B, 1)  eq. (9)


def log_ratio(logps, old_logps, mask):
    """log rho_t, 0 in masked slots. (B, T) each -> (B, T)"""
    return torch.where(mask > 0, logps - old_logps.detach(), 0.0)


def policy_loss(logps, old_logps, advantages, mask, epsilon=0.2, epsilon_high=0.2):
    """L_t with the clip, 0 in masked slots; advantages are (B,) or (B, T). -> (B, T)"""
    A = advantages if advantages.dim() == 2 else advantages[:, None]            # (B, 1) or (B, T)
    ratio = log_ratio(logps, old_logps, mask).exp()                             # (B, T)  eq. (2)
    clipped_ratio = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    token_loss = -torch.min(ratio * A, clipped_ratio * A)                       # (B, T)  eq. (3)
    return torch.where(mask > 0, token_loss, 0.0)


def penalty_loss(logps, old_logps, advantages, mask, beta):
    """L_t with a penalty of weight beta (c_KL), 0 in masked slots; the rest as above. -> (B, T)"""
    A = advantages if advantages.dim() == 2 else advantages[:, None]            # (B, 1) or (B, T)
    log_rho = log_ratio(logps, old_logps, mask)
    token_kl = torch.expm1(log_rho) - log_rho               # (4), from pi_old to pi
    token_loss = -log_rho.exp() * A + beta * token_kl                           # (B, T)  eq. (10)
    return torch.where(mask > 0, token_loss, 0.0)


def value_loss(values, old_values, returns, mask, cliprange_value):
    """LV_t, 0 in masked slots. (B, T) each -> (B, T)"""
    near = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    error = torch.max((values - returns).square(), (near - returns).square())
    return torch.where(mask > 0, error / 2, 0.0)                                # (B, T)  eq. (7)


def is_clipped(log_rho, A, epsilon, epsilon_high):
    """Where the range stops the gradient of (3): the ratio left it on A's side. -> bool (B, T)"""
    ratio = log_rho.exp()
    above = (A > 0) & (ratio > 1 + epsilon_high)
    below = (A < 0) & (ratio < 1 - epsilon)
    return above | below


def kl(logps, ref_logps, estimator="k3", log_rho=None):
    """Estimates KL(pi || pi_ref) at each token, from samples of pi; k3_ratio from those of pi_old,
    where log_rho is log(pi / pi_old). (B, T) each -> (B, T)"""
    x = logps - ref_logps
    if estimator == "k1":
        return x                            # unbiased; as a loss, its gradient is only noise
    if estimator == "k2":
        return x.square() / 2               # biased; as a loss, it has the gradient of the KL
    k3 = torch.expm1(-x) + x                # unbiased and never negative               eq. (4)
    if estimator == "k3_ratio":
        return log_rho.exp() * k3           # as a loss, it has the gradient of the KL
    assert estimator == "k3", estimator
    return k3                               # as a loss, it has that of KL(pi_ref || pi)


def aggregate(x, mask, how, num_sequences=None, num_tokens=None, max_length=None):
    """The average of token losses (B, T). num_sequences and num_tokens count the whole optimizer
    step (default: this call), so that the gradients of its micro-batches add up. -> scalar"""
    num_sequences = len(x) if num_sequences is None else num_sequences
    num_tokens = mask.sum().clamp(min=1) if num_tokens is None else num_tokens
    x = x * mask
    if how == "sequence_mean":              # GRPO, GSPO:     1/B sum_i 1/|o_i| sum_t x_t
        means = x.sum(dim=1) / mask.sum(dim=1).clamp(min=1)                     # (B,)
        return means.sum() / num_sequences
    if how == "token_mean":                 # PPO, DAPO:      1/sum_i |o_i| sum_i sum_t x_t
        return x.sum() / num_tokens
    if how == "sequence_sum":               # REINFORCE:      1/B sum_i sum_t x_t
        return x.sum() / num_sequences
    if how == "constant":                   # Dr. GRPO:       1/(B T) sum_i sum_t x_t
        return x.sum() / (num_sequences * (max_length or x.shape[1]))
    assert how == "micro_batch_mean", how   # BNPO: token_mean of a micro-batch, by its share of B
    return x.sum() / mask.sum().clamp(min=1) * len(x) / num_sequences


def conjugate_gradients(product, b, iterations=10):
    """x with M x = b for a positive definite matrix M, of which product(v) is M v. (n,) -> (n,)"""
    x = torch.zeros_like(b)
    residual = direction = b
    for _ in range(iterations):
        image = product(direction)
        size = residual @ residual
        step = size / (direction @ image).clamp(min=1e-30)
        x = x + step * direction
        residual = residual - step * image                  # b - M x
        direction = residual + residual @ residual / size.clamp(min=1e-30) * direction
    return x


def trpo_step(weights, objective, max_kl=0.01, damping=0.1):
    """Move `weights` by (11), or by a part of it that stays in the trust region and helps, if any.
    objective() -> means of rho A and of KL(pi_old || pi), both twice differentiable. -> metrics"""
    def flatten(tensors):
        return torch.cat([tensor.flatten() for tensor in tensors])              # (n,)

    start = flatten(weights).detach()
    surrogate, mean_kl = objective()
    gradient = flatten(torch.autograd.grad(surrogate, weights, retain_graph=True))
    kl_gradient = flatten(torch.autograd.grad(mean_kl, weights, create_graph=True))

    def fisher(v):                                          # F v: how kl_gradient changes along v
        change = torch.autograd.grad(kl_gradient @ v, weights, retain_graph=True)
        return flatten(change) + damping * v

    s = conjugate_gradients(fisher, gradient)
    step = (2 * max_kl / (s @ fisher(s)).clamp(min=1e-20)).sqrt() * s           # (n,)  eq. (11)
    for backtracks in range(11):                            # F is the KL to second order only: look
        end = start + 0.8 ** backtracks * step if backtracks < 10 else start
        for weight, part in zip(weights, end.split([weight.numel() for weight in weights])):
            weight.data.copy_(part.view_as(weight))
        with torch.no_grad():
            new_surrogate, mean_kl = objective()
        if mean_kl <= max_kl and new_surrogate > surrogate:
            break
    return {"loss": -surrogate.item(), "grad_norm": gradient.norm().item(),
            "policy_kl": mean_kl.item(), "trpo/backtracks": float(backtracks)}


# ---- 3. the update ---------------------------------------------------------------------------

class Critic(nn.Module):
    """A GPT, at first the base, from whose hidden states a linear head, at first 0, reads V_t."""

    def __init__(self, policy):
        super().__init__()
        self.gpt = copy.deepcopy(policy)
        self.head = nn.Parameter(torch.zeros_like(policy.embed.weight[0]))      # (D,)

    def forward(self, prompts, completions):
        return completion_states(self.gpt, prompts, completions) @ self.head    # (B, T)


@dataclasses.dataclass
class Advantages:
    advantages: torch.Tensor        # (B, T)  A_t, whitened
    returns: torch.Tensor           # (B, T)  R_t
    values: torch.Tensor            # (B, T)  V_old
    kl: float                       # mean of log(pi_old / pi_ref) over the tokens
    explained_variance: float       # of the returns of (6) with lam 1, in which there is no critic


@torch.no_grad()
def compute_advantages(critic, reference, batch, cfg, beta, critic_lam):
    """What each token of a batch was worth. -> Advantages"""
    mask = batch.mask
    ref_logps, _ = score(reference, batch.prompts, batch.tokens, cfg.temperature, cfg.kernel)
    token_kl = kl(batch.logps, ref_logps, "k1") * mask
    rewards = common.token_rewards(batch, decode) - beta * token_kl             # (B, T)  eq. (8)
    values = critic(batch.prompts, batch.tokens) * mask                         # (B, T)
    lam = cfg.lam
    if cfg.length_adaptive:
        lam = length_adaptive_lambda(mask.sum(dim=1), cfg.alpha)                # (B, 1)
    A, _ = gae(rewards, values, mask, cfg.gamma, lam)
    _, returns = gae(rewards, values, mask, cfg.gamma, lam if critic_lam is None else critic_lam)
    _, monte_carlo = gae(rewards, values, mask, cfg.gamma, 1.0)
    return Advantages(whiten(A, mask), returns, values, (token_kl.sum() / mask.sum()).item(),
                      common.explained_variance(values, monte_carlo, mask))


def fit_critic(critic, optimizer, batch, estimates, rows, cfg):
    """One optimizer step of the critic, over `rows`. -> metrics"""
    num_tokens = batch.mask[rows].sum()
    loss_sum = 0.0
    optimizer.zero_grad()
    for part in common.micro_batches(rows, batch.lengths, cfg.micro_batch_size):
        T = batch.lengths[part].max()
        mask = batch.mask[part, :T]                                             # (b, T)
        values = critic(batch.prompts[part], batch.tokens[part, :T])
        token_loss = value_loss(values, estimates.values[part, :T], estimates.returns[part, :T],
                                mask, cfg.cliprange_value)
        loss = aggregate(token_loss, mask, "token_mean", num_tokens=num_tokens)
        loss.backward()
        loss_sum += loss.item()
    grad_norm = nn.utils.clip_grad_norm_(critic.parameters(), cfg.max_grad_norm)
    optimizer.step()
    return {"value_loss": loss_sum, "critic_grad_norm": grad_norm.item()}


def likelihood_weight(batch, rows):
    """m_t, which is the same for all tokens of a row; N and M count those of `rows`. -> (B, 1)"""
    is_correct = batch.is_correct.view(-1, 1).to(batch.mask)                    # (B, 1)
    num_correct = (batch.mask * is_correct)[rows].sum().clamp(min=1)
    return is_correct * (batch.mask[rows].sum() / num_correct)


def backward(policy, batch, A, rows, cfg, entropy_coef, penalty_coef):
    """Accumulate the gradient of (5) over `rows`, in micro-batches. -> metrics"""
    num_tokens = batch.mask[rows].sum().clamp(min=1)
    m = likelihood_weight(batch, rows)                                          # (B, 1)
    loss_sum, kl_sum, clipped_sum, max_log_ratio = 0.0, 0.0, 0.0, 0.0
    for part in common.micro_batches(rows, batch.lengths, cfg.micro_batch_size):
        T = batch.lengths[part].max()
        tokens = batch.tokens[part, :T]                                         # (b, T)
        mask = batch.mask[part, :T]
        old_logps = batch.logps[part, :T]

        logps, entropy = score(policy, batch.prompts[part], tokens, cfg.temperature, cfg.kernel)
        if cfg.trust_region == "clip":
            token_loss = policy_loss(
                logps, old_logps, A[part, :T], mask, cfg.epsilon, cfg.epsilon_high)
        else:
            token_loss = penalty_loss(logps, old_logps, A[part, :T], mask, penalty_coef)
        token_loss = token_loss - entropy_coef * entropy - cfg.nll_coef * m[part] * logps
        loss = aggregate(token_loss, mask, "token_mean", num_tokens=num_tokens)         # eq. (5)
        loss.backward()

        log_rho = log_ratio(logps.detach(), old_logps, mask)
        clipped = is_clipped(log_rho, A[part, :T], cfg.epsilon, cfg.epsilon_high)
        loss_sum += loss.item()
        kl_sum += kl(old_logps * mask, logps.detach() * mask).sum().item()
        clipped_sum += (clipped * mask).sum().item()
        max_log_ratio = max(max_log_ratio, log_rho.abs().max().item())
    metrics = {"loss": loss_sum, "max_log_ratio": max_log_ratio,
               "policy_kl": kl_sum / num_tokens.item()}
    if cfg.trust_region == "clip":
        metrics["clip_ratio/region_mean"] = clipped_sum / num_tokens.item()
    return metrics


def trpo_update(policy, batch, A, cfg, entropy_coef):
    """Move the policy by (11), with all rows in memory at once. -> metrics"""
    mask = batch.mask
    m = likelihood_weight(batch, torch.arange(len(A)))                          # (B, 1)

    def read():                         # -> log pi (B, T, V), logps (B, T), entropy (B, T)
        hidden = completion_states(policy, batch.prompts, batch.tokens)
        logits = F.linear(hidden, policy.embed.weight) / cfg.temperature
        logps, entropy = logprobs(logits, batch.tokens, kernel="torch")
        return F.log_softmax(logits, dim=-1), logps, entropy

    def objective():
        log_p, logps, entropy = read()
        token_kl = (old_log_p.exp() * (old_log_p - log_p)).sum(dim=-1)          # (B, T)
        gain = log_ratio(logps, batch.logps, mask).exp() * A
        gain = gain + entropy_coef * entropy + cfg.nll_coef * m * logps
        return aggregate(gain, mask, "token_mean"), aggregate(token_kl, mask, "token_mean")

    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):        # differentiable twice
        with torch.no_grad():
            old_log_p, logps, _ = read()
        metrics = trpo_step(list(policy.parameters()), objective, cfg.max_kl, cfg.damping)
    log_rho = log_ratio(logps, batch.logps, mask)
    return metrics | {"max_log_ratio": log_rho.abs().max().item()}


def adapt_coefficient(coefficient, kl, target):
    """The weight of a KL after an update that ended at `kl`; without a target it stays. -> float"""
    if target == 0 or target / 1.5 <= kl <= 1.5 * target:
        return coefficient
    return 2 * coefficient if kl > target else coefficient / 2


def update(policy, critic, optimizer, critic_optimizer, batch, estimates, cfg, step, penalty_coef):
    """num_iterations passes over the batch of the critic, then of the policy (one step in TRPO)."""
    critic_history = []
    for rows in common.mini_batches(batch, cfg, "shuffle", step):
        critic_history.append(fit_critic(critic, critic_optimizer, batch, estimates, rows, cfg))
        common.check_finite(step, critic_history[-1])

    learning_rate = common.warm_up(cfg, step)
    optimizer.param_groups[0]["lr"] = learning_rate
    entropy_coef = common.decay_entropy(cfg, step)
    A = estimates.advantages
    history = []
    for rows in common.mini_batches(batch, cfg, "shuffle", step):
        if cfg.trust_region == "trpo":
            metrics = trpo_update(policy, batch, A, cfg, entropy_coef)      # of all rows
        else:
            optimizer.zero_grad(set_to_none=False)
            metrics = backward(policy, batch, A, rows, cfg, entropy_coef, penalty_coef)
            grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm)
            metrics["grad_norm"] = grad_norm.item()
        common.check_finite(step, metrics)
        history.append(metrics)
        is_far = cfg.trust_region == "clip" and 0 < 1.5 * cfg.target_kl < metrics["policy_kl"]
        if is_far or cfg.trust_region == "trpo":
            break                                           # the policy has gone as far as it may
        optimizer.step()

    metrics = common.mean_metrics(history) | common.mean_metrics(critic_history)
    metrics["explained_variance"] = estimates.explained_variance
    if cfg.trust_region != "trpo":                          # how far it has gone, by some rows
        prompts, tokens, mask = batch.prompts[::8], batch.tokens[::8], batch.mask[::8]
        with torch.no_grad():
            logps, _ = score(policy, prompts, tokens, cfg.temperature, cfg.kernel)
        token_kl = kl(batch.logps[::8], logps) * mask
        metrics["policy_kl"] = (token_kl.sum() / mask.sum()).item()
    return metrics | {"learning_rate": learning_rate,
                      "sampling/sampling_logp_difference/max": history[0]["max_log_ratio"]}


# ---- 4. training -----------------------------------------------------------------------------

COLUMNS = {"reward": "reward", "length": "completions/mean_length", "entropy": "entropy",
           "kl": "kl", "pol.kl": "policy_kl", "expl.var": "explained_variance", "grad": "grad_norm"}


def main(argv=None):
    cfg = common.parse_flags(Config, argv)
    task = common.load_task(cfg, verify)
    policy = GPT(cfg).to(cfg.device)
    run = common.Run(cfg, task, policy, COLUMNS, argv)
    run.load_base(warm_start)
    run.load_reward_model(sample_batch)                     # if --reward names it
    reference = copy.deepcopy(policy)
    critic = Critic(policy)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=cfg.learning_rate, weight_decay=cfg.weight_decay)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=cfg.critic_learning_rate)
    for i in run.console.progress("critic", range(0 if run.resumed else cfg.critic_pretrain_steps)):
        batch = sample_batch(policy, task, cfg, f"critic {i}")
        estimates = compute_advantages(critic, reference, batch, cfg, cfg.beta, critic_lam=1.0)
        for rows in common.mini_batches(batch, cfg, "critic", i):
            fit_critic(critic, critic_optimizer, batch, estimates, rows, cfg)

    for step in run.steps(evaluate, policy=policy, optimizer=optimizer,
                          critic=critic, critic_optimizer=critic_optimizer):
        beta = run.state.setdefault("beta", cfg.beta)
        c_KL = run.state.setdefault("penalty_coef", cfg.penalty_coef)
        batch = sample_batch(policy, task, cfg, step)       # q, o and r(o)
        estimates = compute_advantages(critic, reference, batch, cfg, beta, cfg.critic_lam)
        metrics = update(
            policy, critic, optimizer, critic_optimizer, batch, estimates, cfg, step, c_KL)
        metrics |= {"kl": estimates.kl, "beta": beta, "penalty_coef": c_KL}
        run.state["beta"] = adapt_coefficient(beta, estimates.kl, cfg.kl_target)
        if cfg.trust_region == "penalty":
            run.state["penalty_coef"] = adapt_coefficient(c_KL, metrics["policy_kl"], cfg.target_kl)
        run.log(batch, estimates.advantages, metrics, decode, values=estimates.values)
    return run.finish()


# ==== the machinery: from here on, the text is the same in all scripts ========================

# ---- 5. tokenizer and verifier ---------------------------------------------------------------

SPECIAL_TOKENS = ["<think>", "</think>", "<answer>", "</answer>", "<search>", "</search>",
                  "<information>", "</information>", "<|eos|>", "<|pad|>"]
TOKENIZER = tiktoken.Encoding(                                  # a token for each byte
    "bytes", pat_str=r"[\s\S]",
    mergeable_ranks={bytes([i]): i for i in range(256)},
    special_tokens={name: 256 + i for i, name in enumerate(SPECIAL_TOKENS)})
EOS = TOKENIZER.encode_single_token("<|eos|>")
PAD = TOKENIZER.encode_single_token("<|pad|>")
VOCAB_SIZE = 320                                                # padded to a multiple of 64


def encode_prompts(prompts, task, device):
    """Token ids, padded on the left; a prompt's text is bytes, never a special token. -> (B, W)"""
    rows = []
    for prompt in prompts:
        ids = TOKENIZER.encode_ordinary(prompt)
        rows.append([PAD] * (task.prompt_width - len(ids)) + ids)
    return torch.tensor(rows, device=device)


def decode(ids):
    """The text of token ids; what is no UTF-8, or no token, becomes U+FFFD. -> str"""
    known = [i if i < TOKENIZER.n_vocab else 0xff for i in ids]
    return TOKENIZER.decode_bytes(known).decode(errors="replace")


def verify(problem, text):
    """Arithmetic: whether the one <answer> block of a text holds the right number. -> 1.0 or 0.0"""
    number = re.fullmatch("-?[0-9]{1,20}", common.extract(text) or "")
    return float(number is not None and int(number[0]) == int(problem.answer))


# ---- 6. the policy ---------------------------------------------------------------------------

def rotate(x, cos, sin):
    """Rotary positions: pairs of features turn by an angle that grows with the position."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Attention(nn.Module):
    """Self-attention in which several query heads share a key/value head."""

    def __init__(self, cfg):
        super().__init__()
        self.head_size = cfg.hidden_size // cfg.num_attention_heads
        kv_size = cfg.num_key_value_heads * self.head_size
        self.query = nn.Linear(cfg.hidden_size, cfg.hidden_size, bias=False)
        self.key = nn.Linear(cfg.hidden_size, kv_size, bias=False)
        self.value = nn.Linear(cfg.hidden_size, kv_size, bias=False)
        self.out = nn.Linear(cfg.hidden_size, cfg.hidden_size, bias=False)

    def forward(self, x, cos, sin, attention_mask, cache):
        heads = (-1, self.head_size)
        q = self.query(x).unflatten(-1, heads).transpose(1, 2)                  # (B, H, L, hd)
        k = self.key(x).unflatten(-1, heads).transpose(1, 2)                    # (B, KV, L, hd)
        v = self.value(x).unflatten(-1, heads).transpose(1, 2)                  # (B, KV, L, hd)
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.append(self, k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))                           # (B, L, D)


class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.gate = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.up = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.down = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))                     # SwiGLU


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.attention_norm = nn.RMSNorm(cfg.hidden_size)
        self.attention = Attention(cfg)
        self.mlp_norm = nn.RMSNorm(cfg.hidden_size)
        self.mlp = MLP(cfg)

    def forward(self, x, cos, sin, attention_mask, cache):
        x = x + self.attention(self.attention_norm(x), cos, sin, attention_mask, cache)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Llama-style decoder: RMSNorm, rotary positions, SwiGLU, no biases, tied embeddings."""

    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, cfg.hidden_size)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.num_hidden_layers))
        self.norm = nn.RMSNorm(cfg.hidden_size)
        half = cfg.hidden_size // cfg.num_attention_heads // 2
        frequencies = 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("frequencies", frequencies, persistent=False)
        generator = common.generator(cfg.base_seed, "weights")
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                std = 0.02 if name == "embed.weight" else weight.shape[1] ** -0.5
                if name.endswith(("out.weight", "down.weight")):        # smaller, as in GPT-2
                    std = std / (2 * cfg.num_hidden_layers) ** 0.5
                nn.init.normal_(weight, std=std, generator=generator)

    def hidden(self, tokens, cache=None):
        """What logits are made from. (B, L) -> (B, L, D). Tokens go on where the cache ends."""
        L = tokens.shape[1]
        start = len(cache) if cache is not None else 0
        positions = torch.arange(start, start + L, device=tokens.device)
        angles = positions[:, None] * self.frequencies                          # (L, hd / 2)
        ones = torch.ones(L, start + L, dtype=torch.bool, device=tokens.device)
        attention_mask = ones.tril(start) if L > 1 else None                    # one token sees all
        x = self.embed(tokens)                                                  # (B, L, D)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin(), attention_mask, cache)
        return self.norm(x)

    def forward(self, tokens, cache=None):
        """tokens (B, L) -> logits (B, L, V)"""
        return F.linear(self.hidden(tokens, cache), self.embed.weight)


class Cache:
    """Keys and values of every attention layer, so that no token is read twice."""

    def __init__(self):
        self.layers = {}

    def __len__(self):
        for k, _ in self.layers.values():
            return k.shape[2]
        return 0

    def append(self, layer, k, v):
        """Add keys and values (B, KV, L, hd) behind those of earlier tokens. -> all of them"""
        if layer in self.layers:
            past_k, past_v = self.layers[layer]
            k = torch.cat([past_k, k], dim=2)
            v = torch.cat([past_v, v], dim=2)
        self.layers[layer] = (k, v)
        return k, v

    def take(self, rows):
        """Keep only `rows`, in this order; a row may be taken several times."""
        self.layers = {layer: (k[rows], v[rows]) for layer, (k, v) in self.layers.items()}


def logprobs(logits, tokens, temperature=1.0, kernel="auto"):
    """Log-probability of each token and entropy, in nats, of softmax(logits / temperature).
    (B, T, V), (B, T) -> (B, T), (B, T). ValueError for a kernel that cannot run here."""
    if common.kernels and common.kernels.applies(kernel, logits):
        return common.kernels.logprobs(logits, tokens, temperature)             # Triton, on CUDA
    log_p = F.log_softmax(logits / temperature, dim=-1)                         # (B, T, V)
    logps = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)                  # (B, T)
    p_log_p = log_p.exp() * log_p.clamp(min=-1e4)                               # 0 where p is 0
    return logps, -p_log_p.sum(dim=-1)


def read_prompts(model, prompts, cache):
    """Fill the cache with prompts (B, W); -> what the first tokens are predicted from (B, 1, D).
    Completions of a group share a prompt, which is read once: updates are 1.3 times faster."""
    distinct, prompt_index = prompts.unique(dim=0, return_inverse=True)
    hidden = model.hidden(distinct, cache)[:, -1:]
    cache.take(prompt_index)
    return hidden[prompt_index]


def completion_states(model, prompts, completions):
    """What each token of the completions is predicted from. (B, W), (B, T) -> (B, T, D)"""
    cache = Cache()
    first = read_prompts(model, prompts, cache)                                 # (B, 1, D)
    return torch.cat([first, model.hidden(completions[:, :-1], cache)], dim=1)


def score(model, prompts, completions, temperature=1.0, kernel="auto"):
    """Log-probabilities and entropies of completions. (B, W), (B, T) -> (B, T), (B, T)"""
    hidden = completion_states(model, prompts, completions)                     # (B, T, D)
    return logprobs(F.linear(hidden, model.embed.weight), completions, temperature, kernel)


# ---- 7. rollouts -----------------------------------------------------------------------------

def sample_token(logits, uniforms, temperature):
    """One token a row by inverse CDF, or the likeliest without uniforms. (b, V), (b,) -> (b,)"""
    if uniforms is None:
        return logits.argmax(dim=-1)
    cdf = F.softmax(logits / temperature, dim=-1).cumsum(dim=-1)                # (b, V)
    threshold = uniforms[:, None] * cdf[:, -1:]                                 # it ends near 1
    token = torch.searchsorted(cdf, threshold, right=True).squeeze(-1)
    return token.clamp(max=VOCAB_SIZE - 1)


@torch.no_grad()
def rollout(model, prompts, problems, task, cfg, uniforms=None):
    """Complete prompts (B, W). uniforms[i, t] (B, T) draws token t of row i, so that no row depends
    on another; without them, decoding is greedy. After a call token, what the task's environment
    responds takes the place of what would be sampled. -> Rollout"""
    B, T = len(prompts), cfg.max_completion_length
    if common.kernels and common.kernels.captures(prompts, task, cfg):          # as a CUDA graph
        return common.Rollout(
            *common.kernels.captured_rollout(model, prompts, cfg, uniforms, EOS, PAD))
    call_tokens = [TOKENIZER.encode_single_token(text) for text in task.call_tokens]
    forced_tokens = [deque() for _ in range(B)]                 # what is still to be inserted

    cache = Cache()
    hidden = read_prompts(model, prompts, cache)                                # (B, 1, D)
    out = common.Rollout(
        tokens=prompts.new_full((B, T), PAD),
        mask=hidden.new_zeros(B, T),
        logps=hidden.new_zeros(B, T),
        entropy=hidden.new_zeros(B, T),
        lengths=prompts.new_full((B,), T))
    rows = torch.arange(B, device=prompts.device)               # (b,) those that have not ended
    for t in range(T):
        # a token for each row, sampled or inserted
        logits = F.linear(hidden, model.embed.weight)                           # (b, 1, V)
        row_uniforms = None if uniforms is None else uniforms[rows, t]
        token = sample_token(logits[:, 0], row_uniforms, cfg.temperature)       # (b,)
        is_sampled = torch.ones_like(token, dtype=torch.bool)
        for i, row in enumerate(rows.tolist() if call_tokens else ()):
            if forced_tokens[row]:
                token[i] = forced_tokens[row].popleft()
                is_sampled[i] = False
        logps, entropy = logprobs(logits, token[:, None], cfg.temperature, cfg.kernel)  # (b, 1)
        out.tokens[rows, t] = token
        out.mask[rows, t] = (is_sampled | (not cfg.mask_tool_tokens)).to(out.mask)
        out.logps[rows, t] = logps[:, 0].to(out.logps)
        out.entropy[rows, t] = entropy[:, 0].to(out.logps)

        # the environment responds to calls
        for i, row in enumerate(rows.tolist() if call_tokens else ()):
            if is_sampled[i] and token[i] in call_tokens:
                response = task.respond(problems[row], decode(out.tokens[row, :t + 1].tolist()))
                forced_tokens[row].extend(TOKENIZER.encode(response, allowed_special="all"))

        # go on with the rows that have not ended
        is_end = is_sampled & (token == EOS)
        out.lengths[rows[is_end]] = t + 1
        if is_end.any():
            rows = rows[~is_end]
            token = token[~is_end]
            cache.take(~is_end)
        if len(rows) == 0 or t == T - 1:
            return out
        hidden = model.hidden(token[:, None], cache)                            # (b, 1, D)


def completion_texts(completions):
    """The text of each completion of a Rollout, without EOS. -> list of B str"""
    texts = []
    for ids, length in zip(completions.tokens.tolist(), completions.lengths.tolist()):
        texts.append(decode([i for i in ids[:length] if i != EOS]))
    return texts


def sample_batch(policy, task, cfg, step, split="train"):
    """P problems and G completions of each, rewarded; with dynamic sampling, of more problems those
    whose groups have signal. A function of policy, task, seed and step. -> Batch"""
    batch = sample_groups(policy, task, cfg, step, 0, split)
    for attempt in range(1, 1 + cfg.dynamic_sampling):
        if common.has_signal(batch.rewards).sum() >= cfg.num_prompts:
            break
        more_groups = sample_groups(policy, task, cfg, step, attempt, split)
        batch = common.join_batches(batch, more_groups)
    return common.keep_groups(batch, cfg.num_prompts)


def sample_groups(policy, task, cfg, step, attempt, split):
    """P problems and G completions of each, whatever their rewards. -> Batch"""
    P, G, T = cfg.num_prompts, cfg.num_generations, cfg.max_completion_length
    problems = common.sample_problems(task, P, (cfg.seed, step, attempt), split)
    problems = [problem for problem in problems for _ in range(G)]              # B
    prompts = encode_prompts([problem.prompt for problem in problems], task, cfg.device)
    generator = common.generator(cfg.seed, "rollout", step, attempt)
    uniforms = torch.rand(P * G, T, generator=generator).to(cfg.device)
    out = rollout(policy, prompts, problems, task, cfg, uniforms)
    is_truncated = (out.tokens != EOS).all(dim=1)                               # (B,)
    return common.make_batch(
        out, task, problems, prompts, completion_texts(out), is_truncated, G, step)


# ---- 8. warm start and evaluation ------------------------------------------------------------

def demonstration_batch(task, cfg, step, phase):
    """Worked examples for supervised learning, as encode_examples has them."""
    seed = (cfg.base_seed, step)
    examples = common.sample_demonstrations(task, cfg.base_batch_size, seed, phase)
    return encode_examples(examples, task, cfg)


def encode_examples(examples, task, cfg):
    """Pairs (problem, completion) as tensors. The mask is 0 behind the end of a completion and on
    what the environment inserts. -> prompts (b, W), tokens (b, T), mask (b, T), lengths (b,)"""
    prompts = encode_prompts([problem.prompt for problem, _ in examples], task, cfg.device)
    ids = [TOKENIZER.encode(text, allowed_special="all") + [EOS] for _, text in examples]
    lengths = torch.tensor([len(row) for row in ids], device=cfg.device)
    T = int(lengths.max())
    tokens = torch.tensor([row + [PAD] * (T - len(row)) for row in ids], device=cfg.device)
    masks = [sampled_mask(task, problem, row) for (problem, _), row in zip(examples, ids)]
    mask = torch.tensor([row + [0.0] * (T - len(row)) for row in masks], device=cfg.device)
    return prompts, tokens, mask, lengths


def sampled_mask(task, problem, ids):
    """1.0 for the tokens of a completion that a policy writes, 0.0 for what the environment inserts
    behind a call. -> list"""
    call_tokens = [TOKENIZER.encode_single_token(text) for text in task.call_tokens]
    mask = []
    while len(mask) < len(ids):
        mask.append(1.0)
        if ids[len(mask) - 1] in call_tokens:
            response = task.respond(problem, decode(ids[:len(mask)]))
            mask += [0.0] * len(TOKENIZER.encode(response, allowed_special="all"))
    return mask[:len(ids)]


def warm_start(model, task, cfg, progress):
    """Make the base policy by supervised learning: from a textbook, which shows its work, then from
    a forum, where most people only answer. In a cold start, all examples show their work. Muon
    takes half as many batches as AdamW alone."""
    num_steps = cfg.cold_start or cfg.base_steps
    matrices = [weight for weight in model.blocks.parameters() if weight.dim() == 2]
    others = [weight for weight in model.parameters() if not any(weight is m for m in matrices)]
    muon = common.Muon(matrices)
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)
    # Halves of a batch at the same time are 1.5 times faster on two cores. On MPS they would crash.
    num_threads = 2 if cfg.device == "cpu" else 1
    with ThreadPoolExecutor(num_threads) as pool:
        for step in progress("warm start", range(num_steps)):
            rate = cfg.base_learning_rate * min((step + 1) / 50, 1 - step / num_steps)
            adamw.param_groups[0]["lr"] = rate
            phase = "textbook" if step < cfg.textbook_share * num_steps else "forum"
            if cfg.cold_start:
                phase = "cold_start"
            batch = demonstration_batch(task, cfg, step, phase)
            lengths = batch[-1]
            size = (len(lengths) + num_threads - 1) // num_threads
            parts = common.micro_batches(torch.arange(len(lengths)), lengths, size)
            futures = [pool.submit(gradient, model, batch, rows) for rows in parts]
            gradients = [future.result() for future in futures]         # of each part
            for weight, *terms in zip(model.parameters(), *gradients):
                weight.grad = sum(terms)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            muon.step(5 * rate)                         # orthogonal steps are small for a matrix
            adamw.step()


def gradient(model, batch, rows):
    """What some rows of a batch add to the gradient of the mean of -log pi(o_t) over its tokens.
    -> a tensor for each weight"""
    prompts, tokens, mask, lengths = batch
    T = int(lengths[rows].max())
    tokens = tokens[rows, :T]                                                   # (b, T)
    sequences = torch.cat([prompts[rows], tokens], dim=1)                       # (b, W + T)
    hidden = model.hidden(sequences[:, :-1])[:, -T:]                            # (b, T, D)
    logits = F.linear(hidden, model.embed.weight)                               # (b, T, V)
    token_loss = F.cross_entropy(logits.mT, tokens, reduction="none")   # (b, T), from (b, V, T)
    loss = (token_loss * mask[rows, :T]).sum() / lengths.sum()
    return torch.autograd.grad(loss, list(model.parameters()))


def evaluate(policy, task, cfg, num_samples=0, progress=common.silent):
    """Complete different held-out problems, with the same random numbers in every run. -> scores"""
    problems = common.held_out_problems(task, cfg.num_eval_problems)
    problems = [problem for problem in problems for _ in range(max(1, num_samples))]
    generator = common.generator("evaluation")
    T = cfg.max_completion_length
    texts, lengths = [], []
    for start in progress("evaluation", range(0, len(problems), 256)):
        part = problems[start:start + 256]
        prompts = encode_prompts([problem.prompt for problem in part], task, cfg.device)
        uniforms = None
        if num_samples > 0:
            uniforms = torch.rand(len(part), T, generator=generator).to(cfg.device)
        out = rollout(policy, prompts, part, task, cfg, uniforms)
        texts += completion_texts(out)
        lengths += out.mask.sum(dim=1).tolist()
    return common.scores(task, problems, texts, lengths, num_samples)


if __name__ == "__main__":
    common.start(main)
