"""docs/conformance.md shows what TRL and verl computed for the test vectors when make conform last
ran. These tests need neither of them; tests/test_vectors.py compares our functions."""
import json
import re

from conftest import ROOT

import vectors
from lab.conform import compare as conform

FOUND = json.loads((ROOT / "docs/conformance.json").read_text())
TABLES = conform.tables(FOUND)


def test_the_page_has_the_tables_of_what_was_found():
    page = (ROOT / "docs/conformance.md").read_text()
    for name, table in TABLES.items():
        assert f"make conform: {name} -->\n{table}<!-- end" in page
    readme = " ".join((ROOT / "README.md").read_text().split())
    for right, all_cases in re.findall(r"in (\d+) of the (\d+) cases", TABLES["vectors"]):
        assert f"{right} of {all_cases}" in readme


def test_each_difference_from_a_right_answer_is_on_the_page_once():
    known = {name: {case["id"] for case in vectors.read(name)["cases"]} for name in vectors.files()}
    wrong = [answer for name, cases in FOUND["vectors"].items() for case, answers in cases.items()
             for answer in answers.values() if case in known[name] and answer != "right"]
    assert len(wrong) == TABLES["wrong"].count("\n") - 2 + TABLES["conventions"].count("different")
    assert all(cases.keys() <= known[name] for name, cases in FOUND["vectors"].items())
