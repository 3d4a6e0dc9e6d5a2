"""A GPU fails in mid-answer: the answer goes on from the CPU, with the tokens that it would have had.

The models here are on the CPU and only say that they use a GPU; what fails is the n-th call of llama_decode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from moeedge.engine.grammar import GrammarSampler
from moeedge.engine.head_draft import HeadDraft
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.errors import DeviceFailedError, EngineError, ModelFileError
from moeedge.llama.model import Model
from moeedge.native.compute import Decoder, DriverThrewError
from moeedge.policies.expert_budget import Coverage, ExpertBudget
from moeedge.run import Notification, Run, is_warning
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.stats import StepRecord
from tests.conftest import TinyFactory

PROMPT = [1, *range(5, 25)]
N_PREDICT = 24
GREEDY = SamplingConfig(temperature=0)
RANDOM = SamplingConfig(temperature=1, top_k=0, top_p=1, min_p=0, seed=3)


@pytest.fixture
def config(tiny: TinyFactory) -> EngineConfig:
    return EngineConfig(
        model=tiny("qwen3moe"), draft=tiny("qwen3"), n_ctx=256, n_threads=1, cpu_fallback=True, device="none"
    )


@contextmanager
def failing(at_call: int, code: int | None) -> Iterator[list[int]]:
    """The `at_call`-th decode of any context fails with a result of llama_decode, None: with the driver's exception."""
    calls: list[int] = []
    real = Decoder.__call__

    def decode(self: Decoder, batch: Any, *, wait: bool) -> int:
        calls.append(int(batch.n_tokens))
        if len(calls) == at_call:
            if code is None:
                raise DriverThrewError("vk::Queue::submit: ErrorDeviceLost")
            return code
        return real(self, batch, wait=wait)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "__call__", decode)
        yield calls


def pretend_gpu(session: Session) -> None:
    for context in (session.target, session.draft_context):
        if context is not None:
            context.model.uses_gpu = True


def answer(session: Session, sampling: SamplingConfig = GREEDY) -> list[int]:
    generation = session.generate(PROMPT, n_predict=N_PREDICT, sampling=sampling, ignore_eos=True)
    list(generation.pieces())
    return generation.tokens


@pytest.mark.parametrize("at_call", [1, 2, 3, 5, 6, 7, 12])
@pytest.mark.parametrize("code", [-3, None])
def test_the_answer_goes_on_with_the_same_tokens(config: EngineConfig, at_call: int, code: int | None) -> None:
    """Prompt, draft's prompt, drafts and verifications of the first steps."""
    with Session.open(config) as session:
        expected = answer(session)
    told: list[str] = []
    with Session.open(config, run=Run(told.append)) as session:
        pretend_gpu(session)
        with failing(at_call, code):
            assert answer(session) == expected
        assert len(told) == 1 and is_warning(told[0])
        assert told[0] in session.info.notes
        assert not session.model.uses_gpu
        assert answer(session) == expected  # the next answer has its KV cache
        assert session.target.n_past >= len(PROMPT)


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_without_a_draft_model(config: EngineConfig, draft: Any) -> None:
    config = replace(config, draft=draft)
    with Session.open(config) as session:
        expected = answer(session)
        pretend_gpu(session)
        session.reset()
        with failing(4, -2):
            assert answer(session) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"grammar": "root ::= [a-z ]+"},
        {"temperature": 0, "grammar": "root ::= [a-z ]+"},
        {"dry_multiplier": 2.0, "frequency_penalty": 0.5, "samplers": ("dry", "penalties", "infill", "temperature")},
    ],
    ids=["", "grammar", "greedy grammar", "chain"],
)
@pytest.mark.parametrize("at_call", [3, 9])
def test_random_numbers_are_drawn_again(config: EngineConfig, changes: dict[str, Any], at_call: int) -> None:
    """Grammars and filters read the vocabulary of a model that is gone then."""
    sampling = replace(RANDOM, **changes)
    with Session.open(config) as session:
        expected = answer(session, sampling)
        session.reset()
        pretend_gpu(session)
        with failing(at_call, -3):
            assert answer(session, sampling) == expected


def test_texts_that_wait_read_the_vocabulary_of_the_new_model(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their grammars would go on with that of a model that is freed."""
    used: dict[GrammarSampler, Model] = {}
    real = GrammarSampler.use

    def use(self: GrammarSampler, model: Model) -> None:
        used[self] = model
        real(self, model)

    monkeypatch.setattr(GrammarSampler, "use", use)
    sampling = replace(GREEDY, grammar="root ::= [a-z ]+")
    prompts = [PROMPT, PROMPT[3:], PROMPT[5:], PROMPT[2:]]
    with Session.open(replace(config, n_parallel=2)) as session:
        expected: list[list[int]] = []
        for at_call in (0, 6):
            session.reset()
            used.clear()
            with failing(at_call, -3):
                pretend_gpu(session)
                answers = session.generate_parallel(prompts, n_predict=N_PREDICT, sampling=sampling, ignore_eos=True)
                list(answers)
            found = [each.tokens for each in answers.answers]
            assert at_call == 0 or found == expected
            expected = found
        assert len(used) == len(prompts)
        assert all(model is session.model for model in used.values())


@pytest.mark.parametrize("code", [-3, None])
def test_placement_ends_and_its_figures_stay(config: EngineConfig, code: int | None) -> None:
    placement = PlacementConfig(cache_ratio=0.5, calibrate=False, policy="lru")
    config = replace(config, device="emulated", placement=placement)
    with Session.open(config) as session:
        expected = answer(session)
        session.reset()
        pretend_gpu(session)
        with failing(15, code):
            assert answer(session) == expected
        stats = session.placement_stats()
        assert stats is not None and stats.lost
        info = session.info
        assert (info.device, info.policy, info.layers) == ("none", "none", "")
        assert (info.n_whole_layers, info.cache_slots, info.pool_bytes, info.cache_ratio) == (0, 0, 0, 0)
        assert answer(session) == expected
        after = session.placement_stats()
        assert after is not None and (after - stats).pairs == 0
        assert len([note for note in session.info.notes if "goes on" in note]) == 1


@pytest.mark.parametrize("coverage", ["substitution", "truncation"])
@pytest.mark.parametrize("code", [-3, None])
def test_the_expert_budget_stays(config: EngineConfig, code: int | None, coverage: Coverage) -> None:
    budget = ExpertBudget(budget=4, coverage=coverage)
    placement = PlacementConfig(cache_ratio=0.5, calibrate=False, policy="lru")
    config = replace(config, device="emulated", placement=placement, expert_budget=budget)
    with Session.open(config) as session:
        pretend_gpu(session)
        steps: list[StepRecord] = []
        session.observers.append(lambda record, _session: steps.append(record))
        with failing(15, code) as calls:
            answer(session)
        assert len(calls) > 15 and not session.model.uses_gpu
        assert session.info.expert_budget is budget
        n_before = len(steps)
        answer(session)
        verified = [step for step in steps[n_before:] if step.n_verified > 1]
        assert verified and all(0 < step.experts_max <= 4 for step in verified)
        assert max(step.experts_natural for step in verified) > 4


def test_a_failure_of_the_cpu_is_an_error(config: EngineConfig) -> None:
    with Session.open(config) as session, failing(3, -3), pytest.raises(EngineError) as caught:
        answer(session)
    assert not isinstance(caught.value, DeviceFailedError)


@pytest.mark.parametrize("pays", [True, False])
def test_a_cache_that_does_not_pay_ends_once_that_was_measured(config: EngineConfig, pays: bool) -> None:
    placement = PlacementConfig(cache_ratio=0.5, calibrate=False, policy="lru")
    said: list[Notification] = []
    with Session.open(replace(config, device="emulated", placement=placement), run=Run(said.append)) as session:
        assert session.placement is not None

        def measured(run: Run) -> tuple[None, bool]:
            run.warn("The cache makes steps slower.")
            return None, pays

        session.placement.postponed = measured  # type: ignore[assignment]
        session.measure_postponed(Run())
        assert (session.placement is not None) == pays == (session.info.device != "none")
        assert any(is_warning(note) for note in said) != pays


def test_measurements_do_not_go_on(config: EngineConfig) -> None:
    with Session.open(replace(config, cpu_fallback=False)) as session:
        pretend_gpu(session)
        with failing(3, None), pytest.raises(DeviceFailedError):
            answer(session)
        with pytest.raises(EngineError):  # the context is gone, which must not end the process
            answer(session)


def test_a_model_that_is_gone_is_an_error(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_arguments: object, **_options: object) -> Model:
        raise ModelFileError("gone")

    with Session.open(config) as session:
        pretend_gpu(session)
        monkeypatch.setattr(Model, "load", missing)
        with failing(5, -3), pytest.raises(ModelFileError):
            answer(session)
        with pytest.raises(EngineError):
            answer(session)


@pytest.mark.parametrize("at_call", [1, 2, 3, 6, 9])
@pytest.mark.parametrize("code", [-3, None])
@pytest.mark.parametrize("kind", ["mtp", "chain", "eagle3", "dflash"])
def test_with_a_draft_head(config: EngineConfig, tiny: TinyFactory, kind: str, at_call: int, code: int | None) -> None:
    """Heads of the target's own file, and those in a file of their own that use the target's embeddings."""
    own = {"mtp": "glm4moe", "chain": "hy_v3"}.get(kind)
    if own is not None:
        config = replace(config, model=tiny(own, mtp=1 + (kind == "chain")), draft="mtp")
    else:
        config = replace(config, draft=tiny(kind))
    with Session.open(config) as session:
        expected = answer(session)
        session.reset()
        pretend_gpu(session)
        assert isinstance(session.draft, HeadDraft)
        session.draft.context.model.uses_gpu = True
        with failing(at_call, code):
            assert answer(session) == expected
        assert not session.model.uses_gpu
        generation = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY, ignore_eos=True)
        list(generation)
        assert generation.tokens == expected and generation.stats.drafted > 0
