"""Shared by the tests of interrupted computations."""

from __future__ import annotations

import pytest

from moeedge.native import compute as decoding


@pytest.fixture
def asks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes ask before each operation but the first whether to stop, instead of every 50 ms."""
    monkeypatch.setattr(decoding, "STOP_INTERVAL_S", 0)
