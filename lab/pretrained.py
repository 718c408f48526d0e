"""What a step of pretrained/train.py costs, and what vLLM and LoRA change: python -m lab.pretrained
(make real), or with --engine (make engine), which needs pretrained/requirements-vllm.txt.

make real: grpo.py and pretrained/train.py do the same job from the same base, by turns, which gives
the seconds of a step, and in how many steps their rewards are equal.
make engine: pretrained/train.py does the main job from one base with each engine and dtype and with
LoRA, which gives greedy accuracies, the seconds of a step, and how far sampler and trainer differ.

Writes docs/real.json or docs/engine.json and, between its marks in docs/real-models.md, a table.
"""
import statistics
import tempfile
from importlib.util import find_spec
from pathlib import Path

import common
from lab.docs import MACHINE, put, record, run, table
from pretrained import export
from report import parser, start
from report.logs import read_log

SEEDS = (0, 1, 2)
EXAMPLE = "pretrained/train.py"
EVALUATION = ["--device", "cpu", "--stop_at", 2, "--num_eval_problems", 8, "--num_eval_samples", 1]
LIKE_GRPO = ["--task", "arithmetic", "--max_completion_length", 48, "--learning_rate", 5e-4,
             "--micro_batch_size", 32, "--save_steps", 1]       # the defaults of grpo.py
HALF = ["--dtype", "bfloat16"]
VLLM = ["--engine", "vllm", "--engine_memory", 0.1]
LORA = ["--lora_rank", 8]
LEARNING = {                            # name: flags
    "transformers, float32": [],
    "transformers, bfloat16": HALF,
    "vLLM, float32": VLLM,
    "vLLM, bfloat16": [*VLLM, *HALF],
    "vLLM, bfloat16, no correction": [
        *VLLM, *HALF, "--importance_sampling_correction", "none"],
    "LoRA of rank 8, learning rate 5e-4": [*LORA, "--learning_rate", 5e-4],
    "LoRA of rank 8, learning rate 2e-3": [*LORA, "--learning_rate", 2e-3],
    "LoRA, learning rate 2e-3, vLLM, bfloat16": [*LORA, "--learning_rate", 2e-3, *VLLM, *HALF]}
SHOWN = (10, 20, 30)                    # steps after which there is an evaluation
DIFFERENCE = "sampling/sampling_logp_difference/mean"


def median_step(log):
    """The median seconds of a step, without the first, which sets things up. -> float"""
    return statistics.median(line["step_time"] for line in log[1:])


def make_base(work, *flags):
    """Make a base of grpo.py. -> its run folder, and its export"""
    base, model = Path(work, "base"), Path(work, "model")
    run("grpo.py", base, "--max_steps", 0, *flags, *EVALUATION)
    export.export(base, model)
    return base, model


# ---- 1. make real ----------------------------------------------------------------------------

def measure_real(work):
    """Both scripts from the same base, by turns. -> script -> what its runs found"""
    base, model = make_base(work)
    starts = {"grpo.py": ["--init_from", base], EXAMPLE: ["--model", model, *LIKE_GRPO]}
    found = {script: {"medians": [], "rewards": []} for script in starts}
    for seed in SEEDS:
        for script, begin in starts.items():
            folder = Path(work, f"{Path(script).stem}-{seed}")
            run(script, folder, *begin, "--max_steps", 10, "--seed", seed, *EVALUATION)
            log = read_log(folder, "metrics")
            found[script]["medians"].append(median_step(log))
            found[script]["rewards"] += [line["reward"] for line in log]
    return found


def real_table(scripts):
    rewards = zip(*(found["rewards"] for found in scripts.values()), strict=True)
    is_equal = [ours == theirs for ours, theirs in rewards]
    rows = [[script, f"{statistics.median(found['medians']):.2f} s"]
            for script, found in scripts.items()]
    return (f"{table(['script', 'seconds a step'], rows)}\nThe main job from one base, on one "
            f"thread, {len(SEEDS)} seeds: medians, without the first step. In {sum(is_equal)} of "
            f"{len(is_equal)} steps the rewards are equal. {MACHINE}.\n")


# ---- 2. make engine --------------------------------------------------------------------------

def measure_engine(work):
    """Each variant with each seed. -> name -> what its runs found"""
    _, model = make_base(work, "--num_attention_heads", 2)
    job = ["--model", model, *LIKE_GRPO, "--max_steps", SHOWN[-1], "--eval_steps", SHOWN[0],
           "--stop_at", 2, "--num_eval_samples", 1]
    found = {}
    for name, flags in LEARNING.items():
        greedy, differences, seconds = [], [], []
        for seed in SEEDS:
            folder = Path(work, f"{len(found)}-{seed}")
            run(EXAMPLE, folder, *job, "--seed", seed, *flags)
            log = read_log(folder, "metrics")
            greedy.append([line["eval/greedy"] for line in log if "eval/greedy" in line])
            differences.append(statistics.mean(line[DIFFERENCE] for line in log))
            seconds.append(median_step(log))
        found[name] = {
            "greedy": greedy, "mean": [statistics.mean(column) for column in zip(*greedy)],
            "difference": statistics.mean(differences), "median": statistics.median(seconds)}
    return found


def engine_table(variants):
    rows = []
    for name, found in variants.items():
        lowest = map(min, zip(*found["greedy"]))
        cells = [f"{mean:.3f} ({low:.3f})" for mean, low in zip(found["mean"], lowest)]
        rows.append([name, *cells, f"{found['difference']:.0e}", f"{found['median']:.2f} s"])
    heads = ["", *(f"greedy after {n} steps" for n in SHOWN), "sampler and trainer differ by",
             "a step"]
    return (f"{table(heads, rows)}\nThe main job from one base, {len(SEEDS)} seeds: means, "
            f"and the lowest. One thread; {MACHINE}.\n")


def main(argv=None):
    words = parser(__doc__)
    words.add_argument("--engine", action="store_true", help="vLLM and LoRA (make engine)")
    is_engine = words.parse_args(argv).engine
    for package in ("transformers", "vllm", "peft") if is_engine else ("transformers",):
        if find_spec(package) is None:
            common.fail(f"{package} is missing: see the files pretrained/requirements*.txt")
    target, measure, name, show = "real", measure_real, "beside", real_table
    if is_engine:
        target, measure, name, show = "engine", measure_engine, "learning", engine_table
    with tempfile.TemporaryDirectory() as work:
        found = measure(work)
    record(target, **{name: found})
    put(name, show(found), target)


if __name__ == "__main__":
    start(main)
