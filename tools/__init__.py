"""For the reader and the maintainer: no script needs anything in here to run."""
import signal


def start(main):
    """Run a command. If nobody reads its output any more (| head -1), it ends without a word."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()
