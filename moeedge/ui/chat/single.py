"""One answer: its text as it is generated, with its figures; or one JSON object (moeedge chat -o json).

Units in the keys of the JSON: _ts tokens per second, _s seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console

from moeedge.engine.answer import Generation
from moeedge.engine.budgets import budget_record
from moeedge.engine.session import Session
from moeedge.engine.types import EngineInfo, GenerationStats, SamplingConfig
from moeedge.llama.chat_template import MODEL_TEMPLATE, TemplateChoice
from moeedge.scheduler.stats import PlacementStats
from moeedge.ui import figures
from moeedge.ui.chat.answer_figures import answer_rows, turn_line
from moeedge.ui.chat.interrupt import Interrupt
from moeedge.ui.chat.live import LiveView
from moeedge.ui.chat.panel import CacheMeter
from moeedge.ui.chat.settings import Look, Settings
from moeedge.ui.chat.stream import PlainView
from moeedge.ui.chat.thinking import FoldedThinking, ThinkingSplitter
from moeedge.ui.console import say, show_figures, supports_panel, typing_hidden
from moeedge.ui.tables import json_text

_FULL = "-c N makes it larger, --context-shift drops the older half and goes on."


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
    drop_typing: bool = False,
) -> Iterator[LiveView | PlainView]:
    """Shows the pieces that are written to it on `out`, above a live panel where `panel` asks for one.

    drop_typing: what is typed meanwhile does not become the next message.
    """
    tags = answer.reasoning_tags
    splitter = None if tags is None else ThinkingSplitter(tags, is_open=answer.begins_in_reasoning)
    folds = look.show_thinking == "off" or (look.show_thinking == "auto" and out.is_terminal)
    folded = FoldedThinking(splitter, lambda: answer.stats.generated_tokens) if splitter is not None and folds else None
    view: LiveView | PlainView = PlainView(out, folded)
    if panel and supports_panel(out.file, columns=out.width, rows=out.height):
        progress = partial(prompt_progress, answer)
        view = LiveView(out, info, lambda: answer.stats, interrupt, meter, progress, look, folded or splitter)
    with meter, typing_hidden(drop=drop_typing), view:
        yield view


def prompt_progress(answer: Generation) -> tuple[int, int]:
    """Tokens of the prompt that are decoded so far, and all that the KV cache did not hold."""
    state, n_prompt = answer.state, answer.stats.prompt_tokens
    if state.n_cached is None:  # not looked up yet
        return 0, n_prompt
    return max(state.target.n_past - state.n_cached, 0), n_prompt - state.n_cached


def print_turn(
    err: Console, answer: Generation, info: EngineInfo, meter: CacheMeter, look: Look, *, full: str = _FULL
) -> None:
    """The figures of a finished answer, then its notes. A lossy budget is named also without figures.

    full: what to do where the context is full.
    """
    reason = answer.stop_reason or "interrupted"
    if look.stats == "full":
        show_figures(err, answer_rows(info, answer.stats, reason, meter()), style="dim")
    elif look.stats == "line":
        say(err, turn_line(info, answer.stats, reason, meter()))
    elif info.expert_budget is not None:
        say(err, figures.budget(info))
    print_notes(err, answer, meter, full=full)


def print_notes(err: Console, answer: Generation, meter: CacheMeter, *, full: str = _FULL) -> None:
    """What happened to the context and to the device during the answer; full: as of `print_turn`."""
    for note in answer.notes:
        say(err, note)
    if answer.stop_reason == "context":
        say(err, full)
    for note in meter.notes:
        say(err, note, style="yellow")


def answer_report(
    answer: Generation,
    info: EngineInfo,
    sampling: SamplingConfig,
    cache: PlacementStats | None = None,
    template: TemplateChoice = MODEL_TEMPLATE,
) -> dict[str, Any]:
    """The JSON object of one answer; `cache` counts its decoding. template: of its prompt."""
    drawn = asdict(sampling)
    del drawn["seed"]  # the statistics name it, also a random one
    return {
        "text": answer.text,
        "tokens": list(answer.tokens),
        "prompt_tokens": answer.stats.prompt_tokens,
        "stop_reason": answer.stop_reason or "interrupted",
        "stats": stats_report(answer.stats, info, cache) | drawn | {"template": asdict(template)},
    }


# keys of the JSON object that are fields or properties of the statistics, and those of the session's info
_STATS_KEYS = (
    *("pp_ts", "tg_ts", "ttft_s", "steps", "drafted", "accepted", "acceptance_rate", "tokens_per_step"),
    *("drafts_per_step", "ngram_steps", "context_shifts", "dropped_tokens", "experts_per_verification", "seed"),
    *("cached_tokens", "prefill_tokens", "generated_tokens", "prefill_s", "decode_s", "draft_s", "verify_s"),
    *("observe_s", "sense_s", "overhead_share", "experts_natural", "kept_probability"),
)
_INFO_KEYS = (
    *("device", "cache_ratio", "cache_slots", "pool_bytes", "vram_bytes", "gamma", "draft", "policy", "model"),
    *("auto_gamma", "architecture", "n_ctx"),
)


def stats_report(stats: GenerationStats, info: EngineInfo, cache: PlacementStats | None = None) -> dict[str, Any]:
    """The figures of one answer and what it ran on; None where a figure is not known."""
    return {
        **{key: getattr(stats, key) for key in _STATS_KEYS},
        **{key: getattr(info, key) for key in _INFO_KEYS},
        "draft_choice": None if stats.choice is None else asdict(stats.choice),
        "layers": info.n_layers,
        "expert_layers": info.n_expert_layers,
        "whole_layers": info.n_whole_layers,
        "experts": info.n_experts,
        "experts_used": info.n_expert_used,
        "threads": info.n_threads,
        "hit_rate_pairs": None if cache is None else cache.hit_rate_pairs,
        "placement": None if cache is None else cache.to_dict(),
        "experts_max": stats.experts_max if stats.budgeted_steps else None,
        **budget_record(info.expert_budget, gamma=info.gamma),
        "notes": list(info.notes),
    }


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
    """Generate the answer to the prompt's tokens; the answer goes to `out`, its figures to `err`.

    Returns the exit code: 0, or 128 + the signal that stopped the answer, whose beginning is printed.
    """
    with Interrupt() as interrupt:
        interrupt.arm()
        answer = session.generate(prompt, n_predict=settings.n_predict, sampling=settings.sampling, cancel=interrupt)
        meter = CacheMeter(session)
        try:
            if as_json:
                with meter:
                    for _ in answer.pieces():
                        pass
            else:
                with answer_view(
                    answer, session.info, meter, interrupt, out=out, look=settings.look, panel=panel
                ) as view:
                    for piece in answer.pieces():
                        view.write(piece)
        except KeyboardInterrupt:  # a second signal, between two steps
            answer.close()
        if as_json:
            report = answer_report(answer, session.info, settings.sampling, meter(), session.template)
            out.file.write(json_text(report, indent=None))
            out.file.flush()
            print_notes(err, answer, meter)
        else:
            print_turn(err, answer, session.info, meter, settings.look)
        code = interrupt.exit_code
        if code == 0:
            session.measure_postponed(interrupt)
            code = interrupt.exit_code if interrupt.ending else 0
        return code
