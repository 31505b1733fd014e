"""``python -m ringkv``, and the console script: the command line."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Run the command line.

    Its imports take a second, in which an exception would be shown with its traceback, or swallowed. Ctrl-C and SIGTERM
    therefore end the process at once, until a command handles them, and again after it.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: os._exit(130))
    from ringkv.cli import main as run

    run()


if __name__ == "__main__":
    main()
