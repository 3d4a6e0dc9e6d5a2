"""Expert placement of a session: what the target activates goes to the policy, the policy's plan to the mover."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import BackendError, MoeedgeError
from moeedge.native import ActivationCapture, Sensor
from moeedge.native.cache import ExpertCache
from moeedge.native.sensor import Counts
from moeedge.notifications import Level, Notification, Notify, ignore
from moeedge.policies.base import ExpertPrediction, Plan, Policy
from moeedge.scheduler.on_demand import LayerHook
from moeedge.scheduler.prediction import Drafting, DraftRouterPredictor, foretold_cells
from moeedge.scheduler.routing_reader import RoutingReader
from moeedge.scheduler.stats import Counters, PlacementStats, StepRecord

_STEPS_BETWEEN_BLOCKS = 32  # the native ring holds 4096 block records: 85 steps of 48 layers
_FLIGHT_S = 5.0  # more than the experts on their way take on any link


class ExpertPlacement:
    """Implements speculative.Placement over one ExpertCache, which it attaches and, in `close`, frees.

    read_vram: used and total bytes of the device, None where nobody knows.
    notify: called when something that was on goes off: a lost device, blocks not understood.
    on_lost: called once when the device is lost.
    scores: where the routers' probabilities are kept, for a policy that needs them.
    within: called before each block of the target. foresight: of the draft's hidden states.
    vanilla: drafting waits for what is foretold, layer by layer.
    reads_states: the draft's hidden states are wanted.
    """

    def __init__(
        self,
        cache: ExpertCache,
        sensor: Sensor,
        policy: Policy,
        *,
        device: str,
        cache_ratio: float,
        expert_layers: Sequence[int],
        read_vram: Callable[[], tuple[int, int] | None],
        on_lost: Callable[[], None] = lambda: None,
        scores: ActivationCapture | None = None,
        within: LayerHook | None = None,
        foresight: DraftRouterPredictor | None = None,
        vanilla: bool = False,
        reads_hidden_states: bool = False,
    ) -> None:
        self.cache = cache
        self.policy = policy
        self._reads_hidden_states = reads_hidden_states
        self.device = device
        self.cache_ratio = cache_ratio
        self._sensor = sensor
        self._expert_layers = list(expert_layers)
        self._read_vram = read_vram
        self.notify: Notify = ignore
        self._on_lost = on_lost
        self._watcher = RoutingReader(sensor, scores)
        self.within = within
        self.drafting: Drafting | None = None
        if foresight is not None:
            self.drafting = Drafting(foresight, self._plan_ahead, cache.drain, vanilla=vanilla)
        self._on_demand = within is not None and within.loads_misses
        self._counters = Counters(cache.stats())
        self._plan: Plan | None = None  # not given to the mover yet
        self._tau: NDArray[np.float32] | None = None  # of the plan that the mover was given last, per layer
        self._in_step = False  # or at a prompt
        self._lost = False
        self._told_unknown = False
        self._attached = False
        cache.blocks()  # those of the warm-up
        self.attach()

    @property
    def active(self) -> bool:
        """Whether plans are made: attached, and the device there."""
        return self._attached and not self._lost

    def reads_hidden_states_now(self) -> bool:
        """Whether the draft is to keep its hidden states: not while nobody plans by them."""
        return self._reads_hidden_states and self.active

    def attach(self) -> None:
        """Lets the target compute with the cache."""
        if not self._attached:
            self.cache.attach(self._sensor)
            self._watcher.skip()
            self._attached = True
            self._switch()

    def detach(self) -> None:
        """Lets the target compute as without a cache; what lies on the device stays there."""
        if self._attached:
            self.cache.detach()
            self._attached = False
            self._switch()

    def _switch(self) -> None:
        """What acts between layers and draft tokens does so only while plans are made."""
        for part in (self.within, self.drafting):
            if part is not None:
                part.on = self.active

    def drafted(self, tokens: Sequence[int]) -> None:
        """The draft goes on behind `tokens`: what is foretold by now moves meanwhile."""
        if self.drafting is not None and self.active:
            start_s = time.perf_counter()
            self._in_step = True
            self.drafting.token(tokens)
            self._took(start_s)

    def anticipate(self, tokens: Sequence[int], hidden_states: NDArray[np.float32] | None = None) -> None:
        """Plans for the whole batch that is verified next, and starts the transfers."""
        if self.active and len(tokens) > 1:  # for a single one `schedule` has planned
            start_s = time.perf_counter()
            self._in_step = True
            if self.drafting is not None:
                self.drafting.end(tokens)
            else:
                self._replan(
                    tokens,
                    None
                    if hidden_states is None
                    else ExpertPrediction.of_hidden_states(hidden_states, self.cache.info.n_layers),
                )
                self._push()
            self._took(start_s)

    def _plan_ahead(self, tokens: Sequence[int], hints: ExpertPrediction | None, layers: slice | None) -> int:
        """Drafting's: how many experts were asked for."""
        self._replan(tokens, hints, layers)
        n_asked = len(self._plan.uploads) if self._plan is not None else 0
        self._push()
        return n_asked

    def schedule(self, counts: Counts, batch: Sequence[int], record: StepRecord) -> None:
        """Tells the policy what `batch` activated and plans for the token that comes next."""
        if not self._attached:
            return
        start_s = time.perf_counter()
        self._in_step = record.n_verified > 0
        if record.n_verified:
            self._counters.add_step(record)
        self._look_for_trouble()
        if not self._lost:
            if record.n_verified:
                observation = self._watcher.verification(counts, batch, record.n_accepted)
                self.policy.observe(observation)
                self._judge(observation.ids)
            else:
                for piece in self._watcher.prefill(counts, batch):
                    self.policy.observe(piece)
            self._replan(record.tokens[-1:])
            if self.drafting is not None:
                self.drafting.begin()
        if self._counters.steps % _STEPS_BETWEEN_BLOCKS == 0:
            self._counters.take_blocks(self.cache.blocks())
        self._took(start_s)

    def prefetch(self) -> None:
        """Starts the transfers of the plan; they go on while the draft model works."""
        if self.active:
            start_s = time.perf_counter()
            self._push()
            self._took(start_s)

    def _took(self, start_s: float) -> None:
        """Counts scheduling since `start_s`, unless it was for a prompt."""
        if self._in_step:
            self._counters.add_schedule(time.perf_counter() - start_s)

    def _replan(
        self, upcoming: Sequence[int], hints: ExpertPrediction | None = None, layers: slice | None = None
    ) -> None:
        """Anew, for what is foretold of `layers` (None: all).

        A policy brings back what was used, too, for our own rule that nothing comes during a step. Where misses are
        loaded on demand, they are there already: only what is foretold comes besides.
        """
        plan = self.policy.plan(self.cache.residency(), upcoming, hints)
        if self._on_demand or layers is not None:
            foretold = foretold_cells(hints, self.cache.info.n_layers, self.cache.info.n_experts)
            plan = _only(plan, foretold, layers)
            if self._on_demand and self.within is not None:
                victims = self.within.make_room(foretold, plan.uploads)
                plan = replace(plan, victims=victims, victim_utility=np.arange(len(victims), dtype=np.float32))
        self._plan = plan

    def _judge(self, ids: NDArray[np.int32] | None) -> None:
        """Compares what was foretold of a batch with what it used."""
        if ids is not None and self.drafting is not None:
            self.drafting.foresight.judge(ids)
        if ids is not None and self.within is not None and self.within.gate is not None:
            self.within.gate.judge(ids)

    @property
    def foretold_share(self) -> float | None:
        """Share of the experts foretold from hidden states that were used; None where nothing was foretold."""
        gate = self.within.gate if self.within is not None else None
        told = self.drafting.foresight if self.drafting is not None else gate
        return told.accuracy.share if told is not None else None

    def _push(self) -> None:
        plan, self._plan = self._plan, None
        if plan is not None:
            self.cache.plan(plan.uploads, plan.priority, plan.victims, plan.victim_utility)
            self._tau = plan.tau

    def _look_for_trouble(self) -> None:
        """Says once that the device is gone, or that this model's blocks are not understood."""
        lost, n_unknown = self.cache.trouble()
        if lost and not self._lost:
            self._lost = True
            self._plan = None
            self._switch()
            self._on_lost()
            self._warn(f"The device {self.device} is lost: the CPU computes all experts from here on.")
        if n_unknown and not self._told_unknown and not self._lost:
            self._told_unknown = True
            self._warn(
                "There are blocks of experts that moeedge does not understand, or that the device cannot compute or "
                "has no memory for: they run on the CPU, whatever lies on the device."
            )

    def _warn(self, text: str) -> None:
        self.notify(Notification(text, Level.WARNING))

    def rest(self, timeout_s: float) -> None:
        """Lets what was planned arrive, for at most `timeout_s`, and drops the rest: nothing moves when it returns.

        For measurements: experts that still move would slow down whatever is measured next.
        """
        if not self.active:
            return
        with suppress(BackendError):  # a device that was lost meanwhile moves nothing any more
            if not self.cache.drain(timeout_s):
                nothing = np.zeros((0, 2), dtype=np.int32)
                self.cache.plan(nothing, np.zeros(0, dtype=np.uint8), nothing, np.zeros(0, dtype=np.float32))
                self.cache.drain(_FLIGHT_S)

    def reset(self) -> None:
        """A new conversation: the policy is told, what lies on the device stays."""
        self.policy.reset()

    def stats(self) -> PlacementStats:
        """All counters since the session began."""
        self._counters.take_blocks(self.cache.blocks())
        return self._counters.record(
            self.cache.stats(),
            device=self.device,
            policy=self.policy.name,
            cache_ratio=self.cache_ratio,
            slots_total=self.cache.info.n_slots,
            pool_bytes=self.cache.info.pool_bytes,
            vram=self._vram(),
            tau=() if self._tau is None else tuple(self._tau[self._expert_layers].tolist()),
        )

    def _vram(self) -> tuple[int, int] | None:
        try:
            return None if self._lost else self._read_vram()
        except MoeedgeError:  # a driver that stopped answering is no reason to stop an answer
            return None

    def close(self) -> None:
        """Ends the mover and frees the device's memory; must come before the target's context is freed."""
        self.detach()
        self.cache.close()


def _only(plan: Plan, foretold: NDArray[np.bool_], layers: slice | None) -> Plan:
    """`plan` without uploads that nobody foretold [n_layers, n_experts], or of other `layers`."""
    keep = foretold[plan.uploads[:, 0], plan.uploads[:, 1]]
    if layers is not None:
        keep &= (plan.uploads[:, 0] >= layers.start) & (plan.uploads[:, 0] < layers.stop)
    n_victims = len(plan.victims) if keep.any() else 0
    return replace(
        plan,
        uploads=plan.uploads[keep],
        priority=plan.priority[keep],
        victims=plan.victims[:n_victims],
        victim_utility=plan.victim_utility[:n_victims],
    )
