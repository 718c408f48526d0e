"""GSPO: group sequence policy optimization (arXiv:2507.18071).

GRPO with one change. The reward judges a whole output, so the importance ratio is that of the whole
output: the geometric mean of the ratios rho_t of its tokens. One clip then holds for all of them.

  A_i   = (r_i - mean(r)) / (std(r) + 1e-4)                                          (1)
  s_i   = exp(1/|o_i| sum_t log rho_t)                                               (2)
  L_i   = -min(s_i A, clip(s_i, 1 - eps_low, 1 + eps_high) A)                        (3)
  KL_t  = pi_ref / pi - log(pi_ref / pi) - 1                                         (4)
  L     = 1/B sum_i 1/|o_i| sum_t (L_i + beta KL_t - c_H H_t)                        (5)

rho_t = pi(o_t | q, o_<t) / pi_old(o_t | q, o_<t); H_t is the entropy of pi, B the number of outputs
in an optimizer step. log s_i, a mean, stays near 0, so the clip range is 700 times narrower. CISPO
(6) and SAPO (7) are those of grpo.py with s for rho, where sg is stop-gradient. DAPO's penalty (8),
the weight of samples of mu, an older policy (9), --delta, which bounds s, --scale_rewards mean,
--kl_estimator k3_ratio, by rho_t, and --mask_truncated_completions are as there:

  L_t   = -sg(min(s, 1 + eps_high)) A log pi(o_t | q, o_<t)                          (6)
  L_t   = -4/tau sigmoid(tau (s - 1)) A,          tau = 1 if A > 0, else 1.05        (7)
  R_i   = min(0, max(-1, (T - c - n_i) / c))                                         (8)
  w_t   = pi_old(o_t | q, o_<t) / mu(o_t | q, o_<t)                                  (9)

GSPO-token lets A differ within an output: its ratio has the value of s_i, and the gradient of token
t alone. With one A for an output, as here, that is the gradient of GSPO, unless w_t differs within
an output: of GSPO's gradient it changes only the length, by its mean over the output.

  s_t   = sg(s_i) pi(o_t | q, o_<t) / sg(pi(o_t | q, o_<t))                          (10)

Departures from the paper: by default a verifier rewards; std has ddof 1, as in TRL.
Usage: python gspo.py --task arithmetic     20 seconds on a CPU, once there is a base
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
# D width, H heads, KV key/value heads, hd head size.


# ---- 1. configuration ------------------------------------------------------------------------

LOSS_TYPES = {                              # what stands for (3), and the average in (5)
    "grpo": ("clip", "sequence_mean"),
    "dr_grpo": ("clip", "constant"),        # the paper's needs --scale_rewards none, too
    "dapo": ("clip", "token_mean"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "sequence_mean"),
    "bnpo": ("clip", "micro_batch_mean")}
CLIP_METRICS = {"clip": "clip_ratio/region_mean", "cispo": "clip_ratio/capped_mean"}


@dataclasses.dataclass(frozen=True)
class Config(common.Config):                # G, P, T and others: common.Config
    importance_sampling_level: str = flag("sequence", "the ratio: (2), or (10)",
                                          choices=("sequence", "sequence_token"))
    loss_type: str = flag("grpo", "surrogate and average", choices=tuple(LOSS_TYPES))
    scale_rewards: str = flag("group", "divisor in (1): std of group or batch, mean of a group",
                              choices=("group", "batch", "mean", "none"))
    epsilon: float = flag(3e-4, "lower clip range (eps_low)", low=0)
    epsilon_high: float = flag(4e-4, "upper clip range (eps_high); TRL's of CISPO is 1 + it", low=0)
    delta: float = flag(0.0, "where A < 0, upper bound of the ratio in (3); 0: none", low=0)
    num_iterations: int = flag(1, "passes over each batch", low=1)
    beta: float = flag(0.0, "weight of the KL to the base", low=0)
    kl_estimator: str = flag("k3", "of KL_t: (4) is k3, times the ratio k3_ratio", needs="beta",
                             choices=("k1", "k2", "k3", "k3_ratio"))
    entropy_coef: float = flag(0.0, "weight of the entropy bonus (c_H)", low=0)
    entropy_decay_steps: int = flag(0, "steps in which c_H falls to 0; 0: it stays", low=0,
                                     needs="entropy_coef")
    overlong_buffer: int = flag(0, "buffer of (8) in tokens (c); 0: no penalty", low=0)
    mask_truncated_completions: bool = flag(False, "leave outputs without an end out of (5)")
    sampler_lag: int = flag(0, "sample from the policy of so many batches ago (K)", low=0)
    importance_sampling_correction: str = flag(
        "none", "what w_t above C becomes: C, or 0; none: every w_t is 1",
        choices=("none", "truncate", "mask", "sequence_truncate", "sequence_mask"),
        needs="sampler_lag")
    importance_sampling_cap: float = flag(2.0, "the highest weight of (9) (C)", low=1e-9)
    does_nothing_with = {"epsilon": "loss_type cispo|sapo", "epsilon_high": "loss_type sapo",
                         "delta": "loss_type cispo|sapo",
                         "importance_sampling_cap": "importance_sampling_correction none"}


# ---- 2. the algorithm ------------------------------------------------------------------------

def advantages(rewards, scale_rewards="group", eps=1e-4):
    """How much better each completion did than its group. (P, G) -> (P, G)"""
    A = rewards - rewards.mean(dim=1, keepdim=True)
    if scale_rewards == "group":
        A = A / (rewards.std(dim=1, keepdim=True) + eps)                        # (P, G)  eq. (1)
    elif scale_rewards == "batch":
        A = A / (rewards.std() + eps)
    elif scale_rewards == "mean":
        means = rewards.mean(dim=1, keepdim=True)                               # (P, 1)
        A = torch.where(means > 0, A / means, 0.0)
    return torch.where(common.has_signal(rewards), A, 0.0)      # equal rewards: exactly 0, not 1e-8


def overlong_penalty(lengths, max_length, buffer):
    """From 0 at max_length - buffer tokens to -1 at max_length; 0 without a buffer. -> (P, G)"""
    slope = (max_length - buffer - lengths) / max(buffer, 1)
    return slope.clamp(-1.0, 0.0)                                               # eq. (8)


def log_ratio(logps, old_logps, mask, level="sequence"):
    """log s_i in every slot of the mask, or log s_t; 0 elsewhere. (B, T) each -> (B, T)"""
    log_rho = torch.where(mask > 0, logps - old_logps.detach(), 0.0)
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    log_s = log_rho.sum(dim=1, keepdim=True) / lengths                          # (B, 1)
    if level == "sequence_token":
        log_s = log_s.detach() + log_rho - log_rho.detach()                     # (B, T)
    return log_s * mask


def policy_loss(logps, old_logps, advantages, mask,
                loss_type="grpo", epsilon=0.2, epsilon_high=0.2, delta=0.0, level="sequence"):
    """L_t, 0 in masked slots; advantages are (B,) or (B, T). -> (B, T)"""
    A = advantages if advantages.dim() == 2 else advantages[:, None]            # (B, 1) or (B, T)
    ratio = log_ratio(logps, old_logps, mask, level).exp()              # (B, T)  eq. (2), eq. (10)
    surrogate, _ = LOSS_TYPES[loss_type]
    if surrogate == "clip":
        clipped_ratio = ratio.clamp(1 - epsilon, 1 + epsilon_high)
        if delta > 0:
            ratio = ratio.clamp(max=delta)              # so the loss is at most delta |A|
        token_loss = -torch.min(ratio * A, clipped_ratio * A)                   # (B, T)  eq. (3)
    elif surrogate == "cispo":
        weight = ratio.clamp(max=1 + epsilon_high).detach()
        token_loss = -weight * A * logps                                        # (B, T)  eq. (6)
    else:                                               # sapo
        tau = 1 + 0.05 * (A <= 0).to(A)                 # 1, or 1.05 where A is not positive
        token_loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * A            # (B, T)  eq. (7)
    return torch.where(mask > 0, token_loss, 0.0)


def is_clipped(log_rho, A, epsilon, epsilon_high):
    """Where the range stops the gradient of (3): the ratio left it on A's side. -> bool (B, T)"""
    ratio = log_rho.exp()
    above = (A > 0) & (ratio > 1 + epsilon_high)
    below = (A < 0) & (ratio < 1 - epsilon)
    return above | below


def importance_weights(old_logps, sampler_logps, mask, correction="truncate", cap=2.0):
    """w_t, 0 in masked slots: how much likelier than mu pi_old is to sample what mu sampled.
    (B, T) each -> (B, T)"""
    if correction == "none":
        return mask
    log_w = torch.where(mask > 0, old_logps - sampler_logps, 0.0)               # (B, T)
    if correction.startswith("sequence"):
        log_w = log_w.sum(dim=1, keepdim=True)                                  # (B, 1)
    w = torch.where(mask > 0, log_w.exp(), 0.0)                                 # (B, T)  eq. (9)
    if correction.endswith("truncate"):
        return w.clamp(max=cap)
    return torch.where(w <= cap, w, 0.0)


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


# ---- 3. the update ---------------------------------------------------------------------------

def backward(policy, batch, ref_logps, A, rows, cfg, entropy_coef):
    """Accumulate the gradient of (5) over `rows`, in micro-batches. -> metrics"""
    surrogate, average = LOSS_TYPES[cfg.loss_type]
    if cfg.mask_truncated_completions:
        rows = rows[~batch.is_truncated[rows].cpu()]
    num_sequences = len(rows)
    num_tokens = batch.mask[rows].sum().clamp(min=1)
    is_bnpo = average == "micro_batch_mean"             # whose value depends on how rows are split
    if cfg.beta == 0 and entropy_coef == 0 and not is_bnpo:
        rows = rows[A[rows].any(dim=1).cpu()]           # the others have no gradient

    loss_sum = 0.0
    clipped_sum = 0.0
    clipped_by_token_sum = 0.0
    max_log_ratio = 0.0
    for part in common.micro_batches(rows, batch.lengths, cfg.micro_batch_size, not is_bnpo):
        T = batch.lengths[part].max()
        tokens = batch.tokens[part, :T]                                         # (b, T)
        mask = batch.mask[part, :T]
        old_logps = batch.logps[part, :T]

        logps, entropy = score(policy, batch.prompts[part], tokens, cfg.temperature, cfg.kernel)
        token_loss = policy_loss(
            logps, old_logps, A[part, :T], mask, cfg.loss_type, cfg.epsilon, cfg.epsilon_high,
            cfg.delta, cfg.importance_sampling_level)
        if cfg.beta > 0:
            token_kl = kl(logps * mask, ref_logps[part, :T] * mask, cfg.kl_estimator,
                          (logps - old_logps) * mask)   # of rho_t, not of s_i
            token_loss = token_loss + cfg.beta * token_kl
        token_loss = batch.weights[part, :T] * token_loss - entropy_coef * entropy
        loss = aggregate(                                                       # eq. (5)
            token_loss, mask, average, num_sequences, num_tokens, cfg.max_completion_length)
        loss.backward()

        log_s = log_ratio(logps.detach(), old_logps, mask)
        if surrogate == "clip":
            clipped = is_clipped(log_s, A[part, :T], cfg.epsilon, cfg.epsilon_high)
        else:                                               # the weights that (6) caps
            clipped = (log_s.exp() > 1 + cfg.epsilon_high) & (A[part, :T] != 0)
        log_rho = (logps.detach() - old_logps) * mask
        clipped_by_token = is_clipped(log_rho, A[part, :T], 0.2, 0.28)    # with grpo.py's range
        loss_sum += loss.item()
        clipped_sum += (clipped * mask).sum().item()
        clipped_by_token_sum += (clipped_by_token * mask).sum().item()
        max_log_ratio = max(max_log_ratio, log_rho.abs().max().item())
    metrics = {"loss": loss_sum, "max_log_ratio": max_log_ratio}
    if surrogate in CLIP_METRICS:
        metrics[CLIP_METRICS[surrogate]] = clipped_sum / num_tokens.item()
    if surrogate == "clip":
        metrics["clip_ratio/token_region_mean"] = clipped_by_token_sum / num_tokens.item()
    return metrics


@torch.no_grad()
def correct_for_lag(policy, batch, cfg):
    """Put log pi_old in the place of log mu in a batch, and weigh its tokens by w_t. -> metrics"""
    if cfg.sampler_lag == 0:
        return {}                                       # mu is pi_old
    sampler_logps = batch.logps
    batch.logps, _ = score(policy, batch.prompts, batch.tokens, cfg.temperature, cfg.kernel)
    batch.weights = importance_weights(
        batch.logps, sampler_logps, batch.mask, cfg.importance_sampling_correction,
        cfg.importance_sampling_cap)
    return common.lag_metrics(batch, sampler_logps)


def update(policy, reference, optimizer, batch, A, cfg, step):
    """num_iterations passes over the batch, num_mini_batches optimizer steps each. -> metrics"""
    learning_rate = common.warm_up(cfg, step)
    optimizer.param_groups[0]["lr"] = learning_rate
    entropy_coef = common.decay_entropy(cfg, step)
    every = 1 if cfg.beta > 0 else 8                    # for the metric alone, some rows are enough
    prompts = batch.prompts[::every]
    tokens = batch.tokens[::every]
    with torch.no_grad():
        ref_logps, _ = score(reference, prompts, tokens, cfg.temperature, cfg.kernel)

    history = []
    for rows in common.mini_batches(batch, cfg, "shuffle", step):
        optimizer.zero_grad(set_to_none=False)          # zeros: Adam steps even without signal
        metrics = backward(policy, batch, ref_logps, A, rows, cfg, entropy_coef)
        grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm)
        metrics["grad_norm"] = grad_norm.item()
        common.check_finite(step, metrics)
        optimizer.step()
        history.append(metrics)

    mask = batch.mask[::every]
    token_kl = kl(batch.logps[::every], ref_logps, "k1") * mask                 # (B / every, T)
    return common.mean_metrics(history) | {
        "kl": (token_kl.sum() / mask.sum()).item(), "learning_rate": learning_rate,
        "sampling/sampling_logp_difference/max": history[0]["max_log_ratio"]}


# ---- 4. training -----------------------------------------------------------------------------

COLUMNS = {"reward": "reward", "signal": "signal", "length": "completions/mean_length",
           "entropy": "entropy", "clip": "clip_ratio/region_mean",
           "by token": "clip_ratio/token_region_mean", "capped": "clip_ratio/capped_mean",
           "grad": "grad_norm"}


def main(argv=None):
    cfg = common.parse_flags(Config, argv)
    task = common.load_task(cfg, verify)
    policy = GPT(cfg).to(cfg.device)
    run = common.Run(cfg, task, policy, COLUMNS, argv)
    run.load_base(warm_start)
    run.load_reward_model(sample_batch)                     # if --reward names it
    reference = copy.deepcopy(policy)
    sampler = common.Sampler(policy, cfg.sampler_lag)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=cfg.learning_rate, weight_decay=cfg.weight_decay)

    for step in run.steps(evaluate, policy=policy, optimizer=optimizer, sampler=sampler):
        batch = sample_batch(sampler.policy, task, cfg, step)       # questions, outputs, rewards
        lengths = batch.lengths.view_as(batch.rewards).cpu()                    # (P, G)
        batch.rewards += overlong_penalty(lengths, cfg.max_completion_length, cfg.overlong_buffer)
        A = advantages(batch.rewards, cfg.scale_rewards).view(-1, 1).to(cfg.device)     # (B, 1)
        differences = correct_for_lag(policy, batch, cfg)
        metrics = update(policy, reference, optimizer, batch, A, cfg, step)     # lower (5)
        sampler.follow(policy)
        run.log(batch, A, metrics | differences, decode, score)
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
