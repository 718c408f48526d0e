"""Check a tiny model of many families as a run checks its model: make families. Those that
docs/real-models.md lists work, and those that it names below the list are refused."""
import re
from pathlib import Path

import pytest
from small_models import SHAPES, attempt

PAGE = Path(__file__).parents[1].joinpath("docs/real-models.md").read_text("utf-8")
LISTS = r"families work: ([^.]*)\.\n\nThese are refused in one line:\n\n((?:- .*\n)*)"
WORKS, REFUSED = re.search(LISTS, PAGE).groups()


@pytest.mark.parametrize("family", SHAPES)
def test_a_family_works_as_the_page_says(family, tmp_path):
    reason = attempt(family, tmp_path)
    print(f"{family}: {reason or 'works'}")
    assert (family in WORKS.replace(",", "").split()) == (not reason)
    assert (f"- {family}: " in REFUSED) == bool(reason)
