"""Train any causal language model of transformers with the equations of the scripts.

  python pretrained/train.py --model DIR_OR_NAME --task countdown
  python pretrained/train.py --model DIR_OR_NAME --data train.jsonl --eval_data test.jsonl
  torchrun --nproc_per_node 8 pretrained/train.py --model DIR_OR_NAME --data train.jsonl

The scripts can only train small policies of their own. This file applies the same equations to
models that others have pretrained: it imports advantages, ratios, losses, KL and averages from
grpo.py and gspo.py, whose docstrings explain the equations. If the sampler computes
differently from the trainer, weights from examples/lag.py correct for that.

This file has the training step; policy.py has the model with its tokens, sampler.py what samples. A
run may use several processes. Each process knows the whole batch, samples its share of it, and
learns from its share of the micro-batches. The gradients are added up, so the result is the same as
with one process. docs/real-models.md shows what fits where.
"""
import collections
import dataclasses
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import grpo
import gspo
import plumbing
from examples import lag
from tasks import problems as problem_files
from tasks import rewards
from tasks.scores import part_of

try:
    from pretrained import models
    from pretrained import rewards as own
    from pretrained import run as processes
    from pretrained.policy import Policy, score, score_all
    from pretrained.sampler import check_sampler, complete, load_engine
except ImportError as error:
    common.fail(f"{error.name} is missing: pip install -r pretrained/requirements.txt")

METHODS = {"grpo": grpo, "gspo": gspo}


# ---- 1. configuration ------------------------------------------------------------------------

# flags that only the scripts use, and that only affect memory
OF_SCRIPTS = (*common.Base.__annotations__, "init_from", "curriculum", "dynamic_sampling",
              "entropy_coef", "overlong_buffer")
OF_FILES = {"data", "eval_data", "reward_file"}         # which may move, but not change
OF_MEMORY = {"micro_batch_size", "sample_batch_size", "gradient_checkpointing", "engine_memory"}
GB = torch.cuda.get_device_properties(0).total_memory / 1e9 if common.HAS_CUDA else 0


@dataclasses.dataclass(frozen=True)
class Config(grpo.Config):
    model: str = ""                     # causal language model: a folder, a run, a name on the Hub
    dtype: Literal["float32", "bfloat16"] = None    # dtype of products; None: bfloat16 on CUDA
    lora_rank: int = 0                  # rank of an adapter to train; 0: train all weights
    lora_alpha: int = 32                # scale (a) of the adapter, which adds B A a / lora_rank
    engine: Literal["transformers", "vllm"] = "transformers"    # library that samples completions
    engine_memory: float = 0.3 if common.HAS_CUDA else 0.1      # share of memory that vLLM uses
    data: str = ""                      # file of {"prompt": ..., "answer": ...}, instead of --task
    eval_data: str = ""                 # file of held-out problems; default: a tenth of --data
    reward_file: str = ""               # Python file with your rewards, see pretrained/rewards.py
    system_prompt: str = ""             # system message for conversations without one
    instruction: str = ""               # text to put before each prompt
    chat_template: bool = True          # use the chat template, if the tokenizer has one
    chat_template_kwargs: str = "{}"    # template arguments, as JSON: {"enable_thinking": false}
    method: Literal[tuple(METHODS)] = "grpo"    # script whose equations are used
    epsilon: float = None               # lower clip range (eps_low); None: the script's, gspo 3e-4
    epsilon_high: float = None          # upper clip range (eps_high); None: the script's, gspo 4e-4
    importance_sampling_correction: Literal[lag.CORRECTIONS] = None     # None: truncate with vllm
    importance_sampling_cap: float = 2.0    # highest weight (C)
    importance_sampling_clip_min: float = 0.0   # lowest weight (C_min)
    max_completion_length: int = 256    # largest number of tokens per completion (T)
    sample_batch_size: int = 256        # largest number of rows sampled at a time
    num_eval_problems: int = 128        # largest number of held-out problems
    num_eval_samples: int = 4           # samples per held-out problem, at the start and the end
    learning_rate: float = 1e-6         # learning rate of AdamW
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"     # decay after warmup
    warmup_steps: int = 0               # steps over which the learning rate grows to its full value
    micro_batch_size: int = max(8, int(GB / 2.5))   # rows per backward pass; more if they are short
    gradient_checkpointing: bool = False    # store few activations, compute others twice
    save_steps: int = 10                # steps between checkpoints, each of 12 bytes per parameter
    num_threads: int = 1                # CPU threads per operation
    has_task_defaults = False           # because they suit small policies
    MAY_DIFFER = grpo.Config.MAY_DIFFER | OF_MEMORY | {"num_threads"} | OF_FILES

    def __post_init__(self):
        """Replace None. Clip ranges come from the script, except that those of gspo.py suit small
        policies, so gspo gets its paper's. vLLM rounds differently from the trainer, so by default
        it gets a correction. On CUDA, products are in bfloat16; a resumed run keeps its dtype."""
        if self.dtype is None:
            object.__setattr__(self, "dtype", "bfloat16" if self.device == "cuda" else "float32")
        papers = {"epsilon": 3e-4, "epsilon_high": 4e-4} if self.method == "gspo" else {}
        for name in ("epsilon", "epsilon_high"):
            if getattr(self, name) is None:
                default = getattr(METHODS.get(self.method, grpo).Config, name)
                object.__setattr__(self, name, papers.get(name, default))
        if self.importance_sampling_correction is None:
            correction = "truncate" if self.engine == "vllm" else "none"
            object.__setattr__(self, "importance_sampling_correction", correction)

    def rules(self):
        yield from super().rules()
        yield self.model != "", "--model: is missing; name a folder, or a model on Hugging Face"
        has_model = "model" in self.reward.split("+")
        yield not has_model, f"--reward {self.reward}: only the scripts have a reward model"
        is_range = self.importance_sampling_cap > self.importance_sampling_clip_min
        yield is_range, "--importance_sampling_cap: must be above --importance_sampling_clip_min"
        try:
            is_object = isinstance(json.loads(self.chat_template_kwargs), dict)
        except ValueError:
            is_object = False
        yield is_object, (f"--chat_template_kwargs {self.chat_template_kwargs}: is not a JSON "
                          'object such as {"enable_thinking": false}')
        for names, has_use, reason in (
                (OF_SCRIPTS, False, "works only in the scripts"),
                (("task",), not self.data, "cannot be used with --data"),
                (("eval_data",), self.data, "needs --data"),
                (("reward",), not self.reward_file, "cannot be used with --reward_file"),
                (("lora_alpha",), self.lora_rank > 0, "needs --lora_rank"),
                (("sample_batch_size",), self.engine != "vllm", "needs --engine transformers"),
                (("engine_memory",), self.engine == "vllm", "needs --engine vllm")):
            for name in names:
                is_default = getattr(self, name) == self.__dataclass_fields__[name].default
                yield has_use or is_default, f"--{name}: {reason}"


def load_task(cfg):
    """Load the task, or the problems of --data. Exits with one line if a flag does not fit."""
    if cfg.data:
        task = problem_files.FromFile(cfg)
        task = task if cfg.reward == "accuracy" else rewards.Rewards(cfg, task)
    else:
        task = common.load_task(cfg, grpo.verify)
    return own.Own(cfg, task) if cfg.reward_file else task


# ---- 2. batches ------------------------------------------------------------------------------

def sample_batch(policy, task, cfg, step):
    """Sample and reward G completions of each of P problems, with the scripts' random numbers: the
    batch depends only on policy, task, seed and step. -> Batch"""
    P = cfg.num_prompts
    if cfg.data:
        problems = task.passes(step * P, P)
    else:
        problems = common.sample_problems(task, P, (cfg.seed, step))
    problems = [problem for problem in problems for _ in range(cfg.num_generations)]    # B
    generator = common.generator(cfg.seed, "rollout", step)
    batch = complete(policy, task, cfg, problems, generator)
    return task.judge(batch, cfg.num_generations, step)


def evaluate(policy, task, cfg, greedy=False):
    """Score the policy on held-out problems, with the same random numbers in every run. -> dict"""
    G = 1 if greedy else cfg.num_eval_samples
    held_out = common.held_out_problems(task, cfg.num_eval_problems)
    problems = [problem for problem in held_out for _ in range(G)]
    generator = None if greedy else common.generator("evaluation")
    batch = task.judge(complete(policy, task, cfg, problems, generator), G, "evaluation")
    scores = task.scores(batch, greedy)
    is_judged = torch.tensor([part_of(task, problem).is_judged for problem in held_out])
    values = {"greedy" if greedy else "pass@1": batch.is_correct[is_judged]}            # (P, G)
    if cfg.reward_file:
        del scores["think_share"]           # a reward file may read thoughts in another form
        values["greedy_reward" if greedy else "sampled_reward"] = batch.rewards
    errors = scores["greedy_errors" if greedy else "errors"] = {}
    for name, x in values.items():
        if len(x) > 0:
            scores[name] = x.double().mean().item()
            errors[name] = x.double().mean(dim=1).std(correction=0).item() / len(x) ** 0.5
    return scores


# ---- 3. the update ---------------------------------------------------------------------------

def correct(policy, batch, cfg):
    """If there is a correction, replace the sampler's log pi_old by the trainer's.
    -> weights (B, T), metrics"""
    if cfg.importance_sampling_correction == "none":
        return batch.mask, {}
    logps, entropy = score_all(policy, batch.prompts, batch.tokens, cfg.temperature, cfg.kernel)
    batch.entropy = entropy * batch.mask                # the sampler may only estimate it
    return lag.correct(batch, logps * batch.mask, cfg)


def token_losses(logps, old_logps, ref_logps, A, mask, cfg):
    """Compute the terms that (5) averages. (b, T) each -> (b, T)"""
    token_loss = METHODS[cfg.method].policy_loss(
        logps, old_logps, A, mask, cfg.loss_type, cfg.epsilon, cfg.epsilon_high, cfg.delta)
    if cfg.beta > 0:
        token_kl = grpo.kl(logps * mask, ref_logps * mask, cfg.kl_estimator,
                           grpo.log_ratio(logps, old_logps, mask))
        token_loss = token_loss + cfg.beta * token_kl
    return token_loss


def backward(policy, parameters, batch, ref_logps, A, rows, cfg):
    """Compute the gradient of (5) over `rows`; each process takes its share of the micro-batches.
    -> metrics"""
    method = METHODS[cfg.method]
    surrogate, average = method.LOSS_TYPES[cfg.loss_type]
    if cfg.mask_truncated_completions:
        rows = rows[~batch.is_truncated[rows]]
    num_sequences = len(rows)                                   # in all processes
    num_tokens = batch.mask[rows].sum().clamp(min=1)
    if cfg.beta == 0:
        rows = rows[A[rows].any(dim=1)]                         # A = 0: no gradient
    sizes = batch.prompts.shape[1] + batch.lengths              # prompts need memory, too
    parts = common.micro_batches(rows, sizes, cfg.micro_batch_size)

    for parameter in parameters:                        # zeros: Adam steps even without signal
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.zero_()
    sums = collections.Counter()            # of tensors: a GPU is waited for only at each part's T
    largest = [0.0]
    for part in parts[processes.RANK::processes.WORLD_SIZE]:
        T = int(batch.lengths[part].max())
        tokens = batch.tokens[part, :T]                                         # (b, T)
        mask = batch.mask[part, :T]
        old_logps = batch.logps[part, :T]
        [logps] = score(policy, batch.prompts[part], tokens, cfg.temperature, cfg.kernel,
                        with_entropy=False)
        token_loss = token_losses(logps, old_logps, ref_logps[part, :T], A[part, :T], mask, cfg)
        loss = method.aggregate(                                                # eq. (5)
            token_loss, mask, average, num_sequences, num_tokens, cfg.max_completion_length)
        loss.backward()

        log_rho = grpo.log_ratio(logps.detach(), old_logps, mask)               # (b, T)
        log_s = gspo.log_ratio(logps.detach(), old_logps, mask) if method is gspo else log_rho
        clipped = grpo.is_clipped(log_s, A[part, :T], cfg.epsilon, cfg.epsilon_high) * mask
        sums["loss"] += loss.detach()
        sums["clipped"] += clipped.sum()
        sums["difference"] += log_rho.abs().sum()
        largest.append(log_rho.abs().max())
    if processes.WORLD_SIZE > 1:
        for parameter in parameters:
            processes.dist.all_reduce(parameter.grad)
    sums = {name: sum(processes.gathered(float(sums[name])))
            for name in ("loss", "clipped", "difference")}
    metrics = {"loss": sums["loss"], "max_log_ratio": max(processes.gathered(float(max(largest)))),
               DIFFERENCE: sums["difference"] / batch.mask[rows].sum().clamp(min=1).item()}
    if surrogate == "clip":
        metrics["clip_ratio/region_mean"] = sums["clipped"] / num_tokens.item()
    return metrics


def update(policy, optimizer, batch, ref_logps, A, cfg, step):
    """Make num_iterations passes over the batch, of num_mini_batches optimizer steps each.
    -> metrics"""
    parameters = optimizer.param_groups[0]["params"]
    history = []
    for rows in common.mini_batches(batch, cfg, "shuffle", step):
        metrics = backward(policy, parameters, batch, ref_logps, A, rows, cfg)
        longest = cfg.max_grad_norm or math.inf
        metrics["grad_norm"] = nn.utils.clip_grad_norm_(parameters, longest).item()
        optimizer.step()
        history.append(metrics)
    metrics = common.mean_metrics(history) | {DIFFERENCE: history[0][DIFFERENCE]}
    if cfg.beta > 0:
        token_kl = grpo.kl(batch.logps, ref_logps, "k1") * batch.mask           # (B, T)
        metrics["kl"] = (token_kl.sum() / batch.mask.sum()).item()
    return metrics


# ---- 4. training -----------------------------------------------------------------------------

DIFFERENCE = "sampling/sampling_logp_difference/mean"           # between sampler and trainer


def learning_rate(cfg, step):
    """Compute the learning rate of step 0, 1, ...: first a warm-up, then a schedule. The rates of
    the first and the last step are above 0. -> float"""
    progress = max(0.0, (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps))
    decay = {"constant": 1.0, "linear": 1 - progress,
             "cosine": (1 + math.cos(math.pi * progress)) / 2}[cfg.lr_scheduler_type]
    return cfg.learning_rate * min(1.0, (step + 1) / max(1, cfg.warmup_steps)) * decay


def main(argv=None):
    cfg = plumbing.parse_flags(Config, argv)
    task = load_task(cfg)
    processes.join(cfg)
    cfg = dataclasses.replace(cfg, model=models.resolved(cfg.model))
    policy = Policy(models.source(cfg), cfg)
    longest = policy.longest(task)
    reference = policy                          # with the adapter switched off, if there is one
    if cfg.beta > 0 and cfg.lora_rank == 0:
        reference = Policy(cfg.model, cfg)
    if cfg.engine == "vllm":
        policy.engine = load_engine(policy, longest + cfg.max_completion_length)
    optimizer = torch.optim.AdamW(
        [weight for weight in policy.model.parameters() if weight.requires_grad],
        lr=cfg.learning_rate, weight_decay=0.0,
        foreach=False,                          # True takes 4 more bytes per parameter
        fused=cfg.device != "mps")              # needs no copies of the largest weight
    check_sampler(policy, common.held_out_problems(task, 4))
    task.machinery = SimpleNamespace(score=score_all, decode=policy.decode)     # for observers
    columns = dict(grpo.COLUMNS)
    if cfg.beta == 0:
        del columns["kl"]                               # there is no reference
    run = processes.Run(cfg, task, policy, columns)
    torch.set_num_threads(cfg.num_threads)
    run.begin()
    run.start(evaluate, optimizer)
    for step in range(run.step, cfg.max_steps):
        batch = sample_batch(policy, task, cfg, step)       # questions, outputs, rewards
        A = METHODS[cfg.method].advantages(batch.rewards, cfg.scale_rewards)    # (P, G)
        A = A.view(-1, 1).to(cfg.device)                    # (B, 1)
        weights, differences = correct(policy, batch, cfg)
        ref_logps = batch.logps                             # unused without beta
        if cfg.beta > 0:
            with models.without_adapter(reference.model):
                ref_logps, _ = score_all(
                    reference, batch.prompts, batch.tokens, cfg.temperature, cfg.kernel)
        rate = optimizer.param_groups[0]["lr"] = learning_rate(cfg, step)
        metrics = update(policy, optimizer, batch, ref_logps, weights * A, cfg, step)
        metrics["learning_rate"] = rate
        run.log(batch, A, metrics | differences)
    return run.finish()


if __name__ == "__main__":
    processes.start(main)
