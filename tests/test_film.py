"""learning.svg shows what the run logged, moving or not, and no text of a policy becomes a part of
the picture. It is read as XML."""
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
from conftest import ROOT

from learn import film

HOSTILE = ("</text></svg><script>alert(1)</script><image href='http://x.example/'/>]]> & \"$title\""
           " \x00\x1b\n\u2028 \ud800 <!-- ${keyframes} <think>")
THOUGHT = "<think>2+4=6;6+8=14</think><answer>14</answer>"
LEARNED = {0: ("<answer>9</answer>", False), 2: ("<answer>8</answer>", False), 4: (THOUGHT, True),
           7: (THOUGHT, True)}
SVG = "{http://www.w3.org/2000/svg}"


def write_log(folder, name, records):
    """Write these records as the log NAME.jsonl."""
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / f"{name}.jsonl").write_text(text)


@pytest.fixture
def run(tmp_path):
    """run(answers, last=7, ...): a new run folder, of a policy whose likeliest answer to the one
    held-out problem after each evaluated step is that of `answers`, step -> (text, right)."""
    def make(answers, last=7, prompt="(2+4)+8=", task="arithmetic"):
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        config = {"script": "grpo.py", "torch": "2.6", "config": {"task": task}}
        (folder / "config.json").write_text(json.dumps(config))
        summary = {"base": {"greedy": 0.125}, "trained": {"greedy": 1.0}, "steps": last,
                   "seconds_warm_start": 1.0, "seconds_total": 3.0}
        (folder / "summary.json").write_text(json.dumps(summary))
        found = {step: {"prompt": prompt, "answer": "14", "text": text, "right": right}
                 for step, (text, right) in answers.items()}
        write_log(folder, "evaluation", [{"prompt": prompt, "answer": "14", "base": found[0],
                                          "trained": found[last]}])
        write_log(folder, "greedy", [{"step": step, "examples": [answer]}
                                     for step, answer in found.items()])
        lines = [{"step": step, "step_time": 1.5, "accuracy": 0.3 + step / 1000}
                 for step in range(1, last + 1)]
        for step in answers.keys() - {0}:
            lines[step - 1]["eval/greedy"] = 0.4 + step / 1000
        write_log(folder, "metrics", lines)
        return folder
    return make


@pytest.fixture
def draw(tmp_path):
    """draw(folder) -> the root element of its picture"""
    def make(folder):
        path = tmp_path / "film.svg"
        film.main([str(folder), "--output", str(path)])
        return ElementTree.fromstring(path.read_text(encoding="utf-8"))
    return make


def texts(root, style):
    """The texts that have these words as their style."""
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")
            if element.get("class") == style]


def test_the_picture_shows_the_answers_verdicts_and_shares_that_were_logged(run, draw):
    """The answer of the base is always seen, of the others by default the last one. The samples of
    step 5 are those of the policy after step 4."""
    root = draw(run(LEARNED))
    assert "".join(texts(root, "words")) == "".join(text for text, _ in LEARNED.values())
    assert [head for head in texts(root, "head") if "RL" in head] == [
        "before RL", "step 2, 3 s of RL", "step 4, 6 s of RL", "step 7, 10 s of RL"]
    scenes = list(root.iter(f"{SVG}g"))
    assert [scene.get("opacity") for scene in scenes] == ["0", "0", None]
    assert [texts(scene, "right verdict") for scene in scenes] == [[], ["right"], ["right"]]
    assert len(texts(root, "wrong verdict")) == 2
    assert texts(root, "likeliest number") == [
        f"likeliest 12 → {now} %" for now in (40, 40, 100)]
    assert texts(root, "sampled number") == [f"sampled 30 → {now} %" for now in (30, 30, 31)]
    assert "Step 0: <answer>9</answer> (wrong)." in root[1].text        # for who cannot see it


def test_the_line_that_moves_stops_where_the_curves_have_the_values_of_the_scene(run, draw):
    root = draw(run(LEARNED))
    stops = re.search("@keyframes line {(.*)}", root[2].text)[1]
    stops = list(dict.fromkeys(re.findall(r"translate\((.*?)px", stops)))
    for name in film.CURVES:
        dots = [f"{dot.get('cx')},{dot.get('cy')}" for dot in root.iter(f"{SVG}circle")
                if dot.get("class") == f"{name} dot"]
        [line] = [line.get("points").split() for line in root.iter(f"{SVG}polyline")
                  if line.get("class") == f"{name} curve"]
        assert set(dots) < set(line) and [dot.split(",")[0] for dot in dots] == stops


def test_a_hostile_or_endless_text_stays_a_text_in_its_box(run, draw):
    plain = draw(run({0: ("1", False), 3: ("2", False), 7: ("3", True)}))
    folder = run({0: (HOSTILE, False), 3: (HOSTILE * 900, False), 7: (f"1</think>{HOSTILE}", True)},
                 prompt=HOSTILE, task=HOSTILE)
    root = draw(folder)
    tags = [{element.tag for element in picture.iter()} for picture in (root, plain)]
    assert tags[0] - {f"{SVG}tspan"} == tags[1]
    assert HOSTILE[:20] in root[1].text and "alert(1)" in root[0].text
    assert max(len(text) for text in texts(root, "words")) <= film.COLUMNS
    assert len(ElementTree.tostring(root)) < 30_000


@pytest.mark.parametrize("path", ["docs/learning.svg", "learn/film.svg"])
def test_the_picture_has_no_script_and_no_foreign_address(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    tags = {element.tag.removeprefix(SVG) for element in ElementTree.fromstring(text).iter()}
    assert not {"script", "image", "use", "foreignObject", "a", "animate"} & tags
    assert text.count("://") == text.count('xmlns="http://www.w3.org/2000/svg"') == 1
    assert not re.search(r"url\(|@import|@font-face|href|\bon\w+=", text)
