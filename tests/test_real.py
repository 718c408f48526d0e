"""tools/real.py measures what it says: the same job twice, models of the sizes that it names, and
the most that a process held; and its tables say what its file holds. Only one tiny model runs."""
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from small_models import NEEDS, config_of, load_example

import common
import grpo
from tools import real, runs

transformers = pytest.importorskip("transformers", reason=NEEDS)
pretrained = load_example()

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 48}
PAGE = "".join(f"<!-- made by make real: {name} -->\n<!-- end of {name} -->\n"
               for name in ("beside", "sizes"))


def words_of(flags):
    return [str(flag) for flag in flags]


def folder_of(flags):
    """What --output_dir names among the words of a run."""
    return flags[flags.index("--output_dir") + 1]


# ---- beside ----------------------------------------------------------------------------------

def write_metrics(folder, seconds, rewards):
    """What a run logs, as far as the tool reads it."""
    folder.mkdir()
    with open(folder / "metrics.jsonl", "w") as log:
        for step_time, reward in zip(seconds, rewards):
            log.write(json.dumps({"step_time": step_time, "reward": reward}) + "\n")


@pytest.fixture
def made_runs(monkeypatch):
    """Runs of a script take so long, and are rewarded so: with seed 2 the last two rewards of
    pretrained.py are other ones. Nothing is exported. -> list of (script, flags)"""
    calls = []

    def run(script, folder, *flags, quiet):
        assert quiet
        calls.append((script, list(flags)))
        if "--seed" in flags:
            seed = flags[flags.index("--seed") + 1]
            is_ours = script == "grpo.py"
            pace = (0.25 if is_ours else 0.5) + seed / 8
            seconds = [99.0, *[pace + 0.01 * number for number in range(-4, 5)]]
            rewards = [0.125 + number / 16 for number in range(10)]
            if seed == 2 and not is_ours:
                rewards[-2:] = [0.7, 0.8]
            write_metrics(folder, seconds, rewards)
    monkeypatch.setattr(real, "run", run)
    monkeypatch.setattr(real.export, "export", lambda base, folder: None)
    return calls


def test_both_scripts_run_by_turns_from_one_base_with_each_seed(made_runs, tmp_path):
    real.measure_beside(tmp_path)
    base, *others = made_runs
    assert base[0] == "grpo.py" and base[1][:2] == ["--max_steps", 0]
    assert [script for script, _ in others] == ["grpo.py", real.EXAMPLE] * 3
    seeds = [flags[flags.index("--seed") + 1] for _, flags in others]
    assert seeds == [0, 0, 1, 1, 2, 2]
    for script, flags in others:
        start = ("--init_from", "base") if script == "grpo.py" else ("--model", "model")
        assert flags[flags.index(start[0]) + 1] == tmp_path / start[1]


def test_the_job_is_the_same_for_both(made_runs, tmp_path):
    """All flags of both have the same values, but those that say where the policy comes from, what
    runs only there, and how large the policy is."""
    real.measure_beside(tmp_path)
    found = {}
    for script, flags in made_runs[1:3]:
        config = grpo.Config if script == "grpo.py" else pretrained.Config
        found[script] = common.parse_flags(config, words_of(flags))
    ours = found["grpo.py"]
    theirs = found[real.EXAMPLE]
    for field in dataclasses.fields(grpo.Config):
        if field.name not in {"init_from"} | pretrained.Config.lacks:
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    assert ours.max_steps == real.STEPS and ours.device == "cpu"
    assert theirs.method == "grpo" and theirs.dtype == "float32"


def test_the_first_step_does_not_count_and_equal_rewards_do(made_runs, tmp_path):
    found = real.measure_beside(tmp_path)
    assert [one["seed"] for one in found] == [0, 1, 2]
    for one, pace in zip(found, (0.0, 0.125, 0.25)):
        assert one["runs"]["grpo.py"]["median"] == pytest.approx(0.25 + pace)
        assert one["runs"][real.EXAMPLE]["median"] == pytest.approx(0.5 + pace)
        assert one["ratio"] == pytest.approx((0.5 + pace) / (0.25 + pace))
    assert [one["equal_rewards"] for one in found] == [10, 10, 8]


def test_runs_of_different_lengths_are_not_compared():
    with pytest.raises(ValueError):
        real.compare({"rewards": [1.0, 0.5], "median": 1}, {"rewards": [1.0], "median": 1})


# ---- the models ------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    """A folder with a tiny random model, and the number of parameters that the tool says."""
    folder = tmp_path_factory.mktemp("random") / "model"
    return folder, real.save_random(folder, TINY)


def parameters_of(shape):
    """How many numbers a Llama of this shape has whose embeddings are tied."""
    D = shape["hidden_size"]
    layer = 4 * D * D + 3 * D * shape["intermediate_size"] + 2 * D
    return grpo.VOCAB_SIZE * D + shape["num_hidden_layers"] * layer + D


def test_parameters_are_counted_right(random_model):
    folder, parameters = random_model
    assert parameters == parameters_of(TINY)
    from safetensors import safe_open
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert sum(file.get_tensor(name).numel() for name in file.keys()) == parameters  # noqa: SIM118


def test_there_is_a_size_near_1_10_and_40_million():
    sizes = [parameters_of(shape) / 1e6 for shape in real.SHAPES]
    assert sizes == pytest.approx([1, 10, 40], rel=0.05)
    for shape in real.SHAPES:
        assert shape["hidden_size"] == 64 * shape["num_attention_heads"]


def test_a_random_model_never_ends_a_completion(random_model):
    """Not even in 4000 tokens of which any would do: what ends a text is none of its tokens."""
    cfg = config_of(model=str(random_model[0]), max_completion_length=64)
    policy = pretrained.Policy(cfg.model, cfg)
    assert min(policy.ends) >= grpo.VOCAB_SIZE
    batch = pretrained.sample_batch(
        policy, pretrained.load_task(cfg), dataclasses.replace(cfg, num_generations=16), 0)
    assert batch.tokens.numel() == 4096 and batch.tokens.unique().numel() > 300
    assert batch.is_truncated.all() and batch.lengths.eq(64).all()


@pytest.mark.parametrize("variant", real.VARIANTS)
def test_the_flags_of_a_variant_fit_together(variant):
    number, flags = real.VARIANTS[variant]
    words = words_of([*real.SIZE_JOB, *flags, "--model", "none"])
    cfg = common.parse_flags(pretrained.Config, words)
    assert cfg.max_steps == real.SIZE_STEPS and cfg.num_prompts % number == 0
    assert cfg.num_threads * number == 2                # cores
    assert cfg.dtype in variant
    assert ("checkpointing" in variant) == cfg.gradient_checkpointing
    assert number == 1 or variant.endswith(f"{number} processes, {cfg.parallel}")


def test_no_row_is_left_out_of_the_update(random_model, monkeypatch):
    """Although all rewards are 0: each row of the batch is scored with a gradient."""
    words = words_of([*real.SIZE_JOB, "--model", random_model[0], "--num_threads", 1])
    cfg = common.parse_flags(pretrained.Config, words)
    policy = pretrained.Policy(cfg.model, cfg)
    batch = pretrained.sample_batch(policy, pretrained.load_task(cfg), cfg, 0)
    assert batch.rewards.eq(0).all() and batch.lengths.eq(48).all()
    scored = []
    score = pretrained.score

    def spy(policy, prompts, *args):
        scored.append(len(prompts))
        return score(policy, prompts, *args)
    monkeypatch.setattr(pretrained, "score", spy)
    A = grpo.advantages(batch.rewards).view(-1, 1)
    rows = next(common.mini_batches(batch, cfg, "shuffle", 0))
    pretrained.backward(
        policy, list(policy.model.parameters()), batch, batch.logps, A, rows, cfg)
    assert scored == [8] * (len(rows) // 8) and len(rows) == 64 // cfg.num_mini_batches


def test_what_runs_apart_runs_in_another_process():
    assert real.apart(os.getpid) != os.getpid()


# ---- what a process holds --------------------------------------------------------------------

HOLD = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
found = {name: os.environ.get(name) for name in names}
rank = found["RANK"] or "0"
held = b"1" * (10**6 * int(sys.argv[2 + int(rank)]))
open(f"{sys.argv[1]}/{rank}.json", "w").write(json.dumps(found))
"""
# In a small process, since what a process holds when it starts another one counts there, too.
WEIGH = ("import runpy, sys, types; sys.modules |= {name: types.ModuleType(name) for name in "
         "('common', 'grpo', 'tools.export')}; from tools import real; "
         "print(real.weigh(['-c', *sys.argv[2:]], int(sys.argv[1])))")


def weighed(folder, number, *megabytes):
    """What the tool says that processes need which hold so much each, and their environments."""
    words = [sys.executable, "-c", WEIGH, number, HOLD, folder, *megabytes]
    done = subprocess.run(words_of(words), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return float(done.stdout), found


def test_one_process_is_started_as_from_a_shell(tmp_path):
    small, [environment] = weighed(tmp_path, 1, 0)
    assert set(environment.values()) == {None}
    large, _ = weighed(tmp_path, 1, 200)
    assert 190 < large - small < 210


def test_of_several_processes_the_largest_counts(tmp_path):
    peaks = []
    for number, sizes in enumerate([(0, 0), (200, 0), (0, 200)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        peak, environments = weighed(folder, 2, *sizes)
        peaks.append(peak)
        assert [one["RANK"] for one in environments] == ["0", "1"]
        for one in environments:
            assert one["LOCAL_RANK"] == one["RANK"] and one["WORLD_SIZE"] == "2"
            assert one["MASTER_ADDR"] == "localhost" and int(one["MASTER_PORT"]) > 0
            assert one["TORCHELASTIC_RUN_ID"]
        assert len({one["MASTER_PORT"] for one in environments}) == 1
    assert all(190 < peak - peaks[0] < 210 for peak in peaks[1:])


FAIL = """
import os, sys, time
if os.environ["RANK"] == "0":
    sys.exit(7)
time.sleep(10)
open(sys.argv[1], "w").close()
"""


def test_if_a_process_fails_the_others_end_and_the_tool_fails_like_it(tmp_path):
    with pytest.raises(SystemExit) as stop:
        real.weigh(["-c", FAIL, tmp_path / "end"], 2)
    assert stop.value.code == 7
    assert not (tmp_path / "end").exists()


# ---- all of it -------------------------------------------------------------------------------

@pytest.fixture
def measured(made_runs, monkeypatch, tmp_path):
    """What make real writes when nothing is measured: docs/real.json and the page."""
    sizes = {}

    def save_random(folder, shape):
        sizes[folder] = 10**6 + 3 * len(sizes)
        return sizes[folder]

    def weigh(words, num_processes=1):
        if words[0] == "-c":
            return 400.5
        number = int(re.search("size-([0-9]+)$", str(folder_of(words)))[1])
        write_metrics(folder_of(words), [77.0, 1.25 + number, 1.75 + number], [0.0] * 3)
        return 500.0 + 10 * number + num_processes
    monkeypatch.setattr(real, "save_random", save_random)
    monkeypatch.setattr(real, "apart", lambda function, *args: function(*args))
    monkeypatch.setattr(real, "weigh", weigh)
    docs = tmp_path / "docs"
    docs.mkdir()
    (tmp_path / "README.md").write_text("")
    (docs / "real-models.md").write_text(PAGE)
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setattr(runs, "DOCS", docs)
    with contextlib.redirect_stdout(None):
        real.main()
    return json.loads((docs / "real.json").read_text()), (docs / "real-models.md").read_text()


def rows_of(page, name):
    """The cells of a table, without its heading."""
    block = re.search(f"real: {name} -->\n(.*?)<!-- end of {name} -->", page, re.S)[1]
    lines = [line for line in block.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_of_seeds_says_what_the_file_holds(measured):
    content, page = measured
    rows = rows_of(page, "beside")
    for row, one in zip(rows, content["beside"], strict=True):
        ours = one["runs"]["grpo.py"]
        theirs = one["runs"][real.EXAMPLE]
        assert row == [str(one["seed"]), f"{ours['median']:.3f}", f"{theirs['median']:.3f}",
                       f"{one['ratio']:.2f}", f"{ours['rewards'][0]:.3f}",
                       f"{ours['rewards'][9]:.3f}", f"{theirs['rewards'][9]:.3f}",
                       f"{one['equal_rewards']} of 10"]
    assert rows[0] == ["0", "0.250", "0.500", "2.00", "0.125", "0.688", "0.688", "10 of 10"]
    assert rows[2][5:] == ["0.688", "0.800", "8 of 10"]


def test_the_table_of_sizes_says_what_the_file_holds(measured):
    content, page = measured
    rows = rows_of(page, "sizes")
    assert [row[1] for row in rows] == list(real.VARIANTS) * len(real.SHAPES)
    for row, one in zip(rows, content["sizes"], strict=True):
        assert row == [f"{one['parameters']:,}", one["variant"], f"{one['median']:.2f}",
                       f"{one['peak_MB']:.0f}", f"{one['peak_MB'] - content['imports_MB']:.0f}"]
    assert rows[0] == ["1,000,000", "float32", "1.50", "501", "100"]
    assert rows[8] == ["1,000,003", "float32, 2 processes, replicate", "9.50", "582", "182"]
    assert f"a peak of {content['imports_MB']:.0f} MB" in page


def test_the_page_says_on_which_machine_it_was_measured(measured):
    content, page = measured
    assert content["machine"] == runs.MACHINE
    assert page.count(runs.MACHINE) == 2


def test_a_machine_that_others_use_is_said_to_be_none_to_measure_on(monkeypatch, capsys):
    def stop(work):
        raise KeyboardInterrupt
    monkeypatch.setattr(real, "measure_beside", stop)
    for load, is_said in ((0.4, False), (2.6, True)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        with pytest.raises(KeyboardInterrupt):
            real.main()
        assert ("others use this machine (load 2.6)" in capsys.readouterr().out) == is_said


def test_without_transformers_it_ends_with_one_line(monkeypatch, capsys):
    monkeypatch.setattr(real.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        real.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "error: transformers is missing: pip install -r examples/requirements.txt\n")
