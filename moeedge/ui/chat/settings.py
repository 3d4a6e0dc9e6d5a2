"""The settings that /set changes while a chat runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar

from moeedge.engine.types import MAX_GAMMA, MAX_N_CTX, SamplingConfig
from moeedge.errors import InputError
from moeedge.llama.chat_template import MODEL_TEMPLATE, THINK_WORDS, TemplateChoice
from moeedge.paths import user_path
from moeedge.ui.figures import Figure

StatsLevel = Literal["line", "full", "off"]
ShowThinking = Literal["auto", "on", "off"]
_Config = TypeVar("_Config", SamplingConfig, TemplateChoice)


@dataclass(frozen=True)
class Look:
    """How answers are shown.

    stats: figures below an answer and after it. show_thinking: a model's thoughts before its answer; auto: in one line
    on a terminal, in full in a pipe. markdown: headings, bold text, lists and code of an answer are shown as such on a
    terminal.
    """

    stats: StatsLevel = "line"
    show_thinking: ShowThinking = "auto"
    markdown: bool = True


@dataclass(frozen=True)
class Settings:
    """Options of a chat that may change between two answers."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    n_predict: int = -1  # limit of an answer in tokens; -1: until the model stops
    gamma: int | Literal["auto"] = 0
    budget: int | None = None  # experts per layer in a verification; None: no limit
    look: Look = field(default_factory=Look)
    template: TemplateChoice = MODEL_TEMPLATE
    ctx: int = 0  # tokens of the context
    context_shift: bool = False  # where it is full, what is oldest is dropped

    def __post_init__(self) -> None:
        if self.n_predict < -1:
            raise ValueError(f"n_predict (-n) must be -1 or more, not {self.n_predict}")
        if self.gamma != "auto" and not 0 <= self.gamma <= MAX_GAMMA:
            raise ValueError(f"gamma (--draft-max) must be auto or from 0 to {MAX_GAMMA}, not {self.gamma}")
        if not 0 <= self.ctx <= MAX_N_CTX:
            raise ValueError(f"ctx (-c) must be from 0 (automatic) to {MAX_N_CTX:,} tokens, not {self.ctx:,}")
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"budget (--expert-budget) must be at least 1 or off, not {self.budget}")

    @property
    def ignores_seed(self) -> bool:
        """Whether answers with one seed may differ: numbers are drawn draft by draft, and lengths follow times."""
        sampling = self.sampling
        return self.gamma == "auto" and sampling.seed is not None and sampling.is_random


_USUAL = Settings()
_PARTS = ("sampling", "look", "template")


@dataclass(frozen=True)
class _Setting:
    """One name of /set and the conversion of its text."""

    name: str
    convert: Callable[[str], Any]
    field_name: str = ""  # empty: the setting's own name
    aliases: tuple[str, ...] = ()
    none: str = "random"  # how the value None is written
    help: str = ""  # a few words for the list of /set

    @property
    def field(self) -> str:
        """The field of Settings, or of the part of it that has such a field."""
        return self.field_name or self.name

    @property
    def part(self) -> str:
        """The part of Settings; empty: Settings itself."""
        return next((part for part in _PARTS if hasattr(getattr(_USUAL, part), self.field)), "")


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


def _choice(*words: str) -> Callable[[str], str]:
    """A setting that is one of these words."""

    def convert(text: str) -> str:
        if text not in words:
            raise ValueError(f"{text} is not one of {', '.join(words)}")
        return text

    return convert


def _switch(text: str) -> bool:
    return _choice("on", "off")(text) == "on"


def _show_thinking(text: str) -> str:
    return _choice("auto", "on", "off")({"show": "on", "fold": "off"}.get(text, text))


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"could not convert {text} to a finite number")
    return value


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.replace(";", ",").split(",") if name.strip())


def _grammar(text: str) -> str:
    return _read_grammar(text)[0]


def _read_grammar(text: str) -> tuple[str, str]:
    """The grammar in that file, or of the JSON schema in a .json file, and what it leaves out; empty for off."""
    if text == "off":
        return "", ""
    from moeedge.engine.conversation import read_text
    from moeedge.llama.json_schema import schema_grammar
    from moeedge.llama.samplers import check_grammar

    path, note = user_path(text), ""
    content = read_text(path)
    if path.suffix == ".json":
        schema = schema_grammar(content)
        content, note = schema.text, f" (not enforced: {', '.join(schema.ignored)})" if schema.ignored else ""
    check_grammar(content)
    return content, note


_SETTINGS = (
    _Setting("temp", _number, "temperature", ("temperature",), help="randomness; 0: always the most likely token"),
    _Setting("top_k", int, help="draw from so many of the likeliest tokens; 0: all"),
    _Setting("top_p", _number, help="draw from likeliest tokens with this probability"),
    _Setting("min_p", _number, help="leave out tokens below this share of the likeliest"),
    _Setting("repeat_penalty", _number, help="makes repeated tokens less likely; 1: off"),
    _Setting("repeat_last_n", int, help="tokens that count as repeated; -1: all"),
    _Setting("presence_penalty", _number, help="makes tokens less likely that have occurred"),
    _Setting("frequency_penalty", _number, help="the same, once per occurrence"),
    _Setting("typical_p", _number, aliases=("typical",), help="locally typical sampling; 1: off"),
    _Setting("top_n_sigma", _number, aliases=("top_nsigma",), help="draw from tokens near the likeliest; -1: off"),
    _Setting("xtc_probability", _number, help="chance to leave the likeliest tokens out"),
    _Setting("dry_multiplier", _number, help="penalty of repeated sequences; 0: off"),
    _Setting("samplers", _names, help="the order of these"),
    _Setting("grammar", _grammar, none="off", help="a GBNF file, or a JSON schema, that answers follow"),
    _Setting("think", _choice(*dict.fromkeys(THINK_WORDS.values())), help="whether the model is told to think first"),
    _Setting("seed", _seed, help="of the random numbers"),
    _Setting(
        "n_predict", int, aliases=("n", "num_predict"), help="longest answer in tokens; -1: until the model stops"
    ),
    _Setting("gamma", _draft_length, aliases=("draft_max",), help="tokens per draft; 0: none; auto: as many as pay"),
    _Setting(
        "budget", _budget, aliases=("expert_budget",), none="off", help="experts per layer that verify drafts (lossy)"
    ),
    _Setting("ctx", int, aliases=("c", "n_ctx", "ctx_size", "num_ctx"), help="size of the context in tokens"),
    _Setting("context_shift", _switch, help="drop the older half when the context is full"),
    _Setting("stats", _choice("line", "full", "off"), help="figures that are shown: line, full or off"),
    _Setting(
        "show_thinking",
        _show_thinking,
        aliases=("thinking",),
        help="show what a model thinks: on, off (one line), auto",
    ),
    _Setting("markdown", _switch, help="headings, bold text and code are shown as such"),
)


def restored(saved: dict[str, Any], current: Settings) -> Settings:
    """The settings of a saved chat, with the current draft length and expert budget; the current ones if unreadable."""
    try:
        sampling = _rebuilt(SamplingConfig(), saved["sampling"])
        template = _rebuilt(MODEL_TEMPLATE, saved.get("template", {}))
        return replace(current, sampling=sampling, n_predict=int(saved["n_predict"]), template=template)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return current


def _rebuilt(usual: _Config, saved: dict[str, Any]) -> _Config:
    """`usual` with saved values. Raises TypeError for one that JSON would not have made of a value of its type."""
    kinds: dict[type, Any] = {float: (float, int), tuple: list, type(None): (int, type(None))}
    for name, value in saved.items():
        kind = type(getattr(usual, name))
        texts = value if kind is tuple and name != "logit_bias" else ()
        if not isinstance(value, kinds.get(kind, kind)) or not all(isinstance(text, str) for text in texts):
            raise TypeError(f"{name} is no {kind.__name__}")
    return replace(usual, **saved)


def saved_settings(settings: Settings) -> dict[str, Any]:
    """The settings as JSON values that `restored` reads."""
    saved = asdict(settings)
    del saved["look"]
    return saved


def names() -> list[str]:
    """The names of /set, without aliases."""
    return [setting.name for setting in _SETTINGS]


def listing(settings: Settings) -> list[Figure]:
    """Every setting, its value and what it does."""
    return [Figure(setting.name, f"{_shown(settings, setting):<8}  {setting.help}") for setting in _SETTINGS]


def change(settings: Settings, name: str, text: str) -> tuple[Settings, str]:
    """The settings with `name` set to `text`, and a line that shows the new value. Raises InputError."""
    key = name.lstrip("-").replace("-", "_")
    found = next((item for item in _SETTINGS if key == item.name or key in item.aliases), None)
    if found is None:
        raise InputError(f'Unknown setting "{name}".', "Choose from: " + ", ".join(names()) + ".")
    try:
        value = found.convert(text)
        changes = {found.field: value}
        if found.part:
            changes = {found.part: replace(getattr(settings, found.part), **changes)}
        changed = replace(settings, **changes)
    except ValueError as error:
        if str(error).startswith(("could not convert", "invalid literal")):
            kind = "a number" if found.convert is _number else "a whole number"
            kind += " or off" if found.convert is _budget else " or auto" if found.convert is _draft_length else ""
            raise InputError(f'{found.name} must be {kind}, not "{text}".') from None
        is_word = found.part in ("look", "template") or found.convert is _switch
        raise InputError(f"{found.name}: {error}." if is_word else f"{error}.") from None
    ignored = _read_grammar(text)[1] if found.name == "grammar" else ""
    return changed, f"{found.name} = {_shown(changed, found)}{ignored}"


def _shown(settings: Settings, setting: _Setting) -> str:
    source: object = getattr(settings, setting.part) if setting.part else settings
    value = getattr(source, setting.field)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(value)
    if setting.name == "grammar" and value:
        return f"{len(value.splitlines())} lines"
    return setting.none if value in (None, "") else f"{value:g}" if isinstance(value, float) else str(value)
