"""Test the mistakes that tests/mutations.py makes, how tests/mutants.py chooses tests and plants
mistakes, and that no mistake is called equivalent that is not made any more."""
import json
import subprocess
import sys
from types import SimpleNamespace

import contexts
import mutants
import mutations
import pytest
from conftest import ROOT

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("line, words, expected", [
    ("return a < b <= 3", "compare", ["return a <= b <= 3", "return a < b < 3"]),
    ("return a + b // 2", "operator", ["return a - b // 2", "return a + b / 2"]),
    ("return 'a' + b", "operator", []), ("return f'{1 < 2}'", "", []),
    ("return x * mask", "drop a factor", ["return x"]), ("return x * 2", "drop a factor", []),
    ("return a and b", "drop condition", ["return (b)", "return (a)"]),
    ("return x + a if b > c else d", "condition", ["return (x + a)", "return (d)"]),
    ("return x[1:12]", "number", ["return x[2:12]", "return x[1:24]"]),
    ("return f(x, key=True)", "flag", ["return f(x, key=False)"]),
    ("return f(a.x, b.x)", "swap", ["return f(b.x, a.x)"]), ("return max(a, b)", "swap", []),
    ("return x.detach().exp()", "drop detach", ["return (x).exp()"]),
    ("return max(1, len(x))", "drop max", ["return (len(x))"]),
    ("return other.sorted(x)", "drop", []),
    ("run(x,\n    g)", "drop call", ["pass\n"]),
    ("return (a\n            or b)", "drop condition 1", ["return (((b)\n))"]),
    ("try:\n        pass\n    except (A, B):\n        pass", "except all but B",
     ["try:\n        pass\n    except (A, ()):\n        pass"])])
def test_one_small_change_is_made_at_a_time_and_lines_keep_their_numbers(line, words, expected):
    source = f'def f(x: "1 < 2"):\n    """1 < 2"""\n    {line}\n'
    texts = [source[:start] + new + source[end:] for one in mutations.of_file("a", source)
             for _, start, end, new in one.edits if one.kind.startswith(words)]
    assert texts == [source.replace(line, new) for new in expected]
    for text in texts:
        compile(text, "a", "exec")
        assert text.count("\n") == source.count("\n")


def test_what_scripts_share_is_changed_in_all_of_them_and_no_equivalent_mistake_is_gone():
    made = {str(one): one for folder in mutations.FOLDERS for one in mutations.of_folder(folder)}
    shared = [one for one in made.values() if one.function == "aggregate"]
    assert {tuple(mutations.apply(one)) for one in shared} == {
        ("grpo.py", "gspo.py", "ppo.py", "reinforce.py")}
    assert [name for name in mutants.equivalent() if name not in made] == []


# ---- choosing tests --------------------------------------------------------------------------

@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """recorded(*rows): what contexts.py recorded of the tests of this file, in rows of a test, its
    seconds and {file: {function: lines}}. -> Contexts"""
    def make(*rows):
        monkeypatch.setattr(mutants, "FOLDER", tmp_path)
        digest = contexts.digest("tests/test_mutants.py")
        lines = [{"test": f"tests/test_mutants.py::{test}", "seconds": seconds, "ran": ran,
                  "digest": digest} for test, seconds, ran in rows]
        lines.append(lines[0] | {"test": "tests/test_mutants.py::changed", "digest": "an old one"})
        (tmp_path / "1.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return mutants.Contexts()
    return make


@pytest.mark.parametrize("function, statement, expected", [
    ("f", 1, {"one", "two"}), ("f", 2, {"two"}), ("g", 1, {"three"}), ("f", 9, {"one", "two"}),
    ("f", 0, {"one", "two", "three"}), ("=B", 1, {"three"}), ("unused", 1, {"three"}),
    ("made", 1, {"three"}), ("at_import", 1, {"one", "two", "three"})])
def test_tests_run_the_statement_or_the_function_or_what_mentions_the_name(
        function, statement, expected, recorded, monkeypatch):
    monkeypatch.setattr(mutants, "SIGNATURES", "tests/test_mutants.py")
    found = recorded(("one", 1, {"a.py": {"f": [1]}}), ("two", 1, {"a.py": {"f": [1, 2]}}),
                     ("three", 1, {"a.py": {"g": [1]}}))
    texts = {("a.py", "f"): "def f(): ...", ("a.py", "g"): "def g(): unused(B)",
             ("a.py", "=B"): "B = made()"}
    mutation = SimpleNamespace(edits=(("a.py", 0, 0, ""),), file="a.py", function=function,
                               statement=statement)
    assert {test.partition("::")[2] for test in found.of(mutation, texts)} == expected


def test_one_test_of_each_function_comes_first_for_half_of_the_time_and_then_the_fast_ones(
        recorded):
    found = recorded(("a[1]", 2, {}), ("a[2]", 1, {}), ("b", 4, {}), ("c", 90, {}), ("d", 6, {}),
                     ("a[3]", 3, {}), ("b[2]", 8, {}))
    chosen = [test.partition("::")[2] for test in found.choose(found.seconds)]
    assert chosen == ["a[2]", "b", "a[1]", "a[3]"]      # 1 + 4 s of 7.5, then 2 + 3 of 15
    assert found.choose(["tests/test_mutants.py::c"]) == ["tests/test_mutants.py::c"]


def test_functions_that_changed_since_a_commit_are_found(monkeypatch):
    before = "A = 1\ndef f():\n    return 1\n@a\ndef g():\n    return 2\n"
    after = "A = 2\n\ndef f():\n    return 1\n@b\ndef g():\n    return 2\ndef h():\n    pass\n"
    monkeypatch.setattr(mutants, "text_at", lambda *words: before)
    texts = mutations.texts_of(after).items()
    changed = mutants.changed_since("base", {("nano.py", name): text for name, text in texts})
    assert changed == {("nano.py", "=A"), ("nano.py", "g"), ("nano.py", "h")}


# ---- planting --------------------------------------------------------------------------------

PROGRAM = r"""
import os, sys
sys.path[:0] = [TESTS, "."]
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
import mutants
SOURCE = "def f(x):\n    return x + 2\n"
open("planted.py", "w").write(SOURCE)
open("test_planted.py", "w").write('''
import planted
def test_value(): assert planted.f(1) == 3
def test_text():
    import inspect
    assert "x + 2" in inspect.getsource(planted.f)
def test_nothing(): pass
def test_broken(): assert False
''')
for new, tests in ROWS:
    if "while" in new:
        mutants.ask.__defaults__ = (1,)     # seconds
    text = SOURCE.replace("return x + 2", new)
    tests = tests.replace("::", "test_planted.py::").split()
    word, failed = mutants.plant(mutants.Mistake("name", {"planted.py": text}, tests))
    print(word, failed.rpartition("::")[2])
"""


def test_a_mistake_is_killed_by_a_test_that_passes_without_it(tmp_path):
    rows = {("return x + 3", "::test_nothing ::test_value"): "killed test_value",
            ("return x + 3", "::test_text ::test_nothing"): "SURVIVED 2 tests",
            ("return x + 3", "::test_broken ::test_value"): "killed test_value",
            ("return x + 2.0", "test_planted.py"): "SURVIVED 1 tests",
            ("return x + 3", ""): "UNTESTED 0 tests",
            ("return x + 3", "::gone"): "BROKEN a test is gone",
            ("import os; os._exit(3)", "::test_value"): "killed the process died",
            ("while True: pass", "::test_value"): "killed no end in 1 s"}
    tests = str(ROOT / "tests")
    program = PROGRAM.replace("TESTS", repr(tests)).replace("ROWS", repr([*rows]))
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True,
                          cwd=tmp_path)
    assert done.stdout.splitlines() == [*rows.values()], done.stderr


@pytest.mark.parametrize("killed, survived, is_reached", [
    (85, 15, True), (78, 22, True), (77, 23, False), (1, 1, True), (0, 2, False),
    (840, 160, True), (820, 180, False)])
def test_a_folder_has_its_goal_within_the_noise_of_a_sample(killed, survived, is_reached, capsys):
    words = ["killed"] * killed + ["SURVIVED"] * survived
    results = {f"grpo.py {i}": (word, "") for i, word in enumerate([*words, "skipped"])}
    assert mutants.report(results) == is_reached
    assert f"{killed:5} of {killed + survived:5} killed" in capsys.readouterr().out
    assert not mutants.report(results | {"practice a.py b": ("SURVIVED", "")})
