"""How experts are placed: configurations, validated once, where they are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from moeedge.native.abi import DevicePath, PrefillPath
from moeedge.policies.base import PolicyConfig

Misses = Literal["cpu", "load"]
Drafting = Literal["worker", "vanilla", "off"]


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """How plans are carried out: the defaults are moeedge's, the rest is for comparisons with published systems."""

    misses: Misses = "cpu"  # the CPU computes missing experts, or they are loaded when their layer is computed
    # experts predicted during drafting: a worker moves them, drafting waits for them layer by layer, or none is moved
    drafting: Drafting = "worker"
    batch: int | None = None  # experts in one transfer at most; 0: the device decides; None: the policy decides
    cutoff_layer: int | None = None  # sp-moe: layers to prefetch for; None: worked out from measured times

    def __post_init__(self) -> None:
        _check_choice("misses", self.misses, get_args(Misses))
        _check_choice("drafting", self.drafting, get_args(Drafting))
        if self.batch is not None and self.batch < 0:
            raise ValueError(f"batch must be >= 0, not {self.batch}")


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
    warm_start: bool = True  # in RAM: experts that earlier runs used most are loaded first, and this run's are kept
    governed: bool = False  # the cache goes off while steps are slower with it

    def __post_init__(self) -> None:
        if self.vram_bytes is not None and self.vram_bytes < 0:
            raise ValueError(f"vram_bytes (--vram) must be 0 or more, not {self.vram_bytes}")
        # written so that NaN fails too
        if self.cache_ratio is not None and not 0 <= self.cache_ratio <= 1:
            raise ValueError(
                f"the cache ratio (--cache-ratio) must be from 0 to 1 (1: all experts), not {self.cache_ratio:g}"
            )
        if self.vram_bytes is not None and self.cache_ratio is not None:
            raise ValueError("--vram and --cache-ratio cannot be used together")
        self.policy_config(gamma=0)  # checks the other values
        object.__setattr__(self, "prefill", PrefillPath(self.prefill))

    def policy_config(self, *, gamma: int) -> PolicyConfig:
        """The policy's settings, before anything is measured; gamma: the draft length."""
        return PolicyConfig(
            gamma=gamma,
            cap=self.utility_cap,
            forgetting=self.forgetting,
            ablations=self.ablations,
            cutoff_layer=self.execution.cutoff_layer,
        )

    @property
    def has_size(self) -> bool:
        """Whether the cache was given a size, so that it stays on even where it does not pay."""
        return self.vram_bytes is not None or self.cache_ratio is not None


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f'unknown {name} "{value}"; choose from {", ".join(choices)}')
