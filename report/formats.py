"""Read the log of any trainer into one shape, a Run: a folder of ours, TRL's trainer_state.json,
the JSON lines of verl, ms-swift, prime-rl and others, CSV as W&B exports it, and TensorBoard's
event files. docs/why.md says which names are read."""
import csv
import json
import math
import re
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import common
from plumbing import read_config
from report.logs import opened, read_log, records


class Run(NamedTuple):
    trainer: str            # "ours", or whose names the log has
    flags: SimpleNamespace  # of a run of ours, otherwise empty
    records: list           # a dict for each step, in order: quantity or evaluation -> number
    names: dict             # quantity -> its name in the log
    sets: list              # the names of the evaluations
    samples: list           # of a run of ours
    source: str             # the file or folder, and the run in it that was chosen
    components: list = []   # the names of rewards for right answers, of several that are added
    truncated: list = []    # the names of fractions of completions that an evaluation truncates


# ---- names -----------------------------------------------------------------------------------

# What trainers call the quantities, which have TRL's names here. The first name that the log has is
# used; names joined by " + " are added. PREFIXES are removed before. Quantities without a name in
# TRL:
#   old_kl        KL between the policy and the one whose ratio it is, 0 with one update per batch
#   sampler_kl    KL between the sampler and the trainer, as they compute the same policy
#   probability_difference     mean difference of the probabilities of sampler and trainer
#   signal        how much the completions of a group differ: an advantage, or the std in groups
#   filtered      is logged if groups without signal are replaced, so the reward is of the others
#   after_penalties            the reward, less penalties such as that for the KL
#   lowest_advantage           of a batch: below 0 if rewards have a baseline
#   staleness     how many updates the policy is ahead of the one that sampled
#   length/right, length/wrong      the mean lengths of right and of wrong completions
#   calls         of tools, or turns, for each completion
#   length/thinking            the mean length of thoughts
#   tokens/loss, tokens/model, tokens/tool, tokens/all     how many are in the loss, who wrote them
#   kl_coef       the weight of the KL to the reference
AGENT = "[^/]+"         # of prime-rl, which logs all its samples, and those that it trains on
NAMES = {
    "TRL": {name: (name,) for name in (
        "reward", "reward_std", "frac_reward_zero_std", "accuracy", "loss", "grad_norm",
        "learning_rate", "entropy", "kl", "completions/mean_length", "completions/clipped_ratio",
        "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max",
        "sampling/importance_sampling_ratio/mean", "rewards/chosen", "rewards/margins",
        "rewards/accuracies", "teacher_kl", "explained_variance", "tools/failure_frequency",
        "eval_loss")} | {
            "reward": ("reward", "objective/scores"), "entropy": ("entropy", "policy/entropy_avg"),
            "old_kl": ("policy/approxkl_avg",), "learning_rate": ("learning_rate", "lr"),
            "after_penalties": ("objective/rlhf_reward",),
            "clip_ratio/region_mean": ("clip_ratio/region_mean", "policy/clipfrac_avg"),
            "calls": ("tools/call_frequency",),
            "completions/mean_length": ("completions/mean_length", "completion_length"),
            "value_loss": ("value_loss", "loss/value_avg")},
    "verl": {
        "reward": ("critic/score/mean", "critic/rewards/mean"), "loss": ("actor/pg_loss",),
        "signal": ("critic/advantages/max",), "grad_norm": ("actor/grad_norm",),
        "learning_rate": ("actor/lr",), "entropy": ("actor/entropy", "actor/entropy_loss"),
        "kl": ("actor/kl_loss", "actor/reward_kl_penalty"), "old_kl": ("actor/ppo_kl",),
        "completions/mean_length": ("response_length/mean",),
        "completions/clipped_ratio": ("response_length/clip_ratio",),
        "calls": ("tool_call_counts/mean", "num_turns/mean"),
        "prompts/clipped_ratio": ("prompt_length/clip_ratio",),
        "prompts/mean_length": ("prompt_length/mean",),
        "probability_difference": ("training/rollout_probs_diff_mean",),
        "sampler_kl": ("rollout_corr/k3_kl", "rollout_corr/kl"),
        "after_penalties": ("critic/rewards/mean",), "value_loss": ("critic/vf_loss",),
        "lowest_advantage": ("critic/advantages/min",),
        "explained_variance": ("critic/vf_explained_var",),
        "clip_ratio/region_mean": ("actor/pg_clipfrac",),
        "filtered": ("num_gen_batches", "training/filter_groups/evicted_samples")},
    "OpenRLHF": {
        "reward": ("reward",), "signal": ("group_reward_std",), "loss": ("policy_loss",),
        "grad_norm": ("actor_grad_norm",), "learning_rate": ("actor_lr",),
        "entropy": ("entropy_loss",), "kl": ("kl",), "old_kl": ("ppo_kl",),
        "kl_coef": ("kl_coef",), "sampler_kl": ("vllm_kl",),
        "completions/mean_length": ("response_length",),
        "completions/clipped_ratio": ("truncated", "response_clip_ratio"),
        "clip_ratio/region_mean": ("ppo_clip_ratio",), "value_loss": ("critic_loss",),
        "filtered": ("dynamic_filtering_pass_rate",)},
    "SkyRL": {
        "reward": ("reward/avg_raw_reward", "loss/avg_final_rewards"),
        "loss": ("policy/policy_loss", "policy/final_loss"),
        "signal": ("loss/avg_raw_advantages_abs",),
        "grad_norm": ("policy/grad_norm", "policy/raw_grad_norm"),
        "learning_rate": ("policy/policy_lr",), "entropy": ("policy/policy_entropy",),
        "kl": ("policy/policy_kl", "loss/avg_kl"), "staleness": ("async/staleness_mean",),
        "clip_ratio/region_mean": ("policy/ppo_clip_ratio",),
        "completions/mean_length": ("generate/avg_num_tokens",),
        "length/right": ("generate/avg_tokens_non_zero_rewards",),
        "length/wrong": ("generate/avg_tokens_zero_rewards",),
        "sampling/sampling_logp_difference/mean": (
            "policy/rollout_train_logprobs_abs_diff_mean",)},
    "prime-rl": {
        "reward": (f"agg/all/{AGENT}/reward/mean", "reward/mean", "reward/all/mean",
                   "reward/reward"),
        "frac_reward_zero_std": (f"agg/all/{AGENT}/solved_none + agg/all/{AGENT}/solved_all",
                                 "reward/solve_none + reward/solve_all",
                                 "batch/solve_none + batch/solve_all",
                                 "solve_none/all + solve_all/all",
                                 "solve_none/mean + solve_all/mean"),
        "completions/clipped_ratio": (f"agg/all/{AGENT}/is_truncated/mean", "is_truncated/mean",
                                      "is_truncated/all/mean"),
        "completions/mean_length": (f"agg/all/{AGENT}/num_output_tokens/mean",
                                    "completion_len/all/mean", "seq_len/all/mean"),
        "loss": ("loss/mean", "loss/all/mean"), "grad_norm": ("optim/grad_norm",),
        "learning_rate": ("optim/lr",),
        "entropy": ("entropy/all/mean", "entropy/mean"),
        "staleness": ("batch/off_policy_level/mean", "off_policy_level/all/mean",
                      "off_policy_level/mean"),
        "sampler_kl": ("mismatch_kl/all/mean", "mismatch_kl/mean")},
    "slime": {
        "reward": ("rollout/raw_reward",), "loss": ("pg_loss",), "grad_norm": ("grad_norm",),
        "entropy": ("entropy_loss",), "kl": ("kl_loss",), "old_kl": ("ppo_kl",),
        "clip_ratio/region_mean": ("pg_clipfrac",),
        "completions/mean_length": ("rollout/response_len/mean",),
        "completions/clipped_ratio": ("rollout/truncated_ratio",),
        "calls": ("rollout/num_turns/mean",),
        "tools/failure_frequency": ("rollout/tool_error_ratio",),
        "sampling/sampling_logp_difference/mean": ("train_rollout_logprob_abs_diff",)},
    "NeMo-RL": {
        "reward": ("reward",), "loss": ("loss",), "grad_norm": ("grad_norm",),
        "frac_reward_zero_std": ("baseline_reward/pct_0 + baseline_reward/pct_1",),
        "learning_rate": ("lr",), "entropy": ("approx_entropy",), "kl": ("kl_penalty",),
        "completions/mean_length": ("mean_gen_tokens_per_sample",),
        "probability_ratio": ("token_mult_prob_error",), "sampler_kl": ("gen_kl_error",)},
    "AReaL": {
        "reward": ("task_reward/avg",), "loss": ("update/actor_loss/avg", "update/loss/avg"),
        "grad_norm": ("update/grad_norm",), "learning_rate": ("update/lr",),
        "entropy": ("update/entropy/avg",), "completions/mean_length": ("seq_len/avg",),
        "completions/clipped_ratio": ("no_eos_ratios/avg",),
        "clip_ratio/region_mean": ("update/clip_ratio/avg",),
        "prompts/mean_length": ("prompt_len/avg",),
        "length/right": ("correct_seq_len/avg",), "length/wrong": ("incorrect_seq_len/avg",),
        "staleness": ("update/version_stats/sample_staleness_theta_avg",
                      "rollout/staleness/avg"),
        "sampler_kl": ("update/behave_kl/avg", "update/behave_approx_kl/avg")},
    "ROLL": {
        "reward": ("critic/score/mean",), "loss": ("actor/pg_loss",),
        "grad_norm": ("actor_train/grad_norm",), "learning_rate": ("actor/lr",),
        "entropy": ("critic/entropy/mean",), "kl": ("actor/kl_loss",),
        "old_kl": ("actor/approxkl",), "clip_ratio/region_mean": ("actor/ppo_ratio_clipfrac",),
        "completions/mean_length": ("tokens/response_length/mean",),
        "prompts/mean_length": ("tokens/prompt_length/mean",)},
    "torchforge": {
        "reward": ("reward/evaluate_response/avg_total_reward",),
        "loss": ("grpo_loss/total_loss",), "kl": ("grpo_loss/kl_divergence_mean",),
        "learning_rate": ("rl_trainer/learning_rate",),
        "completions/mean_length": ("generator/generate/avg_tokens_generated",),
        "staleness": ("buffer/sample/avg_sampled_policy_age",)}}
NAMES["ms-swift"] = NAMES["TRL"] | {
    "entropy": ("entropy/mean", "entropy"),
    "sampler_kl": ("rollout_correction/k3_kl", "rollout_correction/kl")}
PREFIXES = re.compile("^(?:train|(?:ppo|grpo)_actor)/")         # the second is AReaL's
NAMES["an own loop"] = {}              # has no names, but the words of OWN
DIFFERENCE = "sampling/sampling_logp_difference/mean"       # of which an own loop logs both sides
LOWEST_LOGP = -5.0                      # that a mean over sampled tokens may have
FEWEST = 5                              # tokens of a completion
STEP = ("step", "training/global_step", "trainer/global_step", "global_step/max_steps",
        "global_step", "rollout/step", "Step", "_step", "iteration", "iter", "it",
        "update")
# In an own loop, the words of a name, less those that say how it was averaged, show what it is
FILLER = {"mean", "avg", "average", "train", "env", "batch", "all", "raw", "policy", "pg", "ep",
          "episode", "frac", "fraction", "share", "pct", "percent", "rate", "per", "to", "vs",
          "abs", "in"}
SAME_WORDS = {"log_?prob(s|abilities)?|logps": "logp", "abs_?diff|difference|mismatch|gap": "diff",
              "learning_?rate": "lr", "length": "len", "rewards|rew": "reward", "returns": "return",
              "accuracy": "acc", "entropy|ent": "h", "gradnorm": "grad_norm",
              "reference|initial|init|base|sft": "ref", "errors|failures?|failed": "error"}
SAMPLERS = "sampler", "rollout", "vllm", "inference", "engine"
TRAINERS = "trainer", "learner", "model", "actor"
PAIRS = [f"{one} {other}" for one in SAMPLERS for other in TRAINERS]
OWN = {"reward": ("reward", "total reward", "rollout reward", "rm score", "reward score", "score",
                  "scores", "return", "neg cost", "r", "acc", "success", "solved", "solve",
                  "correct", "win", "pass", "pass 1", "pass at 1", "passed", "tests passed"),
       "accuracy": ("exact match", "em", "acc", "correct", "success", "solved"),
       "sampling/sampling_logp_difference/mean": (
           *(f"logp diff {whose}" for whose in (*PAIRS, *SAMPLERS, *TRAINERS)),
           *(f"logp {one} - logp {other}" for one in SAMPLERS for other in (
               *TRAINERS, "", *(f"{trainer} before update" for trainer in TRAINERS)))),
       "sampler_kl": ("kl diff", "kl sampler", "kl vllm", *(f"kl {pair}" for pair in PAIRS)),
       "staleness": ("staleness", "lag", "version lag", "trainer version - rollout version",
                     "version - rollout version", "trainer version - sampler version"),
       "reward_std": ("reward std", "r std", "group std"),
       "frac_reward_zero_std": ("zero std", *(f"{word} groups" for word in (
           "zero std", "zero variance", "equal", "same", "dead", "degenerate", "no signal"))),
       "signal": ("mixed groups",),
       "loss": ("loss", "pl"), "grad_norm": ("grad norm", "gnorm", "gn", "grad norm clip"),
       "learning_rate": ("lr",), "entropy": ("h",), "kl": ("kl", "kl ref", "kl loss", "kl div"),
       "kl_coef": ("kl coef", "kl coefficient", "kl weight", "kl beta", "beta"),
       "old_kl": ("approx kl", "kl old", "ppo kl", "kl update", "kl before update"),
       "clip_ratio/region_mean": ("clip", "clipfrac"),
       "value_loss": ("value loss", "vf loss", "critic loss"),
       "explained_variance": ("explained var", "explained variance", "ev"),
       "completions/mean_length": (
           "len", "total len", "gen len", "response len", "resp len", "completion len", "ntok",
           "tokens", "gen tokens", "resp tokens", "response tokens", "completion tokens"),
       "completions/clipped_ratio": ("truncated", "truncation", "clipped ratio", "cut",
                                     "hit max tokens", "hit max len"),
       "prompts/mean_length": ("prompt len",),
       "length/right": ("len correct", "len right"),
       "length/wrong": ("len wrong", "len incorrect"),
       "length/thinking": ("thinking len", "thought len", "think len", "cot len",
                           "thinking tokens", "thought tokens", "think tokens", "cot tokens"),
       "calls": ("tool calls", "calls", "turns", "num turns"),
       "tokens/loss": ("tokens in loss", "loss tokens"),
       "tokens/tool": ("tool tokens", "tool output tokens"),
       "tokens/model": ("assistant tokens", "model tokens"),
       "tokens/all": ("response total tokens",),
       "tools/failure_frequency": ("tool error", "tools error", "tool call error",
                                   "tool calls error", "tool call parse error")}
NO_MEAN = {"std", "var", "max", "min", "time", "timeout", "sec", "seconds", "s", "ms", "latency",
           "error", "count", "n", "num", "calls", "zero"}       # what else is logged about a reward
NO_REWARD = NO_MEAN | {"format", "len", "penalty", "bonus", "kl", "loss", "h", "diff", "chosen",
                       "rejected", "margin", "margins", "model", "baseline", "ref", "scale", "coef",
                       "weight", "threshold", "target", "clip", "token", "tokens"}
FRACTIONS = ("accuracy", "frac_reward_zero_std", "completions/clipped_ratio",
             "tools/failure_frequency", "clip_ratio/region_mean")       # others are counts
PERCENT = re.compile("(?<![a-z])(?:pct|percent)(?![a-z])")
THOUSANDS = re.compile(r"-?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?")
WHEN = ("_timestamp", "timestamp")              # seconds at which a record was written
WHOSE = ("run", "run_name", "run_id", "Name", "rank")       # name the run of a row or a record
# Metrics on held-out problems; words for a score, or for problems, of which the name of a score has
# one; and words for what is no score. pass@8 may fall while pass@1 rises.
HELD_OUT = re.compile("(?:eval|val|val-core|validation|test|held_?out|dev)[/_].+")
AT_END = re.compile("(?!rewards?/).+[/_](?:eval|val|validation|test|held_?out)")     # its own
SCORE = re.compile(
    r"(?<![a-z])(?:acc(?![a-z])|em(?![a-z])|elo(?![a-z])|f1|win(?!d)|arc(?!h)|swe|amc|bbh|code|"
    r"easy|medium|hard)|accura|correct|reward|return|score|solve|success|exact|complet|greedy|"
    r"(?:mean|avg|maj)@|pass(?:ed|_rate|_?@?_?1(?!\d))|bleu|rouge|math|aime|gsm|olympiad|minerva|"
    r"mmlu|gpqa|glue|klue|humaneval|mbpp|bench|ifeval|countdown")
NO_SCORE = re.compile(
    r"(?<![a-z])(?:loss|lose|nll|ppl|bpb|perplexity|cost|regret|distance|gap|kl|len|length|time|"
    r"sec|second|ms|duration|latency|timeout|std|var|max|min|entropy|token|word|char|num|n|count|"
    r"size|sample|sampling|logp|logprob|logit|clip|clipped|truncated|truncation|positive|epoch|"
    r"step|version|turn|call|error|fail|failed|failure|wrong|incorrect|mistake|issue|unsolved|"
    r"unparsed|invalid|violation|hallucination|toxicity|refusal|repetition|no_answer|overlong|"
    r"attack|hack|wer|cer|r?mse|ece|brier|grad|seed|lr|memory|temp|temperature|top_[pk]|budget|"
    r"difficulty|thinking|throughput|advantage|lag|staleness)(?:e?s)?(?![a-z])|runtime|logps|"
    r"clipfrac|rewards/(?!accuracies|margins)|(?<![a-z])(?:best|pass)(?:_at_|@)?(?!1$|1/)\d|"
    r"/(?:p\d+|ratio)$|^t_")
CUT = re.compile("(?<!non_)(?<!not_)(?<!un)truncated|clip_ratio|clipped_ratio|no_eos")
NO_SHARE = re.compile("acc|score|reward|num_|token|length|correct")
OURS = re.compile("eval/greedy(?:_return|_all_tests)?(?:/.*)?")
# Of several rewards, those for right answers; what is left over rewards how they are written
COMPONENT = re.compile(r"rewards/(?!(?:chosen|rejected|margins|accuracies)$)[^/]+(?:/mean)?|"
                       r"reward/evaluate_response/avg_(?!total_)\w+|(?:reward|r)[/_]\w+")
OF_ANSWERS = re.compile("accura|correct|answer|solution|solved|success|outcome|exact"
                        "|exec|unit_?test|verif|math|(?<![a-z])(?:acc|em|pass)(?![a-z])")
FORM = re.compile("format|length|penalty|tag|bonus|short|brevity|concise")


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def matching(pattern, names):
    """Find the name that fits a pattern of NAMES. -> str or None"""
    if pattern in names:
        return pattern
    fits = re.compile(pattern).fullmatch if AGENT in pattern else lambda name: False
    return next(filter(fits, names), None)


def words_of(name):
    """Take the name of a metric apart. -> sorted words, less FILLER"""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    for forms, word in SAME_WORDS.items():
        name = re.sub(f"(?<![a-z])(?:{forms})(?![a-z])", word, name)
    words = re.split(r"[^a-z0-9]+", name)
    return tuple(sorted(word for word in words if word and word not in FILLER))


def own_names_in(largest):
    """Find which words of OWN the names of an own loop have, each with its largest value. A name
    that is subtracted from another one has a minus in front. -> {quantity: names that are added}"""
    words, used = {}, {}
    for name in sorted(largest, key=len):       # the plainest of those that say the same
        if not is_score(name, "an own loop") and name != "h":   # hours; the entropy is H
            words.setdefault(words_of(name.removeprefix("rollout/")), name)
    for quantity, forms in OWN.items():
        parts = [[*map(words_of, form.split(" - "))] for form in forms]
        names = [[words[key] for key in keys] for keys in parts if {*keys} <= words.keys()]
        names = [some for some in names if quantity not in FRACTIONS or largest[some[0]] <= (
            100 if PERCENT.search(some[0]) else 1)]
        if names and names[0] not in used.values():     # an accuracy may be the reward
            used[quantity] = [names[0][0], *(f"-{name}" for name in names[0][1:])]
    rewards = [name for key, name in words.items()
               if {"reward", "score"} & {*key} and NO_REWARD.isdisjoint(key)]
    right = [name for name in rewards if for_answers(name)]
    for some in (rewards, right):
        if "reward" not in used and len(some) == 1:
            used["reward"] = some
    return used


def names_in(found, trainer):
    """Find which names of a trainer a log has. -> {quantity: names that are added}"""
    seen = {}                           # names, and their largest values
    for name, x in ((name, x) for one in found for name, x in one.items() if is_number(x)):
        seen[name] = max(seen.get(name, -math.inf), x)
    if trainer == "an own loop":
        return own_names_in(seen)
    used = {}
    for quantity, patterns in NAMES[trainer].items():
        for pattern in patterns:
            names = [matching(part, seen) for part in pattern.split(" + ")]
            if None not in names:
                used[quantity] = names
                break
    return used


def recognized(found):
    """Find whose names a log has: those of the trainer with the most names in it, the reward's
    among them. -> trainer, {quantity: names}"""
    used = {trainer: names_in(found, trainer) for trainer in NAMES}
    if any("global_step/max_steps" in one for one in found):
        return "ms-swift", used["ms-swift"]
    trainer = max(used, key=lambda name: (bool(rewards_of(used[name])), len(used[name])))
    if trainer == "TRL" and len(used["an own loop"]) == len(used["TRL"]):
        trainer = "an own loop"         # any loop has these words
    return trainer, used[trainer]


def is_score(name, trainer):
    """Whether a metric is a score on held-out problems."""
    if trainer == "ours":
        return OURS.fullmatch(name) is not None
    is_own = trainer == "an own loop" and AT_END.fullmatch(name) is not None
    is_held_out = is_own or HELD_OUT.fullmatch(name) is not None
    return is_held_out and bool(SCORE.search(name.lower())) and NO_SCORE.search(name) is None


def for_answers(name):
    """Whether a reward is for right answers, as its name says."""
    return bool(OF_ANSWERS.search(name.lower())) and not FORM.search(name.lower())


def rewards_for_answers(found):
    """Find the rewards for right answers, if several rewards are added. -> list of names"""
    names = {name for one in found for name, value in one.items()
             if is_number(value) and COMPONENT.fullmatch(name)
             and NO_MEAN.isdisjoint(words_of(name))}
    return sorted(name for name in names if len(names) > 1 and for_answers(name))


def as_fractions(found, goals):
    """Divide what a log has in percent, as its names and a value above 1 say, by 100. Without such
    a value, nobody knows the unit, so only 0 and the rewards, the goals, are kept. -> dicts"""
    named = [(name, x) for one in found for name, x in one.items()
             if is_number(x) and PERCENT.search(name)]
    names = {name for name, _ in named}
    if any(abs(x) > 1 for _, x in named):
        return [{name: x / 100 if name in names and is_number(x) else x for name, x in one.items()}
                for one in found]
    left_out = {name for name, x in named if x != 0} - {*goals}
    return [{name: x for name, x in one.items() if name not in left_out} for one in found]


def are_sums(found, used):
    """Whether the log-probabilities of an own loop are sums over completions, because one is lower
    than a mean can be, or they are much larger than the entropy of a token."""
    name, entropy = used[DIFFERENCE][0], (used.get("entropy") or [""])[0]
    logps = [one[name] for one in found if is_number(one.get(name))]
    both = [one for one in found if is_number(one.get(name)) and is_number(one.get(entropy))]
    surprise, expected = (sum(abs(one[key]) for one in both) for key in (name, entropy))
    return min(logps) < LOWEST_LOGP or surprise > FEWEST * expected > 0


def quantities(record, used, others, is_sum):
    """Give the metrics of a record the names of their quantities. others: names of metrics that
    keep theirs. is_sum: of log-probabilities. -> dict"""
    plain = {name: record[name] for name in others if is_number(record.get(name))}
    if (step := step_of(record)) is not None:
        plain["step"] = step
    for quantity, names in used.items():
        values = [record.get(name.removeprefix("-")) for name in names]
        if all(map(is_number, values)):
            plain[quantity] = float(sum(-x if name.startswith("-") else x
                                        for name, x in zip(names, values)))
    if DIFFERENCE in plain and len(used[DIFFERENCE]) == 2:
        tokens = plain.get("completions/mean_length") if is_sum else 1
        value = abs(plain.pop(DIFFERENCE))
        if tokens:
            plain[DIFFERENCE] = value / tokens
    return plain


# ---- one reader for each format --------------------------------------------------------------

def by_run(found):
    """Group records by the run, or the process, that they name. -> {run: dicts}"""
    runs = {}
    for one in found:
        name = next((one[key] for key in WHOSE if one.get(key) not in (None, "")), "")
        value = number(name)
        is_metric = isinstance(value, float) and value % 1 != 0
        runs.setdefault("" if is_metric else str(name), []).append(one)
    named = [*runs.keys() - {""}]
    return {named[0]: found} if len(named) == 1 else runs


def of_lines(path):
    """Read JSON lines. Those of verl are {"step": 1, "data": {...}}. -> {run: dicts}"""
    return by_run([one | one["data"] if isinstance(one.get("data"), dict) else one
                   for one in records(path, parse=json.loads)])


def of_json(path):
    """Read trainer_state.json, or a list of records. -> {run: dicts}"""
    with opened(path, encoding="utf-8-sig") as file:
        content = json.load(file)
    if isinstance(content, dict):
        content = content.get("log_history", [])
    return by_run([one for one in content if isinstance(one, dict)])


def numbered(head):
    """Make the headings of a table differ: those that repeat belong to a first, a second run.
    -> list of "RUN NUMBER - METRIC", or of headings unchanged"""
    names = []
    for i, name in enumerate(head):
        if name.strip() and head.count(name) > 1:
            run, _, metric = name.rpartition(" - ")
            name = f"{run} {head[:i + 1].count(name)} - {metric}".strip()
        names.append(name)
    return names


def of_table(path):
    """Read a table whose cells are separated by commas, semicolons or tabs; numbers may have
    decimal commas. W&B calls its columns "RUN - METRIC", and adds the smallest and the largest
    value of an interval. -> {run: dicts}"""
    with opened(path, encoding="utf-8-sig", newline="", errors="replace") as file:
        head = file.readline()
        separator = max(",;\t", key=head.count)
        file.seek(0)
        head, *rows = csv.reader(file, delimiter=separator)
    head = numbered(head)
    runs, plain = {}, []
    for row in filter(None, rows):
        shared, own = {}, {}
        for name, cell in zip(head, row):
            run, _, metric = name.rpartition(" - ")
            if not metric.endswith(("__MIN", "__MAX")):
                if separator == "," and THOUSANDS.fullmatch(cell):
                    cell = cell.replace(",", "")
                cell = re.sub(r"^(-?\d+),(\d+)", r"\1.\2", cell)
                (own.setdefault(run, {}) if run else shared)[metric] = cell
        for run, cells in own.items():
            runs.setdefault(run, []).append(shared | cells)
        plain.append(shared)
    return runs or by_run(plain)


def of_events(files):
    """Read event files with TensorBoard, which has to be installed, in the order of the times at
    which the events were written. -> {"": dicts}"""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        common.fail(f"{files[0]}: event files need a package: pip install tensorboard")
    found = []
    for file in files:
        events = EventAccumulator(str(file), size_guidance={"scalars": 0},
                                  purge_orphaned_data=False)
        events.Reload()
        found += [(event.wall_time, {"step": event.step, name: event.value})
                  for name in events.Tags()["scalars"] for event in events.Scalars(name)]
    return {"": [one for _, one in sorted(found, key=lambda pair: pair[0])]}


def content_of(files):
    """Read a file, or the event files of a run. The name shows the format. -> {run: dicts}"""
    path = files[0]
    if path.name.startswith("events.out.tfevents"):
        return of_events(files)
    ending = Path(path.stem if path.suffix == ".gz" else path.name).suffix
    if ending in (".csv", ".tsv"):
        return of_table(path)
    return of_json(path) if ending == ".json" else of_lines(path)


def logs_in(folder):
    """Find the logs in a folder. Of a run with several, the one with all steps counts: TRL also
    writes events, ms-swift also trainer_state.json. -> {folder of a run, relative: files}"""
    logs = {}
    for path in sorted(folder.rglob("events.out.tfevents*")):
        home = path.parent
        if home.parent.name == "runs" and folder in home.parents[1:]:   # output/runs/DATE_HOST
            home = home.parents[1]
        logs.setdefault(home, []).append(path)
    for path in sorted(folder.rglob("trainer_state.json"), key=checkpoint):
        is_checkpoint = path.parent.name.startswith("checkpoint-") and path.parent != folder
        logs[path.parents[1] if is_checkpoint else path.parent] = [path]
    for name in ("logging.jsonl", "metrics.jsonl"):
        logs |= {path.parent: [path] for path in folder.rglob(name)}
    if not logs:
        logs = {path: [path] for ending in ("jsonl", "csv", "tsv") for packed in ("", ".gz")
                for path in folder.rglob(f"*.{ending}{packed}")}
    return {home.relative_to(folder).as_posix(): files for home, files in sorted(logs.items())}


def checkpoint(path):
    """The step of a trainer_state.json's checkpoint; the one at the end of the run comes last."""
    number = re.fullmatch(r"checkpoint-(\d+)", path.parent.name)
    return int(number[1]) if number else math.inf


# ---- from the content to a run ---------------------------------------------------------------

def number(value):
    """Convert a cell or a value. nan and inf are numbers, whatever a format calls them. The step of
    ms-swift is "12/60". -> float, or the value itself"""
    if isinstance(value, str):
        value = value.partition("/")[0] if re.fullmatch(r"\d+/\d+", value) else value
        try:
            return float(value)
        except ValueError:
            return value
    return value


def tidy(record):
    """Remove the prefixes of names, and convert what is a number. -> dict"""
    return {PREFIXES.sub("", str(name).strip()): number(value) for name, value in record.items()}


def step_of(record):
    return next((record[name] for name in STEP
                 if is_number(record.get(name)) and record[name] == record[name]), None)


def separated(found, names):
    """Separate the runs that follow one another in a log. If the steps of the rewards, which have
    these names, go back to the first one, another run begins; if they go back less, the run was
    resumed, or the log is in another order. -> list of lists of dicts"""
    parts, seen = [[]], []
    for record in found:
        step = step_of(record)
        if step is not None and any(is_number(record.get(name)) for name in names):
            if len(seen) > 1 and step <= seen[0] < seen[1]:
                scores = []             # of the base, which the run that begins has written before
                while (step_of(parts[-1][-1]) or 0) < seen[-1]:
                    scores.insert(0, parts[-1].pop())
                parts.append(scores)
                seen = []
            seen.append(step)
        parts[-1].append(record)
    return parts


def is_inner(found, names, parts):
    """Whether the step of the rewards, which have these names, counts within an iteration or epoch:
    it begins again, or stays, while another name of a step never goes back."""
    found = [one for one in found if any(is_number(one.get(name)) for name in names)]
    for name in (*STEP, "epoch") if len(parts) > 1 or len({*map(step_of, found)}) == 1 else ():
        places = [one.get(name) for one in found]
        if all(map(is_number, places)) and sorted(places) == places and places[0] < places[-1]:
            return True
    return False


def merged(found):
    """Join the records of a step, which some programs write in parts; what was written later
    counts. Records without a step stay as they are. -> list of dicts, in the order of the steps"""
    by_step, before = {}, float("-inf")
    for place, record in enumerate(found, start=1):
        step = step_of(record)
        before = before if step is None else step
        by_step.setdefault((before, place if step is None else 0), {}).update(
            {name: value for name, value in record.items() if value not in (None, "")})
    return [by_step[step] for step in sorted(by_step)]


def chosen(runs, name, where):
    """Choose the run with a name. Exits with one line if there are several and none is named, or if
    there is no such run. -> name, run"""
    if name is None and len(runs) == 1:
        return next(iter(runs.items()))
    if name not in runs:
        several = ", ".join(list(runs)[:9]) + (", ..." if len(runs) > 9 else "")
        common.fail(f"{where}: contains {len(runs)} runs; choose one with --run: {several}")
    return name, runs[name]


def runs_of(content):
    """List the runs in what a reader returns: those with rewards. -> {name: dicts}"""
    runs = {}
    for name, found in content.items():
        found = [tidy(one) for one in found]
        for when in WHEN:
            if all(is_number(one.get(when)) for one in found):
                found.sort(key=lambda one: one[when])
        names = rewards_of(recognized(found)[1])
        parts = separated(found, names)
        if is_inner(found, names, parts):
            parts = [[one | {"step": place} for place, one in enumerate(found)]]
        for i, part in enumerate(parts, start=1):
            if rewards_of(recognized(part)[1]):
                runs[name if len(parts) == 1 else f"{name} {i}".strip()] = part
    return runs


def rewards_of(used):
    """The names of the rewards of a log, or of what DPO logs instead. -> list, empty without any"""
    return used.get("reward") or used.get("rewards/margins") or []


def is_ours(path):
    """Whether a folder, or its metrics.jsonl, is a run of one of our scripts."""
    folder = path if path.is_dir() else path.parent
    config = folder / "config.json"
    return folder / "metrics.jsonl" in (path, *folder.glob("metrics.jsonl")) and (
        config.is_file() and '"script"' in config.read_text("utf-8", "replace"))


def of_ours(path):
    """Read a run of one of our scripts. -> Run"""
    folder = path if path.is_dir() else path.parent
    flags = SimpleNamespace(**read_config(folder)[1])
    found = [*records(folder / "metrics.jsonl", "step", parse=json.loads)]
    names = {name for one in found for name, value in one.items() if is_number(value)}
    return Run("ours", flags, found, {name: name for name in NAMES["TRL"] if name in names},
               sorted(name for name in names if is_score(name, "ours")),
               read_log(folder, "samples", "completions"), str(path))


def located(path, run):
    """Find the files of a run in a folder, which may contain several. -> files, name or None"""
    if path.is_dir() and (path / "metrics.jsonl").is_file():
        return [path / "metrics.jsonl"], None
    logs = logs_in(path) if path.is_dir() else {".": [path]}
    if not logs:
        common.fail(f"{path}: has no metrics.jsonl, trainer_state.json or event file")
    if len(logs) == 1:
        return next(iter(logs.values())), None
    name, files = chosen(logs, run, path)
    return files, name


def read(path, run=None):
    """Read a run. run: which one, if there are several. -> Run. Exits with one line if there is no
    log, none that can be read, or several runs of which none was chosen"""
    path = Path(path)
    if is_ours(path):
        return of_ours(path)
    files, name = located(path, run)
    where = str(path) if name is None else f"{path}, run {name}"
    if is_ours(files[0]):
        return of_ours(files[0])
    if not files[0].exists():
        common.fail(f"{path}: does not exist")
    try:
        runs = runs_of(content_of(files))
    except (AttributeError, EOFError, OSError, TypeError, ValueError, csv.Error,
            zlib.error) as error:
        common.fail(f"{where}: is not a log that can be read: {str(error)[:100]!r}")
    if not runs:
        common.fail(f"{where}: no line has a reward, under a name that docs/why.md lists")
    name, found = chosen(runs, run if name is None else None, where)
    trainer, used = recognized(found)
    found = as_fractions(merged(found), rewards_of(used))
    sets = sorted({name for one in found for name, value in one.items()
                   if is_number(value) and is_score(name, trainer)})
    right = rewards_for_answers(found)
    cut = sorted({name for one in found for name, value in one.items()
                  if is_number(value) and HELD_OUT.fullmatch(name) and CUT.search(name)
                  and not NO_SHARE.search(name)})
    is_sum = len(used.get(DIFFERENCE, ())) == 2 and are_sums(found, used)
    return Run(trainer, SimpleNamespace(),
               [quantities(one, used, sets + right + cut, is_sum) for one in found],
               {quantity: " + ".join(names).replace("+ -", "- ")
                for quantity, names in used.items()}, sets, [],
               f"{where}, run {name}" if name else where, right, cut)
