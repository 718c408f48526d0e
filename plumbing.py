"""A reader of an algorithm can skip this file: it reads the flags, makes the base policy, and gives
a run its folder, its logs and its checkpoints."""
import argparse
import ast
import contextlib
import copy
import dataclasses
import inspect
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
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
    if common.TOKENIZER is None:
        fail(f"No module named 'tiktoken'; type: {shlex.join(common.INSTALL)}", 1)
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


@contextlib.contextmanager
def fixed_arithmetic():
    """Compute with one thread and without TF32, because both decide the last bits."""
    threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def load_base(policy, task, cfg):
    """Load the base, or make it if this is the first run that needs it."""
    path = base_path(policy, task, cfg)
    try:
        read_policy(policy, path)
    except Exception:                   # there is no base yet, or a damaged one
        check_demonstrations(task)
        with fixed_arithmetic():
            warm_start(policy, task, cfg)
        if not all(weight.isfinite().all() for weight in policy.parameters()):
            fail("the weights of the base are not finite: lower --base_learning_rate", 1)
        suffix = f".{secrets.token_hex(4)}.tmp"     # another run, or container, may write it, too
        write(path, {"policy": policy.state_dict()}, suffix)


def base_path(policy, task, cfg):
    """Name the file of a base by a hash of what decides it: the first demonstrations, the weights
    before training and the logits that they compute, the code of the warm start, the flags, torch
    and its arithmetic. The hash misses what shows in none of these demonstrations, and what changes
    gradients alone, such as a detached block. -> Path"""
    shown = first_demonstrations(task)
    some = torch.cat([shown[0], shown[1]], dim=1)[::64]                         # (16, W + T)
    with fixed_arithmetic(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)          # for a policy with dropout
        logits = copy.deepcopy(policy).cpu()(some)                              # (16, W + T, V)
    weights = [(name, x.shape, x.dtype) for name, x in policy.state_dict().items()]
    flags = [getattr(cfg, name) for name in ("device", *common.Base.__annotations__)]
    code = ast.parse(Path(__file__).read_text("utf-8")).body            # without comments
    steps = {"AdamW", "warm_start", "gradient", "muon_step"}
    code = [ast.unparse(part) for part in code if getattr(part, "name", "") in steps]
    parts = checksum(*shown, logits), weights, flags, code, common.ARITHMETIC
    return Path(f"runs/base/{task.name}-{zlib.crc32(repr(parts).encode()):08x}.pt")


def first_demonstrations(task):
    """Draw and encode what the task shows first in both phases of the warm start, 512 examples
    each. -> prompts (1024, W), tokens (1024, T), mask (1024, T), lengths (1024,)"""
    examples = []
    for phase in ("textbook", "forum"):
        examples += common.sample_problems(task, 512, "base", phase=phase)
    return common.encode_examples(examples, task, "cpu")


def checksum(*tensors):
    """Compute a checksum of all bits of some tensors. -> int"""
    return zlib.crc32(b"".join(x.double().numpy().tobytes() for x in tensors))


def check_demonstrations(task):
    """Exit with one line if processes that order sets differently draw other demonstrations: then
    no run could be repeated. Only what --task names can be made there."""
    if not task.flag or type(task) is common.Arithmetic:
        return
    program = ("import common, plumbing; "
               f"task = common.load_task(common.Config(task={task.flag!r}), common.total); "
               "print(plumbing.checksum(*plumbing.first_demonstrations(task)))")
    others = [subprocess.Popen(
        [sys.executable, "-c", program], cwd=common.HERE, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONHASHSEED": seed}) for seed in "12"]
    drawn = {other.communicate()[0].strip() for other in others if other.wait() == 0}
    if drawn - {str(checksum(*first_demonstrations(task)))}:
        fail(f"--task {task.flag}: another process draws other demonstrations; all that is random "
             "must come from rng, and nothing may depend on the order of a set")


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
    num_parts = 1
    spread = map
    if cfg.device == "cpu":             # 1.4 times as fast on two cores of an AMD EPYC (Zen 5);
        num_parts = 2                   # and short rows need no columns for long ones
        spread = ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)).map

    def descend(rate, *batch):
        batch = [x.to(cfg.device) for x in batch]
        parts = batch[-1].argsort().chunk(num_parts)        # the shorter half first
        gradients = spread(lambda rows: gradient(model, batch, rows), parts)
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
    return shlex.join(map(short, [sys.executable, *words]))


def current_folder():
    """Find the current folder; the root if it exists no more. -> Path"""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path(os.sep)


def short(path):
    """Write a path without the current folder. -> str"""
    return str(path).removeprefix(f"{current_folder()}{os.sep}")


@contextlib.contextmanager
def writing(path):
    """Exit with one line if a file cannot be written."""
    try:
        yield
    except (OSError, RuntimeError) as error:            # torch raises RuntimeError
        why = getattr(error, "strerror", "is the disk full?")
        fail(f"{short(path)}: cannot be written ({why})")


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
        fail(f"{short(path)}: contains no policy of this shape ({type(error).__name__})")


def handle(handlers):
    """Set the handlers of signals; a run that is not in the main thread cannot. -> those before"""
    with contextlib.suppress(ValueError):
        return {number: signal.signal(number, handler) for number, handler in handlers.items()}
    return {}


def logged(scores):
    """Name the scores that are numbers as metrics.jsonl does. -> dict"""
    return {f"eval/{name}": x for name, x in scores.items() if isinstance(x, float)}


# Ctrl-C, kill, a closed terminal, and what a scheduler sends before a job reaches its limit
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")

SHOWN = ("greedy", "greedy_forced_think", "greedy_think_share", "greedy_accuracy_given_think",
         "pass@1", "greedy_return", "return", "best_return")


class Run:
    """One run with its folder, logs and checkpoints. It is a context: as long as it lasts, Ctrl-C
    saves the run. `columns` maps the headings of the console to metrics; `score` and `sample_batch`
    are the script's, for observers. A script may keep plain values in `state`, which checkpoints
    store."""

    def __init__(self, cfg, task, policy, columns, score, sample_batch):
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
        # absolute, because a reward may change the current folder
        self.folder = Path(cfg.resume_from_checkpoint or cfg.output_dir or default).absolute()
        if cfg.resume_from_checkpoint and not (self.folder / "checkpoint.pt").exists():
            self.refuse_without_checkpoint()
        elif cfg.resume_from_checkpoint:
            self.resumed = load_policy(policy, self.folder / "checkpoint.pt")
            if "state" not in self.resumed:
                fail(f"{short(self.folder)}: contains a policy, but no run; use --init_from "
                     "instead")
            self.state |= self.resumed["state"]
            self.step = self.state["steps"]
            self.line = self.resumed.get("line", {})
            task.state.update(self.resumed["task"])
            load_policy(policy, self.folder / "base.pt")    # pi_ref; start() loads the trained
        elif cfg.init_from:
            load_policy(policy, Path(cfg.init_from, "checkpoint.pt"))
        self.began = time.perf_counter() - self.state["seconds_total"]
        self.check_task()

    def check_task(self):
        """Exit with one line, before anything is trained, if the task has hardly any problems for
        training or evaluation, or if verify returns something else than it should."""
        home = Path.cwd()                       # which verify may leave
        for split in ("train", "test"):
            common.sample_problems(self.task, 1, "check", split)
        examples = common.sample_problems(self.task, 16, "check", phase="textbook")
        texts = [example.completion for example in examples]
        others = [*texts[1:], ""]               # mostly wrong
        batch = SimpleNamespace(problems=examples * 2, texts=texts + others, ratings=None)
        self.task.judge(batch, 1, "check")
        os.chdir(home)

    def __enter__(self):
        self.arithmetic = fixed_arithmetic()    # one thread: two are only 1.15 times as fast
        self.arithmetic.__enter__()
        return self

    def __exit__(self, *error):
        """Save the last step that is done, and give back the signals, the folder, and the settings
        of torch, however the run ended."""
        self.arithmetic.__exit__(*error)
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
            fail(f"{short(self.folder)}: cannot be resumed, because its checkpoint.pt is gone")

    def begin(self):
        """Take the run folder, and cut its logs to their length at the checkpoint. Load the base,
        unless a run of before has provided weights. From now on, Ctrl-C prints how to resume.
        -> pi_ref, a copy of the policy as it is before the first step, even in a resumed run"""
        first = self.folder
        number = 1
        while not self.take():
            if self.cfg.resume_from_checkpoint:
                fail(f"{short(first)}: this run is still in progress; resume it when it has ended")
            if self.cfg.output_dir:
                fail(f"{short(first)}: is not empty, or another run writes there; name another "
                     "folder")
            number += 1
            self.folder = Path(f"{first}-{number}")
        config = dataclasses.asdict(self.cfg) | {"resume_from_checkpoint": "", "task": self.flag}
        versions = torch.__version__
        if self.resumed:
            record = json.loads((self.folder / "config.json").read_text("utf-8"))
            before = str(record.get("torch"))
            versions = ", ".join(dict.fromkeys([*before.split(", "), torch.__version__]))
            if versions != before:
                print(f"{short(self.folder)}: began with torch {before}, continues with "
                      f"{torch.__version__}: the last bits may differ", file=sys.stderr)
        record = {"script": self.script.name, "torch": versions, "config": config}
        write(self.folder / "config.json", json.dumps(record, indent=2))
        copied = self.folder / self.script.name
        text = self.script.read_text("utf-8")
        if not copied.is_file():
            write(copied, text)
        elif copied.read_text("utf-8", "replace") != text:
            print(f"{short(copied)}: is kept, although another text runs, {self.script}",
                  file=sys.stderr)
        sizes = {"metrics.jsonl": 0, "samples.jsonl": 0, "greedy.jsonl": 0}
        self.logs = sizes | self.resumed.get("logs", {})
        for name, size in self.logs.items():
            log = self.folder / name
            if log.is_file() and not log.is_symlink():
                os.truncate(log, min(log.stat().st_size, size))
        numbers = {getattr(signal, name, signal.SIGINT) for name in SIGNALS}
        ignored = (signal.SIG_IGN, None)                # by nohup; None: C code handles it
        heard = [number for number in numbers if signal.getsignal(number) not in ignored]
        self.handlers = handle(dict.fromkeys(heard, self.leave))
        words = self.script.name, f"{self.task.name} on {self.cfg.device}", short(self.folder)
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
        if self.cfg.reward != "accuracy" and self.task.is_judged:
            print(f"reward: {self.cfg.reward}; scores of held-out problems count right answers")
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
        return {name: x for name, x in scores.items() if name not in ("examples", "steps")}

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
        """Handle one of SIGNALS: save, print how to resume, and exit. In a process that the run has
        forked, the handler of before takes over."""
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
        text = json.dumps(summary, indent=2)
        text = re.sub(r"\[[^][]*\]", lambda curve: " ".join(curve[0].split()), text)     # one line
        write(self.folder / "summary.json", text)
        print(f"{summary['steps']} steps, {summary['seconds_total']:.0f} s, "
              f"folder {short(self.folder)}")
        self.tell("finish", summary)
        return summary
