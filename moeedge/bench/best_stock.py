"""How fast a mode is next to stock llama.cpp at its best: over the fastest of the stock modes, chosen in hindsight.

With stock-ar and stock-sd at several draft lengths in one run, the comparison is the fastest of them for each category
of the prompts, as a user would choose who had tried them all on these very prompts. Speeds are all tokens over all
seconds of the same turns. Intervals are percentiles of bootstrap samples of these turns (Efron 1979); each chooses its
own fastest stock mode, so that noise, which makes a maximum larger, counts for stock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.bench.samples import Sample, named

ALL = ""  # the category of all prompts together
MEAN = "mean"  # of the categories' ratios
_N_RESAMPLES = 2000
_PERCENTILES = (2.5, 97.5)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class StockRatio:
    """Decoding speed over that of the fastest stock mode."""

    category: str  # ALL, MEAN, or a category of the prompts
    ratio: float
    low: float | None  # of the 95 % interval; None where a single turn says nothing of its error
    high: float | None
    fastest: str  # BenchMode.label of the stock mode; "" for MEAN
    n_turns: int  # turns and repetitions that both have


def over_best_stock(own: Sequence[Sample], stock: Sequence[Sequence[Sample]]) -> tuple[StockRatio, ...]:
    """Returns the ratios of `own`, the samples of one mode: of all prompts, of each category, and the categories' mean.

    stock: the samples of each stock mode, of the same turns in the same run. Nothing is returned without a common turn;
    categories and mean are left out where there is only one category.
    """
    lanes = [{sample.key: sample for sample in lane if sample.tg_ts} for lane in (own, *stock)]
    keys = [key for key in lanes[0] if all(key in lane for lane in lanes)]
    if not keys or len(lanes) < 2:
        return ()
    labels = [lane[keys[0]].mode for lane in lanes[1:]]
    tokens, seconds = (
        np.array([[getattr(lane[key], name) for key in keys] for lane in lanes], dtype=np.float64)
        for name in ("decode_tokens", "decode_s")
    )  # [lanes, turns]
    of_turn = np.array([lanes[0][key].category for key in keys])
    categories = [category for category in dict.fromkeys(of_turn.tolist()) if category != ALL]
    rng = np.random.default_rng(0)

    def measured(category: str, turns: NDArray[np.intp]) -> tuple[StockRatio, Array]:
        speeds = _speeds(tokens, seconds, turns[None])[:, 0]
        drawn = _speeds(tokens, seconds, rng.choice(turns, (_N_RESAMPLES, len(turns))))
        ratios = drawn[0] / drawn[1:].max(axis=0)
        low, high = _interval(ratios) if len(turns) > 1 else (None, None)
        best = int(speeds[1:].argmax())
        ratio = float(speeds[0] / speeds[1 + best])
        return StockRatio(category, ratio, low, high, labels[best], len(turns)), ratios

    total = measured(ALL, np.arange(len(keys)))[0]
    if len(categories) < 2:
        return (total,)
    parts = [measured(category, np.flatnonzero(of_turn == category)) for category in categories]
    low, high = None, None
    if all(part.n_turns > 1 for part, _ in parts):
        low, high = _interval(np.mean([drawn for _, drawn in parts], axis=0))
    mean = float(np.mean([part.ratio for part, _ in parts]))
    return (total, *(part for part, _ in parts), StockRatio(MEAN, mean, low, high, "", len(keys)))


def _interval(drawn: Array) -> tuple[float, float]:
    low, high = np.percentile(drawn, _PERCENTILES)
    return float(low), float(high)


def _speeds(tokens: Array, seconds: Array, turns: NDArray[np.intp]) -> Array:
    """Tokens per second [lanes, draws] of the turns [draws, n]: all tokens over all seconds."""
    return np.asarray(tokens[:, turns].sum(axis=2) / seconds[:, turns].sum(axis=2))


def stock_record(ratios: Sequence[StockRatio]) -> dict[str, Any]:
    """Returns the keys of a row: ratio, interval and fastest mode of all prompts, and the parts."""
    total = ratios[0] if ratios else None
    return {
        "ratio_best_stock": None if total is None else total.ratio,
        **named(total, "low", "high", prefix="ratio_best_stock_"),
        "best_stock": None if total is None else total.fastest,
        "best_stock_by_category": [asdict(part) for part in ratios[1:]],
    }
