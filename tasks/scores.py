"""The scores of an evaluation: pass@k and maj@k for every k, the accuracy on each task in a mix,
and the mean return of tasks that reward each move."""
import collections
import math
import re

from tasks import extract

NUM_EXAMPLES = 64       # greedy answers that an evaluation shows


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
    result[f"{prefix}think_share"] = mean(["<think>" in text for text in batch.texts])
    result["problems"] = len(batch.is_correct)
    if greedy:
        result["examples"] = [
            {"prompt": problem.prompt, "answer": problem.answer, "text": text,
             "right": correct if part.is_judged else None}
            for problem, text, correct, part in zip(
                batch.problems[:NUM_EXAMPLES], batch.texts, is_correct, parts)]
    else:
        result["samples"] = num_samples
    moves = [row for row, verified in enumerate(batch.verified) if isinstance(verified, list)]
    if moves:
        result[f"{prefix}return"] = mean([sum(batch.verified[row]) for row in moves])
        best_returns = [parts[row].best_return(batch.problems[row]) for row in moves]
        result["best_return"] = mean([best for best in best_returns if best < math.inf])
    return result


def part_of(task, problem):
    """Return the task that a problem belongs to: `task` itself, or one part of a mix."""
    return getattr(task, "parts", {}).get(problem.task, task)


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
        for thinks, ending in ((True, "think"), (False, "direct")):
            some = [c for c, text in zip(is_correct, texts) if ("<think>" in text) == thinks]
            result[f"accuracy_given_{ending}"] = mean(some)
            result[f"samples_given_{ending}"] = len(some)
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
            cast = [answer for answer in answers[start:start + k] if answer is not None]
            vote = max(cast, key=collections.Counter(cast).get, default=None)   # the first in a tie
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
            answer = first_answers.setdefault(canonical(task, problem, answer), answer)
        answers.append(answer)
    return answers


def canonical(task, problem, answer):
    """Write equivalent answers in one way: the task's own, or as numbers. -> str"""
    part = part_of(task, problem)
    if hasattr(part, "canonical"):
        return part.canonical(problem, answer)
    return str(int(answer)) if re.fullmatch("-?[0-9]{1,20}", answer) else answer
