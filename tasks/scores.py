"""The scores of an evaluation: pass@k and maj@k for every k, the accuracy on each task in a mix and
of the completions that think, how often each step of arithmetic is right, and the mean return of
tasks that reward each move."""
import collections
import functools
import math
import random
import re

from tasks.texts import extract

NUM_EXAMPLES = 64       # greedy answers that an evaluation shows
STEPWISE = ("abstain", "arithmetic", "key")     # tasks whose thoughts consist of steps like 3+4=7
# with its closing tag or, without one, up to the end of the text
THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
# No digit or sign comes before a step, so neither 13+4= nor 2*3+4= contains 3+4=.
STEP = re.compile("(?<![0-9+*-])([0-9]{1,2}[+*-][1-9])=([0-9]*)")


def scores(batch, task, greedy):
    """Compute the scores that Task.scores adds to its own, for a group of samples of each problem
    or for one greedy completion of each. -> dict; the lists in it are for k = 1, 2, .., and a mean
    over nothing is None"""
    prefix = "greedy_" if greedy else ""
    num_samples = 0 if greedy else batch.is_correct.shape[1]
    is_correct = batch.is_correct.flatten().tolist()
    parts = [part_of(task, problem) for problem in batch.problems]
    judged = [row for row, part in enumerate(parts) if part.is_judged]
    result = judged_scores(batch, task, is_correct, judged, num_samples) if judged else {}
    thinking = [row for row, part in enumerate(parts) if can_think(part)]
    if thinking:
        result |= thought_scores(batch, is_correct, parts, thinking, greedy)
    shares = collections.defaultdict(list)          # what tasks themselves say of completions
    for problem, text, part in zip(batch.problems, batch.texts, parts):
        for name, value in part.shares(problem, text).items():
            shares[f"{prefix}{name}"].append(value)
    result |= {name: mean(values) for name, values in shares.items()}
    if greedy:
        result["examples"] = [
            {"prompt": problem.prompt, "answer": problem.answer, "text": text,
             "right": correct if part.is_judged and not part.abstains(text) else None}
            for problem, text, correct, part in zip(
                batch.problems[:NUM_EXAMPLES], batch.texts, is_correct, parts)]
    else:
        result["samples"] = num_samples
        stepwise = [row for row, one in enumerate(batch.problems) if one.task in STEPWISE]
        if stepwise:
            result["steps"] = count_steps([batch.texts[row] for row in stepwise])
    moves = [row for row, verified in enumerate(batch.verified) if isinstance(verified, list)]
    if moves:
        result[f"{prefix}return"] = mean([sum(batch.verified[row]) for row in moves])
        best_returns = [parts[row].best_return(batch.problems[row]) for row in moves]
        result["best_return"] = mean([best for best in best_returns if best < math.inf])
    return result


def part_of(task, problem):
    """Return the task that a problem belongs to: `task` itself, or one part of a mix."""
    return task.parts.get(problem.task, task)


def mean(values):
    """Compute the mean of a list; None if it is empty."""
    return sum(values) / len(values) if values else None


def judged_scores(batch, task, is_correct, judged, num_samples):
    """Score the rows `judged`, of tasks in which completions are right or wrong. -> dict"""
    name = "pass@1" if num_samples else "greedy"
    problems = [batch.problems[row] for row in judged]
    texts = [batch.texts[row] for row in judged]
    is_correct = [is_correct[row] for row in judged]
    result = {} if task.is_judged else {name: mean(is_correct)}     # of some tasks in a mix
    if num_samples > 0:
        result |= sample_scores(task, problems, texts, is_correct, num_samples)
    tasks = sorted({problem.task for problem in problems})
    if len(tasks) > 1:
        for part in tasks:
            some = [c for c, problem in zip(is_correct, problems) if problem.task == part]
            result[f"{name}/{part}"] = mean(some)
    return result


def sample_scores(task, problems, texts, is_correct, n):
    """Compute pass@k and maj@k: as lists for k = 1 .. n, and as single scores for k = 8 and k = n,
    such as "pass@8". -> dict"""
    num_correct = [sum(is_correct[first:first + n]) for first in range(0, len(problems), n)]
    all_k = range(1, n + 1)
    curves = {"pass@k": [mean([pass_at_k(n, c, k) for c in num_correct]) for k in all_k]}
    answers = votes(task, problems, texts, n)
    if any(answer is not None for answer in answers):
        curves["maj@k"] = [maj_at_k(task, problems, answers, n, k) for k in all_k]
    result = {}
    for k in sorted({min(8, n), n}):
        for name, curve in curves.items():
            result[name.replace("k", str(k))] = curve[k - 1]
    return result | curves


def pass_at_k(n, c, k):
    """Estimate the probability that at least one of k completions is right, from n completions of
    which c are right. The estimate is unbiased (2107.03374, eq. 1). -> float"""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def maj_at_k(task, problems, answers, n, k):
    """Compute how often the majority of k answers is right. The n samples of a problem make n // k
    disjoint blocks of k answers. Problems without a known answer don't count. -> float or None"""
    are_correct = []
    for first in range(0, len(problems), n):
        if not problems[first].answer:
            continue
        for start in range(first, first + n - k + 1, k):
            vote = majority(answers[start:start + k])
            are_correct.append(task.verify(problems[start], f"<answer>{vote}</answer>") == 1)
    return mean(are_correct)


def votes(task, problems, texts, n):
    """List the answers of n completions of each problem, None for a completion without one. Of
    equivalent answers, such as 3*4 and 4*3, all are written like the first. -> list of str"""
    answers = []
    for row, (problem, text) in enumerate(zip(problems, texts)):
        if row % n == 0:
            first_answers = {}                          # canonical form -> answer as written
        answer = extract(text)
        if answer is not None:
            canonical = part_of(task, problem).canonical(problem, answer)
            answer = first_answers.setdefault(canonical, answer)
        answers.append(answer)
    return answers


def majority(answers):
    """Find the most frequent answer, in a tie the first one. -> str, or None if all are empty"""
    cast = [answer for answer in answers if answer]         # neither None nor ""
    return max(cast, key=collections.Counter(cast).get, default=None)


# ---- thoughts --------------------------------------------------------------------------------

@functools.lru_cache(32)
def can_think(task):
    """Whether completions of a task can think, because some of its demonstrations do. -> bool"""
    rng = random.Random(0)
    drawn = [task.demonstration(rng, phase) for phase in ("textbook", "forum") for _ in range(32)]
    return any("<think>" in example.completion for example in drawn)


def thought_scores(batch, is_correct, parts, rows, greedy):
    """Compute which share of the completions `rows` thinks, and how many of these are right. For
    samples, also compute how many are right without a thought. -> dict"""
    prefix = "greedy_" if greedy else ""
    thinks = {row: "<think>" in batch.texts[row] for row in rows}
    result = {f"{prefix}think_share": mean(list(thinks.values()))}
    judged = [row for row in rows if parts[row].is_judged]
    if not judged:
        return result
    with_thought = [is_correct[row] for row in judged if thinks[row]]
    without = [is_correct[row] for row in judged if not thinks[row]]
    result[f"{prefix}accuracy_given_think"] = mean(with_thought)
    if not greedy:
        result["samples_given_think"] = len(with_thought)
        result["accuracy_given_direct"] = mean(without)
        result["samples_given_direct"] = len(without)
    return result


def right_results():
    """Compute the results of all steps that can occur in arithmetic, in which every value is in
    0..20. -> {"8+5": "13", ...}"""
    results = {}
    for value in range(21):
        for operand in range(1, 10):
            results[f"{value}+{operand}"] = value + operand
            results[f"{value}-{operand}"] = value - operand
            results[f"{value}*{operand}"] = value * operand
    return {step: str(result) for step, result in results.items() if 0 <= result <= 20}


RESULTS = right_results()


def count_steps(texts):
    """Count the steps in the thoughts of arithmetic, whatever follows them: how often each is
    written, and how often its result is right. 3+4=9;wait,3+4=7 is written twice and right once. A
    result that the end of a text may have cut off, such as <think>8+5=1, doesn't count.
    -> {"8+5": [times written, times right], ...}, without steps that nobody wrote"""
    counts = {step: [0, 0] for step in RESULTS}
    for text in texts:
        for thought in THOUGHT.findall(text):
            for match in STEP.finditer(thought):
                step, result = match.groups()
                if step not in RESULTS:
                    continue
                right = RESULTS[step]
                is_at_end = match.end() == len(thought)
                if is_at_end and result != right and right.startswith(result):
                    continue
                counts[step][0] += 1
                counts[step][1] += result == right
    return {step: count for step, count in counts.items() if count[0] > 0}
