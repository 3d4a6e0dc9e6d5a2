"""`python -m moeedge` is the `moeedge` program."""

from __future__ import annotations

from moeedge.cli.app import app

if __name__ == "__main__":
    app(prog_name="moeedge")
