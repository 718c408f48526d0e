"""DPO: direct preference optimization (arXiv:2305.18290).

It asks for no more than which of two answers is better: no reward, no samples on the way. Why that is enough:

  max_pi E[R(q, y)] - beta KL(pi || pi_ref)   is solved by   pi*(y | q) = pi_ref(y | q) exp(R / beta) / Z(q),
  as the objective is beta log Z(q) - beta KL(pi || pi*). Solved for R, the other way round, this says that
  R(q, y) = beta log(pi*(y | q) / pi_ref(y | q)) + beta log Z(q):    every policy is best for some reward.
  If w is preferred to l with probability sigmoid(R(q, w) - R(q, l)) (Bradley-Terry), then Z(q) cancels, and
  pairs have a likelihood in terms of the policy alone, which is maximal at pi*. L is its -log; beta h is the
  reward that a policy implies, up to Z:

  h(y)  = sum_t log pi(y_t | q, y_<t) - log pi_ref(y_t | q, y_<t)                            (1)
  M     = h(chosen) - h(rejected)                                                            (2)
  L     = -(1 - e) log sigmoid(beta M) - e log sigmoid(-beta M)      (e > 0: cDPO)           (3)
  KL_t  = k1 = x  or  k3 = exp(-x) + x - 1,        x = log pi - log pi_ref                   (4)
  L     = (M - 1 / (2 beta))^2                                        (IPO, 2310.12036)      (5)
  L     = max(0, 1 - beta M)                                          (hinge)                (6)

Here the verifier makes the pairs: of the G answers to a question the best with the worst, the second best
with the second worst, and so on while verdicts differ. The base gives the answers, so that all pairs are a
function of base and seed: a data set, written as it is read. With --online yes the policy itself gives them.
Only M counts: log pi of the chosen may fall, too (rewards/chosen < 0), and mass go where no pair looked.

Departs from the paper: a verifier, no people; no SFT on the chosen answers first.

  python dpo.py --task arithmetic

trains the base of grpo.py (greedy accuracy 0.2) to think before it answers (0.98), in a minute on a CPU.
With --learning_rate 5e-4 it first learns that, then comes to pieces.
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
    beta: float = flag(0.1, "weight of the KL to the base; ipo wants more, .5", low=1e-9)
    loss_type: str = flag("sigmoid", "(3), (5), (6)", choices=("sigmoid", "ipo", "hinge"))
    label_smoothing: float = flag(0.0, "chance that a pair is the wrong way round (e)", low=0, high=0.5)
    online: str = flag("no", "who gives the answers: the base, or the policy", choices=("no", "yes"))
    num_iterations: int = flag(1, "passes over the pairs of each batch", low=1)
    learning_rate: float = flag(2e-4, "of AdamW", "optimizer", low=0)

    def check(self):
        super().check()
        if self.label_smoothing and self.loss_type != "sigmoid":
            common.fail(f"--label_smoothing {self.label_smoothing}: is for --loss_type sigmoid only")


# ---- 2. the algorithm -----------------------------------------------------------------------------------

def has_signal(rewards):
    """Which groups have unequal rewards; r - mean(r), being rounded, cannot tell. (P, G) -> (P, 1)"""
    return rewards.amax(1, keepdim=True) > rewards.amin(1, keepdim=True)


def preferences(rewards):
    """Rows of a batch, paired: of a group the best with the worst, and so on inwards, while rewards differ.
    (P, G) -> chosen (N,), rejected (N,)"""
    P, G = rewards.shape
    order = rewards.argsort(dim=1, descending=True, stable=True) + torch.arange(P)[:, None] * G     # (P, G)
    chosen, rejected = order[:, :G // 2].flatten(), order.flip(1)[:, :G // 2].flatten()
    differ = rewards.flatten()[chosen] > rewards.flatten()[rejected]
    return chosen[differ], rejected[differ]


def kl(logps, ref_logps, estimator="k3"):
    """Estimates of KL(pi || pi_ref) from samples of pi. (B, T), (B, T) -> (B, T)"""
    x = logps - ref_logps                           # (B, T)
    return {"k3": torch.expm1(-x) + x,              # unbiased, never negative  eq. (4)
            "k2": x.square() / 2,                   # biased; in a loss, given the prefix, has KL's gradient
            "k1": x}[estimator]                     # unbiased; in a loss its gradient is noise


def sequence_logps(logps, mask):
    """log pi of whole completions. (B, T), (B, T) -> (B,)"""
    return torch.where(mask > 0, logps, 0.0).sum(1)


def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta, loss_type="sigmoid", label_smoothing=0.0):
    """L of pairs, from the log-probabilities of whole completions. (B,) each -> (B,)"""
    M = (chosen - ref_chosen) - (rejected - ref_rejected)                       # (B,)  eq. (1), eq. (2)
    e, log_sigmoid = label_smoothing, nn.functional.logsigmoid
    return {"sigmoid": -(1 - e) * log_sigmoid(beta * M) - e * log_sigmoid(-beta * M),       # eq. (3)
            "ipo": (M - 1 / (2 * beta)).square(),                                           # eq. (5)
            "hinge": (1 - beta * M).clamp(min=0)}[loss_type]                                # eq. (6)


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

METRICS = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies",
           "logps/chosen", "logps/rejected", "kl")


def compare(policy, ref, batch, chosen, rejected, cfg):
    """L and METRICS for pairs of rows of a batch. -> losses (N,), metrics: name -> (N,)"""
    rows, N = torch.cat([chosen, rejected]), len(chosen)
    of, T = batch.of[rows], int(batch.out.lengths[rows].max())
    tokens, mask = batch.out.tokens[rows, :T], batch.out.mask[rows, :T]                         # (2 N, T)
    logps, _ = score(policy, batch.prompts, of, tokens, *cfg.scoring)                           # (2 N, T)
    with torch.no_grad():
        ref_logps, _ = score(ref, batch.prompts, of, tokens, *cfg.scoring)                      # (2 N, T)
    (c, r), (ref_c, ref_r) = (sequence_logps(x, mask).split(N) for x in (logps, ref_logps))     # (N,) each
    loss = dpo_loss(c, r, ref_c, ref_r, cfg.beta, cfg.loss_type, cfg.label_smoothing)
    with torch.no_grad():
        sampled, other = (logps, ref_logps) if cfg.online == "yes" else (ref_logps, logps)
        away = (kl(sampled * mask, other * mask) * mask).sum(1) / mask.sum(1)                   # (2 N,)
        good, bad = cfg.beta * (c - ref_c), cfg.beta * (r - ref_r)                              # (N,) each
        return loss, dict(zip(METRICS, (loss, good, bad, good - bad, (good > bad).to(loss), c, r,
                                        (away[:N] + away[N:]) / 2)))


def over_pairs(policy, ref, batch, pairs, cfg, learn):
    """METRICS, averaged over pairs (chosen (N,), rejected (N,)), 0 if there are none; if `learn`, leave the
    gradient of L in the policy. -> metrics"""
    lengths = batch.out.lengths.cpu()
    longer, sums = torch.maximum(*(lengths[rows] for rows in pairs)), dict.fromkeys(METRICS, 0.0)
    if learn:
        for weight in policy.parameters():
            weight.grad = torch.zeros_like(weight)          # not None: Adam steps, pairs or not
    for part, _ in micro_batches(torch.arange(len(longer)), longer, (cfg.micro_batch_size + 1) // 2):
        with torch.set_grad_enabled(learn):
            loss, metrics = compare(policy, ref, batch, *(rows[part] for rows in pairs), cfg)
        if learn:
            (loss.sum() / len(longer)).backward()
        for name, values in metrics.items():
            sums[name] += values.sum().item() / len(longer)
    return sums


def update(policy, ref, optimizer, batch, pairs, cfg, step):
    """num_iterations passes over the pairs, num_mini_batches optimizer steps each. -> their mean metrics"""
    optimizer.param_groups[0]["lr"] = cfg.learning_rate * min(1.0, (step + 1) / max(1, cfg.warmup_steps))
    seen, N = [], len(pairs[0])
    for iteration in range(cfg.num_iterations):
        order = torch.randperm(N, generator=common.generator(cfg.seed, "shuffle", step, iteration))
        for mini_batch in order.tensor_split(max(1, min(cfg.num_mini_batches, N))):
            some = [rows[mini_batch.sort()[0]] for rows in pairs]
            metrics = over_pairs(policy, ref, batch, some, cfg, learn=True)
            metrics["grad_norm"] = nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm).item()
            if not math.isfinite(metrics["loss"] + metrics["grad_norm"]):
                common.fail(f"step {step + 1} is not finite: {metrics}; the last checkpoint is kept", code=1)
            optimizer.step()
            seen.append(metrics)
    return {name: mean([metrics[name] for metrics in seen]) for name in seen[0]} | {
        "pairs": N, "learning_rate": optimizer.param_groups[0]["lr"]}


COLUMNS = {"reward": "reward", "pairs": "pairs", "chosen": "rewards/chosen", "reject": "rewards/rejected",
           "ordered": "rewards/accuracies", "loss": "loss", "grad": "grad_norm"}


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
    held_out = sample_batch(ref, cfg, "pairs", split="test")
    held_out_pairs = preferences(held_out.rewards)

    def measure(policy, cfg, k, **options):
        pairs = over_pairs(policy, ref, held_out, held_out_pairs, cfg, learn=False)
        return evaluate(policy, cfg, k, **options) | {f"pairs/{name}": value for name, value in pairs.items()}

    for step in run.steps(measure, policy=policy, optimizer=optimizer):
        batch = sample_batch(policy if cfg.online == "yes" else ref, cfg, step, run.weights)
        chosen, rejected = preferences(batch.rewards)                                       # (N,) each
        metrics = update(policy, ref, optimizer, batch, (chosen, rejected), cfg, step)      # lower L
        labels = torch.zeros(len(batch.texts))                                              # (B,)
        labels[chosen], labels[rejected] = 1.0, -1.0
        run.log(metrics, batch, labels, score)
    return run.finish()


if __name__ == "__main__":
    main()
