"""Lines of code as HTML: in colours, folded where a first reading can do without them, and below
each line the numbers that it computes."""
import functools
import html
import itertools
import keyword
import re

import torch

from learn.read import example, paper
from learn.read.lesson import in_batch, span

MARKED = ("ratio", "clipped_ratio", "token_loss")       # rows in which clipped tokens are ringed
PARTS = re.compile(rf'''(?P<str>"""[\s\S]*?"""|"(?:\\.|[^"\\\n])*")|(?P<com>\#.*)
    |(?P<kw>\b(?:{"|".join(keyword.kwlist)})\b)|(?P<def>(?<=def\ )\w+|(?<=class\ )\w+)''', re.X)


def number_text(x, numbers):
    """A number as it stands beside others: two decimals, more where these say nothing."""
    if abs(x) < 1e-6:
        return "0"
    if all(y == round(y) for y in numbers):
        return str(int(x)).replace("-", "−")
    is_near_one = any(5e-5 < abs(y - 1) < 2e-3 for y in numbers)
    digits = 4 if is_near_one else 2                    # 1.0004 is not 1.00
    text = f"{x:.{digits}f}"
    if float(text) == 0:                                # nor is .003 0.00
        text = f"{x:.{digits + 1}f}".replace("0.", ".", 1)
    return text.replace("-", "−")


def label_of(name):
    """The name of a value: code, or a derivative of a loss. -> HTML"""
    if name.startswith("->"):
        return "<em>returns</em>"
    if name.startswith("∂"):
        loss, symbol = re.fullmatch("∂(.*)/∂(.*)", name).groups()
        return f"<span>∂{paper.math(loss)}/∂{symbol.replace('π', '<em>π</em>')}</span>"
    return html.escape(name)


def is_shown(name, value):
    """Whether a reader wants to see a value: no counts, no masks, nothing that is not computed."""
    if not isinstance(value, (float, torch.Tensor)):
        return False
    if not isinstance(value, torch.Tensor) or value.numel() == 1:
        return not float(value).is_integer()
    is_given = any(value.shape == known.shape and torch.equal(value, known)
                   for known in (example.MASK, example.ENTROPY))
    is_number = value.dtype.is_floating_point or name.startswith("->")
    return in_batch(value) is not None and is_number and not is_given and value.any()


class Values:
    """The rows of numbers below the lines of a part of the page, each number once."""

    def __init__(self, lesson):
        self.lesson = lesson
        self.shown = set()                  # numbers as they stand there
        self.clipped = lesson.clipped()

    def below(self, function, line):
        """What a line assigned, or, below the head of a function, its arguments. -> HTML"""
        rows = ""
        for name, value in self.lesson.notes.get(line, {}).items():
            if is_shown(name, value):
                row = self.row(function, name, value)
                numbers = row.partition("</b>")[2]
                rows += row if numbers not in self.shown else ""
                self.shown.add(numbers)
        return rows

    def row(self, function, name, value, label=""):
        """A line of values with its label, by default its name: a box for each output, in it a
        number for each token, or one if they are equal. -> HTML"""
        rows = in_batch(value)
        if rows is None:
            boxes = f"<span>{number_text(float(value), [float(value)])}</span>"
            return f'<div class="v one"><b>{label or label_of(name)}</b>{boxes}</div>'
        is_marked = self.clipped and function in ("policy_loss", "backward") and (
            name in MARKED or name.startswith(("∂L", "->")))
        low, high = self.lesson.limits if is_marked and name == "ratio" else (-1e9, 1e9)
        numbers = [x for of_row in rows for x in of_row]
        is_one = all(max(of_row) - min(of_row) < 1e-6 for of_row in rows if of_row)
        boxes = ""
        for i, of_row in enumerate(rows):
            cells = ""
            for t, x in enumerate(of_row[:1] if is_one else of_row):
                marks = "" if low <= x <= high else "out"
                marks += " hit" if is_marked and self.clipped[i][t] else ""
                cells += f'<i class="{marks}">{number_text(x, numbers)}</i>'
            boxes += f'<div class="o{i + 1}{" whole" * is_one}">{cells}</div>'
        return f'<div class=v><b>{label or label_of(name)}</b>{boxes}</div>'


@functools.cache
def highlight(lesson):
    """The lines of a script in colours. Functions that it calls, and equations that comments and
    docstrings name, are links. -> list of HTML"""
    names = "|".join(name for section in lesson.sections.values() for name in section.names)

    def coloured(match):
        kind = match.lastgroup
        text = match[0]
        if kind in ("com", "str"):
            text = re.sub(r"(?:eq\. )?\((\d\d?)\)",
                          lambda found: paper.link(found[1], found[0], lesson.equations), text)
        return re.sub(r"^( *)(.+)$", rf"\1<span class={kind}>\2</span>", text, flags=re.M)

    text = PARTS.sub(coloured, html.escape(lesson.source, quote=False))
    text = re.sub(rf"(?<!def )(?<![\w.])({names})(?=\()", r'<a class=to href="#\1">\1</a>', text)
    return text.split("\n")


def code_line(lesson, line, beside=""):
    """A line of code, and words beside it. In narrow windows runs of spaces shrink: they are in
    <s>. -> HTML"""
    text = highlight(lesson)[line - 1]
    bare = text.lstrip(" ")
    indent = len(text) - len(bare)
    text = re.sub("( {2,})", r"<s>\1</s>", text)
    number = f'<a href="#L{line}" tabindex=-1>{line}</a>' if bare else "<a></a>"
    return (f'<div class=l id=L{line} style=--i:{indent}>{number}'
            f"<code>{text}</code>{beside}</div>")


def code(lesson, name, values=None, beside=None, is_folded=False):
    """The lines of a function or a class with its values. What a first reading can do without is
    folded. beside: line -> words; is_folded: whether functions that only variants call are.
    -> HTML"""
    place = span(lesson.by_name[name])
    parts = ""
    for is_extra, group in itertools.groupby(place, lesson.folded.__contains__):
        group = list(group)
        body = ""
        for line in group:
            body += code_line(lesson, line, (beside or {}).get(line, ""))
            body += values.below(name, line) if values else ""
        parts += fold(lesson, group, body) if is_extra else body
    if is_folded and name in lesson.hidden:
        parts = fold(lesson, place, parts, f": {name}")
    return f"<div class=fn>{parts}</div>"


def fold(lesson, group, body, said=""):
    """Lines that a click on their label shows, or the switch. -> HTML"""
    count = sum(1 for line in group if lesson.lines[line - 1].strip())
    return (f'<div class=fold><label><input type=checkbox>⋯ {count} '
            f"line{'s' * (count > 1)}{said}</label><div>{body}</div></div>")
