"""The C interface of include/moeedge.h in ctypes: structures and signatures, nothing else."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_uint32


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


class StatsStruct(ctypes.Structure):
    """struct moeedge_stats."""

    _fields_ = [
        ("graphs", c_int64),
        ("blocks", c_int64),
        ("sense_ns", c_int64),
        ("compute_ns", c_int64),
    ]


class BackendRegistration(ctypes.Structure):
    """The beginning of struct ggml_backend_reg, as far as we look."""

    _fields_ = [("api_version", c_int)]


_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "moeedge_ggml_version": (c_char_p, []),
    "moeedge_llama_cpp_version": (c_char_p, []),
    "moeedge_backend_api_version": (c_int, []),
    "moeedge_register": (c_int, []),
    "moeedge_set_default_claims": (c_int, [c_int]),
    "moeedge_newest_instance": (c_int64, []),
    "moeedge_live_instances": (c_int, []),
    "moeedge_instance_set_claims": (c_int, [c_int64, c_int]),
    "moeedge_instance_set_phase": (c_int, [c_int64, c_int]),
    "moeedge_instance_configure": (c_int, [c_int64, c_int, c_int, c_int, c_int]),
    "moeedge_instance_read_counts": (c_int, [c_int64, POINTER(c_uint32)]),
    "moeedge_instance_frames": (c_int, [c_int64, c_int64, POINTER(FrameStruct), c_int]),
    "moeedge_instance_stats": (c_int, [c_int64, POINTER(StatsStruct)]),
    "moeedge_instance_threads": (c_int, [c_int64]),
}


def declare(library: ctypes.CDLL) -> None:
    """Give the library's functions their signatures."""
    for name, (restype, argtypes) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = restype
        function.argtypes = argtypes
