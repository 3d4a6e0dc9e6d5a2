"""Files of expert tensors with random bytes, as the expert cache reads them: it knows places, not the GGUF format."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeedge.native.abi import ReadFault
from moeedge.native.cache import CacheConfig, ExpertCache, ExpertTensor

F32 = 0  # enum ggml_type
HEADER_BYTES = 96  # something before the first tensor
NO_PAIRS = np.zeros((0, 2), np.int32)


@dataclass(frozen=True)
class ExpertFile:
    """A model's experts: three roles per layer, of which one is a bias."""

    path: Path
    tensors: list[ExpertTensor]
    n_layers: int
    n_experts: int

    def bytes_of(self, layer: int, expert: int, role: str) -> bytes:
        """What the file holds of one expert."""
        tensor = next(t for t in self.tensors if t.layer == layer and t.role == role)
        with self.path.open("rb") as file:
            file.seek(tensor.offset + expert * tensor.stride)
            return file.read(tensor.stride)

    def roles(self, layer: int) -> list[str]:
        return [tensor.role for tensor in self.tensors if tensor.layer == layer]

    @property
    def everything(self) -> list[tuple[int, int]]:
        """(layer, expert) of all."""
        layers = sorted({tensor.layer for tensor in self.tensors})
        return list(product(layers, range(self.n_experts)))

    @property
    def expert_bytes(self) -> int:
        """Of one expert of the first layer."""
        return sum(tensor.stride for tensor in self.tensors if tensor.layer == 0)

    def config(self, ratio: float, **changes: Any) -> CacheConfig:
        values: dict[str, Any] = {"device": "emulated", "files": [self.path], "tensors": self.tensors}
        values |= {"n_layers": self.n_layers, "n_experts": self.n_experts, "ratio": ratio}
        return CacheConfig(**values | changes)


def model_experts(path: Path) -> ExpertFile:
    from moeedge.llama.gguf_file import expert_tensors  # which loads llama.cpp

    tensors, _ = expert_tensors(path)
    n_layers = max(tensor.layer for tensor in tensors) + 1
    return ExpertFile(path, tensors, n_layers, max(tensor.n_experts for tensor in tensors))


def write_experts(
    path: Path,
    *,
    n_layers: int = 4,
    n_experts: int = 8,
    width: int = 32,
    wide_layers: Sequence[int] = (),
    dense_layers: Sequence[int] = (),
    sparse: bool = False,
) -> ExpertFile:
    """Writes the file; wide layers have twice the width, dense ones no experts. A sparse file reads as zeros."""
    tensors, offset = [], HEADER_BYTES
    for layer in sorted(set(range(n_layers)) - set(dense_layers)):
        n = 2 * width if layer in wide_layers else width
        for role, ne0, ne1 in (("up_exps.weight", width, n), ("down_exps.weight", n, width), ("up_exps.bias", n, 1)):
            tensors.append(
                ExpertTensor(
                    layer=layer,
                    type=F32,
                    ne0=ne0,
                    ne1=ne1,
                    n_experts=n_experts,
                    file=0,
                    offset=offset,
                    stride=4 * ne0 * ne1,
                    name=f"blk.{layer}.ffn_{role}",
                )
            )
            offset += n_experts * tensors[-1].stride
    with path.open("wb") as file:
        if sparse:
            file.truncate(offset)
        else:
            file.write(np.random.default_rng(0).bytes(offset))
    return ExpertFile(path, tensors, n_layers, n_experts)


def pairs(*entries: tuple[int, int]) -> npt.NDArray[np.int32]:
    """(layer, expert) of each, int32 [n, 2]."""
    return np.array(entries, dtype=np.int32).reshape(-1, 2)


def ask(
    cache: ExpertCache,
    uploads: Sequence[tuple[int, int]],
    *,
    priority: Sequence[int] | None = None,
    victims: Sequence[tuple[int, int]] = (),
    utility: Sequence[float] | None = None,
) -> None:
    """A plan written down by hand; without more, all uploads have the same level, and victims come in their order."""
    cache.plan(
        pairs(*uploads),
        np.array(priority if priority is not None else [1] * len(uploads), np.uint8),
        pairs(*victims),
        np.array(utility if utility is not None else range(len(victims)), np.float32),
    )


def drain(cache: ExpertCache) -> None:
    """Waits for all transfers, for far longer than they take."""
    assert cache.drain(20.0)


def carry_out(cache: ExpertCache, uploads: Sequence[tuple[int, int]], **further: Any) -> None:
    """A plan as of `ask`, until nothing of it is left to do."""
    ask(cache, uploads, **further)
    drain(cache)


def demand(
    cache: ExpertCache, layer: int, wanted: Sequence[int], victims: Sequence[tuple[int, int]] = (), wait_s: float = 20.0
) -> int:
    """Demands experts of a layer; victims go in their order."""
    utility = np.arange(len(victims), dtype=np.float32)
    return cache.demand(layer, np.array(wanted, np.int32), pairs(*victims), utility, wait_s)


def acquire(cache: ExpertCache, layer: int, experts: Sequence[int]) -> npt.NDArray[np.int32]:
    """Pins resident experts as a computation does; returns their slots, -1: not resident."""
    wanted = np.asarray(experts, dtype=np.int32)
    slots = np.empty(wanted.size, dtype=np.int32)
    cache._call("acquire", layer, wanted, wanted.size, slots)
    return slots


def release(cache: ExpertCache, layer: int, slots: npt.NDArray[np.int32]) -> None:
    """Unpins slots."""
    cache._call("release", layer, np.ascontiguousarray(slots), slots.size)


def read(cache: ExpertCache, layer: int, expert: int, role: str, size_bytes: int) -> bytes:
    """Bytes of one role of a resident expert, from the device."""
    out = ctypes.create_string_buffer(size_bytes)
    cache._call("read", layer, expert, role.encode(), out, size_bytes)
    return out.raw


def fail_reads(cache: ExpertCache, kind: ReadFault, every: int, delay_s: float = 0.0) -> None:
    """Lets every `every`-th read of a cache in RAM fail from now on; 0: none."""
    cache._call("set_read_faults", kind, every, delay_s)


def resident(cache: ExpertCache) -> set[tuple[int, int]]:
    """(layer, expert) of all that are resident."""
    return {(int(layer), int(expert)) for layer, expert in np.argwhere(cache.residency() == 1)}


def assert_balanced(cache: ExpertCache, n_slots: int | None = None) -> None:
    """Asserts that the counters agree with the table; n_slots: in use at most, where their number changes meanwhile."""
    stats = cache.stats()
    assert stats.uploads - stats.evictions == stats.slots_used
    assert stats.slots_used <= (cache.info.n_slots if n_slots is None else n_slots)
    assert stats.bytes_moved >= 0


def assert_bytes(cache: ExpertCache, experts: ExpertFile) -> int:
    """That every resident expert's slot holds the file's bytes; returns how many are resident."""
    found = resident(cache)
    for layer, expert in found:
        for role in experts.roles(layer):
            expected = experts.bytes_of(layer, expert, role)
            assert read(cache, layer, expert, role, len(expected)) == expected, (layer, expert, role)
    return len(found)
