"""Experts in RAM of a model that is larger than it: what is free for them, what they begin with, what the user is told.

Activations are kept between runs: the experts used most are loaded first at the next start.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import InputError, require
from moeedge.hardware.provenance import HEADER_BYTES, file_sha256
from moeedge.llama.context import Context
from moeedge.llama.dense_weights import DenseWeights
from moeedge.native.cache import ExpertCache
from moeedge.policies.base import CacheShape, Observation
from moeedge.run import Decision, Level, Run
from moeedge.scheduler.calibration import UNKEPT, measurement_file, parse_measurement, write_measurement
from moeedge.scheduler.disk import read_kept
from moeedge.scheduler.native_io import CacheStore, cache_shape
from moeedge.units import format_bytes

_KEPT = 0.5  # of earlier runs' counts at each start: what a user does with a model changes


@dataclass(frozen=True)
class EarlierRuns:
    """Activations of earlier runs, for a warm start."""

    n_tokens: float  # that the counts are of; at each start the earlier ones are halved
    kept_at_s: float  # end of the newest of these runs, in seconds since 1970
    n_first: int  # experts that are loaded first
    file: str


@dataclass(eq=False)
class KeptActivations:
    """Counts of one model's experts over all runs on this machine."""

    SCHEMA: ClassVar[int] = 1

    counts: NDArray[np.float64]  # [n_layers, n_experts], activations; those of earlier runs weigh less
    n_tokens: float  # that they are of
    file: Path | None = field(default=None, metadata=UNKEPT)  # None: there is no cache folder
    kept_at_s: float = field(default=0.0, metadata=UNKEPT)  # end of the newest earlier run, in seconds since 1970
    n_first: int = field(default=0, metadata=UNKEPT)  # experts that this run loaded first

    def __post_init__(self) -> None:
        require(np.isfinite(self.counts).all() and (self.counts >= 0).all() and self.n_tokens >= 0, "no activations")
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
            file = measurement_file(f"{model.name}-activations", {"activations": cls.SCHEMA, **identity})
            earlier = parse_measurement(cls, file.read_text(encoding="utf-8"))
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
            rounded = replace(self, counts=np.round(self.counts, 1), n_tokens=round(self.n_tokens, 1))
            write_measurement(self.file, rounded)


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


def describe(cache: ExpertCache, target: Context, policy: str, run: Run) -> None:
    """Tells the user where the experts and the other weights are."""
    info, dense, slots = target.model.info, target.model.dense, cache.info.n_slots
    assert dense is not None  # loaded for this
    n_all = info.n_expert_layers * info.n_experts
    experts = f"The experts of {target.model.path.name} ({format_bytes(info.size_bytes)}) are loaded from it as needed,"
    experts += f" into {format_bytes(cache.info.pool_bytes)} of RAM: {slots:,} of {n_all:,} fit ({slots / n_all:.1%}),"
    experts += f" policy {policy}."
    run.note(experts, Level.NOTICE)
    run.note(describe_dense(dense), Level.NOTICE)


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
    measured, n_threads = read_kept(target.model.path), cache.reader().n_threads
    why = "moeedge calibrate --disk measures the best" if measured is None else "the file system is in memory"
    decision = Decision("disk reads", f"{n_threads} at a time", why=why)
    if measured is not None and not measured.in_memory:
        best = measured.best_from(n_threads)  # other pieces may be the best with fewer requests
        cache.set_readers(max(n_threads, best.depth), best.piece_bytes)
        decision = measured.decision(n_threads)
    run.note(decision.sentence())


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
