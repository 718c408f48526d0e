"""What the losses of all scripts have in common, and the functions that other code calls. The
losses themselves are among the test vectors."""
import importlib
import inspect
import re

import pytest
import torch
from conftest import ones

import dpo
import grpo
import gspo
import ppo
import reinforce
from examples import zoo

pytestmark = pytest.mark.quick

X, ROW = -ones(3, 3), ones(3)           # of equal sides, so that nothing else refuses a shape
LOSS = X, X, ROW, ones(3, 3)            # logps, old_logps, advantages, mask
# Functions, arguments, and where they are a word that nobody wrote: what is said of it
UNKNOWN = [
    (reinforce.advantages, (X, "mine"), "baseline='mine': must be none, batch, mean, rloo or opt"),
    (reinforce.kl, (X, X, "mine"), "estimator='mine': must be k1"),
    (ppo.kl, (X, X, "mine"), "estimator='mine': must be k1 or k3"),
    (dpo.kl, (X, X, "mine"), "estimator='mine': must be k3"),
    (dpo.dpo_loss, (*[ROW] * 4, 0.1, "mine"), "loss_type='mine': must be sigmoid, ipo, hinge, rob"),
    (gspo.log_ratio, (X, X, X, "mine"), "level='mine': must be sequence or sequence_token"),
    *[row for script in (grpo, gspo) for row in (
        (script.advantages, (X, "mine"), "scale_rewards='mine': must be group, batch, mean or"),
        (script.policy_loss, (*LOSS, "mine"), "loss_type='mine': has no branch, or no row"),
        (script.kl, (X, X, "mine"), "estimator='mine': must be k1, k2, k3 or k3_ratio"))],
    *[(script.aggregate, (X, X, "mine"), "how='mine': must be sequence_mean, token_mean, sequence")
      for script in (reinforce, ppo, grpo, gspo)]]
# Functions that begin a loss, and arguments that they take
LOSSES = [
    *[(script.policy_loss, LOSS) for script in (ppo, grpo, gspo)], (zoo.policy_loss, LOSS),
    (ppo.penalty_loss, (*LOSS, 0.1)), (ppo.value_loss, (X, X, X, X, 0.2)),
    (reinforce.policy_loss, (X, ROW, X)), (dpo.dpo_loss, (*[ROW] * 4, 0.1)),
    (dpo.sequence_logps, (X, -X)), *[(script.kl, (X, X)) for script in (grpo, gspo)],
    *[(script.aggregate, (X, -X, "token_mean")) for script in (reinforce, ppo, grpo, gspo)]]


@pytest.mark.parametrize("function, given, words", UNKNOWN)
def test_a_name_that_nobody_wrote_is_not_taken_for_another_one(function, given, words, monkeypatch):
    with pytest.raises(ValueError, match=words):
        function(*given)
    for script in (grpo, gspo):                         # a row without a branch
        monkeypatch.setitem(script.LOSS_TYPES, "mine", ("mine", "token_mean"))
    with pytest.raises(ValueError, match=words):
        function(*given)


@pytest.mark.parametrize("function, given", LOSSES)
def test_no_number_of_a_loss_is_repeated_because_a_shape_is_wrong(function, given):
    function(*given)
    names = [*inspect.signature(function).parameters]
    for i, (name, x) in enumerate(zip(names, given)):
        if isinstance(x, torch.Tensor):
            A = {(3, 1), (3,), (3, 3)} if name == "advantages" else {tuple(x.shape)}
            for wrong in (X[0], X[:1], X[:, :1], X[:1, :1]):
                if tuple(wrong.shape) not in A:
                    with pytest.raises(ValueError, match="shapes .* must be equal"):
                        function(*given[:i], wrong, *given[i + 1:])


# ---- functions that other code calls ---------------------------------------------------------

CALLED = """
reinforce ppo grpo gspo dpo: logprobs(logits, tokens, temperature=1.0, kernel='auto')
grpo gspo: kl(logps, ref_logps, estimator='k3', log_rho=None)
ppo dpo: kl(logps, ref_logps, estimator='k3')
reinforce: kl(logps, ref_logps, estimator='k1')
reinforce ppo grpo gspo:
    aggregate(x, mask, how, num_sequences=None, num_tokens=None, max_length=None)
reinforce: advantages(rewards, baseline='none', sq_grad_norms=None)
reinforce: optimal_baseline(rewards, sq_grad_norms, weights)
reinforce: rewards_to_go(rewards, mask, gamma)
reinforce: policy_loss(logps, advantages, mask)
ppo: gae(rewards, values, mask, gamma, lam)
ppo: whiten(x, mask)
ppo: length_adaptive_lambda(lengths, alpha)
ppo: policy_loss(logps, old_logps, advantages, mask, epsilon=0.2, epsilon_high=0.2)
ppo: penalty_loss(logps, old_logps, advantages, mask, beta)
ppo: value_loss(values, old_values, returns, mask, cliprange_value)
grpo gspo: advantages(rewards, scale_rewards='group', eps=0.0001)
grpo gspo: overlong_penalty(lengths, max_length, buffer)
grpo: log_ratio(logps, old_logps, mask)
gspo: log_ratio(logps, old_logps, mask, level='sequence')
grpo: policy_loss(logps, old_logps, advantages, mask, loss_type='grpo', epsilon=0.2,
    epsilon_high=0.28, delta=0.0)
gspo: policy_loss(logps, old_logps, advantages, mask, loss_type='grpo', epsilon=0.03,
    epsilon_high=0.04, delta=0.0, level='sequence')
dpo: sequence_logps(logps, mask, average=False)
dpo: dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta, loss_type='sigmoid',
    label_smoothing=0.0, gamma=0.0)
"""


def test_functions_that_are_called_from_outside_keep_their_names_arguments_and_defaults():
    for scripts, name, arguments in re.findall(r"([\w ]+):\s+(\w+)(\(.*?\))\n", CALLED, re.S):
        for script in scripts.split():
            function = getattr(importlib.import_module(script), name)
            assert str(inspect.signature(function)) == " ".join(arguments.split()), function
