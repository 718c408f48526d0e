"""REINFORCE for language models (Williams 1992), with the baselines that came after it.

A verifier can score an answer, but it cannot say how to write it. REINFORCE needs no more than the
score: for each question q, sample outputs o from the policy pi, and make an output more likely the
more its return R exceeds a baseline b. Token o_t gets the reward r_t, usually 0 except at the end.

  G_t   = r_t + gamma G_t+1                                                          (1)
  A_t   = R - b                                       G_t - b with --view token      (2)
  L_t   = -A_t log pi(o_t | q, o_<t)                                                 (3)
  r_t   = r(o_t) - beta log(pi / pi_ref)                                             (4)
  L     = 1/B sum_i sum_t (L_t - c_H H_t)                                            (5)

G_t is the sum of the rewards from token t on, and R = G_1. H_t is the entropy of the policy at
token t, and B is the number of outputs. If gamma is 1 and b does not depend on o, the mean of
-grad sum_t L_t is the gradient of the mean of R. So b does not change the mean of the gradient, but
it changes the variance, which is large. By default, b is 0; --baseline chooses one of those that
`advantages` explains.

A policy may drift away from the base policy pi_ref. --beta keeps it closer: (4) lowers the reward
r(o_t) of the verifier by beta log(pi / pi_ref), whose mean is beta KL(pi || pi_ref). One reward
says little about single tokens; in examples/distill.py, a teacher rewards each token.

Do you need more than imitation? --method rejection imitates the best outputs of each group, as
`token_rewards` explains. With --max_steps 3 --num_prompts 640 --num_mini_batches 40
--num_iterations 3, it samples as many outputs as by default in 3 rounds, with 3 passes over each.

Departures from the papers: a verifier gives the rewards; as is usual, there is no factor gamma^t;
samples serve for several steps; b* measures |g|, where the paper takes the length, and leaves out
the output itself; rejection sampling goes on from pi in each round, while RFT samples once, removes
duplicates, and fine-tunes the original model.

Usage: python reinforce.py --task arithmetic
In 20 to 60 seconds on a CPU, the base policy of grpo.py becomes right 99 times in 100.
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

@dataclasses.dataclass(frozen=True)
class Config(common.Config):                # G, P, T and more are in common.Config
    baseline: Literal["none", "batch", "mean", "rloo", "optimal"] = flag("none", "b in (2)")
    view: Literal["sequence", "token"] = flag(
        "sequence", "A_t is R - b or G_t - b; they differ with gamma, beta, or rewards of moves")
    gamma: float = flag(1.0, "discount; below 1, right outputs get shorter")
    num_iterations: int = flag(1, "passes over each batch")
    beta: float = flag(0.0, "weight of the KL to the base")
    entropy_coef: float = flag(0.0, "weight of the entropy bonus (c_H)")
    method: Literal["reinforce", "rejection"] = flag(
        "reinforce", "rejection imitates the best outputs of each group")

    def rules(self):
        yield from super().rules()
        yield self.gamma <= 1, f"--gamma {self.gamma}: must be at most 1"
        if self.method == "rejection":
            has_none = self.baseline == "none"
            yield has_none, f"--baseline {self.baseline}: --method rejection has none; leave it out"
            is_one = self.gamma == 1 and self.beta == 0     # then G_t is R for all tokens
            is_whole = self.view == "sequence" or not is_one
            yield is_whole, "--view token: --method rejection needs --gamma or --beta, too"


# ---- 2. the algorithm ------------------------------------------------------------------------

def rewards_to_go(rewards, mask, gamma):
    """Compute G_t; masked slots are not steps, and get 0. (B, T), (B, T) -> (B, T)"""
    to_go = torch.zeros_like(rewards)
    G_t = torch.zeros_like(rewards[:, 0])                                       # (B,)
    for t in reversed(range(rewards.shape[1])):
        G_t = torch.where(mask[:, t] > 0, rewards[:, t] + gamma * G_t, G_t)     # (B,)  eq. (1)
        to_go[:, t] = G_t * mask[:, t]
    return to_go


def advantages(rewards, baseline="none", sq_grad_norms=None):
    """Compute R - b. `rewards` are R, and sq_grad_norms the |g|^2 of (6). (P, G) each -> (P, G)"""
    if baseline == "none":
        return rewards
    if baseline == "batch":
        return rewards - rewards.mean()
    if baseline == "mean":      # b contains R / G, so A_t is (G - 1) / G of that of rloo
        b = rewards.mean(dim=1, keepdim=True)           # for (2)
    elif baseline == "rloo":    # RLOO (2402.14740): the mean of the other outputs to q
        b = (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)   # for (2)
    elif baseline == "optimal":
        # b* (2505.23585), the constant that gives the least variance, estimated from the other
        # outputs to q. An estimate gives more variance, and rloo even may give more than b = 0.
        is_other = 1 - torch.eye(rewards.shape[1]).to(rewards)                  # (G, G)
        norms = sq_grad_norms[:, None] + 1e-30          # (P, 1, G)  avoids 0 / 0
        b = optimal_baseline(rewards[:, None], norms, is_other)                 # (P, G)
    else:
        raise ValueError(f"baseline={baseline!r}: must be none, batch, mean, rloo or optimal")
    A = rewards - b                                                             # (P, G)  eq. (2)
    return torch.where(common.has_signal(rewards), A, 0.0)      # equal rewards: exactly 0, not 1e-8


def optimal_baseline(rewards, sq_grad_norms, weights):
    """Compute b* of N outputs, whose probability is as `weights`. (..., N) each -> (...)"""
    # b* = E[|g|^2 R] / E[|g|^2],   g = grad log pi(o | q)                              (6)
    w = weights * sq_grad_norms
    return (w * rewards).sum(dim=-1) / w.sum(dim=-1)                            # eq. (6)


def policy_loss(logps, advantages, mask):
    """Compute L_t, 0 in masked slots. advantages: (B,), (B, 1) or (B, T). -> (B, T)"""
    A = advantages if advantages.dim() == 2 else advantages[:, None]            # (B, 1) or (B, T)
    check_shapes(logps, mask, A.expand(-1, logps.shape[-1]))
    return torch.where(mask > 0, -A * logps, 0.0)                               # (B, T)  eq. (3)


def kl(logps, ref_logps, estimator="k1"):
    """Estimate KL(pi || pi_ref) at each token, with the tokens before it held fixed. The samples
    are from pi. (B, T) each -> (B, T)"""
    x = logps - ref_logps
    if estimator == "k1":
        return x                            # unbiased; near pi_ref, k3 of grpo.py has less noise
    raise ValueError(f"estimator={estimator!r}: must be k1")


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


def check_shapes(*tensors):
    """Raise a ValueError unless all shapes are equal: torch would repeat smaller tensors."""
    shapes = [tuple(x.shape) for x in tensors if isinstance(x, torch.Tensor)]       # 0 fits all
    if len(set(shapes)) > 1:
        raise ValueError(f"the shapes {shapes} must be equal; advantages may have one column")


# ---- 3. the update ---------------------------------------------------------------------------

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


def token_rewards(task, batch, cfg):
    """Compute r_t, 0 in masked slots. -> (B, T)"""
    if cfg.method == "rejection":
        # RAFT (2304.06767), RFT (2308.01825): supervised learning of the outputs that have the best
        # reward of their group, if it is above 0, or if it is 0 and others of the group have less.
        # If it keeps M of N outputs, these have the reward N / M, and all others 0, so that (5),
        # with b = 0, averages over the kept outputs.
        best = batch.rewards.amax(dim=1, keepdim=True)                          # (P, 1)
        is_good = (best > 0) | (best == 0) & common.has_signal(batch.rewards)   # (P, 1)
        is_kept = ((batch.rewards == best) & is_good).to(batch.rewards)         # (P, G)
        rewards = is_kept / is_kept.mean().clamp(min=1e-9)
        no_moves = [[]] * len(batch.texts)
        batch = dataclasses.replace(batch, rewards=rewards, verified=no_moves)
    return task.token_rewards(batch)


@torch.no_grad()
def compute_advantages(policy, ref_logps, batch, rewards, cfg):
    """Compute A_t, 0 in masked slots, from r_t. (B, T) -> (B, T)"""
    if cfg.beta > 0:
        token_kl = kl(batch.logps, ref_logps, "k1") * batch.mask
        rewards = rewards - cfg.beta * token_kl                                 # (B, T)  eq. (4)
    to_go = rewards_to_go(rewards, batch.mask, cfg.gamma)                       # (B, T)
    R = to_go[:, 0].view_as(batch.rewards)                                      # (P, G)
    norms = None
    if cfg.baseline == "optimal":
        norms = squared_gradient_norms(policy, batch, cfg)                      # (P, G)
    A = advantages(R, cfg.baseline, norms).view(-1, 1)                          # (B, 1)  R - b
    if cfg.view == "token":
        A = A + (to_go - to_go[:, :1])                                          # (B, T)  G_t - b
    return A * batch.mask


def squared_gradient_norms(policy, batch, cfg):
    """Compute |g|^2 of (6), which needs a gradient for each row. -> (P, G)"""
    def sequence_logp(weights, prompt, tokens, mask):
        ids = torch.cat([prompt, tokens])[None]                                 # (1, W + T)
        logits = torch.func.functional_call(policy, weights, ids[:, :-1])[:, -len(tokens):]
        logps, _ = logprobs(logits, tokens[None], cfg.temperature, "torch")     # (1, T)
        return (logps * mask).sum()

    def squared_norm(*row):
        gradients = torch.func.grad(sequence_logp)(dict(policy.named_parameters()), *row)
        return sum(gradient.square().sum() for gradient in gradients.values())

    squared_norms = torch.func.vmap(squared_norm, chunk_size=cfg.micro_batch_size)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):        # vmap can batch it
        return squared_norms(batch.prompts, batch.tokens, batch.mask).view_as(batch.rewards)


def objective(policy, batch, A, part, cfg):
    """Compute L_t - c_H H_t of (5) for the rows `part`. -> (b, T), log pi (b, T)"""
    T = int(batch.lengths[part].max())
    tokens = batch.tokens[part, :T]                                             # (b, T)
    mask = batch.mask[part, :T]
    logps, entropy = score(policy, batch.prompts[part], tokens, cfg.temperature)
    token_loss = policy_loss(logps, A[part, :T], mask)
    token_loss = token_loss - cfg.entropy_coef * entropy
    return token_loss, logps.detach()


def backward(policy, batch, A, rows, cfg):
    """Accumulate the gradient of (5) over `rows`, in micro-batches. -> metrics"""
    num_sequences = len(rows)                           # in the whole optimizer step
    if cfg.entropy_coef == 0:
        rows = rows[A[rows].any(dim=1)]                 # other rows have no gradient
    loss_sum = max_log_ratio = 0.0
    for part in common.micro_batches(rows, batch.lengths, cfg.micro_batch_size):
        token_loss, logps = objective(policy, batch, A, part, cfg)              # (b, T) each
        T = token_loss.shape[1]
        mask = batch.mask[part, :T]
        loss = aggregate(token_loss, mask, "sequence_sum", num_sequences)       # eq. (5)
        loss.backward()

        log_rho = (logps - batch.logps[part, :T]) * mask                        # (b, T)
        loss_sum += loss.item()
        max_log_ratio = max(max_log_ratio, log_rho.abs().max().item())
    metrics = {"loss": loss_sum, "max_log_ratio": max_log_ratio}
    return metrics


def update(policy, optimizer, batch, A, cfg, step):
    """Pass over the batch num_iterations times, in num_mini_batches steps each. -> metrics"""
    history = []
    for rows in common.mini_batches(batch, cfg, "shuffle", step):
        optimizer.zero_grad(set_to_none=False)          # zeros: Adam also steps without signal
        metrics = backward(policy, batch, A, rows, cfg)
        grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm or torch.inf)
        optimizer.step()
        history.append(metrics | {"grad_norm": grad_norm.item()})
    return common.mean_metrics(history) | {
        "sampling/sampling_logp_difference/max": history[0]["max_log_ratio"]}


# ---- 4. training -----------------------------------------------------------------------------

COLUMNS = {"reward": "reward", "signal": "signal", "length": "completions/mean_length",
           "entropy": "entropy", "kl": "kl", "grad": "grad_norm"}


def main(argv=None):
    cfg = plumbing.parse_flags(Config, argv)
    task = common.load_task(cfg, verify)
    policy = GPT(cfg).to(cfg.device)
    with plumbing.Run(cfg, task, policy, COLUMNS, observers(cfg)) as run:
        reference = run.begin(sample_batch)
        optimizer = plumbing.AdamW(policy.parameters(), lr=cfg.learning_rate)

        run.start(evaluate, policy=policy, optimizer=optimizer)
        for step in range(run.step, cfg.max_steps):
            batch = sample_batch(policy, task, cfg, step)   # questions, G outputs of each, rewards
            rewards = token_rewards(task, batch, cfg)                           # (B, T)
            ref_logps, mean_kl = score_reference(reference, batch, cfg)
            A = compute_advantages(policy, ref_logps, batch, rewards, cfg)      # (B, T)
            metrics = update(policy, optimizer, batch, A, cfg, step)            # descend (5)
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
