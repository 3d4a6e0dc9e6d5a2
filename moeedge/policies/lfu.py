"""Policy lfu: least frequently used with decay, one pool of slots for all layers.

Decayed frequency is the classic compromise between LFU and LRU (LRFU: Lee et al., IEEE Transactions on Computers
50(12), 2001, section 2: every use weighs (1/2)^(lambda * age)). It is not the rule of one published MoE system.
"""

from __future__ import annotations

import numpy as np

from moeedge.policies.base import CacheShape, Observation, PolicyConfig
from moeedge.policies.planner import PooledPolicy

_KEPT = np.float32(0.9)  # of a frequency, per step: the half-life is 6.6 steps
_USES_PER_LEVEL = np.float32(4.0)  # of utility, so that the most used experts are uploaded first


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
