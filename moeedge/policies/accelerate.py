"""Policy accelerate: modules fill the GPU in their order; the others are brought for their forward and dropped.

`device_map="auto"` (Accelerate, utils/modeling.py, infer_auto_device_map; hooks.py, AlignDevicesHook): the first layers
are resident, and a hook moves the weights of the others before they compute, and away after it: of experts, which are
modules of their own, those in use.
"""

from __future__ import annotations

from moeedge.policies.layers import Layers
from moeedge.scheduler.policy import Traits


class Accelerate(Layers):
    """The last layers are brought for each pass."""

    name = "accelerate"
    traits = Traits(device_only=True, layerwise=True, speculation=False)
    from_last = False
