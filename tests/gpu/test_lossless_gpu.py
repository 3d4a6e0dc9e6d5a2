"""Greedy answers with attention on the GPU as well as experts: layers there, ratios, architectures.

On the device that $MOEEDGE_TEST_DEVICE names (run_gpu_checks.sh: CUDA0); skipped without one. The reference is stock
llama.cpp on the CPU, up to near-ties.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.llama import library
from tests.conftest import TinyFactory
from tests.support.hybrid import MANY_EXPERTS, assert_greedy, greedy_answer, hybrid_config, on_cpu
from tests.support.stock import StockContext

pytestmark = pytest.mark.skipif(on_cpu(), reason="needs $MOEEDGE_TEST_DEVICE, a device that holds layers")

MODELS = ("qwen3moe", "gpt-oss", "deepseek2", "llama")
LONG = np.random.default_rng(5).integers(0, 256, 40).tolist()  # a prompt whose experts llama.cpp computes on the GPU
SHORT = LONG[:12]
N_PREDICT = 24


@dataclass(frozen=True)
class Reference:
    """A model, and stock's answers to both prompts."""

    path: Path
    stock: StockContext
    answers: dict[int, list[int]]  # by the length of the prompt


@pytest.fixture(scope="module", params=MODELS)
def reference(request: pytest.FixtureRequest, tiny: TinyFactory) -> Iterator[Reference]:
    library.start()
    path = tiny(request.param, experts=MANY_EXPERTS)
    with StockContext(path, n_ctx=512) as stock:
        answers = {len(prompt): stock.greedy(prompt, N_PREDICT)[0] for prompt in (SHORT, LONG)}
        yield Reference(path, stock, answers)


@pytest.mark.parametrize("ratio", [0.0, 0.17, 1.0])
@pytest.mark.parametrize("n_gpu_layers", [1, 99])
def test_attention_on_the_gpu(reference: Reference, tiny_draft: Path, n_gpu_layers: int, ratio: float) -> None:
    """Twice each, while the cache fills and when it is warm, with and without drafts."""
    config = replace(hybrid_config(reference.path, tiny_draft, ratio), n_gpu_layers=n_gpu_layers)
    with Session.open(config) as session:
        for prompt in (SHORT, LONG):
            expected = reference.answers[len(prompt)]
            for gamma in (0, 4, 8, 0):
                session.gamma = gamma
                tokens = greedy_answer(session, prompt, N_PREDICT)
                assert_greedy(reference.stock, prompt, tokens, expected, f"{len(prompt)} tokens, gamma {gamma}")
        stats = session.placement_stats()
        if ratio > 0:
            assert stats is not None and stats.pairs_hit > 0 and not stats.lost
