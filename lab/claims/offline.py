"""Offline DPO: chosen answers that lose probability, flipped pairs, and PPO on the same preferences

Claim. DPO (2305.18290) widens the margin between chosen and rejected answers, also by making both
less likely (likelihood displacement, Razin and others, 2410.08847). Pairs of the policy's own
outputs do better than offline ones, from which it drifts away (Guo and others, 2402.04792). If a
share of the pairs is flipped, robust DPO holds up (2403.00409), and so may cDPO, IPO (2310.12036)
and RPO (2404.19733), which keep margins or chosen answers where they are. DPO does as well as PPO
against a reward model, or better, and needs neither that model nor samples (2305.18290). PPO does
better where both are tuned, as DPO also raises what no pair speaks of (Xu and others, 2404.10719).
A penalty on the KL keeps PPO from what the reward model wrongly likes (InstructGPT, 2203.02155).

Prediction. Offline, both kinds of answers lose probability, and accuracy falls after step 20; a
larger beta delays both. Online, accuracy stays high, but the chosen answers of the base lose
probability, too, as many are right without a thought. With three pairs of ten mixed up, DPO learns
later. As Adam takes steps of one size whatever the scale of a loss, robust DPO does no better than
DPO: its mean is right, but not its noise. RPO is best, as it imitates chosen answers, of which most
are right, cDPO and IPO come close to DPO. PPO ends more accurate: the reward model puts most pairs
in the right order, and PPO asks it about 7,680 new completions, where DPO reads 600 pairs of old
ones three times. DPO takes a quarter of the seconds. In 30 steps PPO does not go far enough to need
the penalty. We knew 60 steps of this PPO when this was written, and DPO on fresh pairs.

Method. 40 steps of dpo.py on fresh pairs of the base, and online; log-probabilities are those of
held-out pairs of the base, in nats above what the base gives them. Then a file of such pairs, four
in ten of them flipped by lot, 64 pairs a step for 30 steps; cDPO and robust DPO know the share of
flips, IPO has a beta of 0.5, which asks for margins of 1 nat, and RPO adds 1 times the loss of
imitation. (If flips cost DPO nothing, as three of ten did before, there is nothing to repair, and
robust DPO gets no verdict.) Last, the pairs that --reward model learns from, one in ten swapped:
PPO, 30 steps, without and with --beta 0.1, against the model that learned from them; DPO, 30 steps
of 64 pairs, from a file of them. Seconds are those of the steps, the making of the reward model not
counted.

Outcome. Offline, rejected answers lose probability at once, chosen ones after step 20, though not
surely a nat; accuracy falls after step 30, not 20. With a larger beta the chosen ones keep theirs,
and online they gain, which was not predicted. Flips cost DPO 8 of 100, of which robust DPO repairs
1 in the mean, and whether 2 is not seen; cDPO and IPO are worse, and RPO, predicted as the best, is
worst: of what it imitates four in ten were rejected. DPO takes a quarter of PPO's seconds. That PPO
ends more accurate is not seen, for it needs the penalty, against the prediction: with it, 0.97.
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
from lab.draw import BLUE, GREY, ORANGE, PINK, RED, curves, dots
from lab.experiment import Experiment, numbers, run_once
from lab.training import load_base
from lab.verdict import OURS, SHOWN, Claim
from report.logs import read_log
from tasks import preferences
from tasks.pairs import encode

RAZIN = "[Razin and others](https://arxiv.org/abs/2410.08847)"
GUO = "[Guo and others](https://arxiv.org/abs/2402.04792)"
ROBUST = "[robust DPO](https://arxiv.org/abs/2403.00409)"
DPO = "[DPO](https://arxiv.org/abs/2305.18290)"
INSTRUCT = "[InstructGPT](https://arxiv.org/abs/2203.02155)"
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
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5), one_base=True)
EXPERIMENT.runs("fresh", LEARNING, [GREEDY, CHOSEN, REJECTED], ["pass@1"])
EXPERIMENT.commands += [PAIRS, *LOSSES.values(), *METHODS.values()]


# ---- 1. on pairs of which some are the wrong way round ---------------------------------------

@functools.cache
def pairs_of_the_base():
    """-> list of dicts"""
    with tempfile.TemporaryDirectory() as work:
        script, *flags = PAIRS.split()
        run(script, Path(work, "pairs"), *flags)
        return read_log(Path(work, "pairs"), "pairs")


def flip(pairs, share, seed):
    """Exchange chosen and rejected of about this share of the pairs. -> list"""
    rng = random.Random(seed)
    flipped = []
    for pair in pairs:
        if rng.random() < share:
            pair = pair | {"chosen": pair["rejected"], "rejected": pair["chosen"]}
        flipped.append(pair)
    return flipped


def run_on(pairs, command, seed, metrics=()):
    """Run a command line on these pairs. -> {column: values}"""
    with tempfile.TemporaryDirectory() as work:
        path = Path(work, "pairs.jsonl")
        path.write_text("\n".join(map(json.dumps, pairs)))
        return run_once(f"{command} --pairs {path}", seed, metrics, ["pass@1"])


@EXPERIMENT.measure(LOSSES)
def flipped(seed, name):
    """Train on pairs as they were, or with a loss on flipped ones."""
    pairs = flip(pairs_of_the_base(), 0 if name == CLEAN else FLIPS, seed)
    return run_on(pairs, LOSSES[name], seed)


# ---- 2. DPO and PPO on the same pairs --------------------------------------------------------

def compared_pairs(seed):
    """The pairs that the reward model of a run with this seed learns from, but for those whose
    texts would be read as other tokens. -> list of dicts"""
    cfg, task, policy = load_base(ppo, f"--seed {seed}")
    generator = common.generator(seed, "mistakes")
    found = []
    for number in range(preferences.BATCHES):
        batch = ppo.sample_batch(policy, task, cfg, f"preferences {number}")
        rows = zip(batch.tokens.tolist(), batch.lengths.tolist(), batch.texts)
        can_be_read = [ids[:n] == encode(text, ppo) for ids, n, text in rows]
        for pair in zip(*preferences.pairs(batch, preferences.MISTAKES, generator)):
            best, worst = map(int, pair)
            if can_be_read[best] and can_be_read[worst]:
                found.append({"prompt": batch.problems[best].prompt,
                              "chosen": batch.texts[best], "rejected": batch.texts[worst]})
    return found


@EXPERIMENT.measure(METHODS)
def same(seed, method):
    """DPO from a file of pairs, PPO against the model that learned from them."""
    metrics = [GREEDY, "step_time"]
    if method == "DPO":
        return run_on(compared_pairs(seed), METHODS[method], seed, metrics)
    return run_once(METHODS[method], seed, metrics, ["pass@1"])


# ---- 3. what was found -----------------------------------------------------------------------

def page(fresh, flipped, same):
    score = {name: found["pass@1"] for name, found in fresh.items()}
    beta = {"offline": 0.1, "beta 0.5": 0.5, "online": 0.1}
    gained = {name: found[CHOSEN] / beta[name] for name, found in fresh.items()}        # nats
    lost = {name: -values[:, -1] for name, values in gained.items()}
    others = {name: found[REJECTED][:, -1] / beta[name] for name, found in fresh.items()}
    said = "; ".join(f"{name}, {-lost[name].mean():+.1f} nats for chosen answers, "
                     f"{others[name].mean():+.1f} for rejected" for name in ("offline", "online"))
    said = f"What 40 steps of DPO change in log pi: {said}"
    yield Claim("offline, chosen answers lose probability", RAZIN, lost["offline"], at_least=1,
                unit="nats", shown=said, contradicted=said, undecided=said)
    yield Claim("online ends more accurate than offline", GUO, (score["online"], score["offline"]),
                at_least=GAIN)

    mixed = {name: found["pass@1"] for name, found in flipped.items()}
    hurt = Claim(f"with {FLIPS:.0%} of the pairs flipped, DPO is less accurate", OURS,
                 (mixed["DPO"], mixed[CLEAN]), at_most=-GAIN)
    yield hurt
    yield Claim("with flips, robust DPO ends more accurate than DPO", ROBUST,
                (mixed["robust DPO"], mixed["DPO"]),
                at_least=GAIN if hurt.verdict == SHOWN else None)

    end = {name: found["pass@1"] for name, found in same.items()}
    best = {name: numpy.nanmax(found[GREEDY], axis=1) for name, found in same.items()}
    seconds = {name: found["step_time"].sum(axis=1) for name, found in same.items()}
    yield Claim("DPO ends as accurate as PPO on the same pairs, or more", DPO,
                (end["DPO"], end["PPO"]), at_least=-GAIN)
    told = (f"From the same pairs, DPO gets a pass@1 of {end['DPO'].mean():.2f}, PPO "
            f"{end['PPO'].mean():.2f}, PPO with a KL penalty {end['PPO, beta 0.1'].mean():.2f}")
    yield Claim("PPO ends more accurate with a penalty on the KL", INSTRUCT,
                (end["PPO, beta 0.1"], end["PPO"]), at_least=GAIN, shown=told, contradicted=told,
                undecided=told)

    yield curves({name: values[:, 9::10] for name, values in gained.items()}, said,
                 x=range(10, 41, 10), given=dict(zip(LEARNING, (BLUE, GREY, ORANGE))),
                 ylabel="nats gained by chosen answers")
    yield dots(end, told, given=dict(zip(end, (PINK, RED, RED))),
               xlabel="pass@1; a dot for each seed")
    rows = {name: {"pass@1": score[name], "greedy": found[GREEDY][:, -1], "chosen": -lost[name],
                   "rejected": others[name]} for name, found in fresh.items()}
    yield numbers(rows, {"pass@1": "pass@1", "greedy": "greedy", "chosen": "nats, chosen",
                         "rejected": "nats, rejected"}, by="DPO, fresh pairs")
    yield numbers(flipped, {"pass@1": "pass@1"}, by=f"{FLIPS:.0%} of the pairs flipped")
    yield numbers({name: {"end": end[name], "best": best[name], "seconds": seconds[name]}
                   for name in same}, {"end": "pass@1", "best": "greedy, best",
                                       "seconds": "seconds"}, by="the same pairs")
