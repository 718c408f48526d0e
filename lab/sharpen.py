"""Sharpening: what RL adds to the base, and what it only puts first

Claim. RL makes right what the base is right in sometimes: maj@k rises, pass@k does not
(DeepSeekMath, 2402.03300), and of many samples the base solves more problems than the trained
policy (Yue and others, 2504.13837). Chains of thought need no prompting: greedy decoding after each
of the likeliest first tokens finds them, and the most certain of the answers is better than that of
plain greedy decoding (Wang and Zhou, 2402.10200).

Prediction. One run, seen before, took pass@64 from 0.88 to 0.95 on countdown. So pass@1 and maj@128
rise on both tasks, and Yue's claim is contradicted on countdown, where a thought is a search that
gets better; on arithmetic both solve all, and there is no difference. On arithmetic the accuracy of
outputs that think stays at 0.98; on countdown it rises. The second of the base's first tokens
begins a thought, and with it greedy decoding of arithmetic is right nearly always, so that the most
certain answer is better than plain greedy's there, and RL adds nothing to it; on countdown RL is
still better.

Method. grpo.py on arithmetic, 20 steps, and on countdown, 40 steps. Scores of the base and of the
trained policy are the scripts' own, of 128 samples of each of 64 problems, the same for all seeds.
CoT decoding is the base's, on other held-out problems for each seed: greedy after each of the four
likeliest first tokens, which are the paths. The certainty of a path is by how much the likeliest
token is likelier than the second, in the mean of the tokens of its answer.

Outcome. Right: pass@1 rises on both, maj@128 on countdown, where thoughts get better; the base's
second likeliest token begins a thought; the most certain path is better than plain greedy. Wrong:
maj@128 of arithmetic was 1 before, and RL is right there in half of the problems more than the most
certain path. On countdown, it is rather the base that solves more with 128 samples, and whether RL
is better than the most certain path is undecided.
"""
import tempfile
from pathlib import Path

import torch

import common
import grpo
from lab.draw import BLUE, ORANGE, curves
from lab.experiment import Experiment, numbers
from lab.training import continued, load_base
from lab.verdict import OURS, Claim
from tools.runs import run

DEEPSEEK = "[DeepSeekMath](https://arxiv.org/abs/2402.03300)"
YUE = "[Yue and others](https://arxiv.org/abs/2504.13837)"
WANG = "[Wang and Zhou](https://arxiv.org/abs/2402.10200)"
KS = (1, 2, 4, 8, 16, 32, 64, 128)
K = KS[-1]
FIRST = 4                                       # first tokens that are tried
DECODED = 128                                   # problems for each seed
GAIN = 0.02                                     # of a share, what counts as one
TASKS = {"arithmetic": "--max_steps 20", "countdown": "--task countdown --max_steps 40"}
POLICIES = ("base", "trained")
SHARES = {"think_share": "share that thinks", "accuracy_given_think": "of these, right"}
PATH = {"chance": "its probability", "thinks": "it is `<think>`", "right": "greedy from it, right",
        "certainty": "certainty of the answer"}
THINK = grpo.TOKENIZER.encode_single_token("<think>")
ANSWER, ANSWERED = [grpo.TOKENIZER.encode_single_token(tag) for tag in ("<answer>", "</answer>")]
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5))


# ---- 1. training -----------------------------------------------------------------------------

@EXPERIMENT.measure(TASKS)
def learned(seed, task):
    """Train on a task: scores of base and trained policy, and what decoding makes of both."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "run")
        flags = (f"{TASKS[task]} --stop_at 2 --eval_steps 1000 --num_eval_problems 64 "
                 f"--num_eval_samples {K} --seed {seed}")
        summary = run("grpo.py", folder, *flags.split())
        found = decoding(f"{TASKS[task]} --seed {seed}", seed, folder)
    for policy in POLICIES:
        scored = summary[policy]
        found |= {f"{policy} {name}": scored[name] for name in SHARES}
        for name in ("pass@k", "maj@k"):
            found[f"{policy} {name}"] = [scored[name][k - 1] for k in KS]
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

def claims(task, found, said=""):
    """What is claimed of a task; said: the finding, if the first is shown. Yields Claim"""
    gain = found["trained pass@k"] - found["base pass@k"]                       # (S, ks)
    yield Claim(f"{task}: pass@1 rises more than pass@{K}", DEEPSEEK, gain[:, 0] - gain[:, -1],
                at_least=GAIN, shown=said)
    voted = found["trained maj@k"] - found["base maj@k"]
    thought = found["trained accuracy_given_think"] - found["base accuracy_given_think"]
    for text, source, effect in (
            (f"pass@{K} is higher for the base than after RL", YUE, -gain[:, -1]),
            (f"maj@{K} rises", DEEPSEEK, voted[:, -1]),
            ("outputs that think are right more often after RL", OURS, thought),
            ("the most certain path of the base is right more often than its greedy output", WANG,
             found["most certain"] - found["greedy"]),
            ("greedy after RL is right more often than the most certain path of the base", OURS,
             found["greedy, trained"] - found["most certain"])):
        yield Claim(f"{task}: {text}", source, effect, at_least=GAIN)


def page(learned):
    countdown = learned["countdown"]
    base, trained = (countdown[f"{policy} pass@k"].mean(axis=0) for policy in POLICIES)
    sharpened, *others = claims(
        "countdown", countdown, f"On countdown, RL takes pass@1 from {base[0]:.0%} to "
        f"{trained[0]:.0%}, but pass@{K} from {base[-1]:.0%} to {trained[-1]:.0%}")
    yield from (sharpened, *others, *claims("arithmetic", learned["arithmetic"]))
    lines = {"after RL": countdown["trained pass@k"], "the base": countdown["base pass@k"]}
    yield curves(lines, sharpened.finding, x=KS, given=dict(zip(lines, (BLUE, ORANGE))),
                 xscale="log", xlabel="samples of a problem, k", ylim=(0, 1.03),
                 ylabel="pass@k on 64 held-out problems")
    rows = {}
    decoded = {}
    for task, found in learned.items():
        for policy in POLICIES:
            passed, voted = found[f"{policy} pass@k"], found[f"{policy} maj@k"]
            rows[f"{task}, {policy}"] = {"1": passed[:, 0], "many": passed[:, -1],
                                         "maj": voted[:, -1]}
            rows[f"{task}, {policy}"] |= {name: found[f"{policy} {name}"] for name in SHARES}
        for place in range(FIRST):
            decoded[f"{task}, {place + 1}"] = {name: found[name][:, place] for name in PATH}
    yield numbers(rows, {"1": "pass@1", "many": f"pass@{K}", "maj": f"maj@{K}"} | SHARES, by="")
    yield numbers(decoded, PATH, by="base, rank of the first token")
