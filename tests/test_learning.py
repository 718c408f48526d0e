"""Learning: by each script, what a verifier rewards; and by grpo.py, the whole job in miniature,
from random weights to a policy that thinks before it answers, and so is right."""
import functools
from statistics import fmean

import pytest
from conftest import every_script
from small_runs import arguments

import grpo


@every_script
def test_completions_that_the_verifier_likes_become_frequent(script, train, monkeypatch):
    """With seeds 0 to 3 and each script, their share goes from 0.16 to 0.34 to at least 0.95."""
    monkeypatch.setattr(script, "verify", functools.wraps(script.verify)(
        lambda problem, text: float(len(text) <= 2)))
    flags = "--online" if script.__name__ == "dpo" else ""
    record = train(f"--num_generations 8 --learning_rate 0.01 {flags}", num_steps=12)
    shares = [metrics["accuracy"] for metrics in record.metrics]
    assert shares[0] < 0.5
    assert fmean(shares[-3:]) > 0.85


WHOLE_JOB = {
    "device": "cpu", "task": "arithmetic:3", "base_steps": 450, "max_steps": 15,
    "stop_at": 2, "num_prompts": 12, "max_completion_length": 24, "learning_rate": 7e-4,
    "num_eval_problems": 128, "num_eval_samples": 4, "eval_steps": 15}


def test_from_nothing_a_policy_learns_to_think_before_it_answers_and_so_to_be_right(
        tmp_path, monkeypatch):
    """With seeds 0 to 2 greedy accuracy goes from .29, .30, .34 to .73, .83, .70, pass@1 from .33,
    .40, .36 to .56, .68, .49, the share that thinks from .32 to .97, tokens from 9 to 18."""
    monkeypatch.chdir(tmp_path)
    summary = grpo.main(arguments(WHOLE_JOB))
    base = summary["base"]
    trained = summary["trained"]
    assert base["think_share"] < 0.5
    assert base["accuracy_given_think"] > base["accuracy_given_direct"] + 0.2
    assert trained["greedy"] > base["greedy"] + 0.24
    assert trained["pass@1"] > base["pass@1"] + 0.08
    assert trained["think_share"] > base["think_share"] + 0.4
    assert trained["mean_length"] == pytest.approx(2 * base["mean_length"], rel=0.2)
