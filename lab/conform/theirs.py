"""Run the code of TRL, verl and PyTorch on the Cases of cases.py. None of this code is copied, so
the packages have to be installed (.venv-conform, by make conform).

A trainer is made from its own configuration, for the base of grpo.py. Then we replace its model,
sampler and verifier by functions that return the numbers of a Case. A prompt is the number of a
row, so these functions can look up its log-probabilities.
"""
import inspect
import logging
import re
import tempfile
import warnings
from dataclasses import fields, replace
from functools import cache, partial
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
from torch.distributions import Categorical
from trl.experimental import gmpo
from trl.experimental.cpo import CPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.sdpo import loss_utils
from trl.rewards import get_soft_overlong_punishment
from trl.trainer import utils
from trl.trainer.distillation_trainer import _chunked_divergence_loss
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk
from verl.trainer.ppo import core_algos, metric_utils, rollout_corr_helper
from verl.utils.tensordict_utils import assign_non_tensor
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits, masked_whiten
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

import grpo
import reinforce
from lab.conform import cases

VERSIONS = {module.__name__: module.__version__ for module in (trl, verl, torch)}
SHORT = {"bias": "use_bias_correction_kl", "level": "importance_sampling_level",
         "mode": "vllm_importance_sampling_mode", "average": "loss_agg_mode"}
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
transformers.utils.logging.disable_progress_bar()


# ---- 1. TRL ----------------------------------------------------------------------------------

EXPORTED = Path(tempfile.mkdtemp(), "exported")         # compare.py exports the base to it
HERE = {"output_dir": EXPORTED.parent, "use_cpu": True, "bf16": False, "report_to": "none",
        "activation_checkpointing": False, "save_strategy": "no", "disable_tqdm": True,
        "remove_unused_columns": False, "lr_scheduler_type": "constant"}
EXAMPLE = {"prompt": "a", "chosen": "b", "rejected": "c"}
RANGES = {"epsilon_high": 0.28, "num_iterations": 2}    # with 1 iteration, ratios would be 1


@cache
def trainer(kind, num_prompts=1, rewards=None, **flags):
    """Make a trainer of TRL for the base of grpo.py. -> trainer"""
    flags = {SHORT.get(name, name): value for name, value in flags.items()}
    more = {} if kind == "DPO" else {"reward_funcs": lambda **_: rewards}
    library = gmpo if kind == "GMPO" else trl
    made = getattr(library, f"{kind}Trainer")(
        model=str(EXPORTED), args=getattr(library, f"{kind}Config")(**HERE | flags),
        train_dataset=Dataset.from_list([EXAMPLE] * num_prompts), **more)
    made.model.train()
    return made


def rollout(batch):
    """Return what a sampler would return for a batch. -> dict of lists"""
    def cut(values):
        return [row[:n] for row, n in zip(values.tolist(), batch.lengths.tolist())]
    return {"prompt_ids": batch.prompts.tolist(), "completion_ids": cut(batch.tokens),
            "env_mask": cut(batch.mask.long()), "logprobs": cut(batch.logps)}


def replay(made, x):
    """Make a trainer use the completions, rewards and log-probabilities of x."""
    outputs = rollout(x.batch("mu_logps"))
    made.rollout_func = lambda *_: dict(outputs)
    if isinstance(made, trl.RLOOTrainer):               # it has no rollout_func
        made._generate = lambda prompts: (outputs["prompt_ids"], outputs["completion_ids"], prompts)
    by_model = {made.ref_model: x.ref_logps}

    def log_probs(model, input_ids, *_, **__):
        logps = x.logps if torch.is_grad_enabled() else by_model.get(model, x.old_logps)
        return logps[input_ids[:, 0]], x.entropy[input_ids[:, 0]], None
    made._calculate_rewards = lambda *_: x.rewards.view(-1, 1)
    made._get_per_token_logps_and_entropies = log_probs
    made._metrics["train"].clear()


def sampled(x, kind="GRPO", name="loss", parts=1, is_lagged=False, ranges=RANGES, A=None, **flags):
    """Run a trainer that samples on x. name: "loss", "advantages" (B, T), "batch", or a metric.
    is_lagged: mu is vLLM. A: advantages (B,) that replace the trainer's. -> what `name` names"""
    B, T = x.mask.shape
    made = trainer(kind, num_generations=x.rewards.shape[1], steps_per_generation=parts,
                   gradient_accumulation_steps=parts, per_device_train_batch_size=B // parts,
                   **{"max_completion_length": T} | ranges | flags)
    replay(made, x)
    vars(made).update(
        use_vllm=is_lagged, _last_loaded_step=made.state.global_step,     # vLLM has the weights
        vllm_importance_sampling_clip_max=2.0, current_gradient_accumulation_steps=parts)
    batch = made._generate_and_score_completions([EXAMPLE] * B)
    if A is not None:
        batch["advantages"] = A
    losses = [made._compute_loss(made.model, one) for one in utils.split_tensor_dict(batch, parts)]
    results = {metric: values[0] for metric, values in made._metrics["train"].items()}
    A = batch["advantages"].view(-1, 1) * x.mask
    results |= {"loss": sum(losses), "batch": batch, "advantages": A}
    return results[name]


def two_functions(x):
    """Compute the advantages of a trainer with two reward functions. -> (B, T)"""
    x = x.plain()
    terms = cases.two_rewards(x)
    made = trainer.__wrapped__(
        "GRPO", num_generations=cases.G, max_completion_length=cases.T,
        per_device_train_batch_size=cases.B, multi_objective_aggregation="normalize_then_sum")
    replay(made, x)
    vars(made).update(
        use_vllm=False, _last_loaded_step=made.state.global_step, reward_func_names=["a", "b"],
        reward_weights=torch.ones(2), current_gradient_accumulation_steps=1,
        reward_funcs=made.reward_funcs * 2,
        reward_processing_classes=made.reward_processing_classes * 2,
        _calculate_rewards=lambda *_: torch.stack([r.flatten() for r in terms], dim=1))
    batch = made._generate_and_score_completions([EXAMPLE] * cases.B)
    return batch["advantages"].view(-1, 1) * x.mask


def fresh_rloo(x, beta):
    """Return 0, with the gradient of RLOOTrainer if pi_old is pi. -> scalar"""
    loss = sampled(replace(x, old_logps=x.logps.detach()).plain(), "RLOO", beta=beta)
    return loss - loss.detach()


def preferred(x, loss_type="sigmoid", name="loss", beta=0.1, **flags):
    """Compute the loss of DPOTrainer, or a metric. The rows of the first half are chosen."""
    made = trainer("DPO", loss_type=tuple(loss_type.split("+")), beta=beta, **flags)

    def model(logps):
        zeros = torch.zeros_like(logps)
        return lambda **_: Some(log_probs=torch.where(x.mask > 0, logps, 0.0), entropy=zeros,
                                mean_logits=zeros, is_top1=zeros > 0)
    made.ref_model = model(x.ref_logps)
    made._metrics["train"].clear()
    slots = F.pad(x.slots, (1, 0), value=1.0)
    loss = made._compute_loss(model(x.logps), {
        "input_ids": slots.long(), "attention_mask": slots,
        "completion_mask": F.pad(x.mask, (1, 0))}, return_outputs=False)
    return loss if name == "loss" else made._metrics["train"][name][0]


def cpo(x, loss_type, beta=0.1, label_smoothing=0.0):
    """Call CPOTrainer.cpo_loss with log-probabilities of whole completions. -> losses or mean"""
    stub = Some(alpha=0.0, beta=beta, loss_type=loss_type, simpo_gamma=0.5,
                label_smoothing=label_smoothing, accelerator=Some(device="cpu"))
    is_simpo = loss_type == "simpo"
    losses, _, _ = CPOTrainer.cpo_loss(stub, *x.outputs(x.logps, average=is_simpo))
    return losses.mean() if is_simpo else losses


# ---- 2. verl ---------------------------------------------------------------------------------

PlatformCUDA.device_name = "cpu"            # verl has no platform for CPUs
PlatformCUDA.current_device = lambda _: "cpu"
WIDE = {"clip_ratio_high": 0.28, "clip_ratio_c": 1e9}
OF_LOSS = {field.name for field in fields(PolicyLossConfig)}


def actor(loss_mode="vanilla", rollout_is=None, rollout_is_threshold=2.0, **flags):
    """Make the configuration of verl's actor."""
    correction = RolloutCorrectionConfig(
        loss_type="reinforce", rollout_is=rollout_is, rollout_is_threshold=rollout_is_threshold)
    flags = {SHORT.get(name, name): value for name, value in flags.items()}
    of_loss = {name: flags.pop(name) for name in flags.keys() & OF_LOSS}
    policy_loss = PolicyLossConfig(loss_mode=loss_mode, rollout_correction=correction, **of_loss)
    return FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss,
                           use_kl_loss="kl_loss_coef" in flags, **flags)


def policy_update(x, A=None, weights=None, parts=1, name="loss", **flags):
    """Compute ppo_loss, the loss of verl's actor, or one of its metrics. A, weights: (B, T)"""
    batch = x.batch()
    data = TensorDict({
        "prompts": batch.prompts, "responses": batch.tokens, "response_mask": x.mask,
        "attention_mask": F.pad(x.slots, (1, 0), value=1.0).long(),
        "old_log_probs": x.old_logps, "ref_log_prob": x.ref_logps,
        "advantages": (x.A() if A is None else A) * x.mask,
        "log_probs": F.pad(x.logps, (0, 1)), "entropy": F.pad(x.entropy, (0, 1))}, len(x.mask))
    if weights is not None:
        data["rollout_is_weights"] = weights
    num_tokens = x.mask.sum().item()
    assign_non_tensor(data, dp_size=1, batch_num_tokens=num_tokens, global_batch_size=len(data))
    total = 0.0
    for part in data.split(len(data) // parts):
        is_there = part["attention_mask"] > 0
        output = {name: part[name][is_there] for name in ("log_probs", "entropy")}
        loss, metrics = ppo_loss(actor(**WIDE | flags), output, part)
        total = total + loss
    return total if name == "loss" else metrics[name].values[0]


def estimate(x, name, **flags):
    """Compute advantages with one of verl's estimators. -> (B, T)"""
    A, _ = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=x.token_rewards(), response_mask=x.mask,
        index=np.arange(len(x.mask)) // x.rewards.shape[1], **flags)
    return A * x.mask


def gdpo(x):
    """Compute GDPO advantages of two rewards. -> (B, T)"""
    x = x.plain()
    rewards = [r.flatten().numpy() for r in cases.two_rewards(x)]
    slots = F.pad(x.slots, (1, 0), value=1.0)
    A, _ = core_algos.compute_gdpo_outcome_advantage(
        torch.zeros_like(x.mask), x.mask, np.arange(cases.B) // cases.G,
        config={"gdpo_reward_keys": ["a", "b"]}, non_tensor_batch=dict(zip("ab", rewards)),
        batch={"prompts": slots[:, :1], "attention_mask": slots.long()})
    return A * x.mask


def token_baseline(x, **flags):
    """Compute advantages with the optimal token baseline. -> (B, T)"""
    x = x.plain()
    return estimate(
        x, "optimal_token_baseline", old_log_probs=grpo.logprobs(x.logits, x.tokens)[0],
        sum_pi_squared=x.logits.softmax(dim=-1).square().sum(dim=-1), epsilon=1e-300, **flags)


def gae(x, lam=0.95):
    """Compute whitened advantages, and returns. -> (B, T) each"""
    both = core_algos.compute_gae_advantage_return(x.token_rewards(), x.values, x.mask, 0.99, lam)
    return [tensor * x.mask for tensor in both]


def rollout_weights(x, level="token", threshold=2.0):
    return rollout_corr_helper.compute_rollout_correction_weights(
        x.old_logps - x.mu_logps, x.mask, level, threshold)[0]


def filtered_weights(x, threshold):
    log_w = x.old_logps - x.mu_logps
    return log_w.exp() * rollout_corr_helper.compute_rollout_rejection_mask(
        log_w, x.mask, "seq_mean_k1", threshold)[0]


def adapted(kl):
    """Adapt a coefficient of 0.1 after a step with this KL. The target is 0.05. -> float"""
    control = core_algos.AdaptiveKLController(0.1, 0.05, horizon=10_000)        # verl's default
    control.update(kl, n_steps=1024)                    # number of outputs in a step
    return float(control.value)


PEERS = {
    "TRL grpo": sampled,
    "TRL grpo, mu is pi_old": lambda x, **flags: sampled(
        replace(x, mu_logps=x.old_logps), **flags),
    "TRL grpo of two rewards": two_functions,
    "TRL gmpo": lambda x: sampled(
        x, "GMPO", beta=0.0, ranges={"epsilon": 0.4, "epsilon_high": 0.4, "num_iterations": 2}),
    "TRL grpo of vLLM": partial(sampled, is_lagged=True),
    "TRL grpo advantages": partial(sampled, name="advantages"),
    "TRL get_soft_overlong_punishment": lambda x: get_soft_overlong_punishment(
        x.mask.shape[1], 3)([[1] * n for n in x.lengths.tolist()]),
    "TRL rloo": lambda x, beta: sampled(x.plain(), "RLOO", beta=beta),
    "TRL rloo gradient": fresh_rloo,
    "TRL rloo advantages": partial(sampled, kind="RLOO", name="advantages"),
    "TRL rloo advantages less KL": lambda x, beta: sampled(
        x.plain(), "RLOO", "batch", beta=beta)["advantages"],
    "TRL dpo": preferred,
    "TRL cpo": cpo,
    "TRL selective_log_softmax": lambda x: utils.selective_log_softmax(x.logits / 0.7, x.tokens),
    "TRL entropy_from_logits": lambda x: utils.entropy_from_logits(x.logits / 0.7),
    "TRL entropy_from_logits, without a token": lambda x: utils.entropy_from_logits(
        x.without_a_token()),
    "verl ppo_loss": policy_update,
    "verl ppo_loss, untied": lambda x, **flags: policy_update(x.untied(), **flags),
    "verl ppo_loss, far out": lambda x: policy_update(x.far_out()),
    "verl ppo_loss of GAE": lambda x, **flags: policy_update(x, gae(x)[0], **flags),
    "verl ppo_loss of RLOO": lambda x, **flags: policy_update(x, x.A("rloo", reinforce), **flags),
    "verl ppo_loss of weights": lambda x, **flags: policy_update(
        x, weights=rollout_weights(x), **flags),
    "verl compute_value_loss": lambda x: core_algos.compute_value_loss(
        x.values, x.losses, x.old_values, x.mask, 0.4567)[0],
    "verl gae": lambda x: gae(x)[0],
    "verl gae of lam (B,)": lambda x: gae(x, 1 - 1 / x.mask.sum(dim=1))[0],
    "verl gae returns": lambda x: gae(x)[1],
    "verl masked_whiten": lambda x: x.mask * masked_whiten(x.losses.detach(), x.mask),
    "verl compute_rewards": lambda x: x.mask * core_algos.compute_rewards(
        x.token_rewards(), x.old_logps, x.ref_logps, 0.1),
    "verl AdaptiveKLController": lambda x: [adapted(0.01 * k) for k in range(1, 20)],
    "verl reinforce_plus_plus": lambda x, gamma=0.9: estimate(
        x, "reinforce_plus_plus", config=Some(gamma=gamma)),
    "verl grpo_passk": lambda x, **flags: estimate(x, "grpo_passk", config=flags),
    "verl gdpo": gdpo,
    "verl optimal_token_baseline": token_baseline,
    "verl remax": lambda x: estimate(
        x, "remax", reward_baselines=x.rewards[:, 0].repeat_interleave(x.rewards.shape[1])),
    "verl agg_loss": lambda x, mode: core_algos.agg_loss(x.losses, x.mask, mode),
    "verl agg_loss, a row empty": lambda x: core_algos.agg_loss(
        x.losses, x.only(torch.arange(len(x.mask)) > 0).mask, "seq-mean-token-mean"),
    "verl rollout_is": rollout_weights,
    "verl rollout_rs": filtered_weights,
    "verl logprobs_from_logits": lambda x: logprobs_from_logits(x.logits / 0.7, x.tokens),
    "verl entropy_from_logits": lambda x: entropy_from_logits(x.logits / 0.7),
    "verl entropy_from_logits, without a token": lambda x: entropy_from_logits(
        x.without_a_token()),
    "verl kl_penalty, near 0": lambda x: x.mask * core_algos.kl_penalty(
        x.near_reference(), x.ref_logps, "low_var_kl"),
    "verl calc_maj_val": lambda x: [metric_utils.calc_maj_val(
        [{"vote": float(vote)} for vote in row], "vote", "vote") for row in x.tokens.tolist()],
    "torch Categorical.log_prob": lambda x: Categorical(logits=x.logits / 0.7).log_prob(x.tokens),
    "torch Categorical.entropy": lambda x: Categorical(logits=x.logits / 0.7).entropy(),
} | {f"verl {name}": partial(estimate, name=name) for name in (
    "grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "reinforce_plus_plus_baseline")}


def forward_kl_topk(x):
    """Compute verl's forward KL over the teacher's top 3 tokens. -> (B, T)"""
    logps, ids = (x.teacher() / 0.7).log_softmax(dim=-1).flatten(0, 1).topk(3)
    ends = torch.tensor([0, len(ids)])
    found = compute_forward_kl_topk(
        (x.logits / 0.7).flatten(0, 1)[None], *(
            torch.nested.nested_tensor_from_jagged(one, ends) for one in (logps, ids)),
        Some(distillation_loss=Some(log_prob_min_clamp=None)), "thd")
    return x.mask * found["distillation_losses"].view_as(x.mask)


def sdpo(x, loss, *more, **flags):
    return x.mask * loss(x.logits / 0.7, x.teacher() / 0.7, *more, distillation_alpha=1.0, **flags)


PEERS |= {
    "TRL DistillationTrainer": lambda x, beta: _chunked_divergence_loss(
        x.logits, x.teacher(), torch.eye(cases.V), torch.eye(cases.V), x.mask, beta, x.mask.sum(),
        temperature=0.7)[0],
    "TRL gkd": lambda x, beta: GKDTrainer.generalized_jsd_loss(
        x.logits, x.teacher(), torch.where(x.mask > 0, x.tokens, -100), beta, 0.7,
        num_items_in_batch=x.mask.sum()),
    "TRL sdpo top 3": lambda x, tail: sdpo(
        x, loss_utils.compute_topk_self_distillation_loss, distillation_topk=3,
        distillation_add_tail=tail),
    "TRL sdpo sampled token": lambda x: sdpo(
        x, loss_utils.compute_sampled_token_self_distillation_loss, x.tokens),
    "verl forward_kl_topk": forward_kl_topk}


def registered():
    """List the names that verl and TRL have for losses and advantages. -> dict of lists"""
    code = inspect.getsource(trl.GRPOTrainer._compute_loss)
    tests = re.findall(r'self.loss_type (?:==|in) (\[.*?\]|"\w+")', code)
    return {"loss_mode of verl": sorted(core_algos.POLICY_LOSS_REGISTRY),
            "adv_estimator of verl": sorted(map(str, core_algos.ADV_ESTIMATOR_REGISTRY)),
            "loss_type of TRL": sorted(set(re.findall(r'"(\w+)"', " ".join(tests))))}


# ---- 3. whole optimizer steps ----------------------------------------------------------------

def plain_sgd(cfg, *more):
    """Return the flags with which a trainer takes the steps of cfg by SGD. -> dict"""
    names = ("learning_rate", "max_grad_norm", "beta", *more)
    return {"optim": "sgd", "max_steps": cfg.num_iterations, "weight_decay": 0.0} | {
        name: getattr(cfg, name) for name in names}


def TRL_grpo_steps(batch, A, cfg):
    """Take num_iterations steps of GRPOTrainer on a batch, of two micro-batches each. -> weights"""
    P, G = batch.rewards.shape
    names = ("loss_type", "epsilon_high", "num_iterations", "max_completion_length")
    made = trainer.__wrapped__(                         # without the cache: a new trainer
        "GRPO", P, batch.rewards.flatten().tolist(), **plain_sgd(cfg, *names),
        num_generations=G, per_device_train_batch_size=P * G // 2, gradient_accumulation_steps=2,
        bias=cfg.kl_estimator == "k3_ratio")
    made.rollout_func = lambda *_: rollout(batch)
    made.train()
    return made.model.state_dict()


def TRL_dpo_steps(batch, chosen, rejected, cfg):
    """Take a step of DPOTrainer on pairs of rows of a batch. -> weights"""
    made = trainer.__wrapped__("DPO", **plain_sgd(cfg), per_device_train_batch_size=len(chosen))
    outputs = rollout(batch)
    ids = outputs["completion_ids"]
    made.train_dataset = Dataset.from_list([            # token ids, so no tokenizer is needed
        {"prompt_ids": outputs["prompt_ids"][i], "chosen_ids": ids[i], "rejected_ids": ids[j]}
        for i, j in zip(chosen, rejected)])
    made.train()
    return made.model.state_dict()
