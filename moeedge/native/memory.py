"""What a llama.cpp context takes of each kind of memory, and a GPU to plan for that is not there."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from moeedge.errors import BackendError
from moeedge.native.abi import MemoryUseStruct
from moeedge.native.library import load

_BREAKDOWN = "_Z26llama_get_memory_breakdownPK13llama_context"  # of llama-ext.h: no C interface has it yet
_MAX_USES = 64
IMAGINED_GPU = "imagined"  # the name by which the engine asks for it


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that a context and its model have in buffers of one type."""

    buffer_type: str  # llama.cpp's name: CPU, CPU_REPACK, CUDA0, ...
    device: str  # the GPU's name; empty: the CPU's
    on_gpu: bool  # False: in the machine's memory
    weights_bytes: int
    memory_bytes: int  # KV cache and recurrent states
    compute_bytes: int


def imagined_gpu() -> int:
    """The address of a ggml device that holds nothing and computes nothing; only for models loaded without weights."""
    return int(load().moeedge_imagined_gpu())


def memory_uses(llama: Any, context: Any, *, simulated: bool) -> list[MemoryUse]:
    """What `context` (llama_context *) takes, model included, exact to the byte.

    llama: the loaded libllama. simulated: the model was loaded without weights, so that nothing is allocated.
    Raises BackendError where this llama.cpp does not tell.
    """
    breakdown = getattr(llama, _BREAKDOWN, None)
    if breakdown is None:
        raise BackendError("The installed llama.cpp does not tell what it allocates.", "Install moeedge again.")
    found = (MemoryUseStruct * _MAX_USES)()
    count = load().moeedge_memory_uses(ctypes.cast(breakdown, ctypes.c_void_p), context, simulated, found, _MAX_USES)
    if count < 0:
        raise BackendError(f"llama.cpp's account of its memory cannot be read (code {count}).")
    return [
        MemoryUse(one.buffer_type.decode(), one.device.decode(), bool(one.on_gpu), one.weights, one.memory, one.compute)
        for one in found[:count]
    ]
