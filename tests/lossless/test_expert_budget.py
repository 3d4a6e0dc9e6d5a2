"""An expert budget in whole sessions: the cap holds in every layer, on every division between GPU and CPU.

tests/native/test_expert_budget.py compares the shortlists with their definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.native.abi import Phase
from moeedge.native.cache import ExpertCache
from moeedge.policies.expert_budget import Coverage, ExpertBudget
from moeedge.scheduler.stats import StepRecord
from tests.conftest import TinyFactory
from tests.support.cases import case_model
from tests.support.counting import DEVICE, CountingDevice
from tests.support.hybrid import MANY_EXPERTS, assert_answers, greedy_answer, hybrid_config
from tests.support.stock import StockContext

ALL = 99
BUDGET = 6
PROMPT = np.random.default_rng(5).integers(0, 256, 40).tolist()
DRAFTED = np.random.default_rng(6).integers(0, 256, 9).tolist()
N_PREDICT = 24
COVERAGES = pytest.mark.parametrize("coverage", ["substitution", "truncation"])
CASES = pytest.mark.parametrize("case", ["qwen3moe", "deepseek3", "gpt-oss"])


def check_cap(config: EngineConfig, coverage: Coverage) -> None:
    """The most experts of a layer in the verifications of an answer, as reported and as our backend counted."""
    steps: list[StepRecord] = []
    counted: list[int] = []
    with Session.open(replace(config, expert_budget=ExpertBudget(budget=BUDGET, coverage=coverage))) as session:

        def observe(record: StepRecord, session: Session) -> None:
            if record.n_verified > 1:
                assert session.counts is not None
                steps.append(record)
                counted.append(int(np.count_nonzero(session.counts, axis=1).max()))

        session.observers.append(observe)
        assert len(greedy_answer(session, PROMPT, N_PREDICT)) == N_PREDICT
    assert steps and max(counted) <= BUDGET
    assert all(step.experts_max <= BUDGET and step.kept_probability is not None for step in steps)
    assert max(step.experts_natural for step in steps) > BUDGET  # else there was nothing to do
    assert min(step.kept_probability or 1.0 for step in steps) < 1.0


@COVERAGES
@CASES
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_no_layer_uses_more(ratio: float, case: str, coverage: Coverage, tiny: TinyFactory, tiny_draft: Path) -> None:
    check_cap(hybrid_config(case_model(tiny, case, experts=MANY_EXPERTS), tiny_draft, ratio), coverage)


@COVERAGES
@pytest.mark.parametrize("n_gpu_layers", [1, ALL])
def test_beside_a_gpu(
    n_gpu_layers: int, coverage: Coverage, many: Path, tiny_draft: Path, counting: CountingDevice
) -> None:
    """The router is computed on the GPU, the experts in part on each."""
    check_cap(replace(hybrid_config(many, tiny_draft, 0.5, device=DEVICE), n_gpu_layers=n_gpu_layers), coverage)
    counting.check()


@contextmanager
def budget_context(path: Path, coverage: Coverage | None, **load: Any) -> Iterator[Context]:
    """A context that has decoded the prompt; load: of the model."""
    with Model.load(path, **load) as model, Context(model, n_ctx=128, n_threads=1, has_budget=True) as context:
        if coverage is not None:
            context.set_budget(ExpertBudget(budget=BUDGET, coverage=coverage))
        context.decode(PROMPT, phase=Phase.PREFILL, logits="none")
        yield context


def verify(context: Context) -> np.ndarray:
    return context.decode(DRAFTED, phase=Phase.VERIFY, logits="all").copy()


@COVERAGES
@CASES
def test_a_gpu_computes_the_same(case: str, coverage: Coverage, tiny: TinyFactory, counting: CountingDevice) -> None:
    """All layers whole on the GPU: our backend sees no block, the budget acts all the same."""
    path = case_model(tiny, case, experts=MANY_EXPERTS)
    rows = []
    for gpu in ({}, {"n_gpu_layers": ALL, "experts_on_cpu": True, "n_cpu_moe": 0, "device": DEVICE}):
        with budget_context(path, coverage, **gpu) as context:
            rows.append(verify(context))
            assert context.budget is not None
            layers = context.budget.read()[list(context.model.info.expert_layers)]
            assert (layers["batches"] == 1).all() and (layers["unique_max"] <= BUDGET).all()
            assert layers["unique_natural"].max() > BUDGET
    assert np.abs(rows[0] - rows[1]).max() < 0.05 * rows[0].std()


def test_the_budget_changes_between_answers(many: Path, tiny_draft: Path, stock: StockContext) -> None:
    """Off and on again; stock mode has none."""
    budget = ExpertBudget(budget=BUDGET)
    with Session.open(replace(hybrid_config(many, tiny_draft, 0.0), expert_budget=budget)) as session:
        limited = greedy_answer(session, PROMPT, N_PREDICT)
        session.set_expert_budget(None)
        assert_answers(session, stock, PROMPT, N_PREDICT, what="off again")
        session.set_expert_budget(budget)
        assert greedy_answer(session, PROMPT, N_PREDICT) == limited
        assert session.target.budget is not None
        session.target.budget.read()
        session.set_mode("stock")
        assert_answers(session, stock, PROMPT, N_PREDICT, what="stock")
        assert not session.target.budget.read()["batches"].any()
        session.set_mode("moeedge")
        assert greedy_answer(session, PROMPT, N_PREDICT) == limited


@pytest.mark.parametrize("case", ["qwen3moe", "qwen3moe-f32", "deepseek3", "gpt-oss", "llama4"])
def test_truncated_experts_are_not_computed(case: str, tiny: TinyFactory) -> None:
    """Leaving out the pairs without weight changes no bit."""
    with budget_context(case_model(tiny, case, experts=MANY_EXPERTS), "truncation") as context:
        assert context.sensor is not None
        rows = []
        for skips in (True, False):
            context.clear()
            context.sensor.skip_unweighted(skips)
            context.decode(PROMPT, phase=Phase.PREFILL, logits="none")
            rows.append(verify(context))
        assert np.array_equal(*rows)


def test_the_sensor_sees_a_truncation_that_begins_with_a_reused_graph(many: Path) -> None:
    """llama.cpp planned that graph without a budget, so that its ids do not outlive their blocks."""
    with budget_context(many, None) as context:
        assert context.sensor is not None
        verify(context)
        context.set_budget(ExpertBudget(budget=BUDGET, coverage="truncation"))
        context.sensor.frames()
        context.sensor.read_counts()
        verify(context)
        counts = context.sensor.read_counts()
        assert (counts.sum(axis=1) == len(DRAFTED) * context.model.info.n_expert_used).all()
        assert np.count_nonzero(counts, axis=1).max() <= BUDGET
        (frame,) = context.sensor.frames()
        assert frame.n_tokens == len(DRAFTED)


@pytest.mark.parametrize("case", ["qwen3moe", "deepseek3", "gpt-oss", "wide"])
def test_tokens_that_lose_all_their_experts(case: str, tiny: TinyFactory, tiny_draft: Path) -> None:
    """Nothing is added for them, beside a cache as on the CPU alone. wide: the graph itself sums the experts."""
    wide = {"embd": 1024, "used": 4} if case == "wide" else {}
    path = case_model(tiny, "qwen3moe" if wide else case, experts=MANY_EXPERTS, **wide)
    with Model.load(path) as model:
        n_used, layers = model.info.n_expert_used, list(model.info.expert_layers)
    budget = ExpertBudget(budget=n_used, coverage="truncation")
    rows = []
    for ratio in (0.0, 0.5):
        with Session.open(replace(hybrid_config(path, tiny_draft, ratio), expert_budget=budget)) as session:
            context = session.target
            assert context.sensor is not None
            greedy_answer(session, PROMPT, N_PREDICT)  # loads experts
            if session.placement is not None:
                assert isinstance(session.placement.cache, ExpertCache)
                assert session.placement.cache.residency()[layers].any()
            context.clear()
            context.decode(PROMPT, phase=Phase.PREFILL, logits="none")
            context.sensor.frames()
            rows.append(verify(context))
            (frame,) = context.sensor.frames()
            assert (frame.weights[layers, : len(DRAFTED)].sum(axis=-1) == 0.0).any()
    assert np.abs(rows[0] - rows[1]).max() < 0.05 * rows[0].std()
