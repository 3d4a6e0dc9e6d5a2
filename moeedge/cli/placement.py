"""What the options of expert placement mean, before llama.cpp is loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast

from moeedge.engine.types import PlacementConfig, PrefillPath
from moeedge.errors import InputError
from moeedge.hardware.size import parse_size
from moeedge.hardware.spec import EMULATED, RPC_SCHEME

_SPIN_COUNT = "1000"


def placement_config(
    *,
    vram: str | None = None,
    cache_ratio: float | None = None,
    policy: str = "spac",
    ablate: Sequence[str] = (),
    utility_cap: int = 4,
    forgetting: float = 0.1,
    prefill_path: str = "auto",
    no_calibrate: bool = False,
    measure_anew: bool = False,
) -> PlacementConfig:
    """The values of the options of the same names. Raises InputError and ValueError for what cannot be meant."""
    from moeedge import policies  # loads numpy: not needed for --help

    if policy not in policies.POLICIES:
        raise InputError(f'There is no policy "{policy}".', f"Known: {', '.join(policies.POLICIES)}.")
    return PlacementConfig(
        vram_bytes=None if vram is None else parse_size(vram),
        cache_ratio=cache_ratio,
        policy=policy,
        ablations=frozenset(ablate),
        utility_cap=utility_cap,
        forgetting=forgetting,
        prefill=cast(PrefillPath, prefill_path),  # PlacementConfig looks at it
        calibrate=not no_calibrate,
        measure_anew=measure_anew,
    )


def calm_idle_threads(device: str, *, may_emulate: bool = False) -> None:
    """Makes idle OpenMP threads give their core away soon where another team of threads computes beside them.

    That is the emulated device, or a worker, which may be of this machine.

    Read when llama_cpp is loaded, so this must come before. may_emulate: auto may turn out to be the emulated device.
    """
    if device.startswith((EMULATED, RPC_SCHEME)) or (may_emulate and device == "auto"):
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
