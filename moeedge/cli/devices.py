"""`moeedge devices`: devices that can hold experts, and the path of the native library."""

from __future__ import annotations

from typing import Annotated

import typer

from moeedge.cli import options
from moeedge.cli.common import emit
from moeedge.cli.declare import Output

Library = Annotated[
    bool,
    typer.Option(
        "--library",
        help="Print the path of moeedge's ggml backend and exit; GGML_BACKEND_PATH=PATH loads it into llama.cpp's own "
        "programs of the same version.",
    ),
]


def devices(
    backend: options.Backend = None, output: options.TextOrJson = Output.TEXT, library: Library = False
) -> None:
    """List the devices that can hold experts (GPUs, other machines), and why others cannot.

    A device is a memory with a processor of its own. The CPU computes the experts that are on no device. A GPU of this
    machine that cannot be used is listed with what it lacks. The emulated device is a part of the CPU that plays a GPU,
    to try everything without one.
    """
    from moeedge import native
    from moeedge.hardware.devices import list_devices
    from moeedge.llama import library as llama_library
    from moeedge.ui.machine_views import print_devices
    from moeedge.ui.tables import records_json

    if library:
        typer.echo(native.library_path())
        return
    llama_library.start()
    emit(output, records_json, print_devices, list_devices())
