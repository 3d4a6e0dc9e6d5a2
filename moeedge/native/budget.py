"""The expert budget of one llama.cpp context: what llama.cpp's eval callback does to the experts of a verification.

`moeedge.lab.policies.expert_budget` defines the same in NumPy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import BackendError
from moeedge.native.abi import (
    BUDGET_LAYER,
    BudgetConfigStruct,
    BudgetCoverage,
    BudgetRanking,
    BudgetRoutingStruct,
    RouterKind,
)
from moeedge.native.library import load
from moeedge.native.structs import view


@dataclass(frozen=True)
class LayerRouting:
    """Routing of one layer in the newest verification; views of native memory that the next one overwrites.

    values: float32 [T, n_experts], the router's output. selection: what the router's top-k sorts, of the same shape.
    natural_ids, ids: int32 [T, k], the selected experts without and with the budget.
    """

    kind: RouterKind
    values: NDArray[np.float32]
    selection: NDArray[np.float32]
    natural_ids: NDArray[np.int32]
    ids: NDArray[np.int32]


class NativeBudget:
    """A context gets `callback` and `user_data` when it is made, and must be freed before `close`.

    It does nothing until it is configured and active.
    """

    def __init__(self, n_experts: int, used_per_layer: Sequence[int]) -> None:
        """used_per_layer: experts per token of each layer, 0 without experts."""
        n_layers = len(used_per_layer)
        self.shape = (n_layers, n_experts)
        self._n_used = np.asarray(used_per_layer, dtype=np.int32)
        self._library = load()
        self._handle = self._library.moeedge_budget_create(n_layers, n_experts, self._n_used.ctypes.data)
        if not self._handle:
            raise BackendError("moeedge's expert budget cannot be made: out of memory.")
        self._layers = np.zeros(n_layers, dtype=BUDGET_LAYER)

    @property
    def callback(self) -> int:
        """Address of the ggml_backend_sched_eval_callback."""
        address = ctypes.cast(self._library.moeedge_budget_on_node, ctypes.c_void_p).value
        assert address is not None
        return address

    @property
    def user_data(self) -> int:
        """What the callback is called with."""
        return int(self._handle)

    def configure(self, budgets: NDArray[np.int32], *, ranking: BudgetRanking, coverage: BudgetCoverage) -> None:
        """Sets budgets [n_layers]."""
        budgets = np.ascontiguousarray(budgets, dtype=np.int32)
        if budgets.shape != self.shape[:1]:
            raise ValueError(f"budgets do not suit {self.shape[0]} layers")
        raw = BudgetConfigStruct(int(ranking), int(coverage), budgets.ctypes.data)
        _check(self._library.moeedge_budget_configure(self._handle, ctypes.byref(raw)))

    def set_active(self, on: bool) -> None:
        """Whether the next decodes keep to the budget."""
        _check(self._library.moeedge_budget_set_active(self._handle, int(on)))

    def read(self) -> NDArray[Any]:
        """The layers' figures since the last call, dtype BUDGET_LAYER [n_layers]; the next call reuses the array."""
        _check(self._library.moeedge_budget_read(self._handle, self._layers.ctypes.data))
        return self._layers

    def set_capture(self, on: bool) -> None:
        """Whether `routing` has the router's values of verifications from now on."""
        _check(self._library.moeedge_budget_set_capture(self._handle, int(on)))

    def routing(self, layer: int) -> LayerRouting | None:
        """The layer's routing in the newest verification; None without one. Requires `set_capture`."""
        raw = BudgetRoutingStruct()
        _check(self._library.moeedge_budget_get_routing(self._handle, layer, ctypes.byref(raw)))
        if raw.n_tokens == 0:
            return None
        wide, narrow = (raw.n_tokens, self.shape[1]), (raw.n_tokens, int(self._n_used[layer]))
        return LayerRouting(
            RouterKind(raw.kind),
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
