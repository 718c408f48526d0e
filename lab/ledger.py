"""Make docs/lab/ledger.html, a table of all verdicts of the lab that a click sorts: make ledger."""
import html
import math
from pathlib import Path
from string import Template

from lab import bench, docs
from learn import look

BODY = Path(__file__).with_name("ledger.html")
WORDS = (bench.SHOWN, bench.CONTRADICTED, bench.NOT_FOUND, bench.SAME, bench.UNDECIDED,
         bench.NO_VERDICT)


def source(claim):
    """Link the paper that makes a claim. -> HTML"""
    paper = claim.source.removeprefix("after ")
    link = f'<a href="{bench.PAPERS.get(paper)}">{paper}</a>'
    return claim.source.replace(paper, link if paper in bench.PAPERS else paper)


def row(name, claim, verdict, anchor):
    """Write a claim, with its numbers and how they were measured. anchor: whether it is the first
    of its experiment. -> HTML"""
    one, about = bench.module(name), bench.load(name)[1]
    page = one.PAGE or name
    runs = [one.SEEDS, *(more["seeds"] for more in about.get("repeated", ()))]
    most = None if claim.exact else len(claim.values) // len(runs)      # some cases have fewer
    seeds = [seed for run in runs for seed in run[:most]]
    value = math.exp(claim.mean) if claim.ratio else claim.mean
    cells = [
        f'<a href="{page}.md">{page}</a>', html.escape(claim.text), verdict,
        claim.measured + ", one base" * (one.ONE_BASE and not claim.computed),
        html.escape(claim.region), "<br>".join(claim.compared), source(claim),
        "computed" if claim.computed else bench.spans(seeds),
        f"<code>make lab-{name}</code> {', '.join(bench.commits(about))}"]
    cells = [f"<td>{cell}" for cell in cells]
    cells[3] = cells[3].replace(">", f' data-value="{value:.6g}">', 1)
    return f"<tr{f' id={name}' if anchor else ''}>{''.join(cells)}\n"


def text():
    """Make the page. -> HTML"""
    judged = {name: bench.claims(name) for name in bench.NAMES}
    found = [claim.verdict for claims in judged.values() for claim, _ in claims]
    rows = "".join(row(name, claim, verdict, place == 0) for name, claims in judged.items()
                   for place, (claim, verdict) in enumerate(claims))
    counts = ", ".join(f"{found.count(word)} {word}" for word in WORDS)
    body = Template(BODY.read_text("utf-8")).substitute(rows=rows, counts=counts, all=len(found))
    return look.document(
        "The lab: all verdicts", "All claims of the lab, with verdicts, effects and intervals, "
        "learning rates, seeds, commits and commands", body, "../../", "Lab",
        [BODY.with_suffix(".css")], "ledger")


def publish():
    (docs.DOCS / "lab/ledger.html").write_text(text(), "utf-8")
