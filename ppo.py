"""PPO: proximal policy optimization (1707.06347), with the parts of VAPO (2504.05118).

One reward for a whole output says little about its tokens. So a critic predicts the reward of an
output o to a question q while it is written, and GAE (1506.02438) gives each token its own
advantage: how much better than predicted things went from there. Sampling is expensive, so several
optimizer steps use a batch, and the clip removes the gradient of tokens that moved far enough.

  A_t   = delta_t + gamma lam A_t+1,       delta_t = r_t + gamma V_t+1 - V_t         (1)
  rho_t = pi(o_t | q, o_<t) / pi_old(o_t | q, o_<t)                                  (2)
  L_t   = -min(rho_t A_t, clip(rho_t, 1 - eps_low, 1 + eps_high) A_t)                (3)
  KL_t  = pi_ref / pi - log(pi_ref / pi) - 1                                         (4)
  L     = 1/N sum_t (L_t - c_H H_t)                                                  (5)
  R_t   = A_t + V_t                                                                  (6)
  LV_t  = 1/2 max((V_t - R_t)^2, (V_old + clip(V_t - V_old, -c, c) - R_t)^2)         (7)
  r_t   = r(o_t) - beta log(pi_old / pi_ref)                                         (8)

The policy descends L, and the critic descends the mean of LV_t, over the N tokens of an optimizer
step. V_t is the critic's prediction before it reads o_t. V_old is its prediction before the update,
which is also the V of (1) and (6). After the last token, V and A are 0. The A_t in L are whitened:
their mean is 0 and their variance 1. The reward r comes with the last token, unless the task
rewards each move. H_t is the entropy of pi at token t, and pi_ref is the base. (4) from pi_old to
pi measures how far pi moved: beyond 1.5 times --target_kl, the update ends. beta adapts to
--kl_target. PPO's penalty and VAPO's parts are explained at their branches in the code.

Departures from the papers: 1707.06347 has no whitening, and no clip in (7); means, clips and KLs
are per token; a verifier gives the rewards; V is a separate model. For TRPO, see examples/trpo.py.

Usage: python ppo.py --task arithmetic     1 to 3 minutes on a CPU, once there is a base
"""
import copy
import dataclasses
import re
from typing import Literal

import common  # a copied script needs common.py and plumbing.py next to it
import plumbing
from common import EOS, PAD, VOCAB_SIZE, decode, encode_prompts, flag  # isort: split

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

# Shapes: P prompts, G completions of each, B = P * G rows (row p * G + g is completion g of prompt
# p), b part of the rows; W prompt tokens, T completion tokens, L any number of tokens, V size of
# the vocabulary, D width, H heads, KV key/value heads, hd head size.


# ---- 1. configuration ------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Config(common.Config):                # G, P, T and more are in common.Config
    gamma: float = flag(1.0, "discount in (1)")
    lam: float = flag(0.95, "lambda in (1): 0 trusts the critic, 1 the rewards")
    critic_lam: float = flag(0.95, "lambda in (6) (VAPO: 1)")
    epsilon: float = flag(0.2, "lower clip range (eps_low)")
    epsilon_high: float = flag(0.2, "upper clip range (eps_high) (VAPO: 0.28)")
    cliprange_value: float = flag(0.2, "clip range of the critic (c)")
    num_iterations: int = flag(1, "passes over each batch (paper: 3 to 15)")
    critic_learning_rate: float = flag(2e-3, "learning rate of the critic's Adam")
    entropy_coef: float = flag(0.0, "weight of the entropy bonus (c_H)")
    beta: float = flag(0.0, "initial weight of the KL to the base")
    kl_target: float = flag(0.0, "KL per token that beta adapts to; 0: off")
    target_kl: float = flag(0.0, "KL that ends an update, or that c_KL adapts to; 0: off")
    trust_region: Literal["clip", "penalty"] = flag("clip", "clip (3) or penalty (9)")
    penalty_coef: float = flag(1.0, "initial weight of the penalty in (9) (c_KL)")
    critic_pretrain_steps: int = flag(0, "first batches, for the critic alone (VAPO: 50)")
    nll_coef: float = flag(0.0, "weight of (10) (mu) (VAPO: 0.1)")
    length_adaptive: bool = flag(False, "take lambda in (1) from (11), as VAPO does")
    alpha: float = flag(1.0, "alpha in (11) (VAPO, for long texts: 0.05)")

    def rules(self):
        yield from super().rules()
        for name in ("gamma", "lam", "critic_lam"):
            yield getattr(self, name) <= 1, f"--{name} {getattr(self, name)}: must be at most 1"
        yield self.alpha == 1 or self.length_adaptive, "--alpha: needs --length_adaptive"
        has_lam = self.lam == Config.lam or not self.length_adaptive
        yield has_lam, "--lam: has no effect with --length_adaptive"
        yield self.kl_target == 0 or self.beta > 0, "--kl_target: needs --beta"
        is_penalty = self.trust_region == "penalty"
        yield self.penalty_coef == 1 or is_penalty, "--penalty_coef: needs --trust_region penalty"
        for name in ("epsilon", "epsilon_high"):
            is_used = not is_penalty or getattr(self, name) == getattr(Config, name)
            yield is_used, f"--{name}: has no effect with --trust_region penalty"
        has_steps = is_penalty or self.num_iterations > 1 or self.num_mini_batches > 1
        yield self.target_kl == 0 or has_steps, (
            "--target_kl: can only end an update of several steps; raise --num_iterations")
        for name in ("penalty_coef", "cliprange_value"):    # 0 would stay 0; hold the critic still
            yield getattr(self, name) > 0, f"--{name} 0: must be above 0"


# ---- 2. the algorithm ------------------------------------------------------------------------

def gae(rewards, values, mask, gamma, lam):
    """Compute A_t and R_t. Masked slots are not time steps, and get 0. lam is a float or (B, 1).
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
    """Give x mean 0 and variance 1 over the valid slots, and 0 elsewhere. (B, T) each -> (B, T)"""
    n = mask.sum()
    x = (x - (x * mask).sum() / n.clamp(min=1)) * mask
    variance = x.square().sum() / (n - 1).clamp(min=1)
    return x / (variance + 1e-8).sqrt()


def log_ratio(logps, old_logps, mask):
    """Compute log rho_t, 0 in masked slots; old_logps get no gradient. (B, T) each -> (B, T)"""
    return torch.where(mask > 0, logps - old_logps.detach(), 0.0)               # (B, T)  for (2)


def policy_loss(logps, old_logps, advantages, mask, epsilon=0.2, epsilon_high=0.2):
    """Compute L_t with the clip, 0 if masked. advantages: (B,), (B, 1) or (B, T). -> (B, T)"""
    A = advantages if advantages.dim() == 2 else advantages[:, None]            # (B, 1) or (B, T)
    check_shapes(logps, old_logps, mask, A.expand(-1, logps.shape[-1]))
    log_rho = log_ratio(logps, old_logps, mask)
    ratio = log_rho.clamp(max=80).exp()     # exp(89) is inf, and its gradient nan  (B, T)  eq. (2)
    clipped_ratio = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    token_loss = -torch.min(ratio * A, clipped_ratio * A)                       # (B, T)  eq. (3)
    return torch.where(mask > 0, token_loss, 0.0)


def is_clipped(log_rho, A, epsilon, epsilon_high):
    """Find where (3) has no gradient: the ratio passed the bound that A pushes it to. -> (B, T)"""
    ratio = log_rho.exp()
    is_too_high = (A > 0) & (ratio > 1 + epsilon_high)
    is_too_low = (A < 0) & (ratio < 1 - epsilon)
    return is_too_high | is_too_low


def value_loss(values, old_values, returns, mask, cliprange_value):
    """Compute LV_t, 0 in masked slots. (B, T) each -> (B, T)"""
    check_shapes(values, old_values, returns, mask)
    near = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    error = torch.max((values - returns).square(), (near - returns).square())
    return torch.where(mask > 0, error / 2, 0.0)                                # (B, T)  eq. (7)


def explained_variance(values, returns, mask):
    """Compute 1 - Var(R - V) / Var(R) over valid slots: 1 if V predicts all returns. -> float"""
    variance = returns[mask > 0].var()
    error = (returns - values)[mask > 0].var()
    return (1 - error / variance).item() if variance > 1e-8 else 0.0


def kl(logps, ref_logps, estimator="k3"):
    """Estimate KL(pi || pi_ref) at each token, with the tokens before it held fixed. The samples
    are from pi. (B, T) each -> (B, T)"""
    x = logps - ref_logps
    if estimator == "k1":
        return x            # unbiased; as a loss, its gradient on samples of pi is only noise
    if estimator == "k3":
        return torch.expm1(-x) + x          # unbiased and never negative               eq. (4)
    raise ValueError(f"estimator={estimator!r}: must be k1 or k3")


def aggregate(x, mask, how, num_sequences=None, num_tokens=None, max_length=None):
    """Average token losses (B, T). num_sequences and num_tokens count the whole optimizer step (by
    default, this call), so that the gradients of its micro-batches add up. -> scalar"""
    check_shapes(x, mask)
    num_sequences = len(x) if num_sequences is None else num_sequences
    num_tokens = mask.sum().clamp(min=1) if num_tokens is None else num_tokens
    x = x * mask
    if how == "sequence_mean":              # GRPO, GSPO:     1/B sum_i 1/|o_i| sum_t x_t
        means = x.sum(dim=1) / mask.sum(dim=1).clamp(min=1)                     # (B,)
        return means.sum() / num_sequences                                      # for (5)
    if how == "token_mean":                 # PPO, DAPO:      1/sum_i |o_i| sum_i sum_t x_t
        return x.sum() / num_tokens                                             # for (5)
    if how == "sequence_sum":               # REINFORCE:      1/B sum_i sum_t x_t
        return x.sum() / num_sequences                                          # for (5)
    if how == "constant":                   # Dr. GRPO:       1/(B T) sum_i sum_t x_t
        return x.sum() / (num_sequences * (max_length or x.shape[1]))           # for (5)
    raise ValueError(f"how={how!r}: must be sequence_mean, token_mean, sequence_sum or constant")


def penalty_loss(logps, old_logps, advantages, mask, beta):
    """Compute L_t with a penalty of weight beta (c_KL); the rest as in policy_loss. -> (B, T)"""
    # PPO's other form has a penalty instead of the clip; its weight c_KL adapts to --target_kl:
    # L_t = -rho_t A_t + c_KL (rho_t - 1 - log rho_t)                                   (9)
    A = advantages if advantages.dim() == 2 else advantages[:, None]            # (B, 1) or (B, T)
    check_shapes(logps, old_logps, mask, A.expand(-1, logps.shape[-1]))
    log_rho = log_ratio(logps, old_logps, mask)
    token_kl = torch.expm1(log_rho) - log_rho               # (4), from pi_old to pi
    token_loss = -log_rho.exp() * A + beta * token_kl                           # (B, T)  eq. (9)
    return torch.where(mask > 0, token_loss, 0.0)


def adapt_coefficient(coefficient, kl, target):
    """Adapt the weight of a KL to its value `kl` after an update, if there is a target. -> float"""
    if target == 0 or target / 1.5 <= kl <= 1.5 * target:
        return coefficient
    return 2 * coefficient if kl > target else coefficient / 2


def length_adaptive_lambda(lengths, alpha):
    """Compute lam of rows of these lengths. (B,) -> (B, 1)"""
    # With a fixed lam, the reward hardly reaches the first of many tokens; n counts them (VAPO):
    # lam = max(0, 1 - 1 / (alpha n))                                                   (11)
    return (1 - 1 / (alpha * lengths[:, None])).clamp(min=0)                    # (B, 1)  eq. (11)


def check_shapes(*tensors):
    """Raise a ValueError unless all shapes are equal: torch would repeat smaller tensors."""
    shapes = [tuple(x.shape) for x in tensors if isinstance(x, torch.Tensor)]       # 0 fits all
    if len(set(shapes)) > 1:
        raise ValueError(f"the shapes {shapes} must be equal; advantages may have one column")


# ---- 3. the update ---------------------------------------------------------------------------

class Critic(nn.Module):
    """A GPT, initially the base, and a linear head, initially 0, that reads V_t from its states."""

    def __init__(self, policy):
        super().__init__()
        self.gpt = copy.deepcopy(policy)
        self.head = nn.Parameter(torch.zeros_like(policy.embed.weight[0]))      # (D,)

    def forward(self, prompts, completions):
        return completion_states(self.gpt, prompts, completions) @ self.head    # (B, T)


@torch.no_grad()
def compute_advantages(critic, reference, task, batch, cfg, beta):
    """Compute whitened A_t, R_t and V_old. -> (B, T), (B, T), (B, T), metrics"""
    mask = batch.mask
    ref_logps, _ = score(reference, batch.prompts, batch.tokens, cfg.temperature)
    token_kl = kl(batch.logps, ref_logps, "k1") * mask
    rewards = task.token_rewards(batch) - beta * token_kl                       # (B, T)  eq. (8)
    values = critic(batch.prompts, batch.tokens) * mask                         # (B, T)
    lam = cfg.lam
    if cfg.length_adaptive:
        lam = length_adaptive_lambda(mask.sum(dim=1), cfg.alpha)                # (B, 1)
    A, _ = gae(rewards, values, mask, cfg.gamma, lam)
    _, returns = gae(rewards, values, mask, cfg.gamma, cfg.critic_lam)
    _, true_returns = gae(rewards, values, mask, cfg.gamma, 1.0)                # they contain no V
    return whiten(A, mask), returns, values, {
        "kl": (token_kl.sum() / mask.sum()).item(),
        "explained_variance": explained_variance(values, true_returns, mask)}


def fit_critic(critic, optimizer, batch, returns, cfg, *purpose):
    """Pass over the batch num_iterations times, in num_mini_batches steps each. -> metrics"""
    history = []
    for rows in common.mini_batches(batch, cfg, *purpose):
        num_tokens = batch.mask[rows].sum().clamp(min=1)
        loss_sum = 0.0
        optimizer.zero_grad()
        for part in common.micro_batches(rows, batch.lengths, cfg.micro_batch_size):
            T = int(batch.lengths[part].max())
            mask = batch.mask[part, :T]                                         # (b, T)
            values = critic(batch.prompts[part], batch.tokens[part, :T])
            token_loss = value_loss(
                values, batch.values[part, :T], returns[part, :T], mask, cfg.cliprange_value)
            loss = aggregate(token_loss, mask, "token_mean", num_tokens=num_tokens)
            loss.backward()
            loss_sum += loss.item()
        grad_norm = nn.utils.clip_grad_norm_(critic.parameters(), cfg.max_grad_norm or torch.inf)
        optimizer.step()
        history.append({"value_loss": loss_sum, "critic_grad_norm": grad_norm.item()})
    return common.mean_metrics(history)


def objective(policy, batch, A, part, cfg, penalty_coef):
    """Compute L_t - c_H H_t of (5) for the rows `part`. -> (b, T), log pi (b, T)"""
    T = int(batch.lengths[part].max())
    tokens = batch.tokens[part, :T]                                             # (b, T)
    mask = batch.mask[part, :T]
    old_logps = batch.logps[part, :T]
    logps, entropy = score(policy, batch.prompts[part], tokens, cfg.temperature)
    if cfg.trust_region == "clip":
        token_loss = policy_loss(
            logps, old_logps, A[part, :T], mask, cfg.epsilon, cfg.epsilon_high)
    else:
        token_loss = penalty_loss(logps, old_logps, A[part, :T], mask, penalty_coef)
    token_loss = token_loss - cfg.entropy_coef * entropy
    return token_loss, logps


def backward(policy, batch, A, rows, cfg, penalty_coef):
    """Accumulate the gradient of (5) over `rows`, in micro-batches. -> metrics"""
    correct_mask = batch.mask * batch.is_correct.view(-1, 1).to(batch.mask)     # (B, T)
    num_correct = correct_mask[rows].sum().clamp(min=1)
    num_tokens = batch.mask[rows].sum().clamp(min=1)
    loss_sum = kl_sum = clipped_sum = max_log_ratio = 0.0
    for part in common.micro_batches(rows, batch.lengths, cfg.micro_batch_size):
        token_loss, logps = objective(policy, batch, A, part, cfg, penalty_coef)    # (b, T) each
        T = token_loss.shape[1]
        mask = batch.mask[part, :T]
        old_logps = batch.logps[part, :T]
        loss = aggregate(token_loss, mask, "token_mean", num_tokens=num_tokens)         # eq. (5)
        if cfg.nll_coef > 0:
            # VAPO learns more from correct outputs, which have M tokens; L' is added to L:
            # L' = -mu/M sum_t log pi(o_t | q, o_<t)                                    (10)
            log_likelihood = aggregate(                                                 # eq. (10)
                logps, correct_mask[part, :T], "token_mean", num_tokens=num_correct)
            loss = loss - cfg.nll_coef * log_likelihood
        loss.backward()

        log_rho = log_ratio(logps.detach(), old_logps, mask)
        clipped = is_clipped(log_rho, A[part, :T], cfg.epsilon, cfg.epsilon_high)
        loss_sum += loss.item()
        kl_sum += kl(old_logps * mask, logps.detach() * mask).sum().item()
        clipped_sum += (clipped * mask).sum().item()
        max_log_ratio = max(max_log_ratio, log_rho.abs().max().item())
    metrics = {"loss": loss_sum, "max_log_ratio": max_log_ratio,
               "approx_kl": kl_sum / num_tokens.item()}
    if cfg.trust_region == "clip":
        metrics["clip_ratio/region_mean"] = clipped_sum / num_tokens.item()
    return metrics


def update(policy, optimizer, batch, A, cfg, step, penalty_coef):
    """Pass over the batch num_iterations times, in num_mini_batches steps each. -> metrics"""
    history = []
    for rows in common.mini_batches(batch, cfg, "shuffle", step):
        optimizer.zero_grad(set_to_none=False)          # zeros: Adam also steps without signal
        metrics = backward(policy, batch, A, rows, cfg, penalty_coef)
        grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm or torch.inf)
        history.append(metrics | {"grad_norm": grad_norm.item()})
        if cfg.trust_region == "clip" and 0 < 1.5 * cfg.target_kl < metrics["approx_kl"]:
            break                                       # the policy has gone as far as it may
        optimizer.step()
    return common.mean_metrics(history) | {
        "policy_kl": kl_of_update(policy, batch, cfg),
        "sampling/sampling_logp_difference/max": history[0]["max_log_ratio"]}


@torch.no_grad()
def kl_of_update(policy, batch, cfg):
    """Average (4), from pi_old to pi, over one output to each question. -> float"""
    rows = slice(None, None, cfg.num_generations)
    logps, _ = score(policy, batch.prompts[rows], batch.tokens[rows], cfg.temperature)
    token_kl = kl(batch.logps[rows], logps) * batch.mask[rows]
    return (token_kl.sum() / batch.mask[rows].sum()).item()


# ---- 4. training -----------------------------------------------------------------------------

COLUMNS = {"reward": "reward", "length": "completions/mean_length", "entropy": "entropy",
           "kl": "kl", "pol.kl": "policy_kl", "expl.var": "explained_variance", "grad": "grad_norm"}


def pretrain_critic(policy, critic, optimizer, reference, task, cfg):
    """Fit the critic to samples of the base first, because V begins at 0 (VC-PPO, 2503.01491)."""
    exact = dataclasses.replace(cfg, critic_lam=1.0)        # so the targets contain no V
    for i in tqdm(range(cfg.critic_pretrain_steps), "critic", leave=False, disable=None):
        batch = sample_batch(policy, task, cfg, f"critic {i}")
        _, returns, batch.values, _ = compute_advantages(
            critic, reference, task, batch, exact, cfg.beta)
        fit_critic(critic, optimizer, batch, returns, cfg, "critic", i)


def main(argv=None):
    cfg = plumbing.parse_flags(Config, argv)
    task = common.load_task(cfg, verify)
    policy = GPT(cfg).to(cfg.device)
    with plumbing.Run(cfg, task, policy, COLUMNS, observers(cfg)) as run:
        reference = run.begin(sample_batch)
        critic = Critic(policy)
        optimizer = plumbing.AdamW(policy.parameters(), lr=cfg.learning_rate)
        critic_optimizer = plumbing.AdamW(critic.parameters(), lr=cfg.critic_learning_rate)
        if not run.resumed:
            pretrain_critic(policy, critic, critic_optimizer, reference, task, cfg)
        run.state = {"beta": cfg.beta, "penalty_coef": cfg.penalty_coef} | run.state
        run.start(evaluate, policy=policy, optimizer=optimizer,
                  critic=critic, critic_optimizer=critic_optimizer)
        for step in range(run.step, cfg.max_steps):
            beta = run.state["beta"]
            c_KL = run.state["penalty_coef"]
            batch = sample_batch(policy, task, cfg, step)   # q, o and r(o)
            A, returns, batch.values, metrics = compute_advantages(
                critic, reference, task, batch, cfg, beta)
            metrics |= fit_critic(critic, critic_optimizer, batch, returns, cfg, "shuffle", step)
            metrics |= update(policy, optimizer, batch, A, cfg, step, c_KL)     # descend (5)
            metrics |= {"beta": beta, "penalty_coef": c_KL}
            run.state["beta"] = adapt_coefficient(beta, metrics["kl"], cfg.kl_target)
            if cfg.trust_region == "penalty":
                run.state["penalty_coef"] = adapt_coefficient(
                    c_KL, metrics["policy_kl"], cfg.target_kl)
            run.log(batch, A, metrics)
        return run.finish()


# ==== the machinery: from here on, the text is the same in all scripts ========================

kernels = common.optional("kernels")            # faster on CUDA; None if a copied script lacks it


def observers(cfg):
    """Make what logs samples, warns and reports in a run, if there is report/. -> list"""
    report = common.optional("tasks") and common.optional("report.observers")
    if not report and cfg.report_to != "none":
        common.fail(f"--report_to {cfg.report_to}: needs the folders report/ and tasks/")
    return report.observers(cfg, score) if report else []


# ---- 5. the verifier and the reward ----------------------------------------------------------

def verify(problem, text):
    """Check whether the number in the text's only <answer> block is correct. -> 1.0 or 0.0"""
    number = re.search("<answer> {0,199}(-?[0-9]{1,20}) {0,199}</answer>", text)
    is_one = text.count("<answer>") == 1 and text.count("</answer>") == 1
    return float(is_one and number is not None and int(number[1]) == int(problem.answer))


def reward(problem, text, given):
    """Return the reward of a completion; edit this, not verify, to change what --reward gave."""
    return given


# ---- 6. the policy ---------------------------------------------------------------------------

def rotate(x, cos, sin):
    """Apply rotary positions: turn pairs of features by an angle that grows with the position."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Block(nn.Module):
    """A decoder layer: attention whose query heads share keys and values, then SwiGLU."""

    def __init__(self, cfg):
        super().__init__()
        D = cfg.hidden_size
        self.head_size = D // cfg.num_attention_heads
        kv_size = cfg.num_key_value_heads * self.head_size
        self.attention_norm = nn.RMSNorm(D)
        self.query = nn.Linear(D, D, bias=False)
        self.key = nn.Linear(D, kv_size, bias=False)
        self.value = nn.Linear(D, kv_size, bias=False)
        self.out = nn.Linear(D, D, bias=False)
        self.mlp_norm = nn.RMSNorm(D)
        self.gate = nn.Linear(D, cfg.intermediate_size, bias=False)
        self.up = nn.Linear(D, cfg.intermediate_size, bias=False)
        self.down = nn.Linear(cfg.intermediate_size, D, bias=False)

    def forward(self, x, cos, sin, attn_mask, cache):
        y = self.attention_norm(x)
        q = self.query(y).unflatten(-1, (-1, self.head_size)).transpose(1, 2)   # (B, H, L, hd)
        k = self.key(y).unflatten(-1, (-1, self.head_size)).transpose(1, 2)     # (B, KV, L, hd)
        v = self.value(y).unflatten(-1, (-1, self.head_size)).transpose(1, 2)   # (B, KV, L, hd)
        q = rotate(q, cos, sin)
        kv = torch.stack([rotate(k, cos, sin), v])                              # (2, B, KV, L, hd)
        if self in cache:                               # keys and values of earlier tokens
            kv = torch.cat([cache[self], kv], dim=3)
        cache[self] = kv
        y = F.scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=attn_mask, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))                          # (B, L, D)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))                 # (B, L, D)


class GPT(nn.Module):
    """Llama-style decoder: RMSNorm, rotary positions, SwiGLU, no biases, tied embeddings."""

    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, cfg.hidden_size)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.num_hidden_layers))
        self.norm = nn.RMSNorm(cfg.hidden_size)
        half = cfg.hidden_size // cfg.num_attention_heads // 2
        frequencies = 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("frequencies", frequencies)        # so another head size fails to load
        generator = common.generator(cfg.base_seed, "weights")
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                std = 0.02 if name == "embed.weight" else weight.shape[1] ** -0.5
                if name.endswith(("out.weight", "down.weight")):        # smaller, as in GPT-2
                    std = std / (2 * cfg.num_hidden_layers) ** 0.5
                nn.init.normal_(weight, std=std, generator=generator)

    def hidden(self, tokens, cache=None):
        """Compute the states that predict the next tokens. (B, L) -> (B, L, D). The cache maps each
        block to keys and values (2, B, KV, L, hd) of earlier tokens; new ones are appended. PAD on
        the left is attended to like other tokens; see common.encode_prompts."""
        cache = {} if cache is None else cache
        start = cache[self.blocks[0]].shape[3] if cache else 0
        L = tokens.shape[1]
        positions = torch.arange(start, start + L, device=tokens.device)
        angles = positions[:, None] * self.frequencies                          # (L, hd / 2)
        ones = torch.ones(L, start + L, dtype=torch.bool, device=tokens.device)
        attn_mask = ones.tril(start) if L > 1 else None                         # one attends to all
        x = self.embed.weight[tokens]       # (B, L, D)  nn.Embedding's gradient can vary on CUDA
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin(), attn_mask, cache)
        return self.norm(x)

    def forward(self, tokens, cache=None):
        """tokens (B, L) -> logits (B, L, V)"""
        return F.linear(self.hidden(tokens, cache), self.embed.weight)


def take(cache, rows):
    """Keep only `rows` of a cache, in this order; a row may be taken several times."""
    for block, kv in cache.items():
        cache[block] = kv[:, rows]


def logprobs(logits, tokens, temperature=1.0, kernel="auto"):
    """Compute log-probabilities of tokens, and entropies (nats), of softmax(logits / temperature).
    (B, T, V), (B, T) -> (B, T), (B, T). ValueError if the kernel cannot run here."""
    if kernels and kernels.applies(kernel, logits):
        return kernels.logprobs(logits, tokens, temperature)                    # Triton, on CUDA
    log_p = F.log_softmax(logits / temperature, dim=-1)                         # (B, T, V)
    logps = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)                  # (B, T)
    p_log_p = log_p.exp() * log_p.clamp(min=-1e4)                               # 0 where p is 0
    return logps, -p_log_p.sum(dim=-1)


def read_prompts(model, prompts, cache):
    """Fill the cache with prompts, and compute equal prompts once: updates are 1.3 times as fast.
    (B, W) -> the states that predict the first tokens (B, 1, D)"""
    distinct, prompt_index = prompts.unique(dim=0, return_inverse=True)
    hidden = model.hidden(distinct, cache)[:, -1:]
    take(cache, prompt_index)
    return hidden[prompt_index]


def completion_states(model, prompts, completions):
    """Compute the states that predict the completions' tokens. (B, W), (B, T) -> (B, T, D)"""
    cache = {}
    first = read_prompts(model, prompts, cache)                                 # (B, 1, D)
    return torch.cat([first, model.hidden(completions[:, :-1], cache)], dim=1)


def score(model, prompts, completions, temperature=1.0):
    """Score completions: log-probabilities and entropies. (B, W), (B, T) -> (B, T), (B, T)"""
    hidden = completion_states(model, prompts, completions)                     # (B, T, D)
    return logprobs(F.linear(hidden, model.embed.weight), completions, temperature)


# ---- 7. rollouts -----------------------------------------------------------------------------

def sample_token(logits, uniforms, temperature):
    """Sample tokens by inverse CDF; without uniforms, take the most likely. (b, V), (b,) -> (b,)"""
    if uniforms is None:
        return logits.argmax(dim=-1)
    cdf = F.softmax(logits / temperature, dim=-1).cumsum(dim=-1)                # (b, V)
    threshold = uniforms[:, None] * cdf[:, -1:]         # cumsum can end just below 1
    return torch.searchsorted(cdf, threshold, right=True)[:, 0].clamp(max=VOCAB_SIZE - 1)


@torch.no_grad()
def rollout(model, prompts, problems, cfg, uniforms=None, respond=None):
    """Complete prompts (B, W). uniforms[i, t] (B, T) draws token t of row i, so no row depends on
    another; without uniforms, decoding is greedy. respond(row, ids so far) returns the ids that an
    environment inserts after a sampled token; their mask is 0.0.
    -> tokens, mask, logps, entropy (B, T), lengths (B,)"""
    B, T = len(prompts), cfg.max_completion_length
    cache = {}
    hidden = read_prompts(model, prompts, cache)                                # (B, 1, D)
    tokens = prompts.new_full((B, T), PAD)
    inserted = prompts.new_full((B, T), -1)                     # -1: the policy samples
    mask, logps, entropy = hidden.new_zeros(3, B, T)
    lengths = prompts.new_full((B,), T)
    rows = torch.arange(B, device=prompts.device)               # (b,) rows that have not ended
    for t in range(T):
        logits = F.linear(hidden, model.embed.weight)                           # (b, 1, V)
        row_uniforms = None if uniforms is None else uniforms[rows, t]
        token = sample_token(logits[:, 0], row_uniforms, cfg.temperature)       # (b,)
        is_sampled = inserted[rows, t] < 0                                      # (b,)
        token = token.where(is_sampled, inserted[rows, t])
        logp, H = logprobs(logits, token[:, None], cfg.temperature)             # (b, 1) each
        tokens[rows, t] = token
        mask[rows, t] = is_sampled.to(mask)
        logps[rows, t] = logp[:, 0].to(logps)
        entropy[rows, t] = H[:, 0].to(entropy)
        for row in rows[is_sampled].tolist() if respond else ():
            ids = respond(row, tokens[row, :t + 1].tolist())[:T - t - 1]
            inserted[row, t + 1:t + 1 + len(ids)] = prompts.new_tensor(ids)
        continues = ~is_sampled | (token != EOS)
        lengths[rows[~continues]] = t + 1
        rows = rows[continues]
        if len(rows) == 0 or t == T - 1:
            break
        if not continues.all():
            take(cache, continues)
        hidden = model.hidden(token[continues, None], cache)                    # (b, 1, D)
    return tokens, mask, logps, entropy, lengths


def complete(policy, task, cfg, problems, generator=None, opening=""):
    """Complete the prompts of problems; greedily without a generator. All completions are forced to
    begin with the special token `opening`, if there is one. -> Batch"""
    prompts = encode_prompts(problems, task, cfg.device, opening)               # (B, W)
    uniforms = None
    if generator is not None:
        shape = (len(problems), cfg.max_completion_length)
        uniforms = torch.rand(shape, generator=generator).to(cfg.device)        # (B, T)
    respond = None
    if task.call_tokens:                                    # an environment inserts text
        respond = task.responder(prompts, problems)
    if kernels and cfg.device == "cuda" and cfg.kernel != "torch" and respond is None:
        own = read_prompts, sample_token, logprobs, rotate
        outputs = kernels.rollout(policy, prompts, problems, cfg, uniforms, own)
    else:
        outputs = rollout(policy, prompts, problems, cfg, uniforms, respond)
    tokens, mask, logps, entropy, lengths = outputs
    rows = zip(tokens.tolist(), lengths.tolist())
    texts = [opening + decode([i for i in ids[:length] if i != EOS]) for ids, length in rows]
    truncated = (tokens != EOS).all(dim=1)                                      # (B,)
    return common.Batch(tokens, mask, logps, entropy, lengths, truncated, problems, prompts, texts)


def sample_batch(policy, task, cfg, purpose, split="train"):
    """Sample and reward G completions of P problems; seed and purpose fix the draws. -> Batch"""
    problems = common.sample_problems(task, cfg.num_prompts, (cfg.seed, purpose), split)
    problems = [problem for problem in problems for _ in range(cfg.num_generations)]    # B
    batch = complete(policy, task, cfg, problems, common.generator(cfg.seed, "rollout", purpose))
    return task.judge(batch, cfg.num_generations, purpose, reward)


def evaluate(policy, task, cfg, greedy=False, opening=""):
    """Complete different held-out problems, with the same random numbers in every run. `opening`,
    such as <think>, is the first token of all completions. -> scores"""
    G = 1 if greedy else cfg.num_eval_samples
    held_out = common.held_out_problems(task, cfg.num_eval_problems)
    problems = [problem for problem in held_out for _ in range(G)]
    generator = None if greedy else common.generator("evaluation")
    batch = complete(policy, task, cfg, problems, generator, opening)
    return task.scores(task.judge(batch, G, "evaluation"), greedy)


if __name__ == "__main__":
    main()
