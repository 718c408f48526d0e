"""Walk the path: from a base that guesses to nano.py, and beyond, by patches of a few lines.

  python -m learn.path               lists the rungs
  python -m learn.path 6             shows the patch of rung 6, and runs it without and with it
  python -m learn.path 6 --seed 1    uses another seed (the default is 0)
  python -m learn.path write         writes all rungs to path/, to read and compare
  python -m learn.path write 6       writes the scripts that chapter 6 ran, to change them
  python -m learn.path run FILE      runs a script that you have edited, from the base made before
  python -m learn.path measure       runs what docs/path.json lacks, with five seeds
  python -m learn.path check         judges the claims of the chapters on the stored runs;
                                     --seeds 21 22 23 runs and judges them on other seeds
  python -m learn.path page          builds docs/path.html, docs/path.md and docs/path.svg

After `measure` and `check`, numbers of rungs select chapters.
"""
from pathlib import Path

import common
from learn.path import measure
from learn.path.rungs import CHAPTERS, RUNGS, counts, diff, script, sides
from report import COMMAND, parser, start

FOLDER = Path("path")


def write(name, source):
    """Write a script to path/. -> its file"""
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / name
    file.write_text(source, encoding="utf-8")
    return file


def write_sides(name):
    """Write the scripts that a chapter compares, with its setting and number of steps. -> files"""
    steps = f"steps={measure.steps_of(name)})"
    return [write(CHAPTERS[name].file.replace(".py", f"_{side}.py"),
                  source.replace("steps=40)", steps)) for side, source in sides(name).items()]


def show(name, seed):
    """Print the patch of a rung, and run the scripts that its chapter compares."""
    from learn.path.runs import run
    print(*diff(name), "", *write_sides(name), sep="\n")
    print(CHAPTERS[name].fields.get("told", ""))
    for side, source in sides(name).items():
        run(source, seed, measure.steps_of(name), label=f"{side}: ")


def rungs(words):
    """Look up rungs by number or name. -> list of names; all of them if there are no words"""
    known = {key: name for name in RUNGS for key in (name, str(CHAPTERS[name].number))}
    for word in words:
        if word not in known:
            common.fail(f"{word} is not a rung: run {COMMAND} learn.path")
    return [known[word] for word in words] or RUNGS


def main():
    told = parser(__doc__)
    told.add_argument("words", nargs="*", metavar="WORD", help="see above")
    told.add_argument("--seed", "--seeds", type=int, nargs="+", dest="seeds", metavar="S",
                      default=[], help="seeds of the runs")
    cfg = told.parse_args()
    if cfg.words[:1] in (["measure"], ["check"], ["page"]) and not measure.STORED.parent.is_dir():
        common.fail(f"{cfg.words[0]} needs the folder docs/ of a clone")
    match cfg.words:
        case []:
            for name, chapter in CHAPTERS.items():
                print(f"{chapter.number:2}  {chapter.file:17} {counts(name):8} "
                      f"{chapter.fields['short']}")
        case ["write"]:
            print(*(write(CHAPTERS[name].file, script(name)) for name in CHAPTERS), sep="\n")
        case ["write", *words]:
            print(*(file for name in rungs(words) for file in write_sides(name)), sep="\n")
        case ["run", file]:
            from learn.path.runs import run
            if not Path(file).is_file():
                common.fail(f"{file} does not exist: {COMMAND} learn.path write makes the scripts")
            run(Path(file).read_text(encoding="utf-8"), *(cfg.seeds or [0])[:1], label="")
        case ["measure", *words]:
            measure.measure(rungs(words), cfg.seeds or measure.SEEDS)
        case ["check", *words]:
            measure.measure(rungs(words), cfg.seeds)
            holds = measure.check(rungs(words), measure.load(), cfg.seeds or measure.SEEDS)
            raise SystemExit(0 if holds else 1)
        case ["page"]:
            from learn.path import page
            page.write(measure.load())
        case [word]:
            show(*rungs([word]), *(cfg.seeds or [0])[:1])
        case _:
            common.fail(f"run {COMMAND} learn.path --help")


if __name__ == "__main__":
    start(main)
