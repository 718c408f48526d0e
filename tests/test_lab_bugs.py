"""lab/bugs.py: its mistakes can be made, each has a test that is there, and what it calls seen."""
import importlib.util
import itertools
import re

import pytest
import torch
from conftest import ROOT, f64

import grpo
from lab import bugs, entry

SOURCE = (ROOT / "grpo.py").read_text()
NAMES = [mistake.name for mistake in bugs.MISTAKES]


def load(name, folder):
    """grpo.py with a mistake, as a module."""
    path = bugs.plant(bugs.MISTAKES[NAMES.index(name)], folder / "copy")
    spec = importlib.util.spec_from_file_location("grpo_with_a_mistake", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, spec.name, module)      # dataclasses look there
        spec.loader.exec_module(module)
    return module


# ---- the mistakes ----------------------------------------------------------------------------

def test_there_are_ten_different_mistakes():
    assert len(set(NAMES)) == 10
    assert len({mistake.new for mistake in bugs.MISTAKES}) == 10


@pytest.mark.parametrize("mistake", bugs.MISTAKES, ids=NAMES)
def test_a_mistake_changes_one_place_of_grpo_and_nothing_else(mistake, tmp_path):
    assert SOURCE.count(mistake.old) == 1
    path = bugs.plant(mistake, tmp_path / "copy")
    text = path.read_text()
    compile(text, path, "exec")
    before, after = SOURCE.splitlines(), text.splitlines()
    assert len(before) == len(after)
    assert sum(one != other for one, other in zip(before, after)) == 1
    assert (path.parent / "common.py").read_text() == (ROOT / "common.py").read_text()
    assert (ROOT / "grpo.py").read_text() == SOURCE


def test_a_text_that_is_not_there_once_is_refused(tmp_path):
    for old in ("no such text", "import"):
        with pytest.raises(AssertionError):
            bugs.plant(bugs.MISTAKES[0]._replace(old=old), tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mistake", bugs.MISTAKES, ids=NAMES)
def test_the_test_that_is_named_with_a_mistake_exists(mistake):
    file, test = mistake.test.split("::")
    assert re.search(rf"^def {test}\(", (ROOT / "tests" / file).read_text(), re.M)


def test_the_flags_of_the_runs_are_accepted(tmp_path):
    words = [str(word) for word in bugs.FLAGS]
    cfg = grpo.common.parse_flags(grpo.Config, [*words, "--init_from", str(tmp_path)])
    assert cfg.beta > 0                         # else the mistakes of the KL do nothing
    assert cfg.num_iterations > 1               # else the ratio is 1
    assert cfg.num_prompts * cfg.num_generations > cfg.num_mini_batches * cfg.micro_batch_size
    assert bugs.METRICS["clip"] == grpo.CLIP_METRICS[grpo.LOSS_TYPES[cfg.loss_type][0]]


# ---- what some of them do, exactly -----------------------------------------------------------

def test_the_neighbours_advantage_has_on_average_the_other_sign():
    """For all orders of groups of equal members: E[A_i A_i-1] = -E[A_i^2] / (G - 1)."""
    rewards = f64(list(itertools.product([0, 1], repeat=4)))
    A = grpo.advantages(rewards, "none")
    inside = (A[:, 1:] * A[:, :-1]).mean()
    assert inside.item() == pytest.approx(-A.square().mean().item() / 3)


def test_old_log_probs_with_a_gradient_teach_nothing(tmp_path):
    logps = f64([[-0.5, -1.0], [-2.0, -0.1]]).requires_grad_()
    arguments = (logps, f64([[-0.4, -1.1], [-2, -0.3]]), f64([1, -2]), torch.ones(2, 2).double())
    for script, learns in ((grpo, True), (load("old not detached", tmp_path), False)):
        [gradient] = torch.autograd.grad(script.policy_loss(*arguments).sum(), logps)
        assert gradient.any() == learns


def test_k3_upside_down_is_larger_where_the_policy_is_the_more_certain(tmp_path):
    p, q = f64([0.9, 0.1]), f64([0.5, 0.5])
    right, wrong = [(p * script.kl(p.log(), q.log(), "k3")).sum()
                    for script in (grpo, load("k3 upside down", tmp_path))]
    exact = (p * (p / q).log()).sum()
    assert right.item() == pytest.approx(exact.item())
    assert wrong.item() == pytest.approx(((p * p / q).sum() - 1 - exact).item())    # chi2 - KL


# ---- what counts as seen ---------------------------------------------------------------------

@pytest.mark.parametrize("values, found", [
    ([3.1, 4.0, 9.0], "high"), ([3.0, 4.0, 5.0], ""), ([3.1, 2.9, 9.0], ""),
    ([-0.1, -1.0, -2.0], "low"), ([0.0, -1.0, -1.0], ""), ([-5.0, 1.5, 9.0], ""), ([-1, 4, 5], "")])
def test_values_are_beside_a_span_if_all_are_further_off_than_it_is_wide(values, found):
    assert bugs.side(values, [1.0, 2.0, 1.5]) == found


def test_against_equal_values_any_difference_counts():
    assert bugs.side([0.0, 0.0], [0.1, 0.1]) == "low"
    assert bugs.side([0.1, 0.1], [0.1, 0.1]) == ""


def found_with(changes):
    """What would be found if a mistake had these {(window, word): values}, all else being right.
    changes: {name: {(window, word): values}}"""
    found = {"reward": {}, "kl": {}}
    for window, reward in zip(bugs.WINDOWS, (0.3, 0.8)):
        found[window] = {}
        for name in [bugs.RIGHT, *NAMES, bugs.CONTROL]:
            right = {word: [0.5, 0.51, 0.52] for word in bugs.METRICS}
            right["reward"] = [reward, reward + 0.01, reward + 0.02]
            found[window][name] = right
    for name, change in changes.items():
        for (window, word), values in change.items():
            found[window][name][word] = values
    for name in [bugs.RIGHT, *NAMES, bugs.CONTROL]:
        found["reward"][name] = [0.3, 0.8]
        found["kl"][name] = [0.0, 0.1]
    return found


FIRST, LAST = bugs.WINDOWS


def verdicts(changes):
    return [claim.verdict for claim in bugs.claims(found_with(changes))]


def test_a_mistake_is_told_by_each_metric_and_window_that_is_off():
    changes = {"KL twice": {(FIRST, "KL"): [0, 0, 0], (LAST, "KL"): [0.1, 0.2, 0.3],
                            (LAST, "entropy"): [0.6, 0.7, 0.8], (LAST, "clip"): [0.9, 0.9, 0.5]}}
    found = found_with(changes)
    assert bugs.signs(found, "KL twice") == [
        ("KL", "low", FIRST), ("entropy", "high", LAST), ("KL", "low", LAST)]
    assert bugs.telling(found, "KL twice") == ["KL", "entropy"]
    assert bugs.signs(found, "means of means") == []


def test_a_run_learns_if_its_reward_rises_with_every_seed():
    found = found_with({"KL twice": {(LAST, "reward"): [0.4, 0.4, 0.3]},
                        "cold sampler": {(LAST, "reward"): [0.4, 0.4, 0.4]}})
    assert not bugs.learns(found, "KL twice")           # the third began at 0.32
    assert bugs.learns(found, "cold sampler")
    assert bugs.learns(found, bugs.RIGHT)


def test_without_any_sign_the_mistakes_are_silent():
    assert verdicts({}) == [entry.SHOWN] * 3


def test_mistakes_that_the_reward_tells_of_are_not_silent():
    no_reward = {(LAST, "reward"): [0.1, 0.1, 0.1]}
    assert verdicts(dict.fromkeys(NAMES, no_reward)) == [entry.NOT_SHOWN] * 3
    assert verdicts(dict.fromkeys(NAMES[:5], no_reward)) == [
        entry.NOT_SHOWN, entry.NOT_SHOWN, entry.SHOWN]
    assert verdicts(dict.fromkeys(NAMES[:4], no_reward)) == [entry.SHOWN] * 3


def test_another_metric_sees_what_the_reward_does_not():
    no_kl = {(FIRST, "KL"): [0, 0, 0]}
    assert verdicts(dict.fromkeys(NAMES, no_kl)) == [entry.SHOWN, entry.SHOWN, entry.NOT_SHOWN]


def test_the_tables_lead_from_what_is_seen_to_the_mistakes():
    found = found_with({"KL twice": {(LAST, "KL"): [0, 0, 0]},
                        "cold sampler": {(LAST, "KL"): [0.1, 0, 0], (FIRST, "signal"): [1, 1, 1]}})
    (_, looks), (heads, numbers), (_, known) = bugs.tables(found)
    assert looks == [["signal too high", FIRST, "cold sampler"],
                     ["KL too low", LAST, "cold sampler, KL twice"]]
    [row] = [row for row in numbers if row[0] == "KL twice"]
    assert len(heads) == len(row)
    assert row[heads.index("KL")] == "**0.000**"
    assert row[heads.index("signal")] == "0.510"
    assert numbers[0][heads.index("KL")] == "0.510 (0.500 - 0.520)"     # the right runs
    assert [row[2] for row in known if row[0] in ("cold sampler", "prompts tiled")] == [
        "nothing", "signal, KL"]


def test_what_right_runs_look_like_too_is_told_as_such():
    found = found_with({name: {(LAST, "KL"): [0, 0, 0]} for name in ("KL twice", bugs.CONTROL)})
    (_, looks), _, _ = bugs.tables(found)
    assert looks == [["KL too low", LAST, f"KL twice, {bugs.CONTROL}"]]


def test_the_note_counts_false_alarms():
    found = found_with({bugs.CONTROL: {(LAST, "KL"): [0, 0, 0], (LAST, "clip"): [1, 1, 1]}})
    assert "seeds: 2 of 16 numbers" in bugs.note(found)


# ---- what is measured ------------------------------------------------------------------------

def test_means_are_of_the_first_and_the_last_steps_of_each_seed(monkeypatch):
    asked = []

    def run_all(variants, seeds, metrics):
        asked.append((list(variants), seeds))
        result = {metric: [float(step) for step in range(bugs.STEPS)] for metric in metrics}
        return {name: [result for _ in seeds] for name in variants}

    monkeypatch.setattr(bugs, "run", lambda *_, **__: None)
    monkeypatch.setattr(bugs, "run_all", run_all)
    found = bugs.measure([0, 1, 2])
    assert asked == [([bugs.RIGHT, *NAMES], [0, 1, 2]), ([bugs.CONTROL], [100, 101, 102])]
    assert found[FIRST]["KL twice"]["entropy"] == [2.0] * 3
    assert found[LAST][bugs.CONTROL]["KL"] == [bugs.STEPS - 3.0] * 3
    assert found["kl"]["cold sampler"] == [float(step) for step in range(bugs.STEPS)]
