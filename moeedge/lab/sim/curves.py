"""Hits over uploads: every policy at many limits of traffic, with the error that another choice of texts would make.

Each policy goes through the same batches once for each limit, which it is told (`PolicyConfig.max_uploads`) and which
holds it (`PolicyReplay`). What it reaches "with at most u uploads" is its best point at or left of u, since one that is
told of more may use less. Limits above twice what a policy uses without one are left out: they would rarely bind it.

Errors come from a bootstrap over texts; policies are compared on the same resamples, so that what makes a text hard for
all of them cancels out. The points that are compared are chosen once, on all texts. Texts are taken as independent,
though policies carry what they learned from one to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product, starmap
from multiprocessing import get_context
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import require
from moeedge.lab.sim.replay import (
    ReplayArm,
    ReplayConfig,
    ReplayInput,
    ReplaySetting,
    lacks_predictor,
    replay_arms,
    setting_of,
)
from moeedge.lab.traces.schedule import Schedule
from moeedge.policies.registry import BOUNDS, TABLE
from moeedge.records import filled
from moeedge.run import NO_PROGRESS, Progress

PAIR_BOUNDS = ("oracle",)  # curves are of pairs; belady bounds distinct experts
LIMITS: tuple[float, ...] = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # uploads per layer and step
REFERENCE = "lfu"
RESAMPLES = 2000
_INTERVAL = (2.5, 97.5)  # percentiles
_TEXTS_MIN = 8  # fewer texts are resampled in blocks
_BLOCK_STEPS = 4
_BINDING = 2.0  # times the uploads without a limit
_ROUNDING = 1e-6  # uploads per layer and step

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Estimate:
    """A figure and the interval that 95 % of the resamples are in."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class CurvePoint:
    """One policy, or a bound, at one limit."""

    policy: str
    max_uploads: float | None  # told and held; None: no limit
    uploads_per_layer_step: float
    hit_rate_pairs: Estimate
    pairs_hit: IntArray  # by unit
    uploads: IntArray  # by unit


@dataclass(frozen=True)
class AtMost:
    """What a policy reaches with at most so many uploads per layer and step."""

    policy: str
    uploads: float | None  # None: with any
    hit_rate_pairs: Estimate
    beyond_reference: Estimate | None  # hit rate above the reference policy's with at most as many; None: not known
    max_uploads: float | None  # the limit that its best point was told of


@dataclass(frozen=True, kw_only=True, eq=False)
class CurvePanel(ReplaySetting):
    """All policies on one schedule."""

    trace: str
    texts: str
    n_texts: int
    unit: str  # of the bootstrap: "text", or "4 steps"
    apart: tuple[str, ...]  # policies whose predictors have no input here: by their caches alone, not to be ranked
    pairs: IntArray  # by unit
    points: tuple[CurvePoint, ...]
    at_most: tuple[AtMost, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the sums of each text."""
        row = asdict(self)
        for holder in (row, *row["points"]):
            holder |= {name: value.tolist() for name, value in holder.items() if isinstance(value, np.ndarray)}
        return row | (row.pop("provenance") or {})


Sums = tuple[float | None, IntArray]  # a limit, and pairs hit and uploads by unit, [n_units, 2]


def trace_curves(
    inputs: Sequence[ReplayInput],
    config: ReplayConfig,
    limits: Sequence[float] = LIMITS,
    *,
    n_processes: int = 1,
    progress: Progress = NO_PROGRESS,
) -> list[CurvePanel]:
    """A panel for each input and cache ratio.

    limits: of uploads per layer and step; "unlimited" is always added. progress: of a task whose unit is a policy of a
    panel. The result does not depend on `n_processes`. Raises ValueError for an unknown policy.
    """
    is_valid = limits and all(limit >= 0 for limit in limits)
    require(is_valid, "the limits must be at least one number >= 0 of uploads per layer and step")
    names = (*config.policies, *PAIR_BOUNDS)
    panels = list(product(inputs, config.ratios))
    tasks = list(product(range(len(panels)), names))
    tasks.sort(key=lambda task: -panels[task[0]][0].schedule.n_steps)  # the longest first
    found = {}
    with ExitStack() as stack:
        replayed = partial(_replayed, panels, config, limits)
        runs: Iterable[list[Sums]] = starmap(replayed, tasks)
        if n_processes > 1:
            pool = ProcessPoolExecutor(n_processes, get_context("spawn"), initializer=_keep, initargs=(replayed,))
            runs = stack.enter_context(pool).map(_run_kept, tasks)
        for task, sums in zip(tasks, runs, strict=True):
            found[task] = sums
            progress.add()
    return [
        _panel(*panel, config, limits, {name: found[index, name] for name in names})
        for index, panel in enumerate(panels)
    ]


_kept: Callable[[int, str], list[Sums]]  # in a process of the pool: with what all tasks share, sent once


def _keep(replayed: Callable[[int, str], list[Sums]]) -> None:
    global _kept
    _kept = replayed


def _run_kept(task: tuple[int, str]) -> list[Sums]:
    return _kept(*task)


def bootstrap_weights(n_units: int, n_resamples: int, seed: int) -> FloatArray:
    """How often each unit occurs in each resample, [n_resamples, n_units]."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(n_units, np.full(n_units, 1.0 / n_units), n_resamples).astype(np.float64)


def _replayed(
    panels: Sequence[tuple[ReplayInput, float]],
    config: ReplayConfig,
    limits: Sequence[float],
    index: int,
    policy: str,
) -> list[Sums]:
    """One policy of a panel at the limits that could bind it, then without one.

    Bounds, policies whose traffic cannot be limited and those that are not ranked have no limits.
    """
    given, ratio = panels[index]
    unit_of = _units(given.schedule)[0]

    def sums_at(limits: Sequence[float | None]) -> list[Sums]:
        arms = [ReplayArm(policy, ratio, limit) for limit in limits]
        found = replay_arms(given, arms, config) if arms else []
        by_batch = [np.diff(stats.until, axis=0, prepend=0) for stats in found]
        return [(limit, _by_unit(each, unit_of)) for limit, each in zip(limits, by_batch, strict=True)]

    unlimited = sums_at([None])
    used = float(unlimited[0][1][:, 1].sum()) / _layer_steps(given.schedule)
    is_limited = policy not in BOUNDS and not TABLE[policy].make.execution_model.device_only
    if not is_limited or lacks_predictor(policy, config.accuracy):
        return unlimited
    return sums_at([limit for limit in limits if limit <= _BINDING * used]) + unlimited


def _layer_steps(schedule: Schedule) -> int:
    return schedule.n_steps * len(schedule.trace.expert_layers())


def _units(schedule: Schedule) -> tuple[IntArray, str]:
    """The unit of the bootstrap that each batch belongs to, int64 [n_batches], and what a unit is."""
    text = np.cumsum(schedule.is_first) - 1
    if schedule.n_texts >= _TEXTS_MIN:
        return text, "text"
    step = np.cumsum(~schedule.prefill) - 1
    return np.maximum(step, 0) // _BLOCK_STEPS, f"{_BLOCK_STEPS} steps"


def _by_unit(by_batch: NDArray[Any], unit_of: IntArray) -> IntArray:
    """Sums of values [n_batches, ...]."""
    sums = np.zeros((int(unit_of[-1]) + 1, *by_batch.shape[1:]), dtype=np.int64)
    np.add.at(sums, unit_of, by_batch.astype(np.int64))
    return sums


def _panel(
    given: ReplayInput,
    ratio: float,
    config: ReplayConfig,
    limits: Sequence[float],
    found: dict[str, list[Sums]],
) -> CurvePanel:
    schedule = given.schedule
    unit_of, unit = _units(schedule)
    by_batch = [0 if batch.prefill else int(batch.counts.sum()) for batch in schedule.batches()]
    pairs = _by_unit(np.array(by_batch), unit_of)
    weights = bootstrap_weights(pairs.size, RESAMPLES, config.seed)
    resampled_pairs = np.maximum(weights @ pairs, 1.0)
    resampled: list[FloatArray] = []  # hit rates of each point
    points: list[CurvePoint] = []
    for policy, arms in found.items():
        for limit, sums in arms:
            pairs_hit, uploads = sums.T
            resampled.append(weights @ pairs_hit / resampled_pairs)
            rate = _estimate(int(pairs_hit.sum()) / max(int(pairs.sum()), 1), resampled[-1])
            used = round(int(uploads.sum()) / _layer_steps(schedule), 6)
            points.append(CurvePoint(policy, limit, used, rate, pairs_hit, uploads))
    return filled(
        CurvePanel,
        *(given, config, schedule),
        **setting_of(given, ratio),
        cache_ratio=ratio,
        unit=unit,
        apart=tuple(name for name in config.policies if lacks_predictor(name, config.accuracy)),
        pairs=pairs,
        points=tuple(points),
        at_most=tuple(_at_most(points, resampled, limits)),
    )


def _at_most(points: Sequence[CurvePoint], resampled: Sequence[FloatArray], limits: Sequence[float]) -> list[AtMost]:
    """For every policy and limit the best of its points that use no more; none where all of them use more."""
    found = []
    for limit in (*limits, None):
        best: dict[str, int] = {}  # of each policy, among the points
        for index, point in enumerate(points):
            if limit is not None and point.uploads_per_layer_step > limit + _ROUNDING:
                continue
            before = best.get(point.policy)
            if before is None or point.hit_rate_pairs.value > points[before].hit_rate_pairs.value:
                best[point.policy] = index
        reference = best.get(REFERENCE)
        for policy, index in best.items():
            beyond = None
            if reference is not None:
                value = points[index].hit_rate_pairs.value - points[reference].hit_rate_pairs.value
                beyond = _estimate(value, resampled[index] - resampled[reference])
            found.append(AtMost(policy, limit, points[index].hit_rate_pairs, beyond, points[index].max_uploads))
    return found


def _estimate(value: float, resampled: FloatArray) -> Estimate:
    low, high = np.percentile(resampled, _INTERVAL)
    return Estimate(round(value, 6), round(float(low), 6), round(float(high), 6))
