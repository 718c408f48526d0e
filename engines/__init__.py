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
AVERAGES = {                            # names of the averages here and in verl
    "sequence_mean": "seq-mean-token-mean", "token_mean": "token-mean",
    "sequence_sum": "seq-mean-token-sum", "constant": "seq-mean-token-sum-norm"}
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
    settings = dict(map(read_setting, words[1:]))
    how = settings.pop("how", None)
    name, _, function_name = words[0].partition(":")
    find = of_zoo if name == "zoo" else of_module
    loss, table = find(name, function_name or "policy_loss", settings)
    row = table.get(settings.get("loss_type", "grpo"), ("", "sequence_mean"))
    how = how or ("token_mean" if name == "ppo" else row[1])
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
    """Import a script or a Python file. -> module"""
    if name.endswith(".py"):
        return read_file(name)
    if name in REASONS:
        raise ValueError(f"{name}: {REASONS[name]}; write one of {', '.join(SCRIPTS)}, or a file")
    if name not in SCRIPTS:
        raise ValueError(f"{name}: must be {', '.join(SCRIPTS)}, zoo, or a file such as mine.py")
    return importlib.import_module(name)


def of_module(name, function_name, settings):
    """Find a loss of a script, or of a Python file. -> function, LOSS_TYPES of its module"""
    module = import_module(name)
    loss = getattr(module, function_name, None)
    if not callable(loss):
        raise ValueError(f"{name}: has no function {function_name}")
    parameters = inspect.signature(loss).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    refuse_unknown(settings, settings if takes_any else [*parameters][len(INPUTS):], name)
    table = getattr(module, "LOSS_TYPES", {}) if "loss_type" in parameters else {}
    if table and "loss_type" in settings:
        refuse_other("loss_type", settings["loss_type"], table)
    return functools.partial(loss, **settings), table


def of_zoo(name, function_name, settings):
    """Find a loss of examples/zoo.py, whose settings are its flags. -> function, LOSS_TYPES"""
    zoo = read_file(HERE / "examples/zoo.py")
    if function_name != "policy_loss":
        raise ValueError(f"zoo: has no function {function_name}; write zoo:policy_loss "
                         f"loss_type={min(zoo.NEW)}")
    loss_type = settings.setdefault("loss_type", zoo.Config.loss_type)
    refuse_other("loss_type", loss_type, zoo.LOSS_TYPES)
    own = ("loss_type", loss_type, "epsilon", "delta")
    known = [flag for flag in zoo.Config.__dataclass_fields__ if flag.startswith(own)]
    refuse_unknown(settings, known, f"{name}:{loss_type}")
    for key, value in settings.items():
        if key != "loss_type" and isinstance(value, str):
            raise ValueError(f"{key}={value}: must be a number")
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


def refuse_other(name, value, choices):
    if value not in choices:
        raise ValueError(f"{name}={value}: must be one of {', '.join(choices)}")


def tried(loss, name):
    """Try a loss on two outputs of three tokens. ValueError if it does not return L_t. -> function
    with the arguments of `load`, which gives the loss A as (B, T)"""
    import torch  # here, because an engine first moves this checkout in the import path

    def token_loss(logps, old_logps, advantages, mask):
        A = advantages if advantages.dim() == 2 else advantages[:, None]
        return torch.where(mask > 0, loss(logps, old_logps, A.expand_as(mask), mask), 0.0)

    logps = torch.full((2, 3), -1.0, requires_grad=True)
    A = torch.tensor([1.0, -1.0])[:, None].expand(2, 3)
    try:
        found = loss(logps, torch.full((2, 3), -1.1), A, torch.ones(2, 3))
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
