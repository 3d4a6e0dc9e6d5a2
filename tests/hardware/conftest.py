"""A worker process on loopback, where the installed llama.cpp has RPC."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moeedge.hardware import rpc
from tests.support.worker import WorkerProcess, start_worker


@pytest.fixture(scope="session")
def needs_rpc() -> None:
    """Skips where llama.cpp was built without RPC."""
    if not rpc.is_built_in():
        pytest.skip("llama.cpp was built without RPC (CMAKE_ARGS=-DGGML_RPC=on)")


@pytest.fixture
def worker(needs_rpc: None) -> Iterator[WorkerProcess]:
    """A worker of this test's own that serves the CPU."""
    with start_worker() as process:
        yield process
