"""`moeedge devices`: what the installed llama.cpp can compute on, and where our library lies."""

from __future__ import annotations

from typing import Annotated

import typer

from moeedge import native
from moeedge.cli.common import cli_errors
from moeedge.ui.devices_table import print_devices


def devices(
    library: Annotated[
        bool,
        typer.Option(
            "--library",
            help="Print the path of moeedge's ggml backend and exit; name it in GGML_BACKEND_PATH to load it into "
            "llama.cpp's own programs of the same version.",
        ),
    ] = False,
) -> None:
    """List the devices that the installed llama.cpp offers."""
    with cli_errors():
        if library:
            typer.echo(native.library_path())
            return
        native.attach()
        print_devices(native.devices())
