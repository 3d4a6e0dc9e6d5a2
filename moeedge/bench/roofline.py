"""The roofline of decoding on a CPU (Williams et al. 2009): no token is faster than memory delivers its weights.

The memory's read speed limits models that are larger than the processor's caches. The KV cache is not counted.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moeedge.hardware.memory import available_memory
from moeedge.llama import gguf_file
from moeedge.llama.model import Model
from moeedge.native.compute import read_speed
from moeedge.paths import text_of

_BYTES_MIN = 128 << 20  # of the memory that is read
_CACHES = 4  # it is so many times as large as the last caches of the threads' processors
_FREE_SHARE = 0.25  # of the free memory that it may take
_PROCESSORS = Path("/sys/devices/system/cpu")  # Linux only


@dataclass(frozen=True)
class Roofline:
    """The limit of decoding without drafts."""

    read_bytes_per_s: float  # by as many threads as decode
    bytes_per_token: int  # of weights

    @property
    def limit_ts(self) -> float:
        """Tokens/s at most, one token at a time."""
        return self.read_bytes_per_s / self.bytes_per_token


def measure_read_speed(n_threads: int) -> float:
    """Bytes per second that so many threads read from memory at once; 0.0 where memory is short."""
    n_bytes = max(_BYTES_MIN, _CACHES * _last_cache_bytes(n_threads))
    return 0.0 if n_bytes > _FREE_SHARE * available_memory() else read_speed(n_bytes, n_threads)


def measure_roofline(model: Model, n_threads: int) -> Roofline | None:
    """Measures the read speed; None where weights are on a GPU, or where memory is short."""
    speed = 0.0 if model.uses_gpu else measure_read_speed(n_threads)
    if speed == 0:
        return None
    info = model.info
    tensors = [tensor for part in gguf_file.parts(model.path) for tensor in gguf_file.read_tensors(part)]
    experts, _ = gguf_file.expert_tensors(model.path, n_layers=info.n_layers)
    n_bytes = gguf_file.bytes_per_token(tensors, experts, info.used_per_layer)
    return Roofline(speed, n_bytes) if n_bytes > 0 else None


def _last_cache_bytes(n_threads: int) -> int:
    """Size of the last caches that so many threads can have, 0 where it is unknown: groups of cores have their own."""
    sizes: dict[str, int] = {}  # by the processors that share the cache
    for caches in _PROCESSORS.glob("cpu[0-9]*/cache"):
        with suppress(ValueError):  # a processor that is off, a virtual machine
            last = max(caches.glob("index[0-9]*"), key=lambda folder: int(text_of(folder / "level")))
            sizes[text_of(last / "shared_cpu_list")] = int(text_of(last / "size").removesuffix("K")) * 1024
    return sum(sorted(sizes.values())[-n_threads:])
