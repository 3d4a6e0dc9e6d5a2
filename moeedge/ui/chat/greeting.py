"""The start of a session on screen: the chat's greeting, one line for a single answer, and the details of /info."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from moeedge import __version__
from moeedge.notifications import Level, Notification, is_warning
from moeedge.ui import figures
from moeedge.ui.console import say
from moeedge.ui.figures import Figure, device_name
from moeedge.units import format_bytes

if TYPE_CHECKING:
    from moeedge.engine.types import EngineInfo
    from moeedge.hub.catalog import Starter

_KEYS = "/exit or Ctrl-D leaves, /help lists the commands, /info shows more."


def print_greeting(
    console: Console,
    info: EngineInfo,
    *,
    toy: bool,
    starter: Starter | None = None,
    cache_speed: float | None = None,
    warnings: Sequence[str] = (),
) -> None:
    """Three lines: the model, where its experts are, how to leave; then one for each thing that is not as usual.

    starter: the first real model that a toy's greeting names. cache_speed: measured, over that without the cache.
    """
    for line in (_model_line(info, toy=toy, starter=starter), experts_line(info, cache_speed), _KEYS):
        say(console, line)
    print_warnings(console, info, warnings)


def print_header(console: Console, info: EngineInfo, *, toy: bool, warnings: Sequence[str] = ()) -> None:
    """One line about a session that gives a single answer or a profile, then a line per choice, notice and warning."""
    say(console, header_line(info, toy=toy))
    print_warnings(console, info, warnings)


def print_warnings(console: Console, info: EngineInfo, warnings: Sequence[str] = (), *, quiet: bool = False) -> None:
    """A line for a lossy budget, for each choice and notice, and for each warning; quiet: without choices."""
    notices = [note for note in info.notes if isinstance(note, Notification) and note.level is Level.NOTICE]
    for line in [_budget_line(info), *([] if quiet else [info.layers, *notices])]:
        if line:
            say(console, line)
    for warning in [*warnings, *warnings_of(info)]:
        say(console, warning, style="yellow")


def header_line(info: EngineInfo, *, toy: bool = False) -> str:
    """Model, place of the experts and source of drafts in one line."""
    model = f"{info.model}, a toy" if toy else info.model
    parts = [model, f"drafts {_drafts(info)}"]
    if info.n_experts:
        parts.insert(1, f"experts {_experts(info)}")
    return " | ".join([*parts, *([figures.budget(info)] if info.expert_budget is not None else [])])


def details(info: EngineInfo) -> list[Figure]:
    """What is loaded and where it runs, as labels and values."""
    shape = f"{info.n_expert_layers} layers x {info.n_experts} experts, top-{info.n_expert_used}"
    rows = [
        Figure("moeedge", __version__),
        Figure("model", f"{info.model} ({info.architecture})"),
        Figure("experts", shape if info.n_experts else f"{info.n_layers} layers, no experts"),
        Figure("drafts", _drafts(info) + (", as many as pay" if info.auto_gamma else "")),
        Figure("device", "none, the CPU computes all experts" if info.device == "none" else info.device),
    ]
    if info.expert_budget is not None:
        budget = info.expert_budget
        rows.append(Figure("budget", f"{figures.budget(info)}, ranking {budget.ranking}, {budget.coverage}"))
    if info.cache_slots:
        slots = f"{_cached(info)} experts ({info.cache_ratio:.1%}, {format_bytes(info.pool_bytes)})"
        rows += [Figure("cache", slots), Figure("policy", info.policy)]
    if figures.is_ram(info.device):
        rows.append(Figure("earlier runs", figures.earlier_runs(info)))
    batches = info.settings.n_threads_batch
    threads = f"{info.n_threads}, for prompts and drafts {batches}" if batches else str(info.n_threads)
    rows += [Figure("threads", threads), Figure("context", f"{info.n_ctx} tokens")]
    rows.append(Figure("KV cache", info.settings.kv_label))
    rows += [Figure("adapter", f"{each.path.name}, scale {each.scale:g}") for each in info.settings.adapters]
    if info.settings.flash_attn != "auto":
        rows.append(Figure("flash attention", info.settings.flash_attn))
    return rows


def warnings_of(info: EngineInfo) -> list[str]:
    """The notes about what is off, slower or missing."""
    return [note for note in info.notes if is_warning(note)]


def _model_line(info: EngineInfo, *, toy: bool, starter: Starter | None) -> str:
    if not toy:
        return f"Model: {info.model}" + ("." if info.n_experts else ", which has no experts.")
    if starter is None:
        return f"Model: {info.model}, a toy to try moeedge with; -m FILE for another."
    size = "" if starter.size_bytes is None else f", {format_bytes(starter.size_bytes)}"
    return f"Model: {info.model}, a toy to try moeedge with. A first real one{size}:\n  {starter.command}"


def experts_line(info: EngineInfo, cache_speed: float | None = None) -> str:
    """Where the experts are, how many of them and in how much memory, what that gains, and where drafts come from."""
    drafts = f"Drafts: {_drafts(info)}."
    if info.n_experts == 0:
        return drafts
    known = cache_speed is not None and info.cache_slots
    gain = f", {cache_speed:.1f} times as fast as without, as measured" if known else ""
    return f"Experts: {_experts(info)}{gain}. {drafts}"


def _experts(info: EngineInfo) -> str:
    n_layers, n_whole = info.n_expert_layers, info.n_whole_layers
    if n_whole == n_layers:
        return f"all {n_layers * info.n_experts:,} on the GPU"
    whole = f"{n_whole} of {n_layers} layers on the GPU, " if n_whole else ""
    if info.cache_slots:
        return f"{whole}{_cached(info)} {_place(info)} ({format_bytes(info.pool_bytes)})"
    return f"{whole}all {(n_layers - n_whole) * info.n_experts:,} on the CPU"


def _drafts(info: EngineInfo) -> str:
    """Where drafts come from and how long they are, or why there are none."""
    if info.draft == "none":
        return "off, as there is no draft (-md FILE or -md ngram)"
    if info.gamma == 0:
        return "off (--draft-max N or /set gamma N)"
    source = {"ngram": "from repeated text", "mtp": "by the model's own head"}.get(info.draft, f"by {info.draft}")
    return source if info.auto_gamma else f"{source}, up to {info.gamma} tokens"


def _budget_line(info: EngineInfo) -> str:
    if info.expert_budget is None:
        return ""
    label = figures.budget(info)
    effect = "answers may differ from the model's own" if info.gamma > 0 else "there are no drafts to verify"
    return f"{label[0].upper()}{label[1:]}: {effect}."


def _place(info: EngineInfo) -> str:
    name = device_name(info.device)
    if name == "emulated":
        return "on an emulated GPU"
    return f"in {name}" if figures.is_ram(info.device) else f"on {name}"


def _cached(info: EngineInfo) -> str:
    return f"{info.cache_slots:,} of {info.n_expert_layers * info.n_experts:,}"
