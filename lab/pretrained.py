"""What a step of pretrained/train.py costs, and what vLLM and LoRA change: python -m lab.pretrained
(make real), or with --engine (make engine), which needs pretrained/requirements-vllm.txt.

make real: grpo.py and pretrained/train.py do the same job from the same base, by turns, which gives
the seconds of a step, and in how many steps their rewards are equal. Then Llamas with random
weights take three steps, in one process and in two, which gives the seconds of a step, and the
most memory that a process held.

make engine: pretrained/train.py does the main job from one base with each engine and dtype and with
LoRA, which gives the greedy accuracy and how far sampler and trainer differ. Both engines
complete the same prompts, by turns. LoRA's memory is measured as above.

Writes docs/real.json or docs/engine.json and, between their marks in docs/real-models.md, tables.
"""
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import torch

import common
import grpo
from lab.docs import MACHINE, ROOT, put, record, run, table
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

# steps of random weights: no row has an advantage, so only a KL keeps the rows in the batch
SMALL, MEDIUM, LARGE = SHAPES = [       # as export.SHAPE: 1, 10 and 40 million parameters
    (128, 5, 2, 2, 352), (320, 8, 5, 5, 864), (640, 8, 10, 10, 1728)]
STEPS = ["--task", "arithmetic", "--num_prompts", 8, "--num_generations", 8, "--beta", 0.001,
         "--max_completion_length", 48, "--micro_batch_size", 8, "--max_steps", 3, *EVALUATION]
TWO = ["-m", "torch.distributed.run", "--nproc_per_node", 2]
COSTS = {                               # name: launcher, flags
    "float32": ([], ["--num_threads", 2]),
    "bfloat16": ([], ["--num_threads", 2, *HALF]),
    "float32, checkpointing": ([], ["--num_threads", 2, "--gradient_checkpointing"]),
    "float32, 2 processes, replicate": (TWO, ["--num_threads", 1]),
    "float32, 2 processes, fsdp": (TWO, ["--num_threads", 1, "--parallel", "fsdp"])}
MEMORY = {"all weights": ([], []), "LoRA of rank 8": ([], LORA),
          "LoRA of rank 8, bfloat16": ([], [*LORA, *HALF])}
IMPORTS = "import transformers; from pretrained import train; transformers.LlamaForCausalLM"
MEGABYTES = 1e-6 if sys.platform == "darwin" else 1024e-6       # the unit of ru_maxrss

LEARNING = {                            # name: flags
    "transformers, float32": [],
    "transformers, bfloat16": HALF,
    "vLLM, float32": VLLM,
    "vLLM, bfloat16": [*VLLM, *HALF],
    "vLLM, bfloat16, no correction": [
        *VLLM, *HALF, "--importance_sampling_correction", "none"],
    "LoRA of rank 8, learning rate 5e-4": [*LORA, "--learning_rate", 5e-4],
    "LoRA of rank 8, learning rate 2e-3": [*LORA, "--learning_rate", 2e-3],
    "the same, vLLM, bfloat16": [*LORA, "--learning_rate", 2e-3, *VLLM, *HALF]}
SHOWN = (10, 20, 30)                    # steps after which there is an evaluation
DIFFERENCE = "sampling/sampling_logp_difference/mean"
SAMPLING = {                            # name: shape, rows, tokens of each row, dtype
    "1 M, 256 rows of 48": (SMALL, 256, 48, "float32"),
    "10 M, 64 rows of 256": (MEDIUM, 64, 256, "float32"),
    "10 M, 64 rows of 256, bfloat16": (MEDIUM, 64, 256, "bfloat16")}
REPETITIONS = 3


# ---- 1. runs ---------------------------------------------------------------------------------

def median_step(folder):
    """The median seconds of a step, without the first, which sets things up. -> float"""
    return statistics.median(line["step_time"] for line in read_log(folder, "metrics")[1:])


def make_base(work, *flags):
    """Make a base of grpo.py. -> its run folder, and its export"""
    base, model = Path(work, "base"), Path(work, "model")
    run("grpo.py", base, "--max_steps", 0, *flags, *EVALUATION)
    export.export(base, model)
    return base, model


def apart(function, *args):
    """Call a function in a process of its own, so that this one holds no model. -> its result"""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def save_random(folder, shape):
    """Write a Llama with random weights, which reads bytes. It cannot write the token that ends a
    text, so completions have all their tokens. -> its number of parameters"""
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
    """Run python with these words. -> the most memory that one of its processes held, in MB; it is
    at least our own, with which a process begins"""
    command = [sys.executable, *map(str, words)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{words[-1]}: failed")        # it has printed why
    return usage.ru_maxrss * MEGABYTES


def measure_steps(work, shapes, variants):
    """Steps of each shape in each variant. -> list of dicts"""
    found = []
    for shape in shapes:
        model = Path(work, f"random-{shape[0]}")
        parameters = apart(save_random, model, shape)
        for variant, (launcher, flags) in variants.items():
            folder = Path(work, f"steps-{len(found)}")
            print(f"{parameters:,} parameters, {variant}", flush=True)
            peak = weigh(*launcher, EXAMPLE, "--model", model, *STEPS, *flags,
                         "--output_dir", folder)
            files = [folder / "checkpoint.pt", *folder.glob("checkpoint-*/*")]
            found.append({"parameters": parameters, "variant": variant, "peak_MB": peak,
                          "median": median_step(folder),
                          "checkpoint_MB": sum(path.stat().st_size for path in files) * 1e-6})
    return found


# ---- 2. make real ----------------------------------------------------------------------------

def measure_beside(work):
    """Both scripts from the same base, by turns. -> script -> what its runs found"""
    base, model = make_base(work)
    starts = {"grpo.py": ["--init_from", base], EXAMPLE: ["--model", model, *LIKE_GRPO]}
    found = {script: {"medians": [], "rewards": []} for script in starts}
    for seed in SEEDS:
        for script, begin in starts.items():
            folder = Path(work, f"{Path(script).stem}-{seed}")
            run(script, folder, *begin, "--max_steps", 10, "--seed", seed, *EVALUATION)
            found[script]["medians"].append(median_step(folder))
            found[script]["rewards"] += [line["reward"] for line in read_log(folder, "metrics")]
    return found


def measure_real(work):
    return {"beside": measure_beside(work), "imports_MB": weigh("-c", IMPORTS),
            "sizes": measure_steps(work, SHAPES, COSTS)}


def real_tables(beside, imports_MB, sizes, machine=MACHINE):
    """The table, and the text below it. -> name -> str"""
    medians = [statistics.median(found["medians"]) for found in beside.values()]
    rewards = zip(*(found["rewards"] for found in beside.values()), strict=True)
    is_equal = [ours == theirs for ours, theirs in rewards]
    rows = [["that of grpo.py", *(f"{seconds:.2f} s" for seconds in medians), *["-"] * 4]]
    for parameters in dict.fromkeys(row["parameters"] for row in sizes):
        cells = [f"{row['median']:.2f} s, {row['peak_MB']:.0f} MB" for row in sizes
                 if row["parameters"] == parameters]
        rows.append([f"{parameters:,}", "-", *cells])
    return {"measured": (
        f"{table(['parameters', 'grpo.py', *COSTS], rows)}\nSeconds a step, and the peak of a "
        f"process, of which {imports_MB:.0f} MB are imports. First row: the main job on one "
        f"thread; in {sum(is_equal)} of {len(is_equal)} steps the rewards are equal. The others: "
        "random weights, 8 prompts, 8 completions of each, all of 48 tokens; each reward is 0, and "
        "gradients are computed all the same; two threads, or two processes with one. "
        f"Medians, without the first step. {machine}.\n")}


# ---- 3. make engine --------------------------------------------------------------------------

def measure_learning(work):
    """Each variant with each seed. -> name -> what its runs found"""
    _, model = make_base(work, "--num_attention_heads", 2)
    job = ["--model", model, *LIKE_GRPO, "--max_steps", SHOWN[-1], "--eval_steps", SHOWN[0],
           "--stop_at", 2, "--num_eval_samples", 1]
    found = {}
    for name, flags in LEARNING.items():
        greedy, differences, seconds = [], [], []
        for seed in SEEDS:
            folder = Path(work, f"learning-{len(found)}-{seed}")
            run(EXAMPLE, folder, *job, "--seed", seed, *flags)
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
    for name, size in SAMPLING.items():
        seconds = apart(time_engines, Path(work, f"sampling-{len(found)}"), *size)
        median = {engine: statistics.median(some) for engine, some in seconds.items()}
        found[name] = {"seconds": seconds, "median": median,
                       "faster": median["transformers"] / median["vllm"]}
    return found


def measure_engine(work):
    return {"learning": measure_learning(work), "sampling": measure_sampling(work),
            "memory": measure_steps(work, [LARGE], MEMORY)}


def engine_tables(learning, sampling, memory, machine=MACHINE):
    """-> name -> str"""
    rows = []
    for name, one in learning.items():
        lowest = map(min, zip(*one["greedy"]))
        cells = [f"{mean:.3f} ({low:.3f})" for mean, low in zip(one["mean"], lowest)]
        rows.append([name, *cells, f"{one['difference']:.0e}", f"{one['median']:.2f} s"])
    head = ["", *(f"greedy after {n} steps" for n in SHOWN), "sampler and trainer differ by",
            "a step"]
    cost = [[name, *(f"{seconds:.2f} s" for seconds in one["median"].values()),
             f"{one['faster']:.1f}"] for name, one in sampling.items()]
    peaks = [[one["variant"], f"{one['peak_MB']:.0f} MB", f"{one['checkpoint_MB']:.1f} MB"]
             for one in memory]
    return {
        "learning": f"{table(head, rows)}\nThe main job from one base, {len(SEEDS)} seeds: means, "
                    f"and the lowest. One thread; {machine}.\n",
        "cost": table(["parameters", "transformers", "vLLM", "times as fast"], cost) + "\n"
                + table(["40 M, with --beta", "peak of the process", "a checkpoint"], peaks)}


def main(argv=None):
    words = parser(__doc__)
    words.add_argument("--engine", action="store_true", help="vLLM and LoRA (make engine)")
    is_engine = words.parse_args(argv).engine
    for package in ("transformers", "vllm", "peft") if is_engine else ("transformers",):
        if find_spec(package) is None:
            common.fail(f"{package} is missing: see the files pretrained/requirements*.txt")
    with tempfile.TemporaryDirectory() as work:
        found = measure_engine(work) if is_engine else measure_real(work)
    target = "engine" if is_engine else "real"
    record(target, **found)
    tables = engine_tables(**found) if is_engine else real_tables(**found)
    for name, text in tables.items():
        put(name, text, target)


if __name__ == "__main__":
    start(main)
