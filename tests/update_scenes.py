"""What tests of an update start from: a scene with a ragged batch, batches made by hand, and one
way to call backward and update of every script. No tests."""
import copy
import dataclasses
from types import ModuleType

import pytest
import torch
from conftest import f64

import common

NUM_ROWS = 14           # of the scene's batch: seven groups of two
ADVANTAGES = [1.5, 0, -1, 0.3, 0, 0, 2, -0.7, 0.1, -2, 0, 1, -0.4, 0.8]


def weights(model):
    """All weights of a model in one row."""
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def gradients(model):
    """What backward has left in a model, in one row."""
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def gradient_of(loss, model):
    """The gradient of a loss, in one row; leaves nothing in the model."""
    found = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in found])


def clear_gradients(model):
    """Set all gradients to zero; before, there may have been none."""
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)


def shift(model, size, generator):
    """Move all weights of a model by random amounts."""
    for weight in model.parameters():
        weight.data += size * torch.randn(weight.shape, generator=generator).to(weight)


def as_advantages(script, A, mask):
    """Advantages (B,) as the script's update takes them: for each token, (B, T), but in dpo.py."""
    return A if script.__name__ == "dpo" else A[:, None] * mask


def reference_logps(script, reference, batch, cfg):
    """The log-probs (B, T) that a loss with a KL needs, as `update` computes them."""
    with torch.no_grad():
        return script.score(reference, batch.prompts, batch.tokens, cfg.temperature)[0]


def made_batch(script, prompts, tokens, mask, logps, G=1, rewards=None, pass_rates=None):
    """A batch of which all is known: a row for each prompt, in groups of G."""
    tokens = torch.tensor(tokens)
    lengths = mask.sum(dim=1).long()
    rollout = common.Rollout(tokens, mask, logps * mask, 0.5 * mask, lengths)
    rewards = torch.zeros(len(tokens) // G, G) if rewards is None else rewards
    return common.Batch(
        **vars(rollout), problems=[common.Problem("1=", "1")] * len(tokens),
        prompts=torch.tensor(prompts), texts=script.completion_texts(rollout),
        verdicts=rewards.flatten().tolist(), rewards=rewards, is_correct=rewards == 1,
        is_truncated=(tokens != script.EOS).all(dim=1), pass_rates=pass_rates or {})


def made_estimates(script, advantages, returns, values):
    """The Advantages of ppo.py that a critic and a policy are to learn from, (B, T) each."""
    return script.Advantages(
        advantages=advantages, returns=returns, values=values, kl=0.0, explained_variance=0.25)


@dataclasses.dataclass
class Scene:
    """A policy and what it is to learn from, in float64."""
    script: ModuleType
    cfg: common.Config
    policy: torch.nn.Module
    reference: torch.nn.Module      # some way off
    batch: common.Batch             # ragged rows, sampled by an older policy
    A: torch.Tensor                 # (B,) or (B, T), with zeros among them

    def ref_logps(self):
        return reference_logps(self.script, self.reference, self.batch, self.cfg)

    def backward(self, rows, entropy_coef=0.0, A=None, penalty_coef=0.5, **changes):
        """What one optimizer step computes; in dpo.py over the pairs that the rewards of the batch
        give, whatever the rows. -> metrics, gradient"""
        cfg = dataclasses.replace(self.cfg, **changes)
        A = self.A if A is None else A
        name = self.script.__name__
        clear_gradients(self.policy)
        if name == "reinforce":
            args = [self.batch, A, rows, cfg, entropy_coef]
        elif name == "ppo":
            args = [self.batch, A, rows, cfg, entropy_coef, penalty_coef]
        elif name == "dpo":
            pairs = self.script.preferences(self.batch.rewards)
            args = [self.reference, self.batch, *pairs, cfg]
        else:
            args = [self.batch, self.ref_logps(), A, rows, cfg, entropy_coef]
        metrics = self.script.backward(self.policy, *args)
        return metrics, gradients(self.policy)

    def update(self, optimizer=None, step=0, A=None, **changes):
        """One update of the policy, by plain gradient descent if there is no optimizer. -> metrics
        """
        cfg = dataclasses.replace(self.cfg, **changes)
        A = self.A if A is None else A
        optimizer = optimizer or torch.optim.SGD(self.policy.parameters())
        update = {"ppo": update_ppo, "dpo": update_dpo}.get(self.script.__name__, update_plainly)
        return update(self, optimizer, A, cfg, step)


def update_plainly(scene, optimizer, A, cfg, step):
    return scene.script.update(
        scene.policy, scene.reference, optimizer, scene.batch, A, cfg, step)


def update_ppo(scene, optimizer, A, cfg, step):
    """PPO's update, with a critic of its own."""
    script = scene.script
    critic = script.Critic(script.GPT(cfg)).double()
    mask = scene.batch.mask
    estimates = made_estimates(script, A, returns=mask, values=0 * mask)
    critic_optimizer = torch.optim.SGD(critic.parameters())
    return script.update(scene.policy, critic, optimizer, critic_optimizer, scene.batch, estimates,
                         cfg, step, cfg.penalty_coef)


def update_dpo(scene, optimizer, A, cfg, step):
    """DPO's update, on the pairs that the advantages, taken for rewards, give."""
    chosen, rejected = scene.script.preferences(A.view(cfg.num_prompts, cfg.num_generations))
    return scene.script.update(
        scene.policy, scene.reference, optimizer, scene.batch, chosen, rejected, cfg, step)


@pytest.fixture
def scene(script, config, talker, load_task):
    """scene(**changes): a Scene of NUM_ROWS rows."""
    def make(**changes):
        flags = {"num_prompts": 7, "num_generations": 2, "temperature": 0.7}
        if script.__name__ in ("ppo", "grpo", "gspo"):
            flags |= {"epsilon": 0.2, "epsilon_high": 0.28}
        cfg = config(**(flags | changes))
        policy = talker(cfg).double()
        reference = copy.deepcopy(policy)
        generator = torch.Generator().manual_seed(0)
        shift(reference, 0.1, generator)
        batch = script.sample_batch(policy, load_task(cfg), cfg, 0)
        assert len(set(batch.lengths.tolist())) > 3             # else it tests little
        noise = torch.randn(NUM_ROWS, 8, generator=generator).double()
        batch.logps.add_(0.4 * noise * batch.mask)
        scale = 1 + torch.rand(NUM_ROWS, 8, generator=generator)
        A = as_advantages(script, f64(ADVANTAGES), batch.mask * scale)
        return Scene(script, cfg, policy, reference, batch, A)
    return make


@pytest.fixture
def fresh_scene(script, config, talker, load_task):
    """fresh_scene(**changes): a Scene whose policy is the reference and has just sampled the batch.
    Advantages go from -1 to 1."""
    def make(**changes):
        cfg = config(**({"temperature": 0.7, "num_iterations": 1} | changes))
        policy = talker(cfg).double()
        batch = script.sample_batch(policy, load_task(cfg), cfg, 0)
        A = torch.linspace(-1, 1, len(batch.texts), dtype=torch.float64)
        A = as_advantages(script, A, batch.mask)
        return Scene(script, cfg, policy, copy.deepcopy(policy), batch, A)
    return make


@pytest.fixture
def spy(script, monkeypatch):
    """spy(look) -> a list of look(args, metrics), one for each optimizer step of an update."""
    def install(look):
        backward = script.backward
        seen = []

        def spied(*args):
            metrics = backward(*args)
            seen.append(look(args, dict(metrics)))
            return metrics
        monkeypatch.setattr(script, "backward", spied)
        return seen
    return install
