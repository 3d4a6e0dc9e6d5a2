"""Tiers of experts, and those in RAM for a model that is larger than it: their memory, and by what experts leave it.

The native cache of the device "ram" loads an absent expert when a computation needs it, in place of the resident one
that the policy expects the least of. Activations are kept between runs: the experts used most are loaded first at the
next start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import InputError, require
from moeedge.hardware.provenance import HEADER_BYTES, file_sha256
from moeedge.llama.context import Context
from moeedge.llama.dense_weights import DenseWeights
from moeedge.llama.model import Model
from moeedge.native.cache import CacheStats, ExpertCache
from moeedge.native.sensor import Sensor
from moeedge.policies.base import CacheShape, Observation, Plan, Policy
from moeedge.run import Level, Notification, Run
from moeedge.scheduler.calibration import measurement_file, parse_measurement, write_measurement
from moeedge.scheduler.disk import read_kept
from moeedge.scheduler.driver import StepDriver
from moeedge.scheduler.native_io import CacheStore, cache_shape
from moeedge.scheduler.slot_memory import SlotMemory
from moeedge.scheduler.stats import PlacementStats, StepRecord
from moeedge.units import format_bytes

_KEPT = 0.5  # of earlier runs' counts at each start: what a user does with a model changes


@dataclass(frozen=True)
class EarlierRuns:
    """Activations of earlier runs, for a warm start."""

    n_tokens: float  # that the counts are of; at each start the earlier ones are halved
    kept_at_s: float  # end of the newest of these runs, in seconds since 1970
    n_first: int  # experts that are loaded first
    file: str


@dataclass(frozen=True, eq=False)
class _Counts:
    """The file's content."""

    SCHEMA: ClassVar[int] = 1

    n_tokens: float
    counts: NDArray[np.float64]  # [n_layers, n_experts]

    def __post_init__(self) -> None:
        require(np.isfinite(self.counts).all() and (self.counts >= 0).all() and self.n_tokens >= 0, "no activations")


@dataclass(eq=False)
class KeptActivations:
    """Counts of one model's experts over all runs on this machine."""

    counts: NDArray[np.float64]  # [n_layers, n_experts], activations; those of earlier runs weigh less
    n_tokens: float  # that they are of
    file: Path | None  # None: there is no cache folder
    kept_at_s: float = 0.0  # end of the newest earlier run, in seconds since 1970
    n_first: int = 0  # experts that this run loaded first

    def __post_init__(self) -> None:
        self._earlier_tokens = self.n_tokens

    @classmethod
    def open(cls, model: Path, n_layers: int, n_experts: int) -> KeptActivations:
        """The counts that earlier runs have kept; zeros where there is nothing, or nothing usable."""
        empty, file = np.zeros((n_layers, n_experts)), None
        try:
            identity = {
                "model": model.name,
                "model_bytes": model.stat().st_size,
                "header": file_sha256(model, HEADER_BYTES),
            }
            file = measurement_file(f"{model.name}-activations", {"activations": _Counts.SCHEMA, **identity})
            earlier = parse_measurement(_Counts, file.read_text(encoding="utf-8"))
            require(earlier.counts.shape == empty.shape, "these are not the activations of this model")
            return cls(earlier.counts * _KEPT, earlier.n_tokens * _KEPT, file, file.stat().st_mtime)
        except (OSError, ValueError):
            return cls(empty, 0.0, file)

    def add(self, observation: Observation) -> None:
        self.counts += observation.counts
        self.n_tokens += observation.n_tokens

    def most_used(self, shape: CacheShape) -> NDArray[np.int32]:
        """The experts that should be resident at the start, the most used first: int32 [n, 2] (layer, expert)."""
        chosen = []
        for layers, capacity in shape.pools():
            counts = self.counts[layers].reshape(-1)
            best = np.argsort(-counts, kind="stable")[:capacity]
            best = best[counts[best] > 0]
            layer, expert = np.divmod(best, shape.n_experts)
            chosen.append(np.stack([counts[best], layers[layer], expert], axis=1))
        rows = np.concatenate([np.zeros((0, 3)), *chosen])
        return rows[np.argsort(-rows[:, 0], kind="stable")][:, 1:].astype(np.int32)

    @property
    def earlier_runs(self) -> EarlierRuns | None:
        """The activations that this run began with; None for the first."""
        if self.file is None or not self._earlier_tokens:
            return None
        return EarlierRuns(self._earlier_tokens / _KEPT, self.kept_at_s, self.n_first, str(self.file))

    def save(self) -> None:
        """Keeps the counts for the next run. Raises OSError where they cannot be written."""
        if self.file is not None and self.n_tokens != self._earlier_tokens:  # something was used
            write_measurement(self.file, _Counts(round(self.n_tokens, 1), np.round(self.counts, 1)))


# slots in one tensor, about: llama.cpp's CPU kernel for experts looks at every one of them in each matrix product
POOL_SLOTS = 512
# whose scores say which expert goes; other systems are defined by what they prefetch or place, which is not done here
POLICIES = ("spac", "lfu", "lru")


def check_policy(name: str) -> None:
    """Raises InputError for a policy that does not order the experts in RAM."""
    if name not in POLICIES:
        raise InputError(
            f"The policy {name} does not decide which experts stay in RAM.",
            f"Choose from: {', '.join(POLICIES)}; or --ram off, so that llama.cpp maps the file.",
        )


def free_for_slots(free_bytes: int, dense: DenseWeights) -> int:
    """Bytes left for slots: the kernel counts dense weights in the page cache as free, which are always in use."""
    return max(0, free_bytes - max(0, dense.host_bytes - max(dense.own_bytes, dense.locked_bytes)))


def describe(cache: ExpertCache, target: Context, policy: str) -> list[str]:
    """Sentences for the user: where the experts are."""
    info, dense, slots = target.model.info, target.model.dense, cache.info.n_slots
    assert dense is not None  # loaded for this
    n_all = info.n_expert_layers * info.n_experts
    experts = f"The experts of {target.model.path.name} ({format_bytes(info.size_bytes)}) are loaded from it as needed,"
    experts += f" into {format_bytes(cache.info.pool_bytes)} of RAM: {slots:,} of {n_all:,} fit ({slots / n_all:.1%}),"
    experts += f" policy {policy}."
    return [Notification(experts, Level.NOTICE), Notification(describe_dense(dense), Level.NOTICE)]


def describe_dense(dense: DenseWeights) -> str:
    """A sentence for the user: where the dense weights in host memory are."""
    where = f"are in the page cache, {format_bytes(dense.locked_bytes)} of them locked"
    if dense.locked_bytes >= dense.host_bytes:
        where = "are locked in memory"
    elif dense.own_bytes >= dense.host_bytes:
        where = "stay in memory; raise ulimit -l to keep them out of swap"
    elif dense.locked_bytes == 0:
        where = "are in the page cache; raise ulimit -l to lock them in memory"
    size = format_bytes(min(dense.n_bytes, dense.host_bytes))  # a GPU has the others
    return f"The {size} of weights that are not experts {where}."


def use_measured_readers(cache: ExpertCache, target: Context, run: Run) -> None:
    """Reads as `calibrate --disk` found best, but not with fewer threads than usual: they also copy what they read."""
    measured = read_kept(target.model.path)
    if measured is not None and not measured.in_memory:
        n_threads = cache.reader().n_threads
        best = measured.best_from(n_threads)  # other pieces may be the best with fewer requests
        n_threads = max(n_threads, best.depth)
        cache.set_readers(n_threads, best.piece_bytes)
        reading = f"{n_threads} threads read experts, in pieces of {format_bytes(best.piece_bytes)}"
        run.note(f"{reading}, as moeedge calibrate --disk found best.")


def warm_start(cache: ExpertCache, target: Context, run: Run) -> KeptActivations:
    """Starts to load the experts that earlier runs used most, after what a prompt needs; the counts of these runs."""
    activations = KeptActivations.open(target.model.path, target.model.info.n_layers, target.model.info.n_experts)
    most_used = activations.most_used(cache_shape(cache))
    CacheStore(cache).push_uploads(most_used)
    activations.n_first = len(most_used)
    if activations.file is None:
        run.note("The use of experts is not saved for the next start: there is no folder for it (MOEEDGE_CACHE).")
    if len(most_used):
        run.note(f"{len(most_used):,} experts that earlier runs used most are loaded first.")
    return activations


class RamStore(CacheStore):
    """Takes the policy's scores in place of its plans: what is used is loaded anyway, and nothing is prefetched."""

    def __init__(self, cache: ExpertCache, policy: Callable[[], Policy]) -> None:
        super().__init__(cache)
        self._policy = policy
        # [n_layers, n_experts], experts that another cache holds: they go first
        self.on_device: NDArray[np.bool_] | None = None

    def push(self, plan: Plan) -> None:
        """Sets by what experts are evicted until the next plan: the policy's scores."""
        score = self._policy().score
        if self.on_device is not None:
            score = np.where(self.on_device, score.min() - 1, score)
        self.cache.set_utilities(score)


class Tier:
    """An expert cache of a context, the policy that fills it, and the figures of both.

    memory: of slots in RAM; None on a device. kept: gets the activations of this run; the manager saves it at its end.
    """

    def __init__(
        self,
        cache: ExpertCache,
        policy: Policy,
        model: Model,
        memory: SlotMemory | None = None,
        kept: KeptActivations | None = None,
    ) -> None:
        self.cache, self.memory, self.kept = cache, memory, kept
        self.store = CacheStore(cache) if memory is None else RamStore(cache, lambda: self.driver.policy)
        self.driver = StepDriver(policy, self.store)
        self.attached = False
        self._n_layers = len(model.host_expert_layers)
        self._n_all = model.info.n_expert_layers * model.info.n_experts
        self._sums = {"steps": 0, "tokens": 0, "schedule_s": 0.0, "plan_s": 0.0, "draft_s": 0.0, "decode_s": 0.0}
        self._start = PlacementStats(**vars(cache.stats()))

    @property
    def active(self) -> bool:
        """Whether experts are computed from its slots in RAM."""
        return self.attached and self.memory is not None and not self.memory.lost

    @property
    def cache_ratio(self) -> float:
        return self.cache.info.n_slots / self._n_all

    def attach(self, sensor: Sensor) -> None:
        if not self.attached:
            self.cache.attach(sensor)
            self.attached = True

    def detach(self) -> None:
        self.cache.detach()
        self.attached = False

    def observe(
        self, observations: Sequence[Observation], tokens: Sequence[int], on_device: NDArray[np.bool_] | None = None
    ) -> None:
        """Shows the policy what was activated, and plans as StepDriver.plan_next; on_device: as that of RamStore."""
        for observation in observations:
            self.driver.observe(observation)
            if self.kept is not None:
                self.kept.add(observation)
        self.driver.plan_next(tokens)
        if isinstance(self.store, RamStore):
            self.store.on_device = on_device

    def add_step(self, record: StepRecord) -> None:
        """Counts a verification or plain decode, without the time of scheduling it."""
        step_s = record.draft_s + record.verify_s + record.observe_s
        self.add(steps=1, tokens=len(record.tokens), draft_s=record.draft_s, decode_s=step_s)

    def time_plan(self, call: Callable[[], object]) -> None:
        """Runs the policy and its plans, in whichever thread, and counts the time."""
        start_s = time.perf_counter()
        call()
        self.add(plan_s=time.perf_counter() - start_s)

    def skip(self, before: CacheStats) -> None:
        """Does not count what the cache has done since `before`."""
        self._start = self._start - (PlacementStats(**vars(before)) - PlacementStats(**vars(self.cache.stats())))

    def add(self, **amounts: float) -> None:
        """Adds to figures of PlacementStats."""
        for name, amount in amounts.items():
            self._sums[name] += amount

    def stats(self, **gauges: Any) -> PlacementStats:
        """All figures since the session began; `gauges` are fields of PlacementStats."""
        info = self.cache.info
        size = {"slots_total": info.n_slots, "pool_bytes": info.pool_bytes, "cache_ratio": self.cache_ratio}
        values = vars(self.cache.stats()) | size | {"n_layers": self._n_layers} | gauges | self._sums
        return PlacementStats(**values) - self._start

    def close(self) -> None:
        """Frees the slots; must come before the context is freed."""
        if self.memory is not None:
            self.memory.close()
        self.cache.detach()
        self.cache.close()
