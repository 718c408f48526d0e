"""One optimizer step of each script: its gradient, what it logs, and that every flag reaches it."""
import copy
import dataclasses
import functools
import math
import types
import zlib
from string import digits, punctuation

import policies
import pytest
import torch
from conftest import SCRIPTS, every_script, f64, scripts

import common

# What the papers pool over; bnpo has a test of its own.
AVERAGES = {"grpo": "sequence_mean", "dr_grpo": "constant", "dapo": "token_mean", "cispo": "token_mean",
            "sapo": "sequence_mean"}
with_ratios = scripts("grpo", "gspo")
with_advantages = scripts("reinforce", "grpo", "gspo")      # one update, but for the loss
close = functools.partial(torch.testing.assert_close, atol=1e-10, rtol=0)
talker, bigram = policies.talker, policies.bigram


def gradients(model):
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def gradient_of(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def weights(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


@pytest.fixture
def scene(script, config, talker):
    """scene(**changes) -> cfg, policy, a reference some way off, a batch of 14 ragged rows that an older
    policy sampled, advantages with zeros among them, all in float64."""
    def make(**changes):
        clips = {"epsilon": 0.2, "epsilon_high": 0.28} if "epsilon" in OWN[script.__name__] else {}
        cfg = config(**{"num_prompts": 7, "num_generations": 2, "temperature": 0.7} | clips | changes)
        policy, draw = talker(cfg).double(), torch.Generator().manual_seed(0)
        ref = copy.deepcopy(policy)
        for weight in ref.parameters():
            weight.data += 0.1 * torch.randn(weight.shape, generator=draw).to(weight)
        batch = script.sample_batch(policy, cfg, 0)
        texts = batch.prompts, batch.of, batch.out.tokens
        batch.ref_logps = script.score(ref, *texts, *cfg.scoring)[0].detach()
        mask = batch.out.mask
        batch.out.logps.add_(0.4 * torch.randn(14, 8, generator=draw).double() * mask)
        assert len(set(mask.sum(1).tolist())) > 3                           # else it tests little
        A = f64([1.5, 0, -1, 0.3, 0, 0, 2, -0.7, 0.1, -2, 0, 1, -0.4, 0.8])
        A = per_token(script, A, mask * (1 + torch.rand(14, 8, generator=draw)))
        return cfg, policy, ref, batch, A
    return make


def per_token(script, A, weights):
    """Advantages (B,) as the script's update takes them: in these two there is one for each token."""
    return A[:, None] * weights if script.__name__ in ("reinforce", "ppo") else A


@pytest.fixture
def advance(script):
    """advance(policy, ref, optimizer, batch, A, cfg, step): the script's update, told what is good by A."""
    def ppo(policy, ref, optimizer, batch, A, cfg, step):
        critic = script.Critic(script.GPT(cfg)).double()
        credit = types.SimpleNamespace(advantages=A, returns=A, values=0 * A, kl=0.0)
        critic_optimizer = torch.optim.SGD(critic.parameters())
        return script.update(policy, critic, optimizer, critic_optimizer, batch, credit, cfg, step,
                             cfg.penalty_coef)

    def dpo(policy, ref, optimizer, batch, A, cfg, step):
        pairs = script.preferences(A.view(cfg.num_prompts, cfg.num_generations))
        return script.update(policy, ref, optimizer, batch, pairs, cfg, step)
    return {"ppo": ppo, "dpo": dpo}.get(script.__name__) or script.update


@pytest.fixture
def spy(script, monkeypatch):
    """spy(look) -> a list of look(args, metrics), one for each optimizer step of an update."""
    def install(look):
        name = "over_pairs" if script.__name__ == "dpo" else "backward"
        seen, real = [], getattr(script, name)

        def spied(*args, **options):
            metrics = real(*args, **options)
            seen.append(look(args, dict(metrics)))
            return metrics
        monkeypatch.setattr(script, name, spied)
        return seen
    return install


def rows_of(args, _):
    """The rows of a batch that a step is made of; in dpo.py the pairs."""
    if not isinstance(args[3], torch.Tensor):
        return list(zip(*(rows.tolist() for rows in args[3])))
    return next(rows for rows in args[3:] if rows.dtype == torch.long).tolist()


def batch_of(script, prompts, tokens, mask, logps, rewards=None, **more):
    """What a step learns from, made by hand: one row of each prompt."""
    out = script.Rollout(torch.tensor(tokens), mask, logps * mask, 0.5 * mask, mask.sum(1).long())
    return types.SimpleNamespace(
        prompts=torch.tensor(prompts), of=torch.arange(len(prompts)), problems=[None] * len(prompts), out=out,
        cut=(out.tokens != script.EOS).all(1), decode=script.decode, rewards=rewards,
        right=rewards == 1 if rewards is not None else torch.zeros(len(prompts), 1), **more)


@pytest.fixture
def plain_loss(script):
    """Equation (5) as it stands: all rows at once, none skipped, nothing cut off."""
    def loss(policy, ref, batch, A, rows, cfg, entropy_coef):
        of, (tokens, mask, old_logps) = batch.of[rows], (slots[rows] for slots in batch.out[:3])
        logps, entropy = script.score(policy, batch.prompts, of, tokens, cfg.temperature)
        ref_logps = script.score(ref, batch.prompts, of, tokens, cfg.temperature)[0].detach()
        if script.__name__ == "reinforce":
            terms, how = script.policy_loss(logps, A[rows], mask), "sequence_sum"
        else:
            level = (cfg.importance_sampling_level,) if script.__name__ == "gspo" else ()
            terms, how = script.policy_loss(logps, old_logps, A[rows], mask, cfg.loss_type, cfg.epsilon,
                                            cfg.epsilon_high, *level), AVERAGES[cfg.loss_type]
            terms = terms + cfg.beta * script.kl(logps, ref_logps, cfg.kl_estimator)
        terms = terms - entropy_coef * entropy
        return script.aggregate(terms, mask, how, max_length=cfg.max_completion_length)
    return loss


@pytest.fixture
def plain_gradient(plain_loss):
    """The loss as a float, and its gradient."""
    def both(policy, *rest):
        loss = plain_loss(policy, *rest)
        return loss.item(), gradient_of(loss, policy)
    return both


# ---- micro-batches --------------------------------------------------------------------------------------


@with_ratios
@pytest.mark.parametrize("loss_type", AVERAGES)
def test_the_gradient_of_a_step_is_that_of_equation_5_however_the_step_is_cut(
        script, plain_gradient, scene, loss_type):
    for estimator in ("k1", "k2", "k3"):
        cfg, policy, ref, batch, A = scene(loss_type=loss_type, beta=0.2, kl_estimator=estimator)
        for rows in (torch.arange(14), torch.tensor([13, 2, 6, 5, 9, 0, 11])):  # a batch, a mini-batch
            loss, gradient = plain_gradient(policy, ref, batch, A, rows, cfg, 0.03)
            assert gradient.norm() > 0.01
            seen = []
            for size in (14, 7, 4, 2):                                      # 1, 2, 4 and 7 micro-batches
                cut = dataclasses.replace(cfg, micro_batch_size=size)
                seen.append(script.backward(policy, batch, A, rows, cut, 0.03))
                close(gradients(policy), gradient)
                close(seen[-1]["loss"], loss)
                assert seen[-1] == pytest.approx(seen[0], rel=1e-6)         # what is logged is not cut either


@with_ratios
@pytest.mark.parametrize("loss_type", AVERAGES)
def test_skipping_rows_without_advantage_leaves_the_gradient_as_it_is(
        script, plain_gradient, scene, loss_type):
    cfg, policy, ref, batch, A = scene(loss_type=loss_type, micro_batch_size=4)
    rows = torch.arange(14)
    loss, gradient = plain_gradient(policy, ref, batch, A, rows, cfg, 0.0)
    metrics = script.backward(policy, batch, A, rows, cfg, 0.0)
    torch.testing.assert_close(gradients(policy), gradient, atol=1e-12, rtol=0)
    close(metrics["loss"], loss)


@with_ratios
@pytest.mark.parametrize("beta, entropy_coef", [(0.2, 0.0), (0.0, 0.03)])
def test_rows_without_advantage_still_feel_the_kl_and_the_entropy_bonus(
        script, plain_gradient, scene, beta, entropy_coef):
    cfg, policy, ref, batch, A = scene(beta=beta)
    loss, gradient = plain_gradient(policy, ref, batch, 0 * A, torch.arange(14), cfg, entropy_coef)
    script.backward(policy, batch, 0 * A, torch.arange(14), cfg, entropy_coef)
    close(gradients(policy), gradient)
    assert gradient.norm() > 1e-4


@with_ratios
def test_bnpo_pools_each_micro_batch_in_row_order_so_that_the_cut_changes_its_gradient(
        script, plain_loss, scene):
    cfg, policy, ref, batch, A = scene(loss_type="bnpo", beta=0.2)
    pooled, seen = dataclasses.replace(cfg, loss_type="dapo"), []
    for rows, size in ((torch.arange(14), 14), (torch.arange(14), 4), (torch.tensor([13, 2, 6, 5, 9]), 2)):
        expected = sum(plain_loss(policy, ref, batch, A, part, pooled, 0.03) * len(part) / len(rows)
                       for part in rows.split(size))
        gradient = gradient_of(expected, policy)
        cut = dataclasses.replace(cfg, micro_batch_size=size)
        metrics = script.backward(policy, batch, A, rows, cut, 0.03)
        close(gradients(policy), gradient)
        close(metrics["loss"], expected.item())
        seen.append(gradients(policy))
    assert (seen[0] - seen[1]).norm() > 0.01 * seen[0].norm()


@with_ratios
def test_bnpo_counts_rows_without_advantage(script, plain_loss, scene):
    cfg, policy, ref, batch, A = scene(loss_type="bnpo", micro_batch_size=4)
    pooled = dataclasses.replace(cfg, loss_type="dapo")
    expected = sum(plain_loss(policy, ref, batch, A, part, pooled, 0.0) * len(part) / 14
                   for part in torch.arange(14).split(4))
    gradient = gradient_of(expected, policy)
    script.backward(policy, batch, A, torch.arange(14), cfg, 0.0)
    close(gradients(policy), gradient)


@with_ratios
@pytest.mark.parametrize("loss_type", AVERAGES)
def test_a_whole_update_with_mini_batches_does_not_depend_on_the_micro_batch_size(script, scene, loss_type):
    ends = []
    for size in (14, 3, 1):
        cfg, policy, ref, batch, A = scene(loss_type=loss_type, beta=0.2, entropy_coef=0.03,
                                           num_iterations=2, num_mini_batches=3, micro_batch_size=size)
        start = weights(policy)
        metrics = script.update(policy, ref, torch.optim.SGD(policy.parameters()), batch, A, cfg, 0)
        ends.append((weights(policy), metrics["loss"], metrics["grad_norm"]))
        assert (ends[0][0] - start).norm() > 0.01
    close(ends[1], ends[0])
    close(ends[2], ends[0])


@scripts("reinforce")
@pytest.mark.parametrize("entropy_coef", [0.0, 0.03])
def test_the_gradient_of_reinforce_is_that_of_equation_5_however_the_step_is_cut(
        script, plain_gradient, scene, entropy_coef):
    cfg, policy, ref, batch, A = scene()
    for rows in (torch.arange(14), torch.tensor([13, 2, 6, 5, 9, 0, 11])):
        loss, gradient = plain_gradient(policy, ref, batch, A, rows, cfg, entropy_coef)
        assert gradient.norm() > 0.01
        for size in (14, 7, 4, 2):
            cut = dataclasses.replace(cfg, micro_batch_size=size)
            metrics = script.backward(policy, batch, A, rows, cut, entropy_coef)
            close(gradients(policy), gradient)
            close(metrics["loss"], loss)


@scripts("reinforce")
def test_rejection_sampling_averages_over_the_right_answers_only(script, plain_loss, scene):
    cfg, policy, ref, batch, A = scene(method="rejection", micro_batch_size=4)
    batch.right = right = (A != 0).any(1)
    for rows in (torch.arange(14), torch.tensor([13, 2, 6, 5, 9, 0, 11])):
        winners = rows[right[rows]]
        loss = plain_loss(policy, ref, batch, batch.out.mask, winners, cfg, 0.0)        # A is 1
        gradient = gradient_of(loss, policy)
        metrics = script.backward(policy, batch, batch.out.mask * right[:, None], rows, cfg, 0.0)
        close(gradients(policy), gradient)
        close(metrics["loss"], loss.item())
        ones = batch.out.mask                   # with a baseline wrong rows have an A, too, but no count
        loss = plain_loss(policy, ref, batch, ones, rows, cfg, 0.0) * len(rows) / len(winners)
        gradient = gradient_of(loss, policy)
        script.backward(policy, batch, ones, rows, cfg, 0.0)
        close(gradients(policy), gradient)


@scripts("reinforce")
def test_the_credit_of_a_token_is_what_comes_after_it_or_all_that_came_of_the_row(script, config, bigram):
    """Of four answers the third is right; the base finds every token half as likely as the policy does."""
    V, eos, pad, draw = script.VOCAB, script.EOS, script.PAD, torch.Generator().manual_seed(0)
    ref = bigram(torch.randn(V, V, generator=draw).double())
    tokens = [[7, 8, eos], [eos, pad, pad], [5, 6, 7], [7, eos, pad]]
    mask = f64([[1.0, 1, 1], [1, 0, 0], [1, 1, 1], [1, 1, 0]])
    batch = batch_of(script, [[1]] * 4, tokens, mask, mask, rewards=f64([[0.0, 0, 1, 0]]))
    ref_logps = script.score(ref, batch.prompts, batch.of, batch.out.tokens, 1.0)[0].detach()
    batch.out.logps.copy_((ref_logps + math.log(2)) * mask)
    batch.verdicts = [0.0, 0.0, 1.0, 0.0]
    price = 0.1 * math.log(2)                               # of every token, with beta = 0.1
    for view, beta, gamma, expected in (
            ("sequence", 0, 1.0, [[0, 0, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]]),
            ("token", 0, 0.5, [[0, 0, 0], [0, 0, 0], [0.25, 0.5, 1], [0, 0, 0]]),
            ("sequence", 0, 0.5, [[0, 0, 0], [0, 0, 0], [0.25, 0.25, 0.25], [0, 0, 0]]),
            ("sequence", 0.1, 1.0, [[-3 * price] * 3, [-price] * 3, [1 - 3 * price] * 3, [-2 * price] * 3]),
            ("token", 0.1, 1.0, [[-3 * price, -2 * price, -price], [-price, 0, 0],
                                 [1 - 3 * price, 1 - 2 * price, 1 - price], [-2 * price, -price, 0]])):
        cfg = config(view=view, beta=beta, gamma=gamma, num_prompts=1)
        close(script.credit(ref, ref, batch, cfg), torch.tensor(expected, dtype=torch.float64) * mask)
    A = script.credit(ref, ref, batch, config(baseline="rloo", num_prompts=1))
    close(A, f64([[-1.0], [-1], [3], [-1]]) / 3 * mask)
    A = script.credit(ref, ref, batch, config(method="rejection", num_prompts=1))
    close(A, batch.rewards.view(-1, 1) * mask)
    batch.rewards = f64([[0.1, 0.0, 1.3, 1.0]])             # a bonus for the format makes no answer right
    close(script.credit(ref, ref, batch, config(method="rejection", num_prompts=1)), A)
    batch.verdicts = [[-1.0] * 2, [], [-1.0] * 3, [-1.0]]   # nor does a price for each move make it wrong
    close(script.credit(ref, ref, batch, config(method="rejection", view="token", num_prompts=1)), A)
    paid = script.credit(ref, ref, batch, config(method="rejection", beta=0.1, num_prompts=1))
    close(paid, A - price * mask.sum(1, keepdim=True) * mask)


@scripts("reinforce")
def test_a_reward_for_each_move_belongs_to_the_token_that_makes_it(script, config, bigram):
    policy = bigram(torch.zeros(script.VOCAB, script.VOCAB).double())
    think, eos, pad = 256, script.EOS, script.PAD
    tokens = [[*"n\u00e9\u2191".encode(), think, eos], [*b"ab", eos, pad, pad, pad, pad, pad]]
    mask = torch.tensor([[1.0] * 8, [1.0] * 3 + [0.0] * 5]).double()
    verdicts = [[1.0, 2.0, 4.0, 8.0, 16.0] + [0.0] * 5, [0.5, 0.25]]
    batch = batch_of(script, [[1]] * 2, tokens, mask, mask, rewards=f64([[31.0, 0.75]]))
    assert [len(text) for text in batch.out.texts()] == [len(verdict) for verdict in verdicts]
    batch.verdicts = verdicts
    A = script.credit(policy, policy, batch, config(view="token", num_prompts=1))
    close(A[:, 0], torch.tensor([31.0, 0.75]).double())
    to_go = {0: 31, 1: 30, 3: 28, 6: 24, 7: 0}              # n; two bytes; three of an arrow; a tag; EOS
    close(A[0, list(to_go)], torch.tensor([*to_go.values()]).double())
    close(A[1], torch.tensor([0.75, 0.25, 0, 0, 0, 0, 0, 0]).double())


@scripts("ppo")
@pytest.mark.parametrize("trust_region", ["clip", "penalty"])
def test_the_gradient_of_ppo_is_that_of_equation_5_however_the_step_is_cut(script, scene, trust_region):
    cfg, policy, ref, batch, A = scene(trust_region=trust_region, nll_coef=0.3)
    right = (torch.arange(14)[:, None] % 3 == 0).double()
    coefs = {"entropy": 0.03, "penalty": 0.5}
    for rows in (torch.arange(14), torch.tensor([13, 2, 6, 5, 9, 0, 11]), torch.tensor([1, 2])):
        tokens, mask, old_logps = (slots[rows] for slots in batch.out[:3])
        logps, entropy = script.score(policy, batch.prompts, batch.of[rows], tokens, cfg.temperature)
        near = (script.policy_loss(logps, old_logps, A[rows], mask, 0.2, 0.28) if trust_region == "clip"
                else script.penalty_loss(logps, old_logps, A[rows], mask, 0.5))
        loss = ((near - 0.03 * entropy) * mask).sum() / mask.sum()
        likely = mask * right[rows]
        if likely.any():
            loss = loss - 0.3 * (logps * likely).sum() / likely.sum()
        gradient = gradient_of(loss, policy)
        assert gradient.norm() > 0.01
        for size in (14, 7, 4, 2):
            cut = dataclasses.replace(cfg, micro_batch_size=size)
            metrics = script.backward(policy, batch, A, right, rows, cut, coefs)
            close(gradients(policy), gradient)
            close(metrics["loss"], loss.item())


@scripts("ppo")
def test_the_gradient_of_the_critic_is_that_of_equation_7_however_the_step_is_cut(script, scene):
    cfg, policy, ref, batch, A = scene(cliprange_value=0.3, max_grad_norm=1e9, learning_rate=1.0)
    draw, mask, steps = torch.Generator().manual_seed(1), batch.out.mask, []
    values, returns = (torch.randn(14, 8, generator=draw).double() * mask for _ in range(2))
    before = weights(policy)
    credit = types.SimpleNamespace(values=values, returns=returns)
    for rows in (torch.arange(14), torch.tensor([13, 2, 6, 5, 9, 0, 11])):
        for size in (14, 4, 2):
            critic = script.Critic(policy)
            critic.head.data.copy_(torch.linspace(-1, 1, 16))
            V = critic(batch.prompts, batch.of[rows], batch.out.tokens[rows])
            terms = script.value_loss(V, values[rows], returns[rows], mask[rows], 0.3)
            loss = terms.sum() / mask[rows].sum()
            gradient, start = gradient_of(loss, critic), weights(critic)
            cut = dataclasses.replace(cfg, micro_batch_size=size)
            optimizer = torch.optim.SGD(critic.parameters(), lr=1.0)
            metrics = script.fit_critic(critic, optimizer, batch, credit, rows, cut)
            close(start - weights(critic), gradient)
            expected = {"value_loss": loss.item(), "critic_grad_norm": gradient.norm().item()}
            assert metrics == pytest.approx(expected)
            steps.append(gradient.norm())
    assert min(steps) > 0.01 and torch.equal(weights(policy), before)       # which is another model


@scripts("ppo")
def test_the_critic_says_of_each_slot_what_to_expect_before_its_token_is_read(script, config, talker):
    cfg = config()
    critic = script.Critic(talker(cfg)).double()
    prompts, of, tokens = torch.randint(256, (2, 5)), torch.tensor([1, 0, 1]), torch.randint(256, (3, 6))
    assert (critic(prompts, of, tokens) == 0).all()         # at first
    critic.head.data.copy_(torch.linspace(-1, 1, 16))
    values = critic(prompts, of, tokens)
    assert values.shape == (3, 6)
    assert torch.equal(values[0, 0], values[2, 0]) and not torch.equal(values[0, 0], values[1, 0])
    for t in range(6):
        changed = tokens.clone()
        changed[:, t] += 1
        moved = (critic(prompts, of, changed) - values).abs().amax(0) > 1e-9
        assert not moved[:t + 1].any() and (t == 5 or moved[t + 1])


@scripts("ppo")
def test_the_passes_of_ppo_end_when_the_policy_has_gone_too_far_and_that_step_is_not_taken(
        script, scene, advance, spy):
    for target, steps in ((0.0, 4), (1e9, 4), (1e-9, 0)):   # this policy is far from the batch at once
        cfg, policy, ref, batch, A = scene(num_iterations=4, target_kl=target)
        before, seen = weights(policy), spy(lambda args, _: weights(args[0]))
        metrics = advance(policy, ref, torch.optim.SGD(policy.parameters()), batch, A, cfg, 0)
        assert len(seen) == max(1, steps) and metrics["policy_kl"] > 1e-6
        assert torch.equal(weights(policy), before) == (steps == 0)


@scripts("ppo")
def test_the_step_behind_the_one_that_went_too_far_is_not_taken(script, config, talker, advance, spy):
    cfg = config(num_iterations=9, target_kl=0.002, num_prompts=7, num_generations=2)
    policy = talker(cfg).double()
    ref, batch = copy.deepcopy(policy), script.sample_batch(policy, cfg, 0)
    A = torch.linspace(-1, 1, 14, dtype=torch.float64)[:, None] * batch.out.mask
    seen = spy(lambda args, metrics: (weights(args[0]), metrics["policy_kl"]))
    advance(policy, ref, torch.optim.SGD(policy.parameters()), batch, A, cfg, 0)
    assert 2 < len(seen) < 9
    assert all(distance <= 0.003 for _, distance in seen[:-1]) and seen[-1][1] > 0.003
    assert torch.equal(weights(policy), seen[-1][0])        # so it is left where that was seen


@scripts("ppo")
def test_trpo_goes_uphill_but_not_out_of_the_trust_region(script, config, talker, advance):
    cfg = config(trust_region="trpo", max_kl=0.02, temperature=0.7, num_iterations=1)
    policy = talker(cfg).double()
    ref, batch = copy.deepcopy(policy), script.sample_batch(policy, cfg, 0)
    tokens, mask, old_logps = batch.out[:3]
    A = script.whiten(torch.linspace(-1, 1, 16, dtype=torch.float64)[:, None] * mask, mask)
    metrics = advance(policy, ref, torch.optim.SGD(policy.parameters()), batch, A, cfg, 0)
    ids, T = torch.cat([batch.prompts[batch.of], tokens], 1)[:, :-1], tokens.shape[1]
    old, new = (torch.log_softmax(model(ids, logits_to_keep=T) / 0.7, -1).detach() for model in (ref, policy))
    distance = ((old.exp() * (old - new)).sum(-1) * mask).sum() / mask.sum()
    ratio = (script.score(policy, batch.prompts, batch.of, tokens, 0.7)[0] - old_logps).exp()
    gain = (ratio * A * mask).sum() / mask.sum()
    assert 0.3 * 0.02 < distance.item() <= 0.02 and gain.item() > 0.01
    assert metrics["policy_kl"] == pytest.approx(distance.item()) and metrics["max_log_ratio"] < 1e-12


@scripts("ppo")
def test_the_credit_of_a_token_follows_from_the_verdict_the_base_and_the_critic(script, config, bigram):
    """Two rows of three tokens and one; the first is right; the base finds each token half as likely."""
    V, eos, pad, draw = script.VOCAB, script.EOS, script.PAD, torch.Generator().manual_seed(0)
    ref = bigram(torch.randn(V, V, generator=draw).double())
    mask = f64([[1.0, 1, 1], [1, 0, 0]])
    batch = batch_of(script, [[1]] * 2, [[5, 6, 7], [eos, pad, pad]], mask, mask, torch.tensor([[1.0, 0]]))
    ref_logps = script.score(ref, batch.prompts, batch.of, batch.out.tokens, 1.0)[0].detach()
    batch.out.logps.copy_((ref_logps + math.log(2)) * mask)
    batch.verdicts = [1.0, 0.0]
    values = f64([[0.2, 0.5, 0.8], [0.4, 9.0, 9.0]])
    price = 0.1 * math.log(2)

    def credit(beta=0.0, critic_lam=-1.0, **flags):
        critic = lambda prompts, of, tokens: values
        return script.assign_credit(critic, ref, batch, config(**flags), beta, critic_lam)
    plain = credit(gamma=1.0, lam=0.5)
    A = f64([[0.5, 0.4, 0.2], [-0.4, 0, 0]])      # of MATH's table, and 0 - .4
    close(plain.advantages, script.whiten(A, mask))
    close(plain.returns, (A + values) * mask)
    close(plain.values, values * mask)
    assert plain.kl == pytest.approx(math.log(2))
    close(credit(lam=0.5, critic_lam=1.0).returns, f64([[1.0, 1, 1], [0, 0, 0]]))
    close(credit(lam=0.5, critic_lam=1.0).advantages, plain.advantages)
    paid = credit(beta=0.1, lam=1.0)
    close(paid.returns, f64([[1 - 3 * price, 1 - 2 * price, 1 - price], [-price, 0, 0]]))
    adaptive = credit(length_adaptive="yes", alpha=2 / 3)           # lambda is .5, then 0
    torch.testing.assert_close(adaptive.advantages, plain.advantages, atol=1e-6, rtol=0)


@scripts("dpo")
@pytest.mark.parametrize("loss_type, e", [("sigmoid", 0.0), ("sigmoid", 0.1), ("ipo", 0.0), ("hinge", 0.0)])
def test_the_gradient_of_dpo_is_that_of_its_loss_however_the_step_is_cut(script, scene, loss_type, e):
    cfg, policy, ref, batch, A = scene(loss_type=loss_type, label_smoothing=e, beta=0.3)
    chosen, rejected = script.preferences(A.view(7, 2))
    assert len(chosen) >= 6
    for some in (slice(None), slice(1, 4)):
        logps, ref_logps = ((script.score(
            model, batch.prompts, batch.of, batch.out.tokens, cfg.temperature)[0]
                             * batch.out.mask).sum(1) for model in (policy, ref))
        M = (logps - ref_logps.detach())[chosen[some]] - (logps - ref_logps.detach())[rejected[some]]
        loss = {"sigmoid": -(1 - e) * (0.3 * M).sigmoid().log() - e * (-0.3 * M).sigmoid().log(),
                "ipo": (M - 1 / 0.6) ** 2, "hinge": (1 - 0.3 * M).clamp(min=0)}[loss_type].mean()
        gradient = gradient_of(loss, policy)
        assert gradient.norm() > 0.01
        for size in (14, 6, 4, 2, 1):
            cut = dataclasses.replace(cfg, micro_batch_size=size)
            metrics = script.over_pairs(policy, ref, batch, (chosen[some], rejected[some]), cut, learn=True)
            close(gradients(policy), gradient)
            close(metrics["loss"], loss.item())


@scripts("dpo")
def test_the_metrics_of_dpo_match_a_hand_computed_batch(script, config, bigram):
    V, eos, pad = script.VOCAB, script.EOS, script.PAD
    policy = bigram(torch.zeros(V, V, dtype=torch.float64))         # every token has probability 1 / V
    ref = bigram(torch.zeros(V, V, dtype=torch.float64))
    ref.table.data[1, 4] = math.log(V - 1)                          # but 4 at first: one half
    tokens = [[4, eos, pad], [5, 6, eos], [4, 7, 8], [4, 9, eos]]
    mask = f64([[1.0, 1, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1]])
    batch = batch_of(script, [[1]] * 4, tokens, mask, mask)
    down, up = math.log(2 / V), math.log((2 * V - 2) / V)           # log pi / pi_ref of 4, of another
    cfg = config(beta=0.1, num_prompts=1, max_grad_norm=1e9)
    metrics = script.update(policy, ref, torch.optim.SGD(policy.parameters()), batch,
                            (torch.tensor([0, 1]), torch.tensor([1, 2])), cfg, 0)
    margins, k1 = (0.1 * (down - up), 0.1 * (up - down)), (down, up)
    k3 = [math.exp(x) - 1 - x for x in k1]                          # samples of the base: KL(base || policy)
    expected = {
        "loss": sum(math.log(1 + math.exp(-m)) for m in margins) / 2,
        "rewards/chosen": 0.1 * (down + up) / 2, "rewards/rejected": 0.1 * (up + down) / 2,
        "rewards/margins": 0.0, "rewards/accuracies": 0.5, "pairs": 2,
        "logps/chosen": -math.log(V) * 5 / 2, "logps/rejected": -math.log(V) * 3,
        "kl": ((k3[0] / 2 + k3[1] / 3) / 2 + (k3[1] / 3 + k3[0] / 3) / 2) / 2,
        "learning_rate": cfg.learning_rate, "grad_norm": metrics["grad_norm"]}
    assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-12)


# ---- which tokens learn ---------------------------------------------------------------------------------


@with_advantages
def test_the_eos_that_ends_a_completion_gets_a_gradient_and_the_padding_behind_it_none(
        script, config, bigram):
    a, b, c, d = 1, 2, 3, 4
    likely = torch.zeros(script.VOCAB, script.VOCAB, dtype=torch.float64)
    for here, then in ((a, b), (b, script.EOS), (c, d), (d, 5), (5, 6), (6, script.EOS)):
        likely[here, then] = 9.0
    cfg, prompts = config(beta=0.1), [[a], [c]]
    policy, ref = bigram(likely), bigram(likely + torch.linspace(0, 1, script.VOCAB).double())
    tokens, mask, logps = script.rollout(policy, torch.tensor(prompts), cfg)[:3]
    assert tokens.tolist() == [[b, script.EOS] + [script.PAD] * 6, [d, 5, 6, script.EOS] + [script.PAD] * 4]
    batch = batch_of(script, prompts, tokens.tolist(), mask, logps)
    batch.ref_logps = script.score(ref, batch.prompts, batch.of, batch.out.tokens)[0].detach()
    A = per_token(script, f64([1.0, -1.0]), mask)
    script.backward(policy, batch, A, torch.arange(2), cfg, 0.1)
    trained = policy.table.grad.abs().sum(1).nonzero()[:, 0].tolist()
    assert trained == [a, b, c, d, 5, 6]                    # contexts: not EOS, not PAD
    assert policy.table.grad[b, script.EOS] < 0 < policy.table.grad[6, script.EOS]  # more of it, less of it


@with_ratios
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_what_the_models_think_of_the_padding_changes_nothing(script, config, bigram, estimator):
    """However far apart they are: exp(2000) is infinite, and a factor of 0 does not mask what is infinite."""
    seen = []
    for gap in (0.0, 2000.0):                               # in nats
        table = torch.zeros(script.VOCAB, script.VOCAB, dtype=torch.float64)
        table[1, [2, script.EOS]] = f64([5.0, 4.0])
        ref = bigram(table)
        table[[2, script.EOS, script.PAD], script.PAD] = -gap     # read in the slots behind EOS only
        policy, cfg = bigram(table), config(beta=0.1, kl_estimator=estimator)
        mask = f64([[1.0, 0, 0], [1, 1, 1]])
        tokens = [[script.EOS, script.PAD, script.PAD], [7, 8, script.EOS]]
        batch = batch_of(script, [[1], [1]], tokens, mask, -6.0 * mask)
        batch.ref_logps = script.score(ref, batch.prompts, batch.of, batch.out.tokens)[0].detach()
        A = f64([1.0, -1.0])
        metrics = script.backward(policy, batch, A, torch.arange(2), cfg, 0.1)
        seen.append((gradients(policy), *metrics.values()))
    close(seen[1], seen[0])


@every_script
def test_a_step_without_any_signal_leaves_zeros_not_nothing_so_that_adam_moves_on(scene, advance):
    cfg, policy, ref, batch, A = scene()
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    advance(policy, ref, optimizer, batch, A, cfg, 0)
    before = weights(policy)
    metrics = advance(policy, ref, optimizer, batch, 0 * A, cfg, 1)
    assert (gradients(policy) == 0).all() and metrics["loss"] == 0 and metrics["grad_norm"] == 0
    assert (weights(policy) - before).norm() > 1e-3         # by its momentum


@every_script
def test_the_reference_the_batch_and_the_advantages_are_left_as_they_are(scene, advance):
    cfg, policy, ref, batch, A = scene(beta=0.2, num_iterations=2)
    kept = (ref.state_dict(), tuple(batch.out), batch.prompts, batch.rewards, A)
    before = copy.deepcopy(kept)
    advance(policy, ref, torch.optim.SGD(policy.parameters()), batch, A, cfg, 0)
    torch.testing.assert_close(kept, before, atol=0, rtol=0)
    assert all(weight.grad is None for weight in ref.parameters())


# ---- metrics --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script, rows, clipped", [         # the loss of each row, tokens clipped
    ("grpo", (0.8, -(2 + 2.56 + 2.4) / 3, -3.7 / 4, (1.4 + 1) / 2, 0), [1 + 1]),        # the first, then 1.5
    ("gspo", (0.8, -2.4, -0.7 ** (1 / 4), 1.4 ** (1 / 2), 0), [1 + 3, 1 + 1])],         # the first two rows
    indirect=["script"])
def test_metrics_match_a_hand_computed_batch(script, plain_gradient, config, bigram, rows, clipped):
    V, eos, pad = script.VOCAB, script.EOS, script.PAD
    policy = bigram(torch.zeros(V, V, dtype=torch.float64))     # every token has probability 1/V
    ref = bigram(torch.zeros(V, V, dtype=torch.float64))
    ref.table.data[3, 4] = math.log(V - 1)                      # but 4 after 3: one half
    tokens = [[eos, pad, pad, pad], [3, 4, eos, pad], [5, 6, 7, 8], [5, eos, pad, pad], [9, eos, pad, pad]]
    mask = f64([[1.0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]])
    ratios = [[0.5, 1, 1, 1], [1, 1.5, 1.2, 1], [1, 1, 1, 0.7], [1.4, 1, 1, 1], [0.5, 1.5, 1, 1]]
    old_logps = -math.log(V) - torch.tensor(ratios, dtype=torch.float64).log()
    rewards = torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.2, 0.2]])
    batch = batch_of(script, [[1]] * 5, tokens, mask, old_logps, rewards, accuracy=0.25)
    cfg = config(num_prompts=5, num_generations=1, max_completion_length=4, beta=0.1, max_grad_norm=1e9,
                 epsilon=0.2, epsilon_high=0.28 if script.__name__ == "grpo" else 0.2)
    A = f64([-1.0, 2.0, 1.0, -1.0, 0.0])
    gradient = plain_gradient(policy, ref, batch, A, torch.arange(5), cfg, 0.0)[1]
    metrics = script.update(policy, ref, torch.optim.SGD(policy.parameters()), batch, A, cfg, 0)
    x = math.log(2 / V)                                         # log pi / pi_ref of that token
    k3, k1 = math.exp(-x) + x - 1, (x - (mask * f64(ratios).log()).sum().item()) / 12
    names = ("clip_ratio/region_mean", "clip_ratio/token_region_mean")      # the second: what GRPO would clip
    expected = {"loss": sum(rows) / 5 + 0.1 * k3 / 3 / 5, "kl": k1,
                **{name: count / 12 for name, count in zip(names, clipped)},
                "sampling/sampling_logp_difference/max": math.log(2), "max_log_ratio": math.log(2),
                "grad_norm": gradient.norm().item(), "learning_rate": cfg.learning_rate}
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-6), name
    described = {"reward": 0.4, "reward_std": math.sqrt(0.5) / 3, "signal": 1 / 3,
                 "frac_reward_zero_std": 2 / 3, "accuracy": 0.25, "entropy": 0.5,
                 "completions/mean_length": 2.4, "completions/clipped_ratio": 0.2}
    assert common.describe(batch) == pytest.approx(described, rel=1e-6)


@every_script
def test_metrics_are_means_over_the_optimizer_steps_but_for_the_first_ratio(script, scene, advance, spy):
    cfg, policy, ref, batch, A = scene(num_iterations=2, num_mini_batches=3)
    seen = spy(lambda args, metrics: metrics)
    metrics = advance(policy, ref, torch.optim.SGD(policy.parameters()), batch, A, cfg, 0)
    assert len(seen) == 6
    for name in seen[0].keys() - {"policy_kl"}:
        assert metrics[name] == pytest.approx(sum(step[name] for step in seen) / 6)
    if script.__name__ != "dpo":                            # which has no ratio
        assert metrics["sampling/sampling_logp_difference/max"] == seen[0]["max_log_ratio"]
        assert metrics["max_log_ratio"] != seen[0]["max_log_ratio"]
    if script.__name__ == "ppo":                            # how far it went, all told, by every eighth row
        old_logps, mask = batch.out.logps[::8], batch.out.mask[::8]
        logps, _ = script.score(policy, batch.prompts, batch.of[::8], batch.out.tokens[::8], cfg.temperature)
        away = (script.kl(old_logps, logps, "k3") * mask).sum() / mask.sum()
        assert metrics["policy_kl"] == pytest.approx(away.item()) != seen[-1]["policy_kl"]


@scripts("reinforce", "ppo", "grpo", "gspo")
def test_on_fresh_samples_the_first_ratio_is_one(script, config, talker, advance):
    cfg = config(temperature=0.7, num_iterations=1)
    policy = talker(cfg).double()
    ref, batch = copy.deepcopy(policy), script.sample_batch(policy, cfg, 0)
    A = per_token(script, torch.linspace(-1, 1, 16, dtype=torch.float64), batch.out.mask)
    metrics = advance(policy, ref, torch.optim.SGD(policy.parameters()), batch, A, cfg, 0)
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-12
    assert metrics.get("clip_ratio/region_mean", 0) == 0
    if script.__name__ == "ppo":                            # which measures after the step
        assert metrics["policy_kl"] > 1e-6
    else:
        assert metrics["kl"] == pytest.approx(0, abs=1e-12)


@scripts("dpo")
def test_where_the_policy_is_the_reference_no_pair_has_a_margin(script, config, talker, advance):
    cfg = config(temperature=0.7, num_iterations=1)
    policy = talker(cfg).double()
    ref, batch = copy.deepcopy(policy), script.sample_batch(policy, cfg, 0)
    A = torch.linspace(-1, 1, 16, dtype=torch.float64)
    metrics = advance(policy, ref, torch.optim.SGD(policy.parameters()), batch, A, cfg, 0)
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-12) and metrics["pairs"] == 8
    assert metrics["rewards/margins"] == metrics["kl"] == 0 and metrics["logps/chosen"] < 0
    assert metrics["grad_norm"] > 0


# ---- the schedule of an update --------------------------------------------------------------------------


@every_script
def test_every_pass_takes_every_row_once_in_a_new_order(script, scene, advance, spy):
    cfg, policy, ref, batch, A = scene(num_iterations=3, num_mini_batches=6)
    seen = spy(rows_of)
    expected, sizes = set(range(14)), {2, 4}                # seven groups of two in six mini-batches
    if script.__name__ == "dpo":                            # all seven pairs differ, and none is cut in two
        A = A + torch.arange(14) % 2 / 100
        expected, sizes = set(zip(*(rows.tolist() for rows in script.preferences(A.view(7, 2))))), {1, 2}
        assert len(expected) == 7
    advance(policy, ref, torch.optim.SGD(policy.parameters()), batch, A, cfg, 0)
    assert len(seen) == 18 and {len(part) for part in seen} == sizes
    if script.__name__ != "dpo":
        assert all(part == sorted(part) for part in seen)   # so that one mini-batch is the batch as it is
        assert all(row ^ 1 in part for part in seen for row in part)        # and no group is cut in two
    orders = [sum(seen[i:i + 6], []) for i in (0, 6, 12)]
    assert all(len(order) == len(expected) and set(order) == expected for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    for step, seed in ((1, 0), (0, 1)):                     # nor is it that of another step, or another seed
        other = dataclasses.replace(cfg, seed=seed)
        advance(policy, ref, torch.optim.SGD(policy.parameters()), batch, A, other, step)
        assert sum(seen[-18:-12], []) not in orders


@every_script
def test_a_long_gradient_is_scaled_down_to_the_maximum_and_a_short_one_is_left(scene, advance):
    for limit in (0.01, 100.0):
        cfg, policy, ref, batch, A = scene(max_grad_norm=limit, learning_rate=0.5, num_iterations=1)
        start = weights(policy)
        metrics = advance(policy, ref, torch.optim.SGD(policy.parameters()), batch, A, cfg, 0)
        assert metrics["grad_norm"] > 0.02                  # as it was before
        length = (weights(policy) - start).norm().item()
        assert length == pytest.approx(0.5 * min(limit, metrics["grad_norm"]), rel=1e-4)


@every_script
def test_the_learning_rate_warms_up_linearly_and_stays(scene, advance):
    cfg, policy, ref, batch, A = scene(warmup_steps=4, learning_rate=0.5, num_iterations=1)
    optimizer, rates = torch.optim.SGD(policy.parameters()), []
    for step in range(6):
        start = weights(policy)
        metrics = advance(policy, ref, optimizer, batch, A, cfg, step)
        rates.append((weights(policy) - start).norm().item() / min(1.0, metrics["grad_norm"]))
        assert metrics["learning_rate"] == pytest.approx(rates[-1], rel=1e-4)
    assert rates == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, 0.5], rel=1e-4)


@scripts("reinforce", "ppo", "grpo", "gspo")
@pytest.mark.parametrize("decay_steps, coefficients", [(0, [0.1] * 4), (2, [0.1, 0.05, 0, 0])])
def test_the_entropy_bonus_falls_linearly_to_zero_or_stays(
        script, scene, advance, spy, decay_steps, coefficients):
    cfg, policy, ref, batch, A = scene(
        entropy_coef=0.1, entropy_decay_steps=decay_steps, num_iterations=1)
    seen = spy(lambda args, _: args[-1]["entropy"] if script.__name__ == "ppo" else args[-1])
    for step in range(4):
        advance(policy, ref, torch.optim.SGD(policy.parameters()), batch, A, cfg, step)
    assert seen == pytest.approx(coefficients)


@scripts("reinforce", "ppo", "grpo", "gspo")
def test_the_entropy_bonus_raises_the_entropy_and_a_kl_in_the_loss_pulls_to_the_reference(
        script, scene, advance):
    in_the_loss = script.__name__ in ("grpo", "gspo")       # the others have it in the reward
    for changes in [{"entropy_coef": 1.0}, {"beta": 1.0}][:1 + in_the_loss]:
        cfg, policy, ref, batch, A = scene(max_grad_norm=0.5, num_iterations=1, **changes)
        optimizer, found = torch.optim.SGD(policy.parameters()), []
        for step in range(4):
            texts = batch.prompts, batch.of, batch.out.tokens
            logps, entropy = script.score(policy, *texts, cfg.temperature)
            ref_logps, _ = script.score(ref, *texts, cfg.temperature)
            good = entropy if cfg.entropy_coef else -script.kl(logps, ref_logps, "k3")
            found.append((good * batch.out.mask).sum().item())
            advance(policy, ref, optimizer, batch, 0 * A, cfg, step)
        assert found == sorted(found) and found[-1] > found[0] + 1e-3


@every_script
def test_a_step_that_is_not_finite_stops_the_run_before_the_weights_are_touched(
        script, scene, advance, capsys, monkeypatch):
    cfg, policy, ref, batch, A = scene()
    start = weights(policy)
    if script.__name__ == "dpo":
        real = script.dpo_loss
        monkeypatch.setattr(script, "dpo_loss", lambda *args: real(*args) * math.inf)
    with pytest.raises(SystemExit) as stop:
        advance(policy, ref, torch.optim.SGD(policy.parameters()), batch,
                A if script.__name__ == "dpo" else A * math.inf, cfg, 6)
    assert stop.value.code == 1 and "step 7" in capsys.readouterr().err
    assert torch.equal(weights(policy), start)


# ---- every flag does something --------------------------------------------------------------------------

# For each flag those that it needs to matter, and values that must change the weights of two steps.
SHARED = {
    "seed": ("", 1), "base_seed": ("", 1), "operands": ("", 4), "num_prompts": ("", 3),
    "num_generations": ("", 3), "max_completion_length": ("", 5), "temperature": ("", 0.7),
    "dynamic_sampling": ("--num_generations 2", "1 8"), "curriculum": ("--operands 3-5", "yes"),
    "mask_tool_tokens": ("", "no"),
    "num_mini_batches": ("", 2), "max_grad_norm": ("", 0.01),
    "learning_rate": ("", 0.01), "warmup_steps": ("", 4), "weight_decay": ("", 0.5)}
PASSES = {"num_iterations": ("", 1), "entropy_coef": ("", 0.1),
          "entropy_decay_steps": ("--entropy_coef 0.1", 2), "beta": ("", 0.5)}
GROUP = PASSES | {
    "loss_type": ("", "bnpo dr_grpo dapo cispo sapo"), "scale_rewards": ("", "batch none"),
    "epsilon": ("", 0.01), "epsilon_high": ("", 0.01), "kl_estimator": ("--beta 0.5", "k1 k2"),
    "overlong_buffer": ("", 3)}
OWN = {
    "reinforce": PASSES | {
        "method": ("", "rejection"), "baseline": ("", "mean rloo batch optimal"),
        "view": ("--gamma 0.9", "token"), "gamma": ("", "0.9 0")},
    "grpo": GROUP,
    "ppo": PASSES | {
        "gamma": ("", 0.9), "lam": ("", 0.5), "critic_lam": ("", "1 0"), "length_adaptive": ("", "yes"),
        "alpha": ("--length_adaptive yes", 3), "trust_region": ("", "penalty trpo"),
        "epsilon": ("", 0.01), "epsilon_high": ("", 0.01),
        "cliprange_value": ("--critic_learning_rate 0.1", 0.01),
        "penalty_coef": ("--trust_region penalty", 3), "target_kl": ("--trust_region penalty", 0.01),
        "max_kl": ("--trust_region trpo", 0.05), "damping": ("--trust_region trpo", 1),
        "critic_learning_rate": ("", 0.1), "critic_pretrain_steps": ("", 1),
        "kl_target": ("--beta 0.5", 0.001), "nll_coef": ("", 0.5)},
    "dpo": {
        "beta": ("", 0.5), "loss_type": ("", "ipo hinge"), "label_smoothing": ("", 0.1),
        "online": ("", "yes"), "num_iterations": ("", 1)},
    "gspo": GROUP | {"epsilon": ("", 0.95), "epsilon_high": ("", 0.5),
                     "importance_sampling_level": ("--loss_type cispo", "sequence_token")}}
KNOBS = {name: SHARED | OWN.get(name, {}) for name in SCRIPTS}


class Loop:
    """Stands in for common.Run: two steps, no folder, no warm start."""
    batches, weights = [], common.Run.weights

    def __init__(self, cfg, *_):
        self.cfg, self.policy, self.resumed, self.state = cfg, None, None, {}
        Loop.batches.clear()

    def base(self, *_):
        pass

    def steps(self, evaluate, policy, **_):
        self.policy = policy
        yield from range(2)

    def log(self, metrics, batch, A, *_, **__):
        assert all(isinstance(value, (int, float)) for value in metrics.values())
        self.state |= common.tasks.learned(self.cfg, self.state, batch)
        Loop.batches.append(batch)

    def finish(self):
        return weights(self.policy)

    @classmethod
    def batches_of(cls, train, flags):
        train(flags)
        return list(cls.batches)


@pytest.fixture
def train(script, monkeypatch, talker):
    """train(flags) -> the weights after two steps of main, on made-up rewards that only half of the prompts
    can earn, with an environment that repeats digits and the like."""
    def reward(problem, text):
        return float(zlib.crc32(text.encode()) % 2 * (zlib.crc32(problem.prompt.encode()) % 2))
    for name, stand_in in (("verify", reward), ("GPT", talker)):
        monkeypatch.setattr(script, name, stand_in)
    respond = staticmethod(lambda problem, text: text[-1] * 2)
    monkeypatch.setattr(common.arithmetic, "CALLS", tuple(digits + punctuation), raising=False)
    monkeypatch.setattr(common.arithmetic, "respond", respond, raising=False)
    monkeypatch.setattr(common, "Run", Loop)
    flags = ("--device cpu --num_threads 1 --num_mini_batches 1 --operands 3 --hidden_size 16 "
             "--intermediate_size 16 --num_prompts 4 --num_generations 4 --max_completion_length 6 "
             "--num_iterations 2 --learning_rate 0.03 ")
    return lambda more="": script.main((flags + more).split())


@pytest.mark.parametrize("script, name", [(script, name) for script in SCRIPTS for name in KNOBS[script]],
                         indirect=["script"])
def test_the_flag_changes_what_is_learned(script, train, name):
    needs, values = KNOBS[script.__name__][name]
    ends = [train(needs)] + [train(f"{needs} --{name} {value}") for value in str(values).split()]
    assert all(end.isfinite().all() for end in ends)
    assert not any(torch.equal(a, b) for i, a in enumerate(ends) for b in ends[:i])


@every_script
def test_without_another_flag_exactly_the_same_is_learned(train):
    assert torch.equal(train(), train())


@every_script
def test_the_size_of_a_micro_batch_changes_nothing_that_is_learned(train, monkeypatch):
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        ends = [train(f"--num_mini_batches 2 --micro_batch_size {size}") for size in (64, 3, 1)]
    finally:
        torch.set_default_dtype(default)
    assert ends[0].dtype == torch.float64
    close(ends[1], ends[0])
    close(ends[2], ends[0])


@every_script
def test_the_table_of_flags_that_change_something_is_complete(script):
    flags = {f.name for f in dataclasses.fields(script.Config)
             if f.metadata["group"] in ("algorithm", "sampling", "optimizer")}
    assert flags - KNOBS[script.__name__].keys() == {"micro_batch_size"}    # which must not
    for f in dataclasses.fields(script.Config):
        if f.metadata["group"] == "algorithm" and f.metadata["choices"]:
            assert {*KNOBS[script.__name__][f.name][1].split(), f.default} == {*f.metadata["choices"]}


# ---- dynamic sampling and the overlong penalty ----------------------------------------------------------


def test_dynamic_sampling_fills_the_batch_with_groups_that_have_signal(
        script, config, talker, monkeypatch, capsys):
    def reward(problem, text):
        return float(len(text) % 2 * (zlib.crc32(problem.prompt.encode()) % 3 == 0))
    monkeypatch.setattr(script, "verify", reward)
    cfg = config(dynamic_sampling=8)
    policy = talker(cfg)
    plain = script.sample_batch(policy, dataclasses.replace(cfg, dynamic_sampling=0), 0)
    batch = script.sample_batch(policy, cfg, 0)
    assert (plain.rewards.amax(1) == plain.rewards.amin(1)).any()       # else there is nothing to refill
    assert batch.rewards.shape == (4, 4) and (batch.rewards.amax(1) > batch.rewards.amin(1)).all()
    rewards = [[reward(problem, text) for text in batch.texts[4 * p:4 * p + 4]]
               for p, problem in enumerate(batch.problems)]
    assert batch.rewards.tolist() == rewards and batch.out.texts() == batch.texts
    prompts = script.encode_prompts([problem.prompt for problem in batch.problems], cfg)
    assert torch.equal(batch.prompts, prompts) and torch.equal(batch.of, torch.arange(16) // 4)
    assert torch.equal(batch.right, batch.rewards == 1)
    scored, _ = script.score(policy, batch.prompts, batch.of, batch.out.tokens)
    torch.testing.assert_close(scored * batch.out.mask, batch.out.logps, atol=1e-5, rtol=0)
    kept = [p for p in range(4) if plain.rewards[p].amax() > plain.rewards[p].amin()]
    assert batch.problems[:len(kept)] == [plain.problems[p] for p in kept]  # these stay, in order
    assert batch.accuracy < batch.rewards.mean().item()                     # of all that was sampled
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("extra", [0, 1, 3])
def test_dynamic_sampling_adds_so_many_batches_at_most_and_then_takes_what_there_is(
        script, config, talker, monkeypatch, extra):
    asked = []
    monkeypatch.setattr(script, "verify", lambda problem, text: asked.append(problem) or 1.0)
    cfg = config(dynamic_sampling=extra, num_generations=3, operands=5)
    batch = script.sample_batch(talker(cfg), cfg, 0)
    assert len(asked) == 12 * (1 + extra) and len(set(asked)) == 4 * (1 + extra)
    assert batch.problems == asked[:12:3]                   # of groups that are as good, the first
    assert batch.rewards.shape == (4, 3) and len(batch.texts) == len(batch.verdicts) == 12
    assert common.describe(batch)["signal"] == 0            # which says that it was in vain


def test_a_penalty_on_the_lengths_gives_signal_but_does_not_count_as_accuracy(
        script, config, talker, monkeypatch):
    asked = []
    monkeypatch.setattr(script, "verify", lambda problem, text: asked.append(problem) or 1.0)
    cfg = config(dynamic_sampling=8)
    batch = script.sample_batch(talker(cfg), cfg, 0, penalty=lambda lengths: -lengths / 100)
    assert len(asked) in (16, 32)                           # lengths differ: hardly a group has no signal
    rewards = 1 - batch.out.mask.sum(1) / 100
    torch.testing.assert_close(batch.rewards.view(-1), rewards)
    assert batch.accuracy == 1.0 and batch.verdicts == [1.0] * 16


def test_long_completions_are_rewarded_less_if_there_is_an_overlong_buffer(script, train, monkeypatch):
    monkeypatch.setattr(script, "verify", lambda problem, text: 1.0)
    batches, plain = (Loop.batches_of(train, f"--overlong_buffer {c} --learning_rate 0") for c in (4, 0))
    ramp, seen = {3: 0.75, 4: 0.5, 5: 0.25, 6: 0.0}, set()  # at most 6 tokens, a buffer of 4
    for batch, without in zip(batches, plain, strict=True):
        lengths = batch.out.mask.sum(1).tolist()
        assert batch.rewards.view(-1).tolist() == [ramp.get(length, 1.0) for length in lengths]
        assert batch.accuracy == 1.0 and torch.equal(without.out.tokens, batch.out.tokens)
        assert (without.rewards == 1).all()
        seen |= set(lengths)
    assert {1, 6} <= seen
