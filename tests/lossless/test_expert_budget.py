"""An expert budget in whole sessions: the cap holds in every layer, on every division between GPU and CPU.

tests/native/test_expert_budget.py compares the shortlists with their definition.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

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
from tests.support.cases import MOE_CASES
from tests.support.counting import DEVICE, CountingDevice
from tests.support.hybrid import MANY_EXPERTS, assert_greedy, greedy_answer, hybrid_config
from tests.support.stock import StockContext

ALL = 99
BUDGET = 6
PROMPT = np.random.default_rng(5).integers(0, 256, 40).tolist()
DRAFTED = np.random.default_rng(6).integers(0, 256, 9).tolist()
N_PREDICT = 24
COVERAGES = pytest.mark.parametrize("coverage", ["substitution", "truncation"])


def with_budget(config: EngineConfig, budget: ExpertBudget, **changes: object) -> EngineConfig:
    return dataclasses.replace(config, expert_budget=budget, **changes)  # type: ignore[arg-type]


def steps_of(config: EngineConfig) -> tuple[list[StepRecord], list[int]]:
    """The verifications of an answer, and the most experts that our backend counted in a layer of each."""
    steps, counted = [], []
    with Session.open(config) as session:

        def observe(record: StepRecord, session: Session) -> None:
            if record.n_verified > 1:
                assert session.counts is not None
                steps.append(record)
                counted.append(int(np.count_nonzero(session.counts, axis=1).max()))

        session.observers.append(observe)
        assert len(greedy_answer(session, PROMPT, N_PREDICT)) == N_PREDICT
    return steps, counted


def check_cap(config: EngineConfig) -> None:
    steps, counted = steps_of(config)
    assert steps and max(counted) <= BUDGET
    assert all(step.experts_max <= BUDGET and step.kept_probability is not None for step in steps)
    assert max(step.experts_natural for step in steps) > BUDGET  # else there was nothing to do
    assert min(step.kept_probability or 1.0 for step in steps) < 1.0


@COVERAGES
@pytest.mark.parametrize("case", ["qwen3moe", "deepseek3", "gpt-oss"])
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_no_layer_uses_more(ratio: float, case: str, coverage: Coverage, tiny: TinyFactory, tiny_draft: Path) -> None:
    arch, dimensions = MOE_CASES[case]
    model = tiny(arch, **(dimensions | {"experts": MANY_EXPERTS}))
    check_cap(with_budget(hybrid_config(model, tiny_draft, ratio), ExpertBudget(budget=BUDGET, coverage=coverage)))


@COVERAGES
@pytest.mark.parametrize("n_gpu_layers", [1, ALL])
def test_beside_a_gpu(
    n_gpu_layers: int, coverage: Coverage, tiny: TinyFactory, tiny_draft: Path, counting: CountingDevice
) -> None:
    """The router is computed on the GPU, the experts in part on each."""
    model = tiny("qwen3moe", experts=MANY_EXPERTS)
    config = hybrid_config(model, tiny_draft, 0.5, device=DEVICE)
    check_cap(with_budget(config, ExpertBudget(budget=BUDGET, coverage=coverage), n_gpu_layers=n_gpu_layers))
    counting.check()


@COVERAGES
@pytest.mark.parametrize("case", ["qwen3moe", "deepseek3", "gpt-oss"])
def test_a_gpu_computes_the_same(case: str, coverage: Coverage, tiny: TinyFactory, counting: CountingDevice) -> None:
    """All layers whole on the GPU: our backend sees no block, the budget acts all the same."""
    arch, dimensions = MOE_CASES[case]
    path = tiny(arch, **(dimensions | {"experts": MANY_EXPERTS}))
    rows = []
    for gpu in ({}, {"n_gpu_layers": ALL, "experts_on_cpu": True, "n_cpu_moe": 0, "device": DEVICE}):
        with Model.load(path, **gpu) as model, Context(model, n_ctx=128, n_threads=1, has_budget=True) as context:
            context.set_budget(ExpertBudget(budget=BUDGET, coverage=coverage))
            context.decode(PROMPT, phase=Phase.PREFILL, logits="none")
            rows.append(context.decode(DRAFTED, phase=Phase.VERIFY, logits="all").copy())
            assert context.budget is not None
            layers = context.budget.read()[list(model.info.expert_layers)]
            assert (layers["batches"] == 1).all() and (layers["unique_max"] <= BUDGET).all()
            assert layers["unique_natural"].max() > BUDGET
    assert np.abs(rows[0] - rows[1]).max() < 0.05 * rows[0].std()


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_a_budget_of_all_experts_is_lossless(ratio: float, tiny: TinyFactory, tiny_draft: Path) -> None:
    model = tiny("qwen3moe", experts=MANY_EXPERTS)
    config = with_budget(hybrid_config(model, tiny_draft, ratio), ExpertBudget(budget=MANY_EXPERTS))
    with StockContext(model, n_ctx=512) as stock, Session.open(config) as session:
        expected, _ = stock.greedy(PROMPT, N_PREDICT)
        tokens = greedy_answer(session, PROMPT, N_PREDICT)
        assert_greedy(stock, PROMPT, tokens, expected, "all experts")


def test_the_budget_changes_between_answers(tiny: TinyFactory, tiny_draft: Path) -> None:
    model = tiny("qwen3moe", experts=MANY_EXPERTS)
    config = with_budget(hybrid_config(model, tiny_draft, 0.0), ExpertBudget(budget=BUDGET))
    with StockContext(model, n_ctx=512) as stock, Session.open(config) as session:
        expected, _ = stock.greedy(PROMPT, N_PREDICT)
        limited = greedy_answer(session, PROMPT, N_PREDICT)
        session.set_expert_budget(None)
        unlimited = greedy_answer(session, PROMPT, N_PREDICT)
        assert_greedy(stock, PROMPT, unlimited, expected, "off again")
        session.set_expert_budget(ExpertBudget(budget=BUDGET))
        assert greedy_answer(session, PROMPT, N_PREDICT) == limited


@pytest.mark.parametrize("case", ["qwen3moe", "qwen3moe-f32", "deepseek3", "gpt-oss", "llama4"])
def test_truncated_experts_are_not_computed(case: str, tiny: TinyFactory) -> None:
    """Leaving out the pairs without weight changes no bit."""
    arch, dimensions = MOE_CASES[case]
    path = tiny(arch, **(dimensions | {"experts": MANY_EXPERTS}))
    with Model.load(path) as model, Context(model, n_ctx=128, n_threads=1, has_budget=True) as context:
        context.set_budget(ExpertBudget(budget=BUDGET, coverage="truncation"))
        assert context.sensor is not None
        rows = []
        for skips in (True, False):
            context.clear()
            context.sensor.skip_unweighted(skips)
            context.decode(PROMPT, phase=Phase.PREFILL, logits="none")
            rows.append(context.decode(DRAFTED, phase=Phase.VERIFY, logits="all").copy())
        assert np.array_equal(*rows)


def test_the_sensor_sees_a_truncation_that_begins_with_a_reused_graph(tiny: TinyFactory) -> None:
    """llama.cpp planned that graph without a budget, so that its ids do not outlive their blocks."""
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    with Model.load(path) as model, Context(model, n_ctx=128, n_threads=1, has_budget=True) as context:
        assert context.sensor is not None
        context.decode(PROMPT, phase=Phase.PREFILL, logits="none")
        context.decode(DRAFTED, phase=Phase.VERIFY, logits="all")
        context.set_budget(ExpertBudget(budget=BUDGET, coverage="truncation"))
        context.sensor.frames()
        context.sensor.read_counts()
        context.decode(DRAFTED, phase=Phase.VERIFY, logits="all")
        counts = context.sensor.read_counts()
        assert (counts.sum(axis=1) == len(DRAFTED) * model.info.n_expert_used).all()
        assert np.count_nonzero(counts, axis=1).max() <= BUDGET
        (frame,) = context.sensor.frames()
        assert frame.n_tokens == len(DRAFTED)


@pytest.mark.parametrize("case", ["qwen3moe", "deepseek3", "gpt-oss", "wide"])
def test_tokens_that_lose_all_their_experts(case: str, tiny: TinyFactory, tiny_draft: Path) -> None:
    """Nothing is added for them, beside a cache as on the CPU alone. wide: the graph itself sums the experts."""
    arch, dimensions = MOE_CASES.get(case, ("qwen3moe", {"embd": 1024, "used": 4}))
    path = tiny(arch, **(dimensions | {"experts": MANY_EXPERTS}))
    with Model.load(path) as model:
        n_used = model.info.n_expert_used
        layers = list(model.info.expert_layers)
    budget = ExpertBudget(budget=n_used, coverage="truncation")
    rows = []
    for ratio in (0.0, 0.5):
        with Session.open(with_budget(hybrid_config(path, tiny_draft, ratio), budget)) as session:
            context = session.target
            assert context.sensor is not None
            greedy_answer(session, PROMPT, N_PREDICT)  # loads experts
            if session.placement is not None:
                assert isinstance(session.placement.cache, ExpertCache)
                assert session.placement.cache.residency()[layers].any()
            context.clear()
            context.decode(PROMPT, phase=Phase.PREFILL, logits="none")
            context.sensor.frames()
            rows.append(context.decode(DRAFTED, phase=Phase.VERIFY, logits="all").copy())
            (frame,) = context.sensor.frames()
            assert (frame.weights[layers, : len(DRAFTED)].sum(axis=-1) == 0.0).any()
    assert np.abs(rows[0] - rows[1]).max() < 0.05 * rows[0].std()


def test_stock_mode_has_no_budget(tiny: TinyFactory, tiny_draft: Path) -> None:
    model = tiny("qwen3moe", experts=MANY_EXPERTS)
    config = with_budget(hybrid_config(model, tiny_draft, 0.0), ExpertBudget(budget=BUDGET))
    with StockContext(model, n_ctx=512) as stock, Session.open(config) as session:
        expected, _ = stock.greedy(PROMPT, N_PREDICT)
        session.set_mode("stock")
        assert_greedy(stock, PROMPT, greedy_answer(session, PROMPT, N_PREDICT), expected, "stock")
        assert session.target.budget is not None
        assert not session.target.budget.read()["batches"].any()
        session.set_mode("moeedge")
        greedy_answer(session, PROMPT, N_PREDICT)
        assert session.target.budget.budget is not None
