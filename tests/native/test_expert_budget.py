"""Expert budgets in llama.cpp's graphs against the reference in NumPy, on the routers of every architecture.

The sensor reads what the backend computed with: the ids and the final weights of each token.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import llama_cpp.llama_cpp as lib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moeedge.errors import BackendError, InputError
from moeedge.lab.policies.expert_budget import (
    BudgetedRouting,
    MixingWeights,
    Probabilities,
    apply_budget,
    router_scores,
    routing_probabilities,
)
from moeedge.lab.policies.expert_budget import RouterKind as Kind
from moeedge.llama import library
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.llama.routers import ContextBudget
from moeedge.llama.sequence import Logits
from moeedge.native import Frame, abi
from moeedge.native.abi import BudgetCoverage, BudgetRanking, Phase, RouterKind
from moeedge.policies.expert_budget import Coverage, ExpertBudget
from tests.conftest import TinyFactory
from tests.support.cases import MOE_CASES, case_model

TOKENS = np.random.default_rng(5).integers(0, 256, 9).tolist()
PROMPT = np.random.default_rng(6).integers(0, 256, 20).tolist()
KINDS: dict[RouterKind, Kind] = {
    RouterKind.SOFTMAX: "softmax",
    RouterKind.LOGITS: "logits",
    RouterKind.POSITIVE: "sigmoid",
}
MIXING = {
    "qwen3moe": MixingWeights(normalised=True),
    "qwen2moe": MixingWeights(),
    "llama": MixingWeights(normalised=True),  # Mixtral
    "olmoe": MixingWeights(),
    "deepseek2": MixingWeights(),
    "deepseek3": MixingWeights(normalised=True, scale=2.5),
    "gpt-oss": MixingWeights(softmax=True),
    "llama4": MixingWeights(),
    "nemotron_h_moe": MixingWeights(normalised=True, scale=2.5),
}
CASES = ("qwen3moe", "qwen2moe", "mixtral", "olmoe", "deepseek2", "deepseek3", "gpt-oss", "llama4", "nemotron-puzzle")
COVERAGES: tuple[Coverage, ...] = ("substitution", "truncation")


class LayerRouting(NamedTuple):
    """Views of native memory that the next verification overwrites."""

    kind: abi.RouterKind
    values: NDArray[np.float32]  # [T, n_experts], the router's output
    selection: NDArray[np.float32]  # [T, n_experts], sorted by the router's top-k
    natural_ids: NDArray[np.int32]  # [T, k], the selected experts without the budget
    ids: NDArray[np.int32]  # [T, k], with it


@dataclass
class Case:
    """A model, a context that can keep to a budget, and how the model weighs its experts."""

    model: Model
    context: Context
    mixing: MixingWeights

    def verify(self, budget: ExpertBudget | None, tokens: list[int] = TOKENS) -> tuple[Logits, Frame]:
        """Logits and routing of a verification after the prompt, under the budget."""
        self.context.set_budget(budget)
        self.context.trim(0)
        self.context.decode(PROMPT, phase=Phase.PREFILL)
        assert self.context.sensor is not None
        self.budget.read()
        logits = self.context.decode(tokens, phase=Phase.VERIFY, logits="all")
        assert logits is not None
        return logits.copy(), self.context.sensor.frames()[-1]

    @property
    def budget(self) -> ContextBudget:
        assert self.context.budget is not None
        return self.context.budget

    def routing(self, layer: int) -> LayerRouting:
        """The layer's routing in the newest verification."""
        raw = abi.BudgetRoutingStruct()
        self.budget.call("get_routing", layer, ctypes.byref(raw))
        info = self.model.info
        wide, narrow = (raw.n_tokens, info.n_experts), (raw.n_tokens, info.used_per_layer[layer])
        return LayerRouting(
            abi.RouterKind(raw.kind),
            abi.view(raw.values, wide, np.float32),
            abi.view(raw.selection, wide, np.float32),
            abi.view(raw.natural_ids, narrow, np.int32),
            abi.view(raw.ids, narrow, np.int32),
        )

    def expected(self, layer: int, budget: int, **arguments: Any) -> BudgetedRouting:
        """The reference on the values that the layer's router gave."""
        found = self.routing(layer)
        weights = self.mixing.of(found.values, found.natural_ids)
        return apply_budget(
            found.selection, found.natural_ids, self.probabilities(layer), budget, weights=weights, **arguments
        )

    def probabilities(self, layer: int) -> Probabilities:
        found = self.routing(layer)
        return routing_probabilities(found.values, KINDS[found.kind])

    def check(self, frame: Frame, layer: int, expected: BudgetedRouting) -> None:
        """The backend computed with the reference's experts and weights."""
        found = self.routing(layer)
        np.testing.assert_array_equal(found.ids, expected.ids)
        n_tokens, n_used = expected.ids.shape  # of this layer
        np.testing.assert_array_equal(frame.ids[layer, :n_tokens, :n_used], expected.ids)
        weights = self.mixing.of(found.values, expected.ids) if expected.weights is None else expected.weights
        np.testing.assert_allclose(frame.weights[layer, :n_tokens, :n_used], weights, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tiny: TinyFactory) -> Iterator[Case]:
    library.start()
    arch = MOE_CASES[request.param][0]
    with (
        Model.load(case_model(tiny, request.param)) as model,
        Context(model, n_ctx=64, n_threads=1, has_budget=True) as context,
    ):
        assert context.budget is not None
        context.budget.call("set_capture", 1)
        yield Case(model, context, MIXING[request.param if request.param in MIXING else arch])


def budgets_of(model: Model) -> list[int]:
    """The least budget, the one above it, a middle one."""
    info = model.info
    return sorted({info.n_expert_used, info.n_expert_used + 1, (info.n_expert_used + info.n_experts) // 2})


@pytest.mark.parametrize("coverage", COVERAGES)
def test_experts_and_weights_are_the_references(case: Case, coverage: Coverage) -> None:
    info = case.model.info
    for budget in budgets_of(case.model):
        _, frame = case.verify(ExpertBudget(budget=budget, coverage=coverage))
        sums = case.budget.read().copy()
        for layer in info.expert_layers:
            expected = case.expected(layer, budget, coverage=coverage)
            case.check(frame, layer, expected)
            row = sums[layer]
            assert (row["batches"], row["substituted"]) == (1, 0)
            assert (row["unique_natural"], row["unique"]) == (expected.n_natural, expected.n_kept)
            assert row["unique_max"] == row["unique"] <= budget
            assert row["kept"] == pytest.approx(float(expected.kept_probability))
            used = frame.ids[layer, : len(TOKENS)]
            assert len(np.unique(used[used >= 0])) <= budget


@pytest.mark.parametrize("coverage", COVERAGES)
def test_a_budget_changes_the_logits_and_a_full_one_no_bit(case: Case, coverage: Coverage) -> None:
    """Nor does a context that can keep to one, until it is asked to."""
    info = case.model.info
    with Context(case.model, n_ctx=64, n_threads=1) as plain:
        plain.decode(PROMPT, phase=Phase.PREFILL)
        free = plain.decode(TOKENS, phase=Phase.VERIFY, logits="all").copy()
    for budget in (None, info.n_experts, info.n_experts + 3, info.n_expert_used, None):
        asked = None if budget is None else ExpertBudget(budget=budget, coverage=coverage)
        found, _ = case.verify(asked)
        if budget == info.n_expert_used:
            assert np.isfinite(found).all() and np.abs(found - free).max() > 1e-3
        else:
            np.testing.assert_array_equal(found, free)


def test_prompts_and_single_tokens_keep_all_experts(case: Case) -> None:
    """By the engine, and by the library, whatever the phase."""
    rows: list[list[NDArray[np.float32]]] = []
    for asked in (None, ExpertBudget(budget=case.model.info.n_expert_used)):
        case.context.set_budget(asked)
        case.context.trim(0)
        batches = ((PROMPT, Phase.PREFILL), (TOKENS[:1], Phase.VERIFY), (TOKENS[:1], Phase.DECODE))
        rows.append([case.context.decode(tokens, phase=phase, logits="all").copy() for tokens, phase in batches])
    assert all(map(np.array_equal, *rows))
    case.context.trim(0)
    case.budget.call("set_active", 1)
    try:
        for tokens, n_batches in ((TOKENS[:1], 0), (TOKENS[:2], 1)):
            case.context.decode(tokens, phase=Phase.DECODE, logits="all")
            sums = case.budget.read()[list(case.model.info.expert_layers)]
            assert (sums["batches"] == n_batches).all()
    finally:
        case.budget.call("set_active", 0)


def test_each_layer_keeps_to_its_own_budget(case: Case) -> None:
    info, native = case.model.info, case.budget
    budgets = np.full(info.n_layers, info.n_experts, dtype=np.int32)
    for layer in info.expert_layers:
        budgets[layer] = min(info.used_per_layer[layer] + (layer == 1), info.n_experts)
    case.context.set_budget(None)
    case.context.trim(0)
    case.context.decode(PROMPT, phase=Phase.PREFILL)
    native.configure(budgets, ranking=BudgetRanking.PICKS, coverage=BudgetCoverage.SUBSTITUTION)
    native.call("set_active", 1)
    try:
        case.context.decode(TOKENS, phase=Phase.VERIFY, logits="all")
    finally:
        native.call("set_active", 0)
    assert case.context.sensor is not None
    frame = case.context.sensor.frames()[-1]
    for layer in info.expert_layers:
        case.check(frame, layer, case.expected(layer, int(budgets[layer])))


def test_a_budget_below_the_experts_per_token_is_refused(case: Case) -> None:
    info = case.model.info
    if info.n_expert_used > 1:
        with pytest.raises(InputError):
            case.context.set_budget(ExpertBudget(budget=info.n_expert_used - 1))


def test_a_model_with_two_blocks_per_layer_has_none(tiny: TinyFactory) -> None:
    """Both blocks' routers have the same names."""
    with (
        Model.load(tiny("grovemoe")) as model,
        Context(model, n_ctx=64, n_threads=1, has_budget=True) as context,
        pytest.raises(InputError),
    ):
        context.set_budget(ExpertBudget(budget=model.info.n_experts))


def test_without_recognised_weights_experts_are_substituted(case: Case) -> None:
    """As in a context that verifies before any other graph, whose nodes name the weights."""
    info = case.model.info
    with Context(case.model, n_ctx=64, n_threads=1, has_budget=True) as context:
        new = Case(case.model, context, case.mixing)
        new.budget.call("set_capture", 1)
        context.set_budget(ExpertBudget(budget=info.n_expert_used, coverage="truncation"))
        for n_substituted in (1, 0):
            context.trim(0)
            context.decode(TOKENS, phase=Phase.VERIFY, logits="all")
            assert context.sensor is not None
            frame, sums = context.sensor.frames()[-1], new.budget.read().copy()
            for layer in info.expert_layers:
                coverage: Coverage = "substitution" if n_substituted else "truncation"
                new.check(frame, layer, new.expected(layer, info.n_expert_used, coverage=coverage))
                assert sums[layer]["substituted"] == n_substituted


@pytest.mark.parametrize(
    "changes",
    [
        {"budgets": np.array([4, 1])},  # below the experts per token
        {"ranking": 9},
        {"coverage": 9},
    ],
)
def test_the_library_refuses_what_it_cannot_keep_to(changes: dict[str, Any]) -> None:
    valid = {"budgets": np.array([4, 8]), "ranking": BudgetRanking.ROUTER, "coverage": BudgetCoverage.TRUNCATION}
    info = SimpleNamespace(n_experts=8, used_per_layer=[2, 2])
    budget = ContextBudget(info, lib.llama_context_default_params())  # type: ignore[arg-type]
    try:
        budget.configure(**valid)
        with pytest.raises(BackendError, match="not valid"):
            budget.configure(**(valid | changes))
    finally:
        budget.close()


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_random_verifications_are_the_references(case: Case, data: st.DataObject) -> None:
    """Batches of any length, with any budget, ranking and coverage."""
    info = case.model.info
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    n_tokens = data.draw(st.integers(2, 32))
    ranking = data.draw(st.sampled_from(ExpertBudget.RANKINGS))
    budget = data.draw(st.integers(info.n_expert_used, info.n_experts))
    coverage: Coverage = data.draw(st.sampled_from(COVERAGES))
    asked = ExpertBudget(budget=budget, ranking=ranking, coverage=coverage)
    _, frame = case.verify(asked, tokens=rng.integers(0, 256, n_tokens).tolist())
    for layer in info.expert_layers:
        scores = None if ranking == "picks" else router_scores(case.probabilities(layer))
        case.check(frame, layer, case.expected(layer, budget, coverage=coverage, scores=scores))


def test_groups_that_exclude_the_shortlist_are_overruled(case: Case) -> None:
    """DeepSeek-V3 masks groups of experts; where too few of the shortlist are left, masked ones are taken."""
    case.verify(ExpertBudget(budget=case.model.info.n_expert_used))
    n_masked, has_groups = 0, False
    for layer in case.model.info.expert_layers:
        found = case.routing(layer)
        n_masked += int(np.isneginf(np.take_along_axis(found.selection, found.ids, axis=-1)).sum())
        has_groups = has_groups or bool(np.isneginf(found.selection).any())
    assert (n_masked > 0) == has_groups
