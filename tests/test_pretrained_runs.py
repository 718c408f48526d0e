"""Runs of examples/pretrained.py: their flags, their problems, their checkpoints, and how they go
on."""
import importlib
import json
import math
import shutil
import sys

import pytest
import torch
from small_models import LIKE_SMALL, NEEDS, config_of, load_example, save_random
from small_runs import arguments, difference, leaves, lines, read_summary, steps

import common
import grpo
import gspo
from tools import ask

transformers = pytest.importorskip("transformers", reason=NEEDS)
from tools import processes  # noqa: E402  (behind the line that may skip)

pretrained = load_example()


@pytest.fixture
def run(tmp_path, monkeypatch, restored_ctrl_c):
    """run(name, **flags): a run in a new folder of the test. -> folder"""
    monkeypatch.chdir(tmp_path)

    def make(name="run", **flags):
        pretrained.main(arguments(LIKE_SMALL | {"output_dir": name, "stop_at": 2} | flags))
        return tmp_path / name
    return make


def resume(folder, **flags):
    return pretrained.main(arguments({"resume_from_checkpoint": folder} | flags))


def checkpoint(folder):
    """Weights and the rest of the only checkpoint of a run, without what a clock says."""
    [path] = folder.glob("checkpoint-*")
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    record = torch.load(path / "run.pt", weights_only=True)
    for name in ("seconds_total", "seconds_warm_start"):
        record["state"].pop(name)
    record.pop("logs")
    return {"weights": model.state_dict(), "record": record}


def outcome(folder):
    """All that a run leaves, but for times. -> {path: value}"""
    logs = {name: lines(folder / f"{name}.jsonl") for name in (
        "metrics", "samples", "greedy", "evaluation")}
    for line in logs["metrics"]:
        del line["step_time"]
    summary = {name: read_summary(folder)[name] for name in ("base", "trained", "steps")}
    return leaves(checkpoint(folder) | logs | summary)


def refused(capsys, tmp_path, **flags):
    """The one line with which a run is refused, with code 2, and nothing is made."""
    before = set(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        pretrained.main(arguments(LIKE_SMALL | {"output_dir": tmp_path / "new"} | flags))
    assert stop.value.code == 2
    assert set(tmp_path.rglob("*")) == before
    [line] = capsys.readouterr().err.splitlines()
    return line.removeprefix("error: ")


# ---- flags -----------------------------------------------------------------------------------

def test_each_method_has_the_clip_range_of_its_script():
    for method, script in (("grpo", grpo), ("gspo", gspo)):
        cfg = config_of(method=method)
        assert (cfg.epsilon, cfg.epsilon_high) == (
            script.Config.epsilon, script.Config.epsilon_high)
    cfg = config_of(method="gspo", epsilon=0.1)
    assert (cfg.epsilon, cfg.epsilon_high) == (0.1, gspo.Config.epsilon_high)


def test_defaults_are_those_of_the_scripts_but_for_three_that_depend_on_the_model():
    other = {}
    for field in common.flags_of(pretrained.Config):
        script = getattr(grpo.Config, field.name, None)
        if script is not None and field.default not in (None, script):
            other[field.name] = field.default
    assert other == {"learning_rate": 1e-6, "max_completion_length": 256, "micro_batch_size": 8}
    cfg = common.parse_flags(pretrained.Config, ["--model", "m", "--task", "countdown"])
    assert cfg.max_completion_length == 256             # not what countdown asks of small policies


@pytest.mark.parametrize("name", ["hidden_size", "base_steps", "init_from", "sampler_lag",
                                  "dynamic_sampling", "entropy_coef", "cold_start"])
def test_a_flag_of_the_small_policies_is_unknown(name, capsys, tmp_path):
    assert refused(capsys, tmp_path, model="m", **{name: 1}).startswith("unrecognized arguments")


def test_the_flags_that_there_are_stand_in_the_run_folder_and_no_others(run, small_llama):
    folder = run(model=small_llama, max_steps=1)
    record = json.loads((folder / "config.json").read_text())
    assert record["script"] == "pretrained.py"
    assert record["config"].keys() == {f.name for f in common.flags_of(pretrained.Config)}
    assert "hidden_size" not in record["config"]
    assert (folder / "pretrained.py").read_text() == (
        common.HERE / "examples/pretrained.py").read_text()


@pytest.mark.parametrize("flags, words", [
    ({}, "--model: is missing"),
    ({"model": "nowhere"}, "--model nowhere: cannot be loaded: "),
    ({"model": "LLAMA", "task": "lookup", "operands": "5"}, "--task lookup: inserts text"),
    ({"model": "LLAMA", "reward": "accuracy+model"}, "--reward accuracy+model: only the scripts"),
    ({"model": "LLAMA", "parallel": "fsdp"}, "--parallel fsdp: needs torchrun"),
    ({"model": "LLAMA", "method": "ppo"}, "--method ppo: must be one of grpo, gspo, reinforce"),
    ({"model": "LLAMA", "baseline": "rloo"}, "--baseline rloo: does nothing with --method grpo"),
    ({"model": "LLAMA", "method": "reinforce", "loss_type": "dapo"},
     "--loss_type dapo: does nothing with --method reinforce"),
    ({"model": "LLAMA", "method": "reinforce", "beta": 0.1},
     "--beta 0.1: does nothing with --method reinforce"),
    ({"model": "LLAMA", "loss_type": "cispo", "epsilon": 0.1},
     "--epsilon 0.1: does nothing with --loss_type cispo"),
    ({"model": "LLAMA", "eval_data": "x"}, "--eval_data x: does nothing without --data"),
    ({"model": "LLAMA", "importance_sampling_cap": 3.0}, "--importance_sampling_cap 3.0: does "),
    ({"model": "LLAMA", "data": "x"}, "--operands 2: does nothing with --data x"),
    ({"model": "LLAMA", "max_completion_length": 2043}, "--max_completion_length 2043: a prompt "),
    ({"model": "LLAMA", "num_prompts": 4, "num_mini_batches": 5}, "--num_mini_batches 5: ")],
    ids=str)
def test_what_cannot_work_is_refused_in_one_line(flags, words, capsys, tmp_path, small_llama):
    flags = {name: small_llama if value == "LLAMA" else value for name, value in flags.items()}
    if "max_completion_length" in flags:
        cfg = config_of(**flags)
        with pytest.raises(SystemExit):
            pretrained.Policy(small_llama, cfg).encode(["(8-4)="])
        assert capsys.readouterr().err.startswith(f"error: {words}")
        pretrained.Policy(small_llama, config_of(max_completion_length=2042)).encode(["(8-4)="])
        return
    assert refused(capsys, tmp_path, **flags).startswith(words)


def test_a_number_of_prompts_that_the_processes_cannot_share_is_refused(
        capsys, tmp_path, small_llama, monkeypatch):
    monkeypatch.setattr(processes, "WORLD_SIZE", 3)
    line = refused(capsys, tmp_path, model=small_llama)
    assert line == "--num_prompts 4: must be a multiple of the number of processes, 3"


def test_a_model_that_lacks_weights_or_an_end_is_refused(capsys, tmp_path):
    from safetensors.torch import load_file, save_file
    folder = save_random(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    lost = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    line = refused(capsys, tmp_path, model=folder)
    assert line == f"--model {folder}: has no model.layers.1.mlp.up_proj.weight"
    weights["model.layers.1.mlp.up_proj.weight"] = lost
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("generation_config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        content = {key: value for key, value in content.items() if "eos" not in key}
        (folder / name).write_text(json.dumps(content))
    line = refused(capsys, tmp_path, model=folder)
    assert line == f"--model {folder}: has no token that ends a text"


# ---- what is computed ------------------------------------------------------------------------

def counted(monkeypatch, module, name):
    """The arguments of each call of a function."""
    calls = []
    plain = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: (calls.append(args), plain(*args))[1])
    return calls


def test_rows_without_an_advantage_are_not_computed(run, small_llama, monkeypatch):
    calls = counted(monkeypatch, pretrained, "score")
    passes = counted(monkeypatch, processes, "backward")
    folder = run(model=small_llama, max_steps=3, eval_steps=100)
    in_loss = sum(len(args[1]) for args in calls) - 32          # of the samples that are kept
    signal = [line["signal"] for line in steps(folder)]
    assert min(signal) < 1
    assert in_loss == sum(32 * share for share in signal)
    assert len(passes) > 0


def test_a_reference_is_loaded_for_the_kl_alone(run, small_llama, monkeypatch):
    plain = pretrained.Policy
    made = []
    monkeypatch.setattr(pretrained, "Policy", lambda *args: made.append(args) or plain(*args))
    folder = run("without", model=small_llama, max_steps=1)
    assert len(made) == 1 and "kl" not in steps(folder)[0]
    folder = run("with", model=small_llama, max_steps=3, beta=0.1)
    assert len(made) == 3
    found = [line["kl"] for line in steps(folder)]
    assert found[0] == pytest.approx(0, abs=1e-6) and found[2] > 1e-5


def test_the_size_of_micro_batches_is_for_memory_alone(run, small_llama):
    flags = {"model": small_llama, "max_steps": 3, "loss_type": "dapo", "beta": 0.05}
    one = run("one", **flags)
    other = run("other", micro_batch_size=3, sample_batch_size=5, **flags)
    for a, b in zip(steps(one), steps(other)):
        assert a["reward"] == b["reward"]
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_a_step_without_signal_still_moves_by_the_momentum(run, small_llama, monkeypatch):
    rewards = iter([None, None, 1.0, 1.0])
    plain = common.make_batch

    def make_batch(*args):
        batch = plain(*args)
        value = next(rewards)
        if value is not None:
            batch.rewards[:] = value
        return batch
    monkeypatch.setattr(common, "make_batch", make_batch)
    two = checkpoint(run("two", model=small_llama, max_steps=2))
    rewards = iter([None, None, 1.0, 1.0])
    four = checkpoint(run("four", model=small_llama, max_steps=4))
    assert difference(leaves(two["weights"]), leaves(four["weights"]))
    state = four["record"]["optimizer"]["state"]
    assert {value["step"].item() for value in state.values()} == {4}


def test_a_correction_takes_the_trainers_log_probs_and_weighs_tokens(
        run, small_llama, monkeypatch):
    plain = pretrained.complete

    def rounded(policy, prompts, cfg, uniforms=None):
        tokens, logps, entropies = plain(policy, prompts, cfg, uniforms)
        return tokens, logps - 0.5, entropies           # a sampler that finds all less likely
    monkeypatch.setattr(pretrained, "complete", rounded)
    without = steps(run("without", model=small_llama, max_steps=1))[0]
    assert without["sampling/sampling_logp_difference/mean"] == pytest.approx(0.5, abs=1e-4)
    assert without["max_log_ratio"] == pytest.approx(0.5, abs=1e-4)
    corrected = steps(run("with", model=small_llama, max_steps=1,
                          importance_sampling_correction="truncate"))[0]
    assert corrected["max_log_ratio"] < 1e-4
    assert corrected["sampling/sampling_logp_difference/mean"] == pytest.approx(0.5, abs=1e-4)
    w = math.exp(0.5)
    assert corrected["sampling/importance_sampling_ratio/mean"] == pytest.approx(w, rel=1e-4)
    capped = steps(run("capped", model=small_llama, max_steps=1, temperature=0.7,
                       importance_sampling_correction="truncate", importance_sampling_cap=1.2))[0]
    assert capped["max_log_ratio"] < 1e-4
    assert capped["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.2, rel=1e-4)
    monkeypatch.setattr(pretrained, "complete", plain)
    plain_run = steps(run("plain", model=small_llama, max_steps=1))[0]
    assert corrected["grad_norm"] == pytest.approx(w * plain_run["grad_norm"], rel=1e-3)


def test_prompts_come_behind_the_instruction(run, small_llama, monkeypatch):
    seen = []
    plain = pretrained.Policy.encode

    def encode(self, texts):
        ids = plain(self, texts)
        seen.append(self.decode([i for i in ids[0].tolist() if i >= 0]))
        return ids
    monkeypatch.setattr(pretrained.Policy, "encode", encode)
    run(model=small_llama, max_steps=1, instruction="Compute ")
    assert all(text.startswith("Compute (") for text in seen)


# ---- problems of a file ----------------------------------------------------------------------

@pytest.fixture
def files(tmp_path):
    """Two files of sums, to train on and held out."""
    for name, digits in (("train", range(1, 7)), ("test", range(7, 10))):
        with open(tmp_path / f"{name}.jsonl", "w") as file:
            for a in digits:
                for b in range(1, 10):
                    file.write(json.dumps({"prompt": f"({a}+{b})=", "answer": a + b}) + "\n")
    return tmp_path / "train.jsonl", tmp_path / "test.jsonl"


DATA = {name: value for name, value in LIKE_SMALL.items() if name != "operands"}


def test_a_run_on_a_file_samples_each_problem_once_a_pass(
        files, small_llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train, test = files
    batches = counted(monkeypatch, common, "make_batch")
    summary = pretrained.main(arguments(DATA | {
        "model": small_llama, "data": train, "eval_data": test, "max_steps": 2, "num_prompts": 27,
        "num_generations": 2, "stop_at": 2, "eval_steps": 1, "num_eval_problems": 99}))
    assert summary["base"]["problems"] == 27
    folder = tmp_path / "runs/pretrained-train-s0"
    sampled = [problem.prompt for args in batches for problem in args[2][::2]]
    assert sorted(sampled) == sorted(line["prompt"] for line in lines(train))
    held_out = [line["prompt"] for line in lines(folder / "evaluation.jsonl")]
    assert len(set(held_out)) == 27
    assert set(held_out) == {line["prompt"] for line in lines(test)}
    [line] = [line for line in lines(folder / "evaluation.jsonl") if line["prompt"] == "(7+2)="]
    assert line["answer"] == "9"


def test_a_malformed_line_is_refused_with_its_number(files, capsys, tmp_path, small_llama):
    train, _ = files
    with open(train, "a") as file:
        file.write('{"prompt": "1+1="}\n')
    with pytest.raises(SystemExit) as stop:
        pretrained.main(arguments(DATA | {"model": small_llama, "data": train}))
    assert stop.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --data {train}: line 55 is not ")


# ---- checkpoints -----------------------------------------------------------------------------

EVERYTHING = [{}, {"beta": 0.05, "num_iterations": 2, "num_mini_batches": 2, "warmup_steps": 7},
              {"method": "gspo", "importance_sampling_correction": "truncate",
               "dtype": "bfloat16", "gradient_checkpointing": True},
              {"method": "reinforce", "baseline": "batch", "weight_decay": 0.1}]


@pytest.mark.parametrize("flags", EVERYTHING, ids=str)
def test_six_steps_equal_three_and_three_after_a_resume_bit_for_bit(flags, run, small_llama):
    torch.manual_seed(1)
    six = run("six", model=small_llama, max_steps=6, save_steps=2, **flags)
    torch.manual_seed(2)
    three = run("three", model=small_llama, max_steps=3, **flags)
    assert difference(outcome(three), outcome(six))
    resume(three, max_steps=6)
    assert not difference(outcome(three), outcome(six))


def test_a_run_on_a_file_goes_on_with_the_next_problems(files, tmp_path, small_llama, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = DATA | {"model": small_llama, "data": files[0], "stop_at": 2}
    pretrained.main(arguments(flags | {"max_steps": 4, "output_dir": "four"}))
    pretrained.main(arguments(flags | {"max_steps": 2, "output_dir": "two"}))
    resume("two", max_steps=4)
    assert not difference(outcome(tmp_path / "four"), outcome(tmp_path / "two"))


def test_a_finished_run_that_is_resumed_stays_as_it_is(run, small_llama):
    folder = run(model=small_llama, max_steps=3)
    before = outcome(folder)
    resume(folder)
    assert not difference(outcome(folder), before)


def test_a_run_killed_before_its_first_checkpoint_starts_over(run, small_llama):
    whole = run("whole", model=small_llama, max_steps=3)
    folder = run(model=small_llama, max_steps=3)
    [path] = folder.glob("checkpoint-*")
    path.rename(path.with_suffix(".tmp"))               # as a kill leaves it
    resume(folder)
    assert not difference(outcome(folder), outcome(whole))


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(run, small_llama, monkeypatch):
    whole = run("whole", model=small_llama, max_steps=6)
    plain = torch.save

    def killed(content, path):
        if "checkpoint-6" in str(path):
            raise KeyboardInterrupt
        plain(content, path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", killed)
        run(model=small_llama, max_steps=6)
    folder = whole.parent / "run"
    assert (folder / "checkpoint-3").is_dir()
    resume(folder)
    assert not difference(outcome(folder), outcome(whole))


def test_of_two_checkpoints_a_run_goes_on_with_the_later(run, small_llama):
    whole = run("whole", model=small_llama, max_steps=12, save_steps=1)
    folder = run(model=small_llama, max_steps=9)
    shutil.copytree(folder / "checkpoint-9", tmp := folder.parent / "nine")
    resume(folder, max_steps=10)
    shutil.move(tmp, folder / "checkpoint-9")           # a kill came before it was removed
    resume(folder, max_steps=12)
    assert not difference(outcome(folder), outcome(whole))


def test_a_checkpoint_is_a_folder_of_transformers_that_samples_as_its_model_did(run, small_llama):
    folder = run(model=small_llama, max_steps=3)
    [path] = folder.glob("checkpoint-*")
    assert path.name == "checkpoint-3"
    assert json.loads((path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    asked = json.loads((path / "generation_config.json").read_text())
    assert (asked["do_sample"], asked["top_k"], asked["eos_token_id"]) == (True, 0, grpo.EOS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert tokenizer("<answer>7</answer>").input_ids == [258, 55, 259]


@pytest.mark.parametrize("name", ["run.pt", "model.safetensors", "config.json"])
def test_a_damaged_checkpoint_is_refused_in_one_line(name, run, small_llama, capsys):
    folder = run(model=small_llama, max_steps=3)
    path = folder / "checkpoint-3" / name
    path.write_bytes(path.read_bytes()[:100])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        resume(folder, max_steps=4)
    assert stop.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --resume_from_checkpoint {folder}: ")
    assert "checkpoint-3 is damaged" in line


def test_a_resumed_run_keeps_its_flags(run, small_llama, capsys):
    folder = run(model=small_llama, max_steps=3)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        resume(folder, learning_rate=1e-3)
    assert capsys.readouterr().err.startswith(
        f"error: --learning_rate 0.001: the run has 0.0005; omit it or --model {folder}")


def test_what_is_for_memory_alone_may_change_on_resume(run, small_llama, capsys):
    whole = run("whole", model=small_llama, max_steps=6)
    folder = run(model=small_llama, max_steps=3)
    resume(folder, max_steps=6, micro_batch_size=7, sample_batch_size=3,
           gradient_checkpointing="true")
    for one, other in zip(steps(whole), steps(folder), strict=True):
        assert one["reward"] == other["reward"]
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)


def test_a_run_that_starts_from_another_keeps_to_the_checkpoint_that_it_had(run, small_llama):
    first = run("first", model=small_llama, max_steps=3)
    second = run("second", model=first, max_steps=1)
    config = json.loads((second / "config.json").read_text())["config"]
    assert config["model"] == str(first / "checkpoint-3")


def test_a_checkpoint_that_cannot_be_written_ends_the_run_in_one_line(
        run, small_llama, monkeypatch, capsys):
    def full(content, path):
        raise RuntimeError("unexpected pos 64 vs 0")
    plain = torch.save
    monkeypatch.setattr(torch, "save", lambda content, path: (
        full if "checkpoint-3" in str(path) else plain)(content, path))
    with pytest.raises(SystemExit) as stop:
        run(model=small_llama, max_steps=3)
    assert stop.value.code == 1
    assert capsys.readouterr().err.endswith(
        "checkpoint-3: cannot be written: unexpected pos 64 vs 0\n")


def test_a_prompt_that_is_too_long_is_refused_before_the_run_begins(
        files, capsys, tmp_path, small_llama):
    with open(files[0], "a") as file:
        file.write(json.dumps({"prompt": "1+" * 1100 + "1=", "answer": "1101"}) + "\n")
    with pytest.raises(SystemExit) as stop:
        pretrained.main(arguments(DATA | {
            "model": small_llama, "data": files[0], "output_dir": tmp_path / "new"}))
    assert stop.value.code == 2
    assert "a prompt has 2202 tokens, the model reads 2048" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_run_of_a_script_or_an_empty_folder_is_no_model(capsys, tmp_path, small_base):
    (tmp_path / "empty").mkdir()
    line = refused(capsys, tmp_path, model=small_base)
    assert line == (f"--model {small_base}: is a run of a script; python -m tools.export makes a "
                    "model of it")
    line = refused(capsys, tmp_path, model=tmp_path / "empty")
    assert line == f"--model {tmp_path / 'empty'}: cannot be loaded: there is no config.json"


def test_long_prompts_make_micro_batches_smaller(run, files, small_llama, monkeypatch):
    seen = []
    plain = pretrained.score

    def score(policy, prompts, completions, *rest):
        if torch.is_grad_enabled():
            seen.append((len(prompts), prompts.shape[1], completions.shape[1]))
        return plain(policy, prompts, completions, *rest)
    monkeypatch.setattr(pretrained, "score", score)
    run(model=small_llama, max_steps=2, micro_batch_size=4, instruction="1+" * 50,
        operands="2-9", loss_type="dapo", beta=0.1, max_completion_length=32)
    longest = max(W for _, W, _ in seen) + max(T for _, _, T in seen)
    assert max(rows * (W + T) for rows, W, T in seen) <= 4 * longest
    assert 2 * min(T for _, _, T in seen) < max(T for _, _, T in seen)


def test_a_run_starts_from_what_another_has_trained(run, small_llama):
    first = run("first", model=small_llama, max_steps=3)
    second = run("second", model=first, max_steps=1)
    assert read_summary(second)["base"] == read_summary(first)["trained"]


def test_its_report_shows_the_command_that_was_typed(run, small_llama, monkeypatch):
    monkeypatch.delitem(sys.modules, "tools.report")
    folder = run(model=small_llama, max_steps=2)
    report = importlib.import_module("tools.report")
    command, flags = report.read_config(folder)
    assert command.startswith("python examples/pretrained.py --max_completion_length 16 ")
    assert flags["model"] == str(small_llama)
    assert "examples/pretrained.py" in (folder / "report.html").read_text()


def test_a_run_of_no_steps_says_how_good_the_base_is_and_leaves_no_checkpoint(run, small_llama):
    folder = run(model=small_llama, max_steps=0)
    assert list(folder.glob("checkpoint-*")) == []
    assert read_summary(folder)["base"] == read_summary(folder)["trained"]


@pytest.mark.parametrize("max_steps", [0, 2])
def test_the_policy_of_a_run_can_be_asked(max_steps, run, small_llama, capsys):
    folder = run(model=small_llama, max_steps=max_steps)
    examples = lines(folder / "evaluation.jsonl")
    capsys.readouterr()
    for example in examples[:4]:
        ask.main([str(folder), example["prompt"]])
        answer = capsys.readouterr().out.rstrip("\n")
        assert answer == ask.escape(example["trained"]["text"])
    with pytest.raises(SystemExit):
        ask.main([str(folder), ""])
