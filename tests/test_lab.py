"""The lab: verdicts, measurements and pages, which all experiments share; that each measure fills
the columns of its file; and that the scripts accept what the lab asks of them."""
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import inspect
import math
import re
import shlex
import sys
import types

import numpy
import pytest
import torch
from conftest import ROOT
from small_runs import SMALL, arguments, at_work, changed_weights, load, policy_of

import common
import grpo
import lab.__main__
import measuring
import plumbing
import ppo
import reinforce
from lab import bench, docs, doctor, measure, r1, replicate, training
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
    (([0.5, 0.6], [0.3, 0.1]), {"at_least": 0.6, "differing": 0.1}, "undecided",
     "0.35 (-1.56 to 2.26)"),
    ([2, 8], {"at_least": 1.5, "ratio": True, "exact": True}, "shown", "2 to 8 times"),
    ([0.5, 0.5], {"at_least": 0.5, "exact": True}, "shown", "0.5"),
    ([0.5, 0.4], {"at_least": 0.45, "exact": True}, "not found here", "0.4 to 0.5")])
def test_a_claim_is_shown_if_its_interval_lies_where_it_says(effect, region, verdict, measured):
    claim = bench.Claim("so", "after VinePPO", effect, finding="It is so", **region)
    assert claim.cells()[:3] == ["so", f"**{verdict}**", measured]
    assert claim.cells()[4] == "after [VinePPO](https://arxiv.org/abs/2410.01679)"
    assert claim.title == ("It is so (undecided)" if verdict == "undecided" else "It is so")
    own = bench.Claim("so", bench.OURS, effect, **region).verdict
    assert own == ("contradicted" if verdict == "not found here" else verdict)


@pytest.mark.parametrize("effect, region, why", [
    (([0.9, 0.7], [0.995, 0.985]), {"at_least": 0.02}, "at the ceiling"),
    (([0.9, 0.7], [0.985, 0.985]), {"at_most": 0.02}, "at the ceiling"),
    (([1.0, 0.99], [1.0, 0.998]), {"at_least": -0.02}, "at the ceiling"),
    (([0.001, 0.5], [0.01, 0.02]), {"at_most": -0.02}, "at the floor"),
    (([0.0, 0.01], [0.0, 0.002]), {"at_least": 0.005}, "at the floor"),
    (([0.3, 0.2, 0.4], [0.2, 0.1, 0.3]), {"at_least": 0.02}, "all seeds have the same effect"),
    (([math.inf] * 3, [20, 20, 21]), {"at_least": 1.2, "ratio": True},
     "with 3 of 3 seeds, a run never reached the level"),
    (([30, math.inf], [math.inf, math.inf]), {"at_least": 1.2, "ratio": True},
     "with 2 of 2 seeds, a run never reached the level"),
    ([1, 2, math.inf], {"at_least": 0.5}, "with 1 of 3 seeds, a run never reached the level"),
    (([0.5, 0.7], [0.4, 0.3]), {"at_least": 0.02, "differing": 0.099},
     "both rewards judge 90.1% of the base's outputs alike")])
def test_there_is_no_verdict_where_the_set_up_decides(effect, region, why):
    claim = bench.Claim("so", bench.OURS, effect, finding="So it is", **region)
    assert claim.verdict == bench.NO_VERDICT and claim.cells()[1] == f"**no verdict**: {why}"
    assert claim.title == "So: no verdict"


NOT_LOWER = {"at_least": -math.inf, "at_most": -0.04}


@pytest.mark.parametrize("interval, sides, options, verdict", [
    ((-0.039, 0.039), (0.5, 0.5), {}, "the same"),
    ((-0.039, 0.04), (0.5, 0.5), {}, "undecided"),              # 0.04 would matter
    ((-0.041, 0.03), (0.5, 0.5), {}, "not found here"),         # the other side may be ahead
    ((-0.039, 0.039), (0.5, 0.5), NOT_LOWER, "the same"),
    ((-0.03, 0.041), (0.5, 0.5), NOT_LOWER, "not found here"),
    ((-0.03, 0.039), (0.5, 0.5), {"at_least": -math.inf, "at_most": 0.04}, "shown"),
    ((0.04, 0.06), (0.5, 0.5), {}, "shown"),
    ((-0.01, 0.03), (0.97, 0.96), {}, "not found here"),        # they could hardly differ
    ((-0.01, 0.03), (0.03, 0.02), {}, "not found here"),
    ((-0.01, 0.03), (0.97, 0.95), {}, "the same"),
    ((-0.01, 0.03), (0.5, 0.5), {"comparisons": 7}, "not found here"),
    ((-0.01, 0.03), (0.5, 0.5), {"ratio": True, "at_least": 1.04}, "not found here")])
def test_two_fractions_are_the_same_if_their_whole_interval_is_near_0(
        interval, sides, options, verdict):
    claim = bench.Claim("so", "VinePPO", tuple([side] * 2 for side in sides), finding="It is so",
                        **{"at_least": 0.04} | options)
    claim.interval = interval
    assert claim.verdict == verdict
    is_named = verdict in ("the same", "undecided")
    assert claim.title == (f"It is so ({verdict})" if is_named else "It is so")
    claim.effect = [0.0, 0.0]                                   # a difference of anything
    assert claim.verdict == verdict.replace("the same", "not found here")
    with pytest.raises(ValueError, match="so: the two sides have to be fractions"):
        bench.Claim("so", "VinePPO", ([1.65, 1.7], [0.5, 0.6]))


@pytest.mark.parametrize("k, n, low, high", [      # tables of Clopper and Pearson
    (0, 5, 0, 0.5218), (5, 5, 0.4782, 1), (12, 12, 0.7354, 1), (7, 12, 0.2767, 0.8483),
    (1, 2, 0.0126, 0.9874)])
def test_a_share_of_seeds_has_the_exact_interval(k, n, low, high):
    assert bench.clopper_pearson(k, n) == pytest.approx((low, high), abs=1e-4)
    claim = bench.Claim("so", bench.OURS, [1.0] * k + [0.0] * (n - k), share=True, at_least=low)
    assert claim.interval == bench.clopper_pearson(k, n) and claim.mean == k / n


# ---- an experiment, from its runs to its page ------------------------------------------------

@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """made_up(SEEDS=..., ...): make an experiment of these parts. It is measured in this process,
    and stored in the folder of the test."""
    here = contextlib.nullcontext(types.SimpleNamespace(map=map))
    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", lambda *_: here)
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "DOCS", tmp_path)
    monkeypatch.setattr(bench, "NAMES", ("made_up",))
    (tmp_path / "lab").mkdir()

    def make(**parts):
        monkeypatch.setitem(sys.modules, "lab.claims.made_up", types.SimpleNamespace(
            score=lambda columns, what: columns[what], **parts))
    return make


def store(path, cases, **about):
    """Write a store. cases: {case: {column: a list with an entry for each seed from 0 on}}"""
    jobs = [[case, seed, {column: rows[seed] for column, rows in columns.items()}]
            for case, columns in cases.items()
            for seed in range(len(next(iter(columns.values()))))]
    measuring.write(path, {"about": about, "jobs": jobs})


@pytest.mark.parametrize("main, flags, message", [
    (lab.__main__.main, "nope --draw", "nope: unknown experiment; choose from hacking, "),
    (lab.__main__.main, "kl --processes 0", "--processes 0: must be at least 1"),
    (lab.__main__.main, "kl --replicate -1", "--replicate -1: a seed must be at least 0"),
    (lab.__main__.main, "kl --replicate 9 --draw", "not allowed with"),
    (r1.main, "3 3", "at least 2 different seeds"),
    (r1.main, "--processes 0", "--processes 0: must be at least 1")])
def test_flags_that_contradict_or_make_no_sense_are_refused(
        main, flags, message, stops, monkeypatch):
    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", None)    # nothing is measured
    stops(message, main, flags.split())


def test_a_file_of_numbers_that_is_damaged_or_missing_gets_one_line(made_up, tmp_path, stops):
    made_up(SEEDS=(0,))
    stops("made_up.json: missing or damaged; restore it with git, or run: python -m lab made_up",
          lab.__main__.main, ["made_up", "--draw"])
    store(tmp_path / "lab/made_up.json", {})
    (tmp_path / "replication.json").write_text("{")
    stops("replication.json: missing or damaged", lab.__main__.main, ["--replicate", "9"])


def test_a_page_is_stale_if_the_first_steps_of_its_runs_change(monkeypatch, stops):
    assert bench.check("masking") and torch.get_default_dtype() == torch.float32
    monkeypatch.setattr(bench, "first_steps", lambda name: [0.0] * 8)
    stops("stale: masking", lab.__main__.main, ["--check", "masking"], code=1)


def test_rates_are_chosen_on_other_seeds_and_the_best_one_is_never_at_an_end(made_up):
    made_up(SEEDS=(0, 1, 2), TUNING=(8, 9), SIDES={"a, b": (None, 1e-3), "c": (None, 4e-4)},
            FEWER={"c": (0, 2)}, COMPARED=[("a, b", "up"), ("c", "up")])

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


def test_claims_are_repeated_at_the_best_rates_on_seeds_that_no_page_used(
        made_up, tmp_path, monkeypatch, capsys):
    measured = []

    def measure(case, seed):
        assert case in ("a, 0.002", "b")                        # the search is not repeated
        measured.append(seed)
        if measured == [3, 4]:
            raise KeyboardInterrupt
        return {"up": [seed, 1 / 3][:1 + seed % 2], "in": 0.5}

    def page(x):
        yield bench.Claim("b is high", bench.OURS, x["b"]["up"][:, 0], at_least=3)
        best = bench.at_best("made_up", x)["a", "in"]["up"][:, 0]
        yield bench.Claim("a is low", bench.OURS, best, at_most=8)
        yield bench.Claim("it follows", bench.OURS, 1, at_least=1, exact=True, computed=True)
    made_up(SEEDS=(0, 1), TUNING=(2,), OTHER_SEEDS=(5,), SIDES={"a": (None, 1e-3)}, page=page,
            COMPARED=[("a", "in")], CASES=["b"], measure=measure)
    stored = {f"a, {rate}": {"up": [[9.0], [1.0], [2.0, 0.5]][:n], "in": [score, 0.7, 0.7][:n]}
              for rate, n, score in (("0.0005", 1, 0.1), ("0.001", 1, 0.2), ("0.002", 3, 0.4),
                                     ("0.004", 1, 0.3))}
    store(tmp_path / "lab/made_up.json", stored | {
        "b": {"up": [[5.0], [4.0]], "in": [0.5, 0.5]}}, seconds=1, processes=1, machine="m",
          commit="c")
    monkeypatch.setattr(lab.__main__, "put", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        lab.__main__.main(["--replicate", "1"])
    [kept] = tmp_path.glob("runs/*")                            # by a second one, while it waits
    before = kept.read_text()
    for first, seeds in ((4, [4, 6]), (1, [3, 4]), (4, [4, 6])):
        lab.__main__.main(["--replicate", f"{first}"])
        content = bench.repetitions()["made_up"]
        found = bench.columns(measuring.results_of(content))
        assert content["about"]["seeds"] == seeds
        assert all([row[0] for row in found[case]["up"]] == seeds for case in ("b", "a, 0.002"))
        assert not kept.exists() or kept.read_text() == before
    assert measured == [3, 4, 4, 6, 4, 6, 4, 3, 4, 4, 6, 4, 6] and not [*tmp_path.glob("runs/*")]
    text = replicate.compared()
    assert text in capsys.readouterr().out
    assert "made_up (seeds 4 and 6, " in text and "1 of 2 verdicts stay" in text
    assert "w | **shown** | **undecided** | 5 (-7.71 to 17.7) |" in text
    assert "it follows" not in text
    bench.module("made_up").page = lambda x: [*page(x), lambda axis: None]      # all seeds together
    claims, _, text = bench.page("made_up")
    assert [len(claim.values) for claim in claims] == [4, 4, 1]
    assert claims[0].mean == (5 + 4 + 4 + 6) / 4
    assert "| b is high | **shown** (undecided with the first 2 seeds) | 4.75 (" in text
    assert "seeds 0 to 1, each with its own base" in text and "of seeds 4 and 6, which" in text
    for job in content["jobs"]:                                 # another best rate
        job[0] = job[0].replace("0.002", "0.001")
    for name in ("made_up", "gone"):
        measuring.write(tmp_path / "replication.json", {name: content})
        assert "Repeated so far: none. 0 of 0 verdicts stay" in replicate.compared()


@pytest.mark.parametrize("name", bench.NAMES)
def test_the_page_follows_from_the_stored_numbers(name):
    *_, text = bench.page(name)
    assert f"make lab-{name}: {name} -->\n{text}<!-- end" in (
        ROOT / f"docs/lab/{name}.md").read_text("utf-8")


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


def test_the_scripts_accept_what_experiments_ask_for(monkeypatch):
    monkeypatch.setattr(inspect, "getsource", functools.cache(inspect.getsource))   # it is slow
    for one in map(bench.module, bench.NAMES):
        assert {*one.SEEDS}.isdisjoint(one.TUNING), "judged by what chose the rate"
        for command, _ in one.SIDES.values():
            script, *flags = shlex.split(command or one.CHECK)
            module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
            common.load_task(plumbing.parse_flags(module.Config, flags), grpo.verify)


def test_a_completion_goes_on_as_it_did(config, load_task, talker):
    """Greedy decoding continues a completion identically from each of its prefixes."""
    cfg = config()
    policy = talker(cfg)
    problems = common.sample_problems(load_task(cfg), 5, 0)
    batch = grpo.complete(policy, load_task(cfg), cfg, problems)
    for t in range(int(batch.lengths.min())):
        rest = dataclasses.replace(cfg, max_completion_length=cfg.max_completion_length - t)
        _, found, mask, texts = training.continued(
            grpo, policy, rest, problems, batch.prompts, batch.tokens[:, :t])
        assert texts == batch.texts
        assert torch.equal(found, batch.tokens[:, t:]) and torch.equal(mask, batch.mask[:, t:])


def test_each_part_of_the_rollouts_after_a_token_and_each_step_of_walks_draw_their_own_numbers(
        config, monkeypatch):
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

    cfg = ppo.Config(device="cpu", task="gridworld", num_prompts=8, num_generations=2)
    walks = common.load_task(cfg, ppo.verify)
    problems = common.sample_problems(walks, 8, 0)
    monkeypatch.setattr(common, "sample_problems", lambda *_: problems)
    first, again, second = (credit.make_batch(walks, cfg, step).steps for step in (0, 0, 1))
    assert first == again != second


def test_no_estimate_is_made_from_the_rollouts_of_its_reference(monkeypatch):
    values = []
    monkeypatch.setattr(credit, "step_advantages", lambda _, V, mask: values.append(V) or V)
    most = max(credit.ROLLOUTS)
    returns = torch.arange(0.0, most + 4).expand(2, 3, -1)              # 4 are of the reference
    batch = types.SimpleNamespace(mask=torch.ones(2, 3), prompts=None, tokens=None,
                                  rewards=torch.tensor([[0.0, 1.0]]))
    credit.estimates(batch, returns, lambda *_: torch.ones(2, 3), torch.zeros(2, 3))
    assert [V[0, 0].item() for V in values[:-1]] == [(K - 1) / 2 for K in credit.ROLLOUTS]


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


def test_a_gradient_is_that_of_the_tokens_that_have_an_advantage(config, load_task, talker):
    """By differences: a small step along it changes sum A log pi by its squared length."""
    cfg = config()
    policy = talker(cfg).double()
    batch = ppo.sample_batch(policy, load_task(cfg), cfg, 0)
    A = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0)).double()
    A[:, 1] = 0
    found = credit.gradient(policy, batch, A, [0, 2], cfg)

    def objective():
        logps, _ = ppo.score(policy, batch.prompts, batch.tokens)
        return (A * logps * batch.mask)[[0, 2]].sum().item()
    before = objective()
    with torch.no_grad():
        for weight, part in zip(policy.parameters(), found.split(
                [weight.numel() for weight in policy.parameters()])):
            weight += 1e-7 * part.view_as(weight)
    assert objective() - before == pytest.approx(1e-7 * found.square().sum().item(), rel=1e-3)


def test_the_limit_of_a_part_counts_the_operations_and_bytes_that_it_needs(monkeypatch):
    """A model with 2 layers, 10 wide, with 3 heads and 1 group of 4 numbers, 7 inside, 11 tokens.
    4 outputs of 5 tokens after a prompt of 6."""
    monkeypatch.setattr(measure, "SIZES", (10, 2, 3, 1, 4, 7, 11))
    monkeypatch.setattr(measure, "PROMPT", 6)
    layer = 2 * 10 * 12 + 2 * 10 * 4 + 3 * 10 * 7           # queries and outputs; keys, values; MLP
    forward = 2 * (2 * layer * 4 * (6 + 5) + 110 * 4 * 5)
    weights = 4 * (2 * layer + 110)
    keys = 4 * 4 * (6 + 2.5) * 2 * (4 + 4)                  # and values, of 2 layers
    for flops, speed in ((1e3, 1e9), (1e9, 1e3)):
        monkeypatch.setattr(measure, "peaks", lambda found=(flops, speed): found)
        assert measure.limits(4, 20) == {
            "sampling": pytest.approx(max(forward / flops, 5 * (weights + keys) / speed)),
            "old log-probs": forward / flops, "updates": 3 * forward / flops,
            "optimizer": pytest.approx(2 * 7 * weights / speed)}


# ---- report.check ----------------------------------------------------------------------------

def test_a_named_cause_flat_another_one_and_none_are_counted_and_so_are_false_alarms(monkeypatch):
    found = {"greedy samples": ({"groups", "flat"}, {"flat"}, {"rate"}, set()),
             "gspo": (set(), {"rate", "flat"})}
    theirs = {"greedy samples": "entropy_collapse", "gspo": "plateau"}
    flags, *edit = doctor.BROKEN["greedy samples"]
    cases = {("gspo.py", "", ""): "gspo", (f"grpo.py {flags}", *edit): "greedy samples"}

    def examine(command, seed, old, new, program):
        case = cases[command, old, new]
        return found[case][seed], {theirs[case]} if program == "rl" and seed == 0 else set()

    monkeypatch.setattr(doctor, "examine", examine)
    results = {(case, seed): doctor.measure("rl", case, seed)
               for case in found for seed in range(len(found[case]))}
    monkeypatch.setattr(doctor, "CORRECT", {"gspo": doctor.CORRECT["gspo"]})
    monkeypatch.setattr(doctor, "BROKEN", {"greedy samples": doctor.BROKEN["greedy samples"]})
    assert doctor.of_correct(results).splitlines()[2:] == [
        "| gspo | 2 | 1 | flat, rate | 1 |", "| **all** | 2 | 1 |  | 1 |",
        "| 95% interval, by kind |  | 5% to 95% |  | 5% to 95% |"]
    assert doctor.of_broken(results).splitlines()[2:4] == [
        "| greedy samples | 4 | 1 | 1 | 1 | 1 | 1 | 0 | 0 | 3 |",
        "| **all** | 4 | 1 | 1 | 1 | 1 | 1 | 0 | 0 | 3 |"]
    assert doctor.wilson(0, 30) == "0% to 11%" and doctor.wilson(30, 30) == "89% to 100%"


def test_each_mistake_is_planted_in_a_run_with_a_base_of_its_own(monkeypatch):
    texts, made = {}, []
    monkeypatch.setattr(doctor.edits, "load", lambda text, name, path: texts.setdefault(
        path.name, []).append(text) or types.SimpleNamespace(main=None))
    monkeypatch.setattr(doctor.measuring, "run", lambda main, words, look: (
        made.append(words) or (set(), set())))
    for seed, case in enumerate(doctor.BROKEN):
        doctor.measure("", case, seed)
        compile(texts["grpo.py"][-1], case, "exec")
        assert made[-1][-4:] == ["--seed", f"{seed}", "--base_seed", f"{seed}"]
    assert len({*texts["grpo.py"]}) == len(doctor.BROKEN)
    assert doctor.BROKEN.keys() == doctor.CAUSES.keys() == doctor.THEIRS.keys()
    runs = doctor.numbered({"a": 2, "b": 1}, 100)
    assert runs == [("a", 100), ("b", 101), ("a", 102)]


# ---- R1 --------------------------------------------------------------------------------------

SHORT = shlex.join(arguments(SMALL | {"task": "notation:2", "base_steps": 3, "num_prompts": 2,
                                      "num_eval_problems": 8, "max_completion_length": 4}))


def test_each_run_of_r1_starts_from_the_policy_of_the_run_that_its_row_names(monkeypatch, watch):
    """The base is a run of 0 steps. Each other run learns, because odd lengths are right here."""
    policies, begun = {}, {}

    def look(folder):
        policies[folder] = policy_of(folder)
        if "cold-start" not in folder:
            begun[folder] = load(f"{folder}/base.pt")["policy"]
        return {}
    for name, command in r1.RUNS.items():
        monkeypatch.setitem(r1.RUNS, name, re.sub("_steps [1-9]0", "_steps 1", command))
    taught = watch(r1.coldstart, "load_policy", lambda folder, *_: folder)
    seeds = watch(plumbing, "warm_start", lambda policy, task, cfg: cfg.base_seed)
    flags = SHORT.replace("--max_steps 10", "--learning_rate 0.01 --temperature 9")
    monkeypatch.setattr(r1, "score", look)
    for script in (grpo, reinforce):
        monkeypatch.setattr(script, "verify", lambda problem, text: float(len(text) % 2))
    found = r1.measure(r1.CASE, 3, flags)
    assert taught == ["runs/r1/base"] and found.keys() == r1.RUNS.keys() and seeds == [3, 4]
    folders = {name: command.split()[-1] for name, command in r1.RUNS.items()}
    for name, folder in folders.items():
        origin = policies[folders[r1.start_of(name)] if r1.start_of(name) else folder]
        if folder in begun:
            assert changed_weights(begun[folder], origin) == [], name
        assert (changed_weights(policies[folder], origin) != []) == (name != "base"), name
    assert [*map(r1.start_of, r1.STAGES)] == ["", *r1.STAGES[:-1]]
    assert {r1.start_of(name) for name in r1.RUNS if "R1-Zero" in name} == {"base"}
    for without, name in r1.PAIRS:              # the same base, steps and rate
        commands = [r1.RUNS[each].rpartition(" ")[0] for each in (without, name)]
        assert commands[0].replace("+format", "+format+language") == commands[1]
