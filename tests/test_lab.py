"""The lab: verdicts, runs and pages, which all experiments share; that docs/lab.md tells what their
files hold; and that the scripts accept what the lab and the tables of runs ask of them."""
import functools
import importlib
import inspect
import json
import operator
import re
import sys
import types

import pytest
import torch
from conftest import ROOT
from small_runs import INSTANT, SMALL, arguments, at_work, changed_weights, load

import common
import grpo
from lab import entry, training
from tools import compare, passk, r1, rlhf, runs, tasks, zero

FILES = sorted(path.stem for path in ROOT.glob("lab/*.py") if not path.stem.startswith("_"))
PAGE = (ROOT / "docs/lab.md").read_text()
LAB = {name: importlib.import_module(f"lab.{name}") for name in entry.NAMES}
each_experiment = pytest.mark.parametrize("name", LAB)


def block(target, name):
    """What stands between the marks on the page."""
    found = re.search(f"<!-- made by make {target}: {name} -->\n(.*?)<!-- end of {name} -->", PAGE,
                      re.S)
    return found[1]


# ---- the gallery -----------------------------------------------------------------------------

def test_every_experiment_is_in_the_gallery():
    assert sorted([*entry.NAMES, "entry", "training"]) == FILES


@each_experiment
def test_the_page_and_its_verdicts_follow_from_the_experiment_and_its_file(name):
    found = entry.load(name)
    assert block(f"lab-{name}", f"lab-{name}") == entry.section(name, LAB[name], found)
    verdicts = {claim.verdict for claim in LAB[name].claims(found)}
    assert verdicts <= {entry.SHOWN, entry.NOT_SHOWN, entry.CONTRADICTED}
    for heads, rows in LAB[name].tables(found):
        assert {len(row) for row in rows} == {len(heads)}


def test_the_list_of_claims_is_that_of_the_experiments():
    assert block("lab", "index") == entry.index()


@each_experiment
def test_an_experiment_says_what_is_claimed_and_what_was_expected(name):
    told = LAB[name].__doc__
    order = [told.index(f"\n\n{word}. ") for word in ("Claim", "Prediction", "Method")]
    assert order == sorted(order)
    assert re.search(r"\d{4}\.\d{5}|\b(19|20)\d\d\b", told), "no source"


# ---- verdicts --------------------------------------------------------------------------------

@pytest.mark.parametrize("differences, verdict", [
    ([0.1, 0.2, 3], entry.SHOWN), ([-0.1, -2, -0.5], entry.CONTRADICTED),
    ([0.1, -0.1, 1], entry.NOT_SHOWN), ([0.1, 0, 1], entry.NOT_SHOWN),
    ([-0.1, 0, -1], entry.NOT_SHOWN)])
def test_a_claim_is_shown_if_all_seeds_agree(differences, verdict):
    assert entry.sign_test(differences) == verdict
    assert entry.compared("so", iter(differences)).verdict == verdict


def test_numbers_are_told_by_their_mean_and_from_which_to_which_they_go():
    assert entry.mean_and_spread([0.25, 0.5, 0.75]) == "0.500 (0.250 - 0.750)"
    assert entry.mean_and_spread(iter([2, 4]), ".0f") == "3 (2 - 4)"
    assert entry.mean_and_spread([0.5, 0.5]) == "0.500"


def test_steps_are_counted_until_the_level_is_held_for_two_or_as_half_as_many_again():
    assert entry.steps_to_level([0.3, 0.8, 0.5, 0.7, 0.7, 0.9], 0.7) == 4
    assert entry.steps_to_level([0.3, 0.3, 0.4, 0.5], 0.7) == 6
    assert entry.steps_to_level([0.9, 0.9, 0.1], 0.9) == 1


# ---- the page --------------------------------------------------------------------------------

@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """The module of an experiment that measures nothing, and a docs/ with only what it needs."""
    module = types.ModuleType("made_up", "Made up: nothing.\n\nClaim. It is so (2402.03300).\n\n"
                              "Prediction. It is\nnot. Claim. Method.\n\nMethod. None.")
    module.__file__ = "lab/made_up.py"
    module.SEEDS = [3, 4]
    module.measure = lambda seeds: {"values": [2 * seed for seed in seeds]}
    module.tables = lambda found: [(["a", "b"], [found["values"]])]
    module.claims = lambda found: [entry.Claim("so", "6, 8", entry.SHOWN),
                                   entry.Claim("not so", "7", entry.CONTRADICTED)]
    module.note = lambda found: "Problems: 7"
    module.panels = lambda found: [lambda axis: axis.plot(found["values"])]
    (tmp_path / "docs/lab").mkdir(parents=True)
    (tmp_path / "README.md").write_text("")
    marks = ""
    for target, name in (("lab", "index"), ("lab-made_up", "lab-made_up")):
        marks += f"<!-- made by make {target}: {name} -->\n<!-- end of {name} -->\n"
    (tmp_path / "docs/lab.md").write_text(marks)
    for where in (runs, entry):
        monkeypatch.setattr(where, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setattr(entry, "NAMES", ["made_up"])
    monkeypatch.setitem(sys.modules, "lab.made_up", module)
    return module


def test_a_section_is_told_in_order(made_up):
    found = {"seeds": [3, 4], "seconds": 17, "machine": "this", "values": [6, 8]}
    assert entry.section("made_up", made_up, found) == """\
### Made up: nothing

**Claim.** It is so (2402.03300).

**Prediction.** It is
not. Claim. Method.

**Method.** None.

`make lab-made_up`

![Made up: nothing](lab/made_up.png)

| a | b |
| --- | --- |
| 6 | 8 |

| claim | seen | verdict |
| --- | --- | --- |
| so | 6, 8 | **shown** |
| not so | 7 | **contradicted** |

Problems: 7; seeds 3, 4; 17 s; this.
"""


def test_the_command_measures_and_writes_file_picture_and_page_and_draws_again(made_up):
    entry.command(made_up, ["--seeds", "1", "2"])
    found = json.loads((entry.DOCS / "lab/made_up.json").read_text())
    assert (found["seeds"], found["values"], found["seconds"]) == ([1, 2], [2, 4], 0)
    page = (entry.DOCS / "lab.md").read_text()
    assert entry.section("made_up", made_up, found) in page
    assert "| [made_up](#made-up-nothing) | Made up: nothing | 1 |  | 1 |\n" in page
    assert "- [made_up](#made-up-nothing): not so\n" in page
    made_up.measure = None                              # which is not called any more
    made_up.note = lambda found: "Problems: 8"
    (entry.DOCS / "lab/made_up.png").unlink()
    entry.command(made_up, ["--draw"])
    assert (entry.DOCS / "lab/made_up.png").is_file()
    assert "Problems: 8; seeds 1, 2;" in (entry.DOCS / "lab.md").read_text()


# ---- runs ------------------------------------------------------------------------------------

def test_runs_are_those_of_the_variants_and_seeds(monkeypatch):
    """Faked but for what becomes of their results: a run of each variant with each seed."""
    made = []

    def run(script, folder, *flags, quiet):
        made.append((script, *flags))
        return {"script": script, "seed": flags[1]}

    monkeypatch.setattr(runs, "run", run)
    monkeypatch.setattr(runs, "make_base", lambda variant: None)
    monkeypatch.setattr(runs, "curve", lambda folder, metric: [0.1234567, None, 2.0])
    variants = {"a": ["grpo.py"], "b c": ["gspo.py", "--beta", 1]}
    found = runs.run_all(variants, [5, 6], ["reward", "kl"], at_once=1)
    assert made == [("grpo.py", "--seed", 5), ("grpo.py", "--seed", 6),
                    ("gspo.py", "--seed", 5, "--beta", 1), ("gspo.py", "--seed", 6, "--beta", 1)]
    assert found["b c"][1] == {"summary": {"script": "gspo.py", "seed": 6},
                               "reward": [0.12346, None, 2.0], "kl": [0.12346, None, 2.0]}
    [[result]] = runs.run_all({"a b": ["grpo.py"]}, [7], [], seeded=("--seed", "--base_seed"),
                              look=lambda name, folder: {"at": [name, folder.name]}).values()
    assert made[-1] == ("grpo.py", "--seed", 7, "--base_seed", 7)
    assert result["at"] == ["a b", "a-b-s7"]


def test_the_seconds_of_a_step_are_those_of_a_short_run_but_for_its_first(monkeypatch):
    def run_all(variants, seeds, metrics, at_once):
        assert (variants, seeds) == ({"a": ["ppo.py", "--max_steps", 50, "--max_steps", 5]}, [7])
        assert (metrics, at_once) == (["step_time"], 1)
        return {"a": [{"step_time": [9.0, 1.0, 2.0, 4.0]}]}
    monkeypatch.setattr(entry, "run_all", run_all)
    assert entry.seconds_a_step({"a": ["ppo.py", "--max_steps", 50]}, 7) == {"a": 2.0}


def test_of_the_flags_of_a_run_the_base_has_those_that_shape_it():
    flags = ["--online", "--task", "arithmetic:3-7", "--curriculum", "--seed", 3, "--base_seed", 2,
             "--hidden_size", 32, "--learning_rate", 1]
    assert runs.base_flags(flags) == [
        "--task", "arithmetic:3-7", "--base_seed", 2, "--hidden_size", 32]


def test_the_base_that_is_loaded_is_the_one_that_a_run_begins_with(tmp_path, monkeypatch):
    def run(script, folder, *flags, quiet):             # in this process, which is quicker
        grpo.main([*map(str, flags), "--output_dir", str(folder)])

    monkeypatch.setattr(runs, "run", run)
    monkeypatch.chdir(tmp_path)
    small = {name: value for name, value in INSTANT.items() if name != "max_steps"}
    cfg, task, policy = entry.load_base(grpo, *arguments(small))
    grpo.main([*arguments(INSTANT), "--output_dir", "run"])
    begun = load("run/base.pt")["policy"]
    assert changed_weights(policy.state_dict(), begun) == []
    assert (cfg.num_prompts, task.name) == (2, "arithmetic")


def test_training_is_the_loop_of_the_script(tmp_path):
    flags = SMALL | {"task": "arithmetic:2-3", "num_prompts": 16, "max_steps": 3,
                     "curriculum": True, "dynamic_sampling": 2, "num_eval_problems": 1}
    with at_work(tmp_path):
        grpo.main(arguments(flags | {"output_dir": "run"}))
    cfg = common.parse_flags(grpo.Config, arguments(flags))
    task = common.load_task(cfg, grpo.verify)
    policy = grpo.GPT(cfg)
    base = load(tmp_path / "run/base.pt")["policy"]
    policy.load_state_dict(base)
    for _ in zip(range(3), training.training(grpo, cfg, task, policy)):
        pass
    after = load(tmp_path / "run/checkpoint.pt")
    assert changed_weights(policy.state_dict(), after["policy"]) == []
    assert changed_weights(base, after["policy"]), "nothing was learned"
    assert task.state == after["task"]


def test_jobs_side_by_side_do_not_see_what_others_do_to_a_tensor():
    tensor = torch.zeros(2)
    found = training.side_by_side(operator.iadd, [(tensor, 1), (tensor, 1)])
    assert [values.tolist() for values in found] == [[1, 1]] * 2
    assert tensor.tolist() == [0, 0]


# ---- what is asked of the scripts ------------------------------------------------------------

def commands():
    """The scripts and flags of all experiments, and of the tables of runs. Yields lists"""
    for task_flags in LAB["exploration"].TASKS.values():
        for flags in LAB["exploration"].SETTINGS.values():
            yield ["grpo.py", *flags, *task_flags, *LAB["exploration"].ALWAYS]
    for table in (LAB["reuse"].variants(), LAB["staleness"].variants(), LAB["kl"].variants(),
                  LAB["trust"].VARIANTS, *LAB["critic"].VARIANTS.values(), LAB["methods"].METHODS,
                  LAB["dpo"].LEARNING, LAB["comparisons"].METHODS, LAB["seeds"].VARIANTS):
        yield from table.values()
    yield ["dpo.py", *LAB["dpo"].PAIRS]
    for flags in LAB["dpo"].LOSSES.values():
        yield [*LAB["dpo"].FIXED, *flags]
    for flags in LAB["sharpen"].TASKS.values():
        yield ["grpo.py", *flags, *LAB["sharpen"].SAME, *LAB["sharpen"].MANY]
    for flags in LAB["tools"].RUNS.values():
        yield ["grpo.py", *LAB["tools"].FLAGS, *flags]
    for flags in LAB["zero"].VARIANTS.values():
        yield ["grpo.py", *flags, *LAB["zero"].SAME]
    yield from (LAB["tools"].PPO, ["grpo.py", *LAB["bugs"].FLAGS])
    for table in (compare.RUNS, r1.STAGES, rlhf.RUNS):
        yield from table.values()
    for task, table in tasks.RUNS.items():
        yield from ([*words, "--task", task] for words in table.values())
    yield from (["grpo.py", *table.FLAGS] for table in (passk, zero))


def test_the_scripts_accept_what_experiments_and_tables_ask_for(monkeypatch):
    monkeypatch.setattr(inspect, "getsource", functools.cache(inspect.getsource))   # it is slow
    for script, *flags in commands():
        module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
        cfg = common.parse_flags(module.Config, [str(flag) for flag in flags])
        common.load_task(cfg, grpo.verify)
