"""Policy vllm: parameters go to pinned host memory until a budget is spent, and the GPU reads them over the link.

`--cpu-offload-gb`: in the order of the modules, so the last layers are resident; the others cross the link whenever
they are computed (vLLM, model_executor/offloader/uva.py, UVAOffloader: zero-copy views of host memory).
"""

from __future__ import annotations

from moeedge.policies.layers import Layers
from moeedge.scheduler.policy import Traits


class Vllm(Layers):
    """The first layers are read over the link."""

    name = "vllm"
    traits = Traits(device_only=True, layerwise=True, speculation=False)
