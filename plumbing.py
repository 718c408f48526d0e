"""A reader of an algorithm can skip this file: it reads the flags, makes the base policy, and gives
a run its folder, its logs and its checkpoints."""
import argparse
import contextlib
import copy
import dataclasses
import dis
import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import re
import secrets
import shlex
import signal
import sys
import time
import types
import zipfile
import zlib
from pathlib import Path
from typing import get_args

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import common
from common import fail

# ---- 1. flags --------------------------------------------------------------------------------

def parse_flags(config_class, argv=None):
    """Read the flags of `argv`; the others come from the run that is resumed, or from the task, or
    from Config. Exits with one line if a flag is bad. -> Config"""
    common.decode([])                           # exits if tiktoken is missing
    parser = argparse.ArgumentParser(
        description=inspect.getmodule(config_class).__doc__, allow_abbrev=False,
        argument_default=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail(f"{message} (--help lists the flags)")
    for field in dataclasses.fields(config_class):
        options = {"type": field.type if field.type in (int, float) else os.path.expanduser,
                   "metavar": "|".join(get_args(field.type)) or "VALUE"}    # quotes keep a ~
        if field.type is bool:
            options = {"action": argparse.BooleanOptionalAction}
        spellings = dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}"))
        text = f"{field.metadata['help']} [{field.default}]".replace("%", "%%")
        parser.add_argument(*spellings, dest=field.name, help=text, **options)
    if argv is None:
        sys.excepthook = end_quietly
    if getattr(sys.stdout, "errors", "") == "strict":       # a console may lack a character
        sys.stdout.reconfigure(errors="backslashreplace")
    given = vars(parser.parse_args(argv))
    if "" in given.values():
        fail("a flag has an empty value; give one, or leave it out")

    stored = {}
    if tasks := common.optional("tasks.flags"):
        stored = tasks.defaults(config_class, given.get("task", "arithmetic"))
    if folder := given.get("resume_from_checkpoint"):
        script, flags = read_config(folder)
        if script != Path(inspect.getfile(config_class)).name:
            fail(f"--resume_from_checkpoint {folder}: this is a run of {script}")
        stored = {name: flags[name] for name in flags if name in config_class.__dataclass_fields__}
        if gone := [name for name in flags if flags[name] and name not in stored]:
            fail(f"{folder}: this version has no --{gone[0]}; resume with the one that made it")
        for name in given.keys() - config_class.MAY_DIFFER:
            if given[name] != stored.get(name, given[name]):
                fail(f"--{name} {given[name]}: the run has {stored[name]!r} (see --init_from)")
    cfg = config_class(**(stored | given))
    for holds, message in rules(cfg):
        if not holds:
            fail(message)
    kernels = common.optional("kernels")
    if kernels and "device" not in stored | given:
        kernels.note_unused_gpu()
    return cfg


def end_quietly(kind, error, trace):
    """Print an error, but end silently if nobody reads the output any more, as after `| head`."""
    try:
        print(end="\n" if kind is BrokenPipeError else "", flush=True)
    except BrokenPipeError:
        os._exit(141)
    sys.__excepthook__(kind, error, trace)


def rules(cfg):
    """Check a Config. Yields whether each rule holds, and the message if it does not."""
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        choices = get_args(field.type) or [value]
        yield value in choices, f"--{field.name} {value}: must be one of {choices}"
        if field.type in (int, float):
            low = int(field.type is int and field.default > 0 and field.name not in cfg.MAY_BE_ZERO)
            kinds = (int,) if field.type is int else (int, float)       # bool is an int, too
            is_good = type(value) in kinds and low <= value < 1e30      # far below float32's inf
            yield is_good, f"--{field.name} {value}: must be a number, at least {low}, below 1e30"
        elif field.type in (bool, str):
            is_good = type(value) is field.type
            yield is_good, f"--{field.name} {value}: must be a {field.type.__name__}"
    yield from cfg.rules()
    has_device = cfg.device == "cpu" or torch.get_device_module(cfg.device).is_available()
    yield has_device, f"--device {cfg.device}: torch cannot use it here; use cpu"
    if cfg.report_to != "none":
        yield has_report(), f"--report_to {cfg.report_to}: needs the folders report/ and tasks/"
    if cfg.kernel == "triton":
        kernels = common.optional("kernels")
        needs = kernels.NEEDS if kernels else "the folder kernels/"
        yield kernels and kernels.can_run(cfg.device), f"--kernel triton: needs {needs}; use torch"


def has_report():
    """Whether the folders are present that follow a run, and write its report. -> bool"""
    return common.optional("report") is not None and common.optional("tasks") is not None


def read_config(folder):
    """Read which script and flags a run had; exit with one line if there is no run. -> str, dict"""
    try:
        record = json.loads(Path(folder, "config.json").read_text("utf-8"))
        return record["script"], dict(record["config"])
    except (OSError, ValueError, KeyError, TypeError):
        fail(f"{folder}: this folder contains no run")


# ---- 2. the base -----------------------------------------------------------------------------

class AdamW(torch.optim.AdamW):
    """torch's, without weight decay, and without the import of torch._dynamo, which takes 4 s."""

    def __init__(self, weights, **options):
        super().__init__(weights, weight_decay=0.0, **options)


for name in ("add_param_group", "load_state_dict", "state_dict", "step", "zero_grad"):
    method = getattr(torch.optim.AdamW, name)           # wrapped in a function that imports it
    setattr(AdamW, name, torch.no_grad()(getattr(method, "__wrapped__", method)))


def load_base(policy, task, cfg):
    """Load the base, or make it if this is the first run that needs it."""
    path = base_path(policy, task, cfg)
    try:
        read_policy(policy, path)
    except Exception:                   # there is no base yet, or a damaged one
        warm_start(policy, task, cfg)
        if not all(weight.isfinite().all() for weight in policy.parameters()):
            fail("the weights of the base are not finite: lower --base_learning_rate", 1)
        suffix = f".{secrets.token_hex(4)}.tmp"     # another run, or container, may write it, too
        write(path, {"policy": policy.state_dict()}, suffix)


def base_path(policy, task, cfg):
    """Name the file of a base by a hash of what shapes it: the code of the policy, the warm start
    and the task, the task's attributes, the flags, torch and the arithmetic. -> Path"""
    task = getattr(task.demonstration, "__self__", task)        # without what --reward wraps it in
    shape = [recipe(thing, {}) for thing in (type(policy), warm_start, task)]
    shape += [getattr(cfg, name) for name in ("device", *common.Base.__annotations__)]
    key = zlib.crc32(repr((shape, common.ARITHMETIC)).encode())
    return Path(f"runs/base/{task.name}-{key:08x}.pt")


def recipe(thing, seen):
    """Describe what makes a function, a class or an object do what it does: values, compiled code,
    which has no comments, and all that they mention, except for packages. Equal texts mean equal
    behavior, if it does not depend on files. seen: {id: thing}. -> str"""
    if inspect.ismethod(thing) and not is_installed(thing):
        return recipe([thing.__func__, thing.__self__], seen)
    if isinstance(thing, functools.partial):
        return recipe([thing.func, thing.args, thing.keywords], seen)
    thing = inspect.unwrap(getattr(thing, "__func__", thing))           # a method, or decorated
    if isinstance(thing, property):
        thing = thing.fget
    if id(thing) in seen or isinstance(thing, Path) or is_installed(thing):
        return getattr(thing, "__qualname__", "")
    if isinstance(thing, (list, tuple)):
        return f"[{', '.join(recipe(part, seen) for part in thing)}]"
    if isinstance(thing, (set, frozenset)):             # their order differs between processes
        return f"{{{', '.join(sorted(recipe(part, seen) for part in thing))}}}"
    if isinstance(thing, dict):
        return recipe(list(thing.items()), seen)
    if inspect.isfunction(thing) or inspect.isclass(thing) or hasattr(thing, "__dict__"):
        seen[id(thing)] = thing
    if inspect.isfunction(thing):
        return recipe(parts_of_function(thing), seen)
    if inspect.isclass(thing):
        parts = [(name, value) for name, value in vars(thing).items()
                 if inspect.isroutine(value) or not name.startswith("__")]
        return recipe([thing.__qualname__, *thing.__mro__[1:], *parts], seen)
    if hasattr(thing, "tolist"):                        # an array, whose repr leaves numbers out
        return recipe(thing.tolist(), seen)
    if hasattr(thing, "__dict__"):
        hidden = {"verify", "state", "flag"}            # of a task; they shape no demonstration
        hidden |= {name for name in vars(thing)         # filled in when it is first read
                   if isinstance(getattr(type(thing), name, None), functools.cached_property)}
        parts = [(name, value) for name, value in vars(thing).items() if name not in hidden]
        return recipe([type(thing), *parts], seen)
    return re.sub(" at 0x[0-9a-fA-F]+", "", repr(thing))


def parts_of_function(function):
    """List the code of a function, and the values that it finds under the names in it."""
    codes = [function.__code__]
    for code in codes:                                  # also the functions within it
        codes += [part for part in code.co_consts if inspect.iscode(part)]
    parts = [function.__defaults__, function.__kwdefaults__]
    parts += [cell.cell_contents for cell in function.__closure__ or ()]
    names = {}                                          # name: value
    for code in codes:
        constants = [part for part in code.co_consts if not inspect.iscode(part)]
        parts += [code.co_code, code.co_names, [x for x in constants if x != function.__doc__]]
        names |= {name: function.__globals__.get(name) for name in code.co_names}
    for instruction in itertools.chain.from_iterable(map(dis.get_instructions, codes)):
        if instruction.opname == "IMPORT_NAME":         # of the user's modules, when it is called
            stem = instruction.argval
            package = function.__globals__.get("__package__") or ""
            stems = [stem, f"{package}.{stem}".strip(".")]      # the second one if it is relative
            for name in (*stems, *(f"{stem}.{name}" for stem in stems for name in names)):
                with contextlib.suppress(ImportError, ValueError):
                    if not is_installed(importlib.util.find_spec(name)):
                        names[name] = importlib.import_module(name)
    for value in names.values():
        if inspect.ismodule(value) and not is_installed(value):
            there = {name: x for name, x in vars(value).items() if not name.startswith("__")}
            mentioned = [there[name] for name in names if name in there]
            value = mentioned or there                  # all of it, for getattr and the like
        parts.append(value)
    return parts


def is_installed(thing):
    """Whether a function, a class or a module comes with Python or with a package."""
    try:
        path = Path(getattr(thing, "origin", None) or inspect.getfile(thing))
    except OSError:                     # a class that was typed into a notebook
        return False
    except TypeError:                   # built in, made by exec, or something else
        methods = [value for value in getattr(thing, "__dict__", {}).values()
                   if inspect.isfunction(value)]
        if inspect.isclass(thing) and methods:
            return is_installed(methods[0])
        return isinstance(thing, (type, types.ModuleType, types.BuiltinFunctionType))
    is_library = Path(os.__file__).parent in path.parents or str(path).startswith("<frozen")
    return is_library or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def warm_start(model, task, cfg):
    """Train the base by supervised learning: first on a textbook, which shows its work, then on a
    forum, where most people only answer."""
    is_cuda = cfg.device == "cuda"
    matrices = [weight for weight in model.blocks.parameters() if weight.dim() == 2]
    groups = {}                         # on CUDA, the matrices of a shape take their steps together
    for matrix in matrices:
        groups.setdefault(matrix.shape if is_cuda else matrix, []).append(matrix)
    momenta = [torch.zeros_like(torch.stack(group).squeeze(0)) for group in groups.values()]
    others = [weight for weight in model.parameters() if weight not in {*matrices}]
    adamw = AdamW(others, betas=(0.9, 0.95), capturable=is_cuda)
    num_parts = 2 if cfg.device == "cpu" else 1         # short rows need no columns for long ones

    def descend(rate, *batch):
        batch = [x.to(cfg.device) for x in batch]
        parts = batch[-1].argsort().chunk(num_parts)        # the shorter half first
        gradients = [gradient(model, batch, rows) for rows in parts]
        for weight, *terms in zip(model.parameters(), *gradients):
            weight.grad = sum(terms)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.param_groups[0]["lr"] = rate
        adamw.step()
        for group, momentum in zip(groups.values(), momenta):
            muon_step(group, momentum, 5 * rate)    # an orthogonal step is small per entry
    kernels = common.optional("kernels")
    if kernels and is_cuda and cfg.kernel != "torch":
        descend = kernels.recorded(descend, cfg.device)
    for step in tqdm(range(cfg.base_steps), "warm start", leave=False, disable=None):
        is_quarter = step % max(1, cfg.base_steps // 4) == 0
        if is_quarter and not sys.stderr.isatty():                      # tqdm prints nothing
            print(f"making the base: step {step} of {cfg.base_steps}", file=sys.stderr)
        phase = "textbook" if step < cfg.textbook_share * cfg.base_steps else "forum"
        examples = common.sample_problems(
            task, cfg.base_batch_size, (cfg.base_seed, step), phase=phase)
        prompts, tokens, mask, lengths = common.encode_examples(examples, task, "cpu")
        if is_cuda:                 # few widths, because each is recorded
            tokens, mask = (F.pad(x, (0, -x.shape[1] % 16)) for x in (tokens, mask))
        rate = cfg.base_learning_rate * min((step + 1) / 50, 1 - step / cfg.base_steps)
        descend(rate, prompts, tokens, mask, lengths)


def gradient(model, batch, rows):
    """Compute the share of `rows` in the gradient of the batch's loss: the sum of -log pi(o_t),
    divided by the number of all tokens, also of those that an environment inserted. -> list"""
    prompts, tokens, mask, lengths = batch
    T = tokens.shape[1] if tokens.is_cuda else int(lengths[rows].max())     # a graph cannot look
    tokens = tokens[rows, :T]                                                   # (b, T)
    logits = model(torch.cat([prompts[rows], tokens], dim=1)[:, :-1])[:, -T:]   # (b, T, V)
    token_loss = F.cross_entropy(logits.mT, tokens, reduction="none")           # (b, T)
    loss = (token_loss * mask[rows, :T]).sum() / lengths.sum()
    return torch.autograd.grad(loss, list(model.parameters()))


@torch.no_grad()
def muon_step(matrices, momentum, rate):
    """Take a step of Muon (Jordan and others, 2024): along the momentum, made orthogonal by five
    Newton-Schulz steps. Twice as many steps of AdamW alone make a worse base. torch.optim.Muon
    computes in bfloat16, which many CPUs only emulate."""
    gradient = torch.stack([matrix.grad for matrix in matrices]).squeeze(0)     # ([n,] r, c)
    momentum.lerp_(gradient, 0.05)
    x = gradient.lerp(momentum, 0.95)                   # Nesterov momentum
    r, c = matrices[0].shape
    x = (x.mT if r > c else x) / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):                                  # moves all singular values close to 1
        gram = x @ x.mT
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.775 * gram) @ x
    rate = rate * max(1, r / c) ** 0.5
    for matrix, step in zip(matrices, (x.mT if r > c else x).reshape(-1, r, c)):
        if matrix.is_cuda:              # in a graph, the rate is a tensor, which alpha may not be
            matrix.sub_(rate * step)
        else:
            matrix.sub_(step, alpha=rate)


# ---- 3. the run ------------------------------------------------------------------------------

def command(*words):
    """Write a command for the interpreter in use that can be pasted, with short paths. -> str"""
    words = sys.executable, *words
    return shlex.join(str(word).removeprefix(f"{Path.cwd()}{os.sep}") for word in words)


@contextlib.contextmanager
def writing(path):
    """Exit with one line if a file cannot be written."""
    try:
        yield
    except (OSError, RuntimeError) as error:            # torch raises RuntimeError
        fail(f"{path}: cannot be written ({getattr(error, 'strerror', 'is the disk full?')})")


def write(path, content, suffix=".tmp"):
    """Save text or tensors under a temporary name, then rename: no kill or power cut leaves half
    a file."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + suffix)
        try:
            with open(part, "wb") as file:
                if isinstance(content, str):
                    file.write(content.encode())
                else:
                    torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)                # left by a full disk, or by Ctrl-C


def read_policy(policy, path):
    """Load a checkpoint's weights; a damaged file can raise almost anything. -> the checkpoint"""
    if zipfile.ZipFile(path).testzip() is not None:         # torch does not verify checksums
        raise ValueError(f"{path}: damaged")
    saved = torch.load(path, map_location="cpu", weights_only=True)
    policy.load_state_dict(saved["policy"])
    return saved


def load_policy(policy, path):
    """Load a checkpoint's weights, or exit with one line if they do not fit. -> the checkpoint"""
    try:
        return read_policy(policy, path)
    except Exception as error:
        fail(f"{path}: contains no policy of this shape ({type(error).__name__})")


def handle(handlers):
    """Set the handlers of signals; a run that is not in the main thread cannot. -> those before"""
    with contextlib.suppress(ValueError):
        return {number: signal.signal(number, handler) for number, handler in handlers.items()}
    return {}


def logged(scores):
    """Name the scores that are numbers as metrics.jsonl does. -> dict"""
    return {f"eval/{name}": x for name, x in scores.items() if isinstance(x, float)}


SHOWN = ("greedy", "greedy_forced_think", "greedy_think_share", "greedy_accuracy_given_think",
         "pass@1", "greedy_return", "return", "best_return")


class Run:
    """One run with its folder, logs and checkpoints. It is a context: as long as it lasts, Ctrl-C
    saves the run. `columns` maps the headings of the console to metrics; `score` and `sample_batch`
    are the script's, for observers. A script may keep plain values in `state`, which checkpoints
    store."""

    def __init__(self, cfg, task, policy, columns, score, sample_batch):
        torch.set_num_threads(1)                # two would be only 1.15 times as fast
        torch.set_float32_matmul_precision("highest")       # not TF32, which some images turn on
        self.cfg = cfg
        self.task = task
        self.policy = policy
        self.columns = columns
        self.score = score
        self.sample_batch = sample_batch
        self.script = Path(inspect.getfile(type(cfg)))
        self.flag = task.flag or f"{self.script.stem}.{type(task).__name__}"    # as --task names it
        if not task.flag and cfg.task not in ("arithmetic", self.flag):
            fail(f"--task {cfg.task}: {self.script.name} makes a task of its own, {task.name}")
        if not task.flag and (cfg.reward != "accuracy" or cfg.curriculum):
            fail(f"--reward, --curriculum: have no effect on {task.name}, which "
                 f"{self.script.name} makes itself; write it into a file of tasks/ for --task")
        self.step = 0                           # number of steps that are done
        self.state = {"seconds_total": 0.0}
        self.pid = os.getpid()
        self.lock = None                        # the locked file in the folder
        self.handlers = {}                      # of signals, as they were before the run
        self.unsaved = None                     # a checkpoint that is written if the run ends
        self.line = {}                          # that metrics.jsonl lacks: of the base, or the end
        self.parts = {}                         # objects with a state_dict: policy, optimizer ...
        self.resumed = {}                       # the checkpoint of the run that is resumed
        self.observers = []
        if has_report():
            self.observers = common.optional("report.observers").observers(cfg)
        default = f"runs/{self.script.stem}-{task.name}-s{cfg.seed}"
        self.folder = Path(cfg.resume_from_checkpoint or cfg.output_dir or default)
        if cfg.resume_from_checkpoint and not (self.folder / "checkpoint.pt").exists():
            self.refuse_without_checkpoint()
        elif cfg.resume_from_checkpoint:
            self.resumed = load_policy(policy, self.folder / "checkpoint.pt")
            if "state" not in self.resumed:
                fail(f"{self.folder}: contains a policy, but no run; use --init_from instead")
            self.state |= self.resumed["state"]
            self.step = self.state["steps"]
            self.line = self.resumed.get("line", {})
            task.state.update(self.resumed["task"])
            load_policy(policy, self.folder / "base.pt")    # pi_ref; start() loads the trained
        elif cfg.init_from:
            load_policy(policy, Path(cfg.init_from, "checkpoint.pt"))
        self.began = time.perf_counter() - self.state["seconds_total"]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        """Save the last step that is done, and give back the signals and the folder, however the
        run ended."""
        if os.getpid() == self.pid:             # not in a process that the run has forked
            self.write_unsaved()
        handle(self.handlers)
        if self.lock is not None:
            self.lock.close()

    def refuse_without_checkpoint(self):
        """Exit with one line if the checkpoint of the run to resume was deleted. A run that was
        killed before it had one begins again."""
        metrics = self.folder / "metrics.jsonl"
        lines = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
        if lines > self.cfg.save_steps + 1 or (self.folder / "summary.json").exists():
            fail(f"{self.folder}: cannot be resumed, because its checkpoint.pt is gone")

    def begin(self):
        """Take the run folder, and cut its logs to their length at the checkpoint. Load the base,
        unless a run of before has provided weights. From now on, Ctrl-C prints how to resume.
        -> pi_ref, a copy of the policy as it is before the first step, even in a resumed run"""
        first = self.folder
        number = 1
        while not self.take():
            if self.cfg.resume_from_checkpoint:
                fail(f"{first}: this run is still in progress; resume it when it has ended")
            if self.cfg.output_dir:
                fail(f"{first}: is not empty, or another run writes there; name another folder")
            number += 1
            self.folder = Path(f"{first}-{number}")
        config = dataclasses.asdict(self.cfg) | {"resume_from_checkpoint": "", "task": self.flag}
        record = {"script": self.script.name, "torch": torch.__version__, "config": config}
        write(self.folder / "config.json", json.dumps(record, indent=2))
        copied = self.folder / self.script.name
        text = self.script.read_text("utf-8")
        if not copied.is_file():
            write(copied, text)
        elif copied.read_text("utf-8", "replace") != text:
            print(f"{copied}: is kept, although another text runs, {self.script}", file=sys.stderr)
        sizes = {"metrics.jsonl": 0, "samples.jsonl": 0, "greedy.jsonl": 0}
        self.logs = sizes | self.resumed.get("logs", {})
        for name, size in self.logs.items():
            log = self.folder / name
            if log.is_file() and not log.is_symlink():
                os.truncate(log, min(log.stat().st_size, size))
        numbers = {getattr(signal, name, signal.SIGINT) for name in ("SIGINT", "SIGTERM", "SIGHUP")}
        heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
        self.handlers = handle(dict.fromkeys(heard, self.leave))        # nohup ignores SIGHUP
        words = self.script.name, f"{self.task.name} on {self.cfg.device}", str(self.folder)
        print(": ".join(words), flush=True)

        if not (self.resumed or self.cfg.init_from):
            load_base(self.policy, self.task, self.cfg)
        self.state.setdefault("seconds_warm_start", time.perf_counter() - self.began)
        write(self.folder / "base.pt", {"policy": self.policy.state_dict()})
        for weight in self.policy.parameters():         # drop the gradient of the warm start
            weight.grad = torch.zeros_like(weight)
        self.tell("start")
        return copy.deepcopy(self.policy)               # start() loads the weights of a resumed run

    def take(self):
        """Make and lock the folder. --output_dir may name one that is empty, or where a run failed
        before its first step. -> whether it is this run's alone"""
        is_resumed = self.cfg.resume_from_checkpoint != ""
        path = self.folder / "run.lock"
        with writing(path):
            try:
                self.folder.mkdir(parents=True, exist_ok=is_resumed or self.cfg.output_dir != "")
            except FileExistsError:
                return False
            if not (is_resumed or path.exists()) and any(self.folder.iterdir()):
                return False                    # no run made this folder
            if os.name == "nt":                 # Windows keeps a file that another process has open
                path.unlink(missing_ok=True)
            self.lock = path.open("ab")
        try:
            import fcntl  # not on Windows
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except (ImportError, OSError):          # the file system has no locks
            pass
        return is_resumed or not {"metrics.jsonl", "checkpoint.pt"} & {*os.listdir(self.folder)}

    def start(self, evaluate, **parts):
        """Evaluate the base, or load the checkpoint of a resumed run. Checkpoints store `parts`
        (policy=..., optimizer=...); evaluate(policy, task, cfg, greedy) returns scores."""
        self.parts |= parts
        self.evaluate = evaluate
        if "base" not in self.state:
            self.state["base"] = self.scores()
            self.line = {"step": 0} | logged(self.state["base"])
        for name, part in self.parts.items() if self.resumed else ():
            part.load_state_dict(self.resumed[name])
        print(" step", *(f"{heading:>8}" for heading in (*self.columns, "seconds")))
        self.step_clock = time.perf_counter()

    def log(self, batch, advantages, metrics):
        """Log the step, evaluate, and save. Exits if a metric of the loss is not finite."""
        self.step += 1
        numbers = metrics | {"reward": batch.rewards.mean().item()}
        if not all(abs(x) < torch.inf for x in numbers.values()):
            kept = "; the steps before it are kept" if self.step > 1 else ""
            fail(f"step {self.step}: not finite: {numbers}{kept}", 1)
        metrics |= common.describe(batch) | self.task.observe(batch, self.step - 1)
        metrics["step_time"] = time.perf_counter() - self.step_clock
        numbers = [metrics.get(name) for name in (*self.columns.values(), "step_time")]
        cells = [f"{'-':>8}" if x is None else f"{round(x, 3) + 0.0:8.3f}" for x in numbers]
        print(f"{self.step:5d}", *cells, flush=True)
        self.tell("step", batch, advantages, metrics)
        if self.line:                           # of the base, or of what was the last step
            self.append("metrics.jsonl", self.line)
            self.line = {}
        line = {"step": self.step} | metrics
        if self.step % self.cfg.eval_steps == 0:
            line |= logged(self.scores(samples=False))
        if self.step == self.cfg.max_steps:
            self.line = line                    # finish() adds scores to it, and logs it
        else:
            self.append("metrics.jsonl", line)
        self.save(later=not self.line and self.step % self.cfg.save_steps > 0)
        self.step_clock = time.perf_counter()           # when the next step begins

    def scores(self, samples=True):
        """Evaluate the policy, and print the scores of SHOWN: greedily and, at the start and at the
        end, with samples, and greedily after a forced <think>, if outputs can think. -> dict"""
        scores = self.evaluate(self.policy, self.task, self.cfg, greedy=True)
        if samples:
            scores |= self.evaluate(self.policy, self.task, self.cfg)
        if samples and "greedy_think_share" in scores:
            forced = self.evaluate(
                self.policy, self.task, self.cfg, greedy=True, opening="<think>")
            scores["greedy_forced_think"] = forced.get("greedy")
        if samples or self.step < self.cfg.max_steps:           # finish() shows those of the end
            shown = [f"{name} {scores[name]:.3f}" for name in SHOWN if scores.get(name) is not None]
            print("held out:" if self.step else "base:", ", ".join(shown), flush=True)
        self.tell("evaluate", scores)
        return scores

    def tell(self, event, *args):
        """Call observer.EVENT(run, *args) for each observer that has such a method."""
        for observer in self.observers:
            if hasattr(observer, event):
                getattr(observer, event)(self, *args)

    def append(self, name, record):
        """Add a line to a log, NAME.jsonl."""
        path = self.folder / name
        with writing(path), open(path, "a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")
            self.logs[name] = log.tell()

    def save(self, later=False):
        """Write a checkpoint, or keep it until the run is interrupted."""
        self.state |= {"steps": self.step, "seconds_total": time.perf_counter() - self.began}
        saved = {"state": self.state, "task": self.task.state, "logs": self.logs, "line": self.line}
        saved |= {name: part.state_dict() for name, part in self.parts.items()}
        self.unsaved = copy.deepcopy(saved) if later else saved
        if not later:
            self.write_unsaved()

    def write_unsaved(self, suffix=".tmp"):
        """Write the checkpoint of the last step, unless it has been written."""
        try:
            if self.unsaved:
                write(self.folder / "checkpoint.pt", self.unsaved, suffix)
        finally:
            self.unsaved = None                 # a full disk is reported once

    def leave(self, number, frame):
        """Handle Ctrl-C, SIGTERM and SIGHUP: save, print how to resume, and exit. In a process that
        the run has forked, the handler of before takes over."""
        if os.getpid() != self.pid:
            handle(self.handlers)
            os.kill(os.getpid(), number)
            return
        handle(dict.fromkeys(self.handlers, signal.SIG_IGN))        # a second one has no effect
        self.write_unsaved(".last.tmp")         # the signal may have come during the writing
        resume = command(self.script, "--resume_from_checkpoint", self.folder)
        os.write(2, os.fsencode(f"\ninterrupted; resume with:\n  {resume}\n"))
        if sys.excepthook is end_quietly:       # a command: still none, until the process has ended
            self.handlers = {}
        raise SystemExit(128 + number)

    def finish(self):
        """Evaluate the trained policy, and tell the observers. -> the summary, as a dict"""
        trained = self.scores() if self.step > 0 else self.state["base"]
        self.save()                             # including what observers logged of it
        if self.line:
            self.append("metrics.jsonl", self.line | logged(trained))
        summary = {"trained": trained} | self.state
        write(self.folder / "summary.json", json.dumps(summary, indent=2))
        print(f"{summary['steps']} steps, {summary['seconds_total']:.0f} s, folder {self.folder}")
        self.tell("finish", summary)
        return summary
