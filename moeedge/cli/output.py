"""The choice of `-o` where a command prints a table or JSON."""

from __future__ import annotations

from enum import Enum


class Output(str, Enum):
    """How the result is printed."""

    TABLE = "table"
    JSON = "json"
