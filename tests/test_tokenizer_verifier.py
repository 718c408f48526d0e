"""Test the tokenizer, and the verifier of arithmetic on hostile text."""

from conftest import load_named

import common
import grpo
from common import Problem

# ---- tokenizer -------------------------------------------------------------------------------

def test_prompts_are_padded_on_the_left_to_the_width_of_the_longest_and_inject_no_special_token():
    task = load_named("arithmetic:3")
    problems = common.sample_problems(task, 500, 0)
    problems += [Problem(f"1{name}2"[:10], "") for name in common.SPECIAL_TOKENS]
    ids = grpo.encode_prompts(problems, task, "cpu")
    assert ids.shape[1] == task.prompt_width == max(len(problem.prompt) for problem in problems)
    for row, problem in zip(ids.tolist(), problems):
        padding = [grpo.PAD] * (task.prompt_width - len(problem.prompt))
        assert row == padding + list(problem.prompt.encode())


def test_ids_without_a_token_and_bytes_that_are_no_text_become_replacement_characters():
    assert grpo.decode([65, 266, 66, grpo.VOCAB_SIZE - 1]) == "A\ufffdB\ufffd"
    assert grpo.decode([0xff, 65, 0xe4, 0xbd]) == "\ufffdA\ufffd"
    assert all(len(grpo.decode([i])) >= 1 for i in range(grpo.VOCAB_SIZE))


# ---- verifier --------------------------------------------------------------------------------

SEVEN = Problem("(3+4)=", "7")
RIGHT = ["<answer>7</answer>", "<think>3+4=7</think><answer>7</answer>", "<answer> 7 </answer>",
         "no tags before <answer>7</answer> and after", "<answer>07</answer>",
         "<think><answer>7</answer>", "<ANSWER>8</ANSWER><answer>7</answer>"]
WRONG = ["", "7", "<answer></answer>", "<answer>8</answer>", "<answer>-7</answer>", "<answer>7",
         "7</answer>", "</answer>7<answer>", "<answer>7</answer><answer>7</answer>",
         "<answer><answer>7</answer></answer>", "<answer>7</answer></answer>", "<Answer>7</Answer>",
         "<answer>7.0</answer>", "<answer>+7</answer>", "<answer>3+4</answer>",
         "<answer>7 7</answer>", "<answer>\u0667</answer>", "<answer>7\x00</answer>",
         "<answer>- 7</answer>"]


def test_a_right_answer_in_one_answer_block_earns_one_and_anything_else_nothing():
    for text in RIGHT:
        assert grpo.verify(SEVEN, text) == load_named().verify(SEVEN, text) == 1.0, ascii(text)
    for text in WRONG:
        verdict = grpo.verify(SEVEN, text)
        assert verdict == 0.0 and isinstance(verdict, float), ascii(text)
    for answer, text, verdict in (("-1", "-1", 1), ("-1", "1", 0), ("0", "0", 1), ("0", "", 0)):
        assert grpo.verify(Problem("", answer), f"<answer>{text}</answer>") == verdict
