"""lab/tools.py: what it computes, what it measures, and its verdicts."""
import types

import pytest
import torch
from conftest import f64
from echo_task import Echo

import common
import grpo
import ppo
from lab import tools
from lab.entry import CONTRADICTED, NOT_SHOWN, SHOWN

TINY_FLAGS = ["--task", "lookup", "--num_prompts", 2, "--hidden_size", 16, "--num_hidden_layers", 1,
              "--num_attention_heads", 2, "--intermediate_size", 16, "--max_completion_length", 8]
CLAIMS = ["gradient", "slower", "late", "made up", "luck", "PPO", "fall", "coarse", "outcome",
          "length", "growing", "pays", "needless"]


# ---- rewards and gradients -------------------------------------------------------------------

def test_a_needless_call_costs_a_sixth_of_fine_and_earns_its_share_of_the_length():
    earned = 0.1 * (38 - 19) / 40                       # characters of one call and of two
    assert tools.needless_call_pays("accuracy") == 0
    assert tools.needless_call_pays("fine") == pytest.approx(-1 / 6, abs=1e-5)
    assert tools.needless_call_pays("coarse + format") == -1
    assert tools.needless_call_pays("fine + length") == pytest.approx(earned - 1 / 6, abs=1e-5)
    assert tools.needless_call_pays("accuracy + length") == pytest.approx(earned)
    grown = [tools.needless_call_pays("fine + growing length", step) for step in (0, 50)]
    assert grown == pytest.approx([0.005 - 1 / 6, earned - 1 / 6], abs=1e-5)


@pytest.mark.parametrize("name", tools.RUNS)
def test_only_one_run_learns_the_tokens_of_the_tool_and_all_rewards_are_there(name):
    cfg, task = tools.load_task([*tools.RUNS[name], "--seed", 3])
    assert cfg.mask_tool_tokens == (name != "tool tokens learned")
    assert (cfg.seed, cfg.num_prompts, task.call_tokens[0]) == (3, 16, "</search>")
    said = {"no tool": "accuracy", "tool tokens learned": "accuracy",
            "fine + growing length": "fine+growing_length"}
    assert cfg.reward == said.get(name, name.replace(" ", ""))


def test_ppo_has_the_task_the_batches_and_the_steps_of_the_others():
    script, *flags = tools.PPO
    cfg = ppo.common.parse_flags(ppo.Config, [str(flag) for flag in flags])
    assert (script, cfg.task, cfg.num_prompts, cfg.max_steps, cfg.stop_at) == (
        "ppo.py", "lookup", 16, tools.STEPS, 2)


@pytest.fixture
def echoed(asker):
    """A policy, and a batch of Echo with inserted tokens. The loss has a constant divisor, so that
    its gradient is a sum over tokens."""
    cfg, policy = asker(loss_type="dr_grpo")
    return policy, grpo.sample_batch(policy, Echo(cfg), cfg, 0), cfg


def gradient(policy, batch, cfg):
    A = grpo.advantages(batch.rewards, cfg.scale_rewards).view(-1, 1)
    tools.clear_gradient(policy)
    grpo.backward(policy, batch, None, A, torch.arange(len(A)), cfg, entropy_coef=0.0)
    return tools.flat_gradient(policy)


def test_the_gradient_with_tool_tokens_is_that_without_plus_a_part_of_the_tool(echoed, asker):
    policy, batch, cfg = echoed
    unmasked, _ = asker(loss_type="dr_grpo", mask_tool_tokens=False)
    learned = grpo.sample_batch(policy, Echo(unmasked), unmasked, 0)
    assert torch.equal(learned.tokens, batch.tokens)
    own = gradient(policy, batch, cfg)
    both = gradient(policy, learned, unmasked)
    parts = tools.gradient_parts(policy, batch, cfg)
    assert parts["own"] == pytest.approx(own.norm().item(), abs=1e-5)
    assert parts["tool"] == pytest.approx((both - own).norm().item(), abs=1e-5)
    assert min(parts.values()) > 0.01
    assert gradient(policy, batch, cfg).equal(own)      # the batch is as it was


def test_a_reward_is_as_like_accuracy_as_the_order_that_it_gives():
    right = "<think><search>ka</search><information>mi</information></think><answer>mi</answer>"
    guessed = "<answer>mi</answer>"
    wrong = right.replace("<answer>mi", "<answer>to")
    problem = common.Problem("boss of ka?", "mi", right, 1, task="lookup")
    batch = types.SimpleNamespace(texts=[right, guessed, wrong, "ka"], problems=[problem] * 4,
                                  verdicts=[1.0, 1.0, 0.0, 0.0], rewards=f64([[1, 1, 0, 0]]))
    assert tools.likeness(batch, "accuracy") == pytest.approx(1)
    assert tools.likeness(batch, "coarse + format") == pytest.approx(0, abs=1e-5)
    batch.texts = [right, right, "ka", "ka"]
    assert tools.likeness(batch, "coarse + format") == pytest.approx(1)
    batch.texts = ["ka", "ka", wrong, wrong]
    assert tools.likeness(batch, "coarse + format") == pytest.approx(-1)


# ---- runs ------------------------------------------------------------------------------------

def test_calls_and_made_up_blocks_are_counted():
    call = "<search>ka</search>"
    batch = types.SimpleNamespace(
        texts=[3 * call, 2 * call, call, "<search>ka<search>mi</think>"],
        problems=[types.SimpleNamespace(difficulty=hops) for hops in (1, 2, 2, 1)])
    assert tools.needless_calls(batch) == 2 / 4
    made_up = f"{call}<information>mi"
    assert tools.made_up([made_up, call, 2 * call, "<information>mi"]) == pytest.approx(1 / 3, 1e-4)
    assert tools.made_up(["<answer>mi</answer>"]) == 0


def test_a_silent_tool_says_nothing_whatever_is_rewarded():
    for name in ("accuracy", "fine"):
        _, task = tools.load_task(tools.RUNS[name])
        [problem] = common.sample_problems(task, 1, 0)
        person = problem.prompt[-3:-1]
        assert "<information>" in task.respond(problem, f"<search>{person}</search>")
        tools.silence(task)
        assert task.respond(problem, f"<search>{person}</search>") == ""


def test_no_name_of_a_prompt_is_its_answer_and_all_others_are_as_likely():
    _, task = tools.load_task([])
    problems = common.sample_problems(task, 2000, 0)
    assert all(problem.answer != problem.prompt[-3:-1] for problem in problems)
    assert len({problem.answer for problem in problems}) > 0.9 / tools.LUCK


def test_the_tool_is_silent_before_a_run_without_it_and_after_any(monkeypatch):
    events = []
    sample_batch = grpo.sample_batch
    monkeypatch.setattr(tools, "FLAGS", TINY_FLAGS)
    monkeypatch.setattr(tools, "ASKED", 3)
    monkeypatch.setattr(tools, "silence", lambda task: events.append("silence"))

    def sample(policy, task, cfg, step):
        events.append((step, cfg.num_prompts, cfg.seed))
        return sample_batch(policy, task, cfg, step)
    monkeypatch.setattr(grpo, "sample_batch", sample)

    cfg, _ = tools.load_task([])
    asked = [(0, 2, 7), (1, 2, 7), "silence", (2, 3, 7)]
    for name, first in {"accuracy": [], "no tool": ["silence"]}.items():
        events.clear()
        found = tools.learn(name, 7, grpo.GPT(cfg), num_steps=2)
        assert events == first + asked
        assert {word: len(values) for word, values in found.items() if word != "made up"} == {
            "accuracy": 2, "needless": 2}


def test_what_is_measured_is_of_each_run_and_seed(monkeypatch):
    monkeypatch.setattr(tools, "load_base", lambda *_: (None, "task", "policy"))
    monkeypatch.setattr(grpo, "sample_batch", lambda policy, task, cfg, step: cfg)
    monkeypatch.setattr(tools, "gradient_parts",
                        lambda policy, batch, cfg: (batch.seed, cfg.num_prompts))
    monkeypatch.setattr(tools, "likeness", lambda batch, name: (batch.seed, name))
    monkeypatch.setattr(tools, "side_by_side",
                        lambda function, jobs: [(function.__name__, *job) for job in jobs])
    monkeypatch.setattr(tools, "run_all", lambda variants, seeds, metrics: {
        "PPO": [{"accuracy": [variants["PPO"], seed, *metrics]} for seed in seeds]})
    found = tools.measure([5, 6])
    assert found["gradients"] == [(5, tools.ASKED), (6, tools.ASKED)]
    assert found["cosines"][1] == {name: (6, name) for name in tools.RUNS}
    for name in tools.RUNS:
        assert found["runs"][name] == [("learn", name, seed, "policy") for seed in (5, 6)]
    assert found["runs"]["PPO"] == [
        {"accuracy": [tools.PPO, seed, "accuracy"]} for seed in (5, 6)]


# ---- verdicts --------------------------------------------------------------------------------

def test_a_fall_is_from_the_best_mean_of_five_steps_to_a_later_one():
    assert tools.fall([0.1] * 5 + [0.9] * 5) == 0
    assert tools.fall([0.9] * 5 + [0.5] * 5 + [0.9] * 5) == pytest.approx(0.4)
    assert tools.fall([0.9] * 5 + [0.4] + [0.9] * 5) == pytest.approx(0.1)


def found_with(ratio=2.0, **changes):
    """What would be found if all runs of three seeds were alike, but for {run: {word: number}}; a
    run has its accuracy from step `start` on, and before it none."""
    runs = {}
    for name in [*tools.RUNS, "PPO"]:
        numbers = {"start": 10, "accuracy": 0.95, "dip": 0.0, "needless": 0.1, "made up": 0.1}
        numbers |= changes.get(name.replace(" ", "_").replace("+", "and"), {})
        height = 0.001 if name == tools.NO_TOOL and name not in changes else numbers["accuracy"]
        accuracy = [0.0] * numbers["start"] + [height] * (tools.STEPS - numbers["start"])
        accuracy[20:25] = [height - numbers["dip"]] * 5
        run = {"accuracy": accuracy}
        if name != "PPO":
            run |= {"needless": [numbers["needless"]] * tools.STEPS, "made up": numbers["made up"]}
        runs[name] = [run] * 3
    return {"gradients": [{"own": 0.5, "tool": 0.5 * ratio}] * 3,
            "cosines": [{"fine": 0.8}, {"fine": 0.9}], "runs": runs}


def verdicts(found):
    """The verdicts that are not what equal runs have."""
    usual = {"gradient": SHOWN, "luck": SHOWN, "pays": SHOWN}
    seen = zip(CLAIMS, tools.claims(found), strict=True)
    return {short: claim.verdict for short, claim in seen
            if claim.verdict != usual.get(short, NOT_SHOWN)}


def test_equal_runs_show_only_what_needs_no_comparison():
    assert verdicts(found_with()) == {}
    assert verdicts(found_with(ratio=0.5)) == {"gradient": CONTRADICTED}


def test_each_claim_compares_the_runs_that_it_names():
    slow, worse = {"start": 15}, {"accuracy": 0.91}
    assert verdicts(found_with(tool_tokens_learned=slow)) == {"slower": SHOWN}
    assert verdicts(found_with(tool_tokens_learned=worse | {"made up": 0.4})) == {
        "late": SHOWN, "made up": SHOWN}
    assert verdicts(found_with(tool_tokens_learned={"start": 5, "accuracy": 0.99})) == {
        "slower": CONTRADICTED, "late": CONTRADICTED}
    assert verdicts(found_with(PPO=slow)) == {"PPO": SHOWN}
    assert verdicts(found_with(PPO={"dip": 0.3})) == {"fall": CONTRADICTED}
    assert verdicts(found_with(accuracy={"dip": 0.3})) == {"fall": SHOWN}
    assert verdicts(found_with(coarse_and_format=slow)) == {"coarse": SHOWN}
    assert verdicts(found_with(accuracy=slow)) == {
        "slower": CONTRADICTED, "PPO": CONTRADICTED, "outcome": SHOWN}
    assert verdicts(found_with(fine_and_length=worse)) == {"length": SHOWN}
    assert verdicts(found_with(fine_and_growing_length=worse)) == {"growing": SHOWN}
    assert verdicts(found_with(fine=worse)) == {"length": CONTRADICTED, "growing": CONTRADICTED}
    assert verdicts(found_with(accuracy_and_length={"needless": 0.2})) == {"needless": SHOWN}


def test_more_luck_than_there_is_contradicts():
    found = found_with()
    for accuracy, seen in {2.1: {"luck": CONTRADICTED}, 1.9: {}}.items():
        lucky = [accuracy * tools.LUCK] * tools.STEPS
        found["runs"][tools.NO_TOOL] = [{"accuracy": lucky, "needless": [0], "made up": 0}]
        assert verdicts(found) == seen


def test_the_table_has_a_row_for_each_run_and_a_cell_for_each_head():
    [(heads, rows)] = tools.tables(found_with(PPO={"start": 12}))
    assert [row[0] for row in rows] == [*tools.RUNS, "PPO"]
    assert {len(row) for row in rows} == {len(heads)}
    cells = dict(zip(heads, rows[-1]))
    assert (cells["steps to the level"], cells["made up"]) == ("13.0", "-")
    assert cells["cosine to accuracy"] == "1.000"
    cells = dict(zip(heads, rows[3]))
    assert cells["a needless call pays"] == "-0.167"
    assert cells["cosine to accuracy"] == "0.850 (0.800 - 0.900)"
