"""How busy other programs keep the machine: the processor time of the entire machine less our own."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import psutil

BUSY = 0.25  # processors' worth of other programs, from which on a run is not quiet
_INTERVAL_S = 0.1  # ten ticks of Linux's clock: of less time nothing can be said
_IDLE = ("idle", "iowait", "guest", "guest_nice")  # the last two are part of user and nice


@dataclass(frozen=True)
class LoadReading:
    """Processor seconds up to now, and the time of the reading."""

    machine_s: float  # of all programs and, in a virtual machine, of its host's others ("steal")
    own_s: float  # of this process, all threads
    at_s: float

    @classmethod
    def now(cls) -> LoadReading:
        """Reads the clocks."""
        times = psutil.cpu_times()._asdict()
        busy_s = sum(seconds for name, seconds in times.items() if name not in _IDLE)
        return cls(busy_s, time.process_time(), time.perf_counter())

    def others_s_since(self, older: LoadReading) -> float:
        """Returns the processor seconds of other programs since `older`; below 0 by at most the clocks' resolution."""
        return (self.machine_s - older.machine_s) - (self.own_s - older.own_s)

    def others_since(self, older: LoadReading) -> float:
        """Returns the processors that other programs used on average since `older`; 0 where that is too short ago."""
        elapsed_s = self.at_s - older.at_s
        return max(self.others_s_since(older), 0.0) / elapsed_s if elapsed_s >= _INTERVAL_S else 0.0


def others_now() -> float:
    """Returns the processors that other programs use now, measured for a tenth of a second."""
    before = LoadReading.now()
    time.sleep(_INTERVAL_S)
    return LoadReading.now().others_since(before)


def takes_cores(others: float, n_threads: int) -> bool:
    """Whether other programs, which use `others` processors, take some from `n_threads` that compute."""
    return others > max((os.cpu_count() or 1) - n_threads, 0) + BUSY


def busy_note(others: float, n_threads: int) -> str | None:
    """Returns a sentence where `takes_cores` is true."""
    threads = f"{n_threads} threads need" if n_threads > 1 else "one thread needs"
    text = f"Other programs use {others:.1f} of {os.cpu_count()} cores, which the model's {threads}."
    return text if takes_cores(others, n_threads) else None
