"""dpo.py: where the pairs of a run come from, ORPO, and the program that learns from own pairs."""
import json
import math
import re
from pathlib import Path

import pytest
import torch
from conftest import close, f64, gradient, scripts
from small_runs import INSTANT, arguments, load, steps
from small_vectors import backward

import dpo

pytestmark = pytest.mark.quick


@scripts("dpo")
@pytest.mark.parametrize("flags, is_base", [("", True), ("--online", False)])
def test_the_base_answers_held_out_problems_and_it_or_the_policy_those_to_learn_from(
        script, train, monkeypatch, flags, is_base):
    """And eval/kl is the KL of the policy from the base, on samples of the policy."""
    sample_batch = script.sample_batch
    calls = []

    def spied(model, task, cfg, step, split="train"):
        batch = sample_batch(model, task, cfg, step, split)
        calls.append((step, split, model, batch))
        if step == "kl":
            batch.mask[:, 0] = 0.0                  # as if an environment had inserted it
        return batch
    monkeypatch.setattr(script, "sample_batch", spied)
    run = train(f"{flags} --eval_steps 2", num_steps=2).run
    _, _, base, _ = calls[0]
    learned = [(step, split, model is base) for step, split, model, _ in calls if step != "kl"]
    assert learned == [("pairs", "test", True), (0, "train", is_base), (1, "train", is_base)]
    [*_, (_, split, model, batch)] = [call for call in calls if call[0] == "kl"]
    assert split == "test" and model is run.policy is not base
    ref_logps, _ = script.score(base, batch.prompts, batch.tokens)
    x = (batch.logps - ref_logps)[batch.mask > 0]
    logged = steps(run.folder)[-1]["eval/kl"]
    assert logged == pytest.approx((torch.exp(-x) - 1 + x).mean().item(), 1e-4)


def test_orpo_compares_the_odds_of_mean_tokens_and_adds_the_likelihood_of_the_chosen_output():
    """p(w) is 0.6, so its odds are 1.5; p(l) is 0.25, so its odds are 1/3."""
    rows = f64([[0.9, 0.4, 0.2], [0.25, 0.25, 0.25]]).log().requires_grad_()
    mask = f64([[1, 1, 0], [1, 1, 1]])
    metrics, surrogate = backward(
        dpo, rows, 0 * mask, mask, None, torch.arange(2).chunk(2), 5 * rows.detach(),
        loss_type="orpo", beta=0.2, nll_coef=1.0)
    loss = -0.2 * math.log(4.5 / 5.5) - math.log(0.6)
    assert metrics["loss"] == pytest.approx(loss)
    slope = 0.2 / 5.5 / 2                       # of the loss in the log odds, for two tokens of w
    close(gradient(surrogate, rows), f64([
        [-slope / 0.4 - 0.5] * 2 + [0], [0.2 / 5.5 / 3 / 0.75] * 3]))
    certain = torch.zeros(1, requires_grad=True)
    dpo.dpo_loss(certain, -torch.ones(1), 0, 0, 0.1, "orpo").sum().backward()
    assert certain.grad.item() == 0


def test_the_program_of_the_page_learns_from_the_pairs_of_a_file(at_work_folder):
    page = (Path(dpo.__file__).parent / "docs/extending.md").read_text()
    [program] = re.findall("```python\n(\"\"\"Learn from pairs.*?)```", page, re.S)
    pairs = [{"prompt": f"({i}+1)=", "chosen": f"<answer>{i + 1}</answer>", "rejected": f"{i}"}
             for i in range(64)]
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    Path("mine").mkdir()
    scope = {"__name__": "page"}
    exec(program, scope)

    metrics = scope["main"](arguments(INSTANT | {
        "task": "arithmetic", "max_steps": 4, "learning_rate": 1e-3, "output_dir": "mine"}))
    assert metrics["rewards/margins"] > 0.03 and metrics["pairs"] == 64
    dpo.main(arguments(INSTANT | {"task": "arithmetic", "init_from": "mine", "max_steps": 0,
                                  "output_dir": "goes-on"}))
    assert torch.equal(load("goes-on/base.pt")["policy"]["embed.weight"],
                       load("mine/checkpoint.pt")["policy"]["embed.weight"])
