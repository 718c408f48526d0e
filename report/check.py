"""Name what is wrong in a run, with the part of docs/why.md that explains it.

  python -m report.check runs/grpo-arithmetic-s0        a run of ours
  python -m report.check output                         a run of TRL, with its trainer_state.json
  python -m report.check log.jsonl                      of verl's file logger, or other JSON lines
  python -m report.check log.csv                        as W&B exports it; or TensorBoard's folder
  python -m report.check runs/a --fail-on any           ends with 1 if anything is found
  python -m report.check runs/a --fail-on groups,rate   if one of these is found

A correct run gets one line, which says what was looked at. docs/why.md shows on which runs the
limits were fixed and tried.
"""
import re
import statistics

from common import fail
from report import parser, start
from report.formats import read

WINDOW = 5              # number of the first and of the last steps that are averaged
NOTHING = 1e-7          # a gradient or a KL below this is 0 but for rounding
FALL = 0.25             # the reward has collapsed if it loses this part of what it was
FLAT = 20               # steps after which a reward should have risen
SURE = 5.0              # standard errors of a difference that noise does not explain
SPIKE = 10.0            # a gradient spikes if it is this many times as long as the first ones
SURPRISE = 0.1          # largest difference between the samples' surprise and the entropy, relative
LOSS = 0.1              # held-out accuracy that a run may lose after its best evaluation
PARTS = ("flat", "groups", "held-out", "no-gradient", "rate", "rounding", "stale", "temperature",
         "turns", "unused")             # of docs/why.md, to which a finding can send
LOOKED_AT = ("reward", "frac_reward_zero_std", "grad_norm", "entropy", "kl",
             "completions/clipped_ratio", "sampling/surprise",
             "sampling/sampling_logp_difference/mean", "eval/greedy", "eval_reward")


def warnings(metrics, cfg):
    """Yield a warning for each metric of a step that shows why learning cannot work."""
    # a teacher rewards each token, so it needs no group with signal
    has_no_signal = metrics.get("frac_reward_zero_std", 0) == 1 and "teacher_kl" not in metrics
    if has_no_signal and metrics.get("accuracy", 0) < 0.5:
        why = "all answers are wrong" if "accuracy" in metrics else "all its rewards are equal"
        yield (f"no group has signal, because {why}: raise --num_generations, or use a better base "
               "(#groups)")
    if metrics.get("completions/clipped_ratio", 0) > 0.5:
        yield "most completions are truncated: raise --max_completion_length (#groups)"
    if metrics.get("entropy", 1) < 0.005 and metrics.get("accuracy", 1) < 0.9:
        yield "entropy has collapsed: lower --learning_rate, or raise --entropy_coef (#rate)"
    is_corrected = (getattr(cfg, "importance_sampling_correction", "") != "none"
                    and "sampling/importance_sampling_ratio/mean" in metrics)
    is_old = getattr(cfg, "sampler_lag", 0) > 0         # older weights sample on purpose
    difference = metrics.get("sampling/sampling_logp_difference/mean", 0)
    rounding = 0.02 if hasattr(cfg, "num_prompts") else 0.1     # TRL may compute in bfloat16
    if is_corrected and difference > rounding and not is_old:
        yield (f"sampler and trainer differ by {difference:.2g} nats per token, more than rounding "
               "explains: does the sampler have the trainer's weights? (#rounding)")
    elif difference > 0.01 and not is_corrected:
        yield "sampler and trainer differ: try --importance_sampling_correction truncate (#stale)"
    elif metrics.get("sampling/sampling_logp_difference/max", 0) > 1e-3 and not is_corrected:
        yield "the first ratio is not 1: try --kernel torch (#rounding)"


# ---- what several steps show -----------------------------------------------------------------

def column(records, name):
    """List a metric of the records that have it. -> list of numbers"""
    return [one[name] for one in records if isinstance(one.get(name), (int, float))]


def mean(records, name):
    """Average a metric over the records that have it. -> float, 0 if none has it"""
    return statistics.fmean(column(records, name) or [0.0])


def error(values, n):
    """Estimate the standard error of the difference of two means of n steps, from how much each
    step differs from the one before, because a trend hardly changes that. -> float"""
    squares = [(b - a) ** 2 / 2 for a, b in zip(values, values[1:])]
    return (2 * statistics.fmean(squares or [0.0]) / n) ** 0.5


def size(steps):
    """Measure what counts as much for the rewards of a run, also for negative ones. -> float"""
    return max(abs(mean(steps, "reward")), mean(steps, "reward_std"))


def rise(steps, n=WINDOW):
    """Compare the mean reward of the first and the last n steps, or of both halves of a shorter
    run. -> first, last, standard error of the difference"""
    n = max(1, min(n, len(steps) // 2))
    first, last = (mean(part, "reward") for part in (steps[:n], steps[-n:]))
    return first, last, error(column(steps, "reward"), n)


def has_risen(steps):
    first, last, noise = rise(steps)
    return last - first > 2 * noise


def reward_trends(steps, has_gradient):
    """Yield what the rewards of all steps show: a fall, or no rise although groups differ."""
    n = min(WINDOW, max(1, len(steps) // 2))
    means = [(mean(steps[i:i + n], "reward"), i) for i in range(len(steps) - n + 1)]
    peak, place = max(means)
    last, noise = means[-1][0], error(column(steps, "reward"), n)
    if peak - last > max(FALL * size(steps[place:place + n]), SURE * noise):
        fall = f"from {peak:.2g} to {last:.2g}"
        if place < n:
            yield (f"the reward falls from the first steps on, {fall}: the grouping or the sign is "
                   "wrong, or --learning_rate is too high; compare your loss (#flat)")
        else:
            yield f"the reward falls {fall}: try a lower --learning_rate (#rate)"
        return
    first, last, noise = rise(steps, len(steps) // 3)
    has_groups = mean(steps, "frac_reward_zero_std") < 0.5 and mean(steps, "accuracy") < 0.8
    is_flat = last - first < max(2 * noise, 0.1 * size(steps))
    has_rewards = not {"teacher_kl", "rewards/margins"} & {name for one in steps for name in one}
    if len(steps) >= FLAT and has_groups and has_gradient and has_rewards and is_flat:
        yield ("groups differ and the gradient is not 0, but the reward does not rise "
               f"({first:.2g}, then {last:.2g}): the mask, the grouping or the sign is wrong, or "
               "the rate is too low; compare your loss (#flat)")


def trends(cfg, steps, records):
    """Yield what only several steps together show."""
    live = [one for one in steps[1:] if one.get("frac_reward_zero_std", 0) < 1]
    norms, ratios, kls = (column(live, name) for name in ("grad_norm", "max_log_ratio", "kl"))
    is_learning = has_risen(steps)
    num_updates = getattr(cfg, "num_iterations", 1) * getattr(cfg, "num_mini_batches", 1)
    is_constant = num_updates > 1 and ratios and max(ratios) == 0 and not is_learning
    if norms and max(norms) < NOTHING or is_constant:
        yield "groups differ, but the policy gets no gradient (#no-gradient)"
    elif kls and max(map(abs, kls)) < NOTHING:
        yield "the KL stays 0: is the reference the policy itself? (#unused)"
    else:
        yield from reward_trends(steps, has_gradient=bool(norms))
    usual = statistics.median(column(steps[:WINDOW], "grad_norm") or [0.0])
    spikes = [norm for norm in norms if norm > SPIKE * usual > 0]
    if 8 * len(spikes) > len(steps) and not is_learning:
        yield f"grad_norm goes up from {usual:.2g} to {max(spikes):.2g} again and again (#rate)"
    before, after = mean(steps[:WINDOW], "entropy"), mean(steps[-WINDOW:], "entropy")
    if after > 2 * before > 0 and not is_learning:
        yield f"the entropy grows from {before:.2g} to {after:.2g} (#rate)"
    both = [one for one in steps if {"sampling/surprise", "entropy"} <= one.keys()]
    surprise, entropy = mean(both, "sampling/surprise"), mean(both, "entropy")
    if surprise > 0 and abs(surprise - entropy) > SURPRISE * max(entropy, 0.05):
        yield (f"the surprise is {surprise:.2g}, but the entropy is {entropy:.2g}: samples come "
               "from another distribution (#temperature)")
    chosen = mean(steps[-WINDOW:], "rewards/chosen")
    first, last, noise = rise(steps)
    if chosen < 0 and "rewards/chosen" in steps[-1] and last < first - 2 * noise:
        yield ("chosen answers become less likely, and fewer are right: try a lower "
               "--learning_rate (#rate)")
    scores = column(records, "eval/greedy") or column(records, "eval_reward") or [0.0]
    floor = 2 * getattr(cfg, "num_eval_problems", 512) ** -0.5
    if is_learning and scores[-1] < max(scores) - max(LOSS, floor):
        yield (f"the reward rises, but held-out falls from {max(scores):.2g} to {scores[-1]:.2g} "
               "(#held-out)")


def check(cfg, records, samples=()):
    """List what the steps of a run show, and the masks of its samples. -> list of texts"""
    steps = [one for one in records if isinstance(one.get("reward"), (int, float))]
    found = [*trends(cfg, steps, records)] if steps else []
    for part in (steps[:WINDOW], steps[-WINDOW:]):
        metrics = {name: mean(part, name) for one in part for name in one}
        if has_risen(steps):
            metrics.setdefault("accuracy", 1.0)         # groups without signal are all right
        found += warnings(metrics, cfg)
    completions = [one for group in samples for one in group["completions"] if one["tokens"]]
    if any(one["tokens"][-1] == "<|eos|>" and one["mask"][-1] == 0 for one in completions):
        found.append("the token that ends a completion is not learned (#rounding)")
    if mean(steps, "tools/call_frequency") > 0 and all(all(one["mask"]) for one in completions):
        found.append("what a tool says is learned, too (#turns)")
    return list(dict.fromkeys(found))


def parts(found):
    """Name the parts of docs/why.md to which the texts of check send. -> set of str"""
    return {re.search(r"\(#([\w-]+)\)", text)[1] for text in found}


def summary(records):
    """Say what was looked at in a run without findings. -> str"""
    steps = column(records, "reward")
    known = [name for name in LOOKED_AT if column(records, name)]
    lacking = [name for name in LOOKED_AT[:7] if name not in known]
    text = f"steps: {len(steps)}; nothing found; looked at {', '.join(known)}"
    if lacking:
        text += f"; the log lacks {', '.join(lacking)}"
    return text


def main():
    words = parser(__doc__)
    words.add_argument("run")
    words.add_argument("--fail-on", metavar="NAMES", default="", help="any, or parts of why.md")
    args = words.parse_args()
    wanted = {*filter(None, args.fail_on.split(","))}
    if unknown := wanted - {"any", *PARTS}:
        fail(f"--fail-on {unknown.pop()}: has to be any, or some of {','.join(PARTS)}")
    cfg, records, samples = read(args.run)
    found = check(cfg, records, samples)
    for text in found or [summary(records)]:
        print(text.replace("(#", "(docs/why.md#"))
    named = parts(found)
    if "any" in wanted and named or named & wanted:
        raise SystemExit(1)


if __name__ == "__main__":
    start(main)
