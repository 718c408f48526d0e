"""Trust regions: how far an update goes, and what that is good for.

Claim. Updates that are bounded by KL(pi_old, pi) <= max_kl are a reliable way to improve a policy
(Schulman and others, TRPO, 1502.05477). A clip of the ratio does as well as a penalty on the KL
that adapts, or better; it learns as fast as TRPO from samples, and faster in seconds (Schulman and
others, PPO, 1707.06347). The bound is there because several passes over a batch go too far.

Prediction. TRPO stays below max_kl at every update, as its line search goes back until it does.
Clip and penalty are alike. TRPO learns more slowly per sample, as its one step of a batch is small
beside the eight of the others, and much more slowly per second, as each step takes ten products
with F. Without a bound the largest KL is several times that of the clip, and the reward is lower.

Method. ppo.py, for TRPO examples/trpo.py, with four passes (of TRPO's critic, too) over batches of
16 problems, 15 steps: with the clip of 0.2, with the penalty and TRPO at a KL of 0.01, and with a
clip of 1e9, which bounds nothing. The KL of an update is metrics.jsonl's policy_kl: TRPO's is exact
on its samples, that of the others is estimated from every eighth row. The seconds of a step are
those of a short run alone.
"""
import statistics

from lab.entry import (
    CONTRADICTED,
    SHOWN,
    Claim,
    compared,
    draw_curves,
    mean_and_spread,
    mean_curve,
    minus,
    run_all,
    seconds_a_step,
)

SEEDS = [0, 1, 2]
STEPS = 15
LEVEL = 0.8                                             # the reward that is timed
MAX_KL = 0.01
FORMS = {"mean KL": ".4f", "largest KL": ".4f", "steps to the level": ".1f",
         "seconds to the level": ".1f"}
EVALUATION = ["--num_eval_problems", 1, "--num_eval_samples", 1, "--eval_steps", 1000]
SAME = ["--num_iterations", 4, "--num_prompts", 16, "--max_steps", STEPS, "--stop_at", 2,
        *EVALUATION]
VARIANTS = {
    "clip": ["ppo.py", *SAME, "--trust_region", "clip"],
    "penalty": ["ppo.py", *SAME, "--trust_region", "penalty", "--target_kl", MAX_KL],
    "TRPO": ["examples/trpo.py", *SAME, "--max_kl", MAX_KL],
    "no bound": ["ppo.py", *SAME, "--epsilon", 1e9, "--epsilon_high", 1e9]}


def measure(seeds):
    results = run_all(VARIANTS, seeds, ["reward", "policy_kl"])
    found = {metric: {name: [result[metric] for result in runs] for name, runs in results.items()}
             for metric in ("reward", "policy_kl")}
    return found | {"seconds_a_step": seconds_a_step(VARIANTS, seeds[0])}


def steps_to(rewards, level):
    """After how many steps a batch has this reward; one more than there are if none has. -> int"""
    for step, reward in enumerate(rewards, start=1):
        if reward >= level:
            return step
    return len(rewards) + 1


def by_seed(found, name):
    """What is compared, a number for each seed. -> {word: list}"""
    rewards = found["reward"][name]
    kls = found["policy_kl"][name]
    steps = [steps_to(values, LEVEL) for values in rewards]
    return {"mean reward": [statistics.mean(values) for values in rewards],
            "reward of the last 5 steps": [statistics.mean(values[-5:]) for values in rewards],
            "mean KL": [statistics.mean(values) for values in kls],
            "largest KL": [max(values) for values in kls],
            "steps to the level": steps,
            "seconds to the level": [count * found["seconds_a_step"][name] for count in steps]}


def tables(found):
    heads = ["trust region", *by_seed(found, "clip"), "seconds a step"]
    rows = []
    for name in VARIANTS:
        cells = [mean_and_spread(values, FORMS.get(word, ".3f"))
                 for word, values in by_seed(found, name).items()]
        rows.append([name, *cells, f"{found['seconds_a_step'][name]:.2f}"])
    return [(heads, rows)]


def claims(found):
    clip, penalty, trpo, unbound = [by_seed(found, name) for name in VARIANTS]
    farthest = max(trpo["largest KL"])
    return [
        Claim(f"no update of TRPO has a KL above {MAX_KL}", f"at most {farthest:.5f}",
              SHOWN if farthest <= MAX_KL else CONTRADICTED),
        compared("the clip has a higher mean reward than the penalty",
                 minus(clip["mean reward"], penalty["mean reward"])),
        compared("the clip has a higher mean reward than TRPO, from as many samples",
                 minus(clip["mean reward"], trpo["mean reward"])),
        compared(f"TRPO takes more seconds to a reward of {LEVEL} than the clip",
                 minus(trpo["seconds to the level"], clip["seconds to the level"]), "+.1f"),
        compared("without a bound the largest KL is larger than with the clip",
                 minus(unbound["largest KL"], clip["largest KL"])),
        compared("without a bound the mean reward is lower than with the clip",
                 minus(clip["mean reward"], unbound["mean reward"]))]


def note(found):
    return (f"{16 * STEPS} problems a run, nearly all different; the level is a reward of {LEVEL}; "
            f"a run that never got there counts as {STEPS + 1} steps")


def panels(found):
    def rewards(axis):
        draw_curves(axis, found["reward"], ylabel="reward, mean of the seeds")

    def distances(axis):
        draw_curves(axis, found["policy_kl"], ylabel="KL of an update, mean of the seeds",
                    yscale="log")
        axis.axhline(MAX_KL, color="0.5", linestyle=":")

    def time(axis):
        for name, runs in found["reward"].items():
            seconds = [found["seconds_a_step"][name] * step for step in range(1, 1 + STEPS)]
            axis.plot(seconds, mean_curve(runs), label=name)
        axis.set(xlabel="seconds of training", ylabel="reward, mean of the seeds")
    return [rewards, distances, time]
