"""The equations of the scripts on a pretrained model: any causal language model of transformers.

  python pretrained/train.py --model DIR_OR_NAME --task countdown
  python pretrained/train.py --model DIR_OR_NAME --data train.jsonl --eval_data test.jsonl
  torchrun --nproc_per_node 8 pretrained/train.py --model DIR_OR_NAME --parallel fsdp

Advantages, ratios, losses, KL and averages are imported from grpo.py, gspo.py and reinforce.py,
whose docstrings have the equations, and the weights that correct a sampler which computes otherwise
than the trainer from examples/lag.py. New is what the scripts do without: prompts of several
lengths, and several processes. Of these each knows the whole batch, samples its share of it, and
learns from its share of the micro-batches; the gradients are added up, so that the result is that
of one process. With --parallel fsdp each keeps but a part of weights, gradients and optimizer.
docs/real-models.md says what fits where.
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
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import grpo
import gspo
import reinforce
from examples import lag
from tasks import calls, rewards
from tasks import problems as problem_files

try:
    import transformers

    from pretrained import models
    from pretrained import rewards as own
    from pretrained import run as processes
except ImportError as error:
    common.fail(f"{error.name} is missing: pip install -r pretrained/requirements.txt")

# Shapes: as in the scripts. A prompt that is shorter than W tokens has NO_TOKEN on its left.
NO_TOKEN = -1
METHODS = {"grpo": grpo, "gspo": gspo, "reinforce": reinforce}


# ---- 1. configuration ------------------------------------------------------------------------

# flags that do nothing here, or not with each method
OF_SCRIPTS = (*common.Base.__annotations__, "init_from", "curriculum", "dynamic_sampling",
              "entropy_coef", "overlong_buffer")
OF_RATIOS = ("loss_type", "scale_rewards", "beta", "delta")
OF_MEMORY = {"micro_batch_size", "sample_batch_size", "gradient_checkpointing", "parallel",
             "engine_memory"}


@dataclasses.dataclass(frozen=True)
class Config(grpo.Config):
    model: str = ""                     # a causal language model: a folder, or a name on the Hub
    dtype: Literal["float32", "bfloat16"] = "float32"   # of products; weights stay float32
    lora_rank: int = 0                  # train an adapter of this rank, not the weights; 0: these
    lora_alpha: int = 32                # what the adapter adds is multiplied by this / lora_rank
    lora_target_modules: str = "all-linear"     # names of its matrices, such as q_proj,v_proj
    parallel: Literal["replicate", "fsdp"] = "replicate"    # has a process the model, or a part?
    engine: Literal["transformers", "vllm"] = "transformers"    # what completes prompts
    engine_memory: float = 0.3 if common.HAS_CUDA else 0.1      # share of memory that vllm takes
    data: str = ""                      # file of lines {"prompt": ..., "answer": ...}, not a task
    eval_data: str = ""                 # a held-out one; else a tenth of --data
    reward_file: str = ""               # Python file with your rewards: see pretrained/rewards.py
    system_prompt: str = ""             # system message of each conversation that has none
    instruction: str = ""               # text that comes before each prompt
    chat_template: bool = True          # prompts are conversations, if the tokenizer can do that
    chat_template_kwargs: str = "{}"    # its arguments, as JSON, such as {"enable_thinking": false}
    method: Literal[tuple(METHODS)] = "grpo"    # the script with the equations
    baseline: Literal["none", "batch", "mean", "rloo"] = "none"     # with reinforce: b in (2)
    epsilon: float = None               # lower clip range (eps_low); None: see __post_init__
    epsilon_high: float = None          # upper clip range (eps_high), also
    importance_sampling_correction: Literal[lag.CORRECTIONS] = None     # None: truncate if vllm
    importance_sampling_cap: float = 2.0    # the highest weight (C), above 0
    max_completion_length: int = 256    # tokens per completion at most (T)
    sample_batch_size: int = 256        # rows that are sampled together
    num_eval_problems: int = 128        # largest number of held-out problems
    num_eval_samples: int = 4           # samples per held-out problem, at the start and the end
    learning_rate: float = 1e-6         # of AdamW
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"     # to 0 at max_steps
    warmup_steps: int = 0               # steps in which the learning rate grows to its value
    micro_batch_size: int = 8           # rows per backward pass, of short ones more
    gradient_checkpointing: bool = False    # compute activations twice, and store few
    save_steps: int = 10                # steps between checkpoints: 12 bytes per parameter
    weight_decay: float = 0.0           # of AdamW
    num_threads: int = 1                # CPU threads of an operation
    has_task_defaults = False           # they are for small policies
    MAY_DIFFER = grpo.Config.MAY_DIFFER | OF_MEMORY | {"num_threads"}

    def __post_init__(self):
        """A range that is not given is that of the script; but gspo.py's suits a small policy, so
        with gspo it is that of the paper. vllm rounds otherwise than the trainer: with it there is
        a correction, unless the flag says none."""
        papers = {"epsilon": 3e-4, "epsilon_high": 4e-4} if self.method == "gspo" else {}
        for name in ("epsilon", "epsilon_high"):
            if getattr(self, name) is None:
                own = getattr(METHODS[self.method].Config, name, 0.0)
                object.__setattr__(self, name, papers.get(name, own))
        if self.importance_sampling_correction is None:
            correction = "truncate" if self.engine == "vllm" else "none"
            object.__setattr__(self, "importance_sampling_correction", correction)

    def rules(self):
        yield from super().rules()
        yield self.model != "", "--model: is missing; name a folder, or a model on Hugging Face"
        yield self.data or not self.eval_data, "--eval_data: does nothing without --data"
        has_model = "model" in self.reward.split("+")
        yield not has_model, f"--reward {self.reward}: only the scripts have a reward model"
        yield self.importance_sampling_cap > 0, "--importance_sampling_cap 0: no sample has weight"
        try:
            is_object = isinstance(json.loads(self.chat_template_kwargs), dict)
        except ValueError:
            is_object = False
        yield is_object, (f"--chat_template_kwargs {self.chat_template_kwargs}: is not a JSON "
                          'object such as {"enable_thinking": false}')
        others = dict.fromkeys(OF_SCRIPTS, "the scripts")
        if self.method == "reinforce":
            others |= dict.fromkeys(OF_RATIOS, "grpo and gspo")
        else:
            others["baseline"] = "reinforce"
        if self.data:
            others["task"] = "runs without --data"
        if self.reward_file:
            others["reward"] = "runs without --reward_file"
        if self.lora_rank == 0:
            others |= dict.fromkeys(("lora_alpha", "lora_target_modules"), "runs with --lora_rank")
        if self.engine == "vllm":
            others["sample_batch_size"] = "transformers"
        else:
            others["engine_memory"] = "vllm"
        for name, whose in others.items():
            is_default = getattr(self, name) == self.__dataclass_fields__[name].default
            yield is_default, f"--{name}: is for {whose}"


def load_task(cfg):
    """The task, or that of --data. Exits with one line if a flag does not fit it."""
    if cfg.data:
        task = problem_files.FromFile(cfg)
        task = task if cfg.reward == "accuracy" else rewards.Rewards(cfg, task)
    else:
        task = common.load_task(cfg, grpo.verify)
    return own.Own(cfg, task) if cfg.reward_file else task


# ---- 2. the policy ---------------------------------------------------------------------------

class Policy:
    """A causal language model, its tokenizer, and `ends`, the tokens that end a completion."""

    def __init__(self, path, cfg):
        self.cfg = cfg
        self.model, self.tokenizer = models.load(path)
        self.ends = models.end_tokens(self.model, self.tokenizer)
        if not self.ends:
            common.fail(f"--model {path}: has no token that ends a text")
        # its top_p or repetition_penalty would sample otherwise than score() computes
        self.generation_config = self.model.generation_config       # which checkpoints keep
        self.model.generation_config = transformers.GenerationConfig(pad_token_id=self.ends[0])
        room = getattr(self.model.config, "max_position_embeddings", None) or math.inf
        self.room = room - cfg.max_completion_length    # tokens that a prompt may have
        models.remove_dropout(self.model)
        if cfg.lora_rank > 0:
            models.add_adapter(self.model, cfg.lora_rank, cfg.dtype, cfg.lora_alpha,
                               cfg.lora_target_modules)
        if cfg.gradient_checkpointing:
            models.checkpoint_activations(self.model)
        if cfg.parallel == "fsdp" and processes.dist.is_initialized():    # not in report.ask
            processes.shard(self.model, cfg.dtype)
        self.model.to(cfg.device).train()               # in which checkpointing works
        self.head = models.Head(self.model)
        is_cast = cfg.dtype == "bfloat16" and cfg.parallel == "replicate"       # FSDP casts itself
        self.autocast = lambda: torch.autocast(
            cfg.device, dtype=torch.bfloat16, enabled=is_cast)
        self.engine = None                              # where it is not transformers

    def token_ids(self, prompt):
        """Encode a prompt, by the model's chat template if it has one. Exits with one line if that
        fails. -> list"""
        cfg = self.cfg
        chat = problem_files.messages(prompt) if cfg.data else []
        more = json.loads(cfg.chat_template_kwargs)
        template = self.tokenizer.chat_template if cfg.chat_template else None
        if template is None:
            if chat or more or cfg.system_prompt:
                common.fail("--system_prompt, --chat_template_kwargs and conversations in --data "
                            f"need a chat template: {cfg.model} has none, or a flag turns it off")
            return self.tokenizer(cfg.instruction + prompt).input_ids
        for name in more:
            if name not in str(template):
                common.fail(f"--chat_template_kwargs: the template of {cfg.model} has no {name}")
        chat = chat or [{"role": "user", "content": prompt}]
        chat[-1]["content"] = cfg.instruction + chat[-1]["content"]
        if cfg.system_prompt and chat[0]["role"] != "system":
            chat.insert(0, {"role": "system", "content": cfg.system_prompt})
        try:
            text = self.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=False, **more)
        except Exception as error:                      # a template may raise anything
            common.fail(f"--model {cfg.model}: its chat template fails (--no-chat_template does "
                        f"without it): {' '.join(str(error).split())}")
        return self.tokenizer(text, add_special_tokens=False).input_ids     # it has its own

    def encode(self, problems):
        """Encode prompts. Exits with one line if one is too long. -> token ids (B, W)"""
        rows = [self.token_ids(problem.prompt) for problem in problems]
        W = max(len(row) for row in rows)
        if self.room < W:
            T = self.cfg.max_completion_length
            common.fail(f"--max_completion_length {T}: a prompt has {W} tokens, the model reads "
                        f"{self.room + T}")
        rows = [[NO_TOKEN] * (W - len(row)) + row for row in rows]
        return torch.tensor(rows, device=self.cfg.device)

    def longest(self, task):
        """Find how many tokens a prompt has at most. Problems of --data whose prompts are too long
        are left out. Exits with one line if that leaves none. -> int"""
        if self.cfg.data:
            prompts = {problem.prompt for problem in (*task.train, *task.test)}
            lengths = {prompt: len(self.token_ids(prompt)) for prompt in prompts}
            return task.leave_out(lengths, self.room)
        empty = self.encode([common.Problem("", "")]).shape[1]
        return empty + task.prompt_width + 2            # a character is a token at most

    def decode(self, ids):
        """The text of token ids, but for their end. -> str"""
        return self.tokenizer.decode([i for i in ids if i not in self.ends])


def score(policy, prompts, completions, temperature=1.0, kernel="auto"):
    """Log-probabilities and entropies of completions. (B, W), (B, T) -> (B, T), (B, T)"""
    prompts = prompts[:, (prompts != NO_TOKEN).any(dim=0)]      # no wider than the longest here
    ids = torch.cat([prompts, completions], dim=1)                              # (B, W + T)
    is_token = (ids != NO_TOKEN).long()
    positions = (is_token.cumsum(dim=1) - 1).clamp(min=0)
    inputs = {"input_ids": ids.clamp(min=0), "attention_mask": is_token, "position_ids": positions,
              "use_cache": False, "logits_to_keep": completions.shape[1] + 1}

    def read(logits, tokens):
        if not (common.kernels and common.kernels.applies(kernel, logits)):
            logits = logits.float()                             # which Triton does itself
        return grpo.logprobs(logits, tokens, temperature, kernel)
    with policy.autocast():
        if policy.head.is_large(policy.model, completions):
            with policy.head.scoring(read, completions):
                return policy.model(**inputs).logits.unbind(dim=-1)
        return read(policy.model(**inputs).logits[:, :-1], completions)


@torch.no_grad()
def score_all(policy, prompts, completions, temperature=1.0, kernel="auto"):
    """The same without a gradient, by all processes, a few rows at a time."""
    found = []
    for rows in processes.share(len(prompts)).split(policy.cfg.micro_batch_size):
        found.append(score(policy, prompts[rows], completions[rows], temperature, kernel))
    logps, entropy = [processes.merged(torch.cat(parts), len(prompts)) for parts in zip(*found)]
    return logps, entropy


# ---- 3. sampling -----------------------------------------------------------------------------

class Draw(transformers.LogitsProcessor):
    """Leaves each row one token, and adds it to its completion: uniforms[i, t] draws token t of row
    i, so that no row depends on another; without them it is the likeliest."""

    def __init__(self, completions, temperature, uniforms=None):
        self.completions = completions
        self.temperature = temperature
        self.uniforms = uniforms                                                # (b, T) or None
        self.t = 0

    def __call__(self, ids, logits):
        log_p = torch.log_softmax(logits.float() / self.temperature, dim=-1)    # (b, V)
        p = log_p.exp()
        token = log_p.argmax(dim=-1, keepdim=True)                              # (b, 1)
        if self.uniforms is not None:
            cdf = p.cumsum(dim=-1)
            threshold = self.uniforms[:, self.t, None] * cdf[:, -1:]            # it ends near 1
            token = torch.searchsorted(cdf, threshold, right=True).clamp(max=cdf.shape[1] - 1)
        self.t += 1
        logp = log_p.gather(1, token)                                           # (b, 1)
        entropy = -(p * log_p.clamp(min=-1e4)).sum(dim=-1)                      # (b,)
        sampled = zip(self.completions, token[:, 0].tolist(), logp[:, 0].tolist(), entropy.tolist())
        added = [completion.add(*of_token) for completion, *of_token in sampled]
        added = torch.tensor(added, device=token.device)[:, None]
        return torch.full_like(logits, -torch.inf).scatter(1, added, 0.0)

    def have_ended(self, ids, logits):
        """Which rows need no more tokens, as transformers asks. -> (b,)"""
        return torch.tensor([one.has_ended for one in self.completions], device=ids.device)


@torch.no_grad()
def generate(policy, prompts, completions, cfg, uniforms=None):
    """Complete prompts (b, W) by transformers; uniforms (b, T)."""
    draw = Draw(completions, cfg.temperature, uniforms)
    policy.model.eval()
    with policy.autocast():
        policy.model.generate(
            input_ids=prompts.clamp(min=0), attention_mask=(prompts != NO_TOKEN).long(),
            do_sample=False, logits_processor=[draw], stopping_criteria=[draw.have_ended],
            synced_gpus=False, max_new_tokens=cfg.max_completion_length)
    policy.model.train()


def complete(policy, task, cfg, problems, generator=None):
    """Completions of the prompts of problems, greedy ones without a generator, each process its
    share. -> Batch"""
    B, T = len(problems), cfg.max_completion_length
    share = processes.share(B)                                                  # (b,)
    prompts = policy.encode(problems)                                           # (B, W)
    completions = [calls.Completion(policy, task, problems[i]) for i in share]
    if policy.engine:
        policy.engine.update(policy.model)      # here, so that no sample is of older weights
        ids = [row[row != NO_TOKEN].tolist() for row in prompts[share]]
        seeds = torch.randint(2**62, (B, T), generator=generator)[share]        # (b, T)
        temperature = 0.0 if generator is None else cfg.temperature
        policy.engine.complete(ids, completions, T, temperature, seeds)
    else:
        uniforms = None
        if generator is not None:
            uniforms = torch.rand(B, T, generator=generator)[share].to(cfg.device)      # (b, T)
        with processes.unsharded(policy.model):
            parts = torch.arange(len(share)).split(cfg.sample_batch_size)
            for rows in tqdm(parts, "sampling", leave=False, disable=None):
                generate(policy, prompts[share[rows]], [completions[i] for i in rows], cfg,
                         None if uniforms is None else uniforms[rows])
    return gather(policy, problems, prompts, completions)


def gather(policy, problems, prompts, completions):
    """The completions of all processes. -> Batch"""
    B, T = len(problems), policy.cfg.max_completion_length
    slots = [torch.tensor(one.slots) for one in completions]                    # (t, 4) each
    slots = torch.stack([nn.functional.pad(x, (0, 0, 0, T - len(x))) for x in slots])
    slots = processes.merged(slots, B).to(prompts.device)                       # (B, T, 4)
    tokens, mask, logps, entropy = slots.unbind(dim=2)                          # (B, T) each
    ends = torch.tensor([(len(one.ids), one.has_ended) for one in completions])
    lengths, has_ended = processes.merged(ends, B).to(prompts.device).unbind(dim=1)     # (B,) each
    tokens = tokens.long()
    texts = [policy.decode(ids[:n]) for ids, n in zip(tokens.tolist(), lengths.tolist())]
    return common.Batch(tokens, mask, logps, entropy, lengths, has_ended == 0, problems, prompts,
                        texts)


class SamplerCheck:
    """Compares a sampler with the trainer, on a few short completions of `problems`, greedy ones
    and random ones: before training, because an engine may not have got the weights, and after
    updates, because it may have kept the old ones. Exits with one line if they differ. A call
    returns whether the updates so far are large enough for that."""
    BOUND = {"float32": 1e-3, "bfloat16": 0.1}      # nats a token; rounding differs by less
    ROUGH = 0.02        # in float32: Gemma2's soft caps on a CPU; a GPU, whose products are shorter

    def __init__(self, policy, problems):
        self.policy = policy
        self.problems = [problem for problem in problems for _ in range(4)]
        self.cfg = dataclasses.replace(
            policy.cfg, max_completion_length=min(16, policy.cfg.max_completion_length))
        self.before = None
        self.bound = self.BOUND[self.cfg.dtype]
        has_caps = getattr(policy.model.config, "attn_logit_softcapping", None)
        if has_caps or self.cfg.device != "cpu":
            self.bound = max(self.bound, self.ROUGH)

    def __call__(self):
        policy, cfg = self.policy, self.cfg
        found = []
        for generator, temperature in (
                (common.generator(cfg.seed, "check"), cfg.temperature), (None, 1.0)):
            batch = complete(policy, None, cfg, self.problems, generator)
            scored, _ = score_all(policy, batch.prompts, batch.tokens, temperature, cfg.kernel)
            differences = ((scored - batch.logps) * batch.mask).abs()
            found.append((batch, scored, (differences.sum() / batch.mask.sum()).item()))
        if not all(difference <= self.bound for *_, difference in found):       # nan is not
            difference = max(difference for *_, difference in found)
            common.fail(f"--engine {cfg.engine}: does not sample from the trainer's weights: its "
                        f"log-probabilities differ by {difference:.2g} nats a token, and rounding "
                        f"by less than {self.bound}; try --engine transformers", code=1)
        batch, scored, difference = found[0]    # before a sync that is late catches up
        now = batch.tokens, batch.mask, scored, batch.logps
        if self.before is None:
            self.before, self.rounding = now, difference
            return False
        tokens, mask, *logps = self.before
        # the tokens that follow the same text before and after the update
        same = ((tokens == batch.tokens) | (mask == 0)).cumprod(dim=1) * mask * batch.mask
        moved, followed = [((new - old) * same)[same > 0] for new, old in zip(now[2:], logps)]
        is_seen = moved.abs().mean() > 10 * self.rounding
        if is_seen and (followed - moved).abs().mean() > 0.5 * moved.abs().mean():
            common.fail(f"--engine {cfg.engine}: samples from older weights than the trainer's: "
                        f"updates moved log-probabilities by {moved.abs().mean():.2g} nats a "
                        "token, and its samples do not show that", code=1)
        return bool(is_seen)


def sample_batch(policy, task, cfg, step):
    """P problems and G completions of each, rewarded: a function of policy, task, seed and step, by
    the random numbers of the scripts. -> Batch"""
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
    """Complete different held-out problems, with the same random numbers in every run. -> scores"""
    G = 1 if greedy else cfg.num_eval_samples
    held_out = common.held_out_problems(task, cfg.num_eval_problems)
    problems = [problem for problem in held_out for _ in range(G)]
    generator = None if greedy else common.generator("evaluation")
    batch = task.judge(complete(policy, task, cfg, problems, generator), G, "evaluation")
    found = task.scores(batch, greedy)
    if cfg.reward_file:
        found["greedy_reward" if greedy else "sampled_reward"] = batch.rewards.mean().item()
    return found


# ---- 4. the update ---------------------------------------------------------------------------

def correct(policy, batch, cfg):
    """Put the trainer's log pi_old in the place of the sampler's, if the flags say so.
    -> weights (B, T), metrics"""
    if cfg.importance_sampling_correction == "none":
        return batch.mask, {}
    logps, entropy = score_all(policy, batch.prompts, batch.tokens, cfg.temperature, cfg.kernel)
    batch.entropy = entropy * batch.mask                # which vllm does not know
    return lag.correct(batch, logps * batch.mask, cfg)


def token_losses(logps, old_logps, ref_logps, A, mask, cfg):
    """What (5) takes the average of. (b, T) each -> (b, T)"""
    if cfg.method == "reinforce":
        return reinforce.policy_loss(logps, A, mask)
    token_loss = METHODS[cfg.method].policy_loss(
        logps, old_logps, A, mask, cfg.loss_type, cfg.epsilon, cfg.epsilon_high, cfg.delta)
    if cfg.beta > 0:
        token_kl = grpo.kl(logps * mask, ref_logps * mask, cfg.kl_estimator,
                           grpo.log_ratio(logps, old_logps, mask))
        token_loss = token_loss + cfg.beta * token_kl
    return token_loss


def backward(policy, parameters, batch, ref_logps, A, rows, cfg):
    """The gradient of (5) over `rows`, of whose micro-batches each process takes its share.
    -> metrics"""
    method = METHODS[cfg.method]
    surrogate = "plain"
    average = "sequence_sum"
    if method is not reinforce:
        surrogate, average = method.LOSS_TYPES[cfg.loss_type]
    if cfg.mask_truncated_completions:
        rows = rows[~batch.is_truncated[rows]]
    num_sequences = len(rows)                                   # of all processes
    num_tokens = batch.mask[rows].sum().clamp(min=1)
    if cfg.beta == 0:
        rows = rows[A[rows].any(dim=1)]                         # the others have no gradient
    sizes = batch.prompts.shape[1] + batch.lengths              # a prompt needs memory, too
    parts = common.micro_batches(rows, sizes, cfg.micro_batch_size)

    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)    # zeros: Adam steps even without signal
    sums = collections.Counter()
    max_log_ratio = 0.0
    for part, is_real in processes.rounds(parts):       # or it fills up, and has no weight
        T = int(batch.lengths[part].max())
        tokens = batch.tokens[part, :T]                                         # (b, T)
        mask = batch.mask[part, :T]
        old_logps = batch.logps[part, :T]
        logps, _ = score(policy, batch.prompts[part], tokens, cfg.temperature, cfg.kernel)
        token_loss = token_losses(logps, old_logps, ref_logps[part, :T], A[part, :T], mask, cfg)
        loss = method.aggregate(                                                # eq. (5)
            token_loss, mask, average, num_sequences, num_tokens, cfg.max_completion_length)
        processes.backward(is_real * loss, cfg.parallel)

        log_rho = grpo.log_ratio(logps.detach(), old_logps, mask)               # (b, T)
        log_s = gspo.log_ratio(logps.detach(), old_logps, mask) if method is gspo else log_rho
        clipped = grpo.is_clipped(log_s, A[part, :T], cfg.epsilon, cfg.epsilon_high) * mask
        sums["loss"] += is_real * loss.item()
        sums["clipped"] += is_real * clipped.sum().item()
        sums["difference"] += is_real * log_rho.abs().sum().item()
        max_log_ratio = max(max_log_ratio, log_rho.abs().max().item())
    processes.add_gradients(parameters, cfg.parallel)
    sums = {name: sum(processes.gathered(sums[name])) for name in ("loss", "clipped", "difference")}
    metrics = {"loss": sums["loss"], "max_log_ratio": max(processes.gathered(max_log_ratio)),
               DIFFERENCE: sums["difference"] / batch.mask[rows].sum().clamp(min=1).item()}
    if surrogate == "clip":
        metrics["clip_ratio/region_mean"] = sums["clipped"] / num_tokens.item()
    return metrics


def update(policy, optimizer, batch, ref_logps, A, cfg, step):
    """num_iterations passes over the batch, num_mini_batches optimizer steps each. -> metrics"""
    parameters = optimizer.param_groups[0]["params"]
    history = []
    for rows in common.mini_batches(batch, cfg, "shuffle", step):
        metrics = backward(policy, parameters, batch, ref_logps, A, rows, cfg)
        metrics["grad_norm"] = processes.clip_gradients(parameters, cfg.max_grad_norm)
        optimizer.step()
        history.append(metrics)
    metrics = common.mean_metrics(history) | {DIFFERENCE: history[0][DIFFERENCE]}
    if cfg.beta > 0:
        token_kl = grpo.kl(batch.logps, ref_logps, "k1") * batch.mask           # (B, T)
        metrics["kl"] = (token_kl.sum() / batch.mask.sum()).item()
    return metrics


# ---- 5. training -----------------------------------------------------------------------------

COLUMNS = {"reward": "reward", "signal": "signal", "length": "completions/mean_length",
           "entropy": "entropy", "kl": "kl", "clip": "clip_ratio/region_mean", "grad": "grad_norm"}
DIFFERENCE = "sampling/sampling_logp_difference/mean"           # between sampler and trainer


def learning_rate(cfg, step):
    """The learning rate of a step, the first of which is 0: a warm-up, then a schedule. Neither it
    nor the last one is zero. -> float"""
    progress = max(0.0, (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps))
    decay = {"constant": 1.0, "linear": 1 - progress,
             "cosine": (1 + math.cos(math.pi * progress)) / 2}[cfg.lr_scheduler_type]
    return cfg.learning_rate * min(1.0, (step + 1) / max(1, cfg.warmup_steps)) * decay


def load_engine(policy, longest):
    """vLLM for texts of so many tokens. Exits with one line if it cannot have this model."""
    try:
        from pretrained import engine
        return engine.Engine(policy, longest)
    except ImportError as error:
        common.fail(f"--engine vllm: {error.name} is missing: pip install -r "
                    "pretrained/requirements-vllm.txt")
    except Exception as error:              # vLLM raises nearly anything
        common.fail(f"--engine vllm: cannot run {policy.cfg.model}: {' '.join(str(error).split())}")


def main(argv=None):
    cfg = common.parse_flags(Config, argv)
    task = load_task(cfg)
    processes.join(cfg)
    cfg = dataclasses.replace(cfg, model=models.resolved(cfg.model, cfg.resume_from_checkpoint))
    policy = Policy(models.source(cfg), cfg)
    longest = policy.longest(task)
    reference = policy                          # without its adapter, if it has one
    if cfg.beta > 0 and cfg.lora_rank == 0:
        reference = Policy(cfg.model, cfg)
    if cfg.engine == "vllm":
        policy.engine = load_engine(policy, longest + cfg.max_completion_length)
    optimizer = torch.optim.AdamW(
        [weight for weight in policy.model.parameters() if weight.requires_grad],
        lr=cfg.learning_rate, weight_decay=cfg.weight_decay,
        foreach=False)                          # it would take 4 bytes more per parameter
    check = SamplerCheck(policy, common.held_out_problems(task, 4))
    if policy.engine:
        check()
    task.machinery = SimpleNamespace(score=score_all, decode=policy.decode)     # for observers
    columns = dict(COLUMNS)
    if policy.engine and cfg.importance_sampling_correction == "none":
        del columns["entropy"]                          # which nobody computes
    run = processes.Run(cfg, task, policy, columns)
    torch.set_num_threads(cfg.num_threads)
    run.begin()
    method = METHODS[cfg.method]
    which = cfg.baseline if method is reinforce else cfg.scale_rewards

    run.start(evaluate, optimizer)
    has_seen = policy.engine is None        # whether the check has seen that the engine follows
    began = run.step
    while run.step < cfg.max_steps and run.accuracy() < cfg.stop_at:
        batch = sample_batch(policy, task, cfg, run.step)   # questions, outputs, rewards
        A = method.advantages(batch.rewards, which).view(-1, 1).to(cfg.device)  # (B, 1)
        weights, differences = correct(policy, batch, cfg)
        ref_logps = batch.logps                             # of no use without beta
        if cfg.beta > 0:
            with models.without_adapter(reference.model):
                ref_logps, _ = score_all(
                    reference, batch.prompts, batch.tokens, cfg.temperature, cfg.kernel)
        rate = optimizer.param_groups[0]["lr"] = learning_rate(cfg, run.step)
        metrics = update(policy, optimizer, batch, ref_logps, weights * A, cfg, run.step)
        number = run.step - began + 1                       # of updates
        if not has_seen and number & (number - 1) == 0:     # 1, 2, 4, 8 ...
            has_seen = check()
        metrics["learning_rate"] = rate
        run.log(batch, A, metrics | differences)
        run.save(every=cfg.save_steps)
    return run.finish()


if __name__ == "__main__":
    processes.start(main)
