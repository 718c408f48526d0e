"""Test that lab/docs.py writes measurements between their marks, on exactly one page."""
import pytest

from lab import docs as runs

BLOCK = "<!-- made by make seeds: table -->\nold\n<!-- end of table -->\n"


def test_a_text_goes_between_its_marks_on_the_one_page_that_has_them(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setattr(runs, "DOCS", tmp_path / "docs")
    (tmp_path / "docs").mkdir()
    readme, lab = tmp_path / "README.md", tmp_path / "docs/lab.md"
    readme.write_text(BLOCK.replace("table", "example"))
    lab.write_text(f"before\n{BLOCK}after\n")
    runs.put("table", "new\n", "seeds")
    assert readme.read_text() == BLOCK.replace("table", "example")
    assert lab.read_text() == f"before\n{BLOCK}after\n".replace("old", "new")
    for text in ("", BLOCK):                            # marks on no page, and on two
        readme.write_text(text)
        lab.write_text(text)
        with pytest.raises(ValueError):
            runs.put("table", "new\n", "seeds")
