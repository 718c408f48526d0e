"""docs/conformance.md: our functions still return what TRL, verl and others returned when make
conform last ran, and the page shows these results. The tests need none of these libraries."""
import json
import re

import pytest
import torch
from conftest import ROOT

from lab.conform import compare as conform

FOUND = json.loads((ROOT / "docs/conformance.json").read_text())
ROWS = {f"{row['theirs']} / {row['what']}": row for row in FOUND["rows"]}


pytestmark = pytest.mark.usefixtures("double")


def apart(text, row):
    """Compute the largest difference between our results and a row's recorded ones. -> float"""
    found = []
    for seed, answer in zip(conform.RECORDED, row["answers"], strict=True):
        x = conform.draw(seed)
        mine = conform.outcome(conform.OURS, text, x)
        theirs = {}
        for name, numbers in answer.items():
            like = mine["value"] if name == "value" else getattr(x, name)
            theirs[name] = torch.tensor([float(word) for word in numbers.split()]).view_as(like)
        found += conform.differences(mine, theirs)
    return conform.most(found)


@pytest.mark.parametrize("name", ROWS)
def test_we_answer_what_they_did_or_do_so_with_what_the_sentence_names(name):
    row = ROWS[name]
    differs = apart(row["ours"], row) > conform.SAME
    assert differs == (conform.verdict(row) != "same")
    assert bool(row["why"]) == differs
    if row["but"]:
        assert apart(row["but"], row) <= conform.SAME


def test_the_page_has_the_rows_of_today_and_what_was_found():
    today = conform.read_rows()
    assert [{name: row[name] for name in today[0]} for row in FOUND["rows"]] == today
    page = (ROOT / "docs/conformance.md").read_text()
    for name, table in conform.tables(FOUND).items():
        found = re.search(f"make conform: {name} -->\n(.*?)<!-- end of {name} -->", page, re.S)
        assert found[1] == table
    count = re.match(r"\d+ of \d+ comparisons", conform.tables(FOUND)["rows"])
    assert count[0] in (ROOT / "README.md").read_text()


def test_optimizer_steps_whole_agree():
    assert all(step["difference"] < 1e-5 < step["moved"] for step in FOUND["steps"])
