"""dpo.py --pairs and --save_pairs: preference pairs as a file."""
import json
from collections import Counter

import pytest
import torch
from conftest import scripts
from small_runs import (
    INSTANT,
    arguments,
    at_work,
    difference,
    lines,
    outcome,
    resume,
    steps,
)
from update_scenes import made_batch

import common
from tasks import pairs

pytestmark = [pytest.mark.quick, scripts("dpo")]

SMALL_POLICY = {name: value for name, value in INSTANT.items()
                if name not in ("operands", "max_completion_length")}
GOOD = {"prompt": "(3+4)=", "chosen": "<answer>7</answer>", "rejected": "<answer>8</answer>"}


def write(path, records):
    """A file with these lines, of which a dict is written as JSON."""
    with open(path, "w") as file:
        for record in records:
            file.write((record if isinstance(record, str) else json.dumps(record)) + "\n")
    return path


# ---- which pairs a step takes ----------------------------------------------------------------

@pytest.mark.parametrize("n", [1, 3, 7, 10, 25])
def test_steps_take_every_pair_equally_often_in_a_new_order_each_time(script, n):
    few = list(range(10))
    taken = [number for step in range(20) for number in pairs.pick(few, n, 0, step)]
    assert len(taken) == 20 * n
    rounds = [taken[i:i + 10] for i in range(0, len(taken) - 9, 10)]
    assert all(Counter(one) == Counter(few) for one in rounds)
    assert len({tuple(one) for one in rounds}) == len(rounds)
    assert pairs.pick(few, n, 1, 0) != pairs.pick(few, n, 0, 0) or n == 1


# ---- what is in a batch ----------------------------------------------------------------------

def test_a_batch_has_a_group_of_two_for_each_pair_and_nothing_counts_as_right(
        script, config, load_task, tmp_path):
    path = write(tmp_path / "pairs.jsonl", [GOOD, GOOD | {"prompt": "9-1=", "chosen": "<think>"}])
    cfg = config(pairs=str(path), max_completion_length=8, num_prompts=1, num_generations=4)
    task = load_task(cfg)
    policy = script.GPT(cfg)
    sample = script.common.load_pairs(cfg, task, script.encode_examples, script.score)
    batch = sample(policy, task, cfg, 0)
    assert sorted(zip(batch.texts[::2], batch.texts[1::2])) == sorted(
        [(GOOD["chosen"], GOOD["rejected"]), ("<think>", GOOD["rejected"])])
    assert batch.rewards.tolist() == [[1, 0], [1, 0]]
    chosen, rejected = script.preferences(batch.rewards)
    assert chosen.tolist() == [0, 2] and rejected.tolist() == [1, 3]
    for row, (problem, text) in enumerate(zip(batch.problems, batch.texts)):
        n = batch.lengths[row]
        assert batch.tokens[row, n - 1] == script.EOS
        assert script.decode(batch.tokens[row, :n - 1].tolist()) == text
        assert batch.mask[row].tolist() == [1.0] * n + [0.0] * (len(batch.mask[row]) - n)
        prompt = script.encode_prompts([problem.prompt], task, "cpu")[0]
        assert torch.equal(batch.prompts[row], prompt)
    logps, _ = script.score(policy, batch.prompts, batch.tokens, cfg.temperature)
    torch.testing.assert_close(batch.logps, logps.detach() * batch.mask)
    assert "accuracy" not in script.common.describe(batch)


@pytest.mark.parametrize("task", ["arithmetic", "arithmetic,countdown"])
def test_prompts_that_evaluations_hold_out_are_counted_aloud(
        script, config, load_task, tmp_path, capsys, task):
    prompts = [f"({a}+{b})=" for a in range(1, 10) for b in range(1, 10)]
    path = write(tmp_path / "pairs.jsonl", [GOOD | {"prompt": prompt} for prompt in prompts])
    cfg = config(pairs=str(path), task=task)
    arithmetic = load_task(config())
    held_out = sum(arithmetic.is_held_out(common.Problem(prompt, "")) for prompt in prompts)
    script.common.load_pairs(cfg, load_task(cfg), script.encode_examples, script.score)
    assert capsys.readouterr().out == (
        f"pairs: {held_out} of 81 have a prompt that is held out for evaluations\n")
    assert held_out > 0


# ---- runs ------------------------------------------------------------------------------------

def test_the_pairs_that_a_run_saved_teach_another_one(new_run, at_work_folder):
    """The first run takes a step for each batch of pairs, and so does the second."""
    first = new_run(save_pairs=True, max_steps=6)
    saved = lines(first / "pairs.jsonl")
    assert len(saved) == sum(line["pairs"] for line in steps(first))
    assert all(set(pair) == {"prompt", "chosen", "rejected"} for pair in saved)
    second = new_run(pairs=first / "pairs.jsonl", max_steps=6)
    metrics = steps(second)
    assert [line["pairs"] for line in metrics] == [16] * 6
    assert metrics[-1]["rewards/margins"] > 2 * abs(metrics[0]["rewards/margins"])
    assert all("accuracy" not in line and line["reward"] == 0.5 for line in metrics)


def test_runs_on_a_file_and_files_of_runs_go_on_bit_for_bit(new_run, at_work_folder, tmp_path):
    six = new_run(save_pairs=True, max_steps=6)
    three = new_run(save_pairs=True, max_steps=3)
    with open(three / "pairs.jsonl", "a") as log:
        log.write('{"prompt": "half a li')
    resume(three, max_steps=6)
    assert (three / "pairs.jsonl").read_text() == (six / "pairs.jsonl").read_text()

    path = tmp_path / "pairs.jsonl"
    path.write_text((six / "pairs.jsonl").read_text())
    whole = new_run(pairs=path, max_steps=4)
    half = new_run(pairs=path, max_steps=2)
    path.unlink()                               # the run has a copy
    resume(half, max_steps=4)
    assert not difference(outcome(whole), outcome(half))


def test_a_pair_that_a_file_would_change_is_not_saved(script, config, load_task):
    """An output without an end would be read with one, no byte of U+FFFD was written, and letters
    that spell a special token would become that token."""
    def sampled(text):
        return script.TOKENIZER.encode(text, allowed_special="all") + [script.EOS]
    rows = [sampled("<think>7</think>"), sampled("8"),
            list(b"7" * 9), sampled("8"),
            sampled("7"), [0xff, script.EOS],
            list(b"<think>") + [script.EOS], sampled("8"),
            sampled("7"), sampled("")]
    tokens = [row + [script.PAD] * (9 - len(row)) for row in rows]
    batch = made_batch(script, [[1]] * 10, tokens, torch.ones(10, 9), torch.zeros(10, 9), 2)
    batch.texts = [script.decode([i for i in row if i != script.EOS]) for row in rows]
    assert batch.texts[6] == "<think>" and batch.texts[5] == "\ufffd"
    saved = []

    class Run(script.common.Run):
        def __init__(self):
            self.cfg = config()
            self.task = load_task(self.cfg)

        def append(self, name, record):
            saved.append((name, record["chosen"], record["rejected"]))
    chosen = torch.tensor([0, 2, 4, 6, 8])
    Run().append_pairs(batch, chosen, chosen + 1, script.encode_examples)
    assert saved == [("pairs.jsonl", "<think>7</think>", "8"), ("pairs.jsonl", "7", "")]


# ---- files that are malformed ----------------------------------------------------------------

@pytest.mark.parametrize("line, words", [
    ("{", "Expecting"),
    ("", "Expecting value"),
    ("[]", "must be an object with the strings prompt, chosen, rejected"),
    ("null", "must be an object"),
    ("1" * 5000, ""),
    ("[" * 100_000, ""),
    ({"prompt": "1+1=", "chosen": "2"}, "must be an object with the strings"),
    (GOOD | {"chosen": 7}, "must be an object with the strings"),
    (GOOD | {"chosen": None}, "must be an object with the strings"),
    (GOOD | {"rejected": GOOD["chosen"]}, "chosen and rejected are the same"),
    (GOOD | {"prompt": "1" * 99}, "a prompt of 99 bytes; arithmetic has at most 18"),
    (GOOD | {"chosen": "7<|eos|>8"}, "chosen contains <|eos|>"),
    (GOOD | {"chosen": "x" * 48}, "chosen has 49 tokens, its end included"),
    (GOOD | {"rejected": "x" * 48}, "rejected has 49 tokens"),
    (GOOD | {"prompt": "\ud800"}, "utf-8"),
    (GOOD | {"chosen": "\ud800"}, "utf-8"),
    (GOOD | {"rejected": "\ud800"}, "utf-8")], ids=lambda value: repr(value)[:30])
def test_a_malformed_line_is_named_and_nothing_is_written(
        script, tmp_path, capsys, line, words):
    path = write(tmp_path / "pairs.jsonl", [GOOD, GOOD, line, GOOD])
    work = tmp_path / "work"
    work.mkdir()
    with at_work(work), pytest.raises(SystemExit) as stopped:
        script.main(arguments(SMALL_POLICY | {"pairs": path}))
    message = capsys.readouterr().err
    assert stopped.value.code == 2
    assert message.startswith(f"error: --pairs {path}: line 3: ") and words in message
    assert message.count("\n") == 1 and len(message) < 300
    assert not list(work.iterdir())


@pytest.mark.parametrize("content, words", [
    (None, "cannot be read (No such file or directory)"), (b"", "has no lines"),
    ("a folder", "is no file"),
    (b"\xff\xfe\n", "line 1: ")])
def test_a_file_that_cannot_be_read_gets_one_line(script, tmp_path, capsys, content, words):
    path = tmp_path / "pairs.jsonl"
    if content == "a folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with at_work(tmp_path), pytest.raises(SystemExit) as stopped:
        script.main(arguments(SMALL_POLICY | {"pairs": path}))
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert f"--pairs {path}: {words}" in message and message.count("\n") == 1


@pytest.mark.parametrize("flags, words", [
    ({"online": True}, "--online True: does nothing with --pairs"),
    ({"save_pairs": True}, "--save_pairs True: does nothing with --pairs"),
    ({"task": "lookup"}, "lookup inserts text into completions")], ids=str)
def test_a_flag_that_does_not_go_with_a_file_is_refused(script, tmp_path, capsys, flags, words):
    path = write(tmp_path / "pairs.jsonl", [GOOD])
    with at_work(tmp_path), pytest.raises(SystemExit) as stopped:
        script.main(arguments(SMALL_POLICY | {"pairs": path} | flags))
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err
