"""Follow the path from a base that guesses to nano.py and beyond, in patches of a few lines.

  python -m learn.path               lists the rungs
  python -m learn.path 6             prints the patch of rung 6; runs the scripts of its chapter
  python -m learn.path 6 --seed 1    uses another seed (the default is 0)
  python -m learn.path write         writes all rungs to path/, to read and compare
  python -m learn.path write 6       writes the scripts that chapter 6 compares, to change them
  python -m learn.path run FILE      runs a script that you have edited, from the same base
  python -m learn.path write gspo --real        writes rung gspo for a real model, like real.py
  python -m learn.path measure       runs what docs/path.json does not contain: five seeds, and the
                                     search for the best learning rate of each script
  python -m learn.path page          builds docs/path.html, docs/path.md and docs/path.svg

Numbers or names of rungs after `write` or `measure` select chapters.
"""
from pathlib import Path

import common
import plumbing
from learn.path import measure
from learn.path.rungs import CHAPTERS, REAL_RUNGS, RUNGS, counts, diff, real_script, script, sides
from report import command, parser, start

FOLDER = Path("path")


def write(name, source):
    """Write a script to path/. Exits with one line if you have changed it there. -> Path"""
    path = FOLDER / name
    if not path.exists():
        plumbing.write(path, source)
    elif path.read_text("utf-8") != source:
        common.fail(f"{path}: differs from the script that would replace it; give your own another "
                    "name, or remove it")
    return path


def write_sides(name):
    """Write the scripts that a chapter compares, with its setting and number of steps. -> Paths"""
    steps = f"steps={measure.steps_of(name)})"
    return [write(CHAPTERS[name].file.replace(".py", f"_{side}.py"),
                  source.replace("steps=40)", steps)) for side, source in sides(name).items()]


def write_real(name):
    """Write the script of a rung for a real model. -> Path"""
    if name not in REAL_RUNGS:
        common.fail(f"{name} does not run on a real model; these rungs do: {' '.join(REAL_RUNGS)}")
    return write(CHAPTERS[name].file.replace(".py", "_real.py"), real_script(name))


def show(name, seed):
    """Print the patch of a rung, and run the scripts that its chapter compares."""
    from learn.path.runs import run
    print(*diff(name), "", *write_sides(name), sep="\n")
    print(CHAPTERS[name].fields.get("note", ""))
    for side, source in sides(name).items():
        run(source, seed, measure.steps_of(name), label=f"{side}: ")


def rungs(keys):
    """Look up rungs by number or name. -> list of names; of all rungs if there are no keys"""
    name_of = {key: name for name in RUNGS for key in (name, str(CHAPTERS[name].number))}
    for key in keys:
        if key not in name_of:
            common.fail(f"{key} is not a rung; list the rungs: {command('learn.path')}")
    return [name_of[key] for key in keys] or RUNGS


def main():
    flags = parser(__doc__)
    flags.add_argument("words", nargs="*", metavar="WORD", help="a command or a rung, see above")
    flags.add_argument("--seed", type=int, metavar="S", default=0, help="seed of a run")
    flags.add_argument("--real", action="store_true", help="write scripts for real models")
    args = flags.parse_args()
    match args.words:
        case []:
            for name, chapter in CHAPTERS.items():
                print(f"{chapter.number:2}  {chapter.file:17} {counts(name):8} "
                      f"{chapter.fields['short']}")
        case ["write", *keys] if args.real:
            print(*map(write_real, rungs(keys) if keys else REAL_RUNGS), sep="\n")
        case ["write"]:
            print(*(write(CHAPTERS[name].file, script(name)) for name in CHAPTERS), sep="\n")
        case ["write", *keys]:
            print(*(file for name in rungs(keys) for file in write_sides(name)), sep="\n")
        case ["run", file]:
            from learn.path.runs import run
            if not Path(file).is_file():
                common.fail(f"{file} does not exist; write all scripts: "
                            f"{command('learn.path', 'write')}")
            run(Path(file).read_text(encoding="utf-8"), args.seed, label="")
        case ["measure", *keys]:
            measure.measure(rungs(keys))
            measure.sweep([name for name in rungs(keys) if name != RUNGS[0]])
        case ["page"]:
            from learn.path import page
            page.write(measure.load())
        case [key]:
            show(*rungs([key]), args.seed)
        case _:
            common.fail(f"unknown command {' '.join(args.words)}: run "
                        f"{command('learn.path', '--help')}")


if __name__ == "__main__":
    start(main)
