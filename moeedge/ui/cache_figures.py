"""The figures of the expert cache as short texts: one wording for the panel, the stats line, /stats and the header."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moeedge.scheduler.stats import PlacementStats
from moeedge.ui import figures
from moeedge.ui.figures import NONE, Figure, device_name, percent, size

_MIN_BAR = 6  # columns; a shorter one says nothing
_MAX_BAR = 48  # a longer one says no more
_TAU_TOP = 4.0  # the usual cap of utilities
_GB, _MB = 1e9, 1e6  # rates count in thousands
_GIB, _MIB = 1024**3, 1024**2


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
    """Parts of the steps' time in percent: experts on the CPU, the CPU's wait for the device, drafting, and the rest.

    The device computes its experts beside the CPU, so that its part comes on top of the others' 100 percent.
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
    whole = ", ".join(f"{part.label} {part.value}" for part in parts) or NONE
    short = {"device": "dev", "waiting": "wait"}
    cut = [f"{short.get(part.label, part.label)} {part.value.replace(' ', '')}" for part in parts]
    forms = (f"step time: {whole}", whole, " ".join(cut), " ".join(cut[:-1]))
    return next((form for form in forms if len(form) <= columns), forms[-1])


def memory(stats: PlacementStats) -> tuple[float, int] | None:
    """Used and total bytes: of the device as its driver says; of the emulated one what its slots hold."""
    if is_emulated(stats) and stats.slots_total:
        return stats.pool_bytes * stats.slots_used / stats.slots_total, stats.pool_bytes
    if stats.vram_used_bytes is None or not stats.vram_total_bytes:
        return None
    return stats.vram_used_bytes, stats.vram_total_bytes


def is_emulated(stats: PlacementStats) -> bool:
    """Whether the device is a second CPU instance."""
    return device_name(stats.device) == "emulated"


def memory_text(stats: PlacementStats) -> str:
    """The memory in words; where nobody tells, what the slots take. The emulated device is called so."""
    known = memory(stats)
    if known is None:
        return f"slots {size(stats.pool_bytes)}"
    used, total = known
    number, unit = size(total).split(" ")
    text = f"{used / _GIB:.1f}" if unit == "GiB" else f"{used / (_MIB if unit == 'MiB' else 1024):.0f}"
    return f"{text} of {number} {unit}" + (", emulated" if is_emulated(stats) else "")


def memory_line(stats: PlacementStats, columns: int) -> str:
    """The same behind a bar."""
    text = memory_text(stats)
    known = memory(stats)
    room = min(columns - len(text) - 1, _MAX_BAR)
    if known is None or room < _MIN_BAR:
        return text
    return f"{figures.bar(known[0] / known[1], room)} {text}"


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
    line = figures.sparkline(values, max(columns - len(text) - 1, 1), top=max(_TAU_TOP, *values))
    return f"{line} {text}"


def live_cache_figures(stats: PlacementStats) -> list[Figure]:
    """What the panel adds; `rank` says what a small window drops first."""
    if stats.lost:
        return [Figure("", "device lost: all on CPU")]
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
    if stats.tau:
        figures.append(Figure("tau", "", draw=lambda columns: tau_line(stats, columns), rank=2))
    return figures


def table(stats: PlacementStats) -> list[Figure]:
    """The same as rows of a table."""
    rows = [
        Figure("cache", f"{stats.device}, ratio {stats.cache_ratio:.2f}, policy {stats.policy}"),
        Figure("hits", f"{hits(stats.hit_rate_pairs)} of pairs, {hits(stats.hit_rate_unique)} of experts"),
        Figure("slots", f"{stats.slots_used} of {stats.slots_total}, {size(stats.pool_bytes)}"),
        Figure("VRAM", memory_text(stats)),
        Figure("moved", moved(stats)),
        Figure("step time", ", ".join(f"{part.label} {part.value}" for part in shares(stats)) or NONE),
    ]
    if stats.tau:
        rows.append(Figure("tau", "", draw=lambda columns: tau_line(stats, columns)))
    if stats.lost:
        rows.append(Figure("", "The device was lost; the CPU went on alone."))
    return rows


def moved(stats: PlacementStats) -> str:
    """Uploads, evictions and bytes."""
    return (
        f"uploads {per_step(stats.uploads_per_step)}, evictions {per_step(stats.evictions_per_step)}, "
        f"{size(stats.bytes_moved)} at {link(stats)}"
    )
