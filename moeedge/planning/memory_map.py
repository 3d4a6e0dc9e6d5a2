"""What lies where at one context size: the lines of a plan, and whether they fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moeedge.hardware.budget import Budget

Verdict = Literal["fits", "from disk", "does not fit"]


@dataclass(frozen=True)
class Line:
    """Something that takes memory."""

    what: str
    n_bytes: int
    mapped_bytes: int = 0  # of these pages of the model file: the system can drop them and read them again
    spare: bool = False  # left free for others, not taken: nothing fails without it


@dataclass(frozen=True)
class Place:
    """A kind of memory and what will lie in it."""

    name: str
    total_bytes: int
    free_bytes: int  # before anything is loaded
    lines: tuple[Line, ...]

    @property
    def used_bytes(self) -> int:
        return sum(line.n_bytes for line in self.lines)

    @property
    def fixed_bytes(self) -> int:
        """What must be in memory: all but pages of the model file."""
        return sum(line.n_bytes - line.mapped_bytes for line in self.lines if not line.spare)

    @property
    def left_bytes(self) -> int:
        """Negative where that much is missing."""
        return self.free_bytes - self.used_bytes

    @property
    def verdict(self) -> Verdict:
        spare = sum(line.n_bytes for line in self.lines if line.spare)
        if self.left_bytes + spare >= 0:
            return "fits"
        return "from disk" if self.fixed_bytes <= self.free_bytes else "does not fit"


@dataclass(frozen=True)
class MemoryMap:
    """A plan at one context size."""

    n_ctx: int  # tokens
    kv_bytes: int  # of target and draft
    compute_bytes: int
    places: tuple[Place, ...]  # the device's first, if there is one with memory of its own; the machine's last
    budget: Budget  # of the expert cache
    whole_on_gpu: bool  # target and draft are, experts included
    refused: str = ""  # why a session would not begin

    @property
    def cache_ratio(self) -> float:
        """The share of the experts that the device holds."""
        return 1.0 if self.whole_on_gpu else self.budget.ratio

    @property
    def verdict(self) -> Verdict:
        verdicts = [place.verdict for place in self.places]
        if self.refused or "does not fit" in verdicts or any(verdict != "fits" for verdict in verdicts[:-1]):
            return "does not fit"
        return verdicts[-1]
