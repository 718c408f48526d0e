"""What the tasks share: how an answer is read, and the table of rewards that --reward sums, by name.

A reward is a function of (problem, completion text, verdict, progress) and gives a float. The verdict is what
the task's verify said, a float or a list of floats; progress is step / 50, at most 1.
"""
import importlib
import re
from collections import Counter


def block(text, name):
    """What the one <name>..</name> block of the text holds; None if there is none, or a second tag."""
    once = text.count(f"<{name}>") == text.count(f"</{name}>") == 1
    inside, closed, _ = text.partition(f"<{name}>")[2].partition(f"</{name}>")
    return inside if once and closed else None


def extract(text):
    """The answer that a text gives: printable ASCII in its one answer block, stripped; else None."""
    answer = block(text, "answer") or ""
    return answer.strip() if re.fullmatch("[ -~]{1,200}", answer) else None


def thought_length(text):
    """Characters of the one think block, without information blocks, which cost the policy nothing."""
    return len(re.sub("<information>[^<]*</information>", "", block(text, "think") or ""))


def tool_reward(true_calls, predicted_calls):
    """How right calls (name, {parameter: value}) are: S / S_max of ToolRL (arXiv:2504.13958), in 0..1.

    S adds up how far the names agree, once, and for each true call, matched to the best predicted one of its
    name that is left, how far the parameters' names agree and how many of its values are equal.
    """
    def agreement(a, b):                                    # intersection over union, of multisets
        a, b = Counter(list(a)), Counter(list(b))           # of a dict, its keys
        return (a & b).total() / (a | b).total() if a or b else 1.0

    S = agreement((name for name, _ in true_calls), (name for name, _ in predicted_calls))
    left = list(predicted_calls)
    for name, true in true_calls:
        fits = [agreement(true, call[1]) + sum(key in call[1] and call[1][key] == true[key] for key in true)
                if call[0] == name else -1.0 for call in left]
        if max(fits, default=-1.0) >= 0:
            S += max(fits)
            del left[fits.index(max(fits))]
    return S / (1 + sum(1 + len(true) for _, true in true_calls))


# ---- the rewards ----------------------------------------------------------------------------------------

def accuracy(problem, text, verdict, progress):
    """The verdict; the sum of it where each move is rewarded."""
    return float(sum(verdict) if isinstance(verdict, list) else verdict)


def well_formed(problem, text, verdict, progress):
    """1.0 if the text is one think block, then one answer block, and nothing else, as for R1-Zero."""
    thought, answer = block(text, "think"), block(text, "answer")
    built = f"<think>{thought}</think><answer>{answer}</answer>"
    return float(None not in (thought, answer) and text == built)


def length(problem, text, verdict, progress):
    """0.1 * min(1, n / 40) for n characters of thought, right or wrong."""
    return 0.1 * min(1.0, thought_length(text) / 40)


def growing_length(problem, text, verdict, progress):
    """The same with a target that grows, from 20 characters to 40: ToolRL's dynamic length reward."""
    return 0.1 * min(1.0, thought_length(text) / (20 * (1 + progress)))


def tool_calls(problem, text):
    """tool_reward of the text's calls, in a task with calls(problem) and predicted(text), as lookup has."""
    task = importlib.import_module(f"{__name__}.{problem.task}")
    return tool_reward(task.calls(problem), task.predicted(text))


def fine(problem, text, verdict, progress):
    """ToolRL's decomposition: how right the calls are, in 0..1, plus 1.0 for the format."""
    return tool_calls(problem, text) + well_formed(problem, text, verdict, progress)


def coarse(problem, text, verdict, progress):
    """1.0 if every call is exactly right, and there is none besides, else 0.0."""
    return float(tool_calls(problem, text) == 1.0)


REWARDS = {"accuracy": accuracy, "format": well_formed, "length": length, "growing_length": growing_length,
           "fine": fine, "coarse": coarse}


def rows(names, tasks):
    """The functions that --reward NAMES ("accuracy+length") sums, for `tasks`, a dict from name to module.
    ValueError if a name is not in the table, or a task lacks what it needs."""
    for name in names.split("+"):
        if name not in REWARDS:
            raise ValueError(f"--reward {names}: there is no {name!r}; there are {', '.join(REWARDS)}")
        for task, module in tasks.items():
            if REWARDS[name] in (fine, coarse) and not hasattr(module, "predicted"):
                raise ValueError(f"--reward {names}: {name} rates tool calls, {task} has none; use lookup")
    return [REWARDS[name] for name in names.split("+")]
