"""DPO: answers that lose probability, mixed-up pairs, and PPO on the same preferences

Claim. DPO (2305.18290) widens the margin between chosen and rejected answers, also by making both
less likely (likelihood displacement, Razin and others, 2410.08847). Pairs of the policy's own
outputs do better than offline ones, from which it drifts away (Guo and others, 2402.04792). If a
share of the pairs is mixed up, robust DPO is unbiased and holds up (2403.00409), and so may cDPO,
IPO (2310.12036) and RPO (2404.19733), which keep margins or chosen answers where they are.
DPO does as well as PPO against a reward model, or better, and needs neither that model nor
samples (2305.18290). PPO does better where both are tuned, as DPO also raises what no pair speaks
of (Xu and others, 2404.10719). A penalty on the KL keeps PPO from what the reward model wrongly
likes (Ouyang and others, 2203.02155).

Prediction. Offline, both kinds of answers lose probability, and accuracy falls after step 20; a
larger beta and a lower rate delay both. Online, accuracy stays high, but the chosen answers of the
base lose probability, too, as many are right without a thought. With three pairs of ten mixed up,
DPO learns later. As Adam takes steps of one size whatever the scale of a loss, robust DPO does no
better than DPO: its mean is right, but not its noise. RPO is best, as it imitates chosen answers,
of which most are right, cDPO and IPO come close to DPO.
PPO ends more accurate: the reward model puts most pairs in the right order, and PPO
asks it about 7,680 new completions, where DPO reads 600 pairs of old ones three times. DPO takes a
quarter of the seconds, and half of the memory that models take: five weights' worth of numbers
where PPO, its critic and the reward model take nine. In 30 steps PPO does not go far enough to need
the penalty. We knew the 60 steps of tools/rlhf.py when this was written, and DPO on fresh pairs.

Method. Exact: the loss of dpo.py, averaged over a pair and its flip. Runs: 40 steps of dpo.py on
fresh pairs of the base, and online; log-probabilities are of held-out pairs of the base, in nats
more than those of the base. The lower rate is compared where it has widened the margin as far, for
in 40 steps it goes less far. Then one file of such pairs, four of ten of them flipped by lot, 64
pairs a step for 30 steps; cDPO and robust DPO know the share of flips, IPO has a beta of 0.5, which
asks for margins of 1 nat, and RPO adds 1 times the loss of imitation. (At commit 0516fa1 three of
ten were flipped, which cost DPO nothing, so that there was nothing to repair; if it is so again,
the other losses get no verdict.) Last, the pairs that --reward model learns from, one in ten
swapped: PPO, 30 steps, without and with --beta 0.1, against the model that learned from them; DPO,
30 steps of 64 pairs, from a file of them. Seconds are those of the whole run, the making of the
reward model included and that of the base not; memory is the most that the process held.
"""
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import torch

import common
import dpo
import ppo
from lab.draw import BLUE, GREEN, GREY, ORANGE, curves, dots
from lab.experiment import Experiment, numbers
from lab.training import load_base
from lab.verdict import OURS, SHOWN, Claim
from tasks import preferences
from tasks.pairs import encode
from tools.runs import ROOT, curve, read_log, read_summary, run

RAZIN = "[Razin and others](https://arxiv.org/abs/2410.08847)"
GUO = "[Guo and others](https://arxiv.org/abs/2402.04792)"
ROBUST = "[robust DPO](https://arxiv.org/abs/2403.00409)"
DPO = "[DPO](https://arxiv.org/abs/2305.18290)"
XU = "[Xu and others](https://arxiv.org/abs/2404.10719)"
INSTRUCT = "[InstructGPT](https://arxiv.org/abs/2203.02155)"
FLIPS = 0.4                             # the share of pairs that are mixed up
GAIN = 0.02                             # of pass@1, what counts as one
EVALUATION = "--num_eval_problems 256 --num_eval_samples 2"
FRESH = f"--max_steps 40 --stop_at 2 --eval_steps 10 {EVALUATION}"
LEARNING = {"offline": FRESH, "beta 0.5": f"{FRESH} --beta 0.5",
            "rate 3e-5": f"{FRESH} --learning_rate 3e-5", "online": f"{FRESH} --online"}
PAIRS = f"--max_steps 30 --stop_at 2 --learning_rate 0 --eval_steps 1000 --save_pairs {EVALUATION}"
FIXED = f"--max_steps 30 --num_generations 4 --eval_steps 1000 {EVALUATION}"
LOSSES = {"DPO, no flips": "", "DPO": "", "cDPO": f"--label_smoothing {FLIPS}",
          "robust DPO": f"--label_smoothing {FLIPS} --loss_type robust",
          "IPO": "--loss_type ipo --beta 0.5", "RPO": "--nll_coef 1"}
SAME = "--max_steps 30 --eval_steps 5 --num_eval_problems 256 --num_eval_samples 4"
METHODS = {"DPO": f"dpo.py --num_generations 4 {SAME}",
           "PPO": f"ppo.py --reward model --stop_at 2 {SAME}",
           "PPO, beta 0.1": f"ppo.py --reward model --stop_at 2 --beta 0.1 {SAME}"}
MARGINS = list(range(-40, 81, 4))       # nats
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5))


# ---- 1. on fresh pairs -----------------------------------------------------------------------

@EXPERIMENT.measure(LEARNING)
def fresh(seed, name):
    """pass@1 at the end, and from the base on, every ten steps, greedy accuracy and by how many
    nats chosen and rejected answers gain."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "run")
        summary = run("dpo.py", folder, *LEARNING[name].split(), "--seed", seed, quiet=True)
        found = {"pass@1": summary["trained"]["pass@1"]}
        for kind in ("greedy", "pairs/logps/chosen", "pairs/logps/rejected"):
            values = [value for value in curve(folder, f"eval/{kind}") if value is not None]
            start = 0 if kind == "greedy" else summary["base"][kind]
            found[kind] = [value - start for value in [summary["base"][kind], *values]]
    return found


def at_margin(found, margins):
    """What chosen answers have gained when the margin has become so wide, seed by seed, between two
    evaluations if need be. (S,) -> (S,)"""
    chosen = found["pairs/logps/chosen"]
    wide = chosen - found["pairs/logps/rejected"]
    return numpy.array([numpy.interp(*pair) for pair in zip(margins, wide, chosen)])


# ---- 2. on pairs of which some are the wrong way round ---------------------------------------

def expected_losses():
    """The loss of a pair at each of MARGINS, averaged over its flip. -> {name: (M,)}"""
    M = torch.tensor(MARGINS, dtype=torch.float64)
    zero = torch.zeros_like(M)
    kinds = {"DPO, no flips": (0, "sigmoid", 0), "DPO": (FLIPS, "sigmoid", 0),
             "cDPO": (FLIPS, "sigmoid", FLIPS), "robust DPO": (FLIPS, "robust", FLIPS)}
    found = {}
    for name, (flips, loss_type, e) in kinds.items():
        right = dpo.dpo_loss(M, zero, zero, zero, 0.1, loss_type, e)
        mixed_up = dpo.dpo_loss(zero, M, zero, zero, 0.1, loss_type, e)
        found[name] = ((1 - flips) * right + flips * mixed_up).numpy()
    return found


def flip(pairs, share, seed):
    """Exchange chosen and rejected of about this share of the pairs. -> list"""
    rng = random.Random(seed)
    flipped = []
    for pair in pairs:
        if rng.random() < share:
            pair = pair | {"chosen": pair["rejected"], "rejected": pair["chosen"]}
        flipped.append(pair)
    return flipped


@functools.cache
def pairs_of_the_base():
    """-> list of dicts"""
    with tempfile.TemporaryDirectory() as work:
        run("dpo.py", Path(work, "pairs"), *PAIRS.split(), quiet=True)
        return read_log(Path(work, "pairs"), "pairs")


@EXPERIMENT.measure(LOSSES)
def flipped(seed, name):
    """Train on pairs as they were, or with a loss on flipped ones."""
    with tempfile.TemporaryDirectory() as work:
        share = 0 if name == "DPO, no flips" else FLIPS
        path = Path(work, "pairs.jsonl")
        pairs = flip(pairs_of_the_base(), share, seed)
        path.write_text("\n".join(map(json.dumps, pairs)))
        flags = f"{FIXED} {LOSSES[name]} --pairs {path} --seed {seed}"
        summary = run("dpo.py", Path(work, "run"), *flags.split(), quiet=True)
    return {"pass@1": summary["trained"]["pass@1"]}


# ---- 3. DPO and PPO on the same pairs --------------------------------------------------------

def compared_pairs(seed):
    """The pairs that the reward model of a run with this seed learns from, those that can be read
    from a file. -> list of dicts"""
    cfg, task, policy = load_base(ppo, f"--seed {seed}")
    generator = common.generator(seed, "mistakes")
    written = []
    for number in range(preferences.BATCHES):
        batch = ppo.sample_batch(policy, task, cfg, f"preferences {number}")
        chosen, rejected = preferences.pairs(batch, preferences.MISTAKES, generator)
        written += readable(batch, chosen, rejected)
    return written


def readable(batch, chosen, rejected):
    """The pairs of these rows that dpo.py would write into a file. -> list of dicts"""
    rows = zip(batch.tokens.tolist(), batch.lengths.tolist(), batch.texts)
    can_be_read = [ids[:n] == encode(text, ppo) for ids, n, text in rows]
    return [{"prompt": batch.problems[best].prompt,
             "chosen": batch.texts[best], "rejected": batch.texts[worst]}
            for best, worst in zip(chosen.tolist(), rejected.tolist())
            if can_be_read[best] and can_be_read[worst]]


@EXPERIMENT.measure(METHODS)
def same(seed, method):
    """DPO from a file of pairs, PPO against the model that learned from them; what it costs."""
    with tempfile.TemporaryDirectory() as work:
        script, *flags = METHODS[method].split()
        if script == "dpo.py":
            path = Path(work, "pairs.jsonl")
            path.write_text("\n".join(map(json.dumps, compared_pairs(seed))))
            flags += ["--pairs", str(path)]
        folder = Path(work, "run")
        flags += ["--seed", str(seed), "--output_dir", folder]
        process = subprocess.Popen(
            [sys.executable, ROOT / script, *flags], cwd=ROOT, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)     # which tells the most memory that it held
        process.returncode = status
        summary = read_summary(folder)
        greedy = [value for value in curve(folder, "eval/greedy") if value is not None]
    return {"pass@1": summary["trained"]["pass@1"], "best": max(greedy),
            "greedy": [summary["base"]["greedy"], *greedy], "MiB": usage.ru_maxrss / 1024,
            "seconds": summary["seconds_total"] - summary["seconds_warm_start"]}


# ---- 4. what was found -----------------------------------------------------------------------

def page(fresh, flipped, same):
    lost = {name: -found["pairs/logps/chosen"][:, -1] for name, found in fresh.items()}
    score = {name: found["pass@1"] for name, found in fresh.items()}
    drop = fresh["offline"]["greedy"].max(axis=1) - fresh["offline"]["greedy"][:, -1]
    displaced = Claim("offline, chosen answers lose probability", RAZIN, lost["offline"],
                      at_least=1, unit="nats", shown="Offline, the answers that DPO is to prefer "
                      f"lose {lost['offline'].mean():.0f} nats in 40 steps, online "
                      f"{lost['online'].mean():.0f}")
    yield displaced
    yield Claim("offline, greedy accuracy ends below its best", RAZIN, drop, at_least=0.05)
    yield Claim("online, chosen answers keep more probability", GUO,
                lost["offline"] - lost["online"], at_least=1, unit="nats")
    yield Claim("online ends more accurate than offline", GUO, score["online"] - score["offline"],
                at_least=GAIN)
    yield Claim("a beta of 0.5 keeps chosen answers likelier than 0.1", OURS,
                lost["offline"] - lost["beta 0.5"], at_least=1, unit="nats")
    slow = fresh["rate 3e-5"]
    margins = (slow["pairs/logps/chosen"] - slow["pairs/logps/rejected"])[:, -1]
    yield Claim("with as wide a margin, a rate of 3e-5 keeps chosen answers likelier than 1e-4",
                OURS, slow["pairs/logps/chosen"][:, -1] - at_margin(fresh["offline"], margins),
                at_least=1, unit="nats")

    expected = expected_losses()
    clean = expected["DPO, no flips"]
    yield Claim("averaged over flips, robust DPO has the loss of clean pairs: how far off", ROBUST,
                expected["robust DPO"] - clean, at_least=-1e-9, at_most=1e-9, exact=True)
    mixed = {name: found["pass@1"] for name, found in flipped.items()}
    hurt = Claim("flips cost DPO accuracy", ROBUST, mixed["DPO, no flips"] - mixed["DPO"],
                 at_least=GAIN)
    yield hurt
    for name in ("cDPO", "robust DPO", "IPO", "RPO"):
        yield Claim(f"with flips, {name} ends more accurate than DPO", ROBUST,
                    mixed[name] - mixed["DPO"], at_least=GAIN if hurt.verdict == SHOWN else None)

    one, other = same["DPO"], same["PPO"]
    better = Claim("DPO ends as accurate as PPO on the same pairs, or more", DPO,
                   one["pass@1"] - other["pass@1"], at_least=-GAIN)
    yield better
    yield Claim("at its best, PPO is more accurate than DPO", XU, other["best"] - one["best"],
                at_least=GAIN)
    yield Claim("DPO takes less time than PPO", DPO, one["seconds"] / other["seconds"],
                at_most=0.8, times=True)
    yield Claim("DPO takes less memory than PPO", DPO, one["MiB"] / other["MiB"], at_most=0.9,
                times=True)
    yield Claim("PPO ends more accurate with a penalty on the KL", INSTRUCT,
                same["PPO, beta 0.1"]["pass@1"] - other["pass@1"], at_least=GAIN)

    colours = dict(zip(LEARNING, (BLUE, GREEN, GREY, ORANGE)))
    yield curves({name: found["pairs/logps/chosen"] for name, found in fresh.items()},
                 displaced.finding, x=range(0, 41, 10), given=colours,
                 ylabel="log-probability gained, nats")
    yield dots({name: found["pass@1"] for name, found in same.items()}, "On the same pairs, DPO "
               f"ends at a pass@1 of {one['pass@1'].mean():.2f}, PPO at "
               f"{other['pass@1'].mean():.2f}, with a penalty at "
               f"{same['PPO, beta 0.1']['pass@1'].mean():.2f}",
               xlabel="pass@1; a dot for each seed")
    rows = {name: {"pass@1": score[name], "best": found["greedy"].max(axis=1),
                   "greedy": found["greedy"][:, -1], "chosen": -lost[name],
                   "rejected": found["pairs/logps/rejected"][:, -1]}
            for name, found in fresh.items()}
    yield numbers(rows, {"pass@1": "pass@1", "best": "best greedy", "greedy": "greedy",
                         "chosen": "chosen", "rejected": "rejected"}, by="fresh pairs")
    yield numbers(flipped, {"pass@1": "pass@1"}, by=f"{FLIPS:.0%} of the pairs flipped")
    yield numbers(same, {"pass@1": "pass@1", "best": "best greedy", "seconds": "seconds",
                         "MiB": "MiB"}, by="the same pairs")
