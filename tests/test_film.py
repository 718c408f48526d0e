"""learning.svg: that it shows what the run logged, when it shows it, and that no text of a policy
becomes a part of the picture. How it looks was seen in a browser; here it is read as XML."""
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
from conftest import ROOT

from tools import film

HOSTILE = ("</text></svg><script>alert(1)</script><image href='http://x.example/'/>]]> & \"$title\""
           " \x00\x1b\n\u2028 \ud800 <!-- ${keyframes} <think>")
THOUGHT = "<think>2+4=6;6+8=14</think><answer>14</answer>"
SVG = "{http://www.w3.org/2000/svg}"


def example(text, right, prompt="(2+4)+8="):
    """What an evaluation keeps of a problem."""
    return {"prompt": prompt, "answer": "14", "text": text, "right": right}


def write_log(folder, name, records):
    """Write these records as the log NAME.jsonl."""
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / f"{name}.jsonl").write_text(text)


@pytest.fixture
def run(tmp_path):
    """run(answers, last=7, **scores): a new run folder, of a policy whose likeliest answer to the
    one held-out problem after each evaluated step is that of `answers`, step -> (text, right); 0
    and `last` are among them. The scores are those of base and trained policy, as far as they are
    not the usual ones."""
    def make(answers, last=7, prompt="(2+4)+8=", **scores):
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        config = {"script": "grpo.py", "argv": [], "python": "3.11.2 (main)", "torch": "2.6",
                  "config": {"task": "arithmetic"}}
        (folder / "config.json").write_text(json.dumps(config))
        ends = {"base": {"greedy": 0.125, "pass@1": 0.25, "mean_length": 5.0},
                "trained": {"greedy": 1.0, "pass@1": 0.75, "mean_length": 20.0}}
        (folder / "summary.json").write_text(json.dumps(ends | {"steps": last} | scores))
        found = {step: example(*answer, prompt) for step, answer in answers.items()}
        write_log(folder, "evaluation", [{"prompt": prompt, "answer": "14", "base": found[0],
                                          "trained": found[last]}])
        write_log(folder, "greedy", [{"step": step, "examples": [answer]}
                                     for step, answer in found.items() if step > 0])
        lines = []
        for step in range(1, last + 1):
            line = {"step": step, "step_time": 1.5, "accuracy": 0.3 + step / 1000,
                    "completions/mean_length": 10 + step}
            if step in answers:
                line["eval/greedy"] = 0.4 + step / 1000
            lines.append(line)
        write_log(folder, "metrics", lines)
        return folder
    return make


@pytest.fixture
def usual(run):
    """The folder of a run of 7 steps that learns to think."""
    return run({0: ("<answer>9</answer>", False), 2: ("<answer>8</answer>", False),
                4: (THOUGHT, True), 7: (THOUGHT, True)})


class Picture:
    """A picture that is read as XML, and its style sheet."""

    def __init__(self, text):
        self.text = text
        self.root = ElementTree.fromstring(text)
        self.tags = [element.tag.removeprefix(SVG) for element in self.root.iter()]
        self.style = self.root.find(f"{SVG}style").text
        self.still, _, self.moving = self.style.partition(
            "@media (prefers-reduced-motion: no-preference) {")
        self.scenes = list(self.root.iter(f"{SVG}g"))

    def texts(self, style, inside=None):
        """The texts that have these words as their style."""
        root = self.root if inside is None else inside
        return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")
                if element.get("class") == style]

    def at(self, name, share):
        """The numbers of what is animated at a share of the film: an opacity, or x and y."""
        [rules] = re.findall(rf"@keyframes {name} {{ (.*) }}", self.moving)
        moments = [(float(percent) / 100, [float(number) for number in re.findall(
            r"-?\d[\d.]*", does)]) for percent, does in re.findall(r"([\d.]+)%{(.*?)}", rules)]
        assert [when for when, _ in moments] == sorted(when for when, _ in moments)
        assert (moments[0][0], moments[-1][0]) == (0, 1)
        for (start, before), (end, after) in zip(moments, moments[1:]):
            if start <= share <= end and start < end:
                part = (share - start) / (end - start)
                return [a + part * (b - a) for a, b in zip(before, after)]
        raise AssertionError(share)


@pytest.fixture
def draw(tmp_path):
    """draw(folder) -> the Picture of a run."""
    def make(folder):
        path = tmp_path / "film.svg"
        film.main([str(folder), "--output", str(path)])
        return Picture(path.read_text(encoding="utf-8"))
    return make


# ---- what is shown ---------------------------------------------------------------------------

def test_each_scene_has_its_step_its_seconds_its_answer_and_its_verdict_as_logged(usual, draw):
    picture = draw(usual)
    found = []
    for scene in picture.scenes:
        words = [text for style in ("words thought", "words wrong", "words right")
                 for text in picture.texts(style, scene)]
        verdict = picture.texts("verdict right", scene) + picture.texts("verdict wrong", scene)
        said = [*picture.texts("step", scene), *picture.texts("when", scene)]
        found.append((*said, "".join(words), *verdict))
    assert found == [
        ("step 0", "before RL, its likeliest answer:", "<answer>9</answer>", "wrong, 14 is right"),
        ("step 2", "after 3 s of RL, its likeliest answer:", "<answer>8</answer>",
         "wrong, 14 is right"),
        ("step 4", "after 6 s of RL, its likeliest answer:", THOUGHT, "right"),
        ("step 7", "after 10 s of RL, its likeliest answer:", THOUGHT, "right")]
    assert picture.texts("question") == ["(2+4)+8="]
    assert picture.texts("station") == ["0", "2", "4", "7"]


def test_who_thinks_has_a_box_for_it_and_who_does_not_an_empty_one(usual, draw):
    picture = draw(usual)
    boxes = [[rect.get("class") for rect in scene.iter(f"{SVG}rect")] for scene in picture.scenes]
    assert boxes == [["none box", "wrong box"]] * 2 + [["thought box", "right box"]] * 2
    assert [picture.texts("quiet", scene) for scene in picture.scenes] == [
        ["no thought"], ["no thought"], [], []]


def test_the_numbers_of_a_scene_are_those_of_the_policy_after_its_step(usual, draw):
    """The samples of step 5 are those of the policy after step 4."""
    picture = draw(usual)
    metrics = film.read_log(usual / "metrics.jsonl", "step")
    summary = json.loads((usual / "summary.json").read_text())
    curves = film.read_curves(metrics, summary)
    assert curves["likeliest"] == {0: 0.125, 2: 0.402, 4: 0.404, 7: 1.0}
    assert curves["sampled"] == {0: 0.301, 1: 0.302, 2: 0.303, 3: 0.304, 4: 0.305, 5: 0.306,
                                 6: 0.307, 7: 0.307}
    assert curves["length"] == {0: 11, 1: 12, 2: 13, 3: 14, 4: 15, 5: 16, 6: 17, 7: 17}
    assert picture.texts("likeliest number") == ["12 %", "40 %", "40 %", "100 %"]
    assert picture.texts("sampled number") == ["30 %", "30 %", "30 %", "31 %"]
    assert picture.texts("length number") == ["11", "13", "15", "17"]


def test_title_and_description_say_what_is_seen(usual, draw):
    root = draw(usual).root
    assert root.get("aria-labelledby").split() == [root[0].get("id"), root[1].get("id")]
    assert [element.tag for element in root[:2]] == [f"{SVG}title", f"{SVG}desc"]
    assert root[0].text == "grpo.py learns arithmetic"
    said = root[1].text
    for words in ("(2+4)+8=", "Step 0: <answer>9</answer> (wrong).", f"Step 7: {THOUGHT} (right).",
                  "from 12 % right to 100 %", "from 30 % to 31 % and from 11 tokens to 17"):
        assert words in said


def test_a_wrong_answer_to_a_problem_without_a_known_one_is_only_wrong(usual, draw):
    path = usual / "evaluation.jsonl"
    path.write_text(path.read_text().replace('"answer": "14"', '"answer": ""'))
    assert draw(usual).texts("verdict wrong")[0] == "wrong"


# ---- what is chosen --------------------------------------------------------------------------

@pytest.mark.parametrize("evaluated, last, steps", [
    (range(1, 35), 35, [0, 2, 5, 10, 20, 35]),
    (range(1, 8), 8, [0, 2, 5, 7, 8]),
    ([10, 20, 30], 35, [0, 10, 20, 35]),
    ([3, 6, 9, 12], 13, [0, 3, 6, 9, 12, 13]),
    ([1, 3, 8, 12], 99, [0, 1, 3, 8, 12, 99]),              # of two as near, the earlier
    ([1], 2, [0, 1, 2])])
def test_the_steps_are_the_evaluated_ones_that_are_nearest_and_both_ends(evaluated, last, steps):
    assert film.pick_steps(list(evaluated), last) == steps


def test_the_problem_is_the_first_of_those_that_are_learned_with_the_most_different_answers():
    def answered(*texts_and_verdicts):
        return [example(text, right) for text, right in texts_and_verdicts]
    answers = {
        "right at once": answered(("1", True), ("2", True), ("3", True)),
        "never right": answered(("1", False), ("2", False), ("3", False)),
        "not judged": answered(("1", None), ("2", None), ("3", None)),
        "back to wrong": answered(("1", False), ("2", True), ("3", False), ("4", True)),
        "two": answered(("1", False), ("2", True), ("2", True)),
        "three": answered(("1", False), ("2", False), ("3", True)),
        "three, later": answered(("4", False), ("5", True), ("6", True))}
    assert film.pick_problem(answers) == "three"
    del answers["three"], answers["three, later"]
    assert film.pick_problem(answers) == "two"
    del answers["two"]
    assert film.pick_problem(answers) is None


def test_a_problem_that_was_not_always_asked_is_not_chosen(usual, draw):
    """As in a run that was resumed with --num_eval_problems."""
    records = film.read_log(usual / "evaluation.jsonl")
    other = {"prompt": "1+1=", "answer": "14", "base": example("a", False, "1+1="),
             "trained": example("b", True, "1+1=")}
    write_log(usual, "evaluation", [other, *records])
    assert draw(usual).texts("question") == ["(2+4)+8="]


# ---- words -----------------------------------------------------------------------------------

@pytest.mark.parametrize("text, parts", [
    ("<answer>1</answer>", ("", "<answer>1</answer>")),
    ("<think>1</think>2", ("<think>1</think>", "2")),
    ("<think>1</think><think>2</think>3", ("<think>1</think><think>2</think>", "3")),
    ("<think>1;2", ("<think>1;2", "")), ("7</think>8", ("7</think>", "8")), ("", ("", ""))])
def test_a_completion_is_a_thought_and_an_answer(text, parts):
    assert film.split(text) == parts


@pytest.mark.parametrize("text, columns, rows, lines", [
    ("1+1=2;2+3=5", 20, 2, ["1+1=2;", "2+3=5"]),            # a line for each step
    ("1+1=2;2+3=5", 20, 1, ["1+1=2;2+3=5"]),
    ("1+1=2;2+3=5;5+4=9", 12, 2, ["1+1=2;2+3=5;", "5+4=9"]),
    ("1+1=2;2+3=5;5+4=9", 9, 2, ["1+1=2;", "2+3=5;…"]),
    ("<think>1;2;3</think>", 12, 2, ["<think>1;2;3", "</think>"]),
    ("", 9, 1, [""]), (";", 9, 1, [";"]), ("a\nb", 9, 1, ["a\\nb"])])
def test_a_text_is_broken_behind_its_steps_and_cut_where_it_is_too_long(text, columns, rows, lines):
    assert film.wrap(text, columns, rows) == lines


def test_hundreds_of_characters_stay_in_their_box(run, draw):
    text = "<think>" + "so 12345 + 1 = 12346 and then " * 20 + "</think>" + "x" * 300
    picture = draw(run({0: ("1", False), 3: ("2", False), 7: (text, True)}))
    lines = picture.texts("words thought")
    assert len(lines) == 4 and lines[-1].endswith("…")
    assert max(len(line) for line in lines) <= film.COLUMNS
    assert picture.texts("words right")[0].endswith("…")


# ---- texts that are none of ours -------------------------------------------------------------

def test_the_tags_of_a_thought_are_seen_as_text(usual, draw):
    picture = draw(usual)
    tags = ["".join(element.itertext()) for element in picture.root.iter(f"{SVG}tspan")]
    assert tags == ["<answer>", "</answer>"] * 2 + [
        "<think>", "</think>", "<answer>", "</answer>"] * 2
    assert {element.get("class") for element in picture.root.iter(f"{SVG}tspan")} == {"tag"}


def test_a_hostile_text_stays_a_text(run, draw):
    plain = draw(run({0: ("1", False), 3: ("2", False), 7: ("3", True)}))
    folder = run({0: (HOSTILE, False), 3: (HOSTILE * 9, False), 7: (f"1</think>{HOSTILE}", True)},
                 prompt=HOSTILE)
    config = json.loads((folder / "config.json").read_text())
    config["config"]["task"] = HOSTILE
    (folder / "config.json").write_text(json.dumps(config))
    picture = draw(folder)
    assert set(picture.tags) - {"tspan"} == set(plain.tags)
    assert HOSTILE[:20] in picture.root[1].text
    assert "alert(1)" in picture.root[0].text
    assert re.sub(r"\s+", "", picture.style) == re.sub(r"\s+", "", plain.style)


# ---- when it is shown ------------------------------------------------------------------------

def test_without_animation_the_first_scene_alone_is_seen_beside_whole_curves(usual, draw):
    picture = draw(usual)
    assert [scene.get("opacity") for scene in picture.scenes] == [None, "0", "0", "0"]
    assert "animation" not in picture.still and "@keyframes" not in picture.still
    assert ".curtain { display: none }" in picture.still
    assert "opacity" not in picture.still.replace(".tag { opacity: 0.6 }", "")
    for element in picture.root.iter():
        assert element.get("style") is None
        assert not re.search("animate|set", element.tag.removeprefix(SVG))      # but by style sheet
    dots = list(picture.root.iter(f"{SVG}circle"))
    assert len(dots) == 4
    for dot in dots:                                        # where they also begin to move
        x, y = picture.at(dot.get("class").replace(" ", "-"), 0)
        assert dot.get("transform") in (f"translate({x:.1f} {y:.1f})", f"translate({x:g} {y:g})")


@pytest.mark.parametrize("i, step", [(0, 0), (1, 2), (2, 4), (3, 7)])
def test_while_a_scene_is_shown_it_is_alone_and_the_curves_rest_at_its_step(usual, draw, i, step):
    picture = draw(usual)
    *_, scenes, curves = film.read_run(usual)
    total = film.duration(scenes)
    last_moment = film.SCENE - film.MOVE if step < 7 else film.SCENE + film.PAUSE - film.FADE
    for seconds in (i * film.SCENE + 0.01, i * film.SCENE + last_moment - 0.01):
        share = seconds / total
        opacities = [picture.at(f"scene{k}", share)[0] for k in range(4)]
        assert opacities == [k == i for k in range(4)]
        for name in curves:
            assert picture.at(f"{name}-dot", share) == pytest.approx(
                film.place(name, step, curves), abs=0.06)
        assert picture.at("curtain", share)[0] == pytest.approx(212 * step / 7, abs=0.06)
        assert picture.at("now-dot", share)[0] == pytest.approx(28 + 704 * i / 3, abs=0.06)


def test_at_any_time_opacities_add_up_to_one_and_all_curves_are_at_the_same_step(usual, draw):
    picture = draw(usual)
    names = ["likeliest-dot", "sampled-dot", "length-dot"]
    for share in [n / 211 for n in range(212)]:
        opacities = [picture.at(f"scene{k}", share)[0] for k in range(4)]
        assert sum(opacities) == pytest.approx(1, abs=0.02)
        x = picture.at("curtain", share)[0] + film.RIGHT
        for name in names:
            assert picture.at(name, share)[0] == pytest.approx(x, abs=0.5)


def test_the_line_of_a_curve_goes_through_its_values(usual, draw):
    picture = draw(usual)
    lines = {element.get("class"): element.get("points")
             for element in picture.root.iter(f"{SVG}polyline")}
    assert lines["likeliest line"] == "520.0,159.2 580.6,139.9 641.1,139.7 732.0,98.0"
    assert lines["length line"].startswith("520.0,235.2 ")      # 11 of 17 of the way up
    assert lines["length line"].endswith(" 732.0,214.0")


# ---- the file --------------------------------------------------------------------------------

def test_one_run_gives_the_same_bytes_each_time(usual, draw):
    assert draw(usual).text == draw(usual).text


def test_the_film_of_a_long_run_is_small(run, draw):
    answers = {step: ("1", step > 300) for step in range(601)}
    answers[0] = ("2", False)
    assert len(draw(run(answers, last=600)).text) < 30_000


def pictures():
    """The committed picture, and the template, in which nothing is filled in."""
    return [(ROOT / "docs/learning.svg").read_text(encoding="utf-8"),
            film.TEMPLATE.read_text(encoding="utf-8")]


@pytest.mark.parametrize("text", pictures(), ids=["learning.svg", "film.svg"])
def test_the_picture_has_no_script_and_no_foreign_address(text):
    picture = Picture(text)
    assert not {"script", "image", "use", "foreignObject", "a", "animate"} & set(picture.tags)
    assert text.count("://") == text.count('xmlns="http://www.w3.org/2000/svg"') == 1
    assert not re.search(r"url\(|@import|@font-face|href|\bon\w+=", text)


def test_the_committed_picture_is_of_a_run_that_learns_to_think_and_has_todays_look():
    text = (ROOT / "docs/learning.svg").read_text(encoding="utf-8")
    picture = Picture(text)
    assert len(text.encode()) < 30_000
    assert len(picture.scenes) == 6
    assert picture.texts("station")[:5] == ["0", "2", "5", "10", "20"]
    assert "<think>" not in "".join(picture.scenes[0].itertext())
    assert "<think>" in "".join(picture.scenes[-1].itertext())
    said = picture.root[1].text
    numbers = {style: picture.texts(f"{style} number") for style in film.CURVES}
    for style in ("likeliest", "sampled"):
        assert f"{numbers[style][0]}" in said and f"to {numbers[style][-1]}" in said
    assert f"from {numbers['length'][0]} tokens to {numbers['length'][-1]}" in said
    for step, scene in zip(picture.texts("station"), picture.scenes):
        verdict = "right" if picture.texts("verdict right", scene) else "wrong"
        assert re.search(rf"Step {step}: [^:]*\({verdict}\)", said)
        [shown] = picture.texts(f"words {verdict}", scene)
        assert f"{shown} ({verdict})" in said
    same = [line for line in film.TEMPLATE.read_text().splitlines() if "$" not in line]
    assert set(same) <= set(text.splitlines()), "run make film again"


def test_a_share_is_rounded_to_whole_percents():
    assert [film.percent(share) for share in (0.0, 0.086, 0.996, 1.0)] == [
        "0 %", "9 %", "100 %", "100 %"]


def test_what_is_too_long_for_its_place_ends_in_an_ellipsis(run, draw):
    picture = draw(run({0: ("<answer>" + "9" * 80, False), 2: ("8", False), 4: (THOUGHT, True),
                        7: (THOUGHT, True)}, prompt="1+" * 40 + "1="))
    [question] = picture.texts("question")
    assert 20 < len(question) <= 34 and question.endswith("…")
    [answer] = picture.texts("words wrong", picture.scenes[0])
    [verdict] = picture.texts("verdict wrong", picture.scenes[0])
    assert answer.endswith("…")
    assert len(answer) + len(verdict) <= film.COLUMNS


def test_the_card_and_its_curtain_are_dark_where_all_is_dark():
    dark = film.TEMPLATE.read_text().split("(prefers-color-scheme: dark) {")[1:]
    assert len(dark) == 2
    assert re.search(r"\.card { fill: #0d1117 }", dark[0])
    assert re.search(r"\.curtain { fill: #0d1117 }", dark[1])


def test_the_film_goes_to_docs_if_no_other_place_is_named(usual, tmp_path, monkeypatch, capsys):
    assert film.DOCS == ROOT / "docs"
    monkeypatch.setattr(film, "DOCS", tmp_path)
    film.main([str(usual)])
    assert (tmp_path / "learning.svg").is_file()


def test_each_number_stands_above_its_name():
    root = ElementTree.fromstring((ROOT / "docs/learning.svg").read_text(encoding="utf-8"))
    texts = list(root.iter(f"{SVG}text"))
    for style in ("likeliest", "sampled"):
        [label] = [text for text in texts if text.text == style]
        number = next(text for text in texts if text.get("class") == f"{style} number")
        assert label.get("x") == number.get("x")


def test_places_in_the_template_are_those_of_the_tool():
    text = film.TEMPLATE.read_text()
    assert f'<path class="bar" d="M{film.LEFT} 314H{film.END}"/>' in text
    rules = [f"M{film.RIGHT} {low}H{film.END}" for low in (168, 274)]
    assert f'<path class="rule" d="{"".join(rules)}"/>' in text
    assert {low for _, low, _ in film.CURVES.values()} == {168, 274}


# ---- bad input -------------------------------------------------------------------------------

def refusal(capsys, *words):
    """What is said of a command line that is refused, with code 2: one line."""
    with pytest.raises(SystemExit) as stop:
        film.main([str(word) for word in words])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


def test_without_a_run_or_with_a_folder_of_something_else_one_line_is_said(capsys, tmp_path):
    assert "RUN" in refusal(capsys)
    assert "name the folder of a run" in refusal(capsys, tmp_path)
    assert "name the folder of a run" in refusal(capsys, tmp_path / "missing")


def test_a_run_that_has_no_film_is_refused_and_nothing_is_written(run, capsys, tmp_path):
    output = tmp_path / "film.svg"

    def said(folder):
        words = refusal(capsys, folder, "--output", output)
        assert str(folder) in words and not output.exists()
        return words
    learned = {0: ("1", False), 3: ("2", True), 7: ("2", True)}
    assert "--eval_steps 1" in said(run({0: ("1", False), 7: ("2", True)}))
    assert "--eval_steps 1" in said(run({0: ("1", False)}, last=0))
    assert "no held-out problem" in said(run(learned | {7: ("3", False)}))
    assert "right or wrong" in said(run(learned, base={"greedy_return": 1.0}))
    older = run(learned)
    (older / "greedy.jsonl").unlink()
    assert "--eval_steps 1" in said(older)
    killed = run(learned)
    (killed / "summary.json").unlink()
    assert "has not ended" in said(killed)


def test_a_run_that_was_resumed_and_did_not_end_is_refused(usual, capsys):
    with open(usual / "metrics.jsonl", "a") as log:
        log.write('{"step": 8, "step_time": 1.0}\n')
    assert "has not the 7 steps of summary.json" in refusal(capsys, usual)


@pytest.mark.parametrize("name, content, said", [
    ("summary.json", "{}", "its logs are damaged"),
    ("summary.json", "[]", "its logs are damaged"),
    ("evaluation.jsonl", "", "evaluation.jsonl is missing or empty"),
    ("metrics.jsonl", "", "metrics.jsonl has not the 7 steps")])
def test_a_damaged_log_is_named(usual, capsys, name, content, said):
    (usual / name).write_text(content)
    assert said in refusal(capsys, usual)


def test_a_very_long_answer_does_not_fill_the_description(run, draw):
    long = "<think>" + "1+1=2;" * 10_000 + "</think><answer>14</answer>"
    folder = run({0: ("<answer>9</answer>", False), 2: ("<answer>8</answer>", False),
                  4: (long, True), 7: (long, True)})
    assert len(draw(folder).text) < 30_000


def test_a_place_where_nothing_can_be_written_is_refused(usual, capsys, tmp_path):
    assert "No such file" in refusal(capsys, usual, "--output", tmp_path / "missing/film.svg")
