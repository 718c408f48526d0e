"""What the scripts share and no paper is about: flags, arithmetic problems, and the run itself (folder, logs,
checkpoints, resume). No model, no verifier, no loss is in here.
"""
import argparse
import dataclasses
import functools
import importlib
import inspect
import json
import math
import os
import random
import re
import shlex
import signal
import sys
import time
import zipfile
import zlib
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import torch

HERE = Path(__file__).resolve().parent
print = functools.partial(print, flush=True)        # a line shows when it is printed, in a pipe too


def optional(name):
    """A module of this repository, None where a script was copied out without it."""
    path = HERE.joinpath(*name.split("."))
    there = path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
    return importlib.import_module(name) if there else None


# Stand-ins for tasks/mix.py and tools/console.py: arithmetic only, plain lines only.
ALONE = SimpleNamespace(
    load=lambda name: fail(f"--task {name}: there is no {HERE / 'tasks' / name}.py; take arithmetic"),
    check=lambda *arguments: None, calls=lambda problems: [], is_right=lambda problem, verdict: verdict == 1,
    reward=lambda names, step, problem, text, verdict: verdict, describe=lambda *arguments: {},
    rates=lambda before, batch: {}, judge=lambda *arguments: {})
PLAIN = SimpleNamespace(
    progress=lambda label, steps: steps, start=lambda run: None, step=lambda *step, **more: None,
    finish=lambda run, both: print("no report.html, no curve.png: there is no folder tools/"))
tasks, console = optional("tasks.mix") or ALONE, optional("tools.console") or PLAIN
kernels, bases, scores = map(optional, ("kernels", "tools.bases", "tools.scores"))

# ---- 1. flags -------------------------------------------------------------------------------------------

def fail(message, code=2):
    """One line on stderr, then exit: 2 for bad input (nothing was touched), 1 for a run that had to stop."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def flag(default, help, group="algorithm", low=None, high=math.inf, choices=(), why=""):
    """A field of a Config that is also a command-line flag; numbers are finite, from `low` to `high`."""
    return dataclasses.field(default=default, metadata=locals())


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
    fused_linear: str = run_flag("auto", "auto: no large logits in memory", choices=("auto", "on", "off"))
    num_threads: int = run_flag(1, "CPU threads; a second one gains 1.15x at this size, if idle", low=1)
    output_dir: str = run_flag("", "run folder; else runs/ALGORITHM-TASK-sSEED, with -2, -3 ... when taken")
    save_steps: int = run_flag(10, "steps between checkpoints", low=1)
    resume_from_checkpoint: str = run_flag("", "run folder to go on with, its flags included")
    init_from: str = run_flag("", "run folder whose trained policy takes the place of the base")
    cold_start: int = run_flag(0, "with --init_from: batches of worked examples to learn from first", low=0)
    prompt: str = run_flag("", "with --resume_from_checkpoint: print what the policy answers, then exit")
    operands: str = task_flag("5", "arithmetic: numbers in a problem, or a range: 3-7")
    numbers: str = task_flag("3-4", "countdown: numbers in a problem, or a range")
    slip: float = task_flag(0.0, "gridworld: how often a move goes astray", low=0, high=1)
    num_generations: int = sample_flag(8, "completions per prompt (G)", low=2, why="one has no siblings")
    num_prompts: int = sample_flag(32, "prompts per step (P)", low=1)
    max_completion_length: int = sample_flag(48, "tokens per completion at most (L)", low=1)
    dynamic_sampling: int = sample_flag(0, "batches of prompts to add until P groups have signal", low=0)
    curriculum: str = sample_flag("no", "yes: prompts by p(1 - p) of their difficulty", choices=("no", "yes"))
    mask_tool_tokens: str = sample_flag("yes", "no: learns what tools say (do not)", choices=("no", "yes"))
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
    textbook: float = base_flag(0.6, "share of textbook batches; the others: forum", low=0, high=1)
    base_learning_rate: float = base_flag(4e-3, "warm-start peak, falling linearly to 0", low=0)

    @property
    def options(self):
        """What the functions of the task take as keywords."""
        takes = inspect.signature(load_task(self.task).sample).parameters
        return {name: getattr(self, name) for name in takes if hasattr(self, name)}

    @property
    def scoring(self):
        """How log-probs are computed: the last arguments of a script's `score`."""
        return self.temperature, self.kernel, self.fused_linear

    def check(self):
        """Exit with one line for a value, or a pair of values, that cannot work."""
        def need(fits, name, words):
            if not fits:
                fail(f"--{name} {getattr(self, name)}: {words}")

        options, H, P = self.options, self.num_attention_heads, self.num_prompts
        for f in dataclasses.fields(self):
            value, m = getattr(self, f.name), SimpleNamespace(**f.metadata)
            limits = f"finite and at least {m.low}" if m.high == math.inf else f"from {m.low} to {m.high}"
            need(m.low is None or m.low <= value <= m.high and value < math.inf, f.name,
                 f"must be {limits}" + (m.why and f" ({m.why})"))
            need(not m.choices or value in m.choices, f.name, f"must be one of {', '.join(m.choices)}")
            used = m.group != "task" or value == f.default or f.name in options
            need(used, f.name, f"is not for {self.task}")
        need(self.hidden_size % (2 * H) == 0, "hidden_size", f"must be a multiple of {2 * H}, two per head")
        need(H % self.num_key_value_heads == 0, "num_key_value_heads", f"must divide num_attention_heads {H}")
        need(self.num_mini_batches <= P, "num_mini_batches", f"a batch has only {P} groups")
        for name, there in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available())):
            need(there or self.device != name, "device", "torch finds none; use cpu")
        need(kernels or self.kernel != "triton", "kernel", "there is no folder kernels/; use torch")
        need(kernels or self.fused_linear != "on", "fused_linear", "there is no folder kernels/; use off")
        need(tasks is not ALONE or self.reward == "accuracy", "reward", "there is no folder tasks/")
        need(tasks is not ALONE or self.curriculum == "no", "curriculum", "there is no folder tasks/")
        need(self.resume_from_checkpoint or not self.prompt, "prompt", "needs --resume_from_checkpoint RUN")
        need(self.init_from or not self.cold_start, "cold_start", "needs --init_from RUN")
        try:
            span(self.operands), span(self.numbers, "numbers")
            width = load_task(self.task).width(**options)
            kernels and kernels.choose(self.kernel, torch.device(self.device))
            tasks.check(self.reward, self.task.split(","), getattr(self, "MODELS", ()))
        except ValueError as error:
            fail(str(error))
        need(len(self.prompt.encode()) <= width, "prompt", "is longer than the prompts of this task")

    @classmethod
    def parse(cls, argv=None):
        """The flags of `argv`, over those of the run that it resumes or of the task. Exits if one is bad."""
        parser = argparse.ArgumentParser(description=sys.modules[cls.__module__].__doc__, allow_abbrev=False,
                                         formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.error = lambda message: fail(f"{message} (--help lists the flags)")
        groups = {name: parser.add_argument_group(name) for name in ("algorithm", *GROUPS)}
        for f in dataclasses.fields(cls):
            values = f.metadata["choices"] and f"{{{','.join(f.metadata['choices'])}}}"
            words = f"{f.metadata['help']} [{f.default}]"
            for name, shown in {f.name.replace("_", "-"): argparse.SUPPRESS, f.name: words}.items():
                groups[f.metadata["group"]].add_argument(
                    "--" + name, dest=f.name, default=argparse.SUPPRESS, type=f.type, help=shown,
                    metavar=values or f.type.__name__.upper())
        given = vars(parser.parse_args(argv))
        for name in [name for name, value in given.items() if value == ""]:
            fail(f"--{name}: is empty; say what, or leave it out")
        cfg = cls(**cls.stored(given) | given)
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        cfg = dataclasses.replace(cfg, device=auto if cfg.device == "auto" else cfg.device)
        cfg.check()
        return cfg

    @classmethod
    def stored(cls, given):
        """What holds where nothing is `given`: the flags of the run to resume, or those of the task."""
        folder, script = given.get("resume_from_checkpoint"), Path(inspect.getfile(cls)).name
        types = {f.name: f.type for f in dataclasses.fields(cls)}
        if not folder:
            wanted = getattr(load_task(given.get("task", cls.task)), "FLAGS", {})
            return {name: types[name](value) for name, value in wanted.items() if name in types}
        try:
            saved = json.loads(Path(folder, "config.json").read_text())
            stored = saved["config"]
            fits = saved["script"] == script and types == {name: type(x) for name, x in stored.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            fits = False
        if not fits:
            fail(f"--resume_from_checkpoint {folder}: has no config.json of this {script}; name a run of it")
        for name in given.keys() - MAY_DIFFER:
            if given[name] != stored[name]:
                fail(f"--{name} {given[name]}: the run has {stored[name]}; leave the flag out, or begin anew "
                     f"with --init_from {folder}")
        return stored


# ---- 2. problems ----------------------------------------------------------------------------------------

# work: what a worked example writes between the think tags; hidden: what only the environment knows
Problem = namedtuple("Problem", "task prompt answer work difficulty hidden", defaults=["", 0, None])


def span(numbers, name="operands"):
    """What "3-7" or "5" stands for: (3, 7), (5, 5). ValueError on the flag `name` for anything else."""
    found = re.fullmatch("([0-9]{1,2})(-([0-9]{1,2}))?", str(numbers))
    low, high = (int(found[1]), int(found[3] or found[1])) if found else (0, 0)
    if not 2 <= low <= high:
        raise ValueError(f"--{name} {numbers}: must be a number from 2 to 99, or a range like 3-7")
    return low, high


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
    return arithmetic if name == "arithmetic" else tasks.load(name)


def sample_problems(task, n, seed, split="train", weights=None, **options):
    """n problems, a function of the arguments; weights: how often to take one of a difficulty, 1 if None. A
    tenth of the prompts, by hash, is held out for "test", the rest "train"; ValueError for another split."""
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r}: must be 'train' or 'test'")
    rng, found, sample = random.Random(repr((task, seed, split))), [], load_task(task).sample
    for _ in range(10_000 + 1_000 * n):
        if len(found) == n:
            return found
        problem = sample(rng, **options)
        taken = not weights or rng.random() < weights.get(f"{problem.task}-{problem.difficulty}", 1.0)
        if taken and (zlib.crc32(problem.prompt.encode()) % 10 == 0) == (split == "test"):
            found.append(problem)
    fail(f"--task {task}: has hardly any {split} problems; it needs more variety")


def ask(cfg):
    """The problem of --prompt, in a list: the example of a run's end, or one of which no more is known."""
    example = sample_problems(cfg.task, 1, "example", "test", **cfg.options)
    return example if example[0].prompt == cfg.prompt else [Problem(cfg.task, cfg.prompt, "")]


def tell(rollout):
    """Print the first completion, escaped: no control character reaches the terminal."""
    print(ascii(rollout.texts()[0])[1:-1])


def sample_corpus(task, n, seed, phase, **options):
    """n pairs (problem, completion text) for the warm start, a function of the arguments."""
    rng, module = random.Random(repr((task, seed, phase))), load_task(task)
    problems = sample_problems(task, n, (seed, phase), **options, **getattr(module, "CORPUS", {}))
    return [(problem, module.corpus(problem, rng, phase)) for problem in problems]


def mean(values):
    """None if there are no values."""
    return sum(values) / len(values) if values else None


def generator(*purpose):
    """A CPU generator that is a function of its arguments, generator(seed, "rollout", step): there is no
    state to save, and a resumed run draws what the uninterrupted one would have drawn."""
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
    signal = (rewards.amax(1) > rewards.amin(1)).double().mean().item()
    return {"reward": rewards.mean().item(), "reward_std": rewards.std(1).mean().item(),
            "signal": signal, "frac_reward_zero_std": 1 - signal, "accuracy": batch.accuracy,
            "completions/mean_length": lengths.mean().item(),
            "completions/clipped_ratio": batch.cut.float().mean().item(),
            "entropy": ((out.entropy * out.mask).sum() / lengths.sum()).item()}


def measure(problems, texts, lengths, k, extract, verify):
    """Scores of k completions of each problem, side by side, or, if k = 0, of a greedy one. -> dict, in which
    None is where nothing counts"""
    problems = [problem for problem in problems for _ in range(max(k, 1))]
    verdicts = [verify(problem, text) for problem, text in zip(problems, texts)]
    right = [tasks.is_right(problem, verdict) for problem, verdict in zip(problems, verdicts)]
    more = scores.measure(problems, texts, lengths, verdicts, right, k, extract, verify) if scores else {}
    return {"pass@1" if k else "greedy": mean(right)} | more


class Run:
    """One run: its folder, what it logs and prints, when it saves, evaluates and stops. `model`: the policy;
    `columns`: the console's, heading -> key in the metrics of a step. Nothing is written before `base`."""
    progress = staticmethod(console.progress)

    def __init__(self, cfg, model, columns, argv=None):
        torch.set_num_threads(cfg.num_threads)
        self.cfg, self.model, self.columns, self.resumed = cfg, model, columns, {}
        self.script, self.argv = Path(inspect.getfile(type(cfg))), sys.argv[1:] if argv is None else argv
        self.state = {"step": 0, "recent": [], "rates": {}, "base": {},
                      "seconds_warm_start": 0.0, "seconds_total": 0.0}
        self.clock, self.training, self.interrupted, self.warned = time.perf_counter(), False, False, set()
        self.folder = Path(cfg.resume_from_checkpoint)
        again = cfg.prompt or cfg.resume_from_checkpoint and (self.folder / "checkpoint.pt").exists()
        flag = "resume_from_checkpoint" if again else "init_from"
        try:
            if source := getattr(cfg, flag):
                saved = load(Path(source, "checkpoint.pt"), cfg.device)
                if again:
                    model.load_state_dict(load(self.folder / "base.pt", cfg.device))
                    self.resumed, self.state = saved, self.state | saved["state"]
                model.load_state_dict(saved["policy"])
        except Exception as error:
            fail(f"--{flag} {source}: holds no policy of this shape, undamaged ({type(error).__name__}); "
                 "name another run, or give the model flags that it was made with")

    def base(self, train, code):
        """Open the run. Its policy begins as that of --init_from, or as train(model, cfg, progress) makes it;
        tools/bases.py keeps that for other runs. `code`: functions and constants that shape it."""
        cfg, model = self.cfg, self.model
        self.open()
        if self.resumed:
            return model.load_state_dict(load(self.folder / "base.pt", cfg.device))
        if not cfg.init_from:
            make = functools.partial(train, model, cfg, self.progress)
            bases.cached(model, cfg, code, make) if bases else make()
        elif cfg.cold_start:
            textbook = dataclasses.replace(cfg, base_steps=cfg.cold_start, textbook=1.0)
            train(model, textbook, self.progress)
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

    def steps(self, evaluate, **parts):
        """Yield the steps still to do. `parts` (policy=..., optimizer=...) are what a checkpoint holds.
        evaluate(policy, cfg, k) is called before and after training, and with k = 0 every eval_steps."""
        cfg, state, self.parts = self.cfg, self.state, parts
        self.evaluate = functools.partial(evaluate, self.model, cfg, progress=self.progress)
        for name in LOGS:                           # a killed run may have logged more than it saved
            with open(self.folder / name, "ab") as log:
                log.truncate(self.resumed["logs"][name] if self.resumed else 0)
        asked = {"samples": cfg.num_eval_samples, "problems": cfg.num_eval_problems}
        self.both = lambda: self.evaluate(0) | self.evaluate(cfg.num_eval_samples) | asked
        if not asked.items() <= state["base"].items():      # for now the policy still is the base
            state["base"] = self.both()
        for name, part in parts.items() if self.resumed else ():
            part.load_state_dict(self.resumed[name])
        self.save()
        console.start(self)
        print(" step" + "".join(f"{heading:>8}" for heading in self.columns) + "  secs  left")
        self.training = True
        while state["step"] < cfg.max_steps and sum(state["recent"]) < 5 * cfg.stop_at:
            self.step_clock = time.perf_counter()
            yield state["step"]
            state["step"] += 1
            if state["step"] % cfg.eval_steps == 0:
                scores = {f"eval/{name}": x for name, x in self.evaluate(0).items() if isinstance(x, float)}
                self.append("metrics.jsonl", {"step": state["step"]} | scores)
                said = [f"{name} {x:.3f}" for name, x in scores.items() if name.count("/") == 1]
                print("      " + ", ".join(said[:3]))
            if self.interrupted or state["step"] % cfg.save_steps == 0:
                self.save()
            if self.interrupted:
                self.on_ctrl_c()
        self.training = False

    def log(self, metrics, batch, advantages, *shade, **more):
        """One more step: a line on the console and in metrics.jsonl, and what the console adds."""
        step, took = self.state["step"] + 1, time.perf_counter() - self.step_clock
        metrics = describe(batch) | tasks.describe(batch, self.cfg.reward, step) | metrics
        self.append("metrics.jsonl", {"step": step, **metrics, "step_time": took})
        self.state["recent"] = (self.state["recent"] + [metrics["accuracy"]])[-5:]
        self.state["rates"] = tasks.rates(self.state["rates"], batch)
        cells = "".join(f"{metrics[key]:8.3f}" for key in self.columns.values())
        print(f"{step:5d}{cells}{took:6.2f}{took * (self.cfg.max_steps - step):5.0f}s")
        console.step(self, step, metrics, batch, advantages, *shade, **more)

    def weights(self):
        """The curriculum as it stands, None without one."""
        return tasks.weights(self.state["rates"]) if self.cfg.curriculum == "yes" else None

    def append(self, name, record):
        """A line of a log; JSON has no infinities."""
        finite = {key: None if x in (math.inf, -math.inf) or x != x else x for key, x in record.items()}
        with open(self.folder / name, "a") as log:
            log.write(json.dumps(finite) + "\n")

    def save(self):
        """A checkpoint, with the sizes the logs have now."""
        now = time.perf_counter()
        self.state["seconds_total"], self.clock = self.state["seconds_total"] + now - self.clock, now
        write(self.folder / "checkpoint.pt", {
            "state": self.state, "logs": {name: (self.folder / name).stat().st_size for name in LOGS},
            **{name: part.state_dict() for name, part in self.parts.items()}})

    def finish(self):
        """Evaluate what was trained, save, and say what changed. -> the summary, also in summary.json"""
        state, both = self.state, {"base": self.state["base"]}
        both["trained"] = self.both() if state["step"] else both["base"]
        self.save()
        summary = {when: {name: x for name, x in scores.items() if name != "examples"}
                   for when, scores in both.items()}
        summary |= {"steps": state["step"], "seconds_warm_start": state["seconds_warm_start"],
                    "seconds_total": state["seconds_total"]}
        write(self.folder / "summary.json", json.dumps(summary, indent=2))
        console.finish(self, both)
        print(f"{state['step']} steps, {state['seconds_total']:.0f} s, folder {self.folder}. Ask the policy:")
        example = sample_problems(self.cfg.task, 1, "example", "test", **self.cfg.options)[0].prompt
        print(f"  {self.command} --prompt {shlex.quote(example)}")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return summary
