"""Policy moe-infinity: the earlier sequence most similar to the current one predicts the next activations.

MoE-Infinity (Xue et al., arXiv 2401.14361), by its repository (EfficientMoE/MoE-Infinity, moe_infinity/memory/):
- tracing: an expert activation matrix [layers, experts] per sequence counts its activations; matrices of past
  sequences form a collection of fixed capacity (expert_tracer.py, finish_entry: a free entry, else the one that was
  matched least).
- prediction: the entry nearest to the current matrix, by the mean over the layers of the cosine of their rows
  (find_most_similar, which skips the layers already passed; here all count); its rows, less the farther the layer is
  ahead (expert_predictor.py, predict: 1 - (x - l) / (L + 1)), are the priorities.
- prefetch: all experts with a priority, best first, from the current layer on (expert_prefetcher.py).
- cache: one for all layers; the expert of lowest priority is evicted (expert_priority_score.py, priority_score, without
  an expert's uses so far). Misses are loaded on demand, and the GPU computes everything. The prefetch priorities also
  order the cache, with the current sequence's own activations added to the entry's (docs/lab/policies.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeedge.experts import BoolArray, FloatArray, Residency, Resident
from moeedge.policies.base import (
    CacheShape,
    ExecutionModel,
    ExpertPrediction,
    Observation,
    Plan,
    PolicyConfig,
    limit_uploads,
)
from moeedge.policies.planner import PooledPolicy

_CAPACITY = 64  # sequences in the collection; the repository leaves it to its configuration
_MATCH_EVERY = 4  # steps: the nearest entry of a sequence changes slowly
_EPSILON = np.float32(1e-8)  # added to every prediction, as the repository does


class MoeInfinity(PooledPolicy):
    """Score: the predicted share of its layer's activations, times the layer's nearness."""

    name = "moe-infinity"
    execution_model = ExecutionModel(device_only=True, prefetch_within_step=True, speculation=False)

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, config)
        size = self._score.shape
        self._matrix: FloatArray = np.zeros(size, dtype=np.float32)  # of the current sequence
        self._entries: FloatArray = np.zeros((_CAPACITY, *size), dtype=np.float32)  # rows have length 1
        self._shares: FloatArray = np.zeros((_CAPACITY, *size), dtype=np.float32)  # rows add up to 1
        self._last_used: BoolArray = np.zeros(size, dtype=np.bool_)
        self._n_matches = np.zeros(_CAPACITY, dtype=np.int64)
        self._n_entries = 0
        self._n_steps = 0
        self._nearest = -1
        self._priority: FloatArray = np.zeros(size, dtype=np.float32)  # the score before nearness
        # [n_layers + 1, n_layers, 1]: 1 at the layer that a plan is for, decreasing with every layer after it, 0 before
        ahead = np.arange(shape.n_layers) - np.arange(shape.n_layers + 1)[:, None]
        nearness = np.where(ahead >= 0, 1.0 - ahead / (shape.n_layers + 1), 0.0)
        self._nearness: FloatArray = nearness[:, :, None].astype(np.float32)

    def observe(self, observation: Observation) -> None:
        self._matrix += observation.counts
        np.greater(observation.counts, 0, out=self._last_used)
        if self._n_entries and (observation.prefill or self._n_steps % _MATCH_EVERY == 0):
            rows = _unit_rows(self._matrix)
            # the mean over layers of the rows' cosines: the rows have length 1
            similarity = np.einsum("ijk,jk->i", self._entries[: self._n_entries], rows)
            self._nearest = int(similarity.argmax())
            self._n_matches[self._nearest] += 1
        self._n_steps += not observation.prefill
        self._prioritise()

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        """Plans to hold the experts with the highest scores; keeping what the last step loaded costs no transfer."""
        return self._plan_from(0, resident, self._last_used)

    def plan_layer(self, layer: int, resident: Resident, prediction: ExpertPrediction | None = None) -> Plan:
        """Plans for the layers after `layer`. Experts of earlier layers leave first, those of `layer` stay."""
        in_use = np.asarray(resident, dtype=np.uint8).copy()
        in_use[layer, in_use[layer] > 0] = Residency.IN_FLIGHT  # an expert in flight is no victim
        return self._plan_from(layer + 1, in_use)

    def _plan_from(self, layer: int, resident: Resident, staged: BoolArray | None = None) -> Plan:
        """Plans for `layer` and those after it; staged: see `limit_uploads`."""
        np.multiply(self._priority, self._nearness[layer], out=self._score)
        unit = max([float(_EPSILON), *(value for value in self._fit(resident) if np.isfinite(value))])
        np.minimum(self._score / np.float32(unit), self._cap, out=self._utility)
        return limit_uploads(self._moves(resident), self._score, self._max_uploads, staged)

    def reset(self) -> None:
        """Ends the sequence and adds its matrix to the collection."""
        if self._n_steps == 0:  # of a prompt alone
            self._matrix[:] = 0.0
            self._prioritise()
            return
        entry = self._n_entries if self._n_entries < _CAPACITY else int(self._n_matches.argmin())
        self._n_entries = max(self._n_entries, entry + 1)
        self._entries[entry] = _unit_rows(self._matrix)
        self._shares[entry] = _normalised_rows(self._matrix)
        self._n_matches[entry] = 1
        self._matrix[:] = 0.0
        self._n_steps = 0
        self._nearest = -1
        self._prioritise()

    def _prioritise(self) -> None:
        np.copyto(self._priority, _normalised_rows(self._matrix))
        if self._nearest >= 0:
            self._priority += self._shares[self._nearest]
        self._priority += _EPSILON


def _unit_rows(matrix: FloatArray) -> FloatArray:
    length = np.sqrt(np.einsum("ij,ij->i", matrix, matrix))
    return np.asarray(matrix / np.maximum(length, np.float32(1e-30))[:, None])


def _normalised_rows(matrix: FloatArray) -> FloatArray:
    return np.asarray(matrix / np.maximum(matrix.sum(axis=1, keepdims=True), np.float32(1e-30)))
