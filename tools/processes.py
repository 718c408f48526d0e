"""What a job of several processes needs, as torchrun starts them: who does which rows, FSDP, and a
run whose checkpoints are Hugging Face folders. For examples/pretrained.py; one process alone is a
job, too."""
import contextlib
import datetime
import io
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import common

RANK = int(os.environ.get("RANK", 0))               # the number of this process
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))   # how many there are


def start(main):
    """common.start in the first process. The others say nothing, unless they alone fail: where all
    do, torchrun ends these before they have spoken."""
    if RANK == 0:
        common.start(main)
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
    if dist.is_initialized():
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
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


# ---- 3. the run ------------------------------------------------------------------------------

class Run(common.Run):
    """A run whose checkpoints are Hugging Face folders, RUN/checkpoint-STEP, with run.pt beside the
    weights: what is not the model's. All processes go through the same steps, and one writes."""

    def __init__(self, cfg, task, policy, columns, argv=None):
        super().__init__(cfg, task, policy, columns, argv)
        if RANK > 0:
            self.console = common.Console()
            self.scratch = tempfile.TemporaryDirectory()
            self.folder = Path(self.scratch.name)           # which nobody reads

    def resume(self):
        """Take up the state of the run; the policy stays the base until `steps` loads the parts."""
        self.last = last_checkpoint(self.folder)
        if self.last is None:
            return
        try:
            self.resumed = common.load(self.last / "run.pt", "cpu")
            self.state |= self.resumed["state"]
            self.task.state = self.resumed["task"]
        except Exception as error:              # a damaged file raises nearly anything
            self.refuse(error)

    def refuse(self, error):
        common.fail(f"--resume_from_checkpoint {self.cfg.resume_from_checkpoint}: {self.last} is "
                    f"damaged, or not of this kind ({' '.join(str(error).split())})")

    def load_parts(self):
        model, optimizer = self.policy.model, self.parts["optimizer"]
        options = states.StateDictOptions(full_state_dict=True)
        try:
            saved = AutoModelForCausalLM.from_pretrained(self.last, dtype=torch.float32)
            states.set_model_state_dict(model, saved.state_dict(), options=options)
            states.set_optimizer_state_dict(
                model, optimizer, self.resumed["optimizer"], options=options)
        except Exception as error:
            self.refuse(error)
        del self.resumed["optimizer"]           # which is large

    def save(self):
        """Write a checkpoint and remove the one before. Before the first step there is nothing that
        a run could not begin with."""
        folder = self.folder / f"checkpoint-{self.state['steps']}"
        record = self.record()
        if self.state["steps"] == 0:
            return
        options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, optimizer = states.get_state_dict(
            self.policy.model, self.parts["optimizer"], options=options)
        if RANK > 0 or folder.exists():
            return
        for name in self.policy.model.all_tied_weights_keys:        # which are another weight
            weights.pop(name, None)
        part = folder.with_suffix(".tmp")
        try:
            self.policy.model.save_pretrained(part, state_dict=weights)
            self.policy.generation_config.save_pretrained(part)
            self.policy.tokenizer.save_pretrained(part)
            torch.save(record | {"optimizer": optimizer}, part / "run.pt")
            os.replace(part, folder)
        except (OSError, RuntimeError) as error:        # torch's of a full disk is the second
            common.fail(f"{folder}: cannot be written: {' '.join(str(error).split())}", code=1)
        for other in self.folder.glob("checkpoint-*"):
            if other != folder:
                shutil.rmtree(other)

    def command(self):
        alone = super().command()
        if WORLD_SIZE == 1 and self.cfg.parallel == "replicate":
            return alone
        return f"torchrun --nproc_per_node {WORLD_SIZE} {alone.removeprefix('python ')}"

    def leave(self):
        if RANK == 0:
            super().leave()
        raise SystemExit(130)

    def goes_on(self):
        self.is_interrupted = any(gathered(self.is_interrupted))
        return super().goes_on()


def last_checkpoint(run):
    """The newest checkpoint of a run folder; None if it has none, as the folder of a model."""
    found = [path for path in Path(run).glob("checkpoint-*")
             if path.name.removeprefix("checkpoint-").isdigit() and (path / "run.pt").is_file()]
    return max(found, key=lambda path: int(path.name.removeprefix("checkpoint-")), default=None)
