"""Dataclasses that mirror structures of include/moeedge.h: each field is declared once, with its C type.

A field's metadata holds its ctype, and for statistics its unit, its meaning and whether it is a counter. The ctypes
structure, its conversion and the JSON record are made from it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Callable
from ctypes import c_char, c_double, c_int32, c_int64
from functools import cache, partial
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

Record = TypeVar("Record")

TEXT_64 = c_char * 64
TEXT_128 = c_char * 128
TEXT_512 = c_char * 512


def c_field(ctype: Any = c_int64, default: Any = dataclasses.MISSING) -> Any:
    """A field of a structure, int64 unless said otherwise."""
    return dataclasses.field(default=default, metadata={"ctype": ctype})


def counter(meaning: str, unit: str = "") -> Any:
    """A statistic that only grows: the difference of two readings is the figure of the interval."""
    return _statistic(meaning, unit, is_counter=True)


def gauge(meaning: str, unit: str = "") -> Any:
    """A statistic that holds at the moment of reading."""
    return _statistic(meaning, unit, is_counter=False)


def _statistic(meaning: str, unit: str, *, is_counter: bool) -> Any:
    ctype = c_double if unit == "s" else c_int64
    metadata = {"ctype": ctype, "unit": unit, "meaning": meaning, "is_counter": is_counter}
    return dataclasses.field(default=0, metadata=metadata)


def counters(record: Any) -> tuple[str, ...]:
    """The names of the counters among the fields of a dataclass of statistics, or of an instance."""
    return _counters(record if isinstance(record, type) else type(record))


@cache
def _counters(record: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(record) if field.metadata.get("is_counter"))


def c_struct(record: Any, **further: Any) -> type[ctypes.Structure]:
    """The ctypes structure with the fields of a dataclass, in their order, and further ones."""
    members = [(field.name, field.metadata["ctype"]) for field in dataclasses.fields(record)] + [*further.items()]
    return type(record.__name__ + "Struct", (ctypes.Structure,), {"_fields_": members})


def from_c(record: type[Record], raw: ctypes.Structure) -> Record:
    """The dataclass `record` with the values of its structure: flags as bool, text as str."""
    read, conversions = _reader(record)  # type: ignore[arg-type]
    values = read(raw)
    if conversions:
        converted = list(values)
        for index, convert in conversions:
            converted[index] = convert(converted[index])
        return record(*converted)
    return record(*values)


@cache
def _reader(record: Any) -> tuple[Callable[[Any], tuple[Any, ...]], list[tuple[int, Any]]]:
    """What `from_c` needs of a dataclass, once for all calls: a getter of all fields, and conversions by index."""
    fields = dataclasses.fields(record)
    convert = {"bool": bool, "str": partial(str, encoding="utf-8", errors="replace")}
    conversions = [(i, convert[str(field.type)]) for i, field in enumerate(fields) if str(field.type) in convert]
    return attrgetter(*(field.name for field in fields)), conversions


def fill(raw: ctypes.Structure, record: Any) -> None:
    """Copy the values of a dataclass into its structure."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        setattr(raw, field.name, value.encode() if isinstance(value, str) else value)


def view(address: int, shape: tuple[int, ...], dtype: type[Any]) -> np.ndarray[Any, Any]:
    """An array of native memory, of 4-byte values; np.ctypeslib.as_array takes five times as long."""
    memory = (c_int32 * math.prod(shape)).from_address(address)
    return np.frombuffer(memoryview(memory), dtype).reshape(shape)
