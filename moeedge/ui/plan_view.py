"""What `moeedge plan` prints: the memory map, the contexts beside it, and what to do; or one JSON object."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from moeedge.planning.headers import ModelFacts
from moeedge.planning.memory_map import MemoryMap, Place
from moeedge.planning.plan import Plan
from moeedge.units import format_bytes

_MIB = 2**20


def print_plan(plan: Plan, console: Console) -> None:
    """Tables on standard output; file names and devices are not ours: no markup."""
    _print_facts("model", plan.model, console)
    if plan.draft is not None:
        _print_facts("draft", plan.draft, console)
    for place in plan.map.places:
        console.print()
        console.print(_place_table(place, plan.map))
    console.print()
    console.print(_context_table(plan))
    console.print()
    console.print(_largest(plan))
    for note in plan.notes:
        console.print(note)
    if plan.command:
        console.print()
        console.print(plan.command, soft_wrap=True, style="bold")  # to be copied


def _print_facts(title: str, facts: ModelFacts, console: Console) -> None:
    console.print(f"{title}: {facts.file}", soft_wrap=True)
    shape = f"{facts.description}; {facts.n_layers} layers, {_count(facts.n_weights)} weights"
    console.print(f"  {shape} of {facts.bits_per_weight:.2f} bits, context {facts.n_ctx_train:,}")
    if facts.n_experts:
        console.print(
            f"  {facts.n_expert_layers} layers with {facts.n_experts} experts, {facts.n_expert_used} per token; "
            f"an expert {_size(facts.expert_bytes)}, all {format_bytes(facts.experts_bytes)}, the rest "
            f"{format_bytes(facts.dense_bytes)}"
        )
    console.print(f"  read per token: {format_bytes(facts.active_bytes)}")
    if facts.memory:
        console.print(f"  {facts.memory}")


def _place_table(place: Place, chosen: MemoryMap) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", min_width=44)
    table.add_column(place.name, overflow="fold")
    table.add_column("MiB", justify="right", no_wrap=True)
    for line in place.lines:
        what = f"{line.what}, {chosen.n_ctx:,} tokens" if line.what.endswith("KV cache") else line.what
        what += " (in the file)" if line.mapped_bytes == line.n_bytes else ""
        table.add_row(what, _mib(line.n_bytes))
    table.add_section()
    table.add_row("together", _mib(place.used_bytes), style="bold")
    table.add_row(f"free of {_mib(place.total_bytes)}", _mib(place.free_bytes))
    if place.left_bytes >= 0:
        table.add_row("left", _mib(place.left_bytes))
    elif place.verdict == "fits":
        table.add_row("missing of the reserve", _mib(-place.left_bytes))
    else:
        table.add_row(f"missing ({place.verdict})", _mib(-place.left_bytes), style="bold red")
    return table


def _context_table(plan: Plan) -> Table:
    """One row per context size: KV, what of the experts the device holds, and whether it fits."""
    has_device = plan.machine.device.kind != "none" and plan.model.n_experts > 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("context", "KV MiB", *(["experts on device"] if has_device else []), "RAM MiB", "fits"):
        table.add_column(column, justify="right", overflow="fold")
    for found in plan.contexts:
        ratio = [f"{found.cache_ratio:.1%}"] if has_device else []
        style = "bold" if found.n_ctx == plan.map.n_ctx else ""
        fits = {"fits": "yes", "from disk": "from disk", "does not fit": "no"}[found.verdict]
        kv, ram = _mib(found.kv_bytes), _mib(found.places[-1].used_bytes)
        table.add_row(f"{found.n_ctx:,}", kv, *ratio, ram, fits, style=style)
    return table


def _largest(plan: Plan) -> str:
    if not plan.largest_n_ctx:
        return "No context fits."
    trained = " (what it was trained with)" if plan.largest_n_ctx == plan.model.n_ctx_train else ""
    return f"Largest context that fits: {plan.largest_n_ctx:,} tokens{trained}."


def print_plan_json(plan: Plan) -> None:
    """One JSON object on standard output; sizes in bytes."""
    device = plan.machine.device
    record: dict[str, Any] = {
        "model": _facts_dict(plan.model),
        "draft": None if plan.draft is None else _facts_dict(plan.draft),
        "device": {"kind": device.kind, "name": device.label, "measured": not plan.machine.vram_given},
        "ram_measured": not plan.machine.ram_given,
        "plan": _map_dict(plan.map),
        "contexts": [_map_dict(one) for one in plan.contexts],
        "largest_n_ctx": plan.largest_n_ctx,
        "command": plan.command,
        "notes": list(plan.notes),
    }
    json.dump(record, sys.stdout, ensure_ascii=False, indent=2)
    sys.stdout.write("\n")


def _facts_dict(facts: ModelFacts) -> dict[str, Any]:
    return dataclasses.asdict(facts) | {"bits_per_weight": facts.bits_per_weight}


def _map_dict(found: MemoryMap) -> dict[str, Any]:
    return {
        "n_ctx": found.n_ctx,
        "verdict": found.verdict,
        "kv_bytes": found.kv_bytes,
        "compute_bytes": found.compute_bytes,
        "whole_on_gpu": found.whole_on_gpu,
        "cache_ratio": found.cache_ratio,
        "cache_slots": found.budget.n_slots,
        "pool_bytes": found.budget.pool_bytes,
        "places": [_place_dict(place) for place in found.places],
    }


def _place_dict(place: Place) -> dict[str, Any]:
    return dataclasses.asdict(place) | {
        "used_bytes": place.used_bytes,
        "fixed_bytes": place.fixed_bytes,
        "left_bytes": place.left_bytes,
    }


def _size(n_bytes: int) -> str:
    return f"{n_bytes / _MIB:.1f} MiB" if _MIB <= n_bytes < 100 * _MIB else format_bytes(n_bytes)


def _count(n: int) -> str:
    return f"{n / 1e9:.2f} billion" if n >= 1e9 else f"{n / 1e6:.2f} million"


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / _MIB:,.1f}" if abs(n_bytes) < 100 * _MIB else f"{n_bytes / _MIB:,.0f}"
