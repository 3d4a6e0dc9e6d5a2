"""The table of docs/policies.md on the bundled pair, from the rows of several runs of the command that it prints.

    for i in 1 2 3; do moeedge bench --policy spac,lfu,spac-program,spac-paper,lru,static --cache-ratio 0.17 \\
        -dev emulated --draft-max 8 -r 1 -o json > $i.json; done
    python -m tests.benchmarks.policies_table 1.json 2.json 3.json [--record OUT.json.gz]

A figure is the median over the runs; ratios also have the smallest and the largest. One repetition each: a policy that
learns the experts of tokens would know a text that is repeated.
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moeedge.ui.tables import Column, markdown, text_column
from tests.benchmarks.performance import read

Row = dict[str, Any]
_NAMES = {"stock-ar": "stock llama.cpp, no draft", "stock-sd": "stock, with the draft"}


def lanes(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each mode and policy, in the order of the runs."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["mode"], row["policy"]), []).append(row)
    return list(found.values())


def _median(key: str, form: str) -> Callable[[list[Row]], str | None]:
    def text(lane: list[Row]) -> str | None:
        values = [row[key] for row in lane]
        return None if None in values else format(statistics.median(values), form)

    return text


def _with_range(key: str) -> Callable[[list[Row]], str]:
    def text(lane: list[Row]) -> str:
        values = [row[key] for row in lane]
        if len(set(values)) == 1:
            return f"{values[0]:.2f}"
        return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    return text


_COLUMNS = (
    text_column("mode", lambda lane: _NAMES.get(lane[0]["mode"], lane[0]["mode"])),
    Column("policy", lambda lane: None if lane[0]["policy"] == "none" else lane[0]["policy"], left=True),
    Column("pair hits", _median("hit_rate_pairs", ".3f")),
    Column("expert hits", _median("hit_rate_experts", ".3f")),
    Column("uploads per layer and step", _median("uploads_per_layer_step", ".2f")),
    Column("output as stock", lambda lane: ", ".join(dict.fromkeys(row["output_check"] for row in lane))),
    Column("decode ratio (range)", _with_range("ratio")),
    Column("with the drain", _with_range("ratio_drained")),
)


def table(rows: Sequence[Row]) -> str:
    return markdown(_COLUMNS, lanes(rows))


def main(arguments: Sequence[str]) -> None:
    paths, _, out = " ".join(arguments).partition(" --record ")
    rows = [row for path in paths.split() for row in read(Path(path))]
    if out:
        Path(out).write_bytes(gzip.compress(json.dumps(rows).encode(), mtime=0))
    print(table(rows), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
