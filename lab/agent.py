"""Train the agent of the path, real.py with a tool: does it learn, and does the mask matter?

python -m lab.agent lookup: exports the base of --task lookup, and trains it with the tool's text
masked and with the tool's text in the loss, at the best rates of docs/lab/masking.md.
python -m lab.agent gemma: trains Gemma 3 270M, which lab/gemma.py converts, to use a calculator,
and samples held-out problems before and after. Needs lab/gemma-requirements.txt.
Both use three seeds. runs/agent/lookup.json and gemma.json keep each run that has ended; if you
stop the command, it continues from there. --seeds 1 --steps 2 is a short test.
"""
import engines.import_path  # noqa: F401, I001  (before all others)
import functools
import json
import os
import random
import re
import shutil
import statistics
import sys
from types import ModuleType

import torch

import common
import grpo
import measuring
import plumbing
from engines import export
from lab import gemma
from lab.docs import ROOT
from learn.path import rungs
from report import parser, start
from tasks import extract

FOLDER = ROOT / "runs/agent"
RATES = {"masked": 5e-4, "in the loss": 1e-3}
SUMS = ("7 * 13 + 5 = <calc>7 * 13</calc> 91 <calc>91 + 5</calc> 96 Answer: 96\n"
        "4 * 21 - 9 = <calc>4 * 21</calc> 84 <calc>84 - 9</calc> 75 Answer: 75\n")


def agent(**values):
    """Make the script, with values for its globals. -> module"""
    script = ModuleType("agent")
    script.__file__ = str(ROOT / "real.py")
    exec(rungs.real_script(rungs.AGENT), vars(script))
    vars(script).update(values)
    return script


def write_rows(rows):
    plumbing.write(FOLDER / "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def train(script, base, seed, steps):
    """Train a base in an empty folder. -> metrics of each step, and of the evaluations"""
    folder = FOLDER / "case"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.chdir(folder)
    script.main(str(base), "../train.jsonl", seed, steps)
    lines = (folder / "trained/metrics.jsonl").read_text().splitlines()
    names = ("reward", "eval_reward", "tools/call_frequency", "completions/mean_length")
    return [{name: line[name] for name in names if name in line} for line in map(json.loads, lines)]


def lookup(case, seed, steps):
    """Train the toy's base, on different questions. -> steps, mean reward of the last 10"""
    run, base = FOLDER / "lookup-run", FOLDER / "lookup-base"
    if not base.exists():
        shutil.rmtree(run, ignore_errors=True)
        grpo.main(["--task", "lookup", "--max_steps", "0", "--output_dir", str(run)])
        export.export(run, FOLDER / "part", "base.pt")
        os.replace(FOLDER / "part", base)
    task = common.load_task(grpo.Config(task="lookup"), grpo.verify)
    problems = {one.prompt: one for one in common.sample_problems(task, 2000, 0)}
    write_rows({"prompt": prompt, "answer": one.answer} for prompt, one in problems.items())
    script = agent(P=16, T=40, W=task.prompt_width, K=9, N=128, M=32, RATE=RATES[case],
                   CALL=task.call_tokens, FRAME=("", ""),
                   respond=lambda question, text: task.respond(problems[question], text),
                   verify=lambda answer, text: float(extract(text) == answer))
    sample = script.sample
    if case == "in the loss":           # then all tokens count as the policy's
        script.sample = lambda *args, **flags: script.ids(sample(*args, **flags))
    found = train(script, base, seed, steps)
    return {"steps": found, "last": statistics.mean(one["reward"] for one in found[-10:])}


def right(answer, text):
    """Whether the text ends with the answer. -> 1.0 or 0.0"""
    return float(re.search(rf"Answer: {answer}\s*$", text) is not None)


def calculator(case, seed, steps):
    """Train Gemma on sums that it can give to a calculator. -> scores before and after, samples"""
    base = gemma.make_base()
    sums = [(a, b, sign, c) for a in range(12, 60) for b in range(12, 60) for sign in "+-"
            for c in (a + b, 2 * a + 7)]
    random.Random(0).shuffle(sums)
    rows = [{"prompt": f"{SUMS}{a} * {b} {sign} {c} =", "answer": str(eval(f"{a}*{b}{sign}{c}"))}
            for a, b, sign, c in sums[:1000]]
    write_rows(rows[40:])
    script = agent(P=8, G=8, T=56, M=4, N=64, RATE=3e-6, HELD_OUT=8, FRAME=(" ", ""), verify=right)

    def score(folder):
        policy = script.load(folder)
        torch.manual_seed(0)
        script.DRAWS.manual_seed(0)
        tokens = script.sample(policy, [row["prompt"] for row in rows[:40] for _ in range(4)])
        texts = script.decode(tokens)
        rewards = [right(rows[i // 4]["answer"], text) for i, text in enumerate(texts)]
        return {"right": statistics.mean(rewards), "texts": texts[::20],
                "calls": script.METRICS["tools/call_frequency"]}
    before = score(base)
    found = train(script, base, seed, steps)
    return {"before": before, "after": score("trained"), "steps": found}


def main(argv=None):
    flags = parser(__doc__)
    flags.add_argument("what", choices=["lookup", "gemma"], help="policy to train")
    flags.add_argument("--seeds", type=int, default=3, metavar="N", help="number of seeds")
    flags.add_argument("--steps", type=int, metavar="N", help="number of steps")
    args = flags.parse_args(argv)
    cases = RATES if args.what == "lookup" else ["calculator"]
    steps = args.steps or {"lookup": 36, "gemma": 12}[args.what]
    perform = {"lookup": lookup, "gemma": calculator}[args.what]
    store = measuring.Store(FOLDER / f"{args.what}.json", {"steps": steps})
    measuring.collect(store, lambda _: [(case, seed) for seed in range(args.seeds)
                                        for case in cases],
                      functools.partial(perform, steps=steps))
    for (case, seed), found in store.results.items():
        scores = {name: value for name, value in found.items() if name != "steps"}
        print(f"{case}, seed {seed}: {json.dumps(scores)}")
    sys.stdout.flush()


if __name__ == "__main__":
    start(main)
