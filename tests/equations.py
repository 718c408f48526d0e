"""Plant mistakes in the lines of all equations, or of those of one script (make equations A=grpo),
and list for each equation the functions that compute it, how many mistakes the tests caught, which
tests caught them, and the mistakes that survived. The mistakes are those of mutations.py, and those
of learn/practice/mistakes.txt. For grpo.py this takes ten minutes on two cores.

The lines of an equation are those of a function down to its tag, `eq. (n)` or `for (n)`, from the
tag before it; the last tag also has the lines below it. If several scripts have a function with the
same text, its mistakes count in each of them.
"""
import sys
from collections import Counter

import mutants
import mutations

sys.path.insert(0, str(mutants.ROOT))
from learn.script import Script

FILES = [path.relative_to(mutants.ROOT).as_posix() for pattern in ("*.py", "examples/*.py")
         for path in sorted(mutants.ROOT.glob(pattern))]


def number_at(script, function, line):
    """Find the equation of a line of a function. -> its number; None if it has no equation"""
    node = script.functions[function]
    tags = [tag for tag in script.tags if node.lineno <= tag.line <= node.end_lineno]
    below = [tag.number for tag in tags if tag.line >= line]
    return (below or [tag.number for tag in tags[-1:]] or [None])[0]


def in_equations(script, planted):
    """Find the mistakes in lines of equations. planted: list of (Mistake, its edits).
    -> [(number, Mistake)]"""
    found = []
    for mistake, edits in planted:
        for file, start, *_ in edits:
            line = script.source.count("\n", 0, start) + 1
            homes = [name for name, node in script.functions.items()
                     if node.lineno <= line <= node.end_lineno]
            if file == script.file and homes and number_at(script, homes[0], line):
                found.append((number_at(script, homes[0], line), mistake))
    return found


def all_planted():
    """Make all mistakes. -> [(Mistake, its edits)]"""
    found, texts = mutants.contexts(), mutants.all_texts()
    known = mutants.equivalent()
    pairs = [(mutants.mistake_of(one, found, texts), one.edits)
             for folder in mutations.FOLDERS for one in mutations.of_folder(folder)
             if str(one) not in known]
    return pairs + mutants.of_practice(found)


def main(names):
    planted = all_planted()
    scripts = [Script(f"{name.removesuffix('.py')}.py") for name in names] or map(Script, FILES)
    of_script = {script: in_equations(script, planted) for script in scripts}
    mistakes = {one.name: one for pairs in of_script.values() for _, one in pairs}
    results = mutants.run([*mistakes.values()])
    for script, pairs in of_script.items():
        for number, equation in script.equations.items():
            homes = [name for name in script.functions if number in {
                number_at(script, name, tag.line) for tag in script.tags
                if script.functions[name].lineno <= tag.line <= script.functions[name].end_lineno}]
            own = {one.name: results[one.name] for its, one in pairs if its == number}
            killers = [failed.partition("[")[0] for word, failed in own.values()
                       if word == "killed"]
            print(f"{script.file} ({number})  {equation}\n    in {', '.join(homes)}; "
                  f"{len(killers)} of {len(own)} mistakes caught")
            for test, count in Counter(killers).most_common():
                print(f"    {count:3} by {test}")
            for name, (word, _) in own.items():
                if word != "killed":
                    print(f"    {word}: {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
