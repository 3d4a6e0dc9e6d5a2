from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moeedge.policies.base import ABLATIONS

# how prompts are computed: measured choice, as without a cache, resident experts on the device, all streamed through it
PrefillPath = Literal["auto", "cpu", "resident", "stream"]


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """How plans are carried out: the defaults are ours, the rest is what published systems do, for comparisons."""

    misses: Literal["cpu", "load"] = "cpu"  # the CPU computes what is missing, or it is loaded when its layer comes
    # what the draft's hidden states foretell is moved by a worker, or waited for layer by layer, or not moved
    drafting: Literal["worker", "vanilla", "off"] = "worker"
    batch: int | None = None  # experts in one transfer at most; 0: as the device likes it; None: as the policy does
    cutoff_layer: int | None = None  # sp-moe: layers that are prefetched for; None: worked out

    def __post_init__(self) -> None:
        if self.misses not in ("cpu", "load"):
            raise ValueError(f"misses must be cpu or load, not {self.misses}")
        if self.drafting not in ("worker", "vanilla", "off"):
            raise ValueError(f"drafting must be worker, vanilla or off, not {self.drafting}")
        if self.batch is not None and self.batch < 0:
            raise ValueError(f"a transfer cannot have {self.batch} experts")


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Which experts a device may hold, and who decides; the defaults are those of MoE-SpAc section 4.1."""

    vram_bytes: int | None = None  # for slots; None: measured
    cache_ratio: float | None = None  # share of all expert bytes; None: what vram_bytes or the device allows
    policy: str = "spac"
    ablations: frozenset[str] = frozenset()
    utility_cap: int = 4  # K
    forgetting: float = 0.1  # lambda
    prefill: PrefillPath = "auto"
    calibrate: bool = True  # measure on first use; False: take what was measured before, or nothing
    measure_anew: bool = False  # whatever was measured before
    execution: ExecutionConfig = ExecutionConfig()

    def __post_init__(self) -> None:
        if self.vram_bytes is not None and self.vram_bytes < 0:
            raise ValueError(f"vram_bytes (--vram) must be >= 0, not {self.vram_bytes}")
        # written so that NaN is refused, too
        if self.cache_ratio is not None and not 0 <= self.cache_ratio <= 1:
            raise ValueError(f"the cache ratio must be in [0, 1], not {self.cache_ratio}")
        if self.vram_bytes is not None and self.cache_ratio is not None:
            raise ValueError("--vram and --cache-ratio exclude each other")
        unknown = sorted(self.ablations - ABLATIONS.keys())
        if unknown:
            raise ValueError(f'there is no ablation "{unknown[0]}"; known are {", ".join(sorted(ABLATIONS))}')
        if not 1 <= self.utility_cap <= 64:
            raise ValueError(f"the utility cap must be in 1..64, not {self.utility_cap}")
        if not 0 <= self.forgetting <= 1:
            raise ValueError(f"the forgetting factor must be in [0, 1], not {self.forgetting}")
        if self.prefill not in ("auto", "cpu", "resident", "stream"):
            raise ValueError(f"the prefill path must be auto, cpu, resident or stream, not {self.prefill}")

    @property
    def asked(self) -> bool:
        """Whether the user gave the cache a size, so that it stays on even where it does not pay."""
        return self.vram_bytes is not None or self.cache_ratio is not None
