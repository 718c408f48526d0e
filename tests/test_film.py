"""The moving picture shows the answers and the accuracy that a run logged, and no text of a policy
becomes a part of it. The tests read it as XML."""
import json
import xml.etree.ElementTree as ElementTree

from learn import film

HOSTILE = "</text><script>alert(1)</script><a href='http://x'/>]]> & \"$title\" \x00\n\ud800 <!--"
SVG = "{http://www.w3.org/2000/svg}"


def draw(folder, texts, prompt="(2+4)+8=", task="arithmetic"):
    """The picture of a made-up run whose answers after steps 0, 2, 4 and 7 are `texts`; from step 4
    on they are right. -> the root element"""
    answers = {step: {"prompt": prompt, "answer": "14", "text": text, "right": step >= 4}
               for step, text in zip((0, 2, 4, 7), texts)}
    config = {"script": "grpo.py", "torch": "2.6", "config": {"task": task}}
    summary = {"base": {"greedy": 0.125}, "trained": {"greedy": 1.0}, "steps": 7,
               "seconds_warm_start": 1.0, "seconds_total": 3.0}
    logs = {"config.json": [config], "summary.json": [summary],
            "evaluation.jsonl": [{"prompt": prompt, "base": answers[0], "trained": answers[7]}],
            "greedy.jsonl": [{"step": step, "examples": [one]} for step, one in answers.items()],
            "metrics.jsonl": [{"step": 2, "eval/greedy": 0.25}, {"step": 4, "eval/greedy": 0.5}]}
    for name, records in logs.items():
        (folder / name).write_text("\n".join(map(json.dumps, records)))
    film.main([str(folder), "--output", str(folder / "film.svg")])
    return ElementTree.fromstring((folder / "film.svg").read_text(encoding="utf-8"))


def texts(root, style):
    return ["".join(one.itertext()) for one in root.iter() if one.get("class") == style]


def test_the_picture_shows_the_answers_verdicts_and_shares_that_were_logged(tmp_path):
    answers = ["<answer>9</answer>", "<answer>8</answer>", "<think>2+4=6;6+8=14</think>", "14"]
    root = draw(tmp_path, answers)
    assert "".join(texts(root, "words")) == "".join(answers[:3])        # up to the first right one
    assert len(texts(root, "wrong verdict")) == 2 and len(texts(root, "right verdict")) == 1
    assert texts(root, "share") == ["12% → 100%"]
    points = [one.get("points").split() for one in root.iter(f"{SVG}polyline")]
    first, *others = points                                     # each begins where the last ended
    assert [one[0] for one in others] == [one[-1] for one in points[:-1]]
    assert first + [point for one in others for point in one[1:]] == [
        "70.0,455.0", "179.1,444.0", "288.3,422.0", "452.0,378.0"]


def test_hostile_text_stays_text(tmp_path):
    tags = [{one.tag for one in draw(tmp_path, [str(i) + text for i in range(4)], text).iter()}
            for text in ("", HOSTILE)]
    assert tags[0] == tags[1]
    draw(tmp_path, [str(i) + HOSTILE * 900 for i in range(4)], HOSTILE, HOSTILE)
    assert (tmp_path / "film.svg").stat().st_size < 20_000


def test_a_run_without_evaluations_gets_one_line(tmp_path, refused):
    draw(tmp_path, "9877")
    (tmp_path / "metrics.jsonl").write_text("")
    refused("--eval_steps 2", film.main, [str(tmp_path)])
