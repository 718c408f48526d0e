"""python -m learn.read (make read): write docs/read/, the reading pages of all scripts, and
docs/index.html, which leads to all pages."""
import argparse
from pathlib import Path

import torch

import common
from learn.read import page, words
from learn.read.lesson import ROOT, Lesson
from report import start


def all_pages():
    """Make the text of each page. ValueError if a script and its text file disagree.
    -> dict: path -> text"""
    first, *rest = words.read("course")
    scripts = {section.names[0]: section for section in rest}
    links = {"start": "../index.html", "the path": "../path.html",
             **{name: f"{name}.html" for name in scripts}, "the lab": "../lab.md"}
    return {"index.html": page.index_page(first, scripts)} | {
        f"read/{name}.html": page.lesson_page(Lesson(name), links) for name in scripts}


def main(argv=None):
    """Write the pages. Exits with one line and code 2 if a page cannot be made or written."""
    parser = argparse.ArgumentParser(prog="python -m learn.read", description=__doc__,
                                     allow_abbrev=False)
    parser.error = common.fail
    parser.add_argument("--output_dir", type=Path, default=ROOT / "docs",
                        help="folder for the pages (default: docs)")
    folder = parser.parse_args(argv).output_dir
    torch.set_num_threads(1)                            # the same order of sums on every machine
    try:
        (folder / "read").mkdir(parents=True, exist_ok=True)
        for name, text in all_pages().items():
            (folder / name).write_text(text, encoding="utf-8")
            print(f"{len(text.encode()) // 1000:4d} kB  {folder / name}")
    except (OSError, ValueError) as error:
        common.fail(error)


if __name__ == "__main__":
    start(main)
