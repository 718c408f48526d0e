"""Name what is wrong in a run, with the part of docs/why.md that explains it.

  python -m report.check runs/grpo-arithmetic-s0        a run of ours
  python -m report.check output/checkpoint-50           a run of TRL, with its trainer_state.json

Prints nothing if it finds nothing. docs/why.md shows on which runs the limits were fixed and tried.
"""
import statistics
from pathlib import Path
from types import SimpleNamespace

from plumbing import read_config
from report import parser, start
from report.logs import loads, read_log

WINDOW = 5              # number of the first and of the last steps that are averaged
NOTHING = 1e-7          # a gradient or a KL below this is 0 but for rounding
FALL = 0.75             # the reward has collapsed if it falls below this part of what it was
SPIKE = 10.0            # a gradient spikes if it is this many times as long as the first ones
SURPRISE = 0.1          # largest difference between the samples' surprise and the entropy, relative
LOSS = 0.1              # held-out accuracy that a run may lose after its best evaluation


def read(path):
    """Read a run of ours, or of TRL. -> flags, records of steps and evaluations, samples"""
    state = Path(path, "trainer_state.json")
    if state.is_file():
        return SimpleNamespace(), loads(state.read_text("utf-8"))["log_history"], []
    flags = SimpleNamespace(**read_config(path)[1])
    return flags, read_log(path, "metrics"), read_log(path, "samples")


def warnings(metrics, cfg):
    """Yield a warning for each metric of a step that shows why learning cannot work."""
    # a teacher rewards each token, so it needs no group with signal
    has_no_signal = metrics.get("frac_reward_zero_std", 0) == 1 and "teacher_kl" not in metrics
    if has_no_signal and metrics.get("accuracy", 0) < 0.5:
        yield "no group has signal: raise --num_generations, or use a better base (#groups)"
    if metrics.get("completions/clipped_ratio", 0) > 0.5:
        yield "most completions are truncated: raise --max_completion_length (#groups)"
    if metrics.get("entropy", 1) < 0.005 and metrics.get("accuracy", 1) < 0.9:
        yield "entropy has collapsed: lower --learning_rate, or raise --entropy_coef (#rate)"
    if metrics.get("rewards/chosen", 0) < 0:
        yield "chosen answers become less likely, too: try a lower --learning_rate (#rate)"
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


def column(records, name):
    """List a metric of the records that have it. -> list of numbers"""
    return [one[name] for one in records if isinstance(one.get(name), (int, float))]


def mean(records, name):
    """Average a metric over the records that have it. -> float, 0 if none has it"""
    return statistics.fmean(column(records, name) or [0.0])


def trends(cfg, steps, records):
    """Yield what only several steps together show."""
    live = [one for one in steps[1:] if one.get("frac_reward_zero_std", 0) < 1]
    norms, ratios, kls = (column(live, name) for name in ("grad_norm", "max_log_ratio", "kl"))
    num_updates = getattr(cfg, "num_iterations", 1) * getattr(cfg, "num_mini_batches", 1)
    if norms and max(norms) < NOTHING or num_updates > 1 and ratios and max(ratios) == 0:
        yield "groups differ, but the policy gets no gradient (#no-gradient)"
    elif kls and max(map(abs, kls)) < NOTHING:
        yield "the KL stays 0: is the reference the policy itself? (#unused)"
    first, last = steps[:WINDOW], steps[-WINDOW:]
    before, after = mean(first, "reward"), mean(last, "reward")
    if after < min(FALL * before, before - 0.05):
        yield f"the reward falls from {before:.2g} to {after:.2g} (#rate)"
    usual = statistics.median(column(first, "grad_norm") or [0.0])
    spikes = [norm for norm in norms if norm > SPIKE * usual > 0]
    if 8 * len(spikes) > len(steps):
        yield f"grad_norm goes up from {usual:.2g} to {max(spikes):.2g} again and again (#rate)"
    if mean(last, "entropy") > 2 * mean(first, "entropy") > 0:
        yield f"the entropy grows to {mean(last, 'entropy'):.2g} (#rate)"
    surprise, entropy = mean(steps, "sampling/surprise"), mean(steps, "entropy")
    if surprise > 0 and abs(surprise - entropy) > SURPRISE * max(entropy, 0.05):
        yield f"the surprise is {surprise:.2g}, but the entropy is {entropy:.2g} (#temperature)"
    scores = column(records, "eval/greedy") or column(records, "eval_reward") or [0.0]
    noise = 2 * getattr(cfg, "num_eval_problems", 512) ** -0.5
    if after > before and scores[-1] < max(scores) - max(LOSS, noise):
        yield f"the reward rises, but held-out falls below {max(scores):.2g} (#held-out)"


def check(cfg, records, samples=()):
    """List what the steps of a run show, and the masks of its samples. -> list of texts"""
    steps = [one for one in records if "reward" in one]
    found = [*trends(cfg, steps, records)]
    for part in (steps[:WINDOW], steps[-WINDOW:]):
        found += warnings({name: mean(part, name) for one in part for name in one}, cfg)
    completions = [one for group in samples for one in group["completions"] if one["tokens"]]
    if any(one["tokens"][-1] == "<|eos|>" and one["mask"][-1] == 0 for one in completions):
        found.append("the token that ends a completion is not learned (#rounding)")
    if mean(steps, "tools/call_frequency") > 0 and all(all(one["mask"]) for one in completions):
        found.append("what a tool says is learned, too (#turns)")
    return list(dict.fromkeys(found))


def main():
    words = parser(__doc__)
    words.add_argument("run")
    for text in check(*read(words.parse_args().run)):
        print(text.replace("(#", "(docs/why.md#"))


if __name__ == "__main__":
    start(main)
