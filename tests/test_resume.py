"""Test that a run which is stopped in any way and then resumed ends bit for bit like a run that was
never stopped."""
import json
import math
import os
import random
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from small_runs import SMALL, arguments, child, difference, load, mortal, outcome, resume

import common
import grpo
import plumbing

pytestmark = pytest.mark.usefixtures("at_work_folder")

# Flags whose code has a state between steps, or could have one.
STATEFUL = {"num_mini_batches": 2, "num_iterations": 2, "beta": 0.05, "num_eval_problems": 4}
EVERYTHING = [
    ("reinforce", STATEFUL | {"baseline": "optimal", "view": "token", "gamma": 0.9}),
    ("ppo", STATEFUL | {"trust_region": "penalty", "target_kl": 0.001, "kl_target": 0.001,
                        "nll_coef": 0.1, "critic_pretrain_steps": 1, "length_adaptive": True}),
    ("grpo", STATEFUL | {"dynamic_sampling": 3, "overlong_buffer": 8, "curriculum": True,
                         "base_steps": 40, "task": "arithmetic:2-3"}),
    ("gspo", STATEFUL | {"dynamic_sampling": 3, "curriculum": True, "base_steps": 20,
                         "task": "arithmetic:2,lookup", "reward": "accuracy+length"}),
    ("dpo", STATEFUL | {"online": True}),
    ("examples.distill", STATEFUL | {"beta": 0.5, "lmbda": 0.5}),
    ("examples.distill", STATEFUL | {"teacher": "self", "teacher_model_kind": "ema", "task": "key",
                                     "beta": 1.0, "base_steps": 20}),
    ("examples.trpo", {"task": "gridworld", "max_completion_length": 8, "base_steps": 10,
                       "beta": 0.05, "kl_target": 0.001}),
    ("examples.zoo", {"loss_type": "clip_cov", "advantage": "rpp", "num_iterations": 2,
                      "clip_cov_ratio": 0.1, "clip_cov_lb": 0.1})]


# ---- resuming --------------------------------------------------------------------------------

@pytest.mark.parametrize("script, flags", EVERYTHING, indirect=["script"], ids=str)
def test_three_steps_of_all_that_has_a_state_equal_two_and_one(script, flags, new_run, small_base):
    flags = flags | {"teacher": small_base} if "lmbda" in flags else flags
    three = new_run(**flags, max_steps=3)
    torch.manual_seed(1)                    # processes start with other states of these generators
    random.seed(1)
    two = new_run(**flags, max_steps=2)
    assert difference(outcome(two), outcome(three))
    for done in (2, 3):                                 # the second time, no steps are left
        script.main(arguments({"resume_from_checkpoint": two, "max_steps": 3}))
        assert not difference(outcome(two), outcome(three)), done


@pytest.mark.parametrize("script, flag", [
    ("grpo", "init_from"), ("examples.distill", "teacher")], indirect=["script"])
def test_a_run_goes_on_without_the_other_run_that_it_began_with(
        script, new_run, flag, tmp_path, monkeypatch):
    other = tmp_path / "other"
    grpo.main(arguments(SMALL | {"output_dir": other, "max_steps": 3}))
    flags = {flag: other, "max_steps": 3}
    three = new_run(**flags)
    one = new_run(**flags | {"max_steps": 1})
    shutil.rmtree(other)
    monkeypatch.setattr(plumbing, "load_base", None)                    # not needed either
    script.main(arguments({"resume_from_checkpoint": one, "max_steps": 3}))
    assert not difference(outcome(one), outcome(three))


def test_a_run_from_before_flags_changed_goes_on(script, new_run, whole):
    """It gets the default of a new flag, and ignores a flag that is gone, unless the run set it."""
    folder = new_run(max_steps=5)
    path = folder / "config.json"
    record = json.loads(path.read_text())
    del record["config"]["delta"]
    record["config"]["old_flag"] = 0.5
    path.write_text(json.dumps(record))
    with pytest.raises(TypeError, match="old_flag"):
        resume(folder, max_steps=10)
    record["config"]["old_flag"] = 0.0
    path.write_text(json.dumps(record))
    resume(folder, max_steps=10, delta=script.Config.delta)
    assert not difference(outcome(folder), outcome(whole))


def test_a_resume_says_that_the_problems_or_the_script_have_changed_and_a_profiler_is_no_script(
        tmp_path, monkeypatch, capsys):
    """As under python -m cProfile, where another module is __main__."""
    words = arguments(SMALL | {"output_dir": "run", "max_steps": 1, "base_steps": 0})
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", ["profiler", *words])
    code = compile(Path(grpo.__file__).read_bytes(), grpo.__file__, "exec")
    exec(code, {"__name__": "__main__", "__file__": grpo.__file__})
    resume(Path("run"), max_steps=2)
    assert Path("run/grpo.py").exists() and "have changed" not in capsys.readouterr().out
    held_out = common.held_out_problems
    monkeypatch.setattr(common, "held_out_problems", lambda *args: held_out(*args)[::-1])
    resume(Path("run"), max_steps=3)
    assert "the script or the problems have changed" in capsys.readouterr().out


# ---- kill -9 ---------------------------------------------------------------------------------

# Each moment: the call of a function that dies (mortal explains it).
MOMENTS = {
    "before its base is there": (os, "replace", 1, "base.pt"),
    "before its first checkpoint is there": (os, "replace", 1, "checkpoint.pt"),
    "in a checkpoint": (torch, "save", 4, ".tmp"),
    "before its first step": (plumbing.Run, "log", 1, ""),
    "between log and checkpoint": (plumbing.Run, "save", 2, "")}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_that_is_killed_goes_on_as_if_it_had_not_been(script, whole, tmp_path, moment):
    owner, name, number, file = MOMENTS[moment]

    def die(*args):
        if owner is torch:
            args[1].write(b"half")
            args[1].flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def run():
        setattr(owner, name, mortal(getattr(owner, name), number, die, file))
        script.main(arguments(SMALL | {"output_dir": tmp_path / "run"}))
    assert child(run) == -signal.SIGKILL
    resume(tmp_path / "run")
    assert not difference(outcome(tmp_path / "run"), outcome(whole))


# ---- numbers that are not finite -------------------------------------------------------------

def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_steps_before_it(
        script, new_run, whole, stops, tmp_path, monkeypatch, watch):
    aggregate = script.aggregate
    logged = watch(plumbing.Run, "log", lambda run, *_: run.step)
    with monkeypatch.context() as patch:
        patch.setattr(script, "aggregate", lambda *args: (
            aggregate(*args) * (math.nan if len(logged) >= 4 else 1)))
        error = stops("'loss': nan", new_run, save_steps=1, code=1)
    failed = int(re.match(r"error: step (\d+): ", error)[1])
    assert load(tmp_path / "run0/checkpoint.pt")["state"]["steps"] == failed - 1 >= 4
    resume(tmp_path / "run0", save_steps=SMALL["save_steps"])
    assert not difference(outcome(tmp_path / "run0"), outcome(whole))
