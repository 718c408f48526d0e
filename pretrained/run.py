"""What a job of several processes needs, as torchrun starts them: which process does which rows,
FSDP, and a run whose checkpoints are Hugging Face folders. One process alone is a job, too."""
import contextlib
import dataclasses
import datetime
import io
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import common
import report
from pretrained.models import ADAPTER, BASE, adapter_weights, fingerprint, load_model, whole
from report.observers import Samples

RANK = int(os.environ.get("RANK", 0))               # the number of this process
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))   # how many there are


def start(main):
    """report.start in the first process. The others say nothing, unless they alone fail: where all
    do, torchrun ends these before they have spoken."""
    if RANK == 0:
        try:
            report.start(main)
        except RuntimeError as error:
            if WORLD_SIZE == 1 or "closed by peer" not in str(error):
                raise
            raise SystemExit(1) from None       # the process that failed has printed why
    else:
        said = io.StringIO()
        try:
            with (open(os.devnull, "w") as nowhere,
                  contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(said)):
                main()
        except SystemExit:
            if said.getvalue():
                time.sleep(2)
                print(f"process {RANK}: {said.getvalue()}", end="", file=sys.stderr)
            raise
    if dist.is_initialized() and "vllm" not in sys.modules:     # which does it itself, at exit
        dist.destroy_process_group()


# ---- 1. shares -------------------------------------------------------------------------------

def join(cfg):
    """Let the processes of torchrun find each other. Of several GPUs each takes its own. Exits with
    one line if a flag does not fit their number."""
    if cfg.num_prompts % WORLD_SIZE != 0:
        common.fail(f"--num_prompts {cfg.num_prompts}: must be a multiple of the number of "
                    f"processes, {WORLD_SIZE}")
    if cfg.parallel == "fsdp" and not dist.is_torchelastic_launched():
        common.fail("--parallel fsdp: needs torchrun, for one process with --nproc_per_node 1")
    if dist.is_torchelastic_launched():
        if cfg.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # the others wait while the first one writes a checkpoint
        dist.init_process_group("nccl" if cfg.device == "cuda" else "gloo",
                                timeout=datetime.timedelta(hours=2))


def gathered(x):
    """What x is in each process. -> list"""
    found = [x] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(found, x)
    return found


def share(n):
    """Which of n rows this process does. All do equally many: some rows may be done twice."""
    return torch.arange(RANK, n + -n % WORLD_SIZE, WORLD_SIZE) % n


def merged(x, n):
    """All n rows in their order, from each process's share. (b, ...) -> (n, ...)"""
    return torch.stack(gathered(x.cpu()), dim=1).flatten(0, 1)[:n].to(x.device)


def rounds(parts):
    """The micro-batches of this process, each with 1.0. With FSDP nobody may go ahead, so that all
    do equally many: some end with one that another does, too, and with 0.0. -> list of pairs"""
    number_in_all = len(parts) + -len(parts) % WORLD_SIZE
    return [(parts[i % len(parts)], float(i < len(parts)))
            for i in range(RANK, number_in_all, WORLD_SIZE)]


# ---- 2. FSDP ---------------------------------------------------------------------------------

def shard(model, dtype):
    """FSDP2: each process keeps a part of every weight, and borrows a layer when its turn comes."""
    precision = MixedPrecisionPolicy()
    if dtype == "bfloat16":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in reversed(list(model.modules())):      # the model itself is the last
        if type(module).__name__ in model._no_split_modules or module is model:
            fully_shard(module, mp_policy=precision)


@contextlib.contextmanager
def unsharded(model):
    """With FSDP: all weights in each process, so that none waits for others while it samples. Then
    each has its part again, which alone the optimizer knows."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(module is not model, recurse=False)
            module.reshard()


def backward(loss, parallel):
    """Add the gradient of a loss to those of the weights. FSDP also adds those of other processes,
    and divides by their number, where the sum is wanted."""
    (loss * WORLD_SIZE if parallel == "fsdp" else loss).backward()


def add_gradients(parameters, parallel):
    """Replace each gradient by its sum over the processes, which FSDP has done already."""
    if parallel == "replicate" and WORLD_SIZE > 1:
        for parameter in parameters:
            dist.all_reduce(parameter.grad)


def clip_gradients(parameters, max_norm):
    """Scale the gradients down to a norm, if it is longer. -> the norm before, a float"""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return whole(norm).item()


# ---- 3. the run ------------------------------------------------------------------------------

# what checkpoints hold: with an adapter, that alone
TRAINED = states.StateDictOptions(
    full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False)


class Weights:
    """Model and optimizer of a run, a part of its checkpoints. Those of the model are in a folder,
    which `load_state_dict` reads."""

    def __init__(self, model, optimizer, folder):
        self.model = model
        self.optimizer = optimizer
        self.folder = folder

    def state_dict(self):
        return states.get_optimizer_state_dict(self.model, self.optimizer, options=TRAINED)

    def load_state_dict(self, saved):
        try:
            if Path(self.folder, ADAPTER).exists():
                weights = adapter_weights(self.folder)
            else:
                weights = load_model(self.folder)[0].state_dict()
            for name, weight in self.model.named_parameters():
                assert name in weights or not weight.requires_grad, name
            states.set_model_state_dict(self.model, weights, options=TRAINED)
            states.set_optimizer_state_dict(self.model, self.optimizer, saved, options=TRAINED)
        except Exception as error:              # a damaged file raises nearly anything
            common.fail(f"{self.folder}: is damaged ({' '.join(str(error).split())})")
        saved.clear()                           # which is large


class Known:
    """Leaves out what is not known: the entropy, if vLLM sampled and nothing was computed anew."""

    def step(self, run, batch, advantages, metrics):
        if math.isnan(metrics["entropy"]):
            del metrics["entropy"]


def link(source, target):
    """Make a hard link, which needs no space, or a copy where links are impossible."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


class Run(common.Run):
    """A run whose weights are Hugging Face folders, RUN/checkpoint-STEP; the last stays, and beside
    it checkpoint.pt, with what is not the model's. All processes go through the same steps, and one
    writes."""

    def __init__(self, cfg, task, policy, columns):
        super().__init__(dataclasses.replace(cfg, resume_from_checkpoint=""), task, policy, columns)
        self.cfg = cfg
        self.is_interrupted = False
        self.observers.insert(0, Known())
        if cfg.resume_from_checkpoint:
            self.folder = Path(cfg.resume_from_checkpoint)
            self.resume()
        self.written = self.step                                # the step of the last checkpoint
        self.last = self.folder / f"checkpoint-{self.written}"
        if RANK > 0:
            self.scratch = tempfile.TemporaryDirectory()
            self.folder = Path(self.scratch.name)               # which nobody reads
            # these compute log-probabilities, in which all have to take part
            self.observers = [one for one in self.observers if isinstance(one, Samples)]

    def resume(self):
        """Restore the state of a run, if it has a checkpoint. The model is loaded by `start`."""
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            self.state |= saved["state"]
            self.task.state.update(saved["task"])
            self.began -= self.state["seconds_total"]
        except Exception as error:              # a damaged file raises nearly anything
            common.fail(f"{path}: is damaged ({type(error).__name__})")
        self.step = self.state["steps"]
        if self.step > 0:                       # else it begins with --model again
            self.resumed = saved

    def begin(self):
        """Make the run folder. If the run begins with a checkpoint of another one, which that one
        may remove, it keeps links to the files of this checkpoint in RUN/base."""
        self.make_folder()
        base = self.folder / "base"
        model = Path(self.cfg.model)
        is_of_run = Path(model.parent, "checkpoint.pt").is_file() and model != base.resolve()
        if is_of_run and RANK == 0:
            shutil.copytree(model, base, copy_function=link)
        if self.cfg.lora_rank > 0 and model.is_dir():
            self.policy.model.peft_config["default"].base_model_name_or_path = str(
                base.resolve() if is_of_run else model)
        self.base_hash = fingerprint(base if is_of_run else model)      # of what was loaded
        self.state.setdefault("seconds_warm_start", 0.0)
        self.tell("start")

    def start(self, evaluate, optimizer):
        """Evaluate the base, or load what is resumed. From now on, Ctrl-C finishes and saves the
        step, because a step may take minutes; a second Ctrl-C ends the run at once."""
        super().start(evaluate, weights=Weights(self.policy.model, optimizer, self.last))
        signal.signal(signal.SIGINT, self.interrupt)

    def finish(self):
        signal.signal(signal.SIGINT, self.leave)
        self.is_interrupted = False                     # all steps are saved
        return super().finish()

    def interrupt(self, *_):
        self.is_interrupted = True
        signal.signal(signal.SIGINT, self.leave)

    def save(self, every=1):
        """Write a checkpoint, if `every` divides the step or after Ctrl-C, which then ends the run.
        Older folders are removed once checkpoint.pt is replaced, so a run that is killed before
        resumes from the older folder."""
        is_interrupted = any(gathered(self.is_interrupted))
        if self.step % every == 0 or is_interrupted:
            self.write_checkpoint()
        if is_interrupted:
            self.leave()
        self.step_clock = time.perf_counter()

    def write_checkpoint(self):
        folder = self.folder / f"checkpoint-{self.step}"
        if self.step != self.written:
            weights = states.get_model_state_dict(self.policy.model, options=TRAINED)
            if RANK == 0:
                self.write_folder(folder, weights)
            self.written = self.step
        super().save()
        for other in self.folder.glob("checkpoint-*"):
            if other != folder:
                shutil.rmtree(other)

    def write_folder(self, folder, weights):
        """Write model and tokenizer as transformers does."""
        for name in self.policy.model.all_tied_weights_keys:        # which are another weight
            weights.pop(name, None)
        part = folder.with_suffix(".tmp")
        self.policy.model.save_pretrained(part, state_dict=weights)
        if self.cfg.lora_rank > 0:
            (part / BASE).write_text(json.dumps(self.base_hash))
        self.policy.generation_config.save_pretrained(part)
        self.policy.tokenizer.save_pretrained(part)
        shutil.rmtree(folder, ignore_errors=True)       # of a run that was killed, and did it again
        os.replace(part, folder)

    def leave(self, *_):
        if RANK == 0:
            launcher = "python"
            if dist.is_torchelastic_launched():
                launcher = f"torchrun --nproc_per_node {WORLD_SIZE}"
            command = f"{os.path.relpath(self.script)} --resume_from_checkpoint {self.folder}"
            os.write(2, f"\ninterrupted; resume with:\n  {launcher} {command}\n".encode())
        raise SystemExit(130)
