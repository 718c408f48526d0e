"""Functions of one's own: --reward_file FILE of pretrained/train.py. In the file there may be

  def brevity(completion, answer, **row): ...   # what a completion is worth; several are added up
  def correct(completion, answer, **row): ...   # what counts as right; else what the task says
  def respond(completion, answer, **row): ...   # what is inserted behind one of the call_tokens
  call_tokens = ["</search>"]
  seconds = 60                                  # that each may take

Every other function is a reward, but for _names. `row` has the prompt and what else the line of
--data has; for rewards `correct`, too. All have to depend on their arguments alone.
"""
import contextlib
import functools
import inspect
import json
import math
import runpy
import signal
import sys
import traceback
from pathlib import Path

import torch

import common
from pretrained import run as processes
from tasks import Wrapper


class Own(Wrapper):
    """A task with the functions of a file."""

    def __init__(self, cfg, task):
        super().__init__(task)
        self.cfg = cfg
        self.path = str(Path(cfg.reward_file).resolve())
        sys.path.append(str(Path(self.path).parent))            # for what the file imports
        with one_line(self.path):
            names = runpy.run_path(self.path, run_name="reward_file")
        self.seconds = names.get("seconds", 60)
        self.functions = {
            name: value for name, value in names.items() if inspect.isfunction(value)
            and value.__module__ == "reward_file" and not name.startswith("_")}
        self.correct = self.functions.pop("correct", None)
        self.is_judged = task.is_judged or self.correct is not None
        calls = names.get("call_tokens", [])
        if type(calls) is not list or "" in calls or bool(calls) != ("respond" in self.functions):
            common.fail(f"--reward_file {self.path}: call_tokens, a list of texts, needs respond")
        if calls:
            self.call_tokens = tuple(calls)
            self.respond = functools.partial(self.ask, self.functions.pop("respond"), str)
        if not self.functions:
            common.fail(f"--reward_file {self.path}: has no function that rewards")

    def ask(self, function, kind, problem, text, **more):
        """What a function says of a completion, a float or a str. Exits with one line if it raises
        or takes too long: to call that wrong would hide it."""
        row = json.loads(problem.secret) if self.cfg.data else {}
        row |= {"prompt": problem.prompt, "answer": problem.answer, "completion": text} | more
        with one_line(self.path, self.seconds, f" in {function.__name__} of {json.dumps(row)}"):
            said = function(**row)
            if kind is str and type(said) is not str or kind is float and not math.isfinite(said):
                raise ValueError(f"{said!r} is no {kind.__name__}")
            return kind(said)

    def verify(self, problem, text):
        if self.correct:
            return self.ask(self.correct, float, problem, text)
        return float(self.task.is_correct(problem, self.task.verify(problem, text)))

    def rated(self, problem, text):
        """Whether a completion is right, and what each function rewards. -> list of floats"""
        found = [self.verify(problem, text)]
        for function in self.functions.values():
            found.append(self.ask(function, float, problem, text, correct=found[0]))
        return found

    def judge(self, batch, G, purpose):
        """Ask once about each completion, each process about its share: all hear the same."""
        pairs = list(dict.fromkeys(zip(batch.problems, batch.texts)))
        said = [self.rated(*pairs[i]) for i in processes.share(len(pairs)).tolist()]
        said = dict(zip(pairs, processes.merged(torch.tensor(said), len(pairs))))
        said = torch.stack([said[pair] for pair in zip(batch.problems, batch.texts)])
        batch.verdicts = said[:, 0].tolist()
        batch.is_correct = (said[:, 0] == 1).view(-1, G)
        batch.rewards = said[:, 1:].sum(dim=1).view(-1, G)
        self.means = said[:, 1:].mean(dim=0).tolist()
        return batch

    def observe(self, batch, step):
        return self.task.observe(batch, step) | {
            f"rewards/{name}/mean": mean for name, mean in zip(self.functions, self.means)}


@contextlib.contextmanager
def one_line(path, seconds=0, about=""):
    """Exits with one line, which says where in the file, if something raises, or takes longer."""
    def stop(*_):
        raise TimeoutError(f"took longer than {seconds} seconds")
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)               # 0: no limit
    try:
        yield
    except (Exception, SystemExit) as error:                    # a file may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        place = [f"line {frame.lineno}: " for frame in frames if frame.filename == path][-1:]
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        common.fail(f"--reward_file {path}: {''.join(place)}{said}{about}", code=1 if about else 2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
