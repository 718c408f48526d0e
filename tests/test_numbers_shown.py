"""What a run logs and shows is what it says: metrics, scores and pages, each on a case in which a
near mistake gives another number."""
from types import SimpleNamespace

import pytest
import torch
from conftest import close, f64
from small_runs import INSTANT, arguments

import common
import dpo
import grpo
import gspo
import plumbing
import ppo
import reinforce
from common import Problem
from engines import here
from examples import distill, lag, turns, zoo
from report import observers


def test_the_critic_has_a_learning_rate_of_its_own(tmp_path, monkeypatch):
    rates = []
    init = plumbing.AdamW.__init__
    monkeypatch.setattr(plumbing.AdamW, "__init__", lambda self, weights, **options: (
        rates.append(options.get("lr")), init(self, weights, **options))[1])
    ppo.main(arguments(INSTANT | {"learning_rate": 1e-3, "critic_learning_rate": 3e-3,
                                  "max_steps": 0, "output_dir": tmp_path / "run"}))
    assert rates[-2:] == [1e-3, 3e-3]


SCALE = {"scale_rewards": "none"}
TAUGHT = {"task": "key", "teacher": "self", "distillation_mode": "sampled_token",
          "teacher_coef": 1.0, "baseline": "mean"}


@pytest.mark.parametrize("main, script, flags", [
    (grpo.main, grpo, SCALE), (gspo.main, gspo, SCALE), (here.main, grpo, SCALE),
    (lag.main, grpo, SCALE), (zoo.main, grpo, SCALE), (distill.main, reinforce, TAUGHT)])
def test_the_flag_that_chooses_the_advantages_reaches_them(tmp_path, watch, main, script, flags):
    chosen = watch(script, "advantages", lambda _, choice=None: choice)
    main(arguments(INSTANT | flags | {"output_dir": tmp_path / "run"}))
    assert chosen == [flags.get("scale_rewards", flags.get("baseline"))]


def test_a_margin_of_0_is_not_ordered_and_log_probs_are_those_of_their_output():
    cfg = dpo.Config(device="cpu", beta=0.5)
    policy = dpo.GPT(cfg)
    prompts = torch.tensor([list(b"1+1=")] * 2)
    tokens = torch.tensor([list(b"2ab"), list(b"3cd")])
    batch = SimpleNamespace(prompts=prompts, tokens=tokens, mask=torch.ones(2, 3),
                            lengths=torch.tensor([3, 3]))
    _, found = dpo.pair_loss(policy, policy, batch, torch.tensor([0]), torch.tensor([1]), cfg)
    metrics = dict(zip(dpo.METRICS, found[:, 0].tolist()))
    assert metrics["rewards/margins"] == metrics["rewards/accuracies"] == 0
    logps = dpo.score(policy, prompts, tokens)[0].sum(dim=1).tolist()
    assert [metrics["logps/chosen"], metrics["logps/rejected"]] == pytest.approx(logps)
    assert logps[0] != pytest.approx(logps[1])


def test_lengths_count_what_the_policy_wrote_and_the_frontier_and_surprise_are_of_this_step():
    mask = torch.tensor([[1.0, 0, 1], [1, 1, 0]] * 4)           # the environment wrote a token
    logps = -torch.arange(24.0).view(8, 3)
    is_correct = torch.tensor([[True, True], [True, False], [False, False], [False, False]])
    batch = SimpleNamespace(
        is_correct=is_correct, rewards=is_correct.float(), sampled=None, mask=mask, logps=logps,
        problems=[Problem("", "", difficulty=n, task="t") for n in (1, 2) for _ in range(4)],
        entropy=torch.ones(8, 3), lengths=torch.tensor([3, 2] * 4), is_truncated=torch.zeros(8))
    assert common.describe(batch)["completions/mean_length"] == 2
    run = SimpleNamespace(task=SimpleNamespace(is_judged=True, parts={}), cfg=SimpleNamespace())
    one = observers.Metrics()
    for scale in (1, 2):                                # a later step has its own surprise
        batch.logps = scale * logps
        metrics = {}
        one.step(run, batch, None, metrics)
        expected = -(scale * logps * mask).sum() / mask.sum()
        assert metrics["sampling/surprise"] == pytest.approx(expected.item())
    assert {name: x for name, x in metrics.items() if "frontier" in name} == {
        "frontier/t-1/wrong": 0, "frontier/t-1/mixed": 0.5, "frontier/t-1/right": 0.5,
        "frontier/t-2/wrong": 1, "frontier/t-2/mixed": 0, "frontier/t-2/right": 0}


def test_a_state_that_one_output_reaches_is_not_shared():
    task = SimpleNamespace(play=lambda problem, text: [
        SimpleNamespace(reward=0.0, state=state) for state in text])
    batch = SimpleNamespace(
        mask=torch.ones(4, 1), rewards=torch.zeros(2, 2), problems=[None] * 4,
        texts=["a", "a", "b", "c"])
    cfg = turns.Config(task="number", adv_estimator="gigpo")
    assert turns.advantages(task, batch, cfg)[1]["turns/shared_states"] == 0.5


def test_a_token_above_the_range_of_clip_cov_keeps_its_gradient():
    logps = f64([[-0.1, -5.0]]).requires_grad_()
    A, mask = f64([[4.0, -4.0]]), torch.ones(1, 2).double()
    for upper, chosen in ((100.0, 1), (5.0, 0)):        # c_t is 9.8 for both tokens
        loss = zoo.clip_cov(
            logps, logps.detach(), A, mask, clip_cov_ratio=0.5, clip_cov_ub=upper)
        assert (loss == 0).sum() == chosen


def test_a_certain_token_has_log_probability_and_entropy_0():
    from kernels import logprob
    logits = torch.full((1, 1, 5), -1e4, dtype=torch.float64)
    logits[..., 2] = 0
    logps, ratio, entropy = logprob.logprob_torch(logits, torch.tensor([[2]]))
    close(torch.stack([logps, entropy]), torch.zeros(2, 1, 1).double())
    assert ratio == 1
