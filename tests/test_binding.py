"""Anybody's arguments are bound to our names in one way, in the vectors and in the engines."""
import functools
import textwrap

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
    ("pi, mu, adv, valid, lo, hi", KNOWN,
     "logps old_logps advantages mask epsilon_low epsilon_high"),
    ("logprobs, behav_logprobs, seq_adv, o_mask, eps_left, eps_right", KNOWN,
     "logps old_logps advantages mask epsilon_low epsilon_high"),
    ("new_logprobs_BT, old_logprobs_BT, A_hat, comp_mask, eps_l, eps_high_IS", KNOWN,
     "logps old_logps advantages mask epsilon_low epsilon_high"),
    ("seq_logps, is_ratio, mask, cliprange_reward", KNOWN, "- - mask -"),
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


# ---- what is looked up in arguments ----------------------------------------------------------

CLIPPED = """
import torch
def surrogate(new, old, A, low, high):
    ratio = (new - old).exp()
    A = A if A.dim() == 2 else A[:, None]
    return -torch.min(ratio * A, ratio.clamp(1 - low, 1 + high) * A)
"""
OF_BATCH = """
def loss(batch, cfg):
    return surrogate(batch.logprobs, batch.old_logprobs, batch.advantages, cfg.low, cfg.high)
""".replace("cfg.low", "cfg.clip_low").replace("cfg.high", "cfg.clip_high")
OF_PARTS = """
def loss(proto, settings):
    data = proto.batch
    x = surrogate(data["log_probs"], data["old_log_probs"], data["advantages"],
                  settings.actor.clip_ratio_low, getattr(settings.actor, "clip_ratio_high", 0.2))
    if proto.meta.get("use_kl", False):
        x = x + settings.actor.coef * data["ref_log_probs"]
    return x
"""
OF_ARGS = """
def loss(*args):
    new_logp, old_logp, adv, mask, clip_lo, clip_hi = args
    return surrogate(new_logp, old_logp, adv, clip_lo, clip_hi)
"""
OF_PLACES = """
def loss(logps, *args, **kwargs):
    old_logps, adv = args[0], args[1]
    return surrogate(logps, old_logps, adv, kwargs["clip_low"], kwargs.get("clip_high", 0.2))
"""
OF_HELPER = """
def of_minibatch(mb, low, high):
    return surrogate(mb["logp"], mb["old_logp"], mb["adv"] if "adv" in mb else 0, low, high)
def loss(minibatch, clip_low, clip_high):
    return of_minibatch(minibatch, clip_low, high=clip_high)
"""
OF_STARS = """
def of_names(logps, old_logps, advantages, low, high):
    return surrogate(logps, old_logps, advantages, low, high)
def loss(batch, clip_low, clip_high):
    return of_names(**batch, low=clip_low, high=clip_high)
"""
OF_CLASS = """
class loss:
    def __init__(self, args):
        self.args = args
        self.low = args.clip_low
    def __call__(self, experience):
        x = experience
        return surrogate(x.action_log_probs, x.old_action_log_probs, x.advantages, self.low,
                         self.args.clip_high)
"""
OF_BOTH = """
def loss(logprobs, inputs, clip_low, *, config):
    low = config.clip_low if config.clip_low is not None else config.clip_ratio
    return surrogate(logprobs, inputs["old_logprobs"], inputs["advantages"], low, config.clip_high)
"""
LOOKED_UP = {"a batch": OF_BATCH, "parts": OF_PARTS, "*args": OF_ARGS, "places": OF_PLACES,
             "a helper": OF_HELPER, "**batch": OF_STARS, "a class": OF_CLASS, "both": OF_BOTH}


@pytest.mark.parametrize("kind", LOOKED_UP)
def test_what_a_loss_looks_up_in_its_arguments_is_found(kind, tmp_path, capsys):
    for end, code in ((LOOKED_UP[kind], 0), (LOOKED_UP[kind].replace("old_log", "cold_log"), 2)):
        file = tmp_path / f"looks_{len(list(tmp_path.iterdir()))}_{abs(hash(kind))}.py"
        file.write_text(CLIPPED + end)
        if code == 0:
            assert command.main([f"{file}:loss", "--recipe", "grpo"]) == 0, capsys.readouterr().out
        elif kind in ("a batch", "parts"):          # an adapter is printed, and it is right
            assert command.main([f"{file}:loss", "--recipe", "grpo"]) == 2
            told = textwrap.dedent(capsys.readouterr().out.partition("\n\n")[2])
            assert "Bag({" in told and "..." not in told
            adapted = tmp_path / f"adapted_{file.name}"
            adapted.write_text(told)
            assert command.main([f"{adapted}:adapted", "--recipe", "grpo"]) == 0, told


def test_a_key_in_two_arguments_has_two_meanings(tmp_path):
    def margin(policy, reference):
        return policy["chosen_logps"] - reference["chosen_logps"]
    bound = binding.bind(margin, PAIRS)
    assert bound.call({"chosen": 3, "ref_chosen": 1}) == 2 and not bound.needed()


def test_a_wrong_loss_that_looks_up_its_inputs_is_wrong_and_named(tmp_path, capsys):
    file = tmp_path / "looks_wrong.py"
    file.write_text(CLIPPED.replace("torch.min", "torch.max") + OF_PARTS)
    assert command.main([f"{file}:loss", "--recipe", "grpo"]) == 1
    assert "likely: the clip takes the max instead of the min" in capsys.readouterr().out


def test_what_is_optional_may_be_missing_and_methods_are_no_keys():
    def loss(batch, cfg, prior):
        if cfg.beta > 0:
            return batch["ref_logps"] - prior.detach()
        slope = getattr(cfg, "slope", 0.5)
        return batch.logps.exp() * batch.get("mask", 1) * slope * prior.shape[0]
    fields = binding.parameters_of(loss)
    assert [*fields] == ["ref_logps", "logps", "mask", "beta", "slope", "prior"]
    empty = [name for name, one in fields.items() if one.default is one.empty]
    assert empty == ["logps", "beta", "prior"] and fields["slope"].default == 0.5
    x = torch.ones(2)
    bound = binding.bind(loss, {*KNOWN, "prior"})
    assert bound.call({"logps": 0 * x, "beta": 0, "prior": x}).tolist() == [1.0, 1.0]
    assert bound.call({"ref_logps": x, "beta": 1, "prior": x}).tolist() == [0.0, 0.0]


def test_the_engines_run_a_loss_that_looks_up_its_inputs(tmp_path):
    file = tmp_path / "looks_engine.py"
    file.write_text(CLIPPED + OF_BATCH)
    logps = torch.tensor([[-1.0, -0.5, -2.0], [-0.3, -1.5, -0.7]])
    given = (logps - 0.9, torch.tensor([1.0, -1.0]), torch.ones(2, 3))
    with pytest.raises(ValueError, match="loss needs clip_low, clip_high"):
        engines.load(f"{file}:loss")
    found, _ = engines.load(f"{file}:loss clip_low=0.2 clip_high=0.28")
    right, _ = engines.load("grpo:policy_loss epsilon_high=0.28")
    assert torch.equal(found(logps, *given), right(logps, *given))


def test_of_names_of_one_meaning_that_with_clip_is_bound_and_a_tiny_number_is_no_range():
    def names(function):
        return binding.bind(function, KNOWN, INPUTS).names
    assert names(lambda logps, eps, clip_eps: 0)["epsilon_low"] == "clip_eps"
    assert "epsilon_low" not in names(lambda logps, eps=1e-8: 0)
    assert names(lambda logps, epsilon=3e-4: 0)["epsilon_low"] == "epsilon"     # as in GSPO
    assert names(lambda logps, clip_eps=1e-8: 0)["epsilon_low"] == "clip_eps"


@pytest.mark.parametrize("low, high", [
    ('cfg["clip"]["low"]', 'cfg["clip"]["high"]'), ("cfg.clip.low", "cfg.clip.high"),
    ("cfg.clip.eps_low", "cfg.clip.eps_high"), ('cfg["algo"]["clip"]["low"]', "cfg.algo.clip.high"),
    ('cfg.get("clip").get("low")', 'cfg["clip"].get("high", 0.2)')])
def test_a_known_name_in_which_something_is_looked_up_is_no_leaf(low, high, tmp_path, capsys):
    file = tmp_path / f"nested_{abs(hash((low, high)))}.py"
    file.write_text(CLIPPED + "def loss(batch, cfg):\n    return surrogate(batch.logps.clone(), "
                    f"batch.old_logps, batch.advantages.clip(-9, 9), {low}, {high})\n")
    assert command.main([f"{file}:loss", "--recipe", "grpo"]) == 0, capsys.readouterr().out


def test_a_part_of_a_config_may_have_a_name(tmp_path, capsys):
    file = tmp_path / "nested_named.py"
    file.write_text(CLIPPED + 'def loss(batch, cfg):\n    clip = cfg["clip"]\n'
                    "    return surrogate(batch.logps, batch.old_logps, batch.advantages, "
                    'clip["low"], clip["high"])\n')
    assert command.main([f"{file}:loss", "--recipe", "grpo"]) == 0, capsys.readouterr().out
