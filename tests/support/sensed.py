"""A stock context with our sensor bound to it, without the engine, for tests of the native library."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp

from moeedge.llama import library
from moeedge.llama.gguf_file import read_experts_used
from moeedge.native import OffloadScope, Sensor
from tests.support.stock import StockContext


def experts_used(path: Path) -> int:
    """Per token, the most of any layer."""
    return max(read_experts_used(path)[1])


def model_number(context: StockContext, key: str) -> int:
    """An integer from the model's metadata, the key without the architecture's prefix."""
    value = ctypes.create_string_buffer(128)
    for full_key in ("general.architecture", None):
        name = full_key or f"{value.value.decode()}.{key}"
        size = llama_cpp.llama_model_meta_val_str(context.model, name.encode(), value, len(value))
        assert size > 0, f"the model has no {name}"
    return int(value.value)


def sensed_context(
    path: Path, scope: OffloadScope, *, n_ubatch: int = 256, **options: Any
) -> tuple[StockContext, Sensor]:
    """Make the context as the engine does: attached first, scope NONE while llama.cpp sets up, then `scope`."""
    library.start()
    context = StockContext(path, n_ubatch=n_ubatch, **options)
    shape = [model_number(context, key) for key in ("block_count", "expert_count")]
    sensor = Sensor(*shape, experts_used(path), n_ubatch)
    sensor.set_offload_scope(scope)
    return context, sensor
