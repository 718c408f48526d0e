"""Convert lines of code to HTML, with colours, and with the numbers below each line that it
computes. Lines that a first reading does not need are folded."""
import functools
import html
import itertools
import keyword
import re

import torch

from learn.read import example, paper
from learn.read.lesson import in_batch, span

MARKED = ("ratio", "clipped_ratio", "token_loss")       # rows that mark clipped tokens
PARTS = re.compile(rf'''(?P<str>"""[\s\S]*?"""|"(?:\\.|[^"\\\n])*")|(?P<com>\#.*)
    |(?P<kw>\b(?:{"|".join(keyword.kwlist)})\b)|(?P<def>(?<=def\ )\w+|(?<=class\ )\w+)''', re.X)


def plain(x, sign="", digits=2):
    """Format a number with `digits` decimals. -> str"""
    return f"{x:{sign}.{digits}f}".replace("-", "−")


def number_text(x, numbers):
    """Format a number in a row of numbers: two decimals, or none if all of them are whole. 0 has
    no decimals, because 0.00 is a small number that was rounded. -> str"""
    return "0" if abs(x) < 1e-6 else plain(x, digits=2 * any(y != round(y) for y in numbers))


def label_of(name):
    """The label of a value: its name, or the gradient of a loss. -> HTML"""
    if name.startswith("->"):
        return "<em>returns</em>"
    if name.startswith("∂"):
        loss, symbol = re.fullmatch("∂(.*)/∂(.*)", name).groups()
        return f"<span>∂{paper.math(loss)}/∂{symbol.replace('π', '<em>π</em>')}</span>"
    return html.escape(name)


def is_shown(name, value):
    """Whether the page shows a value; not counts, masks, given inputs and caps. -> bool"""
    if not isinstance(value, torch.Tensor) or value.numel() == 1:
        return isinstance(value, (float, torch.Tensor)) and not float(value).is_integer()
    is_given = any(torch.equal(value, known) for known in (example.MASK, example.ENTROPY))
    is_number = value.dtype.is_floating_point or name.startswith("->")
    is_cap = value.isinf().any()                        # of a ratio
    return in_batch(value) and is_number and value.any() and not is_given and not is_cap


class Values:
    """The rows of numbers below the lines of a section. Rows are not repeated."""

    def __init__(self, lesson):
        self.lesson, self.clipped = lesson, lesson.clipped()
        self.shown = set()                  # the rows shown so far, as HTML

    def below(self, function, line):
        """The values that a line assigned, or a function's arguments below its head. -> HTML"""
        rows = ""
        for name, value in self.lesson.notes.get(line, {}).items():
            if is_shown(name, value):
                row = self.row(function, name, value)
                numbers = row.partition("</b>")[2]
                rows += row if numbers not in self.shown else ""
                self.shown.add(numbers)
        return rows

    def row(self, function, name, value, label=""):
        """A row of values with a label, by default the name. Each output has a box with one number
        for each token, or a single number if all are equal. -> HTML"""
        rows = in_batch(value)
        if rows is None:
            boxes = f"<span>{number_text(float(value), [float(value)])}</span>"
            return f'<div class="v one"><b>{label or label_of(name)}</b>{boxes}</div>'
        is_marked = self.clipped and function in ("policy_loss", "backward") and (
            name in MARKED or name.startswith(("∂L", "->")))
        low, high = self.lesson.limits if is_marked and name == "ratio" else (-1e9, 1e9)
        numbers = [x for row in rows for x in row]
        is_one = all(max(row) - min(row) < 1e-6 for row in rows if row)
        boxes = ""
        for i, row in enumerate(rows):
            cells = ""
            for t, x in enumerate(row[:1] if is_one else row):
                marks = "" if low <= x <= high else "out"
                marks += " hit" if is_marked and self.clipped[i][t] else ""
                cells += f'<i class="{marks}">{number_text(x, numbers)}</i>'
            whole = " whole" if is_one else ""
            boxes += f'<div class="o{i + 1}{whole}">{cells}</div>'
        return f'<div class=v><b>{label or label_of(name)}</b>{boxes}</div>'


@functools.cache
def highlight(lesson):
    """Color the lines of a script. Calls of its functions, and numbers of equations in comments and
    docstrings, become links. -> list of HTML"""
    explained = {name for section in lesson.sections.values() for name in section.names}
    names = "|".join(name for name in lesson.by_name if name in explained)

    tags = re.compile(rf"(?:eq\. )?\(({'|'.join(map(str, lesson.equations))})\)")

    def coloured(match):
        kind = match.lastgroup
        text = match[0]
        if kind in ("com", "str"):
            text = tags.sub(r'<a href="#eq\1">\g<0></a>', text)
        return re.sub(r"^( *)(.+)$", rf"\1<span class={kind}>\2</span>", text, flags=re.M)

    text = PARTS.sub(coloured, html.escape(lesson.source, quote=False))
    text = re.sub(rf"(?<!def )(?<![\w.])({names})(?=\()", r'<a class=to href="#\1">\1</a>', text)
    return text.split("\n")


def code_line(lesson, line, side_text=""):
    """A line of code, and a text next to it. Runs of spaces are put in <s>, so that they can shrink
    in narrow windows, where a line may also break at the run before a comment. -> HTML"""
    text = highlight(lesson)[line - 1]
    bare = text.lstrip(" ")
    indent = len(text) - len(bare)
    text = re.sub("( {2,})", r"<s>\1</s>", text)
    text = re.sub("(?<!^)<s>(?= +</s><span class=com>)", "<s class=gap>", text)
    number = f'<a href="#L{line}" tabindex=-1>{line}</a>' if bare else "<a></a>"
    return (f'<div class=l id=L{line} style=--i:{indent}>{number}'
            f"<code>{text}</code>{side_text}</div>")


def code(lesson, name, values=None, side_text=None, is_folded=False):
    """The lines of a function or a class, with values. Lines that a first reading does not need are
    folded. side_text: line -> text next to it; is_folded: whether to fold a function that only
    variants call. -> HTML"""
    place = span(lesson.by_name[name])
    parts = ""
    for is_extra, group in itertools.groupby(place, lesson.folded.__contains__):
        group = list(group)
        body = "".join(code_line(lesson, line, (side_text or {}).get(line, ""))
                       + (values.below(name, line) if values else "") for line in group)
        parts += fold(lesson, group, body) if is_extra else body
    if is_folded and name in lesson.hidden:
        parts = fold(lesson, place, parts, f": {name}")
    return f"<div class=fn>{parts}</div>"


def fold(lesson, group, body, suffix=""):
    """Folded lines, which open by a click on their label or by the switch. -> HTML"""
    count = sum(1 for line in group if lesson.lines[line - 1].strip())
    lines = "1 line" if count == 1 else f"{count} lines"
    return (f"<div class=fold><label><input type=checkbox>⋯ {lines}{suffix}</label>"
            f"<div>{body}</div></div>")
