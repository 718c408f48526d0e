"""What a rollout and an update cost as they grow: the FLOPs are counted right, what is quadratic is
found, and the sentence, the table and the picture say what was measured."""
import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import common
import grpo
from kernels import bench, scaling
from tools import runs

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 24}
real_attention = F.scaled_dot_product_attention


def tiny_job(name, P=3, G=4, T=7, micro_batch_size=32):
    """A job of a tiny policy. -> Config, function"""
    cfg = bench.config("cpu", TINY | {"micro_batch_size": micro_batch_size}, P, G, T)
    policy = grpo.GPT(cfg)
    if name == "rollout":
        return cfg, scaling.rollout_job(cfg, policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.learning_rate)
    return cfg, scaling.update_job(cfg, policy, grpo.GPT(cfg), optimizer)


def tiny_point(job, T=4, **changes):
    return {"job": job, "size": "tiny", "flags": TINY, "P": 2, "G": 2, "T": T, "take_apart": True,
            "device": "cpu"} | changes


def width(cfg):
    return common.load_task(cfg, grpo.verify).prompt_width


# ---- FLOPs -----------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["rollout", "update"])
def test_the_flops_of_the_weights_are_those_that_torch_counts(name):
    cfg, job = tiny_job(name)
    with scaling.without("attention"), FlopCounterMode(display=False) as counter:
        job()
    assert scaling.flops(name, cfg, width(cfg))["linear"] == counter.get_total_flops()


@pytest.mark.parametrize("name", ["rollout", "update"])
def test_the_flops_of_attention_are_those_of_the_pairs_that_see_each_other(name):
    """Twice two for each feature of a head: a product and a sum, for scores and for values. An
    update goes back through what it computed with gradients, which takes twice as much."""
    found = []

    def spy(q, k, v, attn_mask=None, enable_gqa=False):
        B, H, L, hd = q.shape
        pairs = L * k.shape[2] if attn_mask is None else int(attn_mask.sum())
        found.append(4 * hd * H * B * pairs * (3 if torch.is_grad_enabled() else 1))
        return real_attention(q, k, v, attn_mask=attn_mask, enable_gqa=enable_gqa)
    cfg, job = tiny_job(name)
    with bench.patched(F, scaled_dot_product_attention=spy):
        job()
    assert scaling.flops(name, cfg, width(cfg))["attention"] == sum(found)


def test_only_attention_is_quadratic_in_the_length():
    def flops(T):
        return scaling.flops("update", bench.config("cpu", TINY, 2, 8, T), 18)
    once, twice, thrice = flops(1000), flops(2000), flops(3000)
    assert thrice["linear"] - twice["linear"] == twice["linear"] - once["linear"]
    assert flops(200_000)["attention"] / flops(100_000)["attention"] == pytest.approx(4, rel=1e-3)


def test_each_size_has_as_many_parameters_as_its_name_says():
    for name, (flags, _) in scaling.SIZES.items():
        policy = grpo.GPT(bench.config("cpu", flags))
        number = sum(weight.numel() for weight in policy.parameters())
        assert number / 1e6 == pytest.approx(float(name.removesuffix("M")), rel=0.02)


def test_the_rate_of_a_matmul_is_its_flops_over_its_seconds(monkeypatch):
    calls = []

    def in_turn(jobs, device):
        with FlopCounterMode(display=False) as counter:
            jobs["matmul"]()
        calls.append(counter.get_total_flops())
        return {"matmul": [1.0, 2.0, 4.0]}, 0
    monkeypatch.setattr(scaling, "in_turn", in_turn)
    rate = scaling.matmul_rate(bench.config("cpu", TINY), 4096)
    assert rate == calls[0] / 2 and 1e9 <= calls[0] < 2e9
    scaling.matmul_rate(bench.config("cpu", TINY), 1)
    assert calls[1] < 1e6                   # a thousand of them are enough


# ---- what is left out, to find its time ------------------------------------------------------

def test_a_token_that_sees_itself_alone_has_a_gradient_to_all_that_made_it():
    q, k, v = (torch.randn(2, heads, L, 3, requires_grad=True)
               for heads, L in ((4, 2), (2, 5), (2, 5)))
    y = scaling.attend_to_itself(q, k, v, attn_mask=None, enable_gqa=True)
    for head in range(4):
        own = k[:, head // 2, 3:] + v[:, head // 2, 3:]
        torch.testing.assert_close(y[:, head], q[:, head] + own)
    y.sum().backward()
    assert (q.grad == 1).all()
    assert (k.grad[:, :, 3:] == 2).all() and (v.grad[:, :, 3:] == 2).all()


def test_a_token_that_sees_itself_alone_does_not_even_add_up_the_others():
    """There is no room for the sum of so many."""
    k = torch.zeros(1).expand(1, 1, 10**13, 3)
    y = scaling.attend_to_itself(torch.zeros(1, 1, 1, 3), k, k)
    assert y.shape == (1, 1, 1, 3)


def test_without_copies_a_token_has_the_position_that_it_had(monkeypatch):
    """What no token looks at may be missing: the same is sampled, positions included."""
    samples = {}
    real_rollout = grpo.rollout
    for cost in ("attention", "attention and copies"):
        def rollout(*args, name=cost):
            samples[name] = real_rollout(*args)
            return samples[name]
        monkeypatch.setattr(grpo, "rollout", rollout)
        _, job = tiny_job("rollout")
        with scaling.without(cost):
            job()
    with_copies, without_copies = samples.values()
    assert torch.equal(with_copies.tokens, without_copies.tokens)
    assert torch.equal(with_copies.logps, without_copies.logps)


def test_what_counts_instead_of_keeping_has_the_length_of_a_cache():
    cache, counter = grpo.Cache(), scaling.Counter()
    for L in (5, 1, 1):
        for layer in ("first", "second"):
            k = torch.randn(2, 1, L, 3)
            kept, _ = cache.append(layer, k, k)
            counted, _ = counter.append(layer, k, k)
            assert torch.equal(counted, kept[:, :, -L:])
        assert len(counter) == len(cache) == kept.shape[2]


def test_what_is_left_out_is_back_afterwards():
    before = (F.scaled_dot_product_attention, grpo.Cache)
    with pytest.raises(KeyError), scaling.without("attention and copies"):
        assert F.scaled_dot_product_attention is scaling.attend_to_itself
        assert grpo.Cache is scaling.Counter
        raise KeyError
    assert (F.scaled_dot_product_attention, grpo.Cache) == before


# ---- a point ---------------------------------------------------------------------------------

def test_a_point_is_measured_in_a_process_of_its_own():
    row = scaling.measure(tiny_point("update"))
    assert (row["rows"], row["T"], row["size"], row["job"]) == (4, 4, "tiny", "update")
    assert set(row["median"]) == {"all", "without attention"}
    assert all(taken > 0 for taken in row["median"].values()) and row["bytes"] >= 0


def test_a_process_prints_one_line_of_json(capsys):
    scaling.main([json.dumps(tiny_point("rollout"))])
    row = json.loads(capsys.readouterr().out)
    number = sum(weight.numel() for weight in grpo.GPT(bench.config("cpu", TINY)).parameters())
    assert row["parameters"] == number and row["standing_bytes"] == 4 * number
    assert row["floor"] * row["flops_per_second"] == pytest.approx(sum(row["flops"].values()))
    assert set(row["median"]) == {"all", "without attention", "without attention and copies"}
    assert len(row["seconds"]["all"]) == 3


def test_an_update_stands_on_five_numbers_for_each_parameter():
    row = scaling.measure_point(tiny_point("update", take_apart=False))
    assert row["standing_bytes"] == 5 * 4 * row["parameters"] and set(row["median"]) == {"all"}


def fill(mebibytes):
    """A function that takes so much memory, and fills it, so that it is in use."""
    return lambda: torch.ones(mebibytes * 2**18).sum()


def peak_of_the_process():
    """What Linux says of the peak, in MiB, or 0."""
    status = Path("/proc/self/status")
    found = re.search("VmHWM:\\s*([0-9]+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) / 1024 if found else 0


def the_peak_can_begin_anew():
    """Linux can do that. Some containers cannot, and of these some do not say so."""
    fill(256)()
    before = peak_of_the_process()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return peak_of_the_process() < before - 128


def test_the_peak_is_that_of_the_first_run_whatever_there_was_before():
    wanted = 64 if the_peak_can_begin_anew() else 0         # or else it is that of fill(256)
    fill(256)()
    _, extra_bytes = scaling.in_turn({"all": fill(64), "other": fill(128)}, "cpu")
    assert extra_bytes / 2**20 == pytest.approx(wanted, abs=6)


def test_all_is_warmed_up_and_what_takes_long_then_runs_once(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(scaling, "now", lambda device: float(next(ticks) ** 2))
    jobs = {"all": int, "other": int}
    monkeypatch.setattr(scaling, "PATIENCE", 1e9)
    times, _ = scaling.in_turn(jobs, "cpu")             # from tick 0 on, two for each run
    assert times == {"all": [9, 17, 25], "other": [13, 21, 29]}
    monkeypatch.setattr(scaling, "PATIENCE", 1)
    times, _ = scaling.in_turn(jobs, "cpu")             # from tick 16 on
    assert times == {"all": [41], "other": [45]}


def test_points_are_taken_apart_where_the_sentence_looks():
    points = scaling.points("cpu")
    assert len(points) == 2 * len(scaling.SIZES) * len(scaling.LENGTHS)
    apart = {point["T"] for point in points if point["take_apart"]}
    assert apart == {scaling.LENGTHS[-1]} and scaling.HERE in scaling.LENGTHS
    json.dumps(points)


def test_the_longest_completions_here_are_those_of_the_tasks():
    lengths = [common.Config.max_completion_length]
    for name in common.task_names():
        defaults = common.find_task(name, name).defaults
        lengths.append(defaults.get("max_completion_length", 0))
    assert max(lengths) == scaling.HERE


# ---- what is found ---------------------------------------------------------------------------

def made_rows(rollout_copies=0.0, rollout_attention=0.0, update_attention=0.0):
    """Made-up rows of two sizes: 1 us a token and parameter / 1e5, and for the smaller size what
    is quadratic has these shares of the time at 512 tokens; for the larger one, none."""
    rows = []
    for size, parameters in (("0.1M", 100_000), ("1M", 1_000_000)):
        for job, attention, copies in (("rollout", rollout_attention, rollout_copies),
                                       ("update", update_attention, 0.0)):
            for T in (32, 128, 256, 512):
                linear = 10 * T * parameters / 1e11
                share = attention + copies if size == "0.1M" else 0.0
                quadratic = 10 * 512 * parameters / 1e11 * share / (1 - share) * (T / 512)**2
                of_attention = quadratic * attention / max(share, 1e-9)
                seconds = {"all": [linear + quadratic]}
                if T == 512:
                    seconds["without attention"] = [linear + quadratic - of_attention]
                    if job == "rollout":
                        seconds["without attention and copies"] = [linear]
                median = {name: taken[0] for name, taken in seconds.items()}
                rows.append({
                    "job": job, "size": size, "parameters": parameters, "rows": 10, "T": T,
                    "seconds": seconds, "median": median,
                    "bytes": T * 2**20, "standing_bytes": 2**20,
                    "flops": {"linear": 3, "attention": 1}, "flops_per_second": 1e9,
                    "floor": linear / 2})
    return rows


def test_the_exponent_is_that_of_the_last_two_doublings():
    lengths = [32, 64, 128, 256, 512]
    assert scaling.exponent(lengths, [3 * T for T in lengths]) == pytest.approx(1)
    assert scaling.exponent(lengths, [9, 9, 1, 4, 16]) == pytest.approx(2)
    assert 1 < scaling.exponent(lengths, [T + T**2 / 512 for T in lengths]) < 2


def test_the_shares_of_what_is_quadratic_add_up():
    rows = made_rows(rollout_copies=0.25, rollout_attention=0.35)
    row, = (row for row in rows if (row["size"], row["job"], row["T"]) == ("0.1M", "rollout", 512))
    assert scaling.quadratic_shares(row) == pytest.approx({"attention": 0.35, "copies": 0.25})
    assert scaling.quadratic_share(row) == pytest.approx(0.6)
    assert scaling.flops_share(row) == 0.25


def test_a_share_is_a_median_of_neighbours_and_never_below_0():
    row = {"job": "update", "seconds": {"all": [10, 100, 2], "without attention": [9, 50, 1.9]}}
    assert scaling.quadratic_shares(row) == pytest.approx({"attention": 0.1})
    row["seconds"]["without attention"] = [11, 101, 3]
    assert scaling.quadratic_shares(row) == {"attention": 0}


def test_the_sentence_says_that_it_hardly_matters_where_a_token_takes_little_longer():
    rows = made_rows(rollout_copies=0.2, rollout_attention=0.1, update_attention=0.75)
    said = scaling.sentence(rows)
    assert "at 512 tokens they take 0 - 30% of a rollout" in said
    assert "and 0 - 75% of an update" in said
    # (1 + f / 4) / (1 + f / 16) with f = 0.75 / (1 - 0.75), or 0.3 / (1 - 0.3)
    assert "a token takes 1.0 - 1.1 times as long as at 32 in a rollout, 1.0 - 1.5 times" in said
    assert said.endswith("in an update: this hardly matters here.")


@pytest.mark.parametrize("shares, jobs", [
    ({"rollout_attention": 0.3, "rollout_copies": 0.5}, "rollouts"),
    ({"update_attention": 0.8}, "updates"),
    ({"rollout_copies": 0.8, "update_attention": 0.8}, "rollouts and updates")])
def test_the_sentence_says_that_it_matters_and_where(shares, jobs):
    assert scaling.sentence(made_rows(**shares)).endswith(f"this matters here, in {jobs}.")


def test_the_sentence_has_the_exponents_of_all_sizes():
    rows = made_rows(update_attention=0.6)
    line = [row for row in rows if (row["size"], row["job"]) == ("0.1M", "update")]
    k = scaling.growth(line)
    assert 1.3 < k < 1.8
    said = scaling.sentence(rows)
    assert f"(k = 1.0 - {k:.1f})" in said and "with k = 1.0, and" in said


# ---- what is shown ---------------------------------------------------------------------------

def test_the_table_has_a_line_for_each_size_and_job_and_cells_for_its_head():
    rows = made_rows(rollout_copies=0.25, rollout_attention=0.35)
    head, _, *lines = scaling.table_of(rows[::-1]).splitlines()
    assert len({line.count("|") for line in (head, *lines)}) == 1
    assert [line.split(" | ")[:3] for line in lines] == [
        ["| 0.1M", "10", "rollout"], ["| 0.1M", "10", "update"],
        ["| 1M", "10", "rollout"], ["| 1M", "10", "update"]]
    # 1 us for the linear part; 2.5 in all at 512, five times the floor
    assert lines[0].split(" | ")[3:] == [
        "1", "1", "2", "1.4", "5.0x", "25%", "35%", "25%", "33", "513 |"]


def test_a_printed_point_has_its_time_its_floor_and_its_memory():
    row = made_rows(update_attention=0.5)[7]
    assert scaling.cells(row) == ["0.1M ", "update", "10 x 512", "10 ms", "2 us a token",
                                  "4.0x floor", "513 MiB", "attention 50%"]


def test_the_picture_shows_the_times_the_floors_and_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "DOCS", tmp_path)
    rows = made_rows()
    said = scaling.report(rows, "cpu", "cpu")
    assert "(scaling.png)" in said and scaling.sentence(rows) in said.replace("\n", " ")
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
    assert "(scaling-h100.png)" in scaling.report(rows, "H100", "h100")
    assert (tmp_path / "scaling-h100.png").exists()

    _, (times, memory) = runs.import_pyplot().subplots(1, 2)
    scaling.time_panel(rows, "update")(times)
    measured, floor, of_larger, _ = times.get_lines()
    assert list(measured.get_xdata()) == [32, 128, 256, 512]
    assert list(measured.get_ydata()) == pytest.approx([1, 1, 1, 1])
    assert list(floor.get_ydata()) == pytest.approx([0.5] * 4)
    assert list(of_larger.get_ydata()) == pytest.approx([10] * 4)
    scaling.memory_panel(rows)(memory)
    assert [list(line.get_ydata()) for line in memory.get_lines()] == [[33, 129, 257, 513]] * 4
    assert times.get_xscale() == times.get_yscale() == memory.get_yscale() == "log"
    runs.import_pyplot().close("all")
