"""engines/trl.py: inside TRL's trainer, our losses give TRL's own numbers, and one gradient however
a batch is split."""
import inspect
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from small_models import NEEDS
from small_vectors import losses_of
from torch.testing import assert_close as same

import vectors
from vectors import names

trl = pytest.importorskip("trl", reason=NEEDS)
datasets = pytest.importorskip("datasets", reason=NEEDS)
ours = pytest.importorskip("engines.trl")

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


def test_two_processes_have_the_numbers_of_trl(small_llama, tmp_path):
    """The batch of an optimizer step is divided, and the gradients are averaged."""
    (tmp_path / "program.py").write_text(PROGRAM)
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         "program.py", small_llama], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})
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
    gradient(trainer, batch, parts=1)
    log_rho = (trainer.logps - batch["old_per_token_logps"]).detach()
    A, mask = batch["advantages"][:, None], batch["completion_mask"]
    counts = (A != 0) * mask
    clipped = torch.where(A > 0, log_rho.exp() > 1.1, log_rho.exp() < 0.9) * counts
    metrics = trainer._metrics["train"]
    assert metrics["no_gradient"][-1] == pytest.approx(clipped.sum().item() / counts.sum().item())
    assert metrics["max_log_ratio"][-1] == pytest.approx((log_rho * mask).abs().max().item())


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
from json import dumps

def my_loss(logps, old_logps, advantages, mask):
    return -(logps - old_logps).exp() * advantages

def _helper():
    pass

""" + inspect.getsource(digits)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the test, with problems, and a file that has a loss and a reward."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


@pytest.mark.parametrize("words, message", [
    ("grpo --epsilon 0.2", "--epsilon: belongs to TRL's own loss"),
    ("grpo --loss-type=grpo", "--loss_type: belongs to TRL's own loss"),
    ("grpo --use_liger_kernel", "--use_liger_kernel: belongs to TRL's own loss"),
    ("grpo eps=3", "eps: is not a setting of grpo"),
    ("grpo --run_name delta", "--dataset_name : cannot be read"),
    ("grpo --dataset_name none.jsonl", "--dataset_name none.jsonl: cannot be read"),
    ("grpo --dataset_name data.jsonl --eval_strategy steps",
     "--dataset_name data.jsonl: has no split test; to evaluate on files, name a folder"),
    ("grpo --reward_funcs none", "--reward_funcs none: must be a Python file"),
    ("grpo --reward_funcs none.py", "none.py: there is no such file"),
    ("grpo --reward_funcs mine.py:none", "--reward_funcs mine.py:none: has no function none")])
def test_a_mistake_in_the_arguments_is_one_line(words, message, folder, refused):
    refused(message, ours.main, f"{words} --output_dir out --use_cpu --bf16 False".split())


def test_rewards_are_the_functions_of_files_or_the_last_number(folder):
    names = [one.__name__ for one in ours.read_rewards(["mine.py", "mine.py:digits"])]
    assert names == ["my_loss", "digits", "digits"]
    [default] = ours.read_rewards(None)
    right, wrong = ({"role": "assistant", "content": f"3 + 4 = {x}"} for x in (7, 8))
    completions = [[right], "so 8", "no number", [wrong, right], [right, wrong]]
    assert default(completions=completions, answer=["7", "7", 7, 7, 7], prompts=[]) == [
        1.0, 0.0, 0.0, 1.0, 0.0]


def test_an_adapter_of_trl_learns_from_our_loss(small_llama, folder):
    pytest.importorskip("peft", reason=NEEDS)
    flags = FLAGS | {"max_steps": 2, "output_dir": "out", "dataset_name": "data.jsonl",
                     "reward_funcs": "mine.py:digits", "model_name_or_path": small_llama,
                     "use_peft": True, "lora_r": 4}
    words = [word for name, x in flags.items() for word in (f"--{name}", str(x))]
    trainer = ours.main(["mine.py:my_loss", "how=token_mean", *words])
    assert trainer.how == "token_mean" and trainer.state.global_step == 2
    assert (folder / "out/adapter_model.safetensors").exists()
    learned = {name: x for name, x in trainer.model.named_parameters() if x.requires_grad}
    assert learned and all("lora" in name for name in learned)
    assert any(x.abs().sum() > 0 for name, x in learned.items() if "lora_B" in name)
