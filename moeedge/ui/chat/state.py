"""The state of a chat that commands read and change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from moeedge.engine.conversation import Conversation

if TYPE_CHECKING:
    from moeedge.engine.autosave import UnfinishedChat
    from moeedge.engine.types import EngineInfo, GenerationStats, StopReason
    from moeedge.scheduler.stats import PlacementStats
    from moeedge.ui.chat.settings import Settings


@dataclass
class Turn:
    """The figures of one finished answer."""

    stats: GenerationStats
    stop_reason: StopReason | None
    info: EngineInfo  # as it was then
    cache: PlacementStats | None = None  # while the answer was decoded


class Chat(Protocol):
    """The part of the chat that commands read and change."""

    conversation: Conversation
    settings: Settings
    attached: str  # text of /read, put before the next message
    raw: bool
    turns: list[Turn]
    unfinished: list[UnfinishedChat]  # that /resume can take over, the newest first

    @property
    def info(self) -> EngineInfo: ...

    def apply(self, settings: Settings) -> list[str]:
        """Apply changed settings, also to the engine. Returns what the user should know about them."""

    def reopen(self) -> None:
        """Take the last answer back, so that its question is answered anew."""

    def resume(self, chat: UnfinishedChat) -> list[str]:
        """Take over a chat that ended unexpectedly. Returns how it goes on; an open question is answered next."""

    def edit(self, text: str) -> None:
        """Put `text` into the prompt; what is sent then replaces the last question, and is answered anew."""

    def use_model(self, name: str) -> list[str]:
        """Go on with another model. Returns what is said about it. Raises MoeedgeError, and the old one stays."""

    def confirm(self, question: str) -> bool:
        """Ask the user; only yes is yes."""
