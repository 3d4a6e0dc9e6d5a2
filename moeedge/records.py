"""Records: dataclasses whose figures are declared once, with unit, meaning, bounds, column and how samples combine.

From the declarations follow JSON objects (`as_dict`), their JSON Schema (schemas.py), the columns of tables
(ui/tables.py), one record of several (`combine`), and the structures of native/abi.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast, overload

T = TypeVar("T")
How = Literal["", "sum", "max", "last"]
_COMBINED: dict[str, Callable[[list[Any]], Any]] = {
    "sum": lambda values: _sum(values),
    "max": max,
    "last": lambda values: values[-1],
}
_UNITS = {"s": "seconds", "t/s": "tokens per second", "bytes/s": "bytes per second", "bytes": "bytes"}
_places = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The declaration of a figure of a record.

    help: its meaning, without the unit. least, most: bounds; None: none. of: how those of several samples combine, ""
    takes the first. key: its name in JSON, if not the attribute's; "a.b" is b in an object a. prefix: of a record whose
    keys stand among those of the record that holds it: the beginning of their names; None: it is an object of its own.
    without: attributes of such a record that have no key. absent: in JSON, where the record that has the figure is
    None. optional: no key where the value is None. title, form, scale: of a column. axis: "x" or "y" of a default plot,
    or "name" of its lines. kind: the type in JSON, if not the annotation's. place: in the order of declaration.
    """

    help: str
    unit: str = ""
    least: float | None = 0
    most: float | None = None
    of: How = ""
    key: str | None = None
    prefix: str | None = None
    without: tuple[str, ...] = ()
    absent: Any = None
    optional: bool = False
    in_json: bool = True
    title: str = ""
    form: str = ""
    scale: float = 1.0
    axis: str = ""
    kind: Any = None
    place: int = dataclasses.field(default_factory=_places.__next__)

    @property
    def label(self) -> str:
        """The meaning, without notes and further sentences, and the unit: of an axis."""
        meaning = re.split("[;.(]", self.help)[0].strip()
        return f"{meaning} ({self.unit})" if self.unit in _UNITS else meaning

    @property
    def description(self) -> str:
        """The meaning and the unit as a sentence."""
        meaning, mark, note = self.help.partition(";")
        unit = f", in {_UNITS[self.unit]}" if self.unit in _UNITS else ""
        return f"{meaning[:1].upper()}{meaning[1:]}{unit}{mark}{note}."


def figure(
    help: str, unit: str = "", *, default: Any = MISSING, default_factory: Any = MISSING, **declared: Any
) -> Any:
    """A stored figure, a field of a dataclass; `declared` as in Figure."""
    metadata = {"figure": Figure(help=help, unit=unit, **declared)}
    if default_factory is not MISSING:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def counter(help: str, unit: str = "", *, default: Any = None, **declared: Any) -> Any:
    """A figure that only grows, from 0: the difference of two readings is the figure of the interval."""
    zero = 0.0 if unit == "s" else 0
    return figure(help, unit, default=zero if default is None else default, of="sum", **declared)


def gauge(help: str, unit: str = "", *, default: Any = 0, **declared: Any) -> Any:
    """A figure that holds at the moment of reading."""
    return figure(help, unit, default=default, of="last", **declared)


def stored(record: Any, name: str, **changes: Any) -> Any:
    """A stored figure with the declaration of another record's, which may be derived there."""
    declared = dataclasses.replace(figures(record)[name], **{"place": next(_places), "kind": None} | changes)
    return dataclasses.field(default=None, metadata={"figure": declared})


class Derived(Generic[T]):
    """A figure that is computed from others of its record; read from the class it is the declaration itself."""

    def __init__(self, compute: Callable[[Any], T], declared: Figure) -> None:
        self.compute, self.figure = compute, declared

    @overload
    def __get__(self, record: None, owner: type[Any]) -> Derived[T]: ...
    @overload
    def __get__(self, record: object, owner: type[Any]) -> T: ...
    def __get__(self, record: object, owner: type[Any]) -> Derived[T] | T:
        return self if record is None else self.compute(record)


def derived(help: str, **declared: Any) -> Callable[[Callable[[Any], T]], Derived[T]]:
    """Makes a method a derived figure; its type in JSON is that which the method returns."""

    def made(compute: Callable[[Any], T]) -> Derived[T]:
        kind = _evaluated(compute.__annotations__["return"], compute.__module__)
        return Derived(compute, Figure(help=help, kind=kind, **declared))

    return made


@overload
def quotient(over: str, under: str, help: str, unit: str = "", *, empty: float, **declared: Any) -> Derived[float]: ...
@overload
def quotient(over: str, under: str, help: str, unit: str = "", **declared: Any) -> Derived[float | None]: ...
def quotient(
    over: str, under: str, help: str, unit: str = "", *, empty: float | None = None, **declared: Any
) -> Derived[Any]:
    """The attribute `over` by the product of those in `under`, names separated by blanks.

    empty: the value for a denominator of 0, or where one of them is None.
    """
    below = under.split()

    def compute(record: Any) -> float | None:
        numerator, denominators = getattr(record, over), [getattr(record, name) for name in below]
        return empty if numerator is None or not all(denominators) else numerator / math.prod(denominators)

    kind = float if empty is not None else float | None
    return Derived(compute, Figure(help=help, unit=unit, kind=kind, **declared))


@cache
def figures(record: Any) -> dict[str, Figure]:
    """The figures of a class, stored and derived, by attribute, in order of declaration; other fields are left out."""
    declared = {each.name: each.metadata["figure"] for each in dataclasses.fields(record) if "figure" in each.metadata}
    for base in reversed(record.__mro__):
        declared |= {name: entry.figure for name, entry in vars(base).items() if isinstance(entry, Derived)}
    return dict(sorted(declared.items(), key=lambda item: item[1].place))


def json_figures(record: Any, holder: Figure | None = None) -> Iterator[tuple[str, str, Figure]]:
    """Attribute, key and declaration of the figures in a class's JSON; of a class with `is_raw` the stored ones.

    holder: the figure whose record this is, where the keys are those of another record.
    """
    for name, declared in figures(record).items():
        is_left_out = getattr(record, "is_raw", False) and isinstance(getattr(record, name, None), Derived)
        if declared.in_json and not is_left_out and (holder is None or name not in holder.without):
            key = name if declared.key is None else declared.key
            if holder is not None and declared.prefix is None:
                about = f"{holder.help}: {declared.help}" if holder.help else declared.help
                declared = dataclasses.replace(declared, unit=declared.unit or holder.unit, help=about)
            yield name, key if holder is None else f"{holder.prefix}{key}", declared


@cache
def keys(record: Any, holder: Figure | None = None) -> dict[str, Figure]:
    """The figures of a class by their key in its JSON, those of records among its keys included."""
    found: dict[str, Figure] = {}
    for name, key, declared in json_figures(record, holder):
        is_part = declared.prefix is not None
        found |= keys(record_in(type_of(record, name)), declared) if is_part else {key: declared}
    return found


@cache
def counters(record: Any) -> tuple[str, ...]:
    """The names of a class's figures that can be added."""
    return tuple(name for name, declared in figures(record).items() if declared.of == "sum")


def combine(records: Sequence[T]) -> T:
    """One record of several, each figure combined as declared; None stays out of sums. Raises IndexError for none."""
    first: Any = records[0]
    kind, combined = cast(Any, type(first)), {}
    for name, declared in figures(kind).items():
        if declared.of:
            values = [value for record in records if (value := getattr(record, name)) is not None]
            combined[name] = _COMBINED[declared.of](values) if values else None
    return dataclasses.replace(first, **combined)  # type: ignore[no-any-return]


def _sum(values: list[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return {key: sum(value.get(key, 0) for value in values) for key in dict.fromkeys(itertools.chain(*values))}
    return sum(values)


def as_dict(record: Any, *, nulls: bool = True) -> dict[str, Any]:
    """The record as a JSON object. nulls: with the keys whose value is null."""
    made: dict[str, Any] = {}
    for key, value in _items(type(record), record, nulls=nulls):
        group, dot, name = key.rpartition(".")
        (made.setdefault(group, {}) if dot else made)[name] = value
    return made


def filled(kind: type[T], *sources: Any, **values: Any) -> T:
    """A record of `kind`, its fields from `values`, or from the first source that has an attribute of the name.

    A source ("device_", source) has attributes whose names in `kind` begin with that.
    """
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        for each in sources:
            prefix, source = each if isinstance(each, tuple) else ("", each)
            name = field.name.removeprefix(prefix)
            if field.name not in values and field.name.startswith(prefix) and hasattr(source, name):
                values[field.name] = getattr(source, name)
    return kind(**values)


def _items(kind: Any, record: Any, *, nulls: bool, holder: Figure | None = None) -> Iterator[tuple[str, Any]]:
    for name, key, declared in json_figures(kind, holder):
        value = declared.absent if record is None else getattr(record, name)
        if declared.prefix is not None:
            part = record_in(type_of(kind, name)) if value is None else type(value)
            yield from _items(part, value, nulls=nulls, holder=declared)
        elif value is not None or (nulls and not declared.optional):
            yield key, plain(value, nulls=nulls)


def plain(value: Any, *, nulls: bool = True) -> Any:
    """A value as JSON has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return as_dict(value, nulls=nulls) if figures(type(value)) else dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(each, nulls=nulls) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each, nulls=nulls) for each in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def type_of(record: Any, name: str) -> Any:
    """The type of a class's figure in JSON. Raises NameError where its module imports it for type checking alone."""
    if (kind := figures(record)[name].kind) is not None:
        return kind
    owner = next(base for base in record.__mro__ if name in vars(base).get("__annotations__", ()))
    return _evaluated(owner.__annotations__[name], owner.__module__)


def _evaluated(annotation: Any, module: str) -> Any:
    holder = type("", (), {"__annotations__": {"value": annotation}, "__module__": module})
    return typing.get_type_hints(holder)["value"]


def record_in(kind: Any) -> Any:
    """The dataclass of a type, or of its alternatives."""
    return next(each for each in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(each))
