"""Bugs: what ten mistakes look like from outside.

Claim. How the code does it decides as much as the algorithm (Engstrom and others, 2005.12729), and
mistakes in it are silent, as everybody says who has looked for one: nothing crashes, and the reward
still rises.

Prediction. The reward alone tells of two: with the advantage of the row before it falls, because
those of a group add up to 0, so that the neighbour's has more often the other sign; with old
log-probabilities that are not detached it stays. The KL is 0 where the reference is the policy.
Without the EOS completions are one token shorter, with a cold sampler the first rewards are higher,
with tiled prompts nearly all groups have signal, and k3 upside down pulls more, so that the KL is
lower. Means of means, the std of the batch and a KL that counts twice are seen nowhere.

Method. Each mistake is a replacement in the text of grpo.py, in a copy beside common.py. All runs
begin with one base and have the flags --loss_type dapo --beta 0.05 --num_iterations 2: without them
some mistakes would do nothing. A metric tells of a mistake if with every seed it lies outside the
span of the right runs, widened by its own width at both ends; that is asked of the mean of the
first five steps, and of that of the last five. Right runs with other seeds show how often this is a
false alarm. The tests that are named fail with the mistake, and pass without it.
"""
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from lab.entry import NOT_SHOWN, SHOWN, Claim, mean_and_spread, mean_curve, run_all
from tools.runs import ROOT, rounded, run

SEEDS = [0, 1, 2]
STEPS = 20
EVALUATION = ["--num_eval_problems", 1, "--num_eval_samples", 1, "--eval_steps", 1000]
FLAGS = ["--loss_type", "dapo", "--beta", 0.05, "--num_iterations", 2, "--num_prompts", 16,
         "--micro_batch_size", 16, "--max_steps", STEPS, "--stop_at", 2, *EVALUATION]
METRICS = {"reward": "reward", "signal": "signal", "length": "completions/mean_length",
           "entropy": "entropy", "KL": "kl", "clip": "clip_ratio/region_mean",
           "log ratio": "max_log_ratio", "gradient": "grad_norm"}
WINDOWS = {"first 5 steps": slice(5), "last 5 steps": slice(-5, None)}
RIGHT = "none"
CONTROL = "none, other seeds"


class Mistake(NamedTuple):
    name: str
    words: str
    old: str            # text of grpo.py
    new: str
    test: str           # fails with it


TEXT = """
k3 upside down
the ratio in the estimate of the KL is pi / pi_ref
torch.expm1(-x) + x
torch.expm1(x) - x
test_kl.py::test_k1_and_k3_average_to_the_kl_of_the_policy_from_the_reference_and_k2_does_not

no EOS in the mask
the token that ends a completion is not trained
return tokens, mask, logps, entropy, mask.sum(dim=1).long()
return tokens, mask * (tokens != EOS), logps, entropy, mask.sum(dim=1).long()
test_update.py::test_the_eos_that_ends_a_completion_has_a_gradient_and_the_padding_behind_it_none

prompts tiled
prompts are tiled, rewards are read as if they were repeated, so a group has several prompts
[problem for problem in problems for _ in range(cfg.num_generations)]
problems * cfg.num_generations
test_batches.py::test_each_completion_is_verified_and_scored_against_its_own_problem

cold sampler
sampled with temperature 0.7, scored with 1
cdf = F.softmax(logits / temperature, dim=-1)
cdf = F.softmax(logits / 0.7 / temperature, dim=-1)
test_rollout.py::test_first_tokens_are_as_frequent_as_the_softmax_says

means of means
each micro-batch is divided by its own tokens
token_loss, mask, average, num_sequences, num_tokens, cfg.max_completion_length)
token_loss, mask, average) * len(part) / num_sequences
test_update.py::test_the_gradient_is_that_of_equation_5_in_any_number_of_micro_batches

std of the batch
all groups are divided by one standard deviation
A / (rewards.std(dim=1, keepdim=True) + eps)
A / (rewards.std() + eps)
test_grpo.py::test_a_group_is_scaled_by_its_own_spread_or_mean

advantage off by one
each row has the advantage of the row before it
logps, old_logps, A[part, :T], mask
logps, old_logps, A[part - 1, :T], mask
test_update.py::test_the_gradient_is_that_of_equation_5_in_any_number_of_micro_batches

reference not frozen
the reference is the policy itself
reference = copy.deepcopy(policy)
reference = policy
test_update.py::test_the_reference_of_a_run_stays_where_the_policy_began

old not detached
the new log-probs stand for the old, with their gradient: the ratio is 1, and its gradient 0
logps - old_logps.detach(), 0.0
logps - logps, 0.0
test_family.py::test_on_fresh_samples_the_ratio_is_one_and_the_gradient_that_of_reinforce

KL twice
the KL is added a second time
token_loss = token_loss + cfg.beta * token_kl
token_loss = token_loss + 2 * cfg.beta * token_kl
test_update.py::test_the_gradient_is_that_of_equation_5_in_any_number_of_micro_batches
"""
MISTAKES = [Mistake(*block.split("\n")) for block in TEXT.strip().split("\n\n")]


def plant(mistake, folder):
    """Make a folder with common.py and a grpo.py that has the mistake. -> path of the latter"""
    source = (ROOT / "grpo.py").read_text()
    assert source.count(mistake.old) == 1, mistake.old
    folder.mkdir()
    (folder / "common.py").write_text((ROOT / "common.py").read_text())
    (folder / "grpo.py").write_text(source.replace(mistake.old, mistake.new))
    return folder / "grpo.py"


def measure(seeds):
    with tempfile.TemporaryDirectory() as work:
        base = Path(work, "base")
        run("grpo.py", base, "--max_steps", 0, *EVALUATION, quiet=True)
        flags = [*FLAGS, "--init_from", base]
        variants = {RIGHT: ["grpo.py", *flags]}
        for number, mistake in enumerate(MISTAKES):
            variants[mistake.name] = [plant(mistake, Path(work, str(number))), *flags]
        results = run_all(variants, seeds, METRICS.values())
        other_seeds = [seed + 100 for seed in seeds]
        results |= run_all({CONTROL: variants[RIGHT]}, other_seeds, METRICS.values())
    found = {window: {name: means(runs, steps) for name, runs in results.items()}
             for window, steps in WINDOWS.items()}
    return found | {"reward": curves(results, "reward"), "kl": curves(results, "kl")}


def means(runs, steps):
    """The mean of each metric over some steps, of each seed. -> {word: list}"""
    return {word: rounded([statistics.mean(result[metric][steps]) for result in runs])
            for word, metric in METRICS.items()}


def curves(results, metric):
    """The mean of a metric over the seeds, step by step. -> {name: list}"""
    return {name: rounded(mean_curve([result[metric] for result in runs]))
            for name, runs in results.items()}


def side(values, right):
    """On which side of the widened span of the right values all others lie. -> str, "" if none"""
    width = max(right) - min(right)
    if min(values) > max(right) + width:
        return "high"
    if max(values) < min(right) - width:
        return "low"
    return ""


def signs(found, name):
    """What tells of a mistake. -> list of (word, "high" or "low", window)"""
    seen = []
    for window in WINDOWS:
        for word, right in found[window][RIGHT].items():
            direction = side(found[window][name][word], right)
            if direction:
                seen.append((word, direction, window))
    return seen


def telling(found, name):
    """The metrics that tell of a mistake, each once. -> list"""
    return list(dict.fromkeys(word for word, _, _ in signs(found, name)))


def learns(found, name):
    """Whether the reward rises with every seed. -> bool"""
    before, after = [found[window][name]["reward"] for window in WINDOWS]
    return all(late > early for early, late in zip(before, after))


def tables(found):
    looks = {}
    names = [mistake.name for mistake in MISTAKES]
    for word in METRICS:
        for name in [*names, CONTROL]:
            for sign in signs(found, name):
                if sign[0] == word:
                    looks.setdefault(sign, []).append(name)
    seen = [[f"{word} too {direction}", window, ", ".join(some)]
            for (word, direction, window), some in looks.items()]
    known = []
    for name, words, _, _, test in MISTAKES:
        known.append([name, words, ", ".join(telling(found, name)) or "nothing", f"`{test}`"])
    return [(["what you see", "when", "which mistakes look like that"], seen),
            (["mistake", *METRICS], [last_values(found, name) for name in found["reward"]]),
            (["mistake", "what is wrong", "what tells of it", "the test that sees it"], known)]


def last_values(found, name):
    """A row of the table of numbers; those that tell of the mistake are in bold. -> list"""
    window = list(WINDOWS)[-1]
    cells = [name]
    for word, values in found[window][name].items():
        cell = mean_and_spread(values) if name == RIGHT else f"{statistics.mean(values):.3f}"
        is_told = side(values, found[window][RIGHT][word])
        cells.append(f"**{cell}**" if is_told else cell)
    return cells


def claims(found):
    names = [mistake.name for mistake in MISTAKES]
    half = len(names) / 2
    learning = [name for name in names if learns(found, name)]
    in_reward = [name for name in names if "reward" in telling(found, name)]
    unseen = [name for name in names if not telling(found, name)]
    return [
        Claim("with most of the mistakes the reward still rises",
              f"{len(learning)} of {len(names)}", SHOWN if len(learning) > half else NOT_SHOWN),
        Claim("the reward tells of less than half of them",
              f"{len(in_reward)}: {', '.join(in_reward) or 'none'}",
              SHOWN if len(in_reward) < half else NOT_SHOWN),
        Claim("no metric tells of some, which only a test sees", ", ".join(unseen) or "none",
              SHOWN if unseen else NOT_SHOWN)]


def note(found):
    checks = len(WINDOWS) * len(METRICS)
    false = len(signs(found, CONTROL))
    return (f"{16 * STEPS} problems a run, nearly all different; numbers are means of the last 5 "
            "steps and of the seeds, in bold those that tell of the mistake; false alarms from "
            f"right runs with other seeds: {false} of {checks} numbers")


def panels(found):
    def fill(axis, metric, word):
        for name, values in found[metric].items():
            if name != RIGHT:
                is_told = word in telling(found, name)
                style = {"label": name} if is_told else {"color": "0.8"}
                axis.plot(range(1, 1 + len(values)), values, linewidth=1.2, **style)
        axis.plot(range(1, 1 + STEPS), found[metric][RIGHT], "k", label="no mistake")
        axis.set(xlabel="step", ylabel=word)
        axis.legend(frameon=False, fontsize=6)

    def matrix(axis):
        names = [mistake.name for mistake in MISTAKES] + [CONTROL]
        words = list(METRICS)
        for row, name in enumerate(names):
            for word, direction, window in signs(found, name):
                shift = -0.15 if window.startswith("first") else 0.15
                marker, color = ("^", "C3") if direction == "high" else ("v", "C0")
                axis.plot(words.index(word) + shift, row, marker, color=color)
        axis.set_yticks(range(len(names)), names, fontsize=7)
        axis.set_xticks(range(len(words)), words, fontsize=7, rotation=45)
        axis.set(xlim=(-0.5, len(words) - 0.5), ylim=(len(names) - 0.5, -0.5))
        axis.set_title("up: too high; left: first 5 steps, right: last 5", fontsize=8)
        axis.grid(alpha=0.3)
    return [lambda axis: fill(axis, "reward", "reward"), lambda axis: fill(axis, "kl", "KL"),
            matrix]
