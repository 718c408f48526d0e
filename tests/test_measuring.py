"""Measuring: results are kept whatever ends a measurement, the search for the best learning rate,
and runs in this process."""
import json
import os
import signal

import pytest
from small_runs import INSTANT, arguments, child

import grpo
import measuring
from report.logs import read_summary

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


def test_results_of_another_measurement_are_neither_continued_nor_lost(tmp_path, stops):
    path = tmp_path / "store.json"
    measuring.Store(path, {"seconds": 0, "commit": "theirs"}).add("a", 0, {"x": 1})
    before = path.read_text()
    stops(f"{path}: was measured with other commit; move it away", collect, path, None)
    assert path.read_text() == before


def test_two_processes_may_share_a_file(tmp_path):
    stores = [measuring.Store(tmp_path / "store.json", {}) for _ in range(2)]
    stores[0].add("a", 0, {"x": 1})
    stores[1].add("a", 1, {"x": 2})
    assert measuring.Store(tmp_path / "store.json", {}).results == {
        ("a", 0): {"x": 1}, ("a", 1): {"x": 2}}


def test_a_store_has_a_line_for_each_job_and_its_time_is_counted(tmp_path, monkeypatch):
    seconds = iter([100.0, 107.0, 200.0, 205.0])
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: next(seconds))
    path = tmp_path / "store.json"
    for seed in range(2):                                       # in two sittings, 7 and 5 seconds
        store = measuring.Store(path, {"seconds": 0})
        store.add("a", seed, {"x": [seed, "}, ]], "]})
    assert store.about == {"seconds": 12}
    assert json.loads(path.read_text()) == store.content()
    assert path.read_text().splitlines()[1:] == [
        '"jobs": [["a", 0, {"x": [0, "}, ]], "]}],', '["a", 1, {"x": [1, "}, ]], "]}]]}']


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


def test_a_run_in_this_process_prints_nothing_and_has_a_folder_for_itself(tmp_path, capsys):
    found = measuring.run(grpo.main, arguments(INSTANT), lambda folder: (
        folder, read_summary(folder)["trained"]["greedy"]))
    assert not os.path.exists(found[0]) and 0 <= found[1] <= 1
    own = f"{tmp_path}/own"
    flags = arguments(INSTANT | {"output_dir": own})
    assert measuring.run(grpo.main, flags, lambda folder: folder, own) == own
    assert os.path.exists(own) and capsys.readouterr().out == ""
