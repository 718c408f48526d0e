"""Compare TRL and verl with the test vectors, and TRL's optimizer steps with ours: make conform.

Our functions return the right answers of the vectors, which tests/test_vectors.py checks, and
theirs.py gives the same inputs to the functions of TRL and verl. This file also updates a policy
with our scripts and with TRL's trainers. It writes docs/conformance.json, which the tests read, and
the tables of docs/conformance.md. To compare more, add a case to a file of vectors; a new method
also needs a row in a table of theirs.py, such as TRL_LOSSES.
"""
import copy
from collections import Counter

import torch
from torch.nn.utils import parameters_to_vector as flat

import common
import dpo
import grpo
import vectors
from lab.docs import put, record, table
from lab.measure import make_base
from pretrained import export
from report import start

STEPS = [(grpo, 1), (grpo, 2), (dpo, 1)]                # (script, number of SGD steps)
TRAINERS = ("TRL", "verl")


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


def tables(content):
    """Write the tables of the page. -> {name of a table: text}"""
    counts = []
    disputed = []                       # cases with a convention
    wrong = []                          # other cases that a trainer gets wrong
    shares = {trainer: [] for trainer in TRAINERS}
    for name in vectors.files():
        found = content["vectors"].get(name, {})
        for case in vectors.read(name)["cases"]:
            answers = found.get(case["id"], {})
            place = f"{name} ({case['id']})"
            if answers and "convention" in case:
                words = {"right": "same", None: ""}
                cells = [words.get(answers.get(trainer), "different") for trainer in TRAINERS]
                disputed.append([place, *cells, case["convention"]])
            else:
                wrong += [[trainer, place, answer] for trainer, answer in answers.items()
                          if answer != "right"]
        row = [name]
        for trainer in TRAINERS:
            right = [one[trainer] == "right" for one in found.values() if trainer in one]
            shares[trainer] += right
            row.append(f"{sum(right)} of {len(right)}" if right else "")
        if found:
            counts.append(row)
    wrongs = Counter(trainer for trainer, *_ in wrong)
    summary = " ".join(
        f"{trainer} agrees to 1e-6 in {sum(right)} of the {len(right)} cases for which it has a "
        f"function; of the others, {len(right) - sum(right) - wrongs[trainer]} are conventions and "
        f"{wrongs[trainer]} are wrong numbers." for trainer, right in shares.items())
    steps = [[step["ours"], step["theirs"], step["steps"], f"{step['moved']:.0e}",
              f"{step['difference']:.0e}"] for step in content["steps"]]
    return {
        "vectors": f"{summary}\n\n" + table(["file", *TRAINERS], counts),
        "conventions": table(["case", *TRAINERS, "who does what"], disputed),
        "wrong": table(["trainer", "case", "the first wrong number"], wrong),
        "steps": table(["ours", "theirs", "steps", "largest change of a weight",
                        "largest difference"], steps)}


def main():
    from lab.conform import theirs as peers  # imported here, because they need .venv-conform
    run, _ = make_base(peers.EXPORTED.parent)
    steps = [whole_step(peers, run, *how) for how in STEPS]
    torch.set_default_dtype(torch.float64)
    content = {"versions": peers.VERSIONS, "steps": steps, "vectors": peers.results()}
    record("conformance", **content)
    for name, text in tables(content).items():
        put(name, text, "conform")


if __name__ == "__main__":
    start(main)
