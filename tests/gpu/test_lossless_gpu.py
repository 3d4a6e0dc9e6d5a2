"""Greedy answers with attention on the GPU as well as experts: layers there, ratios, architectures.

On the device that $MOEEDGE_TEST_DEVICE names (run_gpu_checks.sh: CUDA0); skipped without one. The reference is stock
llama.cpp on the CPU, up to near-ties.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.llama import library
from tests.conftest import TinyFactory
from tests.support.hybrid import MANY_EXPERTS, assert_answers, hybrid_config, on_cpu
from tests.support.stock import StockContext

pytestmark = pytest.mark.skipif(on_cpu(), reason="needs $MOEEDGE_TEST_DEVICE, a device that holds layers")

LONG = np.random.default_rng(5).integers(0, 256, 40).tolist()  # a prompt whose experts llama.cpp computes on the GPU


@pytest.fixture(scope="module", params=("qwen3moe", "gpt-oss", "deepseek2", "llama"))
def stock(request: pytest.FixtureRequest, tiny: TinyFactory) -> Iterator[StockContext]:
    library.start()
    with StockContext(tiny(request.param, experts=MANY_EXPERTS), n_ctx=512) as context:
        yield context


@pytest.mark.parametrize("ratio", [0.0, 0.17, 1.0])
@pytest.mark.parametrize("n_gpu_layers", [1, 99])
def test_attention_on_the_gpu(stock: StockContext, tiny_draft: Path, n_gpu_layers: int, ratio: float) -> None:
    """Twice each, while the cache fills and when it is warm, with and without drafts."""
    config = replace(hybrid_config(stock.path, tiny_draft, ratio), n_gpu_layers=n_gpu_layers)
    with Session.open(config) as session:
        for prompt in (LONG[:12], LONG):
            for gamma in (0, 4, 8, 0):
                session.gamma = gamma
                assert_answers(session, stock, prompt, 24, what=f"{len(prompt)} tokens, gamma {gamma}")
        stats = session.placement_stats()
        if ratio > 0:
            assert stats is not None and stats.pairs_hit > 0 and not stats.lost
