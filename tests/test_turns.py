"""Completions into which a task inserts text: examples/pretrained.py trains them as the scripts do,
and learns nothing of what the policy did not choose."""
from types import SimpleNamespace

import pytest
import torch
from small_models import LIKE_SMALL, NEEDS, config_of, load_example, save_random
from small_runs import SMALL, arguments, at_work, lines, steps

import grpo
from tasks import calls

transformers = pytest.importorskip("transformers", reason=NEEDS)
from test_pretrained import problems_of  # noqa: E402
from test_processes import job  # noqa: E402

from tools import ask, export  # noqa: E402

pretrained = load_example()
FLAGS = LIKE_SMALL | {"task": "lookup", "max_completion_length": 37, "stop_at": 2, "max_steps": 4,
                      "output_dir": "run"}


class Task:
    """Responds to `calls` with `response`, and notes the texts that it is shown."""

    def __init__(self, call_tokens, response):
        self.call_tokens = call_tokens
        self.response = response
        self.texts = []

    def respond(self, problem, text):
        self.texts.append(text)
        return self.response


@pytest.fixture(scope="module")
def lookup_base(tmp_path_factory):
    """The run folder of a base that asks the tool, and the same as a Llama."""
    folder = tmp_path_factory.mktemp("lookup")
    with at_work(folder):
        grpo.main(arguments(SMALL | {"task": "lookup", "base_steps": 250, "textbook_share": 1.0,
                                     "max_steps": 0, "output_dir": "run"}))
        export.export(folder / "run", folder / "llama")
    return folder / "run", folder / "llama"


@pytest.fixture(scope="module")
def whole(lookup_base, tmp_path_factory):
    """The folder of an uninterrupted run of four steps."""
    folder = tmp_path_factory.mktemp("whole")
    with at_work(folder):
        pretrained.main(arguments(FLAGS | {"model": lookup_base[1]}))
    return folder / "run"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A policy with random weights."""
    folder = save_random(tmp_path_factory.mktemp("random") / "model", max_position_embeddings=512)
    return pretrained.Policy(folder, config_of(max_completion_length=60, sample_batch_size=7))


def sample(policy, task):
    generator = torch.Generator().manual_seed(0)
    problems = problems_of(["(3+4)=", "3>", "Say yes:"], 8)
    return pretrained.complete(policy, task, policy.cfg, problems, generator)


def test_a_run_with_a_tool_is_that_of_the_script_from_the_same_base(lookup_base, whole, tmp_path):
    small = {name: SMALL[name] for name in SMALL if not name.startswith("base_")}
    with at_work(tmp_path):
        grpo.main(arguments(small | {
            "task": "lookup", "init_from": lookup_base[0], "output_dir": "run", "max_steps": 4,
            "stop_at": 2, "max_completion_length": 37}))
    for one, other in zip(steps(tmp_path / "run"), steps(whole), strict=True):
        assert one["reward"] == other["reward"] and one["tools/call_frequency"] > 0.3
        for name in ("loss", "grad_norm", "entropy", "tools/call_frequency"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=2e-4), name
    for line in lines(whole / "evaluation.jsonl")[:2]:
        assert ask.answer(whole, line["prompt"]) != ""


def test_two_processes_with_unequally_many_calls_make_the_steps_of_one(
        lookup_base, whole, tmp_path):
    flags = FLAGS | {"model": lookup_base[1], "parallel": "fsdp"}
    assert job(tmp_path, flags) == [0, 0], (tmp_path / "stderr-0").read_text()
    for one, other in zip(steps(whole), steps(tmp_path / "run"), strict=True):
        for name in one.keys() - {"step_time"}:
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name


def test_inserted_tokens_have_mask_0_and_the_policy_reads_them(policy):
    task = Task(tuple("abcdefgh!"), "<i>7<|eos|>,</i>")         # whose end ends nothing
    batch = sample(policy, task)
    ids = policy.tokenizer(task.response).input_ids
    num_whole = 0
    for tokens, mask, n in zip(batch.tokens.tolist(), batch.mask.tolist(), batch.lengths):
        starts = [t for t in range(1, n) if mask[t] == 0 and mask[t - 1] == 1]
        for t in starts:
            assert set(policy.tokenizer.decode(tokens[t - 1:t])) & set("abcdefgh!")
            assert tokens[t:t + len(ids)] == ids[:60 - t] and not any(mask[t:t + len(ids)])
            num_whole += t + len(ids) < n
        assert not any(mask[n:])
    assert num_whole > 3
    assert not (batch.logps * (1 - batch.mask)).any()
    logps, _ = pretrained.score_all(policy, batch.prompts, batch.tokens)
    torch.testing.assert_close(logps * batch.mask, batch.logps, rtol=0, atol=1e-5)


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
