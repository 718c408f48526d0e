"""Arithmetic, learned from examples of which some begin with the answer, as if from a key:

  7|((((3+4)-5)*4)-2)=

The problems of training and evaluation have no key. But the base has read what follows one, so it
knows more if it is shown an answer, and can be a teacher of itself (examples/distill.py). The level
names what follows: with key:work, the default, the work and the answer; with key:half, the work in
half of the examples; with key:answer, never.
"""
import common
from tasks import Arithmetic, extract

SHARE = 0.3             # of the examples begin with the answer
WORKED = {"work": 1.0, "half": 0.5, "answer": 0.0}      # share of these that show the work


class Key(Arithmetic):
    """The problems, their split and the verifier are those of arithmetic."""

    def __init__(self, cfg, level=""):
        super().__init__(None)                          # load_task hands verify over
        if (level or "work") not in WORKED:
            common.fail(f"--task key:{level}: the levels are {', '.join(WORKED)}")
        self.worked = WORKED[level or "work"]
        self.prompt_width += len("20|")

    def hinted(self, problem, text):
        """Write a problem again, after the answer of a right completion. -> Problem"""
        return problem._replace(prompt=f"{int(extract(text))}|{problem.prompt}")

    def demonstration(self, rng, phase):
        if rng.random() >= SHARE:
            return super().demonstration(rng, phase)
        problem = self.sample(rng, share_shorter=0.2)
        answer = f"<answer>{problem.answer}</answer>"
        work = f"<think>{problem.work}</think>" if rng.random() < self.worked else ""
        return self.hinted(problem, answer)._replace(completion=work + answer)

    def is_held_out(self, problem):
        """Keep a problem for evaluation with and without the key."""
        _, _, question = problem.prompt.rpartition("|")
        return super().is_held_out(problem._replace(prompt=question))
