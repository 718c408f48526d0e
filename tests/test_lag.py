"""Test examples/lag.py: the lower bound and the filter of outputs, an update against its equation,
and whole runs. The other weights of samples are among the test vectors."""
import copy
import dataclasses
import importlib

import pytest
import torch
from conftest import close, f64, scripts
from small_runs import SMALL, arguments, changed_weights, load, outcome, steps

import gspo

lag = importlib.import_module("examples.lag")


@pytest.mark.quick
@pytest.mark.parametrize("correction, expected", [
    ("truncate", [[1, 2, 0], [2, 2, 2], [1, 1, 1], [2, 2, 0]]),
    ("mask", [[1, 0, 0], [2, 2, 2], [0, 1, 1], [0, 0, 0]]),
    ("geometric_mask", [[1, 4, 0], [2, 2, 2], [0, 0, 0], [0, 0, 0]])])
def test_weights_have_a_lower_bound_and_an_output_is_judged_by_its_mean(correction, expected):
    """The geometric means are 2, 2, 0.31 and 2.4."""
    w = f64([[1, 4, 9], [2, 2, 2], [0.03, 1, 1], [2.4, 2.4, 1]])
    mask = f64([[1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 1, 0]])
    found = lag.importance_weights(w.log(), 0 * w, mask, correction, 2 + 1e-9, 1.0)
    close(found, f64(expected), atol=1e-8)


# ---- w A instead of A ------------------------------------------------------------------------

@scripts("grpo", "gspo")
def test_the_trainers_log_probs_replace_those_of_the_sampler_from_which_weights_follow(
        script, scene):
    """The cap gives some tokens a weight of 0. That an update takes an advantage for each token is
    tested among the vectors."""
    made = scene()
    batch, mask, T = made.batch, made.batch.mask, made.cfg.temperature
    sampled = batch.logps.clone()
    cfg = lag.Config(**dataclasses.asdict(made.cfg) | {
        "method": script.__name__, "importance_sampling_correction": "mask",
        "importance_sampling_cap": 1.3})
    w, metrics = lag.correct_for_lag(made.policy, batch, cfg)
    with torch.no_grad():
        scored, _ = script.score(made.policy, batch.prompts, batch.tokens, T)
    assert torch.equal(batch.logps, scored)
    assert torch.equal(w, lag.importance_weights(scored, sampled, mask, "mask", 1.3))
    assert 0 < (w == 0).sum() - (mask == 0).sum() < mask.sum()
    difference = ((scored - sampled) * mask).abs()
    assert metrics == pytest.approx({
        "sampling/sampling_logp_difference/max": difference.max().item(),
        "sampling/sampling_logp_difference/mean": (difference.sum() / mask.sum()).item(),
        "sampling/importance_sampling_ratio/mean": (w.sum() / mask.sum()).item()})

# ---- the sampler, and runs -------------------------------------------------------------------

def test_a_run_that_is_resumed_ends_as_if_it_had_not_been_and_samples_from_older_policies(
        at_work_folder, watch):
    flags = SMALL | {
        "method": "gspo", "sampler_lag": 2, "importance_sampling_correction": "truncate",
        "dynamic_sampling": 2, "overlong_buffer": 8, "beta": 0.05, "num_mini_batches": 2}
    sampled = watch(
        gspo, "sample_with_signal", lambda policy, *_: copy.deepcopy(policy.state_dict()))
    advantages = watch(gspo, "update", lambda *args: args[4])
    lag.main(arguments(flags | {"output_dir": "lag-six", "max_steps": 6}))
    assert not changed_weights(sampled[0], load("lag-six/base.pt")["policy"])
    assert not changed_weights(sampled[0], sampled[2]) and changed_weights(sampled[2], sampled[3])
    assert abs(steps("lag-six")[1]["kl"]) > 1e-6    # of the policy; the sampler is still the base
    w = [line["sampling/importance_sampling_ratio/mean"] for line in steps("lag-six")]
    assert w[0] == pytest.approx(1, abs=1e-5) and w[2] != pytest.approx(1, abs=1e-5)
    assert advantages[2][:, 1].ne(advantages[2][:, 0]).any()        # each token has its own weight

    lag.main(arguments(flags | {"output_dir": "lag-three", "max_steps": 3}))
    lag.main(arguments({"resume_from_checkpoint": "lag-three", "max_steps": 6}))
    assert outcome("lag-three") == outcome("lag-six")
