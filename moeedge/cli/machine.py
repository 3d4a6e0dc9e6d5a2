"""`moeedge devices`, `doctor`, `ps` and `worker`: this machine, what runs on it, and what it lends."""

from __future__ import annotations

import typer

from moeedge.cli.common import EXIT_FAILURE, emit
from moeedge.cli.engine_options import limit_openmp_spin
from moeedge.cli.options import Output, declare, flatten
from moeedge.hardware.spec import MAX_N_THREADS, RPC_SCHEME
from moeedge.health.running import list_running
from moeedge.ui.tables import records_json

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
    from moeedge.cli import machine_run

    machine_run.show_devices(output)


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
    limit_openmp_spin(RPC_SCHEME)  # the other side may run on this machine
    from moeedge.cli import machine_run

    machine_run.serve(listen, device, threads, insecure=insecure_listen, verbose=verbose)
