"""python -m learn.read (make read): write docs/read/, the reading pages of all scripts."""
import torch

import common
import plumbing
from learn.read import page
from learn.read.lesson import Lesson
from learn.script import ROOT
from report import parser, start

NAMES = ("reinforce", "grpo", "gspo", "ppo", "dpo")         # in the order in which one reads them


def all_pages():
    """Make the pages. ValueError if a script and its text file disagree. -> {file: text}"""
    return {f"{name}.html": page.lesson_page(Lesson(name), NAMES) for name in NAMES}


def main(argv=None):
    """Write the pages. Exits with one line and code 2 if a page cannot be made."""
    parser(__doc__).parse_args(argv)
    torch.set_num_threads(1)                            # the same order of sums on every machine
    try:
        pages = all_pages()
    except ValueError as error:
        common.fail(error)
    for name, text in pages.items():
        plumbing.write(ROOT / "docs/read" / name, text)
        print(f"{len(text.encode()) // 1000:4d} kB  docs/read/{name}")


if __name__ == "__main__":
    start(main)
