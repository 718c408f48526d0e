"""DPO: answers that lose probability, and pairs that are the wrong way round.

Claim. DPO (2305.18290) widens the margin between chosen and rejected answers, also by making both
less likely (likelihood displacement, Razin and others, 2410.08847). Pairs of the policy's own
outputs do better than offline ones, from which it drifts away (Guo and others, 2402.04792). If a
share of the pairs is mixed up, robust DPO is unbiased and holds up (2403.00409), and so may cDPO,
IPO (2310.12036) and RPO (2404.19733), which keep margins or chosen answers where they are.

Prediction. Offline, both kinds of answers lose probability, and accuracy falls after step 20; a
larger beta and a lower rate delay both. Online, accuracy stays high, but the chosen answers of the
base lose probability, too, as many are right without a thought. With three pairs of ten mixed up,
DPO learns later. As Adam takes steps of one size whatever the scale of a loss, robust DPO does no
better than DPO: its mean is right, but not its noise. RPO is best, as it imitates chosen answers,
of which most are right, cDPO and IPO come close to DPO.

Method. Exact: the loss of dpo.py, averaged over a pair and its flip. Runs: 40 steps of dpo.py on
fresh pairs of the base, and online; log-probabilities are of held-out pairs of the base, in nats
more than those of the base. Then one file of such pairs, three of ten of them flipped by lot, 64
pairs a step for 30 steps; cDPO and robust DPO know the share of flips, IPO has a beta of 0.5, which
asks for margins of 1 nat, and RPO adds 1 times the loss of imitation. Without flips, only DPO was
run, so that another loss that does worse than DPO need not do so because of the flips. When the
prediction was written, we knew the table of make compare and 60 steps offline with seed 0.
"""
import json
import random
import tempfile
from pathlib import Path

import torch

import dpo
from lab.entry import NOT_SHOWN, SHOWN, Claim, compared, mean_and_spread, minus
from tools.runs import read_log, run, run_all

SEEDS = [0, 1, 2]
FLIPS = 0.3                             # the share of pairs that are mixed up
EVALUATION = ["--num_eval_problems", 256, "--num_eval_samples", 2]
FRESH = ["dpo.py", "--max_steps", 40, "--stop_at", 2, "--eval_steps", 10, *EVALUATION]
FIXED = ["dpo.py", "--max_steps", 30, "--num_generations", 4, "--eval_steps", 1000, *EVALUATION]
LEARNING = {"offline": FRESH,
            "beta 0.5": [*FRESH, "--beta", 0.5],
            "rate 3e-5": [*FRESH, "--learning_rate", 3e-5],
            "online": [*FRESH, "--online"]}
PAIRS = ["--max_steps", 30, "--stop_at", 2, "--learning_rate", 0, "--eval_steps", 1000,
         "--save_pairs", *EVALUATION]
LOSSES = {"DPO": [],
          "cDPO": ["--label_smoothing", FLIPS],
          "robust DPO": ["--label_smoothing", FLIPS, "--loss_type", "robust"],
          "IPO": ["--loss_type", "ipo", "--beta", 0.5],
          "RPO": ["--nll_coef", 1]}
MARGINS = list(range(-40, 81, 4))       # nats
CURVES = {"greedy": "greedy", "chosen": "pairs/logps/chosen", "rejected": "pairs/logps/rejected"}

# What is claimed: of which runs a quantity is higher than of which others, or above 0.
CLAIMS = (
    ("offline, chosen answers lose probability (nats)", "offline", "", "lost"),
    ("offline, greedy accuracy ends over 0.05 below its best (by so much more)", "offline", "",
     "fallen more"),
    ("online, chosen answers keep more probability (nats)", "online", "offline", "chosen"),
    ("online ends more accurate than offline", "online", "offline", "pass@1"),
    ("a beta of 0.5 keeps chosen answers likelier than 0.1", "beta 0.5", "offline", "chosen"),
    ("a rate of 3e-5 ends more accurate than 1e-4", "rate 3e-5", "offline", "pass@1"),
    ("flips cost DPO accuracy", "DPO, no flips", "DPO", "pass@1"),
    ("with flips, cDPO ends more accurate than DPO", "cDPO", "DPO", "pass@1"),
    ("with flips, robust DPO ends more accurate than DPO", "robust DPO", "DPO", "pass@1"),
    ("with flips, IPO ends more accurate than DPO", "IPO", "DPO", "pass@1"),
    ("with flips, RPO ends more accurate than DPO", "RPO", "DPO", "pass@1"))


def measure(seeds):
    results = run_all(LEARNING, seeds, [f"eval/{metric}" for metric in CURVES.values()])
    found = {name: [outcome(result) for result in runs] for name, runs in results.items()}
    [first, *_] = results["offline"]
    return {"expected": expected_losses(), "runs": found | with_flips(seeds),
            "problems": first["summary"]["trained"]["problems"]}


def expected_losses():
    """The loss of a pair at each of MARGINS, averaged over its flip. -> dict of lists"""
    M = torch.tensor(MARGINS, dtype=torch.float64)
    zero = torch.zeros_like(M)
    kinds = {"DPO, no flips": (0, "sigmoid", 0), "DPO": (FLIPS, "sigmoid", 0),
             "cDPO": (FLIPS, "sigmoid", FLIPS), "robust DPO": (FLIPS, "robust", FLIPS)}
    found = {}
    for name, (flips, loss_type, e) in kinds.items():
        right = dpo.dpo_loss(M, zero, zero, zero, 0.1, loss_type, e)
        mixed_up = dpo.dpo_loss(zero, M, zero, zero, 0.1, loss_type, e)
        expected = (1 - flips) * right + flips * mixed_up
        found[name] = [round(loss, 5) for loss in expected.tolist()]
    return found


def outcome(result):
    """What is kept of a run on fresh pairs. -> dict"""
    base = result["summary"]["base"]
    kept = {"pass@1": round(result["summary"]["trained"]["pass@1"], 5)}
    for name, metric in CURVES.items():
        values = [value for value in result[f"eval/{metric}"] if value is not None]
        start = base[metric] if name != "greedy" else 0
        kept[f"{name}, curve"] = [round(value - start, 5) for value in [base[metric], *values]]
        kept[name] = kept[f"{name}, curve"][-1]
    kept["best greedy"] = max(kept["greedy, curve"])
    kept["lost"] = -kept["chosen"]
    kept["fallen more"] = round(kept["best greedy"] - kept["greedy"] - 0.05, 5)
    return kept


def flip(pairs, share, seed):
    """Exchange chosen and rejected of about this share of the pairs. -> list"""
    rng = random.Random(seed)
    flipped = []
    for pair in pairs:
        if rng.random() < share:
            pair = pair | {"chosen": pair["rejected"], "rejected": pair["chosen"]}
        flipped.append(pair)
    return flipped


def with_flips(seeds):
    """Train on pairs as they were, and with each loss on flipped ones. -> dict of lists"""
    found = {name: [] for name in ["DPO, no flips", *LOSSES]}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "pairs")
        run("dpo.py", folder, *PAIRS, quiet=True)
        for seed in seeds:
            variants = {}
            for name in found:
                share = 0 if name == "DPO, no flips" else FLIPS
                pairs = flip(read_log(folder, "pairs"), share, seed)
                path = Path(work, f"{share}-{seed}.jsonl")
                path.write_text("\n".join(json.dumps(pair) for pair in pairs))
                variants[name] = [*FIXED, "--pairs", path, *LOSSES.get(name, [])]
            for name, [result] in run_all(variants, [seed]).items():
                found[name].append({"pass@1": round(result["summary"]["trained"]["pass@1"], 5)})
    return found


def tables(found):
    quantities = ["pass@1", "best greedy", "greedy", "chosen", "rejected"]
    rows = []
    for name in LEARNING:
        cells = [mean_and_spread(by_seed(found, name, quantity)) for quantity in quantities]
        rows.append([name, *cells])
    flipped = []
    for name in ["DPO, no flips", *LOSSES]:
        flipped.append([name, mean_and_spread(by_seed(found, name, "pass@1"))])
    return [(["fresh pairs", *quantities], rows),
            ([f"{FLIPS:.0%} of the pairs flipped", "pass@1"], flipped)]


def furthest(one, other):
    """The largest distance between two lists of numbers. -> float"""
    return max(abs(value - wanted) for value, wanted in zip(one, other))


def by_seed(found, name, quantity):
    return [run[quantity] for run in found["runs"][name]]


def claims(found):
    expected = found["expected"]
    robust = furthest(expected["robust DPO"], expected["DPO, no flips"])
    plain = furthest(expected["DPO"], expected["DPO, no flips"])
    claims = [Claim("averaged over flips, robust DPO has the loss of clean pairs, and DPO has not",
                    f"{robust:.5f} and {plain:.2f} apart at most",
                    SHOWN if robust < 1e-4 < plain else NOT_SHOWN)]
    for text, name, other, quantity in CLAIMS:
        differences = by_seed(found, name, quantity)
        if other:
            differences = minus(differences, by_seed(found, other, quantity))
        claims.append(compared(text, differences))
    return claims


def note(found):
    return f"Held-out problems, all different: {found['problems']}"


def panels(found):
    def losses(axis):
        for name, values in found["expected"].items():
            axis.plot(MARGINS, values, ":" if name == "robust DPO" else "-", label=name)
        axis.set(title="30% flips: mean loss of a pair", xlabel="margin M, nats", ylabel="loss")
        axis.legend(frameon=False, fontsize=8)

    def curves(quantity, title, label):
        def fill(axis):
            for number, name in enumerate(LEARNING):
                for seed, result in enumerate(found["runs"][name]):
                    values = result[f"{quantity}, curve"]
                    axis.plot(range(0, 10 * len(values), 10), values, color=f"C{number}",
                              label=name if seed == 0 else None)
            axis.set(title=title, xlabel="step", ylabel=label)
            axis.legend(frameon=False, fontsize=8)
        return fill
    return [losses,
            curves("chosen", "chosen answers, held out", "log-probability less the base's, nats"),
            curves("greedy", "a line for each seed", "greedy accuracy")]
