"""The tools that measure: on which page they write their tables; nothing is trained."""
import pytest

from lab import docs as runs

BLOCK = "<!-- made by make seeds: table -->\nold\n<!-- end of table -->\n"


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """pages(readme, lab): write README.md and docs/lab.md. -> the folder"""
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setattr(runs, "DOCS", tmp_path / "docs")

    def write(readme, lab):
        (tmp_path / "docs").mkdir()
        (tmp_path / "README.md").write_text(readme)
        (tmp_path / "docs/lab.md").write_text(lab)
        return tmp_path
    return write


def test_a_text_goes_between_its_marks_on_the_one_page_that_has_them(pages):
    other = BLOCK.replace("table", "example")
    folder = pages(other, f"before\n{BLOCK}after\n")
    runs.put("table", "new\n", "seeds")
    assert (folder / "README.md").read_text() == other
    assert (folder / "docs/lab.md").read_text() == f"before\n{BLOCK}after\n".replace("old", "new")


@pytest.mark.parametrize("readme, lab", [
    ("", BLOCK.replace("seeds", "compare")), (BLOCK, BLOCK), (BLOCK + BLOCK, ""),
    (BLOCK.replace("end of table", "end of it"), "")])
def test_marks_that_are_not_on_exactly_one_page_are_an_error(pages, readme, lab):
    folder = pages(readme, lab)
    with pytest.raises(ValueError):
        runs.put("table", "new\n", "seeds")
    assert (folder / "README.md").read_text() == readme
