"""Measuring: results are kept whatever ends a measurement, and the search for the best learning
rate."""
import json
import os
import signal

import pytest
from small_runs import child

import measuring

JOBS = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def collect(path, perform):
    store = measuring.Store(path, {"seconds": 0, "commit": "mine"})
    measuring.collect(store, lambda _: JOBS, perform)
    return store


def test_a_measurement_that_is_killed_continues_with_the_job_that_was_running(tmp_path):
    path = tmp_path / "runs/store.json"

    def killed(case, seed):
        if (case, seed) == ("b", 0):
            os.kill(os.getpid(), signal.SIGKILL)
        return {"x": [seed, 0.5]}
    assert child(lambda: collect(path, killed)) == -signal.SIGKILL
    measured = []
    store = collect(path, lambda case, seed: measured.append((case, seed)) or {"x": [seed]})
    assert measured == [("b", 0), ("b", 1)] and [*store.results] == JOBS
    assert store.results["a", 1] == {"x": [1, 0.5]} and store.results["b", 1] == {"x": [1]}
    store.move(tmp_path / "docs.json")
    assert not path.exists()
    content = json.loads((tmp_path / "docs.json").read_text())
    assert measuring.results_of(content) == store.results


@pytest.mark.parametrize("begin, scores, tried, best", [
    ((0.5, 1), {0.5: 1, 1: 2, 2: 0}, [0.5, 1, 2], 1),
    ((0.5, 1), {0.5: 2, 1: 1, 0.25: 3, 0.125: 0}, [0.125, 0.25, 0.5, 1], 0.25),
    ((0.5, 1), {0.5: 2, 1: 1}, [0.25, 0.5, 1], None),
    ((0.5, 1), {}, [0.5, 1], None),
    ((0.5, 1, 2), {0.5: 0, 1: 0, 2: 0}, [0.5, 1, 2], 1),                # the nearest to the start
    ((0.5, 1, 2), {2.0 ** i: i for i in range(-1, 9)}, [2.0 ** i for i in range(-1, 6)], 32),
    ((0.5, 1), {2.0 ** i: -i for i in range(-9, 1)}, [2.0 ** i for i in range(-5, 1)], 1 / 32)])
def test_a_search_ends_with_a_best_rate_between_two_others_or_32_times_as_far(
        begin, scores, tried, best):
    assert measuring.search(1, begin, scores.get) == (tried, best)
