"""What each experiment of the lab measures, held against a closed form or an enumeration."""
import dataclasses
import itertools
import math
import random
import re
from types import SimpleNamespace

import numpy
import pytest
import torch
from conftest import ROOT, TINY, f64, scripts
from small_runs import INSTANT, arguments

import common
import grpo
import ppo
import reinforce
from lab import training
from lab.claims import (
    bugs,
    credit,
    hacking,
    kl,
    masking,
    methods,
    offline,
    r1,
    seeds,
    sharpen,
    signal,
    staleness,
    trust,
    variance,
    wrongrewards,
    zero,
)
from tasks import gridworld, preferences

with_ppo = scripts("ppo")


def problem_of(prompt, answer="", work="", difficulty=0, task="arithmetic"):
    return common.Problem(prompt, answer, work, difficulty, task=task)


# ---- baselines -------------------------------------------------------------------------------

@pytest.mark.parametrize("baseline, size", [("rloo", 4), ("rloo", 32), ("optimal", 4)])
def test_variance_of_a_group_is_that_of_drawn_groups(baseline, size, monkeypatch):
    """The baseline is from the group itself, or from all. Groups of 4 of 32 outputs vary by a
    factor 28/32 less than those of any number of outputs."""
    monkeypatch.setattr(variance, "DEALS", 100)
    generator = torch.Generator().manual_seed(1)
    gradients = torch.randn(32, 2, generator=generator).double() + f64([1, 0])
    gradients *= torch.arange(32)[:, None] / 16             # of all lengths
    norms = gradients.square().sum(dim=1)
    rewards = (torch.arange(32) % 3 == 0).double()
    rows = torch.rand(5000, 32, generator=generator).argsort(dim=1)
    some = rows[:, :size]
    A = reinforce.advantages(rewards[some], baseline, norms[some])[:, :4, None]
    estimates = (A * gradients[rows[:, :4]]).mean(dim=1)
    expected = estimates.var(dim=0).sum().item() * 32 / 28
    found = variance.group_variance(gradients @ gradients.T, rewards, baseline, size, group=4)
    assert found == pytest.approx(expected, rel=0.08)


# ---- values and credit -----------------------------------------------------------------------

@pytest.fixture
def walks():
    """Config, task and a batch of credit.py."""
    cfg = ppo.Config(task="gridworld", device="cpu", hidden_size=16, num_attention_heads=2,
                     num_hidden_layers=1, intermediate_size=16, num_prompts=4)
    task = common.load_task(cfg, ppo.verify)
    return cfg, task, credit.make_batch(task, cfg, 0)


def test_credit_walks_earn_what_the_task_says_and_on_average_the_exact_value(walks):
    _, _, batch = walks
    for row, steps in enumerate(batch.steps):
        moves = "".join(move for _, move, _ in steps)
        episode = gridworld.play(problem_of(batch.texts[row]), moves)
        assert [reward for _, _, reward in steps] == episode.rewards and episode.is_over
        assert ppo.decode(batch.tokens[row, :len(moves)].tolist()) == moves
    rng = random.Random(0)
    returns = f64([sum(reward for _, _, reward in credit.walk("C c2 5", 0, "c2", rng))
                   for _ in range(2000)])
    V, _ = gridworld.values("C c2 5", 0.0, credit.half_skilled("C c2 5"))
    assert (returns.mean() - V[0]["c2"]).abs() < 4 * returns.std() / 2000 ** 0.5


def test_credit_of_exact_values_is_exact_and_a_critic_learns_them(walks, monkeypatch):
    cfg, task, batch = walks
    exact = credit.step_advantages(batch.token_rewards, batch.V, batch.mask)
    for row, steps in enumerate(batch.steps):
        V, Q = gridworld.values(batch.texts[row], 0.0, credit.half_skilled(batch.texts[row]))
        gains = [Q[t][cell][move] - V[t][cell] for t, (cell, move, _) in enumerate(steps)]
        assert exact[row, :len(steps)].tolist() == pytest.approx(gains, abs=1e-5)
    assert credit.value_error(batch.V, batch) == 0
    found = credit.correlations(batch, batch.token_rewards, {"exact": batch.V}, exact, "whole")
    assert found["exact"] == pytest.approx(1) and abs(found["whole"]) < 0.9
    monkeypatch.setattr(credit, "BATCHES", 10)
    task.token_rewards = lambda batch: batch.token_rewards
    cfg = dataclasses.replace(cfg, num_prompts=32, critic_learning_rate=0.02, cliprange_value=10.0)
    _, batches = credit.train_critic(
        ppo.GPT(cfg), task, cfg, lambda step: credit.make_batch(task, cfg, step))
    errors = [credit.value_error(one.values, one) for one in batches]
    assert (batches[0].values == 0).all()
    assert len(errors) == 10 and max(errors[-2:]) < 0.8 * errors[0], errors


@with_ppo
def test_credit_values_of_tokens_are_those_of_the_rest_of_a_completion(talker, monkeypatch):
    """Before the last slot, the value is the sum over what can stand there. The verifier likes
    completions with a character under 64."""
    cfg = common.parse_flags(ppo.Config, [
        "--device", "cpu", "--num_prompts", "2", "--num_generations", "2", "--hidden_size", "16",
        "--max_completion_length", "4"])
    task = common.load_task(cfg, lambda problem, text: float(any(ord(c) < 64 for c in text)))
    task.machinery = ppo
    policy = talker(cfg)
    batch = ppo.sample_batch(policy, task, cfg, 0)
    monkeypatch.setattr(credit, "NUM_REFERENCE", 200)
    reference, estimates = credit.prefix_values(policy, task, cfg, batch)
    last = cfg.max_completion_length - 1
    rows = [row for row in range(4) if batch.lengths[row] > last]
    assert rows, "no completion is so long"
    for row in rows:
        ids = batch.tokens[row, :last]
        logits = policy(torch.cat([batch.prompts[row], ids])[None])[0, -1]
        value = 0.0
        for token, chance in enumerate(logits.softmax(dim=-1).tolist()):
            text = ppo.decode([i for i in [*ids.tolist(), token] if i != ppo.EOS])
            value += chance * task.verify(None, text)
        assert reference[row, last].item() == pytest.approx(value, abs=0.12)
    for values in (reference, *estimates.values()):
        assert (values[batch.mask == 0] == 0).all()
    assert set(estimates[credit.ONE].unique().tolist()) <= {0.0, 1.0}


# ---- signal, weights of prompts, lengths -----------------------------------------------------

def test_signal_counts_groups_that_dynamic_sampling_leaves_out(monkeypatch):
    flags = {name: INSTANT[name] for name in INSTANT if name != "max_steps"}
    words = arguments(flags | {"dynamic_sampling": 2})
    untrained = common.parse_flags(grpo.Config, words)              # always wrong
    task = common.load_task(untrained, grpo.verify)
    monkeypatch.setattr(signal, "load_base", lambda *_: (untrained, task, grpo.GPT(untrained)))
    found = signal.learning(0, "plain", budget=25)
    assert found["samples"] == [12, 24, 36]                         # three times 2 groups of 2
    assert found["all wrong"] == [1, 1, 1] and found["all right"] == [0, 0, 0]
    assert found["pass@1"] == [None, None, 0]


def test_trust_looks_at_rare_tokens_that_are_pushed_up_before_and_after(config, monkeypatch):
    """The first row and the third are pushed up; one of their tokens is frequent, one is none."""
    before = f64([[0.05, 0.05], [0.05, 0.05], [0.5, 0.05], [0.05, 0.05]]).log()
    batch = SimpleNamespace(prompts=None, tokens=None, logps=before, rewards=f64([[1, 0], [1, 0]]),
                            mask=f64([[1, 0], [1, 0], [1, 1], [1, 1]]))
    monkeypatch.setattr(trust, "load_base", lambda *_: (config(), None, None))
    monkeypatch.setattr(trust, "training", lambda *_: iter([(batch, {})] * 99))
    monkeypatch.setattr(grpo, "score", lambda *_: (before + math.log(3), None))
    found = trust.rare(0, "epsilon_high 0.2")
    assert found["tokens"] == 2 * trust.UPDATES
    assert found["above 1.2"] == found["above 2"] == 1
    assert found["largest"] == pytest.approx(3)


def test_signal_compares_in_equal_samples_and_in_equal_steps(monkeypatch):
    nan = float("nan")
    one = {"samples": numpy.array([[2, 4, 8, nan]]), "pass@1": numpy.array([[0.1, nan, 0.7, nan]])}
    other = {"pass@1": numpy.array([[0.2, nan, 0.4, 0.5]])}
    monkeypatch.setattr(signal, "BUDGET", 5)
    assert signal.after_budget(one) == pytest.approx([0.4])
    assert signal.at_equal_steps(one, other) == pytest.approx([0.3])


@pytest.mark.parametrize("scale", signal.SCALES.values())
@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
def test_weight_times_the_gradient_of_p_is_the_mean_gradient_over_all_outcomes(scale, p):
    gradient = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=4):
        rewards = f64([outcome])
        chance = p ** sum(outcome) * (1 - p) ** (4 - sum(outcome))
        A = grpo.advantages(rewards, scale)
        slope = torch.where(rewards == 1, 1 / p, -1 / (1 - p))      # of the log-probability in p
        gradient += chance * (A * slope).mean().item()
    assert signal.weight(f64([p]), 4, scale).item() == pytest.approx(gradient)


# ---- clips, passes, lag, trust regions -------------------------------------------------------

def test_staleness_engines_round_and_what_they_sample_is_off_policy(config, monkeypatch):
    """Nothing is clipped in the first step if the engine is exact, or its weight corrects it."""
    policy = grpo.GPT(config())
    step = policy.embed.weight.abs().amax(dim=1, keepdim=True) / 7
    levels = staleness.engine(policy, 4).embed.weight / step
    torch.testing.assert_close(levels, levels.round())
    assert ((levels * step - policy.embed.weight).abs() <= 0.501 * step).all()
    monkeypatch.setattr(staleness, "UPDATES", 1)
    shares = {}
    for name in ("GSPO, exact", "GSPO, 4 bits", "GRPO, 4 bits", "GRPO, 4 bits, recomputed",
                 "GRPO, 4 bits, truncate"):
        script = staleness.lag.METHODS[name[:4].lower()]
        narrow = {"epsilon": 3e-4, "epsilon_high": 4e-4} if name.startswith("GSPO") else {}
        cfg = script.Config(**TINY, **narrow, num_eval_problems=4)
        task = common.load_task(cfg, lambda problem, text: float(len(text) % 2))
        made = (cfg, task, script.GPT(cfg))
        monkeypatch.setattr(staleness, "load_base", lambda *_, made=made: made)
        [shares[name]] = staleness.engines(0, name)["clipped"]
    assert shares["GSPO, exact"] == 0 < 0.1 < shares["GSPO, 4 bits"]
    assert shares["GRPO, 4 bits, recomputed"] == shares["GRPO, 4 bits, truncate"] == 0


# ---- KL --------------------------------------------------------------------------------------

def test_kl_moments_are_those_of_a_coin_worked_out_by_hand():
    """A coin (1/2, 1/2) against (9/10, 1/10)."""
    found = kl.moments(f64([[0.5, 0.5]]).log(), f64([[0.9, 0.1]]).log())
    heads, tails = math.log(5 / 9), math.log(5)
    expected = {"k1": (heads, tails), "k2": (heads ** 2 / 2, tails ** 2 / 2),
                "k3": (9 / 5 - 1 + heads, 1 / 5 - 1 + tails)}
    for name, (one, other) in expected.items():
        assert found[f"mean of {name}"] == pytest.approx((one + other) / 2)
        assert found[f"deviation of {name}"] == pytest.approx(abs(one - other) / 2)


def test_kl_looks_at_the_vocabulary_of_the_tokens_that_were_sampled(config, load_task):
    cfg = config()
    policy = grpo.GPT(cfg)
    batch = grpo.sample_batch(policy, load_task(cfg), cfg, 0)
    is_token = batch.mask > 0
    sampled = kl.log_probs(policy, batch).gather(-1, batch.tokens[is_token][:, None])[:, 0]
    torch.testing.assert_close(sampled.float(), batch.logps[is_token])


def test_kl_outputs_are_all_that_can_be_said_and_gradients_are_equal_where_the_math_says():
    assert len({tuple(row) for row in kl.TOKENS.tolist()}) == 31
    table = torch.randn(3, 3, generator=torch.Generator().manual_seed(3)).double()
    assert kl.output_logps(table).sum(dim=1).exp().sum().item() == pytest.approx(1)
    found = kl.cosines(0, "policies", draws=5)
    assert max(found["norm of k1"]) < 1e-12
    for pair in kl.PAIRS:
        assert (max(found[" / ".join(pair)]) == 0) == (pair in kl.EQUAL), pair


# ---- methods, pairs, seeds -------------------------------------------------------------------

def test_methods_are_there_when_five_batches_in_a_row_are_twice_as_good_as_the_base():
    ways = {"a": [0, 0, 0.5, 0, 0.5, 0, 0.5, 0], "never": [1, 0, 0, 0, 0, 1, 0, 0]}
    runs = {name: {"accuracy": numpy.array([row]), "step_time": numpy.full((1, 8), 3.0)}
            for name, row in ways.items()}
    found = methods.cost("countdown", runs)                 # from a base that has 0.5
    assert found["samples"] == {"a": ([math.inf], [8 * 256]), "never": ([math.inf], [8 * 256])}
    runs["a"]["accuracy"][0, 0] = -0.72                     # so that the base has 0.14
    found = methods.cost("countdown", runs)
    assert found["samples"] == {"a": ([7 * 256], [8 * 256]), "never": ([math.inf], [8 * 256])}
    assert found["seconds"] == {"a": ([21], [24]), "never": ([math.inf], [24])}


def test_seeds_are_ranked_as_often_as_there_are_ways():
    pair = numpy.array([1, 4]), numpy.array([2, 1.5])
    assert seeds.wrong_ranks(*pair, 1) == 0.5                               # 1 < 2, 1 < 1.5
    assert seeds.wrong_ranks(*pair, 2) == 0


def test_three_seeds_agree_by_luck_once_in_four_times_and_an_effect_is_seen():
    rng = numpy.random.default_rng(1)
    found = seeds.decisive(rng.normal(size=(1000, 3)))
    assert found[seeds.SIGNS] == pytest.approx(0.25, abs=0.03)
    assert found[seeds.STUDENT] == pytest.approx(0.05, abs=0.02)
    assert set(seeds.decisive(10 + rng.normal(size=(50, 3))).values()) == {1.0}
    dealt = seeds.deals(numpy.arange(10.0), 5)
    assert (abs(dealt.sum(axis=1)) % 2 == 1).all() and abs(dealt.mean()) < 0.1


def test_offline_flips_the_share_of_the_pairs_that_is_asked_for():
    pairs = [{"chosen": "yes", "rejected": "no"}] * 1000
    assert offline.flip(pairs, 0, seed=1) == pairs
    number = offline.flip(pairs, 0.4, seed=1).count({"chosen": "no", "rejected": "yes"})
    assert number == pytest.approx(400, abs=60)


@with_ppo
def test_offline_has_the_pairs_that_the_reward_model_learns_from(talker, monkeypatch):
    cfg = common.parse_flags(ppo.Config, [
        "--device", "cpu", "--num_prompts", "24", "--hidden_size", "16",
        "--max_completion_length", "3"])
    task = common.load_task(cfg, lambda problem, text: float(len(text) % 2))
    policy = talker(cfg)
    monkeypatch.setattr(offline, "load_base", lambda *_: (cfg, task, policy))
    monkeypatch.setattr(preferences, "BATCHES", 3)
    monkeypatch.setattr(preferences, "MISTAKES", 0.5)
    written = offline.compared_pairs(0)
    generator = common.generator(0, "mistakes")
    expected = []
    for number in range(3):
        batch = ppo.sample_batch(policy, task, cfg, f"preferences {number}")
        for chosen, rejected in zip(*preferences.pairs(batch, 0.5, generator)):
            expected.append({"prompt": batch.problems[chosen].prompt,
                             "chosen": batch.texts[chosen], "rejected": batch.texts[rejected]})
    assert len(expected) > len(written) > 0
    assert [pair for pair in expected if pair in written] == written


def test_each_stage_of_r1_begins_from_the_one_before_and_rl_from_the_cold_start(monkeypatch):
    made = []

    def run(script, folder, *flags):
        made.append((folder.name, script, flags[-2:]))
        return {"trained": dict.fromkeys(r1.COLUMNS.values(), len(made))}

    monkeypatch.setattr(r1, "run", run)
    monkeypatch.setattr(r1.coldstart, "main", lambda words: made.append(words))
    found = r1.stages(3, "R1")
    assert found["lookup"] == found["tokens"] == [1, 3, 4, 5, 6]
    (_, _, first), [policy, new], *later = made
    assert first == ("--base_seed", 3) and policy.endswith("/0")
    begins = [policy, *(begin for _, _, (_, begin) in later)]
    assert begins[1] == new
    assert [begin[-2:] for begin in begins] == ["/0", "rt", "/1", "/2", "/3"]


# ---- R1-Zero ----------------------------------------------------------------------------------

BEFORE = {"3": (30, 150, 10, 200), "5": (15, 75, 5, 175)}  # number and tokens: guesses, thoughts


def cells(levels):
    """-> numbers of outputs and tokens, (2, 5, 2)"""
    rows = [levels.get(str(level), (0, 0, 0, 0)) for level in zero.LEVELS]
    return numpy.array(rows, dtype=float).reshape(5, 2, 2).transpose(2, 0, 1)


@pytest.mark.parametrize("order", zero.ORDERS)
@pytest.mark.parametrize("after, only", [
    ({"3": (15, 75, 5, 100), "5": (30, 150, 10, 350)}, "harder problems"),
    ({"3": (10, 50, 30, 600), "5": (10, 50, 10, 350)}, "more thinking"),
    ({"3": (30, 180, 10, 230), "5": (15, 90, 5, 190)}, "longer answers of the same kind"),
    ({"3": (0, 0, 12, 260), "5": (4, 21, 20, 720), "7": (0, 0, 8, 400)}, "")])
def test_zero_parts_add_up_to_the_growth_and_what_changes_alone_has_all_of_it(after, only, order):
    before, after = cells(BEFORE), cells(after)
    found = dict(zip(("number", "tokens"), numpy.stack([before, after], axis=1)[:, None]))
    [added] = zero.parts(found, order).T
    growth = after[1].sum() / after[0].sum() - before[1].sum() / before[0].sum()
    assert added.sum() == pytest.approx(growth)
    if only:
        alone = [growth * (part == only) for part in zero.PARTS]
        assert added.tolist() == pytest.approx(alone, abs=1e-9)


# ---- sharpening, test-time compute -----------------------------------------------------------

@pytest.fixture
def guesser(bigram):
    """A policy that begins with <answer>, ends at once, thinks or says x, in this order; behind
    <answer> it says 8 with a chance of 0.7 and 9 with 0.2, and each ends the answer."""
    answer, answered, think = sharpen.ANSWER, sharpen.ANSWERED, sharpen.THINK
    table = torch.full((grpo.VOCAB_SIZE, grpo.VOCAB_SIZE), -20.0).double()
    follows = {"=": {answer: 0.5, grpo.EOS: 0.3, think: 0.15, ord("x"): 0.05},
               answer: {ord("8"): 0.7, ord("9"): 0.2, ord("1"): 0.1},
               grpo.EOS: {answer: 1.0}, think: {ord("8"): 1.0}, "x": {answer: 1.0},
               "8": {answered: 0.99, grpo.EOS: 0.01}, answered: {grpo.EOS: 1.0}}
    for token, chances in follows.items():
        row = ord(token) if isinstance(token, str) else token
        for other, chance in chances.items():
            table[row, other] = f64(chance).log()
    policy = bigram(table)
    policy.forward = policy.hidden
    return policy


def test_sharpen_certainty_is_the_mean_margin_of_the_tokens_of_the_answer(guesser):
    answer, answered = sharpen.ANSWER, sharpen.ANSWERED
    end = [grpo.EOS, grpo.PAD]
    cases = [([ord("x"), answer, ord("8"), answered, *end], 0.5),   # neither tag counts
             ([answer, ord("8"), ord("x"), answered, *end], (0.5 + 0.98) / 2),
             ([sharpen.THINK, ord("8"), *end], 0)]
    for ids, margin in cases:
        ids = torch.tensor([ids])
        mask = (ids != grpo.PAD).double()
        found = sharpen.certainty(guesser, torch.tensor([[ord("=")]]), ids, mask)
        assert found.item() == pytest.approx(margin, abs=1e-6)


def test_sharpen_paths_are_greedy_after_the_likeliest_first_tokens(guesser, config, load_task):
    cfg = config(task="arithmetic:2")
    eight = problem_of("(3+5)=", "8")
    found = sharpen.paths(guesser, load_task(cfg), cfg, [eight, eight])
    assert [path["chance"][1].item() for path in found] == pytest.approx([0.5, 0.3, 0.15, 0.05])
    assert [path["thinks"][1].item() for path in found] == [0, 0, 1, 0]
    # <answer>8</answer>; an end at once, whatever follows; <think>8</answer>; x<answer>8</answer>
    assert [path["right"][1].item() for path in found] == [1, 0, 0, 1]
    made = [{"right": f64([1, 0, 1]), "certainty": f64([0.9, 0.2, 0.5])},
            {"right": f64([0, 1, 0]), "certainty": f64([0.3, 0.8, 0.6])}]
    assert sharpen.most_certain(made).tolist() == [1, 1, 0]


def test_sharpen_counts_the_thoughts_that_are_right(config, load_task, talker, monkeypatch):
    cfg = config(task="arithmetic:2")
    task = load_task(cfg)
    problems = common.sample_problems(task, 3, 0)

    def continued(script, policy, cfg, asked, prompts, first, uniforms):
        assert first.unique().tolist() == [sharpen.THINK] and len(first) == len(asked)
        assert len(uniforms.unique(dim=0)) == len(asked) == len(prompts)
        answers = [problem.answer for problem in asked]
        answers[:sharpen.K] = ["99"] * sharpen.K            # of the first problem, all are wrong
        answers[sharpen.K + 1::2] = ["99"] * len(answers[sharpen.K + 1::2])
        return None, None, None, [f"</think><answer>{answer}</answer>" for answer in answers]
    monkeypatch.setattr(sharpen, "continued", continued)
    found = sharpen.thoughts_right(talker(cfg), task, cfg, problems)
    assert found == [0, sharpen.K / 2, sharpen.K / 2]
    assert sharpen.passed([0, 64, 128], 128) == pytest.approx([(0.5 + 1) / 3, *[
        (2 - math.comb(64, k) / math.comb(128, k)) / 3 for k in sharpen.KS[1:]]])


def test_sharpen_a_guess_has_the_numbers_of_its_problem():
    task = common.load_task(grpo.Config(task="countdown", device="cpu"), grpo.verify)
    rng = random.Random(0)
    for problem in common.sample_problems(task, 20, 0):
        numbers = re.findall("[0-9]+", sharpen.guess(rng, problem))
        assert sorted(numbers) == re.findall("[0-9]+", problem.prompt)[:-1]


def test_a_completion_goes_on_as_it_did(config, load_task, talker):
    """Without chance, and from any of its prefixes."""
    cfg = config()
    policy = talker(cfg)
    problems = common.sample_problems(load_task(cfg), 5, 0)
    batch = grpo.complete(policy, load_task(cfg), cfg, problems)
    for t in range(int(batch.lengths.min())):
        rest = dataclasses.replace(cfg, max_completion_length=cfg.max_completion_length - t)
        _, found, mask, texts = training.continued(
            grpo, policy, rest, problems, batch.prompts, batch.tokens[:, :t])
        assert texts == batch.texts
        assert torch.equal(found, batch.tokens[:, t:]) and torch.equal(mask, batch.mask[:, t:])


# ---- masking, hacking ------------------------------------------------------------------------

def test_masking_without_a_mask_every_token_up_to_the_end_counts_as_written():
    cfg = grpo.Config(device="cpu", task="lookup", num_prompts=2, num_generations=4)
    task = common.load_task(cfg, grpo.verify)
    policy = grpo.GPT(cfg)
    task.respond = lambda problem, text: "<information>mi</information>"
    policy.embed.weight.data[grpo.TOKENIZER.encode_single_token("</search>")] *= 20     # calls
    masked = grpo.sample_batch(policy, task, cfg, 0)
    assert (masked.mask.sum(dim=1) < masked.lengths).any()
    masking.unmask(task)
    batch = grpo.sample_batch(policy, task, cfg, 0)
    assert torch.equal(batch.tokens, masked.tokens)
    assert torch.equal(batch.mask.sum(dim=1).long(), batch.lengths)


def test_masking_a_fall_is_from_the_best_five_steps_to_later_ones():
    runs = f64([[0, 0, 0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0, 1, 1]]).numpy()
    assert masking.fall(runs) == pytest.approx([0, 0.6])


def proxies(kind, prompt, texts):
    return [wrongrewards.proxy(kind, problem_of(prompt), text) for text in texts]


def test_a_difference_of_a_potential_gives_every_group_the_same_advantages():
    texts = ["", "RL", "RLRL", "RURR", "RURRRR", "x", "RURR!", "LLLLLLLLLL", "DD"]
    assert proxies(wrongrewards.NEARER, "A b3 7", texts[:3]) == [0, 1, 2]   # to and fro pays
    for prompt in ("A b3 7", "C c2 4", "F c2 4"):
        groups = [f64([proxies(kind, prompt, texts)])
                  for kind in (wrongrewards.RIGHT, wrongrewards.POTENTIAL)]
        one, other = [grpo.advantages(rewards) for rewards in groups]
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", wrongrewards.REWARDS)
def test_best_walks_are_those_of_all_walks_that_earn_the_most(kind):
    texts = ["".join(moves) for n in range(5) for moves in itertools.product("URDL", repeat=n)]
    for prompt in ("A b3 4", "C c2 4"):
        earned = proxies(kind, prompt, texts)
        name, start, _ = prompt.split()
        highest, true, moves = wrongrewards.solve(kind, name)[4][start]
        assert highest == max(earned)
        best = [text for text, value in zip(texts, earned) if value == highest]
        of_best = proxies(wrongrewards.RIGHT, prompt, best)
        assert min(of_best) <= true <= max(of_best)
        assert min(map(len, best)) <= moves <= max(map(len, best))


def test_reward_models_alone_reward_and_are_trained_when_they_are_due(monkeypatch):
    cfg = common.parse_flags(grpo.Config, arguments(INSTANT | {"num_generations": 4}))
    task = common.load_task(cfg, grpo.verify)
    batches = []

    def fit(model, sample, seed):
        batches.append(sample("preferences 0"))
        model.head.bias.data.fill_(len(batches))

    monkeypatch.setattr(hacking, "load_base", lambda script, flags: (cfg, task, grpo.GPT(cfg)))
    monkeypatch.setattr(hacking, "STEPS", 3)
    monkeypatch.setitem(hacking.MODELS, "late", {0: 2, 2: 1})
    monkeypatch.setattr(preferences, "fit", fit)
    found = hacking.models(0, "late")
    assert len(batches) == 3
    assert not torch.equal(batches[0].prompts, batches[1].prompts)
    assert batches[1].rewards.unique().tolist() == [1.0]    # nothing but the model of then
    assert found["score"] == [2.0] * 3                      # the model before the first step


# ---- bugs ------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", bugs.MISTAKES)
def test_bugs_change_one_line_of_grpo_and_name_a_test_that_exists(name, tmp_path):
    path = bugs.plant(name, tmp_path / "copy")
    text = path.read_text()
    compile(text, path, "exec")
    before = (ROOT / "grpo.py").read_text().splitlines()
    after = text.splitlines()
    assert len(before) == len(after)
    assert sum(one != other for one, other in zip(before, after)) == 1
    file, test = bugs.MISTAKES[name].test.split("::")
    assert re.search(rf"^def {test}\(", (ROOT / "tests" / file).read_text(), re.M)


@pytest.mark.parametrize("values, with_all, with_two", [
    ([3.1, 4.0, 9.0], "high", "high"), ([3.0, 4.0, 5.0], "", "high"), ([3.1, 2.9, 2.0], "", ""),
    ([-0.1, -1.0, -2.0], "low", "low"), ([0.0, -1.0, -1.0], "", "low"), ([-5.0, 1.5, 9.0], "", "")])
def test_bugs_are_told_by_values_that_are_further_off_than_the_right_ones_spread(
        values, with_all, with_two):
    right = numpy.array([1.0, 2.0, 1.5])
    assert bugs.side(numpy.array(values), right) == with_all
    assert bugs.side(numpy.array(values), right, 0.6) == with_two
