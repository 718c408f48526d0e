"""python -m learn.play RUN (make play RUN=runs/a): write docs/play.html. In it, the policies of a
run answer, and the base is trained, in a browser. Without RUN, the page keeps its policies, and
only its other parts are rebuilt. --measure (make levers) measures what its levers do."""
import contextlib
from pathlib import Path

import torch

import common
import plumbing
from learn.play import build
from report import parser, start


def main(argv=None):
    """Write the page and print its size. Exits with one line and code 2 if no page can be made from
    the run, or if a file cannot be read or written."""
    command = parser(__doc__)
    command.add_argument("run", metavar="RUN", type=Path, nargs="?",
                         help="folder of a run on the task arithmetic")
    command.add_argument("--measure", action="store_true",
                         help="also measure what the levers do, in a quarter of an hour")
    args = command.parse_args(argv)
    torch.set_num_threads(1)
    try:
        data = build.read(args.run) if args.run else build.data_of(build.PAGE)
        with contextlib.suppress(ValueError, OSError):          # there is no such page yet
            old = build.data_of(build.PAGE)
            if old["packed"]["base"] == data["packed"]["base"] and old["cfg"] == data["cfg"]:
                data["measured"] = old["measured"]              # it is about the base
        if args.measure:
            data["measured"] = build.measure(data)
        text = build.assemble(data)
        plumbing.write(build.PAGE, text)
    except (OSError, ValueError) as error:
        common.fail(error)
    print(f"{len(text.encode()) // 1000} kB  {build.PAGE}")


if __name__ == "__main__":
    start(main)
