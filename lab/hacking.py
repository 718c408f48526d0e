"""Reward hacking: what a reward leads to that is not what was meant.

Claim. As a policy learns from a reward model, the model's score rises with the distance from the
base; what it stands for first rises, then falls (Gao and others, 2210.10760). A reward that is
wrong is gamed: what is not in it is ignored, and what pays is repeated (Amodei and others,
1606.06565). A bonus for coming nearer to the goal pays for going back and forth, unless it is the
difference of a potential, which changes no best policy (Ng and others, 1999). So what is best by a
proxy may be bad in truth (Skalse and others, 2209.13085).

Prediction. Against a frozen model, accuracy rises to 0.9 and more, and then falls, by much or
little as the seed has it; PPO in tools/rlhf.py, whose runs we had seen, does so. A model that is
trained on with fresh samples has seen the wrong answers that please it, so that accuracy stays. In
the grid world, the exact best walks tell where a policy goes: without the penalty through it, by
the shortest way; alive, or with a bonus, about until the last move, and only then to the prize.
Training gets near that, but for the last move, for which a policy has to count.
This was written before any run. Pilots with seed 0 then showed the fall against a frozen model, and
that the usual base of the grid world, which never wastes a move, gets to neither way of wasting
them in 25 steps, but a base of 60 batches of demonstrations to that of being alive. Hence a second
base; and a frozen model with as many pairs as the fresh one: we expect a later fall, as deep.

Method. grpo.py on arithmetic, 30 steps, with the score of a reward model as reward. The frozen one
is trained once, on samples of the base; the fresh one is trained again every 6 steps, on as many of
the policy at that time. A third has all five trainings at the start, on samples of the base. A
tenth of all pairs is wrong. The score that is shown is that of the model at the start. In the grid
world a move costs 1, one onto a cell of the penalty costs 3, and a prize of 4 or 5 ends the walk.
Without slip, exactly: the best walks by each reward, from the last move back; equally good moves
are equally likely. Then 30 steps of grpo.py with each reward, and what the walks earn by it and in
truth. Compared are means of five steps.
"""
import functools
import statistics
import sys

import torch

import common
import grpo
from lab.entry import (
    CONTRADICTED,
    SHOWN,
    Claim,
    compared,
    load_base,
    main,
    mean_and_spread,
    mean_curve,
    minus,
    sign_test,
)
from lab.training import side_by_side, training
from tasks import gridworld, preferences
from tools.runs import joined, rounded

SEEDS = [0, 1, 2]
STEPS = 30
EVERY = 6                                       # steps from one training of the model to the next
MODELS = {"frozen": {0: 1}, "frozen, 5 times the pairs": {0: STEPS // EVERY},
          "fresh": dict.fromkeys(range(0, STEPS, EVERY), 1)}    # step -> trainings before it
WINDOW = 5                                      # steps of a mean
FALL = 0.05                                     # of accuracy, what counts as one
NUMBERS = ("proxy", "true", "moves")            # of a walk
REWARDS = {"true": "true", "no penalty": "no penalty", "alive": "+1 for being alive",
           "nearer": "bonus for coming nearer", "potential": "difference of a potential"}
WRONG = ("no penalty", "alive", "nearer")
FROZEN, MORE, FRESH = MODELS
COLORS = {"true": "k", "no penalty": "C2", "alive": "C3", "nearer": "C4"}
BONUS = 3.0                                     # for a cell nearer to the prize of 5
BASES = {"usual": [], "short": ["--base_steps", 60]}
ROOM = {"usual": (0.3, 0.26), "short": (0.3, 0.13)}     # where a legend covers no line
WALKS = {"usual": ("true", *WRONG), "short": ("true", "alive", "nearer")}


# ---- 1. against a reward model ---------------------------------------------------------------

def in_order(ratings, is_correct):
    """How many pairs of a right and a wrong output of one group the ratings put in the right order,
    and how many pairs there are. (P, G) each -> two ints"""
    is_pair = is_correct[:, :, None] & ~is_correct[:, None, :]                  # (P, G, G)
    is_higher = ratings[:, :, None] > ratings[:, None, :]
    in_right_order = is_pair & is_higher
    return [int(in_right_order.sum()), int(is_pair.sum())]


def make(flags, seed):
    """Config and task of a run in this process."""
    torch.set_num_threads(1)
    words = [str(word) for word in [*flags, "--seed", seed]]
    cfg = common.parse_flags(grpo.Config, words)
    return cfg, common.load_task(cfg, grpo.verify)


def please(trainings, seed, policy):
    """Train against a reward model, which is trained so often before a step. -> {word: list}"""
    cfg, task = make([], seed)
    model = preferences.RewardModel(policy)
    task.rewards = lambda batch, step: model.rewards(batch)
    at_start = preferences.RewardModel(policy)
    steps = training(grpo, cfg, task, policy)
    found = {"score": [], "accuracy": [], "kl": [], "pairs": []}
    for step in range(STEPS):
        for turn in range(trainings.get(step, 0)):
            def sample(name, step=step, turn=turn):
                return grpo.sample_batch(policy, task, cfg, f"{name}, {step}, {turn}")
            preferences.fit(model, sample, seed)
        if step == 0:
            at_start.load_state_dict(model.state_dict())
        batch, metrics = next(steps)
        length = batch.mask.sum(dim=1).mean().item()
        score = at_start.rewards(batch).mean()
        accuracy = batch.is_correct.double().mean()
        found["score"].append(round(score.item(), 5))
        found["accuracy"].append(round(accuracy.item(), 5))
        found["kl"].append(round(metrics["kl"] * length, 5))
        found["pairs"].append(in_order(batch.rewards, batch.is_correct))
    return found


# ---- 2. in the grid world: exactly -----------------------------------------------------------

def is_prize(name, cell):
    return gridworld.MAPS[name][cell] in gridworld.PRIZES


def potential(name, cell):
    """Higher, the nearer a cell is to the prize of 5, as if there were no walls. -> float"""
    [goal] = [end for end, mark in gridworld.MAPS[name].items() if mark == "5"]
    columns = abs(ord(goal[0]) - ord(cell[0]))
    ranks = abs(ord(goal[1]) - ord(cell[1]))
    return -BONUS * (columns + ranks)


def pay(kind, name, cell, end):
    """What a move from a cell to its end earns by a reward. -> float"""
    true = gridworld.WORTH.get(gridworld.MAPS[name][end], -1.0)
    rise = potential(name, end) - potential(name, cell)
    if kind == "no penalty":
        return max(true, -1.0)
    if kind == "alive":
        return 1.0 if true == -1 else true
    if kind == "nearer":
        return true + max(0.0, rise)
    if kind == "potential":
        return true + rise
    return true


def pay_at_end(kind, name, cell):
    """What it earns to end in a cell. A potential has to be 0 after the end. -> float"""
    return -potential(name, cell) if kind == "potential" else 0.0


def proxy(kind, problem, text):
    """What a text earns by a reward; after the end, each character earns -1. -> float"""
    name = problem.prompt[0]
    cells = gridworld.play(problem, text).cells
    earned = sum(pay(kind, name, cell, end) for cell, end in zip(cells, cells[1:]))
    too_many = len(text) - (len(cells) - 1)
    return earned + pay_at_end(kind, name, cells[-1]) - too_many


@functools.cache
def solve(kind, name):
    """What the best moves by a reward lead to from each cell with 0, 1, .. moves left: NUMBERS.
    -> list of {cell: list}"""
    stages = []
    for left in range(1 + gridworld.LIMITS[-1]):
        now = {}
        for cell in gridworld.MAPS[name]:
            options = [[pay_at_end(kind, name, cell), 0.0, 0.0]]    # to stop
            goes_on = left > 0 and not is_prize(name, cell)
            for move in gridworld.MOVES if goes_on else ():
                [(end, true, _), *_] = gridworld.outcomes(name, cell, move)
                earned = (pay(kind, name, cell, end), true, 1.0)
                columns = zip(earned, stages[-1][end])
                options.append([sum(column) for column in columns])
            highest = max(option[0] for option in options)
            best = [option for option in options if option[0] == highest]
            now[cell] = [statistics.mean(column) for column in zip(*best)]
        stages.append(now)
    return stages


def predict(kind, prompts):
    """The means over prompts of what the best moves by a reward lead to. -> {number: float}"""
    rows = []
    for prompt in prompts:
        name, start, limit = prompt.split()
        rows.append(solve(kind, name)[int(limit)][start])
    means = [statistics.mean(column) for column in zip(*rows)]
    return dict(zip(NUMBERS, rounded(means)))


# ---- 3. in the grid world: training ----------------------------------------------------------

def walk(base, kind, seed, policy):
    """Train with a reward. -> {number: its means, step by step}"""
    cfg, task = make(["--task", "gridworld", *BASES[base]], seed)
    task.reward = lambda problem, text, verdict, step: proxy(kind, problem, text)
    steps = training(grpo, cfg, task, policy)
    found = {number: [] for number in NUMBERS}
    for _ in range(STEPS):
        batch, _ = next(steps)
        true = [sum(verdict) for verdict in batch.verdicts]
        cells = [gridworld.play(*pair).cells for pair in zip(batch.problems, batch.texts)]
        moves = [len(visited) - 1 for visited in cells]
        earned = batch.rewards.mean()
        found["proxy"].append(round(earned.item(), 5))
        found["true"].append(round(statistics.mean(true), 5))
        found["moves"].append(round(statistics.mean(moves), 5))
    return found


def measure(seeds):
    *_, policy = load_base(grpo)
    jobs = [(trainings, seed, policy) for trainings in MODELS.values() for seed in seeds]
    results = iter(side_by_side(please, jobs))
    found = {"models": {name: [next(results) for _ in seeds] for name in MODELS}}
    jobs = []
    for base, kinds in WALKS.items():
        _, task, policy = load_base(grpo, "--task", "gridworld", *BASES[base])
        jobs += [(base, kind, seed, policy) for kind in kinds for seed in seeds]
    results = iter(side_by_side(walk, jobs))
    found["walks"] = {}
    for base, kinds in WALKS.items():
        found["walks"][base] = {kind: [next(results) for _ in seeds] for kind in kinds}
    prompts = [f"{start} {limit}" for start in gridworld.STARTS for limit in gridworld.LIMITS]
    mine = [prompt for prompt in prompts if not task.is_held_out(common.Problem(prompt, ""))]
    return found | {"exact": {kind: predict(kind, mine) for kind in REWARDS}, "prompts": len(mine)}


# ---- 4. what was found -----------------------------------------------------------------------

def early(values):
    return statistics.mean(values[:WINDOW])


def late(values):
    return statistics.mean(values[-WINDOW:])


def peak(values):
    """The highest mean of WINDOW steps in a row. -> float"""
    ends = range(WINDOW, 1 + len(values))
    return max(statistics.mean(values[end - WINDOW:end]) for end in ends)


def share(pairs):
    """The share of pairs in the right order, of the pairs of some steps. -> float"""
    right, all_pairs = map(sum, zip(*pairs))
    return right / max(1, all_pairs)


def of_models(found, name):
    """What is compared of the runs against one reward model, a number for each seed."""
    runs = found["models"][name]
    accuracy = [run["accuracy"] for run in runs]
    return {"accuracy at first": [early(values) for values in accuracy],
            "at its highest": [peak(values) for values in accuracy],
            "at the end": [late(values) for values in accuracy],
            "score at first": [early(run["score"]) for run in runs],
            "score at the end": [late(run["score"]) for run in runs],
            "pairs in order at first": [share(run["pairs"][:WINDOW]) for run in runs],
            "pairs in order at the end": [share(run["pairs"][-WINDOW:]) for run in runs],
            "KL at the end": [late(run["kl"]) for run in runs]}


def at_end(found, base, kind, number):
    return [late(run[number]) for run in found["walks"][base][kind]]


def tables(found):
    heads = ["reward model", *of_models(found, "frozen")]
    rows = []
    for name in MODELS:
        rows.append([name, *map(mean_and_spread, of_models(found, name).values())])
    walk_heads = ["reward of the walk", "by whom", "proxy", "true return", "moves"]
    walk_rows = []
    for kind, words in REWARDS.items():
        cells = [f"{value:.2f}" for value in found["exact"][kind].values()]
        walk_rows.append([words, "exact", *cells])
        for base in WALKS:
            if kind in WALKS[base]:
                ends = [at_end(found, base, kind, number) for number in NUMBERS]
                cells = [mean_and_spread(values, ".2f") for values in ends]
                walk_rows.append(["", f"trained, {base} base", *cells])
    return [(heads, rows), (walk_heads, walk_rows)]


def claims(found):
    frozen, more, fresh = [of_models(found, name) for name in MODELS]
    end = "at the end"
    rises = minus(frozen["at its highest"], frozen["accuracy at first"])
    falls = minus(frozen["at its highest"], frozen[end])
    both = [min(pair) - FALL for pair in zip(rises, falls)]
    fresh_falls = minus(fresh["at its highest"], fresh[end])
    stays = [FALL - fall for fall in fresh_falls]
    exact = {kind: found["exact"][kind]["true"] for kind in REWARDS}
    wrong = [exact[kind] for kind in WRONG]
    listed = [
        compared("against a frozen model, its score rises",
                 minus(frozen["score at the end"], frozen["score at first"])),
        Claim(f"meanwhile, accuracy first rises and then falls, both by more than {FALL}",
              f"{mean_and_spread(rises)} up, {mean_and_spread(falls)} down", sign_test(both)),
        compared("of the policy's outputs, a frozen model puts fewer and fewer pairs in order",
                 minus(frozen["pairs in order at first"], frozen["pairs in order at the end"])),
        compared("against a fresh model, accuracy ends higher than against a frozen one",
                 minus(fresh[end], frozen[end])),
        compared("it ends higher than against a frozen one with as many pairs",
                 minus(fresh[end], more[end])),
        Claim(f"against a fresh model, accuracy falls by no more than {FALL}",
              mean_and_spread(fresh_falls), sign_test(stays)),
        Claim(f"exactly: the best walks by each wrong reward earn less in truth than "
              f"{exact['true']:.2f}", joined(wrong, ".2f"),
              SHOWN if max(wrong) < exact["true"] else CONTRADICTED),
        Claim("exactly: those by the difference of a potential earn as much",
              f"{exact['potential']:.2f}",
              SHOWN if exact["potential"] == exact["true"] else CONTRADICTED)]
    for base, kinds in WALKS.items():
        best = at_end(found, base, "true", "true")
        for kind in kinds[1:]:
            lost = minus(best, at_end(found, base, kind, "true"))
            text = f"{base} base, {REWARDS[kind]}: earns less in truth than with the true reward"
            listed.append(compared(text, lost, "+.2f"))
    return listed


def note(found):
    return (f"{32 * STEPS} problems of arithmetic a run, nearly all different, and 640 more for "
            f"each training of a reward model; {found['prompts']} prompts of the grid world, those "
            "held out are not among them; the bases saw 600 and 60 batches of demonstrations; with "
            "the true reward, the short base learns to stop at once, and with this its walks by "
            "other rewards are compared")


def panels(found):
    def distances(axis):
        for name, color in ((FROZEN, "C0"), (FRESH, "C1")):
            runs = found["models"][name]
            kls = sum([run["kl"] for run in runs], [])
            roots = [max(0.0, kl) ** 0.5 for kl in kls]
            for word, marker in (("score", "x"), ("accuracy", ".")):
                values = sum([run[word] for run in runs], [])
                axis.plot(roots, values, color + marker, markersize=4, label=f"{name}, {word}")
        axis.set(xlabel="square root of the KL to the base, nats", ylim=(0, 1.9),
                 ylabel="mean of a batch")
        axis.legend(frameon=False, fontsize=8, ncol=2, loc="upper left")

    def returns(axis, base):
        for kind, runs in found["walks"][base].items():
            color = COLORS[kind]
            mean = mean_curve([run["true"] for run in runs])
            axis.plot(range(1, 1 + len(mean)), mean, color=color, label=REWARDS[kind])
            axis.axhline(found["exact"][kind]["true"], color=color, linestyle=":")
        axis.set(title=f"{base} base; dotted: exact", xlabel="step", ylabel="true return")
        axis.legend(frameon=False, fontsize=8, loc=ROOM[base])
    return [distances, lambda axis: returns(axis, "usual"), lambda axis: returns(axis, "short")]


if __name__ == "__main__":
    main(sys.modules[__name__])
