"""Test that nano.py and the rungs of the path compute the same numbers as the scripts from the same
inputs."""
import itertools
import math
import random
import re

import pytest
import torch
from torch.testing import assert_close as same

import grpo
import gspo
import nano
import ppo
from learn.path import rungs

PARTS = {"qkv": ["query", "key", "value"], "gate_up": ["gate", "up"], "embed": ["embed.weight"]}


def test_problems_and_verdicts():
    task = grpo.common.Arithmetic(grpo.verify)
    for seed, options in itertools.product(range(1_000), ([], [0.6], [1.0])):
        problem, rng = task.sample(random.Random(seed), 0.0, *options), random.Random(seed)
        _ = rng.random(), rng.randint(5, 5)                 # sample's first two draws
        _, _, belief = problem.work.rpartition("=")
        expected = (problem.prompt, int(problem.answer), problem.work, int(belief))
        assert nano.sample_problem(rng, task.is_held_out(problem), *options) == expected
    pieces = [*nano.VOCABULARY, *"777-- \n\0.\x85\uff17", "", "0" * 21, "<answer>7</answer>"]
    for answer in [7, -7] * 5_000:
        text = rng.choice(["{}", "<answer>{}</answer>"]).format("".join(rng.choices(pieces, k=3)))
        assert nano.verify(answer, text) == grpo.verify(grpo.common.Problem("", answer), text)


def test_the_texts_of_the_base_are_wrong_only_in_thoughts_and_ask_no_held_out_question(
        monkeypatch, watch, capsys):
    """And the rate rises and falls, and every hundredth batch is printed."""
    read, rates = watch(nano, "encode", lambda texts, L: texts), []
    monkeypatch.setattr(nano, "logprobs", lambda policy, tokens: (torch.zeros(1), torch.ones(1)))
    monkeypatch.setattr(nano, "descend", lambda *args: rates.append(args[-1]))
    nano.make_base(torch.nn.Linear(1, 1), random.Random(0), steps=101)
    assert rates == pytest.approx([4e-3 * min((i + 1) / 50, 1 - i / 101) for i in range(101)])
    assert re.findall("batch ([0-9]+) of 101", capsys.readouterr().out) == ["0", "100"]
    task = grpo.common.Arithmetic(grpo.verify)
    num_wrong, num_believed, num_thoughts = 0, 0, 0
    for text in itertools.chain(*read):
        question, work, answer = re.fullmatch(
            "(.*=)(?:<think>(.*)</think>)?<answer>([0-9]+)</answer>", text).groups()
        assert not task.is_held_out(grpo.common.Problem(question, answer))
        steps = [step.split("=") for step in work.split(";")] if work else []
        assert answer == steps[-1][1] if work else int(answer) == eval(question[:-1])
        believed = [int(result) != eval(fact) for fact, result in steps
                    if task.has_wrong_belief(fact)]
        num_thoughts += work is not None
        num_wrong += sum(believed)
        num_believed += len(believed)
    assert num_thoughts / 3_232 == pytest.approx(0.8 * 0.9 + 0.2 * 0.3, abs=0.03)
    assert num_wrong / num_believed == pytest.approx(0.6, abs=0.05)


def test_the_sizes_are_those_of_the_scripts_and_the_longest_thought_fits():
    cfg = grpo.Config()
    assert (cfg.num_prompts, cfg.num_generations, cfg.learning_rate) == (nano.P, nano.G, nano.RATE)
    assert (cfg.hidden_size, cfg.num_attention_heads) == (nano.D, nano.H)
    assert grpo.common.Arithmetic(grpo.verify).prompt_width == nano.W
    longest = "<think>11+9=20;20-9=11;11+9=20;20-9=11</think><answer>11</answer>"
    assert nano.encode([longest], 99).tolist()[0].index(nano.END) + 1 == nano.T


@pytest.fixture
def tiny(monkeypatch, capsys):
    """tiny(**arguments): runs main with few short outputs. -> what it prints"""
    for name, value in {"P": 2, "T": 6, "HELD_OUT": 4}.items():
        monkeypatch.setattr(nano, name, value)
    monkeypatch.setattr(nano, "verify", lambda answer, text: float(len(text) < 4))

    def run(**arguments):
        nano.main(**arguments)
        return capsys.readouterr().out
    return run


def test_a_step_trains_twice_on_whole_groups_at_a_falling_rate_and_the_seed_decides(tiny, watch):
    rates = watch(nano, "descend", lambda *args: args[-1])
    asked = watch(nano, "encode", lambda texts, L: texts)
    judged = watch(nano, "advantages", lambda rewards: rewards.shape)
    gaps = watch(nano, "surrogate_loss", lambda logps, old_logps, *_: (
        (logps - old_logps).abs().max().item()))
    starts = watch(nano, "make_base", lambda policy, rng, steps: (
        policy.embed.sum().item(), rng.random()))
    printed = tiny(seed=3, base_steps=2, steps=2)
    assert rates == [4e-3 / 50, 4e-3 / 25, *[nano.RATE] * 2, *[nano.RATE / 2] * 2]
    [trained, _] = [texts for texts in asked if len(texts) == nano.P * nano.G]
    assert [len({*trained[:nano.G]}), len({*trained[nano.G:]}), len({*trained})] == [1, 1, 2]
    assert judged == [(nano.P, nano.G)] * 2 and gaps[0] < 1e-5 < 1e-4 < gaps[1]
    torch.rand(3)
    assert tiny(seed=3, base_steps=2, steps=2) == printed != tiny(seed=4, base_steps=2, steps=2)
    assert starts[0] == starts[1] and not {*starts[0]} & {*starts[2]}
    assert re.findall("held-out questions, (.*?): ", printed) == ["before", "after"]


def test_it_descends_the_gradient_of_one_loss_cut_to_norm_1_at_the_given_rate():
    policy = torch.nn.Linear(4, 1, bias=False)
    before = policy.weight.detach().clone()
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    for scale, norm in ((0.1, 0.2), (0.1, 0.2), (9.0, 1.0)):
        nano.descend(policy, optimizer, scale * policy.weight.sum(), learning_rate=0.5)
        assert policy.weight.grad.norm().item() == pytest.approx(norm)
        before -= 0.5 if scale < 1 else 0.0
        assert scale > 1 or torch.allclose(policy.weight, before)


def test_training_and_evaluation_ask_different_questions_and_a_forced_think_follows_its_question(
        monkeypatch, capsys):
    """The policy answers 7, and 8 if it is forced to think."""
    asked = []

    def sample(policy, prompts, greedy=False):
        texts = ["".join(nano.VOCABULARY[token] for token in row) for row in prompts.tolist()]
        asked.append([greedy, [text.replace("<end>", "") for text in texts]])
        output = f"<answer>{7 + texts[0].endswith('<think>')}</answer>"
        return torch.cat([prompts, nano.encode([output], nano.T).expand(len(prompts), -1)], 1)
    monkeypatch.setattr(nano, "sample", sample)
    nano.main(base_steps=0, steps=1)
    (plain, questions), (forced, openings), (trained, others), *again = asked
    assert (plain, forced, trained) == (True, True, False) and again == asked[:2]
    assert len(questions) == nano.HELD_OUT and openings == [one + "<think>" for one in questions]
    task = grpo.common.Arithmetic(grpo.verify)
    is_held_out = [{task.is_held_out(grpo.common.Problem(question, "")) for question in some}
                   for some in (questions, others)]
    assert is_held_out == [{True}, {False}] and len(others) == nano.P * nano.G
    seven, eight = (sum(eval(one[:-1]) == x for one in questions) / nano.HELD_OUT for x in (7, 8))
    said = capsys.readouterr().out
    assert said.count(f": {seven:.3f} right, {eight:.3f} after a forced <think>, ") == 1
    assert seven != eight and min(seven, eight) > 0


def test_outputs_log_probabilities_advantages_loss_and_gradient(double):
    torch.manual_seed(0)
    cfg = grpo.Config(device="cpu", max_completion_length=nano.T)
    model, policy = grpo.GPT(cfg), nano.GPT()
    for name, weight in policy.named_parameters():
        part = name.split(".")[-2:][0]                      # qkv for blocks.0.qkv.weight
        names = [name.replace(part, one) for one in PARTS.get(part, [part])]
        weight.parts = [torch.nn.init.normal_(model.get_parameter(one), std=0.3) for one in names]
        weight.data = torch.cat(weight.parts).detach()
    prompts = torch.randint(320, (64, nano.W))
    outputs, mask, *_ = grpo.rollout(model, prompts, None, cfg)       # greedy
    same(nano.sample(policy, prompts, True)[:, nano.W:] * mask, outputs * mask)
    outputs = torch.randint(30, (64, nano.T))                           # END is one of these 30
    logps, mask = nano.logprobs(policy, torch.cat([prompts, outputs], 1))
    same(logps, grpo.score(model, prompts, outputs)[0])
    A = nano.advantages(torch.ones(8, 8).tril()).view(-1, 1)            # 1 to 8 of 8 are right
    same(A, grpo.advantages(torch.ones(8, 8).tril()).view(-1, 1))
    old_logps = (logps + torch.randn_like(logps) * 0.3).detach()        # a fifth is clipped
    loss = nano.surrogate_loss(logps, old_logps, A, mask)
    loss.backward()
    batch = grpo.common.Batch(outputs, mask, old_logps, 0, mask.sum(1).long(), 0, prompts=prompts)
    same(loss.item(), grpo.backward(model, batch, None, A, torch.arange(64), cfg)["loss"])
    for weight in policy.parameters():
        same(weight.grad, torch.cat([part.grad for part in weight.parts]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ratio_beyond_e_80_has_no_gradient_and_below_only_where_it_is_clipped(dtype):
    for log_ratio, A in itertools.product((20, 30, 79, 81, 89, 1_000), (2, 0, -2)):
        logps = torch.full((1, 1), log_ratio, dtype=dtype, requires_grad=True)
        loss = nano.surrogate_loss(logps, torch.zeros(1), torch.tensor([[A]]), torch.ones(1, 1))
        loss.backward()
        ratio = math.exp(min(log_ratio, 80))
        assert loss.item() == pytest.approx(2 * ratio if A < 0 else -1.28 * A)
        assert logps.grad.item() == pytest.approx(2 * ratio if A < 0 and log_ratio < 80 else 0)


@pytest.mark.parametrize("name, script, loss_type, how", [
    ("mean", grpo, "grpo", "sequence_mean"), ("drgrpo", grpo, "dr_grpo", "constant"),
    ("also", grpo, "dapo", "token_mean"), ("cispo", grpo, "cispo", "sequence_mean"),
    ("gspo", gspo, "grpo", "sequence_mean"), ("kl", grpo, "grpo", "sequence_mean")])
def test_a_rung_of_the_path_has_the_gradient_of_its_script(
        name, script, loss_type, how, double, import_text):
    source = rungs.sides("drgrpo")["also"] if name == "also" else rungs.script(name)
    rung = import_text(source)
    torch.manual_seed(0)
    logps = torch.randn(64, rung.T).requires_grad_()
    old_logps, ref_logps = logps.detach() + torch.randn(2, 64, rung.T) * 0.2
    mask = (torch.arange(rung.T) < torch.randint(1, rung.T, (64, 1))).double()
    A = torch.randn(64, 1)
    low, high = (0.03, 0.04) if name == "gspo" else (0.2, 0.28)
    expected = script.policy_loss(logps, old_logps, A, mask, loss_type, low, high)
    others = [ref_logps] if name == "kl" else []
    if name == "kl":
        expected = expected + 0.2 * script.kl(logps, ref_logps)
    expected = script.aggregate(expected, mask, how, max_length=rung.T)
    loss = rung.surrogate_loss(logps, old_logps, *others, A, mask)
    same(*(torch.autograd.grad(x, logps)[0] for x in (loss, expected)))


def test_the_gae_of_the_path_is_that_of_ppo(double, import_text):
    rung = import_text(rungs.script("gae").replace("P = 256 ", "P = 5 "))
    rewards, V = torch.randn(2, 5, rung.T)
    same(rung.gae(rewards, V, 0.9, 0.8), ppo.gae(rewards, V, torch.ones_like(V), 0.9, 0.8)[0])
