"""The tiers of a session's experts, fastest first: slots on a device, slots in RAM, each filled by a policy of its own.

The CPU computes what no tier holds from the weights in host memory, or from the mapped file. These are no tier: they
have no slots, policy or figures, so that such an element would only add empty methods.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import MoeedgeError
from moeedge.hardware import devices, rpc
from moeedge.hardware.devices import ResolvedDevice, host_memory
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.native.cache import CacheStats, ExpertCache
from moeedge.native.sensor import Sensor
from moeedge.policies.base import CacheShape, Observation, Plan, Policy
from moeedge.run import Level, Notification
from moeedge.scheduler.driver import StepDriver
from moeedge.scheduler.native_io import CacheStore, cache_shape
from moeedge.scheduler.ram_tier import KeptActivations
from moeedge.scheduler.sizing import reserve_bytes
from moeedge.scheduler.slot_memory import MemoryWatch, SlotMemory, slots_of
from moeedge.scheduler.stats import PlacementStats, StepRecord, TierState
from moeedge.units import format_bytes

MakePolicy = Callable[[CacheShape], Policy]


class Tier:
    """An expert cache of a context, the policy that fills it, the figures of both, and what has become of it.

    make: the policy for slots. device: the policy uploads experts to it; None: RAM, where an absent expert is loaded
    when it is needed, for the resident one that the policy expects least of. watched: slots on the device are given
    back where its memory runs short. slots: gives slots in RAM back. kept: gets the activations of this run; None: they
    are not kept. lost: experts can no longer be computed from the slots.
    """

    def __init__(
        self,
        cache: ExpertCache,
        make: MakePolicy,
        model: Model,
        *,
        device: ResolvedDevice | None = None,
        watched: bool = False,
        slots: SlotMemory | None = None,
        kept: KeptActivations | None = None,
    ) -> None:
        self.label = "RAM" if device is None else device.label
        self.is_device = device is not None
        self.place = "in RAM" if device is None else device.place
        self.cache, self.device, self.slots, self.kept = cache, device, slots, kept
        self.attached = self.lost = self._has_fallen_back = self._warned_unknown = False
        self.watch: MemoryWatch | None = None
        if device is not None and watched:
            self.watch = MemoryWatch(reserve_bytes(device, device.total_bytes), partial(devices.read_memory, device))
        self._make = make
        self._n_layers = len(model.host_expert_layers)
        self._n_all = model.info.n_expert_layers * model.info.n_experts
        self._n_slots_opened = cache.info.n_slots
        self._sums = {"steps": 0, "tokens": 0, "schedule_s": 0.0, "plan_s": 0.0, "draft_s": 0.0, "decode_s": 0.0}
        self._start = PlacementStats(**vars(cache.stats()))
        # [n_layers, n_experts], experts that a faster tier holds; None: there is none in use
        self.held_above: NDArray[np.bool_] | None = None
        self.store = CacheStore(cache) if device is not None else RamStore(self)
        self.driver = StepDriver(make(cache_shape(cache)), self.store)

    @property
    def state(self) -> TierState:
        if self._has_fallen_back:
            return "fallen back"
        if self.lost:
            return "lost"
        return "shrunk" if self.cache.info.n_slots < self._n_slots_opened else "whole"

    @property
    def usable(self) -> bool:
        """Whether it can be planned for: it works and has slots."""
        return self.state in ("whole", "shrunk") and self.cache.info.n_slots > 0

    @property
    def active(self) -> bool:
        """Whether it is planned for: it is attached, too."""
        return self.attached and self.usable

    @property
    def cache_ratio(self) -> float:
        return self.cache.info.n_slots / self._n_all

    def use(self, make: MakePolicy) -> None:
        """Goes on with a fresh policy of that kind; no decode may run."""
        self._make = make
        self.driver.use(make(cache_shape(self.cache)))

    def attach(self, sensor: Sensor) -> None:
        if not self.attached:
            self.cache.attach(sensor)
            self.attached = True

    def detach(self) -> None:
        self.cache.detach()
        self.attached = False

    def fall_back(self) -> None:
        """The context that it served has failed, and a device with it; figures remain."""
        self._has_fallen_back, self.driver.pending = True, None
        self.attached, self.lost = False, self.lost or self.is_device

    def follow(self, target: Context) -> None:
        """Lets the context in the failed one's place compute from slots in RAM, as an LRU: no policy observes it."""
        if not self.is_device and target.sensor is not None:
            self.cache.detach()
            self.cache.set_utilities(np.zeros((self.cache.info.n_layers, self.cache.info.n_experts), dtype=np.float32))
            self.cache.attach(target.sensor)

    def observe(
        self, observations: Sequence[Observation], tokens: Sequence[int], held_above: NDArray[np.bool_] | None = None
    ) -> None:
        """Shows the policy what was activated, and plans as StepDriver.plan_next."""
        for observation in observations:
            if self.kept is not None:
                self.kept.add(observation)
            self.driver.observe(observation)
        self.driver.plan_next(tokens)
        self.held_above = held_above

    # memory and trouble

    def check(self) -> list[Notification]:
        """What has happened to slots in RAM; once that the device is lost, or blocks of this model not understood."""
        if self.slots is not None:
            notifications = self.slots.check()
            self.lost = self.slots.lost
            return notifications
        (lost, n_unknown), texts = self.cache.trouble(), list[str]()
        if lost and not self.lost:
            self.lost, self.driver.pending = True, None
            if self.device is not None and self.device.kind == "rpc":
                rpc.mark_lost(self.device.endpoint)
            texts.append(f"The device {self.label} is lost: the CPU computes all experts from here on.")
        if n_unknown and not self._warned_unknown and self.active:
            self._warned_unknown = True
            text = "The CPU computes some layers' experts although the device holds them: moeedge does not recognise"
            texts.append(f"{text} how these layers compute, or the device cannot compute them or has no memory for it.")
        return [Notification(text, Level.WARNING) for text in texts]

    def give_back(self, *, streams_prompts: bool) -> list[Notification]:
        """Gives a device's slots back where memory is short; no decode may run. streams_prompts: prompts need them."""
        before = self.cache.info.n_slots
        if self.watch is None or self.lost or not before or not (missing_bytes := self.watch.missing_bytes()):
            return []
        self.resize(before - slots_of(self.cache, missing_bytes))  # staging slots stay
        now, free = self.cache.info.n_slots, format_bytes(self.watch.free_bytes)
        if now == before:
            return []
        off = "is off: the CPU computes all experts from here on"
        effect = f"now holds {now:,} experts instead of {before:,}" if now else off
        text = f"{self.label} has only {free} of free memory left: the expert cache {effect}."
        if not now and streams_prompts:  # the context was made for it
            text += " Prompts are slower, too, until the next start."
        return [Notification(text, Level.WARNING)]

    def resize(self, n_slots: int) -> None:
        """Opens the cache again, empty, with about so many slots (none below one per layer); no decode may run."""
        n_experts = self._n_layers * self.cache.info.n_experts
        self.cache.resize(n_slots / n_experts if n_slots >= self._n_layers else 0.0)
        self.use(self._make)

    def memory(self) -> tuple[int, int] | None:
        """Used and total bytes of the entire device, or of this machine; None where unknown."""
        if self.lost:
            return None
        with suppress(MoeedgeError):  # a driver that stopped answering must not end an answer
            info = self.cache.info
            if self.device is None:
                reading: devices.VramReading | None = host_memory()
            else:
                filled_bytes = info.pool_bytes * self.cache.stats().slots_used // max(1, info.n_slots)
                reading = devices.read_memory(self.device, pool_bytes=info.pool_bytes, filled_bytes=filled_bytes)
            return None if reading is None else (reading.used_bytes, reading.total_bytes)
        return None

    # figures

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
        """All figures since the session began; `gauges` are further fields of PlacementStats."""
        info, (used_bytes, total_bytes) = self.cache.info, self.memory() or (None, None)
        values = {
            **vars(self.cache.stats()),
            **{"device": self.label, "policy": self.driver.policy.name, "lost": self.lost},
            **{"is_device": self.is_device, "place": self.place, "state": self.state},
            **{"slots_total": info.n_slots, "pool_bytes": info.pool_bytes, "cache_ratio": self.cache_ratio},
            **{"n_layers": self._n_layers, "vram_used_bytes": used_bytes, "vram_total_bytes": total_bytes},
            "lookahead": self.driver.policy.lookahead if self.is_device else None,  # nothing is uploaded ahead
        }
        return PlacementStats(**values | gauges | self._sums) - self._start

    # end

    def stop(self) -> None:
        """Ends what changes the slots by itself; `check` then returns what is left."""
        if self.slots is not None:
            self.slots.close()

    def save(self) -> list[Notification]:
        """Keeps what the next run begins with."""
        try:
            if self.kept is not None:
                self.kept.save()
        except OSError as error:  # a full disk costs the next run its warm start
            return [Notification(f"The use of experts is not saved for the next start: {error.strerror}.")]
        return []

    def close(self) -> None:
        """Frees the slots; must come before the context is freed."""
        self.stop()
        self.cache.detach()
        self.cache.close()


class RamStore(CacheStore):
    """Takes the policy's scores in place of its plans: what is used is loaded anyway, and nothing is prefetched."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier.cache)
        self._tier = tier

    def push(self, plan: Plan) -> None:
        """Sets by what experts are evicted until the next plan: the policy's scores; those held above go first."""
        score, held_above = self._tier.driver.policy.score, self._tier.held_above
        if held_above is not None:
            score = np.where(held_above, score.min() - 1, score)
        self.cache.set_utilities(score)
