"""python -m tools.read (make read): write docs/read/, the reading pages of all scripts."""
import argparse
from pathlib import Path

import torch

import common
from tools.read import course
from tools.read.lesson import ROOT, Lesson


def main(argv=None):
    """Write the pages, and print their sizes. Exits with one line, code 2, if a script has no page
    to show or if it cannot write. -> their paths"""
    parser = argparse.ArgumentParser(prog="python -m tools.read", description=__doc__,
                                     allow_abbrev=False)
    parser.error = common.fail
    parser.add_argument("--output_dir", type=Path, default=ROOT / "docs" / "read",
                        help="where the pages go (default: docs/read)")
    folder = parser.parse_args(argv).output_dir
    torch.set_num_threads(1)                            # so that sums have one order everywhere
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lessons = {name: Lesson(name) for name in course.scripts()}
        pages = course.all_pages(lessons)
        for name, text in pages.items():
            (folder / name).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        common.fail(error)
    for name, text in pages.items():
        print(f"{len(text.encode()) // 1000:4d} kB  {folder / name}")
    return [folder / name for name in pages]


if __name__ == "__main__":
    common.start(main)
