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
