"""`moeedge ps`: the moeedge processes that run, and their models."""

from __future__ import annotations

import typer

from moeedge.cli import options
from moeedge.cli.declare import Output


def ps(output: options.TextOrJson = Output.TEXT) -> None:
    """List running moeedge processes of this user: their models and the memory that they take.

    A model is loaded as long as its process runs; nothing stays loaded afterwards.
    """
    from moeedge.health.running import list_running
    from moeedge.ui.console import stdout_console
    from moeedge.ui.running_view import print_running, running_json

    running = list_running()
    if output is Output.JSON:
        typer.echo(running_json(running), nl=False)
    else:
        print_running(running, stdout_console())
