"""The C interface of include/moeedge.h in ctypes: enums, structures, signatures, also of ggml's functions.

Structures without pointers are dataclasses next to the code that uses them: each field is declared once, with its C
type in its metadata. Statistics are figures of records.py, float64 for seconds and int64 for all else.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Callable, Mapping
from ctypes import CFUNCTYPE, POINTER, c_bool, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_void_p
from enum import Enum, IntEnum, IntFlag
from functools import cache, partial
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

Record = TypeVar("Record")

ABI_VERSION = 30  # MOEEDGE_ABI_VERSION that this module is written for


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
    AVXVNNI = 4  # ours for AVX-VNNI where there are any


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


def _all(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class FrameStruct(ctypes.Structure):
    """struct moeedge_frame, whose arrays are int32, int32 and float."""

    _fields_ = [*_all(c_int64, "serial"), *_all(c_int32, "phase n_tokens"), *_all(c_void_p, "layer_tokens ids weights")]


class ActivationsStruct(ctypes.Structure):
    """struct moeedge_activations, whose arrays are int32 and float."""

    _fields_ = [*_all(c_int64, "serial"), *_all(c_int32, "n_layers stride width"), *_all(c_void_p, "layer_tokens rows")]


class BlockStruct(ctypes.Structure):
    """struct moeedge_block, whose arrays are int32 and float."""

    _fields_ = [*_all(c_int32, "layer phase n_tokens n_used n_embd"), *_all(c_void_p, "ids input")]


class BudgetConfigStruct(ctypes.Structure):
    """struct moeedge_budget_config, whose budgets are int32."""

    _fields_ = [*_all(c_int32, "ranking coverage"), ("budgets", c_void_p)]


class RoutingMode(IntEnum):
    """enum moeedge_routing_mode: what forced routing does."""

    OFF = 0
    IDENTITY = 1
    FORCED = 2


class RoutingBatchStruct(ctypes.Structure):
    """struct moeedge_routing_batch, whose ids are int32."""

    _fields_ = [*_all(c_int32, "mode n_tokens"), ("ids", c_void_p)]


class BudgetRoutingStruct(ctypes.Structure):
    """struct moeedge_budget_routing, whose arrays are float, float, int32 and int32."""

    _fields_ = [*_all(c_int32, "n_tokens kind"), *_all(c_void_p, "values selection natural_ids ids")]


BLOCK_HOOK = CFUNCTYPE(None, c_void_p, POINTER(BlockStruct))  # moeedge_block_hook
BLOCK_RECORD = np.dtype(  # struct moeedge_block_record
    [
        *_all("i8", "serial"),
        *_all("i4", "layer phase n_tokens pairs_cpu pairs_device unique_cpu unique_device path"),
        *_all("i8", "partition_ns cpu_ns device_ns wait_ns wait_bytes"),
    ]
)
BUDGET_LAYER = np.dtype(  # struct moeedge_budget_layer
    [*_all("i8", "batches unique_natural unique unique_max substituted"), ("kept", "f8")]
)

# Names of functions by their result and argument types. Arrays and output structures are passed by address (c_void_p),
# which is cheap enough for every step.
SIGNATURES: dict[tuple[Any, ...], str] = {
    (c_char_p,): "ggml_version llama_cpp_version last_error",
    (c_int,): "backend_api_version abi_version register live_instances disable_broken_amx",
    (c_int, c_int): "set_default_offload_scope set_kernel_choice set_lazy_mapping throw_on_abort",
    (c_void_p, c_char_p): "open_gguf",
    (c_int, c_void_p): "set_default_host_buffer",
    (c_int64,): "newest_instance attention_count",
    (c_int, c_int64, c_int): (
        "instance_set_offload_scope instance_set_phase instance_skip_unweighted cache_set_batch cache_limit "
        "cache_set_timing cache_set_device_path"
    ),
    (c_int, c_int64, c_int, c_int, c_int, c_int): "instance_configure instance_set_capture",
    (c_int, c_int64, c_void_p): (
        "instance_read_counts instance_get_stats cache_get_info cache_set_utilities cache_residency "
        "cache_get_stats cache_get_reader"
    ),
    (c_int, c_int64, c_int64, POINTER(FrameStruct), c_int): "instance_frames",
    (c_int, c_int64): "instance_threads cache_destroy",
    (c_int, c_int64, c_int, POINTER(ActivationsStruct)): "instance_get_activations",
    (c_int, c_int64, BLOCK_HOOK, c_void_p): "instance_set_hook",
    (c_int, c_int64, c_void_p, c_int64): "instance_expert_outputs",
    (c_int, c_int64, c_int64): "instance_set_cache instance_remove_cache cache_set_ram",
    (c_int64, c_void_p): "cache_create",
    (c_int, c_int64, c_void_p, c_void_p, c_void_p): "cache_groups",
    (c_int, c_int64, c_int, c_void_p, c_int): "cache_read_ahead cache_release",
    (c_int, c_int64, c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_int): "cache_plan",
    (c_int, c_int64, c_int, c_void_p, c_int, c_void_p, c_void_p, c_int, c_double): "cache_demand",
    (c_int, c_int64, c_int64, c_void_p, c_int): "cache_blocks",
    (c_int, c_int64, c_double): "cache_drain cache_clear",
    (c_int, c_int64, c_int, c_int): "cache_set_prefill",
    (c_int, c_int64, c_int, c_int64): "cache_set_readers",
    (c_int, c_int64, c_int, c_int, c_double): "cache_set_read_faults",
    (c_int, c_int64, c_int, c_void_p, c_int, c_void_p): "cache_acquire",
    (c_int, c_int64, c_int, c_int, c_char_p, c_void_p, c_int64): "cache_read",
    (c_void_p, c_int, c_int, c_void_p): "budget_create",
    (c_void_p, c_int, c_int, c_void_p, c_int): "routing_create",
    (None, c_void_p): "budget_destroy routing_destroy",
    (c_bool, c_void_p, c_bool, c_void_p): "budget_on_node routing_on_node",
    (c_int, c_void_p, POINTER(RoutingBatchStruct)): "routing_set",
    (c_int64, c_void_p, c_int, c_void_p, c_int64): "routing_captured",
    (c_int, c_void_p, POINTER(BudgetConfigStruct)): "budget_configure",
    (c_int, c_void_p, c_int): "budget_set_active budget_set_capture routing_set_capture kernels",
    (c_int, c_void_p, c_void_p): "budget_read",
    (c_int, c_void_p, c_int, POINTER(BudgetRoutingStruct)): "budget_get_routing",
    (c_double, c_void_p, c_int64, c_int, c_int): "read_speed",
    (c_double, c_int, c_int): "multiply_speed",
    (c_void_p,): "dry_run_gpu",
    (c_int, c_void_p, c_void_p, c_int, c_void_p, c_int): "memory_uses",
    (c_int, c_void_p, c_void_p, c_void_p, c_void_p): "decode",
    (c_int, c_void_p, c_void_p, c_char_p, c_int, c_void_p, c_int, c_bool, c_bool): "tokenize",
    (c_int, c_void_p, c_void_p, c_int, c_void_p, c_int, c_bool): "piece",
    (c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p): "largest_values",
    (c_bool, c_void_p): "should_stop",
}


# Those of the libggml that llama_cpp has loaded. Objects are addresses.
GGML_SIGNATURES: dict[tuple[Any, ...], str] = {
    (c_char_p,): "ggml_version",
    (c_size_t,): "ggml_backend_dev_count",
    (c_void_p, c_size_t): "ggml_backend_dev_get",
    (c_char_p, c_void_p): (
        "ggml_backend_dev_name ggml_backend_dev_description ggml_backend_reg_name ggml_backend_buft_name"
    ),
    (c_void_p, c_void_p): "ggml_backend_dev_backend_reg ggml_backend_dev_buffer_type",
    (c_bool, c_void_p): "ggml_backend_buft_is_host",
    (c_void_p, c_char_p): "ggml_backend_dev_by_name ggml_backend_reg_by_name",
    (None, c_void_p): "ggml_backend_register gguf_free",
    (None, c_void_p, c_void_p): "ggml_backend_dev_get_props",
    (c_size_t, c_void_p): "ggml_backend_reg_dev_count gguf_get_data_offset",
    (c_int64, c_void_p): "gguf_get_n_tensors",
    (c_int64, c_void_p, c_char_p): "gguf_find_key",
    (c_int, c_void_p, c_int64): "gguf_get_kv_type gguf_get_arr_type gguf_get_tensor_type",
    (c_char_p, c_void_p, c_int64): "gguf_get_val_str gguf_get_tensor_name",
    (ctypes.c_uint32, c_void_p, c_int64): "gguf_get_val_u32",
    (c_size_t, c_void_p, c_int64): "gguf_get_arr_n gguf_get_tensor_offset gguf_get_tensor_size",
    (POINTER(ctypes.c_uint32), c_void_p, c_int64): "gguf_get_arr_data",
    (POINTER(c_int64), c_void_p, c_int64): "gguf_get_tensor_ne",
}


def declare(library: ctypes.CDLL, signatures: Mapping[tuple[Any, ...], str], prefix: str = "") -> ctypes.CDLL:
    """Give the library's functions their signatures. Raises AttributeError for a library that lacks one."""
    for (result, *arguments), names in signatures.items():
        for name in names.split():
            function = getattr(library, prefix + name)
            function.restype, function.argtypes = result, arguments
    return library


def c_field(ctype: Any = c_int64, default: Any = dataclasses.MISSING) -> Any:
    """A field of a structure."""
    return dataclasses.field(default=default, metadata={"ctype": ctype})


@cache
def c_struct(record: Any, **further: Any) -> type[ctypes.Structure]:
    """The ctypes structure with the fields of a dataclass, in their order, and further ones."""
    members = []
    for field in dataclasses.fields(record):
        statistic = field.metadata.get("figure")
        kind = field.metadata["ctype"] if statistic is None else c_double if statistic.unit == "s" else c_int64
        members.append((field.name, kind))
    return type(record.__name__ + "Struct", (ctypes.Structure,), {"_fields_": [*members, *further.items()]})


def from_c(record: type[Record], raw: ctypes.Structure) -> Record:
    """The dataclass `record` with the values of its structure: flags as bool, text as str."""
    read, conversions = _reader(record)  # type: ignore[arg-type]
    values = list(read(raw))
    for index, convert in conversions:
        values[index] = convert(values[index])
    return record(*values)


@cache
def _reader(record: Any) -> tuple[Callable[[Any], tuple[Any, ...]], list[tuple[int, Any]]]:
    """A getter of all fields of a dataclass, and conversions by index, made once for all calls."""
    fields = dataclasses.fields(record)
    convert = {"bool": bool, "str": partial(str, encoding="utf-8", errors="replace")}
    conversions = [(i, convert[str(field.type)]) for i, field in enumerate(fields) if str(field.type) in convert]
    return attrgetter(*(field.name for field in fields)), conversions


def fill(raw: ctypes.Structure, record: Any) -> None:
    """Copy the values of a dataclass into its structure."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        setattr(raw, field.name, value.encode() if isinstance(value, str) else value)


def view(address: int, shape: tuple[int, ...], dtype: type[Any]) -> np.ndarray[Any, Any]:
    """An array of native memory, of 4-byte values; np.ctypeslib.as_array takes five times as long."""
    memory = (c_int32 * math.prod(shape)).from_address(address)
    return np.frombuffer(memoryview(memory), dtype).reshape(shape)
