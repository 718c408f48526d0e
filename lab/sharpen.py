"""Sharpening: what RL adds to the base, and what it only puts first

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
trained policy are the scripts' own, of 128 samples of each of 64 problems, the same for all seeds.
CoT decoding is the base's, on other held-out problems for each seed: greedy after each of the four
likeliest first tokens. An output is certain if the likeliest token is far likelier than the second,
in the mean of the tokens of its answer. Distillation is reinforce.py --teacher --view token
--gamma 0 from the same base, by the policy trained on arithmetic, with as many samples of a step,
of the same problems.

Outcome. Right: pass@1 rises on both, maj@128 on countdown, where thoughts get better; a thought
follows the base's second token, and the most certain answer is better than greedy's. Wrong: maj@128
of arithmetic had nowhere to rise; RL adds half of the answers there to the most certain ones; the
student is no faster. On countdown, it is rather the base that solves more with 128 samples, and
whether RL is better than the most certain path is undecided.
"""
import itertools
import tempfile
from pathlib import Path

import numpy
import torch

import common
import grpo
from lab.draw import BLUE, ORANGE, curves
from lab.experiment import Experiment, numbers, steps_to_level
from lab.training import continued, load_base
from lab.verdict import OURS, Claim
from tools.runs import curve, run

DEEPSEEK = "[DeepSeekMath](https://arxiv.org/abs/2402.03300)"
YUE = "[Yue and others](https://arxiv.org/abs/2504.13837)"
WANG = "[Wang and Zhou](https://arxiv.org/abs/2402.10200)"
QWEN = "[Qwen3](https://arxiv.org/abs/2505.09388)"
KS = (1, 2, 4, 8, 16, 32, 64, 128)
K = KS[-1]
LEVEL = 0.9                                     # of accuracy, to which steps are counted
FIRST = 4                                       # first tokens that are tried
DECODED = 128                                   # problems for each seed
GAIN = 0.02                                     # of a share, what counts as one
SAME = "--stop_at 2 --eval_steps 1000"
FEW = f"{SAME} --num_eval_problems 1 --num_eval_samples 1"
TASKS = {"arithmetic": "--max_steps 20", "countdown": "--task countdown --max_steps 40"}
SIZES = {32: 20, 4: 40}                         # problems of a step: steps
WAYS = {"RL": "grpo.py", "distillation": "reinforce.py --view token --gamma 0 --teacher"}
POLICIES = ("base", "trained")
SHARES = {"think_share": "thinks", "accuracy_given_think": "right if it thinks"}
THINK = grpo.TOKENIZER.encode_single_token("<think>")
ANSWER, ANSWERED = [grpo.TOKENIZER.encode_single_token(tag) for tag in ("<answer>", "</answer>")]
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5))


# ---- 1. training -----------------------------------------------------------------------------

@EXPERIMENT.measure(TASKS)
def learned(seed, task):
    """Train on a task: scores of base and trained policy, and what decoding makes of both; on
    arithmetic, teach others by the trained policy."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "run")
        flags = f"{TASKS[task]} {SAME} --num_eval_problems 64 --num_eval_samples {K} --seed {seed}"
        summary = run("grpo.py", folder, *flags.split(), quiet=True)
        found = decoding(f"{TASKS[task]} --seed {seed}", seed, folder)
        for policy in POLICIES:
            scored = summary[policy]
            found |= {f"{policy} {name}": scored[name] for name in SHARES}
            for name in ("pass@k", "maj@k"):
                found[f"{policy} {name}"] = [scored[name][k - 1] for k in KS]
        for size, way in itertools.product(SIZES if task == "arithmetic" else (), WAYS):
            found[f"{way}, {size}"] = taught(folder, way, size, seed, Path(work, f"{way}-{size}"))
        return found


def taught(teacher, way, size, seed, folder):
    """The accuracy of a base that learns by RL, or of a teacher, step by step. -> list"""
    words = f"{WAYS[way]} {teacher}" if way == "distillation" else WAYS[way]
    words += f" --num_prompts {size} --max_steps {SIZES[size]} {FEW} --seed {seed}"
    script, *flags = words.split()
    run(script, folder, *flags, quiet=True)
    return curve(folder, "accuracy")


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


def decoding(flags, seed, folder):
    """What greedy and CoT decoding make of the base, and greedy of the trained policy. -> columns,
    those of the paths with a number for each of the first tokens"""
    cfg, task, base = load_base(grpo, flags)
    problems = common.sample_problems(task, DECODED, ("decoding", seed), "test")
    found = paths(base, task, cfg, problems)
    policy = grpo.GPT(cfg)
    common.load_policy(policy, folder / "checkpoint.pt")
    [trained] = paths(policy, task, cfg, problems, 1)
    columns = {name: [path[name].mean().item() for path in found] for name in found[0]}
    return columns | {"greedy": columns["right"][0],
                      "most certain": most_certain(found).mean().item(),
                      "greedy, trained": trained["right"].mean().item()}


# ---- 3. what was found -----------------------------------------------------------------------

def page(learned):
    first = {}
    many = {}
    for task, found in learned.items():
        for policy in POLICIES:
            first[task, policy] = found[f"{policy} pass@k"][:, 0]
            many[task, policy] = found[f"{policy} pass@k"][:, -1]
    gain = {task: many[task, "trained"] - many[task, "base"] for task in TASKS}
    more = {task: first[task, "trained"] - first[task, "base"] - gain[task] for task in TASKS}
    task = "countdown"
    sharpened = Claim(
        f"{task}: pass@1 rises more than pass@{K}", DEEPSEEK, more[task], at_least=GAIN,
        shown=f"With {K} samples the base solves {many[task, 'base'].mean():.0%} of {task}, with "
        f"one {first[task, 'base'].mean():.0%}, which RL raises to "
        f"{first[task, 'trained'].mean():.0%}")
    yield sharpened
    yield Claim(f"arithmetic: pass@1 rises more than pass@{K}", DEEPSEEK, more["arithmetic"],
                at_least=GAIN)
    for task, found in learned.items():
        yield Claim(f"{task}: of {K} samples the base solves more problems than the trained policy",
                    YUE, -gain[task], at_least=GAIN)
        yield Claim(f"{task}: maj@{K} rises", DEEPSEEK,
                    found["trained maj@k"][:, -1] - found["base maj@k"][:, -1], at_least=GAIN)
        yield Claim(f"{task}: outputs that think are right more often after RL", OURS,
                    found["trained accuracy_given_think"] - found["base accuracy_given_think"],
                    at_least=GAIN)
        yield Claim(f"{task}: the most certain path of the base is right more often than its "
                    "greedy output", WANG, found["most certain"] - found["greedy"], at_least=GAIN)
        yield Claim(f"{task}: the greedy output of the trained policy is right more often than the "
                    "most certain path of the base", OURS,
                    found["greedy, trained"] - found["most certain"], at_least=GAIN)
    steps = {}
    for size, way in itertools.product(SIZES, WAYS):
        rows = learned["arithmetic"][f"{way}, {size}"]
        steps[size, way] = numpy.array([steps_to_level(row, LEVEL) for row in rows])
    for size in SIZES:
        yield Claim(f"with {size} problems a step, distillation takes fewer steps than RL to an "
                    f"accuracy of {LEVEL}", QWEN, steps[size, "RL"] / steps[size, "distillation"],
                    at_least=1.2, times=True)

    lines = {"after RL": learned["countdown"]["trained pass@k"],
             "the base": learned["countdown"]["base pass@k"]}
    yield curves(lines, sharpened.finding, x=KS, given=dict(zip(lines, (BLUE, ORANGE))),
                 xscale="log", xlabel="samples of a problem, k", ylim=(0, 1.03),
                 ylabel="pass@k on 64 held-out problems")
    rows = {}
    decoded = {}
    for task, found in learned.items():
        for policy in POLICIES:
            rows[f"{task}, {policy}"] = {"1": first[task, policy], "many": many[task, policy],
                "maj": found[f"{policy} maj@k"][:, -1],
                **{name: found[f"{policy} {name}"] for name in SHARES}}
        for place in range(FIRST):
            decoded[f"{task}, {place + 1}"] = {
                name: found[name][:, place] for name in ("chance", "thinks", "right", "certainty")}
    yield numbers(rows, {"1": "pass@1", "many": f"pass@{K}", "maj": f"maj@{K}"} | SHARES, by="")
    yield numbers(decoded, {"chance": "its chance", "thinks": "is `<think>`", "right": "right",
                            "certainty": "certainty"}, by="base, place of the first token")
    yield numbers({f"{size} problems": {way: steps[size, way] for way in WAYS} for size in SIZES},
                  {way: way for way in WAYS}, ".1f", by=f"steps to an accuracy of {LEVEL}, with")
