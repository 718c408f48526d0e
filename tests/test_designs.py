"""Each experiment of the lab has the design that its page states: its sides train on equally many
outputs, and seeds and samples which judge have not chosen."""
import itertools
import shlex
import sys
import types

import pytest
import torch

import common
import grpo
import gspo
import measuring
import plumbing
import reinforce
from lab import bench
from lab.claims import beliefs, bugs, hints, imitation, kl
from tasks import preferences

TRAINED = {                             # outputs in a step, and steps, of all cases and sides
    "beliefs": (256, 60), "rare": (256, 60), "masking": (128, 36), "hacking": (256, 60),
    "wrongrewards": (512, 30), "kl": (128, 20), "signal": (256, 25)}


def cases_of(name):
    """List what an experiment measures itself: its cases, and its sides at a rate. -> list"""
    one = bench.module(name)
    return [case if ", 0." in case else f"{case}, 0.001" for case, (command, _) in one.SIDES.items()
            if not command] + [case for case in one.CASES if case not in ("base", *one.SIDES)]


class Spy:
    """Stands in for the parts of an experiment that take time, and notes what they get."""

    def __init__(self, monkeypatch, module):
        self.trained, self.bases, self.streams = [], [], []
        self.policy = torch.nn.Linear(1, 1)
        for name in ("load_base", "training"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(self, name))
        monkeypatch.setattr(grpo, "complete", self.complete)
        monkeypatch.setattr(grpo, "evaluate", lambda *_: {"pass@1": 0.5, "greedy": 0.5})

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
        return types.SimpleNamespace(texts=[""] * len(problems), problems=problems, opening=opening)


@pytest.mark.parametrize("name", TRAINED)
def test_all_sides_train_on_equally_many_outputs(name, monkeypatch):
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
        if one.SIDES and case not in one.CASES:
            assert cfg.learning_rate == float(case.rpartition(", ")[2])
        if name == "beliefs":
            assert cfg.reward == (case.rpartition(", ")[0] or "accuracy")
        assert len({*map(str, spy.streams)}) == len(spy.streams)        # no pair is labelled twice
        flags[case] = spy.streams
    if name == "hacking":
        assert [len(some) for some in flags.values()] == [1, 5, 5]
        steps = [{stream.split(", ")[1] for stream in some} for some in flags.values()]
        assert steps == [{"0"}, {"0"}, {"0", "12", "24", "36", "48"}]


class Begun(Exception):
    """Ends a measurement at its first base, with its Config and what its script would do."""


def begun(name, case, seed):
    """Measure a case of an experiment until it needs a base. -> Config, the rewards of OUTPUTS, the
    advantages of the outputs of two groups with the rewards GROUPS, the weight of two tokens"""
    def begin(script, cfg):
        judge = getattr(script, "reward", lambda *one: one[-1])     # examples have none
        rewards = [judge(common.Problem("3+1=", "4"), *one) for one in OUTPUTS]
        A, weight = None, None
        if script in (grpo, gspo):
            A = script.advantages(GROUPS, cfg.scale_rewards).flatten()
        if script is reinforce:
            task, ones = common.load_task(cfg, grpo.verify), torch.ones(8, 2)
            batch = common.Batch(**dict.fromkeys(common.Batch.__annotations__)
                                 | {"rewards": GROUPS, "mask": ones, "texts": [""] * 8})
            A = script.compute_advantages(
                None, None, batch, script.token_rewards(task, batch, cfg), cfg)[:, 0]
            weight = script.aggregate(ones, ones, "sequence_sum").item()
        raise Begun(cfg, rewards, A, weight)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Begun) as end:
        patch.setattr(plumbing, "load_base", lambda policy, task, cfg: begin(
            sys.modules[type(cfg).__module__], cfg))
        patch.setattr(measuring, "run", lambda main, words, *_: begin(
            script := sys.modules[main.__module__],
            plumbing.parse_flags(script.Config, ["--device", "cpu", *words])))
        bench.perform(name, case, seed)
    return end.value.args


@pytest.mark.parametrize("name", sorted({*bench.NAMES} - {"bugs"}))
def test_each_case_begins_from_the_base_of_its_seed(name):
    one = bench.module(name)
    sides = {f"{side}, 0.004": 0.004 for side in one.SIDES}
    for case, rate in (dict.fromkeys(one.CASES) | sides).items():
        if case in one.FEWER and one.FEWER[case] == [0]:            # trains nothing
            continue
        cfg, *_ = begun(name, case, 4)
        assert (cfg.seed, cfg.base_seed) == (4, 0 if one.ONE_BASE else 4), case
        assert rate in (None, cfg.learning_rate) or name == "beliefs", case


# Outputs to 3+1=, each with what a verifier or a judge gives for it
OUTPUTS = ("<answer>4</answer>", 4.0), ("<answer>6</answer>", 0.0), ("<answer>5</answer>", -1.0), (
    "", -2.0)
# Words in the name of a way, or of its reward, and the rewards of OUTPUTS. The first words count
REWARDED = {
    "not wrong": (1, 1, 0, 0), "weights 2, 1 and 0": (5, 1, 0, -1), "of 6 points": (1, 1, 1, 0),
    "of 11 points": (1, 0, 0, 0), "levels": (11, 7, 6, 5), "even or odd": (1, 1, 0, 0),
    " 5 points less": (-1, -5, -6, -7), " 5.5 points less": (-1.5, -5.5, -6.5, -7.5),
    "": (4, 0, -1, -2)}
# The rewards of two groups, and the advantages
GROUPS = torch.tensor([[2.0, 1, 0, -1], [5, 5, 5, 5]])
ADVANTAGES = {
    "above the group": (4, 4, 0, 0, 0, 0, 0, 0), "weighted": (6, 2, 0, 0, 0, 0, 0, 0),
    "imitation": (1.6, 0, 0, 0, 1.6, 1.6, 1.6, 1.6),
    "group's mean as baseline, positive": (1.5, 0.5, 0, 0, 0, 0, 0, 0),
    "group's mean as baseline": (1.5, 0.5, -0.5, -1.5, 0, 0, 0, 0),
    "batch's mean as baseline, no negative": (0, 0, 0, 0, 2.25, 2.25, 2.25, 2.25),
    "batch's mean as baseline": (-0.75, -1.75, -2.75, -3.75, 2.25, 2.25, 2.25, 2.25),
    "REINFORCE": (2, 1, 0, -1, 5, 5, 5, 5), "GRPO, positive": (1.162, 0.387, 0, 0, 0, 0, 0, 0),
    "": (1.162, 0.387, -0.387, -1.162, 0, 0, 0, 0)}
# Flags that a name states; all other ways have other values
FLAGS = {
    "3 rounds": ("max_steps", 3), "10 rounds": ("max_steps", 10),
    "3 passes": ("num_iterations", 3), "6 passes": ("num_iterations", 6),
    "no cost": ("task", "abstain:cost=0"), "cost 3": ("task", "abstain:cost=3"),
    "points": ("reward", "points"), "levels": ("reward", "points"),
    "critic first": ("critic_pretrain_steps", 10)}


@pytest.mark.parametrize("name", ["imitation", "abstain"])
def test_each_way_to_learn_has_the_rewards_advantages_flags_and_outputs_that_its_name_states(name):
    one = bench.module(name)
    for side in one.SIDES:
        cfg, rewards, A, weight = begun(name, f"{side}, 0.004", 4)
        expected, expected_A = (next(table[key] for key in table if key in side)
                                for table in (REWARDED, ADVANTAGES))
        assert tuple(rewards) == expected, side
        assert A is None or A.tolist() == pytest.approx(expected_A, abs=1e-3), side
        assert weight in (None, 1 if "divided by the length" in side else 2), side
        stated = {FLAGS[key] for key in FLAGS if key in side}
        assert stated == {(flag, value) for flag, value in FLAGS.values()
                          if getattr(cfg, flag, None) == value}, side
        assert budget(one.WAYS[side.partition(": ")[2]][0])[0] == 15_360, side


def budget(command):
    """Count what a way's command line uses. -> number of outputs, number of updates"""
    script, *words = command.split()
    cfg = plumbing.parse_flags(imitation.SCRIPTS[script.removesuffix(".py")].Config, words)
    batches = cfg.max_steps + getattr(cfg, "critic_pretrain_steps", 0)
    return (batches * cfg.num_prompts * cfg.num_generations,
            cfg.max_steps * cfg.num_iterations * cfg.num_mini_batches)


@pytest.mark.parametrize("command, counts", [
    ("grpo.py --num_iterations 2", (3 * 8, 3 * 4)),
    ("reinforce.py --method rejection --num_iterations 3", (3 * 8, 3 * 6)),
    ("ppo.py --critic_pretrain_steps 2", (5 * 8, 3 * 2)), ("dpo.py", (3 * 8, 3 * 2))])
def test_budget_counts_the_outputs_and_updates_of_a_run(command, counts, monkeypatch):
    command += " --max_steps 3 --num_prompts 4 --num_generations 2 --num_mini_batches 2"
    assert budget(command) == counts
    script = imitation.SCRIPTS[command.partition(".py")[0]]
    sample_batch, step = script.sample_batch, plumbing.AdamW.step
    outputs, updates = [], []

    def sample(policy, task, cfg, purpose, split="train"):
        batch = sample_batch(policy, task, cfg, purpose, split)
        outputs.extend(batch.problems if split == "train" else [])
        return batch
    monkeypatch.setattr(script, "sample_batch", sample)
    # the updates before the first output are those of the base, and the critic has another rate
    monkeypatch.setattr(plumbing.AdamW, "step", lambda self: (
        updates.append(len(outputs) > 0 and self.param_groups[0]["lr"] == 1e-3), step(self))[1])
    imitation.train(f"{command} {bench.UNSCORED} --base_steps 2", 1e-3,
                    {"reward": lambda problem, text, given: float(len(text))}, 0, ())
    assert (len(outputs), sum(updates)) == counts


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


def test_each_hint_has_outputs_of_its_own(monkeypatch):
    Spy(monkeypatch, hints)
    drawn = []
    monkeypatch.setattr(hints, "continued", lambda _, policy, cfg, problems, *tensors: (
        drawn.append((len({one.prompt for one in problems}), tensors[-1])), [""] * len(problems)))
    hints.share_with_hint("--task key:half")
    [(problems, uniforms)] = drawn
    assert len(uniforms) == len(uniforms.unique(dim=0)) == 512 and problems > 400


def test_a_sum_is_mended_or_broken_if_it_crosses_one_half(monkeypatch):
    ends = {"--max_steps 0": [0.2, 0.4, 0.5, 0.9, 0.6, 0.7, None, 0.8],
            "--reward majority --learning_rate 0.0005": [0.7, 0.1, 0.9, 0.3, 0.9, 0.8, 0.1, None]}
    monkeypatch.setattr(beliefs, "after_training",
                        lambda flags: ({}, ends[flags.removeprefix("--seed 3 ")]))
    assert beliefs.turned("majority, 0.0005", "--seed 3") == {
        "wrong sums": 2, "mended": 1, "right results of wrong sums": pytest.approx(0.4),
        "right sums": 3, "broken": 1}
