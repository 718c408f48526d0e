"""What a rollout and an update cost as completions and policies grow: a part of make bench.

Each point is a policy, a number of rows and a length of completions, which all rows have. Measured
are `rollout` and `update` of grpo.py, the update with the reference, both passes, the clipping and
AdamW, in micro-batches of the default size. Of a point are kept:

  seconds  the median of three runs after one that warms up; of one or two, where they take longer
           than 5 s together. On a CPU they run on one thread, and the seconds are those of the
           processor: points cannot take turns, and other work would lengthen some.
  bytes    the peak of the first run, beyond the weights and, in an update, the reference, gradients
           and AdamW's moments, which are counted by themselves. On a CPU, a process of its own runs
           each point, and its resident memory is looked at; on CUDA, torch counts.
  flops    that the matmuls of the point need, each prompt read once, and each pair of a token and
           one before it, or itself, counted once; those of attention apart. Divided by what a
           matmul of the policy's width reaches in the same process, they are the floor.

Only what a pair of tokens costs grows with the square of the length: attention, and in a rollout
the cache, which is copied at each token. The time of both, at the greatest length, is found by
running the same without them.
"""
import contextlib
import copy
import dataclasses
import functools
import json
import math
import re
import resource
import statistics
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import common
import grpo
from kernels import bench
from tools.runs import ROOT, picture, span, table

# Shapes: P prompts, G completions of each, B = P * G rows, W prompt tokens, T completion tokens,
# V vocabulary, D width.

# The flags in which each size of policy differs from the defaults, and its prompts.
SIZES = {
    "0.11M": ({}, 32),
    "0.81M": (bench.SIZES["0.81M"], 8),
    "2.9M": ({"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 704}, 4),
    "10M": ({"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1112}, 4)}
GENERATIONS = 8                         # completions of each prompt
LENGTHS = (32, 64, 128, 256, 512)       # completion tokens
HERE = 128                              # the longest completions that a task here asks for
MATTERS = 1.5                           # times that a token may take longer there than at 32
PATIENCE = 5                            # seconds of a point, after which no further run begins
COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red")
COSTS = {"rollout": ("attention", "attention and copies"),      # what is left out, to find its time
         "update": ("attention",)}


# ---- 1. what it takes ------------------------------------------------------------------------

def forward_flops(cfg, P, W, B, T):
    """FLOPs of reading P prompts once and B completions of them, with logits for each token of the
    completions. -> (of the matmuls with weights, of attention)"""
    D = cfg.hidden_size
    kv_size = D * cfg.num_key_value_heads // cfg.num_attention_heads
    attention_weights = 2 * D * D + 2 * D * kv_size
    mlp_weights = 3 * D * cfg.intermediate_size
    block_weights = cfg.num_hidden_layers * (attention_weights + mlp_weights)

    num_read = P * W + B * (T - 1)                      # nothing is predicted from the last token
    pairs = P * W * (W + 1) // 2 + B * ((T - 1) * W + (T - 1) * T // 2)
    linear = 2 * block_weights * num_read + 2 * grpo.VOCAB_SIZE * D * B * T
    attention = 4 * D * cfg.num_hidden_layers * pairs   # scores, and the mean of the values
    return linear, attention


def flops(job, cfg, W):
    """FLOPs of a rollout or an update of a batch with prompts of W tokens. -> dict"""
    P = cfg.num_prompts
    B = P * cfg.num_generations
    T = cfg.max_completion_length
    linear, attention = forward_flops(cfg, P, W, B, T)
    if job == "update":
        # backward takes twice as much as forward; the reference scores every eighth row
        scored = range(0, B, 8)
        prompts = {row // cfg.num_generations for row in scored}
        of_reference = forward_flops(cfg, len(prompts), W, len(scored), T)
        linear = 3 * linear + of_reference[0]
        attention = 3 * attention + of_reference[1]
    return {"linear": linear, "attention": attention}


def matmul_rate(cfg, rows):
    """What a matmul of so many rows with the weights of the MLP reaches. -> FLOP/s"""
    x = torch.randn(rows, cfg.hidden_size, device=cfg.device)
    weight = torch.randn(cfg.intermediate_size, cfg.hidden_size, device=cfg.device)
    needed = 2 * rows * weight.numel()
    repeats = min(1000, math.ceil(1e9 / needed))        # one alone may be too short for the clock

    def multiply():
        for _ in range(repeats):
            F.linear(x, weight)
    times, _ = in_turn({"matmul": multiply}, cfg.device)
    return repeats * needed / statistics.median(times["matmul"])


# ---- 2. the jobs -----------------------------------------------------------------------------

def problems_of(task, cfg):
    """Each problem as often as it has completions. -> list of B, prompts (B, W)"""
    problems = common.sample_problems(task, cfg.num_prompts, "bench")
    problems = [problem for problem in problems for _ in range(cfg.num_generations)]
    texts = [problem.prompt for problem in problems]
    return problems, grpo.encode_prompts(texts, task, cfg.device)


def rollout_job(cfg, policy):
    """A function that samples a batch of completions, each of T tokens."""
    policy = copy.deepcopy(policy)          # to which a graph that CUDA captures belongs
    task = common.load_task(cfg, grpo.verify)
    problems, prompts = problems_of(task, cfg)
    T = cfg.max_completion_length
    lengths = bench.lengths_of("fixed", len(prompts), T)                        # (B,)
    uniforms = bench.uniforms_of(lengths, T).to(cfg.device)                     # (B, T)

    def job():
        with bench.patched(grpo, EOS=bench.END):
            out = grpo.rollout(policy, prompts, problems, task, cfg, uniforms)
        bench.check_lengths("rollout", out.mask, lengths)
    return job


def update_job(cfg, policy, reference, optimizer):
    """A function that updates the policy on a batch of completions, each of T tokens. Every row has
    an advantage, so none is left out."""
    task = common.load_task(cfg, grpo.verify)
    problems, prompts = problems_of(task, cfg)
    B = len(prompts)
    P, G, T = cfg.num_prompts, cfg.num_generations, cfg.max_completion_length
    tokens = torch.randint(256, (B, T), generator=common.generator("scaling"))
    logps = torch.full((B, T), -math.log(grpo.VOCAB_SIZE), device=cfg.device)
    batch = common.Batch(
        tokens=tokens.to(cfg.device), mask=torch.ones_like(logps), logps=logps, entropy=-logps,
        lengths=torch.full((B,), T, device=cfg.device), problems=problems, prompts=prompts,
        texts=[""] * B, verdicts=[0.0] * B, rewards=torch.zeros(P, G),
        is_correct=torch.zeros(P, G, dtype=torch.bool),
        is_truncated=torch.ones(B, dtype=torch.bool), pass_rates={})
    A = 1.0 - 2.0 * (torch.arange(B, device=cfg.device)[:, None] % 2)           # (B, 1)
    return functools.partial(grpo.update, policy, reference, optimizer, batch, A, cfg, 0)


def attend_to_itself(q, k, v, **_):
    """What takes the place of attention where its time is looked for: a token sees itself alone.
    (B, H, L, hd), (B, KV, S, hd) twice -> (B, H, L, hd)"""
    L = q.shape[2]
    own = k[:, :, -L:] + v[:, :, -L:]                                           # (B, KV, L, hd)
    return q + own.repeat_interleave(q.shape[1] // own.shape[1], dim=1)


class Counter(grpo.Cache):
    """What takes the place of the cache where the time of its copies is looked for: it counts the
    tokens, and keeps those of the last call."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __len__(self):
        return max(self.counts.values(), default=0)

    def append(self, layer, k, v):
        self.counts[layer] = self.counts.get(layer, 0) + k.shape[2]
        self.layers[layer] = (k, v)
        return k, v


@contextlib.contextmanager
def without(cost):
    """A while in which the scripts do without "attention", or without "attention and copies"."""
    with contextlib.ExitStack() as stack:
        if cost:
            stack.enter_context(bench.patched(F, scaled_dot_product_attention=attend_to_itself))
        if cost == "attention and copies":
            stack.enter_context(bench.patched(grpo, Cache=Counter))
        yield


# ---- 3. a point ------------------------------------------------------------------------------

def points(device, sizes=SIZES, lengths=LENGTHS, G=GENERATIONS):
    """What is to be measured. -> list of dicts"""
    found = []
    for size, (flags, P) in sizes.items():
        for job in COSTS:
            for length in lengths:
                found.append({"job": job, "size": size, "flags": flags, "P": P, "G": G,
                              "T": length, "take_apart": length == max(lengths), "device": device})
    return found


def now(device):
    """Seconds on a clock: on a CPU, those that the processor has worked for us."""
    return bench.now(device) if bench.is_cuda(device) else time.process_time()


def forget_peak(device):
    """Let the peak of the memory begin anew, at what is in use. On a CPU, only Linux can do that,
    and may not in some containers: then the peak is that since the process began."""
    if bench.is_cuda(device):
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def memory_peak(device):
    """The most bytes that have been in use since then: on a CPU, by this process."""
    if bench.is_cuda(device):
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":             # where ru_maxrss begins with what the parent had
        peak = re.search("VmHWM:\\s*([0-9]+) kB", Path("/proc/self/status").read_text())
        if peak:                            # some containers do not tell
            return 1024 * int(peak[1])
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss       # of macOS: bytes


def in_turn(jobs, device, repeats=3):
    """Run functions in turn: once to warm up, a second time, and up to `repeats` times as long as
    they have not taken PATIENCE. -> {name: seconds of each run after the first}, the bytes by which
    the first function raised the peak when it first ran"""
    times = {name: [] for name in jobs}
    forget_peak(device)
    before = memory_peak(device)
    extra_bytes = None
    for number in range(1 + repeats):
        for name, job in jobs.items():
            start = now(device)
            job()
            times[name].append(now(device) - start)
            if extra_bytes is None:
                extra_bytes = memory_peak(device) - before
        if number > 0 and sum(map(sum, times.values())) > PATIENCE:
            break
    return {name: taken[1:] for name, taken in times.items()}, extra_bytes


def measure_point(point):
    """What a point costs, in this process. Some are taken apart: they are timed without attention,
    too, and without the copies of the cache. -> dict"""
    job, device, T = point["job"], point["device"], point["T"]
    cfg = bench.config(device, point["flags"], point["P"], point["G"], T)
    policy = grpo.GPT(cfg).to(device)
    num_bytes = sum(weight.nbytes for weight in policy.parameters())
    if job == "rollout":
        standing_bytes = num_bytes
        make = rollout_job
    else:
        standing_bytes = 5 * num_bytes                  # policy, reference, gradients, moments
        reference = copy.deepcopy(policy)
        optimizer = torch.optim.AdamW(
            policy.parameters(), lr=cfg.learning_rate, weight_decay=cfg.weight_decay)
        make = functools.partial(update_job, reference=reference, optimizer=optimizer)

    jobs = {"all": make(cfg, policy)}
    for cost in COSTS[job] if point["take_apart"] else ():
        jobs[f"without {cost}"] = without(cost)(make(cfg, policy))
    make(dataclasses.replace(cfg, max_completion_length=2), policy)()   # allocates what stands
    # The C library gives blocks that are larger than any before back to the system, and takes them
    # anew at each token. One of 32 MB, the largest that counts, makes it as in a long run.
    torch.empty(8_000_000)
    times, extra_bytes = in_turn(jobs, device)

    B = point["P"] * point["G"]
    rows = B if job == "rollout" else min(B, cfg.micro_batch_size) * T          # of a matmul
    rate = matmul_rate(cfg, rows)
    needed = flops(job, cfg, common.load_task(cfg, grpo.verify).prompt_width)
    return {"job": job, "size": point["size"], "parameters": num_bytes // 4, "rows": B, "T": T,
            "seconds": times,
            "median": {name: statistics.median(taken) for name, taken in times.items()},
            "bytes": extra_bytes, "standing_bytes": standing_bytes, "flops": needed,
            "flops_per_second": rate, "floor": sum(needed.values()) / rate}


def measure(point):
    """What a point costs; on a CPU in a process of its own, whose memory nothing else has used.
    -> dict"""
    if bench.is_cuda(point["device"]):
        return measure_point(point)
    command = [sys.executable, "-m", "kernels.scaling", json.dumps(point)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


# ---- 4. what is found ------------------------------------------------------------------------

def curves(rows):
    """The rows of each size and job, by length. -> list of lists"""
    found = {}
    for row in sorted(rows, key=lambda row: row["T"]):
        found.setdefault((row["parameters"], row["job"]), []).append(row)
    return [found[name] for name in sorted(found)]


def exponent(lengths, values):
    """k of the T^k that is nearest to the values at the last three lengths, that is two doublings:
    1 for what is linear, 2 for what is quadratic."""
    x = [math.log(length) for length in lengths[-3:]]
    y = [math.log(value) for value in values[-3:]]
    return statistics.linear_regression(x, y).slope


def growth(curve):
    """The exponent of the seconds of a curve."""
    return exponent([row["T"] for row in curve], [row["median"]["all"] for row in curve])


def share_without(row, cost):
    """What leaving out a cost saves: the median of the ratios of neighbours in time. -> of 1"""
    pairs = zip(row["seconds"][f"without {cost}"], row["seconds"]["all"])
    return max(0.0, 1 - statistics.median(without / whole for without, whole in pairs))


def quadratic_shares(row):
    """What the costs that grow with the square of the length have of a row's time. -> {name: share}
    """
    shares = {"attention": share_without(row, "attention")}
    if row["job"] == "rollout":
        both = share_without(row, "attention and copies")
        shares["copies"] = max(0.0, both - shares["attention"])
    return shares


def quadratic_share(row):
    """The sum of these. -> of 1"""
    return sum(quadratic_shares(row).values())


def flops_share(row):
    """What attention has of the FLOPs of a row. -> of 1"""
    return row["flops"]["attention"] / sum(row["flops"].values())


def percent(shares):
    """The least and the greatest of some shares of 1, as a text."""
    return f"{span([100 * share for share in shares], '.0f')}%"


def microseconds(row):
    """What a token of the completions takes."""
    return 1e6 * row["median"]["all"] / (row["rows"] * row["T"])


def sentence(rows):
    """Where the cost is quadratic, and whether that matters here. -> str"""
    shortest = min(row["T"] for row in rows)
    longest = max(row["T"] for row in rows)
    shares, powers, ratios = {}, {}, {}     # job -> those of all sizes
    for job in COSTS:
        lines = [line for line in curves(rows) if line[0]["job"] == job]
        shares[job] = percent([quadratic_share(line[-1]) for line in lines])
        powers[job] = span([growth(line) for line in lines], ".1f")
        ratios[job] = [microseconds(row) / microseconds(line[0])
                       for line in lines for row in line if row["T"] == HERE]

    dear = [f"{job}s" for job in COSTS if max(ratios[job]) >= MATTERS]
    verdict = "this hardly matters here"
    if dear:
        verdict = f"this matters here, in {' and '.join(dear)}"
    return (
        "Attention is quadratic in the length, and so are the copies of the cache, which a rollout "
        f"on a CPU makes at each token: at {longest} tokens they take {shares['rollout']} of a "
        f"rollout, whose time grows as T^k with k = {powers['rollout']}, and {shares['update']} of "
        f"an update (k = {powers['update']}). At {HERE} tokens, the most that a task here asks "
        f"for, a token takes {span(ratios['rollout'], '.1f')} times as long as at {shortest} in a "
        f"rollout, {span(ratios['update'], '.1f')} times in an update: {verdict}.")


# ---- 5. what is shown ------------------------------------------------------------------------

def mebibytes(row):
    """The peak of the memory, with what stands."""
    return (row["bytes"] + row["standing_bytes"]) / 2**20


def cells(row):
    """A point, as it is printed when it is measured. -> list of str"""
    line = [f"{row['size']:5}", row["job"], f"{row['rows']} x {row['T']}",
            f"{1e3 * row['median']['all']:.0f} ms", f"{microseconds(row):.0f} us a token",
            f"{row['median']['all'] / row['floor']:.1f}x floor", f"{mebibytes(row):.0f} MiB"]
    if len(row["median"]) > 1:
        line += [f"{name} {percent([share])}" for name, share in quadratic_shares(row).items()]
    return line


def table_of(rows):
    """A line for each size and job. -> Markdown"""
    lengths = sorted({row["T"] for row in rows})
    shown = sorted({lengths[0], HERE, lengths[-1]})
    head = ["parameters", "rows", "job", f"us a token, T = {shown[0]}",
            *(f"T = {T}" for T in shown[1:]), "k of T^k",
            "time / floor", "attention, of FLOPs", "of time", "copies",
            f"MiB, T = {lengths[0]}", f"T = {lengths[-1]}"]
    lines = []
    for line in curves(rows):
        some = [row for row in line if row["T"] in shown]
        first, last = line[0], line[-1]
        shares = quadratic_shares(last)
        copies = percent([shares["copies"]]) if "copies" in shares else "-"
        lines.append([
            last["size"], last["rows"], last["job"], *(f"{microseconds(row):.0f}" for row in some),
            f"{growth(line):.1f}", f"{last['median']['all'] / last['floor']:.1f}x",
            percent([flops_share(last)]), percent([shares["attention"]]), copies,
            f"{mebibytes(first):.0f}", f"{mebibytes(last):.0f}"])
    return table(head, lines)


def time_panel(rows, job):
    """A function that draws the time of a job, and its floor, into an axis."""
    def fill(axis):
        lines = [line for line in curves(rows) if line[0]["job"] == job]
        for line, color in zip(lines, COLORS):
            lengths = [row["T"] for row in line]
            floor = [1e6 * row["floor"] / (row["rows"] * row["T"]) for row in line]
            times = [microseconds(row) for row in line]
            axis.plot(lengths, times, "o-", color=color, ms=3)
            axis.plot(lengths, floor, "--", color=color, lw=1)
            name_line(axis, line, times[-1], color)
        axis.set(title=f"{job} (dashed: matmuls alone)", ylabel="microseconds a token")
        by_length(axis, lengths)
    return fill


def memory_panel(rows):
    """A function that draws the peak of the memory of both jobs into an axis."""
    def fill(axis):
        for job, style in (("update", "o-"), ("rollout", "o:")):
            lines = [line for line in curves(rows) if line[0]["job"] == job]
            for line, color in zip(lines, COLORS):
                lengths = [row["T"] for row in line]
                memory = [mebibytes(row) for row in line]
                axis.plot(lengths, memory, style, color=color, ms=3)
                if job == "update":
                    name_line(axis, line, memory[-1], color)
        axis.set(title="peak memory (dotted: rollout)", ylabel="MiB")
        by_length(axis, lengths)
    return fill


def name_line(axis, line, value, color):
    """Write the size of the policy behind the last value of a line."""
    axis.annotate(line[-1]["size"], (line[-1]["T"], value), (5, 0), textcoords="offset points",
                  color=color, fontsize=8, va="center", annotation_clip=False)


def by_length(axis, lengths):
    """Both scales are logarithms, and only the lengths that were measured are named."""
    axis.set(xscale="log", yscale="log", xlabel="tokens of a completion (T)")
    axis.set_xticks(lengths, lengths)
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def draw(rows, name):
    """Draw docs/NAME.png."""
    panels = [time_panel(rows, "rollout"), time_panel(rows, "update"), memory_panel(rows)]
    picture(name, panels)


def report(rows, device, slug):
    """Draw the picture of a device, docs/scaling-SLUG.png. -> what docs/speed.md says about it, in
    Markdown"""
    name = f"scaling-{slug}" if slug != "cpu" else "scaling"
    draw(rows, name)
    longest = max(row["T"] for row in rows)
    where = "one thread of a CPU" if device == "cpu" else device
    note = (
        f"On {where}; k, floor and shares at T = {longest}. The floor is what the FLOPs of the "
        "matmuls, attention included, take at the rate that a matmul of the policy's width "
        "reaches. Times are medians of one to three runs after one that warms up. Memory is the "
        "peak, with the weights, in an update also with those of the reference, gradients and "
        "AdamW's moments; that of an update is bounded by its micro-batches, of 32 rows by "
        "default.")
    return (
        f"![time and memory of a rollout and an update against the length]({name}.png)\n\n"
        f"{textwrap.fill(sentence(rows), 118)}\n\n{table_of(rows)}\n"
        f"{textwrap.fill(note, 118)}\n\n")


# ---- 6. a process for a point ----------------------------------------------------------------

def main(argv=None):
    """Measure the point that the first argument is in JSON, and print what it costs."""
    text, = sys.argv[1:] if argv is None else argv
    torch.set_num_threads(1)
    print(json.dumps(measure_point(json.loads(text))))


if __name__ == "__main__":
    common.start(main)
