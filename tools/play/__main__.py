"""python -m tools.play RUN (make play RUN=runs/a): write docs/play.html, in which the policies of a
run answer, and the base learns, in a browser. Without RUN, the page keeps the policies that it has,
and its other parts are made anew."""
import argparse
from pathlib import Path

import torch

import common
from tools.play import build


def main(argv=None):
    """Write the page, and print its size. Exits with one line, code 2, if there is no page to make
    of the run, or if it cannot be read or written. -> its path"""
    parser = argparse.ArgumentParser(prog="python -m tools.play", description=__doc__,
                                     allow_abbrev=False)
    parser.error = common.fail
    parser.add_argument("run", metavar="RUN", type=Path, nargs="?",
                        help="folder of a run of arithmetic")
    parser.add_argument("--output", metavar="FILE", type=Path, default=build.PAGE,
                        help="where the page goes (default: docs/play.html)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    try:
        if args.run is None:
            data = build.data_of(args.output.read_text(encoding="utf-8"))
        else:
            data = build.read(args.run)
        text = build.assemble(data)
        args.output.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        common.fail(error)
    print(f"{len(text.encode()) // 1000} kB  {args.output}")
    return args.output


if __name__ == "__main__":
    common.start(main)
