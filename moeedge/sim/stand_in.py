"""The stand-in of moeedge.sim.foresight, as time goes by: what is foretold so far, token by token and layer by layer.

While the draft model works, its outputs say something of the tokens that it has read; while the target works, the
input of a layer says something of the layers behind it, the less the farther they are (a power of the accuracy). The
accuracies are those of foresight.py, with their sources; what is wrong is drawn by the popularity seen so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeedge.scheduler.policy import Hints
from moeedge.sim.foresight import ACCURACY


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Probability that a predicted expert is right."""

    draft_router: float = ACCURACY["draft-router"]
    next_gate: float = ACCURACY["next-gate"]  # one layer ahead
    reach: int = 3  # layers ahead that a gate looks; 0: it is not asked
    critical: int | None = None  # experts per token and layer that the draft names; None: all that a token uses

    def __post_init__(self) -> None:
        if not (0 <= self.draft_router <= 1 and 0 <= self.next_gate <= 1 and self.reach >= 0):
            raise ValueError("an accuracy must be in [0, 1], and a reach >= 0")


class StandIn:
    """Seeded; one per run."""

    def __init__(self, n_layers: int, n_experts: int, accuracy: Accuracy, seed: int) -> None:
        self._accuracy = accuracy
        self._rng = np.random.default_rng(seed)
        self._seen: NDArray[np.float64] = np.ones((n_layers, n_experts))
        self._n_experts = n_experts
        self._guess: NDArray[np.int32] = np.zeros((0, 0, 0), dtype=np.int32)
        self._luck: NDArray[np.float64] = np.zeros((0, 0, 0))
        self._ids: NDArray[np.int32] = np.zeros((0, 0, 0), dtype=np.int32)

    def begin(self, ids: NDArray[np.int32]) -> None:
        """The next verification's experts, [n_layers, n_tokens, k]: what will be foretold, more or less."""
        self._ids = ids
        self._luck = self._rng.random(ids.shape)
        cumulative = np.cumsum(self._seen, axis=1)
        drawn = self._rng.random(ids.shape) * cumulative[:, -1][:, None, None]
        guess = np.empty(ids.shape, dtype=np.int32)
        for layer in range(len(ids)):
            guess[layer] = np.searchsorted(cumulative[layer], drawn[layer])
        self._guess = np.minimum(guess, self._n_experts - 1)

    def learn(self, counts: NDArray[np.int32]) -> None:
        """What a verification used, [n_layers, n_experts]."""
        self._seen += counts

    def of_draft(self, n_tokens: int, share: float = 1.0) -> Hints:
        """What the draft's outputs say of the first `n_tokens` tokens; of the last one for a share of the layers."""
        shown = self._mixed(self._accuracy.draft_router)
        shown[:, n_tokens:] = -1
        shown[round(share * len(shown)) :, n_tokens - 1] = -1
        if self._accuracy.critical is not None:
            shown[:, :, self._accuracy.critical :] = -1
        return Hints(shown, "draft-router")

    def of_gates(self, layer: int) -> Hints:
        """What the input of `layer` says of the next layers with experts behind it."""
        shown = np.full_like(self._ids, -1)
        routed = np.flatnonzero((self._ids >= 0).any(axis=(1, 2)))
        for ahead, behind in enumerate(routed[routed > layer][: self._accuracy.reach].tolist(), start=1):
            shown[behind] = self._mixed(self._accuracy.next_gate**ahead, behind)
        return Hints(shown, "next-gate")

    def _mixed(self, accuracy: float, layer: int | None = None) -> NDArray[np.int32]:
        rows: slice | int = slice(None) if layer is None else layer
        ids, guess, luck = self._ids[rows], self._guess[rows], self._luck[rows]
        return np.where((luck < accuracy) | (ids < 0), ids, guess).astype(np.int32)
