"""A reader of an algorithm can skip this file: it reads the flags, makes the base policy, and gives
a run its folder, its logs and its checkpoints."""
import argparse
import ast
import copy
import dataclasses
import inspect
import json
import os
import shlex
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import torch
import torch.nn.functional as F
from tqdm import tqdm

import common
from common import fail

# ---- 1. flags --------------------------------------------------------------------------------

def parse_flags(config_class, argv=None):
    """Read the flags of `argv`; the others come from the run that is resumed, or from the task, or
    from Config. Exits with one line if a flag is bad. -> Config"""
    script = inspect.currentframe().f_back.f_globals
    if script["__name__"] == "__main__" and vars(sys.modules["__main__"]) is not script:
        sys.modules["__main__"] = SimpleNamespace(**script)     # under a profiler, it is another
    parser = argparse.ArgumentParser(
        description=inspect.getmodule(config_class).__doc__, allow_abbrev=False,
        argument_default=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail(f"{message} (--help lists the flags)")
    for field in dataclasses.fields(config_class):
        kind = field.type if field.type in (int, float) else os.path.expanduser     # --flag=~/run
        choices = get_args(field.type) or None
        options = {"type": kind, "choices": choices, "metavar": "|".join(choices or ["VALUE"])}
        if field.type is bool:
            options = {"action": argparse.BooleanOptionalAction}
        spellings = dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}"))
        text = f"{field.metadata['help']} [{field.default}]".replace("%", "%%")
        parser.add_argument(*spellings, dest=field.name, help=text, **options)
    given = vars(parser.parse_args(argv))

    tasks = common.optional("tasks.flags")
    stored = tasks.defaults(config_class, given.get("task", "arithmetic")) if tasks else {}
    if folder := given.get("resume_from_checkpoint"):
        script, flags = read_config(folder)
        if script != Path(inspect.getfile(config_class)).name:
            fail(f"--resume_from_checkpoint {folder}: this is a run of {script}")
        # Config raises a TypeError for a flag that is gone, if the run has set it
        stored = {name: x for name, x in flags.items() if x or hasattr(config_class, name)}
        for name in given.keys() - config_class.MAY_DIFFER:
            if given[name] != stored.get(name, given[name]):
                fail(f"--{name} {given[name]}: the run has {stored[name]!r} (see --init_from)")
    cfg = config_class(**(stored | given))
    for holds, message in cfg.rules():
        if not holds:
            fail(message)
    if kernels := common.optional("kernels"):
        kernels.choose(cfg.kernel, cfg.device, "device" in stored | given)
    return cfg


def read_config(folder):
    """Read which script and flags a run had; exit with one line if there is no run. -> str, dict"""
    try:
        record = json.loads(Path(folder, "config.json").read_text("utf-8"))
        return record["script"], record["config"]
    except (OSError, ValueError, KeyError):
        fail(f"{folder}: this folder contains no run")


# ---- 2. the base -----------------------------------------------------------------------------

class AdamW(torch.optim.AdamW):
    """torch's, without weight decay, and without the import of torch._dynamo, which takes 4 s."""

    def __init__(self, weights, **options):
        super().__init__(weights, weight_decay=0.0, **options)


for name in ("add_param_group", "load_state_dict", "state_dict", "step", "zero_grad"):
    method = getattr(torch.optim.AdamW, name)           # wrapped in a function that imports it
    setattr(AdamW, name, torch.no_grad()(getattr(method, "__wrapped__", method)))


def fix_arithmetic():
    """Compute with one thread and without TF32, because both decide the last bits."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")


def load_base(policy, task, cfg):
    """Load the base, or make it if this is the first run that needs it. With the default flags, one
    in 30 does not learn to read the question: the better of two is kept (docs/lab/bases.md)."""
    fix_arithmetic()
    path = base_path(policy, task, cfg)
    if path.exists():
        load_policy(policy, path)
        return
    loss = warm_start(policy, task, cfg)
    usual = dataclasses.replace(cfg, **vars(common.Base(base_seed=cfg.base_seed)))
    if cfg == usual and loss > task.textbook_loss:          # which was measured with these flags
        print(f"base: textbook loss {loss:.3f}, so again with half the rate", file=sys.stderr)
        second = type(policy)(cfg).to(cfg.device)
        half = dataclasses.replace(cfg, base_learning_rate=cfg.base_learning_rate / 2)
        if warm_start(second, task, half) < loss:
            policy.load_state_dict(second.state_dict())
    write(path, {"policy": policy.state_dict()}, f".{os.getpid()}.tmp")     # others may, too


def base_path(policy, task, cfg):
    """Name the file of a base by a hash of what decides it: the first demonstrations, the untrained
    weights and their logits, the code of the warm start, the flags, torch and its arithmetic. It
    misses what shows in none of these demonstrations, and what changes gradients alone. -> Path"""
    examples = sum((common.sample_problems(task, 512, "base", phase=phase)
                    for phase in ("textbook", "forum")), [])
    shown = common.encode_examples(examples, task, "cpu")
    with torch.no_grad():
        logits = copy.deepcopy(policy).cpu()(torch.cat(shown[:2], dim=1)[::64])     # (16, L, V)
    bits = b"".join(x.double().numpy().tobytes() for x in (*shown, logits))
    weights = [(name, x.shape, x.dtype) for name, x in policy.state_dict().items()]
    flags = [getattr(cfg, name) for name in ("device", *common.Base.__annotations__)]
    code = ast.parse(Path(__file__).read_text("utf-8")).body            # without comments
    steps = {"AdamW", "load_base", "warm_start", "share_of_loss", "muon_step"}
    code = [ast.unparse(part) for part in code if getattr(part, "name", "") in steps]
    parts = zlib.crc32(bits), weights, flags, code, common.ARITHMETIC
    return Path(f"runs/base/{task.name}-{zlib.crc32(repr(parts).encode()):08x}.pt")


def warm_start(model, task, cfg):
    """Train the base by supervised learning: first on a textbook, which shows its work, then on a
    forum, where most people only answer. -> its loss on 256 new examples of the textbook"""
    is_cuda = cfg.device == "cuda"
    matrices = [weight for weight in model.blocks.parameters() if weight.dim() == 2]
    groups = {}                         # on CUDA, the matrices of a shape take their steps together
    for matrix in matrices:
        groups.setdefault(matrix.shape if is_cuda else matrix, []).append(matrix)
    momenta = [torch.zeros_like(torch.stack(group).squeeze(0)) for group in groups.values()]
    others = [weight for weight in model.parameters() if weight not in {*matrices}]
    adamw = AdamW(others, betas=(0.9, 0.95), capturable=is_cuda)
    num_parts = 2 if cfg.device == "cpu" else 1     # so short rows need no columns for long ones
    spread = map
    if cfg.device == "cpu":             # 1.4 times as fast on two cores of an AMD EPYC (Zen 5)
        spread = ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)).map

    def descend(rate, *batch):
        batch = [x.to(cfg.device) for x in batch]
        parts = batch[-1].argsort().chunk(num_parts)        # the shorter half first
        gradients = spread(lambda rows: torch.autograd.grad(
            share_of_loss(model, batch, rows), [*model.parameters()]), parts)
        for weight, *terms in zip(model.parameters(), *gradients):
            weight.grad = sum(terms)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.param_groups[0]["lr"] = rate
        adamw.step()
        for group, momentum in zip(groups.values(), momenta):
            muon_step(group, momentum, 5 * rate)    # an orthogonal step is small per entry
    kernels = common.optional("kernels")
    if kernels and is_cuda and cfg.kernel != "torch":
        descend = kernels.recorded(descend, cfg.device)
    for step in tqdm(range(cfg.base_steps), "warm start", leave=False, disable=None):
        if step % 225 == 0 and not sys.stderr.isatty():                 # tqdm prints nothing
            print(f"making the base: step {step} of {cfg.base_steps}", file=sys.stderr)
        phase = "textbook" if step < cfg.textbook_share * cfg.base_steps else "forum"
        examples = common.sample_problems(
            task, cfg.base_batch_size, (cfg.base_seed, step), phase=phase)
        prompts, tokens, mask, lengths = common.encode_examples(examples, task, "cpu")
        if is_cuda:                 # few widths, because each is recorded
            tokens, mask = (F.pad(x, (0, -x.shape[1] % 16)) for x in (tokens, mask))
        rate = cfg.base_learning_rate * min((step + 1) / 50, 1 - step / cfg.base_steps)
        descend(rate, prompts, tokens, mask, lengths)
    examples = common.sample_problems(task, 256, "new", phase="textbook")
    batch = common.encode_examples(examples, task, cfg.device)
    return share_of_loss(model, batch, torch.arange(256)).nan_to_num(torch.inf).item()


def share_of_loss(model, batch, rows):
    """Compute the share of `rows` in the loss of a batch: the sum of -log pi(o_t), divided by the
    number of all tokens, also of those that an environment inserted. -> scalar"""
    prompts, tokens, mask, lengths = batch
    T = tokens.shape[1] if tokens.is_cuda else int(lengths[rows].max())     # a graph cannot look
    tokens = tokens[rows, :T]                                                   # (b, T)
    logits = model(torch.cat([prompts[rows], tokens], dim=1)[:, :-1])[:, -T:]   # (b, T, V)
    token_loss = F.cross_entropy(logits.mT, tokens, reduction="none")           # (b, T)
    return (token_loss * mask[rows, :T]).sum() / lengths.sum()


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

def write(path, content, suffix=".tmp"):
    """Save text or tensors under a temporary name, then rename, so no kill leaves half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + suffix)
    with open(part, "wb") as file:
        if isinstance(content, str):
            file.write(content.encode())
        else:
            torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def load_policy(policy, path):
    """Load a checkpoint's weights, or exit with one line if they do not fit. -> the checkpoint"""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        policy.load_state_dict(saved["policy"])
        return saved
    except Exception as error:          # a damaged file can raise almost anything
        fail(f"{path}: contains no policy of this shape ({type(error).__name__})")


def logged(scores):
    """Name the scores that are numbers as metrics.jsonl does. -> dict"""
    return {f"eval/{name}": x for name, x in scores.items() if isinstance(x, float)}


SHOWN = ("greedy", "greedy_forced_think", "greedy_think_share", "greedy_accuracy_given_think",
         "greedy_right", "greedy_abstained", "greedy_hallucinated", "pass@1", "greedy_return",
         "return", "best_return", "right", "abstained", "hallucinated")


class Run:
    """One run with its folder, logs and checkpoints. It is a context: as long as it lasts, Ctrl-C
    prints how to resume. `columns` maps the headings of the console to metrics. A script may keep
    plain values in `state`, which checkpoints store."""

    def __init__(self, cfg, task, policy, columns):
        self.cfg, self.task, self.policy, self.columns = cfg, task, policy, columns
        self.script = Path(inspect.getfile(type(cfg)))
        self.step = 0                           # number of steps that are done
        self.state = {"seconds_total": 0.0}
        self.line = {}                          # of the last step, to which finish() adds scores
        self.parts = {}                         # objects with a state_dict: policy, optimizer ...
        self.resumed = {}                       # the checkpoint of the run that is resumed
        self.logs = {"metrics.jsonl": 0, "samples.jsonl": 0, "greedy.jsonl": 0}     # their sizes
        self.observers = []
        if common.optional("report") and common.optional("tasks"):
            self.observers = common.optional("report.observers").observers(cfg)
        elif cfg.report_to != "none":
            fail(f"--report_to {cfg.report_to}: needs the folders report/ and tasks/")
        default = f"runs/{self.script.stem}-{task.name}-s{cfg.seed}"
        # absolute, because a reward may change the current folder
        self.folder = Path(cfg.resume_from_checkpoint or cfg.output_dir or default).absolute()
        saved = {"checkpoint.pt", "metrics.jsonl"}          # without both, it begins again
        if cfg.resume_from_checkpoint and saved & {*os.listdir(self.folder)}:
            self.resumed = load_policy(policy, self.folder / "checkpoint.pt")
            self.state |= self.resumed["state"]
            self.step = self.state["steps"]
            self.line = self.resumed["line"]
            self.logs |= self.resumed["logs"]
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
        texts += [*texts[1:], ""]               # mostly wrong
        batch = SimpleNamespace(problems=examples * 2, texts=texts, ratings=None)
        self.task.judge(batch, 1, "check")
        os.chdir(home)
        held_out = common.held_out_problems(self.task, self.cfg.num_eval_problems)
        text = [self.script.read_text("utf-8"), *(one[:2] for one in held_out)]
        if self.state.setdefault("text", now := zlib.crc32(repr(text).encode())) != now:
            print("the script or the problems have changed: compare no rewards with those before")

    def __enter__(self):
        fix_arithmetic()                        # two threads would be only 1.15 times as fast
        return self

    def __exit__(self, kind, *_):
        if kind is KeyboardInterrupt:
            resume = [sys.executable, self.script, "--resume_from_checkpoint", self.folder]
            fail(f"interrupted; resume from step {self.state.get('steps', 0)} with:\n  "
                 f"{shlex.join(map(str, resume))}", 130)

    def begin(self):
        """Make the run folder, or cut the logs of a resumed run to their length at its checkpoint.
        Load the base, unless a run of before has provided weights. -> pi_ref, a copy of the policy
        as it is before the first step, even in a resumed run"""
        first, number = self.folder, 1
        while not self.cfg.resume_from_checkpoint:
            try:
                self.folder.mkdir(parents=True)         # only one of several runs can make it
                break
            except OSError as error:
                if self.cfg.output_dir or not self.folder.exists():
                    fail(f"{first}: cannot be made ({error.strerror}); name a new folder")
                number += 1
                self.folder = Path(f"{first}-{number}")
        task = self.task.flag or f"{self.script.stem}.{type(self.task).__name__}"   # the script's
        config = dataclasses.asdict(self.cfg) | {"resume_from_checkpoint": "", "task": task}
        record = {"script": self.script.name, "torch": torch.__version__, "config": config}
        write(self.folder / "config.json", json.dumps(record, indent=2))
        if not self.cfg.resume_from_checkpoint:         # you may have edited the copy since
            write(self.folder / self.script.name, self.script.read_text("utf-8"))
        for name, size in self.logs.items():
            log = self.folder / name
            if log.exists():
                os.truncate(log, min(log.stat().st_size, size))
        place = os.path.relpath(self.folder)
        print(f"{self.script.name}: {self.task.name} on {self.cfg.device}: {place}", flush=True)

        if not (self.resumed or self.cfg.init_from):
            load_base(self.policy, self.task, self.cfg)
        self.state.setdefault("seconds_warm_start", time.perf_counter() - self.began)
        write(self.folder / "base.pt", {"policy": self.policy.state_dict()})
        for weight in self.policy.parameters():         # drop the gradient of the warm start
            weight.grad = torch.zeros_like(weight)
        self.tell("start")
        return copy.deepcopy(self.policy)               # start() loads the weights of a resumed run

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
        self.save()                                     # before metrics.jsonl gets a line
        print(" step", *(f"{heading:>8}" for heading in (*self.columns, "seconds")))
        self.step_clock = time.perf_counter()

    def log(self, batch, advantages, metrics):
        """Log the step, evaluate, and save. Exits if a metric of the loss is not finite."""
        self.step += 1
        metrics |= common.describe(batch)
        if not all(abs(x) < torch.inf for x in metrics.values()):
            fail(f"step {self.step}: not finite: {metrics}", 1)
        metrics |= self.task.observe(batch, self.step - 1)
        metrics["step_time"] = time.perf_counter() - self.step_clock
        numbers = [metrics.get(name) for name in (*self.columns.values(), "step_time")]
        cells = [f"{'-':>8}" if x is None else f"{round(x, 3) + 0.0:8.3f}" for x in numbers]
        print(f"{self.step:5d}", *cells, flush=True)
        self.tell("step", batch, advantages, metrics)
        self.append("metrics.jsonl", self.line)         # of the step before, or of the base
        self.line = {"step": self.step} | metrics
        if self.step % self.cfg.eval_steps == 0:
            self.line |= logged(self.scores(samples=False))
        if self.step % self.cfg.save_steps == 0 or self.step == self.cfg.max_steps:
            self.save()
        self.step_clock = time.perf_counter()           # when the next step begins

    def scores(self, samples=True):
        """Evaluate the policy, and print the scores of SHOWN: greedily and, at the start and at the
        end, with samples, and greedily after a forced <think>, if outputs can think. -> dict"""
        scores = self.evaluate(self.policy, self.task, self.cfg, greedy=True)
        if samples:
            scores |= self.evaluate(self.policy, self.task, self.cfg)
        if samples and "greedy_think_share" in scores:
            forced = self.evaluate(self.policy, self.task, self.cfg, greedy=True, opening="<think>")
            scores["greedy_forced_think"] = forced.get("greedy")
        if samples or self.step < self.cfg.max_steps:           # finish() shows those of the end
            shown = [f"{name} {scores[name]:.3f}" for name in SHOWN if scores.get(name) is not None]
            print("held out:" if self.step else "base:", ", ".join(shown), flush=True)
        self.tell("evaluate", scores)
        return {name: x for name, x in scores.items() if name not in ("examples", "steps")}

    def tell(self, event, *args):
        """Call observer.EVENT(run, *args) for each observer that has such a method."""
        for observer in self.observers:
            getattr(observer, event, lambda *_: None)(self, *args)

    def append(self, name, record):
        """Add a line to a log, NAME.jsonl."""
        with open(self.folder / name, "a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")
            self.logs[name] = log.tell()

    def save(self):
        """Write a checkpoint."""
        self.state |= {"steps": self.step, "seconds_total": time.perf_counter() - self.began}
        saved = {"state": self.state, "task": self.task.state, "logs": self.logs, "line": self.line}
        saved |= {name: part.state_dict() for name, part in self.parts.items()}
        write(self.folder / "checkpoint.pt", saved)

    def finish(self):
        """Evaluate the trained policy, and tell the observers. -> the summary, as a dict"""
        trained = self.scores() if self.step > 0 else self.state["base"]
        self.save()                             # including what observers logged of it
        self.append("metrics.jsonl", self.line | logged(trained))
        summary = {"trained": trained} | self.state
        write(self.folder / "summary.json", json.dumps(summary, indent=2))
        seconds = self.state["seconds_total"]
        print(f"{self.step} steps, {seconds:.0f} s, folder {os.path.relpath(self.folder)}")
        self.tell("finish", summary)
        return summary
