
"""lab/comparisons.py: the same pairs for both, what a run takes, and what verdicts follow from."""
import resource

import pytest

import common
import ppo
from lab import comparisons
from lab.entry import CONTRADICTED, NOT_SHOWN, SHOWN
from tasks import preferences

TINY = ["--num_prompts", "6", "--hidden_size", "16", "--max_completion_length", "3"]


@pytest.fixture
def script():
    return ppo


@pytest.fixture
def batches(monkeypatch, talker):
    """The names of the batches that are sampled, from an untrained policy whose verifier likes
    completions of even length."""
    cfg = common.parse_flags(ppo.Config, TINY)
    task = common.load_task(cfg, lambda problem, text: float(len(text) % 2))
    policy = talker(cfg)
    monkeypatch.setattr(comparisons, "load_base", lambda *_: (cfg, task, policy))
    monkeypatch.setattr(preferences, "BATCHES", 3)
    monkeypatch.setattr(preferences, "MISTAKES", 0.5)
    names = []
    real = ppo.sample_batch

    def sample(policy, task, cfg, name):
        names.append(name)
        batch = real(policy, task, cfg, name)
        names.append(batch)
        return batch
    monkeypatch.setattr(ppo, "sample_batch", sample)
    return names


def test_the_pairs_are_those_that_the_reward_model_learns_from(batches):
    written, total = comparisons.compared_pairs(0)
    assert batches[::2] == ["preferences 0", "preferences 1", "preferences 2"]
    generator = common.generator(0, "mistakes")
    expected = []
    for batch in batches[1::2]:
        for chosen, rejected in zip(*preferences.pairs(batch, preferences.MISTAKES, generator)):
            expected.append({"prompt": batch.problems[chosen].prompt,
                             "chosen": batch.texts[chosen], "rejected": batch.texts[rejected]})
    assert total == len(expected) > len(written) > 0
    assert [pair for pair in expected if pair in written] == written


def test_a_run_is_weighed_alone(tmp_path):
    """256 MiB more in a run are 256 MiB more in what is found, whatever the run before it took. To
    the system the peak of a process begins with that of the one that started it: ours."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys\n"
        "folder = sys.argv[sys.argv.index('--output_dir') + 1]\n"
        "os.mkdir(folder)\n"
        "held = bytearray(int(sys.argv[1]) * 2**20)\n"
        "held[::4096] = b'x' * len(held[::4096])\n"
        "json.dump({'base': {'greedy': 0.1}, 'trained': {'pass@1': 0.5, 'problems': 9},\n"
        "           'seconds_total': 30, 'seconds_warm_start': 10},\n"
        "          open(folder + '/summary.json', 'w'))\n"
        "with open(folder + '/metrics.jsonl', 'w') as log:\n"
        "    for greedy in (None, 0.4, 0.3):\n"
        "        log.write(json.dumps({'eval/greedy': greedy}) + '\\n')\n")
    ours = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024                   # MiB
    much, little = [comparisons.weighed_run([script, size], tmp_path / f"run-{size}")
                    for size in (ours + 512, ours + 256)]
    assert much["MiB"] - little["MiB"] == pytest.approx(256, abs=16)
    assert (much["seconds"], much["pass@1"], much["problems"]) == (20, 0.5, 9)
    assert (much["greedy"], much["best greedy"]) == ([0.1, 0.4, 0.3], 0.4)


def test_a_run_that_fails_ends_the_experiment(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(3)\n")
    with pytest.raises(SystemExit, match="failed"):
        comparisons.weighed_run([script], tmp_path / "run")


def made_up(**changes):
    """What would be found if all were alike but for the changes of a method."""
    same = {"pass@1": 0.5, "greedy": [0.1, 0.5], "best greedy": 0.5, "seconds": 9, "MiB": 500,
            "problems": 7}
    runs = {name: [same | changes.get(name.partition(",")[0], {})] * 3
            for name in comparisons.METHODS}
    return {"runs": runs, "pairs": [[600, 601]] * 3}


def verdicts(found):
    return [claim.verdict for claim in comparisons.claims(found)]


def test_no_claim_is_shown_where_all_are_alike():
    assert verdicts(made_up()) == [NOT_SHOWN] * 6


@pytest.mark.parametrize("quantity, number", [
    ("pass@1", 0), ("best greedy", 1), ("seconds", 2), ("MiB", 3)])
def test_a_claim_about_dpo_goes_by_its_quantity(quantity, number):
    expected = [NOT_SHOWN] * 6
    expected[number] = SHOWN if number < 2 else CONTRADICTED
    expected[5] = SHOWN if quantity == "pass@1" else NOT_SHOWN
    assert verdicts(made_up(DPO={quantity: 1000})) == expected
    expected[number] = CONTRADICTED if number < 2 else SHOWN
    expected[5] = CONTRADICTED if quantity == "pass@1" else NOT_SHOWN
    assert verdicts(made_up(PPO={quantity: 1000})) == expected


def test_the_penalty_is_compared_with_ppo_without_it():
    found = made_up()
    found["runs"]["PPO"] = [run | {"pass@1": 0.4} for run in found["runs"]["PPO"]]
    assert verdicts(found)[4:] == [SHOWN, NOT_SHOWN]


def test_the_table_has_a_row_for_each_method_and_the_note_the_pairs():
    [(heads, rows)] = comparisons.tables(made_up())
    assert [row[0] for row in rows] == list(comparisons.METHODS)
    assert {len(row) for row in rows} == {len(heads)}
    assert "600 of 601" in comparisons.note(made_up())
