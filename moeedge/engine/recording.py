"""Which layers to look at: "47", "0,5,40-47" or "all", checked against the model.

Writes down the routing of every step of a session: an observer that turns the sensor's frames into trace rows.

Answer prompts with a session while its routing is written down.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import EngineError, InputError, LayerRangeError
from moeedge.native.abi import Phase
from moeedge.trace.format import Trace, TraceMeta, ids_dtype

if TYPE_CHECKING:
    from moeedge.engine.session import Session
    from moeedge.engine.types import EngineInfo
    from moeedge.native import Frame
    from moeedge.scheduler.stats import StepRecord
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import moeedge
from moeedge.engine.session import Session
from moeedge.engine.types import SamplingConfig
from moeedge.errors import ContextTooSmallError
from moeedge.llama.gguf_file import expert_bytes_by_layer, expert_tensors


def parse_layers(text: str, n_layers: int, *, single: bool = False) -> list[int]:
    """Layer indices in the order named, without repetition; "all" is every layer. `single`: one number only.

    Raises InputError for what is no list of layers, LayerRangeError for a layer outside 0..n_layers-1.
    """
    if single:
        if re.fullmatch(r"\s*-?\d{1,9}\s*", text, flags=re.ASCII) is None:
            raise InputError(f'--layer takes one layer, not "{text}".', "Use --layers for a list or for all.")
        return [check_layer(int(text), n_layers)]
    if text.strip().lower() == "all":
        return list(range(n_layers))
    chosen: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(-?\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part, flags=re.ASCII)
        if match is None:
            raise InputError(f'"{text}" is not a list of layers.', 'Write it as 47, as 0,5,40-47 or as "all".')
        first = check_layer(int(match[1]), n_layers)
        last = first if match[2] is None else check_layer(int(match[2]), n_layers)
        if last < first:
            raise InputError(f'The range "{part.strip()}" runs backwards.', f"Write it as {last}-{first}.")
        chosen.extend(range(first, last + 1))
    return list(dict.fromkeys(chosen))


def check_layer(layer: int, n_layers: int) -> int:
    """`layer` itself. Raises LayerRangeError, with the valid range, where the model has no such layer."""
    if not 0 <= layer < n_layers:
        valid = f"0 to {n_layers - 1}" if n_layers > 1 else "0 only"
        raise LayerRangeError(f"Layer {layer} does not exist: this model's layers are {valid}.")
    return layer


def describe_layers(layers: list[int]) -> str:
    """A list of layers as people write it: "1-26" or "0, 2, 4-6"."""
    parts: list[str] = []
    start = 0
    for i, layer in enumerate(layers):
        if i + 1 == len(layers) or layers[i + 1] != layer + 1:
            parts.append(str(layer) if start == i else f"{layers[start]}-{layer}")
            start = i + 1
    return ", ".join(parts)


_NOTHING = "No routing was recorded: moeedge's backend saw no MoE layer of this model at work."


def describe(info: EngineInfo, source: str, parameters: dict[str, Any] | None = None) -> TraceMeta:
    """What a session's traces are of; source: the command that makes them."""
    return TraceMeta(
        model=info.model,
        architecture=info.architecture,
        n_layers=info.n_layers,
        n_experts=info.n_experts,
        n_expert_used=info.n_expert_used,
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
        frames = [frame for frame in frames if frame.phase == Phase.PREFILL]
        n_prompt = len(self._text)
        start = n_prompt - sum(frame.n_tokens for frame in frames)
        for frame in frames:
            stop = start + frame.n_tokens
            self._append(frame, start, self._text[start:stop], np.ones(frame.n_tokens, dtype=np.bool_))
            start = stop
        self._position = n_prompt

    def _take_step(self, frames: list[Frame], record: StepRecord) -> None:
        frames = [frame for frame in frames if frame.phase != Phase.PREFILL]
        batch = [self._text[self._position], *record.drafts]
        accepted = np.arange(len(batch)) <= record.n_accepted
        start = 0
        for frame in frames:  # more than one where the batch is larger than a graph may be
            stop = start + frame.n_tokens
            hidden_states = None if record.hidden_states is None else record.hidden_states[start:stop]
            self._append(frame, self._position + start, batch[start:stop], accepted[start:stop], hidden_states)
            start = stop
        self._position += record.n_accepted + 1

    def _append(
        self,
        frame: Frame,
        position: int,
        tokens: list[int],
        accepted: NDArray[np.bool_],
        hidden_states: NDArray[np.float32] | None = None,
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
        self._states.append((n_tokens, hidden_states))

    def trace(self) -> Trace:
        """Everything so far. Raises EngineError where nothing was recorded."""
        if not self._columns["ids"]:
            raise EngineError(_NOTHING)
        columns: dict[str, Any] = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        trace = Trace(meta=self.meta, **columns, hidden_states=self._all_states())
        if not trace.expert_layers():
            raise EngineError(_NOTHING)
        return trace

    def _all_states(self) -> NDArray[np.float16] | None:
        """[T, d], NaN where there are none; None where there are none at all."""
        width = next((hidden_states.shape[1] for _, hidden_states in self._states if hidden_states is not None), 0)
        if width == 0:
            return None
        whole = np.full((sum(n for n, _ in self._states), width), np.nan, dtype=np.float16)
        first = 0
        for n, hidden_states in self._states:
            if hidden_states is not None:
                whole[first : first + len(hidden_states)] = hidden_states
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


Messages = list[dict[str, str]]  # role and content, as chat templates take them


@dataclass(frozen=True)
class Question:
    """A conversation to be answered turn by turn; `turns[i]` are the messages added before the i-th answer."""

    name: str
    turns: tuple[Messages, ...]

    @classmethod
    def single(cls, text: str) -> Question:
        """One message of the user."""
        return cls("prompt", ([{"role": "user", "content": text}],))


@dataclass(frozen=True)
class Recording:
    """What a run gave."""

    trace: Trace
    answers: int
    steps: int
    drafted: int
    accepted: int
    skipped: list[str]  # questions that do not fit the context

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of drafted tokens; None without drafts."""
        return self.accepted / self.drafted if self.drafted else None


def check_layers(session: Session, layers: Sequence[int]) -> list[int]:
    """The layers of `layers` that have experts, in order.

    Raises LayerRangeError for a dense model, for a layer that does not exist, and where no layer is left.
    """
    info = session.model.info
    if info.n_experts == 0:
        raise LayerRangeError(
            f"{session.info.model} is a dense model, no experts: there is no routing to profile.",
            "Name a Mixture-of-Experts model with -m FILE.gguf.",
        )
    kept = [layer for layer in layers if check_layer(layer, info.n_layers) in info.expert_layers]
    if not kept:
        missing = f"Layer {layers[0]} has" if len(layers) == 1 else "These layers have"
        with_experts = describe_layers(list(info.expert_layers))
        raise LayerRangeError(f"{missing} no experts; the layers with experts are {with_experts}.")
    return kept


def record_routing(
    session: Session,
    questions: Sequence[Question],
    *,
    n_predict: int,
    sampling: SamplingConfig,
    raw: bool = False,
    source: dict[str, Any] | None = None,
    command: str = "profile",
    cancel: Callable[[], bool] = lambda: False,
    on_step: Callable[[int, int], None] = lambda _question, _tokens: None,
) -> Recording:
    """Answer every turn of every question, starting each with empty KV caches, and return the trace of all of it.

    n_predict: tokens per answer, -1 until the model stops. raw: the text as it is, without the chat template. source
    and command: noted in the trace. cancel: asked between steps, True ends the run with what there is. on_step: told
    the index of the question and the number of tokens that its step emitted. Questions that do not fit the context are
    skipped and named, unless none fits: then ContextTooSmallError is raised.
    """
    run = _Run(session, TraceCollector(_describe(session, n_predict, sampling, source or {}, command)), cancel, on_step)
    session.observers.append(run.collector)
    try:
        for index, question in enumerate(questions):
            session.reset()
            try:
                run.answer(index, question, n_predict, sampling, raw)
            except ContextTooSmallError:
                if index + 1 == len(questions) and run.answers == 0:
                    raise
                run.skipped.append(question.name)
            if cancel():
                break
    finally:
        session.observers.remove(run.collector)
    return Recording(run.collector.trace(), run.answers, run.steps, run.drafted, run.accepted, run.skipped)


@dataclass
class _Run:
    """A Recording while it is made."""

    session: Session
    collector: TraceCollector
    cancel: Callable[[], bool]
    on_step: Callable[[int, int], None]
    answers: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    skipped: list[str] = field(default_factory=list)

    def answer(self, index: int, question: Question, n_predict: int, sampling: SamplingConfig, raw: bool) -> None:
        """All turns of one question."""
        model = self.session.model
        messages: Messages = []
        for turn in question.turns:
            messages += turn
            text = "".join(message["content"] for message in messages) if raw else model.render_chat(messages)
            prompt = model.tokenize(text)
            answer = self.session.generate(prompt, n_predict=n_predict, sampling=sampling, cancel=self.cancel)
            if self.session.target.sensor is not None:
                self.session.target.sensor.frames()  # of an earlier answer: not ours
            self.collector.begin(prompt)
            told = 0
            for _ in answer.pieces():
                self.on_step(index, len(answer.tokens) - told)
                told = len(answer.tokens)
            self.answers += 1
            self.steps += answer.stats.steps
            self.drafted += answer.stats.drafted
            self.accepted += answer.stats.accepted
            if answer.stop_reason == "interrupted":
                return
            messages.append({"role": "assistant", "content": answer.text})


def _describe(
    session: Session, n_predict: int, sampling: SamplingConfig, source: dict[str, Any], command: str
) -> TraceMeta:
    info = session.info
    tensors, _ = expert_tensors(session.model.path)
    parameters = source | {
        "n_predict": n_predict,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "n_ctx": info.n_ctx,
        "n_threads": info.n_threads,
        "expert_bytes": expert_bytes_by_layer(tensors, info.n_layers),
    }
    return describe(info, f"moeedge {moeedge.__version__} {command}", parameters)
