"""Which modes are measured side by side: all of them where their expert caches fit the device at once, else one by one.

A pass is a set of modes that take turns. The first has the stock modes and as many caches as fit. Every later pass has
one more cache and the reference beside it, once more: ratios stay those of neighbours in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from moeedge.bench.lanes import Lane
from moeedge.bench.modes import REFERENCE, BenchMode
from moeedge.bench.samples import Sample
from moeedge.bench.sweep import is_swept
from moeedge.engine.expert_tensors import expert_bytes, expert_tensors

# of what is free; the rest is for compute buffers and for others
_USABLE = 0.8


@dataclass
class Pass:
    """Modes that take turns, and what they measured. `repeated` is the reference of another pass: it gets no row."""

    modes: tuple[BenchMode, ...]
    repeated: str | None = None  # label of a mode
    lanes: list[Lane] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=dict)  # by test
    vram_bytes: dict[str, int] = field(default_factory=dict)  # in use on the device at the end, by label


def split_passes(modes: Sequence[BenchMode], *, together: bool) -> list[Pass]:
    """One pass, or one per swept mode where their caches do not fit the device together."""
    swept = [mode for mode in modes if is_swept(mode)]
    if together or len(swept) < 2:
        return [Pass(tuple(modes))]
    stock = tuple(mode for mode in modes if not is_swept(mode))
    reference = tuple(mode for mode in stock if mode.name == REFERENCE)
    repeated = REFERENCE if reference else None
    return [Pass((*stock, swept[0])), *(Pass((*reference, mode), repeated) for mode in swept[1:])]


def largest_cache(modes: Sequence[BenchMode]) -> BenchMode:
    """The swept mode that asks for the largest cache; a size that the engine chooses counts as the largest."""
    return max(modes, key=lambda mode: 2.0 if mode.cache_ratio is None else mode.cache_ratio)


def caches_fit(probe: Lane, others: Sequence[BenchMode]) -> bool:
    """Whether the device has room for the caches of `others` beside that of `probe`, which is open.

    The emulated device is memory of this machine. What no driver tells is taken as no room.
    """
    stats = probe.session.placement_stats()
    if stats is None:
        return True
    total = expert_bytes(expert_tensors(probe.session.model.path)[0])
    needed = sum(stats.pool_bytes if mode.cache_ratio is None else mode.cache_ratio * total for mode in others)
    if stats.device.startswith("emulated"):
        free_bytes = psutil.virtual_memory().available
    elif stats.vram_used_bytes is not None and stats.vram_total_bytes is not None:
        free_bytes = stats.vram_total_bytes - stats.vram_used_bytes
    else:
        return False
    return needed <= _USABLE * free_bytes
