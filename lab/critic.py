"""Critic: what it costs, whether one is needed, and what VAPO does to make it work.

Claim. PPO's critic is not needed: RLOO, whose baseline is the mean of the other outputs, does
better (Ahmadian and others, 2402.14740), and GRPO saves its memory and time (DeepSeekMath,
2402.03300). Trained well, a critic wins after all: VAPO (2504.05118) has 60.4 points where DAPO
(2503.14476) has 50 and PPO 5. Without value pretraining it falls to 11, without a lambda of 1 for
the critic to 33, without a lambda by length to 45. With lambda 0.95 and a critic that knows nothing
yet, no reward reaches the first tokens of a long output (VC-PPO, 2503.01491).

Prediction. On the grid each move has a reward, walks are short, and RLOO and PPO earn alike; GRPO,
which sums, earns less. A step of PPO takes twice the seconds, and holds nearly twice the numbers (9
for 5), as its critic is as large as the policy. On countdown searches have 50 tokens, and 0.95^49 =
8% of a reward reaches the first, where it is decided whether to search: PPO learns little, and VAPO
nearly as much as DAPO, not more, for so few batches teach a critic little. The lambda by length is
the part that counts, since with it even a critic of zeros shows the first token 1/e of the reward;
without pretraining or the critic's own lambda, VAPO is as good. In samples, pretraining costs more
than it gives. A pilot of one seed and 12 steps had shown VAPO begin to search, and one of 8 steps
PPO not.

Method. On the grid, 16 prompts a step, REINFORCE and RLOO (--view token), GRPO and PPO. On
countdown with three numbers, 8 prompts a step: DAPO without its dynamic sampling, PPO, VAPO, and
VAPO with one part taken out. A task has one base, which the critic begins from, too. Seconds of a
step are those of a short run alone. Memory is what stands between two steps, weights, gradients,
Adam's moments and the reference, counted in a checkpoint, not what a backward pass needs on top.
The lambda by length is 1 - 1 / (alpha n) for n tokens, with alpha 1 here; VAPO has 0.05, for texts
of thousands of tokens. How much of a reward at the end reaches the first token is computed by
ppo.gae for values of 0.
"""
import functools
import statistics
import tempfile
from pathlib import Path

import torch

import ppo
from lab.entry import (
    CONTRADICTED,
    SHOWN,
    Claim,
    compared,
    mean_and_spread,
    mean_curve,
    minus,
    run_all,
)
from lab.experiment import steps_to_level
from tools.runs import curve, run

SEEDS = [0, 1, 2]
G = 8
STEPS = {"grid": 24, "countdown": 16}
PROMPTS = {"grid": 16, "countdown": 8}
LEVELS = {"grid": 1.2, "countdown": 0.5}        # of the mean reward, to which samples are counted
LAST = 5                                        # batches whose mean reward is compared
PRETRAINING = 10                                # batches
LENGTHS = [2 ** i for i in range(11)]           # tokens
LONG = 1024                                     # tokens
SEEN = 0.1                                      # the share of a reward that counts as seen
SAME = ["--stop_at", 2, "--num_eval_problems", 1, "--num_eval_samples", 1, "--eval_steps", 1000]
GRID = ["--task", "gridworld", *SAME, "--num_prompts", PROMPTS["grid"],
        "--max_steps", STEPS["grid"]]
COUNTDOWN = ["--task", "countdown:3", *SAME, "--num_prompts", PROMPTS["countdown"],
             "--max_steps", STEPS["countdown"]]
LAMBDAS = {
    "lambda 0.95": {"lam": 0.95},
    "lambda by length, alpha 1": {"alpha": 1.0},
    "lambda by length, alpha 0.05": {"alpha": 0.05}}
PARTS = {                                       # of VAPO, and their flags
    "pretraining": ["--critic_pretrain_steps", PRETRAINING],
    "critic's lambda": ["--critic_lam", 1],
    "lambda by length": ["--length_adaptive"]}
OTHER_PARTS = ["--epsilon_high", 0.28, "--nll_coef", 0.1]


def vapo(without=""):
    """The words of VAPO, or of what is left without one of PARTS. -> list"""
    words = ["ppo.py", *COUNTDOWN, *OTHER_PARTS]
    for part, flags in PARTS.items():
        words += flags if part != without else []
    return words


VARIANTS = {
    "grid": {
        "REINFORCE": ["reinforce.py", *GRID, "--view", "token"],
        "RLOO": ["reinforce.py", *GRID, "--view", "token", "--baseline", "rloo"],
        "GRPO": ["grpo.py", *GRID],
        "PPO": ["ppo.py", *GRID]},
    "countdown": {
        "DAPO": ["grpo.py", *COUNTDOWN, "--loss_type", "dapo"],
        "PPO": ["ppo.py", *COUNTDOWN],
        "VAPO": vapo(),
        **{f"no {part}": vapo(without=part) for part in PARTS}}}


# ---- what is measured ------------------------------------------------------------------------

def measure(seeds):
    rewards = {}
    for task, variants in VARIANTS.items():
        results = run_all(variants, seeds)
        rewards[task] = {name: [result["reward"] for result in results[name]] for name in variants}
    costs = {name: alone(words, seeds[0]) for name, words in VARIANTS["grid"].items()}
    return {"rewards": rewards, "costs": costs}


def alone(words, seed, steps=5):
    """The seconds of a step of a run that is alone, and what stands in memory then. -> dict"""
    script, *flags = words
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "run")
        run(script, folder, *flags, "--seed", seed, "--max_steps", steps, quiet=True)
        seconds = statistics.median(curve(folder, "step_time")[1:])     # the first takes longer
        checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    return {"seconds a step": round(seconds, 3)} | standing(checkpoint)


def standing(checkpoint):
    """How many numbers stand between two steps, for each weight of the policy. -> {what: float}"""
    sizes = {name: count(part) for name, part in checkpoint.items()}
    policy = sizes["policy"]
    critic = sizes.get("critic", 0)
    numbers = {"policy": policy, "reference": policy, "critic": critic,
               "gradients": policy + critic,
               "moments": sizes["optimizer"] + sizes.get("critic_optimizer", 0)}
    numbers["all"] = sum(numbers.values())
    return {name: round(number / policy, 2) for name, number in numbers.items()}


def count(part):
    """How many numbers the tensors in a nest of dicts have. -> int"""
    if isinstance(part, dict):
        return sum(count(value) for value in part.values())
    return part.numel() if isinstance(part, torch.Tensor) else 0


# ---- what is exact ---------------------------------------------------------------------------

@functools.cache
def share_at_first(length, lam=None, alpha=1.0):
    """A_1, not whitened, of an output of this length with a reward of 1 at its end, whose values
    are all 0. Without lam, that of (9). -> float"""
    rewards = torch.zeros(1, length, dtype=torch.float64)
    rewards[0, -1] = 1
    if lam is None:
        lam = ppo.length_adaptive_lambda(torch.tensor([length]).double(), alpha)
    A, _ = ppo.gae(rewards, torch.zeros_like(rewards), torch.ones_like(rewards), 1.0, lam)
    return A[0, 0].item()


# ---- what was found --------------------------------------------------------------------------

def samples(task, name, steps):
    """How many outputs were sampled after so many steps; those for the critic alone count, too."""
    alone = PRETRAINING if "--critic_pretrain_steps" in VARIANTS[task][name] else 0
    return PROMPTS[task] * G * (alone + steps)


def summary(found, task, name):
    """What is compared, a number for each seed. -> {word: list}"""
    curves = found["rewards"][task][name]
    steps = [steps_to_level(rewards, LEVELS[task]) for rewards in curves]
    return {"mean": [statistics.mean(rewards) for rewards in curves],
            "last": [statistics.mean(rewards[-LAST:]) for rewards in curves],
            "steps": steps,
            "samples": [samples(task, name, number) for number in steps]}


def seconds(found, name):
    """To the level, on the grid, of each seed. -> list"""
    a_step = found["costs"][name]["seconds a step"]
    return [a_step * number for number in summary(found, "grid", name)["steps"]]


def tables(found):
    made = []
    for task, variants in VARIANTS.items():
        heads = [task, "mean reward", f"of the last {LAST} batches", f"samples to {LEVELS[task]}"]
        rows = []
        for name in variants:
            numbers = summary(found, task, name)
            rows.append([name, mean_and_spread(numbers["mean"]), mean_and_spread(numbers["last"]),
                         mean_and_spread(numbers["samples"], ".0f")])
        made.append((heads, rows))
    rows = []
    for name, costs in found["costs"].items():
        to_level = mean_and_spread(seconds(found, name), ".1f")
        rows.append([name, to_level, *[f"{number:.2f}" for number in costs.values()]])
    heads = ["grid; numbers in memory for each weight of the policy", "seconds to the level"]
    return [*made, (heads + list(found["costs"]["PPO"]), rows)]


def claims(found):
    grid = {name: summary(found, "grid", name) for name in VARIANTS["grid"]}
    parts = {name: summary(found, "countdown", name) for name in VARIANTS["countdown"]}
    vapo_needs = parts["VAPO"]["samples"]
    memory = {name: costs["all"] for name, costs in found["costs"].items()}
    listed = []
    for name in ("RLOO", "GRPO"):
        listed.append(compared(f"on the grid, {name} has a higher mean reward than PPO",
                               minus(grid[name]["mean"], grid["PPO"]["mean"])))
    listed += [
        compared(f"PPO takes more seconds to a mean reward of {LEVELS['grid']} than RLOO",
                 minus(seconds(found, "PPO"), seconds(found, "RLOO")), "+.1f"),
        Claim("GRPO holds fewer numbers in memory than PPO",
              f"{memory['GRPO']:.2f} against {memory['PPO']:.2f} for each weight of the policy",
              SHOWN if memory["GRPO"] < memory["PPO"] else CONTRADICTED)]
    for name, numbers in parts.items():
        if name != "VAPO":
            other = name.replace("no ", "VAPO without its ")
            listed.append(compared(f"on countdown, VAPO ends with a higher reward than {other}",
                                   minus(parts["VAPO"]["last"], numbers["last"])))
    listed.append(compared(
        f"VAPO needs fewer samples to {LEVELS['countdown']} than DAPO, with those of pretraining",
        minus(parts["DAPO"]["samples"], vapo_needs), "+.0f"))
    for name, flags in LAMBDAS.items():
        share = share_at_first(LONG, **flags)
        if "alpha" in flags:
            listed.append(Claim(
                f"{name}: over {SEEN:.0%} of a reward reaches the first of {LONG} tokens, if the "
                "critic knows nothing", f"{share:.2g}", SHOWN if share > SEEN else CONTRADICTED))
    return listed


def note(found):
    grid, countdown = [STEPS[task] * PROMPTS[task] for task in VARIANTS]
    return (f"{grid} prompts of a run on the grid, about 200 of them different, and {countdown} on "
            f"countdown, about 98 of them different; {G} samples of each; a run that never got to "
            "the level counts as 1.5 times its steps")


def panels(found):
    def learning(axis, task):
        for name, curves in found["rewards"][task].items():
            mean = mean_curve(curves)
            axis.plot([samples(task, name, step) for step in range(len(mean))], mean, label=name)
        axis.axhline(LEVELS[task], color="0.5", linestyle=":")
        axis.set(title=task, xlabel="samples learned from", ylabel="reward, mean of the seeds",
                 ylim=(0, 2 * LEVELS[task]))
        axis.legend(frameon=False, fontsize=7, loc="upper left", ncols=3)

    def shares(axis):
        for name, flags in LAMBDAS.items():
            axis.plot(LENGTHS, [share_at_first(n, **flags) for n in LENGTHS], label=name)
        axis.set(title="a critic that knows nothing", xlabel="tokens of an output", xscale="log",
                 ylabel="share of the reward at the first", ylim=(0, 1.05))
        axis.legend(frameon=False, fontsize=8)
    return [lambda axis: learning(axis, "grid"), lambda axis: learning(axis, "countdown"), shares]
