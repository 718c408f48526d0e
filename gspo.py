"""GSPO: group sequence policy optimization (arXiv:2507.18071).

GRPO rewards whole outputs, but its ratios and its clip judge single tokens, each from one sample.
GSPO makes one change: it uses one importance ratio for the whole output, the geometric mean of the
ratios rho_t of its tokens. One clip then holds for all of them.

  A_i   = (r_i - mean(r)) / (std(r) + 1e-4)                                          (1)
  s_i   = exp(1/|o_i| sum_t log rho_t)                                               (2)
  L_i   = -min(s_i A, clip(s_i, 1 - eps_low, 1 + eps_high) A)                        (3)
  KL_t  = pi_ref / pi - log(pi_ref / pi) - 1                                         (4)
  L     = 1/B sum_i 1/|o_i| sum_t (L_i + beta KL_t - c_H H_t)                        (5)

rho_t is pi(o_t | q, o_<t) / pi_old(o_t | q, o_<t). H_t is the entropy of pi at token t, and B is
the number of outputs in an optimizer step. log s_i is a mean and stays near 0, so the clip range is
narrower than in GRPO. The variants of grpo.py work here, too, with s as their ratio; only the KL
k3_ratio still uses rho_t. CISPO (6) and SAPO (7) with s are in no paper, and on none of our pages.

s_i leaves no room for an A that differs within an output. GSPO-token allows it: its ratio has the
value of s_i, but the gradient of token t alone (sg is stop-gradient). If an output has a single A,
as here, this is the gradient of GSPO.

  s_t   = sg(s_i) pi(o_t | q, o_<t) / sg(pi(o_t | q, o_<t))                          (9)

Departures from the paper: by default a verifier gives the rewards; std has ddof 1, as in TRL; the
clip range is 100 times that of the paper, 3e-4 and 4e-4, because this small model moves further in
a step.

Usage: python gspo.py --task arithmetic     15 to 45 seconds on a CPU, once there is a base
"""
import dataclasses
import re
from typing import Literal

import common  # a copied script needs common.py and plumbing.py next to it
import plumbing
from common import EOS, PAD, VOCAB_SIZE, decode, encode_prompts, flag  # isort: split

import torch
import torch.nn.functional as F
from torch import nn

# Shapes: P prompts, G completions of each, B = P * G rows (row p * G + g is completion g of prompt
# p), b part of the rows; W prompt tokens, T completion tokens, L any number of tokens, V size of
# the vocabulary, D width, H heads, KV key/value heads, hd head size.


# ---- 1. configuration ------------------------------------------------------------------------

LOSS_TYPES = {                              # the surrogate (3), and the average in (5)
    "grpo": ("clip", "sequence_mean"),
    "dr_grpo": ("clip", "constant"),        # for the paper, add --scale_rewards none
    "dapo": ("clip", "token_mean"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "sequence_mean")}


@dataclasses.dataclass(frozen=True)
class Config(common.Config):                # G, P, T and more are in common.Config
    loss_type: Literal["grpo", "dr_grpo", "dapo", "cispo", "sapo"] = flag(
        "grpo", "row of LOSS_TYPES; Dr. GRPO also needs --scale_rewards none")
    importance_sampling_level: Literal["sequence", "sequence_token"] = flag("sequence", "(2) / (9)")
    scale_rewards: Literal["group", "batch", "mean", "none"] = flag("group", "divisor in (1)")
    epsilon: float = flag(0.03, "lower clip range (eps_low)")
    epsilon_high: float = flag(0.04, "upper clip range (eps_high); (6) caps at 1 + eps_high")
    num_iterations: int = flag(1, "passes over each batch")
    beta: float = flag(0.0, "weight of the KL to the base")
    kl_estimator: Literal["k1", "k2", "k3", "k3_ratio"] = flag(
        "k3", "estimator of the KL; (4) is k3")
    entropy_coef: float = flag(0.0, "weight of the entropy bonus (c_H)")
    dynamic_sampling: int = flag(0, "most rounds that replace groups without signal")
    overlong_buffer: int = flag(0, "buffer of (8) in tokens (c); 0: no penalty")
    mask_truncated_completions: bool = flag(False, "leave outputs without EOS out of (5) and B")
    delta: float = flag(0.0, "upper bound of the ratio in (3) if A < 0; 0: none")

    def rules(self):
        yield from super().rules()
        unused = {"cispo": ("epsilon", "delta", "importance_sampling_level"),
                  "sapo": ("epsilon", "epsilon_high", "delta")}
        for name in unused.get(self.loss_type, ()):
            is_default = getattr(self, name) == getattr(Config, name)
            yield is_default, f"--{name}: has no effect with --loss_type {self.loss_type}"
        has_kl = self.kl_estimator == "k3" or self.beta > 0
        yield has_kl, f"--kl_estimator {self.kl_estimator}: needs --beta"
        is_bound = self.delta == 0 or self.delta > 1 + self.epsilon_high
        yield is_bound, f"--delta {self.delta}: must be above 1 + epsilon_high, or 0"
        is_part = self.overlong_buffer <= self.max_completion_length
        yield is_part, f"--overlong_buffer {self.overlong_buffer}: is above --max_completion_length"
        is_binary = self.reward == "accuracy" and self.overlong_buffer == 0
        yield is_binary or self.scale_rewards != "mean", "--scale_rewards mean: needs 0/1 rewards"


# ---- 2. the algorithm ------------------------------------------------------------------------

def advantages(rewards, scale_rewards="group", eps=1e-4):
    """Compute how much better each completion did than its group. (P, G) -> (P, G)"""
    A = rewards - rewards.mean(dim=1, keepdim=True)                             # (P, G)  for (1)
    if scale_rewards == "group":
        A = A / (rewards.std(dim=1, keepdim=True) + eps)                        # (P, G)  eq. (1)
    elif scale_rewards == "batch":
        A = A / (rewards.std() + eps)
    elif scale_rewards == "mean":           # MaxRL (2602.02710): a rare success counts more
        means = rewards.mean(dim=1, keepdim=True)                               # (P, 1)
        A = torch.where(means > 0, A / means, 0.0)
    elif scale_rewards != "none":
        raise ValueError(f"scale_rewards={scale_rewards!r}: must be group, batch, mean or none")
    return torch.where(common.has_signal(rewards), A, 0.0)      # equal rewards: exactly 0, not 1e-8


def token_log_ratio(logps, old_logps, mask):
    """Compute log rho_t, 0 in masked slots; old_logps get no gradient. (B, T) each -> (B, T)"""
    return torch.where(mask > 0, logps - old_logps.detach(), 0.0)               # (B, T)  for (2)


def log_ratio(logps, old_logps, mask, level="sequence"):
    """Compute log s_i, or log s_t, in the slots of the mask; 0 elsewhere. (B, T) each -> (B, T)"""
    log_rho = token_log_ratio(logps, old_logps, mask)
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    log_s = log_rho.sum(dim=1, keepdim=True) / lengths                          # (B, 1)  for (2)
    if level == "sequence_token":
        log_s = log_s.detach() + log_rho - log_rho.detach()                     # (B, T)  for (9)
    elif level != "sequence":
        raise ValueError(f"level={level!r}: must be sequence or sequence_token")
    return log_s * mask


def policy_loss(logps, old_logps, advantages, mask,
                loss_type="grpo", epsilon=0.03, epsilon_high=0.04, delta=0.0, level="sequence"):
    """Compute L_t, 0 in masked slots. advantages: (B,), (B, 1) or (B, T). -> (B, T)"""
    A = advantages if advantages.dim() == 2 else advantages[:, None]            # (B, 1) or (B, T)
    check_shapes(logps, old_logps, mask, A.expand(-1, logps.shape[-1]))
    surrogate, _ = LOSS_TYPES.get(loss_type, ("unknown", ""))
    log_s = log_ratio(logps, old_logps, mask, level)
    ratio = log_s.clamp(max=80).exp()       # exp(89) is inf, and its gradient nan  eq. (2), eq. (9)
    if surrogate == "clip":
        clipped_ratio = ratio.clamp(1 - epsilon, 1 + epsilon_high)
        if delta > 0:
            # dual clip (1912.09729, 2505.07291): if A < 0, only this bounds L_t, by delta |A|
            ratio = ratio.clamp(max=delta)
        token_loss = -torch.min(ratio * A, clipped_ratio * A)                   # (B, T)  eq. (3)
    elif surrogate == "cispo":
        # CISPO (2506.13585) keeps all gradients, but caps their weight; sg is stop-gradient:
        # L_t = -sg(min(ratio, 1 + eps_high)) A log pi(o_t | q, o_<t)                     (6)
        weight = ratio.clamp(max=1 + epsilon_high).detach()
        token_loss = -weight * A * logps                                        # (B, T)  eq. (6)
    elif surrogate == "sapo":
        # SAPO (2511.20347) has a smooth gate instead of the clip:
        # L_t = -4/tau sigmoid(tau (ratio - 1)) A,    tau = 1 if A > 0, else 1.05        (7)
        tau = 1 + 0.05 * (A <= 0).to(A)                 # 1, or 1.05 if A is not positive
        token_loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * A            # (B, T)  eq. (7)
    else:
        raise ValueError(f"loss_type={loss_type!r}: has no branch, or no row in {[*LOSS_TYPES]}")
    return torch.where(mask > 0, token_loss, 0.0)


def is_clipped(log_rho, A, epsilon, epsilon_high):
    """Find where (3) has no gradient: the ratio passed the bound that A pushes it to. -> (B, T)"""
    ratio = log_rho.exp()
    is_too_high = (A > 0) & (ratio > 1 + epsilon_high)
    is_too_low = (A < 0) & (ratio < 1 - epsilon)
    return is_too_high | is_too_low


def kl(logps, ref_logps, estimator="k3", log_rho=None):
    """Estimate KL(pi || pi_ref) at each token, with the tokens before it held fixed. The samples
    are from pi, for k3_ratio from pi_old; log_rho is log(pi / pi_old). (B, T) each -> (B, T)"""
    check_shapes(logps, ref_logps)
    x = logps - ref_logps
    if estimator == "k1":
        return x            # unbiased; as a loss, its gradient on samples of pi is only noise
    if estimator == "k2":
        return x.square() / 2               # biased; as a loss, it has the gradient of this KL
    k3 = torch.expm1(-x) + x                # unbiased and never negative               eq. (4)
    if estimator == "k3":
        return k3                           # as a loss, its gradient is that of KL(pi_ref || pi)
    if estimator == "k3_ratio":             # DeepSeek-V3.2 (2512.02556)
        return log_rho.exp() * k3           # as a loss, it has the gradient of this KL
    raise ValueError(f"estimator={estimator!r}: must be k1, k2, k3 or k3_ratio")


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


def overlong_penalty(lengths, max_length, buffer):
    """Compute DAPO's penalty, which falls to -1 over the last c = `buffer` tokens. (B,) -> (B,)"""
    # R_i = min(0, max(-1, (T - c - n_i) / c))                                          (8)
    return ((max_length - buffer - lengths) / max(buffer, 1)).clamp(-1.0, 0.0)  # eq. (8)


def check_shapes(*tensors):
    """Raise a ValueError unless all shapes are equal: torch would repeat smaller tensors."""
    shapes = [tuple(x.shape) for x in tensors if isinstance(x, torch.Tensor)]       # 0 fits all
    if len(set(shapes)) > 1:
        raise ValueError(f"the shapes {shapes} must be equal; advantages may have one column")


# ---- 3. the update ---------------------------------------------------------------------------

def sample_with_signal(policy, task, cfg, step):
    """Sample P groups, replace groups without signal, then add (8) to the rewards. -> Batch"""
    batch = sample_batch(policy, task, cfg, step)
    for attempt in range(1, 1 + cfg.dynamic_sampling):
        is_mixed = common.has_signal(batch.rewards)[:, 0]                       # (P,)
        if is_mixed.all():
            break
        few = dataclasses.replace(cfg, num_prompts=int((~is_mixed).sum()))
        more = sample_batch(policy, task, few, (step, attempt))
        is_new = torch.ones(few.num_prompts, dtype=torch.bool)
        is_kept = torch.cat([is_mixed, is_new])                                 # (P + new,)
        batch = common.gather([batch, more], is_kept.nonzero()[:, 0])
    penalty = overlong_penalty(batch.lengths.cpu(), cfg.max_completion_length, cfg.overlong_buffer)
    return dataclasses.replace(batch, rewards=batch.rewards + penalty.view_as(batch.rewards))


@torch.no_grad()
def score_reference(reference, batch, cfg):
    """Score the batch under pi_ref; if beta is 0, only one output per group, to report the KL.
    -> log pi_ref (B, T), or None if beta is 0; mean KL to pi_ref"""
    every = 1 if cfg.beta > 0 else cfg.num_generations
    rows = slice(None, None, every)
    logps, _ = score(reference, batch.prompts[rows], batch.tokens[rows], cfg.temperature)
    token_kl = kl(batch.logps[rows], logps, "k1") * batch.mask[rows]
    mean_kl = (token_kl.sum() / batch.mask[rows].sum()).item()
    if cfg.beta == 0:
        return None, mean_kl
    return logps, mean_kl


def objective(policy, batch, ref_logps, A, part, cfg):
    """Compute L_t + beta KL_t - c_H H_t of (5) for the rows `part`. -> (b, T), log pi (b, T)"""
    T = int(batch.lengths[part].max())
    tokens = batch.tokens[part, :T]                                             # (b, T)
    mask = batch.mask[part, :T]
    old_logps = batch.logps[part, :T]
    logps, entropy = score(policy, batch.prompts[part], tokens, cfg.temperature)
    token_loss = policy_loss(
        logps, old_logps, A[part, :T], mask, cfg.loss_type, cfg.epsilon, cfg.epsilon_high,
        cfg.delta, cfg.importance_sampling_level)
    if cfg.beta > 0:
        log_rho = token_log_ratio(logps, old_logps, mask)
        token_kl = kl(logps * mask, ref_logps[part, :T] * mask, cfg.kl_estimator, log_rho)
        token_loss = token_loss + cfg.beta * token_kl
    token_loss = token_loss - cfg.entropy_coef * entropy
    return token_loss, logps.detach()


def backward(policy, batch, ref_logps, A, rows, cfg):
    """Accumulate the gradient of (5) over `rows`, in micro-batches. -> metrics"""
    surrogate, average = LOSS_TYPES[cfg.loss_type]
    if cfg.mask_truncated_completions:
        rows = rows[~batch.is_truncated[rows]]
    num_sequences = len(rows)                           # in the whole optimizer step
    num_tokens = batch.mask[rows].sum().clamp(min=1)
    if cfg.beta == 0 and cfg.entropy_coef == 0:
        rows = rows[A[rows].any(dim=1)]                 # other rows have no gradient
    loss_sum = clipped_sum = max_log_ratio = 0.0
    for part in common.micro_batches(rows, batch.lengths, cfg.micro_batch_size):
        token_loss, logps = objective(policy, batch, ref_logps, A, part, cfg)   # (b, T) each
        T = token_loss.shape[1]
        mask = batch.mask[part, :T]
        loss = aggregate(                                                       # eq. (5)
            token_loss, mask, average, num_sequences, num_tokens, cfg.max_completion_length)
        loss.backward()

        log_rho = token_log_ratio(logps, batch.logps[part, :T], mask)
        log_s = log_ratio(logps, batch.logps[part, :T], mask)
        clipped = is_clipped(log_s, A[part, :T], cfg.epsilon, cfg.epsilon_high)
        loss_sum += loss.item()
        clipped_sum += (clipped * mask).sum().item()
        max_log_ratio = max(max_log_ratio, log_rho.abs().max().item())
    metrics = {"loss": loss_sum, "max_log_ratio": max_log_ratio}
    if surrogate == "clip":
        metrics["clip_ratio/region_mean"] = clipped_sum / num_tokens.item()
    return metrics


def update(policy, ref_logps, optimizer, batch, A, cfg, step):
    """Pass over the batch num_iterations times, in num_mini_batches steps each. -> metrics"""
    history = []
    for rows in common.mini_batches(batch, cfg, "shuffle", step):
        optimizer.zero_grad(set_to_none=False)          # zeros: Adam also steps without signal
        metrics = backward(policy, batch, ref_logps, A, rows, cfg)
        grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm or torch.inf)
        optimizer.step()
        history.append(metrics | {"grad_norm": grad_norm.item()})
    return common.mean_metrics(history) | {
        "sampling/sampling_logp_difference/max": history[0]["max_log_ratio"]}


# ---- 4. training -----------------------------------------------------------------------------

COLUMNS = {"reward": "reward", "signal": "signal", "length": "completions/mean_length",
           "entropy": "entropy", "kl": "kl", "clip": "clip_ratio/region_mean", "grad": "grad_norm"}


def main(argv=None):
    cfg = plumbing.parse_flags(Config, argv)
    task = common.load_task(cfg, verify)
    policy = GPT(cfg).to(cfg.device)
    with plumbing.Run(cfg, task, policy, COLUMNS, observers(cfg)) as run:
        reference = run.begin(sample_batch)
        optimizer = plumbing.AdamW(policy.parameters(), lr=cfg.learning_rate)

        run.start(evaluate, policy=policy, optimizer=optimizer)
        for step in range(run.step, cfg.max_steps):
            batch = sample_with_signal(policy, task, cfg, step)     # questions, outputs, rewards
            A = advantages(batch.rewards, cfg.scale_rewards).to(cfg.device)         # (P, G)
            A = A.view(-1, 1).expand_as(batch.mask)                                 # (B, T)
            ref_logps, mean_kl = score_reference(reference, batch, cfg)
            metrics = update(policy, ref_logps, optimizer, batch, A, cfg, step)     # descend (5)
            run.log(batch, A, metrics | {"kl": mean_kl})
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
