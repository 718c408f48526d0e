"""An evaluation counts what the policy answers to held-out problems, the same ones in every run.
What else is said of completions is in test_scores.py."""
import dataclasses

import pytest
import torch

import common
import grpo

NUM_PROBLEMS = 100
T = 40


@pytest.fixture
def evaluated(config, load_task, monkeypatch):
    """evaluated(num_samples), greedily if it is 0 -> scores, problems asked, uniforms. Of the
    completions of problem n, the first n % 5 are right; they think if n % 5 is 2 or more."""
    def evaluate(num_samples, **changes):
        cfg = config(num_eval_problems=NUM_PROBLEMS, max_completion_length=T, task="arithmetic:5",
                     num_eval_samples=max(1, num_samples), **changes)
        asked = []

        def rollout(model, prompts, problems, cfg, uniforms=None):
            tokens = torch.full((len(prompts), T), grpo.PAD)
            for row, problem in enumerate(problems):
                n, g = divmod(row, max(1, num_samples))
                thought = "<think></think>" if n % 5 >= 2 else ""
                answer = problem.answer if g < n % 5 else 30
                text = f"{thought}<answer>{answer}</answer><|eos|>"
                ids = grpo.TOKENIZER.encode(text, allowed_special="all")
                tokens[row, :len(ids)] = torch.tensor(ids)
            mask = (tokens != grpo.PAD).float()
            asked.append((problems, uniforms))
            return tokens, mask, mask, mask, mask.sum(dim=1).long()
        monkeypatch.setattr(grpo, "rollout", rollout)
        task = load_task(cfg)
        scores = grpo.evaluate(None, task, cfg, greedy=num_samples == 0)
        [(problems, uniforms)] = asked
        expected = common.held_out_problems(task, NUM_PROBLEMS)
        assert problems == [p for p in expected for _ in range(max(1, num_samples))]
        assert len({problem.prompt for problem in expected}) == NUM_PROBLEMS
        return scores, uniforms
    return evaluate


def test_greedy_scores_are_those_of_one_answer_to_each_problem(evaluated):
    scores, uniforms = evaluated(0)
    assert scores["greedy"] == pytest.approx(0.8)
    assert scores["think_share"] == pytest.approx(0.6)
    assert scores["problems"] == NUM_PROBLEMS
    assert not any(name.startswith("pass@") for name in scores)
    assert uniforms is None


def test_scores_of_samples_are_those_of_each_problem_answered_so_often(evaluated):
    scores, uniforms = evaluated(4)
    # 0 to 4 of four are right, and answers have 1 or 2 digits beside the tags and the EOS
    assert scores["pass@1"] == pytest.approx(0.5)
    assert scores["pass@4"] == pytest.approx(0.8)
    assert scores["think_share"] == pytest.approx(0.6)
    assert 4 + 2 * 0.6 < scores["mean_length"] < 5 + 2 * 0.6
    assert "greedy" not in scores
    assert uniforms.shape == (4 * NUM_PROBLEMS, T)
    assert len(uniforms[:, 0].unique()) > 390           # each sample has its own
    _, again = evaluated(4, seed=7)                     # the same in every run
    assert torch.equal(again, uniforms)


def test_where_there_are_fewer_problems_than_asked_for_each_counts_once(config, talker, load_task):
    cfg = config(task="arithmetic:2", num_eval_problems=512, num_eval_samples=3)
    task = load_task(cfg)
    problems = common.held_out_problems(task, 512)
    scores = grpo.evaluate(talker(cfg), task, cfg)
    assert scores["problems"] == len({problem.prompt for problem in problems}) == len(problems)
    assert 5 < scores["problems"] < 100
    torch.manual_seed(3)
    other = dataclasses.replace(cfg, seed=5)
    assert grpo.evaluate(talker(cfg), task, other) == scores
