"""Shared by tests of sessions: a pair of models, stock's answers, and computations that ask often whether to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moeedge.engine.session import Session
from moeedge.llama import library
from moeedge.native import compute as decoding
from tests.support.hybrid import assert_greedy
from tests.support.stock import StockContext

Check = Callable[[Session, list[int], list[int]], None]


@pytest.fixture(scope="session")
def pair(tiny_moe: Path, tiny_draft: Path) -> tuple[Path, Path]:
    """A target, and a draft model of it."""
    return tiny_moe, tiny_draft


@pytest.fixture
def asks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes ask before each operation but the first whether to stop, instead of every 50 ms."""
    monkeypatch.setattr(decoding, "STOP_INTERVAL_S", 0)


@pytest.fixture(scope="module")
def check() -> Iterator[Check]:
    """`check(session, prompt, tokens)`: the answer is the one that stock gives with the session's target."""
    library.start()
    stocks: dict[Path, StockContext] = {}

    def check_tokens(session: Session, prompt: list[int], tokens: list[int]) -> None:
        path = session.config.model
        if path not in stocks:
            stocks[path] = StockContext(path, n_ctx=512)
        assert_greedy(stocks[path], prompt, tokens, stocks[path].answer(prompt, len(tokens)), path.name)

    yield check_tokens
    for stock in stocks.values():
        stock.close()
