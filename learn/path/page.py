"""Write docs/path/: a page and a script for each chapter, and their pictures, from chapters.txt,
lines.txt and the runs in docs/path.json and docs/lines.json."""
import itertools
import math
import operator
import re
import urllib.parse
from statistics import fmean, stdev

from learn import look
from learn.path import lines, measure, sketches, worked
from learn.path.latex import latex
from learn.path.measure import CHOICE, FACTORS, RATE, SEEDS, best, ends, runs_at, value
from learn.path.rungs import (
    AGENT,
    BASE,
    CHAPTERS,
    LAST,
    REAL_RUNGS,
    ROOT,
    RUNGS,
    counts,
    diff,
    script,
    sides,
)

FOLDER = ROOT / "docs" / "path"
PIECES = "mean"             # the chapter after which the path sums up what each piece is for
MOST_LINES = 60             # of a patch that a page shows
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 236, 46, 124, 12, 30
# An SVG in a page knows only its own width. Larger letters need room on the left, too.
STYLE = look.small(look.COLOURS + look.CHART
                   + "@media (max-width: 450px) { svg text { font-size: 17.5px } }")
EXPERIMENTS = (ROOT / "learn" / "play" / "experiments.js").read_text(encoding="utf-8")
PENDING = "This is not measured yet."
NUMBER = re.compile(r"\{(?:(?P<of>[a-z]+)\.)?(?P<side>without|with|also|fourth)"
                    r"(?: (?P<best>best))?(?: seed (?P<seed>\d))? "
                    r"(?P<percent>%?)(?P<name>[a-z_]+)(?: as (?P<form>\S+?))?\}")
GREEK = "pi|rho|beta|gamma|delta|theta"
# a formula: `$...$`, or a symbol with an index or a call; code and the targets of links stay
FORMULA = re.compile(rf"""`[^`]*`|\]\([^)]*\)|\$(?P<given>[^$]+)\$
    |(?<![\w.\\/-])(?P<symbol>(?:log\ )?(?:(?:[A-Za-z]|KL|{GREEK})_<?\w+|(?:{GREEK})\b)
        (?:\([^()`]*\))?)""", re.X)


# ---- numbers -----------------------------------------------------------------------------------
def fill(text, here):
    """Replace {with %last} by a mean over the seeds, and {clip} by its rung's number.
    {with best %last} is at the best rate of the side, {with seed 0 %last} is of one seed, and
    {group.with %last} is of another chapter.
    {=EXPRESSION} is evaluated in worked.py. -> str"""
    def number(match):
        side = match["side"]
        of = match["of"] or here
        seeds = [int(match["seed"])] if match["seed"] else SEEDS
        factor = best(of)[side] if match["best"] else 1
        runs = runs_at(of, side, seeds, factor)
        if match["name"] == "text":                     # an output of the last step with seed 0
            return f"`{runs[0]['text']}`"
        x = fmean(value(one, match["name"]) for one in runs)
        if not math.isfinite(x):
            raise ValueError(f"chapter {of}: {match[0]} is {x}")
        return f"{100 * x:.0f}%" if match["percent"] else f"{x:{match['form'] or '.2f'}}"
    text = re.sub(r"\{wins( best)?\}", lambda match: str(wins(here, match[1])), text)
    on_real = sorted(CHAPTERS[name].number for name in REAL_RUNGS if name != AGENT)
    names = vars(worked) | {"grid": grid, "stdev": stdev, "on_real": words(on_real)}
    text = re.sub(r"\{=(.+?)(?: as (\S+?))?\}",
                  lambda match: format(eval(match[1], names), match[2] or ""), text)
    text = re.sub(r"\{(\w+)\}", lambda match: str(CHAPTERS[match[1]].number), text)
    return NUMBER.sub(number, text)


def words(items):
    """Join items as a sentence does: 1, 2 and 3. -> str"""
    return " and ".join([", ".join(map(str, items[:-1])), str(items[-1])])


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
def chart(name):
    """Draw a metric of all sides over the steps, with thin lines for seeds and a thick one for
    their mean. The field @picture is `METRIC | title | range=0 1 | without=label | with=label`.
    With x=rate the axis has the learning rates. -> SVG, title"""
    text = fill(CHAPTERS[name].fields["picture"], name)
    metric, title, *options = (part.strip() for part in text.split("|"))
    options = dict(option.split("=", 1) for option in options)
    has_rates = options.get("x") == "rate"
    curves = {side: series(name, side, metric, has_rates) for side in sides(name)
              if side in options}
    places = [place for rows in curves.values() for row in rows for place in row]
    last = max(x for x, _ in places)
    low, high = map(float, options.get("range", f"0 {max(y for _, y in places)}").split())
    d = look.Drawing(look.scale(0, last, LEFT, WIDTH - RIGHT),
                     look.scale(low, high, HEIGHT - BOTTOM, TOP))
    in_percent = options.get("range") == "0 1"
    levels = {tick: f"{100 * tick:.0f}%" if in_percent else f"{tick:g}".replace("-", "−")
              for tick in look.ticks(low, high)}
    marks = {0: "step 0", last: f"{last}"}
    if has_rates:
        marks = dict(enumerate(map(rate, FACTORS)))
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
    return styled(d.svg(WIDTH, HEIGHT, title)), title


def series(name, side, metric, has_rates):
    """List the curves of a side, one per seed. -> list of lists of (x, y)"""
    if has_rates:
        by_rate = [runs_at(name, side, CHOICE, factor) for factor in FACTORS]
        return [[(i, value(one, metric)) for i, one in enumerate(runs)] for runs in zip(*by_rate)]
    return [[*enumerate(one["steps"][metric])] for one in runs_at(name, side)]


def styled(svg):
    """Give an SVG the style that it needs as a file. -> SVG"""
    return svg.replace(">", f"><style>{STYLE}</style>", 1).replace('viewBox="0 0', 'viewBox="-12 0')


# ---- text --------------------------------------------------------------------------------------
def prose(text, name):
    """Fill in the numbers of paragraphs, and convert their formulas and the rungs that they name. A
    paragraph that begins with ! is an answer, and is folded. A paragraph in $$ is an equation. One
    with a number that is not measured yet is left out. -> Markdown"""
    paragraphs = []
    for part in text.split("\n\n"):
        mark = "! " if part.startswith("! ") else ""
        part = part if part.startswith("|") else " ".join(part.split())
        part = re.sub(r"^~ (\w+) \| (.*)", r"![drawing](\1.svg)\n\n*\2*", part)
        part = re.sub(r"([Rr]ung) \{(\w+)\}", lambda match: link(match[2], f"{match[1]} "), part)
        try:
            text = fill(part.removeprefix(mark), name)
            text = equation(text[2:-2]) if text.startswith("$$") else FORMULA.sub(formula, text)
            paragraphs.append((mark, text))
        except measure.NotMeasured:
            continue
    found = []
    for mark, group in itertools.groupby(paragraphs, key=operator.itemgetter(0)):
        inner = "\n\n".join(paragraph for _, paragraph in group)
        found.append(fold("What we saw", inner) if mark else inner)
    return "\n\n".join(found)


def formula(match):
    """Typeset what FORMULA found within a line. -> Markdown"""
    text = match["given"] or match["symbol"]
    return f"$`{latex(text, has_fractions=False)}`$" if text else match[0]


def equation(text, number=""):
    """Typeset an equation, with its number in the docstring. -> Markdown"""
    tag = rf" \qquad ({number})" if number else ""
    return f"```math\n{latex(text)}{tag}\n```"


def numbered(name):
    """Read the numbers of the equations in the docstring of a rung. -> {left side: number}"""
    docstring = script(name).split('"""')[1]
    return dict(re.findall(r"^  (\S+) += .*? +\((\d+)\)$", docstring, re.M))


def fold(summary, body):
    """Fold Markdown. Its summary is HTML, in which only `code` is converted. -> Markdown"""
    summary = re.sub("`(.*?)`", r"<code>\1</code>", " ".join(summary.split()))
    return f"<details>\n<summary>{summary}</summary>\n\n{body}\n\n</details>"


def patch_block(name):
    """Show the patch of a rung, unless it is too long to be read as a diff. -> Markdown"""
    changed = diff(name)
    if len(changed) > MOST_LINES:
        return "This patch is long, so read the script."
    shown = "\n".join("@@" if line.startswith("@@") else line for line in changed)
    return "```diff\n" + shown.removeprefix("@@\n") + "\n```"


def grid(head, rows):
    """Make a table. -> Markdown"""
    top, *others = (f"| {' | '.join(row)} |" for row in (head, *rows))
    return "\n".join([top, "|---" * len(head) + "|", *others])


def link(name, before=""):
    """Link to a chapter, by its number or, without text before it, also by its name. -> Markdown"""
    one = CHAPTERS[name]
    text = f"{before}{one.number}" if before else f"{one.number}. {one.fields['short']}"
    return f"[{text}]({one.page})"


# ---- a chapter ---------------------------------------------------------------------------------
def turn(name):
    """Link to the pages before and after a page. -> Markdown"""
    at = [*order()].index(name)
    before, _, after = ["", *order().values(), ""][at:at + 3]
    return " · ".join(filter(None, [before and f"←\u00a0{before}", "[the path](README.md)",
                                    after and f"{after}\u00a0→"]))


def setting(name):
    """Say in what the scripts of a chapter differ from those of the path. -> Markdown"""
    field = CHAPTERS[name].fields
    notes = [field[key] for key in ("note", "note_without", "note_also") if key in field]
    return prose(" ".join(["*Setting:*", *notes]), name) if notes else ""


def rates(name):
    """Show the results at the best rate of each side, and what we predicted. -> Markdown"""
    field = CHAPTERS[name].fields
    said = prose(f"{field.get('caveat', '')} We predicted: {field['predicted']}.".strip(), name)
    if not measure.is_measured(name):
        return fold("Our prediction", said)
    found = [f"{CHAPTERS[name].labels[side]} {{{side} best %last}} at {rate(factor)}"
             for side, factor in best(name).items()]
    measured = prose(f"Right: {'; '.join(found)}. {field['fair']}", name)
    return fold("Best rates and prediction", f"{measured}\n\n{said}")


def exercise(name):
    """Write what to try, with the commands that run it with the seed of its answer. -> Markdown"""
    one = CHAPTERS[name]
    asked, *answers = one.fields["try"].split("\n\n! ")
    parts = [prose(asked, name)]
    if name in RUNGS:
        parts.append(f"`python -m learn.path {one.number}` runs this chapter.")
        runs = " and ".join(f"`python -m learn.path run path/{one.stem}_{side}.py`"
                            for side in one.fields.get("changed", "with").split())
        parts[-1] += f" To run your change: {runs}." if runs else ""
    parts += [prose(f"! {answer}", name) for answer in answers]
    if experiment := re.search(rf'name: "([^"]*)", rung: "{one.page[:-3]}", set: {{(.*?)}}',
                               EXPERIMENTS):
        settings = urllib.parse.urlencode(re.findall(r'(\w+): "(.*?)"', experiment[2]))
        parts.append(f"Or in [the playground](../play.html#{settings}): *{experiment[1]}*.")
    return "\n\n".join(parts)


def picture(name):
    """Draw the picture of a chapter, if it is measured. -> {name of its file: (SVG, title)}"""
    if not measure.is_measured(name):
        return {}
    return {CHAPTERS[name].page.replace(".md", ".svg"): chart(name)}


def chapter(name):
    """Write the page of a chapter: the text, the pictures and the patch. -> Markdown"""
    one = CHAPTERS[name]
    field = one.fields
    say = lambda key: prose(field[key], name) or PENDING
    known = numbered(name) if name != LAST else {}
    equations = [equation(text, known.get(text.split(" = ")[0], ""))
                 for text in field["equation"].split("\n")]
    does = ["## What it does", say("relief")]
    size = script(name).count("\n")
    patch = ["## The patch", f"[{one.stem}.py]({one.stem}.py), {size} lines, {counts(name)}",
             patch_block(name), *does]
    if "gaps" in field:
        head, *rows = (line.split(" | ") for line in field["gaps"].split("\n"))
        offer = ["## The rungs on a real model", say("offer")] if name == LAST else []
        patch = [*(does if name == LAST else patch), grid(head, rows), *offer]
        if "turns" in field:
            patch += ["## A reward for each turn", say("each"), f"```diff\n{field['turns']}\n```"]
    else:
        shown = [f"![chart]({file})\n\n*{title}*" for file, (_, title) in picture(name).items()]
        patch[-1:] = [*shown, patch[-1], rates(name)]
    asked, _, answer = field["question"].partition("\n\n")
    return "\n\n".join(filter(None, [
        f"# {one.number}. {fill(field['title'], name)}", say("pain"), setting(name),
        "## The idea", say("idea"), *equations, *patch, "## What still hurts", say("hurts"),
        fold(fill(asked, name), prose(answer, name)), "## Try it", exercise(name),
        f"More: {prose(field['more'], name)}", turn(name)])) + "\n"


def mathematics():
    """Write the page of mathematics before rung 1, with the numbers of worked.py. -> Markdown"""
    top = CHAPTERS[BASE].fields
    return "\n\n".join([f"# {top['first']}", prose(top["worked"], BASE), turn(BASE)]) + "\n"


# ---- nano.py without each of its lines ---------------------------------------------------------
def effect(one):
    """Write an effect with its interval, and in brackets what we predicted. -> str"""
    wrong = "; contradicted" * one.is_contradicted()
    return "{:+.1f} ({:+.1f} to {:+.1f}) [{:g}…{:g}]{}".format(
        one.difference, *one.interval, *one.predicted, wrong).replace("-", "−")


def table_of_lines(names):
    """List the effects of the rows of lines.txt, and what we predicted. -> Markdown"""
    found = []
    for name in names:
        row = lines.ROWS[name]
        effects = lines.effects(name)
        compared = lines.against(name)
        title = f"**{row.fields['short']}**"
        title += f" (compared with {lines.ROWS[compared].fields['short']})" if (
            compared not in ("", "nano")) else ""
        cells = [effect(one) if compared else f"{fmean(one.shares):.1%}" for one in effects]
        cells += ["not measured yet"] * (len(lines.predicted(name)) - len(cells))
        found.append([f"{title}: {row.fields['change']}", *cells, *[""] * (3 - len(cells)),
                      row.fields.get("even", "")])
    ats = [f"at {rate(1)}", *(f"at the best rates{judge}" for judge in (
        "", ", under the judge", ", under an evenly strict judge"))]
    return fold("All differences in points, with what we predicted in brackets",
                grid(["change", *ats], found))


def pieces():
    """Write the page after nano.py: what each piece is for, and nano.py without each of its lines.
    -> Markdown"""
    top = CHAPTERS[BASE].fields
    body = [f"# {top['sum_up']}", prose(top["pieces"], BASE)]
    complete = lines.complete()
    if any(map(lines.against, complete)):
        body += [prose(top["lines"], BASE), table_of_lines(complete)]
    return "\n\n".join([*body, turn("pieces")]) + "\n"


# ---- all pages ---------------------------------------------------------------------------------
def order():
    """List all pages of the path in their order. -> {name: link}"""
    found = {}
    top = CHAPTERS[BASE].fields
    for name in (*RUNGS, LAST, AGENT):
        found[name] = link(name)
        if name == RUNGS[0]:
            found[BASE] = f"[{top['first']}](gradient.md)"
        if name == PIECES:
            found["pieces"] = f"[{top['sum_up']}](pieces.md)"
    return found


def results(name):
    """Write the share of right outputs without and with the patch, at nano.py's rate and at the
    best rate of each side, with a verdict unless the patch is ahead on all seeds. If the next rung
    repairs what this one breaks, it follows in the same row. -> two cells"""
    repair = CHAPTERS[name].fields.get("repair", name)
    if not measure.is_measured(name) or not measure.is_measured(repair):
        return ["not measured yet", ""]
    if "without" not in measure.trained(name):              # which is the base
        return [fill("{with %first} → {with %last}", name), fill("→ {with best %last}", name)]
    verdict = {n: f" (ahead on {n} of {len(SEEDS)})" for n in range(len(SEEDS))}
    then = [fill(f" → {{with{at} %last}}", repair) * (repair != name) for at in ("", " best")]
    return [fill(f"{{without{at} %last}} → {{with{at} %last}}", name) + end
            + verdict.get(wins(repair, at), "") for at, end in zip(("", " best"), then)]


def index():
    """Write the index of all pages. -> Markdown"""
    top = CHAPTERS[BASE].fields
    rows = []
    repairs = {CHAPTERS[name].fields.get("repair") for name in RUNGS}
    for name, linked in order().items():
        field = CHAPTERS[name].fields if name in CHAPTERS else {"hook": top["sum_up_hook"]}
        if name in repairs:
            continue
        linked += f", {link(field['repair'])}" if "repair" in field else ""
        if "branch" in field:
            rows.append([f"**{field['branch']}**", "", "", ""])
        cells = results(name) if name in RUNGS else ["", ""]
        rows.append([linked, field["hook"], *cells])
    head = ["rung", "what hurts", f"right outputs at {rate(1)}, without → with",
            "each at its best rate"]
    return "\n\n".join([f"# {top['title']}", prose(top["lead"], BASE), grid(head, rows),
                        prose(top["onward"], BASE)]) + "\n"


def made():
    """Make all files of docs/path/. -> {name: text}"""
    files = {"README.md": index(), "gradient.md": mathematics(), "pieces.md": pieces()}
    files |= {CHAPTERS[name].page: chapter(name) for name in (*RUNGS, LAST, AGENT)}
    files |= {f"{CHAPTERS[name].stem}.py": script(name) for name in (*RUNGS, AGENT)}
    files |= sketches.made()
    return files | {file: svg for name in RUNGS for file, (svg, _) in picture(name).items()}


def write():
    """Write docs/path/, and delete files there that are no longer made."""
    files = made()
    for path in FOLDER.iterdir():
        if path.name not in files:
            path.unlink()
    for name, text in files.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
