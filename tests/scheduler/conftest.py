"""Shared by the tests of sessions with a cache: models, stock's answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.stock import StockContext

PROMPT = np.random.default_rng(5).integers(0, 256, 24).tolist()
N_PREDICT = 40


@pytest.fixture(scope="session")
def pair(tiny_moe: Path, tiny_draft: Path) -> tuple[Path, Path]:
    return tiny_moe, tiny_draft


@pytest.fixture(scope="session")
def reference(tiny_moe: Path) -> list[int]:
    """Stock's greedy answer to PROMPT."""
    with StockContext(tiny_moe) as stock:
        return stock.greedy(PROMPT, N_PREDICT)[0]
