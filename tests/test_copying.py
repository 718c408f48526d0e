"""README's "Your own task" and "Your own algorithm", followed word for word in a copy of the repository.

That a script and common.py run alone is in test_cli.py.
"""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text()
TINY = shlex.split("""
    --device cpu --base_steps 2 --base_batch_size 4 --hidden_size 16 --num_attention_heads 2
    --num_hidden_layers 1 --intermediate_size 16 --num_prompts 2 --num_generations 4
    --max_completion_length 8 --num_eval_problems 8 --num_eval_samples 2 --max_steps 2""")


def section(title):
    return re.search(rf"^## {title}\n(.*?)^## ", README, re.S | re.M)[1]


@pytest.fixture
def tree(tmp_path):
    """A copy of the repository, as after a clone; it draws no pictures, which would take longer than it."""
    for name in ("tasks", "tools", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.suffix in (".py", ".md", ".toml") or path.name == "Makefile":
            shutil.copy(path, tmp_path)
    (tmp_path / "tools/report.py").unlink()
    return tmp_path


def shell(command, tree, *more):
    """Run a command of the README in the copy. -> CompletedProcess"""
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if words[0] == "make":
        words.append(f"PYTHON={sys.executable}")
    return subprocess.run([*words, *more], cwd=tree, env=environment, capture_output=True, text=True,
                          timeout=120)


def the_task():
    """Name and text of the task that the README shows."""
    text = section("Your own task")
    return re.search(r"tasks/(\w+)\.py", text)[1], re.search(r"^```python\n(.*?)^```$", text, re.S | re.M)[1]


def test_your_own_task_is_a_file_of_about_20_lines_that_runs(tree):
    name, source = the_task()
    assert len(source.splitlines()) <= 25
    (tree / f"tasks/{name}.py").write_text(source)
    command = re.search(rf"^python .* --task {name}$", section("Your own task"), re.M)[0]
    done = shell(command, tree, *TINY)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    folder = tree / f"runs/grpo-{name}-s0"
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2
    groups = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert groups and all("".join(sorted(group["prompt"][:-1])) == group["answer"] for group in groups)


def test_the_base_of_your_own_task_is_right_sometimes_and_nothing_breaks_its_verifier():
    import random
    name, source = the_task()
    task = {}
    exec(compile(source, name, "exec"), task)
    rng = random.Random(0)
    problems = [task["sample"](rng) for _ in range(200)]
    assert max(len(problem.prompt) for problem in problems) == task["width"]()
    for phase, low, high in (("textbook", 0.8, 1.0), ("forum", 0.2, 0.4)):
        right = [task["verify"](problem, task["corpus"](problem, rng, phase)) for problem in problems]
        assert low <= sum(right) / len(right) <= high
    for text in ("", "<answer>", "<answer></answer>", "<answer>1</answer>" * 2, "\ud800", "٣" * 10_000):
        assert task["verify"](problems[0], text) == 0.0


def test_your_own_algorithm_is_a_copy_an_edit_and_a_word_in_the_sync_list(tree):
    text = section("Your own algorithm")
    assert re.findall(r"^(\d)\. ", text, re.M) == ["1", "2", "3", "4"]
    assert shell(re.search(r"`(cp [^`]+)`", text)[1], tree).returncode == 0                 # 1.
    (removed,), (added,) = (re.findall(rf"^{re.escape(sign)}(.*)$", text, re.M) for sign in "-+")
    mine, scripts = tree / "mine.py", tree / "tools/sync.py"
    assert mine.read_text().count(removed) == 1
    mine.write_text(mine.read_text().replace(removed, added))                               # 2.
    before = scripts.read_text()
    scripts.write_text(re.sub(r'^(SCRIPTS = .*)\)$', r'\1, "mine.py")', before, flags=re.M))  # 3.
    assert scripts.read_text() != before
    done = shell("python mine.py", tree, *TINY)                                             # 4.
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert json.loads((tree / "runs/mine-arithmetic-s0/summary.json").read_text())["steps"] == 2
    shown = shell("make diff A=grpo B=mine", tree).stdout.splitlines()
    assert [line.strip() for line in shown if line[0] in "+-"] == ["- " + removed, "+ " + added]

    checks = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest",
              "tests/test_sync.py", "-k"]
    passed = shell(shlex.join([*checks, "every_shared_name or twice"]), tree)
    assert passed.returncode == 0, passed.stdout
    edited = mine.read_text()
    mine.write_text(edited.replace("EOS, PAD, VOCAB = 264", "EOS, PAD, VOCAB = 263"))       # drift
    failed = shell(shlex.join([*checks, "every_shared_name"]), tree)
    assert failed.returncode == 1 and "EOS" in failed.stdout
    assert shell("make sync FROM=grpo.py", tree).returncode == 0
    assert mine.read_text() == edited
