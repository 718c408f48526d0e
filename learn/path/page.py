"""Build docs/path.html and docs/path.md from chapters.txt and the runs in docs/path.json."""
import html
import math
import re
from pathlib import Path
from statistics import fmean
from string import Template
from urllib.parse import urlencode

from learn import look
from learn.path.measure import BASE_THEN, CHOICE, FACTORS, RATE, SEEDS, best, ends, runs_at, value
from learn.path.rungs import BASE, CHAPTERS, LAST, REAL, ROOT, RUNGS, counts, diff, script, sides
from learn.read import code, page, paper

DOCS = ROOT / "docs"
COVER = "clip"              # the chapter whose picture README shows
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 236, 46, 124, 12, 30
LEVERS = (ROOT / "learn" / "play" / "levers.js").read_text(encoding="utf-8")
NUMBER = re.compile(r"\{(?:(?P<chapter>\w+) )?(?P<side>without|with|also|fourth)"
                    r"(?: (?P<best>best)| at (?P<rate>[\d.e-]+)| seed (?P<seed>\d))? "
                    r"(?P<percent>%?)(?P<name>[a-z_]+(?: [\d.]+)?)(?: as (?P<form>\S+?))?\}")
STYLES = [page.STYLE, Path(__file__).with_name("path.css")]
PAGE, CHAPTER = (Template(Path(__file__).with_name(f"{name}.html").read_text("utf-8").rstrip("\n"))
                 for name in ("page", "chapter"))


def fill(text, here):
    """Replace {with %last} by a mean over the seeds, and {clip} by its rung's number.
    {with best %last} is at the best rate of the side, and {with at 1e-3 %last} is at another rate,
    with the seeds of CHOICE. {with seed 0 %last} is of one seed. -> str"""
    def number(match):
        chapter = match["chapter"] or here
        side = match["side"]
        seeds, factor = SEEDS, 1
        if match["best"]:
            factor = best(chapter)[side]
        elif match["rate"]:
            seeds, factor = CHOICE, float(match["rate"]) / RATE
        elif match["seed"]:
            seeds = [int(match["seed"])]
        runs = runs_at(chapter, side, seeds, factor)
        if match["name"] == "text":                     # an output of the last step with seed 0
            return f"`{runs[0]['text']}`"
        x = fmean(value(one, match["name"]) for one in runs)
        if not math.isfinite(x):
            raise ValueError(f"chapter {here}: {match[0]} is {x}")
        return f"{100 * x:.0f}%" if match["percent"] else f"{x:{match['form'] or '.2f'}}"
    text = re.sub(r"\{wins( best)?\}", lambda match: str(wins(here, match[1])), text)
    text = re.sub(r"\{(\w+)\}", lambda match: str(CHAPTERS[match[1]].number), text)
    return NUMBER.sub(number, text)


def rate(factor):
    """Write a learning rate as 1.25e-4. -> str"""
    digits, exponent = f"{RATE * factor:e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def wins(name, at_best=False):
    """Count the seeds on which more outputs are right with the patch than without it. -> int"""
    shares = ends(name, at_best)
    return sum(b > a for a, b in zip(shares["without"], shares["with"], strict=True))


# ---- a picture -------------------------------------------------------------------------------
def chart(name, line):
    """Draw a metric of all sides over the steps, with thin lines for seeds and a thick one for
    their mean. line is `METRIC | title | range=0 1 | without=label | with=label`. With x=samples
    the axis counts outputs; with x=rate it has the learning rates. -> SVG, title"""
    metric, title, *options = (part.strip() for part in fill(line, name).split("|"))
    options = dict(option.split("=", 1) for option in options)
    axis = options.get("x", "step")
    curves = {side: series(name, side, metric, axis) for side in sides(name) if side in options}
    places = [place for rows in curves.values() for row in rows for place in row]
    last = max(x for x, _ in places)
    low, high = map(float, options.get("range", f"0 {max(y for _, y in places)}").split())
    d = look.Drawing(look.scale(0, last, LEFT, WIDTH - RIGHT),
                     look.scale(low, high, HEIGHT - BOTTOM, TOP))
    in_percent = options.get("range") == "0 1"
    levels = {tick: f"{100 * tick:.0f}%" if in_percent else f"{tick:g}".replace("-", "−")
              for tick in look.ticks(low, high)}
    marks = dict(enumerate(map(rate, FACTORS))) if axis == "rate" else {
        0: "output 0" if axis == "samples" else "step 0", last: f"{last:,.0f}"}
    d.axes(0, last, low, marks, levels)
    thin = "thin crowd" if len(curves) > 2 else "thin"
    heights = {}
    for side, rows in curves.items():
        mean = [[fmean(axis) for axis in zip(*row)] for row in zip(*rows)]
        for row in [*rows, mean]:
            inside = [(x, max(min(y, high), low)) for x, y in row]
            d.curve(inside, f"{side} {'mean' if row is mean else thin}")
        heights[side] = d.y(inside[-1][1])                      # where the mean ends
    order = sorted(heights, key=heights.get)
    for _ in range(9):                                          # push labels apart
        for upper, lower in zip(order, order[1:]):
            short = max(0, 18 - (heights[lower] - heights[upper]))
            heights[upper] -= short / 2
            heights[lower] += short / 2
    for side, height in heights.items():
        d.text(last, low, options[side], side, f"6 {height - d.y(low)}")
    return d.svg(WIDTH, HEIGHT, title), title


def series(name, side, metric, axis):
    """List the curves of a side, one per seed. -> list of lists of (x, y)"""
    if axis == "rate":
        by_rate = [runs_at(name, side, CHOICE, factor) for factor in FACTORS]
        return [[(i, value(one, metric)) for i, one in enumerate(runs)] for runs in zip(*by_rate)]
    return [[(sum(one["steps"]["samples"][:i + 1]) if axis == "samples" else i, y)
             for i, y in enumerate(one["steps"][metric])] for one in runs_at(name, side)]


# ---- the page --------------------------------------------------------------------------------
def prose(text, name):
    """Turn paragraphs with *emphasis*, `code`, [links](to), symbols and placeholders into HTML. A
    paragraph that begins with ! is an answer, which is folded."""
    paragraphs = ""
    for part in text.split("\n\n"):
        words = part.removeprefix("! ").split()
        inner = page.prose(fill(" ".join(words), name), None, has_links=False)
        inner = re.sub(r"(<code>.*?</code>)|\*([^*<>]+)\*",
                       lambda match: match[1] or f"<em>{match[2]}</em>", inner)
        # a line must not break between a symbol and the punctuation next to it
        inner = re.sub(r"\(?<math>.*?</math>[.,:;)?]*", r"<span class=w>\g<0></span>", inner)
        inner = f"<p>{inner}</p>"
        is_answer = part.startswith("! ")
        paragraphs += folded("What we saw", inner, "ask") if is_answer else inner
    return paragraphs


def patch_box(lines):
    """Show lines of a diff, with added and removed ones in colour. --i is the number of spaces
    before a line, by which path.css indents the rest of the line if it wraps. -> HTML"""
    rows = ""
    for line in lines:
        one_line = " class=one" if line.endswith("----") else ""
        text = code.PARTS.sub(lambda match: f"<span class={match.lastgroup}>{match[0]}</span>",
                              html.escape(line[1:], quote=False))
        bare = text.lstrip(" ")
        indent = len(text) - len(bare)
        kind = {"+": "add", "-": "cut"}.get(line[:1], "same")
        rows += "<hr>" if line.startswith("@@") else (
            f"<div class={kind} style=--i:{indent}><b>{line[:1]}</b><code{one_line}>"
            f"<s>{' ' * indent}</s>{bare or ' '}</code></div>")
    return f"<div class=patch>{rows.removeprefix('<hr>')}</div>"


def folded(summary, body, kind):
    return f"<details class={kind}><summary>{summary}</summary>{body}</details>"


def link(name):
    """Link to a chapter. -> HTML"""
    one = CHAPTERS[name]
    return f'<a href="#{one.anchor}">{one.number}. {one.fields["short"]}</a>'


def grid(head, rows):
    """Make a table. -> HTML"""
    body = "".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows)
    return (f"<table><thead><tr><th>{'</th><th>'.join(head)}</th></tr></thead>"
            f"<tbody>{body}</tbody></table>")


def rates(name):
    """Build the part of a chapter in which each side has its own best rate. -> HTML"""
    field = CHAPTERS[name].fields
    if "fair" not in field:
        return ""
    predicted = f" (Before these runs, we predicted that the difference {field['predicted']}.)"
    labels = CHAPTERS[name].labels
    rows = [(html.escape(labels[side]), f"{{{side} %last}}",
             f"{{{side} best %last}} at {rate(factor)}")
            for side, factor in best(name).items()]
    head = ["right outputs at the end", f"at {rate(1)}", "at the best rate"]
    return ("<h3>With the best learning rate for each side</h3>"
            + fill(grid(head, rows), name) + prose(field["fair"] + predicted, name))


def playground(name):
    """Embed the playground's training with the first lever for this rung. -> HTML, or """""
    lever = re.search(rf'name: "([^"]*)", rung: "{CHAPTERS[name].anchor}", set: {{(.*?)}}',
                      LEVERS, re.S)
    if lever is None:
        return ""
    settings = urlencode(re.findall(r'(\w+): "([^"]*)"', lever[2])).replace("&", "&amp;")
    frame = (f'<iframe loading=lazy title="{lever[1]}" src="play.html?figure#{settings}"></iframe>'
             '<p class=more><a href="play.html#break">other changes, in the playground</a></p>')
    return folded(f"Train in this page: {lever[1]}", frame, "ask")


def chapter(name):
    """Build a chapter: the text, the pictures, and the patch or pieces of real.py. -> HTML"""
    number, _, _, field = CHAPTERS[name]
    say = lambda text: prose(text, name)
    inline = lambda text: say(text)[3:-4]
    changes = ""
    for kind, note in (("setting", "note"), ("without", "note_without"), ("also", "note_also")):
        if note in field and kind in field:
            diff_lines = re.sub("^([-+ ]) ", r"\1", field[kind], flags=re.M).split("\n")
            box = patch_box(diff_lines)
            changes += folded(inline(field[note]), box, "setting")
        elif note in field:
            changes += f"<p class=setting>{inline(field[note])}</p>"
    equations = ""
    for text in field["equation"].split("\n"):
        kinds = "eq long" if len(text) > 50 else "eq"
        whole = paper.math(text, ' displaystyle=true')
        equations += f'<div class="{kinds}"><div>{whole}</div></div>'
    drawn = (chart(name, line) for line in field.get("picture", "").splitlines())
    charts = "".join(f"<figure>{svg}<figcaption>{inline(title)}</figcaption></figure>"
                     for svg, title in drawn)
    if name == LAST:
        command = "real.py MODEL"
        tables = ([map(inline, line.split(" | ")) for line in field[of].split("\n")]
                  for of in ("gaps", "results"))
        results = ("".join(grid(head, rows) for head, *rows in tables)
                   + f"<h3>The rungs on a real model</h3>{say(field['offer'])}")
        shown = "".join(f"<p class=head>{inline(title)}</p>{patch_box(lines)}"
                        for title, lines in pieces(field))
    else:
        command = f"-m learn.path {number}"
        results = rates(name)
        num_lines = script(name).count("\n")
        shown = (f"<p class=head><b>{CHAPTERS[name].stem}.py</b> {counts(name)}, "
                 f"{num_lines} lines</p>{patch_box(diff(name))}")
    asked, _, answer = field["question"].partition("\n\n")
    names = [*RUNGS, LAST]
    at = names.index(name)
    turn = [*("← " + link(other) for other in names[:at][-1:]), '<a href="#rungs">all rungs</a>',
            *(link(other) + " →" for other in names[at + 1:at + 2])]
    return CHAPTER.substitute(
        {key: say(field[key]) for key in ("pain", "idea", "relief", "hurts")},
        anchor=CHAPTERS[name].anchor, number=number, title=inline(field["title"]), changes=changes,
        equations=equations, results=results, question=folded(inline(asked), say(answer), "ask"),
        exercise=say(field["try"]) + playground(name), charts=charts, shown=shown, command=command,
        more=inline(field["more"]), measured=BASE_THEN, turn="</span><span>".join(turn))


def pieces(field):
    """Yield the pieces of real.py that its chapter shows. -> title, lines as of a diff"""
    for line in field["pieces"].split("\n"):
        title, names = line.split(" | ")
        shown = "\n\n".join(re.search(rf"(@AUTOCAST\n)?def {name}\(.*?(?=\n\n)", REAL, re.S)[0]
                            for name in names.split())
        yield title, [f" {line}" for line in shown.split("\n")]


def table():
    """List the rungs: the title of a branch that begins here, name, lines, setting, the share of
    right outputs without and with the patch at the shared rate and at the best rate of each side,
    each with a verdict unless the patch is ahead on all seeds, and what else was measured."""
    verdict = {wins: f"better on {wins} of {len(SEEDS)} seeds" for wins in range(len(SEEDS))}
    verdict |= {0: "worse", len(SEEDS): ""}
    for name in RUNGS:
        field = CHAPTERS[name].fields
        pairs = [(fill("{with %first} → {with %last}", name), ""), ("", "")]
        if name != RUNGS[0]:                        # before which nothing is trained
            pairs = [(fill(f"{{without{at} %last}} → {{with{at} %last}}", name),
                      verdict[wins(name, at)]) for at in ("", " best")]
        yield (field.get("branch"), name, counts(name), field.get("where", ""), *pairs,
               fill(field.get("besides", ""), name))


def build():
    """Build docs/path.html. -> HTML"""
    top = CHAPTERS[BASE].fields
    rows = ""
    for branch, name, *cells, shared, own, besides in table():
        if branch:
            rows += f"<tr><th colspan=6>{branch}</th></tr>"
        for text, judged in (shared, own):
            kind = {"": "better", "worse": "worse"}.get(judged, "")
            note = judged and f" <small>{judged}</small>"
            cells.append(text and f"<span class='{kind}'>{text}</span>{note}")
        rows += f"<tr><td>{'</td><td>'.join([link(name), *cells, besides])}</td></tr>"
    names = [*RUNGS, LAST]
    body = PAGE.substitute(
        {key: prose(top[key], BASE) for key in ("lead", "after", "onward")},
        title=top["title"], measured=BASE_THEN, rate=rate(1), rows=rows,
        links="".join(map(link, names)), chapters="".join(chapter(name) for name in names))
    return look.document(top["title"], top["description"].replace("\n", " "), body, "../",
                         "The path", STYLES, "path")


def build_markdown(title):
    """Build docs/path.md: a table of the rungs, whose anchors are those of path.html, and what fits
    real.py. -> Markdown"""
    top = CHAPTERS[BASE].fields
    rows = ""
    for branch, name, *cells, shared, own, besides in table():
        one = CHAPTERS[name]
        rows += f"| **{branch}** | | | | | | |\n" if branch else ""
        cells += [f"{text} ({judged})" if judged else text for text, judged in (shared, own)]
        rung = f'<a id="{one.anchor}"></a>{one.number}. {one.fields["short"]}'
        rows += f"| {' | '.join([rung, one.fields['hook'], *cells, besides])} |\n"
    last = CHAPTERS[LAST].fields
    return (f"# {top['title']}\n\n{fill(top['lead'], BASE)}\n\n{BASE_THEN}\n\n{top['here']}\n\n"
            f"![{title}](path.svg)\n\n"
            "| rung | what hurts | lines | setting | right outputs at 5e-4, without → with "
            "| each at its best rate | also measured |\n"
            f"| --- | --- | --- | --- | --- | --- | --- |\n{rows}\n## A real model\n\n"
            f"{last['hook']}\n\n{fill(last['offer'], LAST)}\n")


def write():
    """Write docs/path.html, docs/path.md and docs/path.svg."""
    picture, title = chart(COVER, CHAPTERS[COVER].fields["picture"].split("\n")[0])
    # An SVG in a page knows only its own width. Larger letters need room on the left, too
    style = look.small(look.COLOURS + look.CHART
                       + "@media (max-width: 450px) { svg text { font-size: 17.5px } }")
    picture = picture.replace(">", f"><style>{style}</style>", 1)
    picture = picture.replace('viewBox="0 0', 'viewBox="-12 0')
    for name, text in (("path.html", build()), ("path.md", build_markdown(title)),
                       ("path.svg", picture)):
        (DOCS / name).write_text(text, encoding="utf-8")
