"""A GPU fails in mid-answer: the answer goes on from the CPU, with the tokens that it would have had.

The models here are on the CPU and only say that they use a GPU; what fails is the n-th call of llama_decode.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.errors import DeviceFailedError, EngineError, ModelFileError
from moeedge.llama.model import Model
from moeedge.policies.expert_budget import Coverage, ExpertBudget
from moeedge.run import Run, is_warning
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.stats import StepRecord
from tests.conftest import TinyFactory
from tests.support.interruption import failing, pretend_gpu
from tests.support.sessions import GREEDY, answered

PROMPT = [1, *range(5, 25)]
N_PREDICT = 24
RANDOM = SamplingConfig(temperature=1, top_k=0, top_p=1, min_p=0, seed=3)
GRAMMAR = "root ::= [a-z ]+"
CACHED: dict[str, Any] = {
    "device": "emulated",
    "placement": PlacementConfig(cache_ratio=0.5, calibrate=False, policy="lru"),
}
# target, draft; heads of the target's own file, and those in a file of their own that use the target's embeddings
PAIRS: dict[str, tuple[str, dict[str, int], str | None]] = {
    "model": ("qwen3moe", {}, "qwen3"),
    "none": ("qwen3moe", {}, None),
    "ngram": ("qwen3moe", {}, "ngram"),
    "mtp": ("glm4moe", {"mtp": 1}, "mtp"),
    "chain": ("hy_v3", {"mtp": 2}, "mtp"),
    "eagle3": ("qwen3moe", {}, "eagle3"),
    "dflash": ("qwen3moe", {}, "dflash"),
}
CASES = [("model", at_call, code) for at_call in (1, 2, 3, 5, 6, 7, 12) for code in (-3, None)]
CASES += [("none", 4, -2), ("ngram", 4, -2)]
CASES += [(kind, at_call, code) for kind in list(PAIRS)[3:] for at_call in (1, 2, 3, 6, 9) for code in (-3, None)]


@pytest.fixture
def config(pair: tuple[Path, Path]) -> EngineConfig:
    return EngineConfig(model=pair[0], draft=pair[1], n_ctx=256, n_threads=1, cpu_fallback=True, device="none")


def answer(session: Session, sampling: SamplingConfig = GREEDY) -> list[int]:
    generation = session.generate(PROMPT, n_predict=N_PREDICT, sampling=sampling, ignore_eos=True)
    list(generation.pieces())
    return generation.tokens


@pytest.mark.parametrize(("kind", "at_call", "code"), CASES)
def test_the_answer_goes_on_with_the_same_tokens(
    config: EngineConfig, tiny: TinyFactory, kind: str, at_call: int, code: int | None
) -> None:
    """Prompt, draft's prompt, drafts and verifications of the first steps."""
    arch, dimensions, draft = PAIRS[kind]
    source: Any = draft if draft in (None, "ngram", "mtp") else tiny(draft)
    config = replace(config, model=tiny(arch, **dimensions), draft=source)
    told: list[str] = []
    with Session.open(config, run=Run(told.append)) as session:
        expected = answer(session)
        session.reset()
        pretend_gpu(session)
        with failing(at_call, code):
            assert answer(session) == expected
        assert len(told) == 1 and is_warning(told[0])
        assert told[0] in session.info.notes
        assert not session.model.uses_gpu
        again = answered(session, PROMPT, N_PREDICT)  # the next answer has its KV cache
        assert again.tokens == expected and (again.stats.drafted > 0 or draft in (None, "ngram"))
        assert session.target.n_past >= len(PROMPT)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"grammar": GRAMMAR},
        {"temperature": 0, "grammar": GRAMMAR},
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
        with failing(at_call):
            assert answer(session, sampling) == expected


@pytest.mark.parametrize("code", [-3, None])
def test_placement_ends_and_its_figures_stay(config: EngineConfig, code: int | None) -> None:
    with Session.open(replace(config, **CACHED)) as session:
        expected = answer(session)
        session.reset()
        pretend_gpu(session)
        with failing(15, code):
            assert answer(session) == expected
        stats = session.placement_stats()
        assert stats.lost and stats.state == "fallen back"
        info = session.info
        assert (info.device, info.policy) == ("none", "none")
        assert (info.n_whole_layers, info.cache_slots, info.pool_bytes, info.cache_ratio) == (0, 0, 0, 0)
        assert answer(session) == expected
        assert (session.placement_stats() - stats).pairs == 0
        assert len([note for note in session.info.notes if "goes on" in note]) == 1


@pytest.mark.parametrize("coverage", ["substitution", "truncation"])
@pytest.mark.parametrize("code", [-3, None])
def test_the_expert_budget_stays(config: EngineConfig, code: int | None, coverage: Coverage) -> None:
    budget = ExpertBudget(budget=4, coverage=coverage)
    with Session.open(replace(config, expert_budget=budget, **CACHED)) as session:
        pretend_gpu(session)
        steps: list[StepRecord] = []
        session.observers.append(lambda record, _session: steps.append(record))
        with failing(15, code) as calls:
            answer(session)
        assert len(calls) > 15 and not session.model.uses_gpu
        assert session.info.expert_budget is budget
        steps.clear()
        answer(session)
        verified = [step for step in steps if step.n_verified > 1]
        assert verified and all(0 < step.experts_max <= 4 for step in verified)
        assert max(step.experts_natural for step in verified) > 4


def test_a_failure_of_the_cpu_is_an_error(config: EngineConfig) -> None:
    with Session.open(config) as session, failing(3), pytest.raises(EngineError) as caught:
        answer(session)
    assert not isinstance(caught.value, DeviceFailedError)


@pytest.mark.parametrize("falls_back", [False, True])
def test_answers_that_cannot_go_on(config: EngineConfig, falls_back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements do not fall back, and a model may be gone: an error, and again for the next answer."""

    def missing(*_arguments: object, **_options: object) -> Model:
        raise ModelFileError("gone")

    with Session.open(replace(config, cpu_fallback=falls_back)) as session:
        pretend_gpu(session)
        monkeypatch.setattr(Model, "load", missing)
        with failing(3, None), pytest.raises(ModelFileError if falls_back else DeviceFailedError):
            answer(session)
        with pytest.raises(EngineError):  # the context is gone, which must not end the process
            answer(session)
