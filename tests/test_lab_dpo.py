"""lab/dpo.py: losses averaged over flips, flipped pairs, and what the verdicts follow from."""
import pytest

from lab import dpo
from lab.entry import CONTRADICTED, NOT_SHOWN, SHOWN

# ---- exact -----------------------------------------------------------------------------------

def test_robust_dpo_is_unbiased_and_dpo_is_not():
    expected = dpo.expected_losses()
    clean = expected["DPO, no flips"]
    assert expected["robust DPO"] == pytest.approx(clean, abs=2e-5)
    assert dpo.furthest(expected["DPO"], clean) > 1
    assert dpo.furthest(expected["cDPO"], clean) > 1


def test_flips_give_the_margin_of_dpo_an_end():
    """The loss is lowest where sigmoid(beta M) is the share of pairs in the right order."""
    expected = dpo.expected_losses()
    best = {}
    for name, losses in expected.items():
        best[name] = dpo.MARGINS[losses.index(min(losses))]
    assert best == {"DPO, no flips": dpo.MARGINS[-1], "DPO": 8, "cDPO": 4,
                    "robust DPO": dpo.MARGINS[-1]}     # logit(.7) = .85, logit(.58) = .32


# ---- pairs -----------------------------------------------------------------------------------

PAIRS = [{"prompt": f"{number}", "chosen": f"c{number}", "rejected": f"r{number}"}
         for number in range(1000)]


def num_flipped(pairs):
    return sum(pair["chosen"].startswith("r") for pair in pairs)


def test_about_the_share_of_pairs_is_flipped():
    assert 250 < num_flipped(dpo.flip(PAIRS, 0.3, seed=0)) < 350
    assert dpo.flip(PAIRS, 0, seed=0) == PAIRS
    assert num_flipped(dpo.flip(PAIRS, 1, seed=0)) == 1000


def test_a_flip_exchanges_the_two_answers_and_nothing_else():
    for before, after in zip(PAIRS, dpo.flip(PAIRS, 0.5, seed=1)):
        assert after["prompt"] == before["prompt"]
        assert {after["chosen"], after["rejected"]} == {before["chosen"], before["rejected"]}
    assert num_flipped(PAIRS) == 0, "the pairs themselves were changed"


def test_each_seed_flips_others_and_always_the_same():
    assert dpo.flip(PAIRS, 0.3, seed=0) == dpo.flip(PAIRS, 0.3, seed=0)
    assert dpo.flip(PAIRS, 0.3, seed=0) != dpo.flip(PAIRS, 0.3, seed=1)


# ---- what is kept, and the verdicts ----------------------------------------------------------

def test_what_is_kept_begins_with_the_base_and_leaves_out_steps_without_an_evaluation():
    base = {"greedy": 0.1, "pairs/logps/chosen": -10.0, "pairs/logps/rejected": -12.0}
    kept = dpo.outcome({
        "summary": {"base": base, "trained": {"pass@1": 0.7}},
        "eval/greedy": [None, 0.9, None, 0.6],
        "eval/pairs/logps/chosen": [None, -9.5, None, -11.0],
        "eval/pairs/logps/rejected": [None, -20.0, None, -30.0]})
    assert kept["greedy, curve"] == [0.1, 0.9, 0.6]
    assert kept["chosen, curve"] == [0.0, 0.5, -1.0]
    assert kept["rejected"] == -18.0
    assert kept["lost"] == 1.0
    assert kept["best greedy"] == 0.9
    assert kept["fallen more"] == 0.25
    assert kept["pass@1"] == 0.7


def made_up():
    """What could have been found, if nothing differs."""
    quantities = ["pass@1", "best greedy", "greedy", "chosen", "rejected", "lost", "fallen more"]
    names = [*dpo.LEARNING, "DPO, no flips", *dpo.LOSSES]
    runs = {name: [dict.fromkeys(quantities, 0.0) for _ in range(3)] for name in names}
    return {"expected": dpo.expected_losses(), "runs": runs, "problems": 7}


def verdicts(found):
    return [claim.verdict for claim in dpo.claims(found)]


def test_without_a_difference_only_what_is_exact_is_shown():
    assert verdicts(made_up()) == [SHOWN] + len(dpo.CLAIMS) * [NOT_SHOWN]


@pytest.mark.parametrize("number", range(len(dpo.CLAIMS)))
def test_a_claim_follows_from_the_quantity_of_its_two_settings(number):
    _, name, other, quantity = dpo.CLAIMS[number]
    for change, verdict in ((0.1, SHOWN), (-0.1, CONTRADICTED)):
        found = made_up()
        for seed, result in enumerate(found["runs"][name]):
            result[quantity] += change * (1 + seed)
        assert verdicts(found)[1 + number] == verdict
        if other:
            for seed, result in enumerate(found["runs"][other]):
                result[quantity] += change * (2 + seed)
            others = {SHOWN: CONTRADICTED, CONTRADICTED: SHOWN}
            assert verdicts(found)[1 + number] == others[verdict]


def test_one_seed_that_disagrees_leaves_a_claim_open():
    found = made_up()
    for result, value in zip(found["runs"]["RPO"], (0.2, 0.3, -0.01)):
        result["pass@1"] = value
    assert verdicts(found)[-1] == NOT_SHOWN


def test_a_biased_robust_loss_would_not_be_shown():
    found = made_up()
    found["expected"]["robust DPO"] = found["expected"]["DPO"]
    assert verdicts(found)[0] == NOT_SHOWN


def test_tables_have_a_row_for_each_setting():
    found = made_up()
    fresh, flipped = dpo.tables(found)
    for heads, rows in (fresh, flipped):
        assert {len(row) for row in rows} == {len(heads)}
    assert [row[0] for row in fresh[1]] == list(dpo.LEARNING)
    assert [row[0] for row in flipped[1]] == ["DPO, no flips", *dpo.LOSSES]
    assert "7" in dpo.note(found)
