"""Use reward functions of your own: --reward_file FILE of pretrained/train.py.

If the rewards of --reward do not fit your problem, write your own. The file may define

  def brevity(completion, answer, **row): ...   # a reward; several are added up
  def correct(completion, answer, **row): ...   # what counts as right; else the task decides
  def respond(completion, answer, **row): ...   # the text to insert after one of the call_tokens
  call_tokens = ["</search>"]
  seconds = 60                                  # time limit of a call
  workers = 8                                   # largest number of processes that run the calls

Every callable is a reward, except `correct`, `respond`, classes, imports and _names. `row` contains
the prompt, all keys of the line of --data and, for rewards, the result of `correct`. A completion
does not contain what the prompt ends with, such as a <think> of the chat template. The result of a
function must depend only on its arguments.
"""
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Pipe
from pathlib import Path

import torch

import common
from pretrained import run as processes
from tasks import Wrapper


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
            known = {"prompt", "completion", "answer"} | (task.columns if self.has_lines else set())
            known |= {"correct"} if name in self.rewards else set()
            for parameter, is_required in parameters.items():
                if is_required and parameter not in {"**", *known}:
                    self.workers.fail(f"{name} requires {parameter}; a call can give it "
                                      f"{', '.join(sorted(known))}, each by its name")

    def calls(self, name, completions, **more):
        """List the calls of a function, one for each completion (problem, text, is truncated). Each
        list in `more` has another argument for each of them. -> list of (name, arguments)"""
        parameters = self.functions[name].keys()
        calls = []
        for (problem, text, *_), *values in zip(completions, *more.values()):
            row = {"prompt": problem.prompt, "answer": problem.answer}
            if self.has_lines:
                row = {"answer": ""} | json.loads(problem.secret)
            row |= {"completion": text} | dict(zip(more, values))
            calls.append((name, {key: x for key, x in row.items() if {key, "**"} & parameters}))
        return calls

    def respond(self, problem, text):
        if "respond" not in self.functions:
            return self.task.respond(problem, text)
        return self.workers.run(self.calls("respond", [(problem, text)]))[0]

    def verdicts(self, completions):
        if "correct" in self.functions:
            return self.workers.run(self.calls("correct", completions))
        return [float(self.task.is_correct(problem, self.task.verdict(problem, text, *rest)))
                for problem, text, *rest in completions]

    def rated(self, completions):
        """Judge completions (problem, text, is truncated), and compute the reward of each function.
        -> (n, 1 + number of functions), verdicts first"""
        correct = self.verdicts(completions)
        calls = [call for name in self.rewards
                 for call in self.calls(name, completions, correct=correct)]
        return torch.tensor([*correct, *self.workers.run(calls)]).view(-1, len(correct)).T

    def verify(self, problem, text):
        return self.verdicts([(problem, text)])[0]

    def judge(self, batch, G, purpose):
        """Reward a batch. Equal completions are judged once, and each process does its share."""
        completions = list(zip(batch.problems, batch.texts, batch.is_truncated.tolist()))
        different = list(dict.fromkeys(completions))
        share = [different[i] for i in processes.share(len(different)).tolist()]
        results = dict(zip(different, processes.merged(self.rated(share), len(different))))
        results = torch.stack([results[one] for one in completions])
        batch.verdicts = results[:, 0].tolist()
        batch.is_correct = (results[:, 0] == 1).view(-1, G)
        batch.rewards = results[:, 1:].sum(dim=1).view(-1, G)
        self.means = results[:, 1:].mean(dim=0).tolist()
        return batch

    def observe(self, batch, step):
        return self.task.observe(batch, step) | {
            f"rewards/{name}/mean": mean for name, mean in zip(self.rewards, self.means)}


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
        """Make calls (name, arguments) in parallel. Exits with one line if one fails, because a
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
