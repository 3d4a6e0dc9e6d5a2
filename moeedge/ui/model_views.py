"""The results of `moeedge list`, `pull`, `show` and `plan`: tables, labels and values for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from moeedge.ui.console import say, show_figures
from moeedge.ui.figures import known_figures
from moeedge.ui.tables import Column, json_text, print_table, text_column
from moeedge.units import format_bytes, format_rate, format_weights, visible

if TYPE_CHECKING:
    from moeedge.hub.catalog import Choice, Starter
    from moeedge.hub.local import ListedModel
    from moeedge.hub.remote import RemoteFile, WantedModel
    from moeedge.planning.estimate import FittingModel, FittingModels
    from moeedge.planning.headers import ModelCard, ModelFacts
    from moeedge.planning.memory_map import MemoryPool
    from moeedge.planning.session_plan import RamTierPlan, SessionPlan


def _model_size(model: ListedModel) -> str | None:
    n_bytes = model.about_bytes if model.size_bytes is None else model.size_bytes
    return None if n_bytes is None else f"{'~' if model.size_bytes is None else ''}{format_bytes(n_bytes)}"


_HERE = {"complete": "yes", "partial": "", "absent": "no"}
_MODEL_COLUMNS = (
    text_column("name", lambda model: model.name if model.verified else f"{model.name}*"),
    Column("size", _model_size),
    text_column("here", lambda model: _HERE[model.state] or f"{format_bytes(model.have_bytes)} of it", fold=True),
    text_column("licence", "licence", fold=True),
    text_column("drafts", lambda model: ", ".join(model.drafts) or ("is a draft" if model.draft_of else ""), fold=True),
)


def print_models(
    models: list[ListedModel], folder: Path, console: Console, *, everything: bool, starter: Starter | None = None
) -> None:
    """One row per model, then the notes on single models. starter: to be offered where no real model is here."""
    print_table(console, _MODEL_COLUMNS, models)
    console.print()
    if everything:
        notes = {model.note: model.name for model in reversed(models) if model.note}  # once for all its types
        for note, name in reversed(notes.items()):
            console.print(f"{name}: {note}", soft_wrap=not console.is_terminal)
    if any(not model.verified for model in models):
        console.print("*: the file's name could not be confirmed when the catalog was written.")
    console.print(f"Downloads are stored in {folder}.", soft_wrap=True)
    if not everything:
        console.print("moeedge list --all shows what the catalog offers; moeedge pull NAME downloads it.")
    if starter is not None and len(models) <= 1:  # the toy pair
        size = "" if starter.size_bytes is None else f", {format_bytes(starter.size_bytes)}"
        console.print(f"A first real model{size}: {starter.command}", soft_wrap=True)


_PLACES = {
    "GPU": "GPU: entirely on the GPU.",
    "GPU and RAM": "RAM + GPU: experts in RAM, that share of them on the GPU as well; all other weights on the GPU.",
    "RAM": "RAM: in RAM, computed by the CPU.",
    "disk": "disk: larger than RAM; experts are read from the file as needed, slower the fewer have room in RAM.",
}


def _fit(row: FittingModel) -> str:
    """Its place, and the share of the experts there."""
    if row.map.place == "disk" and row.map.ram_ratio < 1:
        return f"disk, RAM {row.map.ram_ratio:.0%}"
    return f"RAM + GPU {row.map.device_ratio:.0%}" if row.map.place == "GPU and RAM" else row.map.place


def print_fits(found: FittingModels, console: Console, *, everything: bool) -> None:
    """One row per model that runs; then what the places mean."""
    columns = [
        replace(each, value=partial(lambda column, row: column.read(row.model), each)) for each in _MODEL_COLUMNS[:4]
    ]
    columns.insert(3, text_column("runs in", _fit))
    memory, too_large = found.memory, "No model of this list runs with that."
    vram = f"a GPU with {format_bytes(memory.vram_bytes)} and " if memory.vram_bytes else ""
    if found.rows:
        print_table(console, columns, found.rows)
        console.print()
        too_large = f"{found.n_others} more are too large." if found.n_others > 1 else "One more is too large."
    others = f" {too_large}" if found.n_others else ""
    say(console, f"With {vram}{format_bytes(memory.ram_bytes)} of RAM free.{others}", style="")
    for place in dict.fromkeys(row.map.place for row in found.rows):
        say(console, _PLACES[place], style="")
    say(console, "Estimates for a context of 8,192 tokens; moeedge plan -m NAME is exact.", style="")
    if not everything:
        say(console, "moeedge list --all --fits SIZE includes what the catalog offers.", style="")


def fits_json(models: FittingModels) -> str:
    """A JSON list of the models that run, the best placed first; `fit` has ratios from 0 to 1."""
    names = ("place", "n_ctx", "device_ratio", "ram_ratio")
    fits = ({name: getattr(row.map, name) for name in names} | {"estimated": True} for row in models.rows)
    return json_text([asdict(row.model) | {"fit": fit} for row, fit in zip(models.rows, fits, strict=True)])


def download_lines(wanted: Sequence[WantedModel], missing: Sequence[RemoteFile]) -> Iterator[str]:
    """A sentence per model: its name, its licence, and how much of it is downloaded."""
    for model in wanted:
        licence = f", licence {model.licence}" if model.licence else ""
        if model.local is not None:
            yield f"{model.role} {model.name}{licence}: here already."
            continue
        files = _missing_files(model, missing)
        total, have = sum(file.size_bytes for file in files), sum(file.have_bytes for file in files)
        rest = f", {format_bytes(have)} of it here" if have else ""
        yield f"{model.role} {model.name}{licence}: {format_bytes(total)} from {model.variant.repo}{rest}."
        if not model.variant.verified:
            facts = "the catalog's facts about these files are not confirmed"
            yield f"{model.name}: {facts}; only the hub's hash counts."
        if any(file.sha256 is None for file in files):
            yield f"{model.name}: the hub names no SHA-256; only the size can be checked."


def print_files(wanted: Sequence[WantedModel], missing: Sequence[RemoteFile], console: Console) -> None:
    """The path of each model, or the files that a download would bring."""
    for model in wanted:
        if model.local is not None:
            console.print(visible(f"{model.role} {model.local}"), soft_wrap=True)
            continue
        for file in _missing_files(model, missing):
            have = f", {format_bytes(file.have_bytes)} here" if file.have_bytes else ""
            what = f"{model.role} hf:{file.repo}:{file.path} {format_bytes(file.size_bytes)}{have}"
            console.print(visible(what), soft_wrap=True)


def files_json(wanted: Sequence[WantedModel], missing: Sequence[RemoteFile]) -> str:
    rows = []
    for model in wanted:
        names, files = ("commit", "size_bytes", "sha256", "have_bytes"), _missing_files(model, missing)
        rows.append(
            {name: getattr(model, name) for name in ("role", "name", "licence")}
            | {name: getattr(model.variant, name) for name in ("repo", "revision")}
            | {"path": None if model.local is None else str(model.local)}
            | {"missing": [{"file": file.path} | {name: getattr(file, name) for name in names} for file in files]}
        )
    return json_text(rows)


def _missing_files(model: WantedModel, missing: Sequence[RemoteFile]) -> list[RemoteFile]:
    names = set() if model.local is not None else {(model.variant.repo, file.path) for file in model.variant.files}
    return [file for file in missing if (file.repo, file.path) in names]


def print_card(card: ModelCard, console: Console) -> None:
    facts = card.facts
    experts = (
        f"{facts.n_experts} per layer in {facts.n_expert_layers} layers, {facts.experts_per_token}; "
        f"{format_bytes(facts.expert_bytes)} each, {format_bytes(facts.experts_bytes)} together"
    )
    source = " (by the catalog)" if card.licence_source == "catalog" else ""
    rows = {
        "file": visible(facts.file),
        "name": visible(card.name),
        "architecture": facts.architecture,
        "weights": f"{format_weights(facts.n_weights)}, {format_bytes(facts.file_bytes)}",
        "quantization": f"{card.quantization}, {facts.bits_per_weight:.2f} bits per weight",
        "context": f"{facts.n_ctx_train:,} tokens at most",
        "layers": f"{facts.n_layers}, {card.n_embd:,} values wide",
        "experts": experts if facts.n_experts else "none: a dense model",
        "read per token": format_bytes(facts.active_bytes),
        "memory": facts.memory,
        "drafts": ", ".join([*(["its own head (-md mtp)"] if card.has_head else []), *card.drafts]),
        "chat template": f"{len(card.template):,} characters (--template)" if card.template else "none",
        "licence": visible(card.licence) + source if card.licence else "not named in the file",
    }
    show_figures(console, known_figures(rows))
    if facts.missing_bytes and not facts.is_here:
        console.print("Not on this machine, but for its header.")
    elif facts.missing_bytes:
        console.print(f"Incomplete here: {format_bytes(facts.missing_bytes)} of its weights are missing.")


def card_json(card: ModelCard) -> str:
    """One object; sizes in bytes."""
    return json_text(asdict(card) | {"bits_per_weight": card.facts.bits_per_weight})


def print_entry(choice: Choice, reason: str, console: Console) -> None:
    """The catalog's facts about a model whose header cannot be read. reason: why not."""
    entry, variant, shape = choice.entry, choice.variant, choice.entry.shape
    size = variant.size_bytes or variant.about_bytes
    console.print(f"{visible(reason)} From the catalog:")
    rows = {
        "name": choice.name,
        "about": visible(entry.about),
        "file": f"hf:{variant.repo}:{variant.files[0].path}" if variant.files else str(variant.local),
        "size": "" if size is None else f"{'' if variant.size_bytes else 'about '}{format_bytes(size)}",
        "weights": "" if shape is None else format_weights(shape.weights),
        "context": "" if shape is None or shape.context is None else f"{shape.context:,} tokens at most",
        "drafts": ", ".join(entry.drafts),
        "note": visible(entry.note),
        "licence": visible(entry.licence),
    }
    show_figures(console, known_figures(rows))


def entry_json(choice: Choice, reason: str) -> str:
    entry = asdict(choice.entry)
    del entry["variants"]
    variant = asdict(choice.variant) | {"size_bytes": choice.variant.size_bytes}
    variant["local"] = None if choice.variant.local is None else str(choice.variant.local)
    return json_text({"from_catalog": True, "reason": reason, **entry, "variant": variant})


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
    console.print(visible(f"{title}: {facts.file}"), soft_wrap=True)
    n = facts.n_weights
    weights = f"{n / 1e9:.2f} billion weights" if n >= 1e9 else f"{n / 1e6:.2f} million weights"
    shape = f"{facts.description}; {facts.n_layers} layers, {weights}"
    console.print(f"  {visible(shape)} of {facts.bits_per_weight:.2f} bits, context {facts.n_ctx_train:,}")
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
