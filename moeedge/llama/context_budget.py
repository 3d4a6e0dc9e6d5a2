"""The expert budget of one llama.cpp context: what llama.cpp's eval callback does to the experts of a verification.

`moeedge.lab.policies.expert_budget` defines the same in NumPy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from moeedge.errors import BackendError, InputError, require
from moeedge.llama.model import ModelInfo
from moeedge.native import abi
from moeedge.native.abi import BudgetCoverage, BudgetRanking, Phase, view
from moeedge.native.library import load
from moeedge.policies.expert_budget import ExpertBudget

_TWO_BLOCKS = "grovemoe"  # whose layers have a second block, with an expert for each group of the first's experts


@dataclass(frozen=True)
class LayerRouting:
    """Routing of one layer in the newest verification; views of native memory that the next one overwrites.

    values: float32 [T, n_experts], the router's output. selection: what the router's top-k sorts, of the same shape.
    natural_ids, ids: int32 [T, k], the selected experts without and with the budget.
    """

    kind: abi.RouterKind
    values: NDArray[np.float32]
    selection: NDArray[np.float32]
    natural_ids: NDArray[np.int32]
    ids: NDArray[np.int32]


class ContextBudget:
    """Made before its llama.cpp context, whose parameters it changes, and closed after it."""

    def __init__(self, info: ModelInfo, parameters: Any) -> None:
        n_layers = len(info.used_per_layer)
        self.budget: ExpertBudget | None = None  # of verifications; None: they use all experts that the router selects
        self._info = info
        self._n_used = np.asarray(info.used_per_layer, dtype=np.int32)
        self._library = load()
        self._handle = self._library.moeedge_budget_create(n_layers, info.n_experts, self._n_used.ctypes.data)
        if not self._handle:
            raise BackendError("moeedge's expert budget cannot be made: out of memory.")
        self._layers = np.zeros(n_layers, dtype=abi.BUDGET_LAYER)
        parameters.cb_eval = ctypes.cast(self._library.moeedge_budget_on_node, lib.ggml_backend_sched_eval_callback)
        parameters.cb_eval_user_data = self._handle

    def set(self, budget: ExpertBudget | None) -> None:
        """Raises InputError if the budget does not suit the model."""
        if budget is not None:
            info = self._info
            if info.architecture == _TWO_BLOCKS:
                problem = "Expert budgets do not support GroveMoE, whose layers select two kinds of experts."
                raise InputError(problem, "Leave the expert budget out.")
            layers = np.asarray(info.expert_layers, dtype=np.intp)
            budgets = budget.per_layer(layers, info.n_layers, info.n_experts, info.used_per_layer)
            budgets[budgets == 0] = info.n_experts  # layers without experts
            self.configure(budgets, BudgetRanking[budget.ranking.upper()], BudgetCoverage[budget.coverage.upper()])
        self.budget = budget

    def configure(self, budgets: NDArray[np.int32], ranking: BudgetRanking, coverage: BudgetCoverage) -> None:
        """Sets budgets [n_layers]. Raises BackendError for values that the library does not know."""
        budgets = np.ascontiguousarray(budgets, dtype=np.int32)
        require(budgets.shape == self._n_used.shape, f"there must be a budget for each of {self._n_used.size} layers")
        raw = abi.BudgetConfigStruct(int(ranking), int(coverage), budgets.ctypes.data)
        _check(self._library.moeedge_budget_configure(self._handle, ctypes.byref(raw)))

    @contextmanager
    def during(self, phase: Phase, n_tokens: int) -> Iterator[None]:
        """Around a decode: a verification of more than one token keeps to the budget, everything else is exact."""
        if self.budget is None or phase != Phase.VERIFY or n_tokens < 2:
            yield
            return
        try:  # Ctrl-C may come at any time
            self.set_active(True)
            yield
        finally:
            self.set_active(False)

    def set_active(self, on: bool) -> None:
        """Whether the next decodes keep to the budget."""
        _check(self._library.moeedge_budget_set_active(self._handle, int(on)))

    def read(self) -> NDArray[Any]:
        """The layers' figures since the last call, abi.BUDGET_LAYER [n_layers]; the next call reuses the array."""
        _check(self._library.moeedge_budget_read(self._handle, self._layers.ctypes.data))
        return self._layers

    def set_capture(self, on: bool) -> None:
        """Whether `routing` has the router's values of verifications from now on."""
        _check(self._library.moeedge_budget_set_capture(self._handle, int(on)))

    def routing(self, layer: int) -> LayerRouting | None:
        """The layer's routing in the newest verification; None without one. Requires `set_capture`."""
        raw = abi.BudgetRoutingStruct()
        _check(self._library.moeedge_budget_get_routing(self._handle, layer, ctypes.byref(raw)))
        if raw.n_tokens == 0:
            return None
        wide, narrow = (raw.n_tokens, self._info.n_experts), (raw.n_tokens, int(self._n_used[layer]))
        return LayerRouting(
            abi.RouterKind(raw.kind),
            view(raw.values, wide, np.float32),
            view(raw.selection, wide, np.float32),
            view(raw.natural_ids, narrow, np.int32),
            view(raw.ids, narrow, np.int32),
        )

    def close(self) -> None:
        """Frees the budget; closing twice is harmless."""
        if self._handle:
            self._library.moeedge_budget_destroy(self._handle)
            self._handle = None


def _check(status: int) -> None:
    if status < 0:
        raise BackendError(f"moeedge's expert budget failed: {load().moeedge_last_error().decode()}")
