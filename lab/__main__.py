"""Experiments of the lab, by name, or all of them: python -m lab NAME (make lab-NAME, make lab)."""
import argparse
import os

from lab import experiment
from report import start


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    names = ", ".join(experiment.NAMES)
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="side by side")
    parser.add_argument("--draw", action="store_true", help="measure nothing; draw again")
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in experiment.NAMES:
            parser.error(f"{name}: is none of {names}")
    chosen = args.names or (experiment.measured() if args.draw else experiment.NAMES)
    for made in [experiment.module(name).EXPERIMENT for name in chosen]:
        if not args.draw:
            made.perform(args.processes)
        made.publish()


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""     # for all processes: what is written is a CPU's
    start(main)
