"""PPO: proximal policy optimization (1707.06347) with GAE (1506.02438), VAPO (2504.05118), TRPO (1502.05477).

A second model, the critic, learns what to expect of an unfinished answer, V; each token then has an advantage
of its own: how much better than expected things went from there. Several steps are taken on the same samples,
and a trust region keeps the policy near the one that made them.

  A_t   = delta_t + gamma lam A_t+1,      delta_t = r_t + gamma V_t+1 - V_t                  (1)
  rho_t = pi(o_t | q, o_<t) / pi_old(o_t | q, o_<t)                                          (2)
  L_t   = -min(rho_t A_t, clip(rho_t, 1 - eps_low, 1 + eps_high) A_t)                        (3)
  KL_t  = k1 = x  or  k3 = exp(-x) + x - 1,        x = log pi - log pi_ref                   (4)
  L     = mean of L_t - c_H H_t over all tokens, of -mu log pi over those of right answers   (5)
  R_t   = A_t + V_t                                                                          (6)
  LV_t  = 1/2 max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2)                         (7)
  lam_i = max(0, 1 - 1 / (alpha n_i))        (--length_adaptive yes, n tokens)               (8)
  L_t   = -rho_t A_t + c_KL (rho_t - 1 - log rho_t)        (--trust_region penalty)          (9)
  theta = theta + sqrt(2 max_kl / s.Fs) s,   F s = grad E[rho A]      (--trust_region trpo)  (10)

r_t is the verdict, at the last token, less beta k1_t at each. The A that (3) gets have mean 0 and variance 1.
c_KL and beta may adapt to targets of KL(old || pi) and of the KL to the base: doubled above 1.5 times these,
halved below 1 / 1.5. F: Fisher matrix. VAPO's critic learns first, from whole returns; --help has its values.

Departs from the papers: averages, clips and targets are per token. In 40 s on a CPU, once there is a base,
  python ppo.py --task arithmetic                  takes its greedy accuracy from 0.2 to 0.99
"""
import copy
import dataclasses
import functools
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
    MODELS = ("model",)                 # what --reward may name besides the rows of tasks.REWARDS
    gamma: float = flag(1.0, "discount in (1)", low=0, high=1)
    lam: float = flag(0.95, "lambda in (1) for the actor: 0 trusts the critic, 1 returns", low=0, high=1)
    critic_lam: float = flag(-1.0, "lambda in (6); -1: the actor's (VAPO: 1)", low=-1, high=1)
    length_adaptive: str = flag("no", "lambda of the actor by (8) (VAPO: yes)", choices=("no", "yes"))
    alpha: float = flag(1.0, "alpha in (8) (VAPO, long texts: .05)", low=1e-9, needs="length_adaptive yes")
    trust_region: str = flag("clip", "(3), (9), (10)", choices=("clip", "penalty", "trpo"))
    epsilon: float = flag(0.2, "lower clip range (eps_low)", low=0)
    epsilon_high: float = flag(0.2, "upper clip range (eps_high) (VAPO: .28)", low=0)
    cliprange_value: float = flag(0.2, "clip range of the critic (c)", low=0)
    penalty_coef: float = flag(1.0, "c_KL in (9), to begin with", low=0, needs="trust_region penalty")
    target_kl: float = flag(0.0, "KL(old || pi) for c_KL to adapt to; clip stops at 1.5 times; 0: off", low=0)
    max_kl: float = flag(0.01, "the trust region of trpo", low=1e-9, needs="trust_region trpo")
    damping: float = flag(0.1, "added to the diagonal of F in (10)", low=0, needs="trust_region trpo")
    num_iterations: int = flag(1, "passes over each batch (paper: 3 - 15); trpo takes one step", low=1)
    critic_learning_rate: float = flag(2e-3, "of the critic's Adam", low=0)
    critic_pretrain_steps: int = flag(0, "batches on which the critic learns alone, first (VAPO: 50)", low=0)
    beta: float = flag(0.0, "weight of the KL to the base, in the reward", low=0)
    kl_target: float = flag(0.0, "KL to the base, a token, that beta adapts to; 0: off", low=0, needs="beta")
    nll_coef: float = flag(0.0, "weight of the likelihood of right answers (mu) (VAPO: .1)", low=0)
    entropy_coef: float = flag(0.0, "weight of the entropy bonus (c_H)", low=0)
    entropy_decay_steps: int = flag(0, "c_H falls linearly to 0 in so many steps; 0: it stays", low=0)


# ---- 2. the algorithm -----------------------------------------------------------------------------------

def has_signal(rewards):
    """Which groups have unequal rewards; r - mean(r), being rounded, cannot tell. (P, G) -> (P, 1)"""
    return rewards.amax(1, keepdim=True) > rewards.amin(1, keepdim=True)


def gae(rewards, values, mask, gamma, lam):
    """Generalized advantage estimation, unnormalised; masked slots are no steps, and 0 in both results.
    rewards, values, mask (B, T), lam a float or (B, 1) -> advantages (B, T), returns (B, T)"""
    A = V = torch.zeros_like(values[:, :1])                                             # (B, 1)
    slots = []
    for r, v, m in zip(*(x.split(1, 1)[::-1] for x in (rewards, values, mask))):        # (B, 1) each
        A = torch.where(m > 0, r + gamma * V - v + gamma * lam * A, A)                  # eq. (1)
        V = torch.where(m > 0, v, V)
        slots.append(A)
    A = torch.cat(slots[::-1], 1) * mask
    return A, (A + values) * mask                                                       # eq. (6)


def whiten(x, mask):
    """Mean 0 and variance 1 over the valid slots, 0 in the others. (B, T), (B, T) -> (B, T)"""
    n = mask.sum()
    x = (x - (x * mask).sum() / n.clamp(min=1)) * mask
    return x / (x.square().sum() / (n - 1).clamp(min=1) + 1e-8).sqrt()


def length_adaptive_lambda(lengths, alpha):
    """(B,) -> (B, 1)"""
    return (1 - 1 / (alpha * lengths[:, None])).clamp(min=0)                            # eq. (8)


def kl(logps, ref_logps, estimator="k3"):
    """Estimates of KL(pi || pi_ref) from samples of pi. (B, T), (B, T) -> (B, T)"""
    x = logps - ref_logps                           # (B, T)
    return {"k3": torch.expm1(-x) + x,              # unbiased, never negative  eq. (4)
            "k2": x.square() / 2,                   # biased; in a loss, given the prefix, has KL's gradient
            "k1": x}[estimator]                     # unbiased; in a loss its gradient is noise


def clipped(log_rho, A, epsilon, epsilon_high):
    """Where (3) is flat: rho has left the range on the side that A pushes it to. (B, T), (B, 1) -> (B, T)"""
    return (A > 0) & (log_rho.exp() > 1 + epsilon_high) | (A < 0) & (log_rho.exp() < 1 - epsilon)


def log_ratio(logps, old_logps, mask):
    """log rho_t, 0 in masked slots. On fresh samples its value is 0, its gradient that of logps. -> (B, T)"""
    return torch.where(mask > 0, logps - old_logps.detach(), 0.0)                       # (B, T)  eq. (2)


def policy_loss(logps, old_logps, advantages, mask, epsilon=0.2, epsilon_high=0.2):
    """L_t, 0 in masked slots; advantages are (B,) or (B, T). -> (B, T)"""
    A = advantages if advantages.dim() == 2 else advantages[:, None]                    # (B, 1) or (B, T)
    ratio = log_ratio(logps, old_logps, mask).exp()                                     # (B, T)
    return -torch.min(ratio * A, ratio.clamp(1 - epsilon, 1 + epsilon_high) * A) * mask # (B, T)  eq. (3)


def penalty_loss(logps, old_logps, advantages, mask, beta):
    """L_t of TRPO's penalised form, 0 in masked slots; advantages are (B,) or (B, T). -> (B, T)"""
    A = advantages if advantages.dim() == 2 else advantages[:, None]                    # (B, 1) or (B, T)
    log_rho = log_ratio(logps, old_logps, mask)                                         # (B, T)
    return (-log_rho.exp() * A + beta * (torch.expm1(log_rho) - log_rho)) * mask        # (B, T)  eq. (9)


def value_loss(values, old_values, returns, mask, cliprange_value):
    """LV_t, 0 in masked slots. (B, T) each -> (B, T)"""
    near = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    return torch.max((values - returns).square(), (near - returns).square()) / 2 * mask     # eq. (7)


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


# ---- 2b. TRPO -------------------------------------------------------------------------------------------

def conjugate_gradients(product, b, iterations=10):
    """x such that product(x) = b, for a product with a positive definite matrix. (n,) -> (n,)"""
    x, residual, direction, size = torch.zeros_like(b), b, b, b @ b
    for _ in range(iterations):
        image = product(direction)
        step = size / (direction @ image).clamp(min=1e-30)
        x, residual = x + step * direction, residual - step * image
        size, before = residual @ residual, size
        direction = residual + size / before.clamp(min=1e-30) * direction
    return x


def trpo_step(weights, objective, max_kl=0.01, damping=0.1):
    """Move `weights` along the natural gradient as far as the trust region lets, or not at all. objective()
    -> E[rho A], KL(old || pi): scalars at the weights as they are, twice differentiable. -> metrics"""
    def move(vector):
        for weight, part in zip(weights, vector.split([weight.numel() for weight in weights])):
            weight.data.copy_(part.view_as(weight))

    flat = lambda tensors: torch.cat([tensor.reshape(-1) for tensor in tensors])        # -> (n,)
    start, (before, divergence) = flat(weights).detach(), objective()
    gradient = flat(torch.autograd.grad(before, weights, retain_graph=True))            # (n,)
    slope = flat(torch.autograd.grad(divergence, weights, create_graph=True))           # 0; its slope is F
    fisher = lambda v: flat(torch.autograd.grad(slope @ v, weights, retain_graph=True)) + damping * v
    s = conjugate_gradients(fisher, gradient)
    step = (2 * max_kl / (s @ fisher(s)).clamp(min=1e-20)).sqrt() * s                   # (n,)  eq. (10)
    for backtracks in range(11):                            # F is the KL to second order only: look
        move(start + step * 0.8 ** backtracks if backtracks < 10 else start)
        with torch.no_grad():
            surrogate, divergence = objective()
        if divergence <= max_kl and surrogate > before:
            break
    return {"loss": -before.item(), "grad_norm": gradient.norm().item(), "policy_kl": divergence.item(),
            "trpo/backtracks": float(backtracks)}           # 10: nothing helped, the weights are as they were


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


class Critic(nn.Module):
    """What to expect of an unfinished answer: a GPT, at first the base, that reads out a number, at first 0.
    It reads as `states` does. -> values (B, T), each of what stands before the token of its slot."""

    def __init__(self, gpt):
        super().__init__()
        self.gpt, self.head = copy.deepcopy(gpt), nn.Parameter(torch.zeros_like(gpt.embed.weight[0]))   # (D,)

    def forward(self, prompts, of, tokens):
        return self.gpt.states(prompts, of, tokens) @ self.head


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


@torch.no_grad()
def assign_credit(critic, ref, batch, cfg, beta, critic_lam):
    """-> namespace: advantages (whitened), returns, values, (B, T) each, and the mean KL to the base"""
    (tokens, mask, logps), rewards = batch.out[:3], token_rewards(batch.out, batch.verdicts, batch.rewards)
    texts = batch.prompts, batch.of, tokens
    to_base = kl(logps, score(ref, *texts, *cfg.scoring)[0], "k1") * mask                       # (B, T)
    rewards, values = rewards - beta * to_base, critic(*texts) * mask                           # (B, T) each
    lam = length_adaptive_lambda(mask.sum(1), cfg.alpha) if cfg.length_adaptive == "yes" else cfg.lam
    A, _ = gae(rewards, values, mask, cfg.gamma, lam)
    _, returns = gae(rewards, values, mask, cfg.gamma, lam if critic_lam < 0 else critic_lam)
    return SimpleNamespace(advantages=whiten(A, mask), returns=returns, values=values,
                           kl=(to_base.sum() / mask.sum()).item())


def loss_terms(logps, entropy, old_logps, A, mask, right, cfg, coefs):
    """What (5) averages; `right` (B, 1) is 0 where an answer is wrong. (B, T) the others -> (B, T)"""
    near = policy_loss(logps, old_logps, A, mask, cfg.epsilon, cfg.epsilon_high)
    terms = near if cfg.trust_region == "clip" else penalty_loss(logps, old_logps, A, mask, coefs["penalty"])
    return terms - coefs["entropy"] * entropy - cfg.nll_coef * right * logps


def backward(policy, batch, A, right, rows, cfg, coefs):
    """Leave in the policy the gradient of (5) over `rows`, those of one optimizer step. -> metrics"""
    mask = batch.out.mask
    right = right * (mask[rows].sum() / (mask * right)[rows].sum().clamp(min=1))        # their mean, in (5)
    policy.zero_grad()
    sums, loss, largest = torch.zeros(3), 0.0, 0.0
    for part, T in micro_batches(rows, batch.out.lengths.cpu(), cfg.micro_batch_size):
        of, (tokens, m, old_logps) = batch.of[part], (slots[part, :T] for slots in batch.out[:3])   # (b, T)
        logps, entropy = score(policy, batch.prompts, of, tokens, *cfg.scoring)               # (b, T), (b, T)
        terms = loss_terms(logps, entropy, old_logps, A[part, :T], m, right[part], cfg, coefs)
        part_loss = aggregate(terms, m, "token_mean", num_tokens=mask[rows].sum())
        part_loss.backward()                                                                    # eq. (5)
        with torch.no_grad():
            log_rho = (logps - old_logps) * m                                                   # (b, T)
            outside = clipped(log_ratio(logps, old_logps, m), A[part, :T], cfg.epsilon, cfg.epsilon_high)
            sums += torch.stack([x.sum().cpu() for x in (m, kl(old_logps, old_logps + log_rho), outside * m)])
            loss, largest = loss + part_loss.item(), max(log_rho.abs().max().item(), largest)
    means = dict(zip(("policy_kl", "clip_ratio/region_mean"), (sums[1:] / sums[0].clamp(min=1)).tolist()))
    return {"loss": loss, "max_log_ratio": largest} | means


def trpo_update(policy, batch, A, right, rows, cfg, coefs):
    """Move the policy by (10) over `rows`, whose graph is in memory at once. -> metrics"""
    of, A, (tokens, mask, old_logps) = batch.of[rows], A[rows], (x[rows] for x in batch.out[:3])
    right, first = right[rows] * (mask.sum() / (mask * right[rows]).sum().clamp(min=1)), {}

    def objective():
        logits = nn.functional.linear(policy.states(batch.prompts, of, tokens), policy.embed.weight)
        logps, entropy = logprobs(logits, tokens, cfg.temperature, "torch")                     # (B, T) each
        logp = torch.log_softmax(logits / cfg.temperature, -1)                                  # (B, T, V)
        first.setdefault("logp", logp.detach())
        first.setdefault("max_log_ratio", ((logps - old_logps) * mask).abs().max().item())
        terms = loss_terms(logps, entropy, old_logps, A, mask, right, cfg, coefs)
        divergence = (first["logp"].exp() * (first["logp"] - logp)).sum(-1)                     # (B, T)
        return -aggregate(terms, mask, "token_mean"), aggregate(divergence, mask, "token_mean")

    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):        # the one with second derivatives
        metrics = trpo_step(list(policy.parameters()), objective, cfg.max_kl, cfg.damping)
    return metrics | {"max_log_ratio": first["max_log_ratio"]}


def fit_critic(critic, optimizer, batch, credit, rows, cfg):
    """One optimizer step on (7) over `rows`. -> metrics"""
    mask, loss = batch.out.mask, 0.0
    critic.zero_grad()
    for part, T in micro_batches(rows, batch.out.lengths.cpu(), cfg.micro_batch_size):
        m, values = mask[part, :T], critic(batch.prompts, batch.of[part], batch.out.tokens[part, :T])
        terms = value_loss(values, credit.values[part, :T], credit.returns[part, :T], m, cfg.cliprange_value)
        part_loss = aggregate(terms, m, "token_mean", num_tokens=mask[rows].sum())
        part_loss.backward()
        loss += part_loss.item()
    norm = nn.utils.clip_grad_norm_(critic.parameters(), cfg.max_grad_norm).item()
    optimizer.step()
    return {"value_loss": loss, "critic_grad_norm": norm}


def mini_batches(batch, cfg, *purpose):
    """num_iterations passes over a batch, each in num_mini_batches parts, of whole groups. Yields rows"""
    for i in range(cfg.num_iterations):
        groups = torch.randperm(len(batch.problems), generator=common.generator(cfg.seed, *purpose, i))
        for some in groups.tensor_split(min(cfg.num_mini_batches, len(groups))):
            yield (some.sort()[0][:, None] * cfg.num_generations + torch.arange(cfg.num_generations)).view(-1)


def adapted(coefficient, kl, target):
    """A coefficient after a step that came to `kl`; if there is a target, it is kept near that."""
    return coefficient * (2.0 if kl > 1.5 * target > 0 else 0.5 if target and kl < target / 1.5 else 1.0)


def explained_variance(values, returns, mask):
    """1 - Var(returns - values) / Var(returns) over the valid slots: 1 is a perfect critic. -> float"""
    variance = returns[mask > 0].var()
    return (1 - (returns - values)[mask > 0].var() / variance).item() if variance > 1e-8 else 0.0


def update(policy, critic, optimizer, critic_optimizer, batch, credit, cfg, step, penalty_coef):
    """num_iterations passes over the batch, num_mini_batches optimizer steps each. -> their mean metrics"""
    optimizer.param_groups[0]["lr"] = cfg.learning_rate * min(1.0, (step + 1) / max(1, cfg.warmup_steps))
    coefs = {"entropy": cfg.entropy_coef * max(0.0, 1 - step / (cfg.entropy_decay_steps or math.inf)),
             "penalty": penalty_coef * (cfg.trust_region == "penalty")}
    A, right = credit.advantages, batch.right.view(-1, 1).to(credit.advantages)     # (B, T), (B, 1)
    critic_seen = [fit_critic(critic, critic_optimizer, batch, credit, rows, cfg)
                   for rows in mini_batches(batch, cfg, "shuffle", step)]
    seen, trpo = [], cfg.trust_region == "trpo"
    for rows in [torch.arange(len(right))] if trpo else mini_batches(batch, cfg, "shuffle", step):
        metrics = (trpo_update if trpo else backward)(policy, batch, A, right, rows, cfg, coefs)
        norm = nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm).item()
        seen.append({"grad_norm": norm} | metrics)
        if not math.isfinite(seen[-1]["loss"] + seen[-1]["grad_norm"] + critic_seen[-1]["value_loss"]):
            common.fail(f"step {step + 1} is not finite: {seen[-1]}; the last checkpoint is kept", code=1)
        if trpo or cfg.trust_region == "clip" and 0 < 1.5 * cfg.target_kl < metrics["policy_kl"]:
            break                                           # the policy has gone as far as it may
        optimizer.step()
    with torch.no_grad():                                   # where all this led, by every eighth row
        logps, _ = score(policy, batch.prompts, batch.of[::8], batch.out.tokens[::8], *cfg.scoring)
    old_logps, m = batch.out.logps[::8], batch.out.mask[::8]                                    # (B / 8, T)
    moved = seen[-1]["policy_kl"] if trpo else ((kl(old_logps, logps) * m).sum() / m.sum()).item()
    means = {name: mean([m[name] for m in steps]) for steps in (seen, critic_seen) for name in steps[0]}
    return means | {"sampling/sampling_logp_difference/max": seen[0]["max_log_ratio"],
                    "policy_kl": moved, "learning_rate": optimizer.param_groups[0]["lr"],
                    "explained_variance": explained_variance(credit.values, credit.returns, batch.out.mask)}


COLUMNS = {"reward": "reward", "length": "completions/mean_length", "entropy": "entropy", "kl": "kl",
           "moved": "policy_kl", "foresaw": "explained_variance", "grad": "grad_norm"}


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
    critic = Critic(policy)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=cfg.critic_learning_rate)
    parts = {"policy": policy, "optimizer": optimizer, "critic": critic, "critic_opt": critic_opt}
    parts |= common.tasks.judge(policy, cfg, run, functools.partial(sample_batch, policy, cfg))
    for i in common.tools.progress("critic", range(0 if run.resumed else cfg.critic_pretrain_steps)):
        batch = common.tasks.judged(sample_batch(policy, cfg, f"critic {i}"), parts)        # the policy stays
        credit = assign_credit(critic, ref, batch, cfg, cfg.beta, critic_lam=1.0)
        for rows in mini_batches(batch, cfg, "critic", i):
            fit_critic(critic, critic_opt, batch, credit, rows, cfg)
    for step in run.steps(evaluate, **parts):
        beta, penalty_coef = run.state.get("coefs", (cfg.beta, cfg.penalty_coef))
        batch = common.tasks.judged(sample_batch(policy, cfg, step, run.weights), parts)
        credit = assign_credit(critic, ref, batch, cfg, beta, cfg.critic_lam)       # rewards, V, A, R
        metrics = update(policy, critic, optimizer, critic_opt, batch, credit, cfg, step, penalty_coef)
        metrics |= {"kl": credit.kl, "beta": beta, "penalty_coef": penalty_coef}
        run.state["coefs"] = (
            adapted(beta, credit.kl, cfg.kl_target),
            adapted(penalty_coef, metrics["policy_kl"], cfg.trust_region == "penalty" and cfg.target_kl))
        run.log(metrics, batch, credit.advantages, values=credit.values)
    return run.finish()


if __name__ == "__main__":
    main()
