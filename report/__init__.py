"""What happens in a run: observers, trackers, the report page, and how to ask the policy."""
import argparse
import signal

import common

# how a command is run: in a clone, or after pip install
COMMAND = "readable-rl" if common.HERE.name == "readable_rl" else "python -m"


def start(main):
    """Run a command. If nobody reads its output any more (| head -1), it ends without a word."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()


def parser(told):
    """What reads the words of a command: --help says what it is told, a mistake is one line."""
    made = argparse.ArgumentParser(description=told, allow_abbrev=False,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    made.error = common.fail
    return made


def escape(text):
    """The text on one line, so that no control character of a completion reaches the terminal."""
    return text.encode("unicode_escape").decode()
