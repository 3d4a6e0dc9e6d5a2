"""What a model and a context of it take, by where it lies: llama.cpp's own account, without loading weights."""

from __future__ import annotations

from dataclasses import dataclass

from moeedge.engine.context import Context
from moeedge.engine.model import Model
from moeedge.engine.types import EngineConfig

_PLAIN = ("CPU", "CPU_Mapped")  # llama.cpp's names of memory in which weights are as they are in the file


@dataclass(frozen=True)
class Share:
    """Bytes in one kind of memory."""

    weights_bytes: int = 0
    kv_bytes: int = 0  # and recurrent states
    compute_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.compute_bytes

    def __add__(self, other: Share) -> Share:
        return Share(
            self.weights_bytes + other.weights_bytes,
            self.kv_bytes + other.kv_bytes,
            self.compute_bytes + other.compute_bytes,
        )


@dataclass(frozen=True)
class Footprint:
    """Of a model and one context of it."""

    gpus: dict[str, Share]  # by llama.cpp's name of the GPU
    ram: Share
    repacked_bytes: int  # of ram's weights: copies for the CPU, which cannot be paged out to the file

    def gpu(self, name: str) -> Share:
        return self.gpus.get(name, Share())


def footprint(model: Model, n_ctx: int, config: EngineConfig) -> Footprint:
    """What a context of `n_ctx` tokens would take, as a session makes it; `model` is loaded without weights."""
    gpus: dict[str, Share] = {}
    ram, repacked = Share(), 0
    with Context(model, n_ctx=n_ctx, n_threads=1, n_batch=config.n_batch, n_ubatch=config.n_ubatch) as context:
        for use in context.memory_uses():
            share = Share(use.weights_bytes, use.memory_bytes, use.compute_bytes)
            if use.on_gpu:
                gpus[use.device] = gpus.get(use.device, Share()) + share
                continue
            ram += share
            if not use.device and use.buffer_type not in _PLAIN:
                repacked += use.weights_bytes
    return Footprint(gpus, ram, repacked)
