"""Answers: exactness, KV reuse over turns, interruption, limits, what is reported and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from moeedge.engine.drafts import ModelDraft
from moeedge.engine.session import Session
from moeedge.engine.types import MAX_N_CTX, EngineConfig, SamplingConfig
from moeedge.errors import (
    ContextTooSmallError,
    EmptyPromptError,
    InputError,
    ModelFileError,
    VocabularyMismatchError,
)
from moeedge.llama import library
from moeedge.native.abi import Phase
from moeedge.run import Run
from moeedge.scheduler.stats import StepRecord
from tests.conftest import TinyFactory
from tests.support.answers import assert_equal_answers
from tests.support.interruption import interrupt_decode
from tests.support.stock import StockContext

GREEDY = SamplingConfig(temperature=0)
PROMPT = np.random.default_rng(4).integers(0, 256, 24).tolist()
N_PREDICT = 60
Draft = Literal["model", "self", "ngram", "none"]


@pytest.fixture(scope="module")
def pair(tiny: TinyFactory) -> tuple[Path, Path]:
    return tiny("qwen3moe"), tiny("qwen3")


@pytest.fixture(scope="module")
def reference(pair: tuple[Path, Path]) -> list[int]:
    """Plain greedy decoding by llama_cpp alone; no stop token comes within it."""
    library.start()
    with StockContext(pair[0]) as stock:
        tokens, _ = stock.greedy(PROMPT, N_PREDICT)
    assert len(tokens) == N_PREDICT
    return tokens


def options(pair: tuple[Path, Path], draft: Draft = "model", **changes: Any) -> EngineConfig:
    sources: dict[Draft, Path | Literal["ngram"] | None] = {
        "model": pair[1],
        "self": pair[0],
        "ngram": "ngram",
        "none": None,
    }
    return EngineConfig(
        **{"model": pair[0], "draft": sources[draft], "gamma": 4, "n_ctx": 512, "n_threads": 1, "device": "none"}
        | changes
    )


@pytest.fixture
def session(pair: tuple[Path, Path]) -> Iterator[Session]:
    with Session.open(options(pair)) as session:
        yield session


def answer(session: Session, prompt: list[int] = PROMPT, n_predict: int = N_PREDICT, **changes: Any) -> list[int]:
    generation = session.generate(prompt, n_predict=n_predict, sampling=changes.pop("sampling", GREEDY), **changes)
    for _ in generation:
        pass
    return generation.tokens


def check(session: Session, prompt: list[int], reference: list[int], tokens: list[int]) -> None:
    """Equal token by token; a difference would have to be a near-tie of the reference."""
    assert_equal_answers(session, prompt, reference, tokens)


@pytest.mark.parametrize("gamma", [1, 4, 8])
@pytest.mark.parametrize("draft", ["model", "self", "ngram", "none"])
@pytest.mark.parametrize("mode", ["moeedge", "stock"])
def test_greedy_equals_plain_decoding(
    pair: tuple[Path, Path], reference: list[int], mode: Literal["moeedge", "stock"], draft: Draft, gamma: int
) -> None:
    with Session.open(options(pair, draft, gamma=gamma, mode=mode)) as session:
        generation = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY)
        records = list(generation)
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


def test_penalties_see_the_drafts_before_them(pair: tuple[Path, Path]) -> None:
    """With a repeat penalty each position's history counts; speculation must not change the answer."""
    sampling = SamplingConfig(temperature=0, repeat_penalty=4.0, repeat_last_n=30)
    with Session.open(options(pair, "none")) as plain:
        expected = answer(plain, sampling=sampling)
        assert expected != answer(plain)
    for draft in ("model", "self", "ngram"):
        with Session.open(options(pair, draft)) as session:  # type: ignore[arg-type]
            check(session, PROMPT, expected, answer(session, sampling=sampling))


def test_the_same_seed_gives_the_same_answer(session: Session) -> None:
    sampling = SamplingConfig(temperature=1.0, seed=5)
    first = answer(session, sampling=sampling)
    session.reset()
    assert answer(session, sampling=sampling) == first
    session.reset()
    assert answer(session, sampling=SamplingConfig(temperature=1.0, seed=6)) != first
    generation = session.generate(PROMPT, n_predict=8, sampling=SamplingConfig(temperature=1.0))
    list(generation)
    assert generation.stats.seed is not None  # a random seed is reported, so that the answer can be repeated


def test_turns_reuse_the_kv_cache(session: Session, pair: tuple[Path, Path]) -> None:
    said = answer(session, n_predict=20)
    second = [*PROMPT, *said, *PROMPT[:5]]
    generation = session.generate(second, n_predict=20, sampling=GREEDY)
    list(generation)
    # all but the last token of the first turn is in the cache, and that one only if a draft brought it in
    assert generation.stats.prefill_tokens in (5, 6)
    assert generation.stats.prompt_tokens == len(second)
    with Session.open(options(pair)) as fresh:
        expected = answer(fresh, second, 20)
        check(fresh, second, expected, generation.tokens)
    # an edited prompt: only the common beginning is kept
    edited = [*PROMPT[:10], 1, 2, 3]
    generation = session.generate(edited, n_predict=1, sampling=GREEDY)
    list(generation)
    assert generation.stats.prefill_tokens == 3
    # the same prompt again: its last token is computed anew, for its logits
    generation = session.generate(edited, n_predict=1, sampling=GREEDY)
    list(generation)
    assert generation.stats.prefill_tokens == 1


def test_both_kv_caches_hold_the_accepted_text_after_each_step(session: Session) -> None:
    text = list(PROMPT)
    assert session.draft_context is not None
    for record in session.generate(PROMPT, n_predict=40, sampling=GREEDY):
        text += record.tokens
        assert session.target.sequences[0].tokens == text[:-1]
        drafted = session.draft_context.sequences[0].tokens
        assert drafted == text[: len(drafted)]


def test_stop_token(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, reference: list[int]) -> None:
    stop = reference[30]
    expected = reference[: reference.index(stop)]
    for draft in ("self", "none"):
        with Session.open(options(pair, draft)) as session:  # type: ignore[arg-type]
            monkeypatch.setattr(session.model, "is_eog", lambda token: token == stop)
            generation = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY)
            records = list(generation)
            assert (generation.tokens, generation.stop_reason) == (expected, "eos")
            assert [token for record in records for token in record.tokens] == expected
            assert answer(session, ignore_eos=True) == reference


@pytest.mark.parametrize("n_predict", [0, 1, 2, 5, 7])
def test_length(session: Session, reference: list[int], n_predict: int) -> None:
    generation = session.generate(PROMPT, n_predict=n_predict, sampling=GREEDY)
    list(generation)
    assert (generation.tokens, generation.stop_reason) == (reference[:n_predict], "length")


def test_cancel_between_steps(session: Session, reference: list[int]) -> None:
    asked = 0

    def cancel() -> bool:
        nonlocal asked
        asked += 1
        return asked > 5  # once for each prompt, target and draft

    generation = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY, run=Run(cancelled=cancel))
    assert len(list(generation)) == 4
    assert generation.stop_reason == "interrupted"
    assert generation.tokens == reference[: len(generation.tokens)]
    check(session, PROMPT, reference, answer(session))


@pytest.mark.parametrize("draft", ["model", "none"])
def test_cancel_within_a_long_prompt(pair: tuple[Path, Path], draft: Draft) -> None:
    """A prompt is computed in pieces of n_ubatch; what was done of it is not computed again."""
    prompt = np.random.default_rng(5).integers(0, 256, 100).tolist()
    with Session.open(options(pair, draft, n_batch=64, n_ubatch=32)) as session:
        asked: list[int] = []

        def cancel() -> bool:
            asked.append(session.target.n_past)
            return len(asked) == 3

        generation = session.generate(prompt, n_predict=5, sampling=GREEDY, run=Run(cancelled=cancel))
        assert list(generation) == [] and generation.stop_reason == "interrupted"
        assert asked == [0, 32, 64] and session.target.sequences[0].tokens == prompt[:64]
        generation = session.generate(prompt, n_predict=5, sampling=GREEDY)
        list(generation)
        assert generation.stats.prefill_tokens == 36
        with Session.open(options(pair, "none")) as fresh:
            check(fresh, prompt, answer(fresh, prompt, 5), generation.tokens)


@pytest.mark.parametrize("at_call", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
def test_ctrl_c_at_any_decode(
    session: Session, monkeypatch: pytest.MonkeyPatch, reference: list[int], at_call: int
) -> None:
    """Prefill of either model, drafting, verification: what was said stays, and the next answer takes no harm."""
    with monkeypatch.context() as patch:
        interrupt_decode(patch, at_call)
        generation = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY)
        list(generation)
    assert generation.stop_reason == "interrupted"
    assert generation.tokens == reference[: len(generation.tokens)]
    text = [*PROMPT, *generation.tokens]
    assert session.target.sequences[0].tokens == text[: session.target.n_past] and session.target.n_past < len(text)
    assert session.draft_context is not None
    assert session.draft_context.sequences[0].tokens == text[: session.draft_context.n_past]
    # the answer goes on where it stopped
    continued = answer(session, text, N_PREDICT - len(generation.tokens))
    check(session, PROMPT, reference, [*generation.tokens, *continued])


def test_closing_an_answer_early(session: Session, reference: list[int]) -> None:
    with closing(session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY)) as generation:
        next(iter(generation))
        next(iter(generation))
    assert generation.stop_reason == "interrupted"
    assert list(generation) == []
    check(session, PROMPT, reference, answer(session))


@pytest.mark.parametrize("draft", ["model", "self", "ngram", "none"])
def test_the_context_ends_the_answer(pair: tuple[Path, Path], draft: Draft) -> None:
    with Session.open(options(pair, "none", n_ctx=512)) as plain:
        expected = answer(plain, n_predict=41)
    with Session.open(options(pair, draft, n_ctx=64)) as session:
        generation = session.generate(PROMPT, n_predict=-1, sampling=GREEDY)
        list(generation)
        assert generation.stop_reason == "context"
        assert generation.notes == ["The context of 64 tokens is full."]
        # 64 positions: the prompt's 24 and 40 tokens; the last one's successor is still computed
        assert generation.tokens == expected


@pytest.mark.parametrize("draft", ["model", "ngram", "none"])
def test_context_shift_goes_on(pair: tuple[Path, Path], draft: Draft) -> None:
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


def test_a_context_larger_than_the_memory(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(available=1 << 30, total=1 << 34)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    with pytest.raises(InputError, match=r"GiB of KV cache, but 1\.0 GiB of memory are free"):
        Session.open(options(pair, n_ctx=MAX_N_CTX))


def test_empty_prompt(session: Session) -> None:
    with pytest.raises(EmptyPromptError):
        session.generate([], n_predict=1, sampling=GREEDY)


def test_prompt_larger_than_the_context(pair: tuple[Path, Path]) -> None:
    with Session.open(options(pair, n_ctx=32)) as session:
        with pytest.raises(ContextTooSmallError, match=r"40 tokens, but the context of 32 .* -c 296") as caught:
            session.generate([65] * 40, n_predict=1, sampling=GREEDY)
        assert caught.value.exit_code == 2
        with pytest.raises(ContextTooSmallError):
            session.generate([65] * 29, n_predict=1, sampling=GREEDY)
        answer(session, [65] * 28, 1)


def test_a_missing_draft(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no model file"):
        Session.open(options((pair[0], tmp_path / "no.gguf")))


def test_a_foreign_draft_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.gguf"
    foreign.write_bytes(pair[1].read_bytes().replace(b"<|im_end|>", b"<|an_end|>"))
    with pytest.raises(VocabularyMismatchError, match="an_end"):
        Session.open(options((pair[0], foreign)))


def test_auto_without_a_gpu_says_so(pair: tuple[Path, Path]) -> None:
    if library.local_gpus():
        pytest.skip("a GPU is here")
    with Session.open(options(pair, device="auto")) as session:
        assert session.info.device == "none"
        assert "No GPU: all experts stay on the CPU" in session.info.notes[0]


def test_info_and_notes(pair: tuple[Path, Path]) -> None:
    with Session.open(options(pair)) as session:
        info = session.info
        assert (info.model, info.draft, info.gamma) == (pair[0].name, pair[1].name, 4)
        assert (info.n_expert_layers, info.n_experts, info.n_expert_used, info.n_ctx) == (3, 16, 4, 512)
        assert (info.device, info.policy, info.notes) == ("none", "none", [])
    with Session.open(options(pair, gamma=0)) as session:
        assert (session.info.gamma, session.info.draft) == (0, "none")
        assert session.info.notes == ["Speculation is off: the draft length is 0 (--draft-max)."]


def test_a_dense_model_works(pair: tuple[Path, Path]) -> None:
    dense = pair[1]
    with StockContext(dense) as stock:
        expected, _ = stock.greedy(PROMPT, 20)
    with Session.open(options((dense, dense), "ngram")) as session:
        assert "is a dense model" in session.info.notes[0]
        assert session.target.sensor is None and session.counts is None
        check(session, PROMPT, expected, answer(session, n_predict=20))


def test_observers_see_every_step_with_its_routing(pair: tuple[Path, Path]) -> None:
    """The frames of a step add up to its counts; prefill and drafting (here by an MoE model, too) do not leak in."""
    seen: list[StepRecord] = []

    def observe(record: StepRecord, session: Session) -> None:
        seen.append(record)
        sensor = session.target.sensor
        assert sensor is not None and session.counts is not None
        frames = sensor.frames()
        assert len(frames) == 1
        frame = frames[0]
        expected_phase = Phase.VERIFY if record.n_verified > 1 else Phase.DECODE
        assert frame.phase == (Phase.PREFILL if record.n_verified == 0 else expected_phase)
        counts = np.zeros_like(session.counts)
        for layer, n_tokens in enumerate(frame.layer_tokens):
            np.add.at(counts[layer], frame.ids[layer, :n_tokens].ravel(), 1)
        np.testing.assert_array_equal(counts, session.counts)
        if record.n_verified:
            assert (counts.sum(axis=1) == record.n_verified * 4).all()
            assert record.experts_unique == pytest.approx(np.count_nonzero(counts, axis=1).mean())

    with Session.open(options(pair, "self")) as session:
        session.observers.append(observe)
        generation = session.generate(PROMPT, n_predict=30, sampling=GREEDY)
        records = list(generation)
        assert [record.tokens for record in seen] == [record.tokens for record in records]
        assert seen[0].n_verified == 0 and all(record.n_verified for record in seen[1:])
        assert isinstance(session.draft, ModelDraft) and session.draft.context.sensor is not None


def test_modes_switch_within_one_session(session: Session, reference: list[int]) -> None:
    for mode, gamma in (("stock", 0), ("stock", 4), ("moeedge", 4), ("stock", 0), ("moeedge", 0)):
        session.reset()
        session.set_mode(mode)  # type: ignore[arg-type]
        session.gamma = gamma
        generation = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY)
        list(generation)
        check(session, PROMPT, reference, generation.tokens)
        assert (generation.stats.drafted > 0) == (gamma > 0)
        assert (generation.stats.experts_sum > 0) == (mode == "moeedge")


def test_closing_twice_is_harmless(pair: tuple[Path, Path]) -> None:
    session = Session.open(options(pair))
    session.close()
    session.close()
