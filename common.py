"""What the scripts share and no paper is about: flags, arithmetic problems, and the run itself (folder, logs,
checkpoints, resume). No model, no verifier, no loss is in here."""
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

# ---- 1. flags -------------------------------------------------------------------------------------------

def fail(message, code=2):
    """One line on stderr, then exit: 2 for bad input (nothing was touched), 1 for a run that had to stop."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def flag(default, help, group="algorithm", low=None, high=math.inf, choices=(), why="", needs=""):
    """A field of a Config and a flag: numbers are finite, low .. high; idle without the flag it `needs`."""
    return dataclasses.field(default=default, metadata=locals())


GROUPS = ("run", "task", "sampling", "optimizer", "evaluation", "base policy, shared by all scripts")
run_flag, task_flag, sample_flag, step_flag, eval_flag, base_flag = (
    functools.partial(flag, group=group) for group in GROUPS)
DEVICES = ["mps"] * torch.backends.mps.is_available() + ["cpu"] + ["cuda"] * torch.cuda.is_available()
MAY_DIFFER = {"max_steps", "stop_at", "save_steps", "eval_steps", "num_eval_problems", "num_eval_samples",
              "device", "prompt", "output_dir", "resume_from_checkpoint"}     # when a run is resumed


def optional(module):
    """A module of this repository, None where a script was copied out without it."""
    files = (HERE / f"{module.replace('.', '/')}{end}" for end in (".py", "/__init__.py"))
    return importlib.import_module(module) if any(file.is_file() for file in files) else None


kernels = optional("kernels")
KERNELS, LINEAR = (x[:3 if kernels else 2] for x in (("auto", "torch", "triton"), ("auto", "off", "on")))
tasks = optional("tasks.mix") or SimpleNamespace(                       # arithmetic alone
    Flags=type("Flags", (), {"reward": "accuracy", "mask_tool_tokens": "yes"}), check=lambda cfg: None,
    load=lambda name: fail(f"--task {name}: there is no {HERE / 'tasks' / name}.py; take arithmetic"),
    is_right=lambda problem, verdict: verdict == 1, reward=lambda *row: row[-1], calls=lambda problems: [],
    describe=lambda *b: {}, learned=lambda *b: {}, judge=lambda *b: {}, judged=lambda batch, parts: batch)
tools = optional("tools.console") or SimpleNamespace(                   # a plain line a step
    Flags=type("Flags", (), {"prompt": "", "init_from": ""}), check=lambda cfg: None,
    begin=lambda run, train, code: run.resumed or train(run.model, run.cfg, tools.progress),
    progress=lambda label, steps: steps, start=lambda run: print("step", *run.columns),
    step=lambda run, m, *_, **kw: print(run.state["steps"], *(round(m[x], 3) for x in run.columns.values())),
    measure=lambda problems, texts, lengths, k, extract, verify: {"pass@1" if k else "greedy": mean([
        tasks.is_right(p, verify(p, x)) for i, x in enumerate(texts) for p in [problems[i // (k or 1)]]])},
    finish=lambda run, both: print(both, "no report.html, no curve.png: there is no folder tools/", sep="\n"))


@dataclasses.dataclass(frozen=True)
class Config(tasks.Flags, tools.Flags):
    """The flags every script has; a script's own Config adds the symbols of its equations."""
    task: str = run_flag("arithmetic", "arithmetic, or NAME for tasks/NAME.py; several: A,B")
    max_steps: int = run_flag(60, "batches to train on at most; 0 makes and evaluates the base only", low=0)
    stop_at: float = run_flag(0.98, "stop when the last 5 batches are this accurate; 2: never", low=0)
    seed: int = run_flag(0, "of problems, sampling and shuffling", low=0)
    device: str = run_flag(DEVICES[-1], "where to run; CUDA if there is one", choices=DEVICES)
    kernel: str = run_flag("auto", "of log-probs, rollouts; auto: triton on CUDA", choices=KERNELS)
    fused_linear: str = run_flag("auto", "auto: no large logits in memory", choices=LINEAR)
    num_threads: int = run_flag(1, "CPU threads; a second one gains 1.15x at this size, if idle", low=1)
    output_dir: str = run_flag("", "run folder; else runs/ALGORITHM-TASK-sSEED, with -2, -3 ... when taken")
    save_steps: int = run_flag(10, "steps between checkpoints", low=1)
    resume_from_checkpoint: str = run_flag("", "run folder to go on with, its flags included")
    operands: str = task_flag("5", "arithmetic: numbers in a problem, or a range: 3-7")
    num_generations: int = sample_flag(8, "completions per prompt (G)", low=2, why=": one has no siblings")
    num_prompts: int = sample_flag(32, "prompts per step (P)", low=1)
    max_completion_length: int = sample_flag(48, "tokens per completion at most (L)", low=1)
    dynamic_sampling: int = sample_flag(0, "batches of prompts to add until P groups have signal", low=0)
    temperature: float = sample_flag(1.0, "of sampling and scoring", low=1e-3, why=": 0 explores nothing")
    learning_rate: float = step_flag(5e-4, "of AdamW", low=0)
    warmup_steps: int = step_flag(0, "steps of linear learning-rate warm-up, constant after it", low=0)
    weight_decay: float = step_flag(0.0, "of AdamW", low=0)
    max_grad_norm: float = step_flag(1.0, "longer gradients are scaled down to this norm", low=1e-9)
    num_mini_batches: int = step_flag(2, "optimizer steps per pass over the batch", low=1)
    micro_batch_size: int = step_flag(32, "rows per backward pass: memory, speed, bnpo's gradient", low=1)
    eval_steps: int = eval_flag(10, "steps between greedy evaluations", low=1)
    num_eval_problems: int = eval_flag(512, "held-out problems", low=1)
    num_eval_samples: int = eval_flag(8, "samples of each before and after training (k of pass@k)", low=1)
    hidden_size: int = base_flag(64, "width (D)", low=1)
    num_hidden_layers: int = base_flag(2, "decoder layers", low=1)
    num_attention_heads: int = base_flag(4, "query heads (H)", low=1)
    num_key_value_heads: int = base_flag(1, "key/value heads, each shared by several query heads", low=1)
    intermediate_size: int = base_flag(176, "width of the SwiGLU layer", low=1)
    base_seed: int = base_flag(0, "of the initial weights and the corpus", low=0)
    base_steps: int = base_flag(1000, "warm-start batches", low=0)
    base_batch_size: int = base_flag(32, "demonstrations per warm-start batch", low=1)
    textbook: float = base_flag(0.6, "share of textbook batches; the others: forum", low=0, high=1)
    base_learning_rate: float = base_flag(4e-3, "warm-start peak, falling linearly to 0", low=0)

    # what the functions of the task take as keywords, and the last arguments of a script's `score`
    options = property(lambda self: {name: getattr(self, name) for name in inspect.signature(
        load_task(self.task).sample).parameters if hasattr(self, name)})
    scoring = property(lambda self: (self.temperature, self.kernel, self.fused_linear))

    def check(self):
        """Exit with one line for a value, or a pair of values, that cannot work."""
        def need(fits, name, words):
            if not fits:
                fail(f"--{name} {getattr(self, name)}: {words}")

        H, P = self.num_attention_heads, self.num_prompts
        for f in dataclasses.fields(self):
            value, m = getattr(self, f.name), SimpleNamespace(**f.metadata)
            need(m.low is None or m.low <= value <= m.high and value < math.inf, f.name,
                 f"must be finite, at least {m.low}" + f", at most {m.high}" * (m.high < math.inf) + m.why)
            need(not m.choices or value in m.choices, f.name, f"must be one of {', '.join(m.choices)}")
        need(self.hidden_size % (2 * H) == 0, "hidden_size", f"must be a multiple of {2 * H}, two per head")
        need(H % self.num_key_value_heads == 0, "num_key_value_heads", f"must divide num_attention_heads {H}")
        need(self.num_mini_batches <= P, "num_mini_batches", f"a batch has only {P} groups")
        try:
            load_task(self.task).width(**self.options), tasks.check(self), tools.check(self)
            kernels and kernels.choose(self.kernel, torch.device(self.device))
        except ValueError as error:
            fail(str(error))

    @classmethod
    def parse(cls, argv=None):
        """The flags of `argv`, over those of the run that it resumes or of the task. Exits if one is bad."""
        parser = argparse.ArgumentParser(
            description=sys.modules[cls.__module__].__doc__, argument_default=argparse.SUPPRESS,
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.error = lambda message: fail(f"{message} (--help lists the flags)")
        groups = {name: parser.add_argument_group(name) for name in ("algorithm", *GROUPS)}
        for f in sorted(dataclasses.fields(cls), key=lambda f: f.name not in Config.__annotations__):
            groups[f.metadata["group"]].add_argument(
                f"--{f.name}", type=f.type, help=f"{f.metadata['help']} [{f.default}]",
                metavar="|".join(f.metadata["choices"]) or f.type.__name__.upper())
        words = sys.argv[1:] if argv is None else argv
        given = vars(parser.parse_args([                # --max-steps is --max_steps
            re.sub(r"^--[\w-]+(?==|$)", lambda m: "--" + m[0][2:].replace("-", "_"), x) for x in words]))
        for name in [name for name, value in given.items() if value == ""]:
            fail(f"--{name}: is empty; say what, or leave it out")
        cfg = cls(**cls.stored(given) | given)
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
            stored = saved["config"] if saved["script"] == script else None
            if {name: type(x) for name, x in stored.items()} != types:
                raise ValueError
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            fail(f"--resume_from_checkpoint {folder}: no run of {script} with these folders; name one")
        for name in given.keys() - MAY_DIFFER:
            if given[name] != stored[name]:
                fail(f"--{name} {given[name]}: the run has {stored[name]!r}; omit it or --init_from {folder}")
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
                work.append(f"{value}{sign}{operand}={result}")
                expression, value = f"({expression}{sign}{operand})", result
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
    rng, found, sample = random.Random(repr((task, seed, split))), [], load_task(task).sample
    held_out = ("train", "test").index(split)
    for _ in range(10_000 + 1_000 * n):
        if len(found) == n:
            return found
        problem = sample(rng, **options)
        taken = not weights or rng.random() < weights.get(f"{problem.task}-{problem.difficulty}", 1.0)
        if taken and (zlib.crc32(problem.prompt.encode()) % 10 == 0) == held_out:
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
    """A CPU generator that is a function of its arguments, generator(seed, "rollout", step): there is no
    state to save, and a resumed run draws what the uninterrupted one would have drawn."""
    return torch.Generator().manual_seed(random.Random(repr(purpose)).getrandbits(63))


# ---- 3. the run -----------------------------------------------------------------------------------------

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


class Run:
    """One run: its folder, what it logs and prints, when it saves, evaluates and stops. `model`: the policy;
    `columns`: the console's, heading -> key in the metrics of a step. Nothing is written before `base`."""
    logs = ("metrics.jsonl", "samples.jsonl")
    weights = property(lambda self: self.state.get("weights"))     # of the curriculum

    def __init__(self, cfg, model, columns, argv=None):
        torch.set_num_threads(cfg.num_threads)
        self.cfg, self.model, self.columns, self.clock = cfg, model, columns, time.perf_counter()
        self.script, self.argv = Path(inspect.getfile(type(cfg))), sys.argv[1:] if argv is None else argv
        self.state = {"steps": 0, "recent": [], "base": {}, "seconds_total": 0.0}
        default = f"runs/{self.script.stem}-{cfg.task}-s{cfg.seed}"
        self.folder, self.resumed = Path(cfg.resume_from_checkpoint or cfg.output_dir or default), {}
        again = cfg.prompt or cfg.resume_from_checkpoint and (self.folder / "checkpoint.pt").exists()
        flag = "resume_from_checkpoint" if again else "init_from"
        try:
            if source := getattr(cfg, flag):
                saved = load(Path(source, "checkpoint.pt"), cfg.device)
                model.load_state_dict(saved["policy"])
                if again:                           # the policy is the base until `steps` loads the parts
                    model.load_state_dict(load(self.folder / "base.pt", cfg.device))
                    self.resumed, self.state = saved, self.state | saved["state"]
        except Exception as error:
            fail(f"--{flag} {source}: holds no policy of this shape ({type(error).__name__}); name another")

    def base(self, train, code):
        """Make the run folder, --output_dir (new or empty) or the first free default, and the base in it, by
        train(model, cfg, progress) or as tools/bases.py has it. `code`: functions and constants behind it."""
        cfg, first, n = self.cfg, self.folder, 1
        try:
            while not cfg.resume_from_checkpoint and any(x.suffix != ".tmp" for x in self.folder.glob("*")):
                if cfg.output_dir:
                    fail(f"--output_dir {first}: is not empty; name another, or resume its run")
                self.folder = Path(f"{first}-{(n := n + 1)}")
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail(f"--output_dir {self.folder}: cannot be made ({error.strerror})")
        write(self.folder / "config.json", json.dumps({
            "script": self.script.name, "argv": self.argv, "python": sys.version, "torch": torch.__version__,
            "config": dataclasses.asdict(cfg) | {"resume_from_checkpoint": ""}}, indent=2))
        write(self.folder / self.script.name, self.script.read_text())
        print(f"{self.script.name}: {cfg.task} on {cfg.device}, run folder {self.folder}")
        tools.begin(self, train, code)
        if not self.resumed:
            write(self.folder / "base.pt", self.model.state_dict())
            self.state["seconds_warm_start"] = time.perf_counter() - self.clock

    def steps(self, evaluate, **parts):
        """Yield the steps still to do. `parts` (policy=..., optimizer=...) are what a checkpoint holds.
        evaluate(policy, cfg, k) is called before and after training, and with k = 0 every eval_steps."""
        cfg, state, self.parts = self.cfg, self.state, parts
        self.evaluate = functools.partial(evaluate, self.model, cfg, progress=tools.progress)
        for name in self.logs:                      # a killed run may have logged more than it saved
            with open(self.folder / name, "ab") as log:
                log.truncate(min(log.tell(), self.resumed["logs"][name] if self.resumed else 0))
        asked = {"samples": cfg.num_eval_samples, "problems": cfg.num_eval_problems}
        self.both = lambda: self.evaluate(0) | self.evaluate(cfg.num_eval_samples) | asked
        if not asked.items() <= state["base"].items():      # for now the policy still is the base
            state["base"] = self.both()
        for name, part in parts.items() if self.resumed else ():
            part.load_state_dict(self.resumed[name])
        self.save()
        tools.start(self)
        while state["steps"] < cfg.max_steps and sum(state["recent"]) < 5 * cfg.stop_at:
            self.step_clock = time.perf_counter()
            yield state["steps"]
        self.step_clock = None                      # no step is under way
        self.save()

    def log(self, metrics, batch, advantages, *shade, **more):
        """A step is done: evaluate if it is time, log, print, and save if it is time."""
        cfg, state, took = self.cfg, self.state, time.perf_counter() - self.step_clock
        n = state["steps"] = state["steps"] + 1
        metrics = describe(batch) | tasks.describe(batch, cfg.reward, n - 1) | metrics | {"step_time": took}
        if n % cfg.eval_steps == 0:
            metrics |= {f"eval/{name}": x for name, x in self.evaluate(0).items() if isinstance(x, float)}
        self.append("metrics.jsonl", {"step": n} | metrics)
        state |= {"recent": [*state["recent"], metrics["accuracy"]][-5:]} | tasks.learned(cfg, state, batch)
        tools.step(self, metrics, batch, advantages, *shade, **more)
        if n % cfg.save_steps == 0:
            self.save()

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
            "state": self.state, "logs": {name: (self.folder / name).stat().st_size for name in self.logs},
            **{name: part.state_dict() for name, part in self.parts.items()}})

    def finish(self):
        """Evaluate what was trained, save, and say what changed. -> the summary, also in summary.json"""
        state = self.state
        both = {"base": state["base"], "trained": self.both() if state["steps"] else state["base"]}
        self.save()
        summary = {name: state[name] for name in ("steps", "seconds_warm_start", "seconds_total")} | {
            when: {key: x for key, x in found.items() if key != "examples"} for when, found in both.items()}
        write(self.folder / "summary.json", json.dumps(summary, indent=2))
        tools.finish(self, both)
        return summary
