"""Bad input gets one line that names the value and the remedy, and exit code 2; nothing is
touched."""
import contextlib
import dataclasses
import importlib
import io
import json
import math
import pickle
import re
import shlex
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SCRIPTS, every_script, scripts
from small_runs import (
    COMMON_FIELDS,
    INSTANT,
    all_fields,
    arguments,
    at_work,
    begun_from,
    contents,
    other_value,
    own_fields,
)

import common

NUMBERS = [name for name, field in COMMON_FIELDS.items() if field.type in (int, float)]
WITH_CHOICES = [name for name, field in COMMON_FIELDS.items() if field.metadata["choices"]]
TEXTS = [name for name, field in COMMON_FIELDS.items() if field.type is str]
ABOVE_ZERO = [
    "temperature", "max_grad_norm", "num_prompts", "max_completion_length", "num_mini_batches",
    "micro_batch_size", "save_steps", "eval_steps", "num_eval_problems", "num_eval_samples",
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "base_batch_size"]
# What a resumed run may change: how long it goes on, how it is watched and where.
FREE = {"max_steps", "stop_at", "save_steps", "eval_steps", "num_eval_problems",
        "num_eval_samples", "device", "output_dir", "resume_from_checkpoint"}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch, restored_ctrl_c):
    """Every test is in an empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """finished(script): the folder of a run of it, made once."""
    folder = tmp_path_factory.mktemp("finished")

    def make(script):
        name = script.__name__
        if not (folder / name).exists():
            with at_work(folder), contextlib.redirect_stdout(io.StringIO()):
                script.main(arguments(INSTANT | {"output_dir": name}))
        return folder / name
    return make


@pytest.fixture
def run(script, finished):
    """A copy of that run in the test's folder."""
    return Path(shutil.copytree(finished(script), "run"))


@pytest.fixture
def refused(script, capsys):
    """refused(argv, *words): main exits with 2 after one line that has all the words, and touches
    nothing."""
    def check(argv, *words):
        argv = shlex.split(argv)
        if "--init_from" in argv and "--resume_from_checkpoint" not in argv:
            argv = arguments(begun_from(argv[argv.index("--init_from") + 1], INSTANT)) + argv
        elif "--resume_from_checkpoint" not in argv:
            argv = arguments(INSTANT) + argv
        before = contents()
        with pytest.raises(SystemExit) as stop, warnings.catch_warnings(record=True) as warned:
            script.main(argv)
        out, error = capsys.readouterr()
        assert stop.value.code == 2
        assert out == ""
        assert error.count("\n") == 1 and error.endswith("\n"), error
        assert not warned, f"more lines on stderr: {warned[0].message}"
        for word in words:
            assert word in error
        assert contents() == before
    return check


# ---- values ----------------------------------------------------------------------------------

@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_is_negative_or_not_finite_or_no_number_is_refused(refused, name):
    for value in ("-1", "nan", "inf", "-inf", "three", "", "0x10", "1,5"):
        refused(f"--{name}='{value}'", f"--{name}", value)
    if COMMON_FIELDS[name].type is int:
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
            high = field.metadata["high"]
            if high < math.inf:
                refused(f"--{name} {high + 0.001}", f"--{name} {high + 0.001}", f"at most {high}")
        else:
            refused(f"--{name} sideways", f"--{name}", "sideways", *field.metadata["choices"])


@pytest.mark.parametrize("name", ABOVE_ZERO)
def test_zero_is_refused_where_it_makes_no_sense(refused, name):
    refused(f"--{name} 0", f"--{name} 0", "at least")


@every_script
def test_passes_over_the_batch_are_at_least_one(script, refused):
    if "num_iterations" in own_fields(script):
        refused("--num_iterations 0", "--num_iterations 0", "at least 1")


@every_script
def test_a_group_of_one_is_refused_because_it_is_no_group(refused):
    refused("--num_generations 1", "--num_generations 1", "at least 2", "one alone has no group")


@pytest.mark.parametrize("text", [
    "1", "0-5", "9-3", "x", "3-", "3-7-9", "2.5", "100", "3-100", "\u0663"])
def test_a_number_of_operands_is_a_number_from_two_on_or_a_range_that_goes_up(
        script, refused, text):
    refused(f"--operands '{text}'", f"--operands {text}", "from 2 to 99", "range")
    with pytest.raises(ValueError, match="must be a number"):
        common.Arithmetic(script.Config(operands=text), script.verify)


@pytest.mark.parametrize("numbers", ["9-3", "x", "1", "3-", "100"])
def test_the_numbers_of_countdown_are_read_as_operands_are(refused, numbers):
    flags = f"--task countdown --operands 5 --numbers {numbers}"
    refused(flags, f"--numbers {numbers}", "from 2 to 99", "range")


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_between_quotes_is_refused(refused, name):
    """As of an unset shell variable: --resume_from_checkpoint "$RUN" must not begin a new run."""
    refused(f"--{name} ''", f"--{name}")


@pytest.mark.parametrize("name", WITH_CHOICES)
def test_a_word_that_is_no_choice_is_refused_with_the_choices(refused, name):
    choices = COMMON_FIELDS[name].metadata["choices"]
    refused(f"--{name} sideways", f"--{name}", "sideways", *choices)


@every_script
def test_a_yes_or_no_flag_is_true_or_false_and_nothing_else(script, refused):
    names = [name for name, field in all_fields(script).items() if field.type is bool]
    assert {"curriculum", "mask_tool_tokens"} <= set(names)
    for name in names:
        for value in ("maybe", "yes", "no", "1", "0", "''"):
            refused(f"--{name} {value}", f"--{name}", value.strip("'"))
            refused(f"--{name}={value}", f"--{name}", value.strip("'"))


@every_script
@pytest.mark.parametrize("argv", [
    "--learning_rat 1", "--max_step 3", "--lr=1", "stray", "-x", "--prompt 1+2=",
    "--fused_linear on", "--curriculum true false"])
def test_a_flag_that_is_not_there_is_refused_and_none_is_guessed_from_its_beginning(
        refused, argv):
    word = "false" if argv.endswith("false") else argv.split()[0]
    refused(argv, word, "--help")


def test_a_flag_without_its_value_is_refused(refused):
    refused("--seed", "--seed", "--help")


def test_cuda_is_refused_where_there_is_none(refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused("--device cuda", "--device cuda", "one of cpu")


# ---- flags that do not go together, or do nothing --------------------------------------------

@pytest.mark.parametrize("argv, words", [
    ("--hidden_size 30 --num_attention_heads 4", ["--hidden_size 30", "multiple"]),
    ("--hidden_size 12 --num_attention_heads 4", ["--hidden_size 12", "multiple"]),  # odd heads
    ("--num_attention_heads 2 --num_key_value_heads 4", ["--num_key_value_heads 4", "2"]),
    ("--overlong_buffer 100", ["--overlong_buffer 100", "longer"]),
    ("--delta 1.28", ["--delta 1.28", "above 1 + epsilon_high 0.28"]),
    ("--scale_rewards mean --overlong_buffer 3", ["--scale_rewards mean", "negative"]),
    ("--scale_rewards mean --reward accuracy+format", ["--scale_rewards mean", "negative"]),
    ("--epsilon_high 2 --delta 2.9", ["--delta 2.9", "above 1 + epsilon_high 2"]),
    ("--num_mini_batches 3", ["--num_mini_batches 3", "2 groups"])])    # which are never torn apart
def test_two_values_that_do_not_go_together_are_refused(refused, argv, words):
    refused(argv, *words)


# What else is needed for some flags of ppo.py: another value of the flag that they need.
OTHERWISE = {"trust_region clip": "trpo", "trust_region clip|penalty": "trpo"}
NEEDY_FLAGS = {"reinforce": 2, "ppo": 10, "grpo": 4, "gspo": 4, "dpo": 3}
VALUES = {"kl_estimator": "k2", "importance_sampling_correction": "mask", "cold_start": 3,
          "entropy_decay_steps": 3}


@every_script
def test_a_flag_that_does_nothing_without_another_is_refused(script, refused):
    fields = all_fields(script)
    needy = {name: field for name, field in fields.items() if field.metadata["needs"]}
    assert len(needy) == NEEDY_FLAGS[script.__name__]
    for name, field in needy.items():
        given = f"--{name} {VALUES.get(name, 0.49)}"
        needs = field.metadata["needs"]
        flag, _, wanted = needs.partition(" ")
        without = ""
        if wanted and fields[flag].default in wanted.split("|"):    # there unless changed
            without = f"--{flag} {OTHERWISE.get(needs) or other_value(fields[flag])}"
        refused(f"{given} {without}", given, f"does nothing without --{needs}")
        some_value = {bool: "true", int: "1"}.get(fields[flag].type, "0.1")
        for with_it in (wanted or some_value).split("|"):
            common.parse_flags(script.Config, f"{given} --{flag} {with_it}".split())


# What does nothing with another flag, in which script, and what the line says of the other one.
IDLE = [
    ("grpo gspo", "--epsilon 0.2", "--loss_type cispo"),
    ("grpo gspo", "--epsilon 0.1", "--loss_type sapo"),
    ("grpo gspo", "--epsilon_high 0.28", "--loss_type sapo"),
    ("grpo gspo", "--delta 3.0", "--loss_type cispo"),
    ("grpo gspo", "--delta 0.0", "--loss_type sapo"),
    ("grpo gspo", "--importance_sampling_cap 2.0",
     "--importance_sampling_correction none --sampler_lag 4"),
    ("reinforce ppo grpo gspo", "--entropy_decay_steps 5", "--entropy_coef 0"),
    ("ppo", "--target_kl 0.01", "--trust_region trpo"),
    ("ppo", "--epsilon 0.2", "--trust_region trpo"),
    ("ppo", "--epsilon_high 0.3", "--trust_region trpo"),
    ("ppo", "--epsilon 0.1", "--trust_region penalty"),
    ("ppo", "--epsilon_high 0.2", "--trust_region penalty"),
    ("ppo", "--lam 0.95", "--length_adaptive"),
    ("ppo", "--learning_rate 0.0005", "--trust_region trpo"),
    ("ppo", "--warmup_steps 3", "--trust_region trpo"),
    ("ppo", "--weight_decay 0.1", "--trust_region trpo"),
    ("reinforce", "--reward accuracy+format", "--method rejection"),
    ("reinforce", "--reward accuracy", "--method rejection"),
    ("reinforce", "--reward accuracy", "--teacher run"),
    ("reinforce", "--method reinforce", "--teacher run"),
    ("dpo", "--average_logps True", "--loss_type simpo"),
    ("dpo", "--online True", "--pairs file"),
    ("dpo", "--save_pairs False", "--pairs file"),
    ("dpo", "--reward accuracy", "--pairs file"),
    ("dpo", "--dynamic_sampling 8", "--pairs file"),
    ("dpo", "--curriculum True", "--pairs file"),
    ("dpo", "--stop_at 0.98", "--pairs file"),
    (" ".join(SCRIPTS), "--base_steps 1000", "--init_from run"),
    (" ".join(SCRIPTS), "--textbook_share 0.5", "--init_from run"),
    ("grpo", "--textbook_share 0.5", "--init_from run --cold_start 3"),
    ("grpo", "--base_batch_size 16", "--init_from run"),
    ("grpo", "--base_learning_rate 0.1", "--init_from run")]
IDLE_IN_EACH = [(script, given, other) for scripts, given, other in IDLE
                for script in scripts.split()]


@pytest.mark.parametrize("script, given, other", IDLE_IN_EACH, indirect=["script"],
                         ids=lambda value: str(value).replace(" ", "="))
def test_a_flag_that_does_nothing_with_another_is_refused_even_with_its_default(
        refused, given, other):
    refused(f"{given} {other}", f"error: {given}: does nothing with", other.split()[0])
    refused(f"{other} {given}", f"error: {given}: does nothing with", other.split()[0])


def test_every_flag_that_a_script_says_does_nothing_with_another_is_in_the_list_above():
    for name in SCRIPTS:
        idle = common.BASE_FLAGS_IDLE | importlib.import_module(name).Config.does_nothing_with
        found = {(flag, condition.split()[0]) for flag, conditions in idle.items()
                 for condition in conditions.split(", ")}
        listed = {(given[2:].split()[0], other[2:].split()[0])
                  for script, given, other in IDLE_IN_EACH if script == name}
        assert found <= listed


@scripts("ppo")
@pytest.mark.parametrize("value", ["-1", "-0.5", "-1.0", "nan"])
def test_no_lambda_of_the_critic_is_below_zero(refused, value):
    """What says "that of the advantages" is to leave it out."""
    refused(f"--critic_lam {value}", f"--critic_lam {float(value)}", "at least 0, at most 1")


@pytest.mark.parametrize("script, flags", [
    ("grpo", "--loss_type cispo --epsilon_high 0.3"), ("gspo", "--loss_type cispo"),
    ("grpo", "--loss_type dapo --epsilon 0.1 --epsilon_high 0.3"), ("grpo", "--loss_type sapo"),
    ("grpo", "--entropy_coef 0.1 --entropy_decay_steps 5"), ("grpo", "--entropy_coef 0.1"),
    ("ppo", "--trust_region trpo --critic_learning_rate 0.1 --num_iterations 2 --lam 0.5"),
    ("ppo", "--trust_region trpo --entropy_coef 0.1 --entropy_decay_steps 2 --max_grad_norm 2"),
    ("ppo", "--target_kl 0.1"), ("ppo", "--trust_region penalty --target_kl 0.1"),
    ("ppo", "--trust_region penalty --learning_rate 0.1 --weight_decay 0.1 --warmup_steps 2"),
    ("ppo", "--length_adaptive false --lam 0.5"), ("ppo", "--length_adaptive --critic_lam 0.5"),
    ("ppo", "--length_adaptive --alpha 0.5"), ("ppo", "--critic_lam 0"), ("ppo", "--lam 1"),
    ("reinforce", "--method rejection --beta 0.1 --baseline rloo --num_iterations 2"),
    ("reinforce", "--method reinforce --reward accuracy+format"),
    ("grpo", "--init_from run --cold_start 3 --base_learning_rate 0.1 --base_batch_size 16"),
    ("grpo", "--init_from run --cold_start 3 --base_seed 1"),
    ("grpo", "--base_steps 3 --textbook_share 0.5"), ("grpo", "--operands 2-3 --curriculum"),
    ("grpo", "--task arithmetic,lookup --curriculum"), ("grpo", "--curriculum false")],
    indirect=["script"])
def test_flags_that_do_something_with_each_other_are_accepted(script, flags):
    cfg = common.parse_flags(script.Config, flags.split())
    common.load_task(cfg, script.verify)


def test_the_recipes_of_the_matrix_have_no_flag_that_does_nothing():
    text = (ROOT / "docs/methods.md").read_text()
    recipes = re.findall(r"^\| [^|]+ \| `python (\w+)\.py([^`]*)` \|", text, re.MULTILINE)
    assert len(recipes) >= 26 and {name for name, _ in recipes} == set(SCRIPTS)
    for name, flags in recipes:
        script = importlib.import_module(name)
        common.load_task(common.parse_flags(script.Config, flags.split()), script.verify)


@pytest.mark.parametrize("flags", [
    "", "--operands 3", "--operands 3-3", "--task gridworld --operands 5",
    "--task arithmetic,arithmetic"])
def test_a_curriculum_is_refused_where_all_problems_are_of_one_difficulty(refused, flags):
    refused(f"{flags} --curriculum", "--curriculum True", "one difficulty", "--operands 3-7")


JUDGED = [("--stop_at 0.5", SCRIPTS), ("--method rejection", ["reinforce"]),
          ("--nll_coef 0.1", ["ppo"]), ("--curriculum", SCRIPTS)]


@pytest.mark.parametrize("script, given", [
    (script, given) for given, names in JUDGED for script in names], indirect=["script"])
def test_what_looks_at_right_answers_is_refused_where_luck_decides(script, refused, given):
    gridworld = "--task gridworld --operands 5"
    refused(f"{gridworld} --slip 0.5 {given}", given)
    if given != "--curriculum":
        cfg = common.parse_flags(script.Config, f"{gridworld} {given}".split())
        common.load_task(cfg, script.verify)


@pytest.mark.parametrize("flags", ["--numbers 9-3", "--numbers 3", "--slip 0.5"])
def test_a_flag_of_another_task_is_refused(refused, flags):
    refused(flags, flags, "not for arithmetic")


@pytest.mark.parametrize("task", ["arithmetic", "countdown --operands 5"])
def test_to_learn_what_tools_say_is_refused_where_there_are_no_tools(refused, task):
    refused(f"--task {task} --mask_tool_tokens false", "--mask_tool_tokens", "no tools")


# ---- tasks and rewards -----------------------------------------------------------------------

@pytest.mark.parametrize("task, name", [
    ("chess", "chess"), ("../grpo", "../grpo"), ("common", "common"), ("a.b", "a.b"),
    ("arithmetic2", "arithmetic2"), ("arithmetic,chess", "chess"), ("lookup,,lookup", ""),
    (",", "")])
def test_a_task_that_is_not_there_is_refused_with_the_place_where_it_would_be(
        refused, task, name):
    refused(f"--task '{task}'", f"--task {task}:", str(Path("tasks", f"{name}.py")),
            "arithmetic, countdown, gridworld, lookup")


@pytest.mark.parametrize("task", ["mix", "__init__", "rewards", "preferences", "arithmetic,mix"])
def test_a_file_of_tasks_that_is_no_task_is_refused_with_what_it_lacks(refused, task):
    refused(f"--task {task}", f"--task {task}:", "no task", "common.Task")


def test_a_reward_that_is_not_there_or_not_for_the_task_is_refused(refused):
    refused("--reward nonsense", "--reward nonsense", "accuracy", "format")
    refused("--reward accuracy+nonsense", "--reward accuracy+nonsense", "'nonsense'")
    refused("--reward accuracy+", "--reward accuracy+", "format")
    refused("--reward fine", "--reward fine", "arithmetic", "lookup")


# ---- folders ---------------------------------------------------------------------------------

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


def test_an_empty_run_name_does_not_begin_a_new_run(refused):
    refused("--resume_from_checkpoint '' --max_steps 2", "--resume_from_checkpoint")


def test_init_from_a_policy_of_another_shape_is_refused(refused, run):
    """Of other heads, too, though the weights may be as large."""
    other_heads = "--num_attention_heads 4 --num_key_value_heads 2"
    for flags in ("--hidden_size 32", "--num_hidden_layers 2", "--intermediate_size 32",
                  other_heads):
        refused(f"--init_from run {flags}", "--init_from run", "shape")


def test_a_resumed_run_has_its_weights_and_cannot_begin_from_others(refused, run):
    refused("--resume_from_checkpoint run --init_from run", "--init_from run")


@every_script
def test_a_resumed_run_cannot_become_another_run(script, refused, run):
    stored = json.loads((run / "config.json").read_text())["config"]
    for name, field in all_fields(script).items():
        if name not in FREE:
            given = f"--{name} {other_value(field)}"
            refused(f"--resume_from_checkpoint run {given}", given, str(stored[name]),
                    "--init_from run")


@every_script
def test_a_run_of_another_script_is_refused(script, refused, finished):
    for name in SCRIPTS:
        if name == script.__name__:
            continue
        resume = f"--resume_from_checkpoint {name}"
        shutil.copytree(finished(importlib.import_module(name)), name)
        refused(resume, resume)
        # also if it has all the flags that this one has
        path = Path(name, "config.json")
        saved = json.loads(path.read_text())
        shared = {flag: saved["config"][flag] for flag in COMMON_FIELDS}
        flags = dataclasses.asdict(script.Config(**shared))
        path.write_text(json.dumps(saved | {"config": flags}))
        refused(resume, resume, f"{script.__name__}.py")


# ---- damage ----------------------------------------------------------------------------------

def config_with(saved, **flags):
    """The text of config.json with other flags."""
    return json.dumps(saved | {"config": saved["config"] | flags})


def config_without(saved, name):
    flags = {flag: value for flag, value in saved["config"].items() if flag != name}
    return json.dumps(saved | {"config": flags})


DAMAGED_CONFIGS = {
    "empty": lambda saved: "",
    "cut off": lambda saved: json.dumps(saved)[:-40],
    "no UTF-8": lambda saved: "\udcff\udcfe{",
    "a list": lambda saved: "[]",
    "null": lambda saved: "null",
    "without flags": lambda saved: json.dumps({"script": saved["script"]}),
    "without a script": lambda saved: json.dumps({"config": saved["config"]}),
    "with flags that are a list": lambda saved: json.dumps(saved | {"config": [1, 2]}),
    "with a flag too few": lambda saved: config_without(saved, "beta"),
    "with a flag too many": lambda saved: config_with(saved, gamma=1),
    "with a number that is text": lambda saved: config_with(saved, num_prompts="two"),
    "with a yes that is text": lambda saved: config_with(saved, curriculum="yes"),
    "with a number that cannot work": lambda saved: config_with(saved, temperature=-1.0),
    "with a word that is no choice": lambda saved: config_with(saved, loss_type="sideways"),
    "with a task that is not there": lambda saved: config_with(saved, task="chess")}


@pytest.mark.parametrize("damage", DAMAGED_CONFIGS)
def test_a_damaged_config_is_refused(refused, run, damage):
    path = run / "config.json"
    text = DAMAGED_CONFIGS[damage](json.loads(path.read_text()))
    path.write_bytes(text.encode(errors="surrogateescape"))
    refused("--resume_from_checkpoint run", "--")


def test_a_run_with_other_flags_than_there_are_now_is_named_as_such(refused, run):
    path = run / "config.json"
    path.write_text(config_without(json.loads(path.read_text()), "beta"))
    refused("--resume_from_checkpoint run", "its flags are not those", "--init_from run")


class Trap:
    """Pickled, this is code that runs when it is loaded."""

    def __reduce__(self):
        return Path.touch, (Path("trapped"),)


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])


def flip_one_bit(path):
    """In the middle of the longest stretch of weights."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 64
    path.write_bytes(data)


def make_a_folder(path):
    path.unlink()
    path.mkdir()


OTHER_WEIGHTS = {"embed.weight": torch.ones(2, 2)}
DAMAGES = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut off": cut_in_half,
    "one bit flipped": flip_one_bit,
    "random bytes": lambda path: path.write_bytes(bytes(i * i % 251 for i in range(5000))),
    "text": lambda path: path.write_text("hello"),
    "a folder": make_a_folder,
    "a pickle with code": lambda path: path.write_bytes(pickle.dumps(Trap())),
    "a checkpoint with code": lambda path: torch.save({"policy": {}, "state": Trap()}, path),
    "a list": lambda path: torch.save([1, 2, 3], path),
    "something else": lambda path: torch.save({"epoch": torch.ones(3)}, path),
    "the weights of another model": lambda path: torch.save(
        {"policy": OTHER_WEIGHTS} | OTHER_WEIGHTS, path)}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("argv", ["--init_from run", "--resume_from_checkpoint run"])
def test_a_damaged_checkpoint_is_refused_and_no_code_in_it_runs(
        script, refused, run, argv, damage):
    DAMAGES[damage](run / "checkpoint.pt")
    if damage == "missing" and argv == "--resume_from_checkpoint run":
        script.main(argv.split())           # killed before the first checkpoint: it starts over
        assert (run / "checkpoint.pt").exists()
    else:
        refused(argv, argv, str(run / "checkpoint.pt"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_base_is_refused_and_no_code_in_it_runs(refused, run, damage):
    DAMAGES[damage](run / "base.pt")
    refused("--resume_from_checkpoint run", "--resume_from_checkpoint run", str(run / "base.pt"))


def test_a_checkpoint_that_is_only_a_policy_can_be_begun_from_but_not_resumed(
        script, refused, run):
    path = run / "checkpoint.pt"
    torch.save({"policy": torch.load(path, weights_only=True)["policy"]}, path)
    refused("--resume_from_checkpoint run", "--resume_from_checkpoint run", "--init_from run",
            str(path))
    script.main(arguments(begun_from("run", INSTANT)))


# ---- from a shell ----------------------------------------------------------------------------

@pytest.mark.parametrize("argv, words", [
    ("--num_generations 1", "no group"), ("--resume_from_checkpoint nowhere", "nowhere")])
def test_from_a_shell_bad_input_is_one_line_and_exit_code_two(warm_python, argv, words):
    done = warm_python.run(ROOT / "grpo.py", *argv.split())
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert words in done.stderr
    assert contents() == {}
