"""DPO: direct preference optimization (arXiv:2305.18290).

RLHF trains a reward model on preferences, and then samples from the policy during training. DPO
needs neither: it learns directly from pairs of outputs to a question q, of which one, w, was
chosen, and the other, l, was rejected. This works because every policy stands for a reward. Of all
policies pi, the one with the highest expected reward R minus beta KL(pi || pi_ref) is

  pi*(y | q) = pi_ref(y | q) exp(R(q, y) / beta) / Z(q)

where Z(q) makes the probabilities add up to 1. Conversely, pi* is the best policy for the reward

  R(q, y) = beta log(pi*(y | q) / pi_ref(y | q)) + beta log Z(q)

Suppose that w is chosen with probability sigmoid(R(q, w) - R(q, l)), the model of Bradley and
Terry. Then Z(q) cancels, and the likelihood of a pair depends on the policy alone. L is its
negative logarithm:

  h(y)  = sum_t log(pi(y_t | q, y_<t) / pi_ref(y_t | q, y_<t))                       (1)
  M     = h(w) - h(l)                                                                (2)
  L     = -(1 - e) log sigmoid(beta M) - e log sigmoid(-beta M)                      (3)
  KL_t  = pi_ref / pi - log(pi_ref / pi) - 1                                         (4)

pi_ref is the base. e is the probability that w and l were mixed up: 0 in DPO, more in cDPO
(--label_smoothing). (4) is not in the loss: evaluations use it, on samples of pi, to measure how
far pi is from pi_ref. The loss depends on M alone, so even the chosen output may become less
likely, if the rejected one loses more. Other losses are explained at their branches in the code.

The pairs are made from G outputs to a question: the output with the best reward is chosen over the
one with the worst, the second best over the second worst, and so on while the rewards differ. The
base writes the outputs, so the pairs of a run are a fixed data set, although it is made step by
step. With --online, the policy writes them. docs/extending.md learns from your own pairs.

Departures from the papers: by default, a verifier chooses, not people; pi_ref is not trained on the
chosen outputs first. For IPO, TRL uses means over tokens, as --average_logps does, instead of sums.
The metrics rewards/* are beta h(y) with every loss, although SimPO and ORPO have no pi_ref.

Usage: python dpo.py --task arithmetic
The base policy of grpo.py, whose most likely answers are right one time in ten, becomes right 78
to 90 times in 100, with five seeds, in 20 to 60 seconds on a CPU: it thinks, but some of the sums
that it believes wrong are not mended. With --online, it is right 88 times with the first seed.
"""
import dataclasses
import functools
import re
from typing import Literal

import common  # a copied script needs common.py and plumbing.py next to it
import plumbing
from common import EOS, PAD, VOCAB_SIZE, decode, encode_prompts, flag  # isort: split

import torch
import torch.nn.functional as F
from torch import nn

# Shapes: P prompts, G completions of each, B = P * G rows (row p * G + g is completion g of prompt
# p), N pairs of rows; W prompt tokens, T completion tokens, L any number of tokens, V size of the
# vocabulary, D width, H heads, KV key/value heads, hd head size.


# ---- 1. configuration ------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Config(common.Config):
    beta: float = flag(0.1, "weight of the KL to the base; ipo: 0.5, simpo: 2")
    loss_type: Literal["sigmoid", "ipo", "hinge", "robust", "simpo", "orpo"] = flag(
        "sigmoid", "see (3); ORPO's paper also has nll_coef 1")
    label_smoothing: float = flag(0.0, "probability that a pair is mixed up (e)")
    simpo_gamma: float = flag(0.5, "offset of the margin in (8) (gamma)")
    average_logps: bool = flag(False, "divide log pi of an output by its length")
    nll_coef: float = flag(0.0, "weight of (9), for the chosen outputs (alpha)")
    online: bool = flag(False, "make pairs from outputs of the policy, not the base")
    num_iterations: int = flag(1, "passes over the pairs of each batch")
    learning_rate: float = flag(1e-4, "learning rate of AdamW")
    max_steps: int = flag(30, "number of batches to train on; 0: only the base")

    def rules(self):
        yield from super().rules()
        yield self.beta > 0, "--beta 0: must be above 0; it keeps the policy near the base"
        yield self.label_smoothing < 0.5, "--label_smoothing: must be below 0.5"
        has_e = self.loss_type in ("sigmoid", "robust") or self.label_smoothing == 0
        yield has_e, f"--label_smoothing: has no effect with --loss_type {self.loss_type}"
        has_gamma = self.loss_type == "simpo" or self.simpo_gamma == Config.simpo_gamma
        yield has_gamma, "--simpo_gamma: needs --loss_type simpo"
        is_sum = self.loss_type not in ("simpo", "orpo") or not self.average_logps
        yield is_sum, f"--average_logps: --loss_type {self.loss_type} always averages; leave it out"


# ---- 2. the algorithm ------------------------------------------------------------------------

def preferences(rewards):
    """Pair the rows of each group: the best with the worst, the second best with the second worst,
    and so on while their rewards differ. (P, G) -> chosen rows (N,), rejected rows (N,)"""
    P, G = rewards.shape
    order = rewards.argsort(dim=1, descending=True, stable=True)                # (P, G)
    order = order + G * torch.arange(P)[:, None]                                # rows of the batch
    chosen = order[:, :G // 2].flatten()
    rejected = order.flip(1)[:, :G // 2].flatten()
    differ = rewards.flatten()[chosen] > rewards.flatten()[rejected]
    return chosen[differ], rejected[differ]


def sequence_logps(logps, mask, average=False):
    """Compute log pi(y | q) of completions y, or its average per token. (B, T), (B, T) -> (B,)"""
    check_shapes(logps, mask)
    total = torch.where(mask > 0, logps, 0.0).sum(dim=1)
    if not average:
        return total
    return total / mask.sum(dim=1).clamp(min=1)


def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta,
             loss_type="sigmoid", label_smoothing=0.0, gamma=0.0):
    """Compute L of pairs from log-probabilities of whole completions. (N,) each -> (N,)"""
    check_shapes(chosen, rejected, ref_chosen, ref_rejected)
    e = label_smoothing
    h_chosen = chosen - ref_chosen                                              # (N,)  eq. (1)
    h_rejected = rejected - ref_rejected                                        # (N,)  for (1)
    M = h_chosen - h_rejected                                                   # (N,)  eq. (2)
    right = -F.logsigmoid(beta * M)                                             # (N,)  for (3)
    mixed_up = -F.logsigmoid(-beta * M)                                         # (N,)  for (3)
    if loss_type == "sigmoid":
        return (1 - e) * right + e * mixed_up                                   # (N,)  eq. (3)
    if loss_type == "ipo":
        # IPO (2310.12036): if e is 0, (3) never stops raising M, so this aims at a fixed M.
        # L = (M - 1 / (2 beta))^2                                              (5)
        return (M - 1 / (2 * beta)).square()                                    # (N,)  eq. (5)
    if loss_type == "hinge":
        # The hinge loss (2309.06657) stops once beta M is 1.
        # L = max(0, 1 - beta M)                                                (6)
        return (1 - beta * M).clamp(min=0)                                      # (N,)  eq. (6)
    if loss_type == "robust":
        # Robust DPO (2403.00409): pairs that are mixed up bias (3). If a share e of them is, this
        # is on average the loss of DPO on the same pairs in the right order.
        # L = (-(1 - e) log sigmoid(beta M) + e log sigmoid(-beta M)) / (1 - 2 e)         (7)
        return ((1 - e) * right - e * mixed_up) / (1 - 2 * e)                   # (N,)  eq. (7)
    if loss_type == "orpo":
        # ORPO (2403.07691) has no pi_ref, and adds (9) with alpha = 1; p(y) = pi(y | q)^(1 / |y|)
        # L = -beta log sigmoid(log(p(w) / (1 - p(w))) - log(p(l) / (1 - p(l))))          (10)
        log_odds = chosen.exp().logit(1e-7) - rejected.exp().logit(1e-7)        # not inf for p = 1
        return -beta * F.logsigmoid(log_odds)                                   # (N,)  eq. (10)
    if loss_type == "simpo":
        # SimPO (2405.14734) needs no pi_ref; |w| is the number of tokens of w.
        # L = -log sigmoid(beta (log pi(w | q) / |w| - log pi(l | q) / |l|) - gamma)      (8)
        return -F.logsigmoid(beta * (chosen - rejected) - gamma)                # (N,)  eq. (8)
    raise ValueError(f"loss_type={loss_type!r}: must be sigmoid, ipo, hinge, robust, simpo or orpo")


def kl(logps, ref_logps, estimator="k3"):
    """Estimate KL(pi || pi_ref) at each token, with the tokens before it held fixed. The samples
    are from pi. (B, T) each -> (B, T)"""
    x = logps - ref_logps
    if estimator == "k3":
        return torch.expm1(-x) + x          # unbiased and never negative               eq. (4)
    raise ValueError(f"estimator={estimator!r}: must be k3")


def check_shapes(*tensors):
    """Raise a ValueError unless all shapes are equal: torch would repeat smaller tensors."""
    shapes = [tuple(x.shape) for x in tensors if isinstance(x, torch.Tensor)]       # 0 fits all
    if len(set(shapes)) > 1:
        raise ValueError(f"the shapes {shapes} must be equal; advantages may have one column")


# ---- 3. the update ---------------------------------------------------------------------------

METRICS = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies",
           "logps/chosen", "logps/rejected")


def pair_loss(policy, reference, batch, chosen, rejected, cfg):
    """Compute L and the METRICS, in this order, of N pairs of rows. -> (N,), (7, N)"""
    rows = torch.cat([chosen, rejected])                                        # (2 N,)
    T = int(batch.lengths[rows].max())
    prompts = batch.prompts[rows]
    tokens = batch.tokens[rows, :T]                                             # (2 N, T)
    mask = batch.mask[rows, :T]
    logps, _ = score(policy, prompts, tokens, cfg.temperature)                  # (2 N, T)
    with torch.no_grad():
        ref_logps, _ = score(reference, prompts, tokens, cfg.temperature)

    N = len(chosen)
    average = cfg.average_logps or cfg.loss_type in ("simpo", "orpo")
    logp_chosen, logp_rejected = sequence_logps(logps, mask, average).split(N)          # (N,) each
    ref_chosen, ref_rejected = sequence_logps(ref_logps, mask, average).split(N)
    losses = dpo_loss(logp_chosen, logp_rejected, ref_chosen, ref_rejected,
                      cfg.beta, cfg.loss_type, cfg.label_smoothing, cfg.simpo_gamma)
    if cfg.nll_coef > 0:
        # RPO (2404.19733): (3) may make the chosen output less likely, so this is added to L.
        # -alpha / |w| log pi(w | q)                                                    (9)
        nll = -cfg.nll_coef * sequence_logps(logps[:N], mask[:N], average=True)         # eq. (9)
        losses = losses + nll
    reward_chosen = cfg.beta * (logp_chosen - ref_chosen)       # the implicit reward
    reward_rejected = cfg.beta * (logp_rejected - ref_rejected)
    margins = reward_chosen - reward_rejected
    return losses, torch.stack([losses, reward_chosen, reward_rejected, margins,
                                (margins > 0).to(margins), logp_chosen, logp_rejected]).detach()


def backward(policy, reference, batch, chosen, rejected, cfg):
    """Accumulate the gradient of the mean of L over N pairs, in micro-batches. Without gradients
    enabled, only the metrics are computed. -> metrics"""
    N = len(chosen)
    chosen, rejected = torch.stack([chosen, rejected]).to(batch.tokens.device)
    sums = torch.zeros(len(METRICS))
    longer = torch.maximum(batch.lengths[chosen], batch.lengths[rejected])      # (N,)
    size = (cfg.micro_batch_size + 1) // 2                  # pairs per part; each has two rows
    for part in common.micro_batches(torch.arange(N, device=longer.device), longer, size):
        losses, metrics = pair_loss(policy, reference, batch, chosen[part], rejected[part], cfg)
        if torch.is_grad_enabled():
            (losses.sum() / N).backward()
        sums += metrics.sum(dim=1).cpu()
    return dict(zip(METRICS, (sums / max(N, 1)).tolist()))


def update(policy, reference, optimizer, batch, chosen, rejected, cfg, step):
    """Pass over the pairs num_iterations times, in num_mini_batches steps each. -> metrics"""
    N = len(chosen)
    num_parts = max(1, min(cfg.num_mini_batches, N))
    history = []
    for iteration in range(cfg.num_iterations):
        order = torch.randperm(N, generator=common.generator(cfg.seed, "shuffle", step, iteration))
        for part in order.tensor_split(num_parts):
            pairs = part.sort().values
            optimizer.zero_grad(set_to_none=False)      # zeros: Adam also steps without pairs
            metrics = backward(policy, reference, batch, chosen[pairs], rejected[pairs], cfg)
            limit = cfg.max_grad_norm or torch.inf
            grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), limit)
            optimizer.step()
            history.append(metrics | {"grad_norm": grad_norm.item()})
    return common.mean_metrics(history) | {"pairs": N}


# ---- 4. training -----------------------------------------------------------------------------

COLUMNS = {"reward": "reward", "pairs": "pairs", "chosen": "rewards/chosen",
           "reject": "rewards/rejected", "ordered": "rewards/accuracies", "loss": "loss",
           "grad": "grad_norm"}


@torch.no_grad()
def evaluate_pairs(reference, held_out, policy, task, cfg, greedy=False, opening=""):
    """Evaluate; add the metrics of the held-out pairs and the KL to the base. -> scores"""
    scores = evaluate(policy, task, cfg, greedy, opening)
    if opening:
        return scores
    metrics = backward(policy, reference, held_out, *preferences(held_out.rewards), cfg)
    scores |= {f"pairs/{name}": value for name, value in metrics.items()}
    drawn = sample_batch(policy, task, cfg, "kl", split="test")
    ref_logps, _ = score(reference, drawn.prompts, drawn.tokens, cfg.temperature)
    mask = drawn.mask                                                           # (B, T)
    token_kl = kl(drawn.logps * mask, ref_logps * mask)
    return scores | {"kl": (token_kl.sum() / mask.sum()).item()}


def main(argv=None):
    cfg = plumbing.parse_flags(Config, argv)
    task = common.load_task(cfg, verify)
    policy = GPT(cfg).to(cfg.device)
    with plumbing.Run(cfg, task, policy, COLUMNS, observers(cfg)) as run:
        reference = run.begin(sample_batch)
        optimizer = plumbing.AdamW(policy.parameters(), lr=cfg.learning_rate)
        held_out = sample_batch(reference, task, cfg, "pairs", split="test")
        run.start(functools.partial(evaluate_pairs, reference, held_out),
                  policy=policy, optimizer=optimizer)
        for step in range(run.step, cfg.max_steps):
            sampler = policy if cfg.online else reference
            batch = sample_batch(sampler, task, cfg, step)  # questions, G outputs of each, rewards
            chosen, rejected = preferences(batch.rewards)                       # (N,) each
            metrics = update(                                                   # descend L
                policy, reference, optimizer, batch, chosen, rejected, cfg, step)
            labels = torch.zeros(len(batch.texts))                              # (B,)
            labels[chosen] = 1.0
            labels[rejected] = -1.0
            run.log(batch, labels, metrics)
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
