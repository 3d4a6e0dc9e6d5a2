"""The load of other programs is the machine's less our own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moeedge.bench.machine_load import LoadReading, look


def test_our_own_work_does_not_count() -> None:
    before = LoadReading(machine_s=100.0, own_s=10.0, at_s=50.0)
    assert LoadReading(104.0, 12.0, 52.0).others_since(before) == pytest.approx(1.0)
    assert LoadReading(101.0, 12.0, 52.0).others_since(before) == 0.0  # clocks of different resolution
    assert before.others_since(before) == 0.0


def test_another_program_is_seen() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "print('on', flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            seen = max(look() for _ in range(5))
        finally:
            other.kill()
    assert seen > 0.3
