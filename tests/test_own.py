"""--reward_file: functions of one's own that reward, say what is right, and respond."""
import json
import re

import pytest
from conftest import ROOT
from small_models import LIKE_SMALL, NEEDS, load_example
from small_runs import arguments, at_work, lines, read_summary, steps

pytest.importorskip("transformers", reason=NEEDS)
from test_processes import job

pretrained = load_example()
FLAGS = LIKE_SMALL | {"stop_at": 2, "max_steps": 2, "output_dir": "run", "reward_file": "mine.py"}
MINE = '''
def correct(completion, answer, **row):
    return f"<answer>{answer}</answer>" in completion

def accuracy(completion, answer, correct, **row):
    _note(completion, row["prompt"])
    return correct

def brevity(completion, **row):
    return -len(completion) / 100

def _note(completion, prompt):
    with open("asked", "a") as log:
        log.write(f"{prompt}{completion!r}\\n")
'''


def run(folder, model, source=MINE, **flags):
    if source is not None:
        (folder / "mine.py").write_text(source)
    with at_work(folder):
        pretrained.main(arguments(FLAGS | {"model": model} | flags))
    return folder / "run"


def test_functions_are_added_up_and_each_completion_is_asked_about_once(small_llama, tmp_path):
    folder = run(tmp_path, small_llama, max_steps=1, num_eval_samples=1)
    [step] = steps(folder)
    assert step["rewards/accuracy/mean"] == step["accuracy"] > 0
    assert step["rewards/brevity/mean"] < 0
    total = step["rewards/accuracy/mean"] + step["rewards/brevity/mean"]
    assert step["reward"] == pytest.approx(total)
    trained = read_summary(folder)["trained"]
    assert trained["greedy_reward"] < trained["greedy"]
    asked = (tmp_path / "asked").read_text().splitlines()
    evaluated = 2 * 2 * 16                              # at start and end, greedy and sampled
    assert evaluated <= len(asked) <= evaluated + 32


def test_two_processes_ask_about_a_share_each_and_learn_the_same(small_llama, tmp_path):
    asked = []
    for size in (1, 2):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / "mine.py").write_text(MINE)
        flags = FLAGS | {"model": small_llama}
        assert job(folder, flags, size) == [0] * size, (folder / "stderr-0").read_text()
        asked.append(len((folder / "asked").read_text().splitlines()))
    for a, b in zip(steps(tmp_path / "1/run"), steps(tmp_path / "2/run"), strict=True):
        assert b["rewards/brevity/mean"] == pytest.approx(a["rewards/brevity/mean"])
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
    assert asked[1] < 1.1 * asked[0]


@pytest.fixture
def data(tmp_path):
    """A file without answers, whose lines have other keys."""
    records = [{"prompt": f"({a}+{b})=", "sum": a + b, "list": [a, b]}
               for a in range(1, 7) for b in range(1, 9)]
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    return {"task": "arithmetic", "data": "train.jsonl"}


@pytest.mark.parametrize("is_judged", [False, True])
def test_other_keys_of_a_line_arrive_and_without_answers_only_correct_says_what_is_right(
        is_judged, small_llama, tmp_path, data):
    source = '''
def reward(completion, sum, list, **row):
    assert sum == list[0] + list[1] and row["answer"] == "" and row["prompt"][1] == str(list[0])
    return f">{sum}<" in completion
''' + "correct = lambda completion, sum, **row: f'>{sum}<' in completion" * is_judged
    folder = run(tmp_path, small_llama, source, **data)
    base = read_summary(folder)["base"]
    assert 0 < base["sampled_reward"] < 1
    found = [base, *({"pass@1": step.get("accuracy"), "sampled_reward": step["reward"]}
                     for step in steps(folder))]
    for scores in found:
        wanted = pytest.approx(scores["sampled_reward"], rel=1e-5) if is_judged else None
        assert scores.get("pass@1") == wanted


def test_a_file_may_respond_to_calls(small_llama, tmp_path, data):
    source = '''
call_tokens = ["<answer>"]
def respond(completion, sum, **row):
    return str(sum)
def reward(completion, sum, **row):
    return completion.startswith(f"<answer>{sum}")
'''
    run(tmp_path, small_llama, source, **data)
    found = [one for line in lines(tmp_path / "run/samples.jsonl") for one in line["completions"]
             if one["text"].startswith("<answer>")]
    assert found and all(one["reward"] == 1 and one["mask"][:2] == [1, 0] for one in found)


@pytest.mark.parametrize("source, words", [
    (MINE + "\n1 / 0", "line 16: ZeroDivisionError: division by zero"),
    ("def reward(:", "SyntaxError: "), (None, "FileNotFoundError: "),
    ("def _reward(**row): return 0", "has no function that rewards"),
    ("def reward(**row):\n  return [][1]",
     'line 2: IndexError: list index out of range in reward of {"prompt": "'),
    ("def reward(**row): return None", "TypeError: must be real number, not NoneType in reward"),
    ("def reward(**row): return 1e999", "ValueError: inf is no float in reward of "),
    ("seconds = .2\ndef reward(**row):\n  while 1: pass",
     "line 3: TimeoutError: took longer than 0.2 seconds in reward of "),
    ("def reward(**row): return 0\ndef correct(**row): return row['x']", "line 2: KeyError: 'x'"),
    ("call_tokens = ['a']\ndef reward(**row): return 0\ndef respond(**row): return 1",
     "ValueError: 1 is no str in respond of ")], ids=str)
def test_what_raises_ends_the_run_in_one_line(source, words, small_llama, tmp_path, capsys):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, small_llama, source)
    assert stop.value.code in (1, 2)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --reward_file ") and words in line


def test_the_reward_file_of_the_page_grades_the_format_of_gsm8k(tmp_path):
    page = (ROOT / "docs/extending.md").read_text()
    [source] = re.findall(r"```python\n(\"\"\"A completion shall.*?)```", page, re.DOTALL)
    (tmp_path / "gsm8k.py").write_text(source)
    records = [{"prompt": f"q{i}", "answer": "1,072"} for i in range(60)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    task = pretrained.load_task(pretrained.Config(
        model="none", data=str(tmp_path / "data.jsonl"), reward_file=str(tmp_path / "gsm8k.py")))
    for completion, right, form in (
            ("so it is\n#### 1072", 1, 0.1), ("#### 1,072.", 1, 0.1), ("1072", 0, 0),
            ("#### 10720", 0, 0.1), ("#### 1072 or 5", 0, 0.1), ("####", 0, 0.1)):
        rated = task.rated(task.train[0], completion)
        assert dict(zip(["correct", *task.functions], rated)) == {
            "correct": right, "accuracy": right, "form": form}, completion
