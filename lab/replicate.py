"""Repeat the claims of experiments of the lab on other seeds: python -m lab.replicate [NAME ...]
--seed S (make replicate).

Each side runs at the learning rate that its page chose, without the search. There are as many seeds
as on the page, from S on, and none that the page used. An experiment with one base keeps this base.
The numbers go to docs/replication.json, and a table of verdicts to docs/lab.md. An experiment that
is not named keeps what it has there. The table leaves it out if its page now has other cases or
rates."""
import argparse
import itertools
import json
import os
import time

import common
import plumbing
from lab import bench
from lab.docs import put, table
from report import start

FIRST = 1000                            # first seed, if you name none


def jobs(name, x, first):
    """List what has to be measured: each case, and each side at its best rate, with seeds from
    `first` on. -> pairs of a case and a seed"""
    one = bench.module(name)
    used = {*one.SEEDS, *getattr(one, "TUNING", ()), *getattr(one, "OTHER_SEEDS", ())}
    best = [bench.tune(name, x, *pair)[1] for pair in getattr(one, "COMPARED", ())]
    found = []
    for case in dict.fromkeys([*getattr(one, "CASES", ()), *best]):
        unused = (seed for seed in itertools.count(first) if seed not in used)
        number = len(bench.seeds_of(one, case))
        found += [(case, seed) for seed in itertools.islice(unused, number)]
    return found


def renewed(name, x, found):
    """Put repeated measurements, {case: {column: rows}}, in the place of those that the page is
    judged by. The rows of the seeds that chose the rates stay, so each side keeps its rate.
    -> numbers in the form of x"""
    one = bench.module(name)
    numbers = dict(x)
    for case, columns in found.items():
        first = 0 if case in getattr(one, "CASES", ()) else len(one.TUNING)
        numbers[case] = {column: bench.array(x[case][column][:first].tolist() + rows)
                         for column, rows in columns.items()}
    return numbers


def replicate(name, first, processes):
    """Measure an experiment with new seeds, and store the results in docs/replication.json."""
    x, _ = bench.load(name)
    stored = load()                                 # before the measurement, in case it is damaged
    todo = jobs(name, x, first)
    about = {"seeds": sorted({seed for _, seed in todo})} | bench.describe(processes)
    clock = time.perf_counter()
    with bench.make_pool(processes) as pool:
        columns = pool.map(bench.perform, [name] * len(todo), *zip(*todo))
        found = bench.grouped([*job, values] for job, values in zip(todo, columns))
    about["seconds"] = round(time.perf_counter() - clock)
    stored |= {name: {"about": about} | found}
    lines = json.dumps(stored).replace("}}, ", "}},\n").replace("]], ", "]],\n")
    plumbing.write(bench.DOCS / "replication.json", lines + "\n")


def load():
    """Load the repeated measurements. -> {name: {"about": dict, case: {column: rows}}}"""
    path = bench.DOCS / "replication.json"
    try:
        stored = json.loads(path.read_text("utf-8")) if path.exists() else {}
        is_whole = all("about" in found for found in stored.values())
    except (ValueError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        common.fail(f"{path}: damaged; restore it with git, or delete it")
    return stored


def compared():
    """Write the table of verdicts on a page and on other seeds, without claims that do not depend
    on seeds. -> Markdown"""
    rows, kept = [], 0
    covered = []
    for name, found in load().items():
        about = found.pop("about")
        x = bench.load(name)[0] if name in bench.NAMES else None
        if x is None or {case for case, _ in jobs(name, x, FIRST)} != found.keys():
            print(f"{name}: left out, because the lab no longer has what was repeated", flush=True)
            continue
        pairs = zip(*(bench.judged(name, numbers)[0] for numbers in (x, renewed(name, x, found))))
        for there, here in pairs:
            if not there.computed:
                kept += there.verdict == here.verdict
                rows.append([bench.link_to(name), there.text, there.cells()[1], *here.cells()[1:3]])
        covered.append(f"{name} (seeds {bench.spans(about['seeds'])}, {about['seconds']} s, commit "
                       f"{about['commit']})")
    heads = ["page", "claim", "verdict there", "new verdict", "new effect (95% interval)"]
    return (f"Repeated so far: {', '.join(covered) or 'none'}. {kept} of {len(rows)} verdicts stay."
            f"\n\n{table(heads, rows)}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(bench.NAMES))
    parser.add_argument("--seed", type=int, default=FIRST, help=f"first seed (default: {FIRST})")
    parser.add_argument("--processes", type=int, default=os.cpu_count(),
                        help="number of processes at a time (default: one for each core)")
    args = parser.parse_args(argv)
    unknown = [name for name in args.names if name not in bench.NAMES]
    if unknown:
        common.fail(f"{unknown[0]}: unknown experiment; choose from {', '.join(bench.NAMES)}")
    if args.seed < 0:
        common.fail(f"--seed {args.seed}: must be at least 0")
    for name in args.names or bench.NAMES:
        replicate(name, args.seed, args.processes)
    text = compared()
    put("replication", text, "replicate")
    print(text)


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""     # as for the pages
    start(main)
