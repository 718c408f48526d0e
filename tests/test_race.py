"""The race of lab/race.py: it counts each sampled token, and an entry cannot read its samples."""

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
