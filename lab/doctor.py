"""Count the errors of report.check on runs on which its limits were not fixed.

  python -m lab.doctor            makes 30 correct and 30 broken runs, and prints what is found in
                                  how many (make doctor)
  python -m lab.doctor --seed 7   with other seeds; the page has those from 100 on
  python -m lab.doctor --rl-doctor PATH        also counts what rl-doctor warns of (pip install
                                  rldoctor==0.2.0, in an environment of its own), and writes the
                                  tables of docs/why.md (make doctor RL_DOCTOR=PATH)
"""
import collections
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import types

import torch

from lab.bench import make_pool
from lab.docs import MACHINE, ROOT, put, record, table
from report import parser, start
from report.check import check, parts
from report.formats import read

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


def examine(name, command, seed, old, new, program):
    """Make a run, with a change of its script's text. -> the parts of why.md that report.check
    names, and whether the program of rldoctor warns, if there is one"""
    torch.set_num_threads(1)
    file, *flags = f"{command} {COMMON}".split()
    text = (ROOT / file).read_text("utf-8")
    if old:
        assert text.count(old) == 1, f"{name}: {old!r} is not in {file} exactly once"
        text = text.replace(old, new)
    script = sys.modules["doctor"] = types.ModuleType("doctor")
    script.__file__ = str(ROOT / file)
    exec(compile(text, file, "exec"), vars(script))
    with tempfile.TemporaryDirectory() as work:
        folder = f"{work}/run"
        with contextlib.redirect_stdout(None), contextlib.suppress(SystemExit):
            script.main([*flags, "--seed", str(seed), "--output_dir", folder])
        return parts(check(*read(folder))), bool(program) and warns(program, folder)


def warns(program, folder):
    """Check if rl-doctor warns of anything in a run."""
    words = [program, "diagnose", f"{folder}/metrics.jsonl", "--format", "json"]
    answer = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return any(one["severity"] in ("WARNING", "CRITICAL") for one in json.loads(answer)["findings"])


def tables(first, program):
    """Make all runs, and count what is found, also by rl-doctor if there is a program. -> two
    tables in Markdown, counts"""
    jobs = [(name, command, first + i, "", "", program)
            for name, (command, n) in CORRECT.items() for i in range(n)]
    jobs += [(name, f"grpo.py {flags}", first + i, old, new, program)
             for name, (flags, old, new, _) in BROKEN.items() for i in range(3)]
    found = collections.defaultdict(list)
    with make_pool(os.cpu_count()) as pool:
        for (name, *_), results in zip(jobs, pool.map(examine, *zip(*jobs))):
            found[name].append(results)
    alarms, named = [], []
    for name, results in found.items():
        causes, warnings = zip(*results)
        if name in CORRECT:
            alarms.append([name, len(causes), sum(map(bool, causes)),
                           ", ".join(sorted(set.union(*causes))), sum(warnings)])
        else:
            hits = sum(bool(one & BROKEN[name][-1]) for one in causes)
            none = causes.count(set())
            named.append([name, hits, len(causes) - hits - none, none, sum(warnings)])
    total = lambda rows, i: sum(row[i] for row in rows)
    sums = ["**all**", total(alarms, 1), total(alarms, 2), "", total(alarms, 4)]
    of_broken = ["**all**", *(total(named, i) for i in (1, 2, 3, 4))]
    return (table(["correct runs", "runs", "false alarms", "parts", "rl-doctor warns"],
                  [*alarms, sums]),
            table(["broken runs, three of each", "named", "another cause", "no word",
                   "rl-doctor warns"], [*named, of_broken]),
            {"correct": alarms, "broken": named})


def main(argv=None):
    words = parser(__doc__)
    words.add_argument("--seed", type=int, metavar="S", default=PUBLISHED)
    words.add_argument("--rl-doctor", metavar="PATH", help="the program of rldoctor")
    args = words.parse_args(argv)
    correct, broken, counts = tables(args.seed, args.rl_doctor)
    print(correct, broken, sep="\n")
    if args.seed == PUBLISHED and args.rl_doctor:
        record("check", **counts)
        put("check", f"{correct}\n{broken}\n{MACHINE}.\n", "doctor")


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    start(main)
