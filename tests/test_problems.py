"""Test tasks/problems.py: which lines of a file are problems, how they are split, in which order a
run trains on them, and which answers are right."""
import importlib
import json
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import count_work, load_named

import common
from tasks import problems


def config(**flags):
    """Stands in for the Config of pretrained/train.py, which needs transformers."""
    return SimpleNamespace(**({"data": "", "eval_data": "", "reward_file": "", "seed": 0} | flags))


def records(n, name="q"):
    """Make n problems in the format of a file's lines."""
    return [{"prompt": f"{name}{i}", "answer": i} for i in range(n)]


@pytest.fixture
def load(tmp_path_factory):
    """load(lines, eval_lines, **flags): write a file or two, in which lines that are not texts
    become JSON, and load them. -> task"""
    folder = tmp_path_factory.mktemp("data")

    def make(lines, eval_lines=None, **flags):
        for flag, name, given in (("data", "train", lines), ("eval_data", "test", eval_lines)):
            if given is not None:
                texts = [line if isinstance(line, str) else json.dumps(line) for line in given]
                flags[flag] = str(folder / f"{name}.jsonl")
                Path(flags[flag]).write_text("".join(f"{text}\n" for text in texts), "utf-8")
        return problems.FromFile(config(**flags))
    return make


def prompts(found):
    return [problem.prompt for problem in found]


def verify(answer, text):
    """Judge a text, given the right answer. -> 0.0 or 1.0"""
    return problems.FromFile.verify(None, common.Problem("", answer), text)


# ---- lines -----------------------------------------------------------------------------------

@pytest.mark.parametrize("answer, wanted", [
    ("1/0", "1/0"), ("$1,234.50", "$1,234.50"), ("Paris", "Paris"), ("}", "}"), ("%", "%"),
    ("\\boxed{7}", "\\boxed{7}"), ("\u0667", "\u0667"), ("two\nlines", "two\nlines"),
    ("nan", "nan"), (" padded\n", "padded"), (7, "7"), (-7, "-7"), (0, "0"), (3.0, "3.0"),
    (1e-5, "0.00001"), (1e22, "10000000000000000000000"), (10 ** 80, f"1{80 * '0'}")])
def test_an_answer_is_a_text_or_a_number_and_right(load, answer, wanted):
    task = load([{"prompt": "q", "answer": answer}], [{"prompt": "held out", "answer": 0}])
    [problem] = task.train
    assert (problem.prompt, problem.answer) == ("q", wanted)
    assert task.verify(problem, f"<answer>{wanted}</answer>") == 1.0
    assert task.verify(problem, f"<answer>{wanted}1</answer>") == float("box" in wanted)
    assert task.is_correct(problem, 1.0) and not task.is_correct(problem, 0.0)


BAD = ["{", '{"prompt": "q", "answer": 1} {}', "[]", '{"prompt": "q"}',
       '{"prompt": "", "answer": 1}', '{"prompt": 7, "answer": 1}',
       '{"prompt": "q", "answer": null}', '{"prompt": "q", "answer": true}',
       '{"prompt": "q", "answer": [1]}',
       '{"prompt": "q", "answer": " \\n"}', '{"prompt": "q", "answer": NaN}',
       '{"prompt": "q", "answer": 1e400}', '{"prompt": "\\ud800", "answer": 1}',
       '{"prompt": "q", "answer": "\\udfff"}', "[" * 100_000,
       '{"prompt": "q", "answer": ' + "9" * 5_000 + "}"]


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
def test_a_line_that_is_no_problem_is_refused_with_its_number(refused, load, line):
    said = f'train.jsonl: line 22 is not {{"prompt": "...", "answer": "..."}}: {line[:40]!a}'
    refused(said, load, [*records(20), "", line, *records(20)])


@pytest.mark.parametrize("answer", [None, True, [1, "x"], {"a": 1}, "", 7])
def test_where_a_reward_file_judges_an_answer_may_be_anything(load, answer):
    lines = [{"prompt": "q", "answer": answer, "id": 1}, {"prompt": "r", "tag": 2}]
    task = load(lines, [{"prompt": "held out", "answer": 0}], reward_file="mine.py")
    assert [problem.answer for problem in task.train] == ["7" if answer == 7 else "", ""]
    assert [json.loads(problem.secret) for problem in task.train] == lines
    assert task.columns == {"prompt", "answer", "id", "tag"} and task.is_judged == (answer == 7)


def test_answers_in_tex_are_announced(load, capsys):
    lines = [*records(50), {"prompt": "q", "answer": "\\frac{1}{2}"}]
    load(lines)
    assert capsys.readouterr().out.startswith("--data: 1 of 51 answers are in TeX, which is ")
    load(lines, reward_file="mine.py")
    load(records(50))
    assert capsys.readouterr().out == ""


def test_a_prompt_may_be_a_conversation(load, refused):
    chats = [[{"role": "system", "content": "Be \u00e4."}, {"role": "user", "content": f"q{i}"}]
             for i in range(40)]
    task = load([{"prompt": chat, "answer": i} for i, chat in enumerate(chats)])
    found = {int(problem.answer): problems.messages(problem.prompt)
             for problem in task.train + task.test}
    assert found == dict(enumerate(chats)) and "\u00e4" in task.train[0].prompt
    user = {"role": "user", "content": "q"}
    for chat in ([], [7], ["q"], [{"role": "user"}], [user | {"content": [{"type": "image"}]}],
                 [user, {"role": "assistant", "content": "a"}], [user | {"role": None}]):
        refused("line 1 is not ", load, [{"prompt": chat, "answer": 1}], reward_file="mine.py")
    for text in ("", "[", "[{", "[" * 9_999, '["role"]', '[{"role": "user"}]', "[{}]", "{}"):
        assert problems.messages(text) == [], text


def test_parquet_is_read_as_lines_are(load, tmp_path, refused):
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    path = tmp_path / "train.parquet"
    path.write_bytes(b"PAR1")
    cfg = config(data=str(path), reward_file="x")
    refused(f"--data {path}: cannot be read (", problems.FromFile, cfg)
    rows = [{"prompt": f"q{i}", "answer": i, "tags": [i]} for i in range(40)]
    importlib.import_module("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    expected, found = load(rows, reward_file="x"), problems.FromFile(cfg)
    assert (found.train, found.test) == (expected.train, expected.test)


def test_a_file_is_read_as_editors_and_other_systems_write_it(load):
    lines = ['\ufeff{"prompt": "a\u2028b", "answer": 1}\r', " ", '{"prompt": "c", "answer": 2}']
    found = load(lines, [{"prompt": "held out", "answer": 0}]).train
    assert [problem[:2] for problem in found] == [("a\u2028b", "1"), ("c", "2")]


def test_a_file_that_cannot_be_read_is_refused(refused, tmp_path, monkeypatch):
    (tmp_path / "bytes.jsonl").write_bytes(b'{"prompt": "\xff", "answer": 1}\n')
    for name in ("missing.jsonl", "bytes.jsonl", "."):
        path = str(tmp_path / name)
        refused(f"--data {path}: cannot be read (", problems.FromFile, config(data=path))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused("needs pyarrow: pip install pyarrow", problems.FromFile, config(data="x.parquet"))


def test_a_file_with_too_few_problems_is_refused(refused, load):
    trained = next(record for record in records(20) if not is_in_tenth(record["prompt"]))
    tested = next(record for record in records(99) if is_in_tenth(record["prompt"]))
    refused("there are no held-out problems", load, [trained])
    refused("there are no training problems", load, [tested])
    refused("there are no training problems", load, records(9), records(9))
    refused("there are no held-out problems", load, records(9), [])
    assert load([trained, tested]).train


# ---- the split and the order -----------------------------------------------------------------

def is_in_tenth(prompt):
    return zlib.crc32(prompt.encode()) % 10 == 0


def test_without_a_second_file_a_tenth_is_held_out_whatever_other_lines_exist(load):
    task = load([*records(2_000), *records(10)])
    names = [f"q{i}" for i in [*range(2_000), *range(10)]]
    assert prompts(task.test) == [name for name in names if is_in_tenth(name)]
    assert prompts(task.train) == [name for name in names if not is_in_tenth(name)]
    assert 150 < len(task.test) < 250
    task = load(records(300)[::-1], seed=3)
    assert set(prompts(task.test)) == {name for name in names[:300] if is_in_tenth(name)}
    # the scripts' functions sample from both parts
    test = common.sample_problems(task, 200, 0, "test")
    train = common.sample_problems(task, 200, 0, "train")
    assert set(test) <= set(task.test) and len(set(test)) > 20
    assert set(train) <= set(task.train) and len(set(train)) > 100
    assert {problem.task for problem in (*test, *train)} == {"train"}
    assert sorted(common.held_out_problems(task, 512)) == sorted(task.test)
    said = [{"prompt": [{"role": "user", "content": f"q{i} "}], "answer": 0} for i in range(300)]
    padded = [{"prompt": f" q{i}\n", "answer": 0} for i in range(300)]
    twins = load([*records(300), *said, *padded])
    assert len(twins.test) == 3 * len(task.test)        # what reads the same stays together
    assert set(prompts(task.test)) <= set(prompts(twins.test))
    other_answer = load(records(20), [{"prompt": "q7\n", "answer": 8}])
    assert "q7" not in prompts(other_answer.train)


@pytest.mark.parametrize("size", [7, 100])
def test_steps_of_any_size_go_through_the_same_order(load, size):
    task = load(records(50))
    together = task.passes(0, 300)
    assert sum((task.passes(first, size) for first in range(0, 300, size)), [])[:300] == together
    n = len(task.train)
    orders = [task.passes(number * n, n) for number in range(3)]
    orders.append(load(records(50), seed=1).passes(0, n))
    assert all(sorted(order) == sorted(task.train) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


# ---- answers ---------------------------------------------------------------------------------

RIGHT = [
    # a single answer block counts first
    ("7", "<think>8</think><answer> 7\n</answer> or 9, \\boxed{8}"),
    ("7", "<think>in <answer> </answer> tags</think><answer>7</answer>"),
    # without a block, or within it, the last box counts
    ("7", "\\boxed{5}, no, \\boxed{ 7 }. There are 3"), ("{{}}{}", "\\boxed{{{}}{}} }"),
    ("\\frac{1}{2}", "so $\\boxed{\\frac{1}{2}}$"), ("5", "<answer>It is $\\boxed{5}$.</answer>"),
    # without a box, the last number counts
    ("2", "5-3=2"), ("-3", "it is -3."), ("-20", "-$20"), ("-0.5", "-.5"), ("0.5", "3/6"),
    ("7", "\u0663 7 \u0663"), ("5", "\u7b54\u6848\u662f5\u3002"), ("5", "Answer:5"),
    ("18", "so 18\\%."), ("24", "48/2=<<48/2=24>>24"), ("5", "so \\(5\\)."), ("5", "(**$5**)"),
    ("5", "It is 5km."), ("9", "The area is 9 m^2"), ("7", "<think>maybe \\boxed{8}</think> So 7"),
    ("8", "15% of 53 is 7.95, so about 8"), ("5", "5" + " the end" * 100),
    # which may be a word of several numbers, or the whole text
    ("12:30", "It is at 12:30."), ("2024-05-01", "on 2024-05-01"), ("1,2", "so 1,2"),
    ("5 km", "<think>5</think> 5 km\n"), ("Paris", "Paris"),
    # equal numbers may be written in different ways
    ("1234.5", "<answer>$1,234.50</answer>"), ("18", "<answer> $18$. </answer>"),
    ("1,000", "1000.0"), ("-5", "it is \u22125"), ("5", "\\boxed{\\$5}"), ("\\boxed{5}", "5"),
    ("-7", "\\boxed{-07}"), ("0", "<answer>-0.00</answer>"), ("2", "<answer>4/02</answer>"),
    ("12345678901234567890", "<answer>12345678901234567890.0</answer>"),
    # words must match exactly
    ("Paris", "<answer>Paris</answer>"), ("a  b", "\\boxed{ a  b }"), ("5 km", "\\boxed{5 km}"),
    ("1/0", "<answer>1/0</answer>")]

WRONG = [
    ("7", ""), ("7", "<answer></answer>"), ("", "<answer></answer>"), ("", ""), ("7", "7 or 8"),
    ("7", "<answer>8</answer> 7"), ("5", "it is \u22125"), ("7", "<answer>\uff17</answer>"),
    ("7", "<answer>7 apples</answer>"),
    # two blocks, or a tag without its partner
    ("7", "<answer>7</answer><answer>7</answer>"), ("7", "<answer><answer>7</answer>"),
    ("7", "<answer>7"), ("7", "7</answer>"), ("7", "<answer>x</answer> \\boxed{7}"),
    # the last box has a different answer, is empty or does not end
    ("7", "\\boxed{7} \\boxed{8}"), ("7", "\\boxed{} 7"), ("7", "\\boxed{{7} 7"),
    ("7", "\\boxed{7} and \\boxed{"), ("7", "<answer>\\boxed{7</answer>"),
    # the answer is only part of a number or text, or the number is malformed
    ("5", "it is .5"), ("234.5", "$1,234.50"), ("12", "<answer>1,2</answer>"), ("12", "1,2"),
    ("1234", "<answer>12,34</answer>"), ("4", "3/4"), ("2024", "3/4/2024"), ("7", "1.6.7"),
    ("7", "7" * 51), ("0", "0." + "3" * 60), ("30", "at 12:30"), ("1", "on 2024-05-01"),
    ("0", "It is 10 000."), ("1/2", "It is 2 1/2."), ("5", "It is 1.5e5"), ("2", "9 m^2"),
    ("5", "<answer>5 km</answer>"), ("34", "1234" + " x" * 499),
    # TeX is a text
    ("5", "\\boxed{5\\text{not}}"), ("5", "\\boxed{5...}"), ("0.5", "\\boxed{\\frac{1}{2}}"),
    *((part, text) for text in ("10^3", "2**3", "(3+4)^2", "so $3\\sqrt{2}$", "2\\pi", "2\u00bd")
      for part in ("2", "3", "10")),
    # the thought does not end
    ("12", "<think>\\boxed{12} may be"), ("7", "<think>8</think><think> So 7"),
    # nearly equal
    ("12345678901234567890", "<answer>12345678901234567891</answer>"),
    ("0.1", "<answer>0.10000000000000000001</answer>"), ("Paris", "<answer>paris</answer>"),
    ("Paris", "It is Paris"), ("a b", "<answer>a  b</answer>"), ("x 7", "<answer>7</answer>"),
    ("1/0", "<answer>0</answer>"), ("18%", "<answer>0.18</answer>")]


@pytest.mark.parametrize("answer, text, verdict", [
    *((*case, 1.0) for case in RIGHT), *((*case, 0.0) for case in WRONG)])
def test_a_right_answer_is_found_and_a_wrong_one_is_not_taken_for_it(answer, text, verdict):
    assert verify(answer, text) == verdict


@pytest.mark.parametrize("text, expected", [
    ("It is 7", [0.0, 1.0]), ("\\boxed 7", [0.0, 1.0]), ("\\boxed{7}, so 8", [1.0, 1.0]),
    ("<answer>7</answer> is", [1.0, 1.0]), ("<answer>7", [0.0, 0.0]), ("\\boxed{7", [0.0, 0.0])])
def test_a_completion_that_is_cut_off_is_right_only_if_its_answer_is_closed(load, text, expected):
    task = load([{"prompt": "q", "answer": 7}], [{"prompt": "held out", "answer": 0}])
    batch = SimpleNamespace(problems=2 * task.train, texts=[text, text],
                            is_truncated=torch.tensor([True, False]))
    assert task.judge(batch, 2, 0).verdicts == expected
    assert batch.rewards.tolist() == [expected]
    # the tasks of the scripts judge any text alone
    of_text = float("<answer>7</answer>" in text)
    assert load_named().judge(batch, 2, 0).verdicts == [of_text, of_text]


MANY = 100_000
HOSTILE = [
    "<answer>" * MANY, "<answer>" + "7" * MANY + "</answer>", "<answer>" + " " * MANY + "</answer>",
    "<answer>7" + " " * MANY + "7</answer>", "<answer>1" + ",000" * MANY + "</answer>",
    "<answer>1/" + "0" * 500 + "1</answer>", "<answer>0." + "0" * 500 + "</answer>",
    "\\boxed{" * MANY, "\\boxed{" + "{" * MANY + "}" * MANY, "7" * MANY, "-" * MANY, "." * MANY,
    "1," * MANY, "1/" * MANY, "-$" * MANY, "1/" + "0" * MANY + "1", "0/0", "\u00bd" * MANY,
    "\u00b2", "<answer>\x007\x00</answer>", "<answer>\udfff</answer>", "<answer>inf</answer>",
    "<answer>1e999999999</answer>", "<answer>7_7</answer>", "5" + " " * MANY + "5", ", " * MANY,
    "7 7" * MANY, "a7" * MANY, "\\boxed{" + "7" * 51 + "}", "<think>" * MANY]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_text_is_worth_nothing_and_little_of_it_is_read(text):
    for answer in ("77", "word", "7/2"):
        assert verify(answer, text) == 0.0
        assert count_work(verify, answer, text) < 10_000
