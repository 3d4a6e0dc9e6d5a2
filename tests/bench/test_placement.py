"""The expert cache's counters in samples and rows."""

from __future__ import annotations

from dataclasses import replace

from moeedge.bench.samples import COUNTERS, CacheFigures, cache_figures, counted
from moeedge.scheduler.stats import PlacementStats

_BEGIN = PlacementStats(
    policy="spac", cache_ratio=0.17, slots_total=8, pool_bytes=1024, steps=3, pairs=100, pairs_hit=10
)
_END = replace(_BEGIN, slots_used=8, steps=5, pairs=300, pairs_hit=110, unique=40, unique_hit=10, bytes_moved=4096)


def test_a_sample_keeps_the_difference() -> None:
    counters = counted(_BEGIN, _END)
    assert counters is not None
    assert set(counters) == set(COUNTERS)
    assert (counters["steps"], counters["pairs"], counters["pairs_hit"], counters["uploads"]) == (2, 200, 100, 0)
    assert counted(None, None) is None


def test_rates_are_those_of_the_sums() -> None:
    nothing = dict.fromkeys(COUNTERS, 0)
    small = nothing | {"steps": 1, "pairs": 10, "pairs_hit": 10, "unique": 4, "unique_hit": 4, "uploads": 8}
    large = nothing | {"steps": 3, "pairs": 90, "pairs_hit": 0, "unique": 12, "unique_hit": 0, "bytes_moved": 100}
    figures = cache_figures([small, None, large])
    assert figures == CacheFigures(
        hit_rate_pairs=0.1, hit_rate_unique=0.25, uploads_per_step=2.0, bytes_moved=100
    )  # the mean of the rates would be 0.5
    assert cache_figures([None]) == cache_figures([]) == CacheFigures()
    idle = cache_figures([nothing])
    assert (idle.hit_rate_pairs, idle.uploads_per_step, idle.bytes_moved) == (None, None, 0)
