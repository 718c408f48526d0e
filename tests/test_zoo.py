"""Test examples/zoo.py: its update and its advantages. Its other functions are among the test
vectors."""
import copy
import dataclasses
import functools
import importlib
import typing
from types import SimpleNamespace

import pytest
import torch
from conftest import close, f64
from update_scenes import weights

import engines
import grpo

zoo = importlib.import_module("examples.zoo")
pytestmark = pytest.mark.quick
ADVANTAGES = typing.get_args(typing.get_type_hints(zoo.Config)["advantage"])


# ---- the update ------------------------------------------------------------------------------

def of_zoo(cfg):
    """The loss of a run of zoo.py, and its average."""
    return zoo.chosen_loss(zoo.Config(**dataclasses.asdict(cfg)))


def of_here(cfg):
    """The same loss, as engines/here.py reads it."""
    return engines.load(f"grpo loss_type={cfg.loss_type} epsilon={cfg.epsilon} "
                        f"epsilon_high={cfg.epsilon_high}")


@pytest.mark.parametrize("of_other", [of_zoo, of_here])
@pytest.mark.parametrize("flags", [
    {"loss_type": "dapo", "epsilon": 0.01, "entropy_coef": 0.05, "max_grad_norm": 0.0},
    {"loss_type": "dr_grpo", "beta": 0.3, "kl_estimator": "k3_ratio", "entropy_coef": 0.05},
    {"loss_type": "grpo", "mask_truncated_completions": True, "beta": 0.3}])
def test_with_the_same_loss_an_update_is_that_of_grpo(scene, flags, of_other):
    made = scene(
        num_iterations=2, num_mini_batches=2, micro_batch_size=3, learning_rate=0.5, **flags)
    found = []
    loss, average = of_other(made.cfg)
    other = functools.partial(zoo.update, loss=loss, average=average)
    for update in (grpo.update, other):
        policy = copy.deepcopy(made.policy)
        optimizer = torch.optim.SGD(policy.parameters(), made.cfg.learning_rate)
        metrics = update(
            policy, made.ref_logps(), optimizer, made.batch, made.A, cfg=made.cfg, step=0)
        found.append((metrics, weights(policy)))
    (metrics, end), (other_metrics, other_end) = found
    close(other_end, end)
    assert (end - weights(made.policy)).norm() > 1e-2
    assert other_metrics.keys() == metrics.keys()
    for name in other_metrics:
        assert other_metrics[name] == pytest.approx(metrics[name], rel=1e-10), name


def test_a_step_in_which_all_outputs_are_cut_off_learns_nothing(scene):
    made = scene(loss_type="grpo", mask_truncated_completions=True)
    made.batch.is_truncated[:] = True
    rows = torch.arange(len(made.batch.mask))
    loss, average = of_zoo(made.cfg)
    found = zoo.backward(
        made.policy, made.batch, made.ref_logps(), made.A, rows, made.cfg, loss, average)
    assert {*found.values()} == {0.0}


# ---- advantages ------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ADVANTAGES)
def test_groups_of_equal_rewards_are_replaced_only_where_they_would_give_nothing(name, monkeypatch):
    """The terms of the first group differ, although their sums are equal."""
    terms = torch.tensor([[[0, 0, 1], [0.5] * 3, [1, 0, 0]], [[0, 1, 0], [0.1] * 3, [0] * 3],
                          [[0.7, -0.3, -0.3], [0.1] * 3, [0] * 3]])
    mask = (torch.arange(4) < torch.tensor([1, 2, 3] * 3)[:, None]).float()
    monkeypatch.setattr(zoo, "greedy_rewards", lambda *_: torch.zeros(3, 1))
    task = SimpleNamespace(rows=lambda *_: dict(enumerate(terms)))
    batch = SimpleNamespace(rewards=terms.sum(dim=0), mask=mask)    # two groups of 0.7, then 1 0 0
    cfg = zoo.Config(device="cpu", advantage=name, reward="accuracy+format+length",
                     dynamic_sampling=1)
    A = zoo.advantages(None, task, batch, cfg, 0)
    is_refused = any("--dynamic_sampling" in said for holds, said in cfg.rules() if not holds)
    assert is_refused == A[:6].any()


def test_the_baseline_of_remax_is_the_greedy_output_to_the_same_question(monkeypatch):
    monkeypatch.setattr(zoo.grpo, "complete", lambda policy, task, cfg, problems: problems)
    task = SimpleNamespace(judge=lambda problems, G, step, reward: SimpleNamespace(
        rewards=f64(problems) * (reward is zoo.grpo.reward)))   # that the user may have edited
    batch = SimpleNamespace(problems=[1, 1, 2, 2, 3, 3])
    cfg = zoo.Config(device="cpu", num_prompts=3, num_generations=2)
    close(zoo.greedy_rewards(None, task, batch, cfg, 0), f64([1, 2, 3]))


def test_only_the_tokens_of_the_batch_with_the_highest_entropy_have_advantages():
    """Masked slots have the highest entropy of all."""
    entropy = f64([[0.1, 0.9, 0.3, 5], [0.8, 0.2, 0.7, 0.4], [0, 0.5, 5, 5]])
    mask = f64([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]])
    batch = SimpleNamespace(rewards=f64([[1, 0, 0]]), entropy=entropy, mask=mask)
    cfg = zoo.Config(device="cpu", top_entropy_quantile=0.25)
    A = zoo.advantages(None, None, batch, cfg, 0)
    whole = zoo.estimate(None, None, batch, cfg, 0)
    close(A, whole * f64([[0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]))
    assert whole.shape == (3, 1) and whole.all()


def test_an_output_is_stale_by_the_mean_of_its_tokens():
    x = torch.full((1, 4), 0.3)         # four tokens of 0.3 nats; the bound is 0.5 nats per token
    assert zoo.off_policy_mask(-x, x * 0, -x, x * 0 + 1).any()
