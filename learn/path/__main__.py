"""Follow the path from a base that guesses to nano.py and beyond, in patches of a few lines.

  python -m learn.path               lists the rungs
  python -m learn.path 5             prints the patch of rung 5; runs the scripts of its chapter
  python -m learn.path 5 --seed 1    uses seed 1; by default, a chapter has that one of the page's
                                     five seeds whose runs end nearest to the means of the page
  python -m learn.path write         writes all rungs to path/, to read and compare
  python -m learn.path write 5       writes the scripts that chapter 5 compares, to change them
  python -m learn.path write 5 --to original    writes them to the folder original/
  python -m learn.path run FILE      runs a script that you have edited, from the same base; by
                                     default with seed 0, as in the answers to the exercises
  python -m learn.path write gspo --real        writes rung gspo for a real model, like real.py
  python -m learn.path measure       runs what docs/path.json does not contain: five seeds, and the
                                     search for the best learning rate of each script
  python -m learn.path lines         runs what docs/lines.json does not contain: nano.py without
                                     each of its lines
  python -m learn.path page          builds the pages, scripts and pictures of docs/path/

Numbers or names of rungs after `write` or `measure` select chapters.
"""
import sys
from pathlib import Path
from statistics import fmean

import common
import plumbing
from learn.path import lines, measure
from learn.path.rungs import CHAPTERS, REAL_RUNGS, RUNGS, counts, diff, real_script, script, sides
from report import command, parser, start

FOLDER = Path("path")
COLOURS = {"without": "grey", "with": "blue", "also": "orange", "fourth": "dotted"}     # of a side
ENDS = {"without": "without", "with": "with", "also": "orange", "fourth": "dotted"}     # of a file


def rungs(keys, choices=RUNGS):
    """Look up rungs by number or name. -> list of names; all choices if there are no keys"""
    name_of = {key: name for name in choices for key in (name, str(CHAPTERS[name].number))}
    for key in keys:
        if key not in name_of:
            common.fail(f"{key}: choose one of these rungs: {' '.join(choices)}; what they are: "
                        f"{command('learn.path')}")
    return [name_of[key] for key in keys] or choices


def write(path, source):
    """Write a script, but never over one that the reader has changed. -> Path"""
    if path.exists() and path.read_text("utf-8", "replace") != source:
        elsewhere = command("learn.path", *sys.argv[1:], "--to", path.parent / "original")
        offers = [f"to write the original elsewhere: {elsewhere}"]
        if not path.stem.endswith("_real"):                 # which `run` cannot run
            offers.insert(0, f"to run yours: {command('learn.path', 'run', path)}")
        common.fail(f"{path}: differs from the original; {'; '.join(offers)}")
    plumbing.write(path, source)
    return path


def write_sides(name, folder):
    """Write the scripts that a chapter compares, with its setting and number of steps. -> Paths"""
    steps = f"steps={CHAPTERS[name].steps})"
    return [write(folder / f"{CHAPTERS[name].stem}_{ENDS[side]}.py",
                  source.replace("steps=80)", steps)) for side, source in sides(name).items()]


def last(result):
    """Compute the share of right samples in the last three steps of a run. -> float"""
    return fmean(step["right"] for step in result["steps"][-3:])


def show(name, seed, folder):
    """Print the patch of a rung, run the scripts that its chapter compares, and print where they
    end, next to the numbers of the page."""
    from learn.path import page
    from learn.path.runs import run
    fields, labels = CHAPTERS[name].fields, CHAPTERS[name].labels
    if seed is None:
        seed = measure.default_seed(name)
    notes = [page.fill(fields[key], name) for key in ("note", "note_without", "note_also")
             if key in fields]
    print(*diff(name), "", *notes, sep="\n")
    for side, path in zip(sides(name), write_sides(name, folder)):
        print(f"{labels[side]} ({COLOURS[side]} on the page): {path}")
    results = {side: run(source, seed, f"{labels[side]}: ", has_kl=False,
                         steps=CHAPTERS[name].steps)
               for side, source in sides(name).items()}
    print(f"\nRight samples in the last three steps, with seed {seed}; on the page, the mean of "
          "five seeds (and their range).")
    on_page = {side: f"{fmean(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})"
               for side, shares in measure.ends(name).items()}
    for side, result in results.items():
        if result["steps"]:                             # the base has none
            print(f"  {labels[side]:14} {last(result):4.0%}   {on_page.get(side, 'not measured')}")


def run_file(path, seed):
    """Run a script that the reader has edited, by default with the seed of the answers."""
    from learn.path.runs import run
    if not path.is_file():
        common.fail(f"{path} does not exist; write all scripts: {command('learn.path', 'write')}")
    if seed is None:
        seed = measure.EXERCISE_SEED
    result = run(path.read_text("utf-8-sig", "replace"), seed, label="", file=str(path),
                 has_kl=False)
    if result["steps"]:                                 # the base has none
        print(f"Right samples in the last three steps, with seed {seed}: {last(result):.0%}")


def main():
    flags = parser(__doc__)
    flags.add_argument("words", nargs="*", metavar="WORD", help="a command or a rung, see above")
    flags.add_argument("--seed", type=int, metavar="S", help="seed of a run")
    flags.add_argument("--to", type=Path, metavar="FOLDER", default=FOLDER,
                       help="folder for the scripts that are written")
    flags.add_argument("--real", action="store_true", help="write scripts for real models")
    args = flags.parse_intermixed_args()
    match args.words:
        case []:
            for name, one in CHAPTERS.items():
                number, size = (one.number, counts(name)) if name in RUNGS else ("", "")
                text = one.fields.get("help", one.fields["short"])
                print(f"{number:2}  {one.stem + '.py':17} {size:8} {text}")
        case ["write", *keys] if args.real:
            for name in rungs(keys, REAL_RUNGS):
                for more in ["", "turns"] if "turns" in CHAPTERS[name].fields else [""]:
                    stem = CHAPTERS[name].stem + "_" * bool(more) + more
                    print(write(args.to / f"{stem}_real.py", real_script(name, more)))
        case ["write"]:
            for name, one in CHAPTERS.items():
                print(write(args.to / f"{one.stem}.py", script(name)))
        case ["write", *keys]:
            for name in rungs(keys):
                print(*write_sides(name, args.to), sep="\n")
        case ["run", file]:
            run_file(Path(file), args.seed)
        case ["measure", *keys]:
            measure.measure(rungs(keys))
        case ["lines"]:
            lines.measure()
        case ["page"]:
            from learn.path import page
            page.write()
        case [key]:
            show(*rungs([key]), args.seed, args.to)
        case _:
            common.fail(f"unknown command {' '.join(args.words)}: run "
                        f"{command('learn.path', '--help')}")


if __name__ == "__main__":
    start(main)
