"""The figures of an answer in words: one line after it, the panel below it, the table of /stats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeedge.ui.figures import (
    NONE,
    Figure,
    budget,
    cache_rows,
    device_name,
    earlier_runs,
    is_emulated,
    is_ram,
    live_cache_figures,
    percent,
    seconds,
    share_line,
    shares,
    speed,
    time_figures,
)

if TYPE_CHECKING:
    from moeedge.engine.types import EngineInfo, GenerationStats, StopReason
    from moeedge.scheduler.governor import DraftChoice
    from moeedge.scheduler.stats import PlacementStats

_FEW_STEPS = 16  # an estimate of fewer may be off by a factor
_MIN_PROGRESS_S = 0.5  # of a prompt, before its end is estimated


def turn_line(
    info: EngineInfo, stats: GenerationStats, reason: StopReason | None, cache: PlacementStats | None = None
) -> str:
    """The line after an answer: length, speed, wait, drafts; and what is lossy, off or cut short."""
    if reason == "interrupted" and stats.ttft_s == 0:
        return f"stopped after {_computed(stats)} of the prompt"
    parts = [_tokens(stats.generated_tokens), *([speed(stats.tg_ts)] if stats.tg_ts > 0 else [])]
    if stats.ttft_s > 0:
        parts.append(f"first after {_short_seconds(stats.ttft_s)}")
    if stats.drafted:
        parts.append(f"{percent(stats.acceptance_rate)} of drafts accepted")
    elif stats.choice is not None and stats.choice.best == 0 and stats.choice.n_measured >= _FEW_STEPS:
        parts.append("drafts off, they do not pay here")
    if info.expert_budget is not None:
        parts.append(budget(info))
    if cache is not None and cache.choice is not None and not cache.choice.pays:
        parts.append("expert cache off, it does not pay here")
    return ", ".join([*parts, *_stop_note(reason)])


def _short_seconds(value_s: float) -> str:
    """Tenths of a second where that says enough."""
    return f"{value_s:.0f} s" if value_s >= 10 else f"{value_s:.1f} s" if value_s >= 0.1 else seconds(value_s)


def _stop_note(reason: StopReason | None) -> list[str]:
    """Why the answer ended, unless the model ended it."""
    notes = {"length": "cut at -n tokens", "context": "context full", "interrupted": "stopped"}
    return [notes[reason]] if reason in notes else []


def _tokens(n_tokens: int) -> str:
    return f"{n_tokens:,} token" if n_tokens == 1 else f"{n_tokens:,} tokens"


def _prompt(stats: GenerationStats) -> str:
    """Tokens computed of the prompt, and tokens of it that the KV cache still held."""
    parts = [f"{_computed(stats)} at {speed(stats.pp_ts)}"]
    parts += [f"{stats.cached_tokens:,} kept from before"] if stats.cached_tokens else []
    return ", ".join([*parts, f"first token after {seconds(stats.ttft_s)}"])


def _computed(stats: GenerationStats) -> str:
    """Tokens computed of the prompt, and of how many where it was stopped before its end."""
    asked = stats.prompt_tokens - stats.cached_tokens
    return _tokens(asked) if stats.prefill_tokens == asked else f"{stats.prefill_tokens:,} of {_tokens(asked)}"


def acceptance(stats: GenerationStats) -> str:
    """Accepted of drafted tokens."""
    rate = stats.acceptance_rate
    return NONE if rate is None else f"{percent(rate)} ({stats.accepted:,} of {stats.drafted:,})"


def draft_length(choice: DraftChoice) -> str:
    """The draft length that pays by what steps have cost, and how much; trials of others are left out."""
    if choice.speed_up is None or choice.n_measured < _FEW_STEPS:
        return "measuring"
    if choice.ends_early:
        return f"as many as pay, {choice.speed_up:.2f} times the speed without, by estimate"
    if choice.best == 0:
        return f"off, {choice.other} would give {choice.other_speed_up:.2f} times the speed, by estimate"
    return f"{choice.best} of {choice.gamma_max}, {choice.speed_up:.2f} times the speed without, by estimate"


def experts(info: EngineInfo, stats: GenerationStats) -> str:
    """Distinct experts that one verification uses in a layer, of all in the layer."""
    if info.n_experts == 0:
        return "no experts"
    mean = stats.experts_per_verification
    return NONE if mean is None else f"{mean:.1f} of {info.n_experts}"


def answer_rows(
    info: EngineInfo, stats: GenerationStats, reason: StopReason | None, cache: PlacementStats | None = None
) -> list[Figure]:
    """Everything about one answer, as rows of /stats; `cache` counts its decoding."""
    length = ", ".join([f"{_tokens(stats.generated_tokens)} at {speed(stats.tg_ts)}", *_stop_note(reason)])
    rows = [Figure("answer", length), Figure("prompt", _prompt(stats))]
    if stats.drafted:
        rows.append(Figure("drafts accepted", acceptance(stats)))
        rows.append(
            Figure("tokens per step", f"{stats.tokens_per_step:.2f}, with {stats.drafts_per_step:.1f} drafts per step")
        )
    elif not info.gamma:
        rows.append(Figure("drafts", "off"))
    if stats.choice is not None:
        rows.append(Figure("draft length", draft_length(stats.choice)))
        if stats.ngram_steps:
            rows.append(Figure("drafts by n-grams", f"in {stats.ngram_steps} of {stats.steps} steps"))
    if stats.experts_per_verification is not None:
        rows.append(Figure("experts per layer and step", experts(info, stats)))
    if info.expert_budget is not None:
        natural, kept = stats.experts_natural, percent(stats.kept_probability)
        effect = "" if natural is None else f": {natural:.1f} without it, {kept} of probability kept"
        rows.append(Figure("expert budget", budget(info) + effect))
    if cache is None:
        rows += [Figure("experts on", "the CPU" if info.device == "none" else info.device)] if info.n_experts else []
        parts = shares({"drafts": stats.draft_s, "model": stats.verify_s}, stats.decode_s)
        return [*rows, Figure("time", ", ".join(f"{part.label} {part.value}" for part in parts))] if parts else rows
    rows += cache_rows(cache)
    if is_ram(info.device):
        rows.append(Figure("earlier runs", earlier_runs(info)))
    return rows


def total_rows(
    info: EngineInfo,
    answers: Sequence[GenerationStats],
    caches: Sequence[PlacementStats] = (),
    budgets: Sequence[str] = (),
) -> list[Figure]:
    """Sums over several answers, rates of the sums, the mean wait, and their budgets."""
    decoded = sum(max(stats.generated_tokens - 1, 0) for stats in answers)
    decode_s = sum(stats.decode_s for stats in answers)
    prefilled = sum(stats.prefill_tokens for stats in answers)
    prefill_s = sum(stats.prefill_s for stats in answers)
    drafted = sum(stats.drafted for stats in answers)
    accepted = sum(stats.accepted for stats in answers)
    parts = [
        f"{_tokens(sum(stats.generated_tokens for stats in answers))} at {speed(decoded / decode_s if decode_s else 0)}"
    ]
    parts.append(f"prompts {_tokens(prefilled)} at {speed(prefilled / prefill_s if prefill_s else 0)}")
    parts.append(f"first token after {seconds(sum(stats.ttft_s for stats in answers) / len(answers))} on average")
    if drafted:
        parts.append(f"{percent(accepted / drafted)} of drafts accepted ({accepted:,} of {drafted:,})")
        parts.append(f"{decoded / sum(stats.steps for stats in answers):.2f} tokens per step")
    dropped = sum(stats.dropped_tokens for stats in answers)
    if dropped:
        shifts = sum(stats.context_shifts for stats in answers)
        parts.append(f"{_tokens(dropped)} dropped from the context in {shifts:,} shift{'s'[: shifts > 1]}")
    parts += budgets
    pairs = sum(cache.pairs for cache in caches)
    if pairs:
        label = "RAM pair hits" if is_ram(info.device) else "pair hits"
        parts.append(f"{label} {percent(sum(cache.pairs_hit for cache in caches) / pairs)}")
    return [Figure(f"all {len(answers)} answers", ", ".join(parts))]


def live_figures(
    info: EngineInfo,
    stats: GenerationStats,
    cache: PlacementStats | None = None,
    *,
    n_read: int = 0,
    n_to_read: int = 0,
    elapsed_s: float,
    full: bool = False,
) -> list[Figure]:
    """The panel's figures while an answer streams, the most important first.

    n_read, n_to_read: tokens of the prompt, shown with `elapsed_s` since the call until the first token. full: all
    figures instead of those that a newcomer needs.
    """
    if stats.ttft_s <= 0:
        return [Figure("reading the prompt", reading(n_read, n_to_read, elapsed_s)), *_lossy(info)]
    shown = [Figure("speed", speed(stats.tg_ts)), Figure("tokens", f"{stats.generated_tokens:,}", rank=4)]
    drafts = ("drafts accepted", percent(stats.acceptance_rate)) if info.gamma else ("drafts", "off")
    shown.append(Figure(*drafts, rank=1))
    shown += _lossy(info)
    if full:
        shown += _details(info, stats)
        return shown + ([] if cache is None else live_cache_figures(cache))
    if cache is None:
        return shown
    if cache.lost or (cache.ram is not None and cache.ram.lost):
        return shown + [figure for figure in live_cache_figures(cache) if not figure.label]
    if cache.choice is not None and not cache.choice.pays:
        shown.append(Figure("expert cache", "off, it does not pay", rank=2))
        return shown
    name = device_name(cache.device)
    place = "in RAM" if is_ram(cache.device) else f"on {'the emulated GPU' if is_emulated(cache) else name}"
    shown.append(Figure(f"experts {place}", percent(cache.hit_rate_pairs), rank=2))
    parts = time_figures(cache)
    if parts:
        shown.append(Figure("", "", draw=lambda columns: share_line(parts, columns), rank=3))
    return shown


def _lossy(info: EngineInfo) -> list[Figure]:
    """The budget, which no small window leaves out."""
    return [] if info.expert_budget is None else [Figure("budget", budget(info).removeprefix("budget "))]


def _details(info: EngineInfo, stats: GenerationStats) -> list[Figure]:
    shown = [
        Figure("prompt", speed(stats.pp_ts), rank=4),
        Figure("first token", seconds(stats.ttft_s), rank=5),
        *([Figure("draft length", draft_length(stats.choice), rank=3)] if stats.choice is not None else []),
        Figure("tokens/step", f"{stats.tokens_per_step:.2f}" if stats.steps else NONE, rank=3),
        Figure("experts/step", experts(info, stats), rank=5),
        Figure("experts on", "the CPU" if info.device == "none" else device_name(info.device), rank=2),
    ]
    if stats.experts_natural is not None:
        shown.append(Figure("without budget", f"{stats.experts_natural:.1f} experts/step", rank=5))
        shown.append(Figure("probability kept", percent(stats.kept_probability), rank=4))
    return shown


def reading(n_read: int, n_to_read: int, elapsed_s: float) -> str:
    """How much of the prompt is read, and about how long the rest takes at the rate so far."""
    text = f"{n_read:,} of {_tokens(n_to_read)}" if n_to_read else f"{elapsed_s:.1f} s"
    if 0 < n_read < n_to_read and elapsed_s >= _MIN_PROGRESS_S:
        text += f", about {max(elapsed_s / n_read * (n_to_read - n_read), 1):.0f} s left"
    return text
