"""Answers with the experts split between CPU and device equal stock's: every ratio, draft length, architecture.

Also while experts move at random as fast as possible, so that none is computed half-written, and on the three paths of
large batches (cpu, resident, stream). On the emulated device, or on the one that $MOEEDGE_TEST_DEVICE names (tests/gpu
runs this file on CUDA).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.llama import library
from moeedge.native.abi import PrefillPath
from tests.conftest import TinyFactory
from tests.lossless.conftest import PROMPT, Loaded, each_case
from tests.support.cases import MOE_CASES, RARE_CASES, case_model
from tests.support.experts import assert_balanced
from tests.support.hybrid import (
    GAMMAS,
    MANY_EXPERTS,
    RATIOS,
    AlternatingCache,
    RandomPlans,
    assert_answers,
    assert_greedy,
    hit_stats,
    hybrid_config,
    hybrid_context,
    on_cpu,
    random_prompt,
    stock_on_device,
)
from tests.support.hybrid_driver import churn
from tests.support.stock import StockContext, transcript

N_PREDICT = 64  # more than gpt-oss's sliding window holds together with the prompt


@each_case(
    [*MOE_CASES, *RARE_CASES],
    "ratio",
    RATIOS,
    quick=(0.17,),
    slowly=(1.0,),
    slow=("qwen3moe-mixed", "deepseek2-merged", "gpt-oss-q8"),
)
def test_greedy_equals_stock(ratio: float, loaded: Loaded) -> None:
    """All draft lengths in one session, twice: while the cache fills and when it is warm."""
    config = hybrid_config(loaded.path, loaded.draft_path, ratio)
    with Session.open(config, model=loaded.model, draft_model=loaded.draft) as session:
        for turn in range(2):
            for gamma in GAMMAS:
                session.gamma = gamma
                assert_answers(session, loaded.stock, PROMPT, N_PREDICT, what=f"gamma {gamma}, turn {turn}")
        if ratio == 0:
            stats = session.placement_stats()
            assert stats is None or stats.pairs_hit == 0
            return
        stats = hit_stats(session)
        assert stats.pairs_hit < stats.pairs, "the first tokens come before the first upload"
        assert stats.slots_used <= stats.slots_total


def test_a_slow_link(many: Path, tiny_draft: Path, stock: StockContext) -> None:
    """Transfers that take as long as several blocks: most experts are wanted before they have arrived."""
    with Session.open(hybrid_config(many, tiny_draft, 0.17, device="emulated:link=5MB/s,threads=1")) as session:
        assert_answers(session, stock, PROMPT, N_PREDICT, 3)
        stats = hit_stats(session)
        assert stats.link_bytes_per_s is not None and stats.link_bytes_per_s < 6e6
        assert stats.cancelled > 0, "the link must have been too slow for some plan"


def test_the_bundled_pair(bundled_pair: tuple[Path, Path]) -> None:
    """48 layers of 128 experts, as a new user starts: an answer of some length and a second turn."""
    library.start()
    with StockContext(bundled_pair[0], n_ctx=512) as stock:
        prompt = stock.tokenize("<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n")
        n_predict = len(stock.answer(prompt, 96))
        with Session.open(hybrid_config(*bundled_pair, 0.17)) as session:
            assert_answers(session, stock, prompt, n_predict, 2)
            assert hit_stats(session).evictions > 0


@each_case(MOE_CASES)
def test_a_cache_that_goes_off_and_on(loaded: Loaded) -> None:
    """Within an answer, while experts are on their way; prompts in between."""
    config = hybrid_config(loaded.path, loaded.draft_path, 0.17)
    with Session.open(config, model=loaded.model, draft_model=loaded.draft) as session:
        assert session.placement is not None
        reports: list[str] = []
        session.run.show = reports.append
        session.placement.governor = AlternatingCache()
        assert_answers(session, loaded.stock, PROMPT, N_PREDICT, 3)
        assert hit_stats(session).choice is not None
        assert reports


# while another thread pushes plans that mean nothing, and no scheduler takes part

N_ANSWERS = 30
# the same kernels on both sides, bit-identical; repacked; biases; unlike sizes; gate and up in one tensor
MOVED = ("qwen3moe-f32", "qwen3moe", "gpt-oss", "qwen3moe-mixed", "deepseek2-merged")


@pytest.mark.parametrize(("case", "ratio"), [*((case, 0.17) for case in MOVED), (MOVED[0], 0.5)])
def test_answers_while_experts_move(case: str, ratio: float, tiny: TinyFactory) -> None:
    path = case_model(tiny, case, experts=MANY_EXPERTS)
    library.start()
    with StockContext(path) as stock, hybrid_context(path, ratio) as (context, cache):
        before = cache.stats()
        with churn(cache, seed=7):
            for seed in range(N_ANSWERS):
                prompt = random_prompt(9, seed)
                tokens, _ = context.greedy(prompt, 24)
                assert_greedy(stock, prompt, tokens, stock.answer(prompt, 24), f"answer {seed}")
        cache.drain(10.0)
        assert_balanced(cache)
        stats = cache.stats()
        assert stats.in_flight == stats.pinned == stats.failed == 0  # what is queued may wait for a free slot
        assert stats.slots_used == int((cache.residency() == 1).sum())
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
    with hybrid_context(path, 0.5, n_ubatch=32) as (context, cache), churn(cache, seed=3):
        for _ in range(20):
            assert np.array_equal(transcript(context), expected)
            context.trim(0)


def test_the_test_can_fail(many: Path, tiny: TinyFactory) -> None:
    """Another model's experts on the device give other answers: the device computes with its own copies."""
    prompt = random_prompt(9, 0)
    library.start()
    other = tiny("qwen3moe", experts=MANY_EXPERTS, seed=1)
    with StockContext(many) as stock, hybrid_context(many, 0.5, experts_from=other) as (context, cache):
        RandomPlans(cache, 1).fill()
        tokens, _ = context.greedy(prompt, 24)
        with pytest.raises(AssertionError, match="not greedy"):
            assert_greedy(stock, prompt, tokens, stock.answer(prompt, 24), "other experts")


# paths of large batches

PATHS = (PrefillPath.CPU, PrefillPath.RESIDENT, PrefillPath.STREAM)
LONG_PROMPT = random_prompt(150, 5)  # two graphs of 100 tokens at most, both above the smallest that streams
# relative to the largest logit: repacked kernels on one side only round differently
TOLERANCE = 5e-3 if on_cpu() else 2e-2
# where a router's two candidates tie, rounding may exchange them: a few rows, and not by much
EXCHANGED_ROWS = 0.0 if on_cpu() else 0.05
EXCHANGED_TOLERANCE = 0.2


@pytest.fixture(scope="module", params=MOE_CASES)
def model(request: pytest.FixtureRequest, tiny: TinyFactory) -> Path:
    return case_model(tiny, request.param, experts=MANY_EXPERTS)


@pytest.fixture(scope="module")
def stock_of_case(model: Path) -> Iterator[StockContext]:
    library.start()
    with StockContext(model, n_ubatch=100) as context:
        yield context


@pytest.mark.parametrize(("ratio", "layers_per_pool"), [(0.17, 0), (1.0, 0), (0.5, 1)])
def test_logits_of_every_path(ratio: float, layers_per_pool: int, model: Path, stock_of_case: StockContext) -> None:
    stock_of_case.trim(0)
    expected = stock_of_case.decode(LONG_PROMPT)
    scale = np.abs(expected).max()
    with hybrid_context(model, ratio, n_stage=8, layers_per_pool=layers_per_pool, n_ubatch=100) as (context, cache):
        if layers_per_pool:
            assert cache.info.n_groups == np.count_nonzero(cache.groups()[0] >= 0)
        RandomPlans(cache, 1).fill()
        for path in PATHS:
            cache.set_prefill(path, 33)
            before = cache.stats()
            logits = context.decode(LONG_PROMPT)
            after = cache.stats()
            errors = np.abs(logits - expected).max(axis=1) / scale
            assert (errors >= TOLERANCE).mean() <= EXCHANGED_ROWS, f"{path}: {errors.max():.2g}"
            limit = EXCHANGED_TOLERANCE
            if errors.max() >= limit and not on_cpu():  # as far as stock's own experts on the device
                with stock_on_device(stock_of_case) as other:
                    limit = 2 * np.abs(other.decode(LONG_PROMPT) - expected).max() / scale
            assert errors.max() < limit, f"{path}: {errors.max():.2g}"
            context.trim(0)
            on_device = after.pairs_hit - before.pairs_hit
            assert (on_device > 0) == (path is not PrefillPath.CPU), f"{path}: {on_device} pairs on the device"
