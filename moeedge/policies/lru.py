"""Policy lru: what was used last stays on the device, what was not used for longest makes room.

The order of use is that of the tokens: within a batch the later token's experts are the more recent, where the ids are
known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.config import PolicyConfig
from moeedge.scheduler.plan import Planner
from moeedge.scheduler.policy import CacheShape, Hints, Observation, Plan, Resident, Traits

FloatArray = NDArray[np.float32]
_RENUMBER_AT = float(1 << 22)  # tokens: far below where float32 loses count


class Lru:
    """Score: the number of the token that used the expert last."""

    name = "lru"
    traits = Traits()
    needs: frozenset[str] = frozenset()

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        cells = (shape.n_layers, shape.n_experts)
        self._first_come = config.first_come
        self._planner = Planner(shape, config.cap, evict=config.evicts)
        self._last: FloatArray = np.zeros(cells, dtype=np.float32)  # 0: never
        self._utility: FloatArray = np.zeros(cells, dtype=np.float32)
        self._used = np.zeros(cells, dtype=np.bool_)
        self._layers = np.arange(shape.n_layers)[:, None]
        self._now = 0.0
        self._tau: FloatArray = np.ones(shape.n_layers, dtype=np.float32)

    def observe(self, observation: Observation) -> None:
        """Notes what was used."""
        np.greater(observation.counts, 0, out=self._used)
        n_tokens = max(observation.n_tokens, 1)
        self._last[self._used] = self._now + 1.0
        if observation.ids is not None:
            for token in range(observation.ids.shape[1]):
                ids = observation.ids[:, token]
                known = ids >= 0
                if known.all():
                    self._last[self._layers, ids] = self._now + 1.0 + token
                else:
                    layers = np.broadcast_to(self._layers, ids.shape)[known]
                    self._last[layers, ids[known]] = self._now + 1.0 + token
        self._now += n_tokens
        if self._now > _RENUMBER_AT:
            self._now -= _RENUMBER_AT / 2
            self._last -= np.float32(_RENUMBER_AT / 2)
            np.maximum(self._last, 0.0, out=self._last)
        np.copyto(self._utility, self._used)

    def plan(self, resident: Resident, upcoming: Sequence[int], hints: Hints | None = None) -> Plan:
        """Loads what was missed; what is coming plays no part."""
        self._planner.fit(self._last, resident, 0.0)
        return self._planner.moves(self._last, self._utility, self._tau, resident, allowed=self._used)

    def reset(self) -> None:
        """What was used last was used last in this conversation, too."""
