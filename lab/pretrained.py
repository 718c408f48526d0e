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
from pathlib import Path

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

def compare(work):
    """Run both scripts from the same base, and count the steps with equal rewards."""
    base, model = make_base(work)
    commands = {"grpo.py": f"grpo.py --init_from {base}",
                EXAMPLE: f"{EXAMPLE} --model {model} {LIKE_GRPO}"}
    results = {script: [] for script in commands}
    for seed in SEEDS:
        for script, command in commands.items():
            results[script] += run_once(
                f"{command} --max_steps 10 {EVALUATION}", seed, ["reward"])["reward"]
    record("real", beside=results)
    is_equal = [ours == theirs for ours, theirs in zip(*results.values(), strict=True)]
    put("beside", f"If both scripts do the main job from the same base, with {len(SEEDS)} seeds, "
        f"their rewards are equal in {sum(is_equal)} of {len(is_equal)}\nsteps. {MACHINE}.\n",
        "real")


# ---- 2. make engine --------------------------------------------------------------------------

def measure_engine(work):
    """Run each variant with each seed, and write the table."""
    _, model = make_base(work, "--num_attention_heads 2")
    job = (f"{EXAMPLE} --model {model} {LIKE_GRPO} --max_steps {SHOWN[-1]} --eval_steps {SHOWN[0]} "
           "--num_eval_samples 1")
    results = {}
    rows = []
    for name, flags in LEARNING.items():
        runs = [run_once(f"{job} {flags}", seed, ["eval/greedy", DIFFERENCE]) for seed in SEEDS]
        greedy = [[x for x in one["eval/greedy"] if x is not None] for one in runs]
        difference = statistics.mean(statistics.mean(one[DIFFERENCE]) for one in runs)
        results[name] = {"greedy": greedy, "difference": difference}
        cells = [f"{statistics.mean(scores):.3f} ({min(scores):.3f})" for scores in zip(*greedy)]
        rows.append([name, *cells, f"{difference:.0e}"])
    record("engine", learning=results)
    heads = ["", *(f"greedy after {n} steps" for n in SHOWN),
             "sampler and trainer differ by (nats per token)"]
    put("learning", f"{table(heads, rows)}\nEach row does the main job from the same base, with "
        f"{len(SEEDS)} seeds. *greedy* is the share of held-out problems that the\nmost likely "
        "answers get right: the mean over the seeds, with the lowest seed in parentheses. One "
        f"thread;\n{MACHINE}.\n", "engine")


def main(argv=None):
    arguments = parser(__doc__)
    arguments.add_argument("--engine", action="store_true",
                           help="measure vLLM and LoRA (make engine)")
    with tempfile.TemporaryDirectory() as work:
        (measure_engine if arguments.parse_args(argv).engine else compare)(work)


if __name__ == "__main__":
    start(main)
