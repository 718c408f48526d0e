"""Experiments of the lab, by name, or all of them: python -m lab NAME (make lab-NAME, make lab)."""
import argparse
import os

import common
from lab import experiment


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    names = experiment.NAMES
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="side by side")
    parser.add_argument("--draw", action="store_true", help="measure nothing; draw again")
    args = parser.parse_args(argv)
    for name in args.names or names:
        if name not in names:
            parser.error(f"{name}: is none of {', '.join(names)}")
        made = experiment.module(name).EXPERIMENT
        if not args.draw:
            made.perform(args.processes)
        made.publish()


if __name__ == "__main__":
    common.start(main)
