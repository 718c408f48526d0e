"""Train with TRL's GRPOTrainer on a loss of ours, or on your own.

  python -m engines.trl grpo:policy_loss epsilon_high=0.28 --model_name_or_path MODEL \\
      --dataset_name train.jsonl --max_steps 100 --output_dir out
  accelerate launch -m engines.trl mine.py:my_loss --model_name_or_path MODEL ...

First comes the loss with its settings, then TRL's own flags: those of GRPOConfig and ModelConfig,
and --dataset_name, a file of lines or a name on the Hub. So vLLM, adapters, quantization, FSDP,
DeepSpeed and several machines work as in TRL. --reward_funcs names files with functions in TRL's
form, rewards.py or rewards.py:two,of_them; without it, real.py's `verify` compares the last number
of a completion with the column `answer`.

The first line that is printed names the loss and the rewards, and so do loss.json in the output
folder, each checkpoint and the trackers' config, under loss_type. Ctrl-C, SIGTERM and SIGHUP save a
checkpoint after the current step, and print the command that continues the run.

TRL computes everything but the policy's loss: samples, rewards, advantages, the KL, the entropy
bonus, the weights for vLLM. Flags that choose or change TRL's own loss are refused.
"""
if __package__ != "engines":
    raise SystemExit("error: start it in the checkout as a module: python -m engines.trl")
import engines.behind  # isort: split

import signal  # isort: split

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # while packages load, Ctrl-C is no traceback

import contextlib
import copy
import dataclasses
import itertools
import math
import shlex
import shutil
import sys
from pathlib import Path

import datasets
import safetensors
import torch
import transformers
import trl

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
        self.record, files = record.of_run(loss, self.how, rewards)
        if args.resume_from_checkpoint:
            record.refuse_incomplete(args.resume_from_checkpoint, args.output_dir)
            record.refuse_other(args.resume_from_checkpoint, self.record)
        if args.should_save:                        # one process; before a model is loaded
            with plumbing.writing(args.output_dir):
                record.write(args.output_dir, self.record, files)
            print(record.line(self.record), self.token_loss.arguments, sep="\n", flush=True)
        args = copy.copy(args)
        args.loss_type = LOSS_TYPES[self.how]       # TRL averages the KL in the same way
        self.is_checked = False
        self.saved = args.resume_from_checkpoint    # the last checkpoint of this run
        self.mask = None                            # while TRL's loss is computed: (b, T)
        super().__init__(model, reward_funcs, args, *more, **named)
        self.token_counts = torch.zeros(2, device=self.accelerator.device)      # see log_tokens
        # TRL has read these; trackers and training_args.bin get what runs
        self.args.loss_type = record.line(self.record)
        self.args.epsilon = self.args.epsilon_high = None

    def train(self, resume_from_checkpoint=None, **named):
        """Train as TRL does. ValueError if a checkpoint was trained on something else."""
        if isinstance(resume_from_checkpoint, (str, Path)):
            record.refuse_other(resume_from_checkpoint, self.record)
            self.saved = resume_from_checkpoint
        return super().train(resume_from_checkpoint, **named)

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
            self.end(f"the gradient is not finite: {float(norm)}; the largest |log rho_t| is "
                     f"{largest:.3g}", is_saved=not self.is_deepspeed_enabled)
        return norm

    def _calculate_rewards(self, *args):
        """Compute the rewards as TRL does. One that fails, is infinite, or rewards nothing at all
        ends the run."""
        try:
            rewards = super()._calculate_rewards(*args)                 # (B, functions)
        except (Exception, SystemExit) as error:                        # of a user's function
            is_alone = self.accelerator.num_processes == 1      # others wait for their rewards
            self.end(f"a reward fails: {engines.one_line(error)}", is_saved=is_alone)
        if rewards.isinf().any():
            self.end(f"a reward is infinite, of {', '.join(self.reward_func_names)}")
        if rewards.isnan().all():
            self.end(f"all rewards are None or nan: {', '.join(self.reward_func_names)}")
        return rewards

    def end(self, message, is_saved=True):
        """Save a checkpoint after the last step, print one line, and exit with 1."""
        if is_saved:
            self.save_last()
        if self.accelerator.is_main_process or not is_saved:
            common.fail(f"step {self.state.global_step + 1}: {message}; {self.kept()}", code=1)
        raise SystemExit(1)

    def save_last(self):
        """Save a checkpoint after the last step, unless there is one."""
        folder = self.checkpoint()
        if self.state.global_step > 0 and Path(self.saved or "").resolve() != folder.resolve():
            self._save_checkpoint(self.model, trial=None)

    def checkpoint(self):
        return Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")

    def kept(self):
        """Name the last checkpoint of this run. -> str"""
        if self.saved:
            return f"the last checkpoint is {self.saved}"
        return "there is no checkpoint yet"

    def _save_checkpoint(self, model, trial):
        """Save a checkpoint as TRL does, with the record."""
        folder = self.checkpoint()
        with self.saving(folder):
            if self.args.should_save:
                record.write(folder, self.record)
                record.call_incomplete(folder)
            super()._save_checkpoint(model, trial)
        self.saved = folder

    @contextlib.contextmanager
    def saving(self, folder):
        """Exit with one line if a checkpoint cannot be saved, and remove its half."""
        try:
            yield
        except Exception as error:          # OSError, or what torch and safetensors make of it
            if not record.is_complete(folder):
                shutil.rmtree(folder, ignore_errors=True)
            common.fail(f"{folder}: cannot be saved: {engines.one_line(error)}; {self.kept()}", 1)


def refuse_replaced(args, words=()):
    """Raise a ValueError if a flag that our loss replaces is in `words`, or is not its default."""
    given = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in words
             if word.startswith("--")}
    defaults = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    for name in REPLACED:
        if name in given or getattr(args, name) != defaults[name]:
            raise ValueError(f"--{name}: belongs to TRL's own loss, which yours replaces; write "
                             "it as a setting of your loss, if it has one of this kind")


# ---- 2. signals ------------------------------------------------------------------------------

class Stop(transformers.TrainerCallback):
    """After Ctrl-C, SIGTERM or SIGHUP in any process, ends the training of all processes when the
    current step or checkpoint is done, with a checkpoint. TRL's own --enable_jit_checkpoint hears
    only SIGTERM, and each process decides alone at which step. Before the training, a signal ends
    the process at once."""

    def __init__(self):
        self.accelerator = None                         # until the training begins
        self.heard = 0                                  # number of a signal that came here
        self.number = 0                                 # number on which all processes agree
        numbers = {getattr(signal, name, signal.SIGINT) for name in ("SIGINT", "SIGTERM", "SIGHUP")}
        self.handlers = plumbing.handle({               # nohup ignores SIGHUP
            number: self.hear for number in numbers if signal.getsignal(number) != signal.SIG_IGN})

    def hear(self, number, _):
        self.heard = number
        if self.accelerator is None:
            raise KeyboardInterrupt                     # which no reward and no package catches

    def agree(self):
        """Exchange what the processes heard. -> whether the training ends"""
        heard = torch.tensor([self.heard], device=self.accelerator.device)
        self.number = self.accelerator.gather(heard).max().item()
        return self.number > 0

    def on_step_end(self, args, state, control, **_):
        if state.global_step < state.max_steps and self.agree():
            control.should_save = control.should_training_stop = True

    def on_save(self, args, state, control, **_):
        if state.global_step < state.max_steps and self.agree():
            control.should_training_stop = True


# ---- 3. the command --------------------------------------------------------------------------

@dataclasses.dataclass
class Flags(trl.ScriptArguments):
    reward_funcs: list[str] = dataclasses.field(default=None, metadata={
        "help": "Python files with rewards in TRL's form, FILE.py or FILE.py:a,b; without it, "
                "verify of real.py"})
    try_rewards: bool = dataclasses.field(default=True, metadata={
        "help": "call each reward for each problem before the training, to find bad answers"})


def check_model(name, revision):
    """Raise a ValueError if no model is named, or one that neither this machine nor the Hub has."""
    if not name:
        raise ValueError("--model_name_or_path: is missing; name a folder, or a model of the Hub")
    path = Path(name)
    if path.is_dir():
        return
    is_of_hub = len(path.parts) == 1 or len(path.parts) == 2 and not path.parent.exists()
    if not is_of_hub or name.startswith((".", "~")) or "\\" in name:
        raise ValueError(f"--model_name_or_path {name}: there is no such folder")
    data.ask_hub("--model_name_or_path", name, "config.json", revision)


def check_numbers(args):
    """Raise a ValueError for a number with which no training is possible."""
    for name in ("temperature", "gradient_accumulation_steps", "max_completion_length"):
        if not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"--{name} {getattr(args, name)}: must be finite and above 0")
    if not 0 <= args.learning_rate < math.inf:
        raise ValueError(f"--learning_rate {args.learning_rate}: must be finite and at least 0")


def check_prompts(model, problems, most_tokens, name):
    """Raise a ValueError if a prompt has no tokens, or if a long one leaves no room for a
    completion in the model's context. The 20 problems with most characters are measured, and the
    one with fewest; of a stream none. OSError if there is no such model."""
    config = transformers.AutoConfig.from_pretrained(
        model.model_name_or_path, revision=model.model_revision)
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
    if not isinstance(problems, datasets.Dataset):
        return
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        model.model_name_or_path, revision=model.model_revision)
    prompts = problems["prompt"]
    order = sorted(range(len(prompts)), key=lambda row: -len(str(prompts[row])))
    for row in [*order[:20], order[-1]]:
        if isinstance(prompts[row], str):
            ids = tokenizer(prompts[row])["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(
                prompts[row], add_generation_prompt=True, return_dict=False)
        if len(ids) == 0:
            raise ValueError(f"{name}, row {row + 1}: the prompt has no tokens")
        if len(ids) + most_tokens > context:
            raise ValueError(f"{name}, row {row + 1}: the prompt has {len(ids)} tokens, and with "
                             f"--max_completion_length {most_tokens} it does not fit in the "
                             f"model's context of {context}")


def prepare(text, words):
    """Read the flags, the rewards and the data, and load the model. ValueError or OSError, with one
    line, if something does not fit. -> trainer"""
    parser = trl.TrlParser((Flags, trl.GRPOConfig, trl.ModelConfig), allow_abbrev=False)
    parser.error = common.fail                  # without a list of all flags
    flags, args, model = parser.parse_args_and_config(words)
    refuse_replaced(args, words)
    check_numbers(args)
    engines.load(text)                          # before anything is loaded
    if not args.resume_from_checkpoint:
        record.refuse_taken(args.output_dir)
    check_model(model.model_name_or_path, model.model_revision)
    rewards = data.read_rewards(flags.reward_funcs)
    splits = data.read(flags, has_eval=args.eval_strategy != "no")
    name = f"--dataset_name {flags.dataset_name}"
    for problems in splits:
        if flags.try_rewards:
            data.try_rewards(rewards, problems, name)
        check_prompts(model, problems, args.max_completion_length, name)
    args.model_init_kwargs = {
        "revision": model.model_revision, "attn_implementation": model.attn_implementation,
        "dtype": model.dtype} | (args.model_init_kwargs or {})
    return Trainer(
        model.model_name_or_path, rewards, args, *splits, loss=text,
        quantization_config=trl.get_quantization_config(model),
        peft_config=trl.get_peft_config(model))


def command(text, words, checkpoint, num_processes):
    """Write the command that continues a run. -> str"""
    words = [*words, "--resume_from_checkpoint", str(checkpoint)]       # the last one counts
    start = ["python", "-m"]
    if num_processes > 1:
        start = ["accelerate", "launch", "--num_processes", str(num_processes), "-m"]
    return shlex.join([*start, "engines.trl", *text.split(), *words])


def main(argv=None):
    words = sys.argv[1:] if argv is None else list(argv)
    text = " ".join(itertools.takewhile(lambda word: not word.startswith("-"), words))
    if not text:
        print(__doc__)
        return None
    words = words[len(text.split()):]
    stop = Stop()
    try:
        return run(text, words, stop)
    finally:
        plumbing.handle(stop.handlers)


def run(text, words, stop):
    """Train. Exits with 128 + n after a signal. -> trainer"""
    try:
        trainer = prepare(text, words)
        accelerator = stop.accelerator = trainer.accelerator
    except (ValueError, OSError, ImportError, safetensors.SafetensorError) as error:
        common.fail(engines.message_of(error))
    except KeyboardInterrupt:
        number = signal.Signals(stop.heard or signal.SIGINT)
        common.fail(f"stopped by {number.name} before the training", code=128 + number)
    trainer.add_callback(stop)
    try:
        trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    except Exception as error:              # of a user's loss, or of a full disk or memory
        if accelerator.num_processes == 1:                  # others would wait for each other
            trainer.save_last()
        if isinstance(error, OSError):
            trainer.end(engines.one_line(error), is_saved=False)
        print(f"step {trainer.state.global_step + 1} fails; {trainer.kept()}", file=sys.stderr)
        raise
    if stop.number:
        words = command(text, words, trainer.saved, accelerator.num_processes)
        accelerator.print(f"stopped by {signal.Signals(stop.number).name}; to continue: {words}")
    else:
        folder = trainer.args.output_dir
        with trainer.saving(Path(folder, "model.safetensors")):
            trainer.save_model(folder)
            trainer.save_state()            # the log, for report.check and report.page
        accelerator.print(f"the trained model is in {folder}")
    accelerator.end_training()
    if stop.number:
        raise SystemExit(128 + stop.number)
    return trainer


if __name__ == "__main__":
    main()
