"""The warm-up that MoE-SpAc's balancer needs (Appendix C.1), on the real model with the real cache, kept in a file.

What is measured: computing an expert on the CPU and on the device by tokens per expert, moving one, drafting a token,
the shares r_c and r_g of the policy's utilities, whole steps with and without the cache, and prompts by each path.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, cast

from moeedge import paths
from moeedge.llama.context import Context
from moeedge.native.cache import ExpertCache
from moeedge.notifications import Notification, Notify
from moeedge.paths import replace_file
from moeedge.policies.base import CacheShape, PolicyConfig
from moeedge.policies.cost_model import CostModel
from moeedge.policies.registry import make_policy
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.microbench import CONTEXT_MIN, measure

SCHEMA = 1
PathName = Literal["cpu", "resident", "stream"]
_MARGIN = 0.97  # of the CPU's time, that another path of prefill must beat


@dataclass(frozen=True)
class Calibration:
    """What one machine, model and device gave. Times in seconds."""

    units: CostModel | None  # None: the backend recorded no split block
    step_s: dict[int, float]  # by tokens of the batch, with the cache
    plain_step_s: dict[int, float]  # the same without it
    prefill_ts: dict[str, float]  # tokens/s by path
    n_tokens: int  # of the batch that a step verifies: the draft length + 1
    seconds: float  # that measuring took
    from_file: bool = False  # measured in an earlier run
    kept: bool = True  # False: the cache folder cannot be written

    @property
    def speed(self) -> float:
        """Speed of a step with the cache over one without; 1 where nothing was measured."""
        with_cache, without = self.step_s.get(self.n_tokens), self.plain_step_s.get(self.n_tokens)
        return without / with_cache if with_cache and without else 1.0

    @property
    def pays(self) -> bool:
        """Whether the cache makes steps faster."""
        return self.speed >= 1

    @property
    def prefill_path(self) -> PathName:
        """The fastest; as without a cache unless another one is clearly faster."""
        plain_ts = self.prefill_ts.get("cpu", 0.0)
        best = max(self.prefill_ts, key=lambda name: self.prefill_ts[name], default="cpu")
        return cast(PathName, best) if self.prefill_ts.get(best, 0.0) * _MARGIN > plain_ts else "cpu"

    def sentence(self, *, emulated: bool, prefill: PathName) -> str:
        """One line for the user; `prefill` is the path in use."""
        when = "Measured before" if self.from_file else f"Measured in {self.seconds:.1f} s"
        parts = []
        if self.units is not None:
            cpu_s, device_s = self.units.cpu_expert_s[1], self.units.device_expert_s[1]
            parts.append(
                f"an expert takes {cpu_s * 1e6:.0f} us on the CPU, {device_s * 1e6:.0f} us on the device, "
                f"{self.units.transfer_expert_s * 1e6:.0f} us to move"
            )
        if emulated:
            parts.append(
                f"this is emulation on the CPU's own cores: {self.speed:.2f} times the speed of plain decoding"
            )
        else:
            parts.append(f"a step with the cache has {self.speed:.2f} times the speed of one without")
        paths_said = {"cpu": "on the CPU", "resident": "resident experts on the device", "stream": "on the device"}
        parts.append(f"prompts run {paths_said[prefill]}")
        if not self.kept:
            parts.append("the cache folder cannot be written, so that the next run measures again")
        return f"{when}: {'; '.join(parts)}."

    def to_json(self) -> str:
        """One JSON object that `from_json` reads."""
        fields = asdict(self) | {
            "schema": SCHEMA,
            "units": None,
            "speed": self.speed,
            "prefill_path": self.prefill_path,
        }
        del fields["from_file"], fields["kept"]
        if self.units is not None:
            fields["units"] = json.loads(self.units.to_json())
        return json.dumps(fields, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Reads what `to_json` wrote. Raises ValueError for anything else."""
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields["schema"] != SCHEMA:
                raise ValueError("this calibration is of another version")
            units = fields["units"]
            return cls(
                units=None if units is None else CostModel.from_json(json.dumps(units)),
                step_s={int(n): float(value) for n, value in fields["step_s"].items()},
                plain_step_s={int(n): float(value) for n, value in fields["plain_step_s"].items()},
                prefill_ts={str(name): float(value) for name, value in fields["prefill_ts"].items()},
                n_tokens=int(fields["n_tokens"]),
                seconds=float(fields["seconds"]),
                from_file=True,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no calibration: {error}") from None


def calibrate(
    target: Context,
    draft: Context | None,
    cache: ExpertCache,
    shape: CacheShape,
    requested: PlacementConfig,
    settings: PolicyConfig,
    *,
    device_label: str,
    emulated_threads: int,
    notify: Notify,
) -> Calibration | None:
    """What an earlier run measured under the same conditions, or else a new measurement, kept for the next run.

    None where nothing is kept and measuring was switched off (wish.calibrate). Leaves KV caches and slots empty.
    """
    conditions = _conditions(target, cache, requested, settings, device_label, emulated_threads)
    if not requested.measure_anew:
        with suppress(OSError, ValueError):
            return Calibration.from_json(_file(conditions).read_text(encoding="utf-8"))
    if not requested.calibrate or target.n_ctx < CONTEXT_MIN:
        return None
    notify(Notification(f"Measuring experts on the CPU and on {device_label}; this takes a while, once."))
    policy = make_policy(requested.policy, shape, settings)
    measured = measure(target, draft, cache, policy, cap=requested.utility_cap, n_verified=settings.gamma + 1)
    if measured is None:
        return None
    calibration = Calibration(
        units=measured.units,
        step_s=measured.step_s,
        plain_step_s=measured.plain_step_s,
        prefill_ts=measured.prefill_ts,
        n_tokens=measured.n_verified,
        seconds=measured.seconds,
    )
    try:
        _write(_file(conditions), calibration.to_json())
    except OSError:
        return replace(calibration, kept=False)
    return calibration


def _conditions(
    target: Context,
    cache: ExpertCache,
    requested: PlacementConfig,
    settings: PolicyConfig,
    device_label: str,
    emulated_threads: int,
) -> dict[str, Any]:
    """Everything that the measurement depends on."""
    path = target.model.path
    status = path.stat()
    return {
        "schema": SCHEMA,
        "model": path.name,
        "model_bytes": status.st_size,
        "model_mtime_ns": status.st_mtime_ns,
        "device": device_label,
        "threads": target.n_threads,
        "emulated_threads": emulated_threads,
        "llama_cpp": version("llama-cpp-python"),
        "beside_gpu": target.model.uses_gpu,
        "n_slots": cache.info.n_slots,
        "n_stage": cache.info.n_stage,
        "n_ubatch": target.n_ubatch,
        "gamma": settings.gamma,
        "policy": requested.policy,
        "cap": requested.utility_cap,
        "forgetting": requested.forgetting,
        "ablations": sorted(requested.ablations),
    }


def _file(conditions: dict[str, Any]) -> Path:
    """Where it is kept. Raises OSError where the cache folder can be neither found nor made."""
    digest = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()
    return paths.cache_dir() / "calibration" / f"{conditions['model']}-{digest[:16]}.json"


def _write(file: Path, text: str) -> None:
    """Whole or not at all: another session may read it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(file) as beside:
        beside.write_text(text, encoding="utf-8")
