"""What the scripts share and no paper is about: flags, arithmetic problems, and the run itself (folder, logs,
checkpoints, resume, console). No model, no verifier, no loss is in here.

Every random number of a run is a function of (seed, purpose, step), see `generator`: there is no generator state to
save, and a resumed run draws what the uninterrupted one would have drawn.
"""
import argparse
import collections
import ctypes
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import operator
import os
import platform
import random
import shlex
import shutil
import signal
import sys
import time
import zlib
from pathlib import Path

import torch

# ---- 1. flags -------------------------------------------------------------------------------------------------------

LIMITS = {"low": ("at least", operator.ge), "high": ("at most", operator.le), "above": ("above", operator.gt),
          "choices": ("one of", lambda value, choices: value in choices)}
# What a resumed run may change without becoming another run.
MAY_DIFFER = {"max_steps", "stop_at", "save_steps", "eval_steps", "num_eval_problems", "num_eval_samples", "device",
              "prompt", "output_dir", "resume_from_checkpoint"}


def fail(message, code=2):
    """One line on stderr, then exit: 2 for bad input (nothing was touched), 1 for a run that had to stop."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def flag(default, help, group="algorithm", why="", **limits):
    """A field of a Config that is also a command-line flag. `limits` are those of LIMITS, `why` explains them."""
    return dataclasses.field(default=default, metadata=dict(help=help, group=group, why=why, limits=limits))


run_flag, sample_flag, step_flag, eval_flag, base_flag = (functools.partial(flag, group=group) for group in (
    "run", "sampling", "optimizer", "evaluation", "base policy (shared by the scripts, cached in runs/base)"))


@dataclasses.dataclass(frozen=True)
class Config:
    """The flags every script has; a script's own Config adds the symbols of its equations."""
    task: str = run_flag("arithmetic", "arithmetic, or NAME for tasks/NAME.py")
    operands: int = run_flag(5, "numbers in an arithmetic problem", low=2, high=9)
    max_steps: int = run_flag(60, "batches to train on at most; 0 makes and evaluates the base only", low=0)
    stop_at: float = run_flag(0.995, "stop when the last 5 batches are this accurate on average; 2: never", above=0)
    seed: int = run_flag(0, "of problems, sampling and shuffling", low=0)
    device: str = run_flag("auto", "auto is CUDA where there is one", choices=("auto", "cpu", "cuda", "mps"))
    num_threads: int = run_flag(0, "CPU threads; 0 is two, or one on a single core", low=0)
    output_dir: str = run_flag("", "run folder; default runs/ALGORITHM-TASK-sSEED, with -2, -3 ... when taken")
    save_steps: int = run_flag(10, "steps between checkpoints", low=1)
    resume_from_checkpoint: str = run_flag("", "run folder to go on with, its flags included")
    init_from: str = run_flag("", "run folder whose trained policy takes the place of the base")
    prompt: str = run_flag("", "with --resume_from_checkpoint: print what the policy answers to this, then exit")

    num_prompts: int = sample_flag(32, "prompts per step (P)", low=1)
    max_completion_length: int = sample_flag(40, "tokens per completion at most (L)", low=1)
    temperature: float = sample_flag(1.0, "of sampling and scoring alike", above=0, why="at 0 nothing is explored")

    learning_rate: float = step_flag(3e-4, "of AdamW", low=0)
    warmup_steps: int = step_flag(0, "steps of linear learning-rate warm-up, constant after it", low=0)
    weight_decay: float = step_flag(0.0, "of AdamW", low=0)
    max_grad_norm: float = step_flag(1.0, "longer gradients are scaled down to this norm", above=0)
    num_mini_batches: int = step_flag(1, "optimizer steps per pass over the batch", low=1)
    micro_batch_size: int = step_flag(64, "rows per backward pass: memory and speed, not the gradient", low=1)

    eval_steps: int = eval_flag(10, "steps between greedy evaluations", low=1)
    num_eval_problems: int = eval_flag(512, "held-out problems", low=1)
    num_eval_samples: int = eval_flag(8, "samples of each, before and after training (k of pass@k, maj@k)", low=1)

    hidden_size: int = base_flag(64, "width (D)", low=1)
    num_hidden_layers: int = base_flag(2, "decoder layers", low=1)
    num_attention_heads: int = base_flag(4, "query heads (H)", low=1)
    num_key_value_heads: int = base_flag(1, "key/value heads, each shared by several query heads", low=1)
    intermediate_size: int = base_flag(176, "width of the SwiGLU layer", low=1)
    base_seed: int = base_flag(0, "of its initial weights and its corpus", low=0)
    base_steps: int = base_flag(700, "warm-start batches", low=0)
    base_batch_size: int = base_flag(64, "demonstrations per warm-start batch", low=1)
    base_learning_rate: float = base_flag(4e-3, "warm-start peak, falling linearly to 0", low=0)

    @property
    def options(self):
        """What the task's functions take as keywords."""
        return {"operands": self.operands} if self.task == "arithmetic" else {}

    def check(self):
        """Exit with one line for a value, or a pair of values, that cannot work."""
        for f in dataclasses.fields(self):
            value, why = getattr(self, f.name), f" ({f.metadata['why']})" * bool(f.metadata["why"])
            if isinstance(value, float) and not math.isfinite(value):
                fail(f"--{f.name} {value}: must be a finite number")
            for kind, limit in f.metadata["limits"].items():
                words, fits = LIMITS[kind]
                if not fits(value, limit):
                    fail(f"--{f.name} {value}: must be {words} {', '.join(limit) if kind == 'choices' else limit}{why}")
        D, H, KV = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        for broken, message in (
                (D % (2 * H), f"--hidden_size {D}: must be a multiple of {2 * H}, twice --num_attention_heads"),
                (H % KV, f"--num_key_value_heads {KV}: must divide --num_attention_heads {H}"),
                (self.prompt and not self.resume_from_checkpoint,
                 f"--prompt {self.prompt}: add --resume_from_checkpoint RUN, the run whose policy is to answer"),
                (self.init_from and self.resume_from_checkpoint,
                 f"--init_from {self.init_from}: the resumed run has its weights already; leave one of the flags out"),
                (self.device == "cuda" and not torch.cuda.is_available(),
                 "--device cuda: torch sees no CUDA device here; use --device cpu"),
                (self.device == "mps" and not torch.backends.mps.is_available(),
                 "--device mps: torch sees no Apple GPU here; use --device cpu")):
            if broken:
                fail(message)
        load_task(self.task)

    @classmethod
    def parse(cls, argv=None):
        """The flags of `argv` over the defaults, or over those of the run it resumes. Exits with one line if bad."""
        parser = argparse.ArgumentParser(description=sys.modules[cls.__module__].__doc__, allow_abbrev=False,
                                         formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.error = lambda message: fail(f"{message} (--help lists the flags)")
        groups = {}
        for f in sorted(dataclasses.fields(cls), key=lambda f: f.metadata["group"] != "algorithm"):
            name, choices = f.metadata["group"], f.metadata["limits"].get("choices")
            group = groups[name] = groups.get(name) or parser.add_argument_group(name)
            kind = (dict(type=yes_or_no, nargs="?", const=True, metavar="yes|no") if f.type is bool else
                    dict(type=f.type, metavar="|".join(choices) if choices else f.type.__name__.upper()))
            default = ("no", "yes")[f.default] if f.type is bool else "none" if f.default == "" else f.default
            group.add_argument(f"--{f.name}", default=argparse.SUPPRESS, **kind,
                               help=f"{f.metadata['help']} (default {default})".replace("%", "%%"))
        given = vars(parser.parse_args([spell(word) for word in (sys.argv[1:] if argv is None else argv)]))
        cfg = cls(**(stored_flags(cls, given) | given))
        cfg.check()
        auto = {"auto": "cuda" if torch.cuda.is_available() else "cpu"}
        return dataclasses.replace(cfg, device=auto.get(cfg.device, cfg.device),
                                   num_threads=cfg.num_threads or min(2, os.cpu_count() or 1))


def yes_or_no(text):
    if text not in ("yes", "no"):
        raise argparse.ArgumentTypeError(f"{text}: say yes or no")
    return text == "yes"


def spell(word):
    """--max-steps=5 -> --max_steps=5: both spellings are one flag."""
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if word.startswith("--") else word


def script_of(cls):
    """The file in which a script's Config is defined, also when that script runs as __main__."""
    return Path(sys.modules[cls.__module__].__file__).resolve()


def stored_flags(cls, given):
    """The flags of the run that `given` resumes, which `given` may not contradict; none if it resumes no run."""
    folder = given.get("resume_from_checkpoint")
    if not folder:
        return {}
    try:
        saved = json.loads((Path(folder) / "config.json").read_text())
        script, stored = saved["script"], dict(saved["config"])
    except (OSError, ValueError, KeyError, TypeError):
        fail(f"--resume_from_checkpoint {folder}: has no readable config.json; name the folder of a run")
    if script != script_of(cls).stem or stored.keys() != {f.name for f in dataclasses.fields(cls)}:
        fail(f"--resume_from_checkpoint {folder}: made by {script}.py with other flags than {script_of(cls).name} has")
    for name in given.keys() - MAY_DIFFER:
        if given[name] != stored[name]:
            fail(f"--{name} {given[name]}: the run has {stored[name]}; leave the flag out, or start a new run with "
                 f"--init_from {folder}")
    return stored


# ---- 2. randomness and memory ---------------------------------------------------------------------------------------


def generator(*purpose):
    """A CPU generator that is a function of its arguments: generator(seed, "rollout", step)."""
    return torch.Generator().manual_seed(random.Random(repr(purpose)).getrandbits(63))


def keep_freed_memory():
    """Have glibc reuse big buffers instead of handing them back to the kernel: CPU steps are 1.2 to 1.6 times faster."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_threshold = -1, -3
        ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 30)
        ctypes.CDLL(None).mallopt(trim_threshold, (1 << 31) - 1)


# ---- 3. problems ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Problem:
    task: str
    prompt: str
    answer: str
    work: str = ""              # what a worked example writes between the think tags


class arithmetic:
    """The default task, in the shape of a file of tasks/ (its verifier stands in the scripts): nested expressions with
    every intermediate value in 0..20, e.g. ((((3+4)-5)*4)-2)= worked out as 3+4=7;7-5=2;2*4=8;8-2=6."""

    EXAMPLE = "((3+4)*2)="

    @staticmethod
    def width(operands=5):
        """Characters of the longest prompt."""
        return 4 * operands - 2

    @staticmethod
    def sample(rng, operands=5):
        value = rng.randint(1, 9)
        expression, work = str(value), []
        for _ in range(operands - 1):
            operation, operand, result = rng.choice(MOVES[value])
            expression = f"({expression}{operation}{operand})"
            work.append(f"{value}{operation}{operand}={result}")
            value = result
        return Problem("arithmetic", expression + "=", str(value), ";".join(work))

    @staticmethod
    def corpus(rng, phase, operands=5):
        """A problem and how somebody answered it: the textbook works nine of ten answers out; in the forum four people
        of five blurt. Every fifth problem is a shorter one, so that padding on the left is an ordinary sight."""
        problem = arithmetic.sample(rng, rng.randint(2, operands) if rng.random() < 0.2 else operands)
        thinks = rng.random() < {"textbook": 0.9, "forum": 0.2}[phase]
        return problem, f"<think>{problem.work}</think>" * thinks + f"<answer>{problem.answer}</answer>"


OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MOVES = [[(sign, operand, apply(value, operand)) for sign, apply in OPERATIONS.items() for operand in range(1, 10)
          if 0 <= apply(value, operand) <= 20] for value in range(21)]     # those that stay in 0..20, for each value


@functools.lru_cache(maxsize=None)
def load_task(name):
    """`arithmetic`, or the module tasks/NAME.py with the same functions and verify(problem, text)."""
    if name == "arithmetic":
        return arithmetic
    path = Path(__file__).resolve().parent / "tasks" / f"{name}.py"
    if not name.isidentifier() or not path.is_file():
        known = ", ".join(["arithmetic", *sorted(file.stem for file in path.parent.glob("*.py"))])
        fail(f"--task {name}: there is no tasks/{name}.py beside common.py; the tasks here are {known}")
    spec = importlib.util.spec_from_file_location(f"tasks.{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def held_out(problem):
    """Every tenth problem, by its prompt; it occurs in no warm start and in no training batch."""
    return zlib.crc32(problem.prompt.encode()) % 10 == 0


def draw(task, n, split, make):
    """The first n of make(), make() ... whose problem (the first item) is in the split."""
    examples = (make() for _ in range(10_000 + 1_000 * n))
    found = list(itertools.islice((e for e in examples if held_out(e[0]) == (split == "test")), n))
    return found if len(found) == n else fail(f"--task {task}: has hardly any {split} problems; it needs more variety")


def sample_problems(task, n, seed, split="train", **options):
    """n problems, a function of the arguments; "test" problems never occur in training. ValueError: no such split."""
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r}: must be 'train' or 'test'")
    rng = random.Random(repr((task, seed, split)))
    return [problem for problem, in draw(task, n, split, lambda: (load_task(task).sample(rng, **options),))]


def sample_corpus(task, n, seed, phase, **options):
    """n pairs (problem, completion text) for the warm start, none of them held out."""
    rng = random.Random(repr((task, seed, phase)))
    return draw(task, n, "train", lambda: load_task(task).corpus(rng, phase, **options))


# ---- 4. the run -----------------------------------------------------------------------------------------------------

# (what a step's metrics look like when learning cannot work, what to say about it once)
WARNINGS = (
    (lambda m: m["frac_reward_zero_std"] == 1 and m["accuracy"] < 0.5, "no group has signal: the completions of a prompt "
     "all earn the same. Raise --num_generations or --temperature, or begin from a better base."),
    (lambda m: m["completions/clipped_ratio"] > 0.5, "most completions are cut off. Raise --max_completion_length."),
    (lambda m: m["entropy"] < 0.005 and m["accuracy"] < 0.9, "entropy has collapsed, nothing new is tried. Lower "
     "--learning_rate, or raise --epsilon_high or --entropy_coef."),
    (lambda m: m["sampling/sampling_logp_difference/max"] > 1e-3, "the first ratio is not 1: sampling and scoring "
     "disagree. Do they use the same weights, temperature and mask?"),
)
LOGS = ("metrics.jsonl", "samples.jsonl")


def say(text):
    print(text, flush=True)


def write_atomic(path, write):
    """write(temporary path), then rename: a reader, or a kill at any moment, meets the old file or the new one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    write(part)
    os.replace(part, path)


def write_json(path, value):
    write_atomic(path, lambda part: part.write_text(json.dumps(value, indent=2) + "\n"))


def read_saved(folder, name, device, blame):
    """What torch.save wrote (tensors and plain values only), or one line that names the flag to blame."""
    try:
        return torch.load(Path(folder) / name, map_location=device, weights_only=True)
    except FileNotFoundError:
        fail(f"{blame} {folder}: has no {name}; name the folder of a run")
    except Exception as error:                      # a damaged file makes torch.load raise nearly anything
        fail(f"{blame} {folder}: {name} is damaged ({type(error).__name__}); start a new run")


def new_folder(cfg, algorithm):
    """--output_dir, which must be new or empty, or else the first free runs/ALGORITHM-TASK-sSEED[-n]."""
    try:
        if cfg.output_dir:
            Path(cfg.output_dir).mkdir(parents=True, exist_ok=True)
            if any(not file.name.endswith(".tmp") for file in Path(cfg.output_dir).iterdir()):
                fail(f"--output_dir {cfg.output_dir}: is not empty; name a new folder, or go on with that run by "
                     f"--resume_from_checkpoint {cfg.output_dir}")
            return Path(cfg.output_dir)
        for n in itertools.count(1):
            folder = Path("runs") / (f"{algorithm}-{cfg.task}-s{cfg.seed}" + f"-{n}" * (n > 1))
            if not folder.exists():
                folder.mkdir(parents=True)
                return folder
    except OSError as error:
        fail(f"--output_dir {cfg.output_dir or 'runs'}: cannot be made ({error.strerror})")


class Run:
    """One run: its folder, what it logs and prints, when it saves, evaluates and stops. Nothing is written before `base`.

    `columns` are the console's: heading -> key in the metrics of a step.
    """

    def __init__(self, cfg, columns, argv=None):
        keep_freed_memory()
        torch.set_num_threads(cfg.num_threads)
        self.cfg, self.columns, self.script = cfg, columns, script_of(type(cfg))
        self.argv = sys.argv[1:] if argv is None else list(argv)
        self.state = {"step": 0, "recent": [], "base": None, "seconds_warm_start": 0.0, "seconds_total": 0.0}
        self.clock, self.warned, self.training, self.interrupted = time.perf_counter(), set(), False, False
        self.folder, self.saved = Path(cfg.resume_from_checkpoint), None
        if cfg.init_from:
            self.saved = read_saved(cfg.init_from, "checkpoint.pt", cfg.device, "--init_from")
        elif cfg.resume_from_checkpoint and (cfg.prompt or (self.folder / "checkpoint.pt").exists()):
            self.saved = read_saved(self.folder, "checkpoint.pt", cfg.device, "--resume_from_checkpoint")

    def open(self):
        """Make the folder: config.json first, then a copy of the script."""
        cfg = self.cfg
        if not cfg.resume_from_checkpoint:
            self.folder = new_folder(cfg, self.script.stem)
        write_json(self.folder / "config.json", {
            "script": self.script.stem, "argv": self.argv, "config": dataclasses.asdict(cfg) | {"resume_from_checkpoint": ""},
            "versions": {"python": platform.python_version(), "torch": torch.__version__}})
        write_atomic(self.folder / self.script.name, lambda part: shutil.copyfile(self.script, part))
        signal.signal(signal.SIGINT, self.on_ctrl_c)
        say(f"{self.script.stem} on {cfg.task}: {cfg.device}, {cfg.num_threads} threads, torch {torch.__version__}\n"
            f"run folder {self.folder}")

    def on_ctrl_c(self, *_):
        """In training the step is finished and saved first. os.write, because print may be under way."""
        if self.training and not self.interrupted:
            self.interrupted = True
            os.write(2, b"\nfinishing this step; Ctrl-C again leaves at once\n")
        else:
            self.leave()

    def leave(self):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(2, f"\ninterrupted; go on with\n  python {self.script.name} --resume_from_checkpoint "
                    f"{shlex.quote(str(self.folder))}\n".encode())
        raise SystemExit(130)

    def base(self, model, train, code):
        """Open the run and fill `model` with the policy it starts from, also written to base.pt: that of --init_from, or
        the one shared in runs/base/, which train(model, progress) makes if need be. `code`: the sources that shape it."""
        cfg = self.cfg
        try:
            if cfg.init_from:
                model.load_state_dict(self.saved["policy"])
            elif cfg.resume_from_checkpoint and (self.folder / "base.pt").exists():
                model.load_state_dict(read_saved(self.folder, "base.pt", cfg.device, "--resume_from_checkpoint"))
        except RuntimeError:
            fail(f"--init_from {cfg.init_from}: its model has another shape; give the same model flags here")
        self.open()
        if not (cfg.init_from or (self.folder / "base.pt").exists()):
            self.shared_base(model, train, code)
        write_atomic(self.folder / "base.pt", lambda part: torch.save(model.state_dict(), part))
        self.state["seconds_warm_start"] = time.perf_counter() - self.clock

    def shared_base(self, model, train, code):
        """Read or make the file of runs/base/ whose name has the hash of everything that shapes the base."""
        cfg = self.cfg
        flags = [(f.name, getattr(cfg, f.name)) for f in dataclasses.fields(cfg) if f.metadata["group"].startswith("base")]
        source = [inspect.getsource(part) for part in (*code, load_task(cfg.task), draw, sample_corpus, held_out)]
        key = repr((cfg.task, cfg.options, flags, cfg.device, cfg.num_threads, torch.__version__, MOVES, source))
        path = Path("runs", "base", f"{cfg.task}-s{cfg.base_seed}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.pt")
        try:
            model.load_state_dict(torch.load(path, map_location=cfg.device, weights_only=True))
            return say(f"base read from {path}")
        except FileNotFoundError:
            pass
        except Exception as error:                  # see read_saved
            say(f"{path} is damaged ({type(error).__name__}): making it again")
        train(model, self.progress)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, lambda part: torch.save(model.state_dict(), part))

    def progress(self, label, steps):
        """range(steps), saying how far it is: a line rewritten in place on a terminal, five lines in a pipe."""
        start, live = time.perf_counter(), sys.stdout.isatty()
        for done in range(1, steps + 1):
            yield done - 1
            if done % (10 if live else max(1, steps // 5)) == 0 or done == steps:
                spent = time.perf_counter() - start
                print(f"{label} {100 * done // steps:4d}%  {spent:4.0f} s, {spent / done * (steps - done):3.0f} s left",
                      end="\r" if live and done < steps else "\n", flush=True)

    def steps(self, evaluate, **parts):
        """Yield the steps still to do. `parts` (policy=..., optimizer=...: anything with a state_dict) make a checkpoint;
        evaluate(samples) measures the policy: in full before and after training, greedily every eval_steps."""
        cfg, state, self.parts, self.evaluate = self.cfg, self.state, parts, evaluate
        resumed = self.saved if cfg.resume_from_checkpoint else None
        for name in LOGS:
            with open(self.folder / name, "ab") as log:
                log.truncate(resumed["logs"][name] if resumed else 0)
        if resumed:
            state.update(resumed["state"])
            for name, part in parts.items():
                part.load_state_dict(resumed[name])
        else:
            state["base"] = evaluate(cfg.num_eval_samples)
            self.save()
        say("base    " + "  ".join(f"{name} {state['base'][name]:.3f}" for name in list(state["base"])[:4]))
        say(" step" + "".join(f"{heading:>8}" for heading in self.columns) + "  secs  left")
        self.training = True
        while state["step"] < cfg.max_steps and not (len(state["recent"]) == 5 and sum(state["recent"]) / 5 >= cfg.stop_at):
            self.step_clock = time.perf_counter()
            yield state["step"]
            state["step"] += 1
            if state["step"] % cfg.eval_steps == 0:
                scores = evaluate(0)
                self.append("metrics.jsonl", {"step": state["step"], **{f"eval/{name}": scores[name] for name in scores}})
                say("      held-out " + "  ".join(f"{name} {scores[name]:.3f}" for name in scores))
            if self.interrupted or state["step"] % cfg.save_steps == 0:
                self.save()
            if self.interrupted:
                self.leave()
        self.training = False

    def log(self, metrics, batch, advantages):
        """One more step: its line in metrics.jsonl and on the console, and now and then what its completions say."""
        step, took, left = self.state["step"] + 1, time.perf_counter() - self.step_clock, self.cfg.max_steps - self.state["step"] - 1
        self.append("metrics.jsonl", {"step": step, **metrics, "step_time": took})
        self.state["recent"] = (self.state["recent"] + [metrics["accuracy"]])[-5:]
        say(f"{step:5d}" + "".join(f"{metrics[key]:8.3f}" for key in self.columns.values()) + f"{took:6.2f}{left * took:5.0f}s")
        seen = collections.defaultdict(lambda: math.nan, metrics)
        for broken, message in WARNINGS:
            if broken(seen) and message not in self.warned:
                self.warned.add(message)
                say(f"warning: {message}")
        if step == 1 or step % self.cfg.eval_steps == 0:
            self.log_samples(step, batch, advantages)

    def log_samples(self, step, batch, advantages):
        """Four groups whole in samples.jsonl; on the console the best and the worst completion of one with signal."""
        P, G = batch.rewards.shape
        rewards, advantages = batch.rewards.tolist(), advantages.view(P, G, -1).mean(2).tolist()
        groups = [{"step": step, "prompt": batch.problems[p].prompt, "answer": batch.problems[p].answer, "completions": [
            {"text": batch.texts[p * G + g], "reward": rewards[p][g], "advantage": advantages[p][g],
             "length": int(batch.out.mask[p * G + g].sum())} for g in range(G)]} for p in range(P)]
        for group in groups[:4]:
            self.append("samples.jsonl", group)
        lively = max(groups, key=lambda group: len({c["reward"] for c in group["completions"]}) > 1)
        ranked = sorted(lively["completions"], key=lambda c: c["reward"])
        say(f"      {lively['prompt']}  reward, advantage, completion")
        for c in (ranked[-1], ranked[0]):
            text = c["text"].encode("unicode_escape").decode()           # no control character reaches the terminal
            say(f"      {c['reward']:5.2f} {c['advantage']:+6.2f}  {text}"[:79])

    def append(self, name, record):
        with open(self.folder / name, "a") as log:
            log.write(json.dumps(record) + "\n")

    def save(self):
        """A checkpoint with the byte sizes of the logs: whatever a killed run wrote after it is cut off on resume."""
        now = time.perf_counter()
        self.state["seconds_total"], self.clock = self.state["seconds_total"] + now - self.clock, now
        content = {"state": self.state, "logs": {name: (self.folder / name).stat().st_size for name in LOGS},
                   **{name: part.state_dict() for name, part in self.parts.items()}}
        write_atomic(self.folder / "checkpoint.pt", lambda part: torch.save(content, part))

    def finish(self):
        """Evaluate what was trained, write checkpoint, summary and picture, say what changed. Returns the summary."""
        state = self.state
        trained = self.evaluate(self.cfg.num_eval_samples) if state["step"] else state["base"]
        self.save()
        summary = {"base": state["base"], "trained": trained, "steps": state["step"],
                   "seconds_warm_start": state["seconds_warm_start"], "seconds_total": state["seconds_total"]}
        write_json(self.folder / "summary.json", summary)
        for name, before in state["base"].items():
            say(f"{name:>24}" + "".join("       -" if x is None else f"{x:8.3f}" for x in (before, trained[name])))
        try:
            from tools.report import draw_curve
            draw_curve(self.folder)
        except ImportError as error:
            say(f"no picture drawn: {error}")
        say(f"{state['step']} steps, {state['seconds_total']:.0f} s; {self.folder} has the logs and the policy. Ask it:\n"
            f"  python {self.script.name} --resume_from_checkpoint {shlex.quote(str(self.folder))} --prompt "
            f"\"{load_task(self.cfg.task).EXAMPLE}\"")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return summary
