"""Devices of other processes and machines over llama.cpp's RPC: add a worker's device, or serve one of this machine.

llama.cpp ends the process at a worker's unexpected answer, and waits for a busy one where Ctrl-C does not reach. So
every worker is greeted here first, within a time limit, by the protocol of ggml-rpc.cpp: a request is a command byte,
its size and its bytes; an answer is its size and its bytes; all little-endian.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from ctypes import c_char_p, c_size_t, c_void_p
from importlib.metadata import version
from typing import Any, NamedTuple

import psutil

from moeedge.errors import BackendError, DeviceError
from moeedge.hardware.spec import parse_host_port
from moeedge.native.backends import RPC_REGISTRY
from moeedge.native.library import ggml_function

_PROTOCOL = (7, 0)  # RPC_PROTO_MAJOR_VERSION and _MINOR_VERSION of the llama.cpp that moeedge is compiled for
_GET_DEVICE_MEMORY, _HELLO, _DEVICE_COUNT = 11, 14, 15  # enum rpc_cmd
_CAPABILITIES = bytes(24)  # of the connection: plain TCP
_CONNECT_S, _ANSWER_S = 3.0, 5.0
_HANGING_S = 30  # without a byte; requests that queue after uploads over a slow link are answered sooner
_START_S = 30.0  # a GPU may take long to initialise

_lock = threading.Lock()
_spellings: dict[str, str] = {}  # endpoint -> its latest spelling in llama.cpp
_lost: set[str] = set()  # endpoints whose last connection is dead


class Worker(NamedTuple):
    """A worker's answer about the first device that it serves."""

    n_devices: int
    free_bytes: int
    total_bytes: int


def is_built_in() -> bool:
    return bool(_registry())


def check_built_in() -> None:
    """Raises BackendError, with the build option as hint, if llama.cpp has no RPC."""
    if not is_built_in():
        raise BackendError("The installed llama.cpp was built without RPC.", f"Install it with RPC: {build_command()}")


def build_command(option: str = "-DGGML_RPC=on") -> str:
    """Returns the command that installs llama.cpp with a build option; pip's wheel cache ignores CMAKE_ARGS."""
    install = "pip install --no-cache-dir --force-reinstall --no-deps"
    return f'CMAKE_ARGS="{option}" {install} llama-cpp-python=={version("llama-cpp-python")}'


def greet(endpoint: str) -> Worker:
    """Asks the worker at HOST:PORT for its devices, within seconds. Raises DeviceError without a valid answer."""
    host, port = parse_host_port(endpoint)
    try:
        connection = socket.create_connection((host, port), timeout=_CONNECT_S)
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
        hint = f"Start one on that machine: moeedge worker --listen {endpoint}"
        raise DeviceError(f"No worker at rpc://{endpoint} ({reason}).", hint) from error
    with connection:
        connection.settimeout(_ANSWER_S)
        try:
            major, minor = _ask(connection, _HELLO, _CAPABILITIES, f"<BB{2 + len(_CAPABILITIES)}x")
            if major != _PROTOCOL[0] or minor > _PROTOCOL[1]:
                raise DeviceError(
                    f"The worker at rpc://{endpoint} speaks RPC {major}.{minor}, llama.cpp here {_PROTOCOL[0]}.x.",
                    f"Run moeedge with llama-cpp-python {version('llama-cpp-python')} on both sides.",
                )
            (n_devices,) = _ask(connection, _DEVICE_COUNT, b"", "<I")
            free, total = _ask(connection, _GET_DEVICE_MEMORY, struct.pack("<I", 0), "<QQ")
        except TimeoutError as error:
            hint = "End the other session, or start a second worker on another port: each serves one session."
            raise DeviceError(f"The worker at rpc://{endpoint} is busy with another session.", hint) from error
        except (OSError, struct.error) as error:
            hint = "Check the port; moeedge worker prints it."
            raise DeviceError(f"The server at {endpoint} is not a moeedge worker.", hint) from error
    return Worker(n_devices, free, total)


def _ask(connection: socket.socket, command: int, request: bytes, form: str) -> tuple[int, ...]:
    """Sends one request and returns its answer, of a form for `struct`; raises struct.error for any other answer."""
    connection.sendall(struct.pack("<BQ", command, len(request)) + request)
    with connection.makefile("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        if size != struct.calcsize(form):
            raise struct.error
        return struct.unpack(form, stream.read(size))


def add_worker(endpoint: str) -> tuple[str, Worker | None]:
    """Registers the worker's first device with llama.cpp; returns its name there and the worker's answer.

    The answer is None if another session of this process uses the worker, which answers no second greeting. Raises
    BackendError without RPC, DeviceError for a worker that cannot be used.
    """
    check_built_in()
    is_shared = bool(_connections(endpoint)) and endpoint not in _lost
    worker = None if is_shared else greet(endpoint)
    with _lock:
        spelling = _spellings.get(endpoint, endpoint)
        if endpoint in _spellings and not is_shared:
            # llama.cpp keeps one connection per spelling of the endpoint and uses it even after it died; one more zero
            # before the port makes a new spelling
            host, port = spelling.rsplit(":", 1)
            spelling = f"{host}:0{port}"
        _spellings[endpoint] = spelling
        _lost.discard(endpoint)
        registry = _procedure("ggml_backend_rpc_add_server", c_void_p, c_char_p)(spelling.encode())
        if not registry:
            raise DeviceError(f"The worker at rpc://{endpoint} serves no device.", "Start it again with --device NAME.")
        ggml_function("ggml_backend_register", None, c_void_p)(registry)
    device = ggml_function("ggml_backend_reg_dev_get", c_void_p, c_void_p, c_size_t)(registry, 0)
    name: bytes = ggml_function("ggml_backend_dev_name", c_char_p, c_void_p)(device)
    return name.decode(), worker


def mark_lost(endpoint: str) -> None:
    """Makes the next session of this process open a new connection to a worker that was lost."""
    with _lock:
        _lost.add(endpoint)


def limit_waits(endpoint: str) -> None:
    """Sets a time limit on llama.cpp's connections to the worker, after which a hanging worker counts as lost."""
    limit = struct.pack("@ll", _HANGING_S, 0)  # struct timeval
    for fd in _connections(endpoint):
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _connections(endpoint: str) -> list[int]:
    """Returns the file descriptors of this process's connections to the endpoint."""
    host, port = parse_host_port(endpoint)
    try:
        address = socket.gethostbyname(host)
        connections = psutil.Process().net_connections(kind="tcp4")
    except (OSError, psutil.Error):
        return []
    return [c.fd for c in connections if c.raddr == (address, port) and c.status == psutil.CONN_ESTABLISHED]


def _registry() -> Any:
    return ggml_function("ggml_backend_reg_by_name", c_void_p, c_char_p)(RPC_REGISTRY.encode())


def _procedure(name: str, result: Any, *arguments: Any) -> Any:
    """Returns a function that the RPC backend exports by name."""
    find = ggml_function("ggml_backend_reg_get_proc_address", c_void_p, c_void_p, c_char_p)
    address = find(_registry(), name.encode())
    if not address:
        raise BackendError(f"llama.cpp's RPC lacks {name}.", "Install moeedge again.")
    return ctypes.CFUNCTYPE(result, *arguments)(address)


class Server:
    """llama.cpp's RPC server for one device, on its own thread, until the process ends. n_threads: on the CPU only."""

    def __init__(self, device: str, host: str, port: int, n_threads: int) -> None:
        check_built_in()
        self.endpoint = f"{host}:{port}"
        devices = (c_void_p * 1)(ggml_function("ggml_backend_dev_by_name", c_void_p, c_char_p)(device.encode()))
        kinds = (c_char_p, c_char_p, c_size_t, c_size_t, ctypes.POINTER(c_void_p))
        start = _procedure("ggml_backend_rpc_start_server", None, *kinds)
        arguments = (self.endpoint.encode(), None, n_threads, 1, devices)
        self._thread = threading.Thread(target=start, args=arguments, name="moeedge-worker", daemon=True)
        self._thread.start()

    def wait_until_ready(self) -> Worker:
        """Returns the server's answer to a greeting. Raises BackendError if it stops or does not answer."""
        deadline = time.monotonic() + _START_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:
                return greet(self.endpoint)
            except DeviceError:
                time.sleep(0.02)
        raise BackendError(f"llama.cpp cannot serve at {self.endpoint}.", "--verbose shows its messages.")

    def wait(self) -> None:
        """Blocks while the server runs, and lets signals be handled. Raises BackendError when it stops."""
        while self._thread.is_alive():
            self._thread.join(timeout=0.2)
        raise BackendError(f"llama.cpp no longer serves at {self.endpoint}.", "--verbose shows its messages.")


def reserve_port(host: str, port: int) -> tuple[str, int]:
    """Returns the IPv4 address and a free port, `port` unless it is 0. Raises DeviceError if the port is taken."""
    address = ipv4_address(host)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as llama.cpp does
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError as error:
            text = f"Cannot listen on {host}:{port} ({(error.strerror or str(error)).lower()})."
            raise DeviceError(text, "Give another port, or 0 for any.") from error
        return address, probe.getsockname()[1]


def ipv4_address(host: str) -> str:
    """Returns the address of a host. Raises DeviceError for an unknown one."""
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError) as error:
        raise DeviceError(f"Unknown host '{host}'.", "Give an IPv4 address of this machine.") from error
