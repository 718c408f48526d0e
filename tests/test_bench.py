"""The bench measures what it says it does: with tiny policies, and without the packages it compares
with."""
import importlib.util
import json

import pytest
import torch

import common
import grpo
from kernels import bench, scaling

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 24}


@pytest.fixture
def alone(monkeypatch):
    """As if there was no package to compare with."""
    def installed(package):
        return package == "torch"
    monkeypatch.setattr(bench, "installed", installed)


@pytest.fixture
def record(alone, capsys, monkeypatch):
    """All that a CPU machine can show, at a tiny size."""
    monkeypatch.setattr(scaling, "measure", scaling.measure_point)      # in this process
    points = scaling.points("cpu", {"tiny": (TINY, 1)}, lengths=(2, 4), G=2)
    measured = bench.measure(
        "cpu", 2, {"tiny": TINY}, P=4, G=4, T=12, roof=(0.01, 64), points=points)
    measured["printed"] = capsys.readouterr().out
    return measured


def broken(*_):
    """A provider that cannot do it."""
    raise RuntimeError("no such device")


def logits_providers():
    return bench.from_logits("cpu") | {"theirs": broken}


def hidden_providers():
    return bench.from_hidden("cpu") | {"theirs": broken}


def test_a_record_has_a_row_for_every_kind_with_all_its_parts(record):
    assert [row["kind"] for row in record["rollout"]] == list(bench.KINDS[:2])
    assert [row["kind"] for row in record["step"]] == list(bench.KINDS)
    for row in record["rollout"]:
        assert len(row["seconds"]["ours"]) == 2 and row["median"]["ours"] > 0
    for row in record["step"]:
        assert set(row["median"]) == {*bench.PARTS, "all"} and len(row["seconds"]) == 2
        assert all(seconds >= 0 for seconds in row["median"].values())
        for part in ("generate", "reference", "forward", "backward", "optimiser", "all"):
            assert row["median"][part] > 0, part
    assert [(row["job"], row["T"]) for row in record["scaling"]] == [
        ("rollout", 2), ("rollout", 4), ("update", 2), ("update", 4)]
    fixed, ragged = record["rollout"]
    assert fixed["tokens"] == 16 * 12 > ragged["tokens"]
    assert record["machine"]["copy_GB_per_s"] > 0
    assert record["machine"]["matmul_TFLOP_per_s"] > 0
    assert json.loads(json.dumps(record)) == record


@pytest.mark.parametrize("asked, title, absent", [
    ("rollout", "Rollout of 2 x 2", "A step of GRPO"),
    ("step", "A step of GRPO", "Rollout of")])
def test_only_the_rows_that_are_asked_for_are_measured(alone, asked, title, absent):
    record = bench.measure(
        "cpu", 2, {"tiny": TINY}, P=2, G=2, T=4, roof=(0.01, 64), rows=[asked])
    assert [name for name in bench.ROWS if record[name]] == [asked]
    assert title in bench.tables(record) and absent not in bench.tables(record)


def test_rows_are_named_by_a_list_and_a_wrong_name_is_refused(capsys):
    assert bench.some_rows("linear,step") == ["linear", "step"]
    with pytest.raises(SystemExit):
        bench.main(["--rows", "linear,steps"])
    assert "linear,steps" in capsys.readouterr().err


def made_record(**changes):
    """A record of which only the names of the rows matter."""
    machine = {"device": "cpu", "cpu": "x", "threads": 1, "versions": {"torch": "2"},
               "copy_GB_per_s": 1.0} | changes.pop("machine", {})
    made = {"machine": machine, "repeats": 5, "shape": [1, 2, 3, 4], "remarks": []}
    return made | {name: [] for name in bench.ROWS} | changes


def test_rows_that_were_not_asked_for_stay_as_this_machine_measured_them():
    old = made_record(step=["old step"], rollout=["old rollout"], scaling=["old"], repeats=7)
    new = made_record(scaling=["new"], machine={"copy_GB_per_s": 0.5})
    found = bench.merged(old, new, ["scaling"])
    assert (found["scaling"], found["step"]) == (["new"], ["old step"])
    assert found["repeats"] == 7 and found["machine"]["copy_GB_per_s"] == 1.0   # those of the steps
    found = bench.merged(old, made_record(step=["new step"]), ["step"])
    assert (found["step"], found["rollout"]) == (["new step"], ["old rollout"])
    assert found["repeats"] == 5
    old.pop("scaling")                      # older records have no such rows
    assert bench.merged(old, made_record(step=["new step"]), ["step"])["scaling"] == []


@pytest.mark.parametrize("name, value", [("device", "H100"), ("cpu", "y"), ("threads", 2),
                                         ("versions", {"torch": "3"})])
def test_rows_of_another_machine_or_other_software_do_not_stay(name, value):
    old = made_record(step=["old step"], machine={name: value})
    new = made_record(scaling=["new"])
    assert bench.merged(old, new, ["scaling"]) == bench.merged(None, new, ["scaling"]) == new


def test_rows_stay_where_a_package_that_they_needed_is_not_installed_any_more():
    versions = {"torch": "2", "trl": "1"}
    old = made_record(step=["old step"], machine={"versions": versions})
    new = made_record(scaling=["new"], machine={"versions": {"torch": "2", "triton": "3"}},
                      remarks=["No rows of TRL"])
    found = bench.merged(old, new, ["scaling"])
    assert (found["scaling"], found["step"], found["remarks"]) == (["new"], ["old step"], [])
    assert found["machine"]["versions"] == versions


def test_the_page_gets_the_tables_of_all_records_and_what_grows(tmp_path, monkeypatch, record):
    texts = {}
    monkeypatch.setattr(bench, "DOCS", tmp_path)
    monkeypatch.setattr(bench, "put", lambda name, text, target: texts.update({name: text}))
    monkeypatch.setattr(scaling, "report", lambda rows, device, slug: f"{len(rows)} {slug} ")
    record["machine"]["cpu"] = "one"
    (tmp_path / "bench-cpu.json").write_text(json.dumps(record))
    record["machine"] |= {"device": "NVIDIA H100", "cpu": "two"}
    (tmp_path / "bench-nvidia-h100.json").write_text(json.dumps(record))
    record["machine"] |= {"device": "NVIDIA old"}
    record.pop("scaling")
    (tmp_path / "bench-nvidia-old.json").write_text(json.dumps(record))
    bench.publish()
    assert texts["scaling"] == "4 cpu 4 nvidia-h100 "
    assert texts["speed"].count("A step of GRPO") == 3 and "CPU (one)" in texts["speed"]


def test_the_parts_of_a_step_add_up_to_all_of_it(alone):
    row, = bench.step_rows("tiny", "fixed", bench.config("cpu", TINY, 2, 2, 4), 1)
    parts = sum(row["median"][part] for part in bench.PARTS)
    assert parts == pytest.approx(row["median"]["all"])


def test_the_first_line_says_what_the_machine_can_do_and_what_is_missing_is_said(record):
    first, *others = record["printed"].splitlines()
    assert "GB/s" in first and "TFLOP/s" in first and "torch" in first
    for words in ("need a GPU", "transformers is not installed", "trl is not installed"):
        assert any(words in line for line in others) and words in bench.tables(record)


def test_every_line_of_a_table_has_as_many_cells_as_its_head(record):
    record["logits"] = bench.logits_rows(8, 32, torch.float32, "cpu", 10.0, logits_providers())
    record["linear"] = bench.linear_rows(8, 16, 32, "cpu", 0.1, hidden_providers())
    record["step"].append({"size": "tiny", "kind": "fixed", "who": "TRL", "failed": "no"})
    paragraphs = bench.tables(record).split("\n\n")
    tables = [paragraph for paragraph in paragraphs if paragraph.startswith("|")]
    assert len(tables) == 4
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1, table


def test_rows_of_kernels_count_b_bytes_forward_and_twice_that_backward():
    rows = bench.logits_rows(64, 128, torch.bfloat16, "cpu", 10.0, logits_providers())
    ours, in_torch, theirs = rows
    copy_seconds = 64 * 128 * 2 / 10e9
    for row in (ours, in_torch):
        assert row["forward_share_of_copy"] == pytest.approx(copy_seconds / row["forward"])
        assert row["backward_share_of_copy"] == pytest.approx(2 * copy_seconds / row["backward"])
        assert row["error"] < 3e-6 and row["forward_bytes"] is None
    assert "no such device" in theirs["failed"]


def test_who_breaks_the_gpu_is_named_and_nobody_else_measured(monkeypatch):
    def synchronize(device):
        raise RuntimeError("CUDA error: an illegal memory access")
    row = {"who": "theirs"}
    bench.measure_if_possible(broken, row, "cpu")
    assert row["failed"] == "RuntimeError: no such device"
    monkeypatch.setattr(bench, "now", synchronize)
    with pytest.raises(RuntimeError, match="theirs broke the GPU: RuntimeError: no such device"):
        bench.measure_if_possible(broken, {"who": "theirs"}, "cpu")


def test_a_rollout_or_step_of_others_that_fails_says_so_and_ours_is_measured(monkeypatch):
    def trl_steps(policy, cfg, lengths, rewards, steps, between):
        between()
        raise TypeError("no such\nargument")
    monkeypatch.setattr(bench, "installed", lambda package: True)
    monkeypatch.setattr(bench, "trl_steps", trl_steps)
    monkeypatch.setattr(bench, "llama", broken)
    cfg = bench.config("cpu", TINY, 2, 2, 4)
    ours, theirs = bench.step_rows("tiny", "fixed", cfg, 2)
    assert len(ours["seconds"]) == 2 and ours["median"]["all"] > 0 and "gain" not in ours
    assert theirs["failed"] == "TypeError: no such argument"
    row = bench.rollout_row("tiny", "fixed", cfg, 2)
    assert len(row["seconds"]["ours"]) == 2 and "gain" not in row
    assert row["failed"] == "HF generate: RuntimeError: no such device"
    assert "-" in bench.rollout_cells(row) and "failed" in bench.step_cells(theirs)


def test_a_rollout_or_step_of_ours_that_fails_is_no_row(alone, monkeypatch):
    monkeypatch.setattr(grpo, "rollout", broken)
    cfg = bench.config("cpu", TINY, 2, 2, 4)
    for rows in (bench.rollout_row, bench.step_rows):
        with pytest.raises(RuntimeError, match="no such device"):
            rows("tiny", "fixed", cfg, 1)


def test_a_sweep_tries_other_tiles_and_leaves_the_rule_as_it_was():
    def rule():
        return bench.logprob_kernels.THREADS, bench.logprob_kernels.PER_THREAD
    threads, per_thread = rule()
    rows = bench.sweep_rows(8, 32, "cpu", 10.0)
    assert f"{threads} threads x {per_thread}" in {row["who"] for row in rows}
    assert len(rows) == 9 and rule() == (threads, per_thread)


def test_the_error_of_a_row_is_the_largest_of_both_outputs_against_fp64():
    def wrong(logits, tokens):
        logps, entropy = bench.ours_from_logits(logits, tokens)
        return logps, entropy + 0.1 * (torch.arange(len(tokens)) == 3)
    row, = bench.logits_rows(8, 32, torch.float32, "cpu", 10.0, {"ours": wrong})
    assert 0.1 / (1 + torch.tensor(32.0).log()) <= row["error"] <= 0.1


def test_rows_of_hidden_states_know_the_limit_of_three_matmuls():
    ours, in_memory, theirs = bench.linear_rows(64, 16, 128, "cpu", 0.5, hidden_providers())
    limit = 6 * 64 * 16 * 128 / 0.5e12
    for row in (ours, in_memory):
        assert row["share_of_limit"] == pytest.approx(limit / row["both"])
    assert "failed" in theirs


def test_all_who_make_log_probs_of_hidden_states_make_the_same():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, 16, generator=generator)
    head = torch.randn(32, 16, generator=generator)
    tokens = torch.randint(32, (8,), generator=generator)
    expected = bench.exact(hidden @ head.T, tokens, size=3)
    for provider in bench.from_hidden("cpu").values():
        for values, exact in zip(provider(hidden, head, tokens), expected):
            torch.testing.assert_close(values.double(), exact, atol=1e-5, rtol=1e-5)


def test_nine_of_ten_ragged_completions_are_short_and_the_seed_decides_which():
    lengths = bench.lengths_of("ragged", 256, 32)
    assert (lengths == 32).sum() == 25 and set(lengths.tolist()) == {4, 5, 6, 7, 8, 32}
    assert torch.equal(lengths, bench.lengths_of("ragged", 256, 32))
    assert not torch.equal(lengths, bench.lengths_of("ragged", 256, 32, seed=1))


def test_only_in_the_last_kind_do_groups_lack_signal():
    for kind, expected in zip(bench.KINDS, (8, 8, 2)):
        rewards = torch.tensor(bench.rewards_of(kind, 8, 4)).view(8, 4)
        has_signal = rewards.amax(dim=1) > rewards.amin(dim=1)
        assert int(has_signal.sum()) == expected


def test_completions_of_another_length_than_was_ordered_are_an_error():
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    bench.check_lengths("x", mask, torch.tensor([2, 1]))
    with pytest.raises(RuntimeError, match="x sampled 3 tokens"):
        bench.check_lengths("x", mask, torch.tensor([1, 2]))


def test_what_the_bench_patches_is_as_before_when_it_is_done(alone):
    def patches():
        return [grpo.EOS, grpo.rollout, grpo.verify, grpo.score, torch.Tensor.backward,
                torch.nn.utils.clip_grad_norm_]
    before = patches()
    bench.step_rows("tiny", "fixed", bench.config("cpu", TINY, 2, 2, 4), 2)
    assert patches() == before


def test_a_patch_ends_with_its_block_and_leaves_nothing_behind():
    class Thing:
        inherited = 1
    thing = Thing()
    with pytest.raises(KeyError), bench.patched(thing, inherited=2, new=3):
        assert thing.inherited == 2 and thing.new == 3
        raise KeyError
    assert vars(thing) == {} and thing.inherited == 1


def test_a_gain_is_a_ratio_of_neighbours():
    gain = bench.gain([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert gain == {"low": 2.0, "median": 2.0, "high": 2.0}


def test_a_step_samples_verifies_and_learns_from_what_was_ordered(alone, monkeypatch):
    """Lengths, and rewards by the order of the rows."""
    batches = []

    def describe(batch):
        batches.append(batch)
        return {}
    monkeypatch.setattr(common, "describe", describe)
    cfg = bench.config("cpu", TINY, 4, 4, 12)
    bench.step_rows("tiny", "ragged", cfg, 1)
    for batch in batches:
        assert torch.equal(batch.mask.sum(dim=1).long(), bench.lengths_of("ragged", 16, 12))
        assert batch.rewards.flatten().tolist() == bench.rewards_of("ragged", 4, 4)
    assert len(batches) == 2


def norm_by_hand(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).rsqrt() * weight


def rotate_by_hand(x):
    """Rotary positions of (B, heads, L, hd), as complex numbers."""
    _, _, L, hd = x.shape
    angles = torch.arange(L)[:, None] * 10_000.0 ** (-torch.arange(0, hd, 2) / hd)
    left, right = x.chunk(2, dim=-1)
    turned = torch.complex(left, right) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def attention_by_hand(y, weights, cfg):
    """(B, L, D) -> (B, L, D); the weights are those of a layer, by transformers' names"""
    H = cfg.num_attention_heads
    KV = cfg.num_key_value_heads
    L = y.shape[1]

    def heads(name, num_heads):
        x = y @ weights[f"self_attn.{name}_proj.weight"].T
        return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)                 # (B, heads, L, hd)
    q = rotate_by_hand(heads("q", H))
    k = rotate_by_hand(heads("k", KV)).repeat_interleave(H // KV, dim=1)
    v = heads("v", KV).repeat_interleave(H // KV, dim=1)
    is_later = torch.ones(L, L).triu(1).bool()
    scores = (q @ k.mT / q.shape[-1]**0.5).masked_fill(is_later, float("-inf"))
    attended = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)              # (B, L, D)
    return attended @ weights["self_attn.o_proj.weight"].T


def llama_by_hand(weights, cfg, tokens):
    """The logits that Llama's equations give, by transformers' names of the weights.
    (B, L) -> (B, L, V)"""
    x = weights["model.embed_tokens.weight"][tokens]
    for i in range(cfg.num_hidden_layers):
        prefix = f"model.layers.{i}."
        layer = {name.removeprefix(prefix): weight for name, weight in weights.items()}
        y = norm_by_hand(x, layer["input_layernorm.weight"])
        x = x + attention_by_hand(y, layer, cfg)
        y = norm_by_hand(x, layer["post_attention_layernorm.weight"])
        gate = y @ layer["mlp.gate_proj.weight"].T
        up = y @ layer["mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ layer["mlp.down_proj.weight"].T
    return norm_by_hand(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def test_their_model_has_our_weights_and_our_logits():
    """Against Llama's equations, and against transformers itself where it is installed."""
    cfg = bench.config("cpu", TINY)
    policy = grpo.GPT(cfg)
    tokens = torch.randint(grpo.VOCAB_SIZE, (3, 7))
    for weight in policy.parameters():                  # norms of 1 would hide which is which
        weight.data += 0.1 * torch.randn_like(weight)
    with torch.no_grad():
        ours = policy(tokens)
        by_hand = llama_by_hand(bench.llama_weights(policy), cfg, tokens)
        torch.testing.assert_close(by_hand, ours, atol=2e-5, rtol=1e-4)
        if importlib.util.find_spec("transformers"):
            lengths = torch.tensor([2, 1, 3])
            theirs = bench.llama(policy, cfg, lengths, 7)
            torch.testing.assert_close(theirs(tokens).logits, ours, atol=2e-5, rtol=1e-4)
            mask = bench.up_to_end(theirs.generate(tokens)[:, 7:])
            assert torch.equal(mask.sum(dim=1), lengths)
