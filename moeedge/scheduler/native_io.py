"""Around a StepDriver in the engine: frames as observations, the cache as the store of plans, the planning thread.

Between the layers of a verification it may load missing experts on demand and plan for the next layers. In moeedge the
CPU computes missing experts. Most published systems load them when their layer is computed ("on demand") and compute on
the device alone; the engine can do that, too, for comparisons.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Event, Thread

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import Residency, count_ids
from moeedge.native import ActivationCapture, Block, CaptureFlags, Frame, Sensor
from moeedge.native.abi import Phase
from moeedge.native.cache import ExpertCache
from moeedge.native.sensor import Counts
from moeedge.policies.base import CacheShape, ExpertPrediction, Observation, Plan
from moeedge.policies.planner import even_shares, predicted_counts
from moeedge.scheduler.driver import StepDriver
from moeedge.scheduler.prediction import NextGatePredictor


class CacheStore:
    """Plans go to the native queue; a thread of the cache moves the experts."""

    def __init__(self, cache: ExpertCache) -> None:
        self.cache = cache
        self.residency = cache.residency

    def push(self, plan: Plan) -> None:
        self.cache.plan(plan.uploads, plan.priority, plan.victims, plan.victim_utility)

    def push_uploads(self, uploads: NDArray[np.int32]) -> None:
        """Replaces what is queued by `uploads`, int32 [n, 2] (layer, expert), for which no expert is evicted."""
        priority = np.ones(len(uploads), dtype=np.uint8)
        self.cache.plan(uploads, priority, np.zeros((0, 2), dtype=np.int32), np.zeros(0, dtype=np.float32))

    def drain(self, timeout_s: float, in_flight_timeout_s: float) -> None:
        """Waits until all that is queued has arrived; after `timeout_s` drops the queue and ends what is under way."""
        if not self.cache.drain(timeout_s):
            self.push_uploads(np.zeros((0, 2), dtype=np.int32))
            self.cache.drain(in_flight_timeout_s)


def cache_shape(cache: ExpertCache) -> CacheShape:
    """The slots of an open cache."""
    group, capacity, _ = cache.groups()
    return CacheShape(cache.info.n_layers, cache.info.n_experts, group, capacity)


class RoutingReader:
    """Reads the frames of one context, independently of other readers; scores: captures the routers' probabilities."""

    def __init__(self, sensor: Sensor, scores: ActivationCapture | None = None) -> None:
        self._sensor, self._scores, self._last_serial = sensor, scores, 0
        self.skip()

    def skip(self) -> None:
        self._frames()

    def _frames(self, *phases: Phase) -> list[Frame]:
        frames = self._sensor.frames_after(self._last_serial)
        if frames:
            self._last_serial = frames[-1].serial
        return [frame for frame in frames if frame.phase in phases]

    def verification(
        self, counts: Counts, batch: Sequence[int], n_accepted: int, order: NDArray[np.intp] | None = None
    ) -> Observation:
        """The observation of a decode. counts: uint32 [n_layers, n_experts]. order: of its tokens; None: as is."""
        frames = self._frames(Phase.VERIFY, Phase.DECODE)
        tokens = np.array(batch, dtype=np.int32)
        places = slice(None) if order is None else order
        ids, weights, scores = None, None, None
        if len(frames) == 1 and frames[0].n_tokens == tokens.size:
            ids, weights = routing(frames[0])
            ids, weights, scores = ids[:, places], weights[:, places], self._router_scores(tokens.size)
            scores = None if scores is None else scores[:, places]
        # a copy: the sensor reuses its array, and a policy may read it later
        return Observation(counts.copy(), tokens.size, n_accepted, tokens[places], ids, weights, router_scores=scores)

    def _router_scores(self, n_tokens: int) -> NDArray[np.float32] | None:
        """A copy, float32 [n_layers, n_tokens, n_experts]; None where they were not captured."""
        captured = None if self._scores is None else self._scores.read(CaptureFlags.PROBS)
        if captured is None or n_tokens > captured.rows.shape[1]:
            return None
        if not np.isin(captured.layer_tokens, (0, n_tokens)).all():
            return None
        values = captured.rows[:, :n_tokens].copy()
        values[captured.layer_tokens == 0] = 0.0
        if values.min(initial=0.0) < 0.0:  # logits: this model computes probabilities of the chosen experts only
            values = np.exp(values - values.max(axis=-1, keepdims=True))
            values /= values.sum(axis=-1, keepdims=True)
        return np.asarray(values, dtype=np.float32)

    def prefill(self, counts: Counts, prompt: Sequence[int]) -> list[Observation]:
        """The observations of `prompt`, one per graph; the first graphs of a long prompt are one sum without ids."""
        frames: list[Frame] = []
        start = len(prompt)
        for frame in reversed(self._frames(Phase.PREFILL)):  # before these there may be frames of an interrupted prompt
            if frame.n_tokens > start:
                break
            start -= frame.n_tokens
            frames.insert(0, frame)
        n_before, pieces, left = start, [], counts.astype(np.int64)
        for frame in frames:
            tokens = np.array(prompt[start : start + frame.n_tokens], dtype=np.int32)
            start += frame.n_tokens
            ids, weights = routing(frame)
            is_whole = len(frames) == 1 and n_before == 0  # the usual prompt: the sensor's counts are its own
            counted = left if is_whole else count_ids(ids, counts.shape[1])
            left = left - counted
            pieces.append(Observation(counted, frame.n_tokens, 0, tokens, ids, weights, prefill=True))
        if n_before > 0:
            pieces.insert(0, Observation(np.maximum(left, 0), n_before, 0, prefill=True))
        return pieces


def routing(frame: Frame) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Copies of a frame's ids and weights [n_layers, n_tokens, n_used], -1 and 0 for tokens that a layer did not see.

    A layer that saw fewer tokens saw the last ones: in the last layer of a prompt llama.cpp drops the rows without
    requested logits.
    """
    ids, weights = frame.ids.copy(), frame.weights.copy()
    if min(frame.layer_tokens.tolist()) == frame.n_tokens:  # the usual case, in every step
        return ids, weights
    for layer in np.flatnonzero(frame.layer_tokens < frame.n_tokens):
        seen = int(frame.layer_tokens[layer])
        first = frame.n_tokens - seen
        ids[layer, first:] = frame.ids[layer, :seen]
        weights[layer, first:] = frame.weights[layer, :seen]
        ids[layer, :first] = -1
        weights[layer, :first] = 0.0
    return ids, weights


_TIMEOUT_S = 10.0  # for the experts that a layer waits for; the CPU computes those that have not arrived by then
_DECODING = (Phase.VERIFY, Phase.DECODE)


@dataclass(eq=False)
class LayerHook:
    """Called by the decoding thread before each MoE block of the target. is_on: whether the cache can be used."""

    driver: StepDriver
    is_on: Callable[[], bool]
    predictor: NextGatePredictor | None = None
    loader: OnDemandLoader | None = None

    def __call__(self, block: Block) -> None:
        if not self.is_on() or block.phase not in _DECODING:
            return
        if self.loader is not None and block.ids is not None:
            self.loader.load(block.layer, np.unique(block.ids[block.ids >= 0]))
        if self.driver.plans_layers:
            self.driver.push_layer(block.layer, self.predictor.predict(block) if self.predictor is not None else None)


class OnDemandLoader:
    """Loads a layer's missing experts before the layer is computed.

    Every layer has an even share of the slots. The least recently used expert of the same layer makes room; a layer
    below its share takes slots from layers above theirs, and one that needs more than its share at once from any layer.
    Counters since the session began: needed, the distinct experts of all layers; loaded, those that were absent before
    their layer; late, those that were in flight; uncached, those without room.
    """

    def __init__(self, cache: ExpertCache) -> None:
        self._cache = cache
        shape = cache_shape(cache)
        self._last_use: NDArray[np.float32] = np.zeros((shape.n_layers, shape.n_experts), dtype=np.float32)
        self._n_blocks = 0
        self.resize()
        self.needed = self.loaded = self.late = self.uncached = 0

    def resize(self) -> None:
        """The cache has other slots now."""
        self._share = even_shares(cache_shape(self._cache))

    def load(self, layer: int, experts: NDArray[np.int32]) -> None:
        """Returns when `experts` [n] of `layer` are resident, or cannot be."""
        self._n_blocks += 1
        self._last_use[layer, experts] = self._n_blocks
        resident = self._cache.residency()
        here = resident[layer, experts]
        n_resident, n_absent = (int((here == state).sum()) for state in (Residency.RESIDENT, Residency.ABSENT))
        self.needed += experts.size
        if n_resident == experts.size:
            return
        victims = np.argwhere(resident == Residency.RESIDENT).astype(np.int32)
        utility = self._last_use[tuple(victims.T)]
        held = np.count_nonzero(resident, axis=1)
        evict_first = held > self._share if held[layer] < self._share[layer] else np.arange(held.size) == layer
        utility[~evict_first[victims[:, 0]]] += self._n_blocks  # after all of those
        self.loaded += n_absent
        self.late += experts.size - n_resident - n_absent
        self.uncached += experts.size - self._cache.demand(layer, experts, victims, utility, _TIMEOUT_S)

    def make_room(self, predicted: NDArray[np.bool_], uploads: NDArray[np.int32]) -> NDArray[np.int32]:
        """Victims int32 [m, 2] for `uploads` [n, 2], none of them predicted, the least recently used first.

        Experts `predicted`, bool [n_layers, n_experts], count as used just now (SP-MoE, section 4.4).
        """
        self._last_use[predicted] = self._n_blocks
        resident = self._cache.residency()
        coming = np.bincount(uploads[:, 0], minlength=len(resident))
        # of each layer the experts above its share, but no more in all than `uploads`
        n_evicted = np.maximum(np.count_nonzero(resident, axis=1) + coming - self._share, 0)
        last_use = np.where((resident == Residency.RESIDENT) & ~predicted, self._last_use, np.inf)
        rank = last_use.argsort(axis=1, kind="stable").argsort(axis=1)
        leaves = (rank < n_evicted[:, None]) & (last_use < np.inf)
        order = last_use[leaves].argsort(kind="stable")
        return np.asarray(np.argwhere(leaves)[order][: len(uploads)], dtype=np.int32)


def predicted_uploads(
    shape: CacheShape,
    loader: OnDemandLoader | None,
    plan: Plan,
    prediction: ExpertPrediction | None,
    layers: slice | None,
) -> Plan:
    """Keeps the uploads of a plan that were predicted, and in the layers that are planned for: a `PlanFilter`.

    A policy also brings back experts that were used, since in moeedge no transfer is waited for during a step. Where
    `loader` loads misses on demand those are resident already. loader: None where the CPU computes misses.
    """
    if loader is None and layers is None:
        return plan
    predicted = predicted_counts(prediction, shape) > 0
    keep = predicted[plan.uploads[:, 0], plan.uploads[:, 1]]
    if layers is not None:
        keep &= (plan.uploads[:, 0] >= layers.start) & (plan.uploads[:, 0] < layers.stop)
    uploads, needed = plan.uploads[keep], slice(None if keep.any() else 0)
    victims, victim_utility = plan.victims[needed], plan.victim_utility[needed]
    if loader is not None:
        victims = loader.make_room(predicted, uploads)
        victim_utility = np.arange(len(victims), dtype=np.float32)
    return replace(plan, uploads=uploads, priority=plan.priority[keep], victims=victims, victim_utility=victim_utility)


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
