"""The command line: bad input gets one line that names the value and the remedy, and touches nothing."""
import ast
import contextlib
import dataclasses
import importlib.util
import inspect
import io
import json
import math
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SCRIPTS, every_script, scripts

import common
import grpo

# An input that is wrongly taken trains next to nothing, in no time.
SMALL = shlex.split("""
    --device cpu --num_threads 1 --operands 2 --hidden_size 16 --num_attention_heads 2 --num_hidden_layers 1
    --intermediate_size 16 --base_steps 0 --num_prompts 2 --num_generations 2 --max_completion_length 4
    --num_eval_problems 4 --num_eval_samples 2 --eval_steps 1 --max_steps 1""")
FIELDS = {field.name: field for field in dataclasses.fields(common.Config)}     # those of every script
NUMBERS = [name for name, field in FIELDS.items() if field.type in (int, float)]
ABOVE_ZERO = ("temperature", "max_grad_norm", "num_prompts", "max_completion_length", "num_mini_batches",
              "micro_batch_size", "save_steps", "eval_steps", "num_eval_problems", "num_eval_samples",
              "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
              "intermediate_size", "base_batch_size")
# What a resumed run may change: how long it goes on, how it is watched and where. The rest is the run itself.
FREE = {"max_steps", "stop_at", "save_steps", "eval_steps", "num_eval_problems", "num_eval_samples", "device",
        "prompt", "output_dir", "resume_from_checkpoint"}


def own_fields(script):
    """The flags that only this script has, or that it has changed: name -> field."""
    return {f.name: f for f in dataclasses.fields(script.Config) if f.name in script.Config.__annotations__}


def contents(folder="."):
    """Every path below the folder, with its bytes and the time of its last change."""
    return {str(path): (path.read_bytes() if path.is_file() else None, path.stat().st_mtime_ns)
            for path in sorted(Path(folder).rglob("*"))}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch, no_picture):
    """Every test is in an empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """finished(script) -> the folder of a run of it, made once."""
    folder = tmp_path_factory.mktemp("finished")

    def make(script):
        if not (folder / script.__name__).exists():
            with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
                patch.chdir(folder)
                patch.setitem(sys.modules, "tools.report", None)
                script.main([*SMALL, "--output_dir", script.__name__])
        return folder / script.__name__
    return make


@pytest.fixture
def run(script, finished):
    """A copy of that run in the test's folder."""
    return Path(shutil.copytree(finished(script), "run"))


@pytest.fixture
def refused(script, capsys):
    """refused(argv, *words): main exits with 2 after one line that has all the words, and touches nothing."""
    def check(argv, *words):
        argv, before = shlex.split(argv), contents()
        with pytest.raises(SystemExit) as stop, warnings.catch_warnings(record=True) as warned:
            script.main([*(() if "--resume_from_checkpoint" in argv else SMALL), *argv])
        out, err = capsys.readouterr()
        assert stop.value.code == 2
        assert out == "" and err.count("\n") == 1 and err.endswith("\n"), err
        assert not warned, f"more lines on stderr: {warned[0].message}"
        assert not [word for word in words if word not in err], err
        assert contents() == before
    return check


def start(*argv, script=ROOT / "grpo.py", path="", **options):
    """python script argv, as one types it. -> CompletedProcess"""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
                                "PYTHONPATH": str(path)}
    return subprocess.run([sys.executable, script, *argv], capture_output=True, text=True, timeout=120,
                          env=environment, **options)


# ---- values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_is_negative_or_not_finite_or_no_number_is_refused(refused, name):
    for value in ("-1", "nan", "inf", "-inf", "three", "", "0x10", "1,5"):
        refused(f"--{name}='{value}'", f"--{name}", value)
    if FIELDS[name].type is int:
        refused(f"--{name} 2.5", f"--{name}", "2.5")


@every_script
def test_a_value_that_cannot_work_is_refused_by_each_of_a_scripts_own_flags(script, refused):
    assert own_fields(script)
    for name, field in own_fields(script).items():
        if field.type in (int, float):
            too_low = field.metadata["low"] - (1 if field.type is int else 1e-3)
            for value in (too_low, "nan", "inf", "-inf", "three", "", "1,5"):
                refused(f"--{name}='{value}'", f"--{name}", str(value))
            if field.type is int:
                refused(f"--{name} 2.5", f"--{name}", "2.5")
            if (high := field.metadata["high"]) < math.inf:
                refused(f"--{name} {high + 0.001}", f"--{name} {high + 0.001}", f"at most {high}")
        else:
            refused(f"--{name} sideways", f"--{name}", "sideways", *field.metadata["choices"])


@every_script
def test_passes_over_the_batch_are_at_least_one(script, refused):
    if "num_iterations" in own_fields(script):
        refused("--num_iterations 0", "--num_iterations 0", "at least 1")


@pytest.mark.parametrize("name", ABOVE_ZERO)
def test_zero_is_refused_where_it_makes_no_sense(refused, name):
    refused(f"--{name} 0", f"--{name} 0", "at least")


@every_script
def test_a_group_of_one_is_refused_because_it_has_no_siblings(refused):
    refused("--num_generations 1", "--num_generations 1", "at least 2", "no siblings")


@pytest.mark.parametrize("text", ["1", "0-5", "9-3", "x", "3-", "3-7-9", "2.5", "100", "3-100", "\u0663"])
def test_a_number_of_operands_is_a_number_from_two_on_or_a_range_that_goes_up(refused, text):
    refused(f"--operands '{text}'", f"--operands {text}", "from 2 to 99", "range")
    with pytest.raises(ValueError, match="must be a number"):
        common.sample_problems("arithmetic", 1, 0, operands=text)


def test_operands_may_be_a_number_in_code():
    for number in (2, 5):
        problems = common.sample_problems("arithmetic", 9, 0, operands=number)
        assert problems == common.sample_problems("arithmetic", 9, 0, operands=str(number))
        assert {problem.difficulty for problem in problems} == {number}
    problems = common.sample_problems("arithmetic", 99, 0, operands="3-5")
    assert {problem.difficulty for problem in problems} == {3, 4, 5}


@pytest.mark.parametrize("numbers", ["9-3", "x", "1", "3-", "100"])
def test_the_numbers_of_countdown_are_read_as_operands_are(refused, numbers):
    flags = f"--task countdown --operands 5 --numbers {numbers}"
    refused(flags, f"--numbers {numbers}", "from 2 to 99", "range")


@pytest.mark.parametrize("flags", ["--numbers 9-3", "--numbers 3", "--slip 0.5"])
def test_a_flag_of_another_task_is_refused(refused, flags):
    refused(flags, flags, "arithmetic")


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.type is str])
def test_nothing_between_quotes_is_refused(refused, name):
    """As of an unset shell variable: --resume_from_checkpoint "$RUN" must not begin a new run."""
    refused(f"--{name} ''", f"--{name}")


@pytest.mark.parametrize("task", ["chess", "../grpo", "common", "a.b", "arithmetic2", "lookup,,lookup", ","])
def test_a_task_that_is_not_there_is_refused_with_the_place_where_it_would_be(refused, task):
    refused(f"--task '{task}'", f"--task {task}", str(Path("tasks", f"{task}.py")))


def test_a_mix_with_a_task_that_is_not_there_is_refused(refused):
    refused("--task arithmetic,chess", "--task chess", str(Path("tasks", "chess.py")))


@pytest.mark.parametrize("task", ["mix", "__init__", "arithmetic,mix"])
def test_a_file_of_tasks_that_is_no_task_is_refused_with_what_it_lacks(refused, task):
    refused(f"--task {task}", f"--task {task.split(',')[-1]}", "no task", "sample")


def test_a_reward_that_is_not_there_or_not_for_the_task_is_refused(refused):
    refused("--reward nonsense", "--reward nonsense", "accuracy", "format")
    refused("--reward accuracy+nonsense", "--reward accuracy+nonsense", "'nonsense'")
    refused("--reward accuracy+", "--reward accuracy+", "format")
    refused("--reward fine", "--reward fine", "arithmetic", "lookup")


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.metadata["choices"]])
def test_a_word_that_is_no_choice_is_refused_with_the_choices(refused, name):
    refused(f"--{name} sideways", f"--{name}", "sideways", *FIELDS[name].metadata["choices"])


@every_script
@pytest.mark.parametrize("argv", ["--learning_rat 1", "--max_step 3", "--lr=1", "stray", "-x"])
def test_a_flag_that_is_not_there_is_refused_and_none_is_guessed_from_its_beginning(refused, argv):
    refused(argv, argv.split()[0], "--help")


def test_a_flag_without_its_value_is_refused(refused):
    refused("--seed", "--seed", "--help")


def test_cuda_is_refused_where_there_is_none(refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused("--device cuda", "--device cuda", "one of cpu")


@pytest.mark.parametrize("argv, words", [
    ("--hidden_size 30 --num_attention_heads 4", ["--hidden_size 30", "multiple"]),
    ("--hidden_size 12 --num_attention_heads 4", ["--hidden_size 12", "multiple"]),     # odd: no rotary pairs
    ("--num_attention_heads 2 --num_key_value_heads 4", ["--num_key_value_heads 4", "2"]),
    ("--overlong_buffer 100", ["--overlong_buffer 100", "longer"]),
    ("--num_mini_batches 3", ["--num_mini_batches 3", "2 groups"]),     # of G = 2 rows, never torn apart
])
def test_two_values_that_do_not_go_together_are_refused(refused, argv, words):
    refused(argv, *words)


@scripts("ppo")
def test_dynamic_sampling_by_a_reward_model_that_has_not_spoken_is_refused(script, refused):
    refused("--reward model --dynamic_sampling 3", "--dynamic_sampling 3", "accuracy+model")
    script.Config.parse(["--reward", "accuracy+model", "--dynamic_sampling", "3"])


@every_script
def test_a_flag_that_does_nothing_without_another_is_refused_alone(script, refused):
    alone = {name: field for name, field in own_fields(script).items() if field.metadata["needs"]}
    assert len(alone) == {"ppo": 5, "grpo": 1, "gspo": 1}.get(script.__name__, 0)
    for name, field in alone.items():
        value = {"kl_estimator": "k2"}.get(name, 0.5)
        refused(f"--{name} {value}", f"--{name} {value}", f"nothing without --{field.metadata['needs']}")
        flag, _, wanted = field.metadata["needs"].partition(" ")
        script.Config.parse([f"--{name}", str(value), f"--{flag}", wanted or "0.1"])


# ---- folders ---------------------------------------------------------------------------------------------


def test_an_output_dir_that_is_not_empty_is_refused_and_left_alone(refused):
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("irreplaceable")
    refused("--output_dir mine", "--output_dir mine", "not empty", "name")


def test_an_output_dir_that_cannot_be_made_is_refused(refused):
    Path("file").write_text("")
    refused("--output_dir file", "--output_dir file")
    refused("--output_dir file/run", "--output_dir file/run", "cannot be made")
    refused(f"--output_dir {'x' * 300}", f"--output_dir {'x' * 300}", "cannot be made")


@pytest.mark.parametrize("flag", ["resume_from_checkpoint", "init_from"])
def test_a_run_that_is_not_there_is_refused(refused, flag):
    Path("empty").mkdir()
    Path("file").write_text("")
    for folder in ("nowhere", "empty", "file", "file/run"):
        refused(f"--{flag} {folder}", f"--{flag} {folder}", "name")


CONFIG_JSON = {
    "empty": lambda saved: "",
    "cut off": lambda saved: json.dumps(saved)[:-40],
    "no UTF-8": lambda saved: b"\xff\xfe{",
    "a list": lambda saved: "[]",
    "null": lambda saved: "null",
    "without flags": lambda saved: json.dumps({"script": saved["script"]}),
    "without a script": lambda saved: json.dumps({"config": saved["config"]}),
    "with flags that are a list": lambda saved: json.dumps(saved | {"config": [1, 2]}),
    "with a flag too few": lambda saved: json.dumps(
        saved | {"config": {name: x for name, x in saved["config"].items() if name != "beta"}}),
    "with a flag too many": lambda saved: json.dumps(saved | {"config": saved["config"] | {"gamma": 1}}),
    "with a number that is text": lambda saved: json.dumps(
        saved | {"config": saved["config"] | {"num_prompts": "two"}}),
    "with a number that cannot work": lambda saved: json.dumps(
        saved | {"config": saved["config"] | {"temperature": -1.0}}),
    "with a word that is no choice": lambda saved: json.dumps(
        saved | {"config": saved["config"] | {"loss_type": "sideways"}})}


@pytest.mark.parametrize("damage", CONFIG_JSON)
def test_a_damaged_config_is_refused(refused, run, damage):
    path = run / "config.json"
    content = CONFIG_JSON[damage](json.loads(path.read_text()))
    path.write_bytes(content) if isinstance(content, bytes) else path.write_text(content)
    refused("--resume_from_checkpoint run", "--")


@every_script
def test_a_run_of_another_script_is_refused(script, refused, finished):
    for name in SCRIPTS:
        if name != script.__name__:
            shutil.copytree(finished(__import__(name)), name)
            refused(f"--resume_from_checkpoint {name}", f"--resume_from_checkpoint {name}")
            path = Path(name, "config.json")                # also if it has all the flags that this one has
            saved = json.loads(path.read_text())
            defaults = json.loads(json.dumps(dataclasses.asdict(script.Config(**{
                field: value for field, value in saved["config"].items() if field in FIELDS}))))
            path.write_text(json.dumps(saved | {"config": defaults}))
            refused(f"--resume_from_checkpoint {name}", f"--resume_from_checkpoint {name}",
                    f"{script.__name__}.py")


class Trap:
    """Pickled, this is code that runs when it is loaded."""

    def __reduce__(self):
        return Path.touch, (Path("trapped"),)


def half(path):
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])


def flipped(path):
    """One bit changed in the middle of the longest stretch of weights."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 64
    path.write_bytes(data)


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut off": half,
    "one bit flipped": flipped,
    "random bytes": lambda path: path.write_bytes(bytes(i * i % 251 for i in range(5000))),
    "text": lambda path: path.write_text("hello"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pickle with code": lambda path: path.write_bytes(pickle.dumps(Trap())),
    "a checkpoint with code": lambda path: torch.save({"policy": {}, "state": Trap()}, path),
    "a list": lambda path: torch.save([1, 2, 3], path),
    "something else": lambda path: torch.save({"epoch": torch.ones(3)}, path),
    "the weights of another model": lambda path: torch.save(
        {"policy": {"embed.weight": torch.ones(2, 2)}} | {"embed.weight": torch.ones(2, 2)}, path)}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("argv", ["--init_from run", "--resume_from_checkpoint run",
                                  "--resume_from_checkpoint run --prompt (1+2)="])
def test_a_damaged_checkpoint_is_refused_and_no_code_in_it_runs(refused, run, argv, damage):
    DAMAGES[damage](run / "checkpoint.pt")
    if damage == "missing" and argv == "--resume_from_checkpoint run":
        grpo.main(argv.split())                     # killed before the first checkpoint: it starts over
        assert (run / "checkpoint.pt").exists()
    else:
        refused(argv, *argv.split()[:2])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_base_is_refused_and_no_code_in_it_runs(refused, run, damage):
    DAMAGES[damage](run / "base.pt")
    refused("--resume_from_checkpoint run", "--resume_from_checkpoint run")


def other(field):
    """A value of the flag that is not the run's."""
    if field.name in ("task", "operands", "device"):
        return {"task": "arithmetic,arithmetic", "operands": "7", "device": "cuda"}[field.name]
    if field.metadata["choices"]:
        return next(x for x in reversed(field.metadata["choices"]) if x != field.default)
    return "other" if field.type is str else "77"


@every_script
def test_a_resumed_run_cannot_become_another_run(script, refused, run):
    stored = json.loads((run / "config.json").read_text())["config"]
    for name, field in (FIELDS | own_fields(script)).items():
        if name not in FREE:
            words = (f"--{name} {other(field)}", str(stored[name]), "--init_from run")
            refused(f"--resume_from_checkpoint run --{name} {other(field)}", *words)


def test_init_from_a_policy_of_another_shape_is_refused(refused, run):
    for flags in ("--hidden_size 32", "--num_hidden_layers 2", "--intermediate_size 32"):
        refused(f"--init_from run {flags}", "--init_from run", "shape")


def test_a_resumed_run_has_its_weights_and_cannot_begin_from_others(refused, run):
    refused("--resume_from_checkpoint run --init_from run", "--init_from run")


def test_a_cold_start_of_no_run_is_refused(refused):
    refused("--cold_start 3", "--cold_start 3", "--init_from RUN")


# ---- questions -------------------------------------------------------------------------------------------


def test_a_prompt_without_a_policy_is_refused(refused):
    refused("--prompt (1+2)=", "--prompt (1+2)=", "--resume_from_checkpoint")


@pytest.mark.parametrize("prompt", ["((1+2)+3)=", "\u00e9\u00e9\u00e9\u00e9"])      # the width counts bytes
def test_a_prompt_longer_than_those_of_the_task_is_refused(refused, run, prompt):
    refused(f"--resume_from_checkpoint run --prompt {prompt}", f"--prompt {prompt}", "long")


def test_an_empty_prompt_does_not_make_the_run_go_on(refused, run):
    refused("--resume_from_checkpoint run --prompt '' --max_steps 2", "--prompt")


# ---- from a shell ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv, word", [("--num_generations 1", "no siblings"),
                                        ("--resume_from_checkpoint nowhere", "nowhere")])
def test_from_a_shell_bad_input_is_one_line_and_exit_code_two(argv, word):
    done = start(*argv.split())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert word in done.stderr
    assert contents() == {}


IMPORT = """
import json, os, random, sys, time, threading, signal
import torch
torch.set_num_threads(3)
def state():
    return [random.getstate(), torch.get_rng_state().tolist(), torch.get_num_threads(),
            torch.get_default_dtype(), torch.is_grad_enabled(), threading.active_count(),
            signal.getsignal(signal.SIGINT), dict(os.environ), os.getcwd(), os.listdir()]
before, seconds = state(), {}
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    start = time.perf_counter()
    __import__(name)
    seconds[name] = time.perf_counter() - start
    assert state() == before, name
print(json.dumps({"seconds": seconds, "drew": "matplotlib" in sys.modules}))
"""


def test_importing_a_script_is_quick_and_has_no_side_effects():
    times = []
    for _ in range(3):                              # the best of three: others may use the machine
        done = start("-c", IMPORT, str(ROOT), *SCRIPTS, script="-B")
        assert done.returncode == 0 and done.stderr == "", done.stderr
        result = json.loads(done.stdout)            # it has printed nothing else
        assert not result["drew"]
        assert contents() == {}
        times.append(max(result["seconds"].values()))
        if times[-1] < 0.5:
            break
    assert min(times) < 0.5, f"importing a script after torch took {times} s"


@every_script
def test_a_script_imports_common_and_what_is_in_tasks_and_kernels_but_no_other_script(script):
    tree = ast.parse(Path(script.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    ours = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert {name.split(".")[0] for name in names} & ours <= {"common", "tasks", "kernels"}
    assert "common" in names


@every_script
def test_a_script_is_short(script):
    lines = Path(script.__file__).read_text().splitlines()
    assert len(lines) <= (650 if script.__name__ == "ppo" else 500)
    assert max(map(len, lines)) <= 110


@every_script
def test_every_equation_in_the_docstring_is_tagged_in_the_code_and_vice_versa(script):
    stated = [int(n) for n in re.findall(r"\((\d+)\)\s*$", script.__doc__, re.M)]
    tagged = {int(n) for n in re.findall(r"eq\. \((\d+)\)", Path(script.__file__).read_text())}
    assert stated and sorted(stated) == [*range(1, len(stated) + 1)]
    assert set(stated) == tagged, f"stated {stated}, tagged {sorted(tagged)}"
    assert {int(n) for n in re.findall(r"\((\d\d?)\)", script.__doc__)} == set(stated)     # "as in (5)"


# Run each of the scripts in a folder of its own, as from a shell, but import torch once for all of them.
ALONE = """
import os, runpy, signal, sys
import torch, torch._dynamo
for folder in sys.argv[1].split(":"):
    pid = os.fork()
    if not pid:
        signal.alarm(100)
        os.chdir(folder)
        for number, name in ((1, "stdout.txt"), (2, "stderr.txt")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        name = os.path.basename(folder) + ".py"
        sys.path[0], sys.argv = folder, [name, *sys.argv[2:]]
        runpy.run_path(name, run_name="__main__")
        sys.stdout.flush(), os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """alone(script) -> the folder that held the script and common.py, where it was run for two steps."""
    folder, others = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("others")
    for package in ("kernels", "tasks", "tools"):       # of the same names, as PyPI has them: none of ours
        (others / package).mkdir()
        (others / package / "__init__.py").write_text("raise OSError('imported')")
    for name in SCRIPTS:
        (folder / name).mkdir()
        for path in (f"{name}.py", "common.py"):
            shutil.copy(ROOT / path, folder / name)
    folders = ":".join(str(folder / name) for name in SCRIPTS)
    done = start("-c", ALONE, folders, *SMALL, "--max_steps", "2", script="-B", cwd=folder, path=others)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return lambda script: folder / script.__name__


@every_script
def test_a_script_and_common_alone_in_a_folder_train_and_say_that_no_curve_was_drawn(script, alone):
    folder = alone(script)
    assert (folder / "stderr.txt").read_text() == ""
    said = (folder / "stdout.txt").read_text()
    assert len([line for line in said.splitlines() if "curve" in line]) == 1, said
    run = folder / f"runs/{script.__name__}-arithmetic-s0"
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    assert not (run / "curve.png").exists()
    assert {path.name for path in folder.iterdir()} == {
        f"{script.__name__}.py", "common.py", "stdout.txt", "stderr.txt", "runs"}
    assert {path.name for path in folder.parent.iterdir()} == set(SCRIPTS)


def test_a_script_alone_that_is_killed_goes_on_and_ends_as_it_does_in_the_repository(tmp_path):
    for name in ("grpo.py", "common.py"):
        shutil.copy(ROOT / name, name)
    flags = "--base_steps 20 --entropy_coef 0.1 --max_steps 40 --save_steps 3 --stop_at 2"
    argv = [*SMALL, *flags.split()]
    running = subprocess.Popen([sys.executable, "-B", "grpo.py", *argv, "--output_dir", "killed"], text=True,
                               stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert any(re.match("5 ", line) for line in running.stdout)
    running.kill()
    running.communicate()
    assert not Path("killed/summary.json").exists()
    done = start("grpo.py", "--resume_from_checkpoint", "killed", script="-B")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    summary = grpo.main([*argv, "--output_dir", "whole"])
    alone = json.loads(Path("killed/summary.json").read_text())
    assert alone["trained"]["greedy"] == summary["trained"]["greedy"] and alone["steps"] == 40
    for name in ("base.pt", "checkpoint.pt"):
        one, other = (torch.load(Path(run, name), weights_only=True) for run in ("killed", "whole"))
        weights = [[*x.get("policy", x).values()] for x in (one, other)]
        assert all(torch.equal(*pair) for pair in zip(*weights))
    assert not torch.equal(weights[0][0], [*torch.load("whole/base.pt").values()][0])       # it has learned
    losses = [[json.loads(line).get("loss") for line in Path(run, "metrics.jsonl").read_text().splitlines()]
              for run in ("killed", "whole")]
    assert losses[0] == losses[1]


def test_a_script_with_tasks_but_without_tools_runs_a_task_that_rewards_each_move(tmp_path):
    for name in ("reinforce.py", "common.py"):
        shutil.copy(ROOT / name, name)
    shutil.copytree(ROOT / "tasks", "tasks")
    flags = "--task gridworld --operands 5 --base_steps 2"              # 5: the default
    done = start("reinforce.py", *SMALL, *flags.split(), script="-B")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert list(Path().glob("runs/*/summary.json"))
    code = ("import common; common.tasks.is_right = lambda problem, verdict: verdict == [7]; "
            "print(common.tools.measure([0], ['a', 'b'], [1, 1], 2, None, lambda problem, text: [7]))")
    assert start("-c", code, script="-B").stdout == "{'pass@1': 1.0}\n"


REFUSALS = """
import sys, grpo
for argv in sys.argv[1:]:
    try:
        grpo.main(argv.split())
    except SystemExit as stop:
        print(stop.code)
"""


def test_a_script_alone_refuses_what_needs_a_folder_that_is_not_there(alone):
    refused = {"--task lookup": "tasks/lookup.py", "--task arithmetic,lookup": "tasks/",
               "--reward format": "--reward", "--curriculum yes": "--curriculum", "--prompt 1+2=": "--prompt",
               "--init_from run": "--init_from",
               "--kernel triton": "--kernel triton: must be one of auto, torch",
               "--fused_linear on": "--fused_linear on: must be one of auto, off"}
    before = contents(alone(grpo))
    done = start("-c", REFUSALS, *refused, script="-B", cwd=alone(grpo))
    assert done.stdout.split() == ["2"] * len(refused)
    errors = done.stderr.splitlines()
    assert len(errors) == len(refused) and all(error.startswith("error: ") for error in errors)
    assert all(words in error for words, error in zip(refused.values(), errors)), errors
    assert contents(alone(grpo)) == before


TASK = '''
from common import Problem

FLAGS = {"save_steps": 7, "learning_rate": 1, "max_steps": 99, "a_flag_of_no_script": 3}


def width():
    return 6


def sample(rng):
    digit = str(rng.randint(0, 9))
    return Problem("parrot", f"{rng.choice(['say', 'cry', 'sob'])} {digit}:", digit)


def corpus(problem, rng, phase):
    return problem.answer


def verify(problem, text):
    assert problem.task == "parrot"
    return float(text > "P")
'''
PER_MOVE = TASK.replace('float(text > "P")', '[0.5 * (character > "P") for character in text]') + '''

def best(problem):
    return 2.0
'''


@every_script
@pytest.mark.parametrize("source", [TASK, PER_MOVE], ids=["at the end", "for each move"])
def test_a_task_is_one_file_in_tasks_and_may_reward_each_move(script, tmp_path, monkeypatch, source):
    path = tmp_path / "tasks/parrot.py"             # next to common.py
    path.parent.mkdir()
    path.write_text(source)
    monkeypatch.setattr(common, "HERE", tmp_path)
    spec = importlib.util.spec_from_file_location("tasks.parrot", path)
    parrot = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(parrot)
    monkeypatch.setitem(sys.modules, "tasks.parrot", parrot)
    flags = "--task parrot --operands 5 --base_steps 3 --max_steps 2 --num_prompts 8"   # 5: the default
    script.main([*SMALL, *flags.split()])
    folder = Path(f"runs/{script.__name__}-parrot-s0")
    groups = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert groups and all(re.fullmatch("(say|cry|sob) [0-9]:", group["prompt"]) for group in groups)
    made = [completion for group in groups for completion in group["completions"]]
    for completion in made:                         # the task's own verifier judged
        verdict = parrot.verify(common.Problem("parrot", "", ""), completion["text"])
        assert completion["reward"] == (verdict if source is TASK else sum(verdict))
    assert len({completion["reward"] for completion in made}) > 1
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sum("loss" in line for line in metrics) == 2
    flags = json.loads((folder / "config.json").read_text())["config"]
    assert (flags["save_steps"], flags["learning_rate"], flags["max_steps"]) == (7, 1.0, 2)  # 2 was given
    script.main(["--resume_from_checkpoint", str(folder), "--max_steps", "3"])


# ---- what may be said, and how ---------------------------------------------------------------------------


@every_script
def test_a_flag_is_spelled_with_hyphens_or_underscores(script, monkeypatch):
    monkeypatch.setattr(script.Config, "check", lambda self: None)
    default, fields = script.Config.parse([]), FIELDS | own_fields(script)
    for name in fields.keys() - {"resume_from_checkpoint"}:
        value = other(fields[name])
        for spelling in (name, name.replace("_", "-")):
            cfg = script.Config.parse([f"--{spelling}", value])
            assert getattr(cfg, name) == fields[name].type(value)
            assert {field for field in fields if getattr(cfg, field) != getattr(default, field)} == {name}


def test_resume_is_spelled_with_hyphens_too(refused, run):
    refused("--resume-from-checkpoint nowhere", "nowhere")


@pytest.fixture
def help_groups(script, capsys):
    """The text of --help below the docstring: heading -> {flag: what is said of it}."""
    with pytest.raises(SystemExit) as stop:
        script.main(["--help"])
    assert stop.value.code in (0, None)
    groups, entries = {}, None
    out = capsys.readouterr().out
    for line in out.split(script.__doc__.strip().splitlines()[-1])[1].splitlines():
        if re.fullmatch(r"\S.*:", line):
            entries = groups.setdefault(line[:-1], {})
        elif flag := re.match(r"  (?:-\w, )?--(\w+)", line):
            name = flag[1]
            entries[name] = line
        elif line.strip():
            entries[name] += " " + line.strip()
    return groups


@every_script
def test_help_opens_with_the_equations(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["--help"])
    assert script.__doc__.strip() in capsys.readouterr().out


@every_script
def test_help_gives_every_flag_in_its_group_with_its_meaning_and_default(script, help_groups):
    by_group, fields = {}, FIELDS | own_fields(script)
    for name, field in fields.items():
        by_group.setdefault(field.metadata["group"], set()).add(name)
    assert {title: set(entries) for title, entries in help_groups.items() if title != "options"} == by_group
    for title, entries in help_groups.items():
        for name, entry in entries.items() if title != "options" else ():
            default = fields[name].default
            assert f"[{default}]" in entry or f"[{default!r}]" in entry
            said = re.sub(rf"--[\w-]+|\[.*\]|{name}", "", entry)
            assert re.search("[a-z]{2}", said), entry


@every_script
def test_help_lists_the_choices_of_a_flag_that_has_some(script, help_groups):
    entries = {name: entry for group in help_groups.values() for name, entry in group.items()}
    for name, field in (FIELDS | own_fields(script)).items():
        for choice in field.metadata["choices"] or ():
            assert re.search(rf"\b{choice}\b", entries[name]), (name, choice)


@every_script
def test_the_algorithms_own_flags_come_first_in_help(script, help_groups):
    assert [title for title in help_groups if title != "options"][0] == "algorithm"
    assert set(help_groups["algorithm"]) == own_fields(script).keys() - FIELDS.keys()


@every_script
def test_every_flag_is_read_somewhere(script):
    files = (f"{script.__name__}.py", "common.py", "tasks/mix.py", "tools/bases.py", "tools/console.py")
    code = "".join((ROOT / name).read_text() for name in files)
    dead = [name for name, field in (FIELDS | own_fields(script)).items() if field.metadata["group"] != "task"
            and not re.search(rf"\b(cfg|self|given)\.{name}\b", code)]
    assert not dead


def test_every_flag_of_a_task_is_a_keyword_of_its_sample_function():
    for name, field in FIELDS.items():
        if field.metadata["group"] == "task":
            task = field.metadata["help"].partition(":")[0]         # as it says
            if task == "arithmetic" or (ROOT / "tasks" / f"{task}.py").is_file():
                sample = common.load_task(task).sample
                assert inspect.signature(sample).parameters[name].default == field.default


def test_a_config_cannot_be_changed_after_it_was_checked():
    with pytest.raises(dataclasses.FrozenInstanceError):
        grpo.Config().seed = 1
