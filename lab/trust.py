"""Trust regions: how far an update goes, and what that is good for

Claim. Updates that are bounded by KL(pi_old, pi) <= max_kl are a reliable way to improve a policy
(Schulman and others, TRPO, 1502.05477). A clip of the ratio does as well as a penalty on the KL
that adapts, or better; it learns as fast as TRPO from samples, and faster in seconds (Schulman and
others, PPO, 1707.06347). The bound is there because several passes over a batch go too far.

Prediction. TRPO stays below max_kl at every update, as its line search goes back until it does.
Clip and penalty are alike. TRPO learns more slowly per sample, as its one step of a batch is small
beside the eight of the others, and much more slowly per second, as each step takes ten products
with F. Without a bound the largest KL is several times that of the clip, and the reward is lower.

Method. ppo.py with four passes (of TRPO's critic, too) over batches of 16 problems, 15 steps, with
the clip of 0.2, with the penalty and TRPO at a KL of 0.01, and with a clip of 1e9, which bounds
nothing. The KL of an update is metrics.jsonl's policy_kl: TRPO's is exact on its samples, that of
the others is estimated from every eighth row. The seconds of a step are the median of its run.

Outcome. Right: TRPO stays below max_kl; its reward is lower in the mean of as many samples (to 0.8
it takes 5.6 steps, the clip 5.2), and it is slower in seconds. Undecided with five seeds: whether
clip and penalty are alike, and what no bound at all costs.
"""
import numpy

from lab.draw import BLUE, GREEN, GREY, RED, curves, dots
from lab.experiment import Experiment, numbers
from lab.verdict import OURS, Claim

PPO = "[PPO](https://arxiv.org/abs/1707.06347)"
TRPO = "[TRPO](https://arxiv.org/abs/1502.05477)"
STEPS = 15
LEVEL = 0.8                                             # the reward that is timed
MAX_KL = 0.01
FLAGS = (f"--num_iterations 4 --num_prompts 16 --max_steps {STEPS} --stop_at 2 "
         "--num_eval_problems 1 --num_eval_samples 1 --eval_steps 1000")
RUNS = {"clip": f"ppo.py {FLAGS}",
        "penalty": f"ppo.py {FLAGS} --trust_region penalty --target_kl {MAX_KL}",
        "TRPO": f"examples/trpo.py {FLAGS} --max_kl {MAX_KL}",
        "no bound": f"ppo.py {FLAGS} --epsilon 1e9 --epsilon_high 1e9"}
COLOURS = {"clip": RED, "penalty": BLUE, "TRPO": GREEN, "no bound": GREY}
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5))
EXPERIMENT.runs("runs", RUNS, ["reward", "policy_kl", "step_time"])


def steps_to(rewards):
    """After how many steps a batch has the reward LEVEL; one more than there are if none has."""
    return next((step for step, reward in enumerate(rewards, 1) if reward >= LEVEL), STEPS + 1)


def page(runs):
    reward = {name: found["reward"].mean(axis=1) for name, found in runs.items()}
    farthest = {name: found["policy_kl"].max(axis=1) for name, found in runs.items()}
    a_step = {name: numpy.median(found["step_time"], axis=1) for name, found in runs.items()}
    steps = {name: numpy.apply_along_axis(steps_to, 1, found["reward"])
             for name, found in runs.items()}
    seconds = {name: steps[name] * a_step[name] for name in RUNS}

    logs = {name: numpy.log(values / MAX_KL) for name, values in farthest.items()}
    times = {name: numpy.exp(values.mean()) for name, values in logs.items()}
    samples = Claim("from as many samples, the clip has the same mean reward as TRPO", PPO,
                    reward["clip"] - reward["TRPO"], at_least=-0.02, at_most=0.02, unit="reward",
                    contradicted=f"From as many samples, {STEPS} steps, PPO's clip has a mean "
                    f"reward of {reward['clip'].mean():.2f}, TRPO of {reward['TRPO'].mean():.2f}")
    bound = Claim(f"no update of TRPO has a KL above {MAX_KL}", TRPO, runs["TRPO"]["policy_kl"],
                  at_most=MAX_KL, exact=True, unit="nats", shown="No update of TRPO exceeds its KL "
                  f"bound of {MAX_KL} nats; the farthest with PPO's clip is {times['clip']:.0f} "
                  f"times that, without any bound {times['no bound']:.0f} times")
    yield from (samples, bound)
    yield Claim("the clip has as high a mean reward as the penalty, or higher", PPO,
                reward["clip"] - reward["penalty"], at_least=-0.02, unit="reward")
    yield Claim("clip and penalty have the same mean reward", OURS,
                reward["clip"] - reward["penalty"], at_least=-0.02, at_most=0.02, unit="reward")
    yield Claim(f"TRPO takes more seconds to a reward of {LEVEL} than the clip", PPO,
                seconds["TRPO"] / seconds["clip"], at_least=1.2, times=True)
    yield Claim("without any bound the largest KL is larger than with the clip", PPO,
                farthest["no bound"] / farthest["clip"], at_least=1.2, times=True)
    yield Claim("without any bound the mean reward is lower than with the clip", PPO,
                reward["no bound"] - reward["clip"], at_most=-0.02, unit="reward")

    yield curves({name: found["reward"] for name, found in runs.items()}, samples.finding,
                 given=COLOURS, ylabel="reward")
    yield dots(farthest, bound.finding, form=".3f", given=COLOURS, xscale="log",
               level=(MAX_KL, f"TRPO's bound, {MAX_KL}"),
               xlabel="the largest KL of an update, nats; a dot for each seed")
    rows = {name: {"reward": reward[name], "kl": found["policy_kl"].mean(axis=1),
                   "steps": steps[name], "a step": a_step[name]} for name, found in runs.items()}
    yield numbers(rows, {"reward": "mean reward", "kl": "mean KL of an update",
                         "steps": f"steps to {LEVEL}", "a step": "seconds a step"},
                  ".2g", by="trust region")
