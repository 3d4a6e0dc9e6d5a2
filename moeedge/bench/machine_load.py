"""How busy other programs keep the machine while a benchmark runs: the whole machine's processor time less our own."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

BUSY = 0.25  # processors' worth of other programs, from which on a run is not quiet
_LOOK_S = 0.1  # ten ticks of Linux's clock
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

    def others_since(self, older: LoadReading) -> float:
        """Returns the processors that other programs used on average since `older`; 0.5: half of one."""
        elapsed_s = self.at_s - older.at_s
        others_s = (self.machine_s - older.machine_s) - (self.own_s - older.own_s)
        return max(others_s, 0.0) / elapsed_s if elapsed_s > 0 else 0.0


def look() -> float:
    """Returns the processors that other programs use now, measured for a tenth of a second."""
    before = LoadReading.now()
    time.sleep(_LOOK_S)
    return LoadReading.now().others_since(before)
