"""Your own functions: --reward_file FILE of pretrained/train.py. The file may define

  def brevity(completion, answer, **row): ...   # a reward; several are added up
  def form(completions, **columns): ...         # a reward as TRL calls it, for several completions
  def correct(completion, answer, **row): ...   # what counts as right; else the task decides
  def respond(completion, answer, **row): ...   # the text to insert after one of the call_tokens
  call_tokens = ["</search>"]
  seconds = 60                                  # time limit of a call
  workers = 8                                   # largest number of processes that make calls

Every callable is a reward, except classes, imports and _names. `row` holds the prompt, all keys of
the line of --data and, for rewards, `correct`. Functions must depend on their arguments alone.
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
    """A task with the functions of a file."""

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
            self.workers.fail("has no function that rewards")
        for name, parameters in self.functions.items():
            known = set(OF_TRL if OF_TRL & parameters.keys() else ("prompt", "completion"))
            known |= {"answer", *(["correct"] if name in self.rewards else [])}
            known |= task.columns if self.has_lines else set()
            for parameter, is_required in parameters.items():
                if is_required and parameter not in {"**", *known}:
                    self.workers.fail(f"{name} requires {parameter}; a call can give it "
                                      f"{', '.join(sorted(known))}, each by its name")

    def row(self, problem, text, ids):
        """What a function gets for a completion. -> dict"""
        line = {"prompt": problem.prompt, "answer": problem.answer}
        if self.has_lines:
            line = {"answer": ""} | json.loads(problem.secret)
        return line | {"completion": text, "completion_ids": ids}

    def calls(self, name, rows):
        """The calls of a function for some rows: one for each row, or for up to 16 if the function
        has TRL's parameters. -> list of (name, arguments, number of rewards; 0: a single one)"""
        wanted = self.functions[name].keys()
        calls = [({key: row[key] for key in row if key != "completion_ids"}, 0) for row in rows]
        if OF_TRL & wanted:
            parts = [rows[i:i + AT_ONCE] for i in range(0, len(rows), AT_ONCE)]
            calls = [(columns(part), len(part)) for part in parts]
        return [(name, {key: x for key, x in arguments.items() if {key, "**"} & wanted}, n)
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
        return [float(self.task.is_correct(problem, self.task.verify(problem, text)))
                for problem, text, _ in completions]

    def rated(self, completions):
        """Whether completions (problem, text, token ids) are right, and what each function rewards;
        nan where one of TRL's returns None. -> (n, 1 + number of functions)"""
        correct = self.verdicts(completions)
        rows = [self.row(*completion) | {"correct": value}
                for completion, value in zip(completions, correct)]
        calls = [call for name in self.rewards for call in self.calls(name, rows)]
        return torch.tensor(sum(self.workers.run(calls), correct)).view(-1, len(rows)).T

    def verify(self, problem, text):
        return self.verdicts([(problem, text, [])])[0]

    def judge(self, batch, G, purpose):
        """Judge different completions once, each process its share. As in TRL, None is 0 in a sum,
        and a completion that no function rewards has no advantage: it gets its group's mean."""
        rows = zip(batch.tokens.tolist(), batch.lengths.tolist())
        ids = dict(zip(zip(batch.problems, batch.texts), (row[:n] for row, n in rows)))
        pairs = list(ids)
        share = [(*pairs[i], ids[pairs[i]]) for i in processes.share(len(pairs)).tolist()]
        said = dict(zip(pairs, processes.merged(self.rated(share), len(pairs))))
        said = torch.stack([said[pair] for pair in zip(batch.problems, batch.texts)])
        batch.verdicts = said[:, 0].tolist()
        batch.is_correct = (said[:, 0] == 1).view(-1, G)
        is_none = said[:, 1:].isnan().all(dim=1).view(-1, G)
        rewards = said[:, 1:].nansum(dim=1).view(-1, G)
        others = rewards.double().masked_fill(is_none, torch.nan)   # exact, if all are equal
        mean = others.nanmean(dim=1, keepdim=True).nan_to_num().to(rewards)
        batch.rewards = torch.where(is_none, mean, rewards)
        self.means = said[:, 1:].nanmean(dim=0).tolist()
        return batch

    def observe(self, batch, step):
        return self.task.observe(batch, step) | {
            f"rewards/{name}/mean": mean for name, mean in zip(self.rewards, self.means)
            if not math.isnan(mean)}


def columns(rows):
    """Rows as TRL's functions get them: lists by the name of a column, and completions as messages
    where the prompt is a list of messages. -> dict of lists"""
    found = {key: [row.get(key) for row in rows] for key in dict.fromkeys(sum(map(list, rows), []))}
    found["prompts"] = found.pop("prompt")
    found["completions"] = [
        [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
        for prompt, text in zip(found["prompts"], found.pop("completion"))]
    return found


class Workers:
    """Processes that have executed the file and call its functions, each for one of our threads;
    `about` is what worker.describe returns."""

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
        """Start a process, without CUDA or anything else of ours, and in a session of its own, so
        that Ctrl-C reaches the run alone. ValueError if the file is bad. -> dict, pipe"""
        pipe, other = Pipe()
        worker, number = Path(__file__).with_name("worker.py"), other.fileno()
        self.processes.append(subprocess.Popen(
            [sys.executable, "-u", worker, self.path, str(number)], pass_fds=[number],
            stdin=subprocess.DEVNULL, start_new_session=True))
        other.close()
        return self.receive(pipe), pipe

    def receive(self, pipe, seconds=None):
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
        """ValueError if a function raises or takes too long. -> its result"""
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
        """The results of calls (name, arguments, number of rewards), in their order. Exits with one
        line if one fails: to count that as wrong would hide it."""
        try:
            return list(self.threads.map(self.call, calls))
        except (ValueError, SystemExit, KeyboardInterrupt) as error:    # the last two: Ctrl-C
            self.threads.shutdown(wait=False, cancel_futures=True)
            self.end()
            if isinstance(error, ValueError):
                self.fail(error, code=1)
            raise

    def end(self):
        """Kill the processes, and let threads that are about to make a call give up."""
        self.about["seconds"] = 0
        for process in self.processes:
            process.kill()

    def fail(self, message, code=2):
        self.end()
        common.fail(f"--reward_file {self.path}: {message}", code)
