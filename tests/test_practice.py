"""Test the exercises: the script passes, and so do other correct solutions. Each planted mistake in
a blank is graded WRONG and named. A learner's work is never overwritten. Every bug hunt can be
won."""
import ast
import multiprocessing
import re
import shlex
import subprocess
import sys
import threading
import traceback
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT

from learn.practice import __main__ as practice
from learn.practice import grades, hunt
from learn.practice.exercise import MISTAKES, Exercise, mistakes
from vectors.edits import load, parse, replace_once

PAGE = (ROOT / "docs/practice.md").read_text("utf-8")
BLANKS = {"nano": 4} | {name: int(number) for name, number in
                        re.findall(r"`(reinforce|ppo|grpo|gspo|dpo)` \((\d+)", PAGE)}
EXERCISES = {name: Exercise(f"{name}.py") for name in BLANKS}
# Solutions by learners, right or wrong, in the format of mistakes.txt.
SOLUTIONS = parse((ROOT / "tests/solutions.txt").read_text("utf-8"))
every_name = pytest.mark.parametrize("name", BLANKS)


@pytest.fixture(autouse=True)
def no_limit(monkeypatch):
    """Let no test depend on how fast a machine is."""
    monkeypatch.setattr(grades, "LIMIT", 600)


def states(exercise, text):
    return {function: state for function, state, *_ in grades.grades(exercise, text)}


# ---- grades ----------------------------------------------------------------------------------

@every_name
def test_the_script_itself_passes_and_its_blanks_are_blank(name):
    exercise = EXERCISES[name]
    assert set(states(exercise, exercise.source).values()) == {"right"}
    for function in exercise.blanks:            # a case without results would compare nothing
        cases = [*grades.cases(exercise, function, grades.load_script(exercise.source))]
        assert cases and all(case.results and not case.error for case in cases)
    text = exercise.text([])
    ast.parse(text)
    assert name != "nano" or "# eq. (2), from logps, old_logps\n" in text
    assert set(states(exercise, text).values()) == {"open"}
    assert text.count(" = ...") + text.count("return ...") == BLANKS[name]


@every_name
def test_right_solutions_pass_and_wrong_ones_fail(name):
    exercise = EXERCISES[name]
    count = {"right": 0, "wrong": 0}
    for solution in [one for one in SOLUTIONS if one.file == exercise.file]:
        [(old, _)] = solution.hunks
        first = exercise.source.partition(old)[0].count("\n") + 1
        [function] = [name for name in exercise.blanks if exercise.functions[name].lineno
                      <= first <= exercise.functions[name].end_lineno]
        module = load(solution.apply(exercise.source), "practised")
        state, said, _ = grades.grade(exercise, module, function)
        assert state.lower() == solution.words, (solution.name, said)
        assert "line 0" not in " ".join(said)
        count[solution.words] += 1
    assert all(count.values())


@every_name
def test_a_number_in_the_place_of_a_parameter_is_wrong(name):
    """The number that it has in the first call, so only another call can show it."""
    exercise = EXERCISES[name]
    right = grades.load_script(exercise.source)
    for function, blanks in exercise.blanks.items():
        def called(module, function=function):
            return grades.cases(exercise, function, module)
        words = next(called(right)).words
        numbers = {word: x for word, x in words.items() if re.fullmatch(r"-?[\d.]+", x)}
        for node in (node for blank in blanks for node in blank.nodes):
            line = ast.get_source_segment(exercise.source, node)
            for word in numbers.keys() & set(re.split(r"\b", line)):
                wrong = re.sub(rf"\b{word}\b", numbers[word], line)
                module = load(exercise.source.replace(line, wrong), "practised")
                assert grades.difference(called(right), called(module)) is not None, wrong


@pytest.mark.parametrize("name", ["ppo", "grpo", "gspo"])
@pytest.mark.parametrize("line, known", [
    ("old_logps - logps", "pi_old / pi instead of pi / pi_old"),
    ("logps / old_logps", "a quotient of logarithms")])
def test_a_wrong_ratio_is_named_also_with_a_second_mistake(name, line, known):
    text = replace_once(EXERCISES[name].source, "logps - old_logps.detach()", line)
    for both in (text, text.replace("-torch.min(ratio", "-torch.max(ratio")):
        graded = grades.grades(EXERCISES[name], both)
        assert known in " ".join(" ".join(said) for *_, said, _ in graded)


FROM_MEMORY = re.sub(r"^  \S.*\n", "", EXERCISES["nano"].source, flags=re.M)
ORDER = "for rows in torch.randperm(P * G).chunk(2):"


@pytest.mark.parametrize("old, new, said", [
    ("", "", None),
    (ORDER, "for rows in torch.arange(P * G).view(2, -1):", None),
    ("= sample(policy, encode(questions, W))  ",
     "= torch.cat([sample(policy, encode([one], W)) for one in questions])  ", None),
    ("RATE * (1 - step / steps)", "RATE - RATE * step / steps", None),
    ("problems = [sample_problem(rng)", "problems = [sample_problem(rng, True)", "held out"),
    ("for problem in problems for _ in range(G)", "for _ in range(G) for problem in problems",
     "outputs to question p"),
    ("list(map(verify, answers", "list(map(verify, answers[::-1]", "answer to its own question"),
    ("view(P, G)", "view(G, P)", "the rewards (P, G)"),
    ("encode(questions, W))  ", "encode(questions, W), True)  ", "sampled at random"),
    (ORDER, ORDER.replace("2", "1"), "each step makes two updates"),
    (ORDER, ORDER.replace("perm(P * G)", "int(P * G, (P * G,))"), "each output must be in one"),
    ("with torch.no_grad():", "if True:", "old_logps none"),
    ("loss = surrogate_loss(logps,", "loss = surrogate_loss(logps.detach(),", "need a gradient"),
    ("old_logps[rows], A", "logps.detach(), A", "before the updates of the step"),
    ("A[rows], mask", "A[:len(rows)], mask", "A must be (B, 1), for the same outputs"),
    ("view(-1, 1)", "view(-1)", "A must be (B, 1)"),
    ("A[rows], mask[rows])", "A[rows], mask[:len(rows)])", "mask must be (B, T), for the"),
    ("A[rows], mask[rows])", "A[rows], mask[rows] * 0 + 1)", "mask must be"),
    ("loss, RATE * (1 - step / steps)", "loss, RATE", "the learning rate must fall"),
    ("(1 - step / steps)", "(1 - step / steps / 1.01)", "the learning rate must fall"),
    ("rewards = torch", "reward = torch", ": NameError: name 'rewards'")])
def test_the_loop_from_memory_is_right_or_its_mistake_is_named(old, new, said):
    text = replace_once(FROM_MEMORY, old, new) if old else FROM_MEMORY
    *others, (function, state, sentences, _) = grades.grades(EXERCISES["nano"], text)
    assert {one[1] for one in others} == {"right"} and function == "main"
    assert (state == "right" and not sentences) if said is None else said in " ".join(sentences)


@every_name
def test_from_memory_nothing_gives_an_equation_away(name):
    exercise = EXERCISES[name]
    text = exercise.text([], from_memory=True)
    assert not any(equation in text for equation in exercise.equations.values())
    assert not re.search(r"\.\.\. +# .*\((\d|.*, from )", text)
    found = states(exercise, text)
    assert {*found.values()} == {"open"} and ("main" in found) == (name == "nano")


def test_of_several_blanks_the_first_wrong_one_is_named_with_its_line():
    text = EXERCISES["nano"].text([1, 3]).replace(
        "(logps - old_logps).clamp", "(old_logps - logps).clamp")
    _, (_, state, said, marks) = grades.grades(EXERCISES["nano"], text)
    line = text[:text.index("ratio = log_rho")].count("\n") + 1
    assert state == "WRONG" and marks == {2: "is wrong", 3: "is open"}
    assert f"line {line}: ratio at [0, 1] is 0.90484, should be 1.1052" in said


# ---- the commands ----------------------------------------------------------------------------

@pytest.fixture
def run(own_folder, monkeypatch, capsys):
    """run(*words): run a command in an empty folder. -> exit code, printed text"""
    def call(*words):
        monkeypatch.setattr(sys, "argv", ["practice", *map(str, words)])
        code = 0
        try:
            practice.main()
        except SystemExit as error:
            code = error.code
        said = capsys.readouterr()
        return code, said.out + said.err
    return call


def test_a_second_exercise_leaves_the_first_as_it_is_and_trains_if_all_is_right(run, tmp_path):
    run("grpo")
    first = tmp_path / "practice/grpo.py"
    first.write_text("mine")
    _, said = run("grpo", "8")
    second = tmp_path / "practice/grpo_2.py"
    assert first.read_text() == "mine" and "practice/grpo_2.py" in said
    assert second.read_text().count(" ...") == 1
    code, said = run("check", second)
    assert code == 1 and "5 of 6 functions are right" in said and "PYTHONPATH" not in said
    second.write_text((ROOT / "grpo.py").read_text())
    code, said = run("check", second)
    assert code == 0 and "6 of 6 functions are right" in said
    command = said.splitlines()[-1]
    done = subprocess.run(f"{command} --help", shell=True, stdout=subprocess.PIPE)
    assert done.returncode == 0 and command.endswith(" practice/grpo_2.py")


class WhenReached(threading.Timer):
    """A timer whose time runs out as soon as the learner's line 144 runs."""
    def run(self):
        while not self.finished.wait(0.01):
            stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
            if ("practised.py", 144) in [(one.filename, one.lineno) for one in stack]:
                self.function()


@pytest.mark.parametrize("old, new, words", [
    ("    A = rew", "    A = = rew", "practice/nano.py, line 144: invalid syntax"),
    ("    return A / (rewards.std(1, keepdim=True) + 1e-4)", "    return A[0]",
     "line 145: the result has the shape (4,), but should have (3, 4)"),
    ("-torch.min(ratio * A, clipped", "torch.min(ratio * A, clipped",
     " surrogate_loss: (2) is right so far, (3) is wrong, (5) is not graded yet"),
    ("\ndef descend", "\nnone_such\n\ndef descend", "line 156: NameError: name 'none_such'"),
    ("    A = rewards", "    while True: A = rewards",
     "line 144: has not ended after 600 seconds"),
    ("    A = rew", "    raise KeyboardInterrupt; rew", "line 144: KeyboardInterrupt:   (shapes"),
    ("import zlib", "import zlib, os; print(4 * '2 of 2 functions are right.'); os._exit(0)",
     "ends the program before it is graded")])
def test_what_is_no_answer_is_one_line(run, tmp_path, monkeypatch, old, new, words):
    monkeypatch.setattr(grades, "SPAWN", multiprocessing.get_context("fork"))   # has torch already
    if "while" in new:
        monkeypatch.setattr(threading, "Timer", WhenReached)
    run("nano")
    text = replace_once((ROOT / "nano.py").read_text(), old, new)
    (tmp_path / "practice/nano.py").write_text(text)
    code, said = run("check", "practice/nano.py")
    assert code == 1 and said.count(words) == 1 and "Traceback" not in said


@pytest.mark.parametrize("words, message", [
    ("gpro", "gpro: there is no exercise and no command of this name"),
    ("check", "check: has too few or too many words"),
    ("check practice/grpo.py", "practice/grpo.py: there is no such file"),
    (f"check {ROOT / 'common.py'}", "common.py: the name of an exercise is that of a script"),
    (f"check {ROOT / 'docs/start.md'}", "start.md: the name of an exercise is that of a script")])
def test_a_command_that_cannot_run_says_why(run, words, message):
    code, said = run(*words.split())
    assert code == 2 and message in said


# ---- bug hunts -------------------------------------------------------------------------------

@pytest.mark.parametrize("name", hunt.FLAGS)
def test_each_hunt_can_be_won_and_nothing_betrays_it(run, tmp_path, name):
    source = (ROOT / hunt.file_of(name)).read_text()
    hunts = hunt.hunts_of(name)
    own = {mistake.name: mistake for mistake in mistakes(hunt.file_of(name))}
    assert all(mistake == own.get(mistake.name, mistake) for mistake in hunts.values())
    hard = f"hunt/{name}_level3_1.py"
    assert run("hunt", name, 3)[1].startswith(f"{hard} is ")
    (tmp_path / hard).unlink()
    for number, file in enumerate(hunts):
        level = re.fullmatch(rf"{name}_level([123])_\d.py", file)[1]
        code, said = run("hunt", name, level)
        path = tmp_path / "hunt" / file
        text = path.read_text()
        assert f"answer hunt/{file}" in said
        commands = [shlex.split(line) for line in said.splitlines() if line.startswith("  ")][:2]
        right = hunt.file_of(name).removesuffix(".py").replace("/", ".")
        modules = [file, ROOT / "nano.py"] if name == "nano" else [f"hunt.{path.stem}", right]
        for words, module, kind in zip(commands, modules, ("wrong", "right"), strict=True):
            ran = words[-2] if name == "nano" else words[words.index("-m") + 1]
            assert Path(ran).name == Path(module).name and words[-1] == f"hunt/{path.stem}-{kind}"
        comments = [[(line.find("  # "), line.partition("  # ")[2]) for line in one.split("\n")
                     if "  # " in line] for one in (source, text)]
        assert comments[0] == comments[1] and max(map(len, text.split("\n"))) <= 100
        _, told = run("answer", path)
        line = int(re.search(r"line (\d+): ", told)[1])
        assert text.split("\n")[line - 1] != source.split("\n")[line - 1]
        guess = re.search("in (.*?): ", told)[1] if number % 2 else line
        assert run("answer", path, guess) == (0, f"Yes. {told}")
        assert run("answer", path, 1) == (1, "No, the mistake is not in line 1.\n")
    path.write_text("mine")
    code, said = run("hunt", name, level)
    assert code == 2 and path.read_text() == "mine"


def test_every_mistake_can_be_made_where_it_says_and_has_its_tests():
    """make mutants plants them."""
    edits = parse(MISTAKES.read_text("utf-8"))
    wrong = []
    for edit in edits:
        source = (ROOT / edit.file).read_text("utf-8")
        files, _ = edit.tests
        is_planted = all(source.count(old) == 1 and old != new for old, new in edit.hunks)
        if not is_planted or not all((ROOT / file).is_file() for file in files):
            wrong.append(f"{edit.file}: {edit.name}: {files}")
    assert not wrong, "\n".join(wrong)
    count = Counter((edit.file, edit.hunks) for edit in edits)
    assert [mistake for mistake, times in count.items() if times > 1] == []
