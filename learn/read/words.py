"""Read the texts of the pages from NAME.txt: one file for each script, and pictures.txt for the
drawings.

A line that begins with # starts a section. Its fields are separated by |, and names of functions by
+. It is followed by paragraphs, by questions (after ?) with their answers (after !), or by the rows
of a table. The rows of "numbers" are the made-up inputs of equations: symbol, function, argument.
In a text, `code` is code, [text](address) is a link, and $formula$ is a formula in the ASCII of the
docstrings. {policy_loss.ratio 3,1} is a number of the page: the value of `ratio` in policy_loss for
output 3 and, if there is one, token 1. Flags after a | select a variant. The names "-> kl" and
"∂L/∂log π" are written without spaces.
"""
import collections
import re
from pathlib import Path

HERE = Path(__file__).parent
REFERENCE = re.compile(r"""
    \{ (?P<function>\w+) \. (?P<name>[^{}\ |]+)
    (?: \  (?P<row>\d) (?: , (?P<token>\d) )? )?
    (?: \ \|\  (?P<flags>[^{}]+) )? \}""", re.VERBOSE)


# A part of a text. names: of the functions it explains; head: the other fields of its first line.
Section = collections.namedtuple("Section", "names head paragraphs questions rows")


def read(name):
    """Read the sections of a text. -> list of Section"""
    sections = []
    text = (HERE / f"{name}.txt").read_text(encoding="utf-8")
    for part in re.split(r"^# ", text, flags=re.M)[1:]:
        head, _, rest = part.partition("\n")
        names, *head = head.split(" | ")
        section = Section(names.split(" + "), head, [], [], [])
        sections.append(section)
        for block in filter(None, re.split(r"\n\s*\n", rest.strip())):
            text = " ".join(block.split())
            if all(" | " in line for line in block.split("\n")):
                section.rows.extend(re.split(r" \|(?: |$)", line) for line in block.split("\n"))
            elif text.startswith("?"):
                section.questions.append(text[2:].split(" ! "))
            else:
                section.paragraphs.append(text)
    return sections
