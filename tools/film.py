"""What a run learned, as a picture that moves: python -m tools.film RUN (make film RUN=...) writes
docs/learning.svg.

One held-out problem, and the likeliest answer to it before the first step, after about 2, 5, 10 and
20 steps and at the end; beside it, how many answers are right and how long they are. A rule chooses
the problem: of those that the base answers wrongly, that are right at the end, and that never go
back from right to wrong, the first of those with the most different answers.

The picture is text: no script, no font, nothing from elsewhere, and the same bytes each time. What
always looks alike is in film.svg. Where nothing may move, the first scene stands beside the whole
curves. The run has to be evaluated in the middle of training: python grpo.py --eval_steps 1.
"""
import argparse
import html
import json
import math
import re
import string
from pathlib import Path
from typing import NamedTuple

import common
from tools.observers import escape
from tools.report import read_log
from tools.runs import DOCS

TEMPLATE = Path(__file__).with_suffix(".svg")
STEPS = (2, 5, 10, 20)      # shown are the evaluated ones that are nearest, and both ends
SCENE = 1.4                 # seconds that an answer is shown
PAUSE = 2.4                 # seconds more for the last one
MOVE = 0.7                  # seconds before a scene in which the curves go on to its step
FADE = 0.3                  # seconds before a scene in which its answer takes the other's place
COLUMNS = 46                # characters in a line of an answer
MOST_POINTS = 50            # of a curve
MOST_SAID = 400             # characters of an answer in the description
LEFT = 28                   # where the bar below begins; END: where it and the curves end
RIGHT = 520                 # where the curves begin
END = 732
# Of each curve: its metric, the height of 0, and that of its greatest value.
CURVES = {"likeliest": ("eval/greedy", 168, 98),
          "sampled": ("accuracy", 168, 98),
          "length": ("completions/mean_length", 274, 214)}


class Scene(NamedTuple):
    """The policy after a step: seconds of training, and its answer."""
    step: int
    seconds: float
    text: str
    is_right: bool


# ---- 1. what a run left ----------------------------------------------------------------------

def pick_steps(evaluated, last):
    """The steps to show: 0, those evaluated in between that are nearest to STEPS, and the last.
    -> list of int"""
    nearest = {min(evaluated, key=lambda step: abs(step - wanted)) for wanted in STEPS}
    return sorted({0, last} | nearest)


def pick_problem(answers):
    """The prompt of the problem to show, by the rule above. answers: prompt -> what was answered,
    step by step. -> str, or None if there is none"""
    found = None
    most = 0
    for prompt, examples in answers.items():
        verdicts = [example["right"] for example in examples]
        num_texts = len({example["text"] for example in examples})
        is_learned = verdicts[0] is False and verdicts[-1] is True
        if is_learned and verdicts == sorted(verdicts) and num_texts > most:
            found = prompt
            most = num_texts
    return found


def read_curves(metrics, summary):
    """The curves. The likeliest answers are to held-out problems. Samples are those that the run
    trained on: a step trains on samples of the policy before it, so that those of the last policy
    are not known, and the last batch stands for them. -> {name: {step: value}}"""
    curves = {}
    for name, (metric, *_) in CURVES.items():
        shift = 0 if name == "likeliest" else 1
        curve = {line["step"] - shift: line[metric] for line in metrics
                 if line.get(metric) is not None}
        curves[name] = curve
    last = summary["steps"]
    curves["likeliest"] |= {0: summary["base"]["greedy"], last: summary["trained"]["greedy"]}
    for name in ("sampled", "length"):
        curves[name][last] = curves[name].get(last - 1)
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


def read_answers(folder, last):
    """What was answered to held-out problems. -> {step: {prompt: example}}"""
    pairs = read_log(folder / "evaluation.jsonl", "prompt", "base", "trained")
    if not pairs:
        raise ValueError(f"{folder}: evaluation.jsonl is missing or empty")
    logged = {line["step"]: line["examples"]
              for line in read_log(folder / "greedy.jsonl", "step", "examples")}
    logged[0] = [pair["base"] for pair in pairs]
    logged[last] = [pair["trained"] for pair in pairs]
    return {step: {example["prompt"]: example for example in examples}
            for step, examples in logged.items()}


def thinned(curve, kept):
    """The curve with at most MOST_POINTS of its points, and those at the steps kept. -> dict"""
    every = math.ceil(len(curve) / MOST_POINTS)
    return {step: value for i, (step, value) in enumerate(curve.items())
            if i % every == 0 or step in kept}


def scene(step, example, metrics):
    """What was answered after a step. -> Scene"""
    seconds = sum(line["step_time"] for line in metrics if line["step"] <= step)
    return Scene(step, seconds, example["text"], example["right"])


def read_run(folder):
    """A title, the problem with its answer, the scenes and the curves. ValueError if the run has no
    film to show. -> str, dict, list of Scene, dict"""
    script, flags = common.read_config(folder)
    if not (folder / "summary.json").exists():
        raise ValueError(f"{folder}: has not ended; resume it")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if "greedy" not in summary["base"]:
        raise ValueError(f"{folder}: no answer to {flags['task']} is right or wrong; "
                         "name a run of another task")

    # the steps at which all is known, then the problem, by what was answered at them
    last = summary["steps"]
    metrics = read_log(folder / "metrics.jsonl", "step", "step_time")
    if [line["step"] for line in metrics] != list(range(1, last + 1)):
        raise ValueError(f"{folder}: metrics.jsonl has not the {last} steps of summary.json; "
                         "resume the run")
    curves = read_curves(metrics, summary)
    answers = read_answers(folder, last)
    evaluated = [step for step in sorted(answers) if 0 < step < last
                 and all(step in curve for curve in curves.values())]
    if not evaluated:
        raise ValueError(f"{folder}: kept no answers from the middle of its training; "
                         "train with --eval_steps 1")
    steps = pick_steps(evaluated, last)
    in_all = [prompt for prompt in answers[0] if all(prompt in answers[step] for step in steps)]
    prompt = pick_problem({prompt: [answers[step][prompt] for step in steps] for prompt in in_all})
    if prompt is None:
        raise ValueError(f"{folder}: no held-out problem is answered wrongly at first and then "
                         "rightly to the end; name a run that learned more")
    scenes = [scene(step, answers[step][prompt], metrics) for step in steps]
    curves = {name: thinned(curve, steps) for name, curve in curves.items()}
    return f"{script} learns {flags['task']}", answers[0][prompt], scenes, curves


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


def percent(share):
    return f"{100 * share:.0f} %"


# ---- 3. places and times ---------------------------------------------------------------------

def place(name, step, curves):
    """Where a curve is at a step. Both curves of accuracies end at 1. -> x, y"""
    _, low, high = CURVES[name]
    curve = curves[name]
    most = max(1, *curve.values()) if name == "length" else 1
    x = RIGHT + (END - RIGHT) * step / max(curve)
    return x, low - (low - high) * curve[step] / most


def station(i, scenes):
    """Where scene i is on the bar below. -> x"""
    return LEFT + (END - LEFT) * i / (len(scenes) - 1)


def duration(scenes):
    """The seconds until all begins anew."""
    return len(scenes) * SCENE + PAUSE


def arrivals(scenes, steps):
    """When the curves come to each of the steps: they move before a scene begins, and rest at its
    step while it is shown. -> list of (seconds, step)"""
    found = [(0, 0)]
    for i, (before, after) in enumerate(zip(scenes, scenes[1:]), start=1):
        for step in steps:
            if before.step <= step <= after.step:
                share = (after.step - step) / (after.step - before.step)
                found.append((i * SCENE - MOVE * share, step))
    return [*found, (duration(scenes), scenes[-1].step)]


def visibility(i, scenes):
    """How visible scene i is, and when. -> list of (seconds, opacity)"""
    total = duration(scenes)
    begin = i * SCENE
    end = total if i == len(scenes) - 1 else begin + SCENE
    if i == 0:
        return [(0, 1), (end - FADE, 1), (end, 0), (total - FADE, 0), (total, 1)]
    return [(0, 0), (begin - FADE, 0), (begin, 1), (end - FADE, 1), (end, 0), (total, 0)]


def keyframes(style, moments, scenes):
    """What the elements of a style do in the course of the film. moments: list of (seconds,
    declaration). -> str"""
    total = duration(scenes)
    rules = "".join(f"{100 * seconds / total:.4g}%{{{does}}}" for seconds, does in moments)
    name = style.replace(".", "-")
    return f".{style} {{ animation-name: {name} }}\n@keyframes {name} {{ {rules} }}\n"


def shift(x, y=0):
    return f"transform:translate({x:.1f}px,{y:.1f}px)"


def motion(scenes, curves):
    """The part of the style sheet in which all moves. -> str"""
    text = ""
    for i in range(len(scenes)):
        fade = [(time, f"opacity:{opacity}") for time, opacity in visibility(i, scenes)]
        text += keyframes(f"scene{i}", fade, scenes)
    for name, curve in curves.items():
        walk = arrivals(scenes, curve)
        moments = [(time, shift(*place(name, step, curves))) for time, step in walk]
        text += keyframes(f"{name}.dot", moments, scenes)
    stops = [scene.step for scene in scenes]
    walk = arrivals(scenes, stops)
    width = END - RIGHT
    slide = [(time, shift(width * step / stops[-1])) for time, step in walk]
    ride = [(time, shift(station(stops.index(step), scenes), 314)) for time, step in walk]
    return text + keyframes("curtain", slide, scenes) + keyframes("now.dot", ride, scenes)


# ---- 4. the picture --------------------------------------------------------------------------

def draw_box(y, height, style):
    return f'<rect class="{style} box" x="{LEFT}" y="{y}" width="460" height="{height}" rx="8"/>'


def draw_answer(scene, problem):
    """The thought of a scene, its answer, and whether that is right. -> list of str"""
    thought, answer = split(scene.text)
    verdict = "right" if scene.is_right else "wrong"
    said = verdict
    if problem["answer"] and not scene.is_right:
        [said] = wrap(f"wrong, {problem['answer']} is right", 28, rows=1)
    if thought:
        parts = [draw_box(122, 100, "thought"),
                 say(LEFT + 446, 147, "verdict thought", "thinks")]
        for row, line in enumerate(wrap(thought, COLUMNS - 8, rows=4)):
            parts.append(say(LEFT + 14, 147 + 21 * row, "words thought", line))
    else:
        parts = [draw_box(122, 100, "none"), say(LEFT + 14, 147, "quiet", "no thought")]
    [shown] = wrap(answer, COLUMNS - len(said), rows=1)
    return [*parts, draw_box(234, 40, verdict),
            say(LEFT + 14, 259, f"words {verdict}", shown),
            say(LEFT + 446, 259, f"verdict {verdict}", said)]


def draw_scene(i, scenes, problem, curves):
    """All that is seen only while scene i is. -> str"""
    scene = scenes[i]
    when = "before RL" if i == 0 else f"after {scene.seconds:.0f} s of RL"
    x = station(i, scenes)
    values = {name: curve[scene.step] for name, curve in curves.items()}
    hidden = "" if i == 0 else ' opacity="0"'
    return "\n".join([
        f'<g class="scene scene{i}"{hidden}>',
        say(LEFT, 106, "step", f"step {scene.step}"),
        say(LEFT + 90, 106, "when", f"{when}, its likeliest answer:"),
        *draw_answer(scene, problem),
        say(RIGHT, 64, "likeliest number", percent(values["likeliest"])),
        say(RIGHT + 110, 64, "sampled number", percent(values["sampled"])),
        say(END, 203, "length number", f"{values['length']:.0f}"),
        f'<path class="done bar" d="M{LEFT} 314H{x:.1f}"/>',
        "</g>"])


def draw_curve(name, curves):
    """The line of a curve, and the dot that goes along it. -> str, str"""
    points = [place(name, step, curves) for step in curves[name]]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    x, y = points[0]
    return (f'<polyline class="{name} line" points="{line}"/>',
            f'<circle class="{name} dot" r="5" transform="translate({x:.1f} {y:.1f})"/>')


def describe(problem, scenes, curves):
    """What is to be seen, in words. -> str"""
    said = f"The held-out problem {problem['prompt']} and the likeliest answer to it."
    for scene in scenes:
        verdict = "right" if scene.is_right else "wrong"
        said += f" Step {scene.step}: {scene.text[:MOST_SAID]} ({verdict})."
    first, last = scenes[0].step, scenes[-1].step
    likeliest, sampled, length = (curves[name] for name in CURVES)
    return said + (
        f" The likeliest answers go from {percent(likeliest[first])} right to "
        f"{percent(likeliest[last])}, sampled ones from {percent(sampled[first])} to "
        f"{percent(sampled[last])} and from {length[first]:.0f} tokens to {length[last]:.0f}.")


def render(title, problem, scenes, curves):
    """The picture. -> str"""
    lines = [draw_curve(name, curves) for name in curves]
    [question] = wrap(problem["prompt"], 34, rows=1)
    stations = [say(station(i, scenes), 340, "station", str(scene.step))
                for i, scene in enumerate(scenes)]
    drawn = [draw_scene(i, scenes, problem, curves) for i in range(len(scenes))]
    return string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=html.escape(escape(title)),
        desc=html.escape(escape(describe(problem, scenes, curves))),
        question=html.escape(question),
        seconds=f"{duration(scenes):g}",
        keyframes=motion(scenes, curves),
        lines="\n".join(line for line, _ in lines),
        dots="\n".join(dot for _, dot in lines),
        stations="\n".join(stations), scenes="\n".join(drawn))


# ---- 5. the command --------------------------------------------------------------------------

def main(argv=None):
    """Draw the picture of the run that `argv` names. Exits with one line, code 2, if that has none
    to show."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = common.fail
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("--output", metavar="FILE", type=Path, default=DOCS / "learning.svg",
                        help="write there instead")
    args = parser.parse_args(argv)
    try:
        picture = render(*read_run(Path(args.run)))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        common.fail(f"{args.run}: its logs are damaged: {error!r}")
    except (OSError, ValueError) as error:
        common.fail(error)
    try:
        args.output.write_text(picture, encoding="utf-8")
    except OSError as error:
        common.fail(error)
    print(args.output)


if __name__ == "__main__":
    common.start(main)
