"""docs/index.html, from which all else is found: one screen."""
from learn.read import page


def door(first, pages):
    """The page, from the sections of course.txt. -> HTML"""
    title, film = first.head
    items = "".join(
        f'<li><a href="read/{"-".join(section.names)}.html">{" → ".join(section.names)}</a>: '
        f"{section.head[0]}</li>" for section in pages)
    rooms = "".join(f'<section><h2><a href="{address}">{name}</a></h2><p>{said}</p></section>'
                    for name, address, said in first.rows)
    body = f"""<main class=door>
<header><h1>{title}</h1><p>{first.paragraphs[0]}</p></header>
<figure><a href="learning.svg"><img src="learning.svg" width=760 height=360 alt="{film}"></a>
<figcaption>{film}</figcaption><div class=rooms>{rooms}</div></figure>
<section><h2>Read</h2><p>{first.paragraphs[1]}</p><ol>{items}</ol></section>
</main>"""
    return page.document(title, first.paragraphs[0], body)
