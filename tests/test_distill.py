"""Test examples/distill.py: its losses and their gradients against an enumeration of all outputs of
a small student, an update against its equation, and whole runs. test_resume.py tests a resumed run.
"""
import importlib

import pytest
import torch
from conftest import TINY, close, gradient, ones, randn, scripts
from small_runs import SMALL, arguments, changed_weights, load, read_summary, steps
from update_scenes import gradient_of, gradients

distill = importlib.import_module("examples.distill")
FOUR = [4, 5, 6, 7]             # the tokens that the small policies sample


def config(**flags):
    return distill.Config(**(TINY | flags))


def expected_divergence(p, t, beta):
    """Compute D_t from probabilities (..., V). -> (...)"""
    if beta == 0:
        return (t * (t / p).log()).sum(dim=-1)
    if beta == 1:
        return (p * (p / t).log()).sum(dim=-1)
    m = beta * t + (1 - beta) * p
    return (beta * t * (t / m).log() + (1 - beta) * p * (p / m).log()).sum(dim=-1)


def top(log_p, log_t, k, **how):
    """Compute log pi and log pi_T of the teacher's k most likely tokens, and of the rest."""
    S = log_t.topk(k).indices
    return [distill.events(x, S, **how) for x in (log_p, log_t)]


def events(p, t, k):
    """Add up all but the teacher's k most likely tokens. (..., V) each -> (..., k + 1) each"""
    order = t.argsort(dim=-1, descending=True)
    p, t = p.gather(-1, order), t.gather(-1, order)
    return [torch.cat([x[..., :k], x[..., k:].sum(dim=-1, keepdim=True)], dim=-1) for x in (p, t)]


# ---- the loss of a token ---------------------------------------------------------------------

@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_events_are_the_teachers_likely_tokens_and_the_rest(beta):
    """A rest of one token loses nothing, and a larger rest can only hide differences."""
    log_p, log_t = randn(2, 4, 9).log_softmax(dim=-1), randn(2, 4, 9, seed=1).log_softmax(dim=-1)
    full = distill.divergence(log_p, log_t, beta)
    close(distill.divergence(*top(log_p, log_t, 8), beta), full)
    found = [distill.divergence(*top(log_p, log_t, k), beta) for k in range(1, 9)]
    assert all((one < other + 1e-12).all() for one, other in zip(found, found[1:]))
    p, t = events(log_p.exp(), log_t.exp(), 3)
    close(top(log_p, log_t, 3, add_tail=False)[0], p[..., :3].log())
    close(found[2], expected_divergence(p, t, beta))


# ---- the mean gradient, by enumeration -------------------------------------------------------

class Outputs:
    """All 64 outputs of three tokens that a small student can sample, and its teacher."""

    def __init__(self, random_table, **flags):
        self.cfg = config(temperature=0.7, **flags)
        self.student = random_table(FOUR)
        self.teacher = random_table(FOUR, seed=1)
        self.tokens = torch.cartesian_prod(*[torch.tensor(FOUR)] * 3)           # (64, 3)
        self.prompts = torch.ones(64, 1, dtype=torch.long)
        self.log_p = self.log_probs(self.student)                               # (64, 3, V)
        self.log_t = self.log_probs(self.teacher).detach()                      # (64, 3, V)
        self.logps = self.chosen(self.log_p)                                    # (64, 3)
        self.teacher_logps = self.chosen(self.log_t)                            # (64, 3)
        writer = self.logps if self.cfg.lmbda == 1 else self.teacher_logps
        self.chances = writer.detach().sum(dim=1).exp()                         # (64,)

    def log_probs(self, policy):
        return distill.log_probs(policy, self.prompts, self.tokens, 0.7)

    def chosen(self, log_p):
        return log_p.gather(-1, self.tokens[..., None])[..., 0]

    def mean_gradient(self):
        """Compute the expected gradient of the losses, added up over tokens. -> (V, V)"""
        losses = distill.token_losses(self.log_p, self.log_t, self.tokens, self.logps.detach(),
                                      ones(64, 3), self.cfg)
        return self.gradient((self.chances * losses.sum(dim=1)).sum())

    def gradient(self, loss):
        return gradient(loss, self.student.table)


def at_prefixes(outputs, beta):
    """Compute the mean of the D_t at the prefixes that the outputs have. -> scalar"""
    p, t = (x[..., FOUR].exp() for x in (outputs.log_p, outputs.log_t))
    if outputs.cfg.distillation_mode == "topk_logits":
        p, t = events(p, t, 2)
    return (outputs.chances[:, None] * expected_divergence(p, t, beta)).sum()


def of_outputs(outputs, beta):
    """Compute KL(pi || pi_T) of whole outputs, or with beta 0 the reverse. -> scalar"""
    log_p, log_t = outputs.logps.sum(dim=1), outputs.teacher_logps.sum(dim=1)
    return expected_divergence(log_p.exp(), log_t.exp(), beta)


@pytest.mark.parametrize("flags, exact, beta", [
    ({"beta": 0.0}, at_prefixes, 0), ({"beta": 0.3}, at_prefixes, 0.3), ({}, at_prefixes, 1),
    ({"beta": 0.0, "lmbda": 0.0}, at_prefixes, 0),
    ({"distillation_mode": "topk_logits", "distillation_topk": 2}, at_prefixes, 1),
    ({"distillation_mode": "sampled_token"}, at_prefixes, 1),
    ({"distillation_mode": "sampled_token", "gamma": 1.0}, of_outputs, 1),
    ({"distillation_mode": "sampled_token", "beta": 0.0, "lmbda": 0.0}, at_prefixes, 0),
    ({"distillation_mode": "sampled_token", "beta": 0.0, "lmbda": 0.0}, of_outputs, 0)],
    ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_step_goes_down_the_divergence(random_table, flags, exact, beta):
    """At each prefix that was sampled, or between whole outputs."""
    outputs = Outputs(random_table, **flags)
    expected = outputs.gradient(exact(outputs, beta))
    close(outputs.mean_gradient(), expected)
    assert expected.abs().max() > 0.01


def test_the_reward_of_a_sampled_token_is_how_much_likelier_the_teacher_finds_it(random_table):
    """The loss is minus this reward times log pi, and 0 for tokens of an environment."""
    outputs = Outputs(random_table, distillation_mode="sampled_token")
    mask = ones(64, 3)
    mask[:8, 1] = 0
    old_logps = outputs.logps.detach() - 0.3                    # of an earlier step
    losses = distill.token_losses(
        outputs.log_p, outputs.log_t, outputs.tokens, old_logps, mask, outputs.cfg)
    close(losses, -(outputs.teacher_logps - old_logps) * outputs.logps * mask)


# ---- an update, and runs ---------------------------------------------------------------------

@scripts("reinforce")
@pytest.mark.parametrize("flags", [{"beta": 0.3}, {"distillation_mode": "sampled_token"}], ids=str)
def test_an_update_averages_over_the_tokens_of_the_step(scene, flags):
    """Both models have the temperature that sampled, and the teacher gets no gradient."""
    made = scene()
    policy, teacher, batch, mask = made.policy, made.reference, made.batch, made.batch.mask
    mask[::3, 1] = 0                                    # inserted by an environment
    ids = torch.cat([batch.prompts, batch.tokens], dim=1)[:, :-1]
    log_p, log_t = ((model(ids)[:, -8:] / 0.7).log_softmax(dim=-1) for model in (policy, teacher))
    log_t = log_t.detach()
    losses = expected_divergence(log_p.exp(), log_t.exp(), 0.3)
    if flags != {"beta": 0.3}:
        logps, teacher_logps = (x.gather(-1, batch.tokens[..., None])[..., 0]
                                for x in (log_p, log_t))
        losses = -(teacher_logps - batch.logps) * logps
    loss = (losses * mask).sum() / mask.sum()
    expected = gradient_of(loss, policy)
    kl = expected_divergence(log_p.exp(), log_t.exp(), 1)
    in_S = log_p.exp().gather(-1, log_t.topk(8).indices).sum(dim=-1)
    for size in (3, 32):
        policy.zero_grad()
        found = distill.backward(
            policy, teacher, batch, torch.arange(len(mask)),
            config(temperature=0.7, micro_batch_size=size, num_generations=2, **flags))
        close(gradients(policy), expected)
        means = [(x * mask).sum().item() / mask.sum().item() for x in (losses, kl, in_S)]
        assert list(found.values()) == pytest.approx(means)
    assert all(weight.grad is None for weight in teacher.parameters())


@pytest.fixture
def distilled(tmp_path, monkeypatch):
    """distilled(**flags): a run with a teacher of other sizes, which is made first. -> folder"""
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "max_steps": 0, "output_dir": "teacher"}
    distill.reinforce.main(arguments(SMALL | sizes))

    def run(folder, **flags):
        distill.main(arguments(SMALL | {"teacher": "teacher", "output_dir": folder} | flags))
        return folder
    return run


def test_a_student_becomes_like_its_teacher_whoever_writes(distilled, watch):
    """The teacher stays as it is. Of eight batches, the student writes none, some or all."""
    sizes = watch(distill.reinforce, "sample_batch", lambda policy, *_: policy.embed.embedding_dim)
    for lmbda, beta in ((0.0, 0.0), (0.5, 0.5), (1.0, 1.0)):
        run = distilled(f"run{lmbda}", lmbda=lmbda, beta=beta, max_steps=8, learning_rate=0.01)
        kl = [line["teacher_kl"] for line in steps(run)]
        assert kl[-1] < 0.5 * kl[0]
        own = [line["on_policy"] for line in steps(run)]
        assert lmbda == 0.5 and 0 < sum(own) < 8 or set(own) == {lmbda}
        assert [size == 32 for size in sizes[-8:]] == own       # the teacher has 16
        saved = load(f"{run}/checkpoint.pt")
        assert not changed_weights(saved["teacher"], load("teacher/checkpoint.pt")["policy"])
        assert read_summary(run)["teacher"]["hidden_size"] == 16
