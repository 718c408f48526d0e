"""Sampling: a rollout says what the policy would say, token by token, and each completion is its prompt's."""
import copy
import dataclasses
import math
import random

import policies
import pytest
import torch

import common
import grpo
from common import sample_problems

talker, bigram = policies.talker, policies.bigram
PROMPTS = ["(3+4)=", "((1+2)-1)=", "((9*2)-8)=", "(5-5)=", "((2*7)+6)=", "((8-3)*4)="]


@pytest.fixture
def sampled(config, talker):
    """sampled(copies, dtype, **changes) -> cfg, policy, prompts (P, W), uniforms, their rollout."""
    def make(copies=4, dtype=torch.float64, **changes):
        cfg = config(**({"max_completion_length": 12} | changes))
        policy, prompts = talker(cfg).to(dtype), grpo.encode_prompts(PROMPTS, cfg)
        uniforms = torch.rand(len(PROMPTS) * copies, cfg.max_completion_length,
                              generator=torch.Generator().manual_seed(0))
        return cfg, policy, prompts, uniforms, grpo.rollout(policy, prompts, cfg, copies, uniforms)
    return make


# ---- the numbers of a rollout ---------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_rollout_logps_equal_forward_logps_at_the_same_temperature(sampled, temperature, kv_heads):
    cfg, policy, prompts, _, out = sampled(dtype=torch.float32, temperature=temperature,
                                           num_key_value_heads=kv_heads)
    lengths = out.mask.sum(1)
    assert lengths.min() < 4 and lengths.max() == 12 and len(lengths.unique()) > 5      # it is compacted
    of = torch.arange(24) // 4
    logps, entropy = grpo.score(policy, prompts, of, out.tokens, temperature)
    torch.testing.assert_close(out.logps, logps * out.mask, atol=1e-5, rtol=0)
    torch.testing.assert_close(out.entropy, entropy * out.mask, atol=1e-5, rtol=0)
    other, _ = grpo.score(policy, prompts, of, out.tokens, 1.3)
    assert ((other - logps) * out.mask).abs().max() > 0.1


def test_score_reads_the_logits_of_a_slot_for_the_token_of_the_next(sampled):
    cfg, policy, prompts, _, out = sampled(copies=1)
    logps, entropy = grpo.score(policy, prompts, torch.arange(6), out.tokens, 0.7)
    for i in range(len(prompts)):
        for t in range(12):                             # every prefix in a forward pass of its own
            prefix = torch.cat([prompts[i], out.tokens[i, :t]])[None]
            p = torch.softmax(policy(prefix)[0, -1] / 0.7, -1)
            torch.testing.assert_close(logps[i, t], p[out.tokens[i, t]].log(), atol=1e-10, rtol=0)
            torch.testing.assert_close(entropy[i, t], -(p * p.log()).sum(), atol=1e-10, rtol=0)


def test_the_mask_is_one_up_to_and_including_the_first_eos_and_to_the_end_of_a_row_that_is_cut(sampled):
    _, _, _, _, out = sampled()
    for tokens, mask, logps, entropy, length in zip(*(slots.tolist() for slots in out)):
        n = tokens.index(grpo.EOS) + 1 if grpo.EOS in tokens else 12
        assert mask == [1.0] * n + [0.0] * (12 - n) and length == n
        assert tokens[n:] == [grpo.PAD] * (12 - n)
        assert all(logps[:n]) and all(entropy[:n]) and not any(logps[n:]) and not any(entropy[n:])
    ended = (out.tokens == grpo.EOS).any(1)
    assert ended.any() and not ended.all()


def test_a_pad_that_the_policy_sampled_is_a_token_like_any_other(config, bigram):
    logits = torch.full((grpo.VOCAB, grpo.VOCAB), -30.0, dtype=torch.float64)
    for here, then in ((61, grpo.PAD), (grpo.PAD, grpo.PAD), (grpo.PAD, grpo.EOS)):
        logits[here, then] = 0.0
    cfg = config(max_completion_length=6)
    uniforms = torch.rand(40, 6, generator=torch.Generator().manual_seed(0))
    out = grpo.rollout(bigram(logits), grpo.encode_prompts(["(1+1)="], cfg), cfg, 40, uniforms)
    lengths = out.lengths.tolist()
    assert len(set(lengths)) > 2
    for tokens, mask, n in zip(out.tokens.tolist(), out.mask.tolist(), lengths):
        assert mask == [1.0] * n + [0.0] * (6 - n)
        assert tokens[:n] == [grpo.PAD] * (n - 1) + [grpo.EOS] or n == 6 and grpo.EOS not in tokens
    assert out.texts()[lengths.index(3)] == "<|pad|><|pad|>"


def test_the_texts_are_the_completions_without_eos_and_what_is_behind_it():
    rows = [[*b"<1>", grpo.EOS, *b"23"], [*b"012345"], [grpo.EOS, *b"12345"]]
    holes = torch.tensor([[1.0, 0, 0, 1, 0, 0], [1, 1, 1, 1, 0, 0], [1] + [0] * 5])     # of what is inserted
    out = grpo.Rollout(torch.tensor(rows), holes, holes, holes, torch.tensor([4, 6, 1]))
    assert out.texts() == ["<1>", "012345", ""]


# ---- no row depends on another --------------------------------------------------------------------------


def test_a_prompt_alone_says_what_it_says_among_others(sampled):
    cfg, policy, prompts, uniforms, out = sampled()
    for i in range(24):                                 # alone, nothing is ever compacted nor shared
        alone = grpo.rollout(policy, prompts[i // 4:i // 4 + 1], cfg, 1, uniforms[i:i + 1])
        assert torch.equal(alone.tokens, out.tokens[i:i + 1]) and torch.equal(alone.mask, out.mask[i:i + 1])
        torch.testing.assert_close(alone.logps, out.logps[i:i + 1], atol=1e-10, rtol=0)


def test_copies_are_the_prompt_written_so_many_times_side_by_side(sampled):
    cfg, policy, prompts, uniforms, out = sampled()
    again = grpo.rollout(policy, prompts.repeat_interleave(4, 0), cfg, 1, uniforms)
    assert torch.equal(again.tokens, out.tokens)
    assert len({tuple(row) for row in out.tokens.tolist()}) > 12            # they differ


def test_greedy_decoding_takes_the_likeliest_token_of_a_full_forward_pass(sampled):
    cfg, policy, prompts, _, _ = sampled()
    lengths = set()
    for eos in (2.0, 3.0, 4.0, 5.0):                    # ever more inclined to end
        policy.embed.weight.data[grpo.EOS, 0] = eos
        out = grpo.rollout(policy, prompts, cfg)
        for i in range(len(prompts)):
            said = []
            while len(said) < 12 and grpo.EOS not in said:
                full = torch.cat([prompts[i], torch.tensor(said, dtype=torch.long)])[None]
                said.append(policy(full)[0, -1].argmax().item())
            assert out.tokens[i].tolist() == said + [grpo.PAD] * (12 - len(said))
            lengths.add(len(said))
        logps, _ = grpo.score(policy, prompts, torch.arange(6), out.tokens)
        torch.testing.assert_close(out.logps, logps * out.mask, atol=1e-10, rtol=0)
    assert len(lengths) > 2


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_reading_with_a_cache_gives_the_logits_of_reading_at_once(config, talker, kv_heads):
    cfg = config(num_key_value_heads=kv_heads)
    policy, cache = talker(cfg).double(), {}
    tokens = torch.randint(grpo.VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
    at_once = policy(tokens)
    assert at_once.shape == (3, 9, grpo.VOCAB)
    torch.testing.assert_close(policy(tokens, logits_to_keep=2), at_once[:, -2:])
    pieces = [policy(tokens[:, :4], cache), *(policy(tokens[:, t:t + 1], cache) for t in range(4, 9))]
    torch.testing.assert_close(torch.cat(pieces, 1), at_once, atol=1e-10, rtol=0)


def test_the_logits_are_read_from_the_hidden_states_by_the_transposed_embedding(config):
    policy, cache = grpo.GPT(config()).double(), {}
    tokens = torch.randint(grpo.VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
    hidden = policy.hidden(tokens)
    torch.testing.assert_close(hidden @ policy.embed.weight.T, policy(tokens))
    torch.testing.assert_close(policy.hidden(tokens, keep=2), hidden[:, -2:])
    pieces = [policy.hidden(tokens[:, :5], cache), *(policy.hidden(tokens[:, t:t + 1], cache)
                                                     for t in range(5, 9))]
    torch.testing.assert_close(torch.cat(pieces, 1), hidden, atol=1e-10, rtol=0)


def test_no_logit_depends_on_a_later_token_and_the_last_depends_on_every_one(config, talker):
    policy = talker(config(num_hidden_layers=1)).double()   # one layer: only rotation tells the order
    tokens = torch.randint(256, (1, 9), generator=torch.Generator().manual_seed(0))
    before = policy(tokens)
    for t in range(9):
        changed = tokens.clone()
        changed[0, t] += 1
        moved = (policy(changed) - before).abs().amax(-1)[0] > 1e-9
        assert not moved[:t].any() and moved[t] and moved[-1]
    swapped = policy(tokens[:, [1, 0, *range(2, 9)]])       # and on their order
    assert (swapped - before)[0, -1].abs().max() > 1e-6


# ---- sampling -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_first_tokens_are_as_frequent_as_the_softmax_says(sampled, temperature):
    cfg, policy, prompts, _, _ = sampled(temperature=temperature, max_completion_length=1)
    N = 4000
    uniforms = ((torch.arange(N) + 0.5) / N)[torch.randperm(N), None]       # evenly spread: no chance is left
    out = grpo.rollout(policy, prompts[:1], cfg, N, uniforms)
    found = torch.bincount(out.tokens[:, 0], minlength=grpo.VOCAB) / N
    p = torch.softmax(policy(prompts[:1])[0, -1] / temperature, -1)
    assert (found - p).abs().max() <= 1.01 / N


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_extreme_uniforms_give_tokens_that_can_be_sampled(config, bigram, dtype):
    draw = torch.Generator().manual_seed(0)
    for scale in (0.01, 1.0, 30.0):
        table = scale * torch.randn(grpo.VOCAB, grpo.VOCAB, generator=draw).to(dtype)
        table[:, :5], table[:, -50:] = -math.inf, -math.inf                 # the ends can not
        cfg = config(max_completion_length=4)
        prompts = torch.arange(grpo.VOCAB)[:, None]                         # every token's own distribution
        for u in (0.0, 2.0 ** -24, 1 - 2.0 ** -24):         # the least, the next and the last of torch.rand
            out = grpo.rollout(bigram(table), prompts, cfg, 1, torch.full((grpo.VOCAB, 4), u))
            said = out.tokens[out.mask == 1]
            assert said.min() >= 5 and said.max() < grpo.VOCAB - 50
            assert out.logps.isfinite().all() and out.entropy.isfinite().all()


def test_a_rollout_leaves_the_model_and_its_arguments_as_it_found_them(sampled):
    cfg, policy, prompts, uniforms, out = sampled()
    before = copy.deepcopy((policy.state_dict(), prompts, uniforms))
    for mode in (True, False):
        policy.train(mode)
        grpo.rollout(policy, prompts, cfg, 4, uniforms)
        grpo.evaluate(policy, dataclasses.replace(cfg, num_eval_problems=3), 2)
        grpo.sample_batch(policy, cfg, 0)
        assert all(module.training == mode for module in policy.modules())
    torch.testing.assert_close((policy.state_dict(), prompts, uniforms), before, atol=0, rtol=0)
    assert all(weight.grad is None for weight in policy.parameters())
    assert not any(slots.requires_grad for slots in out)


# ---- batches --------------------------------------------------------------------------------------------


def same(a, b):
    equal = torch.equal(a.out.tokens, b.out.tokens) and torch.equal(a.rewards, b.rewards)
    return equal and a.texts == b.texts and a.problems == b.problems


def test_a_batch_is_a_function_of_the_seed_and_the_step(config, talker):
    cfg = config()
    policy = talker(cfg)
    torch.manual_seed(1)
    random.seed(1)
    batch = grpo.sample_batch(policy, cfg, 3)
    torch.manual_seed(2)
    random.seed(2)
    state = torch.get_rng_state()
    again = grpo.sample_batch(policy, cfg, 3)
    assert same(batch, again)
    assert torch.equal(torch.get_rng_state(), state)
    for other in (grpo.sample_batch(policy, cfg, 4),
                  grpo.sample_batch(policy, dataclasses.replace(cfg, seed=1), 3)):
        assert other.problems != batch.problems and not torch.equal(other.out.tokens, batch.out.tokens)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_batch_holds_problems_of_the_split_that_is_asked_for(config, talker, split):
    cfg = config(num_prompts=20, operands=5)
    policy = talker(cfg)
    problems = grpo.sample_batch(policy, cfg, 0, split=split).problems
    assert problems == sample_problems("arithmetic", 20, (0, 0, 0), split, operands=5)
    assert (problems == grpo.sample_batch(policy, cfg, 0).problems) == (split == "train")


def test_each_completion_is_scored_against_its_own_prompt(config, talker, monkeypatch):
    asked = []

    def reward(problem, text):
        asked.append((problem, text))
        return len(asked) / 100                         # tells which call it was
    monkeypatch.setattr(grpo, "verify", reward)
    cfg = config(num_generations=3, operands=5)
    policy = talker(cfg).double()
    batch = grpo.sample_batch(policy, cfg, 0)
    assert batch.rewards.shape == (4, 3) and len({problem.prompt for problem in batch.problems}) == 4
    order = (100 * batch.rewards).round().long().view(-1).tolist()
    for row, call in enumerate(order):
        problem, text = asked[call - 1]
        assert problem == batch.problems[row // 3] and text == batch.texts[row] == batch.out.texts()[row]
        assert batch.verdicts[row] == call / 100
        assert torch.equal(batch.prompts[batch.of[row:row + 1]], grpo.encode_prompts([problem.prompt], cfg))
    # and the prompt of a row is the one that its completion was sampled from
    logps, _ = grpo.score(policy, batch.prompts, batch.of, batch.out.tokens)
    torch.testing.assert_close(batch.out.logps, logps * batch.out.mask, atol=1e-10, rtol=0)
    logps, _ = grpo.score(policy, batch.prompts.roll(1, 0), batch.of, batch.out.tokens)
    assert ((batch.out.logps - logps) * batch.out.mask).abs().max() > 0.1


def test_the_reward_of_a_task_that_rewards_each_move_is_the_sum(config, talker, monkeypatch):
    monkeypatch.setattr(grpo, "verify", lambda problem, text: [0.5] * len(text))
    monkeypatch.setattr(common.arithmetic, "best", lambda problem: 2.5, raising=False)
    cfg = config()
    batch = grpo.sample_batch(talker(cfg), cfg, 0)
    assert batch.rewards.view(-1).tolist() == [0.5 * len(text) for text in batch.texts]
    assert batch.right.view(-1).tolist() == [len(text) >= 5 for text in batch.texts]
    assert 0 < batch.accuracy == sum(len(text) >= 5 for text in batch.texts) / 16 < 1


# ---- evaluation -----------------------------------------------------------------------------------------


def test_evaluation_counts_what_the_policy_said_on_held_out_problems(config, monkeypatch):
    """A policy of which all is known: greedy, it is right on every third problem; of four samples of problem
    n the first n % 5 are right, they think if that is 2 or more, and if n is odd the wrong ones agree."""
    cfg = config(num_eval_problems=100, max_completion_length=40)
    problems = sample_problems("arithmetic", 100, "evaluation", "test", operands=3)
    asked, lengths = [], []

    def rollout(model, prompts, cfg, copies=1, uniforms=None, some=()):
        out = []
        assert [problem.prompt for problem in some] == [
            grpo.decode([i for i in prompt if i != grpo.PAD]) for prompt in prompts.tolist()]
        for prompt in prompts.tolist():
            n = sum(1 for is_sampled, _ in asked if is_sampled == (uniforms is not None))
            asked.append((uniforms is not None, grpo.decode([i for i in prompt if i != grpo.PAD])))
            for g in range(copies):
                right = g < n % 5 if asked[-1][0] else n % 3 == 0
                answer = problems[n].answer if right else str(30 + (g if n % 2 == 0 else 0))
                text = "<think></think>" * (n % 5 >= 2) + f"<answer>{answer}</answer>"
                out.append(grpo.TOKENIZER.encode(text, allowed_special="all") + [grpo.EOS])
        mask = torch.tensor([[1.0] * len(ids) + [0.0] * (40 - len(ids)) for ids in out])
        tokens = torch.tensor([ids + [grpo.PAD] * (40 - len(ids)) for ids in out])
        assert uniforms is None or uniforms.shape == tokens.shape
        lengths.extend(map(len, out) if asked[-1][0] else ())
        return grpo.Rollout(tokens, mask, mask, mask, mask.sum(1).long())
    monkeypatch.setattr(grpo, "rollout", rollout)
    labels, waited = [], []
    progress = lambda label, steps: (labels.append(label), waited.extend(steps), steps)[-1]
    greedy, scores = grpo.evaluate(None, cfg, 0, progress), grpo.evaluate(None, cfg, 4, progress)
    assert set(labels) == {"evaluation"} and len(labels) == 2 and waited == [0, 64] * 2
    for was_sampled in (False, True):
        assert [prompt for s, prompt in asked if s == was_sampled] == [p.prompt for p in problems]
    # n % 10:  0 1 2 3 4 5 6 7 8 9    one right sample of four is outvoted when the others agree (1), and not
    # maj@4:   0 0 1 1 1 0 1 1 1 1    when all differ (6); two of four win a tie because they came first (7)
    expected = {"pass@1": 0.5, "pass@4": 0.8, "maj@4": 0.7, "problems": 100,
                "think_share": 0.6, "mean_length": sum(lengths) / 400,
                "accuracy_given_think": (2 + 3 + 4) / 12, "accuracy_given_blurt": (0 + 1) / 8}
    assert scores.keys() == {*expected, "pass@k", "maj@k"}
    for name, value in expected.items():
        assert scores[name] == pytest.approx(value), name
    # of two of four samples: n % 5 of them right, 1 - C(4 - c, 2) / C(4, 2) finds one
    assert scores["pass@k"] == pytest.approx([0.5, (0 + 3 + 5 + 6 + 6) / 30, (0 + 3 + 4 + 4 + 4) / 20, 0.8])
    # maj@2 of samples 1 and 2, 3 and 4, of which the first wins a tie: 0, 1, 1, 2, 2 of two; maj@3 of 1 to 3:
    # n % 5 = 1 is outvoted if the two others agree
    assert scores["maj@k"] == pytest.approx([0.5, (0 + 1 + 1 + 2 + 2) / 10, (0 + 0.5 + 3) / 5, 0.7])
    assert greedy.keys() == {"greedy", "examples", "think_share", "mean_length", "problems"}
    assert greedy["greedy"] == pytest.approx(0.34) and greedy["problems"] == 100
    assert [(e["prompt"], e["answer"], e["right"]) for e in greedy["examples"]] == [
        (p.prompt, p.answer, n % 3 == 0) for n, p in enumerate(problems[:64])]


def test_evaluation_says_none_where_there_is_nothing_to_average(config, talker):
    cfg = config(num_eval_problems=3)
    scores = grpo.evaluate(talker(cfg), cfg, 2)         # it never thinks
    assert scores["accuracy_given_think"] is None and scores["accuracy_given_blurt"] == 0
    assert scores["think_share"] == 0 and scores["problems"] == 3


def test_evaluation_is_the_same_for_every_seed_and_every_time(config, talker):
    cfg = config(num_eval_problems=5)
    policy = talker(cfg)
    scores = grpo.evaluate(policy, cfg, 3)
    torch.manual_seed(3)
    assert grpo.evaluate(policy, dataclasses.replace(cfg, seed=5), 3) == scores
