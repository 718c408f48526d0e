"""Offline DPO: chosen answers that lose probability, flipped pairs, and PPO on the same preferences

dpo.py on fresh pairs of the base and online; from a file of such pairs of which some are flipped;
and from the pairs from which PPO's reward model learns. docs/lab/offline.md says more.
"""
import functools
import json
import random
import tempfile
from pathlib import Path

import numpy

import common
import ppo
from lab.docs import run
from lab.draw import BLUE, GREY, ORANGE, curves
from lab.experiment import Experiment, numbers, run_once
from lab.training import load_base
from lab.verdict import OURS, SHOWN, Claim
from report.logs import read_log
from tasks import preferences
from tasks.pairs import encode

FLIPS = 0.4                             # the share of pairs that are mixed up
GAIN = 0.02                             # of pass@1, what counts as one
EVALUATION = "--stop_at 2 --num_eval_problems 256 --num_eval_samples"
FRESH = f"dpo.py {EVALUATION} 2 --max_steps 40"
LEARNING = {"offline": FRESH, "beta 0.5": f"{FRESH} --beta 0.5", "online": f"{FRESH} --online"}
GREEDY = "eval/greedy"                  # metrics of each tenth step
CHOSEN = "eval/pairs/rewards/chosen"
REJECTED = "eval/pairs/rewards/rejected"
PAIRS = f"dpo.py {EVALUATION} 2 --max_steps 30 --learning_rate 0 --eval_steps 1000 --save_pairs"
FIXED = f"dpo.py {EVALUATION} 2 --max_steps 30 --num_generations 4"
CLEAN = "DPO, no flips"
LOSSES = {CLEAN: FIXED, "DPO": FIXED, "cDPO": f"{FIXED} --label_smoothing {FLIPS}",
          "robust DPO": f"{FIXED} --label_smoothing {FLIPS} --loss_type robust",
          "IPO": f"{FIXED} --loss_type ipo --beta 0.5", "RPO": f"{FIXED} --nll_coef 1"}
PPO = f"ppo.py {EVALUATION} 4 --reward model --max_steps 30 --eval_steps 5"
METHODS = {"DPO": f"dpo.py {EVALUATION} 4 --num_generations 4 --max_steps 30 --eval_steps 5",
           "PPO": PPO, "PPO, beta 0.1": f"{PPO} --beta 0.1"}
EXPERIMENT = Experiment(__file__, seeds=range(5), one_base=True)
EXPERIMENT.runs("fresh", LEARNING, [GREEDY, CHOSEN, REJECTED], ["pass@1"])
EXPERIMENT.commands += [PAIRS, *LOSSES.values(), *METHODS.values()]


@functools.cache
def pairs_of_the_base():
    """-> list of dicts"""
    with tempfile.TemporaryDirectory() as work:
        script, *flags = PAIRS.split()
        run(script, Path(work, "pairs"), *flags)
        return read_log(Path(work, "pairs"), "pairs")


def run_on(pairs, command, seed, metrics=()):
    """Run a command line on these pairs, if there are any. -> {column: values}"""
    with tempfile.TemporaryDirectory() as work:
        if pairs is not None:
            path = Path(work, "pairs.jsonl")
            path.write_text("\n".join(map(json.dumps, pairs)))
            command += f" --pairs {path}"
        return run_once(command, seed, metrics, ["pass@1"])


@EXPERIMENT.measure(LOSSES)
def flipped(seed, name):
    """Train on pairs as they were, or with a loss on flipped ones."""
    rng = random.Random(seed)
    pairs = []
    for pair in pairs_of_the_base():
        if name != CLEAN and rng.random() < FLIPS:
            pair = pair | {"chosen": pair["rejected"], "rejected": pair["chosen"]}
        pairs.append(pair)
    return run_on(pairs, LOSSES[name], seed)


def compared_pairs(seed):
    """The pairs that the reward model of a run with this seed learns from, but for those whose
    texts would be read as other tokens. -> list of dicts"""
    cfg, task, policy = load_base(ppo, f"--seed {seed}")
    generator = common.generator(seed, "mistakes")
    found = []
    for number in range(preferences.BATCHES):
        batch = ppo.sample_batch(policy, task, cfg, f"preferences {number}")
        can_be_read = [ids[:n] == encode(text, ppo) for ids, n, text in zip(
            batch.tokens.tolist(), batch.lengths.tolist(), batch.texts)]
        found += [{"prompt": batch.problems[best].prompt, "chosen": batch.texts[best],
                   "rejected": batch.texts[worst]}
                  for best, worst in zip(*preferences.pairs(batch, preferences.MISTAKES, generator))
                  if can_be_read[best] and can_be_read[worst]]
    return found


@EXPERIMENT.measure(METHODS)
def same(seed, method):
    """DPO from a file of pairs, PPO against the model that learned from them."""
    pairs = compared_pairs(seed) if method == "DPO" else None
    return run_on(pairs, METHODS[method], seed, [GREEDY, "step_time"])


def page(fresh, flipped, same):
    beta = {"offline": 0.1, "beta 0.5": 0.5, "online": 0.1}
    gained = {name: found[CHOSEN] / beta[name] for name, found in fresh.items()}        # nats
    rows = {name: {"pass@1": found["pass@1"], "greedy": found[GREEDY][:, -1],
                   "nats, chosen": gained[name][:, -1],
                   "nats, rejected": found[REJECTED][:, -1] / beta[name]}
            for name, found in fresh.items()}
    changes = "; ".join(f"{name}, {row['nats, chosen'].mean():+.1f} nats for chosen answers, "
                        f"{row['nats, rejected'].mean():+.1f} for rejected"
                        for name, row in rows.items() if name != "beta 0.5")
    said = f"What 40 steps of DPO change in log pi: {changes}"
    yield Claim("offline, chosen answers lose probability", "Razin and others",
                -gained["offline"][:, -1], at_least=1, unit="nats", said=said)
    yield curves({name: values[:, 9::10] for name, values in gained.items()}, said,
                 x=range(10, 41, 10), given=dict(zip(LEARNING, (BLUE, GREY, ORANGE))),
                 ylabel="nats gained by chosen answers")
    yield numbers(rows, by="DPO, fresh pairs")
    yield Claim("online ends more accurate than offline", "Guo and others",
                (fresh["online"]["pass@1"], fresh["offline"]["pass@1"]), at_least=GAIN)

    mixed = {name: found["pass@1"] for name, found in flipped.items()}
    hurt = Claim(f"with {FLIPS:.0%} of the pairs flipped, DPO is less accurate", OURS,
                 (mixed["DPO"], mixed[CLEAN]), at_most=-GAIN)
    yield hurt
    yield Claim("with flips, robust DPO ends more accurate than DPO", "robust DPO",
                (mixed["robust DPO"], mixed["DPO"]),
                at_least=GAIN if hurt.verdict == SHOWN else None)
    yield numbers(flipped, by=f"{FLIPS:.0%} of the pairs flipped")

    end = {name: found["pass@1"] for name, found in same.items()}
    yield Claim("DPO ends as accurate as PPO on the same pairs, or more", "DPO",
                (end["DPO"], end["PPO"]), at_least=-GAIN)
    told = (f"From the same pairs, DPO gets a pass@1 of {end['DPO'].mean():.2f}, PPO "
            f"{end['PPO'].mean():.2f}, PPO with a KL penalty {end['PPO, beta 0.1'].mean():.2f}")
    yield Claim("PPO ends more accurate with a penalty on the KL", "InstructGPT",
                (end["PPO, beta 0.1"], end["PPO"]), at_least=GAIN, said=told)
    rows = {name: {"pass@1": end[name], "greedy, best": numpy.nanmax(found[GREEDY], axis=1),
                   "seconds": found["step_time"].sum(axis=1)} for name, found in same.items()}
    yield numbers(rows, by="the same pairs")
