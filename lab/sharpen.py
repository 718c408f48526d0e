"""Sharpening: what RL adds to the base, and what it only puts first.

Claim. RL makes right what the base is right in sometimes: maj@k rises, pass@k does not
(DeepSeekMath, 2402.03300), and of many samples the base solves more problems than the trained
policy (Yue and others, 2504.13837). Chains of thought need no prompting: greedy decoding after each
of the likeliest first tokens finds them, and the most certain of the answers is better than that of
plain greedy decoding (Wang and Zhou, 2402.10200). A student that is taught by a better policy on
its own samples (GKD, 2306.13649) learns at a tenth of the cost of RL (Qwen3, 2505.09388).

Prediction. docs/passk.json, seen before, has one seed: on countdown pass@64 went from 0.88 to 0.95.
So pass@1 and maj@128 rise on both tasks, and Yue's claim is contradicted on countdown, where a
thought is a search that gets better; on arithmetic both solve all, and there is no difference. On
arithmetic the accuracy of outputs that think stays at 0.98; on countdown it rises. The second of
the base's first tokens begins a thought, and with it greedy decoding of arithmetic is right nearly
always, so that the most certain answer is better than plain greedy's there, and RL adds nothing to
it; on countdown RL is still better. The student is at 0.9 in half as many steps as its teacher was,
as the first token alone tells it what a verifier says of a whole output. The first run had steps of
32 problems, in which the two curves were one, as if the step size of Adam and not the signal set
the pace. So steps of 4 problems were added, in which we expected noise to slow RL the more.

Method. grpo.py on arithmetic, 20 steps, and on countdown, 40 steps. Scores of the base and of the
trained policy are the scripts' own, of 128 samples of each problem. CoT decoding is the base's, on
other held-out problems for each seed: greedy after each of the four likeliest first tokens. An
output is certain if the likeliest token is far likelier than the second, in the mean of the tokens
of its answer. Distillation is reinforce.py --teacher --view token --gamma 0 from the same base, by
the policy trained on arithmetic, with as many samples of a step, of the same problems.
"""
import concurrent.futures
import os
import statistics
import tempfile
from operator import itemgetter
from pathlib import Path

import torch

import common
import grpo
from lab.entry import (
    compared,
    load_base,
    mean_and_spread,
    mean_curve,
    minus,
    steps_to_level,
)
from lab.training import continued
from tools.ask import load_policy
from tools.runs import curve, make_base, rounded, run

SEEDS = [0, 1, 2]
KS = (1, 2, 4, 8, 16, 32, 64, 128)
K = KS[-1]
LEVEL = 0.9                                     # of accuracy, to which steps are counted
FIRST = 4                                       # first tokens that are tried
DECODED = 128                                   # problems for each seed
SAME = ["--stop_at", 2, "--eval_steps", 1000]
FEW = ["--num_eval_problems", 1, "--num_eval_samples", 1]
MANY = ["--num_eval_problems", 64, "--num_eval_samples", K]
TASKS = {"arithmetic": ["--max_steps", 20], "countdown": ["--task", "countdown", "--max_steps", 40]}
SIZES = {32: 20, 4: 40}                         # problems of a step: steps
WAYS = {"RL": ["grpo.py"],
        "distillation": ["reinforce.py", "--view", "token", "--gamma", 0, "--teacher"]}
SHARES = {"thinks": "think_share", "right if it thinks": "accuracy_given_think"}
THINK = grpo.TOKENIZER.encode_single_token("<think>")
ANSWER, ANSWERED = [grpo.TOKENIZER.encode_single_token(tag) for tag in ("<answer>", "</answer>")]


# ---- 1. training -----------------------------------------------------------------------------

def scores_of(scored):
    """What is kept of the scores of a policy. -> dict"""
    kept = {name: round(scored[key], 5) for name, key in SHARES.items()}
    for name in ("pass@k", "maj@k"):
        kept[name] = rounded(scored[name][k - 1] for k in KS)
    return kept


def learn(task, seed, work):
    """Train on a task, and on arithmetic teach others by the trained policy. -> dict"""
    folder = Path(work, f"{task}-s{seed}")
    flags = ["--seed", seed, *TASKS[task], *SAME]
    summary = run("grpo.py", folder, *flags, *MANY, quiet=True)
    found = {policy: scores_of(summary[policy]) for policy in ("base", "trained")}
    if task == "arithmetic":
        found["taught"] = {str(size): taught(folder, seed, size, work) for size in SIZES}
    return found | {"decoding": decoding(task, seed, folder)}


def taught(teacher, seed, size, work):
    """The accuracy of a base that learns by RL, and of one that has a teacher, step by step.
    -> {way: list}"""
    found = {}
    for way, (script, *flags) in WAYS.items():
        folder = Path(work, f"{way}-{size}-s{seed}")
        flags = [*flags, teacher] if way == "distillation" else flags
        flags += ["--seed", seed, "--num_prompts", size, "--max_steps", SIZES[size], *SAME, *FEW]
        run(script, folder, *flags, quiet=True)
        found[way] = rounded(curve(folder, "accuracy"))
    return found


# ---- 2. CoT decoding -------------------------------------------------------------------------

@torch.no_grad()
def certainty(policy, prompts, tokens, mask):
    """By how much the likeliest token is likelier than the second, mean over the tokens of the
    answer; 0 without one. (B, W), (B, T), (B, T) -> (B,)"""
    hidden = grpo.completion_states(policy, prompts, tokens)                    # (B, T, D)
    logits = torch.nn.functional.linear(hidden, policy.embed.weight)            # (B, T, V)
    two = logits.softmax(dim=-1).topk(2, dim=-1).values                         # (B, T, 2)
    is_tag = tokens == ANSWER
    has_begun = (prompts == ANSWER).any(dim=1, keepdim=True) | (is_tag.cumsum(dim=1) > is_tag.int())
    has_ended = (tokens == ANSWERED).cumsum(dim=1) > 0
    mask = mask * (has_begun & ~has_ended)                                      # (B, T)
    return ((two[..., 0] - two[..., 1]) * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


@torch.no_grad()
def paths(policy, task, cfg, problems, places=FIRST):
    """Greedy outputs after each of the likeliest first tokens; the first is plain greedy's. -> for
    each path the chances of the first token, whether this is <think>, whether the output is right,
    and how certain it is, (n,) each"""
    prompts = grpo.encode_prompts(problems, task, cfg.device)
    first_chances = policy(prompts)[:, -1].softmax(dim=-1)                      # (n, V)
    chances, firsts = first_chances.topk(places, dim=-1)                        # (n, places)
    found = []
    for chance, first in zip(chances.T, firsts.T):
        longer, tokens, mask, texts = continued(
            grpo, policy, cfg, problems, prompts, first[:, None])
        # an output that ends at once has no answer, whatever would be written behind its end
        is_right = [float(token != grpo.EOS and task.verify(problem, text) == 1)
                    for token, problem, text in zip(first.tolist(), problems, texts)]
        found.append({"chance": chance, "thinks": (first == THINK).float(),
                      "right": torch.tensor(is_right),
                      "certainty": certainty(policy, longer, tokens, mask)})
    return found


def most_certain(found):
    """Of each problem, whether the most certain of its paths is right. -> (n,)"""
    right = torch.stack([path["right"] for path in found])                      # (places, n)
    best = torch.stack([path["certainty"] for path in found]).argmax(dim=0)     # (n,)
    return right.gather(0, best[None])[0]


def decoding(name, seed, folder):
    """What greedy and CoT decoding make of the base, and greedy of the trained policy. -> dict"""
    torch.set_num_threads(1)
    cfg, task, base = load_base(grpo, "--seed", seed, *TASKS[name])
    problems = common.sample_problems(task, DECODED, ("decoding", seed), "test")
    found = paths(base, task, cfg, problems)
    trained = paths(load_policy(folder, grpo, cfg), task, cfg, problems, 1)[0]
    means = [{name: round(values.mean().item(), 5) for name, values in path.items()}
             for path in found]
    return {"paths": means, "greedy, base": means[0]["right"],
            "most certain path, base": round(most_certain(found).mean().item(), 5),
            "greedy, trained": round(trained["right"].mean().item(), 5),
            "problems": len({problem.prompt for problem in problems})}


def measure(seeds):
    jobs = [(task, seed) for task in reversed(TASKS) for seed in seeds]     # the long ones first
    for flags in TASKS.values():
        make_base(["grpo.py", *flags])
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    with tempfile.TemporaryDirectory() as work, pool:
        futures = [pool.submit(learn, *job, work) for job in jobs]
        results = [future.result() for future in futures]
    found = {task: [] for task in TASKS}
    for (task, _), result in zip(jobs, results):
        found[task].append(result)
    return found


# ---- 3. what was found -----------------------------------------------------------------------

def of(found, task, policy, name, k=None):
    """A score of a policy, a number for each seed; of a curve, that at k. -> list"""
    values = [result[policy][name] for result in found[task]]
    return values if k is None else [values_by_k[KS.index(k)] for values_by_k in values]


def gain(found, task, name, k=None):
    """How much higher the trained policy scores than the base, seed by seed. -> list"""
    return minus(of(found, task, "trained", name, k), of(found, task, "base", name, k))


def steps(found, size, way):
    """How many batches it took to the level, for each seed. -> list"""
    return [steps_to_level(result["taught"][str(size)][way], LEVEL)
            for result in found["arithmetic"]]


def tables(found):
    heads = ["task", "policy", *(f"pass@{k}" for k in (1, 8, K)), f"maj@{K}", *SHARES]
    rows = []
    decoded = []
    for task in TASKS:
        for policy in ("base", "trained"):
            scored = [of(found, task, policy, "pass@k", k) for k in (1, 8, K)]
            scored += [of(found, task, policy, "maj@k", K)]
            scored += [of(found, task, policy, name) for name in SHARES]
            rows.append([task, policy, *map(mean_and_spread, scored)])
        for place in range(FIRST):
            ways = [result["decoding"]["paths"][place] for result in found[task]]
            means = [statistics.mean(map(itemgetter(name), ways)) for name in ways[0]]
            decoded.append([task, place + 1, *(f"{mean:.3f}" for mean in means)])
    heads_of_paths = ["base of", "place of the first token", "its chance", "is `<think>`",
                      "right", "certainty"]
    counts = []
    for size in SIZES:
        cells = [mean_and_spread(steps(found, size, way), ".1f") for way in WAYS]
        counts.append([size, *cells])
    heads_of_steps = [f"problems of a step; steps to an accuracy of {LEVEL}", *WAYS]
    return [(heads, rows), (heads_of_paths, decoded), (heads_of_steps, counts)]


def claims(found):
    listed = []
    for task in TASKS:
        decoded = {way: of(found, task, "decoding", way) for way in
                   ("greedy, base", "most certain path, base", "greedy, trained")}
        lost = minus(of(found, task, "base", "pass@k", K), of(found, task, "trained", "pass@k", K))
        listed += [
            compared(f"{task}: maj@{K} rises", gain(found, task, "maj@k", K)),
            compared(f"{task}: pass@1 rises more than pass@{K}",
                     minus(gain(found, task, "pass@k", 1), gain(found, task, "pass@k", K))),
            compared(f"{task}: of {K} samples the base solves more problems than the trained "
                     "policy", lost),
            compared(f"{task}: outputs that think are right more often after RL",
                     gain(found, task, "right if it thinks")),
            compared(f"{task}: the most certain path of the base is right more often than its "
                     "greedy output", minus(decoded["most certain path, base"],
                                            decoded["greedy, base"])),
            compared(f"{task}: the greedy output of the trained policy is right more often than "
                     "the most certain path of the base",
                     minus(decoded["greedy, trained"], decoded["most certain path, base"]))]
    for size in SIZES:
        fewer = minus(steps(found, size, "RL"), steps(found, size, "distillation"))
        listed.append(compared(f"with {size} problems a step, distillation takes fewer steps than "
                               f"RL to an accuracy of {LEVEL}", fewer, "+.1f"))
    return listed


def note(found):
    numbers = [result["decoding"]["problems"] for task in TASKS for result in found[task]]
    return ("64 held-out problems of each task for pass@k and maj@k, all different; "
            f"{min(numbers)} to {max(numbers)} different ones of a task and seed for CoT decoding; "
            "one base for each task, and of it the same samples for all seeds; after the third and "
            "fourth first token, the base of arithmetic often copies a guess with certainty, as in "
            "`9</think><answer>9</answer>`")


def panels(found):
    def by_k(task):
        def fill(axis):
            for name, color in (("pass@k", "C0"), ("maj@k", "C1")):
                for policy, style in (("base", "--"), ("trained", "-")):
                    mean = mean_curve(of(found, task, policy, name))
                    axis.plot(KS, mean, style, color=color, label=f"{name}, {policy}")
            axis.set(title=task, xlabel="k, samples of a problem", ylabel="share of problems",
                     xscale="log", ylim=(0, 1.03))
            axis.set_xticks(KS, KS)
            axis.minorticks_off()
            if task == "arithmetic":                    # where there is room
                axis.legend(frameon=False, fontsize=8, loc="lower right")
        return fill

    def learning(axis):
        for size, style in zip(SIZES, ("-", ":")):
            for way, color in zip(WAYS, ("C2", "C3")):
                runs = [result["taught"][str(size)][way] for result in found["arithmetic"]]
                mean = mean_curve(runs)
                axis.plot(range(len(mean)), mean, style, color=color, label=f"{way}, {size} a step")
        axis.set(title="arithmetic, from one base", xlabel="steps learned from",
                 ylabel="accuracy, mean of the seeds", ylim=(0, 1.03))
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    return [*map(by_k, TASKS), learning]
