"""Your loss in other people's trainers: write one function, and take it to TRL and verl.

A loss is described by a text: its function, its settings, and the average of its values.

  grpo:policy_loss loss_type=dapo epsilon_high=0.28     of a script; the average is that of dapo
  zoo:policy_loss loss_type=gmpo gmpo_epsilon=0.3       of examples/zoo.py, with its flags
  mine.py:my_loss bound=2 how=token_mean                of a file of yours

The function gets log pi, log pi_old, A and mask, (B, T) each, by the names of its parameters, such
as logps or log_prob, which are those of vectors/contract.py; a function with other names needs an
adapter, which `python -m vectors` writes. It returns the loss L_t (B, T) of each token. `how` is
the average over the tokens of an optimizer step: sequence_mean (the default), token_mean,
sequence_sum or constant, as in `aggregate` of the scripts.
"""
import vectors  # noqa: F401, I001  (before all others: it puts your folder behind Python's)
import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path

import torch

from engines.names import AVERAGES
from vectors.adapter import gaps_of
from vectors.contract import bind, is_adapter, restored, setting

HERE = Path(__file__).resolve().parent.parent
OURS = ("common", "plumbing", "reinforce", "ppo", "grpo", "gspo", "dpo", "nano", "real", "tasks",
        "kernels", "examples", "vectors", "report", "engines", "measuring", "learn", "lab", "tests")
SCRIPTS = ("grpo", "gspo", "ppo")
INPUTS = ("logps", "old_logps", "advantages", "mask")


# ---- 1. the text of a loss -------------------------------------------------------------------

def load(text=None):
    """Read a loss from a text, or from the environment variable LOSS. ValueError, with one line, if
    there is no such loss, or if it needs more than a trainer gives.
    -> function of log pi, log pi_old (B, T), A (B,) or (B, T), and mask (B, T), which returns L_t
    (B, T); name of the average"""
    name, function, settings = parts_of(os.environ.get("LOSS", "") if text is None else text)
    how = settings.pop("how", None)
    module = import_module(name)
    loss = getattr(module, function, None)
    if not callable(loss):
        raise ValueError(f"{name}: has no function {function}")
    if gaps := gaps_of(loss):
        raise ValueError(f"{name}: fill the gaps (...) of {', '.join(gaps)}")
    try:
        binding = bind(loss, INPUTS, ())
        if missing := [key for key in binding.unknown if key not in settings]:
            raise ValueError(f"needs {', '.join(missing)}, but a trainer gives it "
                             f"{', '.join(INPUTS)}")
    except ValueError as error:
        raise ValueError(f"{name}: {function}: {error}; write a setting, or an adapter, which "
                         f"begins with: python -m vectors {name}:{function} --recipe grpo "
                         "--advantages BT") from None
    known, average = parameters_of(module, function, settings.get("loss_type"))
    takes_any = any(one.kind is one.VAR_KEYWORD for one in known.values())
    for key in settings:
        if key not in known and not takes_any:
            raise ValueError(f"{key}: is not a setting of {name}; it has "
                             f"{', '.join(known) or 'none'}, and how")
    values = {key: setting(key, one, known.get(key)) for key, one in settings.items()}
    how = how or ("token_mean" if name == "ppo" else average)
    refuse_other("how", how, AVERAGES)
    found = tried(binding, values, f"{name}:{function}")
    found.module = module
    return found, how


def parts_of(text):
    """Split the text of a loss. -> name of its module or file, name of its function, settings as
    {name: text}"""
    first, *words = text.split() or [""]
    name, _, function = first.rpartition(":") if ":" in first else (first, "", "")
    return name, function or "policy_loss", dict(word.partition("=")[::2] for word in words)


def import_module(name):
    """Import a script, the zoo or a Python file. -> module"""
    if name.endswith(".py") or name == "zoo":
        return read_file(HERE / "examples/zoo.py" if name == "zoo" else name)
    if name not in SCRIPTS:
        raise ValueError(f"{name or 'LOSS'}: must be {', '.join(SCRIPTS)}, zoo, or a file such as "
                         "mine.py")
    return importlib.import_module(name)


def parameters_of(module, function_name, loss_type=None):
    """Look up the settings of a loss, which are its parameters that no input is bound to, and its
    average.
    loss_type: a row of the module's LOSS_TYPES; by default the loss's own. ValueError if there is
    no such row. -> {name: inspect.Parameter}, name of the average"""
    def settings(function):
        binding = bind(function, INPUTS, ())
        used = bind(function, binding.parameters, ()).names if is_adapter(function) else (
            binding.parameters)
        return {key: one for key, one in binding.parameters.items()
                if key in used and key not in binding.names}

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


def refuse_other(name, value, choices):
    if value not in choices:
        raise ValueError(f"{name}={value}: must be one of {', '.join(choices)}")


def tried(binding, settings, name):
    """Try a loss on three outputs with A = 1, -1 and 0, of which the last is shorter. ValueError if
    it does not return a finite L_t of each token with finite gradients, or if it makes the worse
    output more likely. -> function with the arguments of `load`, which gives the loss A as (B, T)
    """
    def token_loss(logps, old_logps, advantages, mask):
        A = advantages if advantages.dim() == 2 else advantages[:, None]
        given = old_logps, A.expand_as(mask), mask      # clones, because a loss may change them
        found = binding.call(dict(zip(INPUTS, (logps, *(one.clone() for one in given)))), settings)
        shape = tuple(getattr(found, "shape", ()))
        if shape != tuple(mask.shape):
            raise ValueError(f"returned the shape {shape} for inputs of shape {tuple(mask.shape)}; "
                             "it must return the loss of each token, which the trainer averages")
        return torch.where(mask > 0, found, 0.0)

    logps = torch.full((3, 4), -1.0, requires_grad=True)        # pi_old is pi, as in a first update
    mask = torch.ones(3, 4)
    mask[2, 2:] = 0
    try:
        found = token_loss(logps, logps.detach(), torch.tensor([1.0, -1.0, 0.0]), mask)
    except (Exception, SystemExit) as error:            # the function may be anybody's
        raise ValueError(f"{name}: {one_line(error)}") from error
    found = found + 0 * logps                           # a gradient of 0 if it does not depend on
    [slope] = torch.autograd.grad(found.sum(), logps, retain_graph=True)        # (3, 4)
    if not (found.isfinite().all() and slope.isfinite().all()):
        raise ValueError(f"{name}: a loss or its gradient is not finite, for outputs with A = 1, "
                         f"-1 and 0: {found.tolist()} and {slope.tolist()}")
    [others] = torch.autograd.grad(found[0].sum(), logps)                       # (3, 4)
    if others[1:].any() and len(found[mask > 0].unique()) == 1:
        raise ValueError(f"{name}: returned one number for all tokens; "
                         "it must return the loss of each token, which the trainer averages")
    better, worse, _ = slope.sum(1).tolist()
    if not better < worse:                  # a step against the gradient makes `worse` more likely
        raise ValueError(f"{name}: the gradient is {better:.2g} for an output with A = 1 and "
                         f"{worse:.2g} for one with A = -1, so the better output does not become "
                         "more likely; the sign is wrong, or the order of the arguments")
    return token_loss


def text_of(completion):
    """Find what the policy wrote last in a completion, a text or a list of messages: tools write
    messages, too. -> str, "" if there is no message of the assistant"""
    if isinstance(completion, str):
        return completion
    own = [one.get("content") for one in completion if one["role"] == "assistant"]
    return (own or [""])[-1] or ""                  # None: it only calls a tool


# ---- 2. a user's files -----------------------------------------------------------------------

def is_users(file):
    """Whether a file is neither ours nor of an installed package or of Python."""
    file = Path(file).resolve()
    is_ours = file.is_relative_to(HERE) and (
        file.relative_to(HERE).parts[0].removesuffix(".py") in OURS)
    is_installed = {"site-packages", "dist-packages"} & {*file.parts} or file.is_relative_to(
        Path(os.__file__).resolve().parent)
    return file.exists() and not is_ours and not is_installed


def read_file(path):
    """Import a Python file by its path, which is the name of the module, because files may have
    equal names. It can import its neighbors. -> module"""
    file = Path(path).resolve()
    if not file.is_file():
        raise ValueError(f"{path}: there is no such file")
    folders = [str(file.parent)] if is_users(file) and file.parent != HERE else []
    sys.path[:0] = folders              # now, its neighbors come first; later, packages do
    theirs = {path.stem for folder in folders for path in Path(folder).iterdir()}
    ours = {name: sys.modules.pop(name, None) for name in theirs.intersection(OURS)}
    spec = importlib.util.spec_from_file_location(str(file), file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        with restored():
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path}: cannot be imported: {one_line(error)}") from error
    finally:
        sys.path[:] = sys.path[len(folders):] + folders
        for name, one in ours.items():          # a tasks.py of theirs must not hide ours later
            sys.modules.pop(name, None)
            sys.modules.update({name: one} if one else {})
    return module


def place_of(error):
    """Find the last line of a user's file in the traceback of an error. -> FILE:LINE, or "" """
    places = [(one.filename, one.lineno) for one in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):                  # it is in no frame
        places.append((error.filename, error.lineno))
    found = [f"{os.path.relpath(file)}:{line}" for file, line in places if is_users(file)]
    return found[-1] if found else ""


def one_line(error, has_type=True):
    """Write an error on one line, with its place in a user's file. -> str"""
    words = [place_of(error), type(error).__name__ * has_type, str(error)]
    return " ".join(": ".join(filter(None, words)).split())[:500]
