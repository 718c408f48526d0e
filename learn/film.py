"""What a run learned, as a picture that moves: python -m learn.film RUN (make film RUN=...) writes
docs/learning.svg.

One held-out problem: the likeliest answer of the base, and beside it the one after about 2, 5, 10
and 20 steps and at the end; below, which share of all answers is right. A rule chooses the problem:
of those that the base answers wrongly, that are right at the end, and that never go back from right
to wrong, the first of those with the most different answers.

The picture is text: no script, no font, nothing from elsewhere. What always looks alike is in
film.svg. Where nothing may move, the last scene stands, with the answer of the base beside it.
The run has to be evaluated in the middle of training: python grpo.py --eval_steps 2.
"""
import html
import re
import string
from pathlib import Path
from typing import NamedTuple

import common
from report import escape, parser, start
from report import page as report
from report.logs import read_log

TEMPLATE = Path(__file__).with_suffix(".svg")
DOCS = common.HERE / "docs"
STEPS = (2, 5, 10, 20)      # shown are the evaluated ones that are nearest, and the last
SCENE = 1.6                 # seconds that an answer is shown
REST = 4.0                  # seconds more for the last one
MOVE = 0.7                  # seconds at the end of a scene in which the curves go on
FADE = 0.3                  # seconds in which an answer takes the place of another
COLUMNS = 24                # characters in a line of an answer
LEFT = 92                   # where the curves begin
RIGHT = 616                 # where they end
TOP = 324                   # the height of 100 %
BOTTOM = 412                # the height of 0 %
CURVES = ("likeliest", "sampled")


class Scene(NamedTuple):
    """The policy after a step: seconds of training, and its answer."""
    step: int
    seconds: float
    text: str
    verdict: str            # "right" or "wrong"


# ---- 1. what a run left ----------------------------------------------------------------------

def pick_steps(evaluated, last):
    """The steps to show: 0, of those evaluated in between the nearest to STEPS, and the last."""
    nearest = {min(evaluated, key=lambda step: abs(step - wanted)) for wanted in STEPS}
    return sorted({0, last} | nearest)


def pick_problem(answers):
    """The problem to show, by the rule above. answers: what was answered to each, step by step.
    -> those to this one; None if there is none"""
    found = []
    for examples in answers:
        verdicts = [example["right"] for example in examples]
        if verdicts[0] is False and verdicts[-1] is True and verdicts == sorted(verdicts):
            found.append(examples)
    return max(found, key=lambda examples: len({one["text"] for one in examples}), default=None)


def read_curves(metrics, summary):
    """Which share is right. The likeliest answers are to held-out problems. Samples are those that
    the run trained on: a step trains on samples of the policy before it, so that those of the last
    policy are not known, and the last batch stands for them. -> {name: {step: share}}"""
    last = summary["steps"]
    likeliest = {line["step"]: line["eval/greedy"] for line in metrics if "eval/greedy" in line}
    likeliest |= {0: summary["base"]["greedy"], last: summary["trained"]["greedy"]}
    sampled = {line["step"] - 1: line["accuracy"] for line in metrics if "accuracy" in line}
    sampled[last] = sampled.get(last - 1)
    return {"likeliest": dict(sorted(likeliest.items())), "sampled": sampled}


def read_run(folder):
    """A title, the problem with its answer, the scenes and the curves. ValueError if the run has no
    film to show. -> str, dict, list of Scene, dict"""
    run = report.read_run(folder)
    flags = run["config"]
    summary = run["summary"]
    if summary is None:
        raise ValueError("has not ended; resume it")
    if "greedy" not in summary["base"]:
        raise ValueError(f"no answer to {flags['task']} is right or wrong; name another run")

    # the steps at which all is known, then the problem, by what was answered at them
    last = summary["steps"]
    metrics = [line for line in run["metrics"] if line["step"] <= last]     # it may have gone on
    curves = read_curves(metrics, summary)
    answers = {line["step"]: line["examples"]           # to the same problems in the same order
               for line in read_log(folder, "greedy", "step", "examples")}
    answers[last] = [pair["trained"] for pair in run["evaluation"]]
    evaluated = [step for step in sorted(answers) if 0 < step < last
                 and all(step in curve for curve in curves.values())]
    if not evaluated:
        raise ValueError("kept no answers from the middle of its training; train with "
                         "--eval_steps 2")
    steps = pick_steps(evaluated, last)
    chosen = pick_problem(zip(*(answers[step] for step in steps)))
    if chosen is None:
        raise ValueError("no held-out problem is answered wrongly at first and then rightly to the "
                         "end; name a run that learned more")
    scenes = []
    for step, example in zip(steps, chosen):
        seconds = sum(line["step_time"] for line in metrics[:step])
        verdict = "right" if example["right"] else "wrong"
        scenes.append(Scene(step, seconds, example["text"], verdict))
    return f"{flags['script']} learns {flags['task']}", chosen[0], scenes, curves


# ---- 2. words --------------------------------------------------------------------------------

def split(text):
    """A completion as its thought, tags included, and its answer. -> str, str"""
    if "<think>" in text and "</think>" not in text:
        return text, ""
    thought, end, answer = text.rpartition("</think>")
    return thought + end, answer


def wrap(text, columns, rows):
    """A text on so many lines at most, and one for each step of a thought if these suffice; they
    end in semicolons. What is too long ends in an ellipsis. -> list of str"""
    steps = re.findall("[^;]*;|[^;]+", escape(text)) or [""]
    if len(steps) <= rows and max(map(len, steps)) <= columns:
        return steps
    lines = [""]
    for piece in re.findall(r"</?\w{1,12}>|[^<; ]{1,24}[; ]?|.", escape(text)):
        if len(lines[-1] + piece) > columns:
            lines.append("")
        lines[-1] += piece
    if len(lines) > rows:
        lines = lines[:rows]
        lines[-1] = lines[-1][:columns - 1] + "…"
    return lines


def say(x, y, style, text):
    """A line of text, in which the tags of thoughts and answers are pale. -> str"""
    shown = html.escape(text)
    shown = re.sub("&lt;/?(think|answer)&gt;", r'<tspan class="tag">\g<0></tspan>', shown)
    return f'<text class="{style}" x="{x:g}" y="{y}">{shown}</text>'


def describe(problem, scenes, curves):
    """What is to be seen, in words. -> str"""
    said = f"The held-out problem {problem['prompt']} and the likeliest answer to it."
    for scene in scenes:
        said += f" Step {scene.step}: {scene.text[:400]} ({scene.verdict})."
    for name in CURVES:
        said += f" Right answers, {name}: {change(name, scenes[-1], curves)}."
    return said


def change(name, scene, curves):
    """How the share of right answers went from the base to a scene. -> str"""
    before, now = curves[name][0], curves[name][scene.step]
    return f"{100 * before:.0f} → {100 * now:.0f} %"


# ---- 3. places and times ---------------------------------------------------------------------

def across(step, scenes):
    """Where a step is on the axis. -> x"""
    return LEFT + (RIGHT - LEFT) * step / scenes[-1].step


def height(share):
    return BOTTOM - (BOTTOM - TOP) * share


def duration(scenes):
    """The seconds until all begins anew; the base is no scene of its own."""
    return (len(scenes) - 1) * SCENE + REST


def keyframes(style, moments, scenes):
    """What the elements of a style do in the course of the film. moments: list of (seconds,
    declaration). -> str"""
    total = duration(scenes)
    rules = "".join(f"{100 * seconds / total:.4g}%{{{does}}}" for seconds, does in moments)
    return f".{style} {{ animation-name: {style} }}\n@keyframes {style} {{ {rules} }}\n"


def motion(scenes):
    """The part of the style sheet in which all moves: scenes fade in and out, the line that says
    where training is goes on to the next one, the curtain hides what comes after it. -> str"""
    total = duration(scenes)
    text = ""
    line = []
    curtain = []
    for i, scene in enumerate(scenes[1:]):
        begin = i * SCENE
        is_last = i == len(scenes) - 2
        end = total if is_last else begin + SCENE
        fade = [(begin, 1), (end - FADE, 1), (end, 0)]
        if i > 0:
            fade = [(0, 0), (begin - FADE, 0), *fade]
        fade += [] if is_last else [(total - FADE, 0), (total, 1 if i == 0 else 0)]
        text += keyframes(f"scene{scene.step}", [(t, f"opacity:{x}") for t, x in fade], scenes)

        x = across(scene.step, scenes)
        for seconds in (begin, total if is_last else end - MOVE):
            line.append((seconds, f"transform:translate({x:.1f}px)"))
            hidden = (RIGHT - x) / (RIGHT - LEFT)
            curtain.append((seconds, f"transform:translate({RIGHT}px) scale({hidden:.4f},1)"))
    return text + keyframes("line", line, scenes) + keyframes("curtain", curtain, scenes)


# ---- 4. the picture --------------------------------------------------------------------------

def draw_answer(x, when, scene):
    """What was answered, and whether that is right. -> list of str"""
    thought, answer = split(scene.text)
    rows = wrap(thought, COLUMNS, rows=4) if thought else []
    verdict = scene.verdict
    parts = [say(x, 106, "head", when), say(x + 288, 106, f"{verdict} verdict", verdict),
             f'<rect class="{verdict} box" x="{x}" y="120" width="288" height="138" rx="8"/>']
    if not thought:
        parts.append(say(x + 13, 148, "quiet", "no thought"))
    for row, words in enumerate([*rows, *wrap(answer, COLUMNS, rows=1)]):
        y = 148 + 24 * row if row < len(rows) else 244
        parts.append(say(x + 13, y, "words", words))
    return parts


def draw_scene(scene, scenes, curves):
    """All that is seen only while a scene is. -> str"""
    x = across(scene.step, scenes)
    parts = draw_answer(328, f"step {scene.step}, {scene.seconds:.0f} s of RL", scene)
    for name, curve in curves.items():
        place = 180 if name == "likeliest" else RIGHT
        parts.append(say(place, 300, f"{name} number", f"{name} {change(name, scene, curves)}"))
        y = height(curve[scene.step])
        parts.append(f'<circle class="{name} dot" cx="{x:.1f}" cy="{y:.1f}" r="6"/>')
    hidden = "" if scene == scenes[-1] else ' opacity="0"'
    return "\n".join([f'<g class="scene scene{scene.step}"{hidden}>', *parts, "</g>"])


def render(title, problem, scenes, curves):
    """The picture. -> str"""
    [shown_title] = wrap(title, 34, rows=1)
    [question] = wrap(problem["prompt"], 26, rows=1)
    [answer] = wrap(problem["answer"], 12, rows=1)
    ticks = "".join(f"M{across(scene.step, scenes):.1f} {BOTTOM}v7" for scene in scenes)
    lines = []
    for name, curve in curves.items():
        points = [f"{across(step, scenes):.1f},{height(share):.1f}"
                  for step, share in curve.items()]
        lines.append(f'<polyline class="{name} curve" points="{" ".join(points)}"/>')
    return string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=html.escape(escape(title)),
        shown_title=html.escape(shown_title),
        desc=html.escape(escape(describe(problem, scenes, curves))),
        question=html.escape(question),
        answer=html.escape(f"right: {answer}" if answer else ""),
        seconds=f"{duration(scenes):g}",
        keyframes=motion(scenes),
        before="\n".join(draw_answer(24, "before RL", scenes[0])),
        curves="\n".join(lines),
        ticks=ticks,
        last=f"step {scenes[-1].step}",
        scenes="\n".join(draw_scene(scene, scenes, curves) for scene in scenes[1:]))


# ---- 5. the command --------------------------------------------------------------------------

def main(argv=None):
    words = parser(__doc__)
    words.add_argument("run", metavar="RUN", type=Path, help="run folder")
    words.add_argument("--output", metavar="FILE", type=Path, default=DOCS / "learning.svg",
                       help="write there instead")
    args = words.parse_args(argv)
    try:
        picture = render(*read_run(args.run))
        args.output.write_text(picture, encoding="utf-8")
    except (OSError, ValueError, KeyError) as error:    # KeyError: a damaged log
        common.fail(f"{args.run}: {error}")
    print(args.output)


if __name__ == "__main__":
    start(main)
