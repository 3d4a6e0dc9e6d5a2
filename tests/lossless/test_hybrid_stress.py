"""Experts moved at random as fast as possible while greedy answers are compared: none is computed half-written.

No scheduler takes part: another thread pushes plans that mean nothing, so that experts come and go under every block.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeedge.llama import library
from moeedge.native.cache import ExpertCache
from tests.conftest import TinyFactory
from tests.support.hybrid import MANY_EXPERTS, RandomPlans, assert_greedy, hybrid_context, on_cpu, random_prompt
from tests.support.hybrid_driver import churn
from tests.support.stock import StockContext, transcript

N_ANSWERS = 30
N_PREDICT = 24
MODELS = {
    "plain": ("qwen3moe", {"expert_type": "F32"}),  # the same kernels on both sides: bit-identical
    "repacked": ("qwen3moe", {}),
    "biases": ("gpt-oss", {}),
    "unlike": ("qwen3moe", {"odd_down_type": "Q8_0"}),
    "merged": ("deepseek2", {"merged": True}),
}


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        pytest.param(name, ratio, marks=pytest.mark.slow if ratio > 0.17 and name != "plain" else ())
        for name in MODELS
        for ratio in (0.17, 0.5)
    ],
)
def test_answers_while_experts_move(name: str, ratio: float, tiny: TinyFactory) -> None:
    arch, dimensions = MODELS[name]
    path = tiny(arch, **(dimensions | {"experts": MANY_EXPERTS}))
    library.start()
    with StockContext(path) as stock, hybrid_context(path, ratio) as (context, cache):
        before = cache.stats()
        with churn(cache, seed=7):
            for seed in range(N_ANSWERS):
                prompt = random_prompt(9, seed)
                expected, _ = stock.greedy(prompt, N_PREDICT)
                tokens, _ = context.greedy(prompt, N_PREDICT)
                assert_greedy(stock, prompt, tokens, expected, f"answer {seed}")
        cache.drain(10.0)
        assert_balanced(cache)
        stats = cache.stats()
        # on the way every layer's experts changed several times over; a GPU that others use is slower
        assert stats.uploads - before.uploads > (N_ANSWERS if on_cpu() else 4) * MANY_EXPERTS
        assert stats.evictions > before.evictions
        assert 0 < stats.pairs_hit < stats.pairs


@pytest.mark.skipif(not on_cpu(), reason="a GPU rounds differently")
def test_batches_are_bit_identical_while_experts_move(tiny: TinyFactory) -> None:
    """With plain kernels on both sides nothing rounds differently: single tokens, verifications, prefill."""
    path = tiny("qwen3moe", experts=MANY_EXPERTS, expert_type="F32")
    with hybrid_context(path, 0.5, n_ubatch=32) as (context, cache):
        cache.detach()
        expected = transcript(context)
        context.trim(0)
    with hybrid_context(path, 0.5, n_ubatch=32) as (context, cache), churn(cache, seed=3):
        for _ in range(20):
            assert np.array_equal(transcript(context), expected)
            context.trim(0)


def test_the_test_can_fail(tiny: TinyFactory) -> None:
    """Another model's experts on the device give other answers: the device computes with its own copies."""
    path, other = (tiny("qwen3moe", experts=MANY_EXPERTS, seed=seed) for seed in (0, 1))
    prompt = random_prompt(9, 0)
    library.start()
    with StockContext(path) as stock, hybrid_context(path, 0.5, experts_from=other) as (context, cache):
        RandomPlans(cache, 1).fill()
        expected, _ = stock.greedy(prompt, N_PREDICT)
        tokens, _ = context.greedy(prompt, N_PREDICT)
        with pytest.raises(AssertionError, match="not greedy"):
            assert_greedy(stock, prompt, tokens, expected, "other experts")


def assert_balanced(cache: ExpertCache) -> None:
    """What came and did not leave is what the residency table shows and what occupies slots."""
    stats = cache.stats()
    resident = int((cache.residency() == 1).sum())
    assert stats.in_flight == stats.pinned == 0  # what is queued may wait for a free slot
    assert stats.failed == 0
    assert stats.uploads - stats.evictions == stats.slots_used == resident


def test_counters_balance_after_clear(tiny: TinyFactory) -> None:
    path: Path = tiny("qwen3moe", experts=MANY_EXPERTS)
    with hybrid_context(path, 0.5) as (context, cache):
        for seed in range(3):
            RandomPlans(cache, seed).fill()
            transcript(context)
            context.trim(0)
            assert_balanced(cache)
            assert cache.stats().slots_used == cache.info.n_slots
            cache.clear()
            assert_balanced(cache)
            assert cache.stats().slots_used == 0
