"""Logits through our backend equal stock llama.cpp's bit for bit, for every architecture and every kind of claim.

And the tiny models are worth testing on: routing and logits vary, every expert type reaches the kernels meant for it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import pytest

from moeedge.lab.widen.random_model import ENDOFTEXT, IM_END, IM_START, N_VOCAB
from moeedge.llama import library
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.native import OffloadScope
from moeedge.native.abi import Phase
from tests.conftest import TinyFactory
from tests.support.cases import ATTENTION_CASES, K_QUANTS, MOE_CASES, SLOW_CASES, case_model
from tests.support.sensed import sensed_context
from tests.support.stock import TRANSCRIPT, StockContext, tap_context, transcript, transcript_tokens

Reference = Callable[[Path, int], np.ndarray]
CLAIMS = pytest.mark.parametrize("scope", [OffloadScope.MOE, OffloadScope.ALL], ids=lambda scope: scope.name.lower())
# what llama.cpp's quantizer mixes
K_EXPERT_TYPES = {"Q3_K_M": {"Q3_K", "Q4_K"}, "Q4_K_M": {"Q4_K", "Q6_K"}, "Q5_K_M": {"Q5_K", "Q6_K"}}


@pytest.mark.parametrize("case", MOE_CASES)
def test_tiny_models_vary_and_are_as_named(case: str, tiny: TinyFactory) -> None:
    path = case_model(tiny, case)
    reader = gguf.GGUFReader(path)
    arch, dimensions = MOE_CASES[case]
    assert reader.get_field("general.architecture").contents() == arch
    names = {tensor.name for tensor in reader.tensors}
    assert any("ffn_gate_up_exps" in name for name in names) == bool(dimensions.get("merged"))
    types = {tensor.tensor_type.name for tensor in reader.tensors if "_exps" in tensor.name}
    assert case not in K_QUANTS or types == K_EXPERT_TYPES.get(case, {case})
    library.start()
    context, tap = tap_context(path)
    with context:
        logits = context.decode(np.random.default_rng(8).integers(0, 256, 128).tolist())
    for layer, ids in tap.ids.items():
        choices = {tuple(sorted(row)) for row in ids.tolist()}
        assert len(choices) > (32 if ids.shape[1] > 2 else 8), f"layer {layer} routes alike"
        assert len(np.unique(ids)) >= 8, f"layer {layer} leaves most experts unused"
    assert 3 < logits.std() < 5
    assert len(set(logits.argmax(axis=1).tolist())) > 40
    best = np.sort(logits, axis=1)[:, -2:]
    assert np.median(best[:, 1] - best[:, 0]) > 0.3, "near-ties must be rare"


def test_vocabulary_of_tiny_models(tiny_moe: Path) -> None:
    library.start()
    with StockContext(tiny_moe) as context:
        assert context.n_vocab == N_VOCAB == 304
        assert context.tokenize("<|im_start|>") == [IM_START]
        assert context.tokenize("<|im_end|><|endoftext|>") == [IM_END, ENDOFTEXT]
        text = "the ärea is 日本 \U0001f600\n"
        assert 0 < len(context.tokenize(text)) < len(text.encode()), "some letters merge"


def test_the_factors_of_experts_count(tiny: TinyFactory) -> None:
    """llama.cpp reads them: without them the answer is another one."""
    library.start()
    answers = []
    for has_factors in (False, True):
        with StockContext(tiny("qwen3moe", expert_scales=has_factors)) as stock:
            answers.append(stock.answer(list(range(40, 60)), 24))
    assert answers[0] != answers[1]


@pytest.fixture(scope="module")
def reference(tiny: TinyFactory, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Transcripts by thread count, from processes that never load our library: one per thread count, and slow case."""
    quick = [case_model(tiny, case) for case in ATTENTION_CASES if case not in SLOW_CASES]
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
    path = case_model(tiny, case)
    context, sensor = sensed_context(path, scope, n_ubatch=32)
    with context:
        rows = transcript(context)
        stats = sensor.stats()
    assert np.array_equal(rows, reference(path, 1))
    # that the comparison is of what it says: our backend computed the blocks, or nothing at all
    assert (stats.blocks > 0) == (scope is not OffloadScope.NONE)


@CLAIMS
def test_two_threads(scope: OffloadScope, tiny_moe: Path, reference: Reference) -> None:
    context, _ = sensed_context(tiny_moe, scope, n_ubatch=32, n_threads=2)
    with context:
        assert np.array_equal(transcript(context), reference(tiny_moe, 2))


@CLAIMS
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
