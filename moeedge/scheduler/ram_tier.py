"""Experts in RAM for a model that is larger than it: how much memory its slots get, and by what experts leave them.

The native cache of the device "ram" loads an absent expert from the model's file when a computation needs it, in place
of the resident one that the policy expects the least of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from moeedge.errors import InputError, MoeedgeError
from moeedge.llama.context import Context
from moeedge.llama.dense_weights import DenseWeights, let_experts_read_ahead
from moeedge.native.cache import ExpertCache, ExpertTensor
from moeedge.native.sensor import Sensor
from moeedge.notifications import Level, Notification
from moeedge.policies.base import CacheShape, Observation, Plan, Policy, ScoringPolicy
from moeedge.scheduler.cache_store import CacheStore, cache_shape
from moeedge.scheduler.disk import read_kept
from moeedge.scheduler.driver import StepDriver
from moeedge.scheduler.kept_activations import KeptActivations
from moeedge.scheduler.memory_watch import MemoryWatch
from moeedge.scheduler.stats import PlacementStats, StatsRecorder, StepRecord
from moeedge.units import format_bytes

# slots in one tensor, about: llama.cpp's CPU kernel for experts looks at every one of them in each matrix product
_POOL_SLOTS = 512
# whose scores say which expert goes; other systems are defined by what they prefetch or place, which is not done here
POLICIES = ("spac", "lfu", "lru")
LOST = "Experts can no longer be loaded into RAM: the mapped file is read from here on, which is slow."


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


def slots_of(cache: ExpertCache, n_bytes: int) -> int:
    """The number of slots that take at least so many bytes."""
    _, capacity, expert_bytes = cache.groups()
    return -(-n_bytes * cache.info.n_slots // int((capacity * expert_bytes).sum()))


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
        f"policy {policy}{', repacked for the CPU' if cache.info.n_repacked else ''}."
    )
    dense = target.model.dense
    assert dense is not None  # loaded for this
    return [Notification(experts, Level.NOTICE), Notification(describe_dense(dense), Level.NOTICE)]


def describe_dense(dense: DenseWeights) -> str:
    """A sentence for the user: where the dense weights in host memory are."""
    size = format_bytes(min(dense.n_bytes, dense.host_bytes))  # a GPU has the others
    if dense.locked_bytes >= dense.host_bytes:
        return f"{size} of other weights stay in memory, locked."
    if dense.own_bytes >= dense.host_bytes:
        return f"{size} of other weights stay in memory of their own; raise ulimit -l to keep them out of swap."
    if dense.locked_bytes == 0:
        return f"{size} of other weights are in the page cache; raise ulimit -l to lock them."
    return f"{size} of other weights are in the page cache, {format_bytes(dense.locked_bytes)} of it locked."


def use_mapped_file(model: Path) -> None:
    """Lets faults in the experts' ranges read ahead, where they are computed from the mapped file from here on."""
    with suppress(MoeedgeError):  # a file that is gone
        let_experts_read_ahead(model)


def use_measured_readers(cache: ExpertCache, target: Context, notes: list[str]) -> None:
    """Reads with the requests and pieces that `calibrate --disk` found best on the model's disk, if it was measured.

    Not with fewer threads than without it: they also copy what they have read.
    """
    measured = read_kept(target.model.path)
    if measured is None or measured.in_memory:
        return
    n_threads = max(cache.reader().n_threads, measured.best.depth)
    cache.set_readers(n_threads, measured.best.piece_bytes)
    notes.append(
        Notification(
            f"{n_threads} threads read experts, in pieces of {format_bytes(measured.best.piece_bytes)}, as moeedge "
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
        notes.append(Notification("There is no cache folder: this run's activations are not kept for the next."))
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

    make: a policy for slots of a shape. n_layers: with experts. watch: of the machine's memory; while it is short, the
    cache has fewer slots. kept: get the activations of this run; the manager saves them at its end.
    """

    def __init__(
        self,
        cache: ExpertCache,
        make: Callable[[CacheShape], Policy],
        model: Path,
        n_layers: int,
        watch: MemoryWatch,
        kept: KeptActivations | None,
    ) -> None:
        self.cache = cache
        self._make = make
        self._model = model
        self._n_layers = n_layers
        self._watch = watch
        self.kept = kept
        self._driver = StepDriver(make(cache_shape(cache)), RamStore(cache, lambda: self._driver.policy))
        self._recorder = StatsRecorder(cache.stats())
        self._n_slots_opened = cache.info.n_slots
        self._attached = False
        self._lost = False
        self._warned_unknown = False

    @property
    def active(self) -> bool:
        """Whether experts are computed from its slots."""
        return self._attached and not self._lost and self.cache.info.n_slots > 0

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

    def forget_order(self) -> None:
        """Lets the expert go first that was used longest ago, where nothing is observed any more."""
        self._driver.discard()
        self.cache.set_utilities(np.zeros((self.cache.info.n_layers, self.cache.info.n_experts), dtype=np.float32))

    def check(self, *, in_decode: bool) -> list[Notification]:
        """Gives slots back where memory runs short, or takes them again; returns what to notify of.

        in_decode: slots are given back one by one. Otherwise no decode may run.
        """
        if not self.active:
            return []
        found = []
        self._lost, n_unknown = self.cache.trouble()
        if self._lost:
            use_mapped_file(self._model)
            return [Notification(LOST, Level.WARNING)]
        if n_unknown and not self._warned_unknown:
            self._warned_unknown = True
            text = "Some blocks of experts, which moeedge does not understand, are computed from the mapped file: slow."
            found.append(Notification(text, Level.WARNING))
        before = self.cache.info.n_slots
        missing_bytes = self._watch.missing_bytes()
        # memory of slots is taken as experts arrive: those that hold nothing give nothing back
        n_taken = self.cache.stats().slots_used
        if missing_bytes:
            n_left = n_taken - slots_of(self.cache, missing_bytes)
            if in_decode or n_left >= self._n_layers:
                self.cache.limit(min(before, max(n_left, self._n_layers)))
            else:
                self.resize(0)
        elif before < self._n_slots_opened:
            n_spare = slots_of(self.cache, self._watch.take_spare_bytes())
            if n_spare and n_taken + n_spare > before:
                self.cache.limit(min(n_taken + n_spare, self._n_slots_opened))
        now = self.cache.info.n_slots
        free = format_bytes(self._watch.free_bytes)
        if now < before:
            effect = f"have shrunk from {before:,} to {now:,}" if now else "are given up: the mapped file is read"
            text = f"Only {free} of memory are free: the slots for experts in RAM {effect} from here on."
            found.append(Notification(text, Level.WARNING))
        elif now > before:
            text = (
                f"{free} of memory are free again: the slots for experts in RAM have grown from {before:,} to {now:,}."
            )
            found.append(Notification(text, Level.NOTICE))
        return found

    def resize(self, n_slots: int) -> None:
        """Opens the cache again with about so many slots, empty; caches that read from it must be told."""
        n_all = self._n_layers * self.cache.info.n_experts
        self.cache.resize(n_slots / n_all if n_slots >= self._n_layers else 0.0)
        if not self.cache.info.n_slots:
            use_mapped_file(self._model)
        self._n_slots_opened = self.cache.info.n_slots
        shape = cache_shape(self.cache)
        self._driver.use(self._make(shape))
        if self.kept is not None:
            CacheStore(self.cache).push_uploads(self.kept.most_used(shape))

    def stats(self, *, n_all: int) -> PlacementStats:
        """The figures since the session began; n_all: experts of the model."""
        info = self.cache.info
        memory = psutil.virtual_memory()
        return self._recorder.read(
            self.cache.stats(),
            device="RAM",
            policy=self._driver.policy.name,
            cache_ratio=info.n_slots / n_all,
            slots_total=info.n_slots,
            pool_bytes=info.pool_bytes,
            vram_used_bytes=memory.total - memory.available,
            vram_total_bytes=memory.total,
        )

    def close(self) -> None:
        """Frees the slots; must come before the context is freed."""
        self.cache.detach()
        self.cache.close()
