"""The expert cache's counters: what a sample keeps of them, and the rates of a row, which are sums over samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moeedge.engine.session import Session
from moeedge.engine.types import PlacementStats

# what a user's pause between two turns gives the mover, at least
_REST_S = 0.5

# what a sample keeps of PlacementStats; counters all, so that they can be added
COUNTERS = (
    "steps", "pairs", "pairs_hit", "unique", "unique_hit", "uploads", "evictions", "cancelled", "bytes_moved",
    "transfer_s", "cpu_s", "device_s", "wait_s", "partition_s", "schedule_s", "draft_s", "decode_s",
)  # fmt: skip

Counters = dict[str, float]


def counted(older: PlacementStats | None, newer: PlacementStats | None) -> Counters | None:
    """What was counted between two looks at a session; None where it has no expert cache."""
    if older is None or newer is None:
        return None
    interval = newer - older
    return {name: getattr(interval, name) for name in COUNTERS}


def let_rest(session: Session) -> None:
    """Ends the transfers of a sample, untimed, so that they do not fall on the mode that is measured next."""
    if session.placement is not None:
        session.placement.rest(_REST_S)


@dataclass(frozen=True)
class CacheFigures:
    """The figures of a row; None where nothing was counted."""

    hit_rate_pairs: float | None = None
    hit_rate_unique: float | None = None
    uploads_per_step: float | None = None
    bytes_moved: int | None = None


def cache_figures(samples: Iterable[Counters | None]) -> CacheFigures:
    """Rates of the sums, never means of rates: every pair, expert and step weighs the same."""
    known = [counters for counters in samples if counters is not None]
    if not known:
        return CacheFigures()
    sums = {name: sum(counters[name] for counters in known) for name in COUNTERS}
    return CacheFigures(
        hit_rate_pairs=_share(sums["pairs_hit"], sums["pairs"]),
        hit_rate_unique=_share(sums["unique_hit"], sums["unique"]),
        uploads_per_step=_share(sums["uploads"], sums["steps"]),
        bytes_moved=int(sums["bytes_moved"]),
    )


def _share(above: float, below: float) -> float | None:
    return above / below if below else None
