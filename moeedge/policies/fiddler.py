"""Policy fiddler: the most popular experts of an offline profile are on the GPU for good, the CPU computes the rest.

Fiddler (Kamahori et al., ICLR 2025, arXiv 2402.07033), section 3: expert popularity is profiled offline on
calibration data and the most popular experts, over all layers, are placed in the GPU memory that is left
(initialization, section 3.2); at run time nothing is cached or prefetched. An expert that is missing is computed on
the CPU, unless so many tokens want it that moving its weights and computing on the GPU is faster by the latency model
(section 3.3) - the case of a long prefill, not of a verification's few tokens. Without a profile the first steps serve
as one, as for policy static.
"""

from __future__ import annotations

from moeedge.policies.static import Static
from moeedge.scheduler.policy import Traits
from moeedge.scheduler.units import Units


class Fiddler(Static):
    """Placement as policy static; `transfers` is the latency model."""

    name = "fiddler"
    traits = Traits(speculation=False)


def transfers(units: Units, n_tokens: int) -> bool:
    """Whether bringing a missing expert for `n_tokens` tokens and computing on the device beats the CPU."""
    return units.transfer_expert_s + units.device_s(n_tokens) < units.cpu_s(n_tokens)
