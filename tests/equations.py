"""List the equations of all scripts, or of one (make equations A=grpo): the functions that compute
each, the number of mistakes planted in its lines, and the tests that caught them when all mistakes
were planted last (tests/all-killed.txt). A newer mistake has the words that select its tests.

The lines of an equation are those of a function down to its tag, `eq. (n)` or `for (n)`, from the
tag before it; the last tag also has the lines behind it. If several scripts have a function with
the same text, its mistakes count in each of them.
"""
import sys
from collections import Counter

import mutants

sys.path.insert(0, str(mutants.ROOT))
from learn.script import Script, tags

SCRIPTS = {path.relative_to(mutants.ROOT).as_posix(): Script(path)
           for pattern in ("*.py", "examples/*.py") for path in sorted(mutants.ROOT.glob(pattern))}
FUNCTIONS = {name: {function: "\n".join(script.lines[node.lineno - 1:node.end_lineno])
                    for function, node in script.functions.items()}
             for name, script in SCRIPTS.items()}


def numbers_of(mutant, text):
    """Find the equation in which a mistake is, in the text of a function. -> list of int"""
    [(old, _)] = mutant.edit.hunks
    above, is_here, below = text.partition(old)
    lines = (old + below).split("\n") + above.split("\n")[::-1]
    found = tags(lines) if is_here else []
    return [tag.number for tag in found if tag.line == found[0].line]


def main(names):
    _, killers = mutants.read_killed()
    mistakes = mutants.read_mistakes()
    for script in [f"{name.removesuffix('.py')}.py" for name in names] or SCRIPTS:
        functions = FUNCTIONS[script]
        planted = [(number, mutant) for mutant in mistakes for text in functions.values()
                   if text in FUNCTIONS.get(mutant.file, {}).values()
                   for number in numbers_of(mutant, text)]
        for number, equation in SCRIPTS[script].equations.items():
            its_mistakes = [mutant for one, mutant in planted if one == number]
            homes = [name for name, text in functions.items()
                     if number in {tag.number for tag in tags(text.split("\n"))}]
            print(f"{script} ({number})  {equation}\n    in {', '.join(homes)}; mistakes: "
                  f"{len(its_mistakes)}")
            tests = (killers.get(mutants.key(one)) or f"{' '.join(one.files)} {one.words}"
                     for one in its_mistakes)
            for test, count in Counter(tests).most_common():
                print(f"    {count:2} by {test}")


if __name__ == "__main__":
    main(sys.argv[1:])
