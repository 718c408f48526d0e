"""Print the settings of TRL 1.16 and verl 0.9 that mean the same as the flags of a run.

  python -m pretrained.elsewhere runs/x         # docs/recipes.md lists what remains different
"""
from types import SimpleNamespace

import plumbing
from report import parser, start

AVERAGES = {"dapo": "token-mean", "cispo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
ODD = {"scale_rewards": ("batch", "mean"), "kl_estimator": ("k1", "k2", "k3_ratio"),
       "lr_scheduler_type": ("linear", "cosine"), "mask_truncated_completions": (True,),
       "importance_sampling_correction": ("geometric_mask",), "chat_template": (False,)}


def translated(c):
    """Translate the flags of a run. -> code that makes TRL's configuration, command of verl"""
    parts = min(c.num_mini_batches, c.num_prompts)              # optimizer steps in a pass
    rows = c.num_prompts * c.num_generations // parts           # outputs in an optimizer step
    b = max(b for b in range(1, c.micro_batch_size + 1) if rows % b == 0)
    updates = parts * c.num_iterations                          # TRL counts these as steps
    is_gspo, is_cispo = c.method == "gspo", c.loss_type == "cispo"
    mode = c.loss_type if c.loss_type in ("cispo", "sapo") else "gspo" if is_gspo else "vanilla"
    level, _, kind = c.importance_sampling_correction.rpartition("_")
    low, high = c.importance_sampling_clip_min, c.importance_sampling_cap
    trl = f"""args = GRPOConfig(
    learning_rate={c.learning_rate}, lr_scheduler_type={c.lr_scheduler_type!r}, seed={c.seed},
    max_steps={c.max_steps * updates}, warmup_steps={c.warmup_steps * updates},
    save_steps={c.save_steps * updates}, per_device_train_batch_size={b},
    gradient_accumulation_steps={rows // b}, steps_per_generation={parts * rows // b},
    num_iterations={c.num_iterations}, num_generations={c.num_generations}, beta={c.beta},
    max_completion_length={c.max_completion_length}, temperature={c.temperature},
    scale_rewards={c.scale_rewards!r}, loss_type={c.loss_type!r}, epsilon={c.epsilon},
    epsilon_high={c.epsilon_high + is_cispo}, delta={c.delta or None},
    importance_sampling_level="{'sequence' if is_gspo else 'token'}", use_cpu={c.device == "cpu"},
    use_bias_correction_kl={c.kl_estimator == "k3_ratio"}, max_grad_norm={c.max_grad_norm},
    mask_truncated_completions={c.mask_truncated_completions}, bf16={c.dtype == "bfloat16"},
    gradient_checkpointing={c.gradient_checkpointing}, use_vllm={c.engine == "vllm"},
    vllm_importance_sampling_correction={kind != "none"},
    vllm_importance_sampling_mode="{level or 'token'}_{'mask' if kind == 'none' else kind}",
    vllm_importance_sampling_clip_max={high}, vllm_importance_sampling_clip_min={low or None})"""
    if c.lora_rank:
        trl += (f"\npeft_config = LoraConfig(r={c.lora_rank}, lora_alpha={c.lora_alpha}, "
                "target_modules='all-linear')")
    verl = f"""python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
  algorithm.norm_adv_by_std_in_grpo={c.scale_rewards != "none"} data.seed={c.seed} \\
  algorithm.rollout_correction.rollout_is={"null" if kind == "none" else level or "token"} \\
  algorithm.rollout_correction.rollout_is_threshold={f"{low}_{high}" if kind == "mask" else high} \\
  data.train_batch_size={c.num_prompts} data.max_response_length={c.max_completion_length} \\
  MODEL.path={c.model} MODEL.enable_gradient_checkpointing={c.gradient_checkpointing} \\
  MODEL.lora_rank={c.lora_rank} MODEL.lora_alpha={c.lora_alpha} ROLLOUT.n={c.num_generations} \\
  MODEL.target_modules=all-linear ROLLOUT.tensor_model_parallel_size=1 \\
  ROLLOUT.name=vllm ROLLOUT.temperature={c.temperature} ROLLOUT.dtype={c.dtype} \\
  ROLLOUT.log_prob_micro_batch_size_per_gpu={b} ACTOR.ppo_micro_batch_size_per_gpu={b} \\
  ACTOR.ppo_mini_batch_size={c.num_prompts // parts} ACTOR.ppo_epochs={c.num_iterations} \\
  ACTOR.optim.lr={c.learning_rate} ACTOR.optim.lr_scheduler_type={c.lr_scheduler_type} \\
  ACTOR.optim.lr_warmup_steps={c.warmup_steps} ACTOR.optim.clip_grad={c.max_grad_norm or 1e9} \\
  ACTOR.optim.weight_decay=0 ACTOR.policy_loss.loss_mode={mode} \\
  ACTOR.loss_agg_mode={AVERAGES.get(c.loss_type, "seq-mean-token-mean")} \\
  ACTOR.clip_ratio_low={1 if is_cispo else c.epsilon} ACTOR.clip_ratio_high={c.epsilon_high} \\
  ACTOR.clip_ratio_c={c.delta or 1e9} ACTOR.use_kl_loss={c.beta > 0} ACTOR.kl_loss_coef={c.beta} \\
  ACTOR.kl_loss_type={({"k1": "kl", "k2": "mse"}).get(c.kl_estimator, "low_var_kl")} \\
  ACTOR.fsdp_config.dtype={c.dtype} trainer.n_gpus_per_node=1 trainer.save_freq={c.save_steps} \\
  trainer.total_training_steps={c.max_steps}"""
    for name in ("actor", "rollout", "model"):
        verl = verl.replace(f"{name.upper()}.", f"actor_rollout_ref.{name}.")
    return trl, verl


def main(argv=None):
    arguments = parser(__doc__)
    arguments.add_argument("run", metavar="RUN", help="run folder of pretrained/train.py")
    _, flags = plumbing.read_config(arguments.parse_args(argv).run)
    trl, verl = translated(SimpleNamespace(**flags))
    odd = [f"--{name} {flags[name]}" for name, values in ODD.items() if flags[name] in values]
    print(f"# differences, see docs/recipes.md: {', '.join(odd) or 'none of these flags'}")
    print(f"# TRL 1.16\n{trl}\n\n# verl 0.9\n{verl}")


if __name__ == "__main__":
    start(main)
