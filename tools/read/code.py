"""Lines of code as HTML: in colours, folded where a first reading can do without them, and below
each line the numbers that it computes."""
import functools
import html
import keyword
import re

import torch

from tools.read import example, paper
from tools.read.lesson import in_batch
from tools.read.watch import first_line

MARKED = ("ratio", "clipped_ratio", "token_loss")       # rows in which clipped tokens are ringed
FOLDED = {"": "", "idle": " without effect here", "variant": " not used here",
          "log": " for the log"}                        # kinds of lines, the strongest last
PARTS = re.compile(rf'''(?P<str>"""[\s\S]*?"""|"(?:\\.|[^"\\\n])*")|(?P<com>\#.*)
    |(?P<kw>\b(?:{"|".join(keyword.kwlist)})\b)|(?P<def>(?<=def\ )\w+|(?<=class\ )\w+)''', re.X)


# ---- numbers ---------------------------------------------------------------------------------

def number_text(x, numbers):
    """A number as it stands beside others: two decimals, more where these say nothing."""
    if isinstance(x, bool):
        return "yes" if x else ""
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


def row(label, value, clipped=None, limits=None):
    """A line of values with its label, which is HTML: a box for each output, in it a number for
    each token, or one if they are equal. clipped: what to ring; outside limits it is bold."""
    rows = in_batch(value)
    if rows is None:
        x = float(value.tensor)
        return f'<div class="v one"><b>{label}</b><span>{number_text(x, [x])}</span></div>'
    numbers = [x for of_row in rows for x in of_row]
    ranges = [max(of_row) - min(of_row) for of_row in rows if of_row]
    is_one = max(ranges) < 1e-6
    boxes = []
    for i, of_row in enumerate(rows):
        cells = ""
        for t, x in enumerate(of_row[:1] if is_one else of_row):
            kinds = [f"t{i + 1}{t + 1}"] if len(of_row) > 1 and not is_one else []
            kinds += ["hit"] if clipped and clipped[i][t] else []
            kinds += ["out"] if limits and not limits[0] <= x <= limits[1] else []
            attribute = f' class="{" ".join(kinds)}"' if kinds else ""
            cells += f"<i{attribute}>{number_text(x, numbers)}</i>"
        boxes.append(f'<div class="o{i + 1}{" whole" if is_one else ""}">{cells}</div>')
    return f'<div class="v"><b>{label}</b>{"".join(boxes)}</div>'


def is_shown(name, value):
    """Whether a reader wants to see a value: no counts, no masks, nothing that is not computed."""
    tensor = value.tensor
    if isinstance(tensor, torch.Tensor) and tensor.numel() > 1:
        is_given = any(tensor.shape == known.shape and torch.equal(tensor, known)
                       for known in (example.MASK, example.ENTROPY))
        is_number = tensor.dtype.is_floating_point or name.startswith("->")
        return in_batch(value) is not None and is_number and not is_given and tensor.any()
    is_number = isinstance(tensor, (float, torch.Tensor))
    return is_number and not float(tensor).is_integer()


class Values:
    """The rows of numbers below the lines of functions, each number once."""

    def __init__(self, lesson):
        self.lesson = lesson
        self.shown = []                     # function, name, flags, numbers
        self.flags = ()                     # the last function, with what flags its row was
        self.clipped = lesson.clipped()
        if self.clipped:
            self.limits = 1 - lesson.cfg.epsilon, 1 + lesson.cfg.epsilon_high

    def below(self, function, line):
        """What a line assigned, or, below the head of the function, its arguments. -> HTML"""
        if line == function.node.body[0].lineno - 1 and function.name in self.lesson.given:
            note = self.lesson.given[function.name]
            read = self.lesson.names_read(function)
            names = read - {name for _, name, *_ in self.shown}
            values = {name: value for name, value in note.values.items() if name in names}
        elif line in function.statements and line in self.lesson.notes:
            note = self.lesson.notes[line]
            values = note.values
        else:
            return ""
        rows = [self.row(function, name, value, note.flags) for name, value in values.items()
                if is_shown(name, value) and not self.is_repeated(function, name, value, note)]
        is_of_fold = note.flags and function.name not in self.lesson.hidden
        if rows and note.flags and self.flags != (function.name, note.flags):
            rows.insert(0, f"<div class=with>with {html.escape(note.flags)}</div>")
        if rows:
            self.flags = function.name, note.flags
        text = "".join(rows)
        return text.replace('class="v', 'class="v flagged') if is_of_fold else text

    def is_repeated(self, function, name, value, note):
        """Whether a function has shown the same numbers. -> bool"""
        rows = in_batch(value) or [[float(value.tensor)]]
        numbers = [[round(x, 4) for x in of_row] for of_row in rows]
        is_known = not name.startswith("∂") and any(
            (function.name, note.flags, numbers) == (by, flags, of)
            for by, _, flags, of in self.shown)
        self.shown.append((function.name, name, note.flags, numbers))
        return is_known

    def row(self, function, name, value, flags):
        is_marked = self.clipped and not flags and (name in MARKED or name.startswith("∂L"))
        is_marked = is_marked and function.name in ("policy_loss", "backward")
        limits = self.limits if is_marked and name == "ratio" else None
        return row(label_of(name), value, self.clipped if is_marked else None, limits)


# ---- code ------------------------------------------------------------------------------------

@functools.cache
def highlight(source, equations):
    """The lines of a text in colours. What comments and docstrings say of an equation, one of the
    numbers `equations`, is a link to it. -> list of HTML"""
    def coloured(match):
        kind = match.lastgroup
        text = match[0]
        if kind in ("com", "str"):
            text = re.sub(r"(?:eq\. )?\((\d\d?)\)",
                          lambda found: paper.link(found[1], found[0], equations), text)
        return re.sub(r"^( *)(.+)$", rf"\1<span class={kind}>\2</span>", text, flags=re.M)

    return PARTS.sub(coloured, html.escape(source, quote=False)).split("\n")


def code_line(lesson, line, prefix="", link="", kind=""):
    """A line of code, which may be a link to the section that explains it. In narrow windows spaces
    inside it vanish, and those before it shrink: they are in <s>. -> HTML"""
    source = lesson.lines[line - 1]
    text = highlight(lesson.source, tuple(lesson.equations))[line - 1]
    spaces = text[:len(text) - len(text.lstrip(" "))]
    text = re.sub(r"( {2,})", r"<s>\1</s>", text[len(spaces):])
    if prefix:
        text = text.replace('href="#eq', f'href="#{prefix}eq').replace("ref e", f"ref {prefix}e")
    if link:
        bare = re.sub("</?a[^>]*>", "", text)
        named = re.sub(rf"\b({link})\b", r"<u>\1</u>", bare, count=1)
        text = f'<a class=to href="#{link}">{named}</a>'
    classes = ["l", *(f"{prefix}e{number}" for number, at in lesson.where.items() if at == line)]
    style = f" style=--i:{len(spaces)}" if spaces else ""
    anchor = f"{prefix}L{line}"
    number = f"<a href=#{anchor} tabindex=-1>{line}</a>" if source.strip() else "<a></a>"
    return (f'<div class="{" ".join(classes + kind.split())}" id={anchor}{style}>{number}'
            f"<code><s class=in>{spaces}</s>{text}</code></div>")


def code(lesson, name, values, prefix="", changed=()):
    """The lines of a function or a class with its values. What a first reading can do without is
    folded. changed: lines to mark. -> HTML"""
    function = lesson.functions.get(name)
    parts = []
    for kind, group in folds(lesson, name):
        body = ""
        for line in group:
            body += code_line(lesson, line, prefix, kind="new" if line in changed else "")
            body += values.below(function, line) if function and values else ""
        parts.append(fold(lesson, kind, group, body) if kind else body)
    if lesson.hidden.get(name) == "log":
        parts = [fold(lesson, "log", span(lesson.by_name[name]), "".join(parts), f": {name}")]
    return f"<div class=fn>{''.join(parts)}</div>"


def folds(lesson, name):
    """Lines that are shown or folded together; folds that touch, but for blank lines, are one.
    -> list of pairs: kind, lines"""
    numbers = span(lesson.by_name[name])
    kinds = ["" if name in lesson.hidden else lesson.kinds.get(line, "") for line in numbers]
    for i in range(1, len(kinds) - 1):
        if not lesson.lines[numbers[i] - 1].strip() and kinds[i - 1] and kinds[i + 1]:
            kinds[i] = kinds[i + 1]
    groups = []
    for line, kind in zip(numbers, kinds):
        if groups and bool(groups[-1][0]) == bool(kind):
            groups[-1][1].append(line)
            groups[-1][0] = max(groups[-1][0], kind, key=list(FOLDED).index)
        else:
            groups.append([kind, [line]])
    return groups


def fold(lesson, kind, group, body, why=""):
    """Lines that a click on their label shows, or the switch. -> HTML"""
    count = len([line for line in group if lesson.lines[line - 1].strip()])
    flags = reasons(lesson, group)
    if flags and kind == "log":
        why += flags + ","
    why += flags if flags and kind != "log" else FOLDED[kind]
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


def span(node):
    """The lines of a function or a class. -> range"""
    return range(first_line(node), node.end_lineno + 1)
