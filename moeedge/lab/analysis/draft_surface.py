"""Speed-up by acceptance and draft cost, from records of `moeedge bench --accept` with several drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moeedge.bench.config import REFERENCE
from moeedge.errors import InputError, require
from moeedge.paths import unpacked
from moeedge.records import figure
from moeedge.schemas import read_json


@dataclass(frozen=True, kw_only=True)
class SurfacePoint:
    """One draft at one acceptance; ratios are decoding speeds over that of stock's fastest mode, in hindsight."""

    model: str = figure("File of the target", axis="name")
    n_gen: int = figure("Tokens of an answer", axis="name")
    draft: str = figure("File of the draft, or ngram", title="draft")
    draft_cost: float = figure(
        "Time of one draft over that of decoding one token (T_D / T_T)", title="T_D / T_T", form=".3f", axis="name"
    )
    acceptance: float = figure("Rate at which drafts are accepted", title="acceptance", form="g", axis="x", most=1)
    ratio: float = figure("Speed with drafts as measured (auto). A ratio", title="auto", form=".2f", axis="y")
    low: float | None = figure("Lower end of its 95 % interval", title="low", form=".2f")
    high: float | None = figure("Upper end of its 95 % interval", title="high", form=".2f")
    fastest_stock: str = figure("Stock's fastest mode", title="fastest stock mode")
    fixed_ratio: float | None = figure(
        "Speed with the best fixed draft length. A ratio", title="best fixed", form=".2f", axis="y"
    )
    fixed_gamma: int | None = figure("That length; 0: none", title="at length")
    disturbed: str | None = figure(
        "Why the ratios are not to be trusted; null: nothing disturbed them", title="disturbed"
    )
    stock_ratio: float = figure(
        "Stock's fastest mode over stock without drafts. A ratio", title="stock over plain", form=".2f"
    )


def read_points(path: Path) -> list[SurfacePoint]:
    """The points of a record of bench. Raises InputError for any other file."""
    try:
        rows = read_json(unpacked(path.read_bytes()).decode())
        is_record = (
            isinstance(rows, list) and rows and all(isinstance(row, dict) and "tg_ts_median" in row for row in rows)
        )
        require(is_record, "its rows are not those of moeedge bench")
        numbers = (value for row in rows for value in row.values() if isinstance(value, float))
        require(all(map(math.isfinite, numbers)), "it has numbers that are not finite")
        points = surface_points(rows)
        are_usual = all(0 <= point.draft_cost < math.inf and point.ratio > 0 for point in points)
        require(are_usual, "it has numbers that are no times or speeds")
        return points
    except OSError as error:
        reason = error.strerror or "it cannot be read"
    except (ArithmeticError, AttributeError, KeyError, TypeError):  # no key, or another kind of value
        reason = "its rows are not those of moeedge bench"
    except ValueError as error:
        reason = str(error)
    raise InputError(f"Cannot use {path}: {reason}.", "Give files that moeedge bench -o json has printed.")


def surface_points(rows: Sequence[dict[str, Any]]) -> list[SurfacePoint]:
    """The points of the rows of one record; only tests with stock-ar, another stock mode and moeedge:auto have one."""
    points = []
    rows = [row for row in rows if row.get("acceptance") is not None and row["tg_ts_median"]]
    plain_ts = [row["tg_ts_median"] for row in rows if row["mode"] == REFERENCE]
    draft_cost = _draft_s(rows) * float(np.median(plain_ts)) if plain_ts else 0.0  # of the same draft everywhere
    for test in dict.fromkeys(row["test"] for row in rows):
        own = [row for row in rows if row["test"] == test]
        auto = next((row for row in own if row["auto_gamma"] and row["ratio_best_stock"]), None)
        plain = next((row for row in own if row["mode"] == REFERENCE), None)
        if auto is None or plain is None:
            continue
        fixed = [row for row in own if row["mode"].startswith("moeedge") and not row["auto_gamma"]]
        best = max(fixed, key=lambda row: float(row["ratio_best_stock"] or 0), default=None)
        stock = max(row["tg_ts_median"] for row in own if row["mode"].startswith("stock"))
        points.append(
            SurfacePoint(
                model=auto["model"],
                n_gen=auto["n_gen"],
                draft=auto["draft"],
                draft_cost=draft_cost,
                acceptance=auto["acceptance"],
                ratio=auto["ratio_best_stock"],
                low=auto["ratio_best_stock_low"],
                high=auto["ratio_best_stock_high"],
                fastest_stock=auto["best_stock"],
                fixed_ratio=None if best is None else best["ratio_best_stock"],
                fixed_gamma=None if best is None else best["gamma"],
                disturbed=auto["disturbed"],
                stock_ratio=stock / plain["tg_ts_median"],
            )
        )
    return points


def _draft_s(rows: Sequence[dict[str, Any]]) -> float:
    """Seconds of a draft, from the rows with a fixed length, which drop none that they have computed."""
    fixed = [row for row in rows if row["gamma"] and not row["auto_gamma"] and not row["draft_p_min"]]
    samples = [sample for row in fixed for sample in row["samples"]]
    n_drafted = sum(sample["drafted"] for sample in samples)
    return float(sum(sample["draft_s"] for sample in samples) / n_drafted) if n_drafted else 0.0


def break_even(points: Sequence[SurfacePoint]) -> dict[float, float | None]:
    """Of one target: by acceptance, the draft cost up to which `auto` beats stock at its best; None: at none.

    Costs between two measured ones are interpolated; where all pay, the largest one is returned.
    """
    costs: dict[float, float | None] = {}
    for acceptance in sorted({point.acceptance for point in points}):
        own = sorted((point.draft_cost, point.ratio) for point in points if point.acceptance == acceptance)
        last = max((i for i, (_, ratio) in enumerate(own) if ratio > 1), default=None)
        if last is None:
            costs[acceptance] = None
            continue
        draft_costs, ratios = zip(*reversed(own[last : last + 2]), strict=True)  # ratios ascend, as interp wants
        costs[acceptance] = float(np.interp(1.0, ratios, draft_costs))
    return costs
