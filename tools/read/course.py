"""The course: in what order to read the pages, what each adds, and three questions on each that its
numbers answer."""
import dataclasses
import re
from pathlib import Path

from tools.read import page
from tools.read.lesson import in_batch

# In course.txt, {function.name 3,1} is the number that stands on the page for `name` in a function,
# of answer 3 and token 1; or only of answer 3, or without either. With flags it is from a run with
# these: {policy_loss.weight 3,1 | --loss_type cispo}. On the page of two scripts, the script comes
# first: {grpo:policy_loss.ratio 1,1}. What the page writes as "-> kl" or "∂L/∂log π" has no spaces.
REFERENCE = re.compile(r"""
    \{ (?: (?P<script>\w+) : )?
    (?P<function>\w+) \. (?P<name>[^{}\ |]+)
    (?: \  (?P<row>\d) (?: , (?P<token>\d) )? )?
    (?: \ \|\  (?P<flags>[^{}]+) )? \}""", re.VERBOSE)


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
        pairs = []
        for question in questions:
            found = re.fullmatch(r"\? (.*) ! (.*)", question)
            if not found:
                raise ValueError(f"course.txt: no question with its answer: {question}")
            pairs.append(found.groups())
        pages.append(Page(tuple(names.split(" | ")), adds, pairs))
    return pages


COURSE = read(Path(__file__).with_name("course.txt").read_text(encoding="utf-8"))


def look_up(lesson, function, name, row, token, flags):
    """The number on the page that a reference names, and the line below which it stands. -> str,
    int"""
    lines = [line for f in lesson.functions if f.name == function for line in f.statements]
    for line, note in sorted(lesson.notes.items()):
        if line not in lines or note.origin != (f"with {flags}" if flags else ""):
            continue
        for label, value in note.values.items():
            if label.replace(" ", "") != name:
                continue
            rows = in_batch(value)
            if rows is None:
                return page.plain_text(value.tensor), line
            numbers = [x for numbers in rows for x in numbers or ()]
            return page.number_text(rows[int(row) - 1][int(token or 1) - 1], numbers), line
    raise ValueError(f"course.txt: {lesson.name}.py has no value {function}.{name} {flags or ''}")


def fill(text, lessons, names):
    """A question or an answer with its numbers, each a link to where it stands. `names` are those
    of the page. -> HTML"""
    def number(match):
        script, *where = match.group("script", "function", "name", "row", "token", "flags")
        script = script or names[0]
        found, line = look_up(lessons[script], *where)
        return f'<a class="ref" href="{script}.html#L{line}">{found}</a>'

    with_numbers = REFERENCE.sub(number, text)
    with_code = re.sub(r"`([^`]+)`", r"<code>\1</code>", with_numbers)
    return re.sub(r"\bo_(\d)", r"<i>o</i><sub>\1</sub>", with_code)


def questions(part, lessons):
    """The questions of a page, with answers that a click opens. -> HTML"""
    parts = []
    for question, answer in part.questions:
        parts.append(f"<details><summary>{fill(question, lessons, part.names)}</summary>"
                     f"<p>{fill(answer, lessons, part.names)}</p></details>")
    return "\n".join(parts)


def course_page(lessons, links):
    """The first page. lessons: name -> Lesson."""
    parts = []
    for number, part in enumerate(COURSE, start=1):
        parts.append(f'<h2>{number}. <a href="{part.address}">{part.title}</a></h2>\n'
                     f"<p>{fill(part.adds, lessons, part.names)}</p>\n{questions(part, lessons)}")
    body = f"""{page.header(links, "course", has_numbers=False)}
<main class="course"><h1>Reinforcement learning for language models, to read</h1>
<p>Each page has the equations of a script at the left, its code at the right, and below each line
the numbers that it computes for one question with four answers. Point at an equation, and the line
that computes it lights up, and the other way round. Click the number of an equation to go to its
line, and <code>eq. (3)</code> in the code to come back. Pages with two names show what the second
script changes.</p>
<p>In words: the <i>policy</i>, pi, is the language model that is trained; the <i>base</i> is the
policy before. An answer that is right has <i>reward</i> 1, others 0. The <i>advantage</i> A of an
answer is by how much its reward exceeds what was to be expected, the <i>baseline</i>. A
<i>log-prob</i> is the logarithm of the probability that the policy gives to a token. The
<i>ratio</i> of a token is its probability now, divided by that when it was sampled.</p>
<p>Read the pages in this order. Then try the questions: the numbers on the page answer them. A
click on a question shows how, and a click on a number where it stands.</p>
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
        of_page = [lessons[name] for name in part.names]
        asked = f"<h2>Questions</h2>\n<div class=asked>{questions(part, lessons)}</div>"
        write = page.lesson_page if len(of_page) == 1 else page.difference_page
        pages[part.address] = write(*of_page, links(), asked)
    return pages


def scripts():
    """The names of the scripts that have a page of their own, in the order of the course."""
    return [part.names[0] for part in COURSE if len(part.names) == 1]


