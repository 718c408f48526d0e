"""Repeat the claims of experiments on other seeds: python -m lab [NAME ...] --replicate SEED (make
replicate).

Each side runs at the learning rate that its page chose, without the search. There are as many seeds
as on the page, from SEED on, and none that the page used. An experiment with one base keeps this
base. The numbers go to docs/replication.json, and a table of verdicts to docs/lab.md. An experiment
that is not named keeps what it has there. The table leaves it out if its page now has other cases
or rates."""
import functools
import itertools

import measuring
from lab import bench, docs
from lab.docs import table


def jobs(name, x, first):
    """List what has to be measured: each case, and each side at its best rate, with seeds from
    `first` on. -> pairs of a case and a seed"""
    one = bench.module(name)
    used = {*one.SEEDS, *one.TUNING, *one.OTHER_SEEDS}
    found = []
    for case in bench.chosen(name, x):
        unused = (seed for seed in itertools.count(first) if seed not in used)
        number = len(bench.seeds_of(one, case))
        found += [(case, seed) for seed in itertools.islice(unused, number)]
    return found


def replicate(name, first, processes):
    """Measure an experiment with new seeds, and store the results in docs/replication.json."""
    x, _ = bench.load(name)
    bench.repetitions()                             # before the measurement, in case it is damaged
    todo = jobs(name, x, first)
    about = docs.describe(processes) | {"seeds": sorted({seed for _, seed in todo})}
    store = docs.measured(f"replicate-{name}", lambda _: todo,
                          functools.partial(bench.perform, name), about, processes)
    measuring.write(docs.DOCS / "replication.json",
                    bench.repetitions() | {name: store.content()}, levels=3)
    store.path.unlink()


def compared():
    """Count the verdicts that stay on other seeds, and write a table of those that change, without
    claims that do not depend on seeds. -> Markdown"""
    rows, kept = [], 0
    covered = []
    for name in bench.repetitions():
        x = bench.load(name)[0] if name in bench.NAMES else {}
        found, about = bench.repeated(name, x) if x else ({}, {})
        if not found:
            print(f"{name}: left out, because the lab no longer has what was repeated", flush=True)
            continue
        alone = bench.joined(name, x, found, keep=False)
        pairs = zip(*(bench.judged(name, numbers)[0] for numbers in (x, alone)))
        for there, here in pairs:
            if not there.computed and there.verdict == here.verdict:
                kept += 1
            elif not there.computed:
                rows.append([bench.link_to(name), there.text, there.cells()[1], *here.cells()[1:3]])
        covered.append(f"{name} (seeds {bench.spans(about['seeds'])}, {about['seconds']} s, commit "
                       f"{about['commit']})")
    heads = ["page", "claim", "verdict there", "new verdict", "new effect (95% interval)"]
    changed = f"\n{table(heads, rows)}" if rows else ""
    return (f"Repeated so far: {', '.join(covered) or 'none'}. {kept} of {kept + len(rows)} "
            f"verdicts stay.\n{changed}")
