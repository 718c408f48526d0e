"""docs/index.html, from which all else is found: one screen."""
from tools.read import page

RULES = """body{min-height:100vh;display:grid;align-content:center}
.door{max-width:76rem;margin:auto;padding:1.5rem;display:grid;gap:1.2rem 2.5rem;
grid-template-columns:minmax(0,1fr) minmax(0,27rem)}.door header{grid-column:1/-1}
.door h1{font-size:2.1rem;line-height:1.15}.door header p{margin-top:.6rem;max-width:52rem}
.door img{width:100%;height:auto;display:block}.door h2{margin-bottom:.3rem}
.door section{padding:0}.door p{font-size:16px}
.rooms{margin-top:1.2rem;display:grid;grid-template-columns:1fr 1fr;gap:0 2rem}
.door ol{margin:.3rem 0 0;padding-left:1.3rem;font-size:16px;line-height:1.45}
.door figcaption{margin-top:.6rem}
@media(max-width:900px){.door{grid-template-columns:minmax(0,1fr)}}"""


def door(sections):
    """The page. sections: of course.txt, the first about the door itself. -> HTML"""
    first, *pages = sections
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
    return page.document(title, first.paragraphs[0], "compare.png", body, RULES)
