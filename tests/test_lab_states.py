"""lab/states.py: variances of a gradient that is written down in full, and its verdicts."""
import pytest
import torch

from lab import states
from lab.entry import CONTRADICTED, SHOWN

KIND = (1, 3)


def gradient(policy, output, credit):
    """Of an output by the logits of all states, credit[t] being that of its t-th action."""
    blocks = {prefix: torch.zeros(states.ACTIONS).double() for prefix in states.PREFIXES}
    for t, action in enumerate(output):
        p = policy[output[:t]]
        blocks[output[:t]] = credit[t] * (torch.eye(states.ACTIONS).double()[action] - p)
    return torch.cat([*blocks.values()])


def enumerated(policy, rewards, credit):
    """The variance of the gradient over all outputs, credit(output) being a list."""
    chances = []
    gradients = []
    for output in states.OUTPUTS:
        chance = torch.tensor(1.0).double()
        for t, action in enumerate(output):
            chance = chance * policy[output[:t]][action]
        chances.append(chance)
        gradients.append(gradient(policy, output, credit(output)))
    chances = torch.stack(chances)
    gradients = torch.stack(gradients)
    mean = chances @ gradients
    return (chances @ (gradients - mean).square().sum(dim=1)).item(), mean


@pytest.fixture
def made():
    """A policy, its rewards and values, and the variance without a baseline."""
    policy, rewards = states.make_policy(0, *KIND)
    none, mean = enumerated(policy, rewards, lambda output: [rewards[output]] * states.DEPTH)
    return policy, rewards, states.values(policy, rewards), none, mean


def test_variances_are_those_of_the_whole_gradient(made):
    policy, rewards, V, none, mean = made
    found = states.variances(0, *KIND)
    credits = {
        "mean": lambda o: [rewards[o] - V[()]] * 3,
        "V(s)": lambda o: [rewards[o] - V[o[:t]] for t in range(3)],
        "Q - V": lambda o: [V[o[:t + 1]] - V[o[:t]] for t in range(3)]}
    for way, credit in credits.items():
        variance, same_mean = enumerated(policy, rewards, credit)
        assert found[way] == pytest.approx(variance / none)
        torch.testing.assert_close(same_mean, mean)


def test_no_single_number_is_better_than_the_one_that_is_called_best(made):
    policy, rewards, V, none, _ = made
    best = states.best_single(policy, V, states.visits(policy))

    def variance(b):
        return enumerated(policy, rewards, lambda output: [rewards[output] - b] * 3)[0] / none
    assert states.variances(0, *KIND)["b*"] == pytest.approx(variance(best))
    assert variance(best) < min(variance(best - 0.02), variance(best + 0.02))


def test_the_best_of_each_state_is_better_than_all_other_baselines():
    for kind in states.KINDS:
        found = states.variances(3, *kind)
        others = [found[way] for way in ("none", "mean", "b*", "V(s)")]
        assert found["b*(s)"] < min(others)


def test_policies_that_have_made_up_their_mind_have_more_variance_with_values_on_average():
    runs = [states.variances(seed, 3, 3) for seed in range(20)]
    mean = {way: sum(run[way] for run in runs) / 20 for way in states.WAYS}
    assert mean["V(s)"] > 1.5 > 1 > mean["b*(s)"]


def made_up(**shares):
    """What would be found if all policies were alike."""
    same = dict.fromkeys(states.WAYS, 1.0) | {"b*(s)": 1.0}
    return {"kinds": {"a": [same | shares] * 4}}


def verdicts(found):
    return [claim.verdict for claim in states.claims(found)]


def test_verdicts_follow_from_the_shares():
    assert verdicts(made_up()) == [SHOWN, CONTRADICTED, SHOWN, CONTRADICTED]
    assert verdicts(made_up(**{"V(s)": 0.9}))[:2] == [CONTRADICTED, SHOWN]
    assert verdicts(made_up(**{"V(s)": 1.11}))[2] == CONTRADICTED
    assert verdicts(made_up(**{"Q - V": 0.5}))[3] == SHOWN


def test_one_policy_is_enough_against_a_claim_about_all():
    found = made_up()
    found["kinds"]["b"] = [found["kinds"]["a"][0] | {"none": 0.9}]
    assert verdicts(found)[0] == CONTRADICTED


def test_the_table_has_the_median_of_each_kind():
    found = made_up()
    found["kinds"]["a"].append(dict.fromkeys(states.WAYS, 1000.0))
    found["kinds"]["a"][0] = found["kinds"]["a"][0] | {"V(s)": 0.5}
    [(heads, rows)] = states.tables(found)
    assert rows[0][1:] == ["1.00"] * len(states.WAYS)
    assert [len(row) for row in rows] == [len(heads)]
    assert "5 policies" in states.note(found)
