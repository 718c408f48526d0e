"""The page of a script, one file: the words of its text file, its equations, its code, below each line
the numbers that it computes, and drawings made from them. What is folded opens without a script."""
import functools
import html
import io
import keyword
import re
import tokenize
from pathlib import Path

import torch

from tools.read import example, figures, paper, words
from tools.read.lesson import in_batch
from tools.read.watch import Value, first_line

STYLE = Path(__file__).with_name("read.css")
MARKED = ("ratio", "clipped_ratio", "token_loss")       # rows in which clipped tokens are ringed
LEGEND = (" Ratios outside the range are <b>bold</b>; <i class=hit>ringed</i> is what the clip has "
          "taken the gradient from.")
# The address keeps whether variants are shown; without it, the switch works all the same.
SCRIPT = """<script>{const v=document.getElementById("variants");v.checked=location.search=="?variants";
v.form.onchange=()=>history.replaceState(0,"",(v.checked?"?variants":location.pathname)+location.hash)}
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


def row(label, value, clipped=None, limits=None, kind=""):
    """A line of values with its label, which is HTML: a box for each output, in it a number for each
    token, or one if they are equal. clipped: tokens to ring; numbers outside limits are bold."""
    rows = in_batch(value)
    if rows is None:
        x = float(value.tensor)
        return f'<div class="v one{kind}"><b>{label}</b><span>{number_text(x, [x])}</span></div>'
    numbers = [x for of_row in rows for x in of_row]
    is_one = all(max(of_row) - min(of_row) < 1e-6 for of_row in rows if of_row)
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
    return f'<div class="v{kind}"><b>{label}</b>{"".join(boxes)}</div>'


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
            values = {name: value for name, value in note.values.items() if name in read
                      and not any(name == other for _, other, *_ in self.shown)}
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
        return "".join(rows).replace('class="v', 'class="v flagged') if is_of_fold else "".join(rows)

    def is_repeated(self, function, name, value, note):
        """Whether a function has shown the same numbers. -> bool"""
        rows = in_batch(value) or [[float(value.tensor)]]
        numbers = [[f"{x + 0.0:.4f}".replace("-0.0000", "0.0000") for x in of_row] for of_row in rows]
        is_known = not name.startswith("∂") and any(
            (function.name, note.flags, numbers) == (by, flags, of)
            for by, _, flags, of in self.shown)
        self.shown.append((function.name, name, note.flags, numbers))
        return is_known

    def row(self, function, name, value, flags):
        is_marked = self.clipped and not flags and function.name in ("policy_loss", "backward") \
            and (name in MARKED or name.startswith("∂"))
        limits = self.limits if is_marked and name == "ratio" else None
        return row(label_of(name), value, self.clipped if is_marked else None, limits)


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
        text = number_text(float(value.tensor), [float(value.tensor)])
    else:
        x = rows[int(match["row"]) - 1][int(match["token"] or 1) - 1]
        text = number_text(x, [x for of_row in rows for x in of_row])
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
    """The equations that functions compute, with links to their lines. Those of variants, and all but
    the first of a line, are hidden. -> HTML"""
    parts = []
    seen = set()
    for number, text in lesson.equations.items():
        line = lesson.where[number]
        if any(line in span(lesson.by_name[name]) for name in names):
            is_extra = lesson.kinds.get(line) == "variant" or line in seen
            kinds = " variant" * is_extra + " long" * (len(text) > 50) + "er" * (len(text) > 70)
            parts.append(f'<div class="eq {prefix}e{number}{kinds}" id={prefix}eq{number}><div>'
                         f'{typeset(text)}</div><a href="#{prefix}L{line}">({number})</a></div>')
            seen.add(line)
    return "".join(parts)


def span(node):
    """The lines of a function or a class. -> range"""
    return range(first_line(node), node.end_lineno + 1)


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
        return "str"
    if keyword.iskeyword(token.string):
        return "kw"
    return "def" if previous in ("def", "class") else ""


def coloured(text, kind, equations):
    """A piece of code in its colour. -> HTML"""
    spaces = " " * (len(text) - len(text.lstrip(" ")))
    escaped = html.escape(text.lstrip(" "), quote=False)
    if kind in ("com", "str"):
        escaped = re.sub(r"(?:eq\. )?\((\d\d?)\)", lambda m: paper.link(m[1], m[0], equations),
                         escaped)
    return spaces + (f"<span class={kind}>{escaped}</span>" if kind and text else escaped)


def code_line(lesson, line, prefix="", link="", kind=""):
    """A line of code, which may be a link to the section that explains it. In narrow windows spaces
    inside it vanish, and those before it shrink: they are in <s>. -> HTML"""
    source = lesson.lines[line - 1]
    text = highlight(lesson.source, tuple(lesson.equations))[line]
    spaces = text[:len(text) - len(text.lstrip(" "))]
    text = re.sub(r"( {2,})", r"<s>\1</s>", text[len(spaces):])
    if prefix:
        text = text.replace('href="#eq', f'href="#{prefix}eq').replace("ref e", f"ref {prefix}e")
    if link:
        bare = re.sub("</?a[^>]*>", "", text)
        text = f'<a class=to href="#{link}">' + re.sub(rf"\b({link})\b", r"<u>\1</u>", bare, 1) + "</a>"
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
            groups[-1][0] = "log" if "log" in (groups[-1][0], kind) else max(groups[-1][0], kind)
        else:
            groups.append([kind, [line]])
    return groups


def fold(lesson, kind, group, body, why=""):
    """Lines that a click on their label shows, or the switch. -> HTML"""
    count = sum(1 for line in group if lesson.lines[line - 1].strip())
    flags = reasons(lesson, group)
    why += flags + {"log": ", for the log" if flags else " for the log",
                    "idle": " without effect here", "variant": "" if flags else " not used here"}[kind]
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
            values.setdefault(name, []).append(value or "")
    return ": " + " ".join(f"<code>--{name} {', '.join(dict.fromkeys(of))}".rstrip() + "</code>"
                           for name, of in values.items()) if values else ""


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
    captions = {section.names[0]: section.paragraphs[0] for section in words.read("pictures")}
    return "".join(f"<figure class={name}><div>{''.join(svgs)}</div><figcaption>"
                   f"{prose(captions[name], lessons)}</figcaption></figure>"
                   for name, svgs in figures.drawings(lesson, place))


def in_numbers(lesson, values):
    """The equations of the paper, each with its value. -> HTML"""
    rows = ""
    seen = set()                            # lines, of whose equations the first is shown
    for number, text in lesson.equations.items():
        line = lesson.where[number]
        name = next(name for name in lesson.functions if line in span(lesson.by_name[name]))
        statement = lesson.functions[name].statements[line]
        note = lesson.notes.get(statement.end_lineno)
        if lesson.kinds.get(line) or name in lesson.hidden or note is None or line in seen:
            continue
        seen.add(line)
        function = lesson.functions[name]
        for label, value in note.values.items():
            symbol = label_of(label)
            if not label.startswith("∂"):
                symbol = paper.math(text.partition("=")[0])
            if is_shown(label, value):
                found = values.row(function, label, value, note.flags)
                rows += found.replace(f"<b>{label_of(label)}</b>", f'<b>{symbol} <a class="ref e'
                                      f'{number}" href="#eq{number}">({number})</a></b>')
    command = f"python {lesson.name}.py {example.PAPER.get(lesson.name, '')}".strip()
    marks = LEGEND if lesson.clipped() else ""
    return f"""<section class=numbers><div><h2>In numbers</h2>
<p>Below each line of code stands what it assigns: a box for each output, in it a number for each
token. Log-probabilities, which need a network, are made up; all else is computed by the lines that
you see, with <code>{command}</code>, in the second of two passes over this one batch.{marks}</p></div>
<div>{rows}</div></section>"""


def map_of(lesson, lessons):
    """The equations of the paper, and ours; what departs from it. -> HTML"""
    rows = ""
    for theirs, ours, said in lesson.sections["map"].rows:
        mark = "<b class=sign>sign</b> " if said.startswith("sign: ") else ""
        rows += (f"<tr><td>{prose(theirs, lessons, has_links=False)}</td><td>{prose(ours, lessons)}</td>"
                 f"<td>{mark}{prose(said.removeprefix('sign: '), lessons)}</td></tr>")
    text = re.search(r"^Departures from[^:]*: (.*?)\.\n(?:\n|Usage)", lesson.docstring, re.S | re.M)
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
    steps = {lesson.line_of("main", word): f"<p><b>{number}</b><span>{prose(said, lessons, False)}</span></p>"
             for word, number, said in section.rows}
    groups = []
    for line in span(function.node):
        statement = function.statements.get(line)
        kind = lesson.kinds.get(line, "")
        is_inner = statement is not None and statement.__class__.__name__ == "FunctionDef"
        folded = "log" if is_inner else "variant" if kind == "variant" else ""
        is_dim = statement and statement.lineno not in steps and (kind == "log" or line < function.loop)
        body = (f"<div class=step>{code_line(lesson, line, '', link_of(lesson, line), 'dim' * bool(is_dim))}"
                f"{steps.get(line, '')}</div>")
        if groups and groups[-1][0] == folded:
            groups[-1][1].append(line)
            groups[-1][2] += body
        else:
            groups.append([folded, [line], body])
    shown = "".join(fold(lesson, *group) if group[0] else group[2] for group in groups)
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
    values = Values(lesson)
    shown = "".join(code(lesson, name, values) for name in known)
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
    rows = "".join(row(f"batch.{label}", Value(tensor)) for label, tensor in given.items())
    head = highlight(lesson.source, tuple(lesson.equations))[line]
    return f"""<div class=fn><div class=l><a></a><code>{head}</code></div>
<div class=with>below the lesson, where it is the same in all scripts; in the example it gives</div>
{rows}</div>"""


def flags(lesson, lessons):
    """The configuration, and the docstring, folded. -> HTML"""
    section = lesson.sections["flags"]
    names = [node for node in lesson.module.body
             if node.__class__.__name__ == "Assign" or getattr(node, "name", "") == "Config"]
    body = "".join(code_line(lesson, line) for node in names for line in span(node))
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
{in_numbers(lesson, Values(lesson))}
{map_of(lesson, lessons)}
{algorithm(lesson, lessons)}
{"".join(parts)}
{flags(lesson, lessons)}
</main>"""
    text = lesson.sections[lesson.name]
    return document(f"{lesson.name}.py, to read", f"{text.head[0]}: its equations, its code in one "
                    "file, and below each line the numbers that it computes.",
                    "../compare.png", body, rules({"": lesson}))
