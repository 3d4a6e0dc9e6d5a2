"""Shared by tests of vocabularies and templates: a model's header."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moeedge.llama.model import Model


@pytest.fixture(scope="session")
def model(tiny_moe: Path) -> Iterator[Model]:
    """Shape and vocabulary, without weights."""
    with Model.load(tiny_moe, header_only=True) as loaded:
        yield loaded
