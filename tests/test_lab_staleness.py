"""The experiment staleness: its noise, its engines, and its verdicts, on made-up numbers."""
import math

import pytest
import torch
from conftest import TINY, f64

import grpo
from lab import staleness
from lab.entry import CONTRADICTED, NOT_SHOWN, SHOWN

# ---- the noise -------------------------------------------------------------------------------

@pytest.mark.parametrize("length", [1, 3, 200])
def test_the_outcomes_of_noise_are_as_likely_as_those_of_so_many_coins(length):
    log_rho, chances = staleness.outcomes(length, 0.1)
    numbers = torch.arange(length + 1).double()
    assert chances.sum().item() == pytest.approx(1)
    assert (chances * numbers).sum().item() == pytest.approx(length / 2)
    torch.testing.assert_close((log_rho > 0).sum(dim=1).double(), numbers)
    assert log_rho.abs().unique().tolist() == [0.1]


def test_three_tokens_are_up_as_binomials_say():
    _, chances = staleness.outcomes(3, 0.1)
    torch.testing.assert_close(chances, f64([1, 3, 3, 1]) / 8)


@pytest.mark.parametrize("length", [1, 7, 64])
@pytest.mark.parametrize("noise", [0.01, 0.3])
def test_the_variances_are_those_of_closed_forms(length, noise):
    found = staleness.exact_noise(length, noise)

    def of_product(size):
        return math.cosh(2 * size) ** length - math.cosh(size) ** (2 * length)
    assert found["GRPO"][0] == pytest.approx(math.sinh(noise) ** 2, rel=1e-4)
    assert found["GSPO"][0] == pytest.approx(of_product(noise / length), rel=1e-4)
    assert found["product"][0] == pytest.approx(of_product(noise), rel=1e-4)


def test_noise_below_the_range_of_tokens_is_clipped_by_gspo_alone():
    found = staleness.exact_noise(3, 0.1)
    assert found["GRPO"][1] == 0
    assert found["GSPO"][1] == 0.5          # an odd length has no mean of 0
    assert staleness.exact_noise(2, 0.1)["GSPO"][1] == 0.25


def test_only_the_side_of_the_advantage_is_clipped():
    """At +-0.24, exp(-0.24) is below 1 - 0.2, and exp(0.24) within 1 + 0.28."""
    assert staleness.exact_noise(5, 0.24)["GRPO"][1] == 0.25


def test_the_ranges_are_the_defaults_of_the_scripts():
    for name, script in {"GRPO": staleness.grpo, "GSPO": staleness.gspo}.items():
        cfg = script.Config()
        assert staleness.CLIPS[name] == (cfg.epsilon, cfg.epsilon_high)


# ---- the engines -----------------------------------------------------------------------------

@pytest.fixture
def policy():
    return grpo.GPT(grpo.Config(**TINY))


def test_an_engine_rounds_each_row_to_as_many_levels_as_its_bits_have(policy):
    before = policy.embed.weight.clone()
    rounded = staleness.engine(policy, 4).embed.weight
    step = before.abs().amax(dim=1) / 7
    for row in range(3):
        levels = rounded[row] / step[row]
        torch.testing.assert_close(levels, levels.round())
        assert levels.abs().max().round() == 7
    assert ((rounded - before).abs() <= 0.501 * step[:, None]).all()
    assert torch.equal(policy.embed.weight, before)


def test_more_bits_are_closer_and_0_bits_are_the_policy_itself(policy):
    def distance(bits):
        weights = zip(policy.parameters(), staleness.engine(policy, bits).parameters())
        return max((one - other).abs().max().item() for one, other in weights)
    assert distance(0) == 0
    assert 0 < 10 * distance(8) < distance(4)


def test_training_samples_from_the_engine_and_compares_with_its_log_probs(policy, monkeypatch):
    """Nothing is clipped in the first step if the engine is exact; with noise, GSPO clips."""
    flags = [f"--{name}={value}" for name, value in TINY.items()]
    shares = {}
    for bits in (0, 4):
        cfg = grpo.common.parse_flags(staleness.gspo.Config, [*flags, "--num_eval_problems=4"])
        task = grpo.common.load_task(cfg, lambda problem, text: float(len(text) % 2))
        fresh = staleness.gspo.GPT(cfg)
        monkeypatch.setattr(staleness, "load_base", lambda *_, made=(cfg, task, fresh): made)
        monkeypatch.setattr(staleness, "UPDATES", 1)
        pass_at_1, problems, shares[bits] = staleness.train("gspo", bits, [], 0)
        assert 0 <= pass_at_1 <= 1
        assert problems == 4
    assert shares[0] == 0
    assert shares[4] > 0.1


# ---- the page --------------------------------------------------------------------------------

def made_up(**changed):
    """What three seeds might have found: all the same, but for what is changed."""
    runs = {}
    for name in staleness.variants():
        lag = int(name.split(",")[0].removeprefix("lag "))
        level = changed.get(name, 0.5)
        runs[name] = [[0.0] * (staleness.UPDATES + lag - 4) + [level] * 4] * 3
    engines = {name: {"pass@1": [changed.get(name, 0.9)] * 3, "problems": [128] * 3,
                      "clipped": [0.1] * 3} for name in staleness.ENGINES}
    noise = {str(noise): [staleness.exact_noise(length, noise) for length in staleness.LENGTHS[:3]]
             for noise in staleness.NOISES}
    rounding = {"8": [0.01, 0.01, 0.01], "4": [0.1, 0.1, 0.1]}
    return {"runs": runs, "engines": engines, "noise": noise, "rounding": rounding}


def verdicts(found):
    return {claim.text: claim.verdict for claim in staleness.claims(found)}


def test_every_claim_has_a_text_of_its_own_and_every_row_has_a_cell_for_each_head():
    found = made_up()
    assert len(verdicts(found)) == len(staleness.claims(found))
    for heads, rows in staleness.tables(found):
        assert all(len(row) == len(heads) for row in rows)


def test_a_lag_costs_if_all_seeds_lose_by_it():
    assert verdicts(made_up(**{"lag 8": 0.3}))["a lag of 8 costs accuracy"] == SHOWN
    assert verdicts(made_up(**{"lag 8": 0.7}))["a lag of 8 costs accuracy"] == CONTRADICTED
    assert verdicts(made_up())["a lag of 8 costs accuracy"] == NOT_SHOWN


def test_a_correction_is_compared_with_none_at_the_same_lag():
    text = "with a lag of 8, sequence_mask is better than none"
    assert verdicts(made_up(**{"lag 8, sequence_mask": 0.6}))[text] == SHOWN
    assert verdicts(made_up(**{"lag 8, sequence_mask": 0.4}))[text] == CONTRADICTED


def test_accuracy_after_as_many_updates_is_sampled_later_with_a_lag():
    """The last four batches of a run that is longer by the lag."""
    for lag in staleness.LAGS:
        flags = staleness.variants()[f"lag {lag}"]
        assert flags[flags.index("--max_steps") + 1] == staleness.UPDATES + lag
    found = made_up(**{"lag 8": 0.25})
    assert staleness.after(found, "lag 8") == [0.25] * 3


def test_the_engine_that_a_method_loses_less_by_is_told_by_its_own_exact_runs():
    text = "GSPO loses less than GRPO by an engine of 4 bits"
    assert verdicts(made_up(**{"GRPO, 4 bits": 0.8}))[text] == SHOWN
    assert verdicts(made_up(**{"GSPO, 4 bits": 0.8}))[text] == CONTRADICTED
    lower = {"GSPO, exact": 0.7, "GSPO, 4 bits": 0.65, "GRPO, 4 bits": 0.8}
    assert verdicts(made_up(**lower))[text] == SHOWN        # 0.05 against 0.1


def test_gspo_has_less_variance_at_every_length_and_is_clipped_more_often_by_little_noise():
    found = verdicts(made_up())
    for noise in staleness.NOISES:
        text = f"noise {noise}: GSPO's ratio has less variance, at every length above 1"
        assert found[text] == SHOWN
    assert found["noise 0.01: GSPO's is clipped less often"] == CONTRADICTED
