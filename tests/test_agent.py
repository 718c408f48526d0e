"""Test the last rung of the path, real.py with a tool: it samples and learns what tasks/calls.py,
grpo.py and TRL do, and no tool can break a run or write a control token."""
import inspect
import json
import re
import threading
import types
from pathlib import Path

import pytest
import torch
from conftest import load_named
from small_models import NEEDS, gradient, random_model, save_random
from small_runs import SMALL, arguments, at_work
from torch.testing import assert_close as same

import grpo
from examples import turns
from learn.path import rungs
from report import ask
from vectors.edits import replace_once

pytest.importorskip("transformers", reason=NEEDS)
import real
from engines import export

pytestmark = pytest.mark.usefixtures("own_folder")

SIZES = {"P": 4, "G": 4, "W": 24, "T": 24, "N": 7, "M": 3, "HELD_OUT": 3, "K": 4,
         "CALL": tuple(map(chr, range(33, 127))), "FRAME": ("<search>", "<|eos|>")}
QUESTIONS = ["(3+4)=", "3>", "((((3+4)-5)*4)-2)="] * 8
DICT = dict(enumerate(["<|eos|>", "X", "\u4e2d", "a b\n", ""]))


def from_dict(question, text):
    """A tool whose answer depends on the last letter of a text."""
    return DICT[ord(text[-1]) % 5]


def agent(*edits, more="", **values):
    """The script, with edits of its text and values for its globals. -> module"""
    script = types.ModuleType("agent")
    script.__file__ = real.__file__
    source = rungs.real_script(rungs.AGENT, more)
    for old, new in edits:
        source = replace_once(source, old, new)
    exec(source, vars(script))
    vars(script).update(SIZES | {"respond": from_dict} | values)
    script.DRAWS.manual_seed(0)
    return script


# ---- the toy, and TRL ------------------------------------------------------------------------

@pytest.fixture(scope="module")
def lookup(tmp_path_factory):
    """The run folder of a base that often calls the tool of lookup, mostly in a wrong way, and the
    model that engines.export makes of it."""
    folder = tmp_path_factory.mktemp("lookup")
    with at_work(folder):
        grpo.main(arguments(SMALL | {
            "task": "lookup", "base_steps": 30, "max_steps": 0, "output_dir": "run",
            "temperature": 0.8, "num_eval_problems": 2, "max_completion_length": 40,
            "num_prompts": 16}))
    export.export(folder / "run", folder / "model", "base.pt")
    return folder / "run", folder / "model"


def test_it_samples_and_learns_what_the_toy_does_with_the_same_uniforms(lookup, watch):
    run, model = lookup
    _, cfg = ask.read_run(run)
    toy = ask.load_policy(run, grpo, cfg, "base.pt")
    task = load_named("lookup")
    drawn = watch(grpo, "rollout", lambda *args: args[4])
    batch = grpo.sample_batch(toy, task, cfg, "train")
    by_prompt = {problem.prompt: problem for problem in batch.problems}

    def respond(question, text):
        answer = task.respond(by_prompt[question], text)
        return re.sub("</?information>", "", answer)
    script = agent(W=task.prompt_width, T=40, K=40, CALL=task.call_tokens, respond=respond,
                   FRAME=("<information>", "</information>"), TEMPERATURE=0.8)
    policy = script.load(model)
    questions = [problem.prompt for problem in batch.problems]
    prompts = script.encode(questions, script.W)
    with torch.no_grad():
        tokens, sampled = script.sample_few(policy, prompts, drawn[0], False, questions)
    logps, mask = script.logprobs(policy, tokens)
    ids = script.ids(tokens)
    for row, n in enumerate(batch.lengths):
        assert ids[row, script.W:][:n].tolist() == batch.tokens[row, :n].tolist()
        assert (ids[row, script.W + n:] == script.PAD).all()
    same(mask, batch.mask)
    for found in (sampled, logps.detach()):
        same(found * mask, batch.logps * mask, atol=1e-5, rtol=0)
    inserted = (tokens < script.PAD).sum()
    assert inserted > 400 and mask.sum() > 400

    A = torch.randn(len(tokens), 1)
    batch.logps = batch.logps + 0.3 * torch.randn_like(batch.logps)
    cfg = grpo.Config(**vars(cfg) | {"epsilon_high": 0.28, "beta": 0.0, "loss_type": "grpo"})
    loss = script.surrogate_loss(logps, batch.logps, A, mask)
    ours = gradient(policy, loss)
    toy.zero_grad()
    rows = torch.arange(len(tokens))
    found = grpo.backward(toy, batch, None, A.expand_as(mask), rows, cfg)
    assert found["loss"] == pytest.approx(loss.item(), abs=1e-6)
    theirs = {export.llama_name(name): weight.grad for name, weight in toy.named_parameters()}
    same(ours, theirs, atol=1e-5, rtol=1e-4)
    assert max(grad.abs().max() for grad in ours.values()) > 0.01


def test_a_step_is_that_of_trl_with_its_tool_mask():
    trl = pytest.importorskip("trl", reason=NEEDS)
    from datasets import Dataset
    script = agent(TEMPERATURE=0.8)
    folder = random_model()
    policy = script.load(folder)
    tokens = script.sample(policy, QUESTIONS)
    logps, mask = script.logprobs(policy, tokens)
    old_logps = (logps + 0.3 * torch.randn_like(logps)).detach() * mask
    A = torch.randn(24, 1)
    loss = script.surrogate_loss(logps, old_logps, A, mask)
    ours = gradient(policy, loss)
    trainer = trl.GRPOTrainer(str(folder), lambda **_: None, trl.GRPOConfig(
        "out", temperature=0.8, use_cpu=True, bf16=False, report_to="none", loss_type="grpo",
        epsilon_high=0.28, beta=0.0, max_completion_length=24, per_device_train_batch_size=24,
        num_generations=24, activation_checkpointing=False), Dataset.from_list([{"prompt": "a"}]))
    trainer.current_gradient_accumulation_steps = 1
    ids, slots, W = script.ids(tokens).clamp(min=0), (tokens != script.PAD).long(), script.W
    theirs = trainer._compute_loss(trainer.model.train(), {
        "prompt_ids": ids[:, :W], "prompt_mask": slots[:, :W], "completion_ids": ids[:, W:],
        "completion_mask": slots[:, W:], "tool_mask": (tokens[:, W:] > script.PAD).long(),
        "advantages": A[:, 0], "old_per_token_logps": old_logps, "num_items_in_batch": mask.sum()})
    same(loss, theirs, atol=1e-5, rtol=0)
    assert (tokens < script.PAD).sum() > 50
    same(ours, gradient(trainer.model, theirs), atol=1e-4, rtol=1e-3)


def test_the_lab_counts_the_tools_tokens_as_the_policys_only_if_it_is_told_to(
        lookup, monkeypatch, capsys):
    from lab import agent as lab
    monkeypatch.setitem(lab.CASES, "lookup", lab.CASES["lookup"] | {"STEPS": 1, "P": 2})
    for flags in [], ["--unmasked"]:
        lab.main(["lookup", str(lookup[1]), "1e-3", "0", *flags])
    written, _, all_tokens, _ = map(float, re.findall(
        r"(?:tokens|last 1 steps:) ([\d.]+)", capsys.readouterr().out))
    assert all_tokens > written


# ---- turns -----------------------------------------------------------------------------------

@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "lfm2"])
def test_an_answer_follows_its_call_as_text_in_a_frame_and_the_trainer_sees_what_the_sampler_saw(
        family, recorded_graphs):
    """Whether or not the sampler is recorded; the last of K turns gets no answer."""
    script = agent()
    policy = script.load(random_model(family))
    search, end = script.TOKENIZER("<search><|eos|>").input_ids
    policy.generation_config.eos_token_id = ends = [*range(128, 140), end]
    prompts, uniforms = script.encode(QUESTIONS, script.W), 1 - torch.rand(24, script.T)
    with torch.no_grad():
        tokens, sampled = script.sample_few(policy, prompts, uniforms, False, QUESTIONS)
        recorded_graphs()
        again = agent((' and DEVICE == "cuda":         # Python starts', ":  # Python starts"))
        again.TOKENIZER = script.TOKENIZER
        with torch.no_grad():
            recorded, _ = again.sample_few(policy, prompts, uniforms, False, QUESTIONS)
    assert torch.equal(tokens, recorded)
    logps, mask = script.logprobs(policy, tokens)
    same(logps * mask, sampled * mask, atol=2e-5, rtol=0)
    assert (logps[mask == 0] == 0).all() and torch.equal(mask, (tokens[:, script.W:] > -1).float())
    found = set()
    for row in tokens[:, script.W:].tolist():
        expected, answers, has_ended = [], 0, False
        for token in row:
            if expected:
                assert -2 - token == expected.pop(0)
                continue
            assert token >= -1 and (token == -1) == has_ended
            text = script.TOKENIZER.decode([token]) if token > -1 else " "
            is_call = not {*text}.isdisjoint(script.CALL) and answers < 3
            if is_call and (answer := from_dict("", text)):
                expected = [search, *answer.encode(), end]
                answers += 1
                found.add(answer)
            has_ended |= token in ends and not expected
    assert found == {*DICT.values()} - {""}


def test_a_call_may_end_with_an_end_or_in_a_token_and_an_answer_goes_to_its_own_question():
    """The policy writes fixed texts. The rows are sampled in parts of two."""
    texts = ["c<|eos|>d<|eos|>", "b<|eos|>", "l.\n<|eos|>", "3\u00b5m<|eos|>", "l<|eos|>"]
    script = agent(CALL=("<|eos|>", "l.", "\u00b5"), FRAME=("", ""), N=2,
                   respond=lambda question, text: question if text[0] in "cl3" else "")
    policy = script.load(random_model())
    script.TOKENIZER.add_tokens(["l.\n"])
    outputs = [script.TOKENIZER(text).input_ids for text in texts]

    def logits_after(policy, tokens, n, cache, at):
        own = (tokens[:, :at[-1] + 1] > -1).sum(1) - 1          # without the question, a digit
        rows = [outputs[question[question > -1][0] - ord("0")] for question in tokens]
        chosen = [(row + [0] * 99)[k] for row, k in zip(rows, own.tolist())]
        return 99.0 * torch.nn.functional.one_hot(torch.tensor(chosen), 400)[:, None]
    script.logits_after, script.logprobs = logits_after, lambda policy, tokens: (
        torch.zeros(len(tokens), 24), torch.ones(len(tokens), 24))
    tokens = script.sample(policy, [*"01234"])[:, script.W:].tolist()
    written = [["0" if token < -1 else script.TOKENIZER.decode([token]) for token in row
                if token != -1] for row in tokens]
    asked = [[-2 - token - ord("0") for token in row if token < -1] for row in tokens]
    assert asked == [[0, 0], [], [2, 2], [3, 3], [4]] and script.K == 4
    assert written[0] == ["c", "<|eos|>", "0", "d", "<|eos|>", "0", *written[0][6:]]


@pytest.mark.parametrize("respond, words", [
    (lambda q, text: {}[text], "KeyError("), (lambda *_: None, "NoneType found"),
    (lambda *_: 7, "int found"), (None, "TimeoutError()")])
def test_a_tool_that_fails_or_is_too_slow_costs_one_line_and_its_answer(respond, words, capsys):
    sampled = threading.Event()         # too late for a tool that has to answer at once
    patience = 600 if respond else 0
    script = agent(respond=respond or (lambda *_: sampled.wait()), PATIENCE=patience, T=12)
    tokens = script.sample(script.load(random_model()), QUESTIONS)
    sampled.set()
    [line] = [line for line in capsys.readouterr().out.splitlines() if "sampled" in line]
    assert words in line and "failed 0" not in line and (tokens >= script.PAD).all()
    assert script.METRICS["tools/failure_frequency"] == 1 and script.CALLS == []


def test_calls_that_end_at_the_same_time_run_side_by_side_and_keep_their_rows():
    """The last call ends first, and each of the others after the next one."""
    ended = [threading.Event() for _ in range(13)]
    ended[12].set()

    def respond(question, text):
        ended[int(question) + 1].wait()
        ended[int(question)].set()
        return question * 2
    script = agent(respond=respond, PATIENCE=600)
    script.load(random_model())
    rows = torch.full((12, 48), -1)
    rows[:, 24] = ord("a")
    script.answer_calls(rows, 24, [*map(str, range(12))], lambda token: "a")
    texts = script.TOKENIZER.batch_decode(script.ids(rows[:, 26:28]).clamp(min=0))
    assert [text[0] for text in texts[:10]] == [*"0123456789"]


def test_a_run_with_a_tool_that_reads_a_dict_learns_and_logs_its_calls(capsys):
    script = agent(RATE=1e-2, P=2, verify=lambda answer, text: float("e" in text))
    Path("data.jsonl").write_text("\n".join(
        json.dumps({"prompt": f"{i}+1=", "answer": i + 1}) for i in range(20)))
    script.main(random_model(), "data.jsonl", steps=2)
    lines = list(map(json.loads, Path("trained/metrics.jsonl").read_text().splitlines()))
    assert lines[1]["tools/call_frequency"] > 0.3 and lines[1]["tools/failure_frequency"] == 0
    assert lines[1]["completions/mean_length"] < 24 and "failed 0" in capsys.readouterr().out
    assert any(0 < line["reward"] < 1 for line in lines[1:])


CALLED = "<calc>17 * 13</calc>"


@pytest.mark.parametrize("turns, text, reward", [
    ([CALLED, "221"], CALLED, 0), ([CALLED, "221", "<|eos|>"], CALLED, 0),
    ([CALLED, "221", " so 221<|eos|>"], CALLED + " so 221", 1),
    ([CALLED, "5", " so 221"], CALLED + " so 221", 1),
    ([CALLED, "221", " so 5"], CALLED + " so 5", 0),
    (["221", "5"], "221", 1), (["221", "5", CALLED, "7"], "221" + CALLED, 0),
    ([CALLED + "<result>221</result>"], CALLED + "<result>221</result>", 1)])
def test_only_what_the_policy_itself_wrote_is_graded(turns, text, reward):
    """Every second text is the tool's. An answer that the policy makes up is its own."""
    script = agent()
    script.load(random_model())
    row = [script.PAD] * script.W
    for turn, words in enumerate(turns):
        row += [script.PAD - 1 - i if turn % 2 else i for i in script.TOKENIZER(words).input_ids]
    [found] = script.decode(torch.tensor([row]))
    assert (found, script.judge("221", found)) == (text, reward)


TURN = "{{ '<' + m['role'] + '>' + m['content'] + '<|eos|>' }}"
THOUGHTS = TURN.replace("m['content']", "m['content'].split('</think>')[-1]")
EARLIER = ("{% if loop.index0 < messages | length - 2 %}" + THOUGHTS
           + "{% else %}" + TURN + "{% endif %}")
LIKE_QWEN = ("{% if m['role'] == 'tool' %}<user>[{{ m['content'] }}]<|eos|>\n"
             "{% else %}" + TURN + "\n{% endif %}")
NO_TOOLS = "{% if m['role'] == 'tool' %}{{ raise_exception('roles') }}{% endif %}" + TURN
SILENT = "{% if m['role'] != 'tool' %}" + TURN + "{% endif %}"
OPEN = TURN.replace("<|eos|>", "\n")


@pytest.mark.parametrize("turn, start, given, call, frame, is_told", [
    (LIKE_QWEN, "<assistant>", {}, "<|eos|>", ("\n<user>[", "]<|eos|>\n<assistant>"), False),
    (TURN, "<assistant>", {}, "<|eos|>", ("<tool>", "<|eos|><assistant>"), False),
    (TURN, "<assistant><think>\n", {}, "<|eos|>",
     ("<tool>", "<|eos|><assistant><think>\n"), False),
    (TURN, "<assistant>", {"CALL": "</calc>"}, "</calc>",
     ("<|eos|><tool>", "<|eos|><assistant>"), False),
    (TURN, "<assistant>", {"FRAME": ("<tool>", "<|eos|>\n<assistant>")}, "<|eos|>",
     ("<tool>", "<|eos|>\n<assistant>"), True),
    (TURN, "<assistant>", {"FRAME": ("<tool>", "<|eos|><assistant>")}, "<|eos|>",
     ("<tool>", "<|eos|><assistant>"), False),
    (THOUGHTS, "<assistant>", {}, "<|eos|>", ("<tool>", "<|eos|><assistant>"), True),
    (EARLIER, "<assistant>", {}, "<|eos|>", ("<tool>", "<|eos|><assistant>"), True),
    (OPEN, "<assistant>", {}, "</calc>", ("\n<tool>", "\n<assistant>"), False),
    (NO_TOOLS, "<assistant>", {}, "</calc>", ("<result>", "</result>"), False),
    (SILENT, "<assistant>", {}, "</calc>", ("<result>", "</result>"), False),
    (None, "", {}, "</calc>", ("<result>", "</result>"), False)])
def test_an_answer_has_the_frame_of_the_chat_template(
        turn, start, given, call, frame, is_told, capsys):
    folder = random_model()
    if turn:
        (folder / "chat_template.jinja").write_text(
            "{% for m in messages %}" + turn + "{% endfor %}"
            "{% if add_generation_prompt %}" + start + "{% endif %}")
    script = agent(**{"CALL": None, "FRAME": None} | given)
    for _ in range(2):
        script.load(folder)
    assert (call, frame) == (script.CALL, script.FRAME)
    assert capsys.readouterr().out.count("\n") == is_told


@pytest.mark.parametrize("text, answer", [
    ("<calc>17 * 13</calc>", "221"), ("so <calc>3-4</calc><|im_end|>", "-1"),
    ("<calc>2 ** 9</calc></s>\n", "a call looks like <calc>3 + 4</calc>"),
    ("<calc>3 + 4</calc> is 7<|im_end|>", ""), ("7<|im_end|>", "")])
def test_the_calculator_answers_calls_whatever_ends_their_turn_and_nothing_else(text, answer):
    script = types.ModuleType("agent")
    script.__file__ = real.__file__
    exec(rungs.real_script(rungs.AGENT), vars(script))
    assert script.respond("", text) == answer


def test_a_turn_gets_its_discounted_return_compared_with_the_same_turn_in_its_group():
    """As examples/turns.py computes it, for rewards that depend on the text so far."""
    script = agent(more="turns")
    tokens = script.sample(script.load(random_model()), QUESTIONS)
    script.reward_turns = lambda answer, texts: [float(len(text) % 7) for text in texts]
    A, sums = script.turn_advantages(tokens, [None] * 24)
    own = (tokens[:, script.W:] > script.PAD).float()
    numbers = turns.turn_numbers(own)
    rewards, labels = torch.zeros(24, script.K), torch.full((24, script.K), -1)
    for row, number in enumerate(numbers):
        for k in range(number[-1] + 1):
            end = ((number == k) & (own[row] > 0)).nonzero().max()
            before = tokens[row:row + 1, :script.W + end + 1]
            text = script.decode(torch.nn.functional.pad(before, (0, 24), value=script.PAD))[0]
            rewards[row, k] = len(text) % 7
            labels[row, k] = 10 * (row // script.G) + k
    R = turns.returns(rewards, script.GAMMA)
    expected = turns.compared(R, labels, "group").gather(1, numbers.clamp(min=0))
    same(A * own, expected * own, atol=1e-5, rtol=0)
    same(sums, rewards.sum(1))
    assert (labels[:, -1] >= 0).sum() > 2 and A.std() > 0.3
    script.reward_turns = lambda answer, texts: [1.0] * 9
    with pytest.raises(SystemExit, match=r"reward_turns returned \[1.0.* for [1-4] turns"):
        script.turn_advantages(tokens, [None] * 24)


# ---- mistakes --------------------------------------------------------------------------------

OUTPUTS = "    outputs = tokens[:, -n:].clamp(min=PAD).flatten()"
MISTAKES = {
    "none": [],
    "the tool's tokens are in the loss": [
        (OUTPUTS, "    outputs = ids(tokens[:, -n:]).flatten()"),
        ("(tokens[:, W:] > PAD).float()\n", "(tokens[:, W:] != PAD).float()\n"),
        ("        tokens[:, W + t] = torch.where(said < PAD, said, token",
         "        logps[:, t] = pi.gather(1, torch.where(said < PAD, ids(said), token)).log()\n"
         "        tokens[:, W + t] = torch.where(said < PAD, said, token")],
    "the answer begins at position 0": [
        ("    positions = (is_token.cumsum(1) - 1).clamp(min=0)                       # (B, L)\n",
         "    positions = (is_token.cumsum(1) - 1).clamp(min=0)\n    if cache is None:\n"
         "        is_new = F.pad((tokens[:, 1:] < PAD) & (tokens[:, :-1] > PAD), (1, 0))\n"
         "        positions = positions - (positions * is_new).cummax(1).values\n")],
    "the output is retokenized": [
        ("    logps, mask = logprobs(policy, tokens[::8])", "    logps, mask = logprobs(policy, "
         "retokenized(tokens[::8]))")]}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_gap_shows_mistakes_but_not_that_the_tools_tokens_are_in_the_loss(mistake, family):
    """Of a trainer, in a random model; its tokenizer has learned some merges from a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([inspect.getsource(real)] * 9, trainers.BpeTrainer(
        vocab_size=318, special_tokens=["<|eos|>", "<|pad|>"], show_progress=False))
    folder = save_random(Path(family).absolute(), family, vocab_size=320)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eos|>",
                            pad_token="<|pad|>").save_pretrained(folder)

    def retokenized(tokens):
        texts = script.TOKENIZER.batch_decode(script.ids(tokens[:, script.W:]).clamp(min=0))
        rows = script.TOKENIZER(texts, padding="max_length", max_length=script.T, truncation=True,
                                padding_side="right", return_tensors="pt").input_ids
        return torch.cat([tokens[:, :script.W], rows], 1)
    script = agent(*MISTAKES[mistake], G=1, GAP=9e9, retokenized=retokenized)
    policy = script.load(folder)
    policy.generation_config.eos_token_id = [0]
    script.sample(policy, ["1 + 2 =", "what?"] * 40)
    gap = script.METRICS["sampling/sampling_logp_difference/mean"]
    assert gap < 1e-5 if mistake in [*MISTAKES][:2] else gap > real.GAP
