"""Follow somebody who copies grpo.py, makes it a script of their own, and uses everything around
it: each command that is printed has to work when it is pasted."""
import html
import os
import re
import signal
import subprocess
import sys
import time

from small_runs import INSTANT, arguments, lines, read_summary

from vectors.edits import replace_once

TASK = '''
class Addition(common.Task):
    """Add two digits."""
    prompt_width = 4

    def sample(self, rng):
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        return common.Problem(f"{a}+{b}=", str(a + b))

    def demonstration(self, rng, phase):
        problem = self.sample(rng)
        return problem._replace(completion=f"<answer>{problem.answer}</answer>")

    def verify(self, problem, text):
        return verify(problem, text)


COLUMNS = {'''
EDITS = [("    task = common.load_task(cfg, verify)\n", "    task = Addition()\n"),
         ("A = advantages(batch.rewards, cfg.scale_rewards).to(cfg.device)",
          "A = (batch.rewards - batch.rewards.mean()).to(cfg.device)"),
         ("    epsilon: float = flag(",
          '    hidden_size: int = flag(24, "width")\n    epsilon: float = flag('),
         ('run.log(batch, A, metrics | {"kl": mean_kl})',
          'run.log(batch, A, metrics | {"kl": mean_kl, "size": A.abs().mean().item()})'),
         ("COLUMNS = {", TASK + '"size": "size", ')]
FLAGS = INSTANT | {"base_steps": 3, "max_steps": 4000, "eval_steps": 1000, "num_eval_problems": 8}
del FLAGS["task"], FLAGS["hidden_size"]


def stopped(words, folder, number, num_steps):
    """Start a run, and send it a signal after some steps. -> what it printed, its exit code"""
    process = subprocess.Popen(words, cwd=folder.parent, text=True, stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, shell=isinstance(words, str))
    log = folder / "metrics.jsonl"
    while process.poll() is None and not (log.is_file() and len(lines(log)) > num_steps):
        time.sleep(0.05)
    process.send_signal(number)
    return process.communicate()[1], process.returncode


def pasted(command, folder):
    """Run a command in a shell. -> what it printed"""
    command = command.replace("python ", f"{sys.executable} ", command.startswith("python "))
    done = subprocess.run(command, shell=True, cwd=folder, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_copy_with_its_own_task_advantage_width_and_metric_can_do_all_that_a_script_can(
        copied, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    source = (copied / "grpo.py").read_text()
    for old, new in EDITS:
        source = replace_once(source, old, new)
    (copied / "add.py").write_text(source)
    start = [sys.executable, "add.py"]
    run = copied / "one"
    _, code = stopped([*start, *arguments(FLAGS | {"output_dir": "one"})], run, signal.SIGKILL, 2)
    assert code == -signal.SIGKILL
    killed = len(lines(run / "metrics.jsonl"))
    error, code = stopped([*start, "--resume_from_checkpoint", "one"], run, signal.SIGINT, killed)
    assert code == 130
    command = re.search("resume with:\n  (.*)", error)[1]
    printed = pasted(f"{command} --max_steps {len(lines(run / 'metrics.jsonl')) + 1}", copied)
    record = lines(run / "metrics.jsonl")
    assert [line["step"] for line in record] == list(range(len(record)))
    assert all(line["size"] >= 0 for line in record[1:]) and " size" in printed
    assert read_summary(run)["steps"] == len(record) - 1 > killed

    answer = pasted(re.search("Ask the policy:\n  (.*)", printed)[1], copied)
    assert answer.count("\n") == 1

    pasted(" ".join([*start, *arguments(FLAGS | {"output_dir": "two", "max_steps": 2})]), copied)
    pasted("python -m report.page one two", copied)
    page = (run / "comparison.html").read_text()
    command = html.unescape(re.search(r"python add\.py [^\"<\\]*", page)[0])
    assert "--task add.Addition" in command
    pasted(f"{command} --output_dir three --max_steps 1", copied)
    assert os.path.exists(copied / "three/summary.json")


def test_a_verifier_that_returns_a_fraction_is_refused_before_a_base_is_made(copied):
    source = replace_once((copied / "grpo.py").read_text(), *EDITS[0])
    source = replace_once(source, "COLUMNS = {", TASK)
    source = replace_once(source, "        return verify(problem, text)\n",
                          "        return 0.5 * verify(problem, text)\n")
    (copied / "add.py").write_text(source)
    done = subprocess.run([sys.executable, "add.py"], cwd=copied, text=True, capture_output=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "verify returned 0.5: must be 1.0 (right) or 0.0 (wrong)" in done.stderr
    assert not (copied / "runs").exists()
