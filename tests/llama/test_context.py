"""Decoding, taking back, interruption: the KV cache always holds what `tokens` says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import moeedge.llama.context as context_module
from moeedge.errors import EngineError
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.native.abi import Phase
from moeedge.native.decoding import Decoder
from tests.conftest import TinyFactory

TOKENS = np.random.default_rng(0).integers(0, 256, 60).tolist()


@pytest.fixture
def context(tiny_moe: Path) -> Iterator[Context]:
    with Model.load(tiny_moe) as model, Context(model, n_ctx=256, n_threads=1, n_batch=16, n_ubatch=8) as context:
        yield context


def logits_of(context: Context, tokens: list[int]) -> np.ndarray:
    """The last token's logits, from an empty cache."""
    context.clear()
    return context.decode(tokens, phase=Phase.PREFILL, logits="last").copy()


def test_rows_do_not_depend_on_how_tokens_are_fed(context: Context) -> None:
    entire = context.decode(TOKENS, phase=Phase.VERIFY, logits="all").copy()  # 4 batches, 8 ubatches
    assert entire.shape == (60, context.model.info.n_vocab) and entire.dtype == np.float32
    assert context.tokens == TOKENS and context.n_past == 60
    context.clear()
    assert context.decode(TOKENS[:50], phase=Phase.PREFILL, logits="none").shape[0] == 0
    rest = context.decode(TOKENS[50:], phase=Phase.VERIFY, logits="all")
    np.testing.assert_allclose(rest, entire[50:], atol=0.01)
    context.clear()
    np.testing.assert_allclose(context.decode(TOKENS, phase=Phase.PREFILL, logits="last")[0], entire[-1], atol=0.01)


def test_no_tokens_to_decode(context: Context) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        context.decode([], phase=Phase.PREFILL)


def test_trim_drops_tokens(context: Context) -> None:
    expected = logits_of(context, [*TOKENS[:20], 7])
    context.clear()
    context.decode(TOKENS[:20], phase=Phase.PREFILL, logits="none")
    context.decode([1, 2, 3, 4], phase=Phase.VERIFY, logits="all")
    context.trim(20)
    context.trim(25)  # nothing to drop
    assert context.tokens == TOKENS[:20]
    np.testing.assert_allclose(context.decode([7], phase=Phase.DECODE), expected, atol=0.01)


def test_keep_prefix(context: Context) -> None:
    context.decode(TOKENS[:20], phase=Phase.PREFILL, logits="none")
    assert context.keep_prefix([*TOKENS[:12], 999]) == 12
    assert context.keep_prefix([]) == 0
    assert context.tokens == []


def test_the_context_is_full(tiny_moe: Path) -> None:
    with Model.load(tiny_moe) as model, Context(model, n_ctx=256, n_threads=1) as context:
        context.decode([65] * 250, phase=Phase.PREFILL, logits="none")
        with pytest.raises(EngineError, match="context of 256 tokens is full"):
            context.decode([65] * 8, phase=Phase.VERIFY, logits="all")
        assert context.n_past == 250
        context.decode([65] * 6, phase=Phase.VERIFY, logits="all")


def test_a_context_smaller_than_llama_cpp_allocates_is_respected(tiny_moe: Path) -> None:
    with Model.load(tiny_moe) as model, Context(model, n_ctx=100, n_threads=1) as context:
        assert context.n_ctx == 100


@pytest.mark.parametrize("after_piece", [1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interruption_right_after_llama_decode(
    context: Context, monkeypatch: pytest.MonkeyPatch, after_piece: int, error: type[BaseException]
) -> None:
    """Python raises Ctrl-C when the C call has returned and before the bookkeeping."""
    expected = logits_of(context, [*TOKENS[:10], 7])
    context.clear()
    context.decode(TOKENS[:10], phase=Phase.PREFILL, logits="none")
    real, calls = Decoder.__call__, 0

    def interrupted(self: Decoder, batch: object, *, wait: bool) -> int:
        nonlocal calls
        calls += 1
        code = real(self, batch, wait=wait)
        if calls == after_piece:
            raise error
        return int(code)

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "__call__", interrupted)
        with pytest.raises(error):
            context.decode(TOKENS[10:40], phase=Phase.PREFILL, logits="none")
    assert context.tokens == TOKENS[:10]
    np.testing.assert_allclose(context.decode([7], phase=Phase.DECODE), expected, atol=0.01)


def test_shift_renumbers(tiny: TinyFactory) -> None:
    # one layer: a key depends on its token and position alone, so shifting equals computing anew
    with (
        Model.load(tiny("qwen3moe", layers=1)) as model,
        Context(model, n_ctx=256, n_threads=1) as context,
    ):
        assert context.can_shift
        expected = logits_of(context, [*TOKENS[:4], *TOKENS[14:40], 7])
        context.clear()
        context.decode(TOKENS[:40], phase=Phase.PREFILL, logits="none")
        context.shift(4, 10)
        assert context.tokens == [*TOKENS[:4], *TOKENS[14:40]]
        np.testing.assert_allclose(context.decode([7], phase=Phase.DECODE), expected, atol=0.05)
        with pytest.raises(ValueError, match="cannot discard"):
            context.shift(4, 1000)


def test_an_interrupted_shift_drops_the_cache(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    context.decode(TOKENS, phase=Phase.PREFILL, logits="none")
    with monkeypatch.context() as patch:
        patch.setattr(context_module.lib, "llama_memory_seq_add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            context.shift(4, 10)
    assert context.keep_prefix(TOKENS) == 0
    expected = logits_of(context, TOKENS)
    np.testing.assert_array_equal(logits_of(context, TOKENS), expected)


def test_a_sliding_window_drops_old_tokens(tiny: TinyFactory) -> None:
    with Model.load(tiny("gpt-oss")) as model, Context(model, n_ctx=1024, n_threads=1, n_ubatch=32) as context:
        assert model.info.n_swa > 0
        tokens = np.random.default_rng(1).integers(0, 256, 700).tolist()
        expected = logits_of(context, [*tokens[:50], 7])
        context.clear()
        context.decode(tokens, phase=Phase.PREFILL, logits="none")
        context.trim(697)  # a rejected draft: the window is still complete
        assert context.n_past == 697
        context.trim(50)  # the window of position 50 is gone: everything is dropped
        assert context.tokens == []
        np.testing.assert_allclose(logits_of(context, [*tokens[:50], 7]), expected, atol=0.01)


def test_switching_modes_changes_no_logit(context: Context) -> None:
    assert context.sensor is not None
    ours = logits_of(context, TOKENS)
    assert context.sensor.read_counts().sum() > 0
    context.set_mode("stock")
    np.testing.assert_array_equal(logits_of(context, TOKENS), ours)
    assert context.sensor.read_counts().sum() == 0
    context.set_mode("moeedge")
    np.testing.assert_array_equal(logits_of(context, TOKENS), ours)
    assert context.sensor.read_counts().sum() > 0


def test_more_logits_than_were_reserved_come_in_pieces(tiny_moe: Path) -> None:
    tokens = list(range(40))
    with Model.load(tiny_moe) as model:
        with Context(model, n_ctx=256, n_threads=1, n_batch=16) as context:
            expected = context.decode(tokens, phase=Phase.PREFILL, logits="all").copy()
        with Context(model, n_ctx=256, n_threads=1, n_outputs=16) as context:
            assert np.array_equal(context.decode(tokens, phase=Phase.PREFILL, logits="all"), expected)
            assert context.tokens == tokens
            assert context.decode(tokens, phase=Phase.PREFILL).shape == (1, model.info.n_vocab)
