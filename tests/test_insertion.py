"""What an environment inserts into a completion: where it stands, and that nothing learns it or counts it."""
import copy
import dataclasses
from types import SimpleNamespace

import policies
import pytest
import torch
from conftest import every_script, scripts

import common
import grpo
from common import Problem

talker = policies.talker
NEVER = [*range(48, 58), *range(65, 91), *range(128, 264), grpo.PAD, *range(266, grpo.VOCAB)]   # is sampled


def said(tokens):
    """Which tokens the environment below said: the policy never says any of these. -> like tokens, bool"""
    return torch.isin(tokens, torch.tensor(NEVER))


@pytest.fixture
def echo(monkeypatch):
    """A task, made for the test: after each ? the environment says whose problem it is and how often it was
    asked, ?<information>B2</information>. Every ? is worth one."""
    task, real = SimpleNamespace(), common.load_task
    task.CALLS, task.width, task.best = ("?",), lambda: 4, lambda problem: 2.0
    task.sample = lambda rng: Problem("echo", f"{rng.randint(0, 999)}=", chr(rng.randint(65, 90)))
    task.respond = lambda problem, text: f"<information>{problem.answer}{text.count('?')}</information>"
    task.verify = lambda problem, text: [float(character == "?") for character in text]
    monkeypatch.setattr(common, "load_task", lambda name: task if name == "echo" else real(name))
    return task


@pytest.fixture
def asker(script, config, talker, echo):
    """asker(**changes) -> cfg, a policy that asks now and then and never says what an environment says"""
    def make(dtype=torch.float64, **changes):
        cfg = config(**({"task": "echo", "max_completion_length": 24, "num_prompts": 6, "temperature": 0.8}
                        | changes))
        policy = talker(cfg).to(dtype)
        bias = policy.embed.weight.data[:, 0]
        bias[NEVER], bias[ord("?")], bias[script.EOS] = -40.0, 4.0, 3.0
        return cfg, policy
    return make


@pytest.fixture
def played(script, asker):
    """played(greedy, **changes) -> cfg, policy, problems, prompts, uniforms or None, the rollout, 4 copies"""
    def make(greedy=False, **changes):
        cfg, policy = asker(**changes)
        problems = common.sample_problems("echo", cfg.num_prompts, 0)
        prompts = script.encode_prompts([problem.prompt for problem in problems], cfg)
        uniforms = torch.rand(4 * len(prompts), cfg.max_completion_length, dtype=torch.float64,
                              generator=torch.Generator().manual_seed(0))
        uniforms = None if greedy else uniforms
        out = script.rollout(policy, prompts, cfg, 1 if greedy else 4, uniforms, problems)
        return cfg, policy, problems, prompts, uniforms, out
    return make


def follow(problem, task, ids):
    """The mask that the tokens of a row have to have, having checked those that are inserted."""
    queue, mask = [], []
    for t, token in enumerate(ids):
        mask.append(0.0 if queue else 1.0)
        if queue:
            assert token == queue.pop(0), (t, ids)
        elif grpo.decode([token]) in task.CALLS:
            text = task.respond(problem, grpo.decode(ids[:t + 1]))
            queue = grpo.TOKENIZER.encode(text, allowed_special="all")
    return mask


# ---- where it stands ------------------------------------------------------------------------------------


@every_script
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
def test_the_answer_to_a_call_stands_behind_it_in_its_own_row_and_is_not_in_the_mask(
        script, played, echo, greedy):
    cfg, policy, problems, _, _, out = played(greedy)
    per_prompt = len(out.tokens) // len(problems)
    for i, (ids, mask, n) in enumerate(zip(out.tokens.tolist(), out.mask.tolist(), out.lengths.tolist())):
        assert mask[:n] == follow(problems[i // per_prompt], echo, ids[:n])
        assert ids[n:] == [script.PAD] * (24 - n) and mask[n:] == [0.0] * (24 - n)
        assert (n == 24 or ids[n - 1] == script.EOS) and script.EOS not in ids[:n - 1]
    assert torch.equal(said(out.tokens), out.mask == 0)     # a PAD, too
    if not greedy:                                      # else this tests little
        answers = [text.count("<information>") for text in out.texts()]
        assert max(answers) >= 3 and min(answers) == 0
        ends = out.lengths[out.lengths < 24]
        assert any((out.mask[:, n - 1] == 0).any() for n in ends.tolist())      # one ends, another is told
        assert any(row[23] == 0 and n == 24 for row, n in zip(out.mask.tolist(), out.lengths.tolist()))
        half = out.lengths.sort()[0][len(out.lengths) // 2]                 # then the others move up
        assert any(n > half and 0 in row[half:n] for row, n in zip(out.mask.tolist(), out.lengths.tolist()))


@every_script
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
def test_every_other_token_is_what_the_policy_says_to_all_that_stands_before_it(script, played, greedy):
    cfg, policy, problems, prompts, uniforms, out = played(greedy)
    prompts = prompts.repeat_interleave(len(out.tokens) // len(prompts), 0)
    logits = policy(torch.cat([prompts, out.tokens], 1)[:, :-1])[:, prompts.shape[1] - 1:]      # (B, T, V)
    if greedy:
        likeliest = logits.argmax(-1)
    else:
        cdf = (logits / 0.8).softmax(-1).cumsum(-1)
        likeliest = (cdf <= uniforms[..., None] * cdf[..., -1:]).sum(-1)
    assert ((likeliest == out.tokens) | (out.mask == 0)).all() and (out.mask == 1).sum() > 20


@every_script
def test_the_log_probs_of_sampled_tokens_are_those_that_scoring_finds(script, played):
    for cfg, policy, _, prompts, _, out in (played(), played(True)):
        of = torch.arange(len(out.tokens)) // (len(out.tokens) // len(prompts))
        logps, entropy = script.score(policy, prompts, of, out.tokens, *cfg.scoring)
        for found, scored in ((out.logps, logps), (out.entropy, entropy)):
            torch.testing.assert_close(found * out.mask, scored * out.mask, atol=1e-10, rtol=0)
        assert (out.logps[out.mask == 1] < 0).all() and (out.mask == 0).any()


def test_no_row_depends_on_another_nor_on_what_that_is_told(played, echo):
    cfg, policy, problems, prompts, uniforms, out = played()
    for i in range(24):
        p = i // 4
        alone = grpo.rollout(policy, prompts[p:p + 1], cfg, 1, uniforms[i:i + 1], problems[p:p + 1])
        for found, expected in zip(alone, out):
            torch.testing.assert_close(found, expected[i:i + 1], atol=1e-10, rtol=0)


def test_an_answer_longer_than_what_is_left_is_cut_and_the_row_is_not_ended(played, echo):
    echo.respond = lambda problem, text: "AB" * 20
    _, _, problems, _, _, out = played()
    asked = 0
    for ids, mask, n in zip(out.tokens.tolist(), out.mask.tolist(), out.lengths.tolist()):
        if ord("?") in ids:
            asked, t = asked + 1, ids.index(ord("?"))
            assert n == 24 and grpo.decode(ids[t + 1:]) == ("AB" * 20)[:23 - t]
            assert mask == [1.0] * (t + 1) + [0.0] * (23 - t)
    assert 5 < asked < 24


def test_what_the_environment_says_is_no_call_and_no_end(played, echo):
    echo.respond = lambda problem, text: "A?B"
    _, _, _, _, _, out = played()
    texts = [text for text in out.texts() if "?" in text[:-4]]
    assert len(texts) > 5 and all("?A?B" in text and "A?BA" not in text for text in texts)
    assert all(text.replace("?A?B", "").count("A") == 0 for text in texts if len(text) < 20)


def test_two_calls_in_a_row_are_answered_one_after_the_other(played, echo):
    cfg, policy, problems, prompts, uniforms, _ = played()
    policy.embed.weight.data[ord("?"), 0] = 60.0            # it does nothing but ask
    out = grpo.rollout(policy, prompts, cfg, 4, uniforms, problems)
    for i, text in enumerate(out.texts()):
        name = problems[i // 4].answer
        assert text == "".join(f"?<information>{name}{n}</information>" for n in range(1, 6))[:-14]
    assert out.mask.tolist() == [[1.0, 0, 0, 0, 0] * 4 + [1.0, 0, 0, 0]] * 24


def test_nothing_is_inserted_where_the_environment_has_nothing_to_say(played, echo):
    echo.respond = lambda problem, text: ""
    cfg, policy, problems, prompts, uniforms, out = played()
    assert "?" in "".join(out.texts()) and not (said(out.tokens) & (out.mask == 1)).any()
    without = grpo.rollout(policy, prompts, cfg, 4, uniforms)
    assert all(torch.equal(a, b) for a, b in zip(out, without))
    assert torch.equal(out.lengths, out.mask.sum(1).long())


def test_an_environment_is_asked_once_for_each_call_with_all_that_stands_before(played, echo):
    asked, real = [], echo.respond
    echo.respond = lambda problem, text: asked.append((problem, text)) or real(problem, text)
    _, _, problems, _, _, out = played()
    expected = [(problems[i // 4], text[:at + 1]) for i, text in enumerate(out.texts())
                for at, character in enumerate(text) if character == "?"]
    assert sorted(asked, key=str) == sorted(expected, key=str) and len(asked) > 10


def test_only_problems_of_a_task_with_an_environment_are_answered(played, echo):
    cfg, policy, problems, prompts, uniforms, _ = played()
    for p in (0, 2, 4):
        problems[p] = Problem("arithmetic", problems[p].prompt, "7")
    out = grpo.rollout(policy, prompts, cfg, 4, uniforms, problems)
    told = said(out.tokens) & (out.tokens != grpo.PAD)
    told = told.view(6, 4, 24).any(2).any(1).tolist()
    assert told == [False, True] * 3 and "?" in "".join(out.texts()[:4])


def test_on_a_gpu_a_batch_that_may_be_told_something_is_not_sampled_by_the_graph(played, echo, monkeypatch):
    cfg, policy, problems, prompts, uniforms, expected = played()

    class OnGPU(torch.Tensor):
        is_cuda = True

    graphs = []

    def decode(model, prompts, copies, T, temperature, uniforms, eos, pad, kernel):
        graphs.append((copies, T, temperature, eos, pad, kernel))
        return expected[:4]
    monkeypatch.setattr(common.kernels, "captured_decode", lambda: decode)
    there = prompts.as_subclass(OnGPU)
    out = grpo.rollout(policy, there, cfg, 4, uniforms, problems)
    assert torch.equal(out.tokens.as_subclass(torch.Tensor), expected.tokens) and not graphs
    without = grpo.rollout(policy, there, cfg, 4, uniforms, [Problem("arithmetic", "1=", "1")] * 6)
    assert graphs == [(4, 24, 0.8, grpo.EOS, grpo.PAD, "auto")]
    assert torch.equal(without.lengths, expected.mask.sum(1).long())
    grpo.rollout(policy, there, dataclasses.replace(cfg, kernel="torch"), 4, uniforms)
    assert len(graphs) == 1


# ---- what a step learns from ----------------------------------------------------------------------------


@pytest.fixture
def scene(script, asker):
    """scene(**changes) -> cfg, policy, a reference some way off, a batch sampled by an older policy with
    answers in it, advantages of which none is 0"""
    def make(**changes):
        cfg, policy = asker(**changes)
        draw, ref = torch.Generator().manual_seed(0), copy.deepcopy(policy)
        batch = script.sample_batch(policy, cfg, 0)
        for weight in [*ref.parameters(), *policy.parameters()]:
            weight.data += 0.02 * torch.randn(weight.shape, generator=draw).to(weight)
        texts = batch.prompts, batch.of, batch.out.tokens
        batch.ref_logps = script.score(ref, *texts, *cfg.scoring)[0].detach()
        A = torch.randn(24, 24, generator=draw).double() * batch.out.mask
        assert ((batch.out.mask == 0) & (batch.out.tokens != script.PAD)).any(1).sum() > 5 or changes.get(
            "mask_tool_tokens") == "no"
        return cfg, policy, ref, batch, A if script.__name__ in ("reinforce", "ppo") else A[:, 0]
    return make


def learn(script, cfg, policy, ref, batch, A):
    """One backward pass of each kind that the script has. -> their metrics and gradients"""
    policy.zero_grad()
    rows, found = torch.arange(len(batch.texts)), []
    if script.__name__ == "ppo":
        right, coefs = batch.right.view(-1, 1).double(), {"entropy": 0.03, "penalty": 0.5}
        metrics = script.backward(policy, batch, A, right, rows, cfg, coefs)
    elif script.__name__ == "dpo":
        pairs = script.preferences(batch.rewards)
        assert len(pairs[0]) > 4
        metrics = script.over_pairs(policy, ref, batch, pairs, cfg, learn=True)
    else:
        metrics = script.backward(policy, batch, A, rows, cfg, 0.03)
    found += [metrics, [weight.grad.clone() for weight in policy.parameters()]]
    if script.__name__ == "ppo":
        critic = script.Critic(policy)
        credit = SimpleNamespace(values=A, returns=A + 1.0 * (batch.out.mask > 0), advantages=A)
        optimizer = torch.optim.SGD(critic.parameters())
        found.append(script.fit_critic(critic, optimizer, batch, credit, rows, cfg))
        moved = copy.deepcopy(policy)
        found += [script.trpo_update(moved, batch, A, right, rows, cfg, coefs), list(moved.parameters())]
    return found


CHANGES = {"reinforce": [{}], "ppo": [{}, {"trust_region": "penalty", "nll_coef": 0.2}],
           "grpo": [{"beta": 0.1, "loss_type": kind} for kind in ("grpo", "dapo", "cispo", "sapo")],
           "gspo": [{"beta": 0.1}, {"importance_sampling_level": "sequence_token", "loss_type": "cispo"}],
           "dpo": [{}, {"loss_type": "ipo"}]}


@every_script
def test_a_loss_its_gradient_and_its_metrics_do_not_see_what_stands_in_the_slots_of_inserted_tokens(
        script, scene):
    for changes in CHANGES[script.__name__]:
        cfg, policy, ref, batch, A = scene(**changes)
        inserted = said(batch.out.tokens) & (batch.out.tokens != script.PAD)
        assert (batch.out.mask[inserted] == 0).all() and inserted.any(1).sum() > 5
        before = learn(script, cfg, policy, ref, batch, A), common.describe(batch)
        batch.out.logps[inserted] += 5.0
        batch.out.entropy[inserted] += 7.0
        if A.dim() == 2:
            A[inserted] += 3.0
        after = learn(script, cfg, policy, ref, batch, A), common.describe(batch)
        torch.testing.assert_close(after, before, atol=0, rtol=0)
        assert any(gradient.norm() > 1e-3 for gradient in before[0][1])
        batch.out.logps[batch.out.mask == 1] += 0.5         # while what was sampled counts
        if script.__name__ in ("grpo", "gspo", "ppo"):
            assert learn(script, cfg, policy, ref, batch, A)[0]["loss"] != before[0][0]["loss"]


@every_script
def test_no_gradient_goes_through_the_probability_of_an_inserted_token(script, scene, monkeypatch):
    wide = {"epsilon": 9.0, "epsilon_high": 9.0} if script.__name__ == "gspo" else {}     # all is clipped
    cfg, policy, ref, batch, A = scene(micro_batch_size=7, **wide)
    scored, real = [], script.score

    def score(model, prompts, of, tokens, *options):
        logps, entropy = real(model, prompts, of, tokens, *options)
        if torch.is_grad_enabled():
            logps.retain_grad(), entropy.retain_grad()
            scored.append((tokens, logps, entropy))
        return logps, entropy
    monkeypatch.setattr(script, "score", score)
    learn(script, cfg, policy, ref, batch, A)
    assert len(scored) >= 3
    for tokens, *values in scored:
        own, seen = tokens != script.PAD, said(tokens)
        for value in values:
            if value.grad is not None:                      # not every loss has the entropy in it
                assert (value.grad[seen] == 0).all() and (value.grad[own & ~seen] != 0).any()
    assert any((said(tokens) & (tokens != script.PAD)).any() for tokens, *_ in scored)


@every_script
def test_metrics_are_means_over_sampled_tokens(script, scene):
    cfg, policy, ref, batch, A = scene(**({"beta": 0.1} if script.__name__ in ("grpo", "gspo") else {}))
    out, mask = batch.out, batch.out.mask
    described = common.describe(batch)
    assert described["completions/mean_length"] == pytest.approx(mask.sum().item() / 24)
    assert described["entropy"] == pytest.approx(out.entropy[mask == 1].mean().item())
    assert mask.sum() < out.lengths.sum()
    if script.__name__ in ("grpo", "gspo"):
        logps = script.score(policy, batch.prompts, batch.of, out.tokens, *cfg.scoring)[0]
        metrics = learn(script, cfg, policy, ref, batch, A)[0]
        difference = (logps - out.logps)[mask == 1].abs().max().item()
        assert metrics["max_log_ratio"] == pytest.approx(difference)


@scripts("reinforce", "ppo")
def test_the_credit_of_a_token_does_not_see_the_log_probs_of_inserted_ones(script, scene):
    cfg, policy, ref, batch, _ = scene()
    inserted = batch.out.mask == 0

    def credit():
        if script.__name__ == "reinforce":
            taught = dataclasses.replace(cfg, beta=0.1, view="token", baseline="rloo", gamma=0.9)
            return [script.credit(policy, ref, batch, taught)]
        found = script.assign_credit(script.Critic(policy), ref, batch, cfg, 0.1, 1.0)
        return [found.advantages, found.returns, found.values, torch.tensor(found.kl)]
    before = credit()
    batch.out.logps[inserted] += 5.0
    torch.testing.assert_close(credit(), before, atol=0, rtol=0)
    assert all((values[inserted] == 0).all() for values in before if values.dim() == 2)
    assert before[0][~inserted].std() > 0.01


@every_script
def test_without_the_mask_what_is_inserted_is_learned_and_counted_like_the_rest(script, scene):
    kept = scene()
    cfg, policy, ref, batch, A = scene(mask_tool_tokens="no")
    assert torch.equal(batch.out.tokens, kept[3].out.tokens)
    assert torch.equal(batch.out.lengths, kept[3].out.lengths)
    assert torch.equal(batch.out.mask.sum(1).long(), batch.out.lengths)
    first, second = (learn(script, *scene(mask_tool_tokens=mask))[1] for mask in ("yes", "no"))
    assert max((a - b).abs().max() for a, b in zip(first, second)) > 1e-3
    longer, shorter = (common.describe(b)["completions/mean_length"] for b in (batch, kept[3]))
    assert longer > shorter


@every_script
def test_a_penalty_is_told_how_many_tokens_were_sampled(script, asker):
    cfg, policy = asker()
    seen = []
    batch = script.sample_batch(policy, cfg, 0, penalty=lambda n: seen.append(n) or -n / 100)
    assert torch.equal(seen[0], batch.out.mask.sum(1).view(6, 4))
    assert (seen[0].view(-1) < batch.out.lengths).any()
    rewards = torch.tensor([text.count("?") for text in batch.texts]) - batch.out.mask.sum(1) / 100
    torch.testing.assert_close(batch.rewards.view(-1).double(), rewards.double())


@scripts("grpo", "gspo")
def test_the_overlong_penalty_counts_no_inserted_token(script, asker):
    cfg, policy = asker()
    batch = script.sample_batch(policy, cfg, 0, penalty=lambda n: script.overlong_penalty(n, 24, 12))
    sampled, calls = batch.out.mask.sum(1), torch.tensor([text.count("?") for text in batch.texts])
    penalty = ((12 - sampled) / 12).clamp(-1, 0)
    torch.testing.assert_close(batch.rewards.view(-1).double(), (calls + penalty).double())
    assert ((sampled <= 12) & (batch.out.lengths > 12)).any() and (penalty < 0).any()


@scripts("reinforce", "ppo")
def test_a_reward_for_a_character_lands_on_its_token_also_behind_an_answer(script, asker, echo):
    echo.verify = lambda problem, text: [
        ord(c) % 7 * text[:i].count("?") ** 2.0 / 64 for i, c in enumerate(text)]
    cfg, policy = asker()
    batch = script.sample_batch(policy, cfg, 0)
    found = script.token_rewards(batch.out, batch.verdicts, batch.rewards)
    out, calls = batch.out, 0
    for row, ids, mask, verdict, n in zip(found.tolist(), out.tokens.tolist(), out.mask.tolist(),
                                          batch.verdicts, out.lengths.tolist()):
        at, expected = 0, []
        for token, own in zip(ids[:n], mask):
            end = at + len(script.decode([token])) * (token != script.EOS)
            expected.append(sum(verdict[at:end]) * own)
            at = end
        last = max(t for t in range(n) if mask[t])
        expected[last] += sum(verdict) - sum(expected)      # nothing is lost
        assert row == pytest.approx(expected + [0.0] * (24 - n), abs=1e-5) and at == len(verdict)
        calls += ids[:n].count(ord("?"))
    assert calls > 10


# ---- batches and mini-batches ---------------------------------------------------------------------------


def test_a_batch_knows_who_was_cut_and_what_text_was_said_to_whom(asker, echo):
    cfg, policy = asker()
    batch = grpo.sample_batch(policy, cfg, 0)
    assert batch.texts == batch.out.texts() and batch.decode is grpo.decode
    assert torch.equal(batch.cut, ~(batch.out.tokens == grpo.EOS).any(1)) and 0 < batch.cut.sum() < 24
    for i, text in enumerate(batch.texts):
        assert batch.verdicts[i] == [float(c == "?") for c in text]
        problem = batch.problems[batch.of[i]]
        assert text.count(f"<information>{problem.answer}") >= text.count("</information>")
        assert torch.equal(batch.prompts[batch.of[i]], grpo.encode_prompts([problem.prompt], cfg)[0])
    assert torch.equal(batch.right.view(-1), torch.tensor([text.count("?") >= 2 for text in batch.texts]))
    assert batch.accuracy == pytest.approx(batch.right.float().mean().item())
    assert batch.of.tolist() == sorted([0, 1, 2, 3, 4, 5] * 4)


@scripts("reinforce", "ppo", "grpo", "gspo")
@pytest.mark.parametrize("P, parts, sizes", [
    (6, 2, [12, 12]), (7, 3, [12, 8, 8]), (2, 5, [4, 4]), (6, 1, [24])])
def test_mini_batches_are_of_whole_groups_and_take_every_row_once_a_pass(script, config, P, parts, sizes):
    cfg = config(num_mini_batches=parts, num_iterations=3)
    batch = SimpleNamespace(problems=[None] * P)
    seen = [rows.tolist() for rows in script.mini_batches(batch, cfg, "shuffle", 4)]
    assert list(map(len, seen)) == sizes * 3
    for rows in seen:
        assert rows == sorted(rows) and all(4 * (row // 4) + g in rows for row in rows for g in range(4))
    for i in range(3):
        assert sorted(sum(seen[i * len(sizes):(i + 1) * len(sizes)], [])) == list(range(4 * P))
    again = [rows.tolist() for rows in script.mini_batches(batch, cfg, "shuffle", 4)]
    assert again == seen
    if P > 2 and parts > 1:
        for seed, purpose in ((0, ("shuffle", 5)), (1, ("shuffle", 4)), (0, ("critic", 4))):
            other = script.mini_batches(batch, dataclasses.replace(cfg, seed=seed), *purpose)
            assert [rows.tolist() for rows in other] != seen
        assert seen[:len(sizes)] != seen[len(sizes):2 * len(sizes)]     # nor is a pass that before
