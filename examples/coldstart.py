"""A cold start: train the policy of a run on a few examples that all show their work.

RL makes thinking more likely only if the policy sometimes thinks. After a cold start, it does:
python -m examples.coldstart RUN NEW writes the new policy to the folder NEW, and
python grpo.py --task TASK --init_from NEW continues with RL.
"""
import dataclasses
import json
from pathlib import Path

import common  # isort: split

import torch

import plumbing
from report import parser, start
from report.ask import load_policy, load_task, read_run
from report.page import command

SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "intermediate_size")


def main(argv=None):
    arguments = parser(__doc__)
    arguments.add_argument("run", metavar="RUN", help="folder of the run whose policy learns")
    arguments.add_argument("new", metavar="NEW", type=Path, help="folder to write")
    arguments.add_argument("--batches", type=int, default=40,
                           help="number of batches of 4 examples [40]")
    args = arguments.parse_args(argv)
    if args.batches < 1:
        common.fail(f"--batches {args.batches}: must be at least 1")
    if args.new.exists():
        common.fail(f"{args.new}: exists already; name a new folder")
    script, cfg = read_run(args.run)
    task = load_task(args.run, script, cfg)
    policy = load_policy(args.run, script, cfg)

    # run the script's warm start, but with every example from the phase cold_start
    demonstration = task.demonstration
    task.demonstration = lambda rng, phase: demonstration(rng, "cold_start")
    plumbing.fix_arithmetic()
    plumbing.warm_start(policy, task, dataclasses.replace(
        cfg, base_steps=args.batches, base_batch_size=4, base_learning_rate=1e-3,
        base_seed=cfg.base_seed + 1))                   # so examples differ from the base's

    name, flags = plumbing.read_config(args.run)
    record = {"script": name, "torch": torch.__version__, "config": flags}
    plumbing.write(args.new / "checkpoint.pt", {"policy": policy.state_dict()})
    plumbing.write(args.new / "config.json", json.dumps(record, indent=2))
    needed = {flag: flags[flag] for flag in ("task", *SHAPE)}
    print(command(name, needed | {"init_from": str(args.new)}))


if __name__ == "__main__":
    start(main)
