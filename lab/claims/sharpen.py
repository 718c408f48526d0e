"""Sharpening: what RL adds to the base, and how far random guesses get without a model"""
import random
import re
import statistics
from pathlib import Path

import torch

import common
import grpo
import measuring
import plumbing
from lab.bench import OURS, UNSCORED, Claim, numbers
from lab.training import continued, load_base
from report import chart
from tasks import countdown
from tasks.scores import pass_at_k

SEEDS = range(12)
KS = (1, 2, 4, 8, 16, 32, 64, 128)
K = KS[-1]
TABLED = 1, 2, 8, 32, K                         # the chart has all of KS
MANY = range(1, len(KS))                        # places in KS of the k > 1, which are all judged
PROBLEMS = 64                                   # for pass@k, drawn anew for each seed
GAIN = 0.02                                     # smallest difference of two fractions that matters
TASKS = {"arithmetic": "", "countdown": "--task countdown --max_steps 40"}
CHECK = "grpo.py --task countdown"
GUESSES = "random guesses"
CASES, FEWER = [*TASKS, GUESSES], {GUESSES: [0]}
ANSWER, ANSWERED = map(common.TOKENIZER.encode_single_token, ("<answer>", "</answer>"))


def measure(case, seed):
    """Score the base of arithmetic with CoT decoding; or train on countdown, and score the base and
    the trained policy, and their thoughts alone, which all have the same problems; or score random
    guesses."""
    if case == GUESSES:
        return guessed(seed)
    flags = f"{TASKS[case]} --seed {seed} --base_seed {seed}"
    cfg, task, base = load_base(grpo, flags)
    if case == "arithmetic":
        return decoded(base, task, cfg)
    trained = grpo.GPT(cfg)
    measuring.run(grpo.main, [*flags.split(), *UNSCORED.split()], lambda folder: (
        plumbing.load_policy(trained, Path(folder, "checkpoint.pt"))))
    columns = {}
    for name, policy in (("base", base), ("after RL", trained)):
        free = scores(policy, task, cfg)
        thoughts = scores(policy, task, cfg, "<think>")
        columns |= {f"{name} think_share": free["think_share"],
                    f"{name} pass@k": [free["pass@k"][k - 1] for k in KS],
                    f"{name} maj@k": [free["maj@k"][k - 1] for k in KS],
                    f"{name} thoughts": [thoughts["pass@k"][k - 1] for k in KS]}
    return columns


def draw(task, seed):
    """Draw the problems of a seed. -> PROBLEMS problems that do not occur in training"""
    return common.sample_problems(task, PROBLEMS, ("sharpening", seed), "test")


def scores(policy, task, cfg, opening=""):
    """Score K outputs to each problem of a seed, which may be forced to begin with a token.
    -> scores, with the pass@k and maj@k of all k up to K"""
    problems = [problem for problem in draw(task, cfg.seed) for _ in range(K)]
    generator = common.generator("sharpening", cfg.seed)
    batch = grpo.complete(policy, task, cfg, problems, generator, opening)
    return task.scores(task.judge(batch, K, "sharpening"), greedy=False)


def passed(is_right):
    """Compute pass@k for each of KS, from n outputs of each problem. (P, n) -> list"""
    n = is_right.shape[1]
    return [statistics.fmean(pass_at_k(n, count, k) for count in is_right.sum(dim=1).tolist())
            for k in KS]


def guessed(seed, draws=2048):
    """Compute pass@k of random guesses, which only know what an answer of countdown looks like."""
    task = common.load_task(plumbing.parse_flags(grpo.Config, ["--task", "countdown"]), grpo.verify)
    rng = random.Random(seed)
    is_right = []
    for problem in draw(task, seed):
        *operands, _ = map(int, re.findall("[0-9]+", problem.prompt))
        guesses = (countdown.combine(rng, operands).expression for _ in range(draws))
        is_right.append([task.verify(problem, f"<answer>{guess}</answer>") == 1
                         for guess in guesses])
    return {"pass@k": passed(torch.tensor(is_right))}


@torch.no_grad()
def decoded(policy, task, cfg):
    """Decode greedily after each of the four most likely first tokens. The certainty of a path is
    the difference between the probabilities of the two most likely tokens, averaged over its
    answer. -> accuracy of plain greedy decoding, which is the first path, and of the most certain
    path"""
    problems = common.sample_problems(task, 128, ("decoding", cfg.seed), "test")
    prompts = grpo.encode_prompts(problems, task, cfg.device)
    firsts = policy(prompts)[:, -1].topk(4, dim=-1).indices                     # (n, 4)
    right, sure = torch.zeros(2, 4, len(problems))
    for place, first in enumerate(firsts.T):
        longer, tokens, mask, texts = continued(
            grpo, policy, cfg, problems, prompts, first[:, None])
        # an output whose first token is EOS has no answer, whatever would follow
        right[place] = torch.tensor([
            token != grpo.EOS and task.verify(problem, text) == 1
            for token, problem, text in zip(first.tolist(), problems, texts)])
        hidden = grpo.completion_states(policy, longer, tokens)                 # (n, T, D)
        logits = torch.nn.functional.linear(hidden, policy.embed.weight)        # (n, T, V)
        two = logits.softmax(dim=-1).topk(2, dim=-1).values                     # (n, T, 2)
        has_begun = torch.cat([first[:, None], tokens[:, :-1]], dim=1) == ANSWER
        has_ended = tokens == ANSWERED
        mask *= (has_begun.cumsum(dim=1) > 0) & (has_ended.cumsum(dim=1) == 0)  # (n, T)
        margins = ((two[..., 0] - two[..., 1]) * mask).sum(dim=1)
        sure[place] = margins / mask.sum(dim=1).clamp(min=1)
    most_certain = right.gather(0, sure.argmax(dim=0)[None])
    return {"greedy": right[0].mean().item(), "most certain": most_certain.mean().item()}


def page(x):
    base, after = ({name: x["countdown"][f"{policy} {name}"]                    # (S, ks) each
                    for name in ("pass@k", "thoughts", "maj@k")} for policy in ("base", "after RL"))
    lead = base["thoughts"] - after["thoughts"]
    best = max(MANY, key=lambda place: lead[:, place].mean())
    thought, thought_after = base["thoughts"][:, best], after["thoughts"][:, best]
    single, after_one = (scores["pass@k"][:, 0].mean() for scores in (base, after))
    yield (f"On countdown, RL raises the share of right outputs from {single:.0%} to "
           f"{after_one:.0%}. But with {KS[best]} thoughts to a problem, the base solves "
           f"{thought.mean():.0%} and the policy after RL {thought_after.mean():.0%}; whether "
           "this lead matters is undecided.")
    yield Claim(f"on countdown, there is a k up to {K} for which the base solves more problems "
                "with k thoughts than the policy after RL does",
                "after Yue and others", (thought, thought_after), at_least=GAIN,
                comparisons=len(MANY))
    gain = after["pass@k"] - base["pass@k"]
    most = max(MANY, key=lambda place: gain[:, place].mean())
    yield Claim(f"on countdown, RL does not raise pass@k for any k from 2 to {K}",
                "after DeepSeekMath", (after["pass@k"][:, most], base["pass@k"][:, most]),
                at_most=GAIN, comparisons=len(MANY))
    yield Claim(f"on countdown, RL raises maj@{K}", "DeepSeekMath",
                (after["maj@k"][:, -1], base["maj@k"][:, -1]), at_least=GAIN)
    yield Claim("on arithmetic, the most certain of four outputs of the base (paths) is right more "
                "often than its greedy output", "Wang and Zhou",
                (x["arithmetic"]["most certain"], x["arithmetic"]["greedy"]), at_least=GAIN)
    yield Claim("on countdown, a single output that thinks is right more often after RL", OURS,
                (after["thoughts"][:, 0], base["thoughts"][:, 0]), at_least=GAIN)

    lines = {"thoughts after RL": after["thoughts"], "base": base["pass@k"],
             "thoughts of the base": base["thoughts"], GUESSES: x[GUESSES]["pass@k"]}
    yield lambda axis: chart.curves(axis, lines, KS, xscale="log", ylim=(0, 1.03),
                                    xlabel="samples of a problem, k", ylabel="pass@k on countdown")
    yield numbers({f"{k}": {
        "all outputs: base": base["pass@k"][:, place], "after RL": after["pass@k"][:, place],
        "thoughts: base": base["thoughts"][:, place],
        "thoughts: after RL": after["thoughts"][:, place]}
        for place, k in enumerate(KS) if k in TABLED}, "pass@k on countdown, k", ".2f")
