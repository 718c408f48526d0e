"""Train with TRL's own script for GRPO on a loss of ours, or on your own.

  python -m engines.trl grpo:policy_loss epsilon_high=0.28 --model_name_or_path MODEL \\
      --dataset_name train.jsonl --max_steps 100 --output_dir out
  accelerate launch -m engines.trl mine.py:my_loss --model_name_or_path MODEL ...

First comes the loss with its settings, then the flags of `trl grpo`, which does all the rest.
--dataset_name may also be a file, and --reward_funcs may name functions of a file,
rewards.py:two,of_them; without it, real.py's `verify` compares the last number of a completion with
the column `answer`. The first line that is printed names the loss and the rewards, and so do
loss.json in the output folder, each checkpoint and the trackers' config, under loss_type.
"""
import engines.import_path  # isort: split

import copy
import dataclasses
import itertools
import json
import math
import os
import sys
from pathlib import Path

import datasets
import torch
import trl
from trl.scripts import grpo as script

import common
import grpo
from engines import data, names, record
from report import replaced
from vectors.contract import restored

# TRL's losses with these averages
LOSS_TYPES = {"sequence_sum": "luspo"} | {
    loss.how: loss.trl for loss in names.LOSSES.values() if loss.method == "clip"}
# Flags that change TRL's own loss. Each loss of ours has settings instead.
REPLACED = ("loss_type", "epsilon", "epsilon_high", "delta", "importance_sampling_level",
            "sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos", "vespo_k_neg",
            "vespo_lambda_pos", "vespo_lambda_neg", "off_policy_mask_threshold",
            "top_entropy_quantile", "use_liger_kernel")
PLACES = "output_dir", "logging_dir", "run_name"        # flags that change no computation
# Flags that a checkpoint would replace by its own values
OPTIMIZER = "learning_rate", "weight_decay", "adam_beta1", "adam_beta2"


# ---- 1. the trainer --------------------------------------------------------------------------

class Trainer(trl.GRPOTrainer):
    """TRL's trainer with another loss, a text for `engines.load`. ValueError if a flag in `args`
    changes TRL's own loss. All other arguments are those of GRPOTrainer."""

    def __init__(self, model, reward_funcs, args, *more, loss, **named):
        self.fields = trl.GRPOConfig.__dataclass_fields__
        refuse_replaced(args, {name: self.fields[name].default for name in REPLACED})
        self.token_loss, self.how = engines.load(loss)
        rewards = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        self.record, self.files = record.of_run(loss, self.token_loss, self.how, rewards)
        self.record["optimizer"] = [f"{name} {getattr(args, name)}" for name in OPTIMIZER]
        args = copy.copy(args)
        args.output_dir = os.path.abspath(args.output_dir)      # a user's code may leave the folder
        args.loss_type = LOSS_TYPES[self.how]       # TRL averages the KL in the same way
        self.has_learned = False
        self.mask = None                            # while TRL's loss is computed: (b, T)
        super().__init__(model, reward_funcs, args, *more, **named)
        self.token_counts = torch.zeros(2, device=self.accelerator.device)      # see log_tokens
        # TRL has read these; trackers and training_args.bin get what runs
        self.args.loss_type = record.line(self.record)
        self.args.epsilon = self.args.epsilon_high = None

    def train(self, resume_from_checkpoint=None, **named):
        """Train as TRL does, with a record. ValueError if a checkpoint is not complete, or was
        trained on something else, if a new run has a folder in use, or if no step was done."""
        folder = self.args.output_dir
        checkpoint = record.checkpoint_of(resume_from_checkpoint, folder, self.record)
        self.accelerator.wait_for_everyone()        # until all have looked into the folder
        if self.args.should_save:                   # one process
            record.write(folder, self.record, self.files)
            changed = {name: str(x) for name, x in vars(self.args).items() if name not in PLACES
                       and name in self.fields and x != self.fields[name].default}
            Path(folder, "flags.json").write_text(json.dumps(changed, indent=1), "utf-8")
            print(record.line(self.record), flush=True)
        found = super().train(checkpoint, **named)
        self.save_state()                           # the log, for report.check and report.page
        if not self.has_learned and self.state.global_step > 0:
            print("no group had two different rewards, so nothing was learned", flush=True)
        if self._step == 0 and self.state.global_step < self.state.max_steps:
            n = self.args.generation_batch_size // self.num_generations
            raise ValueError(
                f"nothing was trained: a step needs {n} prompts, but the data set has "
                f"{getattr(self.train_dataset, 'num_rows', 'fewer')}; lower "
                f"--generation_batch_size {self.args.generation_batch_size}")
        return found

    def _get_per_token_logps_and_entropies(self, *args, **named):
        """Keep the log-probabilities that TRL's loss is computed from. TRL averages its entropies
        over a part of the batch; times `share`, the parts add up to the average over the step."""
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
        """Log as TRL does, but the largest of the maxima, and a share of all tokens."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        if "max_log_ratio" in metrics:
            metrics["max_log_ratio"] = [max(metrics["max_log_ratio"])]
        without, total = self.token_counts.tolist()
        if total > 0:
            metrics["no_gradient"] = [without / total]
        self.token_counts = torch.zeros(2, device=self.accelerator.device)
        super().log(logs, start_time)

    # ---- what ends a run ----

    def _get_grad_norm(self, *args, **named):
        """Compute the norm as TRL does. Before the optimizer step, a gradient that is not finite
        ends the run; in float16, TRL scales the loss, and skips such a step."""
        norm = super()._get_grad_norm(*args, **named)
        self.has_learned |= norm is None or float(norm) > 0
        if norm is not None and not math.isfinite(norm) and not self.args.fp16:
            raise FloatingPointError(f"the gradient is {float(norm)}; the largest |log rho_t| is "
                                     f"{max(self._metrics['train']['max_log_ratio']):.3g}")
        return norm

    def _calculate_rewards(self, *args):
        """Compute the rewards. An infinite one, or a batch without any, ends the run."""
        with restored():
            rewards = super()._calculate_rewards(*args)                 # (B, functions)
        if rewards.isinf().any() or rewards.isnan().all():
            raise FloatingPointError("a reward is infinite, or all are None: "
                                     f"{', '.join(self.reward_func_names)}")
        return rewards

    def _save_checkpoint(self, model, trial):
        """Save a checkpoint as TRL does, with the record."""
        if self.args.should_save:
            step = self.state.global_step
            record.write(f"{self.args.output_dir}/checkpoint-{step}", self.record)
        super()._save_checkpoint(model, trial)


def refuse_replaced(args, values):
    """Raise a ValueError if a flag that our loss replaces does not have the value in `values`."""
    for name, x in values.items():
        if getattr(args, name) != x:
            raise ValueError(f"--{name}: belongs to TRL's own loss, which yours replaces; write "
                             "it as a setting of your loss, if it has one of this kind")


# ---- 2. the command --------------------------------------------------------------------------

@dataclasses.dataclass
class Flags(script.GRPOScriptArguments):
    try_rewards: bool = dataclasses.field(default=True, metadata={
        "help": f"call each reward for {data.TRIED} answers before the training"})


def parsed(text, words):
    """Read the flags as TRL's script does. ValueError or OSError if something does not fit.
    -> arguments of its main()"""
    parser = trl.TrlParser((Flags, trl.GRPOConfig, trl.ModelConfig, trl.DatasetMixtureConfig),
                           allow_abbrev=False)
    parser.error = common.fail                  # without a list of all flags
    defaults = {name: parser.get_default(name) for name in REPLACED}
    parser.set_defaults(**dict.fromkeys(REPLACED))      # to find those that are given
    flags, args, *more = parser.parse_args_and_config(words)
    refuse_replaced(args, dict.fromkeys(REPLACED))
    vars(args).update(defaults, output_dir=os.path.abspath(args.output_dir))
    engines.load(text)                          # before anything else is loaded
    rewards = [one for word in flags.reward_funcs or () for one in data.rewards_of(word)]
    if not rewards and not flags.reward_model_name_or_path:
        rewards = ["engines.data.last_number"]
    flags.reward_funcs = rewards
    return flags, args, *more


def main(argv=None):
    """Let TRL's script train, with our trainer and data. Exits with one line if the user's input or
    code fails. -> trainer"""
    words = sys.argv[1:] if argv is None else list(argv)
    text = " ".join(itertools.takewhile(lambda word: not word.startswith("-"), words))
    if not text:
        print(__doc__)
        return None
    made = []

    def make(*given, **named):
        if flags[0].try_rewards:
            data.try_rewards(named["reward_funcs"], named["train_dataset"])
        made.append(Trainer(*given, loss=text, **named))
        return made[0]
    try:
        flags = parsed(text, words[len(text.split()):])
        with replaced(trl, GRPOTrainer=make), replaced(datasets, load_dataset=data.load):
            script.main(*flags)
    except Exception as error:
        step = f"step {made[0].state.global_step + 1}: " if made and made[0].is_in_train else ""
        is_input = not step and isinstance(error, (ValueError, OSError, ImportError))
        if is_input or isinstance(error, FloatingPointError) or engines.place_of(error):
            common.fail(step + engines.one_line(error, not is_input), code=1 if step else 2)
        raise
    return made[0]


if __name__ == "__main__":
    main()
