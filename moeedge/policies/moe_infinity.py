"""Policy moe-infinity: the sequence whose activations are most like this one's says what comes next.

MoE-Infinity (Xue et al., arXiv 2401.14361), by its repository (EfficientMoE/MoE-Infinity, moe_infinity/memory/); the
paper's text was not at hand:
- tracing: an expert activation matrix [layers, experts] per sequence counts its activations; matrices of past
  sequences form a collection of fixed capacity (expert_tracer.py, finish_entry: a free entry, else the one that was
  matched least).
- prediction: the collection's entry nearest to the current matrix, by the mean over the layers of the cosine of their
  rows (find_most_similar, which leaves out the layers already passed; here all count); its rows, less the farther the
  layer is ahead (expert_predictor.py, predict: 1 - (x - l) / (L + 1)), are the priorities.
- prefetch: all experts with a priority, best first, from the current layer on (expert_prefetcher.py).
- cache: one for all layers; what is evicted has the lowest priority: the current sequence's activations times the
  layer's nearness to the first, which prefetch cannot help, times the expert's uses so far (expert_priority_score.py,
  priority_score; the last factor is left out here). Misses are loaded on demand, all is computed on the GPU.

Here the priorities of the prefetch order the cache, too, with the current sequence's own activations added to the
entry's, as priority_score has them: a plan names what should be there, and both sides of it must agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import CacheShape, ExecutionModel, ExpertPrediction, Observation, Plan, Resident
from moeedge.policies.config import PolicyConfig
from moeedge.policies.planner import IN_FLIGHT, Planner

FloatArray = NDArray[np.float32]

_CAPACITY = 64  # sequences in the collection: ours, the repository leaves it to its configuration
_MATCH_EVERY = 4  # steps: the nearest entry of a sequence changes slowly
_NOTHING = np.float32(1e-8)  # added to every prediction, as the repository does


class MoeInfinity:
    """Score: the predicted share of its layer's activations, times the layer's nearness."""

    name = "moe-infinity"
    execution_model = ExecutionModel(device_only=True, prefetch_within_step=True, speculation=False)
    required_inputs: frozenset[str] = frozenset()

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        cells = (shape.n_layers, shape.n_experts)
        self.shape = shape
        self._cap = np.float32(config.cap)
        self._planner = Planner(shape, config.cap, evict=config.evicts)
        self._matrix: FloatArray = np.zeros(cells, dtype=np.float32)  # of the current sequence
        self._entries: FloatArray = np.zeros((_CAPACITY, *cells), dtype=np.float32)  # rows have length 1
        self._shares: FloatArray = np.zeros((_CAPACITY, *cells), dtype=np.float32)  # rows add up to 1
        self._matched = np.zeros(_CAPACITY, dtype=np.int64)
        self._n_entries = 0
        self._n_steps = 0
        self._nearest = -1
        self._score: FloatArray = np.zeros(cells, dtype=np.float32)
        self._utility: FloatArray = np.zeros(cells, dtype=np.float32)
        self._tau: FloatArray = np.ones(shape.n_layers, dtype=np.float32)
        self._decay = self._decay_from(0)

    def observe(self, observation: Observation) -> None:
        """Adds to the sequence's matrix, and looks for the entry nearest to it."""
        self._matrix += observation.counts
        if self._n_entries and (observation.prefill or self._n_steps % _MATCH_EVERY == 0):
            rows = _of_length_one(self._matrix)
            # the mean over layers of the rows' cosines: the rows have length 1
            alike = np.einsum("ijk,jk->i", self._entries[: self._n_entries], rows)
            self._nearest = int(alike.argmax())
            self._matched[self._nearest] += 1
        self._n_steps += not observation.prefill

    def plan(self, resident: Resident, upcoming: Sequence[int], hints: ExpertPrediction | None = None) -> Plan:
        """What a pass that starts at the first layer will want."""
        return self._plan(resident, self._decay)

    def plan_layer(self, layer: int, resident: Resident, hints: ExpertPrediction | None = None) -> Plan:
        """What the layers behind `layer` will want; those before it go first, and it keeps what it computes with."""
        in_use = np.asarray(resident, dtype=np.uint8).copy()
        in_use[layer, in_use[layer] > 0] = IN_FLIGHT  # what is on its way is no victim
        return self._plan(in_use, self._decay_from(layer + 1))

    def reset(self) -> None:
        """The sequence ends: its matrix joins the collection."""
        if self._n_steps == 0:
            return
        if self._n_entries < _CAPACITY:
            place = self._n_entries
            self._n_entries += 1
        else:
            place = int(self._matched.argmin())
        self._entries[place] = _of_length_one(self._matrix)
        self._shares[place] = _of_sum_one(self._matrix)
        self._matched[place] = 1
        self._matrix[:] = 0.0
        self._n_steps = 0
        self._nearest = -1

    def _plan(self, resident: Resident, decay: FloatArray) -> Plan:
        score = self._score
        np.copyto(score, _of_sum_one(self._matrix))
        if self._nearest >= 0:
            score += self._shares[self._nearest]
        score += _NOTHING
        score *= decay
        marginal = self._planner.fit(score, resident, 0.0)
        unit = max(max((value for value in marginal if np.isfinite(value)), default=0.0), float(_NOTHING))
        np.minimum(score / np.float32(unit), self._cap, out=self._utility)
        return self._planner.moves(score, self._utility, self._tau, resident)

    def _decay_from(self, layer: int) -> FloatArray:
        """1 at `layer`, less for every layer behind it, nothing before it; [n_layers, 1]."""
        ahead = np.arange(self.shape.n_layers) - layer
        decay = np.where(ahead >= 0, 1.0 - ahead / (self.shape.n_layers + 1), 0.0)
        return np.asarray(decay[:, None], dtype=np.float32)


def _of_length_one(matrix: FloatArray) -> FloatArray:
    length = np.sqrt(np.einsum("ij,ij->i", matrix, matrix))
    return np.asarray(matrix / np.maximum(length, np.float32(1e-30))[:, None])


def _of_sum_one(matrix: FloatArray) -> FloatArray:
    return np.asarray(matrix / np.maximum(matrix.sum(axis=1, keepdims=True), np.float32(1e-30)))
