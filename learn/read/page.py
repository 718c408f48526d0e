"""Make the page of a script, a single HTML file: the text, the equations, the code with its
numbers, and the drawings. Folded parts open without JavaScript."""
import ast
import html
import re
import string
from pathlib import Path

import torch

from learn import look
from learn.read import code, example, figures, paper, words
from learn.read.lesson import in_batch, span

STYLE = Path(__file__).with_name("read.css")
INLINE = re.compile(rf"""
    \[(?P<text>[^]]+)\]\((?P<link>[^)]+)\)
  | `(?P<code>[^`]+)` | \$(?P<math>[^$]+)\$ | (?P<number>\{{[^{{}}]+\}})
  | (?P<equation>\(\d\d?\))
  | (?P<arxiv>\b\d{{4}}\.\d{{5}}\b)
  | (?P<flag>(?<!\S)--\w+)
  | (?<![\w.-])(?P<symbol>(?:(?:[A-Za-z]|KL|LV|{"|".join(paper.GREEK)})_(?:&lt;)?\w+
        | (?:{"|".join(paper.GREEK)})(?:\^[a-z])?)\b)""", re.VERBOSE)


# ---- text ------------------------------------------------------------------------------------

def prose(text, lesson, has_links=True):
    """Convert a text in the format of words.py, with links. -> HTML"""
    known = {f"({number})" for number in lesson.equations} if has_links else ()

    def inline(match):
        kind = match.lastgroup
        part = match[kind]
        if kind in ("math", "symbol"):
            return paper.math(html.unescape(part))
        if kind == "number":
            return look_up(html.unescape(part), lesson)
        if kind == "link":
            return f'<a href="{part}">{match["text"]}</a>'
        if kind == "equation":
            return f'<a href="#eq{part[1:-1]}">{part}</a>' if part in known else part
        if kind == "arxiv":
            return f'<a href="https://arxiv.org/abs/{part}">{part}</a>'
        text = re.sub(r"--\w+", r"<span class=w>\g<0></span>", part.replace(" − ", " - "))
        return f"<code>{text}</code>"

    return INLINE.sub(inline, html.escape(text, quote=False).replace(" - ", " − "))


def look_up(reference, lesson):
    """The number that a reference names, with a link to the line that computes it. -> HTML"""
    match = words.REFERENCE.fullmatch(reference)
    value, line = lesson.value(match["function"], match["name"], match["flags"] or "")
    rows = in_batch(value) or [[float(value)]]
    i, t = (int(match[name] or 1) for name in ("row", "token"))
    x = rows[i - 1][t - 1]
    text = code.number_text(x, [x for numbers in rows for x in numbers])
    return f'<a class=n href="#L{line}">{text}</a>'


def explain(section, lesson):
    """The paragraphs of a section, and its questions with answers that a click opens. -> HTML"""
    return "".join([f"<p>{prose(text, lesson)}</p>" for text in section.paragraphs] + [
        f"<details class=ask><summary>{prose(question, lesson)}</summary>"
        f"<p>{prose(answer, lesson)}</p></details>" for question, answer in section.questions])


# ---- equations -------------------------------------------------------------------------------

def equations(lesson, names):
    """The equations that some functions compute, with links to their lines, and the remarks after
    them. Equations of variants, and all but the first equation of a line, are hidden. -> HTML"""
    parts = ""
    for number, text in lesson.equations.items():
        line = lesson.where[number]
        if any(line in span(lesson.by_name[name]) for name in names):
            formula, *remarks = re.split(r"(?<!=)\s{3,}", re.sub(r"\s*=\s+", " = ", text, count=1))
            whole = paper.math(formula, ' displaystyle="true"')
            whole += "".join(f"<div class=remark>{paper.math(remark)}</div>" for remark in remarks)
            is_extra = line in lesson.folded or lesson.first[line] != number
            kinds = "eq variant" if is_extra else "eq"
            if len(formula) > 50:
                kinds += " long"
            parts += (f'<div class="{kinds}" id=eq{number}><div>{whole}</div>'
                      f'<a href="#L{line}">({number})</a></div>')
    return parts


# ---- parts of the page -----------------------------------------------------------------------

def outputs(lesson):
    """The four outputs, for the bar that stays at the top. -> HTML"""
    boxes = ""
    rewards = example.REWARDS[lesson.name][0].tolist()
    for i, (tokens, reward) in enumerate(zip(example.ANSWERS, rewards), start=1):
        cells = "".join(f"<i>{token}</i>" for token in tokens)
        shown = code.number_text(reward, rewards)
        if reward == 1:
            shown += " ✓"
        boxes += (f"<div class=o{i}><span><em>o</em><sub>{i}</sub><small> reward</small> "
                  f"{shown}</span>{cells}</div>")
    return boxes


def picture(lesson, place):
    """The drawing of a script or a function with its caption, if there is one that the page does
    not have at its top. -> HTML"""
    name = figures.PLACES.get(place)
    is_at_top = place != lesson.name and name == figures.PLACES[lesson.name]
    drawn = None if is_at_top or not name else getattr(figures, name)(lesson)
    if drawn is None:
        return ""
    section = figures.SECTIONS[name]
    title, width, height = section.head
    svg = drawn.svg(width, height, title, f' style="max-width:{width}px"')
    caption = prose(section.paragraphs[0], lesson)
    return f"<figure class={name}><div>{svg}</div><figcaption>{caption}</figcaption></figure>"


def numbers(lesson):
    """The inputs, and the equations of the paper with their values. -> HTML"""
    values = code.Values(lesson)
    rows = "<h3>made up</h3>"
    for symbol, function, name in lesson.sections["numbers"].rows:
        rows += values.row(function, name, lesson.value(function, name)[0], paper.math(symbol))
    rows += "<h3>computed</h3>"
    for number, text in lesson.equations.items():
        line = lesson.where[number]
        by = [name for name in lesson.called if line in span(lesson.by_name[name])]
        if by and line not in lesson.folded and lesson.first[line] == number:
            place = f' <a href="#eq{number}">({number})</a>'
            for name, value in lesson.notes[lesson.statements[line].end_lineno].items():
                symbol = paper.math(text.partition("=")[0])
                symbol = code.label_of(name) if name.startswith("∂") else symbol
                if name == "h_chosen":                          # the boxes show h of each output
                    value = torch.cat([value, lesson.value("dpo_loss", "h_rejected")[0]])
                if code.is_shown(name, value):
                    rows += values.row(by[0], name, value, symbol + place)
                if name == "A" and "whiten" in lesson.called:   # the A_t of L
                    [(whitened, value)] = lesson.notes[lesson.by_name["whiten"].end_lineno].items()
                    rows += values.row("whiten", whitened, value, symbol + ", whitened")
    return rows


def about_numbers(lesson):
    """What the numbers mean. -> HTML"""
    command = f"python {lesson.name}.py {example.PAPER.get(lesson.name, '')}".strip()
    general, of_clip, of_pairs, _ = figures.SECTIONS["numbers"].paragraphs
    text = general.replace("COMMAND", command)
    if lesson.clipped():
        low, high = map(code.plain, lesson.limits)
        text += " " + of_clip.replace("LOW", low).replace("HIGH", high)
    if lesson.name == "dpo":
        chosen, rejected = lesson.script.preferences(example.GRADED)
        pairs = [f"o_{i + 1} over o_{j + 1}" for i, j in zip(chosen.tolist(), rejected.tolist())]
        beta = code.plain(lesson.cfg.beta)
        text += " " + of_pairs.replace("PAIRS", " and ".join(pairs)).replace("BETA", beta)
    return prose(text, lesson)


def part(lesson, section):
    """The section of some functions: explanation, equations, code, and drawing. -> HTML"""
    title, where = section.head
    names = sorted(section.names, key=lambda name: lesson.by_name[name].lineno)
    is_hidden = all(name in lesson.hidden for name in names)
    values = code.Values(lesson)
    shown = "".join(code.code(lesson, name, values, is_folded=not is_hidden) for name in names)
    drawn = "".join(picture(lesson, name) for name in names)
    anchors = "".join(f"<a id={name}></a>" for name in section.names[1:])
    kinds = "part variant" if is_hidden else "part"
    return f"""<section class="{kinds}" id={section.names[0]}>
<div class=why>{anchors}<h2><code>{", ".join(section.names)}</code>{prose(title, lesson)}</h2>
<p class=where>{prose(where, lesson, False)}</p>
{explain(section, lesson)}</div>
<div class=code>{equations(lesson, names)}{shown}{drawn}</div></section>"""


def lesson_page(lesson, names):
    """Fill page.html for a script. names: of all scripts that have a page. -> HTML"""
    of = lesson.sections
    first, main = of[lesson.name], of["algorithm"]
    subject, source = first.head
    links = ""
    for name in names:
        current = " aria-current=page" if name == lesson.name else ""
        links += f'<a href="{name}.html"{current}>{name}</a>'
    table = "".join(f"<tr><td>{prose(theirs, lesson, False)}</td><td>{prose(ours, lesson)}</td>"
                    f"<td>{prose(difference, lesson)}</td></tr>"
                    for theirs, ours, difference in of["map"].rows)
    sign = ""
    if "<code>sign</code>" in table:
        sign = f"<p>{figures.SECTIONS['numbers'].paragraphs[-1]}</p>"
    text = re.search(r"^Departures from[^:]*: (.*?)\.\n(?:\n|Usage)", lesson.docstring,
                     re.S | re.M)
    departures = re.split(r"; |\. (?=[A-Z])", " ".join(text[1].split()))
    steps = {lesson.line_of(word): f"<p><b>{number}</b>{prose(text, lesson, False)}</p>"
             for word, number, text in main.rows}
    config = "".join(code.code_line(lesson, line) for node in lesson.body
                     if isinstance(node, ast.Assign) or getattr(node, "name", "") == "Config"
                     for line in span(node))
    body = string.Template(STYLE.with_name("page.html").read_text(encoding="utf-8")).substitute(
        name=lesson.name, title=lesson.name.upper(), links=links, subject=subject,
        source=prose(source, lesson), lead=explain(first, lesson),
        picture=picture(lesson, lesson.name),
        question=example.QUESTIONS[lesson.name], outputs=outputs(lesson), numbers=numbers(lesson),
        about_numbers=about_numbers(lesson), map=table, sign=sign,
        departures="".join(f"<li>{prose(part, lesson)}</li>" for part in departures),
        parts="".join(part(lesson, of[name]) for name in of if name in lesson.by_name),
        of_algorithm=main.head[0], algorithm=code.code(lesson, "main", side_text=steps),
        flags=explain(of["flags"], lesson), config=config, next=explain(of["next"], lesson))
    description = (f"{subject}: its equations, its code in one file, and below each line the "
                   "numbers that it computes.")
    return look.document(f"{lesson.name}.py, explained", description, body.rstrip("\n"), "../../",
                         "Read", [STYLE], lesson.name)
