"""Build docs/path.html and docs/path.md from chapters.txt and the runs in docs/path.json."""
import html
import itertools
import math
import operator
import re
from pathlib import Path
from statistics import fmean
from string import Template
from urllib.parse import urlencode

from learn import look
from learn.path import lines, measure, worked
from learn.path.measure import CHOICE, FACTORS, RATE, SEEDS, best, ends, runs_at, value
from learn.path.rungs import BASE, CHAPTERS, LAST, REAL, ROOT, RUNGS, counts, diff, script, sides
from learn.read import code, page, paper

DOCS = ROOT / "docs"
COVER = "clip"              # the chapter whose picture README shows
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 236, 46, 124, 12, 30
LOAD = "const frame = this.querySelector('iframe'); frame.src ||= frame.dataset.src"
LEVERS = (ROOT / "learn" / "play" / "experiments.js").read_text(encoding="utf-8")
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
    if not shares:
        raise measure.NotMeasured(name)
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


# ---- nano.py without each of its lines --------------------------------------------------------
def effects_chart(names):
    """Draw the difference of each row from nano.py: a dot and an interval at both rates, and the
    predicted range as a band. -> SVG"""
    found = {name: lines.effects(name) for name in names}
    ends = [end for pair in found.values() for one in pair
            for end in (*one.interval, *one.predicted, 0)]
    low, high = (rounding(end / 5) * 5 for end, rounding in (
        (min(ends), math.floor), (max(ends), math.ceil)))
    height = TOP + 44 * len(names) + BOTTOM
    d = look.Drawing(look.scale(low, high, 196, WIDTH - 20),
                     look.scale(0, len(names), TOP, height - BOTTOM))
    for tick in look.ticks(low, high):
        d.line(tick, 0, tick, len(names), "grid")
        d.text(tick, len(names), f"{tick:+g}".replace("-", "−") if tick else "0", "m dim", "0 18")
    d.line(0, 0, 0, len(names), "down thin")
    for i, (name, pair) in enumerate(found.items()):
        d.text(low, i + 0.5, lines.ROWS[name].fields["short"], "e", "-10 0")
        for one, kind, y in zip(pair, ("with", "also"), (i + 0.32, i + 0.68)):
            d.line(one.predicted[0], y, one.predicted[1], y, f"{kind} predicted")
            d.line(*one.interval[:1], y, one.interval[1], y, kind)
            d.dot(one.difference, y, kind)
    return d.svg(WIDTH, height, "Differences from nano.py in the share of right outputs at the end")


def effect_cells(one):
    """Write an effect, and what we predicted. -> cells"""
    low, high = one.interval
    texts = [f"{x:+.1f}".replace("-", "−") for x in (one.difference, low, high)]
    return [f"{fmean(one.shares):.1%}",
            f"{texts[0]} ({texts[1]} to {texts[2]}); predicted: {one.words}"]


def effects_table(names):
    """List the rows whose runs are complete. -> head, rows of cells"""
    head = ["change", "steps, outputs, passes", f"outputs until {lines.LEVEL:.0%} are right"]
    for at in (rate(1), "its best rate"):
        head += [f"right at the end, at {at}", "difference in points (95% interval)"]
    rows = []
    for name in names:
        row = lines.ROWS[name]
        shared, own = lines.effects(name)
        compared = lines.against(name)
        title = row.fields["short"]
        title += f" (compared with {lines.ROWS[compared].fields['short']})" if (
            compared not in ("", "nano")) else ""
        cells = [effect_cells(one) if compared else [f"{fmean(one.shares):.1%}", ""]
                 for one in (shared, own)]
        cells[1][0] += f" ({rate(own.factor)})"
        rows.append([f"{title}: {row.fields['change']}",
                     setting_of(row.steps, row.steps * lines.OUTPUTS,
                                lines.passes(lines.source(name))),
                     lines.outputs_until(name, 1), *cells[0], *cells[1]])
    return head, rows


def shown_rows():
    """List the rows of lines.txt that are compared with another one and complete. -> names"""
    return [name for name in lines.complete() if lines.against(name)]


def outcomes(names):
    """List what the chapter of a line is for, if the line makes no difference here. -> texts"""
    return [lines.ROWS[name].fields["outcome"].replace("\n", " ") for name in names
            if "outcome" in lines.ROWS[name].fields]


def head_of_lines():
    """Build the head of the path: nano.py without each of its lines. -> HTML; "" if no row is
    complete"""
    if not shown_rows():
        return ""
    top = CHAPTERS[BASE].fields
    head, rows = effects_table(lines.complete())
    notes = "".join(prose(text, BASE) for text in outcomes(lines.complete()))
    return (f"<h2 id=lines>{top['headline']}</h2>{prose(top['lines'], BASE)}"
            f"<figure class=effects>{effects_chart(shown_rows())}"
            f"<figcaption>{top['caption']}</figcaption></figure>"
            f"<div class=wide>{grid(head, rows)}</div>{notes}")


def lines_in_markdown():
    """Write the same table. -> Markdown; "" if no row is complete"""
    if not shown_rows():
        return ""
    top = CHAPTERS[BASE].fields
    head, rows = effects_table(lines.complete())
    lined = "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
    notes = "".join(f"{fill(text, BASE)}\n\n" for text in outcomes(lines.complete()))
    return (f"## {top['headline']}\n\n{fill(top['lines'], BASE)}\n\n{lined}\n\n{notes}"
            "## The rungs\n\n")


def setting_of(steps, outputs, num_passes):
    """Write what an experiment costs, as far as it is measured. -> str"""
    count = "" if outputs is None else f"{outputs:,.0f} outputs, "
    return f"{steps} steps, {count}{num_passes} {'pass' if num_passes == 1 else 'passes'}"


# ---- the page --------------------------------------------------------------------------------
FOLDED = {"! ": "What we saw", "+ ": "More"}       # how a paragraph begins -> its summary


def prose(text, name):
    """Turn paragraphs with *emphasis*, `code`, [links](to), symbols and placeholders into HTML. A
    paragraph that begins with ! is an answer, and one that begins with + is a detail; both are
    folded. A paragraph with a number that is not measured yet is left out."""
    paragraphs = []
    for part in text.split("\n\n"):
        mark = part[:2] if part[:2] in FOLDED else ""
        words = part.removeprefix(mark).split()
        try:
            inner = page.prose(fill(" ".join(words), name), None, has_links=False)
        except measure.NotMeasured:
            continue
        inner = re.sub(r"(<code>.*?</code>)|\*([^*<>]+)\*",
                       lambda match: match[1] or f"<em>{match[2]}</em>", inner)
        # a line must not break between a symbol and the punctuation next to it
        inner = re.sub(r"\(?<math>.*?</math>[.,:;)?]*", r"<span class=w>\g<0></span>", inner)
        paragraphs.append((mark, f"<p>{inner}</p>"))
    text = ""
    for mark, group in itertools.groupby(paragraphs, key=operator.itemgetter(0)):
        inner = "".join(paragraph for _, paragraph in group)
        text += folded(FOLDED[mark], inner, "ask") if mark else inner
    return text


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
    """Build the part of a chapter in which each side has its own best rate. -> HTML; "" if it is
    not measured yet"""
    field = CHAPTERS[name].fields
    if "fair" not in field or not measure.is_measured(name):
        return ""
    labels = CHAPTERS[name].labels
    rows = [(html.escape(labels[side]), f"{{{side} %last}}",
             f"{{{side} best %last}} at {rate(factor)}")
            for side, factor in best(name).items()]
    head = ["right outputs at the end", f"at {rate(1)}", "at the best rate"]
    return ("<h3>With the best learning rate for each side</h3>"
            + fill(grid(head, rows), name) + prose(field["fair"], name))


def predicted(name):
    """Write what we predicted for a chapter, if it is measured, and what one has to know of its
    runs. -> HTML"""
    if name == LAST:                                    # which has no runs
        return ""
    field = CHAPTERS[name].fields
    known = field.get("caveat", "")
    if not measure.is_measured(name):
        known = CHAPTERS[BASE].fields["unmeasured"]
    return prose(f"{known} Our prediction before the runs: {field['predicted']}.".strip(), name
                 ).replace("<p>", "<p class=more>", 1)


def playground(name):
    """Embed the playground's training with the first lever for this rung. -> HTML, or """""
    lever = re.search(rf'name: "([^"]*)", rung: "{CHAPTERS[name].anchor}", set: {{(.*?)}}',
                      LEVERS, re.S)
    if lever is None:
        return ""
    settings = urlencode(re.findall(r'(\w+): "([^"]*)"', lever[2])).replace("&", "&amp;")
    frame = (f'<iframe title="{lever[1]}" data-src="play.html?figure#{settings}"></iframe>'
             '<p class=more><a href="play.html#break">other changes, in the playground</a></p>')
    # the frame loads when it is opened
    return folded(f"Train in this page: {lever[1]}", frame, "ask").replace(
        "<details", f'<details ontoggle="{LOAD}"', 1)


def commands(name):
    """Write how to run the change of an exercise, with the seed of its answer. -> HTML"""
    one = CHAPTERS[name]
    changed = one.fields.get("changed", "with").split()
    runs = " and ".join(f"<code>python -m learn.path run path/{one.stem}_{side}.py --seed "
                        f"{measure.EXERCISE_SEED}</code>" for side in changed)
    return (f"<p class=more>Write the scripts with <code>python -m learn.path write {one.number}"
            f"</code>, and run what you changed with {runs}.</p>") if changed else ""


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
    known = numbered(name) if name in RUNGS else {}
    lefts = {text.split(" = ")[0]: text for text in field["equation"].split("\n")}
    equations = "".join(equation(text, known.get(left, [""])[0]) for left, text in lefts.items())
    pictures = field.get("picture", "").splitlines()
    if pictures and not measure.is_measured(name):
        pictures = []
    drawn = [f"<figure>{svg}<figcaption>{inline(title)}</figcaption></figure>"
             for svg, title in (chart(name, line) for line in pictures)]
    charts = "".join(drawn[:1])
    if drawn[1:]:
        charts += folded("More", "".join(drawn[1:]), "ask")
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
        quoted = re.findall(r"eq\. \((\d+)\)", "\n".join(diff(name)))
        others = [equation(text, number) for left, (number, text) in known.items()
                  if number in quoted and left not in lefts]
        if others:
            shown += f"<p class=more>The patch also quotes:</p>{''.join(others)}"
    asked, _, answer = field["question"].partition("\n\n")
    names = [*RUNGS, LAST]
    at = names.index(name)
    turn = [*("← " + link(other) for other in names[:at][-1:]), '<a href="#rungs">all rungs</a>',
            *(link(other) + " →" for other in names[at + 1:at + 2])]
    return CHAPTER.substitute(
        {key: say(field[key]) or "<p>This is not measured yet.</p>"
         for key in ("pain", "idea", "relief", "hurts")},
        anchor=CHAPTERS[name].anchor, number=number, title=inline(field["title"]), changes=changes,
        equations=equations, results=results, question=folded(inline(asked), say(answer), "ask"),
        exercise=exercise(name) + playground(name), charts=charts, shown=shown, command=command,
        more=inline(field["more"]), predicted=predicted(name), turn="</span><span>".join(turn))


def exercise(name):
    """Build an exercise: what to do, the commands, and what we saw. -> HTML"""
    asked, *answers = CHAPTERS[name].fields["try"].split("\n\n! ")
    how = commands(name) if name in RUNGS else ""
    return prose(asked, name) + how + "".join(prose(f"! {answer}", name) for answer in answers)


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
    each with a verdict, which is empty if the patch is ahead on all seeds, and what else was
    measured. Rungs that are not measured yet have no verdict."""
    verdict = {wins: f"better on {wins} of {len(SEEDS)} seeds" for wins in range(len(SEEDS))}
    verdict |= {0: "worse", len(SEEDS): ""}
    for name in RUNGS:
        field = CHAPTERS[name].fields
        if not measure.is_measured(name):
            yield (field.get("branch"), name, counts(name), conditions(name),
                   ("not measured yet", None), ("", None), "")
            continue
        pairs = [(fill("{with %first} → {with %last}", name), ""), ("", "")]
        if name != RUNGS[0]:                        # before which nothing is trained
            pairs = [(fill(f"{{without{at} %last}} → {{with{at} %last}}", name),
                      verdict[wins(name, at)]) for at in ("", " best")]
        yield (field.get("branch"), name, counts(name), conditions(name), *pairs,
               fill(field.get("besides", ""), name))


def has_other_rewards(name):
    """Whether the setting of a chapter rewards something that the verifier does not see."""
    setting = CHAPTERS[name].fields.get("setting", "")
    return re.search(r"^\+ +rewards\b(?!.*verify)", setting, re.M) is not None


def conditions(name):
    """Write the steps, outputs and passes of a chapter, and its setting. -> str"""
    field = CHAPTERS[name].fields
    chosen = [side for side in ("without", "with") if sides(name)[side] != script(BASE)]
    steps, num_passes = CHAPTERS[name].steps, lines.passes(sides(name)["with"])
    if measure.is_measured(name):
        outputs = [fmean(value(one, "samples") for one in runs_at(name, side)) for side in chosen]
        text = setting_of(steps, outputs[0], num_passes)
        if outputs[0] != outputs[-1]:
            text = text.replace(" outputs", f" → {outputs[-1]:,.0f} outputs")
    else:
        text = setting_of(steps, None, num_passes)
    parts = [text, "another reward" if has_other_rewards(name) else "", field.get("where", "")]
    return "; ".join(filter(None, parts))


def mathematics():
    """Build the page of mathematics before rung 1, with the numbers of worked.py. -> HTML"""
    steps = ("J = sum_o pi(o) r(o)", "grad J = sum_o r(o) grad pi(o)",
             "grad J = sum_o pi(o) r(o) grad log pi(o)",
             "grad J = mean(r(o) grad log pi(o))")
    loss = "L = -1/B sum_i r_i log pi(o_i)"
    head = ["output", "reward r", "log π", "π", "derivative of log π", "π r times it"]
    blocks = {"$table": f"<div class=wide>{grid(head, worked.rows())}</div>",
              "$equations": "".join(map(equation, steps)), "$loss_equation": equation(loss)}
    body = ""
    for part in CHAPTERS[BASE].fields["worked"].split("\n\n"):
        body += blocks.get(part) or prose(Template(part).substitute(worked.values()), BASE)
    return (f"<section class=rung id=mathematics><h2>{CHAPTERS[BASE].fields['first']}</h2>{body}"
            "</section>")


def equation(text, number=""):
    """Typeset an equation, with its number in the docstring. -> HTML"""
    kinds = "eq long" if len(text) > 50 else "eq"
    whole = paper.math(text, ' displaystyle=true')
    shown = f"<span>({number})</span>" if number else ""
    return f'<div class="{kinds}"><div>{whole}</div>{shown}</div>'


def numbered(name):
    """Read the numbered equations of the docstring of a rung. -> {left side: (number, equation)}"""
    found = re.findall(r"^  (\S+)( += .*?) +\((\d+)\)$", script(name).split('"""')[1], re.M)
    return {left: (number, re.sub(" +", " ", left + rest)) for left, rest, number in found}


def build():
    """Build docs/path.html. -> HTML"""
    top = CHAPTERS[BASE].fields
    rows = ""
    for branch, name, *cells, shared, own, besides in table():
        if branch:
            rows += f"<tr><th colspan=6>{branch}</th></tr>"
        for text, judged in (shared, own):
            kind = {"": "better", "worse": "worse"}.get(judged, "")
            note = f" <small>{judged}</small>" if judged else ""
            cells.append(text and f"<span class='{kind}'>{text}</span>{note}")
        kind = " class=apart" if has_other_rewards(name) else ""
        rows += f"<tr{kind}><td>{'</td><td>'.join([link(name), *cells, besides])}</td></tr>"
    names = [*RUNGS, LAST]
    body = PAGE.substitute(
        {key: prose(top[key], BASE) for key in ("lead", "places", "after", "onward")},
        title=top["title"], rate=rate(1), rows=rows,
        lines=head_of_lines(), example=mathematics(),
        links="".join(map(link, names)), chapters="".join(chapter(name) for name in names))
    return look.document(top["title"], top["description"].replace("\n", " "), body, "../",
                         "The path", STYLES, "path")


def build_markdown(title):
    """Build docs/path.md: path.svg, unless its title is empty, a table of the rungs, whose anchors
    are those of path.html, and what fits real.py. -> Markdown"""
    top = CHAPTERS[BASE].fields
    rows = ""
    for branch, name, *cells, shared, own, besides in table():
        one = CHAPTERS[name]
        rows += f"| **{branch}** | | | | | | |\n" if branch else ""
        cells += [f"{text} ({judged})" if judged else text for text, judged in (shared, own)]
        cells[1] = cells[1].replace("another reward", "*another reward*")
        rung = f'<a id="{one.anchor}"></a>{one.number}. {one.fields["short"]}'
        rows += f"| {' | '.join([rung, one.fields['hook'], *cells, besides])} |\n"
    last = CHAPTERS[LAST].fields
    picture = f"![{title}](path.svg)\n\n" if title else ""
    offer = re.sub(r"^\+ ", "", last["offer"], flags=re.M)
    return (f"# {top['title']}\n\n{fill(top['lead'], BASE)}\n\n{top['here']}\n\n"
            f"{lines_in_markdown()}{fill(top['stand'], BASE)}\n\n"
            f"{picture}"
            "| rung | what hurts | lines | setting | right outputs at 5e-4, without → with "
            "| each at its best rate | also measured |\n"
            f"| --- | --- | --- | --- | --- | --- | --- |\n{rows}\n## A real model\n\n"
            f"{last['hook']}\n\n{fill(offer, LAST)}\n")


def write():
    """Write docs/path.html, docs/path.md and, if its chapter is measured, docs/path.svg."""
    title = ""
    if measure.is_measured(COVER):
        picture, title = chart(COVER, CHAPTERS[COVER].fields["picture"].split("\n")[0])
        # An SVG in a page knows only its own width. Larger letters need room on the left, too
        style = look.small(look.COLOURS + look.CHART
                           + "@media (max-width: 450px) { svg text { font-size: 17.5px } }")
        picture = picture.replace(">", f"><style>{style}</style>", 1)
        picture = picture.replace('viewBox="0 0', 'viewBox="-12 0')
        (DOCS / "path.svg").write_text(picture, encoding="utf-8")
    for name, text in (("path.html", build()), ("path.md", build_markdown(title))):
        (DOCS / name).write_text(text, encoding="utf-8")
