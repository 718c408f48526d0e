"""README.md, CONTRIBUTING.md and the pages in docs/: their commands work, their tables agree with
the code and with the files that make targets wrote, and no link is dead. docs/start.ipynb runs from
its first cell to its last. Its outputs are stored by: pip install nbclient ipykernel, then jupyter
execute --inplace docs/start.ipynb"""
import html
import importlib
import json
import re
import shlex
import sys

import pytest
from conftest import ROOT, SCRIPTS
from small_runs import SMALL, arguments, steps

import common
import plumbing
from lab import bench, docs, error_rates, measure, names, r1
from lab.conform import compare as conform
from report.check import mapping

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in
         [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]}
GENERATED = re.compile(
    r"<!-- made by make ([\w-]+): ([\w-]+) -->\n(.*?)<!-- end of ([\w-]+) -->\n", re.S)
LANGUAGE_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
MAKEFILE = (ROOT / "Makefile").read_text("utf-8").replace("\\\n", " ")
TARGETS = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)", MAKEFILE, re.M)[1].split()
# Commands that need a file which the reader writes first.
TO_COME = ("mine.py", "--task sorting", "--task nim")


def commands():
    """Collect every command of the pages, from code blocks without a language and from the text,
    and those of the scripts' docstrings."""
    found = []
    for text in PAGES.values():
        text = GENERATED.sub("", text)
        for language, block in LANGUAGE_BLOCK.findall(text):
            if not language:
                lines = block.replace("\\\n", " ").splitlines()
                found += [line.split("  #")[0].strip() for line in lines]
        text = LANGUAGE_BLOCK.sub("", text)
        found += re.findall(r"`((?:python|make) [^`]*)`", text)
    for path in ROOT.glob("docs/**/*.html"):
        spans = re.findall(r"<code>((?:python|make) .*?)</code>", path.read_text("utf-8"))
        found += [html.unescape(re.sub("<.*?>", "", span)) for span in spans]
    for path in [*ROOT.glob("*.py"), *ROOT.glob("examples/*.py")]:
        found += re.findall(r"^Usage: (python .*?)(?:   .*)?$", path.read_text("utf-8"), re.M)
    return [command for command in dict.fromkeys(found) if command.startswith(("python ", "make "))]


# ---- commands --------------------------------------------------------------------------------

@pytest.mark.parametrize("command", [command for command in commands()
                                     if not any(name in command for name in TO_COME)],
                         ids=str)
def test_a_command_can_be_given(command):
    # the folders and files that a command names do not exist here
    of_folders = r" --(?:resume_from_checkpoint|init_from|teacher(?! self)|pairs) \S+"
    program, first, *words = shlex.split(re.sub(of_folders, "", command))
    if program == "make":
        claim = ROOT / f"lab/claims/{first.removeprefix('lab-')}.py"
        assert first in TARGETS or claim.is_file()
        return
    if first == "-m":
        path = ROOT / words.pop(0).replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
        if "--map" in words:                    # exits if a word is unknown
            assert mapping(words[words.index("--map") + 1:])
        return
    name = first.removesuffix(".py").replace("/", ".")
    if name in ("nano", "real"):                # no flags: real.py takes a model, and a file
        assert (ROOT / first).is_file() and len(words) in ((0,) if name == "nano" else (1, 2))
        return
    config = importlib.import_module(name).Config
    cfg = plumbing.parse_flags(config, [*words, "--device", "cpu"])
    if name in SCRIPTS:
        common.load_task(cfg, importlib.import_module(name).verify)


# ---- tables ----------------------------------------------------------------------------------

def test_the_tables_are_those_of_the_stored_numbers(monkeypatch):
    found = conform.tables(json.loads((ROOT / "docs/conformance.json").read_text()))
    tables = {f"conform: {name}": table for name, table in found.items()}
    tables |= {"bench: logits": measure.tables("bench"), "gpu: step": measure.tables("step"),
               "gpu: report": measure.tables("gpu"),
               "r1: r1": r1.text(*docs.load("r1", "")), "names: names": names.names(),
               "names: rules": names.rules()}
    tables |= dict(zip(("lab: asked", "lab: pages"), bench.overview()))
    for module, page in ((measure, measure.main_page), (measure, measure.nano_page),
                         (error_rates, error_rates.page)):
        monkeypatch.setattr(module, "put", lambda name, text, target: (
            tables.update({f"{target}: {name}": text})))
        page()
    assert tables.keys() >= {"seeds: example", "seeds: controls", "nano-seeds: nano",
                             "error-rates: check"}
    pages = [*PAGES.values(), (ROOT / "tests/logs/README.md").read_text("utf-8")]
    for name, table in tables.items():
        [page] = [text for text in pages if f"<!-- made by make {name} -->" in text]
        assert f"{name} -->\n{table}<!-- end" in page, name
    assert measure.picture(docs.load("nano-seeds", "")[0]) == (
        ROOT / "docs/nano.svg").read_text("utf-8")


# ---- links -----------------------------------------------------------------------------------

def anchors(path):
    """List what a link to a page may name after #: its headings, spelled as GitHub does, or ids."""
    text = LANGUAGE_BLOCK.sub("", path.read_text("utf-8"))
    titles = re.findall(r'^#+ (.*)|<(?:a|tr) id="?(.*?)"?>', text, re.M)
    return {re.sub(r"[^\w -]", "", "".join(title).lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_every_link_and_picture_leads_somewhere(page):
    text = LANGUAGE_BLOCK.sub("", (ROOT / page).read_text("utf-8"))
    for target in re.findall(r'(?:\]\(|src="|srcset=")([^):"]+)[)"]', text):
        path, _, anchor = target.partition("#")
        place = ((ROOT / page).parent / path if path else ROOT / page).resolve()
        assert place.is_relative_to(ROOT) and place.exists(), target
        if "=" not in anchor:                           # not play.html#SETTINGS
            assert not anchor or anchor in anchors(place), target


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.html")), ids=lambda page: page.name)
def test_every_link_of_an_html_page_leads_somewhere(page):
    text = re.sub("<script.*?</script>", "", page.read_text("utf-8"), flags=re.S)
    for link in re.findall(r'(?:href|src|srcset)="?([^"\s>:]+)(?=["\s>])', text):
        path, _, anchor = html.unescape(link).partition("#")
        place = page.parent / path.partition("?")[0] if path else page
        assert place.exists(), link
        if anchor and "?" not in path:                  # not play.html?figure#SETTINGS
            ids = re.findall(r'\s(?:id|name)="?([\w.-]+)', place.read_text("utf-8"))
            assert anchor in (anchors(place) if place.suffix == ".md" else ids), link


def test_the_navigation_of_the_site_has_all_pages_and_the_tabs_of_the_header():
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").split("nav:")[1]
    named = {name for name in re.findall(r"[\w./-]+\.(?:md|html)\b", navigation)
             if not name.endswith(".ipynb.md")}
    pages = {*PAGES, *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.html"))}
    assert named == pages | {"CHANGELOG.md", "vectors/README.md"}
    header = (ROOT / "learn/header.html").read_text("utf-8")
    tabs = re.findall(r"^  - ([\w ]+):", navigation, re.M)
    assert tabs[1:] == re.findall(r">([\w ]+)</a>", header)[1:]


# ---- the notebook ----------------------------------------------------------------------------

def test_the_notebook_runs_and_its_changed_line_changes_the_run(own_folder, monkeypatch, capsys):
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.delitem(sys.modules, "report.curve")            # runs draw, as for a reader
    for name in ("grpo.py", "common.py", "plumbing.py", "tasks", "report", "kernels"):
        (own_folder / name).symlink_to(ROOT / name)
    monkeypatch.setattr(sys, "path", [*sys.path])
    flags = arguments(SMALL | {"max_steps": 4})
    names = {"__name__": "notebook"}
    for cell in json.loads((ROOT / "docs/start.ipynb").read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            exec(compile(source, "start.ipynb", "exec"), names)
        if "parameters" in cell["metadata"].get("tags", ()):
            names["FLAGS"] = flags
    assert "steps: 4 and 4" in capsys.readouterr().out
    first, mine = (names["runs"] / name for name in ("grpo", "mine"))
    panels = sys.modules["report.curve"].PANELS
    assert {names[0] for names in panels} <= steps(first)[0].keys()
    assert all((run / "curve.png").is_file() for run in (first, mine))
    assert [x["loss"] for x in steps(first)] != [x["loss"] for x in steps(mine)]
