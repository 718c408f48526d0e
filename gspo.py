"""GSPO: group sequence policy optimization (arXiv:2507.18071).

GRPO with one change. The reward judges a whole answer, so the ratio is that of the whole answer, too: the
geometric mean of its tokens' ratios, and one clip for all of them.

  A_i   = (r_i - mean(r)) / (std(r) + 1e-4)                                          (1)
  s_i   = (pi(o_i | q) / pi_old(o_i | q))^(1/|o_i|) = exp(mean_t log rho_t)          (2)
  L_i   = -min(s_i A, clip(s_i, 1 - eps_low, 1 + eps_high) A)                        (3)
  KL_t  = pi_ref / pi - log(pi_ref / pi) - 1                 (k3: samples of pi)     (4)
  L     = 1/B sum_i 1/|o_i| sum_t (L_i + beta KL_t - c_H H_t)                        (5)

rho_t is the ratio of one token, as in grpo.py, H_t the policy's entropy. Being a mean over an answer, log s_i
stays near 0, and so the clip is 700 times as narrow. GSPO-token lets advantages differ within an answer:

  s_t   = sg(s_i) pi(o_t | q, o_<t) / sg(pi(o_t | q, o_<t))                          (9)

has the value of s_i, and where A is constant its gradient. The surrogates and averages of LOSS_TYPES, dynamic
sampling and the overlong penalty are those of grpo.py, here with the ratio of the sequence:

  L_t   = -sg(min(s, 1 + eps_high)) A log pi(o_t | q, o_<t)               (CISPO)    (6)
  L_t   = -4/tau sigmoid(tau (s - 1)) A,     tau = 1 if A > 0, else 1.05   (SAPO)    (7)
  R_i   = min(0, max(-1, (L - c - n_i) / c))                                         (8)

Departs from the paper: a verifier, no reward model; std with ddof 1, plus 1e-4, as in TRL (the paper does not
say); KL_t has no ratio, so that from a batch's second step on its samples are pi_old's, as in GRPO's paper;
dynamic sampling looks at rewards, penalty included, where DAPO looks at right and wrong.

  python gspo.py --task arithmetic

trains the base of grpo.py (greedy accuracy 0.2) to think before it answers (0.99), in half a minute on a CPU.
"""
import copy
import dataclasses
import math
import re
from types import SimpleNamespace
from typing import NamedTuple

import tiktoken
import torch
from torch import nn

import common
from common import flag, mean

# P prompts a step, G completions of each, B = P * G rows (row p * G + g), b of them at work; W prompt tokens,
# T completion tokens, V vocabulary, D width, H heads, KV key/value heads, hd width of a head.

# ---- 1. configuration -----------------------------------------------------------------------------------

LOSS_TYPES = {                          # the surrogate for (3), and the averaging of (5)
    "grpo": ("clip", "sequence_mean"),
    "dr_grpo": ("clip", "constant"),    # in the paper with --scale_rewards none
    "dapo": ("clip", "token_mean"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "sequence_mean"),
    "bnpo": ("clip", "micro_batch_mean")}


@dataclasses.dataclass(frozen=True)
class Config(common.Config):
    loss_type: str = flag("grpo", "surrogate and averaging", choices=tuple(LOSS_TYPES))
    scale_rewards: str = flag("group", "whose std divides in (1)", choices=("group", "batch", "none"))
    importance_sampling_level: str = flag("sequence", "(2) or (9)", choices=("sequence", "sequence_token"))
    epsilon: float = flag(3e-4, "lower clip range (eps_low)", low=0)
    epsilon_high: float = flag(4e-4, "upper clip range (eps_high); TRL's for CISPO is 1 + this", low=0)
    num_iterations: int = flag(1, "passes over each batch (mu)", low=1)
    beta: float = flag(0.0, "weight of the KL to the base", low=0)
    kl_estimator: str = flag("k3", "estimator of KL_t; (4) is k3", choices=("k1", "k2", "k3"), needs="beta")
    entropy_coef: float = flag(0.0, "weight of the entropy bonus (c_H)", low=0)
    entropy_decay_steps: int = flag(0, "c_H falls linearly to 0 in so many steps; 0: it stays", low=0)
    overlong_buffer: int = flag(0, "buffer of (8) in tokens (c); 0: no penalty", low=0)


# ---- 2. the algorithm -----------------------------------------------------------------------------------

def has_signal(rewards):
    """Which groups have unequal rewards; r - mean(r), being rounded, cannot tell. (P, G) -> (P, 1)"""
    return rewards.amax(1, keepdim=True) > rewards.amin(1, keepdim=True)


def advantages(rewards, scale_rewards="group", eps=1e-4):
    """How much better each completion did than its siblings, exactly 0 among equals. (P, G) -> (P, G)"""
    scale = {"group": rewards.std(1, keepdim=True) + eps, "batch": rewards.std() + eps, "none": 1.0}
    A = (rewards - rewards.mean(1, keepdim=True)) / scale[scale_rewards]                # (P, G)  eq. (1)
    return torch.where(has_signal(rewards), A, 0.0)


def overlong_penalty(lengths, max_length, buffer):
    """0 up to max_length - buffer tokens, then down to -1 at max_length; no buffer: no slope. -> (B,)"""
    return ((max_length - buffer - lengths) / max(buffer, 1)).clamp(-1.0, 0.0)          # (B,)  eq. (8)


def kl(logps, ref_logps, estimator="k3"):
    """Estimates of KL(pi || pi_ref) from samples of pi. (B, T), (B, T) -> (B, T)"""
    x = logps - ref_logps                           # (B, T)
    return {"k3": torch.expm1(-x) + x,              # unbiased, never negative  eq. (4)
            "k2": x.square() / 2,                   # biased; in a loss, given the prefix, has KL's gradient
            "k1": x}[estimator]                     # unbiased; in a loss its gradient is noise


def clipped(log_rho, A, epsilon, epsilon_high):
    """Where (3) is flat: rho has left the range on the side that A pushes it to. (B, T), (B, 1) -> (B, T)"""
    return (A > 0) & (log_rho.exp() > 1 + epsilon_high) | (A < 0) & (log_rho.exp() < 1 - epsilon)


def log_ratio(logps, old_logps, mask, level="sequence"):
    """log s_i in every slot, or log s_t, 0 in masked slots. On fresh samples the value is 0. -> (B, T)"""
    log_rho = torch.where(mask > 0, logps - old_logps.detach(), 0.0)                    # (B, T)
    log_s = log_rho.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)       # (B, 1)  eq. (2)
    if level == "sequence_token":
        log_s = log_s.detach() + log_rho - log_rho.detach()                             # (B, T)  eq. (9)
    return log_s * mask


def policy_loss(logps, old_logps, advantages, mask, loss_type="grpo", epsilon=0.2, epsilon_high=0.2,
                level="sequence"):
    """L_t, 0 in masked slots; advantages are (B,) or (B, T). -> (B, T)"""
    A = advantages if advantages.dim() == 2 else advantages[:, None]                    # (B, 1) or (B, T)
    ratio = log_ratio(logps, old_logps, mask, level).exp()                              # (B, T)
    tau = 1 + 0.05 * (A <= 0).to(A)
    surrogate = {
        "clip": -torch.min(ratio * A, ratio.clamp(1 - epsilon, 1 + epsilon_high) * A),  # eq. (3)
        "cispo": -ratio.clamp(max=1 + epsilon_high).detach() * A * logps,               # eq. (6)
        "sapo": -4 / tau * torch.sigmoid(tau * (ratio - 1)) * A}                        # eq. (7)
    return torch.where(mask > 0, surrogate[LOSS_TYPES[loss_type][0]], 0.0)


def aggregate(x, mask, how, num_sequences=None, num_tokens=None, max_length=None):
    """Average token losses (B, T). num_sequences and num_tokens count the whole optimizer step (default: this
    call), so that its micro-batches, however it is cut, add up to the same gradient. -> scalar"""
    N = len(x) if num_sequences is None else num_sequences
    M = mask.sum().clamp(min=1) if num_tokens is None else num_tokens
    x, lengths = x * mask, mask.sum(1).clamp(min=1)                                     # (B, T), (B,)
    return {"sequence_mean": (x.sum(1) / lengths).sum() / N,                            # GRPO, GSPO
            "token_mean": x.sum() / M,                                                  # PPO, DAPO
            "sequence_sum": x.sum() / N,                                                # REINFORCE, RLOO
            "constant": x.sum() / (N * (max_length or x.shape[1])),                     # Dr. GRPO
            "micro_batch_mean": x.sum() / mask.sum().clamp(min=1) * len(x) / N}[how]    # BNPO: the cut counts


# ---- 3. tokenizer and verifier --------------------------------------------------------------------------

SPECIALS = ("<think>", "</think>", "<answer>", "</answer>", "<search>", "</search>", "<information>",
            "</information>", "<|eos|>", "<|pad|>")
TOKENIZER = tiktoken.Encoding("bytes", pat_str=r"[\s\S]", mergeable_ranks={bytes([i]): i for i in range(256)},
                              special_tokens={name: 256 + i for i, name in enumerate(SPECIALS)})
EOS, PAD, VOCAB = 264, 265, 320                     # the vocabulary is padded to a multiple of 64


def encode_prompts(prompts, cfg):
    """Left-padded to the task's width. A prompt's text is bytes, never a special token. P str -> (P, W)"""
    width = common.load_task(cfg.task).width(**cfg.options)
    rows = [[PAD] * (width - len(ids)) + ids for ids in map(TOKENIZER.encode_ordinary, prompts)]
    return torch.tensor(rows, device=cfg.device)


def decode(ids):
    """The text of a list of ids, special tokens included; what is no UTF-8 or no token becomes U+FFFD."""
    data = (TOKENIZER.decode_single_token_bytes(i) if i < TOKENIZER.n_vocab else b"\xff" for i in ids)
    return b"".join(data).decode(errors="replace")


def extract(text):
    """What the one <answer>..</answer> block of the text holds; None if there is none, or a second tag."""
    once = text.count("<answer>") == text.count("</answer>") == 1
    block = re.search("<answer>([ -~]{1,200})</answer>", text) if once else None        # printable ASCII
    return block[1].strip() if block else None


def verify(problem, text):
    """1.0 if the text's one answer block holds the right answer, else 0.0, whatever the text holds."""
    if problem.task != "arithmetic":
        return common.load_task(problem.task).verify(problem, text)
    number = re.fullmatch("-?[0-9]{1,20}", extract(text) or "")
    return float(number is not None and int(number[0]) == int(problem.answer))


# ---- 4. the policy --------------------------------------------------------------------------------------

class Block(nn.Module):
    """Attention, then a SwiGLU layer; each reads the residual stream normalised and adds to it."""

    def __init__(self, cfg):
        super().__init__()
        D, self.H, self.KV = cfg.hidden_size, cfg.num_attention_heads, cfg.num_key_value_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv = nn.Linear(D, (self.H + 2 * self.KV) * D // self.H, bias=False)
        self.out = nn.Linear(D, D, bias=False)
        self.gate_up = nn.Linear(D, 2 * cfg.intermediate_size, bias=False)
        self.down = nn.Linear(cfg.intermediate_size, D, bias=False)

    def forward(self, x, cos, sin, visible, cache):
        B, L, D = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(B, L, -1, D // self.H).transpose(1, 2)
        qk, v = qkv.split([self.H + self.KV, self.KV], 1)                 # (B, H + KV, L, hd), (B, KV, L, hd)
        left, right = qk.chunk(2, -1)              # rotary: a pair turns by an angle that grows with position
        qk = torch.cat([left * cos - right * sin, left * sin + right * cos], -1)
        q, kv = qk[:, :self.H], torch.stack([qk[:, self.H:], v])            # (B, H, L, hd), (2, B, KV, L, hd)
        if cache is not None:
            kv = cache[self] = torch.cat([cache[self], kv], 3) if self in cache else kv
        q = q.reshape(B, self.KV, -1, D // self.H)               # those that share a key/value head
        y = nn.functional.scaled_dot_product_attention(q, *kv, visible)     # (B, KV, H / KV * L, hd)
        x = x + self.out(y.view(B, self.H, L, -1).transpose(1, 2).reshape(B, L, D))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class GPT(nn.Module):
    """Llama-style decoder: RMSNorm, rotary positions, SwiGLU, no biases, few key/value heads.

    tokens (B, L) -> logits (B, L, V), or of the last `logits_to_keep` positions. A dict `cache` takes up the
    keys and values; `tokens` then go on where it ends: first the whole prompt, then one at a time.
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
            if weight.dim() == 2:                       # out and down add to the stream: smaller, as in GPT-2
                depth = 2 * cfg.num_hidden_layers if name.endswith(("out.weight", "down.weight")) else 1
                std = 0.02 if name == "embed.weight" else (weight.shape[1] * depth) ** -0.5
                nn.init.normal_(weight, std=std, generator=random)

    def hidden(self, tokens, cache=None, keep=0):
        """What the logits are read from, (B, L, D), or of the last `keep` positions."""
        start, L = cache[self.blocks[0]].shape[3] if cache else 0, tokens.shape[1]
        angles = torch.arange(start, start + L).to(tokens)[:, None] * self.frequencies      # (L, hd / 2)
        visible = torch.ones(L, start + L, device=tokens.device).tril(start) > 0        # not what is to come
        visible = visible.repeat(self.blocks[0].H // self.blocks[0].KV, 1) if L > 1 else None
        x, cos, sin = self.embed(tokens), angles.cos(), angles.sin()        # x (B, L, D)
        for block in self.blocks:
            x = block(x, cos, sin, visible, cache)
        return self.norm(x[:, -keep:])

    def forward(self, tokens, cache=None, logits_to_keep=0):
        return nn.functional.linear(self.hidden(tokens, cache, logits_to_keep), self.embed.weight)

    def states(self, prompts, of, tokens):
        """What the tokens (B, T) are read from; row i continues prompt of[i] of (P, W). -> (B, T, D)"""
        (used, of), cache = of.unique(return_inverse=True), {}              # each prompt is read once
        first = self.hidden(prompts[used], cache, keep=1)[of]               # (B, 1, D)
        cache = {block: kv[:, of] for block, kv in cache.items()}
        return torch.cat([first, self.hidden(tokens[:, :-1], cache)], 1) if tokens.shape[1] > 1 else first


def logprobs(logits, tokens, temperature=1.0, kernel="auto"):
    """Log-probability of each token and entropy in nats of softmax(logits / temperature), differentiable.
    (B, T, V), (B, T) -> (B, T), (B, T). ValueError for a kernel that cannot run here."""
    if common.kernels and (fused := common.kernels.choose(kernel, logits.device)):          # in Triton
        return fused(logits, tokens, temperature=temperature)[::2]
    logp = torch.log_softmax(logits / temperature, -1)                      # (B, T, V)
    plogp = logp.exp() * logp.clamp(min=-1e4)                               # 0 where p is 0, not nan
    return logp.gather(-1, tokens[..., None]).squeeze(-1), -plogp.sum(-1)


def score(model, prompts, of, tokens, temperature=1.0, kernel="auto", fused_linear="auto"):
    """logprobs of the completions that `states` reads. (P, W), (B,), (B, T) -> (B, T), (B, T)"""
    hidden = model.states(prompts, of, tokens)                              # (B, T, D)
    if common.kernels and (fused := common.kernels.choose_linear(fused_linear, tokens.numel() * VOCAB)):
        return fused(hidden, model.embed.weight, tokens, temperature=temperature)[::2]
    return logprobs(nn.functional.linear(hidden, model.embed.weight), tokens, temperature, kernel)


def micro_batches(rows, lengths, size, by_length=True):
    """Yield (rows, longest length): of similar length, so that padding costs little, or as they come."""
    rows = rows[lengths[rows].argsort(stable=True)] if by_length else rows
    for part in rows.split(size) if len(rows) else ():
        yield part, int(lengths[part].max())


# ---- 5. rollout -----------------------------------------------------------------------------------------

class Rollout(NamedTuple):
    """Completions in T slots, of which each row uses some; behind them tokens are PAD and the rest is 0."""
    tokens: torch.Tensor        # (B, T)
    mask: torch.Tensor          # (B, T)  1.0 on sampled tokens, the first EOS too; 0.0 on what was inserted
    logps: torch.Tensor         # (B, T)  under the policy that sampled, at the temperature it sampled with
    entropy: torch.Tensor       # (B, T)
    lengths: torch.Tensor       # (B,)    slots used: neither ids nor the mask could tell

    def texts(self):                    # -> B str, without EOS
        rows = zip(self.tokens.tolist(), self.lengths.tolist())
        return [decode([i for i in ids[:n] if i != EOS]) for ids, n in rows]


@torch.no_grad()
def rollout(model, prompts, cfg, copies=1, uniforms=None, problems=()):
    """`copies` completions of each prompt (P, W), side by side. uniforms[i, t] (B, T) draws slot t of row i;
    no row depends on another. Without uniforms the likeliest token is taken. What the environments of the P
    problems say takes the place of what would be sampled. -> Rollout"""
    B, T, cache = len(prompts) * copies, cfg.max_completion_length, {}
    calls = prompts.new_tensor([TOKENIZER.encode_single_token(text) for text in common.tasks.calls(problems)])
    if common.kernels and cfg.kernel != "torch" and prompts.is_cuda and not len(calls):     # as a CUDA graph
        captured = common.kernels.captured_decode()
        out = captured(model, prompts, copies, T, cfg.temperature, uniforms, EOS, PAD, cfg.kernel)
        return Rollout(*out, out[1].sum(1).long())
    logits = model(prompts, cache, logits_to_keep=1)[:, 0].repeat_interleave(copies, 0)  # each is read once
    cache = {block: kv.repeat_interleave(copies, 1) for block, kv in cache.items()}
    out = Rollout(prompts.new_full((B, T), PAD), *logits.new_zeros(3, B, T), prompts.new_full((B,), T))
    rows = torch.arange(B, device=prompts.device)                           # (b,) those in the cache
    active = torch.ones_like(rows, dtype=torch.bool)                        # (b,) no EOS yet
    queues = [[] for _ in range(B)]                                         # what is still to be inserted
    for t in range(T):
        if uniforms is None:
            token = logits.argmax(-1)                                       # (b,)
        else:                                                     # inverse CDF, which does not end at quite 1
            cdf = torch.softmax(logits / cfg.temperature, -1).cumsum(-1)    # (b, V)
            token = torch.searchsorted(cdf, uniforms[rows, t, None] * cdf[:, -1:], right=True)
            token = token[:, 0].clamp(max=VOCAB - 1)                        # (b,)
        own = torch.ones_like(active)                                       # (b,) sampled, not inserted
        if any(queues):
            said = rows.new_tensor([queues[i].pop(0) if queues[i] else -1 for i in rows.tolist()])
            own, token = said < 0, torch.where(said < 0, token, said)
        logps, entropy = logprobs(logits[:, None], token[:, None], cfg.temperature, cfg.kernel)     # (b, 1)
        out.tokens[rows, t] = torch.where(active, token, PAD)
        for slots, value in zip(out[1:4], (own | (cfg.mask_tool_tokens == "no"), logps[:, 0], entropy[:, 0])):
            slots[rows, t] = (value * active).to(slots)
        ends, asks = active & own & (token == EOS), active & own & torch.isin(token, calls)
        out.lengths[rows[ends]] = t + 1
        active = active & ~ends
        for i in rows[asks].tolist():
            text = common.tasks.respond(problems[i // copies], decode(out.tokens[i, :t + 1].tolist()))
            queues[i] = TOKENIZER.encode(text, allowed_special="all")
        left = int(active.sum())
        if left == 0 or t + 1 == T:
            return out
        if 2 * left <= len(rows):                                       # half are done: go on with the others
            cache = {block: kv[:, active] for block, kv in cache.items()}
            rows, token, active = rows[active], token[active], active[active]
        logits = model(token[:, None], cache)[:, 0]                         # (b, V)


def sample_batch(policy, cfg, step, weights=None, split="train", penalty=torch.zeros_like):
    """What a step learns from: P prompts, by the curriculum's `weights`, G completions of each, and rewards,
    with penalty(lengths (P, G)). A function of policy, seed, step and these. -> namespace, see the end"""
    P, G, T = cfg.num_prompts, cfg.num_generations, cfg.max_completion_length
    prompts, outs, rows, verdicts = [], [], [], []
    for attempt in range(1 + cfg.dynamic_sampling):                         # until P groups have signal
        some = common.sample_problems(cfg.task, P, (cfg.seed, step, attempt), split, weights, **cfg.options)
        prompts.append(encode_prompts([problem.prompt for problem in some], cfg))               # (P, W)
        uniforms = torch.rand(P * G, T, generator=common.generator(cfg.seed, "rollout", step, attempt))
        outs.append(rollout(policy, prompts[-1], cfg, G, uniforms.to(cfg.device), some))
        rows += [(some[i // G], text) for i, text in enumerate(outs[-1].texts())]
        verdicts += [verify(*row) for row in rows[-P * G:]]
        rewards = [common.tasks.reward(cfg.reward, step, *row, v) for row, v in zip(rows, verdicts)]
        lengths = torch.cat([out.mask.sum(1) for out in outs]).cpu().view(-1, G)
        rewards = torch.tensor(rewards).view(-1, G) + penalty(lengths)      # (all, G)
        signal = has_signal(rewards)[:, 0]                                  # (all,)
        if signal.sum() >= P:
            break
    right = torch.tensor([common.tasks.is_right(row[0], v) for row, v in zip(rows, verdicts)]).view(-1, G)
    kept = signal.int().argsort(descending=True, stable=True)[:P].sort()[0]                     # (P,)
    chosen = (kept[:, None] * G + torch.arange(G)).view(-1)                 # (B,)
    out = Rollout(*(torch.cat(slots)[chosen] for slots in zip(*outs)))
    return SimpleNamespace(
        problems=[rows[p * G][0] for p in kept], prompts=torch.cat(prompts)[kept],              # P, (P, W)
        of=torch.arange(P * G) // G, out=out, cut=(out.tokens != EOS).all(1), decode=decode,    # (B,), (B,)
        texts=[rows[i][1] for i in chosen], verdicts=[verdicts[i] for i in chosen],             # B, B
        rewards=rewards[kept], right=right[kept], accuracy=mean(right.view(-1).tolist()))   # (P, G), (P, G)


# ---- 6. warm start and evaluation -----------------------------------------------------------------------

def warm_start(model, cfg, progress):
    """Make the base: a textbook, which works answers out, then a forum, where most blurt. The matrices learn
    by Muon (kellerjordan.github.io/posts/muon), which takes half as many batches here as AdamW alone."""
    matrices = [weight for block in model.blocks for weight in block.parameters() if weight.dim() == 2]
    others = [weight for weight in model.parameters() if all(weight is not matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, weight_decay=0.0)
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)
    for step in progress("warm start", range(cfg.base_steps)):
        lr = cfg.base_learning_rate * min((step + 1) / 50, 1 - step / cfg.base_steps)
        phase = "textbook" if step < cfg.textbook * cfg.base_steps else "forum"
        problems, texts = zip(*common.sample_corpus(
            cfg.task, cfg.base_batch_size, (cfg.base_seed, step), phase, **cfg.options))
        prompts = encode_prompts([problem.prompt for problem in problems], cfg)             # (B, W)
        ids = [TOKENIZER.encode(text, allowed_special="all") + [EOS] for text in texts]
        lengths = torch.tensor([len(row) for row in ids])
        tokens = torch.tensor([row + [PAD] * (max(lengths) - len(row)) for row in ids], device=cfg.device)
        told = (tokens == EOS - 1) | ((tokens == EOS - 2).cumsum(1) > (tokens == EOS - 1).cumsum(1))
        both, W = torch.cat([prompts, tokens], 1), prompts.shape[1]
        model.zero_grad()
        for rows, T in micro_batches(torch.arange(len(ids)), lengths, (len(ids) + 1) // 2):
            logps, _ = logprobs(model(both[rows, :W + T - 1], logits_to_keep=T), tokens[rows, :T])   # (b, T)
            mask = (torch.arange(T) < lengths[rows, None]).to(told) & ~told[rows, :T]       # (b, T)
            (-(logps * mask.to(logps)).sum() / lengths.sum().item()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"] = 5 * lr, lr
        muon.step(), adamw.step()


def evaluate(model, cfg, k, progress=lambda label, steps: steps):
    """Complete the held-out problems, the same and by the same uniforms for every run: k samples of each, for
    k = 0 the likeliest tokens. -> what tools/scores.py makes of them"""
    problems = common.sample_problems(cfg.task, cfg.num_eval_problems, "evaluation", "test", **cfg.options)
    prompts, random = encode_prompts([p.prompt for p in problems], cfg), common.generator("evaluation")
    texts, lengths, T = [], [], cfg.max_completion_length
    for i in progress("evaluation", range(0, len(problems), 64)):
        some = problems[i:i + 64]
        uniforms = torch.rand(len(some) * k, T, generator=random).to(cfg.device) if k else None
        out = rollout(model, prompts[i:i + 64], cfg, max(k, 1), uniforms, some)
        texts, lengths = texts + out.texts(), lengths + out.mask.sum(1).tolist()
    return common.tools.measure(problems, texts, lengths, k, extract, verify)


# ---- 7. the update, and main ----------------------------------------------------------------------------

def backward(policy, batch, A, rows, cfg, entropy_coef):
    """Leave in the policy the gradient of (5) over `rows`, those of one optimizer step. Rows of zero
    advantage are skipped if nothing else moves them. -> metrics of the rest"""
    mask, averaging = batch.out.mask, LOSS_TYPES[cfg.loss_type][1]
    signal, lengths = (A[rows].view(len(rows), -1) != 0).any(1).cpu(), batch.out.lengths.cpu()
    used = rows if cfg.beta or entropy_coef or averaging == "micro_batch_mean" else rows[signal]
    for weight in policy.parameters():
        weight.grad = torch.zeros_like(weight)              # not None: Adam steps, signal or not
    loss, largest = 0.0, 0.0
    sums = torch.zeros(3)
    for part, T in micro_batches(used, lengths, cfg.micro_batch_size, averaging != "micro_batch_mean"):
        of, (tokens, m, old_logps) = batch.of[part], (slots[part, :T] for slots in batch.out[:3])   # (b, T)
        logps, entropy = score(policy, batch.prompts, of, tokens, *cfg.scoring)               # (b, T), (b, T)
        terms = (policy_loss(logps, old_logps, A[part], m, cfg.loss_type, cfg.epsilon, cfg.epsilon_high,
                             cfg.importance_sampling_level)
                 + (cfg.beta and cfg.beta * kl(logps * m, batch.ref_logps[part, :T] * m, cfg.kl_estimator))
                 - entropy_coef * entropy)
        part_loss = aggregate(terms, m, averaging, len(rows), mask[rows].sum(), cfg.max_completion_length)
        part_loss.backward()                                                                    # eq. (5)
        with torch.no_grad():
            log_rho = (logps - old_logps) * m                                                   # (b, T)
            outside = clipped(log_ratio(logps, old_logps, m), A[part, None], cfg.epsilon, cfg.epsilon_high)
            of_grpo = clipped(log_rho, A[part, None], 0.2, 0.28)            # what the clip of GRPO would take
            sums += torch.stack([x.sum().cpu() for x in (m, outside * m, of_grpo * m)])
            loss, largest = loss + part_loss.item(), max(log_rho.abs().max().item(), largest)
    names = ("clip_ratio/region_mean", "clip_ratio/token_region_mean")
    means = dict(zip(names, (sums[1:] / sums[0].clamp(min=1)).tolist()))
    return {"loss": loss, "max_log_ratio": largest} | means


def mini_batches(batch, cfg, *purpose):
    """num_iterations passes over a batch, each in num_mini_batches parts, of whole groups. Yields rows"""
    for i in range(cfg.num_iterations):
        groups = torch.randperm(len(batch.problems), generator=common.generator(cfg.seed, *purpose, i))
        for some in groups.tensor_split(min(cfg.num_mini_batches, len(groups))):
            yield (some.sort()[0][:, None] * cfg.num_generations + torch.arange(cfg.num_generations)).view(-1)


def update(policy, ref, optimizer, batch, A, cfg, step):
    """num_iterations passes over the batch, num_mini_batches optimizer steps each. -> their mean metrics"""
    optimizer.param_groups[0]["lr"] = cfg.learning_rate * min(1.0, (step + 1) / max(1, cfg.warmup_steps))
    seen, entropy_coef = [], cfg.entropy_coef * max(0.0, 1 - step / (cfg.entropy_decay_steps or math.inf))
    every = slice(None, None, 1 if cfg.beta else 8)                 # for a metric some rows are enough
    with torch.no_grad():
        ref_logps, _ = score(ref, batch.prompts, batch.of[every], batch.out.tokens[every], *cfg.scoring)
    mask, away = batch.out.mask[every], kl(batch.out.logps[every], ref_logps, "k1")         # (B or B / 8, T)
    batch = SimpleNamespace(**vars(batch) | {"ref_logps": ref_logps})
    for rows in mini_batches(batch, cfg, "shuffle", step):
        metrics = backward(policy, batch, A, rows, cfg, entropy_coef)
        metrics["grad_norm"] = nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm).item()
        if not math.isfinite(metrics["loss"] + metrics["grad_norm"]):
            common.fail(f"step {step + 1} is not finite: {metrics}; the last checkpoint is kept", code=1)
        optimizer.step()
        seen.append(metrics)
    return {name: mean([metrics[name] for metrics in seen]) for name in seen[0]} | {
        "kl": ((away * mask).sum() / mask.sum()).item(), "learning_rate": optimizer.param_groups[0]["lr"],
        "sampling/sampling_logp_difference/max": seen[0]["max_log_ratio"]}


COLUMNS = {"reward": "reward", "signal": "signal", "length": "completions/mean_length",
           "entropy": "entropy", "clip": "clip_ratio/region_mean", "by token": "clip_ratio/token_region_mean",
           "grad": "grad_norm"}


def main(argv=None):
    """The algorithm. -> the summary of the run"""
    cfg = Config.parse(argv)
    policy = GPT(cfg).to(cfg.device)
    run = common.Run(cfg, policy, COLUMNS, argv)
    if cfg.prompt:
        return common.tools.answer(run, rollout, encode_prompts)
    run.base(warm_start, (SPECIALS, GPT, Block, logprobs, score, micro_batches, encode_prompts, warm_start))
    ref = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.learning_rate, weight_decay=cfg.weight_decay)
    L, c = cfg.max_completion_length, cfg.overlong_buffer
    for step in run.steps(evaluate, policy=policy, optimizer=optimizer):
        batch = sample_batch(policy, cfg, step, run.weights, penalty=lambda n: overlong_penalty(n, L, c))
        A = advantages(batch.rewards, cfg.scale_rewards).view(-1).to(cfg.device)            # (B,)
        metrics = update(policy, ref, optimizer, batch, A, cfg, step)       # passes that lower (5)
        run.log(metrics, batch, A, score)
    return run.finish()


if __name__ == "__main__":
    main()
