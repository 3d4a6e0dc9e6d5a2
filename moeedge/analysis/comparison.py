"""Two profiles compared: of two models, quantisations or data sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.analysis.model_profile import ModelProfile
from moeedge.native.abi import Phase
from moeedge.trace.format import Trace


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class Comparison:
    """The other profile, and what the two have in common; None, or no layer: it cannot be known."""

    other: ModelProfile
    report: dict[str, Any]  # its complete JSON
    popularity_shared: dict[int, float]  # by layer
    routing_agreement: float | None = None

    @classmethod
    def of(
        cls, profile: ModelProfile, other: ModelProfile, report: dict[str, Any], traces: tuple[Trace, Trace] | None
    ) -> Comparison:
        """The comparison; traces: of both, None where one of them is not kept."""
        agreement = None if traces is None else routing_agreement(*traces)
        return cls(other, report, popularity_shared(profile, other), agreement)

    @property
    def mean_popularity_shared(self) -> float | None:
        """Over the layers."""
        return float(np.mean(list(self.popularity_shared.values()))) if self.popularity_shared else None

    def name_beside(self, profile: ModelProfile) -> str:
        """What distinguishes the other profile from this one: its model, or else its data set."""
        name = self.other.meta.model
        if name != profile.meta.model:
            return name
        datasets = [str(each.meta.parameters.get("dataset", "")) for each in (profile, self.other)]
        return datasets[1] if datasets[1] not in ("", datasets[0]) else f"{name} (2)"


def popularity_shared(first: ModelProfile, second: ModelProfile) -> dict[int, float]:
    """Share of the activations that go to the same experts in both, by layer: the sum over e of min(p_e, q_e).

    p and q are the popularities as distributions, each with the sum 1. Empty for models of other shapes; layers without
    tokens are left out. Few tokens make the value smaller, as popularity then varies by chance.
    """
    if (first.meta.n_layers, first.meta.n_experts) != (second.meta.n_layers, second.meta.n_experts):
        return {}
    others = {curves.layer: curves.popularity for curves in second.curves}
    shared = {}
    for curves in first.curves:
        p, q = curves.popularity, others.get(curves.layer)
        if curves.layer is not None and q is not None and p.any() and q.any():
            shared[curves.layer] = float(np.minimum(p / p.sum(), q / q.sum()).sum())
    return shared


def routing_agreement(first: Trace, second: Trace) -> float | None:
    """Share of a token's experts that both traces name, over the tokens at the start of each text that both read.

    Texts are matched by number; their tokens, prompt and accepted, are compared up to the first one that differs.
    None where shapes or texts differ, or no token is recorded in both. Two quantisations of a model, for example.
    """
    same_shape = (first.meta.n_layers, first.meta.n_experts) == (second.meta.n_layers, second.meta.n_experts)
    if not same_shape:
        return None
    shared = used = 0
    for sequence in np.intersect1d(np.unique(first.sequence), np.unique(second.sequence)):
        rows = [_text(trace, int(sequence)) for trace in (first, second)]
        n = min(map(len, rows))
        a, b = rows[0][:n], rows[1][:n]
        same = (first.token[a] == second.token[b]) & (first.position[a] == second.position[b]) & (first.token[a] >= 0)
        n = n if same.all() else int(same.argmin())
        for layer in first.expert_layers():
            ids, other = first.layer_ids(layer)[a[:n]], second.layer_ids(layer)[b[:n]]
            known = (ids >= 0) & (other >= 0).any(axis=1, keepdims=True)
            shared += int(((ids[:, :, None] == other[:, None, :]).any(axis=2) & known).sum())
            used += int(known.sum())
    return shared / used if used else None


def _text(trace: Trace, sequence: int) -> NDArray[np.int64]:
    """Rows of the prompt and of the accepted tokens of one text, in order."""
    rows = np.flatnonzero((trace.sequence == sequence) & trace.accepted & (trace.phase != Phase.DRAFT))
    return np.asarray(rows, dtype=np.int64)
