"""Write the equations of a script yourself, and see at once which numbers are wrong.

  python -m learn.practice nano             writes practice/nano.py, with a blank for each equation;
                                            the same for reinforce, ppo, grpo, gspo and dpo
  python -m learn.practice grpo 1 3         leaves blanks for equations (1) and (3) only
  python -m learn.practice memory nano      leaves blanks without a hint, and no equations; in nano,
                                            the training loop is a blank, too
  python -m learn.practice check practice/grpo.py       grades it; exits with 0 if all is right
  python -m learn.practice hunt grpo 1      writes hunt/grpo_level1_1.py, with one mistake; there
                                            are levels 1 to 3
  python -m learn.practice watch nano.py hunt/right     runs nano.py, and writes a folder for the
                                            page of a run, to compare it with a hunt in nano
  python -m learn.practice answer hunt/grpo_level1_1.py 143     is it in line 143? (or a function)
  python -m learn.practice answer hunt/grpo_level1_1.py         shows it, and the tests that fail
  python -m learn.practice plant "cold sampler" --max_steps 10      trains with a mistake of
                                            mistakes.txt, or of the lab's bugs.txt
"""
import shlex
import sys
from pathlib import Path

import common
import plumbing
from common import HERE as ROOT
from learn.practice import hunt
from learn.practice.exercise import Exercise
from learn.practice.grades import grades_of
from learn.sync import SCRIPTS
from report import command, short, start

NAMES = ("nano", *(script.removesuffix(".py") for script in SCRIPTS))


def make(name, *numbers, from_memory=False):
    """Write a new exercise into the current folder: practice/NAME.py, NAME_2.py and so on."""
    exercise = Exercise(f"{name}.py")
    unknown = [number for number in numbers if number not in map(str, exercise.equations)]
    if unknown:
        common.fail(f"{name}.py has no equation ({unknown[0]}); it has these: "
                    f"{', '.join(map(str, exercise.equations))}")
    path = Path("practice", f"{name}.py")
    number = 1
    while path.exists():
        number += 1
        path = path.with_name(f"{name}_{number}.py")
    plumbing.write(path, exercise.text([*map(int, numbers)], from_memory))
    hints = "" if from_memory else (
        " The comment on a blank names\nits equation in the docstring, its shape, and the variables"
        " that the right line reads.")
    print(f"{path} is {name}.py with blanks: the lines with `...`.{hints}\n"
          "A loss is right if its gradients are, whatever its value. Fill in one or more blanks,\n"
          "and then run:\n "
          f" {command('learn.practice', 'check', path)}")


def check(word):
    """Print the grades of a file and, if all is right, the command that trains with it."""
    path = Path(word)
    name = path.stem.partition("_")[0]
    if not path.is_file():
        common.fail(f"{word}: there is no such file; to write an exercise, run: "
                    f"{command('learn.practice', 'nano')}")
    if name not in NAMES or path.suffix != ".py":
        common.fail(f"{word}: the name of an exercise is that of a script, and may continue "
                    "after _, for example practice/grpo_2.py")
    exercise = Exercise(f"{name}.py")
    try:
        graded = [*grades_of(path, exercise)]
    except ValueError as error:
        common.fail(error, 1)
    for function, state, sentences, marks in graded:
        numbers = sorted({blank.number for blank in exercise.blanks.get(function, [])})
        wrong = min(marks, default=0)           # the equations after it may depend on it
        others = ["is not graded yet", "is right so far"] if marks else ["", ""]
        shown = (f"({number}) {marks.get(number, others[number < wrong])}".strip()
                 for number in numbers)
        print(f" {state:6} {function}: {', '.join(shown) or 'the training loop'}")
        print(*(f"        {exercise.equations[number]}\n" for number in numbers
                if state == "WRONG" and (marks.get(number) == "is wrong" or not marks)),
              sep="", end="")
        print(*(f"        {sentence}\n" for sentence in sentences), sep="", end="")
    states = [state for _, state, *_ in graded]
    count = states.count("right")
    open_functions = f"; {states.count('open')} still to fill in" if "open" in states else ""
    print(f"{count} of {len(graded)} functions are right{open_functions}.")
    if count < len(graded):
        raise SystemExit(1)
    print("Well done. Your file now trains a policy:\n"
          f"  PYTHONPATH={shlex.quote(str(ROOT))} {shlex.join([sys.executable, short(path)])}")


def main():
    match sys.argv[1:]:
        case [] | ["--help" | "-h"]:
            print(__doc__)
        case [name, *numbers] if name in NAMES:
            make(name, *numbers)
        case ["memory", name] if name in NAMES:
            make(name, from_memory=True)
        case ["check", word]:
            check(word)
        case ["hunt", *words] if len(words) <= 2:
            hunt.begin(*words)
        case ["answer", word, *guess] if len(guess) <= 1:
            hunt.answer(word, *guess)
        case ["watch", word, folder]:
            hunt.watch(word, folder)
        case ["plant", name, *flags]:
            hunt.run(name, *flags)
        case ["memory" | "check" | "hunt" | "answer" | "watch" | "plant" as word, *_]:
            common.fail(f"{word}: has too few or too many words after it; for the list of commands "
                        f"run: {command('learn.practice', '--help')}")
        case [word, *_]:
            common.fail(f"{word}: there is no exercise and no command of this name; the exercises "
                        f"are {', '.join(NAMES)}, and {command('learn.practice', '--help')} lists "
                        "the commands")


if __name__ == "__main__":
    start(main)
