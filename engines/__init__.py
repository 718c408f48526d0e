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
import contextlib
import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
OURS = ("common", "plumbing", "reinforce", "ppo", "grpo", "gspo", "dpo", "nano", "real", "tasks",
        "kernels", "examples", "vectors", "report", "engines", "learn", "lab")
SCRIPTS = ("grpo", "gspo", "ppo")
REASONS = {"reinforce": "its loss has no old log-probabilities",
           "dpo": "its loss compares pairs of outputs; TRL has a DPOTrainer"}
LEVELS = ("sequence", "sequence_token")         # of the ratio of gspo.policy_loss
INPUTS = ("logps", "old_logps", "advantages", "mask")


# ---- 1. the text of a loss -------------------------------------------------------------------

def load(text=None):
    """Read a loss from a text, or from the environment variable LOSS. ValueError, with one line, if
    there is no such loss. -> function of log pi, log pi_old (B, T), A (B,) or (B, T), and mask
    (B, T), which returns L_t (B, T); name of the average"""
    from engines.names import AVERAGES  # here, because an engine first moves this checkout
    text = os.environ.get("LOSS", "") if text is None else text
    name, function_name, words = parts_of(text)
    settings = dict(map(read_setting, words))
    how = settings.pop("how", None)
    module = import_module(name)
    binding, settings, average = of_module(module, name, function_name, settings)
    refuse_other("how", how or average, AVERAGES)
    loss = tried(binding, settings, text.split()[0])
    loss.module = module.__name__
    return loss, how or average


def parts_of(text):
    """Split the text of a loss. -> name of its module or file, name of its function, settings"""
    words = text.split()
    if not words:
        raise ValueError('LOSS: is empty; write, for example, LOSS="grpo:policy_loss"')
    name, function_name = split_name(words[0])
    return name, function_name or "policy_loss", words[1:]


def split_name(word):
    """Split FILE:FUNCTION; the colon of a drive, as in C:\\mine.py, belongs to the file.
    -> file, function, "" if none is named"""
    file, _, function = word.rpartition(":")
    return (file, function) if len(file) > 1 else (word, "")


def read_setting(word):
    """Split NAME=VALUE. -> name, text of the value"""
    name, equals, text = word.partition("=")
    if not equals:
        raise ValueError(f"{word}: must be a setting, such as epsilon_high=0.28")
    return name, text


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


def of_module(module, name, function_name, settings):
    """Find a loss of a script, of the zoo or of a Python file. ValueError if it needs more than a
    trainer gives. -> Binding of its parameters, settings, name of its average"""
    from vectors.adapter import gaps_of  # here, because an engine first moves this checkout
    from vectors.contract import STARS, bind, is_adapter
    loss = getattr(module, function_name, None)
    if not callable(loss):
        raise ValueError(f"{name}: has no function {function_name}")
    if gaps := gaps_of(loss):
        raise ValueError(f"{name}: fill the gaps (...) of {', '.join(gaps)}")
    remedy = "write a setting"
    if not is_adapter(loss):
        remedy += (", or an adapter, which begins with: python -m vectors "
                   f"{name}:{function_name} --recipe grpo --advantages BT")
    try:
        binding = bind(loss, INPUTS, ())
    except ValueError as error:
        raise ValueError(f"{name}: {function_name}: {error}; {remedy}") from None
    known, average = parameters_of(module, function_name, settings.get("loss_type"))
    settings = read_settings(settings, known, name)
    if "level" in settings and name in SCRIPTS:
        refuse_other("level", settings["level"], LEVELS)
    missing = [key for key, one in known.items() if one.default is one.empty
               and one.kind not in STARS and key not in settings]
    if missing:
        raise ValueError(f"{name}: {function_name} needs {', '.join(missing)}, but a trainer gives "
                         f"it {', '.join(INPUTS)}; {remedy}")
    return binding, settings, "token_mean" if name == "ppo" else average


def parameters_of(module, function_name, loss_type=None):
    """Look up the settings of a loss, which are its parameters that no input is bound to, and its
    average.
    loss_type: a row of the module's LOSS_TYPES; by default the loss's own. ValueError if there is
    no such row. -> {name: inspect.Parameter}, name of the average"""
    from vectors.contract import bind, is_adapter  # here, as in `load`

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


def read_settings(texts, known, name):
    """Read the settings of a loss, {name: text}, as the defaults of its parameters show. ValueError
    for a setting that the loss does not have, or whose value has another type than its default; a
    setting whose default is None takes no text. -> {name: value}"""
    from vectors.contract import setting  # here, because an engine first moves this checkout
    takes_any = any(one.kind is one.VAR_KEYWORD for one in known.values())
    for key in texts:
        if key not in known and not takes_any:
            raise ValueError(f"{key}: is not a setting of {name}; it has "
                             f"{', '.join(known) or 'none'}, and how")
    return {key: setting(key, text, known.get(key)) for key, text in texts.items()}


def refuse_other(name, value, choices):
    if value not in choices:
        raise ValueError(f"{name}={value}: must be one of {', '.join(choices)}")


def tried(binding, settings, name):
    """Try a loss on three outputs with A = 1, -1 and 0, of which the last is shorter. ValueError if
    it does not return a finite L_t of each token with finite gradients, if it changes its inputs,
    or if it makes the worse output more likely.
    -> function with the arguments of `load`, which gives the loss A as (B, T)"""
    import torch  # here, because an engine first moves this checkout in the import path

    def token_loss(logps, old_logps, advantages, mask):
        A = advantages if advantages.dim() == 2 else advantages[:, None]
        found = binding.call(dict(zip(INPUTS, (logps, old_logps, A.expand_as(mask), mask))),
                             settings)
        shape, size = getattr(found, "shape", ()), tuple(mask.shape)
        if tuple(shape) != size:
            raise ValueError(f"returned the shape {tuple(shape)} for inputs of shape {size}; it "
                             "must return the loss of each token, which the trainer averages")
        return torch.where(mask > 0, found, 0.0)

    logps = torch.full((3, 4), -1.0, requires_grad=True)        # pi_old is pi, as in a first update
    A = torch.tensor([[1.0], [-1.0], [0.0]]).repeat(1, 4)
    mask = torch.ones(3, 4)
    mask[2, 2:] = 0
    given = logps.detach().clone(), A.clone(), mask.clone()
    try:
        with restored():
            found = token_loss(logps, *given)
    except (Exception, SystemExit) as error:            # the function may be anybody's
        raise ValueError(f"{name}: {one_line(error)}") from error
    for what, before, after in zip(INPUTS[1:], (logps, A, mask), given):
        if not torch.equal(before, after):
            raise ValueError(f"{name}: changes {what} in place, which the trainer still needs")
    slope = None
    if found.requires_grad:
        [slope] = torch.autograd.grad(found.sum(), logps, allow_unused=True,
                                      retain_graph=True)                        # (3, 4)
    if slope is None:
        raise ValueError(f"{name}: the loss does not depend on log pi, so nothing can be learned")
    for what, values in (("the loss", found), ("its gradient", slope)):
        if not values.isfinite().all():
            raise ValueError(f"{name}: {what} of a token is not finite, for outputs with A = 1, "
                             f"A = -1 and A = 0: {values.detach().tolist()}")
    [others] = torch.autograd.grad(found[0].sum(), logps, retain_graph=True)    # (3, 4)
    if others[1:].any() and len(found[mask > 0].unique()) == 1:
        raise ValueError(f"{name}: returned one number for all tokens; "
                         "it must return the loss of each token, which the trainer averages")
    better, worse, _ = slope.sum(1).tolist()
    if not better < worse:                  # a step against the gradient makes `worse` more likely
        raise ValueError(f"{name}: the gradient is {better:.2g} for an output with A = 1 and "
                         f"{worse:.2g} for one with A = -1, so the better output does not become "
                         "more likely; the sign is wrong, or the order of the arguments")
    return token_loss


# ---- 2. a user's files -----------------------------------------------------------------------

def is_users(file):
    """Whether a file is neither ours nor of an installed package or of Python."""
    file = Path(file).resolve()
    folders = {Path(sysconfig.get_path(name)).resolve()
               for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    is_installed = {"site-packages", "dist-packages"} & {*file.parts} or any(
        map(file.is_relative_to, folders))
    return file.exists() and not is_installed and not is_ours(file)


def is_ours(file):
    file = Path(file).resolve()
    return file.is_relative_to(HERE) and (
        file.relative_to(HERE).parts[0].removesuffix(".py") in OURS)


@contextlib.contextmanager
def restored():
    """Give back what a user's code changes of torch and the current folder."""
    import torch  # here, because an engine first moves this checkout in the import path

    def set_device(device):             # a device that is set, even cpu, slows all operations
        torch.set_default_device(None if device.type == "cpu" else device)
    kept = [(torch.set_default_dtype, torch.get_default_dtype),
            (set_device, torch.get_default_device),
            (torch.set_grad_enabled, torch.is_grad_enabled),
            (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision),
            (torch.set_num_threads, torch.get_num_threads), (os.chdir, os.getcwd)]
    before = [get() for _, get in kept]
    try:
        yield
    finally:
        for (change, get), value in zip(kept, before):
            if get() != value:
                change(value)


def read_file(path):
    """Import a Python file by its path; it can import its neighbors. What it changes of torch is
    given back. -> module"""
    file = Path(path).resolve()
    if not file.is_file():
        raise ValueError(f"{path}: there is no such file")
    own = hashlib.sha256(os.fsencode(file)).hexdigest()[:8]     # files may have equal names
    spec = importlib.util.spec_from_file_location(f"engines.file.{file.stem}_{own}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    folders = [] if is_ours(file) or file.parent == HERE else [str(file.parent)]
    sys.path[:0] = folders              # here, its neighbors come first; later, packages do
    try:
        with restored():
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path}: cannot be imported: {one_line(error)}") from error
    finally:
        for folder in folders:
            sys.path.remove(folder)
            sys.path.extend({folder} - {*sys.path})
    return module


def place_of(error):
    """Find the last line of a user's file in the traceback of an error. -> FILE:LINE, or "" """
    places = [(frame.filename, frame.lineno)
              for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((error.filename or "", error.lineno))
    found = [f"{os.path.relpath(file)}:{line}" for file, line in places
             if file and is_users(file)]
    return found[-1] if found else ""


def one_line(error, has_type=True):
    """Write an error on one line, with its place in a user's file. -> str"""
    words = [place_of(error), type(error).__name__ * has_type, str(error)]
    return " ".join(": ".join(filter(None, words)).split())[:500]
