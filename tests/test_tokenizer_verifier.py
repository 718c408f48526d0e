"""Text in and out, the verifier against hostile text, and the arithmetic problems."""
import random
import re
import time

import pytest
import torch

import common
import grpo
from common import Problem, sample_corpus, sample_problems

TEXTS = ["", "((3+4)*2)=", "<think>3+4=7</think><answer>7</answer>", "<|eos|><|pad|>", "tab\tnew\nline\r\n",
         "\x00NUL\x00", "na\u00efve \u4f60\u597d \u0663", "\U0001f600\U0001f1e9\U0001f1ea e\u0301",
         "\ufffd\u200b", "\x7f\x80\xff"]


# ---- tokenizer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_any_text_comes_back_as_it_was(text):
    as_bytes = grpo.TOKENIZER.encode_ordinary(text)
    with_specials = grpo.TOKENIZER.encode(text, allowed_special="all")
    assert bytes(as_bytes) == text.encode()
    assert grpo.decode(as_bytes) == grpo.decode(with_specials) == text


def test_any_random_text_comes_back_as_it_was():
    rng = random.Random(0)
    for _ in range(2000):
        points = [rng.choice((rng.randrange(128), rng.randrange(0xd800), rng.randrange(0xe000, 0x110000)))
                  for _ in range(rng.randrange(12))]
        text = "".join(map(chr, points))
        assert grpo.decode(grpo.TOKENIZER.encode_ordinary(text)) == text


def test_half_a_surrogate_pair_does_not_raise(config):
    for text in ("\ud83d", "a\udc00b", "\udfff\ud800"):
        assert grpo.decode(grpo.TOKENIZER.encode_ordinary(text)).count("\ufffd") >= 1
        assert grpo.encode_prompts([text], config()).shape == (1, 10)
        assert grpo.verify(Problem("arithmetic", "", "7"), f"{text}<answer>7</answer>") == 1
        assert grpo.verify(Problem("arithmetic", "", "7"), f"<answer>7{text}</answer>") == 0


def test_a_tag_is_one_token_and_so_is_the_end():
    ids = grpo.TOKENIZER.encode("<think>1</think><answer>2</answer><|eos|><|pad|>", allowed_special="all")
    assert len(ids) == 8 and ids[-2:] == [grpo.EOS, grpo.PAD] and max(ids) < grpo.VOCAB
    assert len({grpo.TOKENIZER.encode_single_token(name) for name in grpo.SPECIALS}) == len(grpo.SPECIALS)


def test_a_prompt_cannot_inject_a_special_token(config):
    cfg = config(operands=5)
    for name in grpo.SPECIALS:
        ids = grpo.encode_prompts([f"1{name}2", "3="], cfg)
        assert ids.shape == (2, 18)
        assert ids[0].tolist() == [grpo.PAD] * (16 - len(name)) + list(f"1{name}2".encode())


def test_prompts_are_padded_on_the_left_to_the_width_of_the_longest_problem(config):
    cfg = config()
    problems = sample_problems("arithmetic", 500, 0, operands=3)
    ids = grpo.encode_prompts([problem.prompt for problem in problems], cfg)
    assert max(len(problem.prompt) for problem in problems) == ids.shape[1] == common.arithmetic.width(3)
    for row, problem in zip(ids.tolist(), problems):
        assert row == [grpo.PAD] * (ids.shape[1] - len(problem.prompt)) + list(problem.prompt.encode())


def test_ids_without_a_token_and_bytes_that_are_no_text_become_replacement_characters():
    assert grpo.decode([65, 266, 66, grpo.VOCAB - 1]) == "A\ufffdB\ufffd"
    assert grpo.decode([0xff, 65, 0xe4, 0xbd]) == "\ufffdA\ufffd"
    for i in range(grpo.VOCAB):
        assert len(grpo.decode([i])) >= 1


# ---- verifier -------------------------------------------------------------------------------------------

SEVEN = Problem("arithmetic", "(3+4)=", "7")
RIGHT = ["<answer>7</answer>", "<think>3+4=7</think><answer>7</answer>", "<answer> 7 </answer>",
         "no tags before <answer>7</answer> and after", "<answer>7</answer><|pad|>", "<answer>07</answer>",
         "\x00<answer>7</answer>\ufffd", "<think><answer>7</answer>", "99**99**99 <answer>7</answer>",
         "<ANSWER>8</ANSWER><answer>7</answer>"]
WRONG = ["", "7", "<answer>", "</answer>", "<answer></answer>", "<answer> </answer>", "<answer>8</answer>",
         "<answer>-7</answer>", "<answer>7", "7</answer>", "</answer>7<answer>", "<answer>7</answer",
         "<answer>7</answer><answer>7</answer>", "<answer>8</answer><answer>7</answer>",
         "<answer><answer>7</answer></answer>", "<answer>7</answer></answer>", "<answer><answer>7</answer>",
         "<Answer>7</Answer>", "< answer>7</answer>", "<answer>7.0</answer>", "<answer>+7</answer>",
         "<answer>7e0</answer>", "<answer>3+4</answer>", "<answer>0x7</answer>", "<answer>7_</answer>",
         "<answer>0_7</answer>", "<answer>7 7</answer>", "<answer>7,</answer>", "<answer>7;8</answer>",
         "<answer>\u0667</answer>", "<answer>\uff17</answer>", "<answer>\u2077</answer>",
         "<answer>7\x00</answer>", "<answer>7\ufeff</answer>", "<answer>\u00a07</answer>",
         "<answer>seven</answer>", "<answer>None</answer>", "<answer>- 7</answer>", "<answer>--7</answer>"]
HOSTILE = ["<answer>99**99**99</answer>", "<answer>" + "9" * 10_000 + "</answer>",
           "<answer>" + "0" * 10_000 + "7</answer>", "<answer>__import__('os').abort()</answer>",
           "<answer>" + "(" * 5_000 + "7" + ")" * 5_000 + "</answer>", "<answer>" * 2_000, "\x00" * 20_000,
           "<answer>7</answer>" * 2_000, "<answer>" * 2_000 + "7" + "</answer>" * 2_000,
           "<answer>" + " " * 10_000 + "7</answer>", "<think>" * 3_000 + "<answer>8</answer>",
           "<answer>" + "\x007" * 5_000 + "</answer>", "<answer>" + "\u0667" * 10_000 + "</answer>",
           "<answer" * 3_000 + ">8</answer>", "<" * 20_000, "<answer>7" + "</answer" * 2_000,
           "<answer>" + "-" * 10_000 + "7</answer>", "<answer>7" + "\n" * 10_000 + "</answer>",
           "<answer>{[(" * 2_000, "\ud800" * 10_000 + "<answer>8</answer>"]


@pytest.mark.parametrize("text", RIGHT, ids=ascii)
def test_a_right_answer_in_one_answer_block_earns_one(text):
    assert grpo.verify(SEVEN, text) == 1.0


@pytest.mark.parametrize("text", WRONG, ids=ascii)
def test_anything_else_earns_nothing(text):
    reward = grpo.verify(SEVEN, text)
    assert reward == 0.0 and isinstance(reward, float)


def test_a_negative_answer_and_zero_can_be_right():
    assert grpo.verify(Problem("arithmetic", "(3-4)=", "-1"), "<answer>-1</answer>") == 1
    assert grpo.verify(Problem("arithmetic", "(3-4)=", "-1"), "<answer>1</answer>") == 0
    assert grpo.verify(Problem("arithmetic", "(4-4)=", "0"), "<answer>0</answer>") == 1
    assert grpo.verify(Problem("arithmetic", "(4-4)=", "0"), "<answer></answer>") == 0


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:20]))
def test_hostile_text_earns_nothing_within_a_millisecond(text):
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        assert grpo.verify(SEVEN, text) == 0.0
        best = min(best, time.perf_counter() - start)
    assert best < 1e-3


def test_a_hundred_thousand_random_texts_raise_nothing():
    rng, right = random.Random(0), 0
    pieces = ["<answer>", "<answer>", "</answer>", "</answer>", "<think>", "</think>", "7", "7", "7", "8",
              "-", " ", "\n", "\x00", "\u0667", "<", ">", "/"]
    for i in range(100_000):
        if i % 2:
            text = rng.randbytes(rng.randrange(40)).decode(errors="replace")
        else:
            text = "".join(rng.choices(pieces, k=rng.randrange(1, 8)))
        before, _, rest = text.partition("<answer>")
        inside, close, behind = rest.partition("</answer>")
        alone = "answer>" not in before + inside + behind
        reward = grpo.verify(SEVEN, text)
        assert reward == float(alone and close != "" and inside.strip(" ") == "7"), text
        right += reward
    assert right > 50                                       # else the sum of it tests little


def test_the_answer_of_a_problem_earns_one_and_that_of_another_does_not():
    problems = sample_problems("arithmetic", 300, 0) + sample_problems("arithmetic", 300, 0, "test")
    for p, q in zip(problems, problems[1:]):
        assert grpo.verify(p, "<answer>" + p.answer + "</answer>") == 1
        assert grpo.verify(p, "<answer>" + q.answer + "</answer>") == (p.answer == q.answer)


# ---- problems -------------------------------------------------------------------------------------------


def values(prompt):
    """The value of every bracket of a problem, by Python's own arithmetic, the innermost first."""
    inner, found = prompt.removesuffix("="), []
    while inner.startswith("("):
        found.insert(0, eval(inner))
        inner = inner[1:-1].rstrip("0123456789")[:-1]
    return found


@pytest.mark.parametrize("operands", [2, 3, 5])
@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_are_those_of_python_and_no_value_on_the_way_leaves_0_to_20(operands, split):
    answers = set()
    for problem in sample_problems("arithmetic", 300, 0, split, operands=operands):
        assert re.fullmatch(r"[-+*()0-9]+=", problem.prompt) and len(problem.prompt) <= 4 * operands - 2
        numbers = values(problem.prompt)
        assert problem.task == "arithmetic" and problem.answer == str(numbers[-1])
        assert len(numbers) == operands - 1 and all(0 <= number <= 20 for number in numbers)
        answers.add(problem.answer)
    assert len(answers) > 12 or operands == 2


def test_problems_are_a_function_of_the_arguments():
    problems = sample_problems("arithmetic", 50, 3)
    random.seed(0)
    torch.manual_seed(0)
    assert sample_problems("arithmetic", 50, 3) == problems
    assert sample_problems("arithmetic", 50, 3, "train", operands=5) == problems
    assert sample_problems("arithmetic", 20, 3) == problems[:20]
    others = [sample_problems("arithmetic", 50, 4), sample_problems("arithmetic", 50, 3, "test"),
              sample_problems("arithmetic", 50, 3, operands=4), sample_problems("arithmetic", 50, (3, 0))]
    for other in others:
        assert len(other) == 50 and len(set(other) & set(problems)) <= 1
    state = random.getstate()
    sample_problems("arithmetic", 5, 3)
    assert random.getstate() == state


@pytest.mark.parametrize("operands", [2, 3, 5])
def test_no_problem_is_in_both_splits_and_no_demonstration_is_of_a_held_out_problem(operands):
    test = {p.prompt for p in sample_problems("arithmetic", 3000, 0, "test", operands=operands)}
    train = {p.prompt for p in sample_problems("arithmetic", 30_000, 0, "train", operands=operands)}
    shown = {p.prompt for phase in ("textbook", "forum")
             for p, _ in sample_corpus("arithmetic", 10_000, 0, phase, operands=operands)}
    assert not test & train and not test & shown
    assert len(test) > 10 and len(shown) > 100
    if operands == 3:                                       # few problems: nearly all were drawn,
        assert 0.05 < len(test) / (len(train) + len(test)) < 0.15
        assert len(train & shown) > 0.5 * len(shown)        # so that a leak would show


def test_an_unknown_split_is_refused():
    for split in ("valid", "", "Train", None):
        with pytest.raises(ValueError):
            sample_problems("arithmetic", 1, 0, split)


@pytest.mark.parametrize("phase, share", [("textbook", 0.9), ("forum", 0.3)])
def test_demonstrations_are_right_and_as_many_think_as_the_phase_says(phase, share):
    corpus = sample_corpus("arithmetic", 4000, 0, phase, operands=4)
    assert corpus == sample_corpus("arithmetic", 4000, 0, phase, operands=4)
    thinking, short, checks = 0, 0, 0
    for problem, text in corpus:
        assert grpo.verify(problem, text) == 1
        numbers = values(problem.prompt)
        short += len(numbers) < 3
        if text != f"<answer>{problem.answer}</answer>":
            thinking += 1
            work = re.fullmatch("<think>(.*)</think><answer>.*</answer>", text)[1]
            for step, wrong, again, right in re.findall("([^;]+)=([0-9]+);wait,([^;]+)=([0-9]+)", work):
                checks += 1
                assert step == again and wrong != right and 0 <= int(wrong) <= 20
            work = re.sub("[^;]+;wait,", "", work)
            left = re.search("[0-9]", problem.prompt)[0]
            for line, number in zip(work.split(";"), numbers, strict=True):
                expression, result = line.split("=")
                assert re.fullmatch(rf"{left}[-+*][1-9]", expression)       # goes on from the line before
                assert eval(expression) == int(result) == number
                left = result
            used = re.findall("[0-9]+", problem.prompt)
            assert [re.split("[-+*]", line.split("=")[0])[1] for line in work.split(";")] == used[1:]
    assert abs(thinking / 4000 - share) < 0.02
    assert checks == 0 if phase == "forum" else 0.01 < checks / thinking < 0.03
    assert 0.05 < short / 4000 < 0.2                        # padding on the left is an ordinary sight


def test_a_generator_is_a_function_of_its_purpose():
    purposes = ((0, "rollout", 1), (0, "rollout", 1), (0, "rollout", 2), (1, "rollout", 1), (0, "x", 1))
    draws = [torch.rand(4, generator=common.generator(*purpose)).tolist() for purpose in purposes]
    assert draws[0] == draws[1] and len({tuple(draw) for draw in draws}) == 4
