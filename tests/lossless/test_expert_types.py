"""Experts of rare kinds with half of them on a device: they are computed there, and greedy answers equal stock's.

On the emulated device or the one that $MOEEDGE_TEST_DEVICE names, and with attention on the counting device, which gets
its share in every way.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.llama import library
from moeedge.native.abi import DevicePath
from tests.conftest import TinyFactory
from tests.support.counting import DEVICE, CountingDevice
from tests.support.hybrid import assert_greedy, greedy_answer, hybrid_config
from tests.support.stock import StockContext

PROMPT = list(range(40, 60))
N_PREDICT = 24


KINDS = pytest.mark.parametrize(
    "dims",
    [
        pytest.param({"expert_scales": True}, id="a factor per expert"),
        pytest.param(
            {"expert_type": "IQ1_M", "embd": 256, "expert_ff": 256, "layers": 2},
            id="IQ1_M",
            marks=pytest.mark.slow,  # the quantization takes many seconds
        ),
    ],
)


@KINDS
def test_greedy_equals_stock(dims: dict[str, Any], tiny: TinyFactory) -> None:
    path = tiny("qwen3moe", **dims)
    check(path, hybrid_config(path, "ngram", 0.5, gamma=8, policy="lru"))


@KINDS
@pytest.mark.parametrize("device_path", list(DevicePath))
def test_beside_a_gpu(
    device_path: DevicePath, dims: dict[str, Any], tiny: TinyFactory, counting: CountingDevice
) -> None:
    path = tiny("qwen3moe", **dims)
    config = hybrid_config(path, "ngram", 0.5, gamma=8, policy="lru", device=DEVICE, device_path=device_path)
    with counting.late():
        check(path, replace(config, n_gpu_layers=99))


def check(path: Path, config: EngineConfig) -> None:
    """Two answers are stock's, in part by the device, which takes all blocks."""
    library.start()
    with StockContext(path) as stock:
        expected, _ = stock.greedy(PROMPT, N_PREDICT)
        with Session.open(config) as session:
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
