"""The result of `moeedge plan`: the memory map, the context sizes, and what to do; or one JSON object."""

from __future__ import annotations

from rich.console import Console

from moeedge.planning.beyond_ram import RamTierPlan
from moeedge.planning.headers import ModelFacts
from moeedge.planning.memory_map import MemoryPool
from moeedge.planning.session_plan import SessionPlan
from moeedge.ui.tables import Column, print_table, text_column
from moeedge.units import format_bytes, format_rate

_MIB = 2**20
_WORTH_IT = 1.1  # times the speed
_FITS = {"fits": "yes", "from disk": "from disk", "does not fit": "no"}


def print_plan(plan: SessionPlan, console: Console) -> None:
    """Tables and notes; `console` must not interpret markup, since names of files and devices are not ours."""
    console.print(_answer(plan), style="bold")
    console.print()
    _print_facts("model", plan.model, console)
    if plan.draft is not None:
        _print_facts("draft", plan.draft, console)
    has_device = plan.machine.device.kind != "none" and plan.model.n_experts > 0
    for place in plan.map.places:
        console.print()
        _print_place(place, plan.map.n_ctx, console)
    console.print()
    columns = [
        Column("context", "n_ctx", ","),
        Column("KV MiB", "kv_bytes", _mib),
        *([Column("experts on device", "device_ratio", ".1%")] if has_device else []),
        Column("RAM MiB", lambda row: row.places[-1].used_bytes, _mib),
        Column("fits", lambda row: _FITS[row.verdict]),
    ]
    n_ctx, largest = plan.map.n_ctx, plan.largest_n_ctx
    print_table(console, columns, plan.contexts, style=lambda row: "bold" if row.n_ctx == n_ctx else "")
    trained = " (what it was trained with)" if largest == plan.model.n_ctx_train else ""
    fits = f"Largest context that fits: {largest:,} tokens{trained}." if largest else "No context fits."
    for line in ("", fits, *plan.notes):
        console.print(line)
    if plan.ram_tier is not None:
        console.print()
        _print_ram_tier(plan.ram_tier, console)
    if plan.command:
        console.print(f"\n{plan.command}", soft_wrap=True, style="bold")  # to be copied


def _answer(plan: SessionPlan) -> str:
    """Whether it fits, in a sentence."""
    memory = plan.map
    in_vram = len(memory.places) > 1 and plan.machine.device.kind == "gpu"
    share = memory.device_ratio if in_vram and plan.model.n_experts else 0.0
    context = f"(context of {memory.n_ctx:,} tokens)"
    if memory.verdict == "does not fit":
        return f"It does not fit {context}."
    on_gpu = f", with {share:.0%} of the experts on the GPU as well" if share else ""
    if memory.verdict == "from disk":
        return (
            f"It is larger than the free RAM{on_gpu}: what has no room there is read from the disk as it is needed, "
            f"which is slow {context}."
        )
    return f"It fits entirely on the GPU {context}." if memory.whole_on_gpu else f"It fits in RAM{on_gpu} {context}."


def _print_facts(title: str, facts: ModelFacts, console: Console) -> None:
    console.print(f"{title}: {facts.file}", soft_wrap=True)
    n = facts.n_weights
    weights = f"{n / 1e9:.2f} billion weights" if n >= 1e9 else f"{n / 1e6:.2f} million weights"
    shape = f"{facts.description}; {facts.n_layers} layers, {weights}"
    console.print(f"  {shape} of {facts.bits_per_weight:.2f} bits, context {facts.n_ctx_train:,}")
    if facts.n_experts:
        layers = f"{facts.n_expert_layers} layers with {facts.n_experts} experts, {facts.experts_per_token}"
        n_bytes = facts.expert_bytes
        one = f"{n_bytes / _MIB:.1f} MiB" if _MIB <= n_bytes < 100 * _MIB else format_bytes(n_bytes)
        rest = f"all {format_bytes(facts.experts_bytes)}, the rest {format_bytes(facts.dense_bytes)}"
        console.print(f"  {layers}; an expert {one}, {rest}")
    console.print(f"  read per token: {format_bytes(facts.active_bytes)}")
    if facts.memory:
        console.print(f"  {facts.memory}")


def _print_place(place: MemoryPool, n_ctx: int, console: Console) -> None:
    """The parts of the memory of one place, in MiB; rows are (text, bytes, style)."""
    rows = []
    for line in (line for line in place.lines if not line.spare):
        tokens = f", {n_ctx:,} tokens" if line.what.endswith("KV cache") else ""
        in_file = " (in the file)" if line.mapped_bytes == line.n_bytes else ""
        rows.append((line.what + tokens + in_file, line.n_bytes, ""))
    rows.append(("together", place.used_bytes, "bold"))
    rows.append((f"free of {_mib(place.total_bytes)}", place.free_bytes, ""))
    phrase = "of which a reserve of" if place.left_bytes >= place.reserve_bytes else "less than the reserve of"
    reserve = f", {phrase} {_mib(place.reserve_bytes)}" if place.reserve_bytes else ""
    missing = f"missing ({place.verdict})", -place.left_bytes, "bold red"
    rows.append((f"left{reserve}", place.left_bytes, "") if place.left_bytes >= 0 else missing)
    columns = [text_column(place.name, 0, fold=True), Column("MiB", 1, _mib)]
    print_table(console, columns, rows, style=lambda row: str(row[2]))


def _print_ram_tier(tier: RamTierPlan, console: Console) -> None:
    """A row for the machine, and one for each other disk and size of memory; then what they rest on."""
    first, *others = tier.rows
    columns = [
        Column("RAM free MiB", "ram_free_bytes", _mib),
        Column("disk", "disk.bytes_per_s", format_rate),
        Column(f"slots of {tier.n_experts:,}", "n_slots", ","),
        Column("in RAM", "ratio", ".1%"),
        Column("slots MiB", "slots_bytes", _mib),
        Column("expert hits", "hit_rate_experts", ".1%"),
        Column("MB/token", "bytes_per_token", ".0f", 1e-6),
        Column("limit t/s", "limit_ts", ".1f"),
        text_column("limited by", "limited_by"),
    ]
    title = f"experts from the disk, context {tier.n_ctx:,}"
    print_table(console, columns, tier.rows, title=title, style=lambda row: "bold" if row is first else "")
    rate = {
        "measured": "as moeedge calibrate --disk measured it",
        "given": "as given",
        "assumed": "an assumption: moeedge calibrate --disk measures it",
    }[tier.machine.disk.source]
    hits = "an assumption from other models (policy lfu, no drafts): runs of the model replace it"
    if tier.source == "kept":
        hits = (
            f"an estimate from about {tier.n_kept_tokens:,.0f} tokens of earlier runs, the experts that they used "
            "most in RAM, without drafts"
        )
    console.print(
        f"The disk's rate is {rate}. The hits are {hits}. The limit is for reading and computing at the same time, and "
        f"for memory that gives {format_rate(tier.ram_bytes_per_s)}."
    )
    if others and max(row.limit_ts for row in others) <= _WORTH_IT * first.limit_ts:
        console.print("Neither a faster disk nor more memory of these would help much.")
    elif others:  # what each single change gains
        gains = [(row, f"{row.limit_ts / first.limit_ts:.1f} times") for row in others]
        disks = [(row, gain) for row, gain in gains if row.ram_free_bytes == first.ram_free_bytes]
        sizes = [(row, gain) for row, gain in gains if row.disk == first.disk]
        parts = [f"a disk of {format_rate(row.disk.bytes_per_s)} allows {gain} the speed" for row, gain in disks]
        parts += [f"{format_bytes(row.ram_free_bytes)} of free memory {gain}" for row, gain in sizes]
        text = f"{'; '.join(parts)}."
        console.print(text[:1].upper() + text[1:])


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / _MIB:,.1f}" if abs(n_bytes) < 100 * _MIB else f"{n_bytes / _MIB:,.0f}"
