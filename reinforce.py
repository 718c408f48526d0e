"""REINFORCE for language models (Williams 1992), with the baselines that came after it.

Sample completions and make each likelier by how far its return R exceeds a baseline b. If the policy that
learns has sampled, and b ignores the completion, -grad L is on average the gradient of the expected return
(in the token view if gamma is 1; else it leaves out a factor of gamma^t, as is the custom).

  G_t   = r_t + gamma G_t+1,      R = G_1          (reward-to-go; a verdict comes last)      (1)
  A_t   = R - b   (sequence view)    or   G_t - b   (token view)                             (2)
  L_t   = -A_t log pi(o_t | q, o_<t)                                                         (3)
  KL_t  = k1 = x  or  k3 = exp(-x) + x - 1,        x = log pi - log pi_ref                   (4)
  L     = 1/B sum_i sum_t (L_t - c_H H_t)                                                    (5)

H_t is the policy's entropy. With beta > 0 distance to the base costs reward: r_t <- r_t - beta k1_t. b is 0;
the mean of batch or group, the own return in it, which shrinks the gradient to (N - 1) / N for N returns; the
mean of the others (RLOO, 2402.14740); or the b of least variance, estimated from the others:

  b*    = E[|g|^2 R] / E[|g|^2],      g = grad log pi(o | q)                                 (6)

--method rejection learns right completions by heart: their reward is 1, all else 0, and 1/B counts them only.
Where the others differ: grpo.py divides A by the group's std and clips a ratio, gspo.py that of an answer;
ppo.py learns b, token by token; dpo.py asks only which of two is better. In 20 s on a CPU, given a base, this

  python reinforce.py --task arithmetic            takes its greedy accuracy from 0.2 to 0.99
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

@dataclasses.dataclass(frozen=True)
class Config(common.Config):
    method: str = flag("reinforce", "or, by heart, the right ones", choices=("reinforce", "rejection"))
    baseline: str = flag("none", "b in (2)", choices=("none", "mean", "rloo", "batch", "optimal"))
    view: str = flag("sequence", "A_t in (2)", choices=("sequence", "token"))
    gamma: float = flag(1.0, "discount in (1); below 1 it hurries good ends, delays bad ones", low=0, high=1)
    num_iterations: int = flag(1, "passes over each batch (mu)", low=1)
    beta: float = flag(0.0, "weight of the KL to the base", low=0)
    entropy_coef: float = flag(0.0, "weight of the entropy bonus (c_H)", low=0)
    entropy_decay_steps: int = flag(0, "c_H falls linearly to 0 in so many steps; 0: it stays", low=0)


# ---- 2. the algorithm -----------------------------------------------------------------------------------

def has_signal(rewards):
    """Which groups have unequal rewards; r - mean(r), being rounded, cannot tell. (P, G) -> (P, 1)"""
    return rewards.amax(1, keepdim=True) > rewards.amin(1, keepdim=True)


def optimal_baseline(rewards, sq_grad_norms, weights):
    """The b of least variance, where `weights` are probabilities. (N,), (N,), (N,) -> scalar"""
    return (weights * sq_grad_norms * rewards).sum() / (weights * sq_grad_norms).sum()  # eq. (6)


def advantages(rewards, baseline="none", sq_grad_norms=None):
    """Returns less the baseline; exactly 0 in a group of equals that has its own. "optimal" is (6) over the
    others of the group, given |g|^2, or where these are all 0 their plain mean. (P, G) x 2 -> (P, G)"""
    w = torch.ones_like(rewards) if baseline != "optimal" else sq_grad_norms            # (P, G)
    others = 1 - torch.eye(rewards.shape[1]).to(rewards)                                # (G, G)
    plain = rewards @ others / others.sum(0)
    b = {"none": 0.0, "batch": rewards.mean(), "mean": rewards.mean(1, keepdim=True), "rloo": plain,
         "optimal": torch.where(w @ others > 0, (w * rewards) @ others / (w @ others), plain)}[baseline]
    return torch.where(has_signal(rewards) | (baseline in ("none", "batch")), rewards - b, 0.0)     # eq. (2)


def rewards_to_go(rewards, mask, gamma):
    """G_t, 0 in masked slots, which are no steps. (B, T), (B, T) -> (B, T)"""
    G, slots = torch.zeros_like(rewards[:, 0]), []                                      # (B,)
    for r, m in zip(rewards.T.flip(0), mask.T.flip(0)):
        G = torch.where(m > 0, r + gamma * G, G)                                        # eq. (1)
        slots.append(G * m)
    return torch.stack(slots[::-1], 1)


def kl(logps, ref_logps, estimator="k3"):
    """Estimates of KL(pi || pi_ref) from samples of pi. (B, T), (B, T) -> (B, T)"""
    x = logps - ref_logps                           # (B, T)
    return {"k3": torch.expm1(-x) + x,              # unbiased, never negative  eq. (4)
            "k2": x.square() / 2,                   # biased; in a loss, given the prefix, has KL's gradient
            "k1": x}[estimator]                     # unbiased; in a loss its gradient is noise


def policy_loss(logps, advantages, mask):
    """L_t, 0 in masked slots; advantages are (B,) or (B, T). -> (B, T)"""
    A = advantages if advantages.dim() == 2 else advantages[:, None]                    # (B, 1) or (B, T)
    return torch.where(mask > 0, -A * logps, 0.0)                                       # (B, T)  eq. (3)


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

def token_rewards(out, verdicts, rewards):
    """The rewards of B rows, token by token: verdicts that are lists by characters, as these appear, and what
    is left of the `rewards` with the last token that was sampled. -> (B, T)"""
    found = torch.zeros_like(out.mask)                                                          # (B, T)
    for row, mask, verdict, ids, n in zip(found, out.mask, verdicts, out.tokens.tolist(), out.lengths):
        if isinstance(verdict, list):
            ends = [len(decode(ids[:t])) for t in range(n + 1)]
            row[:n] = mask[:n] * torch.tensor([sum(verdict[a:b]) for a, b in zip(ends, ends[1:])]).to(row)
    last = (out.mask * torch.arange(1, out.mask.shape[1] + 1).to(found)).argmax(1, keepdim=True)    # (B, 1)
    return found.scatter_add(1, last, rewards.view(-1, 1).to(found) - found.sum(1, keepdim=True))


def squared_gradient_norms(policy, batch, cfg):
    """|g|^2 of (6) for every row of a batch, by a gradient of its own. -> (B,)"""
    def norm(prompt, tokens, mask):
        def logp(weights):
            ids, options = torch.cat([prompt, tokens])[None, :-1], {"logits_to_keep": len(tokens)}
            logits = torch.func.functional_call(policy, weights, ids, options)                  # (1, T, V)
            return (logprobs(logits, tokens[None], cfg.temperature, "torch")[0] * mask).sum()
        gradients = torch.func.grad(logp)(dict(policy.named_parameters()))
        return sum(gradient.square().sum() for gradient in gradients.values())
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):        # the one that vmap can batch
        return torch.func.vmap(norm, chunk_size=cfg.micro_batch_size)(batch.prompts[batch.of], *batch.out[:2])


@torch.no_grad()
def credit(policy, ref, batch, cfg):
    """A_t of (2) for a whole batch, 0 in masked slots. -> (B, T)"""
    told = (batch.verdicts, batch.rewards) if cfg.method == "reinforce" else ((), batch.right)
    (tokens, mask, logps), rewards = batch.out[:3], token_rewards(batch.out, *told)             # (B, T) each
    if cfg.beta:
        ref_logps, _ = score(ref, batch.prompts, batch.of, tokens, *cfg.scoring)                # (B, T)
        rewards = rewards - cfg.beta * kl(logps, ref_logps, "k1") * mask
    to_go = rewards_to_go(rewards, mask, cfg.gamma)                                             # (B, T)
    R = to_go[:, 0].view_as(batch.rewards)                                                      # (P, G)
    norms = squared_gradient_norms(policy, batch, cfg).view_as(R) if cfg.baseline == "optimal" else None
    A = advantages(R, cfg.baseline, norms).view(-1, 1)                                          # (B, 1)
    return mask * (A + (to_go - to_go[:, :1]) * (cfg.view == "token"))                          # (B, T)


def backward(policy, batch, A, rows, cfg, entropy_coef):
    """Leave in the policy the gradient of (5) over `rows`, those of one optimizer step. Rows of zero
    advantage are skipped if nothing else moves them. -> metrics of the rest"""
    signal, lengths = (A[rows].view(len(rows), -1) != 0).any(1).cpu(), batch.out.lengths.cpu()
    used = rows if entropy_coef else rows[signal]
    count = len(rows) if cfg.method == "reinforce" else max(1, batch.right.view(-1)[rows].sum().item())
    for weight in policy.parameters():
        weight.grad = torch.zeros_like(weight)              # not None: Adam steps, signal or not
    loss, largest = 0.0, 0.0
    for part, T in micro_batches(used, lengths, cfg.micro_batch_size):
        of, (tokens, m, old_logps) = batch.of[part], (slots[part, :T] for slots in batch.out[:3])   # (b, T)
        logps, entropy = score(policy, batch.prompts, of, tokens, *cfg.scoring)               # (b, T), (b, T)
        terms = policy_loss(logps, A[part, :T], m) - entropy_coef * entropy                     # (b, T)
        part_loss = aggregate(terms, m, "sequence_sum", count)
        part_loss.backward()                                                                    # eq. (5)
        with torch.no_grad():
            log_rho = (logps - old_logps) * m                                                   # (b, T)
            loss, largest = loss + part_loss.item(), max(log_rho.abs().max().item(), largest)
    return {"loss": loss, "max_log_ratio": largest}


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
           "entropy": "entropy", "kl": "kl", "grad": "grad_norm"}


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
    for step in run.steps(evaluate, policy=policy, optimizer=optimizer):
        batch = sample_batch(policy, cfg, step, run.weights)    # questions, G outputs of each, their verdicts
        A = credit(policy, ref, batch, cfg)                                                     # (B, T)
        metrics = update(policy, ref, optimizer, batch, A, cfg, step)       # passes that lower (5)
        run.log(metrics, batch, A, score)
    return run.finish()


if __name__ == "__main__":
    main()
