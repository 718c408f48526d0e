"""Preference pairs in files: dpo.py --pairs FILE.jsonl reads one, dpo.py --save_pairs writes one.

Each line is a JSON object with three strings, {"prompt": "(3+4)=", "chosen": "<answer>7</answer>",
"rejected": "<answer>8</answer>"}. The end token of a completion is added when it is read. The run
folder keeps a copy of the file, and a resumed run uses this copy.
"""
import json
from pathlib import Path

import torch

import common
import plumbing
from tasks.problems import passes

COPY = "given-pairs.txt"
NAMES = ("prompt", "chosen", "rejected")


def attach(run, sample_batch):
    """Make the run learn from the pairs of --pairs, or write its own pairs for --save_pairs.
    -> the function that returns a batch: sample_batch, or one that takes the pairs of --pairs"""
    cfg = run.cfg
    if run.task.call_tokens:
        common.fail(f"--pairs, --save_pairs: {run.task.name} inserts text into completions, and a "
                    "file of pairs cannot mark it")
    run.observers.append(Given(cfg, run.task) if cfg.pairs else Saver())
    return run.observers[-1].sample_batch if cfg.pairs else sample_batch


class Given:
    """The pairs of --pairs. If the file has a bad line, exits with a message about the first."""

    def __init__(self, cfg, task):
        path = Path(cfg.resume_from_checkpoint or ".", COPY)            # the resumed run's copy
        if not (cfg.resume_from_checkpoint and path.is_file()):
            path = Path(cfg.pairs)
        try:
            self.text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            common.fail(f"--pairs {path}: cannot be read ({error})")
        self.pairs = []
        for number, line in enumerate(self.text.removesuffix("\n").split("\n"), start=1):
            try:
                self.pairs.append(check(json.loads(line), cfg, task))
            except (ValueError, RecursionError) as error:
                common.fail(f"--pairs {path}: line {number}: {error}")

    def start(self, run):
        plumbing.write(run.folder / COPY, self.text)
        held_out = sum(run.task.is_held_out(problem_of(pair, run.task)) for pair in self.pairs)
        if held_out > 0:
            print(f"pairs: {held_out} of {len(self.pairs)} have prompts that are held out for "
                  "evaluation")

    def sample_batch(self, policy, task, cfg, step):
        """Take the pairs of a step. Each is a group of two, chosen and rejected. -> Batch"""
        script = task.machinery
        n = cfg.num_prompts * (cfg.num_generations // 2)
        examples = []
        for pair in passes(self.pairs, step * n, n, cfg.seed):
            problem = problem_of(pair, task)
            examples += [problem._replace(completion=pair[name]) for name in NAMES[1:]]
        prompts, tokens, mask, lengths = common.encode_examples(examples, task, cfg.device)
        with torch.no_grad():
            logps, entropy = script.score(policy, prompts, tokens, cfg.temperature, cfg.kernel)
        none = torch.zeros(n, 2, dtype=torch.bool)      # (P, G)  not truncated, not judged right
        return common.Batch(
            tokens, mask, logps * mask, entropy * mask, lengths,
            none.flatten(), examples, prompts, [example.completion for example in examples],
            is_correct=none, rewards=torch.tensor([1.0, 0.0]).expand(none.shape))


class Saver:
    """Writes the pairs of each step to pairs.jsonl."""

    def step(self, run, batch, advantages, metrics):
        for pair in readable(batch, *run.task.machinery.preferences(batch.rewards)):
            run.append("pairs.jsonl", pair)


def readable(batch, chosen, rejected):
    """Make the pairs of these rows, (N,) each. Leaves out a pair if one of its texts would be read
    as different tokens, because the completion was truncated, isn't UTF-8, or spells out a special
    token. -> list of dicts"""
    rows = zip(batch.tokens.tolist(), batch.lengths.tolist(), batch.texts)
    is_readable = [ids[:n] == encode(text) for ids, n, text in rows]
    return [dict(zip(NAMES, (batch.problems[best].prompt, batch.texts[best], batch.texts[worst])))
            for best, worst in zip(chosen.tolist(), rejected.tolist())
            if is_readable[best] and is_readable[worst]]


def problem_of(pair, task):
    """Make a problem of the prompt of a pair; in a mix, a problem of the first task. -> Problem"""
    return common.Problem(pair["prompt"], "", task=task.name.split(",")[0])


def encode(text):
    """Encode a completion, and add its end token. -> list of token ids"""
    return [*common.TOKENIZER.encode(text, allowed_special="all"), common.EOS]


def check(pair, cfg, task):
    """Return the pair. Raises ValueError if it isn't one, or if it is too long for the task's
    prompts or the run's completions."""
    if not isinstance(pair, dict) or not all(isinstance(pair.get(name), str) for name in NAMES):
        raise ValueError(f"must be an object with the strings {', '.join(NAMES)}")
    if pair["chosen"] == pair["rejected"]:
        raise ValueError("chosen and rejected are the same")
    "".join(pair[name] for name in NAMES).encode()  # raises a ValueError for half a surrogate pair
    width = len(pair["prompt"].encode())
    if width > task.prompt_width:
        raise ValueError(f"the prompt has {width} bytes; {task.name} allows {task.prompt_width}")
    for name in NAMES[1:]:
        ids = encode(pair[name])
        if ids.count(common.EOS) > 1:
            raise ValueError(f"{name} contains <|eos|>; remove it, as it is added later")
        if len(ids) > cfg.max_completion_length:
            raise ValueError(f"{name} has {len(ids)} tokens, with its end token; "
                             f"--max_completion_length is {cfg.max_completion_length}")
    return pair
