"""Train the agent of the path: does it learn, and does the mask of the tool's tokens matter?

python -m lab.agent lookup masked 5e-4 0: trains with this learning rate and seed from the base of
--task lookup, whose seed is the same. With `unmasked`, the tool's tokens are in the loss.
python -m lab.agent gemma masked 3e-6 0: Gemma 3 270M, with a calculator. Needs
lab/gemma-requirements.txt.
The result is one line; runs/agent/ keeps the base, and the run with its metrics.
"""
import engines.import_path  # noqa: F401, I001  (before all others)
import json
import os
import random
import re
import statistics

import common
import grpo
import plumbing
from engines import export
from lab import gemma
from lab.docs import ROOT
from learn.path import rungs
from report import parser, start
from tasks import extract
from vectors.edits import load

FOLDER = ROOT / "runs/agent"
SUMS = "17 * 13 + 25 = <calc>17 * 13</calc> 221 <calc>221 + 25</calc> 246 Answer: 246\n"


def lookup(seed):
    """The base, questions whose tables the tool knows, and settings. -> path, {question: answer},
    dict"""
    base = FOLDER / f"lookup-base-{seed}"
    if not base.exists():
        grpo.main(["--task", "lookup", "--max_steps", "0", "--base_seed", str(seed),
                   "--output_dir", str(FOLDER / f"lookup-run-{seed}")])
        export.export(FOLDER / f"lookup-run-{seed}", base, "base.pt")
    task = common.load_task(grpo.Config(task="lookup"), grpo.verify)
    problems = {one.prompt: one for one in common.sample_problems(task, 2000, 0)}
    return base, {prompt: one.answer for prompt, one in problems.items()}, {
        "P": 16, "T": 40, "W": task.prompt_width, "K": 9, "M": 32, "FRAME": ("", ""),
        "CALL": task.call_tokens, "verify": lambda answer, text: float(extract(text) == answer),
        "respond": lambda question, text: task.respond(problems[question], text)}


def calculator(seed):
    """Gemma, and sums after an example of calls. -> path, {question: answer}, dict"""
    rng = random.Random(0)
    draws = [(*(rng.randint(11, 99) for _ in "abc"), rng.choice("+-")) for _ in range(400)]
    sums = dict.fromkeys(f"{a} * {b} {sign} {c}" for a, b, c, sign in draws)
    return gemma.make_base(), {f"{SUMS}{one} =": str(eval(one)) for one in sums}, {
        "P": 4, "T": 48, "M": 4, "N": 64, "HELD_OUT": 32, "FRAME": (" ", ""), "verify": lambda
        answer, text: float(re.search(rf"Answer: {answer}\s*$", text) is not None)}


def main(argv=None):
    flags = parser(__doc__)
    flags.add_argument("what", choices=("lookup", "gemma"), help="policy to train")
    flags.add_argument("mask", choices=("masked", "unmasked"), help="the tool's tokens in the loss")
    flags.add_argument("rate", type=float, metavar="RATE", help="learning rate of the first step")
    flags.add_argument("seed", type=int, metavar="SEED", help="seed of the run")
    flags.add_argument("--steps", type=int, metavar="N", help="number of steps")
    args = flags.parse_args(argv)
    is_toy = args.what == "lookup"
    base, answers, settings = (lookup if is_toy else calculator)(args.seed)
    folder = FOLDER / "-".join(map(str, (args.what, args.mask, args.rate, args.seed)))
    folder.mkdir(parents=True)
    os.chdir(folder)
    plumbing.write(folder / "problems.jsonl", "".join(
        json.dumps({"prompt": prompt, "answer": answers[prompt]}) + "\n" for prompt in answers))
    script = load(rungs.real_script(rungs.AGENT), "agent", ROOT / "real.py")
    vars(script).update(settings, RATE=args.rate)
    sample = script.sample
    if args.mask == "unmasked":         # then all tokens count as the policy's
        script.sample = lambda *inputs, **options: script.ids(sample(*inputs, **options))
    script.main(str(base), "problems.jsonl", args.seed, args.steps or (36 if is_toy else 12))
    before, *lines, after = map(json.loads, open("trained/metrics.jsonl"))
    print(f"{args.what} {args.mask}, rate {args.rate:g}, seed {args.seed}: held-out before "
          f"{before['eval_reward']:.3f}, after {after['eval_reward']:.3f}; last 10 steps",
          f"{statistics.mean(line['reward'] for line in lines[-10:]):.3f}, calls",
          " ".join(f"{line['tools/call_frequency']:.2f}" for line in (lines[0], lines[-1])))


if __name__ == "__main__":
    start(main)
