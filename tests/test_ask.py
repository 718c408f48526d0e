"""report.ask prints a policy's answer and refuses bad prompts in one line, and examples.coldstart
trains a policy on worked examples."""
import json
import shlex

import pytest
import torch
from conftest import load_named
from small_runs import INSTANT, arguments

import common
import grpo
import plumbing
from examples import coldstart
from report import ask

# ---- answers ---------------------------------------------------------------------------------

def test_the_answer_is_the_greedy_completion_of_the_last_checkpoint(run):
    for name in ("base.pt", "metrics.jsonl"):
        (run / name).unlink()                       # an answer needs neither file
    cfg = plumbing.parse_flags(grpo.Config, arguments(INSTANT))
    task = common.load_task(cfg, grpo.verify)
    policy = grpo.GPT(cfg)
    plumbing.load_policy(policy, run / "checkpoint.pt")
    for prompt in ("(3+4)=", "(1*9)=", "x", "2\u00d73="):
        problem = common.Problem(prompt, answer="")
        [text] = grpo.complete(policy, task, cfg, [problem]).texts
        assert ask.answer(run, prompt) == text


@pytest.mark.parametrize("name, asked", [
    ("arithmetic", "arithmetic"), ("arithmetic,lookup,gridworld", "lookup"),
    ("countdown,arithmetic", "countdown")])
def test_a_mix_is_asked_a_question_of_its_task_with_a_tool_or_its_own_example(name, asked):
    task = load_named(name)
    assert ask.problem_of(task, "x").task == asked
    [example] = common.sample_problems(task, 1, "example", "test")
    assert ask.problem_of(task, example.prompt) == example


def test_no_control_character_reaches_the_terminal(finished, monkeypatch, capsys):
    hostile = "\x1b[2J\r\n\t\x00\x9b\u202e<answer>7</answer>\ufffd"
    monkeypatch.setattr(grpo, "decode", lambda ids: hostile)
    ask.main([str(finished), "(3+4)="])
    printed = capsys.readouterr().out
    assert printed == r"\x1b[2J\r\n\t\x00\x9b\u202e<answer>7</answer>\ufffd" + "\n"


# ---- bad input -------------------------------------------------------------------------------

@pytest.mark.parametrize("prompt, said", [
    ("", "1 to 6"), ("(3+4)= ", "1 to 6"), ("\x1b[2J(3+4)=", r"\x1b[2J")])
def test_a_prompt_that_no_task_has_is_refused(refused, finished, prompt, said):
    refused(said, ask.main, [str(finished), prompt])


def test_a_run_of_a_script_that_is_gone_cannot_be_asked(run, stops):
    record = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(record | {"script": "none_such.py"}))
    stops("none_such", ask.answer, run, "3+4=")


@pytest.mark.parametrize("words, message", [
    (["new", "--batches", "0"], "--batches 0: must be at least 1"),
    (["."], ".: exists already; name a new folder")])
def test_a_cold_start_makes_a_new_folder_from_one_batch_or_more(words, message, run, refused):
    refused(message, coldstart.main, [str(run), *words])


# ---- a cold start ----------------------------------------------------------------------------

def test_a_cold_start_teaches_to_think_and_a_run_begins_where_it_ended(
        finished, own_folder, monkeypatch, watch, capsys):
    monkeypatch.setattr("report.observers.observers", lambda *_: [])
    shown = watch(common, "encode_examples", lambda examples, *_: examples)
    seeds = watch(plumbing, "warm_start", lambda policy, task, cfg: cfg.base_seed)
    coldstart.main([str(finished), "new", "--batches", "3"])
    assert all("<think>" in example.completion for examples in shown for example in examples)
    assert seeds == [1]                                     # the base saw those of seed 0
    command = capsys.readouterr().out.split()
    before = torch.load(finished / "checkpoint.pt")["policy"]
    taught = torch.load("new/checkpoint.pt")["policy"]
    assert not torch.equal(taught["embed.weight"], before["embed.weight"])
    few = shlex.split("--device cpu --max_steps 0 --num_eval_problems 4 --num_eval_samples 2")
    grpo.main([*command[2:], *few, "--output_dir", "run"])
    begun = torch.load("run/base.pt")["policy"]
    assert all(torch.equal(begun[name], weight) for name, weight in taught.items())
