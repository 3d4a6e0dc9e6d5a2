"""Shared by tests of devices, memory and processors that this machine does not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.machine import Machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A machine that is described in this test's folder."""
    return Machine(monkeypatch, tmp_path)
