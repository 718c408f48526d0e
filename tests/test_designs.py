"""Each experiment of the lab has the design that its page states: how many different outputs it
judges, what its two sides get, and that seeds and samples which judge have not chosen."""
import collections
import importlib
import itertools
import shlex
import types

import pytest
import torch

import common
import grpo
import plumbing
from lab import bench
from lab.claims import bugs, hints, kl, rates, sharpen, tools
from tasks import preferences

LOOKS = {                               # problems, outputs to each, and how these begin
    "beliefs": 2 * [(64, 256, "")] + 3 * [(512, 8, "<think>")],
    "rare": 2 * [(512, 8, "<think>")], "sharpen": 2 * [(64, 128, ""), (64, 128, "<think>")]}
TRAINED = {                             # outputs in a step, and steps, of all cases and sides
    "beliefs": (256, 60), "rare": (256, 60), "masking": (128, 36), "hacking": (256, 60),
    "wrongrewards": (512, 30), "kl": (128, 20), "signal": (256, 25)}


def cases_of(name):
    """List what an experiment measures itself: its cases, and its sides at a rate. -> list"""
    one = bench.module(name)
    return [case if ", 0." in case else f"{case}, 0.001" for case, (command, _) in one.SIDES.items()
            if not command] + [case for case in one.CASES if case not in one.SIDES]


class Spy:
    """Stands in for the parts of an experiment that take time, and notes what they get."""

    def __init__(self, monkeypatch, module):
        self.outputs, self.trained, self.bases, self.streams = [], [], [], []
        self.policy = torch.nn.Linear(1, 1)
        for name in ("load_base", "training"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(self, name))
        monkeypatch.setattr(grpo, "complete", self.complete)
        monkeypatch.setattr(grpo, "evaluate", lambda *_: {"pass@1": 0.5})

    def load_base(self, script, flags=""):
        self.cfg = plumbing.parse_flags(script.Config, ["--device", "cpu", *shlex.split(flags)])
        self.bases.append(self.cfg)
        return self.cfg, common.load_task(self.cfg, grpo.verify), self.policy

    def training(self, cfg, task, policy):
        problems = [common.sample_problems(task, 1, 0)[0]] * cfg.num_prompts * cfg.num_generations
        zeros = torch.zeros(cfg.num_prompts, cfg.num_generations)
        self.trained.append([len(problems), 0, cfg])
        while True:
            self.trained[-1][1] += 1
            yield types.SimpleNamespace(
                problems=problems, texts=[""] * len(problems), rewards=zeros, sampled=None,
                verified=[[0.0]] * len(problems), is_correct=zeros > 0)

    def complete(self, policy, task, cfg, problems, generator, opening=""):
        self.outputs.append((opening, generator.initial_seed(), [one.prompt for one in problems]))
        return types.SimpleNamespace(texts=[""] * len(problems), problems=problems, opening=opening)


@pytest.mark.parametrize("name", LOOKS)
def test_a_policy_is_judged_by_as_many_different_outputs_as_the_page_says(name, monkeypatch):
    """Each call draws its own numbers, and all policies get the same held-out problems."""
    one = bench.module(name)
    spy = Spy(monkeypatch, one)
    if name == "sharpen":
        scores = dict.fromkeys(("think_share",), 0.0) | {
            word: [0.0] * 128 for word in ("pass@k", "maj@k")}
        monkeypatch.setattr(sharpen.measuring, "run", lambda *_: None)
        monkeypatch.setattr(common.Task, "judge", lambda self, batch, n, _: n)
        monkeypatch.setattr(common.Task, "scores", lambda self, batch, greedy: scores)
    one.measure({"sharpen": "countdown"}.get(name) or cases_of(name)[0], 3)
    train = {problem.prompt for problem in common.sample_problems(
        common.load_task(spy.cfg, grpo.verify), 2000, 0)}
    found = []                          # the calls of each look: another one begins with its seed
    for call in spy.outputs:
        if not found or call[:2] == found[-1][0][:2] or call[0] != found[-1][0][0]:
            found.append([])
        found[-1].append(call)
    looks = []
    for calls in found:
        prompts = [prompt for _, _, some in calls for prompt in some]
        assert len({seed for _, seed, _ in calls}) == len(calls) and train.isdisjoint(prompts)
        n = next(n for opening, n in ((one[2], one[1]) for one in LOOKS[name])
                 if opening == calls[0][0])
        assert all(count % n == 0 for count in collections.Counter(prompts).values())
        assert len({*prompts}) > 0.8 * len(prompts) / n         # a problem may be drawn twice
        looks.append((len(prompts) // n, n, calls[0][0]))
        same = next(other for other in found if other[0][0] == calls[0][0])
        assert prompts == [prompt for _, _, some in same for prompt in some]
    assert sorted(looks) == sorted(LOOKS[name])


@pytest.mark.parametrize("name", TRAINED)
def test_all_sides_train_on_equally_many_outputs_from_bases_of_their_seed(name, monkeypatch):
    one = bench.module(name)
    flags = {}
    for case in cases_of(name):
        with monkeypatch.context() as patch:
            spy = Spy(patch, one)
            patch.setattr(grpo, "sample_batch", lambda policy, task, cfg, step, spy=spy: (
                spy.streams.append(step) or types.SimpleNamespace(
                    mask=torch.ones(1, 1), tokens=torch.zeros(1, 1).long())))
            patch.setattr(kl, "log_probs", lambda *_: torch.zeros(1, 4))
            patch.setattr(preferences, "RewardModel", lambda policy: types.SimpleNamespace(
                rewards=lambda batch: batch.rewards))
            patch.setattr(preferences, "fit", lambda model, sample, seed: sample("pairs"))
            one.measure(case, 3)
        [(outputs, steps, cfg)] = spy.trained
        assert (outputs, steps) == TRAINED[name], case
        base_seed = 0 if one.ONE_BASE else 3
        assert (cfg.seed, cfg.base_seed) == (3, base_seed)
        if one.SIDES and case not in one.CASES:
            assert cfg.learning_rate == float(case.rpartition(", ")[2])
        assert len({*map(str, spy.streams)}) == len(spy.streams)        # no pair is labelled twice
        flags[case] = spy.streams
    if name == "hacking":
        assert [len(some) for some in flags.values()] == [1, 5, 5]
        steps = [{stream.split(", ")[1] for stream in some} for some in flags.values()]
        assert steps == [{"0"}, {"0"}, {"0", "12", "24", "36", "48"}]


def config_of(command):
    script, *flags = shlex.split(command)
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    return {"script": script} | vars(plumbing.parse_flags(module.Config, flags))


@pytest.mark.parametrize("one, pair, names", [
    *((rates, pair, names) for (*_, a, b, _, _), names in zip(rates.JUDGED, (
        "epsilon epsilon_high", "epsilon epsilon_high", "sampler_lag max_steps", "beta", "online",
        "epsilon epsilon_high script")) for pair in [(a, b)]),
    *((tools, (tools.FINE, other), "reward") for other in (tools.COARSE, tools.OUTCOME)),
    (bench.module("methods"), ("reinforce.py", "ppo.py"), "script"),
    (bench.module("methods"), ("grpo.py", "ppo.py"), "script epsilon_high"),
    (hints, (hints.OF_SELF, hints.OF_GRPO), "script beta")])
def test_two_sides_differ_in_what_their_names_say_and_get_the_same_outputs(one, pair, names):
    """In no other flag that both scripts have, so in no number of outputs, updates or steps."""
    first, second = (config_of(one.SIDES[side][0]) for side in pair)
    both = first.keys() & second.keys()
    assert {name for name in both if first[name] != second[name]} == {*names.split()}
    if "sampler_lag" in both:           # the first 8 steps learn from samples of the base
        assert second["max_steps"] - first["max_steps"] == second["sampler_lag"] == 8


def test_seeds_that_judge_are_not_those_that_choose_or_of_the_controls(monkeypatch):
    for one in map(bench.module, bench.NAMES):
        seeds = [{*one.SEEDS}, {*one.TUNING}, {*one.OTHER_SEEDS}]
        assert all(a.isdisjoint(b) for a, b in itertools.combinations(seeds, 2))
        assert all({*some} <= seeds[0] for some in one.FEWER.values())
    seen = []
    monkeypatch.setattr(bugs, "load_base", lambda _, flags: (seen.append(flags), "base"))
    monkeypatch.setattr(bugs, "run_text", lambda script, text, flags, base, look: (
        seen.append(flags.rpartition(" --")[2]) or ([{"step": 1}], [])))
    for case, shift in ((bugs.CORRECT, 0), (bugs.CASES[1], 0), (bugs.CONTROL, 100)):
        bugs.measure(case, 3)
        assert seen[-2:] == [f"--base_seed {3 + shift}", f"seed {3 + shift}"]
    assert {*bugs.OTHER_SEEDS} == {seed + 100 for seed in bugs.SEEDS}


def test_each_reward_judges_the_same_outputs_of_the_base_and_each_hint_has_its_own(monkeypatch):
    batches = []
    spy = Spy(monkeypatch, tools)
    monkeypatch.setattr(grpo, "sample_batch", lambda policy, task, cfg, step: batches.append(
        (cfg.seed, cfg.base_seed, cfg.num_prompts, step)) or types.SimpleNamespace(
            rewards=torch.rand(32, 8)))
    tools.measure("the base", 3)
    assert {*batches} == {(3, 3, 32, 0)} and [cfg.reward for cfg in spy.bases] == [*tools.SIDES]
    drawn = []
    monkeypatch.setattr(hints, "load_base", spy.load_base)
    monkeypatch.setattr(hints, "continued", lambda _, policy, cfg, problems, *tensors: (
        drawn.append((len({one.prompt for one in problems}), tensors[-1])), [""] * len(problems)))
    hints.share_with_hint("--task key:half")
    [(problems, uniforms)] = drawn
    assert len(uniforms) == len(uniforms.unique(dim=0)) == 512 and problems > 400


