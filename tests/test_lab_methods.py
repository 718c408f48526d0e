"""lab/methods.py: when a run is there, what that took, and what the verdicts follow from."""
import pytest

from lab import methods
from lab.entry import CONTRADICTED, NOT_SHOWN, SHOWN

NEVER = float("inf")


def made_up(steps=10, held_out=0.2, seconds=2.0):
    """What would be found if all were alike and twice as good as the base from batch `steps` on."""
    accuracy = [0.1] * (steps - methods.WINDOW) + [0.2001] * 35
    run = {"accuracy": [accuracy] * 5, "step_time": [[seconds] * len(accuracy)] * 5,
           "pass@1": [held_out] * 5}
    return {"base": 0.05, "problems": 7, "runs": {name: dict(run) for name in methods.METHODS}}


def verdicts(found):
    return [claim.verdict for claim in methods.claims(found)]


def test_a_run_is_there_when_five_batches_in_a_row_have_the_level_on_average():
    assert methods.steps_needed([0, 0, 0.5, 0, 0.5, 0, 0.5, 0], 0.3) == 7
    assert methods.steps_needed([0.3] * 5, 0.3) == 5
    assert methods.steps_needed([1, 0, 0, 0, 0, 1], 0.3) is None
    assert methods.steps_needed([1] * 4, 0.3) is None, "there were no five batches"


def test_samples_and_seconds_are_those_of_all_steps_until_then():
    found = made_up(steps=12, seconds=3.0)
    assert methods.needed(found, "ppo.py", "samples") == [12 * 256] * 5
    assert methods.needed(found, "ppo.py", "seconds") == [36] * 5


def test_the_level_is_twice_what_the_first_batches_have():
    found = made_up()
    assert methods.level(found) == pytest.approx(0.2)
    first = found["runs"]["ppo.py"]["accuracy"]
    found["runs"]["ppo.py"]["accuracy"] = [[0.4, *accuracy[1:]] for accuracy in first]
    assert methods.level(found) == pytest.approx(0.3)           # one of six methods
    assert methods.needed(found, "grpo.py", "samples") == [NEVER] * 5


def test_the_median_can_be_told_where_some_never_got_there():
    assert methods.median_and_range([3, 1, NEVER, 2, 9]) == "3 (1 - never)"
    assert methods.median_and_range([NEVER, 1, NEVER]) == "never (1 - never)"


def test_no_claim_is_shown_where_all_are_alike():
    assert set(verdicts(made_up())) == {NOT_SHOWN}


def test_two_runs_that_never_got_there_do_not_differ():
    found = made_up()
    for run in found["runs"].values():
        run["accuracy"] = [[1.0] + [0.2] * 20] * 5
    assert methods.needed(found, "ppo.py", "seconds") == [NEVER] * 5
    assert set(verdicts(found)) == {NOT_SHOWN}


@pytest.mark.parametrize("number", range(len(methods.SLOWER)))
def test_a_claim_goes_by_the_two_methods_that_it_names(number):
    name, other, unit = methods.SLOWER[number]
    slow = made_up(steps=20)["runs"][name]
    found = made_up()
    found["runs"][name] = slow
    assert verdicts(found)[number] == SHOWN
    found = made_up()
    found["runs"][other] = slow
    assert verdicts(found)[number] == CONTRADICTED
    assert unit in methods.claims(found)[number].text


def test_seconds_are_compared_where_steps_are_alike():
    found = made_up()
    found["runs"]["ppo.py"] = made_up(seconds=4.0)["runs"]["ppo.py"]
    in_seconds = [unit == "seconds" for _, _, unit in methods.SLOWER]
    for claimed, verdict in zip(in_seconds, verdicts(found)):
        assert verdict == (SHOWN if claimed else NOT_SHOWN)


def test_the_ends_are_compared_with_those_of_grpo():
    found = made_up()
    found["runs"]["gspo.py"] = made_up(held_out=0.3)["runs"]["gspo.py"]
    assert verdicts(found)[len(methods.SLOWER):] == [NOT_SHOWN, NOT_SHOWN, NOT_SHOWN, SHOWN]


def test_tables_have_a_row_for_each_method():
    [(heads, rows)] = methods.tables(made_up())
    assert [row[0] for row in rows] == list(methods.METHODS)
    assert {len(row) for row in rows} == {len(heads)}
