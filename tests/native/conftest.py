"""The native library, attached, and a file of experts."""

from __future__ import annotations

import pytest

from moeedge import native
from tests.support.experts import ExpertFile, write_experts


@pytest.fixture(scope="session", autouse=True)
def attached() -> None:
    native.attach()


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> ExpertFile:
    """4 layers of 8 experts, all alike; no test changes it."""
    return write_experts(tmp_path_factory.mktemp("experts") / "experts.bin")
