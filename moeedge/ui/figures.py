"""Figures as short texts, in one wording for the panel, the line after an answer, /stats and profile."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from moeedge.records import combine
from moeedge.units import format_bytes, format_rate

if TYPE_CHECKING:
    from moeedge.engine.types import EngineInfo, GenerationStats, StopReason
    from moeedge.policies.base import LookaheadStatus
    from moeedge.scheduler.cache_governor import CacheChoice
    from moeedge.scheduler.governor import DraftChoice
    from moeedge.scheduler.stats import PlacementStats

NONE = "-"  # stands for a figure that is not known
_MIN_PROGRESS_S = 0.5  # of a prompt, before its end is estimated
_STOP_NOTES: dict[StopReason | None, str] = {  # why an answer ended, unless the model ended it
    "length": "cut at -n tokens",
    "context": "context full",
    "interrupted": "stopped",
}
_SHORT = {"drafts": "draft", "experts on the CPU": "CPU", "waiting": "wait", "the rest": "rest"}


@dataclass(frozen=True)
class FigureRow:
    label: str
    value: str
    draw: Callable[[int], str] | None = field(default=None, compare=False)  # draws the value in so many columns
    rank: int = field(default=0, compare=False)  # where there is no room, the highest rank is left out first


def known_figures(values: Mapping[str, str]) -> list[FigureRow]:
    return [FigureRow(label, value) for label, value in values.items() if value]


def speed(value_ts: float) -> str:
    """Tokens per second with three significant digits."""
    return NONE if value_ts <= 0 else f"{value_ts:.{0 if value_ts >= 100 else 1}f} t/s"


def seconds(value_s: float) -> str:
    """A duration; milliseconds below a second."""
    if value_s <= 0:
        return NONE
    return f"{value_s * 1000:.0f} ms" if value_s < 1 else f"{value_s:.1f} s"


def percent(share: float | None) -> str:
    """A share from 0 to 1 in percent, without decimals."""
    return NONE if share is None else f"{100 * share:.0f} %"


def budget(info: EngineInfo) -> str:
    """The expert budget as every result names it; empty without one."""
    return "" if info.expert_budget is None else info.expert_budget.label_at(info.gamma)


def per_layer(count: float | None) -> str:
    """Experts per layer and step."""
    return NONE if count is None else f"{count:.{1 if count >= 10 else 2}f}"


def shares(parts_s: Mapping[str, float], total_s: float) -> list[FigureRow]:
    """Parts of a time and "the rest" in whole percents that add up to 100; none where no time has passed."""
    total_s = max(total_s, math.fsum(parts_s.values()))  # clocks of several threads may exceed it
    if total_s <= 0:
        return []
    exact = {label: 100 * part_s / total_s for label, part_s in parts_s.items()}
    exact["the rest"] = 100 - math.fsum(exact.values())
    rounded = {label: math.floor(share) for label, share in exact.items()}
    by_remainder = sorted(exact, key=lambda label: rounded[label] - exact[label])
    for label in by_remainder[: 100 - sum(rounded.values())]:
        rounded[label] += 1
    return [FigureRow(label, f"{share} %") for label, share in rounded.items()]


def time_figures(stats: PlacementStats) -> list[FigureRow]:
    """Shares of the steps' time: drafts, experts on the CPU, waiting for the device or the disk, and the rest."""
    # the device computes at the same time as the CPU: its own time is no part of these
    waiting = "waiting for the device" if stats.is_device else "waiting for the disk"
    parts_s = {"drafts": stats.draft_s, "experts on the CPU": stats.cpu_s, waiting: stats.wait_s}
    return shares(parts_s, stats.decode_s)


def decided(
    decider: CacheChoice | DraftChoice | LookaheadStatus | None, rank: int, *, full: bool = False
) -> list[FigureRow]:
    """The row of a decision; none without a decider. full: with all that it tells, for which a panel has no room."""
    if decider is None:
        return []
    decision = decider.decision
    return [FigureRow(decision.what, decision.value if full else decision.short, rank=rank)]


def time_text(parts: Sequence[FigureRow]) -> str:
    return ", ".join(f"{part.label} {part.value}" for part in parts)


def share_line(parts: Sequence[FigureRow], columns: int) -> str:
    """The parts of a time in one line, shortened where it is narrow."""
    full = time_text(parts) or NONE
    short = (replace(part, value=part.value.replace(" ", "")) for part in parts)
    shortest = " ".join(f"{_SHORT.get(part.label.partition(' for')[0], part.label)} {part.value}" for part in short)
    forms = (f"time: {full}", "time: " + re.sub(r" for the \w+", "", full), f"time: {shortest}", shortest)
    return next((form for form in forms if len(form) <= columns), shortest)


def memory_figure(stats: PlacementStats) -> FigureRow:
    """Used and total memory of the device, or the size of the slots if it has no other, or its driver does not tell."""
    if stats.vram_used_bytes is None or stats.vram_total_bytes in (None, 0, stats.pool_bytes):
        return FigureRow("memory of slots", format_bytes(stats.pool_bytes), rank=1)
    total = format_bytes(stats.vram_total_bytes)
    used = format_bytes(int(stats.vram_used_bytes)).removesuffix(total[total.index(" ") :])
    return FigureRow("VRAM" if stats.is_device else "RAM", f"{used} of {total}", rank=1)


def tier_states(stats: PlacementStats) -> list[FigureRow]:
    """What has become of the tiers that are not as they were opened."""

    def text(tier: PlacementStats) -> str:
        if tier.state == "lost":
            return "device lost: all on CPU" if tier.is_device else "RAM lost: mapped file"
        shrunk, fallen = f"shrunk to {tier.slots_total:,} slots {tier.place}", "fallen back to the CPU" * tier.is_device
        return {"fallen back": fallen, "shrunk": shrunk}.get(tier.state, "")

    return [FigureRow("", line) for line in dict.fromkeys(map(text, stats.tiers)) if line]


def tau_text(tau: Sequence[float]) -> str:
    """The range of the thresholds of the expert layers (inf: no expert is hot); empty without any."""
    if not tau:
        return ""
    low, high = (f"{round(value, 1):g}" for value in (min(tau), max(tau)))
    return low if low == high else f"{low}-{high}"


def _rate(stats: PlacementStats) -> str:
    return NONE if stats.link_bytes_per_s is None else format_rate(stats.link_bytes_per_s)


def _disk_figures(stats: PlacementStats) -> list[FigureRow]:
    """Experts in RAM: hits, what is read per token, at which rate, and how long the CPU waits for it."""
    read = NONE if stats.bytes_per_token is None else f"{stats.bytes_per_token / 1e6:.3g} MB"
    return [
        FigureRow("RAM pair hits", percent(stats.hit_rate_pairs)),
        FigureRow("read/token", read, rank=1),
        FigureRow("disk", _rate(stats), rank=2),
        FigureRow("disk wait", percent(stats.wait_share), rank=1),
    ]


def live_cache_figures(stats: PlacementStats, *, full: bool = False) -> list[FigureRow]:
    """The panel's figures of the cache; a small window drops the highest `rank` first. full: as in `decided`."""
    ram, from_disk, in_ram = stats.ram, not stats.is_device, list[FigureRow]()
    if ram is not None and not ram.lost:  # next to a device; hits are of the pairs that it does not compute
        slots = f"{ram.slots_used}/{ram.slots_total}, {format_bytes(ram.pool_bytes)}"
        in_ram = [*_disk_figures(ram), FigureRow("RAM slots", slots, rank=2)]
    if stats.lost:
        return [*tier_states(stats), *in_ram]
    shown = [
        *tier_states(stats),
        *decided(stats.choice, 2, full=full),
        *(_disk_figures(stats) if from_disk else [FigureRow("pair hits", percent(stats.hit_rate_pairs))]),
        FigureRow("expert hits", percent(stats.hit_rate_experts), rank=4 if from_disk else 1),
        FigureRow("slots", f"{stats.slots_used}/{stats.slots_total}", rank=2),
        FigureRow("loads/layer" if from_disk else "uploads/layer", per_layer(stats.uploads_per_layer_step), rank=3),
        FigureRow("evictions/layer", per_layer(stats.evictions_per_layer_step), rank=5),
        *([] if from_disk else [FigureRow("link", _rate(stats), rank=4)]),
        memory_figure(stats),
        FigureRow("", "", draw=lambda columns: share_line(time_figures(stats), columns), rank=3),
        FigureRow("tau", tau_text(stats.tau), rank=2),
        *decided(stats.lookahead, 5, full=full),
    ]
    return [figure for figure in shown if figure.value or figure.draw] + in_ram


def earlier_runs(info: EngineInfo) -> str:
    """The activations that earlier runs have left for a warm start of experts in RAM."""
    if (earlier := info.earlier_runs) is None:
        return "nothing kept"
    when = datetime.fromtimestamp(earlier.kept_at_s).strftime("%Y-%m-%d %H:%M")
    return (
        f"activations of about {earlier.n_tokens:,.0f} tokens until {when}, {earlier.n_first:,} experts loaded first; "
        f"{earlier.file}"
    )


def cache_rows(stats: PlacementStats) -> list[FigureRow]:
    """The figures of the cache as rows of /stats: those of the panel and sums."""
    parts, busy = time_figures(stats), ""
    if parts and stats.is_device:  # in parallel with the CPU
        busy = f"{percent(min(stats.device_s / stats.decode_s, 1))} of that time"
    return [
        FigureRow("cache", f"{stats.device}, ratio {stats.cache_ratio:.2f}, policy {stats.policy}"),
        *(figure for figure in live_cache_figures(stats, full=True) if figure.value),
        *known_figures({"moved": format_bytes(stats.bytes_moved), "time": time_text(parts), "device busy": busy}),
    ]


def turn_line(
    info: EngineInfo, stats: GenerationStats, reason: StopReason | None, cache: PlacementStats | None = None
) -> str:
    """The line after an answer: length, speed, wait, drafts; and what is lossy, off or cut short."""
    if reason == "interrupted" and stats.ttft_s == 0:
        return f"stopped after {_computed(stats)} of the prompt"
    wait_s, choices = stats.ttft_s, (None if stats.drafted else stats.choice, None if cache is None else cache.choice)
    wait = f"{wait_s:.0f} s" if wait_s >= 10 else f"{wait_s:.1f} s" if wait_s >= 0.1 else seconds(wait_s)
    decisions = [choice.decision for choice in choices if choice is not None]
    return _joined(
        _tokens(stats.generated_tokens),
        speed(stats.tg_ts) if stats.tg_ts > 0 else "",
        f"first after {wait}" if wait_s > 0 else "",
        f"{percent(stats.acceptance_rate)} of drafts accepted" if stats.drafted else "",
        budget(info),
        *(f"{each.what} {each.brief}" for each in decisions if each.chosen == "off" and each.gain is not None),
        _STOP_NOTES.get(reason, ""),
    )


def _joined(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _tokens(n_tokens: int) -> str:
    return f"{n_tokens:,} token{'s' * (n_tokens != 1)}"


def _computed(stats: GenerationStats) -> str:
    """Tokens computed of the prompt, and of how many where it was stopped before its end."""
    n = stats.prompt_tokens - stats.cached_tokens
    return _tokens(n) if stats.prefill_tokens == n else f"{stats.prefill_tokens:,} of {_tokens(n)}"


def experts(info: EngineInfo, stats: GenerationStats) -> str:
    """Distinct experts that one verification uses in a layer, of all in the layer."""
    mean = stats.experts_per_verification
    return "no experts" if not info.n_experts else NONE if mean is None else f"{mean:.1f} of {info.n_experts}"


def answer_rows(
    info: EngineInfo, stats: GenerationStats, reason: StopReason | None, cache: PlacementStats | None = None
) -> list[FigureRow]:
    """Everything about one answer, as rows of /stats; `cache` counts its decoding."""
    texts = {
        "answer": _joined(f"{_tokens(stats.generated_tokens)} at {speed(stats.tg_ts)}", _STOP_NOTES.get(reason, "")),
        "prompt": _joined(
            f"{_computed(stats)} at {speed(stats.pp_ts)}",
            f"{stats.cached_tokens:,} kept from before" if stats.cached_tokens else "",
            f"first token after {seconds(stats.ttft_s)}",
        ),
    }
    if stats.drafted:
        texts["drafts accepted"] = f"{percent(stats.acceptance_rate)} ({stats.accepted:,} of {stats.drafted:,})"
        per_step = stats.tokens_per_step or 0.0, stats.drafts_per_step or 0.0
        texts["tokens per step"] = "{:.2f}, with {:.1f} drafts per step".format(*per_step)
    elif not info.gamma:
        texts["drafts"] = "off"
    if stats.choice is not None:
        texts[stats.choice.decision.what] = stats.choice.decision.value
        texts["drafts by n-grams"] = f"in {stats.ngram_steps} of {stats.steps} steps" if stats.ngram_steps else ""
    if stats.experts_per_verification is not None:
        texts["experts per layer and step"] = experts(info, stats)
    natural, share = stats.experts_natural, percent(stats.kept_probability)
    effect = "" if natural is None else f": {natural:.1f} without it, {share} of probability kept"
    texts["expert budget"] = budget(info) and budget(info) + effect
    if cache is None:
        place = "the CPU" if info.device == "none" else info.device
        texts["experts on"] = place if info.n_experts else ""
        texts["time"] = time_text(shares({"drafts": stats.draft_s, "model": stats.verify_s}, stats.decode_s))
        return known_figures(texts)
    earlier = [] if info.is_device else [FigureRow("earlier runs", earlier_runs(info))]
    return [*known_figures(texts), *cache_rows(cache), *earlier]


class Turn(NamedTuple):
    """The figures of one finished answer; info: as it was then, cache: while the answer was decoded."""

    info: EngineInfo
    stats: GenerationStats
    stop_reason: StopReason | None
    cache: PlacementStats | None = None


def total_rows(info: EngineInfo, turns: Sequence[Turn]) -> list[FigureRow]:
    """Sums over several answers, rates of the sums, the mean wait, and their budgets."""
    answers, caches = [turn.stats for turn in turns], [turn.cache for turn in turns if turn.cache is not None]
    total = replace(combine(answers), prefill_generated=sum(stats.generated_tokens > 0 for stats in answers))
    n_begun, drafts, dropped, hits = sum(stats.ttft_s > 0 for stats in answers), "", "", ""
    if total.drafted:
        drafts = (
            f"{percent(total.acceptance_rate)} of drafts accepted ({total.accepted:,} of {total.drafted:,}), "
            f"{total.tokens_per_step or 0:.2f} tokens per step"
        )
    if total.dropped_tokens:
        shifts = total.context_shifts
        dropped = f"{_tokens(total.dropped_tokens)} dropped from the context in {shifts:,} shift{'s' * (shifts > 1)}"
    if caches and (share := combine(caches).hit_rate_pairs) is not None:
        hits = f"{'pair hits' if info.is_device else 'RAM pair hits'} {percent(share)}"
    text = _joined(
        f"{_tokens(total.generated_tokens)} at {speed(total.tg_ts)}",
        f"prompts {_tokens(total.prefill_tokens)} at {speed(total.pp_ts)}",
        f"first token after {seconds(total.ttft_s / max(1, n_begun))} on average",
        drafts,
        dropped,
        *dict.fromkeys(budget(turn.info) for turn in turns),
        hits,
    )
    return [FigureRow(f"all {len(answers)} answers", text)]


def live_figures(
    info: EngineInfo,
    stats: GenerationStats,
    cache: PlacementStats | None = None,
    *,
    read: tuple[int, int] = (0, 0),
    elapsed_s: float,
    full: bool = False,
) -> list[FigureRow]:
    """The panel's figures while an answer streams, the most important first.

    read: tokens of the prompt read so far, and to be read, shown with `elapsed_s` since the call until the first token.
    full: all figures instead of those that a newcomer needs.
    """
    lossy = known_figures({"budget": budget(info).removeprefix("budget ")})  # no small window leaves it out
    if stats.ttft_s <= 0:
        return [FigureRow("reading the prompt", reading(*read, elapsed_s)), *lossy]
    drafts = ("drafts accepted", percent(stats.acceptance_rate)) if info.gamma else ("drafts", "off")
    tokens = FigureRow("tokens", f"{stats.generated_tokens:,}", rank=4)
    shown = [FigureRow("speed", speed(stats.tg_ts)), tokens, FigureRow(*drafts, rank=1), *lossy]
    if full:
        return [*shown, *_details(info, stats), *([] if cache is None else live_cache_figures(cache))]
    if cache is None:
        return shown
    shown += tier_states(cache)
    if cache.lost:
        return shown
    if cache.choice is not None and not cache.choice.pays:
        return [*shown, *decided(cache.choice, rank=2)]
    shown.append(FigureRow(f"experts {cache.place}", percent(cache.hit_rate_pairs), rank=2))
    if parts := time_figures(cache):
        shown.append(FigureRow("", "", draw=lambda columns: share_line(parts, columns), rank=3))
    return shown


def _details(info: EngineInfo, stats: GenerationStats) -> list[FigureRow]:
    natural = stats.experts_natural
    shown = [
        FigureRow("prompt", speed(stats.pp_ts), rank=4),
        FigureRow("first token", seconds(stats.ttft_s), rank=5),
        *decided(stats.choice, rank=3),
        FigureRow("tokens/step", NONE if stats.tokens_per_step is None else f"{stats.tokens_per_step:.2f}", rank=3),
        FigureRow("experts/step", experts(info, stats), rank=5),
        FigureRow("experts", info.place or "on the CPU", rank=2),
        FigureRow("without budget", "" if natural is None else f"{natural:.1f} experts/step", rank=5),
        FigureRow("probability kept", "" if natural is None else percent(stats.kept_probability), rank=4),
    ]
    return [figure for figure in shown if figure.value]


def reading(n_read: int, n_to_read: int, elapsed_s: float) -> str:
    """How much of the prompt is read, and about how long the rest takes at the rate so far."""
    text = f"{n_read:,} of {_tokens(n_to_read)}" if n_to_read else f"{elapsed_s:.1f} s"
    if 0 < n_read < n_to_read and elapsed_s >= _MIN_PROGRESS_S:
        text += f", about {max(elapsed_s / n_read * (n_to_read - n_read), 1):.0f} s left"
    return text
