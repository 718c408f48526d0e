"""Offline DPO: chosen answers that lose probability, flipped pairs, and PPO on the same pairs"""
import functools
import json
import random
import tempfile
from pathlib import Path

import common
import ppo
from lab.docs import run, run_once
from lab.draw import BLUE, GREY, ORANGE, curves
from lab.experiment import Experiment, numbers
from lab.training import load_base
from lab.verdict import OURS, Claim
from report.logs import read_log
from tasks import preferences
from tasks.pairs import readable

FLIPS = 0.4                             # fraction of the pairs that are flipped
GAIN = 0.02                             # smallest difference of a pass@1 that matters
EVALUATION = "--num_eval_problems 256 --num_eval_samples"
FRESH = f"dpo.py {EVALUATION} 2 --max_steps 40"
LEARNING = {"offline": FRESH, "offline, beta 0.5": f"{FRESH} --beta 0.5",
            "online": f"{FRESH} --online"}
GREEDY = "eval/greedy"                  # metrics that exist only for every tenth step
CHOSEN = "eval/pairs/rewards/chosen"
REJECTED = "eval/pairs/rewards/rejected"
PAIRS = f"dpo.py {EVALUATION} 2 --max_steps 30 --learning_rate 0 --eval_steps 1000 --save_pairs"
FIXED = f"dpo.py {EVALUATION} 2 --max_steps 30 --num_generations 4"
CLEAN = "DPO, no flips"
LOSSES = {CLEAN: FIXED, "DPO": FIXED, "cDPO": f"{FIXED} --label_smoothing {FLIPS}",
          "robust DPO": f"{FIXED} --label_smoothing {FLIPS} --loss_type robust",
          "IPO": f"{FIXED} --loss_type ipo --beta 0.5", "RPO": f"{FIXED} --nll_coef 1"}
PPO = f"ppo.py {EVALUATION} 4 --reward model --max_steps 30"
METHODS = {"DPO": f"dpo.py {EVALUATION} 4 --num_generations 4 --max_steps 30",
           "PPO": PPO, "PPO, beta 0.1": f"{PPO} --beta 0.1"}
EXPERIMENT = Experiment(__file__, seeds=range(5), one_base=True,
                        rate="5e-4 for ppo.py and 1e-4 for dpo.py")
EXPERIMENT.runs("fresh", LEARNING, [GREEDY, CHOSEN, REJECTED], ["pass@1"])
EXPERIMENT.commands += [PAIRS, *LOSSES.values(), *METHODS.values()]


@functools.cache
def pairs_of_the_base():
    """Sample pairs from the base, and save them. -> list of dicts"""
    with tempfile.TemporaryDirectory() as work:
        script, *flags = PAIRS.split()
        run(script, Path(work, "pairs"), *flags)
        return read_log(Path(work, "pairs"), "pairs")


def run_on(pairs, command, seed, metrics=()):
    """Run a command line, with a file of these pairs unless pairs is None. -> {column: values}"""
    with tempfile.TemporaryDirectory() as work:
        if pairs is not None:
            path = Path(work, "pairs.jsonl")
            path.write_text("\n".join(map(json.dumps, pairs)), "utf-8")
            command += f" --pairs {path}"
        return run_once(command, seed, metrics, ["pass@1"])


@EXPERIMENT.measure(LOSSES)
def flipped(seed, name):
    """Train on pairs of the base, some of them flipped unless the name is CLEAN."""
    rng = random.Random(seed)
    pairs = []
    for pair in pairs_of_the_base():
        if name != CLEAN and rng.random() < FLIPS:
            pair = pair | {"chosen": pair["rejected"], "rejected": pair["chosen"]}
        pairs.append(pair)
    return run_on(pairs, LOSSES[name], seed)


def compared_pairs(seed):
    """Make the pairs that the reward model of a run with this seed learns from, as far as a file
    can contain them. -> list of dicts"""
    cfg, task, policy = load_base(ppo, f"--seed {seed}")
    generator = common.generator(seed, "mistakes")
    results = []
    for number in range(preferences.BATCHES):
        batch = ppo.sample_batch(policy, task, cfg, f"preferences {number}")
        rows = preferences.pairs(batch, preferences.MISTAKES, generator)
        results += readable(batch, *rows)
    return results


@EXPERIMENT.measure(METHODS)
def same(seed, method):
    """Train DPO on a file of pairs, or PPO against the reward model that learned from them."""
    pairs = compared_pairs(seed) if method == "DPO" else None
    return run_on(pairs, METHODS[method], seed, ["step_time"])


def page(fresh, flipped, same):
    beta = {"offline": 0.1, "offline, beta 0.5": 0.5, "online": 0.1}
    gained = {name: columns[CHOSEN] / beta[name] for name, columns in fresh.items()}    # nats
    lost = -gained["offline"][:, -1]
    yield Claim("in offline DPO, chosen answers lose log-probability", "Razin and others", lost,
                at_least=1, unit="nats", said="In 40 steps of offline DPO, chosen answers lose "
                f"{lost.mean():.1f} nats of log-probability")
    yield curves({name: values[:, 9::10] for name, values in gained.items()}, range(10, 41, 10),
                 given=dict(zip(gained, (BLUE, GREY, ORANGE))),
                 ylabel="nats gained by chosen answers")
    yield numbers({name: {
        "pass@1": columns["pass@1"], "greedy accuracy": columns[GREEDY][:, -1],
        "change of log pi, chosen (nats)": gained[name][:, -1],
        "change of log pi, rejected (nats)": columns[REJECTED][:, -1] / beta[name]}
        for name, columns in fresh.items()}, by="DPO on fresh pairs")
    yield Claim("online DPO ends with a higher pass@1 than offline DPO", "Guo and others",
                (fresh["online"]["pass@1"], fresh["offline"]["pass@1"]), at_least=GAIN)

    score = {name: columns["pass@1"] for name, columns in flipped.items()}
    yield Claim(f"with {FLIPS:.0%} of the pairs flipped, DPO ends with a lower pass@1", OURS,
                (score["DPO"], score[CLEAN]), at_most=-GAIN)
    yield Claim(f"with {FLIPS:.0%} of the pairs flipped, robust DPO ends with a higher pass@1 than "
                "DPO", "robust DPO", (score["robust DPO"], score["DPO"]), at_least=GAIN)
    yield numbers(flipped,
                  by=f"loss ({FLIPS:.0%} of the pairs are flipped, except in the first row)")

    end = {name: columns["pass@1"] for name, columns in same.items()}
    yield Claim("from the same pairs, DPO's pass@1 at the end is at least as high as PPO's", "DPO",
                (end["DPO"], end["PPO"]), at_least=-GAIN)
    yield Claim("PPO ends with a higher pass@1 if the KL is penalized", "InstructGPT",
                (end["PPO, beta 0.1"], end["PPO"]), at_least=GAIN)
    yield numbers({name: {"pass@1": end[name],
                          "seconds of training": columns["step_time"].sum(axis=1)}
                   for name, columns in same.items()}, by="method, on the same pairs")
