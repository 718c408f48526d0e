"""Follow a run with observers, draw its report page, and ask its policy."""
import os
import sys

if sys.argv[:1] == ["-m"] and sys.path[0] == os.getcwd():
    sys.path.append(sys.path.pop(0))        # a random.py of yours must not hide Python's
import argparse
import contextlib
import shlex
from pathlib import Path

# `python -m report.ask` must not find a file of yours, such as common.py, before ours. An engine
# has moved our folder to the end of the path, where it has to stay.
if "engines.import_path" not in sys.modules:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common


def short(path):
    """Write a path without the current folder. -> str"""
    return str(path).removeprefix(f"{Path.cwd()}{os.sep}")


def command(*words):
    """Write a command that runs a module of this repository, ready to be pasted. -> str"""
    where = "" if Path.cwd() == common.HERE else f"PYTHONPATH={shlex.quote(str(common.HERE))} "
    return where + shlex.join(map(short, [sys.executable, "-m", *words]))


def start(main):
    """Run a command. If its output is cut off (| head -1), it ends without an error message, Ctrl-C
    ends it with one line, and characters that the terminal lacks are escaped."""
    getattr(sys.stdout, "reconfigure", dict)(errors="backslashreplace")     # not in a notebook
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(141)               # no flush, which would fail again
    except KeyboardInterrupt:
        common.fail("interrupted", 130)


@contextlib.contextmanager
def replaced(owner, **values):
    """Replace what a module or a class defines, as long as the context lasts."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def parser(description):
    """Make a parser of a command's arguments. --help prints the description, and a mistake in the
    arguments is reported in one line. -> ArgumentParser"""
    argument_parser = argparse.ArgumentParser(
        description=description, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    argument_parser.error = common.fail
    return argument_parser


def escape(text):
    """Write a text on one line of printable ASCII. No control character in a completion may reach
    the terminal. -> str"""
    return text.encode("unicode_escape").decode()
