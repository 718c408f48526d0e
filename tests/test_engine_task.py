"""engines/task.py writes problems for other trainers, and judges completions by its columns."""
import json

import pytest

import common
from engines import task as engine

HOSTILE = ["", "<answer>", "<answer>7</answer><answer>7</answer>", "\x00\ud800", "9" * 10_000,
           "<answer>" + "(" * 5000 + "</answer>", "<answer>__import__('os')</answer>", "7"]


@pytest.mark.parametrize("name", ["arithmetic", "arithmetic:2-3", "countdown:3",
                                  "arithmetic,countdown", "abstain:cost=0.5", "arithmetic,abstain"])
def test_problems_are_conversations_and_the_file_is_enough_to_judge_them(name, capsys):
    engine.main([name, "40", "--instruction", "Solve: "])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 40 and all(row["prompt"] == [
        {"role": "user", "content": "Solve: " + row["problem"]}] for row in rows)
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    texts = [f"<answer>{row['answer']}</answer>" for row in rows]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert engine.right(texts, **columns) == engine.right(chats, **columns) == [1.0] * 40
    longer = [[{"role": "assistant", "content": "<answer>none</answer>"},
               {"role": "user", "content": "Again."}, *chat] for chat in chats]
    assert engine.right(longer, **columns) == [1.0] * 40        # the last message counts
    assert engine.right(["<answer>?</answer>"] * 40, **columns) == [0.0] * 40   # may abstain
    cost = 0.5 if "cost" in name else 1.0
    marks = [-cost if row["part"] == "abstain" else 0.0 for row in rows]
    for text in HOSTILE:
        assert engine.right([text] * 40, **columns) == marks
    held_out = [engine.load(name).is_held_out(common.Problem(
        row["problem"], row["answer"], task=row["part"])) for row in rows]
    assert not any(held_out)


@pytest.mark.parametrize("words, message", [
    (["gridworld", "5"], "gridworld: an environment answers or rewards while the policy writes"),
    (["lookup", "5"], "lookup: an environment"), (["number", "5"], "number: an environment"),
    (["chess", "5"], "--task chess: there is no")])
def test_a_task_that_does_not_fit_is_refused(words, message, refused):
    refused(message, engine.main, words)
