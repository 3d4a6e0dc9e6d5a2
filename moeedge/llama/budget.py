"""The expert budget of a context's verifications: what the user asked for, as the native library takes it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np

from moeedge.errors import InputError
from moeedge.llama.model import ModelInfo
from moeedge.native.abi import BudgetCoverage, BudgetRanking, Phase
from moeedge.native.budget import NativeBudget
from moeedge.policies.expert_budget import ExpertBudget

_TWO_BLOCKS = "grovemoe"  # whose layers have a second block, with an expert for each group of the first's experts


class ContextBudget:
    """Made before its llama.cpp context, whose parameters it changes, and closed after it."""

    def __init__(self, info: ModelInfo, parameters: Any) -> None:
        self.native = NativeBudget(info.n_experts, info.used_per_layer)
        self._info = info
        self._budget: ExpertBudget | None = None
        parameters.cb_eval = ctypes.cast(self.native.callback, lib.ggml_backend_sched_eval_callback)
        parameters.cb_eval_user_data = self.native.user_data

    @property
    def budget(self) -> ExpertBudget | None:
        """What verifications keep to; None: they use all experts that the router selects."""
        return self._budget

    def set(self, budget: ExpertBudget | None) -> None:
        """Raises InputError if the budget does not suit the model."""
        if budget is not None:
            info = self._info
            if info.architecture == _TWO_BLOCKS:
                raise InputError(
                    "Expert budgets do not support GroveMoE, whose layers select two kinds of experts.",
                    "Leave the expert budget out.",
                )
            layers = np.asarray(info.expert_layers, dtype=np.intp)
            budgets = budget.per_layer(layers, info.n_layers, info.n_experts, info.used_per_layer)
            budgets[budgets == 0] = info.n_experts  # layers without experts
            self.native.configure(
                budgets,
                ranking=BudgetRanking[budget.ranking.upper()],
                coverage=BudgetCoverage[budget.coverage.upper()],
            )
        self._budget = budget

    @contextmanager
    def during(self, phase: Phase, n_tokens: int) -> Iterator[None]:
        """Around a decode: a verification of more than one token keeps to the budget, everything else is exact."""
        if self._budget is None or phase != Phase.VERIFY or n_tokens < 2:
            yield
            return
        try:  # Ctrl-C may come at any time
            self.native.set_active(True)
            yield
        finally:
            self.native.set_active(False)

    def close(self) -> None:
        """Frees the native budget; closing twice is harmless."""
        self.native.close()
