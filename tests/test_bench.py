"""The bench measures what it says it does: tiny policies, and nobody installed but what the scripts need."""
import importlib.util
import json

import pytest
import torch

import grpo
from kernels import bench

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 24}


@pytest.fixture
def alone(monkeypatch):
    """As if no package was there to compare with."""
    monkeypatch.setattr(bench, "installed", lambda package: package == "torch")


@pytest.fixture
def record(alone, capsys):
    """All that a CPU machine can show, at a tiny size."""
    made = bench.measure("cpu", 2, {"tiny": TINY}, P=4, G=4, T=12, roof=(0.01, 64))
    made["printed"] = capsys.readouterr().out
    return made


def test_a_record_has_a_row_for_every_kind_with_all_its_parts(record):
    assert [row["kind"] for row in record["rollout"]] == list(bench.KINDS[:2])
    assert [row["kind"] for row in record["step"]] == list(bench.KINDS)
    for row in record["rollout"]:
        assert len(row["seconds"]["ours"]) == 2 and row["median"]["ours"] > 0
    for row in record["step"]:
        assert set(row["median"]) == {*bench.PARTS, "all"} and len(row["seconds"]) == 2
        assert all(seconds >= 0 for seconds in row["median"].values())
    assert record["rollout"][0]["tokens"] == 16 * 12 > record["rollout"][1]["tokens"]
    assert record["machine"]["copy_GB_per_s"] > 0 and record["machine"]["matmul_TFLOP_per_s"] > 0
    assert json.loads(json.dumps(record)) == record


def test_the_first_line_says_what_the_machine_can_do_and_what_lacks_is_said(record):
    first, *others = record["printed"].splitlines()
    assert "GB/s" in first and "TFLOP/s" in first and "torch" in first
    for words in ("need a GPU", "transformers is not installed", "trl is not installed"):
        assert any(words in line for line in others) and words in bench.tables(record)


def test_every_line_of_a_table_has_as_many_cells_as_its_head(record):
    record["logits"] = bench.logits_rows(8, 32, torch.float32, "cpu", 10.0, failing())
    record["linear"] = bench.linear_rows(8, 16, 32, "cpu", 0.1, failing(3))
    blocks = [block for block in bench.tables(record).split("\n\n") if block.startswith("|")]
    assert len(blocks) == 4
    for block in blocks:
        assert len({line.count("|") for line in block.splitlines()}) == 1, block


def failing(arguments=2):
    """Providers of which one cannot do it."""
    def broken(*_):
        raise RuntimeError("no such device")
    return {**(bench.from_logits if arguments == 2 else bench.from_hidden)("cpu"), "theirs": broken}


def test_rows_of_kernels_count_b_bytes_forward_and_twice_that_backward():
    ours, torchs, theirs = bench.logits_rows(64, 128, torch.bfloat16, "cpu", 10.0, failing())
    for row in (ours, torchs):
        for part, times in (("forward", 1), ("backward", 2)):
            at_copy_rate = times * 64 * 128 * 2 / 10e9
            assert row[f"{part}_share_of_copy"] == pytest.approx(at_copy_rate / row[part])
        assert row["error"] < 3e-6 and row["forward_bytes"] is None
    assert "no such device" in theirs["failed"]


def test_a_sweep_tries_other_tiles_and_leaves_the_rule_as_it_was():
    rule = bench.kernels.logprob.THREADS, bench.kernels.logprob.PER_THREAD
    rows = bench.sweep_rows(8, 32, "cpu", 10.0)
    assert f"{rule[0]} threads x {rule[1]}" in {row["who"] for row in rows} and len(rows) == 9
    assert rule == (bench.kernels.logprob.THREADS, bench.kernels.logprob.PER_THREAD)


def test_the_error_of_a_row_is_the_largest_of_both_outputs_against_fp64():
    def wrong(x, a):
        logps, entropy = bench.from_logits("cpu")["ours"](x, a)
        return logps, entropy + 0.1 * (torch.arange(len(a)) == 3)
    row = bench.logits_rows(8, 32, torch.float32, "cpu", 10.0, {"ours": wrong})[0]
    assert 0.1 / (1 + torch.tensor(32.0).log()) <= row["error"] <= 0.1


def test_rows_of_hidden_states_know_the_limit_of_three_matmuls():
    ours, in_memory, theirs = bench.linear_rows(64, 16, 128, "cpu", 0.5, failing(3))
    for row in (ours, in_memory):
        assert row["share_of_limit"] == pytest.approx(6 * 64 * 16 * 128 / 0.5e12 / row["both"])
    assert "failed" in theirs


def test_nine_of_ten_ragged_completions_are_short_and_the_seed_decides_which():
    lengths = bench.lengths_of("ragged", 256, 32)
    assert (lengths == 32).sum() == 25 and set(lengths.tolist()) == {4, 5, 6, 7, 8, 32}
    assert torch.equal(lengths, bench.lengths_of("ragged", 256, 32))
    assert not torch.equal(lengths, bench.lengths_of("ragged", 256, 32, seed=1))


def test_only_in_the_last_kind_do_groups_lack_signal():
    for kind, live in zip(bench.KINDS, (8, 8, 2)):
        rewards = torch.tensor(bench.rewards_of(kind, 8, 4)).view(8, 4)
        assert int(grpo.has_signal(rewards).sum()) == live


def test_completions_of_another_length_than_was_ordered_end_the_bench(capsys):
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    bench.check_lengths("x", mask, torch.tensor([2, 1]))
    with pytest.raises(SystemExit):
        bench.check_lengths("x", mask, torch.tensor([1, 2]))
    assert "x: made" in capsys.readouterr().err


def test_what_the_bench_patches_is_as_before_when_it_is_done(alone):
    def patches():
        return (grpo.EOS, grpo.rollout, grpo.verify, grpo.score, torch.Tensor.backward,
                torch.nn.utils.clip_grad_norm_)
    before = patches()
    bench.step_rows("tiny", "fixed", bench.config("cpu", TINY, 2, 2, 4), 2)
    assert patches() == before


def test_a_patch_ends_with_its_block_and_leaves_nothing_behind():
    class Thing:
        inherited = 1
    with pytest.raises(KeyError), bench.patched(thing := Thing(), inherited=2, new=3):
        assert (thing.inherited, thing.new) == (2, 3)
        raise KeyError
    assert vars(thing) == {} and thing.inherited == 1


def test_a_gain_is_a_ratio_of_neighbours():
    assert bench.gain([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == {"low": 2.0, "median": 2.0, "high": 2.0}


def llama_by_hand(weights, cfg, tokens):
    """The logits that Llama's equations give, with transformers' names of the weights. (B, L) -> (B, L, V)"""
    D, H, KV = cfg.hidden_size, cfg.num_attention_heads, cfg.num_key_value_heads
    hd, L = D // H, tokens.shape[1]

    def norm(x, name):
        return x * (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).rsqrt() * weights[name]

    def heads(x, n, turn=True):                                             # (B, L, n * hd) -> (B, n, L, hd)
        x = x.unflatten(-1, (n, hd)).transpose(1, 2)
        angle = torch.arange(L)[:, None] * 10_000.0 ** (-torch.arange(0, hd, 2) / hd)
        turned = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1).contiguous()) * torch.polar(
            torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], -1) if turn else x

    x = weights["model.embed_tokens.weight"][tokens]
    for i in range(cfg.num_hidden_layers):
        w = {name.removeprefix(f"model.layers.{i}."): weight for name, weight in weights.items()}
        y = norm(x, f"model.layers.{i}.input_layernorm.weight")
        q, k, v = (heads(y @ w[f"self_attn.{name}_proj.weight"].T, n, name != "v")
                   for name, n in (("q", H), ("k", KV), ("v", KV)))
        k, v = (z.repeat_interleave(H // KV, 1) for z in (k, v))
        scores = (q @ k.mT / hd**0.5).masked_fill(torch.ones(L, L).triu(1).bool(), float("-inf"))
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ w["self_attn.o_proj.weight"].T
        y = norm(x, f"model.layers.{i}.post_attention_layernorm.weight")
        gate, up = (y @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ w["mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ weights["lm_head.weight"].T


def test_their_model_has_our_weights_and_our_logits():
    """Against transformers itself where it is installed, and against Llama's equations everywhere."""
    cfg = bench.config("cpu", TINY)
    policy, tokens = grpo.GPT(cfg), torch.randint(grpo.VOCAB, (3, 7))
    for weight in policy.parameters():                  # norms of 1 would hide which is which
        weight.data += 0.1 * torch.randn_like(weight)
    weights = bench.llama_weights(policy, cfg)
    with torch.no_grad():
        ours = policy(tokens)
        torch.testing.assert_close(llama_by_hand(weights, cfg, tokens), ours, atol=2e-5, rtol=1e-4)
        if importlib.util.find_spec("transformers"):
            theirs = bench.llama(policy, cfg, torch.tensor([2, 1, 3]), 7)
            torch.testing.assert_close(theirs(tokens).logits, ours, atol=2e-5, rtol=1e-4)
            made = bench.up_to_end(theirs.generate(tokens)[:, 7:])
            assert made.sum(1).tolist() == [2, 1, 3]
