"""Native code of a step: decoding a batch, the largest logits, our own matmul kernels."""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_double, c_int32
from dataclasses import dataclass
from typing import Any

from moeedge.native.abi import DECODE_THREW, STOP_CALL, KernelChoice, StopStruct, c_field, c_struct, from_c
from moeedge.native.library import load
from moeedge.run import Cancel

# Between two questions whether to stop, and before the first. One takes microseconds, but milliseconds where another
# thread has Python's lock, while the other computing threads wait. Only the main thread runs signal handlers.
STOP_INTERVAL_S = 0.05


class DriverThrewError(Exception):
    """A C++ exception left llama.cpp in the middle of its work: its context may be neither used nor freed."""


class Decoder:
    """llama_decode of one context. llama: the ctypes library of llama.cpp; context: a llama_context *."""

    def __init__(self, llama: Any, context: Any) -> None:
        self.cancel: Cancel | None = None  # asked now and then whether to stop, between two operations
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
        """The result of llama_decode; 2: cancelled. wait: for the device and its errors. Raises DriverThrewError."""
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


class LargestValues:
    """Finds up to `k_max` largest values of rows; its memory is allocated once, as it is asked for in every step."""

    def __init__(self, k_max: int) -> None:
        self._find = load().moeedge_largest_values
        self._ids = (ctypes.c_int32 * k_max)()
        self._values = (ctypes.c_float * k_max)()

    def find(self, row: Any, k: int) -> tuple[list[int], list[float]]:
        """Indices and values of the `k` largest of a ctypes array, descending; empty where one is no number."""
        n = self._find(row, len(row), k, self._ids, self._values)
        if n < 0:
            raise MemoryError
        return self._ids[:n], self._values[:n]


_N_MAX = 64
ATTENTION = "attention"  # the layout of kernels for attention: several_speed is of few tokens, many_speed of prompts


@dataclass(frozen=True)
class Kernel:
    """A kernel as its check on this CPU found it."""

    instructions: str = c_field(c_char * 16)  # of the processor, by the compiler's name: avx512vnni or avx2
    layout: str = c_field(
        c_char * 16
    )  # of the matrices; "x8": rows interleaved by eight, as ggml repacks them; ATTENTION
    is_equal: bool = c_field(c_int32)  # its results have the bits of ggml's; it is not used otherwise
    single_speed: float = c_field(c_double)  # ggml's time over its own with rows from memory, one column per expert
    several_speed: float = c_field(c_double)  # the same with two columns per expert
    many_speed: float = c_field(c_double)  # with sixteen; 0: not used from eight on, its bits differ
    dense_single_speed: float = c_field(c_double)  # one column of a dense matrix; 0: not used for one
    dense_speed: float = c_field(c_double)  # thirty-two columns of a dense matrix; 0: not used from eight on
    n_dense_max: int = c_field(c_int32)  # of fewer columns of a dense matrix, how many it computes; 0: bits differ


def set_kernel_choice(choice: KernelChoice) -> None:
    """Chooses for all sessions of the process, from their next decode on."""
    load().moeedge_set_kernel_choice(choice)


def kernels() -> list[Kernel]:
    """The kernels that this CPU runs, the newest instructions first; the first call checks them, in ms each."""
    raw = (c_struct(Kernel) * _N_MAX)()
    n = load().moeedge_kernels(ctypes.addressof(raw), _N_MAX)
    return [from_c(Kernel, raw[i]) for i in range(min(n, _N_MAX))]


def attention_count() -> int:
    """Nodes of attention that kernels of ours have computed in this process."""
    return int(load().moeedge_attention_count())


def is_amx_disabled() -> bool:
    """Whether llama.cpp's AMX kernels fail on this machine, so that they are off in this process."""
    return bool(load().moeedge_disable_broken_amx())


def read_speed(n_bytes: int, n_threads: int, *, address: int | None = None, repetitions: int = 5) -> float:
    """Bytes per second that threads read from memory at best. address: a multiple of 8; None: new memory."""
    return float(load().moeedge_read_speed(address, n_bytes, n_threads, repetitions))


def multiply_speed(n_threads: int, *, repetitions: int = 5) -> float:
    """Products of bytes per second that threads compute at best; 0.0: kernels of ours have no instruction for it."""
    return float(load().moeedge_multiply_speed(n_threads, repetitions))
