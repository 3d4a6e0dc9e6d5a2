"""Native objects of a StepDriver: the sensor's frames as observations, the expert cache as the store of its plans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import count_ids
from moeedge.native import ActivationCapture, CaptureFlags, Frame, Sensor
from moeedge.native.abi import Phase
from moeedge.native.cache import ExpertCache
from moeedge.native.sensor import Counts
from moeedge.policies.base import CacheShape, Observation, Plan


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
