"""The race: reach 95% greedy accuracy on arithmetic with the fewest sampled tokens (docs/race.md).

An entry trains a policy in a process of its own. This process samples for it, counts the tokens,
and evaluates the policy. The token ids of an entry are shuffled, so it cannot read its samples.
"""
import json
import multiprocessing
import pickle
import re
import runpy
from itertools import product
from pathlib import Path

import numpy
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import common
import grpo
from report import parser, start

GOAL = 0.95
LIMIT = 300_000         # tokens; a run that needs more counts as this many
MAX_REQUESTS = 3000     # samples and evaluations of a run, so that luck does not help
BASES = Path(__file__).with_name("race.npy")            # in float16; 0 to 2 are for tuning
FORBIDDEN = re.compile(
    r"\b(os|sys|io|pathlib|subprocess|importlib|pickle|open|load|exec|eval|getattr|globals|"
    r"__import__|plumbing|tasks|lab|held_out_problems|sample_problems|demonstration|rollout|"
    r"complete|sample_batch|evaluate)\b")


def play(pipe, entry, weights, options):
    """Run an entry. The process at the other end of the pipe samples and evaluates for it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = grpo.GPT(grpo.Config())
    vector_to_parameters(torch.tensor(weights), policy.parameters())

    def send(flags):
        pipe.send((flags, parameters_to_vector(policy.parameters()).detach().numpy()))

    def sample(num_prompts=32, num_generations=8, max_completion_length=48, temperature=1.0):
        send({"num_prompts": num_prompts, "num_generations": num_generations,
              "max_completion_length": max_completion_length, "temperature": temperature})
        return pickle.loads(pipe.recv())

    path, function = entry.split(":")
    runpy.run_path(path)[function](policy, sample, lambda: send(None), **options)


def race(entry, options, base, seed):
    """Run an entry until its policy reaches the goal. -> number of tokens that it sampled"""
    cfg = grpo.Config(seed=seed, device="cpu")
    task = common.load_task(cfg, grpo.verify)
    policy = grpo.GPT(cfg)
    order = torch.randperm(common.VOCAB_SIZE, generator=common.generator("race", base, seed))
    ids = order.argsort()               # maps our token ids to those of the entry
    vector_to_parameters(torch.tensor(numpy.load(BASES)[base]).float(), policy.parameters())
    policy.embed.weight.data = policy.embed.weight.data[order]
    given = parameters_to_vector(policy.parameters()).detach()
    pipe, end = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=play, args=(end, entry, given.numpy(), options), daemon=True)
    process.start()
    end.close()                         # so that recv fails if the process has ended
    tokens = 0
    for number in range(MAX_REQUESTS):
        flags, weights = pipe.recv()
        weights = torch.tensor(weights)
        if weights.shape != given.shape or tokens == 0 and not weights.equal(given):
            common.fail(f"{entry}: changed the policy's shape, or the policy before it sampled")
        vector_to_parameters(weights, policy.parameters())
        policy.embed.weight.data = policy.embed.weight.data[ids]
        if flags is None:               # an optimizer step is done
            if grpo.evaluate(policy, task, cfg, greedy=True)["greedy"] >= GOAL:
                break
        elif tokens >= LIMIT:
            break
        else:
            asked = grpo.Config(seed=seed, device="cpu", **flags)
            batch = grpo.sample_batch(policy, task, asked, number)
            tokens += int(batch.mask.sum())
            batch.tokens = ids[batch.tokens]
            batch.prompts = ids[batch.prompts]
            batch.problems = batch.texts = batch.verdicts = None
            pipe.send(pickle.dumps(batch))
    else:
        tokens = LIMIT
    process.kill()
    return min(tokens, LIMIT)


def main(argv=None):
    flags = parser(__doc__)
    flags.add_argument("entry", metavar="FILE.py:FUNCTION")
    flags.add_argument("--bases", type=int, nargs="+", default=[3, 4, 5, 6, 7])
    flags.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    flags.add_argument("--options", type=json.loads, default={}, help="arguments of FUNCTION, JSON")
    args = flags.parse_args(argv)
    path, _, function = args.entry.partition(":")
    if not function or not Path(path).is_file():
        common.fail(f"{args.entry}: must be FILE.py:FUNCTION")
    if word := FORBIDDEN.search(Path(path).read_text("utf-8")):
        common.fail(f"{args.entry}: may not contain the word {word[0]}")
    torch.set_num_threads(1)
    tokens = []
    for base, seed in product(args.bases, args.seeds):
        try:
            tokens.append(race(args.entry, args.options, base, seed))
        except EOFError:
            common.fail(f"{args.entry}: returned or failed before it reached the goal", 1)
        print(f"base {base}, seed {seed}: {tokens[-1]:,} tokens", flush=True)
    print(json.dumps(vars(args) | {"tokens": tokens}))
    mean = sum(tokens) / len(tokens)
    print(f"| {args.entry} | {mean:,.0f} | {min(tokens):,} to {max(tokens):,} |")


if __name__ == "__main__":
    start(main)
