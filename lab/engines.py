"""What vLLM and LoRA do and cost: python -m lab.engines (make engine), in an environment with
pretrained/requirements-vllm.txt.

learning: the main job of pretrained/train.py from one base, by each engine and dtype and with
LoRA: greedy answers on the way, and how far sampler and trainer differ. sampling: the seconds in
which both engines complete the same prompts, by turns. memory: with LoRA and without. Writes
docs/engine.json and, between their marks in docs/real-models.md, tables.
"""
import importlib.util
import multiprocessing
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import common
from lab.docs import MACHINE, put, record, run, table
from lab.pretrained import EVALUATION, EXAMPLE, LIKE_GRPO, median_step, save_random, weigh
from pretrained import export
from report import parser, start
from report.logs import read_log

SEEDS = (0, 1, 2)
VLLM = ["--engine", "vllm", "--engine_memory", 0.1]
HALF = ["--dtype", "bfloat16"]
LORA = ["--lora_rank", 8, "--learning_rate"]
NO_CORRECTION = ["--importance_sampling_correction", "none"]
VARIANTS = {                                # name: flags
    "transformers, float32": [],
    "transformers, bfloat16": HALF,
    "vLLM, float32": VLLM,
    "vLLM, bfloat16": [*VLLM, *HALF],
    "vLLM, bfloat16, no correction": [*VLLM, *HALF, *NO_CORRECTION],
    "LoRA of rank 8, learning rate 5e-4": [*LORA, 5e-4],
    "LoRA of rank 8, learning rate 2e-3": [*LORA, 2e-3],
    "the same, vLLM, bfloat16": [*LORA, 2e-3, *VLLM, *HALF]}
SHOWN = (10, 20, 30)                        # steps after which there is an evaluation
LEARNING = ["--max_steps", SHOWN[-1], "--eval_steps", 10, "--stop_at", 2, "--num_eval_samples", 1]
DIFFERENCE = "sampling/sampling_logp_difference/mean"

# sampling: name: shape as export.SHAPE, rows, tokens of each, dtype
SIZES = {"1 M, 256 rows of 48": ((128, 5, 2, 2, 352), 256, 48, "float32"),
         "10 M, 64 rows of 256": ((320, 8, 5, 5, 864), 64, 256, "float32"),
         "10 M, 64 rows of 256, bfloat16": ((320, 8, 5, 5, 864), 64, 256, "bfloat16")}
REPETITIONS = 3

# memory
MEMORY_JOB = ["--task", "arithmetic", "--num_prompts", 8, "--num_generations", 8, "--beta", 0.001,
              "--max_completion_length", 48, "--max_steps", 3, *EVALUATION]
MEMORY = {"all weights": [], "LoRA of rank 8": ["--lora_rank", 8],
          "LoRA of rank 8, bfloat16": ["--lora_rank", 8, *HALF]}


def measure_learning(work):
    """Each variant with each seed. -> name -> what its runs found"""
    base, model = Path(work, "base"), Path(work, "model")
    run("grpo.py", base, "--max_steps", 0, "--num_attention_heads", 2, *EVALUATION)
    export.export(base, model)
    found = {}
    for name, flags in VARIANTS.items():
        greedy, differences, seconds = [], [], []
        for seed in SEEDS:
            folder = Path(work, f"run-{len(found)}-{seed}")
            run(EXAMPLE, folder, "--model", model, *LIKE_GRPO, *LEARNING, "--seed", seed, *flags)
            log = read_log(folder, "metrics")
            greedy.append([line["eval/greedy"] for line in log if "eval/greedy" in line])
            differences.append(statistics.mean(line[DIFFERENCE] for line in log))
            seconds.append(median_step(folder))
        found[name] = {
            "greedy": greedy, "mean": [statistics.mean(column) for column in zip(*greedy)],
            "difference": statistics.mean(differences), "median": statistics.median(seconds)}
    return found


def time_engines(model, shape, rows, T, dtype):
    """The seconds of both engines for the same prompts, by turns. -> dict of lists"""
    from pretrained import train as pretrained
    save_random(model, shape)
    cfg = pretrained.Config(
        model=str(model), max_completion_length=T, dtype=dtype, engine="vllm", engine_memory=0.1,
        device="cpu", num_threads=1)
    policy = pretrained.Policy(model, cfg)
    policy.ends = []                                    # so that all rows have all their tokens
    problems = [common.Problem(f"(3+{i})=", "") for i in range(rows)]
    engines = {"transformers": None, "vllm": pretrained.load_engine(policy, T + 32)}
    torch.set_num_threads(cfg.num_threads)
    found = {name: [] for name in engines}
    for repetition in range(REPETITIONS + 1):           # the first warms up
        for name, policy.engine in engines.items():
            begin = time.perf_counter()
            batch = pretrained.complete(
                policy, None, cfg, problems, common.generator("time", repetition))
            found[name].append(time.perf_counter() - begin)
            assert batch.mask.sum() == rows * T
    return {name: seconds[1:] for name, seconds in found.items()}


def measure_sampling(work):
    """-> name of a size -> dict"""
    found = {}
    spawn = multiprocessing.get_context("spawn")        # so that we hold no model
    for name, size in SIZES.items():
        with ProcessPoolExecutor(1, spawn) as pool:
            model = Path(work, f"random-{len(found)}")
            seconds = pool.submit(time_engines, model, *size).result()
        median = {engine: statistics.median(some) for engine, some in seconds.items()}
        found[name] = {"seconds": seconds, "median": median,
                       "faster": median["transformers"] / median["vllm"]}
    return found


def measure_memory(work):
    """-> name -> MB at the peak, MB of a checkpoint"""
    model = Path(work, "large")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(save_random, model, (640, 8, 10, 10, 1728)).result()
    found = {}
    for name, flags in MEMORY.items():
        folder = Path(work, f"memory-{len(found)}")
        peak = weigh(sys.executable, EXAMPLE, "--model", model, *MEMORY_JOB, *flags,
                     "--output_dir", folder)
        files = [folder / "checkpoint.pt", *folder.glob("checkpoint-*/*")]
        found[name] = {"peak_MB": peak,
                       "checkpoint_MB": sum(path.stat().st_size for path in files) * 1e-6}
    return found


def written(learning, sampling, memory):
    """The tables. -> name -> str"""
    rows = []
    for name, one in learning.items():
        lowest = map(min, zip(*one["greedy"]))
        cells = [f"{mean:.3f} ({low:.3f})" for mean, low in zip(one["mean"], lowest)]
        rows.append([name, *cells, f"{one['difference']:.0e}", f"{one['median']:.2f} s"])
    head = ["", *(f"greedy after {n} steps" for n in SHOWN), "sampler and trainer differ by",
            "a step"]
    text = {"learning": table(head, rows) + (
        f"\nThe main job from one base, {len(SEEDS)} seeds: means, and the lowest. One thread; "
        f"{MACHINE}.\n")}
    rows = [[name, *(f"{one['median'][engine]:.2f} s" for engine in one["median"]),
             f"{one['faster']:.1f}"] for name, one in sampling.items()]
    cost = table(["parameters", "transformers", "vLLM", "times as fast"], rows)
    rows = [[name, f"{one['peak_MB']:.0f} MB", f"{one['checkpoint_MB']:.1f} MB"]
            for name, one in memory.items()]
    text["cost"] = cost + "\n" + table(
        ["40 M, with --beta", "peak of the process", "a checkpoint"], rows)
    return text


def main():
    parser(__doc__).parse_args()
    for package in ("vllm", "peft", "transformers"):
        if importlib.util.find_spec(package) is None:
            common.fail(f"{package} is missing: make engine has an environment for it")
    with tempfile.TemporaryDirectory() as work:
        found = {"learning": measure_learning(work), "sampling": measure_sampling(work),
                 "memory": measure_memory(work)}
    record("engine", **found)
    for name, text in written(**found).items():
        put(name, text, "engine")


if __name__ == "__main__":
    start(main)
