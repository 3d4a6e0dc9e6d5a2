"""The figures of an answer as short texts, with one wording for the panel, the stats line and /stats.

Bars and sparklines are drawn with block characters, so that they need no colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from moeedge.units import format_bytes

if TYPE_CHECKING:
    from moeedge.engine.types import EngineInfo, GenerationStats, StopReason
    from moeedge.scheduler.stats import PlacementStats

NONE = "-"  # stands for a figure that is not known
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"
_EMPTY = "░"


def bar(share: float, columns: int) -> str:
    """A share from 0 to 1 as a bar of `columns` characters."""
    filled = min(max(share, 0.0), 1.0) * columns
    full = int(filled)
    eighths = int((filled - full) * 8)
    text = "█" * full + (_EIGHTHS[eighths] if eighths else "")
    return text + _EMPTY * (columns - len(text))


def resample(values: Sequence[float], n: int) -> list[float]:
    """Means of `values` over at most `n` consecutive parts of about equal length."""
    n = min(n, len(values))
    edges = [len(values) * index // n for index in range(n + 1)] if n else []
    return [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def sparkline(values: Sequence[float], columns: int, *, top: float) -> str:
    """A character per value, its height between 0 and `top`; means of several values where there is less room."""
    if top <= 0:
        return ""
    last = len(_LEVELS) - 1
    return "".join(_LEVELS[round(min(max(v / top, 0.0), 1.0) * last)] for v in resample(values, columns))


@dataclass(frozen=True)
class Figure:
    """A label and its value as text."""

    label: str
    value: str
    draw: Callable[[int], str] | None = field(default=None, compare=False)  # draws the value in so many columns
    rank: int = field(default=0, compare=False)  # where there is no room, the highest rank is left out first


def speed(value_ts: float) -> str:
    """Tokens per second with three significant digits."""
    if value_ts <= 0:
        return NONE
    return f"{value_ts:.0f} t/s" if value_ts >= 100 else f"{value_ts:.1f} t/s"


def seconds(value_s: float) -> str:
    """A duration; milliseconds below a second."""
    if value_s <= 0:
        return NONE
    return f"{value_s * 1000:.0f} ms" if value_s < 1 else f"{value_s:.1f} s"


def percent(share: float | None) -> str:
    """A share from 0 to 1 in percent, without decimals."""
    return NONE if share is None else f"{100 * share:.0f} %"


def device(info: EngineInfo) -> str:
    """The device that holds experts, or "no device"."""
    return "no device" if info.device == "none" else info.device


def device_name(label: str) -> str:
    """A device's label without the part in brackets."""
    return label.split(" (", 1)[0]


def acceptance(stats: GenerationStats) -> str:
    """Accepted of drafted tokens."""
    rate = stats.acceptance_rate
    return NONE if rate is None else f"{percent(rate)} ({stats.accepted}/{stats.drafted})"


def experts(info: EngineInfo, stats: GenerationStats) -> str:
    """Distinct experts that one verification uses in a layer, of all in the layer."""
    if info.n_experts == 0:
        return "no experts"
    mean = stats.experts_per_verification
    return NONE if mean is None else f"{mean:.1f} of {info.n_experts}"


def live_figures(info: EngineInfo, stats: GenerationStats, *, ram_bytes: int, elapsed_s: float) -> list[Figure]:
    """The panel's figures while an answer streams; `elapsed_s` since the call is shown until the first token."""
    waiting = stats.ttft_s <= 0
    return [
        Figure("prefill", f"running, {elapsed_s:.1f} s" if waiting else speed(stats.pp_ts), rank=0 if waiting else 4),
        Figure("decode", speed(stats.tg_ts)),
        Figure("TTFT", seconds(stats.ttft_s), rank=5),
        Figure("tokens", str(stats.generated_tokens), rank=4),
        Figure("accepted", acceptance(stats) if info.gamma else "no draft", rank=1),
        Figure("tokens/step", f"{stats.tokens_per_step:.2f}" if stats.steps else NONE, rank=3),
        Figure("experts/step", experts(info, stats), rank=5),
        Figure("", "no device", rank=2)
        if info.device == "none"
        else Figure("device", device_name(info.device), rank=2),
        Figure("RAM", format_bytes(ram_bytes), rank=6),
    ]


def stop_note(reason: StopReason | None, info: EngineInfo) -> str:
    """Why the answer ended, unless the model ended it."""
    if reason == "length":
        return "cut at -n tokens"
    if reason == "context":
        return "context full"
    return "stopped" if reason == "interrupted" else ""


def _prompt_tokens(stats: GenerationStats) -> str:
    """Tokens computed of the prompt, and tokens of it that the KV cache still held."""
    kept = stats.prompt_tokens - stats.prefill_tokens
    return _tokens(stats.prefill_tokens) + (f", {kept} kept" if kept > 0 else "")


def _tokens(n_tokens: int) -> str:
    return f"{n_tokens} token" if n_tokens == 1 else f"{n_tokens} tokens"


def turn_parts(
    info: EngineInfo, stats: GenerationStats, reason: StopReason | None, cache: PlacementStats | None = None
) -> list[str]:
    """The parts of the stats line after a turn, in order of interest; `cache` counts that turn's decoding."""
    parts = [
        _tokens(stats.generated_tokens),
        f"decode {speed(stats.tg_ts)}",
        f"prefill {speed(stats.pp_ts)} ({_prompt_tokens(stats)})",
        f"TTFT {seconds(stats.ttft_s)}",
    ]
    if stats.drafted:
        parts.append(f"accepted {acceptance(stats)}")
        parts.append(f"{stats.tokens_per_step:.2f} tokens/step")
    if stats.experts_per_verification is not None:
        parts.append(f"{experts(info, stats)} experts/step")
    if cache is not None and cache.hit_rate_pairs is not None:
        parts.append(f"hit rate {percent(cache.hit_rate_pairs)}")
    parts.append(device(info))
    note = stop_note(reason, info)
    return [*parts, note] if note else parts


def total_parts(
    info: EngineInfo, answers: Sequence[GenerationStats], caches: Sequence[PlacementStats] = ()
) -> list[str]:
    """The parts of the stats line over several answers: sums, rates of the sums, and the mean TTFT."""
    decoded = sum(max(stats.generated_tokens - 1, 0) for stats in answers)
    decode_s = sum(stats.decode_s for stats in answers)
    prefilled = sum(stats.prefill_tokens for stats in answers)
    prefill_s = sum(stats.prefill_s for stats in answers)
    drafted = sum(stats.drafted for stats in answers)
    accepted = sum(stats.accepted for stats in answers)
    parts = [
        _tokens(sum(stats.generated_tokens for stats in answers)),
        f"decode {speed(decoded / decode_s if decode_s else 0)}",
        f"prefill {speed(prefilled / prefill_s if prefill_s else 0)} ({_tokens(prefilled)})",
        f"TTFT {seconds(sum(stats.ttft_s for stats in answers) / len(answers))}",
    ]
    if drafted:
        parts.append(f"accepted {percent(accepted / drafted)} ({accepted}/{drafted})")
        parts.append(f"{decoded / sum(stats.steps for stats in answers):.2f} tokens/step")
    pairs = sum(cache.pairs for cache in caches)
    if pairs:
        parts.append(f"hit rate {percent(sum(cache.pairs_hit for cache in caches) / pairs)}")
    return [*parts, device(info)]


def join_parts(parts: list[str], *, columns: int | None = None, separator: str = " | ") -> str:
    """The parts in one line, or in lines of at most `columns` characters that break only between parts."""
    if columns is None:
        return separator.join(parts)
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(separator) + len(part) <= columns:
            lines[-1] += separator + part
        else:
            lines.append(part)
    return "\n".join(lines)
