"""Draw curve.png, the curves of a run as a picture that can be sent or shown on a slide."""
import os
from pathlib import Path

from report import chart
from report.logs import read_log

# names in metrics.jsonl, for each panel
PANELS = (("reward", "accuracy", "eval/greedy", "eval/greedy_return"),
          ("completions/mean_length", "eval/greedy_length"),
          ("signal", "eval/greedy_think_share", "eval/greedy_accuracy_given_think",
           "eval/greedy_forced_think", "eval/greedy_hallucinated"),
          ("entropy", "kl", "eval/kl", "grad_norm"))


def draw_curve(folder):
    """Draw curve.png in the folder of a run. Raises ImportError without matplotlib."""
    lines = read_log(folder, "metrics", "step")
    with chart.figure(Path(folder, "curve.png"), 2, 2, width=720, height=480) as axes:
        for axis, names in zip(axes.flat, PANELS):
            for name in names:
                known = {line["step"]: line[name] for line in lines if name in line}
                if known:
                    marker = "o" if name.startswith("eval/") else ""    # a dot for each evaluation
                    axis.plot(list(known), list(known.values()), marker=marker, label=name)
                    axis.legend()
            axis.set_xlabel("step")
        name = os.fsencode(Path(folder).resolve().name)     # UTF-8, whatever the locale
        axes[0, 0].figure.suptitle(name.decode("utf-8", "replace"), parse_math=False)
