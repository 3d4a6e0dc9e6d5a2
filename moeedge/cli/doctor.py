"""`moeedge doctor`: check this installation and this machine."""

from __future__ import annotations

import typer

from moeedge.cli import options
from moeedge.cli.common import EXIT_FAILURE, emit
from moeedge.cli.declare import Output


def doctor(backend: options.Backend = None, output: options.TextOrJson = Output.TEXT) -> None:
    """Check the installation and this machine, and say what you should fix.

    Looks at the native library, GPUs, processor, threads, memory, disk, folders and environment variables. Takes a
    second or two, loads no model and downloads nothing. Exit code 1: something is broken.
    """
    from moeedge.cli.reference import llama_variables
    from moeedge.health.doctor import examine
    from moeedge.ui.machine_views import print_report, report_json

    report = examine(llama_variables())
    emit(output, report_json, print_report, report)
    if report.is_broken:
        raise typer.Exit(EXIT_FAILURE)
