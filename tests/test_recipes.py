"""Run the recipes of docs/recipes.md with their packages. `make recipes` installs the packages."""
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import ROOT
from small_models import NEEDS, save_random

pytest.importorskip("trl", reason=NEEDS)
ours = pytest.importorskip("engines.trl")
data = pytest.importorskip("engines.data")
PAGE, ENGINES = ((ROOT / f"docs/{name}.md").read_text("utf-8") for name in ("recipes", "engines"))
FILES = {name: source for source, name in
         re.findall(r'^```python\n(""".*?(\w+\.py).*?)^```$', PAGE, re.S | re.M)}
COMMANDS, ON_ENGINES = (
    re.sub(r"\\\n", "", "".join(re.findall(r"^```sh\n(.*?)^```$", page, re.S | re.M))).splitlines()
    for page in (PAGE, ENGINES))
NEEDS_MORE = "needs engines/requirements-recipes.txt"
SMALL = shlex.split(
    "--output_dir out --max_steps 1 --per_device_train_batch_size 16 --num_generations 4 "
    "--max_completion_length 8 --logging_steps 1 --report_to none --save_strategy no --use_cpu "
    "--bf16 False --disable_tqdm True")


@pytest.fixture
def recipe(tmp_path, small_llama, monkeypatch):
    """recipe(package, word, **replaced): skip the test if the package is missing. Otherwise run the
    commands of the page that contain the word, in the folder of the test, with texts replaced.
    -> metrics of the last step that was trained"""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub_cache"))
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, source in FILES.items():
        Path(name).write_text(source)

    def run(package, word, replaced=()):
        pytest.importorskip(package, reason=NEEDS_MORE)
        log = {}
        for command in COMMANDS:
            for old, new in (("MODEL", str(small_llama)), *replaced):
                command = command.replace(old, new)
            before, is_training, flags = command.partition("python -m engines.trl ")
            if word in command and is_training:
                for variable in before.split():
                    monkeypatch.setenv(*variable.split("="))
                log = ours.main([*shlex.split(flags), *SMALL]).state.log_history[0]
            elif word in command:
                subprocess.run(command, shell=True, check=True)
        return log
    return run


def rated(file, texts, **columns):
    """Rate texts by the rewards of a file, as the command does, also as messages. -> list of lists
    """
    names = [name.rpartition(".") for name in data.rewards_of(file)]
    functions = [getattr(sys.modules[module], name) for module, _, name in names]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    found = [[one(completions=completions, **columns) for one in functions]
             for completions in (texts, messages)]
    assert found[0] == found[1]
    return found[0]


def test_a_task_of_reasoning_gym_is_data_and_reward_also_for_real_py(
        recipe, monkeypatch, tmp_path, capsys):
    assert recipe("reasoning_gym", "reasoning.py")["rewards/score/mean"] >= 0
    rows = [json.loads(line) for line in Path("train.jsonl").read_text().splitlines()]
    sums = [str(eval(re.search(": (.*) =", row["prompt"])[1])) for row in rows[:3]]
    texts = [f"so <answer>{sums[0]}</answer>", sums[1], "<answer>x</answer>"]
    assert len({row["prompt"] for row in rows}) == len(rows) > 999
    assert rated("reasoning.py", texts, answer=[0, 1, 2]) == [[1, 0, 0]]
    import real
    for name, value in {"P": 2, "G": 2, "W": 199, "T": 4, "HELD_OUT": 2, "verify": None}.items():
        monkeypatch.setattr(real, name, value)
    monkeypatch.setattr(real.main, "__defaults__", (None, 0, 1))
    monkeypatch.setattr(sys, "argv", ["", str(save_random(tmp_path / "model")), "train.jsonl"])
    runpy.run_path("own_real.py")
    assert "step 0: reward 0.0" in capsys.readouterr().out
    assert real.verify(0, f"<answer>{sums[0]}</answer>") == 1


def test_math_verify_compares_formulas_and_its_alarm_works_in_a_reward_file(recipe):
    recipe("math_verify", "no command")
    cases = [(r"\frac{1}{2}", "so $0.5$", 1), ("x+1", r"\boxed{1+x}", 1), ("5", "5 or 6", 0),
             (r"\{1,2\}", r"\boxed{\{2,1\}}", 1), ("2", "$9^{9^{9^9}}$", 0), ("5", "", 0),
             ("1 < x", "$x > 1$", 1), ("Paris", r"\boxed{pairs}", 1)]
    answers, texts, expected = zip(*cases)
    assert rated("tex.py", texts, answer=answers) == [[*expected]]      # the tower needs an alarm


def test_a_data_set_becomes_the_data_of_a_run(recipe):
    Path("folder").mkdir()
    Path("folder/train.jsonl").write_text("\n".join(
        json.dumps({"question": f"({a}+{b})=", "answer": f"{a}+{b} #### {a + b}"})
        for a in range(1, 6) for b in range(1, 6)))
    recipe("datasets", "hub.py", [("openai/gsm8k main", "folder")])
    assert "reward" in recipe("datasets", "chat.jsonl")
    rows = [json.loads(line) for line in Path("train.jsonl").read_text().splitlines()]
    assert len(rows) == 25 and rows[1] == {"prompt": "(1+2)=", "answer": "3"}
    chats = [json.loads(line) for line in Path("chat.jsonl").read_text().splitlines()]
    assert chats[1] == {"prompt": [{"role": "user", "content": "(1+2)="}], "answer": "3"}


def test_a_judge_grades_completions(recipe):
    seen = []

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, request))
            text = ["7 of 10", "none", "99", None][len(seen) % 4]
            reply = json.dumps({"id": "1", "object": "chat.completion", "created": 1, "choices": [
                {"index": 0, "finish_reason": "stop",
                 "message": {"role": "assistant", "content": text}}], "model": "judge"}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)
    rows = [{"prompt": f"({a}+{b})=", "answer": a + b} for a in range(1, 9) for b in range(1, 6)]
    Path("train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            log = recipe("openai", "judge.py", [(":8000", f":{server.server_port}")])
        finally:
            server.shutdown()
    path, request = seen[0]
    assert path == "/v1/chat/completions" and request["model"] == "judge"
    assert re.match(r"Question: \(.*\)=\n\nAnswer: ", request["messages"][1]["content"])
    assert 0 < log["rewards/clarity/mean"] < 1


def test_a_loss_of_your_own_learns_here_and_in_trl_by_the_commands_of_the_page(
        tmp_path, monkeypatch):
    """In a copy of the checkout, until nine of ten outputs are right."""
    pytest.importorskip("reasoning_gym", reason=NEEDS_MORE)     # because it takes minutes
    shutil.copytree(ROOT, tmp_path, dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
    _, source = re.findall(r"^```python\n(.*?)^```$", ENGINES, re.S | re.M)
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    printed = {command.split()[2]: subprocess.run(
        command, shell=True, cwd=tmp_path, text=True, check=True, stdout=subprocess.PIPE).stdout
        for command in ON_ENGINES}
    rewards = [float(x) for x in re.findall(r"'reward': '([0-9.]+)'", printed["engines.trl"])]
    assert rewards[0] < 0.5 and min(rewards[-3:]) > 0.9
    assert "right: 3 of 3" in printed["vectors"]
    assert float(re.findall("greedy ([0-9.]+)", printed["engines.here"])[-1]) > 0.9
