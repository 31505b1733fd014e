"""``python -m ringkv``: the command line."""

from ringkv.cli import main

if __name__ == "__main__":
    main()
