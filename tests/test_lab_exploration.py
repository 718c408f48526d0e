"""lab/exploration.py: how far the clip lets a token rise, and what the verdicts follow from."""
import pytest
import torch

import grpo
from lab import exploration
from lab.entry import CONTRADICTED, NOT_SHOWN, SHOWN

# ---- exact -----------------------------------------------------------------------------------

@pytest.mark.parametrize("epsilon_high", [0.2, 0.28])
@pytest.mark.parametrize("p", [0.01, 0.3])
def test_the_clip_stops_a_token_at_its_bound(p, epsilon_high):
    [after] = exploration.highest([p], epsilon_high, steps=100)
    assert (1 + epsilon_high) * p < after < (1 + epsilon_high) * p * 1.011


def test_without_an_upper_clip_a_rare_token_goes_on_rising():
    [after] = exploration.highest([0.01], 1e9, steps=300)
    assert after > 0.04


def test_no_clip_stops_a_likely_token():
    clipped = exploration.highest([0.9], 0.2, steps=300)
    assert clipped == exploration.highest([0.9], 1e9, steps=300)
    assert clipped[0] > 0.92


def test_tokens_do_not_push_each_other():
    assert exploration.highest([0.1, 0.5], 0.2, steps=50) == [
        *exploration.highest([0.1], 0.2, steps=50), *exploration.highest([0.5], 0.2, steps=50)]


def test_the_gradient_ends_just_above_the_bound():
    """In one step of 1.2 a token is at the bound of .2 or has left that of .1."""
    old_logps = torch.tensor([[0.05]], dtype=torch.float64).log()
    one = torch.ones(1, dtype=torch.float64)
    for epsilon_high, moves in ((0.1, False), (0.21, True)):
        logps = (old_logps + torch.log(torch.tensor(1.2))).requires_grad_()
        losses = grpo.policy_loss(logps, old_logps, one, one[:, None], epsilon_high=epsilon_high)
        losses.sum().backward()
        assert bool(logps.grad != 0) == moves


# ---- what is kept, and the verdicts ----------------------------------------------------------

def test_late_entropy_is_of_the_second_half_and_accuracy_of_all_steps():
    summary = {"trained": {"pass@1": 0.1234567, "pass@8": 0.5, "problems": 7}}
    kept = exploration.outcome(summary, [4.0, 3.0, 2.0, 1.0], [0.0, 0.0, 1.0, 1.0])
    assert kept["late entropy"] == 1.5
    assert kept["mean accuracy"] == 0.5
    assert kept["pass@1"] == 0.12346
    assert kept["entropy"] == [4.0, 3.0, 2.0, 1.0]
    assert kept["accuracy"] == [0.0, 0.0, 1.0, 1.0]
    assert kept["problems"] == 7


def test_of_an_odd_number_of_steps_the_middle_one_is_late():
    summary = {"trained": {"pass@1": 1, "pass@8": 1, "problems": 7}}
    assert exploration.outcome(summary, [9.0, 3.0, 1.0], [1.0] * 3)["late entropy"] == 2


BOUNDS = {"eps_high .2": [0.0121, 0.98], "eps_high .28": [0.0129, 0.98],
          "no upper clip": [0.99, 0.98]}


@pytest.mark.parametrize("change", [
    {"eps_high .2": [0.02, 0.98]}, {"eps_high .28": [0.0121, 0.98]},
    {"eps_high .28": [0.0125, 0.98]}, {"eps_high .2": [0.0121, 0.95]}])
def test_rare_tokens_are_held_back_only_if_the_bound_is_met_and_likely_ones_rise(change):
    assert exploration.holds_back_the_rare(BOUNDS)
    assert not exploration.holds_back_the_rare(BOUNDS | change)


def made_up(**better):
    """What could have been found: the settings named in `better` have more of all quantities."""
    found = {"highest": BOUNDS}
    for task in exploration.TASKS:
        found[task] = {}
        for name in exploration.SETTINGS:
            runs = [{"problems": 7, "entropy": [0.2, 0.1], "accuracy": [0.1, 0.2]}
                    | dict.fromkeys(exploration.QUANTITIES, seed + better.get(name, 0))
                    for seed in (0.1, 0.5, 0.3)]
            found[task][name] = runs
    return found


def verdicts(found):
    return [claim.verdict for claim in exploration.claims(found)]


def test_a_setting_with_more_than_the_clip_of_2_shows_what_is_claimed():
    others = [name for name in exploration.SETTINGS if name != "eps_high .2"]
    assert set(verdicts(made_up(**dict.fromkeys(others, 0.05)))) == {SHOWN}
    assert verdicts(made_up(**dict.fromkeys(others, -0.05)))[1:] == 9 * [CONTRADICTED]
    assert verdicts(made_up())[1:] == 9 * [NOT_SHOWN]


def test_each_claim_looks_at_its_own_task_setting_and_quantity():
    for number, (_, task, name, quantity) in enumerate(exploration.CLAIMS, start=1):
        found = made_up()
        for run in found[task][name]:
            run[quantity] += 0.01
        expected = 9 * [NOT_SHOWN]
        expected[number - 1] = SHOWN
        assert verdicts(found)[1:] == expected


def test_a_bound_that_is_not_met_is_not_shown():
    found = made_up() | {"highest": BOUNDS | {"eps_high .2": [0.5, 0.98]}}
    assert verdicts(found)[0] == NOT_SHOWN


def test_tables_have_a_row_for_each_setting():
    found = made_up()
    found["highest"] = dict.fromkeys(found["highest"], [0.5] * len(exploration.PROBABILITIES))
    for heads, rows in exploration.tables(found):
        assert {len(row) for row in rows} == {len(heads)}
    assert "7 of arithmetic and 7 of gridworld" in exploration.note(found)
