"""The lab: verdicts, learning rates and pages, which all experiments share; that each measure fills
the columns of its file; and that the scripts accept what the lab asks of them."""
import html
import math
import shlex
import sys
import types

import numpy
import pytest
import torch
from conftest import ROOT
from small_runs import SMALL, arguments, at_work, changed_weights, load

import common
import grpo
import lab.__main__
import plumbing
import ppo
from lab import bench, docs, error_rates, ledger, training
from lab.claims import credit
from tasks import preferences

# ---- verdicts --------------------------------------------------------------------------------

FIVE = [0.09, 0.1, 0.1, 0.1, 0.11]      # 0.1, from 0.091 to 0.109


@pytest.mark.parametrize("effect, region, verdict, measured", [
    (FIVE, {"at_least": 0.095}, "undecided", "0.1 (0.0912 to 0.109)"),
    (FIVE, {"at_least": 0.0912}, "shown", "0.1 (0.0912 to 0.109)"),
    (FIVE, {"at_least": 0.11}, "not found here", "0.1 (0.0912 to 0.109)"),
    (FIVE, {"at_most": 0.11}, "shown", "0.1 (0.0912 to 0.109)"),
    (FIVE, {"at_least": -0.1, "at_most": 0.1}, "undecided", "0.1 (0.0912 to 0.109)"),
    (FIVE, {"at_least": 0.0912, "comparisons": 2}, "undecided", "0.1 (0.0889 to 0.111)"),
    ([1.9, 2, 2.1, 2.2], {"at_least": 1.87, "ratio": True}, "undecided",
     "2.05 times (1.85 to 2.26)"),
    (([2, 9, 9], [1, 3, 2]), {"at_least": 1, "ratio": True}, "shown", "3 times (1.1 to 8.21)"),
    (([0.5, 0.6], [0.3, 0.1]), {"at_least": 0.6}, "undecided",
     "0.35 (-1.56 to 2.26)"),
    ([2, 8], {"at_least": 1.5, "ratio": True, "exact": True}, "shown", "2 to 8 times"),
    ([0.5, 0.5], {"at_least": 0.5, "exact": True}, "shown", "0.5"),
    ([0.5, 0.4], {"at_least": 0.45, "exact": True}, "not found here", "0.4 to 0.5"),
    (([0.2] * 3, [0.21, 0.2, 0.22]), {"at_least": 0.1}, "the same", "-0.01 (-0.0348 to 0.0148)")])
def test_a_claim_is_shown_if_its_interval_lies_where_it_says(effect, region, verdict, measured):
    claim = bench.Claim("so", "after VinePPO", effect, **region)
    assert (claim.verdict, claim.measured) == (verdict, measured)
    own = bench.Claim("so", bench.OURS, effect, **region).verdict
    assert own == ("contradicted" if verdict == "not found here" else verdict)


# ---- an experiment, from its runs to its page ------------------------------------------------

def test_a_page_is_stale_if_the_first_steps_of_its_runs_change(monkeypatch, stops):
    assert bench.check("masking") and torch.get_default_dtype() == torch.float32
    monkeypatch.setattr(bench, "first_steps", lambda name: [0.0] * 8)
    stops("stale: masking", lab.__main__.main, ["--check", "masking"], code=1)


def test_rates_are_chosen_on_other_seeds_and_the_best_one_is_never_at_an_end(monkeypatch):
    monkeypatch.setitem(sys.modules, "lab.claims.made_up", types.SimpleNamespace(
        score=lambda columns, what: columns[what], SEEDS=(0, 1, 2), TUNING=(8, 9),
        SIDES={"a, b": (None, 1e-3), "c": (None, 4e-4)}, FEWER={"c": (0, 2)},
        COMPARED=[("a, b", "up"), ("c", "up")]))

    def measured(case, seed):                   # the best rates are 4e-3, and, by a tie, 4e-4
        rate = float(case.split(", ")[-1])
        return {"up": -abs(rate - 4e-3) + (seed < 8) * rate if "b" in case else -math.inf}
    results, rounds = {}, []
    while jobs := [job for job in bench.wanted("made_up", results) if job not in results]:
        rounds.append(len(jobs))
        for case, seed in jobs:
            if seed in (8, 9):                          # the rate is not measured with all of them
                side = case.rpartition(", ")[0]
                assert bench.tune("made_up", bench.arrays(results), side, "up")[1] is None
            results[case, seed] = measured(case, seed)
    assert rounds == [2 * 6, 2, 2, 3 + 2]       # two rates more for the first side, then SEEDS
    x = bench.arrays(results)
    tried, best = bench.tune("made_up", x, "a, b", "up")
    assert best == "a, b, 0.004" and len(tried) == 5 and tried[-1] == "a, b, 0.008"
    first, second = bench.at_best("made_up", x).values()
    assert first["rate"] == "0.004" and first["up"].tolist() == [0.004] * 3
    assert second["rate"] == "0.0004" and len(x["c, 0.0004"]["up"]) == 4
    assert bench.spans((0, 1, 2, 5, 7, 8)) == "0 to 2 and 5 and 7 to 8"


def test_pages_and_ledger_follow_from_the_stored_numbers_and_the_ledger_has_each_claim_once():
    texts = "".join(path.read_text("utf-8") for path in (ROOT / "docs/lab").glob("*.md"))
    page = (ROOT / "docs/lab/ledger.html").read_text("utf-8")
    assert page == ledger.text(), "run: make ledger"
    found = 0
    for name in bench.NAMES:
        for part, text in bench.page(name)[0].items():
            assert f"make lab-{name}: {part} -->\n{text}<!-- end of {part} -->" in texts
        for claim, _ in bench.claims(name):
            assert page.count(f"<td>{html.escape(claim.text)}<td>") == 1, claim.text
            found += 1
    assert page.count("<td><code>make lab-") == found


def test_a_replicated_experiment_is_judged_by_all_seeds_and_shows_a_verdict_that_changed(
        own_folder, monkeypatch):
    monkeypatch.setattr(docs, "ROOT", own_folder)
    monkeypatch.setattr(docs, "DOCS", own_folder)
    effects = {0: 0.1, 1: 0.1, 2: 0.11, 3: 0.0, 4: -0.1, 5: 0.0}
    monkeypatch.setitem(sys.modules, "lab.claims.made_up", types.SimpleNamespace(
        SEEDS=(0, 1, 2), CASES=["a"], SIDES={}, measure=lambda case, seed: {"up": effects[seed]},
        page=lambda x: iter([bench.Claim("up", bench.OURS, x["a"]["up"], at_least=0.08)])))
    monkeypatch.setattr(bench, "first_steps", lambda name: [])
    bench.measure("made_up", None)
    assert [verdict for _, verdict in bench.claims("made_up")] == ["shown"]
    bench.replicate("made_up", 1, None)
    x, about = bench.load("made_up")
    assert bench.added(about) == [3, 4, 5] and x["a"]["up"].tolist() == [*effects.values()]
    assert [verdict for _, verdict in bench.claims("made_up")] == [
        "undecided (shown with the first 3 seeds)"]


# ---- every measure ---------------------------------------------------------------------------

def untrained(script, flags):
    """Replace load_base: make an untrained policy, and a task in which texts of odd length are
    right. -> Config, task, policy"""
    small = SMALL | {"hidden_size": 16, "intermediate_size": 16, "num_prompts": 4,
                     "num_generations": 4, "num_eval_problems": 4, "num_eval_samples": 1}
    del small["max_steps"]
    cfg = plumbing.parse_flags(script.Config, [*arguments(small), *shlex.split(flags)])
    task = common.load_task(cfg, lambda problem, text: float(len(text) % 2))
    return cfg, task, script.GPT(cfg)


@pytest.mark.parametrize("name, case, constants", [
    ("credit", "walks", {"BATCHES": 1}),
    ("credit", "answers", {"BATCHES": 1, "STEPS": 1, "PROBLEMS": 1, "NUM_REFERENCE": 2,
                           "steps_of": lambda batch: [
                               (0, slice(0, 2), credit.BEFORE), (1, slice(0, 1), credit.WRONG)]}),
    ("hacking", "fresh", {"STEPS": 2, "MODELS": {"fresh": {0: 1, 1: 1}}}),
    ("kl", "on the way", {"WATCHED": [1, 2]}),
    ("masking", "tool tokens learned, 0.001", {"STEPS": 2}),
    ("rare", "0.97, groups of 64, 0.001", {
        "STEPS": 2, "sums_of": lambda policy, task, cfg, sums: [common.Arithmetic.share_wrong]}),
    ("signal", "GRPO, dynamic sampling, 0.001", {"BUDGET": 300}),
    ("wrongrewards", "short base: bonus for coming nearer, 0.001", {"STEPS": 2})])
def test_a_measure_finds_what_its_file_has(name, case, constants, monkeypatch):
    module = bench.module(name)
    given = []                                      # flags of the bases
    monkeypatch.setattr(module, "load_base", lambda script, flags: (
        given.append(flags) or untrained(script, flags)))
    monkeypatch.setattr(preferences, "BATCHES", 1)
    for constant, value in constants.items():
        monkeypatch.setattr(module, constant, value)
    rates, adamw = [], torch.optim.AdamW
    monkeypatch.setattr(
        torch.optim, "AdamW", lambda *x, **y: rates.append(y["lr"]) or adamw(*x, **y))
    found = module.measure(case, 0)
    has_own = not module.ONE_BASE                    # each seed has a base of its own
    assert all(("--base_seed 0" in flags) == has_own for flags in given) and given
    stored, _ = bench.load(name)
    assert stored.keys() >= {*module.CASES}
    assert found.keys() == stored[case].keys()
    for column, values in found.items():
        assert not numpy.isnan(numpy.array(values, dtype=float)).all(), column
    if ", " in case:
        assert rates == [float(case.split(", ")[-1])]


# ---- runs ------------------------------------------------------------------------------------

def test_training_begins_with_the_base_and_is_the_loop_of_the_script(tmp_path):
    flags = SMALL | {"task": "arithmetic:2-3", "num_prompts": 16, "max_steps": 3,
                     "curriculum": True, "dynamic_sampling": 2, "num_eval_problems": 1,
                     "scale_rewards": "none"}
    with at_work(tmp_path):
        grpo.main(arguments(flags | {"output_dir": "run"}))
        cfg, task, policy = training.load_base(grpo, shlex.join(arguments(flags)))
    base = load(tmp_path / "run/base.pt")["policy"]
    assert changed_weights(policy.state_dict(), base) == []
    for _ in zip(range(3), training.training(cfg, task, policy)):
        pass
    after = load(tmp_path / "run/checkpoint.pt")
    assert changed_weights(policy.state_dict(), after["policy"]) == []
    assert changed_weights(base, after["policy"]), "nothing was learned"
    assert task.state == after["task"]


def test_each_part_of_the_rollouts_after_a_token_draws_its_own_numbers(config, monkeypatch):
    drawn = []
    monkeypatch.setattr(training, "continued", lambda *args: (
        drawn.append(args[-1]), [f"{problem}" for problem in args[3]]))
    batch = types.SimpleNamespace(lengths=torch.tensor([3, 1, 5]), problems=[7, 8, 9],
                                  prompts=torch.zeros(3, 2), tokens=torch.zeros(3, 5))
    task = types.SimpleNamespace(verify=lambda problem, text: float(text))
    rows, rewards = training.rewards_after(None, None, task, config(), batch, 2, 4, at_once=3)
    assert rows.tolist() == [0, 2] and rewards.tolist() == [[7.0] * 4, [9.0] * 4]
    numbers = torch.cat(drawn).flatten()
    assert len(numbers) == len(numbers.unique()) == 8 * (config().max_completion_length - 2)


def test_the_steps_of_a_thought_are_found_with_their_tokens_and_the_first_wrong_one():
    texts = ["<think>13+4=17;17-9=7;7*2=14;14*1=13</think><answer>14</answer>",
             "<answer>7</answer>", "<think>3+4=7;7-5=2"]
    rows = [torch.tensor([*common.TOKENIZER.encode(text, allowed_special="all"), ppo.EOS])
            for text in texts]
    batch = types.SimpleNamespace(tokens=torch.nn.utils.rnn.pad_sequence(
        rows, batch_first=True, padding_value=ppo.PAD))
    assert [(row, ppo.decode(batch.tokens[row, tokens].tolist()), kind)
            for row, tokens, kind in credit.steps_of(batch)] == [
        (0, "13+4=17", credit.BEFORE), (0, "17-9=7", credit.WRONG), (0, "7*2=14", credit.AFTER),
        (0, "14*1=13", credit.AFTER), (2, "3+4=7", credit.BEFORE), (2, "7-5=2", credit.BEFORE)]


# ---- report.check ----------------------------------------------------------------------------

def test_a_named_cause_flat_another_one_and_none_are_counted_and_so_are_false_alarms(monkeypatch):
    found = {"greedy samples": ({"groups", "flat"}, {"flat"}, {"rate"}, set()),
             "gspo": (set(), {"rate", "flat"})}
    flags, *edit = error_rates.BROKEN["greedy samples"]
    cases = {("gspo.py", "", ""): "gspo", (f"grpo.py {flags}", *edit): "greedy samples"}
    monkeypatch.setattr(error_rates, "examine", lambda command, seed, old, new: (
        found[cases[command, old, new]][seed]))
    results = {(case, seed): error_rates.measure(case, seed)
               for case in found for seed in range(len(found[case]))}
    for name, case in (("CORRECT", "gspo"), ("BROKEN", "greedy samples")):
        monkeypatch.setattr(error_rates, name, {case: getattr(error_rates, name)[case]})
    assert error_rates.of_correct(results).splitlines()[2:] == [
        "| gspo | 2 | 1 | flat, rate |", "| **all** | 2 | 1 |  |",
        "| 95% interval, by kind |  | 5% to 95% |  |"]
    assert error_rates.of_broken(results).splitlines()[2:4] == [
        "| greedy samples | 4 | 1 | 1 | 1 | 1 |", "| **all** | 4 | 1 | 1 | 1 | 1 |"]
    assert error_rates.wilson(0, 30) == "0% to 11%" and error_rates.wilson(30, 30) == "89% to 100%"
