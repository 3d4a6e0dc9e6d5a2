"""The counting device in this process: compiled on demand, registered with ggml, read as arrays.

tests/native/counting_device/counting-device.h says what it is; a test module takes it by the fixture `counting`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from moeedge.native.library import ggml_function, keep_activations_near

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "tests" / "native" / "counting_device"
DEVICE = "COUNTING0"
_FLAGS = ["-std=c++17", "-O1", "-g", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"]
_WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Wno-sign-conversion", "-Werror"]


class Kind(IntEnum):
    """enum counting_kind."""

    SET = 0
    SET_ASYNC = 1
    GET = 2
    GET_ASYNC = 3
    COPY = 4
    COPY_ASYNC = 5
    CLEAR = 6
    SYNC = 7
    EVENT_RECORD = 8
    EVENT_WAIT = 9
    EVENT_SYNC = 10
    GRAPH = 11
    ALLOC = 12
    FREE = 13


class Flag(IntFlag):
    """enum counting_flags."""

    WAITS = 1
    ROUND_TRIP = 2
    PINNED = 4
    FAILED = 8


RECORD = np.dtype(  # struct counting_record
    [("bytes", "i8"), ("kind", "i4"), ("flags", "i4"), ("instance", "i4"), ("n_nodes", "i4"), ("name", "S64")]
)
_DOWN = (Kind.GET, Kind.GET_ASYNC)
_UP = (Kind.SET, Kind.SET_ASYNC)
_NONE = Flag(0)


def _counted(*kinds: Kind, has: Flag = _NONE, lacks: Flag = _NONE, of: str = "") -> float:
    """How many records are of these kinds, by default of any, with these flags; of: the sum of a field of theirs."""
    return cast(float, field(metadata={"kinds": kinds or tuple(Kind), "has": has, "lacks": lacks, "of": of}))


@dataclass(frozen=True)
class Counts:
    """What a device was asked to do; the difference of two is what happened between them, or what one does more."""

    launches: float = _counted(Kind.GRAPH)  # of graphs
    nodes: float = _counted(of="n_nodes")  # in them, without views
    waits: float = _counted(has=Flag.WAITS)  # calls in which the host cannot go on before the device has done something
    round_trips: float = _counted(has=Flag.ROUND_TRIP)  # of them those that end with a launch newly known to be done
    # of an instance, or of an event by the host; also those that find nothing to wait for
    syncs: float = _counted(Kind.SYNC, Kind.EVENT_SYNC)
    sets: float = _counted(Kind.SET)  # blocking, host to device
    gets: float = _counted(Kind.GET)  # blocking, device to host
    sets_async: float = _counted(Kind.SET_ASYNC)
    gets_async: float = _counted(Kind.GET_ASYNC)
    copies: float = _counted(Kind.COPY, Kind.COPY_ASYNC)  # device to device, blocking or not
    event_records: float = _counted(Kind.EVENT_RECORD)
    event_waits: float = _counted(Kind.EVENT_WAIT)  # of one queue for another
    bytes_up: float = _counted(*_UP, of="bytes")  # host to device
    bytes_down: float = _counted(*_DOWN, of="bytes")
    # of both, where the host's memory is not pinned
    bytes_pageable: float = _counted(*_UP, *_DOWN, lacks=Flag.PINNED, of="bytes")
    bytes_copied: float = _counted(Kind.COPY, Kind.COPY_ASYNC, of="bytes")  # device to device

    def __sub__(self, other: Counts) -> Counts:
        return Counts(**{name: value - getattr(other, name) for name, value in asdict(self).items()})

    def __truediv__(self, number: float) -> Counts:
        return Counts(**{name: value / number for name, value in asdict(self).items()})


def count(timeline: NDArray[np.void]) -> Counts:
    """The counts of a timeline, or of a part of it."""
    flags, found = timeline["flags"], {}
    for each in fields(Counts):
        has, lacks, of = (each.metadata[name] for name in ("has", "lacks", "of"))
        chosen = timeline[np.isin(timeline["kind"], each.metadata["kinds"]) & (flags & (has | lacks) == has)]
        found[each.name] = int(chosen[of].sum()) if of else len(chosen)
    return Counts(**found)


class Unavailable(Exception):
    """There is no compiler, or no headers, to compile the device with."""


class CountingDevice:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._registry = ggml_function("ggml_backend_load", ctypes.c_void_p, ctypes.c_char_p)(str(path).encode())
        assert self._registry, f"ggml cannot load {path}"
        self._library = ctypes.CDLL(str(path))
        self._library.counting_set.argtypes = [ctypes.c_char_p, ctypes.c_int64]
        self._library.counting_timeline.restype = ctypes.c_int64
        self._library.counting_timeline.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._library.counting_hazards.restype = ctypes.c_int64
        self._library.counting_hazard.restype = ctypes.c_char_p
        self._library.counting_hazard.argtypes = [ctypes.c_int64]
        self._library.counting_allocated.restype = ctypes.c_int64

    def unregister(self) -> None:
        """Takes the device from ggml's list, and its pinned memory from later contexts; those on it must be closed."""
        keep_activations_near(None)
        ggml_function("ggml_backend_unload", None, ctypes.c_void_p)(self._registry)

    def set(self, name: str, value: int) -> None:
        """Changes a setting of counting-device.h."""
        assert self._library.counting_set(name.encode(), value) == 0, f"the device has no setting {name}"

    @contextmanager
    def late(self) -> Iterator[None]:
        """Nothing that is queued is executed before the host waits for it; ends with a check for hazards."""
        self.reset()
        self.set("defer", 1)
        try:
            yield
        finally:
            self.set("defer", 0)
        self.check()

    @contextmanager
    def failing(self, at_graph: int, mode: int = 0) -> Iterator[None]:
        """The `at_graph`-th graph from now on fails, in the way `fail_mode` of counting-device.h."""
        self.set("fail_mode", mode)
        self.set("fail_graph", at_graph)
        try:
            yield
        finally:
            self.set("fail_graph", 0)
            self.set("fail_mode", 0)

    def reset(self) -> None:
        """Drops the timeline and the hazards."""
        self._library.counting_reset()

    def timeline(self) -> NDArray[np.void]:
        """Everything since the last reset: RECORD [n]."""
        n = self._library.counting_timeline(None, 0)
        records = np.zeros(n, RECORD)
        assert self._library.counting_timeline(records.ctypes.data, n) >= n
        return records

    def hazards(self) -> list[str]:
        """Operations that touched the same bytes without an order between them."""
        n = self._library.counting_hazards()
        texts = (self._library.counting_hazard(i) for i in range(n))
        return [text.decode() for text in texts if text is not None]

    def check(self) -> None:
        """Raises AssertionError with the hazards, if there are any."""
        hazards = self.hazards()
        assert not hazards, "\n".join(hazards[:8])

    @property
    def allocated_bytes(self) -> int:
        """Device memory in use."""
        return int(self._library.counting_allocated())


def compile_device() -> Path:
    """The compiled library, from build/ if its sources have not changed. Raises Unavailable without a compiler."""
    compiler = shutil.which("c++")
    if compiler is None or sys.platform != "linux":
        raise Unavailable("the counting device needs Linux and a C++ compiler")
    headers = _headers()
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir())))
    digest.update((headers / "sha256.txt").read_bytes())
    target = ROOT / "build" / "counting-device" / f"libcounting-{digest.hexdigest()[:16]}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = {source: Path(scratch) / f"{source.stem}.o" for source in sorted(SOURCES.glob("*.cpp"))}
        compile_one = [compiler, *_FLAGS, *_WARNINGS, "-isystem", str(headers), "-c"]
        _run_all([*compile_one, str(source), "-o", str(made)] for source, made in objects.items())
        library = Path(scratch) / target.name
        link = [compiler, *_FLAGS, "-shared", *map(str, objects.values()), "-o", str(library)]
        _run_all([[*link, "-Wl,-z,defs", "-Wl,--no-as-needed", *_wheel_libraries()]])
        library.rename(target)
    return target


def _run_all(commands: Iterable[list[str]]) -> None:
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for process in running:
        _, errors = process.communicate()
        assert process.returncode == 0, errors


def _wheel_libraries() -> list[str]:
    """The ggml of the installed wheel; its sonames are what the loader looks for."""
    import llama_cpp

    folder = Path(llama_cpp.__file__).parent / "lib"
    return [str(folder / "libggml.so.0"), str(folder / "libggml-base.so.0")]


@functools.cache
def _headers() -> Path:
    """ggml's headers: those of a build of this checkout, or fetched as that build fetches them."""
    lists = (ROOT / "moeedge" / "native" / "CMakeLists.txt").read_text()
    version, digest = (
        re.search(rf'set\(MOEEDGE_LLAMA_CPP_PYTHON_{name} "(\w[\w.]*)"', lists)[1]  # type: ignore[index]
        for name in ("VERSION", "SHA256")
    )
    for folder in sorted((ROOT / "build").glob("*/ggml-headers")):
        if (folder / "sha256.txt").read_text() == digest:
            return folder
    folder = ROOT / "build" / "counting-device" / "ggml-headers"
    script = ROOT / "moeedge" / "native" / "cmake" / "fetch_headers.py"
    result = subprocess.run([sys.executable, str(script), version, digest, str(folder)], capture_output=True, text=True)
    if result.returncode != 0:
        raise Unavailable(f"llama.cpp's headers cannot be fetched here: {result.stderr.strip()[:200]}")
    return folder


@contextmanager
def counting_device() -> Iterator[CountingDevice]:
    """The device, registered while the context is open: other tests must not see a GPU."""
    device = CountingDevice(compile_device())
    try:
        yield device
    finally:
        device.unregister()
