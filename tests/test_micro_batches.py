"""The gradient of an optimizer step is that of the equation, however many micro-batches it is
computed in, and so is the loss that is logged."""
import dataclasses
import functools

import pytest
import torch
from conftest import scripts
from update_scenes import NUM_ROWS, clear_gradients, gradient_of, gradients, made_estimates, weights

# What the papers average over; BNPO, which averages over micro-batches, has tests of its own.
AVERAGES = {"grpo": "sequence_mean", "dr_grpo": "constant", "dapo": "token_mean",
            "cispo": "token_mean", "sapo": "sequence_mean"}
ALL_ROWS = torch.arange(NUM_ROWS)
SOME_ROWS = torch.tensor([13, 2, 6, 5, 9, 0, 11])           # of a mini-batch
SIZES = (14, 7, 4, 2)                                       # of 1, 2, 4 and 7 micro-batches
with_ratios = scripts("grpo", "gspo")
every_loss_type = pytest.mark.parametrize("loss_type", AVERAGES)
close = functools.partial(torch.testing.assert_close, atol=1e-10, rtol=0)


def plain_loss(scene, rows, entropy_coef=0.0, A=None, average=None):
    """Equation (5) of grpo.py and gspo.py as it stands: all rows at once, none skipped."""
    script = scene.script
    cfg = scene.cfg
    batch = scene.batch
    A = scene.A if A is None else A
    average = average or AVERAGES[cfg.loss_type]
    mask = batch.mask[rows]
    logps, entropy = script.score(
        scene.policy, batch.prompts[rows], batch.tokens[rows], cfg.temperature)
    loss_type = cfg.loss_type if cfg.loss_type in AVERAGES else "grpo"
    options = {"loss_type": loss_type, "epsilon": cfg.epsilon, "epsilon_high": cfg.epsilon_high}
    if script.__name__ == "gspo":
        options["level"] = cfg.importance_sampling_level
    token_loss = script.policy_loss(logps, batch.logps[rows], A[rows], mask, **options)
    token_kl = script.kl(logps, scene.ref_logps()[rows], cfg.kl_estimator)
    token_loss = token_loss + cfg.beta * token_kl - entropy_coef * entropy
    return script.aggregate(token_loss, mask, average, max_length=cfg.max_completion_length)


def plain_loss_and_gradient(scene, *args, **options):
    loss = plain_loss(scene, *args, **options)
    return loss.item(), gradient_of(loss, scene.policy)


# ---- grpo.py and gspo.py ---------------------------------------------------------------------

@with_ratios
@pytest.mark.parametrize("estimator, loss_type", [
    ("k1", "grpo"), ("k2", "grpo"), *(("k3", loss_type) for loss_type in AVERAGES)])
def test_the_gradient_is_that_of_equation_5_in_any_number_of_micro_batches(
        script, scene, loss_type, estimator):
    scene = scene(loss_type=loss_type, beta=0.2, kl_estimator=estimator)
    for rows in (ALL_ROWS, SOME_ROWS):
        expected_loss, expected = plain_loss_and_gradient(scene, rows, entropy_coef=0.03)
        assert expected.norm() > 0.01
        logged = []
        for size in SIZES:
            metrics, gradient = scene.backward(rows, entropy_coef=0.03, micro_batch_size=size)
            logged.append(metrics)
            close(gradient, expected)
            close(metrics["loss"], expected_loss)
            assert metrics == pytest.approx(logged[0], rel=1e-6)


@with_ratios
@every_loss_type
def test_skipping_rows_without_advantage_leaves_the_gradient_as_it_is(scene, loss_type):
    scene = scene(loss_type=loss_type, micro_batch_size=4)
    expected_loss, expected = plain_loss_and_gradient(scene, ALL_ROWS)
    metrics, gradient = scene.backward(ALL_ROWS)
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=0)
    close(metrics["loss"], expected_loss)


@with_ratios
@pytest.mark.parametrize("beta, entropy_coef", [(0.2, 0.0), (0.0, 0.03)])
def test_rows_without_advantage_still_feel_the_kl_and_the_entropy_bonus(
        scene, beta, entropy_coef):
    scene = scene(beta=beta)
    no_advantage = 0 * scene.A
    _, expected = plain_loss_and_gradient(scene, ALL_ROWS, entropy_coef, no_advantage)
    _, gradient = scene.backward(ALL_ROWS, entropy_coef, no_advantage)
    close(gradient, expected)
    assert gradient.norm() > 1e-4


def bnpo_loss(scene, rows, size, entropy_coef=0.0):
    """A token mean for each micro-batch of `size` rows as they come, weighted by its rows."""
    parts = rows.split(size)
    losses = [plain_loss(scene, part, entropy_coef, average="token_mean") for part in parts]
    shares = [len(part) / len(rows) for part in parts]
    return sum(loss * share for loss, share in zip(losses, shares))


@with_ratios
@pytest.mark.parametrize("rows, size", [(ALL_ROWS, 14), (ALL_ROWS, 4), (SOME_ROWS[:5], 2)])
def test_bnpo_averages_over_each_micro_batch_of_rows_as_they_come(scene, rows, size):
    scene = scene(loss_type="bnpo", beta=0.2)
    expected = bnpo_loss(scene, rows, size, entropy_coef=0.03)
    metrics, gradient = scene.backward(rows, entropy_coef=0.03, micro_batch_size=size)
    close(gradient, gradient_of(expected, scene.policy))
    close(metrics["loss"], expected.item())


@with_ratios
def test_the_gradient_of_bnpo_depends_on_the_size_of_micro_batches(scene):
    scene = scene(loss_type="bnpo", beta=0.2)
    _, whole = scene.backward(ALL_ROWS, micro_batch_size=14)
    _, in_parts = scene.backward(ALL_ROWS, micro_batch_size=4)
    assert (whole - in_parts).norm() > 0.01 * whole.norm()


@with_ratios
def test_bnpo_counts_rows_without_advantage(scene):
    scene = scene(loss_type="bnpo", micro_batch_size=4)
    expected = gradient_of(bnpo_loss(scene, ALL_ROWS, 4), scene.policy)
    _, gradient = scene.backward(ALL_ROWS)
    close(gradient, expected)


@with_ratios
@every_loss_type
def test_a_whole_update_does_not_depend_on_the_size_of_micro_batches(scene, loss_type):
    ends = []
    for size in (14, 3, 1):
        one = scene(loss_type=loss_type, beta=0.2, entropy_coef=0.03, num_iterations=2,
                    num_mini_batches=3, micro_batch_size=size)
        start = weights(one.policy)
        metrics = one.update()
        ends.append((weights(one.policy), metrics["loss"], metrics["grad_norm"]))
        assert (weights(one.policy) - start).norm() > 0.01
    close(ends[1], ends[0])
    close(ends[2], ends[0])


# ---- reinforce.py ----------------------------------------------------------------------------

def plain_reinforce_loss(scene, rows, A, entropy_coef=0.0):
    """Equation (5) of reinforce.py as it stands."""
    batch = scene.batch
    logps, entropy = scene.script.score(
        scene.policy, batch.prompts[rows], batch.tokens[rows], scene.cfg.temperature)
    mask = batch.mask[rows]
    token_loss = scene.script.policy_loss(logps, A[rows], mask) - entropy_coef * entropy
    return (token_loss * mask).sum() / len(rows)


@scripts("reinforce")
@pytest.mark.parametrize("rows", [ALL_ROWS, SOME_ROWS], ids=["all", "some"])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.03])
def test_the_gradient_of_reinforce_is_that_of_equation_5(scene, rows, entropy_coef):
    scene = scene()
    loss = plain_reinforce_loss(scene, rows, scene.A, entropy_coef)
    expected = gradient_of(loss, scene.policy)
    assert expected.norm() > 0.01
    for size in SIZES:
        metrics, gradient = scene.backward(rows, entropy_coef, micro_batch_size=size)
        close(gradient, expected)
        close(metrics["loss"], loss.item())


@pytest.fixture
def rejection(scene):
    """rejection(right, rows=ALL_ROWS, **changes) -> scene, metrics and gradient of (5) over `rows`
    where the rows `right` of the batch are the right ones."""
    def make(right, rows=ALL_ROWS, **changes):
        one = scene(method="rejection", micro_batch_size=4, **changes)
        one.batch.is_correct = torch.isin(ALL_ROWS, torch.tensor(right)).view(7, 2)
        rewards = one.script.token_rewards(None, one.batch, one.cfg)
        A = one.script.compute_advantages(
            one.policy, one.reference, one.batch, rewards, one.cfg)
        metrics, gradient = one.backward(rows, one.cfg.entropy_coef, A=A)
        return one, metrics, gradient
    return make


@scripts("reinforce")
@pytest.mark.parametrize("right", [[5], [0, 3, 4, 9, 10, 12, 13], [*range(14)]], ids=len)
def test_rejection_sampling_is_the_mean_likelihood_of_the_right_answers(rejection, right):
    one, metrics, gradient = rejection(right)
    likelihood = plain_reinforce_loss(one, torch.tensor(right), one.batch.mask)     # A is 1
    close(gradient, gradient_of(likelihood, one.policy))
    close(metrics["loss"], likelihood.item())
    assert gradient.norm() > 0.01


@scripts("reinforce")
def test_the_mini_batches_of_rejection_sampling_have_the_mean_likelihood_as_their_mean(rejection):
    """Each right answer counts the same, however many others are in its mini-batch."""
    right = [0, 1, 2, 9]
    _, _, whole = rejection(right)
    parts = [rejection(right, rows)[2] for rows in (ALL_ROWS[:7], ALL_ROWS[7:])]
    close((parts[0] + parts[1]) / 2, whole)


@scripts("reinforce")
@pytest.mark.parametrize("changes", [{"beta": 0.1}, {"entropy_coef": 0.03}], ids=str)
def test_the_kl_and_the_entropy_bonus_of_rejection_sampling_do_not_grow_as_right_ones_get_rare(
        rejection, changes):
    terms = []
    for right in ([], [5], [0, 3, 4, 9, 10, 12, 13]):
        _, _, gradient = rejection(right, **changes)
        _, _, likelihood = rejection(right)
        terms.append(gradient - likelihood)
    close(terms[1], terms[0])
    close(terms[2], terms[0])
    assert terms[0].norm() > 1e-3


@scripts("reinforce")
def test_without_a_right_answer_rejection_sampling_learns_nothing(rejection):
    _, metrics, gradient = rejection([])
    assert metrics["loss"] == 0
    assert (gradient == 0).all()


@scripts("reinforce")
def test_a_row_of_which_one_token_has_an_advantage_is_not_skipped(scene):
    scene = scene()
    A = torch.zeros_like(scene.A)
    A[1, 0] = 1.0
    loss = plain_reinforce_loss(scene, ALL_ROWS, A)
    _, gradient = scene.backward(ALL_ROWS, A=A)
    close(gradient, gradient_of(loss, scene.policy))
    assert gradient.norm() > 1e-3


# ---- ppo.py ----------------------------------------------------------------------------------

def plain_ppo_loss(scene, rows, entropy_coef, penalty_coef):
    """Equation (5) of ppo.py as it stands."""
    script = scene.script
    cfg = scene.cfg
    batch = scene.batch
    A = scene.A[rows]
    mask = batch.mask[rows]
    old_logps = batch.logps[rows]
    logps, entropy = script.score(
        scene.policy, batch.prompts[rows], batch.tokens[rows], cfg.temperature)
    if cfg.trust_region == "clip":
        token_loss = script.policy_loss(logps, old_logps, A, mask, 0.2, 0.28)
    else:
        token_loss = script.penalty_loss(logps, old_logps, A, mask, penalty_coef)
    loss = ((token_loss - entropy_coef * entropy) * mask).sum() / mask.sum()
    of_right_answers = mask * batch.is_correct.view(-1, 1)[rows]
    if of_right_answers.any():
        likelihood = (logps * of_right_answers).sum() / of_right_answers.sum()
        loss = loss - cfg.nll_coef * likelihood
    return loss


@scripts("ppo")
@pytest.mark.parametrize("trust_region", ["clip", "penalty"])
@pytest.mark.parametrize("rows", [ALL_ROWS, SOME_ROWS, torch.tensor([1, 2])],
                         ids=["all", "some", "all_wrong"])
def test_the_gradient_of_ppo_is_that_of_equation_5(scene, rows, trust_region):
    scene = scene(trust_region=trust_region, nll_coef=0.3)
    scene.batch.is_correct = (ALL_ROWS % 3 == 0).view(7, 2)
    loss = plain_ppo_loss(scene, rows, 0.03, 0.5)
    expected = gradient_of(loss, scene.policy)
    assert expected.norm() > 0.01
    for size in SIZES:
        metrics, gradient = scene.backward(rows, 0.03, penalty_coef=0.5, micro_batch_size=size)
        close(gradient, expected)
        close(metrics["loss"], loss.item())


@scripts("ppo")
@pytest.mark.parametrize("size", [14, 4, 2])
@pytest.mark.parametrize("rows", [ALL_ROWS, SOME_ROWS], ids=["all", "some"])
def test_the_gradient_of_the_critic_is_that_of_equation_7(script, scene, rows, size):
    scene = scene(cliprange_value=0.3, max_grad_norm=1e9, micro_batch_size=size)
    batch = scene.batch
    policy_before = weights(scene.policy)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(NUM_ROWS, 8, generator=generator).double() * batch.mask
    returns = torch.randn(NUM_ROWS, 8, generator=generator).double() * batch.mask
    estimates = made_estimates(script, scene.A, returns, values)
    critic = script.Critic(scene.policy)
    critic.head.data.copy_(torch.linspace(-1, 1, 16))

    V = critic(batch.prompts[rows], batch.tokens[rows])
    mask = batch.mask[rows]
    token_loss = script.value_loss(V, values[rows], returns[rows], mask, 0.3)
    loss = token_loss.sum() / mask.sum()
    expected = gradient_of(loss, critic)
    assert expected.norm() > 0.01
    start = weights(critic)
    optimizer = torch.optim.SGD(critic.parameters(), lr=1.0)
    metrics = script.fit_critic(critic, optimizer, batch, estimates, rows, scene.cfg)
    close(start - weights(critic), expected)
    assert metrics == pytest.approx(
        {"value_loss": loss.item(), "critic_grad_norm": expected.norm().item()})
    assert torch.equal(weights(scene.policy), policy_before)    # it is another model


# ---- dpo.py ----------------------------------------------------------------------------------

def plain_dpo_loss(scene, chosen, rejected):
    """The mean of L of dpo.py as it stands."""
    cfg = scene.cfg
    batch = scene.batch
    logps, _ = scene.script.score(scene.policy, batch.prompts, batch.tokens, cfg.temperature)
    h = ((logps - scene.ref_logps()) * batch.mask).sum(dim=1)           # (B,)
    M = h[chosen] - h[rejected]
    if cfg.loss_type == "ipo":
        losses = (M - 1 / (2 * cfg.beta)) ** 2
    elif cfg.loss_type == "hinge":
        losses = (1 - cfg.beta * M).clamp(min=0)
    else:
        e = cfg.label_smoothing
        right_order = (cfg.beta * M).sigmoid()
        losses = -(1 - e) * right_order.log() - e * (1 - right_order).log()
    return losses.mean()


@scripts("dpo")
@pytest.mark.parametrize("pairs", [slice(None), slice(1, 4)], ids=["all", "some"])
@pytest.mark.parametrize("loss_type, label_smoothing", [
    ("sigmoid", 0.0), ("sigmoid", 0.1), ("ipo", 0.0), ("hinge", 0.0)])
def test_the_gradient_of_dpo_is_that_of_its_loss(
        script, scene, loss_type, label_smoothing, pairs):
    scene = scene(loss_type=loss_type, label_smoothing=label_smoothing, beta=0.3)
    chosen, rejected = script.preferences(scene.A.view(7, 2))
    assert len(chosen) >= 6
    chosen = chosen[pairs]
    rejected = rejected[pairs]
    loss = plain_dpo_loss(scene, chosen, rejected)
    expected = gradient_of(loss, scene.policy)
    assert expected.norm() > 0.01
    for size in (14, 6, 4, 2, 1):
        cfg = dataclasses.replace(scene.cfg, micro_batch_size=size)
        clear_gradients(scene.policy)
        metrics = script.backward(
            scene.policy, scene.reference, scene.batch, chosen, rejected, cfg)
        close(gradients(scene.policy), expected)
        close(metrics["loss"], loss.item())
