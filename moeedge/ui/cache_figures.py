"""The figures of the expert cache as short texts, with one wording for the panel and /stats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeedge.ui import figures
from moeedge.ui.figures import NONE, Figure, device_name, percent
from moeedge.units import format_bytes

if TYPE_CHECKING:
    from moeedge.scheduler.stats import PlacementStats

_MIN_BAR = 6  # columns; a shorter bar shows too little
_MAX_BAR = 48  # columns; a longer bar shows no more
_TAU_TOP = 4.0  # the usual cap of utilities
_GB, _MB = 1e9, 1e6  # rates count in thousands


def per_step(count: float | None) -> str:
    """Experts per step."""
    if count is None:
        return NONE
    return f"{count:.0f}" if count >= 100 else f"{count:.1f}"


def link(stats: PlacementStats) -> str:
    """Bytes per second during transfers."""
    rate = stats.link_bytes_per_s
    if rate is None:
        return NONE
    return f"{rate / _GB:.1f} GB/s" if rate >= _GB else f"{rate / _MB:.0f} MB/s"


def shares(stats: PlacementStats) -> list[Figure]:
    """Parts of the steps' time in percent: experts on the CPU, on the device, waiting for it, drafting, and the rest.

    The device computes at the same time as the CPU, so that its part comes on top of the others' 100 percent.
    """
    if stats.decode_s <= 0:
        return []
    rest_s = max(stats.decode_s - stats.cpu_s - stats.wait_s - stats.draft_s, 0.0)
    parts = (
        ("CPU", stats.cpu_s),
        ("device", stats.device_s),
        ("waiting", stats.wait_s),
        ("draft", stats.draft_s),
        ("rest", rest_s),
    )
    return [Figure(label, percent(part_s / stats.decode_s)) for label, part_s in parts]


def share_line(stats: PlacementStats, columns: int) -> str:
    """The parts in one line, shortened where it is narrow."""
    parts = shares(stats)
    full = ", ".join(f"{part.label} {part.value}" for part in parts) or NONE
    short = {"device": "dev", "waiting": "wait"}
    cut = [f"{short.get(part.label, part.label)} {part.value.replace(' ', '')}" for part in parts]
    forms = (f"step time: {full}", full, " ".join(cut), " ".join(cut[:-1]))
    return next((form for form in forms if len(form) <= columns), forms[-1])


def memory(stats: PlacementStats) -> tuple[float, int] | None:
    """Used and total bytes of the device as its driver reports them; for the emulated device, of its slots."""
    if is_emulated(stats) and stats.slots_total:
        return stats.pool_bytes * stats.slots_used / stats.slots_total, stats.pool_bytes
    if stats.vram_used_bytes is None or not stats.vram_total_bytes:
        return None
    return stats.vram_used_bytes, stats.vram_total_bytes


def is_emulated(stats: PlacementStats) -> bool:
    """Whether the device is a second CPU instance."""
    return device_name(stats.device) == "emulated"


def memory_text(stats: PlacementStats) -> str:
    """Used and total memory, or the size of the slots if the driver does not report it."""
    known = memory(stats)
    if known is None:
        return f"slots {format_bytes(stats.pool_bytes)}"
    total = format_bytes(known[1])
    used = format_bytes(int(known[0])).removesuffix(total[total.index(" ") :])
    return f"{used} of {total}" + (", emulated" if is_emulated(stats) else "")


def memory_line(stats: PlacementStats, columns: int) -> str:
    """`memory_text` after a bar."""
    text = memory_text(stats)
    known = memory(stats)
    room = min(columns - len(text) - 1, _MAX_BAR)
    if known is None or room < _MIN_BAR:
        return text
    return f"{figures.bar(known[0] / known[1], room)} {text}"


def tau_values(stats: PlacementStats) -> list[float]:
    """The thresholds per expert layer; an infinite one (no expert is hot) as one above the cap."""
    return [value if math.isfinite(value) else _TAU_TOP + 1 for value in stats.tau]


def tau_range(values: Sequence[float]) -> str:
    """Lowest and highest threshold."""
    low, high = (f"{round(value, 1):g}" for value in (min(values), max(values)))
    return low if low == high else f"{low}-{high}"


def tau_line(stats: PlacementStats, columns: int) -> str:
    """A sparkline over the layers and the range of its values."""
    values = tau_values(stats)
    text = tau_range(values)
    line = figures.sparkline(values, max(columns - len(text) - 1, 1), top=max(_TAU_TOP, *values))
    return f"{line} {text}"


def live_cache_figures(stats: PlacementStats) -> list[Figure]:
    """The panel's figures of the cache; a small window drops the highest `rank` first."""
    if stats.lost:
        return [Figure("", "device lost: all on CPU")]
    shown = [
        Figure("hit rate", percent(stats.hit_rate_pairs)),
        Figure("expert hits", percent(stats.hit_rate_unique), rank=1),
        Figure("slots", f"{stats.slots_used}/{stats.slots_total}", rank=2),
        Figure("uploads/step", per_step(stats.uploads_per_step), rank=3),
        Figure("evictions/step", per_step(stats.evictions_per_step), rank=5),
        Figure("link", link(stats), rank=4),
        Figure("VRAM", memory_text(stats), draw=lambda columns: memory_line(stats, columns), rank=1),
        Figure("", "", draw=lambda columns: share_line(stats, columns), rank=3),
    ]
    if stats.tau:
        shown.append(Figure("tau", "", draw=lambda columns: tau_line(stats, columns), rank=2))
    return shown


def table(stats: PlacementStats) -> list[Figure]:
    """The figures of the cache as rows of /stats: those of the panel and sums."""
    return [
        Figure("cache", f"{stats.device}, ratio {stats.cache_ratio:.2f}, policy {stats.policy}"),
        *live_cache_figures(stats),
        Figure("moved", format_bytes(stats.bytes_moved)),
    ]
