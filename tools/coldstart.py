"""A cold start: python -m tools.coldstart RUN NEW lets the policy of a run learn from examples that
all show their work. Then python grpo.py --task TASK --init_from NEW begins where that ended.
"""
import argparse
import dataclasses
import json
import math
from pathlib import Path

import torch

import common
from tools import start
from tools.ask import load_policy, read_run
from tools.report import command

SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "intermediate_size")


def learn(script, policy, task, cfg):
    """The script's warm start, from now on with examples of the phase "cold_start" alone."""
    demonstration = task.demonstration
    task.demonstration = lambda rng, phase: demonstration(rng, "cold_start")
    script.warm_start(policy, task, cfg)


def main(argv=None):
    """Write the folder NEW, with a policy and the flags that say which shape it has."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = common.fail
    parser.add_argument("run", metavar="RUN", help="run folder whose policy learns")
    parser.add_argument("new", metavar="NEW", type=Path, help="folder that is made")
    parser.add_argument("--batches", type=int, default=40, help="optimizer steps [40]")
    parser.add_argument("--batch_size", type=int, default=4, help="examples in each [4]")
    parser.add_argument("--learning_rate", type=float, default=1e-3,
                        help="peak, of matrices 5 times it [1e-3]")
    args = parser.parse_args(argv)
    numbers = (args.batches, args.batch_size, args.learning_rate)
    if not all(0 < number < math.inf for number in numbers):
        common.fail("--batches, --batch_size and --learning_rate: must be above 0, and finite")
    script, cfg = read_run(args.run)
    task = common.load_task(cfg, script.verify)
    policy = load_policy(args.run, script, cfg)
    try:
        args.new.mkdir(parents=True)
    except OSError as error:
        common.fail(f"{args.new}: cannot be made ({error.strerror}); name a new folder")

    name, flags = common.read_config(args.run)
    torch.set_num_threads(cfg.num_threads)
    learn(script, policy, task, dataclasses.replace(
        cfg, base_steps=args.batches, base_batch_size=args.batch_size,
        base_learning_rate=args.learning_rate, base_seed=cfg.base_seed + 1))    # other examples
    record = {"script": name, "torch": torch.__version__, "config": flags}
    common.write(args.new / "config.json", json.dumps(record, indent=2))
    common.write(args.new / "checkpoint.pt", {"policy": policy.state_dict()})
    needed = {flag: flags[flag] for flag in ("task", *SHAPE)}
    print(command(name, needed | {"init_from": str(args.new)}))


if __name__ == "__main__":
    start(main)
