"""REINFORCE for language models (Williams 1992), with the baselines that came after it.

For each question q, sample outputs o from the policy pi. Token o_t earns the reward r_t, usually 0
but for the last. The more the return R of an output exceeds a baseline b, the likelier it becomes.

  G_t   = r_t + gamma G_t+1                                                          (1)
  A_t   = R - b                                       G_t - b with --view token      (2)
  L_t   = -A_t log pi(o_t | q, o_<t)                                                 (3)
  KL_t  = pi_ref / pi - log(pi_ref / pi) - 1                                         (4)
  L     = 1/B sum_i sum_t (L_t - c_H H_t)                                            (5)
  b*    = E[|g|^2 R] / E[|g|^2],   g = grad log pi(o | q)                            (6)

G_t is what is earned from token t on, and R = G_1. H_t is the entropy of the policy at token t, c_H
its weight, and B the number of outputs. If gamma is 1 and b does not depend on o, the mean of -grad
sum_t L_t is the gradient of the mean of R. b adds nothing to it, since grad log pi(o | q) is 0 in
the mean, but it changes the variance. These are b:

  --baseline none      0
  --baseline batch     the mean return of all outputs
  --baseline mean      the mean return of the G outputs to q: A_t is (G - 1) / G of that of rloo
  --baseline rloo      the mean return of the other outputs to q (2402.14740)
  --baseline optimal   b*, which has the least variance (2505.23585), estimated from these others

No other number b for all outputs to q has less variance than b*. An estimate of b* has more, and
other baselines may have more than none: from the base of arithmetic, rloo has.

With --teacher, a policy pi_T takes the place of the verifier: on-policy distillation (2306.13649),
whose samples are the student's, as in (3), and whose rewards are high at tokens that the teacher
finds likelier. With --view token --gamma 0, the mean of -grad sum_t L_t is -grad sum_t KL(pi ||
pi_T) at the prefixes that pi wrote, and with gamma 1 that of the KL of whole outputs:

  r_t   = log pi_T(o_t | q, o_<t) - log pi(o_t | q, o_<t)                            (7)

--beta lowers r_t by beta log(pi / pi_ref), which like (4) estimates, at token t, the KL to the base
policy pi_ref. --method rejection (RFT, 2308.01825) makes (5) supervised learning of right outputs:
if M of the N outputs of a batch are right, these have reward N / M, all others 0.

Departures from the papers: by default a verifier rewards; the gradient lacks a factor gamma^t, as
is usual; a batch serves for several steps, though after the first its samples are not those of pi;
distillation takes the gradient of the KL from the sampled tokens, not over the whole vocabulary.

Usage: python reinforce.py --task arithmetic
In 20 seconds on a CPU, the base policy of grpo.py, right one time in ten, and three to four times
when it samples, is right 99 times in 100.
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

@dataclasses.dataclass(frozen=True)
class Config(common.Config):
    method: str = flag("reinforce", "rejection: supervised learning of right outputs",
                       choices=("reinforce", "rejection"))
    baseline: str = flag("none", "b in (2)", choices=("none", "batch", "mean", "rloo", "optimal"))
    view: str = flag("sequence", "whether A_t is R - b or G_t - b", choices=("sequence", "token"))
    gamma: float = flag(1.0, "discount; below 1, right outputs get shorter", low=0, high=1)
    num_iterations: int = flag(1, "passes over each batch", low=1)
    beta: float = flag(0.0, "weight of the KL to the base", low=0)
    entropy_coef: float = flag(0.0, "weight of the entropy bonus (c_H)", low=0)
    entropy_decay_steps: int = flag(0, "steps in which c_H falls to 0; 0: it stays", low=0,
                                     needs="entropy_coef")
    teacher: str = flag("", "run folder of the policy that rewards by (7)")
    judged_flags = common.Config.judged_flags | {"method"}
    does_nothing_with = {"reward": "method rejection, teacher", "method": "teacher"}


# ---- 2. the algorithm ------------------------------------------------------------------------

def rewards_to_go(rewards, mask, gamma):
    """G_t, 0 in masked slots, which are no steps. (B, T), (B, T) -> (B, T)"""
    to_go = torch.zeros_like(rewards)
    G_t = torch.zeros_like(rewards[:, 0])                                       # (B,)
    for t in reversed(range(rewards.shape[1])):
        G_t = torch.where(mask[:, t] > 0, rewards[:, t] + gamma * G_t, G_t)     # (B,)  eq. (1)
        to_go[:, t] = G_t * mask[:, t]
    return to_go


def optimal_baseline(rewards, sq_grad_norms, weights):
    """b* of N outputs with probabilities in proportion to `weights`. (..., N) each -> (...)"""
    w = weights * sq_grad_norms
    return (w * rewards).sum(dim=-1) / w.sum(dim=-1)                            # eq. (6)


def advantages(rewards, baseline="none", sq_grad_norms=None):
    """R - b, where `rewards` are R and sq_grad_norms the |g|^2 of (6). (P, G) each -> (P, G)"""
    if baseline == "none":
        return rewards
    if baseline == "batch":
        return rewards - rewards.mean()
    if baseline == "mean":
        b = rewards.mean(dim=1, keepdim=True)           # its own share shrinks A by 1/G
    elif baseline == "rloo":
        b = (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
    else:
        is_other = 1 - torch.eye(rewards.shape[1]).to(rewards)                  # (G, G)
        norms = sq_grad_norms[:, None] + 1e-30          # (P, 1, G)  if all are 0, they are equal
        b = optimal_baseline(rewards[:, None], norms, is_other)                 # (P, G)
    A = rewards - b                                                             # (P, G)  eq. (2)
    return torch.where(common.has_signal(rewards), A, 0.0)      # exactly 0 among equals, not 1e-8


def policy_loss(logps, advantages, mask):
    """L_t, 0 in masked slots; advantages are (B,) or (B, T). -> (B, T)"""
    A = advantages if advantages.dim() == 2 else advantages[:, None]            # (B, 1) or (B, T)
    return torch.where(mask > 0, -A * logps, 0.0)                               # (B, T)  eq. (3)


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

def squared_gradient_norms(policy, batch, cfg):
    """|g|^2 of (6) for each row, which takes a gradient for each row. -> (B,)"""
    def sequence_logp(weights, prompt, tokens, mask):
        ids = torch.cat([prompt, tokens])[None]                                 # (1, W + T)
        logits = torch.func.functional_call(policy, weights, ids[:, :-1])[:, -len(tokens):]
        logps, _ = logprobs(logits, tokens[None], cfg.temperature, "torch")     # (1, T)
        return (logps * mask).sum()

    def squared_norm(*row):
        gradients = torch.func.grad(sequence_logp)(dict(policy.named_parameters()), *row)
        return sum(gradient.square().sum() for gradient in gradients.values())

    squared_norms = torch.func.vmap(squared_norm, chunk_size=cfg.micro_batch_size)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):        # which vmap can batch
        return squared_norms(batch.prompts, batch.tokens, batch.mask)


@torch.no_grad()
def token_rewards(teacher, batch, cfg):
    """r_t, 0 in masked slots. -> (B, T)"""
    if teacher is not None:
        logps, _ = score(teacher, batch.prompts, batch.tokens, cfg.temperature, cfg.kernel)
        return (logps - batch.logps) * batch.mask                               # eq. (7)
    if cfg.method == "rejection":                           # so that (5) averages over right ones
        share = batch.is_correct.double().mean().clamp(min=1e-9)
        batch = dataclasses.replace(batch, verdicts=[], rewards=batch.is_correct / share)
    return common.token_rewards(batch, decode)


@torch.no_grad()
def compute_advantages(policy, reference, batch, rewards, cfg):
    """A_t, 0 in masked slots, from r_t. (B, T) -> (B, T)"""
    if cfg.beta > 0:
        ref_logps, _ = score(reference, batch.prompts, batch.tokens, cfg.temperature, cfg.kernel)
        rewards = rewards - cfg.beta * kl(batch.logps, ref_logps, "k1") * batch.mask

    to_go = rewards_to_go(rewards, batch.mask, cfg.gamma)                       # (B, T)
    R = to_go[:, 0].view_as(batch.rewards)                                      # (P, G)
    is_optimal = cfg.baseline == "optimal"
    norms = squared_gradient_norms(policy, batch, cfg).view_as(R) if is_optimal else None
    A = advantages(R, cfg.baseline, norms).view(-1, 1)                          # (B, 1)  R - b
    if cfg.view == "token":
        A = A + (to_go - to_go[:, :1])                                          # (B, T)  G_t - b
    return A * batch.mask


def backward(policy, batch, A, rows, cfg, entropy_coef):
    """Accumulate the gradient of (5) over `rows`, in micro-batches. -> metrics"""
    num_sequences = len(rows)
    if entropy_coef == 0:
        rows = rows[A[rows].any(dim=1).cpu()]               # the others have no gradient

    loss_sum, max_log_ratio = 0.0, 0.0
    for part in common.micro_batches(rows, batch.lengths, cfg.micro_batch_size):
        T = batch.lengths[part].max()
        tokens = batch.tokens[part, :T]                                         # (b, T)
        mask = batch.mask[part, :T]
        logps, entropy = score(policy, batch.prompts[part], tokens, cfg.temperature, cfg.kernel)
        token_loss = policy_loss(logps, A[part, :T], mask) - entropy_coef * entropy
        loss = aggregate(token_loss, mask, "sequence_sum", num_sequences)       # eq. (5)
        loss.backward()

        log_ratio = (logps.detach() - batch.logps[part, :T]) * mask             # (b, T)
        loss_sum += loss.item()
        max_log_ratio = max(max_log_ratio, log_ratio.abs().max().item())
    return {"loss": loss_sum, "max_log_ratio": max_log_ratio}


def update(policy, reference, optimizer, batch, A, cfg, step):
    """num_iterations passes over the batch, num_mini_batches optimizer steps each. -> metrics"""
    optimizer.param_groups[0]["lr"] = common.warm_up(cfg, step)
    history = []
    for rows in common.mini_batches(batch, cfg, "shuffle", step):
        optimizer.zero_grad(set_to_none=False)          # zeros: Adam steps even without signal
        metrics = backward(policy, batch, A, rows, cfg, common.decay_entropy(cfg, step))
        grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm)
        metrics["grad_norm"] = grad_norm.item()
        common.check_finite(step, metrics)
        optimizer.step()
        history.append(metrics)

    every = 1 if cfg.beta > 0 else 8                    # for a metric, some rows are enough
    prompts, tokens, mask = batch.prompts[::every], batch.tokens[::every], batch.mask[::every]
    with torch.no_grad():
        ref_logps, _ = score(reference, prompts, tokens, cfg.temperature, cfg.kernel)
    token_kl = kl(batch.logps[::every], ref_logps, "k1") * mask                 # (B / every, T)
    return common.mean_metrics(history) | {
        "kl": (token_kl.sum() / mask.sum()).item(), "learning_rate": common.warm_up(cfg, step),
        "sampling/sampling_logp_difference/max": history[0]["max_log_ratio"]}


# ---- 4. training -----------------------------------------------------------------------------

COLUMNS = {"reward": "reward", "signal": "signal", "length": "completions/mean_length",
           "entropy": "entropy", "kl": "kl", "teacher": "teacher_kl", "grad": "grad_norm"}


def main(argv=None):
    cfg = common.parse_flags(Config, argv)
    task = common.load_task(cfg, verify)
    policy = GPT(cfg).to(cfg.device)
    run = common.Run(cfg, task, policy, COLUMNS, argv)
    teacher = run.load_teacher(cfg.teacher)                 # or None
    run.load_base(warm_start)
    run.load_reward_model(sample_batch)                     # if --reward names it
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=cfg.learning_rate, weight_decay=cfg.weight_decay)

    for step in run.steps(evaluate, policy=policy, optimizer=optimizer):
        batch = sample_batch(policy, task, cfg, step)       # questions, G outputs of each, rewards
        rewards = token_rewards(teacher, batch, cfg)                            # (B, T)
        A = compute_advantages(policy, reference, batch, rewards, cfg)          # (B, T)
        metrics = update(policy, reference, optimizer, batch, A, cfg, step)     # steps down (5)
        if teacher is not None:
            metrics["teacher_kl"] = -(rewards.sum() / batch.mask.sum()).item()
        run.log(batch, A, metrics, decode, score)
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
