"""Name what is wrong in a run, with the part of docs/why.md that explains it.

  python -m report.check runs/grpo-arithmetic-s0        a run of ours
  python -m report.check output                         of TRL or ms-swift, or TensorBoard's folder
  python -m report.check log.jsonl                      of verl's file logger, or other JSON lines
  python -m report.check log.csv --run NAME             a table of W&B, and one of its runs
  python -m report.check log.csv --map r_mean=reward gn=grad_norm       a log with other names
  python -m report.check runs/a --fail-on groups,rate   ends with 1 if these are found; or any

It prints what was read, what is wrong, causes first, whether the reward rises, and what was not
looked at.
"""
import re
import statistics
from typing import NamedTuple

from common import fail
from report import parser, start, trainers
from report.formats import NAMES, OTHERS, read, run_of

WINDOW = 5              # number of the first and of the last steps that are averaged
AROUND = 10             # steps on each side of a jump that are compared
FEW = 20                # with fewer steps, nobody can say that the reward does not rise
NOISE, SURE = 2.0, 5.0  # standard errors that noise explains; of the largest of many differences
FALL = 0.25             # the reward is lost if it loses this part of what it was
RISE = 0.1              # a rise of a reward between 0 and 1 that a run should show
HUGE = 1e100            # squares of larger numbers are infinite, too
SOLVED = 0.8            # from this mean on, a reward may stay, and groups be equal
SAMPLERS = {"sampler_logp": 0.1, "sampler_prob": 0.02, "sampler_kl": 0.05}      # due to rounding
WORDS = "the learning rate", "the length limit", "the group size", "the weight of the KL"
SETTINGS = {            # what a trainer calls these; others get the words
    "ours": ("--learning_rate", "--max_completion_length", "--num_generations", "--beta"),
    "TRL": ("learning_rate", "max_completion_length", "num_generations", "beta"),
    "verl": ("actor_rollout_ref.actor.optim.lr", "data.max_response_length",
             "actor_rollout_ref.rollout.n", "actor_rollout_ref.actor.kl_loss_coef")}


# ---- a run and its noise ---------------------------------------------------------------------

def column(records, name):
    """List the finite values of a metric in the records that have it. -> list of numbers"""
    return [one[name] for one in records
            if isinstance(one.get(name), (int, float)) and abs(one[name]) < HUGE]


def mean(values):
    return statistics.fmean(values or [0.0])


def error(values, n):
    """Estimate the standard error of the difference of two means of n steps, from how much each
    step differs from the one before, because a trend hardly changes that. -> float"""
    return (mean([(b - a) ** 2 for a, b in zip(values, values[1:])]) / n) ** 0.5


def jump(values):
    """Find where values fall most from one step to the next, beyond noise, and two constants
    describe them better than a line. -> place, mean before, mean after; or None"""
    found, noise = [], SURE * error(values, AROUND)
    for place in range(AROUND, len(values) - AROUND + 1):
        some = values[place - AROUND:place + AROUND]
        before, after = mean(some[:AROUND]), mean(some[AROUND:])
        if before - after > max(noise, FALL * abs(before)):
            slope, first = statistics.linear_regression(range(2 * AROUND), some)
            line = sum((x - first - slope * i) ** 2 for i, x in enumerate(some))
            two = sum((x - (before if i < AROUND else after)) ** 2 for i, x in enumerate(some))
            if line > 1.4 * two:
                found.append((before - after, place, before, after))
    return max(found)[1:] if found else None


class Trend:
    """How a quantity changes from the first third of its values to the last one."""

    def __init__(self, values):
        self.n = len(values)
        part = max(1, self.n // 3)
        self.first, self.last = mean(values[:part]), mean(values[-part:])
        self.rise, self.noise = self.last - self.first, error(values, part)
        self.rises, self.falls = (x > NOISE * self.noise for x in (self.rise, -self.rise))


class Table:
    """The quantities of a run, and what its rewards can decide."""

    def __init__(self, run):
        self.run, self.flags, self.found = run, run.flags, {}
        is_filtered = "filtered" in run.names or getattr(run.flags, "dynamic_sampling", 0) > 0
        self.goal = "reward" if "reward" in run.names else "order"      # what should rise
        if is_filtered and "accuracy" in run.names:
            self.goal = "accuracy"                  # of everything that was sampled
        self.steps = [one for one in run.records if self.goal in one] or run.records
        self.rewards = self[self.goal]
        self.trend = Trend(self.rewards)
        self.scores = {name: column(run.records, name) for name in run.sets}
        self.may_stay = is_filtered and self.goal == "reward" or "margins" in run.names or any(
            "teacher_kl" in one for one in self.steps)
        means = [mean(self.rewards[i:i + WINDOW])
                 for i in range(max(1, len(self.rewards) - WINDOW + 1))]
        self.peak, self.peak_place = max(means), means.index(max(means))
        is_unit = all(0 <= x <= 1 for x in self.rewards)        # enough: a rise to be expected
        self.enough = RISE * (1.0 if is_unit else max(map(abs, self.rewards)))
        now = self.trend
        self.stays = now.n >= FEW and not now.rises and (
            now.rise + NOISE * now.noise < self.enough)
        self.is_stuck = self.stays or now.falls
        self.course = self.what_rewards_do()

    def __getitem__(self, name):
        return column(self.steps, name)

    def __contains__(self, name):
        others = {"held-out": any(self.scores.values()), "samples": bool(self.run.samples)}
        return others.get(name) or bool(self[name])

    def first(self, name):
        return mean(self[name][:WINDOW])

    def last(self, name):
        return mean(self[name][-WINDOW:])

    def name(self, quantity):
        """What the log calls a quantity."""
        return " + ".join(self.run.names.get(quantity, [quantity]))

    def step(self, place):
        """The step of a place among the finite values of the goal. -> str"""
        known = [one for one in self.steps if column([one], self.goal)]
        return f"{known[place].get('step', place):g}"

    def is_solved(self, when, most=SOLVED):
        """when: self.first or self.last"""
        goal = "accuracy" if "accuracy" in self else self.goal
        return all(x <= 1 for x in self[goal]) and when(goal) >= most

    def no_signal(self, when):
        """The fraction of groups that give no gradient. -> float, None without evidence"""
        if "signal" in self and abs(when("signal")) < 1e-7:
            return 1.0
        return when("equal") if "equal" in self else 0.0 if self.run.trainer == "verl" else None

    @property
    def live(self):
        """The steps after the first one in which groups differ, as far as the log shows."""
        return [one for one in self.steps[1:]
                if one.get("equal", 0) < 1 and abs(one.get("signal", 1)) > 1e-7]

    def what_rewards_do(self):
        """-> "jumps", "falls", "stays", or "" if nothing is wrong"""
        learns = any(len(x) > 1 and max(x) - RISE / 2 <= x[-1] > x[0] + RISE
                     for x in self.scores.values())
        if learns and any(self.rewards[-WINDOW:]):      # the problems get harder
            return ""
        if found := jump(self.rewards):
            _, before, after = found
            return "" if self.last(self.goal) - after > FALL * (before - after) else "jumps"
        size = max(abs(self.peak), self.first("signal") * (self.run.trainer != "verl"))
        lost = self.peak - self.last(self.goal)
        if lost > max(FALL * size, SURE * error(self.rewards, WINDOW)):
            return "falls"
        is_moot = self.may_stay or self.is_solved(self.first)
        return "stays" if self.stays and not is_moot else ""


# ---- the rules: causes come before their consequences -----------------------------------------

class Rule(NamedTuple):
    look: callable          # (Table, limit) -> the number that shows it, and what to do; or None
    needs: list             # quantities without which it cannot look; of a|b, one is enough
    limit: float
    parts: list             # of docs/why.md, where the incidents are for which it was made; the
                            # text names one, if it is not the first


RULES = []


def rule(needs, limit, parts):
    return lambda look: RULES.append(
        Rule(look, needs.split(), limit, parts.split())) or look


@rule("", 0.2, "not-finite")
def not_finite(t, limit):
    """Training continues after nan or inf, and learns nothing more"""
    found = []
    for name in [*t.run.names, *t.scores]:
        known = [(i, one) for i, one in enumerate(t.run.records) if name in one]
        bad = [not abs(one[name]) < HUGE for _, one in known]
        if any(bad[len(bad) // 2:][-WINDOW:]) or sum(bad) > max(1, limit * len(bad)):
            place, first = known[bad.index(True)]
            found.append((place, f"{t.name(name)} is not finite in {sum(bad)} steps, first "
                          f"{first[name]:g} in step {first.get('step', place):g}", name))
    found = [one for one in found if one[2] not in ("accuracy", "explained")]
    if found:
        return f"{min(found)[1]}; look for a division by 0 or a logarithm of 0"


@rule("samples", 0, "rounding turns")
def masks(t, limit):
    """The mask of the samples is wrong"""
    rows = [one for group in t.run.samples for one in group["completions"]
            if one.get("tokens") and one.get("mask")]
    if any(one["tokens"][-1] == "<|eos|>" and one["mask"][-1] == 0 for one in rows):
        return "the token that ends a completion is not learned"
    if rows and mean(t["calls"]) > limit and all(all(one["mask"]) for one in rows):
        return "the policy also learns the text of its tools (#turns)"


@rule("sampler_logp|sampler_prob|sampler_kl", 0.01, "temperature rounding stale adapter")
def sampler_differs(t, limit):
    """Sampler and trainer compute different probabilities for the same tokens"""
    lag = getattr(t.flags, "sampler_lag", 0)
    is_corrected = getattr(t.flags, "importance_sampling_correction", "none") != "none"
    for name, most in SAMPLERS.items():
        first, last = t.first(name), t.last(name)
        most = limit if t.run.trainer == "ours" else most       # others may use bfloat16
        if max(first, last) > most and not (lag and is_corrected):
            why = ("do both have the same temperature, top_p and top_k (#temperature), and the "
                   "same tokens and precision (#rounding)?")
            if lag:
                why = "try --importance_sampling_correction truncate (#stale)"
            elif first < most:
                why = ("does the sampler get all new weights (#stale), in the same precision "
                       "(#rounding), and the adapter (#adapter)?")
            return f"{t.name(name)} is {first:.2g} at first and {last:.2g} at the end; {why}"


@rule("largest_logp", 0.001, "rounding")
def first_ratio(t, limit):
    """The text that is trained differs from the text that was sampled"""
    worst = max(t.first("largest_logp"), t.last("largest_logp"))
    if t.run.trainer == "ours" and not getattr(t.flags, "sampler_lag", 0) and worst > limit:
        return (f"a first ratio, which should be 1, is off by {worst:.2g} nats; if this is little, "
                "try --kernel torch")


@rule("surprise entropy", 0.1, "temperature")
def surprise(t, limit):
    """The samples come from a different distribution from the one that is trained"""
    both = [one for one in t.steps if {"surprise", "entropy"} <= one.keys()]
    a, b = column(both, "surprise"), column(both, "entropy")
    noise = error([x - y for x, y in zip(a, b)], 2 * len(both))
    if abs(mean(a) - mean(b)) > limit * max(mean(b), 0.05) + NOISE * noise:
        return f"the surprise is {mean(a):.2g}, but the entropy is {mean(b):.2g}"


@rule("clipped", 0.3, "rounding")
def clipped_at_once(t, limit):
    """Many ratios differ from 1 in the first steps, so the old log-probs are wrong"""
    if t.is_stuck and t.first("clipped") > limit:
        return f"{t.name('clipped')} is {t.first('clipped'):.2g} in the first steps"


@rule("kl", 1.0, "rate")
def far_away(t, limit):
    """The policy has left its reference"""
    usual = statistics.median(t["kl"][-WINDOW:])                # k3 has outliers
    if usual > limit:
        return (f"{t.name('kl')} is {usual:.2g} nats per token; lower the learning rate, or raise "
                "the weight of the KL")


@rule("grad_norm", 1000.0, "rate")
def gradient_explodes(t, limit):
    """One batch has a huge gradient, which may have destroyed the policy"""
    usual, most = statistics.median(t["grad_norm"][:WINDOW]), max(t["grad_norm"])
    if most > limit * usual > 0:
        return (f"{t.name('grad_norm')} goes up from {usual:.2g} to {most:.2g}; clip it, or lower "
                "the learning rate")


@rule("equal|signal length|entropy", 2.0, "rate")
def destroyed(t, limit):
    """The policy is destroyed, so all rewards are equal, and lower than at first"""
    begins_equal = t.no_signal(lambda name: t[name][0]) == 1
    if t.no_signal(t.last) == 1 and not begins_equal and t.last(t.goal) < sum(t.rewards[:1]) / 2:
        for name in ("length", "entropy"):      # otherwise, only the rewards have changed
            before, after = abs(mean(t[name][:1])), abs(t.last(name))
            if max(before, after) > limit * min(before, after):
                return (f"{t.name(name)} goes from {before:.2g} to {after:.2g}, and the {t.goal} "
                        f"from {t.rewards[0]:.2g} to {t.last(t.goal):.2g}; lower the learning rate")


@rule("entropy", 2.0, "rate flat")
def entropy_grows(t, limit):
    """The policy forgets what it knew"""
    values = [abs(x) for x in t["entropy"]]
    if mean(values[-WINDOW:]) > limit * values[0] > 0 and not t.trend.rises:
        also = ", or a sign, the mask or the grouping is wrong (#flat)" * (
            mean(values[-WINDOW:]) < 2.5 * limit * values[0])       # a high rate destroys it all
        return (f"the entropy grows from {values[0]:.2g} to {mean(values[-WINDOW:]):.2g}, and the "
                f"{t.goal} does not; lower the learning rate (#rate){also}")


@rule("entropy", 0.05, "rate")
def entropy_gone(t, limit):
    """The policy always gives the same answer, and learns nothing more"""
    values, rest = [abs(x) for x in t["entropy"]], Trend(t.rewards[len(t.rewards) // 2:])
    last = mean(values[-WINDOW:])                   # some log minus the entropy, as a loss
    has_stopped = not rest.rises or rest.rise < RISE / 2
    if any(values) and last < max(limit / 10, limit * values[0]) and has_stopped and (
            not t.is_solved(t.last, 0.9)):
        bonus = ", or raise --entropy_coef" * (t.run.trainer == "ours")
        return f"the entropy is {values[0]:.2g}, then {last:.2g}; lower the learning rate{bonus}"


@rule("equal|signal", 0.65, "groups")
def equal_rewards(t, limit):
    """In most groups, all rewards are equal, which gives no gradient"""
    for when in (t.first, t.last):
        share = t.no_signal(when) or 0.0
        is_better = t.trend.rises and (t.trend.last > 1.5 * t.trend.first or share == 1)
        is_low = share == 1 or when == t.last and t.trend.n >= FEW and when(t.goal) < 0.5
        if share > limit and is_low and not is_better and not t.is_solved(when) and (
                "teacher_kl" not in t):
            why = "mend first what is named above" if "destroyed" in t.found else (
                "is any answer right, does the reward find it, and is the group size too small?")
            return f"{share:.0%} of the groups; {why}"


@rule("lowest signal", 1e-7, "groups")
def one_sample(t, limit):
    """No advantage is negative, so no answer becomes less likely"""
    if min(t["lowest"]) >= 0 and max(t["signal"]) > limit:
        return f"{t.name('lowest')} is never below 0; raise the group size"


@rule("truncated|prompts_cut", 0.5, "groups average no-gradient")
def truncated(t, limit):
    """Most completions, or prompts, are truncated, so their answers do not count"""
    if t.is_stuck and t.last("prompts_cut") > limit:
        return f"{t.name('prompts_cut')} is {t.last('prompts_cut'):.2g}; allow longer prompts"
    first, last = t.first("truncated"), t.last("truncated")
    if last > limit and last > first - 0.1 and "entropy_grows" not in t.found:
        grow = "they grow; is each loss divided by its own length (#average)? If not, " * (
            first < 0.1)
        if 0 < t.last("grad_norm") < t.first("grad_norm") / 2:
            grow = "are they left out of the loss, so that they may grow (#no-gradient)? If not, "
        return f"{t.name('truncated')} is {last:.2g}; {grow}raise the length limit (#groups)"


@rule("grad_norm|log_ratio", 1e-7, "no-gradient rate")
def no_gradient(t, limit):
    """Nothing is learned, because no weight gets a gradient"""
    many = getattr(t.flags, "num_iterations", 1) * getattr(t.flags, "num_mini_batches", 1) > 1
    share = t.no_signal(t.last)
    for name, least in (("grad_norm", limit), ("log_ratio", 1000 * limit * many)):
        values = column(t.live, name)
        if values and max(values[-WINDOW:]) < least and (
                share is not None and share < 1 or not t.is_solved(t.last)):
            low = ", or is the learning rate far too low (#rate)" * (name == "log_ratio")
            return (f"{t.name(name)} is at most {max(values[-WINDOW:]):.1g}; is the loss constant, "
                    f"or does the optimizer have other weights (#no-gradient){low}?")


@rule("lr", 0.2, "rate no-gradient")
def schedule_ended(t, limit):
    """The learning rate is 0 before the run ends"""
    rates = t["lr"]
    idle = next((i for i, x in enumerate(reversed(rates)) if x > max(rates) / 1000), len(rates))
    if idle > max(WINDOW, limit * len(rates)) and not t.is_solved(t.last) and (
            not Trend(t.rewards[-idle:]).rises):
        part = "no-gradient" if idle == len(rates) else "rate"
        return (f"{t.name('lr')} is 0 in the last {idle} of {len(rates)} steps; look at the "
                f"schedule (#{part})")


@rule("kl", 1e-7, "unused")
def unused(t, limit):
    """The KL is 0 although the policy moves, so nothing holds it back"""
    values = column(t.live, "kl")               # other trainers log 0 if they have no reference
    if len(values) >= WINDOW and max(map(abs, values)) < limit and t.run.trainer != "--map" and (
            "no_gradient" not in t.found):
        return (f"{t.name('kl')} is 0 in all steps; is the reference the policy itself, or is "
                "the weight of the KL 0?")


@rule("length", 10.0, "thoughts rate")
def ends_at_once(t, limit):
    """Completions have become so short that they contain no thought"""
    if (first := t.first("length")) > limit * (last := t.last("length")):
        return (f"{t.name('length')} falls from {first:.0f} to {last:.0f}; read some (#thoughts), "
                "and lower the learning rate (#rate)")


@rule("explained|value_loss", 10.0, "critic")
def critic_fails(t, limit):
    """The critic predicts worse than a constant, or worse and worse"""
    first, last, now = t.first("value_loss"), t.last("value_loss"), Trend(t["explained"])
    is_bad = now.last < -1 / limit and not now.rises
    if (is_bad or last > limit * first > 0) and t.is_stuck:
        name, a, b = ("explained", now.first, now.last) if is_bad else ("value_loss", first, last)
        return (f"{t.name(name)} goes from {a:.2g} to {b:.2g}; lower the critic's learning rate, "
                "or scale the rewards")


@rule("after_penalties", 0, "rate")
def penalties(t, limit):
    """The penalties cost more than the policy gains"""
    x = Trend(t["after_penalties"])
    if x.falls and -x.rise > t.enough and not t.trend.falls:
        return (f"less penalties, the reward falls from {x.first:.2g} to {x.last:.2g}; lower the "
                "learning rate, or the weight of the penalties")


@rule("calls|failures", 0.9, "turns")
def no_tool_works(t, limit):
    """The policy calls no tool, or nearly all its calls fail"""
    never = len(t["calls"]) >= FEW and max(t["calls"]) == 0
    if (never or t.last("failures") > limit) and t.trend.rise < t.enough:
        name = "calls" if never else "failures"
        return (f"{t.name(name)} is {t.last(name):.2g}; run a tool yourself, and read what the "
                "prompt says about it")


@rule("held-out", 0.1, "held-out")
def held_out_falls(t, limit):
    """A score on held-out problems falls"""
    for name, x in t.scores.items():
        bends = [abs(a - 2 * b + c) for a, b, c in zip(x, x[1:], x[2:])]
        size, p = getattr(t.flags, "num_eval_problems", 0), mean([max(x), x[-1]])
        noise = (2 * p * (1 - p) / size) ** 0.5 if size and 0 < p < 1 else (
            0.85 * statistics.median(bends or [0.0]))
        scale = max(1.0, *map(abs, x))
        if (max(x) - x[-1] > max(limit * scale, SURE * noise)
                or x[0] - x[-1] > max(limit / 2 * scale, NOISE * noise)):
            but = ", but the reward rises, so it rewards something else" * t.trend.rises
            n = "; on how many problems? With 10, a change of 0.1 is a single answer" * (not size)
            return f"{name} goes from {max(x):.2g} to {x[-1]:.2g}{but}{n}"


@rule("held-out", 0.2, "held-out")
def held_out_stays(t, limit):
    """The reward rises, but no score on held-out problems follows"""
    rise = t.last(t.goal) - t.first(t.goal)
    scores = {name: Trend(x) for name, x in t.scores.items() if len(x) < len(t.rewards) / 2}
    if scores and t.trend.rises and rise > limit and max(t.rewards) <= 1 and all(
            x.n > 3 and x.first < SOLVED and x.rise + NOISE * x.noise < RISE / 2
            for x in scores.values()):
        return (f"the reward rises by {rise:.2g}, but {', '.join(scores)} does not; are a few "
                "problems learned by heart, or does the evaluation miss answers, or use other "
                "weights?")


@rule("accuracy", 0.05, "held-out unused groups")
def not_more_are_right(t, limit):
    """The policy learns a different reward from the one for right answers"""
    now, name = Trend(t["accuracy"]), t.name("accuracy")
    if now.n >= FEW and not any(t["accuracy"]):
        return (f"{name} is 0 in all steps; does it recognize right answers (#unused), and does "
                "the policy ever give one (#groups)?")
    if t.trend.rises and now.falls and -now.rise > limit:
        return f"{name} falls from {now.first:.2g} to {now.last:.2g}"


@rule("margins", RISE, "flat")
def pairs_stay(t, limit):
    """DPO's margins do not grow, or the answers get no better although they grow"""
    now, greedy = Trend(t["margins"]), t.scores.get("eval/greedy") or [1.0]
    is_far = t.last("margins") > 5 * limit and greedy[-1] < min(0.5, greedy[0] + RISE / 2)
    if is_far or now.n >= FEW and not now.rises and now.rise + NOISE * now.noise < limit:
        return f"the margin goes from {now.first:.2g} to {now.last:.2g}; are the pairs swapped?"


@rule("entropy|kl", 3.0, "jump")
def begins_again(t, limit):
    """The policy is suddenly the same as in the first steps"""
    place, back = (jump(t.rewards) or (0,))[0], []
    for x in (t.rewards, t["entropy"], t["kl"]) if place else ():
        before, after = mean(x[place - AROUND:place]), mean(x[place:place + AROUND])
        first = mean(x[:WINDOW])
        if len(x) == len(t.rewards) and abs(before - first) > SURE * error(x, AROUND):
            back.append(limit * abs(after - first) < abs(before - first))
    if len(back) > 1 and all(back):
        return f"in step {t.step(place)}; has a resumed run loaded its weights?"


@rule("", FALL, "jump")
def jumps(t, limit):
    """The reward falls in a single step, so something besides the policy may have changed"""
    if t.course == "jumps":
        place, before, after = jump(t.rewards)
        return (f"{t.name(t.goal)} falls from {before:.2g} to {after:.2g} in step {t.step(place)}; "
                "look at the data, at the reward function and its server, and at a resumed run")


@rule("", FALL, "rate flat")
def falls(t, limit):
    """The policy loses what it has learned"""
    if t.course == "falls":
        why = ("from the first steps on; a sign, the mask or the grouping is wrong (#flat), or "
               "the learning rate is too high (#rate)"
               if t.peak_place < WINDOW else "after it rose; lower the learning rate")
        return f"{t.name(t.goal)} falls from {t.peak:.2g} to {t.last(t.goal):.2g} {why}"


@rule("", RISE, "flat")
def flat(t, limit):
    """The reward does not rise, and its noise is small enough to show a rise"""
    if t.course == "stays" and (t.no_signal(t.last) or 0) < 1 and "no_gradient" not in t.found:
        why = "mend first what is named above" if t.found else (
            "the mask, the grouping or a sign is wrong, or the learning rate is too low")
        return (f"{t.name(t.goal)} is {t.trend.first:.2g}, then {t.trend.last:.2g} in "
                f"{t.trend.n} steps; {why}")


PARTS = sorted({part for one in RULES for part in one.parts})


# ---- what is found, and what cannot be -------------------------------------------------------

def lacking(table, one):
    """List what a rule needs and the log has not."""
    return [need for need in one.needs if not any(name in table for name in need.split("|"))]


def findings(run, names=None):
    """Look with all rules, or those with these names. -> {rule: text}"""
    table = Table(run)
    for one in RULES:
        is_asked = names is None or one.look.__name__ in names
        if is_asked and not lacking(table, one) and (text := one.look(table, one.limit)):
            for words, name in zip(WORDS, SETTINGS.get(run.trainer, WORDS)):
                text = text.replace(words, name)
            part = "" if "(#" in text else f" (#{one.parts[0]})"
            table.found[one.look.__name__] = f"{one.look.__doc__}: {text}{part}"
    return table.found


def check(run):
    """List what the steps of a run show, and the masks of its samples. -> list of texts"""
    return [*findings(run).values()]


def warnings(metrics, cfg):
    """List what a single step of ours shows. -> texts"""
    return findings(run_of([metrics], {}, "ours", cfg), (
        "equal_rewards", "truncated", "sampler_differs", "first_ratio")).values()


def parts(found):
    """Name the parts of docs/why.md to which the texts of check send. -> set of str"""
    return {part for text in found for part in re.findall(r"\(#([\w-]+)\)", text)}


def described(run):
    """Say what was read. -> str"""
    table = Table(run)
    steps = column(table.steps, "step") or [0]
    used = [f"{ours} = {table.name(ours)}" for ours in run.names]
    used += [f"held-out = {name}" for name in run.sets]
    return (f"read {run.source}: names of {run.trainer}, {len(table.steps)} steps from "
            f"{steps[0]:g} to {steps[-1]:g}\n  {', '.join(used)}")


def decided(run):
    """Say what the rewards can decide. -> str"""
    table, now = Table(run), Table(run).trend
    if not now.rises and not now.falls and not table.stays or now.n < 3:
        return (f"too short to judge: a rise below {max(NOISE * now.noise, table.enough):.2g} "
                f"would not show in {now.n} steps of this noise")
    course = "rises" if now.rises else "falls" if now.falls else "stays"
    may = ", which it may" * table.may_stay
    if now.rises and max(table.rewards) <= 0:
        may += ", and is never above 0: is more really better?"
    return f"the {table.goal} {course}: {now.first:.3g}, then {now.last:.3g}{may}"


def not_looked_at(run):
    """List the questions that the log leaves open, and the names that were not read. -> str"""
    table, lines = Table(run), []
    what = {name: row[0] for name, row in NAMES.items()} | OTHERS | {
        "held-out": "scores on held-out problems", "samples": "masks in samples.jsonl"}
    for one in RULES:
        if needs := lacking(table, one):
            lines.append(f"\n  {one.look.__doc__}? The log has no " + ", and no ".join(
                " or ".join(what[name] for name in need.split("|")) for need in needs))
    text = f"not looked at:{''.join(lines)}" if lines else "all rules have looked at this log"
    for title, names in (("not read", run.unread), ("not in the log", run.absent)):
        text += f"\n{title}: {', '.join(names)}" if names else ""
    return text + ("\nNo log shows most of the mistakes with which the reward still rises: check "
                   "your loss (docs/vectors.md), and read samples.")


def mapping(pairs):
    """Read what --map gives. Exits with one line if a word is unknown. -> {theirs: ours}"""
    found = [pair.rpartition("=")[::2] for pair in pairs]
    for theirs, ours in found:
        if not theirs or ours not in {"?", *NAMES, *OTHERS}:
            fail(f"--map {theirs}={ours}: has to be NAME=WORD, where WORD is one of "
                 f"{', '.join([*NAMES, *OTHERS])}")
    return {theirs: ours for theirs, ours in found if ours != "?"}


def main():
    words = parser(__doc__)
    words.add_argument("path")
    words.add_argument("--run", metavar="NAME", help="which one, of several runs")
    words.add_argument("--map", metavar="NAME=WORD", nargs="+", action="extend", default=[],
                       help="what a name in the log means; docs/check.md lists the words")
    words.add_argument("--fail-on", metavar="NAMES", default="", help="any, or parts of why.md")
    args = words.parse_args()
    wanted = {*filter(None, args.fail_on.split(","))}
    if unknown := wanted - {"any", *PARTS}:
        fail(f"--fail-on {unknown.pop()}: has to be any, or some of {','.join(PARTS)}")
    run = read(args.path, args.run, mapping(args.map))
    found = check(run)
    for text in (described(run), *(found or ["nothing found"]), decided(run), not_looked_at(run)):
        print(text.replace("(#", "(docs/why.md#"))
    if trainers.files_of(args.path):
        print(f"to read its completions: python -m report.page {args.path}")
    if found and wanted & {"any", *parts(found)}:
        raise SystemExit(1)


if __name__ == "__main__":
    start(main)
