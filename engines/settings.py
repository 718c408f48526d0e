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
from engines import names
from report import parser, start
from report.page import import_script

# Flags that do not change what a step computes, or that follow from the model and the data
OF_THE_RUN = {*common.Base.__annotations__, "task", "device", "kernel", "output_dir",
              "resume_from_checkpoint", "eval_steps", "report_to", "num_eval_problems",
              "num_eval_samples", "micro_batch_size"}
ROLLOUT, ACTOR = "actor_rollout_ref.rollout.", "actor_rollout_ref.actor."
# Flags that TRL calls the same -> verl's key, if it has one for the value
SAME = {"learning_rate": f"{ACTOR}optim.lr", "seed": "data.seed", "beta": f"{ACTOR}kl_loss_coef",
        "num_iterations": f"{ACTOR}ppo_epochs", "entropy_coef": f"{ACTOR}entropy_coeff",
        "num_generations": f"{ROLLOUT}n", "temperature": f"{ROLLOUT}temperature",
        "max_completion_length": "data.max_response_length", "scale_rewards": "",
        "mask_truncated_completions": ""}
OF_STEPS = ("max_steps", "save_steps", "num_prompts", "num_mini_batches", "max_grad_norm")
SAME_IN_DPO = ("learning_rate", "seed", "beta", "loss_type", "label_smoothing")
# Values that are missing there, or that mean something else
NOT_IN_DPO = {"loss_type": ("simpo", "orpo")}
NOT_IN_TRL = {"kl_estimator": ("k1", "k2"), "scale_rewards": ("mean",)}
NOT_IN_VERL = {"kl_estimator": ("k3_ratio",), "scale_rewards": ("batch", "mean"),
               "mask_truncated_completions": (True,)}


def text_of_loss(name, script, flags):
    """Write the loss of a run as `engines.load` reads it. -> str, names of the flags in it"""
    if name == "here":
        return flags["loss"], ["loss"]
    known, _ = engines.parameters_of(script, "policy_loss", flags["loss_type"])
    used = [key for key in known if key in flags]
    return " ".join([f"{name}:policy_loss", *(f"{key}={flags[key]}" for key in used)]), used


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
    return {name: c[name] for name in SAME} | {
        "max_steps": c["max_steps"] * updates, "save_steps": c["save_steps"] * updates,
        "per_device_train_batch_size": size, "gradient_accumulation_steps": rows // size,
        "steps_per_generation": parts * rows // size,
        "use_bias_correction_kl": c["kl_estimator"] == "k3_ratio",
        "max_grad_norm": c["max_grad_norm"] or 1e9, "lr_scheduler_type": "constant", "bf16": False}


def own_loss_of_trl(name, c):
    """Translate the loss of a run into TRL's own. -> {flag: value}, {} if TRL lacks it"""
    if name == "here":
        return {}
    own = {"here": c["loss_type"]}
    loss = names.find(script=name, **own) or names.find(script="grpo", **own)
    settings = {key: c[here] for key, (here, *_) in names.SETTINGS.get(loss.method, {}).items()
                if here in c and (here, c[here]) != ("delta", 0)}       # 0: no bound
    try:
        return names.translate(loss, settings, "trl")
    except NotImplementedError:
        return {}


def of_verl(c, how, text):
    """Translate the flags that verl has, too, and name the loss. -> {key of its configuration:
    value}"""
    parts, _, size = sizes(c)
    actor = {
        "policy_loss.loss_mode": f"'{text}'", "loss_agg_mode": names.AVERAGES[how],
        "loss_scale_factor": c["max_completion_length"] if how == "constant" else "null",
        "ppo_mini_batch_size": c["num_prompts"] // parts, "ppo_micro_batch_size_per_gpu": size,
        "optim.clip_grad": c["max_grad_norm"] or 1e9, "optim.weight_decay": 0.0,
        "use_kl_loss": c["beta"] > 0,
        "kl_loss_type": names.KL_TYPES[c["kl_estimator"].removesuffix("_ratio")]}
    return {
        "algorithm.adv_estimator": "ours",
        "algorithm.norm_adv_by_std_in_grpo": c["scale_rewards"] != "none",
        "data.train_batch_size": c["num_prompts"],
        "trainer.total_training_steps": c["max_steps"], "trainer.save_freq": c["save_steps"],
        "reward.custom_reward_function.path": "pkg://engines.task",
        "reward.custom_reward_function.name": "score", f"{ROLLOUT}name": "vllm",
        f"{ROLLOUT}log_prob_micro_batch_size_per_gpu": size, "trainer.n_gpus_per_node": 1,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": size,
        } | {key: c[name] for name, key in SAME.items() if key} | {
            f"{ACTOR}{key}": value for key, value in actor.items()}


def of_dpo(c):
    """Translate the flags of dpo.py. -> {flag of TRL's DPOConfig: value}"""
    pairs = c["num_prompts"] * c["num_generations"] // 2
    return {name: c[name] for name in SAME_IN_DPO} | {
        "max_steps": c["max_steps"] * c["num_mini_batches"] * c["num_iterations"],
        "per_device_train_batch_size": max(1, pairs // c["num_mini_batches"]),
        "max_grad_norm": c["max_grad_norm"] or 1e9, "lr_scheduler_type": "constant", "bf16": False}


def differences(script, c, translated, missing):
    """List the flags that are not translated, and are not their defaults, and those whose values
    are missing there. -> list of str"""
    known = {*OF_THE_RUN, *OF_STEPS, *SAME, *translated, *missing}
    lost = [name for name, field in script.Config.__dataclass_fields__.items()
            if name not in known and c[name] != field.default]
    lost += [name for name, values in missing.items() if c[name] in values]
    return [f"--{name} {c[name]}" for name in lost]


def as_flags(flags):
    """Write {flag: value} as command-line flags. -> str"""
    return shlex.join([word for name, value in flags.items() for word in (f"--{name}", str(value))])


def report_dpo(script, c):
    """Yield the lines that the command prints for a run of dpo.py."""
    lost = differences(script, c, SAME_IN_DPO, NOT_IN_DPO)
    if c["loss_type"] == "ipo":
        lost.append("--loss_type ipo, which TRL divides by the lengths of the outputs")
    if c["label_smoothing"] > 0 and c["loss_type"] == "sigmoid":
        lost.append("--label_smoothing, which TRL ignores in this loss")
    yield f"# differences: {', '.join(lost) or 'none of these flags'}; pairs come from a file"
    yield f"trl dpo {as_flags(of_dpo(c))} --model_name_or_path MODEL --dataset_name PAIRS"


def report(name, script, c, folder):
    """Yield the lines that the command prints for a run of another script."""
    text, used = text_of_loss(name, script, c)
    _, how = engines.load(text)
    parts, rows, _ = sizes(c)
    batch = []
    if c["num_prompts"] % parts > 0:
        batch = [f"{parts * rows // c['num_generations']} prompts in a batch, so that its "
                 f"{parts} optimizer steps are equal"]
    lost = differences(script, c, used, NOT_IN_TRL) + batch
    yield f"# the loss of this run, in TRL; differences: {', '.join(lost) or 'none'}"
    yield f"python -m engines.task {shlex.quote(c['task'])} 2000 > train.jsonl"
    yield (f"python -m engines.trl {text} {as_flags(of_trl(c))} --model_name_or_path MODEL "
           f"--dataset_name train.jsonl --output_dir {shlex.quote(f'{folder}-trl')} "
           "--reward_funcs engines/task.py:right")
    if own := own_loss_of_trl(name, c):
        yield f"\n# TRL's own loss, instead of the first words of this command\n{as_flags(own)}"
    lost = differences(script, c, used, NOT_IN_VERL) + batch
    yield f"\n# in verl; differences: {', '.join(lost) or 'none'}"
    write = f"python -m engines.task {shlex.quote(c['task'])}"
    yield f"{write} 2000 --parquet train.parquet"
    yield f"{write} 200 --split test --parquet test.parquet"
    keys = shlex.join(f"{key}={value}" for key, value in of_verl(c, how, text).items())
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
        common.fail(f"{folder}: is a run of {file}; this command takes runs of grpo.py, gspo.py, "
                    "dpo.py, examples/zoo.py and engines/here.py")
    script = import_script(file)
    c = {key: field.default for key, field in script.Config.__dataclass_fields__.items()} | flags
    if c["beta"] == 0:
        c["kl_estimator"] = "k3"        # without a KL, no estimator differs
    lines = report_dpo(script, c) if name == "dpo" else report(name, script, c, folder)
    print(*lines, sep="\n")


if __name__ == "__main__":
    start(main)
