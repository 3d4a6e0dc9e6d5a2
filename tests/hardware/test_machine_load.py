"""The load of other programs is the machine's less our own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from moeedge.hardware.machine_load import LoadReading, busy_note, others_now, takes_cores


def test_our_own_work_does_not_count() -> None:
    before = LoadReading(machine_s=100.0, own_s=10.0, at_s=50.0)
    assert LoadReading(104.0, 12.0, 52.0).others_since(before) == pytest.approx(1.0)
    assert LoadReading(101.0, 12.0, 52.0).others_since(before) == 0.0  # clocks of different resolution
    assert before.others_since(before) == 0.0


def test_cores_that_other_programs_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert not takes_cores(4.2, 4) and takes_cores(4.3, 4)  # four cores are free
    assert takes_cores(0.3, 8) and takes_cores(0.3, 100) and not takes_cores(0.2, 8)
    begin = LoadReading(machine_s=0.0, own_s=0.0, at_s=0.0)
    assert LoadReading(0.08, 0.0, 0.02).others_since(begin) == 0  # a tick of the clock says nothing
    others = LoadReading(3.0, 0.0, 1.0).others_since(begin)
    assert "3.0 of 8" in (busy_note(others, 8) or "") and busy_note(others, 4) is None


def test_another_program_is_seen() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "print('on', flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            seen = max(others_now() for _ in range(5))
        finally:
            other.kill()
    assert seen > 0.3
