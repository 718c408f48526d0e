"""engines.load reads a loss, and engines.import_path keeps our folders from hiding packages."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from small_runs import SMALL, arguments, steps
from torch.testing import assert_close as same

import engines
import grpo
import gspo
import ppo
from engines import here
from examples import zoo
from report import ask

pytestmark = pytest.mark.quick

MINE = """
import torch

def my_loss(logps, old_logps, advantages, mask, bound=2.0, kind="both", is_on=True, cap=None):
    assert isinstance(kind, str)
    ratio = (logps - old_logps).exp().clamp(max=bound)
    return -ratio * advantages

def wrong_sign(logps, old_logps, advantages, mask):
    return logps * advantages

def not_a_number(logps, old_logps, advantages, mask):
    return -logps * advantages * float("nan")

def in_verls_order(old_log_prob, log_prob, advantages, response_mask, scale=1.0):
    return -scale * (log_prob - old_log_prob).exp() * advantages * response_mask

def unnamed(*inputs):
    return -inputs[0] * inputs[2]

def half_named(x, y, advantages, mask):
    return -(x - y).exp() * advantages

def without_old(mask, A, log_probs):
    return -log_probs * A

def averaged(logps, old_logps, advantages, mask):
    return (logps * advantages).mean()

def expanded(logps, old_logps, advantages, mask):
    return -((logps - old_logps).exp() * advantages * mask).mean().expand(mask.shape)

def zero_valued(logps, old_logps, advantages, mask):
    return (logps.detach() - logps) * advantages

def in_place(logps, old_logps, advantages, mask):
    mask /= mask.sum(1, keepdim=True)
    return -(logps - old_logps).exp() * advantages

def broken(logps, old_logps, advantages, mask):
    return torch.stack([logps / (1 / 0)])

def free(logps, old_logps, advantages, mask, bound=2.0, **settings):
    return -logps * advantages * settings["scale"]
"""


@pytest.fixture
def mine(own_folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("mine.py").write_text(MINE)
    Path("bad.py").write_text("bound")


@pytest.mark.parametrize("words, said", [
    ("vectors mine.py:free scale=2 --recipe ppo", "policy_loss"), ("report.check a.jsonl", "TRL"),
    ("vectors loss.v2.py:f", "loss.v2.py: Python cannot import a file with another dot"),
    ("engines.here --loss mine.py:none", "mine.py: has no function none")])
def test_files_of_the_user_hide_none_of_python_or_of_ours(mine, words, said):
    Path("random.py").write_text("1 / 0")
    Path("tasks.py").write_text("from torch import stack")
    Path("mine.py").write_text(f"{MINE}\nfrom tasks import stack\n")
    Path("a.jsonl").write_text('{"step": 1, "reward": 0.1, "reward_std": 0.1}')
    found = subprocess.run([sys.executable, "-m", *words.split()], capture_output=True, text=True,
                           env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert said in found.stdout + found.stderr and "Error" not in found.stderr, found.stderr


def batch(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logps, old_logps = -torch.rand(2, 4, 5, generator=generator, dtype=dtype)
    mask = (torch.arange(5) < torch.tensor([5, 2, 4, 1])[:, None]).to(dtype)
    return logps, old_logps, torch.tensor([1.0, -1.0, 2.0, -0.5], dtype=dtype), mask


@pytest.mark.parametrize("text, function, settings, how", [
    ("grpo:policy_loss", grpo.policy_loss, {}, "sequence_mean"),
    ("grpo loss_type=dapo epsilon_high=.28", grpo.policy_loss,
     {"loss_type": "dapo", "epsilon_high": 0.28}, "token_mean"),
    ("grpo:policy_loss loss_type=dr_grpo", grpo.policy_loss, {}, "constant"),
    ("grpo:policy_loss loss_type=sapo how=sequence_sum", grpo.policy_loss, {"loss_type": "sapo"},
     "sequence_sum"),
    ("gspo:policy_loss level=sequence_token epsilon=3e-4", gspo.policy_loss,
     {"level": "sequence_token", "epsilon": 3e-4}, "sequence_mean"),
    ("ppo:policy_loss", ppo.policy_loss, {}, "token_mean"),
    ("zoo:policy_loss loss_type=dapo epsilon=0.1", grpo.policy_loss,
     {"epsilon": 0.1, "epsilon_high": 0.28}, "token_mean"),
    ("zoo loss_type=gmpo gmpo_epsilon=0.01", zoo.policy_loss,
     {"loss_type": "gmpo", "gmpo_epsilon": 0.01}, "sequence_mean"),
    ("zoo:dppo_kl dppo_kl_delta=0.01", zoo.policy_loss,
     {"loss_type": "dppo_kl", "dppo_kl_delta": 0.01}, "token_mean"),
    ("zoo", zoo.policy_loss, {}, "token_mean")])
def test_a_text_names_a_loss_its_settings_and_its_average(text, function, settings, how):
    logps, old_logps, A, mask = batch()
    loss, average = engines.load(text)
    same(loss(logps, old_logps, A, mask), function(logps, old_logps, A, mask, **settings))
    same(loss(logps, old_logps, A[:, None].expand_as(mask), mask), loss(logps, old_logps, A, mask))
    assert average == how


def test_a_loss_of_a_file_gets_settings_and_advantages_for_each_token(mine, monkeypatch):
    logps, old_logps, A, mask = batch()
    loss, how = engines.load("mine.py:my_loss bound=1.1 how=constant")
    same(loss(logps, old_logps, A, mask),
         -(logps - old_logps).exp().clamp(max=1.1) * A[:, None] * mask)
    assert how == "constant" and engines.load("mine.py:my_loss")[1] == "sequence_mean"
    assert engines.load("mine.py:free scale=2") and engines.load("mine.py:zero_valued")
    assert engines.load("mine.py:my_loss kind=2 cap=None")      # kind is a text, so "2", not 2
    monkeypatch.setenv("LOSS", "mine.py:my_loss how=token_mean")
    assert engines.load()[1] == "token_mean"


@pytest.mark.parametrize("name", ["my_loss", "in_verls_order", "without_old", "in_place"])
def test_arguments_are_bound_by_name_whatever_their_order(name, mine):
    """A loss that changes its inputs in place leaves those of the trainer as they are."""
    logps, old_logps, A, mask = batch()
    loss, _ = engines.load(f"mine.py:{name}")
    kept = mask.clone()
    expected = (logps if name == "without_old" else (logps - old_logps).exp()) * A[:, None] * mask
    same(loss(logps, old_logps, A, mask), -expected)
    same(mask, kept)


@pytest.mark.parametrize("text, words", [
    ("", "LOSS: must be grpo, gspo, ppo, zoo, or a file"),
    ("reinforce", "reinforce: must be grpo, gspo, ppo, zoo, or a file"),
    ("grpo:loss", "grpo: has no function loss"),
    ("grpo epsilon", "epsilon=: must be a number"),
    ("grpo eps=0.1", "eps: is not a setting of grpo; it has loss_type, epsilon, epsilon_high"),
    ("grpo loss_type=grop", "loss_type=grop: must be one of grpo, dr_grpo, dapo"),
    ("gspo level=anything", "gspo:policy_loss: ValueError: level='anything': must be seq"),
    ("grpo how=mean", "how=mean: must be one of sequence_mean, token_mean"),
    ("zoo loss_type=gmpo dro_beta=1",
     "dro_beta: is not a setting of zoo; it has loss_type, gmpo_epsilon, and how"),
    ("zoo:gmpo dro_beta=1", "dro_beta: is not a setting of zoo; it has gmpo_epsilon, and how"),
    ("none.py:my_loss", "none.py: there is no such file"),
    ("bad.py:my_loss", "bad.py: cannot be imported: bad.py:1: NameError: name 'bound' is not"),
    ("mine.py:my_loss size=1", "size: is not a setting of mine.py; it has bound, kind, is_on, cap"),
    ("mine.py:my_loss bound=high", "bound=high: must be a number"),
    ("mine.py:my_loss is_on=no", "is_on=no: must be True or False"),
    ("mine.py:wrong_sign", "mine.py:wrong_sign: the gradient is 4 for an output with A = 1 and -4"),
    ("mine.py:not_a_number", "mine.py:not_a_number: a loss or its gradient is not finite"),
    ("mine.py:half_named", "mine.py: half_named: needs x, y, but a trainer gives it logps"),
    ("mine.py:unnamed", "mine.py: unnamed: it has only inputs; write a setting, or an adapter, "
     "which begins with: python -m vectors mine.py:unnamed --recipe grpo --advantages BT"),
    ("mine.py:broken", "mine.py:broken: mine.py:LINE: ZeroDivisionError: division by zero"),
    ("mine.py:averaged", "mine.py:averaged: ValueError: returned the shape () for inputs"),
    ("mine.py:expanded", "mine.py:expanded: returned one number for all tokens; it must return")])
def test_a_loss_that_does_not_exist_or_does_not_fit_is_one_line(text, words, mine):
    with pytest.raises(ValueError) as error:
        engines.load(text)
    line = MINE[:MINE.index("(1 / 0)")].count("\n") + 1
    assert str(error.value).startswith(words.replace("LINE", str(line)))
    assert "\n" not in str(error.value)


# ---- the import path -------------------------------------------------------------------------

@pytest.fixture
def site(tmp_path):
    """The site-packages of an environment that has a package `kernels`."""
    (tmp_path / "site/kernels").mkdir(parents=True)
    (tmp_path / "site/kernels/__init__.py").touch()
    return tmp_path / "site"


def printed_by(*words, **variables):
    """Run Python in the checkout, without the tests' own path. -> what it printed, also as errors
    """
    done = subprocess.run([sys.executable, *words], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, check=False, env=os.environ | variables)
    return done.stdout


PATH = """
import sys
sys.path.append("{site}")
import engines.import_path
import engines
engines.load("grpo")
engines.load("zoo loss_type=gmpo")
import report, examples.lag, tasks.flags
import kernels
print(sys.path[-1], sys.path.count(sys.path[-1]), kernels.__file__)
"""


def test_no_import_of_ours_hides_a_package_of_the_environment(site):
    program = PATH.format(site=site)
    assert printed_by("-c", program).split() == [str(ROOT), "1", f"{site}/kernels/__init__.py"]


def test_real_py_hides_no_package_either(site):
    (site / "transformers.py").write_text("import kernels\nexit(kernels.__file__)\n")
    printed = printed_by("real.py", "none", PYTHONPATH=str(site))
    assert printed == f"{site}/kernels/__init__.py\n"


# ---- a run here ------------------------------------------------------------------------------

def test_a_loss_learns_here_as_the_scripts_own_does(mine, capsys, refused):
    # lengths differ, so each group has signal, whatever the base has learned
    small = arguments(SMALL | {"max_steps": 2, "reward": "accuracy+length"})
    grpo.main([*small, "--output_dir", "own"])
    here.main([*small, "--output_dir", "here"])
    here.main([*small, "--output_dir", "sums", "--loss", "mine.py:my_loss how=sequence_sum"])
    own, same_loss, sums = (steps(folder) for folder in ("own", "here", "sums"))
    for one, other in zip(own, same_loss):
        assert [other[name] for name in ("loss", "grad_norm", "reward")] == [
            one[name] for name in ("loss", "grad_norm", "reward")]
        assert one.keys() - other.keys() == {"clip_ratio/region_mean"}      # of grpo.py's own loss
    assert sums[0]["grad_norm"] > 2 * own[0]["grad_norm"]       # the mean has 1/|o|
    printed = capsys.readouterr().out
    assert "report.ask" in printed and "\nloss mine.py:my_loss how=sequence_sum; files " in printed
    found = json.loads(Path("sums/loss.json").read_text())
    assert found["loss"] == "mine.py:my_loss how=sequence_sum" and found["rewards"] == []
    assert Path("sums/source/mine.py").read_text() == MINE
    Path("mine.py").write_text(MINE + "\n# changed\n")
    refused("--loss mine.py:my_loss how=sequence_sum: --resume_from_checkpoint sums: was trained "
            "on loss mine.py:my_loss how=sequence_sum; files", here.main,
            ["--resume_from_checkpoint", "sums"])
    ask.main(["here", "(3+4)="])
