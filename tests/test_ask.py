"""python -m tools.ask RUN PROMPT prints what a policy answers, or one line about bad input."""
import dataclasses
import json
import shlex
import shutil

import pytest
from conftest import ROOT

import common
import grpo
from tools import ask, console

TINY = shlex.split("""
    --device cpu --operands 2 --hidden_size 16 --num_attention_heads 2 --num_hidden_layers 1
    --intermediate_size 16 --base_steps 2 --base_batch_size 4 --max_steps 1 --num_prompts 2
    --num_generations 2 --max_completion_length 8 --num_eval_problems 4 --num_eval_samples 2""")


def train(folder, *flags):
    """A run folder, made by grpo.py without pictures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "make_console", common.Console)
        patch.chdir(folder)
        grpo.main([*TINY, *flags, "--output_dir", "run"])
    return folder / "run"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("ask"))


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run, which a test may damage."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def answer(capsys):
    """answer(run, prompt): what the command prints, without the end of the line."""
    def call(run, prompt):
        ask.main([str(run), prompt])
        printed = capsys.readouterr()
        assert printed.err == "" and printed.out.endswith("\n")
        return printed.out[:-1]
    return call


@pytest.fixture
def refused(capsys):
    """refused(words, *said): exit code 2, and one line on stderr that says this."""
    def call(words, *said):
        with pytest.raises(SystemExit) as exit:
            ask.main([str(word) for word in words])
        printed = capsys.readouterr()
        assert exit.value.code == 2 and printed.out == ""
        assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
        for words in said:
            assert words in printed.err
    return call


def change_config(run, **flags):
    """Write other flags into the config of a run."""
    path = run / "config.json"
    record = json.loads(path.read_text())
    record["config"] |= flags
    path.write_text(json.dumps(record))


# ---- answers ---------------------------------------------------------------------------------

def test_the_answer_is_the_greedy_completion_of_the_trained_policy(trained, answer):
    saved = common.load(trained / "checkpoint.pt", "cpu")["policy"]
    cfg = common.parse_flags(grpo.Config, TINY)
    task = common.load_task(cfg, grpo.verify)
    policy = grpo.GPT(cfg)
    policy.load_state_dict(saved)
    for prompt in ("(3+4)=", "(1*9)=", "x"):
        prompts = grpo.encode_prompts([prompt], task, "cpu")
        problem = common.Problem(prompt, answer="")
        [text] = grpo.completion_texts(grpo.rollout(policy, prompts, [problem], task, cfg))
        assert answer(trained, prompt) == text.encode("unicode_escape").decode()


def test_the_policy_is_that_of_the_checkpoint_not_the_base(run, answer):
    """Only the checkpoint is asked, so a run that was stopped has an answer, too."""
    before = answer(run, "(3+4)=")
    for name in ("base.pt", "summary.json", "metrics.jsonl"):
        (run / name).unlink()
    assert answer(run, "(3+4)=") == before


def test_no_control_character_reaches_the_terminal(trained, answer, monkeypatch):
    hostile = "\x1b[2J\r\n\t\x00\x9b\u202e<answer>7</answer>\ufffd"
    monkeypatch.setattr(grpo, "completion_texts", lambda completions: [hostile])
    printed = answer(trained, "(3+4)=")
    assert printed == r"\x1b[2J\r\n\t\x00\x9b\u202e<answer>7</answer>\ufffd"
    assert printed.isascii() and printed.isprintable()


@pytest.fixture
def asked(monkeypatch):
    """The problems that a rollout is given, in the place of the rollout."""
    problems = []
    monkeypatch.setattr(grpo, "rollout", lambda policy, prompts, given, *_: problems.extend(given))
    monkeypatch.setattr(grpo, "completion_texts", lambda completions: [""])
    return problems


def test_the_example_of_the_run_keeps_what_only_the_environment_knows(asked):
    cfg = grpo.Config(task="lookup", device="cpu")
    task = common.load_task(cfg, grpo.verify)
    known = ask.example(task)
    assert known.secret
    for prompt in (known.prompt, "boss of ka?"):
        ask.answer(grpo, cfg, task, None, prompt)
    assert asked == [known, common.Problem("boss of ka?", answer="", task="lookup")]
    assert task.respond(asked[1], "<search>ka</search>") == "<information>unknown</information>"


@pytest.mark.parametrize("names, name", [
    ("arithmetic,lookup", "lookup"), ("lookup,countdown", "lookup"),
    ("countdown,arithmetic", "countdown")])
def test_of_a_mix_the_task_with_an_environment_responds(asked, names, name):
    cfg = grpo.Config(task=names, device="cpu")
    task = common.load_task(cfg, grpo.verify)
    ask.answer(grpo, cfg, task, None, "1+1=")
    assert asked == [common.Problem("1+1=", answer="", task=name)]
    assert "search" not in task.respond(asked[0], "1</think>")


def test_the_example_is_that_which_the_run_proposed(capsys, monkeypatch, tmp_path):
    """Whatever reward or curriculum it trained with, and though it is asked without."""
    cfg = grpo.Config(task="lookup", reward="fine", curriculum=True, device="cpu")
    plain = grpo.Config(task="lookup", device="cpu")
    known = ask.example(common.load_task(plain, grpo.verify))
    assert ask.example(common.load_task(cfg, grpo.verify)) == known
    monkeypatch.chdir(tmp_path)
    run = common.Run(cfg, common.load_task(cfg, grpo.verify), grpo.GPT(cfg), {}, [])
    run.state["steps"] = cfg.max_steps
    console.RichConsole().finish(run, {"base": {}, "trained": {}})
    assert capsys.readouterr().out.endswith(
        f"python -m tools.ask runs/grpo-lookup-s0 {shlex.quote(known.prompt)}\n")


def test_a_flag_that_was_not_given_may_have_no_value(run, answer, monkeypatch):
    """Its default is None, and it has another type when it is given."""
    @dataclasses.dataclass(frozen=True)
    class Config(grpo.Config):
        own_lam: float = common.flag(None, "that of another equation")
    monkeypatch.setattr(grpo, "Config", Config)
    before = None
    for value in (None, 0.5):
        change_config(run, own_lam=value)
        text = answer(run, "(3+4)=")
        assert before in (None, text)
        before = text


def test_what_only_training_needs_is_left_out(run, answer):
    """A run on another device, with Triton, rewards or a curriculum, is asked here all the same."""
    before = answer(run, "(3+4)=")
    change_config(run, device="cuda", kernel="triton", reward="model", curriculum=True)
    assert answer(run, "(3+4)=") == before


# ---- bad input -------------------------------------------------------------------------------

@pytest.mark.parametrize("words, said", [
    ([], "RUN"), (["run"], "PROMPT"), (["run", "1+1=", "2+2="], "2+2="),
    (["run", "1+1=", "--greedy"], "--greedy")])
def test_words_that_are_missing_or_too_many_are_refused(refused, words, said):
    refused(words, said)


@pytest.mark.parametrize("config", [
    None, "", "{", "[]", "7", "{}", '{"script": "grpo.py"}', '{"script": 1, "config": {}}',
    '{"script": "grpo.py", "config": []}'])
def test_a_folder_without_a_config_is_refused(refused, tmp_path, config):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    refused([tmp_path, "(3+4)="], str(tmp_path), "config.json")


def test_a_config_that_is_no_text_is_refused(refused, tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    refused([tmp_path, "(3+4)="], str(tmp_path), "config.json")


@pytest.mark.parametrize("script", [
    "common.py", "chess.py", "grpo", "../grpo.py", "tools/ask.py", "tests", "", "a\nb.py",
    str(ROOT / "grpo.py") + "x"])
def test_a_run_of_no_script_is_refused(refused, run, script):
    record = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(record | {"script": script}))
    refused([run, "(3+4)="], str(run), "no script of this repository")


@pytest.mark.parametrize("flags, said", [
    ({"chess": 1}, "flags"), ({"seed": "0"}, "flags"), ({"seed": None}, "flags"),
    ({"hidden_size": 15}, "--hidden_size 15"),
    ({"task": "chess"}, "--task chess"), ({"operands": "1"}, "--operands 1")])
def test_a_run_with_flags_that_make_no_sense_is_refused(refused, run, flags, said):
    change_config(run, **flags)
    refused([run, "(3+4)="], said)


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "flipped", "other"])
def test_a_checkpoint_that_cannot_be_read_is_refused(refused, run, damage):
    path = run / "checkpoint.pt"
    content = path.read_bytes()
    middle = len(content) // 2
    if damage == "missing":
        path.unlink()
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "cut":
        path.write_bytes(content[:middle])
    elif damage == "flipped":
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1:])
    else:
        common.write(path, {"state": {}})
    refused([run, "(3+4)="], str(path), "no policy")


def test_a_checkpoint_of_another_shape_is_refused(refused, run):
    change_config(run, hidden_size=32)
    refused([run, "(3+4)="], "checkpoint.pt", "no policy")


@pytest.mark.parametrize("prompt, said", [
    ("", "empty"), ("(3+4)= ", "7 characters"), ("\u00e9=", r"'\xe9='"), ("\udcff", r"\udcff"),
    ("\x1b[2J(3+4)=", r"\x1b[2J"), ("3\n+4=+5", r"3\n+4=+5"), ("\u0663=", r"\u0663")])
def test_a_prompt_that_no_task_has_is_refused(refused, trained, prompt, said):
    refused([trained, prompt], said)


def test_nothing_is_written(run, answer, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    answer(run, "(3+4)=")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
