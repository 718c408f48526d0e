"""The bench reports what it measures."""
import json

from lab import docs
from lab import measure as lab


def test_every_row_is_there_as_soon_as_it_is_measured(monkeypatch):
    clock = iter(range(1000))

    def seconds(what, part):
        return lab.take_turns({"ours": None, "torch": None}, lambda job: next(clock))
    monkeypatch.setattr(lab, "logits", seconds)
    monkeypatch.setattr(lab, "LOGITS", [(8, 5)])
    so_far = [json.loads(json.dumps(rows)) for rows in lab.measured()]
    assert [len(rows) for rows in so_far] == [1, 2, 3, 4]
    assert so_far[0] == [{"of": {"logits": "8 x 5 bfloat16", "pass": "forward"},
                          "seconds": {"ours": [2, 4, 6, 8, 10], "torch": [3, 5, 7, 9, 11]}}]


def test_the_page_has_the_table_of_the_records():
    page = (docs.DOCS / "speed.md").read_text()
    assert f"make bench: logits -->\n{lab.kernel_tables()}<!-- end" in page
