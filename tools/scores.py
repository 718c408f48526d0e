"""Held-out scores from many samples of each problem: pass@k, maj@k, and what thinking is worth."""
import collections
import math

import common


def pass_at_k(n, c, k):
    """The chance that one of k completions is right, unbiased from n of which c are (2107.03374, eq. 1)."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def majority(answers):
    """The commonest answer, of those tied the first; None is no vote. -> str, None if nobody votes"""
    votes = [answer for answer in answers if answer is not None]
    return max(votes, key=collections.Counter(votes).get, default=None)


def maj_at_k(problems, answers, n, k, verify):
    """How often the majority of k is right, over the n // k disjoint blocks of the n samples of a problem; a
    problem without an answer has no vote."""
    asked = [first for first in range(0, len(problems), n) if problems[first].answer]
    starts = [i for first in asked for i in range(first, first + n - k + 1, k)]
    votes = [(problems[i], majority(answers[i:i + k])) for i in starts]
    return common.mean([verify(problem, f"<answer>{vote}</answer>") == 1 for problem, vote in votes])


def measure(problems, texts, lengths, k, extract, verify):
    """Scores of k completions of each problem, side by side, or, if k = 0, of a greedy one: pass@j and maj@j
    for j = 1 .. k, and what else they are like. -> dict, in which lists go by k, None is where nothing
    counts, and "examples" are for the report"""
    problems = [problem for problem in problems for _ in range(max(k, 1))]
    verdicts = [verify(problem, text) for problem, text in zip(problems, texts)]
    right = [common.tasks.is_right(problem, verdict) for problem, verdict in zip(problems, verdicts)]
    thinks = ["<think>" in text for text in texts]
    found = {"pass@1" if k else "greedy": common.mean(right)}
    if k:
        hits = [sum(right[i:i + k]) for i in range(0, len(right), k)]
        curves = {"pass@k": [common.mean([pass_at_k(k, c, j) for c in hits]) for j in range(1, k + 1)]}
        answers = [extract(text) for text in texts]
        if any(answer is not None for answer in answers):
            curves["maj@k"] = [maj_at_k(problems, answers, k, j, verify) for j in range(1, k + 1)]
        for j in sorted({min(8, k), k}):
            found |= {name.replace("k", str(j)): curve[j - 1] for name, curve in curves.items()}
        found |= curves | {
            "accuracy_given_think": common.mean([r for r, thought in zip(right, thinks) if thought]),
            "accuracy_given_blurt": common.mean([r for r, thought in zip(right, thinks) if not thought])}
    else:
        found["examples"] = [
            {"prompt": problem.prompt, "answer": problem.answer, "text": text, "right": r}
            for problem, text, r in zip(problems[:64], texts, right)]
    if len({problem.task for problem in problems}) > 1:
        for task in sorted({problem.task for problem in problems}):
            found[f"{'pass@1' if k else 'greedy'}/{task}"] = common.mean(
                [r for problem, r in zip(problems, right) if problem.task == task])
    returns = [(sum(v), common.load_task(problem.task).best(problem))
               for problem, v in zip(problems, verdicts) if isinstance(v, list)]
    if returns:
        found |= {"return": common.mean([got for got, _ in returns]),
                  "best_return": common.mean([best for _, best in returns])}
    return found | {"think_share": common.mean(thinks), "mean_length": common.mean(lengths),
                    "problems": len(problems) // max(k, 1)}
