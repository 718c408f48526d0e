"""Our functions under the names of the test vectors: OURS maps the name of a file to a function of
the parameters of a case, which lists our functions of its inputs. No tests."""
import functools
import importlib
from types import SimpleNamespace
from unittest import mock

import torch
from update_scenes import call

import common
import dpo
import grpo
import gspo
import nano
import ppo
import reinforce
from engines import names
from tasks import scores

distill = importlib.import_module("examples.distill")
lag = importlib.import_module("examples.lag")
zoo = importlib.import_module("examples.zoo")

SCRIPTS = (reinforce, ppo, grpo, gspo)
ESTIMATORS = {reinforce: ("k1",), ppo: ("k1", "k3"), dpo: ("k3",)}          # grpo and gspo have all
BASELINES = {"none": "none", "batch_mean": "batch", "mean": "mean", "rloo": "rloo",
             "optimal": "optimal"}


def advantages(method, ddof=1, eps=1e-4, **_):
    found = []
    if method in names.SCALES and ddof == 1:
        scale = names.SCALES[method]
        found += [lambda rewards, script=script: script.advantages(rewards, scale, eps)
                  for script in (grpo, gspo)]
    if method in BASELINES:
        found += [lambda rewards, sq_grad_norms=None: reinforce.advantages(
            rewards, BASELINES[method], sq_grad_norms)]
    return found + {
        "opo": [lambda rewards, lengths: zoo.opo(rewards, lengths)],
        "passk": [zoo.passk],
        "gdpo": [lambda rewards, more_rewards: zoo.gdpo([rewards, more_rewards])],
        "remax": [remax]}.get(method, [])


def remax(rewards, greedy_rewards):
    cfg = zoo.Config(device="cpu", advantage="remax", loss_type="dr_grpo")
    with mock.patch.object(zoo, "greedy_rewards", lambda *_: greedy_rewards[:, None]):
        A = zoo.advantages(None, None, SimpleNamespace(rewards=rewards), cfg, 0)
    return A.view_as(rewards)


def token_losses(method, **given):
    """List our functions of logps, old_logps, advantages and mask that compute L_t."""
    if method == "reinforce":
        return [lambda logps, _, A, mask: reinforce.policy_loss(logps, A, mask)]
    if method == "penalty":
        return [functools.partial(ppo.penalty_loss, beta=given["coef"])]
    loss = names.find(method=method)
    try:
        settings = names.translate(loss, given, "here")
    except NotImplementedError:         # the lower bound of CISPO
        return []
    script = {"grpo": grpo, "gspo": gspo, "zoo": zoo}[loss.script]
    found = [functools.partial(script.policy_loss, **settings)]
    if method == "clip" and "delta" not in given:
        bounds = {name: settings[name] for name in ("epsilon", "epsilon_high")}
        found += [functools.partial(ppo.policy_loss, **bounds)]
    return found


def losses_of(case):
    """List our functions that compute L_t of a case of policy_loss from log pi_old, too. PPO's
    penalty is left out, because engines do not have its beta."""
    given = {name: x for name, x in case["parameters"].items() if name not in ("how", "max_length")}
    return [] if given["method"] in ("reinforce", "penalty") else token_losses(**given)


def policy_loss(method, how, max_length=None, beta=None, **given):
    if method == "dro":                 # its beta is not that of a KL
        given["beta"], beta = beta, None

    def averaged(loss, logps, old_logps, advantages, mask, ref_logps=None):
        x = loss(logps, old_logps, advantages, mask)
        if beta:
            x = x + beta * grpo.kl(logps, ref_logps)
        return grpo.aggregate(x, mask, how, max_length=max_length)
    return [functools.partial(averaged, loss) for loss in token_losses(method, **given)]


def backward(script, logps, entropy, mask, A=None, pairs=(None, None), ref_logps=None, coef=None,
             old_logps=None, truncated=None, is_correct=None, rewards=None, **flags):
    """Run the backward pass of an optimizer step of a script, whose policy is a table of logps.
    -> metrics, 0 with the gradient in logps and entropy that the step has accumulated"""
    B, T = mask.shape
    leaf, bonus = (x.detach().clone().requires_grad_() for x in (logps, entropy))

    def score(table, prompts, tokens, temperature):
        assert temperature == cfg.temperature
        at = (prompts[:, 0], slice(tokens.shape[1]))
        return table[at], bonus[at]
    lengths = mask.mul(torch.arange(1, T + 1)).amax(dim=1).clamp(min=1).long()
    batch = common.Batch(
        torch.zeros(B, T).long(), mask, old_logps, 0 * mask, lengths, truncated,
        prompts=torch.arange(B)[:, None], rewards=rewards, is_correct=is_correct)
    cfg = script.Config(device="cpu", temperature=0.7, **flags)
    with mock.patch.object(script, "score", score):
        metrics = call(script.backward, policy=leaf, reference=ref_logps, ref_logps=ref_logps,
                       batch=batch, A=A, rows=torch.arange(B), cfg=cfg, penalty_coef=coef,
                       chosen=pairs[0], rejected=pairs[1])
    both = [(logps, leaf.grad), (entropy, bonus.grad)]
    return metrics, sum(((x - x.detach()) * grad).sum() for x, grad in both if grad is not None)


def recipe(method, how, advantage, mask_truncated=False, estimator="k3", micro_batch=6, eps=1e-4,
           **given):
    def step(script):
        def function(rewards, logps, old_logps, ref_logps, entropy, mask, truncated, is_correct,
                     token_advantages=None):
            A = token_advantages
            if advantage != "given":
                how = (names.SCALES[advantage], eps) if script in (grpo, gspo) else (advantage,)
                A = script.advantages(rewards, *how).view(-1, 1) * mask
            metrics, gradient = backward(
                script, logps, entropy, mask, A, (None, None), ref_logps, given.get("coef"),
                old_logps, truncated > 0, is_correct > 0, rewards, **flags)
            return metrics["loss"] + gradient
        flags = {names.SETTINGS["clip"].get(name, [name])[0]: x for name, x in given.items()
                 if name not in ("coef", "max_length")}
        flags["micro_batch_size"] = micro_batch
        flags["max_completion_length"] = given.get("max_length", 4)
        if script is ppo:
            flags["trust_region"] = method
        if script in (grpo, gspo):
            flags |= {"loss_type": loss.here, "kl_estimator": estimator,
                      "mask_truncated_completions": mask_truncated}
        return function
    loss = names.find(method=method, how=how)
    of_ppo = [ppo] if advantage == "given" and how == "token_mean" else []
    of_grpo = [grpo] if loss and "nll_coef" not in given else []
    return [step(script) for script in
            {"gspo": [gspo], "reinforce": [reinforce]}.get(method, of_ppo + of_grpo)]


def distillation(method, temperature, beta=1.0, k=2, rest=True, support="teacher",
                 teacher_coef=0.0):
    modes = {"full": "full_logits", "topk": "topk_logits"}
    cfg = distill.Config(device="cpu", temperature=temperature, beta=beta, micro_batch_size=1,
                         distillation_mode=modes.get(method, "sampled_token"),
                         distillation_topk=k, distillation_add_tail=rest, topk_support=support,
                         teacher_coef=teacher_coef)

    def states(model, rows, tokens):
        return model.logits[rows, :tokens.shape[1]]

    def function(logits, teacher_logits, mask, tokens=None, old_logps=None, advantages=None):
        B, T, V = logits.shape
        A = (mask[:, 0] if advantages is None else advantages)[:, None]
        models = [SimpleNamespace(logits=x.detach().clone().requires_grad_(),
                                  embed=SimpleNamespace(weight=torch.eye(V)))
                  for x in (logits, teacher_logits)]
        batch = SimpleNamespace(
            prompts=torch.arange(B), tokens=mask.long() if tokens is None else tokens, mask=mask,
            logps=mask if old_logps is None else old_logps,
            lengths=mask.mul(torch.arange(1, T + 1)).amax(dim=1).long())
        with mock.patch.object(reinforce, "completion_states", states):
            metrics = distill.backward(*models, batch, (batch.prompts, torch.ones(B).double()), A,
                                       torch.arange(B), cfg)
        pairs = [(x, model.logits.grad) for x, model in zip((logits, teacher_logits), models)]
        return metrics["loss"] + sum(
            ((x - x.detach()) * grad).sum() for x, grad in pairs if grad is not None)
    return [function]


def pair_loss(method, averaged, gamma=None, **given):
    flags = given | {"loss_type": {"dpo": "sigmoid"}.get(method, method), "micro_batch_size": 1}
    flags |= {"average_logps": averaged} if gamma is None else {"simpo_gamma": gamma}
    results = ("loss", "chosen_reward", "rejected_reward", "accuracy")

    def function(chosen, rejected, ref_chosen, ref_rejected, mask_chosen, mask_rejected):
        mask = torch.cat([mask_chosen, mask_rejected])
        metrics, gradient = backward(
            dpo, torch.cat([chosen, rejected]), 0 * mask, mask, None,
            torch.arange(len(mask)).chunk(2), torch.cat([ref_chosen, ref_rejected]), **flags)
        names = ("loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies")
        loss, *others = [metrics[name] for name in names]
        return dict(zip(results, (loss + gradient, *others)))
    return [function]


def nano_logprobs(tokens, logits, width, end=nano.END):
    """Call nano.logprobs with a policy whose logits are given. -> log-probs, mask"""
    with mock.patch.multiple(nano, W=width, END=end):
        return nano.logprobs(lambda ids, cache: logits[:, :ids.shape[1]], tokens)


def completion_mask(tokens, eos):
    padded = torch.cat([0 * tokens[:, :1], tokens], dim=1)
    return nano_logprobs(padded, torch.zeros(*padded.shape, 10), 1, eos[0])[1]


OURS = {
    "completion_mask": lambda: [completion_mask],
    "sequence_logps": lambda prompt_width: [
        lambda logits, tokens: nano_logprobs(tokens, logits, prompt_width)[0]],
    "logprobs": lambda temperature: [
        lambda logits, tokens, script=script: script.logprobs(logits, tokens, temperature, "torch")
        for script in (*SCRIPTS, dpo)],
    "advantages": advantages,
    "token_advantages": lambda method: [
        lambda rewards, mask: zoo.rpp(rewards, mask, method.endswith("baseline"))],
    "returns": lambda method, gamma=None: [
        lambda rewards, mask: reinforce.rewards_to_go(rewards, mask, gamma) if method == "to_go"
        else common.Arithmetic.token_rewards(None, SimpleNamespace(mask=mask, rewards=rewards))],
    "optimal_baseline": lambda: [reinforce.optimal_baseline],
    "gae": lambda gamma: [lambda rewards, values, mask, lam: ppo.gae(
        rewards, values, mask, gamma, lam[:, None] if lam.dim() else lam)],
    "length_adaptive_lambda": lambda alpha: [
        lambda lengths: ppo.length_adaptive_lambda(lengths, alpha)[:, 0]],
    "whiten": lambda eps: [ppo.whiten], "policy_loss": policy_loss, "recipe": recipe,
    "average": lambda **given: [functools.partial(script.aggregate, **given) for script in SCRIPTS],
    "kl": lambda estimator: [
        lambda logps, ref_logps, old_logps, script=script: script.kl(
            logps, ref_logps, estimator, logps - old_logps) for script in (grpo, gspo)] + [
        lambda logps, ref_logps, old_logps, script=script: script.kl(logps, ref_logps, estimator)
        for script in ESTIMATORS if estimator in ESTIMATORS[script]],
    "adaptive_kl": lambda method, coefficient, target, **_: [lambda kl: [
        ppo.adapt_coefficient(coefficient, one.item(), target) for one in kl]],
    "value_loss": lambda cliprange: [lambda values, old_values, returns, mask: ppo.aggregate(
        ppo.value_loss(values, old_values.detach(), returns.detach(), mask, cliprange), mask,
        "token_mean")],
    "distillation": distillation, "preferences": lambda: [dpo.preferences],
    "preference_loss": lambda method, **given: [
        lambda chosen, rejected, ref_chosen, ref_rejected: dpo.dpo_loss(
            chosen, rejected, ref_chosen.detach(), ref_rejected.detach(),
            loss_type={"dpo": "sigmoid"}.get(method, method), **given)],
    "pair_loss": pair_loss,
    "importance_weights": lambda mode, cap: [
        functools.partial(lag.importance_weights, correction=mode, cap=cap)],
    "has_signal": lambda: [lambda rewards: common.has_signal(rewards)[:, 0]],
    "overlong_penalty": lambda **given: [
        functools.partial(script.overlong_penalty, **given) for script in (grpo, gspo)],
    "pass_at_k": lambda **_: [scores.pass_at_k],
    "maj_at_k": lambda right, k: [lambda answers: scores.maj_at_k(
        common.Arithmetic(grpo.verify), [common.Problem("", right)] * len(answers), answers,
        len(answers), k)]}
