"""docs/conformance.md: our functions still answer what TRL, verl and others did, when make conform
asked them; and the page shows what was found. None of these libraries is needed."""
import dataclasses
import json
import re

import pytest
import torch
from conftest import ROOT

from lab.conform import compare as conform

FOUND = json.loads((ROOT / "docs/conformance.json").read_text())
ROWS = {f"{row['theirs']} / {row['what']}": row for row in FOUND["rows"]}


pytestmark = pytest.mark.usefixtures("double")


def read(text, like):
    """A tensor of the kind and shape of another, from its numbers."""
    numbers = torch.tensor([float(word) for word in text.split()])
    return numbers.view(like.shape).to(like.dtype)


def cases():
    like = vars(conform.draw(0))
    return [conform.Case(**{name: read(text, like[name]) for name, text in case.items()})
            for case in FOUND["cases"]]


def apart(text, row):
    """How much we differ from the answers of a row, on each of the recorded cases. -> list"""
    found = []
    for x, answer in zip(cases(), row["answers"]):
        mine = conform.outcome(conform.OURS, text, x)
        theirs = {name: read(numbers, mine["value"] if name == "value" else getattr(x, name))
                  for name, numbers in answer.items()}
        found.append(max(number or 0.0 for number in conform.differences(mine, theirs)))
    return found


@pytest.mark.parametrize("name", ROWS)
def test_we_answer_what_they_did_or_do_so_with_what_the_sentence_names(name):
    row = ROWS[name]
    differs = max(apart(row["ours"], row)) > conform.SAME
    assert differs == (conform.verdict(row) != "same")
    assert bool(row["why"]) == differs
    if row["but"]:
        assert max(apart(row["but"], row)) <= conform.SAME


def test_the_recorded_cases_are_those_that_are_drawn_and_have_what_is_hard():
    for x, seed in zip(cases(), conform.RECORDED):
        drawn = conform.draw(seed)
        for field in dataclasses.fields(x):
            torch.testing.assert_close(getattr(x, field.name), getattr(drawn, field.name))
        log_rho = (x.logps - x.old_logps) * x.mask
        assert 1 in x.lengths and conform.T in x.lengths
        assert log_rho.max() > 1 and log_rho.min() < -1
        assert not (x.rewards == x.rewards[:, :1]).all() and x.rewards[0].unique().numel() == 1
        assert (x.logps[x.mask == 0] < -1).any() and x.is_truncated.any()
    assert (x.slots > x.mask).any()


def test_the_page_has_the_rows_of_today_and_what_was_found():
    today = conform.read_rows()
    assert [{name: row[name] for name in today[0]} for row in FOUND["rows"]] == today
    page = (ROOT / "docs/conformance.md").read_text()
    for name, table in conform.tables(FOUND).items():
        found = re.search(f"make conform: {name} -->\n(.*?)<!-- end of {name} -->", page, re.S)
        assert found[1] == table


def test_optimizer_steps_whole_agree():
    for step in FOUND["steps"]:
        assert step["apart"] <= 1e-3 * step["weights"] and step["gradient_apart"] < 1e-6
        if step["optimizer"] == "SGD":
            assert step["difference"] < 1e-5 and step["moved"] > 1e-5
