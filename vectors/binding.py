"""Bind the arguments of anybody's function to our names: the vectors and engines/ do it alike.

  binding = bind(loss, ("logps", "old_logps", "advantages", "mask"))
  binding.names                                   # {"logps": "log_prob", "mask": "response_mask"}
  binding.call({"logps": x, "mask": m}, clip=0.2)

A parameter is found by its name, or by the words that its name consists of. If no name is known,
arguments are bound by their position.
"""
import ast
import inspect
import re
from typing import NamedTuple

from vectors.unpack import Unpacked, unpacked

# Texts that mean no text
SPELLINGS = ("true", "false", "yes", "no", "on", "off", "none", "null", "nan", "inf")
# Words of names, in lower case -> one word for each meaning. A name with any other word is unknown.
WORDS = {word: meaning for meaning, words in {
    "logp": "logps logprob logprobs lp lps", "new": "cur curr current pi policy actor theta "
    "train trainer training learner target model",
    "old": "prev previous behav behavior behaviour mu rollout gen", "ref": "reference base",
    "sampler": "sampling vllm inference", "student": "", "teacher": "",
    "advantage": "advantages adv advs gae", "reward": "rewards r score scores",
    "mask": "masks valid msk", "chosen": "w win winner preferred prefered positive pos",
    "rejected": "l lose loser dispreferred disprefered negative neg",
    "value": "values vpred vpreds", "return": "returns ret rets", "logits": "",
    "entropy": "entropies ent",
    "id": "ids tokens index indices idx uid uids", "clip": "epsilon eps cliprange ratio range",
    "low": "lower min lo left", "high": "upper higher max hi right", "norm": "", "seq": "sequence",
    "coef": "coeff coefficient weight beta penalty", "estimator": "", "kl": "",
    "lam": "lambda lambd lmbda", "cap": "threshold", "imp": "importance tis mis",
    "buffer": "cache", "overlong": "", "scale": "alpha ctl ctrl",
    "final": "outcome scalar",
    "group": "generation generations prompt samples rollouts n k num", "size": "", "c": "dual",
    "length": "len lengths", "temperature": "temp",
    "": "per token tok level batch minibatch mb b bt response completion comp action loss actions "
        "all rloo raw generate param hat o y input inputs outputs list lists"
    }.items() for word in (meaning, *words.split()) if word}
# The words of a name -> our names, of which the first that is known is meant.
NAMES = {frozenset(form.split()): names.split() for names, forms in {
    "logps": "logp, new logp", "old_logps": "old logp", "ref_logps": "ref logp",
    "sampler_logps old_logps": "sampler logp",
    "advantages": "advantage, seq advantage", "token_advantages advantages": "token advantage",
    "rewards": "reward, group reward, final reward", "mask": "mask", "entropy": "entropy",
    "epsilon_low epsilon cliprange eps": "clip, clip coef, clip value",
    "epsilon_low": "clip low", "epsilon_high": "clip high",
    "beta": "kl coef, ref kl coef, kl scale, kl lam",
    "eps": "advantage clip, std clip, norm clip", "delta": "clip c", "estimator": "kl estimator",
    "num_generations": "group, group size",
    "entropy_coef": "entropy coef", "max_length": "high length, high seq length, high id",
    "chosen": "chosen, chosen logp, new chosen, new chosen logp",
    "rejected": "rejected, rejected logp, new rejected, new rejected logp",
    "ref_chosen": "ref chosen, ref chosen logp", "ref_rejected": "ref rejected, ref rejected logp",
    "mask_chosen": "chosen mask", "mask_rejected": "rejected mask",
    "values": "value, new value", "old_values": "old value", "returns": "return",
    "logits": "logits, student logits, new logits", "teacher_logits": "teacher logits, ref logits",
    "tokens group_ids": "id", "group_ids": "group id", "lam": "lam, advantage lam",
    "prompt_width": "group length", "buffer": "buffer, overlong buffer, buffer length, "
    "overlong buffer length, overlong length",
    "cap": "cap, clip cap, imp cap, imp clip cap",
    "lengths": "length", "temperature": "temperature",
    }.items() for form in forms.split(", ")}
# Words that are too short to have parts if a parameter is called so
BARE = {"new": "logps", "cur": "logps", "pi": "logps", "old": "old_logps", "prev": "old_logps",
        "mu": "old_logps", "ref": "ref_logps", "lo": "epsilon_low", "hi": "epsilon_high",
        "low": "epsilon_low", "high": "epsilon_high"}
OF_SAMPLER = re.compile("rollout|sampl|behav|vllm|sglang|infer|gen|mu(?![a-z])")
MEANT = {name for names in NAMES.values() for name in names}
LOG_P = re.compile(r"log_?(probabilit(y|ies)|probs?|ps?|pi)(?=_|$)")

OFF_TOKENS = re.compile(".*(prompt|ignore)_?masks?|(is_)?pad(ding|ded)?")   # 0 on tokens
RANGES = {"epsilon_low", "epsilon_high", "epsilon", "cliprange"}
TINY = 1e-4         # an eps up to it keeps a division from 0; the ranges of GSPO begin at 3e-4


class Binding(NamedTuple):
    names: dict         # our name -> the name of the parameter that gets it
    settings: dict      # the other parameters: {name: inspect.Parameter}
    function: object
    by_position: bool   # whether no name is known
    twins: dict         # {parameter: our name} of those that another parameter stands for, too

    def needed(self):
        """List the other parameters without a default."""
        return [name for name, one in self.settings.items() if one.default is one.empty
                and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
                and name not in self.twins]

    def also(self, names):
        """Bind more of our names. -> Binding"""
        rest = {name: one for name, one in self.settings.items() if name not in names.values()}
        return self._replace(names=self.names | names, settings=rest)

    def call(self, given, **settings):
        """Call the function with those arguments of {our name: value} that it takes, and with
        settings under its own names."""
        values = {self.names[name]: x for name, x in given.items() if name in self.names} | settings
        values |= {twin: given[ours] for twin, ours in self.twins.items() if ours in given}
        return self.function(**values)


def opened(function):
    """Make parameters of what a function looks up in its own. -> function that takes names alone"""
    return function if isinstance(function, Unpacked) else unpacked(function, has_meaning)


def setting(name, text, parameter=None):
    """Read a setting, a number, True, False, None or a text, as the default of its parameter shows.
    ValueError if it has another type; a parameter whose default is None takes no text. -> value"""
    default = parameter.default if parameter else inspect.Parameter.empty
    try:
        value = text if isinstance(default, str) else ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        value = text
    if isinstance(default, bool):
        kind, is_good = "True or False", isinstance(value, bool)
    elif isinstance(default, (int, float)):
        kind, is_good = "a number", type(value) in (int, float)
    elif default is None:
        kind = "a number, True, False or None"
        is_good = value is None or isinstance(value, (int, float))
    elif default is inspect.Parameter.empty:            # a text such as false would count as true
        kind = "True, False, None, a number or a text with another meaning"
        is_good = text.lower() not in SPELLINGS or not isinstance(value, str)
    else:
        kind, is_good = f"like its default, {default!r}", type(value) is type(default)
    if not is_good:
        raise ValueError(f"{name}={text}: must be {kind}")
    return value


def parameters_of(function):
    """List the parameters of a function, or what it looks up in them. ValueError if Python does not
    know them. -> {name: inspect.Parameter}"""
    return opened(function).parameters


def words_of(name):
    """Take a name apart, which may be written likeThis; pi_old is old. -> set of words, empty if
    one is unknown"""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    name = re.sub(r"^(new|old|ref)(?=log|val)", r"\1_", name)
    name = re.sub(r"^vpred(?=s?$)", "new_value", name)     # where `values` are those of the rollout
    name = re.sub(r"^is_(?=clip|eps)|_is$", "", name)       # the clip of importance sampling
    name = re.sub(r"^init_(?=kl)", "", name)                # an adaptive weight starts there
    name = re.sub(r"(?<=^eps_)l$", "low", re.sub(r"(?<=^eps_)r$", "high", name))    # left, right
    words = [WORDS.get(word) for word in LOG_P.sub("logp", name).strip("_").split("_")]
    if "old" in words or "ref" in words:
        words = [word for word in words if word != "new"]
    return frozenset() if None in words else frozenset(words) - {""}


def meaning(name, known):
    """Find the name of `known` that a parameter stands for. -> our name, or None"""
    if name in known:
        return name
    if name.lower() in ("a", "a_hat", "a_t", "a_i"):
        return "advantages" if "advantages" in known else None
    if name in ("ratio", "ratios"):             # of two policies, but it could mean clip_ratio
        return None
    names = (*NAMES.get(words_of(name), ()), BARE.get(name))
    return next((one for one in names if one in known), None)


def has_meaning(name):
    return name not in BARE and meaning(name, MEANT) is not None


def bind(function, known, order=()):
    """Find which parameters of a function get which of our names. known: our names; order: those
    that are bound by their position if the function names none of them. Of `new_logprobs` and
    `logprobs`, the plain one is old. ValueError if Python does not know the parameters. -> Binding
    """
    function = opened(function)
    parameters = parameters_of(function)
    named = [one.name for one in parameters.values()
             if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    names = {}
    # our own names come first, and of eps and clip_eps the one that cannot mean another number
    for name in sorted(named, key=lambda name: (name not in known, "clip" not in name.lower())):
        default = parameters[name].default
        is_tiny = isinstance(default, float) and default <= TINY and "clip" not in name.lower()
        ours = meaning(name, {*known} - RANGES if is_tiny and name not in known else known)
        if ours and ours not in names:
            names[ours] = name
    for plain in ("logps", "values"):
        both = [name for name in named if meaning(name, known) == plain]
        new = [name for name in both if "new" in words_of(name)]
        if len(both) == 2 and len(new) == 1 and f"old_{plain}" in {*known} - names.keys():
            both.remove(*new)
            names |= {plain: new[0], f"old_{plain}": both[0]}
        inner = [one.name for fields in function.fields.values() for one in fields
                 if one.name in both]           # batch["logps"] next to an argument logps is old
        if len(both) == 2 and len(inner) == 1 and f"old_{plain}" in {*known} - names.keys():
            both.remove(*inner)
            names |= {plain: both[0], f"old_{plain}": inner[0]}
    if "sampler_logps" in known:        # of old_logprobs and rollout_logprobs, which mean one
        both = [name for name in named
                if meaning(name, known) in ("logps", "old_logps", "sampler_logps")]
        sampled = [name for name in both if OF_SAMPLER.search(name.lower())]
        if len(both) == 2 and len(sampled) == 1:
            both.remove(*sampled)
            names |= {"old_logps": both[0], "sampler_logps": sampled[0]}
    free = [name for name in named if name not in names.values()
            and parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY]
    places = dict(zip(order, free))
    by_position = names.keys().isdisjoint(order) and 0 < len(order) <= len(free) and not (
        OFF_TOKENS.fullmatch(places.get("mask", "")))
    if by_position:
        names |= places
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        names |= {name: name for name in known if name not in names}
    settings = {name: one for name, one in parameters.items() if name not in names.values()}
    twins = {name: meaning(name, known) for name, one in settings.items()
             if name not in function.own and one.default is one.empty
             and meaning(name, known) in names}
    return Binding(names, settings, function, by_position, twins)
