"""How `moeedge chat` shows answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from moeedge.cli.declare import OUTPUT, option

if TYPE_CHECKING:
    from moeedge.ui.chat.settings import Look

Quiet = Annotated[
    bool, option(OUTPUT, "-q, --quiet", "Show answers, warnings and errors only: no greeting, no panel, no figures.")
]
Plain = Annotated[
    bool,
    option(OUTPUT, "--plain", "Show the text of answers as the model writes it: no Markdown, no panel, no colour."),
]
ShowThinking = Annotated[
    bool | None,
    option(
        OUTPUT,
        "--show-thinking/--hide-thinking",
        "What a model thinks before it answers: in full, or as a line with its length. Default: as a line on a "
        "terminal, in full elsewhere.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """What is shown besides the text of answers, and in which form."""

    quiet: Quiet = False
    plain: Plain = False
    show_thinking: ShowThinking = None

    def look(self, *, verbose: bool) -> Look:
        """The chat's settings of the view."""
        from moeedge.ui.chat.settings import Look

        return Look(
            stats="off" if self.quiet else "full" if verbose else "line",
            show_thinking="auto" if self.show_thinking is None else "on" if self.show_thinking else "off",
            markdown=not self.plain,
        )

    def apply(self) -> None:
        """What holds for the entire program: no notes with --quiet, no colour with --plain."""
        from moeedge.ui import console

        console.set_quiet(self.quiet)
        console.set_plain(self.plain)
