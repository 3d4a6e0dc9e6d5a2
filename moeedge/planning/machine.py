"""The machine that a plan is for: this one as measured, or with the memory that the user names."""

from __future__ import annotations

from dataclasses import dataclass, replace

import psutil

from moeedge import native
from moeedge.engine.loading import resolve_device
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.hardware.resolve import ResolvedDevice
from moeedge.hardware.size import format_bytes
from moeedge.native.memory import IMAGINED_GPU

# What a CUDA process takes beside llama.cpp's buffers: "unaccounted" was 451 to 456 MiB per card in llama.cpp's own
# memory breakdown (ggml-org/llama.cpp pull request 15860, RTX 4090).
KERNEL_BYTES = 456 * 2**20


@dataclass(frozen=True)
class Machine:
    """Memory in bytes, and the device that experts may lie on."""

    device: ResolvedDevice
    ram_total_bytes: int
    ram_free_bytes: int
    vram_given: bool = False  # the user said how much, instead of the driver
    ram_given: bool = False
    notes: tuple[str, ...] = ()


def this_machine(config: EngineConfig, *, vram_bytes: int | None = None, ram_bytes: int | None = None) -> Machine:
    """What -dev means here; the sizes, if given, stand in for what is measured.

    With vram_bytes and without a GPU the plan is for a GPU of that size.
    """
    device = resolve_device(config)
    memory = psutil.virtual_memory()
    notes = list(device.notes)
    if vram_bytes is not None:
        device, notes = _with_memory(config, device, vram_bytes), []
    elif device.kind == "emulated" and ram_bytes is not None:
        device = replace(device, free_bytes=ram_bytes, total_bytes=ram_bytes)
    gpus = [one.name for one in native.devices() if one.kind == "GPU"]
    if len(gpus) > 1 and device.kind == "gpu" and device.llama_device == "auto":
        notes.append(
            f"There are {len(gpus)} GPUs: llama.cpp spreads the layers over all of them, experts get slots on "
            f"{device.ggml_name} only; -dev {device.ggml_name} uses that one alone."
        )
    return Machine(
        device,
        ram_total_bytes=memory.total if ram_bytes is None else ram_bytes,
        ram_free_bytes=memory.available if ram_bytes is None else ram_bytes,
        vram_given=vram_bytes is not None,
        ram_given=ram_bytes is not None,
        notes=tuple(notes),
    )


def _with_memory(config: EngineConfig, device: ResolvedDevice, vram_bytes: int) -> ResolvedDevice:
    if vram_bytes <= 0:
        raise InputError("--vram must be more than 0.", "-dev none plans without a GPU.")
    size = format_bytes(vram_bytes)
    if device.kind == "gpu":
        label = f"{device.label}, planned with {size}"
        return replace(device, label=label, free_bytes=vram_bytes, total_bytes=vram_bytes, notes=[])
    if config.device == "auto":
        return ResolvedDevice(
            "gpu",
            ggml_name=IMAGINED_GPU,
            label=f"a GPU of {size}",
            llama_device=IMAGINED_GPU,
            free_bytes=vram_bytes,
            total_bytes=vram_bytes,
        )
    if device.kind == "none":
        raise InputError(f"-dev {config.device} has no memory for experts.", "Leave out --vram, or -dev.")
    return replace(device, free_bytes=vram_bytes, total_bytes=vram_bytes, notes=[])
