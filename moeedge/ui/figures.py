"""Figures as short texts: units, and those of the expert cache, in one wording for panel, /stats and profile."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from moeedge.units import format_bytes, format_rate

if TYPE_CHECKING:
    from moeedge.engine.types import EngineInfo
    from moeedge.policies.base import LookaheadStatus
    from moeedge.scheduler.cache_governor import CacheChoice
    from moeedge.scheduler.stats import PlacementStats

NONE = "-"  # stands for a figure that is not known


@dataclass(frozen=True)
class Figure:
    """A label and its value as text."""

    label: str
    value: str
    draw: Callable[[int], str] | None = field(default=None, compare=False)  # draws the value in so many columns
    rank: int = field(default=0, compare=False)  # where there is no room, the highest rank is left out first


def speed(value_ts: float) -> str:
    """Tokens per second with three significant digits."""
    if value_ts <= 0:
        return NONE
    return f"{value_ts:.0f} t/s" if value_ts >= 100 else f"{value_ts:.1f} t/s"


def seconds(value_s: float) -> str:
    """A duration; milliseconds below a second."""
    if value_s <= 0:
        return NONE
    return f"{value_s * 1000:.0f} ms" if value_s < 1 else f"{value_s:.1f} s"


def percent(share: float | None) -> str:
    """A share from 0 to 1 in percent, without decimals."""
    return NONE if share is None else f"{100 * share:.0f} %"


def device_name(label: str) -> str:
    """A device's label without the part in brackets."""
    return label.split(" (", 1)[0]


def budget(info: EngineInfo) -> str:
    """The expert budget in the words that every result under one carries; empty without one."""
    return "" if info.expert_budget is None else info.expert_budget.label_at(info.gamma)


def per_layer(count: float | None) -> str:
    """Experts per layer and step."""
    if count is None:
        return NONE
    return f"{count:.1f}" if count >= 10 else f"{count:.2f}"


def shares(parts_s: Mapping[str, float], total_s: float) -> list[Figure]:
    """Parts of a time and "the rest" in whole percents that add up to 100; none where no time has passed.

    Parts that exceed the total, as clocks of several threads may, are shares of their sum.
    """
    total_s = max(total_s, math.fsum(parts_s.values()))
    if total_s <= 0:
        return []
    exact = {label: 100 * part_s / total_s for label, part_s in parts_s.items()}
    exact["the rest"] = 100 - math.fsum(exact.values())
    whole = {label: math.floor(share) for label, share in exact.items()}
    by_remainder = sorted(exact, key=lambda label: whole[label] - exact[label])
    for label in by_remainder[: 100 - sum(whole.values())]:
        whole[label] += 1
    return [Figure(label, f"{share} %") for label, share in whole.items()]


def time_figures(stats: PlacementStats) -> list[Figure]:
    """What the steps' time goes to: drafts, experts on the CPU, waiting for the device or the disk, and the rest.

    The device computes at the same time as the CPU, so that its own time is no part of these (`device_share`).
    """
    waiting = "waiting for the disk" if is_ram(stats.device) else "waiting for the device"
    parts_s = {"drafts": stats.draft_s, "experts on the CPU": stats.cpu_s, waiting: stats.wait_s}
    return shares(parts_s, stats.decode_s)


def lookahead(status: LookaheadStatus) -> str:
    """Whether experts are predicted from the draft, and what that brings."""
    if not status.used:
        return f"off: {status.reason}" if status.reason else "off"
    return "on" if status.gain is None else f"on, {100 * status.gain:+.0f} % hits"


def share_line(parts: Sequence[Figure], columns: int) -> str:
    """The parts of a time in one line, shortened where it is narrow."""
    full = ", ".join(f"{part.label} {part.value}" for part in parts) or NONE
    words = {"drafts": "draft", "experts on the CPU": "CPU", "the rest": "rest"}
    labels = [words.get(part.label, "wait" if part.label.startswith("waiting") else part.label) for part in parts]
    cut = " ".join(f"{label} {part.value.replace(' ', '')}" for label, part in zip(labels, parts, strict=True))
    shorter = re.sub(r" for the \w+", "", full)
    forms = (f"time: {full}", f"time: {shorter}", f"time: {cut}", cut)
    return next((form for form in forms if len(form) <= columns), forms[-1])


def is_emulated(stats: PlacementStats) -> bool:
    """Whether the device is a second CPU instance."""
    return device_name(stats.device) == "emulated"


def is_ram(device: str) -> bool:
    """Whether the "device" is host memory for a model that is larger, filled from the disk."""
    return device_name(device) == "RAM"


def memory_text(stats: PlacementStats) -> str:
    """Used and total memory of the device, or the size of the slots if the driver does not report it."""
    if stats.vram_used_bytes is None or not stats.vram_total_bytes:
        return f"slots {format_bytes(stats.pool_bytes)}"
    total = format_bytes(stats.vram_total_bytes)
    used = format_bytes(int(stats.vram_used_bytes)).removesuffix(total[total.index(" ") :])
    return f"{used} of {total}"


def tau_text(tau: Sequence[float]) -> str:
    """The range of the thresholds of the expert layers; inf: no expert is hot."""
    low, high = (f"{round(value, 1):g}" for value in (min(tau), max(tau)))
    return low if low == high else f"{low}-{high}"


def _disk_figures(stats: PlacementStats) -> list[Figure]:
    """Experts in RAM: hits, what is read per token, at which rate, and how long the CPU waits for it."""
    read = NONE if stats.bytes_per_token is None else f"{stats.bytes_per_token / 1e6:.3g} MB"
    rate = NONE if stats.link_bytes_per_s is None else format_rate(stats.link_bytes_per_s)
    return [
        Figure("RAM pair hits", percent(stats.hit_rate_pairs)),
        Figure("read/token", read, rank=1),
        Figure("disk", rate, rank=2),
        Figure("disk wait", percent(stats.wait_share), rank=1),
    ]


def cache_effect(choice: CacheChoice) -> str:
    """Whether steps are computed with the cache, and their speed with it over that without."""
    state = "on" if choice.pays else "off"
    return f"{state}, measuring" if choice.gain is None else f"{state}, {choice.gain:.2f}x by measurement"


_RAM_LOST = Figure("", "RAM lost: mapped file")


def live_cache_figures(stats: PlacementStats) -> list[Figure]:
    """The panel's figures of the cache; a small window drops the highest `rank` first."""
    in_ram = [] if stats.ram is None else _ram_figures(stats.ram)
    if stats.lost:
        return [_RAM_LOST if is_ram(stats.device) else Figure("", "device lost: all on CPU"), *in_ram]
    rate = NONE if stats.link_bytes_per_s is None else format_rate(stats.link_bytes_per_s)
    from_disk = is_ram(stats.device)
    shown = [
        *([] if stats.choice is None else [Figure("cache speed", cache_effect(stats.choice), rank=2)]),
        *(_disk_figures(stats) if from_disk else [Figure("pair hits", percent(stats.hit_rate_pairs))]),
        Figure("expert hits", percent(stats.hit_rate_experts), rank=4 if from_disk else 1),
        Figure("slots", f"{stats.slots_used}/{stats.slots_total}", rank=2),
        Figure("loads/layer" if from_disk else "uploads/layer", per_layer(stats.uploads_per_layer_step), rank=3),
        Figure("evictions/layer", per_layer(stats.evictions_per_layer_step), rank=5),
        *([] if from_disk else [Figure("link", rate, rank=4)]),
        _memory_figure(stats),
        Figure("", "", draw=lambda columns: share_line(time_figures(stats), columns), rank=3),
    ]
    if stats.tau:
        shown.append(Figure("tau", tau_text(stats.tau), rank=2))
    if stats.lookahead is not None:
        shown.append(Figure("lookahead", lookahead(stats.lookahead), rank=5))
    return shown + in_ram


def _memory_figure(stats: PlacementStats) -> Figure:
    """Memory of the device; the emulated one has none of its own."""
    if is_emulated(stats):
        return Figure("slots in RAM", format_bytes(stats.pool_bytes), rank=1)
    label = "RAM" if is_ram(stats.device) else "VRAM"
    return Figure(label, memory_text(stats), rank=1)


def _ram_figures(ram: PlacementStats) -> list[Figure]:
    """The figures of experts in RAM next to a device; hits are of the pairs that the device does not compute."""
    if ram.lost:
        return [_RAM_LOST]
    slots = f"{ram.slots_used}/{ram.slots_total}, {format_bytes(ram.pool_bytes)}"
    return [*_disk_figures(ram), Figure("RAM slots", slots, rank=2)]


def earlier_runs(info: EngineInfo) -> str:
    """What earlier runs have left for a warm start of experts in RAM."""
    earlier = info.earlier_runs
    if earlier is None:
        return "nothing kept"
    when = datetime.fromtimestamp(earlier.kept_at_s).strftime("%Y-%m-%d %H:%M")
    return (
        f"activations of about {earlier.n_tokens:,.0f} tokens until {when}, {earlier.n_first:,} experts loaded first; "
        f"{earlier.file}"
    )


def cache_rows(stats: PlacementStats) -> list[Figure]:
    """The figures of the cache as rows of /stats: those of the panel and sums."""
    rows = [
        Figure("cache", f"{stats.device}, ratio {stats.cache_ratio:.2f}, policy {stats.policy}"),
        *(figure for figure in live_cache_figures(stats) if figure.label or figure.value),
        Figure("moved", format_bytes(stats.bytes_moved)),
    ]
    parts = time_figures(stats)
    if parts:
        rows.append(Figure("time", ", ".join(f"{part.label} {part.value}" for part in parts)))
    if parts and not is_ram(stats.device):  # in parallel with the CPU
        rows.append(Figure("device busy", f"{percent(min(stats.device_s / stats.decode_s, 1))} of that time"))
    return rows
