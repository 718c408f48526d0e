"""Bind a function by the exact names of this project, TRL, verl and OpenRLHF. Nothing is guessed: a
function with other names gets an adapter (adapter.py), in which a person says what is what.
"""
import ast
import contextlib
import inspect
import os
import sys
import textwrap
from collections import Counter
from typing import NamedTuple

# Our name -> what others call it: the one table of the vectors and of engines/
NAMES = {
    "logps": "logp per_token_logps log_prob log_probs logprob logprobs new_logprobs new_log_probs",
    "old_logps": "old_logp old_per_token_logps old_log_prob old_log_probs old_logprobs",
    "ref_logps": "ref_per_token_logps ref_log_prob ref_log_probs ref_logprob ref_logprobs",
    "sampler_logps": "sampling_per_token_logps rollout_log_prob rollout_log_probs",
    "advantages": "A adv", "mask": "completion_mask response_mask action_mask loss_mask",
    "epsilon_low": "epsilon cliprange cliprange_low clip_ratio clip_ratio_low clip_eps "
                   "clip_eps_low eps_low",
    "epsilon_high": "cliprange_high clip_ratio_high clip_eps_high eps_high",
    "delta": "clip_ratio_c", "eps": "epsilon", "beta": "kl_coef kl_loss_coef",
    "tau_pos": "sapo_temperature_pos", "tau_neg": "sapo_temperature_neg",
    "entropy_coef": "entropy_coeff", "max_length": "max_completion_length",
    "chosen": "chosen_logps policy_chosen_logps",
    "rejected": "rejected_logps policy_rejected_logps",
    "ref_chosen": "ref_chosen_logps reference_chosen_logps",
    "ref_rejected": "ref_rejected_logps reference_rejected_logps",
    "rewards": "token_level_rewards", "values": "vpred vpreds", "cliprange": "cliprange_value"}
ALIASES = {}                            # a name of theirs -> ours, of which a file has one
for ours, theirs in NAMES.items():
    for one in theirs.split():
        ALIASES.setdefault(one, []).append(ours)
SINGLE = {"epsilon", "cliprange", "clip_ratio", "clip_eps"}     # both bounds, if alone
STARS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
ADAPTER = "Adapter of "                 # how the docstring of an adapter begins
# Texts that mean no text
SPELLINGS = ("true", "false", "yes", "no", "on", "off", "none", "null", "nan", "inf")


class Binding(NamedTuple):
    function: object
    parameters: dict        # {its name: inspect.Parameter}
    names: dict             # {its name: ours}
    unknown: list           # its names that need a value and are not known

    def takes(self):
        """List our names that the function gets. -> set"""
        return {*self.names.values()}

    def call(self, given, settings=()):
        """Call the function with what it takes of {our name: value}, and its own settings."""
        values = {name: given[ours] for name, ours in self.names.items() if ours in given}
        values |= dict(settings)
        if is_adapter(self.function):                       # what it leaves out does not matter
            values = {name: None if one.default is one.empty else one.default
                      for name, one in self.parameters.items()} | values
        first = [values.pop(name) for name, one in self.parameters.items()
                 if one.kind is one.POSITIONAL_ONLY and name in values]
        return self.function(*first, **values)


def bind(function, inputs, numbers, has_rest=False, said=()):
    """Find which parameter of a function gets which of our inputs and numbers. One that two
    parameters may mean is not known. has_rest: whether **kwargs gets all that is left. said: what
    the user says of names, {its name: ours}. ValueError if Python does not know the parameters.
    -> Binding"""
    said = dict(said)
    if not inspect.isclass(function):
        function = getattr(function, "forward", function)
    try:
        parameters = dict(inspect.signature(function).parameters)
    except TypeError as error:
        raise ValueError(error) from None
    known = {*inputs, *numbers}
    named = [name for name, one in parameters.items() if one.kind not in STARS]
    names = {}
    for name in named:
        words = [said[name]] if name in said else [name, *ALIASES.get(name, ())]
        found = [ours for ours in words if ours in known]
        if found:
            names[name] = found[0]
    counts = Counter(ours for name, ours in names.items() if name not in SINGLE)
    names = {name: ours for name, ours in names.items() if counts[ours] <= 1}
    if has_rest and any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        names |= {name: name for name in known if name not in {*names, *names.values()}}
    if is_adapter(function):            # what it leaves out, it does not take
        used = {node.id for node in ast.walk(tree_of(function)) if isinstance(node, ast.Name)}
        names = {name: ours for name, ours in names.items() if name in used}
        named = []
    elif not named and parameters and not has_rest:
        raise ValueError(f"it has only {', '.join(parameters)}")
    unknown = [name for name in named if name not in names
               and parameters[name].default is inspect.Parameter.empty]
    return Binding(function, parameters, names, unknown)


@contextlib.contextmanager
def restored():
    """Undo what the import or a call of a user's code changes for all other code: whether torch
    computes gradients, its default dtype, and the current folder."""
    torch, home = sys.modules.get("torch"), os.getcwd()
    before = (torch.is_grad_enabled(), torch.get_default_dtype()) if torch else None
    try:
        yield
    finally:
        os.chdir(home)
        if torch := sys.modules.get("torch"):
            has_gradient, dtype = before or (True, torch.float32)       # the code has loaded torch
            torch.set_grad_enabled(has_gradient)
            torch.set_default_dtype(dtype)


def is_adapter(function):
    return (getattr(function, "__doc__", "") or "").startswith(ADAPTER)


def tree_of(function):
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


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
