"""Policies lru, lfu, static and none; and the order of use, which other caches share. One pool for all layers.

lru     Least recently used. Within a batch the experts of a later token are more recent, where the tokens' expert ids
        are known. lab/policies/prefetching.py has slots per layer.
lfu     Least frequently used with decay, the classic compromise between LFU and LRU (LRFU: Lee et al., IEEE
        Transactions on Computers 50(12), 2001, section 2: every use weighs (1/2)^(lambda * age)).
static  The most used experts of a profile, or, without one, of the first steps; then no expert moves.
none    No expert is moved; the CPU computes every expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeedge.experts import BoolArray, FloatArray, Resident
from moeedge.policies.base import CacheShape, ExpertPrediction, Observation, Plan, Policy, PolicyConfig
from moeedge.policies.planner import PooledPolicy

_RENUMBER_AT = float(1 << 16)  # tokens: below it float32 resolves a hundredth of one
_KEPT = np.float32(0.9)  # of a frequency, per step: the half-life is 6.6 steps
_USES_PER_LEVEL = np.float32(4.0)  # of utility, so that the most used experts are uploaded first
_N_STEPS = 16  # verifications that replace a profile


class Recency:
    """The order in which experts were used; arrays [n_layers, n_experts]."""

    def __init__(self, n_layers: int, n_experts: int) -> None:
        self.last: FloatArray = np.zeros((n_layers, n_experts), dtype=np.float32)  # number of the last token, 0: never
        self.used: BoolArray = np.zeros((n_layers, n_experts), dtype=np.bool_)  # in the last step
        self.now = 0.0  # tokens so far
        self._layers = np.arange(n_layers)[:, None]

    def observe(self, observation: Observation) -> None:
        np.greater(observation.counts, 0, out=self.used)
        self.last[self.used] = self.now + 1.0
        if observation.ids is not None:
            for token in range(observation.ids.shape[1]):
                ids = observation.ids[:, token]  # [n_layers, k]
                if ids.min(initial=0) >= 0:
                    self.last[self._layers, ids] = self.now + 1.0 + token
                else:
                    layers, ranks = np.nonzero(ids >= 0)
                    self.last[layers, ids[layers, ranks]] = self.now + 1.0 + token
        self.now += max(observation.n_tokens, 1)
        if self.now > _RENUMBER_AT:
            self.now -= _RENUMBER_AT / 2
            self.last -= np.float32(_RENUMBER_AT / 2)
            np.maximum(self.last, 0.0, out=self.last)

    def ahead(self, counts: FloatArray, chosen: BoolArray, out: FloatArray) -> FloatArray:
        """`last` in `out`, with the `chosen` experts as if the next token had used them, in the order of `counts`."""
        np.copyto(out, self.last)
        chosen_counts = counts[chosen]
        out[chosen] = self.now + 0.5 + 0.4 * chosen_counts / max(float(chosen_counts.max(initial=0.0)), 1.0)
        return out


class Lru(PooledPolicy):
    """Score: the number of the token that used the expert last. Only experts of the last step are uploaded."""

    name = "lru"

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, config)
        self._recency = Recency(shape.n_layers, shape.n_experts)
        self._score, self._used = self._recency.last, self._recency.used

    def observe(self, observation: Observation) -> None:
        self._recency.observe(observation)
        np.copyto(self._utility, self._recency.used)


class Lfu(PooledPolicy):
    """Score: decayed number of uses. Only experts of the last step are uploaded."""

    name = "lfu"

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, config)
        self._used = np.zeros(self._score.shape, dtype=np.bool_)

    def observe(self, observation: Observation) -> None:
        """Counts uses; a prefill counts as its mean token, or one prompt would outweigh every later step."""
        self._score *= _KEPT
        weight = 1.0 / max(observation.n_tokens, 1) if observation.prefill else 1.0
        self._score += observation.counts * np.float32(weight)
        np.greater(observation.counts, 0, out=self._used)
        np.minimum(self._score / _USES_PER_LEVEL, self._cap, out=self._utility)


class Static(PooledPolicy):
    """Score: activations."""

    name = "static"

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, config, evict=True)
        self._steps_left = _N_STEPS
        if config.profile is not None:
            self._score[:] = config.profile
            self._steps_left = 0

    def observe(self, observation: Observation) -> None:
        if self._steps_left > 0:
            self._score += observation.counts.astype(np.float32)
            self._steps_left -= not observation.prefill

    def _set_utilities(self, lowest: list[float]) -> None:
        # the last is of layers without experts, whose group is -1
        least = np.array([*(max(value, 1e-30) for value in lowest), np.inf], dtype=np.float32)
        np.copyto(self._utility, self._score >= least[self.shape.group][:, None])


class NoCache(Policy):
    name = "none"

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, config)
        self._tau[:] = config.cap
        nothing = np.zeros(0, dtype=np.intp)
        self._plan = self._make_plan(nothing, nothing.astype(np.uint8), nothing)

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        return self._plan
