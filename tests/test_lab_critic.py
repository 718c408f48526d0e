"""lab/critic.py: its arithmetic and its verdicts; and what a lambda hides, in small."""
import importlib
import json
import math
from pathlib import Path

import pytest
import torch
from small_runs import SMALL

import common
import ppo
from lab import critic, entry

# The claims in their order.
CLAIMS = ["RLOO", "GRPO", "seconds", "memory", "DAPO", "PPO", *critic.PARTS, "samples", "alpha 1",
          "alpha 0.05"]


# ---- what a lambda hides, exactly ------------------------------------------------------------

@pytest.mark.parametrize("length", [1, 2, 50])
def test_a_critic_of_zeros_shows_the_first_token_lambda_to_the_power_of_the_others(length):
    assert critic.share_at_first(length, lam=0.95) == pytest.approx(0.95 ** (length - 1))


@pytest.mark.parametrize("length", critic.LENGTHS)
def test_with_a_lambda_by_length_the_first_token_sees_a_third_of_the_reward(length):
    share = critic.share_at_first(length, alpha=1.0)
    assert share == pytest.approx((1 - 1 / length) ** (length - 1))
    assert share > 1 / math.e
    if length >= 20:
        assert critic.share_at_first(length, alpha=0.05) < 1e-8


def test_right_and_wrong_outputs_differ_more_at_their_first_token_with_a_lambda_by_length():
    mask = torch.ones(2, 50)
    rewards = torch.zeros(2, 50)
    rewards[0, -1] = 1
    gaps = {}
    for name, lam in {"0.95": 0.95,
                      "by length": ppo.length_adaptive_lambda(mask.sum(dim=1), 1.0)}.items():
        A, _ = ppo.gae(rewards, torch.zeros(2, 50), mask, 1.0, lam)
        first = ppo.whiten(A, mask)[:, 0]
        gaps[name] = (first[0] - first[1]).item()
    assert gaps["by length"] > 2 * gaps["0.95"] > 0


# ---- what is run and measured ----------------------------------------------------------------

def test_the_flags_are_accepted_and_vapo_lacks_one_part_at_a_time():
    configs = {}
    for task, variants in critic.VARIANTS.items():
        for name, (script, *flags) in variants.items():
            module = importlib.import_module(script.removesuffix(".py"))
            cfg = common.parse_flags(module.Config, [str(flag) for flag in flags])
            assert (cfg.max_steps, cfg.num_generations) == (critic.STEPS[task], critic.G)
            configs[task, name] = cfg
    has = {}
    for name in critic.VARIANTS["countdown"]:
        cfg = configs["countdown", name]
        if name != "DAPO":
            has[name] = [cfg.critic_pretrain_steps > 0, cfg.critic_lam == 1, cfg.length_adaptive]
    assert list(has.values()) == [[False, False, False], [True, True, True], [False, True, True],
                                  [True, False, True], [True, True, False]]
    assert configs["grid", "RLOO"].baseline == "rloo"


@pytest.mark.parametrize("has_critic, numbers", [(False, 5), (True, 9)])
def test_what_stands_is_counted_in_a_checkpoint_with_gradients_and_reference(has_critic, numbers):
    policy = ppo.GPT(ppo.Config(**SMALL))
    models = {"policy": policy} | ({"critic": ppo.Critic(policy)} if has_critic else {})
    checkpoint = {"state": {"steps": 1}}
    for name, model in models.items():
        moments = {i: {"step": torch.tensor(1.0), "exp_avg": weight, "exp_avg_sq": weight}
                   for i, weight in enumerate(model.parameters())}
        key = "optimizer" if name == "policy" else f"{name}_optimizer"
        checkpoint |= {name: model.state_dict(), key: {"state": moments, "param_groups": [{}]}}
    stands = critic.standing(checkpoint)
    assert stands["all"] == pytest.approx(numbers, abs=0.05)
    assert stands["critic"] == pytest.approx(float(has_critic), abs=0.02)
    assert stands["gradients"] == pytest.approx(1 + has_critic, abs=0.02)


def test_what_is_measured_is_of_each_variant_and_seed_and_the_first_step_is_not_timed(monkeypatch):
    def run(script, folder, *flags, quiet):
        Path(folder).mkdir()
        lines = [json.dumps({"step_time": seconds}) for seconds in (9, 1, 2, 3, 4)]
        Path(folder, "metrics.jsonl").write_text("\n".join(lines))
        ones = {"weight": torch.ones(100)}
        torch.save({"policy": ones, "optimizer": {"state": {0: ones | {"other": torch.ones(100)}}}},
                   Path(folder, "checkpoint.pt"))

    def run_all(variants, seeds):
        return {name: [{"reward": [name, seed]} for seed in seeds] for name in variants}

    monkeypatch.setattr(critic, "run", run)
    monkeypatch.setattr(critic, "run_all", run_all)
    found = critic.measure([5, 6])
    assert found["rewards"]["grid"]["RLOO"] == [["RLOO", 5], ["RLOO", 6]]
    assert found["rewards"]["countdown"]["VAPO"][1] == ["VAPO", 6]
    assert found["costs"]["PPO"]["seconds a step"] == 2.5
    assert found["costs"]["PPO"]["all"] == 5


# ---- what was found --------------------------------------------------------------------------

def found_with(better=(), heavy="PPO", slow="PPO", late=3):
    """What would be found if the rewards of all runs of three seeds were 2 after `late` batches,
    but 3 after one in those of `better`."""
    rewards = {}
    for task, variants in critic.VARIANTS.items():
        rewards[task] = {}
        for name in variants:
            curve = [0.0] * late + [2.0] * 5
            if name in better:
                curve = [0.0] + [3.0] * (late + 4)
            rewards[task][name] = [[value + seed / 100 for value in curve] for seed in range(3)]
    costs = {name: {"seconds a step": 2.0 if name == slow else 1.0,
                    "all": 9.0 if name == heavy else 5.0} for name in critic.VARIANTS["grid"]}
    return {"rewards": rewards, "costs": costs}


def verdicts(found):
    return dict(zip(CLAIMS, [claim.verdict for claim in critic.claims(found)], strict=True))


def test_the_claims_are_shown_by_what_they_say():
    found = found_with(better=("RLOO", "GRPO", "VAPO"), late=20)
    seen = verdicts(found)
    assert seen.pop("alpha 0.05") == entry.CONTRADICTED     # which no run can change
    assert set(seen.values()) == {entry.SHOWN}


def test_vapo_has_to_be_sooner_by_more_batches_than_its_critic_had_for_itself():
    for late, verdict in {5: entry.CONTRADICTED, 20: entry.SHOWN}.items():
        assert verdicts(found_with(better=("VAPO",), late=late))["samples"] == verdict


def test_the_claims_are_contradicted_by_the_opposite():
    others = [name for name in critic.VARIANTS["countdown"] if name != "VAPO"]
    seen = verdicts(found_with(better=others, heavy="GRPO", slow="RLOO"))
    assert seen.pop("alpha 1") == entry.SHOWN               # which no run can change
    assert set(seen.values()) == {entry.CONTRADICTED}


def test_samples_to_a_level_have_those_of_the_pretraining():
    found = found_with(better=("VAPO",))
    assert critic.summary(found, "countdown", "VAPO")["samples"] == [8 * 8 * (10 + 1)] * 3
    assert critic.summary(found, "countdown", "no pretraining")["samples"] == [8 * 8 * 3] * 3
    assert critic.summary(found, "grid", "PPO")["last"] == pytest.approx([2.0, 2.01, 2.02])
    assert critic.seconds(found, "PPO") == [2 * 4.0] * 3


def test_the_tables_have_a_row_for_each_variant_and_a_cell_for_each_head():
    found = found_with()
    grid, countdown, costs = critic.tables(found)
    assert [row[0] for row in grid[1]] == list(critic.VARIANTS["grid"])
    assert [row[0] for row in countdown[1]] == list(critic.VARIANTS["countdown"])
    for heads, rows in (grid, countdown, costs):
        assert {len(row) for row in rows} == {len(heads)}
    assert dict(zip(costs[0], costs[1][-1]))["all"] == "9.00"
