"""GRPO (DeepSeekMath, arXiv:2402.03300) in one file: a small GPT learns to think before it answers.

For each question q, sample G outputs o_1 .. o_G and score them. An output is reinforced if it did
better than the mean of its group. The group mean is the baseline, so no critic is needed.

  A_i   = (r_i - mean(r)) / (std(r) + 1e-4)                                          (1)
  rho_t = pi(o_t | q, o_<t) / pi_old(o_t | q, o_<t)                                  (2)
  L_t   = -min(rho_t A, clip(rho_t, 1 - eps_low, 1 + eps_high) A)                    (3)
  L     = 1/B sum_i 1/|o_i| sum_t L_t                                                (5)

o_t is token t of an output, and A is the output's A_i. B is the number of outputs in an update, or
of rows in a shape; pi_old sampled the outputs. It takes two minutes on two cores. grpo.py adds a KL
(4), other losses, flags and tasks; real.py trains pretrained models.
"""
import operator
import random
import re
import zlib

import torch
import torch.nn.functional as F
from torch import nn

P = 32              # questions in a step
G = 8               # outputs to each question; an update uses half of the P * G outputs
W = 18              # tokens in every question
T = 38              # tokens in an output, at most
D = 64              # width of the GPT
H = 4               # attention heads, each of size D / H
RATE = 5e-4         # learning rate in the first step, from which it falls to 0
HELD_OUT = 500      # questions in an evaluation
VOCABULARY = [*"0123456789+-*=;()", "<think>", "</think>", "<answer>", "</answer>", "<end>"]    # V
END = VOCABULARY.index("<end>")
COMPUTE = {"+": operator.add, "-": operator.sub, "*": operator.mul}

# ---- questions, verifier, tokenizer ----------------------------------------------------------
def sample_problem(rng, held_out=False, wrong=0.0):
    """A question ((((3+4)-5)*4)-2)=, its answer 6, its work 3+4=7;7-5=2;2*4=8;8-2=6, and where that
    ends. Of one sum in seven, such as 5+8, people believe a wrong result, here 14. The work has it
    in a share `wrong` of the cases, and goes on from it."""
    while True:
        value = belief = rng.randint(1, 9)
        question = str(value)
        work = []
        while len(work) < 4:
            sign = rng.choice("+-*")
            operand = rng.randint(1, 9)
            result = COMPUTE[sign](value, operand)
            believed = COMPUTE[sign](belief, operand)
            step = f"{belief}{sign}{operand}"
            if zlib.crc32(step.encode()) % 1000 < 150 and rng.random() < wrong:
                believed += 1 if believed < 20 else -1
            if 0 <= result <= 20 and 0 <= believed <= 20:
                work.append(f"{step}={believed}")
                question = f"({question}{sign}{operand})"
                value, belief = result, believed
        question += "="
        if (zlib.crc32(question.encode()) % 10 == 0) == held_out:   # one in ten is held out
            return question, value, ";".join(work), belief

def verify(answer, text):
    """Whether the one <answer> block of a text holds the right number. -> 1.0 or 0.0"""
    numbers = re.findall("<answer> *(-?[0-9]{1,20}) *</answer>", text)
    is_one = text.count("<answer>") == text.count("</answer>") == 1
    return float(is_one and [int(number) for number in numbers] == [answer])

def encode(texts, L):
    """The first L tokens of each text. Shorter texts are padded with END. -> (B, L)"""
    rows = [re.findall("<.*?>|.", text)[:L] for text in texts]
    rows = [row + ["<end>"] * (L - len(row)) for row in rows]
    return torch.tensor([[VOCABULARY.index(word) for word in row] for row in rows])

def decode(tokens):
    """The texts of outputs, each up to its END. (B, W + T) -> list of str"""
    texts = ["".join(VOCABULARY[token] for token in row) for row in tokens[:, W:].tolist()]
    return [text.partition("<end>")[0] for text in texts]

# ---- the policy: a GPT with RMSNorm, rotary positions, SwiGLU, tied embeddings ---------------
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.RMSNorm(D)
        self.qkv = nn.Linear(D, D + 2 * D // H, bias=False)     # H queries, a key, a value
        self.out = nn.Linear(D, D, bias=False)
        self.mlp_norm = nn.RMSNorm(D)
        self.gate_up = nn.Linear(D, 2 * 176, bias=False)
        self.down = nn.Linear(176, D, bias=False)

    def forward(self, x, cos, sin, cache):
        qkv = self.qkv(self.attention_norm(x))                              # (B, L, D + 2 D / H)
        qkv = qkv.unflatten(-1, (H + 2, -1)).transpose(1, 2)                # (B, H + 2, L, D / H)
        qk, v = qkv.split([H + 1, 1], 1)
        left, right = qk.chunk(2, -1)                           # each pair is turned by an angle
        qk = torch.cat([left * cos - right * sin, left * sin + right * cos], -1)
        q, k = qk.split([H, 1], 1)
        kv = torch.stack([k, v])                                            # (2, B, 1, L, D / H)
        if self in cache:
            kv = torch.cat([cache[self], kv], 3)                # earlier tokens come first
        cache[self] = kv                                        # a single new token sees them all
        y = F.scaled_dot_product_attention(q, *kv, is_causal=x.shape[1] > 1, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Parameter(torch.randn(len(VOCABULARY), D) * 0.02)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.RMSNorm(D)

    def forward(self, tokens, cache):
        """Logits after each token. If the cache is not empty, L must be 1. (B, L) -> (B, L, V)"""
        start = cache[self.blocks[0]].shape[3] if cache else 0
        positions = torch.arange(start, start + tokens.shape[1])            # (L,)
        half = D // H // 2
        angles = positions[:, None] * 10_000.0 ** (-torch.arange(half) / half)      # (L, half)
        x = self.embed[tokens]                                              # (B, L, D)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin(), cache)
        return self.norm(x) @ self.embed.T

def logprobs(policy, tokens):
    """log pi(o_t | q, o_<t), and a mask: 1.0 up to END, then 0.0. (B, W + T) -> (B, T), (B, T)"""
    logits = policy(tokens[:, :-1], {})[:, W - 1:]                          # (B, T, V)
    is_end = tokens[:, W:] == END                                           # (B, T)
    mask = is_end.cumsum(1) - is_end.long() == 0            # true if no END comes before
    return -F.cross_entropy(logits.mT, tokens[:, W:], reduction="none"), mask.float()

@torch.no_grad()
def sample(policy, questions, greedy=False):
    """Write an output after each question. What follows END is ignored. (B, W) -> (B, W + T)"""
    cache = {}
    tokens = [questions]
    for _ in range(T):
        logits = policy(tokens[-1], cache)[:, -1]                           # (B, V)
        token = logits.argmax(-1, keepdim=True) if greedy else logits.softmax(-1).multinomial(1)
        tokens.append(token)                                                # (B, 1)
    return torch.cat(tokens, 1)

# ---- training --------------------------------------------------------------------------------
def advantages(rewards):
    """How much better each output did than its group. (P, G) -> (P, G)"""
    A = rewards - rewards.mean(1, keepdim=True)
    return A / (rewards.std(1, keepdim=True) + 1e-4)                        # eq. (1)

def surrogate_loss(logps, old_logps, A, mask, eps_low=0.2, eps_high=0.28):
    """The mean over outputs of the mean over their tokens. (B, T), but A is (B, 1) -> scalar"""
    log_rho = (logps - old_logps).clamp(max=80)     # exp(89) is inf, and its gradient nan
    ratio = log_rho.exp()                                                   # eq. (2)
    clipped_ratio = ratio.clamp(1 - eps_low, 1 + eps_high)
    token_loss = -torch.min(ratio * A, clipped_ratio * A)                   # eq. (3)
    means = (token_loss * mask).sum(1) / mask.sum(1)                        # (B,)
    return means.mean()                                                     # eq. (5)

def descend(policy, optimizer, loss, learning_rate):
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.param_groups[0]["lr"] = learning_rate
    optimizer.step()

def make_base(policy, rng, steps):
    """Learn from a textbook to think, then from a forum to guess; both have wrong beliefs."""
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        share = 0.9 if step < 0.8 * steps else 0.3          # share of examples with a thought
        texts = []
        for _ in range(32):
            question, answer, work, belief = sample_problem(rng, wrong=0.6)
            thought = f"<think>{work}</think><answer>{belief}</answer>"
            guess = f"<answer>{answer}</answer>"                # known by heart, and right
            texts.append(question + (thought if rng.random() < share else guess))
        logps, mask = logprobs(policy, encode(texts, W + T))
        loss = -(logps * mask).sum() / mask.sum()
        descend(policy, optimizer, loss, 4e-3 * min((step + 1) / 50, 1 - step / steps))
        if step % 100 == 0:
            print(f"making the base: batch {step} of {steps}, loss {loss:.3f}", flush=True)

def evaluate(policy):
    """The share of right greedy outputs, without and with a forced <think>; one output. -> str"""
    rng = random.Random("held out")
    questions, answers, *_ = zip(*[sample_problem(rng, held_out=True) for _ in range(HELD_OUT)])
    texts = decode(sample(policy, encode(questions, W), greedy=True))
    right = sum(map(verify, answers, texts)) / HELD_OUT
    openings = encode([question + "<think>" for question in questions], W + 1)
    forced = sum(map(verify, answers, decode(sample(policy, openings, greedy=True)))) / HELD_OUT
    return f"{right:.3f} right, {forced:.3f} after a forced <think>, {questions[0]}{texts[0]}"

def main(seed=0, base_steps=1000, steps=80):
    torch.set_default_device("cuda" if torch.cuda.is_available() else None)
    torch.set_num_threads(1)            # more threads are slower if other programs run
    torch.manual_seed(seed)
    rng = random.Random(seed)
    policy = GPT()
    make_base(policy, rng, base_steps)
    print("held-out questions, before:", evaluate(policy), flush=True)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        problems = [sample_problem(rng) for _ in range(P)]
        questions, answers, *_ = zip(*[problem for problem in problems for _ in range(G)])
        tokens = sample(policy, encode(questions, W))                       # (B, W + T)
        rewards = torch.tensor(list(map(verify, answers, decode(tokens)))).float()  # (B,)
        A = advantages(rewards.view(P, G)).view(-1, 1)                      # (B, 1)
        with torch.no_grad():
            old_logps, mask = logprobs(policy, tokens)                      # (B, T)
        for rows in torch.randperm(P * G).chunk(2):                         # two updates
            logps, _ = logprobs(policy, tokens[rows])
            loss = surrogate_loss(logps, old_logps[rows], A[rows], mask[rows])
            descend(policy, optimizer, loss, RATE * (1 - step / steps))
        print(f"step {step}: reward {rewards.mean():.3f}, tokens {mask.mean() * T:.1f}", flush=True)
    print("held-out questions, after: ", evaluate(policy))

if __name__ == "__main__":
    main()
