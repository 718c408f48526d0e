"""Where rewards land: at the tokens that the policy sampled, whatever an environment inserted between."""
import types

import pytest
import torch
from conftest import f64

import ppo
import reinforce


@pytest.mark.parametrize("script", [reinforce, ppo], ids=["reinforce", "ppo"])
@pytest.mark.parametrize("verdict, reward, mask, expected", [
    (1.0, 1.0, [1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1]),             # a number: with the last
    (1.0, 1.1, [1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1.1]),           # a bonus besides
    (0.0, 0.5, [1, 1, 1, 1, 0, 0], [0, 0, 0, 0.5, 0, 0]),           # the last that was sampled
    ([0.5, -1.0, 0, 0, 2.0, 0.25], 1.75, [1, 1, 0, 0, 1, 1], [0.5, -1.0, 0, 0, 2.0, 0.25]),
    ([0.5, -1.0, 0, 0, 2.0, 0.25], 2.0, [1, 1, 0, 0, 1, 1], [0.5, -1.0, 0, 0, 2.0, 0.5]),
    ([0.5, -1.0, 3, 0, 2.0, 0.25], 4.75, [1, 1, 0, 0, 1, 1], [0.5, -1.0, 0, 0, 2.0, 3.25]),   # lost to nobody
    ([0.5, -1.0, 0, 0, 0, 0], -0.5, [1, 1, 0, 0, 0, 0], [0.5, -1.0, 0, 0, 0, 0])])
def test_a_verdict_skips_the_tokens_that_were_inserted(
        script, verdict, reward, mask, expected, config, monkeypatch):
    mask = f64([mask])
    tokens = torch.tensor([[97, 98, 120, 120, 99, 100]])
    out = script.Rollout(tokens, mask, 0 * mask, 0 * mask, torch.tensor([6]))
    batch = types.SimpleNamespace(
        out=out, verdicts=[verdict], prompts=torch.tensor([[1]]), of=torch.tensor([0]), decode=script.decode,
        rewards=torch.tensor([[reward]]).double())
    found = script.token_rewards(out, batch.verdicts, batch.rewards)
    torch.testing.assert_close(found, f64([expected]))
    cfg = script.Config(device="cpu", gamma=1.0)
    if script is reinforce:
        A = script.credit(None, None, batch, script.Config(device="cpu", view="token"))
        to_go = torch.tensor([expected], dtype=torch.float64).flip(1).cumsum(1).flip(1)
        torch.testing.assert_close(A, to_go * mask)
    else:
        monkeypatch.setattr(script, "score", lambda *_: (0 * mask, 0 * mask))
        found = script.assign_credit(lambda *_: 0 * mask, None, batch, cfg, 0.0, critic_lam=1.0)
        to_go = torch.tensor([expected], dtype=torch.float64).flip(1).cumsum(1).flip(1)
        torch.testing.assert_close(found.returns, to_go * mask)
