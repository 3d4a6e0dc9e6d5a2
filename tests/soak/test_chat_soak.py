"""The arithmetic of the soak test, and a short soak; the long one is run by hand (see chat_soak.py)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.soak.chat_soak import RSS_LIMIT_BYTES, Sample, conclude, faults, run

QUIET = Sample(0.0, 0, 0, 100 << 20, 5, 20, 2, 40, 30, 0, 10, 10, 0, 0)


def series(**growth: int) -> list[Sample]:
    """Returns a hundred turns in which the named figures grow by the given amounts per turn."""
    return [
        replace(QUIET, time_s=float(i), turns=i, **{name: getattr(QUIET, name) + i * by for name, by in growth.items()})
        for i in range(100)
    ]


def test_nothing_grows() -> None:
    assert faults(conclude(series())) == []


@pytest.mark.parametrize("name", ["threads", "fds", "instances"])
def test_growth_of_a_count_is_found(name: str) -> None:
    assert faults(conclude(series(**{name: 1})))[0].startswith(name)


def test_growth_of_memory_is_found() -> None:
    by = 2 * RSS_LIMIT_BYTES // 100
    assert faults(conclude(series(rss_bytes=by)))[0].startswith("rss_bytes")
    assert faults(conclude(series(rss_bytes=by // 8))) == []


def test_a_single_jump_while_warming_up_is_no_growth() -> None:
    samples = series()
    samples[:20] = [replace(sample, rss_bytes=1 << 20) for sample in samples[:20]]
    assert faults(conclude(samples)) == []


@pytest.mark.parametrize("change", [{"uploads": 1}, {"pinned": 1}, {"failed": 1}, {"resident": 1}])
def test_a_lost_slot_is_found(change: dict[str, int]) -> None:
    samples = series()
    samples[50] = replace(samples[50], **{name: getattr(QUIET, name) + by for name, by in change.items()})
    assert conclude(samples)["unbalanced"] == [50]


@pytest.mark.slow
def test_twenty_seconds(bundled_pair: tuple[Path, Path]) -> None:
    """Too short to find growth of memory; everything else must hold."""
    record = run(20 / 60)
    assert record["turns"] > 3
    assert record["unbalanced"] == []
    assert record["uploads"] > record["slots_used_max"] > 0
    assert not any(record["slopes"][name]["grows"] for name in ("threads", "fds", "instances"))
    assert record["instances_left"] == 0
