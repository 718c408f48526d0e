"""Count the errors of report.check on runs on which its limits were not fixed.

  python -m lab.doctor            makes 30 correct and 30 broken runs, and prints what is found in
                                  how many (make doctor)
  python -m lab.doctor --seed 7   with other seeds; the page has those from 100 on
  python -m lab.doctor --rl-doctor PATH        also counts what rl-doctor warns of (pip install
                                  rldoctor==0.2.0, in an environment of its own), and writes the
                                  tables of docs/why.md (make doctor RL_DOCTOR=PATH)
"""
import contextlib
import functools
import json
import os
import subprocess

import torch

import measuring
from lab.docs import DOCS, ROOT, describe, load, measured, put, table
from report import parser, start
from report.check import check, parts
from report.formats import read
from vectors import edits

PUBLISHED = 100         # the first seed of the page
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
WRONG_ROWS = "batch.rewards, cfg.scale_rewards).to(cfg.device)"
BROKEN = {              # name: flags, old and new text of grpo.py, the parts of why.md that name it
    "the mask misses the first token": (
        "", "    mask = batch.mask[part, :T]\n    old_logps",
        "    mask = batch.mask[part, :T] * (torch.arange(T) > 0)\n    old_logps", {"flat"}),
    "rewards of another group": (
        "", WRONG_ROWS, WRONG_ROWS.replace("rewards,", "rewards.roll(1, 0),"), {"flat"}),
    "signs flipped in half of the rows": (
        "", WRONG_ROWS, f"{WRONG_ROWS} * (1 - 2 * (torch.arange(cfg.num_generations) % 2))",
        {"flat"}),
    "rewards flipped in half of the groups": (
        "", WRONG_ROWS, WRONG_ROWS.replace(
            "batch.rewards,", "(batch.rewards - torch.arange(cfg.num_prompts)[:, None] % 2).abs(),"
        ), {"flat"}),
    "old log-probs are not detached": (
        "", "logps - old_logps.detach(), 0.0", "logps - logps, 0.0", {"no-gradient"}),
    "samples at temperature 0.7": (
        "", "F.softmax(logits / temperature, dim=-1)", "F.softmax(logits / 0.7, dim=-1)",
        {"temperature", "rounding"}),
    "the end is not in the mask": (
        "", "return tokens, mask, logps, entropy, mask.sum(dim=1).long()",
        "return tokens, mask * (tokens != EOS), logps, entropy, mask.sum(dim=1).long()",
        {"rounding", "temperature"}),
    "a rate of 0.05": ("--learning_rate 0.05", "", "", {"rate"}),
    "a base that is never right": ("--base_steps 30", "", "", {"groups"}),
    "the reference is the policy": (
        "--beta 0.05", "reference = run.begin()", "run.begin()\n        reference = policy",
        {"unused"})}


RUNS, WARNS = "runs", "rl-doctor warns"
OF_CORRECT = (RUNS, "false alarms", WARNS)                      # what is counted of a case
OF_BROKEN = (RUNS, "named", "another cause", "no word", WARNS)


def examine(command, seed, old, new, program):
    """Make a run, with a change of its script's text. -> the parts of why.md that report.check
    names, and whether the program of rldoctor warns, if there is one"""
    torch.set_num_threads(1)
    file, *flags = f"{command} {COMMON}".split()
    text = (ROOT / file).read_text("utf-8")
    if old:
        text = edits.replace_once(text, old, new)
    script = edits.load(text, "doctor", ROOT / file)

    def main(words):
        with contextlib.suppress(SystemExit):           # of a run whose numbers are not finite
            script.main(words)
    return measuring.run(main, [*flags, "--seed", f"{seed}"], lambda folder: (
        parts(check(read(folder))), bool(program) and warns(program, folder)))


def measure(program, case, seed):
    """Make a run of a case, and judge what is found in it. -> {count: 0 or 1}, and the parts"""
    if case in CORRECT:
        found, warned = examine(CORRECT[case][0], seed, "", "", program)
        counts = {"false alarms": int(found != set())}
    else:
        flags, old, new, cause = BROKEN[case]
        found, warned = examine(f"grpo.py {flags}", seed, old, new, program)
        is_named = bool(found & cause)
        counts = {"named": int(is_named), "another cause": int(found != set() and not is_named),
                  "no word": int(found == set())}
    return {RUNS: 1} | counts | {"parts": sorted(found), WARNS: int(warned)}


def warns(program, folder):
    """Check if rl-doctor warns of anything in a run."""
    words = [program, "diagnose", f"{folder}/metrics.jsonl", "--format", "json"]
    answer = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return any(one["severity"] in ("WARNING", "CRITICAL") for one in json.loads(answer)["findings"])


def counted(results, cases, counts):
    """Count what was found in the runs of each case, and of all cases. -> rows"""
    rows = []
    for case in cases:
        found = [result for (other, _), result in results.items() if other == case]
        rows.append([case, *(sum(one[count] for one in found) for count in counts)])
    return [*rows, ["**all**", *map(sum, [*zip(*rows)][1:])]]


def tables(results):
    """Write what is found in correct and in broken runs. -> two tables in Markdown"""
    correct = counted(results, CORRECT, OF_CORRECT)
    for row in correct:
        named = {part for (case, _), result in results.items() if case == row[0]
                 for part in result["parts"]}
        row.insert(3, ", ".join(sorted(named)))
    broken = [[case, *counts] for case, _, *counts in counted(results, BROKEN, OF_BROKEN)]
    return (table(["correct runs", *OF_CORRECT[:2], "parts", WARNS], correct),
            table(["broken runs, three of each", *OF_BROKEN[1:]], broken))


def page():
    """Write the tables of docs/why.md from the stored numbers."""
    results, about = load("check", "run: make doctor RL_DOCTOR=PATH")
    put("check", "\n".join([*tables(results), f"{about['machine']}.\n"]), "doctor")


def main(argv=None):
    words = parser(__doc__)
    words.add_argument("--seed", type=int, metavar="S", default=PUBLISHED)
    words.add_argument("--rl-doctor", metavar="PATH", help="the program of rldoctor")
    args = words.parse_args(argv)
    numbers = {case: number for case, (_, number) in CORRECT.items()} | dict.fromkeys(BROKEN, 3)
    jobs = [(case, args.seed + i) for case, number in numbers.items() for i in range(number)]
    processes = os.cpu_count()
    store = measured("check", lambda _: jobs, functools.partial(measure, args.rl_doctor),
                     describe(processes) | {"seed": args.seed, "rl-doctor": bool(args.rl_doctor)},
                     processes)
    print(*tables(store.results), sep="\n")
    if args.seed == PUBLISHED and args.rl_doctor:
        store.move(DOCS / "check.json")
        page()
    else:
        store.path.unlink()


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    start(main)
