"""Train any causal language model of transformers with the equations of the scripts.

  python pretrained/train.py --model DIR_OR_NAME --task countdown
  python pretrained/train.py --model DIR_OR_NAME --data train.jsonl --eval_data test.jsonl
  torchrun --nproc_per_node 8 pretrained/train.py --model DIR_OR_NAME --data train.jsonl

The scripts can only train small policies of their own. This file applies the same equations to
models that others have pretrained: it imports advantages, ratios, losses, KL and averages from
grpo.py and gspo.py, whose docstrings explain the equations. If the sampler computes
differently from the trainer, weights from examples/lag.py correct for that.

Such models need two things that the scripts do without. First, prompts have different lengths, so
the shorter ones are padded on the left. Second, a run may use several processes. Each process knows
the whole batch, samples its share of it, and learns from its share of the micro-batches. The
gradients are added up, so the result is the same as with one process.
docs/real-models.md shows what fits where.
"""
import collections
import copy
import dataclasses
import json
import math
import re
import sys
import time
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
from examples import distill, lag
from tasks import calls, rewards
from tasks import problems as problem_files
from tasks.scores import part_of

try:
    import transformers

    from pretrained import models
    from pretrained import rewards as own
    from pretrained import run as processes
except ImportError as error:
    common.fail(f"{error.name} is missing: pip install -r pretrained/requirements.txt")

# Shapes are those of the scripts. NO_TOKEN pads prompts on the left, completions on the right.
NO_TOKEN = -1
OTHER = "choose a model of a family that docs/real-models.md lists"
METHODS = {"grpo": grpo, "gspo": gspo}


# ---- 1. configuration ------------------------------------------------------------------------

# flags that only the scripts use, and that only affect memory
OF_SCRIPTS = (*common.Base.__annotations__, "init_from", "curriculum", "dynamic_sampling",
              "entropy_coef", "overlong_buffer")
OF_FILES = {"data", "eval_data", "reward_file"}         # which may move, but not change
OF_MEMORY = {"micro_batch_size", "sample_batch_size", "gradient_checkpointing", "engine_memory"}


@dataclasses.dataclass(frozen=True)
class Config(grpo.Config):
    model: str = ""                     # causal language model: a folder, a run, a name on the Hub
    dtype: Literal["float32", "bfloat16"] = "float32"   # dtype of products, not of weights
    lora_rank: int = 0                  # rank of an adapter to train; 0: train all weights
    lora_alpha: int = 32                # scale (a) of the adapter, which adds B A a / lora_rank
    lora_target_modules: str = "all-linear"     # matrices to adapt, such as q_proj,v_proj
    engine: Literal["transformers", "vllm"] = "transformers"    # library that samples completions
    engine_memory: float = 0.3 if common.HAS_CUDA else 0.1      # share of memory that vLLM uses
    data: str = ""                      # file of {"prompt": ..., "answer": ...}, instead of --task
    eval_data: str = ""                 # file of held-out problems; default: a tenth of --data
    reward_file: str = ""               # Python file with your rewards, see pretrained/rewards.py
    system_prompt: str = ""             # system message for conversations without one
    instruction: str = ""               # text to put before each prompt
    chat_template: bool = True          # use the chat template, if the tokenizer has one
    chat_template_kwargs: str = "{}"    # template arguments, as JSON: {"enable_thinking": false}
    teacher: str = ""                   # model of the same tokenizer, whose KL replaces L_t
    distillation_topk: int = 64         # likely tokens of the teacher that the KL compares (k)
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
    micro_batch_size: int = 8           # rows per backward pass; more if they are short
    gradient_checkpointing: bool = False    # store few activations, compute others twice
    save_steps: int = 10                # steps between checkpoints, each of 12 bytes per parameter
    num_threads: int = 1                # CPU threads per operation
    has_task_defaults = False           # because they suit small policies
    MAY_DIFFER = grpo.Config.MAY_DIFFER | OF_MEMORY | {"num_threads"} | OF_FILES

    def __post_init__(self):
        """Replace None. Clip ranges come from the script, except that those of gspo.py suit small
        policies, so gspo gets its paper's. vLLM rounds differently from the trainer, so by default
        it gets a correction."""
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
                (("beta", "delta"), not self.teacher, "cannot be used with --teacher"),
                (("distillation_topk",), self.teacher, "needs --teacher"),
                (("lora_alpha", "lora_target_modules"), self.lora_rank > 0, "needs --lora_rank"),
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


# ---- 2. the policy ---------------------------------------------------------------------------

class Policy:
    """A causal language model, its tokenizer, and `ends`, the tokens that end a completion."""

    def __init__(self, path, cfg):
        self.cfg = cfg
        self.model, self.tokenizer = models.load(path)
        self.num_tokens = len(self.model.get_input_embeddings().weight)
        self.ends = models.end_tokens(self.model, self.tokenizer)
        if not self.ends:
            common.fail(f"--model {path}: has no token that ends a text; choose another model")
        if models.is_quantized(self.model) and cfg.lora_rank == 0:
            common.fail(f"--model {path}: its weights are quantized, so only an adapter can be "
                        "trained: add --lora_rank 8, or choose a model that is not quantized")
        # Both files go into checkpoints. A top_p or repetition_penalty in the second would change
        # the distribution, and score() would not know.
        self.config = copy.deepcopy(self.model.config)
        self.generation_config = models.generation_config(path)
        self.model.generation_config = transformers.GenerationConfig(pad_token_id=self.ends[0])
        room = getattr(self.model.config, "max_position_embeddings", None) or math.inf
        self.room = room - cfg.max_completion_length    # largest number of prompt tokens
        models.remove_dropout(self.model)
        if cfg.lora_rank > 0:
            models.add_adapter(self.model, cfg.lora_rank, cfg.lora_alpha, cfg.dtype,
                               cfg.lora_target_modules)
        if cfg.gradient_checkpointing:
            models.checkpoint_activations(self.model)
        self.model.to(cfg.device).train()               # checkpointing works only in this mode
        self.head = models.Head(self.model)
        self.autocast = lambda: torch.autocast(
            cfg.device, dtype=torch.bfloat16, enabled=cfg.dtype == "bfloat16")
        self.engine = None                              # None: transformers samples
        self.is_warned = False                          # that prompts lack a token
        self.last_line = time.monotonic()               # when `generate` last printed one

    def text_of(self, prompt):
        """Write a prompt as the model reads it, in its chat template if it has one. Exits with one
        line if the template fails. -> str"""
        cfg = self.cfg
        chat = problem_files.messages(prompt) if cfg.data else []
        more = json.loads(cfg.chat_template_kwargs)
        if not self.has_template():
            if chat or more or cfg.system_prompt:
                common.fail("--system_prompt, --chat_template_kwargs and conversations in --data "
                            f"need a chat template: {cfg.model} has none, or --no-chat_template "
                            "turns it off")
            return cfg.instruction + prompt
        chat = chat or [{"role": "user", "content": prompt}]
        chat[-1]["content"] = cfg.instruction + chat[-1]["content"]
        if cfg.system_prompt and chat[0]["role"] != "system":
            chat.insert(0, {"role": "system", "content": cfg.system_prompt})
        try:
            return self.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=False, **more)
        except Exception as error:                      # a template may raise anything
            common.fail(f"--model {cfg.model}: its chat template fails, try --no-chat_template: "
                        f"{models.one_line(error)}")

    def has_template(self):
        return self.cfg.chat_template and self.tokenizer.chat_template is not None

    def ids_of(self, text, **options):
        """Encode a text. Exits with one line if the model has no embedding of a token. -> list"""
        ids = self.tokenizer(text, **options).input_ids
        if max(ids, default=0) >= self.num_tokens:
            token = self.tokenizer.decode([max(ids)])
            common.fail(f"--model {self.cfg.model}: its tokenizer has the token {token!a}, but the "
                        f"model has only {self.num_tokens} embeddings: call transformers' "
                        "resize_token_embeddings, and save the model again")
        return ids

    def token_ids(self, prompt):
        """Encode a prompt. Exits with one line if it has no token. -> list"""
        text = self.text_of(prompt)
        ids = bare = self.ids_of(text, add_special_tokens=False)
        if not self.has_template():                     # a template writes special tokens itself
            ids = self.ids_of(text)
            while bare and ids[-1] != bare[-1]:         # a token that ends texts was appended
                ids.pop()
        if not ids:
            common.fail(f"--model {self.cfg.model}: the prompt {prompt!a} has no token; leave it "
                        "out, or put an --instruction before it")
        has_bos = self.tokenizer.bos_token_id in (None, ids[0], *self.ends)
        if not (has_bos or self.has_template() or self.is_warned):
            self.is_warned = True
            bos = self.tokenizer.bos_token
            print(f"warning: prompts do not begin with {bos}. If the texts that the model has "
                  f"learned do, add it: --instruction '{bos}'", flush=True)
        return ids

    def encode(self, problems):
        """Encode prompts. Exits with one line if one is too long. -> token ids (B, W)"""
        rows = [self.token_ids(problem.prompt) for problem in problems]
        W = max(len(row) for row in rows)
        if self.room < W:
            T = self.cfg.max_completion_length
            common.fail(f"--max_completion_length {T}: a prompt has {W} tokens, and the model "
                        f"reads {self.room + T} in all; lower it")
        rows = [[NO_TOKEN] * (W - len(row)) + row for row in rows]
        return torch.tensor(rows, device=self.cfg.device)

    def longest(self, task):
        """Find how many tokens the longest prompt has. Leaves out problems of --data whose prompts
        are too long, and exits with one line if no problem is left. -> int"""
        if self.cfg.data:
            prompts = {problem.prompt for problem in (*task.train, *task.test)}
            lengths = {prompt: len(self.token_ids(prompt)) for prompt in prompts}
            return task.leave_out(lengths, self.room)
        shortest = self.encode([common.Problem("0", "")]).shape[1]
        return shortest + task.prompt_width + 2         # a character is at most one token

    def decode(self, ids):
        """Decode token ids, except those that end a text. -> str"""
        ids = [i for i in ids if i not in self.ends]
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def opening(self, prompt):
        """Find the tag at the end of a prompt with which its completion begins: some templates
        open a thought, or leave it empty. -> str, "" if there is none"""
        found = re.search(r"(<think>\s*(</think>\s*)?|<answer>\s*)$", self.text_of(prompt))
        return found[0].rstrip() if found else ""


def score(policy, prompts, completions, temperature=1.0, kernel="auto", with_entropy=True,
          read=None):
    """Compute log-probabilities of completions, and entropies, or what read(logits, places) returns
    from logits (.., V) and places (..) in the flattened completions. All are 0.0 where there is no
    token. (B, W), (B, T) -> (B, T) and, if with_entropy, (B, T)"""
    T = completions.shape[1]
    prompts, completions = (ids[:, (ids != NO_TOKEN).any(dim=0)] for ids in (prompts, completions))
    ids = torch.cat([prompts, completions], dim=1)              # (B, w + t)  without empty columns
    is_token = (ids != NO_TOKEN).long()
    positions = (is_token.cumsum(dim=1) - 1).clamp(min=0)
    inputs = {"input_ids": ids.clamp(min=0), "attention_mask": is_token, "position_ids": positions,
              "use_cache": False, "logits_to_keep": completions.shape[1] + 1}

    unused = completions == NO_TOKEN
    places = torch.arange(unused.numel(), device=ids.device).view_as(completions)

    def read_logps(logits, places):
        tokens = completions.flatten()[places].clamp(min=0)
        is_triton = common.kernels and common.kernels.applies(kernel, logits)
        logits = logits if is_triton else logits.float()
        if with_entropy or is_triton:
            return grpo.logprobs(logits, tokens, temperature, kernel)[:1 + with_entropy]
        logits = logits.div(temperature).flatten(0, 1)                          # (n, V)
        return [-nn.functional.cross_entropy(
            logits, tokens.flatten(), reduction="none").view_as(tokens)]
    read = read or read_logps
    with policy.autocast():
        is_large = policy.head.is_large(policy.model, completions)
    with policy.autocast():         # a new one: older versions of torch keep casts without gradient
        if is_large:
            with policy.head.scoring(read, places.masked_fill(unused, -1)):
                found = policy.model(**inputs).logits.unbind(dim=-1)
        else:
            found = read(policy.model(**inputs).logits[:, :-1], places)
    return [nn.functional.pad(x.masked_fill(unused, 0.0), (0, T - x.shape[1])) for x in found]


@torch.no_grad()
def score_all(policy, prompts, completions, temperature=1.0, kernel="auto"):
    """Do the same as score without a gradient, in all processes, a few rows at a time."""
    pairs = [score(policy, prompts[rows], completions[rows], temperature, kernel)
             for rows in processes.share(len(prompts)).split(policy.cfg.micro_batch_size)]
    logps, entropy = [processes.merged(torch.cat(parts), len(prompts)) for parts in zip(*pairs)]
    return logps, entropy


# ---- 3. sampling -----------------------------------------------------------------------------

def draw(logits, temperature, uniforms=None):
    """Draw a token for each row by its own random number in uniforms (b,); without uniforms, take
    the most likely token. Overwrites the logits (b, V), to save memory.
    -> tokens, log-probabilities, entropies (b,)"""
    log_p = logits.float().div_(temperature)                                    # (b, V)
    log_p.sub_(log_p.amax(dim=-1, keepdim=True))
    p = log_p.exp()                                     # (b, V)  not divided by its sum yet
    log_p.clamp_(min=-1e4)                              # p log_p is 0 where p is 0
    total = p.sum(dim=-1)                                                       # (b,)
    entropy = total.log() - torch.linalg.vecdot(p, log_p) / total               # (b,)
    if uniforms is None:
        token = log_p.argmax(dim=-1)                                            # (b,)
    else:
        cdf = p.cumsum_(dim=-1)
        threshold = uniforms[:, None] * cdf[:, -1:]
        token = torch.searchsorted(cdf, threshold, right=True)[:, 0].clamp(max=cdf.shape[1] - 1)
    return token, log_p.gather(1, token[:, None])[:, 0] - total.log(), entropy


@torch.no_grad()
def generate(policy, prompts, completions, cfg, uniforms=None):
    """Complete prompts (b, W) with transformers; uniforms are (b, T). Equal prompts are read once,
    and rows that have ended are dropped."""
    T = cfg.max_completion_length
    prompts, row_in_cache = prompts.unique(dim=0, return_inverse=True)          # (b,)
    prompts = prompts[:, (prompts != NO_TOKEN).any(dim=0)]
    is_token = (prompts != NO_TOKEN).long()
    positions = (is_token.cumsum(dim=1) - 1).clamp(min=0)
    inputs = {"input_ids": prompts.clamp(min=0), "position_ids": positions,
              "attention_mask": is_token}
    rows = torch.arange(len(completions), device=prompts.device)    # (b,) rows that have not ended
    policy.model.eval()
    with policy.autocast():
        for t in range(T):
            output = policy.model(**inputs, use_cache=True, logits_to_keep=1)
            is_mamba = "cache_params" in output                     # and no "past_key_values"
            name = "cache_params" if is_mamba else "past_key_values"
            logits = output.logits[:, -1]
            if t == 0:
                logits = logits[row_in_cache]
            sampled = draw(logits, cfg.temperature, None if uniforms is None else uniforms[rows, t])
            growing = [completions[row] for row in rows.tolist()]
            added = [one.add(*slot) for one, *slot in zip(growing, *(x.tolist() for x in sampled))]
            added = torch.tensor(added, device=rows.device)                     # (b,)
            continues = torch.tensor([not one.has_ended for one in growing], device=rows.device)
            if not continues.any():
                break
            rows, row_in_cache = rows[continues], row_in_cache[continues]
            if time.monotonic() > policy.last_line + 30:
                policy.last_line = time.monotonic()
                print(f"sampling: {t + 1} of at most {T} tokens; {len(rows)} of {len(completions)} "
                      "completions have not ended", flush=True)
            if t == 0 or not continues.all():
                output[name].reorder_cache(row_in_cache)
                is_token, positions = is_token[row_in_cache], positions[row_in_cache]
            row_in_cache = torch.arange(len(rows), device=rows.device)
            positions = positions[:, -1:] + 1
            is_token = nn.functional.pad(is_token, (0, 1), value=1)
            inputs = {"input_ids": added[continues, None], "position_ids": positions,
                      "attention_mask": None if is_mamba else is_token, name: output[name]}
    policy.model.train()


def complete(policy, task, cfg, problems, generator=None):
    """Sample a completion for each problem, or take the most likely tokens if generator is None.
    Each process does its share. -> Batch"""
    B, T = len(problems), cfg.max_completion_length
    share = processes.share(B)                                                  # (b,)
    prompts = policy.encode(problems)                                           # (B, W)
    completions = [calls.Completion(policy, task, problems[i]) for i in share]
    if policy.engine:
        policy.engine.update(policy.model)      # at each call, so no sample is of older weights
        ids = [row[row != NO_TOKEN].tolist() for row in prompts[share]]
        seeds = torch.randint(2**62, (B, T), generator=generator)[share]        # (b, T)
        temperature = 0.0 if generator is None else cfg.temperature
        policy.engine.complete(ids, completions, T, temperature, seeds)
    else:
        uniforms = None
        if generator is not None:
            uniforms = torch.rand(B, T, generator=generator)[share].to(cfg.device)      # (b, T)
        policy.last_line = time.monotonic()
        for rows in torch.arange(len(share)).split(cfg.sample_batch_size):
            generate(policy, prompts[share[rows]], [completions[i] for i in rows], cfg,
                     None if uniforms is None else uniforms[rows])
    return gather(policy, problems, prompts, completions)


def gather(policy, problems, prompts, completions):
    """Collect the completions of all processes. -> Batch"""
    B, T = len(problems), policy.cfg.max_completion_length
    slots = [torch.tensor(one.slots) for one in completions]                    # (t, 4) each
    slots = torch.stack([nn.functional.pad(x, (0, 0, 0, T - len(x))) for x in slots])
    slots = processes.merged(slots, B).to(prompts.device)                       # (B, T, 4)
    tokens, mask, logps, entropy = slots.unbind(dim=2)                          # (B, T) each
    ends = torch.tensor([(len(one.ids), one.has_ended) for one in completions])
    lengths, has_ended = processes.merged(ends, B).to(prompts.device).unbind(dim=1)     # (B,) each
    is_token = torch.arange(T, device=lengths.device) < lengths[:, None]
    tokens = tokens.long().masked_fill(~is_token, NO_TOKEN)
    texts = [policy.decode(ids[:n]) for ids, n in zip(tokens.tolist(), lengths.tolist())]
    if not policy.cfg.reward_file:      # functions of such a file get completions alone, as in TRL
        openings = {prompt: policy.opening(prompt) for prompt in {one.prompt for one in problems}}
        texts = [openings[one.prompt] + text for one, text in zip(problems, texts)]
    return common.Batch(tokens, mask, logps, entropy, lengths, has_ended == 0, problems, prompts,
                        texts)


ROUNDING = {"float32": 1e-3, "bfloat16": 0.1}   # bounds in nats per token
ROUGH = 0.02            # float32 bound for Gemma2, because of its soft caps, and on a GPU


def check_sampler(policy, problems):
    """Compare the sampler with the trainer before training, on a few short completions: the model
    may have noise that only the trainer has, or the engine may not have received the weights. Exits
    with one line if they differ by more than rounding does, if padding changes the trainer's
    scores, or if the model cannot be run."""
    cfg = dataclasses.replace(
        policy.cfg, max_completion_length=min(16, policy.cfg.max_completion_length))
    bound = ROUNDING[cfg.dtype]
    has_caps = getattr(policy.model.config, "attn_logit_softcapping", None)
    if has_caps or cfg.device != "cpu":
        bound = max(bound, ROUGH)
    problems = [problem for problem in problems for _ in range(4)]
    try:
        difference = effect_of_padding(policy, policy.encode(problems), cfg.max_completion_length)
        if not difference <= bound:                                     # True for nan
            common.fail(f"--model {cfg.model}: depends on padding: log-probabilities differ by "
                        f"{difference:.2g} nats per token next to a longer prompt, rounding by "
                        f"less than {bound}; {OTHER}")
        difference = effect_of_sampler(policy, problems, cfg)
    except Exception as error:                  # the code of a family raises nearly anything
        if isinstance(error, torch.OutOfMemoryError) or "closed by peer" in str(error):
            raise                               # the second: another process prints why it failed
        common.fail(f"--model {cfg.model}: cannot be run: {models.one_line(error)}; {OTHER}")
    if not difference <= bound:
        what = f"--model {cfg.model}: computes differently when it samples"
        advice = OTHER
        if policy.engine:
            what = f"--engine {cfg.engine}: does not sample from the trainer's weights"
            advice = "try --engine transformers"
        common.fail(f"{what}: its log-probabilities differ by {difference:.2g} nats per token, "
                    f"rounding by less than {bound}; {advice}", code=1)


@torch.no_grad()
def effect_of_padding(policy, prompts, T):
    """Score a text after the second half of a prompt, alone and next to the whole prompt.
    -> mean difference of log-probabilities"""
    longest = prompts[(prompts != NO_TOKEN).sum(dim=1).argmax()]                # (W,)
    half = longest[len(longest) // 2:]
    padded = nn.functional.pad(half, (len(longest) - len(half), 0), value=NO_TOKEN)
    tokens = longest[:T].expand(2, -1)                                          # (2, T)
    alone, _ = score(policy, half[None], tokens[:1])
    beside, _ = score(policy, torch.stack([padded, longest]), tokens)
    return (alone[0] - beside[0]).abs().mean().item()


def effect_of_sampler(policy, problems, cfg):
    """Sample at random, and then greedily. -> the larger mean difference of log-probabilities"""
    differences = []
    for generator, temperature in (
            (common.generator(cfg.seed, "check"), cfg.temperature),
            (None, 1.0 if policy.engine else cfg.temperature)):         # vLLM takes 0, reports 1
        batch = complete(policy, None, cfg, problems, generator)
        scored, _ = score_all(policy, batch.prompts, batch.tokens, temperature, cfg.kernel)
        difference = ((scored - batch.logps) * batch.mask).abs().sum() / batch.mask.sum()
        differences.append(difference)
    return torch.stack(differences).max().item()                        # nan if one is


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


# ---- 4. the update ---------------------------------------------------------------------------

def correct(policy, batch, cfg):
    """If there is a correction, replace the sampler's log pi_old by the trainer's.
    -> weights (B, T), metrics"""
    if cfg.importance_sampling_correction == "none":
        return batch.mask, {}
    logps, entropy = score_all(policy, batch.prompts, batch.tokens, cfg.temperature, cfg.kernel)
    batch.entropy = entropy * batch.mask                # vLLM reports none
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


def load_teacher(cfg, policy):
    """Load the model --teacher. Exits with one line if it has other tokens than the policy."""
    cfg = dataclasses.replace(cfg, lora_rank=0, gradient_checkpointing=False)
    teacher = Policy(str(models.last_checkpoint(cfg.teacher) or cfg.teacher), cfg)
    if teacher.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        common.fail(f"--teacher {cfg.teacher}: its tokens differ from those of {cfg.model}; choose "
                    "a teacher with the same tokenizer")
    return teacher


def learn_from(teacher, policy, prompts, tokens, cfg):
    """Compute log-probabilities of tokens (b, T), and the KL(pi || pi_T) of examples/distill.py for
    the teacher's k likely tokens and the rest. No column of tokens is empty. -> (b, T) each"""
    V = policy.num_tokens                   # the teacher may have other columns without a token
    k = min(cfg.distillation_topk, V - 1, teacher.num_tokens - 1)

    def read_teacher(logits, _):
        log_t = (logits[..., :V].float() / cfg.temperature).log_softmax(dim=-1)
        S = log_t.topk(k).indices                               # exact as float32
        return torch.cat([distill.events(log_t, S), S], dim=-1).unbind(dim=-1)

    def read_student(logits, places):
        log_p = (logits.float() / cfg.temperature).log_softmax(dim=-1)
        log_t, S = found[places].split([k + 1, k], dim=-1)
        chosen = tokens.flatten()[places].clamp(min=0)
        return (log_p.gather(-1, chosen[..., None])[..., 0],
                distill.divergence(distill.events(log_p, S.long()), log_t, 1.0))
    with torch.no_grad():
        found = torch.stack(score(teacher, prompts, tokens, read=read_teacher), dim=-1)
    found = found.flatten(0, 1)                                                 # (b T, 2 k + 1)
    return score(policy, prompts, tokens, read=read_student)


def backward(policy, parameters, batch, ref_logps, A, rows, cfg, teacher=None):
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
    sums = collections.Counter()
    max_log_ratio = 0.0
    for part in parts[processes.RANK::processes.WORLD_SIZE]:
        T = int(batch.lengths[part].max())
        tokens = batch.tokens[part, :T]                                         # (b, T)
        mask = batch.mask[part, :T]
        old_logps = batch.logps[part, :T]
        if teacher is None:
            [logps] = score(policy, batch.prompts[part], tokens, cfg.temperature, cfg.kernel,
                            with_entropy=False)
            token_loss = token_losses(
                logps, old_logps, ref_logps[part, :T], A[part, :T], mask, cfg)
        else:
            logps, token_loss = learn_from(teacher, policy, batch.prompts[part], tokens, cfg)
        loss = method.aggregate(                                                # eq. (5)
            token_loss, mask, average, num_sequences, num_tokens, cfg.max_completion_length)
        loss.backward()

        log_rho = grpo.log_ratio(logps.detach(), old_logps, mask)               # (b, T)
        log_s = gspo.log_ratio(logps.detach(), old_logps, mask) if method is gspo else log_rho
        clipped = grpo.is_clipped(log_s, A[part, :T], cfg.epsilon, cfg.epsilon_high) * mask
        sums["loss"] += loss.item()
        sums["clipped"] += clipped.sum().item()
        sums["difference"] += log_rho.abs().sum().item()
        max_log_ratio = max(max_log_ratio, log_rho.abs().max().item())
    if processes.WORLD_SIZE > 1:
        for parameter in parameters:
            processes.dist.all_reduce(parameter.grad)
    sums = {name: sum(processes.gathered(sums[name])) for name in ("loss", "clipped", "difference")}
    metrics = {"loss": sums["loss"], "max_log_ratio": max(processes.gathered(max_log_ratio)),
               DIFFERENCE: sums["difference"] / batch.mask[rows].sum().clamp(min=1).item()}
    if surrogate == "clip":
        metrics["clip_ratio/region_mean"] = sums["clipped"] / num_tokens.item()
    return metrics


def update(policy, optimizer, batch, ref_logps, A, cfg, step, teacher=None):
    """Make num_iterations passes over the batch, of num_mini_batches optimizer steps each.
    -> metrics"""
    parameters = optimizer.param_groups[0]["params"]
    history = []
    for rows in common.mini_batches(batch, cfg, "shuffle", step):
        metrics = backward(policy, parameters, batch, ref_logps, A, rows, cfg, teacher)
        longest = cfg.max_grad_norm or math.inf
        metrics["grad_norm"] = nn.utils.clip_grad_norm_(parameters, longest).item()
        optimizer.step()
        history.append(metrics)
    metrics = common.mean_metrics(history) | {DIFFERENCE: history[0][DIFFERENCE]}
    if teacher is not None:
        metrics["teacher_kl"] = metrics["loss"]
    if cfg.beta > 0:
        token_kl = grpo.kl(batch.logps, ref_logps, "k1") * batch.mask           # (B, T)
        metrics["kl"] = (token_kl.sum() / batch.mask.sum()).item()
    return metrics


# ---- 5. training -----------------------------------------------------------------------------

DIFFERENCE = "sampling/sampling_logp_difference/mean"           # between sampler and trainer


def learning_rate(cfg, step):
    """Compute the learning rate of step 0, 1, ...: first a warm-up, then a schedule. The rates of
    the first and the last step are above 0. -> float"""
    progress = max(0.0, (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps))
    decay = {"constant": 1.0, "linear": 1 - progress,
             "cosine": (1 + math.cos(math.pi * progress)) / 2}[cfg.lr_scheduler_type]
    return cfg.learning_rate * min(1.0, (step + 1) / max(1, cfg.warmup_steps)) * decay


def load_engine(policy, longest):
    """Start vLLM for texts of up to `longest` tokens. Exits with one line if it cannot run."""
    try:
        from pretrained import engine
        return engine.Engine(policy, longest)
    except ImportError as error:
        common.fail(f"--engine vllm: {error.name} is missing: pip install -r "
                    "pretrained/requirements-vllm.txt")
    except Exception as error:              # vLLM raises nearly anything
        common.fail(f"--engine vllm --engine_memory {policy.cfg.engine_memory}: cannot run "
                    f"{policy.cfg.model}: {models.one_line(error)}; try a different "
                    "--engine_memory, or --engine transformers")


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
    teacher = load_teacher(cfg, policy) if cfg.teacher else None
    if cfg.engine == "vllm":
        policy.engine = load_engine(policy, longest + cfg.max_completion_length)
    optimizer = torch.optim.AdamW(
        [weight for weight in policy.model.parameters() if weight.requires_grad],
        lr=cfg.learning_rate, weight_decay=0.0,
        foreach=False,                          # True takes 4 more bytes per parameter
        fused=cfg.device == "cpu")              # needs no copies of the largest weight
    check_sampler(policy, common.held_out_problems(task, 4))
    task.machinery = SimpleNamespace(score=score_all, decode=policy.decode)     # for observers
    columns = dict(grpo.COLUMNS)
    if policy.engine and cfg.importance_sampling_correction == "none":
        del columns["entropy"]                          # neither vLLM nor the trainer computes it
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
        if teacher is not None:
            A = batch.mask                                  # so every token counts
        weights, differences = correct(policy, batch, cfg)
        ref_logps = batch.logps                             # unused without beta
        if cfg.beta > 0:
            with models.without_adapter(reference.model):
                ref_logps, _ = score_all(
                    reference, batch.prompts, batch.tokens, cfg.temperature, cfg.kernel)
        rate = optimizer.param_groups[0]["lr"] = learning_rate(cfg, step)
        metrics = update(policy, optimizer, batch, ref_logps, weights * A, cfg, step, teacher)
        metrics["learning_rate"] = rate
        run.log(batch, A, metrics | differences)
    return run.finish()


if __name__ == "__main__":
    processes.start(main)
