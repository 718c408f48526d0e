"""Use reward functions of your own: --reward_file FILE of pretrained/train.py.

They have TRL's form: lists with an entry for each completion go in, and such a list comes out.

  def brevity(prompts, completions, **columns):   # a reward; several are added up
      return [-len(text) / 100 for text in completions]
  def correct(prompts, completions, **columns):   # what counts as right; else the task decides
  def respond(prompts, completions, **columns):   # the texts to insert after one of call_tokens
  call_tokens = ["</search>"]
  reward_weights = [1.0]                          # a factor for each reward, in their order

`columns` are the keys of --data, completion_ids, trainer_state and, for rewards, the results of
`correct`. If a prompt is a conversation, its completion is a list of one message. One call gets all
completions of a prompt. A reward of None does not count; a completion without any gets the mean of
its group, which has no effect. Functions may be async. Classes, imports and _names are no rewards.
"""
import asyncio
import inspect
import json
import math
import symtable
import sys
import threading
import types
from pathlib import Path

import torch

import common
from pretrained import run as processes
from tasks import Wrapper
from tasks.problems import messages


class Own(Wrapper):
    """A task whose rewards, verdicts and responses come from the functions of a file. An error in
    the file ends the run with Python's message, because a reward of 0 would hide it."""

    def __init__(self, cfg, task):
        super().__init__(task)
        self.path = Path(cfg.reward_file).resolve()
        self.has_lines = cfg.data != ""
        self.columns = {"answer"} | (task.columns - {"prompt"} if self.has_lines else set())
        self.trainer_state = types.SimpleNamespace(global_step=0, max_steps=cfg.max_steps)
        self.loop = asyncio.new_event_loop()        # in a thread, because a notebook has one here
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        names = read(self.path)
        self.functions = {name: value for name, value in names.items() if callable(value)
                          and not inspect.isclass(value) and not name.startswith("_")}
        self.rewards = [name for name in self.functions if name not in ("correct", "respond")]
        self.weights = names.get("reward_weights", [1.0] * len(self.rewards))
        self.is_judged = task.is_judged or "correct" in self.functions
        calls = names.get("call_tokens", [])
        self.call_tokens = tuple(calls) or task.call_tokens
        if isinstance(calls, str) or bool(calls) != ("respond" in self.functions):
            self.fail("call_tokens, a list of texts, and respond need each other")
        if not self.rewards or len(self.weights) != len(self.rewards):
            self.fail(f"has the rewards {self.rewards}, with the reward_weights {self.weights}; "
                      "write a function such as def brevity(prompts, completions, **columns)")

    def lists(self, problems, texts, ids):
        """Make the arguments of a call. -> {name: list with an entry for each completion}"""
        rows = [{"answer": one.answer} | (json.loads(one.secret) if self.has_lines else {})
                for one in problems]
        columns = {name: [row.get(name) for row in rows] for name in self.columns}
        prompts = [messages(one.prompt) or one.prompt for one in problems]
        completions = [text if type(prompt) is str else [{"role": "assistant", "content": text}]
                       for prompt, text in zip(prompts, texts)]
        return columns | {"prompts": prompts, "completions": completions, "completion_ids": ids,
                          "trainer_state": self.trainer_state}

    def call(self, names, lists, is_good=None):
        """Call functions, those that are async side by side. Exits with one line if one does not
        return a list of as many good entries as there are completions. -> list of lists"""
        is_good = is_good or (lambda x: x is None or hasattr(x, "__float__") and math.isfinite(x))
        results = [self.functions[name](**lists) for name in names]
        results = asyncio.run_coroutine_threadsafe(finish(results), self.loop).result()
        n = len(lists["completions"])
        for name, result in zip(names, results):
            is_list = isinstance(result, list | tuple) and len(result) == n
            if not (is_list and all(map(is_good, result))):
                self.fail(f"{name} returned {result!r:.200}, not a list of {n} "
                          f"{'texts' if name == 'respond' else 'finite numbers, or None'}", code=1)
        return results

    def respond(self, problem, text):
        if "respond" not in self.functions:
            return self.task.respond(problem, text)
        lists = self.lists([problem], [text], [[]])
        return self.call(["respond"], lists, lambda x: type(x) is str)[0][0]

    def verify(self, problem, text):
        return self.verdicts([(problem, text)], self.lists([problem], [text], [[]]))[0]

    def verdicts(self, completions, lists):
        if "correct" in self.functions:
            [correct] = self.call(["correct"], lists)
        else:
            correct = [self.task.is_correct(problem, self.task.verdict(problem, *rest))
                       for problem, *rest in completions]
        return [float(x or 0) for x in correct]

    def rated(self, completions, ids):
        """Judge completions (problem, text, is truncated), and compute each reward.
        -> (n, 1 + number of rewards), verdicts first, nan for None"""
        problems, texts = zip(*(one[:2] for one in completions))
        lists = self.lists(problems, texts, ids)
        lists["correct"] = self.verdicts(completions, lists)
        rewards = [[math.nan if x is None else float(x) for x in values]
                   for values in self.call(self.rewards, lists)]
        return torch.tensor([lists["correct"], *rewards]).T

    def judge(self, batch, G, purpose):
        """Reward a batch. Each process does a share of the prompts, with all their completions."""
        if purpose != "evaluation":
            self.trainer_state.global_step = purpose
        P = len(batch.problems) // G
        share = processes.share(P)                                              # (p,)
        rows = (share[:, None] * G + torch.arange(G)).flatten().tolist()
        completions = [*zip(batch.problems, batch.texts, batch.is_truncated.tolist())]
        ids = [row[:n] for row, n in zip(batch.tokens.tolist(), batch.lengths.tolist())]
        rated = self.rated([completions[row] for row in rows], [ids[row] for row in rows])
        rated = processes.merged(rated.view(len(share), G, -1), P)  # (P, G, 1 + number of rewards)
        batch.verdicts = rated[..., 0].flatten().tolist()
        batch.is_correct = rated[..., 0] == 1
        self.means = rated[..., 1:].flatten(0, 1).nanmean(dim=0).tolist()
        values = rated[..., 1:] * torch.tensor(self.weights)
        is_rated = ~values.isnan().all(dim=-1)                                  # (P, G)
        sums = values.nansum(dim=-1).where(is_rated, math.nan)                  # (P, G)
        mean = sums.nanmean(dim=1, keepdim=True).nan_to_num()                   # (P, 1)
        batch.rewards = sums.where(is_rated, mean)
        return batch

    def observe(self, batch, step):
        means = {f"rewards/{name}/mean": x for name, x in zip(self.rewards, self.means)}
        return self.task.observe(batch, step) | {
            name: x for name, x in means.items() if not math.isnan(x)}

    def fail(self, problem, code=2):
        common.fail(f"--reward_file {self.path}: {problem}", code)


def read(path):
    """Execute a file, whose imports find the files next to it. Exits with one line if it is gone.
    -> what it defines, but does not import: {name: value}"""
    if not path.is_file():
        common.fail(f"--reward_file {path}: there is no such file")
    source = path.read_bytes()
    module = sys.modules["reward_file"] = types.ModuleType("reward_file")
    module.__file__ = str(path)
    sys.path.insert(0, str(path.parent))
    exec(compile(source, path, "exec"), vars(module))
    sys.path.remove(str(path.parent))
    sys.path.append(str(path.parent))               # for functions that import something
    symbols = symtable.symtable(source, str(path), "exec").get_symbols()
    defined = [one.get_name() for one in symbols if one.is_assigned() and not one.is_imported()]
    return {name: value for name, value in vars(module).items() if name in defined}


async def finish(results):
    """Wait for the results that are awaitable, all at the same time. -> list of results"""
    async def value(x):
        return await x if inspect.isawaitable(x) else x
    return await asyncio.gather(*map(value, results))
