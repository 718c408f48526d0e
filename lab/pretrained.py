"""Compare pretrained/train.py with grpo.py, and measure what vLLM and LoRA change.

python -m lab.pretrained (make real): grpo.py and pretrained/train.py do the same job, starting from
the same base. We count the steps in which the rewards of both are equal.
python -m lab.pretrained --engine (make engine, needs pretrained/requirements-vllm.txt):
pretrained/train.py does the main job from one base, with each engine and dtype, and with LoRA. We
measure greedy accuracies, and how far sampler and trainer differ.

The numbers go to docs/real.json or docs/engine.json, and from there to docs/real-models.md, between
its marks.
"""
import statistics
import tempfile
from importlib.util import find_spec
from pathlib import Path

import common
from lab.docs import MACHINE, put, record, run, run_once, table
from pretrained import export
from report import parser, start

SEEDS = (0, 1, 2)
EXAMPLE = "pretrained/train.py"
EVALUATION = "--device cpu --num_eval_problems 8 --num_eval_samples 1"
LIKE_GRPO = ("--task arithmetic --max_completion_length 48 --learning_rate 5e-4 "
             "--micro_batch_size 32 --save_steps 1")            # as the defaults of grpo.py
HALF = "--dtype bfloat16"
VLLM = "--engine vllm --engine_memory 0.1"
LORA = "--lora_rank 8 --learning_rate"
LEARNING = {                            # name: flags
    "transformers, float32": "",
    "transformers, bfloat16": HALF,
    "vLLM, float32": VLLM,
    "vLLM, bfloat16": f"{VLLM} {HALF}",
    "vLLM, bfloat16, no correction": f"{VLLM} {HALF} --importance_sampling_correction none",
    "LoRA of rank 8, learning rate 5e-4": f"{LORA} 5e-4",
    "LoRA of rank 8, learning rate 2e-3": f"{LORA} 2e-3",
    "LoRA, learning rate 2e-3, vLLM, bfloat16": f"{LORA} 2e-3 {VLLM} {HALF}"}
SHOWN = (10, 20, 30)                    # steps after which a run is evaluated
DIFFERENCE = "sampling/sampling_logp_difference/mean"


def make_base(work, flags=""):
    """Train a base with grpo.py, and export it. -> its run folder, the exported folder"""
    base, model = Path(work, "base"), Path(work, "model")
    run("grpo.py", base, "--max_steps", 0, *flags.split(), *EVALUATION.split())
    export.export(base, model)
    return base, model


# ---- 1. make real ----------------------------------------------------------------------------

def measure_real(work):
    """Run both scripts from the same base. -> {script: the reward of each step}"""
    base, model = make_base(work)
    commands = {"grpo.py": f"grpo.py --init_from {base}",
                EXAMPLE: f"{EXAMPLE} --model {model} {LIKE_GRPO}"}
    results = {script: [] for script in commands}
    for seed in SEEDS:
        for script, command in commands.items():
            results[script] += run_once(
                f"{command} --max_steps 10 {EVALUATION}", seed, ["reward"])["reward"]
    return results


def real_text(results):
    """-> text in Markdown"""
    is_equal = [ours == theirs for ours, theirs in zip(*results.values(), strict=True)]
    return (f"If both scripts do the main job from the same base, with {len(SEEDS)} seeds, their "
            f"rewards are equal in {sum(is_equal)} of {len(is_equal)}\nsteps. {MACHINE}.\n")


# ---- 2. make engine --------------------------------------------------------------------------

def measure_engine(work):
    """Run each variant with each seed. -> {name: its numbers}"""
    _, model = make_base(work, "--num_attention_heads 2")
    job = (f"{EXAMPLE} --model {model} {LIKE_GRPO} --max_steps {SHOWN[-1]} --eval_steps {SHOWN[0]} "
           "--num_eval_samples 1")
    results = {}
    for name, flags in LEARNING.items():
        runs = [run_once(f"{job} {flags}", seed, ["eval/greedy", DIFFERENCE]) for seed in SEEDS]
        greedy = [[x for x in one["eval/greedy"] if x is not None] for one in runs]
        results[name] = {
            "greedy": greedy, "mean": [statistics.mean(column) for column in zip(*greedy)],
            "difference": statistics.mean(statistics.mean(one[DIFFERENCE]) for one in runs)}
    return results


def engine_table(results):
    """-> text in Markdown"""
    rows = []
    for name, numbers in results.items():
        lowest = map(min, zip(*numbers["greedy"]))
        cells = [f"{mean:.3f} ({low:.3f})" for mean, low in zip(numbers["mean"], lowest)]
        rows.append([name, *cells, f"{numbers['difference']:.0e}"])
    heads = ["", *(f"greedy after {n} steps" for n in SHOWN),
             "sampler and trainer differ by (nats per token)"]
    return (f"{table(heads, rows)}\nEach row does the main job from the same base, with "
            f"{len(SEEDS)} seeds. *greedy* is the share of held-out problems that the\nmost likely "
            "answers get right: the mean over the seeds, with the lowest seed in parentheses. One "
            f"thread;\n{MACHINE}.\n")


def main(argv=None):
    arguments = parser(__doc__)
    arguments.add_argument("--engine", action="store_true",
                           help="measure vLLM and LoRA (make engine)")
    is_engine = arguments.parse_args(argv).engine
    for package in ("transformers", "vllm", "peft") if is_engine else ("transformers",):
        if find_spec(package) is None:
            common.fail(f"{package} is missing: see the files pretrained/requirements*.txt")
    target, measure, name, show = "real", measure_real, "beside", real_text
    if is_engine:
        target, measure, name, show = "engine", measure_engine, "learning", engine_table
    with tempfile.TemporaryDirectory() as work:
        results = measure(work)
    record(target, **{name: results})
    put(name, show(results), target)


if __name__ == "__main__":
    start(main)
