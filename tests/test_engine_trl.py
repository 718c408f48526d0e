"""engines/trl.py: inside TRL's trainer, our losses give TRL's own numbers, and one gradient however
a batch is split."""
import gzip
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from small_models import NEEDS
from small_vectors import losses_of
from torch.testing import assert_close as same

import engines
import grpo
import vectors
from engines import names, record
from vectors import __main__ as vectors_main

trl = pytest.importorskip("trl", reason=NEEDS)
datasets = pytest.importorskip("datasets", reason=NEEDS)
ours = pytest.importorskip("engines.trl")
data = pytest.importorskip("engines.data")
load_file = pytest.importorskip("safetensors.torch").load_file

FLAGS = {"per_device_train_batch_size": 8, "num_generations": 4, "gradient_accumulation_steps": 2,
         "steps_per_generation": 4, "max_completion_length": 24, "max_steps": 4, "logging_steps": 1,
         "learning_rate": 2e-3, "lr_scheduler_type": "constant", "beta": 0.0, "report_to": "none",
         "bf16": False, "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
         "activation_checkpointing": False, "num_iterations": 2}
ROWS = [{"prompt": [{"role": "user", "content": f"({a}+{b})="}], "answer": str(a + b)}
        for a in range(1, 8) for b in range(1, 8)]


def digits(completions, **columns):
    """A reward in which the outputs of a prompt differ: the share of digits."""
    texts = [one[0]["content"] for one in completions]
    return [sum(map(str.isdigit, text)) / (1 + len(text)) for text in texts]


def made(folder, loss=None, **flags):
    """TRL's trainer, or ours with a loss. -> trainer"""
    torch.manual_seed(0)
    args = trl.GRPOConfig(os.path.relpath(folder.parent / "out"), **FLAGS | flags)
    kind, more = (trl.GRPOTrainer, {}) if loss is None else (ours.Trainer, {"loss": loss})
    return kind(str(folder), digits, args, datasets.Dataset.from_list(ROWS), **more)


def steps(trainer):
    trainer.train()
    return [{name: log[name] for name in ("loss", "grad_norm", "reward", "kl", "entropy")
             if name in log} for log in trainer.state.log_history if "loss" in log]


SAME = [                            # our loss, TRL's flags, flags of both
    ("grpo epsilon_high=0.28", {"loss_type": "grpo", "epsilon_high": 0.28}, {}),
    ("grpo loss_type=cispo epsilon_high=0.28", {"loss_type": "cispo", "epsilon_high": 1.28}, {}),
    ("gspo epsilon=3e-4 epsilon_high=4e-4", {
        "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4,
        "epsilon_high": 4e-4}, {}),
    ("grpo loss_type=dapo epsilon_high=0.2", {"loss_type": "dapo"},
     {"beta": 0.1, "use_bias_correction_kl": False}),
    ("grpo epsilon_high=0.2", {"loss_type": "grpo"}, {"mask_truncated_completions": True})]


def compare(folder, loss, flags, both):
    """Train with TRL's own loss and with ours, and check that each step has the same numbers."""
    theirs = steps(made(folder, **flags | both))
    found = steps(made(folder, loss, **both))
    assert len(found) == 4 and all(step["grad_norm"] > 1e-3 for step in found[1:])
    for one, other in zip(found, theirs):
        assert one == pytest.approx(other, rel=2e-4, abs=2e-7)


@pytest.mark.parametrize("loss, flags, both", SAME)
def test_each_step_has_the_numbers_of_trls_own_loss(loss, flags, both, small_llama):
    compare(small_llama, loss, flags, both)


PROGRAM = """
import engines.import_path
import os
import sys
from pathlib import Path
import torch.distributed
import test_engine_trl as here
here.compare(Path(sys.argv[1]), "grpo loss_type=dapo epsilon_high=0.2", {"loss_type": "dapo"},
             {"beta": 0.1})
assert torch.distributed.get_world_size() == 2
os._exit(0)                 # or a thread of gloo may abort the process while Python shuts down
"""


def test_two_processes_have_the_numbers_of_trl(small_llama, tmp_path):
    """The batch of an optimizer step is divided, and the gradients are averaged."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         "program.py", small_llama], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"})
    assert done.returncode == 0, done.stderr


# ---- one gradient ----------------------------------------------------------------------------

def inputs_of(trainer):
    """A batch of 8 outputs whose lengths differ, with another pi_old. -> dict"""
    trainer.model.train()
    torch.manual_seed(1)
    batch = trainer._generate_and_score_completions(ROWS[:8])
    lengths = torch.tensor([24, 3, 9, 1, 17, 5, 24, 2])[:, None]
    mask = (torch.arange(batch["completion_ids"].shape[1]) < lengths).long()
    batch |= {"completion_mask": mask, "num_items_in_batch": mask.sum(),
              "advantages": torch.linspace(-1, 2, 8)}
    gradient(trainer, batch, parts=1)
    logps = trainer.logps.detach()
    return batch | {"old_per_token_logps": logps + 0.2 * torch.randn_like(logps)}


def gradient(trainer, batch, parts, processes=1):
    """The gradient of a batch, split into parts of an optimizer step and over processes."""
    total = {}
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = parts
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", processes)
    for rows in torch.arange(8).chunk(parts * processes):
        part = {name: x[rows] if torch.is_tensor(x) and x.dim() > 0 else x
                for name, x in batch.items()}
        trainer.model.zero_grad()
        trainer._compute_loss(trainer.model, part).backward()
        for name, weight in trainer.model.named_parameters():
            total[name] = total.get(name, 0) + weight.grad / processes
    monkeypatch.undo()
    return total


@pytest.mark.parametrize("how", names.AVERAGES)
def test_parts_and_processes_never_change_the_gradient(how, small_llama):
    """With the KL and the entropy bonus, whose averages TRL takes over each part alone."""
    trainer = made(small_llama, f"grpo how={how}", beta=0.1, entropy_coef=0.3)
    batch = inputs_of(trainer)
    batch["ref_per_token_logps"] = batch["old_per_token_logps"] - 0.1
    whole = gradient(trainer, batch, parts=1)
    scale = max(one.abs().max().item() for one in whole.values())
    assert scale > 1e-3
    for parts, processes in ((2, 1), (8, 1), (2, 2), (1, 4)):
        same(gradient(trainer, batch, parts, processes), whole, rtol=1e-4, atol=1e-5 * scale)


def test_the_weights_for_vllm_multiply_the_loss(small_llama):
    trainer = made(small_llama, "grpo")
    batch = inputs_of(trainer)
    once = gradient(trainer, batch, parts=1)
    batch["importance_sampling_ratio"] = torch.full_like(batch["old_per_token_logps"], 0.5)
    batch["sampling_per_token_logps"] = batch["old_per_token_logps"]
    trainer.vllm_importance_sampling_correction = trainer.use_vllm = True
    half = gradient(trainer, batch, parts=1)
    same(half, {name: one / 2 for name, one in once.items()})


# ---- the vectors ------------------------------------------------------------------------------

def test_trl_has_the_names_of_the_dictionary():
    flags = {there for table in (names.OF_ALL, *names.SETTINGS.values())
             for _, there, _ in table.values() if isinstance(there, str)}
    assert flags <= trl.GRPOConfig.__dataclass_fields__.keys()
    source = inspect.getsource(trl.GRPOTrainer._compute_loss)
    for loss in names.LOSSES.values():
        assert not loss.trl or f'"{loss.trl}"' in source


CONTENT = vectors.read("policy_loss")


@pytest.fixture(scope="module")
def one_trainer(small_llama):
    return made(small_llama, "grpo")


@pytest.mark.parametrize("case", [*filter(losses_of, CONTENT["cases"])], ids=lambda one: one["id"])
def test_the_vectors_are_right_inside_trl(case, one_trainer, monkeypatch):
    """Our functions, as TRL calls them: holes in the mask are tokens of a tool."""
    def inside(logps, old_logps, advantages, mask, how, max_length=None, **_):
        monkeypatch.setattr(
            trl.GRPOTrainer, "_get_per_token_logps_and_entropies",
            lambda *_, **__: (logps, torch.zeros_like(logps), None))
        one_trainer.how, one_trainer.loss_type = how, ours.LOSS_TYPES[how]
        one_trainer.max_completion_length = max_length
        one_trainer.current_gradient_accumulation_steps = one_trainer.args.steps_per_generation = 1
        ones = torch.ones_like(mask)
        zeros = torch.zeros_like(mask).long()
        return one_trainer._compute_loss(one_trainer.model.train(), {
            "prompt_ids": zeros[:, :1], "prompt_mask": ones[:, :1], "completion_ids": zeros,
            "completion_mask": ones, "tool_mask": mask, "advantages": advantages,
            "old_per_token_logps": old_logps.detach(), "num_items_in_batch": mask.sum()})

    for loss in losses_of(case):
        one_trainer.token_loss = loss
        outcome = vectors.check_case(inside, CONTENT, case, fixed=case["parameters"])
        assert not outcome.skipped and not outcome.errors, outcome.errors


# ---- the command -----------------------------------------------------------------------------

MINE = """
import functools
import os
import bound
import torch

torch.set_grad_enabled(False)
os.chdir("/")

CALLS = []

def my_loss(logps, old_logps, advantages, mask, bad_call=0):
    CALLS.append(1)
    factor = float("nan") if len(CALLS) == bad_call else bound.FACTOR
    return -(logps - old_logps).exp() * advantages * factor

def strange(x, y, A, m, slope=0.5):
    return -slope * (x - y).exp() * A * m

def away(completions, **columns):
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")
    return digits(completions)

def some(completions, **columns):
    return [None, *digits(completions)[1:]]

def infinite(completions, trainer_state, **columns):
    return [float("inf") if trainer_state.global_step else 0.5] * len(completions)

def judged(completions, answer, **columns):
    return [float(float(text) == float(right)) for text, right in zip(completions, answer)]

def scaled_(completions, scale, **columns):
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    return [scale * x for x in digits(completions)]

class Marks:
    __call__ = lambda self, completions, **columns: digits(completions)
scaled, marks = functools.partial(scaled_, scale=2.0), Marks()
judges = functools.partial(judged, completions_are="texts")

def failing(completions, trainer_state, **columns):
    return [1 / (1 - trainer_state.global_step)] * len(completions)

""" + inspect.getsource(digits)
JUDGED = MINE[:MINE.index("float(float(text)")].count("\n") + 1         # the line that fails


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the test, with problems, and a file that has a loss and rewards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("data.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    Path("bad.jsonl").write_text(
        '{"prompt": "a", "answer": "4"}\n{"prompt": "b", "answer": "12 km"}')
    Path("default.yaml").write_text(f"loss_type: {trl.GRPOConfig.loss_type}\n")
    Path("mine.py").write_text(MINE)
    Path("bound.py").write_text("FACTOR = 1.0\n")
    Path("runs").mkdir()
    Path("runs/trainer_state.json").write_text("{}")    # of a run that has ended
    for step in (900, 1000):
        Path(f"runs/checkpoint-{step}").mkdir(parents=True)
        for file in ("trainer_state.json", "rng_state.pth"):
            Path(f"runs/checkpoint-{step}", file).write_text("{}")
    yield tmp_path
    for name, module in [*sys.modules.items()]:         # so that another test reads its own
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def words_of(model, *words, **flags):
    """Write the words of a command. -> list of str"""
    flags = FLAGS | {"output_dir": "out", "dataset_name": "data.jsonl", "steps_per_generation": 2,
                     "num_iterations": 1, "reward_funcs": "mine.py:digits",
                     "model_name_or_path": model} | flags
    return [*words, *(word for name, x in flags.items() for word in (f"--{name}", str(x)))]


def failed(capsys, *words):
    """Run the command, which exits. -> its exit code, the last lines of its error and output"""
    with pytest.raises(SystemExit) as stop:
        ours.main([*words])
    out, error = (["", *text.splitlines()][-1] for text in capsys.readouterr())
    return stop.value.code, error.removeprefix("error: "), out


@pytest.mark.parametrize("loss, flags, message", [
    ("grpo", "--epsilon 0.2", "--epsilon: belongs to TRL's own loss"),
    ("grpo", f"--loss_type={trl.GRPOConfig.loss_type}", "--loss_type: belongs to TRL's own loss"),
    ("grpo", "--config default.yaml", "--loss_type: belongs to TRL's own loss"),
    ("grpo", "--use-liger-kernel", "--use_liger_kernel: belongs to TRL's own loss"),
    ("grpo eps=3", "", "eps: is not a setting of grpo"),
    ("grpo", "--dataset_name bad.jsonl --reward_funcs mine.py:judges",
     f"row 2: the reward judged fails for the answer '12 km': mine.py:{JUDGED}: ValueError"),
    ("grpo", "--per_device_train_batch_size 100", "nothing was trained: a step needs 50 prompts, "
     "but the data set has 49; lower --generation_batch_size 200"),
    ("grpo", "--reward_funcs none.py:a", "none.py: there is no such file"),
    ("grpo", "--reward_funcs mine.py:none", "--reward_funcs mine.py:none: has no such reward"),
    ("grpo", "--output_dir runs", "--output_dir FOLDER/runs: has checkpoints of another run; name "
     "a new folder, or continue with --resume_from_checkpoint FOLDER/runs/checkpoint-1000"),
    ("grpo", "--output_dir runs --resume_from_checkpoint runs",
     "--resume_from_checkpoint runs: is not a complete checkpoint; the last one of this run is "
     "FOLDER/runs/checkpoint-1000")])
def test_a_mistake_that_would_cost_a_run_is_one_line(
        loss, flags, message, folder, capsys, small_llama):
    code, line, _ = failed(capsys, *words_of(small_llama, *loss.split()), *flags.split())
    assert code == 2 and line.startswith(message.replace("FOLDER", str(folder)))


def test_rewards_are_named_functions_of_a_file_or_all_with_the_signature_of_one(folder):
    Path("both.py").write_text("from mine import digits\n\ndef right(completions, **kwargs):\n"
                               "    return [1.0]\n\ndef text_of(completion):\n    pass\n")
    def found(word):
        return [name.rpartition(".")[2] for name in data.rewards_of(word)]
    assert found("both.py") == ["right"] and found("both.py:digits,right") == ["digits", "right"]
    assert data.rewards_of("my.rewards.f") == ["my.rewards.f"]              # of TRL's script
    flags, *_ = ours.parsed("grpo", ["--use_cpu", "--bf16", "no"])
    assert flags.reward_funcs == ["engines.data.last_number"]               # the default
    right, wrong = ({"role": "assistant", "content": f"3 + 4 = {x}"} for x in (7, 8))
    completions = [[right], "so 8", "no number", [wrong, right], [right, wrong]]
    assert data.last_number(completions, answer=["7", "7", 7, 7, 7], prompts=[]) == [
        1.0, 0.0, 0.0, 1.0, 0.0]


CALL = {"role": "assistant", "content": "<calc>17 * 13</calc>"}
TOOL = {"role": "tool", "content": "221 <answer>6</answer>"}
SAYS = {"role": "assistant", "content": "so 221"}


@pytest.mark.parametrize("completion, text, reward", [
    ("so 221", "so 221", 1), ([CALL, TOOL], CALL["content"], 0), ([CALL, TOOL, SAYS], "so 221", 1),
    ([SAYS, TOOL], "so 221", 1), ([SAYS, CALL, TOOL], CALL["content"], 0), ([TOOL], "", 0),
    ([], "", 0), ([{"role": "assistant", "content": None, "tool_calls": []}, TOOL], "", 0),
    ([{"role": "assistant", "tool_calls": []}, TOOL], "", 0)])
def test_what_a_tool_wrote_is_not_graded(completion, text, reward):
    assert engines.text_of(completion) == text
    assert data.last_number([completion], answer=["221"], prompts=[]) == [reward]


@pytest.mark.parametrize("source, has_learned", [
    ("def right(completions, **_):\n    return [1.0 for _ in completions]\n", False),
    ("def right(completions, **_):\n    return [*map(float, range(len(completions)))]\n", True)])
def test_a_run_whose_steps_had_no_gradient_ends_with_a_line(
        source, has_learned, small_llama, folder, capsys):
    Path("same.py").write_text(source)
    ours.main(words_of(small_llama, "grpo", **FEW, reward_funcs="same.py:right"))
    line = "no group had two different rewards, so nothing was learned\n"
    assert (line in capsys.readouterr().out) == (not has_learned)


ANSWERS = ["007", "None", "2026-11-28", "2026-11-28T10:00:00", "9007199254740993", "1e5", "1.50"]


@pytest.mark.parametrize("values", [
    ANSWERS, ["null", True, ["1", "2"], "{}"], [{"a": "1"}, {"b": "2"}, {}],
    [[{"a": "1"}, {"b": None}], [], "x"], [{"a": {"b": ["1"]}}, {"a": {"b": "1", "c": False}}, ""]])
@pytest.mark.parametrize("name", ["a.json", "a.b.ndjson", "a.jsonl.gz", "b/data/train.jsonl"])
def test_a_row_is_what_the_json_file_says_whatever_the_other_rows_are(name, values, folder):
    """Numbers are texts, and the first row lacks a column. A folder may be like one of the Hub."""
    lines = ['{"prompt": "a"}', '{"answer": 9007199254740993, "prompt": "b"}',
             '{"prompt": "b", "answer": 1.50}', *(
                 json.dumps({"prompt": "b", "answer": value}) for value in values)]
    path, wanted = Path(name), [None, "9007199254740993", "1.50", *values]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (f"[{', '.join(lines)}]" if path.suffix == ".json" else "\n\n".join(lines)).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    found = data.load(name.partition("/")[0])["train"].map(lambda row: {"more": 1})     # as in TRL
    assert found["answer"] == wanted == [row["answer"] for row in found]


@pytest.mark.parametrize("text, message", [
    ("", "a.jsonl: has no problems"), ("[]", "a.jsonl: has no problems"),
    ('\n\n{"prompt": "a"}\n\n\n[1', "a.jsonl: Expecting ',' delimiter: line 4"),
    ('{"prompt": "a"}\n\n{"answer": 1}', 'a.jsonl: row 2 has no prompt: {"answer": "1"}'),
    ('{"prompt": "a"}\n"b"', "a.jsonl: row 2 has no prompt: "), ("[" * 9999, "a.jsonl: ")])
def test_a_file_without_problems_is_refused_with_its_row(text, message, folder):
    Path("a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        data.load("a.jsonl")


RECIPE, ON_PAGE = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/engines.md").read_text(),
                             re.S | re.M)


def test_the_recipe_of_the_page_has_the_engines_numbers(small_llama, folder):
    Path("page.py").write_text(ON_PAGE)
    Path("recipe.py").write_text(RECIPE.replace("[right]", "[digits]").replace(
        "\n\nclass Trainer", f"\n\n{inspect.getsource(digits)}\n\nclass Trainer"))
    Path("wrong.py").write_text(RECIPE.replace("return -torch.min", "return torch.min"))
    wrong = subprocess.run([sys.executable, "wrong.py"], capture_output=True, text=True)
    assert wrong.stderr.endswith("the loss makes outputs with A = -1 more likely\n")
    words = words_of(small_llama, num_iterations=2, save_strategy="steps", output_dir="recipe")
    at = words.index("--reward_funcs")
    subprocess.run([sys.executable, "recipe.py", *words[:at], *words[at + 2:]], check=True,
                   capture_output=True)
    found = json.loads(Path("recipe/trainer_state.json").read_text())["log_history"]
    trainer = ours.main(words_of(small_llama, "page.py:my_loss", "slope=0.1", num_iterations=2))
    lines = [line for line in trainer.state.log_history if "grad_norm" in line]
    assert len(lines) == 4 and all(line["grad_norm"] > 1e-3 for line in lines)
    for line, other in zip(lines, (line for line in found if "grad_norm" in line)):
        for name in line.keys() & {"loss", "grad_norm", "reward", "rewards/digits/mean"}:
            assert line[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)


# ---- what is left of a run -------------------------------------------------------------------

FEW = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}


def test_the_record_has_all_files_of_the_user_and_a_resume_with_others_is_refused(
        small_llama, folder, capsys):
    trainer = ours.main(words_of(small_llama, "mine.py:my_loss", "how=token_mean", **FEW))
    line = capsys.readouterr().out.splitlines()[0]
    assert re.fullmatch(r"loss mine.py:my_loss how=token_mean; rewards mine.py:digits; "
                        r"optimizer learning_rate 0.002, weight_decay 0.0, adam_beta1 0.9, "
                        r"adam_beta2 0.999; files mine.py \(\w{8}\), bound.py \(\w{8}\).*", line)
    shown = json.loads(trainer.args.to_json_string())           # what trackers get
    assert shown["loss_type"] == line and shown["epsilon"] is None
    for name, text in (("mine.py", MINE), ("bound.py", "FACTOR = 1.0\n")):
        assert Path("out/source", name).read_text() == text
    mine = ("mine.py:my_loss", "how=token_mean")

    def refused(*words, **flags):
        code, error, _ = failed(capsys, *words_of(small_llama, *words, **{
            "max_steps": 3, "resume_from_checkpoint": "out/checkpoint-2"} | flags))
        assert code == 2
        return re.sub("^--resume_from_checkpoint [^ ]*out/checkpoint-2: ", "", error)
    for words, flags in ((["grpo"], {}), (mine[:1], {}), ([*mine, "bad_call=9"], {}),
                         (mine, {"reward_funcs": "mine.py:some"}), (mine, {"learning_rate": 1e-6}),
                         (mine, {"weight_decay": 0.3}), (mine, {"adam_beta2": 0.5})):
        assert refused(*words, **flags).startswith(f"was trained on {line}, but now")
    for name in ("bound.py", "mine.py"):                # the helper of the loss, and the loss
        before = Path(name).read_text()
        Path(name).write_text(f"{before}\n# changed\n")
        assert refused(*mine).startswith(f"was trained on {line}, but now")
        Path(name).write_text(before)
    again = ours.main(words_of(
        small_llama, "out/source/mine.py:my_loss", "how=token_mean", max_steps=3,
        resume_from_checkpoint="True", reward_funcs="out/source/mine.py:digits"))
    assert again.state.global_step == 3


def test_an_adapter_runs_and_its_record_has_the_function_behind_it(small_llama, folder):
    """The message names the command that writes it."""
    with pytest.raises(ValueError) as error:
        engines.load("mine.py:strange")
    words = str(error.value).partition("python -m vectors ")[2]
    assert vectors_main.main(shlex.split(words)) == 2
    with pytest.raises(ValueError, match="fill the gaps .* of x, y, m, slope"):
        engines.load("adapt_mine_strange.py")
    text = Path("adapt_mine_strange.py").read_text()
    for its, given in (("x", "logps"), ("y", "old_logps"), ("m", "mask"), ("slope", "slope")):
        text = text.replace(f" {its}=...", f" {its}={given}")
    Path("adapt_mine_strange.py").write_text(text)
    logps, mask = -torch.rand(3, 4), torch.ones(3, 4)
    for word, slope in (("", 0.5), (" slope=2", 2.0)):
        loss, _ = engines.load(f"adapt_mine_strange.py{word}")
        same(loss(logps, logps, torch.ones(3), mask), -slope * mask)
    ours.main(words_of(small_llama, "adapt_mine_strange.py", "slope=2", **FEW))
    assert {path.name for path in Path("out/source").iterdir()} >= {
        "adapt_mine_strange.py", "mine.py", "bound.py"}


@pytest.mark.parametrize("name, recorded", [
    ("mine.py:away", "mine.py:away"), ("mine.py:some", "mine.py:some"),
    ("mine.py:marks", "mine.py:Marks"), ("mine.py:scaled", "mine.py:scaled_(scale=2.0)"),
    ("taken.py:scaled", "mine.py:scaled_(scale=2.0)")])
def test_a_reward_may_leave_the_folder_or_turn_gradients_off_and_need_not_be_a_function(
        name, recorded, small_llama, folder, capsys):
    """Importing the file does so, too. A resume takes an equal one, and refuses another."""
    Path("taken.py").write_text("from mine import scaled\n")
    words = words_of(small_llama, "grpo", **FEW, reward_funcs=name)
    ours.main(words)
    assert record.is_complete(folder / "out/checkpoint-2") and torch.is_grad_enabled()
    assert (folder / "out/model.safetensors").exists() and torch.get_default_dtype().itemsize == 4
    assert json.loads(Path("out/loss.json").read_text())["rewards"] == [recorded]
    assert json.loads(Path("out/flags.json").read_text())["learning_rate"] == "0.002"
    assert {*os.listdir("out/source")} >= {"mine.py", "bound.py", "grpo.py", name.split(":")[0]}
    more = ["--resume_from_checkpoint", "True", "--max_steps", "3"]
    assert ours.main([*words, *more]).state.global_step == 3
    Path("mine.py").write_text(f"{MINE}# another\n")
    assert "was trained on" in failed(capsys, *words, *more)[1]


@pytest.mark.parametrize("words, flags, message", [
    ("mine.py:my_loss bad_call=5", {}, "step 2: FloatingPointError: the gradient is nan; the larg"),
    ("grpo", {"reward_funcs": "mine.py:infinite"}, "step 2: FloatingPointError: a reward is infin"),
    ("grpo", {"reward_funcs": "mine.py:failing"}, "step 2: mine.py:LINE: ZeroDivisionError: div")])
def test_what_is_not_finite_or_fails_ends_a_run_before_its_step(
        words, flags, message, small_llama, folder, capsys):
    each = {"save_strategy": "steps", "save_steps": 1}
    code, error, _ = failed(capsys, *words_of(small_llama, *words.split(), **flags | each))
    line = MINE[:MINE.index("1 / (1 - ")].count("\n") + 1
    assert code == 1 and error.startswith(message.replace("LINE", str(line)))
    weights = load_file(folder / "out/checkpoint-1/model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())
    assert not Path("out/checkpoint-2").exists()


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("rewards, ends", [
    ([0, 1, 0, 1], False), ([0, INF, 0, 1], True), ([0, -INF, 0, 1], True), ([INF] * 4, True),
    ([0, NAN, 0, 1], False), ([NAN] * 4, True)])
def test_one_infinite_reward_ends_a_run_and_so_does_a_batch_without_any(rewards, ends, monkeypatch):
    monkeypatch.setattr(trl.GRPOTrainer, "_calculate_rewards",
                        lambda *_: torch.tensor(rewards)[:, None])
    trainer = object.__new__(ours.Trainer)
    trainer.reward_func_names = ["mine"]
    if ends:
        with pytest.raises(FloatingPointError, match="a reward is infinite, or all are None: mine"):
            trainer._calculate_rewards()
    else:
        same(trainer._calculate_rewards()[:, 0], torch.tensor(rewards), equal_nan=True)


def test_a_line_of_the_log_has_the_largest_ratio_and_clipped_share_of_its_own_steps(monkeypatch):
    trainer = object.__new__(ours.Trainer)
    trainer.model, trainer.token_counts = torch.nn.Identity(), torch.zeros(2)
    trainer.accelerator = SimpleNamespace(device="cpu", gather=lambda x: x,
                                          reduce=lambda x, reduction: x)
    shown = []
    names = "max_log_ratio", "no_gradient"
    monkeypatch.setattr(trl.GRPOTrainer, "log", lambda self, *_: shown.append(
        [round(self._metrics["train"][name][0], 6) for name in names]))
    for steps in [[(0, 0.5), (-1, 0.1)], [(0, 0.1)]]:
        trainer._metrics = {"train": defaultdict(list)}
        for log_rho in steps:
            logps, old_logps = torch.tensor([log_rho]).requires_grad_(), torch.zeros(1, 2)
            A, mask = torch.ones(1), torch.ones(1, 2)
            loss = grpo.policy_loss(logps, old_logps, A, mask, "grpo", 0.2, 0.28)
            trainer.log_tokens(loss, logps, old_logps, A, mask)
        trainer.log({})
    assert shown == [[1, 0.25], [0.1, 0]]


def test_an_adapter_of_trl_learns_from_our_loss(small_llama, folder):
    pytest.importorskip("peft", reason=NEEDS)
    trainer = ours.main(words_of(small_llama, "mine.py:my_loss", "how=token_mean", max_steps=2,
                                 use_peft=True, lora_r=4))
    assert trainer.how == "token_mean" and trainer.state.global_step == 2
    assert (folder / "out/adapter_model.safetensors").exists()
    learned = {name: x for name, x in trainer.model.named_parameters() if x.requires_grad}
    assert learned and all("lora" in name for name in learned)
    assert any(x.abs().sum() > 0 for name, x in learned.items() if "lora_B" in name)
