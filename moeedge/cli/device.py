"""The value of -dev, checked before anything is loaded."""

from __future__ import annotations

from moeedge.hardware.spec import DeviceSpec

AUTO = "auto"
NONE = "none"


def check_device(text: str) -> None:
    """Raises DeviceError for a device that is written wrongly or that nothing here offers, naming the known ones."""
    spec = DeviceSpec.parse(text)
    if spec.kind != "name":
        return
    from moeedge.engine import library  # loads llama.cpp
    from moeedge.hardware.resolve import check_known

    library.start()
    check_known(spec)


def layer_notes(n_gpu_layers: int) -> list[str]:
    """What -ngl does here, in a sentence; nothing when it was not given."""
    if n_gpu_layers == 0:
        return []
    from moeedge import native

    if any(device.kind in ("GPU", "IGPU") for device in native.devices()):
        return []
    return ["llama.cpp lists no GPU here: -ngl has no effect."]
