"""Seeds: what luck alone does to a comparison.

Claim. The averages of five and five other seeds of one and the same setting can look like two
methods (Henderson and others, 1709.06560, figure 5), so one seed of each ranks nothing.

Prediction. The settings differ little from GRPO to GSPO, so that one seed of each ranks them
otherwise than ten do in at least one of five pairs.

Method. Ten seeds of grpo.py and ten of gspo.py, all from one base, 20 steps each. Then all ways to
split the ten of GRPO into halves, and all pairs of one seed (of three seeds) of each method.
"""
import itertools
import statistics

from lab.entry import NOT_SHOWN, SHOWN, Claim, mean_and_spread, run_all

SEEDS = list(range(10))
STEPS = 20
VARIANTS = {script: [script, "--max_steps", STEPS, "--stop_at", 2]
            for script in ("grpo.py", "gspo.py")}


def measure(seeds):
    results = run_all(VARIANTS, seeds, ["accuracy"])
    found = {}
    for name, runs in results.items():
        trained = [result["summary"]["trained"] for result in runs]
        found[name] = [scores["pass@1"] for scores in trained]
    accuracy = [result["accuracy"] for result in results["grpo.py"]]
    return {"pass@1": found, "accuracy": accuracy, "problems": trained[0]["problems"]}


def half_differences(values):
    """How far apart the means of two halves are, for each way to split them. -> list"""
    size = len(values) // 2
    differences = []
    for half in itertools.combinations(range(len(values)), size):
        if 0 in half:                                   # each split once
            others = [value for i, value in enumerate(values) if i not in half]
            mean = statistics.mean(values[i] for i in half)
            differences.append(abs(mean - statistics.mean(others)))
    return differences


def wrong_ranks(one, other, size):
    """How often `size` seeds of each rank two methods otherwise than all seeds do. -> float"""
    sign = statistics.mean(one) > statistics.mean(other)
    verdicts = []
    for some in itertools.combinations(one, size):
        for others in itertools.combinations(other, size):
            is_more = statistics.mean(some) > statistics.mean(others)
            verdicts.append(is_more != sign)
    return statistics.mean(verdicts)


def largest_and_difference(found):
    """How far apart halves of GRPO's seeds are at most, and the means of the two methods."""
    grpo, gspo = found["pass@1"].values()
    return max(half_differences(grpo)), abs(statistics.mean(grpo) - statistics.mean(gspo))


def tables(found):
    grpo, gspo = found["pass@1"].values()
    rows = []
    for name, values in found["pass@1"].items():
        rows.append([name, mean_and_spread(values), f"{statistics.stdev(values):.4f}"])
    methods = ([f"pass@1 after {STEPS} steps", "mean, least and most", "standard deviation"], rows)

    median = statistics.median(half_differences(grpo))
    largest, difference = largest_and_difference(found)
    rows = [["halves of GRPO's seeds, median difference", f"{median:.4f}"],
            ["halves of GRPO's seeds, largest difference", f"{largest:.4f}"],
            ["GRPO and GSPO, difference of the means", f"{difference:.4f}"]]
    for size in (1, 2, 3):
        share = wrong_ranks(grpo, gspo, size)
        rows.append([f"ranked otherwise by {size} of each", f"{share:.3f}"])
    return [methods, (["what luck does", "found"], rows)]


def claims(found):
    largest, difference = largest_and_difference(found)
    share = wrong_ranks(*found["pass@1"].values(), 1)
    return [
        Claim("halves of the seeds of one setting differ as much as two methods",
              f"{largest:.4f}, the methods {difference:.4f}",
              SHOWN if largest >= difference else NOT_SHOWN),
        Claim("one seed of each ranks two methods otherwise than ten, at least once in five times",
              f"{share:.3f}", SHOWN if share >= 0.2 else NOT_SHOWN)]


def note(found):
    return f"Held-out problems, all different: {found['problems']}; {STEPS} steps"


def panels(found):
    def curves(axis):
        for values in found["accuracy"]:
            axis.plot(range(1, 1 + len(values)), values, color="C0", alpha=0.5, linewidth=1)
        axis.set(title="GRPO, ten seeds", xlabel="step", ylabel="accuracy of the samples")

    def points(axis):
        for number, values in enumerate(found["pass@1"].values()):
            axis.plot(values, [number] * len(values), "o", alpha=0.5)
            axis.plot(statistics.mean(values), number, "k|", markersize=20)
        axis.set_yticks([0, 1], found["pass@1"])
        axis.set(title="a point for each seed", xlabel="pass@1", ylim=(-0.5, 1.5))
    return [curves, points]
