"""The result of `moeedge plan`: the memory map, the context sizes, and what to do; or one JSON object."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from rich.console import Console

from moeedge.ui.tables import Column, json_text, print_table, text_column
from moeedge.units import format_bytes, format_rate

if TYPE_CHECKING:
    from moeedge.planning.beyond_ram import RamTierPlan, RamTierRow
    from moeedge.planning.estimate import EstimatedMap, EstimatedPlan, KnownModel
    from moeedge.planning.headers import ModelFacts
    from moeedge.planning.memory_map import MemoryMap, MemoryPool
    from moeedge.planning.session_plan import SessionPlan

_MIB = 2**20
_WORTH_IT = 1.1  # times the speed
_OF_ESTIMATE = ("n_ctx", "verdict", "kv_bytes", "whole_on_gpu", "device_ratio", "ram_ratio")
_OF_MAP = {
    **{key: key for key in ("n_ctx", "verdict", "kv_bytes", "compute_bytes", "whole_on_gpu")},
    **{"whole_layers": "n_whole_layers", "cache_ratio": "cache_ratio", "device_ratio": "device_ratio"},
    **{"cache_slots": "budget.n_slots", "pool_bytes": "budget.pool_bytes"},
}
_FITS = {"fits": "yes", "from disk": "from disk", "does not fit": "no"}


def print_plan(plan: SessionPlan, console: Console) -> None:
    """Tables and notes; `console` must not interpret markup, since names of files and devices are not ours."""
    _print_answer(plan, console, on_gpu=plan.machine.device.kind == "gpu")
    _print_facts("model", plan.model, console)
    if plan.draft is not None:
        _print_facts("draft", plan.draft, console)
    has_device = plan.machine.device.kind != "none" and plan.model.n_experts > 0
    _print_map(plan, [Column("experts on device", "device_ratio", ".1%")] if has_device else [], console)
    console.print(_largest_context(plan))
    for note in plan.notes:
        console.print(note)
    if plan.ram_tier is not None:
        console.print()
        _print_ram_tier(plan.ram_tier, console)
    _print_command(plan.command, console)


def _print_answer(plan: SessionPlan | EstimatedPlan, console: Console, *, on_gpu: bool) -> None:
    """Whether it fits, in a sentence. on_gpu: the device is a GPU's memory."""
    share = plan.map.device_ratio if on_gpu and len(plan.map.places) > 1 and plan.model.n_experts else 0
    also = f", with {share:.0%} of the experts on the GPU as well" if share else ""
    if plan.map.verdict == "does not fit":
        answer = "It does not fit"
    elif plan.map.verdict == "from disk":
        slow = "what has no room there is read from the disk as it is needed, which is slow"
        answer = f"It is larger than the free RAM{also}: {slow}"
    else:
        answer = "It fits entirely on the GPU" if plan.map.whole_on_gpu else f"It fits in RAM{also}"
    console.print(f"{answer} (context of {plan.map.n_ctx:,} tokens).", style="bold")
    console.print()


def _print_facts(title: str, facts: ModelFacts, console: Console) -> None:
    console.print(f"{title}: {facts.file}", soft_wrap=True)
    shape = f"{facts.description}; {facts.n_layers} layers, {_count(facts.n_weights)} weights"
    console.print(f"  {shape} of {facts.bits_per_weight:.2f} bits, context {facts.n_ctx_train:,}")
    if facts.n_experts:
        layers = f"{facts.n_expert_layers} layers with {facts.n_experts} experts, {facts.experts_per_token}"
        console.print(f"  {layers}; {_expert_sizes(facts, facts.expert_bytes)}")
    console.print(f"  read per token: {format_bytes(facts.active_bytes)}")
    if facts.memory:
        console.print(f"  {facts.memory}")


def print_estimate(plan: EstimatedPlan, console: Console) -> None:
    """The same from the catalog's facts, marked as an estimate."""
    model, shape = plan.model, plan.model.shape
    console.print(f"{plan.reason} This is an estimate from the catalog's facts.")
    console.print()
    _print_answer(plan, console, on_gpu=True)
    size = format_bytes(model.file_bytes)
    console.print(f"model: {model.name}, {size if model.is_exact else f'about {size}'}")
    if shape is not None and model.n_experts:
        layers = f"{shape.expert_layers} layers with {shape.experts} experts, {shape.used} per token"
        console.print(f"  {layers}; {_expert_sizes(model, model.experts_bytes // model.n_experts)}")
        console.print(f"  read per token: {format_bytes(model.active_bytes)}")
    if plan.draft is not None:
        about = "" if plan.draft.is_exact else "about "
        console.print(f"draft: {plan.draft.name}, {about}{format_bytes(plan.draft.file_bytes)}")
    has_gpu = plan.memory.vram_bytes and model.n_experts
    _print_map(plan, [Column("experts on GPU", "device_ratio", ".0%")] if has_gpu else [], console)
    for note in plan.notes:
        console.print(note)
    _print_command(plan.command, console)


def _print_map(plan: SessionPlan | EstimatedPlan, of_device: list[Column], console: Console) -> None:
    """What takes memory in each place; then a row per context size. of_device: its column, if there is one."""
    for place in plan.map.places:
        console.print()
        _print_place(place, plan.map, console)
    console.print()
    columns = [
        Column("context", "n_ctx", ","),
        Column("KV MiB", "kv_bytes", _mib),
        *of_device,
        Column("RAM MiB", lambda row: row.places[-1].used_bytes, _mib),
        Column("fits", lambda row: _FITS[row.verdict]),
    ]
    style = {plan.map.n_ctx: "bold"}
    print_table(console, columns, plan.contexts, style=lambda row: style.get(row.n_ctx, ""))
    console.print()


def _print_command(command: str, console: Console) -> None:
    if command:
        console.print()
        console.print(command, soft_wrap=True, style="bold")  # to be copied


def estimate_json(plan: EstimatedPlan) -> str:
    """One JSON object with keys of `plan_json`; those that only a header tells are absent."""
    model, shape = plan.model, plan.model.shape
    facts = {
        "file": model.name,
        "is_here": False,
        **{f"{part}_bytes": getattr(model, f"{part}_bytes") for part in ("file", "experts", "dense", "active")},
        "n_expert_layers": shape.expert_layers if shape else None,
        "n_experts": shape.experts if shape else None,
        "n_experts_used": shape.used if shape else None,
        "n_ctx_train": model.n_ctx_train,
    }
    drafts = None if plan.draft is None else {"file": plan.draft.name, "file_bytes": plan.draft.file_bytes}
    about = {"estimated": True, "reason": plan.reason, "model": facts, "draft": drafts}
    return _answer_json(plan, about, {})


def _answer_json(plan: SessionPlan | EstimatedPlan, about: dict[str, Any], tier: dict[str, Any]) -> str:
    return json_text(
        {
            **about,
            "plan": _map_dict(plan.map),
            "contexts": [_map_dict(row) for row in plan.contexts],
            "largest_n_ctx": plan.largest_n_ctx,
            **tier,
            "command": plan.command,
            "notes": list(plan.notes),
        }
    )


def _print_place(place: MemoryPool, chosen: MemoryMap | EstimatedMap, console: Console) -> None:
    """What takes memory in one place, in MiB; rows are (text, bytes, style)."""
    rows = []
    for line in place.lines:
        if line.spare:
            continue
        text = f"{line.what}, {chosen.n_ctx:,} tokens" if line.what.endswith("KV cache") else line.what
        text += " (in the file)" if line.mapped_bytes == line.n_bytes else ""
        rows.append((text, line.n_bytes, ""))
    rows.append(("together", place.used_bytes, "bold"))
    rows.append((f"free of {_mib(place.total_bytes)}", place.free_bytes, ""))
    if place.left_bytes >= 0:
        kept = "of which a reserve of" if place.left_bytes >= place.reserve_bytes else "less than the reserve of"
        reserve = f", {kept} {_mib(place.reserve_bytes)}" if place.reserve_bytes else ""
        rows.append((f"left{reserve}", place.left_bytes, ""))
    else:
        rows.append((f"missing ({place.verdict})", -place.left_bytes, "bold red"))
    columns = [text_column(place.name, 0, fold=True), Column("MiB", 1, _mib)]
    print_table(console, columns, rows, style=lambda row: str(row[2]))


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
        Column("expert hits", lambda row: row.hit_rate_experts, ".1%"),
        Column("MB/token", lambda row: row.bytes_per_token, ".0f", 1e-6),
        Column("limit t/s", lambda row: row.limit_ts, ".1f"),
        text_column("limited by", lambda row: row.limited_by),
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
    hits = "an assumption from other models (policy lfu, no drafts): runs of the model replace it"
    if tier.source == "kept":
        used = f"about {tier.n_kept_tokens:,.0f} tokens of earlier runs, the experts that they used most in RAM"
        hits = f"an estimate from {used}, without drafts"
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
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def _ram_tier_dict(tier: RamTierPlan | None) -> dict[str, Any] | None:
    if tier is None:
        return None
    values = dataclasses.asdict(tier) | {"hits_assumed": tier.source == "assumed"}
    values["hits_source"], rows = values.pop("source"), []
    for row in values.pop("rows"):
        disk = row.pop("disk")
        rows.append(row | {"disk_bytes_per_s": disk["bytes_per_s"], "disk_source": disk["source"]})
    return values | {"rows": rows}


def plan_json(plan: SessionPlan) -> str:
    """One JSON object; sizes in bytes."""
    device = plan.machine.device
    about = {
        "estimated": False,
        "model": _facts_dict(plan.model),
        "draft": None if plan.draft is None else _facts_dict(plan.draft),
        "device": {"kind": device.kind, "name": device.label, "measured": not plan.machine.vram_given},
        "ram_measured": not plan.machine.ram_given,
    }
    return _answer_json(plan, about, {"ram_tier": _ram_tier_dict(plan.ram_tier)})


def _facts_dict(facts: ModelFacts) -> dict[str, Any]:
    values = dataclasses.asdict(facts) | {"bits_per_weight": facts.bits_per_weight}
    for name in ("", "_by_layer"):
        values[f"n_experts_used{name}"] = values.pop(f"n_expert_used{name}")  # the key of all JSON outputs
    return values


def _map_dict(row: MemoryMap | EstimatedMap) -> dict[str, Any]:
    if hasattr(row, "ram_ratio"):
        values = {key: getattr(row, key) for key in _OF_ESTIMATE}
    else:
        values = {key: attrgetter(path)(row) for key, path in _OF_MAP.items()}
    return values | {"places": [_place_dict(place) for place in row.places]}


def _place_dict(place: MemoryPool) -> dict[str, Any]:
    return dataclasses.asdict(place) | {
        "used_bytes": place.used_bytes,
        "reserve_bytes": place.reserve_bytes,
        "fixed_bytes": place.fixed_bytes,
        "left_bytes": place.left_bytes,
    }


def _expert_sizes(model: ModelFacts | KnownModel, n_bytes: int) -> str:
    """Of one expert, `n_bytes`, of all, and of the rest."""
    one = f"{n_bytes / _MIB:.1f} MiB" if _MIB <= n_bytes < 100 * _MIB else format_bytes(n_bytes)
    return f"an expert {one}, all {format_bytes(model.experts_bytes)}, the rest {format_bytes(model.dense_bytes)}"


def _count(n: int) -> str:
    return f"{n / 1e9:.2f} billion" if n >= 1e9 else f"{n / 1e6:.2f} million"


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / _MIB:,.1f}" if abs(n_bytes) < 100 * _MIB else f"{n_bytes / _MIB:,.0f}"
