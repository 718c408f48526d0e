"""lab/trust.py: its arithmetic and its verdicts; and what its trust regions do, in small."""
import pytest
import torch
from conftest import f64

import ppo
from lab import entry, trust

CLAIMS = ["at most max_kl", "penalty", "samples", "seconds", "larger KL", "lower reward"]


# ---- the regions, exactly --------------------------------------------------------------------

def mean_kl(old, new):
    """KL(old, new), mean over the states."""
    return (old.softmax(-1) * (old.log_softmax(-1) - new.log_softmax(-1))).sum(-1).mean()


@pytest.fixture
def states():
    """Logits of 6 states (6, 5), an action of each, and its advantage."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5, generator=generator).double()
    A = 3 * torch.randn(6, generator=generator).double()
    return logits, torch.arange(6) % 5, A


def test_no_step_of_trpo_leaves_its_region(states):
    logits, actions, A = states
    weights = logits.clone().requires_grad_()
    for _ in range(20):
        old = weights.detach().clone()

        def objective(old=old):
            log_rho = (weights.log_softmax(-1) - old.log_softmax(-1))[torch.arange(6), actions]
            return (log_rho.exp() * A).mean(), mean_kl(old, weights)

        metrics = ppo.trpo_step([weights], objective, max_kl=trust.MAX_KL, damping=0.0)
        assert 0 < metrics["policy_kl"] <= trust.MAX_KL
        assert mean_kl(old, weights).item() == pytest.approx(metrics["policy_kl"])


def test_passes_over_one_batch_go_further_without_the_clip(states):
    logits, actions, A = states
    distances = []
    for epsilon in (0.2, 1e9):
        weights = logits.clone().requires_grad_()
        old_logps = logits.log_softmax(-1)[torch.arange(6), actions]
        for _ in range(30):
            logps = weights.log_softmax(-1)[torch.arange(6), actions]
            loss = ppo.policy_loss(logps[:, None], old_logps[:, None], A, f64([[1]] * 6),
                                   epsilon, epsilon).mean()
            [gradient] = torch.autograd.grad(loss, [weights])
            weights.data -= 0.5 * gradient
        distances.append(mean_kl(logits, weights).item())
    assert distances[1] > 5 * distances[0]


@pytest.mark.parametrize("name", trust.VARIANTS)
def test_the_flags_of_the_runs_are_accepted(name):
    script, *flags = trust.VARIANTS[name]
    assert script == "ppo.py"
    cfg = ppo.common.parse_flags(ppo.Config, [str(flag) for flag in flags])
    assert (cfg.max_steps, cfg.num_iterations) == (trust.STEPS, 4)
    assert cfg.trust_region == {"penalty": "penalty", "TRPO": "trpo"}.get(name, "clip")


# ---- the numbers -----------------------------------------------------------------------------

def test_the_level_is_reached_by_the_first_step_that_has_it_or_never():
    assert trust.steps_to([0.3, 0.8, 0.7], 0.8) == 2
    assert trust.steps_to([0.9, 0.1], 0.8) == 1
    assert trust.steps_to([0.3, 0.79], 0.8) == 3


def found_with(**changes):
    """What would be found if four runs of three seeds were alike, but for {region: (rewards, KLs,
    seconds)} of the first seed; those of the others are a little higher."""
    found = {"reward": {}, "policy_kl": {}, "seconds_a_step": {}}
    for name in trust.VARIANTS:
        same = ([0.3, 0.6, 0.8], [0.001, 0.004, 0.002], 2.0)
        rewards, kls, seconds = changes.get(name.replace(" ", "_"), same)
        found["reward"][name] = [[value + seed / 100 for value in rewards] for seed in range(3)]
        found["policy_kl"][name] = [[value + seed / 1000 for value in kls] for seed in range(3)]
        found["seconds_a_step"][name] = seconds
    return found


def verdicts(**changes):
    return {short: claim.verdict
            for short, claim in zip(CLAIMS, trust.claims(found_with(**changes)), strict=True)}


def test_what_is_compared_are_numbers_of_each_seed():
    found = trust.by_seed(found_with(), "clip")
    assert found["mean reward"] == pytest.approx([1.7 / 3, 1.7 / 3 + 0.01, 1.7 / 3 + 0.02])
    assert found["largest KL"] == pytest.approx([0.004, 0.005, 0.006])
    assert found["mean KL"][0] == pytest.approx(0.007 / 3)
    assert found["steps to the level"] == [3, 3, 3]
    assert found["seconds to the level"] == [6, 6, 6]


def test_the_reward_at_the_end_is_that_of_the_last_five_steps():
    rewards = [0.0, 0.5, 0.5, 0.5, 0.5, 1.0]
    found = trust.by_seed(found_with(clip=(rewards, [0.001], 1.0)), "clip")
    assert found["reward of the last 5 steps"][0] == pytest.approx(0.6)


def test_equal_runs_show_nothing_but_the_bound():
    assert list(verdicts().values()) == [entry.SHOWN] + [entry.NOT_SHOWN] * 5


def test_one_update_of_one_seed_contradicts_the_bound():
    same = [0.3, 0.6, 0.8]
    assert verdicts(TRPO=(same, [0.002, 0.008], 2.0))["at most max_kl"] == entry.SHOWN
    found = verdicts(TRPO=(same, [0.002, 0.0081], 2.0))         # of the last seed 0.0101
    assert found["at most max_kl"] == entry.CONTRADICTED


FAST = ([0.5, 0.9, 0.9], [0.1, 0.2, 0.1], 1.0)
SLOW = ([0.1, 0.2, 0.3], [0.0, 0.001, 0.0], 9.0)


def test_a_clip_that_learns_faster_and_goes_further_says_so():
    assert list(verdicts(clip=FAST).values()) == [entry.SHOWN] * 4 + [
        entry.CONTRADICTED, entry.SHOWN]


def test_a_clip_that_learns_more_slowly_and_stays_nearer_says_so():
    assert list(verdicts(clip=SLOW).values()) == [entry.SHOWN] + [entry.CONTRADICTED] * 3 + [
        entry.SHOWN, entry.CONTRADICTED]


def test_each_claim_looks_at_the_region_that_it_names():
    assert [name for name, verdict in verdicts(penalty=SLOW).items()
            if verdict != entry.NOT_SHOWN] == ["at most max_kl", "penalty"]
    assert [name for name, verdict in verdicts(TRPO=SLOW).items()
            if verdict != entry.NOT_SHOWN] == ["at most max_kl", "samples", "seconds"]
    changed = verdicts(no_bound=SLOW)
    assert changed["larger KL"] == entry.CONTRADICTED
    assert changed["lower reward"] == entry.SHOWN
    assert changed["penalty"] == changed["samples"] == changed["seconds"] == entry.NOT_SHOWN


def test_steps_that_take_longer_cost_seconds_and_no_samples():
    found = verdicts(TRPO=([0.3, 0.6, 0.8], [0.001, 0.004, 0.002], 2.1))
    assert (found["seconds"], found["samples"]) == (entry.SHOWN, entry.NOT_SHOWN)


def test_the_table_has_a_row_for_each_region_and_a_cell_for_each_head():
    [(heads, rows)] = trust.tables(found_with(TRPO=SLOW))
    assert [row[0] for row in rows] == list(trust.VARIANTS)
    assert {len(row) for row in rows} == {len(heads)}
    assert dict(zip(heads, rows[2]))["seconds a step"] == "9.00"
    assert dict(zip(heads, rows[2]))["steps to the level"] == "4.0"


# ---- what is measured ------------------------------------------------------------------------

def test_what_is_measured_is_of_each_variant_and_seed(monkeypatch):
    def run_all(variants, seeds, metrics):
        return {name: [{metric: [name, seed, metric] for metric in metrics} for seed in seeds]
                for name in variants}

    monkeypatch.setattr(trust, "run_all", run_all)
    monkeypatch.setattr(trust, "seconds_a_step", lambda variants, seed: [*variants, seed])
    found = trust.measure([5, 6])
    assert found["reward"]["clip"] == [["clip", 5, "reward"], ["clip", 6, "reward"]]
    assert found["policy_kl"]["TRPO"][1] == ["TRPO", 6, "policy_kl"]
    assert found["seconds_a_step"] == [*trust.VARIANTS, 5]
