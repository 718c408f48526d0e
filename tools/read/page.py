"""The page of a script, one file: the words of its text file, its equations, its code with numbers,
and drawings made from these. What is folded opens without a script."""
import html
import re
from pathlib import Path

from tools.read import code, example, figures, paper, words
from tools.read.lesson import in_batch
from tools.read.watch import Value

STYLE = Path(__file__).with_name("read.css")
CAPTIONS = {section.names[0]: section.paragraphs[0] for section in words.read("pictures")}
LEGEND = (" Ratios outside the range are <b>bold</b>; <i class=hit>ringed</i> is what the clip has "
          "taken the gradient from.")
# The address keeps whether variants are shown; without it, the switch works all the same.
SCRIPT = """<script>{const v=document.getElementById("variants"), l=location;
v.checked=l.search=="?variants";
v.form.onchange=()=>history.replaceState(0,"",(v.checked?"?variants":l.pathname)+l.hash)}
</script>"""


# ---- a document ------------------------------------------------------------------------------

def document(title, description, picture, body, rules=""):
    """A whole page. picture: what links to it show. -> HTML"""
    style = re.sub(r"/\*.*?\*/|\n\s*", "", STYLE.read_text(encoding="utf-8"), flags=re.S)
    tags = {"title": title, "description": description, "image": picture, "type": "article"}
    preview = "\n".join(f'<meta property="og:{name}" content="{html.escape(text)}">'
                        for name, text in tags.items())
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<meta name="description" content="{html.escape(description)}">
{preview}
<style>{style}{rules}</style>
<body>
{body}
</body>
</html>
"""


def rules(lessons):
    """What of the style depends on the example: how many tokens outputs have, which are better than
    the others; a token, and an equation, lights up wherever it stands. lessons: prefix -> Lesson"""
    found = [f":root{{--cols:{' '.join(f'{len(tokens)}fr' for tokens in example.ANSWERS)}}}"]
    for i, tokens in enumerate(example.ANSWERS, start=1):
        found.append(f".o{i}{{--n:{len(tokens)}}}")
        for t in range(1, len(tokens) + 1):
            over = f"body:has(.t{i}{t}:hover)"
            found.append(f"{over} i.t{i}{t}{{outline:1.5px solid var(--ink)}}"
                         f"{over} svg .t{i}{t}{{stroke:var(--ink);stroke-width:2}}")
    rewards = example.REWARDS[next(iter(lessons.values())).name][0]
    for i in (rewards > rewards.mean()).nonzero().flatten().tolist():
        found.append(f".v>.o{i + 1}{{background:var(--up-tint)}}.bar .v .o{i + 1} i"
                     f"{{background:var(--up-tint)}}.bar .o{i + 1} span{{color:var(--up)}}")
    for prefix, lesson in lessons.items():
        for number in lesson.equations:
            name = f"{prefix}e{number}"
            found.append(f"body:has(.{name}:is(:hover,:focus-within)) :is(.eq,.l).{name}"
                         "{background:var(--mark)}")
    return "".join(found)


def navigation(links, here):
    """The line at the top. links: names -> addresses. -> HTML"""
    parts = []
    for name, address in links.items():
        place = ' class=here aria-current=page' if address == here else ""
        parts.append(f'<a href="{address}"{place}>{html.escape(name)}</a>')
    return f"<nav>{''.join(parts)}</nav>"


# ---- words -----------------------------------------------------------------------------------

def prose(text, lessons, has_links=True):
    """Words as words.py describes them, symbols and links as in a docstring. lessons: name ->
    Lesson, at first that of the page. -> HTML"""
    known = next(iter(lessons.values())).equations if has_links else ()
    parts = []
    end = 0
    for match in re.finditer(r"`([^`]+)`|\$([^$]+)\$|\{[^{}]+\}", text):
        parts.append(paper.prose(text[end:match.start()], known))
        end = match.end()
        if match[1]:
            parts.append(f"<code>{html.escape(match[1])}</code>")
        elif match[2]:
            parts.append(paper.math(match[2]))
        else:
            parts.append(look_up(match[0], lessons))
    return "".join(parts) + paper.prose(text[end:], known)


def look_up(reference, lessons):
    """The number that a reference names, with a link to the line below which it stands. -> HTML"""
    match = words.REFERENCE.fullmatch(reference)
    if match is None or (match["script"] or next(iter(lessons))) not in lessons:
        raise ValueError(f"no reference to a number: {reference}")
    lesson = lessons[match["script"] or next(iter(lessons))]
    value, line = lesson.value(match["function"], match["name"], match["flags"])
    rows = in_batch(value)
    if rows is None:
        text = code.number_text(float(value.tensor), [float(value.tensor)])
    else:
        x = rows[int(match["row"]) - 1][int(match["token"] or 1) - 1]
        text = code.number_text(x, [x for of_row in rows for x in of_row])
    query = "?variants" if match["flags"] else ""
    return f'<a class=n href="{lesson.name}.html{query}#L{line}">{text}</a>'


def questions(pairs, lessons, has_links=True):
    """Questions, with answers that a click opens. -> HTML"""
    return "".join(f"<details class=ask><summary>{prose(asked, lessons, has_links)}</summary>"
                   f"<p>{prose(answer, lessons, has_links)}</p></details>"
                   for asked, answer in pairs)


# ---- equations -------------------------------------------------------------------------------

def typeset(text):
    """An equation, and remarks behind it. -> HTML"""
    left, equals, right = text.partition("=")
    formula, *remarks = re.split(r"\s{3,}", right.strip() if equals else text)
    whole = f"{left} {equals} {formula}" if equals else formula
    return paper.display(whole) + "".join(
        f"<div class=remark>{paper.prose(words) if '--' in words else paper.math(words)}</div>"
        for words in remarks)


def equations(lesson, names, prefix=""):
    """The equations that functions compute, with links to their lines. Those of variants, and all
    but the first of a line, are hidden. -> HTML"""
    parts = []
    seen = set()
    for number, text in lesson.equations.items():
        line = lesson.where[number]
        if any(line in code.span(lesson.by_name[name]) for name in names):
            is_extra = lesson.kinds.get(line) == "variant" or line in seen
            length = max(len(part) for part in re.split(r"\s{3,}", text))
            kinds = " variant" * is_extra + " long" * (length > 50) + "er" * (length > 70)
            parts.append(f'<div class="eq {prefix}e{number}{kinds}" id={prefix}eq{number}><div>'
                         f'{typeset(text)}</div><a href="#{prefix}L{line}">({number})</a></div>')
            seen.add(line)
    return "".join(parts)


# ---- parts of the page -----------------------------------------------------------------------

def bar(names, lesson):
    """The four outputs, which stay at the top, and the switch. -> HTML"""
    boxes = ""
    rewards = example.REWARDS[lesson.name][0].tolist()
    for i, (tokens, reward) in enumerate(zip(example.ANSWERS, rewards), start=1):
        cells = "".join(f"<i class=t{i}{t}>{token}</i>" for t, token in enumerate(tokens, 1))
        boxes += (f"<div class=o{i}><span><em>o</em><sub>{i}</sub><small> reward</small> "
                  f"{reward:g}{' ✓' if reward == 1 else ''}</span>{cells}</div>")
    return f"""<div class=bar><div><form class=tools><strong>{names}</strong>
<fieldset><label><input type=radio name=show checked>paper only</label><label><input type=radio
name=show id=variants>with variants</label></fieldset></form>{SCRIPT}
<div class=v><b>{example.QUESTIONS[lesson.name]}</b>{boxes}</div></div></div>"""


def hero(lesson, lessons):
    """What it does, the question with which it opens, drawings. -> HTML"""
    text = lesson.sections[lesson.name]
    title, source, *arxiv = text.head
    link = "".join(f' (<a href="https://arxiv.org/abs/{n}">{n}</a>)' for n in arxiv)
    lead = "".join(f"<p>{prose(paragraph, lessons)}</p>" for paragraph in text.paragraphs)
    ((asked, answer),) = text.questions
    return f"""<header class=hero>
<div class=lead><h1>{lesson.name.upper()}</h1>
<p class=source>{title}, <span>from {source}{link}</span></p>
{lead}</div>
<div class=asked><h2>{prose(asked, lessons)}</h2>
<details><summary><span>Show why</span><span>Hide</span></summary>
<p>{prose(answer, lessons)}</p></details></div>
<div class=pictures>{pictures(lesson, lesson.name, lessons)}</div>
</header>"""


def pictures(lesson, place, lessons):
    """The drawings of a place, with their captions. -> HTML"""
    return "".join(f"<figure class={name}><div>{''.join(svgs)}</div><figcaption>"
                   f"{prose(CAPTIONS[name], lessons)}</figcaption></figure>"
                   for name, svgs in figures.drawings(lesson, place))


def in_numbers(lesson, values):
    """The equations of the paper, each with its value, and what the numbers are. -> HTML"""
    rows = ""
    seen = set()                            # lines, of whose equations the first is shown
    for number, text in lesson.equations.items():
        line = lesson.where[number]
        function = next(f for f in lesson.functions.values() if line in code.span(f.node))
        note = lesson.notes.get(function.statements[line].end_lineno)
        is_hidden = lesson.kinds.get(line) or function.name in lesson.hidden or line in seen
        seen.add(line)
        for label, value in note.values.items() if not is_hidden else ():
            name = code.label_of(label)
            symbol = name if label.startswith("∂") else paper.math(text.partition("=")[0])
            symbol += f' <a class="ref e{number}" href="#eq{number}">({number})</a>'
            if code.is_shown(label, value):
                rows += values.row(function, label, value, "").replace(
                    f"<b>{name}</b>", f"<b>{symbol}</b>")
    command = f"python {lesson.name}.py {example.PAPER.get(lesson.name, '')}".strip()
    return f"""<section class=numbers><div><h2>In numbers</h2>
<p>Below each line of code stands what it assigns: a box for each output, in it a number for each
token. Log-probabilities, which need a network, are made up; all else is computed by the lines that
you see, with <code>{command}</code>, in the second of two passes over this one batch.
{LEGEND if lesson.clipped() else ""}</p></div>
<div>{rows}</div></section>"""


def map_of(lesson, lessons):
    """The equations of the paper, and ours; what departs from it. -> HTML"""
    rows = ""
    for theirs, ours, said in lesson.sections["map"].rows:
        mark = "<b class=sign>sign</b> " if said.startswith("sign: ") else ""
        rows += (f"<tr><td>{prose(theirs, lessons, has_links=False)}</td>"
                 f"<td>{prose(ours, lessons)}</td>"
                 f"<td>{mark}{prose(said.removeprefix('sign: '), lessons)}</td></tr>")
    text = re.search(r"^Departures from[^:]*: (.*?)\.\n(?:\n|Usage)", lesson.docstring,
                     re.S | re.M)
    departures = re.split(r"; |\. (?=[A-Z])", " ".join(text[1].split()))
    items = "".join(f"<li>{paper.prose(part, lesson.equations)}</li>"
                    for part in departures)
    return f"""<section class=map id=map><div><h2>From the paper’s equations to these</h2>
<table><thead><tr><th>paper</th><th>here</th><th>what differs</th></tr></thead>
<tbody>{rows}</tbody></table></div>
<div><h2>What departs from it</h2><ul>{items}</ul></div></section>"""


def algorithm(lesson, lessons):
    """main, beside it the algorithm of the paper. -> HTML"""
    section = lesson.sections["algorithm"]
    function = lesson.functions["main"]
    steps = {}
    for word, number, said in section.rows:
        words = f"<b>{number}</b><span>{prose(said, lessons, has_links=False)}</span>"
        steps[lesson.line_of("main", word)] = f"<p>{words}</p>"
    groups = []                             # kind of the fold, lines, HTML
    for line in code.span(function.node):
        statement = function.statements.get(line)
        kind = lesson.kinds.get(line, "")
        is_inner = statement.__class__.__name__ == "FunctionDef"
        folded = "log" if is_inner else "variant" if kind == "variant" else ""
        is_dim = statement and statement.lineno not in steps and (
            kind == "log" or line < function.loop)
        text = code.code_line(lesson, line, link=link_of(lesson, line), kind="dim" * bool(is_dim))
        if not groups or groups[-1][0] != folded:
            groups.append([folded, [], ""])
        groups[-1][1].append(line)
        groups[-1][2] += f"<div class=step>{text}{steps.get(line, '')}</div>"
    shown = "".join(code.fold(lesson, *group) if group[0] else group[2] for group in groups)
    return f"""<section class=algorithm id=main>
<div class=step><h2>The whole of it: <code>main</code></h2><p class=head>{section.head[0]}</p></div>
<div class=fn>{shown}</div></section>"""


def link_of(lesson, line):
    """The section that explains a line of main, or nothing."""
    text = lesson.lines[line - 1]
    found = [name for section in lesson.sections.values() for name in section.names
             if re.search(rf"(?<!def )\b{name}\(", text)]
    return found[0] if found else ""


def part(lesson, section, lessons):
    """Of some functions: why, the equations, the code with its numbers, the drawing. -> HTML"""
    title, where = section.head
    known = sorted((name for name in section.names if name in lesson.by_name),
                   key=lambda name: lesson.by_name[name].lineno)
    is_hidden = known and all(name in lesson.hidden for name in known)
    values = code.Values(lesson)
    shown = "".join(code.code(lesson, name, values) for name in known)
    shown += "".join(machinery(lesson, name) for name in section.names if name not in known)
    why = "".join(f"<p>{prose(paragraph, lessons)}</p>" for paragraph in section.paragraphs)
    names = ", ".join(section.names)
    drawn = "".join(pictures(lesson, name, lessons) for name in section.names)
    anchors = "".join(f"<a id={name}></a>" for name in section.names[1:])
    return f"""<section class="part{" variant" if is_hidden else ""}" id={section.names[0]}>
<div class=why>{anchors}<h2><code>{names}</code>{prose(title, lessons)}</h2>
<p class=where>{paper.prose(where)}</p>
{why}{questions(section.questions, lessons)}</div>
<div class=code>{equations(lesson, known)}{shown}{drawn}</div></section>"""


def machinery(lesson, name):
    """Of a function of the machinery not the code, but what it gives. -> HTML"""
    line = next(i for i, text in enumerate(lesson.lines, 1) if text.startswith(f"def {name}("))
    given = {"rewards": example.REWARDS[lesson.name], "logps": example.OLD_LOGPS}
    if lesson.name == "dpo":
        del given["logps"]                  # which it does not use
    rows = "".join(code.row(f"batch.{label}", Value(tensor)) for label, tensor in given.items())
    head = code.highlight(lesson.source, tuple(lesson.equations))[line - 1]
    return f"""<div class=fn><div class=l><a></a><code>{head}</code></div>
<div class=with>below the lesson, where it is the same in all scripts; in the example it gives</div>
{rows}</div>"""


def flags(lesson, lessons):
    """The configuration, and the docstring, folded. -> HTML"""
    section = lesson.sections["flags"]
    names = [node for node in lesson.module.body
             if node.__class__.__name__ == "Assign" or getattr(node, "name", "") == "Config"]
    body = "".join(code.code_line(lesson, line) for node in names for line in code.span(node))
    said = "".join(f"<p>{prose(paragraph, lessons)}</p>" for paragraph in section.paragraphs)
    return f"""<section class=flags id=flags><h2>Flags</h2>{said}
<details><summary>The flags of this script</summary><div class=fn>{body}</div></details>
<details><summary>Its docstring, with the variants in words</summary>
<pre>{html.escape(lesson.docstring)}</pre></details></section>"""


def lesson_page(lesson, lessons, links):
    """The page of a script. links: names and addresses of all pages. -> HTML"""
    lessons = {lesson.name: lesson} | lessons
    parts = [part(lesson, section, lessons) for name, section in lesson.sections.items()
             if name not in (lesson.name, "map", "algorithm", "flags")]
    body = f"""{navigation(links, f"{lesson.name}.html")}
{hero(lesson, lessons)}
{bar(f"{lesson.name}.py", lesson)}
<main>
{in_numbers(lesson, code.Values(lesson))}
{map_of(lesson, lessons)}
{algorithm(lesson, lessons)}
{"".join(parts)}
{flags(lesson, lessons)}
</main>"""
    text = lesson.sections[lesson.name]
    return document(f"{lesson.name}.py, to read", f"{text.head[0]}: its equations, its code in one "
                    "file, and below each line the numbers that it computes.",
                    "../compare.png", body, rules({"": lesson}))
