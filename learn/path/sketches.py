"""Draw the pictures that explain the path. Where a text of chapters.txt has a paragraph
`~ NAME | caption`, its page shows what the function NAME draws. -> Drawing, its height"""
from collections import Counter
from statistics import fmean, stdev

import nano
from learn import look
from learn.look import Drawing, scale
from learn.path import lines, worked
from learn.path.rungs import ROOT
from learn.read import figures, lesson

WORDS = "((((3+4)-5)*4)-2)=<think>3+4=7;7-5=2;2*4=8;8-2=6</think><answer>6</answer>"
BIN = 0.125                         # of a histogram
AVERAGES = {"sum over tokens": (1, 1), "mean over an output's tokens (GRPO)": (1, 4 / 33),
            "sum over a constant (Dr. GRPO)": (1, 1), "mean over all tokens (DAPO)": (1, 1)}
INSURED = {"a baseline": (("rewards of 0 and 1", "raw_sums", 1),    # a row and one of its effects
                          ("a judge's points", "raw_sums", 2)),
           "a mean for each question": (("rewards of 0 and 1", "batch", 1),
                                        ("a judge's points", "batch", 2)),
           "the clip, at 5e-4": (("2 updates", "unclipped", 0),
                                 ("16 updates", "eight_unclipped", 0))}
SIDES = "without", "with", "also"   # classes, which have colours
STYLE = look.small(look.COLOURS + look.CHART + "".join(
    line for file in ("read/read.css", "path/sketch.css")
    for line in (ROOT / "learn" / file).open(encoding="utf-8") if line.startswith("svg ")))


def tokens():
    """Draw one row of `tokens`, with the mask of its output as nano.py computes it."""
    row = nano.encode([WORDS], nano.W + nano.T)
    _, mask = nano.logprobs(nano.GPT(), row)
    d = Drawing(scale(0, 20, 4, 396), scale(0, 1, 16, 68))
    d.text(0, 1, "the output and its padding, with the mask below", "dim", "0 -24")
    x = y = 0
    for i, count in enumerate([""] * nano.W + mask[0].int().tolist()):
        word = nano.VOCABULARY[row[0, i]].replace("<end>", "⏎")
        wide = 3.65 if len(word) > 1 else 1
        if i == nano.W or x + wide > 20:
            x, y = 0, y + 1
        kind = "with" if count else "dim"
        d.line(x + 0.06, y, x + wide - 0.06, y, f"cell {kind}")
        d.text(x + wide / 2, y, word, "m code")
        d.text(x + wide / 2, y, f"{count}", f"m {kind}", "0 20")
        x += wide
    return d, 204


def noise():
    """Draw how far the estimates of a gradient are spread, without a baseline and with one."""
    d = Drawing(scale(-1.5, 3, 8, 392), None)
    for i, name in enumerate(("points", "points minus their mean")):
        found = worked.estimates()[i + 1]
        bins = Counter(round(x / BIN) * BIN for x in found if x < 3)
        d.y = scale(0, max(bins.values()), 112 + 136 * i, 42 + 136 * i)
        d.axes(-1.5, 3, 0, {x: worked.signed(x, 0) for x in range(-1, 4)}, {0: ""})
        for x, count in bins.items():
            d.line(x, 0, x, count, f"bin {'also' if x < 0 else SIDES[i]}")
        d.text(-1.5, 0, f"{name}: {fmean(found):.2f} ± {stdev(found):.2f}", SIDES[i], "0 -90")
        d.text(3, 0, f"{fmean(x < 0 for x in found):.0%} below 0", "e also", "0 -90")
    return d, 276


def group():
    """Draw eight outputs as a tree of tokens, their points as bars, and what one step changes."""
    _, points, A, _ = worked.weights(worked.SAMPLE)
    d = Drawing(scale(0, 1, 4, 396), scale(0, 1, 16, 40))
    d.text(0, 0, worked.QUESTION, "code")
    d.text(1, 0, f"points: minus their mean of {fmean(points)}", "e dim")
    y = 0
    for thinks, word, kind in ((True, "<think>", "up"), (False, "<answer>", "clip")):
        y = top = y + 1
        d.curve([(0.02, 0.5), (0.02, y), (0.05, y)], "zero")
        d.text(0.06, y, word, "code")
        before, after = (p if thinks else 1 - p for p in map(worked.after, (0, 1)))
        d.text(0.24, y, f"{before:.0%} → {after:.0%}", f"strong {kind}")
        for output, r, a in zip(worked.SAMPLE, points, A):
            if output.thinks == thinks:
                y += 1
                kind = "up" if a > 0 else "clip"
                rest = output.text.removeprefix(word).removesuffix("</answer>")
                d.curve([(0.08, top + 0.5), (0.08, y), (0.11, y)], "zero")
                d.text(0.12, y, rest.replace("</think><answer>", " → "), "code")
                d.line(0.7, y, 0.7 + a / 10, y, f"bar {kind}")
                d.text(1, y, f"{r:g}: {worked.signed(a, 2)}", f"e {kind}")
    return d, d.y(y) + 16


def clip():
    """Draw the loss of a token against its ratio, as the page of grpo.py does."""
    return figures.clip(lesson.Lesson("grpo")), 366


def weights():
    """Draw a guess and a thought, as wide as they are long and as high as a token weighs."""
    d = Drawing(scale(0, 40, 8, 392), None)
    for i, (name, highs) in enumerate(AVERAGES.items()):
        d.y = scale(0, 1, 78 * i + 62, 78 * i + 32)
        d.text(0, 0, name, "strong", "0 -46")
        d.text(40, 0, f"1 : {highs[1] * 33 / 4:.0f}", "e", "0 -46")
        for x, n, high, kind in zip((0, 6), (4, 33), highs, ("also", "with")):
            d.curve([(x, 0), (x, high), (x + n, high), (x + n, 0), (x, 0)], f"area {kind}")
    return d, 304


def spans(rows, low, high, sign=1):
    """Draw effects in points, with their intervals. rows: title -> [(label, row, which effect)]"""
    d = Drawing(scale(low, high, 180, 384), scale(0, 1, 16, 34))
    y = 0
    for title, effects in rows.items():
        d.text(low, y, title, "strong", "-176 0")
        y += effects[0][0] != ""
        for side, (label, name, at) in zip(SIDES, effects):
            effect = lines.effects(name)[at]
            d.text(low, y, label, side, "-176 0")
            d.curve([(sign * end, y) for end in effect.interval], f"span {side}")
            d.dot(sign * effect.difference, y, side)
            y += 1
        y += 0.5
    for x in range(low, high + 1, 20):
        d.line(x, -0.5, x, y - 0.5, "grid" if x else "zero")
        d.text(x, y, worked.signed(x, 0), "m dim")
    return d, d.y(y) + 12


def insurance():
    """Draw what pieces bring where you do not need them, and where you do."""
    return spans(INSURED, -20, 100, sign=-1)


def pieces():
    """Draw the differences of all rows of lines.txt."""
    rows = [name for name in lines.complete() if lines.against(name)]
    return spans({lines.ROWS[name].fields["short"]: [
        ("", name, at) for at, _ in enumerate(lines.effects(name))] for name in rows}, -100, 20)


def made():
    """Make the files of all pictures. -> {name: SVG}"""
    found = {}
    for draw in (tokens, noise, group, clip, weights, insurance, pieces):
        drawing, height = draw()
        svg = drawing.svg(400, round(height), draw.__doc__.partition(".")[0], ' width="440"')
        found[f"{draw.__name__}.svg"] = svg.replace(">", f"><style>{STYLE}</style>", 1)
    return found
