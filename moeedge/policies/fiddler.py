"""Policy fiddler: the most popular experts of an offline profile are on the GPU for good, the CPU computes the rest.

Fiddler (Kamahori et al., ICLR 2025, arXiv 2402.07033), by its abstract and its repository (efeslab/fiddler,
src/fiddler/mixtral.py); the paper's text was not at hand. Experts are ranked by popularity on calibration data, over
all layers, and the first of them fill the GPU memory that is left (set_expert_loc); at run time nothing is cached or
prefetched. An expert that is missing is computed on the CPU.

Not here: where so many tokens want a missing expert that the CPU would take longer than one transfer (10 tokens by the
repository's constants, a prompt rather than a verification), its weights are moved for that once. Without a profile
the first steps serve as one, as for policy static.
"""

from __future__ import annotations

from moeedge.policies.static import Static
from moeedge.scheduler.policy import Traits


class Fiddler(Static):
    """Placement as policy static."""

    name = "fiddler"
    traits = Traits(speculation=False)
