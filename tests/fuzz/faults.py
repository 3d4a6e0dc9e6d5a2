"""The n-th large allocation fails, or the n-th read of a model or trace, for every n: an answer, or a sentence.

A preloaded library (fault_shim.c) counts the calls of a command, in a process that this module starts.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_SHIM = Path(__file__).with_name("fault_shim.c")
_LOADED = "MOEEDGE_FAULT_SHIM"  # in the process that has it
CHAT = "chat -dev none -p a -n 4 -c 64 -q"
_CHAT = f"{CHAT} --raw -m {{tiny qwen3moe}}"
COMMANDS = (
    "plan -m {tiny qwen3moe} -md none -dev none -o json",  # loads without weights
    f"{_CHAT} -md none",
    f"{_CHAT} -md {{tiny qwen3}} -o json",
    f"{_CHAT} -md none --ram 1MiB",
    "bench -m {tiny qwen3moe} -md none -dev none -p 16 -n 4 -r 1 -o json",
    "lab replay {trace.npz} --cache-ratio 0.5",
)
ALLOCATIONS, READS = 1, 2
KINDS = {ALLOCATIONS: "allocation", READS: "read"}


def restart_with_shim() -> None:
    """Starts this program anew with the library, unless it has it. Ends the program where no compiler is."""
    if _LOADED in os.environ:
        return
    library = Path(os.environ.get("TMPDIR", "/tmp")) / f"fault_shim-{os.getuid()}.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(_SHIM), "-ldl"], check=True)
    environment = os.environ | {"LD_PRELOAD": str(library), _LOADED: str(library), "GGML_NO_BACKTRACE": "1"}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


class Fault:
    """The failing call of a child process."""

    def __init__(self, kind: int, number: int) -> None:
        self.kind, self.number = kind, number
        self._shared = mmap.mmap(-1, 8)
        self._shared[:] = b"\xff" * 8

    def __str__(self) -> str:
        return f"{KINDS[self.kind]} {self.number}"

    def arm(self) -> None:
        """From now on calls are counted; in the child."""
        ctypes.CDLL(None).fault_arm(self.kind, ctypes.c_long(self.number))

    def note(self) -> None:
        """Notes the count for the parent, and lets all calls succeed."""
        library = ctypes.CDLL(None)
        library.fault_count.restype = ctypes.c_long
        n = library.fault_count()
        library.fault_arm(0, ctypes.c_long(0))
        self._shared[:] = n.to_bytes(8, "little")

    @property
    def was_reached(self) -> bool:
        """Whether there were so many calls; a child that crashed has not said."""
        n = int.from_bytes(self._shared[:], "little", signed=True)
        return n < 0 or n >= self.number


def batches(limit: int) -> list[tuple[int, int]]:
    """A number for each command and kind of call, with the number of calls that fail in turn."""
    return [(number, limit) for number in range(len(COMMANDS) * len(KINDS))]


def faults(number: int, limit: int) -> Iterator[tuple[str, Fault]]:
    """A command with each of its calls of a kind failing, up to `limit`."""
    command, kind = COMMANDS[number // len(KINDS)], [*KINDS][number % len(KINDS)]
    for call in range(1, limit + 1):
        fault = Fault(kind, call)
        yield command, fault
        if not fault.was_reached:
            return
