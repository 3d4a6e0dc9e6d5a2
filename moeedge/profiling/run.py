"""Answer prompts with a session while its routing is written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import moeedge
from moeedge.engine.expert_tensors import expert_bytes_by_layer, expert_tensors
from moeedge.engine.session import Session
from moeedge.engine.turn import Answer
from moeedge.engine.types import SamplingConfig
from moeedge.errors import ContextTooSmallError, LayerRangeError
from moeedge.profiling.collector import TraceCollector, describe
from moeedge.profiling.layers import check_layer, describe_layers
from moeedge.trace import Trace, TraceMeta

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
            answer = Answer(self.session, prompt, n_predict=n_predict, sampling=sampling, cancel=self.cancel)
            if self.session.target.sensor is not None:
                self.session.target.sensor.frames()  # of an earlier answer: not ours
            self.collector.begin(prompt)
            told = 0
            for _ in answer:
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
