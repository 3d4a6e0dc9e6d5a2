"""Groups of options that become the engine's configurations, and the models that -m and -md name.

A command takes a group as one parameter; `flatten` shows its fields to Typer as options. Nothing here loads llama.cpp
before `EngineOptions.config` is called, so that limit_openmp_spin can come first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from moeedge import paths
from moeedge.cli import options
from moeedge.cli.common import memory_size
from moeedge.cli.model_files import ModelFiles, resolve_models, tell
from moeedge.engine.types import ALL_ON_CPU, DEFAULT_GAMMA, DraftWord, EngineConfig
from moeedge.errors import InputError, MoeedgeError
from moeedge.hardware.spec import EMULATED, RPC_SCHEME, DeviceSpec
from moeedge.hub.local import locate
from moeedge.hub.names import all_parts

if TYPE_CHECKING:  # what needs NumPy is imported where it is used: --help does not wait for it
    from moeedge.scheduler.config import PlacementConfig

_SPIN_COUNT = "1000"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The models and the hardware they run on."""

    model: Path | None = None
    model_draft: str | None = None
    draft_max: options.DraftLength = None
    draft_p_min: float = 0.0
    ctx_size: int = 0
    threads: int = 0
    n_gpu_layers: int | None = None
    n_cpu_moe: int | None = None
    cpu_moe: bool = False
    device: str = "auto"
    backend: list[str] | None = None  # loaded by native.attach
    hf_token: str | None = None  # in the environment from here on, and so is the next
    offline: bool = False

    def limit_openmp_spin(self, *, emulate_bundled: bool = False, ram: str = "off") -> None:
        """As the function of that name. emulate_bundled: auto may mean the emulated device for the bundled model.

        ram: the value of --ram.
        """
        bundled = self.model is None or paths.is_bundled(self.model)
        reads_experts = ram not in ("auto", "off") or (ram == "auto" and not bundled and self._exceeds_memory())
        limit_openmp_spin(self.device, may_emulate=emulate_bundled and bundled, reads_experts=reads_experts)

    def _exceeds_memory(self) -> bool:
        """Whether the model's file does not fit what is free."""
        from moeedge.hardware.memory import fits

        try:
            path = locate(str(self.model)).path
            return not fits(sum(path.with_name(part).stat().st_size for part in all_parts(path.name)))
        except (MoeedgeError, OSError, ValueError):  # `config` says what is wrong
            return False

    def config(
        self,
        placement: PlacementConfig | None = None,
        *,
        emulate_bundled: bool = False,
        context_shift: bool = False,
        files: ModelFiles | None = None,
        default_draft: Literal["auto"] | None = None,
        auto_gamma: bool | None = None,
    ) -> EngineConfig:
        """The engine's configuration, its device and models checked.

        files: where -m and -md are resolved already. default_draft: the value of -md where it is not given. auto_gamma:
        whether drafts are as long as pays, unless --draft-max is given; None: those of heads and n-grams that nobody
        asked for.
        """
        from moeedge.scheduler.config import PlacementConfig

        check_device(self.device)
        files = files or resolve_models(self.model, self.model_draft or default_draft, download=True)
        gamma = None if self.draft_max is None else parse_draft_length(self.draft_max)
        if auto_gamma is None:
            auto_gamma = self.model_draft is None and files.draft in get_args(DraftWord)
        if gamma is None and auto_gamma and files.draft_max > 0:
            gamma = "auto"
        elif gamma is None and files.draft_max != DEFAULT_GAMMA:
            tell(f"The catalog suggests {files.draft_max} tokens per draft for it; --draft-max overrides this.")
        return EngineConfig(
            model=files.target,
            draft=files.draft,
            n_ctx=self.ctx_size,
            n_threads=self.threads,
            gamma=files.draft_max if gamma is None else max(files.draft_max, 1) if gamma == "auto" else gamma,
            auto_gamma=gamma == "auto",
            draft_p_min=self.draft_p_min,
            n_gpu_layers=0 if self.device == "none" else self.n_gpu_layers,
            n_cpu_moe=self._n_cpu_moe(),
            device=self.device,
            emulate_bundled=emulate_bundled,
            placement=placement or PlacementConfig(),
            context_shift=context_shift,
        )

    @property
    def fixed_draft_max(self) -> int | None:
        """--draft-max where no model runs; raises InputError for auto."""
        gamma = None if self.draft_max is None else parse_draft_length(self.draft_max)
        if gamma == "auto":
            raise InputError("--draft-max auto measures steps, and no model runs here.", "Give a number.")
        return gamma

    def _n_cpu_moe(self) -> int | None:
        if self.cpu_moe and self.n_cpu_moe is not None:
            raise InputError("--cpu-moe and --n-cpu-moe cannot be used together.", "Leave out one of them.")
        return ALL_ON_CPU if self.cpu_moe else self.n_cpu_moe


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """Which experts the device holds, and who decides."""

    vram: str | None = None
    cache_ratio: float | None = None
    policy: str = "spac"
    ablate: list[str] = field(default_factory=list)
    utility_cap: int = 4
    forgetting: float = 0.1
    prefill_path: str = "auto"
    no_calibrate: bool = False
    no_warm_start: bool = False

    def config(self, *, measure_anew: bool = False) -> PlacementConfig:
        """The scheduler's configuration. Raises InputError and ValueError for values that it cannot have."""
        from moeedge.native.abi import PrefillPath
        from moeedge.policies.registry import POLICIES
        from moeedge.scheduler.config import PlacementConfig

        if self.policy not in POLICIES:
            raise InputError(f"Unknown policy {self.policy!r}.", f"Choose from: {', '.join(POLICIES)}.")
        return PlacementConfig(
            vram_bytes=None if self.vram is None else memory_size(self.vram, "--vram"),
            cache_ratio=self.cache_ratio,
            policy=self.policy,
            ablations=options.ablations(self.ablate),
            utility_cap=self.utility_cap,
            forgetting=self.forgetting,
            prefill=PrefillPath(self.prefill_path),
            calibrate=not self.no_calibrate,
            measure_anew=measure_anew,
            warm_start=not self.no_warm_start,
        )


def parse_ram(text: str) -> int | Literal["auto", "off"]:
    """The value of --ram. Raises InputError for a malformed size, and for one without a unit."""
    return text if text in ("auto", "off") else memory_size(text, "--ram")  # type: ignore[return-value]


def parse_draft_length(text: str) -> int | Literal["auto"]:
    """The value of --draft-max. Raises InputError."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        what = f"--draft-max takes a number of tokens or auto, not '{text}'."
        raise InputError(what, "Write for instance --draft-max 4; 0 switches drafts off.") from None


def check_device(text: str) -> None:
    """Raises DeviceError for a malformed device, or one that this machine does not have; the hint names the known."""
    spec = DeviceSpec.parse(text)
    if spec.kind != "name":
        return
    from moeedge.hardware.devices import check_known
    from moeedge.llama import library

    library.start()
    check_known(spec)


def limit_openmp_spin(device: str, *, may_emulate: bool = False, reads_experts: bool = False) -> None:
    """Makes idle OpenMP threads yield their core soon where other threads work at the same time.

    These are the emulated device, a worker, which may run on this machine, or those that read experts from the file
    (reads_experts). GOMP_SPINCOUNT is read when llama_cpp is loaded, so this must come before. may_emulate: auto may
    turn out to be the emulated device.
    """
    if device.startswith((EMULATED, RPC_SCHEME)) or (may_emulate and device == "auto") or reads_experts:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)


def layer_notes(config: EngineConfig) -> list[str]:
    """A sentence where -ngl, -ncmoe or --cpu-moe has no effect."""
    given = ["-ngl"] if config.n_gpu_layers else []
    if config.n_cpu_moe is not None:
        given.append("--cpu-moe" if config.n_cpu_moe == ALL_ON_CPU else "-ncmoe")
    if not given:
        return []
    from moeedge import native
    from moeedge.llama import library

    library.start()  # llama.cpp logs while it lists devices
    if any(device.kind in ("GPU", "IGPU") for device in native.devices()):
        return []
    verb = "has" if len(given) == 1 else "have"
    return [f"llama.cpp lists no GPU here: {' and '.join(given)} {verb} no effect."]
