"""The page of two scripts: what the second one changes, function by function."""
import difflib

from learn.read import code, page
from learn.read.lesson import span


def source_of(lesson, name):
    """The lines of a function. -> list of str"""
    return lesson.text_of(name).strip().split("\n")


def column(lesson, other, name):
    """The equations and the code of a function in one of the scripts; lines that the other does not
    have are marked. -> HTML"""
    place = span(lesson.by_name[name])
    match = difflib.SequenceMatcher(None, source_of(lesson, name), source_of(other, name),
                                    autojunk=False)
    same = {line for i, _, size in match.get_matching_blocks() for line in place[i:i + size]}
    base = f"{lesson.name}.html"
    shown = code.code(lesson, name, code.Values(lesson), base, set(place) - same)
    return (f"<div><p class=where>{lesson.name}.py</p>{page.equations(lesson, [name], base)}"
            f"{shown}</div>")


def part(one, two, name):
    """The changes of a function. -> HTML"""
    return f"""<section class="part two" id={name}>
<h2><code>{name}</code></h2>
<div class=columns>{column(one, two, name)}{column(two, one, name)}</div></section>"""


def pair_page(one, two, section, links):
    """The page of two lessons with the same functions, in the order of the second. section: its
    words, which name the functions to begin with. -> HTML"""
    lessons = {one.name: one, two.name: two}
    names = dict.fromkeys([*section.head[1].split(", "), *two.called])
    same = [name for name in names if source_of(one, name) == source_of(two, name)]
    parts = "".join(part(one, two, name) for name in names if name not in same)
    lead = "".join(f"<p>{page.prose(text, lessons, False)}</p>" for text in section.paragraphs)
    equal = ", ".join(f'<a href="{two.name}.html#{name}"><code>{name}</code></a>' for name in same)
    title = f"{one.name.upper()} → {two.name.upper()}"
    body = f"""{page.navigation(links, f"{one.name}-{two.name}.html")}
<header class=hero><div class=lead><h1>{title}</h1>
<p class=source>what {two.name}.py changes; <code>make diff A={one.name} B={two.name}</code></p>
{lead}</div>
<div class=pictures>{page.questions(section.questions, lessons, False)}</div></header>
{page.bar(f"{one.name}.py, {two.name}.py", two)}
<main>
<p class=where>Both scripts share {equal}. Marked lines are only in one of them.</p>
{parts}
</main>"""
    said = f"What {two.name}.py changes in {one.name}.py, with the numbers that both compute."
    return page.document(title, said, body, two.name)
