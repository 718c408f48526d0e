"""The parts of make gpu: python -m tools.gpu_parts NAME FOLDER --until TIME.

tools/gpu.py starts each part as a process of its own, so that one that fails, crashes or hangs
takes no other with it. A part raises if something is wrong. What it has found is the last line it
prints that begins with "result: ". What the bench measures goes into FOLDER/record.json, one shape
at a time, so that a crash leaves what was there before it. With --dry_run everything is tiny and on
the CPU, kernels in Triton's interpreter.
"""
import argparse
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from xml.etree import ElementTree

import torch

import common
import grpo
from kernels import bench, logprob
from kernels.decode import decode
from tools import runs

TESTS = ["tests/test_kernels.py", "tests/test_linear_logprob.py", "tests/test_decode.py"]
SCRIPTS = ["reinforce", "ppo", "grpo", "gspo", "dpo"]
TINY = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1,
        "intermediate_size": 16}
# A base that is right now and then, made in seconds, and three steps from it.
THREE_STEPS = {"operands": 2, "textbook_share": 0, "base_steps": 300, "base_batch_size": 16,
               "max_steps": 3, "stop_at": 2, "num_eval_problems": 64, "num_eval_samples": 2}
SMALL = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1,
         "intermediate_size": 32, "num_prompts": 4, "max_completion_length": 10,
         "num_eval_problems": 4, "num_eval_samples": 2, "max_steps": 2}
# A Llama of 0.3 billion parameters, and what it is trained with. Its rewards are all 0, and of all
# losses only bnpo computes gradients all the same.
LLAMA = {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24,
         "intermediate_size": 2816}
LIKE_A_MODEL = {"model": "random", "loss_type": "bnpo", "dtype": "bfloat16", "max_steps": 2,
                "num_prompts": 16, "num_generations": 8, "max_completion_length": 128,
                "micro_batch_size": 16, "num_eval_problems": 8, "num_eval_samples": 1,
                "save_steps": 100}
SMALL_MODEL = {"num_prompts": 2, "num_generations": 2, "max_completion_length": 8}
# Metrics of a first step, which do not depend on the kernel.
METRICS = ("loss", "reward", "entropy", "completions/mean_length", "grad_norm")


@dataclasses.dataclass
class Job:
    """What a part is told."""
    folder: Path            # for what it writes
    until: float            # of time.time(), when its process is stopped
    dry_run: bool

    @property
    def device(self):
        return "cpu" if self.dry_run else "cuda"

    def choose(self, real, tiny):
        """The second one in a dry run, else the first."""
        return tiny if self.dry_run else real


def say(text):
    """Print what the part has found."""
    print(f"result: {text}", flush=True)


def in_time(items, until):
    """Yield the items of a list as long as there is time for 1.5 times what the slowest so far has
    taken. Print which are left out."""
    slowest = 0.0
    for number, item in enumerate(items):
        begin = time.time()
        if begin + 1.5 * slowest > until:
            print(f"no time for the last {len(items) - number}: {items[number:]}", flush=True)
            return
        yield item
        slowest = max(slowest, time.time() - begin)


# ---- 1. what is there, and does it work ------------------------------------------------------

def driver():
    """The version of NVIDIA's driver, "?" where nobody says it. -> str"""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "?"
    return done.stdout.partition("\n")[0].strip() or "?"


def sees(job):
    """Whether torch can use the device, and what that is. This needs torch alone."""
    found = f"a CPU, torch {torch.__version__}"
    if not job.dry_run:
        free, total = torch.cuda.mem_get_info()     # before anything of ours is there
        major, minor = torch.cuda.get_device_capability()
        found = (f"{torch.cuda.get_device_name()}, capability {major}.{minor}, driver {driver()}, "
                 f"torch {torch.__version__} with CUDA {torch.version.cuda}, "
                 f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    print(found, flush=True)                        # it may be all that can be said
    a = torch.rand(64, 64)
    on_device = a.to(job.device)
    torch.testing.assert_close((on_device @ on_device).cpu(), a @ a, atol=1e-3, rtol=1e-3)
    say(found)


def kernel(job):
    """Whether Triton compiles here, and what it compiles computes logps, entropy, gradient."""
    if not logprob.available(job.device):
        raise RuntimeError(f"kernels/logprob.py cannot run on {job.device}: it needs the package "
                           "triton and a GPU of capability 8.0")
    start = time.perf_counter()
    for dtype, V, rtol in ((torch.float32, 64, 1e-4), (torch.bfloat16, 5000, 1e-2)):
        logits = torch.randn(8, V, device=job.device).to(dtype).requires_grad_()
        exact_logits = logits.detach().double().requires_grad_()
        tokens = torch.randint(V, (8,), device=job.device)
        outputs = bench.ours_from_logits(logits, tokens)
        exact = bench.torch_from_logits(exact_logits, tokens)
        for output, value in zip(outputs, exact):
            torch.testing.assert_close(output.double(), value, atol=1e-5, rtol=1e-5)
        gradient, = torch.autograd.grad(sum(outputs).sum(), logits)
        exact_gradient, = torch.autograd.grad(sum(exact).sum(), exact_logits)
        torch.testing.assert_close(gradient.double(), exact_gradient, atol=1e-5, rtol=rtol)
    word = job.choose("compiled", "interpreted")
    taken = time.perf_counter() - start
    say(f"both passes are right, {word} by Triton {logprob.triton.__version__} in {taken:.1f} s")


def tests(job):
    """The tests that do more where there is a GPU, but not those that look at what is compiled, or
    start an interpreter of kernels, as they do anywhere. With a GPU none may be skipped."""
    # Not at the top, since the other parts do without.
    import pytest
    log = job.folder / "tests.xml"
    elsewhere = "interpreter or slow_kernel or compiled_loops or instructions_per_logit"
    words = job.choose(f"not ({elsewhere})", "any_temperature or eager_step")
    workers = ["-n", "4"] if importlib.util.find_spec("xdist") else []
    # a worker that hangs says where, which its parent could not
    options = ["-rfEs", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60",
               f"--junitxml={log}", "-k", words]
    code = pytest.main([*options, *job.choose(workers, []), *TESTS])
    if not log.is_file():
        raise RuntimeError(f"pytest has tested nothing, and ended with {int(code)}")
    outcomes = {"passed": 0, "failure": 0, "error": 0, "skipped": 0}
    wrong = []
    reasons = set()
    for case in ElementTree.parse(log).iter("testcase"):
        found = [child for child in case if child.tag in outcomes]
        outcome = found[0].tag if found else "passed"
        outcomes[outcome] += 1
        if outcome in ("failure", "error"):
            wrong.append(case.get("name"))
        reasons |= {child.get("message") for child in found if child.tag == "skipped"}
    counts = ", ".join(f"{number} {name}" for name, number in outcomes.items() if number)
    if code != 0:
        raise RuntimeError(f"pytest ended with {int(code)}, {counts}: {', '.join(wrong)}")
    if outcomes["skipped"] and not job.dry_run:
        raise RuntimeError(f"{counts}: {'; '.join(sorted(reasons))}")
    say(counts)


# ---- 2. the same as without a GPU ------------------------------------------------------------

def decode_part(job):
    """The captured decode beside its step without a graph and the scripts' own rollout: the same
    tokens, all of them in float64; in float32, where a rounding may fall on the edge of a token,
    in 99 rows of 100. Times are of float32."""
    size, P, G, T = job.choose((bench.SIZES["0.81M"], 32, 8, 32), (TINY, 4, 2, 8))
    cfg = bench.config(job.device, size, P, G, T)
    in_torch = dataclasses.replace(cfg, kernel="torch")
    task = common.load_task(cfg, grpo.verify)
    problems = common.sample_problems(task, P, "gpu")
    problems = [problem for problem in problems for _ in range(G)]              # B
    prompts = grpo.encode_prompts([problem.prompt for problem in problems], task, cfg.device)
    uniforms = torch.rand(P * G, T, generator=common.generator(0, "gpu")).to(cfg.device)
    for dtype, enough in ((torch.float64, 1.0), (torch.float32, 0.99)):
        policy = grpo.GPT(cfg).to(cfg.device, dtype)
        policy.embed.weight.data *= 20          # else all tokens are as likely, and errors hide
        decode_here = functools.partial(
            decode, policy, prompts, T, cfg.temperature, uniforms, grpo.EOS, grpo.PAD, cfg.kernel)
        jobs = {"captured": decode_here,
                "not captured": functools.partial(decode_here, captured=False),
                "plain": functools.partial(
                    grpo.rollout, policy, prompts, problems, task, in_torch, uniforms)}
        tokens, _, logps, _ = jobs["captured"]()
        plain = jobs["plain"]()
        eager_tokens, *_ = jobs["not captured"]()
        for other in (eager_tokens, plain.tokens):
            share = (tokens == other).all(dim=1).float().mean().item()
            print(f"{dtype}: {share:.1%} of the rows have the same tokens")
            if share < enough:
                raise RuntimeError(f"{dtype}: only {share:.1%} of the rows have the same tokens")
        same = (tokens == plain.tokens).all(dim=1)
        torch.testing.assert_close(logps[same], plain.logps[same], atol=1e-4, rtol=1e-4)
    if job.dry_run:
        say("the same tokens; a CPU captures nothing")
        return
    num_tokens = int(plain.lengths.sum())
    cells = []
    for name, function in jobs.items():
        taken = bench.seconds(function, cfg.device)
        cells.append(f"{name} {taken * 1e3:.1f} ms ({bench.rate_cell(num_tokens, taken)}/s)")
    say(f"the same tokens; {', '.join(cells)}")


def metrics_of(script, kernel, job):
    """Three steps of a script with a kernel. -> the metrics of each"""
    flags = THREE_STEPS | job.choose({}, SMALL)
    flags |= {"device": job.device, "kernel": kernel, "output_dir": f"{script}-{kernel}"}
    words = []
    for name, value in flags.items():
        words += [f"--{name}", str(value)]
    importlib.import_module(script).main(words)
    return runs.read_log(flags["output_dir"], "metrics")


def differences(one, other):
    """The METRICS in which two steps differ by more than a token or two make. -> list of str"""
    found = []
    for name in METRICS:
        if abs(one[name] - other[name]) > 0.01 + 0.03 * abs(other[name]):
            found.append(f"{name} {one[name]:.4f} and {other[name]:.4f}")
    return found


def scripts(job):
    """Three steps of each script with Triton and captured rollouts, and with plain torch: the first
    step is the same, and log-probs of rollouts are those of the update."""
    wrong = []
    os.chdir(job.folder)                        # where the base is kept
    sys.modules["tools.report"] = None          # nobody looks at these reports
    for script in SCRIPTS:
        try:
            logs = {name: metrics_of(script, name, job) for name in ("triton", "torch")}
        except (Exception, SystemExit) as error:
            wrong.append(f"{script}.py: {type(error).__name__}: {error}"[:200])
            continue
        wrong += [f"{script}.py, triton and torch: {text}"
                  for text in differences(logs["triton"][0], logs["torch"][0])]
        if logs["torch"][0]["signal"] == 0 and not job.dry_run:
            wrong.append(f"{script}.py: no group has signal, so this compares nothing")
        for name, steps in logs.items() if script != "dpo" else ():     # which has no ratio
            gap = max(step["sampling/sampling_logp_difference/max"] for step in steps)
            if not gap < 1e-3:
                wrong.append(f"{script}.py, {name}: rollout and update differ by {gap:.1e}")
    if wrong:
        raise RuntimeError("; ".join(wrong))
    found = f"{len(SCRIPTS)} scripts, the same with Triton and torch"
    if not job.dry_run:
        found += f"; peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB"
    say(found)


def learn(job, task, score, least, factor):
    """GRPO on a task, from nothing, with its defaults. The score of the trained policy has to be
    `least`, and so many times that of the base; but a dry run learns nothing."""
    os.chdir(job.folder)                        # where the base is kept
    flags = ["--task", task, "--device", job.device, "--output_dir", task]
    if job.dry_run:
        for name, value in {**SMALL, "base_steps": 4}.items():
            flags += [f"--{name}", str(value)]
    summary = grpo.main(flags)                  # in this process: if it hangs, it says where
    base = summary["base"][score]
    trained = summary["trained"][score]
    warm_start = summary["seconds_warm_start"]
    training = summary["seconds_total"] - warm_start
    found = (f"{score} {base:.3f} -> {trained:.3f}, {summary['steps']} steps, warm start "
             f"{warm_start:.0f} s, training {training:.0f} s")
    if trained < max(least, factor * base) and not job.dry_run:
        raise RuntimeError(f"it has not learned: {found}")
    say(found)


def arithmetic(job):
    learn(job, "arithmetic", "greedy", least=0.9, factor=2)


def countdown(job):
    learn(job, "countdown", "pass@1", least=0.15, factor=1.5)


def pretrained(job):
    """Two steps of examples/pretrained.py in bfloat16, with random weights and 320 tokens, then two
    with FSDP in one process. The rewards are the same, and sampler and trainer nearly agree."""
    if importlib.util.find_spec("transformers") is None:
        return say("left out, for transformers is missing")
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
                   "MASTER_PORT": "29513", "TORCHELASTIC_RUN_ID": "gpu"}    # as torchrun does
    os.chdir(job.folder)
    sys.modules["tools.report"] = None          # nobody looks at these reports
    real = importlib.import_module("tools.real")
    example = importlib.import_module("examples.pretrained")
    parameters = real.save_random(Path("random"), job.choose(LLAMA, TINY))
    found = []
    for parallel in ("replicate", "fsdp"):
        flags = LIKE_A_MODEL | job.choose({}, SMALL_MODEL)
        flags |= {"device": job.device, "parallel": parallel, "output_dir": parallel}
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        example.main(words)
        torch.distributed.destroy_process_group()
        *_, step = runs.read_log(parallel, "metrics")
        gap = step["sampling/sampling_logp_difference/mean"]
        if not gap < 0.02:
            raise RuntimeError(f"{parallel}: sampler and trainer differ by {gap:.1e}")
        num_tokens = (flags["num_prompts"] * flags["num_generations"]
                      * step["completions/mean_length"])
        text = f"{parallel} {num_tokens / step['step_time']:.0f} tokens/s, differ by {gap:.1e}"
        if not job.dry_run:
            text += f", peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB"
            torch.cuda.reset_peak_memory_stats()
        found.append(text)
    say(f"{parameters / 1e6:.2f} million parameters; {'; '.join(found)}")


# ---- 3. the bench ----------------------------------------------------------------------------

REPEATS = 5
SHAPE = (32, 8, 32)                             # P, G, T


def open_record(job):
    """The record of the bench as far as it is measured. The first part that needs it measures what
    the machine can do. -> dict"""
    path = job.folder / "record.json"
    if path.is_file():
        return json.loads(path.read_text())
    gigabytes, size = 0.01, 64
    if not job.dry_run:
        free, _ = torch.cuda.mem_get_info()
        gigabytes = min(8.6, free / 4e9)
        size = 8192
    P, G, T = job.choose(SHAPE, (2, 2, 4))
    prompt_width = common.load_task(bench.config(job.device, TINY), grpo.verify).prompt_width
    record = {"machine": bench.machine(job.device, gigabytes, size),
              "repeats": job.choose(REPEATS, 2), "remarks": bench.remarks(job.device),
              "shape": [P, G, prompt_width, T]}
    record |= {name: [] for name in bench.ROWS}
    save(job, record)
    return record


def save(job, record):
    common.write(job.folder / "record.json", json.dumps(record, indent=1) + "\n")


def fill(job, name, shapes, measure, cells):
    """Measure the rows `name` of the record, shape by shape, and save each: measure(machine,
    *shape) gives them, cells(row) is how a row is printed. -> rows, and what to say of shapes"""
    record = open_record(job)
    record[name] = []
    num_shapes = 0
    for shape in in_time(shapes, job.until):
        try:
            rows = measure(record["machine"], *shape)
        except torch.OutOfMemoryError:
            print(f"{shape}: not enough memory", flush=True)
            continue
        num_shapes += 1
        for row in rows:
            print("  ".join(cells(row)), row.get("failed", ""), flush=True)
        record[name] += rows
        save(job, record)
    if num_shapes == 0:
        raise RuntimeError("nothing could be measured")
    for row in record[name]:
        if row.get("who") == "ours" and "failed" in row:
            raise RuntimeError(f"ours, {row}")
    return record[name], f"{num_shapes} of {len(shapes)} shapes"


def logits(job):
    def measure(machine, dtype_name, N, V):
        dtype = getattr(torch, dtype_name)
        return bench.logits_rows(N, V, dtype, job.device, machine["copy_GB_per_s"])

    shapes = []
    for dtype_name in ("bfloat16", "float32"):
        for N, V in job.choose(reversed(bench.LOGITS), [(8, 32), (3, 50)]):
            shapes.append((dtype_name, N, V))
    rows, counts = fill(job, "logits", shapes, measure, bench.logits_cells)
    ours = [row for row in rows if row["who"] == "ours"]
    shares = {}
    for part in ("forward", "backward"):
        shares[part] = runs.span([row[f"{part}_share_of_copy"] for row in ours], ".0%")
    say(f"{counts}; ours forward {shares['forward']} of copy, backward {shares['backward']}")


def linear(job):
    def measure(machine, N, D, V):
        return bench.linear_rows(N, D, V, job.device, machine["matmul_TFLOP_per_s"])

    shapes = job.choose(bench.LINEAR[::-1], [(8, 16, 32)])
    rows, counts = fill(job, "linear", shapes, measure, bench.linear_cells)
    shares = [row["share_of_limit"] for row in rows if row["who"] == "ours"]
    say(f"{counts}; ours {runs.span(shares, '.0%')} of what three matmuls take")


def sizes_and_kinds(job, kinds):
    """-> the shapes of rollouts or steps, the largest policy first: its name, flags, kind"""
    sizes = job.choose(bench.SIZES, {"tiny": TINY})
    return [(name, flags, kind) for name, flags in reversed(sizes.items()) for kind in kinds]


def rollout(job):
    def measure(machine, name, flags, kind):
        cfg = bench.config(job.device, flags, *job.choose(SHAPE, (2, 2, 4)))
        return [bench.rollout_row(name, kind, cfg, job.choose(REPEATS, 2))]

    shapes = sizes_and_kinds(job, bench.KINDS[:2])
    rows, counts = fill(job, "rollout", shapes, measure, bench.rollout_cells)
    say(f"{counts}; {' | '.join(bench.rollout_cells(rows[0]))}")


def step(job):
    def measure(machine, name, flags, kind):
        cfg = bench.config(job.device, flags, *job.choose(SHAPE, (2, 2, 4)))
        return bench.step_rows(name, kind, cfg, job.choose(REPEATS, 2))

    rows, counts = fill(job, "step", sizes_and_kinds(job, bench.KINDS), measure, bench.step_cells)
    say(f"{counts}; {rows[0]['median']['all'] * 1e3:.0f} ms at {rows[0]['size']}, "
        f"{bench.gain_cell(rows[0])} TRL")


PARTS = {"sees": sees, "kernel": kernel, "tests": tests, "decode": decode_part, "scripts": scripts,
         "arithmetic": arithmetic, "countdown": countdown, "pretrained": pretrained,
         "logits": logits, "linear": linear, "rollout": rollout, "step": step}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--until", type=float, required=True, help="when it is stopped, as time()")
    parser.add_argument("--dry_run", action="store_true")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)    # like make bench, whose rows else are those of another machine
    try:
        PARTS[args.name](Job(args.folder.absolute(), args.until, args.dry_run))
    except BaseException as error:
        sys.stdout.flush()                      # the reason comes last
        if not isinstance(error, SystemExit):   # whoever raised that has said why
            traceback.print_exc()
            print(bench.reason(error), file=sys.stderr, flush=True)
        os._exit(1)             # to clean up after a broken GPU may hang, and hides what was wrong


if __name__ == "__main__":
    common.start(main)
