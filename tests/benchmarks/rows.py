"""Rows of a benchmark: printed as they come, and written to a record."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def keep_rows(rows: Iterable[DataclassInstance], schema: str, out: Path | None) -> None:
    """Prints each row as soon as it is there, then writes all of them to `out`, where it is given."""
    kept = []
    for row in rows:
        print(row, flush=True)
        kept.append(asdict(row))
    if out is not None:
        out.write_text(json.dumps({"schema": schema, "rows": kept}, indent=1) + "\n")
