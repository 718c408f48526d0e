"""The race of lab/race.py: it counts each sampled token, and an entry cannot read its samples."""
import pytest

from lab import race

LOOP = """import torch, grpo
def train(policy, sample, step_done):
    while True:
        batch = sample(num_prompts=2, num_generations=3, max_completion_length=24)
        logps, _ = grpo.score(policy, batch.prompts, batch.tokens)
        assert torch.allclose(logps * batch.mask, batch.logps, atol=1e-5)
        print(int(batch.mask.sum()), file=open("COUNTS", "a"))
        assert batch.problems is batch.texts is batch.verdicts is None
        policy.embed.weight.data += 0.1 * torch.randn(policy.embed.weight.shape)
        step_done()
"""


def test_each_token_counts_until_the_goal_is_reached(tmp_path, monkeypatch):
    scores = iter([0.94, 0.94, 0.96])
    monkeypatch.setattr(race.grpo, "evaluate", lambda *_, greedy: {"greedy": next(scores)})
    counts = tmp_path / "counts.txt"
    (tmp_path / "entry.py").write_text(LOOP.replace("COUNTS", str(counts)))
    tokens = race.race(f"{tmp_path}/entry.py:train", {}, 0, 0)
    assert tokens == sum(map(int, counts.read_text().split())) < 3 * 2 * 3 * 24


@pytest.mark.parametrize(("line", "message"), [
    ("open('runs/base')", "may not contain the word open"),
    ("policy.norm.weight.data += 1; sample()", "changed the policy"),
    ("return", "returned or failed")])
def test_an_entry_that_breaks_a_rule_is_refused(line, message, tmp_path, capsys):
    (tmp_path / "entry.py").write_text(f"def train(policy, sample, step_done):\n    {line}\n")
    with pytest.raises(SystemExit):
        race.main([f"{tmp_path}/entry.py:train"])
    assert message in capsys.readouterr().err
