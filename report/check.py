"""Name what is wrong in a run, with the part of docs/why.md that explains it.

  python -m report.check runs/grpo-arithmetic-s0        a run of ours
  python -m report.check output                         a run of TRL or ms-swift
  python -m report.check log.jsonl                      of verl's file logger, or other JSON lines
  python -m report.check log.csv                        as W&B exports it; or TensorBoard's folder
  python -m report.check log.csv --run NAME             one of several runs in a file or a folder
  python -m report.check runs/a --fail-on any           ends with 1 if anything is found
  python -m report.check runs/a --fail-on groups,rate   if one of these is found

It prints what was read, what is wrong, and whether the reward rises, as far as its noise allows to
decide that. docs/why.md shows on which runs the limits were fixed and tried.
"""
import itertools
import math
import re
import statistics
from typing import NamedTuple

from common import fail
from report import parser, start, trainers
from report.formats import Run, read

WINDOW = 5              # number of the first and of the last steps that are averaged
NOTHING = 1e-7          # a gradient or a KL below this is only rounding
FALL = 0.25             # the reward has collapsed if it loses this part of what it was
FEW = 20                # with fewer steps, nobody can say that the reward does not rise
NOISE = 2.0             # standard errors that noise explains
SURE = 5.0              # standard errors of the largest of many differences
RISE = 0.1              # a rise of a reward between 0 and 1 that a run should show
SOLVED, RIGHT = 0.8, 0.9        # accuracies from which on the reward may stay, and the entropy be 0
SPIKE, EXPLOSION = 10.0, 1000.0     # times the usual length of a gradient: often; ever
ROUNDING = 1e-6         # of a norm that is logged after the gradient is clipped to it, relative
STEADY = (1e-4, 0.01)   # relative spread of a gradient's length that no batch has: noise is added
FAR = 5.0               # nats per token that no policy should be away from its reference
MOST = 0.65             # of the groups are without signal, so that little is learned
OFTEN = 0.2             # of the steps: a metric that is not finite more often loses too many
MARGIN = 0.5            # of DPO's rewards between chosen and rejected answers, learned well
SHRUNK = 10.0           # times shorter than they were: completions that end at once
SURPRISE = 0.1          # largest difference between the samples' surprise and the entropy, relative
LOSS = 0.1              # held-out accuracy that a run may lose after its best evaluation
REPEATED = 3            # scores that hardly happen to be those of the evaluation before
BELOW = 0.05            # held-out accuracy that a run may lose against its first evaluation
AROUND = 10             # steps on each side of a jump that are compared
STEP = 1.4              # times the squared error of two constants that a line has at a jump
IDLE = 0.001            # of the highest learning rate: the schedule has ended
CLIPPED = 0.3           # of the tokens in the first steps: ratios that are not 1 at first
UNLIKE = 0.1            # nats per token between the policy and the old one, in the first steps
FAILED = 0.9            # of the calls of a tool
LONGER = 2.0            # times as long as they were: completions that grow for a reason
STILL = 1e-4            # log-ratio after an update that rounding explains
GROWS = 3.0             # times the difference of sampler and trainer, or the learning rate before
BLIND = 0.05            # explained variance of a critic that predicts hardly more than a constant
PARTS = ("adapter", "average", "critic", "flat", "groups", "held-out", "jump", "merging",
         "no-gradient", "not-finite", "rate", "rounding", "stale", "temperature", "thoughts",
         "turns", "unused")     # of docs/why.md
LOOKED_AT = ("reward", "frac_reward_zero_std", "grad_norm", "entropy", "kl",
             "completions/clipped_ratio", "completions/mean_length", "sampling/surprise")
DIFFERENCES = {         # of sampler and trainer, and how much of each rounding explains
    "sampling/sampling_logp_difference/mean": (0.1, "nats per token"),
    "probability_difference": (0.02, "in probability"), "sampler_kl": (0.05, "nats of KL"),
    "probability_ratio": (1.1, "as a factor of probabilities, which should be 1")}
SETTINGS = {            # what a trainer calls a setting; others get the description
    "ours": {"the learning rate": "--learning_rate", "completions per group": "--num_generations",
             "the length limit": "--max_completion_length", "the weight of the KL": "--beta"},
    "TRL": {"the learning rate": "learning_rate", "completions per group": "num_generations",
            "the length limit": "max_completion_length", "the weight of the KL": "beta"},
    "verl": {"the learning rate": "actor_rollout_ref.actor.optim.lr",
             "completions per group": "actor_rollout_ref.rollout.n",
             "the length limit": "data.max_response_length",
             "the weight of the KL": "actor_rollout_ref.actor.kl_loss_coef"}}
SETTINGS["ms-swift"] = SETTINGS["TRL"]
MAY_BE_SUMS = ("OpenRLHF", "an own loop")       # trainers whose KL may be that of a completion
MAY_BE_0 = ("OpenRLHF", "SkyRL")        # log a KL of 0 if they have no reference
# What the name of an evaluation says about its weights
VARIANT = re.compile("(?<![a-z0-9])(merged|exported?|quantized|bf16|fp8|int8|int4|[48]bit|nf4|"
                     "awq|gptq|gguf|served|hf|vllm|adapter|lora|attached|live|trainer)(?![a-z0-9])")
OF_THE_POLICY = ("completions/mean_length", "entropy", "kl")        # change if the policy does


# ---- the table of quantities -----------------------------------------------------------------

def column(records, name):
    """List the finite values of a metric in the records that have it. -> list of numbers"""
    return [one[name] for one in records
            if isinstance(one.get(name), (int, float)) and math.isfinite(one[name])]


def error(values, n):
    """Estimate the standard error of the difference of two means of n steps, from how much each
    step differs from the one before, because a trend hardly changes that. -> float"""
    squares = [(b - a) ** 2 / 2 for a, b in zip(values, values[1:])]
    return (2 * statistics.fmean(squares or [0.0]) / n) ** 0.5


class Trend(NamedTuple):
    """How a quantity changes from the first third of the steps to the last one."""
    first: float
    last: float
    noise: float        # standard error of the difference
    n: int              # steps

    @property
    def rises(self):
        return self.last - self.first > NOISE * self.noise

    @property
    def falls(self):
        return self.first - self.last > NOISE * self.noise


def trend(values):
    """Compare the first and the last third of some values. -> Trend"""
    part = max(1, len(values) // 3)
    first, last = (statistics.fmean(some or [0.0]) for some in (values[:part], values[-part:]))
    return Trend(first, last, error(values, part), len(values))


class Jump(NamedTuple):
    """Where a quantity may change by a large part from one step to the next."""
    place: int
    values: list        # AROUND steps before it, and as many from there on
    noise: float        # standard error of the difference

    @property
    def before(self):
        return statistics.fmean(self.values[:AROUND])

    @property
    def after(self):
        return statistics.fmean(self.values[AROUND:])

    @property
    def is_large(self):
        """Whether noise does not explain it, be it at once or slowly."""
        before, after = self.before, self.after
        return abs(after - before) > max(SURE * self.noise, FALL * max(abs(before), abs(after)))

    @property
    def is_real(self):
        """Whether noise does not explain it, and two constants describe it better than a line."""
        before, after = self.before, self.after
        if not self.is_large:
            return False
        steps = range(len(self.values))
        slope, start = statistics.linear_regression(steps, self.values)
        line = sum((x - start - slope * i) ** 2 for i, x in zip(steps, self.values))
        two = sum((x - (before if i < AROUND else after)) ** 2
                  for i, x in zip(steps, self.values))
        sides = [(x > (before + after) / 2) == (before > after) for x in self.values]
        return line > STEP * two and sides[AROUND - 2:AROUND + 2] == [True, True, False, False]


def jump_at(values, place):
    """Compare the steps before a place with those from there on. -> Jump"""
    return Jump(place, values[place - AROUND:place + AROUND], error(values, AROUND))


def largest_fall(values):
    """Find where a quantity falls most from one step to the next. -> Jump, or None"""
    noise = error(values, AROUND)
    found = [Jump(place, values[place - AROUND:place + AROUND], noise)
             for place in range(AROUND, len(values) - AROUND + 1)]
    return max((jump for jump in found if jump.is_real and jump.after < jump.before),
               key=lambda jump: jump.before - jump.after, default=None)


def fails_at_once(values):
    """Find where a reward falls from one step to the next, and is exactly 0 from there on.
    -> Jump, or None"""
    jump = largest_fall(values)
    return None if jump is None or any(values[jump.place:]) else jump


class Table:
    """The quantities of a run, and what they are evidence for."""

    def __init__(self, run):
        self.run, self.flags = run, run.flags
        goal = "reward" if "reward" in run.names else "rewards/accuracies"
        self.is_filtered = "filtered" in run.names or getattr(run.flags, "dynamic_sampling", 0) > 0
        if self.is_filtered and "accuracy" in run.names:
            goal = "accuracy"           # of everything that was sampled
        self.goal = goal                # what should rise
        self.steps = [one for one in run.records if goal in one] or run.records
        self.rewards = self[goal]
        self.jump = self.jump_of_rewards()
        self.trend = trend(self.rewards)
        if self.jump:                   # what is learned before and after it is not the jump
            place, step = self.jump.place, self.jump.after - self.jump.before
            self.trend = trend([x + step for x in self.rewards[:place]] + self.rewards[place:])

    def __getitem__(self, name):
        return column(self.steps, name)

    def __contains__(self, name):
        return bool(self[name])

    def first(self, name):
        """The mean of the first values. -> float, 0 if there are none"""
        return statistics.fmean(self[name][:WINDOW] or [0.0])

    def last(self, name):
        return statistics.fmean(self[name][-WINDOW:] or [0.0])

    def step(self, place):
        return self.steps[place].get("step", place)

    def setting(self, description):
        return SETTINGS.get(self.run.trainer, {}).get(description, description)

    def jump_of_rewards(self):
        """Find where the rewards fall at once while the policy stays what it was, so that somebody
        else has changed: the problems, or who rewards. -> Jump, or None"""
        jump = largest_fall(self.rewards)
        others = [self[name] for name in OF_THE_POLICY
                  if len(self[name]) == len(self.rewards) and any(self[name])]
        if jump is None or not others:
            return None                 # nobody knows whether the policy is the same
        is_same = not any(jump_at(values, jump.place).is_real for values in others)
        if len(self["entropy"]) == len(self.rewards):       # one that grows explains it, too
            entropy = jump_at(self["entropy"], jump.place)
            is_same &= not (entropy.is_large and abs(entropy.after) > abs(entropy.before))
        return jump if is_same else None

    @property
    def is_stuck(self):
        """Whether the reward certainly does not rise."""
        return not self.trend.rises and (self.trend.falls or self.is_long_enough)

    @property
    def is_harder(self):
        """Whether held-out scores rise, to the end, so that the policy learns although its rewards
        fall: its problems get harder. Scores from before the fall do not show that, and nobody
        learns from rewards of exactly 0."""
        records, fall = self.run.records, collapse(self.rewards)
        last = max((i for i, one in enumerate(records) if self.goal in one), default=0)
        for name in self.run.sets if any(self.rewards[-WINDOW:]) else ():
            place = max((i for i, one in enumerate(records) if name in one), default=-1)
            is_late = place >= 0 and place + len(records) // 8 >= last
            if is_late and fall:
                before = column(records[:place + 1], self.goal)[-WINDOW:] or [fall[0]]
                is_late = statistics.fmean(before) < (fall[0] + fall[1]) / 2
            scores = column(records, name)
            if is_late and scores and scores[-1] > scores[0] + RISE:
                return True
        return False

    @property
    def is_unit(self):
        """Whether all rewards are between 0 and 1, so that they may be accuracies."""
        return all(0 <= x <= 1 for x in self.rewards)

    def is_solved(self, mean, most=SOLVED):
        """Whether most answers are right, at the end (mean: self.last) or at first."""
        if "accuracy" in self:
            return mean("accuracy") >= most
        return all(abs(x) <= 1 for x in self.rewards) and mean(self.goal) >= most

    @property
    def begins_solved(self):
        """Whether the base is nearly always right, as the reward says, or all of several rewards
        for right answers."""
        right = [self.first(name) for name in self.run.components]
        return self.is_solved(self.first, RIGHT) or bool(right) and all(
            RIGHT <= x <= 1 for x in right)

    @property
    def enough(self):
        """A rise that a run should show. -> float"""
        if self.is_unit:
            return RISE
        if "reward_std" in self:
            return 0.25 * statistics.fmean(self["reward_std"])
        return max(RISE * max(map(abs, self.rewards), default=1.0), error(self.rewards, 2))

    def no_signal(self, mean):
        """The fraction of groups that give no gradient. -> float, None without evidence"""
        if any(name in self and abs(mean(name)) < NOTHING for name in ("signal", "reward_std")):
            return 1.0
        if "frac_reward_zero_std" in self:
            return mean("frac_reward_zero_std")
        return 0.0 if "signal" in self else None    # reward_std may be that of all groups together

    @property
    def groups_differ(self):
        """Whether the log has evidence that groups differ at the end."""
        share = self.no_signal(self.last)
        return share is not None and share < 1

    @property
    def live(self):
        """The steps after the first one in which groups differ, as far as the log shows."""
        return [one for one in self.steps[1:] if one.get("frac_reward_zero_std", 0) < 1 and all(
            abs(one.get(name, 1)) > NOTHING for name in ("signal", "reward_std"))]

    @property
    def is_long_enough(self):
        """Whether a rise that a run should show would be visible in so many steps of this noise."""
        now = self.trend
        return now.n >= FEW and now.last - now.first + NOISE * now.noise < self.enough

    @property
    def is_decided(self):
        """Whether the log shows if the reward rises, falls or stays."""
        return self.trend.n > 2 and (
            self.trend.rises or self.trend.falls or self.is_long_enough)

    def where_not_finite(self, is_lost):
        """Name the first step in which metrics are not finite: those that are lost, because they
        are so at the end or often, or those that are finite again. -> list of at most one text"""
        steps = {}                      # metric -> places of the records in which it is nan or inf
        for name in [*self.run.names, *self.run.sets]:
            if name == "explained_variance":    # nan if all returns are equal
                continue
            known = [place for place, one in enumerate(self.run.records)
                     if isinstance(one.get(name), (int, float))]
            bad = [place for place in known if not math.isfinite(self.run.records[place][name])]
            late = known[len(known) // 2:][-WINDOW:]
            if bad and is_lost == (bad[-1] in late or len(bad) > max(1, OFTEN * len(known))):
                steps[name] = bad
        if not steps:
            return []
        places = sorted({place for bad in steps.values() for place in bad})
        first = self.run.records[places[0]]
        names = [name for name, bad in steps.items() if bad[0] == places[0]]
        text = ", ".join(self.run.names.get(name, name) for name in names)
        return [f"{text}: {first[names[0]]} in step {first.get('step', places[0]):g}, the first of "
                f"{len(places)} such steps"]

    @property
    def has_rewards(self):
        """Whether rewards are what is learned: not those of a teacher, nor DPO's pairs."""
        names = {name for one in self.steps for name in one}
        return not names & {"teacher_kl", "rewards/margins"}

    @property
    def ratios(self):
        """The largest log-ratios, if a batch has several updates, which should change them."""
        updates = (getattr(self.flags, "num_iterations", 1)
                   * getattr(self.flags, "num_mini_batches", 1))
        return column(self.live, "max_log_ratio") if updates > 1 else []

    @property
    def has_gradient(self):
        """Whether steps in which groups differ have a gradient, and several updates of a batch
        change the ratios."""
        norms, ratios = column(self.live, "grad_norm"), self.ratios
        is_constant = ratios and max(ratios) == 0 and not self.trend.rises
        return not is_constant and (
            not norms or max(norms[-max(WINDOW, len(norms) // 3):]) >= NOTHING)


# ---- the rules: each yields texts, with the part of docs/why.md ------------------------------

def not_finite(table):
    """nan in the weights never gets better, so a metric that is finite again was only skipped."""
    for text in table.where_not_finite(is_lost=True):
        yield (f"{text}; what is learned after it is lost: lower "
               f"{table.setting('the learning rate')}, and look for a division by 0 or a "
               "logarithm of 0 (#not-finite)")


def vanished(table):
    """Some programs leave out what is not finite."""
    steps = [one for one in table.run.records if not table.run.names.keys().isdisjoint(one)]
    n = len(steps)
    for name in dict.fromkeys((table.goal, "loss", "grad_norm", "entropy", "kl")):
        known = [i for i, one in enumerate(steps) if name in one]
        if known and known[-1] + 1 == len(known) and n / 4 < len(known) < n - WINDOW:
            step = steps[known[-1]].get("step", known[-1])
            yield (f"{table.run.names[name]} is missing after step {step:g}, as if it were nan "
                   "(#not-finite)")


def groups_without_signal(table):
    """Equal rewards in a group give no gradient, unless a teacher rewards each token."""
    if "teacher_kl" in table:
        return
    for mean in (table.first, table.last):
        may_learn = table.is_solved(mean) or (
            "accuracy" not in table and table.trend.rises and not table.jump)
        if table.no_signal(mean) == 1 and not may_learn:
            why = "all its rewards are equal"
            if "accuracy" in table and mean("accuracy") < 0.5:
                why = "all answers are wrong"
            when = " in the first steps" if table.groups_differ else ""
            yield (f"no group has signal{when}, because {why}: raise "
                   f"{table.setting('completions per group')}, look at the reward function, or use "
                   "a better base (#groups)")
            return


def easy_problems(table):
    """Most groups are all right, from the first steps on or for half of the run, but held-out
    problems are not solved, and do not get better."""
    share = table.no_signal(table.first) or 0.0
    courses = [trend(column(table.run.records, name)) for name in table.run.sets]
    is_left = any(now.last < SOLVED and not now.rises for now in courses)
    if MOST < share < 1 and table.begins_solved and is_left:
        yield (f"{share:.0%} of the groups have no signal in the first steps already, because the "
               "base is nearly always right, but not held out: take harder problems (#groups)")
        return
    shares = table["frac_reward_zero_std"]
    half = len(shares) // 2
    is_over = courses and all(now.n > REPEATED and now.last < min(SOLVED, now.first + RISE)
                              for now in courses)
    parts = [shares[i:i + WINDOW] for i in range(half, len(shares), WINDOW)]
    if half >= FEW and table.is_solved(table.last, RIGHT) and is_over and all(
            statistics.fmean(part) > MOST for part in parts):
        yield (f"{table.no_signal(table.last):.0%} of the groups have no signal, because nearly "
               "all answers are right, but held-out scores stay lower, and hardly rise: take "
               "harder problems (#groups)")


def few_groups(table):
    """Most groups are all wrong, and it does not get better."""
    goal = "accuracy" if "accuracy" in table else table.goal
    now, share = trend(table[goal]), table.no_signal(table.last) or 0.0
    is_better = now.rises and now.last > 1.5 * now.first
    if MOST < share < 1 and now.n >= FEW and table.is_unit and now.last < 0.5 and not is_better:
        what = "the reward stays" if goal == table.goal else "right answers stay"
        yield (f"{share:.0%} of the groups have no signal, and {what} near {now.last:.2g}: does "
               "the reward find what is right, and does the policy see the whole question? "
               "Otherwise use a better base (#groups)")


def rewards_that_are_added(table):
    """The reward for right answers is never given, or falls while the sum rises."""
    for name in table.run.components:
        values = table[name]
        if len(values) >= FEW and max(map(abs, values)) < NOTHING:
            yield (f"{name} is 0 in all steps, so only the other rewards are learned: does it find "
                   "the answers (#unused), and does the base ever solve a problem (#groups)?")
        if failed := fails_at_once(values):
            yield (f"{name} falls from {failed.before:.2g} to 0 in step "
                   f"{table.step(failed.place):g}, and stays exactly 0: has its function failed? "
                   "(#jump)")
            continue
        now = trend(values)
        lost = max(BELOW * max(1.0, now.first), SURE * now.noise)
        if table.trend.rises and now.first - now.last > lost:
            yield (f"the reward rises, but {name} falls from {now.first:.2g} to {now.last:.2g}: it "
                   "pays for something else (#held-out)")


def one_sample(table):
    """Without a baseline, no advantage is below 0."""
    lowest, largest = table["lowest_advantage"], table["signal"]
    if len(lowest) >= WINDOW and min(lowest) >= 0 and max(largest or [0.0]) > NOTHING:
        yield ("no advantage is below 0, so nothing becomes less likely: does each group have "
               f"several answers? Raise {table.setting('completions per group')} (#groups)")


def truncated(table):
    first, last = (mean("completions/clipped_ratio") for mean in (table.first, table.last))
    prompts = table.last("prompts/clipped_ratio")
    if prompts > 0.5 and table.is_stuck:
        yield (f"most prompts are cut off ({prompts:.0%}), so the policy does not see the whole "
               "question: allow longer ones (#groups)")
    if last > FAILED and first < 0.3 and table.last("grad_norm") < table.first("grad_norm") / GROWS:
        yield (f"{last:.0%} of the completions are truncated at the end, and the gradient gets "
               "smaller: are they left out of the loss, so that nothing stops their growth? "
               "(#no-gradient)")
    entropies = trend([abs(x) for x in table["entropy"]])
    runs_on = first < 0.3 and entropies.last > 2 * entropies.first > 0      # nobody ends in noise
    name = "completions/mean_length"
    is_longer = table.last(name) > LONGER * table.first(name) > 0
    if last > 0.5 and first < 0.1 and is_longer and not runs_on and table.trend.falls:
        yield (f"completions grow from {table.first(name):.0f} tokens to {table.last(name):.0f}, "
               f"until {last:.0%} are truncated, and the {table.goal} falls: is the loss of an "
               "output divided by its own length, so that long wrong ones cost little (#average)? "
               f"Else raise {table.setting('the length limit')} (#groups)")
    elif last > 0.5 and last > first - 0.1 and not runs_on:
        yield (f"most completions are truncated ({last:.0%}): raise "
               f"{table.setting('the length limit')} (#groups)")


def no_gradient(table):
    """The loss or the learning rate is constant."""
    rates, norms = table["learning_rate"], table["grad_norm"]
    empty = sum(norm == 0 for norm in norms)
    is_often = OFTEN * len(norms) < empty < len(norms) and table.no_signal(table.last) is None
    if is_often and table.is_stuck and not table.is_solved(table.last):
        yield (f"the gradient is exactly 0 in {empty} of {len(norms)} steps: the rewards of their "
               "groups are equal (#groups)")
    if not table.has_gradient and (table.groups_differ or not table.is_solved(table.last)):
        differ = "groups differ, but " if table.groups_differ else ""
        yield f"{differ}the policy gets no gradient (#no-gradient)"
    if rates and max(rates) == 0:
        yield "the learning rate is 0 in all steps (#no-gradient)"
    changes = table.ratios[-max(WINDOW, len(table.live) // 3):]
    if changes and 0 < max(changes) < STILL and "grad_norm" in table:
        yield ("the gradient is not 0, but updates change no probability: does the optimizer have "
               "these weights, and a learning rate? (#no-gradient)")


def rate_too_low(table):
    """The schedule ends early, the warm-up does not end, or the policy is where it was."""
    rates, name = table["learning_rate"], table.setting("the learning rate")
    top = max(rates, default=0.0)
    idle = next((i for i, rate in enumerate(reversed(rates)) if rate > IDLE * top), 0)
    rest = trend(table.rewards[-idle:])
    is_moot = table.is_solved(table.last) or rest.last - rest.first > SURE * rest.noise
    if top > 0 and idle > max(WINDOW, OFTEN * len(rates)) and not is_moot:
        yield (f"{name} is 0 in the last {idle} of {len(rates)} steps: the schedule ends too early "
               "(#rate)")
    is_small = table.trend.n > 5 * FEW and table.trend.last - table.trend.first < RISE / 2
    if not (table.is_stuck or is_small) or not table.has_rewards:
        return
    if len(rates) >= FEW and all(b > a for a, b in zip(rates, rates[1:])):
        yield (f"{name} grows in each step, to {top:.2g} in the last one: the warm-up is longer "
               "than this log (#rate)")
    kl = statistics.median(table["kl"][-WINDOW:] or [0.0]) * table.last("completions/mean_length")
    most = (kl / 2) ** 0.5 if kl > 0 else math.inf      # Pinsker's inequality
    if table.is_unit and most < RISE and not table.begins_solved:
        yield (f"the policy has hardly moved: with a KL of {kl:.2g} nats per completion, no reward "
               f"between 0 and 1 can rise by more than {most:.1g}; raise {name}, or keep the "
               "weights in float32, because bfloat16 rounds small updates away (#rate)")


def rate_goes_up(table):
    """The learning rate is suddenly higher than it ever was after its warm-up, and harms."""
    rates, rewards = table["learning_rate"], table.rewards
    if len(rates) != len(rewards):
        return
    for place in range(2 * WINDOW, len(rates) - WINDOW):
        before, after = rates[:place], max(rates[place:place + WINDOW])
        is_steady = before[-2 * WINDOW] >= before[-1]
        if is_steady and after > GROWS * max(before):
            was, now = (statistics.fmean(some) for some in (
                rewards[place - 2 * WINDOW:place], rewards[-2 * WINDOW:]))
            if was - now > SURE * error(rewards, 2 * WINDOW):
                yield (f"{table.setting('the learning rate')} goes up from {before[-1]:.2g} to "
                       f"{after:.2g} in step {table.step(place):g}, and the {table.goal} falls "
                       f"from {was:.2g} to {now:.2g}: has a resumed run another schedule? (#jump)")
            return


def unused(table):
    kls, now = column(table.live, "kl"), trend(table["kl"])
    may_be_0 = table.run.trainer in MAY_BE_0
    if "kl_coef" in table:
        may_be_0 = max(table["kl_coef"]) <= 0
    if len(kls) >= WINDOW and max(map(abs, kls)) < NOTHING and table.has_gradient and not may_be_0:
        yield ("the KL stays 0: is the reference the policy itself, or the learning rate nearly 0? "
               "(#unused)")
    if now.n > 2 and now.last < -max(BELOW, SURE * now.noise):
        yield (f"the KL to the reference is {now.last:.2g} at the end, but its mean over samples "
               "cannot be clearly below 0: is its sign wrong, or does the reference score other "
               "tokens? (#unused)")


def collapse(values, size=0.0):
    """Find whether a quantity has lost a large part of its peak, or of `size`, which noise doesn't
    explain. -> its mean at the peak, at the end, and whether it fell from the start; or None"""
    n = min(WINDOW, max(1, len(values) // 2))
    means = [(statistics.fmean(values[i:i + n]), i) for i in range(len(values) - n + 1)]
    if not means:
        return None
    peak, place = max(means)
    last = means[-1][0]
    is_large = peak - last > max(FALL * max(abs(peak), size), SURE * error(values, n))
    return (peak, last, place < n) if is_large else None


def outage(table):
    """All rewards are exactly 0 for some steps, and not before and after them."""
    rewards = table.rewards
    is_0 = [x == 0 for x in rewards]
    for first in [i for i in range(1, len(is_0)) if is_0[i] and not is_0[i - 1]]:
        end = next((i for i in range(first, len(is_0)) if not is_0[i]), None)
        before = rewards[max(0, first - WINDOW):first]
        if end and end - first >= WINDOW and 0 not in before:
            yield (f"the {table.goal} is exactly 0 from step {table.step(first):g} to "
                   f"{table.step(end - 1):g}: has its function or server failed? (#jump)")
            return


def back_at_base(table):
    """The KL falls back to nothing at once, and the reward with it, be it less than noise in a few
    steps. (If the reward stays, only the reference is another.)"""
    kls, rewards = table["kl"], table.rewards
    jump = largest_fall(kls) if len(kls) == len(rewards) else None
    if jump is None or jump.before < SPIKE * max(0.0, jump.after):
        return
    n = min(5 * AROUND, jump.place, len(rewards) - jump.place)
    before, after = (statistics.fmean(rewards[start:start + n])
                     for start in (jump.place - n, jump.place))
    if before - after > SURE * error(rewards, n):
        yield (f"in step {table.step(jump.place):g}, the KL to the reference falls back to "
               f"{jump.after:.1g}, and the {table.goal} from {before:.2g} to {after:.2g}: a "
               "resumed run has not loaded its weights (#jump)")


def jumps(table):
    """The reward falls at once, because somebody else has changed, or a resumed run has lost what
    it learned."""
    if table.jump:
        rest = table.rewards[table.jump.place:]
        if not trend(rest).rises and not table.is_harder:
            yield (f"the {table.goal} falls from {table.jump.before:.2g} to "
                   f"{table.jump.after:.2g} in step {table.step(table.jump.place):g}, although the "
                   "policy does not change at once: look at what rewards, such as a server, and at "
                   "the data (#jump)")
        return
    jump = largest_fall(table.rewards)
    if jump is None:
        yield from back_at_base(table)
        return
    prompts = table["prompts/mean_length"]
    is_other = len(prompts) == len(table.rewards) and jump_at(prompts, jump.place).is_real
    rest = table.run.records[table.run.records.index(table.steps[jump.place]):]
    is_learned = any(trend(column(rest, name)).rises for name in table.run.sets)
    regained = table.last(table.goal) - jump.after > FALL * (jump.before - jump.after)
    if is_other and not regained and not is_learned:
        yield (f"in step {table.step(jump.place):g}, the prompts change from "
               f"{jump_at(prompts, jump.place).before:.0f} tokens to "
               f"{jump_at(prompts, jump.place).after:.0f}, and the {table.goal} falls from "
               f"{jump.before:.2g} to {jump.after:.2g}, and stays low: is this the data that you "
               "want? (#jump)")
        return
    is_back = []                        # for each quantity that had left where it began
    for name in (table.goal, *OF_THE_POLICY):
        if len(table[name]) == len(table.rewards):
            start, now = table.first(name), jump_at(table[name], jump.place)
            if abs(now.before - start) > SURE * now.noise:
                is_back.append(abs(now.after - start) < abs(now.before - start) / 3)
    if len(is_back) > 1 and all(is_back):
        yield (f"in step {table.step(jump.place):g}, the {table.goal} and all else are again "
               "what they were in the first steps: a resumed run has not loaded its weights "
               "(#jump)")


def falls(table):
    """The reward has lost a part of what it was."""
    spread = statistics.fmean(table["reward_std"] or [0.0])
    found = collapse(table.rewards, spread)
    if found is None or table.jump or table.is_harder or any(jumps(table)) or any(
            rate_goes_up(table)):
        return
    peak, last, is_at_once = found
    rate = table.setting("the learning rate")
    if is_at_once:
        yield (f"the {table.goal} falls from {peak:.2g} to {last:.2g}, from the first steps on: "
               f"the grouping or the sign is wrong, or {rate} is too high; compare your loss "
               "(#flat)")
    else:
        yield f"the {table.goal} falls from {peak:.2g} to {last:.2g}: lower {rate} (#rate)"


def flat(table):
    """The reward does not rise, although its noise is small enough to show a rise."""
    is_moot = (table.is_filtered and table.goal == "reward") or not table.has_rewards
    lost = table.trend.first - table.trend.last
    is_lost = lost > max(BELOW, SURE * table.trend.noise)       # what is solved may only stay
    if (is_moot or table.is_harder or not table.is_long_enough or table.trend.rises
            or table.no_signal(table.last) == 1 or any(falls(table)) or any(jumps(table))
            or any(rate_goes_up(table)) or not is_lost and (
                table.is_solved(table.first) or table.begins_solved)
            or not table.has_gradient):
        return
    evidence = ["groups differ"] if table.groups_differ else []
    evidence += ["the gradient is not 0"] if "grad_norm" in table else []
    but = f"{' and '.join(evidence)}, but " if evidence else ""
    has_cause = any(any(rule(table)) for rule in (
        groups_without_signal, few_groups, truncated, rate_too_low, entropy_changes,
        sampler_differs))
    why = "if nothing above explains it, " if has_cause else ""
    low = "" if has_cause else f", or {table.setting('the learning rate')} is too low"
    yield (f"{but}the {table.goal} does not rise in {table.trend.n} steps "
           f"({table.trend.first:.2g}, then {table.trend.last:.2g}; a rise of "
           f"{NOISE * table.trend.noise:.1g} would show): {why}the mask, the grouping or the sign "
           f"is wrong{low}; compare your loss (#flat)")


def gradient_grows(table):
    usual = statistics.median(column(table.steps[:WINDOW], "grad_norm") or [0.0])
    norms = table["grad_norm"]
    spikes = [norm for norm in norms if norm > SPIKE * usual > 0]
    if spikes and (max(spikes) > EXPLOSION * usual
                   or 8 * len(spikes) > len(norms) and not table.trend.rises):
        yield (f"grad_norm goes up from {usual:.2g} to {max(spikes):.2g}: lower "
               f"{table.setting('the learning rate')}, or clip the gradient (#rate)")
    spread = statistics.pstdev(norms) / statistics.fmean(norms) if any(norms) else 0.0
    top = max(norms, default=0.0)
    is_clipped = 2 * sum(norm > (1 - ROUNDING) * top for norm in norms) > len(norms)
    if len(norms) > 2 * WINDOW and STEADY[0] < spread < STEADY[1] and not is_clipped:
        yield (f"grad_norm is {statistics.fmean(norms):.3g} in each step, although batches differ: "
               "something else than the loss is in the gradient (#flat)")


def critic_fails(table):
    """The critic predicts worse and worse, and the reward does not rise."""
    first, last = table.first("value_loss"), table.last("value_loss")
    explained = trend(table["explained_variance"])
    if explained.n > 3 * FEW and not explained.rises and -1 < explained.last < BLIND:
        yield (f"the critic predicts no better than a constant, and does not learn to (explained "
               f"variance {explained.first:.2g}, then {explained.last:.2g}): do its weights "
               "change? (#critic)")
    if not table.is_stuck or table.is_solved(table.last) or table.trend.n < FEW:
        return
    if last > SPIKE * first > 0:
        yield (f"the critic's loss grows from {first:.2g} to {last:.2g}: lower its learning rate, "
               "or scale the rewards (#critic)")
    elif explained.last < -1 and not explained.rises:
        yield (f"the critic predicts worse than a constant (explained variance "
               f"{explained.last:.2g}): train it first, or change its learning rate (#critic)")


def clipped_at_once(table):
    """Before an update, each ratio is 1."""
    clipped, change = table.first("clip_ratio/region_mean"), table.first("old_kl")
    if table.is_stuck and (clipped > CLIPPED or change > UNLIKE):
        what = f"{clipped:.0%} of the tokens are clipped" if clipped > CLIPPED else (
            f"the policy is {change:.2g} nats from the one before the update")
        yield (f"{what} in the first steps already: are the old log-probs those of the sampled "
               "tokens, at the same temperature and without dropout? (#rounding)")


def penalties(table):
    """Penalties take what the policy learns."""
    both = [one for one in table.steps if {"after_penalties", table.goal} <= one.keys()]
    costs = [one[table.goal] - one["after_penalties"] for one in both]
    cost = trend([x for x in costs if math.isfinite(x)])
    if table.is_stuck and cost.rises and cost.last - cost.first > table.enough:
        yield (f"penalties grow from {cost.first:.2g} to {cost.last:.2g}, and the {table.goal} "
               f"does not rise: lower {table.setting('the weight of the KL')} (#rate)")
    rest = trend(column(both, "after_penalties"))
    if table.trend.rises and rest.first - rest.last > max(table.enough, SURE * rest.noise):
        yield (f"the {table.goal} rises, but less penalties it falls from {rest.first:.2g} to "
               f"{rest.last:.2g}: the policy leaves its reference; lower "
               f"{table.setting('the learning rate')} (#rate)")
    right = trend(table["accuracy"])
    is_paid = table.trend.rises or table.is_filtered or not table.has_rewards
    if right.last - right.first > max(RISE, SURE * right.noise) and not is_paid:
        yield (f"more answers are right ({right.first:.2g}, then {right.last:.2g}), but the reward "
               "does not rise: something else in it costs as much (#held-out)")


def far_from_reference(table):
    usual = statistics.median(table["kl"][-WINDOW:] or [0.0])       # k3 has outliers
    is_sum = table.run.trainer in MAY_BE_SUMS and table.trend.rises
    if usual > FAR and not is_sum:
        yield (f"the KL to the reference grows to {usual:.2g} nats per token: the "
               f"policy has left it; lower {table.setting('the learning rate')}, or raise "
               f"{table.setting('the weight of the KL')} (#rate)")


def length_collapses(table):
    for name, what in (("completions/mean_length", "completions shrink"),
                       ("length/thinking", "thoughts shrink")):
        before, after = table.first(name), table.last(name)
        if name in table and before > SHRUNK * after and before > 0:
            yield (f"{what} from {before:.0f} tokens to {after:.0f}: the policy ends at once, "
                   "perhaps without thinking (#thoughts); read samples, and lower "
                   f"{table.setting('the learning rate')} (#rate)")


def wrong_answers_grow(table):
    """If each output's loss is divided by its own length, long wrong answers cost little, and grow
    by a larger factor than right ones."""
    right, wrong = trend(table["length/right"]), trend(table["length/wrong"])
    if wrong.last > LONGER * wrong.first > 0 and right.last < right.first * (
            wrong.last / wrong.first) ** 0.5:
        yield (f"wrong answers grow from {wrong.first:.0f} tokens to {wrong.last:.0f}, right ones "
               f"from {right.first:.0f} to {right.last:.0f}: is the loss of an output divided by "
               "its own length, so that long wrong ones cost little? (#average)")


def entropy_changes(table):
    values = [abs(x) for x in table["entropy"]]         # some log minus the entropy, as a loss
    if not values or len(values) > 1 and max(values) == 0:      # it was not computed
        return
    before, after = values[0], statistics.fmean(values[-WINDOW:])   # one step may destroy a policy
    rate = table.setting("the learning rate")
    if after > 2 * before > 0 and not table.trend.rises:
        yield f"the entropy grows from {before:.2g} to {after:.2g}: lower {rate} (#rate)"
    half = table.rewards[len(table.rewards) // 2:]
    now = trend(half)
    is_slow = table.is_unit and now.last - now.first < BELOW and after < 0.02 * before
    has_stopped = len(half) > WINDOW and (not now.rises or is_slow)
    has_stopped |= (table.no_signal(table.last) or 0.0) > MOST
    has_stopped |= "accuracy" in table and after < 0.005
    is_solved = table.is_solved(table.last, RIGHT)
    if after < max(0.005, 0.05 * before) and has_stopped and not is_solved:
        bonus = ", or raise --entropy_coef" if table.run.trainer == "ours" else ""
        yield f"entropy has collapsed to {after:.2g}: lower {rate}{bonus} (#rate)"


def other_distribution(table):
    both = [one for one in table.steps if {"sampling/surprise", "entropy"} <= one.keys()]
    if not both:
        return
    surprises, entropies = (column(both, name) for name in ("sampling/surprise", "entropy"))
    surprise, entropy = map(statistics.fmean, (surprises, entropies))
    noise = error([a - b for a, b in zip(surprises, entropies)], 2 * len(both))
    if surprise > 0 and abs(surprise - entropy) > SURPRISE * max(entropy, 0.05) + NOISE * noise:
        yield (f"the surprise is {surprise:.2g}, but the entropy is {entropy:.2g}: samples come "
               "from another distribution (#temperature)")


def sampler_differs(table):
    """Sampler and trainer compute different probabilities for the same tokens."""
    is_ours = table.run.trainer == "ours"
    is_corrected = not is_ours or (
        getattr(table.flags, "importance_sampling_correction", "") != "none"
        and "sampling/importance_sampling_ratio/mean" in table)
    if is_corrected and getattr(table.flags, "sampler_lag", 0) > 0:
        return                          # older weights sample on purpose
    for name, (limit, unit) in DIFFERENCES.items():
        first, last = table.first(name), table.last(name)
        worst = max(first, last)
        limit = 0.02 if is_ours else limit              # others may compute in bfloat16
        least = 1.0 if name == "probability_ratio" else 0.0
        is_growing = last > limit > first and last - least > GROWS * (first - least)
        is_old = any(samples_age(table)) or is_frozen(table, name, limit)
        if is_corrected and is_growing and has_risen(table) and not is_old:
            yield (f"sampler and trainer differ by {first:.2g} {unit} at first, and by {last:.2g} "
                   "at the end. The reward has risen, so the sampler gets new weights, and the two "
                   "round ever more differently: let both compute in the same precision "
                   "(#rounding)")
        elif is_corrected and is_growing and table.is_stuck and not has_risen(table):
            yield (f"sampler and trainer differ by {first:.2g} {unit} at first, and by {last:.2g} "
                   "at the end, and the reward never rises: does the sampler get the weights that "
                   "learn, or another adapter (#adapter) or none (#stale)?")
        elif is_corrected and is_growing:
            yield (f"sampler and trainer differ by {first:.2g} {unit} at first, and by {last:.2g} "
                   "at the end: does the sampler get all new weights, and is it not ever further "
                   "behind? (#stale)")
        elif is_corrected and worst > limit:
            text = f"sampler and trainer differ by {worst:.2g} {unit}"
            if first > limit:
                yield (f"{text} from the first steps on, more than rounding explains: have both "
                       "the same temperature, top_p and top_k (#temperature), and the same "
                       "weights and tokens (#rounding)?")
            else:
                yield (f"{text}, more than rounding explains: does the sampler have the trainer's "
                       "weights? (#rounding)")
        elif worst > 0.01 and not is_corrected:
            yield ("sampler and trainer differ: try --importance_sampling_correction truncate "
                   "(#stale)")
    largest = "sampling/sampling_logp_difference/max"
    worst = max(table.first(largest), table.last(largest))
    is_unseen = table.last("sampling/sampling_logp_difference/mean") <= 0.01
    if is_ours and not is_corrected and is_unseen and worst > 1:
        yield (f"a token's first ratio is off by {worst:.2g} nats: the text that is trained is not "
               "the one that was sampled (#rounding)")
    elif is_ours and not is_corrected and is_unseen and worst > 1e-3:
        yield "the first ratio is not 1: try --kernel torch (#rounding)"


def is_frozen(table, name, limit):
    """Whether the reward stays what it was when the difference of sampler and trainer began to
    grow: then the sampler has the weights of that time."""
    values = table[name]
    start = next((i for i, x in enumerate(values) if x > limit / GROWS), len(values))
    rest = trend(table.rewards[start:])
    return rest.n >= FEW and abs(rest.last - rest.first) < max(NOISE * rest.noise, BELOW)


def has_risen(table):
    """Whether the reward has risen for some time, even if it fell again."""
    n = max(1, table.trend.n // 10)
    means = [statistics.fmean(table.rewards[i:i + n]) for i in range(0, table.trend.n - n + 1, n)]
    least = max(SURE * error(table.rewards, n), table.enough / 2)
    return bool(means) and max(means) - means[0] > least


def samples_age(table):
    """The policy is ever more updates ahead of the one that samples, and its reward suffers."""
    age = trend(table["staleness"])
    is_older = age.last - age.first > max(1.0, age.first, SURE * age.noise)
    if is_older and (table.is_stuck or any(falls(table))):
        yield (f"samples get older: they come from {age.first:.2g} updates ago at first, from "
               f"{age.last:.2g} at the end; limit that, or correct the ratios (#stale)")


def weights_are_lost(table):
    """The policy is again and again where it began, and does not get better. (If only the reference
    is replaced, it goes on to learn.)"""
    kls = [statistics.median(some) for some in zip(*(table["kl"][i:] for i in range(3)))]
    least = max(SURE * error(table["kl"], 3), NOTHING)      # an estimate may be below 0
    back = [i for i in range(3, len(kls)) if least < kls[i - 3] > SPIKE * max(0.0, kls[i])]
    places = [i for i, before in zip(back, [-WINDOW, *back]) if i - before > WINDOW]
    if len(places) >= REPEATED and table.is_stuck and len(table["kl"]) == len(table.steps):
        yield (f"the KL to the reference falls back in step {table.step(places[0]):g} and "
               f"{len(places) - 1} times more, and the {table.goal} does not rise: is an adapter "
               "merged into weights that round it away (#merging), or a checkpoint loaded without "
               "its weights (#jump)?")


def changes_at_checkpoints(table):
    """The KL rises at once, again and again after as many steps, as if something else than an
    update had changed the weights, and the reward suffers."""
    kls = table["kl"]
    found = [jump_at(kls, place) for place in range(AROUND, len(kls) - AROUND + 1)]
    places = [jump.place for jump in found if jump.is_real and jump.after > jump.before]
    apart = {b - a for a, b in zip(places, places[1:])}
    is_harmed = table.is_stuck or any(falls(table))
    if len(places) >= REPEATED and len(apart) == 1 and is_harmed and len(kls) == len(table.steps):
        yield (f"the KL to the reference rises at once in step {table.step(places[0]):g}, and "
               f"again every {apart.pop()} steps: what happens there besides updates? If an "
               "adapter is merged to save it, is it taken out again? (#merging)")


def tools_fail(table):
    tokens = [(one.get("tokens/loss"), one.get("tokens/tool", 0), one.get("tokens/all") or
               one.get("tokens/model", 0) + one.get("tokens/tool", 0)) for one in table.steps]
    tokens = [some for some in tokens if some[0] and some[1] > 0]
    if tokens and all(abs(most - loss) < tool / 2 for loss, tool, most in tokens):
        yield ("the loss has as many tokens as the policy and the tools have written: what a tool "
               "says is learned, too (#turns)")
    calls = trend(table["calls"])
    if calls.falls and calls.last < calls.first / 2 and any(falls(table)):
        yield (f"calls of tools, or turns, get rarer, from {calls.first:.2g} to {calls.last:.2g} "
               "for each completion: does the policy see what a tool says, and is it not what is "
               "learned? (#turns)")
    cut = table.last("completions/clipped_ratio") if "completions/clipped_ratio" in table else 1.0
    if calls.rises and calls.last > LONGER * calls.first > 0 and cut > 0.5 and any(falls(table)):
        yield (f"calls of tools, or turns, grow from {calls.first:.2g} to {calls.last:.2g} for "
               "each completion, and the reward falls: does the policy repeat them until a limit "
               "ends it? (#turns)")
    is_learned = table.trend.last - table.trend.first > table.enough
    if calls.n >= FEW and not any(table["calls"]) and not is_learned and (
            not table.is_solved(table.last)):
        yield ("no completion ever calls a tool: does the prompt describe the tools, in the form "
               "that the model knows, and are its calls recognized? (#turns)")
    failures = trend(table["tools/failure_frequency"])
    share = table.last("tools/failure_frequency")
    is_worse = failures.rises and share > max(0.5, 2 * failures.first) and any(falls(table))
    if is_worse or share > FAILED and not table.trend.rises:
        yield (f"{share:.0%} of the calls of tools fail: run one of them yourself, and read "
               "samples (#turns)")


def pairs(table):
    """DPO learns to order pairs, which shows in margins, not in rewards."""
    margins, chosen = table["rewards/margins"], table.last("rewards/chosen")
    greedy = column(table.run.records, "eval/greedy")
    is_far = table.last("rewards/margins") > MARGIN     # far enough that answers must have changed
    if greedy and is_far and greedy[-1] < min(0.5, greedy[0] + BELOW):
        yield ("the margins grow, but held-out answers do not get better: are chosen and rejected "
               "answers swapped? (#flat)")
    if "reward" in table.run.names and chosen < 0 and "rewards/chosen" in table and (
            table.trend.first - table.trend.last > SURE * table.trend.noise):
        yield ("chosen answers become less likely, and fewer are right: lower "
               f"{table.setting('the learning rate')} (#rate)")
    losses = column(table.run.records, "eval_loss")
    orders = [trend(column(table.run.records, name)) for name in table.run.sets
              if not name.endswith("margins")]          # those may rise by a few pairs
    if table.goal == "rewards/accuracies" and len(losses) > REPEATED and (
            losses[-1] > losses[0] + BELOW) and not any(now.rises for now in orders):
        yield (f"the loss on held-out pairs rises from {min(losses):.2g} to {losses[-1]:.2g}: the "
               "pairs are learned by heart; train for fewer epochs, or lower "
               f"{table.setting('the learning rate')} (#held-out)")
    now = trend(margins)
    if now.n >= FEW and not now.rises and now.last - now.first + NOISE * now.noise < RISE:
        yield ("the margins between chosen and rejected answers do not grow: are the pairs, the "
               "mask or the sign wrong? (#flat)")


def held_out(table):
    """A score falls below the base's, or far below the best one; or the reward rises, and fewer
    answers are right."""
    problems = getattr(table.flags, "num_eval_problems", math.inf)
    for name in table.run.sets:
        scores = column(table.run.records, name) or [0.0]
        last = scores[-1]
        bends = [abs(a - 2 * b + c) for a, b, c in zip(scores, scores[1:], scores[2:])]
        noise = 0.85 * statistics.median(bends or [0.0]) if problems == math.inf else 0.0
        scale = max([1.0, *map(abs, scores)])
        fallen = []
        for best, limit, margin in ((scores[0], BELOW, NOISE), (max(scores), LOSS, SURE)):
            p = min(1.0, max(0.0, (best + last) / 2))
            chance = (2 * p * (1 - p) / problems) ** 0.5            # of so many problems
            if best - last > max(limit * scale, margin * (noise + chance)):
                fallen.append(best)
        if fallen:
            rises = table.trend.rises and table.goal == "reward"
            but = ", but the reward rises: it pays for something else" if rises else ""
            yield f"held-out falls: {name} from {max(fallen):.2g} to {last:.2g}{but} (#held-out)"
    found = collapse(table["accuracy"])
    if found and table.trend.rises and table.goal == "reward":
        yield (f"the reward rises, but right answers fall from {found[0]:.2g} to {found[1]:.2g}: "
               "it pays for something else (#held-out)")


def cut_evaluations(table):
    """An evaluation ends most completions, but training does not."""
    training = table.last("completions/clipped_ratio")
    for name in table.run.truncated if "completions/clipped_ratio" in table else ():
        share = statistics.fmean(column(table.run.records, name)[-WINDOW:] or [0.0])
        if share > 0.5 > 2 * training:
            yield (f"{name} is {share:.2g}, but in training {training:.0%} of the completions are "
                   "truncated: let evaluations be as long (#held-out)")


def variants_differ(table):
    """Two evaluations, one of them of other weights as its name says, such as eval_acc_merged, were
    alike at first, and only one has learned."""
    scores = {name: column(table.run.records, name) for name in table.run.sets}
    for name, other in itertools.permutations(scores, 2):
        a, b = scores[other], scores[name]
        plain = [re.sub("[/_-]", "", VARIANT.sub("", one)) for one in (name, other)]
        is_variant = VARIANT.search(name) and plain[0] == plain[1]
        is_behind = min(len(a), len(b)) > 2 and abs(a[0] - b[0]) < RISE and (
            a[-1] - b[-1] > 2 * RISE and b[-1] - b[0] < (a[-1] - a[0]) / 2)
        if is_variant and is_behind:
            yield (f"{other} rises from {a[0]:.2g} to {a[-1]:.2g}, but {name} only from {b[0]:.2g} "
                   f"to {b[-1]:.2g}: what was learned is lost when the weights are merged, rounded "
                   "or exported (#merging)")


def never_changes(table):
    """The reward rises, and all scores are the same in each evaluation."""
    scores = {name: column(table.run.records, name) for name in table.run.sets}
    scores = {name: values for name, values in scores.items() if values}
    most = len(table.run.records) / 2           # else a program has filled the rows between
    repeated = sum(len(values) - 1 for values in scores.values() if len(values) < most)
    is_still = all(len({*values}) == 1 and 0 < values[0] < 1 for values in scores.values())
    if is_still and repeated >= REPEATED and table.trend.rises and table.goal == "reward":
        name, values = next(iter(scores.items()))
        yield (f"the reward rises, but {name} is {values[0]:.3g} in each evaluation: is it the "
               "policy that learns? (#held-out)")


def stays(table):
    """The reward rises much, and no evaluation follows."""
    rise = table.last(table.goal) - table.first(table.goal)
    is_large = table.goal == "reward" and table.is_unit and table.trend.rises and rise > 2 * RISE
    if not is_large or any(never_changes(table)):
        return
    most = len(table.run.records) / 2           # else a program has filled the rows between
    sets = {name: column(table.run.records, name) for name in table.run.sets}
    courses = {name: trend(scores) for name, scores in sets.items() if 0 < len(scores) < most}
    is_still = all(now.n > 2 * REPEATED and now.first < SOLVED
                   and now.last - now.first < (RISE * rise if now.rises else RISE)
                   and now.last - now.first + NOISE * now.noise < RISE for now in courses.values())
    if courses and is_still and not any(held_out(table)):
        name, now = next(iter(courses.items()))
        yield (f"the reward rises by {rise:.2g}, but no evaluation does ({name}: {now.first:.2g}, "
               f"then {now.last:.2g}): does the policy learn its problems by heart, and does the "
               "evaluation use the policy, and find its answers? (#held-out)")


def masks(table):
    """What the masks of samples leave out, or do not."""
    completions = [one for group in table.run.samples for one in group["completions"]
                   if one["tokens"]]
    if any(one["tokens"][-1] == "<|eos|>" and one["mask"][-1] == 0 for one in completions):
        yield "the token that ends a completion is not learned (#rounding)"
    calls = statistics.fmean(table["tools/call_frequency"] or [0.0])
    if calls > 0 and all(all(one["mask"]) for one in completions):
        yield "what a tool says is learned, too (#turns)"


AT_ONCE = (groups_without_signal, truncated, entropy_changes, sampler_differs)
RULES = (not_finite, vanished, no_gradient, rate_too_low, rate_goes_up, groups_without_signal,
         easy_problems, few_groups, rewards_that_are_added, one_sample, truncated, unused,
         gradient_grows, critic_fails, clipped_at_once, penalties, far_from_reference,
         length_collapses, wrong_answers_grow, entropy_changes, other_distribution, sampler_differs,
         samples_age, weights_are_lost, changes_at_checkpoints, masks, tools_fail, held_out,
         cut_evaluations, variants_differ, never_changes, stays, pairs, jumps, outage, falls, flat)


def warnings(metrics, cfg):
    """Yield a warning for each metric of a step that shows why learning cannot work."""
    run = Run("ours", cfg, [metrics], {name: name for name in metrics}, [], [], "")
    table = Table(run)
    for rule in AT_ONCE:
        yield from rule(table)


def check(run):
    """List what the steps of a run show, and the masks of its samples. -> list of texts"""
    table = Table(run)
    return list(dict.fromkeys(text for rule in RULES for text in rule(table)))


def parts(found):
    """Name the parts of docs/why.md to which the texts of check send. -> set of str"""
    return {part for text in found for part in re.findall(r"\(#([\w-]+)\)", text)}


# ---- what was read, and what it can decide ---------------------------------------------------

def described(run):
    """Say what was read. -> str"""
    table = Table(run)
    steps = column(table.steps, "step")
    span = f" from {steps[0]:g} to {steps[-1]:g}" if steps else ""
    text = f"read {run.source}: names of {run.trainer}, {len(table.steps)} steps{span}"
    used = [name if name == theirs else f"{name} = {theirs}" for name, theirs in run.names.items()]
    skipped = [f"{text}, and finite later" for text in table.where_not_finite(is_lost=False)]
    held_out = [f"held out: {name}" for name in run.sets]
    return "\n  ".join([text, ", ".join(used), *held_out, *skipped])


def decided(run):
    """Say what the rewards can decide. -> str"""
    table = Table(run)
    now = table.trend
    if table.is_filtered and table.goal == "reward":
        return "the rewards are of groups that differ only, so they need not rise"
    if now.n < 3:
        return f"too short to judge: one step decides nothing, and this log has {now.n}"
    if not table.is_decided:
        return (f"too short to judge: a rise below {NOISE * now.noise:.2g} would not show in "
                f"{now.n} steps of this noise")
    course = "rises" if now.rises else "falls" if now.falls else "stays"
    if table.jump:
        step = f"{table.step(table.jump.place):g}"
        return f"the {table.goal} {course} before and after it falls at once in step {step}"
    text = f"the {table.goal} {course}: {now.first:.3g}, then {now.last:.3g}"
    if now.falls and table.is_harder:
        text += "; held-out scores rise, so its problems get harder"
    if table.begins_solved and (table.no_signal(table.first) or 0.0) > MOST:
        text += "; the base is nearly always right, so there is little to learn (#groups)"
    for name in table.run.components if now.rises else ():
        if not (right := trend(table[name])).rises:
            text += f"; but {name} does not: {right.first:.3g}, then {right.last:.3g}"
    return text


def summary(run):
    """Say what was looked at in a run without findings. -> str"""
    table = Table(run)
    known = [name for name in LOOKED_AT if name in table] + run.sets
    lacking = [name for name in LOOKED_AT if name not in known]
    found = "nothing found; " if table.is_decided else ""
    text = f"{found}looked at {', '.join(known)}"
    return text + (f"; the log lacks {', '.join(lacking)}" if lacking else "")


def main():
    words = parser(__doc__)
    words.add_argument("path")
    words.add_argument("--run", metavar="NAME", help="which one, of several runs")
    words.add_argument("--fail-on", metavar="NAMES", default="", help="any, or parts of why.md")
    args = words.parse_args()
    wanted = {*filter(None, args.fail_on.split(","))}
    if unknown := wanted - {"any", *PARTS}:
        fail(f"--fail-on {unknown.pop()}: has to be any, or some of {','.join(PARTS)}")
    run = read(args.path, args.run)
    found = check(run)
    for text in (described(run), *(found or [summary(run)]), decided(run)):
        print(text.replace("(#", "(docs/why.md#"))
    if trainers.has_completions(args.path):
        print(f"to read its completions: python -m report.page {args.path}")
    named = parts(found)
    if "any" in wanted and named or named & wanted:
        raise SystemExit(1)


if __name__ == "__main__":
    start(main)
