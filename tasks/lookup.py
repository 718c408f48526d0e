"""Who is the boss of the boss of ka? Only a tool knows (Search-R1, arXiv:2503.09516).

Everybody has one boss. No prompt shows the table of bosses, and it is different in each problem, so
the weights cannot memorize it. After <search>ka</search> the environment inserts information:

  boss of boss of ka?<think><search>ka</search><information>mi</information>
                     <search>mi</search><information>to</information></think><answer>to</answer>

The textbook mostly calls the tool; in the forum most people guess one of 676 names, and are wrong.
"""
from string import ascii_lowercase

from common import Problem
from tasks import Task, extract

CALL_LIMIT = 4          # calls per completion, malformed calls included
KEY_LENGTH = 20         # characters of the longest key
NAMES = [first + second for first in ascii_lowercase for second in ascii_lowercase]


class Lookup(Task):
    """Six people in a ring, each the boss of the one before; a question takes one or two hops."""
    prompt_width = len("boss of boss of ka?")
    call_tokens = ("</search>", "</think>")         # either may end a call
    defaults = {"max_completion_length": 40, "base_steps": 600}

    def sample(self, rng):
        people = rng.sample(NAMES, 6)
        num_hops = rng.randint(1, 2)
        bosses = people[1:] + people[:1]
        work = ""
        for hop in range(num_hops):
            work += f"<search>{people[hop]}</search><information>{bosses[hop]}</information>"
        prompt = "boss of " * num_hops + people[0] + "?"
        table = sorted(zip(people, bosses))
        return Problem(prompt, people[num_hops], work, num_hops, secret=tuple(table))

    def demonstration(self, rng, phase):
        """Draw a problem with a completion. The textbook calls the tool nine times out of ten, a
        cold start always; the forum guesses four times out of five."""
        problem = self.sample(rng)
        share_that_asks = {"textbook": 0.9, "forum": 0.2, "cold_start": 1.0}[phase]
        text = f"<answer>{rng.choice(NAMES)}</answer>"
        if rng.random() < share_that_asks:
            text = f"<think>{problem.work}</think><answer>{problem.answer}</answer>"
        return problem._replace(completion=text)

    def verify(self, problem, text):
        """Return 1.0 if the only answer block is the right name, found or guessed; else 0.0."""
        return float(extract(text) == problem.answer)

    def respond(self, problem, text):
        """Return the boss of the key, or what is wrong with the call, or "" if there is no call."""
        _, _, tail = text.removesuffix("</search>").rpartition("</search>")
        _, opening, key = tail.partition("<search>")        # after the call before
        if not text.endswith("</search>"):
            return "<information>unclosed</information>" if opening else ""
        if text.count("</search>") > CALL_LIMIT:
            response = "no more"
        elif not opening:
            response = "unopened"
        elif "<search>" in key:
            response = "nested"
        elif not key.strip():
            response = "empty"
        elif len(key) > KEY_LENGTH:
            response = "too long"
        else:
            table = dict(problem.secret or ())
            response = table.get(key.strip(), "unknown")
        return f"<information>{response}</information>"

    def observe(self, batch, step):
        """Count how often a completion calls the tool, on average. -> metrics"""
        num_calls = sum(text.count("<search>") for text in batch.texts)
        return {"tools/call_frequency": num_calls / len(batch.texts)}

    def true_calls(self, problem):
        """List the calls that answer the question, for rewards of calls. -> list of (name, dict)"""
        return self.predicted_calls(problem.work)

    def predicted_calls(self, text):
        """List a completion's calls; one without an opening has no name. -> list of (name, dict)"""
        calls = []
        for piece in text.split("</search>")[:-1]:
            _, opening, key = piece.partition("<search>")
            calls.append(("search", {"key": key.strip()}) if opening else ("", {}))
        return calls
