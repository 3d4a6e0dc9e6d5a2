"""The figures of an answer and of the expert cache as short texts: one wording for panel, stats line and /stats.

Bars and sparklines are drawn with block characters, so that they need no colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING

from moeedge.units import format_bytes, format_rate

if TYPE_CHECKING:
    from moeedge.engine.types import EngineInfo, GenerationStats, StopReason
    from moeedge.policies.base import LookaheadStatus
    from moeedge.scheduler.cache_governor import CacheChoice
    from moeedge.scheduler.governor import DraftChoice
    from moeedge.scheduler.stats import PlacementStats

NONE = "-"  # stands for a figure that is not known
_MIN_BAR = 6  # columns; a shorter bar shows too little
_MAX_BAR = 48  # columns; a longer bar shows no more
_TAU_TOP = 4.0  # the usual cap of utilities
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


_FEW_STEPS = 16  # an estimate of fewer may be off by a factor


def draft_length(choice: DraftChoice) -> str:
    """The draft length that pays by what steps have cost, and how much; trials of others are left out."""
    if choice.speed_up is None or choice.n_measured < _FEW_STEPS:
        return "measuring"
    if choice.ends_early:
        return f"as many as pay, {choice.speed_up:.2f}x plain by estimate"
    if choice.best == 0:
        return f"off: {choice.other} would be {choice.other_speed_up:.2f}x plain"
    return f"{choice.best} of {choice.gamma_max}, {choice.speed_up:.2f}x plain by estimate"


def experts(info: EngineInfo, stats: GenerationStats) -> str:
    """Distinct experts that one verification uses in a layer, of all in the layer."""
    if info.n_experts == 0:
        return "no experts"
    mean = stats.experts_per_verification
    return NONE if mean is None else f"{mean:.1f} of {info.n_experts}"


def budget(info: EngineInfo) -> str:
    """The expert budget in the words that every result under one carries; empty without one."""
    return "" if info.expert_budget is None else info.expert_budget.label_at(info.gamma)


def budget_effect(stats: GenerationStats) -> str:
    """The experts that a verification would use without the budget, and the routing probability that is kept."""
    if stats.experts_natural is None:
        return NONE
    return f"{stats.experts_natural:.1f} without it, {percent(stats.kept_probability)} of probability kept"


def live_figures(info: EngineInfo, stats: GenerationStats, *, ram_bytes: int, elapsed_s: float) -> list[Figure]:
    """The panel's figures while an answer streams; `elapsed_s` since the call is shown until the first token."""
    waiting = stats.ttft_s <= 0
    return [
        Figure("prefill", f"running, {elapsed_s:.1f} s" if waiting else speed(stats.pp_ts), rank=0 if waiting else 4),
        Figure("decode", speed(stats.tg_ts)),
        Figure("TTFT", seconds(stats.ttft_s), rank=5),
        Figure("tokens", str(stats.generated_tokens), rank=4),
        Figure("accepted", acceptance(stats) if info.gamma else "no draft", rank=1),
        *([Figure("drafts", draft_length(stats.choice), rank=3)] if stats.choice is not None else []),
        Figure("tokens/step", f"{stats.tokens_per_step:.2f}" if stats.steps else NONE, rank=3),
        Figure("experts/step", experts(info, stats), rank=5),
        Figure("", "no device", rank=2)
        if info.device == "none"
        else Figure("device", device_name(info.device), rank=2),
        *_budget_figures(info, stats),
        Figure("process" if is_ram(info.device) else "RAM", format_bytes(ram_bytes), rank=6),
    ]


def _budget_figures(info: EngineInfo, stats: GenerationStats) -> list[Figure]:
    """The budget, which no small window leaves out, and what it leaves out."""
    if info.expert_budget is None:
        return []
    shown = [Figure("budget", budget(info).removeprefix("budget "))]
    if stats.experts_natural is not None:
        shown.append(Figure("without budget", f"{stats.experts_natural:.1f} experts/step", rank=5))
        shown.append(Figure("probability kept", percent(stats.kept_probability), rank=4))
    return shown


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
    if stats.choice is not None:
        parts.append(f"drafts: {draft_length(stats.choice)}, {stats.drafts_per_step:.1f} per step")
        if stats.ngram_steps:
            parts.append(f"by n-grams in {stats.ngram_steps} of {stats.steps} steps")
    if stats.experts_per_verification is not None:
        parts.append(f"{experts(info, stats)} experts/step")
    if info.expert_budget is not None:
        effect = budget_effect(stats)
        parts.append(budget(info) if effect == NONE else f"{budget(info)}: {effect}")
    if cache is not None and cache.hit_rate_pairs is not None:
        shown = _disk_figures(cache) if is_ram(cache.device) else [Figure("pair hits", percent(cache.hit_rate_pairs))]
        parts += [f"{figure.label} {figure.value}" for figure in shown]
    if cache is not None and cache.choice is not None and not cache.choice.pays:
        parts.append(f"expert cache {cache_effect(cache.choice)}")
    if cache is not None and cache.lookahead is not None:
        parts.append(f"lookahead {lookahead(cache.lookahead)}")
    parts.append(device(info))
    note = stop_note(reason, info)
    return [*parts, note] if note else parts


def total_parts(
    info: EngineInfo,
    answers: Sequence[GenerationStats],
    caches: Sequence[PlacementStats] = (),
    budgets: Sequence[str] = (),
) -> list[str]:
    """The parts of the stats line over several answers: sums, rates of the sums, the mean TTFT, and their budgets."""
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
    parts += budgets
    pairs = sum(cache.pairs for cache in caches)
    if pairs:
        label = "RAM pair hits" if is_ram(info.device) else "pair hits"
        parts.append(f"{label} {percent(sum(cache.pairs_hit for cache in caches) / pairs)}")
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


def per_layer(count: float | None) -> str:
    """Experts per layer and step."""
    if count is None:
        return NONE
    return f"{count:.1f}" if count >= 10 else f"{count:.2f}"


def time_shares(stats: PlacementStats) -> list[Figure]:
    """Parts of the steps' time in percent: experts on the CPU, on the device, waiting for it, drafting, and the rest.

    The device computes at the same time as the CPU, so that its part comes on top of the others' 100 percent.
    """
    if stats.decode_s <= 0:
        return []
    rest_s = max(stats.decode_s - stats.cpu_s - stats.wait_s - stats.draft_s, 0.0)
    parts = [("CPU", stats.cpu_s), ("waiting", stats.wait_s), ("draft", stats.draft_s), ("rest", rest_s)]
    if not is_ram(stats.device):
        parts.insert(1, ("device", stats.device_s))
    return [Figure(label, percent(part_s / stats.decode_s)) for label, part_s in parts]


def lookahead(status: LookaheadStatus) -> str:
    """Whether experts are predicted from the draft, and what that brings."""
    if not status.used:
        return f"off: {status.reason}" if status.reason else "off"
    return "on" if status.gain is None else f"on, {100 * status.gain:+.0f} % hits"


def share_line(stats: PlacementStats, columns: int) -> str:
    """The parts in one line, shortened where it is narrow."""
    parts = time_shares(stats)
    full = ", ".join(f"{part.label} {part.value}" for part in parts) or NONE
    short = {"device": "dev", "waiting": "wait"}
    cut = [f"{short.get(part.label, part.label)} {part.value.replace(' ', '')}" for part in parts]
    forms = (f"step time: {full}", full, " ".join(cut), " ".join(cut[:-1]))
    return next((form for form in forms if len(form) <= columns), forms[-1])


def device_memory(stats: PlacementStats) -> tuple[float, int] | None:
    """Used and total bytes of the device as its driver reports them; for the emulated device, of its slots."""
    if is_emulated(stats) and stats.slots_total:
        return stats.pool_bytes * stats.slots_used / stats.slots_total, stats.pool_bytes
    if stats.vram_used_bytes is None or not stats.vram_total_bytes:
        return None
    return stats.vram_used_bytes, stats.vram_total_bytes


def is_emulated(stats: PlacementStats) -> bool:
    """Whether the device is a second CPU instance."""
    return device_name(stats.device) == "emulated"


def is_ram(device: str) -> bool:
    """Whether the "device" is host memory for a model that is larger, filled from the disk."""
    return device_name(device) == "RAM"


def memory_text(stats: PlacementStats) -> str:
    """Used and total memory, or the size of the slots if the driver does not report it."""
    known = device_memory(stats)
    if known is None:
        return f"slots {format_bytes(stats.pool_bytes)}"
    total = format_bytes(known[1])
    used = format_bytes(int(known[0])).removesuffix(total[total.index(" ") :])
    return f"{used} of {total}" + (", emulated" if is_emulated(stats) else "")


def memory_line(stats: PlacementStats, columns: int) -> str:
    """`memory_text` after a bar."""
    text = memory_text(stats)
    known = device_memory(stats)
    room = min(columns - len(text) - 1, _MAX_BAR)
    if known is None or room < _MIN_BAR:
        return text
    return f"{bar(known[0] / known[1], room)} {text}"


def tau_line(stats: PlacementStats, columns: int) -> str:
    """A sparkline of the thresholds per expert layer and their range; an infinite one (no expert is hot) is on top."""
    values = [value if math.isfinite(value) else _TAU_TOP + 1 for value in stats.tau]
    low, high = (f"{round(value, 1):g}" for value in (min(values), max(values)))
    text = low if low == high else f"{low}-{high}"
    return f"{sparkline(values, max(columns - len(text) - 1, 1), top=max(_TAU_TOP, *values))} {text}"


def _disk_figures(stats: PlacementStats) -> list[Figure]:
    """Experts in RAM: hits, what is read per token, at which rate, and how long the CPU waits for it."""
    read = NONE if stats.bytes_per_token is None else f"{stats.bytes_per_token / 1e6:.3g} MB"
    rate = NONE if stats.link_bytes_per_s is None else format_rate(stats.link_bytes_per_s)
    return [
        Figure("RAM pair hits", percent(stats.hit_rate_pairs)),
        Figure("read/token", read, rank=1),
        Figure("disk", rate, rank=2),
        Figure("disk wait", percent(stats.wait_share), rank=1),
    ]


def cache_effect(choice: CacheChoice) -> str:
    """Whether steps are computed with the cache, and their speed with it over that without."""
    state = "on" if choice.pays else "off"
    return f"{state}, measuring" if choice.gain is None else f"{state}, {choice.gain:.2f}x by measurement"


_RAM_LOST = Figure("", "RAM lost: mapped file")


def live_cache_figures(stats: PlacementStats) -> list[Figure]:
    """The panel's figures of the cache; a small window drops the highest `rank` first."""
    in_ram = [] if stats.ram is None else _ram_figures(stats.ram)
    if stats.lost:
        return [_RAM_LOST if is_ram(stats.device) else Figure("", "device lost: all on CPU"), *in_ram]
    rate = NONE if stats.link_bytes_per_s is None else format_rate(stats.link_bytes_per_s)
    from_disk = is_ram(stats.device)
    shown = [
        *([] if stats.choice is None else [Figure("cache speed", cache_effect(stats.choice), rank=2)]),
        *(_disk_figures(stats) if from_disk else [Figure("pair hits", percent(stats.hit_rate_pairs))]),
        Figure("expert hits", percent(stats.hit_rate_experts), rank=4 if from_disk else 1),
        Figure("slots", f"{stats.slots_used}/{stats.slots_total}", rank=2),
        Figure("loads/layer" if from_disk else "uploads/layer", per_layer(stats.uploads_per_layer_step), rank=3),
        Figure("evictions/layer", per_layer(stats.evictions_per_layer_step), rank=5),
        *([] if from_disk else [Figure("link", rate, rank=4)]),
        Figure(
            "RAM" if from_disk else "VRAM",
            memory_text(stats),
            draw=lambda columns: memory_line(stats, columns),
            rank=1,
        ),
        Figure("", "", draw=lambda columns: share_line(stats, columns), rank=3),
    ]
    if stats.tau:
        shown.append(Figure("tau", "", draw=lambda columns: tau_line(stats, columns), rank=2))
    if stats.lookahead is not None:
        shown.append(Figure("lookahead", lookahead(stats.lookahead), rank=5))
    return shown + in_ram


def _ram_figures(ram: PlacementStats) -> list[Figure]:
    """The figures of experts in RAM next to a device; hits are of the pairs that the device does not compute."""
    if ram.lost:
        return [_RAM_LOST]
    slots = f"{ram.slots_used}/{ram.slots_total}, {format_bytes(ram.pool_bytes)}"
    return [*_disk_figures(ram), Figure("RAM slots", slots, rank=2)]


def earlier_runs(info: EngineInfo) -> str:
    """What earlier runs have left for a warm start of experts in RAM."""
    earlier = info.earlier_runs
    if earlier is None:
        return "nothing kept"
    when = datetime.fromtimestamp(earlier.kept_at_s).strftime("%Y-%m-%d %H:%M")
    return (
        f"activations of about {earlier.n_tokens:,.0f} tokens until {when}, {earlier.n_first:,} experts loaded first; "
        f"{earlier.file}"
    )


def cache_rows(stats: PlacementStats) -> list[Figure]:
    """The figures of the cache as rows of /stats: those of the panel and sums."""
    return [
        Figure("cache", f"{stats.device}, ratio {stats.cache_ratio:.2f}, policy {stats.policy}"),
        *live_cache_figures(stats),
        Figure("moved", format_bytes(stats.bytes_moved)),
    ]
