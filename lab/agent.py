"""Train the agent of the path, real.py with a tool: does it learn, and does the mask matter?

python -m lab.agent lookup: the base of --task lookup, with the tool's text masked and in the loss,
at the best rates of docs/lab/masking.md.
python -m lab.agent gemma: Gemma 3 270M with a calculator. Needs lab/gemma-requirements.txt.
Both use three seeds. runs/agent/ keeps the results of each run that has ended, and if you stop the
command, it continues from there. --seeds 1 --steps 2 is a short trial, in a file of its own.
"""
import engines.import_path  # noqa: F401, I001  (before all others)
import functools
import json
import math
import os
import random
import re
import shutil
import statistics

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
from vectors.edits import load

FOLDER = ROOT / "runs/agent"
RATES = {"lookup": {"masked": 5e-4, "in the loss": 1e-3}, "gemma": {"calculator": 3e-6}}
STEPS = {"lookup": 36, "gemma": 12}
HELD_OUT, SAMPLES = 50, 4               # questions, and outputs to each
SUMS = ("7 * 13 + 5 = <calc>7 * 13</calc> 91 <calc>91 + 5</calc> 96 Answer: 96\n"
        "4 * 21 - 9 = <calc>4 * 21</calc> 84 <calc>84 - 9</calc> 75 Answer: 75\n")


def lookup():
    """Questions of the toy, which differ, and its base. -> base, rows, values of the script"""
    base = FOLDER / "lookup-base"
    if not base.exists():
        for name in ("run", "part"):
            shutil.rmtree(FOLDER / name, ignore_errors=True)
        grpo.main(["--task", "lookup", "--max_steps", "0", "--output_dir", str(FOLDER / "run")])
        export.export(FOLDER / "run", FOLDER / "part", "base.pt")
        os.replace(FOLDER / "part", base)
    task = common.load_task(grpo.Config(task="lookup"), grpo.verify)
    problems = {one.prompt: one for one in common.sample_problems(task, 2000, 0)}
    return base, [{"prompt": prompt, "answer": one.answer} for prompt, one in problems.items()], {
        "P": 16, "T": 40, "W": task.prompt_width, "K": 9, "N": 128, "M": 32, "FRAME": ("", ""),
        "CALL": task.call_tokens, "verify": lambda answer, text: float(extract(text) == answer),
        "respond": lambda question, text: task.respond(problems[question], text)}


def calculator():
    """Sums that Gemma can give to a calculator. -> base, rows, values of the script"""
    rng = random.Random(0)
    draws = [(rng.randint(12, 99), rng.randint(12, 99), rng.choice("+-"), rng.randint(12, 99))
             for _ in range(1000)]
    sums = dict.fromkeys(f"{a} * {b} {sign} {c}" for a, b, sign, c in draws)
    rows = [{"prompt": f"{SUMS}{one} =", "answer": str(eval(one))} for one in sums]
    return gemma.make_base(), rows, {
        "P": 8, "T": 56, "M": 4, "N": 64, "HELD_OUT": 8, "FRAME": (" ", ""),
        "verify": lambda answer, text: float(re.search(rf"Answer: {answer}\s*$", text) is not None)}


def measure(case, seed, what, steps):
    """Train with a seed, unless the case is "untrained", and sample held-out questions.
    -> share of right samples, calls per output, some texts, and the rewards of the steps"""
    base, rows, values = {"lookup": lookup, "gemma": calculator}[what]()
    folder = FOLDER / "case"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.chdir(folder)
    script = load(rungs.real_script(rungs.AGENT), "agent", ROOT / "real.py")
    vars(script).update(values)
    sample, lines = script.sample, []
    if case != "untrained":
        plumbing.write(folder / "train.jsonl", "".join(
            json.dumps(row) + "\n" for row in rows[HELD_OUT:]))
        script.RATE = RATES[what][case]
        if case == "in the loss":       # then all tokens count as the policy's
            script.sample = lambda *args, **flags: script.ids(sample(*args, **flags))
        script.main(str(base), "train.jsonl", seed, steps)
        lines = map(json.loads, (folder / "trained/metrics.jsonl").read_text().splitlines())
    policy = script.load(base if case == "untrained" else "trained")
    script.DRAWS.manual_seed(0)
    asked = [row for row in rows[:HELD_OUT] for _ in range(SAMPLES)]
    texts = script.decode(sample(policy, [row["prompt"] for row in asked]))
    right = [script.verify(row["answer"], text) for row, text in zip(asked, texts)]
    return {"right": statistics.mean(right), "calls": script.METRICS["tools/call_frequency"],
            "texts": texts[::40], "rewards": [line["reward"] for line in lines if "reward" in line]}


def main(argv=None):
    flags = parser(__doc__)
    flags.add_argument("what", choices=STEPS, help="policy to train")
    flags.add_argument("--seeds", type=int, default=3, metavar="N", help="number of seeds")
    flags.add_argument("--steps", type=int, metavar="N", help="number of steps")
    args = flags.parse_args(argv)
    steps = args.steps or STEPS[args.what]
    store = measuring.Store(FOLDER / f"{args.what}-{steps}.json", {"steps": steps})
    jobs = [("untrained", 0), *((case, seed) for seed in range(args.seeds)
                                for case in RATES[args.what])]
    measuring.collect(store, lambda _: jobs, functools.partial(
        measure, what=args.what, steps=steps))
    for (case, seed), one in store.results.items():
        last = statistics.mean(one["rewards"][-10:] or [math.nan])
        print(f"{case}, seed {seed}: {one['right']:.3f} right, {one['calls']:.2f} calls, reward of "
              f"the last 10 steps {last:.3f}")


if __name__ == "__main__":
    start(main)
