"""An evaluation counts what the policy answers to held-out problems."""
import dataclasses

import pytest
import torch

import common
import grpo

NUM_PROBLEMS = 100
T = 40


def plain_text(prompt):
    """The text of a row of prompts, without padding."""
    return grpo.decode([token for token in prompt if token != grpo.PAD])


class KnownPolicy:
    """Stands in for rollout. Greedy, it is right on every third problem. Of four samples of problem
    n the first n % 5 are right; they think if n % 5 is 2 or more; if n is odd, the wrong ones
    agree."""

    def __init__(self):
        self.prompts = {"greedy": [], "sampled": []}    # of all rows, in the order asked
        self.lengths = []                               # of the samples
        self.uniforms = []

    def answer(self, kind, problem):
        """What the next row of this kind says."""
        row = len(self.prompts[kind])
        if kind == "greedy":
            n = row
            g = 0
            is_right = n % 3 == 0
        else:
            n = row // 4
            g = row % 4
            is_right = g < n % 5
        wrong = 30 + g if n % 2 == 0 else 30
        thought = "<think></think>" if n % 5 >= 2 else ""
        return f"{thought}<answer>{problem.answer if is_right else wrong}</answer>"

    def rollout(self, model, prompts, problems, task, cfg, uniforms=None):
        kind = "greedy" if uniforms is None else "sampled"
        tokens = torch.full((len(prompts), T), grpo.PAD)
        mask = torch.zeros(len(prompts), T)
        assert [p.prompt for p in problems] == [plain_text(ids) for ids in prompts.tolist()]
        for row, problem in enumerate(problems):
            text = self.answer(kind, problem)
            ids = [*grpo.TOKENIZER.encode(text, allowed_special="all"), grpo.EOS]
            tokens[row, :len(ids)] = torch.tensor(ids)
            mask[row, :len(ids)] = 1.0
            self.prompts[kind].append(problem.prompt)
        if uniforms is not None:
            assert uniforms.shape == tokens.shape
            self.uniforms.append(uniforms)
            self.lengths += mask.sum(dim=1).tolist()
        return common.Rollout(tokens, mask, mask, mask, mask.sum(dim=1).long())


@dataclasses.dataclass
class Evaluation:
    """What came of an evaluation of KnownPolicy."""
    policy: KnownPolicy
    problems: list
    scores: dict
    progress: list          # label and steps of each progress bar


@pytest.fixture
def evaluated(config, load_task, monkeypatch):
    """evaluated(num_samples) -> an Evaluation"""
    def evaluate(num_samples):
        cfg = config(num_eval_problems=NUM_PROBLEMS, max_completion_length=T)
        task = load_task(cfg)
        policy = KnownPolicy()
        monkeypatch.setattr(grpo, "rollout", policy.rollout)
        bars = []

        def progress(label, steps):
            bars.append((label, list(steps)))
            return steps
        scores = grpo.evaluate(None, task, cfg, num_samples, progress)
        problems = common.held_out_problems(task, NUM_PROBLEMS)
        assert len(problems) == NUM_PROBLEMS
        return Evaluation(policy, problems, scores, bars)
    return evaluate


def test_greedy_scores_are_those_of_one_answer_to_each_problem(evaluated):
    found = evaluated(0)
    scores = found.scores
    assert scores.keys() == {
        "greedy", "examples", "think_share", "mean_length", "problems", "samples"}
    assert scores["greedy"] == pytest.approx(0.34)
    assert scores["problems"] == NUM_PROBLEMS
    assert scores["samples"] == 0
    expected = [(p.prompt, p.answer, n % 3 == 0) for n, p in enumerate(found.problems[:64])]
    assert [(e["prompt"], e["answer"], e["right"]) for e in scores["examples"]] == expected
    assert found.policy.prompts["greedy"] == [p.prompt for p in found.problems]
    assert found.progress == [("evaluation", [0])]


def test_scores_of_samples_are_those_of_each_problem_answered_so_often(evaluated):
    found = evaluated(4)
    expected_prompts = [p.prompt for p in found.problems for _ in range(4)]
    assert found.policy.prompts["sampled"] == expected_prompts
    assert found.progress == [("evaluation", [0, 256])]         # in parts that fit in memory
    # n % 10:  0 1 2 3 4 5 6 7 8 9
    # maj@4:   0 0 1 1 1 0 1 1 1 1
    # One right sample of four is outvoted when the others agree (1), and not when all differ (6);
    # two of four win a tie because they came first (7).
    expected = {
        "pass@1": 0.5, "pass@4": 0.8, "maj@4": 0.7, "problems": NUM_PROBLEMS, "samples": 4,
        "think_share": 0.6, "mean_length": sum(found.policy.lengths) / 400,
        "accuracy_given_think": (2 + 3 + 4) / 12, "accuracy_given_direct": (0 + 1) / 8}
    assert found.scores.keys() == {*expected, "pass@k", "maj@k"}
    for name, value in expected.items():
        assert found.scores[name] == pytest.approx(value), name


def test_pass_at_k_and_maj_at_k_are_lists_over_k(evaluated):
    scores = evaluated(4).scores
    # Of c = n % 5 right ones of four samples, two find one with 1 - C(4 - c, 2) / C(4, 2).
    pass_at_2 = (0 + 3 + 5 + 6 + 6) / 30
    pass_at_3 = (0 + 3 + 4 + 4 + 4) / 20
    assert scores["pass@k"] == pytest.approx([0.5, pass_at_2, pass_at_3, 0.8])
    # maj@2 is of samples 1 and 2, then 3 and 4, and the first of two wins: 0, 1, 1, 2, 2 of two.
    # maj@3 is of samples 1 to 3: one right one is outvoted if the two others agree.
    maj_at_2 = (0 + 1 + 1 + 2 + 2) / 10
    maj_at_3 = (0 + 0.5 + 3) / 5
    assert scores["maj@k"] == pytest.approx([0.5, maj_at_2, maj_at_3, 0.7])


def test_each_sample_has_uniforms_of_its_own(evaluated):
    uniforms = torch.cat(evaluated(4).policy.uniforms)
    assert uniforms.shape == (400, T)
    assert len(uniforms[:, 0].unique()) > 390


def test_evaluation_says_none_where_there_is_nothing_to_average(config, talker, load_task):
    cfg = config(num_eval_problems=3)
    scores = grpo.evaluate(talker(cfg), load_task(cfg), cfg, 2)     # it never thinks
    assert scores["accuracy_given_think"] is None
    assert scores["accuracy_given_direct"] == 0
    assert scores["think_share"] == 0
    assert scores["problems"] == 3


@pytest.mark.parametrize("num_samples", [0, 3])
def test_where_there_are_fewer_problems_than_asked_for_each_counts_once(
        config, talker, load_task, num_samples):
    cfg = config(operands="2", num_eval_problems=512)
    task = load_task(cfg)
    problems = common.held_out_problems(task, 512)
    scores = grpo.evaluate(talker(cfg), task, cfg, num_samples)
    assert scores["problems"] == len({problem.prompt for problem in problems}) == len(problems)
    assert 5 < scores["problems"] < 100
    assert scores["samples"] == num_samples


def test_evaluation_is_the_same_for_every_seed_and_every_time(config, talker, load_task):
    cfg = config(num_eval_problems=5)
    policy = talker(cfg)
    scores = grpo.evaluate(policy, load_task(cfg), cfg, 3)
    torch.manual_seed(3)
    other = dataclasses.replace(cfg, seed=5)
    assert grpo.evaluate(policy, load_task(other), other, 3) == scores
