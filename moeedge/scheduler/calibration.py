"""Measurements of a machine, kept for later runs: one JSON file for each model and set of conditions.

It holds a dataclass with SCHEMA, its version: the fields that are not UNKEPT, and the properties that ALSO_KEPT names.
`Calibration` has those for MoE-SpAc's balancer (Appendix C.1).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from enum import IntEnum
from glob import escape
from importlib.metadata import version
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from moeedge import paths
from moeedge.errors import require
from moeedge.hardware.devices import ResolvedDevice
from moeedge.llama.context import Context
from moeedge.llama.settings import ContextSettings
from moeedge.native.abi import DevicePath, PrefillPath
from moeedge.native.cache import ExpertCache
from moeedge.policies.cost_model import CostModel
from moeedge.records import plain
from moeedge.run import Decision, Level
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.sizing import emulated_threads
from moeedge.schemas import read_json

UNKEPT = {"kept": False}  # metadata of a field that tells of this run
_DIGITS = 16  # hexadecimal, of the conditions
Kept = TypeVar("Kept")
_Measured = TypeVar("_Measured", bound="Measurement")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What is measured once under some conditions, decides something, and is kept for later runs."""

    seconds: float  # that measuring took
    kept_from: str = field(default="", compare=False, metadata=UNKEPT)  # date of an earlier run; empty: this one's
    kept: bool = field(default=True, compare=False, metadata=UNKEPT)  # False: the cache folder cannot be written

    @property
    def when(self) -> str:
        """The basis of its decisions."""
        return f"measured {self.kept_from or f'in {self.seconds:.{int(self.seconds < 10)}f} s'}"

    @property
    def level(self) -> Level:
        """How much a decision asks for attention."""
        return Level.INFO if self.kept else Level.WARNING

    @property
    def again(self) -> str:
        """A clause where it will be measured again."""
        return "" if self.kept else "measured again in the next run: it cannot be saved (folder: MOEEDGE_CACHE)"

    def decided(self, decision: Decision) -> Decision:
        """The decision with its basis, and whether that will be measured again."""
        return replace(decision, basis=self.when, why="; ".join(filter(None, [decision.why, self.again])))


def keep(measured: _Measured, find_file: Callable[[], Path]) -> _Measured:
    """Keeps a measurement for later runs in the file; returns it with what became of that."""
    try:
        write_measurement(find_file(), measured)
    except OSError:
        return replace(measured, kept=False)
    return measured


def measurement_file(name: str, conditions: dict[str, Any]) -> Path:
    """Where a measurement of a model is kept under conditions that it depends on. Raises OSError without a folder."""
    digest = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()
    return paths.measurement_dir() / f"{name}-{digest[:_DIGITS]}.json"


def measurement_files(name: str) -> list[Path]:
    """All files that `measurement_file` named so, oldest first. Raises OSError without a cache folder."""
    files = paths.measurement_dir().glob(f"{escape(name)}-{'[0-9a-f]' * _DIGITS}.json")
    return sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name))


def read_measurement(kind: type[_Measured], find_file: Callable[[], Path]) -> _Measured | None:
    """The measurement that an earlier run kept in the file; None where there is none, or nothing usable."""
    with suppress(OSError, ValueError):
        measured = parse_measurement(kind, (file := find_file()).read_text(encoding="utf-8"))
        return replace(measured, kept_from=date.fromtimestamp(file.stat().st_mtime).isoformat())
    return None


def write_measurement(file: Path, measured: Any) -> None:
    """Replaces the file at once: another process may read it. Raises OSError where it cannot be written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with paths.replace_file(file) as new_file:
        new_file.write_text(measurement_json(measured), encoding="utf-8")


def measurement_json(measured: Any) -> str:
    return json.dumps(kept_fields(measured), indent=1)


def kept_fields(value: Any) -> Any:
    """A measurement, or a part of one, as JSON has it; members of an IntEnum by their names."""
    if dataclasses.is_dataclass(value):
        names = [*_kept_names(value), *getattr(value, "ALSO_KEPT", ())]
        entries = {name: kept_fields(getattr(value, name)) for name in names}
        return entries | {"schema": value.SCHEMA} if hasattr(value, "SCHEMA") else entries
    if isinstance(value, dict):
        return {kept_fields(key): kept_fields(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [kept_fields(each) for each in value]
    if isinstance(value, IntEnum):
        return value.name.lower()
    return value.tolist() if isinstance(value, np.ndarray) else plain(value)


def parse_measurement(kind: type[Kept], text: str) -> Kept:
    """Reads what `write_measurement` wrote of such a dataclass. Raises ValueError for anything else."""
    try:
        measured: Kept = _parsed(kind, read_json(text))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no such measurement: {error}") from None
    return measured


def _kept_names(kind: Any) -> list[str]:
    return [each.name for each in dataclasses.fields(kind) if each.metadata != UNKEPT]


def _parsed(kind: Any, value: Any) -> Any:
    """The inverse of `kept_fields`, by the type; fields that the file lacks have their defaults."""
    make, origin, inner = kind, get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        types = get_type_hints(kind)
        require(value.get("schema") == getattr(kind, "SCHEMA", None), "this measurement is of another version")
        values = {name: _parsed(types[name], value[name]) for name in _kept_names(kind) if name in value}
        return make(**values)
    if origin is UnionType:
        return None if value is None else _parsed(inner[0], value)
    if origin is dict:
        return {_parsed(inner[0], key): _parsed(inner[1], each) for key, each in value.items()}
    if origin is tuple:
        return tuple(_parsed(inner[0], each) for each in value)
    if origin is np.ndarray:
        return np.array(value, dtype=np.float64)
    if isinstance(kind, type):
        return make[value.upper()] if issubclass(kind, IntEnum) else make(value)
    return value  # a Literal


_MARGIN = 0.97  # of the CPU's time, that another path of prefill must beat
_PATH_TEXTS: dict[Any, str] = {
    PrefillPath.CPU: "cpu (no experts on the device)",
    PrefillPath.RESIDENT: "resident (those experts on the device that it holds)",
    PrefillPath.STREAM: "stream (all experts on the device)",
    DevicePath.PAIRS: "pairs (a product for each token and expert)",
    DevicePath.COLUMNS: "columns (a product for all tokens)",
    DevicePath.AHEAD: "ahead (before the CPU knows the experts)",
}


@dataclass(frozen=True, kw_only=True)
class Calibration(Measurement):
    """Figures of one machine, model and device. Times in seconds."""

    SCHEMA: ClassVar[int] = 1
    ALSO_KEPT: ClassVar[tuple[str, ...]] = ("speed", "prefill_path", "device_path")

    units: CostModel | None  # None: the backend recorded no split block
    step_s: dict[int, float]  # by tokens of the batch, with the cache
    plain_step_s: dict[int, float]  # the same without it
    prefill_ts: dict[PrefillPath, float]  # tokens/s by path
    n_tokens: int  # of the batch that a step verifies: the draft length + 1
    n_readers: int = 1  # threads that read experts from the model's file
    # a step of n_tokens with the cache, by the way in which the device computes small batches
    device_path_s: dict[DevicePath, float] = field(default_factory=dict)

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

    @property
    def times(self) -> str:
        """A sentence on an expert's times; empty without any."""
        if self.units is None:
            return ""
        cpu_us, device_us = self.units.cpu_expert_s[1] * 1e6, self.units.device_expert_s[1] * 1e6
        where = f"{cpu_us:.0f} us on the CPU, {device_us:.0f} us on the device"
        return f"An expert takes {where}, {self.units.transfer_expert_s * 1e6:.0f} us to move."

    def cache_decision(self, *, is_on: bool, emulated: bool, kept: str) -> Decision:
        """Whether the cache is in use from the start. kept: why, where it does not pay."""
        why = "this is emulation on the CPU's own cores (-dev none: without)" if emulated else ""
        if not self.pays and not emulated:
            hint = "--cache-ratio R or --vram SIZE keeps it on, moeedge calibrate measures again"
            why = kept if is_on else hint
        return self.decided(Decision.switch("expert cache", is_on, self.speed, "", why))

    def path_decisions(
        self, prefill: PrefillPath = PrefillPath.AUTO, device: DevicePath | None = None, *, forced: str = ""
    ) -> Iterator[Decision]:
        """How the device computes small batches, and prompts: as `prefill` and `device` say, else the fastest way.

        forced: why `prefill` is as it is, where no user gave it.
        """
        device_speeds = {path: 1 / seconds for path, seconds in self.device_path_s.items()}
        asked_prefill, given = None if prefill is PrefillPath.AUTO else prefill, "given by the user"
        paths: tuple[tuple[str, Any, str, Any, dict[Any, float]], ...] = (
            ("device path", device, given, self.device_path, device_speeds),
            ("prefill path", asked_prefill, forced or given, self.prefill_path, self.prefill_ts),
        )
        for what, asked, known, best, speeds in paths:
            path, basis = (best, "not compared") if asked is None else (asked, known)
            others, gain, over, why = [each for each in speeds if each != path], None, "", ""
            if others and path in speeds:
                other = max(others, key=lambda each: speeds[each])
                gain, over = speeds[path] / speeds[other], _PATH_TEXTS[other].split()[0]
                if asked is None:
                    basis, why = self.when, "" if gain >= 1 else f"another must be {1 / _MARGIN - 1:.0%} faster"
            yield Decision(what, _PATH_TEXTS[path], gain, over, basis, why)


UNMEASURED = Calibration(units=None, step_s={}, plain_step_s={}, prefill_ts={}, n_tokens=0, seconds=0.0)


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
