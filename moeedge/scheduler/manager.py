"""Placement of a session's experts: observes what the target activates, plans, pushes the plans to the cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import BackendError, MoeedgeError
from moeedge.experts import Residency
from moeedge.hardware import devices, rpc
from moeedge.hardware.devices import ResolvedDevice
from moeedge.hardware.host import available_memory, total_memory
from moeedge.llama.context import Context
from moeedge.native import ActivationCapture
from moeedge.native.sensor import Counts
from moeedge.policies.base import CacheShape, ExpertPrediction, Observation, Policy
from moeedge.run import Level, Run
from moeedge.scheduler.cache_governor import CacheGovernor
from moeedge.scheduler.calibration import Calibration
from moeedge.scheduler.config import ExecutionConfig, PlacementConfig
from moeedge.scheduler.native_io import RoutingReader, cache_shape
from moeedge.scheduler.on_demand import LayerHook, OnDemandLoader, predicted_uploads
from moeedge.scheduler.planning_thread import PlanningThread
from moeedge.scheduler.prediction import DraftPrefetch, DraftRouterPredictor, NextGatePredictor
from moeedge.scheduler.ram_tier import EarlierRuns, Tier
from moeedge.scheduler.sizing import reserve_bytes
from moeedge.scheduler.slot_memory import MemoryWatch, slots_of
from moeedge.scheduler.stats import PlacementStats, StepRecord
from moeedge.units import format_bytes

_IN_FLIGHT_TIMEOUT_S = 5.0  # more than the experts under way take on any link


class PlacementManager:
    """Places the experts of a tier, or of one on a device and one in RAM; it frees them in `close`.

    A step of speculative.py calls before_verification and after_verification. The policy and its plans run in a thread
    of their own, unless the decoding thread asks the policy in between, before each layer or after each draft token.
    """

    def __init__(
        self,
        tier: Tier,
        config: PlacementConfig,
        device: ResolvedDevice,
        target: Context,
        remake_policy: Callable[[CacheShape], Policy],  # for other slots
        *,
        gate_predictor: NextGatePredictor | None = None,  # for a policy that plans within a verification
        draft_predictor: DraftRouterPredictor | None = None,  # for one that plans while the draft model works
        router_scores: ActivationCapture | None = None,  # of the routers' probabilities, for a policy that reads them
        keeps_hidden_states: bool = False,  # whether the policy reads the draft's
        ram: Tier | None = None,  # experts that are not on the device
    ) -> None:
        assert target.sensor is not None  # opening.py checks it
        execution = config.execution
        self.cache, self.driver = tier.cache, tier.driver
        self.device, self.ram, self._tier = device.label, ram, tier
        self._tiers = [tier] if ram is None else [tier, ram]
        self.memory, self._kept = self._tiers[-1].memory, self._tiers[-1].kept  # of slots in RAM; None: there are none
        self.run = Run()  # reports warnings, e.g. of a lost device; may be replaced
        # a measurement that waits for the end of an answer: returns its result, and whether the cache stays
        self.postponed: Callable[[Run], tuple[Calibration, bool]] | None = None
        self._device, self._sensor, self._op_offload = device, target.sensor, target.op_offload
        self._cached_layers = list(target.model.host_expert_layers)
        self._keeps_hidden_states = keeps_hidden_states
        self._remake_policy = remake_policy
        # when memory of the device runs short, the cache gets fewer slots, unless the user gave its size
        watched = device.kind == "gpu" and not config.has_size
        self._watch = MemoryWatch(device, reserve_bytes(device, device.total_bytes)) if watched else None
        # the CPU can compute all experts as well, and no other system is imitated
        governed = config.governed and device.kind != "ram" and ram is None and execution == ExecutionConfig()
        self.governor = CacheGovernor() if governed else None  # decides whether steps are computed with the cache
        self._reader = RoutingReader(target.sensor, router_scores)
        self.on_demand = OnDemandLoader(tier.cache) if execution.misses == "load" else None
        vanilla = execution.drafting == "vanilla"
        if self.on_demand is not None or vanilla:
            self.driver.filter_plan = partial(predicted_uploads, cache_shape(tier.cache), self.on_demand)
        hook = LayerHook(self.driver, lambda: self.active, gate_predictor, self.on_demand)
        self.layer_hook = hook if self.on_demand is not None or self.driver.plans_layers else None
        self._predictors = [each for each in (draft_predictor, gate_predictor) if each is not None]
        self.draft_prefetch: DraftPrefetch | None = None
        if draft_predictor is not None:
            plan, wait = self._plan_draft, tier.cache.drain
            self.draft_prefetch = DraftPrefetch(draft_predictor, plan, wait, self._prefetching, vanilla)
        self._planning = PlanningThread(overlaps=self.layer_hook is None and self.draft_prefetch is None)
        self._n_texts = 1  # of a step
        self._in_step = False  # or at a prompt
        self._lost = self._warned_unknown = False
        self.attach()

    @property
    def policy(self) -> Policy:
        return self.driver.policy

    @property
    def cache_ratio(self) -> float:
        return self._tier.cache_ratio

    @property
    def active(self) -> bool:
        """Whether plans are made: attached, the device not lost, and slots to plan for."""
        return self._tier.attached and not self._lost and self.cache.info.n_slots > 0

    @property
    def lost(self) -> bool:
        """Whether experts can no longer be computed from the cache's slots."""
        return self.memory.lost if self.memory is not None and self.ram is None else self._lost

    @property
    def loads_on_demand(self) -> bool:
        """Whether absent experts are loaded from the file into RAM, so that none is computed from the mapped file."""
        return self.ram.active if self.ram is not None else self._device.kind == "ram" and self.active

    @property
    def loading_wait_s(self) -> float:
        """How long computations have waited for experts from the file so far; 0.0 with experts on a device."""
        return self.cache.waited_s() if self._device.kind == "ram" and self._tier.attached else 0.0

    @property
    def reads_draft(self) -> bool:
        """Whether experts are predicted from what the draft model computes."""
        return self._keeps_hidden_states or self.draft_prefetch is not None

    @property
    def wants_hidden_states(self) -> bool:
        """Whether the draft is to keep its hidden states for the next plan; a change of mind may take one more step."""
        return self._keeps_hidden_states and self._n_texts == 1 and self.active and self.driver.reads_drafts

    def _prefetching(self) -> DraftPrefetch | None:
        """The prefetch of experts while a draft is made; for several texts the draft predicts none."""
        return self.draft_prefetch if self._n_texts == 1 and self.active else None

    @property
    def earlier_runs(self) -> EarlierRuns | None:
        """The activations of earlier runs, for a warm start in RAM; None without any."""
        return self._kept.earlier_runs if self._kept is not None else None

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """The cache is free for a measurement, which is not counted."""
        self.detach()
        before = self.cache.stats()
        try:
            yield
        finally:
            self._tier.skip(before)
            self.attach()

    def use(self, remake_policy: Callable[[CacheShape], Policy]) -> None:
        """Goes on with a fresh policy of that kind; no decode may run."""
        self.wait()
        self._remake_policy = remake_policy
        self.driver.use(remake_policy(cache_shape(self.cache)))

    def begin_text(self) -> None:
        self.wait()
        for tier in self._tiers:
            tier.driver.begin_text()
        if self.governor is not None:
            self.governor.begin_text()

    def attach(self) -> None:
        """Lets the target compute with the cache."""
        if not self._tier.attached:
            for tier in self._tiers:
                tier.attach(self._sensor)
            if self.ram is not None:
                self.cache.read_from(self.ram.cache)
            self._reader.skip()

    def detach(self) -> None:
        """Lets the target compute as without a cache; the experts on the device stay there."""
        if self._tier.attached:
            try:
                self.wait()
            finally:
                for tier in self._tiers:
                    tier.detach()

    def lose_device(self, *, context_usable: bool) -> None:
        """Ends placement because the device failed, which the cache leaves if `context_usable`; figures remain."""
        self._stop_planning()
        if context_usable:
            self.detach()
        self._tier.attached = False

    def make_room(self, n_bytes: int) -> None:
        """Gives slots in RAM back, so that so much memory can be allocated."""
        if self.memory is not None:
            self.memory.make_room(n_bytes)
            self.watch_memory()

    def follow(self, target: Context) -> None:
        """Lets the context that took the lost one's place compute from the slots in RAM, which evict as an LRU."""
        if self.memory is not None and target.sensor is not None:
            cache = self.memory.cache
            cache.detach()
            cache.set_utilities(np.zeros((cache.info.n_layers, cache.info.n_experts), dtype=np.float32))
            cache.attach(target.sensor)

    def share(self, n_texts: int) -> None:
        """The next steps verify `n_texts` texts."""
        self._n_texts = n_texts

    # one step, in the order of the calls

    def begin_prompt(self) -> None:
        """A prompt comes. Where llama.cpp does not compute large batches on a GPU by itself, the cache does."""
        if self.governor is not None and not self._op_offload and not self._lost:
            self.attach()

    def begin_answer(self) -> None:
        if self.governor is not None:
            self.governor.begin_answer()

    @property
    def in_trial(self) -> bool:
        return self.governor is not None and self.governor.choice.is_trial

    def begin_step(self) -> None:
        """Attaches the cache, or detaches it, as the governor decides."""
        if self.governor is None or self._lost or not self.cache.info.n_slots:
            return
        if self.governor.choice.on:
            self.attach()
        elif self._tier.attached:
            self.drain_transfers(0.0)  # what is under way would slow down the steps without it
            self.detach()

    def end_step(self, n_tokens: int, seconds: float) -> None:
        """The step after `begin_step` verified `n_tokens` of one text in `seconds`, drafting included."""
        if self.governor is None or self._lost or not self.cache.info.n_slots:
            return
        paid = self.governor.choice.pays
        self.governor.observe(n_tokens, seconds)
        choice = self.governor.choice
        if choice.pays != paid and choice.gain is not None:
            text = f"on again: a step takes {choice.gain:.2f} times as long without it."
            if not choice.pays:
                text = f"off for now: a step takes {1 / choice.gain:.2f} times as long with it. "
                text += "It is tried again from time to time."
            self.run.report(f"The expert cache is {text}", Level.NOTICE)

    def on_draft_token(self, tokens: Sequence[int]) -> None:
        """The draft has decoded the last of `tokens`: experts that are predicted by now move while it works on."""
        prefetch = self._prefetching()
        if prefetch is not None:
            start_s = time.perf_counter()
            self._in_step = True
            prefetch.on_token(tokens)
            self._add_schedule(start_s)

    def before_verification(self, tokens: Sequence[int], hidden_states: NDArray[np.float32] | None = None) -> None:
        """Plans for the batch that is verified next; hidden_states: the draft's, float32 [n_states, n_embd]."""
        # a single token is planned for after the verification before
        if not self.active or len(tokens) < 2 or not (self.draft_prefetch or self.driver.reads_drafts):
            return
        start_s, prefetch = time.perf_counter(), self._prefetching()
        self._in_step = True
        if prefetch is not None:
            prefetch.end_batch(tokens)
        else:
            self._do(partial(self._plan_draft, tokens, hidden_states=hidden_states))
        self._add_schedule(start_s)

    def after_verification(
        self, counts: Counts, batch: Sequence[int], record: StepRecord, order: NDArray[np.intp] | None = None
    ) -> None:
        """Shows the policy the activations of `batch`, plans for the next one and starts the transfers.

        counts: uint32 [n_layers, n_experts]. batch: a prompt if record.n_verified is 0. Of the next batch the last of
        record.tokens is known, the target's own. order: of several texts (`share`), the places in the batch, those that
        became text first; of the next batch the texts' own tokens are known if there were no drafts.
        """
        if not self._tier.attached:
            if self.governor is not None:  # it switched the cache off, whose slots are still on the device
                self._check_memory()
            return
        start_s = time.perf_counter()
        self.wait()
        self._in_step = record.n_verified > 0
        if self._in_step:
            for tier in self._tiers:
                tier.add_step(record)
        self.watch_memory()
        if self._device.kind == "ram":
            assert self.memory is not None
            if self.memory.lost and not self._lost:
                self._stop_planning()
        else:
            self._check_device()
            self._check_memory()
        if self.active or self.ram is not None:
            tokens = record.tokens[-1:]
            if not self._in_step:
                observations = self._reader.prefill(counts, batch)
            elif order is None:
                observations = [self._reader.verification(counts, batch, record.n_accepted)]
            else:
                n_accepted = record.n_accepted + self._n_texts - 1  # as if the texts were one
                observations = [self._reader.verification(counts, batch, n_accepted, order)]
                tokens = [] if record.n_drafted else record.tokens
            self._do(partial(self._observe_and_plan, observations, tokens))
        self._add_schedule(start_s)

    def wait(self) -> None:
        self._planning.wait()

    def _do(self, call: Callable[[], object]) -> None:
        """Runs `call` in the planning thread; counts the time, unless it is for a prompt."""
        self._planning.submit(partial(self._tier.time_plan, call) if self._in_step else call)

    def _observe_and_plan(self, observations: Sequence[Observation], tokens: Sequence[int]) -> None:
        if self.ram is not None:
            on_device = self.cache.copy_residency() == Residency.RESIDENT
            self.ram.observe(observations, tokens, on_device if self.active else None)
            self.ram.driver.push()
            if not self.active:
                return
        self._tier.observe(observations, tokens)
        for observation in observations:
            if not observation.prefill and observation.ids is not None:
                for predictor in self._predictors:
                    predictor.compare(observation.ids)
        if self.draft_prefetch is not None:
            self.draft_prefetch.begin_batch()
        self.driver.push()

    def _plan_draft(
        self,
        tokens: Sequence[int],
        prediction: ExpertPrediction | None = None,
        layers: slice | None = None,
        hidden_states: NDArray[np.float32] | None = None,
    ) -> int:
        """Plans for a batch whose tokens are known, and pushes the plan; the number of uploads."""
        plan = self.driver.plan_draft(tokens, prediction, hidden_states, layers=layers)
        self.driver.push()
        return len(plan.uploads)

    # statistics, warnings, end

    def _add_schedule(self, start_s: float) -> None:
        """Counts the time since `start_s` as scheduling, unless it was for a prompt."""
        if self._in_step:
            seconds = time.perf_counter() - start_s
            self._tier.add(schedule_s=seconds, decode_s=seconds)

    @property
    def predicted_share(self) -> float | None:
        """Share of the predictions from hidden states that were right; None where none was made."""
        return self._predictors[0].accuracy.share if self._predictors else None

    def _check_device(self) -> None:
        """Warns once that the device is lost, or that blocks of this model are not understood."""
        lost, n_unknown = self.cache.trouble()
        if lost and not self._lost:
            self._stop_planning()
            if self._device.kind == "rpc":
                rpc.mark_lost(self._device.endpoint)
            self._warn(f"The device {self.device} is lost: the CPU computes all experts from here on.")
        if n_unknown and not self._warned_unknown and self.active:
            self._warned_unknown = True
            text = "The CPU computes some layers' experts although the device holds them: moeedge does not recognise"
            self._warn(f"{text} how these layers compute, or the device cannot compute them or has no memory for it.")

    def _stop_planning(self) -> None:
        self._lost = True
        self.driver.pending = None

    def watch_memory(self) -> None:
        """Notifies of slots in RAM that a thread has given back since the last call; also in the middle of a decode."""
        for notification in self.memory.check() if self.memory is not None else ():
            self.run.report(notification, notification.level)

    def _check_memory(self) -> None:
        """Gives slots back where the device runs short of memory."""
        before = self.cache.info.n_slots
        if self._watch is None or self._lost or not before or not (missing_bytes := self._watch.missing_bytes()):
            return
        self.resize(before - slots_of(self.cache, missing_bytes))  # staging slots stay
        now, free = self.cache.info.n_slots, format_bytes(self._watch.free_bytes)
        if now == before:
            return
        off = "is off: the CPU computes all experts from here on"
        effect = f"now holds {now:,} experts instead of {before:,}" if now else off
        text = f"{self.device} has only {free} of free memory left: the expert cache {effect}."
        if not now and not self._op_offload and self.ram is None:  # the context was made for streamed prompts
            text += " Prompts are slower, too, until the next start."
        self._warn(text)

    def resize(self, n_slots: int) -> None:
        """Opens the cache again, empty, with about so many slots (none below one per layer); no decode may run."""
        self.wait()
        n_experts = len(self._cached_layers) * self.cache.info.n_experts
        self.cache.resize(n_slots / n_experts if n_slots >= len(self._cached_layers) else 0.0)
        self.driver.use(self._remake_policy(cache_shape(self.cache)))
        if self.on_demand is not None:
            self.on_demand.resize()

    def _warn(self, text: str) -> None:
        self.run.report(text)

    def drain_transfers(self, timeout_s: float) -> None:
        """Waits for what was planned, for at most `timeout_s`, and drops the rest: no transfer runs afterwards."""
        self.wait()
        for tier in self._tiers if self.active else self._tiers[1:]:
            with suppress(BackendError):  # a lost device moves nothing
                tier.store.drain(timeout_s, _IN_FLIGHT_TIMEOUT_S)

    def stats(self) -> PlacementStats:
        """All figures since the session began."""
        self.wait()
        (used, total), pushed, ram = self.device_memory() or (None, None), self.driver.pushed, None
        if self.ram is not None:
            sizes = {"vram_used_bytes": total_memory() - available_memory(), "vram_total_bytes": total_memory()}
            ram = self.ram.stats(device="RAM", policy=self.ram.driver.policy.name, **sizes)
        return self._tier.stats(
            lost=self.lost,
            device=self.device,
            policy=self.policy.name,
            vram_used_bytes=used,
            vram_total_bytes=total,
            tau=() if pushed is None else tuple(pushed.tau[self._cached_layers].tolist()),
            lookahead=None if self._device.kind == "ram" else self.policy.lookahead,  # nothing is uploaded ahead there
            ram=ram,
            choice=None if self.governor is None else self.governor.choice,
        )

    def device_memory(self) -> tuple[int, int] | None:
        """Used and total bytes of the entire device; None where unknown."""
        if self._lost:
            return None
        with suppress(MoeedgeError):  # a driver that stopped answering must not end an answer
            info = self.cache.info
            filled_bytes = info.pool_bytes * self.cache.stats().slots_used // max(1, info.n_slots)
            reading = devices.read_memory(self._device, pool_bytes=info.pool_bytes, filled_bytes=filled_bytes)
            return (reading.used_bytes, reading.total_bytes) if reading is not None else None
        return None

    def close(self) -> None:
        """Ends the mover and frees the device's memory; must come before the target's context is freed."""
        try:
            if self.memory is not None:
                self.memory.close()
            self.watch_memory()
            self._planning.close()
            try:
                if self._kept is not None:
                    self._kept.save()
            except OSError as error:  # a full disk costs the next run its warm start
                self.run.report(f"The use of experts is not saved for the next start: {error.strerror}.", Level.INFO)
            self.detach()
        finally:  # after an interrupt, too
            for tier in self._tiers:
                tier.close()
