"""Placement of a session's experts: observes what the target activates, plans, pushes the plans to the cache."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import BackendError
from moeedge.experts import Residency
from moeedge.llama.context import Context
from moeedge.native import Block
from moeedge.native.abi import Phase
from moeedge.native.sensor import Counts
from moeedge.policies.base import Observation
from moeedge.run import Level, Notification, Run
from moeedge.scheduler.cache_governor import CacheGovernor
from moeedge.scheduler.calibration import Calibration
from moeedge.scheduler.config import ExecutionConfig, PlacementConfig
from moeedge.scheduler.native_io import RoutingReader, cache_shape
from moeedge.scheduler.on_demand import OnDemandLoader, predicted_uploads
from moeedge.scheduler.prediction import DraftPrefetch, PolicyInputs
from moeedge.scheduler.ram_tier import EarlierRuns
from moeedge.scheduler.stats import PlacementStats, StepRecord
from moeedge.scheduler.tiers import MakePolicy, Tier

_IN_FLIGHT_TIMEOUT_S = 5.0  # more than the experts under way take on any link


class PlanningThread:
    """Runs calls in their order next to the models: llama.cpp computes without Python's lock, so that both overlap.

    The calls may use what the decoding thread leaves alone until it has called `wait`. overlaps: False runs each call
    at once, in the thread that submits it. Every step pays for the hand-over, which futures would make longer.
    """

    def __init__(self, *, overlaps: bool = True) -> None:
        self._overlaps, self._process = overlaps, os.getpid()
        self._calls: SimpleQueue[tuple[int, Callable[[], object]] | None] = SimpleQueue()
        self._thread: Thread | None = None  # begins with the first call
        self._numbers = itertools.count(1)  # of calls
        self._submitted = self._last_ended = 0
        self._ended = Event()  # one more call has ended
        self._errors: list[BaseException] = []  # of the calls since the last `wait`

    def submit(self, call: Callable[[], object]) -> None:
        """Runs `call` after those submitted before."""
        if not self._overlaps:
            call()
            return
        if self._thread is None:
            self._thread = Thread(target=self._run, name="moeedge-planning", daemon=True)
            self._thread.start()
        number = next(self._numbers)
        self._calls.put((number, call))
        self._submitted = number  # after `put`: an interrupt in between must not leave a call that never ends

    def wait(self) -> None:
        """Returns when all calls have ended; may be interrupted, and called again. Raises what the first one raised."""
        while self._last_ended < self._submitted and self._process == os.getpid():  # a fork does not have the thread
            self._ended.clear()
            if self._last_ended < self._submitted:
                self._ended.wait()
        errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Ends the thread after its calls, whatever they raise. May be called twice."""
        try:
            with suppress(Exception):
                self.wait()
        finally:
            thread, self._thread = self._thread, None
            if thread is not None and self._process == os.getpid():
                self._calls.put(None)
                thread.join()

    def _run(self) -> None:
        while (submitted := self._calls.get()) is not None:
            number, call = submitted
            try:
                call()
            except BaseException as error:  # raised again in the thread that waits
                self._errors.append(error)
            self._last_ended = number
            self._ended.set()


class PlacementManager:
    """Places a target's experts in its tiers, fastest first, one or two, which it frees in `close`.

    A step of speculative.py calls before_verification and after_verification. The first tier's policy and its plans run
    in a thread of their own, unless the decoding thread asks the policy in between, before each layer or after each
    draft token. What another tier holds changes with what the first one lacks.
    inputs: of the first tier's policy.
    """

    def __init__(self, tiers: Sequence[Tier], config: PlacementConfig, target: Context, inputs: PolicyInputs) -> None:
        assert target.sensor is not None  # opening.py checks it
        execution, first = config.execution, tiers[0]
        self.tiers, self.first = tiers, first
        self.cache, self.driver = first.cache, first.driver
        self.run = Run()  # reports warnings, e.g. of a lost device; may be replaced
        # a measurement that waits for the end of an answer: returns its result, and whether the cache stays
        self.postponed: Callable[[Run], tuple[Calibration, bool]] | None = None
        self._sensor, self._op_offload = target.sensor, target.op_offload
        self._cached_layers = list(target.model.host_expert_layers)
        self._inputs = inputs
        # the CPU can compute all experts as well, and no other system is imitated
        governed = config.governed and tiers[-1].is_device and execution == ExecutionConfig()
        # decides whether steps are computed with the cache
        self.governor = CacheGovernor(target.n_parallel) if governed else None
        self._reader = RoutingReader(target.sensor, inputs.router_scores)
        self.on_demand = OnDemandLoader(first.cache) if execution.misses == "load" else None
        vanilla = execution.drafting == "vanilla"
        if self.on_demand is not None or vanilla:
            self.driver.filter_plan = partial(predicted_uploads, cache_shape(first.cache), self.on_demand)
        self.layer_hook = self._before_layer if self.on_demand is not None or self.driver.plans_layers else None
        self._predictors = [each for each in (inputs.draft_predictor, inputs.gate_predictor) if each is not None]
        self.draft_prefetch: DraftPrefetch | None = None
        if (predictor := inputs.draft_predictor) is not None:
            self.draft_prefetch = DraftPrefetch(predictor, self.driver, self.cache, self._prefetching, vanilla)
        self._planning = PlanningThread(overlaps=self.layer_hook is None and self.draft_prefetch is None)
        self.n_texts = 1  # that the next steps verify
        self._in_step = False  # or at a prompt
        self._is_paused = False
        self.attach()
        self._reader.skip()

    @property
    def active(self) -> bool:
        """Whether plans are made for the first tier."""
        return self.first.active

    @property
    def loads_on_demand(self) -> bool:
        """Whether absent experts are loaded from the file into RAM, so that none is computed from the mapped file."""
        return not self.tiers[-1].is_device and self.tiers[-1].active

    @property
    def loading_wait_s(self) -> float:
        """How long computations have waited for experts from the file so far; 0.0 with experts on a device."""
        return self.cache.waited_s() if self.first.attached and not self.first.is_device else 0.0

    @property
    def wants_hidden_states(self) -> bool:
        """Whether the draft is to keep its hidden states for the next plan; a change of mind may take one more step."""
        return self._inputs.hidden_states and self.n_texts == 1 and self.active and self.driver.reads_drafts

    def _prefetching(self) -> DraftPrefetch | None:
        """The prefetch of experts while a draft is made; for several texts the draft predicts none."""
        return self.draft_prefetch if self.n_texts == 1 and self.active else None

    @property
    def earlier_runs(self) -> EarlierRuns | None:
        """The activations of earlier runs, for a warm start in RAM; None without any."""
        kept = self.tiers[-1].kept
        return None if kept is None else kept.earlier_runs

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """The cache is free for a measurement, which is not counted."""
        self.detach()
        before = self.cache.stats()
        try:
            yield
        finally:
            self.first.skip(before)
            self.attach()

    def use(self, make: MakePolicy) -> None:
        """Goes on with a fresh policy of that kind; no decode may run."""
        self.wait()
        self.first.use(make)

    def begin_text(self) -> None:
        self.wait()
        for tier in self.tiers:
            tier.driver.begin_text()
        if self.governor is not None:
            self.governor.begin_text()

    def attach(self) -> None:
        """Lets the target compute with the tiers."""
        if not self.first.attached:
            for tier in self.tiers:
                tier.attach(self._sensor)
            for tier in self.tiers[1:]:
                self.cache.read_from(tier.cache)
            self._reader.skip()

    def detach(self) -> None:
        """Lets the target compute as without them; the experts on the device stay there."""
        try:
            self.wait()
        finally:
            for tier in self.tiers:
                tier.detach()

    def pause(self, paused: bool) -> None:
        """paused: the target computes as without tiers until the next call, whatever the governor decides."""
        self._is_paused = paused
        self.detach() if paused else self.attach()

    @property
    def _governing(self) -> CacheGovernor | None:
        return None if self._is_paused else self.governor

    def fall_back(self, *, context_usable: bool) -> None:
        """Ends placement because a GPU failed, whose context the tiers leave if `context_usable`; figures remain."""
        for tier in self.tiers:
            tier.fall_back()
        if context_usable:
            self.detach()

    def make_room(self, n_bytes: int) -> None:
        """Gives slots in RAM back, so that so much memory can be allocated."""
        for tier in self.tiers:
            if tier.slots is not None:
                tier.slots.make_room(n_bytes)
        self.watch_memory()

    def follow(self, target: Context) -> None:
        """Lets the context that took the lost one's place compute from the slots in RAM."""
        for tier in self.tiers:
            tier.follow(target)

    # one step, in the order of the calls

    def begin_prompt(self) -> None:
        """A prompt comes. Where llama.cpp does not compute large batches on a GPU by itself, the cache does."""
        if self._governing is not None and not self._op_offload and not self.first.lost:
            self.attach()

    def begin_answer(self) -> None:
        if self.governor is not None:
            self.governor.begin_answer()

    @property
    def in_trial(self) -> bool:
        return self.governor is not None and self.governor.choice.is_trial

    def begin_step(self) -> None:
        """Attaches the cache, or detaches it, as the governor decides."""
        governor = self._governing
        if governor is None or not self.first.usable:
            return
        if governor.choice.on:
            self.attach()
        elif self.first.attached:
            self.drain_transfers(0.0)  # what is under way would slow down the steps without it
            self.detach()

    def end_step(self, n_tokens: int, seconds: float) -> None:
        """The step after `begin_step` verified `n_tokens` in `seconds`, drafting included."""
        governor = self._governing
        if governor is None or not self.first.usable:
            return
        paid = governor.choice.pays
        governor.observe(n_tokens, seconds)
        choice = governor.choice
        if choice.pays != paid and choice.gain is not None:
            self.run.report(choice.decision.sentence(), Level.NOTICE)

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
            self._do(partial(self._plan_draft, tokens, hidden_states))
        self._add_schedule(start_s)

    def _before_layer(self, block: Block) -> None:
        """The decoding thread computes this MoE block of the target next."""
        if not self.active or block.phase not in (Phase.VERIFY, Phase.DECODE):
            return
        if self.on_demand is not None and block.ids is not None:
            self.on_demand.load(block.layer, np.unique(block.ids[block.ids >= 0]))
        if self.driver.plans_layers:
            predictor = self._inputs.gate_predictor
            self.driver.push_layer(block.layer, None if predictor is None else predictor.predict(block))

    def after_verification(
        self, counts: Counts, batch: Sequence[int], record: StepRecord, order: NDArray[np.intp] | None = None
    ) -> None:
        """Shows the policy the activations of `batch`, plans for the next one and starts the transfers.

        counts: uint32 [n_layers, n_experts]. batch: a prompt if record.n_verified is 0. Of the next batch the last of
        record.tokens is known, the target's own. order: of several texts (`n_texts`), the places in the batch, those
        that became text first; of the next batch the texts' own tokens are known if there were no drafts.
        """
        if not self.first.attached:
            if self.governor is not None:  # it switched the cache off, whose slots are still on the device
                self._give_back()
            return
        start_s = time.perf_counter()
        self.wait()
        self._in_step = record.n_verified > 0
        if self._in_step:
            for tier in self.tiers:
                tier.add_step(record)
        self.report_trouble()
        self._give_back()
        if any(tier.active for tier in self.tiers):
            tokens = record.tokens[-1:]
            if not self._in_step:
                observations = self._reader.prefill(counts, batch)
            elif order is None:
                observations = [self._reader.verification(counts, batch, record.n_accepted)]
            else:
                n_accepted = record.n_accepted + self.n_texts - 1  # as if the texts were one
                observations = [self._reader.verification(counts, batch, n_accepted, order)]
                tokens = [] if record.n_drafted else record.tokens
            self._do(partial(self._observe_and_plan, observations, tokens))
        self._add_schedule(start_s)

    def wait(self) -> None:
        self._planning.wait()

    def _do(self, call: Callable[[], object]) -> None:
        """Runs `call` in the planning thread; counts the time, unless it is for a prompt."""
        self._planning.submit(partial(self.first.time_plan, call) if self._in_step else call)

    def _observe_and_plan(self, observations: Sequence[Observation], tokens: Sequence[int]) -> None:
        held_above = None
        if self.active and len(self.tiers) > 1:
            held_above = self.cache.copy_residency() == Residency.RESIDENT
        for tier in reversed(self.tiers):  # what is loaded on demand first
            if tier.active:
                tier.observe(observations, tokens, held_above)
                tier.driver.push()
        for observation in observations:
            if not observation.prefill and observation.ids is not None:
                for predictor in self._predictors:
                    predictor.compare(observation.ids)
        if self.draft_prefetch is not None:
            self.draft_prefetch.begin_batch()

    def _plan_draft(self, tokens: Sequence[int], hidden_states: NDArray[np.float32] | None) -> None:
        self.driver.plan_draft(tokens, hidden_states=hidden_states)
        self.driver.push()

    # statistics, warnings, end

    def _add_schedule(self, start_s: float) -> None:
        """Counts the time since `start_s` as scheduling, unless it was for a prompt."""
        if self._in_step:
            seconds = time.perf_counter() - start_s
            self.first.add(schedule_s=seconds, decode_s=seconds)

    @property
    def predicted_share(self) -> float | None:
        """Share of the predictions from hidden states that were right; None where none was made."""
        return self._predictors[0].accuracy.share if self._predictors else None

    def watch_memory(self) -> None:
        """Notifies of slots in RAM that a thread has given back since the last call; also in the middle of a decode."""
        for tier in self.tiers:
            if tier.slots is not None:
                self._report(tier.check())

    def _give_back(self) -> None:
        """Gives slots of the first tier back where its memory runs short."""
        self.wait()
        notifications = self.first.give_back(streams_prompts=not self._op_offload and len(self.tiers) == 1)
        if notifications and self.on_demand is not None:
            self.on_demand.resize()
        self._report(notifications)

    def report_trouble(self) -> None:
        """Warns of lost devices and of what has happened to slots."""
        for tier in reversed(self.tiers):
            self._report(tier.check())

    def _report(self, notifications: Sequence[Notification]) -> None:
        for notification in notifications:
            self.run.report(notification, notification.level)

    def drain_transfers(self, timeout_s: float) -> None:
        """Waits for what was planned, for at most `timeout_s`, and drops the rest: no transfer runs afterwards."""
        self.wait()
        for tier in [tier for tier in self.tiers if tier.usable]:
            with suppress(BackendError):  # a lost device moves nothing
                tier.store.drain(timeout_s, _IN_FLIGHT_TIMEOUT_S)

    def stats(self) -> PlacementStats:
        self.wait()
        pushed = self.driver.pushed
        return self.first.stats(
            tau=() if pushed is None else tuple(pushed.tau[self._cached_layers].tolist()),
            ram=next((tier.stats() for tier in self.tiers[1:]), None),
            choice=None if self.governor is None else self.governor.choice,
        )

    def close(self) -> None:
        """Ends the mover and frees the tiers' memory; must come before the target's context is freed."""
        try:
            for tier in self.tiers:
                tier.stop()
            self.watch_memory()
            self._planning.close()
            for tier in self.tiers:
                self._report(tier.save())
            self.detach()
        finally:  # after an interrupt, too
            for tier in self.tiers:
                tier.close()
