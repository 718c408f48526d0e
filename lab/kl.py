"""KL: three estimators of one distance, as numbers and as losses.

Claim. k3 is an unbiased estimate of KL(pi || pi_ref) with less variance than k1, and k2 is biased,
but little (Schulman, 2020, http://joschu.net/blog/kl-approx.html). As a penalty in the loss, k3
times the ratio learns more stably than k3 (DeepSeek-V3.2, 2512.02556), and k1 does nothing (Tang
and Munos, 2506.09477).

Prediction. Near the base, k3 has the least variance. After 20 steps it has the most: answers
without thinking have become rare, and wherever one is still sampled, pi_ref / pi is large. In the
runs, k2, k3, k3_ratio and k1 in the reward hold the KL, k3 at the price of accuracy, because it
forbids that any answer of the base gets rare. k1 in the loss holds nothing. It is not nothing,
though, where GRPO divides by the length: there its gradient is that of the mean of 1 / |o|, which
asks for longer outputs, by too little to be seen in runs.

Method. Bias and variance: exact, over the vocabulary, at the tokens that grpo.py samples, on its
way from the base without a penalty. Then runs of grpo.py, and reinforce.py for k1 in the reward,
with beta 1 (in a pilot, 0.2 held next to nothing); all numbers are means of the last five batches.
What the gradients of these losses are is in the experiment KL gradients.
"""
import copy
import statistics

import torch
import torch.nn.functional as F

import grpo
from lab.entry import (
    Claim,
    compared,
    draw_curves,
    load_base,
    mean_and_spread,
    minus,
    run_all,
    sign_test,
)
from lab.training import training

SEEDS = [0, 1, 2]
STEPS = 20
WATCHED = [1, 2, 5, 10, 20]                 # steps after which the estimates are looked at
ESTIMATORS = ["k1", "k2", "k3"]
FLAGS = ["--num_prompts", 16, "--stop_at", 2, "--num_eval_problems", 1, "--num_eval_samples", 1,
         "--eval_steps", 1000]
METRICS = {"kl": "KL a token", "accuracy": "accuracy", "completions/mean_length": "tokens"}


def variants():
    """{name: script and flags}, with and without a penalty."""
    in_grpo = ["grpo.py", *FLAGS, "--max_steps", STEPS]
    in_reinforce = ["reinforce.py", "--baseline", "mean", *FLAGS, "--max_steps", STEPS]
    dr_grpo = [*in_grpo, "--loss_type", "dr_grpo"]
    four_passes = ["grpo.py", *FLAGS, "--max_steps", STEPS // 2, "--num_iterations", 4]
    named = {"none": in_grpo}
    for estimator in (*ESTIMATORS, "k3_ratio"):
        named[estimator] = [*in_grpo, "--beta", 1, "--kl_estimator", estimator]
    named["none, Dr. GRPO"] = dr_grpo
    named["k1, Dr. GRPO"] = [*dr_grpo, "--beta", 1, "--kl_estimator", "k1"]
    for estimator in ("k3", "k3_ratio"):
        penalty = ["--beta", 1, "--kl_estimator", estimator]
        named[f"{estimator}, four passes"] = four_passes + penalty
    named["none, REINFORCE"] = in_reinforce
    named["k1 in the reward"] = [*in_reinforce, "--beta", 1]
    return named


# ---- the estimates, at what a script samples -------------------------------------------------

@torch.no_grad()
def log_probs(policy, batch):
    """Of all tokens of the vocabulary, at each token of a batch. -> (B, T, V)"""
    states = grpo.completion_states(policy, batch.prompts, batch.tokens)
    return F.linear(states, policy.embed.weight).double().log_softmax(dim=-1)


def moments(log_p, log_ref, mask):
    """Mean and standard deviation of each estimate, exact over the vocabulary, averaged over the
    tokens of the mask; the mean of k1 is the KL. (B, T, V) twice, (B, T) -> {name: [mean, std]}"""
    found = {}
    for name in ESTIMATORS:
        estimate = grpo.kl(log_p, log_ref, name)
        mean = (log_p.exp() * estimate).sum(dim=-1)                             # (B, T)
        error = estimate - mean[..., None]
        variance = (log_p.exp() * error.square()).sum(dim=-1)
        mean = (mean * mask).sum() / mask.sum()
        deviation = ((variance * mask).sum() / mask.sum()).sqrt()
        found[name] = [round(mean.item(), 7), round(deviation.item(), 7)]
    return found


def watch(seed):
    """Learn as grpo.py does, without a penalty, and look at the estimates. -> list of moments"""
    cfg, task, policy = load_base(grpo, *FLAGS, "--seed", seed)
    reference = copy.deepcopy(policy)
    steps = training(grpo, cfg, task, policy)
    found = []
    for step in range(STEPS + 1):
        if step in WATCHED:
            batch = grpo.sample_batch(policy, task, cfg, step)      # the one it learns from next
            log_p = log_probs(policy, batch)
            found.append(moments(log_p, log_probs(reference, batch), batch.mask))
        next(steps)
    return found


def measure(seeds):
    watched = [watch(seed) for seed in seeds]
    runs = {}
    for name, results in run_all(variants(), seeds, METRICS).items():
        runs[name] = {metric: [result[metric] for result in results] for metric in METRICS}
    return {"watched": watched, "runs": runs}


# ---- the page --------------------------------------------------------------------------------

def ends(found, name, metric):
    """The mean of the last five batches of each seed. -> list"""
    return [statistics.mean(values[-5:]) for values in found["runs"][name][metric]]


def at(found, step, name, which):
    """Mean (0) or standard deviation (1) of an estimate after so many steps, of each seed."""
    number = WATCHED.index(step)
    return [moments[number][name][which] for moments in found["watched"]]


def tables(found):
    rows = []
    for name in found["runs"]:
        values = [mean_and_spread(ends(found, name, metric)) for metric in METRICS]
        rows.append([name, *values])
    estimates = []
    for step in WATCHED:
        kl = statistics.mean(at(found, step, "k1", 0))
        k2 = statistics.mean(at(found, step, "k2", 0))
        deviations = [f"{statistics.mean(at(found, step, name, 1)):.4f}" for name in ESTIMATORS]
        estimates.append([step, f"{kl:.4f}", f"{k2:.4f}", *deviations])
    return [(["steps", "KL, mean of k1 and k3", "mean of k2",
              *[f"deviation of {name}" for name in ESTIMATORS]], estimates),
            (["penalty", *METRICS.values()], rows)]


def claims(found):
    listed = []
    for step in (WATCHED[0], WATCHED[-1]):
        k1, k3 = (at(found, step, name, 1) for name in ("k1", "k3"))
        listed.append(compared(f"k3 deviates less than k1, steps: {step}", minus(k1, k3), "+.4f"))
    kl, k2 = (at(found, STEPS, name, 0) for name in ("k1", "k2"))
    bias = [abs(b / a - 1) for a, b in zip(kl, k2)]
    listed.append(Claim("the bias of k2 is below a tenth of the KL", mean_and_spread(bias),
                        sign_test([0.1 - value for value in bias])))
    for name in ("k2", "k3", "k3_ratio", "k1 in the reward"):
        without = "none, REINFORCE" if name == "k1 in the reward" else "none"
        held = minus(ends(found, without, "kl"), ends(found, name, "kl"))
        listed.append(compared(f"{name} holds the KL below that without", held))
    for name, without in {"k1": "none", "k1, Dr. GRPO": "none, Dr. GRPO"}.items():
        base = ends(found, without, "kl")
        shares = [abs(a / b - 1) for a, b in zip(ends(found, name, "kl"), base)]
        listed.append(Claim(f"{name}: in the loss, it changes the KL by less than a fifth",
                            mean_and_spread(shares), sign_test([0.2 - x for x in shares])))
    for passes in ("", ", four passes"):
        one = ends(found, f"k3_ratio{passes}", "accuracy")
        other = ends(found, f"k3{passes}", "accuracy")
        listed.append(compared(f"k3_ratio is more accurate than k3{passes}", minus(one, other)))
    return listed


def note(found):
    return ("Problems, all different: 16 in each batch, 80 in the last five, with 8 samples each; "
            f"{STEPS} steps, with four passes {STEPS // 2}")


def panels(found):
    def deviations(axis):
        for name in ESTIMATORS:
            means = [statistics.mean(at(found, step, name, 1)) for step in WATCHED]
            axis.plot(WATCHED, means, "o-", label=name)
        axis.set(title="standard deviation of an estimate", xlabel="steps from the base",
                 ylabel="of a token, in nats", yscale="log", ylim=(1e-2, None))
        axis.legend(frameon=False)

    def curves(axis):
        runs = {name: found["runs"][name]["kl"] for name in ("none", *ESTIMATORS, "k3_ratio")}
        draw_curves(axis, runs, title="KL to the base, beta 1", ylabel="nats a token")

    def points(axis):
        for name in ("none", *ESTIMATORS, "k3_ratio", "none, REINFORCE", "k1 in the reward"):
            axis.plot(ends(found, name, "kl"), ends(found, name, "accuracy"), "o", label=name)
        axis.set(title="what the distance buys", xlabel="KL at the end, nats a token",
                 ylabel="accuracy at the end")
        axis.legend(frameon=False, fontsize=8)
    return [deviations, curves, points]
