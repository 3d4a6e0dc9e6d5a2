"""Memory that another process holds, so that less is left for the program under test."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

# grows and shrinks to the sizes on its standard input, by pieces, so that what it takes is really taken
_PROGRAM = """
import ctypes, mmap, sys, time
libc = ctypes.CDLL(None, use_errno=True)
pieces, piece = [], 64 << 20
for line in sys.stdin:
    n = int(line) // piece
    while len(pieces) > n:
        pieces.pop().close()
    while len(pieces) < n:
        memory = mmap.mmap(-1, piece, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.write(b"\\1" * piece)
        libc.mlock(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory))), ctypes.c_size_t(piece))
        pieces.append(memory)
        time.sleep(float(sys.argv[1]))
    print(len(pieces) * piece, flush=True)
"""


class Ballast:
    """Holds `n_bytes`, locked where the limit allows, until it is left.

    pause_s: after each 64 MiB that are taken; a program that starts takes its memory over seconds.
    """

    def __init__(self, n_bytes: int = 0, *, pause_s: float = 0.0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(pause_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._set(n_bytes)

    def ask(self, n_bytes: int) -> None:
        """Begins to grow or shrink to so many bytes; `wait` tells when it has."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{n_bytes}\n")
        self._process.stdin.flush()

    def wait(self) -> int:
        """Waits for one `ask`, and returns the bytes held."""
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def _set(self, n_bytes: int) -> None:
        self.ask(n_bytes)
        self.wait()

    def __enter__(self) -> Ballast:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
