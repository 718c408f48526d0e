"""python -m learn.read (make read): write docs/read/, the reading pages of all scripts."""
import torch

import plumbing
from learn.read import page
from learn.read.lesson import ROOT, Lesson
from report import parser, start

NAMES = ("reinforce", "grpo", "gspo", "ppo", "dpo")         # in the order in which one reads them


def all_pages():
    """Make the pages. -> {file: text}"""
    return {f"{name}.html": page.lesson_page(Lesson(name), NAMES) for name in NAMES}


def main(argv=None):
    """Write the pages."""
    parser(__doc__).parse_args(argv)
    torch.set_num_threads(1)                            # the same order of sums on every machine
    for name, text in all_pages().items():
        plumbing.write(ROOT / "docs/read" / name, text)
        print(f"{len(text.encode()) // 1000:4d} kB  docs/read/{name}")


if __name__ == "__main__":
    start(main)
