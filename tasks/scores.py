"""The scores of an evaluation: pass@k and maj@k for every k, each task of a mix, and the returns of
tasks that reward moves."""
import collections
import math
import re

from tasks import extract

NUM_EXAMPLES = 64       # greedy answers that an evaluation shows


def scores(batch, task, greedy):
    """The scores of samples of each problem, or of a greedy completion of each. -> dict: lists go
    by k, None stands where nothing counts"""
    num_samples = 0 if greedy else batch.is_correct.shape[1]
    is_correct = batch.is_correct.flatten().tolist()
    parts = [part_of(task, problem) for problem in batch.problems]
    judged = [row for row, part in enumerate(parts) if part.is_judged]
    found = judged_scores(batch, task, is_correct, judged, num_samples) if judged else {}
    found |= {"think_share": mean(["<think>" in text for text in batch.texts]),
              "mean_length": batch.mask.sum(dim=1).mean().item(),
              "problems": len(batch.is_correct), "samples": num_samples}
    if greedy:
        found["examples"] = [
            {"prompt": problem.prompt, "answer": problem.answer, "text": text,
             "right": correct if part.is_judged else None}
            for problem, text, correct, part in zip(
                batch.problems[:NUM_EXAMPLES], batch.texts, is_correct, parts)]
    moves = [row for row, verdict in enumerate(batch.verdicts) if isinstance(verdict, list)]
    if moves:
        name = "greedy_return" if greedy else "return"
        found[name] = mean([sum(batch.verdicts[row]) for row in moves])
        known = [row for row in moves if hasattr(parts[row], "best_return")]
        found["best_return"] = mean([parts[row].best_return(batch.problems[row]) for row in known])
    return found


def part_of(task, problem):
    """The task that a problem is of: the task itself, if it is no mix."""
    return getattr(task, "parts", {}).get(problem.task, task)


def mean(values):
    """The mean of a list; None if it is empty."""
    return sum(values) / len(values) if values else None


def judged_scores(batch, task, is_correct, judged, num_samples):
    """The scores of the rows `judged`, in which completions are right or wrong. -> dict"""
    name = "pass@1" if num_samples else "greedy"
    problems = [batch.problems[row] for row in judged]
    texts = [batch.texts[row] for row in judged]
    is_correct = [is_correct[row] for row in judged]
    found = {name: mean(is_correct)}
    if num_samples > 0:
        found |= sample_scores(task, problems, texts, is_correct, num_samples)
        for thinks, ending in ((True, "think"), (False, "direct")):
            some = [c for c, text in zip(is_correct, texts) if ("<think>" in text) == thinks]
            found[f"accuracy_given_{ending}"] = mean(some)
            found[f"samples_given_{ending}"] = len(some)
    tasks = sorted({problem.task for problem in problems})
    if len(tasks) > 1:
        for part in tasks:
            some = [c for c, problem in zip(is_correct, problems) if problem.task == part]
            found[f"{name}/{part}"] = mean(some)
    return found


def sample_scores(task, problems, texts, is_correct, n):
    """pass@k and maj@k for k = 1 .. n, as lists, and by name for k = 8 and n. -> dict"""
    num_correct = [sum(is_correct[first:first + n]) for first in range(0, len(problems), n)]
    all_k = range(1, n + 1)
    curves = {"pass@k": [mean([pass_at_k(n, c, k) for c in num_correct]) for k in all_k]}
    answers = votes(task, problems, texts, n)
    if any(answer is not None for answer in answers):
        curves["maj@k"] = [maj_at_k(task, problems, answers, n, k) for k in all_k]
    found = {}
    for k in sorted({min(8, n), n}):
        for name, curve in curves.items():
            found[name.replace("k", str(k))] = curve[k - 1]
    return found | curves


def pass_at_k(n, c, k):
    """The chance that one of k completions is right, unbiased from n of which c are (2107.03374,
    eq. 1). -> float"""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def maj_at_k(task, problems, answers, n, k):
    """How often the majority of k answers is right, over the n // k disjoint blocks of the n
    samples of a problem; problems without a known answer are left out. -> float or None"""
    verdicts = []
    for first in range(0, len(problems), n):
        if not problems[first].answer:
            continue
        for start in range(first, first + n - k + 1, k):
            vote = majority(answers[start:start + k])
            verdicts.append(task.verify(problems[start], f"<answer>{vote}</answer>") == 1)
    return mean(verdicts)


def majority(answers):
    """The most frequent answer, the first of those that tie. None is no vote. -> str or None"""
    cast = [answer for answer in answers if answer is not None]
    return max(cast, key=collections.Counter(cast).get, default=None)


def votes(task, problems, texts, n):
    """The answers of n completions of each problem; those that are the same, as 3*4 and 4*3, are
    written as the first of them is. None where there is no answer. -> list of str"""
    found = []
    for row, (problem, text) in enumerate(zip(problems, texts)):
        if row % n == 0:
            first_answers = {}                          # by their canonical form
        answer = extract(text)
        if answer is not None:
            answer = first_answers.setdefault(canonical(task, problem, answer), answer)
        found.append(answer)
    return found


def canonical(task, problem, answer):
    """The same text for answers that are the same: as the task says, else as numbers. -> str"""
    part = part_of(task, problem)
    if hasattr(part, "canonical"):
        return part.canonical(problem, answer)
    return str(int(answer)) if re.fullmatch("-?[0-9]{1,20}", answer) else answer
