"""lab/sharpen.py: CoT decoding, what is measured, and the verdicts."""
from types import SimpleNamespace

import pytest
import torch
from conftest import f64

import common
import grpo
from lab import sharpen
from lab.entry import CONTRADICTED, NOT_SHOWN, SHOWN
from lab.sharpen import ANSWER, ANSWERED, THINK

CLAIMS = ["maj", "pass", "base solves more", "thought", "certain path", "RL beats path"]


# ---- sharpening, exactly ---------------------------------------------------------------------

def test_rl_may_lose_with_many_samples_what_it_wins_with_one():
    # Whether to think or to guess is learned for all problems at once, and a few need a guess.
    by_thought = f64([0.9] * 9 + [0.0])
    by_guess = f64([0.05] * 9 + [0.3])
    weight = f64(0.0).requires_grad_()
    scores = []
    for _ in range(100):
        chance = weight.sigmoid()
        right = chance * by_thought + (1 - chance) * by_guess
        scores.append([(1 - (1 - right.detach()) ** k).mean().item() for k in (1, sharpen.K)])
        [gradient] = torch.autograd.grad(right.mean(), [weight])    # what every method estimates
        weight.data += gradient
    gains = [now - before for before, now in zip(scores[0], scores[-1])]
    assert gains[0] > 0.25 and gains[1] < -0.001


# ---- CoT decoding ----------------------------------------------------------------------------

@pytest.fixture
def guesser(bigram):
    """A policy that begins with <answer>, ends at once, thinks or says x, in this order; behind
    <answer> it says 8 with a chance of 0.7 and 9 with 0.2, and each ends the answer."""
    table = torch.full((grpo.VOCAB_SIZE, grpo.VOCAB_SIZE), -20.0).double()
    follows = {"=": {ANSWER: 0.5, grpo.EOS: 0.3, THINK: 0.15, ord("x"): 0.05},
               ANSWER: {ord("8"): 0.7, ord("9"): 0.2, ord("1"): 0.1},
               grpo.EOS: {ANSWER: 1.0}, THINK: {ord("8"): 1.0}, "x": {ANSWER: 1.0},
               "8": {ANSWERED: 0.99, grpo.EOS: 0.01}, ANSWERED: {grpo.EOS: 1.0}}
    for token, chances in follows.items():
        row = ord(token) if isinstance(token, str) else token
        for other, chance in chances.items():
            table[row, other] = f64(chance).log()
    return bigram(table)


@pytest.fixture
def problem(config, load_task):
    """A task, flags, and a problem whose answer is 8."""
    cfg = config(operands="2")
    return load_task(cfg), cfg, common.Problem("(3+5)=", "8", task="arithmetic")


def rollout_of(tokens):
    tokens = torch.tensor([tokens])
    return SimpleNamespace(tokens=tokens, mask=(tokens != grpo.PAD).double())


def test_certainty_is_the_mean_margin_of_the_tokens_of_the_answer(guesser):
    prompts = torch.tensor([[ord("=")]])
    one = rollout_of([ord("x"), ANSWER, ord("8"), ANSWERED, grpo.EOS, grpo.PAD])
    # The tag that ends the answer does not count, and nothing before it begins.
    assert sharpen.certainty(guesser, prompts, one).item() == pytest.approx(0.5, abs=1e-6)
    two = rollout_of([ANSWER, ord("8"), ord("x"), ANSWERED, grpo.EOS, grpo.PAD])
    margin = (0.5 + 0.98) / 2                                       # behind 8 the tag is likeliest
    assert sharpen.certainty(guesser, prompts, two).item() == pytest.approx(margin, abs=1e-6)
    none = rollout_of([THINK, ord("8"), grpo.EOS, grpo.PAD])
    assert sharpen.certainty(guesser, prompts, none).item() == 0


def test_an_answer_may_begin_with_the_first_token_and_ends_with_the_output(guesser):
    prompts = torch.tensor([[ord("="), ANSWER]])
    for tokens in ([ord("8"), ANSWERED, grpo.EOS], [ord("8"), grpo.PAD, grpo.PAD]):
        found = sharpen.certainty(guesser, prompts, rollout_of(tokens))
        assert found.item() == pytest.approx(0.5, abs=1e-6)


def test_paths_are_greedy_after_the_likeliest_first_tokens(guesser, problem):
    task, cfg, eight = problem
    found = sharpen.paths(guesser, task, cfg, [eight, eight])
    assert [path["chance"][1].item() for path in found] == pytest.approx([0.5, 0.3, 0.15, 0.05])
    assert [path["thinks"][1].item() for path in found] == [0, 0, 1, 0]
    # <answer>8</answer>; an end at once, whatever follows; <think>8</answer>; x<answer>8</answer>
    assert [path["right"][1].item() for path in found] == [1, 0, 0, 1]


def test_the_most_certain_path_of_each_problem_is_chosen():
    found = [{"right": f64([1, 0, 1]), "certainty": f64([0.9, 0.2, 0.5])},
             {"right": f64([0, 1, 0]), "certainty": f64([0.3, 0.8, 0.6])}]
    assert sharpen.most_certain(found).tolist() == [1, 1, 0]


# ---- what is measured ------------------------------------------------------------------------

def test_curves_are_kept_at_powers_of_two():
    curve = [k / 1000 for k in range(1, sharpen.K + 1)]
    scored = {"think_share": 0.5, "accuracy_given_think": 0.25, "pass@k": curve, "maj@k": curve}
    kept = sharpen.scores_of(scored)
    assert kept["pass@k"] == [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128]
    assert (kept["thinks"], kept["right if it thinks"]) == (0.5, 0.25)


def test_both_ways_have_as_many_samples_and_only_one_has_a_teacher(monkeypatch):
    started = []
    monkeypatch.setattr(sharpen, "run", lambda script, folder, *flags, quiet: started.append(
        (script, [str(flag) for flag in flags])))
    monkeypatch.setattr(sharpen, "curve", lambda folder, metric: [0.25])
    found = sharpen.taught("the-teacher", 7, 4, "work")
    assert found == {"RL": [0.25], "distillation": [0.25]}
    [(rl, flags), (distillation, more)] = started
    assert (rl, distillation) == ("grpo.py", "reinforce.py")
    assert more == ["--view", "token", "--gamma", "0", "--teacher", "the-teacher", *flags]
    cfg = common.parse_flags(grpo.Config, flags)
    assert (cfg.seed, cfg.num_prompts, cfg.max_steps, cfg.stop_at) == (7, 4, 40, 2)


# ---- the verdicts ----------------------------------------------------------------------------

def scored(one, most, maj, right):
    return {"thinks": 0.5, "right if it thinks": right,
            "pass@k": [one] * (len(sharpen.KS) - 1) + [most],
            "maj@k": [one] * (len(sharpen.KS) - 1) + [maj]}


SAME = (0.5, 0.8, 0.6, 0.9)
CURVES = {"RL": [0.5, 0.9, 0.9], "distillation": [0.5, 0.9, 0.9]}


def found_with(trained=SAME, certain=0.5, greedy=0.5, **taught):
    """What would be found if three runs of each task were alike."""
    path = {"chance": 0.7, "thinks": 0.0, "right": 0.5, "certainty": 0.6}
    result = {"base": scored(*SAME), "trained": scored(*trained),
              "taught": {"32": CURVES | taught, "4": CURVES},
              "decoding": {"paths": [path] * sharpen.FIRST, "greedy, base": 0.5, "problems": 9,
                           "most certain path, base": certain, "greedy, trained": greedy}}
    return {task: [result] * 3 for task in sharpen.TASKS}


def verdicts(**changes):
    """The verdicts on arithmetic, which countdown has, too; and those on distillation."""
    listed = [claim.verdict for claim in sharpen.claims(found_with(**changes))]
    assert listed[:6] == listed[6:12]
    return dict(zip(CLAIMS, listed)), listed[12:]


def test_equal_policies_show_nothing():
    assert verdicts() == (dict.fromkeys(CLAIMS, NOT_SHOWN), [NOT_SHOWN, NOT_SHOWN])


def test_a_policy_that_is_only_sharper_says_so():
    found, _ = verdicts(trained=(0.7, 0.7, 0.7, 0.8))
    assert found == dict(zip(CLAIMS, [SHOWN, SHOWN, SHOWN, CONTRADICTED, NOT_SHOWN, NOT_SHOWN]))


def test_a_policy_that_only_solves_more_of_many_says_so():
    found, _ = verdicts(trained=(0.5, 0.9, 0.5, 1.0), certain=0.4, greedy=0.6)
    assert found == dict(zip(CLAIMS, [CONTRADICTED] * 3 + [SHOWN, CONTRADICTED, SHOWN]))
    found, _ = verdicts(certain=0.6)
    assert (found["certain path"], found["RL beats path"]) == (SHOWN, CONTRADICTED)


def test_the_steps_of_each_size_are_compared_on_their_own():
    late = [0.5, 0.5, 0.5]
    assert verdicts(RL=late)[1] == [SHOWN, NOT_SHOWN]
    assert verdicts(distillation=late)[1] == [CONTRADICTED, NOT_SHOWN]


def test_tables_have_a_cell_for_each_head():
    for heads, rows in sharpen.tables(found_with()):
        assert {len(row) for row in rows} == {len(heads)}
