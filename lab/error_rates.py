"""Count the errors of report.check on runs on which its limits were not fixed.

  python -m lab.error_rates            makes 30 correct and 30 broken runs, counts what is found in
                                       them, and writes tests/logs/README.md (make error-rates)

Each correct run has a seed of its own, which also makes its base, and so has each broken one; a
broken run may share its base with a correct one. What counts as a right answer, CAUSES, was
committed before a run was made.
"""
import contextlib
import math
import os

import torch

import measuring
from lab.docs import DOCS, ROOT, describe, load, measured, put, table
from report import parser, start
from report.check import check, parts
from report.formats import read
from vectors import edits

FIRST = 100             # seed; the others follow
COMMON = "--max_steps 25 --num_eval_problems 64 --num_eval_samples 2 --eval_steps 5 --device cpu"
SMALL = "--num_prompts 4 --num_generations 4"
CORRECT = {                                     # name: command, number of seeds
    "grpo": ("grpo.py", 3), "grpo, batches of 16": (f"grpo.py {SMALL}", 3),
    "grpo, dynamic sampling": ("grpo.py --dynamic_sampling 3", 2),
    "grpo, KL": ("grpo.py --beta 0.05", 2),
    "grpo, other loss": ("grpo.py --loss_type sapo --num_iterations 2", 1),
    "grpo, mixed levels": ("grpo.py --task arithmetic:3-7 --curriculum", 2),
    "grpo, lookup": ("grpo.py --task lookup", 2),
    "grpo, format": ("grpo.py --reward accuracy+format", 1),
    "gspo": ("gspo.py", 2), "reinforce": ("reinforce.py --baseline rloo", 2),
    "ppo": ("ppo.py", 2), "ppo, gridworld": ("ppo.py --task gridworld", 1),
    "dpo": ("dpo.py", 2), "online dpo": ("dpo.py --online", 1),
    "lag, corrected": (
        "examples/lag.py --sampler_lag 2 --importance_sampling_correction truncate", 1),
    "zoo": ("examples/zoo.py --loss_type gmpo", 1),
    "self-distillation": ("examples/distill.py --task key --teacher self", 2)}
BROKEN = {              # name: flags, old and new text of grpo.py
    "dropout while it learns": (
        "", "reference = run.begin(sample_batch)", """reference = run.begin(sample_batch)
        for block in policy.blocks:
            block.register_forward_hook(
                lambda block, inputs, x: F.dropout(x, 0.1, torch.is_grad_enabled()))"""),
    "padding counts as tokens": (
        "", "return tokens, mask, logps, entropy, lengths",
        "return tokens, torch.ones_like(mask), logps, entropy, lengths"),
    "the schedule ends after three steps": (
        "", "        optimizer.step()\n",
        "        optimizer.param_groups[0]['lr'] = cfg.learning_rate * max(0.0, 1 - step / 3)\n"
        "        optimizer.step()\n"),
    "greedy samples": (
        "", "    if uniforms is None:\n        return logits.argmax(dim=-1)\n",
        "    return logits.argmax(dim=-1)\n"),
    "the reward accepts any number": (
        "", "    return given\n", """
    return float(re.search("<answer>[0-9]+</answer>", text) is not None)
"""),
    "an answer may not end": (
        "", "    if uniforms is None:\n        return logits.argmax",
        "    logits = logits.index_fill(-1, torch.tensor([EOS]), -torch.inf)\n"
        "    if uniforms is None:\n        return logits.argmax"),
    "each character costs 0.02": (
        "", "    return given\n", "    return given - 0.02 * len(text)\n"),
    "the base is evaluated, not the policy": (
        "", "run.start(evaluate,",
        "run.start(lambda _, *rest, **flags: evaluate(reference, *rest, **flags),"),
    "the KL pushes away from the base": (
        "--beta 0.2", "token_loss + cfg.beta * token_kl", "token_loss - cfg.beta * token_kl"),
    "the reference has random weights": (
        "--beta 0.1", "reference = run.begin(sample_batch)",
        "run.begin(sample_batch)\n        reference = GPT(cfg).to(cfg.device)")}
CAUSES = {              # the parts of why.md, besides "flat", that an expert would look at
    "dropout while it learns": {"rounding", "temperature", "stale"},
    "padding counts as tokens": {"rounding", "temperature", "turns"},
    "the schedule ends after three steps": {"no-gradient", "unused"},
    "greedy samples": {"groups", "temperature"},
    "the reward accepts any number": {"groups", "held-out"},
    "an answer may not end": {"groups", "rounding", "temperature"},
    "each character costs 0.02": {"thoughts", "held-out"},
    "the base is evaluated, not the policy": {"held-out", "adapter", "stale"},
    "the KL pushes away from the base": {"rate", "held-out"},
    "the reference has random weights": {"rate"}}


OF_CORRECT = ("runs", "false alarms", "parts")          # what is counted of a case
OF_BROKEN = ("named", "only flat", "another cause", "no word")


def examine(command, seed, old, new):
    """Make a run, with a change of its script's text. -> parts of why.md that report.check names"""
    torch.set_num_threads(1)
    file, *flags = f"{command} {COMMON}".split()
    text = (ROOT / file).read_text("utf-8")
    if old:
        text = edits.replace_once(text, old, new)
    script = edits.load(text, "error_rates", ROOT / file)

    def main(words):
        with contextlib.suppress(SystemExit):           # of a run whose numbers are not finite
            script.main(words)
    seeds = ["--seed", f"{seed}", "--base_seed", f"{seed}"]
    return measuring.run(main, [*flags, *seeds], lambda folder: parts(check(read(folder))))


def measure(case, seed):
    """Make a run of a case. -> {"parts": those of why.md that report.check names}"""
    if case in CORRECT:
        command, _ = CORRECT[case]
        old = new = ""
    else:
        flags, old, new = BROKEN[case]
        command = f"grpo.py {flags}"
    return {"parts": sorted(examine(command, seed, old, new))}


def judge(found, causes):
    """Judge what was found in a broken run. -> one of OF_BROKEN"""
    if causes & {*found}:
        return "named"
    if "flat" in found:
        return "only flat"
    return "another cause" if found else "no word"


def wilson(hits, runs):
    """Compute the 95% interval of a rate (Wilson's). -> str"""
    z = 1.96
    middle = (hits + z * z / 2) / (runs + z * z)
    half = z * math.sqrt(hits * (runs - hits) / runs + z * z / 4) / (runs + z * z)
    return f"{max(0, middle - half):.0%} to {min(1, middle + half):.0%}"


def interval(kinds, runs, sums):
    """Compute the intervals of sums over runs, whose kinds count, because the runs of a kind fare
    alike. -> row of a table"""
    return ["95% interval, by kind", "", *("" if hits == "" else wilson(hits / runs * kinds, kinds)
                                           for hits in sums)]


def found_in(results, case):
    """List what was found in each run of a case."""
    return [result["parts"] for (other, _), result in results.items() if other == case]


def of_correct(results):
    """Count the correct runs of each case in which anything is found. -> table in Markdown"""
    rows = []
    for case in CORRECT:
        found = found_in(results, case)
        named = sorted({part for parts in found for part in parts})
        rows.append([case, len(found), sum(map(bool, found)), ", ".join(named)])
    runs, alarms = (sum(row[i] for row in rows) for i in (1, 2))
    rows.append(["**all**", runs, alarms, ""])
    rows.append(interval(len(CORRECT), runs, [alarms, ""]))
    return table(["correct runs", *OF_CORRECT], rows)


def of_broken(results):
    """Count how the broken runs of each case are judged. -> table in Markdown"""
    rows = []
    for case in BROKEN:
        judged = [judge(found, CAUSES[case]) for found in found_in(results, case)]
        rows.append([case, len(judged), *map(judged.count, OF_BROKEN)])
    runs, *sums = map(sum, zip(*(row[1:] for row in rows)))
    rows.append(["**all**", runs, *sums])
    rows.append(interval(len(BROKEN), runs, sums))
    return table(["broken runs", "runs", *OF_BROKEN], rows)


def numbered(numbers):
    """Number runs of each case, so that all cases come once before one comes twice. -> jobs"""
    cases = [case for i in range(max(numbers.values())) for case in numbers if numbers[case] > i]
    return [(case, FIRST + i) for i, case in enumerate(cases)]


def jobs():
    """List a broken run and a correct one in turn. -> jobs"""
    correct = numbered({case: number for case, (_, number) in CORRECT.items()})
    return [job for pair in zip(numbered(dict.fromkeys(BROKEN, 3)), correct) for job in pair]


def page():
    """Write the tables of tests/logs/README.md from the stored numbers."""
    results, about = load("check", "run: make error-rates")
    tables = [of_correct(results), of_broken(results), f"{about['machine']}.\n"]
    put("check", "\n".join(tables), "error-rates")


def main(argv=None):
    words = parser(__doc__)
    words.add_argument("--processes", type=int, metavar="N", default=os.cpu_count())
    processes = words.parse_args(argv).processes
    about = describe(processes) | {"seed": FIRST}
    store = measured("check", lambda _: jobs(), measure, about, processes)
    store.move(DOCS / "check.json")
    page()


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    start(main)
