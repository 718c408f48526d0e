"""Run a script or command after `pip install`, which puts all files into a folder readable_rl:

  readable-rl grpo --task arithmetic                  runs grpo.py
  readable-rl report.ask runs/a "((3+4)*2)="          the same as `python -m report.ask` in a clone
"""
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main():
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return
    name = sys.argv.pop(1).removesuffix(".py").replace("/", ".")
    path = FOLDER / name.replace(".", "/")
    if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
        print(f"error: {name}: no such script or command in {FOLDER}", file=sys.stderr)
        raise SystemExit(2)
    sys.path.insert(0, str(FOLDER))
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
