"""Run experiments of the lab: python -m lab NAME (make lab-NAME), or all of them (make lab)."""
import argparse
import os

from lab import bench, experiment
from report import start


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    names = ", ".join(experiment.NAMES)
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    parser.add_argument("--processes", type=int, default=os.cpu_count(),
                        help="number of processes at a time (default: one for each core)")
    parser.add_argument("--draw", action="store_true",
                        help="measure nothing: make pages and pictures from the stored numbers")
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in experiment.NAMES:
            parser.error(f"{name}: unknown experiment; choose from {names}")
    for name in args.names or experiment.NAMES:
        if not bench.is_old(name):
            bench.main([name, "--processes", str(args.processes), *["--draw"] * args.draw])
            continue
        one = experiment.module(name).EXPERIMENT
        if not args.draw:
            one.perform(args.processes)
        one.publish()


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""     # all processes use the CPU, as the pages say
    start(main)
