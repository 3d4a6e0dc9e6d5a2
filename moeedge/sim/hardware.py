"""What a simulation needs to know of a machine: bandwidths, compute and latencies, from data files with sources.

    {"name": "...", "gpu_bytes_per_s": ..., ..., "sources": {"gpu_bytes_per_s": "..."}}

Every constant of a built-in machine (sim/data/hardware.json) has its source beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeedge.errors import InputError
from moeedge.sim.shapes import only_known, read_data, read_json


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Bandwidths as reached, not as printed on the box; see the sources in the data file."""

    name: str
    gpu_bytes_per_s: float
    gpu_flops: float
    gpu_memory_bytes: float
    cpu_bytes_per_s: float
    cpu_flops: float
    link_bytes_per_s: float
    link_latency_s: float  # of one transfer, whatever its size
    layer_overhead_s: float  # of a layer's launches beside its memory traffic
    sync_s: float  # handing a layer's hidden states to the CPU and back

    def __post_init__(self) -> None:
        for name in ("gpu_bytes_per_s", "gpu_flops", "cpu_bytes_per_s", "cpu_flops", "link_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0")
        for name in ("gpu_memory_bytes", "link_latency_s", "layer_overhead_s", "sync_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0")


def builtin_hardware() -> dict[str, Hardware]:
    """The machines of sim/data/hardware.json by name."""
    table = read_data("hardware.json")["hardware"]
    return {name: Hardware(name=name, **only_known(entry, Hardware)) for name, entry in table.items()}


def find_hardware(text: str) -> Hardware:
    """A built-in machine, or one from a JSON file of the same fields. Raises InputError for anything else."""
    known = builtin_hardware()
    if text in known:
        return known[text]
    if not text.endswith(".json"):
        mend = f"Choose from {', '.join(known)}, or name a file that ends in .json."
        raise InputError(f'There is no hardware "{text}".', mend)
    path = Path(text)
    entry: dict[str, Any] = {"name": path.stem} | read_json(path)
    try:
        return Hardware(**only_known(entry, Hardware))
    except (TypeError, ValueError) as error:
        raise InputError(f"{path} describes no hardware: {error}.", "See docs/simulation.md for the format.") from None
