"""Train with TRL's GRPOTrainer on a loss of ours, or on your own.

  python -m engines.trl grpo:policy_loss epsilon_high=0.28 --model_name_or_path MODEL \\
      --dataset_name train.jsonl --max_steps 100 --output_dir out
  accelerate launch -m engines.trl mine.py:my_loss --model_name_or_path MODEL ...

First comes the loss with its settings, then TRL's own flags: those of GRPOConfig and ModelConfig,
and --dataset_name, a file of lines or a name on the Hub. So vLLM, adapters, quantization, FSDP,
DeepSpeed and several machines work as in TRL. --reward_funcs names files with functions in TRL's
form, rewards.py or rewards.py:one_of_them; without it, real.py's `verify` compares the last number
of a completion with the column `answer`.

TRL computes everything but the policy's loss: samples, rewards, advantages, the KL, the entropy
bonus, the weights for vLLM. Flags that choose or change TRL's own loss are refused.
"""
if __package__ != "engines":
    raise SystemExit("error: start it in the checkout as a module: python -m engines.trl")
import engines.behind  # isort: split

import copy
import dataclasses
import inspect
import itertools
import sys
from pathlib import Path

import datasets
import torch
import trl

import common
import grpo
from vectors import names

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
        args = copy.copy(args)
        args.loss_type = LOSS_TYPES[self.how]       # TRL averages the KL in the same way
        self.is_checked = False
        self.mask = None                            # while TRL's loss is computed: (b, T)
        super().__init__(model, reward_funcs, args, *more, **named)

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
            without, total = self.accelerator.reduce(sums, reduction="sum")
            metrics["no_gradient"].append((without / total.clamp(min=1)).item())

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


def refuse_replaced(args, words=()):
    """Raise a ValueError if a flag that our loss replaces is in `words`, or is not its default."""
    given = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in words
             if word.startswith("--")}
    defaults = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    for name in REPLACED:
        if name in given or getattr(args, name) != defaults[name]:
            raise ValueError(f"--{name}: belongs to TRL's own loss, which yours replaces; write "
                             "it as a setting of your loss, if it has one of this kind")


# ---- 2. rewards and data ---------------------------------------------------------------------

def last_number(completions, answer, **columns):
    """Reward with 1.0 if the last number of a completion is the answer, as real.py does, else 0.0.
    TRL passes texts, or lists of messages. -> list of floats"""
    import real  # here, because it measures the memory of a GPU
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [real.verify(right, text) for right, text in zip(answer, texts)]


def read_rewards(names):
    """Read the functions that --reward_funcs names: FILE.py, or FILE.py:FUNCTION. Without names,
    it is real.py's `verify`. -> list of functions"""
    functions = []
    for name in names or []:
        file, _, wanted = name.partition(":")
        if not file.endswith(".py"):
            raise ValueError(f"--reward_funcs {name}: must be a Python file, such as rewards.py")
        module = engines.read_file(file)
        found = [value for key, value in vars(module).items() if inspect.isfunction(value)
                 and value.__module__ == module.__name__ and not key.startswith("_")
                 and wanted in ("", key)]
        if not found:
            raise ValueError(f"--reward_funcs {name}: has no function {wanted or 'of its own'}")
        functions += found
    return functions or [last_number]


def read_data(flags, has_eval):
    """Load a file of lines, a folder of files, or a data set of the Hub. -> list: the data to train
    on and, with has_eval, the data to evaluate on"""
    datasets.disable_progress_bars()
    name = flags.dataset_name or ""
    kind = Path(name).suffix[1:].replace("jsonl", "json")
    try:
        if kind in ("json", "csv", "parquet"):
            data = datasets.load_dataset(kind, data_files={flags.dataset_train_split: name})
        else:
            data = datasets.load_dataset(
                name, name=flags.dataset_config, streaming=flags.dataset_streaming)
    except Exception as error:              # the package raises nearly anything
        cause = engines.one_line(error.__cause__ or error)
        raise ValueError(f"--dataset_name {name}: cannot be read: {cause}") from None
    splits = [flags.dataset_train_split]
    if has_eval:
        splits.append(flags.dataset_test_split)
    for split in splits:
        if split not in data:
            raise ValueError(f"--dataset_name {name}: has no split {split}; to evaluate on files, "
                             "name a folder with train.jsonl and test.jsonl")
    return [data[split] for split in splits]


# ---- 3. the command --------------------------------------------------------------------------

@dataclasses.dataclass
class Flags(trl.ScriptArguments):
    reward_funcs: list[str] = dataclasses.field(default=None, metadata={
        "help": "Python files with rewards in TRL's form; without it, verify of real.py"})


def main(argv=None):
    words = sys.argv[1:] if argv is None else list(argv)
    text = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    if not text:
        print(__doc__)
        return None
    words = words[len(text):]
    loss = " ".join(text)
    parser = trl.TrlParser((Flags, trl.GRPOConfig, trl.ModelConfig))
    flags, args, model = parser.parse_args_and_config(words)
    try:
        refuse_replaced(args, words)
        engines.load(loss)        # before anything is loaded
        rewards = read_rewards(flags.reward_funcs)
        splits = read_data(flags, has_eval=args.eval_strategy != "no")
    except ValueError as error:
        common.fail(error)
    args.model_init_kwargs = {
        "revision": model.model_revision, "attn_implementation": model.attn_implementation,
        "dtype": model.dtype} | (args.model_init_kwargs or {})
    trainer = Trainer(
        model.model_name_or_path, rewards, args, *splits, loss=loss,
        quantization_config=trl.get_quantization_config(model),
        peft_config=trl.get_peft_config(model))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model(args.output_dir)
    trainer.accelerator.print(f"the trained model is in {args.output_dir}")
    trainer.accelerator.end_training()
    return trainer


if __name__ == "__main__":
    main()
