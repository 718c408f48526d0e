"""Our equations beside the code of TRL, verl and others, on the same random numbers: make conform.

A row of tools/conform-rows.txt names a function of ours, or the update of a whole script, and one
of theirs, as "NAME: flag=value, ...", by which they are called, too: OURS, and PEERS in
tools/peers.py, have the names. Both get the same Cases, in float64, and should return the same
value with the same gradient. A row where they do not has a sentence, and where it can be shown,
`but`: ours with that one thing done as they do it, which has to agree.

To add a row is a line of conform-rows.txt. A loss that is a flag needs no more: "grpo.py" passes
flags on to its Config, "TRL grpo", "TRL dpo" and "verl ppo_loss" to the configurations there. What
has no name yet gets one in OURS or PEERS: a function of a Case, and of the flags, that returns a
number or a tensor. make conform then writes the tables of docs/conformance.md, and
docs/conformance.json, where tests/test_conform.py finds what they answered.
"""
import argparse
import ast
import copy
import dataclasses
import re
import tempfile
from dataclasses import replace
from functools import partial
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
from examples import lag
from tools import export, observers, scores, start
from tools.runs import put, record, table

P, G, T, V = 3, 4, 5, 7
B = P * G
SAME = 1e-6             # verl adds 1e-8 to counts, which shows where terms cancel
NUM_DRAWS = 50
RECORDED = (0, 1)       # the draws whose answers tests know
RANGE = {"epsilon": 0.2, "epsilon_high": 0.28}          # of all, unless flags say otherwise


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

    def batch(self, sampler="old_logps"):
        """The same as a Batch of this sampler. A prompt is the number of its row, and of the tokens
        only the end matters."""
        ends = torch.where(self.is_truncated, 1, grpo.EOS)
        tokens = torch.ones(B, T).long().scatter(1, self.lengths[:, None] - 1, ends[:, None])
        return common.Batch(
            tokens, self.mask, getattr(self, sampler), self.entropy, self.lengths,
            self.is_truncated, prompts=torch.arange(B)[:, None], rewards=self.rewards,
            is_correct=torch.zeros(P, G, dtype=torch.bool))

    def A(self, how="group", script=grpo):
        """Advantages of whole outputs, by a script. -> (B, T)"""
        return script.advantages(self.rewards, how).view(-1, 1) * self.mask

    def earned(self):
        """Rewards, where completions earn them. -> (B, T)"""
        return common.Arithmetic.token_rewards(None, self)

    def plain(self):
        """The same without holes."""
        known = {name: getattr(self, name) * self.mask for name in (
            "logps", "old_logps", "ref_logps")}
        return replace(self, mask=self.slots, **known)

    def only(self, rows):
        """The same without the tokens of other rows."""
        return replace(self, mask=self.mask * rows[:, None])

    def far_out(self):
        """The same with every third ratio beyond e^20."""
        far = 25 * (torch.arange(T) % 3 == 0) * self.mask
        return replace(self, old_logps=self.old_logps - far)


def draw(seed):
    """Lengths from one token to all, a group without signal, ratios far from 1; binary rewards or
    others; holes in every second draw. -> Case"""
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=generator)
    uniform = partial(torch.rand, generator=generator)
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
    return replace(drawn, **short)


# ---- 2. our side -----------------------------------------------------------------------------

def update(x, script=grpo, A=None, name="loss", ranges=RANGE, **flags):
    """Add to the gradient of x.logps what an optimizer step of a script does. -> a metric of it"""
    if hasattr(script.Config, "epsilon"):
        flags = ranges | flags
    cfg = script.Config(device="cpu", max_completion_length=T, **flags)
    if A is None:
        A = x.A(flags.get("scale_rewards", "group"))
    batch = x.batch()
    rows = torch.arange(B)
    args = (batch, x.ref_logps, A, rows, cfg)
    if script is dpo:                       # the rows of the first half are chosen
        args = (x.ref_logps, batch, *rows.chunk(2), cfg)
    elif script is reinforce:
        args = (batch, A, rows, cfg)
    elif script is ppo:
        args = (batch, A, rows, cfg, 1.0)

    def score(logps, prompts, tokens, *_):
        """Log-probabilities of x, where a script asks a model."""
        at = (prompts[:, 0], slice(tokens.shape[1]))
        return logps[at], x.entropy[at]

    with mock.patch.object(script, "score", score):
        return script.backward(x.logps, *args)[name]


def lagged(x, mode, method="grpo", **flags):
    """The update of examples/lag.py. -> loss"""
    cfg = lag.Config(device="cpu", importance_sampling_correction=mode)
    weights, _ = lag.correct(x.batch("mu_logps"), x.old_logps, cfg)
    return update(x, lag.METHODS[method], weights * x.A(), **flags)


def gae(x, lam=0.95):
    """Advantages and returns. -> (2, B, T)"""
    return torch.stack(ppo.gae(x.earned(), x.values, x.mask, 0.99, lam))


def whitened(x, lam=0.95):
    return ppo.whiten(gae(x, lam)[0], x.mask)                                   # (B, T)


def rewards_to_go(x, gamma=0.9):
    return reinforce.rewards_to_go(x.earned(), x.mask, gamma)                   # (B, T)


def less_kl(x):
    return x.mask * (x.earned() - 0.1 * ppo.kl(x.old_logps, x.ref_logps, "k1"))         # (B, T)


def rloo_less_kl(x):
    """Advantages of returns less the KL. -> (B,)"""
    R = reinforce.rewards_to_go(less_kl(x), x.mask, 1.0)[:, 0]
    return reinforce.advantages(R.view(P, G), "rloo").flatten()


def rloo_loss(x):
    A = x.A("rloo", reinforce)
    return grpo.aggregate(reinforce.policy_loss(x.logps, A, x.mask), x.mask, "sequence_sum")


def opo(x):
    """Rewards less b* of all outputs, where |g|^2 is the length. -> (B, T)"""
    b = reinforce.optimal_baseline(x.rewards, x.mask.sum(dim=1).view(P, G), torch.ones(P, G))
    return (x.rewards - b[:, None]).view(-1, 1) * x.mask


def outputs(x, logps, average=False):
    """Log-probabilities of whole completions, chosen and rejected. -> (B / 2,) each"""
    return dpo.sequence_logps(logps, x.mask, average).chunk(2)


def averaged(x, average, script=grpo):
    """The average of L_t. -> scalar"""
    token_loss = script.policy_loss(x.logps, x.old_logps, x.A(), x.mask, **RANGE)
    return grpo.aggregate(token_loss, x.mask, average, max_length=T)


def halves(x):
    """The mean over both halves of the rows of their means over tokens. -> scalar"""
    is_first = torch.arange(B) < B // 2
    return sum(averaged(x.only(half), "token_mean") for half in (is_first, ~is_first)) / 2


OURS = {
    "grpo.py": update,
    "gspo.py": partial(update, script=gspo),
    "ppo.py": lambda x, **flags: update(x, ppo, whitened(x).detach(), **flags),
    "reinforce.py": lambda x: update(x, reinforce, x.A("rloo", reinforce)),
    "lag.py": lagged,
    "dpo.py": partial(update, script=dpo),
    "common.py describe": lambda x, name: observers.describe(x.batch())[name],
    "grpo.py advantages": lambda x, scale_rewards="group": x.A(scale_rewards),
    "grpo.py overlong_penalty": lambda x: grpo.overlong_penalty(x.lengths.view(P, G), T, 3),
    "reinforce.py advantages": lambda x, baseline: x.A(baseline, reinforce),
    "reinforce.py advantages, beta": lambda x: rloo_less_kl(x.plain()),
    "reinforce.py gradient": lambda x: rloo_loss(x.plain()) - rloo_loss(x.plain()).detach(),
    "reinforce.py loss": lambda x: rloo_loss(x.plain()),
    "reinforce.py optimal_baseline": opo,
    "reinforce.py rewards_to_go": lambda x: rewards_to_go(x.plain()),
    "rewards_to_go, whiten": lambda x: ppo.whiten(rewards_to_go(x), x.mask),
    "advantages mean, whiten": lambda x: ppo.whiten(x.A("mean", reinforce), x.mask),
    "rewards_to_go less a reward": lambda x: x.mask * (
        rewards_to_go(x, 1.0) - x.rewards[:, :1].expand(P, G).reshape(-1, 1)),
    "ppo.py gae, whiten": whitened,
    "ppo.py gae, length_adaptive": lambda x: whitened(
        x, ppo.length_adaptive_lambda(x.mask.sum(dim=1), 1.0)),
    "ppo.py gae": lambda x: gae(x.plain()),
    "ppo.py returns": lambda x: gae(x)[1],
    "ppo.py whiten": lambda x: ppo.whiten(x.losses, x.mask),
    "ppo.py reward less KL": less_kl,
    "ppo.py value_loss": lambda x: grpo.aggregate(ppo.value_loss(
        x.values, x.old_values, x.losses, x.mask, 0.4567), x.mask, "token_mean"),
    "ppo.py adapt_coefficient": lambda x: [
        ppo.adapt_coefficient(0.1, 0.01 * k, 0.05) for k in range(1, 20)],
    "aggregate": lambda x, how: grpo.aggregate(x.losses, x.mask, how),
    "aggregate, a row empty": lambda x, **counts: grpo.aggregate(
        x.losses, x.only(torch.arange(B) > 0).mask, "sequence_mean", **counts),
    "aggregate of halves": halves,
    "lag.py importance_weights": lambda x, correction: lag.importance_weights(
        x.old_logps, x.mu_logps, x.mask, correction, 2.0),
    "dpo.py dpo_loss": lambda x, **flags: dpo.dpo_loss(*outputs(x, x.logps), 0.0, 0.0, 0.1, **flags),
    "logprobs": lambda x: grpo.logprobs(x.logits, x.tokens, 0.7)[0],
    "logprobs, entropy": lambda x: grpo.logprobs(x.logits, x.tokens, 0.7)[1],
    "scores.py pass_at_k": lambda x: [
        scores.pass_at_k(9, c, k) for c in range(10) for k in range(1, 10)],
    "scores.py majority": lambda x: [
        float(scores.majority(votes)) for votes in x.tokens.tolist()],
}


def log_rho(x):
    return grpo.log_ratio(x.logps, x.old_logps, x.mask)                         # (B, T)


def log_rho_cut(x):
    cut = log_rho(x).clamp(-20, 20)
    return averaged(replace(x, logps=cut, old_logps=0 * cut), "token_mean")


def rloo_clipped(x):
    """One ratio, and a clip, for the product of the probabilities of an output. -> scalar"""
    whole = log_rho(x).sum(dim=1, keepdim=True)                                 # (B, 1)
    A = x.A("rloo", reinforce)[:, :1]
    return grpo.policy_loss(whole, 0 * whole, A, torch.ones(B, 1), **RANGE).mean()


# Ours with one thing done as they do it.
OURS |= {
    "all count in B": lambda x, average: averaged(x.only(~x.is_truncated), average),
    "KL by s_i": lambda x: averaged(x, "sequence_mean", gspo) + 0.1 * grpo.aggregate(grpo.kl(
        x.logps, x.ref_logps, "k3_ratio", gspo.log_ratio(x.logps, x.old_logps, x.mask)),
        x.mask, "sequence_mean"),
    "bonus over tokens": lambda x: averaged(x, "sequence_mean") - 0.1 * grpo.aggregate(
        x.entropy, x.mask, "token_mean"),
    "RLOO, clipped": lambda x: rloo_clipped(x.plain()),
    "RPO over tokens": lambda x: dpo.dpo_loss(
        *outputs(x, x.logps), *outputs(x, x.ref_logps), 0.1).mean() - grpo.aggregate(
            x.logps[:B // 2], x.mask[:B // 2], "token_mean"),
    "CISPO from below": lambda x: grpo.aggregate(
        -log_rho(x).exp().clamp(0.8, 1.28).detach() * x.A() * x.logps, x.mask, "token_mean"),
    "k3 up to 10": lambda x: averaged(x, "token_mean") + 0.1 * grpo.aggregate(
        grpo.kl(x.logps, x.ref_logps).clamp(max=10), x.mask, "token_mean"),
    "log rho up to 20": lambda x: log_rho_cut(x.far_out()),
    "a ratio beyond e^20": lambda x: update(x.far_out(), loss_type="dapo"),
    "means in float32": lambda x: x.mask * (
        (x.rewards - x.rewards.float().mean(dim=1, keepdim=True))
        / (x.rewards.float().std(dim=1, keepdim=True) + 1e-4)).view(-1, 1),
    "std of all": lambda x: x.rewards.std(),
    "here loss": partial(update, ranges={}),
    "here advantages": Case.A,
}


# ---- 3. the table ----------------------------------------------------------------------------

ROWS = Path(__file__).with_name("conform-rows.txt")


def read_rows():
    """What is compared, ours and theirs, and what is said of it: a dict for each of theirs."""
    rows = []
    text = re.sub("^#.*\n", "", ROWS.read_text(), flags=re.MULTILINE)
    for line in text.replace("\n    ", " ").splitlines():
        what, ours, *theirs = line.split(" | ")
        why = theirs.pop() if theirs[-1].startswith(("because", "but for")) else ""
        but = theirs.pop()[5:] if theirs[-1].startswith("but: ") else ""
        for peer in theirs:
            rows.append({"what": what, "ours": ours, "theirs": peer, "but": but, "why": why})
    return rows


def ask(functions, text, x):
    """Call what a row names, "NAME: flag=value, ...". -> number, list of numbers, or tensor"""
    name, _, flags = text.partition(": ")
    known = {}
    for flag, value in re.findall("(\\w+)=([^, ]+)", flags):
        is_word = re.search("[^0-9.e-]", value) and value not in ("True", "False")
        known[flag] = value if is_word else ast.literal_eval(value)
    return functions[name.removesuffix(" metrics")](x, **known)


# ---- 4. the runner ---------------------------------------------------------------------------

LEAVES = ("logps", "entropy", "values", "losses", "logits")


def outcome(functions, text, x):
    """What is answered about a Case, and how it depends on its LEAVES. -> dict of tensors: "value",
    and gradients by the name of the leaf"""
    leaves = {name: getattr(x, name).clone().requires_grad_() for name in LEAVES}
    value = torch.as_tensor(ask(functions, text, replace(x, **leaves)))
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
    floor = max(1e-3 * b.abs().max().item(), floor, 1e-300)
    size = torch.maximum(a.abs(), b.abs()).clamp(min=floor)
    return ((a - b).abs() / size).max().item()


def differences(mine, answer):
    """Of the values; and of the gradients, None where the answer has none. As the terms of a loss
    cancel, it is measured by its gradient where that is larger. -> [float, float or None]"""
    value = answer["value"]
    assert mine["value"].shape == value.shape, (mine["value"].shape, value.shape)
    is_loss = value.dim() == 0
    size = max(tensor.abs().max().item() for tensor in answer.values()) if is_loss else 0.0
    zero = torch.zeros(())
    gradients = [difference(mine.get(name, zero), answer.get(name, zero)) for name in LEAVES
                 if len(answer) > 1 and name in mine | answer]
    return [difference(mine["value"], value, size), most(gradients)]


def largest(text, cases, answers):
    """The largest differences of what we answer to `text`. -> [float, float or None]"""
    found = [differences(outcome(OURS, text, x), answer) for x, answer in zip(cases, answers)]
    return [most(column) for column in zip(*found)]


def most(numbers):
    return max((number for number in numbers if number is not None), default=None)


def compare(row, peers, cases):
    """Both sides of a row. -> record"""
    answers = [outcome(peers, row["theirs"], x) for x in cases]
    found = row | {"difference": largest(row["ours"], cases, answers)}
    if row["but"]:
        found["with_that"] = largest(row["but"], cases, answers)
    return found | {"answers": [written(answers[seed]) for seed in RECORDED]}


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
    cfg = script.Config(
        device="cpu", num_mini_batches=1, num_iterations=passes, num_prompts=16,
        max_completion_length=48, beta=0.1 if script is dpo else 0.04)
    policy, _ = export.read_policy(run, "checkpoint.pt")
    reference = copy.deepcopy(policy)
    batch = script.sample_batch(policy, common.load_task(cfg, script.verify), cfg, 0)
    learned = dpo.preferences(batch.rewards)
    if script is grpo:
        learned = [grpo.advantages(batch.rewards).view(-1, 1)]
    learner = getattr(torch.optim, optimizer)(
        policy.parameters(), lr=cfg.learning_rate, weight_decay=cfg.weight_decay)
    script.update(policy, reference, learner, batch, *learned, cfg, 0)

    theirs = getattr(peers, f"{peer}_steps")(batch, *learned, cfg, optimizer)
    names = [export.llama_name(name) for name, _ in policy.named_parameters()]
    ours = flat(policy.parameters())
    apart = ours - flat(theirs[name] for name in names)
    is_apart = apart.abs() > 1e-5
    gradient = flat(weight.grad for weight in policy.parameters())
    sizes = {"moved": ours - flat(reference.parameters()), "difference": apart,
             "gradient": gradient, "gradient_apart": gradient * is_apart}
    return {"ours": f"{script.__name__}.py", "theirs": peer, "steps": passes,
            "optimizer": optimizer, "apart": is_apart.sum().item(), "weights": len(ours),
            **{name: tensor.abs().max().item() for name, tensor in sizes.items()}}


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


# ---- 6. defaults -----------------------------------------------------------------------------

def defaults(functions, name):
    """What a loss does where nobody says otherwise, by how its gradient reacts. -> dict"""
    x = draw(0)
    rewards = torch.eye(G)[:P]
    is_good = (rewards > 0).view(-1, 1)
    x = replace(x, rewards=rewards, old_logps=x.logps, ref_logps=x.logps)

    def gradient(**fields):
        found = outcome(functions, f"{name} loss", replace(x, **fields))
        return found.get("logps", torch.zeros(B, T))

    def edge(rows, outside):
        """The ratio, from 1 to outside, at which the gradient of some rows ends. -> str"""
        inside = 1.0
        middle = outside
        for _ in range(30):
            log_rho = x.mask * torch.tensor(middle).log()
            if (gradient(old_logps=x.logps - log_rho) * rows).any():
                inside = middle
            else:
                outside = middle
            middle = (inside + outside) / 2
        return "none" if inside == outside else f"{inside:.4g}"

    at_once = outcome(functions, f"{name} loss", x)
    averages = {}
    for how in ("sequence_mean", "token_mean", "sequence_sum", "constant"):
        expected = x.A() * outcome(OURS, f"aggregate: how={how}", x)["losses"]
        averages[how] = torch.cosine_similarity(
            expected.flatten(), -at_once["logps"].flatten(), dim=0)
    divisor = 0.75 / ask(functions, f"{name} advantages", x).max().item()
    ddof = 1 if divisor > 0.47 else 0
    eps = divisor - rewards[0].std(correction=ddof).item()
    is_moved = gradient(ref_logps=x.logps - x.mask) != at_once["logps"]
    return {
        "std in the advantages": f"ddof {ddof}, + {eps:.0e}",
        "average of the loss": max(averages, key=averages.get),
        "A > 0: no gradient above": edge(is_good, 1e4),
        "A < 0: no gradient below": edge(~is_good, 1e-4),
        "A < 0: no gradient above": edge(~is_good, 1e4),
        "entropy in the loss": "yes" if "entropy" in at_once else "no",
        "KL in the loss": "yes" if is_moved.any() else "no"}


# ---- 7. the page -----------------------------------------------------------------------------

STEP = {"ours": "{ours}", "theirs": "{theirs}", "steps": "{steps}", "optimizer": "{optimizer}",
        "a weight moves by": "{moved:.0e}", "largest difference": "{difference:.0e}",
        "beyond 1e-5": "{apart} of {weights}", "largest gradient": "{gradient:.0e}",
        "the same of those beyond": "{gradient_apart:.0e}"}


def verdict(row):
    """same, same but for something, or different because of something. -> str"""
    if most(row["difference"]) <= SAME:
        return "same"
    shown = f" ({most(row['with_that']):.0e} with that)" if row["but"] else ""
    word = "same," if row["why"].startswith("but for") else "different"
    return f"{word} {row['why']}{shown}"


def tables(content):
    """What the page shows. -> name of a table: text"""
    rows = []
    for i, row in enumerate(content["rows"], 1):
        cells = ["" if x is None else f"{x:.0e}" for x in row["difference"]]
        rows.append([
            i, row["what"], f"`{row['ours']}`", f"`{row['theirs']}`", *cells, verdict(row)])
    steps = [[cell.format(**step) for cell in STEP.values()] for step in content["steps"]]
    answers = content["defaults"]
    defaults = [[what, *(answers[name][what] for name in answers)] for what in answers["here"]]
    return {
        "rows": table(["", "what", "ours", "theirs", "value", "gradient", "verdict"], rows),
        "steps": table(STEP, steps),
        "defaults": table(["", *answers], defaults)}


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    from tools import peers                 # which needs .venv-conform
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "base")
        grpo.main(["--max_steps", "0", "--num_eval_problems", "8", "--output_dir", str(run)])
        export.export(run, peers.EXPORTED)
        steps = [whole_step(peers, run, *how) for how in STEPS]
    torch.set_default_dtype(torch.float64)
    cases = [draw(seed) for seed in range(NUM_DRAWS)]
    rows = [compare(row, peers.PEERS, cases) for row in tqdm(read_rows())]
    answers = {name: defaults(OURS | peers.PEERS, name) for name in ("here", "TRL", "verl")}
    for what, settings in peers.settings(cases[0]).items():
        for name, setting in zip(answers, settings):
            answers[name][what] = {"True": "yes", "False": "no"}.get(str(setting), str(setting))
    content = {"versions": peers.VERSIONS, "steps": steps, "defaults": answers, "rows": rows,
               "cases": [written(vars(cases[seed])) for seed in RECORDED]}
    record("conformance", **content)
    for name, text in tables(content).items():
        put(name, text, "conform")


if __name__ == "__main__":
    start(main)
