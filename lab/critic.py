"""Critic: whether PPO needs one, whether VAPO's parts make it pay, from which weights to start it

Claim. PPO's critic is not needed: RLOO, whose baseline is the mean of the other outputs, does
better (Ahmadian and others, 2402.14740), and GRPO saves its memory and time (DeepSeekMath,
2402.03300). Trained well, a critic wins after all: on AIME 2024 VAPO (2504.05118) has 60.4 points,
DAPO (2503.14476) 50 and PPO 5. Without value pretraining it falls to 11, without a lambda of 1 for
the critic to 33, without a lambda by length to 45. InstructGPT (Ouyang and others, 2203.02155)
starts the critic from the reward model. VC-PPO (2503.01491) says that this start is biased before
the last token, since a reward model has learned to read whole outputs only and rates unfinished
ones lower, and that a critic has to be pretrained on the policy's own values.

Prediction. On the grid each move has a reward, walks are short, and RLOO and PPO earn alike; GRPO,
which sums, earns less. A step of PPO takes twice the seconds. On countdown searches have 50 tokens,
and 0.95^49 = 8% of a reward reaches the first, where it is decided whether to search: PPO learns
little, and VAPO nearly as much as DAPO, not more, for so few batches teach a critic little. The
lambda by length is the part that counts, since with it even a critic of zeros shows the first token
1/e of the reward; without pretraining or the critic's own lambda, VAPO is as good. A pilot of one
seed and 12 steps had shown VAPO begin to search, and one of 8 steps PPO not.
A reward model says nothing of unfinished outputs, so before it has learned this start is worse than
the mean of the values, and no better than a head of 0. Its body tells right steps from wrong ones,
which the values need, too, so that it is ahead of the base on the average of the batches, and has
lost nearly all of its first error at the end. From random weights a critic learns whether an output
is a guess, not whether its steps are right, and stays behind the base. A pilot had shown pass@1 of
the base (0.28), and that the reward model puts nine of ten pairs in order; no critic.

Method. On the grid, 16 prompts a step, RLOO (--view token), GRPO and PPO. On countdown with three
numbers, 8 prompts a step: DAPO without its dynamic sampling, PPO, VAPO, and VAPO with one part left
out. Each task has one base, which the critic begins from, too. (For each weight of the policy, PPO
holds nine numbers: itself, its gradient and Adam's two moments, the same of the critic, and the
reference; without a critic there are five.) The lambda by length is 1 - 1 / (alpha n) for n tokens,
with alpha 1 here; VAPO has 0.05, for texts of thousands of tokens.
The start: a base of arithmetic after 450 of 900 batches, which stays as it is. Its outputs to 30
batches of 32 problems are sampled once a seed; each critic learns from all of them by ppo.py's
value loss and rate, from rewards at the end. The reward model has seen pairs out of 20 more batches
before that. Reference values are the mean rewards of 64 rollouts from each prefix of 4 outputs to
each of 12 held-out problems. The error of values is the mean of the squared difference, divided by
the variance of the reference values.

Outcome. On the grid RLOO earns no less than PPO, as predicted, and GRPO, too, which was not; that a
step of PPO takes longer is not seen. On countdown PPO learns late, and VAPO does not beat DAPO, as
predicted; leaving out any one of its parts costs less than 0.05, even the lambda by length. The
reward model's start errs less than a head of 0, against the prediction, and less than the base on
average. From random weights a critic is behind for ten batches only, which was predicted wrongly.
"""
import dataclasses
import functools

import numpy
import torch
from torch import nn

import ppo
from lab.draw import BLUE, GREEN, GREY, ORANGE, RED, SKY, curves
from lab.experiment import Experiment, numbers
from lab.tokens import rewards_after
from lab.training import load_base
from lab.verdict import OURS, Claim
from tasks import preferences

AHMADIAN = "[Ahmadian and others](https://arxiv.org/abs/2402.14740)"
DEEPSEEK = "[DeepSeekMath](https://arxiv.org/abs/2402.03300)"
VAPO = "[VAPO](https://arxiv.org/abs/2504.05118)"
VC_PPO = "[VC-PPO](https://arxiv.org/abs/2503.01491)"
INSTRUCT = "[InstructGPT](https://arxiv.org/abs/2203.02155)"
SAME = "--stop_at 2 --num_eval_problems 1 --num_eval_samples 1 --eval_steps 1000"
GRID = f"--task gridworld {SAME} --num_prompts 16 --max_steps 24"
MOVES = {"RLOO": f"reinforce.py {GRID} --view token --baseline rloo",
         "GRPO": f"grpo.py {GRID}", "PPO": f"ppo.py {GRID}"}
COUNTDOWN = f"--task countdown:3 {SAME} --num_prompts 8 --max_steps 16"
WHOLE = (f"ppo.py {COUNTDOWN} --epsilon_high 0.28 --nll_coef 0.1 --length_adaptive --critic_lam 1 "
         "--critic_pretrain_steps 10")
SEARCHES = {"DAPO": f"grpo.py {COUNTDOWN} --loss_type dapo", "PPO": f"ppo.py {COUNTDOWN}",
            "VAPO": WHOLE,
            "VAPO without its pretraining": f"{WHOLE} --critic_pretrain_steps 0",
            "VAPO without its critic's lambda": f"{WHOLE} --critic_lam 0.95",
            "VAPO without its lambda by length": f"{WHOLE} --no-length_adaptive"}
BATCHES = 30
PROBLEMS, GROUP, ROLLOUTS = 12, 4, 64
AT_END = 5                              # the last errors of a critic, whose mean is its last error
BASE = "base"
RANDOM = "random weights"
REWARD = "reward model"
GAIN = 0.05                             # of a reward, what counts as one
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5))
EXPERIMENT.runs("grid", MOVES, ["reward", "step_time"])
EXPERIMENT.runs("countdown", SEARCHES, ["reward"])


class FromRewards(ppo.Critic):
    """ppo.py's critic with the body, the head and the bias of a reward model."""

    def __init__(self, model):
        super().__init__(model.gpt)
        self.head.data.copy_(model.head.weight[0])
        self.bias = nn.Parameter(model.head.bias.detach().clone())

    def forward(self, prompts, completions):
        return super().forward(prompts, completions) + self.bias


def train(critic, batches, cfg, look):
    """What look(critic) says before the first batch and after each. -> list"""
    optimizer = torch.optim.Adam(critic.parameters(), lr=cfg.critic_learning_rate)
    seen = [look(critic)]
    for step, batch in enumerate(batches):
        with torch.no_grad():
            batch.values = critic(batch.prompts, batch.tokens) * batch.mask
        returns = batch.rewards.view(-1, 1) * batch.mask        # the reward at the end
        ppo.fit_critic(critic, optimizer, batch, returns, cfg, "shuffle", step)
        seen.append(look(critic))
    return seen


def reference_values(policy, task, cfg, batch):
    """V before each token, by rollouts. -> (B, T)"""
    found = torch.zeros(batch.mask.shape)
    for t in range(int(batch.lengths.max())):
        rows, rewards = rewards_after(policy, task, cfg, batch, t, ROLLOUTS)
        found[rows, t] = rewards.mean(dim=1)
    return found


def error(values, reference, mask):
    """The mean squared difference as a share of the variance of the reference. -> float"""
    wanted = reference[mask > 0]
    difference = values[mask > 0] - wanted
    return (difference.square().mean() / wanted.var(correction=0)).item()


@EXPERIMENT.measure(["arithmetic"])
def starts(seed, case):
    """The errors of each critic as it learns, and by how much the reward model exceeds the values
    of unfinished outputs and the rewards of whole ones."""
    cfg, task, policy = load_base(ppo, f"--base_steps 450 --seed {seed}")
    sample = functools.partial(ppo.sample_batch, policy, task, cfg)
    batches = [sample(f"critic {step}") for step in range(BATCHES)]
    model = preferences.RewardModel(policy)
    preferences.fit(model, sample, seed)
    asking = dataclasses.replace(cfg, num_prompts=PROBLEMS, num_generations=GROUP)
    held = ppo.sample_batch(policy, task, asking, "held out", "test")
    reference = reference_values(policy, task, asking, held)

    @torch.no_grad()
    def look(critic):
        return error(critic(held.prompts, held.tokens), reference, held.mask)

    random = ppo.GPT(dataclasses.replace(cfg, base_seed=1 + cfg.seed))
    critics = {BASE: ppo.Critic(policy), RANDOM: ppo.Critic(random), REWARD: FromRewards(model)}
    with torch.no_grad():
        excess = critics[REWARD](held.prompts, held.tokens) - reference
    found = {"unfinished": excess[held.mask > 0].mean().item(),
             "whole": (model.rewards(held) - held.rewards).mean().item()}
    return found | {name: train(critic, batches, cfg, look) for name, critic in critics.items()}


def page(grid, countdown, starts):
    mean = {name: found["reward"].mean(axis=1) for name, found in grid.items()}
    a_step = {name: numpy.median(found["step_time"], axis=1) for name, found in grid.items()}
    last = {name: found["reward"][:, -5:].mean(axis=1) for name, found in countdown.items()}
    said = ", ".join(f"{name} {last[name].mean():.2f}" for name in ("VAPO", "DAPO", "PPO"))
    wins = Claim("on countdown, VAPO ends with a higher reward than DAPO", VAPO,
                 last["VAPO"] - last["DAPO"], at_least=GAIN, unit="reward",
                 shown=f"VAPO, with a critic, earns more than DAPO, without: {said}",
                 contradicted=f"VAPO, with a critic, earns no more than DAPO, without: {said}",
                 undecided=f"Rewards at the end on countdown: {said}")
    yield wins
    for name in list(SEARCHES)[1:]:
        if name != "VAPO":
            yield Claim(f"on countdown, VAPO ends with a higher reward than {name}", VAPO,
                        last["VAPO"] - last[name], at_least=GAIN, unit="reward")
    for name, source in (("RLOO", AHMADIAN), ("GRPO", DEEPSEEK)):
        yield Claim(f"on the grid, {name} has as high a mean reward as PPO, or higher", source,
                    mean[name] - mean["PPO"], at_least=-GAIN, unit="reward")
    yield Claim("a step of PPO takes more seconds than one of RLOO", AHMADIAN,
                a_step["PPO"] / a_step["RLOO"], at_least=1.2, times=True)

    [found] = starts.values()
    errors = {name: {"first": found[name][:, 0], "mean": found[name].mean(axis=1),
                     "last": found[name][:, -AT_END:].mean(axis=1)}
              for name in (BASE, RANDOM, REWARD)}
    yield Claim("a critic that starts from the reward model errs less than one from the base, on "
                "average over all batches", INSTRUCT,
                errors[REWARD]["mean"] / errors[BASE]["mean"], at_most=0.9, times=True)
    yield Claim("untrained, a critic from the reward model errs less than one saying 0", INSTRUCT,
                errors[REWARD]["first"] / errors[BASE]["first"], at_most=0.9, times=True)
    yield Claim("compared with their values, the reward model rates unfinished outputs lower than "
                "whole ones", VC_PPO, found["unfinished"] - found["whole"], at_most=-GAIN)
    yield Claim("a critic from the reward model errs less in the end than untrained", VC_PPO,
                errors[REWARD]["last"] / errors[REWARD]["first"], at_most=0.8, times=True)
    yield Claim("in the end, a critic from random weights errs more than one from the base", OURS,
                errors[RANDOM]["last"] / errors[BASE]["last"], at_least=1.1, times=True)

    yield curves({name: columns["reward"] for name, columns in countdown.items()}, wins.finding,
                 ylabel="reward on countdown",
                 given=dict(zip(SEARCHES, (BLUE, RED, GREEN, GREY, SKY, ORANGE))))
    ends = {name: columns["last"].mean() for name, columns in errors.items()}
    yield curves({name: found[name] for name in errors}, "Error of a critic in the end: started "
                 f"from the base {ends[BASE]:.2f}, from a reward model {ends[REWARD]:.2f}, "
                 f"from random weights {ends[RANDOM]:.2f}", x=range(1 + BATCHES), yscale="log",
                 given={BASE: BLUE, RANDOM: GREY, REWARD: RED}, ylabel="squared error / variance",
                 xlabel="batches that the critic learned from")
    yield numbers({name: {"mean": mean[name], "a step": a_step[name]} for name in MOVES},
                  {"mean": "mean reward", "a step": "seconds a step"}, by="grid")
    yield numbers({name: {"last": last[name]} for name in SEARCHES},
                  {"last": "reward of the last 5 batches"}, by="countdown")
    yield numbers(errors, {"first": "error at first", "mean": "mean of all batches",
                           "last": f"of the last {AT_END}"}, by="critic starts from")
