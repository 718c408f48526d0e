"""docs/start.ipynb runs from its first cell to its last."""
import json
import sys

import matplotlib
from conftest import ROOT
from small_runs import SMALL, arguments


def test_the_notebook_runs_and_its_changed_line_changes_the_run(tmp_path, monkeypatch, capsys):
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)                                 # where runs/base/ is kept
    for name in ("grpo.py", "common.py", "tasks", "report", "kernels"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setattr(sys, "path", [*sys.path])
    flags = arguments(SMALL | {"max_steps": 4, "stop_at": 2})
    names = {"__name__": "notebook"}
    for cell in json.loads((ROOT / "docs/start.ipynb").read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            exec(compile(source, "start.ipynb", "exec"), names)
        if "parameters" in cell["metadata"].get("tags", ()):
            names["FLAGS"] = flags
    assert "steps: 4 and 4" in capsys.readouterr().out
    curves = [list(names["curve"](name)) for name in ("grpo", "mine")]
    assert [len(curve[0]) for curve in curves] == [3, 3]        # the base, steps 2 and 4
    losses = [[step["loss"] for step in names["lines"](names["runs"] / name / "metrics.jsonl")]
              for name in ("grpo", "mine")]
    assert losses[0] != losses[1]
