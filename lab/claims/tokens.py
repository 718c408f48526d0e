"""Credit in language: which token of an answer deserves it

Claim. Few tokens decide: a fifth of them, those of high entropy, are forks, and learning from these
alone does as well (Wang and others, 2506.01939). By advantages, not by entropy, that is our claim,
and no test of theirs. GRPO gives its advantage to all tokens alike.
Values from K rollouts of the policy from each prefix find the forks, a critic finds them less well
(VinePPO, Kazemnejad and others, 2410.01679).

Prediction. More than half of all |A| falls on a tenth of the tokens: the first, which decides about
thinking, and those of a wrong step. One advantage for all tokens correlates with theirs by less
than 0.2; that of eight rollouts by more than 0.7, as the chance to be right moves by more than its
noise at few tokens only. The critic knows whether an answer is a guess from its second token on,
and does better than one rollout, worse than eight.

Method. A base of arithmetic after 450 of 900 batches, whose thoughts are right four times in five.
From each prefix of each of 8 answers to 5 problems, 272 rollouts: 256 stand for the value itself,
and of the other 16 the first K estimate it. The critic is that of ppo.py, after 60 batches of 256
answers of the same policy. Advantages by rollouts and by "critic, lambda 0" are the differences of
successive values. Only |A| is looked at, not entropy, by which Wang and others find the forks.

Outcome. Right: few tokens have most of |A|, and the critic does better than one rollout. Wrong: one
advantage for all tokens correlates by 0.27. Whether the critic is worse than eight is undecided.
"""
import dataclasses

import torch

import common
import grpo
import ppo
from lab.draw import BLUE, GREY, curves, dots
from lab.experiment import Experiment
from lab.training import continued, load_base
from lab.verdict import OURS, Claim

VINE = "[VinePPO](https://arxiv.org/abs/2410.01679)"
PROBLEMS, GROUP = 5, 8
ROLLOUTS = (1, 2, 4, 8, 16)
NUM_REFERENCE = 256
BATCHES = 60                            # that the critic learns from
ROWS = 1024                             # completed at a time
WHOLE = "whole answer (GRPO)"
EIGHT = "rollouts, K = 8"
CRITIC = "critic, lambda 0"
SMOOTH = "critic, lambda 0.95"
NAMES = (WHOLE, *(f"rollouts, K = {K}" for K in ROLLOUTS), CRITIC, SMOOTH)
FORKS = 0.1                             # the share of tokens that is asked about
GAIN = 0.05                             # of a correlation, what counts as one
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5), one_base=True)


# ---- the value of a prefix -------------------------------------------------------------------

def rollout_rewards(policy, task, cfg, problems, prompts, prefixes, name):
    """Complete a prefix (n, t) of a completion of each prompt (n, W). -> rewards (n,)"""
    T = cfg.max_completion_length - prefixes.shape[1]
    rest = dataclasses.replace(cfg, max_completion_length=T)
    uniforms = torch.rand(len(prompts), T, generator=common.generator(cfg.seed, name))
    *_, texts = continued(ppo, policy, rest, problems, prompts, prefixes, uniforms)
    return torch.tensor([task.verify(problem, text) for problem, text in zip(problems, texts)])


def rewards_after(policy, task, cfg, batch, t, number):
    """The rewards of so many rollouts from the first t tokens of each completion that has more.
    -> rows (n,), rewards (n, number)"""
    rows = (batch.lengths > t).nonzero()[:, 0]
    repeated = rows.repeat_interleave(number)
    found = []
    for part in repeated.split(ROWS):
        problems = [batch.problems[row] for row in part.tolist()]
        name = ("prefix", t, len(found))
        found.append(rollout_rewards(policy, task, cfg, problems, batch.prompts[part],
                                     batch.tokens[part, :t], name))
    return rows, torch.cat(found).view(-1, number)


def rollout_values(policy, task, cfg, batch):
    """V of each token, before it is written: by the reference rollouts, and by the first K of the
    others. -> (B, T), {name: (B, T)}"""
    reference = torch.zeros(batch.mask.shape)
    estimates = {f"rollouts, K = {K}": torch.zeros(batch.mask.shape) for K in ROLLOUTS}
    for t in range(int(batch.lengths.max())):
        rows, rewards = rewards_after(
            policy, task, cfg, batch, t, max(ROLLOUTS) + NUM_REFERENCE)
        reference[rows, t] = rewards[:, max(ROLLOUTS):].mean(dim=1)
        for K, values in zip(ROLLOUTS, estimates.values()):
            values[rows, t] = rewards[:, :K].mean(dim=1)
    return reference, estimates


# ---- all estimates, which lab/claims/credit.py compares, too ---------------------------------

def train_critic(policy, task, cfg, sample):
    """ppo.py's critic learns from BATCHES batches, sample(step), of a policy that does not learn.
    -> ppo.Critic, the batches with the values that it had for them before it learned from them"""
    critic = ppo.Critic(policy)
    optimizer = torch.optim.Adam(critic.parameters(), lr=cfg.critic_learning_rate)
    batches = []
    for step in range(BATCHES):
        batch = sample(step)
        batch.values = critic(batch.prompts, batch.tokens).detach() * batch.mask
        rewards = task.token_rewards(batch)
        _, returns = ppo.gae(rewards, batch.values, batch.mask, cfg.gamma, cfg.lam)
        ppo.fit_critic(critic, optimizer, batch, returns, cfg, "shuffle", step)
        batches.append(batch)
    return critic, batches


def correlations(batch, rewards, values, exact, whole=WHOLE):
    """Of the advantages by {name: values (B, T)}, by the last of them, a critic's, with another
    lambda, and by grpo.py, the correlation with the exact ones. -> dict"""
    A = {name: ppo.gae(rewards, V, batch.mask, 1.0, 0.0)[0] for name, V in values.items()}
    A[SMOOTH], _ = ppo.gae(rewards, [*values.values()][-1], batch.mask, 1.0, 0.95)
    A[whole] = grpo.advantages(batch.rewards).view(-1, 1).expand_as(batch.mask)
    found = {}
    for name, estimate in A.items():
        pair = torch.stack([estimate, exact])[:, batch.mask > 0]
        found[name] = torch.corrcoef(pair)[0, 1].item()
    return found


@EXPERIMENT.measure(["answers"])
def credit(seed, case):
    """The sizes of the advantages of tokens, and for each way to estimate them, the correlation."""
    cfg, task, policy = load_base(ppo, f"--base_steps 450 --seed {seed}")
    critic, _ = train_critic(policy, task, cfg, lambda step: ppo.sample_batch(
        policy, task, cfg, step))
    asking = dataclasses.replace(cfg, num_prompts=PROBLEMS, num_generations=GROUP)
    batch = ppo.sample_batch(policy, task, asking, "credit")
    reference, values = rollout_values(policy, task, asking, batch)
    values[CRITIC] = critic(batch.prompts, batch.tokens).detach() * batch.mask
    rewards = task.token_rewards(batch)
    exact, _ = ppo.gae(rewards, reference, batch.mask, 1.0, 0.0)
    sizes = exact[batch.mask > 0].abs().sort(descending=True).values
    places = torch.linspace(0, len(sizes) - 1, 101, dtype=float).round().long()
    shares = sizes.cumsum(0)[places] / sizes.sum()      # of the tokens with most of it
    return {"shares": shares.tolist()} | correlations(batch, rewards, values, exact)


def page(credit):
    [found] = credit.values()
    at_forks = found["shares"][:, round(100 * FORKS)]
    forks = Claim(f"{FORKS:.0%} of the tokens have more than half of all absolute advantage", OURS,
                  at_forks, at_least=0.5, shown=f"Few tokens decide: {FORKS:.0%} of them have "
                  f"{at_forks.mean():.0%} of all absolute advantage; GRPO gives all the same")
    yield forks
    for one, other in ((EIGHT, WHOLE), (EIGHT, CRITIC), (CRITIC, WHOLE)):
        yield Claim(f"correlation with the advantages of tokens: {one} above {other}", VINE,
                    found[one] - found[other], at_least=GAIN)
    places = [place / 100 for place in range(101)]
    yield curves({"measured": found["shares"], "if all alike": [places]}, forks.finding, x=places,
                 given={"measured": BLUE, "if all alike": GREY}, ylabel="share of the sum of |A|",
                 xlabel="share of the tokens, those with most |A| first")
    yield dots({name: found[name] for name in NAMES}, "Correlation with the advantages from "
               f"{NUM_REFERENCE} rollouts: from eight {found[EIGHT].mean():.2f}, from a critic "
               f"{found[CRITIC].mean():.2f}, GRPO's {found[WHOLE].mean():.2f}",
               given={WHOLE: GREY}, xlabel="correlation; a dot for each seed")
