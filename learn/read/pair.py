"""The page of two scripts: what the second one changes, function by function."""
import difflib

from learn.read import code, page
from learn.read.lesson import span


def source_of(lesson, name):
    """The lines of a function or a class as text; none if the script has no such. -> list"""
    return lesson.text_of(name).strip().split("\n") if name in lesson.by_name else []


def changed_lines(lesson, other, name):
    """Of a function that both have, the lines that are only in the first. -> set"""
    place = span(lesson.by_name[name])
    theirs = source_of(other, name)
    match = difflib.SequenceMatcher(None, source_of(lesson, name), theirs, autojunk=False)
    same = {line for i, _, size in match.get_matching_blocks() for line in place[i:i + size]}
    return set(place) - same if theirs else set()


def column(lesson, other, name):
    """The equations and the code of a function in one of the scripts. -> HTML"""
    text = f"<p>has no <code>{name}</code></p>"
    if name in lesson.by_name:
        base = f"{lesson.name}.html"
        values = code.Values(lesson) if name != "main" else None
        text = page.equations(lesson, [name], base)
        text += code.code(lesson, name, values, base, changed_lines(lesson, other, name))
    return f"<div><p class=where>{lesson.name}.py</p>{text}</div>"


def part(one, two, name):
    """What changes in a function. -> HTML"""
    is_hidden = all(name in lesson.hidden or name not in lesson.by_name for lesson in (one, two))
    return f"""<section class="part two{" variant" * is_hidden}" id={name}>
<h2><code>{name}</code></h2>
<div class=columns>{column(one, two, name)}{column(two, one, name)}</div></section>"""


def pair_page(one, two, section, links):
    """The page of two lessons, in the order of the second. section: its words. -> HTML"""
    lessons = {one.name: one, two.name: two}
    order = section.head[1].split(", ")
    for lesson in (two, one):
        order += [*lesson.called[1:], "main", *lesson.by_name]
    names = [name for name in dict.fromkeys(order) if name != "Config"]
    same = [name for name in names if source_of(one, name) == source_of(two, name)]
    parts = "".join(part(one, two, name) for name in names if name not in same)
    lead = "".join(f"<p>{page.prose(text, lessons, False)}</p>" for text in section.paragraphs)
    equal = ", ".join(f'<a href="{two.name}.html#{name}"><code>{name}</code></a>'
                      for name in same if name in two.called)
    title = f"{one.name.upper()} → {two.name.upper()}"
    body = f"""{page.navigation(links, f"{one.name}-{two.name}.html")}
<header class=hero><div class=lead><h1>{title}</h1>
<p class=source>what {two.name}.py changes; <code>make diff A={one.name} B={two.name}</code></p>
{lead}</div>
<div class=pictures>{page.questions(section.questions, lessons, False)}</div></header>
{page.bar(f"{one.name}.py, {two.name}.py", two)}
<main>
<p class=where>{"The same in both: " + equal + "." if equal else ""} Marked lines are in one of the
two alone.</p>
{parts}
</main>"""
    said = f"What {two.name}.py changes in {one.name}.py, with the numbers that both compute."
    return page.document(title, said, "../compare.png", body, two.name)
