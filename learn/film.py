"""Draw an animated picture of a run: python -m learn.film RUN (make film RUN=...) writes
docs/learning.svg.

The picture shows one held-out problem. On the left is the most likely answer of the base. On the
right are the most likely answers after about 2, 5, 10 and 20 steps and at the end, one after the
other. Below them, the curve of held-out accuracy grows. We choose a problem that the base answers
wrongly and that is answered correctly from some step on; of these, the one with the most different
answers.

The picture is an SVG without a script. If a reader prefers reduced motion, it shows only the last
scene. The run needs evaluations during training: python grpo.py --eval_steps 2.
"""
import html
import re
import string
import textwrap
from pathlib import Path

import common
from report import escape, parser, start
from report.logs import read_log, read_summary

TEMPLATE = Path(__file__).with_suffix(".svg")
STEPS = (2, 5, 10, 20)      # the evaluated steps nearest to these are shown
SECONDS = 2                 # duration of a scene
COLUMNS, ROWS = 24, 5       # size of the box of an answer, in characters
LEFT, RIGHT = 92, 616       # ends of the axis of steps
TOP, BOTTOM = 324, 412      # heights of 100 % and of 0 %


def read_run(folder):
    """Read a run and choose the problem. ValueError if the run has nothing to show. -> title (str),
    answers to one problem {step: dict}, held-out accuracy {step: share}"""
    script, flags = common.read_config(folder)
    summary = read_summary(folder)
    if summary is None or "greedy" not in summary["base"]:
        raise ValueError("the run has not ended, or its task has no right or wrong answers; choose "
                         "a different run")
    last = summary["steps"]
    accuracy = {0: summary["base"]["greedy"]}
    accuracy |= {line["step"]: line["eval/greedy"] for line in read_log(
        folder, "metrics", "step", "eval/greedy") if line["step"] < last}
    accuracy[last] = summary["trained"]["greedy"]

    answers = {line["step"]: line["examples"]       # the same problems in the same order
               for line in read_log(folder, "greedy", "step", "examples")}
    answers[last] = [pair["trained"] for pair in read_log(folder, "evaluation", "trained")]
    known = [step for step in accuracy if step in answers]
    if len(known) < 3:
        raise ValueError("this run was not evaluated during training; train with --eval_steps 2")
    nearest = [min(known[1:-1], key=lambda step: abs(step - wanted)) for wanted in STEPS]
    steps = sorted({0, last, *nearest})

    def num_different(examples):
        verdicts = [one["right"] for one in examples]
        is_learned = verdicts == sorted(verdicts) and verdicts[0] < verdicts[-1]
        return is_learned * len({one["text"] for one in examples})

    chosen = max(zip(*(answers[step] for step in steps)), key=num_different)
    if num_different(chosen) == 0:
        raise ValueError("no held-out problem is first answered wrongly and then, from some step "
                         "on, correctly; choose a run that learned more")
    return f"{script} learns {flags['task']}", dict(zip(steps, chosen)), accuracy


def shorten(text, columns):
    """Escape a text for SVG, at most `columns` characters of it. -> str"""
    text = escape(text[:columns + 1])
    return html.escape(text if len(text) <= columns else text[:columns - 1] + "…")


def draw_answer(x, when, answer):
    """Draw an answer in its box, with the verdict. -> SVG"""
    verdict = "right" if answer["right"] else "wrong"
    parts = [f'<text class="head" x="{x}" y="106">{when}</text>',
             f'<text class="{verdict} verdict" x="{x + 288}" y="106">{verdict}</text>',
             f'<rect class="{verdict} box" x="{x}" y="120" width="288" height="138" rx="8"/>']
    rows = [row for part in re.split("(?<=;)|(?=<answer>)", answer["text"])     # a step per row
            for row in textwrap.wrap(part, COLUMNS)]
    if len(rows) > ROWS:
        rows[ROWS - 1:] = ["..."]
    return "\n".join(parts + [f'<text class="words" x="{x + 13}" y="{148 + 24 * i}">'
                              f"{shorten(row, COLUMNS)}</text>" for i, row in enumerate(rows)])


def render(title, answers, accuracy):
    """Draw the picture. -> SVG"""
    last = max(accuracy)
    places = {step: (f"{LEFT + (RIGHT - LEFT) * step / last:.1f}",
                     f"{BOTTOM - (BOTTOM - TOP) * share:.1f}") for step, share in accuracy.items()}
    first, *shown = answers
    duration = SECONDS * len(shown)
    scenes = ""
    for i, step in enumerate(shown):
        x, y = places[step]
        points = " ".join(",".join(place) for at, place in places.items() if at <= step)
        share = f"{100 * accuracy[first]:.0f} → {100 * accuracy[step]:.0f} %"
        scenes += f"""<g class="scene" style="animation-delay:{i * SECONDS - duration}s">
{draw_answer(328, f"after step {step}", answers[step])}
<text class="share" x="616" y="300">{share}</text>
<polyline class="curve" points="{points}"/><circle class="dot" cx="{x}" cy="{y}" r="6"/>
</g>
"""
    problem = answers[first]
    description = "; ".join(f"step {step}: {one['text'][:200]}" for step, one in answers.items())
    return string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=shorten(title, 34), question=shorten(problem["prompt"], 26), last=f"step {last}",
        answer=shorten(problem["answer"], 12), desc=html.escape(escape(description)), scenes=scenes,
        before=draw_answer(24, "before RL", problem), duration=duration, part=100 / len(shown),
        fade=100 / len(shown) - 100 * 0.3 / duration)


def main(argv=None):
    command = parser(__doc__)
    command.add_argument("run", metavar="RUN", type=Path, help="run folder")
    command.add_argument("--output", metavar="FILE", type=Path, help="path of the picture",
                         default=common.HERE / "docs/learning.svg")
    args = command.parse_args(argv)
    try:
        args.output.write_text(render(*read_run(args.run)), encoding="utf-8")
    except (OSError, ValueError, KeyError) as error:    # KeyError: a damaged log
        common.fail(f"{args.run}: {error}")
    print(args.output)


if __name__ == "__main__":
    start(main)
