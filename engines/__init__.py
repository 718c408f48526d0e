"""Your loss in other people's trainers: write one function, and take it to TRL and verl.

A loss is described by a text: its function, its settings, and the average of its values.

  grpo:policy_loss loss_type=dapo epsilon_high=0.28     of a script; the average is that of dapo
  zoo:policy_loss loss_type=gmpo gmpo_epsilon=0.3       of examples/zoo.py, with its flags
  mine.py:my_loss bound=2 how=token_mean                of a file of yours

The function gets log pi, log pi_old, A and mask, (B, T) each, and returns the loss L_t (B, T) of
each token. `how` is the average over the tokens of an optimizer step: sequence_mean (the default),
token_mean, sequence_sum or constant, as in `aggregate` of the scripts.
"""
import ast
import functools
import importlib
import importlib.util
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
SCRIPTS = ("grpo", "gspo", "ppo")
REASONS = {"reinforce": "its loss has no old log-probabilities",
           "dpo": "its loss compares pairs of outputs; TRL has a DPOTrainer"}
INPUTS = ("logps", "old_logps", "advantages", "mask")


def load(text=None):
    """Read a loss from a text, or from the environment variable LOSS. ValueError, with one line, if
    there is no such loss. -> function of log pi, log pi_old (B, T), A (B,) or (B, T), and mask
    (B, T), which returns L_t (B, T); name of the average"""
    from vectors.names import AVERAGES  # here, because an engine first moves this checkout
    words = (os.environ.get("LOSS", "") if text is None else text).split()
    if not words:
        raise ValueError('LOSS: is empty; write, for example, LOSS="grpo:policy_loss"')
    settings = dict(map(read_setting, words[1:]))
    how = settings.pop("how", None)
    name, _, function_name = words[0].partition(":")
    loss, average = of_module(name, function_name or "policy_loss", settings)
    how = how or average
    refuse_other("how", how, AVERAGES)
    return tried(loss, words[0]), how


def required(*averages):
    """Load the loss that the variable LOSS names. Exits with one line if there is no such loss, or
    if the trainer cannot take its average. -> loss and average, as from `load`"""
    import common
    try:
        loss, how = load()
    except ValueError as error:
        common.fail(error)
    if how not in averages:
        common.fail(f"LOSS: this trainer cannot take the average {how}; it takes "
                    f"{', '.join(averages)}: add how={averages[0]}")
    return loss, how


def read_setting(word):
    """Read NAME=VALUE, whose value is a number, True or False, or else a text. -> name, value"""
    name, equals, text = word.partition("=")
    if not equals:
        raise ValueError(f"{word}: must be a setting, such as epsilon_high=0.28")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        return name, text
    return name, value if isinstance(value, (int, float)) else text


def import_module(name):
    """Import a script, the zoo or a Python file. -> module"""
    if name.endswith(".py"):
        return read_file(name)
    if name == "zoo":
        return read_file(HERE / "examples/zoo.py")
    if name in REASONS:
        raise ValueError(f"{name}: {REASONS[name]}; write one of {', '.join(SCRIPTS)}, or a file")
    if name not in SCRIPTS:
        raise ValueError(f"{name}: must be {', '.join(SCRIPTS)}, zoo, or a file such as mine.py")
    return importlib.import_module(name)


def of_module(name, function_name, settings):
    """Find a loss of a script, of the zoo or of a Python file. -> function, name of its average"""
    module = import_module(name)
    loss = getattr(module, function_name, None)
    if not callable(loss):
        raise ValueError(f"{name}: has no function {function_name}")
    known, average = parameters_of(module, function_name, settings.get("loss_type"))
    refuse_unknown(settings, known, name)
    return functools.partial(loss, **settings), "token_mean" if name == "ppo" else average


def parameters_of(module, function_name, loss_type=None):
    """Look up the settings of a loss, which are its parameters besides INPUTS, and its average.
    loss_type: a row of the module's LOSS_TYPES; by default the loss's own. ValueError if there is
    no such row. -> {name: inspect.Parameter}, name of the average"""
    from vectors.binding import bind  # here, because an engine first moves this checkout

    def settings(function):
        return bind(function, INPUTS, INPUTS).settings

    table = getattr(module, "LOSS_TYPES", {})
    known = settings(getattr(module, function_name))
    if "loss_type" in known:
        loss_type = loss_type or known["loss_type"].default
        if table:
            refuse_other("loss_type", loss_type, table)
    method, average = table.get(loss_type or function_name, ("", "sequence_mean"))
    if callable(method):                # of the zoo, whose policy_loss hands settings on to it
        known = {key: one for key, one in known.items() if one.kind is not one.VAR_KEYWORD}
        known |= settings(method)
    return known, average


def refuse_unknown(settings, known, name):
    """Raise a ValueError for a setting that a loss does not have, or whose value is a text although
    its default is a number."""
    takes_any = any(one.kind is one.VAR_KEYWORD for one in known.values())
    for key, value in settings.items():
        if key not in known and not takes_any:
            raise ValueError(f"{key}: is not a setting of {name}; it has "
                             f"{', '.join(known) or 'none'}, and how")
        default = known[key].default if key in known else None
        if isinstance(value, str) and isinstance(default, (int, float)):
            kind = "True or False" if isinstance(default, bool) else "a number"
            raise ValueError(f"{key}={value}: must be {kind}")


def refuse_other(name, value, choices):
    if value not in choices:
        raise ValueError(f"{name}={value}: must be one of {', '.join(choices)}")


def tried(loss, name):
    """Try a loss on two outputs of three tokens. ValueError if it does not return L_t. -> function
    with the arguments of `load`, which gives the loss A as (B, T)"""
    import torch  # here, because an engine first moves this checkout in the import path

    from vectors.binding import bind
    binding = bind(loss, INPUTS, INPUTS)
    if binding.needed():
        raise ValueError(f"{name}: also needs {', '.join(binding.needed())}; it gets "
                         f"{', '.join(INPUTS)}, also by usual other names, and its settings")

    def run(*inputs):
        return binding.call(dict(zip(INPUTS, inputs, strict=True)))

    def token_loss(logps, old_logps, advantages, mask):
        A = advantages if advantages.dim() == 2 else advantages[:, None]
        return torch.where(mask > 0, run(logps, old_logps, A.expand_as(mask), mask), 0.0)

    logps = torch.full((2, 3), -1.0, requires_grad=True)
    A = torch.tensor([1.0, -1.0])[:, None].expand(2, 3)
    try:
        found = run(logps, torch.full((2, 3), -1.1), A, torch.ones(2, 3))
    except Exception as error:              # the function may be anybody's
        raise ValueError(f"{name}: {one_line(error)}") from error
    shape = tuple(getattr(found, "shape", ()))
    if shape != (2, 3):
        raise ValueError(f"{name}: returned the shape {shape} for inputs of shape (2, 3); it must "
                         "return the loss of each token, which the trainer averages")
    if not found.requires_grad:
        raise ValueError(f"{name}: the loss does not depend on log pi, so nothing can be learned")
    return token_loss


def read_file(path):
    """Import a Python file by its path; it can import its neighbors. -> module"""
    file = Path(path).resolve()
    if not file.is_file():
        raise ValueError(f"{path}: there is no such file")
    if str(file.parent) not in sys.path and not file.is_relative_to(HERE):
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(f"engines.file.{file.stem}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path}: cannot be imported: {one_line(error)}") from error
    return module


def one_line(error):
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
