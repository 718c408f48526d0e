"""make gpu, without a GPU: a part that goes wrong stops no other, the report says what happened,
and no part says that all is well where it is not."""
import fcntl
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

import grpo
from kernels import bench, logprob
from tools import gpu, gpu_parts

CRASHES = "import os, signal\ndef falls():\n    os.kill(os.getpid(), signal.SIGSEGV)\nfalls()"
# A part that has a child; the lock is held as long as one of both lives.
HANGS = """
import fcntl, subprocess, time
lock = open(LOCK, "w")
fcntl.flock(lock, fcntl.LOCK_EX)
subprocess.Popen(["sleep", "60"], pass_fds=[lock.fileno()])
print("nearly there")
def waits():
    time.sleep(60)
waits()
"""
WORKS = "print('result: all of it'); print('bye')"


def fake(name, code, share=60.0):
    """A part that runs some Python."""
    return gpu.Part(name, f"the part {name}", share, [sys.executable, "-c", code])


def run_fakes(folder, *parts):
    """Run parts whose shares are seconds."""
    return gpu.run_all(parts, folder, minutes=sum(part.share for part in parts) / 60)


@pytest.fixture(autouse=True)
def signals_as_before(restored_ctrl_c):
    """main() handles signals that say that the terminal is gone, and forbids core files."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    yield
    resource.setrlimit(resource.RLIMIT_CORE, limits)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The folders of logs and of docs/ lie in a temporary one. -> that"""
    monkeypatch.setattr(gpu, "FOLDER", tmp_path / "gpu")
    monkeypatch.setattr(gpu, "DOCS", tmp_path / "docs")
    return tmp_path


@pytest.fixture
def on_gpu(monkeypatch):
    """As if there was a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def job(tmp_path):
    """job(seconds): what a part is told in a dry run."""
    def make(seconds=60.0, dry_run=True):
        return gpu_parts.Job(tmp_path, time.time() + seconds, dry_run)
    return make


def logits_row(who="ours", V=151936, dtype="bfloat16", forward=1.0, backward=2.0, **more):
    """A row of the bench that reaches all that it could."""
    return {"who": who, "N": 8192, "V": V, "dtype": dtype, "forward": forward, "error": 1e-6,
            "backward": backward, "forward_share_of_copy": 0.95, "backward_share_of_copy": 0.94,
            "forward_bytes": 20 * 8192, "backward_bytes": 0, "backward_bytes_in_place": 0} | more


def a_record(**rows):
    """A record of the bench that has only these rows."""
    machine = {"device": "NVIDIA Thing 9", "cpu": "x", "threads": 1, "versions": {"torch": "2"},
               "copy_GB_per_s": 1.0, "matmul_TFLOP_per_s": 1.0, "matmul_dtype": "bfloat16"}
    record = {"machine": machine, "repeats": 3, "remarks": [], "shape": [1, 2, 3, 4]}
    return record | {name: [] for name in bench.ROWS} | rows


def a_result(name="sees", outcome="ok", said="all", lines=()):
    return gpu.Result(gpu.Part(name, f"the part {name}", 1, []), outcome, said, 1.0, list(lines))


# ---- 1. run the parts ------------------------------------------------------------------------

def is_free(lock):
    """Whether a process that held a lock is gone, at the latest after a second."""
    with open(lock) as file:
        for _ in range(20):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(0.05)
    return False


def test_parts_that_fail_crash_or_hang_are_named_and_stop_no_other(tmp_path, capsys):
    lock = tmp_path / "lock"
    results = run_fakes(
        tmp_path, fake("fails", "print('so far')\nraise ValueError('wrong number')", share=30),
        fake("crashes", CRASHES, share=30))
    results += run_fakes(tmp_path, fake("hangs", f"LOCK = {str(lock)!r}" + HANGS, share=2))
    assert is_free(lock)                            # its child was killed with it
    results += run_fakes(tmp_path, fake("works", WORKS))
    outcomes = [result.outcome for result in results]
    assert outcomes[0] == "failed with exit code 1"
    assert outcomes[1] == "killed by SIGSEGV"
    assert outcomes[2].startswith("stopped after ")
    assert outcomes[3] == "ok"
    fails, crashes, hangs, works = results
    assert fails.said == "ValueError: wrong number" and "so far" in fails.lines
    assert crashes.said.endswith("in falls")
    assert hangs.said.endswith("in waits") and "nearly there" in hangs.lines
    assert works.said == "all of it"
    assert hangs.seconds < 10

    printed = capsys.readouterr().out
    text = gpu.report(results, None, dry_run=False)
    for result in results:
        assert f"{result.part.title} ... {result.outcome}" in printed and result.said in printed
        assert f"| {result.part.name} | {result.outcome} |" in text
    assert "## the part fails: failed with exit code 1\n" in text and "so far\n" in text
    assert "## the part works" not in text


def test_a_part_may_take_its_share_and_what_those_before_it_have_left(tmp_path):
    show = "import sys, time; print('result:', float(sys.argv[-1]) - time.time())"
    first, second = run_fakes(tmp_path, fake("a", show, share=30), fake("b", show, share=20))
    assert 25 < float(first.said) <= 30
    assert 42 < float(second.said) <= 50
    some = [fake("a", show, share=30), fake("b", show, share=20)]
    first, second = gpu.run_all(some, tmp_path, minutes=10)     # which have all of it
    assert 355 < float(first.said) <= 360
    assert 592 < float(second.said) <= 600


def test_a_part_sees_the_first_gpu_alone_and_what_it_prints_is_in_its_log_at_once(
        tmp_path, monkeypatch):
    dies = ("import os; print('result:', os.environ['CUDA_VISIBLE_DEVICES'])\n"
            "os.kill(os.getpid(), 9)")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    for visible, first in ((None, "0"), ("3,1", "3"), ("", "")):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        [result] = run_fakes(tmp_path, fake("dies", dies))
        assert result.said == f"result: {first}"


def test_all_parts_together_take_no_more_than_is_said():
    shares = [share for _, share in gpu.PARTS.values()]
    assert sum(shares) == 600 and min(shares) > 0
    assert list(gpu.PARTS) == list(gpu_parts.PARTS)


@pytest.fixture
def sleeper(tmp_path):
    """A part that writes its process id into the file "pid", and sleeps."""
    path = str(tmp_path / "pid")
    code = f"import os, time; open({path!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    return fake("sleeps", code)


def send_to_us(number, folder, *delays):
    """Send a signal to this process once the sleeper sleeps, after each of the delays."""
    def send():
        while not (folder / "pid").is_file():
            time.sleep(0.05)
        for seconds in delays:
            time.sleep(seconds)
            os.kill(os.getpid(), number)
    threading.Thread(target=send, daemon=True).start()


@pytest.mark.parametrize("delays, next_outcome", [([0.2], "ok"), ([0.2, 0.5], "skipped")])
def test_ctrl_c_skips_a_part_and_the_second_one_all_that_are_left(
        tmp_path, sleeper, delays, next_outcome):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    send_to_us(signal.SIGINT, tmp_path, *delays)
    sleeps, works = run_fakes(tmp_path, sleeper, fake("works", WORKS))
    assert sleeps.outcome != "ok" and sleeps.seconds < 20
    if next_outcome == "ok":
        assert sleeps.outcome == "interrupted"
    assert works.outcome == next_outcome


def test_a_terminal_that_is_gone_takes_the_part_under_way_along(tmp_path, sleeper):
    signal.signal(signal.SIGHUP, gpu.end_at_once)
    send_to_us(signal.SIGHUP, tmp_path, 0.2)
    with pytest.raises(SystemExit):
        run_fakes(tmp_path, sleeper)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_of_a_long_log_the_end_is_shown_and_of_a_crash_its_innermost_call():
    lines = [f"line {i}" for i in range(100)]
    assert gpu.explanation(lines) == lines[-gpu.NUM_LINES:]
    trace = ["Fatal Python error: Aborted", "Current thread 0x1 (most recent call first):",
             '  File "a.py", line 1 in inner', *['  File "b.py", line 2 in outer'] * 50]
    shown = gpu.explanation(lines + trace)
    assert shown[:6] == [*lines[-5:], trace[0]] and len(shown) == gpu.NUM_LINES
    assert gpu.finding(lines + trace, "killed by SIGABRT") == 'File "a.py", line 1 in inner'
    assert gpu.finding(["result: fine", "ValueError"], "failed with exit code 1") == "ValueError"
    assert gpu.finding([], "ok") == ""


# ---- 2. goals and report ---------------------------------------------------------------------

def verdicts(record):
    """What becomes of each goal: its name -> what was measured, verdict."""
    rows = [gpu.goal_row(goal, record) for goal in gpu.GOALS]
    return {what: (measured, verdict) for what, _, measured, _, verdict in rows}


def test_without_measurements_no_goal_is_reached_or_missed():
    assert set(verdicts(a_record()).values()) == {("-", "not measured")}


def test_our_forward_pass_makes_as_many_bytes_a_token_as_its_goal_allows(monkeypatch):
    [goal] = (goal for goal in gpu.GOALS if goal.what == "forward, extra bytes a token")
    monkeypatch.setattr(logprob, "launch", lambda *_, **__: None)
    monkeypatch.setattr(logprob, "forward_kernel", None, raising=False)     # without Triton
    tokens = torch.zeros(8, dtype=torch.long)
    outputs = logprob.run_forward(torch.zeros(2, 4, 16), tokens, None, 1.0)
    assert sum(x.nbytes for x in outputs) == goal.bound * len(tokens)


def a_full_record():
    """In which all goals are reached, just."""
    logits = [logits_row(V=V, forward=1.0, backward=2.0) for V in (512, *gpu.LARGE)]
    for who, forward, backward in (("TRL", 1.4, 2.1), ("torch", 12, 9), ("torch.compile", 1.3, 9)):
        logits.append(logits_row(who, forward=forward, backward=backward))
    linear = [{"who": "ours", "N": 8192, "D": D, "V": 151936, "both": 0.05, "bytes": 2.0e9,
               "share_of_limit": 0.667} for D in (1024, 4096)]
    rollout = {"size": "0.81M", "kind": "fixed", "tokens": 8000, "gain": {"median": 10.0, "low": 9,
               "high": 11}, "median": {"ours": 0.008, "HF generate": 0.08}}
    return a_record(logits=logits, linear=linear, rollout=[rollout])


def test_goals_that_are_just_reached_are_reached():
    assert {verdict for _, verdict in verdicts(a_full_record()).values()} == {"reached"}


@pytest.mark.parametrize("what, changes", [
    ("logps and entropy forward, of a copy", {"forward_share_of_copy": 0.91}),
    ("their gradient, of a copy", {"backward_share_of_copy": 0.91}),
    ("forward against TRL", {"forward": 1.1}), ("backward against TRL", {"backward": 2.2}),
    ("forward against torch", {"forward": 1.1}),
    ("forward against torch.compile", {"forward": 1.1}),
    ("error of logps and entropy", {"error": 1e-5}),
    ("forward, extra bytes a token", {"forward_bytes": 21 * 8192}),
    ("backward in place, extra bytes a token", {"backward_bytes_in_place": 9000})])
def test_a_goal_that_the_worst_row_misses_is_missed(what, changes):
    record = a_full_record()
    [row] = (row for row in record["logits"] if row["who"] == "ours" and row["V"] == 151936)
    row |= changes
    assert verdicts(record)[what][1] == "missed"


@pytest.mark.parametrize("V, what", [
    (50257, "forward, V = 50257, which no vector divides"), (512, "forward, V = 512")])
def test_vocabularies_with_goals_of_their_own_do_not_count_for_others(V, what):
    record = a_full_record()
    [row] = (row for row in record["logits"] if row["V"] == V)
    row["forward_share_of_copy"] = 0.70
    missed = [name for name, (_, verdict) in verdicts(record).items() if verdict == "missed"]
    assert missed == [what]


def test_the_goals_of_hidden_states_and_rollouts_are_those_of_the_large_shape():
    record = a_full_record()
    small, large = record["linear"]
    small |= {"share_of_limit": 0.1, "bytes": 9e9}
    assert verdicts(record)["linear, D = 4096: bytes"] == ("2.00e+09", "reached")
    large |= {"share_of_limit": 0.6, "bytes": 2.1e9}
    record["rollout"][0]["median"]["ours"] = 0.0081
    record["rollout"][0]["gain"]["median"] = 9.9
    found = verdicts(record)
    for what in ("linear, D = 4096: of what three matmuls take", "linear, D = 4096: bytes",
                 "rollout, 0.81M: tokens a second", "rollout, 0.81M: against HF generate"):
        assert found[what][1] == "missed", what


def test_rows_that_failed_and_rows_in_float32_do_not_count():
    record = a_record(logits=[logits_row(dtype="float32"),
                              {"who": "ours", "N": 8192, "V": 151936, "dtype": "bfloat16",
                               "seconds": [], "failed": "RuntimeError: no"}])
    assert set(verdicts(record).values()) == {("-", "not measured")}


def test_the_report_has_the_machine_the_goals_the_rows_and_who_failed():
    record = a_full_record()
    failed = {"who": "TRL", "N": 1, "V": 7, "dtype": "bfloat16", "seconds": [],
              "failed": "RuntimeError: not on this one"}
    record["logits"].append(failed)
    record["rollout"][0]["failed"] = "HF generate: TypeError: no"
    text = gpu.report([a_result()], record, dry_run=False)
    assert bench.first_line(record["machine"]) in text
    assert "| forward against TRL | at least 1.40 | 1.40 | 1 | reached |" in text
    assert "| linear, D = 4096: bytes | at most 2.00e+09 | 2.00e+09 | 1 | reached |" in text
    assert "| their gradient, of a copy | at least 92% | 94% | 3 | reached |" in text
    assert "\nlogits, who TRL, V 7, dtype bfloat16: RuntimeError: not on this one\n" in text
    assert "\nrollout, size 0.81M, kind fixed: HF generate: TypeError: no\n" in text
    assert text.endswith(bench.tables(record))
    assert "dry run" not in text and "dry run" in gpu.report([], record, dry_run=True)


def test_a_cell_of_the_report_has_no_borders_of_its_own():
    line = gpu.results_table([a_result(said="a | b")]).splitlines()[-1]
    assert len(re.findall(r"(?<!\\)\|", line)) == 5


# ---- 3. the command --------------------------------------------------------------------------

def run_main(monkeypatch, words, outcome="ok", record=None):
    """main() with parts that end as given. -> the parts that it ran"""
    ran = []

    def run_all(parts, folder, minutes):
        ran.extend(parts)
        if record:
            (folder / "record.json").write_text(json.dumps(record))
        return [a_result(part.name, outcome) for part in parts]
    monkeypatch.setattr(gpu, "run_all", run_all)
    gpu.main(words)
    return ran


def test_the_report_and_the_record_go_to_docs_under_the_name_of_the_device(
        places, on_gpu, monkeypatch, capsys):
    record = a_full_record()
    ran = run_main(monkeypatch, [], record=record)
    assert [part.name for part in ran] == list(gpu.PARTS)
    assert not any("--dry_run" in part.command for part in ran)
    assert "at least 1.40" in (places / "docs/gpu-nvidia-thing-9.md").read_text()
    assert json.loads((places / "docs/bench-nvidia-thing-9.json").read_text()) == record
    assert "docs/gpu-nvidia-thing-9.md" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGHUP) is signal.getsignal(signal.SIGTERM) is gpu.end_at_once


def test_a_part_that_crashes_leaves_no_core_file(places, on_gpu, monkeypatch):
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))
    run_main(monkeypatch, ["sees"])
    assert resource.getrlimit(resource.RLIMIT_CORE) == (0, most)


@pytest.mark.parametrize("words", [["--dry_run"], ["sees", "logits"]])
def test_a_dry_run_or_some_parts_alone_write_nothing_to_docs(places, on_gpu, monkeypatch, words):
    ran = run_main(monkeypatch, words, record=a_full_record())
    assert not (places / "docs").exists()
    assert (places / "gpu/gpu-nvidia-thing-9.md").is_file()
    assert all(("--dry_run" in part.command) == ("--dry_run" in words) for part in ran)
    assert len(ran) == (2 if "sees" in words else len(gpu.PARTS))


def test_rows_that_this_machine_measured_before_and_not_now_stay(places, on_gpu, monkeypatch):
    run_main(monkeypatch, [], record=a_full_record())
    newer = a_record(logits=[logits_row(V=512)])
    run_main(monkeypatch, [], record=newer)
    kept = json.loads((places / "docs/bench-nvidia-thing-9.json").read_text())
    assert kept["logits"] == newer["logits"] and len(kept["linear"]) == 2


def test_if_nothing_was_measured_there_is_a_report_and_no_record(places, on_gpu, monkeypatch):
    with pytest.raises(SystemExit):
        run_main(monkeypatch, [], outcome="killed by SIGSEGV")
    assert [path.name for path in (places / "docs").iterdir()] == ["gpu-unknown.md"]


@pytest.mark.parametrize("outcome", ["failed with exit code 1", "skipped", "interrupted"])
def test_the_exit_code_is_1_unless_every_part_is_ok(places, on_gpu, monkeypatch, outcome):
    with pytest.raises(SystemExit) as end:
        run_main(monkeypatch, ["sees"], outcome=outcome)
    assert end.value.code == 1
    run_main(monkeypatch, ["sees"])


def test_without_a_gpu_or_with_an_unknown_part_one_line_says_what_to_do(
        places, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "run_all", lambda *_: pytest.fail("parts are run"))
    for words, said in (([], "Does nvidia-smi?"), (["--dry_run", "nothing"], "no part nothing")):
        with pytest.raises(SystemExit) as end:
            gpu.main(words)
        error = capsys.readouterr().err
        assert end.value.code == 2 and error.count("\n") == 1 and said in error
    assert not (places / "gpu").exists()


def test_a_dry_run_of_some_parts_really_runs_them(places, capsys):
    gpu.main(["--dry_run", "kernel", "rollout"])
    text = (places / "gpu/gpu-cpu.md").read_text()
    assert "| kernel | ok |" in text and "| rollout | ok |" in text
    assert "both passes are right" in text and "| tiny | ragged |" in text
    assert json.loads((places / "gpu/bench-cpu.json").read_text())["rollout"]
    assert not (places / "docs").exists()


@pytest.mark.parametrize("ends, last", [
    ("raise ValueError('no, and\\nmore of it')", "ValueError: no, and more of it"),
    ("common.fail('no')", "error: no")])
def test_a_part_that_fails_says_why_last_and_in_one_line(ends, last, tmp_path):
    """What it has printed comes before that, also where somebody starts it by hand; what libraries
    say as a process ends is not said."""
    code = ("import atexit, common\nfrom tools import gpu_parts\n"
            f"def part(job):\n    print('so far')\n    {ends}\n"
            "gpu_parts.PARTS['sees'] = part\natexit.register(print, 'bye')\n"
            f"gpu_parts.main(['sees', {str(tmp_path)!r}, '--until', '1', '--dry_run'])")
    environment = gpu.environment()
    if "raise" in ends:
        del environment["PYTHONUNBUFFERED"]
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0] == "so far" and lines[-1] == last
    if "fail" in ends:
        assert len(lines) == 2                      # no traceback
    else:
        assert "line 5, in part" in done.stdout


def test_a_part_has_one_thread_as_make_bench_has(monkeypatch):
    """Else the rows of make bench would be taken for those of another machine, and dropped."""
    calls = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    monkeypatch.setitem(gpu_parts.PARTS, "sees", lambda job: calls.append("the part"))
    gpu_parts.main(["sees", "nowhere", "--until", "1"])
    assert calls == [1, "the part"]


# ---- 4. the parts ----------------------------------------------------------------------------

def test_a_part_that_sees_a_gpu_needs_torch_alone_and_looks_before_it_takes_memory(
        job, monkeypatch, capsys):
    calls = []

    def mem_get_info():
        calls.append("looks")
        return 3 * 2**30, 4 * 2**30

    def rand(*shape):
        calls.append("takes")
        return torch.ones(shape)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Thing 9")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 1))
    monkeypatch.setattr(torch, "rand", rand)
    monkeypatch.setattr(gpu_parts, "driver", lambda: "570.1")
    monkeypatch.setattr(gpu_parts.Job, "device", "cpu")
    monkeypatch.setattr(bench, "machine", lambda *_: pytest.fail("it needs what the bench needs"))
    gpu_parts.sees(job(dry_run=False))
    assert calls == ["looks", "takes"]
    said = gpu.finding(capsys.readouterr().out.splitlines(), "ok")
    assert said == (f"NVIDIA Thing 9, capability 9.1, driver 570.1, torch {torch.__version__} with "
                    f"CUDA {torch.version.cuda}, 3.0 of 4.0 GiB free")
    assert not hasattr(gpu_parts, "pytest")


def test_a_driver_that_nobody_names_or_that_hangs_is_unknown(monkeypatch):
    errors = [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 10)]

    def run(command, timeout, **_):
        raise errors.pop()
    monkeypatch.setattr(subprocess, "run", run)
    assert (gpu_parts.driver(), gpu_parts.driver()) == ("?", "?")
    assert not errors


@pytest.fixture
def torchruns_variables(monkeypatch):
    """Takes back what a part says to torch of its processes."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                 "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1" if name == "WORLD_SIZE" else "0")


def test_a_pretrained_model_runs_with_and_without_fsdp(
        job, monkeypatch, tmp_path, capsys, torchruns_variables):
    pytest.importorskip("transformers", reason="needs examples/requirements.txt")
    monkeypatch.chdir(tmp_path)
    gpu_parts.PARTS["pretrained"](job())
    [found] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("result: ")]
    assert re.fullmatch(r"result: 0\.0\d million parameters; replicate \d+ tokens/s, differ by .*; "
                        r"fsdp \d+ tokens/s, differ by .*", found)
    for name in ("replicate", "fsdp"):
        config = json.loads((tmp_path / name / "config.json").read_text())["config"]
        assert (config["parallel"], config["dtype"]) == (name, "bfloat16")
        assert len((tmp_path / name / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_sampler_that_is_not_the_trainers_fails_the_part(
        job, monkeypatch, tmp_path, torchruns_variables):
    pytest.importorskip("transformers", reason="needs examples/requirements.txt")
    from examples import pretrained
    plain = pretrained.score
    monkeypatch.setattr(pretrained, "score", lambda *args: (plain(*args)[0] - 0.1, plain(*args)[1]))
    monkeypatch.chdir(tmp_path)
    try:
        with pytest.raises(RuntimeError, match="replicate: sampler and trainer differ by 1.0e-01"):
            gpu_parts.PARTS["pretrained"](job())
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_without_transformers_the_part_is_left_out(job, monkeypatch, capsys):
    monkeypatch.setattr(gpu_parts.importlib.util, "find_spec", lambda name: None)
    gpu_parts.PARTS["pretrained"](job())
    assert capsys.readouterr().out == "result: left out, for transformers is missing\n"


@pytest.mark.parametrize("name, words", [
    ("sees", "a CPU"), ("decode", "the same tokens"), ("logits", "4 of 4 shapes; ours forward"),
    ("linear", "1 of 1 shapes"), ("rollout", "2 of 2 shapes; tiny | fixed"),
    ("step", "3 of 3 shapes")])
def test_a_part_runs_on_a_cpu_and_says_what_it_found(name, words, job, monkeypatch, capsys):
    monkeypatch.setattr(bench, "installed", lambda package: package == "torch")
    gpu_parts.PARTS[name](job())
    lines = capsys.readouterr().out.splitlines()
    assert words in gpu.finding(lines, "ok")
    if name in bench.ROWS:
        record = json.loads((job().folder / "record.json").read_text())
        assert record[name] and bench.tables(record)


def test_what_begins_has_time_for_one_and_a_half_of_the_slowest_before_it(monkeypatch, capsys):
    clock = SimpleNamespace(time=lambda: clock.now, now=100.0)
    monkeypatch.setattr(gpu_parts, "time", clock)
    done = []
    for item in gpu_parts.in_time([4, 10, 1, 2, 3], until=129.5):
        done.append(item)
        clock.now += item
    assert done == [4, 10, 1]
    assert "the last 2: [2, 3]" in capsys.readouterr().out
    assert list(gpu_parts.in_time([7, 8], until=200)) == [7, 8]


def fill(job, measure, shapes=((1,), (2,), (3,))):
    return gpu_parts.fill(job, "logits", shapes, measure, cells=lambda row: [row["who"]])


def test_a_shape_without_memory_is_left_out_and_a_crash_leaves_what_was_before(job):
    def measure(machine, n):
        if n == 1:
            raise torch.OutOfMemoryError("too little")
        if n == 3:
            raise ZeroDivisionError
        return [{"who": "ours", "n": n}]
    with pytest.raises(ZeroDivisionError):
        fill(job(), measure)
    record = json.loads((job().folder / "record.json").read_text())
    assert record["logits"] == [{"who": "ours", "n": 2}]
    rows, counts = fill(job(), measure, shapes=[(1,), (2,)])
    assert len(rows) == 1 and counts == "1 of 2 shapes"
    with pytest.raises(RuntimeError, match="nothing could be measured"):
        fill(job(), measure, shapes=[(1,)])


def test_a_bench_in_which_ours_fails_fails_and_if_others_do_it_does_not(job):
    def failing(who):
        return lambda machine, n: [{"who": who, "failed": "RuntimeError: no"}]
    fill(job(), failing("TRL"))
    with pytest.raises(RuntimeError, match="ours, .*no"):
        fill(job(), failing("ours"))


def test_every_file_of_tests_that_asks_for_a_gpu_is_run_with_one():
    asking = [path for path in sorted(Path(ROOT, "tests").glob("test_*.py"))
              if "torch.cuda.is_available()" in path.read_text() and path != Path(__file__)]
    assert {f"tests/{path.name}" for path in asking} == set(gpu_parts.TESTS)


SKIPPED = '<testcase name="b"><skipped message="no CUDA device"/></testcase>'


@pytest.mark.parametrize("case, code, dry_run, error", [
    ("", 0, False, None), (SKIPPED, 0, True, None),
    (SKIPPED, 0, False, "1 passed, 1 skipped: no CUDA device"),
    ('<testcase name="b"><failure/></testcase>', 1, True, "ended with 1, 1 passed, 1 failure: b")])
def test_with_a_gpu_a_test_that_is_skipped_is_a_failure(
        case, code, dry_run, error, job, monkeypatch, capsys):
    def main(options):
        [log] = (word.partition("=")[2] for word in options if word.startswith("--junitxml="))
        Path(log).write_text(f'<testsuite><testcase name="a"/>{case}</testsuite>')
        assert {*gpu_parts.TESTS, "faulthandler_timeout=60"} < set(options)
        return code
    monkeypatch.setattr(pytest, "main", main)
    if error:
        with pytest.raises(RuntimeError, match=error):
            gpu_parts.tests(job(dry_run=dry_run))
    else:
        gpu_parts.tests(job(dry_run=dry_run))
        assert "result: 1 passed" in capsys.readouterr().out


def test_a_pytest_that_ends_without_a_test_is_a_failure(job, monkeypatch):
    monkeypatch.setattr(pytest, "main", lambda options: 4)
    with pytest.raises(RuntimeError, match="tested nothing, and ended with 4"):
        gpu_parts.tests(job())


def off_by(amount):
    """Like bench.ours_from_logits, but for the logps."""
    def ours(logits, tokens):
        logps, entropy = bench.torch_from_logits(logits.float(), tokens)
        return logps + amount, entropy
    return ours


def triton_that_runs():
    """In place of kernels/logprob.py."""
    return SimpleNamespace(
        available=lambda device: True, triton=SimpleNamespace(__version__="3.99"))


def test_a_kernel_that_cannot_run_or_computes_something_else_fails(job, monkeypatch, capsys):
    monkeypatch.setattr(gpu_parts, "logprob", triton_that_runs())
    monkeypatch.setattr(bench, "ours_from_logits", off_by(0.0))
    gpu_parts.kernel(job())
    assert "both passes are right, interpreted by Triton 3.99" in capsys.readouterr().out
    monkeypatch.setattr(bench, "ours_from_logits", off_by(0.001))
    with pytest.raises(AssertionError):
        gpu_parts.kernel(job())
    monkeypatch.setattr(gpu_parts, "logprob", SimpleNamespace(available=lambda device: False))
    with pytest.raises(RuntimeError, match="needs the package triton"):
        gpu_parts.kernel(job())


def test_a_kernel_with_a_wrong_gradient_fails(job, monkeypatch):
    def ours(logits, tokens):
        logps, entropy = bench.torch_from_logits(logits.float(), tokens)
        return logps, entropy.detach() + 0 * logps
    monkeypatch.setattr(gpu_parts, "logprob", triton_that_runs())
    monkeypatch.setattr(bench, "ours_from_logits", ours)
    with pytest.raises(AssertionError):
        gpu_parts.kernel(job())


@pytest.mark.parametrize("which", ["tokens", "logps"])
@pytest.mark.parametrize("captured", [None, False])
def test_a_decode_with_another_token_or_log_prob_fails(which, captured, job, monkeypatch):
    """In the graph, where `captured` is None, or in the step without it."""
    real = gpu_parts.decode

    def wrong(*args, **options):
        tokens, mask, logps, entropy = real(*args, **options)
        if options.get("captured") is captured:
            if which == "tokens":
                tokens[3, 2] += 1
            else:
                logps[3, 0] += 0.01
        return tokens, mask, logps, entropy
    monkeypatch.setattr(gpu_parts, "decode", wrong)
    if which == "logps" and captured is False:      # only its tokens are looked at
        gpu_parts.decode_part(job())
    else:
        with pytest.raises((RuntimeError, AssertionError), match="same tokens|not close"):
            gpu_parts.decode_part(job())


STEP = {"loss": 0.0, "reward": 0.5, "entropy": 1.0, "completions/mean_length": 6.0,
        "grad_norm": 1.0, "signal": 0.5, "sampling/sampling_logp_difference/max": 1e-6}


@pytest.fixture
def scripts_with(job, monkeypatch, tmp_path):
    """scripts_with(changes): the part where each script logs STEP, but for what `changes` say of
    (script, kernel)."""
    def run(changes):
        def metrics_of(script, kernel, job):
            change = changes.get((script, kernel), {})
            if isinstance(change, BaseException):
                raise change
            last = dict(STEP)
            if script == "dpo":
                del last["sampling/sampling_logp_difference/max"]
            return [last | change, last]
        monkeypatch.chdir(tmp_path)
        monkeypatch.setitem(sys.modules, "tools.report", None)
        monkeypatch.setattr(gpu_parts, "metrics_of", metrics_of)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**20)
        gpu_parts.scripts(job(dry_run=False))
    return run


def test_scripts_that_log_the_same_with_either_kernel_are_fine(scripts_with, capsys):
    scripts_with({("ppo", "triton"): {"grad_norm": 1.02, "reward": 0.504}})
    assert "result: 5 scripts" in capsys.readouterr().out


@pytest.mark.parametrize("changes, said", [
    ({("ppo", "triton"): {"grad_norm": 1.1}}, "ppo.py, triton and torch: grad_norm 1.1"),
    ({("dpo", "torch"): {"loss": 0.1}}, "dpo.py, triton and torch: loss"),
    ({("gspo", "triton"): {"sampling/sampling_logp_difference/max": 0.01}},
     "gspo.py, triton: rollout and update differ by 1.0e-02"),
    ({("grpo", "torch"): {"sampling/sampling_logp_difference/max": float("nan")}},
     "grpo.py, torch: rollout and update differ"),
    ({("reinforce", "torch"): {"signal": 0.0}}, "reinforce.py: no group has signal"),
    ({("reinforce", "triton"): ValueError("no such thing"), ("gspo", "torch"): SystemExit(2)},
     "reinforce.py: ValueError: no such thing; gspo.py: SystemExit: 2")])
def test_a_script_that_does_something_else_with_triton_is_named(scripts_with, changes, said):
    with pytest.raises(RuntimeError) as error:
        scripts_with(changes)
    assert said in str(error.value)


@pytest.mark.parametrize("name, task, score, base, trained, has_learned", [
    ("arithmetic", "arithmetic", "greedy", 0.1, 0.9, True),
    ("arithmetic", "arithmetic", "greedy", 0.1, 0.89, False),
    ("countdown", "countdown", "pass@1", 0.1, 0.16, True),
    ("countdown", "countdown", "pass@1", 0.2, 0.25, False),
    ("countdown", "countdown", "pass@1", 0.0, 0.1, False)])
def test_a_policy_that_has_not_learned_fails_unless_it_is_a_dry_run(
        name, task, score, base, trained, has_learned, job, monkeypatch, capsys, tmp_path):
    def main(words):
        assert os.path.samefile(".", tmp_path)      # where its base lies
        flags = dict(zip(words[::2], words[1::2]))
        assert flags["--task"] == flags["--output_dir"] == task
        assert flags["--device"] == ("cpu" if is_dry else "cuda")
        assert flags.get("--hidden_size") == ("32" if is_dry else None)
        return {"base": {score: base}, "trained": {score: trained}, "steps": 9,
                "seconds_warm_start": 20.0, "seconds_total": 26.0}
    monkeypatch.setattr(grpo, "main", main)
    monkeypatch.chdir(ROOT)
    for is_dry in (True, False):
        if has_learned or is_dry:
            gpu_parts.PARTS[name](job(dry_run=is_dry))
            said = f"{score} {base:.3f} -> {trained:.3f}, 9 steps, warm start 20 s, training 6 s"
            assert f"result: {said}" in capsys.readouterr().out
        else:
            with pytest.raises(RuntimeError, match="has not learned"):
                gpu_parts.PARTS[name](job(dry_run=is_dry))
