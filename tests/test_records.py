"""Records: what follows from the declaration of a figure."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass, field
from importlib import import_module
from typing import Literal

import jsonschema

from moeedge.records import (
    Figure,
    as_dict,
    combine,
    counter,
    counters,
    derived,
    figure,
    filled,
    gauge,
    quotient,
    stored,
)
from moeedge.schemas import json_schema


@dataclass(frozen=True)
class Drafts:
    accepted: int = counter("drafted tokens that became text")
    drafted: int = counter("drafted tokens")
    longest: int = figure("Longest draft", "tokens", default=0, of="max")
    acceptance_rate = quotient("accepted", "drafted", "Accepted over drafted tokens", most=1)
    ends: Literal["early", "late"] | None = figure("How drafts end", default=None)
    used: int = gauge("slots in use")
    hidden: list[int] = field(default_factory=list)

    @derived("Drafted tokens that were rejected")
    def rejected(self) -> int:
        return self.drafted - self.accepted


@dataclass(frozen=True)
class Row:
    name: str = figure("name of the mode")
    acceptance_rate: float | None = stored(Drafts, "acceptance_rate")
    part: Drafts | None = figure("", prefix="draft_", default=None)
    time_s: float | None = figure("Time", "s", default=None, key="seconds")
    parts: tuple[Drafts, ...] = figure("Each", default=())
    inner: Row | None = figure("Another row", default=None, optional=True)


def test_units_are_those_that_readers_know() -> None:
    """And no figure's meaning stands where its unit belongs."""
    for name in ("bench.records", "engine.types", "scheduler.stats", "analysis.profile", "planning.session_plan"):
        import_module(f"moeedge.{name}")
    declared = [each.unit for each in gc.get_objects() if isinstance(each, Figure)]
    known = {"", "s", "t/s", "bytes", "bytes/s", "experts", "pairs", "slots", "tokens"}
    assert len(declared) > 400 and set(declared) <= known


def test_quotients_are_those_of_sums() -> None:
    both = combine([Drafts(1, 4, 3, used=2), Drafts(3, 4, 2, ends="late", used=5)])
    assert both == Drafts(4, 8, 3, ends=None, used=5) and both.acceptance_rate == 0.5 and both.rejected == 4
    assert Drafts().acceptance_rate is None and counters(Drafts) == ("accepted", "drafted")


def test_a_record_as_json() -> None:
    row = filled(Row, Drafts(1, 4), name="a", part=Drafts(1, 2, hidden=[1]), parts=(Drafts(),))
    drafts = {"accepted": 1, "drafted": 2, "longest": 0, "acceptance_rate": 0.5, "ends": None, "used": 0, "rejected": 1}
    made = as_dict(row)
    assert made["acceptance_rate"] == 0.25 and {f"draft_{key}": made[f"draft_{key}"] for key in drafts} == {
        f"draft_{key}": value for key, value in drafts.items()
    }
    assert list(made) == ["name", "acceptance_rate", *(f"draft_{key}" for key in drafts), "seconds", "parts"]
    assert as_dict(Row("a"))["draft_accepted"] is None
    assert as_dict(Row("a"), nulls=False) == {"name": "a", "parts": []}


def test_the_schema_of_a_record() -> None:
    schema = json_schema(list[Row], "rows", "About rows.")
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    members = schema["$defs"]["Row"]["properties"]
    assert members["seconds"] == {"description": "Time, in seconds.", "type": ["number", "null"], "minimum": 0}
    assert members["acceptance_rate"]["maximum"] == 1 and members["draft_ends"]["enum"] == ["early", "late", None]
    assert "Drafts" not in schema["$defs"]  # used once: it stands in its place
    row = as_dict(Row("a", inner=Row("b", part=Drafts()), parts=(Drafts(1, 2),)))
    assert validator.is_valid([row])
    for wrong in ({"name": 1}, {"acceptance_rate": 2}, {"draft_ends": "never"}, {"other": 1}, {"parts": [{}]}):
        assert not validator.is_valid([row | wrong])
    assert not validator.is_valid([{key: value for key, value in row.items() if key != "seconds"}])
    brief = jsonschema.Draft202012Validator(json_schema(Row, "row", "A row.", nulls=False))
    assert brief.is_valid(as_dict(Row("a"), nulls=False)) and not brief.is_valid({"parts": []})
    assert not brief.is_valid({"name": "a", "parts": [], "seconds": None})
    assert '"null' not in json.dumps(brief.schema)
