"""Tools: tokens that the policy did not write, and rewards for calls.

Claim. What a tool says must not be learned: with these tokens masked Search-R1 gets 0.431, without
0.343; GRPO learns faster than PPO there, and PPO is more stable (2503.09516). Without a tool RL
ends lower (ReTool, 2504.11536). Calls that are rated part by part teach more than those that have
to be right as a whole, and rewards for length hurt: 53.0 without, 48.9 with a fixed target, 48.2
with one that grows (ToolRL, 2504.13958).

Prediction. (We knew the table of lookup in docs/tasks.md, and one run.) Names come by chance, so no
policy foresees them, and their part of the first gradient is the longer one. Learned, they delay
the rest, but all ends alike, except that the policy then also makes up what the tool would say,
where it is silent. Without a tool one guess in 675 is right. PPO's critic has everything to learn,
so PPO is slower; neither collapses. Fine is faster than coarse and than the outcome, as it tells
wrong outputs apart. A length reward of 0.1 does nothing beside it, as a needless call costs more
than its length earns. Beside accuracy the call costs nothing, and where all of a group are right,
the division by the std makes much of little, so that such calls spread. (Pilots of one seed, run
after this was written: one needless call in 4608 outputs; the tool's part of the gradient 3.3 times
as long; in five steps, tool tokens learned was the slower one.)

Method. lookup asks for a boss (one hop) or a boss's boss (two), whom only a call can tell. grpo.py
with batches of 16 problems, 36 steps from one base; ppo.py with the same. No tool: the tool is
silent in training. Made up: the trained policy meets a silent tool, calls it, and writes the block
of information itself. Needless are calls beyond the hops. What one pays is computed from rewards of
two right outputs. The first gradient, on 64 problems with tool tokens learned, is the sum of two
parts, one of the tokens of each kind. A fall is from the best mean of five steps to a later one.
The cosine, added after the runs because they were so alike, is that of the advantages of the base's
outputs under a reward with those under accuracy.
"""
import dataclasses
import functools
import statistics

import torch

import common
import grpo
from lab.entry import (
    CONTRADICTED,
    SHOWN,
    Claim,
    compared,
    draw_curves,
    draw_points,
    load_base,
    mean_and_spread,
    minus,
    sign_test,
)
from lab.experiment import steps_to_level
from lab.training import clear_gradient, flat_gradient, side_by_side, training
from tools.runs import run_all

SEEDS = [0, 1, 2, 3, 4]
STEPS = 36
LEVEL = 0.9                                     # of accuracy, to which steps are counted
LUCK = 1 / 675                                  # to guess one of the other names
ASKED = 64                                      # problems of the gradient and of the silent tool
FLAGS = ["--task", "lookup", "--num_prompts", 16]
PPO = ["ppo.py", *FLAGS, "--max_steps", STEPS, "--stop_at", 2, "--eval_steps", 1000,
       "--num_eval_problems", 1, "--num_eval_samples", 1]
NO_TOOL = "no tool"
RUNS = {                                        # of grpo.py
    "accuracy": [],
    "tool tokens learned": ["--no-mask_tool_tokens"],
    NO_TOOL: [],
    "fine": ["--reward", "fine"],
    "coarse + format": ["--reward", "coarse+format"],
    "fine + length": ["--reward", "fine+length"],
    "fine + growing length": ["--reward", "fine+growing_length"],
    "accuracy + length": ["--reward", "accuracy+length"]}
NUMBERS = {"steps to the level": ".1f", "late accuracy": ".3f", "fall": ".3f",
           "late needless calls": ".3f", "made up": ".2f"}


# ---- 1. what is rewarded, and what is learned ------------------------------------------------

def load_task(flags):
    """-> Config of grpo.py, task"""
    cfg = common.parse_flags(grpo.Config, [str(flag) for flag in [*FLAGS, *flags]])
    return cfg, common.load_task(cfg, grpo.verify)


@functools.cache
def needless_call_pays(name, step=STEPS):
    """How much more a right output earns if it goes on to ask for the boss of the boss. -> float"""
    _, task = load_task(RUNS.get(name, []))
    needed = "<search>ka</search><information>mi</information>"
    needless = "<search>mi</search><information>to</information>"
    problem = common.Problem("boss of ka?", "mi", needed, 1, task="lookup")
    rewards = []
    for thought in (needed + needless, needed):
        text = f"<think>{thought}</think><answer>mi</answer>"
        rewards.append(task.reward(problem, text, task.verify(problem, text), step))
    return round(rewards[0] - rewards[1], 5)


def gradient_parts(policy, batch, cfg):
    """The two parts of the gradient where the tool's tokens are learned: that of the tokens of the
    policy, and that of the tool's. -> {word: norm}"""
    A = grpo.advantages(batch.rewards, cfg.scale_rewards).view(-1, 1)           # (B, 1)
    slots = torch.arange(batch.tokens.shape[1])
    is_token = (slots < batch.lengths[:, None]).to(batch.mask)                  # (B, T)
    learned = dataclasses.replace(batch, mask=is_token)
    norms = {}
    for word, weights in {"own": batch.mask, "tool": 1 - batch.mask}.items():
        clear_gradient(policy)
        grpo.backward(policy, learned, None, weights * A, torch.arange(len(A)), cfg)
        norms[word] = round(flat_gradient(policy).norm().item(), 5)
    return norms


def likeness(batch, name):
    """The cosine of the advantages of a batch under the reward of a run and under its own."""
    cfg, task = load_task(RUNS[name])
    rewards = [task.reward(problem, text, verdict, 0)
               for problem, text, verdict in zip(batch.problems, batch.texts, batch.verdicts)]
    A = [grpo.advantages(values, cfg.scale_rewards).flatten()
         for values in (torch.tensor(rewards).view_as(batch.rewards), batch.rewards)]
    return round(torch.cosine_similarity(*A, dim=0).item(), 5)


# ---- 2. training -----------------------------------------------------------------------------

def silence(task):
    """The tool says nothing from now on."""
    task.respond = lambda problem, text: ""


def needless_calls(batch):
    """Calls beyond the hops of the question, per output. -> float"""
    counts = [max(0, text.count("</search>") - problem.difficulty)
              for text, problem in zip(batch.texts, batch.problems)]
    return round(statistics.mean(counts), 5)


def made_up(texts):
    """Of the outputs that call a silent tool, the share that writes what it says. -> float"""
    calling = [text for text in texts if "</search>" in text]
    return round(sum("<information>" in text for text in calling) / max(1, len(calling)), 5)


def learn(name, seed, policy, num_steps=STEPS):
    """Train from the base. -> dict: step by step, and what is made up in the end"""
    torch.set_num_threads(1)
    cfg, task = load_task([*RUNS[name], "--seed", seed])
    if name == NO_TOOL:
        silence(task)
    found = {"accuracy": [], "needless": []}
    for _, (batch, _) in zip(range(num_steps), training(grpo, cfg, task, policy)):
        found["accuracy"].append(round(batch.is_correct.double().mean().item(), 5))
        found["needless"].append(needless_calls(batch))
    silence(task)
    asking = dataclasses.replace(cfg, num_prompts=ASKED)
    batch = grpo.sample_batch(policy, task, asking, num_steps)
    return found | {"made up": made_up(batch.texts)}


def first_batch(policy, task, seed):
    """What is measured on a batch of the base. -> parts of the gradient, {run: cosine}"""
    cfg, _ = load_task(["--seed", seed, "--num_prompts", ASKED])
    batch = grpo.sample_batch(policy, task, cfg, 0)
    return gradient_parts(policy, batch, cfg), {name: likeness(batch, name) for name in RUNS}


def measure(seeds):
    torch.set_num_threads(1)
    _, task, policy = load_base(grpo, *FLAGS)
    asked = [first_batch(policy, task, seed) for seed in seeds]
    results = iter(side_by_side(learn, [(name, seed, policy) for name in RUNS for seed in seeds]))
    runs = {name: [next(results) for _ in seeds] for name in RUNS}
    ppo = run_all({"PPO": PPO}, seeds, ["accuracy"])["PPO"]
    runs["PPO"] = [{"accuracy": result["accuracy"]} for result in ppo]
    return {"gradients": [parts for parts, _ in asked],
            "cosines": [cosines for _, cosines in asked], "runs": runs}


# ---- 3. what was found -----------------------------------------------------------------------

def fall(accuracy):
    """From the best mean of five steps to the lowest one after it. -> float"""
    means = [statistics.mean(accuracy[i - 5:i]) for i in range(5, 1 + len(accuracy))]
    return max(max(means[:i]) - means[i - 1] for i in range(1, 1 + len(means)))


def by_seed(found, name):
    """What is compared, a number for each seed. -> {word: list}"""
    runs = found["runs"][name]
    accuracies = [run["accuracy"] for run in runs]
    numbers = {"steps to the level": [steps_to_level(values, LEVEL) for values in accuracies],
               "late accuracy": [statistics.mean(values[-10:]) for values in accuracies],
               "fall": [fall(values) for values in accuracies]}
    if name != "PPO":
        needless = [run["needless"] for run in runs]
        numbers["late needless calls"] = [statistics.mean(values[-10:]) for values in needless]
        numbers["made up"] = [run["made up"] for run in runs]
    return numbers


def tables(found):
    rows = []
    for name in found["runs"]:
        cells = {word: mean_and_spread(values, NUMBERS[word])
                 for word, values in by_seed(found, name).items()}
        paid = needless_call_pays(name)
        cosines = [round(of_run.get(name, 1.0), 3) for of_run in found["cosines"]]
        rows.append([name, *(cells.get(word, "-") for word in NUMBERS), f"{paid:+.3f}",
                     mean_and_spread(cosines)])
    return [(["run", *NUMBERS, "a needless call pays", "cosine to accuracy"], rows)]


def claims(found):
    numbers = {name: by_seed(found, name) for name in found["runs"]}

    def more(text, word, one, other, form="+.3f"):
        return compared(text, minus(numbers[one][word], numbers[other][word]), form)

    learned = "tool tokens learned"
    steps = "steps to the level"
    ratios = [parts["tool"] / parts["own"] for parts in found["gradients"]]
    guessed = statistics.mean(numbers[NO_TOOL]["late accuracy"])
    beside_fine = max(needless_call_pays(name) for name in RUNS if name.startswith("fine +"))
    beside_accuracy = needless_call_pays("accuracy + length")
    return [
        Claim("learned, the tool's tokens have the longer part of the first gradient",
              f"{mean_and_spread(ratios, '.2f')} times as long",
              sign_test([ratio - 1 for ratio in ratios])),
        more(f"tool tokens learned: more steps to {LEVEL}", steps, learned, "accuracy", "+.1f"),
        more("tool tokens masked: a higher late accuracy", "late accuracy", "accuracy", learned),
        more("tool tokens learned: more is made up where the tool is silent", "made up", learned,
             "accuracy"),
        Claim("without a tool, no more is right in the end than twice what a guess has",
              f"{guessed:.4f}; a guess: {LUCK:.4f}",
              SHOWN if guessed <= 2 * LUCK else CONTRADICTED),
        more(f"PPO needs more steps to {LEVEL} than GRPO", steps, "PPO", "accuracy", "+.1f"),
        more("GRPO falls further than PPO", "fall", "accuracy", "PPO"),
        more(f"rated as a whole, calls need more steps to {LEVEL} than part by part", steps,
             "coarse + format", "fine", "+.1f"),
        more(f"the outcome alone needs more steps to {LEVEL} than fine", steps, "accuracy", "fine",
             "+.1f"),
        more("beside fine, a length reward lowers the late accuracy", "late accuracy", "fine",
             "fine + length"),
        more("a growing one does, too", "late accuracy", "fine", "fine + growing length"),
        Claim("with a length reward, a needless call costs beside fine, and pays beside accuracy",
              f"{beside_fine:+.3f} and {beside_accuracy:+.3f}",
              SHOWN if beside_fine < 0 < beside_accuracy else CONTRADICTED),
        more("beside accuracy, it makes needless calls more frequent", "late needless calls",
             "accuracy + length", "accuracy")]


def note(found):
    return (f"{16 * STEPS} problems a run, nearly all different, {ASKED} for the gradient and as "
            f"many for the silent tool; the level is an accuracy of {LEVEL} in two batches, a run "
            f"that never got there counts as {1.5 * STEPS:.0f} steps; late are the last ten steps")


def panels(found):
    def accuracy(axis):
        names = ["accuracy", "tool tokens learned", "PPO", NO_TOOL]
        curves = {name: [run["accuracy"] for run in found["runs"][name]] for name in names}
        draw_curves(axis, curves, ylabel="accuracy, mean of the seeds")

    def steps(axis):
        points = {name: by_seed(found, name)["steps to the level"]
                  for name in found["runs"] if name != NO_TOOL}
        draw_points(axis, points, xlabel=f"steps to an accuracy of {LEVEL}")
    return [accuracy, steps]
