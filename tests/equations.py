"""List the equations of all scripts, or of one (make equations A=grpo): the functions that compute
each, the number of mistakes planted in its lines, and the tests that caught them when all mistakes
were planted last (tests/all-killed.txt). A newer mistake has the words that select its tests.

The lines of an equation are those of a function down to its tag, `eq. (n)` or `for (n)`, from the
tag before it; the last tag also has the lines behind it. If several scripts have a function with
the same text, its mistakes count in each of them.
"""
import functools
import re
import sys
from collections import Counter

import mutants

sys.path.insert(0, str(mutants.ROOT))
from learn.practice.exercise import Exercise

TAG = re.compile(r"(?:eq\.|for) \((\d+)\)")
SCRIPTS = {path.relative_to(mutants.ROOT).as_posix(): Exercise(path)
           for pattern in ("*.py", "examples/*.py") for path in sorted(mutants.ROOT.glob(pattern))}
FUNCTIONS = {name: {function: "\n".join(script.lines[node.lineno - 1:node.end_lineno])
                    for function, node in script.nodes.items()}
             for name, script in SCRIPTS.items()}


@functools.cache
def places():
    """Find the mistakes in equations. -> list of (Mutant, text of its function, number)"""
    found = []
    for mutant in mutants.read_mistakes():
        old = "\n".join(mutant.old)
        for text in FUNCTIONS.get(mutant.file, {}).values():
            above, is_here, below = text.partition(old)
            lines = (old + below).split("\n") + above.split("\n")[::-1]
            numbers = next(filter(None, map(TAG.findall, lines)), []) if is_here else []
            found += [(mutant, text, number) for number in numbers]
    return found


def mistakes_in(script, number):
    """-> the Mutants in an equation of a script"""
    return [mutant for mutant, text, its_number in places()
            if its_number == str(number) and text in FUNCTIONS[script].values()]


def main(names):
    _, killers = mutants.read_killed()
    for script in [f"{name.removesuffix('.py')}.py" for name in names] or SCRIPTS:
        for number, text in SCRIPTS[script].equations.items():
            planted = mistakes_in(script, number)
            homes = [name for name, code in FUNCTIONS[script].items()
                     if str(number) in TAG.findall(code)]
            print(f"{script} ({number})  {text}\n    in {', '.join(homes)}; mistakes: "
                  f"{len(planted)}")
            tests = (killers.get(mutants.key(one)) or f"{' '.join(one.files)} {one.words}"
                     for one in planted)
            for test, count in Counter(tests).most_common():
                print(f"    {count:2} by {test}")


if __name__ == "__main__":
    main(sys.argv[1:])
