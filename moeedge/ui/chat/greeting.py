"""The start of a session on screen: the chat's greeting, one line for a single answer, and the details of /info."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from moeedge import __version__
from moeedge.engine.types import EngineInfo
from moeedge.hub.catalog import Starter
from moeedge.run import Decision, Level, Notification, is_warning
from moeedge.ui import figures
from moeedge.ui.console import say
from moeedge.ui.figures import FigureRow, known_figures
from moeedge.units import format_bytes

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
    """Three lines about model, experts and keys, then warnings. cache_speed: measured, over that without the cache."""
    for line in (_model_line(info, toy=toy, starter=starter), experts_line(info, cache_speed), _KEYS):
        say(console, line)
    print_warnings(console, info, warnings)


def print_header(console: Console, info: EngineInfo, *, toy: bool, warnings: Sequence[str] = ()) -> None:
    """A single answer's or profile's model, experts and drafts in one line, then a line per notice and warning."""
    model = f"{info.model}, a toy" if toy else info.model
    experts = f"experts {_experts(info)}" if info.n_experts else ""
    say(console, " | ".join(filter(None, (model, experts, f"drafts {_drafts(info)}", figures.budget(info)))))
    print_warnings(console, info, warnings)


def print_warnings(console: Console, info: EngineInfo, warnings: Sequence[str] = (), *, quiet: bool = False) -> None:
    """A line for a lossy budget, for each notice, and for each warning; quiet: without notices."""
    notices = [note for note in info.notes if isinstance(note, Notification) and note.level is Level.NOTICE]
    effect = "answers may differ from the model's own" if info.gamma > 0 else "there are no drafts to verify"
    lossy = f"{figures.budget(info).replace('b', 'B', 1)}: {effect}." if info.expert_budget is not None else ""
    for line in filter(None, [lossy, *([] if quiet else notices)]):
        say(console, line)
    for warning in [*warnings, *warnings_of(info)]:
        say(console, warning, style="yellow")


def details(info: EngineInfo) -> list[FigureRow]:
    """The loaded model and where it runs, as labels and values."""
    shape = f"{info.n_expert_layers} layers x {info.n_experts} experts, top-{info.n_expert_used}"
    budget, settings = info.expert_budget, info.settings
    batches = f", for prompts and drafts {settings.n_threads_batch}" if settings.n_threads_batch else ""
    slots = f"{_cached(info)} experts ({info.cache_ratio:.1%}, {format_bytes(info.pool_bytes)})"
    rows = {
        "moeedge": __version__,
        "model": f"{info.model} ({info.architecture})",
        "experts": shape if info.n_experts else f"{info.n_layers} layers, no experts",
        "drafts": _drafts(info) + (", as many as pay" if info.auto_gamma else ""),
        "device": "none, the CPU computes all experts" if info.device == "none" else info.device,
        "budget": f"{figures.budget(info)}, ranking {budget.ranking}, {budget.coverage}" if budget else "",
        "cache": slots if info.cache_slots else "",
        "policy": info.policy if info.cache_slots else "",
        "earlier runs": "" if info.is_device else figures.earlier_runs(info),
        "threads": f"{info.n_threads}{batches}",
        "context": f"{info.n_ctx} tokens",
        "KV cache": settings.kv_label,
    }
    adapters = [FigureRow("adapter", f"{each.path.name}, scale {each.scale:g}") for each in settings.adapters]
    flash = "" if settings.flash_attn == "auto" else settings.flash_attn
    return [*known_figures(rows), *adapters, *known_figures({"flash attention": flash})]


def warnings_of(info: EngineInfo) -> list[str]:
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
    known = (cache_speed, "without", "measured") if cache_speed is not None and info.cache_slots else ()
    experts = f"{Decision('Experts', _experts(info), *known).sentence()}. " if info.n_experts else ""
    return f"{experts}Drafts: {_drafts(info)}."


def _experts(info: EngineInfo) -> str:
    n_layers, n_whole = info.n_expert_layers, info.n_whole_layers
    if n_whole == n_layers:
        return f"all {n_layers * info.n_experts:,} on the GPU"
    whole = f"{n_whole} of {n_layers} layers on the GPU, " if n_whole else ""
    if info.cache_slots:
        return f"{whole}{_cached(info)} {info.place} ({format_bytes(info.pool_bytes)})"
    return f"{whole}all {(n_layers - n_whole) * info.n_experts:,} on the CPU"


def _drafts(info: EngineInfo) -> str:
    """Where drafts come from and how long they are, or why there are none."""
    if info.draft == "none":
        return "off, as there is no draft (-md FILE or -md ngram)"
    if info.gamma == 0:
        return "off (--draft-max N or /set gamma N)"
    source = {"ngram": "from repeated text", "mtp": "by the model's own head"}.get(info.draft, f"by {info.draft}")
    return source if info.auto_gamma else f"{source}, up to {info.gamma} tokens"


def _cached(info: EngineInfo) -> str:
    return f"{info.cache_slots:,} of {info.n_expert_layers * info.n_experts:,}"
