"""lab/hacking.py: what its rewards pay for, what the best walks are, and what it concludes."""
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from small_runs import INSTANT, arguments

import common
import grpo
from common import Problem
from lab import entry, hacking
from tasks import gridworld

PROMPTS = ("A b3 4", "C c2 4", "F c2 4")
FOUR_MOVES = ["".join(moves) for n in range(5) for moves in itertools.product("URDL", repeat=n)]


def returns(kind, prompt, texts):
    return [hacking.proxy(kind, Problem(prompt, ""), text) for text in texts]


# ---- rewards in the grid world ---------------------------------------------------------------

def test_to_go_back_and_forth_pays_with_a_bonus_and_costs_with_a_difference():
    texts = ["", "RL", "RLRL"]
    assert returns("nearer", "A b3 7", texts) == [0, 1, 2]
    assert returns("potential", "A b3 7", texts) == [12, 10, 8]         # e4 is 3 + 1 moves away
    assert returns("true", "A b3 7", texts) == [0, -2, -4]


def test_each_reward_pays_for_what_it_is_named_after():
    """b3 to c3, c2, b2; D on to the penalty at b1, L on to the prize of 4; one character more."""
    text = "RDLDLU"
    assert returns("true", "A b3 7", [text[:4], text]) == [-6, -3]
    assert returns("no penalty", "A b3 7", [text[:4], text]) == [-4, -1]
    assert returns("alive", "A b3 7", [text[:3], text]) == [3, 3 - 3 + 4 - 1]


def test_the_bonus_is_for_coming_nearer_and_not_for_going_away():
    assert returns("nearer", "A b3 7", ["R", "L"]) == [2, -1]           # the 5 is at e4


def test_a_difference_of_a_potential_gives_every_group_the_same_advantages():
    texts = [*FOUR_MOVES, "RURRRR", "x", "RURR!", "LLLLLLLLLL"]
    for prompt in ("A b3 7", *PROMPTS):
        groups = [torch.tensor([returns(kind, prompt, texts)]) for kind in ("true", "potential")]
        one, other = [grpo.advantages(rewards) for rewards in groups]
        torch.testing.assert_close(one, other)
        assert (groups[1] - groups[0]).unique().numel() == 1 and groups[1][0, 0] > 0


@pytest.mark.parametrize("kind", hacking.REWARDS)
def test_the_best_walks_are_those_of_all_walks_that_earn_the_most(kind):
    for prompt in PROMPTS:
        proxies = returns(kind, prompt, FOUR_MOVES)
        name, start, _ = prompt.split()
        highest, true, moves = hacking.solve(kind, name)[4][start]
        assert highest == max(proxies)
        best = [text for text, value in zip(FOUR_MOVES, proxies) if value == highest]
        of_best = returns("true", prompt, best)
        assert min(of_best) <= true <= max(of_best)
        assert min(map(len, best)) <= moves <= max(map(len, best))


def test_the_best_by_the_true_reward_is_that_of_the_task_and_of_no_wrong_one():
    prompts = [f"{start} {limit}" for start in gridworld.STARTS for limit in gridworld.LIMITS]
    exact = {kind: hacking.predict(kind, prompts) for kind in hacking.REWARDS}
    task = gridworld.Gridworld(common.Config(task="gridworld"))
    best = sum(task.best_return(Problem(prompt, "")) for prompt in prompts) / len(prompts)
    assert exact["true"]["true"] == exact["true"]["proxy"] == pytest.approx(best, abs=1e-5)
    assert exact["potential"]["true"] == exact["true"]["true"]
    assert max(exact[kind]["true"] for kind in hacking.WRONG) < best - 0.5
    assert exact["alive"]["moves"] == 7                                 # the mean limit


# ---- training --------------------------------------------------------------------------------

@pytest.fixture
def tiny(monkeypatch):
    """tiny(task): a policy; make() makes a Config for it, and 3 steps are a run."""
    def flags_of(task):
        flags = INSTANT | {"task": task, "num_generations": 4}
        flags.pop("operands")
        return common.parse_flags(grpo.Config, arguments(flags))

    def make(flags, seed):
        cfg = flags_of(flags[1] if flags else "arithmetic")
        return cfg, common.load_task(cfg, grpo.verify)

    monkeypatch.setattr(hacking, "make", make)
    monkeypatch.setattr(hacking, "STEPS", 3)
    torch.manual_seed(0)
    return lambda task: grpo.GPT(flags_of(task))


def test_a_model_is_trained_when_it_is_due_on_other_samples_of_the_policy_of_then(
        tiny, monkeypatch):
    batches = []

    def fit(model, sample, progress, seed):
        assert progress("label", ["a", "b"]) == ["a", "b"]
        batches.append(sample("preferences 0"))
        model.head.bias.data.fill_(len(batches))

    monkeypatch.setattr(hacking.preferences, "fit", fit)
    policy = tiny("arithmetic")
    at_start = policy.embed.weight.clone()
    found = hacking.please({0: 2, 2: 1}, 0, policy)
    assert len(batches) == 3
    assert not torch.equal(batches[0].prompts, batches[1].prompts)
    assert batches[1].rewards.unique().tolist() == [1.0]    # nothing but the model of then
    assert found["score"] == [2.0] * 3                      # the model before the first step
    assert found["kl"][0] == pytest.approx(0, abs=1e-5)
    assert torch.equal(policy.embed.weight, at_start)       # equal scores teach nothing


def test_walks_are_trained_by_the_proxy_and_told_in_truth(tiny):
    runs = {}
    for kind in ("true", "alive"):
        policy = tiny("gridworld")
        bias = torch.tensor([grpo.TOKENIZER.encode_single_token(move) for move in "URDL"])
        policy.embed.weight.data[bias] *= 3
        torch.manual_seed(0)
        runs[kind] = hacking.walk("usual", kind, 0, policy)
    assert runs["true"]["proxy"] == runs["true"]["true"]
    assert runs["alive"]["true"][0] == runs["true"]["true"][0]          # the same policy
    assert runs["alive"]["moves"][0] == runs["true"]["moves"][0] > 1
    assert runs["alive"]["proxy"][0] > runs["alive"]["true"][0]


def test_what_is_measured_is_kept_by_model_base_reward_and_seed(monkeypatch):
    def side_by_side(function, jobs):
        return [[function.__name__, *job[:-1]] for job in jobs]

    task = SimpleNamespace(is_held_out=lambda problem: problem.prompt.endswith("9"))
    monkeypatch.setattr(hacking, "side_by_side", side_by_side)
    monkeypatch.setattr(hacking, "load_base", lambda script, *flags: (None, task, flags))
    found = hacking.measure([5, 6])
    assert found["models"]["fresh"][1] == ["please", hacking.MODELS["fresh"], 6]
    assert found["walks"]["short"]["nearer"][0] == ["walk", "short", "nearer", 5]
    assert found["prompts"] == len(gridworld.STARTS) * 4
    assert found["exact"]["alive"]["moves"] == 6.5
    assert json.dumps(found)


# ---- what was found --------------------------------------------------------------------------

def test_pairs_are_of_one_group_and_a_tie_is_not_in_order():
    ratings = torch.tensor([[0.9, 0.1, 0.95], [0.2, 0.2, 0.3], [9.0, 9.0, 9.0]])
    is_correct = torch.tensor([[True, False, False], [True, False, True], [True, True, True]])
    assert hacking.in_order(ratings, is_correct) == [2, 4]


def run(first, highest, last, order=(9, 9)):
    """A run of 15 steps against a model, of whose ten pairs so many are in order."""
    accuracy = [first] * 5 + [highest] * 5 + [last] * 5
    pairs = [[order[0], 10]] * 10 + [[order[1], 10]] * 5
    return {"accuracy": accuracy, "score": accuracy, "kl": [0.0] * 15, "pairs": pairs}


def verdicts(frozen=None, fresh=None, more=None, walks=(0.0,) * 7, exact=(2, 1, 0, 1, 2)):
    """walks: the true returns at the end, in the order of WALKS."""
    same = [run(0.3, 0.3, 0.3)] * 3
    numbers = iter(walks)
    found = {
        "models": dict(zip(hacking.MODELS, (frozen or same, more or same, fresh or same))),
        "walks": {base: {kind: [dict.fromkeys(hacking.NUMBERS, [9.0] * 5 + [value] * 5)] * 3
                         for kind, value in zip(kinds, numbers)}
                  for base, kinds in hacking.WALKS.items()},
        "exact": {kind: dict.fromkeys(hacking.NUMBERS, value)
                  for kind, value in zip(hacking.REWARDS, exact)},
        "prompts": 3}
    for heads, rows in hacking.tables(found):
        assert {len(row) for row in rows} == {len(heads)}
    return [claim.verdict for claim in hacking.claims(json.loads(json.dumps(found)))]


def test_over_optimisation_is_a_rise_and_a_fall_with_every_seed():
    assert verdicts([run(0.3, 0.9, 0.5)] * 3)[1] == entry.SHOWN
    assert verdicts([run(0.3, 0.9, 0.5)] * 2 + [run(0.3, 0.9, 0.86)])[1] == entry.NOT_SHOWN
    assert verdicts([run(0.3, 0.9, 0.86)] * 3)[1] == entry.CONTRADICTED
    assert verdicts([run(0.9, 0.9, 0.1)] * 3)[1] == entry.CONTRADICTED      # it never rose


def test_the_claims_about_models_compare_what_they_name():
    gamed = verdicts([run(0.3, 0.9, 0.5, (9, 2))] * 3, [run(0.3, 0.9, 0.88)] * 3,
                     [run(0.3, 0.9, 0.87)] * 3)
    assert gamed[:6] == [entry.SHOWN] * 6
    other = verdicts([run(0.5, 0.5, 0.4, (2, 9))] * 3, [run(0.3, 0.9, 0.2)] * 3)
    assert other[:6] == [entry.CONTRADICTED] * 6


def test_the_claims_about_walks_compare_true_returns_on_the_same_base():
    worse = verdicts(walks=(2, 1, 1, 1, 0, -5, -5))
    assert worse[8:] == [entry.SHOWN] * 5
    better = verdicts(walks=(2, 3, 2, 1, 0, 1, -1), exact=(2, 1, 2, 1, 1))
    assert better[6:] == [entry.CONTRADICTED] * 3 + [
        entry.NOT_SHOWN, entry.SHOWN, entry.CONTRADICTED, entry.SHOWN]
