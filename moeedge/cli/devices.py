"""`moeedge devices`: what could hold experts here, and where our library lies."""

from __future__ import annotations

from typing import Annotated

import typer

from moeedge import native
from moeedge.cli import options
from moeedge.cli.common import cli_errors


def devices(
    output: Annotated[
        options.Output, typer.Option("-o", "--output", help="Print a table, or a JSON list with sizes in bytes.")
    ] = options.Output.TEXT,
    library: Annotated[
        bool,
        typer.Option(
            "--library",
            help="Print the path of moeedge's ggml backend and exit; name it in GGML_BACKEND_PATH to load it into "
            "llama.cpp's own programs of the same version.",
        ),
    ] = False,
) -> None:
    """List the devices that can hold experts, and why the others cannot."""
    with cli_errors():
        if library:
            typer.echo(native.library_path())
            return
        from moeedge.hardware.devices import list_devices
        from moeedge.llama import library as llama_library
        from moeedge.ui.console import stdout_console
        from moeedge.ui.model_views import devices_json, print_devices

        llama_library.start()
        if output is options.Output.JSON:
            typer.echo(devices_json(list_devices()), nl=False)
        else:
            print_devices(list_devices(), stdout_console())
