"""`moeedge worker` in a separate process, on a port that it chooses."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerProcess:
    """A worker that accepts connections."""

    process: subprocess.Popen[str]
    line: str  # its first line of output
    endpoint: str  # HOST:PORT

    @property
    def device(self) -> str:
        """Value for -dev."""
        return f"rpc://{self.endpoint}"


@contextmanager
def start_worker(*arguments: str, listen: str = "127.0.0.1:0") -> Iterator[WorkerProcess]:
    """Serve until the block ends; a worker that exits at once fails the test with its output."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moeedge", "worker", "--listen", listen, "-t", "1", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"-dev rpc://(\S+)$", line)
        assert found is not None, line + process.communicate(timeout=30)[1]
        yield WorkerProcess(process, line, found[1])
    finally:
        process.kill()
        process.communicate()
