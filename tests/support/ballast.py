"""Memory that another process holds, so that less is left for the program under test."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

# grows and shrinks to the sizes on its standard input; written to, so that the memory is really taken
_PROGRAM = """
import ctypes, mmap, sys
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
    print(len(pieces) * piece, flush=True)
"""


class Ballast:
    """Holds `n_bytes`, locked where the limit allows, until it is left."""

    def __init__(self, n_bytes: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.hold(n_bytes)

    def hold(self, n_bytes: int) -> None:
        """Grows or shrinks to about so many bytes, and returns when it has."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{n_bytes}\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise MemoryError("the ballast has ended")

    def __enter__(self) -> Ballast:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
