"""``python -m ringkv``, and the console script: the command line."""

from __future__ import annotations


def main() -> None:
    """Run the command line.

    Its imports take a second, in which an exception would be shown with its traceback, or swallowed: a signal ends the
    process at once, until a command handles it.
    """
    from ringkv.apps.ending import watch

    watch()
    from ringkv.cli import main as run

    run()


if __name__ == "__main__":
    main()
