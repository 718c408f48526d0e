"""reinforce.py --teacher: what a teacher's log-probs as rewards teach, by enumeration of all that a
small policy can say, and what a run makes of another run's policy."""
import functools
import shutil

import pytest
import torch
from conftest import scripts
from small_runs import (
    arguments,
    at_work,
    changed_weights,
    difference,
    load,
    outcome,
    policy_of,
    resume,
    steps,
)
from update_scenes import made_batch

pytestmark = [pytest.mark.quick, scripts("reinforce")]
close = functools.partial(torch.testing.assert_close, atol=1e-10, rtol=1e-10)
FOUR = [4, 5, 6, 7]             # the tokens that the small policies know


class Outputs:
    """All 64 outputs of three tokens of a policy, with its teacher; the second token of the first
    eight was inserted by an environment."""

    def __init__(self, script, bigram):
        generator = torch.Generator().manual_seed(0)
        V = script.VOCAB_SIZE

        def small_policy():
            table = torch.full((V, V), -900.0, dtype=torch.float64)
            table[:, FOUR] = torch.randn(V, 4, generator=generator).double()
            return bigram(table)
        self.policy = small_policy()
        self.teacher = small_policy()
        self.tokens = torch.cartesian_prod(*[torch.tensor(FOUR)] * 3)           # (64, 3)
        self.prompts = torch.ones(64, 1, dtype=torch.long)
        self.mask = torch.ones(64, 3, dtype=torch.float64)
        self.script = script

    def log_p(self, model):
        """Of every next token, at each place. (64, 3, V)"""
        ids = torch.cat([self.prompts, self.tokens], dim=1)
        return model.table[ids[:, :-1]].log_softmax(dim=-1)

    def logps(self, model):
        return self.log_p(model).gather(-1, self.tokens[..., None])[..., 0]     # (64, 3)

    def gradient(self, loss):
        return torch.autograd.grad(loss, self.policy.table)[0]

    def mean_gradient(self, cfg):
        """That of the loss of reinforce.py, over samples of the policy."""
        logps = self.logps(self.policy)
        batch = made_batch(self.script, self.prompts.tolist(), self.tokens.tolist(), self.mask,
                           logps.detach(), 2)
        rewards = self.script.token_rewards(self.teacher, batch, cfg)
        A = self.script.compute_advantages(self.policy, self.policy, batch, rewards, cfg)
        losses = self.script.policy_loss(logps, A, self.mask).sum(dim=1)        # (64,)
        return self.gradient((logps.detach().sum(dim=1).exp() * losses).sum())


@pytest.fixture
def outputs(script, bigram):
    return Outputs(script, bigram)


def test_with_gamma_0_a_step_goes_down_the_kl_to_the_teacher_at_each_prefix(outputs, config):
    """Although the prefixes, too, depend on the policy, which the gradient leaves out."""
    found = outputs.mean_gradient(config(view="token", gamma=0.0, num_prompts=32, teacher="t"))
    log_p = outputs.log_p(outputs.policy)
    log_t = outputs.log_p(outputs.teacher).detach()
    kl = (log_p.exp() * (log_p - log_t))[..., FOUR].sum(dim=-1)                 # (64, 3)
    chances = outputs.logps(outputs.policy).detach().sum(dim=1).exp()
    close(found, outputs.gradient((chances[:, None] * kl).sum()))


@pytest.mark.parametrize("view", ["sequence", "token"])
@pytest.mark.parametrize("baseline", ["none", "batch"])
def test_with_gamma_1_a_step_goes_down_the_kl_of_whole_outputs(outputs, config, baseline, view):
    """A baseline that is the same for all outputs changes nothing."""
    found = outputs.mean_gradient(
        config(view=view, gamma=1.0, num_prompts=32, teacher="t", baseline=baseline))
    logps = outputs.logps(outputs.policy).sum(dim=1)
    teacher_logps = outputs.logps(outputs.teacher).detach().sum(dim=1)
    kl = (logps.exp() * (logps - teacher_logps)).sum()
    close(found, outputs.gradient(kl))


def test_the_reward_of_a_token_is_how_much_likelier_the_teacher_finds_it(
        script, outputs, config):
    logps = outputs.logps(outputs.policy).detach()
    mask = outputs.mask.clone()
    mask[:8, 1] = 0
    batch = made_batch(
        script, outputs.prompts.tolist(), outputs.tokens.tolist(), mask, logps, 2)
    found = script.token_rewards(outputs.teacher, batch, config(num_prompts=32))
    close(found, (outputs.logps(outputs.teacher).detach() - logps) * mask)
    assert not found.requires_grad
    warm = script.token_rewards(outputs.teacher, batch, config(num_prompts=32, temperature=2.0))
    log_p = (outputs.teacher.table[torch.cat([outputs.prompts, outputs.tokens], 1)[:, :-1]] / 2)
    warm_logps = log_p.log_softmax(dim=-1).gather(-1, outputs.tokens[..., None])[..., 0]
    close(warm, (warm_logps.detach() - logps) * mask)


# ---- runs ------------------------------------------------------------------------------------

@pytest.fixture
def teacher(whole):
    """The folder of a run that has learned something."""
    return whole


DISTIL = {"view": "token", "gamma": 0.0, "max_steps": 6, "learning_rate": 0.003}


def test_a_student_gets_closer_to_its_teacher(new_run, teacher, at_work_folder):
    """With seeds 0 to 4, the last four batches have 0.02 to 0.13 times the KL of the first."""
    folder = new_run(teacher=teacher, view="token", gamma=0.0, max_steps=12, num_prompts=32,
                     learning_rate=0.001)
    found = [line["teacher_kl"] for line in steps(folder)]
    assert found[0] > 0.01
    assert abs(sum(found[-4:]) / 4) < 0.3 * found[0]


def test_the_teacher_is_the_policy_of_its_run_and_the_student_begins_as_the_base(
        new_run, teacher, at_work_folder):
    folder = new_run(teacher=teacher, max_steps=1)
    saved = load(folder / "checkpoint.pt")
    for name, weight in policy_of(teacher).items():
        assert torch.equal(saved["teacher"][name], weight)
    assert not changed_weights(load(folder / "base.pt"), load(teacher / "base.pt"))


def test_a_run_whose_teacher_is_gone_goes_on_with_the_one_that_it_has_saved(
        new_run, teacher, tmp_path, at_work_folder):
    copied = tmp_path / "teacher"
    shutil.copytree(teacher, copied)
    six = new_run(teacher=copied, **DISTIL)
    three = new_run(teacher=copied, **DISTIL | {"max_steps": 3})
    shutil.rmtree(copied)
    resume(three, max_steps=6)
    assert not difference(outcome(three), outcome(six))


@pytest.mark.parametrize("flags, words", [
    ({"teacher": "nobody"}, "--teacher nobody: "),
    ({"teacher": "nobody", "reward": "accuracy"},
     "--reward accuracy: does nothing with --teacher nobody"),
    ({"teacher": "nobody", "method": "rejection"},
     "--method rejection: does nothing with --teacher nobody")], ids=str)
def test_a_teacher_that_cannot_work_gets_one_line_and_nothing_is_written(
        script, tmp_path, capsys, flags, words):
    with at_work(tmp_path), pytest.raises(SystemExit) as stopped:
        script.main(arguments(flags))
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1
    assert not list(tmp_path.iterdir())
