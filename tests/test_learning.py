"""The whole job in miniature: from random weights to a policy that has learned to think, on one core."""
import sys

import grpo

SEED = 0
FLAGS = {"device": "cpu", "num_threads": 1, "seed": SEED, "base_seed": SEED, "operands": 3, "base_steps": 600,
         "max_steps": 30, "num_prompts": 16, "num_mini_batches": 1, "max_completion_length": 24,
         "learning_rate": 7e-4,
         "num_eval_problems": 256, "eval_steps": 30}


def test_from_nothing_a_policy_learns_to_think_before_it_answers_and_so_to_be_right(tmp_path, monkeypatch):
    """With no reward but for right answers. Measured with seeds 0, 1, 2: greedy 0.50, 0.38, 0.29 ->
    0.87, 0.91, 0.95; pass@1 0.50, 0.46, 0.43 -> 0.75, 0.82, 0.84; share that thinks 0.31, 0.33, 0.31 ->
    0.99, 0.97, 0.98; tokens 9 -> 18.5. The test asks for two thirds of the least gain: the seed is fixed, but
    machines differ in how they round. Takes 20 to 30 s, most of it the warm start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tools.report", None)      # no picture
    summary = grpo.main([word for name, value in FLAGS.items() for word in (f"--{name}", str(value))])
    base, trained = summary["base"], summary["trained"]
    assert base["think_share"] < 0.5 and base["accuracy_given_think"] > base["accuracy_given_blurt"] + 0.3
    assert trained["greedy"] > base["greedy"] + 0.25
    assert trained["pass@1"] > base["pass@1"] + 0.16
    assert trained["think_share"] > base["think_share"] + 0.45
    assert trained["mean_length"] > 1.6 * base["mean_length"]
