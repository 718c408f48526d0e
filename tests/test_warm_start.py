"""The warm start: which tokens of the demonstrations it learns, and in what order it reads them."""
import pytest
import torch
from conftest import every_script

import common


@every_script
def test_it_learns_every_token_of_a_completion_its_eos_included_and_no_padding(
        script, config, load_task):
    """The gradient that the first batch leaves behind is that of the mean over these tokens."""
    cfg = config(base_steps=1, base_batch_size=7, base_learning_rate=0.0)
    task = load_task(cfg)
    model = script.GPT(cfg).double()
    script.warm_start(model, task, cfg, common.silent)
    found = [weight.grad.clone() for weight in model.parameters()]

    model.zero_grad()
    total = 0.0
    num_tokens = 0
    for problem, text in common.sample_demonstrations(task, 7, (0, 0), "textbook"):
        ids = [*script.TOKENIZER.encode(text, allowed_special="all"), script.EOS]
        prompt = script.encode_prompts([problem.prompt], task, "cpu")
        sequence = torch.cat([prompt, torch.tensor([ids])], dim=1)
        logits = model(sequence)[0, prompt.shape[1] - 1:-1]
        total = total - logits.log_softmax(dim=-1)[range(len(ids)), ids].sum()
        num_tokens += len(ids)
    (total / num_tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    expected = [weight.grad for weight in model.parameters()]
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@every_script
def test_it_reads_six_tenths_of_a_textbook_then_a_forum_and_nothing_twice(
        script, config, load_task, monkeypatch):
    sample_demonstrations = common.sample_demonstrations
    reads = []
    shown = []

    def remember(task, n, seed, phase):
        reads.append((seed, phase))
        return sample_demonstrations(task, n, seed, phase)

    def progress(label, steps):
        shown.append((label, steps))
        return steps
    monkeypatch.setattr(common, "sample_demonstrations", remember)
    cfg = config(base_steps=10, base_batch_size=2)
    script.warm_start(script.GPT(cfg), load_task(cfg), cfg, progress)
    assert shown == [("warm start", range(10))]
    assert [phase for _, phase in reads] == ["textbook"] * 6 + ["forum"] * 4
    assert len(set(reads)) == 10


@pytest.fixture
def token_gradients(script, monkeypatch):
    """A list that will hold tokens and the gradient of their log-probs, (b, T) each, of every
    micro-batch. Neither is there before the backward pass."""
    logprobs = script.logprobs
    kept = []

    def keep(logits, tokens, *options):
        logps, entropy = logprobs(logits, tokens, *options)
        logps.retain_grad()
        kept.append((tokens, logps))
        return logps, entropy
    monkeypatch.setattr(script, "logprobs", keep)
    return kept


@every_script
def test_it_does_not_learn_what_a_tool_says_but_what_is_said_around_it(
        script, config, load_task, token_gradients):
    cfg = config(task="lookup", operands="5", base_steps=1, base_batch_size=16, textbook_share=1.0)
    script.warm_start(script.GPT(cfg), load_task(cfg), cfg, common.silent)
    inserted = []
    others = []
    for tokens, logps in token_gradients:
        for row in range(len(tokens)):
            is_inserted = False
            for token, gradient in zip(tokens[row].tolist(), logps.grad[row].tolist()):
                text = script.decode([token])
                if text == "<information>":
                    is_inserted = True
                if is_inserted:
                    inserted.append(gradient)
                elif text != "<|pad|>":
                    others.append(gradient)
                if text == "</information>":
                    is_inserted = False
    assert len(inserted) > 30
    assert not any(inserted)
    assert len(others) > 100
    assert all(others)
