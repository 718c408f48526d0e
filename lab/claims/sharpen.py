"""Sharpening: what RL adds to the base, and what a guesser has without any model

Claim. RL makes right what the base is right in sometimes: maj@k rises, pass@k does not
(DeepSeekMath, 2402.03300), and of many samples the base solves more problems than the trained
policy (Yue and others, 2504.13837). Chains of thought need no prompting: greedy decoding after each
of the likeliest first tokens finds them, and the most certain of the answers is better than that of
plain greedy decoding (Wang and Zhou, 2402.10200).

Prediction. One run, seen before, took pass@64 from 0.88 to 0.95 on countdown. So pass@1 and maj@128
rise there, and Yue's claim is contradicted, since a thought is a search that gets better. On
arithmetic the accuracy of outputs that think stays at 0.98; on countdown it rises. The second of
the base's first tokens begins a thought, and with it greedy decoding of arithmetic is right nearly
always, so that the most certain answer is better than plain greedy's there.

Method. grpo.py on arithmetic, 20 steps, and on countdown, 40 steps. Scores of the base and of the
trained policy are the scripts' own, of 128 samples of each of 64 problems, the same for all seeds.
(Those of countdown are easier than most: a guesser has .14 of them, and .06 of all held-out ones.)
The guesser has no model: it takes countdown's numbers in random order with random signs. Of many
guesses one is nearly always right, so pass@128 of a base that mostly guesses says nothing of what
it has learned. Therefore 128 outputs of each policy are also made to begin with <think>, and the
claims on many samples are tried with these, of which 8 do not yet find everything. CoT decoding is
the base's, on other held-out problems for each seed: greedy after each of the four likeliest first
tokens, which are the paths. The certainty of a path is by how much the likeliest token is likelier
than the second, in the mean of the tokens of its answer.

Outcome. Right: pass@1 and maj@128 rise on countdown; thoughts get better there, from .43 to .50;
the base's second likeliest token begins a thought; the most certain path is better than plain
greedy. Wrong: of several thoughts the trained policy's solve no more than the base's: of 8 it is
open, of 128 the base is ahead in the mean. On arithmetic a thought gets worse, from .98 to .95.
What RL adds is the habit of thinking.
"""
import random
import re
import statistics
import tempfile
from pathlib import Path

import torch

import common
import grpo
from lab.docs import run
from lab.draw import BLUE, GREEN, GREY, ORANGE, curves
from lab.experiment import Experiment, numbers
from lab.training import continued, load_base
from lab.verdict import OURS, Claim
from tasks import countdown
from tasks.scores import pass_at_k

DEEPSEEK = "[DeepSeekMath](https://arxiv.org/abs/2402.03300)"
YUE = "[Yue and others](https://arxiv.org/abs/2504.13837)"
WANG = "[Wang and Zhou](https://arxiv.org/abs/2402.10200)"
KS = (1, 2, 4, 8, 16, 32, 64, 128)
K = KS[-1]
FEW = 8
FIRST = 4                                       # first tokens that are tried
PROBLEMS = 64                                   # that all seeds are asked, for pass@k
DECODED = 128                                   # others, for each seed
GAIN = 0.02                                     # of a share, what counts as one
TASKS = {"arithmetic": "--max_steps 20", "countdown": "--task countdown --max_steps 40"}
ALWAYS = "--stop_at 2 --eval_steps 1000"
POLICIES = ("base", "trained")
SHARES = {"think_share": "share that thinks", "accuracy_given_think": "of these, right"}
PATH = {"chance": "its probability", "thinks": "it is `<think>`", "right": "greedy from it, right",
        "certainty": "certainty of the answer"}
THINK = grpo.TOKENIZER.encode_single_token("<think>")
ANSWER, ANSWERED = [grpo.TOKENIZER.encode_single_token(tag) for tag in ("<answer>", "</answer>")]
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5))


# ---- 1. training -----------------------------------------------------------------------------

def thoughts_right(policy, task, cfg, problems):
    """Of each problem, how many of K outputs that are made to begin with <think> are right."""
    asked = [problem for problem in problems for _ in range(K)]                 # B
    uniforms = torch.rand(len(asked), cfg.max_completion_length,
                          generator=common.generator(cfg.seed, "thoughts"))
    first = torch.full((len(asked), 1), THINK)
    prompts = grpo.encode_prompts(asked, task, cfg.device)
    *_, texts = continued(grpo, policy, cfg, asked, prompts, first, uniforms)
    is_right = torch.tensor([task.verify(*pair) == 1 for pair in zip(asked, texts)])
    return is_right.view(-1, K).sum(dim=1).tolist()


def passed(counts, n):
    """pass@k for each of KS, of problems of which so many of n outputs are right. -> list"""
    return [statistics.fmean(pass_at_k(n, int(count), k) for count in counts) for k in KS]


@EXPERIMENT.measure(TASKS)
def learned(seed, task_name):
    """Train on a task: scores of base and trained policy, of their thoughts alone, and what CoT
    decoding makes of the base."""
    flags = f"{TASKS[task_name]} --seed {seed} --base_seed {seed}"
    cfg, task, base = load_base(grpo, flags)
    trained = grpo.GPT(cfg)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "run")
        asked = f"{flags} {ALWAYS} --num_eval_problems {PROBLEMS} --num_eval_samples {K}"
        summary = run("grpo.py", folder, *asked.split())
        common.load_policy(trained, folder / "checkpoint.pt")
    found = decoding(task, cfg, base)
    problems = common.held_out_problems(task, PROBLEMS)     # those of the summary
    for name, policy in zip(POLICIES, (base, trained)):
        scored = summary[name]
        counts = thoughts_right(policy, task, cfg, problems)
        found |= {f"{name} {share}": scored[share] for share in SHARES}
        found[f"{name} thoughts"] = passed(counts, K)
        for score in ("pass@k", "maj@k"):
            found[f"{name} {score}"] = [scored[score][k - 1] for k in KS]
    return found


def guess(rng, problem):
    """What somebody might say who only knows what an answer of countdown looks like. -> str"""
    *numbers, _ = map(int, re.findall("[0-9]+", problem.prompt))
    return f"<answer>{countdown.combine(rng, numbers).expression}</answer>"


@EXPERIMENT.measure(["countdown"], seeds=[0])
def guesser(seed, name, draws=2048):
    """pass@k of guesses without a model, at the problems of `learned`."""
    cfg = common.parse_flags(grpo.Config, ["--task", name])
    task = common.load_task(cfg, grpo.verify)
    rng = random.Random(seed)
    counts = [sum(task.verify(problem, guess(rng, problem)) == 1 for _ in range(draws))
              for problem in common.held_out_problems(task, PROBLEMS)]
    return {"pass@k": passed(counts, draws)}


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
def paths(policy, task, cfg, problems):
    """Greedy outputs after each of the likeliest first tokens; the first is plain greedy's. -> for
    each path the chances of the first token, whether this is <think>, whether the output is right,
    and how certain it is, (n,) each"""
    prompts = grpo.encode_prompts(problems, task, cfg.device)
    first_chances = policy(prompts)[:, -1].softmax(dim=-1)                      # (n, V)
    chances, firsts = first_chances.topk(FIRST, dim=-1)                         # (n, places)
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


def decoding(task, cfg, base):
    """What greedy and CoT decoding make of the base. -> columns, those of the paths with a number
    for each of the first tokens"""
    problems = common.sample_problems(task, DECODED, ("decoding", cfg.seed), "test")
    found = paths(base, task, cfg, problems)
    columns = {name: [path[name].mean().item() for path in found] for name in found[0]}
    return columns | {"greedy": columns["right"][0],
                      "most certain": most_certain(found).mean().item()}


# ---- 3. what was found -----------------------------------------------------------------------

def page(learned, guesser):
    found = learned["countdown"]
    passed, thought = ({policy: found[f"{policy} {name}"] for policy in POLICIES}
                       for name in ("pass@k", "thoughts"))
    guesses = guesser["countdown"]["pass@k"]
    few = KS.index(FEW)
    base, trained = (values[:, few].mean() for values in thought.values())
    said = (f"Countdown: the base solves {passed['base'][:, -1].mean():.0%} with {K} outputs, and "
            f"{K} guesses without a model {guesses[0, -1]:.0%}; {FEW} thoughts of the "
            f"base solve {base:.0%}, after RL {trained:.0%}")
    for k in (FEW, K):
        told = dict.fromkeys(("shown", "contradicted", "undecided"), said * (k == FEW))
        pair = tuple(values[:, KS.index(k)] for values in thought.values())
        yield Claim(f"countdown: of {k} thoughts, at least one is right more often for the base "
                    "than after RL", YUE, pair, at_least=GAIN, **told)
    gain = passed["trained"] - passed["base"]                                   # (S, ks)
    yield Claim(f"countdown: pass@1 rises more than pass@{FEW}", DEEPSEEK,
                gain[:, 0] - gain[:, few], at_least=GAIN)
    yield Claim(f"countdown: maj@{K} rises", DEEPSEEK,
                (found["trained maj@k"][:, -1], found["base maj@k"][:, -1]), at_least=GAIN)
    decoded = learned["arithmetic"]
    yield Claim("arithmetic: the most certain path of the base is right more often than its greedy "
                "output", WANG, (decoded["most certain"], decoded["greedy"]), at_least=GAIN)
    yield Claim("countdown: a thought is right more often after RL", OURS,
                (thought["trained"][:, 0], thought["base"][:, 0]), at_least=GAIN)

    lines = {"after RL": passed["trained"], "the base": passed["base"],
             "thoughts of base": thought["base"], "a guesser": guesses}
    yield curves(lines, said, x=KS, given=dict(zip(lines, (BLUE, ORANGE, GREEN, GREY))),
                 xscale="log", xlabel="samples of a problem, k", ylim=(0, 1.03), height=3.2,
                 ylabel="pass@k on 64 held-out problems")
    rows = {}
    for task, columns in learned.items():
        for policy in POLICIES:
            row = {name: columns[f"{policy} {name}"] for name in SHARES}
            row["maj"] = columns[f"{policy} maj@k"][:, -1]
            for kind in ("pass@k", "thoughts"):
                scores = columns[f"{policy} {kind}"]
                row |= {f"{kind} {k}": scores[:, KS.index(k)] for k in (1, FEW, K)}
            rows[f"{task}, {policy}"] = row
    heads = {f"pass@k {k}": f"pass@{k}" for k in (1, FEW, K)}
    heads |= {f"thoughts {k}": f"{k} thought{'s' * (k > 1)}" for k in (1, FEW, K)}
    yield numbers(rows, heads | {"maj": f"maj@{K}"} | SHARES, ".2f", by="task, policy")
    ranks = {f"{task}, {place + 1}": {name: columns[name][:, place] for name in PATH}
             for task, columns in learned.items() for place in range(FIRST)}
    yield numbers(ranks, PATH, by="base, rank of the first token")
