"""The result of `moeedge plan`: the memory map, the context sizes, and what to do; or one JSON object."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from moeedge.ui.tables import Column, json_text, print_table, text_column
from moeedge.units import format_bytes, format_rate

if TYPE_CHECKING:
    from moeedge.planning.beyond_ram import RamTierPlan, RamTierRow
    from moeedge.planning.estimate import EstimatedMap, EstimatedPlan
    from moeedge.planning.headers import ModelFacts
    from moeedge.planning.memory_map import MemoryMap, MemoryPool, Verdict
    from moeedge.planning.session_plan import SessionPlan

_MIB = 2**20
_WORTH_IT = 1.1  # times the speed
_FITS = {"fits": "yes", "from disk": "from disk", "does not fit": "no"}


def print_plan(plan: SessionPlan, console: Console) -> None:
    """Tables and notes; `console` must not interpret markup, since names of files and devices are not ours."""
    in_vram = len(plan.map.places) > 1 and plan.machine.device.kind == "gpu"
    share = plan.map.device_ratio if in_vram and plan.model.n_experts else None
    console.print(_answer(plan.map.verdict, share, whole=plan.map.whole_on_gpu, n_ctx=plan.map.n_ctx), style="bold")
    console.print()
    _print_facts("model", plan.model, console)
    if plan.draft is not None:
        _print_facts("draft", plan.draft, console)
    for place in plan.map.places:
        console.print()
        _print_place(place, plan.map, console)
    console.print()
    _print_contexts(plan, console)
    console.print()
    console.print(_largest_context(plan))
    for note in plan.notes:
        console.print(note)
    if plan.ram_tier is not None:
        console.print()
        _print_ram_tier(plan.ram_tier, console)
    if plan.command:
        console.print()
        console.print(plan.command, soft_wrap=True, style="bold")  # to be copied


def _answer(verdict: Verdict, share: float | None, *, whole: bool, n_ctx: int) -> str:
    """Whether it fits, in a sentence. share: of the experts, on a GPU; None: there is none, or the model is dense."""
    context = f"(context of {n_ctx:,} tokens)"
    if verdict == "does not fit":
        return f"It does not fit {context}."
    on_gpu = f", with {share:.0%} of the experts on the GPU as well" if share else ""
    if verdict == "from disk":
        return (
            f"It is larger than the free RAM{on_gpu}: what has no room there is read from the disk as it is needed, "
            f"which is slow {context}."
        )
    return f"It fits entirely on the GPU {context}." if whole else f"It fits in RAM{on_gpu} {context}."


def _print_facts(title: str, facts: ModelFacts, console: Console) -> None:
    console.print(f"{title}: {facts.file}", soft_wrap=True)
    shape = f"{facts.description}; {facts.n_layers} layers, {_count(facts.n_weights)} weights"
    console.print(f"  {shape} of {facts.bits_per_weight:.2f} bits, context {facts.n_ctx_train:,}")
    if facts.n_experts:
        console.print(
            f"  {facts.n_expert_layers} layers with {facts.n_experts} experts, {facts.n_expert_used} per token; "
            f"an expert {_expert_size(facts.expert_bytes)}, all {format_bytes(facts.experts_bytes)}, the rest "
            f"{format_bytes(facts.dense_bytes)}"
        )
    console.print(f"  read per token: {format_bytes(facts.active_bytes)}")
    if facts.memory:
        console.print(f"  {facts.memory}")


def print_estimate(plan: EstimatedPlan, console: Console) -> None:
    """The same from the catalog's facts, marked as an estimate."""
    model, shape = plan.model, plan.model.shape
    console.print(f"{plan.reason} This is an estimate from the catalog's facts.")
    console.print()
    share = plan.map.device_ratio if len(plan.map.places) > 1 and model.n_experts else None
    console.print(_answer(plan.map.verdict, share, whole=plan.map.place == "GPU", n_ctx=plan.map.n_ctx), style="bold")
    console.print()
    size = format_bytes(model.file_bytes)
    console.print(f"model: {model.name}, {size if model.is_exact else f'about {size}'}")
    if shape is not None:
        one, every = _expert_size(model.experts_bytes // model.n_experts), format_bytes(model.experts_bytes)
        console.print(
            f"  {shape.expert_layers} layers with {shape.experts} experts, {shape.used} per token; "
            f"an expert {one}, all {every}, the rest {format_bytes(model.dense_bytes)}"
        )
        console.print(f"  read per token: {format_bytes(model.active_bytes)}")
    for place in plan.map.places:
        console.print()
        _print_place(place, plan.map, console)
    console.print()
    columns = [
        Column("context", "n_ctx", ","),
        Column("KV MiB", "kv_bytes", _mib),
        *([Column("experts on GPU", "device_ratio", ".0%")] if plan.memory.vram_bytes and model.n_experts else []),
        Column("RAM MiB", lambda row: row.places[-1].used_bytes, _mib),
        Column("fits", lambda row: _FITS[row.verdict]),
    ]
    print_table(console, columns, plan.contexts, style=lambda row: "bold" if row is plan.map else "")
    console.print()
    for note in plan.notes:
        console.print(note)
    if plan.command:
        console.print()
        console.print(plan.command, soft_wrap=True, style="bold")  # to be copied


def estimate_json(plan: EstimatedPlan) -> str:
    """One JSON object with keys of `plan_json`; those that only a header tells are absent."""
    model, shape = plan.model, plan.model.shape
    facts = {
        "file": model.name,
        "is_here": False,
        "file_bytes": model.file_bytes,
        "experts_bytes": model.experts_bytes,
        "dense_bytes": model.dense_bytes,
        "active_bytes": model.active_bytes,
        "n_expert_layers": shape.expert_layers if shape else None,
        "n_experts": shape.experts if shape else None,
        "n_experts_used": shape.used if shape else None,
        "n_ctx_train": model.n_ctx_train,
    }
    return json_text(
        {
            "estimated": True,
            "reason": plan.reason,
            "model": facts,
            "draft": None,
            "plan": _estimated_map(plan.map),
            "contexts": [_estimated_map(row) for row in plan.contexts],
            "largest_n_ctx": plan.largest_n_ctx,
            "command": plan.command,
            "notes": list(plan.notes),
        }
    )


def _estimated_map(row: EstimatedMap) -> dict[str, Any]:
    return {
        "n_ctx": row.n_ctx,
        "verdict": row.verdict,
        "kv_bytes": row.kv_bytes,
        "whole_on_gpu": row.place == "GPU",
        "device_ratio": row.device_ratio,
        "ram_ratio": row.ram_ratio,
        "places": [_place_dict(place) for place in row.places],
    }


def _print_place(place: MemoryPool, chosen: MemoryMap | EstimatedMap, console: Console) -> None:
    """What takes memory in one place, in MiB; rows are (text, bytes, style)."""
    rows = []
    for line in place.lines:
        text = f"{line.what}, {chosen.n_ctx:,} tokens" if line.what.endswith("KV cache") else line.what
        text += " (in the file)" if line.mapped_bytes == line.n_bytes else ""
        rows.append((text, line.n_bytes, ""))
    rows.append(("together", place.used_bytes, "bold"))
    rows.append((f"free of {_mib(place.total_bytes)}", place.free_bytes, ""))
    if place.left_bytes >= 0:
        rows.append(("left", place.left_bytes, ""))
    elif place.verdict == "fits":
        rows.append(("missing of the reserve", -place.left_bytes, ""))
    else:
        rows.append((f"missing ({place.verdict})", -place.left_bytes, "bold red"))
    columns = [text_column(place.name, 0, fold=True), Column("MiB", 1, _mib)]
    print_table(console, columns, rows, style=lambda row: str(row[2]))


def _print_contexts(plan: SessionPlan, console: Console) -> None:
    """One row per context size: its KV cache, the experts that the device holds, and whether it fits."""
    has_device = plan.machine.device.kind != "none" and plan.model.n_experts > 0
    columns = [
        Column("context", "n_ctx", ","),
        Column("KV MiB", "kv_bytes", _mib),
        *([Column("experts on device", "device_ratio", ".1%")] if has_device else []),
        Column("RAM MiB", lambda context: context.places[-1].used_bytes, _mib),
        Column("fits", lambda context: _FITS[context.verdict]),
    ]
    style = {plan.map.n_ctx: "bold"}
    print_table(console, columns, plan.contexts, style=lambda context: style.get(context.n_ctx, ""))


def _largest_context(plan: SessionPlan) -> str:
    if not plan.largest_n_ctx:
        return "No context fits."
    trained = " (what it was trained with)" if plan.largest_n_ctx == plan.model.n_ctx_train else ""
    return f"Largest context that fits: {plan.largest_n_ctx:,} tokens{trained}."


def _print_ram_tier(tier: RamTierPlan, console: Console) -> None:
    """A row for the machine, and one for each other disk and size of memory; then what they rest on."""
    first, *others = tier.rows
    columns = [
        Column("RAM free MiB", "ram_free_bytes", _mib),
        Column("disk", lambda row: row.disk.bytes_per_s, format_rate),
        Column(f"slots of {tier.n_experts:,}", "n_slots", ","),
        Column("in RAM", "ratio", ".1%"),
        Column("slots MiB", "slots_bytes", _mib),
        Column("expert hits", lambda row: row.plain.hit_rate_experts, ".1%"),
        Column("MB/token", lambda row: row.plain.bytes_per_token, ".0f", 1e-6),
        Column("limit t/s", lambda row: row.plain.limit_ts, ".1f"),
        text_column("limited by", lambda row: row.plain.limited_by),
    ]
    if first.drafted is not None:
        columns += [
            Column(f"{tier.n_drafts} drafts: expert hits", lambda row: row.drafted.hit_rate_experts, ".1%"),
            Column("MB/token", lambda row: row.drafted.bytes_per_token, ".0f", 1e-6),
            Column("limit t/s", lambda row: row.drafted.limit_ts, ".1f"),
            text_column("limited by", lambda row: row.drafted.limited_by),
        ]
    title = f"experts from the disk, context {tier.n_ctx:,}"
    print_table(console, columns, tier.rows, title=title, style=lambda row: "bold" if row is first else "")
    console.print(_ram_tier_basis(tier))
    if others:
        best = max(others, key=lambda row: row.limit_ts)
        if best.limit_ts > _WORTH_IT * first.limit_ts:
            console.print(_what_helps(first, others))
        else:
            console.print("Neither a faster disk nor more memory of these would help much.")


def _ram_tier_basis(tier: RamTierPlan) -> str:
    """What the figures rest on."""
    disk = tier.machine.disk
    rate = {
        "measured": "as moeedge calibrate --disk measured it",
        "given": "as given",
        "assumed": "an assumption: moeedge calibrate --disk measures it",
    }[disk.source]
    hits = (
        "an assumption from other models (policy lfu, no drafts): --trace FILE replays the model's own routing, with "
        "drafts"
    )
    if tier.source == "trace":
        drafts = f"; {tier.n_drafts} drafts give {tier.tokens_per_step:.2f} tokens per step" if tier.n_drafts else ""
        hits = f"of a replay of {tier.trace} (policy lfu{drafts})"
    elif tier.source == "kept":
        hits = (
            f"an estimate from about {tier.n_kept_tokens:,.0f} tokens of earlier runs, the experts that they used "
            "most in RAM, without drafts: --trace FILE replays the model's own routing, with drafts"
        )
    return (
        f"The disk's rate is {rate}. The hits are {hits}. The limit is for reading and computing at the same time, and "
        f"for memory that gives {format_rate(tier.ram_bytes_per_s)}."
    )


def _what_helps(first: RamTierRow, others: Sequence[RamTierRow]) -> str:
    """The gain of each single change."""
    parts = [
        f"a disk of {format_rate(row.disk.bytes_per_s)} allows {row.limit_ts / first.limit_ts:.1f} times the speed"
        for row in others
        if row.ram_free_bytes == first.ram_free_bytes
    ]
    parts += [
        f"{format_bytes(row.ram_free_bytes)} of free memory {row.limit_ts / first.limit_ts:.1f} times"
        for row in others
        if row.disk == first.disk
    ]
    return f"{'; '.join(parts)}."[:1].upper() + f"{'; '.join(parts)}."[1:]


def _ram_tier_dict(tier: RamTierPlan | None) -> dict[str, Any] | None:
    if tier is None:
        return None
    values = dataclasses.asdict(tier) | {"hits_assumed": tier.source == "assumed"}
    values["hits_source"], values["trace"] = values.pop("source"), tier.trace or None
    rows = []
    for row in values.pop("rows"):
        disk, plain, drafted = row.pop("disk"), row.pop("plain"), row.pop("drafted")
        row |= plain | {f"draft_{key}": None if drafted is None else drafted[key] for key in plain}
        rows.append(row | {"disk_bytes_per_s": disk["bytes_per_s"], "disk_source": disk["source"]})
    return values | {"rows": rows}


def plan_json(plan: SessionPlan) -> str:
    """One JSON object; sizes in bytes."""
    device = plan.machine.device
    return json_text(
        {
            "estimated": False,
            "model": _facts_dict(plan.model),
            "draft": None if plan.draft is None else _facts_dict(plan.draft),
            "device": {"kind": device.kind, "name": device.label, "measured": not plan.machine.vram_given},
            "ram_measured": not plan.machine.ram_given,
            "plan": _map_dict(plan.map),
            "contexts": [_map_dict(context) for context in plan.contexts],
            "largest_n_ctx": plan.largest_n_ctx,
            "ram_tier": _ram_tier_dict(plan.ram_tier),
            "command": plan.command,
            "notes": list(plan.notes),
        }
    )


def _facts_dict(facts: ModelFacts) -> dict[str, Any]:
    values = dataclasses.asdict(facts) | {"bits_per_weight": facts.bits_per_weight}
    values["n_experts_used"] = values.pop("n_expert_used")  # the key of all JSON outputs
    return values


def _map_dict(memory_map: MemoryMap) -> dict[str, Any]:
    return {
        "n_ctx": memory_map.n_ctx,
        "verdict": memory_map.verdict,
        "kv_bytes": memory_map.kv_bytes,
        "compute_bytes": memory_map.compute_bytes,
        "whole_on_gpu": memory_map.whole_on_gpu,
        "whole_layers": memory_map.n_whole_layers,
        "cache_ratio": memory_map.cache_ratio,
        "device_ratio": memory_map.device_ratio,
        "cache_slots": memory_map.budget.n_slots,
        "pool_bytes": memory_map.budget.pool_bytes,
        "places": [_place_dict(place) for place in memory_map.places],
    }


def _place_dict(place: MemoryPool) -> dict[str, Any]:
    return dataclasses.asdict(place) | {
        "used_bytes": place.used_bytes,
        "fixed_bytes": place.fixed_bytes,
        "left_bytes": place.left_bytes,
    }


def _expert_size(n_bytes: int) -> str:
    return f"{n_bytes / _MIB:.1f} MiB" if _MIB <= n_bytes < 100 * _MIB else format_bytes(n_bytes)


def _count(n: int) -> str:
    return f"{n / 1e9:.2f} billion" if n >= 1e9 else f"{n / 1e6:.2f} million"


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / _MIB:,.1f}" if abs(n_bytes) < 100 * _MIB else f"{n_bytes / _MIB:,.0f}"
