"""What a step of pretrained/train.py costs: python -m lab.pretrained (make real).

beside: grpo.py and pretrained/train.py do the same job from the same base, by turns, with three
seeds: the seconds of a step, and in how many steps their rewards are equal. sizes: Llamas with
random weights, in one process and in two: the seconds of a step, and the most memory that a process
held. Writes docs/real.json and, between its marks in docs/real-models.md, a table.
"""
import importlib.util
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import common
import grpo
from lab.docs import MACHINE, ROOT, put, record, run, table
from pretrained import export
from report import parser, start
from report.logs import read_log

EXAMPLE = "pretrained/train.py"
EVALUATION = ["--device", "cpu", "--stop_at", 2, "--num_eval_problems", 8, "--num_eval_samples", 1]

SEEDS = (0, 1, 2)                           # beside
LIKE_GRPO = ["--task", "arithmetic", "--max_completion_length", 48, "--learning_rate", 5e-4,
             "--micro_batch_size", 32, "--save_steps", 1]       # the defaults of grpo.py

# sizes: with random weights no row has an advantage, and is left out unless there is a KL
SIZE_JOB = ["--task", "arithmetic", "--num_prompts", 8, "--num_generations", 8,
            "--max_completion_length", 48, "--micro_batch_size", 8, "--beta", 0.001,
            "--max_steps", 3, "--save_steps", 100, *EVALUATION]
SHAPES = [(128, 5, 2, 2, 352), (320, 8, 5, 5, 864), (640, 8, 10, 10, 1728)]     # as export.SHAPE
ALONE = [sys.executable]
TWO = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", 2]
VARIANTS = {                                # name: launcher, flags
    "float32": (ALONE, ["--num_threads", 2]),
    "bfloat16": (ALONE, ["--num_threads", 2, "--dtype", "bfloat16"]),
    "float32, checkpointing": (ALONE, ["--num_threads", 2, "--gradient_checkpointing"]),
    "float32, 2 processes, replicate": (TWO, ["--num_threads", 1]),
    "float32, 2 processes, fsdp": (TWO, ["--num_threads", 1, "--parallel", "fsdp"])}
IMPORTS = "import transformers; from examples import pretrained; transformers.LlamaForCausalLM"
MEGABYTES = 1e-6 if sys.platform == "darwin" else 1024e-6       # what ru_maxrss counts in


def median_step(folder):
    """The median seconds of the steps but the first, which sets up what is used first. -> float"""
    return statistics.median(line["step_time"] for line in read_log(folder, "metrics")[1:])


def measure_beside(work):
    """Both scripts from the same base, by turns. -> script -> what its runs found"""
    base = Path(work, "base")
    model = Path(work, "model")
    run("grpo.py", base, "--max_steps", 0, *EVALUATION)
    export.export(base, model)
    starts = {"grpo.py": ["--init_from", base], EXAMPLE: ["--model", model, *LIKE_GRPO]}
    found = {script: {"medians": [], "rewards": []} for script in starts}
    for seed in SEEDS:
        for script, begin in starts.items():
            folder = Path(work, f"{Path(script).stem}-{seed}")
            run(script, folder, *begin, "--max_steps", 10, "--seed", seed, *EVALUATION)
            found[script]["medians"].append(median_step(folder))
            found[script]["rewards"] += [line["reward"] for line in read_log(folder, "metrics")]
    return found


def save_random(folder, shape):
    """Write a Llama with random weights, which reads bytes. What ends a text is no token that it
    can write, so that completions have all their tokens. -> its number of parameters"""
    import transformers
    transformers.logging.disable_progress_bar()
    cfg = grpo.Config(device="cpu", **dict(zip(export.SHAPE, shape)))
    config = transformers.LlamaConfig(**export.llama_config(cfg) | {"eos_token_id": None})
    transformers.set_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.eos_token_id = grpo.VOCAB_SIZE
    model.save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=export.make_tokenizer())
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def weigh(*words):
    """Run a command. -> the most memory that a process of it held, in MB, or that we hold, with
    which its peak begins"""
    process = subprocess.Popen(map(str, words), cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)         # of the processes that it started, too
    if status != 0:
        raise SystemExit(f"{words[-1]}: failed")        # it has said why
    return usage.ru_maxrss * MEGABYTES


def measure_sizes(work):
    """Each size in each variant. -> list of dicts"""
    found = []
    spawn = multiprocessing.get_context("spawn")        # so that we hold no model
    for number, shape in enumerate(SHAPES):
        model = Path(work, f"random-{number}")
        with ProcessPoolExecutor(1, spawn) as pool:
            parameters = pool.submit(save_random, model, shape).result()
        for variant, (launcher, flags) in VARIANTS.items():
            folder = Path(work, f"size-{len(found)}")
            print(f"{parameters:,} parameters, {variant}", flush=True)
            peak = weigh(*launcher, EXAMPLE, "--model", model, *SIZE_JOB, *flags,
                         "--output_dir", folder)
            found.append({"parameters": parameters, "variant": variant,
                          "median": median_step(folder), "peak_MB": peak})
    return found


def written(beside, imports_MB, sizes, machine):
    """The table, and what is said below it. -> str"""
    medians = [statistics.median(found["medians"]) for found in beside.values()]
    rewards = zip(*(found["rewards"] for found in beside.values()), strict=True)
    is_equal = [ours == theirs for ours, theirs in rewards]
    rows = [["that of grpo.py", *(f"{seconds:.2f} s" for seconds in medians), *["-"] * 4]]
    for parameters in dict.fromkeys(row["parameters"] for row in sizes):
        cells = [f"{row['median']:.2f} s, {row['peak_MB']:.0f} MB" for row in sizes
                 if row["parameters"] == parameters]
        rows.append([f"{parameters:,}", "-", *cells])
    head = ["parameters", "grpo.py", *VARIANTS]
    return (f"{table(head, rows)}\nSeconds a step, and the peak of a process, of which "
            f"{imports_MB:.0f} MB are imports. First row: the main job on one thread; in "
            f"{sum(is_equal)} of {len(is_equal)} steps the rewards are equal. The others: random "
            "weights, 8 prompts, 8 completions of each, all of 48 tokens; each reward is 0, and "
            "gradients are computed all the same; two threads, or two processes with one. "
            f"Medians, without the first step. {machine}.\n")


def main():
    parser(__doc__).parse_args()
    if importlib.util.find_spec("transformers") is None:
        common.fail("transformers is missing: pip install -r pretrained/requirements.txt")
    with tempfile.TemporaryDirectory() as work:
        found = {"beside": measure_beside(work), "imports_MB": weigh(*ALONE, "-c", IMPORTS),
                 "sizes": measure_sizes(work)}
    record("real", **found)
    put("measured", written(**found, machine=MACHINE), "real")


if __name__ == "__main__":
    start(main)
