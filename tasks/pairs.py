"""Preference pairs in a file: dpo.py --pairs FILE.jsonl.

Each line is a JSON object with three strings, {"prompt": "(3+4)=", "chosen": "<answer>7</answer>",
"rejected": "<answer>8</answer>"}; the end of a completion is added. dpo.py --save_pairs writes such
a file. The run folder keeps a copy, with which a run that is resumed goes on.
"""
import json
from pathlib import Path

import torch

import common

NAMES = ("prompt", "chosen", "rejected")


def load(cfg, task, encode_examples, score):
    """sample(policy, task, cfg, step) -> Batch, of the pairs of --pairs; encode_examples and score
    are the script's. Exits with one line about the first line of the file that is malformed."""
    path = Path(cfg.resume_from_checkpoint or "", common.GIVEN_PAIRS)       # as it was then
    if not cfg.resume_from_checkpoint:
        path = Path(cfg.pairs)
        if path.exists() and not path.is_file():
            common.fail(f"--pairs {path}: is no file")
    pairs = []
    try:
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    pairs.append(check(json.loads(line), cfg, task, encode_examples))
                except (ValueError, RecursionError) as error:
                    common.fail(f"--pairs {path}: line {number}: {error}")
    except OSError as error:
        common.fail(f"--pairs {path}: cannot be read ({error.strerror})")
    if not pairs:
        common.fail(f"--pairs {path}: has no lines")
    name = task.name.split(",")[0]          # of a mix, one task, so that all can be asked of it
    asked = [common.Problem(pair["prompt"], "", task=name) for pair in pairs]
    held_out = sum(task.is_held_out(problem) for problem in asked)
    if held_out:
        print(f"pairs: {held_out} of {len(pairs)} have a prompt that is held out for evaluations")

    def sample_batch(policy, task, cfg, step):
        """The pairs of a step, each a group of the chosen and the rejected completion. -> Batch"""
        picked = pick(pairs, cfg.num_prompts * (cfg.num_generations // 2), cfg.seed, step)
        problems = [common.Problem(pair["prompt"], "", task=name)
                    for pair in picked for _ in range(2)]
        texts = [pair[name] for pair in picked for name in ("chosen", "rejected")]
        examples = list(zip(problems, texts))
        prompts, tokens, mask, lengths = encode_examples(examples, task, cfg)
        with torch.no_grad():
            logps, entropy = score(policy, prompts, tokens, cfg.temperature, cfg.kernel)
        nowhere = torch.zeros(len(texts), dtype=torch.bool)
        return common.Batch(
            tokens, mask, logps * mask, entropy * mask, lengths, problems, prompts, texts,
            verdicts=[0.0] * len(texts), rewards=torch.tensor([[1.0, 0.0]]).repeat(len(picked), 1),
            is_correct=nowhere.view(-1, 2), is_truncated=nowhere, pass_rates={})

    return sample_batch


def check(pair, cfg, task, encode_examples):
    """The pair itself. ValueError if it is none, or does not fit into the task's prompts or the
    completions of the run."""
    if not isinstance(pair, dict) or not all(isinstance(pair.get(name), str) for name in NAMES):
        raise ValueError(f"must be an object with the strings {', '.join(NAMES)}")
    if pair["chosen"] == pair["rejected"]:
        raise ValueError("chosen and rejected are the same")
    sizes = {name: len(pair[name].encode()) for name in NAMES}      # what is no text raises here
    if sizes["prompt"] > task.prompt_width:
        raise ValueError(f"a prompt of {sizes['prompt']} bytes; "
                         f"{task.name} has at most {task.prompt_width}")
    problem = common.Problem(pair["prompt"], "")
    for name in ("chosen", "rejected"):
        if "<|eos|>" in pair[name]:
            raise ValueError(f"{name} contains <|eos|>, which ends a completion by itself")
        *_, lengths = encode_examples([(problem, pair[name])], task, cfg)
        if lengths[0] > cfg.max_completion_length:
            raise ValueError(f"{name} has {lengths[0]} tokens, its end included; "
                             f"--max_completion_length is {cfg.max_completion_length}")
    return {name: pair[name] for name in NAMES}


def pick(pairs, n, seed, step):
    """The pairs of a step: n of them, in a shuffled order that begins anew when all were picked. A
    function of the arguments. -> list"""
    first = step * n
    shuffles = range(first // len(pairs), (first + n - 1) // len(pairs) + 1)
    orders = [torch.randperm(len(pairs), generator=common.generator(seed, "pairs", shuffle))
              for shuffle in shuffles]
    start = first % len(pairs)
    return [pairs[i] for i in torch.cat(orders)[start:start + n].tolist()]
