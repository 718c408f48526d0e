"""The pages as HTML: a lesson, the difference of two lessons, the course. Each is one file, without
scripts, fonts or pictures."""
import difflib
import functools
import html
import io
import keyword
import re
import tokenize
from pathlib import Path

import torch

from tools import sync
from tools.read import example, paper
from tools.read.lesson import in_batch
from tools.read.watch import Value

STYLE = Path(__file__).with_name("read.css")


# ---- a document ------------------------------------------------------------------------------

def document(title, body, numbers=()):
    """A whole page. `numbers` are those of equations, which light up together with their lines."""
    rules = []
    for number in sorted(numbers, key=int):
        pointed_at = f".e{number}:is(:hover,:focus-within,:target)"
        rules.append(f"body:has({pointed_at}) :is(.eq,.l).e{number}{{background:var(--mark)}}")
    style = re.sub(r"/\*.*?\*/|\n\s*", "", STYLE.read_text(), flags=re.S)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{style}{"".join(rules)}</style>
{body}
</html>
"""


def header(links, here, has_numbers=True):
    """The line at the top. links: names -> addresses."""
    parts = []
    for name, address in links.items():
        place = ' class="here" aria-current="page"' if name == here else ""
        parts.append(f'<a href="{address}"{place}>{html.escape(name)}</a>')
    switch = '<label><input type="checkbox" id="numbers" checked> numbers</label>'
    return f'<header><nav>{"".join(parts)}</nav>{switch if has_numbers else ""}</header>'


# ---- values ----------------------------------------------------------------------------------

def number_text(x, numbers):
    """A number as it stands beside others, all with as many digits."""
    if isinstance(x, bool):
        return "yes" if x else "no"
    if all(y == int(y) for y in numbers):
        text = str(int(x))
    else:
        distance = max(abs(y - round(y)) for y in numbers)
        digits = 4 if 5e-5 < distance < 5e-3 else 3         # 0.9997 is not 1.000
        text = f"{x:.{digits}f}"
    if float(text) == 0:
        text = text.removeprefix("-")
    return text.replace("-", "−")


def plain_text(value):
    """A value without rows: a number, a word, a short list."""
    if isinstance(value, torch.Tensor):
        numbers = value.flatten().tolist()[:12]
        return " ".join(number_text(x, numbers) for x in numbers)
    if isinstance(value, (int, float)):
        return number_text(value, [value])
    return str(value)


def boxes(value, clipped):
    """A box for each answer with a number for each token, always in the same place. -> HTML"""
    rows = in_batch(value)
    if rows is None:
        return f"<u>{html.escape(plain_text(value.tensor))}</u>"
    numbers = [x for row in rows for x in row or ()]
    found = []
    for index, row in enumerate(rows):
        cells = ""
        for t, x in enumerate(row or ()):
            is_token = len(row) > 1
            kind = ""
            if is_token and example.MASK[index, t] == 0:
                kind = " class=off"
            elif is_token and clipped is not None and clipped[index, t]:
                kind = " class=hit"
            cells += f"<i{kind}>{number_text(x, numbers)}</i>"
        found.append(f"<s>{cells}</s>")
    return "".join(found)


def strip(name, value, clipped=None):
    """A line of values with its name and its shape. -> HTML"""
    tensor = value.tensor
    has_shape = isinstance(tensor, torch.Tensor) and tensor.dim() > 0
    shape = f" <small>{tuple(tensor.shape)}</small>".replace(",)", ",)") if has_shape else ""
    label = html.escape(name.replace("-> ", "→ "))
    return f'<div class=v><b>{label}{shape}</b>{boxes(value, clipped)}</div>'


def strips(lesson, line):
    """The values of a line, if it has any. -> HTML"""
    note = lesson.notes.get(line)
    if note is None:
        return ""
    clipped = None if note.origin else lesson.clipped
    return "".join(strip(name, value, clipped) for name, value in note.values.items())


# ---- code ------------------------------------------------------------------------------------

@functools.cache
def highlight(source, equations):
    """The lines of a text as HTML: line -> str. What comments and docstrings say of an equation,
    one of the numbers `equations`, is a link to it."""
    rows = dict.fromkeys(range(1, source.count("\n") + 2), "")
    lines = source.split("\n")
    row, column = 1, 0
    previous = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if not token.string.strip():
            continue
        while row < token.start[0]:
            rows[row] += html.escape(lines[row - 1][column:], quote=False)
            row, column = row + 1, 0
        rows[row] += html.escape(lines[row - 1][column:token.start[1]], quote=False)
        kind = kind_of(token, previous)
        for offset, text in enumerate(token.string.split("\n")):
            rows[row + offset] += coloured(text, kind, equations)
        row, column = token.end
        previous = token.string
    return rows


def kind_of(token, previous):
    """The class of a token in the style sheet."""
    if token.type == tokenize.COMMENT:
        return "com"
    if token.type == tokenize.STRING:
        return "doc" if token.string.startswith('"""') else "str"
    if token.type == tokenize.NUMBER:
        return "num"
    if keyword.iskeyword(token.string):
        return "kw"
    return "def" if previous in ("def", "class") else ""


def coloured(text, kind, equations):
    """A piece of code in its colour. -> HTML"""
    escaped = html.escape(text, quote=False)
    if kind in ("com", "doc"):
        escaped = re.sub(r"(?:eq\. )?\((\d\d?)\)", lambda m: reference(m, equations), escaped)
    return f"<span class={kind}>{escaped}</span>" if kind and text else escaped


def reference(match, equations):
    """A link to an equation, if there is one with that number."""
    number = match[1]
    if number not in equations:
        return match[0]
    return f'<a class="ref e{number}" href="#eq{number}">{match[0]}</a>'


def code_line(lesson, line, prefix="", flag=""):
    """A line of code. Where two lessons share a page, `prefix` tells their equations apart, and
    lines are no anchors; `flag` says with what flag the line runs."""
    classes = ["l"] + [f"e{number}" for number in lesson.numbers_of(line)]
    if line in lesson.idle:
        classes.append("idle")
    text = highlight(lesson.source, tuple(lesson.equations))[line]
    if prefix:
        number = f"<a>{line}</a>"
        anchor = ""
    else:
        number = f"<a href=#L{line}>{line}</a>"
        anchor = f" id=L{line}"
    label = f"<div class=with>with {html.escape(flag)}</div>" if flag else ""
    return (f'{label}<div class="{" ".join(classes)}"{anchor}>{number}'
            f"<code>{with_prefix(text, prefix)}</code></div>")


def with_prefix(text, prefix):
    """HTML whose links to equations lead to those with a prefix."""
    return text.replace('href="#eq', f'href="#{prefix}eq')


def with_values(lesson, lines, prefix):
    """Lines, each with its values, and above them the flag, where another one than before lets
    them run. -> HTML"""
    parts = []
    origin = ""
    for line in lines:
        note = lesson.notes.get(line)
        flag = note.origin if note and note.origin != origin else ""
        if note:
            origin = note.origin
        parts.append(code_line(lesson, line, prefix, flag) + strips(lesson, line))
    return "".join(parts)


def code(lesson):
    """All sections of a lesson, with the values. -> HTML"""
    parts = []
    for title, first, last in lesson.sections:
        parts.append(f"<h2>{html.escape(title)}</h2>")
        parts.append(with_values(lesson, range(first, last + 1), ""))
    return "\n".join(parts)


# ---- equations -------------------------------------------------------------------------------

def typeset(text):
    """An equation: its left side, its right side, and remarks behind it. -> HTML"""
    left, equals, right = text.partition("=")
    if not equals:
        left, right = "", text
    formula, *remarks = re.split(r"\s{3,}", right.strip())
    parts = [f'<div class="lhs">{paper.display(left) if left.strip() else ""}</div>',
             f"<div>{paper.display(equals + ' ' + formula)}"]
    for remark in remarks:
        words = paper.prose(remark) if "--" in remark else paper.math(remark)
        parts.append(f'<div class="remark">{words}</div>')
    return "".join(parts) + "</div>"


def equation(lesson, block, prefix, kinds):
    """An equation with its number, the lines that compute it, and the value that it takes."""
    number = block.number
    page = f"{lesson.name}.html" if prefix else ""      # which has all lines, as two lessons do not
    (line,) = lesson.where[number]
    address = f"{page}#L{line}"
    side = f'<a href="{address}">({number})<small>line {line}</small></a>'
    return (f'<div class="{kinds} e{number}" id="{prefix}eq{number}">{typeset(block.text)}{side}'
            f"{last_strip(lesson, line)}</div>")


def last_strip(lesson, line):
    """The last value of a line: that of the equation with which it is tagged."""
    while line not in lesson.notes and line < len(lesson.lines):
        line += 1                                       # a statement of several lines
    note = lesson.notes[line]
    name, value = [*note.values.items()][-1]
    flag = f"<div class=with>with {html.escape(note.origin)}</div>" if note.origin else ""
    return strip(name, value, None if note.origin else lesson.clipped) + flag


def docstring(lesson, prefix="", other=None):
    """The docstring, typeset; blocks that the lesson `other` has not are marked. -> HTML"""
    known = {block.text for block in other.blocks} if other else None
    parts = []
    for block in lesson.blocks:
        is_new = known is not None and block.text not in known
        new = " new" if is_new else ""
        if block.kind == "title":
            parts.append(f"<h1>{paper.prose(block.text)}</h1>")
        elif block.kind == "equation":
            parts.append(equation(lesson, block, prefix, "eq" + new))
        elif block.kind == "formula":
            parts.append(f'<div class="eq{new}">{typeset(block.text)}</div>')
        elif block.kind == "table":
            flag, words = re.split(r"\s{2,}", block.text, maxsplit=1)
            parts.append(f'<p class="row{new}"><code>{flag}</code> '
                         f"{paper.prose(words, lesson.equations)}</p>")
        elif block.kind == "command":
            command, *remark = re.split(r"\s{3,}", block.text)
            words = "".join(f" <small>{html.escape(words)}</small>" for words in remark)
            parts.append(f"<pre>{html.escape(command)}{words}</pre>")
        else:
            text = paper.prose(block.text, lesson.equations)
            parts.append(f'<p class="prose{new}">{text}</p>')
    return with_prefix("\n".join(parts), prefix)


# ---- a lesson --------------------------------------------------------------------------------

EXPLAINED = {
    "dpo": "The log-probs are given; the rewards make two pairs, o<sub>1</sub> chosen over "
           "o<sub>3</sub> and o<sub>2</sub> over o<sub>4</sub>. What belongs to a pair stands in "
           "the box of its chosen answer.",
    "reinforce": "What a network would compute is given. Without a baseline, which is the default, "
                 "only the right answer has a gradient, and the loss is made of its tokens alone."}
GIVEN = ("What a network would compute is given: <code>old_logps</code> when the answers were "
         "sampled, <code>logps</code> after one optimizer step on them.")
CLIP_WORDS = ' <i class="hit">Marked</i>: tokens at which the clip stops the gradient.'


def heads(lesson):
    """The names of the four answers, above their boxes. -> HTML"""
    names = ""
    for number, right in enumerate((example.INPUTS[lesson.name]["rewards"] == 1)[0], start=1):
        names += f"<s>o<sub>{number}</sub>{' ✓' if right else ''}</s>"
    return f'<div class="v head"><b></b>{names}</div>'


def example_box(lesson):
    """What is given in the example, and how to read the values. -> HTML"""
    clip_words = CLIP_WORDS if lesson.clipped is not None else ""
    rows = [heads(lesson)]
    for name, tensor in example.INPUTS[lesson.name].items():
        rows.append(strip(name, Value(tensor, None)))
    return f"""<aside><p><b>One question, four answers.</b> {EXPLAINED.get(lesson.name, GIVEN)}
The functions below were called on these numbers, as <code>main</code> calls them. Under each
assignment stands the value that it took: a box for each answer, in it a number for each token,
always in the same place.{clip_words} <i class="off">Pale</i>: behind the end of an answer. Pale
code does not run by default; its values are from a run with the flag above it.</p>
{"".join(rows)}</aside>"""


def lesson_page(lesson, links):
    """The page of a script."""
    body = f"""{header(links, lesson.name)}
<main><article>{docstring(lesson)}</article>
<section>{example_box(lesson)}
{code(lesson)}
</section></main>"""
    return document(f"{lesson.name}.py, to read", body, lesson.equations)


# ---- two lessons -----------------------------------------------------------------------------

def pair(left, right, kind):
    """Two columns. -> HTML"""
    return f'<div class="pair {kind}"><div>{left}</div><div>{right}</div></div>'


def without_tags(text):
    """HTML as it reads. -> str"""
    return re.sub("<[^>]*>", " ", text)


def other_numbers(one, two, lines):
    """Equal lines on which the two lessons have other values, each pair of values once. -> HTML"""
    parts = []
    seen = []
    for left, right in lines:
        values = [without_tags(strips(one, left)), without_tags(strips(two, right))]
        is_new = all(values) and values[0] != values[1] and values not in seen
        if is_new:
            seen.append(values)
            parts.append(pair(with_values(one, [left], "a"), with_values(two, [right], "b"),
                              "same"))
    return "".join(parts)


def compare_piece(one, two, name, left, right):
    """A function, or a class, that both lessons have: where its lines differ, in two columns, and
    of the others those with other numbers. -> HTML"""
    parts = []
    texts = [[lesson.lines[line - 1] for line in lines]
             for lesson, lines in ((one, left), (two, right))]
    for kind, i, j, m, n in difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes():
        if kind == "equal":
            count = "1 equal line" if j - i == 1 else f"{j - i} equal lines"
            parts.append(f"<p class=equal><code>{html.escape(name)}</code>: {count}</p>")
            parts.append(other_numbers(one, two, zip(left[i:j], right[m:n])))
        else:
            parts.append(pair(with_values(one, left[i:j], "a"), with_values(two, right[m:n], "b"),
                              "other"))
    return "\n".join(parts)


def compare_code(one, two):
    """All that two lessons define, one function after the other. -> HTML"""
    first, second = ({name: range(piece.first + 1, piece.end + 1)
                      for name, piece in sync.pieces(sync.split(lesson.source)[0]).items()}
                     for lesson in (one, two))
    parts = []
    names = [list(first), list(second)]
    for kind, i, j, m, n in difflib.SequenceMatcher(None, *names, autojunk=False).get_opcodes():
        if kind == "equal":
            parts += [compare_piece(one, two, name, first[name], second[name])
                      for name in names[0][i:j]]
        else:
            alone = [pair(with_values(one, first[name], "a"), "", "other")
                     for name in names[0][i:j]]
            alone += [pair("", with_values(two, second[name], "b"), "other")
                      for name in names[1][m:n]]
            parts += alone
    return "\n".join(parts)


def difference_page(one, two, links):
    """What the second of two scripts changes: the equations, then the code."""
    num_changed = len(sync.difference(one.source, two.source))
    clip_words = CLIP_WORDS if one.clipped is not None or two.clipped is not None else ""
    body = f"""{header(links, f"{one.name} | {two.name}")}
<main class="two"><article>{docstring(one, "a", two)}</article>
<article>{docstring(two, "b", one)}</article>
<section><h2>{num_changed} lines of code differ</h2>
<p class="how"><code>make diff A={one.name} B={two.name}</code> prints them. Coloured lines are in
one of the two only. Below equal lines stand those of them on which the numbers differ.
{clip_words}</p>
{pair(heads(one), heads(two), "names")}
{compare_code(one, two)}
</section></main>"""
    return document(f"{one.name} and {two.name}", body, one.equations | two.equations)
