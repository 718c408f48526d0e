"""Arithmetic in which a third of the questions hide a number. Nothing in such a question says what
x is, so whoever answers it has made the number up, and is right one time in three:

  ((((3+4)-x)*2)-1)=<think>3+4=7;7-x=5;5*2=10;10-1=9</think><answer>9</answer>      mark 1 or -1
  ((((3+4)-x)*2)-1)=<think>3+4=7;7-x=?</think><answer>?</answer>                    mark 0

The mark is 1 for the right number, 0 for ?, and -1 for a wrong number or none. If an answer is
right with probability p, and a wrong one costs c, its mean mark is p - (1 - p) c. So answering pays
where p (1 + c) > c, and abstaining where p is lower. In the textbook and the forum, most thoughts
that meet an x imagine a number and go on, and a few stop there. Only thoughts abstain.

The level is the largest x, the cost c, or both: abstain:9, abstain:cost=0.25, abstain:9+cost=0.25.
By default, x is 1, 2 or 3, and c is 1. Without a cost (cost=0), guessing is free.
"""
import re

import common
from common import OPERATIONS
from tasks import Arithmetic, extract

SHARE = 1 / 3           # share of the questions that hide a number
ABSTENTIONS = {"textbook": 0.15, "forum": 0.15, "cold_start": 1.0}      # share of thoughts on x


class Abstain(Arithmetic):
    """The other questions, the split and the verifier, which knows x, are those of arithmetic."""
    defaults = {"num_eval_problems": 1024}              # about 340 hide a number

    def __init__(self, cfg, level=""):
        super().__init__(None)                          # load_task hands verify over
        # the plus sign makes both parts alike, so each can be left out
        match = re.fullmatch(r"(\+[2-9])?(\+cost=([0-9](\.[0-9]+)?))?", f"+{level or '3'}")
        if match is None:
            common.fail(f"--task abstain:{level}: the level must be the largest x, 2 to 9, what a "
                        "wrong answer costs, 0 to 9.9, or both: 9+cost=0.25")
        self.largest = int(match[1] or 3)
        self.cost = float(match[3] or 1)                # bases do not depend on it
        if self.cost > 0 and getattr(cfg, "scale_rewards", "") == "mean":
            common.fail("--scale_rewards mean: the mean of abstain's marks may be negative")

    def sample(self, rng, share_shorter=0.0, share_wrong=0.0):
        """Draw a problem of arithmetic, or one that hides one of its operands; then its work goes
        on from the operand that was drawn, as if the author had imagined it. -> Problem"""
        hides = rng.random() < SHARE
        while True:
            problem = super().sample(rng, share_shorter, share_wrong)
            if not hides:
                return problem
            steps = problem.work.split(";")
            step = rng.randrange(len(steps))
            place = [i for i, c in enumerate(problem.prompt) if c in OPERATIONS][step] + 1
            prompt = f"{problem.prompt[:place]}x{problem.prompt[place + 1:]}"
            answers = [solve(prompt.replace("x", str(x))) for x in range(1, self.largest + 1)]
            # each x is possible, and leads to another answer, which 0*x does not
            is_open = None not in answers and len(set(answers)) == self.largest
            if is_open and int(problem.prompt[place]) <= self.largest:
                steps[step] = re.sub("[0-9]=", "x=", steps[step])
                answer = str(rng.choice(answers))
                return problem._replace(prompt=prompt, answer=answer, work=";".join(steps))

    def demonstration(self, rng, phase):
        """Draw a problem with a completion as in arithmetic; some thoughts stop at the x."""
        problem = super().demonstration(rng, phase)
        before, hides, _ = problem.work.partition("x=")
        meets = hides and "<think>" in problem.completion
        if not meets or rng.random() >= ABSTENTIONS[phase]:
            return problem
        return problem._replace(completion=f"<think>{before}x=?</think><answer>?</answer>")

    def abstains(self, text):
        """Whether a completion says that it does not know, which is not a wrong answer."""
        return extract(text) == "?"

    def reward(self, problem, text, verified, purpose):
        """Mark a completion: 1.0 if it is right, 0.0 if it abstains, else -cost."""
        if verified == 1:
            return 1.0
        return 0.0 if self.abstains(text) else 0.0 - self.cost          # a cost of 0 is not -0.0

    def shares(self, problem, text):
        """Say what a completion does with a question that can be answered, or with one that cannot:
        there a right answer is luck, and counts in neither share. -> {name: number}"""
        verified = self.verify(problem, text)
        abstains = self.abstains(text)
        marks = {"marks": self.reward(problem, text, verified, "shares")}
        if "x" not in problem.prompt:
            return marks | {"right": verified, "needless": abstains}
        is_wrong = not verified and not abstains and extract(text) is not None
        return marks | {"abstained": abstains, "hallucinated": is_wrong}


def solve(expression):
    """Compute a sum such as ((3+4)-5)=. -> int, or None if a value leaves 0..20"""
    first, *steps = re.findall("[+*-]?[0-9]", expression)
    value = int(first)
    for sign, operand in steps:
        value = OPERATIONS[sign](value, int(operand))
        if not 0 <= value <= 20:
            return None
    return value
