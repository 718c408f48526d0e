"""Critic: what it costs, whether one is needed, what VAPO does to make it work, where it begins

Claim. PPO's critic is not needed: RLOO, whose baseline is the mean of the other outputs, does
better (Ahmadian and others, 2402.14740), and GRPO saves its memory and time (DeepSeekMath,
2402.03300). Trained well, a critic wins after all: VAPO (2504.05118) has 60.4 points where DAPO
(2503.14476) has 50 and PPO 5. Without value pretraining it falls to 11, without a lambda of 1 for
the critic to 33, without a lambda by length to 45. With lambda 0.95 and a critic that knows nothing
yet, no reward reaches the first tokens of a long output (VC-PPO, 2503.01491). InstructGPT (Ouyang
and others, 2203.02155) starts the critic from the reward model. VC-PPO says that this start is
biased before the last token, since a reward model has learned to read whole outputs only and rates
unfinished ones lower, and that a critic has to be pretrained on the policy's own values. Policy and
critic may share one body (PPO, 1707.06347), which saves memory, but two do better (Andrychowicz and
others, 2006.05990).

Prediction. On the grid each move has a reward, walks are short, and RLOO and PPO earn alike; GRPO,
which sums, earns less. A step of PPO takes twice the seconds, and holds nearly twice the numbers (9
for 5), as its critic is as large as the policy. On countdown searches have 50 tokens, and 0.95^49 =
8% of a reward reaches the first, where it is decided whether to search: PPO learns little, and VAPO
nearly as much as DAPO, not more, for so few batches teach a critic little. The lambda by length is
the part that counts, since with it even a critic of zeros shows the first token 1/e of the reward;
without pretraining or the critic's own lambda, VAPO is as good. In samples, pretraining costs more
than it gives. A pilot of one seed and 12 steps had shown VAPO begin to search, and one of 8 steps
PPO not.
A reward model says nothing of unfinished outputs, so before it has learned this start
is worse than the mean of the values, and no better than a head of 0. Its body tells right steps
from wrong ones, which the values need, too, so that it is ahead of the base on the average of the
batches, and has lost nearly all of its first error at the end. From random weights a critic learns
whether an output is a guess, not whether its steps are right, and stays behind the base. So does
the best head on the policy's own body, which knows what to write next, not whether what is written
is right. If the value loss alone shapes the policy's body, pass@1 falls. A pilot had shown pass@1
of the base (0.28), and that the reward model puts nine of ten pairs in order; no critic.

Method. On the grid, 16 prompts a step, REINFORCE and RLOO (--view token), GRPO and PPO. On
countdown with three numbers, 8 prompts a step: DAPO without its dynamic sampling, PPO, VAPO, and
VAPO with one part taken out. Each task has one base, which the critic begins from, too. The seconds
of a step are the median of its run. Memory is what stands between two steps, weights, gradients,
Adam's moments and the reference, counted in a checkpoint, not what a backward pass needs on top.
The lambda by length is 1 - 1 / (alpha n) for n tokens, with alpha 1 here; VAPO has 0.05, for texts
of thousands of tokens. How much of a reward at the end reaches the first token is computed by
ppo.gae for values of 0. The start: a base of arithmetic after 450 of 900 batches, which does not
learn. Its outputs to 30 batches of 32 problems are sampled once a seed; each critic learns from all
of them by ppo.py's value loss and rate, from rewards at the end. Another one keeps the policy's
body and learns a head; the best head is that of least squares. The reward model has seen pairs out
of 20 more batches before that. The critic that shares its body with a policy is the base, at the
policy's rate and without a policy loss. Reference values are the mean rewards of 64 rollouts from
each prefix of 4 outputs to each of 12 held-out problems. The error of values is the mean of the
squared difference, divided by the variance of the reference values.
"""
import dataclasses
import functools
import shlex
import tempfile
from pathlib import Path

import numpy
import torch
from torch import nn

import ppo
from lab.draw import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, curves
from lab.experiment import Experiment, numbers, steps_to_level
from lab.tokens import rollout_rewards
from lab.training import load_base
from lab.verdict import OURS, Claim
from tasks import preferences
from tools.runs import run

AHMADIAN = "[Ahmadian and others](https://arxiv.org/abs/2402.14740)"
DEEPSEEK = "[DeepSeekMath](https://arxiv.org/abs/2402.03300)"
VAPO = "[VAPO](https://arxiv.org/abs/2504.05118)"
VC_PPO = "[VC-PPO](https://arxiv.org/abs/2503.01491)"
INSTRUCT = "[InstructGPT](https://arxiv.org/abs/2203.02155)"
BODIES = "[Andrychowicz and others](https://arxiv.org/abs/2006.05990)"
LEVELS = {"grid": 1.2, "countdown": 0.5}        # of the mean reward, to which steps are counted
LONG = 1024                                     # tokens
SAME = "--stop_at 2 --num_eval_problems 1 --num_eval_samples 1 --eval_steps 1000"
GRID = f"--task gridworld {SAME} --num_prompts 16 --max_steps 24"
COUNTDOWN = f"--task countdown:3 {SAME} --num_prompts 8 --max_steps 16"
PRETRAINING = 10                                # batches
PARTS = {"pretraining": f"--critic_pretrain_steps {PRETRAINING}",       # of VAPO
         "critic's lambda": "--critic_lam 1", "lambda by length": "--length_adaptive"}
ONLY_CRITIC = f"ppo.py {COUNTDOWN} --epsilon_high 0.28 --nll_coef 0.1"
RUNS = {
    "grid: REINFORCE": f"reinforce.py {GRID} --view token",
    "grid: RLOO": f"reinforce.py {GRID} --view token --baseline rloo",
    "grid: GRPO": f"grpo.py {GRID}", "grid: PPO": f"ppo.py {GRID}",
    "countdown: DAPO": f"grpo.py {COUNTDOWN} --loss_type dapo",
    "countdown: PPO": f"ppo.py {COUNTDOWN}",
    "countdown: VAPO": " ".join([ONLY_CRITIC, *PARTS.values()])}
for left_out in PARTS:
    kept = [flags for part, flags in PARTS.items() if part != left_out]
    RUNS[f"countdown: VAPO without its {left_out}"] = " ".join([ONLY_CRITIC, *kept])
BATCHES = 30
PROBLEMS, GROUP, ROLLOUTS = 12, 4, 64
ROWS = 1024                             # completed at a time
AT_END = 5                              # the last errors of a critic, whose mean is its last error
BASE = "base, head of 0"
RANDOM = "random weights"
REWARD = "reward model"
HEAD = "head on the policy's body"
SHARED = "shared body"
GAIN = 0.05                             # of a mean reward, or of an error, what counts as one
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5))
EXPERIMENT.runs("runs", RUNS, ["reward", "step_time"])


# ---- 1. what it costs, and what reaches the first token ---------------------------------------

@EXPERIMENT.measure([name for name in RUNS if name.startswith("grid")], seeds=[0])
def memory(seed, name):
    """How many numbers stand between two steps, for each weight of the policy."""
    script, *flags = shlex.split(RUNS[name])
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "run")
        run(script, folder, *flags, "--max_steps", 1, quiet=True)
        return standing(torch.load(folder / "checkpoint.pt", weights_only=True))


def standing(checkpoint):
    """How many numbers stand between two steps, for each weight of the policy. -> {what: float}"""
    sizes = {name: count(part) for name, part in checkpoint.items()}
    policy = sizes["policy"]
    critic = sizes.get("critic", 0)
    numbers = {"policy": policy, "reference": policy, "critic": critic,
               "gradients": policy + critic,
               "moments": sizes["optimizer"] + sizes.get("critic_optimizer", 0)}
    numbers["all"] = sum(numbers.values())
    return {name: number / policy for name, number in numbers.items()}


def count(part):
    """How many numbers the tensors in a nest of dicts have. -> int"""
    if isinstance(part, dict):
        return sum(count(value) for value in part.values())
    return part.numel() if isinstance(part, torch.Tensor) else 0


def share_at_first(length, lam=None, alpha=1.0):
    """A_1, not whitened, of an output of this length with a reward of 1 at its end, whose values
    are all 0. Without lam, that of (9). -> float"""
    rewards = torch.zeros(1, length, dtype=torch.float64)
    rewards[0, -1] = 1
    if lam is None:
        lam = ppo.length_adaptive_lambda(torch.tensor([length]).double(), alpha)
    A, _ = ppo.gae(rewards, torch.zeros_like(rewards), torch.ones_like(rewards), 1.0, lam)
    return A[0, 0].item()


# ---- 2. where it begins ----------------------------------------------------------------------

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


@EXPERIMENT.measure(["arithmetic"])
def starts(seed, case):
    """The errors of each critic as it learns, of the best head, and of the reward model."""
    cfg, task, policy = load_base(ppo, f"--base_steps 450 --seed {seed}")
    sample = functools.partial(ppo.sample_batch, policy, task, cfg)
    batches = [sample(f"critic {step}") for step in range(BATCHES)]
    model = preferences.RewardModel(policy)
    preferences.fit(model, sample, seed)
    asking = dataclasses.replace(cfg, num_prompts=PROBLEMS, num_generations=GROUP)
    held = ppo.sample_batch(policy, task, asking, "held out", "test")
    reference = reference_values(policy, task, asking, held)
    before = distributions(policy, held)

    @torch.no_grad()
    def look(critic):
        return error(critic(held.prompts, held.tokens), reference, held.mask)

    found = {}
    for name, (critic, rate) in make_critics(policy, cfg, model).items():
        found[name] = train(critic, rate, batches, cfg, look)
        if name in (HEAD, SHARED):                      # HEAD left the policy's body as it was
            tried = ppo.sample_batch(critic.gpt, task, cfg, "pass@1", "test")
            found[f"pass@1, {name}"] = tried.is_correct.double().mean().item()
            found[f"moved, {name}"] = distance(before, distributions(critic.gpt, held))
    with torch.no_grad():
        states = ppo.completion_states(policy, held.prompts, held.tokens)
        found["best head"] = error(states @ best_head(policy, batches), reference, held.mask)
        rated = ratings(model, held)                                            # (B, T + 1)
    place = torch.arange(rated.shape[1])
    length = held.lengths[:, None]
    for name, which in (("unfinished", place < length), ("whole", place == length)):
        found[f"excess, {name}"] = (rated - reference)[which].mean().item()
        found[f"square, {name}"] = (rated - reference)[which].square().mean().item()
    return found


# ---- 3. what was found -----------------------------------------------------------------------

def page(runs, memory, starts):
    mean = {name: found["reward"].mean(axis=1) for name, found in runs.items()}
    last = {name: found["reward"][:, -5:].mean(axis=1) for name, found in runs.items()}
    steps = {name: numpy.array([steps_to_level(row, LEVELS[name.split(":")[0]])
                                for row in found["reward"]]) for name, found in runs.items()}
    seconds = {name: steps[name] * numpy.median(found["step_time"], axis=1)
               for name, found in runs.items()}
    held = {name: found["all"].item() for name, found in memory.items()}
    vapo = "countdown: VAPO"
    wins = Claim("on countdown, VAPO ends with a higher reward than DAPO", VAPO,
                 last[vapo] - last["countdown: DAPO"], at_least=GAIN,
                 shown="A critic, trained as VAPO does, ends at a reward of "
                 f"{last[vapo].mean():.2f}, DAPO at {last['countdown: DAPO'].mean():.2f}",
                 contradicted="A critic costs more than it gives: VAPO ends at a reward of "
                 f"{last[vapo].mean():.2f}, DAPO at {last['countdown: DAPO'].mean():.2f}",
                 undecided=f"VAPO ends at a reward of {last[vapo].mean():.2f} on countdown, DAPO "
                 f"at {last['countdown: DAPO'].mean():.2f}, PPO at "
                 f"{last['countdown: PPO'].mean():.2f}")
    yield wins
    for name in RUNS:
        if name.startswith("countdown: VAPO ") or name == "countdown: PPO":
            yield Claim(f"on countdown, VAPO ends with a higher reward than {name[11:]}", VAPO,
                        last[vapo] - last[name], at_least=GAIN)
    needed = (steps[vapo] + PRETRAINING) / steps["countdown: DAPO"]
    yield Claim(f"VAPO needs fewer samples to {LEVELS['countdown']} than DAPO, with those of "
                "pretraining", VAPO, needed, at_most=0.9, times=True)
    for name, source in (("grid: RLOO", AHMADIAN), ("grid: GRPO", DEEPSEEK)):
        yield Claim(f"on the grid, {name[6:]} has as high a mean reward as PPO, or higher", source,
                    mean[name] - mean["grid: PPO"], at_least=-GAIN)
    yield Claim(f"PPO takes more seconds to a mean reward of {LEVELS['grid']} than RLOO", AHMADIAN,
                seconds["grid: PPO"] / seconds["grid: RLOO"], at_least=1.2, times=True)
    yield Claim("PPO holds more numbers in memory than GRPO", DEEPSEEK,
                held["grid: PPO"] / held["grid: GRPO"], at_least=1.2, times=True, exact=True)
    yield Claim(f"with lambda 0.95, no reward reaches the first of {LONG} tokens, if the critic "
                "knows nothing", VC_PPO, share_at_first(LONG, 0.95), at_most=0.01, exact=True,
                unit="of the reward")
    yield Claim("with a lambda by length, alpha 1, more than a tenth does", VAPO,
                share_at_first(LONG), at_least=0.1, exact=True, unit="of the reward")

    [found] = starts.values()
    error_at = {name: {"first": found[name][:, 0], "mean": found[name].mean(axis=1),
                       "last": found[name][:, -AT_END:].mean(axis=1)}
                for name in (BASE, RANDOM, REWARD, HEAD, SHARED)}
    ahead = Claim("from the reward model, a critic is nearer to the values than from the base, on "
                  "the average of the batches", INSTRUCT,
                  error_at[REWARD]["mean"] / error_at[BASE]["mean"], at_most=0.9, times=True)
    yield ahead
    yield Claim("before it learns, it is nearer than one that says 0", INSTRUCT,
                error_at[REWARD]["first"] / error_at[BASE]["first"], at_most=0.9, times=True)
    yield Claim("the reward model's squared error is larger for unfinished outputs than for whole "
                "ones", VC_PPO, found["square, unfinished"] / found["square, whole"], at_least=1.2,
                times=True)
    yield Claim("it rates unfinished outputs lower than whole ones, beside their values", VC_PPO,
                found["excess, unfinished"] - found["excess, whole"], at_most=-GAIN)
    yield Claim("learning from the policy's own outputs lowers the error of that start", VC_PPO,
                error_at[REWARD]["last"] / error_at[REWARD]["first"], at_most=0.8, times=True)
    yield Claim("from random weights the last error is larger than from the base", OURS,
                error_at[RANDOM]["last"] / error_at[BASE]["last"], at_least=1.1, times=True)
    yield Claim("with the best head on the policy's body, too", OURS,
                found["best head"] / error_at[BASE]["last"], at_least=1.1, times=True)
    yield Claim("through one body, the value loss alone lowers the policy's pass@1", BODIES,
                found[f"pass@1, {SHARED}"] - found[f"pass@1, {HEAD}"], at_most=-GAIN)

    lines = {name[11:]: columns["reward"] for name, columns in runs.items()
             if name.startswith("countdown")}
    yield curves(lines, wins.finding, ylabel="reward on countdown", given=dict(zip(
        lines, (BLUE, RED, GREEN, GREY, SKY, ORANGE))))
    names = (BASE, RANDOM, REWARD, HEAD)
    ends = {name: error_at[name]["last"].mean() for name in names}
    yield curves({name: found[name] for name in names}, "Where a critic begins: from the base it "
                 f"ends with an error of {ends[BASE]:.2f}, from a reward model {ends[REWARD]:.2f}, "
                 f"from random weights {ends[RANDOM]:.2f}", x=range(1 + BATCHES), yscale="log",
                 given=dict(zip(names, (BLUE, GREY, RED, PINK))), ylabel="error / variance",
                 xlabel="batches that the critic learned from")
    rows = {name: {"mean": mean[name], "last": last[name], "steps": steps[name],
                   "seconds": seconds[name]} for name in RUNS}
    yield numbers(rows, {"mean": "mean reward", "last": "of the last 5 batches",
                         "steps": "steps to the level", "seconds": "seconds to the level"},
                  ".2f", by="run")
    yield numbers(memory, {name: name for name in next(iter(memory.values()))}, ".2f",
                  by="numbers in memory for each weight of the policy")
    yield numbers(error_at, {"first": "error at first", "mean": "on average",
                             "last": f"the last {AT_END}"}, by="critic from")
