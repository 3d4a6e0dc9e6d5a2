"""The `moeedge` program; `python -m moeedge` is the same."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; Ctrl-C ends it without a traceback, also during imports."""
    try:
        from moeedge.cli.app import app

        app(prog_name="moeedge")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
