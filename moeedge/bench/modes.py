"""The modes that are compared: the same engine and loop, with and without drafts, with and without our backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moeedge.engine.types import EngineConfig, Mode
from moeedge.errors import InputError

REFERENCE = "stock-ar"


@dataclass(frozen=True)
class BenchMode:
    """One column of the comparison."""

    name: str
    engine: Mode
    drafts: bool
    about: str
    policy: str | None = None  # of the expert cache; None: the engine's configuration says
    cache_ratio: float | None = None  # likewise

    @property
    def label(self) -> str:
        """The name, with what tells this column of a sweep from the others."""
        ratio = None if self.cache_ratio is None else f"{self.cache_ratio:g}"
        return " ".join(part for part in (self.name, self.policy, ratio) if part is not None)


MODES = {
    mode.name: mode
    for mode in (
        BenchMode("stock-ar", "stock", False, "stock llama.cpp, one token at a time"),
        BenchMode("stock-sd", "stock", True, "stock llama.cpp with the same draft and loop"),
        BenchMode("moeedge", "moeedge", True, "our backend with the draft"),
        BenchMode("moeedge-ar", "moeedge", False, "our backend, one token at a time"),
    )
}
DEFAULT_MODES = ("stock-ar", "stock-sd", "moeedge")


def parse_modes(text: str) -> tuple[BenchMode, ...]:
    """The modes of a comma-separated list, each once. Raises InputError for an unknown name or an empty list."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in MODES]
    if unknown or not names:
        wrong = f'There is no mode "{unknown[0]}".' if unknown else "No mode is named."
        raise InputError(wrong, f"Choose from {', '.join(MODES)}, separated by commas.")
    return tuple(MODES[name] for name in names)


def applicable_modes(modes: Sequence[BenchMode], *, has_draft: bool) -> tuple[tuple[BenchMode, ...], list[str]]:
    """The modes that make sense, and one sentence for each that was left out or changed.

    Without a draft the mode moeedge decodes one token at a time; stock-sd would be stock-ar again.
    """
    if has_draft:
        return tuple(modes), []
    kept: list[BenchMode] = []
    notes = []
    names = [mode.name for mode in modes]
    for mode in modes:
        if mode.name == "stock-sd":
            notes.append("stock-sd is left out: there is no draft, so it would be stock-ar again.")
        elif mode.name == "moeedge":
            kept.append(replace(mode, drafts=False, about="our backend, one token at a time (no draft)"))
            notes.append("moeedge runs without a draft.")
        elif mode.name == "moeedge-ar" and "moeedge" in names:
            notes.append("moeedge-ar is left out: without a draft, moeedge is the same.")
        else:
            kept.append(mode)
    return tuple(kept), notes


def mode_config(base: EngineConfig, mode: BenchMode) -> EngineConfig:
    """`base` as this mode runs it; stock modes have no expert cache."""
    placement = base.placement
    if mode.policy is not None:
        placement = replace(placement, policy=mode.policy)
    if mode.cache_ratio is not None:
        placement = replace(placement, cache_ratio=mode.cache_ratio, vram_bytes=None)
    config = replace(base, mode=mode.engine, placement=placement)
    return config if mode.drafts else replace(config, draft=None, gamma=0)


def rotated(modes: Sequence[BenchMode], turn: int) -> tuple[BenchMode, ...]:
    """The order in which the modes run for the `turn`-th time.

    A full cycle of rotations puts every mode in every place; every second cycle is reversed, so that every mode also
    comes after each other one. Slow drift of the machine (clock, heat, neighbours) then falls on all modes alike.
    """
    n = len(modes)
    cycle, shift = divmod(turn, n)
    order = [*modes[shift:], *modes[:shift]]
    return tuple(reversed(order)) if cycle % 2 else tuple(order)
