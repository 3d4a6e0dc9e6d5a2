"""Texts that share a batch: joining and leaving, interruption, limits, what is reported and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.engine.answer import ParallelGeneration
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.errors import ContextTooSmallError, EmptyPromptError, EngineError, InputError
from moeedge.native.compute import Decoder
from moeedge.run import Run
from moeedge.scheduler.config import PlacementConfig
from tests.conftest import TinyFactory
from tests.support.interruption import interrupt_decode
from tests.support.recurrent import make_mamba

GREEDY = SamplingConfig(temperature=0)
RANDOM = SamplingConfig(temperature=1, top_k=0, top_p=1, min_p=0, seed=3)
RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(0, 256, n).tolist() for n in (24, 5, 11, 40)]
N_PREDICT = 30


@pytest.fixture(scope="module")
def config(tiny: TinyFactory) -> EngineConfig:
    # all experts are used and of float32: a batch's size turns no router around, so that tokens compare exactly
    path = tiny("qwen3moe", experts=4, used=4, expert_type="F32")
    return EngineConfig(model=path, draft=tiny("qwen3"), gamma=3, n_ctx=256, n_threads=1, n_parallel=2, device="none")


@pytest.fixture(scope="module")
def alone(config: EngineConfig) -> list[list[int]]:
    """The answers of single runs."""
    with Session.open(replace(config, n_parallel=1)) as session:
        return [single(session, prompt) for prompt in PROMPTS]


@pytest.fixture
def session(config: EngineConfig) -> Iterator[Session]:
    with Session.open(config) as session:
        yield session


def single(session: Session, prompt: list[int], sampling: SamplingConfig = GREEDY) -> list[int]:
    generation = session.generate(prompt, n_predict=N_PREDICT, sampling=sampling)
    list(generation)
    return generation.tokens


def start(session: Session, **changes: Any) -> ParallelGeneration:
    options: dict[str, Any] = {"prompts": PROMPTS, "n_predict": N_PREDICT, "sampling": GREEDY} | changes
    return session.generate_parallel(options.pop("prompts"), **options)


def check_caches(session: Session, texts: list[list[int]]) -> None:
    """Each sequence holds the beginning of a text; the target's lacks its last token."""
    assert session.draft_context is not None
    for context in (session.target, session.draft_context):
        for sequence in context.sequences:
            held = list(sequence.tokens)
            n_missing = 1 if context is session.target else 0
            assert any(held == text[: len(held)] and len(held) <= len(text) - n_missing for text in texts)
            sequence.resync()
            assert sequence.tokens == held  # llama.cpp's memory agrees


def test_texts_wait_for_a_sequence_and_leave_it(session: Session, alone: list[list[int]]) -> None:
    generation = start(session)
    active: list[int] = []
    for index, record in generation:
        active.append(index)
        assert record.tokens == generation.answers[index].tokens[-len(record.tokens) :]
    assert [answer.tokens for answer in generation.answers] == alone
    firsts = [active.index(i) for i in range(len(PROMPTS))]
    assert firsts == sorted(firsts) and firsts[:2] == [0, 1] and firsts[2] > 2
    check_caches(session, [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, alone, strict=True)])


def test_figures(session: Session) -> None:
    generation = start(session, prompts=PROMPTS[:3], n_predict=20)
    records: list[list[Any]] = [[], [], []]
    for index, record in generation:
        records[index].append(record)
    stats = generation.stats
    for answer, own in zip(generation.answers, records, strict=True):
        assert answer.stats.steps == len(own) - 1 and answer.stats.generated_tokens == len(answer.tokens) == 20
        assert answer.stats.accepted == sum(record.n_accepted for record in own)
        assert answer.stats.drafted == sum(record.n_drafted for record in own)
        assert 0 < answer.stats.prefill_s <= answer.stats.prefill_s + answer.stats.ttft_s
        assert answer.stats.seed is not None
    assert stats.generated_tokens == 3 * 19
    assert stats.prefill_tokens == sum(len(prompt) for prompt in PROMPTS[:3])
    assert sum(n * own.steps for n, own in generation.of_texts.items()) == sum(
        answer.stats.steps for answer in generation.answers
    )
    assert stats.drafted == sum(answer.stats.drafted for answer in generation.answers)
    assert stats.decode_s == pytest.approx(sum(own.decode_s for own in generation.of_texts.values()))
    assert sum(own.generated_tokens for own in generation.of_texts.values()) == 57
    assert 0 < stats.draft_s + stats.verify_s + stats.observe_s <= stats.decode_s
    assert stats.experts_per_verification == 4.0  # all of them


def test_a_stop_token_ends_one_text(session: Session, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    stop = alone[0][10]
    monkeypatch.setattr(session.model, "is_eog", lambda token: token == stop)
    generation = start(session)
    list(generation)
    for answer, tokens in zip(generation.answers, alone, strict=True):
        expected = tokens[: tokens.index(stop)] if stop in tokens else tokens
        assert (answer.tokens, answer.stop_reason) == (expected, "eos" if stop in tokens else "length")
    # stop tokens are decoded, and the first token of each text belongs to its prompt
    n_decoded = sum(max(len(a.tokens) - 1 + (a.stop_reason == "eos"), 0) for a in generation.answers)
    assert generation.stats.generated_tokens == n_decoded


def test_the_text_is_that_of_a_single_run(session: Session) -> None:
    generation = start(session)
    list(generation)
    session.reset()
    for prompt, answer in zip(PROMPTS, generation.answers, strict=True):
        assert "".join(session.generate(prompt, n_predict=N_PREDICT, sampling=GREEDY).pieces()) == answer.text


def test_texts_are_added_and_stopped_between_steps(session: Session, alone: list[list[int]]) -> None:
    generation = start(session, prompts=PROMPTS[:2])
    for _ in range(8):
        next(generation)
    assert generation.add(PROMPTS[2], n_predict=N_PREDICT, sampling=GREEDY) == 2
    assert generation.add(PROMPTS[3], n_predict=5, sampling=GREEDY) == 3
    generation.stop(0)
    stopped = list(generation.answers[0].tokens)
    generation.stop(0)  # again: no effect
    list(generation)
    answers = generation.answers
    assert [answer.stop_reason for answer in answers] == ["interrupted", "length", "length", "length"]
    assert 0 < len(stopped) < N_PREDICT and answers[0].tokens == stopped == alone[0][: len(stopped)]
    assert [answer.tokens for answer in answers[1:]] == [alone[1], alone[2], alone[3][:5]]
    # the iteration goes on with texts that come later, as in a server
    index = generation.add(PROMPTS[0], n_predict=N_PREDICT, sampling=GREEDY)
    assert {text for text, _ in generation} == {index}
    assert answers[index].tokens == alone[0]
    waiting = generation.add(PROMPTS[1], sampling=GREEDY)
    generation.stop(waiting)
    assert list(generation) == [] and answers[waiting].tokens == [] and answers[waiting].stop_reason == "interrupted"


def test_a_text_takes_the_sequence_that_holds_its_beginning(session: Session) -> None:
    first = start(session, prompts=PROMPTS[:2])
    list(first)
    longer = [[*prompt, *answer.tokens, 7] for prompt, answer in zip(PROMPTS[:2], first.answers, strict=True)]
    second = start(session, prompts=longer[::-1])
    list(second)
    assert all(answer.stats.prefill_tokens in (2, 3) for answer in second.answers)


def long_prompt_session(config: EngineConfig, **changes: Any) -> Session:
    """A graph has 16 tokens."""
    return Session.open(replace(config, n_batch=16, n_ubatch=16, **changes))


LONG = RNG.integers(0, 256, 90).tolist()


@pytest.mark.parametrize("ratio", [None, 0.5])
def test_others_go_on_while_a_long_prompt_is_decoded(config: EngineConfig, ratio: float | None) -> None:
    with Session.open(replace(config, n_parallel=1)) as session:
        expected = [single(session, prompt) for prompt in (PROMPTS[1], LONG)]
    placed: dict[str, Any] = {}
    if ratio is not None:
        placement = PlacementConfig(cache_ratio=ratio, calibrate=False)
        placed = {"device": "emulated:threads=1", "placement": placement}
    with long_prompt_session(config, **placed) as session:
        generation = start(session, prompts=[PROMPTS[1], LONG])
        order = [index for index, _ in generation]
        assert order[: order.index(1)] == [0] * (1 + 5)  # its first token, and a step after each of five parts
        assert [answer.tokens for answer in generation.answers] == expected
        stats = generation.answers[1].stats
        assert stats.prefill_tokens == len(LONG) and stats.prefill_s > 0
        assert generation.stats.prefill_tokens == len(LONG) + len(PROMPTS[1])
        assert generation.stats.prefill_s == pytest.approx(sum(a.stats.prefill_s for a in generation.answers))


@pytest.mark.parametrize("at_step", [2, 4, 6])
def test_a_long_prompt_is_cut_off(config: EngineConfig, at_step: int) -> None:
    """Stopped alone, or with all: what was decoded of it is not decoded again."""
    for stops_all in (False, True):
        with long_prompt_session(config) as session:
            generation = start(session, prompts=[PROMPTS[1], LONG])
            for _ in range(at_step):
                next(generation)
            generation.close() if stops_all else generation.stop(1)
            list(generation)
            assert generation.answers[1].stop_reason == "interrupted"
            assert generation.answers[0].stop_reason == ("interrupted" if stops_all else "length")
            check_caches(
                session, [[*PROMPTS[1], *generation.answers[0].tokens], [*LONG, *generation.answers[1].tokens]]
            )
            again = start(session, prompts=[LONG])
            list(again)
            assert again.answers[0].stats.prefill_tokens == max(len(LONG) - 16 * (at_step - 1), 1)


@pytest.mark.parametrize("at_call", range(1, 14))
def test_ctrl_c_at_any_decode(
    session: Session, monkeypatch: pytest.MonkeyPatch, alone: list[list[int]], at_call: int
) -> None:
    """Prompts of either model, drafts, verifications: all KV caches hold accepted text, and the answers go on."""
    with monkeypatch.context() as patch:
        interrupt_decode(patch, at_call)
        generation = start(session)
        list(generation)
    assert {answer.stop_reason for answer in generation.answers} == {"interrupted"}
    assert all(a.tokens == tokens[: len(a.tokens)] for a, tokens in zip(generation.answers, alone, strict=True))
    begun = [[*prompt, *answer.tokens] for prompt, answer in zip(PROMPTS, generation.answers, strict=True)]
    check_caches(session, begun)
    again = start(session)
    list(again)
    assert [answer.tokens for answer in again.answers] == alone


def test_cancel(session: Session, alone: list[list[int]]) -> None:
    records = 0
    generation = start(session, run=Run(cancelled=lambda: records >= 9))
    for _ in generation:
        records += 1
    assert 9 <= records <= 10  # the step's records are all handed out
    assert {answer.stop_reason for answer in generation.answers} == {"interrupted"}
    assert all(a.tokens == tokens[: len(a.tokens)] for a, tokens in zip(generation.answers, alone, strict=True))
    check_caches(session, [[*p, *a.tokens] for p, a in zip(PROMPTS, generation.answers, strict=True)])


def test_closing_early(session: Session, alone: list[list[int]]) -> None:
    generation = start(session)
    for _ in range(7):
        next(generation)
    generation.close()
    assert {answer.stop_reason for answer in generation.answers} == {"interrupted"}
    again = start(session)
    list(again)
    assert [answer.tokens for answer in again.answers] == alone


def test_the_answer_that_began_last_goes_on(session: Session, alone: list[list[int]]) -> None:
    """Earlier answers raise an error when they are continued, and leave the KV caches alone when they are closed."""
    first = session.generate(PROMPTS[0], n_predict=N_PREDICT, sampling=GREEDY)
    steps = iter(first)
    next(steps)
    together = start(session)
    with pytest.raises(EngineError):
        next(steps)
    for _ in range(7):
        next(together)
    first.close()
    last = session.generate(PROMPTS[2], n_predict=N_PREDICT, sampling=GREEDY)
    steps = iter(last)
    next(steps)
    with pytest.raises(EngineError):
        list(together)
    together.close()
    assert {answer.stop_reason for answer in together.answers} == {"interrupted"}
    list(steps)
    assert last.tokens == alone[2]
    assert first.tokens == alone[0][: len(first.tokens)]
    dropped = iter(session.generate(PROMPTS[1], n_predict=N_PREDICT, sampling=GREEDY))
    next(dropped)
    again = start(session)
    list(again)
    assert [answer.tokens for answer in again.answers] == alone


def test_the_context_of_one_text_is_full(config: EngineConfig, alone: list[list[int]]) -> None:
    """The others go on; each text has room of its own, up to the last token."""
    with Session.open(replace(config, n_ctx=64)) as session:
        generation = start(session, n_predict=-1)
        list(generation)
        assert {answer.stop_reason for answer in generation.answers} == {"context"}
        for prompt, answer, tokens in zip(PROMPTS, generation.answers, alone, strict=True):
            assert len(prompt) + len(answer.tokens) == 65 and answer.notes
            n = min(len(tokens), len(answer.tokens))
            assert answer.tokens[:n] == tokens[:n]


def test_shifting_one_text(tiny: TinyFactory) -> None:
    path = tiny("qwen3moe", layers=1, experts=4, used=4, expert_type="F32")
    options = EngineConfig(model=path, n_ctx=64, n_threads=1, n_parallel=2, context_shift=True, device="none")
    with Session.open(options) as session:
        generation = start(session, prompts=PROMPTS[:2], n_predict=100)
        list(generation)
        assert all(len(answer.tokens) == 100 and answer.notes for answer in generation.answers)
        expected = [answer.tokens for answer in generation.answers]
    with Session.open(replace(options, n_parallel=1)) as session:
        for prompt, tokens in zip(PROMPTS[:2], expected, strict=True):
            generated = session.generate(prompt, n_predict=100, sampling=GREEDY)
            list(generated)
            assert generated.tokens == tokens


@contextmanager
def failing(at_call: int) -> Iterator[None]:
    """The `at_call`-th decode of any context fails as if a GPU had run out of memory."""
    real, calls = Decoder.__call__, 0

    def decode(self: Decoder, batch: Any, *, wait: bool) -> int:
        nonlocal calls
        calls += 1
        return -3 if calls == at_call else real(self, batch, wait=wait)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "__call__", decode)
        yield


@pytest.mark.parametrize("n_ubatch", [512, 16])
@pytest.mark.parametrize("at_call", [1, 2, 3, 4, 5, 7, 8, 12])
def test_the_answers_go_on_without_a_gpu(config: EngineConfig, at_call: int, n_ubatch: int) -> None:
    """Text by text with the same random numbers; texts that wait start on the CPU. 16: prompts have several graphs."""
    with Session.open(replace(config, n_parallel=1)) as session:
        expected = [single(session, prompt, RANDOM) for prompt in PROMPTS]
    with Session.open(replace(config, cpu_fallback=True, n_ubatch=n_ubatch)) as session:
        for context in (session.target, session.draft_context):
            assert context is not None
            context.model.uses_gpu = True
        with failing(at_call):
            generation = start(session, sampling=RANDOM)
            list(generation)
        assert not session.model.uses_gpu
        assert [answer.tokens for answer in generation.answers] == expected


def test_refusals(config: EngineConfig, session: Session, tmp_path: Path) -> None:
    with pytest.raises(EmptyPromptError):
        start(session, prompts=[[1], []])
    with pytest.raises(ContextTooSmallError):
        start(session, prompts=[[1], [1] * 256])
    with pytest.raises(ValueError, match="zip"):
        start(session, sampling=[GREEDY])
    for bad in ({"n_parallel": 0}, {"n_parallel": 65}, {"n_parallel": -1}):
        with pytest.raises(ValueError, match="n_parallel"):
            replace(config, **bad)
    with pytest.raises(ValueError, match="64 texts"):
        replace(config, n_parallel=64, n_ctx=2**20)
    with pytest.raises(InputError, match="several texts"):
        Session.open(EngineConfig(model=make_mamba(tmp_path / "mamba.gguf"), n_parallel=2, device="none"))


def test_texts_share_the_context_of_models_larger_than_ram(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeedge.llama.model_memory.DEFAULT_N_CTX", 1024)
    with Session.open(replace(config, n_ctx=0, ram=1 << 24, draft=None, gamma=0)) as session:
        assert session.info.n_ctx == session.target.n_ctx == 512


def test_no_prompts(session: Session) -> None:
    generation = start(session, prompts=[])
    assert list(generation) == [] and generation.stats.tg_ts == 0 and generation.stats.acceptance_rate is None


def test_lengths_by_measured_cost_are_for_one_text(config: EngineConfig) -> None:
    """The governor chooses one length per step."""
    with Session.open(config) as session, pytest.raises(ValueError, match="one text"):
        session.set_draft_length("auto")
