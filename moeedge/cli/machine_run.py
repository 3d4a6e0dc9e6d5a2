"""`moeedge devices` and `worker` once their options are read."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys

import typer

from moeedge import native
from moeedge.cli.common import emit, interrupted_code
from moeedge.cli.options import Output
from moeedge.engine.context_choice import thread_notes
from moeedge.errors import DeviceError
from moeedge.hardware import rpc
from moeedge.hardware.devices import list_devices
from moeedge.hardware.spec import parse_host_port
from moeedge.llama import library
from moeedge.ui.machine_views import print_devices
from moeedge.ui.tables import records_json
from moeedge.units import format_bytes


def show_devices(output: Output) -> None:
    """Lists the devices that can hold experts."""
    library.start()
    emit(output, records_json, print_devices, list_devices())


def serve(listen: str, device: str, threads: int, *, insecure: bool, verbose: bool) -> None:
    """Serves a device until a signal ends the program. Raises DeviceError."""
    library.start()
    rpc.check_built_in()
    served = _device(device)
    for note in thread_notes(threads):
        typer.echo(note, err=True)
    address, port = rpc.reserve_port(*_endpoint(listen, insecure=insecure))
    sys.stdout.flush()
    out = os.dup(1)  # for the line below; llama.cpp's own lines on standard output go elsewhere from now on
    others = os.dup(2) if verbose else os.open(os.devnull, os.O_WRONLY)
    os.dup2(others, 1)
    os.close(others)
    try:
        server = rpc.Server(served, address, port, threads or library.physical_cores())
        ready = server.wait_until_ready()
        reached_at = socket.gethostname() if address == "0.0.0.0" else address
        line = f"Serving {served} ({format_bytes(ready.total_bytes)}): use it with -dev rpc://{reached_at}:{port}\n"
        os.write(out, line.encode())
        if insecure:
            typer.echo("Everyone who reaches this port can read and write this process's memory.", err=True)
        server.wait()
    except KeyboardInterrupt as stop:
        # llama.cpp's server cannot be stopped: its threads must not meet the destructors of an ordinary exit
        os._exit(interrupted_code(stop))


def _endpoint(listen: str, *, insecure: bool) -> tuple[str, int]:
    """Host and port of --listen. Raises DeviceError unless it is loopback or the user insists."""
    try:
        host, port = parse_host_port(listen)
    except ValueError as error:
        raise DeviceError(f'Cannot listen on "{listen}": {error}.', "Write for instance 127.0.0.1:50052.") from error
    if not insecure and not ipaddress.ip_address(rpc.ipv4_address(host)).is_loopback:
        raise DeviceError(
            f"{host} can be reached from other machines, and llama.cpp's RPC has no authentication: everyone who "
            "connects can read and write this process's memory.",
            "Listen on 127.0.0.1 and use an SSH tunnel, or give --insecure-listen in a network that you trust.",
        )
    return host, port


def _device(name: str) -> str:
    """The device to serve: `name`, or the first GPU, or the CPU. Raises DeviceError for an unknown one."""
    kinds = {device.name: device.kind for device in native.devices() if device.kind not in ("ACCEL", "RPC")}
    if name and name not in kinds:
        raise DeviceError(f"There is no device {name!r} to serve.", f"Choose from: {', '.join(kinds)}.")
    return name or next((gpu for gpu, kind in kinds.items() if kind == "GPU"), "CPU")
