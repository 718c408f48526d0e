"""docs/start.ipynb runs from its first cell to its last, and what it prints is of the same kind as
its stored outputs. If not, store them again: pip install nbclient ipykernel, then
jupyter execute --inplace docs/start.ipynb"""
import json
import sys

import matplotlib
from conftest import ROOT
from small_runs import SMALL, arguments


def beginnings(text):
    """The first words of the lines, which tell what a line says, without numbers and warnings."""
    words = {line.split()[0] for line in text.splitlines() if line[:1].strip()}
    return {word for word in words - {"warning:"} if not word.isdigit() and word[0] != "("}


def test_the_notebook_runs_and_its_changed_line_changes_the_run(tmp_path, monkeypatch, capsys):
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)                                 # where runs/base/ is kept
    for name in ("grpo.py", "common.py", "plumbing.py", "tasks", "report", "kernels"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "report.page")     # each run draws its report, as for a reader
    flags = arguments(SMALL | {"max_steps": 4})
    names = {"__name__": "notebook"}
    printed = ""
    for cell in json.loads((ROOT / "docs/start.ipynb").read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            exec(compile(source, "start.ipynb", "exec"), names)
            new = capsys.readouterr().out
            old = "".join("".join(output.get("text", "")) for output in cell["outputs"])
            assert beginnings(old) == beginnings(new) and bool(old) == bool(new)
            num_pictures = sum("image/png" in output.get("data", {}) for output in cell["outputs"])
            assert num_pictures == source.count("plt.show()")
            printed += new
        if "parameters" in cell["metadata"].get("tags", ()):
            names["FLAGS"] = flags
    assert "steps: 4 and 4" in printed
    curves = [list(names["curve"](name, "reward")) for name in ("grpo", "mine")]
    assert [list(steps) for steps, _ in curves] == [[1, 2, 3, 4]] * 2
    losses = [[step["loss"] for step in names["lines"](names["runs"] / name / "metrics.jsonl")]
              for name in ("grpo", "mine")]
    assert losses[0] != losses[1]
