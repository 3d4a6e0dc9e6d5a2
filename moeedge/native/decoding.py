"""Decoding a batch so that an exception of a device's driver does not end the process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from moeedge.native.abi import DECODE_THREW, STOP_CALL, StopStruct
from moeedge.native.library import load

# Between two questions whether to stop, and before the first. One takes microseconds, but milliseconds where another
# thread has Python's lock, while the other computing threads wait. Only the main thread runs signal handlers.
STOP_INTERVAL_S = 0.05


class DriverThrewError(Exception):
    """A C++ exception left llama.cpp in the middle of its work: its context may be neither used nor freed."""


class Decoder:
    """llama_decode of one context.

    llama: the ctypes library of llama.cpp; context: a llama_context *.
    """

    def __init__(self, llama: Any, context: Any) -> None:
        self.cancel: Callable[[], bool] | None = None  # asked now and then whether to stop, between two operations
        self._library = load()
        self._decode = ctypes.cast(llama.llama_decode, ctypes.c_void_p)
        self._synchronize = ctypes.cast(llama.llama_synchronize, ctypes.c_void_p)
        self._context = ctypes.cast(context, ctypes.c_void_p)
        self._error: BaseException | None = None  # of `cancel`
        self._stop = StopStruct()
        self._ask = STOP_CALL(self._goes_on)
        set_callback = llama.llama_set_abort_callback
        function = ctypes.cast(self._library.moeedge_should_stop, set_callback.argtypes[1])
        set_callback(context, function, ctypes.byref(self._stop))

    def _goes_on(self) -> int:
        """0 if the decode should stop, as also an exception in here means; it is raised when the decode has."""
        try:
            return int(self.cancel is None or not self.cancel())
        except BaseException as error:  # ctypes would drop it
            self._error = error
            return 0

    def __call__(self, batch: Any, *, wait: bool) -> int:
        """The result of llama_decode for a llama_batch. wait: until the device is done, so that its errors arrive here.

        2: `cancel` has stopped it. Raises DriverThrewError with the driver's text, and what `cancel` raises.
        """
        self._stop.call = STOP_CALL() if self.cancel is None else self._ask
        self._stop.interval_ns = round(STOP_INTERVAL_S * 1e9)
        self._stop.next_ns = self._stop.stopped = 0
        synchronize = self._synchronize if wait else None
        code = int(self._library.moeedge_decode(self._decode, synchronize, self._context, ctypes.byref(batch)))
        if code == DECODE_THREW:
            raise DriverThrewError(self._library.moeedge_last_error().decode("utf-8", "replace"))
        error, self._error = self._error, None
        if error is not None:
            raise error
        return code
