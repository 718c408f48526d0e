"""README.md: its commands run, its tables agree with the code, its numbers with what make targets wrote."""
import ast
import contextlib
import dataclasses
import importlib
import io
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS

import common
import tasks
from tools import report

README = (ROOT / "README.md").read_text()
GENERATED = re.compile(r"<!-- made by make (\w+): (\w+) -->\n(.*?)<!-- end of (\w+) -->\n", re.S)
PROSE = GENERATED.sub("", README)                       # what somebody has written
MODULES = {name: importlib.import_module(name) for name in SCRIPTS}
TASKS = ["arithmetic", *sorted(path.stem for path in (ROOT / "tasks").glob("*.py")
                               if hasattr(importlib.import_module(f"tasks.{path.stem}"), "sample"))]
RUN = "runs/grpo-arithmetic-s0"                         # the run that the README's commands go on with
# So little that a command takes a moment; what a command itself says comes after it and counts.
TINY = shlex.split("""
    --device cpu --base_steps 2 --base_batch_size 4 --hidden_size 16 --num_attention_heads 2
    --num_hidden_layers 1 --intermediate_size 16 --num_prompts 2 --num_generations 4
    --max_completion_length 8 --num_eval_problems 8 --num_eval_samples 2 --eval_steps 1""")
# A base that is right now and then: else nobody votes, and a reward model has nothing to compare.
ANSWERS = shlex.split("""
    --operands 2 --textbook 0 --base_steps 200 --base_batch_size 16 --hidden_size 32 --intermediate_size 32
    --max_completion_length 12 --num_prompts 8 --num_generations 8""")
# Commands that are no runs of a script: executed by tests/test_copying.py, by a test below, by nobody here.
COPYING = {"cp grpo.py mine.py", "python mine.py", "python grpo.py --task sorting"}
DRAW = "python -m tools.report "
ELSEWHERE = ("trl ", "python3 -m verl.", "pip install ", "python grpo.py --device mps")


# ---- reading it -------------------------------------------------------------------------------------------


def section(title):
    """What stands between a heading and the next."""
    return re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^##? |\Z)", README, re.S | re.M)[1]


def cells(line):
    """The cells of a line of a table; \\| is no border."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def table(title):
    """Of the first table of a section: {heading: cell} for each row."""
    lines = re.search(r"(?:^\|.*\n)+", section(title), re.M)[0].splitlines()
    return [dict(zip(cells(lines[0]), cells(line))) for line in lines[2:]]


def commands():
    """Every command: the lines of the blocks that name no language, and what stands in the text."""
    blocks = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
    plain = [block for language, block in blocks.findall(PROSE) if not language]
    lines = [line.split("  #")[0].strip() for block in plain for line in block.splitlines()]
    inline = re.findall(r"`((?:python3?|make|trl|cp|pip) [^`]*)`", blocks.sub("", PROSE))
    return list(dict.fromkeys(line for line in lines + inline if line))


def is_run(command):
    """Whether a command is a run of a script that can be made here."""
    return bool(re.match(r"python \w+\.py( |$)", command)) and (
        command not in COPYING and not command.startswith(ELSEWHERE))


pytestmark = pytest.mark.usefixtures("no_picture")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which the run that the README speaks of has been made, as small as can be."""
    folder = tmp_path_factory.mktemp("readme")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.chdir(folder)
        patch.setitem(sys.modules, "tools.report", None)
        MODULES["grpo"].main([*TINY, "--max_steps", "2"])
    return folder


def execute(command, steps=2):
    """Run `python SCRIPT.py FLAGS` in this process, in small, for two steps at most. -> the summary"""
    script, *flags = shlex.split(command)[1:]
    given = [] if "--resume_from_checkpoint" in flags else TINY + ANSWERS * ("model" in flags)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        summary = MODULES[script.removesuffix(".py")].main(
            [*given, *flags, *([] if "--prompt" in flags else ["--max_steps", str(steps)])])
    return summary or said.getvalue()


# ---- commands ---------------------------------------------------------------------------------------------


def test_every_command_is_executed_by_a_test_or_is_a_make_target():
    targets = re.search(r"\.PHONY: (.*)", (ROOT / "Makefile").read_text())[1].split()
    for command in commands():
        executed = is_run(command) or command in COPYING or command.startswith((*ELSEWHERE, DRAW))
        executed = executed or command.startswith("make ") and command.split()[1] in targets
        assert executed, f"nothing executes `{command}`"


@pytest.mark.parametrize("command", [command for command in commands() if is_run(command)])
def test_a_command_runs(command, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if RUN in command:
        shutil.copytree(folder / RUN, RUN)
    assert execute(command)


def test_the_command_that_draws_a_report_again_draws_it(folder, tmp_path, monkeypatch, capsys):
    (command,) = (command for command in commands() if command.startswith(DRAW))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder / RUN, RUN)
    report.main(shlex.split(command)[3:])
    assert Path(RUN, "report.html").is_file()


def test_commands_that_no_test_runs_are_said_to_be_such():
    said = section("From here to a real model").split("so no test runs them:")[1]
    long = [command for command in commands() if re.match("trl .* --dataset_name|python3 -m verl", command)]
    assert len(long) == 2 and all(command in said for command in long)
    assert PROSE.count("nobody has run it yet") == 4


# ---- tables -----------------------------------------------------------------------------------------------


def first_table():
    lines = re.search(r"(?:^\|.*\n)+", README, re.M)[0].splitlines()
    return [dict(zip(cells(lines[0]), cells(line))) for line in lines[2:]]


def test_the_first_screen_has_all_it_should():
    screen = README.split("\n## ")[0]
    assert len(screen.splitlines()) <= 50
    assert "**The loss is about 0 on-policy by construction; watch the reward.**" in screen
    assert "docs/compare.png" in screen and "\nmake run " in screen and "\nmake test " in screen
    assert re.findall(r"\[(\w+)\.py\]\(\1\.py\)", screen) == SCRIPTS


@pytest.mark.parametrize("row", first_table(), ids=lambda row: row["file"])
def test_a_script_has_as_many_lines_as_the_readme_says_and_an_idea_of_six_words(row):
    name = re.match(r"\[(.*)\]", row["file"])[1]
    count = len((ROOT / name).read_text().splitlines())
    assert int(row["lines"]) == count
    assert len(row["idea"].split()) == 6


def bare(text):
    return re.sub(r"\s+", "", text)


def statements(script):
    """The equations of a docstring: number -> the line that states it, without spaces."""
    return {int(n): bare(line) for line, n in re.findall(r"^(.*)\((\d+)\)\s*$", script.__doc__, re.M)}


def tags(script):
    """Where the equations of a script are computed: number -> names of functions with that tag."""
    source = Path(script.__file__).read_text()
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        for line in lines[node.lineno - 1:node.end_lineno] if isinstance(node, ast.FunctionDef) else ():
            for n in re.findall(r"eq\. \((\d+)\)", line):
                found.setdefault(int(n), set()).add(node.name)
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_map_has_every_equation_with_the_function_that_computes_it(name):
    rows = [row for row in table("From math to code") if row[name]]
    found = {}
    for row in rows:
        found.setdefault(int(row[name]), set()).add(row["function"])
    assert found == tags(MODULES[name])
    assert found.keys() == statements(MODULES[name]).keys()


@pytest.mark.parametrize("row", table("From math to code"), ids=lambda row: row["formula"])
def test_a_formula_of_the_map_is_that_of_a_docstring(row):
    stated = {name: statements(MODULES[name])[int(row[name])] for name in SCRIPTS if row[name]}
    formula = bare(row["formula"].strip("`"))
    assert any(formula in line for line in stated.values()), stated


@pytest.mark.parametrize("row", table("The matrix of methods"), ids=lambda row: row["recipe"])
def test_the_matrix_says_how_a_recipe_averages_and_where_its_kl_is(row):
    script, *flags = shlex.split(row["command"].strip("`"))[1:]
    module = MODULES[script.removesuffix(".py")]
    cfg = module.Config.parse([*flags, "--device", "cpu"])
    how = {"reinforce.py": "sequence_sum", "ppo.py": "token_mean", "dpo.py": "pairs"}.get(script)
    how = how or module.LOSS_TYPES[cfg.loss_type][1]
    said = {"sequence_sum": ("sums of answers", "right answers"), "token_mean": ("tokens",),
            "sequence_mean": ("each answer",), "constant": ("a constant",), "pairs": ("pairs",),
            "micro_batch_mean": ("micro-batch",)}
    assert row["averages over"] in said[how]
    place = "in the reward" if script in ("reinforce.py", "ppo.py") else "in the loss"
    assert row["KL to the base"].startswith(place) if cfg.beta else not row["KL to the base"]
    if script in ("grpo.py", "gspo.py"):
        assert ("/ std" in row["baseline"]) == (cfg.scale_rewards == "group")
        assert row["ratio of"].startswith("answer" if script == "gspo.py" else "token")


def test_the_matrix_has_every_published_recipe():
    recipes = {row["recipe"] for row in table("The matrix of methods")}
    assert {"REINFORCE", "RLOO", "PPO", "GRPO", "Dr. GRPO", "DAPO", "GSPO", "CISPO", "SAPO", "VAPO", "TRPO",
            "DPO", "IPO", "cDPO", "rejection sampling"} <= recipes
    found = re.findall(r"--loss_type (\w+)", section("The matrix of methods"))
    assert {*found, "grpo"} == {*MODULES["grpo"].LOSS_TYPES, "ipo", "hinge"}


def flags():
    """The flags of all scripts."""
    return {f.name for module in MODULES.values() for f in dataclasses.fields(module.Config)}


def test_every_flag_that_the_readme_names_is_there():
    for name in re.findall(r"(?<![\w-])--(\w+)", PROSE):
        assert name in flags() | {"model_name_or_path", "dataset_name", "reward_funcs", "help"}, name
    for row in table("Flags: ours, TRL's, verl's"):
        for name in re.sub(r"\(.*\)", "", row["ours"]).split(", "):
            assert name.split()[0] in flags() | {"dapo", "dr_grpo", "sapo", "k2", "k3"}, name


def test_the_rewards_of_the_readme_are_those_of_the_table_in_the_code():
    rows = re.search(r"\| row \| reward \|\n\|.*\n((?:\|.*\n)+)", README)[1].splitlines()
    assert [cells(row)[0] for row in rows] == [*tasks.REWARDS, "model"]


def test_every_task_has_its_paragraph():
    described = re.findall(r"^- \*\*(\w+)\*\*", section("Tasks"), re.M)
    assert {"arithmetic", "countdown", "gridworld", "lookup"} <= set(described) <= set(TASKS)   # + one's own


# ---- metrics ----------------------------------------------------------------------------------------------


def glossary():
    """The patterns of the glossary: a word in capitals, like TASK, stands for anything."""
    found = []
    for row in table("What the metrics mean"):
        for name in re.findall(r"`([^`]+)`", row["metric"]):
            if name.startswith("..."):
                name = found[-1].rpartition("/")[0] + name[3:]
            found.append(name)
    return found


def explained(key, names):
    return [name for name in names if re.fullmatch(re.sub(r"\\?[A-Z]+", r"[\\w/-]+", re.escape(name)), key)]


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Every key of metrics.jsonl and of the scores in summary.json that any script logs for any task."""
    folder, keys = tmp_path_factory.mktemp("metrics"), set()
    runs = [f"python {name}.py --task {task}" for name in SCRIPTS for task in TASKS]
    runs += ["python ppo.py --trust_region trpo", "python grpo.py --operands 2-3 --reward accuracy+format",
             shlex.join(["python", "grpo.py", *ANSWERS])]
    runs += [f"python grpo.py --task {','.join(TASKS)} --num_prompts 12"] * (len(TASKS) > 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setitem(sys.modules, "tools.report", None)
        for number, command in enumerate(runs):
            execute(f"{command} --output_dir {number}", steps=1)
            lines = [json.loads(line) for line in Path(str(number), "metrics.jsonl").read_text().splitlines()]
            summary = json.loads(Path(str(number), "summary.json").read_text())
            keys |= {key.removeprefix("eval/") for line in lines for key in line} | set(summary["trained"])
    return keys


def test_every_metric_has_its_line(logged):
    missing = sorted(key for key in logged if not explained(key, glossary()))
    assert not missing


def test_every_line_of_the_glossary_is_of_a_metric(logged):
    unused = [name for name in glossary() if not any(explained(key, [name]) for key in logged)]
    assert not unused


def test_the_symptoms_name_metrics_and_every_warning_has_its_symptom():
    rows = table("When it does not work")
    names = {name for row in rows for name in re.findall(r"`([^`]+)`", row["metric"])}
    for name in names:
        assert explained(name.removeprefix("eval/"), glossary()), name
    knobs = " ".join(row["knob"] for row in rows)
    for _, message in common.tools.WARNINGS:
        for flag in re.findall(r"--\w+", message):
            assert flag in knobs, f"{message}: has no line"


# ---- numbers and pictures ---------------------------------------------------------------------------------


def test_generated_blocks_are_closed_and_made_by_make_targets():
    targets = re.search(r"\.PHONY: (.*)", (ROOT / "Makefile").read_text())[1].split()
    found = [(target, name, end) for target, name, _, end in GENERATED.findall(README)]
    assert all(target in targets and name == end for target, name, end in found)
    assert README.count("<!-- made by") == README.count("<!-- end of") == len(found)
    assert sorted(name for _, name, _ in found) == [
        "compare", "example", "passk", "r1", "rlhf", "speed", "table", "tasks", "zero"]


def test_every_picture_is_there():
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert pictures and not [name for name in pictures if not (ROOT / name).is_file()]


def test_every_link_leads_somewhere():
    for target in re.findall(r"(?<!!)\[[^\]]+\]\(([^)]+)\)", PROSE):
        if target.startswith("#"):
            titles = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
                      for title in re.findall(r"^#+ (.*)", README, re.M)]
            assert target[1:] in titles
        else:
            assert (ROOT / target).exists(), target


@pytest.mark.parametrize("claim, holds", [
    ("in about a minute", lambda base, trained, run: run["seconds_total"] <= 80),
    ("one or two times in ten", lambda base, trained, run: 0.08 <= base["greedy"] <= 0.22),
    ("nearly\nalways right", lambda base, trained, run: base["accuracy_given_think"] >= 0.95),
    ("mostly blurts", lambda base, trained, run: base["think_share"] <= 0.4),
    ("it nearly always thinks", lambda base, trained, run: trained["think_share"] >= 0.95),
    ("greedy accuracy 0.94 or more", lambda base, trained, run: trained["greedy"] >= 0.94),
])
def test_what_the_readme_says_in_words_was_measured(claim, holds):
    assert bare(claim) in bare(PROSE)
    runs = json.loads((ROOT / "docs/seeds.json").read_text())["seeds"]
    assert all(holds(run["base"], run["trained"], run) for run in runs.values())


def test_the_versions_said_to_be_tested_are_those_of_the_requirements():
    pinned = re.search(r"^torch==(\d+\.\d+)", (ROOT / "requirements.txt").read_text(), re.M)[1]
    assert f"torch {pinned} on a CPU" in section("Contributing")
