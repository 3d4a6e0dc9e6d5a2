"""Constants whose sources differ, and the freeze of all constants of the simulator.

A data file writes a constant with several sources as {"low": ..., "chosen": ..., "high": ...}. A simulation takes one
side of all of them: the chosen values, those that make every program fastest, or those that make it slowest. Rates
(names that end in `_per_s` or `_flops`) are fast where they are high, all other constants where they are low.

`data/frozen.json` holds the day on which the constants were frozen and the hash of the files they are in, so that a
prediction can name the constants that it was made with.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

Side = Literal["fast", "chosen", "slow"]
SIDES: tuple[Side, ...] = ("fast", "chosen", "slow")
DATA_FILES = ("handoffs.json", "hardware.json", "models.json", "papers.json", "programs.json")
_KEYS = {"low", "chosen", "high"}
_RATES = ("_per_s", "_flops")


@dataclass(frozen=True)
class Freeze:
    """The day of a freeze, and the hash of the constants."""

    constants_frozen: str  # YYYY-MM-DD
    constants_sha256: str


def pick(entry: dict[str, Any], side: Side) -> dict[str, Any]:
    """A copy of a data file's object with one value of each range. Raises ValueError for a range out of order."""
    return {name: _value(name, value, side) for name, value in entry.items()}


def frozen() -> Freeze:
    """The freeze that data/frozen.json states; a test compares its hash with `content_sha256`."""
    return Freeze(**json.loads(_read("frozen.json")))


def content_sha256() -> str:
    """The hash of the data files as they are."""
    return hashlib.sha256(b"\0".join(_read(name) for name in DATA_FILES)).hexdigest()


def _value(name: str, value: Any, side: Side) -> Any:
    if not isinstance(value, dict) or set(value) != _KEYS:
        return value
    if not value["low"] <= value["chosen"] <= value["high"]:
        raise ValueError(f"{name}: the chosen value is not between low and high")
    if side == "chosen":
        return value["chosen"]
    return value["high" if (side == "fast") == name.endswith(_RATES) else "low"]


def _read(name: str) -> bytes:
    return (resources.files("moeedge.lab.sim") / "data" / name).read_bytes()
