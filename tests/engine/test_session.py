"""Answers: KV reuse over turns, interruption, limits, what is reported and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import MAX_N_CTX, EngineConfig, SamplingConfig
from moeedge.errors import ContextTooSmallError, EmptyPromptError, InputError, ModelFileError
from moeedge.llama import library
from moeedge.llama.model import Mode
from moeedge.run import Run
from tests.support.answers import assert_equal_answers as check
from tests.support.interruption import interrupt_decode
from tests.support.machine import Here
from tests.support.sessions import GREEDY, answered, plain_config
from tests.support.stock import StockContext

PROMPT = np.random.default_rng(4).integers(0, 256, 24).tolist()
N_PREDICT = 60
Draft = Literal["model", "self", "ngram", "none"]
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def reference(pair: Pair) -> list[int]:
    """Plain greedy decoding by llama_cpp alone; no stop token comes within it."""
    library.start()
    with StockContext(pair[0]) as stock:
        tokens, _ = stock.greedy(PROMPT, N_PREDICT)
    assert len(tokens) == N_PREDICT
    return tokens


def options(pair: Pair, draft: Draft = "model", **changes: Any) -> EngineConfig:
    source = {"model": pair[1], "self": pair[0], "ngram": "ngram", "none": None}[draft]
    return plain_config(pair[0], source, **{"gamma": 4} | changes)


@pytest.fixture
def session(pair: Pair) -> Iterator[Session]:
    with Session.open(options(pair)) as session:
        yield session


def answer(session: Session, prompt: list[int] = PROMPT, n_predict: int = N_PREDICT, **changes: Any) -> list[int]:
    return answered(session, prompt, n_predict, ignore_eos=False, **changes).tokens


@pytest.mark.parametrize("draft", ["model", "self", "none"])
@pytest.mark.parametrize("mode", ["moeedge", "stock"])
def test_figures_of_an_answer(pair: Pair, reference: list[int], mode: Mode, draft: Draft) -> None:
    with Session.open(options(pair, draft, mode=mode)) as session:
        generation = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY)
        records, text = [], list(PROMPT)
        for record in generation:  # after each step the KV caches hold the accepted text
            records.append(record)
            text += record.tokens
            assert session.target.sequences[0].tokens == text[:-1]
            if session.draft_context is not None:
                drafted = session.draft_context.sequences[0].tokens
                assert drafted == text[: len(drafted)]
        assert (session.draft_context is None) == (draft == "none")
        check(session, PROMPT, reference, generation.tokens)
        stats = generation.stats
        assert [token for record in records for token in record.tokens] == generation.tokens
        assert generation.stop_reason == "length"
        assert stats.generated_tokens == N_PREDICT and stats.steps == len(records) - 1
        assert stats.accepted == sum(record.n_accepted for record in records)
        if draft == "self":  # the target agrees with itself
            assert stats.acceptance_rate == 1 and stats.tokens_per_step > 1.9
        if draft == "none":
            assert stats.drafted == 0 and stats.acceptance_rate is None
        assert (stats.experts_per_verification is None) == (mode == "stock")


def test_the_same_seed_gives_the_same_answer(session: Session) -> None:
    answers = []
    for seed in (5, 5, 6):
        session.reset()
        answers.append(answer(session, sampling=SamplingConfig(temperature=1.0, seed=seed)))
    assert answers[0] == answers[1] != answers[2]
    drawn = answered(session, PROMPT, 8, sampling=SamplingConfig(temperature=1.0))
    assert drawn.stats.seed is not None  # a random seed is reported, so that the answer can be repeated


def test_turns_reuse_the_kv_cache(session: Session) -> None:
    second = [*PROMPT, *answer(session, n_predict=20), *PROMPT[:5]]
    generation = answered(session, second, 20)
    # all but the last token of the first turn is in the cache, and that one only if a draft brought it in
    assert generation.stats.prefill_tokens in (5, 6)
    assert generation.stats.prompt_tokens == len(second)
    # of an edited prompt only the common beginning is kept; of the same one the last token is computed for its logits
    edited = [*PROMPT[:10], 1, 2, 3]
    assert [answered(session, edited, 1).stats.prefill_tokens for _ in range(2)] == [3, 1]
    session.reset()
    check(session, second, answer(session, second, 20), generation.tokens)


@pytest.mark.parametrize("draft", ["self", "none"])
def test_stop_token(pair: Pair, draft: Draft, monkeypatch: pytest.MonkeyPatch, reference: list[int]) -> None:
    stop = reference[30]
    expected = reference[: reference.index(stop)]
    with Session.open(options(pair, draft)) as session:
        monkeypatch.setattr(session.model, "is_eog", lambda token: token == stop)
        generation = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY)
        records = list(generation)
        assert (generation.tokens, generation.stop_reason) == (expected, "eos")
        assert [token for record in records for token in record.tokens] == expected
        assert answered(session, PROMPT, N_PREDICT).tokens == reference


def test_length(session: Session, reference: list[int]) -> None:
    for n_predict in (0, 1, 2, 5, 7):
        generation = answered(session, PROMPT, n_predict)
        assert (generation.tokens, generation.stop_reason) == (reference[:n_predict], "length")


def test_cancel_between_steps_and_closing_early(session: Session, reference: list[int]) -> None:
    asked = iter([False] * 5)  # once for each prompt, target and draft
    run = Run(cancelled=lambda: next(asked, True))
    generation = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY, run=run)
    assert len(list(generation)) == 4
    assert generation.stop_reason == "interrupted"
    assert generation.tokens == reference[: len(generation.tokens)]
    check(session, PROMPT, reference, answer(session))
    with closing(session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY)) as generation:
        next(iter(generation))
        next(iter(generation))
    assert generation.stop_reason == "interrupted"
    assert list(generation) == []
    check(session, PROMPT, reference, answer(session))


@pytest.mark.parametrize("at_call", range(1, 13))
def test_ctrl_c_at_any_decode(
    session: Session, monkeypatch: pytest.MonkeyPatch, reference: list[int], at_call: int
) -> None:
    """Prefill of either model, drafting, verification: what was said stays, and the next answer takes no harm."""
    with monkeypatch.context() as patch:
        interrupt_decode(patch, at_call)
        generation = answered(session, PROMPT, N_PREDICT)
    assert generation.stop_reason == "interrupted"
    assert generation.tokens == reference[: len(generation.tokens)]
    text = [*PROMPT, *generation.tokens]
    assert session.target.sequences[0].tokens == text[: session.target.n_past] and session.target.n_past < len(text)
    assert session.draft_context.sequences[0].tokens == text[: session.draft_context.n_past]
    # the answer goes on where it stopped
    continued = answer(session, text, N_PREDICT - len(generation.tokens))
    check(session, PROMPT, reference, [*generation.tokens, *continued])


@pytest.mark.parametrize("draft", ["model", "self", "ngram", "none"])
def test_the_context_ends_the_answer(pair: Pair, draft: Draft, reference: list[int]) -> None:
    with Session.open(options(pair, draft, n_ctx=64)) as session:
        generation = answered(session, PROMPT, ignore_eos=False)
        assert generation.stop_reason == "context"
        assert generation.notes == ["The context of 64 tokens is full."]
        # 64 positions: the prompt's 24 and 40 tokens; the last one's successor is still computed
        assert generation.tokens == reference[:41]


@pytest.mark.parametrize("draft", ["model", "ngram", "none"])
def test_context_shift_goes_on(pair: Pair, draft: Draft) -> None:
    with Session.open(options(pair, draft, n_ctx=64, context_shift=True)) as session:
        session.n_keep = 6
        generation = session.generate(PROMPT, n_predict=150, sampling=GREEDY)
        for _ in generation:
            assert session.target.n_past <= 64
            assert session.target.sequences[0].tokens[:6] == PROMPT[:6]
        assert generation.stop_reason == "length" and len(generation.tokens) == 150
        stats = generation.stats
        assert stats.context_shifts > 1 and stats.dropped_tokens == 29 * stats.context_shifts
        n_read = len(PROMPT) + len(generation.tokens) - 1  # the last token is not read any more
        assert n_read - stats.dropped_tokens == session.target.n_past
        [note] = generation.notes
        assert f"{stats.dropped_tokens} tokens after the first 6 were dropped in {stats.context_shifts} shifts" in note
        # what is kept is the tail of what was said
        tail = session.target.sequences[0].tokens[6:]
        assert [*PROMPT, *generation.tokens][-len(tail) - 1 : -1] == tail
    # speculation changes nothing here either
    with Session.open(options(pair, "none", n_ctx=64, context_shift=True)) as plain:
        plain.n_keep = 6
        assert answer(plain, n_predict=150)[:100] == generation.tokens[:100]


def test_what_cannot_be_opened(pair: Pair, tmp_path: Path, here: Here) -> None:
    with pytest.raises(ModelFileError, match="no model file"):
        Session.open(options((pair[0], tmp_path / "no.gguf")))
    here.set_memory(1 << 30, 1 << 34)
    with pytest.raises(InputError, match=r"GiB of KV cache, but 1\.0 GiB of memory are free"):
        Session.open(options(pair, n_ctx=MAX_N_CTX))


def test_prompts_that_are_empty_or_larger_than_the_context(pair: Pair) -> None:
    with Session.open(options(pair, n_ctx=32)) as session:
        with pytest.raises(EmptyPromptError):
            session.generate([], n_predict=1, sampling=GREEDY)
        with pytest.raises(ContextTooSmallError, match=r"40 tokens, but the context of 32 .* -c 296") as caught:
            session.generate([65] * 40, n_predict=1, sampling=GREEDY)
        assert caught.value.exit_code == 2
        with pytest.raises(ContextTooSmallError):
            session.generate([65] * 29, n_predict=1, sampling=GREEDY)
        answer(session, [65] * 28, 1)
    session.close()  # twice is harmless


def test_info_and_notes(session: Session, pair: Pair) -> None:
    info = session.info
    assert (info.model, info.draft, info.gamma) == (pair[0].name, pair[1].name, 4)
    assert (info.n_expert_layers, info.n_experts, info.n_expert_used, info.n_ctx) == (3, 16, 4, 512)
    assert (info.device, info.policy, info.notes) == ("none", "none", [])
    with Session.open(options(pair, gamma=0)) as plain:
        assert (plain.info.gamma, plain.info.draft) == (0, "none")
        assert plain.info.notes == ["Speculation is off: the draft length is 0 (--draft-max)."]


def test_a_dense_model_works(pair: Pair) -> None:
    dense = pair[1]
    with StockContext(dense) as stock:
        expected, _ = stock.greedy(PROMPT, 20)
    with Session.open(options((dense, dense), "ngram", device="emulated")) as session:
        assert session.info.notes[0] == f"{dense.name} is a dense model: it has no experts to cache."
        assert session.target.sensor is None and session.counts is None and session.placement_stats() is None
        check(session, PROMPT, expected, answer(session, n_predict=20))
