"""Experts in RAM for a model that is larger than it: how much memory its slots get, and by what experts leave them.

The native cache of the device "ram" loads an absent expert from the model's file when a computation needs it, in place
of the resident one that the policy expects the least of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import InputError
from moeedge.hardware.memory import available_memory, total_memory
from moeedge.llama.context import Context
from moeedge.llama.dense_weights import DenseWeights
from moeedge.native.cache import ExpertCache, ExpertTensor
from moeedge.native.sensor import Sensor
from moeedge.notifications import Level, Notification
from moeedge.policies.base import Observation, Plan, Policy, ScoringPolicy
from moeedge.scheduler.cache_store import CacheStore, cache_shape
from moeedge.scheduler.disk import read_kept
from moeedge.scheduler.driver import StepDriver
from moeedge.scheduler.kept_activations import KeptActivations
from moeedge.scheduler.slot_memory import SlotMemory
from moeedge.scheduler.stats import PlacementStats, StatsRecorder, StepRecord
from moeedge.units import format_bytes

# slots in one tensor, about: llama.cpp's CPU kernel for experts looks at every one of them in each matrix product
_POOL_SLOTS = 512
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
    """Bytes of RAM that are left for slots.

    The kernel counts dense weights in the page cache that are not locked as free, but they are always in use.
    """
    return max(0, free_bytes - max(0, dense.host_bytes - max(dense.own_bytes, dense.locked_bytes)))


def pool_bytes_max(tensors: list[ExpertTensor]) -> int:
    """The largest pool tensor: about `_POOL_SLOTS` slots of the largest matrix."""
    return _POOL_SLOTS * max((tensor.stride for tensor in tensors), default=0)


def describe(cache: ExpertCache, target: Context, policy: str) -> list[str]:
    """Sentences for the user: where the experts are."""
    info = target.model.info
    n_all = info.n_expert_layers * info.n_experts
    slots = cache.info.n_slots
    experts = (
        f"The experts of {target.model.path.name} ({format_bytes(info.size_bytes)}) are loaded from it as needed, "
        f"into {format_bytes(cache.info.pool_bytes)} of RAM: {slots:,} of {n_all:,} fit ({slots / n_all:.1%}), "
        f"policy {policy}."
    )
    dense = target.model.dense
    assert dense is not None  # loaded for this
    return [Notification(experts, Level.NOTICE), Notification(describe_dense(dense), Level.NOTICE)]


def describe_dense(dense: DenseWeights) -> str:
    """A sentence for the user: where the dense weights in host memory are."""
    size = format_bytes(min(dense.n_bytes, dense.host_bytes))  # a GPU has the others
    if dense.locked_bytes >= dense.host_bytes:
        return f"The {size} of weights that are not experts are locked in memory."
    if dense.own_bytes >= dense.host_bytes:
        return f"The {size} of weights that are not experts stay in memory; raise ulimit -l to keep them out of swap."
    if dense.locked_bytes == 0:
        return (
            f"The {size} of weights that are not experts are in the page cache; raise ulimit -l to lock them in memory."
        )
    locked = format_bytes(dense.locked_bytes)
    return f"The {size} of weights that are not experts are in the page cache, {locked} of them locked."


def use_measured_readers(cache: ExpertCache, target: Context, notes: list[str]) -> None:
    """Reads with the requests and pieces that `calibrate --disk` found best on the model's disk, if it was measured.

    Not with fewer threads than without it: they also copy what they have read.
    """
    measured = read_kept(target.model.path)
    if measured is None or measured.in_memory:
        return
    n_threads = cache.reader().n_threads
    best = measured.best_from(n_threads)  # other pieces may be the best with fewer requests
    n_threads = max(n_threads, best.depth)
    cache.set_readers(n_threads, best.piece_bytes)
    notes.append(
        Notification(
            f"{n_threads} threads read experts, in pieces of {format_bytes(best.piece_bytes)}, as moeedge "
            "calibrate --disk found best."
        )
    )


def warm_start(cache: ExpertCache, target: Context, notes: list[str]) -> KeptActivations:
    """Starts to load the experts that earlier runs used most, and returns the counts of these runs.

    What the first prompt needs overtakes them.
    """
    info = target.model.info
    kept = KeptActivations.open(target.model.path, info.n_layers, info.n_experts)
    most_used = kept.most_used(cache_shape(cache))
    CacheStore(cache).push_uploads(most_used)
    kept.n_first = len(most_used)
    if kept.file is None:
        notes.append(
            Notification(
                "The use of experts is not saved for the next start: there is no folder for it (MOEEDGE_CACHE)."
            )
        )
    if len(most_used):
        notes.append(Notification(f"{len(most_used):,} experts that earlier runs used most are loaded first."))
    return kept


def policy_in_ram(name: str) -> str:
    """The policy that orders the experts in RAM next to a device whose experts that policy places."""
    return name if name in POLICIES else "lfu"


class RamStore(CacheStore):
    """Takes the policy's scores in place of its plans: what is used is loaded anyway, and nothing is prefetched.

    on_device: bool [n_layers, n_experts], the experts that another cache holds; they go first.
    """

    def __init__(self, cache: ExpertCache, policy: Callable[[], Policy]) -> None:
        super().__init__(cache)
        self._policy = policy
        self.on_device: NDArray[np.bool_] | None = None

    def push(self, plan: Plan) -> None:
        """Sets by what experts are evicted until the next plan: the policy's scores."""
        policy = self._policy()
        assert isinstance(policy, ScoringPolicy)  # by check_policy
        score = policy.score
        if self.on_device is not None:
            score = np.where(self.on_device, score.min() - 1, score)
        self.cache.set_utilities(score)


class RamTier:
    """The experts in RAM of a context that computes others on a device: what is in neither is loaded from the file.

    memory: of the cache's slots. n_all: experts of the model. kept: get the activations of this run; the manager saves
    them at its end.
    """

    def __init__(
        self, cache: ExpertCache, policy: Policy, memory: SlotMemory, kept: KeptActivations | None, *, n_all: int
    ) -> None:
        self.cache = cache
        self.memory = memory
        self.kept = kept
        self._driver = StepDriver(policy, RamStore(cache, lambda: self._driver.policy))
        self._recorder = StatsRecorder(cache, n_layers=n_all // cache.info.n_experts, n_all=n_all)
        self._attached = False

    @property
    def active(self) -> bool:
        """Whether experts are computed from its slots."""
        return self._attached and not self.memory.lost

    def attach(self, sensor: Sensor) -> None:
        """Lets the sensor's context compute from the slots what no device computes."""
        if not self._attached:
            self.cache.attach(sensor)
            self._attached = True

    def detach(self) -> None:
        """Lets the context compute from the mapped file; the experts stay in their slots."""
        self.cache.detach()
        self._attached = False

    def begin_text(self) -> None:
        """A new conversation begins."""
        self._driver.begin_text()

    def add_step(self, record: StepRecord) -> None:
        """A verification or plain decode, for the figures."""
        self._recorder.add_step(record)

    def observe(self, observations: Sequence[Observation], tokens: Sequence[int], on_device: NDArray[np.bool_]) -> None:
        """Orders the experts by what was activated; those on the device, bool [n_layers, n_experts], come last.

        tokens: known ones of the next batch.
        """
        for observation in observations:
            self._driver.observe(observation)
            if self.kept is not None:
                self.kept.add(observation)
        self._driver.plan_next(tokens)
        assert isinstance(self._driver.store, RamStore)
        self._driver.store.on_device = on_device
        self._driver.push()

    def stats(self) -> PlacementStats:
        """The figures since the session began."""
        return self._recorder.read(
            device="RAM",
            policy=self._driver.policy.name,
            vram_used_bytes=total_memory() - available_memory(),
            vram_total_bytes=total_memory(),
        )

    def close(self) -> None:
        """Frees the slots; must come before the context is freed."""
        self.memory.close()
        self.cache.detach()
        self.cache.close()
