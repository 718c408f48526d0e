"""The lab: what a sampler keeps, and pages whose code has changed since they were measured."""
import json

import pytest
import torch
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


def test_a_page_is_stale_if_the_first_steps_of_its_runs_change(monkeypatch, capsys):
    assert bench.check("hacking") and torch.get_default_dtype() == torch.float32
    monkeypatch.setattr(bench, "first_steps", lambda name: [0.0] * 8)
    with pytest.raises(SystemExit):
        main(["--check", "hacking"])
    assert "stale: hacking" in capsys.readouterr().err
