"""README.md, CONTRIBUTING.md and the pages in docs/: their commands run, their tables agree with
the code, their numbers with what make targets wrote, and their links lead somewhere."""
import ast
import contextlib
import dataclasses
import importlib
import io
import itertools
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import test_density
import test_sync
import torch
import torch.nn.functional as F
from conftest import ROOT, SCRIPTS

import common
from lab import entry
from tasks import rewards
from tools import ask, console, report

GENERATED = re.compile(
    r"<!-- made by make ([\w-]+): ([\w-]+) -->\n(.*?)<!-- end of ([\w-]+) -->\n", re.S)
MODULES = {name: importlib.import_module(name) for name in SCRIPTS}
RUN = "runs/grpo-arithmetic-s0"                         # with which the commands go on


def read_pages():
    """Name -> text of each page; docs/gpu-DEVICE.md is a report of make gpu."""
    found = {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}
    for path in sorted(ROOT.glob("docs/*.md")):
        if not path.name.startswith("gpu-"):
            found[f"docs/{path.name}"] = path.read_text()
    return found


PAGES = read_pages()
README = PAGES["README.md"]
PROSE = {name: GENERATED.sub("", text) for name, text in PAGES.items()}     # what somebody wrote
ALL_PROSE = "\n".join(PROSE.values())
LANGUAGE_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
MOST_LINES = 180                                        # of README.md

# So little that a command takes a moment; what a command itself says comes after it and counts.
TINY = shlex.split("""
    --device cpu --hidden_size 16 --num_attention_heads 2
    --num_hidden_layers 1 --intermediate_size 16 --num_prompts 2 --num_generations 4
    --max_completion_length 8 --num_eval_problems 8 --num_eval_samples 2 --eval_steps 1""")
QUICK_BASE = ["--base_steps", "2", "--base_batch_size", "4"]     # not with --init_from
# A base that is right now and then: else nobody votes, and a reward model has nothing to compare.
ANSWERS = shlex.split("""
    --operands 2 --textbook_share 0 --base_steps 200 --base_batch_size 16 --hidden_size 32
    --intermediate_size 32 --max_completion_length 12 --num_prompts 8 --num_generations 8""")
# Executed by tests/test_copying.py, by tests below, and by nobody here.
COPYING = {"cp grpo.py mine.py", "python mine.py", "python grpo.py --task sorting"}
DRAW = "python -m tools.report "
ASK = "python -m tools.ask "
ELSEWHERE = ("trl ", "python3 -m verl.", "pip install ", "python grpo.py --device mps",
             "python examples/pretrained.py --model Qwen/", "torchrun ", "until torchrun ")


# ---- reading them ----------------------------------------------------------------------------

def section(page, title):
    """What stands on a page between a heading and the next."""
    heading = rf"^#+ {re.escape(title)}\n(.*?)(?=^##? |\Z)"
    return re.search(heading, PAGES[page], re.S | re.M)[1]


def cells(line):
    """The cells of a line of a table; \\| is no border."""
    parts = re.split(r"(?<!\\)\|", line.strip())[1:-1]
    return [cell.strip().replace("\\|", "|") for cell in parts]


def first_table(text):
    """Of the first table of a text: {heading: cell} for each row."""
    heading, _, *rows = re.search(r"(?:^\|.*\n)+", text, re.M)[0].splitlines()
    return [dict(zip(cells(heading), cells(row))) for row in rows]


def table(page, title):
    """The first table of a section of a page."""
    return first_table(section(page, title))


MATRIX = table("docs/methods.md", "The matrix of methods")
MAP = table("docs/methods.md", "From math to code")
FLAGS = table("docs/flags.md", "Flags: ours, TRL's, verl's")
METRICS = table("docs/metrics.md", "What the metrics mean")
SYMPTOMS = table("docs/metrics.md", "When it does not work")


def bare(text):
    """A text without spaces."""
    return re.sub(r"\s+", "", text)


def commands():
    """Every command of the pages: the lines of the blocks that name no language, and what stands
    in the text."""
    found = []
    for language, block in LANGUAGE_BLOCK.findall(ALL_PROSE):
        if not language:
            found += [line.split("  #")[0].strip() for line in block.splitlines()]
    text = LANGUAGE_BLOCK.sub("", ALL_PROSE)
    found += re.findall(r"`((?:python3?|make|trl|cp|pip) [^`]*)`", text)
    return list(dict.fromkeys(command for command in found if command))


# Executed in this order by tests/test_real_models.py.
THERE_AND_BACK = re.search(r"^```\n(.*?)^```$", section(
    "docs/real-models.md", "There and back, with nothing to download"), re.S | re.M)[1].splitlines()


def is_run(command):
    """Whether a command is a run of a script that can be made here."""
    is_script = re.match(r"python \w+\.py( |$)", command) is not None
    is_elsewhere = command.startswith(ELSEWHERE) or command in [*COPYING, *THERE_AND_BACK]
    return is_script and not is_elsewhere


def make_targets():
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    experiments = [f"lab-{name}" for name in entry.NAMES]
    return re.search(r"\.PHONY: (.*)", makefile)[1].split() + experiments


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which the run that the pages speak of has been made, as small as can be."""
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.chdir(folder)
        patch.setitem(sys.modules, "tools.report", None)
        small = [*TINY, *QUICK_BASE]
        MODULES["grpo"].main([*small, "--max_completion_length", "48", "--max_steps", "2"])
    return folder


def execute(command, steps=2):
    """Run `python SCRIPT.py FLAGS` in this process, in small, for two steps at most. -> summary"""
    script, *flags = shlex.split(command)[1:]
    small = [*TINY, *QUICK_BASE]
    if "--init_from" in flags:
        small = TINY
    if "model" in flags:
        small += ANSWERS
    if "--resume_from_checkpoint" in flags:
        small = []
    main = MODULES[script.removesuffix(".py")].main
    with contextlib.redirect_stdout(io.StringIO()):
        return main([*small, *flags, "--max_steps", str(steps)])


# ---- commands --------------------------------------------------------------------------------

def test_every_command_is_executed_by_a_test_or_is_a_make_target():
    for command in commands():
        is_target = command.startswith("make ") and command.split()[1] in make_targets()
        is_tested = (command in [*COPYING, *THERE_AND_BACK]
                     or command.startswith((DRAW, ASK)))
        is_said_to_be_untested = command.startswith(ELSEWHERE)
        assert is_run(command) or is_target or is_tested or is_said_to_be_untested, (
            f"nothing executes `{command}`")


@pytest.mark.parametrize("command", [command for command in commands() if is_run(command)])
def test_a_command_runs(command, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if RUN in command:
        shutil.copytree(folder / RUN, RUN)
    if "--pairs" in command:
        pairs = Path(shlex.split(command)[-1])
        pairs.parent.mkdir(parents=True)
        pairs.write_text('{"prompt": "(1+2)=", "chosen": "3", "rejected": "4"}\n')
    assert execute(command)


def test_the_command_that_draws_a_report_again_draws_it(folder, tmp_path, monkeypatch, capsys):
    [command] = [command for command in commands() if command.startswith(DRAW)]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder / RUN, RUN)
    report.main(shlex.split(command)[3:])
    assert Path(RUN, "report.html").is_file()


def test_the_command_that_asks_the_policy_gets_an_answer(folder, tmp_path, monkeypatch, capsys):
    [command] = [command for command in commands() if command.startswith(ASK)]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder / RUN, RUN)
    ask.main(shlex.split(command)[3:])
    assert capsys.readouterr().out.strip()


def test_commands_that_no_test_runs_are_said_to_be_such():
    said = section("docs/real-models.md", "The same in TRL and verl")
    said = said.split("so no test runs them:")[1]
    pattern = "trl .* --dataset_name|python3 -m verl"
    long = [command for command in commands() if re.match(pattern, command)]
    assert len(long) == 2
    assert all(command in said for command in long)
    assert README.count("nobody has run it yet") == 4
    said = section("docs/real-models.md", "A pretrained model").partition("```")[0]
    assert "Nobody has run them yet" in said
    assert "Only processes on one CPU have been tried" in " ".join(section(
        "docs/real-models.md", "Several GPUs").split())
    assert bare("**neither CUDA nor MPS has been run yet.**") in bare(PAGES["docs/speed.md"])


# ---- the first page --------------------------------------------------------------------------

def test_the_first_page_is_short_enough_to_be_read_to_its_end():
    assert len(README.splitlines()) <= MOST_LINES
    said = re.search(r"README\.md, which has at most (\d+) lines", PROSE["CONTRIBUTING.md"])
    assert int(said[1]) == MOST_LINES


def test_the_first_screen_has_all_it_should():
    screen = README.split("\n## Run it")[0]
    assert len(screen.splitlines()) <= 25
    assert re.search(r"\]\((.*?)\)", screen)[1] == "docs/play.html"
    assert "docs/learning.svg" in screen
    assert re.findall(r"\[(\w+)\.py\]\(\1\.py\)", screen) == SCRIPTS
    assert re.findall(r"\(docs/read/(\w+)\.html\)", screen) == [*SCRIPTS, "index"]


def test_the_first_page_says_how_to_run_it_and_what_to_watch():
    text = section("README.md", "Run it")
    assert "\nmake run " in text
    assert "\nmake test " in text
    assert "**The loss is about 0 on-policy by construction; watch the reward.**" in text
    assert "docs/compare.png" in text


def test_the_first_page_has_a_line_for_each_other_page():
    rows = table("README.md", "Where to go next")
    pages = [re.match(r"\[(.*)\]\(\1\)$", row["page"])[1] for row in rows]
    others = {*PAGES, "docs/read/index.html", "docs/play.html", "CHANGELOG.md"} - {"README.md"}
    assert sorted(pages) == sorted(others)
    assert all(row["what is in it"] for row in rows)


def test_each_other_page_leads_back_to_the_first():
    for name in PAGES.keys() - {"README.md", "CONTRIBUTING.md"}:
        assert "[Back to the first page](../README.md)" in PAGES[name], name


# ---- tables ----------------------------------------------------------------------------------


@pytest.mark.parametrize("row", first_table(README), ids=lambda row: row["file"])
def test_the_lines_of_lesson_and_script_are_those_the_first_page_says(row):
    name = re.match(r"\[(.*)\]", row["file"])[1]
    source = (ROOT / name).read_text()
    lesson = source.partition(common.MACHINERY)[0]
    assert int(row["lesson, lines"]) == len(lesson.splitlines())
    assert int(row["in all"]) == len(source.splitlines())
    assert len(row["idea"].split()) == 6


def statements(script):
    """The equations of a docstring: number -> the line that states it, without spaces."""
    numbered = re.findall(r"^  (\S.*)\((\d+)\)\s*$", script.__doc__, re.M)
    return {int(number): bare(line) for line, number in numbered}


def tags(script):
    """Where the equations of a script are computed: number -> names of functions with that tag."""
    source = Path(script.__file__).read_text()
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            text = "\n".join(lines[node.lineno - 1:node.end_lineno])
            for number in re.findall(r"eq\. \((\d+)\)", text):
                found.setdefault(int(number), set()).add(node.name)
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_map_has_every_equation_with_the_function_that_computes_it(name):
    found = {}
    for row in MAP:
        if row[name]:
            found.setdefault(int(row[name]), set()).add(row["function"])
    assert found == tags(MODULES[name])
    assert found.keys() == statements(MODULES[name]).keys()


def in_letters_of_grpo(formula):
    """A formula, of any script, in which a ratio is rho_t, an advantage A, and a loss L_t."""
    formula = re.sub(r"(?<![a-z])s(_i)?(?![a-z_])", "rho_t", bare(formula))
    return formula.replace("A_t", "A").replace("L_i", "L_t")


@pytest.mark.parametrize("row", MAP, ids=lambda row: row["formula"])
def test_a_formula_of_the_map_is_that_of_each_docstring_in_whose_column_it_has_a_number(row):
    formula = in_letters_of_grpo(row["formula"].strip("`"))
    for name in SCRIPTS:
        if row[name]:
            assert formula in in_letters_of_grpo(statements(MODULES[name])[int(row[name])]), name


AVERAGES = {"sequence_sum": ("sums of answers", "right answers"), "token_mean": ("tokens",),
            "sequence_mean": ("each answer",), "constant": ("a constant",), "pairs": ("pairs",),
            "micro_batch_mean": ("micro-batch",)}


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: row["recipe"])
def test_the_matrix_says_how_a_recipe_averages_and_where_its_kl_is(row):
    script, *flags = shlex.split(row["command"].strip("`"))[1:]
    module = MODULES[script.removesuffix(".py")]
    cfg = common.parse_flags(module.Config, [*flags, "--device", "cpu"])
    averages = {"reinforce.py": "sequence_sum", "ppo.py": "token_mean", "dpo.py": "pairs"}
    if script in averages:
        average = averages[script]
    else:
        _, average = module.LOSS_TYPES[cfg.loss_type]
    assert row["averages over"] in AVERAGES[average]
    if cfg.beta > 0 and "simpo" not in flags:
        is_in_reward = script in ("reinforce.py", "ppo.py")
        place = "in the reward" if is_in_reward else "in the loss"
        assert row["KL to the base"].startswith(place)
    else:
        assert not row["KL to the base"]
    if script in ("grpo.py", "gspo.py"):
        assert ("/ std" in row["baseline"]) == (cfg.scale_rewards == "group")
        assert ("/ mean" in row["baseline"]) == (cfg.scale_rewards == "mean")
        assert row["ratio of"].startswith("answer" if script == "gspo.py" else "token")


def test_the_matrix_has_every_published_recipe():
    recipes = {row["recipe"] for row in MATRIX}
    assert {"REINFORCE", "RLOO", "PPO", "GRPO", "Dr. GRPO", "DAPO", "GSPO", "CISPO", "SAPO", "VAPO",
            "TRPO", "DPO", "IPO", "cDPO", "rejection sampling", "MaxRL", "dual clip", "RPO",
            "LN-DPO", "robust DPO", "SimPO", "on-policy distillation"} <= recipes


def test_each_recipe_says_what_goes_wrong_with_it_and_the_metric_that_shows_it():
    for row in MATRIX:
        named = re.findall(r"`([^`]+)`", row["failure mode"])
        metrics = [name for name in named if not name.startswith("--")]
        assert metrics, row["recipe"]
        for name in metrics:
            assert explained(name.removeprefix("eval/"), glossary()), name


def test_the_matrix_has_every_loss_type_that_is_published():
    recipes = " ".join(row["command"] for row in MATRIX)
    found = re.findall(r"--loss_type (\w+)", recipes)
    assert {*found, "grpo"} == {
        *MODULES["grpo"].LOSS_TYPES, "ipo", "hinge", "robust", "simpo"}


def flag_names():
    """The flags of all scripts."""
    names = set()
    for module in MODULES.values():
        names |= {field.name for field in dataclasses.fields(module.Config)}
    return names


def test_every_flag_that_a_page_names_is_there():
    of_others = {"model_name_or_path", "dataset_name", "reward_funcs", "help"}
    of_others |= {"nproc_per_node", "nnodes", "rdzv_backend", "rdzv_endpoint"}      # of torchrun
    for name in ("tools/film.py", "tools/export.py"):
        of_others |= set(re.findall(r'"--(\w+)"', (ROOT / name).read_text()))
    source = ast.parse((ROOT / "examples/pretrained.py").read_text())       # which needs packages
    [config] = [node for node in source.body if getattr(node, "name", "") == "Config"]
    of_others |= {node.target.id for node in config.body if isinstance(node, ast.AnnAssign)}
    for name in re.findall(r"(?<![\w-])--(\w+)", ALL_PROSE):
        assert name in flag_names() | of_others, name
    values = {"dapo", "dr_grpo", "sapo", "k2", "k3", "hinge", "simpo", "sequence_mask"}
    for row in FLAGS:
        for name in re.sub(r"\(.*\)", "", row["ours"]).split(", "):
            assert name.split()[0] in flag_names() | values, name


NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "ten": 10, "eleven": 11}


def number(pattern):
    """The number that a page spells where its text fits a pattern with one group."""
    words = re.sub(r"\s+", " ", ALL_PROSE)
    return NUMBERS[re.search(pattern, words)[1].lower()]


def test_the_limits_of_scripts_are_those_that_contributing_says():
    words = re.sub(r"\s+", " ", PROSE["CONTRIBUTING.md"])
    limits = test_density.LIMITS["grpo.py"]
    density = re.search(r"at most (\d+) syntax nodes .* over (\d+) columns, at most (\d+)% .* "
                        r"under (\d+)%", words)
    assert [float(number) for number in density.groups()] == [
        limits.nodes_a_line, limits.longest_line, 100 * limits.deep_share, 100 * limits.tuple_share]
    lines = re.search(r"at most (\d+) lines \(ppo\.py (\d+)\), examples/pretrained\.py (\d+), "
                      r"`make .*` at most (\d+)\.", words)
    longest = [test_density.LIMITS[name].lines for name in ("ppo.py", "examples/pretrained.py")]
    assert [int(number) for number in lines.groups()] == [
        limits.lines, *longest, test_sync.MOST_LINES]


def test_as_many_prompts_are_held_out_as_the_page_of_tasks_says():
    said = dict.fromkeys(("arithmetic", "lookup"), number("(One) prompt in ten, chosen by its"))
    said["countdown"] = number(r"of countdown's (\w+) in ten")
    said["gridworld"] = number(r"of gridworld's (\w+),")
    for name, tenths in said.items():
        assert common.find_task(name, name).held_out_tenths == tenths, name


# ---- claims about methods --------------------------------------------------------------------

def test_the_baselines_differ_in_variance_as_the_lab_says():
    """One output is likely and right, so that the gradients of the others are longer; exact, from
    all groups of 8 that there may be."""
    G = 8
    chances = torch.tensor([0.8, 0.1, 0.1], dtype=torch.float64)
    rewards = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    gradients = torch.eye(3) - chances                                          # (3, 3) by logits
    sq_norms = gradients.square().sum(dim=1)
    assert sq_norms[1:].min() > sq_norms[0]
    best = MODULES["reinforce"].optimal_baseline(rewards, sq_norms, chances)
    assert best < 0.5 * chances @ rewards

    groups = torch.tensor(list(itertools.product(range(3), repeat=G)))          # (3^G, G)
    def variance(A):
        means = (A[..., None] * gradients[groups]).mean(dim=1)                  # (3^G, 3)
        weights = chances[groups].prod(dim=1)
        return (weights @ (means - weights @ means).square()).sum()
    R = rewards[groups]
    with_best = variance(R - best)
    for other in (-0.1, 0.0, best - 0.01, best + 0.01, 0.8):
        assert variance(R - other) >= with_best
    advantages = MODULES["reinforce"].advantages
    assert variance(advantages(R, "optimal", sq_norms[groups])) > with_best
    without = variance(advantages(R, "none"))
    assert without > with_best
    assert variance(advantages(R, "rloo")) > 10 * without


def test_trpo_takes_as_many_fisher_products_as_the_matrix_says_and_damps_them_all(monkeypatch):
    calls = []
    plain = torch.autograd.grad

    def counted(*args, **options):
        calls.append(args)
        return plain(*args, **options)
    monkeypatch.setattr(torch.autograd, "grad", counted)
    curvature = torch.arange(1.0, 21.0).double()
    weights = torch.zeros(20, dtype=torch.float64, requires_grad=True)
    slope = torch.linspace(-1, 2, 20).double()

    def objective():
        return slope @ weights, (curvature * weights.square()).sum() / 2
    metrics = MODULES["ppo"].trpo_step([weights], objective, max_kl=0.01, damping=3.0)
    assert metrics["trpo/backtracks"] == 0
    products = len(calls) - 2                           # the gradients of rho A and of the KL
    assert products == number(r"TRPO takes (\w+) products")
    assert products == number(r"(\w+) for conjugate gradients") + 1
    step = weights.detach()
    torch.testing.assert_close((step.square() * (curvature + 3.0)).sum().item(), 2 * 0.01)


def test_dpo_losses_differ_from_those_of_trl_as_the_page_of_flags_says():
    """Those of TRL 1.16, from its dpo_trainer.py."""
    dpo_loss = MODULES["dpo"].dpo_loss
    zero = torch.zeros(1, dtype=torch.float64)
    M = zero + 0.7
    beta, e, n = 0.3, 0.1, 30

    # for answers of n tokens TRL's beta of ipo is n times ours
    trl_ipo = (M / n - 1 / (2 * n * beta)).square()
    torch.testing.assert_close(dpo_loss(M, zero, zero, zero, beta, "ipo") / n**2, trl_ipo)

    # its robust subtracts what cDPO adds, and divides by 1 - 2e
    first = -(1 - e) * F.logsigmoid(beta * M)
    second = -e * F.logsigmoid(-beta * M)
    torch.testing.assert_close(
        dpo_loss(M, zero, zero, zero, beta, label_smoothing=e), first + second)
    robust = (first - second) / (1 - 2 * e)
    assert (first + second - robust).abs() > 0.01
    [row] = [row for row in FLAGS if "smoothing" in row["ours"]]
    assert row["TRL"].startswith("none")


def test_the_rewards_of_the_page_are_those_of_the_table_in_the_code():
    rows = table("docs/tasks.md", "Rewards")
    assert [row["row"] for row in rows] == [*rewards.REWARDS, "model"]


def test_every_task_has_its_paragraph():
    described = set(re.findall(r"^- \*\*(\w+)\*\*", section("docs/tasks.md", "Tasks"), re.M))
    assert {"arithmetic", "countdown", "gridworld", "lookup"} <= described
    assert described <= set(common.task_names())        # which may have one's own, too


# ---- metrics ---------------------------------------------------------------------------------

def glossary():
    """The patterns of the glossary: a word in capitals, like TASK, stands for anything."""
    found = []
    for row in METRICS:
        for name in re.findall(r"`([^`]+)`", row["metric"]):
            if name.startswith("..."):
                name = found[-1].rpartition("/")[0] + name[3:]
            found.append(name)
    return found


def explained(key, names):
    """Those of the names, patterns of the glossary, that fit a key."""
    found = []
    for name in names:
        pattern = re.sub(r"\\?[A-Z]+", r"[\\w/-]+", re.escape(name))
        if re.fullmatch(pattern, key):
            found.append(name)
    return found


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Every key of metrics.jsonl, and of the scores in summary.json, that any script logs for any
    task."""
    tasks = common.task_names()
    runs = [f"python {name}.py --task {task}" for name in SCRIPTS for task in tasks]
    runs.append("python ppo.py --trust_region trpo")
    runs.append("python grpo.py --loss_type cispo")
    runs.append("python grpo.py --sampler_lag 1")
    runs.append("python reinforce.py --teacher 0 --view token")     # the folder of the first
    runs.append("python grpo.py --operands 2-3 --reward accuracy+format")
    runs.append(shlex.join(["python", "grpo.py", *ANSWERS]))
    runs.append(f"python grpo.py --task {','.join(tasks)} --num_prompts 12")
    folder = tmp_path_factory.mktemp("metrics")
    keys = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setitem(sys.modules, "tools.report", None)
        for number, command in enumerate(runs):
            execute(f"{command} --output_dir {number}", steps=1)
            for line in Path(str(number), "metrics.jsonl").read_text().splitlines():
                keys |= {key.removeprefix("eval/") for key in json.loads(line)}
            summary = json.loads(Path(str(number), "summary.json").read_text())
            keys |= set(summary["trained"])
    return keys


def test_every_metric_has_its_line(logged):
    assert sorted(key for key in logged if not explained(key, glossary())) == []


def test_every_line_of_the_glossary_is_of_a_metric(logged):
    unused = []
    for name in glossary():
        if not any(explained(key, [name]) for key in logged):
            unused.append(name)
    assert unused == []


def test_every_column_of_a_console_is_in_the_glossary():
    for module in MODULES.values():
        for metric in module.COLUMNS.values():
            assert explained(metric, glossary()), metric


def test_the_symptoms_name_metrics_and_every_warning_has_its_symptom():
    for row in SYMPTOMS:
        for name in re.findall(r"`([^`]+)`", row["metric"]):
            assert explained(name.removeprefix("eval/"), glossary()), name
    knobs = " ".join(row["what to change"] for row in SYMPTOMS)
    worst = {"frac_reward_zero_std": 1, "accuracy": 0.0, "completions/clipped_ratio": 1.0,
             "entropy": 0.0, "rewards/chosen": -1.0, "sampling/sampling_logp_difference/max": 1.0,
             "sampling/sampling_logp_difference/mean": 1.0}
    messages = list(console.warnings(worst))
    assert len(messages) == 6
    for message in messages:
        for flag in re.findall(r"--\w+", message):
            assert flag in knobs, f"{message}: has no line"


# ---- numbers, pictures and links -------------------------------------------------------------

MADE = {                                    # the generated blocks: page, target, name
    ("README.md", "seeds", "example"), ("docs/lab.md", "seeds", "table"),
    ("docs/lab.md", "compare", "compare"), ("docs/tasks.md", "tasks", "tasks"),
    ("docs/pipelines.md", "zero", "zero"), ("docs/pipelines.md", "r1", "r1"),
    ("docs/pipelines.md", "rlhf", "rlhf"), ("docs/pipelines.md", "passk", "passk"),
    ("docs/speed.md", "bench", "speed"), ("docs/speed.md", "bench", "scaling"),
    ("docs/real-models.md", "real", "beside"), ("docs/real-models.md", "real", "sizes"),
    ("docs/lab.md", "lab", "index")}
MADE |= {("docs/lab.md", f"lab-{name}", f"lab-{name}") for name in entry.NAMES}


def test_generated_blocks_are_closed_and_made_by_make_targets():
    found = []
    for page, text in PAGES.items():
        blocks = GENERATED.findall(text)
        for target, name, _, end in blocks:
            assert target in make_targets()
            assert name == end
            found.append((page, target, name))
        assert text.count("<!-- made by") == text.count("<!-- end of") == len(blocks), page
    assert sorted(found) == sorted(MADE)


def numbers_in(content):
    """All numbers of a JSON file, however deep."""
    if isinstance(content, dict):
        content = list(content.values())
    if isinstance(content, list):
        return [number for part in content for number in numbers_in(part)]
    is_number = isinstance(content, (int, float)) and not isinstance(content, bool)
    return [content] if is_number else []


# Of two numbers of the file; and what the console printed, of which a run keeps more digits.
DERIVED = ("times the base's pass@1", "of the best")
NOT_IN_A_FILE = ("example", "speed", "scaling")
# tests/test_lab.py makes the tables of the lab anew.


@pytest.mark.parametrize("page, target, name", sorted(
    block for block in MADE if block[2] not in NOT_IN_A_FILE and "lab" not in block[1]))
def test_numbers_of_a_table_are_in_the_file_that_its_target_wrote(page, target, name):
    known = set()
    for number in numbers_in(json.loads((ROOT / f"docs/{target}.json").read_text())):
        known |= {f"{number:.{digits}f}" for digits in range(4)}
    (block,) = [text for where, title, text, _ in GENERATED.findall(PAGES[page])
                if (where, title) == (target, name)]
    compared = 0
    columns = []
    for line in block.splitlines():
        row = cells(line) if line.startswith("|") else []
        columns = columns or row                            # the heading of a table
        columns = columns if row else []
        for column, cell in zip(columns, row):
            if column in DERIVED:
                continue
            for number in re.findall(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)", cell):
                assert number in known, f"{number} ({column}) is not in docs/{target}.json"
                compared += 1
    assert compared > 10


def links(page, pattern):
    """The targets of a page's links, or pictures: (target, path from the root, anchor)."""
    text = LANGUAGE_BLOCK.sub("", PAGES[page])
    found = []
    for target in re.findall(pattern, text):
        path, _, anchor = target.partition("#")
        place = (ROOT / page).parent / path if path else ROOT / page
        found.append((target, place.resolve(), anchor))
    return found


def anchors(path):
    """What links may name in a page behind a #: its headings, as GitHub spells them."""
    found = set()
    for title in re.findall(r"^#+ (.*)", LANGUAGE_BLOCK.sub("", path.read_text()), re.M):
        found.add(re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_picture_is_there(page):
    for target, path, _ in links(page, r"!\[[^\]]+\]\(([^)]+)\)"):
        assert path.is_file(), target


@pytest.mark.parametrize("page", PAGES)
def test_every_picture_says_what_it_shows(page):
    assert "![](" not in PAGES[page]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    for target, path, anchor in links(page, r"(?<!!)\[[^\]]+\]\(([^)]+)\)"):
        assert path.is_relative_to(ROOT) and path.exists(), target
        assert not anchor or anchor in anchors(path), target


def test_an_anchor_is_a_heading_in_small_letters_without_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A library's `beta`, and more\n\n```\n# no heading\n```\n## Two\n")
    assert anchors(page) == {"a-librarys-beta-and-more", "two"}


CLAIMS = {              # what README.md says in words, and when that holds of a run of make seeds
    "in about a minute": lambda base, trained, run: run["seconds_total"] <= 80,
    "likeliest answer is right one time in ten":
        lambda base, trained, run: 0.08 <= base["greedy"] <= 0.15,
    "three to four in ten are right": lambda base, trained, run: 0.3 <= base["pass@1"] <= 0.4,
    "about one in four thinks": lambda base, trained, run: 0.2 <= base["think_share"] <= 0.3,
    "nearly always right": lambda base, trained, run: base["accuracy_given_think"] >= 0.95,
    "mostly answers without thinking": lambda base, trained, run: base["think_share"] <= 0.4,
    "the policy nearly always thinks": lambda base, trained, run: trained["think_share"] >= 0.95,
    "More than half of that time": lambda base, trained, run:
        run["seconds_warm_start"] > 0.5 * run["seconds_total"],
    "greedy accuracy 0.99 or more": lambda base, trained, run: trained["greedy"] >= 0.99}


@pytest.mark.parametrize("claim", CLAIMS)
def test_what_the_first_page_says_in_words_was_measured(claim):
    assert bare(claim) in bare(PROSE["README.md"])
    runs = json.loads((ROOT / "docs/seeds.json").read_text())["seeds"]
    for run in runs.values():
        assert CLAIMS[claim](run["base"], run["trained"], run)


def test_the_versions_said_to_be_tested_are_those_of_the_requirements():
    requirements = (ROOT / "requirements.txt").read_text()
    pinned = re.search(r"^torch==(\d+\.\d+)", requirements, re.M)[1]
    assert f"torch {pinned} on a CPU" in section("README.md", "What it costs")
