"""The figures of the expert cache as short texts: one wording for the panel, the stats line, /stats and the header."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moeedge.engine.types import EngineInfo, PlacementStats
from moeedge.ui import meters
from moeedge.ui.figures import NONE, Figure, percent, size

_MIN_BAR = 6  # columns; a shorter one says nothing
_MAX_BAR = 48  # a longer one says no more
_TAU_TOP = 4.0  # the usual cap of utilities
_GB, _MB = 1e9, 1e6  # rates count in thousands
_GIB, _MIB = 1024**3, 1024**2


def device_name(label: str) -> str:
    """The device without what is in brackets behind it."""
    return label.split(" (", 1)[0]


def cache_row(info: EngineInfo) -> str:
    """What the device holds, for the header: slots, memory, share of all experts, policy."""
    if not info.cache_slots:
        return "off"
    return f"{info.cache_slots} slots, {size(info.pool_bytes)}, ratio {info.cache_ratio:.2f}, policy {info.policy}"


def hits(share: float | None) -> str:
    """A hit rate in whole percent."""
    return NONE if share is None else percent(share)


def per_step(count: float | None) -> str:
    """A number of experts per step."""
    if count is None:
        return NONE
    return f"{count:.0f}/step" if count >= 100 else f"{count:.1f}/step"


def link(stats: PlacementStats) -> str:
    """Bytes per second while something was being transferred."""
    rate = stats.link_bytes_per_s
    if rate is None:
        return NONE
    return f"{rate / _GB:.1f} GB/s" if rate >= _GB else f"{rate / _MB:.0f} MB/s"


def shares(stats: PlacementStats) -> list[Figure]:
    """Parts of the steps' time in percent. The device computes beside the CPU, so that they need not add up to 100."""
    if stats.decode_s <= 0:
        return []
    parts = (("CPU", stats.cpu_s), ("device", stats.device_s), ("waiting", stats.wait_s), ("draft", stats.draft_s))
    return [Figure(label, percent(part_s / stats.decode_s)) for label, part_s in parts]


def share_text(stats: PlacementStats) -> str:
    """The parts in one line."""
    return ", ".join(f"{part.label} {part.value}" for part in shares(stats)) or NONE


def share_line(stats: PlacementStats, columns: int) -> str:
    """The same with its label, both shortened where it is narrow."""
    text = f"step time {share_text(stats)}"
    if len(text) <= columns:
        return text
    short = {"device": "dev", "waiting": "wait"}
    parts = (f"{short.get(part.label, part.label)} {part.value.replace(' ', '')}" for part in shares(stats))
    return " ".join(parts)


def memory_text(stats: PlacementStats) -> str:
    """Used and total memory of the device as its driver says, else what the slots take."""
    if stats.vram_used_bytes is None or not stats.vram_total_bytes:
        return f"slots {size(stats.pool_bytes)}"
    used, total = stats.vram_used_bytes, stats.vram_total_bytes
    number, unit = size(total).split(" ")
    if unit == "GiB":
        return f"{used / _GIB:.1f} of {number} {unit}"
    return f"{used / _MIB:.0f} of {number} {unit}"


def memory_line(stats: PlacementStats, columns: int) -> str:
    """The same behind a bar; the emulated device is called so."""
    text = memory_text(stats)
    if device_name(stats.device) == "emulated":
        text += ", emulated"
    room = min(columns - len(text) - 1, _MAX_BAR)
    if stats.vram_used_bytes is None or not stats.vram_total_bytes or room < _MIN_BAR:
        return text
    return f"{meters.bar(stats.vram_used_bytes / stats.vram_total_bytes, room)} {text}"


def tau_values(stats: PlacementStats) -> list[float]:
    """The thresholds per expert layer; those above every utility (nothing is hot) as one above the cap."""
    return [value if math.isfinite(value) else _TAU_TOP + 1 for value in stats.tau]


def tau_range(values: Sequence[float]) -> str:
    """Lowest and highest threshold."""
    low, high = (f"{round(value, 1):g}" for value in (min(values), max(values)))
    return low if low == high else f"{low}-{high}"


def tau_line(stats: PlacementStats, columns: int) -> str:
    """A sparkline over the layers and the range of its values."""
    values = tau_values(stats)
    text = tau_range(values)
    line = meters.sparkline(values, max(columns - len(text) - 1, 1), top=max(_TAU_TOP, *values))
    return f"{line} {text}"


def live_cache_figures(stats: PlacementStats) -> list[Figure]:
    """What the panel adds; `rank` says what a small window drops first."""
    figures = [
        Figure("cache hits", hits(stats.hit_rate_pairs)),
        Figure("expert hits", hits(stats.hit_rate_unique), rank=1),
        Figure("slots", f"{stats.slots_used}/{stats.slots_total}", rank=2),
        Figure("uploads", per_step(stats.uploads_per_step), rank=3),
        Figure("evictions", per_step(stats.evictions_per_step), rank=5),
        Figure("link", link(stats), rank=4),
        Figure("VRAM", memory_text(stats), draw=lambda columns: memory_line(stats, columns), rank=1),
        Figure("", "", draw=lambda columns: share_line(stats, columns), rank=3),
    ]
    if stats.lost:
        figures.insert(0, Figure("", "device lost"))
    if stats.tau:
        figures.append(Figure("tau", "", draw=lambda columns: tau_line(stats, columns), rank=2))
    return figures


def table(stats: PlacementStats) -> list[Figure]:
    """The same as rows of a table."""
    rows = [
        Figure("cache", f"{stats.device}, ratio {stats.cache_ratio:.2f}, policy {stats.policy}"),
        Figure("hits", f"{hits(stats.hit_rate_pairs)} of pairs, {hits(stats.hit_rate_unique)} of experts"),
        Figure("slots", f"{stats.slots_used} of {stats.slots_total}, {size(stats.pool_bytes)}"),
        Figure("VRAM", memory_text(stats) + (", emulated" if device_name(stats.device) == "emulated" else "")),
        Figure("moved", moved(stats)),
        Figure("step time", share_text(stats)),
    ]
    if stats.tau:
        values = tau_values(stats)
        rows.append(Figure("tau", f"{meters.sparkline(values, 48, top=max(_TAU_TOP, *values))} {tau_range(values)}"))
    if stats.lost:
        rows.append(Figure("", "The device was lost; the CPU went on alone."))
    return rows


def moved(stats: PlacementStats) -> str:
    """Uploads, evictions and bytes."""
    return (
        f"uploads {per_step(stats.uploads_per_step)}, evictions {per_step(stats.evictions_per_step)}, "
        f"{size(stats.bytes_moved)} at {link(stats)}"
    )
