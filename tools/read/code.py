"""Lines of code as HTML: in colours, folded where a first reading can do without them, and below
each line the numbers that it computes."""
import functools
import html
import keyword
import re

import torch

from tools.read import example, paper
from tools.read.lesson import in_batch, span

MARKED = ("ratio", "clipped_ratio", "token_loss")       # rows in which clipped tokens are ringed
WHY = {"log": " without effect on the gradient", "variant": " not used here"}
PARTS = re.compile(rf'''(?P<str>"""[\s\S]*?"""|"(?:\\.|[^"\\\n])*")|(?P<com>\#.*)
    |(?P<kw>\b(?:{"|".join(keyword.kwlist)})\b)|(?P<def>(?<=def\ )\w+|(?<=class\ )\w+)''', re.X)


# ---- numbers ---------------------------------------------------------------------------------

def number_text(x, numbers):
    """A number as it stands beside others: two decimals, more where these say nothing."""
    if abs(x) < 1e-6:
        return "0"
    if all(y == round(y) for y in numbers):
        return str(int(x)).replace("-", "−")
    digits = 2
    while max(abs(y) for y in numbers) < 0.5 * 10 ** (1 - digits):
        digits += 1
    if any(5e-5 < abs(y - round(y)) < 2e-3 and round(y) for y in numbers):
        digits = 4                                      # 1.0004 is not 1.00
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


def cells(value, clipped=None, limits=None):
    """A box for each output, in it a number for each token, or one if they are equal. clipped: what
    to ring; outside limits it is bold. -> HTML"""
    rows = in_batch(value)
    if rows is None:
        return f"<span>{number_text(float(value), [float(value)])}</span>"
    numbers = [x for of_row in rows for x in of_row]
    is_one = all(max(of_row) - min(of_row) < 1e-6 for of_row in rows if of_row)
    boxes = ""
    for i, of_row in enumerate(rows, start=1):
        shown = of_row[:1] if is_one else of_row
        boxes += f'<div class="o{i}{" whole" * is_one}">'
        for t, x in enumerate(shown, start=1):
            kinds = "" if is_one else f"t{i}{t}"
            kinds += " hit" * bool(clipped and clipped[i - 1][t - 1])
            kinds += " out" * bool(limits and not limits[0] <= x <= limits[1])
            boxes += f'<i class="{kinds}">{number_text(x, numbers)}</i>'
        boxes += "</div>"
    return boxes


def is_shown(name, value):
    """Whether a reader wants to see a value: no counts, no masks, nothing that is not computed."""
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        is_given = any(value.shape == known.shape and torch.equal(value, known)
                       for known in (example.MASK, example.ENTROPY))
        is_number = value.dtype.is_floating_point or name.startswith("->")
        return in_batch(value) is not None and is_number and not is_given and value.any()
    return isinstance(value, (float, torch.Tensor)) and not float(value).is_integer()


class Values:
    """The rows of numbers below the lines of a part of the page, each number once."""

    def __init__(self, lesson):
        self.lesson = lesson
        self.shown = set()                  # flags, and numbers as they stand there
        self.flags = ""                     # those of the last row
        self.clipped = lesson.clipped()

    def below(self, function, line):
        """What a line assigned, or, below the head of the function, its arguments. -> HTML"""
        note = self.lesson.notes.get(line)
        rows = ""
        for name, value in note.values.items() if note else ():
            is_read = line > function.head or name in self.lesson.names.get(function.name, [name])
            if is_read and is_shown(name, value):
                row = self.row(function, name, value, note.flags)
                numbers = note.flags, row.partition("</b>")[2]
                rows += row if numbers not in self.shown else ""
                self.shown.add(numbers)
        if not rows:
            return ""
        is_new = note.flags not in ("", self.flags)
        self.flags = note.flags
        return f"<div class=with>with {html.escape(note.flags)}</div>" * is_new + rows

    def row(self, function, name, value, flags="", label=""):
        """A line of values with its label, by default its name. -> HTML"""
        is_marked = self.clipped and not flags and (
            name in MARKED or name.startswith(("∂L", "->")))
        is_marked = is_marked and function.name in ("policy_loss", "backward")
        limits = self.lesson.limits if is_marked and name == "ratio" else None
        numbers = cells(value, self.clipped if is_marked else None, limits)
        kind = " one" * (in_batch(value) is None) + " flagged" * bool(flags)
        return f'<div class="v{kind}"><b>{label or label_of(name)}</b>{numbers}</div>'


# ---- code ------------------------------------------------------------------------------------

@functools.cache
def highlight(lesson, base):
    """The lines of a script in colours. Functions that it calls, and equations that comments and
    docstrings name, are links; to another page, base, if that is not empty. -> list of HTML"""
    names = "|".join(name for section in lesson.sections.values() for name in section.names)

    def coloured(match):
        kind = match.lastgroup
        text = match[0]
        if kind in ("com", "str"):
            text = re.sub(r"(?:eq\. )?\((\d\d?)\)",
                          lambda found: paper.link(found[1], found[0], lesson.equations), text)
        return re.sub(r"^( *)(.+)$", rf"\1<span class={kind}>\2</span>", text, flags=re.M)

    text = PARTS.sub(coloured, html.escape(lesson.source, quote=False))
    text = re.sub(rf"\b(?<!def )({names})(?=\()", r'<a class=to href="#\1">\1</a>', text)
    return text.replace('href="#', f'href="{base}#').split("\n")


def code_line(lesson, line, base="", kind="", beside=""):
    """A line of code, and words beside it. In narrow windows spaces inside it vanish, and those
    before it shrink: they are in <s>. -> HTML"""
    text = highlight(lesson, base)[line - 1]
    bare = text.lstrip(" ")
    indent = len(text) - len(bare)
    spaces = f"<s class=in>{' ' * indent}</s>" if indent else ""
    text = spaces + re.sub("( {2,})", r"<s>\1</s>", bare)
    kinds = ["l", *(f"e{number}" for number, at in lesson.where.items() if at == line), kind]
    number = f'<a href="{base}#L{line}" tabindex=-1>{line}</a>' if bare else "<a></a>"
    anchor = "" if base else f" id=L{line}"
    return (f'<div class="{" ".join(kinds).strip()}"{anchor} style=--i:{indent}>{number}'
            f"<code>{text}</code>{beside}</div>")


def code(lesson, name, values=None, base="", changed=(), beside=None, is_folded=False):
    """The lines of a function or a class with its values. What a first reading can do without is
    folded. changed: lines to mark; beside: line -> words; is_folded: whether functions that only
    variants or the log call are. -> HTML"""
    function = lesson.functions.get(name)
    parts = ""
    for kind, group in folds(lesson, name):
        body = ""
        for line in group:
            mark = "new" if line in changed else ""
            body += code_line(lesson, line, base, mark, (beside or {}).get(line, ""))
            body += values.below(function, line) if function and values else ""
        parts += fold(lesson, kind, group, body) if kind else body
    if is_folded and name in lesson.hidden:
        parts = fold(lesson, "log", span(function.node), parts, f": {name},")
    return f"<div class=fn>{parts}</div>"


def folds(lesson, name):
    """Lines that are shown or folded together. -> list of pairs: kind, lines"""
    groups = []
    for line in span(lesson.by_name[name]):
        kind = lesson.kinds.get(line, "")
        if groups and bool(groups[-1][0]) == bool(kind):
            groups[-1][1].append(line)
            groups[-1][0] = max(groups[-1][0], kind)            # variant is above log
        else:
            groups.append([kind, [line]])
    return groups


def fold(lesson, kind, group, body, why=""):
    """Lines that a click on their label shows, or the switch. -> HTML"""
    count = len([line for line in group if lesson.lines[line - 1].strip()])
    why += reasons(lesson, group) or WHY[kind]
    return (f'<div class="fold {kind}"><label><input type=checkbox>⋯ {count} '
            f"line{'s' if count > 1 else ''}{why}</label><div>{body}</div></div>")


def reasons(lesson, group):
    """The flags with which lines run, each name once. -> HTML"""
    values = {}
    for line in group:
        all_flags = lesson.flags.get(line, ())
        for flags in all_flags:
            if any(other != flags and other in flags for other in all_flags):
                continue                                # fewer of them do as well
            name, value = re.search(r"--(\w+)(?: ([^-\s]\S*))?", flags).groups()
            values.setdefault(name, {})[value or ""] = True     # each once, in their order
    said = [f"--{name} {', '.join(of)}".rstrip() for name, of in values.items()]
    return ": " * bool(said) + " ".join(f"<code>{flag}</code>" for flag in said)
