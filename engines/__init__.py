"""Your loss in other people's trainers: write one function, and take it to TRL, verl and others.

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
import inspect
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
AVERAGES = ("sequence_mean", "token_mean", "sequence_sum", "constant")
SCRIPTS = ("grpo", "gspo", "ppo")
REASONS = {"reinforce": "its loss has no old log-probabilities",
           "dpo": "its loss compares pairs of outputs; TRL has a DPOTrainer"}
INPUTS = ("logps", "old_logps", "advantages", "mask")


def load(text=None):
    """Read a loss from a text, or from the environment variable LOSS. ValueError, with one line, if
    there is no such loss. -> function of log pi, log pi_old (B, T), A (B,) or (B, T), and mask
    (B, T), which returns L_t (B, T); name of the average"""
    words = (os.environ.get("LOSS", "") if text is None else text).split()
    if not words:
        raise ValueError('LOSS: is empty; write, for example, LOSS="grpo:policy_loss"')
    settings = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word}: must be a setting, such as epsilon_high=0.28")
        settings[key] = number(value)
    how = settings.pop("how", None)
    name, _, function_name = words[0].partition(":")
    if name == "zoo":
        loss, table = of_zoo(function_name, settings)
    else:
        loss, table = of_module(name, function_name, settings)
    row = table.get(settings.get("loss_type", "grpo"), ("", AVERAGES[0]))
    how = how or ("token_mean" if name == "ppo" else row[1])
    if how not in AVERAGES:
        raise ValueError(f"how={how}: must be one of {', '.join(AVERAGES)}")
    return checked(loss, words[0]), how


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


def advantages(text=None):
    """Find the function `advantages` next to a loss, (P, G) -> (P, G): that of gspo or of a file
    that has one, else grpo's. text: as for `load`."""
    name = (text or os.environ.get("LOSS", "")).split()[0].partition(":")[0]
    module = read_file(name) if name.endswith(".py") else importlib.import_module(
        name if name == "gspo" else "grpo")
    return getattr(module, "advantages", importlib.import_module("grpo").advantages)


def number(text):
    """Read the value of a setting: a number, True or False, or else a text."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, (int, float)) else text


def of_module(name, function_name, settings):
    """Find a loss of a script, or of a Python file. -> function, LOSS_TYPES of its module"""
    if name in REASONS:
        raise ValueError(f"{name}: {REASONS[name]}; write one of {', '.join(SCRIPTS)}, or a file")
    if name.endswith(".py"):
        module = read_file(name)
    elif name in SCRIPTS:
        module = importlib.import_module(name)
    else:
        raise ValueError(f"{name}: must be {', '.join(SCRIPTS)}, zoo, or a file such as mine.py")
    loss = getattr(module, function_name or "policy_loss", None)
    if not callable(loss):
        raise ValueError(f"{name}: has no function {function_name or 'policy_loss'}")
    parameters = inspect.signature(loss).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    refuse_unknown(settings, settings if takes_any else [*parameters][len(INPUTS):], name)
    table = getattr(module, "LOSS_TYPES", {}) if "loss_type" in parameters else {}
    refuse_loss_type(settings, table)
    return functools.partial(loss, **settings), table


def of_zoo(function_name, settings):
    """Find a loss of examples/zoo.py, whose settings are its flags. -> function, LOSS_TYPES"""
    zoo = read_file(HERE / "examples/zoo.py")
    if function_name not in ("", "policy_loss"):
        raise ValueError(f"zoo: has no function {function_name}; write zoo:policy_loss "
                         f"loss_type={min(zoo.NEW)}")
    refuse_loss_type(settings, zoo.LOSS_TYPES)
    loss_type = settings.setdefault("loss_type", zoo.Config.loss_type)
    clip = ["epsilon", "epsilon_high", "delta"]
    own = [flag for flag in zoo.Config.__dataclass_fields__ if flag.startswith(loss_type)]
    has_clip = loss_type not in zoo.NEW or loss_type in zoo.CLIPPED
    refuse_unknown(settings, ["loss_type", *own, *(clip if has_clip else [])], f"zoo:{loss_type}")
    if loss_type not in zoo.NEW:
        return of_module("grpo", "policy_loss", settings)
    cfg = zoo.Config(**settings)
    for is_kept, rule in cfg.rules():
        if not is_kept:
            raise ValueError(rule)
    return functools.partial(zoo.policy_loss, cfg), zoo.LOSS_TYPES


def refuse_unknown(settings, known, name):
    for key in settings:
        if key not in known:
            raise ValueError(f"{key}: is not a setting of {name}; it has "
                             f"{', '.join(known) or 'none'}, and how")


def refuse_loss_type(settings, table):
    loss_type = settings.get("loss_type")
    if table and loss_type is not None and loss_type not in table:
        raise ValueError(f"loss_type={loss_type}: must be one of {', '.join(table)}")


def checked(loss, name):
    """Try a loss on two outputs of three tokens. ValueError if it does not return L_t. -> function
    with the arguments of `load`, which gives the loss A as (B, T)"""
    import torch  # here, because an engine first moves this checkout in the import path

    @functools.wraps(loss.func)
    def token_loss(logps, old_logps, advantages, mask):
        A = advantages if advantages.dim() == 2 else advantages[:, None]
        losses = loss(logps, old_logps, A.expand_as(mask), mask)
        return torch.where(mask > 0, losses, 0.0) if losses.shape == mask.shape else losses

    mask = torch.ones(2, 3)
    logps = torch.full((2, 3), -1.0, requires_grad=True)
    try:
        found = token_loss(logps, torch.full((2, 3), -1.1), torch.tensor([1.0, -1.0]), mask)
    except Exception as error:              # the function may be anybody's
        raise ValueError(f"{name}: {one_line(error)}") from error
    if getattr(found, "shape", None) != mask.shape:
        shape = tuple(getattr(found, "shape", ()))
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
