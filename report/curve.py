"""Draw curve.png, the curves of a run as a picture that can be sent or shown on a slide."""
import os
from pathlib import Path

from report.logs import read_log

# names in metrics.jsonl, for each panel
PANELS = (("reward", "accuracy", "eval/greedy", "eval/greedy_return"),
          ("completions/mean_length", "eval/mean_length"),
          ("entropy", "signal"), ("kl", "eval/kl", "grad_norm"))


def draw_curve(folder):
    """Draw curve.png in the folder of a run. Raises ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install matplotlib") from error
    lines = read_log(folder, "metrics", "step")
    figure = Figure(figsize=(9, 6), layout="constrained")
    for axis, names in zip(figure.subplots(2, 2).flat, PANELS):
        for name in names:
            known = {line["step"]: line[name] for line in lines if name in line}
            if known:
                marker = "o" if name.startswith("eval/") else ""    # a dot for each evaluation
                axis.plot(list(known), list(known.values()), marker=marker, label=name)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize="small")
    name = os.fsencode(Path(folder).resolve().name)     # UTF-8, whatever the locale
    figure.suptitle(name.decode("utf-8", "replace"), parse_math=False)
    figure.savefig(Path(folder) / "curve.png", dpi=120)
