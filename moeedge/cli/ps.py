"""`moeedge ps`: the moeedge processes that run, and their models."""

from __future__ import annotations

from moeedge.cli import options
from moeedge.cli.common import emit
from moeedge.cli.declare import Output


def ps(output: options.TextOrJson = Output.TEXT) -> None:
    """List running moeedge processes of this user: their models and the memory that they take.

    A model is loaded as long as its process runs; nothing stays loaded afterwards.
    """
    from moeedge.health.running import list_running
    from moeedge.ui.machine_views import print_running
    from moeedge.ui.tables import records_json

    emit(output, records_json, print_running, list_running())
