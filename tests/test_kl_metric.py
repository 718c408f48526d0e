"""The KL to the base that is logged, k1 of the policy that sampled, and the reference that the loss sees."""
import copy
import types

import policies
import pytest
import torch
from conftest import scripts

talker = policies.talker
pytestmark = scripts("reinforce", "grpo", "gspo")


@pytest.fixture
def scene(script, config, talker):
    """scene(**changes) -> cfg, policy, a reference some way off, a batch of 32 rows in which the environment
    has had a word, advantages."""
    def make(**changes):
        cfg = config(num_prompts=8, num_generations=4, temperature=0.7, **changes)
        policy = talker(cfg).double()
        ref = copy.deepcopy(policy)
        ref.embed.weight.data *= 1.1
        batch = script.sample_batch(policy, cfg, 0)
        batch.out.mask[8, 1] = 0.0
        A = torch.linspace(-1, 1, 32, dtype=torch.float64)
        return cfg, policy, ref, batch, A[:, None] * batch.out.mask if script.__name__ == "reinforce" else A
    return make


def test_the_kl_is_that_of_the_policy_that_sampled_by_every_eighth_row(script, scene, monkeypatch):
    cfg, policy, ref, batch, A = scene(beta=0.0)
    rows, real, scored = slice(None, None, 8), script.score, []
    ours, theirs = batch.out.logps[rows], real(
        ref, batch.prompts, batch.of[rows], batch.out.tokens[rows], *cfg.scoring)[0]
    monkeypatch.setattr(script, "score", lambda model, *rest: (
        model is ref and scored.append(len(rest[1])), real(model, *rest))[1])
    metrics = script.update(policy, ref, torch.optim.SGD(policy.parameters(), 1.0), batch, A, cfg, 0)
    assert scored == [4]
    expected = (ours - theirs)[batch.out.mask[rows] == 1].mean().item()
    assert metrics["kl"] == pytest.approx(expected, rel=1e-9) and abs(expected) > 1e-3


def test_in_a_loss_each_row_has_the_reference_of_its_own_text(script, scene):
    cfg, policy, ref, batch, A = scene(beta=0.5, num_mini_batches=2, max_grad_norm=1e9)
    score = batch.prompts, batch.of, batch.out.tokens, *cfg.scoring
    before, twin = copy.deepcopy(policy), copy.deepcopy(policy)
    expected = types.SimpleNamespace(**vars(batch) | {"ref_logps": script.score(ref, *score)[0].detach()})
    optimizer = torch.optim.SGD(twin.parameters(), cfg.learning_rate)
    for rows in script.mini_batches(expected, cfg, "shuffle", 0):
        script.backward(twin, expected, A, rows, cfg, 0.0)
        optimizer.step()
    metrics = script.update(policy, ref, torch.optim.SGD(policy.parameters()), batch, A, cfg, 0)
    for one, other, start in zip(policy.parameters(), twin.parameters(), before.parameters()):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)
        assert not torch.equal(one, start)
    away = script.kl(batch.out.logps, expected.ref_logps, "k1")[batch.out.mask == 1].mean()     # of all rows
    assert metrics["kl"] == pytest.approx(away.item(), rel=1e-9)
