"""Sample completions for pretrained/train.py, with vLLM, with `generate`, or on CUDA, where that is
possible, with `generate_recorded`; and check before training that the sampler computes what the
trainer computes."""
import copy
import dataclasses

import torch
import transformers
from torch import nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import common
from pretrained import models
from pretrained import run as processes
from pretrained.policy import NO_TOKEN, score, score_all
from tasks import calls

OTHER = "choose a model of a family that docs/real-models.md lists"


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
            if t == 0 or not continues.all():
                output[name].reorder_cache(row_in_cache)
                is_token, positions = is_token[row_in_cache], positions[row_in_cache]
            row_in_cache = torch.arange(len(rows), device=rows.device)
            positions = positions[:, -1:] + 1
            is_token = nn.functional.pad(is_token, (0, 1), value=1)
            inputs = {"input_ids": added[continues, None], "position_ids": positions,
                      "attention_mask": None if is_mamba else is_token, name: output[name]}
    policy.model.train()


def can_record(policy, completions):
    """Whether generate_recorded works: on CUDA, if all layers store only keys and values, weights
    can be copied, and no environment inserts text."""
    layers = {*map(type, transformers.DynamicCache(config=policy.model.config).layers)}
    can_copy = policy.cfg.device == "cuda" and not models.is_quantized(policy.model)
    is_fixed = layers <= {DynamicLayer, DynamicSlidingWindowLayer}
    return can_copy and is_fixed and not any(one.calls for one in completions)


def generate_recorded(policy, prompts, completions, cfg, uniforms=None):
    """Do the same as `generate` with the sampler of real.py, which records the kernels of a token.
    The weights are a copy in the dtype of products, so none is cast at each token. As the entropy,
    each token gets minus its log-probability, whose mean is the entropy."""
    import real  # here, because it looks for a GPU
    weights = {id(weight): weight.to(getattr(torch, cfg.dtype))
               for weight in policy.model.parameters()}
    model = copy.deepcopy(policy.model, weights).eval()         # its buffers are not rounded
    model.generation_config.eos_token_id = policy.ends
    real.W, real.T = prompts.shape[1], cfg.max_completion_length
    real.TEMPERATURE, real.DEVICE = cfg.temperature, cfg.device
    draws = torch.ones(len(prompts), real.T, device=cfg.device)
    if uniforms is not None:
        draws = uniforms.clamp(min=2**-25)              # 0 would draw a token of probability 0
    with torch.no_grad():
        tokens, logps = real.sample_few(model, prompts, draws, greedy=uniforms is None)
    for one, ids, row in zip(completions, tokens[:, real.W:].tolist(), logps.tolist()):
        one.extend(ids, row, [-logp for logp in row], T=real.T)


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
        for rows in torch.arange(len(share)).split(cfg.sample_batch_size):
            sample = generate_recorded if can_record(policy, completions) else generate
            sample(policy, prompts[share[rows]], [completions[i] for i in rows], cfg,
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
