"""`moeedge devices`, `doctor`, `ps` and `worker`: this machine, what runs on it, and what it lends."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys

import typer

from moeedge.cli.common import EXIT_FAILURE, emit, interrupted_code
from moeedge.cli.engine_options import limit_openmp_spin
from moeedge.cli.options import Output, declare, flatten
from moeedge.errors import DeviceError
from moeedge.hardware.spec import MAX_N_THREADS, parse_host_port
from moeedge.health.running import list_running
from moeedge.ui.tables import records_json
from moeedge.units import format_bytes

declare(
    """
    --library  Print the path of moeedge's ggml backend and exit; GGML_BACKEND_PATH=PATH loads it into llama.cpp's own
        programs of the same version.
    """,
    "devices",
)


@flatten
def devices(backend: list[str] | None = None, output: Output = Output.TEXT, library: bool = False) -> None:
    """List the devices that can hold experts (GPUs, other machines), and why others cannot.

    A device is a memory with a processor of its own. The CPU computes the experts that are on no device. A GPU of this
    machine that cannot be used is listed with what it lacks. The emulated device is a part of the CPU that plays a GPU,
    to try everything without one.
    """
    if library:
        from moeedge.native import library_path

        typer.echo(library_path())
        return
    from moeedge.hardware.devices import list_devices
    from moeedge.llama import library as llama
    from moeedge.ui.machine_views import print_devices

    llama.start()
    emit(output, records_json, print_devices, list_devices())


@flatten
def doctor(backend: list[str] | None = None, output: Output = Output.TEXT) -> None:
    """Check the installation and this machine, and say what you should fix.

    Looks at the native library, GPUs, processor, threads, memory, disk, folders and environment variables. Takes a
    second or two, loads no model and downloads nothing. Exit code 1: something is broken.
    """
    from moeedge.cli.reference import llama_variables
    from moeedge.health.doctor import examine
    from moeedge.ui.machine_views import print_report
    from moeedge.ui.tables import record_json

    report = examine(llama_variables())
    emit(output, record_json, print_report, report)
    if report.is_broken:
        raise typer.Exit(EXIT_FAILURE)


@flatten
def ps(output: Output = Output.TEXT) -> None:
    """List running moeedge processes of this user: their models and the memory that they take.

    A model is loaded as long as its process runs; nothing stays loaded afterwards.
    """
    from moeedge.ui.machine_views import print_running

    emit(output, records_json, print_running, list_running())


declare(
    """
    --threads N  ...
    --device NAME  Device to serve. Default: the first GPU, otherwise the CPU.
    []
    --listen HOST:PORT  Address to listen on; port 0 picks a free one.
    --insecure-listen  Allow addresses other than loopback. The protocol has no authentication: everyone who can connect
        can read and write this process's memory. Use it only in a network that you trust.
    """,
    "worker",
    threads={"least": 0, "most": MAX_N_THREADS},
)


@flatten
def worker(
    listen: str = "127.0.0.1:50052",  # llama.cpp's own port for RPC
    device: str = "",
    backend: list[str] | None = None,
    threads: int = 0,
    insecure_listen: bool = False,
    verbose: bool = False,
) -> None:
    """Lend a device of this machine, such as its GPU, to moeedge on another one.

    On the other machine, -dev rpc://HOST:PORT places experts on it. The worker runs until Ctrl-C and serves one chat
    or measurement at a time. Anyone who reaches the port can use it: see --insecure-listen.
    """
    limit_openmp_spin()  # the other side may run on this machine
    from moeedge.engine.context_choice import thread_notes
    from moeedge.hardware import rpc
    from moeedge.llama import library

    library.start()
    rpc.check_built_in()
    served = _device(device)
    for note in thread_notes(threads):
        typer.echo(note, err=True)
    address, port = rpc.reserve_port(*_endpoint(listen, insecure=insecure_listen))
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
        if insecure_listen:
            typer.echo("Everyone who reaches this port can read and write this process's memory.", err=True)
        server.wait()
    except KeyboardInterrupt as stop:
        # llama.cpp's server cannot be stopped: its threads must not meet the destructors of an ordinary exit
        os._exit(interrupted_code(stop))


def _endpoint(listen: str, *, insecure: bool) -> tuple[str, int]:
    """Host and port of --listen. Raises DeviceError unless it is loopback or the user insists."""
    from moeedge.hardware.rpc import ipv4_address

    try:
        host, port = parse_host_port(listen)
    except ValueError as error:
        raise DeviceError(f'Cannot listen on "{listen}": {error}.', "Write for instance 127.0.0.1:50052.") from error
    if not insecure and not ipaddress.ip_address(ipv4_address(host)).is_loopback:
        raise DeviceError(
            f"{host} can be reached from other machines, and llama.cpp's RPC has no authentication: everyone who "
            "connects can read and write this process's memory.",
            "Listen on 127.0.0.1 and use an SSH tunnel, or give --insecure-listen in a network that you trust.",
        )
    return host, port


def _device(name: str) -> str:
    """The device to serve: `name`, or the first GPU, or the CPU. Raises DeviceError for an unknown one."""
    from moeedge import native

    kinds = {device.name: device.kind for device in native.devices() if device.kind not in ("ACCEL", "RPC")}
    if name and name not in kinds:
        raise DeviceError(f"There is no device {name!r} to serve.", f"Choose from: {', '.join(kinds)}.")
    return name or next((gpu for gpu, kind in kinds.items() if kind == "GPU"), "CPU")
