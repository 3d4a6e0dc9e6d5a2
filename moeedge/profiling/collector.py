"""Writes down the routing of every step of a session: an observer that turns the sensor's frames into trace rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import EngineError
from moeedge.trace import PREFILL, Trace, TraceMeta, ids_dtype

if TYPE_CHECKING:
    from moeedge.engine.session import Session
    from moeedge.engine.types import EngineInfo, StepRecord
    from moeedge.native import Frame


_NOTHING = "No routing was recorded: moeedge's backend saw no MoE layer of this model at work."


def describe(info: EngineInfo, source: str, parameters: dict[str, Any] | None = None) -> TraceMeta:
    """What a session's traces are of; source: the command that makes them."""
    return TraceMeta(
        model=info.model,
        architecture=info.architecture,
        n_layers=info.n_layers,
        n_experts=info.n_experts,
        n_experts_used=info.n_experts_used,
        gamma=info.gamma,
        draft=info.draft,
        source=source,
        parameters=parameters or {},
    )


class TraceCollector:
    """Register an instance in `session.observers`, call `begin` before every answer, `trace` at the end.

    The first token of a verification batch is the one emitted last, then come the drafts, of which `n_accepted` became
    text. Rows keep the vocabulary ids of all of them, refused drafts included.
    """

    def __init__(self, meta: TraceMeta) -> None:
        self.meta = meta
        self._dtype = ids_dtype(meta.n_experts)
        self._sequence = -1
        self._step = 0
        self._position = 0  # of the first row of the next step
        self._text: list[int] = []  # prompt and emitted tokens of this sequence
        self._states: list[
            tuple[int, NDArray[np.float32] | None]
        ] = []  # rows, and the draft's states of the first ones
        self._columns: dict[str, list[NDArray[Any]]] = {
            name: [] for name in ("ids", "weights", "phase", "sequence", "step", "accepted", "token", "position")
        }

    @property
    def n_steps(self) -> int:
        """Steps recorded in the present sequence."""
        return self._step

    def begin(self, prompt: list[int]) -> None:
        """A new text starts; the observer is told of its prefill next."""
        self._sequence += 1
        self._step = 0
        self._position = 0
        self._text = list(prompt)

    def __call__(self, record: StepRecord, session: Session) -> None:
        """Take the frames of the step that just ran."""
        sensor = session.target.sensor
        if sensor is None:
            raise EngineError("This model has no experts: there is no routing to record.")
        frames = sensor.frames()
        if record.n_verified == 0:
            self._take_prefill(frames)
        else:
            self._step += 1
            self._take_step(frames, record)
        self._text.extend(record.tokens)

    def _take_prefill(self, frames: list[Frame]) -> None:
        """The rows end with the prompt's last token; the ring keeps only the last frames of a very long one."""
        frames = [frame for frame in frames if frame.phase == PREFILL]
        n_prompt = len(self._text)
        start = n_prompt - sum(frame.n_tokens for frame in frames)
        for frame in frames:
            stop = start + frame.n_tokens
            self._append(frame, start, self._text[start:stop], np.ones(frame.n_tokens, dtype=np.bool_))
            start = stop
        self._position = n_prompt

    def _take_step(self, frames: list[Frame], record: StepRecord) -> None:
        frames = [frame for frame in frames if frame.phase != PREFILL]
        batch = [self._text[self._position], *record.drafts]
        accepted = np.arange(len(batch)) <= record.n_accepted
        start = 0
        for frame in frames:  # more than one where the batch is larger than a graph may be
            stop = start + frame.n_tokens
            states = None if record.states is None else record.states[start:stop]
            self._append(frame, self._position + start, batch[start:stop], accepted[start:stop], states)
            start = stop
        self._position += record.n_accepted + 1

    def _append(
        self,
        frame: Frame,
        position: int,
        tokens: list[int],
        accepted: NDArray[np.bool_],
        states: NDArray[np.float32] | None = None,
    ) -> None:
        """Rows of one graph, whose first token lies at `position` of the text."""
        n_tokens = frame.n_tokens
        ids, weights = _rows(frame, self._dtype)
        values: tuple[NDArray[Any], ...] = (
            ids,
            weights,
            np.full(n_tokens, frame.phase, dtype=np.uint8),
            np.full(n_tokens, self._sequence, dtype=np.int32),
            np.full(n_tokens, self._step, dtype=np.int32),
            accepted,
            np.array(tokens, dtype=np.int32),
            np.arange(position, position + n_tokens, dtype=np.int32),
        )
        for name, value in zip(self._columns, values, strict=True):
            self._columns[name].append(value)
        self._states.append((n_tokens, states))

    def trace(self) -> Trace:
        """Everything so far. Raises EngineError where nothing was recorded."""
        if not self._columns["ids"]:
            raise EngineError(_NOTHING)
        columns: dict[str, Any] = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        trace = Trace(meta=self.meta, **columns, states=self._all_states())
        if not trace.expert_layers():
            raise EngineError(_NOTHING)
        return trace

    def _all_states(self) -> NDArray[np.float16] | None:
        """[T, d], NaN where there are none; None where there are none at all."""
        width = next((states.shape[1] for _, states in self._states if states is not None), 0)
        if width == 0:
            return None
        whole = np.full((sum(n for n, _ in self._states), width), np.nan, dtype=np.float16)
        first = 0
        for n, states in self._states:
            if states is not None:
                whole[first : first + len(states)] = states
            first += n
        return whole


def _rows(frame: Frame, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[np.float16]]:
    """Copies of a frame's ids and weights as [n_tokens, n_layers, k], blank where a layer did not see a token."""
    n_tokens = frame.n_tokens
    ids = np.full(frame.ids.shape, np.iinfo(dtype).max, dtype=dtype)
    weights = np.full(frame.weights.shape, np.nan, dtype=np.float16)
    whole = frame.layer_tokens == n_tokens
    ids[whole] = frame.ids[whole]
    weights[whole] = frame.weights[whole]
    for layer in np.flatnonzero(~whole & (frame.layer_tokens > 0)):
        # a layer that saw fewer tokens saw the last ones: llama.cpp keeps the rows whose logits were asked for
        n_seen = int(frame.layer_tokens[layer])
        ids[layer, n_tokens - n_seen :] = frame.ids[layer, :n_seen]
        weights[layer, n_tokens - n_seen :] = frame.weights[layer, :n_seen]
    return ids.transpose(1, 0, 2), weights.transpose(1, 0, 2)
