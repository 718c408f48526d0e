"""Rewards and tools of one's own: --reward_file, and tasks that insert text into completions, which
pretrained/train.py trains as the scripts do."""
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT
from small_models import LIKE_SMALL, NEEDS, load_example
from small_runs import SMALL, arguments, at_work, lines, read_summary, steps

import grpo
from tasks import calls

transformers = pytest.importorskip("transformers", reason=NEEDS)
from test_processes import job  # noqa: E402  (behind the line that may skip)

from pretrained import export  # noqa: E402
from report import ask  # noqa: E402

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


def test_functions_are_added_up_and_two_processes_ask_about_a_share_each(small_llama, tmp_path):
    asked = []
    for size in (1, 2):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / "mine.py").write_text(MINE)
        flags = FLAGS | {"model": small_llama}
        assert job(folder, flags, size) == [0] * size, (folder / "stderr-0").read_text()
        asked.append(len((folder / "asked").read_text().splitlines()))
    for a, b in zip(steps(tmp_path / "1/run"), steps(tmp_path / "2/run"), strict=True):
        accuracy, brevity = (a[f"rewards/{name}/mean"] for name in ("accuracy", "brevity"))
        assert accuracy == a["accuracy"] and brevity < 0
        assert a["reward"] == pytest.approx(accuracy + brevity)
        assert b["rewards/brevity/mean"] == pytest.approx(brevity)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
    trained = read_summary(tmp_path / "1/run")["trained"]
    assert trained["greedy_reward"] < trained["greedy"]
    assert asked[1] < 1.1 * asked[0] and asked[0] < 3 * 16 + 2 * 32 + 64      # once


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
    base, step = read_summary(folder)["base"], steps(folder)[0]
    assert 0 < base["sampled_reward"] < 1
    for rate, reward in ((base.get("pass@1"), base["sampled_reward"]),
                         (step.get("accuracy"), step["reward"])):
        assert rate == (pytest.approx(reward, rel=1e-5) if is_judged else None)


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
    ("call_tokens = 'ab'\ndef reward(**row): return 0\ndef respond(**row): return ''", "a list"),
    ("def reward(**row): return 0\ndef respond(**row): return ''", "call_tokens, a list of texts"),
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
        assert list(task.functions) == ["accuracy", "form"]
        assert task.rated(task.train[0], completion) == [right, right, form], completion


# ---- tools -----------------------------------------------------------------------------------

class Task:
    """Responds to `calls` with `response`, and notes the texts that it is shown."""

    def __init__(self, call_tokens, response):
        self.call_tokens = call_tokens
        self.response = response
        self.texts = []

    def respond(self, problem, text):
        self.texts.append(text)
        return self.response


def test_a_run_with_a_tool_is_that_of_the_script_from_the_same_base(tmp_path):
    lookup = {"task": "lookup", "max_completion_length": 37}
    base = {"base_steps": 250, "textbook_share": 1.0, "max_steps": 0, "output_dir": "base"}
    small = {name: SMALL[name] for name in SMALL if not name.startswith("base_")}
    two = lookup | {"max_steps": 2, "stop_at": 2}
    with at_work(tmp_path):
        grpo.main(arguments(SMALL | lookup | base))
        export.export(Path("base"), Path("llama"))
        grpo.main(arguments(small | two | {"init_from": "base", "output_dir": "ours"}))
        pretrained.main(arguments(LIKE_SMALL | two | {"model": "llama", "output_dir": "theirs"}))
        for line in lines("theirs/evaluation.jsonl")[:2]:
            assert ask.answer("theirs", line["prompt"]) != ""
    for one, other in zip(steps(tmp_path / "ours"), steps(tmp_path / "theirs"), strict=True):
        assert one["reward"] == other["reward"] and one["tools/call_frequency"] > 0.3
        for name in ("loss", "grad_norm", "entropy", "tools/call_frequency"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=2e-4), name


class Pieces:
    """A tokenizer of a few tokens."""
    vocabulary = ["ab", "x!?y", "c", "!", "?", "<i>", "<end>"]

    def __call__(self, text, add_special_tokens):
        return SimpleNamespace(input_ids=[self.vocabulary.index(text)] if text else [])

    def decode(self, ids):
        return "".join(self.vocabulary[i] for i in ids)


@pytest.mark.parametrize("call_tokens, response, found, shown", [
    (("!?",), "<i>", "abx!?y<i>c!?<i><end>", ["abx!?", "abx!?y<i>c!?"]),
    (("ycz", "ab"), "<end>", "ab<end>x!?yc!?<end>", ["ab"]),        # an inserted end
    (("yc!",), "", "abx!?yc!?<end>", ["abx!?yc!"]),
    (("<end>",), "ab", "abx!?yc!?<end>ab", ["abx!?yc!?<end>"])], ids=str)
def test_a_call_may_be_several_tokens_or_end_in_the_middle_of_one(
        call_tokens, response, found, shown):
    task = Task(call_tokens, response)
    policy = SimpleNamespace(tokenizer=Pieces(), ends=[6])
    one = calls.Completion(policy, task, None)
    while rest := [0, 1, 2, 3, 4, 6][int(sum(mask for _, mask, *_ in one.slots)):]:
        one.extend(rest, T=10)
    assert Pieces().decode(one.ids) == found and task.texts == shown
    assert one.has_ended == (call_tokens != ("<end>",))
