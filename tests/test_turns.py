"""Test tasks in turns: the task number, what a text may hold, and examples/turns.py."""
import importlib
from types import SimpleNamespace

import pytest
import torch
from conftest import close, f64, load_named
from small_runs import SMALL, arguments, changed_weights, policy_of, steps

import common
import grpo
from common import Problem
from tasks.calls import Turns

turns = importlib.import_module("examples.turns")
TASK = load_named("number")
PROBLEM = Problem("17-48", "", secret=36)
HIGHER, BOTH, LOWER, ALL, RIGHT = (
    f"<information>{word}</information>" for word in ("31-48", "31-43", "17-43", "17-48", "right"))


def guess(*numbers):
    """Write guesses, each followed by its response, except the last."""
    text = ""
    for n in numbers:
        text += TASK.respond(PROBLEM, text) + f"<search>{n}</search>"
    return text


# ---- the task number -------------------------------------------------------------------------

@pytest.mark.parametrize("text, response", [
    ("", ""), ("<search>30", ""), (guess(30), HIGHER), (guess(30, 44), BOTH), (guess(36), RIGHT),
    (guess(44), LOWER), (guess(99), ALL), (guess(30, 20, 50), HIGHER), ("hm" + guess(30), HIGHER),
    (guess(30) + HIGHER, ""), (guess(1, 2, 3, 4, 5), ALL), (guess(1, 2, 3, 4, 36), RIGHT),
    # after the end, nobody responds
    (guess(36) + RIGHT + "<search>36</search>", ""),
    (guess("x", 2, 3, 4, 5) + ALL + "<search>36</search>", ""),
    # not one number in one block: the turn is lost
    *((f"{action}</search>", ALL) for action in (
        "", "36", "<search>", "<search>x", "<search>036", "<search>" + "9" * 10_000,
        "<search>\u0663\u0666", "<search>36<search>36"))], ids=lambda text: ascii(text[:40]))
def test_a_guess_is_answered_until_the_number_is_found_or_five_guesses_are_used(text, response):
    assert TASK.respond(PROBLEM, text) == response
    assert TASK.respond(PROBLEM._replace(secret=None), text) == ""


@pytest.mark.parametrize("verdict, texts", [
    (1.0, [guess(36), guess(30, 36), guess(1, 2, 3, 4, 36), guess(36) + RIGHT + guess(1),
           guess(" 36 "), guess("x", 36)]),
    (0.0, ["", guess(30), "36", "<answer>36</answer>", RIGHT, guess(30) + RIGHT,
           guess(1, 2, 3, 4, 5) + ALL + guess(36), guess("36<search>36"),
           # two guesses without a response between them: the first was never answered
           "<search>30</search><search>36</search>",
           # the policy imitates a response to a guess that is wrong, or was never made
           "<search>30</search>" + RIGHT + guess(36), "<search>" + RIGHT + "</search>"])])
def test_only_the_number_within_five_answered_guesses_gets_a_reward(verdict, texts):
    for text in texts:
        found = TASK.verify(PROBLEM, text)
        assert found == verdict and isinstance(found, float), ascii(text)
        assert TASK.verify(PROBLEM._replace(secret=None), text) == 0


# ---- your own environment --------------------------------------------------------------------

class Walk(Turns):
    """A walk over letters: "b?" goes to b. REWARDS[here, there] is the reward; y and z end it."""
    prompt_width = 1
    call_tokens = ("?",)
    rewards = {("s", "a"): 1.0, ("a", "y"): 3.0, ("b", "y"): 1.0, ("b", "z"): 2.0}
    reply = "."

    def sample(self, rng):
        return Problem("s", "")

    def open(self, problem):
        return problem.prompt

    def step(self, state, action):
        after = action[-2:-1] or "s"
        return None if after in "yz" else after, self.reply, self.rewards.get((state, after), 0)


def batch_of(texts, G, prompts="s" * 99, is_response="."):
    """Make a batch of Walk. The policy wrote everything but dots; the rest is padding."""
    length = max(map(len, texts))
    mask = f64([[float(c != is_response) for c in text] + [0.0] * (length - len(text))
                for text in texts])
    problems = [Problem(prompts[row // G], "") for row in range(len(texts))]
    rewards = f64([walk.verify(*pair) for pair in zip(problems, texts)]).view(-1, G)
    return SimpleNamespace(mask=mask, texts=texts, problems=problems, rewards=rewards)


walk = Walk(None)


def config(**flags):
    return turns.Config(device="cpu", **flags)


def test_the_environment_reads_a_forced_opening_as_verify_does(watch):
    cfg = grpo.Config(device="cpu", task="number", max_completion_length=56)
    task = common.load_task(cfg, grpo.verify)
    torch.manual_seed(0)
    read = watch(task, "respond", lambda problem, text: text)
    batch = grpo.complete(grpo.GPT(cfg), task, cfg, common.sample_problems(task, 32, 0),
                          common.generator(0), "<think>")
    assert len(read) > 1 and all(text.startswith("<think>") for text in [*read, *batch.texts])


# ---- turns, returns and groups ---------------------------------------------------------------

def test_what_a_reward_adds_to_the_turns_goes_to_the_last_turn_and_so_does_an_unheard_call():
    batch = batch_of(["a?.y?.", "b?.z?"], 2)
    batch.rewards = batch.rewards + f64([[0.5, -1]])
    rewards, *_ = turns.read_turns(walk, batch)
    assert rewards.tolist() == [[1, 3.5], [0, 1]]
    batch = batch_of(["a?.y?."], 1)
    batch.mask[0, 2] = 1                        # the policy wrote both the call and the response
    rewards, by_number, _ = turns.read_turns(walk, batch)
    assert rewards.tolist() == [[4]] and by_number.tolist() == [[0]]


# ---- the advantages --------------------------------------------------------------------------

@pytest.mark.parametrize("scale", ["group", "none"])
def test_the_advantages_are_those_of_the_equations(scale):
    texts = ["a?.y?.!", "b?.z?.!", "b?.y?.!", "a?.a?.!"]         # 4, 2, 1 and 1 in all
    R = f64([[1 + 0.5 * 3, 3], [0.5 * 2, 2], [0.5, 1], [1, 0]])

    def relative(*values):
        x = f64(values)
        return (x - x.mean()) / (x.std() + 1e-4 if scale == "group" else 1)

    def found(**flags):
        cfg = config(scale_rewards=scale, **flags)
        A, metrics = turns.advantages(walk, batch_of(texts, 4), cfg)
        assert (A[:, [2, 5]] == 0).all()                # of what the environment wrote
        assert torch.equal(A[:, [0, 3]], A[:, [1, 4]]) and metrics["turns/mean"] == 9 / 4
        return A[:, [0, 3, 6]].T
    whole = relative(4, 2, 1, 1)
    close(found(adv_estimator="grpo"), whole.expand(3, 4))
    first, second, third = found(adv_estimator="reward_to_go", gamma=0.5)
    close(first, relative(*R[:, 0]))
    close(second, relative(*R[:, 1]))
    assert (third == 0).all()                           # after the end, or alone
    first, second, third = found(adv_estimator="gigpo", gamma=0.5, step_advantage_w=0.3)
    close(first, whole + 0.3 * relative(*R[:, 0]))
    # at the second turn, rows 0 and 3 are at a, row 3 a third time, and rows 1 and 2 are at b
    at_a, at_b = relative(3, 0, 0), relative(2, 1)
    close(second, whole + 0.3 * torch.stack([at_a[0], at_b[0], at_b[1], at_a[1]]))
    close(third, whole + 0.3 * f64([0, 0, 0, at_a[2]]))
    _, metrics = turns.advantages(walk, batch_of(["a?.y?.", "b?.z?."], 2), config())
    assert metrics["turns/shared_states"] == 0.5        # two of four turns are at s


# ---- runs ------------------------------------------------------------------------------------

FLAGS = SMALL | {"task": "number", "max_completion_length": 56, "base_steps": 250, "max_steps": 2,
                 "num_eval_problems": 2, "eval_steps": 9}


def test_with_one_reward_for_all_turns_a_run_is_that_of_grpo_and_other_tasks_are_refused(
        at_work_folder, refused):
    flags = FLAGS | {"dynamic_sampling": 4}
    grpo.main(arguments(flags | {"output_dir": "turns-grpo"}))
    turns.main(arguments(flags | {"output_dir": "turns-one", "adv_estimator": "grpo"}))
    assert not changed_weights(policy_of("turns-grpo"), policy_of("turns-one"))
    for one, other in zip(steps("turns-grpo"), steps("turns-one"), strict=True):
        assert one.items() - {("step_time", one["step_time"])} <= other.items()
        assert 1 <= other["turns/mean"] <= 5 and other["turns/shared_states"] > 0.1
    turns.main(arguments(FLAGS | {"output_dir": "turns-gigpo"}))
    signals = [steps(f"turns-{name}")[0]["signal"] for name in ("gigpo", "one")]
    assert signals[0] < signals[1]                      # some groups were replaced
    refused("has no turns", turns.main, arguments(SMALL))
