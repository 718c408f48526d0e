"""The pages as HTML: a lesson, the difference of two lessons, the course. Each is one file, without
scripts, fonts or pictures."""
import difflib
import functools
import html
import io
import keyword
import math
import re
import tokenize
from pathlib import Path

import torch

from tools import sync
from tools.read import example, paper
from tools.read.lesson import in_batch
from tools.read.watch import Value

LONG = 72                   # characters of an equation that is set smaller, to fit in its column
STYLE = Path(__file__).with_name("read.css")


# ---- a document ------------------------------------------------------------------------------

def document(title, body, equations=()):
    """A whole page. Each of `equations`, names like e3, lights up together with its lines."""
    rules = []
    for name in equations:
        pointed_at = f".{name}:is(:hover,:focus-within,:target)"
        rules.append(f"body:has({pointed_at}) :is(.eq,.l).{name}{{background:var(--mark)}}")
    style = re.sub(r"/\*.*?\*/|\n\s*", "", STYLE.read_text(encoding="utf-8"), flags=re.S)
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
    if not math.isfinite(x):
        return str(x)
    numbers = [y for y in numbers if math.isfinite(y)]
    if all(y == round(y) for y in numbers):
        text = str(int(x))
    else:
        is_nearly_whole = any(round(y) != 0 and 5e-5 < abs(y - round(y)) < 2e-3 for y in numbers)
        text = f"{x:.{4 if is_nearly_whole else 3}f}"       # 0.9997 is not 1.000
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
        return f"<p>{html.escape(plain_text(value.tensor))}</p>"
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
        found.append(f"<div>{cells}</div>")
    return "".join(found)


def strip(name, value, clipped=None):
    """A line of values with its name and its shape. -> HTML"""
    tensor = value.tensor
    has_shape = isinstance(tensor, torch.Tensor) and tensor.dim() > 0
    is_short = len(name) < 16                           # with its shape it fits in its column
    shape = f" <small>{tuple(tensor.shape)}</small>" if has_shape and is_short else ""
    label = html.escape(name.replace("-> ", "→ "))
    return f'<div class=v><b>{label}{shape}</b>{boxes(value, clipped)}</div>'


def strips(lesson, line):
    """The values of a line, if it has any. -> HTML"""
    note = lesson.notes.get(line)
    if note is None:
        return ""
    clipped = lesson.clipped_on(line)
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


def code_line(lesson, line, prefix):
    """A line of code. Where two lessons share a page, `prefix` tells their anchors apart."""
    classes = ["l"] + [f"{prefix}e{number}" for number in lesson.numbers_of(line)]
    if line in lesson.idle:
        classes.append("idle")
    text = highlight(lesson.source, tuple(lesson.equations))[line]
    anchor = f"{prefix}L{line}"
    return (f'<div class="{" ".join(classes)}" id={anchor}><a href=#{anchor}>{line}</a>'
            f"<code>{with_prefix(text, prefix)}</code></div>")


def with_prefix(text, prefix):
    """HTML whose references to equations are to those with a prefix."""
    text = text.replace('href="#eq', f'href="#{prefix}eq')
    return text.replace('class="ref e', f'class="ref {prefix}e')


def with_values(lesson, lines, prefix=""):
    """Lines, each with its values, and above them with what flag they run, where that is another
    one than before. -> HTML"""
    origins = {note.first: note.origin for line, note in lesson.notes.items() if line in lines}
    parts = []
    origin = ""
    for line in lines:
        if origins.get(line, origin) != origin:
            origin = origins[line]
            parts.append(f"<div class=with>{html.escape(origin)}</div>" if origin else "")
        parts.append(code_line(lesson, line, prefix) + strips(lesson, line))
    return "".join(parts)


def code(lesson):
    """All sections of a lesson, with the values. -> HTML"""
    parts = []
    for title, first, last in lesson.sections:
        parts.append(f"<h2>{html.escape(title)}</h2>")
        parts.append(with_values(lesson, range(first, last + 1)))
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
    """An equation with its number, the line that computes it, and the value that it takes."""
    number = block.number
    (line,) = lesson.where[number]
    link = f'href="#{prefix}L{line}"'
    note, values = values_of(lesson, line)
    origin = f"<div class=with>{html.escape(note.origin)}</div>" if note.origin else ""
    kinds += " long" if len(block.text) > LONG else ""
    return (f'<div class="{kinds} {prefix}e{number}" id="{prefix}eq{number}">{typeset(block.text)}'
            f'<a {link}>({number})</a>{values}<a class="at" {link}>line {line}</a>{origin}</div>')


def values_of(lesson, line):
    """The note of the statement with a tag on `line`, and its last value, that of the equation.
    -> Note, HTML"""
    for last, note in lesson.notes.items():
        if note.first <= line <= last:
            name, value = [*note.values.items()][-1]
            return note, strip(name, value, lesson.clipped_on(last))
    raise ValueError(f"{lesson.name}.py, line {line}: computes an equation, but no run of "
                     "tools/read/example.py gets there")


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

GIVEN = ("What a network would compute is given: <code>old_logps</code> are the log-probs of its "
         "tokens when the answers were sampled, <code>logps</code> those after one optimizer step, "
         "<code>ref_logps</code> those of the base.")
EXPLAINED = {
    "reinforce": " Without a baseline only the right answer has a gradient, and the loss is made "
                 "of its tokens alone: the others have empty boxes.",
    "dpo": " The rewards make two pairs, o<sub>1</sub> chosen over o<sub>3</sub> and o<sub>2</sub> "
           "over o<sub>4</sub>. What belongs to a pair stands in the box of its chosen answer."}
CLIP_WORDS = ' <i class="hit">Marked</i>: tokens at which the clip stops the gradient.'


def heads(lesson):
    """The names of the four answers, above their boxes. -> HTML"""
    names = ""
    rewards = example.INPUTS[lesson.name]["rewards"][0].tolist()
    for number, (reward, tokens) in enumerate(zip(rewards, example.ANSWERS), start=1):
        mark = " ✓" if reward == 1 else ""
        names += f"<div><i>o</i><sub>{number}</sub>: {''.join(tokens[:-1])}{mark}</div>"
    return f'<div class="v head"><b>{example.QUESTIONS[lesson.name]}</b>{names}</div>'


def example_box(*lessons):
    """What is given in the example, and how to read the values. -> HTML"""
    clip_words = CLIP_WORDS if any(lesson.clipped is not None for lesson in lessons) else ""
    words = GIVEN + "".join(EXPLAINED.get(lesson.name, "") for lesson in lessons)
    inputs = {}
    for lesson in lessons:
        inputs |= example.INPUTS[lesson.name]
    rows = [heads(lessons[0])] + [strip(name, Value(tensor, None))
                                  for name, tensor in inputs.items()]
    return f"""<aside><p><b>One question, four answers</b> of two or three tokens: their digits, and
an end. {words} The functions below were called on these numbers, as <code>main</code> calls them.
Under each assignment stands the value that it took: a box for each answer, in it a number for each
token, always in the same place.{clip_words} <i class="off">Pale numbers</i>: behind the end of an
answer. Pale code does not run by default; its values are from a run with the flag above it.
Functions without any values need a network or an optimizer.</p>
{"".join(rows)}</aside>"""


def lesson_page(lesson, links, questions):
    """The page of a script. links: names and addresses of all pages; questions: HTML."""
    body = f"""{header(links, lesson.name)}
<main><article>{docstring(lesson)}</article>
<section>{example_box(lesson)}
{code(lesson)}
{questions}
</section></main>"""
    names = [f"e{number}" for number in lesson.equations]
    return document(f"{lesson.name}.py, to read", body, names)


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


def difference_page(one, two, links, questions):
    """What the second of two scripts changes: the equations, then the code. links and questions as
    in lesson_page."""
    num_changed = len(sync.difference(one.source, two.source))
    body = f"""{header(links, f"{one.name} | {two.name}")}
<main class="two"><article>{docstring(one, "a", two)}</article>
<article>{docstring(two, "b", one)}</article>
<section>{example_box(one, two)}
<h2>{num_changed} lines of code differ</h2>
<p class="how"><code>make diff A={one.name} B={two.name}</code> prints them. Coloured lines are in
one of the two only. Below equal lines stand those of them on which the numbers differ.</p>
{pair(heads(one), heads(two), "names")}
{compare_code(one, two)}
{questions}
</section></main>"""
    lessons = {"a": one, "b": two}
    names = [f"{prefix}e{number}" for prefix, lesson in lessons.items()
             for number in lesson.equations]
    return document(f"{one.name} and {two.name}", with_pages(body, lessons), names)


def with_pages(body, lessons):
    """HTML whose links to lines that are not on it lead to the pages of the lessons, prefix ->
    Lesson."""
    shown = set(re.findall(r" id=(\w+)>", body))

    def address(link):
        anchor, prefix, line = link.groups()
        return link[0] if anchor in shown else f'href="{lessons[prefix].name}.html#L{line}"'

    return re.sub(r'href="#(([ab])L(\d+))"', address, body)
