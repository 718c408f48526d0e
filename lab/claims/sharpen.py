"""Sharpening: what RL adds to the base, and how far random guesses get without a model"""
import itertools
import random
import re
import statistics
import tempfile
from pathlib import Path

import torch

import common
import grpo
import plumbing
from lab.docs import run
from lab.draw import BLUE, GREEN, GREY, ORANGE, curves
from lab.experiment import Experiment, numbers
from lab.training import continued, load_base
from lab.verdict import OURS, Claim
from tasks import countdown
from tasks.scores import pass_at_k

KS = (1, 2, 4, 8, 16, 32, 64, 128)
FEW, K = KS.index(8), KS[-1]
MANY = range(1, len(KS))                        # places in KS of the k > 1, which are all judged
FIRST = 4                                       # number of first tokens in CoT decoding
PROBLEMS = 64                                   # for pass@k, the same for all seeds
DECODED = 128                                   # problems for CoT decoding, new ones for each seed
GAIN = 0.02                                     # smallest difference of two fractions that matters
TASKS = {"arithmetic": "--max_steps 20", "countdown": "--task countdown --max_steps 40"}
SCORED = f"--eval_steps 1000 --num_eval_problems {PROBLEMS} --num_eval_samples {K}"
POLICIES = ("base", "after RL")
THINK, ANSWER, ANSWERED = map(common.TOKENIZER.encode_single_token,
                              ("<think>", "<answer>", "</answer>"))
EXPERIMENT = Experiment(__file__, seeds=range(5))


def thoughts_right(policy, task, cfg, problems):
    """Sample K outputs of each problem that are made to begin with <think>. -> list with the number
    of right ones for each problem"""
    repeated = [problem for problem in problems for _ in range(K)]              # B
    uniforms = torch.rand(len(repeated), cfg.max_completion_length,
                          generator=common.generator(cfg.seed, "thoughts"))
    first = torch.full((len(repeated), 1), THINK)
    prompts = grpo.encode_prompts(repeated, task, cfg.device)
    *_, texts = continued(grpo, policy, cfg, repeated, prompts, first, uniforms)
    is_right = torch.tensor([task.verify(*pair) == 1 for pair in zip(repeated, texts)])
    return is_right.view(-1, K).sum(dim=1).tolist()


def passed(counts, n):
    """Compute pass@k for each of KS. counts: how many of n outputs are right, for each problem.
    -> list"""
    return [statistics.fmean(pass_at_k(n, int(count), k) for count in counts) for k in KS]


@EXPERIMENT.measure(TASKS)
def learned(seed, task_name):
    """Train on a task. -> columns with the scores of the base and of the trained policy, the scores
    of their thoughts alone, and the accuracy of the base with CoT decoding"""
    flags = f"{TASKS[task_name]} --seed {seed} --base_seed {seed}"
    cfg, task, base = load_base(grpo, flags)
    trained = grpo.GPT(cfg)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "run")
        summary = run("grpo.py", folder, *flags.split(), *SCORED.split())
        plumbing.load_policy(trained, folder / "checkpoint.pt")
    right, sure = paths(base, task, cfg, common.sample_problems(
        task, DECODED, ("decoding", cfg.seed), "test"))
    most_certain = right.gather(0, sure.argmax(dim=0)[None])
    columns = {"greedy": right[0].mean().item(), "most certain": most_certain.mean().item()}
    problems = common.held_out_problems(task, PROBLEMS)     # the ones that the summary scores
    for name, policy, scored in zip(POLICIES, (base, trained),
                                    (summary["base"], summary["trained"])):
        columns[f"{name} think_share"] = scored["think_share"]
        columns[f"{name} thoughts"] = passed(thoughts_right(policy, task, cfg, problems), K)
        for score in ("pass@k", "maj@k"):
            columns[f"{name} {score}"] = [scored[score][k - 1] for k in KS]
    return columns


@EXPERIMENT.measure(["countdown"], seeds=[0])
def guesser(seed, name, draws=2048):
    """Measure pass@k of random guesses, which only know what an answer of countdown looks like, on
    the problems of `learned`."""
    cfg = plumbing.parse_flags(grpo.Config, ["--task", name])
    task = common.load_task(cfg, grpo.verify)
    rng = random.Random(seed)
    counts = []
    for problem in common.held_out_problems(task, PROBLEMS):
        *numbers, _ = map(int, re.findall("[0-9]+", problem.prompt))
        guesses = (countdown.combine(rng, numbers).expression for _ in range(draws))
        counts.append(sum(task.verify(problem, f"<answer>{guess}</answer>") for guess in guesses))
    return {"pass@k": passed(counts, draws)}


@torch.no_grad()
def certainty(policy, prompts, tokens, mask):
    """Subtract the probability of the second most likely token from that of the most likely one,
    and average over the tokens of the answer, if any. (B, W), (B, T), (B, T) -> (B,)"""
    hidden = grpo.completion_states(policy, prompts, tokens)                    # (B, T, D)
    logits = torch.nn.functional.linear(hidden, policy.embed.weight)            # (B, T, V)
    two = logits.softmax(dim=-1).topk(2, dim=-1).values                         # (B, T, 2)
    is_tag = tokens == ANSWER
    has_begun = (prompts == ANSWER).any(dim=1, keepdim=True) | (is_tag.cumsum(dim=1) > is_tag.int())
    has_ended = (tokens == ANSWERED).cumsum(dim=1) > 0
    mask = mask * (has_begun & ~has_ended)                                      # (B, T)
    return ((two[..., 0] - two[..., 1]) * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


@torch.no_grad()
def paths(policy, task, cfg, problems):
    """Decode greedily after each of the most likely first tokens. The first path is the output of
    plain greedy decoding. -> whether each path is right, and its certainty: (places, n) each"""
    prompts = grpo.encode_prompts(problems, task, cfg.device)
    firsts = policy(prompts)[:, -1].topk(FIRST, dim=-1).indices                 # (n, places)
    right, sure = torch.zeros(2, FIRST, len(problems))
    for place, first in enumerate(firsts.T):
        longer, tokens, mask, texts = continued(
            grpo, policy, cfg, problems, prompts, first[:, None])
        # an output whose first token is EOS has no answer, whatever would follow
        right[place] = torch.tensor([
            token != grpo.EOS and task.verify(problem, text) == 1
            for token, problem, text in zip(first.tolist(), problems, texts)])
        sure[place] = certainty(policy, longer, tokens, mask)
    return right, sure


def page(learned, guesser):
    columns = learned["countdown"]
    passed, passed_after = (columns[f"{policy} pass@k"] for policy in POLICIES)         # (S, ks)
    thought, thought_after = (columns[f"{policy} thoughts"] for policy in POLICIES)
    lead = thought - thought_after
    best = max(MANY, key=lambda place: lead[:, place].mean())
    base, after = thought[:, best], thought_after[:, best]
    yield Claim(f"on countdown, there is a k up to {K} for which the base solves more problems "
                "with k thoughts (outputs that think) than the policy after RL does",
                "Yue and others", (base, after), at_least=GAIN, comparisons=len(MANY),
                said=f"With {KS[best]} thoughts each, the base solves {base.mean():.0%} of the "
                f"countdown problems, and the policy after RL solves {after.mean():.0%}")
    gain = passed_after - passed
    most = max(MANY, key=lambda place: gain[:, place].mean())
    yield Claim(f"on countdown, RL does not raise pass@k for any k from 2 to {K}", "DeepSeekMath",
                gain[:, most], at_most=GAIN, comparisons=len(MANY),
                said="On countdown, RL does raise pass@k for small k: by "
                f"{gain[:, most].mean():.2f} for k = {KS[most]}, and by {gain[:, FEW].mean():.2f} "
                f"for k = {KS[FEW]}")
    yield Claim(f"on countdown, RL raises maj@{K}", "DeepSeekMath",
                (columns["after RL maj@k"][:, -1], columns["base maj@k"][:, -1]), at_least=GAIN)
    decoded = learned["arithmetic"]
    yield Claim("on arithmetic, the most certain of four outputs of the base (paths) is right more "
                "often than its greedy output", "Wang and Zhou",
                (decoded["most certain"], decoded["greedy"]), at_least=GAIN)
    yield Claim("on countdown, a single output that thinks is right more often after RL", OURS,
                (thought_after[:, 0], thought[:, 0]), at_least=GAIN)

    lines = {"thoughts after RL": thought_after, "base": passed, "thoughts of the base": thought,
             "random guesses": guesser["countdown"]["pass@k"]}
    yield curves(lines, KS, given=dict(zip(lines, (BLUE, ORANGE, GREEN, GREY))), xscale="log",
                 xlabel="samples of a problem, k", ylim=(0, 1.03), height=320,
                 ylabel="pass@k on 64 held-out problems")
    rows = {}
    for (task, columns), policy in itertools.product(learned.items(), POLICIES):
        passed, thought = columns[f"{policy} pass@k"], columns[f"{policy} thoughts"]
        rows[f"{task}, {policy}"] = {
            "pass@1": passed[:, 0], "pass@8": passed[:, FEW], "pass@128": passed[:, -1],
            "solved with 1 thought": thought[:, 0], "with 8 thoughts": thought[:, FEW],
            "with 128 thoughts": thought[:, -1], f"maj@{K}": columns[f"{policy} maj@k"][:, -1],
            "fraction that thinks": columns[f"{policy} think_share"]}
    yield numbers(rows, form=".2f", by="task, policy")
    yield numbers({f"k = {k}": {"pass@k of thoughts: base minus after RL": lead[:, place],
                                "pass@k of all outputs: after RL minus base": gain[:, place]}
                   for place, k in enumerate(KS)}, form="+.3f", by="countdown")
