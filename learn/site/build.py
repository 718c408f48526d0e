"""Build the site from README.md, docs/ and the other pages: make site.

The pages are staged in .site/ with the layout of the repository, so that every relative link holds.
Files that a page links, such as a script, become pages with numbered lines, and GitHub's formulas
become MathML. Zensical builds site/ from .site/ as mkdocs.yml says. Then we check where the links
of the built pages lead.
"""
import json
import os
import re
import shutil
import subprocess
import sys
from base64 import b64encode
from hashlib import sha256
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

from latex2mathml.converter import convert

SITE = Path("site").resolve()
WORDS = Path("docs/words.md")
LINKS = {".md": r"(\]\()([^)#:\s]+)(?=[#)])", ".html": r'(href="?)([^"#:?>\s]+)(?=["#>\s])'}
# pages that would hide, in the search, those that explain: source files and the list of changes
UNSEARCHED = re.compile(r"(\.py|\.txt|\.json|LICENSE|CHANGELOG)\.html")
TERM = re.compile(r"(?m)^\| (\w.*?) \| (.*) \|$")         # a row of the glossary
# the top of a page, which has no name, or a section
SECTION = re.compile(r'(?:(?=<h1)|<section[^>]*\sid="?([\w-]+)"?>)(.*?)(?=<section|</main>)', re.S)
VALUE = r"""("[^"]*"|'[^']*'|[^\s>]+)"""                 # of an HTML attribute
LINK = rf"<(?:a|img|link|source)\s[^>]*?(?:href|src|srcset)=(?![\"']?\w+:){VALUE}"   # not to a host


def anchor(term):
    return re.sub(r"\W+", "-", term.lower())


def as_page(path):
    """Show a notebook as its cells and outputs, or another file as numbered lines. -> Markdown"""
    text, kind = path.read_text(encoding="utf-8"), path.suffix[1:] or "text"
    if kind == "ipynb":
        shown = []
        for cell in json.loads(text)["cells"]:
            source = "".join(cell["source"])
            shown.append(f"```py\n{source}\n```" if cell["cell_type"] == "code" else source)
            shown += [f"![](data:image/png;base64,{one['data']['image/png']})" if "data" in one else
                      f"```text\n{''.join(one['text'])}```" for one in cell.get("outputs", [])]
        return "\n\n".join(shown)
    return f'---\nhide: [navigation, toc]\n---\n# {path}\n\n`````{kind} linenums="1"\n{text}`````\n'


def stage(page, text):
    """Write a page into .site/, and with it a page for each file that it links."""
    def moved(link):
        target = Path(os.path.normpath(page.parent / link[2]))
        becomes_page = target.is_file() and target.suffix in {".py", ".txt", ".json", ".ipynb", ""}
        if becomes_page:
            stage(target.with_name(f"{target.name}.md"), as_page(target))
        address = f"{link[2]}.md" if becomes_page else link[2]
        if page.suffix == ".html":
            address = re.sub(r"\.md$", ".html", address.replace("README.md", "index.md"))
        return link[1] + address

    if page in pages and page.suffix == ".md":
        # pages that GitHub shows as source are named without a link
        text = re.sub(r" (docs/[\w/]+\.html)", lambda name: f" [{name[1]}]"
                      f"({os.path.relpath(name[1], page.parent)})", text)
        text = text.replace("\n```sh\n", "\n```\n")     # a phone wraps text, but not code
        # Markdown is also read in what is folded, and <math> may not begin a line of a paragraph
        text = re.sub(r"<details>", "<details markdown>", text)
        text = re.sub(r"\$`(.*?)`\$", lambda one: f"<span>{convert(one[1])}</span>", text)
        text = re.sub(r"```math\n(.*?)\n```", lambda one: (
            f"<div class=eq>{convert(one[1], display='block')}</div>"), text)
    text = re.sub(LINKS[page.suffix], moved, text)
    if page == WORDS:                           # each term gets a place, where the search leads
        text = TERM.sub(lambda row: f'| <a id="{anchor(row[1])}"></a>{row[0][2:]}', text)
    if page.suffix == ".html":                  # all tabs, and links that a script makes
        text = re.sub(r'(<a href="[^"]*") hidden', r"\1", text)
        text = re.sub(r"\n<span><code>make site</code>.*?</span>(?=</nav>)", "", text)
        text = re.sub(r'([`"]path/[^`"]*)\.md(?=[`"])', r"\1.html", text)
    home = os.path.relpath("index.html", page.parent)
    text = text.replace("<button id=scheme", f'<a class=search href="{home}#__search">Search</a>\n'
                        "<button id=scheme", 1)
    text = re.sub(r"(?m)^\|.*`.*", lambda row: row[0].replace(r"\|", "|"), text)    # as on GitHub
    for script in re.findall(r"(?s)<script>(.*?)</script>", text):  # a page allows it by its hash
        digest = b64encode(sha256(script.encode()).digest()).decode()
        text = re.sub("(?<=script-src 'sha256-)[^']*", digest, text)
    Path(".site", page).parent.mkdir(parents=True, exist_ok=True)
    Path(".site", page).write_text(text, encoding="utf-8")


def dead_links():
    """Yield the links of the built pages that lead to no file."""
    for page in SITE.rglob("*.html"):
        text = re.sub(r"(?s)<script.*?</script>", "", page.read_text(encoding="utf-8"))
        for link in re.findall(LINK, text) if page.name != "404.html" else ():
            path = unquote(urlsplit(unescape(link.strip("\"'"))).path)
            if path and not (page.parent / path).is_file():
                yield f"{page.relative_to(SITE)}: {link} leads nowhere"


def make_searchable(html_pages):
    """Let the search find the HTML pages and their sections, which Zensical copies without reading
    them, and the terms of the glossary, but not UNSEARCHED pages. Each experiment of the lab is
    found once, not once for each of its sections, which are called alike.

    From file://, the theme loads search.js instead of search.json. A browser then refuses to load
    the theme's worker, so search.js brings its text along."""
    index = json.loads((SITE / "search.json").read_text(encoding="utf-8"))
    found = []
    for item in index["items"]:
        if re.match("docs/lab/.*#", item["location"]):
            found[-1]["text"] += f" {item['text']}"
        elif not UNSEARCHED.search(item["location"]):
            found.append(item)
    for page in html_pages:
        path = {"play": ["Play"], "ledger": ["Lab"]}.get(page.stem, ["Read", page.stem])
        for name, section in SECTION.findall(page.read_text(encoding="utf-8")):
            section = re.sub(r"<h2><code>(.*?)</code>(.*?)</h2>", r"<h2>\2 (\1)</h2>", section)
            title, *texts = (" ".join(re.sub("<[^>]*>", " ", part).split()) for part in
                             re.findall(r"<h[12].*?</h[12]>|<p\b[^>]*>.*?</p>|<td>[^<]+(?=<td)",
                                        section, re.S))
            found.append({"location": f"{page}#{name}".strip("#"), "level": 2, "tags": [],
                          "title": unescape(title), "text": " ".join(texts), "path": path})
    for term, text in TERM.findall(WORDS.read_text("utf-8"))[1:]:
        found.append({"location": f"{WORDS.with_suffix('.html')}#{anchor(term)}", "level": 2,
                      "title": term, "text": re.sub(r"\[(.*?)\]\(.*?\)", r"\1", text),
                      "path": ["Glossary"], "tags": []})
    text = json.dumps(index | {"items": found})
    (SITE / "search.json").write_text(text, encoding="utf-8")
    [worker] = SITE.glob("assets/javascripts/workers/search*.js")
    (SITE / "search.js").write_text(
        f"const searchWorker = new Blob([{json.dumps(worker.read_text('utf-8'))}]);\n"
        "Worker = class extends Worker {\n"
        "  constructor() { super(URL.createObjectURL(searchWorker)); }\n};\n"
        f"var __index = {text};\n", encoding="utf-8")


pages = {*Path().glob("*.md"), *Path("docs").rglob("*.md"), *Path("docs").rglob("*.html"),
         Path("vectors/README.md"), Path("tests/logs/README.md")}
shutil.rmtree(".site", ignore_errors=True)
shutil.copytree("docs", ".site/docs", ignore=shutil.ignore_patterns("*.json", "*.md", "*.html"))
for file in ("learn/look.css", "learn/site/site.css", "learn/site/site.js"):
    shutil.copy(file, ".site/docs")
for page in pages:
    stage(page, page.read_text(encoding="utf-8"))
subprocess.run([sys.executable, "-m", "zensical", "build", "--clean", "--strict"], check=True)
make_searchable(page for page in pages if page.suffix == ".html")
faults = sorted(set(dead_links()))
sys.exit("\n".join(faults) or print(f"site/index.html: {len(pages)} pages, no dead link"))
