"""Run experiments of the lab: python -m lab NAME (make lab-NAME), or all of them (make lab)."""
import os

import common
from lab import bench, ledger
from report import parser, start


def main(argv=None):
    flags = parser(__doc__)
    names = ", ".join(bench.NAMES)
    flags.add_argument("names", nargs="*", metavar="NAME", help=names)
    flags.add_argument("--processes", type=int, default=os.cpu_count(),
                       help="number of processes at a time (default: one for each core)")
    modes = flags.add_mutually_exclusive_group()
    modes.add_argument("--draw", action="store_true",
                       help="measure nothing: make the pages and the ledger again (make ledger)")
    modes.add_argument("--check", action="store_true",
                       help="measure nothing: report the pages whose code now computes otherwise")
    modes.add_argument("--replicate", type=int, metavar="SEED",
                       help="repeat the claims on seeds from this one on (make replicate)")
    args = flags.parse_args(argv)
    for name in args.names:
        if name not in bench.NAMES:
            common.fail(f"{name}: unknown experiment; choose from {names}")
    if (args.replicate or 0) < 0:
        common.fail(f"--replicate {args.replicate}: a seed must be at least 0")
    chosen = args.names or bench.NAMES
    if args.check:
        stale = [name for name in chosen if not bench.check(name)]
        if stale:
            common.fail(f"stale: {', '.join(stale)}: their first steps are no longer the same", 1)
        return
    for name in chosen:
        if args.replicate is not None:
            bench.replicate(name, args.replicate, args.processes)
        elif not args.draw:
            bench.measure(name, args.processes)
        bench.publish(name)
    bench.publish_overview()
    ledger.publish()


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""     # all processes use the CPU, as the pages say
    start(main)
