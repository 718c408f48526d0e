"""The command line: bad input gets one line that names the value and the remedy, and touches nothing."""
import dataclasses
import json
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import grpo

ROOT = Path(grpo.__file__).resolve().parent
# An input that is wrongly taken trains next to nothing, in no time.
SMALL = shlex.split("""
    --device cpu --num_threads 1 --operands 2 --hidden_size 16 --num_attention_heads 2 --num_hidden_layers 1
    --intermediate_size 16 --base_steps 0 --num_prompts 2 --num_generations 2 --max_completion_length 4
    --num_eval_problems 4 --num_eval_samples 2 --eval_steps 1 --max_steps 1""")
FIELDS = {field.name: field for field in dataclasses.fields(grpo.Config)}
NUMBERS = [name for name, field in FIELDS.items() if field.type in (int, float)]
ABOVE_ZERO = ("temperature", "max_grad_norm", "num_prompts", "max_completion_length", "num_mini_batches",
              "micro_batch_size", "num_iterations", "save_steps", "eval_steps",
              "num_eval_problems", "num_eval_samples", "hidden_size", "num_hidden_layers",
              "num_attention_heads", "num_key_value_heads", "intermediate_size", "base_batch_size")
# What a resumed run may change: how long it goes on, how it is watched and where. The rest is the run itself.
FREE = {"max_steps", "stop_at", "save_steps", "eval_steps", "num_eval_problems", "num_eval_samples", "device",
        "prompt", "output_dir", "resume_from_checkpoint"}


def contents(folder="."):
    """Every path below the folder, with its bytes and the time of its last change."""
    return {str(path): (path.read_bytes() if path.is_file() else None, path.stat().st_mtime_ns)
            for path in sorted(Path(folder).rglob("*"))}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Every test is in an empty folder, and a run draws no picture, which would take longer than it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tools.report", None)
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, on_ctrl_c)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run, made once."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setitem(sys.modules, "tools.report", None)
        grpo.main([*SMALL, "--output_dir", "run"])
    return folder / "run"


@pytest.fixture
def run(finished):
    """A copy of that run in the test's folder."""
    return Path(shutil.copytree(finished, "run"))


@pytest.fixture
def refused(capsys):
    """refused(argv, *words): main exits with 2 after one line that has all the words, and touches nothing."""
    def check(argv, *words):
        argv, before = shlex.split(argv), contents()
        with pytest.raises(SystemExit) as stop, warnings.catch_warnings(record=True) as warned:
            grpo.main([*(() if "--resume_from_checkpoint" in argv else SMALL), *argv])
        out, err = capsys.readouterr()
        assert stop.value.code == 2
        assert out == "" and err.count("\n") == 1 and err.endswith("\n"), err
        assert not warned, f"more lines on stderr: {warned[0].message}"
        assert not [word for word in words if word not in err], err
        assert contents() == before
    return check


def start(*argv, script=ROOT / "grpo.py", **options):
    """python script argv, as one types it. -> CompletedProcess"""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, script, *argv], capture_output=True, text=True, timeout=120,
                          env=environment, **options)


# ---- values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_is_negative_or_not_finite_or_no_number_is_refused(refused, name):
    for value in ("-1", "nan", "inf", "-inf", "three", "", "0x10", "1,5"):
        refused(f"--{name}='{value}'", f"--{name}", value)
    if FIELDS[name].type is int:
        refused(f"--{name} 2.5", f"--{name}", "2.5")


@pytest.mark.parametrize("name", ABOVE_ZERO)
def test_zero_is_refused_where_it_makes_no_sense(refused, name):
    refused(f"--{name} 0", f"--{name} 0", "at least")


def test_a_group_of_one_is_refused_because_it_has_no_siblings(refused):
    refused("--num_generations 1", "--num_generations 1", "at least 2", "no siblings")


def test_one_operand_makes_no_problem(refused):
    refused("--operands 1", "--operands 1", "at least 2")


@pytest.mark.parametrize("task", ["chess", "../grpo", "common", "", "a.b", "arithmetic2"])
def test_a_task_that_is_not_there_is_refused_with_the_place_where_it_would_be(refused, task):
    refused(f"--task '{task}'", f"--task {task}", str(Path("tasks", f"{task}.py")))


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.metadata["choices"]])
def test_a_word_that_is_no_choice_is_refused_with_the_choices(refused, name):
    refused(f"--{name} sideways", f"--{name}", "sideways", *FIELDS[name].metadata["choices"])


@pytest.mark.parametrize("argv", ["--learning_rat 1", "--max_step 3", "--lr=1", "stray", "-x"])
def test_a_flag_that_is_not_there_is_refused_and_none_is_guessed_from_its_beginning(refused, argv):
    refused(argv, argv.split()[0], "--help")


def test_a_flag_without_its_value_is_refused(refused):
    refused("--seed", "--seed", "--help")


def test_cuda_is_refused_where_there_is_none(refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused("--device cuda", "--device cuda", "use cpu")


@pytest.mark.parametrize("argv, words", [
    ("--hidden_size 30 --num_attention_heads 4", ["--hidden_size 30", "multiple"]),
    ("--hidden_size 12 --num_attention_heads 4", ["--hidden_size 12", "multiple"]),     # odd: no rotary pairs
    ("--num_attention_heads 2 --num_key_value_heads 4", ["--num_key_value_heads 4", "2"]),
    ("--num_mini_batches 5", ["--num_mini_batches 5", "4"]),
])
def test_two_values_that_do_not_go_together_are_refused(refused, argv, words):
    refused(argv, *words)


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


def test_a_run_of_another_script_is_refused(refused, run):
    saved = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(saved | {"script": "ppo.py"}))
    refused("--resume_from_checkpoint run", "--resume_from_checkpoint run", "grpo.py")


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


def other(name):
    """A value of the flag that is not the run's."""
    field = FIELDS[name]
    if field.metadata["choices"]:
        return next(x for x in reversed(field.metadata["choices"]) if x != field.default)
    return "other" if field.type is str else "77"


@pytest.mark.parametrize("name", FIELDS.keys() - FREE)
def test_a_resumed_run_cannot_become_another_run(refused, run, name):
    stored = json.loads((run / "config.json").read_text())["config"]
    words = (f"--{name} {other(name)}", str(stored[name]), "--init_from run")
    refused(f"--resume_from_checkpoint run --{name} {other(name)}", *words)


def test_init_from_a_policy_of_another_shape_is_refused(refused, run):
    for flags in ("--hidden_size 32", "--num_hidden_layers 2", "--intermediate_size 32"):
        refused(f"--init_from run {flags}", "--init_from run", "shape")


def test_a_resumed_run_has_its_weights_and_cannot_begin_from_others(refused, run):
    refused("--resume_from_checkpoint run --init_from run", "--init_from run")


# ---- questions -------------------------------------------------------------------------------------------


def test_a_prompt_without_a_policy_is_refused(refused):
    refused("--prompt (1+2)=", "--prompt (1+2)=", "--resume_from_checkpoint")


@pytest.mark.parametrize("prompt", ["((1+2)+3)=", "\u00e9\u00e9\u00e9\u00e9"])      # the width counts bytes
def test_a_prompt_longer_than_those_of_the_task_is_refused(refused, run, prompt):
    refused(f"--resume_from_checkpoint run --prompt {prompt}", f"--prompt {prompt}", "long")


def test_an_empty_prompt_does_not_make_the_run_go_on(refused, run):
    refused("--resume_from_checkpoint run --prompt '' --max_steps 2", "--prompt")


# ---- from a shell ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv, word", [("--num_generations 1", "no siblings"), ("--task chess", "chess.py"),
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
before = state()
start = time.perf_counter()
sys.path.insert(0, sys.argv[1])
import grpo
seconds = time.perf_counter() - start
assert state() == before
print(json.dumps({"seconds": seconds, "drew": "matplotlib" in sys.modules}))
"""


def test_importing_the_script_is_quick_and_has_no_side_effects():
    times = []
    for _ in range(3):                              # the best of three: others may use the machine
        done = start("-c", IMPORT, str(ROOT), script="-B")
        assert done.returncode == 0 and done.stderr == "", done.stderr
        result = json.loads(done.stdout)            # it has printed nothing else
        assert not result["drew"]
        assert contents() == {}
        times.append(result["seconds"])
        if times[-1] < 0.5:
            break
    assert min(times) < 0.5, f"importing grpo after torch took {times} s"


def copy_of_the_script(folder):
    folder.mkdir()
    for name in ("grpo.py", "common.py"):
        shutil.copy(ROOT / name, folder)
    return folder / "grpo.py"


def test_the_script_and_common_alone_in_a_folder_train_and_say_that_no_curve_was_drawn(tmp_path):
    script = copy_of_the_script(tmp_path / "alone")
    done = start(*SMALL, "--max_steps", "2", script=script, cwd=script.parent)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert len([line for line in done.stdout.splitlines() if "curve" in line]) == 1, done.stdout
    folder = script.parent / "runs/grpo-arithmetic-s0"
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2
    assert not (folder / "curve.png").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"alone"}


TASK = '''
from common import Problem

EXAMPLE = "say 7:"
CORPUS = {}


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


def test_a_task_is_one_file_in_tasks(tmp_path):
    script = copy_of_the_script(tmp_path / "project")
    (script.parent / "tasks").mkdir()
    (script.parent / "tasks/parrot.py").write_text(TASK)
    done = start(*SMALL, "--task", "parrot", "--base_steps", "3", "--max_steps", "2", "--num_prompts", "8",
                 "--save_steps", "1", script=script, cwd=script.parent)
    assert done.returncode == 0, done.stderr
    folder = script.parent / "runs/grpo-parrot-s0"
    groups = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert groups and all(re.fullmatch("(say|cry|sob) [0-9]:", group["prompt"]) for group in groups)
    made = [completion for group in groups for completion in group["completions"]]
    assert {completion["reward"] for completion in made} == {0.0, 1.0}      # the task's own verifier judged
    assert all(completion["reward"] == (completion["text"] > "P") for completion in made)


# ---- what may be said, and how ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIELDS.keys() - {"resume_from_checkpoint"})
def test_a_flag_is_spelled_with_hyphens_or_underscores(monkeypatch, name):
    monkeypatch.setattr(grpo.Config, "check", lambda self: None)
    for spelling in (name, name.replace("_", "-")):
        cfg = grpo.Config.parse([f"--{spelling}", other(name)])
        assert getattr(cfg, name) == FIELDS[name].type(other(name))
        changed = {field for field in FIELDS if getattr(cfg, field) != getattr(grpo.Config.parse([]), field)}
        assert changed == {name}


def test_resume_is_spelled_with_hyphens_too(refused, run):
    refused("--resume-from-checkpoint nowhere", "nowhere")


@pytest.fixture
def help_groups(capsys):
    """The text of --help below the docstring: heading -> {flag: what is said of it}."""
    with pytest.raises(SystemExit) as stop:
        grpo.main(["--help"])
    assert stop.value.code in (0, None)
    groups, entries = {}, None
    for line in capsys.readouterr().out.split(grpo.__doc__.strip().splitlines()[-1])[1].splitlines():
        if re.fullmatch(r"\S.*:", line):
            entries = groups.setdefault(line[:-1], {})
        elif flag := re.match(r"  (?:-\w, )?--(\w+)", line):
            name = flag[1]
            entries[name] = line
        elif line.strip():
            entries[name] += " " + line.strip()
    return groups


def test_help_opens_with_the_equations(capsys):
    with pytest.raises(SystemExit):
        grpo.main(["--help"])
    assert grpo.__doc__.strip() in capsys.readouterr().out


def test_help_gives_every_flag_in_its_group_with_its_meaning_and_default(help_groups):
    by_group = {}
    for name, field in FIELDS.items():
        by_group.setdefault(field.metadata["group"], set()).add(name)
    assert {title: set(entries) for title, entries in help_groups.items() if title != "options"} == by_group
    for title, entries in help_groups.items():
        for name, entry in entries.items() if title != "options" else ():
            default = FIELDS[name].default
            assert f"[{default}]" in entry or f"[{default!r}]" in entry
            said = re.sub(rf"--[\w-]+|\[.*\]|{name}", "", entry)
            assert re.search("[a-z]{2}", said), entry


def test_help_lists_the_choices_of_a_flag_that_has_some(help_groups):
    entries = {name: entry for group in help_groups.values() for name, entry in group.items()}
    missing = [(name, choice) for name, field in FIELDS.items() for choice in field.metadata["choices"] or ()
               if not re.search(rf"\b{choice}\b", entries[name])]
    assert not missing


def test_the_algorithms_own_flags_come_first_in_help(help_groups):
    assert [title for title in help_groups if title != "options"][0] == "algorithm"
    own = set(grpo.Config.__annotations__)                  # not the flags that all scripts have
    assert set(help_groups["algorithm"]) == own >= {"loss_type", "beta"}


def test_every_flag_is_read_somewhere():
    code = "".join((ROOT / name).read_text() for name in ("grpo.py", "common.py"))
    dead = [name for name in FIELDS if not re.search(rf"\b(cfg|self|given)\.{name}\b", code)]
    assert not dead


def test_a_config_cannot_be_changed_after_it_was_checked():
    with pytest.raises(dataclasses.FrozenInstanceError):
        grpo.Config().seed = 1
