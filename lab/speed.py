"""Measure the kernels of kernels/logprob.py on a GPU: python -m lab.speed (make bench).

Log-probs and entropies of N x V logits, and their gradient, are computed by our kernels, by torch,
eager and compiled, by TRL, and by a copy that moves as many bytes. All of them take turns, so a
slow minute of the machine slows down all of them. The table in docs/speed.md is made from all
docs/bench-DEVICE.json, and the one of this machine is written after each row.
"""
import functools
import json
import re
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from statistics import median, quantiles

import torch

import common
from kernels.logprob import logprob, logprob_torch
from lab import docs
from report import parser, start

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAME = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
SLUG = re.sub("[^a-z0-9]+", "-", NAME.lower())
PACKAGES = [name for name in ("torch", "triton", "transformers", "trl") if find_spec(name)]
MACHINE = ", ".join([f"{NAME}: {docs.MACHINE}", *(f"{name} {version(name)}" for name in PACKAGES)])
REPEATS = 5                             # measured runs, after one to warm up
LOGITS = [(8192, 32000), (8192, 50257), (8192, 128256), (8192, 151936), (65536, 512)]   # N, V


def take_turns(jobs, timer):
    """Measure each job several times, in turns. {who: job} -> {who: list of seconds}"""
    times = {who: [] for who in jobs}
    for _ in range(1 + REPEATS):
        for who, job in jobs.items():
            times[who].append(timer(job))
    return {who: taken[1:] for who, taken in times.items()}     # the first run warms up


def logits(what, part):
    """Pass over logits "N x V dtype", forward or backward. -> {who: list of seconds}"""
    from triton.testing import do_bench
    N, _, V, dtype = what.split()
    N, V = int(N), int(V)
    logits = 3 * torch.randn(N, V, device=DEVICE)
    logits = logits.to(getattr(torch, dtype)).requires_grad_()
    tokens = torch.randint(V, (N,), device=DEVICE)
    torch.compiler.reset()                      # else torch stops compiling at the ninth shape
    providers = {"ours": logprob, "torch": logprob_torch,
                 "torch.compile": torch.compile(logprob_torch, dynamic=False)}
    if find_spec("trl"):
        from trl.kernels.logprob_entropy import selective_log_softmax_and_entropy
        providers["TRL"] = selective_log_softmax_and_entropy
    jobs = {}
    for who, provider in providers.items():
        jobs[who] = functools.partial(provider, logits, tokens)
        if part == "backward":
            logps, *_, entropy = jobs[who]()
            ones = [torch.ones_like(x) for x in (logps, entropy)]
            jobs[who] = functools.partial(
                torch.autograd.grad, (logps, entropy), logits, ones, retain_graph=True)
    # a backward pass reads the logits and writes as many numbers; a forward pass only reads them
    copied = logits.detach()[:N if part == "backward" else N // 2]
    jobs["copy"] = functools.partial(torch.empty_like(copied).copy_, copied)

    def with_a_cold_cache(job):
        return do_bench(job, warmup=5, rep=25, return_mode="median") / 1e3
    return take_turns(jobs, with_a_cold_cache)


def measure():
    """Measure and print each row. After each, yields all rows so far."""
    rows = []
    for (N, V), dtype, part in product(LOGITS, ("bfloat16", "float32"), ("forward", "backward")):
        of = {"logits": f"{N} x {V} {dtype}", "pass": part}
        rows.append({"of": of, "seconds": logits(*of.values())})
        print(table(rows[-1:]), flush=True)
        yield rows


def table(rows):
    """Write a table in Markdown. -> str"""
    head = [*rows[0]["of"]]
    for who in rows[0]["seconds"]:
        head += [who, "gain"] if "ours" in head else [who]
    lines = []
    for row in rows:
        cells = [*row["of"].values()]
        for who, taken in row["seconds"].items():
            ms = 1e3 * median(taken)
            cells.append(f"{ms:.{0 if ms > 99 else 2}f} ms")
            if who != "ours":
                ratios = [their / our for our, their in zip(row["seconds"]["ours"], taken)]
                low, gain, high = quantiles(ratios, n=4)
                digits = 1 if gain > 1.3 else 2         # near 1, hundredths matter
                cells.append(f"{gain:.{digits}f}x ({low:.{digits}f} - {high:.{digits}f})")
        lines.append(cells)
    return docs.table(head, lines)


def tables():
    """Write the tables of docs/speed.md from all docs/bench-*.json. -> str"""
    paths = sorted(docs.DOCS.glob("bench-*.json"))
    records = [json.loads(path.read_text("utf-8")) for path in paths]
    return "".join(f"{record['machine']}:\n\n{table(record['logits'])}\n" for record in records)


def main(argv=None):
    parser(__doc__).parse_args(argv)
    if DEVICE == "cpu":
        common.fail("make bench: needs a GPU")
    torch.set_float32_matmul_precision("highest")
    for rows in measure():                      # store after each row, in case later ones time out
        docs.record(f"bench-{SLUG}", machine=MACHINE, logits=rows)
    docs.put("logits", tables(), "bench")


if __name__ == "__main__":
    start(main)
