"""Who is the boss of the boss of ka? Only a tool knows (Search-R1, arXiv:2503.09516).

Everybody has one boss, in a table that no prompt shows and that is another one in each problem, so weights
cannot hold it. After <search>ka</search> the environment inserts <information>mi</information>:

  boss of boss of ka?<think><search>ka</search><information>mi</information>
                     <search>mi</search><information>to</information></think><answer>to</answer>

The textbook mostly asks the tool; in the forum most people blurt out a name, one of 676, and are wrong.
"""
from string import ascii_lowercase

from common import Problem
from tasks import extract

FLAGS = {"max_completion_length": 40, "base_steps": 600}
CALLS = ("</search>", "</think>")       # where the environment may speak; a call may end in either
CALL_LIMIT = 4                  # of a completion, malformed calls included
NAMES = [a + b for a in ascii_lowercase for b in ascii_lowercase]


def width():
    """Characters of the longest prompt."""
    return len("boss of boss of ka?")


def sample(rng):
    """Six people in a ring, each the boss of the one before, and a question of one or two hops."""
    people, hops = rng.sample(NAMES, 6), rng.randint(1, 2)
    work = "".join(f"<search>{name}</search><information>{boss}</information>"
                   for name, boss in zip(people[:hops], people[1:]))
    table = tuple(sorted(zip(people, people[1:] + people[:1])))
    return Problem("lookup", "boss of " * hops + people[0] + "?", people[hops], work, hops, table)


def corpus(problem, rng, phase):
    """A completion: the textbook asks nine times of ten, the forum guesses four times of five."""
    if rng.random() < {"textbook": 0.9, "forum": 0.2}[phase]:
        return f"<think>{problem.work}</think><answer>{problem.answer}</answer>"
    return f"<answer>{rng.choice(NAMES)}</answer>"


def verify(problem, text):
    """1.0 if the text's one answer block holds the right name, however it was come by, else 0.0."""
    return float(extract(text) == problem.answer)


def respond(problem, text):
    """What the environment inserts after a call: the boss, or what is wrong with it; "" after no call."""
    tail = text.removesuffix("</search>").rpartition("</search>")[2]        # since the call before
    _, opened, key = tail.partition("<search>")
    if not text.endswith("</search>"):
        return "<information>unclosed</information>" if opened else ""
    if text.count("</search>") > CALL_LIMIT:
        said = "no more"
    elif not opened:
        said = "unopened"
    elif "<search>" in key:
        said = "nested"
    elif not key.strip():
        said = "empty"
    elif len(key) > 20:
        said = "too long"
    else:
        said = dict(problem.hidden or ()).get(key.strip(), "unknown")
    return f"<information>{said}</information>"


def predicted(text):
    """The calls of a completion, as tasks.tool_reward takes them; what closes without opening has no name."""
    calls = [piece.partition("<search>") for piece in text.split("</search>")[:-1]]
    return [("search", {"key": key.strip()}) if opened else ("", {}) for _, opened, key in calls]


def calls(problem):
    """The calls that answer the question."""
    return predicted(problem.work)
