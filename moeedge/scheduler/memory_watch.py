"""Whether a device runs short of memory while the expert cache holds what was free when it was opened.

llama.cpp and the kernels allocate during a decode, and some backends end the process where that fails (CUDA). So when
another program takes memory, the cache has to give some back before the rest is gone. A cache in RAM takes it again
where it stays free.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from moeedge.errors import MoeedgeError
from moeedge.hardware import devices
from moeedge.hardware.devices import ResolvedDevice, VramReading

_INTERVAL_S = 0.5
_SHORT = 0.5  # of the reserve: what is left is short below this share, so that small changes free nothing
_AMPLE = 2.0  # of the reserve: from this share on there is memory to take
_AMPLE_READINGS = 20  # in a row: a program that comes and goes should not make the cache shrink and grow all the time
_READINGS = 2  # in a row that agree: a program that starts frees some of its memory at once


class MemoryWatch:
    """Reads the device's free memory now and then.

    reserve_bytes: what is to stay free. read, clock: of the device and of the machine; replaced in tests.
    """

    def __init__(
        self,
        device: ResolvedDevice,
        reserve_bytes: int,
        *,
        read: Callable[[ResolvedDevice], VramReading | None] = devices.read_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device, self._reserve_bytes = device, reserve_bytes
        self._read, self._clock = read, clock
        self._next_s = clock() + _INTERVAL_S
        self._n_short = self._n_ample = 0
        self.free_bytes = 0  # at the last reading

    def missing_bytes(self) -> int:
        """How much must be freed so that the reserve is free again; 0 while there is no shortage.

        Cheap enough for every step: most calls return 0 without a reading.
        """
        if self._clock() < self._next_s:
            return 0
        self._next_s = self._clock() + _INTERVAL_S
        try:
            reading = self._read(self._device)
        except MoeedgeError:  # a driver that does not answer
            reading = None
        if reading is None or reading.free_bytes >= _SHORT * self._reserve_bytes:
            self._n_short = 0
            is_ample = reading is not None and reading.free_bytes >= _AMPLE * self._reserve_bytes
            self._n_ample = self._n_ample + 1 if is_ample else 0
            self.free_bytes = reading.free_bytes if reading is not None else 0
            return 0
        self.free_bytes = reading.free_bytes
        self._n_ample = 0
        self._n_short += 1
        if self._n_short < _READINGS:
            return 0
        self._n_short = 0
        return self._reserve_bytes - reading.free_bytes

    def read_spare_bytes(self) -> int | None:
        """What is free above the reserve, negative where it is short; a reading at once. None where unknown."""
        try:
            reading = self._read(self._device)
        except MoeedgeError:
            return None
        return None if reading is None else reading.free_bytes - self._reserve_bytes

    def take_spare_bytes(self) -> int:
        """How much may be taken since it has been free for a while; 0 then, until it has been again.

        From the readings of `missing_bytes`.
        """
        if self._n_ample < _AMPLE_READINGS:
            return 0
        self._n_ample = 0
        return self.free_bytes - self._reserve_bytes
