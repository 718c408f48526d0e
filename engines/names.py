"""What the same thing is called in the vectors, in this project ("here"), in TRL 1.16 and verl 0.9.

A loss has a method, which computes L_t, and an average. A loss_type, here and in TRL, is both. In
verl, loss_mode is the method, and loss_agg_mode is the average.
"""
from typing import NamedTuple

AVERAGES = {                            # here and in the vectors -> loss_agg_mode of verl's actor
    "sequence_mean": "seq-mean-token-mean", "token_mean": "token-mean",
    "sequence_sum": "seq-mean-token-sum", "constant": "seq-mean-token-sum-norm"}
KL_TYPES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}    # estimator -> kl_loss_type of the actor
SCALES = {                              # methods of advantages -> scale_rewards here and in TRL,
    "grpo": "group", "batch_std": "batch", "mean": "none",
    "maxrl": "mean"}                    # but TRL has no mean


class Loss(NamedTuple):
    """The names of a loss. Where there is none, the name is ""."""
    method: str         # in the vectors
    how: str            # its average
    script: str         # here: grpo, gspo, ppo, reinforce, or zoo
    level: str          # of the ratio: the parameter `level` of gspo.policy_loss; tokens if ""
    here: str           # loss_type
    trl: str            # loss_type of GRPOConfig
    verl: str           # loss_mode of the actor


LOSSES = {
    "grpo": Loss("clip", "sequence_mean", "grpo", "", "grpo", "grpo", "vanilla"),
    "dapo": Loss("clip", "token_mean", "grpo", "", "dapo", "dapo", "vanilla"),
    "dr_grpo": Loss("clip", "constant", "grpo", "", "dr_grpo", "dr_grpo", "vanilla"),
    "ppo": Loss("clip", "token_mean", "ppo", "", "", "dapo", "vanilla"),
    "rloo": Loss("reinforce", "sequence_sum", "reinforce", "", "", "", "gpg"),
    "cispo": Loss("cispo", "token_mean", "grpo", "", "cispo", "cispo", "cispo"),
    "sapo": Loss("sapo", "sequence_mean", "grpo", "", "sapo", "sapo", "sapo"),
    "gspo": Loss("gspo", "sequence_mean", "gspo", "sequence", "grpo", "grpo", "gspo"),
    "gspo_dapo": Loss("gspo", "token_mean", "gspo", "sequence", "dapo", "dapo", "gspo"),
    "gspo_dr_grpo": Loss("gspo", "constant", "gspo", "sequence", "dr_grpo", "dr_grpo", "gspo"),
    "gspo_token": Loss("gspo_token", "sequence_mean", "gspo", "sequence_token", "grpo", "", "gspo"),
    "gspo_cispo": Loss("gspo_cispo", "token_mean", "gspo", "sequence", "cispo", "cispo", ""),
    "gspo_sapo": Loss("gspo_sapo", "sequence_mean", "gspo", "sequence", "sapo", "sapo", ""),
    "dppo_tv": Loss("dppo_tv", "token_mean", "zoo", "", "dppo_tv", "", "dppo_tv"),
    "dppo_kl": Loss("dppo_kl", "token_mean", "zoo", "", "dppo_kl", "", "dppo_kl"),
    "gmpo": Loss("gmpo", "sequence_mean", "zoo", "", "gmpo", "", "geo_mean"),
    "vespo": Loss("vespo", "token_mean", "zoo", "", "vespo", "vespo", ""),
    "off_policy_mask": Loss(
        "off_policy_mask", "sequence_mean", "zoo", "", "off_policy_mask", "grpo", ""),
    "clip_cov": Loss("clip_cov", "token_mean", "zoo", "", "clip_cov", "", "clip_cov"),
    "kl_cov": Loss("kl_cov", "token_mean", "zoo", "", "kl_cov", "", "kl_cov"),
    "dro": Loss("dro", "token_mean", "zoo", "", "dro", "", "dro")}

# Settings of methods that have any: name in the vectors -> names here, in TRL and in verl. A number
# is the value that a setting always has there, and None is a setting that is missing there.
LOW = {"epsilon_low": ("epsilon", "epsilon", "clip_ratio_low")}
HIGH = {"epsilon_high": ("epsilon_high", "epsilon_high", "clip_ratio_high")}
DELTA = {"delta": ("delta", "delta", None)}
TAU = {"tau_pos": (1.0, "sapo_temperature_pos", "tau_pos"),
       "tau_neg": (1.05, "sapo_temperature_neg", "tau_neg")}
BOTH = "clip_ratio_low clip_ratio_high"
SETTINGS = {
    "clip": LOW | HIGH | {"delta": ("delta", "delta", "clip_ratio_c")},
    "cispo": HIGH | {"epsilon_low": (1.0, 1.0, "clip_ratio_low")},      # 1: no lower bound
    "sapo": TAU,
    "gspo": LOW | HIGH | DELTA, "gspo_token": LOW | HIGH | DELTA, "gspo_cispo": HIGH,
    "gspo_sapo": TAU,
    "dppo_tv": {"delta": ("dppo_tv_delta", None, BOTH)},
    "dppo_kl": {"delta": ("dppo_kl_delta", None, BOTH)},
    "gmpo": {"epsilon": ("gmpo_epsilon", None, BOTH)},
    "vespo": {name: (f"vespo_{name}", f"vespo_{name}", None)
              for name in ("k_pos", "k_neg", "lambda_pos", "lambda_neg")},
    "off_policy_mask": LOW | HIGH | DELTA | {
        "threshold": ("off_policy_mask_threshold", "off_policy_mask_threshold", None)},
    "clip_cov": LOW | HIGH | DELTA | {
        name: (f"clip_cov_{name}", None, f"clip_cov_{name}") for name in ("ratio", "lb", "ub")},
    "kl_cov": {"ratio": ("kl_cov_ratio", None, "kl_cov_ratio"),
               "coef": ("kl_cov_coef", None, "ppo_kl_coef")},
    "dro": {"beta": ("dro_beta", None, "dro_beta")}}
OF_ALL = {"max_length": (None, "max_completion_length", "loss_scale_factor"),
          "beta": (None, "beta", "kl_loss_coef"),
          "entropy_coef": (None, "entropy_coef", "entropy_coeff")}
PLACES = ("here", "trl", "verl")


def find(**names):
    """Find the first loss with some of the names of Loss, such as method="clip". -> Loss, or None
    """
    return next((loss for loss in LOSSES.values() if names.items() <= loss._asdict().items()), None)


def translate(loss, settings, place):
    """Write a loss, and settings under the names of the vectors, as another place writes them.
    place: of PLACES; loss: a Loss, or None. -> {name: value}. NotImplementedError if the loss or a
    setting is missing there."""
    if loss is None or not getattr(loss, place):
        raise NotImplementedError(f"{place} has no such loss")
    found = {"loss_mode" if place == "verl" else "loss_type": getattr(loss, place)}
    if loss.level and place != "verl":
        found["level" if place == "here" else "importance_sampling_level"] = loss.level
    for name, value in settings.items():
        there = (OF_ALL | SETTINGS.get(loss.method, {}))[name][PLACES.index(place)]
        if isinstance(there, str):
            found |= dict.fromkeys(there.split(), value)
        elif value != there:
            raise NotImplementedError(f"{place} has no {name} in this loss")
    if place == "trl" and found["loss_type"] == "cispo" and "epsilon_high" in found:
        found["epsilon_high"] += 1                      # there, it is the bound itself
    return found
