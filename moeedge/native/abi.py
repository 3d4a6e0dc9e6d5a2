"""The C interface of include/moeedge.h in ctypes: structures and signatures, nothing else.

What an instance of our backend may ask for.
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from enum import IntEnum, IntFlag

import numpy as np


class Phase(IntEnum):
    """What a decode call is for; the values are those of the native library (native/include/moeedge.h)."""

    AUTO = 0  # not told: more than one token counts as prefill, one as decode
    PREFILL = 1
    DECODE = 2  # plain decoding, one token
    DRAFT = 3
    VERIFY = 4


class Residency(IntEnum):
    """Where an expert is; the values of `ExpertCache.residency`."""

    ABSENT = 0
    RESIDENT = 1
    IN_FLIGHT = 2


class PrefillPath(IntEnum):
    """How batches of many tokens are computed; the values are those of include/moeedge.h."""

    CPU = 0  # the graph as it is
    RESIDENT = 1  # resident experts on the device, the others on the CPU
    STREAM = 2  # all experts on the device, brought there as needed


class CaptureFlags(IntFlag):
    """What small batches leave behind; the values are those of include/moeedge.h."""

    NOTHING = 0
    INPUTS = 1  # what each layer's router reads
    PROBS = 2  # what the router makes of it


ABI_VERSION = 4  # of include/moeedge.h, as the structures and signatures below have it


class FrameStruct(ctypes.Structure):
    """struct moeedge_frame."""

    _fields_ = [
        ("serial", c_int64),
        ("phase", c_int32),
        ("n_tokens", c_int32),
        ("layer_tokens", POINTER(c_int32)),
        ("ids", POINTER(c_int32)),
        ("weights", POINTER(c_float)),
    ]


class CapturedStruct(ctypes.Structure):
    """struct moeedge_captured."""

    _fields_ = [
        ("serial", c_int64),
        ("n_layers", c_int32),
        ("stride", c_int32),
        ("width", c_int32),
        ("layer_tokens", POINTER(c_int32)),
        ("rows", POINTER(c_float)),
    ]


class BlockStruct(ctypes.Structure):
    """struct moeedge_block."""

    _fields_ = [
        ("layer", c_int32),
        ("phase", c_int32),
        ("n_tokens", c_int32),
        ("n_used", c_int32),
        ("n_embd", c_int32),
        ("ids", POINTER(c_int32)),
        ("input", POINTER(c_float)),
    ]


BLOCK_HOOK = CFUNCTYPE(None, c_void_p, POINTER(BlockStruct))  # moeedge_block_hook


class CacheConfigStruct(ctypes.Structure):
    """struct moeedge_cache_config."""

    _fields_ = [
        ("device", c_char_p),
        ("emulated_threads", c_int32),
        ("link_bytes_per_s", c_double),
        ("n_layers", c_int32),
        ("n_experts", c_int32),
        ("files", POINTER(c_char_p)),
        ("n_files", c_int32),
        ("tensors", c_void_p),  # array of struct moeedge_expert_tensor
        ("n_tensors", c_int32),
        ("ratio", c_double),
        ("n_stage", c_int32),
        ("link_latency_s", c_double),
    ]


# struct moeedge_block_record, as a NumPy type
BLOCK_RECORD = np.dtype(
    [
        ("serial", np.int64),
        ("layer", np.int32),
        ("phase", np.int32),
        ("n_tokens", np.int32),
        ("pairs_cpu", np.int32),
        ("pairs_device", np.int32),
        ("unique_cpu", np.int32),
        ("unique_device", np.int32),
        ("path", np.int32),
        ("partition_ns", np.int64),
        ("cpu_ns", np.int64),
        ("device_ns", np.int64),
        ("wait_ns", np.int64),
    ]
)


class BackendRegistration(ctypes.Structure):
    """The beginning of struct ggml_backend_reg, as far as we look."""

    _fields_ = [("api_version", c_int)]


_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "moeedge_ggml_version": (c_char_p, []),
    "moeedge_llama_cpp_version": (c_char_p, []),
    "moeedge_backend_api_version": (c_int, []),
    "moeedge_abi_version": (c_int, []),
    "moeedge_register": (c_int, []),
    "moeedge_set_default_claims": (c_int, [c_int]),
    "moeedge_newest_instance": (c_int64, []),
    "moeedge_live_instances": (c_int, []),
    "moeedge_instance_set_claims": (c_int, [c_int64, c_int]),
    "moeedge_instance_set_phase": (c_int, [c_int64, c_int]),
    "moeedge_instance_configure": (c_int, [c_int64, c_int, c_int, c_int, c_int]),
    "moeedge_instance_read_counts": (c_int, [c_int64, POINTER(c_uint32)]),
    "moeedge_instance_frames": (c_int, [c_int64, c_int64, POINTER(FrameStruct), c_int]),
    "moeedge_instance_stats": (c_int, [c_int64, c_void_p]),
    "moeedge_instance_threads": (c_int, [c_int64]),
    "moeedge_imagined_gpu": (c_void_p, []),
    "moeedge_memory_uses": (c_int, [c_void_p, c_void_p, c_int, c_void_p, c_int]),
    "moeedge_instance_set_capture": (c_int, [c_int64, c_int, c_int, c_int, c_int]),
    "moeedge_instance_captured": (c_int, [c_int64, c_int, POINTER(CapturedStruct)]),
    "moeedge_instance_set_hook": (c_int, [c_int64, BLOCK_HOOK, c_void_p]),
}

# arrays go as addresses (c_void_p): these are called once or twice per step
_CACHE_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "moeedge_last_error": (c_char_p, []),
    "moeedge_cache_create": (c_int64, [POINTER(CacheConfigStruct)]),
    "moeedge_cache_destroy": (c_int, [c_int64]),
    "moeedge_cache_get_info": (c_int, [c_int64, c_void_p]),
    "moeedge_cache_groups": (c_int, [c_int64, c_void_p, c_void_p, c_void_p]),
    "moeedge_cache_plan": (c_int, [c_int64, c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_int]),
    "moeedge_cache_demand": (
        c_int,
        [c_int64, c_int, c_void_p, c_int, c_void_p, c_void_p, c_int, c_double],
    ),
    "moeedge_cache_set_batch": (c_int, [c_int64, c_int]),
    "moeedge_cache_residency": (c_int, [c_int64, c_void_p]),
    "moeedge_cache_get_stats": (c_int, [c_int64, c_void_p]),
    "moeedge_cache_blocks": (c_int, [c_int64, c_int64, c_void_p, c_int]),
    "moeedge_cache_drain": (c_int, [c_int64, c_double]),
    "moeedge_cache_clear": (c_int, [c_int64]),
    "moeedge_cache_set_prefill": (c_int, [c_int64, c_int, c_int]),
    "moeedge_cache_acquire": (c_int, [c_int64, c_int, c_void_p, c_int, c_void_p]),
    "moeedge_cache_release": (c_int, [c_int64, c_int, c_void_p, c_int]),
    "moeedge_cache_read": (c_int, [c_int64, c_int, c_int, c_char_p, c_void_p, c_int64]),
    "moeedge_instance_set_cache": (c_int, [c_int64, c_int64]),
}


def declare(library: ctypes.CDLL) -> None:
    """Give the library's functions their signatures. Raises AttributeError for a library that lacks one."""
    for name, (restype, argtypes) in {**_SIGNATURES, **_CACHE_SIGNATURES}.items():
        function = getattr(library, name)
        function.restype = restype
        function.argtypes = argtypes


class OffloadScope(IntEnum):
    """What our backend asks llama.cpp's scheduler for; the values are those of include/moeedge.h."""

    NONE = 0  # nothing: the context runs as stock llama.cpp does
    MOE = 1  # the MoE blocks whose weights lie in host memory, for use beside a GPU
    ALL = 2  # every operation of the CPU: one split per graph, so that sensing costs no seams
