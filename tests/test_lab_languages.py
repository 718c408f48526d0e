"""lab/languages.py: how thoughts are read, what consistency earns, and the verdicts."""
import itertools
import random
import types

import pytest
import torch

import common
import grpo
from lab import entry, languages
from lab.entry import CONTRADICTED, NOT_SHOWN, SHOWN

ANSWER = "<answer>7</answer>"
PROBLEM = common.Problem("((3+4)-1)=", "6", "3+4=7;7-1=6", 3)


def thought(steps):
    return f"<think>{steps}</think>{ANSWER}"


# ---- two notations ---------------------------------------------------------------------------

@pytest.mark.parametrize("steps, kind, common_share, rarer_share", [
    ("d+e=h;h-b=g", "common", 1, 0),
    ("D+E=H;H-B=G", "rarer", 0, 1),
    ("d+e=h;H-B=G", "mixed", 0.5, 0.5),
    ("d+e=h;h-B=G", "mixed", 0.5, 0),
    ("d+e=h;wait,d+e=h;h-b=g;H-B=G", "mixed", 0.75, 0.25),
    ("3+4=7;d+e=h", "mixed", 0.5, 0)])
def test_the_steps_of_a_thought_are_told_apart_by_their_letters(
        steps, kind, common_share, rarer_share):
    text = thought(steps)
    assert languages.kind(text) == kind
    assert languages.consistency(text, ["common"]) == common_share
    assert languages.consistency(text, ["rarer"]) == rarer_share
    assert languages.consistency(text, ["common", "rarer"]) == common_share + rarer_share


@pytest.mark.parametrize("text", [ANSWER, thought(""), "<think>d+e=h" + ANSWER, ""])
def test_what_has_no_thought_has_no_notation_and_earns_nothing(text):
    assert languages.kind(text) == "no thought"
    assert languages.consistency(text, ["common", "rarer"]) == 0


def test_demonstrations_change_the_numbers_of_the_thought_alone(config, load_task):
    plain = load_task(config(operands="5"))
    task = languages.TwoNotations(plain, [])
    kinds = []
    for seed, problem in enumerate(common.sample_problems(plain, 400, 0)):
        text = task.demonstration(problem, random.Random(seed), "cold_start")
        kinds.append(languages.kind(text))
        head, _, rest = text.removeprefix("<think>").partition("</think>")
        back = str.maketrans("abcdefghij", "0123456789")
        assert head.lower().translate(back) == problem.work
        assert rest == f"<answer>{problem.answer}</answer>"
    shares = {name: kinds.count(name) / 400 for name in ("common", "rarer", "mixed")}
    pure = 0.9 ** 3                             # three chances to change
    assert shares == pytest.approx(
        {"common": 0.75 * pure, "rarer": 0.25 * pure, "mixed": 1 - pure}, abs=0.06)


def test_consistency_is_added_to_the_reward_for_a_right_answer(config, load_task):
    rewards = {}
    for name, targets in languages.TARGETS.items():
        task = languages.TwoNotations(load_task(config()), targets)
        rewards[name] = [task.reward(PROBLEM, thought(steps), verdict, 0)
                         for verdict in (1.0, 0.0) for steps in ("d+e=h", "D+E=H", "d+e=h;D+E=H")]
    assert rewards == {languages.ALONE: [1, 1, 1, 0, 0, 0], languages.EITHER: [2, 2, 2, 1, 1, 1],
                       languages.COMMON: [2, 1, 1.5, 1, 0, 0.5],
                       languages.RARER: [1, 2, 1.5, 0, 1, 0.5]}


def test_mixing_is_a_share_of_the_thoughts_not_of_the_outputs():
    batch = types.SimpleNamespace(
        texts=[thought("d+e=h;D+E=H"), thought("d+e=h"), thought("D+E=H"), thought("d+e=h"),
               ANSWER, ANSWER], is_correct=torch.tensor([[True, True, False],
                                                         [False, True, False]]))
    assert languages.numbers(batch) == pytest.approx(
        {"accuracy": 0.5, "thinks": 4 / 6, "mixes": 1 / 4, "common": 3 / 5, "rarer": 2 / 5})
    assert languages.look(batch)["common"] == pytest.approx([2 / 6, 1 / 2])
    batch.texts = [ANSWER] * 6
    assert languages.numbers(batch)["mixes"] == languages.numbers(batch)["common"] == 0


# ---- what the sum of rewards does ------------------------------------------------------------

def test_the_mean_advantage_is_that_of_all_groups():
    chances = {0.0: 0.2, 1.0: 0.3, 2.0: 0.5}
    total = 0.0
    for others in itertools.product(chances, repeat=3):
        weight = torch.tensor([chances[reward] for reward in others]).double().prod()
        group = torch.tensor([[1.0, *others]]).double()
        total += (weight * grpo.advantages(group)[0, 0]).item()
    assert languages.mean_advantage(1.0, chances, G=4) == pytest.approx(total)


def test_right_answers_in_the_other_notation_are_pushed_down_when_enough_is_right():
    assert all(languages.pushed_down()) and len(languages.pushed_down()) == 72
    assert languages.in_the_other(0.75, 0.25) == pytest.approx(0, abs=1e-12)
    with_accuracy_alone = languages.mean_advantage(1.0, {0.0: 0.1, 1.0: 0.9})
    assert languages.in_the_other(0.9, 0.5) < 0 < with_accuracy_alone


# ---- the verdicts ----------------------------------------------------------------------------

FLAT = {"mixes": 0.01, "common": 0.96, "rarer": 0.96, "thinks": 0.9, "accuracy": 0.9,
        "pass@1": 0.8}
CLAIMS = ["mixes more than the base", "common stops", "common under 1%", "rarer stops",
          "rarer under 1%", "rarer later", "thinks", "alone - common", "alone - rarer",
          "either - common", "either - rarer", "common - rarer", "exact"]


def found_with(**changes):
    """What would be found if all runs of four seeds were as FLAT is, but for {run: {number: its
    value}}."""
    base = FLAT | {"kinds": {"common": [0.3, 0.8], "no thought": [0.7, 0.2]}}
    runs = {}
    for word in ("ALONE", "EITHER", "COMMON", "RARER"):
        told = FLAT | changes.get(word, {})
        run = {key: [value] * 10 for key, value in told.items()} | {"pass@1": told["pass@1"]}
        runs[getattr(languages, word)] = [run] * 4
    return {"base": base, "runs": runs}


def verdicts(**changes):
    """The claims that are decided, without the exact one, with their verdicts."""
    listed = languages.claims(found_with(**changes))
    found = {short: claim.verdict for short, claim in zip(CLAIMS, listed, strict=True)}
    assert found.pop("exact") == SHOWN
    return {short: verdict for short, verdict in found.items() if verdict != NOT_SHOWN}


@pytest.mark.parametrize("sign, verdict", [(1, SHOWN), (-1, CONTRADICTED)])
def test_each_claim_looks_at_the_runs_that_it_names(sign, verdict):
    other = {SHOWN: CONTRADICTED, CONTRADICTED: SHOWN}[verdict]
    more = {"mixes": 0.01 + 0.005 * sign}
    better = {"pass@1": 0.8 + 0.1 * sign}
    assert verdicts(ALONE=more) == dict.fromkeys([CLAIMS[0], CLAIMS[1], CLAIMS[3]], verdict)
    assert verdicts(COMMON=more) == dict.fromkeys(CLAIMS[1:3], other)
    assert verdicts(RARER=more) == dict.fromkeys(CLAIMS[3:5], other)
    assert verdicts(EITHER={"thinks": 0.9 + 0.1 * sign}) == {"thinks": verdict}
    assert verdicts(ALONE=better) == dict.fromkeys(CLAIMS[7:9], verdict)
    assert verdicts(EITHER=better) == dict.fromkeys(CLAIMS[9:11], verdict)
    assert verdicts(RARER=better) == dict.fromkeys([CLAIMS[8], *CLAIMS[10:12]], other)


def test_the_way_to_the_target_is_counted_in_steps_of_that_target():
    assert verdicts(RARER={"rarer": 0.9}) == {"rarer later": SHOWN}
    assert verdicts(COMMON={"common": 0.9}) == {"rarer later": CONTRADICTED}
    assert verdicts(COMMON={"rarer": 0.9}, RARER={"common": 0.9}) == {}


def test_the_page_can_be_made_of_what_is_found():
    found = found_with(RARER={"pass@1": 0.7})
    for heads, rows in languages.tables(found)[::2]:
        assert {len(row) for row in rows} == {len(heads)}
    assert [row[0] for row in languages.tables(found)[0][1]] == ["the base", *languages.TARGETS]
    assert languages.tables(found)[0][1][-1][-1] == entry.mean_and_spread([0.7])
