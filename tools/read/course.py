"""The course: in what order to read the pages, what each adds, and three questions on each that its
numbers answer."""
import dataclasses
import re
from pathlib import Path

from tools.read import page
from tools.read.lesson import in_batch

# In course.txt, {function.name 3,1} is a value on the page: of answer 3, token 1 (or only of answer
# 3, or without either), by default, or with what flags say behind a |. On the page of two scripts,
# the script comes first: {grpo:policy_loss.ratio 1,1}.
REFERENCE = re.compile(r"\{(?:(\w+):)?(\w+)\.([^{} |]+)(?: (\d)(?:,(\d))?)?(?: \| ([^{}]+))?\}")


@dataclasses.dataclass(frozen=True)
class Page:
    """One page: the names of its script or its two scripts, what it adds, questions and answers."""
    names: tuple
    adds: str
    questions: list

    @property
    def title(self):
        return " | ".join(self.names)

    @property
    def address(self):
        return "-".join(self.names) + ".html"


def read(text):
    """The pages of course.txt: a line with # names the scripts; what the page adds follows; then
    come paragraphs, each a question behind ? and its answer behind !. -> list of Page"""
    pages = []
    for part in re.split(r"^# ", text, flags=re.M)[1:]:
        names, _, rest = part.partition("\n")
        adds, *questions = [" ".join(block.split()) for block in rest.strip().split("\n\n")]
        pairs = [re.fullmatch(r"\? (.*) ! (.*)", question).groups() for question in questions]
        pages.append(Page(tuple(names.split(" | ")), adds, pairs))
    return pages


COURSE = read(Path(__file__).with_name("course.txt").read_text(encoding="utf-8"))


def look_up(lesson, function, name, row, token, flags):
    """The number on the page that a reference in an answer names. -> str"""
    (found,) = (f for f in lesson.functions if f.name == function)
    for line in sorted(lesson.notes):
        if line not in found.statements or lesson.notes[line].origin != (flags or ""):
            continue
        for label, value in lesson.notes[line].values.items():
            if label.replace(" ", "") != name:
                continue
            rows = in_batch(value)
            if rows is None:
                return page.plain_text(value.tensor)
            numbers = [x for numbers in rows for x in numbers or ()]
            return page.number_text(rows[int(row) - 1][int(token or 1) - 1], numbers)
    raise KeyError(f"{lesson.name}: no value {function}.{name} {flags or ''}")


def fill(text, lessons, names):
    """A question or an answer with its numbers. -> HTML"""
    def number(match):
        name, function, value, row, token, flags = match.groups()
        return f"<b>{look_up(lessons[name or names[0]], function, value, row, token, flags)}</b>"

    with_numbers = REFERENCE.sub(number, text)
    with_code = re.sub(r"`([^`]+)`", r"<code>\1</code>", with_numbers)
    return re.sub(r"\bo_(\d)", r"<i>o</i><sub>\1</sub>", with_code)


def course_page(lessons, links):
    """The first page. lessons: name -> Lesson."""
    parts = []
    for number, part in enumerate(COURSE, start=1):
        parts.append(f'<h2>{number}. <a href="{part.address}">{part.title}</a></h2>\n'
                     f"<p>{part.adds}</p>")
        for question, answer in part.questions:
            parts.append(f"<details><summary>{fill(question, lessons, part.names)}</summary>"
                         f"<p>{fill(answer, lessons, part.names)}</p></details>")
    body = f"""{page.header(links, "course", has_numbers=False)}
<main class="course"><h1>Reinforcement learning for language models, to read</h1>
<p>Each page has the equations of a script at the left, its code at the right, and below each line
the numbers that it computes for one question with four answers. Point at an equation to see the
line that computes it, or at the line; a click leads there. Pages with two names show what the
second script changes.</p>
<p>Read them in this order. Then try the questions: the numbers on the page answer them, and a click
on a question shows how.</p>
{chr(10).join(parts)}
</main>"""
    return page.document("The course", body)


def links():
    """Names and addresses of all pages, the course first."""
    return {"course": "index.html"} | {part.title: part.address for part in COURSE}


def all_pages(lessons):
    """Every page. lessons: name -> Lesson. -> dict: file name -> text"""
    pages = {"index.html": course_page(lessons, links())}
    for part in COURSE:
        read = [lessons[name] for name in part.names]
        write = page.lesson_page if len(read) == 1 else page.difference_page
        pages[part.address] = write(*read, links())
    return pages


def scripts():
    """The names of the scripts that have a page of their own, in the order of the course."""
    return [part.names[0] for part in COURSE if len(part.names) == 1]


