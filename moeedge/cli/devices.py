"""Checks of the device and of layers on it, before a model is loaded. This module loads llama.cpp."""

from __future__ import annotations

from moeedge import native
from moeedge.engine.types import ALL_ON_CPU, EngineConfig
from moeedge.hardware.devices import resolve
from moeedge.hardware.spec import DeviceSpec
from moeedge.llama import library


def check_device(text: str) -> None:
    """Raises DeviceError for a malformed device, or one that this machine does not have; the hint names the known."""
    spec = DeviceSpec.parse(text)
    if spec.kind != "name":
        return
    library.start()
    resolve(spec)


def layer_notes(config: EngineConfig) -> list[str]:
    """A sentence where -ngl, -ncmoe or --cpu-moe has no effect."""
    options = ["-ngl"] if config.n_gpu_layers else []
    if config.n_cpu_moe is not None:
        options.append("--cpu-moe" if config.n_cpu_moe == ALL_ON_CPU else "-ncmoe")
    if not options:
        return []
    library.start()  # llama.cpp logs while it lists devices
    if any(device.kind in ("GPU", "IGPU") for device in native.devices()):
        return []
    verb = "has" if len(options) == 1 else "have"
    return [f"llama.cpp lists no GPU here: {' and '.join(options)} {verb} no effect."]
