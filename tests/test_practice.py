"""The exercises: the script itself and other words for it pass, and each planted mistake in a blank
fails there and there alone, by its name. Nothing of a learner's is lost. Hunts can be won."""
import ast
import re
import subprocess
import sys

import mutants
import pytest
from conftest import ROOT

from lab import hunts as measure
from learn.practice import __main__ as practice
from learn.practice import grades, hunt
from learn.practice.exercise import Exercise

BLANKS = {"nano": 4, "reinforce": 12, "ppo": 14, "grpo": 12, "gspo": 13, "dpo": 12}
MUTANTS = mutants.parse(mutants.MISTAKES.read_text())
# The same numbers in float64, and so another way to write it.
RIGHT = {"k3 without expm1: rounding makes it negative"}
every_name = pytest.mark.parametrize("name", BLANKS)


def states(exercise, text):
    found, _ = grades.grades(exercise, text)
    return [state for _, _, state, _ in found]


# ---- grades ----------------------------------------------------------------------------------

@every_name
def test_the_script_itself_passes_and_its_blanks_are_blank(name):
    exercise = Exercise(f"{name}.py")
    places, changed = exercise.places(exercise.source)
    assert len(places) == BLANKS[name] and not changed
    for blank, _ in places:             # else nothing would be compared
        cases = grades.alone(exercise, exercise.source, places, blank)
        assert not any(case.error for case in cases) and any(case.names for case in cases)
    assert set(states(exercise, exercise.source)) == {"right"}
    text = exercise.text([])
    ast.parse(text)
    assert set(states(exercise, text)) == {"open"}
    assert text.count(" = ...") + text.count("return ...") == BLANKS[name]


@every_name
def test_a_planted_mistake_fails_where_it_is_alone_and_is_called_by_its_name(name):
    exercise = Exercise(f"{name}.py")
    count = 0
    for mutant in MUTANTS:
        old = "\n".join(mutant.old)
        line = exercise.source.partition(old)[0].count("\n") + 1
        lines = set(range(line, line + len(mutant.old)))
        blanks = [blank for blank in exercise.blanks for node in blank.nodes
                  if lines & {*range(node.lineno, node.end_lineno + 1)}]
        if mutant.file == exercise.script and blanks and mutant.name not in RIGHT:
            text = exercise.source.replace(old, "\n".join(mutant.new))
            found, changed = grades.grades(exercise, text)
            wrong = {blank: said for blank, _, state, said in found if state != "right"}
            assert wrong.keys() == {*blanks} and not changed, mutant.name
            assert mutant.name in " ".join(sum(wrong.values(), [])), mutant.name
            count += 1
    assert count >= 6


@pytest.mark.parametrize("name, old, new", [
    ("grpo", "    A = rewards - rewards.mean(dim=1, keepdim=True)",
     "    A = rewards.clone()\n    A -= rewards.mean(1)[:, None]"),
    ("grpo", "        A = A / (rewards.std(dim=1, keepdim=True) + eps)",
     "        spread = rewards.std(1, keepdim=True)\n        A /= spread + eps"),
    ("grpo", "def advantages(", "def mean(x):\n    return x.mean(1)\n\n\ndef advantages("),
    ("grpo", "torch.expm1(-x) + x", "torch.exp(-x) - 1 + x"),
    ("grpo", "        token_loss = -torch.min(ratio * A, clipped_ratio * A)",
     "        if True:\n            worst = torch.minimum(A * ratio, A * clipped_ratio)\n"
     "        token_loss = -worst"),
    ("dpo", "    right = -F.logsigmoid(beta * M)", "    right = (1 + (-beta * M).exp()).log()"),
    ("nano", "token_loss = -torch.min(ratio * A, clipped_ratio * A)", "good = ratio.clamp(max=1 "
     "+ eps_high)\n    bad = ratio.clamp(1 - eps_low)\n    token_loss = -A * torch.where(A > 0, "
     "good, bad)"),
    ("nano", "(logps - old_logps).exp()", "(logps - old_logps.detach()).exp()"),
    ("nano", "rewards.mean(1, keepdim=True)", "rewards.mean(1)[..., None]"),
    ("ppo", "        A = delta + gamma * lam * next_A", "        A = gamma * lam * next_A\n"
     "        A += delta")])
def test_other_words_for_a_right_line_pass(name, old, new):
    exercise = Exercise(f"{name}.py")
    assert exercise.source.count(old) == 1
    text = exercise.source.replace(old, new)
    assert set(states(exercise, text)) == {"right"}


@pytest.mark.parametrize("name, old, new", [
    ("grpo", "return x.sum() / num_tokens", "return x.sum().item() / num_tokens"),
    ("grpo", "/ max(buffer, 1)).clamp", "/ buffer).clamp"),
    ("grpo", "(max_length or x.shape[1])", "max_length"),
    ("grpo", "clipped_ratio = ratio.clamp", "clipped_ratio = A.clamp"),
    ("dpo", "(M - 1 / (2 * beta))", "(M - 2 * beta)"),
    ("reinforce", "/ w.sum(dim=-1)", "/ w.sum()"),
    ("ppo", 'part, :T], "token_mean", num_tokens=num_correct', 'part, :T], "token_mean"'),
    ("ppo", "-log_rho.exp() * A + beta", "-log_rho.exp() * A[:, :1] + beta"),
    ("nano", "A = rewards - rewards.mean(1, keepdim=True)",
     "A = rewards\n    A -= rewards.mean(1, keepdim=True)")])
def test_what_comes_out_right_only_here_fails(name, old, new):
    exercise = Exercise(f"{name}.py")
    assert exercise.source.count(old) == 1
    assert "WRONG" in states(exercise, exercise.source.replace(old, new))


def test_a_right_blank_is_not_wrong_because_another_is_not_written():
    exercise = Exercise("nano.py")
    text = exercise.text([3]).replace("ratio = (logps - old_logps).exp()", "rho = ratio_of(logps)")
    text += "\ndef ratio_of(x):\n    return x\n"
    assert states(exercise, text) == ["right", "later", "open", "later"]


# ---- the commands ----------------------------------------------------------------------------

@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where exercises and hunts are written, instead of the repository."""
    for module in (practice, hunt):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(hunt, "HUNT", tmp_path / "hunt")
    for name in hunt.FLAGS:
        (tmp_path / f"{name}.py").write_text((ROOT / f"{name}.py").read_text())
    return tmp_path


def run(monkeypatch, capsys, *words):
    """-> exit code, what was said"""
    monkeypatch.setattr(sys, "argv", ["practice", *map(str, words)])
    code = 0
    try:
        practice.main()
    except SystemExit as error:
        code = error.code
    said = capsys.readouterr()
    return code, said.out + said.err


def test_a_second_exercise_leaves_the_first_as_it_is(folder, monkeypatch, capsys):
    run(monkeypatch, capsys, "nano")
    first = folder / "practice/nano.py"
    first.write_text("mine")
    _, said = run(monkeypatch, capsys, "nano", "1")
    assert first.read_text() == "mine" and "practice/nano_2.py" in said
    assert (folder / "practice/nano_2.py").read_text().count(" ...") == 1


@pytest.mark.parametrize("old, new, words", [
    ("    A = rew", "    A = = rew", "practice/nano.py, line 133: invalid syntax"),
    ("import re\n", "import re\nimport nothing_such\n", "ModuleNotFoundError"),
    ("import re\n", "import re\nwhile True: pass\n", "TimeoutError: no end in"),
    ("    A = rew", "    while True: pass\n    A = rew", "TimeoutError: no end in"),
    ("torch.manual_seed(seed)", "torch.manual_seed(0)", "no blank, but gone or changed: torch.man"),
    ("    ratio = (logps - old_logps).exp()", "    pass", "nothing sets ratio here")])
def test_what_is_no_answer_is_one_line(folder, monkeypatch, capsys, old, new, words):
    monkeypatch.setattr(grades, "SECONDS", 1)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0))
    run(monkeypatch, capsys, "nano")
    path = folder / "practice/nano.py"
    source = (ROOT / "nano.py").read_text()
    assert source.count(old) == 1
    path.write_text(source.replace(old, new))
    code, said = run(monkeypatch, capsys, "check", path)
    assert said.count(words) == 1 and "Traceback" not in said
    assert bool(code) == ("changed" not in words)


def test_a_right_file_is_trained_with(folder, monkeypatch, capsys):
    commands = []
    train = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, cwd: commands.append((command, cwd))
                        or subprocess.CompletedProcess(command, 7))
    run(monkeypatch, capsys, "grpo")
    path = folder / "practice/grpo.py"
    path.write_text((ROOT / "grpo.py").read_text())
    code, said = run(monkeypatch, capsys, "check", path)
    assert code == 7 and "12 of 12 are right" in said
    [(command, cwd)] = commands
    assert command[-1] == folder / "runs/practice-grpo" and cwd == folder
    (folder / "common.py").write_text((ROOT / "common.py").read_text())
    done = train([*command, "--help"], cwd=cwd, capture_output=True, text=True)
    assert "--loss_type" in done.stdout


# ---- hunts -----------------------------------------------------------------------------------

@pytest.mark.parametrize("name", hunt.FLAGS)
def test_each_hunt_can_be_won_and_nothing_betrays_it(folder, monkeypatch, capsys, name):
    tests = "".join(path.read_text() for path in ROOT.glob("tests/test_*.py"))
    source = (ROOT / f"{name}.py").read_text()
    hunts = hunt.load(name)["hunts"]
    drawn = []
    draw = hunt.draw
    monkeypatch.setattr(hunt, "draw", lambda *given: drawn.append(given))   # which takes long
    assert {one["level"] for one in hunts} == {1, 2, 3}
    for number, one in enumerate(hunts, start=1):
        code, said = run(monkeypatch, capsys, "hunt", name, one["level"])
        path = folder / f"hunt/{name}_{number}.py"
        text = path.read_text()
        assert f"answer hunt/{name}_{number}.py" in said and measure.is_fair(source, text)
        assert ("too " in said) == (one["level"] < 3)
        assert f"def {one['test']}(" in tests
        _, told = run(monkeypatch, capsys, "answer", path)
        line = int(re.search(r"line (\d+): ", told)[1])
        place = re.search("in (.*?): ", told)[1]
        assert text.split("\n")[line - 1] != source.split("\n")[line - 1]
        guess = place if number % 2 else line
        assert run(monkeypatch, capsys, "answer", path, guess) == (0, f"Yes. {told}")
        code, said = run(monkeypatch, capsys, "answer", path, 3)
        assert code == 1 and said == "error: No, it is not 3.\n"
    draw(*drawn[-1])
    assert path.with_suffix(".png").stat().st_size > 10_000
    path.write_text("mine")
    code, said = run(monkeypatch, capsys, "hunt", name, one["level"])
    assert code == 2 and path.read_text() == "mine"


def test_a_run_is_so_many_widths_of_the_span_above_or_below_right_ones():
    right = {"kl": [[0.0] * 20, [1.0] * 20]}
    for value, way in ((3.0, 2.0), (-1.0, -1.0), (0.5, 0.0)):
        assert set(hunt.distances({"kl": [value] * 20}, right).values()) == {way}
    assert [hunt.side(way) for way in (2.0, -1.0, 0.9)] == ["too high", "too low", ""]
