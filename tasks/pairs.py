"""Preference pairs in files: dpo.py --pairs FILE.jsonl reads one, dpo.py --save_pairs writes one.

Each line is a JSON object with three strings, {"prompt": "(3+4)=", "chosen": "<answer>7</answer>",
"rejected": "<answer>8</answer>"}; the end of a completion is added. The run folder keeps a copy,
with which a run that is resumed goes on.
"""
import json
from pathlib import Path

import torch

import common
from tasks.problems import passes

COPY = "given-pairs.txt"
NAMES = ("prompt", "chosen", "rejected")


def attach(run, sample_batch):
    """Have the run learn from the pairs of --pairs, or write those that it makes for --save_pairs.
    -> what takes the place of sample_batch, or sample_batch"""
    cfg = run.cfg
    if run.task.call_tokens:
        common.fail(f"--pairs, --save_pairs: {run.task.name} inserts text into completions, and a "
                    "file does not say where")
    run.observers.append(Given(cfg, run.task) if cfg.pairs else Saver())
    return run.observers[-1].sample_batch if cfg.pairs else sample_batch


class Given:
    """The pairs of --pairs. Exits with one line about the first line of the file that is bad."""

    def __init__(self, cfg, task):
        path = Path(cfg.resume_from_checkpoint or ".", COPY)            # as it was then
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
        common.write(run.folder / COPY, self.text)
        held_out = sum(run.task.is_held_out(asked(pair, run.task)) for pair in self.pairs)
        if held_out > 0:
            print(f"pairs: {held_out} of {len(self.pairs)} have a prompt of the evaluations")

    def sample_batch(self, policy, task, cfg, step):
        """The pairs of a step, each a group of the chosen and the rejected completion. -> Batch"""
        script = task.machinery
        n = cfg.num_prompts * (cfg.num_generations // 2)
        examples = []
        for pair in passes(self.pairs, step * n, n, cfg.seed):
            problem = asked(pair, task)
            examples += [problem._replace(completion=pair[name]) for name in NAMES[1:]]
        prompts, tokens, mask, lengths = script.encode_examples(examples, task, cfg.device)
        with torch.no_grad():
            logps, entropy = script.score(policy, prompts, tokens, cfg.temperature, cfg.kernel)
        nowhere = torch.zeros(n, 2, dtype=torch.bool)                           # (P, G)
        return common.Batch(
            tokens, mask, logps * mask, entropy * mask, lengths,
            nowhere.flatten(), examples, prompts, [example.completion for example in examples],
            is_correct=nowhere, rewards=torch.tensor([1.0, 0.0]).expand(nowhere.shape))


class Saver:
    """Writes the pairs of each step to pairs.jsonl, but for those with a completion whose text
    would be read as other tokens: it has no end, is no UTF-8, or spells a special token."""

    def step(self, run, batch, advantages, metrics):
        script = run.task.machinery
        rows = zip(batch.tokens.tolist(), batch.lengths.tolist(), batch.texts)
        can_be_read = [ids[:n] == encode(text, script) for ids, n, text in rows]
        chosen, rejected = script.preferences(batch.rewards)
        for best, worst in zip(chosen.tolist(), rejected.tolist()):
            if can_be_read[best] and can_be_read[worst]:
                texts = (batch.problems[best].prompt, batch.texts[best], batch.texts[worst])
                run.append("pairs.jsonl", dict(zip(NAMES, texts)))


def asked(pair, task):
    """The prompt of a pair, in a mix as one of the first task. -> Problem"""
    return common.Problem(pair["prompt"], "", task=task.name.split(",")[0])


def encode(text, script):
    """The token ids of a completion, its end included. -> list"""
    return [*script.TOKENIZER.encode(text, allowed_special="all"), script.EOS]


def check(pair, cfg, task):
    """The pair itself. ValueError if it is none, or does not fit into the task's prompts or the
    completions of the run."""
    if not isinstance(pair, dict) or not all(isinstance(pair.get(name), str) for name in NAMES):
        raise ValueError(f"must be an object with the strings {', '.join(NAMES)}")
    if pair["chosen"] == pair["rejected"]:
        raise ValueError("chosen and rejected are the same")
    "".join(pair[name] for name in NAMES).encode()          # half a surrogate pair raises here
    width = len(pair["prompt"].encode())
    if width > task.prompt_width:
        raise ValueError(f"a prompt of {width} bytes; {task.name} has {task.prompt_width}")
    for name in NAMES[1:]:
        ids = encode(pair[name], task.machinery)
        if ids.count(task.machinery.EOS) > 1:
            raise ValueError(f"{name} contains <|eos|>, which is added")
        if len(ids) > cfg.max_completion_length:
            raise ValueError(f"{name} has {len(ids)} tokens, its end included; "
                             f"--max_completion_length is {cfg.max_completion_length}")
    return pair
