"""Our equations beside the code of TRL, verl and others, on the same random numbers: make conform.

A row of the table names a function of ours, or the update of a whole script, and one of theirs, as
"NAME: flag=value, ...", by which they are called, too: OURS and PEERS have the names. Both get the
same Cases, in float64, and should return the same value with the same gradient. A row where they do
not has a sentence, and where it can be shown, `but`: ours with that one thing done as they do it,
which has to agree. tools/peers.py asks the libraries. Writes the tables of docs/conformance.md, and
docs/conformance.json, where tests/test_conform.py finds what they answered.
"""
import argparse
import ast
import copy
import dataclasses
import functools
import importlib
import re
import tempfile
from pathlib import Path
from unittest import mock

import torch
from tqdm import tqdm

import common
import dpo
import grpo
import gspo
import ppo
import reinforce
from tools import export, observers, scores, start
from tools.runs import put, record, table

lag = importlib.import_module("examples.lag")

P, G, T, V = 3, 4, 5, 7
B = P * G
SAME = 1e-6             # verl adds 1e-8 to counts, which shows where terms cancel
NUM_DRAWS = 50
RECORDED = (0, 1)       # the draws whose answers tests know


# ---- 1. what is drawn ------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Case:
    """Completions as a batch has them. Slots that are not the policy's hold anything."""
    mask: torch.Tensor          # (B, T)
    slots: torch.Tensor         # (B, T)  the mask without the holes that an environment leaves
    lengths: torch.Tensor       # (B,)    slots used
    is_truncated: torch.Tensor  # (B,)
    rewards: torch.Tensor       # (P, G)
    logps: torch.Tensor         # (B, T)  of pi
    old_logps: torch.Tensor     # (B, T)  of pi_old
    ref_logps: torch.Tensor     # (B, T)  of pi_ref
    mu_logps: torch.Tensor      # (B, T)  of mu, which sampled
    entropy: torch.Tensor       # (B, T)
    values: torch.Tensor        # (B, T)
    old_values: torch.Tensor    # (B, T)
    losses: torch.Tensor        # (B, T)
    logits: torch.Tensor        # (B, T, V)
    tokens: torch.Tensor        # (B, T)


def draw(seed):
    """Lengths from one token to all, a group without signal, ratios far from 1; binary rewards or
    others; holes in every second draw. -> Case"""
    generator = torch.Generator().manual_seed(seed)
    normal = functools.partial(torch.randn, generator=generator)
    uniform = functools.partial(torch.rand, generator=generator)
    lengths = torch.randint(1, T + 1, (B,), generator=generator)
    lengths[:2] = torch.tensor([1, T])
    place = torch.arange(T)
    slots = (place < lengths[:, None]).double()
    can_be_hole = (place > 0) & (place != lengths[:, None] - 1)
    is_hole = can_be_hole & (uniform(B, T) < 0.3 * (seed % 2))
    mask = slots * ~is_hole
    rewards = (uniform(P, G) < 0.5).double() if seed % 3 else uniform(P, G)
    rewards[0] = rewards[0, 0]

    def near(logps, spread):
        far = 3 * normal(B, T) * (uniform(B, T) < 0.1)
        rubbish = -40 * uniform(B, T)
        moved = logps + spread * normal(B, T) + far
        return torch.where(mask > 0, moved, rubbish).clamp(max=0)

    old = -3 * uniform(B, T)
    drawn = Case(
        mask, slots, lengths, uniform(B) < 0.4, rewards, near(old, 0.4), near(old, 0.0),
        near(old, 0.3), near(old, 0.3), uniform(B, T), normal(B, T), normal(B, T), normal(B, T),
        2 * normal(B, T, V), torch.randint(V, (B, T), generator=generator))
    short = {name: value.double().round(decimals=3) for name, value in vars(drawn).items()
             if value.is_floating_point()}              # numbers of few digits, to be written down
    return dataclasses.replace(drawn, **short)


# ---- 2. our side -----------------------------------------------------------------------------

RANGE = {"epsilon": 0.2, "epsilon_high": 0.28}          # of all, unless flags say otherwise
ROWS_OF_BATCH = torch.arange(B)


def config(script, flags):
    return script.Config(**{"device": "cpu", "max_completion_length": T} | flags)


def scene(x):
    """x as a Batch, whose prompts are the numbers of its rows."""
    return common.Batch(
        torch.zeros(B, T).long(), x.mask, x.old_logps, x.entropy, x.lengths, x.is_truncated,
        prompts=ROWS_OF_BATCH[:, None], rewards=x.rewards,
        is_correct=torch.zeros(P, G, dtype=torch.bool))


def scored(script, x):
    """In this block a script takes log-probabilities of x, where it takes a model otherwise."""
    def score(logps, prompts, tokens, *_):
        rows = prompts[:, 0]
        length = tokens.shape[1]
        return logps[rows, :length], x.entropy[rows, :length]
    return mock.patch.object(script, "score", score)


def update(x, script=grpo, A=None, as_is=False, **flags):
    """Add to the gradient of x.logps what an optimizer step of a script does. -> metrics"""
    cfg = config(script, flags if as_is or script is reinforce else RANGE | flags)
    if A is None:
        A = group(x, getattr(cfg, "scale_rewards", "none"))
    if script in (grpo, gspo):
        args = (x.ref_logps, A, ROWS_OF_BATCH, cfg)
    else:
        args = (A, ROWS_OF_BATCH, cfg, *([1.0] if script is ppo else []))
    with scored(script, x):
        return script.backward(x.logps, scene(x), *args)


def loss(x, script=grpo, A=None, **flags):
    return number(update(x, script, A, **flags)["loss"])


def number(value):
    return torch.tensor(float(value))


def group(x, scale_rewards="group"):
    """(1), a row of the batch in each row. -> (B, 1)"""
    return grpo.advantages(x.rewards, scale_rewards).view(-1, 1)


def rloo(x):
    return reinforce.advantages(x.rewards, "rloo").view(-1, 1)                  # (B, 1)


def lagged(x, mode, method="grpo", **flags):
    """The update of examples/lag.py. -> loss"""
    cfg = config(lag, flags | {"importance_sampling_correction": mode})
    batch = dataclasses.replace(scene(x), logps=x.mu_logps)
    weights, _ = lag.correct(batch, x.old_logps, cfg)
    return loss(x, lag.METHODS[method], weights * group(x), **flags)


def preferred(x, **flags):
    """The update of dpo.py, where the rows of the first half are chosen. -> metrics"""
    chosen, rejected = ROWS_OF_BATCH.chunk(2)
    with scored(dpo, x):
        return dpo.backward(x.logps, x.ref_logps, scene(x), chosen, rejected, config(dpo, flags))


def outputs(x, average=False, logps="logps"):
    """Log-probabilities of whole completions, chosen and rejected. -> (B / 2,) each"""
    return dpo.sequence_logps(getattr(x, logps), x.mask, average).chunk(2)


def at_end(x, mask):
    """Rewards, where completions earn them. -> (B, T)"""
    batch = common.Batch(None, mask, *[None] * 4, rewards=x.rewards)
    return common.Arithmetic.token_rewards(None, batch)


def gae(x, lam=0.95):
    """Whitened advantages. -> (B, T)"""
    A, _ = ppo.gae(at_end(x, x.mask), x.values, x.mask, 0.99, lam)
    return ppo.whiten(A, x.mask)


def plain(x):
    """x without holes, which RLOOTrainer does not know."""
    known = {name: getattr(x, name) * x.mask for name in ("logps", "old_logps", "ref_logps")}
    return dataclasses.replace(x, mask=x.slots, **known)


def rloo_returns(x, beta):
    """Advantages of returns less the KL, k1. -> (B,)"""
    rewards = at_end(x, x.mask) - beta * grpo.kl(x.old_logps, x.ref_logps, "k1") * x.mask
    R = reinforce.rewards_to_go(rewards, x.mask, 1.0)[:, 0]
    return reinforce.advantages(R.view(P, G), "rloo").flatten()


def rloo_loss(x):
    return grpo.aggregate(reinforce.policy_loss(x.logps, rloo(x), x.mask), x.mask, "sequence_sum")


def opo(x):
    """Rewards less b* of all outputs, where |g|^2 is the length. -> (B, T)"""
    b = reinforce.optimal_baseline(x.rewards, x.mask.sum(dim=1).view(P, G), torch.ones(P, G))
    return (x.rewards - b[:, None]).view(-1, 1) * x.mask


def token_losses(x, script=grpo):
    return script.policy_loss(x.logps, x.old_logps, group(x), x.mask, **RANGE)  # (B, T)


def averaged(x, average, script=grpo):
    return grpo.aggregate(token_losses(x, script), x.mask, average, max_length=T)


def halves(x):
    """The mean over both halves of the rows of their means over tokens. -> scalar"""
    parts = zip(token_losses(x).chunk(2), x.mask.chunk(2))
    return sum(grpo.aggregate(*part, "token_mean") for part in parts) / 2


def emptied(x):
    """The mask without the first row."""
    return x.mask * (ROWS_OF_BATCH > 0)[:, None]


def far_out(x):
    """x with every third ratio beyond e^20."""
    far = 25 * (torch.arange(T) % 3 == 0) * x.mask
    return dataclasses.replace(x, old_logps=x.old_logps - far)


def gradient_of(value):
    """0, with the gradient of a value."""
    return value - value.detach()


OURS = {
    "grpo.py": loss,
    "gspo.py": lambda x, **flags: loss(x, gspo, **flags),
    "ppo.py": lambda x, **flags: loss(x, ppo, gae(x).detach(), **flags),
    "reinforce.py": lambda x: loss(x, reinforce, rloo(x) * x.mask),
    "lag.py": lagged,
    "dpo.py": lambda x, **flags: number(preferred(x, **flags)["loss"]),
    "grpo.py metrics": lambda x, name, **flags: number(update(x, **flags)[name]),
    "dpo.py metrics": lambda x, name: number(preferred(x)[name]),
    "common.py describe": lambda x, name: number(observers.describe(scene(x))[name]),
    "grpo.py advantages": lambda x, **flags: group(x, **flags) * x.mask,
    "grpo.py overlong_penalty": lambda x: grpo.overlong_penalty(x.lengths.view(P, G), T, 3),
    "reinforce.py advantages": lambda x, **flags: (
        reinforce.advantages(x.rewards, **flags).view(-1, 1) * x.mask),
    "reinforce.py advantages, beta": lambda x: rloo_returns(plain(x), 0.1),
    "reinforce.py gradient": lambda x: gradient_of(rloo_loss(plain(x))),
    "reinforce.py loss": lambda x: rloo_loss(plain(x)),
    "reinforce.py optimal_baseline": opo,
    "reinforce.py rewards_to_go": lambda x, gamma=0.9: reinforce.rewards_to_go(
        at_end(x, x.slots), x.slots, gamma),
    "rewards_to_go, whiten": lambda x: ppo.whiten(
        reinforce.rewards_to_go(at_end(x, x.mask), x.mask, 0.9), x.mask),
    "advantages mean, whiten": lambda x: ppo.whiten(
        reinforce.advantages(x.rewards, "mean").view(-1, 1) * x.mask, x.mask),
    "rewards_to_go less a reward": lambda x: x.mask * (
        reinforce.rewards_to_go(at_end(x, x.mask), x.mask, 1.0)
        - x.rewards[:, :1].expand(P, G).reshape(-1, 1)),
    "ppo.py gae, whiten": gae,
    "ppo.py gae, length_adaptive": lambda x: gae(
        x, ppo.length_adaptive_lambda(x.mask.sum(dim=1), 1.0)),
    "ppo.py gae": lambda x: torch.stack(ppo.gae(at_end(x, x.slots), x.values, x.slots, 0.99, 0.95)),
    "ppo.py returns": lambda x: ppo.gae(at_end(x, x.mask), x.values, x.mask, 0.99, 0.95)[1],
    "ppo.py whiten": lambda x: ppo.whiten(x.losses, x.mask),
    "ppo.py reward less KL": lambda x: x.mask * (
        at_end(x, x.mask) - 0.1 * ppo.kl(x.old_logps, x.ref_logps, "k1")),
    "ppo.py value_loss": lambda x: grpo.aggregate(ppo.value_loss(
        x.values, x.old_values, x.losses, x.mask, 0.4567), x.mask, "token_mean"),
    "ppo.py adapt_coefficient": lambda x: torch.tensor(
        [ppo.adapt_coefficient(0.1, 0.01 * k, 0.05) for k in range(1, 20)]),
    "aggregate": lambda x, how: grpo.aggregate(x.losses, x.mask, how),
    "aggregate, a row empty": lambda x, **counts: grpo.aggregate(
        x.losses, emptied(x), "sequence_mean", **counts),
    "aggregate of halves": halves,
    "lag.py importance_weights": lambda x, correction: lag.importance_weights(
        x.old_logps, x.mu_logps, x.mask, correction, 2.0),
    "dpo.py dpo_loss": lambda x, **flags: dpo.dpo_loss(*outputs(x), 0.0, 0.0, 0.1, **flags),
    "logprobs": lambda x: grpo.logprobs(x.logits, x.tokens, 0.7)[0],
    "logprobs, entropy": lambda x: grpo.logprobs(x.logits, x.tokens, 0.7)[1],
    "scores.py pass_at_k": lambda x: torch.tensor(
        [scores.pass_at_k(9, c, k) for c in range(10) for k in range(1, 10)]),
    "scores.py majority": lambda x: torch.tensor(
        [float(scores.majority(votes)) for votes in x.tokens.tolist()]),
}

# Ours with one thing done as they do it.
OURS |= {
    "all count in B": lambda x, average: averaged(
        dataclasses.replace(x, mask=x.mask * ~x.is_truncated[:, None]), average),
    "KL by s_i": lambda x: averaged(x, "sequence_mean", gspo) + 0.1 * grpo.aggregate(grpo.kl(
        x.logps, x.ref_logps, "k3_ratio", gspo.log_ratio(x.logps, x.old_logps, x.mask)),
        x.mask, "sequence_mean"),
    "bonus over tokens": lambda x: averaged(x, "sequence_mean") - 0.1 * grpo.aggregate(
        x.entropy, x.mask, "token_mean"),
    "RLOO, clipped": lambda x: rloo_clipped(plain(x)),
    "RPO over tokens": lambda x: dpo.dpo_loss(
        *outputs(x), *outputs(x, logps="ref_logps"), 0.1).mean() - grpo.aggregate(
            x.logps[:B // 2], x.mask[:B // 2], "token_mean"),
    "CISPO from below": lambda x: grpo.aggregate(
        -ratio(x).clamp(0.8, 1.28).detach() * group(x) * x.logps, x.mask, "token_mean"),
    "k3 up to 10": lambda x: averaged(x, "token_mean") + 0.1 * grpo.aggregate(
        grpo.kl(x.logps, x.ref_logps).clamp(max=10), x.mask, "token_mean"),
    "log rho up to 20": lambda x: log_rho_cut(far_out(x)),
    "a ratio beyond e^20": lambda x: loss(far_out(x), loss_type="dapo"),
    "means in float32": lambda x: x.mask * (
        (x.rewards - x.rewards.float().mean(dim=1, keepdim=True))
        / (x.rewards.float().std(dim=1, keepdim=True) + 1e-4)).view(-1, 1),
    "std of all": lambda x: x.rewards.std(),
}


def ratio(x):
    return grpo.log_ratio(x.logps, x.old_logps, x.mask).exp()                   # (B, T)


def log_rho_cut(x):
    log_rho = ratio(x).log().clamp(-20, 20)
    return averaged(dataclasses.replace(x, logps=log_rho, old_logps=0 * log_rho), "token_mean")


def rloo_clipped(x):
    """One ratio, and a clip, for the product of the probabilities of an output. -> scalar"""
    log_rho = ratio(x).log().sum(dim=1, keepdim=True)                           # (B, 1)
    one = torch.ones(B, 1)
    return grpo.policy_loss(log_rho, 0 * log_rho, rloo(x), one, **RANGE).mean()


# ---- 3. the table ----------------------------------------------------------------------------

ROWS = Path(__file__).with_name("conform-rows.txt")


@dataclasses.dataclass(frozen=True)
class Row:
    what: str
    ours: str
    theirs: str
    but: str
    why: str


def read_rows():
    """A Row for each of theirs. -> list"""
    rows = []
    text = re.sub("^#.*\n", "", ROWS.read_text(), flags=re.MULTILINE)
    for line in text.replace("\n    ", " ").splitlines():
        what, ours, *theirs = line.split(" | ")
        last = [theirs.pop()] if theirs[-1].startswith(("because", "but for")) else [""]
        but = [theirs.pop()[5:]] if theirs[-1].startswith("but: ") else [""]
        rows += [Row(what, ours, peer, *but, *last) for peer in theirs]
    return rows


def ask(functions, text, x):
    """Call what a row names, "NAME: flag=value, ...". -> tensor"""
    name, _, flags = text.partition(": ")
    pairs = [pair.split("=") for pair in flags.split(", ")] if flags else []
    return functions[name](x, **{flag: meant(value) for flag, value in pairs})


def meant(word):
    """A number or a truth value, else the word itself."""
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


# ---- 4. the runner ---------------------------------------------------------------------------

LEAVES = ("logps", "entropy", "values", "losses", "logits")


def outcome(functions, text, x):
    """What is answered about a Case, and how it depends on its LEAVES. -> dict of tensors: "value",
    and gradients by the name of the leaf"""
    leaves = {name: getattr(x, name).clone().requires_grad_() for name in LEAVES}
    value = ask(functions, text, dataclasses.replace(x, **leaves))
    if value.requires_grad:                 # else the update of a script has added it already
        value.sum().backward()
    found = {"value": value.detach()}
    for name, leaf in leaves.items():
        if leaf.grad is not None and leaf.grad.any():
            found[name] = leaf.grad
    return found


def difference(a, b, floor=0.0):
    """The largest relative difference. What is below the floor, or a thousandth of the largest, is
    taken relative to that. -> float"""
    assert a.shape == b.shape, (a.shape, b.shape)
    floor = (1e-3 * b.abs().max()).clamp(min=max(floor, 1e-300))
    size = torch.maximum(a.abs(), b.abs()).clamp(min=floor)
    relative = (a - b).abs() / size
    return relative.max().item()


def differences(mine, answer):
    """Of the values; and of the gradients, None where the answer has none. As the terms of a loss
    cancel, it is measured by its gradient where that is larger. -> [float, float or None]"""
    gradients = []
    size = 0.0
    for name in LEAVES:
        if len(answer) > 1 and name in mine | answer:
            pair = mine.get(name, torch.zeros(())), answer.get(name, torch.zeros(()))
            gradients.append(difference(*torch.broadcast_tensors(*pair)))
            size = max(size, pair[1].abs().max().item())
    size = size if answer["value"].dim() == 0 else 0.0
    return [difference(mine["value"], answer["value"], size), max(gradients, default=None)]


def largest(text, cases, answers):
    """The largest differences of what we answer to `text`. -> [float, float or None]"""
    found = [differences(outcome(OURS, text, x), answer) for x, answer in zip(cases, answers)]
    return [max((x for x in column if x is not None), default=None) for column in zip(*found)]


def compare(row, peers, cases):
    """Both sides of a row. -> record"""
    answers = [outcome(peers, row.theirs, x) for x in cases]
    found = {"difference": largest(row.ours, cases, answers)}
    if row.but:
        found["with_that"] = largest(row.but, cases, answers)
    known = [written(answers[seed]) for seed in RECORDED]
    return dataclasses.asdict(row) | found | {"answers": known}


def written(tensors):
    """Tensors as text, by their names: numbers of nine digits. -> dict"""
    return {name: " ".join(f"{number:.9g}" for number in tensor.flatten().tolist())
            for name, tensor in tensors.items()}


# ---- 5. optimizer steps whole ----------------------------------------------------------------

# script, function of tools/peers.py, optimizer steps, optimizer
STEPS = [(grpo, "TRL_grpo", 1, "SGD"), (grpo, "TRL_grpo", 2, "SGD"), (dpo, "TRL_dpo", 1, "SGD"),
         (grpo, "TRL_grpo", 1, "AdamW"), (dpo, "TRL_dpo", 1, "AdamW"), (grpo, "verl", 1, "AdamW")]


def whole_step(peers, run, script, peer, passes, optimizer):
    """The policy of a run and its export, updated on the same completions. -> record"""
    cfg = config(script, {
        "num_mini_batches": 1, "num_iterations": passes, "num_prompts": 16,
        "max_completion_length": 48, "beta": 0.1 if script is dpo else 0.04})
    policy, _ = export.read_policy(run, "checkpoint.pt")
    reference = copy.deepcopy(policy)
    start = flat(policy.parameters())
    batch = script.sample_batch(policy, common.load_task(cfg, script.verify), cfg, 0)
    learned = dpo.preferences(batch.rewards)
    if script is grpo:
        learned = [grpo.advantages(batch.rewards).view(-1, 1)]
    learner = getattr(torch.optim, optimizer)(
        policy.parameters(), lr=cfg.learning_rate, weight_decay=cfg.weight_decay)
    script.update(policy, reference, learner, batch, *learned, cfg, 0)

    theirs = getattr(peers, f"{peer}_steps")(run / "exported", batch, *learned, cfg, optimizer)
    ours = flat(policy.parameters())
    names = [export.llama_name(name) for name, _ in policy.named_parameters()]
    difference = (ours - flat(theirs[name] for name in names)).abs()
    is_apart = difference > 1e-5
    gradient = flat(weight.grad for weight in policy.parameters()).abs()
    return {"ours": f"{script.__name__}.py", "theirs": peer, "steps": passes,
            "optimizer": optimizer, "moved": (ours - start).abs().max().item(),
            "difference": difference.max().item(), "apart": is_apart.sum().item(),
            "weights": len(ours), "gradient": gradient.max().item(),
            "gradient_apart": (gradient * is_apart).max().item()}


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


# ---- 6. defaults -----------------------------------------------------------------------------

def defaults(functions, name):
    """What a loss does where nobody says otherwise, by how its gradient reacts. -> dict"""
    x = draw(0)
    rewards = torch.eye(G)[:P]
    is_good = (rewards > 0).view(-1, 1)
    x = dataclasses.replace(x, rewards=rewards, old_logps=x.logps, ref_logps=x.logps)
    at_once = outcome(functions, f"{name} loss", x)

    def moves(rows, ratio):
        old = torch.where(x.mask > 0, x.logps - torch.tensor(ratio).log(), x.logps)
        found = outcome(functions, f"{name} loss", dataclasses.replace(x, old_logps=old))
        return "logps" in found and bool((found["logps"] * rows).any())

    def edge(rows, outside):
        if moves(rows, outside):
            return "none"
        inside = 1.0
        for _ in range(30):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if moves(rows, middle) else (inside, middle)
        return f"{inside:.4g}"

    averages = {}
    for how in ("sequence_mean", "token_mean", "sequence_sum", "constant"):
        expected = group(x) * outcome(OURS, f"aggregate: how={how}", x)["losses"]
        gradient = -at_once["logps"]
        averages[how] = torch.cosine_similarity(expected.flatten(), gradient.flatten(), dim=0)
    tops = []
    for size in (1.0, 1e-3):
        A = ask(functions, f"{name} advantages", dataclasses.replace(x, rewards=size * rewards))
        tops.append(0.75 * size / A.max().item())
    std = (tops[0] - tops[1]) / 0.999
    return {
        "std in the advantages": f"ddof {1 if std > 0.47 else 0}, + {tops[0] - std:.0e}",
        "average of the loss": max(averages, key=averages.get),
        "A > 0: no gradient above": edge(is_good, 1e4),
        "A < 0: no gradient below": edge(~is_good, 1e-4),
        "A < 0: no gradient above": edge(~is_good, 1e4),
        "entropy in the loss": "yes" if "entropy" in at_once else "no",
        "KL in the loss": kl_of(functions, name, x, at_once)}


def kl_of(functions, name, x, at_once):
    """Whether another reference makes another gradient. -> str"""
    other = dataclasses.replace(x, ref_logps=x.logps - x.mask)
    found = outcome(functions, f"{name} loss", other)
    return "no" if torch.equal(found["logps"], at_once["logps"]) else "yes"


OURS |= {"here loss": lambda x: loss(x, as_is=True), "here advantages": group}


# ---- 7. the page -----------------------------------------------------------------------------

def verdict(row):
    """same, same but for something, or different because of something. -> str"""
    if most(row["difference"]) <= SAME:
        return "same"
    shown = f" ({most(row['with_that']):.0e} with that)" if row["but"] else ""
    word = "same," if row["why"].startswith("but for") else "different"
    return f"{word} {row['why']}{shown}"


def most(numbers):
    return max(number for number in numbers if number is not None)


def tables(content):
    """What the page shows. -> name of a table: text"""
    rows = []
    for i, row in enumerate(content["rows"], 1):
        names = [f"`{row['ours']}`", f"`{row['theirs']}`"]
        cells = ["" if x is None else f"{x:.0e}" for x in row["difference"]]
        rows.append([i, row["what"], *names, *cells, verdict(row)])
    steps = []
    for found in content["steps"]:
        names = [found[name] for name in ("ours", "theirs", "steps", "optimizer")]
        sizes = [f"{found[name]:.0e}" for name in (
            "moved", "difference", "gradient", "gradient_apart")]
        steps.append([*names, *sizes[:2], f"{found['apart']} of {found['weights']}", *sizes[2:]])
    answers = content["defaults"]
    defaults = [[what, *(answers[name][what] for name in answers)] for what in answers["here"]]
    return {
        "rows": table(["", "what", "ours", "theirs", "value", "gradient", "verdict"], rows),
        "steps": table(
            ["ours", "theirs", "steps", "optimizer", "a weight moves by", "largest difference",
             "beyond 1e-5", "largest gradient", "the same of those beyond"], steps),
        "defaults": table(["", *answers], defaults)}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "base")
        grpo.main(["--max_steps", "0", "--num_eval_problems", "8", "--output_dir", str(run)])
        export.export(run, run / "exported")
        peers = importlib.import_module("tools.peers")
        steps = [whole_step(peers, run, *how) for how in STEPS]
    torch.set_default_dtype(torch.float64)
    cases = [draw(seed) for seed in range(NUM_DRAWS)]
    rows = [compare(row, peers.PEERS, cases) for row in tqdm(read_rows())]
    answers = {name: defaults(OURS | peers.PEERS, name) for name in ("here", "TRL", "verl")}
    for what, settings in peers.settings().items():
        for name, setting in zip(answers, settings):
            answers[name][what] = {"True": "yes", "False": "no"}.get(str(setting), str(setting))
    content = {"versions": peers.VERSIONS, "steps": steps, "defaults": answers, "rows": rows,
               "cases": [written(vars(cases[seed])) for seed in RECORDED]}
    record("conformance", **content)
    for name, text in tables(content).items():
        put(name, text, "conform")


if __name__ == "__main__":
    start(main)
