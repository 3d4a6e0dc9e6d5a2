"""The start of a session on screen: the chat's greeting, one line for a single answer, and the details of /info."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from moeedge import __version__
from moeedge.notifications import Level, Notification, is_warning
from moeedge.ui import figures
from moeedge.ui.console import say
from moeedge.ui.figures import Figure, device_name, percent
from moeedge.units import format_bytes

if TYPE_CHECKING:
    from moeedge.engine.types import EngineInfo

_TOY = "a toy model trained on synthetic text"
_KEYS = "Type a message. /help lists the commands, /info the details; Ctrl-D leaves."


def print_greeting(console: Console, info: EngineInfo, *, toy: bool, warnings: Sequence[str] = ()) -> None:
    """Four lines (model, draft, experts, keys), one for an expert budget and per notice, then a line per warning."""
    choices = [line for line in (info.layers, _budget_line(info), *_notices_of(info)) if line]
    for line in (_model_line(info, toy=toy), _draft_line(info), _experts_line(info), *choices, _KEYS):
        say(console, line)
    for warning in [*warnings, *warnings_of(info)]:
        say(console, warning, style="yellow")


def print_header(console: Console, info: EngineInfo, *, toy: bool, warnings: Sequence[str] = ()) -> None:
    """One line about a session that gives a single answer or a profile, then a line per choice, notice and warning."""
    say(console, header_line(info, toy=toy))
    if info.layers:
        say(console, info.layers)
    for notice in _notices_of(info):
        say(console, notice)
    for warning in [*warnings, *warnings_of(info)]:
        say(console, warning, style="yellow")


def header_line(info: EngineInfo, *, toy: bool = False) -> str:
    """Model, draft and place of the experts in one line."""
    model = f"{info.model}, {_TOY}" if toy else info.model
    if info.n_experts == 0:
        place = "no experts"
    elif info.n_whole_layers == info.n_expert_layers:
        place = "experts on the GPU"
    elif info.cache_slots:
        place = f"{_cached(info)} experts {_place(info)}, policy {info.policy}"
    elif info.n_whole_layers:
        place = f"experts of {info.n_expert_layers - info.n_whole_layers} layers on the CPU"
    else:
        place = f"experts on the CPU, {figures.device(info)}"
    drafts = _speculates(info)
    budget = [figures.budget(info)] if info.expert_budget is not None else []
    return figures.join_parts([model, f"draft {_draft(info)}" if drafts else _draft(info), *budget, place])


def details(info: EngineInfo) -> list[Figure]:
    """What is loaded and where it runs, as labels and values."""
    rows = [
        Figure("moeedge", __version__),
        Figure("model", f"{info.model} ({info.architecture})"),
        Figure("experts", _expert_shape(info)),
        Figure("draft", _draft(info)),
        Figure("device", figures.device(info)),
    ]
    if info.expert_budget is not None:
        budget = info.expert_budget
        rows.append(Figure("budget", f"{figures.budget(info)}, ranking {budget.ranking}, {budget.coverage}"))
    if info.cache_slots:
        slots = f"{_cached(info)} experts ({info.cache_ratio:.1%}, {format_bytes(info.pool_bytes)})"
        rows += [Figure("cache", slots), Figure("policy", info.policy)]
    if figures.is_ram(info.device):
        rows.append(Figure("earlier runs", figures.earlier_runs(info)))
    return [*rows, Figure("threads", str(info.n_threads)), Figure("context", f"{info.n_ctx} tokens")]


def warnings_of(info: EngineInfo) -> list[str]:
    """The notes about what is off, slower or missing."""
    return [note for note in info.notes if is_warning(note)]


def _notices_of(info: EngineInfo) -> list[str]:
    """The notes about what was chosen that are shown at default verbosity."""
    return [note for note in info.notes if isinstance(note, Notification) and note.level is Level.NOTICE]


def _model_line(info: EngineInfo, *, toy: bool) -> str:
    if toy:
        return f"Model: {info.model}, {_TOY}; -m FILE for another."
    if info.n_experts == 0:
        return f"Model: {info.model}, {info.n_layers} layers."
    return (
        f"Model: {info.model}, {info.n_expert_layers} layers with {info.n_experts} experts, {info.n_expert_used} used "
        "per token."
    )


def _draft_line(info: EngineInfo) -> str:
    if info.draft == "none":
        return "Draft: none, speculation is off; -md FILE or -md ngram turns it on."
    if info.gamma == 0:
        return f"Draft: {info.draft}, speculation is off; --draft-max N or /set gamma N turns it on."
    by = ", as many as pay by what steps cost" if info.auto_gamma else ""
    return f"Draft: {info.draft}, up to {info.gamma} tokens per step{by}."


def _experts_line(info: EngineInfo) -> str:
    if info.n_experts == 0:
        return "Experts: none, the model is dense."
    whole = f"{info.n_whole_layers} of {info.n_expert_layers} layers are on the GPU with all their experts. "
    whole = whole if info.n_whole_layers else ""
    if not info.cache_slots and info.n_whole_layers == info.n_expert_layers:
        return f"Experts are on the GPU: {info.n_expert_layers * info.n_experts:,}."
    if not info.cache_slots:
        n_host = (info.n_expert_layers - info.n_whole_layers) * info.n_experts
        return f"{whole}Experts are on the CPU: {n_host:,}, {figures.device(info)}."
    return (
        f"{whole}"
        f"Experts are cached {_place(info)}: {_cached(info)} "
        f"({percent(info.cache_ratio)}, {format_bytes(info.pool_bytes)}), policy {info.policy}."
    )


def _budget_line(info: EngineInfo) -> str:
    if info.expert_budget is None:
        return ""
    label = figures.budget(info)
    effect = "answers may differ from the model's own" if info.gamma > 0 else "there are no drafts to verify"
    return f"{label[0].upper()}{label[1:]}: {effect}."


def _speculates(info: EngineInfo) -> bool:
    return info.draft != "none" and info.gamma > 0


def _draft(info: EngineInfo) -> str:
    """Where drafts come from and how long they are, or that speculation is off."""
    if _speculates(info):
        return f"{info.draft}, gamma {'auto' if info.auto_gamma else info.gamma}"
    return "speculation off: " + ("no draft (-md FILE or -md ngram)" if info.draft == "none" else "draft length 0")


def _expert_shape(info: EngineInfo) -> str:
    if info.n_experts == 0:
        return f"{info.n_layers} layers, no experts"
    return f"{info.n_expert_layers} layers x {info.n_experts} experts, top-{info.n_expert_used}"


def _place(info: EngineInfo) -> str:
    return f"{'in' if figures.is_ram(info.device) else 'on'} {device_name(info.device)}"


def _cached(info: EngineInfo) -> str:
    return f"{info.cache_slots:,} of {info.n_expert_layers * info.n_experts:,}"
