"""Run experiments of the lab: python -m lab NAME (make lab-NAME), or all of them (make lab)."""
import argparse
import os

import common
from lab import bench
from report import start


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    names = ", ".join(bench.NAMES)
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    parser.add_argument("--processes", type=int, default=os.cpu_count(),
                        help="number of processes at a time (default: one for each core)")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--draw", action="store_true",
                       help="measure nothing: make pages and charts from the stored numbers")
    modes.add_argument("--add", action="store_true",
                       help="keep the stored numbers, and measure only what they lack")
    modes.add_argument("--check", action="store_true",
                       help="measure nothing: report the pages whose code now computes otherwise")
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in bench.NAMES:
            parser.error(f"{name}: unknown experiment; choose from {names}")
    if args.check:
        stale = [name for name in args.names or bench.NAMES if not bench.check(name)]
        if stale:
            common.fail(f"stale: {', '.join(stale)}: their first steps are no longer the same", 1)
        return
    for name in args.names or bench.NAMES:
        if not args.draw:
            bench.measure(name, args.processes, args.add)
        bench.publish(name)
    bench.publish_overview()


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""     # all processes use the CPU, as the pages say
    start(main)
