"""Build docs/path.html and docs/path.md from chapters.txt and the runs in docs/path.json."""
import html
import math
import re
from pathlib import Path
from statistics import fmean

from learn.path.measure import runs_of, value
from learn.path.rungs import BASE, CHAPTERS, ROOT, RUNGS, counts, diff, script
from learn.read import code, page, paper

DOCS = ROOT / "docs"
NANO = "mean"               # the rung that is nano.py; later ones are side roads
COVER = "clip"              # the chapter whose picture README shows
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 236, 46, 112, 12, 30
NUMBER = re.compile(r"\{(?:(\w+) )?(without|with|also|fourth) (%?)([a-z_]+(?: [\d.]+)?)(?: as (\S+?))?\}")
STYLE = """text{font:13px system-ui,sans-serif;fill:currentColor}.end{text-anchor:end}
path{fill:none;stroke:currentColor}.grid{stroke-dasharray:2 4;opacity:.4}.thin{opacity:.45}
.mean{stroke-width:2.6}
.fourth.mean{stroke-dasharray:3 4}text[class*=h]{font-weight:600}.also,.fourth{color:#a9640c}.with{color:#1f5a9d}
.ink,.without{color:#75716a}@media(prefers-color-scheme:dark){.also,.fourth{color:#e0a458}
.with{color:#8ab8ee}.ink,.without{color:#a09c94}}"""


def fill(text, here, stored):
    """Replace {with %last} by a mean over the seeds, and {clip} by the number of a rung. -> str"""
    def number(match):
        chapter, side, percent, name, form = match.groups()
        runs = runs_of(chapter or here, stored)[side]
        if name == "text":                              # an output of the last step, of seed 0
            return f"`{runs[0]['text']}`"
        x = fmean(value(one, name) for one in runs)
        if not math.isfinite(x):
            raise ValueError(f"chapter {here}: {match[0]} is {x}")
        return f"{100 * x:.0f}%" if percent else f"{x:{form or '.2f'}}"
    text = re.sub(r"\{(\w+)\}", lambda match: str(CHAPTERS[match[1]].number), text)
    return NUMBER.sub(number, text)


# ---- a picture -------------------------------------------------------------------------------
def chart(name, stored, line):
    """Draw a metric of all sides over the steps: thin lines for seeds, a thick one for their mean.
    line: `METRIC | title | range=0 1 | without=label | with=label`, and x=samples. -> SVG, title"""
    metric, title, *options = (part.strip() for part in fill(line, name, stored).split("|"))
    options = dict(option.split("=", 1) for option in options)
    curves = {side: [points(one, metric, options) for one in runs]
              for side, runs in runs_of(name, stored).items() if side in options}
    places = [place for rows in curves.values() for row in rows for place in row]
    last = max(x for x, _ in places)
    low, high = map(float, options.get("range", f"0 {max(y for _, y in places)}").split())
    edge, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    spot = lambda x, y: (LEFT + (edge - LEFT) * x / last,
                         floor - (floor - TOP) * (min(y, high) - low) / (high - low))
    parts = [f'<text x="{LEFT}" y="{HEIGHT - 8}">{"output" if "x" in options else "step"} 0</text>'
             f'<text class="end" x="{edge}" y="{HEIGHT - 8}">{last:,.0f}</text>']
    for quarter in range(5):
        tick = low + (high - low) * quarter / 4
        label = f"{100 * tick:.0f}%" if options.get("range") == "0 1" else f"{tick:.2g}"
        parts.append(f'<path class="grid" d="M{LEFT} {spot(0, tick)[1]:.1f}H{edge}"/><text class="end"'
                     f' x="{LEFT - 6}" y="{spot(0, tick)[1] + 4:.1f}">{label}</text>')
    ends = {}
    for side, rows in curves.items():
        mean = [[fmean(axis) for axis in zip(*row)] for row in zip(*rows)]
        for row, kind in [*((row, "thin") for row in rows), (mean, "mean")]:
            steps = "L".join("{:.1f} {:.1f}".format(*spot(x, y)) for x, y in row)
            parts.append(f'<path class="{side} {kind}" d="M{steps}"/>')
        ends[side] = list(spot(*mean[-1]))
    order = sorted(ends, key=lambda side: ends[side][1])
    for upper, lower in [*zip(order, order[1:])] * 9:           # push labels apart
        short = max(0, 16 - (ends[lower][1] - ends[upper][1]))
        ends[upper][1] -= short / 2
        ends[lower][1] += short / 2
    parts += [f'<text class="{side}" x="{x + 6:.1f}" y="{y + 4:.1f}">{html.escape(options[side])}</text>'
              for side, (x, y) in ends.items()]
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" class="ink" '
            f'role="img" aria-label="{html.escape(title)}"><style>{STYLE}</style>'
            f"{''.join(parts)}</svg>", title)


def points(one, metric, options):
    """List the points of a stored run; x=samples counts outputs. -> list of (x, y)"""
    ys = one["steps"][metric]
    samples = one["steps"]["samples"]
    return [(sum(samples[:i + 1]) if "x" in options else i, y) for i, y in enumerate(ys)]


# ---- the page --------------------------------------------------------------------------------
def prose(text, name, stored):
    """Turn paragraphs with *emphasis*, `code`, [links](to), symbols and placeholders into HTML."""
    paragraphs = ""
    for part in text.split("\n\n"):
        told = page.prose(" ".join(fill(part, name, stored).split()), None, has_links=False)
        told = re.sub(r"(<code>.*?</code>)|\*([^*<>]+)\*",
                      lambda match: match[1] or f"<em>{match[2]}</em>", told)
        paragraphs += f"<p>{told}</p>"
    return paragraphs


def patch_box(lines):
    """Show lines of a diff, with added and removed ones in colour. -> HTML"""
    rows = ""
    for line in lines:
        text = code.PARTS.sub(lambda match: f"<span class={match.lastgroup}>{match[0]}</span>",
                              html.escape(line[1:], quote=False))
        kind = {"+": "add", "-": "cut"}.get(line[:1], "same")
        rows += "<hr>" if line.startswith("@@") else (
            f"<div class={kind}><b>{line[:1]}</b><code>{text or ' '}</code></div>")
    return f"<div class=patch>{rows.removeprefix('<hr>')}</div>"


def folded(summary, body, kind):
    return f"<details class={kind}><summary>{summary}</summary>{body}</details>"


def chapter(name, stored):
    """One chapter: words on the left, picture and patch on the right. -> HTML"""
    field = CHAPTERS[name].fields
    say = lambda text: prose(text, name, stored)
    inline = lambda text: say(text)[3:-4]
    changes = "".join(folded(inline(field[told]), patch_box(field[kind].split("\n")), "setting")
                      for kind, told in (("setting", "told"), ("without", "told_without"),
                                         ("also", "told_also"),
                                         ("fourth", "told_fourth")) if told in field)
    equations = "".join(f"<div class=eq><div>{paper.math(text, ' displaystyle=true')}</div></div>"
                        for text in field["equation"].split("\n"))
    charts = "".join(f"<figure>{svg}<figcaption>{inline(title)}</figcaption></figure>" for svg, title
                     in (chart(name, stored, line) for line in field["picture"].split("\n")))
    asked, _, answer = field["question"].partition("\n\n")
    return f"""<section class=rung id={name}>
<h2><a href="#{name}">{CHAPTERS[name].number}</a> {inline(field["title"])}</h2>
<div class=two><div class=words>
<div class=o1><h3>What hurts</h3>{say(field["pain"])}{changes}</div>
<div class=o3><h3>The idea</h3>{say(field["idea"])}{equations}</div>
<div class=o5><h3>What it does</h3>{say(field["relief"])}<h3>What still hurts</h3>
{say(field["hurts"])}{folded(inline(asked), say(answer), "ask")}
<h3>Try it</h3>{say(field["try"])}</div>
</div><div class=proof><div class=o2>{charts}</div>
<div class=o4><p class=head><b>{CHAPTERS[name].file}</b> {counts(name)}, {script(name).count(chr(10))}
lines in all</p>{patch_box(diff(name))}</div>
<p class="more o6"><code>python -m learn.path {CHAPTERS[name].number}</code> · {inline(field["more"])}
</p></div></div></section>"""


def table(stored, link):
    """The rungs, what each measured, without and with. -> rows of cells"""
    return [[f"{link(name)}", counts(name), *(
        fill(cell.strip(), name, stored) for cell in CHAPTERS[name].fields["row"].split("|"))]
        for name in RUNGS]


def build(stored):
    """-> HTML of docs/path.html"""
    top = CHAPTERS[BASE].fields
    links = page.navigation({"start": "index.html", "the path": "path.html", "play": "play.html",
                             "the lab": "lab.md", "the zoo": "zoo.md"}, "path.html")
    rows = "".join(f"<tr><td>{'</td><td>'.join(cells)}</td></tr>" for cells in table(
        stored, lambda name: f'<a href="#{name}"{" class=side" * (CHAPTERS[name].on == NANO)}>'
                             f"{CHAPTERS[name].number}. {CHAPTERS[name].fields['short']}</a>"))
    style = Path(__file__).with_name("path.css").read_text(encoding="utf-8")
    body = f"""<style>{style}</style>{links}
<header class=top><h1>{top["title"]}</h1>{prose(top["lead"], BASE, stored)}
<table class=rungs><thead><tr><th>rung</th><th>lines</th><th>measured</th><th>without</th>
<th>with</th></tr></thead><tbody>{rows}</tbody></table>{prose(top["after"], BASE, stored)}</header>
<main>{"".join(chapter(name, stored) for name in RUNGS)}
<section class=rung><h2>Where the road goes on</h2>{prose(top["onward"], BASE, stored)}</section>
</main>"""
    return page.document(top["title"], top["description"].replace("\n", " "), body, "path")


def slug(name):
    """The anchor of a chapter in docs/path.md, as GitHub makes it from the heading. -> str"""
    return re.sub(r"[^\w -]", "", CHAPTERS[name].fields["short"].lower()).replace(" ", "-")


def build_markdown(stored):
    """-> text of docs/path.md: the table of rungs, and their pains in a sentence with the patches"""
    top = CHAPTERS[BASE].fields
    rows = table(stored, lambda name: f"{CHAPTERS[name].number}. "
                                      f"[{CHAPTERS[name].fields['short']}](#{slug(name)})")
    parts = "".join(f"\n## {field['short'][0].upper()}{field['short'][1:]}\n\n"
                    f"{fill(field['hook'], name, stored)} `python -m learn.path {number}` shows and "
                    "runs this patch:\n\n```diff\n" + "\n".join(diff(name)) + "\n```\n"
                    for number, name, _, field in map(CHAPTERS.get, RUNGS))
    return (f"# {top['title']}\n\n{fill(top['lead'], BASE, stored)}\n\n"
            "This page has the patches and what they do. [path.html](path.html) tells the whole story, "
            "with pictures,\nequations, questions and exercises: clone the repository and open it in a "
            "browser.\n\n"
            f"![{chart(COVER, stored, CHAPTERS[COVER].fields['picture'])[1]}](path.svg)\n\n"
            "| rung | lines | measured | without | with |\n| --- | --- | --- | --- | --- |\n"
            + "".join(f"| {' | '.join(cells)} |\n" for cells in rows) + parts)


def write(stored):
    """Write docs/path.html, docs/path.md and docs/path.svg."""
    picture, _ = chart(COVER, stored, CHAPTERS[COVER].fields["picture"])
    for name, text in (("path.html", build(stored)), ("path.md", build_markdown(stored)),
                       ("path.svg", picture)):
        (DOCS / name).write_text(text, encoding="utf-8")
