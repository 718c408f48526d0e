"""Draw an animated picture of a run: python -m learn.film RUN (make film RUN=...) writes
docs/learning.svg.

The picture shows one held-out problem and how the policy's most likely answer to it changes: one
box for each different answer, from the base's to the first right one, with the evaluated steps at
which it was given. The boxes appear one after the other, and below them the curve of held-out
accuracy grows. We choose a problem that the base answers wrongly and that is answered correctly
from some step on; of these, we prefer one that the policy first thinks about and still gets wrong,
and then the one with the most different answers.

The picture is an SVG without a script. If a reader prefers reduced motion, it shows everything at
once. The run needs evaluations during training: python grpo.py --eval_steps 2.
"""
import html
import itertools
import re
import string
import textwrap
from pathlib import Path

import common
from learn import look
from report import escape, page, parser, start
from report.logs import read_log

TEMPLATE = Path(__file__).with_suffix(".svg")
PICTURE = common.HERE / "docs/learning.svg"
MOST = 5                        # number of boxes
SECONDS, PAUSE = 2, 4           # duration of a scene, and of the finished picture after the last
COLUMNS, ROWS = 44, 3           # size of the text of an answer, in characters
FIRST, LINE = 122, 22           # top of the first box, height of a line
LEFT, RIGHT, HEIGHT = 70, 452, 88       # of the curve: ends of its axis of steps, and its height


def read_run(folder):
    """Read a run and choose the problem. ValueError if the run has nothing to show. -> title (str),
    answers to one problem [(steps, dict)], held-out accuracy {step: share}"""
    run = page.read_run(folder)
    summary = run["summary"]
    if summary is None or "greedy" not in summary["base"]:
        raise ValueError("the run has not ended, or its task has no right or wrong answers; choose "
                         "a different run")
    accuracy = {0: summary["base"]["greedy"]}
    accuracy |= {line["step"]: line["eval/greedy"] for line in run["metrics"]
                 if "eval/greedy" in line}
    accuracy[summary["steps"]] = summary["trained"]["greedy"]

    examples = {line["step"]: line["examples"]      # the same problems in the same order
                for line in read_log(folder, "greedy", "step", "examples")}
    examples[summary["steps"]] = [pair["trained"] for pair in run["evaluation"]]
    steps = [step for step in accuracy if step in examples]
    if len(steps) < 3:
        raise ValueError("this run was not evaluated during training; train with --eval_steps 2")
    stories = [story(steps, answers) for answers in zip(*(examples[step] for step in steps))]
    chosen = max(stories, default=[], key=lambda boxes: (
        any("<think>" in answer["text"] for _, answer in boxes[:-1]), len(boxes)))
    if not chosen:
        raise ValueError("no held-out problem is first answered wrongly and then, from some step "
                         "on, correctly; choose a run that learned more")
    return f"{run['config']['script']} learns {run['config']['task']}", chosen, accuracy


def story(steps, answers):
    """Group the evaluated steps by the answer to one problem, up to the first right answer. -> list
    of (steps, answer), empty if the problem was not learned or takes more than MOST boxes"""
    verdicts = [answer["right"] for answer in answers]
    is_learned = verdicts == sorted(verdicts) and verdicts[0] < verdicts[-1]
    num_wrong = verdicts.count(False)
    boxes = []
    for _, group in itertools.groupby(zip(steps[:num_wrong], answers), lambda x: x[1]["text"]):
        its_steps, (answer, *_) = zip(*group)
        boxes.append((its_steps, answer))
    if not is_learned or len(boxes) >= MOST:
        return []
    return [*boxes, (steps[num_wrong:num_wrong + 1], answers[num_wrong])]


def shorten(text, columns):
    """Escape a text for SVG, at most `columns` characters of it. -> str"""
    text = escape(text[:columns + 1])
    return html.escape(text if len(text) <= columns else text[:columns - 1] + "…")


def draw_answer(top, steps, answer):
    """Draw an answer in its box, with its steps and the verdict. -> SVG, bottom of the box"""
    when = f"after steps {steps[0]} to {steps[-1]}"
    if len(steps) == 1:
        when = f"after step {steps[0]}" if steps[0] else "before RL"
    verdict = "right" if answer["right"] else "wrong"
    rows = [row for part in re.split("(?=<answer>)", answer["text"])        # on a row of its own
            for row in textwrap.wrap(part, COLUMNS)]
    if len(rows) > ROWS:
        rows[ROWS - 1:] = ["..."]
    height = LINE * (1 + len(rows)) + 14
    texts = [f'<rect class="{verdict} box" x="14" y="{top}" width="452" height="{height}" rx="8"/>',
             f'<text class="head" x="26" y="{top + 22}">{when}</text>',
             f'<text class="{verdict} verdict" x="454" y="{top + 22}">{verdict}</text>']
    texts += [f'<text class="words" x="26" y="{top + 22 + LINE * i}">{shorten(row, COLUMNS)}</text>'
              for i, row in enumerate(rows, start=1)]
    return "\n".join(texts), top + height


def render(title, boxes, accuracy):
    """Draw the picture. -> SVG"""
    drawn = []
    bottom = FIRST - 10
    for steps, answer in boxes:
        box, bottom = draw_answer(bottom + 10, steps, answer)
        drawn.append(box)
    top = bottom + 62                               # of the curve, where it is at 100%
    last = max(accuracy)
    x = look.scale(0, last, LEFT, RIGHT)
    y = look.scale(0, 1, top + HEIGHT, top)
    drawn.append(f'<text class="share" x="454" y="{top - 22}">{100 * accuracy[0]:.0f}% → '
                 f"{100 * accuracy[last]:.0f}%</text>")

    # a scene adds an answer and the curve up to the last step of the answer; the last adds the rest
    duration = SECONDS * len(boxes) + PAUSE
    ends = [-1, *(steps[-1] for steps, _ in boxes), last]
    scenes = []
    style = ""
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        points = " ".join(f"{x(step):.1f},{y(share):.1f}" for step, share in accuracy.items()
                          if begin <= step <= end)
        dots = "".join(f'<circle class="dot" cx="{x(step):.1f}" cy="{y(share):.1f}" r="3.5"/>'
                       for step, share in accuracy.items() if begin < step <= end)
        scenes.append(f'<g class="scene{i}">\n{drawn[i]}\n<polyline class="curve" '
                      f'points="{points}"/>{dots}\n</g>\n')
        if i > 0:                                   # the first scene is always visible
            seen = 100 * SECONDS * i / duration
            style += (f"  .scene{i} {{ animation: scene{i} {duration}s both }}\n"
                      f"  @keyframes scene{i} {{ 0%, {seen:.1f}% {{ opacity: 0 }} "
                      f"{seen + 3:.1f}%, 100% {{ opacity: 1 }} }}\n")
    description = "; ".join(f"step {steps[0]}: {answer['text'][:200]}" for steps, answer in boxes)
    problem = boxes[0][1]
    return string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=shorten(title, 32), question=shorten(problem["prompt"], 32),
        answer=shorten(problem["answer"], 8), desc=html.escape(escape(description)),
        scenes="".join(scenes), style=style, top=top,
        height=top + HEIGHT + 38, border=top + HEIGHT + 37,
        axis="".join(f'<text class="middle" x="{x(step):.1f}" y="112">{step:g}</text>'
                     for step in look.ticks(0, last)))


def main(argv=None):
    command = parser(__doc__)
    command.add_argument("run", metavar="RUN", type=Path, help="run folder")
    args = command.parse_args(argv)
    try:
        PICTURE.write_text(render(*read_run(args.run)), encoding="utf-8")
    except (OSError, ValueError, KeyError) as error:    # KeyError: a damaged log
        common.fail(f"{args.run}: {error}")
    print(PICTURE)


if __name__ == "__main__":
    start(main)
