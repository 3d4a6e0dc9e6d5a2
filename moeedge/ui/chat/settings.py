"""The settings that /set changes while a chat runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from moeedge.engine.types import MAX_GAMMA, MAX_N_CTX, SamplingConfig, seed_or_random
from moeedge.errors import InputError, require
from moeedge.llama.json_schema import schema_grammar
from moeedge.llama.reasoning import MODEL_TEMPLATE, TemplateChoice
from moeedge.paths import read_text, user_path
from moeedge.speculation import check_gamma
from moeedge.ui.figures import FigureRow

StatsLevel = Literal["line", "full", "off"]
ShowThinking = Literal["auto", "on", "off"]
_Config = TypeVar("_Config", SamplingConfig, TemplateChoice)


@dataclass(frozen=True)
class Look:
    stats: StatsLevel = "line"  # figures below an answer and after it
    show_thinking: ShowThinking = "auto"  # thoughts before an answer; auto: a line on a terminal, in full in a pipe
    markdown: bool = True  # headings, bold text, lists and code are shown as such on a terminal


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
        require(self.n_predict >= -1, f"n_predict (-n) must be -1 or more, not {self.n_predict}")
        if self.gamma != "auto":
            check_gamma(self.gamma, most=MAX_GAMMA, auto=True)
        span = f"from 0 (automatic) to {MAX_N_CTX:,} tokens"
        require(0 <= self.ctx <= MAX_N_CTX, f"ctx (-c) must be {span}, not {self.ctx:,}")
        has_room = self.budget is None or self.budget >= 1
        require(has_room, f"budget (--expert-budget) must be at least 1 or off, not {self.budget}")

    @property
    def ignores_seed(self) -> bool:
        """Whether answers with one seed may differ: numbers are drawn draft by draft, and lengths follow times."""
        sampling = self.sampling
        return self.gamma == "auto" and sampling.seed is not None and sampling.is_random


@dataclass(frozen=True)
class _Setting:
    """One name of /set: a field of Settings, or of a part of it, whose type says how its text is read."""

    name: str
    help: str  # a few words for the list of /set
    aliases: Sequence[str]
    field: str
    part: str  # of Settings, with the field; empty: it is one of Settings itself
    kind: Any  # type of the field

    @property
    def none(self) -> str:
        """How the value None is written."""
        return "random" if self.name == "seed" else "off"

    def read(self, text: str) -> Any:
        """The value in a text. Raises InputError for a word or a number that it cannot be, ValueError for a seed."""
        kind, kinds = self.kind, get_args(self.kind)
        if kind is bool or get_origin(kind) is Literal:
            words, word = kinds or ("on", "off"), _OTHER_WORDS.get((self.name, text), text)
            if word not in words:
                raise InputError(f"{self.name}: {word} is not one of {', '.join(words)}.")
            return word if kinds else word == "on"
        if get_origin(kind) is tuple:
            return tuple(name.strip() for name in text.replace(";", ",").split(",") if name.strip())
        word = self.none if type(None) in kinds else "auto" if kinds else ""
        if word and text == word:
            return None if type(None) in kinds else word
        try:
            value = float(text) if kind is float else int(text)
            if kind is float and not math.isfinite(value):
                raise ValueError
        except ValueError:
            number = "a number" if kind is float else "a whole number"
            raise InputError(f'{self.name} must be {number}{f" or {word}" if word else ""}, not "{text}".') from None
        return seed_or_random(int(value)) if self.name == "seed" else value

    def shown(self, settings: Settings) -> str:
        value = getattr(getattr(settings, self.part) if self.part else settings, self.field)
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, tuple):
            return ", ".join(value)
        if self.name == "grammar" and value:
            return f"{len(value.splitlines())} lines"
        return self.none if value in (None, "") else f"{value:g}" if isinstance(value, float) else str(value)


_PARTS = {"": Settings, "sampling": SamplingConfig, "look": Look, "template": TemplateChoice}
# by a field's name: the part of Settings that has it, and its type
_FIELDS = {name: (part, kind) for part, holder in _PARTS.items() for name, kind in get_type_hints(holder).items()}
_OTHER_WORDS = {("show_thinking", "show"): "on", ("show_thinking", "fold"): "off"}
_SETTINGS: dict[str, _Setting] = {}


def add(line: str, option: Sequence[str]) -> None:
    """Makes an option, by its names, a setting. line: "NAME ALIASES: what it does", from the option's declaration."""
    words, _, help = line.partition(": ")
    name, *aliases = words.split()
    field_name = next(each for each in (name, *option) if each in _FIELDS)
    names = (*aliases, *(option if field_name in option else ()))
    _SETTINGS[name] = _Setting(name, help, names, field_name, *_FIELDS[field_name])


def _read_grammar(text: str) -> tuple[str, str]:
    """The grammar in that file, or of the JSON schema in a .json file, and what it leaves out; empty for off."""
    if text == "off":
        return "", ""
    from moeedge.llama.samplers import check_grammar

    path, note = user_path(text), ""
    content = read_text(path)
    if path.suffix == ".json":
        schema = schema_grammar(content)
        content, note = schema.text, f" (not enforced: {', '.join(schema.ignored)})" if schema.ignored else ""
    check_grammar(content)
    return content, note


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
    return list(_SETTINGS)


def listing(settings: Settings) -> list[FigureRow]:
    return [FigureRow(setting.name, f"{setting.shown(settings):<8}  {setting.help}") for setting in _SETTINGS.values()]


def change(settings: Settings, name: str, text: str) -> tuple[Settings, str]:
    """The settings with `name` set to `text`, and a line that shows the new value. Raises InputError."""
    key = name.lstrip("-").replace("-", "_")
    setting = next((item for item in _SETTINGS.values() if key in (item.name, *item.aliases)), None)
    if setting is None:
        raise InputError(f'Unknown setting "{name}".', "Choose from: " + ", ".join(names()) + ".")
    try:
        value, note = _read_grammar(text) if setting.name == "grammar" else (setting.read(text), "")
        changes: dict[str, Any] = {setting.field: value}
        if setting.part:
            changes = {setting.part: replace(getattr(settings, setting.part), **changes)}
        changed = replace(settings, **changes)
    except ValueError as error:
        raise InputError(f"{error}.") from None
    return changed, f"{setting.name} = {setting.shown(changed)}{note}"
