"""Where a critic begins: the base, a reward model, the policy's own body.

Claim. InstructGPT (Ouyang and others, 2203.02155) starts the critic from the reward model. VC-PPO
(2503.01491) says that this start is biased before the last token, since a reward model has learned
to read whole outputs only and rates unfinished ones lower, and that a critic has to be pretrained
on the policy's own values. Policy and critic may share one body (PPO, 1707.06347), which saves
memory, but two do better (Andrychowicz and others, 2006.05990).

Prediction. A reward model says nothing of unfinished outputs, so before it has learned this start
is worse than the mean of the values, and no better than a head of 0. Its body tells right steps
from wrong ones, which the values need, too, so that it is ahead of the base on the average of the
batches, and has lost nearly all of its first error at the end. From random weights a critic learns
whether an output is a guess, not whether its steps are right, and stays behind the base. So does
the best head on the policy's own body, which knows what to write next, not whether what is written
is right. If the value loss alone shapes the policy's body, pass@1 falls. A pilot had shown pass@1
of the base (0.28), and that the reward model puts nine of ten pairs in order; no critic.

Method. A base of arithmetic after 450 of 900 batches, which does not learn. Its outputs to 30
batches of 32 problems are sampled once a seed; each critic learns from all of them by ppo.py's
value loss and rate, from rewards at the end (lambda 1, as in --critic_pretrain_steps). Another one
keeps the policy's body and learns a head; the best head is that of least squares. The reward model
has seen pairs out of 20 more batches before that. The critic that shares its body with a policy is
the base, at the policy's rate and without a policy loss; we look at what has become of it as a
policy. Reference values are the mean rewards of 64 rollouts from each prefix of 4 outputs to each
of 12 held-out problems. The error of values is the mean of the squared difference, divided by the
variance of the reference values: the mean of these has an error of 1.
"""
import dataclasses
import functools
import statistics

import torch
from torch import nn

import ppo
from lab.entry import (
    compared,
    load_base,
    mean_and_spread,
    mean_curve,
    minus,
)
from lab.tokens import rollout_rewards
from lab.training import side_by_side
from tasks import preferences

SEEDS = [0, 1, 2, 3, 4]
FLAGS = ["--base_steps", 450]
BATCHES = 30
PROBLEMS, GROUP, ROLLOUTS = 12, 4, 64
ROWS = 1024                             # completed at a time
AT_END = 5                              # the last errors of a critic, whose mean is its last error
BASE = "base, head of 0"
RANDOM = "random weights"
REWARD = "reward model"
HEAD = "head on the policy's body"
SHARED = "shared body"
PLACES = ("prompt alone", "first half", "second half", "all but one", "whole output")
WHOLE = PLACES[-1]


# ---- critics ---------------------------------------------------------------------------------

class FromRewards(ppo.Critic):
    """ppo.py's critic with the body, the head and the bias of a reward model."""

    def __init__(self, model):
        super().__init__(model.gpt)
        self.head.data.copy_(model.head.weight[0])
        self.bias = nn.Parameter(model.head.bias.detach().clone())

    def forward(self, prompts, completions):
        return super().forward(prompts, completions) + self.bias


def make_critics(policy, cfg, model):
    """-> {name: (critic, learning rate)}"""
    other = ppo.GPT(dataclasses.replace(cfg, base_seed=1 + cfg.seed))
    on_body = ppo.Critic(policy)
    on_body.gpt.requires_grad_(False)
    rate = cfg.critic_learning_rate
    return {BASE: (ppo.Critic(policy), rate), RANDOM: (ppo.Critic(other), rate),
            REWARD: (FromRewards(model), rate), HEAD: (on_body, rate),
            SHARED: (ppo.Critic(policy), cfg.learning_rate)}


def returns_of(batch):
    """The reward at the end, for each token. -> (B, T)"""
    return batch.rewards.view(-1, 1) * batch.mask


def learn(critic, optimizer, batch, cfg, step):
    """What ppo.py does with a critic and a batch."""
    with torch.no_grad():
        batch.values = critic(batch.prompts, batch.tokens) * batch.mask
    ppo.fit_critic(critic, optimizer, batch, returns_of(batch), cfg, "shuffle", step)


@torch.no_grad()
def best_head(policy, batches):
    """The head by least squares for all tokens of some batches, on the policy's states. -> (D,)"""
    states = []
    returns = []
    for batch in batches:
        is_token = batch.mask > 0
        states.append(ppo.completion_states(policy, batch.prompts, batch.tokens)[is_token])
        returns.append(returns_of(batch)[is_token])
    return torch.linalg.lstsq(torch.cat(states), torch.cat(returns)[:, None]).solution[:, 0]


# ---- what they are held against --------------------------------------------------------------

def reference_values(policy, task, cfg, batch):
    """V before each token, by rollouts, and after the last one, where it is the reward; 0 behind
    that. -> (B, T + 1)"""
    rewards = batch.rewards.flatten()
    found = torch.zeros(len(batch.tokens), 1 + batch.tokens.shape[1])
    found[torch.arange(len(found)), batch.lengths] = rewards
    for t in range(int(batch.lengths.max())):
        rows = (batch.lengths > t).nonzero()[:, 0]
        of_rows = []
        for part in rows.repeat_interleave(ROLLOUTS).split(ROWS):
            problems = [batch.problems[row] for row in part.tolist()]
            of_rows.append(rollout_rewards(policy, task, cfg, problems, batch.prompts[part],
                                           batch.tokens[part, :t], ("start", t, len(of_rows))))
        found[rows, t] = torch.cat(of_rows).view(-1, ROLLOUTS).mean(dim=1)
    return found


def error(values, reference, mask):
    """The mean squared difference as a share of the variance of the reference. -> float"""
    is_token = mask > 0
    wanted = reference[:, :-1][is_token]
    difference = values[is_token] - wanted
    return (difference.square().mean() / wanted.var(correction=0)).item()


@torch.no_grad()
def ratings(model, batch):
    """What a reward model says after each number of tokens, from none to all. -> (B, T + 1)"""
    hidden = model.gpt.hidden(torch.cat([batch.prompts, batch.tokens], dim=1))
    return model.head(hidden[:, batch.prompts.shape[1] - 1:])[..., 0]


def place(t, length):
    """Where in an output of some length one is after t tokens. -> one of PLACES"""
    if t == 0:
        return PLACES[0]
    if t >= length - 1:
        return WHOLE if t == length else PLACES[3]
    return PLACES[1] if t <= length / 2 else PLACES[2]


def by_place(rated, reference, lengths):
    """Mean rating, mean value and mean squared difference at each of PLACES. -> {place: dict}"""
    pairs = {name: [] for name in PLACES}
    for row, length in enumerate(lengths.tolist()):
        for t in range(length + 1):
            pair = torch.stack([rated[row, t], reference[row, t]])
            pairs[place(t, length)].append(pair)
    found = {}
    for name, listed in pairs.items():
        rating, value = torch.stack(listed, dim=1)
        numbers = {"rating": rating.mean(), "value": value.mean(),
                   "error": (rating - value).square().mean()}
        found[name] = {word: round(number.item(), 5) for word, number in numbers.items()}
    return found


@torch.no_grad()
def distributions(policy, batch):
    """log pi of all that could stand at each token of a batch. -> (n, V)"""
    states = ppo.completion_states(policy, batch.prompts, batch.tokens)[batch.mask > 0]
    return (states @ policy.embed.weight.T).log_softmax(dim=-1)


def distance(before, after):
    """The mean of KL(before || after). (n, V) each -> float"""
    return (before.exp() * (before - after)).sum(dim=-1).mean().item()


def train(critic, rate, batches, cfg, look):
    """What look(critic) says before the first batch and after each. -> list"""
    optimizer = torch.optim.Adam(critic.parameters(), lr=rate)
    seen = [look(critic)]
    for step, batch in enumerate(batches):
        learn(critic, optimizer, batch, cfg, step)
        seen.append(look(critic))
    return seen


def measure_seed(seed):
    torch.set_num_threads(1)
    cfg, task, policy = load_base(ppo, *FLAGS, "--seed", seed)
    sample = functools.partial(ppo.sample_batch, policy, task, cfg)
    batches = [sample(f"critic {step}") for step in range(BATCHES)]
    model = preferences.RewardModel(policy)
    accuracy = preferences.fit(model, sample, seed)
    asking = dataclasses.replace(cfg, num_prompts=PROBLEMS, num_generations=GROUP)
    held = ppo.sample_batch(policy, task, asking, "held out", "test")
    reference = reference_values(policy, task, asking, held)
    before = distributions(policy, held)

    @torch.no_grad()
    def look(critic):
        values = critic(held.prompts, held.tokens)
        moved = distance(before, distributions(critic.gpt, held))
        return [round(error(values, reference, held.mask), 5), round(moved, 5)]

    found = {"accuracy": round(accuracy, 5), "errors": {}, "moved": {}, "pass@1": {},
             "places": by_place(ratings(model, held), reference, held.lengths),
             "tokens": int(held.mask.sum()),
             "problems": len({problem.prompt for problem in held.problems})}
    for name, (critic, rate) in make_critics(policy, cfg, model).items():
        errors, moved = zip(*train(critic, rate, batches, cfg, look))
        found["errors"][name] = list(errors)
        found["moved"][name] = list(moved)
        if name in (HEAD, SHARED):                      # HEAD left the policy's body as it was
            tried = ppo.sample_batch(critic.gpt, task, cfg, "pass@1", "test")
            found["pass@1"][name] = round(tried.is_correct.float().mean().item(), 5)
    with torch.no_grad():
        states = ppo.completion_states(policy, held.prompts, held.tokens)
        best = error(states @ best_head(policy, batches), reference, held.mask)
    return found | {"best head": round(best, 5)}


def measure(seeds):
    return {"of seeds": side_by_side(measure_seed, [(seed,) for seed in seeds])}


# ---- what is shown ---------------------------------------------------------------------------

def errors(found, name):
    """The errors of a critic: at first, on the average of the batches, at last. -> three lists"""
    curves = [one["errors"][name] for one in found["of seeds"]]
    return ([curve[0] for curve in curves], [statistics.mean(curve) for curve in curves],
            [statistics.mean(curve[-AT_END:]) for curve in curves])


def of(found, word, name):
    """What each seed has under a word and a name. -> list"""
    return [one[word][name] for one in found["of seeds"]]


def at(found, name, number):
    """A number of a place, for each seed. -> list"""
    return [places[name][number] for places in (one["places"] for one in found["of seeds"])]


def too_high(found, name):
    """By how much the reward model overrates the outputs at a place. -> list"""
    return minus(at(found, name, "rating"), at(found, name, "value"))


def tables(found):
    heads = ["critic from", "error at first", "on average", f"last {AT_END}",
             "KL of its body from the policy"]
    rows = []
    for name in found["of seeds"][0]["errors"]:
        cells = [mean_and_spread(values) for values in errors(found, name)]
        last = [moved[-1] for moved in of(found, "moved", name)]
        is_policy = name in (HEAD, SHARED)
        rows.append([name, *cells, mean_and_spread(last) if is_policy else ""])
    best = [one["best head"] for one in found["of seeds"]]
    rows.append(["best head on the policy's body", "", "", mean_and_spread(best), "0"])
    places = []
    for name in PLACES:
        numbers = [mean_and_spread(at(found, name, number))
                   for number in ("rating", "value", "error")]
        places.append([name, *numbers])
    heads_of_places = ["what the reward model has read", "its rating", "value",
                       "squared difference"]
    return [(heads, rows), (heads_of_places, places)]


def claims(found):
    first, average, last = errors(found, REWARD)
    of_base = errors(found, BASE)
    best = [one["best head"] for one in found["of seeds"]]
    early = [statistics.mean(values) for values in
             zip(*(at(found, name, "error") for name in PLACES if name != WHOLE))]
    excess = [statistics.mean(values) for values in
              zip(*(too_high(found, name) for name in PLACES if name != WHOLE))]
    return [
        compared("before it learns, a critic from the reward model is nearer to the values than "
                 "one that says 0", minus(of_base[0], first)),
        compared("on average, from before the first batch to the last, it is nearer than one from "
                 "the base",
                 minus(of_base[1], average)),
        compared("the reward model's squared difference is larger for unfinished outputs than for "
                 "whole ones", minus(early, at(found, WHOLE, "error"))),
        compared("it rates unfinished outputs lower than whole ones, beside their values",
                 minus(too_high(found, WHOLE), excess)),
        compared("learning from the policy's own outputs lowers the error of that start",
                 minus(first, last)),
        compared("from random weights the last error is larger than from the base",
                 minus(errors(found, RANDOM)[2], of_base[2])),
        compared("with the best head on the policy's body, too", minus(best, of_base[2])),
        compared("through one body, the value loss alone lowers the policy's pass@1",
                 minus(of(found, "pass@1", HEAD), of(found, "pass@1", SHARED)))]


def note(found):
    tokens = [str(one["tokens"]) for one in found["of seeds"]]
    accuracy = [one["accuracy"] for one in found["of seeds"]]
    passed = [mean_and_spread(of(found, "pass@1", name)) for name in (HEAD, SHARED)]
    return (f"Different held-out problems of a seed: "
            f"{min(one['problems'] for one in found['of seeds'])}, with {', '.join(tokens)} "
            f"tokens; training: {32 * BATCHES}, nearly all different; new pairs that the reward "
            f"model orders: {mean_and_spread(accuracy)}; pass@1 of the policy {passed[0]}, of its "
            f"body after the value loss {passed[1]}; guesses of four tokens have no second half")


def panels(found):
    def learning(axis):
        for name in found["of seeds"][0]["errors"]:
            mean = mean_curve(of(found, "errors", name))
            axis.plot(range(len(mean)), mean, label=name)
        best = statistics.mean(one["best head"] for one in found["of seeds"])
        axis.axhline(best, color="0.5", linestyle=":", label="best head on the policy's body")
        axis.set(xlabel="batches learned from", ylabel="error, as a share of the variance",
                 yscale="log")
        axis.legend(frameon=False, fontsize=7, loc="upper right")

    def places(axis):
        for number in ("rating", "value"):
            mean = [statistics.mean(at(found, name, number)) for name in PLACES]
            axis.plot(mean, "o-", label=number)
        axis.set_xticks(range(len(PLACES)), [name.replace(" ", "\n") for name in PLACES])
        axis.set(ylabel="mean at a place", xlabel="what the reward model has read")
        axis.legend(frameon=False, fontsize=8)

    def moving(axis):
        for curve in of(found, "moved", SHARED):
            axis.plot(range(len(curve)), curve, color="C4", alpha=0.6)
        axis.set(xlabel="batches that a shared body learned values from",
                 ylabel="KL from the policy, nats a token")
    return [learning, places, moving]
