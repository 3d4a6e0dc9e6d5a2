"""Numbers as bars and sparklines of block characters; no colour is needed to read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"
_EMPTY = "░"


def bar(share: float, columns: int) -> str:
    """A share of one as a bar of `columns` characters."""
    filled = min(max(share, 0.0), 1.0) * columns
    whole = int(filled)
    eighths = int((filled - whole) * 8)
    text = "█" * whole + (_EIGHTHS[eighths] if eighths else "")
    return text + _EMPTY * (columns - len(text))


def resample(values: Sequence[float], n: int) -> list[float]:
    """`values` as at most `n` means over stretches of about equal length, in order."""
    n = min(n, len(values))
    edges = [len(values) * index // n for index in range(n + 1)] if n else []
    return [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def sparkline(values: Sequence[float], columns: int, *, top: float) -> str:
    """A character per value, its height between 0 and `top`; fewer, larger steps where there is less room."""
    if top <= 0:
        return ""
    last = len(_LEVELS) - 1
    return "".join(_LEVELS[round(min(max(v / top, 0.0), 1.0) * last)] for v in resample(values, columns))
