"""The results of `moeedge bench` as Markdown, CSV, JSON or JSON Lines; text in, text out."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from moeedge.bench.records import BenchRow
from moeedge.bench.samples import Spread
from moeedge.bench.scores import different_scores

FORMATS = ("md", "csv", "json", "jsonl")
_NONE = "-"
# columns of a table in which some mode had an expert cache
_CACHE_TEXT = ("policy", "cache")
_CACHE_NUMBERS = ("hits", "expert hits", "uploads/step", "MiB moved")
_MIB = 1024 * 1024


def render(rows: Sequence[BenchRow], form: str) -> str:
    """The rows in one of FORMATS, ending in a newline."""
    if form == "json":
        return json.dumps([row.as_dict() for row in rows], indent=2, ensure_ascii=False) + "\n"
    if form == "jsonl":
        return "".join(json.dumps(row.as_dict(), ensure_ascii=False) + "\n" for row in rows)
    if form == "csv":
        return _csv(rows)
    return _markdown(rows)


def difference_lines(rows: Sequence[BenchRow]) -> list[str]:
    """One line for each place where a mode's answer left stock-ar's."""
    lines = []
    for row in rows:
        if row.output is None:
            continue
        for kind, differences in (("near-tie", row.output.near_ties), ("DIFFERENT", row.output.different)):
            lines += [
                f"{kind}: {row.label}, {row.test} prompt {d.prompt}, turn {d.turn + 1}, token {d.position + 1}: "
                f"{_shown_token(d.token)} instead of {_shown_token(d.reference_token)}, {d.gap:.4f} logits apart"
                for d in differences
            ]
    return lines


def score_lines(rows: Sequence[BenchRow]) -> list[str]:
    """What the first scored row's score is made of, and where another mode's is another."""
    scored = [(row.label, row.scores) for row in rows if row.scores.n_answers]
    if not scored:
        return []
    scores, n_predict = scored[0][1], rows[0].setup["n_predict"]
    lines = [
        f"score: {scores.scorer or 'none'}; {scores.n_cut} of {scores.n_answers} answers cut at {n_predict} tokens"
    ]
    lines += [f"not scored: {n} of {scores.n_answers}, {reason}" for reason, n in scores.unscored]
    if len(scores.by_category) > 1:
        each = (f"{one.category} {one.score:.3f} ({one.n_scored})" for one in scores.by_category)
        lines.append(f"score by category: {', '.join(each)}")
    return [*lines, *different_scores(scored)]


def _shown_token(token: int | None) -> str:
    return "the end" if token is None else f"token {token}"


def _markdown(rows: Sequence[BenchRow]) -> str:
    """A table as llama-bench prints it: what is the same everywhere stands above, once."""
    if not rows:
        return ""
    has_cache = any(row.cache_ratio is not None for row in rows)
    has_scores = any(row.scores.n_answers for row in rows)
    columns = [
        "test", "mode", *(_CACHE_TEXT if has_cache else ()), "pp t/s", "tg t/s", "TTFT ms", "accepted", "tokens/step",
        "experts/step", *(_CACHE_NUMBERS if has_cache else ()), "output",
        *(("score",) if has_scores else ()), "pp ratio", "tg ratio",
    ]  # fmt: skip
    cells = [[_cell(column, row) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [columns, *cells]) for i in range(len(columns))]
    n_text = 3 if has_cache else 2  # the first columns are text and stand left
    lines = [
        _line(columns, widths, n_text),
        "|" + "|".join("-" * (w + 2) if i < n_text else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|",
        *(_line(line, widths, n_text) for line in cells),
    ]
    setup = rows[0].setup
    commit = f", commit {setup['commit'][:10]}{' (changed)' if setup['dirty'] else ''}" if setup["commit"] else ""
    drafted = next((row.setup for row in rows if row.setup["gamma"]), None)
    draft = f"draft {drafted['draft']} (gamma {drafted['gamma']})" if drafted else "no draft"
    cached = next((row.setup for row in rows if row.cache_ratio is not None), None)
    if cached is not None:
        draft += f"; device {cached['device']}"
    lines += [
        "",
        f"{setup['model']}, {draft}; {setup['cpu']}, threads: {setup['threads']}, context: {setup['n_ctx']}, "
        f"repetitions: {setup['repetitions']}",
        f"moeedge {setup['version']}{commit}, llama-cpp-python {setup['llama_cpp_version']}",
        *score_lines(rows),
    ]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str], widths: Sequence[int], n_text: int) -> str:
    padded = [c.ljust(w) if i < n_text else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
    return "| " + " | ".join(padded) + " |"


def _cell(column: str, row: BenchRow) -> str:
    if column == "test":
        return row.test
    if column == "mode":
        return row.mode
    if column == "policy":
        return _NONE if row.policy == "none" else row.policy
    if column == "score":
        return str(row.scores)
    if column == "output":
        near = "" if row.output is None or not row.output.near_ties else f" ({len(row.output.near_ties)} near-ties)"
        return _NONE if row.output is None else f"{row.output}{near}"
    spreads: dict[str, Spread | None] = {"pp t/s": row.pp, "tg t/s": row.tg}
    if column in spreads:
        spread = spreads[column]
        return _NONE if spread is None else f"{spread.mean:.2f} ± {spread.stddev:.2f}"
    numbers: dict[str, tuple[float | None, str]] = {
        "TTFT ms": (None if row.ttft_s is None else row.ttft_s * 1000, ".1f"),
        "accepted": (row.acceptance_rate, ".2f"),
        "tokens/step": (row.tokens_per_step, ".2f"),
        "experts/step": (row.experts_per_verification, ".1f"),
        "cache": (row.cache_ratio, "g"),
        "hits": (row.cache.hit_rate_pairs, ".3f"),
        "expert hits": (row.cache.hit_rate_unique, ".3f"),
        "uploads/step": (row.cache.uploads_per_step, ".1f"),
        "MiB moved": (None if row.cache.bytes_moved is None else row.cache.bytes_moved / _MIB, ".1f"),
        "pp ratio": (row.ratio_pp, ".3f"),
        "tg ratio": (row.ratio, ".3f"),
    }
    value, form = numbers[column]
    return _NONE if value is None else format(value, form)


def _csv(rows: Sequence[BenchRow]) -> str:
    """Every key of the record but the raw samples; lists as JSON."""
    out = io.StringIO()
    records = [{key: value for key, value in row.as_dict().items() if key != "samples"} for row in rows]
    keys = list(dict.fromkeys(key for record in records for key in record))
    writer = csv.DictWriter(out, keys, restval="", lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow({key: _csv_value(value) for key, value in record.items()})
    return out.getvalue()


def _csv_value(value: Any) -> Any:
    if isinstance(value, (list, dict)):
        return json.dumps(value, ensure_ascii=False)
    return "" if value is None else value
