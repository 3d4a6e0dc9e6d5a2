"""Texts that share a batch: joining and leaving, interruption, limits, what is reported and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.engine.answer import ParallelGeneration
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.errors import ContextTooSmallError, EmptyPromptError, EngineError, InputError
from moeedge.run import Run
from tests.conftest import TinyFactory
from tests.support.interruption import failing, interrupt_decode, pretend_gpu
from tests.support.recurrent import make_mamba
from tests.support.sessions import GREEDY, answered

RANDOM = SamplingConfig(temperature=1, top_k=0, top_p=1, min_p=0, seed=3)
LETTERS = replace(RANDOM, grammar="root ::= [a-z ]+")
RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(0, 256, n).tolist() for n in (24, 5, 11, 40)]
N_PREDICT = 30
Tokens = list[list[int]]


@pytest.fixture(scope="module")
def config(tiny: TinyFactory) -> EngineConfig:
    # all experts are used and of float32: a batch's size turns no router around, so that tokens compare exactly
    path = tiny("qwen3moe", experts=4, used=4, expert_type="F32")
    return EngineConfig(model=path, draft=tiny("qwen3"), gamma=3, n_ctx=256, n_threads=1, n_parallel=2, device="none")


def single(config: EngineConfig, prompts: Tokens = PROMPTS, n_predict: int = N_PREDICT, **options: Any) -> Tokens:
    """The answers of single runs."""
    with Session.open(replace(config, n_parallel=1)) as session:
        return [answered(session, prompt, n_predict, ignore_eos=False, **options).tokens for prompt in prompts]


@pytest.fixture(scope="module")
def alone(config: EngineConfig) -> Tokens:
    return single(config)


@pytest.fixture(scope="module")
def drawn(config: EngineConfig) -> dict[SamplingConfig, Tokens]:
    return {sampling: single(config, sampling=sampling) for sampling in (RANDOM, LETTERS)}


@pytest.fixture
def session(config: EngineConfig) -> Iterator[Session]:
    with Session.open(config) as session:
        yield session


def start(session: Session, prompts: Tokens = PROMPTS, **changes: Any) -> ParallelGeneration:
    return session.generate_parallel(prompts, **{"n_predict": N_PREDICT, "sampling": GREEDY} | changes)


def finished(session: Session, prompts: Tokens = PROMPTS, **changes: Any) -> ParallelGeneration:
    generation = start(session, prompts, **changes)
    list(generation)
    return generation


def tokens_of(generation: ParallelGeneration) -> Tokens:
    return [answer.tokens for answer in generation.answers]


def reasons_of(generation: ParallelGeneration) -> set[str | None]:
    return {answer.stop_reason for answer in generation.answers}


def check_caches(session: Session, generation: ParallelGeneration, prompts: Tokens = PROMPTS) -> None:
    """Each sequence holds the beginning of a text; the target's lacks its last token."""
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, tokens_of(generation), strict=True)]
    for context in (session.target, session.draft_context):
        for sequence in context.sequences:
            held = list(sequence.tokens)
            n_missing = 1 if context is session.target else 0
            assert any(held == text[: len(held)] and len(held) <= len(text) - n_missing for text in texts)
            sequence.resync()
            assert sequence.tokens == held  # llama.cpp's memory agrees


def check_interrupted(session: Session, generation: ParallelGeneration, alone: Tokens) -> None:
    """What was said is the beginning of the answers; the caches hold it, and the next answers are whole."""
    assert reasons_of(generation) == {"interrupted"}
    assert all(a.tokens == tokens[: len(a.tokens)] for a, tokens in zip(generation.answers, alone, strict=True))
    check_caches(session, generation)
    assert tokens_of(finished(session)) == alone


def test_texts_wait_for_a_sequence_and_leave_it(session: Session, alone: Tokens) -> None:
    generation = start(session)
    active: list[int] = []
    for index, record in generation:
        active.append(index)
        assert record.tokens == generation.answers[index].tokens[-len(record.tokens) :]
    assert tokens_of(generation) == alone
    firsts = [active.index(i) for i in range(len(PROMPTS))]
    assert firsts == sorted(firsts) and firsts[:2] == [0, 1] and firsts[2] > 2
    check_caches(session, generation)
    session.reset()
    for prompt, answer in zip(PROMPTS, generation.answers, strict=True):
        assert "".join(session.generate(prompt, n_predict=N_PREDICT, sampling=GREEDY).pieces()) == answer.text


def test_figures(session: Session) -> None:
    generation = start(session, PROMPTS[:3], n_predict=20)
    records: list[list[Any]] = [[], [], []]
    for index, record in generation:
        records[index].append(record)
    stats, of_texts = generation.stats, generation.of_texts
    for answer, own in zip(generation.answers, records, strict=True):
        assert answer.stats.steps == len(own) - 1 and answer.stats.generated_tokens == len(answer.tokens) == 20
        assert answer.stats.accepted == sum(record.n_accepted for record in own)
        assert answer.stats.drafted == sum(record.n_drafted for record in own)
        assert 0 < answer.stats.prefill_s <= answer.stats.prefill_s + answer.stats.ttft_s
        assert answer.stats.seed is not None
    assert stats.generated_tokens == 3 * 19
    assert stats.prefill_tokens == sum(len(prompt) for prompt in PROMPTS[:3])
    n_steps = sum(answer.stats.steps for answer in generation.answers)
    assert sum(n * own.steps for n, own in of_texts.items()) == n_steps
    assert stats.drafted == sum(answer.stats.drafted for answer in generation.answers)
    assert stats.decode_s == pytest.approx(sum(own.decode_s for own in of_texts.values()))
    assert sum(own.generated_tokens for own in of_texts.values()) == 57
    assert 0 < stats.draft_s + stats.verify_s + stats.observe_s <= stats.decode_s
    assert stats.experts_per_verification == 4.0  # all of them
    nothing = finished(session, [])
    assert nothing.stats.tg_ts == 0 and nothing.stats.acceptance_rate is None


def test_a_stop_token_ends_one_text(session: Session, alone: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = alone[0][10]
    monkeypatch.setattr(session.model, "is_eog", lambda token: token == stop)
    generation = finished(session)
    for answer, tokens in zip(generation.answers, alone, strict=True):
        expected = tokens[: tokens.index(stop)] if stop in tokens else tokens
        assert (answer.tokens, answer.stop_reason) == (expected, "eos" if stop in tokens else "length")
    # stop tokens are decoded, and the first token of each text belongs to its prompt
    n_decoded = sum(max(len(a.tokens) - 1 + (a.stop_reason == "eos"), 0) for a in generation.answers)
    assert generation.stats.generated_tokens == n_decoded


def test_texts_are_added_and_stopped_between_steps(session: Session, alone: Tokens) -> None:
    generation = start(session, PROMPTS[:2])
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
    first = tokens_of(finished(session, PROMPTS[:2]))
    longer = [[*prompt, *tokens, 7] for prompt, tokens in zip(PROMPTS[:2], first, strict=True)]
    second = finished(session, longer[::-1])
    assert all(answer.stats.prefill_tokens in (2, 3) for answer in second.answers)


@pytest.mark.parametrize("at_call", range(1, 14))
def test_ctrl_c_at_any_decode(session: Session, monkeypatch: pytest.MonkeyPatch, alone: Tokens, at_call: int) -> None:
    """Prompts of either model, drafts, verifications."""
    with monkeypatch.context() as patch:
        interrupt_decode(patch, at_call)
        generation = finished(session)
    check_interrupted(session, generation, alone)


def test_cancel_and_closing_early(session: Session, alone: Tokens) -> None:
    records = 0
    generation = start(session, run=Run(cancelled=lambda: records >= 9))
    for _ in generation:
        records += 1
    assert 9 <= records <= 10  # the step's records are all handed out
    check_interrupted(session, generation, alone)
    session.reset()
    generation = start(session)
    for _ in range(7):
        next(generation)
    generation.close()
    check_interrupted(session, generation, alone)


def test_the_answer_that_began_last_goes_on(session: Session, alone: Tokens) -> None:
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
    assert reasons_of(together) == {"interrupted"}
    list(steps)
    assert last.tokens == alone[2]
    assert first.tokens == alone[0][: len(first.tokens)]
    dropped = iter(session.generate(PROMPTS[1], n_predict=N_PREDICT, sampling=GREEDY))
    next(dropped)
    assert tokens_of(finished(session)) == alone


def test_one_draft_length_is_chosen_for_all_texts(session: Session, alone: Tokens) -> None:
    """By what all their tokens cost, with the texts that are left; the answers stay."""
    session.set_draft_length("auto")
    try:
        observed = []
        assert session.governor is not None
        observe = session.governor.observe
        session.governor.observe = lambda step: (observed.append(step), observe(step))  # type: ignore[method-assign]
        generation = start(session, n_predict=N_PREDICT)
        steps = [record for _, record in generation if record.n_verified]
        assert tokens_of(generation) == alone
    finally:
        session.set_draft_length(session.config.gamma)
    assert {1 + len(step.others) for step in observed} >= {session.config.n_parallel}
    assert all(step.choice for step in steps)
    assert sum(1 + len(step.others) for step in observed) == len(steps)
    # joining texts leave no step unmeasured but the first, and the last choice knows nothing of its own
    assert steps[-1].choice is not None and steps[-1].choice.n_measured >= len(observed) - 3
    assert sum(n for step in observed for n in (step.n_drafted, *(n for n, _ in step.others))) == sum(
        step.n_drafted for step in steps
    )


def test_the_context_of_one_text_is_full(config: EngineConfig, alone: Tokens) -> None:
    """The others go on; each text has room of its own, up to the last token."""
    with Session.open(replace(config, n_ctx=64)) as session:
        generation = finished(session, n_predict=-1)
        assert reasons_of(generation) == {"context"}
        for prompt, answer, tokens in zip(PROMPTS, generation.answers, alone, strict=True):
            assert len(prompt) + len(answer.tokens) == 65 and answer.notes
            n = min(len(tokens), len(answer.tokens))
            assert answer.tokens[:n] == tokens[:n]


def test_shifting_one_text(tiny: TinyFactory) -> None:
    path = tiny("qwen3moe", layers=1, experts=4, used=4, expert_type="F32")
    options = EngineConfig(model=path, n_ctx=64, n_threads=1, n_parallel=2, context_shift=True, device="none")
    with Session.open(options) as session:
        generation = finished(session, PROMPTS[:2], n_predict=100)
        assert all(len(answer.tokens) == 100 and answer.notes for answer in generation.answers)
    assert tokens_of(generation) == single(options, PROMPTS[:2], 100)


@pytest.mark.parametrize(("n_ubatch", "sampling"), [(512, RANDOM), (16, RANDOM), (512, LETTERS)])
@pytest.mark.parametrize("at_call", [1, 2, 3, 4, 5, 7, 8, 12])
def test_the_answers_go_on_without_a_gpu(
    config: EngineConfig, drawn: dict[SamplingConfig, Tokens], at_call: int, n_ubatch: int, sampling: SamplingConfig
) -> None:
    """Text by text with the same random numbers; texts that wait start on the CPU, with the new model's vocabulary.

    n_ubatch 16: prompts have several graphs.
    """
    with Session.open(replace(config, cpu_fallback=True, n_ubatch=n_ubatch)) as session:
        pretend_gpu(session)
        with failing(at_call):
            generation = finished(session, sampling=sampling)
        assert not session.model.uses_gpu
        assert tokens_of(generation) == drawn[sampling]


@pytest.mark.parametrize("sampling", [RANDOM, LETTERS])
@pytest.mark.parametrize("at_call", range(1, 8))
def test_the_others_go_on_after_an_error_in_one_text(
    session: Session, drawn: dict[SamplingConfig, Tokens], at_call: int, sampling: SamplingConfig
) -> None:
    """As where a grammar allows no token, when another text has accepted its own."""
    generation = start(session, sampling=sampling)
    sampler, calls = generation.answers[1].state.sampler, count(1)
    accept = sampler.accept

    def failing_once(*arguments: Any) -> Any:
        if next(calls) == at_call:
            raise EngineError("no token is left")
        return accept(*arguments)

    sampler.accept = failing_once  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="no token"):
        list(generation)
    generation.stop(1)
    list(generation)
    assert tokens_of(generation)[0] == drawn[sampling][0] and tokens_of(generation)[2:] == drawn[sampling][2:]


def test_refusals(config: EngineConfig, session: Session, tmp_path: Path) -> None:
    with pytest.raises(EmptyPromptError):
        start(session, [[1], []])
    with pytest.raises(ContextTooSmallError):
        start(session, [[1], [1] * 256])
    with pytest.raises(ValueError, match="zip"):
        start(session, sampling=[GREEDY])
    for bad in (0, 65, -1):
        with pytest.raises(ValueError, match="n_parallel"):
            replace(config, n_parallel=bad)
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
