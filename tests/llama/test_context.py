"""Decoding, taking back, interruption: the KV cache always holds what `tokens` says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeedge.llama.context as context_module
from moeedge.errors import EngineError
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.llama.sequence import BatchPart, WantedLogits
from moeedge.native.abi import Phase
from tests.conftest import TinyFactory
from tests.support.interruption import interrupt_decode

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
    assert context.sequences[0].tokens == TOKENS and context.n_past == 60
    context.clear()
    assert context.decode(TOKENS[:50], phase=Phase.PREFILL, logits="none").shape[0] == 0
    rest = context.decode(TOKENS[50:], phase=Phase.VERIFY, logits="all")
    np.testing.assert_allclose(rest, entire[50:], atol=0.01)
    context.clear()
    np.testing.assert_allclose(context.decode(TOKENS, phase=Phase.PREFILL, logits="last")[0], entire[-1], atol=0.01)
    with pytest.raises(ValueError, match="no tokens"):
        context.decode([], phase=Phase.PREFILL)


def test_trim_and_keep_prefix_drop_tokens(context: Context) -> None:
    expected = logits_of(context, [*TOKENS[:20], 7])
    context.clear()
    context.decode(TOKENS[:20], phase=Phase.PREFILL, logits="none")
    context.decode([1, 2, 3, 4], phase=Phase.VERIFY, logits="all")
    context.trim(20)
    context.trim(25)  # nothing to drop
    assert context.sequences[0].tokens == TOKENS[:20]
    np.testing.assert_allclose(context.decode([7], phase=Phase.DECODE), expected, atol=0.01)

    context.trim(20)
    assert context.sequences[0].keep_prefix([*TOKENS[:12], 999]) == 12
    assert context.sequences[0].keep_prefix([]) == 0
    assert context.sequences[0].tokens == []


def test_the_context_is_full(tiny_moe: Path) -> None:
    with Model.load(tiny_moe) as model, Context(model, n_ctx=256, n_threads=1) as context:
        context.decode([65] * 250, phase=Phase.PREFILL, logits="none")
        with pytest.raises(EngineError, match="context of 256 tokens is full"):
            context.decode([65] * 8, phase=Phase.VERIFY, logits="all")
        assert context.n_past == 250
        context.decode([65] * 6, phase=Phase.VERIFY, logits="all")
        with Context(model, n_ctx=100, n_threads=1) as small:
            assert small.n_ctx == 100, "which is less than llama.cpp allocates"


@pytest.mark.parametrize("after_piece", [1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interruption_right_after_llama_decode(
    context: Context, monkeypatch: pytest.MonkeyPatch, after_piece: int, error: type[BaseException]
) -> None:
    """Python raises Ctrl-C when the C call has returned and before the bookkeeping."""
    expected = logits_of(context, [*TOKENS[:10], 7])
    context.clear()
    context.decode(TOKENS[:10], phase=Phase.PREFILL, logits="none")
    with monkeypatch.context() as patch:
        interrupt_decode(patch, after_piece, error)
        with pytest.raises(error):
            context.decode(TOKENS[10:40], phase=Phase.PREFILL, logits="none")
    assert context.sequences[0].tokens == TOKENS[:10]
    np.testing.assert_allclose(context.decode([7], phase=Phase.DECODE), expected, atol=0.01)


def test_shift_renumbers(tiny: TinyFactory) -> None:
    # one layer: a key depends on its token and position alone, so shifting equals computing anew
    with Model.load(tiny("qwen3moe", layers=1)) as model, Context(model, n_ctx=256, n_threads=1) as context:
        assert context.can_shift
        expected = logits_of(context, [*TOKENS[:4], *TOKENS[14:40], 7])
        context.clear()
        context.decode(TOKENS[:40], phase=Phase.PREFILL, logits="none")
        context.sequences[0].shift(4, 10)
        assert context.sequences[0].tokens == [*TOKENS[:4], *TOKENS[14:40]]
        np.testing.assert_allclose(context.decode([7], phase=Phase.DECODE), expected, atol=0.05)
        with pytest.raises(ValueError, match="cannot discard"):
            context.sequences[0].shift(4, 1000)


def test_an_interrupted_shift_drops_the_cache(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    context.decode(TOKENS, phase=Phase.PREFILL, logits="none")
    with monkeypatch.context() as patch:
        patch.setattr(context_module.lib, "llama_memory_seq_add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            context.sequences[0].shift(4, 10)
    assert context.sequences[0].keep_prefix(TOKENS) == 0
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
        assert context.sequences[0].tokens == []
        np.testing.assert_allclose(logits_of(context, [*tokens[:50], 7]), expected, atol=0.01)


@pytest.mark.parametrize("architecture", ["gpt-oss", "qwen35moe", "nemotron_h_moe"])
def test_checkpoints_go_back_to_a_message(architecture: str, tiny: TinyFactory) -> None:
    """A memory with windows or recurrent states goes back to before a prompt's last tokens, as it was there."""
    tokens = np.random.default_rng(1).integers(0, 256, 900).tolist()
    first, second, other = tokens[:100], tokens[100:800], tokens[800:]
    sizes: dict[str, Any] = {"n_ctx": 1024, "n_threads": 1, "n_ubatch": 32}
    with Model.load(tiny(architecture)) as model, Context(model, n_checkpoints=2, **sizes) as context:
        sequence = context.sequences[0]
        expected = sequence.prefill(first, logits="last").copy()
        sequence.prefill(second, logits="none")
        held = sequence.keep_prefix([*first[:95], *other])  # the answer to the first prompt begins otherwise
        assert held == 92
        assert sequence.tokens == first[:92]
        assert np.array_equal(sequence.decode(first[92:], phase=Phase.PREFILL), expected)
        sequence.prefill(second, logits="none")
        # a window may still be complete, four tokens back
        assert sequence.keep_prefix([*first, *second[:-4], *other]) in (792, 796 if model.info.n_swa else 792)
        sequence.prefill(other, logits="none")  # a third checkpoint, the first is gone
        assert sequence.keep_prefix(first[:50]) == 0
        sequence.prefill(first, logits="none")
        context.clear()  # of another text
        sequence.prefill(other, logits="none")
        sequence.resync(failed=True)
        assert sequence.tokens == other[: sequence.n_past] and sequence.n_past in (92, 100)
    with Model.load(tiny("qwen3moe")) as model, Context(model, n_checkpoints=2, **sizes) as context:
        context.sequences[0].prefill(first, logits="none")
        assert context.sequences[0].keep_prefix(first[:50]) == 50  # it needs none


def test_more_logits_than_were_reserved_come_in_pieces(tiny_moe: Path) -> None:
    tokens = list(range(40))
    with Model.load(tiny_moe) as model:
        with Context(model, n_ctx=256, n_threads=1, n_batch=16) as context:
            expected = context.decode(tokens, phase=Phase.PREFILL, logits="all").copy()
        with Context(model, n_ctx=256, n_threads=1, n_outputs=16) as context:
            assert np.array_equal(context.decode(tokens, phase=Phase.PREFILL, logits="all"), expected)
            assert context.sequences[0].tokens == tokens
            assert context.decode(tokens, phase=Phase.PREFILL).shape == (1, model.info.n_vocab)


@pytest.fixture
def shared(tiny_moe: Path) -> Iterator[Context]:
    """A context for three texts."""
    with Model.load(tiny_moe) as model, Context(model, n_ctx=64, n_threads=1, n_parallel=3) as context:
        yield context


def test_sequences_do_not_see_each_other(shared: Context, context: Context) -> None:
    texts = [TOKENS[:20], TOKENS[5:12], TOKENS[30:60]]
    expected = []
    for text in texts:
        context.clear()
        expected.append(context.decode(text, phase=Phase.PREFILL, logits="all").copy())
    wanted: tuple[WantedLogits, ...] = ("all", "none", "last")
    parts = [BatchPart(*part) for part in zip(shared.sequences, texts, wanted, strict=True)]
    rows = shared.decode_parts(parts, phase=Phase.PREFILL)
    assert [row.shape[0] for row in rows] == [20, 0, 1]
    np.testing.assert_allclose(rows[0], expected[0], atol=0.01)
    np.testing.assert_allclose(rows[2], expected[2][-1:], atol=0.01)
    assert [sequence.tokens for sequence in shared.sequences] == texts
    # one goes back, one is emptied, the third is as it was
    shared.sequences[0].trim(10)
    shared.sequences[1].clear()
    rows = shared.decode_parts(
        [BatchPart(shared.sequences[0], texts[0][10:], "last"), BatchPart(shared.sequences[1], texts[1], "last")],
        phase=Phase.VERIFY,
    )
    np.testing.assert_allclose(rows[0], expected[0][-1:], atol=0.01)
    np.testing.assert_allclose(rows[1], expected[1][-1:], atol=0.01)
    assert [sequence.tokens for sequence in shared.sequences] == texts
    shared.clear()
    assert [sequence.n_past for sequence in shared.sequences] == [0, 0, 0]


def test_a_text_does_not_take_the_room_of_the_others(shared: Context) -> None:
    first, second, _ = shared.sequences
    first.decode([65] * 60, phase=Phase.PREFILL, logits="none")
    with pytest.raises(EngineError, match="context of 64 tokens is full"):
        shared.decode_parts([BatchPart(second, [1], "all"), BatchPart(first, [65] * 5, "all")], phase=Phase.VERIFY)
    assert (first.n_past, second.n_past) == (60, 0)
    for sequence in shared.sequences:
        sequence.decode([65] * (64 - sequence.n_past), phase=Phase.PREFILL, logits="none")


def test_an_interruption_leaves_all_sequences_as_they_were(shared: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [BatchPart(sequence, TOKENS[:10], "last") for sequence in shared.sequences]
    shared.decode_parts(parts, phase=Phase.PREFILL)
    more = [BatchPart(sequence, TOKENS[10:15], "all") for sequence in shared.sequences]
    expected = [row.copy() for row in shared.decode_parts(more, phase=Phase.VERIFY)]
    for sequence in shared.sequences:
        sequence.trim(10)
    with monkeypatch.context() as patch:
        interrupt_decode(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            shared.decode_parts(more, phase=Phase.VERIFY)
    assert [sequence.tokens for sequence in shared.sequences] == [TOKENS[:10]] * 3
    for row, before in zip(shared.decode_parts(more, phase=Phase.VERIFY), expected, strict=True):
        np.testing.assert_allclose(row, before, atol=0.01)


def test_parts_are_split_into_graphs(tiny_moe: Path) -> None:
    with (
        Model.load(tiny_moe) as model,
        Context(model, n_ctx=64, n_threads=1, n_parallel=4, n_batch=16, n_ubatch=8, n_outputs=6) as context,
    ):
        parts = [BatchPart(seq, TOKENS[:n], "all") for seq, n in zip(context.sequences, (3, 3, 12, 2), strict=True)]
        assert list(context.fitting(parts)) == [slice(0, 2), slice(2, 3), slice(3, 4)]
        assert list(context.fitting([part._replace(logits="last") for part in parts])) == list(context.fitting(parts))
        with pytest.raises(ValueError, match="do not fit"):
            context.decode_parts(parts, phase=Phase.VERIFY)
        assert len(context.decode_parts(parts[2:3], phase=Phase.VERIFY)[0]) == 12
