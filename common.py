"""What the scripts share and no paper is about: flags, arithmetic problems, and the run itself (folder, logs,
checkpoints, resume). No model, no verifier, no loss is in here.

Every random number of a run is a function of (seed, purpose, step), see `generator`: there is no generator
state to save, and a resumed run draws what the uninterrupted one would have drawn.
"""
import argparse
import collections
import dataclasses
import functools
import importlib
import inspect
import json
import math
import os
import random
import shlex
import signal
import sys
import time
import zipfile
import zlib
from pathlib import Path
from types import SimpleNamespace

import torch


def optional(name):
    """A module of this repository, None where a script was copied out without it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, name.partition(".")[0]):
            raise


ALONE = SimpleNamespace(                            # what tasks.mix does, where there is arithmetic only
    calls=lambda problems: [], reward=lambda names, step, problem, text, verdict: verdict,
    is_right=lambda problem, verdict: verdict == 1, describe=lambda batch: {}, rates=lambda before, batch: {})
tasks = optional("tasks.mix") or ALONE
kernels, console, scores, report = map(optional, ("kernels", "tools.console", "tools.scores", "tools.report"))
print = functools.partial(print, flush=True)        # a line shows when it is printed, in a pipe too

# ---- 1. flags -------------------------------------------------------------------------------------------

def fail(message, code=2):
    """One line on stderr, then exit: 2 for bad input (nothing was touched), 1 for a run that had to stop."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def flag(default, help, group="algorithm", low=None, high=math.inf, choices=None, why=""):
    """A field of a Config that is also a command-line flag; numbers are finite, from `low` to `high`."""
    return dataclasses.field(default=default, metadata={
        "help": help, "group": group, "low": low, "high": high, "choices": choices, "why": why})


GROUPS = ("run", "task", "sampling", "optimizer", "evaluation", "base policy, shared by all scripts")
run_flag, task_flag, sample_flag, step_flag, eval_flag, base_flag = (
    functools.partial(flag, group=group) for group in GROUPS)
MAY_DIFFER = {"max_steps", "stop_at", "save_steps", "eval_steps", "num_eval_problems", "num_eval_samples",
              "device", "prompt", "output_dir", "resume_from_checkpoint"}     # when a run is resumed


@dataclasses.dataclass(frozen=True)
class Config:
    """The flags every script has; a script's own Config adds the symbols of its equations."""
    task: str = run_flag("arithmetic", "arithmetic, or NAME for tasks/NAME.py; several: A,B")
    reward: str = run_flag("accuracy", "rows of tasks.REWARDS, added: accuracy+format, fine ...")
    max_steps: int = run_flag(60, "batches to train on at most; 0 makes and evaluates the base only", low=0)
    stop_at: float = run_flag(0.98, "stop when the last 5 batches are this accurate; 2: never", low=0)
    seed: int = run_flag(0, "of problems, sampling and shuffling", low=0)
    device: str = run_flag("auto", "auto: CUDA where there is one", choices=("auto", "cpu", "cuda", "mps"))
    kernel: str = run_flag("auto", "of log-probs; auto: triton on CUDA", choices=("auto", "triton", "torch"))
    fused_linear: str = run_flag("auto", "log-probs without logits in memory; auto: where these are large",
                                 choices=("auto", "on", "off"))
    num_threads: int = run_flag(1, "CPU threads; a second one gains 1.15x at this size, if idle", low=1)
    output_dir: str = run_flag("", "run folder; else runs/ALGORITHM-TASK-sSEED, with -2, -3 ... when taken")
    save_steps: int = run_flag(10, "steps between checkpoints", low=1)
    resume_from_checkpoint: str = run_flag("", "run folder to go on with, its flags included")
    init_from: str = run_flag("", "run folder whose trained policy takes the place of the base")
    prompt: str = run_flag("", "with --resume_from_checkpoint: print what the policy answers, then exit")
    operands: str = task_flag("5", "arithmetic: numbers in a problem, or a range: 3-7")
    numbers: str = task_flag("3-4", "countdown: numbers in a problem, or a range")
    slip: float = task_flag(0.0, "gridworld: how often a move goes astray", low=0, high=1)
    num_generations: int = sample_flag(8, "completions per prompt (G)", low=2, why="one has no siblings")
    num_prompts: int = sample_flag(32, "prompts per step (P)", low=1)
    max_completion_length: int = sample_flag(48, "tokens per completion at most (L)", low=1)
    dynamic_sampling: int = sample_flag(0, "batches of prompts to add until P groups have signal", low=0)
    curriculum: str = sample_flag("no", "yes: prompts by p(1 - p) of their difficulty", choices=("no", "yes"))
    mask_tool_tokens: str = sample_flag("yes", "no: learn what the environment says, too (do not)",
                                        choices=("no", "yes"))
    temperature: float = sample_flag(1.0, "of sampling and scoring alike", low=1e-3, why="0 explores nothing")
    learning_rate: float = step_flag(5e-4, "of AdamW", low=0)
    warmup_steps: int = step_flag(0, "steps of linear learning-rate warm-up, constant after it", low=0)
    weight_decay: float = step_flag(0.0, "of AdamW", low=0)
    max_grad_norm: float = step_flag(1.0, "longer gradients are scaled down to this norm", low=1e-9)
    num_mini_batches: int = step_flag(2, "optimizer steps per pass over the batch", low=1)
    micro_batch_size: int = step_flag(32, "rows per backward pass: memory and speed, not the gradient", low=1)
    eval_steps: int = eval_flag(10, "steps between greedy evaluations", low=1)
    num_eval_problems: int = eval_flag(512, "held-out problems", low=1)
    num_eval_samples: int = eval_flag(8, "samples of each before and after training (k of pass@k)", low=1)
    hidden_size: int = base_flag(64, "width (D)", low=1)
    num_hidden_layers: int = base_flag(2, "decoder layers", low=1)
    num_attention_heads: int = base_flag(4, "query heads (H)", low=1)
    num_key_value_heads: int = base_flag(1, "key/value heads, each shared by several query heads", low=1)
    intermediate_size: int = base_flag(176, "width of the SwiGLU layer", low=1)
    base_seed: int = base_flag(0, "of its initial weights and its corpus", low=0)
    base_steps: int = base_flag(1000, "warm-start batches", low=0)
    base_batch_size: int = base_flag(32, "demonstrations per warm-start batch", low=1)
    textbook: float = base_flag(0.6, "share of the batches from the textbook, the others are the forum's",
                                low=0, high=1)
    base_learning_rate: float = base_flag(4e-3, "warm-start peak, falling linearly to 0", low=0)

    @property
    def options(self):
        """What the functions of the task take as keywords."""
        takes = inspect.signature(load_task(self.task).sample).parameters
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(Config)
                if f.metadata["group"] == "task" and f.name in takes}

    @property
    def scoring(self):
        """How log-probs are computed: the last arguments of a script's `score`."""
        return self.temperature, self.kernel, self.fused_linear

    def check(self):
        """Exit with one line for a value, or a pair of values, that cannot work."""
        options = self.options
        for f in dataclasses.fields(self):
            value, (low, high, choices, why) = getattr(self, f.name), map(
                f.metadata.get, ("low", "high", "choices", "why"))
            if low is not None and not (low <= value <= high and value < math.inf):
                limits = f"finite and at least {low}" if high == math.inf else f"from {low} to {high}"
                fail(f"--{f.name} {value}: must be {limits}" + (why and f" ({why})"))
            if choices and value not in choices:
                fail(f"--{f.name} {value}: must be one of {', '.join(choices)}")
            if f.metadata["group"] == "task" and value != f.default and f.name not in options:
                fail(f"--{f.name} {value}: is not for {self.task}")
        H, there = self.num_attention_heads, {"cuda": torch.cuda.is_available(),
                                              "mps": torch.backends.mps.is_available()}
        for name, broken, words in (
                ("hidden_size", self.hidden_size % (2 * H), f"must be a multiple of {2 * H}, two per head"),
                ("num_key_value_heads", H % self.num_key_value_heads, f"must divide num_attention_heads {H}"),
                ("num_mini_batches", self.num_mini_batches > self.num_prompts,
                 f"a batch has only {self.num_prompts} groups"),
                ("device", not there.get(self.device, True), "torch finds none; use cpu"),
                ("kernel", self.kernel == "triton" and not kernels, "there is no folder kernels/; use torch"),
                ("fused_linear", self.fused_linear == "on" and not kernels, "there is no folder kernels/"),
                ("reward", self.reward != "accuracy" and tasks is ALONE, "there is no folder tasks/"),
                ("curriculum", self.curriculum == "yes" and tasks is ALONE, "there is no folder tasks/"),
                ("prompt", self.prompt and not self.resume_from_checkpoint,
                 "add --resume_from_checkpoint RUN to say who answers"),
                ("prompt", len(self.prompt.encode()) > load_task(self.task).width(**options),
                 "is longer than the prompts of this task")):
            if broken:
                fail(f"--{name} {getattr(self, name)}: {words}")

    @classmethod
    def parse(cls, argv=None):
        """The flags of `argv`, over those of the run it resumes or of the task. Exits if one is bad."""
        parser = argparse.ArgumentParser(description=sys.modules[cls.__module__].__doc__, allow_abbrev=False,
                                         formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.error = lambda message: fail(f"{message} (--help lists the flags)")
        groups = {name: parser.add_argument_group(name) for name in ("algorithm", *GROUPS)}
        for f in dataclasses.fields(cls):
            choices, words = f.metadata["choices"], f"{f.metadata['help']} [{f.default}]"
            for name, shown in {f.name.replace("_", "-"): argparse.SUPPRESS, f.name: words}.items():
                groups[f.metadata["group"]].add_argument(
                    "--" + name, dest=f.name, default=argparse.SUPPRESS, type=f.type, choices=choices,
                    metavar=None if choices else f.type.__name__.upper(), help=shown)
        given = vars(parser.parse_args(argv))
        if given.get("prompt") == "":
            fail("--prompt: is empty; give the policy something to answer")
        wanted = getattr(load_task(given.get("task", cls.task)), "FLAGS", {})
        below = {f.name: wanted[f.name] for f in dataclasses.fields(cls) if f.name in wanted}
        cfg = cls(**((cls.stored(given) or below) | given))
        cfg.check()
        device = {"auto": "cuda" if torch.cuda.is_available() else "cpu"}.get(cfg.device, cfg.device)
        try:
            kernels and kernels.choose(cfg.kernel, torch.device(device))
            tasks is ALONE or tasks.check(cfg.reward, cfg.task.split(","))
        except ValueError as error:
            fail(str(error))
        return dataclasses.replace(cfg, device=device)

    @classmethod
    def stored(cls, given):
        """The flags of the run that `given` resumes and may not contradict; {} if it resumes none."""
        folder, script = given.get("resume_from_checkpoint"), Path(inspect.getfile(cls)).name
        if not folder:
            return {}
        try:
            saved = json.loads(Path(folder, "config.json").read_text())
            stored = dataclasses.asdict(cls(**saved["config"]))
            fits = all(type(stored[f.name]) is f.type for f in dataclasses.fields(cls))
        except (OSError, ValueError, KeyError, TypeError):
            fits = False
        if not fits or saved["script"] != script:
            fail(f"--resume_from_checkpoint {folder}: has no config.json of a run of {script}")
        for name in given.keys() - MAY_DIFFER:
            if given[name] != stored[name]:
                fail(f"--{name} {given[name]}: the run has {stored[name]}; leave the flag out, or begin anew "
                     f"with --init_from {folder}")
        return stored


# ---- 2. problems ----------------------------------------------------------------------------------------

# work: what a worked example writes between the think tags; hidden: what only the environment knows
Problem = collections.namedtuple("Problem", "task prompt answer work difficulty hidden",
                                 defaults=["", 0, None])


def span(numbers):
    """What "3-7" or "5" stands for: (3, 7), (5, 5). ValueError for anything else, and below 2."""
    low, _, high = str(numbers).partition("-")
    if not (low.isdecimal() and (high or low).isdecimal() and 2 <= int(low) <= int(high or low)):
        raise ValueError(f"{numbers!r}: must be a number from 2 on, or a range like 3-7")
    return int(low), int(high or low)


class arithmetic:
    """The default task, in the shape of a file of tasks/ (its verifier stands in the scripts). All
    intermediate values are in 0..20: ((((3+4)-5)*4)-2)= is worked out as 3+4=7;7-5=2;2*4=8;8-2=6."""
    CORPUS = {"shorter": 0.2}   # options of the warm start, which must make padding an ordinary sight

    @staticmethod
    def width(operands="5"):
        """Characters of the longest prompt."""
        return 4 * span(operands)[1] - 2

    @staticmethod
    def sample(rng, operands="5", shorter=0.0):
        low, high = span(operands)
        operands = rng.randint(2 if rng.random() < shorter else low, high)
        value = rng.randint(1, 9)
        expression, work = str(value), []
        while len(work) < operands - 1:
            sign, operand = rng.choice("+-*"), rng.randint(1, 9)
            result = {"+": value + operand, "-": value - operand, "*": value * operand}[sign]
            if 0 <= result <= 20:
                expression = f"({expression}{sign}{operand})"
                work.append(f"{value}{sign}{operand}={result}")
                value = result
        return Problem("arithmetic", expression + "=", str(value), ";".join(work), operands)

    @staticmethod
    def corpus(problem, rng, phase):
        """A completion: the textbook works nine of ten answers out, in the forum seven of ten blurt. Now and
        then a step goes wrong, which is noticed: 3+4=9;wait,3+4=7"""
        steps = problem.work.split(";")
        if phase == "textbook" and rng.random() < 0.02:
            slip = rng.randrange(len(steps))
            left, right = steps[slip].split("=")
            steps[slip] = f"{left}={(int(right) + rng.randint(1, 20)) % 21};wait,{steps[slip]}"
        thinks = rng.random() < {"textbook": 0.9, "forum": 0.3}[phase]
        return f"<think>{';'.join(steps)}</think>" * thinks + f"<answer>{problem.answer}</answer>"


def load_task(name):
    """`arithmetic`, the module tasks/NAME.py with the same names and verify(problem, text), or a mix: A,B."""
    path = Path(__file__).resolve().parent / "tasks" / f"{name}.py"
    if name == "arithmetic":
        return arithmetic
    if "," in name and tasks is not ALONE:
        return tasks.mixed(name.split(","))
    if not (name.isidentifier() and path.is_file()) or name == "mix":
        fail(f"--task {name}: there is no {path}")
    return importlib.import_module(f"tasks.{name}")


def sample_problems(task, n, seed, split="train", weights=None, **options):
    """n problems, a function of the arguments; weights: how often to take one of each difficulty, 1 if None.
    Every tenth prompt, by its hash, is held out for "test", not in warm start nor in training. ValueError if
    the split has another name."""
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r}: must be 'train' or 'test'")
    rng, found, sample = random.Random(repr((task, seed, split))), [], load_task(task).sample
    for _ in range(10_000 + 1_000 * n):
        if len(found) == n:
            return found
        problem = sample(rng, **options)
        if weights and rng.random() >= weights.get(f"{problem.task}-{problem.difficulty}", 1.0):
            continue
        if (zlib.crc32(problem.prompt.encode()) % 10 == 0) == (split == "test"):
            found.append(problem)
    fail(f"--task {task}: has hardly any {split} problems; it needs more variety")


def sample_corpus(task, n, seed, phase, **options):
    """n pairs (problem, completion text) for the warm start, a function of the arguments."""
    rng, module = random.Random(repr((task, seed, phase))), load_task(task)
    problems = sample_problems(task, n, (seed, phase), **options, **getattr(module, "CORPUS", {}))
    return [(problem, module.corpus(problem, rng, phase)) for problem in problems]


def mean(values):
    """None if there are no values."""
    return sum(values) / len(values) if values else None


def generator(*purpose):
    """A CPU generator that is a function of its arguments: generator(seed, "rollout", step)."""
    return torch.Generator().manual_seed(random.Random(repr(purpose)).getrandbits(63))


# ---- 3. the run -----------------------------------------------------------------------------------------

LOGS = ("metrics.jsonl", "samples.jsonl")


def write(path, content):
    """To a temporary name, then renamed: a reader, or a kill at any time, meets the old file or the new."""
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    part.write_text(content) if isinstance(content, str) else torch.save(content, part)
    os.replace(part, path)


def load(path, device):
    """What `write` saved, tensors and plain values only. Raises nearly anything if the file is damaged."""
    if zipfile.ZipFile(path).testzip():                     # torch itself does not look at the checksums
        raise ValueError(f"{path}: wrong checksum")
    return torch.load(path, map_location=device, weights_only=True)


def describe(batch):
    """What the samples of a step are like, in TRL's words."""
    rewards, out, lengths = batch.rewards, batch.out, batch.out.mask.sum(1)
    signal = mean([float(min(group) < max(group)) for group in rewards.tolist()])
    return {"reward": rewards.mean().item(), "reward_std": rewards.std(1).mean().item(),
            "signal": signal, "frac_reward_zero_std": 1 - signal, "accuracy": batch.accuracy,
            "completions/mean_length": lengths.mean().item(),
            "completions/clipped_ratio": batch.cut.float().mean().item(),
            "entropy": ((out.entropy * out.mask).sum() / lengths.sum()).item()}


def measure(problems, texts, lengths, k, extract, verify):
    """Scores of k completions of each problem, side by side, or, if k = 0, of a greedy one. -> dict; None is
    where nothing counts, lists go by k, "examples" are for the report"""
    problems = [problem for problem in problems for _ in range(max(k, 1))]
    verdicts = [verify(problem, text) for problem, text in zip(problems, texts)]
    right = [tasks.is_right(problem, verdict) for problem, verdict in zip(problems, verdicts)]
    found = {"pass@1": mean(right)} if k else {"greedy": mean(right), "examples": [
        {"prompt": problem.prompt, "answer": problem.answer, "text": text, "right": r}
        for problem, text, r in zip(problems[:64], texts, right)]}
    if scores:
        found |= scores.measure(problems, texts, lengths, verdicts, right, k, extract, verify)
    return found


class Run:
    """One run: its folder, what it logs and prints, when it saves, evaluates and stops. `model`: the policy;
    `columns`: the console's, heading -> key in the metrics of a step. Nothing is written before `base`."""

    def __init__(self, cfg, model, columns, argv=None):
        torch.set_num_threads(cfg.num_threads)
        self.cfg, self.columns, self.script = cfg, columns, Path(inspect.getfile(type(cfg)))
        self.folder, self.argv = Path(cfg.resume_from_checkpoint), sys.argv[1:] if argv is None else argv
        self.state = {"step": 0, "recent": [], "rates": {}, "base": None,
                      "seconds_warm_start": 0.0, "seconds_total": 0.0}
        self.clock, self.warned, self.training, self.interrupted = time.perf_counter(), set(), False, False
        self.model, self.resumed, self.ready, checkpoint = model, None, False, self.folder / "checkpoint.pt"
        source = cfg.resume_from_checkpoint or cfg.init_from
        try:
            if cfg.prompt or cfg.resume_from_checkpoint and checkpoint.exists():
                self.resumed = load(checkpoint, cfg.device)
                self.resumed["state"]["step"], self.resumed["logs"][LOGS[0]], self.resumed["optimizer"]
                both = [self.resumed["policy"], load(self.folder / "base.pt", cfg.device)]  # each has to fit
                for weights in reversed(both) if cfg.prompt else both:
                    self.ready = model.load_state_dict(weights)
            elif cfg.init_from:
                other = load(Path(cfg.init_from, "checkpoint.pt"), cfg.device)
                self.ready = model.load_state_dict(other["policy"])
        except Exception as error:
            flag = "--resume_from_checkpoint" if cfg.resume_from_checkpoint else "--init_from"
            fail(f"{flag} {source}: holds no policy of this shape, undamaged ({type(error).__name__}); name "
                 "another run, or give the model flags that it was made with")

    def base(self, train, code):
        """Open the run. The policy begins as that of --init_from, or as train(model, cfg, progress) makes it;
        that is cached in runs/base/ under a hash of all that shapes it, the sources in `code` included."""
        cfg, model, fields = self.cfg, self.model, dataclasses.fields(Config)
        code = (*code, *map(load_task, cfg.task.split(",")), sample_problems, sample_corpus, generator)
        source = [x if isinstance(x, tuple) else inspect.getsource(x) for x in code]        # tuple: constants
        flags = [getattr(cfg, f.name) for f in fields if f.metadata["group"] == GROUPS[-1]]
        key = repr((cfg.options, cfg.device, cfg.num_threads, torch.__version__, flags, source))
        cache = Path(f"runs/base/{cfg.task}-s{cfg.base_seed}-{zlib.crc32(key.encode()):08x}.pt")
        self.open()
        if not self.ready:
            fresh = {name: weight.clone() for name, weight in model.state_dict().items()}
            try:
                model.load_state_dict(load(cache, cfg.device))
            except Exception:                               # none there, or damaged and perhaps half loaded
                model.load_state_dict(fresh)
                cache.parent.mkdir(parents=True, exist_ok=True)
                train(model, cfg, self.progress)
                write(cache, model.state_dict())
        write(self.folder / "base.pt", model.state_dict())
        self.state["seconds_warm_start"] = time.perf_counter() - self.clock

    def open(self):
        """Make the run folder, --output_dir (new or empty) or the first free default, and its config.json."""
        cfg, n, default = self.cfg, 1, f"runs/{self.script.stem}-{self.cfg.task}-s{self.cfg.seed}"
        if not cfg.resume_from_checkpoint:
            self.folder = Path(cfg.output_dir or default)
            try:
                while self.folder.exists() and any(file.suffix != ".tmp" for file in self.folder.iterdir()):
                    if cfg.output_dir:
                        fail(f"--output_dir {self.folder}: is not empty; name another, or resume its run")
                    self.folder = Path(f"{default}-{(n := n + 1)}")
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                fail(f"--output_dir {self.folder}: cannot be made ({error.strerror})")
        write(self.folder / "config.json", json.dumps({
            "script": self.script.name, "argv": self.argv, "python": sys.version, "torch": torch.__version__,
            "config": dataclasses.asdict(cfg) | {"resume_from_checkpoint": ""}}, indent=2))
        write(self.folder / self.script.name, self.script.read_text())
        self.command = f"python {self.script.name} --resume_from_checkpoint {shlex.quote(str(self.folder))}"
        signal.signal(signal.SIGINT, self.on_ctrl_c)
        print(f"{self.script.name}: {cfg.task} on {cfg.device}, run folder {self.folder}")

    def on_ctrl_c(self, *_):
        """In training, the first time, let the step finish. os.write, because a print may be under way."""
        if self.training and not self.interrupted:
            self.interrupted = True
        else:
            os.write(2, f"\ninterrupted; go on with:\n  {self.command}\n".encode())
            raise SystemExit(130)

    def progress(self, label, steps):
        """The items of `steps`, saying how long they will take."""
        return console.progress(label, steps) if console else steps

    def steps(self, evaluate, **parts):
        """Yield the steps still to do. `parts` (policy=..., optimizer=...) are what a checkpoint holds.
        evaluate(policy, cfg, k) is called before and after training, and with k = 0 every eval_steps."""
        cfg, state, resumed, self.parts = self.cfg, self.state, self.resumed, parts
        self.evaluate = functools.partial(evaluate, self.model, cfg, progress=self.progress)
        for name in LOGS:                           # a killed run may have logged more than it saved
            with open(self.folder / name, "ab") as log:
                log.truncate(resumed["logs"][name] if resumed else 0)
        if resumed:
            state.update(resumed["state"])
            for name, part in parts.items():
                part.load_state_dict(resumed[name])
        if not state["base"] or state["base"]["samples"] != cfg.num_eval_samples:
            policy = {name: weight.clone() for name, weight in self.model.state_dict().items()}
            self.model.load_state_dict(load(self.folder / "base.pt", cfg.device))
            state["base"] = self.both()
            self.model.load_state_dict(policy)
            self.save()
        P, G = cfg.num_prompts, cfg.num_generations
        path = "triton" if kernels and kernels.choose(cfg.kernel, torch.device(cfg.device)) else "torch"
        print(f"{P} prompts x {G} completions = {P * G} per step, log-probs by {path}")
        base = [f"{name} {x:.3f}" for name, x in state["base"].items() if isinstance(x, float)]
        print("base: " + ", ".join(base[:3]))
        print(" step" + "".join(f"{heading:>8}" for heading in self.columns) + "  secs  left")
        self.training = True
        while state["step"] < cfg.max_steps and sum(state["recent"]) < 5 * cfg.stop_at:
            self.step_clock = time.perf_counter()
            yield state["step"]
            state["step"] += 1
            if state["step"] % cfg.eval_steps == 0:
                scores = {name: x for name, x in self.evaluate(0).items() if isinstance(x, float)}
                named = {f"eval/{name}": x for name, x in scores.items()}
                self.append("metrics.jsonl", {"step": state["step"], **named})
                print("      " + ", ".join(f"{name} {x:.3f}" for name, x in list(named.items())[:3]))
            if self.interrupted or state["step"] % cfg.save_steps == 0:
                self.save()
            if self.interrupted:
                self.on_ctrl_c()
        self.training = False

    def both(self):
        """Held-out scores, greedy and of samples."""
        k = self.cfg.num_eval_samples
        return self.evaluate(0) | self.evaluate(k) | {"samples": k}

    def log(self, metrics, batch, advantages, *shade, **more):
        """One more step: a line on the console and in metrics.jsonl, and now and then samples."""
        step, took = self.state["step"] + 1, time.perf_counter() - self.step_clock
        metrics = describe(batch) | tasks.describe(batch) | metrics
        self.append("metrics.jsonl", {"step": step, **metrics, "step_time": took})
        self.state["recent"] = (self.state["recent"] + [metrics["accuracy"]])[-5:]
        cells = "".join(f"{metrics[key]:8.3f}" for key in self.columns.values())
        print(f"{step:5d}{cells}{took:6.2f}{took * (self.cfg.max_steps - step):5.0f}s")
        self.warned = console.warn(metrics, self.warned) if console else self.warned
        self.state["rates"] = tasks.rates(self.state["rates"], batch)
        if console and (step == 1 or step % self.cfg.eval_steps == 0):
            for record in console.samples(self, batch, advantages, *shade, **more):
                self.append("samples.jsonl", {"step": step, **record})
            console.best_and_worst(batch, advantages)

    def weights(self):
        """The curriculum as it stands, None without one."""
        return tasks.weights(self.state["rates"]) if self.cfg.curriculum == "yes" else None

    def append(self, name, record):
        """A line of a log; JSON has no infinities."""
        record = {key: None if isinstance(value, float) and not math.isfinite(value) else value
                  for key, value in record.items()}
        with open(self.folder / name, "a") as log:
            log.write(json.dumps(record) + "\n")

    def save(self):
        """A checkpoint, with the sizes the logs have now."""
        now = time.perf_counter()
        self.state["seconds_total"], self.clock = self.state["seconds_total"] + now - self.clock, now
        write(self.folder / "checkpoint.pt", {
            "state": self.state, "logs": {name: (self.folder / name).stat().st_size for name in LOGS},
            **{name: part.state_dict() for name, part in self.parts.items()}})

    def finish(self):
        """Evaluate what was trained, save, and say what changed. -> the summary, also in summary.json"""
        state = self.state
        trained = self.both() if state["step"] else state["base"]
        self.save()
        before, after = dict(state["base"]), dict(trained)
        pairs = zip(before.pop("examples"), after.pop("examples"))
        write(self.folder / "evaluation.jsonl", "".join(
            json.dumps({"prompt": b["prompt"], "base": b, "trained": t}) + "\n" for b, t in pairs))
        summary = {"base": before, "trained": after, "steps": state["step"],
                   **{name: state[name] for name in ("seconds_warm_start", "seconds_total")}}
        write(self.folder / "summary.json", json.dumps(summary, indent=2))
        if console:
            console.table(before, after)
        if report:
            report.draw_curve(self.folder)
        print(f"{state['step']} steps, {state['seconds_total']:.0f} s, folder {self.folder}. Ask the policy:")
        example = sample_problems(self.cfg.task, 1, "example", "test", **self.cfg.options)[0].prompt
        print(f"  {self.command} --prompt {shlex.quote(example)}")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return summary
