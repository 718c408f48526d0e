"""Test examples/distill.py: the loss of a sampled token, an update against its equation, and whole
runs. test_vectors.py tests the other losses, and test_resume.py a resumed run."""
import importlib
from pathlib import Path

import pytest
import torch
from conftest import TINY, close, f64, gradient, load_named, randn, scripts
from small_runs import SMALL, arguments, changed_weights, load, read_summary, steps
from update_scenes import gradient_of, gradients, weights

import common
import plumbing
import reinforce

distill = importlib.import_module("examples.distill")


def config(**flags):
    return distill.Config(**(TINY | flags))


# ---- the loss of a sampled token -------------------------------------------------------------

@pytest.mark.parametrize("flags, returns", [
    ({"gamma": 0.5}, [[1, 0, 4], [3, 0, 0]]),
    ({"beta": 0.0, "lmbda": 0.0}, [[1, 1, 1], [1, 0, 0]])], ids=str)
def test_a_sampled_token_is_paid_by_its_log_ratio_and_those_to_come_or_imitated(flags, returns):
    """The teacher finds the tokens 1, -2, 4 and 3 nats more likely than the student did."""
    log_p = randn(2, 3, 5).log_softmax(dim=-1).requires_grad_()
    tokens = torch.tensor([[0, 1, 2], [3, 4, 4]])
    old_logps = -f64([[1, -2, 4], [3, 9, 9]])
    losses = distill.token_losses(
        log_p, 0 * log_p.detach(), tokens, old_logps, f64([[1, 1, 1], [1, 0, 0]]),
        config(distillation_mode="sampled_token", **flags))
    expected = -f64(returns)[..., None] * torch.nn.functional.one_hot(tokens, 5)
    close(gradient(losses.sum(), log_p), expected)


# ---- a hint ----------------------------------------------------------------------------------

def keyed_batch(made):
    """Give the scene's batch, in groups of two, problems of --task key."""
    problems = common.sample_problems(load_named("key"), 7, 0)
    made.batch.problems = [problem for problem in problems for _ in range(2)]
    made.batch.texts = [f"<think></think><answer> {problem.answer}</answer>{'!' * i}"
                        for i, problem in enumerate(made.batch.problems)]
    made.batch.is_correct = torch.tensor([[i % 2, i % 3 > 0] for i in range(7)]).bool()
    return made.batch


@scripts("reinforce")
@pytest.mark.parametrize("hint", ["answer", "sibling"])
def test_a_teacher_reads_the_hint_as_tokens_before_the_question(scene, hint):
    """A row whose hint is missing has its own prompt."""
    batch = keyed_batch(scene())
    prompts, has_hint = distill.add_hints(load_named("key"), batch, config(
        teacher="self", hint=hint, task="key"))
    expected = [1] * 14 if hint == "answer" else batch.is_correct.flip(1).flatten().tolist()
    assert has_hint.tolist() == expected
    for problem, ids, has in zip(batch.problems, prompts.tolist(), expected):
        text = f"{problem.answer}|{problem.prompt}" if has else problem.prompt
        assert ids == [common.PAD] * (21 - len(text)) + list(text.encode())


@scripts("reinforce")
@pytest.mark.parametrize("flags", [
    {}, {"distillation_mode": "topk_logits", "topk_support": "student"},
    {"distillation_mode": "sampled_token", "teacher_coef": 0.3}], ids=str)
def test_outputs_without_a_hint_have_no_term_of_the_teacher(scene, flags):
    """Their tokens count in N only if a verifier's advantage is added. Both models have the
    temperature that sampled, and a teacher, here another model once, gets no gradient."""
    made = scene()
    batch, policy = keyed_batch(made), made.policy
    teacher = policy if flags else made.reference
    batch.mask[:, 1] = 0                                # inserted by an environment
    cfg = config(teacher="self", hint="sibling", task="key", num_generations=2,
                 temperature=0.7, micro_batch_size=3, **flags)
    hints = prompts, has_hint = distill.add_hints(load_named("key"), batch, cfg)
    A = torch.linspace(-1, 1, 14)[:, None]
    rows = torch.arange(14)
    found = distill.backward(policy, teacher, batch, hints, A, rows, cfg)
    moved = gradients(policy).clone()

    log_p, log_t = (distill.log_probs(model, x, batch.tokens, 0.7)
                    for model, x in ((policy, batch.prompts), (teacher, prompts)))
    log_t = log_t.detach()                              # the live teacher's own weights stand still
    losses = distill.token_losses(log_p, log_t, batch.tokens, batch.logps, batch.mask, cfg,
                                  A * 0, torch.ones(14, 1))
    taught = batch.mask * has_hint[:, None]
    if cfg.teacher_coef > 0:
        logps = log_p.gather(-1, batch.tokens[..., None])[..., 0]
        loss = ((losses * taught).sum() - (A * logps * batch.mask).sum()) / batch.mask.sum()
    else:
        loss = (losses * taught).sum() / taught.sum()
    assert teacher is policy or all(weight.grad is None for weight in teacher.parameters())
    close(moved, gradient_of(loss, policy))
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
    mean_kl = (distill.kl(log_p, log_t) * taught).sum() / taught.sum()
    assert found["teacher_kl"] == pytest.approx(mean_kl.item(), rel=1e-5)
    S = (log_p if cfg.topk_support == "student" else log_t).topk(8, dim=-1).indices
    mass = (log_p.gather(-1, S).exp().sum(dim=-1) * taught).sum() / taught.sum()
    assert found["student_mass"] == pytest.approx(mass.item(), rel=1e-5)
    policy.zero_grad()
    nobody = prompts, torch.zeros(14)
    distill.backward(policy, policy, batch, nobody, A * 0, rows, cfg)
    assert not gradients(policy).any()                  # and no division by zero


# ---- an update, and runs ---------------------------------------------------------------------

@pytest.fixture
def distilled(own_folder):
    """distilled(**flags): a run with a teacher of other sizes, which is made first. -> folder"""
    sizes = {"hidden_size": 16, "base_steps": 50, "max_steps": 0, "output_dir": "teacher"}
    distill.reinforce.main(arguments(SMALL | sizes))

    def run(folder, **flags):
        distill.main(arguments(SMALL | {
            "teacher": "teacher", "output_dir": folder, "eval_steps": 9} | flags))
        return folder
    return run


def test_a_student_becomes_like_its_teacher_whoever_writes(distilled, watch):
    """The teacher stays as it is. Of eight batches, the student writes some."""
    sizes = watch(distill.reinforce, "sample_batch", lambda policy, *_: policy.embed.embedding_dim)
    run = distilled("run", lmbda=0.5, beta=0.5, max_steps=8, learning_rate=0.01)
    kl, own = ([line[name] for line in steps(run)] for name in ("teacher_kl", "on_policy"))
    assert kl[-1] < 0.5 * kl[0] and 0 < sum(own) < 8
    assert [size == 32 for size in sizes[-8:]] == own           # the teacher has 16
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
            hints = batch.prompts, torch.ones(len(batch.mask))
            distill.backward(policy, teacher, batch, hints, 0 * batch.mask[:, :1], rows, cfg)
            assert torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.01) > 0.02
            optimizer.step()
    torch.testing.assert_close(policy.state_dict(), load("run/checkpoint.pt")["policy"],
                               rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["base", "live", "ema"])
def test_a_teacher_is_the_base_or_the_student_itself_or_follows_it(kind, tmp_path, watch):
    seen = watch(distill, "backward", lambda policy, teacher, *_: (
        teacher is policy, weights(policy).clone(), weights(teacher).clone()))
    flags = SMALL | {"task": "key", "teacher": "self", "teacher_model_kind": kind, "max_steps": 2,
                     "num_mini_batches": 2, "output_dir": tmp_path / "run", "learning_rate": 0.01}
    distill.main(arguments(flags | ({"teacher_update_rate": 0.25} if kind == "ema" else {})))
    assert len(seen) == 4 and {is_same for is_same, *_ in seen} == {kind == "live"}
    _, policy, expected = seen[0]
    close(policy, expected)
    for _, policy, teacher in seen[1:]:
        if kind != "base":
            expected = expected.lerp(policy, 1.0 if kind == "live" else 0.25)       # eq. (11)
        close(teacher, expected)
    assert not torch.equal(policy, seen[0][1])
