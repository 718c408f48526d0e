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
FLAGS = INSTANT | {"base_steps": 3, "max_steps": 4000, "eval_steps": 1000, "num_eval_problems": 8,
                   "output_dir": "it's $x é"}
del FLAGS["task"], FLAGS["hidden_size"]


def pasted(command, folder):
    """Run a command in a new shell in which nothing is active and whose encoding is ASCII.
    -> what it printed"""
    command = re.sub("^python ", f"{sys.executable} ", command)
    done = subprocess.run(
        command, shell=True, encoding="utf-8", cwd=folder, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={
            "PATH": os.defpath, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0",
            "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_copy_with_its_own_task_advantage_width_and_metric_can_do_all_that_a_script_can(
        copied, tmp_path_factory):
    source = (copied / "grpo.py").read_text()
    for old, new in EDITS:
        source = replace_once(source, old, new)
    (copied / "add.py").write_text(source)
    work = tmp_path_factory.mktemp("work")
    process = subprocess.Popen([sys.executable, copied / "add.py", *arguments(FLAGS)], cwd=work,
                               text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    run = work / FLAGS["output_dir"]
    log = run / "metrics.jsonl"
    while process.poll() is None and not (log.is_file() and len(lines(log)) > 2):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    error = process.communicate()[1]
    assert process.returncode == 130 and "Traceback" not in error
    (work / "common.py").write_text("raise OSError('of the user')")
    command = re.search("resume with:\n  (.*)", error)[1]
    printed = pasted(f"{command} --max_steps {len(lines(log)) + 1}", work)
    record = lines(log)
    assert [line["step"] for line in record] == list(range(len(record)))
    assert all(line["size"] >= 0 for line in record[1:]) and " size" in printed
    assert read_summary(run)["steps"] == len(record) - 1 > 2
    answer = pasted(re.search("Ask the policy:\n  (.*)", printed)[1], work)
    assert answer.count("\n") == 1
    page = (run / "report.html").read_text()
    command = html.unescape(re.search(r"python add\.py [^\"<\\]*", page)[0])
    assert "--task add.Addition" in command
    pasted(f"{command} --output_dir three --max_steps 1", copied)
    assert (copied / "three/summary.json").exists()
