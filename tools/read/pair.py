"""The page of two scripts: what the second one changes, function by function."""
import difflib
import re

from tools.read import code, page


def source_of(lesson, name):
    """The lines of a function or a class as text; none if the script has no such. -> list"""
    if name not in lesson.by_name:
        return []
    return [lesson.lines[line - 1] for line in code.span(lesson.by_name[name])]


def changed_lines(one, two, name):
    """Of a function that both have, the lines that are in only one of them. -> two sets"""
    texts = source_of(one, name), source_of(two, name)
    found = set(), set()
    for kind, i, j, m, n in difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes():
        if kind != "equal":
            found[0].update(code.span(one.by_name[name])[i:j])
            found[1].update(code.span(two.by_name[name])[m:n])
    return found


def column(lesson, name, prefix, changed):
    """The equations and the code of a function in one of the scripts. -> HTML"""
    head = f"<p class=where>{lesson.name}.py</p>"
    if name not in lesson.by_name:
        return f"<div>{head}<p>has no <code>{name}</code></p></div>"
    values = None if name == "main" else code.Values(lesson)
    return (f"<div>{head}{page.equations(lesson, [name], prefix)}"
            f"{code.code(lesson, name, values, prefix, changed)}</div>")


def part(one, two, name):
    """What changes in a function. -> HTML"""
    if name in one.by_name and name in two.by_name:
        changed = changed_lines(one, two, name)
    else:
        changed = (), ()
    is_hidden = all(name in lesson.hidden or name not in lesson.by_name for lesson in (one, two))
    columns = column(one, name, "a", changed[0]) + column(two, name, "b", changed[1])
    return f"""<section class="part two{" variant" if is_hidden else ""}" id={name}>
<h2><code>{name}</code></h2><div class=columns>{columns}</div></section>"""


def with_pages(body, lessons):
    """HTML whose links to equations that are not on it lead to the page of their script. lessons:
    prefix -> Lesson"""
    there = set(re.findall(r" id=(\w+)", body))
    return re.sub(r'href="#(([ab])(eq\d+))"', lambda link: link[0] if link[1] in there else
                  f'href="{lessons[link[2]].name}.html#{link[3]}"', body)


def pair_page(one, two, section, links):
    """The page of two lessons, in the order of the second. section: its words. -> HTML"""
    lessons = {one.name: one, two.name: two}
    order = [*section.head[1].split(", "), *two.called[1:], "main", *two.by_name,
             *one.called[1:], *one.by_name]
    names = [name for name in dict.fromkeys(order) if name != "Config"]
    same = [name for name in names if source_of(one, name) == source_of(two, name)]
    parts = "".join(part(one, two, name) for name in names if name not in same)
    lead = "".join(f"<p>{page.prose(text, lessons, False)}</p>" for text in section.paragraphs)
    equal = ", ".join(f'<a href="{two.name}.html#{name}"><code>{name}</code></a>'
                      for name in same if name not in two.hidden)
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
    by_prefix = {"a": one, "b": two}
    return page.document(title, said, "../compare.png", with_pages(body, by_prefix),
                         page.rules(by_prefix))
