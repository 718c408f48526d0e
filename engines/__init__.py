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
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
AVERAGES = {                            # names of the averages here and in verl
    "sequence_mean": "seq-mean-token-mean", "token_mean": "token-mean",
    "sequence_sum": "seq-mean-token-sum", "constant": "seq-mean-token-sum-norm"}
SCRIPTS = ("grpo", "gspo", "ppo")       # reinforce has no pi_old, and dpo compares pairs of outputs


def load(text=None):
    """Read a loss from a text, or from the environment variable LOSS. ValueError, with one line, if
    there is no such loss. -> function of log pi, log pi_old (B, T), A (B,) or (B, T), and mask
    (B, T), which returns L_t (B, T); name of the average"""
    words = (os.environ.get("LOSS", "") if text is None else text).split()
    if not words:
        raise ValueError('LOSS: is empty; write, for example, LOSS="grpo:policy_loss"')
    settings = dict(map(read_setting, words[1:]))
    name, _, function_name = words[0].partition(":")
    module = find(name)
    if name == "zoo":
        settings.setdefault("loss_type", module.Config.loss_type)
    how = settings.pop("how", None) or average_of(name, module, settings)
    refuse_unknown("how", how, AVERAGES)
    try:
        if name == "zoo":
            loss = of_zoo(module, function_name, settings)
        else:
            loss = functools.partial(
                getattr(module, function_name or "policy_loss"), **settings)
        return tried(loss), how
    except Exception as error:              # the function may be anybody's
        raise ValueError(f"{words[0]}: {one_line(error)}") from error


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
    name, equals, value = word.partition("=")
    if not equals:
        raise ValueError(f"{word}: must be a setting, such as epsilon_high=0.28")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def find(name):
    """Import a script, the zoo, or a Python file. -> module"""
    if name == "zoo":
        return read_file(HERE / "examples/zoo.py")
    if name.endswith(".py"):
        return read_file(name)
    if name not in SCRIPTS:
        raise ValueError(f"{name}: must be {', '.join(SCRIPTS)}, zoo, or a file such as mine.py")
    return importlib.import_module(name)


def average_of(name, module, settings):
    """Find the average of a loss: that of its row in LOSS_TYPES, if it has one. -> str"""
    table = getattr(module, "LOSS_TYPES", {})
    if "loss_type" in settings and table:
        refuse_unknown("loss_type", settings["loss_type"], table)
        return table[settings["loss_type"]][1]
    return "token_mean" if name == "ppo" else "sequence_mean"


def refuse_unknown(name, value, choices):
    if value not in choices:
        raise ValueError(f"{name}={value}: must be one of {', '.join(choices)}")


def of_zoo(zoo, function_name, flags):
    """Find a loss of examples/zoo.py, which takes flags instead of parameters. -> function"""
    if function_name not in ("", "policy_loss"):
        raise ValueError(f"write zoo:policy_loss loss_type={function_name}")
    cfg = zoo.Config(**flags)
    for is_kept, rule in cfg.rules():
        if not is_kept:
            raise ValueError(rule)
    return lambda *inputs: zoo.policy_loss(
        cfg, *inputs, cfg.loss_type, cfg.epsilon, cfg.epsilon_high, cfg.delta)


def tried(loss):
    """Try a loss on two outputs of three tokens. ValueError if it does not return L_t. -> function
    with the arguments of `load`, which gives the loss A as (B, T)"""
    import torch  # here, because an engine first moves this checkout in the import path

    def token_loss(logps, old_logps, advantages, mask):
        A = advantages if advantages.dim() == 2 else advantages[:, None]
        losses = loss(logps, old_logps, A.expand_as(mask), mask)
        if losses.shape != mask.shape:
            raise ValueError(f"returned the shape {tuple(losses.shape)} for inputs of shape "
                             f"{tuple(mask.shape)}; it must return the loss of each token, which "
                             "the trainer averages")
        return torch.where(mask > 0, losses, 0.0)

    old_logps = torch.full((2, 3), -1.1)
    logps = torch.full((2, 3), -1.0, requires_grad=True)
    losses = token_loss(logps, old_logps, torch.tensor([1.0, -1.0]), torch.ones(2, 3))
    if not losses.requires_grad:
        raise ValueError("the loss does not depend on log pi, so nothing can be learned")
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
    spec.loader.exec_module(module)
    return module


def one_line(error):
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
