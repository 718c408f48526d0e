"""Rates: which findings survive if each side gets a learning rate of its own? Three seeds choose
the rate, and seven others judge the method at that rate."""
import numpy

from lab.bench import UNSCORED, claims_of, module
from lab.docs import table
from lab.draw import BLUE, RED, curves
from lab.experiment import Experiment, ratio, steps_to_level
from lab.verdict import OURS, Claim

RATES = ("2.5e-4", "5e-4", "1e-3")              # half the default, the default, twice the default
TUNING, HELD_OUT = slice(0, 3), slice(3, None)  # places in the list of seeds
GAIN = 0.02                                     # smallest difference of a pass@1 that matters
BEST = "(at the best rate of each)"
SCORED = "--eval_steps 1000 --num_eval_problems 256 --num_eval_samples 4"
FRESH = f"--max_steps 20 {SCORED}"
REUSED = f"--num_prompts 16 --num_iterations 4 --max_steps 16 {SCORED}"
METHODS = {"GRPO": f"grpo.py {FRESH}",
           "GSPO, 3e-4 / 4e-4": f"gspo.py --epsilon 3e-4 --epsilon_high 4e-4 {FRESH}",
           "GSPO, 3e-2 / 4e-2": f"gspo.py --epsilon 3e-2 --epsilon_high 4e-2 {FRESH}",
           "clip, mean of answers": f"grpo.py {REUSED}",
           "clip, mean over tokens": f"grpo.py --loss_type dapo {REUSED}",
           "SAPO": f"grpo.py --loss_type sapo {REUSED}",
           "CISPO": f"grpo.py --loss_type cispo {REUSED}"}
CLIPS = {"SAPO": "clip, mean of answers", "CISPO": "clip, mean over tokens"}  # equal averages
SEEDS = range(20, 30)
# The sides of claims that other experiments judged at one shared rate: the command, and the rates
PASSES = f"grpo.py --num_prompts 16 --num_generations 8 {UNSCORED} --max_steps"
LAG = f"examples/lag.py --num_prompts 12 {UNSCORED} --sampler_lag"
PPO = ("ppo.py --reward model --max_steps 30 --eval_steps 1000 --num_eval_problems 256 "
       "--num_eval_samples 4")
DPO = "dpo.py --max_steps 40 --eval_steps 1000 --num_eval_problems 256 --num_eval_samples 2"
FEW = f"grpo.py --num_prompts 4 --num_generations 8 --max_steps 48 --num_iterations 8 {SCORED}"
MANY = f"grpo.py --num_prompts 16 --num_generations 8 --max_steps 6 --num_iterations 32 {SCORED}"
STALE = ("examples/lag.py --sampler_lag 8 --num_prompts 12 --max_steps 28 --num_iterations 4 "
         f"{SCORED}")
NO_BOUND = "--epsilon 1e9 --epsilon_high 1e9"
SMALLER = ("3.125e-5", "6.25e-5", "1.25e-4", "2.5e-4")
SIDES = {"clip, 8 passes": (f"{PASSES} 12 --num_iterations 8",
                            ("6.25e-5", "1.25e-4", "2.5e-4", "5e-4", "1e-3")),
         "no bound, 8 passes": (f"{PASSES} 12 --num_iterations 8 {NO_BOUND}",
                                ("6.25e-5", "1.25e-4", "2.5e-4", "5e-4")),
         "1 pass": (f"{PASSES} 16", ("5e-4", "1e-3", "2e-3", "4e-3")),
         "2 passes": (f"{PASSES} 16 --num_iterations 2", ("5e-4", "1e-3", "2e-3")),
         "lag 0": (f"{LAG} 0 --max_steps 20", ("2.5e-4", "5e-4", "1e-3")),
         "lag 1": (f"{LAG} 1 --max_steps 21", ("2.5e-4", "5e-4", "1e-3")),
         "lag 8": (f"{LAG} 8 --max_steps 28", ("1.25e-4", "2.5e-4", "5e-4", "1e-3")),
         "lag 8, truncate": (f"{LAG} 8 --max_steps 28 --importance_sampling_correction truncate",
                             ("2.5e-4", "5e-4", "1e-3")),
         "PPO": (PPO, ("3.125e-5", "6.25e-5", "1.25e-4", "2.5e-4", "5e-4")),
         "PPO, beta 0.1": (f"{PPO} --beta 0.1", ("1.25e-4", "2.5e-4", "5e-4", "1e-3")),
         "DPO, offline": (DPO, ("2.5e-5", "5e-5", "1e-4", "2e-4")),
         "DPO, online": (f"{DPO} --online", ("5e-5", "1e-4", "2e-4", "4e-4", "8e-4")),
         "clip, few samples": (FEW, SMALLER),
         "no bound, few samples": (f"{FEW} {NO_BOUND}", SMALLER),
         "clip, 32 passes": (MANY, SMALLER),
         "no bound, 32 passes": (f"{MANY} {NO_BOUND}", ("1.5625e-5", *SMALLER)),
         "clip, stale": (STALE, SMALLER[1:]),
         "no bound, stale": (f"{STALE} {NO_BOUND}", ("1.5625e-5", *SMALLER))}
CASES = {f"{side}, {rate}": f"{command} --learning_rate {rate}"
         for side, (command, rates) in SIDES.items() for rate in rates}
# The cases at the best rates, which run on the other seeds
JUDGED = ("clip, 8 passes, 1.25e-4", "no bound, 8 passes, 1.25e-4", "1 pass, 2e-3",
          "clip, 8 passes, 5e-4", "2 passes, 1e-3", "lag 0, 5e-4", "lag 1, 5e-4", "lag 8, 2.5e-4",
          "lag 8, truncate, 5e-4", "PPO, 6.25e-5", "PPO, beta 0.1, 2.5e-4",
          "DPO, offline, 5e-5", "DPO, online, 4e-4", "clip, few samples, 6.25e-5",
          "no bound, few samples, 6.25e-5", "clip, 32 passes, 6.25e-5",
          "no bound, 32 passes, 3.125e-5", "clip, stale, 1.25e-4", "no bound, stale, 3.125e-5")
END, BATCHES = "accuracy at the end", "batches to an accuracy of 0.7 (inf: never)"
PASS = "pass@1"
# A claim of an experiment -> its two sides, what they are compared by, and the finding
AGAIN = {
    ("reuse", "with eight passes, accuracy ends higher with the clip than without a bound"):
        ("clip, 8 passes", "no bound, 8 passes", END, "At the best learning rate of each, eight "
         "passes end with an accuracy of {:.2f} with a clip, and {:.2f} without one"),
    ("reuse", "eight passes need fewer samples than one"):
        ("1 pass", "clip, 8 passes", BATCHES, ""),
    ("staleness", "samples that are 8 batches old (a lag of 8) cost accuracy"):
        ("lag 0", "lag 8", END, "At the best learning rate of each, the accuracy ends at {:.2f} "
         "with fresh samples, and at {:.2f} with samples that are 8 batches old"),
    ("staleness", "with a lag of 8, weighting the tokens (truncate) gives a higher accuracy than "
     "no correction"): ("lag 8, truncate", "lag 8", END, ""),
    ("offline", "PPO ends with a higher pass@1 if the KL is penalized"):
        ("PPO, beta 0.1", "PPO", PASS, "From the same pairs, PPO gets a pass@1 of {:.2f} with a "
         "KL penalty, and {:.2f} without one, each at its best learning rate"),
    ("reuse", "two passes need fewer samples than one"): ("1 pass", "2 passes", BATCHES, ""),
    ("staleness", "without a correction, a lag of 1 costs no accuracy"):
        ("lag 1", "lag 0", END, ""),
    ("offline", "online DPO ends with a higher pass@1 than offline DPO"):
        ("DPO, online", "DPO, offline", PASS, ""),
    ("reuse", "with 32 outputs a batch and eight passes, pass@1 ends higher with the clip"):
        ("clip, few samples", "no bound, few samples", PASS, ""),
    ("reuse", "with 32 passes, pass@1 ends higher with the clip"):
        ("clip, 32 passes", "no bound, 32 passes", PASS, ""),
    ("reuse", "with samples that are 8 batches old and four passes, pass@1 ends higher with the "
     "clip"): ("clip, stale", "no bound, stale", PASS, "")}
EXPERIMENT = Experiment(__file__, seeds=SEEDS, rate="")
EXPERIMENT.runs("runs", {f"{method}, {rate}": f"{command} --learning_rate {rate}"
                         for method, command in METHODS.items() for rate in RATES},
                ["accuracy", "max_log_ratio"], ["pass@1"])
EXPERIMENT.runs("tuning", CASES, ["accuracy"], ["pass@1"], SEEDS[TUNING])
EXPERIMENT.runs("judging", {case: CASES[case] for case in JUDGED}, ["accuracy"], ["pass@1"],
                SEEDS[HELD_OUT])


def score(columns, what, name):
    """Compute what the claim of an experiment compares. -> (S,)"""
    if what == END:
        return columns["accuracy"][:, -module(name).LAST:].mean(axis=1)
    if what == BATCHES:
        return steps_to_level(columns["accuracy"], module(name).LEVEL, module(name).WINDOW)
    return columns[what]


def row(side, what, tried, rate, values):
    """Write a row of the table. tried: the rates, from the lowest to the highest -> list"""
    lowest, *_, highest = tried
    return [side, what, f"{lowest} to {highest}", rate,
            f"{values.mean():.3f} ({values.min():.3f} to {values.max():.3f})"]


def again(tuning, judging):
    """Judge each claim of AGAIN at the best rate of each side. Yields the claim, rows of both
    tables, and the values of both sides"""
    for (name, text), (*sides, what, said) in AGAIN.items():
        claims = claims_of(name)
        old = next((claim for claim in claims if claim.text == text), None)
        values, ends, rows = [], [], []
        for side in sides:
            tried = {rate: score(tuning[f"{side}, {rate}"], what, name).mean()
                     for rate in SIDES[side][1]}
            best = (min if what == BATCHES else max)(tried, key=tried.get)
            columns = judging[f"{side}, {best}"]
            values.append(score(columns, what, name))
            ends.append(columns["accuracy"].shape[1])
            rows.append(row(side, what, tried, best, values[-1]))
        effect = {"values": tuple(values)}
        if what == BATCHES:
            effect = ratio(*values, *ends, smallest=0)
        source, least = (old.source, old.at_least) if old else ("PPO", GAIN)
        claim = Claim(f"{text} {BEST}", source, at_least=least,
                      said=said.format(*(one.mean() for one in values)), **effect)
        yield claim, old and [text, ", ".join(old.cells()[1:3]), f"**{claim.verdict}**"], rows


def page(runs, tuning, judging):
    rows = []
    score_of, distance = {}, {}
    for method in METHODS:
        tried = {rate: runs[f"{method}, {rate}"]["pass@1"][TUNING].mean() for rate in RATES}
        rate = max(tried, key=tried.get)
        columns = {name: values[HELD_OUT] for name, values in runs[f"{method}, {rate}"].items()}
        score_of[method] = columns["pass@1"]
        distance[method] = columns["max_log_ratio"].mean(axis=1)
        rows.append(row(method, "pass@1", tried, rate, score_of[method]))
    judged = list(again(tuning, judging))
    for claim, *_ in judged:
        yield claim
    grpo, gspo = score_of["GRPO"], score_of["GSPO, 3e-4 / 4e-4"]
    yield Claim(f"with its paper's clip range, GSPO ends with a higher pass@1 than GRPO {BEST}",
                "GSPO", (gspo, grpo), at_least=GAIN,
                said="With the best of three learning rates for each, GRPO ends with a "
                f"pass@1 of {grpo.mean():.3f}, and GSPO (with its paper's clip range) with "
                f"{gspo.mean():.3f}")
    yield Claim(f"with gspo.py's clip range, GSPO ends with a higher pass@1 than GRPO {BEST}",
                "GSPO", (score_of["GSPO, 3e-2 / 4e-2"], grpo), at_least=GAIN)
    for method, clip in CLIPS.items():
        ratios = distance[method] / distance[clip]
        yield Claim(f"{method} lets log pi move farther in a batch than the clip does {BEST}",
                    OURS, ratios, at_least=1.2, times=True,
                    said=f"With tuned learning rates, {method} lets log pi move "
                    f"{numpy.exp(numpy.log(ratios).mean()):.1f} times as far in a batch as the "
                    "clip does")
    clip, no_bound = list(SIDES)[:2]
    lines = {side: numpy.stack([score(tuning[f"{side}, {rate}"], END, "reuse")
                                for rate in SIDES[side][1]], axis=1) for side in (clip, no_bound)}
    yield curves(lines, {side: list(map(float, SIDES[side][1])) for side in lines},
                 given={clip: BLUE, no_bound: RED}, xscale="log", xlabel="learning rate",
                 ylabel="accuracy at the end; faint: tuning seeds")
    yield table(["claim of another experiment", "at the shared rate", "at the best rates"],
                [verdicts for _, verdicts, _ in judged if verdicts])
    found = {tuple(one[:2]): one for _, _, sides in judged for one in sides}
    rows = [*found.values(), *rows]
    for measure in dict.fromkeys(what for _, what, *_ in rows):
        yield table([f"side, judged by {measure}", "rates tried", "best rate", "other seeds at it"],
                    [[side, *cells] for side, what, *cells in rows if what == measure])
