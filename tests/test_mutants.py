"""Test the mistakes that tests/mutations.py makes, and that no mistake is called equivalent that is
not made any more."""
import mutants
import mutations
import pytest

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
