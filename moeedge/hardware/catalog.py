"""Everything that could hold experts here, with what it is for or why it is of no use."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from moeedge import native
from moeedge.hardware import nvidia, rpc
from moeedge.hardware.resolve import driver_without_backend
from moeedge.hardware.spec import EMULATED


@dataclass(frozen=True)
class Entry:
    """One row of `moeedge devices`."""

    name: str  # as -dev takes it; of an unusable one as llama.cpp or the driver calls it
    kind: str  # CPU, GPU, IGPU (shares the host's memory), ACCEL, emulated or RPC
    description: str
    free_bytes: int | None  # None: not known, or no memory of its own
    total_bytes: int | None
    usable: bool  # whether it can hold experts
    remark: str  # what for, or why not


def catalog() -> list[Entry]:
    """What llama.cpp lists, in its order, and the devices that it does not know by itself."""
    listed = native.devices()
    entries = [_listed(device) for device in listed if device.kind != "RPC"]
    missed = driver_without_backend(listed)
    if missed:
        entries += [Entry(card, "GPU", "NVIDIA", None, None, False, missed) for card in nvidia.cards()]
    host = psutil.virtual_memory()
    entries.append(
        Entry(
            EMULATED,
            "emulated",
            "a second CPU instance",
            host.available,
            host.total,
            True,
            "memory and threads of its own, to try it all without a GPU; emulated:link=25GB/s,threads=2 sets its pace",
        )
    )
    entries.append(_remote())
    return entries


def _listed(device: native.Device) -> Entry:
    free: int | None = device.free_bytes
    total: int | None = device.total_bytes
    if device.kind == "CPU":
        free = psutil.virtual_memory().available  # llama.cpp calls all of it free
        usable, remark = False, "the cold side: experts that are on no device stay and run here"
    elif device.kind == "GPU":
        usable, remark = True, "holds experts, and layers with -ngl"
    elif device.kind == "IGPU":
        usable, remark = True, "shares the host's memory; auto passes it by"
    else:
        usable, remark = False, "computes in the host's memory, has none of its own for experts"
    if not total:
        free = total = None
    return Entry(device.name, device.kind, device.description, free, total, usable, remark)


def _remote() -> Entry:
    if rpc.is_built_in():
        return Entry(
            "rpc://HOST:PORT", "RPC", "another machine's device", None, None, True, "start moeedge worker there first"
        )
    remark = f"the installed llama.cpp was built without RPC: {rpc.build_command()}"
    return Entry("rpc://HOST:PORT", "RPC", "another machine's device", None, None, False, remark)
