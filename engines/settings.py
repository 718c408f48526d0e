"""Print the settings of TRL 1.16 and verl 0.9 that mean the same as the flags of a run.

  python -m engines.settings runs/grpo-arithmetic-s0      # of grpo.py, gspo.py, zoo.py, here.py

The first command trains with TRL on the loss of the run, by engines/trl.py. If TRL has this loss
itself, its own settings follow. verl's command uses engines/verl.py. Flags that have no counterpart
there are listed. docs/engines.md says how to continue.
"""
import contextlib
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
OF_STEPS = {"max_steps", "save_steps", "num_prompts", "num_mini_batches", "max_grad_norm"}
# Values that are missing there, or that mean something else
MISSING = {"TRL": {"kl_estimator": ("k1", "k2"), "scale_rewards": ("mean",)},
           "verl": {"kl_estimator": ("k3_ratio",), "scale_rewards": ("batch", "mean"),
                    "mask_truncated_completions": (True,)}}


def losses_of(name, script, c):
    """Write the loss of a run as `engines.load` reads it, and translate it into TRL's own. -> str,
    names of the flags in it, {flag: value}, which is {} if TRL lacks it"""
    if name == "here":
        return c["loss"], ["loss"], {}
    known, _ = engines.parameters_of(script, "policy_loss", c["loss_type"])
    used = [key for key in known if key in c]
    own = {"here": c["loss_type"]}
    loss = names.find(script=name, **own) or names.find(script="grpo", **own)
    settings = {key: c[here] for key, (here, *_) in names.SETTINGS.get(loss.method, {}).items()
                if here in c and (here, c[here]) != ("delta", 0)}       # 0: no bound
    flags = {}
    with contextlib.suppress(NotImplementedError):
        flags = names.translate(loss, settings, "trl")
    return " ".join([f"{name}:policy_loss", *(f"{key}={c[key]}" for key in used)]), used, flags


def translated(c, how, text):
    """Translate the flags of a run that both have, too, and for verl the loss.
    -> {flag of GRPOConfig: value}, {key of verl's configuration: value}"""
    parts = min(c["num_mini_batches"], c["num_prompts"])        # optimizer steps in a pass
    prompts = c["num_prompts"] // parts                         # groups stay whole
    rows = prompts * c["num_generations"]                       # outputs in an optimizer step
    size = max(b for b in range(1, c["micro_batch_size"] + 1) if rows % b == 0)
    updates = parts * c["num_iterations"]                       # TRL counts these as steps
    norm = c["max_grad_norm"] or 1e9
    trl = {name: c[name] for name in SAME} | {
        "max_steps": c["max_steps"] * updates, "save_steps": c["save_steps"] * updates,
        "per_device_train_batch_size": size, "gradient_accumulation_steps": rows // size,
        "steps_per_generation": parts * rows // size, "max_grad_norm": norm,
        "use_bias_correction_kl": c["kl_estimator"] == "k3_ratio",
        "lr_scheduler_type": "constant", "bf16": False}
    actor = {
        "policy_loss.loss_mode": f"'{text}'", "loss_agg_mode": names.AVERAGES[how],
        "loss_scale_factor": c["max_completion_length"] if how == "constant" else "null",
        "ppo_mini_batch_size": prompts, "ppo_micro_batch_size_per_gpu": size,
        "optim.clip_grad": norm, "optim.weight_decay": 0.0, "use_kl_loss": c["beta"] > 0,
        "kl_loss_type": names.KL_TYPES[c["kl_estimator"].removesuffix("_ratio")]}
    verl = {f"{ACTOR}{key}": value for key, value in actor.items()} | {
        key: c[name] for name, key in SAME.items() if key} | {
        "algorithm.adv_estimator": "ours",
        "algorithm.norm_adv_by_std_in_grpo": c["scale_rewards"] != "none",
        "data.train_batch_size": c["num_prompts"],
        "trainer.total_training_steps": c["max_steps"], "trainer.save_freq": c["save_steps"],
        "reward.custom_reward_function.path": "pkg://engines.task",
        "reward.custom_reward_function.name": "score", f"{ROLLOUT}name": "vllm",
        f"{ROLLOUT}log_prob_micro_batch_size_per_gpu": size, "trainer.n_gpus_per_node": 1,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": size}
    return trl, verl


def differences(script, c, used, missing):
    """List the flags that are not translated, and are not their defaults, and those whose values
    are missing there. -> str"""
    known = {*OF_THE_RUN, *OF_STEPS, *SAME, *used, *missing}
    lost = [name for name, field in script.Config.__dataclass_fields__.items()
            if name not in known and c[name] != field.default]
    lost += [name for name, values in missing.items() if c[name] in values]
    if c["num_prompts"] % c["num_mini_batches"]:        # the batch there has fewer prompts
        lost.append("num_mini_batches")
    return ", ".join(f"--{name} {c[name]}" for name in lost) or "none"


def report(name, script, c, folder):
    """Yield the lines that the command prints."""
    def as_flags(flags):
        return shlex.join(word for key, x in flags.items() for word in (f"--{key}", str(x)))
    text, used, own = losses_of(name, script, c)
    trl, verl = translated(c, engines.load(text)[1], text)
    lost = {place: differences(script, c, used, missing) for place, missing in MISSING.items()}
    write = f"python -m engines.task {shlex.quote(c['task'])}"
    yield f"# the loss of this run, in TRL; differences: {lost['TRL']}"
    yield f"{write} 2000 > train.jsonl"
    yield (f"python -m engines.trl {text} {as_flags(trl)} --model_name_or_path MODEL "
           f"--dataset_name train.jsonl --output_dir {shlex.quote(f'{folder}-trl')} "
           "--reward_funcs engines/task.py:right")
    if own:
        yield f"\n# TRL's own loss, instead of the first words of this command\n{as_flags(own)}"
    yield f"\n# in verl; differences: {lost['verl']}"
    yield f"{write} 2000 --parquet train.parquet"
    yield f"{write} 200 --split test --parquet test.parquet"
    keys = shlex.join(f"{key}={value}" for key, value in verl.items())
    yield (f"VERL_USE_EXTERNAL_MODULES=engines.verl LOSS={shlex.quote(text)} "
           f"python -m verl.trainer.main_ppo {keys} actor_rollout_ref.model.path=MODEL "
           "data.train_files=train.parquet data.val_files=test.parquet")


def main(argv=None):
    arguments = parser(__doc__)
    arguments.add_argument("run", metavar="RUN", help="run folder")
    folder = arguments.parse_args(argv).run
    file, flags = plumbing.read_config(folder)
    name = file.removesuffix(".py")
    if name not in ("grpo", "gspo", "zoo", "here"):
        common.fail(f"{folder}: is a run of {file}; this command takes runs of grpo.py, gspo.py, "
                    "examples/zoo.py and engines/here.py")
    script = import_script(file)
    c = {key: field.default for key, field in script.Config.__dataclass_fields__.items()} | flags
    if c["beta"] == 0:
        c["kl_estimator"] = "k3"        # without a KL, no estimator differs
    print(*report(name, script, c, folder), sep="\n")


if __name__ == "__main__":
    start(main)
