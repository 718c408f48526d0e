"""python -m learn.play RUN (make play RUN=runs/a): write docs/play.html, in which the policies of a
run answer, and the base learns, in a browser. Without RUN, the page keeps the policies that it has,
and its other parts are made anew. --measure (make levers) finds out what its levers do."""
import argparse
from pathlib import Path

import torch

import common
from learn.play import build
from report import start


def main(argv=None):
    """Write the page, and print its size. Exits with one line, code 2, if there is no page to make
    of the run, or if it cannot be read or written. -> its path"""
    parser = argparse.ArgumentParser(prog="python -m learn.play", description=__doc__,
                                     allow_abbrev=False)
    parser.error = common.fail
    parser.add_argument("run", metavar="RUN", type=Path, nargs="?",
                        help="folder of a run of arithmetic")
    parser.add_argument("--output", metavar="FILE", type=Path, default=build.PAGE,
                        help="where the page goes (default: docs/play.html)")
    parser.add_argument("--measure", action="store_true",
                        help="also measure what the levers do, in a quarter of an hour")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    try:
        data = build.read(args.run) if args.run else build.data_of(args.output)
        if args.measure:
            data["measured"] = build.measure(data)
        text = build.assemble(data)
        common.write(args.output, text)
    except (OSError, ValueError) as error:
        common.fail(error)
    print(f"{len(text.encode()) // 1000} kB  {args.output}")
    return args.output


if __name__ == "__main__":
    start(main)
