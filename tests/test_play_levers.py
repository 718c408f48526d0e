"""The levers of the playground, in node, with the base of docs/play.html: a step does what its
lever sets, and the numbers on the page are those of today's engine."""
import shlex

import pytest
import torch
from node_engine import run

import common
import grpo
import gspo
import plumbing
import reinforce
import tasks
from learn.play import build

STORED = build.data_of(build.PAGE)
T = STORED["cfg"]["T"]
RATE = STORED["cfg"]["learningRate"]
WHOLE = ["Learning rate × 10", "a quarter of it", "Four updates, no clip", "GSPO, four updates"]
SCRIPTS = {"grpo.py": grpo, "gspo.py": gspo, "reinforce.py": reinforce}


@pytest.fixture(scope="module")
def steps():
    """What the usual settings and those of each lever do in the first group of a run, and in a
    whole step for some. -> name -> dict"""
    return run(STORED, """
        const found = {};
        const more = [{ name: "", set: {} }, { name: "a quarter of it", set: { rate: "0.25" } }];
        for (const { name, set } of [...more, ...LEVERS]) {
          const settings = { ...USUAL, ...set };
          const run = newRun(base, settings);
          const steps = trainStep(run);
          const group = steps.next().value;
          if (inputs.whole.includes(name)) finish(steps);
          const far = run.policy.data.reduce((most, weight, i) =>
            Math.max(most, Math.abs(weight - base.data[i])), 0);
          found[name] = { settings, far, numUpdates: run.optimizer.steps, log: run.log[0],
            read: settingsOf("#" + addressOf(settings)), command: commandOf(settings, cfg),
            group: { ...group, temperature: group.tree.temperature, tree: null,
                     lengths: group.completions.map(({ tokens }) => tokens.length) } };
        }
        return found;
        """, whole=WHOLE)


def paid(kind, right, text, length):
    """What a completion earns."""
    if kind == "length":
        return length / T
    begins_with_1 = (tasks.extract(text) or "").startswith("1")
    return {"right": right, "wrong": 1 - right, "bug": float(right or begins_with_1)}[kind]


def compared(rewards, settings):
    """The advantages of a group (G). -> (G)"""
    rewards = torch.tensor([rewards]).double()
    if settings["baseline"] != "mean":
        return rewards[0] - float(settings["baseline"])
    if settings["method"] == "REINFORCE":
        return reinforce.advantages(rewards, "rloo")[0]
    scale = {"Dr. GRPO": "none", "MaxRL": "mean"}.get(settings["method"], "group")
    return grpo.advantages(rewards, scale)[0]


def test_a_step_with_a_lever_does_what_the_lever_says(steps):
    changed = {"reward", "baseline", "group", "temperature", "rate", "updates", "method"}
    for name, step in steps.items():
        settings, group = step["settings"], step["group"]
        problem = common.Problem(group["prompt"], group["answer"])
        assert group["temperature"] == float(settings["temperature"]), name
        right = [grpo.verify(problem, text) for text in group["texts"]]
        rewards = [paid(settings["reward"], *completion) for completion in
                   zip(right, group["texts"], group["lengths"], strict=True)]
        assert len(rewards) == int(settings["group"]), name
        assert group["rewards"] == pytest.approx(rewards), name
        assert group["A"] == pytest.approx(compared(rewards, settings).tolist()), name
        changed -= {key for key, value in settings.items() if value != steps[""]["settings"][key]}
    assert changed == set()
    fast, slow, free, clipped = (steps[name] for name in WHOLE)
    assert [fast["numUpdates"], free["numUpdates"], clipped["numUpdates"]] == [1, 4, 4]
    # one update moves a weight so far
    assert [fast["far"], slow["far"]] == pytest.approx([10 * RATE, RATE / 4], rel=0.01)
    assert free["log"]["clipped"] == 0 < clipped["log"]["clipped"]


def test_an_address_holds_the_settings_and_the_command_is_one_of_the_scripts(steps):
    for name, step in steps.items():
        settings = step["settings"]
        assert step["read"] == settings, name
        if settings["reward"] != "right" or settings["baseline"] != "mean":
            assert step["command"] is None, name
            continue
        python, file, *words = shlex.split(step["command"])
        cfg = plumbing.parse_flags(SCRIPTS[file].Config, words)
        assert cfg.num_generations == int(settings["group"]) == 64 / cfg.num_prompts
        assert cfg.temperature == float(settings["temperature"])
        assert cfg.learning_rate == pytest.approx(RATE * float(settings["rate"]))
        num_updates = cfg.num_iterations * cfg.num_mini_batches
        assert num_updates == (1 if settings["updates"] == "1" else 4)
        assert settings["updates"] != "free" or cfg.epsilon > 1e6 < cfg.epsilon_high
