"""lab/klgradient.py: its enumeration, and its verdicts on made-up numbers."""
import functools

import pytest
import torch
from conftest import f64

from lab import klgradient
from lab.entry import CONTRADICTED, SHOWN

close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)


@pytest.fixture
def outputs():
    return klgradient.Outputs()


def tables_of_logits():
    return torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(3)).double()


def test_the_outputs_are_all_that_a_policy_can_say(outputs):
    """15 outputs end, of 1 to 4 tokens, and 16 do not; no two are alike."""
    assert outputs.mask.sum(dim=1).tolist().count(4) == 8 + 16
    assert len({tuple(row) for row in outputs.tokens.tolist()}) == 31
    for table in tables_of_logits():
        close(outputs.logps(table).sum(dim=1).exp().sum(), f64(1.0))


def test_the_chance_of_a_token_depends_on_the_one_before_it(outputs):
    table = tables_of_logits()[0]
    row = outputs.tokens.tolist().index([2, 1, 0, 0])
    chances = table.softmax(dim=-1)
    expected = [chances[0, 2].log(), chances[2, 1].log(), chances[1, 0].log(), f64(0.0)]
    close(outputs.logps(table)[row], torch.stack(expected))


def test_a_mean_counts_tokens_by_the_chance_that_the_sampler_says_them(outputs):
    sampler = tables_of_logits()[1]
    chances = outputs.logps(sampler).sum(dim=1).exp()
    lengths = outputs.mask.sum(dim=1)
    ones = torch.ones_like(outputs.mask)
    close(outputs.mean(ones, sampler), (chances * lengths).sum() / 4)
    close(outputs.mean(ones, sampler, "sequence_mean"), f64(1.0))


def test_the_kl_of_tables_is_that_of_the_row_of_the_token_before(outputs):
    table, other, _ = tables_of_logits()
    p = table.softmax(dim=-1)
    q = other.softmax(dim=-1)
    rows = (p * (p / q).log()).sum(dim=-1)
    close(klgradient.kl_of(table, other, outputs), rows[outputs.before])


def test_the_gradients_are_equal_where_the_math_says_so_and_nowhere_else():
    found = klgradient.enumerate_gradients(0, draws=5)
    assert max(found["norm of k1"]) < 1e-12
    equal = {"k2 / KL(policy, base)", "k3 / KL(base, policy)", "k1 in the reward / KL of outputs",
             "k3_ratio, older / KL(policy, base), older", "k1, by length / mean of 1 / length",
             "k1, older / -KL(older, policy)"}
    for one, other in klgradient.PAIRS:
        name = f"{one} / {other}"
        assert (min(found[name]) > 1 - 1e-9) == (name in equal), name


def test_sampling_k3_of_an_older_policy_without_the_ratio_turns_its_gradient():
    found = klgradient.enumerate_gradients(0, draws=5)
    assert max(found["k3, older / KL(policy, base), older"]) < 1 - 1e-3


def made_up(**changed):
    """Cosines of gradients that are the same where that is claimed, and elsewhere are not."""
    found = {"norm of k1": [0.0, 0.0, 0.0]}
    found |= dict.fromkeys(klgradient.SAME.values(), [1.0, 1.0, 1.0])
    found |= dict.fromkeys(klgradient.OTHER.values(), [0.2, 0.5, 1.0])
    return {"found": found | changed}


def verdicts(found):
    return [claim.verdict for claim in klgradient.claims(found)]


def test_a_claim_is_shown_if_gradients_are_the_same_or_differ_as_it_says():
    number = len(klgradient.claims(made_up()))
    assert verdicts(made_up()) == [SHOWN] * number
    other = made_up(**dict.fromkeys(klgradient.SAME.values(), [0.99, 1.0, 1.0]),
                    **dict.fromkeys(klgradient.OTHER.values(), [1.0, 1.0, 1.0]))
    other["found"]["norm of k1"] = [0.0, 0.0, 1e-3]
    assert verdicts(other) == [CONTRADICTED] * number
