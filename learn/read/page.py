"""The page of a script, one file: the words of its text file, its equations, its code with numbers,
and drawings made from these. What is folded opens without a script."""
import ast
import html
import re
from pathlib import Path

from learn.read import code, draw, example, figures, paper, words
from learn.read.lesson import in_batch, span

STYLE = Path(__file__).with_name("read.css")
# The address keeps whether variants are shown; without it, the switch works all the same.
SCRIPT = """<script>{const v=document.getElementById("variants"), l=location;
v.checked=l.search=="?variants";
v.form.onchange=()=>history.replaceState(0,"",(v.checked?"?variants":l.pathname)+l.hash)}
</script>"""
# An equation lights up with the line that computes it, by mouse or keyboard.
LIGHT = "body:has(.e#:is(:hover,:focus-within)) :is(.eq,.l).e#{background:var(--mark)}"
INLINE = re.compile(rf"""
    \[(?P<words>[^]]+)\]\((?P<link>[^)]+)\)
  | `(?P<code>[^`]+)` | \$(?P<math>[^$]+)\$ | (?P<number>\{{[^{{}}]+\}})
  | (?P<equation>\(\d\d?\))
  | (?P<arxiv>\b\d{{4}}\.\d{{5}}\b)
  | (?P<flag>(?<!\S)--\w+)
  | (?<![\w.-])(?P<symbol>(?:(?:[A-Za-z]|KL|LV|{"|".join(paper.GREEK)})_(?:&lt;)?\w+
        | (?:{"|".join(paper.GREEK)})(?:\^[a-z])?)\b)""", re.VERBOSE)


# ---- a document ------------------------------------------------------------------------------

def document(title, description, body, name=""):
    """A whole page; name: of its script. -> HTML"""
    style = re.sub(r"/\*.*?\*/|\n\s*", "", STYLE.read_text(encoding="utf-8"), flags=re.S)
    style += "".join(LIGHT.replace("#", str(number)) for number in range(1, 12))
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<meta name="description" content="{html.escape(description)}">
<style>{style}</style>
<body class="{name}">
{body}
</body>
</html>
"""


def navigation(links, here):
    """The line at the top. links: names -> addresses. -> HTML"""
    parts = ""
    for name, address in links.items():
        place = " aria-current=page" if address == here else ""
        parts += f'<a href="{address}"{place}>{name}</a>'
    return f"<nav>{parts}</nav>"


# ---- words -----------------------------------------------------------------------------------

def prose(text, lessons, has_links=True):
    """Words as words.py describes them; numbers of equations, papers, and flags are found in them.
    lessons: name -> Lesson, at first that of the page. -> HTML"""
    known = next(iter(lessons.values())).equations if has_links else ()

    def inline(match):
        kind = match.lastgroup
        found = match[kind]
        if kind in ("math", "symbol"):
            return paper.math(html.unescape(found))
        if kind == "number":
            return look_up(html.unescape(found), lessons)
        if kind == "link":
            return f'<a href="{found}">{match["words"]}</a>'
        if kind == "equation":
            return paper.link(found[1:-1], found, known)
        if kind == "arxiv":
            return f'<a href="https://arxiv.org/abs/{found}">{found}</a>'
        return f"<code>{found}</code>"

    return INLINE.sub(inline, html.escape(text, quote=False).replace(" - ", " − "))


def look_up(reference, lessons):
    """The number that a reference names, with a link to the line below which it stands. -> HTML"""
    match = words.REFERENCE.fullmatch(reference)
    if match is None:
        raise ValueError(f"no reference to a number: {reference}")
    lesson = lessons[match["script"] or next(iter(lessons))]
    value, line = lesson.value(match["function"], match["name"], match["flags"])
    rows = in_batch(value) or [[float(value)]]
    i, t = (int(match[name] or 1) for name in ("row", "token"))
    x = rows[i - 1][t - 1]
    text = code.number_text(x, [x for of_row in rows for x in of_row])
    query = "?variants" if match["flags"] else ""
    return f'<a class=n href="{lesson.name}.html{query}#L{line}">{text}</a>'


def paragraphs(texts, lessons):
    """-> HTML"""
    return "".join(f"<p>{prose(text, lessons)}</p>" for text in texts)


def questions(pairs, lessons, has_links=True):
    """Questions, with answers that a click opens. -> HTML"""
    return "".join(f"<details class=ask><summary>{prose(asked, lessons, has_links)}</summary>"
                   f"<p>{prose(answer, lessons, has_links)}</p></details>"
                   for asked, answer in pairs)


# ---- equations -------------------------------------------------------------------------------

def equations(lesson, names, base=""):
    """The equations that functions compute, with links to their lines, and remarks behind them.
    Those of variants, and all but the first of a line, are hidden. -> HTML"""
    parts = ""
    for number, text in lesson.equations.items():
        line = lesson.where[number]
        if any(line in span(lesson.by_name[name]) for name in names):
            formula, *remarks = re.split(r"(?<!=)\s{3,}", re.sub(r"\s*=\s+", " = ", text, count=1))
            whole = paper.math(formula, ' displaystyle="true"')
            whole += "".join(f"<div class=remark>{paper.math(words)}</div>" for words in remarks)
            is_extra = line in lesson.folded or lesson.first[line] != number
            kinds = " variant" * is_extra + " long" * (len(formula) > 50)
            anchor = "" if base else f" id=eq{number}"
            parts += (f'<div class="eq e{number}{kinds}"{anchor}><div>{whole}</div>'
                      f'<a href="{base}#L{line}">({number})</a></div>')
    return parts


# ---- parts of the page -----------------------------------------------------------------------

def bar(names, lesson):
    """The four outputs, which stay at the top, and the switch. -> HTML"""
    boxes = ""
    rewards = example.REWARDS[lesson.name][0].tolist()
    for i, (tokens, reward) in enumerate(zip(example.ANSWERS, rewards), start=1):
        cells = "".join(f"<i>{token}</i>" for token in tokens)
        boxes += (f"<div class=o{i}><span><em>o</em><sub>{i}</sub><small> reward</small> "
                  f"{reward:g}{' ✓' * (reward == 1)}</span>{cells}</div>")
    return f"""<div class=bar><div><form class=tools><strong>{names}</strong>
<fieldset><label><input type=radio name=show checked>paper only</label><label><input type=radio
name=show id=variants>with variants</label></fieldset></form>{SCRIPT}
<div class=v><b>{example.QUESTIONS[lesson.name]}</b>{boxes}</div></div></div>"""


def hero(lesson, lessons):
    """What it does, the question with which it opens, drawings. -> HTML"""
    text = lesson.sections[lesson.name]
    title, source = text.head
    return f"""<header class=hero>
<div class=lead><h1>{lesson.name.upper()}</h1>
<p class=source>{title}, from {prose(source, lessons)}</p>
{paragraphs(text.paragraphs, lessons)}</div>
<div class=asked>{questions(text.questions, lessons)}</div>
<div class=pictures>{picture(lesson, lesson.name, lessons)}</div>
</header>"""


def picture(lesson, place, lessons):
    """The drawing of a place, if it has one, with its caption. -> HTML"""
    name, svgs = figures.drawing(lesson, place)
    if not svgs:
        return ""
    caption = prose(draw.SECTIONS[name].paragraphs[0], lessons)
    return f"<figure class={name}><div>{svgs}</div><figcaption>{caption}</figcaption></figure>"


def in_numbers(lesson):
    """The equations of the paper, each with its value, and what the numbers are. -> HTML"""
    rows = ""
    values = code.Values(lesson)
    for number, text in lesson.equations.items():
        line = lesson.where[number]
        by = [name for name in lesson.called if line in span(lesson.by_name[name])]
        if by and line not in lesson.folded and lesson.first[line] == number:
            place = f' <a class="ref e{number}" href="#eq{number}">({number})</a>'
            computed, _ = lesson.notes[lesson.statements[line].end_lineno]
            for name, value in computed.items():
                symbol = paper.math(text.partition("=")[0])
                symbol = code.label_of(name) if name.startswith("∂") else symbol
                if code.is_shown(name, value):
                    rows += values.row(by[0], name, value, "", symbol + place)
    command = f"python {lesson.name}.py {example.PAPER.get(lesson.name, '')}".strip()
    said = " ".join(draw.SECTIONS["numbers"].paragraphs[:2 if lesson.clipped() else 1])
    said = prose(said.replace("COMMAND", command), {lesson.name: lesson})
    return f"""<section class=numbers><div><h2>In numbers</h2><p>{said}</p></div>
<div>{rows}</div></section>"""


def map_of(lesson, lessons):
    """The equations of the paper, and ours; what departs from it. -> HTML"""
    rows = ""
    for theirs, ours, said in lesson.sections["map"].rows:
        rows += (f"<tr><td>{prose(theirs, lessons, has_links=False)}</td>"
                 f"<td>{prose(ours, lessons)}</td><td>{prose(said, lessons)}</td></tr>")
    text = re.search(r"^Departures from[^:]*: (.*?)\.\n(?:\n|Usage)", lesson.docstring,
                     re.S | re.M)
    departures = re.split(r"; |\. (?=[A-Z])", " ".join(text[1].split()))
    items = "".join(f"<li>{prose(part, lessons)}</li>" for part in departures)
    return f"""<section class=map id=map><div><h2>From the paper’s equations to these</h2>
<table><thead><tr><th>paper</th><th>here</th><th>what differs</th></tr></thead>
<tbody>{rows}</tbody></table></div>
<div><h2>What departs from it</h2><ul>{items}</ul></div></section>"""


def algorithm(lesson, lessons):
    """main, beside it the algorithm of the paper. -> HTML"""
    section = lesson.sections["algorithm"]
    steps = {lesson.line_of(word): f"<p><b>{number}</b>{prose(said, lessons, False)}</p>"
             for word, number, said in section.rows}
    return f"""<section class=algorithm id=main><h2>The whole of it: <code>main</code></h2>
<p class=where>{section.head[0]}</p>
{code.code(lesson, "main", beside=steps)}</section>"""


def part(lesson, section, lessons):
    """Of some functions: why, the equations, the code with its numbers, the drawing. -> HTML"""
    title, where = section.head
    names = sorted(section.names, key=lambda name: lesson.by_name[name].lineno)
    is_hidden = all(name in lesson.hidden for name in names)
    values = code.Values(lesson)
    shown = "".join(code.code(lesson, name, values, is_folded=not is_hidden) for name in names)
    drawn = "".join(picture(lesson, name, lessons) for name in names)
    anchors = "".join(f"<a id={name}></a>" for name in section.names[1:])
    return f"""<section class="part{" variant" * is_hidden}" id={section.names[0]}>
<div class=why>{anchors}<h2><code>{", ".join(section.names)}</code>{prose(title, lessons)}</h2>
<p class=where>{prose(where, lessons, False)}</p>
{paragraphs(section.paragraphs, lessons)}{questions(section.questions, lessons)}</div>
<div class=code>{equations(lesson, names)}{shown}{drawn}</div></section>"""


def flags(lesson, lessons):
    """The configuration, folded. -> HTML"""
    section = lesson.sections["flags"]
    nodes = [node for node in lesson.module.body
             if isinstance(node, ast.Assign) or getattr(node, "name", "") == "Config"]
    body = "".join(code.code_line(lesson, line) for node in nodes for line in span(node))
    return f"""<section class=flags id=flags><h2>Flags</h2>{paragraphs(section.paragraphs, lessons)}
<details><summary>The flags of this script</summary><div class=fn>{body}</div></details>
</section>"""


def foot(lesson):
    """What to do next. -> HTML"""
    return f"""<section class=flags><h2>Now write it</h2>
<p><code>make practice A={lesson.name}</code> leaves the equations out of a copy, for you to write.
A check says which number of yours is the first to be wrong, and once all are right it trains with
them: <a href="../practice.md">practice</a>.</p></section>"""


def lesson_page(lesson, lessons, links):
    """The page of a script. links: names and addresses of all pages. -> HTML"""
    lessons = {lesson.name: lesson} | lessons
    parts = [part(lesson, section, lessons) for name, section in lesson.sections.items()
             if name in lesson.by_name]
    body = f"""{navigation(links, f"{lesson.name}.html")}
{hero(lesson, lessons)}
{bar(f"{lesson.name}.py", lesson)}
<main>
{in_numbers(lesson)}
{map_of(lesson, lessons)}
{algorithm(lesson, lessons)}
{"".join(parts)}
{flags(lesson, lessons)}
{foot(lesson)}
</main>"""
    said = (f"{lesson.sections[lesson.name].head[0]}: its equations, its code in one file, and "
            "below each line the numbers that it computes.")
    return document(f"{lesson.name}.py, to read", said, body, lesson.name)
