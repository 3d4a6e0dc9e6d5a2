"""One answer with its figures: its text as it is generated, or one JSON object (_ts tokens per second, _s seconds)."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from moeedge.engine.answer import Generation
from moeedge.engine.session import Session
from moeedge.engine.types import EngineInfo, GenerationStats, SamplingConfig, StopReason
from moeedge.hardware.provenance import Provenance, read_provenance
from moeedge.llama.reasoning import TemplateChoice
from moeedge.policies.expert_budget import BudgetFacts, budget_record
from moeedge.records import as_dict, figure, filled, stored
from moeedge.run import Notify, Run, ignore
from moeedge.scheduler.governor import DraftChoice
from moeedge.scheduler.stats import PlacementStats, StepRecord
from moeedge.ui import figures
from moeedge.ui.chat.interrupt import Interrupt
from moeedge.ui.chat.live import LiveView
from moeedge.ui.chat.settings import Look, Settings
from moeedge.ui.chat.stream import PlainView, ThinkingSplitter
from moeedge.ui.console import say, show_figures, supports_panel, typing_hidden
from moeedge.ui.figures import FigureRow, answer_rows, live_figures, turn_line
from moeedge.ui.tables import json_text

# sums of which the JSON object has rates
_SUMS = ("experts_sum", "experts_natural_sum", "kept_probability_sum", "budgeted_steps")
_FULL = "-c N makes it larger, --context-shift drops the older half and goes on."


class CacheMeter:
    """A context manager around one answer; a call returns the counters since its first token, None without a cache.

    Any thread may call: the decoding thread reads the session between its steps, at most every `interval_s` seconds.
    `notes` collects the session's notifications, such as a lost device, to be shown after the answer.
    """

    def __init__(self, session: Session, interval_s: float = 0.25) -> None:
        self._session, self._interval_s, self._read_s = session, interval_s, 0.0
        self.notes: list[str] = []
        self._show: Notify = ignore  # the session's, while this one takes its place
        self._start: PlacementStats | None = None
        self._newest: PlacementStats | None = None

    def __call__(self) -> PlacementStats | None:
        start, newest = self._start, self._newest
        return None if start is None or newest is None else newest - start

    def __enter__(self) -> CacheMeter:
        self._show = self._session.run.show
        self._session.run.show = self.notes.append
        self._start = self._newest = self._session.placement_stats()
        if self._start is not None:
            self._session.observers.append(self._observe)
        return self

    def __exit__(self, *error: object) -> None:
        self._session.run.show = self._show
        if self._start is not None:
            self._session.observers.remove(self._observe)
            self._newest = self._session.placement_stats()

    def _observe(self, record: StepRecord, session: Session) -> None:
        now_s, prompt_read = time.perf_counter(), record.n_verified == 0
        if prompt_read or now_s - self._read_s >= self._interval_s:
            self._read_s, self._newest = now_s, session.placement_stats()
            self._start = self._newest if prompt_read else self._start


@contextmanager
def answer_view(
    answer: Generation,
    info: EngineInfo,
    meter: CacheMeter,
    interrupt: Interrupt,
    *,
    out: Console,
    look: Look,
    panel: bool,
    drop: bool = False,
) -> Iterator[LiveView | PlainView]:
    """Shows pieces on `out`, with `panel` above a live panel. drop: what is typed meanwhile is discarded."""
    folds = look.show_thinking == "off" or (look.show_thinking == "auto" and out.is_terminal)
    n_tokens = (lambda: answer.stats.generated_tokens) if folds else None
    thinking = ThinkingSplitter(answer.reasoning_tags, is_open=answer.begins_in_reasoning, n_tokens=n_tokens)
    view: LiveView | PlainView = PlainView(out, thinking if folds else None)
    start_s = time.monotonic()

    def shown() -> list[FigureRow]:
        n_prompt, n_cached = answer.stats.prompt_tokens, answer.state.n_cached
        read = 0, n_prompt
        if n_cached is not None:  # looked up: without what the KV cache held
            read = max(answer.state.target.n_past - n_cached, 0), n_prompt - n_cached
        elapsed_s, full = time.monotonic() - start_s, look.stats == "full"
        return live_figures(info, answer.stats, meter(), read=read, elapsed_s=elapsed_s, full=full)

    if panel and supports_panel(out):
        view = LiveView(out, shown, interrupt, look, thinking)
    with meter, typing_hidden(drop=drop), view:
        yield view


def print_turn(
    err: Console, answer: Generation, info: EngineInfo, meter: CacheMeter, look: Look, *, full: str = _FULL
) -> None:
    """The figures of a finished answer, at least a lossy budget, then its notes. full: advice for a full context."""
    if look.stats == "full":
        show_figures(err, answer_rows(info, answer.stats, answer.stop_reason, meter()), style="dim")
    elif look.stats == "line":
        say(err, turn_line(info, answer.stats, answer.stop_reason, meter()))
    elif info.expert_budget is not None:
        say(err, figures.budget(info))
    print_notes(err, answer, meter, full=full)


def print_notes(err: Console, answer: Generation, meter: CacheMeter, *, full: str = _FULL) -> None:
    """Notes on the context and the device during the answer; full: as of `print_turn`."""
    for note in answer.notes:
        say(err, note)
    if answer.stop_reason == "context":
        say(err, full)
    for note in meter.notes:
        say(err, note, style="yellow")


@dataclass(frozen=True, kw_only=True)
class AnswerFacts:
    """The figures of one answer, what it ran on, and how it was drawn."""

    answer: GenerationStats = figure("", prefix="", without=("prompt_tokens", *_SUMS, "experts_max"))
    info: EngineInfo = figure("", prefix="")
    draft_choice: DraftChoice | None = figure("The last choice of the draft length; null where it is fixed")
    hit_rate_pairs: float | None = stored(PlacementStats, "hit_rate_pairs")
    placement: PlacementStats | None = figure("Counters of expert placement, from the first token on", default=None)
    experts_max: int | None = stored(GenerationStats, "experts_max")
    budget: BudgetFacts = figure("", prefix="")
    sampling: SamplingConfig = figure("", prefix="")
    template: TemplateChoice = figure("The chat template of the prompt")


@dataclass(frozen=True, kw_only=True)
class AnswerRecord:
    """One answer of a chat; keys whose value is null are left out."""

    text: str = figure("The answer as the model wrote it, its thinking included")
    tokens: list[int] = figure("Ids of its tokens, without a stop token")
    prompt_tokens: int = figure("Tokens of the prompt")
    stop_reason: StopReason = figure(
        "Why it ended: eos: by itself; stop: at a text of --stop; length: at -n tokens; context: the context is full; "
        "interrupted: by a signal"
    )
    stats: AnswerFacts = figure("Figures of the answer, what it ran on, and how it was drawn")
    provenance: Provenance = figure("Versions, machine, model and time")


def answer_report(
    answer: Generation, session: Session, sampling: SamplingConfig, cache: PlacementStats | None
) -> dict[str, Any]:
    """The JSON object of one answer, an AnswerRecord; `cache` counts its decoding."""
    stats, info = answer.stats, session.info
    facts = AnswerFacts(
        answer=stats,
        info=info,
        draft_choice=stats.choice,
        hit_rate_pairs=None if cache is None else cache.hit_rate_pairs,
        placement=cache,
        experts_max=stats.experts_max if stats.budgeted_steps else None,
        budget=BudgetFacts(**budget_record(info.expert_budget, gamma=info.gamma)),
        sampling=sampling,
        template=session.template,
    )
    provenance = read_provenance(session.model.path)
    record = filled(AnswerRecord, stats, answer, tokens=list(answer.tokens), stats=facts, provenance=provenance)
    return as_dict(record, nulls=False)


def answer_once(
    session: Session,
    prompt: Sequence[int],
    settings: Settings,
    *,
    as_json: bool,
    panel: bool,
    out: Console,
    err: Console,
) -> int:
    """Generate the answer to the tokens; the answer goes to `out`, its figures to `err`. Returns the exit code."""
    with Interrupt(armed=True) as interrupt:
        run = Run(cancelled=interrupt)
        answer = session.generate(prompt, n_predict=settings.n_predict, sampling=settings.sampling, run=run)
        meter, look = CacheMeter(session), settings.look
        shown = Console(file=io.StringIO()) if as_json else out
        try:
            with answer_view(answer, session.info, meter, interrupt, out=shown, look=look, panel=panel) as view:
                for piece in answer.pieces():
                    view.write(piece)
        except KeyboardInterrupt:  # a second signal, between two steps
            answer.close()
        if as_json:
            report = answer_report(answer, session, settings.sampling, meter())
            out.file.write(json_text(report, indent=None))
            out.file.flush()
            print_notes(err, answer, meter)
        else:
            print_turn(err, answer, session.info, meter, look)
        if interrupt.exit_code:
            return interrupt.exit_code
        session.measure_postponed(run)
        return interrupt.exit_code if interrupt.ending else 0
