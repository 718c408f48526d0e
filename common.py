"""What all scripts share and no paper is about: flags, the task arithmetic, batches, and the run.

A script runs with this file alone. What only some runs need is outside, and is used where it is
there: tasks/ changes a task, as a Task that wraps another; tools/ looks at a run, as Observers;
kernels/ is faster code for CUDA.
"""
import argparse
import ast
import dataclasses
import functools
import importlib
import inspect
import json
import math
import os
import random
import re
import signal
import sys
import time
import zipfile
import zlib
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, get_args

import torch

HERE = Path(__file__).resolve().parent
MACHINERY = "\n# ==== the machinery"        # where the text begins that all scripts have in common


def start(main):
    """Run a command. If nobody reads its output any more (| head -1), it ends without a word."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()


def fail(message, code=2):
    """One line on stderr, then exit: 2 for bad input (nothing was touched), 1 for a failed run."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def optional(module):
    """A module of this repository, or None where a script was copied out without it."""
    path = HERE / module.replace(".", "/")
    is_there = path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
    return importlib.import_module(module) if is_there else None


kernels = optional("kernels")


# ---- 1. flags --------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Base:
    """flags of the base policy, which all scripts share"""
    hidden_size: int = 64               # width (D)
    num_hidden_layers: int = 2          # decoder layers
    num_attention_heads: int = 4        # query heads (H)
    num_key_value_heads: int = 1        # key/value heads (KV)
    intermediate_size: int = 176        # width of the SwiGLU layer
    base_seed: int = 0                  # of the initial weights and the demonstrations
    base_steps: int = 900               # warm-start batches
    base_batch_size: int = 32           # demonstrations per warm-start batch
    textbook_share: float = 0.6         # of the batches; the others are from the forum
    base_learning_rate: float = 4e-3    # warm-start peak, of matrices 5 times it


@dataclasses.dataclass(frozen=True)
class Config(Base):
    """flags of every script"""
    task: str = "arithmetic"            # NAME, or NAME:LEVEL as arithmetic:3-7; several: A,B
    reward: str = "accuracy"            # rows of tasks/rewards.py, added: accuracy+format, fine ...
    curriculum: bool = False            # sample each difficulty by p(1 - p), p: its pass rate
    mask_tool_tokens: bool = True       # with --no-: learn what tools say, too (a mistake)
    max_steps: int = 60                 # batches to train on at most; 0: only make the base
    stop_at: float = 0.98               # stop when 5 batches are this accurate; 2: never
    seed: int = 0                       # of problems, sampling and shuffling
    device: Literal["cpu", "cuda", "mps"] = "cuda" if torch.cuda.is_available() else "cpu"  # where
    kernel: Literal["auto", "torch", "triton"] = "auto"     # auto: Triton on CUDA, else torch
    num_threads: int = 1                # CPU threads of an operation; here a second gains 1.15x
    output_dir: str = ""                # run folder; else runs/SCRIPT-TASK-sSEED, or with -2 ...
    save_steps: int = 1                 # steps between checkpoints
    resume_from_checkpoint: str = ""    # run folder to go on with, its flags included
    init_from: str = ""                 # run folder whose policy takes the place of the base
    eval_steps: int = 10                # steps between greedy evaluations
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = "none"      # show the run there
    num_eval_problems: int = 512        # different held-out problems at most
    num_eval_samples: int = 8           # samples of each at start and end (k of pass@k)
    num_generations: int = 8            # completions per prompt (G)
    num_prompts: int = 32               # prompts per step (P)
    max_completion_length: int = 48     # tokens per completion at most (T)
    temperature: float = 1.0            # of sampling and scoring
    learning_rate: float = 5e-4         # of AdamW
    weight_decay: float = 0.0           # of AdamW
    max_grad_norm: float = 1.0          # longer gradients are scaled down to this norm
    num_mini_batches: int = 2           # optimizer steps per pass over the batch
    micro_batch_size: int = 32          # rows per backward pass, of short ones more

    def rules(self):
        """What must hold, and what to say if it does not. Yields (bool, str)"""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            low = 1 if field.type is int and field.name not in MAY_BE_ZERO else 0
            if field.type in (int, float):
                is_good = isinstance(value, (int, float)) and low <= value < math.inf
                yield is_good, f"--{field.name} {value}: must be finite, at least {low}"
        H = self.num_attention_heads
        yield self.hidden_size % (2 * H) == 0, f"--hidden_size: must be a multiple of {2 * H}"
        yield H % self.num_key_value_heads == 0, f"--num_key_value_heads: must divide {H}"
        yield self.num_generations > 1, "--num_generations 1: one alone has no group"
        yield self.temperature >= 1e-3, "--temperature: below 0.001 nothing is explored"
        yield self.textbook_share <= 1, f"--textbook_share {self.textbook_share}: is above 1"
        has_device = self.device == "cpu" or torch.get_device_module(self.device).is_available()
        yield has_device, f"--device {self.device}: torch cannot use it here"
        can_report = self.report_to == "none" or optional("tools.trackers")
        yield can_report, f"--report_to {self.report_to}: needs the folder tools/"
        can_run = self.kernel != "triton" or kernels and kernels.can_run(self.device)
        yield can_run, "--kernel triton: needs the package triton and CUDA 8.0; take torch"


MAY_BE_ZERO = {"base_seed", "base_steps", "max_steps", "seed", "dynamic_sampling",
               "overlong_buffer", "critic_pretrain_steps", "sampler_lag"}

# What a resumed run may do otherwise than it began.
MAY_DIFFER = {"max_steps", "stop_at", "save_steps", "eval_steps", "device", "output_dir",
              "resume_from_checkpoint", "report_to"}


def parse_flags(config_class, argv=None):
    """The flags of `argv`, over those of the run that it resumes, or what its task asks for. The
    comments of a Config are its --help. Exits with one line if a flag is bad. -> Config"""
    parser = argparse.ArgumentParser(
        description=sys.modules[config_class.__module__].__doc__, allow_abbrev=False,
        argument_default=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail(f"{message} (--help lists the flags)")
    source = "".join(inspect.getsource(part) for part in reversed(config_class.__mro__[:-1]))
    comments = dict(re.findall(r"^    (\w+): .*# (.*)$", source, re.MULTILINE))
    for field in dataclasses.fields(config_class):
        options = {"type": field.type, "metavar": "VALUE"}
        if field.type is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif get_args(field.type):
            options = {"choices": get_args(field.type)}
        spellings = dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}"))
        words = f"{comments[field.name]} [{field.default}]".replace("%", "%%")
        parser.add_argument(*spellings, dest=field.name, help=words, **options)
    given = vars(parser.parse_args(argv))
    if "" in given.values():
        fail("a flag has an empty value; give one, or leave it out")

    tasks = optional("tasks")
    stored = tasks.defaults(config_class, given.get("task", "arithmetic")) if tasks else {}
    if "resume_from_checkpoint" in given:
        stored = stored_flags(config_class, given)
    cfg = config_class(**(stored | given))
    for holds, message in cfg.rules():
        if not holds:
            fail(message)
    return cfg


def stored_flags(config_class, given):
    """The flags of the run to resume. Exits with one line if it is another script's, or its flags
    are others than the given ones. -> dict"""
    folder = given["resume_from_checkpoint"]
    script, stored = read_config(folder)
    if script != Path(inspect.getfile(config_class)).name:
        fail(f"--resume_from_checkpoint {folder}: is a run of {script}")
    for name in given.keys() - MAY_DIFFER:
        if given[name] != stored.get(name, given[name]):
            fail(f"--{name} {given[name]}: the run has {stored[name]}; or --init_from {folder}")
    return {name: stored[name] for name in stored if name in config_class.__dataclass_fields__}


def read_config(folder):
    """The script and the flags of a run folder. Exits with one line if it has none. -> str, dict"""
    try:
        record = json.loads(Path(folder, "config.json").read_text())
        return record["script"], dict(record["config"])
    except (OSError, ValueError, KeyError, TypeError):
        fail(f"{folder}: there is no run in this folder; name one")


# ---- 2. tasks --------------------------------------------------------------------------------

class Problem(NamedTuple):
    """A prompt and what the task knows of it."""
    prompt: str
    answer: str             # a right one; "" where it cannot be said
    work: str = ""          # what a demonstration writes between the think tags
    difficulty: int = 0     # the level by which success is shown and a curriculum samples
    secret: Any = None      # what only the environment knows; hashable
    task: str = ""          # the name of the task; sample_problems fills it in
    completion: str = ""    # of a demonstration


class Task:
    """A task. A subclass in tasks/NAME.py is the task NAME. It has to define prompt_width and

      sample(rng)                 draws a problem by a random.Random. -> Problem
      demonstration(rng, phase)   draws one with a completion, for the warm start. -> Problem
      verify(problem, text)       how right a completion is: 1.0 or 0.0, or a list with a reward for
                                  each character. Never raises, whatever the text holds.
    """
    prompt_width = None     # characters of the longest prompt
    call_tokens = ()        # behind these tokens respond() may insert text into a completion
    defaults = {}           # defaults of flags for this task
    held_out_tenths = 1     # of ten prompts so many are for the evaluation alone
    is_judged = True        # false: luck decides how it ends, so nothing counts as right or wrong

    def __init__(self, cfg, level=""):
        self.cfg = cfg
        self.level = level                              # of --task NAME:LEVEL
        self.name = type(self).__module__.rpartition(".")[2]
        self.state = {}                                 # plain values that checkpoints hold

    def is_correct(self, problem, verdict):
        """Whether what verify returned is the best there is. -> bool"""
        return verdict == 1

    def reward(self, problem, text, verdict, step):
        """What a completion is worth in training; verdict is what verify returned. -> float"""
        return float(sum(verdict) if isinstance(verdict, list) else verdict)

    def rewards(self, batch, step):
        """What all completions of a batch are worth. -> (P, G)"""
        judged = zip(batch.problems, batch.texts, batch.verdicts)
        found = [self.reward(*completion, step) for completion in judged]
        return torch.tensor(found).view_as(batch.is_correct)

    def token_rewards(self, batch):
        """What each token earns: the last sampled one, all that its completion does. -> (B, T)"""
        last = batch.mask.cumsum(dim=1).argmax(dim=1, keepdim=True)             # (B, 1)
        rewards = batch.rewards.view(-1, 1).to(batch.mask)                      # (B, 1)
        return torch.zeros_like(batch.mask).scatter(1, last, rewards)

    def is_held_out(self, problem):
        """Whether a problem is for the evaluation alone, which the hash of its prompt decides."""
        return zlib.crc32(problem.prompt.encode()) % 10 < self.held_out_tenths

    def respond(self, problem, text):
        """What the environment inserts after a call token; text: the completion so far. -> str"""
        return ""

    def observe(self, batch, step):
        """Take note of a batch, as a curriculum does. -> metrics that only this task has"""
        return {}


class Arithmetic(Task):
    """((((3+4)-5)*4)-2)= is worked out as 3+4=7;7-5=2;2*4=8;8-2=6. All values stay in 0..20. The
    level is the number of operands, or a range. The verifier stands in the scripts."""

    def __init__(self, cfg, level, verify):
        super().__init__(cfg, level)
        self.name = "arithmetic"
        self.verify = verify
        self.min_operands, self.max_operands = span(level or "5")
        self.prompt_width = 4 * self.max_operands - 2

    def sample(self, rng, share_shorter=0.0):
        min_operands = 2 if rng.random() < share_shorter else self.min_operands
        num_operands = rng.randint(min_operands, self.max_operands)
        value = rng.randint(1, 9)
        expression = str(value)
        steps = []
        while len(steps) < num_operands - 1:
            sign = rng.choice("+-*")
            operand = rng.randint(1, 9)
            result = {"+": value + operand, "-": value - operand, "*": value * operand}[sign]
            if 0 <= result <= 20:
                steps.append(f"{value}{sign}{operand}={result}")
                expression = f"({expression}{sign}{operand})"
                value = result
        return Problem(expression + "=", str(value), ";".join(steps), num_operands)

    def demonstration(self, rng, phase):
        """The textbook works nine of ten answers out, in the forum seven of ten only answer. Two in
        a hundred of the textbook's notice a slip: 3+4=9;wait,3+4=7."""
        problem = self.sample(rng, share_shorter=0.2)   # which show padding
        steps = problem.work.split(";")
        if phase == "textbook" and rng.random() < 0.02:
            slip = rng.randrange(len(steps))
            left, right = steps[slip].split("=")
            steps[slip] = f"{left}={(int(right) + rng.randint(1, 20)) % 21};wait,{steps[slip]}"
        text = f"<answer>{problem.answer}</answer>"
        if rng.random() < {"textbook": 0.9, "forum": 0.3, "cold_start": 1.0}[phase]:
            text = f"<think>{';'.join(steps)}</think>" + text
        return problem._replace(completion=text)


def extract(text):
    """The answer in the one <answer> block of a text, printable ASCII. -> str, or None without"""
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return None
    block = re.search("<answer>([ -~]{1,200})</answer>", text)
    return block[1].strip() if block else None


def span(level):
    """What "3-7" or "5" stands for: (3, 7), (5, 5). Exits with one line for anything else."""
    is_span = re.fullmatch("[0-9]{1,2}(-[0-9]{1,2})?", level)
    numbers = [int(number) for number in level.split("-")] if is_span else [0]
    if not 2 <= numbers[0] <= numbers[-1]:
        fail(f"--task NAME:{level}: the level must be a number from 2 to 99, or a range like 3-7")
    return numbers[0], numbers[-1]


def load_task(cfg, verify):
    """The task that the flags name, by tasks/ where it is there; `verify` is the script's verifier
    of arithmetic."""
    tasks = optional("tasks")
    if tasks:
        return tasks.load(cfg, verify)
    name, _, level = cfg.task.partition(":")
    if (name, cfg.reward, cfg.curriculum) != ("arithmetic", "accuracy", False):
        fail(f"--task, --reward and --curriculum: need {HERE / 'tasks'}, which is not there")
    return Arithmetic(cfg, level, verify)


def rollout_for(task, cfg):
    """What takes the place of a script's rollout: one with calls, or on CUDA a graph; else None."""
    if task.call_tokens:
        return functools.partial(optional("tasks.calls").rollout, task)
    return kernels.rollout if kernels and cfg.device == "cuda" and cfg.kernel != "torch" else None


def sample_problems(task, n, seed, split="train", phase=""):
    """n problems, or with a phase demonstrations, a function of the arguments. Those of the split
    "test" never occur in training. -> list of Problem"""
    rng = random.Random(repr((task.name, seed, split, phase)))
    problems = []
    for _ in range(10_000 + 1_000 * n):
        if len(problems) == n:
            return problems
        problem = task.demonstration(rng, phase) if phase else task.sample(rng)
        problem = problem._replace(task=problem.task or task.name)
        if task.is_held_out(problem) == (split == "test"):
            problems.append(problem)
    fail(f"--task {task.name}: has hardly any {split} problems; it needs more variety")


@functools.lru_cache(8)
def held_out_problems(task, n):
    """n different problems of the split "test", or as many as 8 n draws have. -> list"""
    drawn = sample_problems(task, 8 * n, "evaluation", "test")
    return list({(problem.prompt, problem.secret): problem for problem in drawn}.values())[:n]


def generator(*purpose):
    """A CPU generator that is a function of its arguments, such as (seed, "rollout", step): a
    resumed run draws what the uninterrupted one would have drawn, and no state has to be saved."""
    return torch.Generator().manual_seed(random.Random(repr(purpose)).getrandbits(63))


# ---- 3. batches ------------------------------------------------------------------------------

@dataclasses.dataclass
class Batch:
    """Completions in T slots, G of each of P problems: row p * G + g is completion g of problem p.
    Behind the end of a row, tokens are PAD and the rest is 0."""
    tokens: torch.Tensor        # (B, T)
    mask: torch.Tensor          # (B, T)  1.0 on sampled tokens, EOS included; 0.0 on inserted ones
    logps: torch.Tensor         # (B, T)  under the policy that sampled, at its temperature
    entropy: torch.Tensor       # (B, T)
    lengths: torch.Tensor       # (B,)    slots used, inserted tokens included
    is_truncated: torch.Tensor  # (B,)    no end within T tokens
    problems: list = None       # B       those of a group are equal
    prompts: torch.Tensor = None            # (B, W)
    texts: list = None          # B
    verdicts: list = None       # B       of the verifier: floats, or a list of floats for each row
    is_correct: torch.Tensor = None         # (P, G)
    rewards: torch.Tensor = None            # (P, G)
    pass_rates: list = None     # (problem, share of right completions) of all that was sampled
    values: torch.Tensor = None             # (B, T)  of a critic, where there is one

    def judge(self, task, G, step):
        """Verify and reward the completions. -> self"""
        self.verdicts = [task.verify(*pair) for pair in zip(self.problems, self.texts)]
        judged = [task.is_correct(*pair) for pair in zip(self.problems, self.verdicts)]
        self.is_correct = torch.tensor(judged).view(-1, G)
        rates = self.is_correct.double().mean(dim=1).tolist()
        self.pass_rates = list(zip(self.problems[::G], rates))
        self.rewards = task.rewards(self, step)
        return self

    def take(self, groups):
        """Some groups, in this order; the pass rates stay those of all. -> Batch"""
        P, G = self.is_correct.shape
        rows = (groups[:, None] * G + torch.arange(G)).flatten()                # (B,)
        taken = dict(vars(self))
        for name, values in taken.items():
            if torch.is_tensor(values):
                taken[name] = values[groups if len(values) == P else rows]
            elif values is not None and name != "pass_rates":
                taken[name] = [values[row] for row in rows.tolist()]
        return Batch(**taken)

    def join(self, other):
        """The rows of both. -> Batch"""
        joined = {}
        for name, values in vars(self).items():
            more = getattr(other, name)
            if torch.is_tensor(values):
                joined[name] = torch.cat([values, more])
            elif values is not None:
                joined[name] = values + more
        return Batch(**joined)


def has_signal(rewards):
    """Whether the rewards of a group differ; if not, it teaches nothing. (P, G) -> (P, 1)"""
    return rewards.amax(dim=1, keepdim=True) > rewards.amin(dim=1, keepdim=True)


def mini_batches(batch, cfg, *purpose):
    """The rows of each optimizer step: num_iterations passes over the batch, in num_mini_batches
    random parts of whole groups. Yields rows"""
    P, G = batch.rewards.shape
    for iteration in range(cfg.num_iterations):
        groups = torch.randperm(P, generator=generator(cfg.seed, *purpose, iteration))
        for part in groups.tensor_split(min(cfg.num_mini_batches, P)):
            yield (part.sort().values[:, None] * G + torch.arange(G)).flatten()


def micro_batches(rows, lengths, size):
    """Parts of `rows` that fit in memory, in which no row is more than three times as long as
    another, so that little is padding; each has at most the tokens of `size` rows as long as the
    longest. Rows keep their order, for those of a group share a prompt. -> list of rows"""
    lengths = lengths.cpu()
    parts = []
    while len(rows) > 0:
        is_alike = lengths[rows] <= 3 * lengths[rows].min()
        alike = rows[is_alike]
        parts += alike.split(size * int(lengths.max()) // int(lengths[alike].max()))
        rows = rows[~is_alike]
    return parts


# ---- 4. metrics and scores -------------------------------------------------------------------

def mean_metrics(history):
    """The mean of each metric over the optimizer steps of a batch. list of dicts -> dict"""
    return {name: fmean([metrics[name] for metrics in history]) for name in history[0]}


def describe(batch):
    """What the samples of a step are like, in TRL's words. -> metrics"""
    lengths = batch.mask.sum(dim=1)
    signal = has_signal(batch.rewards).double().mean().item()
    return {"reward": batch.rewards.mean().item(),
            "reward_std": batch.rewards.std(dim=1).mean().item(),
            "frac_reward_zero_std": 1 - signal,
            "signal": signal,
            "completions/mean_length": lengths.mean().item(),
            "completions/clipped_ratio": batch.is_truncated.float().mean().item(),
            "entropy": ((batch.entropy * batch.mask).sum() / lengths.sum()).item()}


def pass_at_k(n, c, k):
    """The chance that one of k completions is right, unbiased from n of which c are (2107.03374,
    eq. 1). -> float"""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def scores(batch, task, num_samples):
    """What an evaluation says of num_samples completions of each problem, or of one greedy one if
    num_samples is 0. tools/scores.py adds to it. -> dict"""
    found = {}
    num_correct = batch.is_correct.sum(dim=1).tolist()
    if task.is_judged and num_samples == 0:
        found["greedy"] = fmean(num_correct)
    elif task.is_judged:
        for k in sorted({1, min(8, num_samples), num_samples}):
            found[f"pass@{k}"] = fmean([pass_at_k(num_samples, c, k) for c in num_correct])
    found["think_share"] = fmean(["<think>" in text for text in batch.texts])
    found["mean_length"] = batch.mask.sum(dim=1).mean().item()
    found["problems"] = len(batch.is_correct)
    more = optional("tools.scores")
    return found | more.scores(batch, task, num_samples) if more else found


# ---- 5. who looks at a run -------------------------------------------------------------------

class Observer:
    """What looks at a run, for logs, pictures, a tracker; tools/observers.py has some. One of your
    own goes into run.observers."""

    def start(self, run):
        """The policy is the base, also of a resumed run; nothing is evaluated."""

    def evaluate(self, run, scores):
        """The base was evaluated, the policy after a step, or at the end."""

    def step(self, run, batch, advantages, metrics):
        """After a step, before its metrics are logged; some may be added."""

    def finish(self, run, summary):
        """After training; `summary` has the scores of "base" and "trained"."""


class Console(Observer):
    """Prints a line a step, and the scores of evaluations."""
    heading = ""

    def evaluate(self, run, scores):
        numbers = [f"{name} {x:.3f}" for name, x in scores.items() if isinstance(x, float)]
        print("held out:" if run.state["steps"] else "base:", ", ".join(numbers[:4]), flush=True)

    def step(self, run, batch, advantages, metrics):
        columns = {head: metrics[name] for head, name in run.columns.items() if name in metrics}
        if not self.heading:
            self.heading = " step" + "".join(f"{head:>9}" for head in columns) + "  secs"
            print(self.heading)
        cells = "".join(f"{round(value, 3) + 0.0:9.3f}" for value in columns.values())
        print(f"{run.state['steps']:5d}{cells}{metrics['step_time']:6.2f}", flush=True)

    def finish(self, run, summary):
        print(f"{summary['steps']} steps, {summary['seconds_total']:.0f} s, folder {run.folder}")


# ---- 6. the run ------------------------------------------------------------------------------

LOGS = ("metrics.jsonl", "samples.jsonl", "greedy.jsonl", "pairs.jsonl")


def write(path, content):
    """Save text or tensors under a temporary name, then rename: a kill at any time leaves the old
    file or the new one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    if isinstance(content, str):
        part.write_text(content)
    else:
        torch.save(content, part)
    os.replace(part, path)


def load_policy(policy, path):
    """Give a policy the weights in a checkpoint, tensors and plain values only. Exits with one line
    if they do not fit, or are damaged: torch does not look at checksums. -> the checkpoint"""
    try:
        assert zipfile.ZipFile(path).testzip() is None
        device = next(policy.parameters()).device
        saved = torch.load(path, map_location=device, weights_only=True)
        policy.load_state_dict(saved["policy"])
        return saved
    except Exception as error:              # a damaged file raises nearly anything
        fail(f"{path}: holds no policy of this shape ({type(error).__name__})")


def code_of(path):
    """The code of a file, from the machinery on if it has one, without comments and docstrings."""
    text = Path(path).read_text()
    tree = ast.parse(text[max(0, text.find(MACHINERY)):])
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    return ast.dump(tree)


class Run:
    """One run: its folder and logs, when it evaluates, saves and stops. A script may keep plain
    values in `state`; `columns` are the console's: heading -> name of a metric."""

    def __init__(self, cfg, task, policy, columns):
        torch.set_num_threads(cfg.num_threads)
        self.cfg = cfg
        self.task = task
        self.policy = policy
        self.columns = columns
        self.clock = time.perf_counter()
        self.script = Path(inspect.getfile(type(cfg)))
        self.state = {"steps": 0, "recent": [], "seconds_warm_start": 0.0, "seconds_total": 0.0}
        self.parts = {}                         # what checkpoints hold, name -> part
        self.resumed = {}                       # the checkpoint of the run that is resumed
        tools = optional("tools.observers")
        self.observers = [Console(), *(tools.observers(cfg) if tools else ())]
        default = f"runs/{self.script.stem}-{task.name}-s{cfg.seed}"
        self.folder = Path(cfg.resume_from_checkpoint or cfg.output_dir or default)
        if cfg.resume_from_checkpoint and (self.folder / "checkpoint.pt").exists():
            self.resumed = load_policy(policy, self.folder / "checkpoint.pt")
            if "state" not in self.resumed:
                fail(f"{self.folder}: has a policy, but no run; take --init_from {self.folder}")
            self.state |= self.resumed["state"]
            task.state.update(self.resumed["task"])
            load_policy(policy, self.folder / "base.pt")
        elif cfg.init_from:
            load_policy(policy, Path(cfg.init_from, "checkpoint.pt"))

    def load_base(self, warm_start):
        """Make the run folder, and give the policy its first weights: those of --init_from, or of
        the base that scripts share, which the first makes by warm_start(policy, task, cfg)."""
        self.machinery = sys.modules[warm_start.__module__]     # whose functions observers call
        self.make_folder()
        if not self.resumed:
            if not self.cfg.init_from:
                self.share_base(warm_start)
            write(self.folder / "base.pt", {"policy": self.policy.state_dict()})
            self.state["seconds_warm_start"] = time.perf_counter() - self.clock
        for weight in self.policy.parameters():         # not those of the warm start
            weight.grad = torch.zeros_like(weight)
        for observer in self.observers:
            observer.start(self)

    def make_folder(self):
        """Make the run folder, --output_dir or the first free default, and write in it what is run.
        The logs of a resumed run are cut to what its checkpoint knows."""
        cfg = self.cfg
        first = self.folder
        number = 1
        while not cfg.resume_from_checkpoint and any(self.folder.glob("*")):
            if cfg.output_dir:
                fail(f"--output_dir {first}: is not empty; name another, or resume its run")
            number += 1
            self.folder = Path(f"{first}-{number}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail(f"--output_dir {self.folder}: cannot be made ({error.strerror})")
        config = dataclasses.asdict(cfg) | {"resume_from_checkpoint": ""}
        record = {"script": self.script.name, "torch": torch.__version__, "config": config}
        write(self.folder / "config.json", json.dumps(record, indent=2))
        write(self.folder / self.script.name, self.script.read_text())
        for log in self.logs():
            os.truncate(log, min(log.stat().st_size, self.resumed.get("logs", {}).get(log.name, 0)))
        signal.signal(signal.SIGINT, self.leave)
        print(f"{self.script.name}: {self.task.name} on {cfg.device}, run folder {self.folder}",
              flush=True)

    def share_base(self, warm_start):
        """Load the base from runs/base/, or make it and keep it there. Its name has a hash of all
        that shapes it: code, flags, and torch's version."""
        cfg = self.cfg
        names = ["mix", "calls", *(part.partition(":")[0] for part in cfg.task.split(","))]
        files = [path for path in (HERE / f"tasks/{name}.py" for name in names) if path.exists()]
        code = [code_of(path) for path in (inspect.getfile(warm_start), __file__, *files)]
        flags = [getattr(cfg, name) for name in ("task", "device", *Base.__annotations__)]
        key = zlib.crc32(repr((code, flags, torch.__version__)).encode())
        path = Path(f"runs/base/{self.task.name}-{key:08x}.pt")
        if path.exists():
            load_policy(self.policy, path)
            return
        warm_start(self.policy, self.task, cfg)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, {"policy": self.policy.state_dict()})

    def steps(self, evaluate, **parts):
        """Yield the steps still to do. Checkpoints hold `parts` (policy=..., optimizer=...);
        evaluate(policy, task, cfg, num_samples) gives scores, greedy ones with num_samples 0."""
        cfg = self.cfg
        state = self.state
        self.parts |= parts
        self.evaluate = functools.partial(evaluate, self.policy, self.task, cfg)
        if "base" not in state:
            state["base"] = self.evaluated(0, cfg.num_eval_samples)
        for name, part in self.parts.items() if self.resumed else ():
            part.load_state_dict(self.resumed[name])
        while state["steps"] < cfg.max_steps and sum(state["recent"]) < 5 * cfg.stop_at:
            self.step_clock = time.perf_counter()
            yield state["steps"]
            if state["steps"] % cfg.save_steps == 0:
                self.save()

    def evaluated(self, *nums_samples):
        """Evaluate the policy, and show the scores to the observers. -> scores"""
        scores = {}
        for num_samples in nums_samples:
            scores |= self.evaluate(num_samples)
        for observer in self.observers:
            observer.evaluate(self, scores)
        return scores

    def log(self, batch, advantages, metrics):
        """The step is done: log it, show it to the observers, evaluate if it is time. Exits if one
        of the update's metrics is not finite."""
        state = self.state
        state["steps"] += 1
        if not all(math.isfinite(value) for value in metrics.values()):
            fail(f"step {state['steps']}: not finite: {metrics}; the last checkpoint is kept", 1)
        metrics = describe(batch) | self.task.observe(batch, state["steps"] - 1) | metrics
        if self.task.is_judged and batch.pass_rates:        # which pairs from a file have not
            metrics["accuracy"] = fmean([rate for _, rate in batch.pass_rates])
            state["recent"] = [*state["recent"], metrics["accuracy"]][-5:]
        metrics["step_time"] = time.perf_counter() - self.step_clock
        for observer in self.observers:
            observer.step(self, batch, advantages, metrics)
        if state["steps"] % self.cfg.eval_steps == 0:
            found = self.evaluated(0)
            metrics |= {f"eval/{name}": x for name, x in found.items() if isinstance(x, float)}
        self.append("metrics.jsonl", {"step": state["steps"]} | metrics)

    def logs(self):
        """The LOGS that there are. -> list of Path"""
        return [log for log in self.folder.glob("*.jsonl") if log.name in LOGS]

    def append(self, name, record):
        """Add a line to one of the LOGS."""
        with open(self.folder / name, "a") as log:
            log.write(json.dumps(record) + "\n")

    def save(self):
        """Write a checkpoint: state, parts, and how long the logs are."""
        now = time.perf_counter()
        self.state["seconds_total"] += now - self.clock
        self.clock = now
        sizes = {log.name: log.stat().st_size for log in self.logs()}
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        held = {"state": self.state, "task": self.task.state, "logs": sizes} | parts
        write(self.folder / "checkpoint.pt", held)

    def leave(self, *_):
        """Ctrl-C: the last checkpoint is a step old at most, if one is written after each."""
        command = f"{os.path.relpath(self.script)} --resume_from_checkpoint {self.folder}"
        os.write(2, f"\ninterrupted; go on with:\n  python {command}\n".encode())
        raise SystemExit(130)

    def finish(self):
        """Evaluate what was trained, save, and say what changed. -> the summary of summary.json"""
        summary = {"trained": self.state["base"]}
        if self.state["steps"] > 0:
            summary["trained"] = self.evaluated(0, self.cfg.num_eval_samples)
        self.save()
        summary |= self.state
        write(self.folder / "summary.json", json.dumps(summary, indent=2))
        for observer in self.observers:
            observer.finish(self, summary)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return summary
