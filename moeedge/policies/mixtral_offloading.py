"""Policy mixtral-offloading: an LRU cache of k experts per layer, misses loaded on demand, and two guesses ahead.

Eliseev & Mazur, "Fast Inference of Mixture-of-Experts Language Models with Offloading" (arXiv 2312.17238). The k most
recently used experts of each layer are kept, k the same for all layers (repository dvmazur/mixtral-offloading,
src/expert_cache.py: an eviction group per layer, least recently used first). Speculative loading: when the experts of a
layer are loaded, the next layer's gate is applied to this layer's input and the 1 or 2 likeliest of its experts are
brought; that part is in the paper alone, whose text was not at hand. All is computed on the GPU.

In the paper a guess waits in a buffer and takes a place of the cache only when it is used; here it takes the place of
the layer's least recently used expert at once, and is the next to go where it was wrong.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.layer_lru import LayerLru, likeliest
from moeedge.scheduler.policy import Resident, Traits

_GUESSES = 2  # experts per layer


class MixtralOffloading(LayerLru):
    """The likeliest two, whether they are there or not."""

    name = "mixtral-offloading"
    traits = Traits(device_only=True, per_layer_slots=True, prefetch_within_step=True, speculation=False)
    needs = frozenset({"block-inputs"})

    def wanted(self, counts: NDArray[np.float32], resident: Resident) -> NDArray[np.bool_]:
        """See the module."""
        return likeliest(counts, _GUESSES)
