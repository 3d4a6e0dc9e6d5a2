"""A worker that hangs: llama.cpp's waits get a limit from outside."""

from __future__ import annotations

import socket
import time

import pytest

from moeedge.hardware import rpc


def test_waiting_for_a_worker_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "_HANGING_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        with socket.create_connection(server.getsockname()) as connection:
            rpc.limit_waits(endpoint)
            start_s = time.monotonic()
            with pytest.raises(BlockingIOError):  # EAGAIN, an error to llama.cpp
                connection.recv(1)
            assert 0.5 < time.monotonic() - start_s < 5
    rpc.limit_waits(endpoint)  # no connection: no effect
