"""Mismatch: a sampler that cools or cuts its distribution, and a loss that scores another one"""
import copy
import functools

import numpy
import torch
import torch.nn.functional as F

import common
import grpo
from lab.bench import OURS, Claim, numbers
from lab.training import load_base
from report import chart, replaced

SEEDS, TUNING = range(22, 27), (20, 21)
FLAGS = ("--task arithmetic:3 --max_completion_length 28 --num_prompts 16 --micro_batch_size 64 "
         "--base_steps 400 --max_steps 24 --num_eval_problems 128")
SAMPLERS = {"T 1": (1.0, 2.0, common.VOCAB_SIZE),       # temperature, top-p (2: all), top-k
            "rlhf-book": (0.6, 0.95, 20),
            "reasoning-from-scratch": (0.8, 0.9, common.VOCAB_SIZE)}
AT_1, BOOK, SCRATCH = SAMPLERS
# Scored as they were sampled; scored at T 1 with weights; a base that rarely thinks
RIGHT, WEIGHTED, RARE = "right score", "weighted", "5% think"
CASES = [AT_1, BOOK, f"{BOOK}, {RIGHT}", SCRATCH, f"{SCRATCH}, {RIGHT}", f"{SCRATCH}, {WEIGHTED}",
         f"{AT_1}, {RARE}", f"{BOOK}, {RARE}"]
CHECK = f"grpo.py {FLAGS}"
TUNED = "the learning rate of each case, on other seeds"
COLUMNS = "reward", "entropy", "thinks", "kept", "ratio", "clip_ratio/region_mean"
RATES = 2.5e-4, 5e-4, 1e-3              # half the default, the default, twice the default
GAIN = 0.02                             # smallest difference of pass@1 that matters
sample_token = grpo.sample_token


def kept(logits, temperature, top_p, top_k):
    """Find the tokens that a sampler can draw: its top_k most likely ones, and of these the fewest
    that reach top_p at its temperature. (..., V) -> bools (..., V)"""
    ranked, order = (logits / temperature).sort(dim=-1, descending=True, stable=True)
    ranked[..., top_k:] = -torch.inf
    p = ranked.softmax(dim=-1)
    is_kept = (p.cumsum(dim=-1) - p < top_p) & (p > 0)
    return torch.zeros_like(is_kept).scatter(-1, order, is_kept)


def make_rare(policy, task):
    """Shrink the embedding of <think> until 5% of the samples of a base think."""
    prompts = common.encode_prompts(common.sample_problems(task, 64, "rare"), task, "cpu")
    think = common.TOKENIZER.encode_single_token("<think>")
    with torch.no_grad():
        while policy(prompts)[:, -1].softmax(dim=-1)[:, think].mean() > 0.05:
            policy.embed.weight[think] *= 0.99


def train(case, rate, seed):
    """Train with grpo.py, but draw and score tokens as the case says. -> columns"""
    sampler, _, how = case.partition(", ")
    temperature, *cut = SAMPLERS[sampler]
    cfg, task, policy = load_base(grpo, f"{FLAGS} --seed {seed} --base_seed {seed}")
    if how == RARE:
        make_rare(policy, task)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, weight_decay=0.0)
    older = copy.deepcopy(policy).requires_grad_(False)                 # the policy that sampled

    def draw(logits, uniforms, _):
        is_kept = kept(logits, temperature, *cut)
        return sample_token(logits.masked_fill(~is_kept, -torch.inf), uniforms, temperature)

    def score_as_sampled(policy, prompts, tokens, *_):
        """Score tokens among those that were kept. -> log-probs, and instead of entropies, which no
        loss uses here, the mass that was kept of the distribution at T 1: (B, T) each"""
        before, logits = (F.linear(grpo.completion_states(one, prompts, tokens), one.embed.weight)
                          for one in (older, policy))                           # (B, T, V)
        is_kept = kept(before, temperature, *cut)
        mass = (before.softmax(dim=-1) * is_kept).sum(dim=-1)
        is_kept = is_kept.scatter(-1, tokens[..., None], True)  # padding, or cut by its last bits
        logits = logits.masked_fill(~is_kept, -torch.inf)
        return grpo.logprobs(logits, tokens, temperature)[0], mass
    lines = []
    for step in range(cfg.max_steps):
        older.load_state_dict(policy.state_dict())
        with replaced(grpo, sample_token=draw):
            batch = grpo.sample_batch(policy, task, cfg, step)
        logps, mass = score_as_sampled(older, batch.prompts, batch.tokens)
        ratio = (batch.logps - logps).exp() * batch.mask                        # (B, T)
        A = grpo.advantages(batch.rewards).view(-1, 1)
        scorer = grpo.score
        if how == RIGHT:
            batch.logps, scorer = logps, score_as_sampled
        elif how == WEIGHTED:
            A = A * ratio.clamp(max=2)
        with replaced(grpo, score=scorer):
            line = grpo.update(policy, None, optimizer, batch, A, cfg, step)
        num_tokens = batch.mask.sum().item()
        lines.append(line | common.describe(batch) | {
            "thinks": sum("<think>" in text for text in batch.texts) / len(batch.texts),
            "kept": (mass * batch.mask).sum().item() / num_tokens,
            "ratio": ratio.sum().item() / num_tokens})
    columns = {column: [line[column] for line in lines] for column in COLUMNS}
    return columns | {"pass@1": grpo.evaluate(policy, task, cfg)["pass@1"],
                      "greedy": grpo.evaluate(policy, task, cfg, greedy=True)["greedy"]}


@functools.cache
def tuned(case):
    """Try rates on the first two or one of the seeds TUNING, and one more while the best is at an
    end of the grid. The default is best unless another gains GAIN. -> {rate: mean pass@1}, rate"""
    scores, rates = {}, RATES
    seeds = TUNING if case in (AT_1, SCRATCH) else TUNING[:1]
    while rates:
        for rate in rates:
            scores[rate] = numpy.mean([train(case, rate, seed)["pass@1"] for seed in seeds])
        best = max(scores, key=lambda rate: scores[rate] + GAIN * (rate == RATES[1]))
        rates = (best / 2,) * (best == min(scores)) + (best * 2,) * (best == max(scores))
    return scores, best


def measure(case, seed):
    """Train at the best rate of a case."""
    scores, best = tuned(case)
    return train(case, best, seed) | {
        "rate": best, "rates": [*scores], "scores": [*scores.values()]}


def page(x):
    ends = {case: columns | {column: columns[column][:, -5:].mean(axis=1) for column in COLUMNS}
            for case, columns in x.items()}                     # the last five steps
    right = f"{SCRATCH}, {RIGHT}"
    for column, one, other, region, text in (
            ("thinks", f"{BOOK}, {RARE}", f"{AT_1}, {RARE}", {"at_most": -0.5}, "fewer think"),
            ("pass@1", BOOK, AT_1, {"at_most": -GAIN}, "pass@1 is lower"),
            ("reward", BOOK, AT_1, {"at_least": GAIN}, "the reward in the log is higher"),
            ("entropy", SCRATCH, right, {"at_least": 1.1, "ratio": True}, "entropy is higher"),
            ("pass@1", SCRATCH, right, {"at_most": -GAIN}, "pass@1 is lower")):
        sides = ends[one][column], ends[other][column]
        found = ("If 5% of a base's samples think, {:.0%} do after RL with the sampler of "
                 "rlhf-book, and {:.0%} after RL at T 1")
        yield Claim(f"at the end, {text} with ({one}) than with ({other})", OURS, sides,
                    finding=found.format(*map(numpy.mean, sides)) * (column == "thinks"), **region)
    yield lambda axis: chart.curves(
        axis, {case: x[case]["entropy"] for case in (AT_1, SCRATCH, right)},
        xlabel="step of training", ylabel="entropy at T 1 of the samples")
    yield numbers({case: {
        "best rate": end["rate"], "pass@1": end["pass@1"], "greedy": end["greedy"],
        "reward": end["reward"], "thinks": end["thinks"], "entropy": end["entropy"],
        "pi / sampler, step 1": x[case]["ratio"][:, 0]} for case, end in ends.items()}, "sampler")
