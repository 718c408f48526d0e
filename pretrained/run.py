"""Run pretrained/train.py in one process, or in several processes that torchrun starts: share out
the rows, and write checkpoints as Hugging Face folders."""
import contextlib
import dataclasses
import datetime
import hashlib
import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import common
import plumbing
import report
from pretrained.models import ADAPTER, adapter_weights, load_model, one_line
from report.observers import Samples

# Only torchrun starts several processes. Without it, these variables are left from something else.
IS_SHARED = dist.is_available() and dist.is_torchelastic_launched()
RANK = int(os.environ["RANK"]) if IS_SHARED else 0                  # the number of this process
WORLD_SIZE = int(os.environ["WORLD_SIZE"]) if IS_SHARED else 1      # number of processes


def start(main):
    """Run main. Only process 0 prints, except for errors."""
    with contextlib.ExitStack() as stack:
        if RANK > 0:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        try:
            report.start(main)
        except RuntimeError as error:
            if WORLD_SIZE == 1 or "closed by peer" not in str(error):
                raise
            raise SystemExit(1) from None       # the process that failed has printed why
    if dist.is_initialized() and "vllm" not in sys.modules:     # vLLM does it itself, at exit
        dist.destroy_process_group()


# ---- 1. shares -------------------------------------------------------------------------------

def join(cfg):
    """Let the processes of torchrun find each other, and give each its own GPU. Exits with one line
    if a flag does not fit the number of processes."""
    if cfg.num_prompts % WORLD_SIZE != 0:
        common.fail(f"--num_prompts {cfg.num_prompts}: must be a multiple of the number of "
                    f"processes, {WORLD_SIZE}")
    if IS_SHARED:
        if cfg.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # a long time limit: all processes wait while process 0 writes a checkpoint
        dist.init_process_group("nccl" if cfg.device == "cuda" else "gloo",
                                timeout=datetime.timedelta(hours=2))


def gathered(x):
    """Collect the value that x has in each process. -> list"""
    values = [x] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(values, x)
    return values


def share(n):
    """Choose the rows of this process, of n. All processes get the same number, so some rows may be
    done twice. -> indices (b,)"""
    return torch.arange(RANK, n + -n % WORLD_SIZE, WORLD_SIZE) % n


def merged(x, n):
    """Put the shares of all processes back in order. (b, ...) -> (n, ...)"""
    return torch.stack(gathered(x.cpu()), dim=1).flatten(0, 1)[:n].to(x.device)


# ---- 2. the run ------------------------------------------------------------------------------

class Weights:
    """Model and optimizer of a run, as a part of checkpoint.pt. That file has only the optimizer's
    state; `load_state_dict` reads the model's weights from a folder."""

    def __init__(self, model, optimizer, folder):
        self.model = model
        self.optimizer = optimizer
        self.folder = folder

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, saved):
        try:
            if Path(self.folder, ADAPTER).exists():
                weights = adapter_weights(self.folder)
            else:
                weights = load_model(self.folder).state_dict()
            for name, weight in self.model.named_parameters():
                assert name in weights or not weight.requires_grad, name
            self.model.load_state_dict(weights, strict=False)   # without those that are frozen
            self.optimizer.load_state_dict(saved)
        except Exception as error:              # a damaged file raises nearly anything
            common.fail(f"{self.folder}: is damaged ({' '.join(str(error).split())})")
        saved.clear()                           # frees memory: it is large


def hashes(cfg):
    """Hash the files of the flags, which a resumed run has to have unchanged. -> dict"""
    return {flag: hashlib.sha256(Path(getattr(cfg, flag)).read_bytes()).hexdigest()
            for flag in ("data", "eval_data", "reward_file") if getattr(cfg, flag)}


class Run(plumbing.Run):
    """A run that saves the model as a Hugging Face folder, RUN/checkpoint-STEP, of which only the
    last is kept. checkpoint.pt has everything else. All processes do the same steps, and process 0
    writes."""

    def __init__(self, cfg, task, policy, columns):
        super().__init__(dataclasses.replace(cfg, resume_from_checkpoint=""), task, policy, columns)
        self.cfg = cfg
        self.signal = 0                         # the number of the signal that interrupted the run
        self.state |= {"files": hashes(cfg), "task": task.name}
        if cfg.resume_from_checkpoint:
            self.folder = Path(cfg.resume_from_checkpoint)
            self.resume()
        self.written = self.step                                # the step of the last checkpoint
        self.last = self.folder / f"checkpoint-{self.written}"
        if RANK > 0:
            self.scratch = tempfile.TemporaryDirectory()
            self.folder = Path(self.scratch.name, "run")        # a folder that is not read
            # Samples computes log-probabilities, which needs all processes
            self.observers = [one for one in self.observers if isinstance(one, Samples)]

    def resume(self):
        """Restore the state of a run, if it has a checkpoint. `start` loads the model."""
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            files = self.state["files"]
            self.state |= saved["state"]
            self.task.state.update(saved["task"])
            self.began -= self.state["seconds_total"]
        except Exception as error:              # a damaged file raises nearly anything
            common.fail(f"{path}: is damaged ({type(error).__name__})")
        for flag, number in self.state["files"].items():
            if files[flag] != number:
                common.fail(f"--{flag} {getattr(self.cfg, flag)}: differs from the file that this "
                            "run began with; put that back, or begin a new run from this one's "
                            f"model: --model {self.folder}")
        self.task.name = self.state["task"]     # whatever the file is called now: it seeds problems
        self.step = self.state["steps"]
        if self.step > 0:                       # a run without a step starts from --model again
            self.resumed = saved

    def begin(self):
        """Make the run folder, and write a checkpoint on trial."""
        self.make_folder()
        if self.cfg.lora_rank > 0:
            self.policy.model.peft_config["default"].base_model_name_or_path = self.cfg.model
        trial = self.folder / "checkpoint-trial"        # finds what cannot be saved before step 1
        self.write_model(trial)
        shutil.rmtree(trial, ignore_errors=True)
        self.state.setdefault("seconds_warm_start", 0.0)
        self.tell("start")

    def start(self, evaluate, optimizer):
        """Evaluate the base, or load the checkpoint of a resumed run. From now on, Ctrl-C and
        SIGTERM finish and save the step, because steps may take minutes. A second signal ends the
        run at once."""
        super().start(evaluate, weights=Weights(self.policy.model, optimizer, self.last))
        plumbing.handle(self.interrupt, signal.SIGINT, signal.SIGTERM)

    def evaluated(self, samples=True):
        """Also print by how much the scores of other problems would differ, as standard errors."""
        scores = super().evaluated(samples)
        errors = scores["greedy_errors"] | scores.get("errors", {})
        shown = [f"{name} {x:.3f}" for name, x in errors.items()]
        print("  standard errors:", ", ".join(shown), flush=True)
        return scores

    def finish(self):
        plumbing.handle(self.leave, signal.SIGINT, signal.SIGTERM)
        self.signal = 0                                 # all steps are made
        return super().finish()

    def interrupt(self, number, _):
        self.signal = number
        plumbing.handle(self.leave, signal.SIGINT, signal.SIGTERM)

    def save(self, every=1):
        """Write a checkpoint if `every` divides the step. After a signal, write one and end the
        run. Older folders are removed only once checkpoint.pt is replaced, so a run that is killed
        before that resumes from the older folder. Nothing else in the folder is touched."""
        number = max(gathered(self.signal))
        if self.step % every == 0 or number > 0:
            folder = self.folder / f"checkpoint-{self.step}"
            if self.step != self.written:
                self.write_model(folder)
                self.written = self.step
            super().save()
            for other in self.folder.glob("checkpoint-*"):
                is_mine = re.fullmatch(r"checkpoint-[0-9]+(\.tmp)?", other.name)
                if is_mine and other != folder and other.is_dir() and not other.is_symlink():
                    shutil.rmtree(other)
        if number > 0:
            self.leave(number)

    def write_model(self, folder):
        """Write model and tokenizer in the format of transformers. With an adapter, only that."""
        if RANK > 0:
            return
        part = folder.with_suffix(".tmp")
        try:
            self.write_folder(part)
        except Exception as error:              # transformers raises nearly anything
            shutil.rmtree(part, ignore_errors=True)
            common.fail(f"{part}: cannot be written: {one_line(error)}")
        shutil.rmtree(folder, ignore_errors=True)               # left by a run that was killed here
        os.replace(part, folder)

    def write_folder(self, folder):
        policy = self.policy
        weights = {name: weight.cpu() for name, weight in policy.model.state_dict().items()
                   if self.cfg.lora_rank == 0 or "lora_" in name}
        policy.model.save_pretrained(folder, state_dict=weights)
        policy.tokenizer.save_pretrained(folder)
        if self.cfg.lora_rank == 0:
            policy.config.save_pretrained(folder)               # with its dropout
        (folder / "generation_config.json").unlink(missing_ok=True)
        if policy.generation_config is not None:
            (folder / "generation_config.json").write_bytes(policy.generation_config)

    def leave(self, number=signal.SIGINT, _=None):
        if RANK == 0:
            launcher = []
            if IS_SHARED:
                launcher = ["-m", "torch.distributed.run", "--nproc_per_node", WORLD_SIZE]
            command = plumbing.command(
                *launcher, self.script, "--resume_from_checkpoint", self.folder)
            os.write(2, os.fsencode(f"\ninterrupted; resume with:\n  {command}\n"))
        raise SystemExit(128 + number)
