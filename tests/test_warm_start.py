"""The warm start: which tokens of the demonstrations it learns, and in what order it reads them."""
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import every_script
from update_scenes import weights

import common


@every_script
def test_it_learns_every_token_of_a_completion_its_eos_included_and_no_padding(
        script, config, load_task, monkeypatch):
    """The gradient of the first batch, of short and long examples, is that of the mean over these
    tokens, before it is clipped."""
    limits = []
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda weights, limit: limits.append(limit))
    cfg = config(base_steps=1, base_batch_size=7, base_learning_rate=0.0, textbook_share=0.0)
    task = load_task(cfg)
    model = script.GPT(cfg).double()
    script.warm_start(model, task, cfg, common.silent)
    found = [weight.grad.clone() for weight in model.parameters()]
    assert limits == [1.0]

    model.zero_grad()
    total = 0.0
    num_tokens = 0
    lengths = []
    for problem, text in common.sample_demonstrations(task, 7, (0, 0), "forum"):
        ids = [*script.TOKENIZER.encode(text, allowed_special="all"), script.EOS]
        prompt = script.encode_prompts([problem.prompt], task, "cpu")
        sequence = torch.cat([prompt, torch.tensor([ids])], dim=1)
        logits = model(sequence)[0, prompt.shape[1] - 1:-1]
        total = total - logits.log_softmax(dim=-1)[range(len(ids)), ids].sum()
        num_tokens += len(ids)
        lengths.append(len(ids))
    assert max(lengths) > 3 * min(lengths)          # so that length makes parts, too
    (total / num_tokens).backward()
    expected = [weight.grad for weight in model.parameters()]
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@every_script
@pytest.mark.parametrize("device, num_threads", [("cpu", 2), ("cpu:0", 1)])
def test_halves_of_a_batch_are_in_two_threads_only_on_a_cpu(
        script, config, load_task, monkeypatch, device, num_threads):
    """cpu:0 stands for another device. torch crashes if two threads use MPS."""
    executor = script.ThreadPoolExecutor
    asked = []

    def remember(num_threads):
        asked.append(num_threads)
        return executor(num_threads)
    monkeypatch.setattr(script, "ThreadPoolExecutor", remember)
    cfg = config(base_steps=1, base_batch_size=2, device=device)
    script.warm_start(script.GPT(cfg), load_task(cfg), cfg, common.silent)
    assert asked == [num_threads]


@pytest.fixture
def reads(monkeypatch):
    """A list that will hold (seed, phase) of each batch of demonstrations."""
    sample_demonstrations = common.sample_demonstrations
    found = []

    def remember(task, n, seed, phase):
        found.append((seed, phase))
        return sample_demonstrations(task, n, seed, phase)
    monkeypatch.setattr(common, "sample_demonstrations", remember)
    return found


@every_script
def test_it_reads_six_tenths_of_a_textbook_then_a_forum_and_nothing_twice(
        script, config, load_task, reads):
    shown = []

    def progress(label, steps):
        shown.append((label, steps))
        return steps
    cfg = config(base_steps=10, base_batch_size=2)
    script.warm_start(script.GPT(cfg), load_task(cfg), cfg, progress)
    assert shown == [("warm start", range(10))]
    assert [phase for _, phase in reads] == ["textbook"] * 6 + ["forum"] * 4
    assert len(set(reads)) == 10


@every_script
def test_its_rates_rise_in_50_batches_and_fall_to_nothing_and_those_of_matrices_are_5_times_as_high(
        script, config, load_task, monkeypatch):
    muon_rates = []
    adamw_rates = []
    monkeypatch.setattr(common.Muon, "step", lambda self, rate: muon_rates.append(rate))
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: adamw_rates.append(
        self.param_groups[0]["lr"]))
    cfg = config(base_steps=80, base_batch_size=2, base_learning_rate=0.01)
    script.warm_start(script.GPT(cfg), load_task(cfg), cfg, common.silent)
    expected = [0.01 * min((step + 1) / 50, (80 - step) / 80) for step in range(80)]
    assert adamw_rates == pytest.approx(expected)
    assert muon_rates == pytest.approx([5 * rate for rate in expected])


# ---- its optimizer ---------------------------------------------------------------------------

def random_matrices(*shapes):
    """A parameter of each shape, in float64, with a gradient."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for shape in shapes:
        weight = torch.nn.Parameter(torch.randn(shape, generator=generator).double())
        weight.grad = torch.randn(shape, generator=generator).double()
        found.append(weight)
    return found


def test_the_optimizer_takes_the_steps_of_torchs_muon():
    """Which rounds to bfloat16, so that they agree to two digits."""
    shapes = ((6, 6), (4, 9), (9, 4), (6, 6), (12, 3), (1, 5))
    ours = random_matrices(*shapes)
    theirs = random_matrices(*shapes)
    common_muon = common.Muon(ours)
    torch_muon = torch.optim.Muon(theirs, lr=0.3, weight_decay=0.0)
    for step in range(3):
        before = [weight.detach().clone() for weight in ours]
        for weight, other in zip(ours, theirs):
            weight.grad = weight.grad.roll(1, dims=0) * (step + 1)
            other.grad = weight.grad.clone()
        common_muon.step(0.3)
        torch_muon.step()
        for weight, other, old in zip(ours, theirs, before):
            moved = (weight - old).norm()
            assert moved > 0.1
            assert (weight - other).norm() < 0.05 * (step + 1) * moved


def test_the_optimizer_changes_all_directions_of_a_matrix_by_about_as_much():
    tall, flat = random_matrices((12, 3), (3, 12))
    before = [tall.detach().clone(), flat.detach().clone()]
    common.Muon([tall, flat]).step(0.1)
    for weight, old, scale in ((tall, before[0], 2.0), (flat, before[1], 1.0)):
        sizes = torch.linalg.svdvals(old - weight.detach()) / (0.1 * scale)
        assert 0.68 < sizes.min() < sizes.max() < 1.21


def test_a_matrix_without_gradient_stays_and_does_not_become_nan():
    still, moving = random_matrices((4, 4), (4, 4))
    still.grad.zero_()
    before = still.detach().clone()
    common.Muon([still, moving]).step(0.1)
    assert torch.equal(still, before)
    assert moving.isfinite().all()


# ---- a cold start ----------------------------------------------------------------------------

@every_script
def test_a_cold_start_makes_so_many_batches_of_its_own_kind_whatever_the_base_was_made_of(
        script, config, load_task, reads):
    ends = []
    for base_steps, textbook_share in ((10, 0.6), (40, 0.0), (0, 1.0)):
        cfg = config(cold_start=3, base_steps=base_steps, textbook_share=textbook_share,
                     base_batch_size=2)
        model = script.GPT(cfg)
        script.warm_start(model, load_task(cfg), cfg, common.silent)
        ends.append(weights(model))
    assert reads == [((0, step), "cold_start") for step in range(3)] * 3
    assert torch.equal(ends[1], ends[0])
    assert torch.equal(ends[2], ends[0])
    assert not torch.equal(weights(script.GPT(cfg)), ends[0])


@every_script
@pytest.mark.parametrize("name", ["arithmetic", "lookup", "countdown"])
def test_the_examples_of_a_cold_start_are_not_those_of_the_base_and_all_think(
        script, config, load_task, name):
    cfg = config(task=name, operands="5", base_batch_size=32, max_completion_length=64)
    task = load_task(cfg)
    think = script.TOKENIZER.encode_single_token("<think>")
    prompts = {}
    for phase in ("textbook", "forum", "cold_start"):
        prompts[phase] = set()
        for step in range(5):
            batch_prompts, tokens, _, _ = script.demonstration_batch(task, cfg, step, phase)
            prompts[phase] |= {str(row) for row in batch_prompts.tolist()}
            assert phase != "cold_start" or (tokens[:, 0] == think).all()
    num_new = len(prompts["cold_start"] - prompts["textbook"] - prompts["forum"])
    assert num_new > 0.7 * len(prompts["cold_start"])           # there are not so many questions


# ---- what an environment inserts -------------------------------------------------------------

@pytest.fixture
def token_gradients(script, monkeypatch):
    """A list of tokens and of the gradient of their losses, (b, T) each, of every micro-batch,
    once its gradients are computed."""
    cross_entropy = script.F.cross_entropy
    kept = []

    def keep(logits, tokens, **options):
        losses = cross_entropy(logits, tokens, **options)
        losses.register_hook(lambda gradients: kept.append((tokens, gradients)))
        return losses
    monkeypatch.setattr(script.F, "cross_entropy", keep)
    return kept


def inserted_by_a_tool(text):
    """Which characters of a completion of lookup the tool said. -> list of bool"""
    spans = [found.span() for found in re.finditer("<information>.*?</information>", text)]
    return [any(start <= i < end for start, end in spans) for i in range(len(text))]


def inserted_by_a_world(text):
    """Which characters of a walk in a slippery gridworld say where a move led. -> list of bool"""
    return [character in "abcde1234" for character in text]


with_environments = pytest.mark.parametrize("flags, inserted", [
    ({"task": "lookup", "operands": "5"}, inserted_by_a_tool),
    ({"task": "gridworld", "operands": "5", "slip": 0.3}, inserted_by_a_world)],
    ids=["lookup", "gridworld"])


def token_mask(script, text, is_inserted):
    """1.0 for each token of a text, EOS included, of which no character was inserted. -> list"""
    mask = []
    start = 0
    for i in script.TOKENIZER.encode(text, allowed_special="all"):
        end = start + len(script.decode([i]))
        mask.append(float(not any(is_inserted[start:end])))
        start = end
    return mask + [1.0]


@every_script
@with_environments
def test_it_does_not_learn_what_an_environment_says_but_what_is_said_around_it(
        script, config, load_task, token_gradients, flags, inserted):
    cfg = config(base_steps=1, base_batch_size=16, textbook_share=1.0, **flags)
    script.warm_start(script.GPT(cfg), load_task(cfg), cfg, common.silent)
    num_inserted = 0
    num_others = 0
    for tokens, of_losses in token_gradients:
        for ids, gradients in zip(tokens.tolist(), of_losses.tolist()):
            text = script.decode([i for i in ids if i not in (script.PAD, script.EOS)])
            mask = token_mask(script, text, inserted(text))
            has_gradient = [float(gradient != 0) for gradient in gradients]
            assert has_gradient == mask + [0.0] * (len(ids) - len(mask))
            num_inserted += mask.count(0.0)
            num_others += mask.count(1.0)
    assert num_inserted > 30
    assert num_others > 60


@every_script
@pytest.mark.parametrize("name", ["arithmetic", "countdown", "gridworld"])
def test_where_no_environment_says_anything_every_token_is_learned(
        script, config, load_task, name):
    cfg = config(task=name, operands="5", base_batch_size=16)
    _, tokens, mask, lengths = script.demonstration_batch(load_task(cfg), cfg, 0, "textbook")
    slots = torch.arange(tokens.shape[1])
    assert torch.equal(mask, (slots < lengths[:, None]).float())


# Completions of lookup that no example has, and what of them a policy writes.
UNOPENED = "<information>unopened</information>"
STRANGE = {
    "a name that is not there": ("<search>ka</search><information>unknown</information>",
                                 "<search>ka</search>"),
    "a call that </think> ends": ("<search>ka</think><information>unclosed</information><answer>",
                                  "<search>ka</think><answer>"),
    "two in a row": (f"ka</search>{UNOPENED}</search>{UNOPENED}ka", "ka</search></search>ka"),
    "cut at the limit": ("<search>ka</search><information>unk", "<search>ka</search>"),
    "made up": ("<information>ka</information></think>", "<information>ka</information></think>")}


@every_script
@pytest.mark.parametrize("name", STRANGE)
def test_the_mask_goes_by_what_the_environment_answers_not_by_how_it_looks(
        script, config, load_task, name):
    text, sampled = STRANGE[name]
    cfg = config(task="lookup", operands="5")
    problem = common.Problem("boss of xy?", "mi", secret=(("xy", "mi"),))
    ids = script.TOKENIZER.encode(text, allowed_special="all")
    mask = script.sampled_mask(load_task(cfg), problem, ids)
    assert len(mask) == len(ids)
    written = script.decode([i for i, is_sampled in zip(ids, mask) if is_sampled])
    assert written == sampled


class Reciter:
    """A policy that says the tokens of one completion, whatever was inserted."""

    def __init__(self, ids, vocabulary):
        self.ids = iter(ids)
        self.embed = SimpleNamespace(weight=torch.eye(vocabulary))

    def hidden(self, tokens, cache=None):
        return self.embed.weight[next(self.ids)].expand(*tokens.shape, -1)


@every_script
@with_environments
def test_an_example_has_the_mask_that_it_would_have_as_a_completion(
        script, config, load_task, flags, inserted):
    cfg = config(max_completion_length=64, base_batch_size=16, **flags)
    task = load_task(cfg)
    prompts, tokens, mask, lengths = script.demonstration_batch(task, cfg, 0, "textbook")
    examples = common.sample_demonstrations(task, 16, (0, 0), "textbook")
    for row, (problem, _) in enumerate(examples):
        n = lengths[row].item()
        ids = tokens[row, :n].tolist()
        reciter = Reciter(ids, script.VOCAB_SIZE)
        out = script.rollout(reciter, prompts[[row]], [problem], task, cfg)
        assert out.lengths.tolist() == [n]
        assert out.tokens[0, :n].tolist() == ids
        assert torch.equal(out.mask[0, :n], mask[row, :n])
    assert (mask.sum(dim=1) < lengths).any()
