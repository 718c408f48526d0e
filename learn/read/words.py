"""The words of the pages, which stand in NAME.txt: one file for each script, pictures.txt, and
course.txt for the index and the order in which to read.

A line that begins with # names a section; fields are separated by |, names of functions by +. Then
come paragraphs; questions behind ?, and behind ! their answers; or the rows of a table. In words,
`code` is code, [words](address) a link, $a formula$ one in the ASCII of the docstrings, and
{policy_loss.ratio 3,1} the number that stands on the page for `ratio` in a function, of output 3
and token 1, or without both; behind a | the flags with which a variant has it. "-> kl" and
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


# A part of a text: what it is about, the other fields of its head, what follows in it.
Section = collections.namedtuple("Section", "names head paragraphs questions rows")


def read(name):
    """The sections of a text. ValueError where a question has no answer. -> list of Section"""
    found = []
    text = (HERE / f"{name}.txt").read_text(encoding="utf-8")
    for part in re.split(r"^# ", text, flags=re.M)[1:]:
        head, _, rest = part.partition("\n")
        names, *head = head.split(" | ")
        section = Section(names.split(" + "), head, [], [], [])
        found.append(section)
        for block in filter(None, re.split(r"\n\s*\n", rest.strip())):
            words = " ".join(block.split())
            if all(" | " in line for line in block.split("\n")):
                section.rows.extend(re.split(r" \|(?: |$)", line) for line in block.split("\n"))
            elif not words.startswith("?"):
                section.paragraphs.append(words)
            elif " ! " in words:
                section.questions.append(words[2:].split(" ! "))
            else:
                raise ValueError(f"{name}.txt: no question with its answer: {words}")
    return found
