"""Arithmetic in two notations, which are like two languages: a step of a thought is 3+4=7, or, in
words, 3 plus 4 is 7:

  ((3+4)-5)=<think>3 plus 4 is 7;7-5=2</think><answer>2</answer>

The textbook and the forum choose one of them at random for each step. So the thoughts of the base
mix them, as those of DeepSeek-R1-Zero mix languages. A cold start writes all steps in words.
DeepSeek-R1 rewards the share of a thought's words that are in one language (2501.12948, section
2.3.2). Here, --reward accuracy+language adds the share of a thought's steps that are in words. The
level is the number of operands, or a range.
"""
import re

from tasks import Arithmetic, block, span

SHARE = 0.5             # of the steps are in words, in the textbook and in the forum
WORDS = {"+": "plus", "-": "minus", "*": "times"}
IN_WORDS = "(wait,)?[0-9]{1,4} (plus|minus|times) [0-9]{1,4} is [0-9]{1,4}"     # a step


class Notation(Arithmetic):
    """The problems, their split and the verifier are those of arithmetic."""
    defaults = {"max_completion_length": 96}

    def __init__(self, cfg, level=""):
        super().__init__(None, *span("notation", level or "5"))        # load_task hands verify over

    def demonstration(self, rng, phase):
        problem = super().demonstration(rng, phase)
        share = 1.0 if phase == "cold_start" else SHARE

        def write(step):
            left, sign, right, result = step.groups()
            in_words = rng.random() < share
            return f"{left} {WORDS[sign]} {right} is {result}" if in_words else step[0]
        text = re.sub("([0-9]+)([+*-])([0-9]+)=([0-9]+)", write, problem.completion)
        return problem._replace(completion=text)

    def share_in_words(self, text):
        """Compute the share of a thought's steps that are in words, right or wrong; 0.0 without a
        thought. -> float"""
        steps = (block(text, "think") or "").split(";")
        return sum(re.fullmatch(IN_WORDS, step) is not None for step in steps) / len(steps)

    def observe(self, batch, step):
        """Average the share of the steps in words over the completions. -> metrics"""
        shares = [self.share_in_words(text) for text in batch.texts]
        return {"notation/words": sum(shares) / len(shares)}
