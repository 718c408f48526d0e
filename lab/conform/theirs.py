"""Run the code of TRL and verl on the test vectors. None of this code is copied, so the packages
have to be installed (.venv-conform, by make conform).

TRL and VERL map the name of a file of vectors to a function of the inputs and parameters of its
cases. If a trainer has no code for a case, the function raises NotImplementedError. A trainer of
TRL is made from its own configuration, for the base of grpo.py. Then we replace its model, sampler
and verifier by functions that return the numbers of a case. A prompt is the number of a row, so
these functions can look up its log-probabilities.
"""
import functools
import logging
import tempfile
import warnings
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace as Some

import numpy as np
import torch
import torch.nn.functional as F
import transformers
import trl
import verl
from datasets import Dataset
from tensordict import TensorDict
from trl.experimental.cpo import CPOTrainer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer import utils
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils import torch_functional
from verl.utils.tensordict_utils import assign_non_tensor
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

import grpo
import vectors
from engines import names

VERSIONS = {module.__name__: module.__version__ for module in (trl, verl, torch)}
TOLERANCE = 1e-6        # verl adds 1e-8 to counts, which is visible where terms cancel
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
transformers.utils.logging.disable_progress_bar()


def missing(*_, **__):
    raise NotImplementedError


def parted(mask, truncated=None, **given):
    """Collect the tensors of a vector under the names of a Batch; what is missing is 0.
    -> namespace, and the other arguments"""
    tensors = {name: x for name, x in given.items() if torch.is_tensor(x)}
    B, T = mask.shape
    rows = torch.arange(B)
    lengths = (mask * torch.arange(1, T + 1)).amax(dim=1).clamp(min=1).long()
    ends = torch.full((B,), grpo.EOS)
    if truncated is not None:
        ends[truncated > 0] = 1
    zeros = dict.fromkeys(("logps", "old_logps", "ref_logps", "entropy"), 0 * mask)
    x = Some(**zeros | {"rewards": rows.view(1, B).to(mask)} | tensors)
    x.mask = mask
    x.old_logps = x.old_logps.detach()                  # trainers hold them as data
    x.lengths = lengths
    x.slots = (torch.arange(T) < lengths[:, None]).to(mask)     # 1 also in holes of the mask
    x.prompts = rows[:, None]
    x.tokens = torch.ones(B, T).long().scatter(1, lengths[:, None] - 1, ends[:, None])
    return x, {name: x for name, x in given.items() if name not in tensors}


# ---- 1. TRL ----------------------------------------------------------------------------------

EXPORTED = Path(tempfile.mkdtemp(), "model")            # compare.py exports the base to it
HERE = {"output_dir": EXPORTED.parent, "use_cpu": True, "bf16": False, "report_to": "none",
        "activation_checkpointing": False, "save_strategy": "no", "disable_tqdm": True,
        "remove_unused_columns": False, "lr_scheduler_type": "constant"}
EXAMPLE = {"prompt": "a", "chosen": "b", "rejected": "c"}


@functools.cache
def trainer(kind, **flags):
    """Make a trainer of TRL for the base of grpo.py. -> trainer"""
    more = {} if kind == "DPO" else {"reward_funcs": lambda **_: None}
    made = getattr(trl, f"{kind}Trainer")(
        model=str(EXPORTED), args=getattr(trl, f"{kind}Config")(**HERE | flags),
        train_dataset=Dataset.from_list([EXAMPLE]), **more)
    made.model.train()
    return made


def rollout(batch, logps):
    """Return what a sampler would return for a batch. -> dict of lists"""
    def cut(values):
        return [row[:n] for row, n in zip(values.tolist(), batch.lengths.tolist())]
    return {"prompt_ids": batch.prompts.tolist(), "completion_ids": cut(batch.tokens),
            "env_mask": cut(batch.mask.long()), "logprobs": cut(logps)}


def sampled(x, kind="GRPO", parts=1, A=None, **flags):
    """Run a trainer that samples on a case. A: advantages (B,) that replace the trainer's.
    -> loss, advantages (B,)"""
    B, T = x.mask.shape
    made = trainer(kind, num_generations=x.rewards.shape[1], steps_per_generation=parts,
                   gradient_accumulation_steps=parts, per_device_train_batch_size=B // parts,
                   **{"max_completion_length": T, "num_iterations": 2, "beta": 0.0} | flags)
    outputs = rollout(x, x.old_logps)
    made.rollout_func = lambda *_: dict(outputs)
    if kind == "RLOO":                                  # it has no rollout_func
        made._generate = lambda prompts: (outputs["prompt_ids"], outputs["completion_ids"], prompts)
    by_model = {made.ref_model: x.ref_logps}

    def log_probs(model, input_ids, *_, **__):
        logps = x.logps if torch.is_grad_enabled() else by_model.get(model, x.old_logps)
        return logps[input_ids[:, 0]], x.entropy[input_ids[:, 0]], None
    made._calculate_rewards = lambda *_: x.rewards.view(-1, 1)
    made._get_per_token_logps_and_entropies = log_probs
    made.current_gradient_accumulation_steps = parts
    batch = made._generate_and_score_completions([EXAMPLE] * B)
    if A is not None:
        batch["advantages"] = A
    losses = [made._compute_loss(made.model, one) for one in utils.split_tensor_dict(batch, parts)]
    return sum(losses), batch["advantages"]


def trl_flags(method, how, **given):
    """Translate the parameters of a vector into the configuration of GRPOTrainer. -> dict"""
    return names.translate(names.find(method=method, how=how), given, "trl")


def trl_policy_loss(mask, advantages, **given):
    if advantages.dim() == 2 or len(mask) < 2 or not mask[:, -1].any():
        missing()       # GRPOTrainer has an advantage for each output, and no slot that all lack
    x, parameters = parted(mask, **given)
    return sampled(x, A=advantages, use_bias_correction_kl=False, **trl_flags(**parameters))[0]


def trl_recipe(mask, advantage, eps=None, estimator=None, micro_batch=6, nll_coef=None,
               mask_truncated=False, **given):
    scale = names.SCALES.get(advantage) or missing()
    if nll_coef or estimator == "k2" or eps not in (None, 1e-4):
        missing()
    x, parameters = parted(mask, **given)
    return sampled(x, parts=6 // micro_batch, scale_rewards=scale,
                   use_bias_correction_kl=estimator == "k3_ratio",
                   mask_truncated_completions=mask_truncated, **trl_flags(**parameters))[0]


def trl_advantages(rewards, method, eps=None, ddof=1, **_):
    scale = names.SCALES.get(method)
    x, _ = parted(torch.ones(rewards.numel(), 1).to(rewards), rewards=rewards)
    if method == "rloo":
        _, A = sampled(x, "RLOO")
    elif scale in (None, "mean") or eps not in (None, 1e-4) or ddof != 1:
        missing()
    else:
        _, A = sampled(x, scale_rewards=scale)
    return A.view_as(rewards)


def trl_pair_loss(chosen, rejected, ref_chosen, ref_rejected, mask_chosen, mask_rejected, method,
                  averaged, beta, nll_coef=None, label_smoothing=0.0, gamma=None):
    kinds = {("dpo", False): "sigmoid", ("dpo", True): "sigmoid_norm", ("ipo", False): "ipo",
             ("ipo", True): "ipo", ("robust", False): "robust"}
    kind = kinds.get((method, averaged)) or missing()
    flags = {"loss_type": (kind,)}
    if nll_coef:
        flags = {"loss_type": (kind, "sft"), "loss_weights": (1.0, nll_coef)}
    made = trainer("DPO", beta=beta, label_smoothing=label_smoothing, **flags)
    x, _ = parted(torch.cat([mask_chosen, mask_rejected]))

    def model(*logps):
        zeros = torch.zeros_like(x.mask)
        logps = torch.where(x.mask > 0, torch.cat(logps), 0.0)
        return lambda **_: Some(log_probs=logps, entropy=zeros, mean_logits=zeros,
                                is_top1=zeros > 0)
    made.ref_model = model(ref_chosen.detach(), ref_rejected.detach())
    slots = F.pad(x.slots, (1, 0), value=1.0)
    return made._compute_loss(model(chosen, rejected), {
        "input_ids": slots.long(), "attention_mask": slots,
        "completion_mask": F.pad(x.mask, (1, 0))}, return_outputs=False)


def trl_preference_loss(chosen, rejected, method, beta, gamma=None, **_):
    if method != "simpo":
        missing()                       # DPOTrainer's losses need tokens
    stub = Some(alpha=0.0, beta=beta, loss_type="simpo", simpo_gamma=gamma, label_smoothing=0.0,
                accelerator=Some(device="cpu"))
    return CPOTrainer.cpo_loss(stub, chosen, rejected)[0]


TRL = {
    "logprobs": lambda logits, tokens, temperature: (
        utils.selective_log_softmax(logits / temperature, tokens),
        utils.entropy_from_logits(logits / temperature)),
    "advantages": trl_advantages, "policy_loss": trl_policy_loss, "recipe": trl_recipe,
    "preference_loss": trl_preference_loss, "pair_loss": trl_pair_loss,
    "overlong_penalty": lambda lengths, max_length, buffer: torch.tensor(
        get_soft_overlong_punishment(max_length, buffer)([[1] * int(n) for n in lengths]))}


# ---- 2. verl ---------------------------------------------------------------------------------

PlatformCUDA.device_name = "cpu"            # verl has no platform for CPUs
PlatformCUDA.current_device = lambda _: "cpu"
OF_LOSS = {field.name for field in fields(PolicyLossConfig)}


def policy_update(x, A, parts=1, **flags):
    """Compute ppo_loss, the loss of verl's actor. A: (B,) or (B, T) -> scalar"""
    of_loss = {name: flags.pop(name) for name in flags.keys() & OF_LOSS}
    actor = FSDPActorConfig(
        rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=PolicyLossConfig(**of_loss),
        use_kl_loss="kl_loss_coef" in flags, **{"clip_ratio_c": 1e9} | flags)
    A = A if A.dim() == 2 else A[:, None]
    data = TensorDict({
        "prompts": x.prompts, "responses": x.tokens, "response_mask": x.mask,
        "attention_mask": F.pad(x.slots, (1, 0), value=1.0).long(),
        "old_log_probs": x.old_logps, "ref_log_prob": x.ref_logps, "advantages": A * x.mask,
        "log_probs": F.pad(x.logps, (0, 1)), "entropy": F.pad(x.entropy, (0, 1))}, len(x.mask))
    num_tokens = x.mask.sum().item()
    assign_non_tensor(data, dp_size=1, batch_num_tokens=num_tokens, global_batch_size=len(data))
    total = 0.0
    for part in data.split(len(data) // parts):
        is_there = part["attention_mask"] > 0
        output = {name: part[name][is_there] for name in ("log_probs", "entropy")}
        loss, _ = ppo_loss(actor, output, part)
        total = total + loss
    return total


def verl_flags(method, how, **given):
    """Translate the parameters of a vector into the configuration of verl's actor. -> dict"""
    flags = names.translate(names.find(method=method), given, "verl")
    return flags | {"loss_agg_mode": names.AVERAGES[how]}


def verl_policy_loss(mask, advantages, **given):
    x, parameters = parted(mask, **given)
    return policy_update(x, advantages, **verl_flags(**parameters))


def verl_recipe(rewards, mask, advantage, eps=None, estimator="k3", micro_batch=6, beta=None,
                entropy_coef=None, token_advantages=None, nll_coef=None, mask_truncated=False,
                **given):
    if estimator not in names.KL_TYPES or nll_coef or mask_truncated:
        missing()
    A = token_advantages
    if advantage != "given":
        A = verl_advantages(rewards, advantage, eps).flatten()
    x, parameters = parted(mask, **given)
    flags = verl_flags(**parameters)
    if beta:
        flags |= {"kl_loss_coef": beta, "kl_loss_type": names.KL_TYPES[estimator]}
    if entropy_coef:
        flags["entropy_coeff"] = entropy_coef
    return policy_update(x, A, parts=6 // micro_batch, **flags)


def estimate(name, rewards, mask, G, **flags):
    """Compute advantages with one of verl's estimators, from rewards of tokens. -> (B, T)"""
    A, _ = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=rewards, response_mask=mask, index=np.arange(len(mask)) // G, **flags)
    return A * mask


def verl_advantages(rewards, method, eps=None, ddof=1, lengths=None, greedy_rewards=None,
                    more_rewards=None, **_):
    P, G = rewards.shape
    if ddof == 0 or method not in ("grpo", "mean", "rloo", "opo", "passk", "remax", "gdpo"):
        missing()
    lengths = lengths if method == "opo" else torch.ones_like(rewards)
    mask = (torch.arange(int(lengths.max())) < lengths.view(-1, 1)).to(rewards)
    if method == "gdpo":
        return core_algos.compute_gdpo_outcome_advantage(
            0 * mask, mask, np.arange(P * G) // G, config={"gdpo_reward_keys": ["a", "b"]},
            non_tensor_batch={"a": rewards.flatten().numpy(), "b": more_rewards.flatten().numpy()},
            batch={"prompts": mask[:, :1], "attention_mask": mask.expand(-1, 2).long()},
        )[0].view(P, G)
    flags = {"mean": {"norm_adv_by_std_in_grpo": False},
             "passk": {"config": {"norm_adv_by_std_in_grpo": False}}}.get(method, {})
    if method == "remax":
        flags = {"reward_baselines": greedy_rewards.repeat_interleave(G)}
    if eps is not None:
        flags["epsilon"] = eps
    first = F.pad(rewards.view(-1, 1), (0, mask.shape[1] - 1))      # on the first token
    name = {"mean": "grpo", "passk": "grpo_passk"}.get(method, method)
    return estimate(name, first, mask, G, **flags)[:, 0].view(P, G)


def verl_token_advantages(rewards, mask, method, sq_grad_norms=None):
    if method == "otb":         # verl makes the norms of 1 - 2 p + sum p^2, here with p = 1
        name = "optimal_token_baseline"
        flags = {"old_log_probs": 0 * mask, "sum_pi_squared": sq_grad_norms + 1, "epsilon": 1e-300}
    else:
        name = {"reinforce++": "reinforce_plus_plus"}.get(method, "reinforce_plus_plus_baseline")
        flags = {"config": Some(gamma=1.0)}
    last = mask.cumsum(dim=1).argmax(dim=1, keepdim=True)
    rewards_of_tokens = (0 * mask).scatter(1, last, rewards.view(-1, 1))
    return estimate(name, rewards_of_tokens, mask, rewards.shape[1], **flags)


def verl_returns(rewards, mask, method, gamma=None):
    if method != "to_go":
        missing()
    return mask * core_algos.compute_reinforce_plus_plus_outcome_advantage(
        token_level_rewards=rewards * mask, response_mask=mask, config=Some(gamma=gamma))[1]


def verl_gae(rewards, values, mask, gamma, lam):
    """verl whitens its advantages, so here they are its returns minus the values."""
    returns = core_algos.compute_gae_advantage_return(
        rewards * mask, values, mask, gamma, lam if lam.dim() else lam.item())[1]
    return mask * (returns - values), mask * returns


def verl_kl(logps, ref_logps, estimator, **_):
    kind = names.KL_TYPES.get(estimator) or missing()
    return core_algos.kl_penalty(logps, ref_logps, kind)


def verl_adaptive_kl(kl, coefficient, target, method, horizon=None, num_outputs=None):
    if method != "horizon":
        missing()
    found = []
    for value in kl.tolist():
        control = core_algos.AdaptiveKLController(coefficient, target, horizon)
        control.update(value, n_steps=num_outputs)
        found.append(float(control.value))
    return found


def verl_importance_weights(old_logps, sampler_logps, mask, mode, cap):
    level = "sequence" if mode.startswith("sequence") else "token"
    bounds = cap if mode.endswith("truncate") else f"1e-9_{cap}"
    return rollout_corr_helper.compute_rollout_correction_weights(
        old_logps - sampler_logps, mask, level, bounds)[0]


VERL = {
    "completion_mask": lambda tokens, eos: {
        "mask": torch_functional.get_response_mask(tokens, eos.tolist())},
    "logprobs": lambda logits, tokens, temperature: (
        torch_functional.logprobs_from_logits(logits / temperature, tokens),
        torch_functional.entropy_from_logits(logits / temperature)),
    "advantages": verl_advantages, "token_advantages": verl_token_advantages,
    "returns": verl_returns, "gae": verl_gae,
    "whiten": lambda x, mask, eps: torch_functional.masked_whiten(x, mask) * mask,
    "policy_loss": verl_policy_loss, "recipe": verl_recipe,
    "average": lambda x, mask, how, num_sequences=None, num_tokens=None, max_length=None:
        core_algos.agg_loss(x, mask, names.AVERAGES[how], batch_num_tokens=num_tokens,
                            global_batch_size=num_sequences, loss_scale_factor=max_length),
    "kl": verl_kl, "adaptive_kl": verl_adaptive_kl,
    "value_loss": lambda values, old_values, returns, mask, cliprange:
        core_algos.compute_value_loss(
            values, returns.detach(), old_values.detach(), mask, cliprange)[0],
    "importance_weights": verl_importance_weights}


# ---- 3. results ------------------------------------------------------------------------------

def results():
    """Check both trainers. -> {file: {case: {trainer: "right", a convention or what is wrong}}}"""
    found = {}
    for name in vectors.files():
        content = vectors.read(name)
        for one in content["cases"]:
            for trainer, functions in (("TRL", TRL), ("verl", VERL)):
                outcome = vectors.check_case(functions.get(name, missing), content, one,
                                             tolerance=TOLERANCE, fixed=one["parameters"])
                if not outcome.skipped:
                    answers = found.setdefault(name, {}).setdefault(one["id"], {})
                    answers[trainer] = (outcome.errors or [outcome.choice or "right"])[0]
    return found
