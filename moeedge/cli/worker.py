"""`moeedge worker`: serve a device of this machine to moeedge on another one."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from typing import Annotated

import typer

from moeedge.cli import options
from moeedge.cli.common import EXIT_INTERRUPTED, EXIT_TERMINATED, Terminated, show_log
from moeedge.cli.declare import derive
from moeedge.cli.engine_options import limit_openmp_spin
from moeedge.errors import DeviceError, InputError
from moeedge.hardware.spec import MAX_N_THREADS, RPC_SCHEME, parse_host_port
from moeedge.units import format_bytes

DEFAULT_LISTEN = "127.0.0.1:50052"  # llama.cpp's own port for RPC

Listen = Annotated[
    str, typer.Option("--listen", metavar="HOST:PORT", help="Address to listen on; port 0 picks a free one.")
]
InsecureListen = Annotated[
    bool,
    typer.Option(
        "--insecure-listen",
        help="Allow addresses other than loopback. The protocol has no authentication: everyone who can connect can "
        "read and write this process's memory. Use it only in a network that you trust.",
    ),
]
Served = Annotated[
    str, derive(options.Device, metavar="NAME", help="Device to serve. Default: the first GPU, otherwise the CPU.")
]


def worker(
    listen: Listen = DEFAULT_LISTEN,
    device: Served = "",
    backend: options.Backend = None,
    threads: options.Threads = 0,
    insecure_listen: InsecureListen = False,
    verbose: options.Verbose = False,
) -> None:
    """Lend a device of this machine, such as its GPU, to moeedge on another one.

    On the other machine, -dev rpc://HOST:PORT places experts on it. The worker runs until Ctrl-C and serves one chat
    or measurement at a time. Anyone who reaches the port can use it: see --insecure-listen.
    """
    limit_openmp_spin(RPC_SCHEME)  # the other side may run on this machine
    from moeedge.engine.context_choice import thread_notes
    from moeedge.hardware import rpc
    from moeedge.llama import library

    if not 0 <= threads <= MAX_N_THREADS:
        raise InputError(
            f"--threads must be from 0 to {MAX_N_THREADS}, not {threads}.", "0 takes one per physical core."
        )
    if verbose:
        show_log()
    library.start()
    rpc.check_built_in()
    served = _device(device)
    for note in thread_notes(threads):
        typer.echo(note, err=True)
    address, port = rpc.reserve_port(*_endpoint(listen, insecure=insecure_listen))
    out = _own_stdout(quiet=not verbose)
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
        os._exit(EXIT_TERMINATED if isinstance(stop, Terminated) else EXIT_INTERRUPTED)


def _endpoint(listen: str, *, insecure: bool) -> tuple[str, int]:
    """Host and port of --listen. Raises DeviceError unless it is loopback or the user insists."""
    from moeedge.hardware import rpc

    try:
        host, port = parse_host_port(listen)
    except ValueError as error:
        raise DeviceError(f'Cannot listen on "{listen}": {error}.', f"Write for instance {DEFAULT_LISTEN}.") from error
    if not insecure and not ipaddress.ip_address(rpc.ipv4_address(host)).is_loopback:
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
    return name or next((known for known, kind in kinds.items() if kind == "GPU"), "CPU")


def _own_stdout(*, quiet: bool) -> int:
    """A copy of standard output for the line above; llama.cpp's own lines there go elsewhere from now on."""
    sys.stdout.flush()
    own = os.dup(1)
    target = os.open(os.devnull, os.O_WRONLY) if quiet else os.dup(2)
    os.dup2(target, 1)
    os.close(target)
    return own
