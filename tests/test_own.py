"""Test your own rewards and tools: --reward_file, and tasks that insert text into completions, on
which pretrained/train.py trains as the scripts do."""
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from small_models import LIKE_SMALL, NEEDS, load_example
from small_runs import SMALL, arguments, at_work, read_summary, steps

import grpo
from tasks import calls

transformers = pytest.importorskip("transformers", reason=NEEDS)
import tokenizers  # noqa: E402
from test_processes import job  # noqa: E402  (after the line that may skip)

from pretrained import export  # noqa: E402

pretrained = load_example()
FLAGS = LIKE_SMALL | {"max_steps": 2, "output_dir": "run", "reward_file": "mine.py"}
MINE = '''
def correct(completions, answer, **columns):
    return [f"<answer>{one}</answer>" in text for text, one in zip(completions, answer)]

def accuracy(prompts, completions, correct, **columns):
    with open("asked", "a") as log:
        log.writelines(f"{prompt}{text!r}\\n" for prompt, text in zip(prompts, completions))
    return correct

async def brevity(completions, **columns):
    return [-len(text) / 100 for text in completions]
'''


def test_functions_are_added_up_and_two_processes_rate_a_share_each(small_llama, tmp_path):
    asked = []
    for size in (1, 2):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / "mine.py").write_text(MINE)
        flags = FLAGS | {"model": small_llama}
        assert job(folder, flags, size) == [0] * size, (folder / "stderr-0").read_text()
        asked.append(sorted((folder / "asked").read_text().splitlines()))
    assert asked[0] == asked[1]
    for a, b in zip(steps(tmp_path / "1/run"), steps(tmp_path / "2/run"), strict=True):
        accuracy, brevity = (a[f"rewards/{name}/mean"] for name in ("accuracy", "brevity"))
        assert accuracy == a["accuracy"] and brevity < 0
        assert a["reward"] == pytest.approx(accuracy + brevity)
        assert b["rewards/brevity/mean"] == pytest.approx(brevity)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
    trained = read_summary(tmp_path / "1/run")["trained"]
    assert trained["greedy_reward"] < trained["greedy"]
    printed = (tmp_path / "1/stdout-0").read_text()
    assert re.search("\n  standard errors: greedy .*, greedy_reward .*, pass@1 ", printed)


def test_a_standard_error_is_that_of_a_mean_over_problems(monkeypatch):
    problems = [grpo.common.Problem(text, "1") for text in "abcd"]
    is_correct = torch.tensor([[1, 1], [0, 0], [1, 0], [0, 0]]) > 0
    batch = SimpleNamespace(is_correct=is_correct, rewards=2.0 * is_correct)
    task = SimpleNamespace(is_judged=True, judge=lambda batch, *_: batch,
                           scores=lambda *_: {"think_share": 0.0})
    monkeypatch.setattr(pretrained, "complete", lambda *_: batch)
    monkeypatch.setattr(grpo.common, "held_out_problems", lambda *_: problems)
    scores = pretrained.evaluate(None, task, pretrained.Config(model="m", reward_file="r"))
    error = torch.tensor([1, 0, 0.5, 0]).std(correction=0).item() / 2
    assert scores == {"pass@1": 3 / 8, "sampled_reward": 3 / 4, "errors": {
        "pass@1": pytest.approx(error), "sampled_reward": pytest.approx(2 * error)}}


def load(folder, source, records=None, **flags):
    """Load the task of a reward file; `records` are the lines of --data."""
    if source is not None:
        (folder / "mine.py").write_text(source)
    flags |= {"model": "none", "reward_file": str(folder / "mine.py")}
    if records:
        flags["data"] = str(folder / "data.jsonl")
        (folder / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    return pretrained.load_task(pretrained.Config(**flags))


def rated(task, *texts):
    """Rate completions of 1+1. -> list with the verdict and the rewards of each"""
    problem = grpo.common.Problem("1+1=", "2")
    return task.rated([(problem, text) for text in texts], [[65] * len(text) for text in texts])


ONE = "def one(completions, **columns): return [1 for _ in completions]\n"


@pytest.mark.parametrize("source, words", [
    (None, "there is no such file"),
    ("_a = len\nimport os\nfrom math import *", "has the rewards [], with the reward_weights []"),
    ("def correct(**columns): return []", "has the rewards []"),
    ("reward_weights = [1, 2]\n" + ONE, "has the rewards ['one'], with the reward_weights [1, 2]"),
    ("call_tokens = 'ab'\ndef respond(**row): return ''\n" + ONE, "call_tokens, a list of texts,"),
    ("def respond(**row): return ''\n" + ONE, "call_tokens, a list of texts, and respond need")])
def test_a_file_that_cannot_work_is_refused_before_the_model_is_loaded(
        source, words, tmp_path, refused):
    if source is not None:
        (tmp_path / "mine.py").write_text(source)
    refused(words, load, tmp_path, None)


@pytest.mark.parametrize("body, words", [
    ("0.5", "0.5"), ("[0]", "[0]"), ("[0.0, 1e999]", "[0.0, inf]"),
    ("[float('nan'), 0]", "[nan, 0]"), ("[0, '1']", "[0, '1']"), ("[[1], 0]", "[[1], 0]")])
def test_a_function_without_finite_numbers_ends_the_run_in_one_line(body, words, tmp_path, stops):
    task = load(tmp_path, f"async def f(**columns): return {body}")
    stops(f"mine.py: f returned {words}, not a list of 2 finite numbers, or None",
          rated, task, "a", "bb", code=1)


def test_an_error_in_a_function_is_not_a_reward_of_0(tmp_path):
    task = load(tmp_path, "async def f(**columns): return [][1]")
    with pytest.raises(IndexError):
        rated(task, "a")


def test_everything_callable_but_classes_and_imports_is_a_reward(tmp_path):
    task = load(tmp_path, """
import asyncio
import functools
from math import *
from math import floor as down
limit = 3
log = []

class Judge:
    def __call__(self, completions, **columns):
        return [down(2.5) for _ in completions]

def _weighed(weight, completions, **columns):
    gcd = weight
    return [gcd] * len(completions)

def plain(completion_ids, *texts, weight=5, **columns):
    return tuple(map(len, completion_ids))

lock = asyncio.Lock()

async def later(completions, **columns):
    async with lock:                    # belongs to the event loop in which `last` waits for it
        await asyncio.sleep(0)
    log.append("later ends")
    return [6 for _ in completions]

async def last(completions, **columns):
    place = len(log)
    async with lock:
        return [place for _ in completions]

weighed = functools.partial(_weighed, 3)
judge = Judge()
shorter = lambda answer, **_: [4 for _ in answer]
""")
    assert task.rewards == ["plain", "later", "last", "weighed", "judge", "shorter"]
    assert rated(task, "2", "31").tolist() == [[0, 1, 6, 0, 3, 2, 4], [0, 2, 6, 0, 3, 2, 4]]
    assert rated(task, "2").tolist() == [[0, 1, 6, 1, 3, 2, 4]]


def test_functions_for_trl_get_its_lists_and_none_does_not_count(tmp_path):
    task = load(tmp_path, """
reward_weights = [1, 10]

def length(prompts, completions, completion_ids, trainer_state, **kwargs):
    assert prompts == ["plain"] * 4 + [[{"role": "user", "content": "?"}]] * 2
    assert completions[4:] == [[{"role": "assistant", "content": "none"}]] * 2
    return [None if text == "none" or type(text) is list else len(ids) + trainer_state.global_step
            for text, ids in zip(completions, completion_ids)]

def kind(completions, tag, log_extra=None, log_metric=None, **kwargs):
    return [None if text == "none" else tag for text, tag in zip(completions, tag)]
""", [{"prompt": f"{i}", "answer": 1} for i in range(30)] + [{"prompt": "a", "tag": 1}])
    plain = grpo.common.Problem("plain", "", secret=json.dumps({"tag": 0.5}))
    bare = grpo.common.Problem("plain", "", secret="{}")
    chat = grpo.common.Problem('[{"role": "user", "content": "?"}]', "", secret="{}")
    batch = SimpleNamespace(
        problems=[plain, plain, bare, bare, chat, chat],
        texts=["ab", "none", "abc", "abcd", "none", "none"], is_truncated=torch.zeros(6) > 0,
        tokens=torch.zeros(6, 9).long(), lengths=torch.tensor([2, 4, 3, 4, 4, 4]))
    assert task.judge(batch, 2, 3) is batch
    assert batch.rewards.tolist() == [[5 + 5, 5 + 5], [6, 7], [0, 0]]   # none: that of its group
    assert task.means == [6.0, 0.5] and not batch.is_correct.any()
    batch.texts[:4] = ["none"] * 4
    task.judge(batch, 2, "evaluation")
    assert not batch.rewards.any() and task.trainer_state.global_step == 3
    task.task.observe = lambda *_: {}
    assert task.observe(batch, 0) == {}


def test_a_file_finds_its_neighbours_before_packages_of_their_names(tmp_path):
    (tmp_path / "pyclbr.py").write_text("value = 7")
    (tmp_path / "this_is_next_to_it.py").write_text("other = 8")
    task = load(tmp_path, """
import pyclbr
def reward(completions, **columns):
    from this_is_next_to_it import other
    return [pyclbr.value + other for _ in completions]
""")
    assert rated(task, "a").tolist() == [[0, 15]]


def test_a_task_with_a_tool_keeps_it_unless_the_file_has_one_which_inserts_texts(tmp_path, stops):
    (tmp_path / "mine.py").write_text(ONE)
    flags = {"model": "none", "task": "lookup", "reward_file": str(tmp_path / "mine.py")}
    [task, plain] = (pretrained.load_task(pretrained.Config(**flags | more))
                     for more in ({}, {"reward_file": ""}))
    [problem] = grpo.common.sample_problems(plain, 1, 0)
    text = "<search>a</search>"
    assert task.call_tokens == plain.call_tokens
    assert task.respond(problem, text) == plain.respond(problem, text) != ""
    task = load(tmp_path, ONE + """
call_tokens = ("!", "?")
async def respond(completions, **columns):
    return [1 if text == "?" else text[::-1] for text in completions]
""")
    assert task.call_tokens == ("!", "?") and task.respond(problem, "ab!") == "!ba"
    stops("respond returned [1], not a list of 1 texts", task.respond, problem, "?", code=1)


def test_a_function_is_told_that_a_number_that_was_cut_off_is_wrong(tmp_path):
    task = load(tmp_path, "def told(correct, **columns): return correct",
                [{"prompt": f"{i}", "answer": i} for i in range(30)])
    problem = grpo.common.Problem("1+1=", "2", secret="{}")
    found = task.rated([(problem, "2", is_cut) for is_cut in (False, True)], [[], []])
    assert found.tolist() == [[1, 1], [0, 0]]           # it may go on


def test_a_step_takes_the_problems_after_those_of_the_step_before(monkeypatch):
    task = SimpleNamespace(passes=lambda first, n: [*range(first, first + n)],
                           judge=lambda batch, G, step: batch)
    monkeypatch.setattr(pretrained, "complete", lambda policy, task, cfg, problems, _: problems)
    cfg = pretrained.Config(model="none", data="d", num_prompts=3, num_generations=2)
    taken = [pretrained.sample_batch(None, task, cfg, step) for step in range(2)]
    assert taken == [[0, 0, 1, 1, 2, 2], [3, 3, 4, 4, 5, 5]]


# ---- tools -----------------------------------------------------------------------------------

class Task:
    """Responds to every call with `response`, and records the texts that it receives."""

    def __init__(self, call_tokens, response):
        self.call_tokens = call_tokens
        self.response = response
        self.texts = []

    def respond(self, problem, text):
        self.texts.append(text)
        return self.response


def test_a_run_with_a_tool_is_that_of_the_script_from_the_same_base(tmp_path, watch):
    """Only prompts and what the tool inserts are ever tokenized: sampled ids are kept."""
    encoded = watch(pretrained.Policy, "ids_of", lambda self, text, **_: text)
    lookup = {"task": "lookup", "max_completion_length": 37}
    base = {"base_steps": 150, "textbook_share": 1.0, "max_steps": 0, "output_dir": "base"}
    small = {name: SMALL[name] for name in SMALL if not name.startswith("base_")}
    two = lookup | {"max_steps": 2}
    with at_work(tmp_path):
        grpo.main(arguments(SMALL | lookup | base))
        export.export(Path("base"), Path("llama"))
        grpo.main(arguments(small | two | {"init_from": "base", "output_dir": "ours"}))
        pretrained.main(arguments(LIKE_SMALL | two | {"model": "llama", "output_dir": "theirs"}))
    for one, other in zip(steps(tmp_path / "ours"), steps(tmp_path / "theirs"), strict=True):
        assert one["reward"] == other["reward"] and one["tools/call_frequency"] > 0.3
        for column in ("loss", "grad_norm", "entropy", "tools/call_frequency"):
            assert other[column] == pytest.approx(one[column], rel=1e-3, abs=2e-4), column
    assert any("<information>" in text for text in encoded)
    assert not any("<search>" in text for text in encoded)


def test_in_a_conversation_with_vllm_what_was_sampled_is_never_tokenized_again(monkeypatch):
    """The policy writes c! as two tokens, although the tokenizer has one for them, and reads its
    own ids in each later round. The pretended vLLM samples up to a call, as the real one does."""
    for name in ("vllm", "vllm.lora", "vllm.lora.request"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(
            LLM=None, SamplingParams=dict, LoRARequest=None))
    spec = importlib.util.spec_from_file_location("pretended", ROOT / "pretrained/engine.py")
    engine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(engine)
    rounds = {0: [[2, 3, 4], [2, 4], [6]], 1: [[0, 6]]}         # c ! ?, c ?, <end> | ab <end>
    asked = []

    def generate(texts, params, **options):
        asked.append([text["prompt_token_ids"] for text in texts])
        found = []
        for text, one in zip(texts, params):
            ids = rounds[text["prompt_token_ids"][0]].pop(0)
            assert one["stop"] == ["?"]
            assert one["max_tokens"] == 2 + 12 - len(text["prompt_token_ids"])
            logps = SimpleNamespace(logprobs=[-0.5] * len(ids))
            found.append(SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=ids, logprobs=logps)]))
        return found
    pieces = Pieces()
    pieces.vocabulary = [*pieces.vocabulary, "c!"]
    policy = SimpleNamespace(tokenizer=pieces, ids_of=pieces.ids_of, ends=[6])
    completions = [calls.Completion(policy, Task(("?",), "<i>"), None) for _ in range(2)]
    one = engine.Engine.__new__(engine.Engine)
    one.ends, one.is_cpu, one.adapter, one.llm = [6], True, None, SimpleNamespace(generate=generate)
    one.complete([[0, 1], [1, 0]], completions, 12, 1.0, torch.zeros(2, 12))
    assert asked == [[[0, 1], [1, 0]], [[0, 1, 2, 3, 4, 5]], [[0, 1, 2, 3, 4, 5, 2, 4, 5]]]
    assert completions[0].ids == [2, 3, 4, 5, 2, 4, 5, 6] and completions[1].ids == [0, 6]
    assert [mask for _, mask, *_ in completions[0].slots] == [1, 1, 1, 0, 1, 1, 0, 1]
    assert [2 * logp for *_, logp, _ in completions[0].slots] == [-1, -1, -1, 0, -1, -1, 0, -1]


class Pieces:
    """A tokenizer with a vocabulary of seven tokens."""
    vocabulary = ["ab", "x!?y", "c", "!", "?", "<i>", "<end>"]

    def ids_of(self, text, add_special_tokens):
        return [self.vocabulary.index(text)] if text else []

    def decode(self, ids, **options):
        return "".join(self.vocabulary[i] for i in ids)


@pytest.mark.parametrize("call_tokens, response, found, shown", [
    (("!?",), "<i>", "abx!?y<i>c!?<i><end>", ["abx!?", "abx!?y<i>c!?"]),
    (("ycz", "ab"), "<end>", "ab<end>x!?yc!?<end>", ["ab"]),        # the response is an end
    (("yc!",), "", "abx!?yc!?<end>", ["abx!?yc!"]),
    (("<end>",), "ab", "abx!?yc!?<end>ab", ["abx!?yc!?<end>"])], ids=str)
def test_a_call_may_be_several_tokens_or_end_in_the_middle_of_one(
        call_tokens, response, found, shown):
    task = Task(call_tokens, response)
    policy = SimpleNamespace(tokenizer=Pieces(), ids_of=Pieces().ids_of, ends=[6])
    one = calls.Completion(policy, task, None)
    while rest := [0, 1, 2, 3, 4, 6][int(sum(mask for _, mask, *_ in one.slots)):]:
        one.extend(rest, T=10)
    assert Pieces().decode(one.ids) == found and task.texts == shown
    assert one.has_ended == (call_tokens != ("<end>",))


@pytest.mark.parametrize("response", ["<i>7</i>", "\n a ,b", ".c", " ", "a\n\nb "])
def test_the_policy_reads_exactly_what_a_tool_returned(response):
    """Although this tokenizer begins each text with a space, and removes the space before commas
    when it decodes."""
    letters = {letter: i for i, letter in enumerate("\u2581\n.,abci7<>/!")}
    letters["\n\n"] = len(letters)
    plain = tokenizers.Tokenizer(tokenizers.models.Unigram([(token, -1.0) for token in letters]))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    plain.decoder = tokenizers.decoders.Metaspace(prepend_scheme="always")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, clean_up_tokenization_spaces=True)
    policy = SimpleNamespace(tokenizer=tokenizer, ends=[], ids_of=lambda text, **options: tokenizer(
        text, **options).input_ids)
    one = calls.Completion(policy, Task(("!",), response), None)
    one.extend([letters["a"], letters["!"]], T=30)
    assert one.decode(one.ids) == "a!" + response and one.task.texts == ["a!"]
