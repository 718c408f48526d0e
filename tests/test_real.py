"""tools/real.py measures what it says: models of the sizes that it names, whose rows are all
computed, and the most that a process held."""

import pytest
from small_models import NEEDS, load_example

import common
import grpo
from tools import real

pytest.importorskip("transformers", reason=NEEDS)
pretrained = load_example()


@pytest.mark.parametrize("variant", real.VARIANTS)
def test_the_flags_of_a_variant_fit_together(variant):
    launcher, flags = real.VARIANTS[variant]
    words = [str(word) for word in [*real.SIZE_JOB, *flags, "--model", "none"]]
    cfg = common.parse_flags(pretrained.Config, words)
    number = 2 if launcher == real.TWO else 1
    assert cfg.num_threads * number == 2 and cfg.num_prompts % number == 0
    assert cfg.dtype in variant
    assert ("checkpointing" in variant) == cfg.gradient_checkpointing
    assert number == 1 or variant.endswith(f"{number} processes, {cfg.parallel}")


def test_a_random_model_never_ends_a_completion_and_no_row_is_left_out(tmp_path, monkeypatch):
    assert real.save_random(tmp_path / "model", 64, 1, 2, 48) == 320 * 64 + 64 * (
        4 * 64 + 3 * 48 + 2) + 64
    words = [*real.SIZE_JOB, "--model", tmp_path / "model", "--num_threads", 1]
    cfg = common.parse_flags(pretrained.Config, [str(word) for word in words])
    policy = pretrained.Policy(cfg.model, cfg)
    batch = pretrained.sample_batch(policy, pretrained.load_task(cfg), cfg, 0)
    assert batch.rewards.eq(0).all() and batch.is_truncated.all() and batch.lengths.eq(48).all()
    scored = []
    score = pretrained.score

    def spy(policy, prompts, *args):
        scored.append(len(prompts))
        return score(policy, prompts, *args)
    monkeypatch.setattr(pretrained, "score", spy)
    A = grpo.advantages(batch.rewards).view(-1, 1)
    rows = next(common.mini_batches(batch, cfg, "shuffle", 0))
    weights = list(policy.model.parameters())
    pretrained.backward(policy, weights, batch, batch.logps, A, rows, cfg)
    assert scored == [8] * (len(rows) // 8) and len(rows) == 64 // cfg.num_mini_batches
