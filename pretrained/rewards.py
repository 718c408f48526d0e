"""Use reward functions of your own: --reward_file FILE of pretrained/train.py.

If the rewards of --reward do not fit your problem, write your own. The file may define

  def brevity(completion, answer, **row): ...   # a reward; several are added up
  def form(completions, **columns): ...         # a reward in TRL's form, for several completions
  def correct(completion, answer, **row): ...   # what counts as right; else the task decides
  def respond(completion, answer, **row): ...   # the text to insert after one of the call_tokens
  call_tokens = ["</search>"]
  seconds = 60                                  # time limit of a call
  workers = 8                                   # largest number of processes that run the calls

Every callable is a reward, except `correct`, `respond`, classes, imports and _names. `row` contains
the prompt, all keys of the line of --data and, for rewards, the result of `correct`. A completion
does not contain what the prompt ends with, such as a <think> of the chat template, and in TRL's
form it has no special tokens. The result of a function must depend only on its arguments.
"""
import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Pipe
from pathlib import Path

import torch

import common
from pretrained import run as processes
from tasks import Wrapper

OF_TRL = {"prompts", "completions", "completion_ids"}   # parameters that mark TRL's functions
AT_ONCE = 16                                            # completions in a call of such a function


class Own(Wrapper):
    """A task whose rewards, verdicts and responses come from the functions of a file."""

    def __init__(self, cfg, task):
        super().__init__(task)
        self.has_lines = cfg.data != ""
        self.workers = Workers(cfg.reward_file)
        self.functions = self.workers.about["functions"]
        self.rewards = [name for name in self.functions if name not in ("correct", "respond")]
        self.is_judged = task.is_judged or "correct" in self.functions
        calls = self.workers.about["call_tokens"]
        if bool(calls) != ("respond" in self.functions):
            self.workers.fail("call_tokens, a list of texts, and respond need each other")
        if calls:
            self.call_tokens = tuple(calls)
        if not self.rewards:
            self.workers.fail("has no reward function; see pretrained/rewards.py")
        for name, parameters in self.functions.items():
            known = set(OF_TRL if OF_TRL & parameters.keys() else ("prompt", "completion"))
            known |= {"answer", *(["correct"] if name in self.rewards else [])}
            known |= task.columns if self.has_lines else set()
            for parameter, is_required in parameters.items():
                if is_required and parameter not in {"**", *known}:
                    self.workers.fail(f"{name} requires {parameter}; a call can give it "
                                      f"{', '.join(sorted(known))}, each by its name")

    def row(self, problem, text, ids, plain=None, is_truncated=False):
        """Collect the arguments that a function may take, for one completion. `plain` is its text
        without special tokens, for functions in TRL's form. -> dict"""
        line = {"prompt": problem.prompt, "answer": problem.answer}
        if self.has_lines:
            line = {"answer": ""} | json.loads(problem.secret)
        return line | {"completion": text, "completion_ids": ids,
                       "plain": text if plain is None else plain}

    def calls(self, name, rows):
        """List the calls of a function for some rows: one call per row, or one for up to 16 rows if
        the function has TRL's parameters. -> list of (name, arguments, n); n is the length of the
        list of rewards that the call returns, or 0 if it returns a single reward"""
        parameters = self.functions[name].keys()
        calls = [({key: row[key] for key in row if key not in ("completion_ids", "plain")}, 0)
                 for row in rows]
        if OF_TRL & parameters:
            parts = [rows[i:i + AT_ONCE] for i in range(0, len(rows), AT_ONCE)]
            calls = [(columns(part), len(part)) for part in parts]
        return [(name, {key: x for key, x in arguments.items() if {key, "**"} & parameters}, n)
                for arguments, n in calls]

    def respond(self, problem, text):
        if "respond" not in self.functions:
            return self.task.respond(problem, text)
        [(name, arguments, _)] = self.calls("respond", [self.row(problem, text, [])])
        return self.workers.run([(name, arguments, None)])[0]

    def verdicts(self, completions):
        if "correct" in self.functions:
            rows = [self.row(*completion) for completion in completions]
            return sum(self.workers.run(self.calls("correct", rows)), [])
        return [float(self.task.is_correct(problem, self.task.verdict(problem, text, *rest[1:])))
                for problem, text, _, *rest in completions]

    def rated(self, completions):
        """Judge completions (problem, text, token ids, plain text, is truncated) and compute the
        reward of each function; nan if a function in TRL's form returns None.
        -> (n, 1 + number of functions), verdicts first"""
        correct = self.verdicts(completions)
        rows = [self.row(*completion) | {"correct": value}
                for completion, value in zip(completions, correct)]
        calls = [call for name in self.rewards for call in self.calls(name, rows)]
        return torch.tensor(sum(self.workers.run(calls), correct)).view(-1, len(rows)).T

    def verify(self, problem, text):
        return self.verdicts([(problem, text, [])])[0]

    def judge(self, batch, G, purpose):
        """Reward a batch. Equal completions are judged once, and each process does its share. As in
        TRL, None counts as 0 in a sum, and a completion for which all functions return None has no
        advantage, because it gets the mean of its group."""
        rows = zip(batch.tokens.tolist(), batch.lengths.tolist())
        completions = list(zip(batch.problems, batch.texts, batch.is_truncated.tolist()))
        ids = dict(zip(completions, (row[:n] for row, n in rows)))
        share = [list(ids)[i] for i in processes.share(len(ids)).tolist()]
        share = [(problem, text, ids[problem, text, cut],
                  self.machinery.decode(ids[problem, text, cut], skip_special_tokens=True), cut)
                 for problem, text, cut in share]
        results = dict(zip(ids, processes.merged(self.rated(share), len(ids))))
        results = torch.stack([results[one] for one in completions])
        batch.verdicts = results[:, 0].tolist()
        batch.is_correct = (results[:, 0] == 1).view(-1, G)
        is_none = results[:, 1:].isnan().all(dim=1).view(-1, G)
        rewards = results[:, 1:].nansum(dim=1).view(-1, G)
        others = rewards.double().masked_fill(is_none, torch.nan)   # exact mean of equals
        mean = others.nanmean(dim=1, keepdim=True).nan_to_num().to(rewards)
        batch.rewards = torch.where(is_none, mean, rewards)
        self.means = results[:, 1:].nanmean(dim=0).tolist()
        return batch

    def observe(self, batch, step):
        return self.task.observe(batch, step) | {
            f"rewards/{name}/mean": mean for name, mean in zip(self.rewards, self.means)
            if not math.isnan(mean)}


def columns(rows):
    """Convert rows into the arguments of TRL's functions: a list for each column. A completion is a
    list with one message if its prompt is a list of messages. -> dict of lists"""
    keys = dict.fromkeys(sum(map(list, rows), []))
    lists = {key: [row.get(key) for row in rows] for key in keys}
    del lists["completion"]
    lists["prompts"] = lists.pop("prompt")
    lists["completions"] = [
        [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
        for prompt, text in zip(lists["prompts"], lists.pop("plain"))]
    return lists


class Workers:
    """Processes that have executed the file. Each calls its functions for one of our threads.
    `about` has the settings and functions of the file, from worker.describe."""

    def __init__(self, path):
        self.path = str(Path(path).resolve())
        self.processes = []
        self.about = {}
        try:
            self.about, pipe = self.start()
        except ValueError as error:
            self.fail(error)
        self.idle = [pipe]
        self.threads = ThreadPoolExecutor(self.about["workers"])

    def start(self):
        """Start a process without CUDA or our other modules. It gets a session of its own, so that
        Ctrl-C reaches only the run. ValueError if the file is bad. -> dict, pipe"""
        pipe, other = Pipe()
        worker, number = Path(__file__).with_name("worker.py"), other.fileno()
        self.processes.append(subprocess.Popen(
            [sys.executable, "-u", worker, self.path, str(number)], pass_fds=[number],
            stdin=subprocess.DEVNULL, start_new_session=True))
        other.close()
        return self.receive(pipe), pipe

    def receive(self, pipe, seconds=None):
        """Wait for the result of a call. ValueError if it fails or takes too long. -> result"""
        if not pipe.poll(seconds):
            raise ValueError(f"took longer than {seconds} seconds")
        try:
            result, error = pipe.recv()
        except EOFError:
            error = "its process has ended"
        if error:
            raise ValueError(error)
        return result

    def call(self, call):
        """Make a call in an idle process, or start one. ValueError if it fails. -> its result"""
        try:
            try:
                pipe = self.idle.pop()
            except IndexError:
                _, pipe = self.start()
            pipe.send(call)
            result = self.receive(pipe, self.about["seconds"])
            self.idle.append(pipe)
            return result
        except (ValueError, OSError) as error:
            row = json.dumps(call[1], default=str)[:1000]
            raise ValueError(f"{error} in {call[0]} of {row}") from None

    def run(self, calls):
        """Make calls (name, arguments, n) in parallel. Exits with one line if one fails, because a
        reward of 0 would hide the mistake. -> list of results, in the order of the calls"""
        try:
            return list(self.threads.map(self.call, calls))
        except (ValueError, SystemExit, KeyboardInterrupt) as error:    # the last two: Ctrl-C
            self.threads.shutdown(wait=False, cancel_futures=True)
            self.end()
            if isinstance(error, ValueError):
                self.fail(error, code=1)
            raise

    def end(self):
        """Kill the processes. A time limit of 0 stops threads that still make calls."""
        self.about["seconds"] = 0
        for process in self.processes:
            process.kill()

    def fail(self, message, code=2):
        self.end()
        common.fail(f"--reward_file {self.path}: {message}", code)
