"""The C interface of include/moeedge.h in ctypes: enums, structures with pointers, signatures.

Structures without pointers are dataclasses (see structs.py) next to the code that uses them.
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, c_bool, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from enum import Enum, IntEnum, IntFlag
from typing import Any

import numpy as np

ABI_VERSION = 22  # MOEEDGE_ABI_VERSION that this module is written for


class Phase(IntEnum):
    """enum moeedge_phase: the purpose of a decode call."""

    AUTO = 0  # not set: more than one token counts as prefill, one as decode
    PREFILL = 1
    DECODE = 2  # plain decoding, one token
    DRAFT = 3
    VERIFY = 4


class OffloadScope(IntEnum):
    """enum moeedge_offload_scope: the operations that our backend takes from llama.cpp's scheduler."""

    NONE = 0  # the context runs as in stock llama.cpp
    MOE = 1  # the MoE blocks whose weights are in host memory, for use with a GPU
    ALL = 2  # every operation of the CPU: one split per graph, so that sensing adds no splits


class PrefillPath(str, Enum):
    """How batches of many tokens are computed, as --prefill-path spells it."""

    CPU = "cpu"  # the graph as it is
    RESIDENT = "resident"  # resident experts on the device, the others on the CPU
    STREAM = "stream"  # all experts on the device, uploaded as needed
    AUTO = "auto"  # the fastest of them as measured; unknown to the native library

    @property
    def code(self) -> int:
        """The value in enum moeedge_prefill_path."""
        return list(PrefillPath).index(self)

    def __str__(self) -> str:
        return self.value

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f'unknown prefill path "{value}"; choose from {", ".join(cls)}')


class DevicePath(IntEnum):
    """enum moeedge_device_path: how a device with memory of its own computes the resident experts of small batches."""

    PAIRS = 0  # once the host knows the ids; several tokens as one token per pair
    COLUMNS = 1  # the same as one token with many experts, for devices whose matrix-vector kernels win
    AHEAD = 2  # before the host knows the ids, where llama.cpp computes the router on that device; else as COLUMNS


class KernelChoice(IntEnum):
    """enum moeedge_kernel_choice: which kernels compute the experts' matmuls on the CPU."""

    NONE = 0  # ggml's alone
    MEASURED = 1  # ours where they are faster
    ALL = 2  # ours where there are any, of the newest instructions
    AVX2 = 3  # ours for AVX2 where there are any


class ReadFault(IntEnum):
    """enum moeedge_read_fault: what goes wrong with a read, in tests."""

    EIO = 0  # the disk reports an error
    SHORT = 1  # half of the bytes come
    END = 2  # no bytes come
    DELAY = 3  # it takes longer
    THREADS = 4  # no thread can be started for further reads


class CaptureFlags(IntFlag):
    """enum moeedge_capture_flags: the activations that are captured of small batches."""

    NOTHING = 0
    INPUTS = 1  # the input of each layer's router
    PROBS = 2  # the router's output


class BudgetRanking(IntEnum):
    """enum moeedge_budget_ranking: how experts are ranked for the shortlist of a layer."""

    ROUTER = 0  # by the routing probability that the batch's tokens give them
    PICKS = 1  # by the shares that the tokens' selected experts have of their probability


class BudgetCoverage(IntEnum):
    """enum moeedge_budget_coverage: what becomes of a token's experts outside the shortlist."""

    SUBSTITUTION = 0
    TRUNCATION = 1


class RouterKind(IntEnum):
    """enum moeedge_router_kind: what the router's output holds."""

    SOFTMAX = 0  # probabilities over all experts
    LOGITS = 1  # values before a softmax over the selected experts
    POSITIVE = 2  # positive values that do not add up to one


class Status(IntEnum):
    """The values of enum moeedge_status that Python distinguishes."""

    OUT_OF_MEMORY = -3
    NO_DEVICE = -7
    FILE_ERROR = -9
    TIMEOUT = -10


DECODE_THREW = -1000  # MOEEDGE_DECODE_THREW


STOP_CALL = CFUNCTYPE(c_int)  # moeedge_stop_call


class StopStruct(ctypes.Structure):
    """struct moeedge_stop."""

    _fields_ = [("call", STOP_CALL), ("interval_ns", c_int64), ("next_ns", c_int64), ("stopped", c_int32)]


class FrameStruct(ctypes.Structure):
    """struct moeedge_frame."""

    _fields_ = [
        ("serial", c_int64),
        ("phase", c_int32),
        ("n_tokens", c_int32),
        ("layer_tokens", c_void_p),  # int32
        ("ids", c_void_p),  # int32
        ("weights", c_void_p),  # float
    ]


class ActivationsStruct(ctypes.Structure):
    """struct moeedge_activations."""

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


class BudgetConfigStruct(ctypes.Structure):
    """struct moeedge_budget_config."""

    _fields_ = [
        ("ranking", c_int32),
        ("coverage", c_int32),
        ("budgets", c_void_p),  # int32
    ]


class BudgetRoutingStruct(ctypes.Structure):
    """struct moeedge_budget_routing."""

    _fields_ = [
        ("n_tokens", c_int32),
        ("kind", c_int32),
        ("values", c_void_p),  # float
        ("selection", c_void_p),  # float
        ("natural_ids", c_void_p),  # int32
        ("ids", c_void_p),  # int32
    ]


BLOCK_HOOK = CFUNCTYPE(None, c_void_p, POINTER(BlockStruct))  # moeedge_block_hook


# struct moeedge_block_record
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
        ("wait_bytes", np.int64),
    ]
)


# struct moeedge_budget_layer
BUDGET_LAYER = np.dtype(
    [
        ("batches", np.int64),
        ("unique_natural", np.int64),
        ("unique", np.int64),
        ("unique_max", np.int64),
        ("substituted", np.int64),
        ("kept", np.float64),
    ]
)


# Result and argument types. Arrays and output structures are passed by address (c_void_p), which is cheap enough for
# every step.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ggml_version": (c_char_p,),
    "llama_cpp_version": (c_char_p,),
    "backend_api_version": (c_int,),
    "abi_version": (c_int,),
    "register": (c_int,),
    "last_error": (c_char_p,),
    "set_default_offload_scope": (c_int, c_int),
    "set_default_host_buffer": (c_int, c_void_p),
    "newest_instance": (c_int64,),
    "live_instances": (c_int,),
    "instance_set_offload_scope": (c_int, c_int64, c_int),
    "instance_set_phase": (c_int, c_int64, c_int),
    "instance_configure": (c_int, c_int64, c_int, c_int, c_int, c_int),
    "instance_read_counts": (c_int, c_int64, c_void_p),
    "instance_frames": (c_int, c_int64, c_int64, POINTER(FrameStruct), c_int),
    "instance_get_stats": (c_int, c_int64, c_void_p),
    "instance_threads": (c_int, c_int64),
    "instance_set_capture": (c_int, c_int64, c_int, c_int, c_int, c_int),
    "instance_get_activations": (c_int, c_int64, c_int, POINTER(ActivationsStruct)),
    "instance_set_hook": (c_int, c_int64, BLOCK_HOOK, c_void_p),
    "instance_expert_outputs": (c_int, c_int64, c_void_p, c_int64),
    "instance_set_cache": (c_int, c_int64, c_int64),
    "instance_remove_cache": (c_int, c_int64, c_int64),
    "instance_skip_unweighted": (c_int, c_int64, c_int),
    "cache_create": (c_int64, c_void_p),
    "cache_destroy": (c_int, c_int64),
    "cache_get_info": (c_int, c_int64, c_void_p),
    "cache_groups": (c_int, c_int64, c_void_p, c_void_p, c_void_p),
    "cache_set_utilities": (c_int, c_int64, c_void_p),
    "cache_read_ahead": (c_int, c_int64, c_int, c_void_p, c_int),
    "cache_plan": (c_int, c_int64, c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_int),
    "cache_demand": (c_int, c_int64, c_int, c_void_p, c_int, c_void_p, c_void_p, c_int, c_double),
    "cache_set_batch": (c_int, c_int64, c_int),
    "cache_residency": (c_int, c_int64, c_void_p),
    "cache_get_stats": (c_int, c_int64, c_void_p),
    "cache_blocks": (c_int, c_int64, c_int64, c_void_p, c_int),
    "cache_limit": (c_int, c_int64, c_int),
    "cache_drain": (c_int, c_int64, c_double),
    "cache_clear": (c_int, c_int64, c_double),
    "cache_set_prefill": (c_int, c_int64, c_int, c_int),
    "cache_set_ram": (c_int, c_int64, c_int64),
    "cache_set_readers": (c_int, c_int64, c_int, c_int64),
    "cache_get_reader": (c_int, c_int64, c_void_p),
    "cache_set_read_faults": (c_int, c_int64, c_int, c_int, c_double),
    "cache_set_timing": (c_int, c_int64, c_int),
    "cache_set_device_path": (c_int, c_int64, c_int),
    "cache_acquire": (c_int, c_int64, c_int, c_void_p, c_int, c_void_p),
    "cache_release": (c_int, c_int64, c_int, c_void_p, c_int),
    "cache_read": (c_int, c_int64, c_int, c_int, c_char_p, c_void_p, c_int64),
    "budget_create": (c_void_p, c_int, c_int, c_void_p),
    "budget_destroy": (None, c_void_p),
    "budget_on_node": (c_bool, c_void_p, c_bool, c_void_p),
    "budget_configure": (c_int, c_void_p, POINTER(BudgetConfigStruct)),
    "budget_set_active": (c_int, c_void_p, c_int),
    "budget_read": (c_int, c_void_p, c_void_p),
    "budget_set_capture": (c_int, c_void_p, c_int),
    "budget_get_routing": (c_int, c_void_p, c_int, POINTER(BudgetRoutingStruct)),
    "set_kernel_choice": (c_int, c_int),
    "kernels": (c_int, c_void_p, c_int),
    "read_speed": (c_double, c_void_p, c_int64, c_int, c_int),
    "disable_broken_amx": (c_int,),
    "set_lazy_mapping": (c_int, c_int),
    "dry_run_gpu": (c_void_p,),
    "memory_uses": (c_int, c_void_p, c_void_p, c_int, c_void_p, c_int),
    "decode": (c_int, c_void_p, c_void_p, c_void_p, c_void_p),
    "largest_values": (c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p),
    "should_stop": (c_bool, c_void_p),
}


def declare(library: ctypes.CDLL) -> None:
    """Give the library's functions their signatures. Raises AttributeError for a library that lacks one."""
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(library, f"moeedge_{name}")
        function.restype = result
        function.argtypes = arguments
