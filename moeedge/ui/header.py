"""What is said before the first prompt: what was loaded, where it runs, and why something is off."""

from __future__ import annotations

from rich.console import Console

from moeedge.engine.types import EngineInfo
from moeedge.ui import figures
from moeedge.ui.console import say, show_figures

TOY_HINT = "This is a toy model trained on synthetic text; use -m FILE.gguf for a real one."
KEYS_HINT = 'Type a message; """ for several lines, /help for commands, Ctrl-C stops an answer, Ctrl-D exits.'


def experts(info: EngineInfo) -> str:
    """The shape that placement works on."""
    if info.n_experts == 0:
        return f"{info.n_layers} layers, no experts"
    return f"{info.n_expert_layers} layers x {info.n_experts} experts, top-{info.n_experts_used}"


def draft(info: EngineInfo) -> str:
    """Where drafts come from and how long they are, or that speculation is off."""
    if info.draft == "none" or info.gamma == 0:
        return "speculation off: " + ("no draft (-md FILE or -md ngram)" if info.draft == "none" else "draft length 0")
    return f"{info.draft}, gamma {info.gamma}"


def rows(info: EngineInfo) -> list[figures.Figure]:
    """The header as labels and values."""
    return [
        figures.Figure("model", f"{info.model} ({info.architecture})"),
        figures.Figure("experts", experts(info)),
        figures.Figure("draft", draft(info)),
        figures.Figure("device", figures.device(info)),
        figures.Figure("threads", str(info.n_threads)),
        figures.Figure("context", f"{info.n_ctx} tokens"),
    ]


def hints(info: EngineInfo, *, toy: bool) -> list[str]:
    """Notes of the engine, and that the bundled pair is a toy."""
    return [*info.notes, TOY_HINT] if toy else list(info.notes)


def print_header(console: Console, info: EngineInfo, *, version: str, toy: bool) -> None:
    """The header of an interactive chat."""
    say(console, f"moeedge {version}")
    show_figures(console, rows(info), style="dim", indent=2)
    for line in [*hints(info, toy=toy), KEYS_HINT]:
        say(console, line)


def header_line(info: EngineInfo) -> str:
    """The same in one line, for a single answer."""
    return figures.join_parts(
        [
            f"{info.model}: {experts(info)}",
            f"draft {draft(info)}" if info.gamma and info.draft != "none" else draft(info),
            figures.device(info),
            f"threads {info.n_threads}",
            f"context {info.n_ctx}",
        ]
    )
