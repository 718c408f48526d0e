"""GRPO: group-relative policy optimization (DeepSeekMath, arXiv:2402.03300).

For each question q sample G outputs o_1..o_G from the policy, score them, and raise the probability of those that did
better than their siblings. No critic: the group's mean is the baseline.

  A_i   = (r_i - mean(r)) / (std(r) + 1e-4)                                     (1)
  rho_t = pi(o_t | q, o_<t) / pi_old(o_t | q, o_<t)                             (2)
  L_t   = -min(rho_t A, clip(rho_t, 1 - eps_low, 1 + eps_high) A)               (3)
  KL_t  = pi_ref / pi - log(pi_ref / pi) - 1             (k3, for samples of pi) (4)
  L     = 1/B sum_i 1/|o_i| sum_t (L_t + beta KL_t - c_H H_t)                    (5)

Equations 1-5 are the paper's 1-4 and 17-21 up to names, H_t the entropy of the policy at t. Published variants replace
single terms: CISPO (arXiv:2506.13585) and SAPO (arXiv:2511.20347) the surrogate (3),

  L_t   = -sg(min(rho_t, 1 + eps_high)) A log pi(o_t | q, o_<t)                 (6)
  L_t   = -4/tau sigmoid(tau (rho_t - 1)) A,  tau = 1 for A > 0, else 1.05      (7)

DAPO (arXiv:2503.14476), Dr. GRPO (arXiv:2503.20783) and TRL's BNPO the averaging in (5); DAPO adds eps_high > eps_low,
dynamic sampling, and a penalty on overlong outputs (n tokens, limit L, buffer c):

  R_i   = max(-1, min(0, (L - c - n_i) / c))                                    (8)

Departures from the paper: a verifier in place of a reward model; beta = 0 and eps_high = .28 by default; std has
ddof = 1 (the paper does not say; so does TRL); DAPO and CISPO average over all tokens of the step, not over those of
each group. With beta > 0 off-policy, (4) is the paper's and carries no ratio.

  python grpo.py --task arithmetic

trains a base that blurts (greedy accuracy about 0.15) to think first (about 0.99), in about a minute on two CPU cores.
"""
import collections
import copy
import dataclasses
import functools
import math
import re
from typing import NamedTuple

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from torch import nn

import common
from common import flag

# ---- 1. configuration -----------------------------------------------------------------------------------------------
# Shapes: P prompts per step, G completions of each, B = P * G rows (row p * G + g), W prompt tokens, T completion
# tokens, V vocabulary, D width, H heads.


@dataclasses.dataclass(frozen=True)
class Config(common.Config):
    num_generations: int = flag(8, "completions per prompt (G)", low=2, why="a group of one has no siblings")
    loss_type: str = flag("grpo", "row of LOSS_TYPES: surrogate and averaging",
                          choices=("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"))
    scale_rewards: str = flag("group", "what divides the advantage in (1): the std of the group, of the batch, or nothing",
                              choices=("group", "batch", "none"))
    epsilon: float = flag(0.2, "lower clip range (eps_low)", low=0)
    epsilon_high: float = flag(0.28, "upper clip range (eps_high); TRL's for CISPO is 1 + this", low=0)
    num_iterations: int = flag(1, "passes over each batch of samples (mu)", low=1)
    beta: float = flag(0.0, "weight of the KL to the base", low=0)
    kl_estimator: str = flag("k3", "KL_t; (4) is k3", choices=("k1", "k2", "k3"))
    entropy_coef: float = flag(0.0, "weight of the entropy bonus (c_H)", low=0)
    entropy_decay_steps: int = flag(0, "steps in which c_H falls linearly to 0; 0: it stays", low=0)
    dynamic_sampling: bool = flag(False, "sample more prompts until every group has signal (DAPO)")
    max_resamples: int = flag(8, "batches of prompts that dynamic sampling may add to a step", low=1)
    overlong_buffer: int = flag(0, "tokens before the limit in which (8) grows to -1 (c); 0: no penalty", low=0)

    def check(self):
        super().check()
        rows = self.num_prompts * self.num_generations
        if self.num_mini_batches > rows:
            common.fail(f"--num_mini_batches {self.num_mini_batches}: must be at most the {rows} rows of a batch")
        if self.overlong_buffer > self.max_completion_length:
            common.fail(f"--overlong_buffer {self.overlong_buffer}: must be at most --max_completion_length "
                        f"{self.max_completion_length}")


# ---- 2. the algorithm -----------------------------------------------------------------------------------------------

SCALES = {
    "group": lambda rewards, eps: rewards.std(1, keepdim=True) + eps,                           # (P, 1)
    "batch": lambda rewards, eps: rewards.std() + eps,                                          # ()
    "none": lambda rewards, eps: 1.0,
}


def has_signal(rewards):
    """Which groups have unequal rewards. Not from r - mean(r): rounding leaves that nonzero. (P, G) -> (P,)"""
    return rewards.amax(1) > rewards.amin(1)


def advantages(rewards, scale_rewards="group", eps=1e-4):
    """How much better than its siblings each completion did; exactly 0 in a group of equals. (P, G) -> (P, G)"""
    centred = rewards - rewards.mean(1, keepdim=True)                                           # (P, G)
    return torch.where(has_signal(rewards)[:, None], centred / SCALES[scale_rewards](rewards, eps), 0.0)     # eq. (1)


def overlong_penalty(lengths, max_length, buffer):
    """0 up to max_length - buffer tokens, then falling to -1 at max_length. (B,) -> (B,)"""
    return ((max_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)                          # eq. (8)


KL = {                                                                      # x = log(pi / pi_ref), sampled from pi
    "k3": lambda x: torch.expm1(-x) + x,                                    # unbiased, never negative; eq. (4)
    "k1": lambda x: x,                                                      # unbiased; as a loss its gradient is only noise
    "k2": lambda x: x.square() / 2,                                         # biased; as a loss its gradient is right
}


def kl(logps, ref_logps, estimator="k3"):
    """Estimates of KL(pi || pi_ref) at each token, for samples of pi. (B, T), (B, T) -> (B, T)"""
    return KL[estimator](logps - ref_logps)


def log_ratio(logps, old_logps, mask):
    """log rho_t, 0 in masked slots. On fresh samples its value is 0 and its gradient that of logps. (B, T)"""
    return (logps - old_logps.detach()) * mask                                                  # eq. (2)


SURROGATES = {                                                              # (rho, logps, A, low, high) -> (B, T)
    "clip": lambda rho, logps, A, low, high: -torch.min(rho * A, rho.clamp(1 - low, 1 + high) * A),          # eq. (3)
    "cispo": lambda rho, logps, A, low, high: -rho.clamp(max=1 + high).detach() * A * logps,                 # eq. (6)
    "sapo": lambda rho, logps, A, low, high: -sapo_gate(rho, torch.where(A > 0, 1.0, 1.05)) * A,
}


def sapo_gate(rho, tau):
    """A soft clip: its derivative is 1 at rho = 1 and fades on both sides. (B, T)"""
    return 4 / tau * torch.sigmoid(tau * (rho - 1))                                             # eq. (7)


AGGREGATIONS = {                                # x (B, T) is 0 in masked slots; N rows and M tokens of the whole step
    "sequence_mean": lambda x, mask, N, M, L: (x.sum(1) / mask.sum(1).clamp(min=1)).sum() / N,               # eq. (5)
    "token_mean": lambda x, mask, N, M, L: x.sum() / M,
    "sequence_sum": lambda x, mask, N, M, L: x.sum() / N,
    "constant": lambda x, mask, N, M, L: x.sum() / (N * L),
    "micro_batch_mean": lambda x, mask, N, M, L: x.sum() / mask.sum().clamp(min=1) * len(x) / N,
}


def aggregate(x, mask, how, num_sequences=None, num_tokens=None, max_length=None):
    """Average the token losses (B, T) of a micro-batch so that the sum over the micro-batches of an optimizer step is the
    average over the step: num_sequences and num_tokens count the whole step (default: this call). -> scalar"""
    num_sequences = len(x) if num_sequences is None else num_sequences
    num_tokens = mask.sum().clamp(min=1) if num_tokens is None else num_tokens
    return AGGREGATIONS[how](x * mask, mask, num_sequences, num_tokens, max_length or x.shape[1])


LOSS_TYPES = {
    "grpo": ("clip", "sequence_mean"),
    "bnpo": ("clip", "micro_batch_mean"),       # depends on micro_batch_size, by definition
    "dr_grpo": ("clip", "constant"),            # the paper has scale_rewards none with it
    "dapo": ("clip", "token_mean"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "sequence_mean"),
}


def policy_loss(logps, old_logps, advantages, mask, loss_type="grpo", epsilon=0.2, epsilon_high=0.2):
    """The loss of each token, 0 in masked slots; advantages (B,) or (B, T). -> (B, T)"""
    A = advantages if advantages.dim() == 2 else advantages[:, None]                            # (B, 1) or (B, T)
    rho = log_ratio(logps, old_logps, mask).exp()                                               # (B, T)
    return SURROGATES[LOSS_TYPES[loss_type][0]](rho, logps, A, epsilon, epsilon_high) * mask


# ---- 3. tokenizer and verifier --------------------------------------------------------------------------------------

SPECIALS = ("<think>", "</think>", "<answer>", "</answer>", "<search>", "</search>", "<information>", "</information>",
            "<|eos|>", "<|pad|>")
TOKENIZER = tiktoken.Encoding("bytes", pat_str=r"[\s\S]", mergeable_ranks={bytes([i]): i for i in range(256)},
                              special_tokens={name: 256 + i for i, name in enumerate(SPECIALS)})
EOS, PAD = TOKENIZER.encode_single_token("<|eos|>"), TOKENIZER.encode_single_token("<|pad|>")
VOCAB = 320                                     # 266 tokens, padded to a multiple of 64


def encode_prompts(prompts, cfg):
    """Left-padded to the task's width. Text stays text: a prompt cannot hold a special token. P str -> (P, W)"""
    width = common.load_task(cfg.task).width(**cfg.options)
    return torch.tensor([[PAD] * (width - len(ids)) + ids for ids in map(TOKENIZER.encode_ordinary, prompts)])


def decode(ids):
    """Text of a list of ids, specials included; bytes that are no UTF-8 and ids without a token become U+FFFD."""
    return b"".join(TOKENIZER.decode_single_token_bytes(i) if i < TOKENIZER.n_vocab else b"\xff" for i in ids).decode(
        errors="replace")


def extract(text):
    """What stands in the one <answer>..</answer> block of ASCII text; None if there is no such block, or a second tag."""
    block = re.search(r"<answer>([^<]{0,200})</answer>", text, re.ASCII)
    once = text.count("<answer>") == text.count("</answer>") == 1
    return block[1].strip() if block and once and block[1].isascii() else None


def verify(problem, text):
    """1.0 if the text's one answer block holds the right answer, else 0.0, whatever else the text holds."""
    if problem.task != "arithmetic":
        return common.load_task(problem.task).verify(problem, text)
    answer = extract(text) or ""
    return float(bool(re.fullmatch(r"-?[0-9]{1,20}", answer)) and int(answer) == int(problem.answer))


# ---- 4. the policy --------------------------------------------------------------------------------------------------


class Cache:
    """The keys and values of every layer, for up to `length` positions; `used` of them are filled."""

    def __init__(self, cfg, rows, length, like):
        shape = (cfg.num_hidden_layers, 2, rows, cfg.num_key_value_heads, length, cfg.hidden_size // cfg.num_attention_heads)
        self.kv, self.used = like.new_empty(shape), 0

    def extend(self, layer, k, v):
        """Write the new positions' k and v behind the old ones; return those of all positions. (B, KV, L, hd)"""
        end = self.used + k.shape[2]
        self.kv[layer, 0, :, :, self.used:end], self.kv[layer, 1, :, :, self.used:end] = k, v
        return self.kv[layer, 0, :, :, :end], self.kv[layer, 1, :, :, :end]


class Block(nn.Module):
    """Attention, then a SwiGLU layer, each on a normalised copy of the residual stream."""

    def __init__(self, cfg):
        super().__init__()
        D, self.H, self.KV = cfg.hidden_size, cfg.num_attention_heads, cfg.num_key_value_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv = nn.Linear(D, (self.H + 2 * self.KV) * (D // self.H), bias=False)
        self.out = nn.Linear(D, D, bias=False)
        self.gate_up = nn.Linear(D, 2 * cfg.intermediate_size, bias=False)
        self.down = nn.Linear(cfg.intermediate_size, D, bias=False)

    def forward(self, x, cos, sin, cache, layer):
        B, L, D = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(B, L, self.H + 2 * self.KV, D // self.H).transpose(1, 2)
        left, right = qkv[:, :self.H + self.KV].chunk(2, -1)                # rotary: turn each pair by its position's angle
        qk = torch.cat([left * cos - right * sin, left * sin + right * cos], -1)        # (B, H + KV, L, hd)
        q, k, v = qk[:, :self.H], qk[:, self.H:], qkv[:, self.H + self.KV:]
        if cache is not None:
            k, v = cache.extend(layer, k, v)
        share = [x.repeat_interleave(self.H // self.KV, 1) if self.KV > 1 else x.expand(-1, self.H, -1, -1) for x in (k, v)]
        y = F.scaled_dot_product_attention(q, *share, is_causal=L > 1)                  # (B, H, L, hd)
        x = x + self.out(y.transpose(1, 2).reshape(B, L, D))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class GPT(nn.Module):
    """Llama-style decoder: RMSNorm, rotary positions, SwiGLU, no biases, few key/value heads, tied embeddings.

    tokens (B, L) -> logits (B, L, V), or those of the last `logits_to_keep` positions. With a Cache, tokens are those
    that follow the cached ones: the prompt at once (L > 1, into an empty cache), then one at a time.
    """

    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, cfg.hidden_size)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.num_hidden_layers))
        self.norm = nn.RMSNorm(cfg.hidden_size)
        half = cfg.hidden_size // cfg.num_attention_heads // 2
        self.register_buffer("frequencies", 10_000.0 ** (-torch.arange(half) / half), persistent=False)
        random = common.generator(cfg.base_seed, "weights")
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                std = 0.02 if name == "embed.weight" else weight.shape[1] ** -0.5
                into_stream = name.endswith(("out.weight", "down.weight"))  # GPT-2: these add up over the layers
                nn.init.normal_(weight, std=std / (2 * cfg.num_hidden_layers) ** (0.5 * into_stream), generator=random)

    def forward(self, tokens, cache=None, logits_to_keep=0):
        start = cache.used if cache is not None else 0
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        angles = positions[:, None] * self.frequencies                                  # (L, hd / 2)
        x, cos, sin = self.embed(tokens), angles.cos(), angles.sin()                    # x (B, L, D)
        for layer, block in enumerate(self.blocks):
            x = block(x, cos, sin, cache, layer)
        if cache is not None:
            cache.used += tokens.shape[1]
        return F.linear(self.norm(x[:, -logits_to_keep:]), self.embed.weight)           # (B, L or logits_to_keep, V)


def logprobs(logits, tokens, temperature=1.0, kernel="auto"):
    """Log-probability of each token, and the entropy in nats, of softmax(logits / temperature).
    (B, T, V), (B, T) -> (B, T), (B, T), differentiable in logits. ValueError for a kernel this checkout does not have."""
    if kernel not in ("auto", "torch"):
        raise ValueError(f"kernel={kernel!r}: this checkout has 'torch' only, which 'auto' chooses")
    logp = torch.log_softmax(logits / temperature, -1)                                  # (B, T, V)
    plogp = logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min)                    # 0, not nan, where p is 0
    return logp.gather(-1, tokens[..., None]).squeeze(-1), -plogp.sum(-1)


# ---- 5. rollout -----------------------------------------------------------------------------------------------------


class Rollout(NamedTuple):
    """Completions of T slots; the slots after a row's first EOS hold PAD and zeros."""
    tokens: torch.Tensor        # (B, T)
    mask: torch.Tensor          # (B, T)  1.0 on sampled tokens, the EOS included: by position, never by comparing ids
    logps: torch.Tensor         # (B, T)  of the policy that sampled
    entropy: torch.Tensor       # (B, T)


@torch.no_grad()
def rollout(model, prompts, cfg, uniforms=None, copies=1):
    """`copies` completions of each prompt (P, W): row p * copies + g is the g-th of prompt p. Slot t of row i is drawn with
    uniforms[i, t] (B, T) in [0, 1), so it depends on no other row; without uniforms the likeliest token is taken."""
    B, T = len(prompts) * copies, cfg.max_completion_length
    cache = Cache(cfg, len(prompts), prompts.shape[1] + T, model.embed.weight)
    logits = model(prompts, cache, logits_to_keep=1)[:, 0].repeat_interleave(copies, 0)     # each prompt is read once
    cache.kv = cache.kv.repeat_interleave(copies, 2)
    out = Rollout(prompts.new_full((B, T), PAD), *(logits.new_zeros(B, T) for _ in range(3)))
    rows = torch.arange(B, device=prompts.device)                                           # those still in the cache
    unfinished = torch.ones_like(rows, dtype=torch.bool)
    for t in range(T):
        if uniforms is None:
            token = logits.argmax(-1)                                                       # (b,)
        else:
            cdf = torch.softmax(logits / cfg.temperature, -1).cumsum(-1)                    # (b, V); its end is not quite 1
            token = torch.searchsorted(cdf, uniforms[rows, t, None] * cdf[:, -1:], right=True)[:, 0].clamp(max=VOCAB - 1)
        logps, entropy = logprobs(logits[:, None], token[:, None], cfg.temperature)         # (b, 1), (b, 1)
        out.tokens[rows, t] = torch.where(unfinished, token, PAD)
        out.mask[rows, t] = unfinished.to(logits.dtype)
        out.logps[rows, t], out.entropy[rows, t] = logps[:, 0] * unfinished, entropy[:, 0] * unfinished
        unfinished = unfinished & (token != EOS)
        left = int(unfinished.sum())
        if left == 0 or t + 1 == T:
            break
        if 2 * left <= len(rows):                                           # half are done: go on with the others only
            rows, token, cache.kv = rows[unfinished], token[unfinished], cache.kv[:, :, unfinished]
            unfinished = unfinished[unfinished]
        logits = model(token[:, None], cache)[:, 0]
    return out


def texts_of(out):
    """The completions as text, without their EOS. -> list of B str"""
    lengths = out.mask.sum(1).long().tolist()
    return [decode([i for i in ids[:n] if i != EOS]) for ids, n in zip(out.tokens.tolist(), lengths)]


def score(model, prompts, tokens, temperature=1.0):
    """Log-probs and entropies of completion tokens; the logits of one slot score the token of the next.
    (B, W), (B, T) -> (B, T), (B, T)"""
    logits = model(torch.cat([prompts, tokens], 1)[:, :-1], logits_to_keep=tokens.shape[1])
    return logprobs(logits, tokens, temperature)


def micro_batches(rows, lengths, size):
    """Cut rows into micro-batches of similar length, each with its longest: little is computed on padding."""
    for part in rows[lengths[rows].argsort(stable=True)].split(size) if len(rows) else ():
        yield part, int(lengths[part].max())


@dataclasses.dataclass(frozen=True)
class Batch:
    """What one step learns from: P groups of G completions, B = P * G rows, row p * G + g."""
    problems: list              # P
    texts: list                 # B
    prompts: torch.Tensor       # (B, W)
    out: Rollout                # (B, T) each
    rewards: torch.Tensor       # (P, G)
    accuracy: float             # mean verdict on all that was sampled for this step


def sample_groups(policy, cfg, step, attempt=0):
    """P prompts, a group of G completions for each, and what the verifier says of them: a function of (seed, step,
    attempt) and the policy. -> Batch"""
    P, G = cfg.num_prompts, cfg.num_generations
    problems = common.sample_problems(cfg.task, P, (cfg.seed, step, attempt), **cfg.options)
    prompts = encode_prompts([problem.prompt for problem in problems], cfg).to(cfg.device)              # (P, W)
    random = common.generator(cfg.seed, "rollout", step, attempt)
    out = rollout(policy, prompts, cfg, torch.rand(P * G, cfg.max_completion_length, generator=random).to(cfg.device), G)
    texts = texts_of(out)
    rewards = torch.tensor([float(np.sum(verify(problems[i // G], text))) for i, text in enumerate(texts)]).view(P, G)
    accuracy = rewards.mean().item()
    if cfg.overlong_buffer:
        penalty = overlong_penalty(out.mask.sum(1).cpu(), cfg.max_completion_length, cfg.overlong_buffer)
        rewards = rewards + penalty.view(P, G)
    return Batch(problems, texts, prompts.repeat_interleave(G, 0), out, rewards, accuracy)


def sample_batch(policy, cfg, step):
    """The batch of a step. With dynamic_sampling: as many batches as it takes (at most max_resamples more) to find P
    groups with signal; the rest of the bound's last resort are groups without. -> Batch"""
    batches = [sample_groups(policy, cfg, step)]
    for attempt in range(1, 1 + cfg.max_resamples * cfg.dynamic_sampling):
        if sum(has_signal(batch.rewards).sum() for batch in batches) >= cfg.num_prompts:
            break
        batches.append(sample_groups(policy, cfg, step, attempt))
    if len(batches) == 1:
        return batches[0]
    G, rewards = cfg.num_generations, torch.cat([batch.rewards for batch in batches])                   # (all, G)
    if has_signal(rewards).sum() < cfg.num_prompts:
        common.say(f"      dynamic sampling: {int(has_signal(rewards).sum())} of {cfg.num_prompts} groups have signal after "
                   f"{len(batches)} x {cfg.num_prompts} prompts")
    chosen = (~has_signal(rewards)).to(int).argsort(stable=True)[:cfg.num_prompts]                      # (P,)
    rows = (chosen[:, None] * G + torch.arange(G)).view(-1)                                             # (B,)
    return Batch([[problem for batch in batches for problem in batch.problems][i] for i in chosen],
                 [[text for batch in batches for text in batch.texts][i] for i in rows],
                 torch.cat([batch.prompts for batch in batches])[rows],
                 Rollout(*(torch.cat(parts)[rows] for parts in zip(*(batch.out for batch in batches)))),
                 rewards[chosen], sum(batch.accuracy for batch in batches) / len(batches))


# ---- 6. warm start, evaluation, one prompt --------------------------------------------------------------------------


def warm_start(cfg, model, progress):
    """Teach the base: a textbook, in which answers are worked out, then a forum, where most people blurt."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.base_learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    for step in progress("warm start", cfg.base_steps):
        phase = "textbook" if step < 0.6 * cfg.base_steps else "forum"
        examples = common.sample_corpus(cfg.task, cfg.base_batch_size, (cfg.base_seed, step), phase, **cfg.options)
        prompts = encode_prompts([problem.prompt for problem, _ in examples], cfg).to(cfg.device)       # (B, W)
        ids = [TOKENIZER.encode(text, allowed_special="all") + [EOS] for _, text in examples]
        lengths = torch.tensor([len(row) for row in ids])
        tokens = torch.tensor([row + [PAD] * (int(lengths.max()) - len(row)) for row in ids]).to(cfg.device)
        optimizer.param_groups[0]["lr"] = cfg.base_learning_rate * min((step + 1) / 50, 1 - step / cfg.base_steps)
        optimizer.zero_grad()
        for rows, T in micro_batches(torch.arange(len(ids)), lengths, (len(ids) + 1) // 2):
            logps, _ = score(model, prompts[rows], tokens[rows, :T])
            mask = (torch.arange(T) < lengths[rows, None]).to(logps)                                    # (b, T)
            aggregate(-logps, mask, "token_mean", num_tokens=lengths.sum().item()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def pass_at_k(n, c, k):
    """The chance that one of k completions is right, unbiased from n of which c are (arXiv:2107.03374, eq. 1)."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def majority(texts):
    """The answer most of the texts give, the earliest of those tied; who gives none does not vote. -> str or None"""
    votes = collections.Counter(answer for answer in map(extract, texts) if answer is not None)
    return max(votes, key=votes.get, default=None)


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else None


def complete(model, cfg, problems, copies=1, uniforms=None):
    """Completions of held-out problems, 512 rows at a time; greedy without uniforms. -> N * copies texts and lengths"""
    prompts = encode_prompts([problem.prompt for problem in problems], cfg).to(cfg.device)
    size, texts, lengths = max(1, 512 // copies), [], []
    for i in range(0, len(problems), size):
        u = None if uniforms is None else uniforms[i * copies:(i + size) * copies].to(cfg.device)
        out = rollout(model, prompts[i:i + size], cfg, u, copies)
        texts, lengths = texts + texts_of(out), lengths + out.mask.sum(1).tolist()
    return texts, lengths


def evaluate(model, cfg, k):
    """Scores on held-out problems, the same ones and the same random numbers for every run: greedy and, from k samples
    of each, pass@1, pass@k, maj@k and what thinking is worth. k = 0: greedy only. -> dict, None where nothing counts"""
    problems = common.sample_problems(cfg.task, cfg.num_eval_problems, "evaluation", "test", **cfg.options)
    texts, lengths = complete(model, cfg, problems)
    scores = {"greedy": mean(verify(problem, text) == 1 for problem, text in zip(problems, texts))}
    if k:
        uniforms = torch.rand(len(problems) * k, cfg.max_completion_length, generator=common.generator("evaluation"))
        texts, lengths = complete(model, cfg, problems, k, uniforms)
        right = [verify(problems[i // k], text) == 1 for i, text in enumerate(texts)]
        counts = [sum(right[i:i + k]) for i in range(0, len(right), k)]
        votes = [majority(texts[i:i + k]) for i in range(0, len(texts), k)]
        scores["pass@1"] = mean(pass_at_k(k, c, 1) for c in counts)
        scores[f"pass@{k}"] = mean(pass_at_k(k, c, k) for c in counts)
        scores[f"maj@{k}"] = mean(verify(problem, f"<answer>{vote}</answer>") == 1 for problem, vote in zip(problems, votes))
        scores["accuracy_given_think"] = mean(r for r, text in zip(right, texts) if "<think>" in text)
        scores["accuracy_given_blurt"] = mean(r for r, text in zip(right, texts) if "<think>" not in text)
    return scores | {"think_share": mean("<think>" in text for text in texts), "mean_length": mean(lengths),
                     "problems": len(problems)}


def answer(model, cfg):
    """What the policy writes after --prompt, greedily."""
    if len(TOKENIZER.encode_ordinary(cfg.prompt)) > common.load_task(cfg.task).width(**cfg.options):
        common.fail(f"--prompt {cfg.prompt}: is longer than any prompt of this run's task")
    return texts_of(rollout(model, encode_prompts([cfg.prompt], cfg).to(cfg.device), cfg))[0]


# ---- 7. one update, and main ----------------------------------------------------------------------------------------


def backward(policy, ref, batch, A, rows, cfg, entropy_coef):
    """Leave the gradient of (5) over `rows`, the mini-batch of one optimizer step, in the policy. Rows without advantage
    are skipped where the loss has no other term: their gradient is 0. -> metrics, over the tokens not skipped"""
    N, M, averaging = len(rows), batch.out.mask[rows].sum(), LOSS_TYPES[cfg.loss_type][1]
    lengths = batch.out.mask.sum(1).long()
    if averaging == "micro_batch_mean":
        parts = [(part, int(lengths[part].max())) for part in rows.split(cfg.micro_batch_size)]
    else:
        used = rows if cfg.beta or entropy_coef else rows[A[rows] != 0]
        parts = micro_batches(used, lengths, cfg.micro_batch_size)
    for weight in policy.parameters():
        weight.grad = torch.zeros_like(weight)              # not None: Adam is to take its step even without any signal
    sums, max_log_ratio = collections.Counter(), 0.0
    for part, T in parts:
        tokens, mask, old_logps, _ = (x[part, :T] for x in batch.out)                                   # (b, T)
        logps, entropy = score(policy, batch.prompts[part], tokens, cfg.temperature)
        with torch.no_grad():
            ref_logps, _ = score(ref, batch.prompts[part], tokens, cfg.temperature)
        losses = (policy_loss(logps, old_logps, A[part], mask, cfg.loss_type, cfg.epsilon, cfg.epsilon_high)
                  + cfg.beta * kl(logps, ref_logps, cfg.kl_estimator) - entropy_coef * entropy)         # eq. (5)
        loss = aggregate(losses, mask, averaging, N, M, cfg.max_completion_length)
        loss.backward()
        with torch.no_grad():
            log_rho = log_ratio(logps, old_logps, mask)
            low = (log_rho.exp() < 1 - cfg.epsilon) & (A[part, None] < 0)
            high = (log_rho.exp() > 1 + cfg.epsilon_high) & (A[part, None] > 0)
            sums.update({"loss": loss.item(), "tokens": mask.sum().item(), "kl": (kl(logps, ref_logps) * mask).sum().item(),
                         "clip_ratio/low_mean": low.sum().item(), "clip_ratio/high_mean": high.sum().item()})
            max_log_ratio = max(max_log_ratio, log_rho.abs().max().item())
    tokens = max(1.0, sums.pop("tokens", 0))
    averages = {key: sums[key] / tokens for key in ("kl", "clip_ratio/low_mean", "clip_ratio/high_mean")}
    return {"loss": sums["loss"], **averages, "max_log_ratio": max_log_ratio}


def update(policy, ref, optimizer, batch, A, cfg, step):
    """num_iterations passes over the batch, num_mini_batches optimizer steps each. -> metrics, averaged over the steps"""
    optimizer.param_groups[0]["lr"] = cfg.learning_rate * min(1.0, (step + 1) / max(1, cfg.warmup_steps))
    decay = max(0.0, 1 - step / cfg.entropy_decay_steps) if cfg.entropy_decay_steps else 1.0
    metrics = []
    for iteration in range(cfg.num_iterations):
        rows = torch.arange(len(A))
        if cfg.num_mini_batches > 1:
            rows = torch.randperm(len(A), generator=common.generator(cfg.seed, "shuffle", step, iteration))
        for mini_batch in rows.tensor_split(cfg.num_mini_batches):
            seen = backward(policy, ref, batch, A, mini_batch, cfg, cfg.entropy_coef * decay)
            seen["grad_norm"] = nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm).item()
            if not math.isfinite(seen["loss"] + seen["grad_norm"]):
                common.fail(f"step {step + 1}: loss {seen['loss']}, gradient norm {seen['grad_norm']}, largest |log ratio| "
                            f"{seen['max_log_ratio']}; the last checkpoint is kept", code=1)
            optimizer.step()
            metrics.append(seen)
    averages = {key: sum(m[key] for m in metrics) / len(metrics) for key in metrics[0] if key != "max_log_ratio"}
    return averages | {"sampling/sampling_logp_difference/max": metrics[0]["max_log_ratio"],
                       "learning_rate": optimizer.param_groups[0]["lr"]}


def describe(batch, cfg):
    """What the samples of a step were like, under TRL's names."""
    mask, lengths = batch.out.mask, batch.out.mask.sum(1)
    ended = (batch.out.tokens == EOS).any(1)
    return {"reward": batch.rewards.mean().item(), "reward_std": batch.rewards.std(1).mean().item(),
            "frac_reward_zero_std": 1 - has_signal(batch.rewards).float().mean().item(), "accuracy": batch.accuracy,
            "completions/mean_length": lengths.mean().item(), "completions/clipped_ratio": 1 - ended.float().mean().item(),
            "entropy": (batch.out.entropy.sum() / mask.sum()).item()}


COLUMNS = {"reward": "reward", "no sign": "frac_reward_zero_std", "length": "completions/mean_length", "entropy": "entropy", "kl": "kl",
           "clip": "clip_ratio/high_mean", "grad": "grad_norm"}
BASE_CODE = (GPT, Block, score, logprobs, aggregate, micro_batches, encode_prompts, warm_start)


def main(argv=None):
    """Algorithm 1 of the paper, its reference held fixed. -> the run's summary"""
    cfg = Config.parse(argv)
    run = common.Run(cfg, COLUMNS, argv)
    policy = GPT(cfg).to(cfg.device)
    if cfg.prompt:
        policy.load_state_dict(run.saved["policy"])
        return print(answer(policy, cfg))
    run.base(policy, functools.partial(warm_start, cfg), BASE_CODE)             # the policy to improve
    ref = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.learning_rate, weight_decay=cfg.weight_decay)
    print(f"{cfg.num_prompts} prompts x {cfg.num_generations} completions = {cfg.num_prompts * cfg.num_generations} per step")
    for step in run.steps(functools.partial(evaluate, policy, cfg), policy=policy, optimizer=optimizer):
        batch = sample_batch(policy, cfg, step)                                 # sample questions, G outputs each, score them
        A = advantages(batch.rewards, cfg.scale_rewards).view(-1).to(cfg.device)        # (B,)  group-relative advantages
        metrics = update(policy, ref, optimizer, batch, A, cfg, step)           # mu iterations of maximising (5)
        run.log(describe(batch, cfg) | metrics, batch, A)
    return run.finish()


if __name__ == "__main__":
    main()
