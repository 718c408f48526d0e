"""Let real.py sample from a tiny model of many families, and print by how much its sampler differs
from what it trains: make families."""
import re
from pathlib import Path

import pytest
from small_models import SHAPES, sample_and_score

PAGE = Path(__file__).parents[1].joinpath("docs/real-models.md").read_text("utf-8")
LISTS = r"families work: ([^.]*)\."
WORKS = re.search(LISTS, PAGE)[1].replace(",", "").split()


@pytest.mark.parametrize("family", SHAPES)
def test_a_family_works_if_the_page_says_so(family, tmp_path):
    try:
        gap = sample_and_score(family, tmp_path)
        print(f"{family}: gap {gap:.1e} nats")
    except Exception as error:              # the code of a family raises nearly anything
        gap = float("nan")
        print(f"{family}: {type(error).__name__}: {str(error)[:100]}")
    assert (family in WORKS) == (gap < 1e-3)
