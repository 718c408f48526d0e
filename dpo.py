"""DPO: direct preference optimization (arXiv:2305.18290).

DPO learns from pairs of outputs to a question q, of which one, w, was chosen, and the other, l, was
rejected. It needs no reward model, because a policy stands for a reward. Of all policies pi, the
one with the highest expected reward R less beta KL(pi || pi_ref) is

  pi*(y | q) = pi_ref(y | q) exp(R(q, y) / beta) / Z(q)

where Z(q) makes the probabilities add up to 1. (That objective is equal to beta log Z(q) -
beta KL(pi || pi*).) Conversely, a policy pi* is the best one for the reward

  R(q, y) = beta log(pi*(y | q) / pi_ref(y | q)) + beta log Z(q)

Suppose that w is chosen with probability sigmoid(R(q, w) - R(q, l)), the model of Bradley and
Terry. Then Z(q) cancels, and the likelihood of a pair depends on the policy alone. L is its
negative logarithm:

  h(y)  = sum_t log(pi(y_t | q, y_<t) / pi_ref(y_t | q, y_<t))                       (1)
  M     = h(w) - h(l)                                                                (2)
  L     = -(1 - e) log sigmoid(beta M) - e log sigmoid(-beta M)                      (3)
  KL_t  = pi_ref / pi - log(pi_ref / pi) - 1                                         (4)

pi_ref is the base policy. beta h(y) is the reward that pi stands for, but for beta log Z(q). e is
the chance that w and l were mixed up: 0 in DPO, more in cDPO (--label_smoothing). (4) is not in the
loss, but says at evaluations, over samples of pi, how far pi is from pi_ref. Other losses replace
(3): IPO (2310.12036), hinge (2309.06657), robust DPO (2403.00409) and SimPO (2405.14734).

  L     = (M - 1 / (2 beta))^2                                                       (5)
  L     = max(0, 1 - beta M)                                                         (6)
  L     = (-(1 - e) log sigmoid(beta M) + e log sigmoid(-beta M)) / (1 - 2 e)        (7)
  L     = -log sigmoid(beta (log pi(w | q) / |w| - log pi(l | q) / |l|) - gamma)     (8)

|w| is the number of tokens of w. If a share e of the pairs is mixed up, (7) is on average what the
loss of DPO is on the same pairs in the right order. SimPO has no pi_ref, which here is for metrics
alone. With --average_logps, h(y) is divided by |y| in the other losses, too. As the loss sees only
M, the chosen output may become less likely (rewards/chosen < 0), if the rejected one loses more.
Against this, RPO (2404.19733) adds

  -alpha / |w| log pi(w | q)                                                         (9)

The pairs: of G outputs to a question, the one with the best reward is chosen over that with the
worst, the second best over the second worst, and so on while the rewards differ. The base policy
writes the outputs, so the pairs of a run are a fixed data set, though made step by step; with
--online, the policy writes them; with --pairs, a file holds them.

Departures from the papers: by default a verifier chooses, not people; pi_ref is not trained on the
chosen outputs first. (5) has sums over tokens, as in its paper. TRL takes means, as --average_logps
does: with the same beta, the margin of outputs of n tokens then has to be n times as large.

Usage: python dpo.py --task arithmetic
In 30 seconds on a CPU, the base policy of grpo.py, whose likeliest answers are right one time in
ten, is right 82 to 98 times in 100, by seed: runs go past their best. With --online, or with
--nll_coef 1, all three seeds tried end at 99 or more.
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
# p), N pairs of rows; W prompt tokens, T completion tokens, L any number of tokens, V vocabulary,
# D width, H heads, KV key/value heads, hd head size.


# ---- 1. configuration ------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Config(common.Config):
    beta: float = flag(0.1, "weight of the KL to the base; ipo: 0.5, simpo: 2", low=1e-9)
    loss_type: str = flag("sigmoid", "(3), (5), (6), (7) or (8)",
                          choices=("sigmoid", "ipo", "hinge", "robust", "simpo"))
    label_smoothing: float = flag(0.0, "chance that a pair is the wrong way round (e)",
                                  low=0, high=0.49, needs="loss_type sigmoid|robust")
    simpo_gamma: float = flag(0.5, "margin that (8) asks for (gamma)", low=0,
                              needs="loss_type simpo")
    average_logps: bool = flag(False, "divide log-probabilities of outputs by their lengths")
    nll_coef: float = flag(0.0, "weight of (9), the likelihood of chosen outputs (alpha)", low=0)
    online: bool = flag(False, "pairs are made of outputs of the policy, not of the base")
    pairs: str = flag("", "file of pairs to learn from: lines with prompt, chosen, rejected")
    save_pairs: bool = flag(False, "write the pairs of each step to pairs.jsonl in the run folder")
    num_iterations: int = flag(1, "passes over the pairs of each batch", low=1)
    learning_rate: float = common.step_flag(1e-4, "of AdamW", low=0)
    does_nothing_with = {"average_logps": "loss_type simpo"} | dict.fromkeys(
        ("online", "save_pairs", "reward", "dynamic_sampling", "curriculum", "stop_at"), "pairs")


# ---- 2. the algorithm ------------------------------------------------------------------------

def preferences(rewards):
    """Pairs within each group: the best row and the worst, the second best and the second worst,
    and so on while their rewards differ. (P, G) -> chosen rows (N,), rejected rows (N,)"""
    P, G = rewards.shape
    order = rewards.argsort(dim=1, descending=True, stable=True)                # (P, G)
    order = order + G * torch.arange(P)[:, None]                                # rows of the batch
    chosen = order[:, :G // 2].flatten()
    rejected = order.flip(1)[:, :G // 2].flatten()
    differ = rewards.flatten()[chosen] > rewards.flatten()[rejected]
    return chosen[differ], rejected[differ]


def sequence_logps(logps, mask, average=False):
    """log pi(y | q) of whole completions y, or log pi(y | q) / |y|. (B, T), (B, T) -> (B,)"""
    total = torch.where(mask > 0, logps, 0.0).sum(dim=1)
    return total / mask.sum(dim=1).clamp(min=1) if average else total


def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta,
             loss_type="sigmoid", label_smoothing=0.0, gamma=0.0):
    """L of pairs, from the log-probabilities of whole completions. (N,) each -> (N,)"""
    e = label_smoothing
    h_chosen = chosen - ref_chosen                                              # (N,)  eq. (1)
    h_rejected = rejected - ref_rejected
    M = h_chosen - h_rejected                                                   # (N,)  eq. (2)
    if loss_type == "ipo":
        return (M - 1 / (2 * beta)).square()                                    # (N,)  eq. (5)
    if loss_type == "hinge":
        return (1 - beta * M).clamp(min=0)                                      # (N,)  eq. (6)
    if loss_type == "simpo":
        return -F.logsigmoid(beta * (chosen - rejected) - gamma)                # (N,)  eq. (8)
    right, mixed_up = -F.logsigmoid(beta * M), -F.logsigmoid(-beta * M)
    if loss_type == "robust":
        return ((1 - e) * right - e * mixed_up) / (1 - 2 * e)                   # (N,)  eq. (7)
    assert loss_type == "sigmoid", loss_type
    return (1 - e) * right + e * mixed_up                                       # (N,)  eq. (3)


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


# ---- 3. the update ---------------------------------------------------------------------------

METRICS = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies",
           "logps/chosen", "logps/rejected")


def pair_loss(policy, reference, batch, chosen, rejected, cfg):
    """L of N pairs of rows of a batch, and their METRICS. -> (N,), dict of name -> (N,)"""
    rows = torch.cat([chosen, rejected])                                        # (2 N,)
    T = batch.lengths[rows].max()
    prompts = batch.prompts[rows]
    tokens = batch.tokens[rows, :T]                                             # (2 N, T)
    mask = batch.mask[rows, :T]
    logps, _ = score(policy, prompts, tokens, cfg.temperature, cfg.kernel)      # (2 N, T)
    with torch.no_grad():
        ref_logps, _ = score(reference, prompts, tokens, cfg.temperature, cfg.kernel)

    N = len(chosen)
    average = cfg.average_logps or cfg.loss_type == "simpo"
    logp_chosen, logp_rejected = sequence_logps(logps, mask, average).split(N)          # (N,) each
    ref_chosen, ref_rejected = sequence_logps(ref_logps, mask, average).split(N)
    losses = dpo_loss(logp_chosen, logp_rejected, ref_chosen, ref_rejected,
                      cfg.beta, cfg.loss_type, cfg.label_smoothing, cfg.simpo_gamma)
    if cfg.nll_coef > 0:
        nll = -cfg.nll_coef * sequence_logps(logps[:N], mask[:N], average=True)         # eq. (9)
        losses = losses + nll

    with torch.no_grad():
        reward_chosen = cfg.beta * (logp_chosen - ref_chosen)
        reward_rejected = cfg.beta * (logp_rejected - ref_rejected)
    return losses, {
        "loss": losses, "rewards/chosen": reward_chosen, "rewards/rejected": reward_rejected,
        "rewards/margins": reward_chosen - reward_rejected,
        "rewards/accuracies": reward_chosen > reward_rejected,
        "logps/chosen": logp_chosen, "logps/rejected": logp_rejected}


def backward(policy, reference, batch, chosen, rejected, cfg):
    """Accumulate the gradient of the mean of L over N pairs, in micro-batches. -> metrics"""
    N = len(chosen)
    means = dict.fromkeys(METRICS, 0.0)                     # what they are without pairs
    longer = torch.maximum(batch.lengths[chosen], batch.lengths[rejected])      # (N,)
    size = (cfg.micro_batch_size + 1) // 2                  # in pairs, which have two rows each
    for part in common.micro_batches(torch.arange(N), longer, size):
        losses, metrics = pair_loss(policy, reference, batch, chosen[part], rejected[part], cfg)
        loss = losses.sum() / N
        loss.backward()
        for name, values in metrics.items():
            means[name] += values.sum().item() / N
    return means


@torch.no_grad()
def evaluate_pairs(policy, reference, batch, chosen, rejected, cfg):
    """The means of METRICS over pairs that are not learned from. -> dict"""
    if len(chosen) == 0:
        return dict.fromkeys(METRICS, 0.0)
    _, metrics = pair_loss(policy, reference, batch, chosen, rejected, cfg)
    return {name: values.sum().item() / len(chosen) for name, values in metrics.items()}


@torch.no_grad()
def kl_to_base(reference, batch, cfg):
    """The mean of (4) over the tokens of completions that the policy sampled. -> float"""
    ref_logps, _ = score(reference, batch.prompts, batch.tokens, cfg.temperature, cfg.kernel)
    token_kl = kl(batch.logps * batch.mask, ref_logps * batch.mask)             # (B, T)
    return (token_kl.sum() / batch.mask.sum()).item()


def update(policy, reference, optimizer, batch, chosen, rejected, cfg, step):
    """num_iterations passes over the pairs, num_mini_batches optimizer steps each. -> metrics"""
    learning_rate = common.warm_up(cfg, step)
    optimizer.param_groups[0]["lr"] = learning_rate
    N = len(chosen)
    num_parts = max(1, min(cfg.num_mini_batches, N))
    history = []
    for iteration in range(cfg.num_iterations):
        generator = common.generator(cfg.seed, "shuffle", step, iteration)
        order = torch.randperm(N, generator=generator)
        for part in order.tensor_split(num_parts):
            pairs = part.sort().values
            optimizer.zero_grad(set_to_none=False)      # zeros: Adam steps even without pairs
            metrics = backward(policy, reference, batch, chosen[pairs], rejected[pairs], cfg)
            grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm)
            metrics["grad_norm"] = grad_norm.item()
            common.check_finite(step, metrics)
            optimizer.step()
            history.append(metrics)
    return common.mean_metrics(history) | {"pairs": N, "learning_rate": learning_rate}


# ---- 4. training -----------------------------------------------------------------------------

COLUMNS = {"reward": "reward", "pairs": "pairs", "chosen": "rewards/chosen",
           "reject": "rewards/rejected", "ordered": "rewards/accuracies", "loss": "loss",
           "grad": "grad_norm"}


def main(argv=None):
    cfg = common.parse_flags(Config, argv)
    task = common.load_task(cfg, verify)
    sample = common.load_pairs(cfg, task, encode_examples, score) or sample_batch
    policy = GPT(cfg).to(cfg.device)
    run = common.Run(cfg, task, policy, COLUMNS, argv)
    run.load_base(warm_start)
    run.load_reward_model(sample_batch)                     # if --reward names it
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=cfg.learning_rate, weight_decay=cfg.weight_decay)
    held_out = sample_batch(reference, task, cfg, "pairs", split="test")
    held_out_pairs = preferences(held_out.rewards)

    def evaluate_both(policy, task, cfg, num_samples=0, progress=common.silent):
        """The scores of completions, the metrics of held-out pairs, and the KL to the base."""
        scores = evaluate(policy, task, cfg, num_samples, progress)
        metrics = evaluate_pairs(policy, reference, held_out, *held_out_pairs, cfg)
        scores |= {f"pairs/{name}": value for name, value in metrics.items()}
        samples = sample_groups(policy, task, cfg, "kl", 0, split="test")
        return scores | {"kl": kl_to_base(reference, samples, cfg)}

    for step in run.steps(evaluate_both, policy=policy, optimizer=optimizer):
        sampler = policy if cfg.online else reference
        batch = sample(sampler, task, cfg, step)            # questions, G outputs of each, rewards
        chosen, rejected = preferences(batch.rewards)                           # (N,) each
        metrics = update(                                                       # steps down L
            policy, reference, optimizer, batch, chosen, rejected, cfg, step)
        labels = torch.zeros(len(batch.texts))                                  # (B,)
        labels[chosen] = 1.0
        labels[rejected] = -1.0
        if cfg.save_pairs:
            run.append_pairs(batch, chosen, rejected, encode_examples)
        run.log(batch, labels, metrics, decode, score)
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
