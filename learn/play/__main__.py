"""python -m learn.play RUN (make play RUN=runs/a): write docs/play.html. In it, the policies of a
run answer, and the base is trained, in a browser. Without RUN, the page keeps its policies, and
only its other parts are rebuilt. --measure (make play-experiments) measures its experiments."""
from pathlib import Path

import torch

import common
import plumbing
from learn.play import build
from report import parser, start


def main(argv=None):
    """Write the page and print its size. Exits with one line if there is nothing to make it of."""
    command = parser(__doc__)
    command.add_argument("run", metavar="RUN", type=Path, nargs="?",
                         help="folder of a run on the task arithmetic")
    command.add_argument("--measure", action="store_true",
                         help="also measure what the experiments do, in a quarter of an hour")
    args = command.parse_args(argv)
    torch.set_num_threads(1)
    old = build.data_of(build.PAGE)
    data = build.read(args.run) if args.run else old
    if data is None:
        common.fail(f"{build.PAGE}: learn.play did not make this page; give it a run, too")
    if args.measure:
        data["measured"] = build.measure(data)
    elif old and old["packed"]["base"] == data["packed"]["base"] and old["cfg"] == data["cfg"]:
        data["measured"] = old["measured"]                          # it is about the base
    text = build.assemble(data)
    plumbing.write(build.PAGE, text)
    print(f"{len(text.encode()) // 1000} kB  {build.PAGE}")


if __name__ == "__main__":
    start(main)
