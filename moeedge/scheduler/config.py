"""How experts are placed: configurations, validated once, where they are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from moeedge.errors import require
from moeedge.native.abi import DevicePath, PrefillPath
from moeedge.policies.base import PolicyConfig


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """How plans are carried out: the defaults are moeedge's, the rest is for comparisons with published systems."""

    # the CPU computes missing experts, or they are loaded when their layer is computed
    misses: Literal["cpu", "load"] = "cpu"
    # experts predicted during drafting: a worker moves them, drafting waits for them layer by layer, or none is moved
    drafting: Literal["worker", "vanilla", "off"] = "worker"
    batch: int | None = None  # experts in one transfer at most; 0: the device decides; None: the policy decides
    cutoff_layer: int | None = None  # sp-moe-prefetch: layers to prefetch for; None: worked out from measured times


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Which experts a device may hold, and which policy decides; the defaults are those of MoE-SpAc section 4.1."""

    vram_bytes: int | None = None  # for slots; None: measured
    cache_ratio: float | None = None  # share of all expert bytes; None: what vram_bytes or the device allows
    policy: str = "spac"
    ablations: frozenset[str] = frozenset()
    utility_cap: int = 4  # K
    forgetting: float = 0.1  # lambda
    prefill: PrefillPath = PrefillPath.AUTO
    disk_bytes_per_s: float = 0.0  # of a slower disk, for measuring; 0: not limited
    device_path: DevicePath | None = None  # of small batches; None: the fastest as measured
    calibrate: bool = True  # measure on first use; False: use only what was measured before
    measure_anew: bool = False  # even if it was measured before
    calibrate_later: bool = False  # after the first answer (Session.measure_postponed)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    pins_files: bool = True  # a GPU reads experts from the file's pages, pinned in RAM, if it has room for them
    warm_start: bool = True  # in RAM: experts that earlier runs used most are loaded first, and this run's are kept
    governed: bool = False  # the cache goes off while steps are slower with it

    def __post_init__(self) -> None:
        ratio, size = self.cache_ratio or 0.0, self.vram_bytes or 0
        require(size >= 0, f"vram_bytes (--vram) must be 0 or more, not {size}")
        text = f"the cache ratio (--cache-ratio) must be from 0 to 1 (1: all experts), not {ratio:g}"
        require(0 <= ratio <= 1, text)  # NaN fails, too
        require(None in (self.vram_bytes, self.cache_ratio), "--vram and --cache-ratio cannot be used together")
        self.policy_config(gamma=0)  # checks the other values
        object.__setattr__(self, "prefill", PrefillPath(self.prefill))

    def policy_config(self, *, gamma: int) -> PolicyConfig:
        """The policy's settings, before anything is measured; gamma: the draft length."""
        cutoff = self.execution.cutoff_layer
        return PolicyConfig(
            gamma=gamma, cap=self.utility_cap, forgetting=self.forgetting, ablations=self.ablations, cutoff_layer=cutoff
        )

    @property
    def has_size(self) -> bool:
        """Whether the cache was given a size, so that it stays on even where it does not pay."""
        return self.vram_bytes is not None or self.cache_ratio is not None
