"""Logits through our backend equal stock llama.cpp's bit for bit, for every architecture and every kind of claim."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.native import OffloadScope
from moeedge.native.abi import Phase
from tests.conftest import TinyFactory
from tests.support.cases import ATTENTION_CASES, SLOW_CASES
from tests.support.sensed import sensed_context
from tests.support.stock import TRANSCRIPT, StockContext, transcript, transcript_tokens

Reference = Callable[[Path, int], np.ndarray]


@pytest.fixture(scope="module")
def reference(tiny: TinyFactory, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Transcripts by thread count, from processes that never load our library: one per thread count, and slow case."""
    quick = [tiny(arch, **dims) for case, (arch, dims) in ATTENTION_CASES.items() if case not in SLOW_CASES]
    by_threads: dict[int, dict[str, np.ndarray]] = {}

    def get(path: Path, n_threads: int) -> np.ndarray:
        known = by_threads.setdefault(n_threads, {})
        if path.stem not in known:
            out = tmp_path_factory.mktemp("stock") / "rows.npz"
            paths = quick if path in quick else [path]
            command = [sys.executable, "-m", "tests.support.stock", str(out), str(n_threads), *map(str, paths)]
            subprocess.run(command, check=True, cwd=Path(__file__).parents[2], timeout=120)
            with np.load(out) as rows:
                known |= dict(rows)
        return known[path.stem]

    return get


@pytest.mark.parametrize("scope", list(OffloadScope), ids=lambda scope: scope.name.lower())
@pytest.mark.parametrize("case", ATTENTION_CASES)
def test_logits_equal_a_process_without_us(
    case: str, scope: OffloadScope, tiny: TinyFactory, reference: Reference
) -> None:
    arch, dimensions = ATTENTION_CASES[case]
    path = tiny(arch, **dimensions)
    context, sensor = sensed_context(path, scope, n_ubatch=32)
    with context:
        rows = transcript(context)
        stats = sensor.stats()
    assert np.array_equal(rows, reference(path, 1))
    # that the comparison is of what it says: our backend computed the blocks, or nothing at all
    assert (stats.blocks > 0) == (scope is not OffloadScope.NONE)


@pytest.mark.parametrize("scope", [OffloadScope.MOE, OffloadScope.ALL], ids=lambda scope: scope.name.lower())
def test_two_threads(scope: OffloadScope, tiny: TinyFactory, reference: Reference) -> None:
    path = tiny("qwen3moe")
    context, _ = sensed_context(path, scope, n_ubatch=32, n_threads=2)
    with context:
        assert np.array_equal(transcript(context), reference(path, 2))


@pytest.mark.parametrize("scope", [OffloadScope.MOE, OffloadScope.ALL], ids=lambda scope: scope.name.lower())
def test_without_repacked_weights(scope: OffloadScope, tiny_moe: Path) -> None:
    plain, _ = sensed_context(tiny_moe, OffloadScope.NONE, repack=False)
    ours, _ = sensed_context(tiny_moe, scope, repack=False)
    with plain, ours:
        assert np.array_equal(transcript(ours), transcript(plain))


def test_repacked_kernels_are_in_use(tiny_moe: Path) -> None:
    """Repacked and plain kernels round differently: were they equal here, the tests above would not cover both."""
    repacked, plain = StockContext(tiny_moe), StockContext(tiny_moe, repack=False)
    with repacked, plain:
        rows, other = transcript(repacked), transcript(plain)
    assert not np.array_equal(rows, other)
    assert np.allclose(rows, other, rtol=0, atol=0.2)


@pytest.mark.slow
def test_bundled_target(bundled_pair: tuple[Path, Path]) -> None:
    rows = []
    for scope in OffloadScope:
        context, _ = sensed_context(bundled_pair[0], scope, n_threads=2)
        with context:
            rows.append(transcript(context))
    assert np.array_equal(rows[1], rows[0])
    assert np.array_equal(rows[2], rows[0])


@pytest.mark.parametrize("mode", ["moeedge", "stock"])
def test_engine_context(mode: Literal["moeedge", "stock"], tiny_moe: Path, reference: Reference) -> None:
    """The engine's own context, as sessions use it: pieces, rollback and views of the logits."""
    tokens = transcript_tokens()
    rows = []
    with Model.load(tiny_moe) as model, Context(model, n_ctx=256, n_threads=1, n_ubatch=32, mode=mode) as context:
        for appended, dropped in TRANSCRIPT:
            phase = Phase.PREFILL if appended > 32 else Phase.VERIFY
            rows.append(context.decode(tokens[:appended], phase=phase, logits="all").copy())
            del tokens[:appended]
            context.trim(context.n_past - dropped)
    assert np.array_equal(np.concatenate(rows), reference(tiny_moe, 1))


def test_mode_switch_takes_effect_at_once(tiny_moe: Path) -> None:
    """Single tokens all along, where llama.cpp would reuse its graph with the old assignment."""
    with (
        Model.load(tiny_moe) as model,
        Context(model, n_ctx=256, n_threads=1, n_ubatch=32, mode="stock") as context,
        StockContext(tiny_moe) as stock,
    ):
        assert context.sensor is not None
        modes: list[Literal["moeedge", "stock"]] = ["stock", "stock", "moeedge", "moeedge", "stock", "moeedge"]
        for token, mode in enumerate(modes):
            context.set_mode(mode)
            assert np.array_equal(context.decode([token], phase=Phase.DECODE), stock.decode([token]))
            assert len(context.sensor.frames()) == (mode == "moeedge")
