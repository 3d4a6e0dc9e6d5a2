"""The division of a GPU's memory between whole layers and the expert cache, kept for later starts.

llama.cpp's --n-cpu-moe N keeps the experts of the first N layers in host memory and has the others on the GPU with
their layers: such whole layers cost no transfer of activations between GPU and CPU, but hold rarely used experts too.
The cache serves the first N layers with the rest of the memory. engine/layer_search.py measures the fastest division.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from moeedge import __version__
from moeedge.engine.types import ALL_ON_CPU, EngineConfig
from moeedge.errors import require
from moeedge.hardware.devices import ResolvedDevice
from moeedge.hardware.host import default_reserve
from moeedge.run import Decision
from moeedge.scheduler.calibration import Measurement, measurement_file, read_measurement

_MORE_MEMORY = 1.1  # times what was free: other divisions are possible


@dataclass(frozen=True)
class LayerSplit:
    """One division of the GPU's memory, and its speed."""

    n_whole: int  # layers whose experts are on the GPU, the last ones of the model
    n_cpu_moe: int  # the same as llama.cpp's --n-cpu-moe
    n_slots: int  # of the cache for the others; 0: none
    step_s: float  # mean seconds of a step of an answer, drafting included
    n_ubatch: int = 0  # tokens per graph; 0: the configuration's
    op_offload: bool = True

    def __str__(self) -> str:
        text = f"{self.n_whole} entire layers {'with' if self.n_slots else 'without'} a cache"
        return f"{text}, {self.n_ubatch:,} tokens per graph" if self.n_ubatch else text

    def apply(self, config: EngineConfig) -> EngineConfig:
        placement = config.placement
        if not self.n_slots:
            placement = replace(placement, vram_bytes=None, cache_ratio=0.0)
        return replace(
            config,
            n_cpu_moe=self.n_cpu_moe if self.n_whole else ALL_ON_CPU,
            n_ubatch=self.n_ubatch or config.n_ubatch,
            op_offload=self.op_offload,
            layers_measured=True,
            placement=placement,
        )


@dataclass(frozen=True, kw_only=True)
class LayerChoice(Measurement):
    """The divisions that were measured on one machine with one model. Raises ValueError without any."""

    SCHEMA: ClassVar[int] = 2

    device: str  # ggml's name
    n_layers: int  # with experts
    splits: tuple[LayerSplit, ...]  # at least one
    free_bytes: int  # of the device before anything was loaded

    def __post_init__(self) -> None:
        require(self.splits, "this measurement has no division")

    @property
    def best(self) -> LayerSplit:
        return min(self.splits, key=lambda split: split.step_s)

    @property
    def whole_only(self) -> LayerSplit | None:
        """The most whole layers without a cache, as with llama.cpp's --n-cpu-moe; None if it was not measured."""
        return max((split for split in self.splits if not split.n_slots), key=lambda split: split.n_whole, default=None)

    @property
    def decision(self) -> Decision:
        """What was chosen, compared with llama.cpp's division; where it is that, with the best one with a cache."""
        best, stock = self.best, self.whole_only
        cached = min((split for split in self.splits if split.n_slots), key=lambda split: split.step_s, default=None)
        why = "entire layers without a cache did not fit or could not be measured" if stock is None else ""
        chosen = f"{best.n_whole} of {self.n_layers}{f' and {best.n_slots:,} experts' if best.n_slots else ''}"
        gain, over, other = None, "", cached if best is stock else stock
        if other is not None:
            gain = other.step_s / best.step_s
            over = f"{other.n_whole} and {other.n_slots:,}" if other.n_slots else f"--n-cpu-moe {other.n_cpu_moe}"
        return self.decided(Decision(f"layers on {self.device}", chosen, gain, over, why=why))

    def suits(self, device: ResolvedDevice) -> bool:
        """Whether the device has about as much free memory as when this was measured."""
        spare = default_reserve(device.total_bytes) // 2
        most = max(self.free_bytes * _MORE_MEMORY, self.free_bytes + spare)
        return self.free_bytes - spare <= device.free_bytes <= most


def choice_file(config: EngineConfig, device: ResolvedDevice) -> Path:
    """Where the choice for this model, device and configuration is kept. Raises OSError without a cache folder."""
    placement = config.placement
    names = ("vram_bytes", "prefill", "device_path", "policy", "utility_cap", "forgetting")
    conditions = session_conditions(config, device) | {
        "schema": LayerChoice.SCHEMA,
        **{name: getattr(config, name) for name in ("n_ctx", "n_parallel", "n_batch", "n_ubatch")},
        **{name: getattr(placement, name) for name in names},
        "ablations": sorted(placement.ablations),
        "execution": asdict(placement.execution),
    }
    return measurement_file(f"{config.model.name}-layers", conditions)


def session_conditions(config: EngineConfig, device: ResolvedDevice) -> dict[str, Any]:
    """Programs, models and settings on which any speed of a session depends."""
    usual = EngineConfig(model=config.model)
    names = ("context", "draft_type_k", "draft_type_v", "load")  # llama.cpp's own settings
    changed = {name: repr(value) for name in names if (value := getattr(config, name)) != getattr(usual, name)}
    return {
        "moeedge": __version__,
        "llama_cpp": version("llama-cpp-python"),
        "models": [_identity(path) for path in (config.model, config.draft) if path is not None],
        "device": device.label,
        "threads": config.n_threads,
        "gamma": (config.gamma, config.auto_gamma),
        "n_gpu_layers": config.n_gpu_layers,
        **changed,
    }


def _identity(path: Path | str) -> list[Any]:
    """Tells a model's file from others, without reading it; a word such as "ngram" is itself."""
    return [path] if isinstance(path, str) else [path.name, path.stat().st_size, path.stat().st_mtime_ns]


def read_choice(config: EngineConfig, device: ResolvedDevice) -> LayerChoice | None:
    """The choice of an earlier run under the same conditions; None without one."""
    choice = read_measurement(LayerChoice, partial(choice_file, config, device))
    return choice if choice is not None and choice.suits(device) else None


@contextmanager
def mark(split: LayerSplit, config: EngineConfig, device: ResolvedDevice) -> Iterator[None]:
    """Keeps a file while `split` is measured, for later processes: CUDA ends this one where memory runs out."""
    with suppress(OSError):  # without a cache folder
        file = _mark_file(split, config, device)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    try:
        yield
    finally:
        with suppress(OSError):
            _mark_file(split, config, device).unlink(missing_ok=True)


def is_marked(split: LayerSplit, config: EngineConfig, device: ResolvedDevice) -> bool:
    """Whether a process has ended while it measured `split`; such a division is left out."""
    with suppress(OSError):
        return _mark_file(split, config, device).exists()
    return False


def _mark_file(split: LayerSplit, config: EngineConfig, device: ResolvedDevice) -> Path:
    file = choice_file(config, device)
    cache = "cache" if split.n_slots else "no-cache"
    return file.with_name(f"{file.stem}-{split.n_whole}-{cache}-{split.n_ubatch}.measuring")
