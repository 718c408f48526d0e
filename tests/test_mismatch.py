"""The lab: what a sampler keeps, and pages whose code has changed since they were measured."""
import json

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT

from lab import bench
from lab.__main__ import main
from lab.claims import mismatch


def test_a_sampler_keeps_the_tokens_that_the_vectors_keep():
    vectors = json.loads((ROOT / "vectors/truncated_logps.json").read_text("utf-8"))
    for case in vectors["cases"]:
        logits = torch.tensor(vectors["batches"][case["batch"]]["sampler_logits"]).double()
        temperature, top_k, top_p = case["parameters"].values()
        kept = mismatch.kept(logits, temperature, top_p, top_k or logits.shape[-1])
        mass = (logits.softmax(dim=-1) * kept).sum(dim=-1)
        assert torch.allclose(mass, torch.tensor(case["right"]["mass"]).double()), case["id"]


@pytest.mark.parametrize("sampler", mismatch.SAMPLERS)
def test_the_trainer_improves_the_sampler_and_moves_the_policy_towards_it_or_away(sampler):
    """The identity of docs/lab/mismatch.md, for all 27 outputs of three tokens of a policy whose
    logits depend on the tokens before."""
    temperature, top_p, top_k = mismatch.SAMPLERS[sampler]
    generator = torch.Generator().manual_seed(0)
    outputs = torch.cartesian_prod(*[torch.arange(3)] * 3)                          # (27, 3)
    rewards = torch.rand(27, generator=generator).double()
    logits = 2 * torch.randn(1 + 3 + 9, 3, generator=generator).double()            # by prefix
    logits.requires_grad_()
    prefix = torch.stack([torch.zeros(27), 1 + outputs[:, 0],
                          4 + 3 * outputs[:, 0] + outputs[:, 1]], dim=1).long()     # (27, 3)
    is_kept = mismatch.kept(logits.detach(), temperature, top_p, min(top_k, 2))
    cut = (logits / temperature).masked_fill(~is_kept, -torch.inf)
    mu, log_pi = cut.softmax(dim=-1), logits.log_softmax(dim=-1)                    # (13, 3)
    chosen = mu[prefix].gather(2, outputs[..., None])[..., 0]                       # (27, 3)
    p = chosen.prod(dim=1)
    J = (p * rewards).sum()
    steps = log_pi[prefix].gather(2, outputs[..., None])[..., 0]
    [found] = torch.autograd.grad((p.detach() * (rewards - J.detach()) * steps.sum(dim=1)).sum(),
                                  logits, retain_graph=True)
    [right] = torch.autograd.grad(J, logits, retain_graph=True)
    kl = F.kl_div(log_pi, mu.detach(), reduction="none").sum(dim=-1)                # (13,)
    bias = 0
    for state in range(13):
        here = (prefix == state).any(dim=1)                         # the outputs that pass it
        reached = p[here].sum().detach()
        V = (p * rewards)[here].sum().detach() / reached if reached > 0 else 0.0
        bias = bias + reached * (V - J.detach()) * kl[state]
    [bias] = torch.autograd.grad(bias, logits)
    assert (found - temperature * right + bias).abs().max() < 1e-15
    assert bias.norm() > 0.01 * found.norm() or sampler == mismatch.AT_1


def test_a_page_is_stale_if_the_first_steps_of_its_runs_change(monkeypatch, capsys):
    assert bench.check("hacking") and torch.get_default_dtype() == torch.float32
    monkeypatch.setattr(bench, "first_steps", lambda name: [0.0] * 8)
    with pytest.raises(SystemExit):
        main(["--check", "hacking"])
    assert "stale: hacking" in capsys.readouterr().err
