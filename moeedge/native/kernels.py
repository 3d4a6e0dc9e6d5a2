"""Kernels of our own for the experts' matmuls on the CPU, and how fast threads read memory."""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_double, c_int32
from dataclasses import dataclass

from moeedge.native.abi import KernelChoice
from moeedge.native.library import load
from moeedge.native.structs import c_field, c_struct, from_c

_N_MAX = 16


@dataclass(frozen=True)
class Kernel:
    """A kernel as its check on this CPU found it."""

    instructions: str = c_field(c_char * 16)  # of the processor, by the compiler's name: avx512vnni or avx2
    layout: str = c_field(c_char * 16)  # of the matrices; "x8": rows interleaved by eight, as ggml repacks them
    is_equal: bool = c_field(c_int32)  # its results have the bits of ggml's; it is not used otherwise
    single_speed: float = c_field(c_double)  # ggml's time over its own with rows from memory, one column per expert
    several_speed: float = c_field(c_double)  # the same with two columns per expert
    many_speed: float = c_field(c_double)  # with sixteen; 0: not used from eight on, its bits differ
    n_dense_max: int = c_field(c_int32)  # columns of a dense matrix that it computes, at most; 0: bits differ


def set_kernel_choice(choice: KernelChoice) -> None:
    """Chooses for all sessions of the process, from their next decode on."""
    load().moeedge_set_kernel_choice(choice)


def kernels() -> list[Kernel]:
    """The kernels that this CPU runs, the newest instructions first.

    The first call in a process checks them, in milliseconds each.
    """
    raw = (c_struct(Kernel) * _N_MAX)()
    n = load().moeedge_kernels(ctypes.addressof(raw), _N_MAX)
    return [from_c(Kernel, raw[i]) for i in range(min(n, _N_MAX))]


def is_amx_disabled() -> bool:
    """Whether llama.cpp's AMX kernels fail on this machine, so that they are off in this process."""
    return bool(load().moeedge_disable_broken_amx())


def read_speed(n_bytes: int, n_threads: int, *, address: int | None = None, repetitions: int = 5) -> float:
    """Bytes per second that threads read from memory at once, the fastest of a few repetitions; 0.0: out of memory.

    address: of the `n_bytes` to read, a multiple of 8; None: memory that is allocated for it, which should be several
    times as large as the last cache.
    """
    return float(load().moeedge_read_speed(address, n_bytes, n_threads, repetitions))
