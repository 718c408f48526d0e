"""The lab: what its experiments share, and that docs/lab.md tells what their files hold."""
import importlib
import json
import operator
import re
import types

import matplotlib.image
import pytest
import torch
from conftest import ROOT
from small_runs import INSTANT, arguments

import grpo
from lab import entry, reuse, seeds, training
from tools import runs

FILES = sorted(path.stem for path in ROOT.glob("lab/*.py") if not path.stem.startswith("_"))
PAGE = (ROOT / "docs/lab.md").read_text()


def experiment(name):
    return importlib.import_module(f"lab.{name}")


def block(target, name):
    """What stands between the marks on the page."""
    found = re.search(f"<!-- made by make {target}: {name} -->\n(.*?)<!-- end of {name} -->", PAGE,
                      re.S)
    return found[1]


# ---- the gallery -----------------------------------------------------------------------------

def test_every_experiment_is_in_the_gallery():
    assert sorted([*entry.NAMES, "entry", "training"]) == FILES


@pytest.mark.parametrize("name", entry.NAMES)
def test_the_page_tells_what_the_experiment_and_its_file_say(name):
    assert block(f"lab-{name}", f"lab-{name}") == entry.section(
        name, experiment(name), entry.load(name))


def test_the_list_of_claims_is_that_of_the_experiments():
    assert block("lab", "index") == entry.index()


@pytest.mark.parametrize("name", entry.NAMES)
def test_an_experiment_says_what_is_claimed_and_what_was_expected(name):
    told = experiment(name).__doc__
    order = [told.index(f"\n\n{word}. ") for word in ("Claim", "Prediction", "Method")]
    assert order == sorted(order)
    assert re.search(r"\d{4}\.\d{5}|\b(19|20)\d\d\b", told), "no source"
    assert len(experiment(name).SEEDS) in (1, 3, 4, 5, 10)


@pytest.mark.parametrize("name", entry.NAMES)
def test_the_picture_is_as_wide_as_its_panels(name):
    picture = matplotlib.image.imread(ROOT / f"docs/lab/{name}.png")
    panels = experiment(name).panels(entry.load(name))
    assert abs(picture.shape[1] - 4.2 * 110 * len(panels)) <= len(panels)


@pytest.mark.parametrize("name", entry.NAMES)
def test_verdicts_are_one_of_three(name):
    verdicts = {claim.verdict for claim in experiment(name).claims(entry.load(name))}
    assert verdicts <= {entry.SHOWN, entry.NOT_SHOWN, entry.CONTRADICTED}


# ---- what experiments share ------------------------------------------------------------------

@pytest.mark.parametrize("differences, verdict", [
    ([0.1, 0.2, 3], entry.SHOWN), ([-0.1, -2, -0.5], entry.CONTRADICTED),
    ([0.1, -0.1, 1], entry.NOT_SHOWN), ([0.1, 0, 1], entry.NOT_SHOWN),
    ([-0.1, 0, -1], entry.NOT_SHOWN)])
def test_a_claim_is_shown_if_all_seeds_agree(differences, verdict):
    assert entry.sign_test(differences) == verdict


def test_numbers_are_told_by_their_mean_and_from_which_to_which_they_go():
    assert entry.mean_and_spread([0.25, 0.5, 0.75]) == "0.500 (0.250 - 0.750)"
    assert entry.mean_and_spread(iter([2, 4]), ".0f") == "3 (2 - 4)"
    assert entry.mean_and_spread([0.5, 0.5]) == "0.500"


@pytest.fixture
def made_up():
    """The module of an experiment that measures nothing."""
    module = types.ModuleType("made_up", "Made up: nothing.\n\nClaim. It is so (2402.03300).\n\n"
                              "Prediction. It is\nnot. Claim. Method.\n\nMethod. None.")
    module.__file__ = "lab/made_up.py"
    module.SEEDS = [3, 4]
    module.measure = lambda seeds: {"values": [2 * seed for seed in seeds]}
    module.tables = lambda found: [(["a", "b"], [found["values"]])]
    module.claims = lambda found: [entry.Claim("so", "6, 8", entry.SHOWN)]
    module.note = lambda found: "Problems: 7"
    module.panels = lambda found: [lambda axis: axis.plot(found["values"])]
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

Problems: 7; seeds 3, 4; 17 s; this.
"""


@pytest.fixture
def empty_docs(tmp_path, monkeypatch, made_up):
    """Of docs/ and README.md only what `made_up` needs."""
    (tmp_path / "docs/lab").mkdir(parents=True)
    (tmp_path / "README.md").write_text("")
    marks = ""
    for target, name in (("lab", "index"), ("lab-made_up", "lab-made_up")):
        marks += f"<!-- made by make {target}: {name} -->\n<!-- end of {name} -->\n"
    (tmp_path / "docs/lab.md").write_text(marks)
    for module in (runs, entry):
        monkeypatch.setattr(module, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setattr(entry, "NAMES", ["made_up"])
    monkeypatch.setitem(__import__("sys").modules, "lab.made_up", made_up)
    return tmp_path / "docs"


def test_the_command_measures_and_writes_the_file_the_picture_and_the_page(empty_docs, made_up):
    entry.command(made_up, ["--seeds", "1", "2"])
    found = json.loads((empty_docs / "lab/made_up.json").read_text())
    assert found["seeds"] == [1, 2]
    assert found["values"] == [2, 4]
    assert found["seconds"] == 0
    assert (empty_docs / "lab/made_up.png").is_file()
    page = (empty_docs / "lab.md").read_text()
    assert entry.section("made_up", made_up, found) in page
    assert "| [made_up](#made-up-nothing) | Made up: nothing | 1 |  |  |\n" in page


def test_what_is_contradicted_is_listed(empty_docs, made_up):
    made_up.claims = lambda found: [entry.Claim("so", "6", entry.NOT_SHOWN),
                                    entry.Claim("not so", "7", entry.CONTRADICTED)]
    entry.command(made_up, [])
    page = (empty_docs / "lab.md").read_text()
    assert "| Made up: nothing |  | 1 | 1 |\n" in page
    assert page.count("- [made_up](#made-up-nothing): ") == 1
    assert "- [made_up](#made-up-nothing): not so\n" in page


def test_drawing_again_measures_nothing(empty_docs, made_up):
    entry.command(made_up, [])
    (empty_docs / "lab/made_up.png").unlink()
    made_up.measure = None
    made_up.note = lambda found: "Problems: 8"
    entry.command(made_up, ["--draw"])
    assert (empty_docs / "lab/made_up.png").is_file()
    assert "Problems: 8; seeds 3, 4;" in (empty_docs / "lab.md").read_text()


def test_runs_are_those_of_the_variants_and_seeds(monkeypatch):
    """Faked but for what becomes of their results: a run of each variant with each seed."""
    made = []

    def run(script, folder, *flags, quiet):
        made.append((script, *flags))
        return {"script": script, "seed": flags[1]}

    monkeypatch.setattr(entry, "run", run)
    monkeypatch.setattr(entry, "make_base", lambda variant: None)
    monkeypatch.setattr(entry, "curve", lambda folder, metric: [0.1234567, None, 2.0])
    variants = {"a": ["grpo.py"], "b c": ["gspo.py", "--beta", 1]}
    found = entry.run_all(variants, [5, 6], ["reward", "kl"], at_once=1)
    assert made == [("grpo.py", "--seed", 5), ("grpo.py", "--seed", 6),
                    ("gspo.py", "--seed", 5, "--beta", 1), ("gspo.py", "--seed", 6, "--beta", 1)]
    assert found["b c"][1] == {"summary": {"script": "gspo.py", "seed": 6},
                               "reward": [0.12346, None, 2.0], "kl": [0.12346, None, 2.0]}
    assert [len(results) for results in found.values()] == [2, 2]


def test_the_seconds_of_a_step_are_those_of_a_short_run_but_for_its_first(monkeypatch):
    def run_all(variants, seeds, metrics, at_once):
        assert (variants, seeds) == ({"a": ["ppo.py", "--max_steps", 50, "--max_steps", 5]}, [7])
        assert (metrics, at_once) == (["step_time"], 1)
        return {"a": [{"step_time": [9.0, 1.0, 2.0, 4.0]}]}
    monkeypatch.setattr(entry, "run_all", run_all)
    assert entry.seconds_a_step({"a": ["ppo.py", "--max_steps", 50]}, 7) == {"a": 2.0}


def test_of_the_flags_of_a_run_the_base_has_those_that_shape_it():
    flags = ["--num_iterations", 4, "--task", "arithmetic", "--operands", "3-7", "--seed", 3,
             "--base_seed", 2, "--hidden_size", 32, "--learning_rate", 1]
    assert entry.base_flags(flags) == [
        "--task", "arithmetic", "--operands", "3-7", "--base_seed", 2, "--hidden_size", 32]


def test_the_base_that_is_loaded_is_the_one_that_a_run_begins_with(tmp_path, monkeypatch):
    small = {name: value for name, value in INSTANT.items() if name != "max_steps"}
    monkeypatch.chdir(tmp_path)
    cfg, task, policy = entry.load_base(grpo, *arguments(small))
    grpo.main([*arguments(INSTANT), "--output_dir", "run"])
    begun = torch.load("run/base.pt", weights_only=True)
    assert all((policy.state_dict()[name] == begun[name]).all() for name in begun)
    assert (cfg.num_prompts, task.name) == (2, "arithmetic")


def test_jobs_side_by_side_do_not_see_what_others_do_to_a_tensor():
    tensor = torch.zeros(2)
    found = training.side_by_side(operator.iadd, [(tensor, 1), (tensor, 1), (tensor, 1)])
    assert [values.tolist() for values in found] == [[1, 1]] * 3
    assert tensor.tolist() == [0, 0]


# ---- seeds and reuse -------------------------------------------------------------------------

def test_each_way_to_split_seeds_into_halves_counts_once():
    assert seeds.half_differences([0, 1, 3, 6]) == [4, 2, 1]        # 01|36, 03|16, 06|13


def test_one_seed_ranks_otherwise_as_often_as_its_pairs_do():
    assert seeds.wrong_ranks([1, 4], [2, 1.5], 1) == 0.5            # 1 < 2, 1 < 1.5
    assert seeds.wrong_ranks([1, 4], [2, 1.5], 2) == 0


def test_samples_are_counted_to_the_step_from_which_the_level_is_held_for_two():
    assert entry.steps_to_level([0.3, 0.8, 0.5, 0.7, 0.7, 0.9], 0.7) == 4
    assert entry.steps_to_level([0.3, 0.3, 0.4, 0.5], 0.7) == 6
    assert entry.steps_to_level([0.9, 0.9, 0.1], 0.9) == 1


def made_run(first, pass_at_1):
    """A run whose accuracy is high from batch `first` on."""
    accuracy = [0.0] * first + [1.0] * 8
    return {"accuracy": [accuracy] * 3, "pass@1": pass_at_1}


def test_several_passes_pay_where_they_need_less_than_one():
    seconds = {"clip, 1": 1.0, "clip, 2": 1.5, "clip, 4": 5.0, "clip, 8": 9.0}
    found = {"seconds a step": seconds, "runs": {
        "clip, 1": made_run(8, [0.5] * 3), "clip, 2": made_run(4, [0.5] * 3),
        "clip, 4": made_run(2, [0.5] * 3), "clip, 8": made_run(0, [0.5] * 3),
        "no bound, 8": made_run(0, [0.4] * 3), "CISPO, 8": made_run(0, [0.6] * 3),
        "SAPO, 8": made_run(0, [0.4, 0.4, 0.5]), "delta, 8": made_run(0, [0.4] * 3)}}
    verdicts = {claim.text: claim.verdict for claim in reuse.claims(found)}
    assert verdicts["2 passes need fewer samples than one"] == entry.SHOWN
    assert verdicts["2 passes need 2 times fewer"] == entry.CONTRADICTED    # 9 / 5
    assert verdicts["8 passes need 8 times fewer"] == entry.SHOWN           # 9 / 1
    assert verdicts["2 passes need less time than one"] == entry.SHOWN      # 9 and 7.5
    assert verdicts["4 passes need less time than one"] == entry.CONTRADICTED       # 15
    better = "after eight passes, the clip has a higher pass@1 than "
    assert verdicts[better + "no bound"] == entry.SHOWN
    assert verdicts[better + "CISPO"] == entry.CONTRADICTED
    assert verdicts[better + "SAPO"] == entry.NOT_SHOWN
