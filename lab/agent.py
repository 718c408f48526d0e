"""Train the agent of the path, real.py with a tool.

python -m lab.agent lookup MODEL RATE SEED: a base of --task lookup that engines.export has written.
python -m lab.agent sums MODEL RATE SEED: a model that can call a calculator, such as Gemma 3 270M,
runs/gemma/base, which `make gemma` writes.
"""
import engines.import_path  # noqa: F401, I001  (before all others)
import common
import grpo
from lab.docs import ROOT
from learn.path import rungs
from report import parser, start
from vectors.edits import load

EXAMPLE = "17 * 13 + 25 = <calc>17 * 13</calc> 221 <calc>221 + 25</calc> 246 Answer: 246\n"
LOOKUP = common.load_task(grpo.Config(task="lookup"), grpo.verify)
TABLES = {one.prompt: one for one in common.sample_problems(LOOKUP, 2000, 0)}


def make_up_sum(rng):
    a, b, c = (rng.randint(11, 99) for _ in range(3))
    return f"{EXAMPLE}{a} * {b} + {c} =", f"Answer: {a * b + c}"


CASES = {                               # values for the script's globals
    "lookup": {"STEPS": 36, "P": 16, "T": 40, "W": LOOKUP.prompt_width, "K": 9, "M": 32,
               "CALL": LOOKUP.call_tokens, "FRAME": ("", ""), "verify": LOOKUP.verify,
               "respond": lambda question, text: LOOKUP.respond(TABLES[question], text),
               "make_up_problem": lambda rng: rng.choice([*TABLES.items()])},
    "sums": {"STEPS": 12, "P": 2, "T": 48, "HELD_OUT": 16, "CALL": "</calc>",
             "FRAME": (" ", ""),
             "verify": lambda answer, text: float(text.rstrip().endswith(answer)),
             "make_up_problem": make_up_sum}}


def main(argv=None):
    flags = parser(__doc__)
    flags.add_argument("case", choices=CASES, help="questions and tool")
    flags.add_argument("model", metavar="MODEL", help="folder of a model")
    flags.add_argument("rate", type=float, metavar="RATE", help="learning rate of the first step")
    flags.add_argument("seed", type=int, metavar="SEED", help="seed of the run")
    flags.add_argument("--unmasked", action="store_true", help="put the tool's tokens in the loss")
    args = flags.parse_args(argv)
    script = load(rungs.real_script(rungs.AGENT), "agent", ROOT / "real.py")
    vars(script).update(CASES[args.case], RATE=args.rate)
    sample, advantages, rewards = script.sample, script.advantages, []
    script.advantages = lambda x: rewards.append(x.mean().item()) or advantages(x)
    if args.unmasked:                   # then all tokens count as the policy's
        script.sample = lambda *inputs, **options: script.ids(sample(*inputs, **options))
    script.main(args.model, seed=args.seed)
    late = rewards[-10:]
    print(f"mean reward of the last {len(late)} steps: {sum(late) / len(late):.3f}")


if __name__ == "__main__":
    start(main)
