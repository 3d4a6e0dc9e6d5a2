"""The measurements for MoE-SpAc's balancer (Appendix C.1) on one machine, kept in a file for later runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

from moeedge.hardware.devices import ResolvedDevice
from moeedge.llama.context import Context
from moeedge.llama.settings import ContextSettings
from moeedge.native.abi import DevicePath, PrefillPath
from moeedge.native.cache import ExpertCache
from moeedge.policies.cost_model import CostModel
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.measurement import UNKEPT, measurement_file
from moeedge.scheduler.sizing import emulated_threads

_MARGIN = 0.97  # of the CPU's time, that another path of prefill must beat
_PATH_TEXTS = {
    PrefillPath.CPU: "the CPU computes",
    PrefillPath.RESIDENT: "the device computes the experts that it holds",
    PrefillPath.STREAM: "the device computes all experts",
}


@dataclass(frozen=True)
class Calibration:
    """Figures of one machine, model and device. Times in seconds."""

    SCHEMA: ClassVar[int] = 1
    ALSO_KEPT: ClassVar[tuple[str, ...]] = ("speed", "prefill_path", "device_path")

    units: CostModel | None  # None: the backend recorded no split block
    step_s: dict[int, float]  # by tokens of the batch, with the cache
    plain_step_s: dict[int, float]  # the same without it
    prefill_ts: dict[PrefillPath, float]  # tokens/s by path
    n_tokens: int  # of the batch that a step verifies: the draft length + 1
    seconds: float  # that measuring took
    n_readers: int = 1  # threads that read experts from the model's file
    # a step of n_tokens with the cache, by the way in which the device computes small batches
    device_path_s: dict[DevicePath, float] = field(default_factory=dict)
    from_file: bool = field(default=False, metadata=UNKEPT)  # measured in an earlier run
    kept: bool = field(default=True, metadata=UNKEPT)  # False: the cache folder cannot be written

    @property
    def speed(self) -> float:
        """Speed of a step with the cache over one without; 1 where it was not measured."""
        with_cache, without = self.step_s.get(self.n_tokens), self.plain_step_s.get(self.n_tokens)
        return without / with_cache if with_cache and without else 1.0

    @property
    def device_path(self) -> DevicePath:
        """The fastest way for a device to compute small batches."""
        return min(self.device_path_s, key=lambda path: self.device_path_s[path], default=DevicePath.PAIRS)

    @property
    def pays(self) -> bool:
        return self.speed >= 1

    @property
    def prefill_path(self) -> PrefillPath:
        """The CPU unless another path is clearly faster; then the fastest."""
        best = max(self.prefill_ts, key=lambda path: self.prefill_ts[path], default=PrefillPath.CPU)
        cpu_ts = self.prefill_ts.get(PrefillPath.CPU, 0.0)
        return PrefillPath(best) if self.prefill_ts.get(best, 0.0) * _MARGIN > cpu_ts else PrefillPath.CPU

    def sentence(self, *, emulated: bool, prefill: PrefillPath) -> str:
        """One line for the user; `prefill` is the path in use."""
        when = "Measured before" if self.from_file else f"Measured in {self.seconds:.1f} s"
        parts = []
        if self.units is not None:
            cpu_us, device_us = self.units.cpu_expert_s[1] * 1e6, self.units.device_expert_s[1] * 1e6
            times = f"{cpu_us:.0f} us on the CPU, {device_us:.0f} us on the device"
            parts.append(f"an expert takes {times}, {self.units.transfer_expert_s * 1e6:.0f} us to move")
        step, other = "a step with the cache has", "one without"
        if emulated:
            step, other = "this is emulation on the CPU's own cores:", "plain decoding"
        parts += [f"{step} {self.speed:.2f} times the speed of {other}", f"for prompts {_PATH_TEXTS[prefill]}"]
        if not self.kept:
            parts.append("the result cannot be saved (folder: MOEEDGE_CACHE), so that the next run measures again")
        return f"{when}: {'; '.join(parts)}."


def calibration_file(
    target: Context, cache: ExpertCache, config: PlacementConfig, gamma: int, device: ResolvedDevice
) -> Path:
    """Where a calibration under these conditions is kept. Raises OSError without a cache folder."""
    path, status = target.model.path, target.model.path.stat()
    conditions = {  # everything that the measurement depends on
        "schema": Calibration.SCHEMA,
        "model": path.name,
        "model_bytes": status.st_size,
        "model_mtime_ns": status.st_mtime_ns,
        "device": device.label,
        "threads": target.n_threads,
        "emulated_threads": emulated_threads(device),
        "llama_cpp": version("llama-cpp-python"),
        "beside_gpu": target.model.uses_gpu,
        "whole_layers": target.model.n_whole_layers,
        "device_path": config.device_path,
        "n_slots": cache.info.n_slots,
        "n_stage": cache.info.n_stage,
        "n_ubatch": target.n_ubatch,
        "gamma": gamma,
        "policy": config.policy,
        "cap": config.utility_cap,
        "forgetting": config.forgetting,
        "ablations": sorted(config.ablations),
        **({} if target.settings == ContextSettings() else {"context": repr(target.settings)}),
    }
    return measurement_file(path.name, conditions)
