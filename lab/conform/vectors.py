"""Check the code of TRL and verl against the test vectors in vectors/, as a part of make conform.

TRL and VERL map the name of a file to a function of the inputs and parameters of its cases. A case
that a trainer has no code for raises NotImplementedError, and counts as neither right nor wrong.
"""
import functools
from types import SimpleNamespace as Some

import numpy as np
import torch
from trl.rewards import get_soft_overlong_punishment
from trl.trainer import utils
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils import torch_functional

import vectors
from lab.conform import theirs
from lab.conform.cases import Case

TOLERANCE = 1e-6        # as in compare.py: verl adds 1e-8 to counts


def missing(*_, **__):
    raise NotImplementedError


def case(mask, **known):
    """Make a Case of the inputs of a vector; what is missing is 0. -> Case"""
    B, T = mask.shape
    lengths = (mask * torch.arange(1, T + 1)).amax(dim=1).clamp(min=1).long()
    zeros = dict.fromkeys(Case.__dataclass_fields__, 0 * mask)
    more = {"slots": (torch.arange(T) < lengths[:, None]).to(mask), "lengths": lengths,
            "is_truncated": known.pop("truncated", torch.zeros(B)) > 0,
            "rewards": torch.arange(B).view(1, B).to(mask)}
    tables = {name: x for name, x in known.items() if name in zeros}
    if "old_logps" in tables:           # trainers hold them as data, without a graph
        tables["old_logps"] = tables["mu_logps"] = tables["old_logps"].detach()
    return Case(**zeros | more | tables | {"mask": mask})


def columns(rewards, lengths=None):
    """Write rewards (P, G) as rewards of tokens, on the first token of each row. -> (B, T), mask"""
    lengths = torch.ones_like(rewards) if lengths is None else lengths
    mask = (torch.arange(int(lengths.max())) < lengths.view(-1, 1)).to(rewards)
    return torch.nn.functional.pad(rewards.view(-1, 1), (0, mask.shape[1] - 1)), mask


# ---- TRL -------------------------------------------------------------------------------------

TRL_LOSSES = {("clip", "sequence_mean"): {"loss_type": "grpo"},
              ("clip", "token_mean"): {"loss_type": "dapo"},
              ("clip", "constant"): {"loss_type": "dr_grpo"},
              ("cispo", "token_mean"): {"loss_type": "cispo"},
              ("sapo", "sequence_mean"): {"loss_type": "sapo"},
              ("vespo", "token_mean"): {"loss_type": "vespo"},
              ("off_policy_mask", "sequence_mean"): {"loss_type": "grpo"},
              ("gspo", "sequence_mean"): {"loss_type": "grpo", "level": "sequence"},
              ("gspo_cispo", "token_mean"): {"loss_type": "cispo", "level": "sequence"},
              ("gspo_sapo", "sequence_mean"): {"loss_type": "sapo", "level": "sequence"}}


def trl_flags(method, how, epsilon_low=None, epsilon_high=None, threshold=None, **given):
    """Translate the parameters of a vector into the configuration of GRPOTrainer. -> dict"""
    if (method, how) not in TRL_LOSSES or "cispo" in method and epsilon_low is not None:
        missing()
    flags = dict(TRL_LOSSES[method, how])
    if epsilon_low is not None:
        flags["epsilon"] = epsilon_low
    if epsilon_high is not None:                        # for CISPO, it is the bound itself
        flags["epsilon_high"] = epsilon_high + ("cispo" in method)
    if threshold is not None:
        flags["off_policy_mask_threshold"] = threshold
    names = {"tau_pos": "sapo_temperature_pos", "tau_neg": "sapo_temperature_neg",
             "max_length": "max_completion_length", "estimator": "bias", "micro_batch": "parts"}
    for name in ("k_pos", "k_neg", "lambda_pos", "lambda_neg"):
        names[name] = f"vespo_{name}"
    return flags | {names.get(name, name): x for name, x in given.items()}


def trl_policy_loss(mask, advantages, **given):
    if advantages.dim() == 2 or not mask[:, -1].any():
        missing()       # GRPOTrainer has an advantage for each output, and no slot that all lack
    x = case(mask, **given)
    flags = trl_flags(**{name: p for name, p in given.items() if not torch.is_tensor(p)})
    return theirs.sampled(x, A=advantages, beta=0.0, ranges={"num_iterations": 2}, **flags)


def trl_recipe(rewards, mask, advantage, eps=None, estimator=None, micro_batch=6, nll_coef=None,
               mask_truncated=False, **given):
    scale = {"grpo": "group", "mean": "none"}.get(advantage) or missing()
    if nll_coef or estimator == "k2":
        missing()
    x = case(mask, rewards=rewards, **given)
    flags = trl_flags(**{name: p for name, p in given.items() if not torch.is_tensor(p)})
    return theirs.sampled(
        x, parts=6 // micro_batch, scale_rewards=scale, bias=estimator == "k3_ratio",
        mask_truncated_completions=mask_truncated, ranges={"num_iterations": 2},
        **{"beta": 0.0} | flags)


def trl_advantages(rewards, method, eps=None, ddof=1, **_):
    scale = {"grpo": "group", "batch_std": "batch", "mean": "none"}.get(method)
    if method == "rloo":
        kind, flags = "RLOO", {"beta": 0.0}
    elif scale is None or eps not in (None, 1e-4) or ddof != 1:
        missing()
    else:
        kind, flags = "GRPO", {"scale_rewards": scale}
    x = case(torch.ones(rewards.numel(), 1).to(rewards), rewards=rewards)
    return theirs.sampled(x, kind, "advantages", **flags)[:, 0].view_as(rewards)


def trl_pair_loss(chosen, rejected, ref_chosen, ref_rejected, mask_chosen, mask_rejected, method,
                  averaged, beta, nll_coef=None, label_smoothing=0.0, gamma=None):
    kinds = {("dpo", False): "sigmoid", ("dpo", True): "sigmoid_norm", ("ipo", False): "ipo",
             ("ipo", True): "ipo", ("robust", False): "robust"}
    kind = kinds.get((method, averaged)) or missing()
    flags = {"beta": beta, "label_smoothing": label_smoothing}
    if nll_coef:
        kind += "+sft"
        flags["loss_weights"] = (1.0, nll_coef)
    x = case(torch.cat([mask_chosen, mask_rejected]), logps=torch.cat([chosen, rejected]),
             ref_logps=torch.cat([ref_chosen, ref_rejected]))
    return theirs.preferred(x, kind, **flags)


def trl_preference_loss(chosen, rejected, method, beta, gamma=None, **_):
    if method != "simpo":
        missing()                       # DPOTrainer's losses need tokens
    stub = Some(alpha=0.0, beta=beta, loss_type="simpo", simpo_gamma=gamma, label_smoothing=0.0,
                accelerator=Some(device="cpu"))
    return theirs.CPOTrainer.cpo_loss(stub, chosen, rejected)[0]


TRL = {
    "logprobs": lambda logits, tokens, temperature: (
        utils.selective_log_softmax(logits / temperature, tokens),
        utils.entropy_from_logits(logits / temperature)),
    "advantages": trl_advantages, "policy_loss": trl_policy_loss, "recipe": trl_recipe,
    "preference_loss": trl_preference_loss, "pair_loss": trl_pair_loss,
    "overlong_penalty": lambda lengths, max_length, buffer: torch.tensor(
        get_soft_overlong_punishment(max_length, buffer)([[1] * int(n) for n in lengths]))}


# ---- verl ------------------------------------------------------------------------------------

HOW = {"token_mean": "token-mean", "sequence_mean": "seq-mean-token-mean",
       "sequence_sum": "seq-mean-token-sum", "constant": "seq-mean-token-sum-norm"}
VERL_MODES = {"clip": "vanilla", "gspo_token": "gspo", "gspo": "gspo", "gmpo": "geo_mean",
              "dppo_tv": "dppo_tv", "dppo_kl": "dppo_kl", "cispo": "cispo", "sapo": "sapo",
              "kl_cov": "kl_cov", "clip_cov": "clip_cov", "dro": "dro", "reinforce": "gpg"}


def verl_flags(method, how, epsilon_low=None, epsilon_high=None, epsilon=None, delta=None,
               max_length=None, **given):
    """Translate the parameters of a vector into the configuration of verl's actor. -> dict"""
    flags = {"loss_mode": VERL_MODES.get(method) or missing(), "average": HOW[how]}
    low, high = epsilon_low, epsilon_high
    if method == "gmpo":
        low = high = epsilon
    elif method.startswith("dppo"):
        low = high = delta
    elif delta is not None and method == "clip":
        flags["clip_ratio_c"] = delta   # other losses of verl have no second bound
    elif delta is not None:
        missing()
    elif method == "cispo" and low is None:
        low = 1.0                       # no lower bound
    if high is not None:
        flags |= {"clip_ratio_low": low, "clip_ratio_high": high}
    if max_length is not None:
        flags["loss_scale_factor"] = max_length
    names = {"coef": "ppo_kl_coef", "ratio": f"{method}_ratio", "lb": "clip_cov_lb",
             "beta": "dro_beta"}
    return flags | {names.get(name, name): x for name, x in given.items()}


def verl_policy_loss(mask, advantages, **given):
    x = case(mask, **given)
    A = advantages if advantages.dim() == 2 else advantages[:, None].expand_as(mask)
    flags = verl_flags(**{name: p for name, p in given.items() if not torch.is_tensor(p)})
    return theirs.policy_update(x, A, **flags)


def verl_recipe(rewards, mask, advantage, eps=None, estimator="k3", micro_batch=6, beta=None,
                entropy_coef=None, token_advantages=None, nll_coef=None, mask_truncated=False,
                **given):
    kind = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}.get(estimator)
    if kind is None or nll_coef or mask_truncated:
        missing()
    A = token_advantages
    if advantage != "given":
        A = verl_advantages(rewards, advantage, eps).view(-1, 1).expand_as(mask)
    flags = verl_flags(**{name: p for name, p in given.items() if not torch.is_tensor(p)})
    if beta:
        flags |= {"kl_loss_coef": beta, "kl_loss_type": kind}
    if entropy_coef:
        flags["entropy_coeff"] = entropy_coef
    return theirs.policy_update(case(mask, **given), A, parts=6 // micro_batch, **flags)


def verl_advantages(rewards, method, eps=None, ddof=1, lengths=None, greedy_rewards=None,
                    more_rewards=None, **_):
    P, G = rewards.shape
    names = {"mean": "grpo", "passk": "grpo_passk"}
    if ddof == 0 or method not in ("grpo", "mean", "rloo", "opo", "passk", "remax", "gdpo"):
        missing()
    tokens, mask = columns(rewards, lengths if method == "opo" else None)
    index = np.arange(P * G) // G
    if method == "gdpo":
        return core_algos.compute_gdpo_outcome_advantage(
            0 * mask, mask, index, config={"gdpo_reward_keys": ["a", "b"]},
            non_tensor_batch={"a": rewards.flatten().numpy(), "b": more_rewards.flatten().numpy()},
            batch={"prompts": mask[:, :1], "attention_mask": mask.expand(-1, 2).long()},
        )[0].view(P, G)
    flags = {"mean": {"norm_adv_by_std_in_grpo": False},
             "passk": {"config": {"norm_adv_by_std_in_grpo": False}}}.get(method, {})
    if method == "remax":
        flags = {"reward_baselines": greedy_rewards.repeat_interleave(G)}
    if eps is not None:
        flags["epsilon"] = eps
    A, _ = core_algos.get_adv_estimator_fn(names.get(method, method))(
        token_level_rewards=tokens, response_mask=mask, index=index, **flags)
    return A[:, 0].view(P, G)


def verl_token_advantages(rewards, mask, method, sq_grad_norms=None):
    G = rewards.shape[1]
    if method == "otb":         # verl makes the norms of 1 - 2 p + sum p^2, here with p = 1
        name, flags = "optimal_token_baseline", {
            "old_log_probs": 0 * mask, "sum_pi_squared": sq_grad_norms + 1, "epsilon": 1e-300}
    else:
        name = {"reinforce++": "reinforce_plus_plus"}.get(method, "reinforce_plus_plus_baseline")
        flags = {"config": Some(gamma=1.0)}
    last = mask.cumsum(dim=1).argmax(dim=1, keepdim=True)
    A, _ = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=(0 * mask).scatter(1, last, rewards.view(-1, 1)), response_mask=mask,
        index=np.arange(len(mask)) // G, **flags)
    return A * mask


def verl_returns(rewards, mask, method, gamma=None):
    if method != "to_go":
        missing()
    return mask * core_algos.compute_reinforce_plus_plus_outcome_advantage(
        token_level_rewards=rewards * mask, response_mask=mask, config=Some(gamma=gamma))[1]


def verl_gae(rewards, values, mask, gamma, lam):
    """verl whitens the advantages, so only the returns can be compared."""
    return {"returns": mask * core_algos.compute_gae_advantage_return(
        rewards * mask, values, mask, gamma, lam if lam.dim() else lam.item())[1]}


def verl_kl(logps, ref_logps, estimator, **_):
    name = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}.get(estimator) or missing()
    return core_algos.kl_penalty(logps, ref_logps, name)


def verl_adaptive_kl(kl, coefficient, target, method, horizon=None, num_outputs=None):
    if method != "horizon":
        missing()
    found = []
    for value in kl.tolist():
        control = core_algos.AdaptiveKLController(coefficient, target, horizon)
        control.update(value, n_steps=num_outputs)
        found.append(float(control.value))
    return found


def verl_importance_weights(old_logps, sampler_logps, mask, mode, cap):
    level = "sequence" if mode.startswith("sequence") else "token"
    bounds = cap if mode.endswith("truncate") else f"1e-9_{cap}"
    return rollout_corr_helper.compute_rollout_correction_weights(
        old_logps - sampler_logps, mask, level, bounds)[0]


VERL = {
    "completion_mask": lambda tokens, eos: {
        "mask": torch_functional.get_response_mask(tokens, eos.tolist())},
    "logprobs": lambda logits, tokens, temperature: (
        torch_functional.logprobs_from_logits(logits / temperature, tokens),
        torch_functional.entropy_from_logits(logits / temperature)),
    "advantages": verl_advantages, "token_advantages": verl_token_advantages,
    "returns": verl_returns, "gae": verl_gae,
    "whiten": lambda x, mask, eps: torch_functional.masked_whiten(x, mask) * mask,
    "policy_loss": verl_policy_loss, "recipe": verl_recipe,
    "average": lambda x, mask, how, num_sequences=None, num_tokens=None, max_length=None:
        core_algos.agg_loss(x, mask, HOW[how], batch_num_tokens=num_tokens,
                            global_batch_size=num_sequences, loss_scale_factor=max_length),
    "kl": verl_kl, "adaptive_kl": verl_adaptive_kl,
    "value_loss": lambda values, old_values, returns, mask, cliprange:
        core_algos.compute_value_loss(values, returns, old_values, mask, cliprange)[0],
    "importance_weights": verl_importance_weights}


def results():
    """Check both trainers. -> {file: {case: {trainer: "right" or what is wrong}}}"""
    found = {}
    for name in vectors.files():
        content = vectors.read(name)
        for one in content["cases"]:
            for trainer, functions in (("TRL", TRL), ("verl", VERL)):
                function = functools.partial(functions.get(name, missing))
                outcome = vectors.check_case(
                    function, content, one, tolerance=TOLERANCE, fixed=one["parameters"])
                if not outcome.skipped:
                    answers = found.setdefault(name, {}).setdefault(one["id"], {})
                    answers[trainer] = outcome.errors[0] if outcome.errors else "right"
    return found
