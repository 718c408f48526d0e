"""Credit: which move of a walk, and which token of an answer, deserves it

Claim. The advantage of a whole answer is a poor signal for its single steps. Values from K rollouts
of the policy from where a step begins are nearer to the exact ones than those of a critic, and so
are the advantages of steps (VinePPO, Kazemnejad and others, 2410.01679). Few tokens decide: a fifth
of them, those of high entropy, are forks, and learning from these alone does as well (Wang and
others, 2506.01939). We look at advantages instead of entropy, so this tests our claim, not theirs.

Prediction. Moves: there are some four of about equal weight in a walk, so the advantage of the
whole walk correlates with that of a move by less than 0.5. The error of K rollouts is the variance
of a return divided by K. A critic has it easier here than in language, since there are but 370
prompts: at first it is worse than one rollout, after 60 steps worth about 8, so that VinePPO's
claim may not be shown. Tokens: more than half of all |A| falls on a tenth of the tokens: the first,
which decides about thinking, and those of a wrong step. One advantage for all tokens correlates
with theirs by less than 0.2; that of eight rollouts by more than 0.7, as the chance to be right
moves by more than its noise at few tokens only. The critic knows whether an answer is a guess from
its second token on, and does better than one rollout, worse than eight.

Method. Moves: grid world without slips, by a policy that makes the best move half of the time and
any move else, of which all values are known. Tokens: a base of arithmetic after 450 of 900 batches,
whose thoughts are right four times in five; from each prefix of each of 8 answers to 5 problems,
272 rollouts: 256 stand for the value itself, and of the other 16 the first K estimate it. The
critic is that of ppo.py, after 60 batches of the same policy, which does not learn meanwhile; this
helps the critic. Advantages of a step are r + V' - V, with the values of K rollouts or of the
critic; the advantage of the whole is that of grpo.py.

Outcome. Moves: right, except that before it has learned, the critic already errs less than one
rollout. Tokens: right, few of them have most of |A|, and the critic does better than one rollout.
Wrong: one advantage for all tokens correlates by 0.27. Whether the critic is worse than eight
rollouts is undecided.
"""
import dataclasses
import functools
import random
import statistics
from types import SimpleNamespace

import torch

import common
import grpo
import ppo
from lab.draw import GREY, dots
from lab.experiment import Experiment, numbers
from lab.training import continued, load_base
from lab.verdict import OURS, Claim
from tasks import gridworld

VINE = "[VinePPO](https://arxiv.org/abs/2410.01679)"
ROLLOUTS = (1, 2, 4, 8, 16)
ESTIMATES = {K: f"rollouts, K = {K}" for K in ROLLOUTS}
ONE, EIGHT = ESTIMATES[1], ESTIMATES[8]
OF_MOVES = "whole walk (GRPO)", "critic"        # the two others that are compared
OF_TOKENS = "whole answer (GRPO)", "critic, lambda 0"
SKILL = 0.5                             # how often the best move is made on purpose
PROBLEMS, GROUP = 5, 8
NUM_REFERENCE = 256
BATCHES = 60                            # that the critic learns from
ROWS = 1024                             # completed at a time
FORKS = 0.1                             # the share of tokens that is asked about
GAIN = 0.05                             # of a correlation, what counts as one
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5), one_base=True)


# ---- 1. all estimates ------------------------------------------------------------------------

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


def step_advantages(rewards, values, mask):
    """r + V' - V at each step. (B, T) each -> (B, T)"""
    return ppo.gae(rewards, values, mask, 1.0, 0.0)[0]


def correlations(batch, rewards, values, exact, whole):
    """Of the advantages by {name: values (B, T)}, and of those by grpo.py, named `whole`, the
    correlation with the exact ones. -> dict"""
    A = {name: step_advantages(rewards, V, batch.mask) for name, V in values.items()}
    A[whole] = grpo.advantages(batch.rewards).view(-1, 1).expand_as(batch.mask)
    found = {}
    for name, estimate in A.items():
        pair = torch.stack([estimate, exact])[:, batch.mask > 0]
        found[name] = torch.corrcoef(pair)[0, 1].item()
    return found


# ---- 2. moves, whose values are known --------------------------------------------------------

@functools.cache
def half_skilled(prompt):
    """A policy for a prompt: policy(t, cell) -> {move: probability}"""
    _, Q = gridworld.values(prompt)

    def policy(t, cell):
        returns = Q[t][cell]
        chances = dict.fromkeys(returns, (1 - SKILL) / len(returns))
        chances[max(returns, key=returns.get)] += SKILL
        return chances
    return policy


def walk(prompt, t, cell, rng):
    """What the policy does from a cell on, with t moves made. -> list of (cell, move, reward)"""
    name, _, limit = prompt.split()
    policy = half_skilled(prompt)
    steps = []
    while t < int(limit) and gridworld.MAPS[name][cell] not in gridworld.PRIZES:
        chances = policy(t, cell)
        [move] = rng.choices([*chances], chances.values())
        [straight, *_] = gridworld.outcomes(name, cell, move)
        steps.append((cell, move, straight.reward))
        cell = straight.cell
        t += 1
    return steps


def rollout_values(prompt, t, cell, rng):
    """The mean return of the first K of many rollouts, for each K. -> list"""
    returns = []
    for _ in range(max(ROLLOUTS)):
        returns.append(sum(reward for _, _, reward in walk(prompt, t, cell, rng)))
    return [statistics.mean(returns[:K]) for K in ROLLOUTS]


def make_batch(task, cfg, step):
    """Walks, G of each of P problems, as the critic reads them, and their exact values. The rows of
    `steps` are lists of (cell, move, reward). -> namespace"""
    problems = common.sample_problems(task, cfg.num_prompts, (cfg.seed, step))
    problems = [problem for problem in problems for _ in range(cfg.num_generations)]
    texts = [problem.prompt for problem in problems]
    rng = random.Random(f"{cfg.seed} {step}")
    walks = [walk(text, 0, text.split()[1], rng) for text in texts]
    T = max(gridworld.LIMITS)
    tokens = torch.full((len(walks), T), ppo.PAD)
    numbers = torch.zeros(3, len(walks), T)
    for row, (text, steps) in enumerate(zip(texts, walks)):
        exact, _ = gridworld.values(text, 0.0, half_skilled(text))
        for t, (cell, move, reward) in enumerate(steps):
            tokens[row, t] = ord(move)
            numbers[:, row, t] = torch.tensor([1, reward, exact[t][cell]])
    mask, rewards, V = numbers
    return SimpleNamespace(
        texts=texts, steps=walks, prompts=ppo.encode_prompts(problems, task, "cpu"), tokens=tokens,
        mask=mask, lengths=mask.sum(dim=1).long(), token_rewards=rewards, V=V,
        rewards=rewards.sum(dim=1).view(-1, cfg.num_generations))


def value_error(values, batch):
    """The mean squared error of values, as a share of the variance of the exact ones. -> float"""
    is_step = batch.mask > 0
    errors = (values - batch.V)[is_step]
    return (errors.square().mean() / batch.V[is_step].var()).item()


@EXPERIMENT.measure(["walks"])
def estimates(seed, case):
    """The error of the critic as it learns; for each way to estimate, the error of values, and the
    correlation of advantages."""
    cfg, task, policy = load_base(ppo, f"--task gridworld --seed {seed}")
    task.token_rewards = lambda batch: batch.token_rewards
    critic, batches = train_critic(policy, task, cfg, lambda step: make_batch(task, cfg, step))
    batch = make_batch(task, cfg, BATCHES)
    by_rollouts = torch.zeros(len(ROLLOUTS), *batch.mask.shape)
    rng = random.Random(seed)
    for row, (text, steps) in enumerate(zip(batch.texts, batch.steps)):
        for t, (cell, _, _) in enumerate(steps):
            by_rollouts[:, row, t] = torch.tensor(rollout_values(text, t, cell, rng))
    whole, by_critic = OF_MOVES
    values = dict(zip(ESTIMATES.values(), by_rollouts))
    values[by_critic] = critic(batch.prompts, batch.tokens).detach() * batch.mask
    found = {f"error: {name}": value_error(V, batch) for name, V in values.items()}
    found["learning"] = [value_error(one.values, one) for one in batches]
    exact = step_advantages(batch.token_rewards, batch.V, batch.mask)
    return found | correlations(batch, batch.token_rewards, values, exact, whole)


# ---- 3. tokens, whose values many rollouts tell ----------------------------------------------

def rewards_after(policy, task, cfg, batch, t, number):
    """The rewards of so many rollouts from the first t tokens of each completion that has more.
    -> rows (n,), rewards (n, number)"""
    rows = (batch.lengths > t).nonzero()[:, 0]
    T = cfg.max_completion_length - t
    rest = dataclasses.replace(cfg, max_completion_length=T)
    found = []
    for place, part in enumerate(rows.repeat_interleave(number).split(ROWS)):
        problems = [batch.problems[row] for row in part.tolist()]
        generator = common.generator(cfg.seed, ("prefix", t, place))
        uniforms = torch.rand(len(part), T, generator=generator)
        *_, texts = continued(
            ppo, policy, rest, problems, batch.prompts[part], batch.tokens[part, :t], uniforms)
        found += [task.verify(problem, text) for problem, text in zip(problems, texts)]
    return rows, torch.tensor(found).view(-1, number)


def prefix_values(policy, task, cfg, batch):
    """V of each token, before it is written: by the reference rollouts, and by the first K of the
    others. -> (B, T), {name: (B, T)}"""
    reference, *rest = torch.zeros(1 + len(ROLLOUTS), *batch.mask.shape)
    found = dict(zip(ESTIMATES.values(), rest))
    for t in range(int(batch.lengths.max())):
        rows, rewards = rewards_after(
            policy, task, cfg, batch, t, max(ROLLOUTS) + NUM_REFERENCE)
        reference[rows, t] = rewards[:, max(ROLLOUTS):].mean(dim=1)
        for K, name in ESTIMATES.items():
            found[name][rows, t] = rewards[:, :K].mean(dim=1)
    return reference, found


@EXPERIMENT.measure(["answers"])
def credit(seed, case):
    """The sizes of the advantages of tokens, and for each way to estimate them, the correlation."""
    cfg, task, policy = load_base(ppo, f"--base_steps 450 --seed {seed}")
    critic, _ = train_critic(policy, task, cfg, lambda step: ppo.sample_batch(
        policy, task, cfg, step))
    asking = dataclasses.replace(cfg, num_prompts=PROBLEMS, num_generations=GROUP)
    batch = ppo.sample_batch(policy, task, asking, "credit")
    reference, values = prefix_values(policy, task, asking, batch)
    whole, by_critic = OF_TOKENS
    values[by_critic] = critic(batch.prompts, batch.tokens).detach() * batch.mask
    rewards = task.token_rewards(batch)
    exact = step_advantages(rewards, reference, batch.mask)
    sizes = exact[batch.mask > 0].abs().sort(descending=True).values
    places = torch.linspace(0, len(sizes) - 1, 101, dtype=float).round().long()
    shares = sizes.cumsum(0)[places] / sizes.sum()      # of the tokens with most of it
    return {"shares": shares.tolist()} | correlations(batch, rewards, values, exact, whole)


# ---- 4. what was found -----------------------------------------------------------------------

def page(estimates, credit):
    [moves] = estimates.values()
    [tokens] = credit.values()
    whole, critic = OF_MOVES
    said = ("Advantages of single moves: VinePPO's (8 rollouts) correlate with the exact ones by "
            f"{moves[EIGHT].mean():.2f}, a critic's by {moves[critic].mean():.2f}, GRPO's by "
            f"{moves[whole].mean():.2f}")
    yield Claim("advantages by 8 rollouts correlate with the exact ones more than a critic's", VINE,
                moves[EIGHT] - moves[critic], at_least=GAIN, shown=said, contradicted=said,
                undecided=said)
    yield Claim("values by 8 rollouts have a smaller squared error than the critic's", VINE,
                moves[f"error: {EIGHT}"] / moves[f"error: {critic}"], at_most=0.8, times=True)
    yield Claim("GRPO's advantage of the whole walk correlates with the exact ones by less than .5",
                OURS, moves[whole], at_most=0.5)
    at_forks = tokens["shares"][:, round(100 * FORKS)]
    yield Claim(f"{FORKS:.0%} of the tokens have more than half of all absolute advantage", OURS,
                at_forks, at_least=0.5, shown=f"Few tokens decide: {FORKS:.0%} of them have "
                f"{at_forks.mean():.0%} of all absolute advantage; GRPO gives all the same")
    of_answer, of_critic = OF_TOKENS
    for one, other in ((EIGHT, of_answer), (EIGHT, of_critic), (of_critic, of_answer)):
        yield Claim(f"correlation with the advantages of tokens: {one} above {other}", VINE,
                    tokens[one] - tokens[other], at_least=GAIN)

    rows = {f"{step}: {name}": found[name]
            for step, found, others in (("move", moves, OF_MOVES), ("token", tokens, OF_TOKENS))
            for name in (others[0], ONE, EIGHT, others[1])}
    yield dots(rows, said, given={name: GREY for name in rows if "GRPO" in name},
               xlabel="correlation with the exact advantage; for tokens, with that from "
               f"{NUM_REFERENCE} rollouts; a dot for each seed")
    errors = {name: {"error": moves[f"error: {name}"]} for name in (*ESTIMATES.values(), critic)}
    errors["critic, before it has learned"] = {"error": moves["learning"][:, 0]}
    yield numbers(errors, {"error": "squared error / variance of V"}, ".2f", by="values of moves")
