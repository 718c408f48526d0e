"""Anybody's arguments are bound to our names in one way, in the vectors and in the engines."""
import functools

import pytest
import torch

import engines
from vectors import __main__ as command
from vectors import binding

pytestmark = pytest.mark.quick

INPUTS = ("logps", "old_logps", "advantages", "mask")
KNOWN = {*INPUTS, "epsilon_low", "epsilon_high", "ref_logps", "beta", "delta"}
PAIRS = {"chosen", "rejected", "ref_chosen", "ref_rejected", "beta", "label_smoothing"}
CRITIC = {"values", "old_values", "returns", "mask", "cliprange"}


@pytest.mark.parametrize("parameters, known, expected", [
    ("old_log_prob, log_prob, advantages, response_mask", KNOWN,
     "old_logps logps advantages mask"),
    ("new_logprobs, logprobs, advantages, masks, cliprange", KNOWN,
     "logps old_logps advantages mask epsilon_low"),
    ("newlogprob, b_logprobs, mb_advantages, clip_coef", KNOWN,
     "logps old_logps advantages epsilon_low"),
    ("logprob, old_logprob, adv, loss_mask, eps_clip, eps_clip_high", KNOWN,
     "logps old_logps advantages mask epsilon_low epsilon_high"),
    ("pi_logprobs, pi_old_logprobs, pi_ref_logprobs, kl_coef", KNOWN,
     "logps old_logps ref_logps beta"),
    ("perTokenLogps, oldPerTokenLogps, A", KNOWN, "logps old_logps advantages"),
    ("trainer_logprobs, inference_logprobs, clip_ratio_low, clip_ratio_high, clip_ratio_c", KNOWN,
     "logps old_logps epsilon_low epsilon_high delta"),
    ("log_pi, log_pi_old, padding_mask, kl, logits", KNOWN, "logps old_logps - - -"),
    ("policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, "
     "reference_rejected_logps, beta", PAIRS, "chosen rejected ref_chosen ref_rejected beta"),
    ("pi_logps_w, pi_logps_l, ref_logps_w, ref_logps_l", PAIRS,
     "chosen rejected ref_chosen ref_rejected"),
    ("newvalue, b_values, b_returns, clip_coef", CRITIC, "values old_values returns cliprange"),
    ("logps, log_probs", KNOWN, "logps -"), ("new_logps, logps, old_logps", KNOWN,
                                             "- logps old_logps")])
def test_arguments_are_known_by_the_words_of_their_names(parameters, known, expected):
    bound = binding.bind(eval(f"lambda {parameters}: 0"), known, INPUTS)
    names = {theirs: ours for ours, theirs in bound.names.items()}
    found = [names.get(name, "-") for name in parameters.split(", ")]
    assert found == expected.split()
    assert bound.needed() == [name for name in parameters.split(", ") if name not in names]


def test_arguments_are_bound_by_their_position_only_if_no_input_is_known():
    bound = binding.bind(lambda x, y, w, m, clip_eps=0.2, *, slope=0.1: 0, KNOWN, INPUTS)
    assert bound.by_position and list(bound.settings) == ["slope"]
    assert bound.names == dict(zip(INPUTS, "xywm")) | {"epsilon_low": "clip_eps"}
    for function in (lambda x, y, adv, m: 0, lambda x, y, w: 0, lambda x, y, *, w, m: 0):
        bound = binding.bind(function, KNOWN, INPUTS)
        assert not bound.by_position and "logps" not in bound.names


def kept(a, b=2, /, c=3, *, mask=None, **more):
    return a, b, c, mask, more


def test_a_function_is_called_whatever_the_kinds_of_its_parameters():
    bound = binding.bind(kept, {"mask", "rewards"}).also({"x": "a", "y": "b", "z": "c"})
    assert bound.call({"x": 1, "z": 5, "mask": 4}) == (1, 2, 5, 4, {})
    assert bound.call({"x": 1, "y": 7, "rewards": 6, "ours": 0}) == (1, 7, 3, None, {"rewards": 6})
    partial = binding.bind(functools.partial(kept, 0, c=9), {"mask", "c"})
    assert partial.call({"mask": 4}, other=8) == (0, 2, 9, 4, {"other": 8})


def scaled(new_logps: torch.Tensor, old_logps: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return scale * (new_logps - old_logps)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_functions_that_torch_compiled_have_parameters():
    x = torch.ones(2)
    compiled = torch.jit.script(scaled)
    for function, result in ((compiled, 2), (functools.partial(compiled, scale=3.0), 3)):
        bound = binding.bind(function, KNOWN, INPUTS)
        assert list(bound.settings) == ["scale"] and not bound.needed()
        assert bound.call({"logps": x, "old_logps": 0 * x}).tolist() == [result] * 2


LOSS = """
import torch
def loss(OLD, NEW, advantages, MASK, epsilon_low=0.2, epsilon_high=0.28, slope=0.0):
    ratio = (NEW - OLD).clamp(max=80).exp()
    A = advantages if advantages.dim() == 2 else advantages[:, None]
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    return -torch.min(ratio * A, (clipped + slope * (ratio - clipped)) * A) * MASK
"""


@pytest.mark.parametrize("old, new, mask", [
    ("old_log_prob", "log_prob", "response_mask"), ("logprobs", "new_logprobs", "masks"),
    ("pi_old_logp", "pi_logp", "action_mask")])
def test_what_passes_in_the_vectors_is_what_the_engines_run(old, new, mask, tmp_path, capsys):
    """The arguments are in verl's order, so binding them by position would exchange two."""
    file = tmp_path / f"mine_{old}.py"
    file.write_text(LOSS.replace("OLD", old).replace("NEW", new).replace("MASK", mask))
    assert command.main([f"{file}:loss", "--recipe", "grpo"]) == 0
    assert command.main([f"{file}:loss", "--recipe", "grpo", "slope=0.1"]) == 1
    capsys.readouterr()
    logps = torch.tensor([[-1.0, -0.5, -2.0], [-0.3, -1.5, -0.7]])
    A = torch.tensor([1.0, -1.0])
    given = (logps - 0.9, A, torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]))
    for settings in ("", " epsilon_high=0.5"):
        found, _ = engines.load(f"{file}:loss{settings}")
        right, _ = engines.load(f"grpo:policy_loss{settings or ' epsilon_high=0.28'}")
        assert torch.equal(found(logps.requires_grad_(), *given), right(logps, *given))
    leaky, _ = engines.load(f"{file}:loss slope=0.1")
    assert not torch.equal(leaky(logps, *given), found(logps, *given))
