"""Experts of rare kinds with half of them on a device: they are computed there, and greedy answers equal stock's.

On the emulated device, or on the one that $MOEEDGE_TEST_DEVICE names.
"""

from __future__ import annotations

from typing import Any

import pytest

from moeedge.engine.session import Session
from moeedge.llama import library
from tests.conftest import TinyFactory
from tests.support.hybrid import assert_greedy, greedy_answer, hybrid_config
from tests.support.stock import StockContext

PROMPT = list(range(40, 60))
N_PREDICT = 24


@pytest.mark.parametrize(
    "dims",
    [
        pytest.param({"expert_scales": True}, id="a factor per expert"),
        pytest.param({"expert_type": "IQ1_M", "embd": 256, "expert_ff": 256, "layers": 2}, id="IQ1_M"),
    ],
)
def test_greedy_equals_stock(dims: dict[str, Any], tiny: TinyFactory) -> None:
    path = tiny("qwen3moe", **dims)
    library.start()
    with StockContext(path) as stock:
        expected, _ = stock.greedy(PROMPT, N_PREDICT)
        with Session.open(hybrid_config(path, "ngram", 0.5, gamma=8, policy="lru")) as session:
            for turn in range(2):
                tokens = greedy_answer(session, PROMPT, N_PREDICT)
                assert_greedy(stock, PROMPT, tokens, expected, f"turn {turn}")
            stats = session.placement_stats()
    assert stats is not None
    assert stats.blocks_unknown == 0
    assert stats.pairs_hit > 0


def test_the_factors_count(tiny: TinyFactory) -> None:
    """llama.cpp reads them: without them the answer is another one."""
    library.start()
    answers = []
    for dims in ({}, {"expert_scales": True}):
        with StockContext(tiny("qwen3moe", **dims)) as stock:
            answers.append(stock.greedy(PROMPT, N_PREDICT)[0])
    assert answers[0] != answers[1]
