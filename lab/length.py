"""Length bias: what dividing the loss by the length of an output does.

Claim. GRPO's 1/|o| punishes each token of a long wrong output less than that of a short one, so
that wrong outputs grow longer and longer; a constant divisor stops this (Dr. GRPO, 2503.20783).
DAPO (2503.14476) averages over all tokens alike, so that long outputs count in full.

Prediction. Here a guess has five tokens and a worked answer about 33, so that with 1/|o| a token of
a guess weighs 6.6 times as much; with the other two averages all tokens of a batch weigh the
same. What is to be learned is to work answers out: the digits of guesses, which are noise, then
fill the gradient, less of it points to thinking, and 1/|o| needs the most steps to an accuracy of
0.9. Wrong outputs get longer with every average, because guesses die out. Among outputs that think
the length is a matter of the problem, so wrong ones do not get longer with 1/|o| than without.

Method. grpo.py with --loss_type grpo, dr_grpo and dapo, else the same: advantages are divided by
the std, the learning rate is one. Lengths are those of all outputs of the last ten steps. The
weights of tokens are the gradient of grpo.aggregate. Before training, on batches of the base, the
cosine between the descent of the loss and the gradient of the mean log-probability that an output
begins to think says how much of a step is about thinking.
"""
import itertools
import math
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
    load_base,
    mean_and_spread,
    sign_test,
)
from lab.experiment import steps_to_level
from lab.training import side_by_side, training

SEEDS = [0, 1, 2, 3, 4]
STEPS = 26
WINDOW = 10                                     # steps whose lengths are compared, at both ends
LEVEL = 0.9                                     # of accuracy, to which steps are counted
AVERAGES = {"grpo": "1/length", "dr_grpo": "constant", "dapo": "all tokens of a step"}
GUESS, THOUGHT = 5, 33                          # tokens
KINDS = ("right outputs", "wrong outputs", "wrong thoughts")


# ---- 1. the weight of a token ----------------------------------------------------------------

def token_weights(loss_type, lengths):
    """What the loss of a token of each output is multiplied by. lengths (B,) -> (B,)"""
    _, average = grpo.LOSS_TYPES[loss_type]
    mask = (torch.arange(48) < lengths[:, None]).double()                       # (B, T)
    token_loss = torch.zeros_like(mask, requires_grad=True)
    grpo.aggregate(token_loss, mask, average).backward()
    return token_loss.grad[:, 0]


def guess_beside_thought(loss_type):
    """How many times the weight of a token of a thought one of a guess has. -> float"""
    guess, thought = token_weights(loss_type, torch.tensor([GUESS, THOUGHT])).tolist()
    return guess / thought


# ---- 2. the first gradient -------------------------------------------------------------------

def flat_gradient(policy):
    """The gradients of all weights in a row. It leaves zeros in their place"""
    gradient = torch.cat([weight.grad.flatten() for weight in policy.parameters()])
    clear_gradient(policy)
    return gradient


def clear_gradient(policy):
    for weight in policy.parameters():
        weight.grad = torch.zeros_like(weight)


def pull_to_think(policy, batch, cfg):
    """The cosine between the descent of the loss and the gradient of log pi(<think>). -> float"""
    A = grpo.advantages(batch.rewards, cfg.scale_rewards).view(-1, 1)           # (B, 1)
    clear_gradient(policy)
    grpo.backward(policy, batch, None, A, torch.arange(len(A)), cfg)
    descent = -flat_gradient(policy)
    first = torch.full((len(A), 1), grpo.TOKENIZER.encode_single_token("<think>"))
    logps, _ = grpo.score(policy, batch.prompts, first)                         # (B, 1)
    logps.mean().backward()
    return torch.cosine_similarity(descent, flat_gradient(policy), dim=0).item()


# ---- 3. training -----------------------------------------------------------------------------

def lengths_of(batch):
    """Of each kind of output how many there are, and their tokens. -> {kind: [number, tokens]}"""
    lengths = batch.mask.sum(dim=1)
    is_right = batch.is_correct.flatten()
    thinks = torch.tensor(["<think>" in text for text in batch.texts])
    chosen = zip(KINDS, (is_right, ~is_right, ~is_right & thinks))
    return {kind: [int(which.sum()), int(lengths[which].sum())] for kind, which in chosen}


def learn(flags, policy, num_steps=STEPS):
    """Train from the base. -> dict: its pull, and for each step accuracy and lengths"""
    torch.set_num_threads(1)
    cfg = common.parse_flags(grpo.Config, [str(flag) for flag in flags])
    task = common.load_task(cfg, grpo.verify)
    pull = pull_to_think(policy, grpo.sample_batch(policy, task, cfg, 0), cfg)
    found = {"pull": round(pull, 5), "accuracy": [], **{kind: [] for kind in KINDS}}
    steps = training(grpo, cfg, task, policy)
    for batch, _ in itertools.islice(steps, num_steps):
        found["accuracy"].append(round(batch.is_correct.double().mean().item(), 5))
        for kind, pair in lengths_of(batch).items():
            found[kind].append(pair)
    return found


def measure(seeds):
    *_, policy = load_base(grpo)
    jobs = [(["--loss_type", name, "--seed", seed], policy) for name in AVERAGES for seed in seeds]
    results = iter(side_by_side(learn, jobs))
    return {"runs": {name: [next(results) for _ in seeds] for name in AVERAGES}}


# ---- 4. what was found -----------------------------------------------------------------------

def mean_length(pairs):
    """The mean length of the outputs of some steps, [number, tokens] of each. -> float"""
    numbers, tokens = zip(*pairs)
    return sum(tokens) / max(1, sum(numbers))


def late(run, kind):
    return mean_length(run[kind][-WINDOW:])


def late_accuracy(run):
    return statistics.mean(run["accuracy"][-WINDOW:])


def growth(run, kind):
    """How much longer the outputs of the last steps are than those of the first. -> tokens"""
    return late(run, kind) - mean_length(run[kind][:WINDOW])


def paired(found, function, other):
    """A number of each run with 1/|o|, minus that with another average. -> list"""
    runs = found["runs"]
    return [function(one) - function(two) for one, two in zip(runs["grpo"], runs[other])]


def tables(found):
    heads = ["average", "a token of a guess beside one of a thought", "cosine to thinking",
             f"steps to {LEVEL}", "accuracy, last ten steps",
             *(f"tokens, {kind}" for kind in KINDS)]
    rows = []
    for name, average in AVERAGES.items():
        runs = found["runs"][name]
        row = [f"{average} ({name})", f"{guess_beside_thought(name):.1f}",
               mean_and_spread([run["pull"] for run in runs], ".2f"),
               mean_and_spread([steps_to_level(run["accuracy"], LEVEL) for run in runs], ".0f"),
               mean_and_spread([late_accuracy(run) for run in runs])]
        for kind in KINDS:
            row.append(mean_and_spread([late(run, kind) for run in runs], ".1f"))
        rows.append(row)
    return [(heads, rows)]


def claims(found):
    ratio = guess_beside_thought("grpo")
    others = [guess_beside_thought(name) for name in list(AVERAGES)[1:]]
    is_alone = ratio > 1.001 > max(others)
    growths = [growth(run, "wrong thoughts") for run in found["runs"]["grpo"]]
    listed = [
        Claim("with 1/length, a token weighs less the longer its output is, and only there",
              f"guess beside thought: {ratio:.1f} times, {max(others):.1f} elsewhere",
              SHOWN if is_alone else CONTRADICTED)]
    for kind in KINDS[1:]:
        longer = paired(found, lambda run, kind=kind: late(run, kind), "dr_grpo")
        listed.append(compared(f"1/length makes {kind} longer than a constant does, in tokens",
                               longer, "+.1f"))
    listed.append(compared("with 1/length, wrong thoughts get longer in training, in tokens",
                           growths, "+.1f"))
    for name in list(AVERAGES)[1:]:
        slower = paired(found, lambda run: math.log(steps_to_level(run["accuracy"], LEVEL)), name)
        factors = [math.exp(value) for value in slower]
        listed.append(Claim(f"1/length needs more steps to {LEVEL} than {name}",
                            f"{mean_and_spread(factors, '.2f')} times", sign_test(slower)))
    more = paired(found, lambda run: run["pull"], "dr_grpo")
    listed.append(compared("with 1/length, less of the first gradient is about thinking: cosine of "
                           "dr_grpo minus that of grpo", [-value for value in more]))
    return listed


def note(found):
    cfg = grpo.Config()
    return (f"Problems: {cfg.num_prompts} new ones at each of {STEPS} steps, "
            f"{cfg.num_generations} outputs to each")


def panels(found):
    def accuracy(axis):
        curves = {name: [run["accuracy"] for run in found["runs"][name]] for name in AVERAGES}
        draw_curves(axis, curves, title="how fast it learns", ylabel="accuracy of the samples")
        axis.axhline(LEVEL, color="black", linestyle=":", linewidth=1)

    def lengths(axis, kind):
        for name in AVERAGES:
            values = []
            for step in range(3, 1 + STEPS):
                pairs = [pair for run in found["runs"][name] for pair in run[kind][step - 3:step]]
                values.append(mean_length(pairs))
            axis.plot(range(3, 1 + STEPS), values, label=name)
        axis.set(title=f"{kind}, three steps", xlabel="step", ylabel="tokens", ylim=(0, 48))
        axis.legend(frameon=False, fontsize=8)
    return [accuracy, lambda axis: lengths(axis, "wrong outputs"),
            lambda axis: lengths(axis, "wrong thoughts")]
