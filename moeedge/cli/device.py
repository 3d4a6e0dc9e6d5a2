"""The value of -dev, checked against what the installed llama.cpp lists."""

from __future__ import annotations

from moeedge.errors import DeviceError

AUTO = "auto"
NONE = "none"


def check_device(name: str) -> None:
    """Raises DeviceError, naming the known devices, unless `name` is auto, none or one that llama.cpp lists."""
    if name in (AUTO, NONE):
        return
    from moeedge import native  # loads llama.cpp

    native.attach()
    known = [AUTO, NONE, *(device.name for device in native.devices())]
    if name not in known:
        raise DeviceError(f'There is no device "{name}".', f"Known: {', '.join(known)}.")


def layer_notes(n_gpu_layers: int) -> list[str]:
    """What -ngl does here, in a sentence; nothing when it was not given."""
    if n_gpu_layers == 0:
        return []
    from moeedge import native

    gpus = [device.name for device in native.devices() if device.kind in ("GPU", "IGPU")]
    if not gpus:
        return ["llama.cpp lists no GPU here: -ngl has no effect."]
    return [f"llama.cpp keeps whole layers on {', '.join(gpus)} (-ngl {n_gpu_layers}); single experts are not placed."]
