"""lab/kl.py: its moments, and its verdicts on made-up numbers."""
import functools
import math

import pytest
import torch
from conftest import TINY, f64

import grpo
from lab import kl
from lab.entry import CONTRADICTED, NOT_SHOWN, SHOWN

close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)


# ---- the estimates ---------------------------------------------------------------------------

def test_the_moments_are_those_of_a_coin_worked_out_by_hand():
    """A coin (1/2, 1/2) against (9/10, 1/10), in the one slot that counts."""
    log_p = f64([[[0.5, 0.5], [0.2, 0.8]]]).log()
    log_ref = f64([[[0.9, 0.1], [0.7, 0.3]]]).log()
    found = kl.moments(log_p, log_ref, f64([[1.0, 0.0]]))
    heads, tails = math.log(5 / 9), math.log(5)
    expected = {"k1": (heads, tails), "k2": (heads ** 2 / 2, tails ** 2 / 2),
                "k3": (9 / 5 - 1 + heads, 1 / 5 - 1 + tails)}
    for name, (one, other) in expected.items():
        assert found[name] == pytest.approx([(one + other) / 2, abs(one - other) / 2], abs=1e-6)


def test_the_deviation_of_two_tokens_is_the_root_of_their_mean_variance():
    log_p = f64([[[0.5, 0.5], [0.5, 0.5]]]).log()
    log_ref = f64([[[0.5, 0.5], [0.9, 0.1]]]).log()         # the first token has none
    [_, deviation] = kl.moments(log_p, log_ref, f64([[1.0, 1.0]]))["k1"]
    assert deviation == pytest.approx((math.log(5) - math.log(5 / 9)) / 2 / math.sqrt(2), abs=1e-6)


def test_k3_is_unbiased_at_each_token_that_a_policy_samples_and_wild_where_the_base_is_likelier():
    """A policy that has all but given up what the base says seven times in ten."""
    log_p = f64([[[0.02, 0.98]]]).log()
    log_ref = f64([[[0.7, 0.3]]]).log()
    found = kl.moments(log_p, log_ref, f64([[1.0]]))
    assert found["k1"][0] == found["k3"][0]
    assert found["k3"][1] > 5 * found["k1"][1]
    near = kl.moments(log_p, (log_p.exp() + f64([0.001, -0.001])).log(), f64([[1.0]]))
    assert near["k3"][1] < 0.1 * near["k1"][1]


def test_the_log_probs_of_the_vocabulary_are_those_of_the_tokens_that_were_sampled():
    cfg = grpo.Config(**TINY)
    task = grpo.common.load_task(cfg, grpo.verify)
    policy = grpo.GPT(cfg)
    batch = grpo.sample_batch(policy, task, cfg, 0)
    log_p = kl.log_probs(policy, batch)
    sampled = log_p.gather(-1, batch.tokens[..., None])[..., 0]
    torch.testing.assert_close(sampled.float() * batch.mask, batch.logps * batch.mask)
    close(log_p.exp().sum(dim=-1), torch.ones_like(log_p[..., 0]))


# ---- the page --------------------------------------------------------------------------------

def made_up(**changed):
    """What three seeds might have found: the KL of a run, unless changed, is 0.02 with a penalty
    and 0.06 without, or with k1 in the loss."""
    runs = {}
    for name in kl.variants():
        level = changed.get(name, 0.06 if name.startswith(("none", "k1")) else 0.02)
        if name == "k1 in the reward":
            level = changed.get(name, 0.02)
        values = [[0.0] * 5 + [level + 0.001 * seed] * 5 for seed in range(3)]
        runs[name] = dict.fromkeys(kl.METRICS, values)
    moments = {"k1": [0.1, 0.5], "k2": [0.12, 0.3], "k3": [0.1, changed.get("k3 deviates", 0.2)]}
    return {"runs": runs, "watched": [[moments] * len(kl.WATCHED)] * 3}


def verdicts(found):
    return {claim.text: claim.verdict for claim in kl.claims(found)}


def test_every_claim_has_a_text_of_its_own_and_every_cell_is_one_cell():
    found = made_up()
    assert len(verdicts(found)) == len(kl.claims(found))
    assert not any("|" in claim.text + claim.seen for claim in kl.claims(found))
    for heads, rows in kl.tables(found):
        assert all(len(row) == len(heads) for row in rows)
        assert not any("|" in str(cell) for row in rows for cell in row)


def test_a_penalty_that_holds_the_kl_with_every_seed_is_shown_and_one_that_drives_it_is_not():
    text = "k2 holds the KL below that without"
    assert verdicts(made_up())[text] == SHOWN
    assert verdicts(made_up(k2=0.0605))[text] == CONTRADICTED
    assert verdicts(made_up())["k1 in the reward holds the KL below that without"] == SHOWN
    assert verdicts(made_up(**{"none, REINFORCE": 0.01}))[
        "k1 in the reward holds the KL below that without"] == CONTRADICTED


@pytest.mark.parametrize("level, verdict", [(0.06, SHOWN), (0.055, SHOWN), (0.065, SHOWN),
                                            (0.04, CONTRADICTED), (0.08, CONTRADICTED)])
def test_k1_in_the_loss_does_nothing_if_the_kl_changes_by_less_than_a_fifth_either_way(
        level, verdict):
    assert verdicts(made_up(k1=level))[
        "k1: in the loss, it changes the KL by less than a fifth"] == verdict


def test_the_verdicts_on_deviation_and_accuracy_follow_the_numbers():
    assert verdicts(made_up())["k3 deviates less than k1, steps: 20"] == SHOWN
    found = made_up(**{"k3 deviates": 0.9})
    assert verdicts(found)["k3 deviates less than k1, steps: 20"] == CONTRADICTED
    text = "k3_ratio is more accurate than k3, four passes"
    assert verdicts(made_up(**{"k3_ratio, four passes": 0.5}))[text] == SHOWN
    assert verdicts(made_up(**{"k3, four passes": 0.5}))[text] == CONTRADICTED
    assert verdicts(made_up())[text] == NOT_SHOWN
    assert verdicts(made_up())["the bias of k2 is below a tenth of the KL"] == CONTRADICTED
