"""Find the secret number in 17-48 with five guesses: is it higher or lower? An agent in turns.

The policy writes a guess between search tags, and the environment inserts the numbers that are left
because the secret is higher or lower, or the word right:

  17-48  <search>30</search><information>31-48</information>
         <search>44</search><information>31-43</information>
         <search>36</search><information>right</information>

The reward is 1 if the number is found, else 0. The textbook mostly heeds these hints; in the forum,
every other guess ignores them, and is any number of the whole range. Of 32 numbers, random guesses
within the hints find 53% in five turns, and halving finds 97% (in six turns 71% and 100%).
"""
import re
from typing import NamedTuple

from common import Problem
from tasks import block
from tasks.calls import Turns

SIZE = 32               # numbers in a range
LIMIT = 5               # guesses, malformed ones included


class State(NamedTuple):
    """The numbers that are left."""
    low: int
    high: int
    secret: int             # the environment alone knows it
    guesses: int = 0


class Number(Turns):
    """A range of 32 numbers; each guess is a turn."""
    prompt_width = len("17-48")
    call_tokens = ("</search>",)
    defaults = {"max_completion_length": 11 * LIMIT + 1, "base_steps": 600}
    held_out_tenths = 2     # 18 of 59 ranges

    def sample(self, rng):
        low = rng.randint(10, 100 - SIZE)
        return Problem(f"{low}-{low + SIZE - 1}", "", secret=rng.randrange(low, low + SIZE))

    def demonstration(self, rng, phase):
        """Draw a problem and an episode of random guesses. In a cold start, all of them stay within
        the hints."""
        problem = self.sample(rng)
        share_within_hints = {"textbook": 0.9, "forum": 0.5, "cold_start": 1.0}[phase]

        def guess(state):
            low, high, *_ = state if rng.random() < share_within_hints else self.open(problem)
            return f"<search>{rng.randint(low, high)}</search>"
        return self.written(problem, guess)

    def open(self, problem):
        """Begin with the whole range. For a prompt without a secret, the environment is silent."""
        if problem.secret is None:
            return None
        low, _, high = problem.prompt.partition("-")
        return State(int(low), int(high), problem.secret)

    def step(self, state, action):
        """Compare a guess, the content of the action's only search block, with the secret."""
        guess = block(action, "search") or ""
        is_number = re.fullmatch(" *[0-9]{1,2} *", guess)
        low, high, secret, guesses = state
        if is_number and int(guess) == secret:
            return None, "<information>right</information>", 1.0
        if is_number and int(guess) < secret:
            low = max(low, int(guess) + 1)
        elif is_number:
            high = min(high, int(guess) - 1)
        after = State(low, high, secret, guesses + 1) if guesses + 1 < LIMIT else None
        return after, f"<information>{low}-{high}</information>", 0.0
