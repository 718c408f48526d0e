"""python -m learn.read (make read): write docs/read/, the reading pages of all scripts, and
docs/index.html, the page from which all others are found."""
import argparse
from pathlib import Path

import torch

import common
from learn.read import door, page, pair, words
from learn.read.lesson import ROOT, Lesson
from report import start


def all_pages():
    """The text of each page. ValueError if a script has none to show. -> dict: path -> text"""
    first, *course = words.read("course")
    addresses = ["-".join(part.names) + ".html" for part in course]
    links = {"start": "../index.html"}
    links |= {" → ".join(part.names): to for part, to in zip(course, addresses)}
    lessons = {part.names[0]: Lesson(part.names[0]) for part in course if len(part.names) == 1}
    found = {"index.html": door.door(first, course)}
    for part, address in zip(course, addresses):
        of_page = [lessons[name] for name in part.names]
        found[f"read/{address}"] = (
            page.lesson_page(*of_page, lessons, links) if len(of_page) == 1
            else pair.pair_page(*of_page, part, links))
    return found


def main(argv=None):
    """Write the pages. Exits with one line, code 2, if a script has no page to show or if it cannot
    write."""
    parser = argparse.ArgumentParser(prog="python -m learn.read", description=__doc__,
                                     allow_abbrev=False)
    parser.error = common.fail
    parser.add_argument("--output_dir", type=Path, default=ROOT / "docs",
                        help="where the pages go (default: docs)")
    folder = parser.parse_args(argv).output_dir
    torch.set_num_threads(1)                            # so that sums have one order everywhere
    try:
        (folder / "read").mkdir(parents=True, exist_ok=True)
        for name, text in all_pages().items():
            (folder / name).write_text(text, encoding="utf-8")
            print(f"{len(text.encode()) // 1000:4d} kB  {folder / name}")
    except (OSError, ValueError) as error:
        common.fail(error)


if __name__ == "__main__":
    start(main)
