"""Compare our equations with the code of TRL and verl, on the same random numbers: make conform.

A row of rows.txt names a function of ours, or the update of a whole script, and a function of
theirs, as "NAME: flag=value, ..."; the names are in OURS, and in PEERS in theirs.py. Both functions
get the same Cases (see cases.py), in float64, and should return the same value with the same
gradient. If they don't, the row has a sentence that says why. If possible, it also has `but`: our
function with this one thing done as they do it, which then has to agree. Writes the tables of
docs/conformance.md, and docs/conformance.json, from which tests/test_conform.py reads the results
of TRL and verl.

To add a row, add a line to rows.txt. A loss that is a flag needs no more, because "grpo.py" and the
other scripts pass flags on to their Config, and "TRL grpo", "TRL dpo" and "verl ppo_loss" to the
configuration of TRL or verl. Anything else needs a new name in OURS or PEERS: a function of a Case
and flags that returns numbers.
"""
import ast
import contextlib
import copy
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch.nn.utils import parameters_to_vector as flat
from tqdm import tqdm

import common
import dpo
import grpo
import gspo
import ppo
import reinforce
import vectors
from examples import distill, lag, zoo
from lab.conform.cases import RANGE, B, Case, G, P, T, draw, two_rewards
from lab.docs import put, record, table
from pretrained import export
from report import start
from tasks import scores

SAME = 1e-6             # verl adds 1e-8 to counts, which is visible where terms cancel
NUM_DRAWS = 50
RECORDED = (0, 1)       # the draws whose results are stored for the tests
CHOSEN = torch.arange(B) < B // 2                       # (B,)  the rows of the first half


# ---- 1. our side -----------------------------------------------------------------------------

def update(x, script=grpo, A=None, name="loss", **flags):
    """Run the backward pass of a script's optimizer step, which adds to the gradient of x.logps.
    -> one of its metrics"""
    has_range = script is not zoo or flags["loss_type"] in zoo.CLIPPED
    if has_range and hasattr(script.Config, "epsilon"):
        flags = RANGE | flags
    cfg = script.Config(device="cpu", max_completion_length=T, **flags)
    losses = zoo.losses_in_grpo(cfg) if script is zoo else contextlib.nullcontext()
    script = grpo if script is zoo else script
    A = x.A(flags.get("scale_rewards", "group")) if A is None else A
    batch = x.batch()
    rows = torch.arange(B)
    args = {dpo: (x.ref_logps, batch, *rows.chunk(2), cfg), reinforce: (batch, A, rows, cfg),
            ppo: (batch, A, rows, cfg, 1.0)}.get(script, (batch, x.ref_logps, A, rows, cfg))

    def score(logps, prompts, tokens, *_):                  # takes the place of a model
        at = (prompts[:, 0], slice(tokens.shape[1]))
        return logps[at], x.entropy[at]
    with losses, mock.patch.object(script, "score", score):
        return script.backward(x.logps, *args)[name]


def lagged(x, mode, method="grpo", **flags):
    """Run the update of examples/lag.py. -> loss"""
    cfg = lag.Config(device="cpu", importance_sampling_correction=mode)
    weights, _ = lag.correct(x.batch("mu_logps"), x.old_logps, cfg)
    return update(x, lag.METHODS[method], weights * x.A(), **flags)


def zoo_losses(x, A=None, **flags):
    """Compute L_t with examples/zoo.py. -> (B, T)"""
    cfg = zoo.Config(device="cpu", **flags)
    return zoo.policy_loss(cfg, x.logps, x.old_logps, x.A() if A is None else A, x.mask)


def up_to(x, cap, **flags):
    """Compute the losses of the zoo with log pi, and cap the ratio in their weights. -> (B, T)"""
    rho = x.log_rho().exp().detach()
    weights = zoo_losses(x, **flags).detach() / rho
    return weights * rho.clamp(max=cap) * x.logps


def masked_by_mu(x, threshold):
    """Compute the loss with an off-policy mask that compares the policy with mu. -> scalar"""
    log_w = (x.logps - x.mu_logps).detach()
    is_kept = (x.A() >= 0) | (-zoo.mean_of_output(log_w, x.mask) <= threshold)
    return x.average(x.clipped() * is_kept, "sequence_mean")


def gdpo_of_tokens(x):
    """Compute GDPO advantages from z-scores in float32, whitened over tokens. -> (B, T)"""
    mask = x.plain().mask
    A = sum(grpo.advantages(r.float(), eps=1e-6).double() for r in two_rewards(x))
    return ppo.whiten(A.view(-1, 1) * mask, mask)


def passk_by_std(x):
    std = x.rewards.std(dim=1, keepdim=True) + 1e-6
    return x.mask * (zoo.passk(x.rewards) / std).view(-1, 1)


def gradient_sizes(x):
    """Compute (16) of examples/zoo.py from the logits. -> (B, T)"""
    p = x.logits.softmax(dim=-1)
    chosen = p.gather(-1, x.tokens[..., None])[..., 0]
    return 1 - 2 * chosen + p.square().sum(dim=-1)


def otb(x, lone=False):
    """Compute advantages with the optimal token baseline. lone: b_t is 0 where all other outputs of
    a group have ended. -> (B, T)"""
    x = x.plain()
    A = zoo.otb(x.rewards, gradient_sizes(x), x.mask)
    is_there = x.mask.view(P, G, T) > 0
    is_alone = is_there & (is_there.sum(dim=1, keepdim=True) == 1)
    if lone:
        A = torch.where(is_alone.view(B, T), x.token_rewards().sum(dim=1, keepdim=True), A)
    return A


def distilled(x, by=None, tail=True, **flags):
    """Compute the token losses of examples/distill.py at temperature 0.7. by: who chooses the top 3
    tokens, if it is the student, or if the losses renormalize them. -> (B, T)"""
    log_p, log_t = ((logits / 0.7).log_softmax(dim=-1) for logits in (x.logits, x.teacher()))
    if by:
        S = log_p.topk(3).indices                               # the student's tokens
        log_p, log_t = (distill.events(each, S, tail) for each in (log_p, log_t))
        if by == "renormalized":
            log_p, log_t = log_p.log_softmax(dim=-1), log_t.log_softmax(dim=-1)
        return x.mask * distill.divergence(log_p, log_t, 1.0)
    cfg = distill.Config(device="cpu", distillation_topk=3, **flags)
    old_logps = log_p.detach().gather(-1, x.tokens[..., None])[..., 0]
    return x.mask * distill.token_losses(log_p, log_t, x.tokens, old_logps, x.mask, cfg)


OURS = {
    "distill.py": distilled,
    "distill.py, mean": lambda x, **flags: x.average(distilled(x, **flags)),
    "grpo.py": update,
    "gspo.py": partial(update, script=gspo),
    "ppo.py": lambda x, **flags: update(x, ppo, ppo.whiten(x.gae()[0], x.mask).detach(), **flags),
    "reinforce.py": lambda x: update(x, reinforce, x.A("rloo", reinforce)),
    "lag.py": lagged,
    "zoo.py": partial(update, script=zoo),
    "zoo.py, untied": lambda x, **flags: update(x.untied(), zoo, **flags),
    "zoo.py gdpo": lambda x: zoo.gdpo(two_rewards(x)).view(-1, 1) * x.plain().mask,
    "zoo.py passk": lambda x: zoo.passk(x.rewards).view(-1, 1) * x.mask,
    "zoo.py rpp": lambda x, **flags: zoo.rpp(x.rewards, x.mask, **flags),
    "zoo.py opo": lambda x: x.mask * zoo.opo(x.rewards, x.num_tokens()).view(-1, 1),
    "zoo.py otb": otb,
    "gspo.py, T times": lambda x: T * x.average(x.clipped(gspo), "constant"),
    "dpo.py": partial(update, script=dpo),
    "common.py describe": lambda x, name: common.describe(x.batch())[name],
    "grpo.py advantages": Case.A,
    "grpo.py overlong_penalty": lambda x: grpo.overlong_penalty(x.lengths, T, 3),
    "reinforce.py advantages": lambda x, baseline: x.A(baseline, reinforce),
    "reinforce.py advantages, beta": lambda x: reinforce.advantages(reinforce.rewards_to_go(
        x.plain().less_kl(), x.slots, 1.0)[:, 0].view(P, G), "rloo").flatten(),
    "reinforce.py gradient": lambda x: x.plain().rloo_loss() - x.plain().rloo_loss().detach(),
    "reinforce.py loss": lambda x: x.plain().rloo_loss(),
    "reinforce.py optimal_baseline": lambda x: x.mask * (x.rewards - reinforce.optimal_baseline(
        x.rewards, x.num_tokens(), torch.ones(P, G))[:, None]).view(-1, 1),
    "rewards_to_go, whiten": lambda x: ppo.whiten(x.rewards_to_go(), x.mask),
    "advantages mean, whiten": lambda x: ppo.whiten(x.A("mean", reinforce), x.mask),
    "rewards_to_go less a reward": lambda x: x.mask * (
        x.rewards_to_go(1.0) - x.rewards[:, 0].repeat_interleave(G)[:, None]),
    "ppo.py gae, whiten": lambda x: ppo.whiten(x.gae()[0], x.mask),
    "ppo.py gae, length_adaptive": lambda x: ppo.whiten(
        x.gae(ppo.length_adaptive_lambda(x.mask.sum(dim=1), 1.0))[0], x.mask),
    "ppo.py returns": lambda x: x.gae()[1],
    "ppo.py whiten": lambda x: ppo.whiten(x.losses, x.mask),
    "ppo.py reward less KL": Case.less_kl,
    "ppo.py value_loss": lambda x: x.average(
        ppo.value_loss(x.values, x.old_values, x.losses, x.mask, 0.4567)),
    "ppo.py adapt_coefficient": lambda x: [
        ppo.adapt_coefficient(0.1, 0.01 * k, 0.05) for k in range(1, 20)],
    "aggregate": lambda x, how: x.average(x.losses, how),
    "aggregate, a row empty": lambda x, **counts: x.only(torch.arange(B) > 0).average(
        x.losses, "sequence_mean", **counts),
    "aggregate of halves": lambda x: sum(
        x.only(half).average(x.clipped()) for half in (CHOSEN, ~CHOSEN)) / 2,
    "lag.py importance_weights": lambda x, correction, clip_min=0.0: lag.importance_weights(
        x.old_logps, x.mu_logps, x.mask, correction, 2.0, clip_min),
    "dpo.py dpo_loss": lambda x, **flags: dpo.dpo_loss(*x.outputs(x.logps), 0.0, 0.0, 0.1, **flags),
    "logprobs": lambda x: grpo.logprobs(x.logits, x.tokens, 0.7)[0],
    "logprobs, entropy": lambda x: grpo.logprobs(x.logits, x.tokens, 0.7)[1],
    "logprobs, entropy without a token": lambda x: grpo.logprobs(
        x.without_a_token(), x.tokens)[1],
    "grpo.py kl, near 0": lambda x: x.mask * grpo.kl(x.near_reference(), x.ref_logps),
    "scores.py majority": lambda x: [float(scores.majority(row)) for row in x.tokens.tolist()],

    # our functions with one thing done as they do it
    "all count in B": lambda x, average: x.only(~x.is_truncated).average(x.clipped(), average),
    "KL by s_i": lambda x: x.average(x.clipped(gspo) + 0.1 * grpo.kl(
        x.logps, x.ref_logps, "k3_ratio", x.log_rho(gspo)), "sequence_mean"),
    "bonus over tokens": lambda x: (
        x.average(x.clipped(), "sequence_mean") - 0.1 * x.average(x.entropy)),
    "RLOO, clipped": lambda x: grpo.policy_loss(            # with one ratio per output
        x.plain().log_rho().sum(dim=1, keepdim=True), torch.zeros(B, 1),
        x.A("rloo", reinforce)[:, :1], torch.ones(B, 1), **RANGE).mean(),
    "RPO over tokens": lambda x: -x.only(CHOSEN).average(x.logps) + dpo.dpo_loss(
        *x.outputs(x.logps), *x.outputs(x.ref_logps), 0.1).mean(),
    "DPPO by log pi": lambda x, **flags: x.average(zoo_losses(x, **flags).detach() * x.logps),
    "DPPO up to 1.5": lambda x, **flags: x.average(up_to(x, 1.5, **flags)),
    "the mask by mu": masked_by_mu,
    "GDPO over tokens": gdpo_of_tokens,
    "passk by the std": passk_by_std,
    "CISPO from below": lambda x: x.average(
        -x.log_rho().exp().clamp(0.8, 1.28).detach() * x.A() * x.logps),
    "k3 up to 10": lambda x: x.average(
        x.clipped() + 0.1 * grpo.kl(x.logps, x.ref_logps).clamp(max=10)),
    "log rho up to 20": lambda x: x.average(
        replace(x, logps=x.far_out().log_rho().clamp(-20, 20), old_logps=0 * x.logps).clipped()),
    "a ratio beyond e^20": lambda x: update(x.far_out(), loss_type="dapo"),
    "means in float32": lambda x: x.mask * (
        (x.rewards - x.rewards.float().mean(dim=1, keepdim=True))
        / (x.rewards.float().std(dim=1, keepdim=True) + 1e-4)).view(-1, 1),
    "std of all": lambda x: x.rewards.std(),
    "0 times -inf": lambda x: -(
        x.without_a_token().softmax(dim=-1)
        * x.without_a_token().log_softmax(dim=-1)).sum(dim=-1),
}


# ---- 2. the rows -----------------------------------------------------------------------------

ROWS = Path(__file__).with_name("rows.txt")
ROW = re.compile(r"(.+?) \| (.+?) \| (.+?)(?: \| but: (.+?))?(?: \| ((?:because|except) .+))?")


def read_rows():
    """Read rows.txt. -> a dict for each comparison of one function of ours with one of theirs"""
    rows = []
    text = re.sub("^#.*\n", "", ROWS.read_text("utf-8"), flags=re.MULTILINE)
    for line in text.replace("\n    ", " ").splitlines():
        what, ours, theirs, but, why = ROW.fullmatch(line).groups(default="")
        for peer in theirs.split(" | "):
            rows.append({"what": what, "ours": ours, "theirs": peer, "but": but, "why": why})
    return rows


def call(functions, text, x):
    """Call the function that a row names as "NAME: flag=value, ...". -> number, list of numbers, or
    tensor"""
    name, _, flags = text.partition(": ")
    args = dict(re.findall("(\\w+)=([^, ]+)", flags))
    for flag, value in args.items():
        if re.fullmatch("[0-9.e-]+|True|False", value):
            args[flag] = ast.literal_eval(value)
    return functions[name.removesuffix(" metrics")](x, **args)


LEAVES = ("logps", "entropy", "values", "losses", "logits")


def outcome(functions, text, x):
    """Compute the value of a function for a Case, and its gradient in each of LEAVES. -> dict of
    tensors: "value", and the gradients by the name of the leaf"""
    leaves = {name: getattr(x, name).clone().requires_grad_() for name in LEAVES}
    value = torch.as_tensor(call(functions, text, replace(x, **leaves)))
    if value.requires_grad:                 # else the script's update has added the gradient
        value.sum().backward()
    return {"value": value.detach()} | {name: leaf.grad for name, leaf in leaves.items()
                                        if leaf.grad is not None and leaf.grad.any()}


def difference(a, b, floor=0.0):
    """Compute the largest relative difference. Numbers smaller than the floor, or than a thousandth
    of the largest number, are compared relative to that bound. It is infinite if only one of two
    numbers is nan. -> float"""
    if not torch.equal(a.isnan().expand_as(a + b), b.isnan().expand_as(a + b)):
        return float("inf")
    a, b = a.nan_to_num(), b.nan_to_num()
    floor = max(1e-3 * b.abs().max().item(), floor, 1e-300)
    size = torch.maximum(a.abs(), b.abs()).clamp(min=floor)
    return ((a - b).abs() / size).max().item()


def differences(mine, answer):
    """Compute the differences of values and of gradients; None if `answer` has no gradient. The
    terms of a loss can cancel, so a loss that is smaller than its gradient is compared relative to
    the gradient. -> [float, float or None]"""
    value = answer["value"]
    assert mine["value"].shape == value.shape, (mine["value"].shape, value.shape)
    size = 0.0
    if value.dim() == 0:
        size = max(tensor.abs().max().item() for tensor in answer.values())
    zero = torch.zeros(())
    gradients = [difference(mine.get(name, zero), answer.get(name, zero)) for name in LEAVES
                 if len(answer) > 1 and name in mine | answer]
    return [difference(mine["value"], value, size), most(gradients)]


def most(numbers):
    return max((number for number in numbers if number is not None), default=None)


def compare(row, peers, cases):
    """Run both sides of a row on all cases. -> the row with its largest differences, and with the
    results of their side"""
    answers = [outcome(peers, row["theirs"], x) for x in cases]
    result = dict(row)
    for name, text in (("difference", row["ours"]), ("with_that", row["but"])):
        if text:
            mine = [outcome(OURS, text, x) for x in cases]
            columns = zip(*map(differences, mine, answers))
            result[name] = [most(column) for column in columns]
    return result | {"answers": [{name: " ".join(f"{x:.9g}" for x in tensor.flatten().tolist())
                                 for name, tensor in answers[seed].items()} for seed in RECORDED]}


# ---- 3. whole steps --------------------------------------------------------------------------

STEPS = [(grpo, 1), (grpo, 2), (dpo, 1)]                # (script, number of SGD steps)


def whole_step(peers, run, script, num_steps):
    """Update the policy of a run with our script, and its export with TRL, on the same completions.
    -> a row for the table of steps"""
    cfg = script.Config(
        device="cpu", num_mini_batches=1, num_iterations=num_steps, num_prompts=16,
        max_completion_length=48, beta=0.1 if script is dpo else 0.04)
    policy, _ = export.read_policy(run, "checkpoint.pt")
    reference = copy.deepcopy(policy)
    batch = script.sample_batch(policy, common.load_task(cfg, script.verify), cfg, 0)
    if script is dpo:
        learned, base, theirs = dpo.preferences(batch.rewards), reference, peers.TRL_dpo_steps
    else:
        learned = [grpo.advantages(batch.rewards).view(-1, 1)]
        base, _ = grpo.score_reference(reference, batch, cfg)                   # (B, T)
        theirs = peers.TRL_grpo_steps
    learner = torch.optim.SGD(policy.parameters(), lr=cfg.learning_rate)
    script.update(policy, base, learner, batch, *learned, cfg, 0)
    weights = theirs(batch, *learned, cfg)
    ours = flat(policy.parameters())
    names = [export.llama_name(name) for name, _ in policy.named_parameters()]
    apart = ours - flat(weights[name] for name in names)
    moved = ours - flat(reference.parameters())
    return {"ours": f"{script.__name__}.py", "theirs": theirs.__name__.removesuffix("_steps"),
            "steps": num_steps, "moved": moved.abs().max().item(),
            "difference": apart.abs().max().item()}


# ---- 4. the page -----------------------------------------------------------------------------

def verdict(row):
    """Describe a row's result: "same", "same, except ..." or "different, because ...". -> str"""
    if most(row["difference"]) <= SAME:
        return "same"
    remaining = f" ({most(row['with_that']):.0e} if ours does the same)" if row["but"] else ""
    word = "same" if row["why"].startswith("except") else "different"
    return f"{word}, {row['why']}{remaining}"


def folded(title, text):
    """Write text that a reader has to unfold. -> str"""
    return f"<details><summary>{title}</summary>\n\n{text}\n</details>\n"


def tables(content):
    """Write the tables of the page, with the rows that agree folded. -> {name of a table: text}"""
    rows = []
    same = {}                           # what is compared -> {library: largest difference}
    for i, row in enumerate(content["rows"], 1):
        if verdict(row) == "same":
            cells = same.setdefault(row["what"], {})
            peer, _, _ = row["theirs"].partition(" ")
            worst = most([*row["difference"], float(cells.get(peer, 0))])
            cells[peer] = f"{worst:.0e}"
            continue
        cells = ["" if x is None else f"{x:.0e}" for x in row["difference"]]
        rows.append([
            i, verdict(row), row["what"], *cells, f"`{row['ours']}`", f"`{row['theirs']}`"])
    equal = len(content["rows"]) - len(rows)
    summary = (f"{equal} of {len(content['rows'])} comparisons agree to 1e-6 or better. These are "
               f"the other {len(rows)}:\n\n")
    agreeing = "".join(f"- {what}: {', '.join(f'{x} ({peer})' for peer, x in cells.items())}\n"
                       for what, cells in same.items())
    steps = [[step["ours"], step["theirs"], step["steps"], f"{step['moved']:.0e}",
              f"{step['difference']:.0e}"] for step in content["steps"]]
    heads = ["ours", "theirs", "steps", "largest change of a weight", "largest difference"]
    return {
        "rows": summary + table(
            ["row", "result", "quantity", "value", "gradient", "ours", "theirs"], rows)
        + "\n" + folded(f"The largest differences of the {equal} that agree", agreeing),
        "steps": table(heads, steps), "vectors": table_of_vectors(content["vectors"])}


def table_of_vectors(found):
    """Write what TRL and verl return for the test vectors: how many cases of each file are right,
    and which are wrong. -> str"""
    rows = []
    shares = {"TRL": [], "verl": []}
    conventions = {"TRL": [], "verl": []}
    wrong = []
    for name, cases in found.items():
        counts = []
        known = {case["id"]: case for case in vectors.read(name)["cases"]}
        for trainer in shares:
            answers = {case: one[trainer] for case, one in cases.items() if trainer in one}
            right = [answer == "right" for answer in answers.values()]
            counts.append(f"{sum(right)} of {len(right)}" if right else "")
            shares[trainer] += right
            for case, answer in answers.items():
                if answer != "right" and "convention" in known[case]:
                    conventions[trainer].append(f"{name} ({case})")
                elif answer != "right":
                    wrong.append([trainer, f"{name} ({case})", answer])
        rows.append([name, *counts])
    texts = [f"{trainer} agrees to 1e-6 in {sum(right)} of the {len(right)} cases for which it has "
             f"a function. These differ by convention, as the cases explain: "
             f"{', '.join(conventions[trainer])}.\n\n" for trainer, right in shares.items()]
    return ("".join(texts) + table(["trainer", "other differences", "the first one"], wrong)
            + "\n" + table(["file", *shares], rows))


def main():
    from lab.conform import theirs as peers  # imported here, because they need .venv-conform
    from lab.conform import vectors as of_vectors
    run = peers.EXPORTED.parent / "base"
    grpo.main(["--max_steps", "0", "--num_eval_problems", "8", "--output_dir", str(run)])
    export.export(run, peers.EXPORTED)
    steps = [whole_step(peers, run, *how) for how in STEPS]
    torch.set_default_dtype(torch.float64)
    cases = [draw(seed) for seed in range(NUM_DRAWS)]
    rows = [compare(row, peers.PEERS, cases) for row in tqdm(read_rows())]
    content = {"versions": peers.VERSIONS, "registered": peers.registered(), "steps": steps,
               "rows": rows, "vectors": of_vectors.results()}
    record("conformance", **content)
    for name, text in tables(content).items():
        put(name, text, "conform")


if __name__ == "__main__":
    start(main)
