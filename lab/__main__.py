"""All experiments of the lab, one after the other: python -m lab (make lab)."""
import importlib

import common
from lab.entry import NAMES, perform


def main():
    for name in NAMES:
        module = importlib.import_module(f"lab.{name}")
        perform(name, module, module.SEEDS)


if __name__ == "__main__":
    common.start(main)
