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


def made(source, words=""):
    """Make the mutations of a text, of which the kind begins with these words. -> {kind: text}"""
    return {one.kind: source[:start] + new + source[end:] for one in mutations.of_file("a", source)
            for _, start, end, new in one.edits if one.kind.startswith(words)}


@pytest.mark.parametrize("line, words, expected", [
    ("a < b <= 3", "compare", ["a <= b <= 3", "a < b < 3"]),
    ("a not  in b", "compare", ["a in b"]), ("a is not b", "compare", ["a is b"]),
    ("a + b // 2", "operator", ["a - b // 2", "a + b / 2"]), ("'a' + b", "operator", []),
    ("x * mask", "drop a factor", ["x"]), ("x * 2", "drop a factor", []),
    ("a and b and not c", "drop condition",
     ["((b) and (not c))", "((a) and (not c))", "((a) and (b))"]),
    ("x + a if b > c else d", "condition", ["(x + a)", "(d)"]),
    ("a or 'none'", "drop condition", ["('none')", "(a)"]), ("not a", "drop not", ["(a)"]),
    ("~a", "drop ~", ["(a)"]), ("-a", "drop minus", ["(a)"]), ("-1", "drop minus", []),
    ("x[1:12]", "number", ["x[2:12]", "x[1:24]"]), ("f(x, key=True)", "flag", ["f(x, key=False)"]),
    ("f(a, b)", "swap", ["f(b, a)"]), ("f(a, 1, b)", "swap", []), ("max(a, b)", "swap", []),
    ("f(a.x, b.x)", "swap", ["f(b.x, a.x)"]), ("x.detach().exp()", "drop detach", ["(x).exp()"]),
    ("torch.exp(x)", "drop exp", ["(x)"]), ("max(1, len(x))", "drop max", ["(len(x))"]),
    ("sorted(x)", "drop sorted", ["(x)"]), ("other.sorted(x)", "drop", []),
    ("y in ('a', 'b')", "drop '", ["y in ('b',)", "y in ('a',)"]),
    ("['a', 'b', 'c']", "drop '", ["['b', 'c']", "['a', 'c']", "['a', 'b']"]),
    ("open(x, encoding='utf-8-sig')", "drop the BOM", ['open(x, encoding="utf-8")'])])
def test_one_small_change_is_made_at_a_time(line, words, expected):
    source = f"def f(x):\n    return {line}\n"
    texts = [*made(source, words).values()]
    assert texts == [f"def f(x):\n    return {one}\n" for one in expected]


def test_conditions_without_an_operator_are_negated():
    source = "def f(x):\n    if x:\n        while x.a[0]:\n            pass\n"
    assert [*made(source, "negate").values()] == [
        source.replace("if x", "if (not x)"), source.replace("x.a[0]", "(not x.a[0])")]


def test_statements_exceptions_and_defaults_are_changed_and_lines_keep_their_numbers():
    source = '''"""1 < 2"""
import a
B: float = 0.5
C = [1,
     2]
class D:
    e = 7
    def f(self, g=3, *, h=0.25) -> "1 < 2":
        """1 < 2"""
        try:
            self.run(f"{1 < 2}",
                     g)
        except (OSError, ValueError):
            with suppress(KeyError):
                pass
        except TypeError:
            return (g
                    and h)
'''
    found = [(one.function, one.kind) for one in mutations.of_file("a", source)]
    assert sorted(found) == sorted([
        ("=B", "default 0.5 to 1.0"), ("=C", "number 1 to 2"), ("=C", "number 2 to 3"),
        ("=e", "number 7 to 8"), ("D.f", "number 3 to 4"), ("D.f", "default 0.25 to 0.5"),
        ("D.f", "drop call run"), ("D.f", "except all but OSError"),
        ("D.f", "except all but ValueError"), ("D.f", "suppress all but KeyError"),
        ("D.f", "except all but TypeError"), ("D.f", "drop condition 1 of and"),
        ("D.f", "drop condition 2 of and")])
    for text in made(source).values():
        compile(text, "a", "exec")
        assert text.count("\n") == source.count("\n")


def test_a_name_has_no_line_and_tells_several_of_a_kind_apart():
    names = [str(one) for one in mutations.of_file("a.py", "def f(x):\n    return x[1] < x[1]\n")]
    assert names == ["a.py f compare < to <=", "a.py f number 1 to 2", "a.py f number 1 to 2, 2"]


def test_what_scripts_share_is_changed_in_all_of_them_and_every_mutation_compiles():
    all_made = mutations.of_folder("scripts")
    shared = [one for one in all_made if one.function == "aggregate"]
    assert {tuple(file for file, *_ in one.edits) for one in shared} == {
        ("grpo.py", "gspo.py", "ppo.py", "reinforce.py")}
    assert {len(one.edits) for one in all_made if one.function == "GPT.__init__"} == {5}
    for one in sorted(all_made, key=mutations.Mutation.order)[:50]:
        for file, text in mutations.apply(one).items():
            compile(text, file, "exec")
            assert text != (ROOT / file).read_text("utf-8")


def test_every_name_of_the_list_of_equivalent_mutations_is_still_made():
    for folder in mutations.FOLDERS:
        assert mutations.files_of(folder), folder
    names = {str(one) for folder in mutations.FOLDERS for one in mutations.of_folder(folder)}
    known = mutants.equivalent()
    assert [name for name in known if name not in names] == []
    assert all(len(reason.split()) > 2 for reason in known.values())


# ---- choosing tests --------------------------------------------------------------------------

@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """recorded(*rows): what contexts.py recorded of the tests of this file, in rows of a test, its
    seconds and {file: {function: lines}}. -> Contexts"""
    def make(*rows):
        monkeypatch.setattr(mutants, "FOLDER", tmp_path)
        digest = contexts.digest("tests/test_mutants.py")
        lines = [{"test": f"tests/test_mutants.py::{test}", "seconds": seconds, "ran": ran,
                  "digest": digest, "import": 1} for test, seconds, ran in rows]
        (tmp_path / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return mutants.Contexts()
    return make


def mutation(function, statement=1):
    return SimpleNamespace(edits=(("a.py", 0, 0, ""),), function=function, statement=statement,
                           names=("B",) if function == "=B" else ())


@pytest.mark.parametrize("function, statement, expected", [
    ("f", 1, {"one", "two"}), ("f", 2, {"two"}), ("g", 1, {"three"}),
    ("f", 9, {"one", "two", "signature"}),
    ("f", 0, {"one", "two", "signature"}),
    ("=B", 1, {"three"}), ("unused", 1, {"three"}), ("made", 1, {"three"})])
def test_tests_run_the_statement_or_the_function_or_what_mentions_the_name(
        function, statement, expected, recorded):
    found = recorded(("one", 1, {"a.py": {"f": [1]}}), ("two", 1, {"a.py": {"f": [1, 2]}}),
                     ("three", 1, {"a.py": {"g": [1]}}), ("signature", 1, {"a.py": {"f": [0]}}))
    texts = {("a.py", "f"): "def f(): ...", ("a.py", "g"): "def g(): unused(B)",
             ("a.py", "=B"): "B = made()"}
    tests = found.of(mutation(function, statement), texts)
    assert {test.partition("::")[2] for test in tests} == expected


def test_one_test_of_each_function_comes_first_for_half_of_the_time_and_then_the_fast_ones(
        recorded):
    """The budget is 15 s, and the import of the file takes 1 s."""
    found = recorded(("a[1]", 2, {}), ("a[2]", 1, {}), ("b", 4, {}), ("c", 90, {}), ("d", 6, {}),
                     ("a[3]", 3, {}), ("b[2]", 8, {}))
    chosen = [test.partition("::")[2] for test in found.choose(found.seconds)]
    assert chosen == ["a[2]", "b", "a[1]", "a[3]"]      # 1 + 1 + 4 s, then 2 + 3
    assert found.choose(["tests/test_mutants.py::c"]) == ["tests/test_mutants.py::c"]


def test_the_tests_of_places_run_one_of_their_lines(recorded):
    source = (ROOT / "common.py").read_text("utf-8")
    line = source.index("raise SystemExit(code)")
    found = recorded(("one", 1, {"common.py": {"fail": [3]}}),
                     ("two", 1, {"common.py": {"fail": [2]}}),
                     ("three", 1, {"a.py": {"fail": [3]}}))
    assert found.at([("common.py", line)], source) == {"tests/test_mutants.py::one"}
    assert found.at([("common.py", 0)], source) == set()        # outside functions
    assert found.within(["tests/test_mutants.py"]) == {*found.seconds}
    assert found.within(["tests/test_other.py"]) == set()


def test_what_was_recorded_of_a_changed_file_of_tests_is_left_out(recorded, tmp_path):
    recorded(("one", 1, {}))
    text = (tmp_path / "1.jsonl").read_text()
    (tmp_path / "2.jsonl").write_text(text.replace('"digest": "', '"digest": "0'))
    assert mutants.Contexts().seconds == {}


def test_functions_that_changed_since_a_commit_are_found(monkeypatch):
    before = "A = 1\ndef f():\n    return 1\ndef g():\n    return 2\n"
    after = "A = 2\n\ndef f():\n    return 1\ndef g():\n    return 3\ndef h():\n    pass\n"
    monkeypatch.setattr(mutants, "git", lambda *words: before)
    changed = mutants.changed_since("base", mutants.texts_of("a.py", after))
    assert changed == {("a.py", "=A"), ("a.py", "g"), ("a.py", "h")}


# ---- planting --------------------------------------------------------------------------------

TESTS = """
import planted
def test_value(): assert planted.f(1) == 3
def test_text():
    import inspect
    assert "x + 2" in inspect.getsource(planted.f)
def test_nothing(): pass
def test_broken(): assert False
"""


@pytest.mark.parametrize("new, tests, expected", [
    ("return x + 3", ["test_nothing", "test_value"], "killed test_value"),
    ("return x + 3", ["test_text", "test_nothing"], "SURVIVED 2 tests"),
    ("return x + 3", ["test_broken", "test_value"], "killed test_value"),
    ("return x + 3", ["test_broken"], "SURVIVED 1 tests"), ("return x + 3", [], "UNTESTED 0 tests"),
    ("while True: pass", ["test_value"], "killed no end in 20 s"),
    ("import os; os._exit(3)", ["test_value"], "killed the process died")])
def test_a_mistake_is_killed_by_a_test_that_passes_without_it(new, tests, expected, tmp_path):
    (tmp_path / "planted.py").write_text("def f(x):\n    return x + 2\n")
    (tmp_path / "test_planted.py").write_text(TESTS)
    program = f"""
import sys, os; sys.path[:0] = [{str(ROOT / "tests")!r}, {str(tmp_path)!r}]
import mutants
os.chdir({str(tmp_path)!r})
mutants.ask.__defaults__ = (20,)
text = open("planted.py").read().replace("return x + 2", {new!r})
tests = [f"test_planted.py::{{name}}" for name in {tests!r}]
word, failed = mutants.plant(mutants.Mistake("name", {{"planted.py": text}}, tests))
print(word, failed.rpartition("::")[2])
"""
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True)
    assert done.stdout == f"{expected}\n", done.stderr


@pytest.mark.parametrize("killed, survived, is_reached", [
    (85, 15, True), (78, 22, True), (77, 23, False), (1, 1, True), (0, 2, False),
    (840, 160, True), (820, 180, False)])
def test_a_folder_has_its_goal_within_the_noise_of_a_sample(killed, survived, is_reached, capsys):
    words = ["killed"] * killed + ["SURVIVED"] * survived
    results = {f"grpo.py {i}": (word, "") for i, word in enumerate([*words, "skipped"])}
    assert mutants.report(results, dict.fromkeys(results, "scripts")) == is_reached
    assert f"{killed:5} of {killed + survived:5} killed" in capsys.readouterr().out


def test_a_mistake_of_practice_must_not_survive():
    assert mutants.report({"practice a.py b": ("killed", "")}, {})
    for word in ("SURVIVED", "BROKEN"):
        assert not mutants.report({"practice a.py b": (word, "")}, {})
