"""Credit: which move of a walk, and which token of an answer, deserves the reward"""
import dataclasses
import functools
import itertools
import random
from bisect import bisect_left, bisect_right
from types import SimpleNamespace

import torch

import common
import grpo
import ppo
from lab.bench import OURS, Claim, numbers
from lab.training import load_base, rewards_after, train_critic, training
from report import chart
from tasks import gridworld
from tasks.scores import STEP

SEEDS, CASES = range(12), ["walks", "answers"]
CHECK = "ppo.py --task gridworld"
ROLLOUTS = (1, 2, 4, 8, 16)
EIGHT, CRITIC, GAE = "rollouts, K = 8", "critic", "critic, lambda 0.95"
SHOWN = ("GRPO", "rollouts, K = 1", EIGHT, CRITIC, GAE)
STEPS = 20                              # of grpo.py, before the tokens are judged
PROBLEMS = 5                            # whose tokens are judged, in 8 answers to each
BEFORE, WRONG, AFTER = KINDS = ("right steps", "first wrong step", "steps after it")
EXACT = "exact"
NUM_REFERENCE = 256                     # rollouts whose mean takes the place of the exact value
BATCHES = 60                            # number of batches that the critic learns from
GAIN = 0.05                             # smallest difference of two correlations that matters


def step_advantages(rewards, values, mask):
    """Compute r + V' - V at each step, where V' is the next value. (B, T) each -> (B, T)"""
    return ppo.gae(rewards, values, mask, 1.0, 0.0)[0]


def estimates(batch, returns, critic, rewards):
    """Estimate the advantages at each step: from values V that are, for each K, the mean of the
    first K of the returns; from a critic's; and those of grpo.py. returns: (B, T, number).
    -> {name: (B, T)}"""
    V = {f"rollouts, K = {K}": returns[..., :K].mean(dim=-1) for K in ROLLOUTS}
    V[CRITIC] = critic(batch.prompts, batch.tokens).detach() * batch.mask
    A = {name: step_advantages(rewards, values, batch.mask) for name, values in V.items()}
    A[GAE], _ = ppo.gae(rewards, V[CRITIC], batch.mask, 1.0, ppo.Config.lam)
    A["GRPO"] = grpo.advantages(batch.rewards).view(-1, 1).expand_as(batch.mask)
    return A


def correlation(one, other):
    return torch.corrcoef(torch.stack([one, other]))[0, 1].item()


@functools.cache
def half_skilled(prompt):
    """Make a policy for a prompt that chooses the best move half of the time, and else any one.
    -> a function policy(t, cell) -> {move: probability}"""
    _, Q = gridworld.values(prompt)

    def policy(t, cell):
        best = max(Q[t][cell], key=Q[t][cell].get)
        return {move: 0.5 / len(Q[t][cell]) + 0.5 * (move == best) for move in Q[t][cell]}
    return policy


def walk(prompt, t, cell, rng):
    """Let the policy walk on from a cell, after t moves. -> list of (cell, move, reward)"""
    name, _, limit = prompt.split()
    policy = half_skilled(prompt)
    steps = []
    while t < int(limit) and gridworld.MAPS[name][cell] not in gridworld.PRIZES:
        probs = policy(t, cell)
        [move] = rng.choices([*probs], probs.values())
        end, reward = gridworld.outcome(name, cell, move)
        steps.append((cell, move, reward))
        cell = end
        t += 1
    return steps


def make_batch(task, cfg, step):
    """Sample G walks for each of P problems, encode them for the critic, and compute their exact
    values V. A row of `steps` is a list of (cell, move, reward). -> namespace"""
    problems = common.sample_problems(task, cfg.num_prompts, (cfg.seed, step))
    problems = [problem for problem in problems for _ in range(cfg.num_generations)]
    rng = random.Random(f"{cfg.seed} {step}")
    walks = [walk(one.prompt, 0, one.prompt.split()[1], rng) for one in problems]
    tokens = torch.full((len(walks), max(gridworld.LIMITS)), ppo.PAD)
    mask, rewards, V = torch.zeros(3, *tokens.shape)
    for row, (problem, steps) in enumerate(zip(problems, walks)):
        exact, _ = gridworld.values(problem.prompt, half_skilled(problem.prompt))
        for t, (cell, move, reward) in enumerate(steps):
            tokens[row, t] = ord(move)
            mask[row, t], rewards[row, t], V[row, t] = 1, reward, exact[t][cell]
    return SimpleNamespace(
        problems=problems, steps=walks, prompts=ppo.encode_prompts(problems, task, "cpu"),
        tokens=tokens, mask=mask, lengths=mask.sum(dim=1).long(), token_rewards=rewards, V=V,
        rewards=rewards.sum(dim=1).view(-1, cfg.num_generations))


def of_moves(seed):
    """Correlate the advantages of each estimate with the exact ones."""
    cfg, task, policy = load_base(ppo, f"--task gridworld --seed {seed} --base_seed {seed}")
    task.token_rewards = lambda batch: batch.token_rewards
    *batches, batch = (make_batch(task, cfg, step) for step in range(1 + BATCHES))
    critic = train_critic(policy, task, cfg, batches)
    returns = torch.zeros(*batch.mask.shape, max(ROLLOUTS))
    rng = random.Random(seed)
    for row, (problem, steps) in enumerate(zip(batch.problems, batch.steps)):
        for t, (cell, _, _) in enumerate(steps):
            for number in range(max(ROLLOUTS)):
                onward = walk(problem.prompt, t, cell, rng)
                returns[row, t, number] = sum(reward for *_, reward in onward)
    is_move = batch.mask > 0
    exact = step_advantages(batch.token_rewards, batch.V, batch.mask)[is_move]
    return {name: correlation(A[is_move], exact)
            for name, A in estimates(batch, returns, critic, batch.token_rewards).items()}


def steps_of(batch):
    """Find the steps of the thoughts, such as 3+4=7. A thought has a first wrong result, or none.
    -> list of (row, slice of its tokens, which of KINDS)"""
    found = []
    for row, ids in enumerate(batch.tokens.tolist()):
        texts = ["" if i in (ppo.EOS, ppo.PAD) else ppo.decode([i]) for i in ids]
        ends = [*itertools.accumulate(map(len, texts))]
        kind = BEFORE
        for match in STEP.finditer("".join(texts)):
            name, result = match.groups()
            operator = name.strip("0123456789")
            a, b = map(int, name.split(operator))
            if kind == WRONG:
                kind = AFTER
            elif kind == BEFORE and result != str(common.OPERATIONS[operator](a, b)):
                kind = WRONG
            tokens = slice(bisect_right(ends, match.start()), bisect_left(ends, match.end()) + 1)
            found.append((row, tokens, kind))
    return found


def gradient(policy, batch, A, rows, cfg):
    """Compute the gradient of the sum of A log pi over the tokens of some rows. A: (B, T)
    -> (number of weights,)"""
    logps, _ = ppo.score(policy, batch.prompts[rows], batch.tokens[rows], cfg.temperature)
    total = (A[rows] * logps)[batch.mask[rows] > 0].sum()
    return torch.cat([one.flatten() for one in torch.autograd.grad(total, policy.parameters())])


def of_gradients(policy, batch, A, exact, cfg):
    """Compare advantages {name: (B, T)} with the exact ones by their gradients: which part of the
    lengths of the steps' gradients each of KINDS has; the cosine of the whole gradients; and the
    correlation of the means of the steps. -> dict"""
    steps = steps_of(batch)

    def length(one, row, tokens):
        of_step = torch.zeros_like(one)
        of_step[row, tokens] = one[row, tokens]
        return gradient(policy, batch, of_step, [row], cfg).norm().item()

    def whole(one):
        return gradient(policy, batch, one, slice(None), cfg)

    def means(one):
        return torch.stack([one[row, tokens].mean() for row, tokens, _ in steps])
    columns = {"wrong thoughts": sum(kind == WRONG for *_, kind in steps)}
    for name, one in [(EXACT, exact), *A.items()]:
        lengths = {kind: sum(length(one, row, tokens) for row, tokens, which in steps
                             if which == kind) for kind in KINDS}
        columns |= {f"{name}: {kind}": lengths[kind] / sum(lengths.values()) for kind in KINDS}
        if name != EXACT:
            cosine = torch.cosine_similarity(whole(one), whole(exact), dim=0).item()
            columns |= {f"{name}: cosine": cosine,
                        f"{name}: steps": correlation(means(one), means(exact))}
    return columns


def of_tokens(seed):
    """Train grpo.py for STEPS steps. Then measure the fraction of the total |A| that a tenth of the
    tokens has, and compare the advantages of each estimate, and their gradients, with those from
    many other rollouts, the reference."""
    flags = f"--seed {seed} --base_seed {seed}"
    cfg, task, policy = load_base(ppo, flags)
    for _ in itertools.islice(training(load_base(grpo, flags)[0], task, policy), STEPS):
        pass
    critic = train_critic(policy, task, cfg, (
        ppo.sample_batch(policy, task, cfg, f"critic {step}") for step in range(BATCHES)))
    cfg = dataclasses.replace(cfg, num_prompts=PROBLEMS, num_generations=8)
    batch = ppo.sample_batch(policy, task, cfg, "credit")
    returns = torch.zeros(*batch.mask.shape, max(ROLLOUTS) + NUM_REFERENCE)
    for t in range(int(batch.lengths.max())):
        rows, results = rewards_after(ppo, policy, task, cfg, batch, t, returns.shape[-1])
        returns[rows, t] = results
    rewards = task.token_rewards(batch)
    reference = returns[..., max(ROLLOUTS):].mean(dim=-1)
    exact = step_advantages(rewards, reference, batch.mask)
    is_token = batch.mask > 0
    sizes = exact[is_token].abs().sort(descending=True).values
    few = 1 + round((len(sizes) - 1) / 10)
    A = estimates(batch, returns, critic, rewards)
    return ({"share": (sizes[:few].sum() / sizes.sum()).item()}
            | {name: correlation(one[is_token], exact[is_token]) for name, one in A.items()}
            | of_gradients(policy, batch, {name: A[name] for name in SHOWN}, exact, cfg))


def measure(case, seed):
    return of_moves(seed) if case == "walks" else of_tokens(seed)


def both(columns, one, other):
    """Compare two correlations, which can be negative. -> arguments of a Claim"""
    sides = columns[one], columns[other]
    return {"effect": sides[0] - sides[1], "sides": sides, "at_least": GAIN}


def page(x):
    moves, tokens = x["walks"], x["answers"]
    yield ("GRPO gives all tokens of an answer one advantage; for the steps of thoughts, its "
           f"correlation with the exact ones is {tokens['GRPO: steps'].mean():.2f}. Yet its "
           "gradient over 40 outputs has nearly the right direction: a cosine of "
           f"{tokens['GRPO: cosine'].mean():.2f} with the exact one.")
    yield Claim("for the steps of thoughts, GRPO's advantages have a correlation of less than 0.5 "
                "with the exact ones", OURS, tokens["GRPO: steps"], at_most=0.5)
    after = [tokens[f"{name}: {AFTER}"] for name in ("GRPO", EXACT)]
    yield Claim("of the gradient of the steps of thoughts, GRPO spends at least a tenth more than "
                "the exact advantages on the steps after the first wrong result", OURS,
                tuple(after), at_least=0.1)
    for what, column in (("for the steps of thoughts, advantages from 8 rollouts correlate more "
                          "with the exact ones than GRPO's do", "steps"),
                         ("the gradient with advantages from 8 rollouts has a larger cosine with "
                          "the exact one than GRPO's", "cosine")):
        yield Claim(what, "after VinePPO",
                    **both(tokens, f"{EIGHT}: {column}", f"GRPO: {column}"))
    yield Claim("with lambda 0.95, a critic's gradient has a larger cosine with the exact one than "
                "GRPO's", OURS, **both(tokens, f"{GAE}: cosine", "GRPO: cosine"))
    yield Claim("for moves, advantages from 8 rollouts correlate more with the exact ones than a "
                "critic's do", "after VinePPO", **both(moves, EIGHT, CRITIC))
    yield Claim("the advantage of a whole walk (GRPO) has a correlation of less than 0.5 with the "
                "exact advantages of its moves", OURS, moves["GRPO"], at_most=0.5)
    yield Claim("10% of the tokens have more than half of the total absolute advantage",
                OURS, tokens["share"], at_least=0.5)
    for first, second, better, worse in (
            (EIGHT, "GRPO", "advantages from 8 rollouts", "GRPO's"),
            (EIGHT, CRITIC, "advantages from 8 rollouts", "a critic's"),
            (CRITIC, "GRPO", "a critic's advantages", "GRPO's")):
        yield Claim(f"for tokens, {better} correlate more with those from {NUM_REFERENCE} rollouts "
                    f"than {worse} do", "after VinePPO", **both(tokens, first, second))

    dots = {f"{kind}: {name}": tokens[f"{name}: {kind}"]
            for kind in KINDS for name in (EXACT, "GRPO", EIGHT)}
    yield lambda axis: chart.dots(axis, dots, xlabel="part of the gradient of all steps")
    yield numbers({name: {"moves": moves[name], "tokens": tokens[name],
                          "steps of thoughts": tokens[f"{name}: steps"],
                          "cosine of the gradient": tokens[f"{name}: cosine"]}
                   for name in SHOWN},
                  "correlation of an estimate's advantages with the exact ones", ".2f")
