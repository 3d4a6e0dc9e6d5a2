"""The tables of docs/performance.md from its records.

    python -m tests.benchmarks.performance docs/benchmarks/performance-*.json.gz
    python -m tests.benchmarks.performance --again FIRST AGAIN      # do the figures of a command repeat?

Takes records of `moeedge bench -o json`, `moeedge lab rivals -o json` and, repeated, of beyond_ram; gzipped or not.
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from moeedge.bench.figures import MEAN, interval_around, over_best_stock
from moeedge.lab.analysis.draft_surface import surface_points
from moeedge.lab.cli.rivals import columns as rivals_columns
from moeedge.lab.experiments.rivals import SCHEMA as RIVALS
from moeedge.ui.bench_views import limit_lines
from moeedge.ui.tables import Column, markdown, text_column
from moeedge.units import format_bytes

Row = dict[str, Any]
Ratio = tuple[float, float, float]  # with its 95 % interval
_REAL_COSTS = (0.2, 0.3)  # T_D / T_T(1) of Qwen3-0.6B next to Qwen3-30B-A3B


def read(path: Path) -> Any:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def lane(row: Row) -> str:
    """The mode with its draft length and budget."""
    length = "auto" if row["auto_gamma"] else row["gamma"]
    p_min = f"p-min {row['draft_p_min']:g}" if row.get("draft_p_min") else ""
    parts = (row["mode"], f"gamma {length}" if length else "", p_min, row["budget"] or "")
    return " ".join(part for part in parts if part)


def tables(record: Sequence[Row]) -> Iterator[str]:
    first, rows = record[0], [SimpleNamespace(**row) for row in record]
    if first["schema"] != RIVALS:
        yield from bench_tables(record)
        return
    yield f"{first['model']} ({format_bytes(first['model_bytes'])}), {first['time']}\n"
    yield f"{first['cpu']}, threads: {first['threads']}, commit {first['commit']}\n"
    ratios = ", ".join(f"{row['test']} {over_stock(row):.2f}" for row in record)
    yield f"over the faster of stock's layouts: {ratios}\n"
    yield markdown(rivals_columns(rows), rows)


def over_stock(row: Row) -> float:
    """Median over repetitions of moeedge's speed over that of the faster of llama.cpp's layouts, in either loop."""
    speeds: dict[tuple[str, str], dict[int, float]] = {}
    for sample in row["samples"]:
        speeds.setdefault((sample["rival"], sample["settings"]), {})[sample["repetition"]] = sample["speed_ts"]
    stock = [own for (rival, _), own in speeds.items() if rival in ("stock", "llama.cpp")]
    base = max(stock, key=lambda own: (len(own) > 1, statistics.median(own.values())))  # as lab rivals chooses
    (ours,) = (own for (rival, _), own in speeds.items() if rival == "moeedge")
    return statistics.median(ours[repetition] / base[repetition] for repetition in ours if repetition in base)


def bench_tables(rows: Sequence[Row]) -> Iterator[str]:
    """The modes, and our modes over the fastest stock mode of each category."""
    first = rows[0]
    yield f"{first['model']} ({format_bytes(first['model_bytes'])}), {first['time']}\n"
    machine = f"{first['cpu']}, threads: {first['threads']}, commit {first['commit']}"
    yield "\n".join([machine, *limit_lines(SimpleNamespace(**{"limit_ts": None} | first))]) + "\n"
    columns = [
        text_column("test", lambda row: row["test"] if len(row["test"]) < 9 else "all sets"), text_column("mode", lane),
        Column("pp t/s", "pp_ts_median", ".1f"), Column("tg t/s", "tg_ts_median", ".1f"),
        Column("pp ratio", "ratio_pp", ".3f"), Column("tg ratio", "ratio", ".3f"),
        Column("accepted", "acceptance_rate", ".2f"), Column("T_D/T_T", lambda row: draft_cost(rows, row), ".3f"),
        Column("tokens/step", "tokens_per_step", ".2f"),
        Column("of limit", "limit_share", ".2f"), Column("output", "output_check"),
        Column("score", "score", ".3f"), Column("change", "score_change", "+.3f"),
        Column("over best stock", "ratio_best_stock", ".3f"),
    ]  # fmt: skip
    yield markdown([column for column in columns if any(column.text(row) != "-" for row in rows)], rows)
    ours = [row for row in rows if row["best_stock_by_category"]]
    if ours:
        parts = [{part["category"]: part for part in row["best_stock_by_category"]} for row in ours]
        lines = [
            (name, part["fastest"] or "-", *(interval(own[name]) for own in parts)) for name, part in parts[0].items()
        ]
        heads = [text_column("prompts", 0), text_column("fastest stock mode", 1)]
        yield markdown([*heads, *(Column(lane(row), i, str) for i, row in enumerate(ours, start=2))], lines)
        for row, own in zip(ours, parts, strict=True):
            least = min((part for part in own.values() if part["category"] != MEAN), key=lambda part: part["ratio"])
            yield f"{lane(row)}: mean {own[MEAN]['ratio']:.3f}, least {least['ratio']:.3f} ({least['category']})\n"
            for cost in _REAL_COSTS if draft_cost(rows, row) else ():
                means = " to ".join(f"{recosted(rows, row, cost, n_dropped):.2f}" for n_dropped in (1, 0))
                yield f"{lane(row)}, if T_D/T_T were {cost}: mean {means}\n"


def plain_s(rows: Sequence[Row]) -> float:
    """Seconds of stock's plain decoding per token, T_T(1)."""
    samples = next(row for row in rows if row["mode"] == "stock-ar")["samples"]
    return sum(sample["decode_s"] for sample in samples) / sum(sample["decode_tokens"] for sample in samples)


def draft_cost(rows: Sequence[Row], row: Row) -> float | None:
    """T_D / T_T(1): seconds of drafting per drafted token over those of a plain step of stock; None without either."""
    drafted = sum(sample["drafted"] for sample in row["samples"])
    if all(other["mode"] != "stock-ar" for other in rows):
        return None
    return sum(sample["draft_s"] for sample in row["samples"]) / drafted / plain_s(rows) if drafted else None


def recosted(rows: Sequence[Row], row: Row, cost: float, n_dropped: int) -> float:
    """Mean ratio of `row` to the fastest stock mode of each category, if drafting a token took `cost` of a plain step.

    Drafts, their lengths and all other times stay as measured. n_dropped: tokens per step that `auto` drafts and
    drops for their confidence, which the samples do not count: 0 or 1; stock's drafts with a least probability, too.
    Drafts by n-grams stay free.
    """
    step_s = plain_s(rows)

    def turns(other: Row) -> list[Any]:
        label = SimpleNamespace(label=lane(other))
        return [
            SimpleNamespace(
                key=tuple(sample[name] for name in ("prompt", "turn", "repetition")), category=sample["category"],
                mode=label, tg_ts=sample["decode_tokens"], decode_tokens=sample["decode_tokens"],
                decode_s=sample["decode_s"] if other.get("draft") == "ngram" else (
                    sample["decode_s"] - sample["draft_s"] + cost * step_s * (
                        sample["drafted"] + (n_dropped * sample["steps"] if ends_early(other) else 0)
                    )
                ),
            )
            for sample in other["samples"]
        ]  # fmt: skip

    ratios = over_best_stock(turns(row), [turns(other) for other in rows if other["mode"].startswith("stock")])
    return next(part.ratio for part in ratios if part.category == MEAN)


def ends_early(row: Row) -> bool:
    """Whether drafts may end with a token that is dropped for its confidence."""
    return bool(row["auto_gamma"] or row.get("draft_p_min"))


def interval(part: Row) -> str:
    return f"{part['ratio']:.3f}" + (f" ({part['low']:.3f} to {part['high']:.3f})" if part["low"] is not None else "")


def ratios(record: Any) -> dict[str, Ratio]:
    """By test the ratio of ours that the record's table tells: over the fastest rival, best stock mode, or stock."""
    if isinstance(record, dict):
        return {test: _median_ratio(pairs) for test, pairs in over_stock_by_round(record).items()}
    if record[0]["schema"] == RIVALS:
        return {row["test"]: (row["ratio"], row["low"], row["high"]) for row in record if row.get("low")}
    found = {f"accepted {point.acceptance:g}": (point.ratio, point.low, point.high) for point in surface_points(record)}
    for row in () if found else record:
        stock = next(other for other in record if other["mode"] == "stock-ar" and other["test"] == row["test"])
        speeds = "tg_ts_samples" if row["n_gen"] else "pp_ts_samples"
        if row is not stock:
            found[row["test"]] = _median_ratio(np.divide(row[speeds], stock[speeds]).tolist())
    return {test: (ratio, low, high) for test, (ratio, low, high) in found.items() if low and high}


def over_stock_by_round(record: Row) -> dict[str, list[float]]:
    """Of a record of beyond_ram: by arm of ours and test, tokens/s over those of the round's fastest arm of stock."""
    speeds: dict[tuple[str, int], dict[str, float]] = {}
    for run in record["runs"]:
        timed = [("tg", answer["decode_tokens"] / answer["decode_s"]) for answer in run["answers"]]
        timed += [(f"pp{prompt['tokens']}", prompt["tokens"] / prompt["prefill_s"]) for prompt in run["prompts"]]
        for test, speed_ts in timed:
            speeds.setdefault((test, run["round"]), {})[run["arm"]] = speed_ts
    pairs: dict[str, list[float]] = {}
    for (test, _), own in sorted(speeds.items()):
        stock_ts = max(speed_ts for arm, speed_ts in own.items() if arm.startswith("stock"))
        for arm in sorted(arm for arm in own if not arm.startswith("stock")):
            pairs.setdefault(f"{arm} {test}", []).append(own[arm] / stock_ts)
    return pairs


def _median_ratio(pairs: list[float]) -> Ratio:
    median = statistics.median(pairs)
    return (median, *interval_around(median, np.array(pairs)))


def repeated(first: Any, again: Any) -> Iterator[str]:
    """The ratios of a command, run twice, and whether the second lies within the interval of the first."""
    others = ratios(again)
    lines = [(test, own, others[test]) for test, own in ratios(first).items() if test in others]
    columns = [
        text_column("test", 0), text_column("first", lambda line: "{:.2f} ({:.2f} to {:.2f})".format(*line[1])),
        text_column("again", lambda line: "{:.2f} ({:.2f} to {:.2f})".format(*line[2])),
        text_column("within", lambda line: "yes" if is_within(*line[1:]) else "no"),
    ]  # fmt: skip
    yield markdown(columns, lines)
    yield f"{sum(is_within(*line[1:]) for line in lines)} of {len(lines)} within the interval of the first run"


def is_within(first: Ratio, again: Ratio) -> bool:
    return first[1] <= again[0] <= first[2]


def main() -> None:
    if sys.argv[1:2] == ["--again"]:
        print("\n".join(repeated(*(read(Path(name)) for name in sys.argv[2:]))))
        return
    for name in sys.argv[1:]:
        print(f"\n### {Path(name).name}\n")
        print("\n".join(tables(read(Path(name)))))


if __name__ == "__main__":
    main()
