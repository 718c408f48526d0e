"""What all scripts share and no paper is about: flags, tasks, scores, and the run with its folder.

There is no model, no tokenizer and no loss in here. A script runs with this file alone: it then
knows the task arithmetic, and prints a plain line a step. tasks/ adds tasks and rewards, tools/ a
console for terminals and the report, kernels/ faster code for CUDA.
"""
import argparse
import collections
import copy
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import sys
import time
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch

HERE = Path(__file__).resolve().parent
GIVEN_PAIRS = "given-pairs.jsonl"           # in a run folder: the copy of dpo.py's --pairs
MACHINERY = "\n# ==== the machinery"        # where the text begins that all scripts have in common


def start(main):
    """Run a command. If nobody reads its output any more (| head -1), it ends without a word: a run
    is then left as a kill would leave it, and can be resumed."""
    try:
        try:
            main()
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())     # for the flush at exit
        raise SystemExit(1) from None


def fail(message, code=2):
    """One line on stderr, then exit: 2 for bad input (nothing was touched), 1 for a failed run."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def optional(module):
    """The module of this repository, or None where a script was copied out without it."""
    path = HERE / module.replace(".", "/")
    if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
        return importlib.import_module(module)
    return None


kernels = optional("kernels")


# ---- 1. flags --------------------------------------------------------------------------------

def flag(default, help, group="algorithm", low=None, high=math.inf, choices=(), why="", needs=""):
    """A field of a Config that is also a command-line flag. Numbers are finite and in low .. high;
    `why` goes on with the message about a number outside. A default of None stands for what `help`
    says. A flag does nothing without the flag that it `needs`, "name" or "name value", and is then
    refused. -> dataclass field"""
    metadata = {"help": help, "group": group, "low": low, "high": high,
                "choices": choices, "why": why, "needs": needs}
    return dataclasses.field(default=default, metadata=metadata)


BASE_GROUP = "base policy, shared by all scripts"
GROUPS = ("algorithm", "run", "task", "sampling", "optimizer", "evaluation", BASE_GROUP)
run_flag = functools.partial(flag, group="run")
task_flag = functools.partial(flag, group="task")
sample_flag = functools.partial(flag, group="sampling")
step_flag = functools.partial(flag, group="optimizer")
eval_flag = functools.partial(flag, group="evaluation")
base_flag = functools.partial(flag, group=BASE_GROUP)


def devices():
    """The devices that torch can use here, the best one last."""
    found = ["cpu"]
    if torch.backends.mps.is_available():
        found.insert(0, "mps")
    if torch.cuda.is_available():
        found.append("cuda")
    return found


@dataclasses.dataclass(frozen=True)
class Config:
    """The flags of every script; a script's own Config adds the symbols of its equations."""
    # the run
    task: str = run_flag("arithmetic", "arithmetic, or NAME for tasks/NAME.py; several: A,B")
    max_steps: int = run_flag(60, "batches to train on at most; 0: only make the base", low=0)
    stop_at: float = run_flag(0.98, "stop when 5 batches are this accurate; 2: never", low=0)
    seed: int = run_flag(0, "of problems, sampling and shuffling", low=0)
    device: str = run_flag(devices()[-1], "where to run; CUDA if there is one", choices=devices())
    kernel: str = run_flag("auto", "auto: Triton kernels on CUDA, else plain torch",
                           choices=("auto", "torch", "triton"))
    num_threads: int = run_flag(1, "CPU threads of an operation; here a second gains 1.15x", low=1)
    output_dir: str = run_flag("", "run folder; else runs/SCRIPT-TASK-sSEED, or with -2, -3 ...")
    save_steps: int = run_flag(10, "steps between checkpoints", low=1)
    resume_from_checkpoint: str = run_flag("", "run folder to go on with, its flags included")
    init_from: str = run_flag("", "run folder whose trained policy takes the place of the base")
    cold_start: int = run_flag(0, "batches of examples with their work, to learn from first", low=0,
                               needs="init_from")
    # the task
    reward: str = task_flag("accuracy", "rows of tasks.rewards, added: accuracy+format, fine ...")
    operands: str = task_flag("5", "arithmetic: numbers in a problem, or a range: 3-7")
    numbers: str = task_flag("3-4", "countdown: numbers in a problem, or a range")
    slip: float = task_flag(0.0, "gridworld: how often a move goes astray", low=0, high=1)
    # sampling
    num_generations: int = sample_flag(8, "completions per prompt (G)", low=2,
                                       why=": one alone has no group")
    num_prompts: int = sample_flag(32, "prompts per step (P)", low=1)
    max_completion_length: int = sample_flag(48, "tokens per completion at most (T)", low=1)
    dynamic_sampling: int = sample_flag(0, "batches to add until P groups have signal", low=0)
    curriculum: bool = sample_flag(False, "sample each difficulty by p(1 - p), p: its pass rate")
    temperature: float = sample_flag(1.0, "of sampling and scoring", low=1e-3,
                                     why=": 0 explores nothing")
    mask_tool_tokens: bool = sample_flag(True, "false: learn what tools say, too (a mistake)")
    # the optimizer
    learning_rate: float = step_flag(5e-4, "of AdamW", low=0)
    warmup_steps: int = step_flag(0, "steps in which the learning rate rises linearly", low=0)
    weight_decay: float = step_flag(0.0, "of AdamW", low=0)
    max_grad_norm: float = step_flag(1.0, "longer gradients are scaled down to this norm", low=1e-9)
    num_mini_batches: int = step_flag(2, "optimizer steps per pass over the batch", low=1)
    micro_batch_size: int = step_flag(32, "rows per backward pass, of short ones more", low=1)
    # evaluation
    eval_steps: int = eval_flag(10, "steps between greedy evaluations", low=1)
    num_eval_problems: int = eval_flag(512, "different held-out problems at most", low=1)
    num_eval_samples: int = eval_flag(8, "samples of each at start and end (k of pass@k)", low=1)
    # the base policy
    hidden_size: int = base_flag(64, "width (D)", low=1)
    num_hidden_layers: int = base_flag(2, "decoder layers", low=1)
    num_attention_heads: int = base_flag(4, "query heads (H)", low=1)
    num_key_value_heads: int = base_flag(1, "key/value heads (KV)", low=1)
    intermediate_size: int = base_flag(176, "width of the SwiGLU layer", low=1)
    base_seed: int = base_flag(0, "of the initial weights and the demonstrations", low=0)
    base_steps: int = base_flag(900, "warm-start batches", low=0)
    base_batch_size: int = base_flag(32, "demonstrations per warm-start batch", low=1)
    textbook_share: float = base_flag(0.6, "of the batches; the others are from the forum", low=0,
                                      high=1)
    base_learning_rate: float = base_flag(4e-3, "warm-start peak, of matrices 5 times it", low=0)

    judged_flags = {"stop_at", "curriculum"}        # those that look at what is right
    lacks = ()                      # those of these flags that this script does not have
    has_task_defaults = True        # whether a task may ask for other defaults
    starts_from = "init_from"       # the flag that names a run to start from
    may_differ = set()              # what else a resumed run may do otherwise
    does_nothing_with = {}          # flag -> "another, another value|value", which idle it


# Flags of the base that do nothing where another policy takes its place.
BASE_FLAGS_IDLE = {"base_steps": "init_from", "textbook_share": "init_from"}

# What a resumed run may do otherwise than it began.
MAY_DIFFER = {"max_steps", "stop_at", "save_steps", "eval_steps", "num_eval_problems",
              "num_eval_samples", "device", "output_dir", "resume_from_checkpoint"}


def flags_of(config_class):
    """The fields of a Config that are flags of its script. -> list"""
    return [field for field in dataclasses.fields(config_class)
            if field.name not in config_class.lacks]


def boolean(text):
    """What "true" or "false" stands for. ValueError for anything else."""
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def make_parser(config_class):
    """An argparse parser with a flag for each field of a Config, in groups."""
    parser = argparse.ArgumentParser(
        description=sys.modules[config_class.__module__].__doc__, allow_abbrev=False,
        argument_default=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail(f"{message} (--help lists the flags)")
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    own_fields_last = sorted(flags_of(config_class),
                             key=lambda field: field.name not in Config.__annotations__)
    for field in own_fields_last:
        default = "" if field.default is None else f" [{field.default}]"
        options = {"type": field.type, "help": field.metadata["help"] + default}
        if field.type is bool:
            options |= {"type": boolean, "nargs": "?", "const": True, "metavar": "true|false"}
        elif field.metadata["choices"]:
            options["metavar"] = "|".join(field.metadata["choices"])
        else:
            options["metavar"] = field.type.__name__.upper()
        groups[field.metadata["group"]].add_argument(f"--{field.name}", **options)
    return parser


def with_underscores(word):
    """--max-steps=3 -> --max_steps=3; what is no flag stays as it is."""
    name = re.match(r"--[\w-]+(?==|$)", word)
    if name is None:
        return word
    return "--" + name[0][2:].replace("-", "_") + word[name.end():]


def parse_flags(config_class, argv=None):
    """The flags of `argv`, over those of the run that it resumes or the defaults of its task.
    Exits with one line if one is bad. -> Config"""
    words = sys.argv[1:] if argv is None else argv
    given = vars(make_parser(config_class).parse_args([with_underscores(word) for word in words]))
    for name, value in given.items():
        if value == "":
            fail(f"--{name}: is empty; give a value, or leave the flag out")
    if "resume_from_checkpoint" in given:
        stored = stored_flags(config_class, given)
    else:
        stored = task_defaults(config_class, given.get("task", config_class.task))
    cfg = config_class(**(stored | given))
    check_flags(cfg, given)
    return cfg


def task_defaults(config_class, names):
    """The defaults that the tasks ask for; of several tasks, the largest of each. -> dict"""
    if not config_class.has_task_defaults:
        return {}
    classes = [find_task(name, names) for name in names.split(",")]
    defaults = {}
    for field in dataclasses.fields(config_class):      # a task may ask for what one script has
        wanted = [task.defaults.get(field.name, field.default) for task in classes]
        if any(field.name in task.defaults for task in classes):
            defaults[field.name] = field.type(max(wanted))
    return defaults


def stored_flags(config_class, given):
    """The flags of the run to resume. Exits if there is none, or if a given flag contradicts it."""
    folder = given["resume_from_checkpoint"]
    script = Path(inspect.getfile(config_class)).name
    try:
        saved = json.loads(Path(folder, "config.json").read_text())
        stored = saved["config"]
        if saved["script"] != script:
            raise ValueError
        is_as_today = are_flags_of(config_class, stored)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        fail(f"--resume_from_checkpoint {folder}: no run of {script} with these folders; name one")
    if not is_as_today:
        fail(f"--resume_from_checkpoint {folder}: its flags are not those that {script} has now; "
             f"take --{config_class.starts_from} {folder}")
    for name in given.keys() - MAY_DIFFER - config_class.may_differ:
        if given[name] != stored[name]:
            fail(f"--{name} {given[name]}: the run has {stored[name]!r}; omit it or "
                 f"--{config_class.starts_from} {folder}")
    return stored


def are_flags_of(config_class, values):
    """Whether a dict has a value of the right type for each flag, and nothing else. -> bool"""
    fields = {field.name: field for field in flags_of(config_class)}
    if values.keys() != fields.keys():
        return False
    types = {name: (field.type, type(field.default)) for name, field in fields.items()}
    return all(type(value) in types[name] for name, value in values.items())


def is_set(cfg, condition):
    """Whether flags fulfil a condition, "name" or "name value|value". -> bool"""
    name, _, values = condition.partition(" ")
    value = getattr(cfg, name)
    return str(value) in values.split("|") if values else bool(value)


def check_flags(cfg, given=()):
    """Exit with one line for a value, or a pair of values, that cannot work, or for a flag, of
    those given by the user, that would do nothing."""
    def need(fits, name, words):
        if not fits:
            fail(f"--{name} {getattr(cfg, name)}: {words}")

    # each flag on its own, and with the one that it needs
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        low, high = field.metadata["low"], field.metadata["high"]
        if low is not None and value is not None:
            at_most = f", at most {high}" if high < math.inf else ""
            need(low <= value <= high and value < math.inf, field.name,
                 f"must be finite, at least {low}{at_most}{field.metadata['why']}")
        choices = field.metadata["choices"]
        need(not choices or value in choices, field.name, f"must be one of {', '.join(choices)}")
        if field.metadata["needs"] and field.name in given:
            need(is_set(cfg, field.metadata["needs"]), field.name,
                 f"does nothing without --{field.metadata['needs']}")
    idle = BASE_FLAGS_IDLE | cfg.does_nothing_with
    if not cfg.cold_start:
        idle |= dict.fromkeys(("base_seed", "base_batch_size", "base_learning_rate"), "init_from")
    for name, others in idle.items():
        for other in others.split(", "):
            if name in given and is_set(cfg, other):
                other_name = other.partition(" ")[0]
                value = getattr(cfg, other_name)
                need(False, name, f"does nothing with --{other_name} {value}".removesuffix(" True"))

    # flags that have to fit each other
    H = cfg.num_attention_heads
    need(cfg.hidden_size % (2 * H) == 0, "hidden_size",
         f"must be a multiple of {2 * H}, two per head")
    need(H % cfg.num_key_value_heads == 0, "num_key_value_heads",
         f"must divide num_attention_heads {H}")
    need(cfg.num_mini_batches <= cfg.num_prompts, "num_mini_batches",
         f"a batch has only {cfg.num_prompts} groups")
    if hasattr(cfg, "overlong_buffer"):
        need(cfg.overlong_buffer <= cfg.max_completion_length, "overlong_buffer",
             f"is longer than a completion may be, {cfg.max_completion_length}")
        is_binary = cfg.reward == "accuracy" and cfg.overlong_buffer == 0
        need(cfg.scale_rewards != "mean" or is_binary, "scale_rewards",
             "divides by a mean that must not be negative: no --reward, no --overlong_buffer")
        need(cfg.delta == 0 or cfg.delta > 1 + cfg.epsilon_high, "delta",
             f"must be 0, or above 1 + epsilon_high {cfg.epsilon_high}, where the clip begins")

    # flags that need a folder of this repository, which a copied script may not have
    if not (HERE / "tasks").is_dir():
        need("," not in cfg.task, "task", f"there is no {HERE / 'tasks'}")
        for name in ("reward", "curriculum", "pairs"):
            value = getattr(cfg, name, "")
            need(value in ("", getattr(Config, name, "")), name, f"there is no {HERE / 'tasks'}")
    if kernels:
        try:
            kernels.check(cfg.kernel, torch.device(cfg.device))
        except ValueError as error:
            fail(str(error))
    else:
        need(cfg.kernel != "triton", "kernel", f"there is no {HERE / 'kernels'}")


# ---- 2. tasks --------------------------------------------------------------------------------

class Problem(NamedTuple):
    """A prompt and what the task knows of it."""
    prompt: str
    answer: str             # a right one; "" where it cannot be said
    work: str = ""          # what a demonstration writes between the think tags
    difficulty: int = 0     # the level by which success is shown and a curriculum samples
    secret: Any = None      # what only the environment knows
    task: str = ""          # the name of the task; sample_problems fills it in


class Task:
    """A task: its problems, demonstrations, verifier, reward and environment.

    A subclass in tasks/NAME.py is the task NAME. It has to define prompt_width, sample,
    demonstration and verify; everything else has a default here.
    """
    prompt_width = None     # characters of the longest prompt
    call_tokens = ()        # behind these tokens respond() may insert text into a completion
    defaults = {}           # defaults of flags for this task
    options = ()            # the task flags that it understands
    held_out_tenths = 1     # of ten prompts so many are for the evaluation alone
    is_judged = True        # false: luck decides how it ends, so nothing counts as right or wrong
    reward_model = None     # rates batches, too, where --reward model asks for one

    def __init__(self, cfg):
        self.cfg = cfg
        self.name = type(self).__module__.rpartition(".")[2]
        self.state = {}     # plain values that are saved with each checkpoint

    def sample(self, rng):
        """Draw a problem; rng is a random.Random. -> Problem"""
        raise NotImplementedError

    def sample_to_demonstrate(self, rng):
        """Draw a problem for the warm start, by default like any other. -> Problem"""
        return self.sample(rng)

    def demonstration(self, problem, rng, phase):
        """A completion for the warm start; phase is "textbook", "forum" or "cold_start", in which
        every example shows its work. -> str"""
        raise NotImplementedError

    def verify(self, problem, text):
        """How right a completion is: 1.0 or 0.0, or a list with a reward for each character. Never
        raises, whatever the text holds."""
        raise NotImplementedError

    def reward(self, problem, text, verdict, step):
        """What a completion is worth in training; verdict is what verify returned. -> float"""
        return float(sum(verdict) if isinstance(verdict, list) else verdict)

    def is_correct(self, problem, verdict):
        """Whether a verdict is the best there is. -> bool, or None where that cannot be said"""
        if not self.is_judged:
            return None
        if isinstance(verdict, list):
            return sum(verdict) >= self.best_return(problem) - 1e-6
        return verdict == 1

    def best_return(self, problem):
        """The highest expected sum of rewards, for a task that rewards each move. -> float, None"""
        return None

    def canonical(self, problem, answer):
        """The same text for answers that are the same: by it maj@k counts votes. -> str"""
        return answer

    def is_held_out(self, problem):
        """Whether a problem is for the evaluation alone, which the hash of its prompt decides."""
        return zlib.crc32(problem.prompt.encode()) % 10 < self.held_out_tenths

    def respond(self, problem, text):
        """What the environment inserts after a call token; text: the completion so far. -> str"""
        return ""

    def wants(self, problem, rng):
        """Whether to train on this problem now; a curriculum refuses some. -> bool"""
        return True

    def describe(self, batch, step):
        """Metrics of a batch that only this task has. -> dict"""
        return {}

    def learn(self, batch):
        """Take note of how a batch went; a curriculum does."""


class Arithmetic(Task):
    """((((3+4)-5)*4)-2)= is worked out as 3+4=7;7-5=2;2*4=8;8-2=6. All values stay in 0..20. The
    verifier stands in the scripts."""
    options = ("operands",)
    SELF_CHECKS = 0.02      # share of textbook demonstrations that notice a slip: 3+4=9;wait,3+4=7
    SHORTER = 0.2           # share of demonstrations with fewer operands, which show padding

    def __init__(self, cfg, verify):
        super().__init__(cfg)
        self.name = "arithmetic"
        self.verify = verify
        self.min_operands, self.max_operands = span(cfg.operands, "operands")
        self.prompt_width = 4 * self.max_operands - 2

    def sample(self, rng, share_shorter=0.0):
        is_shorter = rng.random() < share_shorter
        min_operands = 2 if is_shorter else self.min_operands
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

    def sample_to_demonstrate(self, rng):
        return self.sample(rng, self.SHORTER)

    def demonstration(self, problem, rng, phase):
        """The textbook works nine of ten answers out; in the forum seven of ten only answer; a cold
        start always works them out."""
        steps = problem.work.split(";")
        if phase == "textbook" and rng.random() < self.SELF_CHECKS:
            slip = rng.randrange(len(steps))
            left, right = steps[slip].split("=")
            wrong = (int(right) + rng.randint(1, 20)) % 21
            steps[slip] = f"{left}={wrong};wait,{steps[slip]}"
        answer = f"<answer>{problem.answer}</answer>"
        share_that_thinks = {"textbook": 0.9, "forum": 0.3, "cold_start": 1.0}[phase]
        if rng.random() < share_that_thinks:
            return f"<think>{';'.join(steps)}</think>" + answer
        return answer

    def canonical(self, problem, answer):
        """7 for 07, as the verifier reads numbers."""
        number = re.fullmatch("-?[0-9]{1,20}", answer)
        return str(int(answer)) if number else answer

    def describe(self, batch, step):
        """How often a completion checks itself, and how often it is then right."""
        is_correct = batch.is_correct.flatten().tolist()
        checks = [c for c, text in zip(is_correct, batch.texts) if ";wait," in text]
        return {"checks/share": len(checks) / len(batch.texts), "checks/repaired": mean(checks)}


def extract(text):
    """The answer in the one <answer> block of a text, printable ASCII. -> str, or None without"""
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return None
    block = re.search("<answer>([ -~]{1,200})</answer>", text)
    return block[1].strip() if block else None


def span(numbers, name):
    """What "3-7" or "5" stands for: (3, 7), (5, 5). ValueError on the flag `name` for others."""
    found = re.fullmatch("([0-9]{1,2})(?:-([0-9]{1,2}))?", str(numbers))
    low = int(found[1]) if found else 0
    high = int(found[2] or low) if found else 0
    if not 2 <= low <= high:
        raise ValueError(f"--{name} {numbers}: must be a number from 2 to 99, or a range like 3-7")
    return low, high


def find_task(name, flag_value):
    """The class of a task. Exits with one line where there is none. -> subclass of Task"""
    if name == "arithmetic":
        return Arithmetic
    path = HERE / "tasks" / f"{name}.py"
    if not (name.isidentifier() and path.is_file()):
        fail(f"--task {flag_value}: there is no {path}; put it there, or take one of "
             f"{', '.join(task_names())}")
    module = importlib.import_module(f"tasks.{name}")
    found = [value for value in vars(module).values() if inspect.isclass(value)
             and issubclass(value, Task) and value.__module__ == module.__name__]
    if len(found) != 1:
        fail(f"--task {flag_value}: {path} is no task, for it does not define one subclass of "
             "common.Task")
    for method in ("sample", "demonstration", "verify"):
        if getattr(found[0], method) is getattr(Task, method):
            fail(f"--task {flag_value}: {path} is no task, for it does not define {method}")
    return found[0]


def task_names():
    """The tasks that there are: arithmetic, and the files of tasks/ with a subclass of Task that
    has demonstrations."""
    files = sorted((HERE / "tasks").glob("*.py"))
    defining = re.compile(r"^class \w+\((common\.)?Task\):.*^    def demonstration\(",
                          re.MULTILINE | re.DOTALL)
    return ["arithmetic", *(path.stem for path in files if defining.search(path.read_text()))]


def load_task(cfg, verify):
    """The task that the flags name: one task, or with A,B a mix; the rewards of --reward and a
    curriculum wrap it. `verify` is the script's verifier of arithmetic. Exits with one line if a
    flag is not for the task."""
    parts = []
    for name in cfg.task.split(","):
        task_class = find_task(name, cfg.task)
        try:
            part = task_class(cfg, verify) if name == "arithmetic" else task_class(cfg)
        except ValueError as error:
            fail(str(error))
        if part.prompt_width is None:
            fail(f"--task {cfg.task}: {name} is no task, for it does not define prompt_width")
        parts.append(part)
    task = parts[0]
    if len(parts) > 1:
        task = importlib.import_module("tasks.mix").Mix(cfg, parts)

    # flags that would do nothing for this task
    for field in dataclasses.fields(Config):
        value = getattr(cfg, field.name)
        is_for_another = field.metadata["group"] == "task" and field.name not in task.options
        if is_for_another and field.name != "reward" and value != field.default:
            fail(f"--{field.name} {value}: is not for {cfg.task}")
    if not cfg.mask_tool_tokens and not task.call_tokens:
        fail(f"--mask_tool_tokens {cfg.mask_tool_tokens}: {cfg.task} has no tools")
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        is_off = value == field.default or field.name == "stop_at" and value > 1
        if field.name in cfg.judged_flags and not is_off and not task.is_judged:
            fail(f"--{field.name} {value}: nothing in {cfg.task} counts as right or wrong, because "
                 "luck decides")
    return wrap_task(cfg, task)


def wrap_task(cfg, task):
    """The task with what the flags add: the rewards of --reward, and a curriculum. Exits with one
    line if these are not for it."""
    if cfg.curriculum and len({level(problem) for problem in sample_problems(task, 200, 0)}) < 2:
        fail(f"--curriculum {cfg.curriculum}: all problems are of one difficulty; mix several, as "
             "with --operands 3-7")
    if cfg.reward != Config.reward:
        rewards = importlib.import_module("tasks.rewards")
        try:
            task = rewards.Rewards(cfg, task)
        except ValueError as error:
            fail(str(error))
    if cfg.curriculum:
        task = importlib.import_module("tasks.mix").Curriculum(task)
    return task


def draw_problems(task, draw, n, seed, split):
    """n problems by draw(rng), a function of the arguments: of the split "test", which the task
    holds out, or "train", the others."""
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r}: must be train or test")
    rng = random.Random(repr((task.name, seed, split)))
    problems = []
    for _ in range(10_000 + 1_000 * n):
        if len(problems) == n:
            return problems
        problem = draw(rng)
        if not problem.task:
            problem = problem._replace(task=task.name)
        is_test = task.is_held_out(problem)
        if is_test == (split == "test") and (is_test or task.wants(problem, rng)):
            problems.append(problem)
    fail(f"--task {task.name}: has hardly any {split} problems; it needs more variety")


def sample_problems(task, n, seed, split="train"):
    """n problems, a function of the arguments; those of "test" never occur in training."""
    return draw_problems(task, task.sample, n, seed, split)


@functools.lru_cache(8)
def held_out_problems(task, n):
    """n different problems of the split "test", or as many as there are; each task of a mix has the
    same share, at least one, if it has so many. A function of the arguments. -> tuple"""
    parts = getattr(task, "parts", {task.name: task})
    share = max(1, n // len(parts))
    by_part = [different_problems(part, share) for part in parts.values()]
    in_turn = itertools.chain(*itertools.zip_longest(*by_part))
    return tuple(problem for problem in in_turn if problem is not None)


def different_problems(task, n):
    """n problems of the split "test" with different prompts, or as many as there are: then at least
    500 draws in a row brought none that was new. Where luck decides, a problem with another secret
    is another problem. -> list"""
    found = {}
    for block in itertools.count():
        num_before = len(found)
        for problem in sample_problems(task, max(n, 500), ("evaluation", block), "test"):
            luck = "" if task.is_judged else repr(problem.secret)
            found.setdefault((problem.prompt, luck), problem)
        if len(found) >= n or len(found) == num_before:
            return list(found.values())[:n]


def sample_demonstrations(task, n, seed, phase):
    """n pairs (problem, completion) for the warm start, a function of the arguments."""
    problems = draw_problems(task, task.sample_to_demonstrate, n, (seed, phase), "train")
    rng = random.Random(repr((task.name, seed, phase)))
    return [(problem, task.demonstration(problem, rng, phase)) for problem in problems]


def generator(*purpose):
    """A CPU generator that is a function of its arguments, such as (seed, "rollout", step): a
    resumed run draws what the uninterrupted one would have drawn, and no state has to be saved."""
    return torch.Generator().manual_seed(random.Random(repr(purpose)).getrandbits(63))


# ---- 3. batches ------------------------------------------------------------------------------

@dataclasses.dataclass
class Rollout:
    """Completions in T slots. Behind the end of a row, tokens are PAD and the rest is 0."""
    tokens: torch.Tensor        # (B, T)
    mask: torch.Tensor          # (B, T)  1.0 on sampled tokens, EOS included; 0.0 on inserted ones
    logps: torch.Tensor         # (B, T)  under the policy that sampled, at its temperature
    entropy: torch.Tensor       # (B, T)
    lengths: torch.Tensor       # (B,)    slots used, inserted tokens included


@dataclasses.dataclass
class Batch(Rollout):
    """What one step learns from: G completions of each of P problems. Row p * G + g is completion g
    of problem p."""
    problems: list              # B       those of a group are equal
    prompts: torch.Tensor       # (B, W)
    texts: list                 # B
    verdicts: list              # B       of the verifier: floats, or a list of floats for each row
    rewards: torch.Tensor       # (P, G)
    is_correct: torch.Tensor    # (P, G)  all False where luck decides
    is_truncated: torch.Tensor  # (B,)    no end within T tokens
    pass_rates: dict            # level -> share of right completions of each group that was sampled
    weights: torch.Tensor = None            # (B, T)  of the tokens in the loss; at first the mask

    def __post_init__(self):
        if self.weights is None:
            self.weights = self.mask


def make_batch(rollout, task, problems, prompts, texts, is_truncated, G, step):
    """Verify and reward the completions of a rollout. -> Batch"""
    verdicts = []
    rewards = []
    judgements = []
    for problem, text in zip(problems, texts):
        verdict = task.verify(problem, text)
        verdicts.append(verdict)
        rewards.append(task.reward(problem, text, verdict, step))
        judgements.append(task.is_correct(problem, verdict))
    is_correct = torch.tensor([bool(judgement) for judgement in judgements]).view(-1, G)
    pass_rates = {}
    for group, rate in enumerate(is_correct.double().mean(dim=1).tolist()):
        if judgements[group * G] is not None:
            pass_rates.setdefault(level(problems[group * G]), []).append(rate)
    batch = Batch(
        **vars(rollout), problems=problems, prompts=prompts, texts=texts, verdicts=verdicts,
        rewards=torch.tensor(rewards).view(-1, G), is_correct=is_correct,
        is_truncated=is_truncated, pass_rates=pass_rates)
    if task.reward_model is not None:
        batch.rewards += task.reward_model.rewards(batch)
    return batch


def join_batches(one, other):
    """The groups of two batches. -> Batch"""
    joined = {}
    for field in dataclasses.fields(Batch):
        values = getattr(one, field.name)
        more = getattr(other, field.name)
        if field.type is torch.Tensor:
            joined[field.name] = torch.cat([values, more])
        elif field.type is list:
            joined[field.name] = values + more
        else:
            joined[field.name] = {
                name: values.get(name, []) + more.get(name, []) for name in values | more}
    return Batch(**joined)


def has_signal(rewards):
    """Whether the rewards of a group differ; if not, it teaches nothing. (P, G) -> (P, 1)"""
    return rewards.amax(dim=1, keepdim=True) > rewards.amin(dim=1, keepdim=True)


def keep_groups(batch, num_groups):
    """num_groups of a batch in their order, those with signal if there are enough. -> Batch"""
    order = has_signal(batch.rewards)[:, 0].int().argsort(descending=True, stable=True)
    return select_groups(batch, order[:num_groups].sort().values)


def load_pairs(cfg, task, encode_examples, score):
    """sample(policy, task, cfg, step) -> Batch, the pairs of --pairs as groups of two; None without
    the flag. Exits with one line if the file is malformed."""
    for name in ("pairs", "save_pairs"):
        value = getattr(cfg, name)
        if value and task.call_tokens:
            fail(f"--{name} {value}: {task.name} inserts text into completions, and a file does "
                 "not say where")
    if not cfg.pairs:
        return None
    return importlib.import_module("tasks.pairs").load(cfg, task, encode_examples, score)


def select_groups(batch, groups):
    """Some groups of a batch; its pass rates stay those of all that was sampled. -> Batch"""
    G = batch.rewards.shape[1]
    rows = (groups[:, None] * G + torch.arange(G)).flatten()                    # (B,)
    kept = {"pass_rates": batch.pass_rates}
    for field in dataclasses.fields(Batch):
        values = getattr(batch, field.name)
        if field.name in ("rewards", "is_correct"):
            kept[field.name] = values[groups]
        elif field.type is torch.Tensor:
            kept[field.name] = values[rows]
        elif field.type is list:
            kept[field.name] = [values[row] for row in rows.tolist()]
    return Batch(**kept)


def mini_batches(batch, cfg, *purpose):
    """The rows of each optimizer step: num_iterations passes over the batch, in num_mini_batches
    random parts of whole groups. Yields rows"""
    P, G = batch.rewards.shape
    for iteration in range(cfg.num_iterations):
        groups = torch.randperm(P, generator=generator(cfg.seed, *purpose, iteration))
        for part in groups.tensor_split(min(cfg.num_mini_batches, P)):
            yield (part.sort().values[:, None] * G + torch.arange(G)).flatten()


def micro_batches(rows, lengths, size, by_length=True, prompt_length=0):
    """Parts of `rows` that fit in memory. In a part no row is more than three times as long as
    another, so that little of it is padding, and it has at most the tokens of `size` rows as long
    as the longest. Rows keep their order, for those of a group share a prompt, which is read once a
    part; where it is read for each row, prompt_length counts, too. Or parts of `size` rows as they
    come. -> list of rows"""
    if not by_length:
        return list(rows.split(size)) if len(rows) > 0 else []
    lengths = lengths.cpu()
    parts = []
    while len(rows) > 0:
        is_alike = lengths[rows] <= 3 * lengths[rows].min()
        alike = rows[is_alike]
        longest = int(lengths.max()) + prompt_length
        parts += alike.split(size * longest // (int(lengths[alike].max()) + prompt_length))
        rows = rows[~is_alike]
    return parts


def token_rewards(batch, decode):
    """A reward for a character is paid with the token that writes it, what is left of a row's
    reward with its last sampled token. -> (B, T)"""
    rewards = torch.zeros_like(batch.mask)                                      # (B, T)
    for row, verdict in enumerate(batch.verdicts):
        if isinstance(verdict, list):                       # a reward for each character
            ids = batch.tokens[row, :batch.lengths[row]].tolist()
            ends = [len(decode(ids[:t])) for t in range(1 + len(ids))]
            paid = [sum(verdict[ends[t]:ends[t + 1]]) for t in range(len(ids))]
            rewards[row, :len(ids)] = rewards.new_tensor(paid)
    rewards = rewards * batch.mask                          # inserted tokens earn nothing
    last = batch.mask.cumsum(dim=1).argmax(dim=1, keepdim=True)                 # (B, 1)
    left = batch.rewards.view(-1, 1).to(rewards) - rewards.sum(dim=1, keepdim=True)
    return rewards.scatter_add(1, last, left)


def warm_up(cfg, step):
    """The learning rate of a step: linear warm-up, then constant. -> float"""
    return cfg.learning_rate * min(1.0, (step + 1) / max(1, cfg.warmup_steps))


def decay_entropy(cfg, step):
    """The coefficient of the entropy bonus (c_H) at a step. -> float"""
    if cfg.entropy_decay_steps == 0:
        return cfg.entropy_coef
    return cfg.entropy_coef * max(0.0, 1 - step / cfg.entropy_decay_steps)


def sample_records(batch, advantages, shade, decode):
    """The first rows of a batch by groups, as samples.jsonl has them. shade (b, T) is a number for
    each token of b rows. -> list of dicts"""
    records = []
    G = batch.rewards.shape[1]
    for row, shades in enumerate(shade.tolist()):
        if row % G == 0:
            problem = batch.problems[row]
            records.append({"prompt": problem.prompt, "answer": problem.answer, "completions": []})
        length = int(batch.lengths[row])
        records[-1]["completions"].append({
            "text": batch.texts[row],
            "reward": batch.rewards[row // G, row % G].item(),
            "advantage": advantages[row].item(),
            "length": int(batch.mask[row].sum()),
            "tokens": [decode([i]) for i in batch.tokens[row, :length].tolist()],
            "mask": batch.mask[row, :length].int().tolist(),
            "shade": [round(x, 4) for x in shades[:length]]})
    return records


class Sampler:
    """The policy as it was `lag` steps ago, or at first, as asynchronous training samples from it;
    with lag 0 the policy itself. A part of checkpoints."""

    def __init__(self, policy, lag):
        self.lag = lag
        self.policy = copy.deepcopy(policy) if lag > 0 else policy
        self.past = [weights_of(policy)] if lag > 0 else []         # the last `lag` steps, and now

    def follow(self, policy):
        """The policy has made a step."""
        if self.lag > 0:
            self.past = [*self.past, weights_of(policy)][-1 - self.lag:]
            self.policy.load_state_dict(self.past[0])

    def state_dict(self):
        return {"past": self.past}

    def load_state_dict(self, state):
        self.past = state["past"]
        if self.lag > 0:
            self.policy.load_state_dict(self.past[0])


def lag_metrics(batch, sampler_logps):
    """How far the sampler of a batch was from the policy, and what its tokens weigh. -> dict"""
    num_tokens = batch.mask.sum()
    difference = ((batch.logps - sampler_logps) * batch.mask).abs()
    return {
        "sampling/sampling_logp_difference/mean": (difference.sum() / num_tokens).item(),
        "sampling/sampling_logp_difference/max": difference.max().item(),
        "sampling/importance_sampling_ratio/mean": (batch.weights.sum() / num_tokens).item()}


def weights_of(model):
    """A copy of its weights. -> dict"""
    return {name: weight.clone() for name, weight in model.state_dict().items()}


# ---- 4. an optimizer -------------------------------------------------------------------------

class Muon:
    """Momentum for matrices, made orthogonal: a step goes equally far in all directions of a matrix
    (Jordan and others, 2024). As torch.optim.Muon, but matrices of one shape are stacked, and the
    products are in float32, which many CPUs multiply faster than bfloat16."""

    def __init__(self, matrices, momentum=0.95):
        self.momentum = momentum
        by_shape = {}
        for matrix in matrices:
            by_shape.setdefault(tuple(sorted(matrix.shape)), []).append(matrix)
        self.stacks = list(by_shape.values())
        self.means = [torch.stack([wide(torch.zeros_like(matrix)) for matrix in stack])
                      for stack in self.stacks]

    @torch.no_grad()
    def step(self, learning_rate):
        for stack, mean in zip(self.stacks, self.means):
            gradients = torch.stack([wide(matrix.grad) for matrix in stack])   # (n, rows, columns)
            mean.lerp_(gradients, 1 - self.momentum)
            updates = orthogonal(gradients.lerp(mean, self.momentum))           # as Nesterov
            for matrix, update in zip(stack, updates):
                rows, columns = matrix.shape
                scale = max(1, rows / columns) ** 0.5
                wide(matrix).add_(update, alpha=-learning_rate * scale)


def wide(matrix):
    """The matrix, or its transpose if it has more rows than columns."""
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix


def orthogonal(x):
    """The matrices with singular values near 1 (0.7 to 1.2), by five steps of Newton and Schulz.
    (n, rows, columns), rows <= columns -> (n, rows, columns)"""
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT                                                         # (n, rows, rows)
        even = torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315)
        x = torch.baddbmm(x, even, x, beta=3.4445)          # 3.4445 x - 4.775 x^3 + 2.0315 x^5
    return x


# ---- 5. metrics and scores -------------------------------------------------------------------

def mean(values):
    """The mean of a list; None if it is empty."""
    return sum(values) / len(values) if values else None


def explained_variance(values, returns, mask):
    """1 - Var(returns - values) / Var(returns) over the valid slots: 1 if V is perfect. -> float"""
    variance = returns[mask > 0].var()
    error = (returns - values)[mask > 0].var()
    return (1 - error / variance).item() if variance > 1e-8 else 0.0


def mean_metrics(history):
    """The mean of each metric over the optimizer steps of a batch, of the largest change of a
    log-probability the maximum. list of dicts -> dict"""
    means = {name: mean([metrics[name] for metrics in history]) for name in history[0]}
    if "max_log_ratio" in means:
        means["max_log_ratio"] = max(metrics["max_log_ratio"] for metrics in history)
    return means


def check_finite(step, metrics):
    """Exit if a loss or a gradient is not finite; the last checkpoint is kept."""
    for name in ("loss", "grad_norm", "value_loss", "critic_grad_norm"):
        if not math.isfinite(metrics.get(name, 0.0)):
            fail(f"step {step + 1}: {name} is not finite: {metrics}; the last checkpoint is kept",
                 code=1)


def describe(batch):
    """What the samples of a step are like, in TRL's words: accuracy and frontier of all that was
    sampled, the others of the groups that dynamic sampling kept. -> metrics"""
    rewards = batch.rewards
    lengths = batch.mask.sum(dim=1)
    signal = has_signal(rewards).double().mean().item()
    entropy = (batch.entropy * batch.mask).sum() / lengths.sum()
    metrics = {"reward": rewards.mean().item(),
               "reward_std": rewards.std(dim=1).mean().item(),
               "signal": signal,
               "frac_reward_zero_std": 1 - signal}
    if batch.pass_rates:
        metrics["accuracy"] = mean(sum(batch.pass_rates.values(), []))
    return metrics | {
        "completions/mean_length": lengths.mean().item(),
        "completions/clipped_ratio": batch.is_truncated.float().mean().item(),
        "entropy": entropy.item()} | frontier(batch.pass_rates)


def level(problem):
    """The name that problems of one task and difficulty have in common."""
    return f"{problem.task}-{problem.difficulty}"


def frontier(pass_rates):
    """Of each difficulty, if there are several: which share of its groups is all wrong, mixed, and
    all right. -> metrics"""
    metrics = {}
    for name, groups in sorted(pass_rates.items()) if len(pass_rates) > 1 else ():
        wrong = groups.count(0.0) / len(groups)
        right = groups.count(1.0) / len(groups)
        metrics[f"frontier/{name}/wrong"] = wrong
        metrics[f"frontier/{name}/mixed"] = 1 - wrong - right
        metrics[f"frontier/{name}/right"] = right
    return metrics


def pass_at_k(n, c, k):
    """The chance that one of k completions is right, unbiased from n of which c are (2107.03374,
    eq. 1). -> float"""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def majority(answers):
    """The most frequent answer, the first of those that tie. None is no vote. -> str or None"""
    votes = [answer for answer in answers if answer is not None]
    return max(votes, key=collections.Counter(votes).get, default=None)


def maj_at_k(task, problems, answers, n, k):
    """How often the majority of k answers is right, over the n // k disjoint blocks of the n
    samples of a problem; problems without a known answer are left out. -> float or None"""
    verdicts = []
    for first in range(0, len(problems), n):
        if not problems[first].answer:
            continue
        for start in range(first, first + n - k + 1, k):
            vote = majority(answers[start:start + k])
            verdicts.append(task.verify(problems[start], f"<answer>{vote}</answer>") == 1)
    return mean(verdicts)


def scores(task, problems, texts, lengths, num_samples):
    """What an evaluation says of num_samples completions of each problem, side by side, or of one
    greedy completion if num_samples is 0. -> dict: lists go by k, None stands where nothing counts,
    and "examples" are for the report"""
    verdicts = [task.verify(problem, text) for problem, text in zip(problems, texts)]
    is_correct = [task.is_correct(problem, v) for problem, v in zip(problems, verdicts)]
    found = {}
    judged = [i for i, correct in enumerate(is_correct) if correct is not None]
    if judged:
        found |= judged_scores(
            task, [problems[i] for i in judged], [texts[i] for i in judged],
            [is_correct[i] for i in judged], num_samples)
    if num_samples == 0:
        found["examples"] = [
            {"prompt": problem.prompt, "answer": problem.answer, "text": text, "right": correct}
            for problem, text, correct in zip(problems[:64], texts, is_correct)]

    # tasks that reward each move
    returns = []
    best_returns = []
    for problem, verdict in zip(problems, verdicts):
        if isinstance(verdict, list):
            returns.append(sum(verdict))
            best_returns.append(task.best_return(problem))
    if returns:
        name = "return" if num_samples else "greedy_return"
        found |= {name: mean(returns), "best_return": mean(best_returns)}
    thinks = ["<think>" in text for text in texts]
    return found | {"think_share": mean(thinks), "mean_length": mean(lengths),
                    "problems": len(problems) // max(num_samples, 1), "samples": num_samples}


def judged_scores(task, problems, texts, is_correct, num_samples):
    """The scores of completions that are right or wrong. -> dict"""
    name = "pass@1" if num_samples else "greedy"
    found = {name: mean(is_correct)}
    if num_samples > 0:
        found |= sample_scores(task, problems, texts, is_correct, num_samples)
        thinks = ["<think>" in text for text in texts]
        found["accuracy_given_think"] = mean([c for c, t in zip(is_correct, thinks) if t])
        found["accuracy_given_direct"] = mean([c for c, t in zip(is_correct, thinks) if not t])
    tasks = sorted({problem.task for problem in problems})
    for part in tasks if len(tasks) > 1 else ():
        found[f"{name}/{part}"] = mean([c for p, c in zip(problems, is_correct) if p.task == part])
    return found


def sample_scores(task, problems, texts, is_correct, n):
    """pass@k and maj@k for k = 1 .. n, as lists, and by name for k = 8 and n. -> dict"""
    answers = votes(task, problems, texts, n)
    num_correct = [sum(is_correct[first:first + n]) for first in range(0, len(problems), n)]
    curves = {"pass@k": []}
    for k in range(1, n + 1):
        curves["pass@k"].append(mean([pass_at_k(n, c, k) for c in num_correct]))
    if any(answer is not None for answer in answers):
        curves["maj@k"] = [maj_at_k(task, problems, answers, n, k) for k in range(1, n + 1)]
    found = {}
    for k in sorted({min(8, n), n}):
        for name, curve in curves.items():
            found[name.replace("k", str(k))] = curve[k - 1]
    return found | curves


def votes(task, problems, texts, n):
    """The answers of n completions of each problem; those that are the same, as 3*4 and 4*3, are
    written as the first of them is. None where there is no answer. -> list of str"""
    found = []
    for i, (problem, text) in enumerate(zip(problems, texts)):
        if i % n == 0:
            first_answers = {}                          # by their canonical form
        answer = extract(text)
        if answer is not None:
            answer = first_answers.setdefault(task.canonical(problem, answer), answer)
        found.append(answer)
    return found


# ---- 6. the console --------------------------------------------------------------------------

def silent(label, steps):
    """The steps, and no word about them."""
    return steps


class Console:
    """What a run prints: one plain line a step. tools/console.py has one for terminals."""
    has_heading = False

    def progress(self, label, steps):
        """The items of the list `steps`; a console may say how long they will take."""
        return steps

    def start(self, run):
        """Before the first step: the scores of the base."""
        base = {name: score for name, score in run.state["base"].items() if name != "examples"}
        print("base:", base, flush=True)

    def step(self, run, metrics):
        """After a step; of the run's columns, those that the step has."""
        shown = {heading: name for heading, name in run.columns.items() if name in metrics}
        if not self.has_heading:
            print("step", *shown)
            self.has_heading = True
        values = [round(metrics[name], 3) for name in shown.values()]
        print(run.state["steps"], *values, flush=True)

    def samples(self, batch, advantages):
        """After a step whose samples were kept. advantages: (B,)"""

    def finish(self, run, both):
        """After training: base and trained policy."""
        for name, before in both["base"].items():
            if name != "examples":
                print(f"{name}: {before} -> {both['trained'].get(name)}")
        print(f"{run.state['steps']} steps, folder {run.folder}", flush=True)


def make_console():
    """The console of tools/, where it is there, else the plain one."""
    rich = optional("tools.console")
    return rich.RichConsole() if rich else Console()


# ---- 7. the run ------------------------------------------------------------------------------

def write(path, content):
    """Save text or tensors under a temporary name, then rename: a reader, or a kill at any time,
    meets the old file or the new one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    if isinstance(content, str):
        part.write_text(content)
    else:
        torch.save(content, part)
    os.replace(part, path)


def load(path, device):
    """What `write` saved, tensors and plain values only. Raises nearly anything if the file is
    damaged; torch itself does not look at the checksums."""
    if zipfile.ZipFile(path).testzip():
        raise ValueError(f"{path}: wrong checksum")
    return torch.load(path, map_location=device, weights_only=True)


class Run:
    """One run: its folder, what it logs and prints, when it saves, evaluates and stops.

    `columns` are those of the console: heading -> name of a metric. `state` is a dict of plain
    values that is saved with each checkpoint; a script may keep values of its own in it. Nothing
    is written before load_base.
    """

    def __init__(self, cfg, task, policy, columns, argv=None):
        torch.set_num_threads(cfg.num_threads)
        self.cfg = cfg
        self.logs = ["metrics.jsonl", "samples.jsonl", "greedy.jsonl"]
        if getattr(cfg, "save_pairs", False):
            self.logs.append("pairs.jsonl")
        self.task = task
        self.policy = policy
        self.columns = columns
        self.argv = sys.argv[1:] if argv is None else argv
        self.script = Path(inspect.getfile(type(cfg)))
        self.console = make_console()
        self.clock = time.perf_counter()
        self.is_stepping = False            # from the first step on, Ctrl-C waits for its end
        self.is_interrupted = False
        self.state = {"steps": 0, "recent": [], "base": {}, "asked": [],
                      "seconds_warm_start": 0.0, "seconds_total": 0.0}
        self.parts = {}
        self.resumed = {}                   # the checkpoint of the run that is resumed
        default = f"runs/{self.script.stem}-{task.name}-s{cfg.seed}"
        self.folder = Path(cfg.resume_from_checkpoint or cfg.output_dir or default)
        if cfg.resume_from_checkpoint:
            self.resume()
        if cfg.init_from and not self.resumed:
            self.read("init_from", cfg.init_from)

    def read(self, flag_name, folder, name="checkpoint.pt", model=None):
        """Load the policy, or another model of its shape, from a file of a run folder. Exits with
        one line if the file is not there, is damaged, or does not fit. -> what it holds"""
        model = self.policy if model is None else model
        try:
            saved = load(Path(folder, name), self.cfg.device)
            config = json.loads(Path(folder, "config.json").read_text())["config"]
            for shape in ("num_attention_heads", "num_key_value_heads"):    # no weight shows them
                if config[shape] != getattr(self.cfg, shape):
                    raise ValueError
            model.load_state_dict(saved["policy"] if name == "checkpoint.pt" else saved)
        except Exception as error:
            fail(f"--{flag_name} {folder}: {Path(folder, name)} holds no policy of this shape "
                 f"({type(error).__name__}); name another run")
        return saved

    def load_teacher(self, folder):
        """The policy of a run folder. It is saved with each checkpoint, so that a run that is
        resumed has the same. -> model, or None without a folder"""
        if not folder:
            return None
        teacher = copy.deepcopy(self.policy)
        if not self.resumed:
            self.read("teacher", folder, model=teacher)
        self.parts["teacher"] = teacher
        return teacher

    def resume(self):
        """Take up the state of the run, if it was not killed before its first checkpoint; the
        policy stays the base until `steps` loads the parts."""
        if not (self.folder / "checkpoint.pt").exists():
            return
        self.resumed = self.read("resume_from_checkpoint", self.folder)
        if not self.resumed.keys() >= {"state", "task", "logs"}:
            fail(f"--resume_from_checkpoint {self.folder}: {self.folder / 'checkpoint.pt'} holds a "
                 f"policy, but no run; take --init_from {self.folder}")
        self.read("resume_from_checkpoint", self.folder, "base.pt")
        self.state |= self.resumed["state"]
        self.task.state = self.resumed["task"]

    # -- before the first step

    def make_folder(self):
        """Make the run folder, --output_dir (new or empty) or the first free default, and write in
        it what is run."""
        cfg = self.cfg
        first = self.folder
        number = 1
        try:
            while not cfg.resume_from_checkpoint and is_used(self.folder):
                if cfg.output_dir:
                    fail(f"--output_dir {first}: is not empty; name another, or resume its run")
                number += 1
                self.folder = Path(f"{first}-{number}")
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail(f"--output_dir {self.folder}: cannot be made ({error.strerror})")
        config = {field.name: getattr(cfg, field.name) for field in flags_of(type(cfg))}
        config["resume_from_checkpoint"] = ""
        write(self.folder / "config.json", json.dumps({
            "script": self.script.name, "argv": self.argv, "python": sys.version,
            "torch": torch.__version__, "config": config}, indent=2))
        write(self.folder / self.script.name, self.script.read_text())
        if getattr(cfg, "pairs", "") and not cfg.resume_from_checkpoint:
            shutil.copyfile(cfg.pairs, self.folder / GIVEN_PAIRS)

    def begin(self):
        """Make the run folder, say where it is, and from now on handle Ctrl-C."""
        self.make_folder()
        signal.signal(signal.SIGINT, self.on_interrupt)
        print(f"{self.script.name}: {self.task.name} on {self.cfg.device}, run folder "
              f"{self.folder}", flush=True)

    def load_base(self, warm_start):
        """Begin, and give the policy its first weights: those of --init_from, or of the base that
        scripts share, which the first run that needs it makes by
        warm_start(policy, task, cfg, progress)."""
        cfg = self.cfg
        self.begin()
        if not self.resumed:
            if cfg.cold_start:
                warm_start(self.policy, self.task, cfg, self.console.progress)
            elif not cfg.init_from:
                self.share_base(warm_start)
            write(self.folder / "base.pt", self.policy.state_dict())
            self.state["seconds_warm_start"] = time.perf_counter() - self.clock
        for weight in self.policy.parameters():         # not those of the warm start
            weight.grad = torch.zeros_like(weight)

    def load_reward_model(self, sample_batch):
        """With --reward model: train one on what the base samples by sample_batch(policy, task,
        cfg, name), or take that of the run that is resumed. From now on its ratings are added to
        the rewards of batches."""
        if "model" in self.cfg.reward.split("+"):
            preferences = importlib.import_module("tasks.preferences")
            model = preferences.make_reward_model(self, sample_batch)
            self.parts["reward_model"] = self.task.reward_model = model

    def share_base(self, warm_start):
        """Load the base from runs/base/, or make it and keep it there."""
        path = base_path(self.cfg, self.script)
        fresh = weights_of(self.policy)
        try:
            self.policy.load_state_dict(load(path, self.cfg.device))
            print(f"base: {path}", flush=True)
        except Exception:                   # none there, or damaged and perhaps half loaded
            self.policy.load_state_dict(fresh)
            warm_start(self.policy, self.task, self.cfg, self.console.progress)
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, self.policy.state_dict())

    # -- the steps

    def steps(self, evaluate, **parts):
        """Yield the steps still to do. `parts` (policy=..., optimizer=...) are what checkpoints
        hold. evaluate(policy, task, cfg, num_samples, progress) is called before and after
        training, and greedily (num_samples = 0) every eval_steps."""
        cfg = self.cfg
        state = self.state
        self.parts |= parts
        self.evaluate = functools.partial(
            evaluate, self.policy, self.task, cfg, progress=self.console.progress)
        self.cut_logs()

        # the policy still is the base
        asked = [cfg.num_eval_problems, cfg.num_eval_samples]
        if state["asked"] != asked:
            state["base"] = self.evaluate_fully()
            state["asked"] = asked
        if self.resumed:
            self.load_parts()
        self.save()
        self.console.start(self)

        self.is_stepping = True
        while self.goes_on():
            self.step_clock = time.perf_counter()
            yield state["steps"]
            if state["steps"] % cfg.save_steps == 0:
                self.save()
        self.save()
        self.is_stepping = False
        if self.is_interrupted:
            self.leave()

    def load_parts(self):
        """Bring the policy, its optimizer and other parts to where the resumed run has them."""
        for name, part in self.parts.items():
            part.load_state_dict(self.resumed[name])

    def goes_on(self):
        """Whether there is another step to do. -> bool"""
        is_solved = sum(self.state["recent"]) >= 5 * self.cfg.stop_at
        is_over = self.state["steps"] >= self.cfg.max_steps
        return not (is_solved or is_over or self.is_interrupted)

    def cut_logs(self):
        """Cut the logs to what the checkpoint knows: a killed run may have logged more. A log that
        it does not know yet, as it is older, begins now."""
        for name in self.logs:
            size = self.resumed["logs"].get(name, 0) if self.resumed else 0
            with open(self.folder / name, "ab") as log:
                log.truncate(min(log.tell(), size))

    def evaluate_fully(self):
        """Greedy scores and those of samples, on held-out problems. -> dict"""
        return self.evaluate(0) | self.evaluate(self.cfg.num_eval_samples)

    def is_evaluation_step(self, step):
        """Whether the held-out problems are answered after this step. -> bool"""
        return (step + 1) % self.cfg.eval_steps == 0

    def log(self, batch, advantages, metrics, decode, score=None, values=None):
        """The step is done: if it is time, evaluate and keep what was answered; then log and print.
        Of some steps samples are kept, with advantages (B,) or (B, T); their tokens are shaded by a
        critic's values (B, T), or by the ratio pi / pi_old, for which `score` is the script's, as
        is `decode`."""
        state = self.state
        seconds = time.perf_counter() - self.step_clock
        step = state["steps"]
        state["steps"] = step + 1
        metrics = describe(batch) | self.task.describe(batch, step) | metrics
        metrics["step_time"] = seconds
        if self.is_evaluation_step(step):
            found = self.evaluate(0)
            self.append("greedy.jsonl", {"step": step + 1, "examples": found["examples"]})
            for name, value in found.items():
                if isinstance(value, float):
                    metrics[f"eval/{name}"] = value
        self.append("metrics.jsonl", {"step": step + 1} | metrics)
        if "accuracy" in metrics:
            state["recent"] = [*state["recent"], metrics["accuracy"]][-5:]
        self.task.learn(batch)
        self.console.step(self, metrics)
        if step == 0 or self.is_evaluation_step(step):
            self.keep_samples(batch, advantages, decode, score, values)

    def keep_samples(self, batch, advantages, decode, score, values):
        """Add four groups of a batch to samples.jsonl, and print what the console shows of them."""
        cfg = self.cfg
        num_rows = min(4 * batch.rewards.shape[1], len(batch.texts))
        if values is None:
            prompts = batch.prompts[:num_rows]
            tokens = batch.tokens[:num_rows]
            with torch.no_grad():
                logps, _ = score(self.policy, prompts, tokens, cfg.temperature, cfg.kernel)
            shade = (logps - batch.logps[:num_rows]).exp()                      # (num_rows, T)
        else:
            shade = values[:num_rows]                                           # (num_rows, T)
        if advantages.dim() == 2:
            total = (advantages * batch.mask).sum(dim=1)
            advantages = total / batch.mask.sum(dim=1)                          # (B,)
        records = sample_records(batch, advantages, shade, decode)
        for record in records:
            record["shade"] = "ratio" if values is None else "value"
            self.append("samples.jsonl", {"step": self.state["steps"]} | record)
        self.console.samples(batch, advantages)

    def append_pairs(self, batch, chosen, rejected, encode_examples):
        """Add pairs of rows of a batch to pairs.jsonl, but for those with a completion whose text
        would be read as other tokens: it has no end, is no UTF-8, or spells a special token."""
        examples = list(zip(batch.problems, batch.texts))
        _, tokens, _, lengths = encode_examples(examples, self.task, self.cfg)
        can_be_read = [torch.equal(read[:n], sampled[:n]) for read, sampled, n
                       in zip(tokens, batch.tokens, lengths.tolist())]
        for best, worst in zip(chosen.tolist(), rejected.tolist()):
            if can_be_read[best] and can_be_read[worst]:
                self.append("pairs.jsonl", {
                    "prompt": batch.problems[best].prompt,
                    "chosen": batch.texts[best], "rejected": batch.texts[worst]})

    def append(self, name, record):
        """Add a line to a log. JSON has no infinities: they become null."""
        finite = {}
        for key, value in record.items():
            is_finite = not isinstance(value, float) or math.isfinite(value)
            finite[key] = value if is_finite else None
        with open(self.folder / name, "a") as log:
            log.write(json.dumps(finite) + "\n")

    def save(self):
        """Write a checkpoint."""
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        write(self.folder / "checkpoint.pt", self.record() | parts)

    def record(self):
        """What a checkpoint holds beside the parts, with the sizes that the logs have now."""
        now = time.perf_counter()
        self.state["seconds_total"] += now - self.clock
        self.clock = now
        sizes = {name: (self.folder / name).stat().st_size for name in self.logs}
        return {"state": self.state, "task": self.task.state, "logs": sizes}

    # -- the end

    def on_interrupt(self, *_):
        """Ctrl-C: a step under way is finished and saved; the second time the run ends at once."""
        if not self.is_stepping or self.is_interrupted:
            self.leave()
        self.is_interrupted = True

    def command(self):
        """What goes on with the run in a shell."""
        folder = shlex.quote(str(self.folder))
        script = shlex.quote(os.path.relpath(self.script))
        return f"python {script} --resume_from_checkpoint {folder}"

    def question(self):
        """What asks the trained policy in a shell."""
        prompt = sample_problems(self.task, 1, "example", "test")[0].prompt
        folder = shlex.quote(str(self.folder))
        return f"python -m tools.ask {folder} {shlex.quote(prompt)}"

    def leave(self):
        """End the run, and say how to go on. os.write, because a print may be under way."""
        os.write(2, f"\ninterrupted; go on with:\n  {self.command()}\n".encode())
        raise SystemExit(130)

    def finish(self):
        """Evaluate what was trained, save, and say what changed. -> the summary of summary.json"""
        state = self.state
        both = {"base": state["base"], "trained": state["base"]}
        if state["steps"] > 0:
            both["trained"] = self.evaluate_fully()
        self.save()
        self.write_examples(both)
        summary = {name: state[name] for name in ("steps", "seconds_warm_start", "seconds_total")}
        for name, found in both.items():
            summary[name] = {key: score for key, score in found.items() if key != "examples"}
        write(self.folder / "summary.json", json.dumps(summary, indent=2))
        self.console.finish(self, both)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return summary

    def write_examples(self, both):
        """evaluation.jsonl: held-out problems, answered before and after."""
        lines = []
        for base, trained in zip(both["base"]["examples"], both["trained"]["examples"]):
            record = {"prompt": base["prompt"], "answer": base["answer"],
                      "base": base, "trained": trained}
            lines.append(json.dumps(record) + "\n")
        write(self.folder / "evaluation.jsonl", "".join(lines))


def is_used(folder):
    """Whether a folder holds anything but what a killed run left of a file."""
    return any(path.suffix != ".tmp" for path in folder.glob("*"))


def base_path(cfg, script):
    """Where the base is kept. Its name has a hash of all that shapes it: the machinery of the
    script, this file, the files of its tasks, flags, and torch's version. -> Path"""
    texts = [script.read_text().partition(MACHINERY)[2], Path(__file__).read_text()]
    names = cfg.task.split(",")
    for name in names:
        texts.append(Path(inspect.getfile(find_task(name, cfg.task))).read_text())
    if len(names) > 1:
        texts.append((HERE / "tasks" / "mix.py").read_text())
    flags = [getattr(cfg, field.name) for field in dataclasses.fields(Config)
             if field.metadata["group"] in ("task", BASE_GROUP) and field.name != "reward"]
    key = repr((texts, flags, cfg.device, cfg.num_threads, torch.__version__))
    return Path(f"runs/base/{cfg.task}-s{cfg.base_seed}-{zlib.crc32(key.encode()):08x}.pt")
