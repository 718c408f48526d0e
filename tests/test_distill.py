"""Test examples/distill.py: mean gradients against an enumeration of all outputs of a small
student, an update against its equation, and whole runs. test_vectors.py tests the losses, and
test_resume.py a resumed run.
"""
import importlib
from pathlib import Path

import pytest
import torch
from conftest import TINY, close, gradient, ones, scripts
from small_runs import SMALL, arguments, changed_weights, load, read_summary, steps
from update_scenes import gradient_of, gradients

import common
import plumbing
import reinforce

distill = importlib.import_module("examples.distill")
FOUR = [4, 5, 6, 7]             # the tokens that the small policies sample


def config(**flags):
    return distill.Config(**(TINY | flags))


def kl(p, q):
    return (p * (p / q).log()).sum(dim=-1)


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


def at_prefixes(outputs):
    """Compute the mean KL at the prefixes that the outputs have. -> scalar"""
    p, t = (x[..., FOUR].exp() for x in (outputs.log_p, outputs.log_t))
    D = kl(p, t) if outputs.cfg.beta else kl(t, p)
    return (outputs.chances[:, None] * D).sum()


def of_outputs(outputs):
    """Compute the KL between whole outputs. -> scalar"""
    p, t = (x.sum(dim=1).exp() for x in (outputs.logps, outputs.teacher_logps))
    return kl(p, t) if outputs.cfg.beta else kl(t, p)


@pytest.mark.parametrize("flags, exact", [
    ({}, at_prefixes), ({"gamma": 1.0}, of_outputs), ({"beta": 0.0, "lmbda": 0.0}, at_prefixes),
    ({"beta": 0.0, "lmbda": 0.0}, of_outputs)],
    ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_sampled_token_goes_down_the_divergence_on_average(random_table, flags, exact):
    """At each prefix that was sampled, or between whole outputs."""
    outputs = Outputs(random_table, distillation_mode="sampled_token", **flags)
    expected = outputs.gradient(exact(outputs))
    close(outputs.mean_gradient(), expected)
    assert expected.abs().max() > 0.01


# ---- an update, and runs ---------------------------------------------------------------------

@scripts("reinforce")
def test_an_update_averages_over_the_tokens_of_the_step(scene):
    """Both models have the temperature that sampled, and the teacher gets no gradient."""
    made = scene()
    policy, teacher, batch, mask = made.policy, made.reference, made.batch, made.batch.mask
    mask[:, 1] = 0                                      # inserted by an environment
    ids = torch.cat([batch.prompts, batch.tokens], dim=1)[:, :-1]
    p, t = ((model(ids)[:, -8:] / 0.7).softmax(dim=-1) for model in (policy, teacher))
    losses = kl(p, t.detach())
    expected = gradient_of((losses * mask).sum() / mask.sum(), policy)
    in_S = p.gather(-1, t.topk(8).indices).sum(dim=-1)
    for size in (3, 32):
        policy.zero_grad()
        found = distill.backward(
            policy, teacher, batch, torch.arange(len(mask)),
            config(temperature=0.7, micro_batch_size=size, num_generations=2))
        close(gradients(policy), expected)
        means = [(x * mask).sum().item() / mask.sum().item() for x in (losses, losses, in_S)]
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


def test_a_run_makes_steps_of_clipped_adamw_without_decay_on_new_batches_and_orders(distilled):
    """The same steps, one after the other, lead to the same weights. The teacher has moved away
    from its base."""
    path = Path("teacher/checkpoint.pt")
    weights = load(path)["policy"]
    plumbing.write(path, {"policy": {name: 1.2 * x for name, x in weights.items()}})
    distilled("run", max_steps=2, num_mini_batches=2, learning_rate=0.05, max_grad_norm=0.01)
    _, flags = plumbing.read_config("run")
    cfg = config(**flags)
    task = common.load_task(cfg, reinforce.verify)
    policy, teacher = reinforce.GPT(cfg), reinforce.GPT(config(**flags | {
        name: plumbing.read_config("teacher")[1][name] for name in common.Base.__annotations__}))
    policy.load_state_dict(load("run/base.pt")["policy"])
    teacher.load_state_dict(load("teacher/checkpoint.pt")["policy"])
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.05, weight_decay=0.0)
    for step in range(2):
        batch = reinforce.sample_batch(policy, task, cfg, step)
        for rows in common.mini_batches(batch, cfg, "shuffle", step):
            policy.zero_grad()
            distill.backward(policy, teacher, batch, rows, cfg)
            assert torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.01) > 0.02
            optimizer.step()
    torch.testing.assert_close(policy.state_dict(), load("run/checkpoint.pt")["policy"],
                               rtol=0, atol=1e-5)
