"""K-quants: a batch has stock's bits, wherever its experts are, whenever a read arrives, and however it is cut.

ggml rounds an expert with eight or more columns in a batch otherwise than one with fewer: these batches have both, and
one so large that a device gets it in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.native.abi import Phase, PrefillPath
from moeedge.policies.expert_budget import Coverage, ExpertBudget
from tests.conftest import TinyFactory
from tests.support.cases import K_QUANTS, case_model
from tests.support.hybrid import RandomPlans, hybrid_context
from tests.support.ram_driver import ram_context
from tests.support.stock import StockContext

# tokens of a batch; the last ones are more pairs than a device takes at once, and end in other places of an expert's
SIZES = (1, 2, 7, 8, 9, 17, 24, 32, 40, 48, 150, 530, 560, 600)
LAYOUT = {"n_ctx": 1024, "n_threads": 2, "n_batch": 640, "n_ubatch": 640}
TOKENS = np.random.default_rng(5).integers(0, 256, max(SIZES)).tolist()

Logits = NDArray[np.float32]
Decode = Callable[[int], Logits]  # logits of the first so many tokens, from an empty KV cache


@dataclass
class Case:
    """A model, and stock's logits with the weights as they are in the file. The slow types decode all sizes thrice."""

    path: Path
    expected: Decode
    sizes: tuple[int, ...]
    ratios: tuple[float, ...]
    n_repeats: int

    def check(self, decode: Decode) -> None:
        for n_tokens in self.sizes * self.n_repeats:
            rows = (decode(n_tokens) != self.expected(n_tokens)).any(axis=1)
            assert not rows.any(), f"{n_tokens} tokens: {np.count_nonzero(rows)} rows differ"


@pytest.fixture(scope="module", params=K_QUANTS)
def case(request: pytest.FixtureRequest, tiny: TinyFactory) -> Iterator[Case]:
    path, known = case_model(tiny, request.param), dict[int, Logits]()
    with StockContext(path, repack=False, **LAYOUT) as stock:

        def decode(n_tokens: int) -> Logits:
            if n_tokens not in known:
                stock.trim(0)
                known[n_tokens] = stock.decode(TOKENS[:n_tokens])
            return known[n_tokens]

        if request.param == K_QUANTS[0]:
            yield Case(path, decode, (1, 9, *SIZES[6:]), (0.3, 1.0), 1)
        else:
            yield Case(path, decode, SIZES, (0.05, 0.3, 1.0), 3)


def decoder(context: Context) -> Decode:
    def decode(n_tokens: int) -> Logits:
        context.clear()
        return context.decode(TOKENS[:n_tokens], phase=Phase.AUTO, logits="all").copy()

    return decode


def test_without_a_cache(case: Case) -> None:
    with Model.load(case.path, storage="mapped") as mapped, Context(mapped, **LAYOUT) as context:  # not repacked
        case.check(decoder(context))


def test_from_ram_slots(case: Case) -> None:
    for ratio in case.ratios:
        with ram_context(case.path, ratio, LAYOUT) as (context, cache):
            case.check(decoder(context))
            assert cache.stats().blocks_unknown == 0


@pytest.mark.parametrize("prefill", [PrefillPath.RESIDENT, PrefillPath.STREAM])
def test_in_part_on_a_device(prefill: PrefillPath, case: Case) -> None:
    """With the CPU's kernels; other experts are uploaded between and during the batches."""
    settings = {"n_stage": 8, "device": "emulated:threads=1", "repack": False, **LAYOUT}
    for ratio in case.ratios:
        with hybrid_context(case.path, ratio, **settings) as (context, cache):
            plans = RandomPlans(cache, seed=6)
            plans.fill()
            cache.set_prefill(prefill, 33)

            def decode(n_tokens: int, context: StockContext = context, plans: RandomPlans = plans) -> Logits:
                plans.push(40)
                context.trim(0)
                return context.decode(TOKENS[:n_tokens])

            case.check(decode)
            assert cache.stats().pairs_hit > 0


@pytest.mark.parametrize("coverage", ["truncation", "substitution"])
def test_an_expert_budget(coverage: Coverage, case: Case) -> None:
    """The pairs that a budget leaves out are the same with slots in RAM and without a cache."""
    budget = ExpertBudget(budget=12, coverage=coverage)
    layout = {**LAYOUT, "has_budget": True}

    def decode(context: Context) -> list[Logits]:
        context.set_budget(budget)
        found = []
        for n_tokens in (2, 9, 17, 32):
            context.clear()
            context.decode(TOKENS[-20:], phase=Phase.PREFILL, logits="none")
            found.append(context.decode(TOKENS[:n_tokens], phase=Phase.VERIFY, logits="all").copy())
        return found

    with Model.load(case.path, storage="mapped") as mapped, Context(mapped, **layout) as context:
        expected = decode(context)
    with ram_context(case.path, 0.3, layout) as (context, cache):
        assert all(map(np.array_equal, decode(context), expected))
        assert cache.stats().evictions > 0
