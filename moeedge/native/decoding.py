"""Decoding a batch so that an exception of a device's driver does not end the process."""

from __future__ import annotations

import ctypes
from typing import Any

from moeedge.native.abi import DECODE_THREW
from moeedge.native.library import load


class DriverThrewError(Exception):
    """A C++ exception left llama.cpp in the middle of its work: its context may be neither used nor freed."""


class Decoder:
    """llama_decode of one context. llama: the ctypes library of llama.cpp; context: a llama_context *."""

    def __init__(self, llama: Any, context: Any) -> None:
        self._library = load()
        self._decode = ctypes.cast(llama.llama_decode, ctypes.c_void_p)
        self._synchronize = ctypes.cast(llama.llama_synchronize, ctypes.c_void_p)
        self._context = ctypes.cast(context, ctypes.c_void_p)

    def __call__(self, batch: Any, *, wait: bool) -> int:
        """The result of llama_decode for a llama_batch. wait: until the device is done, so that its errors arrive here.

        Raises DriverThrewError with the driver's text.
        """
        synchronize = self._synchronize if wait else None
        code = int(self._library.moeedge_decode(self._decode, synchronize, self._context, ctypes.byref(batch)))
        if code == DECODE_THREW:
            raise DriverThrewError(self._library.moeedge_last_error().decode("utf-8", "replace"))
        return code
