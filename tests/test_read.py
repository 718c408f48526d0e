"""The reading pages show the scripts unchanged, with the numbers that these compute."""
import re

import pytest
from conftest import ROOT

from learn.read import __main__ as read
from learn.read import example, lesson

NUMBER = re.compile(r"−?\d*\.\d+")


@pytest.fixture(scope="module")
def lessons():
    return {name: lesson.Lesson(name) for name in example.QUESTIONS}        # that have a page


@pytest.fixture(scope="module")
def pages(lessons):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "Lesson", lessons.get)          # which takes seconds
        return read.all_pages()


def test_the_pages_in_docs_are_what_the_scripts_give_today(pages):
    assert {path.name for path in (ROOT / "docs/read").iterdir()} == set(pages)
    for name, text in pages.items():
        old = (ROOT / "docs/read" / name).read_text(encoding="utf-8")
        assert NUMBER.sub("#", old) == NUMBER.sub("#", text), f"{name}: run make read"
        for x, y in zip(NUMBER.findall(old), NUMBER.findall(text)):
            last = 10.0 ** -len(x.partition(".")[2])    # sums may differ there on other machines
            found, wanted = (float(number.replace("−", "-")) for number in (x, y))
            assert found == pytest.approx(wanted, abs=1.1 * last), f"{name}: run make read"
