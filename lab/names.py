"""Write the tables of docs/check.md (make names): the names and the rules of report.check."""
from lab.docs import put, table
from report import start
from report.check import RULES
from report.formats import NAMES, OTHERS


def quoted(names):
    return ", ".join(f"`{name}`" for name in names.split())


def names():
    """List each word of --map with the names that are known. -> table in Markdown"""
    rows = [[f"`{word}`", what, *map(quoted, theirs)] for word, (what, *theirs) in NAMES.items()]
    rows += [[f"`{word}`", what, "", ""] for word, what in OTHERS.items()]
    return table(["word", "meaning", "ours, TRL, ms-swift", "verl"], rows)


def rules():
    """List the rules in their order. -> table in Markdown"""
    rows = []
    for one in RULES:
        needs = ", ".join(" or ".join(f"`{name}`" for name in need.split("|"))
                          for need in one.needs)
        parts = ", ".join(f"[{part}](why.md#{part})" for part in one.parts)
        rows.append([one.look.__doc__, needs or "`reward`", f"{one.limit:g}", parts])
    return table(["what is wrong", "needs", "limit", "parts"], rows)


def main():
    put("names", names(), "names")
    put("rules", rules(), "names")


if __name__ == "__main__":
    start(main)
