"""Build the scripts of the path: each is an earlier script with a patch of a few lines.

chapters.txt has a chapter for each rung. The line `== clip on ratio` begins the chapter of rung
`clip`, which is a patch on rung `ratio`. Its fields follow, each a line @NAME with its text. @patch
contains a diff of whole lines in the format of vectors/edits.py. @nano and @real contain hunks for
which nano.py and real.py differ.
@picture names the sides that a chapter compares, as in `without=GRPO | with=CISPO`.
@setting is another patch, which the experiment of a chapter applies to all of its scripts, so that
the problem shows; @note explains it. A hunk that is one of the words of STANDS stands for this
field of the base: the points of an evenly strict judge as rewards, or those of one who likes some
questions more; the best of each group to imitate; eight passes over a batch; the function
`imitate`; rewards as advantages. @docstring is the docstring of the script, in
which `(2 3)` stands for equations of nano.py. The last chapter but one is about real.py. It has no
patch, and its field @rungs names the rungs whose patches fit real.py. The last chapter patches
real.py. These two and the first chapter, the base, are no rungs of nano.py: @help says what you can
run instead.
"""
import difflib
import functools
import re
from pathlib import Path
from typing import NamedTuple

from vectors.edits import patch

ROOT = Path(__file__).resolve().parents[2]
NANO, REAL = ((ROOT / name).read_text(encoding="utf-8") for name in ("nano.py", "real.py"))
FUSED = f'{" " * 34}fused=DEVICE == "cuda")'
OWN = r"(torch\.randperm\((?:P \* G|len\(pairs\)))(\S*)( {17})?"
USAGE = "\nTo run it, see real.py: python THIS_FILE MODEL [FILE.jsonl]\n"


class Chapter(NamedTuple):
    number: int
    name: str
    on: str             # name of the rung that is patched, or "nano"
    fields: dict        # name -> text

    @property
    def stem(self):
        """The name of the rung's file, without the .py; that of the base has no number."""
        return self.name if self.on == "nano" else f"{self.number:02}_{self.name}"

    @property
    def steps(self):
        return int(self.fields.get("steps", 80))

    @property
    def page(self):
        """The name of its page in docs/path/."""
        return self.stem.replace("_", "-") + ".md" if self.on != "nano" else "gradient.md"

    @property
    def labels(self):
        """The names of the sides, as a dict, from @picture and, if a side is not drawn, @label."""
        text = f"{self.fields['picture']} | {self.fields.get('label', '')}"
        found = re.findall(r"(without|with|also|fourth)=([^|\n]*)", text)
        return {"without": CHAPTERS[self.on].fields["short"]} | {
            side: label.strip() for side, label in found}


SOURCE = Path(__file__).with_name("chapters.txt").read_text(encoding="utf-8")
STANDS = "(points|judge|best|passes|imitate|raw)"            # for a field of the base
SHARED = dict(re.findall(rf"^@{STANDS}\n([\s\S]*?)(?=\n@[a-z])", SOURCE, re.M))
SHARED |= {number: line for line, number in re.findall(r"^(  \w.* \((\d)\))$", NANO, re.M)}


def read(text):
    """Read a text in the format of chapters.txt. -> dict from name to Chapter"""
    text = re.sub(rf"^(?:{STANDS}|  \(([\d ]+)\))$", lambda match: "\n".join(
        SHARED[key] for key in (match[1] or match[2]).split()), text, flags=re.M)
    chapters = {}
    for part in re.split(r"^== ", text, flags=re.M)[1:]:
        head, *fields = re.split(r"^@(?=[a-z])", part, flags=re.M)
        name, on = head.strip().split(" on ")
        pairs = [re.match(r"(\w+)[ \n]?([\s\S]*)", field).groups() for field in fields]
        fields = {key: text.strip("\n") for key, text in pairs}
        chapters[name] = Chapter(len(chapters) - 1, name, on, fields)
    return chapters


CHAPTERS = read(SOURCE)
BASE, *RUNGS, LAST, AGENT = CHAPTERS
REAL_RUNGS = [*CHAPTERS[LAST].fields["rungs"].split(), AGENT]


@functools.cache        # the page asks for each script thousands of times
def script(name, setting=""):
    """Build the script of a rung, with the setting of the chapter that `setting` names. -> str"""
    if name in ("nano", LAST):
        return NANO if name == "nano" else REAL
    fields = CHAPTERS[name].fields
    source = patch(patch(script(CHAPTERS[name].on), fields["patch"]), fields.get("nano", ""))
    is_nano = fields["docstring"] == "nano"
    docstring = NANO.split('"""')[1] if is_nano else fields["docstring"] + "\n"
    source = source.replace(source.split('"""')[1], docstring, 1)
    return patch(source, CHAPTERS[setting].fields.get("setting", "")) if setting else source


def real_script(name, more=""):
    """Build the script of a rung for real models. real.py is the rung that is nano.py, so patches
    are taken back to reach the rungs before that one. Three calls differ: for AdamW, a GPU has a
    fused kernel, torch.randperm has a generator of its own, and judge calls verify. more: the field
    with a second patch, which only the agent has. -> str"""
    before = [LAST]                     # real.py, nano.py's rung, and all rungs on the way to it
    while CHAPTERS[before[-1]].on != BASE:
        before.append(CHAPTERS[before[-1]].on)
    if name in (*before[:2], AGENT):
        source = script(name if name == AGENT else LAST)
        return patch(source, CHAPTERS[name].fields.get(more, ""))
    is_before = name in before
    patched = before[before.index(name) - 1] if is_before else name
    hunks = re.sub(r"^(..)(    optimizer = .*)\)$", r"\1\2,\n\1" + FUSED,
                   CHAPTERS[patched].fields["patch"], flags=re.M)
    hunks = re.sub(OWN, r"\1, generator=DRAWS\2", hunks).replace("map(verify, ", "map(judge, ")
    if is_before:
        taken_back = re.sub("^[+-]", lambda sign: "-" if sign[0] == "+" else "+", hunks, flags=re.M)
        source = patch(real_script(patched), taken_back)
    else:
        on = CHAPTERS[name].on
        source = patch(real_script(on if on in REAL_RUNGS else before[1]), hunks)
        source = patch(source, CHAPTERS[name].fields.get("real", ""))
    docstring = CHAPTERS[name].fields["docstring"] + "\n" + USAGE
    return source.replace(source.split('"""')[1], docstring, 1)


@functools.cache
def sides(name):
    """Build the scripts that a chapter compares. -> dict from side to script

    `without` is the rung that the chapter patches or, if the chapter has a field @without, its own
    script with that change. `also` and `fourth` are further scripts, if the chapter has the fields.
    A field such as @also_on names the rung whose script is changed instead.
    """
    chapter = CHAPTERS[name]
    made = {side: patch(script(chapter.fields.get(f"{side}_on", name), name), chapter.fields[side])
            for side in ("without", "also", "fourth") if side in chapter.fields}
    setting = "" if chapter.on == BASE else name           # the base gets no reward
    return {"without": made.get("without") or script(chapter.on, setting),
            "with": script(name, name), **made}


def diff(name):
    """Compare a rung with the rung that it patches, without the docstrings. -> lines of a diff"""
    old, new = (script(rung).split('"""', 2)[2].split("\n") for rung in (CHAPTERS[name].on, name))
    lines = list(difflib.unified_diff(old, new, lineterm="", n=1))[2:]
    return [line for line in lines if line != " "]


def counts(name):
    """Count the added and removed lines of a patch. -> str such as +2 -1"""
    signs = [line[0] for line in diff(name)]
    return f"+{signs.count('+')} -{signs.count('-')}"
