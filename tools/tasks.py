"""The other tasks, three seeds each, a base for every seed: python -m tools.tasks [NAME ...] (make tasks).

countdown: how far GRPO with DAPO's knobs gets from what the base can do. gridworld: return against the best
there is, found or missed. lookup: rewards compared, and what goes wrong without the tool, or if its words are
learned. Two runs go side by side. Writes docs/tasks.json and, between its marks in README.md, their tables.
"""
import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.runs import MACHINE, ROOT, record, run, table
from tools.seeds import put

SEEDS = (0, 1, 2)
RUNS = {
    "countdown": {"grpo.py --loss_type dapo": ["grpo.py", "--loss_type", "dapo"]},
    "gridworld": {
        "reinforce.py --view token": ["reinforce.py", "--view", "token", "--stop_at", 2],
        "the same with --temperature 0.1": ["reinforce.py", "--view", "token", "--stop_at", 2,
                                            "--temperature", 0.1],
        "ppo.py": ["ppo.py", "--stop_at", 2]},
    "lookup": {
        "accuracy": ["grpo.py"],
        "fine": ["grpo.py", "--reward", "fine"],
        "coarse": ["grpo.py", "--reward", "coarse"],
        "accuracy, tool tokens learned": ["grpo.py", "--mask_tool_tokens", "no"]}}
SILENT = "import tasks.mix; tasks.mix.respond = lambda problem, text: ''"


def without_tool(folder, work):
    """The summary of a trained policy whose environment says nothing."""
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); {SILENT}; import grpo; "
            f"grpo.main(['--task', 'lookup', '--init_from', {str(folder)!r}, '--max_steps', '0', "
            f"'--output_dir', {str(folder) + '-silent'!r}])")
    subprocess.run([sys.executable, "-c", code], cwd=work, check=True)
    return json.loads(Path(str(folder) + "-silent", "summary.json").read_text())


def three(runs, who, name, form=".3f"):
    """A score of three runs, for a cell."""
    return ", ".join(f"{summary[who][name]:{form}}" for summary in runs)


def countdown(results):
    """-> head, rows of its table"""
    head = ["countdown", "pass@1, base", "pass@8, base", "pass@1", "pass@8", "greedy",
            "times the base's pass@1", "training"]
    return head, [[name, three(runs, "base", "pass@1"), three(runs, "base", "pass@8"),
                   *(three(runs, "trained", score) for score in ("pass@1", "pass@8", "greedy")),
                   ", ".join(f"{s['trained']['pass@1'] / s['base']['pass@1']:.1f}" for s in runs),
                   ", ".join(f"{s['seconds_total'] - s['seconds_warm_start']:.0f} s" for s in runs)]
                  for name, runs in results.items()]


def gridworld(results):
    """-> head, rows of its table"""
    head = ["gridworld", "return, base", "return", "best return", "of the best", "optimal walks, greedy",
            "training"]
    return head, [[name, three(runs, "base", "return", ".2f"), three(runs, "trained", "return", ".2f"),
                   three(runs, "trained", "best_return", ".2f"),
                   ", ".join(f"{s['trained']['return'] / s['trained']['best_return']:.3f}" for s in runs),
                   three(runs, "trained", "greedy"),
                   ", ".join(f"{s['seconds_total'] - s['seconds_warm_start']:.0f} s" for s in runs)]
                  for name, runs in results.items()]


def lookup(results):
    """-> head, rows of its table"""
    head = ["lookup, reward", "pass@1, base", "tool used, base", "greedy", "pass@1", "tool used", "steps"]
    return head, [[name, three(runs, "base", "pass@1"), three(runs, "base", "think_share", ".2f"),
                   three(runs, "trained", "greedy"), three(runs, "trained", "pass@1"),
                   three(runs, "trained", "think_share"), ", ".join(str(s["steps"]) for s in runs)]
                  for name, runs in results.items()]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", default=list(RUNS), metavar="NAME")
    args = parser.parse_args(argv)
    kept = ROOT / "docs" / "tasks.json"
    results = json.loads(kept.read_text())["results"] if kept.exists() else {}
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(2) as pool:
        def start(task, i, script, *flags, seed):
            flags = "--task", task, "--seed", seed, "--base_seed", seed, *flags
            return run(script, Path(work, f"{task}-{i}-{seed}"), *flags, cwd=work, quiet=True)
        for task in args.tasks:
            futures = {name: [pool.submit(start, task, i, *command, seed=seed) for seed in SEEDS]
                       for i, (name, command) in enumerate(RUNS[task].items())}
            results[task] = {name: [future.result() for future in some] for name, some in futures.items()}
            if task == "lookup":
                results[task]["accuracy, then without the tool"] = [
                    without_tool(Path(work, f"lookup-0-{seed}"), work) for seed in SEEDS]
            record("tasks", results=results)
    tables = [table(*globals()[task](results[task])) for task in RUNS if task in results]
    put("tasks", "\n".join(tables)
        + f"\nSeeds 0, 1, 2, each with its own base; 512 held-out problems; {MACHINE}.\n", "tasks")


if __name__ == "__main__":
    main()
