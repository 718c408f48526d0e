"""The KL to the base that is logged when it is no term of the loss: of every eighth row, nearly free."""
import copy

import policies
import pytest
import torch
from conftest import scripts

talker = policies.talker


@scripts("reinforce", "grpo", "gspo")
def test_without_beta_the_kl_is_measured_on_every_eighth_row_by_length(script, config, talker, monkeypatch):
    cfg = config(num_prompts=8, num_generations=4, beta=0.0, micro_batch_size=32)
    policy, A = talker(cfg).double(), torch.linspace(-1, 1, 32, dtype=torch.float64)
    ref = copy.deepcopy(policy)
    ref.embed.weight.data *= 1.1
    batch, scored = script.sample_batch(policy, cfg, 0), []
    lengths, mask = batch.out.lengths, batch.out.mask
    rows, real = lengths.argsort(stable=True)[::8], script.score
    monkeypatch.setattr(script, "score", lambda model, *rest: (
        scored.append((model is ref, len(rest[1]))), real(model, *rest))[1])
    if script.__name__ == "reinforce":
        A = A[:, None] * mask
    metrics = script.backward(policy, ref, batch, A, torch.arange(32), cfg, 0.0)
    assert scored == [(False, 32), (True, 4)]
    texts = batch.prompts, batch.of[rows], batch.out.tokens[rows]
    ours, theirs = (real(model, *texts)[0] for model in (policy, ref))
    expected = (script.kl(ours, theirs, "k3") * mask[rows]).sum() / mask[rows].sum()
    assert metrics["kl"] == pytest.approx(expected.item(), rel=1e-6) and metrics["kl"] > 1e-4
