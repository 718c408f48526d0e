"""python -m tools.read (make read): write docs/read/, the reading pages of all scripts."""
import argparse
from pathlib import Path

import torch

from tools.read import course
from tools.read.lesson import ROOT, Lesson


def main(argv=None):
    """-> the paths that were written"""
    parser = argparse.ArgumentParser(prog="python -m tools.read", description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=ROOT / "docs" / "read",
                        help="where the pages go (default: docs/read)")
    folder = parser.parse_args(argv).output_dir
    torch.set_num_threads(1)                            # so that sums have one order everywhere
    lessons = {name: Lesson(name) for name in course.scripts()}
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in course.all_pages(lessons).items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        print(f"{len(text.encode()) // 1000:4d} kB  {path}")
        paths.append(path)
    return paths


if __name__ == "__main__":
    main()
