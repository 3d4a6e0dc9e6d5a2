"""What the tests of the commands share: models, and an environment that keeps the user's own files out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import TinyFactory


@pytest.fixture
def pair(tiny: TinyFactory) -> list[str]:
    """Options that name a tiny target and its draft, one thread and a short context."""
    return ["-m", str(tiny("qwen3moe")), "-md", str(tiny("qwen3")), "-t", "1", "-c", "512"]


@pytest.fixture(autouse=True)
def cache(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own, and no settings of colours or width."""
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return cache_folder
