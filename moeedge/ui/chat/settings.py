"""The settings that /set changes while a chat runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from moeedge.engine.types import MAX_GAMMA, SamplingConfig
from moeedge.errors import InputError
from moeedge.ui.figures import Figure


@dataclass(frozen=True)
class Settings:
    """Options of a chat that may change between two answers."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    n_predict: int = -1  # limit of an answer in tokens; -1: until the model stops
    gamma: int | Literal["auto"] = 0
    budget: int | None = None  # experts per layer in a verification; None: no limit

    def __post_init__(self) -> None:
        if self.n_predict < -1:
            raise ValueError(f"n_predict (-n) must be -1 or more, not {self.n_predict}")
        if self.gamma != "auto" and not 0 <= self.gamma <= MAX_GAMMA:
            raise ValueError(f"gamma (--draft-max) must be auto or in 0..{MAX_GAMMA}, not {self.gamma}")
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"budget (--expert-budget) must be at least 1 or off, not {self.budget}")

    @property
    def ignores_seed(self) -> bool:
        """Whether answers with one seed may differ: numbers are drawn draft by draft, and lengths follow times."""
        sampling = self.sampling
        return self.gamma == "auto" and sampling.seed is not None and sampling.temperature > 0


@dataclass(frozen=True)
class _Setting:
    """One name of /set and the conversion of its text."""

    name: str
    convert: Callable[[str], Any]
    sampling_field: str = ""  # empty: a field of Settings with the setting's own name
    aliases: tuple[str, ...] = ()
    none: str = "random"  # how the value None is written


def seed_or_random(value: int) -> int | None:
    """None for -1, which draws a new seed for every answer as in llama.cpp. Raises ValueError below -1."""
    if value < -1:
        raise ValueError(f"seed must be -1 (random) or at least 0, not {value}")
    return None if value == -1 else value


def _seed(text: str) -> int | None:
    return None if text == "random" else seed_or_random(int(text))


def _budget(text: str) -> int | None:
    return None if text == "off" else int(text)


def _draft_length(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"could not convert {text} to a finite number")
    return value


_SETTINGS = (
    _Setting("temp", _number, "temperature", ("temperature",)),
    _Setting("top_k", int, "top_k"),
    _Setting("top_p", _number, "top_p"),
    _Setting("min_p", _number, "min_p"),
    _Setting("repeat_penalty", _number, "repeat_penalty"),
    _Setting("repeat_last_n", int, "repeat_last_n"),
    _Setting("seed", _seed, "seed"),
    _Setting("n_predict", int, aliases=("n", "num_predict")),
    _Setting("gamma", _draft_length, aliases=("draft_max",)),
    _Setting("budget", _budget, aliases=("expert_budget",), none="off"),
)


def restored(saved: dict[str, Any], current: Settings) -> Settings:
    """The settings of a saved chat, with the current draft length and expert budget; the current ones if unreadable."""
    try:
        sampling = SamplingConfig(**saved["sampling"])
        return replace(current, sampling=sampling, n_predict=int(saved["n_predict"]))
    except (KeyError, TypeError, ValueError):
        return current


def names() -> list[str]:
    """The names of /set, without aliases."""
    return [setting.name for setting in _SETTINGS]


def listing(settings: Settings) -> list[Figure]:
    """Every setting and its value."""
    return [Figure(setting.name, _shown(settings, setting)) for setting in _SETTINGS]


def change(settings: Settings, name: str, text: str) -> tuple[Settings, str]:
    """The settings with `name` set to `text`, and a line that shows the new value. Raises InputError."""
    key = name.lstrip("-").replace("-", "_")
    found = next((item for item in _SETTINGS if key == item.name or key in item.aliases), None)
    if found is None:
        raise InputError(f'Unknown setting "{name}".', "Choose from: " + ", ".join(names()) + ".")
    try:
        value = found.convert(text)
        if found.sampling_field:
            changed = replace(settings, sampling=replace(settings.sampling, **{found.sampling_field: value}))
        else:
            changed = replace(settings, **{found.name: value})
    except ValueError as error:
        if str(error).startswith(("could not convert", "invalid literal")):
            kind = "a number" if found.convert is _number else "a whole number"
            kind += " or off" if found.convert is _budget else " or auto" if found.convert is _draft_length else ""
            raise InputError(f'{found.name} must be {kind}, not "{text}".') from None
        raise InputError(f"{error}.") from None
    return changed, f"{found.name} = {_shown(changed, found)}"


def _shown(settings: Settings, setting: _Setting) -> str:
    source: object = settings.sampling if setting.sampling_field else settings
    value = getattr(source, setting.sampling_field or setting.name)
    return setting.none if value is None else f"{value:g}" if isinstance(value, float) else str(value)
