"""Print the settings of TRL 1.16 and verl 0.9 that mean the same as the flags of a run.

  python -m engines.settings runs/grpo-arithmetic-s0      # of grpo.py, gspo.py, zoo.py, dpo.py

The first command trains with TRL on the loss of the run, by engines/trl.py. If TRL has this loss
itself, its own settings follow. verl's command uses engines/verl.py. Flags that have no counterpart
there are listed. docs/engines.md says how to continue.
"""
import shlex

import common
import engines
import plumbing
from report import parser, start
from report.page import import_script

# Flags that do not change what a step computes, or that follow from the model and the data
OF_THE_RUN = {*common.Base.__annotations__, "task", "device", "kernel", "output_dir",
              "resume_from_checkpoint", "eval_steps", "report_to", "num_eval_problems",
              "num_eval_samples", "micro_batch_size"}
COMMON = {"learning_rate", "seed", "max_steps", "save_steps", "num_generations", "num_prompts",
          "max_completion_length", "temperature", "max_grad_norm", "num_mini_batches",
          "num_iterations", "beta"}
OF_TRL = COMMON | {"kl_estimator", "scale_rewards", "entropy_coef", "mask_truncated_completions"}
IN_TRL = ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")
AVERAGES = {"sequence_mean": "seq-mean-token-mean", "token_mean": "token-mean",
            "constant": "seq-mean-token-sum-norm"}


def text_of_loss(name, script, flags):
    """Write the loss of a run as `engines.load` reads it. -> str, names of the flags in it"""
    if name == "here":
        return flags["loss"], ["loss"]
    loss_type = flags["loss_type"]
    names = ["loss_type"]
    is_new = name == "zoo" and loss_type in script.NEW
    if not is_new or loss_type in script.CLIPPED:
        names += ["epsilon", "epsilon_high", "delta"]
    if is_new:
        names += [key for key in flags if key.startswith(loss_type)]
    words = [f"{key}={flags[key]}" for key in names]
    module = name if is_new or name == "gspo" else "grpo"
    return " ".join([f"{module}:policy_loss", *words]), names


def sizes(c):
    """Compute how TRL and verl count the steps of a run. -> optimizer steps in a pass, outputs in
    an optimizer step, outputs in a part of it"""
    parts = min(c["num_mini_batches"], c["num_prompts"])
    rows = c["num_prompts"] // parts * c["num_generations"]     # groups stay whole
    size = max(b for b in range(1, c["micro_batch_size"] + 1) if rows % b == 0)
    return parts, rows, size


def of_trl(c):
    """Translate the flags that TRL has, too. -> {flag of GRPOConfig: value}"""
    parts, rows, size = sizes(c)
    updates = parts * c["num_iterations"]                       # TRL counts these as steps
    return {"learning_rate": c["learning_rate"], "lr_scheduler_type": "constant",
            "seed": c["seed"], "max_steps": c["max_steps"] * updates,
            "save_steps": c["save_steps"] * updates, "per_device_train_batch_size": size,
            "gradient_accumulation_steps": rows // size,
            "steps_per_generation": parts * rows // size,
            "num_iterations": c["num_iterations"], "num_generations": c["num_generations"],
            "max_completion_length": c["max_completion_length"], "temperature": c["temperature"],
            "beta": c["beta"], "use_bias_correction_kl": c["kl_estimator"] == "k3_ratio",
            "scale_rewards": c["scale_rewards"], "entropy_coef": c["entropy_coef"],
            "mask_truncated_completions": c["mask_truncated_completions"],
            "max_grad_norm": c["max_grad_norm"] or 1e9, "bf16": False}


def own_loss_of_trl(name, c):
    """Translate the loss into TRL's own. -> {flag of GRPOConfig: value}, {} if TRL lacks it"""
    if c["loss_type"] not in IN_TRL:
        return {}
    if c["loss_type"] == "vespo":
        return {"loss_type": "vespo"} | {key: c[key] for key in c if key.startswith("vespo_")}
    flags = {"loss_type": c["loss_type"], "epsilon": c["epsilon"],
             "epsilon_high": c["epsilon_high"] + (c["loss_type"] == "cispo")}   # TRL's is the cap
    if c["delta"] > 0:
        flags["delta"] = c["delta"]
    if name == "gspo":
        flags["importance_sampling_level"] = "sequence"
    return flags


def of_verl(c, how):
    """Translate the flags that verl has, too. -> {key of its configuration: value}"""
    parts, _, size = sizes(c)
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    kinds = {"k1": "kl", "k2": "mse"}
    scale = c["max_completion_length"] if how == "constant" else "null"
    return {"algorithm.adv_estimator": "ours",
            "algorithm.norm_adv_by_std_in_grpo": c["scale_rewards"] != "none",
            "data.train_batch_size": c["num_prompts"], "data.seed": c["seed"],
            "data.max_response_length": c["max_completion_length"],
            f"{rollout}.n": c["num_generations"], f"{rollout}.temperature": c["temperature"],
            f"{actor}.policy_loss.loss_mode": "ours", f"{actor}.loss_agg_mode": AVERAGES[how],
            f"{actor}.loss_scale_factor": scale,
            f"{actor}.ppo_mini_batch_size": c["num_prompts"] // parts,
            f"{actor}.ppo_micro_batch_size_per_gpu": size,
            f"{actor}.ppo_epochs": c["num_iterations"], f"{actor}.optim.lr": c["learning_rate"],
            f"{actor}.optim.clip_grad": c["max_grad_norm"] or 1e9,
            f"{actor}.optim.weight_decay": 0.0, f"{actor}.entropy_coeff": c["entropy_coef"],
            f"{actor}.use_kl_loss": c["beta"] > 0, f"{actor}.kl_loss_coef": c["beta"],
            f"{actor}.kl_loss_type": kinds.get(c["kl_estimator"], "low_var_kl"),
            "trainer.total_training_steps": c["max_steps"], "trainer.save_freq": c["save_steps"]}


def of_dpo(c):
    """Translate the flags of dpo.py. -> {flag of TRL's DPOConfig: value}"""
    pairs = c["num_prompts"] * c["num_generations"] // 2
    steps = c["max_steps"] * c["num_mini_batches"] * c["num_iterations"]
    return {"learning_rate": c["learning_rate"], "lr_scheduler_type": "constant", "seed": c["seed"],
            "per_device_train_batch_size": max(1, pairs // c["num_mini_batches"]),
            "beta": c["beta"], "loss_type": c["loss_type"],
            "label_smoothing": c["label_smoothing"], "max_grad_norm": c["max_grad_norm"] or 1e9,
            "max_steps": steps, "bf16": False}


def differences(script, c, covered):
    """List the flags that are not translated, and are not their defaults. -> list of str"""
    fields = script.Config.__dataclass_fields__
    return [f"--{name} {c[name]}" for name in fields if name in c and name not in covered
            and name not in OF_THE_RUN and c[name] != fields[name].default]


def as_flags(flags):
    """Write {flag: value} as command-line flags. -> str"""
    return shlex.join([word for name, value in flags.items() for word in (f"--{name}", str(value))])


def report(name, script, c, folder):
    """Yield the lines that the command prints."""
    data = f"--dataset_name train.jsonl --output_dir {shlex.quote(f'{folder}-trl')}"
    problems = f"python -m engines.task {shlex.quote(c['task'])} 2000 > train.jsonl"
    if name == "dpo":
        lost = differences(script, c, COMMON | {"loss_type", "label_smoothing"})
        if c["loss_type"] in ("simpo", "orpo"):
            lost.append(f"--loss_type {c['loss_type']}, which other trainers of TRL have")
        elif c["loss_type"] == "ipo":
            lost.append("--loss_type ipo, which TRL divides by the lengths of the outputs")
        if c["label_smoothing"] > 0 and c["loss_type"] == "sigmoid":
            lost.append("--label_smoothing, which TRL ignores in this loss")
        yield f"# differences: {', '.join(lost) or 'none of these flags'}; pairs come from a file"
        yield f"trl dpo {as_flags(of_dpo(c))} --model_name_or_path MODEL --dataset_name PAIRS"
        return
    text, names = text_of_loss(name, script, c)
    _, how = engines.load(text)
    lost = differences(script, c, OF_TRL | {*names})
    parts, rows, _ = sizes(c)
    if c["num_prompts"] % parts > 0:
        lost.append(f"{parts * rows // c['num_generations']} prompts in a batch, so that its "
                    f"{parts} optimizer steps are equal")
    odd = [f"--kl_estimator {c['kl_estimator']}"] * (c["beta"] > 0)
    lost_in_trl = lost + (odd if c["kl_estimator"] in ("k1", "k2") else [])
    lost_in_trl += ["--scale_rewards mean"] * (c["scale_rewards"] == "mean")
    yield f"# the loss of this run, in TRL; differences: {', '.join(lost_in_trl) or 'none'}"
    yield problems
    yield (f"python -m engines.trl {text} {as_flags(of_trl(c))} --model_name_or_path MODEL {data} "
           "--reward_funcs engines/task.py:right")
    own = {} if name == "here" else own_loss_of_trl(name, c)
    if own:
        yield f"\n# TRL's own loss, instead of the first words of this command\n{as_flags(own)}"
    lost_in_verl = lost + (odd if c["kl_estimator"] == "k3_ratio" else [])
    lost_in_verl += [f"--scale_rewards {c['scale_rewards']}"] * (
        c["scale_rewards"] in ("batch", "mean"))
    lost_in_verl += ["--mask_truncated_completions"] * c["mask_truncated_completions"]
    yield f"\n# in verl; differences: {', '.join(lost_in_verl) or 'none'}"
    keys = shlex.join(f"{key}={value}" for key, value in of_verl(c, how).items())
    yield (f"VERL_USE_EXTERNAL_MODULES=engines.verl LOSS={shlex.quote(text)} "
           f"python -m verl.trainer.main_ppo {keys} actor_rollout_ref.model.path=MODEL "
           "data.train_files=train.parquet data.val_files=test.parquet")


def main(argv=None):
    arguments = parser(__doc__)
    arguments.add_argument("run", metavar="RUN", help="run folder")
    folder = arguments.parse_args(argv).run
    file, flags = plumbing.read_config(folder)
    name = file.removesuffix(".py")
    if name not in ("grpo", "gspo", "zoo", "here", "dpo"):
        common.fail(f"{folder}: is a run of {file}, for which TRL and verl have no settings; this "
                    "command takes runs of grpo.py, gspo.py, dpo.py, examples/zoo.py and "
                    "engines/here.py")
    script = import_script(file)
    defaults = {field.name: field.default
                for field in script.Config.__dataclass_fields__.values()}
    for line in report(name, script, defaults | flags, folder):
        print(line)


if __name__ == "__main__":
    start(main)
