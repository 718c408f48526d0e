"""What a step of examples/pretrained.py costs: python -m tools.real (make real).

beside: grpo.py and examples/pretrained.py do the same job from the same base, by turns, with three
seeds: the seconds of a step, and in how many steps their rewards are equal. sizes: Llamas with
random weights, in one process and in two: the seconds of a step, and the most memory that a process
held. Writes docs/real.json and, between their marks in docs/real-models.md, two tables.
"""
import importlib.util
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import common
import grpo
from tools import export
from tools.runs import MACHINE, ROOT, curve, put, record, run, table

EXAMPLE = "examples/pretrained.py"
EVALUATION = ["--device", "cpu", "--stop_at", 2, "--num_eval_problems", 8, "--num_eval_samples", 1]

# beside
SEEDS = (0, 1, 2)
STEPS = 10
LIKE_GRPO = ["--task", "arithmetic", "--max_completion_length", 48, "--learning_rate", 5e-4,
             "--micro_batch_size", 32]      # the defaults of grpo.py

# sizes. With random weights each reward is 0, and of all losses only bnpo leaves no row out.
SIZE_STEPS = 3
SIZE_JOB = ["--task", "arithmetic", "--num_prompts", 8, "--num_generations", 8,
            "--max_completion_length", 48, "--micro_batch_size", 8, "--loss_type", "bnpo",
            "--max_steps", SIZE_STEPS, "--save_steps", 100, *EVALUATION]
SHAPES = [
    {"hidden_size": 128, "num_hidden_layers": 5, "num_attention_heads": 2,
     "intermediate_size": 352},
    {"hidden_size": 320, "num_hidden_layers": 8, "num_attention_heads": 5,
     "intermediate_size": 864},
    {"hidden_size": 640, "num_hidden_layers": 8, "num_attention_heads": 10,
     "intermediate_size": 1728}]
VARIANTS = {                                # name: number of processes, flags
    "float32": (1, ["--num_threads", 2]),
    "bfloat16": (1, ["--num_threads", 2, "--dtype", "bfloat16"]),
    "float32, checkpointing": (1, ["--num_threads", 2, "--gradient_checkpointing"]),
    "float32, 2 processes, replicate": (2, ["--num_threads", 1]),
    "float32, 2 processes, fsdp": (2, ["--num_threads", 1, "--parallel", "fsdp"])}
IMPORTS = "import transformers; from examples import pretrained; transformers.LlamaForCausalLM"
MEGABYTES = 1e-6 if sys.platform == "darwin" else 1024e-6       # what ru_maxrss counts in


def median_step(seconds):
    """The median of the steps but the first, in which what is used first is set up. -> seconds"""
    return statistics.median(seconds[1:])


# ---- 1. beside grpo.py -----------------------------------------------------------------------

def measure_beside(work):
    """Both scripts from the same base, by turns. -> a dict for each seed"""
    base = Path(work, "base")
    model = Path(work, "model")
    run("grpo.py", base, "--max_steps", 0, *EVALUATION, quiet=True)
    export.export(base, model)
    starts = {"grpo.py": ["--init_from", base], EXAMPLE: ["--model", model, *LIKE_GRPO]}
    found = []
    for seed in SEEDS:
        runs = {}
        for script, flags in starts.items():
            folder = Path(work, f"{Path(script).stem}-{seed}")
            run(script, folder, *flags, "--max_steps", STEPS, "--seed", seed, *EVALUATION,
                quiet=True)
            seconds = curve(folder, "step_time")
            runs[script] = {"seconds": seconds, "median": median_step(seconds),
                            "rewards": curve(folder, "reward")}
        found.append({"seed": seed, "runs": runs} | compare(runs["grpo.py"], runs[EXAMPLE]))
    return found


def compare(ours, theirs):
    """How much longer a step of theirs takes, and how many steps have the same reward. -> dict"""
    pairs = zip(ours["rewards"], theirs["rewards"], strict=True)
    return {"ratio": theirs["median"] / ours["median"],
            "equal_rewards": sum(one == other for one, other in pairs)}


def beside_table(found):
    """The table of the seeds, and what is said below it. -> str"""
    head = ["seed", "grpo.py, s a step", "pretrained.py, s a step", "ratio",
            "reward, step 1", f"step {STEPS}, grpo.py", f"step {STEPS}, pretrained.py",
            "steps with equal rewards"]
    rows = []
    for one in found:
        ours = one["runs"]["grpo.py"]
        theirs = one["runs"][EXAMPLE]
        rows.append([one["seed"], f"{ours['median']:.3f}", f"{theirs['median']:.3f}",
                     f"{one['ratio']:.2f}", f"{ours['rewards'][0]:.3f}",
                     f"{ours['rewards'][-1]:.3f}", f"{theirs['rewards'][-1]:.3f}",
                     f"{one['equal_rewards']} of {STEPS}"])
    return (f"{table(head, rows)}\nFrom one base, by turns; 32 prompts, 8 completions of each; "
            f"one thread. Seconds: the median of steps 2 to {STEPS}. {MACHINE}.\n")


# ---- 2. larger models ------------------------------------------------------------------------

def save_random(folder, shape):
    """Write a Llama with random weights, which reads bytes. What ends a text is no token that it
    can write, so that completions have all their tokens. -> its number of parameters"""
    import transformers
    transformers.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        vocab_size=grpo.VOCAB_SIZE, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, **shape)
    transformers.set_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.eos_token_id = grpo.VOCAB_SIZE
    model.save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=export.make_tokenizer())
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def apart(function, *args):
    """What a function returns, in a process of its own. The peak of a process that we start begins
    with the memory that we hold; so we hold less than what it needs for its imports."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def weigh(words, num_processes=1):
    """Run Python with these words, in several processes as torchrun starts them. Exits as they do
    if one fails. -> the most memory that one of them held, in MB"""
    words = [sys.executable, *(str(word) for word in words)]
    settings = [{}]
    if num_processes > 1:
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]              # a free one
        settings = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_processes),
                     "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
                     "TORCHELASTIC_RUN_ID": "real"} for rank in range(num_processes)]
    workers = []
    peaks = []
    try:
        for setting in settings:
            workers.append(subprocess.Popen(
                words, cwd=ROOT, env=os.environ | setting, stdout=subprocess.DEVNULL))
        for worker in workers:
            _, status, usage = os.wait4(worker.pid, 0)
            worker.returncode = os.waitstatus_to_exitcode(status)
            if worker.returncode != 0:
                raise SystemExit(worker.returncode)
            peaks.append(usage.ru_maxrss * MEGABYTES)
    finally:
        for worker in workers:
            worker.kill()                               # both leave alone what has ended
            worker.wait()
    return max(peaks)


def measure_sizes(work):
    """Each size in each variant. -> a dict for each"""
    found = []
    for number, shape in enumerate(SHAPES):
        model = Path(work, f"random-{number}")
        parameters = apart(save_random, model, shape)
        for variant, (num_processes, flags) in VARIANTS.items():
            folder = Path(work, f"size-{len(found)}")
            print(f"{parameters:,} parameters, {variant}", flush=True)
            words = [EXAMPLE, "--model", model, *SIZE_JOB, *flags, "--output_dir", folder]
            peak = weigh(words, num_processes)
            seconds = curve(folder, "step_time")
            found.append({"parameters": parameters, "variant": variant, "seconds": seconds,
                          "median": median_step(seconds), "peak_MB": peak})
    return found


def sizes_table(found, imports):
    """The table of sizes and variants, and what is said below it. -> str"""
    head = ["parameters", "variant", "s a step", "peak of a process, MB", "without imports, MB"]
    rows = []
    for one in found:
        rows.append([f"{one['parameters']:,}", one["variant"], f"{one['median']:.2f}",
                     f"{one['peak_MB']:.0f}", f"{one['peak_MB'] - imports:.0f}"])
    return (f"{table(head, rows)}\nA process that only imports what the others import has a peak "
            f"of {imports:.0f} MB. A step: 8 prompts, 8 completions of each, all of 48 tokens, "
            "since what ends a text is no token of these models; micro-batches of 8. Each reward "
            "is 0: `--loss_type bnpo` has gradients computed all the same, and they are 0. Seconds:"
            f" the median of steps 2 to {SIZE_STEPS}; one process with two threads, or two with "
            f"one. {MACHINE}.\n")


def main():
    if importlib.util.find_spec("transformers") is None:
        common.fail("transformers is missing: pip install -r examples/requirements.txt")
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"others use this machine (load {load:.1f}): all will be slow, and two threads on "
              "two cores several times slower", flush=True)
    with tempfile.TemporaryDirectory() as work:
        beside = measure_beside(work)
        imports = weigh(["-c", IMPORTS])
        sizes = measure_sizes(work)
    record("real", beside=beside, imports_MB=imports, sizes=sizes)
    put("beside", beside_table(beside), "real")
    put("sizes", sizes_table(sizes, imports), "real")


if __name__ == "__main__":
    common.start(main)
