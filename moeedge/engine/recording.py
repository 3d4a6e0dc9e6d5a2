"""Records the routing of a session: which experts every token of every step used, as a trace."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import moeedge
from moeedge.data.prompts import Prompt
from moeedge.engine.session import Session
from moeedge.engine.types import GenerationStats, SamplingConfig
from moeedge.errors import ContextTooSmallError, EngineError, InputError, LayerRangeError
from moeedge.llama.gguf_file import expert_bytes_by_layer, expert_tensors
from moeedge.llama.hidden_states import StateRows
from moeedge.native import Frame
from moeedge.native.abi import Phase
from moeedge.records import filled
from moeedge.run import Run
from moeedge.scheduler.native_io import routing
from moeedge.scheduler.stats import StepRecord
from moeedge.speculation import acceptance_rate
from moeedge.trace.format import Trace, TraceMeta, ids_dtype

_NO_ROUTING = "No routing was recorded: moeedge's backend computed no MoE layer of this model."


@dataclass(frozen=True)
class Recording:
    """The trace of a run, and the sums over its answers."""

    trace: Trace
    answers: int
    drafted: int
    accepted: int
    skipped: list[str]  # ids of the prompts that do not fit the context
    conversations: list[list[int]] = field(default_factory=list)  # token ids of each prompt with all its answers

    acceptance_rate = acceptance_rate


def record_routing(
    session: Session,
    prompts: Sequence[Prompt],
    *,
    n_predict: int,
    sampling: SamplingConfig,
    raw: bool = False,
    source: dict[str, Any] | None = None,
    run: Run | None = None,
) -> Recording:
    """Answers every turn of every prompt, each prompt from empty KV caches, and returns the trace of all answers.

    n_predict: tokens per answer, -1 until the model stops. raw: the text without the chat template. source: noted in
    the trace. run: cancelled between steps it ends with the steps so far; its progress is in prompts. Prompts that do
    not fit the context are skipped; raises ContextTooSmallError where none fits.
    """
    run = run or Run()
    collector = TraceCollector(_describe_run(session, n_predict, sampling, source or {}))
    model, n_tokens = session.model, 0
    answers: list[GenerationStats] = []
    skipped: list[str] = []
    conversations: list[list[int]] = []
    session.observers.append(collector)
    try:
        for index, prompt in enumerate(prompts):
            session.reset()
            messages: list[dict[str, str]] = []  # as chat templates take them
            for turn in range(len(prompt.turns)):
                messages += prompt.messages(turn)
                text = "".join(message["content"] for message in messages)
                tokens = model.tokenize(text) if raw else model.chat_tokens(messages)
                try:
                    answer = session.generate(tokens, n_predict=n_predict, sampling=sampling, run=run)
                except ContextTooSmallError:
                    if index + 1 == len(prompts) and not answers:
                        raise
                    skipped.append(prompt.id)
                    break
                if session.target.sensor is not None:
                    session.target.sensor.frames()  # drop those of an earlier answer
                collector.begin(tokens, prompt.description)
                for _ in answer.pieces():
                    run.progress.phase(f"profiling, {n_tokens + len(answer.tokens):,} tokens")
                n_tokens += len(answer.tokens)
                answers.append(answer.stats)
                if answer.stop_reason == "interrupted":
                    break
                messages.append({"role": "assistant", "content": answer.text})
            if collector.text:
                conversations.append(collector.text)
            collector.text = []
            run.progress.add()
            if run.cancelled():
                break
    finally:
        session.observers.remove(collector)
    drafted, accepted = sum(stats.drafted for stats in answers), sum(stats.accepted for stats in answers)
    return Recording(collector.trace(), len(answers), drafted, accepted, skipped, conversations)


class TraceCollector:
    """An observer for `session.observers`: turns the sensor's frames into trace rows, also of rejected drafts."""

    def __init__(self, meta: TraceMeta) -> None:
        self.meta = meta
        self._dtype = ids_dtype(meta.n_experts)
        self._sequence = -1
        self._step = 0
        self._position = 0  # of the first row of the next step
        self.text: list[int] = []  # prompt and emitted tokens of this sequence
        self._descriptions: list[dict[str, str]] = []  # by sequence
        # per graph: its rows by column, and the draft's hidden states of the first ones
        self._parts: list[tuple[dict[str, NDArray[Any]], StateRows | None]] = []

    def begin(self, prompt: list[int], description: dict[str, str] | None = None) -> None:
        """A new text starts; the observer is called with its prefill next. description: for the trace's "texts"."""
        self._sequence += 1
        self._step = self._position = 0
        self.text = list(prompt)
        self._descriptions.append(description or {})

    def __call__(self, record: StepRecord, session: Session) -> None:
        sensor = session.target.sensor
        if sensor is None:
            raise EngineError("This model has no experts: there is no routing to record.")
        frames = sensor.frames()
        if record.n_verified == 0:
            frames = [frame for frame in frames if frame.phase == Phase.PREFILL]
            n_prompt = len(self.text)
            # rows end with the prompt's last token; of a very long prompt the sensor keeps the last frames only
            start = n_prompt - sum(frame.n_tokens for frame in frames)
            self._add(frames, start, self.text[start:], n_prompt, None)
            self._position = n_prompt
        else:
            self._step += 1
            frames = [frame for frame in frames if frame.phase != Phase.PREFILL]
            batch = [self.text[self._position], *record.drafts]
            self._add(frames, self._position, batch, record.n_accepted, record.hidden_states)
            self._position += record.n_accepted + 1
        self.text.extend(record.tokens)

    def _add(
        self, frames: list[Frame], position: int, tokens: list[int], n_accepted: int, states: StateRows | None
    ) -> None:
        """Rows of the graphs of one batch, whose first token is at `position` of the text."""
        start = 0
        for frame in frames:  # more than one where the batch is larger than a graph may be
            n, stop = frame.n_tokens, start + frame.n_tokens
            ids, weights = _rows(frame, self._dtype)
            columns = {
                "ids": ids,
                "weights": weights,
                "phase": np.full(n, frame.phase, dtype=np.uint8),
                "sequence": np.full(n, self._sequence, dtype=np.int32),
                "step": np.full(n, self._step, dtype=np.int32),
                "accepted": np.arange(start, stop) <= n_accepted,
                "token": np.array(tokens[start:stop], dtype=np.int32),
                "position": np.arange(position + start, position + stop, dtype=np.int32),
            }
            self._parts.append((columns, None if states is None else states[start:stop]))
            start = stop

    def trace(self) -> Trace:
        """All rows so far. Raises EngineError where there are none."""
        if not self._parts:
            raise EngineError(_NO_ROUTING)
        names = self._parts[0][0]
        columns: dict[str, Any] = {name: np.concatenate([part[name] for part, _ in self._parts]) for name in names}
        meta = self.meta
        if any(self._descriptions):
            meta = replace(meta, parameters=meta.parameters | {"texts": self._descriptions})
        trace = Trace(meta=meta, **columns, hidden_states=self._stacked_hidden_states())
        if not trace.expert_layers():
            raise EngineError(_NO_ROUTING)
        return trace

    def _stacked_hidden_states(self) -> NDArray[np.float16] | None:
        """[n_rows, n_embd], NaN in rows without; None where no row has any."""
        width = next((states.shape[1] for _, states in self._parts if states is not None), None)
        if width is None:
            return None
        stacked = [np.full((len(part["ids"]), width), np.nan, dtype=np.float16) for part, _ in self._parts]
        for rows, (_, states) in zip(stacked, self._parts, strict=True):
            if states is not None:
                rows[: len(states)] = states
        return np.concatenate(stacked)


def _rows(frame: Frame, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[np.float16]]:
    """A frame's ids and weights as [n_tokens, n_layers, k]; the highest id and NaN where a layer saw no token."""
    ids, weights = routing(frame)
    rows = np.where(ids < 0, np.iinfo(dtype).max, ids).astype(dtype)
    return rows.transpose(1, 0, 2), np.where(ids < 0, np.nan, weights).astype(np.float16).transpose(1, 0, 2)


def _describe_run(session: Session, n_predict: int, sampling: SamplingConfig, source: dict[str, Any]) -> TraceMeta:
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
    return filled(TraceMeta, info, source=f"moeedge {moeedge.__version__} profile", parameters=parameters)


def parse_layers(text: str, n_layers: int, *, single: bool = False) -> list[int]:
    """Layers as "47", "0,5,40-47" or "all"; single: one number. Raises InputError for other text, LayerRangeError."""
    if text.strip().lower() == "all" and not single:
        return list(range(n_layers))
    chosen: list[int] = []
    for part in [text] if single else text.split(","):
        match = re.fullmatch(r"\s*(-?\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part, flags=re.ASCII)
        if single and (match is None or match[2]):
            raise InputError(f'--layer takes one layer, not "{text}".', "Use --layers for a list or for all.")
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
    """A list of layers as text: "1-26" or "0, 2, 4-6"."""
    runs = np.split(np.asarray(layers), np.flatnonzero(np.diff(layers) != 1) + 1) if layers else []
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def unseen_layers(session: Session) -> str:
    """A sentence about the layers whose routing is not recorded, since llama.cpp computes them on a GPU; else empty."""
    model = session.model
    unseen = [layer for layer in model.info.expert_layers if layer not in model.host_expert_layers]
    if not unseen:
        return ""
    return f"The routing of layers {describe_layers(unseen)} is not recorded: they are entirely on the GPU."


def check_layers(session: Session, layers: Sequence[int]) -> list[int]:
    """The layers of `layers` with experts in host memory, in order. Raises LayerRangeError where there is none."""
    info = session.model.info
    if info.n_experts == 0:
        raise LayerRangeError(
            f"{session.info.model} is a dense model: it has no experts whose use could be profiled.",
            "Give a Mixture-of-Experts model with -m FILE.gguf.",
        )
    with_experts = [layer for layer in layers if check_layer(layer, info.n_layers) in info.expert_layers]
    if not with_experts:
        missing = f"Layer {layers[0]} has" if len(layers) == 1 else "These layers have"
        others = describe_layers(list(info.expert_layers))
        raise LayerRangeError(f"{missing} no experts; the layers with experts are {others}.")
    seen = [layer for layer in with_experts if layer in session.model.host_expert_layers]
    if not seen:
        raise LayerRangeError(unseen_layers(session), "Leave out -ncmoe, or choose -dev none.")
    return seen
