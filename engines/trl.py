"""Train with TRL's own script for GRPO on a loss of ours, or on your own.

  python -m engines.trl grpo:policy_loss epsilon_high=0.28 --model_name_or_path MODEL \\
      --dataset_name train.jsonl --max_steps 100 --output_dir out
  accelerate launch -m engines.trl mine.py:my_loss --model_name_or_path MODEL ...

First comes the loss with its settings, then the flags of `trl grpo`, which does all the rest: data,
samples, rewards, advantages, the KL, the entropy bonus, adapters, vLLM, trackers. --dataset_name
may also be a file, and --reward_funcs may name functions of a file, rewards.py:two,of_them; without
it, real.py's `verify` compares the last number of a completion with the column `answer`.

The first line that is printed names the loss and the rewards, and so do loss.json in the output
folder, each checkpoint and the trackers' config, under loss_type. Ctrl-C, SIGTERM and the signals
of schedulers save a checkpoint after the current step, and print the command that continues the
run. Flags that choose or change TRL's own loss are refused.
"""
if __package__ != "engines":
    raise SystemExit("error: start it in the checkout as a module: python -m engines.trl")
import engines.behind  # isort: split

import signal  # isort: split

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # while packages load, Ctrl-C is no traceback

import copy
import dataclasses
import functools
import itertools
import math
import os
import shlex
import sys
from pathlib import Path

import datasets
import safetensors
import torch
import transformers
import trl
import yaml
from trl.scripts import grpo as script

import common
import grpo
import plumbing
from engines import data, names, record

# TRL's losses with these averages
LOSS_TYPES = {"sequence_sum": "luspo"} | {
    loss.how: loss.trl for loss in names.LOSSES.values() if loss.method == "clip"}
# Flags that change TRL's own loss. Each loss of ours has settings instead.
REPLACED = ("loss_type", "epsilon", "epsilon_high", "delta", "importance_sampling_level",
            "sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos", "vespo_k_neg",
            "vespo_lambda_pos", "vespo_lambda_neg", "off_policy_mask_threshold",
            "top_entropy_quantile", "use_liger_kernel")
ROUNDING = 0.1          # nats per token; a sampler in bfloat16 differs from the trainer by less


# ---- 1. the trainer --------------------------------------------------------------------------

class Trainer(trl.GRPOTrainer):
    """TRL's trainer with another loss, a text for `engines.load`. ValueError if a flag in `args`
    changes TRL's own loss. All other arguments are those of GRPOTrainer."""

    def __init__(self, model, reward_funcs, args, *more, loss, **named):
        refuse_replaced(args)
        self.token_loss, self.how = engines.load(loss)
        rewards = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        self.record, files = record.of_run(loss, self.token_loss, self.how, rewards)
        args = copy.copy(args)
        args.output_dir = os.path.abspath(args.output_dir)      # a user's code may leave the folder
        if args.resume_from_checkpoint:
            record.checkpoint_of(args.resume_from_checkpoint, args.output_dir, self.record)
        if args.should_save:                        # one process; before a model is loaded
            record.write(args.output_dir, self.record, files)
            print(record.line(self.record), flush=True)
        args.loss_type = LOSS_TYPES[self.how]       # TRL averages the KL in the same way
        self.is_checked = False
        self.mask = None                            # while TRL's loss is computed: (b, T)
        super().__init__(model, reward_funcs, args, *more, **named)
        self.token_counts = torch.zeros(2, device=self.accelerator.device)      # see log_tokens
        # TRL has read these; trackers and training_args.bin get what runs
        self.args.loss_type = record.line(self.record)
        self.args.epsilon = self.args.epsilon_high = None

    def train(self, resume_from_checkpoint=None, **named):
        """Train as TRL does. ValueError if a checkpoint is not complete, or was trained on
        something else."""
        if resume_from_checkpoint:
            resume_from_checkpoint = record.checkpoint_of(
                resume_from_checkpoint, self.args.output_dir, self.record)
        return super().train(resume_from_checkpoint, **named)

    def _load_optimizer_and_scheduler(self, checkpoint):
        """Load them as TRL does. ValueError if the checkpoint has another learning rate, weight
        decay or other number of the optimizer, which would replace that of the user."""
        def numbers():          # the rate itself follows from the first one and the schedule
            return [(name, x) for group in self.optimizer.param_groups for name, x in group.items()
                    if name not in ("params", "lr") and isinstance(x, (int, float, tuple))]
        asked = checkpoint and numbers()
        super()._load_optimizer_and_scheduler(checkpoint)
        for (name, x), (_, found) in zip(asked or (), numbers()):
            if x != found:
                raise ValueError(
                    f"--resume_from_checkpoint {plumbing.short(checkpoint)}: has {name} {found}, "
                    f"but now you ask for {x}; give the same number, or start a new run with "
                    "--model_name_or_path and this checkpoint")

    def _get_per_token_logps_and_entropies(self, *args, **named):
        """Keep the log-probabilities that TRL's loss is computed from. It gets no infinities of
        masked slots. TRL averages its entropy bonus over a part of the batch; with the gradient of
        the entropies times `share`, the sum of all parts is the average over the optimizer step."""
        logps, entropies, *rest = super()._get_per_token_logps_and_entropies(*args, **named)
        if self.mask is None:
            return logps, entropies, *rest
        self.logps = logps
        entropies = entropies.detach() + self.share * (entropies - entropies.detach())
        return torch.where(self.mask > 0, logps, 0.0), entropies, *rest

    def _compute_loss(self, model, inputs):
        """Compute the part of a micro-batch in the loss of an optimizer step. -> scalar"""
        A = inputs["advantages"]
        self.mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)      # (b, T)
        # These counts are of all micro-batches of an optimizer step. Processes average gradients.
        parts = self.current_gradient_accumulation_steps if self.model.training else 1
        num_tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        if self.model.training:             # TRL counts the tokens of all steps on these samples
            num_tokens = num_tokens * parts / self.args.steps_per_generation
        self.share = self.mask.sum() * parts / num_tokens   # 1 if all parts have as many tokens

        # TRL's policy loss is 0 if A is 0, so TRL computes all the rest. Only the KL needs pi_old.
        given = {name: torch.where(self.mask > 0, inputs[name], 0.0) for name in (
            "old_per_token_logps", "ref_per_token_logps") if inputs.get(name) is not None}
        if self.beta == 0:
            given["old_per_token_logps"] = None
        loss = super()._compute_loss(model, inputs | given | {"advantages": torch.zeros_like(A)})
        logps = self.logps                                                      # (b, T)
        mask, self.mask = self.mask.to(logps), None
        old_logps = inputs.get("old_per_token_logps")
        if old_logps is None:               # then there is one update, and pi_old is pi
            old_logps = logps.detach()
        self.check_sampler(inputs, old_logps, mask)
        token_loss = self.token_loss(logps, old_logps, A, mask)                 # (b, T)
        self.log_tokens(token_loss, logps, old_logps, A, mask)
        if "importance_sampling_ratio" in inputs and self.vllm_importance_sampling_correction:
            token_loss = token_loss * inputs["importance_sampling_ratio"]
        return loss + grpo.aggregate(token_loss, mask, self.how, len(mask) * parts, num_tokens,
                                     self.max_completion_length)

    def log_tokens(self, token_loss, logps, old_logps, A, mask):
        """Log the largest |log rho_t|, and the share of tokens whose loss has no gradient although
        A is not 0, such as those that are clipped."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name in [name for name in metrics if name.startswith(("clip_ratio/", "policy_loss"))]:
            del metrics[name]               # TRL has computed these with A = 0
        largest = grpo.log_ratio(logps.detach(), old_logps, mask).abs().max()
        metrics["max_log_ratio"].append(self.accelerator.gather(largest[None]).max().item())
        if token_loss.requires_grad:
            [slope] = torch.autograd.grad(
                token_loss[mask > 0].sum(), logps, retain_graph=True)           # (b, T)
            counts = (A if A.dim() == 2 else A[:, None]).ne(0) * mask           # (b, T)
            sums = torch.stack([((slope == 0) * counts).sum(), counts.sum()])
            self.token_counts = self.token_counts + self.accelerator.reduce(sums, reduction="sum")

    def log(self, logs, start_time=None):
        """Log as TRL does, which averages over all parts since the last line: instead, keep the
        largest of the maxima, and count tokens."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        if "max_log_ratio" in metrics:
            metrics["max_log_ratio"] = [max(metrics["max_log_ratio"])]
        without, total = self.token_counts.tolist()
        if total > 0:
            metrics["no_gradient"] = [without / total]
        self.token_counts = torch.zeros(2, device=self.accelerator.device)
        super().log(logs, start_time)

    def check_sampler(self, inputs, old_logps, mask):
        """After the first samples, compare vLLM's log-probabilities with the trainer's. Exits with
        one line if vLLM samples from other weights."""
        if self.is_checked or "sampling_per_token_logps" not in inputs:
            return
        self.is_checked = True
        difference = grpo.log_ratio(
            old_logps, inputs["sampling_per_token_logps"], mask).abs().sum()
        sums = self.accelerator.reduce(torch.stack([difference, mask.sum()]), reduction="sum")
        mean = (sums[0] / sums[1].clamp(min=1)).item()
        if not mean <= ROUNDING:                                                # True for nan
            common.fail("vLLM does not sample from the trainer's weights: log-probabilities "
                        f"differ by {mean:.2g} nats per token, rounding by less than {ROUNDING}; "
                        "try --use_vllm False", code=1)

    # ---- what ends a run ----

    def _get_grad_norm(self, *args, **named):
        """Compute the norm as TRL does. Before the optimizer step, a gradient that is not finite
        ends the run; in float16, TRL scales the loss, and skips such a step."""
        norm = super()._get_grad_norm(*args, **named)
        if norm is not None and not math.isfinite(norm) and not self.args.fp16:
            largest = max(self._metrics["train"]["max_log_ratio"], default=0.0)
            raise FloatingPointError(f"the gradient is {float(norm)}; the largest |log rho_t| is "
                                     f"{largest:.3g}")
        return norm

    def _calculate_rewards(self, *args):
        """Compute the rewards as TRL does. An infinite one, or a batch without any, ends the run.
        """
        with engines.restored():
            rewards = super()._calculate_rewards(*args)                 # (B, functions)
        if rewards.isinf().any() or rewards.isnan().all():
            raise FloatingPointError("a reward is infinite, or all are None: "
                                     f"{', '.join(self.reward_func_names)}")
        return rewards

    def _save_checkpoint(self, model, trial):
        """Save a checkpoint as TRL does, with the record. It is complete when TRL has written its
        end."""
        if self.args.should_save:
            folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
            record.write(folder, self.record)
            (folder / record.STATE).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)


def refuse_replaced(args, words=()):
    """Raise a ValueError if a flag that our loss replaces is in `words`, or in the --config that
    they name, or is not its default."""
    given = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in words
             if word.startswith("--")}
    if "--config" in words:
        given |= {*yaml.safe_load(Path(words[words.index("--config") + 1]).read_text("utf-8"))}
    defaults = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    for name in REPLACED:
        if name in given or getattr(args, name) != defaults[name]:
            raise ValueError(f"--{name}: belongs to TRL's own loss, which yours replaces; write "
                             "it as a setting of your loss, if it has one of this kind")


# ---- 2. signals ------------------------------------------------------------------------------

class Stop(transformers.TrainerCallback):
    """After one of plumbing.SIGNALS in any process, ends the training of all processes when the
    current step or checkpoint is done, with a checkpoint. TRL's own --enable_jit_checkpoint hears
    only SIGTERM, and each process decides alone at which step. Before the training, a signal ends
    the process at once."""

    def __init__(self, words):
        self.words = words
        self.trainer = None                             # until the model is loaded
        self.is_training = False
        self.heard = 0                                  # number of a signal that came here
        self.number = 0                                 # number on which all processes agree
        numbers = {getattr(signal, name, signal.SIGINT) for name in plumbing.SIGNALS}
        ignored = (signal.SIG_IGN, None)                # by nohup; None: C code handles it
        self.handlers = plumbing.handle({
            number: self.hear for number in numbers if signal.getsignal(number) not in ignored})
        if hasattr(os, "register_at_fork"):             # not on Windows
            os.register_at_fork(before=self.block, after_in_parent=self.unblock,
                                after_in_child=lambda: self.give_back() or self.unblock())

    def block(self):
        """Let signals wait while a reward forks a process: Python would drop those that come before
        the child has its own handlers, and `terminate(); join()` would hang."""
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self.handlers)

    def unblock(self):
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def give_back(self):
        plumbing.handle(self.handlers)
        self.handlers = {}

    def hear(self, number, _):
        self.heard = number
        if self.trainer is None:
            raise KeyboardInterrupt                     # which no reward and no package catches

    def agree(self):
        """Exchange what the processes heard. -> whether the training ends"""
        accelerator = self.trainer.accelerator
        heard = torch.tensor([self.heard], device=accelerator.device)
        self.number = accelerator.gather(heard).max().item()
        return self.number > 0

    def on_train_begin(self, *_, **__):
        self.is_training = True

    def on_step_end(self, args, state, control, **_):
        if state.global_step < state.max_steps and self.agree():
            control.should_save = control.should_training_stop = True

    def on_save(self, args, state, control, **_):
        if state.global_step < state.max_steps and self.agree():
            control.should_training_stop = True

    def on_train_end(self, args, state, control, **_):
        """Print the command that continues a run that a signal has stopped, and exit with 128 + n.
        """
        self.is_training = False
        if not self.number:
            self.trainer.save_state()       # the log, for report.check and report.page
            return
        accelerator = self.trainer.accelerator
        words = command(self.words, f"{args.output_dir}/checkpoint-{state.global_step}",
                        accelerator.num_processes)
        accelerator.print(f"stopped by {signal.Signals(self.number).name}; to continue: {words}")
        accelerator.end_training()
        raise SystemExit(128 + self.number)


def command(words, checkpoint, num_processes):
    """Write the command that continues a run. -> str"""
    start = ["python", "-m"]
    if num_processes > 1:
        start = ["accelerate", "launch", "--num_processes", str(num_processes), "-m"]
    return shlex.join([*start, "engines.trl", *words,                   # the last flag counts
                       "--resume_from_checkpoint", plumbing.short(checkpoint)])


# ---- 3. the command --------------------------------------------------------------------------

@dataclasses.dataclass
class Flags(script.GRPOScriptArguments):
    try_rewards: bool = dataclasses.field(default=True, metadata={
        "help": f"call each reward for the first {data.TRIED} problems before the training, to "
                "find bad answers"})


def parsed(text, words):
    """Read the flags as TRL's script does. ValueError or OSError if something does not fit.
    -> arguments of its main()"""
    parser = trl.TrlParser((Flags, trl.GRPOConfig, trl.ModelConfig, trl.DatasetMixtureConfig),
                           allow_abbrev=False)
    parser.error = common.fail                  # without a list of all flags
    flags, args, *more = parser.parse_args_and_config(words)
    refuse_replaced(args, words)
    engines.load(text)                          # before anything is loaded
    if not args.resume_from_checkpoint:
        record.refuse_taken(args.output_dir)
    args.output_dir = os.path.abspath(args.output_dir)
    rewards = [] if flags.reward_model_name_or_path and not flags.reward_funcs else (
        data.read_rewards(flags.reward_funcs))
    flags.reward_funcs = [one if isinstance(one, str) else f"{one.__module__}.{one.__name__}"
                          for one in rewards]
    return flags, args, *more


def made(stop, text, flags, model, reward_funcs, train_dataset, eval_dataset, **named):
    """Make the trainer that TRL's script asks for, after a look at its data."""
    if flags.try_rewards:
        data.try_rewards(reward_funcs, train_dataset)
    datasets.load_dataset = data.load_dataset           # which a reward may call
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, **{
        name: value for name, value in named["args"].model_init_kwargs.items()
        if name in ("revision", "trust_remote_code")})
    for problems in filter(None, (train_dataset, eval_dataset)):
        data.refuse_special(problems, tokenizer)
    stop.trainer = Trainer(model, reward_funcs, train_dataset=train_dataset, loss=text,
                           eval_dataset=eval_dataset, callbacks=[stop], **named)
    return stop.trainer


def main(argv=None):
    words = sys.argv[1:] if argv is None else list(argv)
    text = " ".join(itertools.takewhile(lambda word: not word.startswith("-"), words))
    if not text:
        print(__doc__)
        return None
    stop = Stop(words)
    before = trl.GRPOTrainer, datasets.load_dataset
    try:
        return run(text, words[len(text.split()):], stop)
    finally:
        trl.GRPOTrainer, datasets.load_dataset = before
        stop.give_back()


def run(text, words, stop):
    """Let TRL's script train, with our trainer and data. Exits with 128 + n after a signal, and
    with one line if the user's input or code fails. -> trainer"""
    try:
        flags = parsed(text, words)
        trl.GRPOTrainer = functools.partial(made, stop, text, flags[0])
        datasets.load_dataset = data.load
        script.main(*flags)
    except KeyboardInterrupt:
        number = signal.Signals(stop.heard or signal.SIGINT)
        common.fail(f"stopped by {number.name} before the training", code=128 + number)
    except Exception as error:              # of a user's code, or of a full disk or memory
        if not stop.is_training:
            if isinstance(error, (ValueError, OSError, ImportError, safetensors.SafetensorError)):
                common.fail(engines.one_line(error, has_type=False))
            raise
        trainer, is_known = stop.trainer, isinstance(error, FloatingPointError)
        step = trainer.state.global_step
        # an error of one process must not save, because the others do not
        if step > 0 and (trainer.accelerator.num_processes == 1 or is_known) and (
                not trainer.is_deepspeed_enabled):
            trainer._save_checkpoint(trainer.model, trial=None)
        kept = f"the last checkpoint is {record.last(trainer.args.output_dir)}"
        if is_known or engines.place_of(error):
            common.fail(f"step {step + 1}: {engines.one_line(error)}; {kept}", code=1)
        print(f"step {step + 1} fails; {kept}", file=sys.stderr)
        raise
    return stop.trainer


if __name__ == "__main__":
    main()
