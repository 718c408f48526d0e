"""engines/trl.py: inside TRL's trainer, our losses give TRL's own numbers, and one gradient however
a batch is split."""
import datetime
import decimal
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from small_models import NEEDS
from small_vectors import losses_of
from torch.testing import assert_close as same

import vectors
from engines import names, record
from report import check, page

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
    args = trl.GRPOConfig(str(folder.parent / "out"), **FLAGS | flags)
    kind, more = (trl.GRPOTrainer, {}) if loss is None else (ours.Trainer, {"loss": loss})
    return kind(str(folder), digits, args, datasets.Dataset.from_list(ROWS), **more)


def steps(trainer):
    trainer.train()
    return [{name: log[name] for name in ("loss", "grad_norm", "reward", "kl", "entropy")
             if name in log} for log in trainer.state.log_history if "loss" in log]


SAME = [                            # our loss, TRL's flags, flags of both
    ("grpo epsilon_high=0.28", {"loss_type": "grpo", "epsilon_high": 0.28}, {}),
    ("grpo loss_type=dapo epsilon_high=0.28", {"loss_type": "dapo", "epsilon_high": 0.28}, {}),
    ("grpo loss_type=dr_grpo epsilon_high=0.2", {"loss_type": "dr_grpo"},
     {"scale_rewards": "none"}),
    ("grpo loss_type=cispo epsilon_high=0.28", {"loss_type": "cispo", "epsilon_high": 1.28}, {}),
    ("grpo loss_type=sapo", {"loss_type": "sapo"}, {}),
    ("gspo epsilon=3e-4 epsilon_high=4e-4", {
        "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4,
        "epsilon_high": 4e-4}, {}),
    ("grpo delta=1.01 epsilon_high=0.2", {"loss_type": "grpo", "delta": 1.01}, {"epsilon": 0.2}),
    ("grpo how=sequence_sum epsilon_high=0.2", {"loss_type": "luspo"}, {}),
    ("grpo epsilon_high=0.2", {"loss_type": "grpo"}, {"beta": 0.1}),
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
import engines.behind
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


def launched(folder, *words, **variables):
    """Run program.py of a folder in two processes. -> subprocess.CompletedProcess"""
    variables |= {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
                  "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         "program.py", *words], cwd=folder, capture_output=True, text=True, check=False,
        env=os.environ | variables)


def test_two_processes_have_the_numbers_of_trl(small_llama, tmp_path):
    """The batch of an optimizer step is divided, and the gradients are averaged."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = launched(tmp_path, small_llama)
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


def test_the_entropy_bonus_is_the_coefficient_times_the_mean_entropy(small_llama):
    found = []
    for coef in (0.0, 0.3):
        trainer = made(small_llama, "grpo", entropy_coef=coef)
        found.append(gradient(trainer, inputs_of(trainer), parts=2))
    batch = inputs_of(trainer)
    logps, entropy, _ = trl.GRPOTrainer._get_per_token_logps_and_entropies(
        trainer, trainer.model, torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
        torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
        batch["completion_ids"].shape[1], compute_entropy=True)
    mask = batch["completion_mask"]
    trainer.model.zero_grad()
    (-0.3 * (entropy * mask).sum() / mask.sum()).backward()
    for name, weight in trainer.model.named_parameters():
        same(found[1][name] - found[0][name], weight.grad, rtol=1e-3, atol=1e-6)


def test_tokens_without_a_gradient_are_counted(small_llama):
    trainer = made(small_llama, "grpo epsilon=0.1 epsilon_high=0.1")
    batch = inputs_of(trainer)
    batch["advantages"][0] = 0
    trainer.token_counts.zero_()
    gradient(trainer, batch, parts=1)
    log_rho = (trainer.logps - batch["old_per_token_logps"]).detach()
    A, mask = batch["advantages"][:, None], batch["completion_mask"]
    counts = (A != 0) * mask
    clipped = torch.where(A > 0, log_rho.exp() > 1.1, log_rho.exp() < 0.9) * counts
    assert trainer._metrics["train"]["max_log_ratio"][-1] == pytest.approx(
        (log_rho * mask).abs().max().item())
    assert trainer.token_counts[0] > 0
    same(trainer.token_counts, torch.stack([clipped.sum(), counts.sum()]).float())


def test_a_line_of_the_log_has_the_largest_of_the_maxima_and_counts_tokens(small_llama):
    trainer = made(small_llama, "grpo")
    trainer.model.train()
    trainer._metrics["train"]["max_log_ratio"] += [0.5, 4.0, 1.0]
    trainer._metrics["train"]["entropy"] += [0.5, 4.0, 1.5]
    for counts in ([0, 10], [30, 30]):          # 0% of 10 tokens and 100% of 30
        trainer.token_counts += torch.tensor(counts)
    trainer.log({})
    trainer.log({})
    first, second = trainer.state.log_history
    assert (first["max_log_ratio"], first["no_gradient"], first["entropy"]) == (4, 0.75, 2)
    assert "no_gradient" not in second and "max_log_ratio" not in second


def test_tokens_of_a_tool_do_not_count(small_llama):
    """Not even if the ratios of these tokens overflow."""
    trainer = made(small_llama, "grpo")
    batch = inputs_of(trainer)
    before = gradient(trainer, batch, parts=1)
    batch["tool_mask"] = torch.ones_like(batch["completion_mask"])
    batch["tool_mask"][:, 2:5] = 0
    found = gradient(trainer, batch, parts=1)
    assert any(not torch.allclose(found[name], before[name]) for name in found)
    batch["old_per_token_logps"][:, 2:5] -= 200
    same(gradient(trainer, batch, parts=1), found)


def test_the_weights_for_vllm_multiply_the_loss(small_llama):
    trainer = made(small_llama, "grpo")
    batch = inputs_of(trainer)
    once = gradient(trainer, batch, parts=1)
    batch["importance_sampling_ratio"] = torch.full_like(batch["old_per_token_logps"], 0.5)
    batch["sampling_per_token_logps"] = batch["old_per_token_logps"]
    trainer.vllm_importance_sampling_correction = trainer.use_vllm = True
    half = gradient(trainer, batch, parts=1)
    same(half, {name: one / 2 for name, one in once.items()})


def test_a_sampler_without_the_trainers_weights_ends_the_run(small_llama, refused):
    trainer = made(small_llama, "grpo")
    batch = inputs_of(trainer)
    old_logps, mask = batch["old_per_token_logps"], batch["completion_mask"]
    trainer.check_sampler({"sampling_per_token_logps": old_logps + 0.05}, old_logps, mask)
    trainer.is_checked = False
    refused("vLLM does not sample from the trainer's weights: log-probabilities differ by 0.5",
            trainer.check_sampler, {"sampling_per_token_logps": old_logps + 0.5}, old_logps, mask,
            code=1)
    trainer.check_sampler({"sampling_per_token_logps": old_logps + 9}, old_logps, mask)     # once


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


@pytest.mark.parametrize("case", filter(losses_of, CONTENT["cases"]), ids=lambda case: case["id"])
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
import os
import signal
import torch

CALLS = []

def my_loss(logps, old_logps, advantages, mask, bad_call=0):
    CALLS.append(1)
    return -(logps - old_logps).exp() * advantages * (float("nan") if len(CALLS) == bad_call else 1)

def stopped(completions, trainer_state, **columns):
    if trainer_state.global_step == 2:
        os.kill(os.getpid(), getattr(signal, os.environ.get("SIGNAL", "SIGTERM")))
    return digits(completions)

def nothing(completions, trainer_state, **columns):
    return [None if trainer_state.global_step else 0.5] * len(completions)

def infinite(completions, trainer_state, **columns):
    return [float("inf") if trainer_state.global_step else 0.5] * len(completions)

def failing(completions, trainer_state, **columns):
    return [1 / (1 - trainer_state.global_step)] * len(completions)

def number(completions, **columns):
    return 1.0

def texts(completions, **columns):
    return ["1.0"] * len(completions)

def judged(completions, answer, **columns):
    return [float(one) for one in answer]

def no_columns(completions):
    return [1.0] * len(completions)

def _helper(completions, **columns):
    pass

""" + inspect.getsource(digits)
HELPED = """
from engines.data import last_number        # is not of this file

def extract(completions, **columns):
    return [text[-1:] for text in completions]

def text_of(completion):
    return completion

def right(completions, answer, **columns):
    return [float(one == other) for one, other in zip(extract(completions), answer)]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the test, with problems, and a file that has a loss and rewards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "helped.py").write_text(HELPED)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "other.jsonl").write_text('{"question": "1+1=", "answer": 2}\n')
    (tmp_path / "bad.jsonl").write_text("".join(
        json.dumps({"prompt": f"{n}+1=", "answer": "12 km" if n == 69 else n + 1}) + "\n"
        for n in range(80)))
    (tmp_path / "no_tokens.jsonl").write_text('{"prompt": "1+1=", "answer": 2}\n'
                                              '{"prompt": "", "answer": 2}\n')
    (tmp_path / "runs/checkpoint-7").mkdir(parents=True)
    (tmp_path / "runs/checkpoint-7/trainer_state.json").write_text("{}")
    return tmp_path


def words_of(model, *words, **flags):
    """Write the words of a command. -> list of str"""
    flags = FLAGS | {"output_dir": "out", "dataset_name": "data.jsonl", "steps_per_generation": 2,
                     "num_iterations": 1, "reward_funcs": "mine.py:digits",
                     "model_name_or_path": model} | flags
    return [*words, *(word for name, x in flags.items() for word in (f"--{name}", str(x)))]


@pytest.mark.parametrize("words, message", [
    ("grpo --epsilon 0.2", "--epsilon: belongs to TRL's own loss"),
    ("grpo --loss-type=grpo", "--loss_type: belongs to TRL's own loss"),
    ("grpo --use_liger_kernel", "--use_liger_kernel: belongs to TRL's own loss"),
    ("grpo eps=3", "eps: is not a setting of grpo"),
    ("grpo --learning_rat 3", "Some specified arguments are not used by the HfArgumentParser: "
                              "['--learning_rat', '3']"),
    ("grpo --learning_rate high", "argument --learning_rate/--learning-rate: invalid float value"),
    ("grpo --per_device_train_batch_size 3 --num_generations 4", "generation_batch_size (3) must"),
    ("grpo --config none.yaml", "[Errno 2] No such file or directory: 'none.yaml'"),
    ("grpo --model_name_or_path", "argument --model_name_or_path"),
    ("grpo -", "--model_name_or_path: is missing; name a folder"),
    ("grpo --model_name_or_path runs/none", "--model_name_or_path runs/none: there is no such"),
    ("grpo --model_name_or_path ./none", "--model_name_or_path ./none: there is no such folder"),
    ("grpo --model_name_or_path a/b/c", "--model_name_or_path a/b/c: there is no such folder"),
    ("grpo M --run_name delta", "--dataset_name: is missing; name a file, a folder"),
    ("grpo M --dataset_name datas", "--dataset_name datas: there is no such file or folder here"),
    ("grpo M --dataset_name data.jsonl --reward_funcs mine.py:texts",
     "--dataset_name data.jsonl, row 1: the reward texts fails for the answer '2': ValueError: too "
     "many dimensions 'str'"),
    ("grpo M --dataset_name none.jsonl", "--dataset_name none.jsonl: cannot be read: FileNotFound"),
    ("grpo M --dataset_name empty.jsonl", "--dataset_name empty.jsonl: has no rows"),
    ("grpo M --dataset_name mine.py/data.csv", "--dataset_name mine.py/data.csv: cannot be read"),
    ("grpo M --dataset_name other.jsonl",
     "--dataset_name other.jsonl: has no column prompt, but question, answer"),
    ("grpo M --dataset_name data.jsonl --eval_strategy steps",
     "--dataset_name data.jsonl: has no split test; to evaluate on files, name a folder"),
    ("grpo M --dataset_name runs", "--dataset_name runs: has no split train"),
    ("grpo M --dataset_name bad.jsonl", "--dataset_name bad.jsonl, row 70: the reward last_number "
     "fails for the answer '12 km': SystemExit: the answer '12 km' is not a number"),
    ("grpo M --dataset_name bad.jsonl --reward_funcs mine.py:judged",
     "--dataset_name bad.jsonl, row 70: the reward judged fails for the answer '12 km': ValueErr"),
    ("grpo M --dataset_name data.jsonl --reward_funcs mine.py:number",
     "--dataset_name data.jsonl, row 1: the reward number fails for the answer '2': ValueError: "
     "returned 1.0 for 1 completions; it must return a list"),
    ("grpo M --reward_funcs none", "--reward_funcs none: must be a Python file"),
    ("grpo M --reward_funcs none.py", "none.py: there is no such file"),
    ("grpo M --reward_funcs mine.py:none", "--reward_funcs mine.py:none: has no function none"),
    ("grpo M --reward_funcs mine.py:no_columns", "--reward_funcs mine.py:no_columns: no_columns "
     "must take completions and **columns"),
    ("grpo M --reward_funcs mine.py:digits helped.py mine.py:digits",
     "--reward_funcs: has two rewards that are called digits"),
    ("grpo M --dataset_name data.jsonl --resume_from_checkpoint none/checkpoint-3",
     "--resume_from_checkpoint none/checkpoint-3: is no complete checkpoint; there is none near"),
    ("grpo M --dataset_name data.jsonl --output_dir runs --resume_from_checkpoint True",
     "--resume_from_checkpoint True: is no complete checkpoint; choose one of runs/checkpoint-7"),
    ("grpo M --temperature 0", "--temperature 0.0: must be finite and above 0"),
    ("grpo M --gradient_accumulation_steps 0", "--gradient_accumulation_steps 0: must be finite"),
    ("grpo M --learning_rate nan", "--learning_rate nan: must be finite and at least 0"),
    ("grpo M --dataset_name no_tokens.jsonl",
     "--dataset_name no_tokens.jsonl, row 2: the prompt has no tokens"),
    ("grpo M --dataset_name data.jsonl --output_dir mine.py/out",
     "mine.py/out: cannot be written (Not a directory)"),
    ("grpo M --dataset_name data.jsonl --max_completion_length 2048",
     "--dataset_name data.jsonl, row 1: the prompt has 6 tokens, and with "
     "--max_completion_length 2048 it does not fit in the model's context of 2048")])
def test_a_mistake_in_the_arguments_is_one_line(words, message, folder, refused, small_llama):
    words = words.replace("- ", "").removesuffix(" -").replace(
        " M ", f" --model_name_or_path {small_llama} ")
    out = () if "--output_dir" in words else ("--output_dir", "out")
    refused(message, ours.main, [*words.split(), *out, "--use_cpu", "--bf16", "False"])


def test_half_a_model_is_one_line(folder, stops, small_llama):
    shutil.copytree(small_llama, "half")
    os.truncate("half/model.safetensors", 9000)
    stops("Error while deserializing header: incomplete metadata", ours.main,
          words_of("half", "grpo"))


def test_rewards_are_the_functions_with_the_signature_of_a_reward_that_no_other_one_calls(folder):
    def named(*words):
        return [one.__name__ for one in data.read_rewards(words)]
    assert named("helped.py") == ["right"]
    assert named("helped.py:extract,right") == ["extract", "right"]
    assert named("mine.py", "helped.py") == [
        "stopped", "nothing", "infinite", "failing", "number", "texts", "judged",
        "right"]
    [default] = data.read_rewards(None)
    right, wrong = ({"role": "assistant", "content": f"3 + 4 = {x}"} for x in (7, 8))
    completions = [[right], "so 8", "no number", [wrong, right], [right, wrong]]
    assert default(completions=completions, answer=["7", "7", 7, 7, 7], prompts=[]) == [
        1.0, 0.0, 0.0, 1.0, 0.0]


def test_a_reward_that_no_answer_gets_is_noted(capsys):
    def compared(completions, answer, **columns):
        return [float(int(text) == right) for text, right in zip(completions, answer)]
    rows = datasets.Dataset.from_list([{"prompt": "1+1=", "answer": "2"}] * 3)
    data.try_rewards([compared, data.last_number], rows, "--dataset_name data.jsonl")
    assert capsys.readouterr().out == (
        "note: the reward compared is not above 0 for any answer alone; it gets answers as texts, "
        "such as '2'\n")


ANSWERS = ["007", "None", "NA", "2026-11-28", "2026-11-28T10:00:00", "9007199254740993", "1e-5",
           "true"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "folder"])
def test_answers_are_the_texts_of_the_file(name, folder):
    path = folder / name
    if name == "folder":
        path = folder / "folder/train-0.jsonl"
        path.parent.mkdir()
    for order in (1, -1):
        rows = [{"prompt": f"{answer}?", "answer": answer} for answer in ANSWERS[::order]]
        if path.suffix == ".csv":
            path.write_text("prompt,answer\n" + "".join("{prompt},{answer}\n".format(**row)
                                                        for row in rows))
        elif path.suffix == ".parquet":
            datasets.Dataset.from_list(rows).to_parquet(path)
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows))
        else:
            path.write_text("\n\n".join(map(json.dumps, rows)))
        os.utime(path, (1, 1))                  # a changed file with an old date is read again
        [found] = data.read(ours.Flags(dataset_name=str(folder / name)), has_eval=False)
        assert list(found["answer"]) == ANSWERS[::order]


def test_numbers_become_texts_with_all_their_digits(folder):
    path = folder / "numbers.jsonl"
    path.write_text('{"prompt": "a", "answer": 0.12345678901234567890, "level": 0.5}\n'
                    '{"prompt": "b", "answer": 9007199254740993}\n{"prompt": "c", "answer": "7"}')
    [found] = data.read(ours.Flags(dataset_name=str(path)), has_eval=False)
    assert list(found["answer"]) == ["0.12345678901234567890", "9007199254740993", "7"]
    assert list(found["level"]) == [0.5, None, None]


@pytest.mark.parametrize("kind, answers, texts", [
    (datasets.Value("int64"), [2**53 + 1, None], ["9007199254740993", None]),
    (datasets.Value("float32"), [0.1, 1e20], ["0.1", "1e+20"]),
    (datasets.Value("float64"), [0.1, 3.0], ["0.1", "3.0"]),
    (datasets.Value("decimal128(3, 2)"), [decimal.Decimal("1.50"), None], ["1.50", None]),
    (datasets.Value("date32"), [datetime.date(2026, 1, 2), None], ["2026-01-02", None]),
    (datasets.Value("binary"), ["é".encode(), b""], ["é", ""]),
    (datasets.ClassLabel(names=["no", "yes"]), [1, 0], ["yes", "no"])])
def test_an_answer_of_any_type_in_parquet_becomes_the_text_that_people_write(
        kind, answers, texts, folder):
    table = datasets.Dataset.from_dict({"prompt": ["a", "b"], "answer": answers}, datasets.Features(
        {"prompt": datasets.Value("string"), "answer": kind}))
    table.to_parquet(folder / "table.parquet")
    [found] = data.read(ours.Flags(dataset_name=str(folder / "table.parquet")), has_eval=False)
    assert list(found["answer"]) == texts


def test_a_number_in_json_keeps_its_spelling_unless_it_is_in_a_list(folder):
    texts = ["1E5", "-0", "1.10", "true", "0.12345678901234567890", "null"]
    rows = ", ".join(f'{{"prompt": "a", "answer": {text}}}' for text in texts)
    (folder / "list.json").write_text(f"[{rows}]")
    (folder / "lines.jsonl").write_text(rows.replace("}, ", "}\n"))
    (folder / "lists.jsonl").write_text('{"prompt": "a", "answer": [1, 2.50]}')
    for name in ("list.json", "lines.jsonl"):
        [found] = data.read(ours.Flags(dataset_name=name), has_eval=False)
        assert list(found["answer"]) == [*texts[:-1], None]
    [found] = data.read(ours.Flags(dataset_name="lists.jsonl"), has_eval=False)
    assert list(found["answer"]) == [[1, 2.5]]


@pytest.mark.parametrize("name, content, message", [
    ("a.csv", "prompt,answer\na,1\nb,2,3\n", "cannot be read: ValueError: line 3: has not as many"),
    ("a.csv", "prompt,answer\na,1\nb\n", "cannot be read: ValueError: line 3: has not as many"),
    ("a.csv", 'prompt,answer\na,"1\nb,2\n', "cannot be read: Error: unexpected end of data"),
    ("a.jsonl", '{"prompt": "a", "level": 1}\n{"prompt": "b", "level": "2"}',
     "cannot be read: ValueError: the column level has values of several kinds"),
    ("a.jsonl", '{"prompt": "a"}\n{"answer": 1}', "row 2: the prompt must be a text, or a list"),
    ("a.jsonl", '{"prompt": 5}', "row 1: the prompt must be a text, or a list of messages"),
    ("a.jsonl", '{"prompt": [{"role": "user"}]}', "row 1: the prompt must be a text, or a list"),
    ("a.jsonl", '{"prompt": []}', "row 1: the prompt must be a text, or a list of messages")])
def test_rows_that_are_not_what_they_seem_are_named(name, content, message, folder):
    (folder / name).write_text(content)
    with pytest.raises(ValueError) as error:
        data.read(ours.Flags(dataset_name=name), has_eval=False)
    assert re.fullmatch(rf"--dataset_name {name}(:|,) {message}.*", str(error.value))


@pytest.mark.parametrize("name, place", [("sums", "sums"), ("me/my-sums", "me___my-sums"),
                                         ("Me/MySums-7K", "Me___my_sums-7_k")])
def test_a_data_set_that_this_machine_has_prepared_is_read_without_the_hub(
        name, place, folder, monkeypatch):
    cache = folder / "cache"
    datasets.load_dataset("json", data_files="data.jsonl", cache_dir=cache)
    [made] = (cache / "json").glob("*/*/*/")
    shutil.copytree(made, cache / place / "default/0.0.0/1")
    for file in (cache / place).rglob("json-train.arrow"):
        file.rename(file.with_name(f"{place.rpartition('___')[2]}-train.arrow"))
    info = cache / place / "default/0.0.0/1/dataset_info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {
        "config_name": "default", "dataset_name": place.rpartition("___")[2]}))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(data, "ask_hub", None)
    [found] = data.read(ours.Flags(dataset_name=name), has_eval=False)
    assert [row["answer"] for row in found] == [row["answer"] for row in ROWS]
    with pytest.raises(TypeError):                      # one that is not there is asked for
        data.read(ours.Flags(dataset_name=f"{name}x"), has_eval=False)


def test_a_line_that_is_damaged_is_named(folder, refused, small_llama):
    (folder / "half.jsonl").write_text('{"prompt": "a", "answer": 1}\n\n{"prompt": "b"')
    refused("--dataset_name half.jsonl: cannot be read: ValueError: line 3: Expecting", ours.main,
            words_of(small_llama, "grpo", dataset_name="half.jsonl"))


# ---- what is left of a run -------------------------------------------------------------------

def test_the_record_names_the_loss_and_the_rewards_and_a_resume_with_others_is_refused(
        small_llama, folder, refused, capsys):
    few = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = ours.main(words_of(small_llama, "mine.py:my_loss", "how=token_mean", **few))
    [line, *_] = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"loss mine.py:my_loss how=token_mean \(\w{8}\); "
                        r"rewards mine.py:digits \(\w{8}\)", line)
    shown = json.loads(trainer.args.to_json_string())           # what trackers get
    assert shown["loss_type"] == line and shown["epsilon"] is None
    checkpoint = folder / "out/checkpoint-2"
    for place in (folder / "out", checkpoint):
        assert json.loads((place / "loss.json").read_text())["loss"].startswith("mine.py:my_loss")
    [copy] = (folder / "out/source").iterdir()          # one file has the loss and the reward
    assert copy.read_text() == MINE
    resumed = {"max_steps": 3, "resume_from_checkpoint": checkpoint}
    for words, flags in ((["grpo"], {}), (["mine.py:my_loss"], {}),
                         (["mine.py:my_loss", "how=token_mean", "bad_call=9"], {}),
                         (["mine.py:my_loss", "how=token_mean"], {"reward_funcs": "helped.py"})):
        refused(f"--resume_from_checkpoint {checkpoint}: was trained on {line}, but now",
                ours.main, words_of(small_llama, *words, **FLAGS | resumed | flags))
    (folder / "mine.py").write_text(MINE + "\n# changed\n")
    refused(f"--resume_from_checkpoint {checkpoint}: was trained on", ours.main,
            words_of(small_llama, "mine.py:my_loss", "how=token_mean", **resumed))
    again = ours.main(words_of(small_llama, f"{copy}:my_loss", "how=token_mean", **resumed,
                               reward_funcs=f"{copy}:digits"))
    assert again.state.global_step == 3


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_saves_a_checkpoint_and_prints_how_to_continue(
        name, small_llama, folder, monkeypatch, capsys):
    monkeypatch.setenv("SIGNAL", name)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop:
        ours.main(words_of(small_llama, "mine.py:my_loss", reward_funcs="mine.py:stopped"))
    assert stop.value.code == 128 + getattr(signal, name)
    assert signal.getsignal(signal.SIGTERM) == before
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"stopped by {name}; to continue: python -m engines.trl mine.py:my_loss")
    words = shlex.split(last)
    assert words[-2:] == ["--resume_from_checkpoint", "out/checkpoint-3"]
    assert not (folder / "out/model.safetensors").exists()
    trainer = ours.main(words[words.index("engines.trl") + 1:])
    assert trainer.state.global_step == 4 and (folder / "out/model.safetensors").exists()


STOPPED = """
import engines.behind
import os
import sys
import engines.trl
try:
    engines.trl.main(sys.argv[1:])
except SystemExit as stop:
    assert stop.code == 128 + 1 and os.environ["WORLD_SIZE"] == "2"
    os._exit(0)             # or a thread of gloo may abort the process while Python shuts down
"""


def test_a_signal_to_one_of_two_processes_stops_both_at_the_same_step(small_llama, folder):
    (folder / "program.py").write_text(STOPPED)
    (folder / "mine.py").write_text(MINE.replace("== 2:", "== 2 and os.environ['RANK'] == '1':"))
    done = launched(folder, *words_of(small_llama, "grpo", reward_funcs="mine.py:stopped"),
                    SIGNAL="SIGHUP")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("stopped by SIGHUP; to continue: accelerate launch --num_processes 2 "
                             "-m engines.trl grpo ") == 1
    assert record.is_complete(folder / "out/checkpoint-3")


def test_a_signal_while_a_checkpoint_is_saved_ends_the_run_with_it(
        small_llama, folder, monkeypatch, capsys):
    """After the last step, nothing is left to stop: the run ends as usual."""
    save = trl.GRPOTrainer._save_optimizer_and_scheduler
    at = 2

    def stopped(trainer, output_dir):
        if trainer.state.global_step == at:
            signal.raise_signal(signal.SIGINT)
        save(trainer, output_dir)
    monkeypatch.setattr(trl.GRPOTrainer, "_save_optimizer_and_scheduler", stopped)
    each = {"save_strategy": "steps", "save_steps": 2}
    with pytest.raises(SystemExit) as stop:
        ours.main(words_of(small_llama, "grpo", **each))
    assert stop.value.code == 128 + signal.SIGINT
    assert capsys.readouterr().out.endswith("--resume_from_checkpoint out/checkpoint-2\n")
    assert [path.name for path in record.complete("out")] == ["checkpoint-2"]
    at = 4
    ours.main(words_of(small_llama, "grpo", resume_from_checkpoint="out/checkpoint-2", **each))
    assert capsys.readouterr().out.endswith("the trained model is in out\n")


def test_a_signal_before_the_training_is_one_line(small_llama, folder, refused):
    """Also while a reward is tried, whose SystemExit would count as its failure."""
    (folder / "mine.py").write_text(MINE.replace(
        "    return 1.0", "    signal.raise_signal(signal.SIGTERM)"))
    before = signal.getsignal(signal.SIGTERM)
    refused("stopped by SIGTERM before the training", ours.main,
            words_of(small_llama, "grpo", reward_funcs="mine.py:number"), code=128 + 15)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_run_writes_over_no_checkpoint_of_another_and_takes_none_for_its_own(
        small_llama, folder, monkeypatch, capsys, refused):
    """A run continues from its second step, while the folder has its third and fourth: a signal has
    to save its own third step, and a kill while it writes over one must not look complete."""
    each = {"save_strategy": "steps", "save_steps": 1}
    ours.main(words_of(small_llama, "grpo", **each))
    refused("--output_dir out: has checkpoints of another run; name a new folder, or continue with "
            "--resume_from_checkpoint out/checkpoint-4", ours.main, words_of(small_llama, "grpo"))
    weights = folder / "out/checkpoint-3/model.safetensors"
    os.utime(weights, (1, 1))
    train = trl.GRPOTrainer.training_step

    def stopped(trainer, *args):
        if trainer.state.global_step == 2:
            signal.raise_signal(signal.SIGTERM)
        return train(trainer, *args)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(trl.GRPOTrainer, "training_step", stopped)
        ours.main(words_of(small_llama, "grpo", resume_from_checkpoint="out/checkpoint-2"))
    assert capsys.readouterr().out.endswith("--resume_from_checkpoint out/checkpoint-3\n")
    assert weights.stat().st_mtime > 1

    def killed(*_):
        raise KeyboardInterrupt         # which nothing catches
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trl.GRPOTrainer, "_save_optimizer_and_scheduler", killed)
        ours.main(words_of(small_llama, "grpo", resume_from_checkpoint="out/checkpoint-3", **each))
    assert (folder / "out/checkpoint-4/model.safetensors").exists()
    assert [path.name for path in record.complete("out")] == [f"checkpoint-{n}" for n in (1, 2, 3)]


@pytest.fixture
def ends(capsys):
    """ends(words): checks that a run fails, with 1. -> its last line, below bars of progress"""
    def check(words):
        with pytest.raises(SystemExit) as stop:
            ours.main(words)
        assert stop.value.code == 1
        return capsys.readouterr().err.splitlines()[-1]
    return check


@pytest.mark.parametrize("words, flags, message", [
    ("mine.py:my_loss bad_call=7", {}, "step 3: the gradient is not finite: nan; the largest "),
    ("grpo", {"reward_funcs": "mine.py:nothing"}, "step 2: all rewards are None or nan: nothing"),
    ("grpo", {"reward_funcs": "mine.py:infinite"}, "step 2: a reward is infinite, of infinite"),
    ("grpo", {"reward_funcs": "mine.py:failing"},
     "step 2: a reward fails: ZeroDivisionError: division by zero")])
def test_what_is_not_finite_or_fails_ends_a_run_with_a_good_checkpoint(
        words, flags, message, small_llama, folder, ends):
    step = int(message[5]) - 1
    error = ends(words_of(small_llama, *words.split(), **flags))
    assert error.startswith(f"error: {message}")
    assert error.endswith(f"; the last checkpoint is out/checkpoint-{step}")
    weights = load_file(folder / f"out/checkpoint-{step}/model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())


def test_a_full_disk_leaves_no_half_checkpoint(small_llama, folder, ends, monkeypatch):
    save = trl.GRPOTrainer._save_checkpoint

    def full(trainer, model, trial):
        save(trainer, model, trial)
        if trainer.state.global_step == 4:
            os.truncate(folder / "out/checkpoint-4/trainer_state.json", 0)
            raise OSError(28, "No space left on device")
    monkeypatch.setattr(trl.GRPOTrainer, "_save_checkpoint", full)
    error = ends(words_of(small_llama, "grpo", save_strategy="steps", save_steps=2))
    assert error == ("error: out/checkpoint-4: cannot be saved: OSError: [Errno 28] No space left "
                     "on device; the last checkpoint is out/checkpoint-2")
    assert not (folder / "out/checkpoint-4").exists()


def test_a_log_that_cannot_be_written_ends_a_run_in_one_line_with_a_checkpoint(
        small_llama, folder, ends, monkeypatch):
    def full(trainer, *_):
        if trainer.state.global_step == 2:
            raise OSError(28, "No space left on device")
    monkeypatch.setattr(trl.GRPOTrainer, "log", full)
    assert ends(words_of(small_llama, "grpo")) == (
        "error: step 3: OSError: [Errno 28] No space left on device; the last checkpoint is "
        "out/checkpoint-2")


def test_the_page_shows_the_completions_and_the_answers_of_a_run(
        small_llama, folder, monkeypatch, capsys):
    """TRL writes the completions of an evaluation, behind the last ones of training, into one
    file."""
    (folder / "data").mkdir()
    held_out = [row | {"answer": "0"} for row in ROWS[-4:]]
    for name, rows in (("train", ROWS[:-4]), ("test", held_out)):
        (folder / f"data/{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ours.main(words_of(
        small_llama, "grpo", dataset_name="data", log_completions=True, eval_strategy="steps",
        eval_steps=2, per_device_eval_batch_size=4, num_generations_eval=2, max_steps=4))
    page.main(["out"])
    run = page.read_run("out")
    assert [one["step"] for one in run["metrics"] if "reward" in one] == [1, 2, 3, 4]
    assert [one["step"] for one in run["metrics"] if "eval_reward" in one] == [2, 4]
    questions = {row["prompt"][0]["content"] for row in held_out}
    assert {one["prompt"] for one in run["evaluation"]} == questions
    assert "evaluation at step 2, reward 0." in run["evaluation"][0]["base"]["label"]
    assert "evaluation at step 4, reward 0." in run["evaluation"][0]["trained"]["label"]
    assert not questions & {one["prompt"] for one in run["samples"]}
    for group in run["samples"]:
        mean = sum(one["reward"] for one in group["completions"]) / len(group["completions"])
        for one in group["completions"]:        # one reward, digits, centred on its group's mean
            assert one["reward"] == pytest.approx(digits([[{"content": one["text"]}]])[0])
            assert (one["advantage"] > 0) == (one["reward"] > mean) or abs(
                one["reward"] - mean) < 1e-6
    assert run["config"]["loss"] == "grpo:policy_loss how=sequence_mean"
    monkeypatch.setattr(sys, "argv", ["check", "out"])
    check.main()
    assert capsys.readouterr().out.endswith("to read its completions: python -m report.page out\n")
    assert "In 4 steps (" in page.sum_up([run]) and "the mean reward" in page.sum_up([run])


def test_an_adapter_of_trl_learns_from_our_loss(small_llama, folder):
    pytest.importorskip("peft", reason=NEEDS)
    trainer = ours.main(words_of(small_llama, "mine.py:my_loss", "how=token_mean", max_steps=2,
                                 use_peft=True, lora_r=4))
    assert trainer.how == "token_mean" and trainer.state.global_step == 2
    assert (folder / "out/adapter_model.safetensors").exists()
    learned = {name: x for name, x in trainer.model.named_parameters() if x.requires_grad}
    assert learned and all("lora" in name for name in learned)
    assert any(x.abs().sum() > 0 for name, x in learned.items() if "lora_B" in name)
