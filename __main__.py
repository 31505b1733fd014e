"""``python -m ringkv``, and the console script: the command line."""

from __future__ import annotations

import sys
from contextlib import suppress


def main() -> None:
    """Run the command line.

    Its imports take a second, in which an exception would be shown with its traceback, or swallowed: a signal ends the
    process at once, until a command handles it. After a signal nothing is torn down, which may take another second.
    """
    from ringkv.apps.ending import INTERRUPTED, end, watch

    watch()
    from ringkv.cli import main as run

    try:
        run()
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
            end()
        raise


if __name__ == "__main__":
    main()
