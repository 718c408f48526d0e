"""Mismatch: a sampler that cools or cuts its distribution, and a loss that scores another one"""
import copy

import numpy
import torch
import torch.nn.functional as F

import common
import grpo
from lab.bench import OURS, Claim, at_best, best_rates, numbers
from lab.training import load_base
from report import chart, replaced

SEEDS, TUNING = range(5), range(5, 7)
BATCH = "--num_prompts 16 --micro_batch_size 64 --num_eval_problems 128 --max_steps"
FLAGS = {"arithmetic": "--task arithmetic:3 --max_completion_length 28 --base_steps 400 "
         f"{BATCH} 24", "countdown": f"--task countdown {BATCH} 40"}
SAMPLERS = {"T 1": (1.0, 2.0, common.VOCAB_SIZE),       # temperature, top-p (2: all), top-k
            "rlhf-book": (0.6, 0.95, 20),
            "reasoning-from-scratch": (0.8, 0.9, common.VOCAB_SIZE)}
AT_1, BOOK, SCRATCH = SAMPLERS
# Scored as they were sampled; scored at T 1 with weights; from a base that rarely thinks
RIGHT, WEIGHTED, RARE = "right score", "weighted", "5% think"
SIDES = {f"{task}, {side}": (None, 5e-4) for task, sides in (
    ("arithmetic", (AT_1, BOOK, f"{AT_1}, {RARE}", f"{BOOK}, {RARE}")),
    ("countdown", (SCRATCH, f"{SCRATCH}, {RIGHT}"))) for side in sides}
COMPARED = [(side, "pass@1") for side in SIDES]
FASTER = AT_1, SCRATCH, f"{SCRATCH}, {RIGHT}", f"{SCRATCH}, {WEIGHTED}"
CASES = [f"countdown, {side}, 1e-3" for side in FASTER]
CHECK = f"grpo.py {FLAGS['arithmetic']}"
TUNED = "the rates, on two other seeds, except for 1e-3"
COLUMNS = "reward", "entropy", "thinks", "kept", "ratio", "clip_ratio/region_mean"
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


def score(columns, what):
    return columns[what]


def measure(case, seed):
    """Train with grpo.py, but draw and score tokens as the case says. -> columns"""
    name, sampler, *how, rate = case.split(", ")
    temperature, *cut = SAMPLERS[sampler]
    cfg, task, policy = load_base(grpo, f"{FLAGS[name]} --seed {seed} --base_seed {seed}")
    if RARE in how:
        make_rare(policy, task)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=float(rate), weight_decay=0.0)
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
        if RIGHT in how:
            batch.logps, scorer = logps, score_as_sampled
        elif WEIGHTED in how:
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


def page(x):
    def end(columns, what):
        return columns[what][:, -5:].mean(axis=1)                       # of the last five steps
    best = {side: columns for (side, _), columns in at_best("mismatch", x).items()}
    at_1, book, rare_at_1, rare_book, scratch, scored = best.values()
    _, fast, fast_scored, _ = (x[case] for case in CASES)
    where = "(arithmetic)"
    thinks = [end(columns, "thinks") for columns in (rare_book, rare_at_1)]
    yield Claim(f"from a base of which 5% think, fewer think at the end with {BOOK}'s sampler than "
                f"at T 1 {where}", OURS, tuple(thinks), at_most=-0.5,
                finding="If 5% of a base's samples think, {:.0%} do after RL with the sampler of "
                "rlhf-book, and {:.0%} after RL at T 1".format(*map(numpy.mean, thinks)))
    yield Claim(f"pass@1 ends lower with {BOOK}'s sampler than at T 1 {where}", OURS,
                (book["pass@1"], at_1["pass@1"]), at_most=-GAIN)
    yield Claim(f"the reward in the log ends higher with {BOOK}'s sampler than at T 1 {where}",
                OURS, (end(book, "reward"), end(at_1, "reward")), at_least=GAIN)
    than = "if scored at T 1, not as sampled"
    yield Claim(f"with {SCRATCH}'s sampler, the entropy ends higher {than} (countdown, 1e-3)",
                OURS, (end(fast, "entropy"), end(fast_scored, "entropy")), at_least=1.1, ratio=True)
    for rate, one, other in (("1e-3", fast, fast_scored),
                             ("best rates", scratch, scored)):
        yield Claim(f"with {SCRATCH}'s sampler, pass@1 ends lower {than} (countdown, {rate})",
                    OURS, (one["pass@1"], other["pass@1"]), at_most=-GAIN)
    yield lambda axis: chart.curves(
        axis, {one.replace(SCRATCH, "cut"): x[case]["entropy"] for one, case in zip(FASTER, CASES)},
        xlabel=f"step on countdown (cut: {SCRATCH})", ylabel="entropy at T 1 of the samples")
    rate = {side: rate for (side, _), rate in best_rates("mismatch", x).items()}
    arithmetic, countdown = [*SIDES][:4], [*SIDES, *CASES[1:]][4:]
    yield numbers({side.partition(", ")[2]: {
        "best rate": rate[side], "pass@1": best[side]["pass@1"],
        "reward in the log": end(best[side], "reward"), "thinks": end(best[side], "thinks")}
        for side in arithmetic}, "arithmetic", ".2f")
    yield numbers({case.partition(", ")[2]: {
        "best rate": rate.get(case, "untuned"), "pass@1": (best | x)[case]["pass@1"],
        "entropy": end((best | x)[case], "entropy")} for case in countdown}, "countdown", ".2f")
