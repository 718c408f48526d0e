"""Run the recipes of docs/recipes.md with their packages. `make recipes` installs the packages."""
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import ROOT
from small_models import LIKE_SMALL, NEEDS, load_example, save_random
from small_runs import arguments, at_work, read_summary, steps

pytest.importorskip("transformers", reason=NEEDS)
PAGE = (ROOT / "docs/recipes.md").read_text()
FILES = {name: source for source, name in
         re.findall(r'^```python\n(""".*?(\w+\.py).*?)^```$', PAGE, re.S | re.M)}
COMMANDS = [command for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.S | re.M)
            for command in block.replace("\\\n", "").splitlines()]
FLAGS = LIKE_SMALL | {"output_dir": "run", "max_steps": 1, "num_eval_problems": 4}
del FLAGS["task"]


@pytest.fixture
def recipe(tmp_path, small_llama, monkeypatch):
    """recipe(package, word, **replaced): skip the test if the package is missing. Otherwise run the
    commands of the page that contain the word, in the folder of the test, with texts replaced."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub_cache"))
    monkeypatch.delitem(sys.modules, "mine", raising=False)     # of the notebook's test
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, source in FILES.items():
        Path(name).write_text(source)

    def run(package, word, replaced=()):
        pytest.importorskip(package, reason="needs pretrained/requirements-recipes.txt")
        for command in COMMANDS:
            for old, new in (("MODEL", str(small_llama)), *replaced):
                command = command.replace(old, new)
            before, is_training, flags = command.partition("python pretrained/train.py ")
            if word in command and is_training:
                for variable in before.split():
                    monkeypatch.setenv(*variable.split("="))
                with at_work(tmp_path):
                    load_example().main([*shlex.split(flags), *arguments(FLAGS)])
            elif word in command:
                subprocess.run(command, shell=True, check=True)
    return run


def rated(file, records, texts):
    """Rate texts, each for its record of --data, by the functions of a file. -> list of lists"""
    Path("few.jsonl").write_text("\n".join(
        json.dumps(record | {"prompt": f"{i}"}) for i, record in enumerate([*records] * 30)))
    pretrained = load_example()
    task = pretrained.load_task(pretrained.Config(model="none", reward_file=file, data="few.jsonl"))
    problems = {int(problem.prompt): problem for problem in task.train + task.test}
    ids = [[] for _ in texts]
    return task.rated([(problems[i], text) for i, text in enumerate(texts)], ids).tolist()


def test_a_task_of_reasoning_gym_is_data_and_reward_also_for_real_py(
        recipe, monkeypatch, tmp_path, capsys):
    recipe("reasoning_gym", "reasoning.py")
    rows = [json.loads(line) for line in Path("train.jsonl").read_text().splitlines()]
    assert len(rows) == 2000 and steps("run")[0]["rewards/score/mean"] >= 0
    assert read_summary("run")["base"].keys() >= {"pass@1", "sampled_reward"}
    sums = [str(eval(re.search(": (.*) =", row["prompt"])[1])) for row in rows[:3]]
    texts = [f"so <answer>{sums[0]}</answer>", sums[1], "<answer>x</answer>"]
    assert rated("reasoning.py", rows[:3], texts) == [[1, 1], [0, 0], [0, 0]]
    import reasoning_gym

    import real
    module = runpy.run_path("reasoning.py")
    for name, wrong in (("prime_factorization", 0.0), ("arc_agi", 0.05)):   # the first one raises
        module["_TASK"] = module["correct"].__globals__["_TASK"] = task = (
            reasoning_gym.create_dataset(name, size=1, seed=0))
        texts = [f"<answer>{task[0]['answer']}</answer>", "<answer>x</answer>"]
        right, other = module["correct"](texts, [0, 0])
        assert right == 1 and other <= wrong
    for name, value in {"P": 2, "G": 2, "W": 99, "T": 4, "HELD_OUT": 2, "verify": None}.items():
        monkeypatch.setattr(real, name, value)
    monkeypatch.setattr(real.main, "__defaults__", (None, 0, 1))
    monkeypatch.setattr(sys, "argv", ["", str(save_random(tmp_path / "model")), "train.jsonl"])
    runpy.run_path("own_real.py")
    assert "step 0: reward 0.0" in capsys.readouterr().out
    assert real.verify(0, f"<answer>{sums[0]}</answer>") == 1


def test_the_reward_functions_of_the_page_run(recipe):
    Path("runs/gemma").mkdir(parents=True)
    for name, numbers in (("train", range(6, 30)), ("test", range(2, 6))):
        Path(f"runs/gemma/{name}.jsonl").write_text("\n".join(json.dumps(
            {"prompt": f"{a} and 2 make {2 * a}:", "answer": [a, 2, 2 * a]}) for a in numbers))
    recipe("transformers", "forms.py", [("--max_completion_length 10", "")])
    assert steps("run")[0].keys() >= {f"rewards/{name}/mean" for name in
                                      ("short", "spaced", "product")}


def test_math_verify_compares_formulas_and_its_alarm_works_in_a_reward_file(recipe):
    recipe("math_verify", "no command")
    cases = [(r"\frac{1}{2}", "so $0.5$", 1), ("x+1", r"\boxed{1+x}", 1), ("5", "5 or 6", 0),
             (r"\{1,2\}", r"\boxed{\{2,1\}}", 1), ("2", "$9^{9^{9^9}}$", 0), ("5", "", 0),
             ("1 < x", "$x > 1$", 1), ("Paris", r"\boxed{pairs}", 1)]
    answers, texts, expected = zip(*cases)
    found = rated("tex.py", [{"answer": answer} for answer in answers], texts)
    assert found == [[value, value] for value in expected]      # the tower needs an alarm


def test_a_data_set_becomes_the_data_of_a_run(recipe):
    Path("folder").mkdir()
    for split in ("train", "test"):
        Path(f"folder/{split}.jsonl").write_text("\n".join(
            json.dumps({"question": f"({a}+{b})=", "answer": f"{a}+{b} #### {a + b}"})
            for a in range(1, 8) for b in range(1, 6) if (a == b) == (split == "test")))
    recipe("datasets", "hub.py", [("openai/gsm8k main", "folder")])
    recipe("datasets", "--eval_data test.jsonl")
    rows = [json.loads(line) for line in Path("test.jsonl").read_text().splitlines()]
    assert rows == [{"prompt": f"({a}+{a})=", "answer": f"{2 * a}"} for a in range(1, 6)]
    assert len(Path("train.jsonl").read_text().splitlines()) == 30


def test_an_alarm_stops_a_reward(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("""
def slow(text, answer):
    while text == "hang":
        pass
    return answer
""")
    Path("limited.py").write_text(FILES["limited.py"].replace(
        "alarm(5)", "setitimer(0, 0.01 if arguments[0] == 'hang' else 60)"))
    assert rated("limited.py", [{"answer": 2}], ["hang", "no"]) == [[0, 0], [0, 2]]
    assert signal.setitimer(signal.ITIMER_REAL, 0)[0] == 0      # no alarm would ring later


def test_a_judge_grades_completions_side_by_side(recipe):
    seen, most = [], []
    are_many = threading.Event()

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self):
            most.append(threading.active_count())
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, request))
            if max(most) > 8:
                are_many.set()
            are_many.wait(60)           # for others, so it needs no quick machine
            are_many.set()
            text = ["7 of 10", "none", "99", None][len(seen) % 4]
            reply = json.dumps({"id": "1", "object": "chat.completion", "created": 1, "choices": [
                {"index": 0, "finish_reason": "stop",
                 "message": {"role": "assistant", "content": text}}], "model": "judge"}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_):
            pass
    rows = [{"prompt": f"({a}+{b})=", "answer": a + b} for a in range(1, 9) for b in range(1, 6)]
    Path("train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            recipe("openai", "judge.py", [(":8000", f":{server.server_port}")])
        finally:
            server.shutdown()
    path, request = seen[0]
    assert path == "/v1/chat/completions" and request["model"] == "judge" and max(most) > 8
    assert re.match(r"Question: \(.*\)=\n\nAnswer: ", request["messages"][1]["content"])
    assert 0 < steps("run")[0]["rewards/clarity/mean"] < 1


@pytest.mark.parametrize("flags", [
    {"beta": 0.1, "kl_estimator": "k3_ratio", "delta": 2.0}, {"loss_type": "dapo", "beta": 0.2},
    {"method": "gspo", "epsilon": 1e-3}, {"loss_type": "dr_grpo", "scale_rewards": "none"},
    {"loss_type": "cispo", "scale_rewards": "batch"}])
def test_two_steps_of_trl_have_our_losses_and_gradients(flags, tmp_path, monkeypatch, capsys):
    trl = pytest.importorskip("trl", reason="needs pretrained/requirements-recipes.txt")
    from datasets import Dataset
    from transformers import TrainerCallback

    from pretrained import elsewhere
    train, ours, theirs, losses = load_example(), [], [], []

    def gradients(model):
        return {name: weight.grad.clone() for name, weight in model.named_parameters()}

    def backward(policy, parameters, batch, *rest, backward=train.backward):
        metrics = backward(policy, parameters, batch, *rest)
        ours.append((metrics["loss"], gradients(policy.model), batch))
        return metrics

    def rollout(prompts, _):            # our outputs, in the order of the prompts
        batch = ours[0][2]
        asked = [problem.prompt for problem in batch.problems]
        rows = [asked.index(prompt) + i % 8 for i, prompt in enumerate(prompts)]
        tokens = [batch.tokens[i, :batch.lengths[i]].tolist() for i in rows]
        return {"completion_ids": tokens, "logprobs": tokens,           # the second is not used
                "prompt_ids": [[i for i in batch.prompts[row].tolist() if i >= 0] for row in rows],
                "given": batch.rewards.flatten()[rows].tolist()}
    Path(tmp_path, "mine.py").write_text(
        "def mod(completion_ids, **_):\n    return [sum(ids) % 3 for ids in completion_ids]\n")
    Path(tmp_path, "train.jsonl").write_text("\n".join(
        json.dumps({"prompt": f"({i}+{i * i})="}) for i in range(30)))
    model = str(save_random(tmp_path / "model"))
    monkeypatch.setattr(train, "backward", backward)
    with at_work(tmp_path):
        train.main(arguments(FLAGS | {
            "model": model, "data": "train.jsonl", "reward_file": "mine.py", "num_iterations": 2,
            "micro_batch_size": 8, "max_grad_norm": 0, "learning_rate": 1e-3} | flags))
        capsys.readouterr()
        elsewhere.main(["run"])
        code, names = capsys.readouterr().out.partition("# verl")[0], {}
        exec(code, {"GRPOConfig": trl.GRPOConfig}, names)
        rows = [{"prompt": prompt} for prompt in {one.prompt for one in ours[0][2].problems}]
        trainer = trl.GRPOTrainer(model, lambda given, **_: given, names["args"],
                                  Dataset.from_list(rows), rollout_func=rollout)
        compute, recorder = trainer._compute_loss, TrainerCallback()
        trainer._compute_loss = lambda *inputs: losses.append(compute(*inputs)) or losses[-1]
        recorder.on_pre_optimizer_step = lambda *_, model, **__: theirs.append(
            (sum(losses[-names["args"].gradient_accumulation_steps:]), gradients(model)))
        trainer.add_callback(recorder)
        trainer.train()
    assert len(ours) == len(theirs) == 2
    for (loss, mine, _), (their_loss, other) in zip(ours, theirs):
        assert loss == pytest.approx(their_loss.item(), abs=1e-4) and mine.keys() == other.keys()
        assert max((mine[name] - other[name]).abs().max() for name in mine) < 1e-4
